//! Samples that come front to back: pipes, and files that are read as streams (`data.stream`). No index is made, nothing is
//! unpacked to a temporary file, and the order is that of a shuffle buffer.
//!
//! ```text
//! ByteStream ──► RawRecords ──► StreamWalk: what the shuffle buffer holds ──► StreamFormat::parse ──► FileSource
//!  unpacked       one record's bytes                 │
//!                                           BufferedOrder (pure)
//! ```
//!
//! The order is a function of the seed, the epoch and the number of samples, and needs no data: every worker computes the same
//! one, walks the whole stream, keeps the bytes of what is in the buffer, and decodes only its own samples. A run that goes on
//! in the middle computes the order up to there, and passes over what the buffer does not hold without decoding it.

mod bytes;
mod files;
mod order;
mod source;
#[cfg(test)]
mod tests;
mod walk;

pub use bytes::ByteStream;
pub(crate) use bytes::read_head;
pub(crate) use files::{StreamFiles, StreamReader};
pub use order::BufferedOrder;
pub(crate) use source::StreamSource;
pub use walk::{Route, Walk};

use crate::error::ReadError;
use crate::files::DataFile;
use crate::format::{OpenError, Reader};
use crate::formats::{csv, jsonl, tfrecord, webdataset};
use crate::record::{Record, RecordColumn, UnreadColumn};
use kolo_graph::settings::{SettingError, Settings};
use std::fmt;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

/// One record as its file holds it: bytes that nothing was decoded of.
#[derive(Clone, Debug, Default)]
pub struct RawRecord {
    pub file: Option<Arc<Path>>,
    /// Where it starts in the file, unpacked.
    pub offset: u64,
    /// Of text: the line that it starts at.
    pub line: u64,
    pub bytes: Vec<u8>,
    /// Of a record with several parts, such as cells or members of an archive: each of them.
    pub parts: Vec<RawPart>,
}

/// One part of a record.
#[derive(Clone, Debug, Default)]
pub struct RawPart {
    pub name: String,
    /// Where it starts in the file, unpacked.
    pub offset: u64,
    /// Where it ends in the bytes of the record.
    pub end: usize,
}

impl RawRecord {
    /// Makes it an empty one that starts here.
    pub(crate) fn restart(&mut self, file: &Arc<Path>, offset: u64, line: u64) {
        self.file = Some(Arc::clone(file));
        (self.offset, self.line) = (offset, line);
        self.bytes.clear();
        self.parts.clear();
    }

    /// What it takes in memory.
    pub(crate) fn held_bytes(&self) -> usize {
        let names: usize = self.parts.iter().map(|part| part.name.len()).sum();
        size_of::<Self>() + self.bytes.len() + names + self.parts.len() * size_of::<RawPart>()
    }

    pub(crate) fn path(&self) -> &Path {
        self.file.as_deref().unwrap_or(Path::new(""))
    }

    /// The parts with their bytes.
    pub(crate) fn each_part(&self) -> impl Iterator<Item = (&RawPart, &[u8])> {
        let starts = [0].into_iter().chain(self.parts.iter().map(|part| part.end));
        self.parts.iter().zip(starts).map(|(part, start)| (part, &self.bytes[start..part.end]))
    }

    /// What is wrong with it.
    pub(crate) fn wrong(&self, message: impl Into<String>, hint: &str) -> ReadError {
        ReadError::new(message, hint).in_file(self.path()).at(self.offset)
    }
}

/// The records of one file, one after the other.
pub trait RawRecords: Send {
    /// Reads the next record, if there is one.
    fn next(&mut self, raw: &mut RawRecord) -> Result<bool, ReadError>;

    /// Passes over the next record, if there is one.
    fn skip(&mut self) -> Result<bool, ReadError>;
}

/// How records of a format are found and read. It learns about the columns from the first records only.
pub trait StreamFormat: Send + Sync + fmt::Debug {
    /// The records of a file, from its start.
    fn records(&self, bytes: ByteStream) -> Result<Box<dyn RawRecords>, ReadError>;

    /// Looks at one of the first records. One that makes no sense is an error when it is read.
    fn look(&mut self, raw: &RawRecord);

    /// The columns, after the last look.
    fn columns(&mut self) -> Result<Vec<RecordColumn>, ReadError>;

