//! TFRecord files of `tf.train.Example`s and `tf.train.SequenceExample`s: `*.tfrecord`, `*.tfrecords`, `…-00000-of-00010`, plain or packed with gzip or zlib.
//!
//! A record is its length (u64, little-endian), the masked CRC-32C of the length, the data, and the masked CRC-32C of the
//! data. Opening hops from length to length and keeps the offsets in an index file; the checksum of the data is checked
//! whenever a record is read. A feature becomes a column by its name; what it holds is told from the first few records.

use crate::error::ReadError;
use crate::files::{Contents, DataFile, Listed, damaged};
use crate::format::{Format, OpenError, OpenedFiles, Reader};
use crate::index_file::IndexPlace;
use crate::record::{Record, RecordColumn, UnreadColumn};
use crate::shards::{self, Headers, Shards};
use crate::stream::StreamKind;
use crate::unpack::Unpacked;
use columns::{Feature, Values};
use kolo_base::masked_crc32c;
use kolo_graph::settings::Settings;
use std::cell::RefCell;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

mod columns;
mod example;
mod stream;
#[cfg(test)]
mod tests;

pub const FORMAT: Format = Format {
    name: "tfrecord",
    doc: "TFRecord files of `tf.train.Example`s and `tf.train.SequenceExample`s",
    extensions: &["tfrecord", "tfrecords"],
    sniff,
    open,
};

/// As a stream.
pub const STREAM: StreamKind = StreamKind { format: FORMAT.name, is_shard, open: stream::open };

/// Length and its checksum.
const HEADER_BYTES: u64 = 12;
/// The checksum of the data.
const FOOTER_BYTES: u64 = 4;
/// Bytes of one record.
const RECORD_BYTES_MAX: u64 = 1 << 30;
/// Records that the columns are told from, of those that can be read.
const LOOKED_AT: usize = 16;
/// Records that are tried for that.
const TRIED: usize = 1024;
const INDEX_KIND: &str = "tfrecord 1";

fn is_shard(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let stem = name.trim_end_matches(".gz").trim_end_matches(".zst").trim_end_matches(".zlib");
    stem.ends_with(".tfrecord") || stem.ends_with(".tfrecords") || is_numbered(stem)
}

/// Whether a name ends like `-00000-of-00010`.
fn is_numbered(name: &str) -> bool {
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    name.rsplit_once("-of-").is_some_and(|(before, count)| {
        is_number(count) && before.rsplit_once('-').is_some_and(|(_, number)| is_number(number))
    })
}

fn sniff(path: &Path, head: &[u8]) -> bool {
    match path.is_dir() {
        true => shards::holds(path, is_shard),
        false => length(head).is_some(),
    }
}

/// The length at the start of these bytes, if its checksum is right.
fn length(header: &[u8]) -> Option<u64> {
    let (length, rest) = header.split_first_chunk::<8>()?;
    let (checksum, _) = rest.split_first_chunk::<4>()?;
    (masked_crc32c(length) == u32::from_le_bytes(*checksum)).then(|| u64::from_le_bytes(*length))
}

