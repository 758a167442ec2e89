//! The members of a tar archive: names, offsets and sizes. Nothing is unpacked, and no name is ever used as a path.
//!
//! Understood are the old format, ustar, GNU (long names, sizes in base 256) and pax (`path`, `size`). Directories, links,
//! devices and sparse files are passed over. An archive must have its end marker, or it counts as cut short.

use crate::error::{ReadError, shown};
use crate::files::damaged;
use crate::shards::Headers;
use crate::stream::ByteStream;
use std::path::Path;

const BLOCK: u64 = 512;
/// Bytes of a long name or of a pax header.
const EXTENDED_BYTES_MAX: u64 = 1 << 20;

/// A regular file in an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub name: String,
    /// Where its header starts.
    pub header: u64,
    /// Where its data start.
    pub offset: u64,
    pub bytes: u64,
}

/// What headers before a member say about it.
#[derive(Default)]
struct Extended {
    name: Option<Vec<u8>>,
    bytes: Option<u64>,
    is_sparse: bool,
}

/// The bytes of an archive at rising offsets.
pub(super) trait ArchiveBytes {
    fn path(&self) -> &Path;

    /// `len` bytes from `offset` on; an error if the archive does not have them.
    fn read(&mut self, offset: u64, len: usize) -> Result<&[u8], ReadError>;

    /// Whether the archive can have this range, as far as that is known.
    fn check(&self, offset: u64, len: u64) -> Result<(), ReadError>;
}

impl ArchiveBytes for Headers<'_> {
    fn path(&self) -> &Path {
        self.contents().path()
    }

    fn read(&mut self, offset: u64, len: usize) -> Result<&[u8], ReadError> {
        Headers::read(self, offset, len)
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), ReadError> {
        self.contents().check(offset, len)
    }
}

/// An archive front to back.
#[derive(Debug)]
pub(super) struct ForwardBytes {
    stream: ByteStream,
    buffer: Vec<u8>,
}

impl ForwardBytes {
    pub fn new(stream: ByteStream) -> Self {
        Self { stream, buffer: Vec::new() }
    }

    /// Appends `len` bytes from `offset` on, which is not behind.
    pub fn append(&mut self, offset: u64, len: u64, out: &mut Vec<u8>) -> Result<(), ReadError> {
        let Some(gap) = offset.checked_sub(self.stream.offset()) else {
            return Err(damaged(self.stream.path(), offset, "the archive is not in order"));
        };
        self.stream.skip(gap)?;
        self.stream.append(len, out)
    }
}

impl ArchiveBytes for ForwardBytes {
    fn path(&self) -> &Path {
        self.stream.path()
    }

    fn read(&mut self, offset: u64, len: usize) -> Result<&[u8], ReadError> {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        let read = self.append(offset, len as u64, &mut buffer);
        self.buffer = buffer;
        read.map(|()| &self.buffer[..])
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), ReadError> {
        self.stream.check(offset, len)
    }
}

/// Walks over the members of an archive.
#[derive(Debug)]
pub(super) struct Members<B> {
    pub bytes: B,
    offset: u64,
    /// Links, devices and sparse files that were passed over.
    pub passed: u32,
}

impl<B: ArchiveBytes> Members<B> {
    pub fn new(bytes: B) -> Self {
        Self::starting_at(bytes, 0)
    }

    /// From the first header at or after `offset`, where a member ends.
    pub fn starting_at(bytes: B, offset: u64) -> Self {
        Self { bytes, offset: offset.next_multiple_of(BLOCK), passed: 0 }
    }

    fn damaged(&self, offset: u64, message: &str) -> ReadError {
        damaged(self.bytes.path(), offset, message)
    }

    /// The next regular file, or `None` at the end marker.
    pub fn next(&mut self) -> Result<Option<Member>, ReadError> {
        let mut extended = Extended::default();
        loop {
            let start = self.offset;
            let header: [u8; BLOCK as usize] = match self.bytes.read(start, BLOCK as usize)?.try_into() {
                Ok(header) => header,
                Err(_) => return Err(self.damaged(start, "a header is cut off")),
            };
            if header.iter().all(|byte| *byte == 0) {
                return Ok(None);
            }
            if !has_checksum(&header) {
                let what =
                    if start == 0 { "this is not a tar archive" } else { "the checksum of a tar header is wrong" };
                return Err(self.damaged(start, what));
            }
            let kind = header[156];
            let wrong_size = || self.damaged(start + 124, "the size of a tar member is malformed");
            let bytes = match (kind, extended.bytes) {
                (b'L' | b'K' | b'x' | b'g', _) | (_, None) => number(&header[124..136]).ok_or_else(wrong_size)?,
                (_, Some(bytes)) => bytes,
            };
            let offset = self.data_offset(start, &header)?;
            self.bytes.check(offset, bytes)?;
            self.offset = offset + bytes.next_multiple_of(BLOCK);
            match kind {
                b'L' => extended.name = Some(until_zero(&self.extended(offset, bytes)?).to_vec()),
                b'x' => self.read_pax(offset, bytes, &mut extended)?,
                b'K' | b'g' => {}
                b'0' | b'7' | 0 if !extended.is_sparse => {
                    let name = extended.name.unwrap_or_else(|| short_name(&header));
                    let name = self.checked_name(start, name)?;
                    // An old archive marks a directory by the end of its name only.
                    if name.ends_with('/') {
                        extended = Extended::default();
                        continue;
                    }
                    return Ok(Some(Member { name, header: start, offset, bytes }));
                }
                b'5' => extended = Extended::default(),
                _ => {
                    extended = Extended::default();
                    self.passed = self.passed.saturating_add(1);
                }
            }
        }
    }