    /// As `Reader::unread`, after the columns were asked for.
    fn unread(&self) -> Vec<UnreadColumn> {
        Vec::new()
    }

    /// Reads the columns of a record.
    fn parse(&self, raw: &RawRecord, record: &mut Record) -> Result<(), ReadError>;

    /// As `Reader::kind_reason`.
    fn kind_reason(&self, _column: usize) -> Option<String> {
        None
    }

    /// As `Reader::is_index`.
    fn is_index(&self, _column: usize) -> bool {
        false
    }

    /// As `Reader::notes`, after the columns were asked for.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The start of the first file.
#[derive(Debug)]
pub struct StreamHead<'h> {
    pub path: &'h Path,
    /// In lower case, without that of a packing.
    pub extension: &'h str,
    /// Unpacked: [`HEAD_BYTES`], or two lines if they are longer, but at most [`HEAD_BYTES_MAX`].
    pub bytes: &'h [u8],
}

/// As much of a stream as a format may look at to find out how to read it, unless two lines are longer.
pub const HEAD_BYTES: usize = 64 << 10;
/// And at most: as much as two lines may have.
pub const HEAD_BYTES_MAX: usize = 32 << 20;
/// Records that the columns are told from.
pub const LOOKED_AT: usize = 1000;
/// What `data.shuffle_buffer` is by default.
const SHUFFLE_BUFFER: usize = 1000;
const SHUFFLE_BUFFER_MAX: usize = 1 << 30;

/// A format that can be read front to back.
#[derive(Clone, Copy, Debug)]
pub struct StreamKind {
    /// The name of the format.
    pub format: &'static str,
    /// Whether a file of a directory belongs to its data.
    pub is_shard: fn(&Path) -> bool,
    pub open: fn(&StreamHead<'_>, &Settings) -> Result<Box<dyn StreamFormat>, OpenError>,
}

/// Every format that can be read front to back.
pub const STREAMS: &[StreamKind] = &[webdataset::STREAM, tfrecord::STREAM, jsonl::STREAM, csv::STREAM];

/// What the job says about streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamSettings {
    /// Whether files are read as streams too.
    pub files: bool,
    /// Samples in the shuffle buffer.
    pub buffer: usize,
    /// Samples of an epoch, if the job says it.
    pub samples: Option<usize>,
}

impl StreamSettings {
    /// Reads the keys of `[data]`. Those that mean something for streams only are refused without one.
    pub fn read(settings: &Settings, is_pipe: bool) -> Result<Option<Self>, SettingError> {
        let files = settings.bool("stream", false)?;
        if files || is_pipe {
            let buffer = settings.count_in("shuffle_buffer", SHUFFLE_BUFFER, 1, SHUFFLE_BUFFER_MAX)?;
            let samples = settings.peek("samples").is_some().then(|| settings.count("samples", 1, 1)).transpose()?;
            return Ok(Some(Self { files, buffer, samples }));
        }
        match ["shuffle_buffer", "samples"].into_iter().find(|key| settings.peek(key).is_some()) {
            Some(key) => {
                let hint = match key {
                    "samples" => "write `stream = true`, or leave it out: the files say how many samples there are",
                    _ => "write `stream = true`, or leave it out: all samples are shuffled then",
                };
                Err(settings.wrong(key, "is for files that are read as a stream", hint))
            }
            None => Ok(None),
        }
    }
}

/// Standard input, as `data.source` names it.
pub const STANDARD_INPUT: &str = "-";

/// Whether `data.source` names something that can be read only once: standard input or a named pipe.
pub fn is_pipe(source: &str) -> bool {
    source == STANDARD_INPUT || std::fs::metadata(source).is_ok_and(|meta| meta.file_type().is_fifo())
}

/// The records of what `name` names, read front to back; asking for one before the last starts anew.
pub fn open_records(name: &str, settings: &Settings) -> Result<Box<dyn Reader>, OpenError> {
    let stream = StreamSettings { files: true, buffer: 1, samples: None };
    Ok(Box::new(StreamReader::new(Arc::new(StreamFiles::open(name, settings, "source", stream)?))))
}

/// A pipe in the place of a file.
pub(crate) fn pipe_file(source: &str) -> DataFile {
    DataFile { path: source.into(), bytes: 0, modified_ns: 0, is_directory: false }
}