/// What a thread needs while it reads a record.
#[derive(Default)]
struct Scratch {
    bytes: Vec<u8>,
    /// Which columns the record has.
    is_there: Vec<bool>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Records of TFRecord files.
#[derive(Debug)]
struct TfRecords {
    columns: Vec<RecordColumn>,
    /// How each column is read, sorted by name as the columns are.
    features: Vec<Feature>,
    unread: Vec<UnreadColumn>,
    /// What was left out of the files.
    notes: Vec<String>,
    shards: Shards,
    /// The number of records up to and with each shard.
    ends: Vec<usize>,
    /// Where the data of each record start in its shard, and how many bytes they are.
    places: Vec<(u64, u32)>,
}

fn open(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let index_place = IndexPlace::of(settings)?;
    let mut opened = TfRecords {
        columns: vec![],
        features: vec![],
        unread: vec![],
        notes: vec![],
        shards: Shards::new(),
        ends: vec![],
        places: vec![],
    };
    let Listed { files, notes } = shards::expand(files, is_shard, settings)?;
    opened.notes = notes;
    for file in &files {
        let (contents, is_packed) = unpack(file, settings)?;
        let payload = index_place.load_or_make(file, INDEX_KIND, || index(&contents))?;
        match places(&payload, contents.bytes()) {
            Some(places) => opened.places.extend(places),
            None => opened.places.extend(places(&index(&contents)?, contents.bytes()).unwrap_or_default()),
        }
        opened.ends.push(opened.places.len());
        opened.shards.push(file, contents, is_packed);
    }
    if opened.places.is_empty() {
        return Err(ReadError::new("it has no record", "write some, or name another file")
            .in_file(&files[0].path)
            .into());
    }
    opened.find_columns()?;
    Ok(Box::new(opened))
}

/// The contents of a file, unpacked if they are packed with gzip, zstd or zlib.
fn unpack(file: &DataFile, settings: &Settings) -> Result<(Contents, bool), OpenError> {
    let (contents, is_packed) = shards::unpack(file, settings)?;
    let mut head = [0; HEADER_BYTES as usize];
    if is_packed || contents.bytes() < HEADER_BYTES {
        return Ok((contents, is_packed));
    }
    contents.read_at(0, &mut head)?;
    if !is_zlib(&head) {
        return Ok((contents, false));
    }
    let most = settings.count("unpacked_max", crate::files::UNPACKED_BYTES_MAX as usize, 1)? as u64;
    let failed = |error: io::Error| ReadError::io(&file.path, &error);
    let mut target = tempfile::tempfile().map_err(failed)?;
    let bytes = io::copy(&mut Unpacked::zlib(file.open()?).take(most + 1), &mut target).map_err(failed)?;
    if bytes > most {
        let hint = "check the file, or raise `data.unpacked_max`";
        return Err(ReadError::new(format!("it unpacks to more than {most} bytes"), hint)
            .in_file(&file.path)
            .at(most)
            .into());
    }
    Ok((Contents::made(&file.path, target)?, true))
}

/// Whether a file that starts so is packed with zlib.
fn is_zlib(head: &[u8]) -> bool {
    let is_packed = |first: u8, second: u8| first & 0x0f == 8 && u16::from_be_bytes([first, second]).is_multiple_of(31);
    head.len() >= HEADER_BYTES as usize && length(head).is_none() && is_packed(head[0], head[1])
}

/// The length in a header at `offset`, if it makes sense.
fn checked_length(header: &[u8], path: &Path, offset: u64) -> Result<u64, ReadError> {
    let Some(length) = length(header) else {
        let what = match offset {
            0 => "this is not a TFRecord file: the checksum of the first length is wrong",
            _ => "the checksum of a record's length is wrong",
        };
        return Err(damaged(path, offset, what));
    };
    match length > RECORD_BYTES_MAX {
        true => Err(damaged(path, offset, format!("a record has {length} bytes; {RECORD_BYTES_MAX} are allowed"))),
        false => Ok(length),
    }
}

/// The lengths of all records, one u32 each.
fn index(contents: &Contents) -> Result<Vec<u8>, ReadError> {
    let mut headers = Headers::new(contents);
    let mut lengths = Vec::new();
    let mut offset = 0;
    while offset < contents.bytes() {
        let header = headers.read(offset, HEADER_BYTES as usize)?;
        let length = checked_length(header, contents.path(), offset)?;
        contents.check(offset + HEADER_BYTES, length + FOOTER_BYTES)?;
        lengths.extend((length as u32).to_le_bytes());
        offset += HEADER_BYTES + length + FOOTER_BYTES;
    }
    Ok(lengths)
}

/// Where the data of the records are, if the index fits a file of so many bytes.
fn places(index: &[u8], bytes: u64) -> Option<Vec<(u64, u32)>> {
    let (lengths, rest) = index.as_chunks::<4>();
    let mut offset = 0;
    let places = lengths.iter().map(|length| {
        let (start, length) = (offset + HEADER_BYTES, u32::from_le_bytes(*length));
        offset = start + u64::from(length) + FOOTER_BYTES;
        (start, length)
    });
    let places = places.collect();
    (rest.is_empty() && offset == bytes).then_some(places)
}

impl TfRecords {
    /// Reads the bytes of record `at`, and says of which file they are and where they start.
    fn data(&self, at: usize, bytes: &mut Vec<u8>) -> Result<(Contents, u64), ReadError> {
        let shard = self.ends.partition_point(|end| *end <= at);
        let contents = self.shards.contents(shard)?;
        let (start, length) = self.places[at];
        contents.read_into(start, u64::from(length) + FOOTER_BYTES, bytes)?;
        check_data(bytes, contents.path(), start)?;
        bytes.truncate(length as usize);
        Ok((contents, start))
    }

