//! JSON objects front to back. A record is a line.

use super::columns::{self, KeyScan};
use super::{COLUMNS_MAX, LINE_BYTES_MAX, is_empty, object, read_line};
use crate::error::ReadError;
use crate::format::OpenError;
use crate::formats::encoding;
use crate::record::{Record, RecordColumn, RecordKind};
use crate::stream::{ByteStream, RawRecord, RawRecords, StreamFormat, StreamHead};
use kolo_graph::settings::{SIZE_MAX, Settings};
use std::collections::BTreeMap;
use std::io::{BufRead, Read};
use std::path::PathBuf;
use std::sync::Arc;

#[derive(Debug)]
struct JsonStream {
    path: PathBuf,
    vocab: usize,
    keys: BTreeMap<String, KeyScan>,
    columns: Vec<RecordColumn>,
    /// The same for a record with fractions where the first ones had none.
    real_columns: Vec<RecordColumn>,
    /// What is wrong with the first line that is no object.
    bad: Option<ReadError>,
}

pub(super) fn open(head: &StreamHead<'_>, settings: &Settings) -> Result<Box<dyn StreamFormat>, OpenError> {
    let vocab = settings.count_in("vocab", 0, 0, SIZE_MAX)?;
    encoding::refuse_utf16(head.path, head.bytes)?;
    let (path, keys) = (head.path.into(), BTreeMap::new());
    Ok(Box::new(JsonStream { path, vocab, keys, columns: vec![], real_columns: vec![], bad: None }))
}

/// A column of whole numbers as one of numbers.
fn with_fractions(column: &RecordColumn) -> RecordColumn {
    let kind = match &column.kind {
        RecordKind::Int { shape, classes: None } => RecordKind::Real { shape: shape.clone() },
        kind => kind.clone(),
    };
    RecordColumn { name: column.name.clone(), kind }
}

struct JsonRecords {
    bytes: ByteStream,
    line: u64,
    skipped: RawRecord,
}

impl RawRecords for JsonRecords {
    fn next(&mut self, raw: &mut RawRecord) -> Result<bool, ReadError> {
        let path = Arc::clone(self.bytes.path());
        loop {
            self.line += 1;
            let start = self.bytes.offset();
            raw.restart(&path, start, self.line);
            let read = self.bytes.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut raw.bytes);
            let read = read.map_err(|error| ReadError::io(&path, &error).at(start))? as u64;
            if read > LINE_BYTES_MAX {
                let message = format!("line {} has more than {LINE_BYTES_MAX} bytes", self.line);
                return Err(ReadError::new(message, "write one object per line").in_file(&path).at(start));
            }
            if read == 0 || !is_empty(&raw.bytes) {
                return Ok(read > 0);
            }
        }
    }

    fn skip(&mut self) -> Result<bool, ReadError> {
        let mut raw = std::mem::take(&mut self.skipped);
        let found = self.next(&mut raw);
        self.skipped = raw;
        found
    }
}

impl StreamFormat for JsonStream {
    fn records(&self, bytes: ByteStream) -> Result<Box<dyn RawRecords>, ReadError> {
        Ok(Box::new(JsonRecords { bytes, line: 0, skipped: RawRecord::default() }))
    }

    fn look(&mut self, raw: &RawRecord) {
        match object(&raw.bytes) {
            Ok(object) => columns::note(&mut self.keys, &object, raw.path(), raw.line),
            Err(problem) => _ = self.bad.get_or_insert_with(|| problem.at(raw.path(), raw.offset, raw.line)),
        }
    }

    fn columns(&mut self) -> Result<Vec<RecordColumn>, ReadError> {
        if self.keys.is_empty() {
            let nothing = ReadError::new("it is empty", "give a file with a JSON object per line").in_file(&self.path);
            return Err(self.bad.take().unwrap_or(nothing));
        }
        if self.keys.len() > COLUMNS_MAX {
            let message = format!("the first lines have more than {COLUMNS_MAX} different keys");
            return Err(ReadError::new(message, "keys name columns; keep data in the values").in_file(&self.path));
        }
        let column =
            |(name, scan): (&String, &KeyScan)| RecordColumn { name: name.clone(), kind: scan.kind(self.vocab) };
        self.columns = self.keys.iter().map(column).collect();
        self.real_columns = self.columns.iter().map(with_fractions).collect();
        Ok(self.columns.clone())
    }

    fn parse(&self, raw: &RawRecord, record: &mut Record) -> Result<(), ReadError> {
        let read = read_line(&self.columns, &raw.bytes, record);
        let read = read.or_else(|problem| read_line(&self.real_columns, &raw.bytes, record).map_err(|_| problem));
        read.map_err(|problem| problem.at(raw.path(), raw.offset, raw.line))
    }

    fn kind_reason(&self, column: usize) -> Option<String> {
        self.keys.values().nth(column)?.reason()
    }
}