    /// Where the data of a member start: after its header, and after the list of holes that follows in GNU's sparse files.
    fn data_offset(&mut self, start: u64, header: &[u8]) -> Result<u64, ReadError> {
        let mut offset = start + BLOCK;
        let mut is_continued = header[156] == b'S' && header[482] != 0;
        while is_continued {
            is_continued = self.bytes.read(offset, BLOCK as usize)?[504] != 0;
            offset += BLOCK;
        }
        Ok(offset)
    }

    fn extended(&mut self, offset: u64, bytes: u64) -> Result<Vec<u8>, ReadError> {
        if bytes > EXTENDED_BYTES_MAX {
            let message = format!("a name or extended header of {bytes} bytes; {EXTENDED_BYTES_MAX} are allowed");
            return Err(self.damaged(offset, &message));
        }
        Ok(self.bytes.read(offset, bytes as usize)?.to_vec())
    }

    /// A pax header: records of `LENGTH KEY=VALUE\n`.
    fn read_pax(&mut self, offset: u64, bytes: u64, extended: &mut Extended) -> Result<(), ReadError> {
        let data = self.extended(offset, bytes)?;
        let mut rest = until_zero(&data);
        while !rest.is_empty() {
            let place = offset + (until_zero(&data).len() - rest.len()) as u64;
            let wrong = || self.damaged(place, "an extended tar header is malformed");
            let space = rest.iter().position(|byte| *byte == b' ').ok_or_else(wrong)?;
            let length = std::str::from_utf8(&rest[..space]).ok().and_then(|text| text.parse::<usize>().ok());
            let length = length.filter(|length| (space + 2..=rest.len()).contains(length)).ok_or_else(wrong)?;
            let record = rest[space + 1..length].strip_suffix(b"\n").ok_or_else(wrong)?;
            let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(wrong)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            match key {
                b"path" => extended.name = Some(value.to_vec()),
                b"size" => {
                    let size = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
                    extended.bytes = Some(size.ok_or_else(wrong)?);
                }
                key if key.starts_with(b"GNU.sparse.") => extended.is_sparse = true,
                _ => {}
            }
            rest = &rest[length..];
        }
        Ok(())
    }

    /// The name as text. One that leads out of a directory is hostile, even though nothing is unpacked.
    fn checked_name(&self, start: u64, name: Vec<u8>) -> Result<String, ReadError> {
        let Ok(name) = String::from_utf8(name) else {
            return Err(self.damaged(start, "the name of a tar member is not UTF-8"));
        };
        if name.starts_with('/') || name.split('/').any(|part| part == "..") {
            let hint = "if you trust its source, make the archive again without such names";
            let error = ReadError::new(format!("the tar member {} lies outside of its archive", shown(&name)), hint);
            return Err(error.in_file(self.bytes.path()).at(start));
        }
        Ok(name)
    }
}

fn until_zero(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len())]
}

/// The name in a header, with the prefix of ustar.
fn short_name(header: &[u8]) -> Vec<u8> {
    let (name, prefix) = (until_zero(&header[..100]), until_zero(&header[345..500]));
    // GNU's own format has other things in the prefix; it ends its magic differently.
    match header[257..263] == *b"ustar\0" && !prefix.is_empty() {
        true => [prefix, b"/", name].concat(),
        false => name.to_vec(),
    }
}

/// A number in octal digits, or in base 256 if its first bit is set.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let mut digits = std::iter::once(field[0] & 0x7f).chain(field[1..].iter().copied());
        return digits.try_fold(0u64, |value, digit| value.checked_mul(256)?.checked_add(u64::from(digit)));
    }
    let text = std::str::from_utf8(until_zero(field)).ok()?.trim_matches(' ');
    if text.is_empty() { Some(0) } else { u64::from_str_radix(text, 8).ok() }
}

/// Whether the sum of the header's bytes is the one that it says; old programs added signed bytes.
fn has_checksum(header: &[u8; BLOCK as usize]) -> bool {
    let Some(wanted) = number(&header[148..156]) else { return false };
    let counted = || header.iter().enumerate().map(|(at, byte)| if (148..156).contains(&at) { b' ' } else { *byte });
    let unsigned: u64 = counted().map(u64::from).sum();
    let signed: i64 = counted().map(|byte| i64::from(byte as i8)).sum();
    unsigned == wanted || u64::try_from(signed) == Ok(wanted)
}
