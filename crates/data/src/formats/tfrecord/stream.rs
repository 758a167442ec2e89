//! TFRecord files front to back. A record is its data with the checksum.

use super::columns::{Feature, Found};
use super::{
    FOOTER_BYTES, HEADER_BYTES, LOOKED_AT, check_data, checked_length, is_zlib, malformed, no_columns, read_features,
};
use crate::error::ReadError;
use crate::files::damaged;
use crate::format::OpenError;
use crate::record::{Record, RecordColumn, UnreadColumn};
use crate::stream::{ByteStream, RawRecord, RawRecords, StreamFormat, StreamHead};
use kolo_graph::settings::Settings;
use std::path::PathBuf;
use std::sync::Arc;

#[derive(Debug)]
struct TfRecordStream {
    path: PathBuf,
    found: Found,
    looks: usize,
    features: Vec<Feature>,
    unread: Vec<UnreadColumn>,
    /// What is wrong with the first record that cannot be read.
    bad: Option<ReadError>,
}

pub(super) fn open(head: &StreamHead<'_>, _: &Settings) -> Result<Box<dyn StreamFormat>, OpenError> {
    if is_zlib(head.bytes) {
        let message = "it is compressed with zlib, which cannot be read as a stream";
        return Err(ReadError::new(message, "compress it with gzip, or leave `stream` out").in_file(head.path).into());
    }
    let (found, features) = (Found::default(), Vec::new());
    Ok(Box::new(TfRecordStream { path: head.path.into(), found, looks: 0, features, unread: vec![], bad: None }))
}

struct TfRecordRecords {
    bytes: ByteStream,
    header: Vec<u8>,
}

impl TfRecordRecords {
    /// The length of the next record, if there is one.
    fn length(&mut self) -> Result<Option<u64>, ReadError> {
        if self.bytes.is_at_end()? {
            return Ok(None);
        }
        let offset = self.bytes.offset();
        self.bytes.read_into(HEADER_BYTES, &mut self.header)?;
        checked_length(&self.header, self.bytes.path(), offset).map(Some)
    }
}

impl RawRecords for TfRecordRecords {
    fn next(&mut self, raw: &mut RawRecord) -> Result<bool, ReadError> {
        let Some(length) = self.length()? else { return Ok(false) };
        raw.restart(&Arc::clone(self.bytes.path()), self.bytes.offset(), 0);
        self.bytes.append(length + FOOTER_BYTES, &mut raw.bytes)?;
        Ok(true)
    }

    fn skip(&mut self) -> Result<bool, ReadError> {
        let Some(length) = self.length()? else { return Ok(false) };
        self.bytes.skip(length + FOOTER_BYTES)?;
        Ok(true)
    }
}

impl StreamFormat for TfRecordStream {
    fn records(&self, bytes: ByteStream) -> Result<Box<dyn RawRecords>, ReadError> {
        Ok(Box::new(TfRecordRecords { bytes, header: Vec::new() }))
    }

    fn look(&mut self, raw: &RawRecord) {
        self.looks += 1;
        if self.found.records() == LOOKED_AT {
            return;
        }
        let looked = check_data(&raw.bytes, raw.path(), raw.offset)
            .and_then(|data| self.found.add(data).map_err(|error| malformed(raw.path(), raw.offset, data, &error)));
        self.bad = self.bad.take().or(looked.err());
    }

    fn columns(&mut self) -> Result<Vec<RecordColumn>, ReadError> {
        // A bad record is an error when it is read, so that it can be skipped.
        if let (0, Some(bad)) = (self.found.records(), self.bad.take()) {
            return Err(bad);
        }
        let (columns, features, unread) = std::mem::take(&mut self.found).columns();
        if columns.is_empty() {
            return Err(match self.looks {
                0 => damaged(&self.path, 0, "it has no record"),
                _ => no_columns(&self.path, &unread),
            });
        }
        (self.features, self.unread) = (features, unread);
        Ok(columns)
    }

    fn unread(&self) -> Vec<UnreadColumn> {
        self.unread.clone()
    }

    fn parse(&self, raw: &RawRecord, record: &mut Record) -> Result<(), ReadError> {
        let data = check_data(&raw.bytes, raw.path(), raw.offset)?;
        read_features(&self.features, data, (raw.path(), raw.offset), &mut Vec::new(), record)
    }
}
