//! JSON Lines: an object per line. Its keys are the columns.
//!
//! All lines are read once at opening: where each starts, and what the values of each key are. Numbers and lists of numbers
//! keep their kind and shape, `true` and `false` are 1 and 0, strings are text; anything else is text as well, written as
//! JSON. `NaN` and `Infinity`, which Python writes, are numbers; NaN alone is a missing value, as null is. A line that is no object is an error when it is read, so that it can be skipped.

mod columns;
mod stream;

use crate::ahead::ReadAhead;
use crate::error::ReadError;
use crate::files::{Contents, DataFile};
use crate::format::{Format, OpenedFiles, Reader};
use crate::formats::encoding;
use crate::formats::json::{self, NotJson};
use crate::parts::Parts;
use crate::record::{Record, RecordColumn};
use crate::stream::StreamKind;
use columns::KeyScan;
use kolo_graph::settings::{SIZE_MAX, Settings};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

pub const FORMAT: Format = Format {
    name: "jsonl",
    doc: "a JSON object per line: numbers, lists of numbers, text",
    extensions: &["jsonl", "ndjson"],
    sniff,
    open,
};

/// As a stream.
pub const STREAM: StreamKind = StreamKind { format: FORMAT.name, is_shard, open: stream::open };

/// Bytes of one line at most.
const LINE_BYTES_MAX: u64 = 16 << 20;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// Keys of all objects together.
const COLUMNS_MAX: usize = 1 << 16;
const BUFFER_BYTES: usize = 256 << 10;

fn is_shard(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let name = name.trim_end_matches(".gz").trim_end_matches(".zst");
    FORMAT.extensions.iter().any(|ending| name.ends_with(&format!(".{ending}")))
}

fn sniff(path: &Path, head: &[u8]) -> bool {
    let start = without_mark(head).trim_ascii_start();
    !path.is_dir() && start.starts_with(b"{") && start[1..].trim_ascii_start().starts_with(b"\"")
}

/// One file: where its lines start, and where the last one ends.
#[derive(Debug)]
struct JsonFile {
    file: ReadAhead,
    offsets: Vec<u64>,
}

#[derive(Debug)]
struct JsonReader {
    columns: Vec<RecordColumn>,
    reasons: Vec<Option<String>>,
    parts: Parts<JsonFile>,
}

fn open(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let vocab = settings.count_in("vocab", 0, 0, SIZE_MAX)?;
    let (mut keys, mut parts, mut bad) = (BTreeMap::new(), Parts::new(), None);
    for file in files {
        let contents = file.contents(settings)?;
        encoding::refuse_utf16_in(&contents)?;
        let offsets = scan(&contents, &mut keys, &mut bad)?;
        let records = offsets.len() - 1;
        parts.push(JsonFile { file: ReadAhead::new(contents), offsets }, records);
    }
    if keys.is_empty() {
        let message = if parts.len() == 0 { "it is empty" } else { "none of its objects has a key" };
        let nothing = || ReadError::new(message, "give a file with a JSON object per line").in_file(&files[0].path);
        return Err(bad.unwrap_or_else(nothing).into());
    }
    let reasons = keys.values().map(KeyScan::reason).collect();
    let columns = keys.into_iter().map(|(name, scan)| RecordColumn { name, kind: scan.kind(vocab) }).collect();
    Ok(Box::new(JsonReader { columns, reasons, parts }))
}

