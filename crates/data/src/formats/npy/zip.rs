//! Just enough of zip for `.npz`: the list of members, where a stored one lies, and unpacking a deflated one. With zip64,
//! which NumPy writes for large arrays; without encryption and without archives in parts.

use crate::arrays::Unreadable;
use crate::error::ReadError;
use crate::files::Contents;
use flate2::read::DeflateDecoder;
use kolo_base::ByteReader;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::Arc;

const END: &[u8] = b"PK\x05\x06";
const END_BYTES: usize = 22;
const LOCATOR: &[u8] = b"PK\x06\x07";
const LOCATOR_BYTES: u64 = 20;
const END_64: &[u8] = b"PK\x06\x06";
const ENTRY: &[u8] = b"PK\x01\x02";
const ENTRY_BYTES: usize = 46;
const LOCAL: &[u8] = b"PK\x03\x04";
const LOCAL_BYTES: usize = 30;
/// The comment behind the end record has 16 bits for its length.
const COMMENT_BYTES_MAX: u64 = u16::MAX as u64;
/// What is read at once.
const BLOCK_BYTES: usize = 256 << 10;
/// Of the list of members.
const LIST_BYTES_MAX: u64 = 16 << 20;
/// Stands where the true number is in the zip64 extra field.
const IN_EXTRA: u64 = u32::MAX as u64;

#[derive(Clone, Debug)]
pub struct Member {
    pub name: String,
    encrypted: bool,
    method: u16,
    crc: u32,
    packed_bytes: u64,
    bytes: u64,
    /// Of its local header.
    pub offset: u64,
}

/// The members of an archive, in the order of its list.
pub fn members(contents: &Contents) -> Result<Vec<Member>, ReadError> {
    let (start, bytes) = list_place(contents)?;
    if bytes > LIST_BYTES_MAX {
        return Err(
            contents.damaged(start, format!("the list of members has {bytes} bytes; {LIST_BYTES_MAX} are allowed"))
        );
    }
    let mut list = Vec::new();
    contents.read_into(start, bytes, &mut list)?;
    let (mut members, mut at) = (Vec::new(), 0);
    while at < list.len() {
        let damaged = |message: &str| contents.damaged(start + at as u64, message);
        let (mut member, [name, extra, comment]) =
            Member::parse(&list[at..]).ok_or_else(|| damaged("the list of members is damaged"))?;
        let names = at + ENTRY_BYTES;
        let end = names + name + extra + comment;
        let rest = list.get(names..end).ok_or_else(|| damaged("the list of members is cut short"))?;
        let (name, rest) = rest.split_at(name);
        member.name = String::from_utf8_lossy(name).into_owned();
        member.read_extra(&rest[..extra]).ok_or_else(|| damaged("the sizes of a member are damaged"))?;
        members.push(member);
        at = end;
    }
    Ok(members)
}

/// Where the list of members lies, and its bytes.
fn list_place(contents: &Contents) -> Result<(u64, u64), ReadError> {
    let tail_bytes = contents.bytes().min(END_BYTES as u64 + COMMENT_BYTES_MAX);
    let tail_start = contents.bytes() - tail_bytes;
    let mut tail = Vec::new();
    contents.read_into(tail_start, tail_bytes, &mut tail)?;
    let fits = |at: &usize| {
        let end = &tail[*at..];
        let comment = ByteReader::at(end, 20).u16().map(usize::from);
        end.starts_with(END) && comment.is_some_and(|comment| END_BYTES + comment == end.len())
    };
    let at = (0..(tail.len() + 1).saturating_sub(END_BYTES)).rev().find(fits);
    let at = at.ok_or_else(|| contents.damaged(contents.bytes(), "it does not end as a zip archive does"))?;
    let end = tail_start + at as u64;
    let cut_short = || contents.damaged(end, "the end of the archive is damaged");
    let mut record = ByteReader::at(&tail, at + 12);
    let (Some(bytes), Some(start)) = (record.u32(), record.u32()) else { return Err(cut_short()) };
    let (bytes, start) = (u64::from(bytes), u64::from(start));
    if end >= LOCATOR_BYTES && (bytes == IN_EXTRA || start == IN_EXTRA) {
        let mut locator = [0; LOCATOR_BYTES as usize];
        contents.read_at(end - LOCATOR_BYTES, &mut locator)?;
        if locator.starts_with(LOCATOR) {
            let place = ByteReader::at(&locator, 8).u64().ok_or_else(cut_short)?;
            let mut end_64 = [0; 56];
            contents.read_at(place, &mut end_64)?;
            if !end_64.starts_with(END_64) {
                return Err(contents.damaged(place, "the end of the archive is damaged"));
            }
            let mut record = ByteReader::at(&end_64, 40);
            let (Some(bytes), Some(start)) = (record.u64(), record.u64()) else { return Err(cut_short()) };
            return Ok((start, bytes));
        }
    }
    Ok((start, bytes))
}