    fn find_columns(&mut self) -> Result<(), ReadError> {
        let mut found = columns::Found::default();
        let (mut bytes, mut bad) = (Vec::new(), None);
        for at in 0..self.places.len().min(TRIED) {
            let looked = self.data(at, &mut bytes).and_then(|(contents, start)| {
                found.add(&bytes).map_err(|error| malformed(contents.path(), start, &bytes, &error))
            });
            bad = bad.or(looked.err());
            if found.records() == LOOKED_AT {
                break;
            }
        }
        // A bad record is an error when it is read, so that it can be skipped.
        if let (0, Some(bad)) = (found.records(), bad) {
            return Err(bad);
        }
        (self.columns, self.features, self.unread) = found.columns();
        if self.columns.is_empty() {
            return Err(no_columns(self.shards.contents(0)?.path(), &self.unread));
        }
        Ok(())
    }
}

/// None of the features is a column.
fn no_columns(path: &Path, unread: &[UnreadColumn]) -> ReadError {
    let hint = "write features of one type, with as many numbers or with one text in every record";
    ReadError::new(columns::no_columns(unread), hint).in_file(path).at(HEADER_BYTES)
}

/// The data of a record, if they are those that the checksum behind them is of.
fn check_data<'b>(bytes: &'b [u8], path: &Path, start: u64) -> Result<&'b [u8], ReadError> {
    let (data, footer) = bytes.split_at(bytes.len().saturating_sub(FOOTER_BYTES as usize));
    match masked_crc32c(data).to_le_bytes() == footer {
        true => Ok(data),
        false => {
            let message = format!("the checksum of a record of {} bytes is wrong", data.len());
            Err(damaged(path, start, message))
        }
    }
}

/// Reads the features of a record that starts here.
fn read_features(
    features: &[Feature],
    data: &[u8],
    (path, start): (&Path, u64),
    is_there: &mut Vec<bool>,
    record: &mut Record,
) -> Result<(), ReadError> {
    is_there.clear();
    is_there.resize(features.len(), false);
    let mut wrong = None;
    let parsed = example::features(data, |name, list| {
        if let Ok(column) = features.binary_search_by(|feature| feature.name.as_bytes().cmp(name)) {
            let read = features[column].read(list, column, record)?;
            is_there[column] = read == Values::Read;
            wrong = wrong.take().or(read.wrong());
        }
        Ok(())
    });
    parsed.map_err(|error| malformed(path, start, data, &error))?;
    // Not before, so that the buffers of the others are used again.
    (0..is_there.len()).filter(|column| !is_there[*column]).for_each(|column| record.missing(column));
    match wrong {
        Some(message) => {
            let hint = "write the record again; all records need features of one shape";
            Err(ReadError::new(message, hint).in_file(path).at(start))
        }
        None => Ok(()),
    }
}

fn malformed(path: &Path, start: u64, record: &[u8], error: &example::Malformed) -> ReadError {
    let offset = start + (record.len() - error.before_end.min(record.len())) as u64;
    let message = format!("the record is not a `tf.train.Example`: {}", error.what);
    ReadError::new(message, "write the record again, or name a file of examples").in_file(path).at(offset)
}

impl Reader for TfRecords {
    fn columns(&self) -> &[RecordColumn] {
        &self.columns
    }

    fn unread(&self) -> &[UnreadColumn] {
        &self.unread
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn len(&self) -> usize {
        self.places.len()
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        SCRATCH.with_borrow_mut(|Scratch { bytes, is_there }| {
            let (contents, start) = self.data(at, bytes)?;
            read_features(&self.features, bytes, (contents.path(), start), is_there, record)
        })
    }

    fn files(&self) -> Vec<PathBuf> {
        self.shards.paths()
    }

    fn place(&self, at: usize) -> Option<(PathBuf, u64)> {
        let shard = self.ends.partition_point(|end| *end <= at);
        Some((self.shards.contents(shard).ok()?.path().into(), self.places[at].0))
    }
}
