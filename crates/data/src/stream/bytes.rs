//! The bytes of a file or a pipe, front to back, unpacked.

use super::{HEAD_BYTES, HEAD_BYTES_MAX, STANDARD_INPUT};
use crate::error::ReadError;
use crate::files::{DataFile, damaged};
use crate::unpack::{MAGIC_BYTES, Packing, Unpacked};
use kolo_base::ShownPath;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

/// Bytes that end two lines.
const LINE_BREAKS: usize = 4;
/// What is read at once.
const BLOCK_BYTES: usize = 256 << 10;

/// The first bytes of a stream: so many, or more if they do not hold two lines, but never more than `most`.
pub(crate) fn read_head(stream: &mut dyn Read, bytes: usize, most: usize) -> io::Result<Vec<u8>> {
    let (mut head, mut wanted) = (Vec::new(), bytes);
    loop {
        let looked_at = head.len();
        stream.take((wanted - looked_at) as u64).read_to_end(&mut head)?;
        // Two of them end a line on some systems.
        let breaks = head.iter().filter(|byte| b"\r\n".contains(byte)).take(LINE_BREAKS).count();
        if head.len() < wanted || breaks == LINE_BREAKS || wanted >= most {
            return Ok(head);
        }
        wanted = most.min(2 * wanted);
    }
}

/// Bytes front to back. It knows where it is.
pub struct ByteStream {
    path: Arc<Path>,
    inner: Inner,
    offset: u64,
    /// The number of all bytes, if it is known.
    end: Option<u64>,
}

enum Inner {
    /// Passing over bytes of a plain file does not read them.
    File(BufReader<File>),
    Other(BufReader<Box<dyn Read + Send>>),
}

impl fmt::Debug for ByteStream {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}, byte {}", self.path.shown(), self.offset)
    }
}

impl ByteStream {
    /// The contents of a file that is still the one that was listed.
    pub fn of_file(file: &DataFile) -> Result<Self, ReadError> {
        let failed = |error: io::Error| ReadError::io(&file.path, &error);
        let contents = file.plain_contents()?;
        let opened = contents.file().try_clone().map_err(failed)?;
        let mut start = BufReader::with_capacity(BLOCK_BYTES, opened);
        let magic = start.fill_buf().map_err(failed)?;
        if Packing::of(magic) != Packing::None {
            return Self::of_reader(&file.path, Box::new(start));
        }
        Ok(Self { path: file.path.clone().into(), inner: Inner::File(start), offset: 0, end: Some(file.bytes) })
    }

    /// What comes through a pipe, from here on.
    pub fn of_pipe(path: &Path) -> Result<Self, ReadError> {
        let failed = |error: io::Error| ReadError::io(path, &error);
        let pipe = match path == Path::new(STANDARD_INPUT) {
            true => File::from(io::stdin().as_fd().try_clone_to_owned().map_err(failed)?),
            false => File::open(path).map_err(failed)?,
        };
        Self::of_reader(path, Box::new(pipe))
    }

    /// What this reads, unpacked if it is packed.
    pub fn of_reader(path: &Path, mut reader: Box<dyn Read + Send>) -> Result<Self, ReadError> {
        let failed = |error: io::Error| ReadError::io(path, &error);
        let mut magic = Vec::new();
        reader.by_ref().take(MAGIC_BYTES as u64).read_to_end(&mut magic).map_err(failed)?;
        let whole = Cursor::new(magic.clone()).chain(reader);
        let unpacked: Box<dyn Read + Send> = match Packing::of(&magic) {
            Packing::Gzip => Box::new(Unpacked::gzip(whole)),
            Packing::Zstd => Box::new(Unpacked::zstd(whole).map_err(failed)?),
            Packing::None => Box::new(whole),
        };
        let inner = Inner::Other(BufReader::with_capacity(BLOCK_BYTES, unpacked));
        Ok(Self { path: path.into(), inner, offset: 0, end: None })
    }

    /// The first lines, and the stream with them still before it.
    pub(crate) fn with_head(mut self) -> Result<(Vec<u8>, Self), ReadError> {
        let head = read_head(&mut self, HEAD_BYTES, HEAD_BYTES_MAX).map_err(|error| self.failed(&error))?;
        let (path, end) = (Arc::clone(&self.path), self.end);
        let whole: Box<dyn Read + Send> = Box::new(Cursor::new(head.clone()).chain(self));
        let inner = Inner::Other(BufReader::with_capacity(BLOCK_BYTES, whole));
        Ok((head, Self { path, inner, offset: 0, end }))
    }

    pub fn path(&self) -> &Arc<Path> {
        &self.path
    }

    /// Where the next byte is.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Whether no byte is left.
    pub fn is_at_end(&mut self) -> Result<bool, ReadError> {
        let is_at_end = self.fill_buf().map(<[u8]>::is_empty);
        is_at_end.map_err(|error| self.failed(&error))
    }

    /// Whether so many bytes can follow, as far as that is known.
    pub fn check(&self, offset: u64, len: u64) -> Result<(), ReadError> {
        match offset.checked_add(len).is_some_and(|end| end <= self.end.unwrap_or(u64::MAX / 4)) {
            true => Ok(()),
            false => Err(self.cut_short(offset, len)),
        }
    }

    /// Replaces what `out` holds by the next bytes. Memory is taken as they come.
    pub fn read_into(&mut self, len: u64, out: &mut Vec<u8>) -> Result<(), ReadError> {
        out.clear();
        self.append(len, out)
    }

    /// Appends the next bytes.
    pub fn append(&mut self, len: u64, out: &mut Vec<u8>) -> Result<(), ReadError> {
        let offset = self.offset;
        self.check(offset, len)?;
        let read = self.by_ref().take(len).read_to_end(out).map_err(|error| self.failed(&error))?;
        if read as u64 == len { Ok(()) } else { Err(self.cut_short(offset, len)) }
    }

    /// Passes over the next bytes.
    pub fn skip(&mut self, len: u64) -> Result<(), ReadError> {
        let offset = self.offset;
        self.check(offset, len)?;
        let passed = match &mut self.inner {
            Inner::File(file) => file.seek_relative(len as i64).map(|()| len),
            Inner::Other(other) => io::copy(&mut other.take(len), &mut io::sink()),
        };
        self.offset += passed.map_err(|error| self.failed(&error))?;
        if self.offset == offset + len { Ok(()) } else { Err(self.cut_short(offset, len)) }
    }

    fn failed(&self, error: &io::Error) -> ReadError {
        ReadError::io(&self.path, error).at(self.offset)
    }

    fn cut_short(&self, offset: u64, len: u64) -> ReadError {
        let end = self.end.unwrap_or(self.offset);
        damaged(&self.path, offset, format!("{len} bytes are expected here, but the data end at byte {end}"))
    }
}

impl Read for ByteStream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = match &mut self.inner {
            Inner::File(file) => file.read(out),
            Inner::Other(other) => other.read(out),
        }?;
        self.offset += read as u64;
        Ok(read)
    }
}

impl BufRead for ByteStream {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        match &mut self.inner {
            Inner::File(file) => file.fill_buf(),
            Inner::Other(other) => other.fill_buf(),
        }
    }

    fn consume(&mut self, bytes: usize) {
        self.offset += bytes as u64;
        match &mut self.inner {
            Inner::File(file) => file.consume(bytes),
            Inner::Other(other) => other.consume(bytes),
        }
    }
}