impl Member {
    /// From an entry of the list, without the name; and the bytes of name, extra field and comment behind it.
    fn parse(entry: &[u8]) -> Option<(Self, [usize; 3])> {
        let mut entry = ByteReader::new(entry.strip_prefix(ENTRY)?);
        entry.skip(4)?;
        let (encrypted, method) = (entry.u16()? & 1 == 1, entry.u16()?);
        entry.skip(4)?;
        let (crc, packed_bytes, bytes) = (entry.u32()?, entry.u32()?.into(), entry.u32()?.into());
        let lengths = [entry.u16()?, entry.u16()?, entry.u16()?].map(usize::from);
        entry.skip(8)?;
        let (name, offset) = (String::new(), entry.u32()?.into());
        Some((Self { name, encrypted, method, crc, packed_bytes, bytes, offset }, lengths))
    }

    /// Takes those sizes from the zip64 extra field that did not fit in the entry.
    fn read_extra(&mut self, extra: &[u8]) -> Option<()> {
        let mut extra = ByteReader::new(extra);
        while extra.rest().len() >= 4 {
            let (id, len) = (extra.u16()?, extra.u16()?);
            let mut field = ByteReader::new(extra.take(len.into())?);
            if id == 1 {
                for size in [&mut self.bytes, &mut self.packed_bytes, &mut self.offset] {
                    if *size == IN_EXTRA {
                        *size = field.u64()?;
                    }
                }
            }
        }
        Some(())
    }

    /// Where what is packed starts, and its bytes.
    pub fn place(&self, archive: &Contents) -> Result<(u64, u64), ReadError> {
        let damaged = |message: String| archive.damaged(self.offset, format!("member \"{}\" {message}", self.name));
        let mut local = [0; LOCAL_BYTES];
        archive.read_at(self.offset, &mut local)?;
        if !local.starts_with(LOCAL) {
            return Err(damaged("does not start as a member does".into()));
        }
        // Name and extra field lie before the member.
        let lengths = [26, 28].map(|at| ByteReader::at(&local, at).u16().map_or(0, u64::from));
        let start = self.offset + LOCAL_BYTES as u64 + lengths[0] + lengths[1];
        archive.check(start, self.packed_bytes)?;
        Ok((start, self.packed_bytes))
    }

    /// Contents with this member, and its range in them. The checksum is checked.
    pub fn open(&self, archive: &Contents, opened: &mut OpenedMembers) -> Result<(Contents, (u64, u64)), Unreadable> {
        let (start, packed_bytes) = self.place(archive)?;
        opened.take(self, start + packed_bytes, archive)?;
        let unread = |kind: String| {
            let message = format!("member \"{}\" is {kind}, which kolo does not read", self.name);
            let hint = "write the archive with `numpy.savez` or `numpy.savez_compressed`";
            Unreadable::kind(kind, ReadError::new(message, hint).in_file(archive.path()).at(self.offset))
        };
        match self.method {
            _ if self.encrypted => Err(unread("encrypted".into())),
            0 if self.bytes == self.packed_bytes => {
                self.check_stored(archive, start)?;
                Ok((archive.clone(), (start, self.bytes)))
            }
            0 => {
                let message = format!("member \"{}\" is stored, and its two sizes differ", self.name);
                Err(archive.damaged(self.offset, message).into())
            }
            8 => {
                let begin = opened.unpacked_bytes;
                let unpacked = self.unpack(archive, start, opened)?;
                Ok((unpacked, (begin, self.bytes)))
            }
            9 => Err(unread("compressed with deflate64".into())),
            12 => Err(unread("compressed with bzip2".into())),
            14 => Err(unread("compressed with lzma".into())),
            93 => Err(unread("compressed with zstd".into())),
            method => Err(unread(format!("compressed with method {method} of zip"))),
        }
    }