/// Looks at all lines of a file. The first that is no object is kept in `bad`.
fn scan(
    contents: &Contents,
    keys: &mut BTreeMap<String, KeyScan>,
    bad: &mut Option<ReadError>,
) -> Result<Vec<u64>, ReadError> {
    let mut stream = BufReader::with_capacity(BUFFER_BYTES, contents.stream_from(0));
    let (mut offsets, mut line, mut offset, mut number) = (Vec::new(), Vec::new(), 0_u64, 0_u64);
    loop {
        line.clear();
        number += 1;
        let read = stream.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut line);
        let read = read.map_err(|error| ReadError::io(contents.path(), &error).at(offset))? as u64;
        if read == 0 {
            break;
        }
        if read > LINE_BYTES_MAX {
            let message = format!("line {number} has more than {LINE_BYTES_MAX} bytes");
            return Err(ReadError::new(message, "write one object per line").in_file(contents.path()).at(offset));
        }
        if !is_empty(&line) {
            offsets.push(offset);
            match object(&line) {
                Ok(object) => columns::note(keys, &object, contents.path(), number),
                Err(problem) => _ = bad.get_or_insert_with(|| problem.at(contents.path(), offset, number)),
            }
            if keys.len() > COLUMNS_MAX {
                let message = format!("line {number}: there are more than {COLUMNS_MAX} different keys up to here");
                return Err(ReadError::new(message, "keys name columns; keep data in the values")
                    .in_file(contents.path())
                    .at(offset));
            }
        }
        offset += read;
    }
    offsets.push(offset);
    Ok(offsets)
}

/// What is wrong with a line, and at which of its bytes.
#[derive(Debug)]
struct Problem {
    within: u64,
    message: String,
}

impl Problem {
    fn at(self, path: &Path, offset: u64, line: u64) -> ReadError {
        let hint = "correct the line, or skip bad lines with `on_error = \"skip\"`";
        let message = format!("line {line}: {}", self.message);
        ReadError::new(message, hint).in_file(path).at(offset + self.within)
    }
}

/// A line without the byte order mark of UTF-8. One stands at the start of a file, and where files were joined.
fn without_mark(line: &[u8]) -> &[u8] {
    line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line)
}

fn is_empty(line: &[u8]) -> bool {
    without_mark(line).trim_ascii().is_empty()
}

fn object(line: &[u8]) -> Result<Map<String, Value>, Problem> {
    let text = without_mark(line);
    match json::parse(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(Problem { within: 0, message: "it is not a JSON object".into() }),
        Err(NotJson { error, grown }) => {
            // The library counts lines too, and there is but one.
            let message = error.to_string();
            let message = message.split(" at line ").next().unwrap_or_default();
            Err(Problem {
                within: (line.len() - text.len() + error.column().saturating_sub(1 + grown)) as u64,
                message: format!("it is not JSON: {message}"),
            })
        }
    }
}

impl Reader for JsonReader {
    fn columns(&self) -> &[RecordColumn] {
        &self.columns
    }

    fn len(&self) -> usize {
        self.parts.len()
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        let (part, row) = self.parts.find(at)?;
        let (start, end) = (part.offsets[row], part.offsets[row + 1]);
        // Any number of empty lines may follow.
        let len = (end - start).min(LINE_BYTES_MAX + 1);
        part.file.with(start, len, |bytes| read_line(&self.columns, bytes, record))?.map_err(|problem| {
            let contents = part.file.contents();
            problem.at(contents.path(), start, super::csv::line_of(contents, start).unwrap_or(0))
        })
    }

    fn place(&self, at: usize) -> Option<(PathBuf, u64)> {
        let (part, row) = self.parts.find(at).ok()?;
        Some((part.file.contents().path().into(), part.offsets[row]))
    }

    fn kind_reason(&self, column: usize) -> Option<String> {
        self.reasons.get(column).cloned().flatten()
    }
}

/// Reads the values of a line, behind which may be empty lines.
fn read_line(columns: &[RecordColumn], bytes: &[u8], record: &mut Record) -> Result<(), Problem> {
    let end = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len());
    let mut object = object(&bytes[..end])?;
    for (number, column) in columns.iter().enumerate() {
        let value = object.remove(&column.name).unwrap_or(Value::Null);
        columns::read_value(value, &column.kind, number, record)
            .map_err(|message| Problem { within: 0, message: format!("key \"{}\" {message}", column.name) })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
