//! Tables front to back. A record is its cells, without their quotes.

use super::scan::{self, Cells, ColumnScan};
use super::{TextColumns, delimiter, other_columns};
use crate::error::ReadError;
use crate::format::OpenError;
use crate::formats::encoding;
use crate::record::{Record, RecordColumn, RecordKind};
use crate::stream::{ByteStream, HEAD_BYTES, RawPart, RawRecord, RawRecords, StreamFormat, StreamHead};
use kolo_graph::settings::Settings;
use std::io::Cursor;
use std::path::Path;
use std::sync::Arc;

#[derive(Debug)]
struct CsvStream {
    delimiter: u8,
    has_header: bool,
    names: Vec<String>,
    scans: Vec<ColumnScan>,
    text: TextColumns,
    kinds: Vec<RecordKind>,
}

pub(super) fn open(head: &StreamHead<'_>, settings: &Settings) -> Result<Box<dyn StreamFormat>, OpenError> {
    encoding::refuse_utf16(head.path, head.bytes)?;
    let mut bytes = head.bytes.to_vec();
    if bytes.len() < HEAD_BYTES {
        // The only line may lack its line break.
        bytes.push(b'\n');
    }
    let delimiter = delimiter(head.extension, &bytes, settings)?;
    let mut cells = Cells::of_stream(Box::new(Cursor::new(bytes.clone())), head.path, delimiter);
    if !cells.advance()? {
        return Err(ReadError::new("it is empty", "give a table with a line per record").in_file(head.path).into());
    }
    let has_header = match settings.has("header") {
        true => settings.bool("header", true)?,
        false => scan::has_header(&bytes, delimiter),
    };
    let names = match has_header {
        true => scan::header_names(&cells, || bytes)?,
        false => scan::numbered_names(cells.len()),
    };
    let scans = names.iter().map(|_| ColumnScan::default()).collect();
    let text = TextColumns::read(settings, &names)?;
    Ok(Box::new(CsvStream { delimiter, has_header, names, scans, text, kinds: vec![] }))
}

struct CsvRecords {
    cells: Cells,
    path: Arc<Path>,
}

impl RawRecords for CsvRecords {
    fn next(&mut self, raw: &mut RawRecord) -> Result<bool, ReadError> {
        let start = self.cells.offset();
        if !self.cells.advance()? {
            return Ok(false);
        }
        raw.restart(&self.path, start, self.cells.line());
        for cell in 0..self.cells.len() {
            raw.bytes.extend_from_slice(self.cells.cell(cell));
            raw.parts.push(RawPart { name: String::new(), offset: start, end: raw.bytes.len() });
        }
        Ok(true)
    }

    fn skip(&mut self) -> Result<bool, ReadError> {
        self.cells.advance()
    }
}

impl StreamFormat for CsvStream {
    fn records(&self, bytes: ByteStream) -> Result<Box<dyn RawRecords>, ReadError> {
        let path = Arc::clone(bytes.path());
        let mut cells = Cells::of_stream(Box::new(bytes), &path, self.delimiter);
        if self.has_header && cells.advance()? {
            let found = scan::header_names(&cells, Vec::new)?;
            if found != self.names {
                return Err(other_columns(&path, &self.names, &found));
            }
        }
        Ok(Box::new(CsvRecords { cells, path }))
    }

    fn look(&mut self, raw: &RawRecord) {
        if raw.parts.len() == self.scans.len() {
            let both = self.scans.iter_mut().zip(raw.each_part());
            both.for_each(|(scan, (_, cell))| scan.note(cell, raw.path(), raw.line));
        }
    }

    fn columns(&mut self) -> Result<Vec<RecordColumn>, ReadError> {
        self.kinds = self.names.iter().zip(&self.scans).map(|(name, scan)| self.text.kind(name, scan)).collect();
        let both = self.names.iter().zip(&self.kinds);
        Ok(both.map(|(name, kind)| RecordColumn { name: name.clone(), kind: kind.clone() }).collect())
    }

    fn parse(&self, raw: &RawRecord, record: &mut Record) -> Result<(), ReadError> {
        let wrong = |message: String| {
            let hint = "correct the line, or skip bad lines with `on_error = \"skip\"`";
            raw.wrong(format!("line {}: {message}", raw.line), hint)
        };
        if raw.parts.len() != self.names.len() {
            let (found, wanted) = (raw.parts.len(), self.names.len());
            return Err(wrong(format!("the line has {found} cells, but there are {wanted} columns")));
        }
        for (number, (kind, (_, cell))) in self.kinds.iter().zip(raw.each_part()).enumerate() {
            let mut read = scan::read_cell(cell, kind, number, record);
            if read.is_err() && matches!(kind, RecordKind::Int { .. }) {
                // The first records had whole numbers only, which says nothing about this one.
                read = scan::read_cell(cell, &RecordKind::Real { shape: vec![] }, number, record);
            }
            read.map_err(|message| wrong(format!("column \"{}\" {message}", self.names[number])))?;
        }
        Ok(())
    }

    fn kind_reason(&self, column: usize) -> Option<String> {
        self.scans.get(column)?.reason()
    }
}