    /// Reads a stored member once, as nothing else would notice that it is damaged.
    fn check_stored(&self, archive: &Contents, start: u64) -> Result<(), ReadError> {
        let mut stored = archive.stream_from(start).take(self.bytes);
        let (mut crc, mut buffer) = (flate2::Crc::new(), vec![0; BLOCK_BYTES]);
        loop {
            let read = stored.read(&mut buffer).map_err(|error| ReadError::io(archive.path(), &error).at(start))?;
            if read == 0 {
                break;
            }
            crc.update(&buffer[..read]);
        }
        match crc.sum() == self.crc {
            true => Ok(()),
            false => Err(archive.damaged(start, format!("member \"{}\" has a wrong checksum", self.name))),
        }
    }

    fn unpack(&self, archive: &Contents, start: u64, opened: &mut OpenedMembers) -> Result<Contents, ReadError> {
        let damaged = |message: String| archive.damaged(start, format!("member \"{}\" {message}", self.name));
        let left = opened.unpacked_max - opened.unpacked_bytes;
        if self.bytes > left {
            let message = format!("member \"{}\" unpacks to {} bytes, but only {left} are left", self.name, self.bytes);
            let hint = "check the file, or raise `data.unpacked_max`";
            return Err(ReadError::new(message, hint).in_file(archive.path()).at(start));
        }
        let packed = archive.stream_from(start).take(self.packed_bytes);
        let mut unpacking = DeflateDecoder::new(packed).take(self.bytes + 1);
        let failed = |error: std::io::Error| ReadError::io(archive.path(), &error).at(start);
        let target = opened.target().map_err(failed)?;
        let (mut crc, mut buffer, mut bytes) = (flate2::Crc::new(), vec![0; BLOCK_BYTES], 0);
        loop {
            let read = unpacking.read(&mut buffer).map_err(|error| damaged(format!("does not unpack: {error}")))?;
            if read == 0 {
                break;
            }
            crc.update(&buffer[..read]);
            bytes += read as u64;
            (&*target).write_all(&buffer[..read]).map_err(failed)?;
        }
        opened.unpacked_bytes += bytes;
        if bytes != self.bytes {
            return Err(damaged(format!("does not unpack to the {} bytes that it claims", self.bytes)));
        }
        if crc.sum() != self.crc {
            return Err(damaged("has a wrong checksum".into()));
        }
        Ok(Contents::part_of(archive.path(), target, opened.unpacked_bytes))
    }
}

/// The members of an archive that were opened. What they unpack to lies in one file, as a process may have few open.
#[derive(Debug)]
pub struct OpenedMembers {
    /// Where each begins and ends in the archive.
    places: BTreeMap<u64, (u64, String)>,
    unpacked: Option<Arc<File>>,
    unpacked_bytes: u64,
    unpacked_max: u64,
}

impl OpenedMembers {
    /// None yet, and so many bytes for what all of them unpack to.
    pub fn new(unpacked_max: u64) -> Self {
        Self { places: BTreeMap::new(), unpacked: None, unpacked_bytes: 0, unpacked_max }
    }

    /// Refuses members that share bytes: then a small file would take as long as any large one, as every member is read.
    fn take(&mut self, member: &Member, end: u64, archive: &Contents) -> Result<(), ReadError> {
        let before = self.places.range(..=member.offset).next_back().filter(|(_, (end, _))| *end > member.offset);
        let after = self.places.range(member.offset..).next().filter(|(start, _)| **start < end);
        if let Some((_, (_, other))) = before.or(after) {
            let message = format!("member \"{}\" has bytes of member \"{other}\"", member.name);
            return Err(archive.damaged(member.offset, message));
        }
        self.places.insert(member.offset, (end, member.name.clone()));
        Ok(())
    }

    fn target(&mut self) -> io::Result<Arc<File>> {
        if self.unpacked.is_none() {
            self.unpacked = Some(Arc::new(tempfile::tempfile()?));
        }
        self.unpacked.clone().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}
