//! Tables front to back. A record is its cells, without their quotes.

use super::scan::{self, Cells, ColumnScan, Decimal, Names};
use super::{TextColumns, delimiter, guessed_header, other_columns};
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
    decimal: Decimal,
    has_header: bool,
    names: Names,
    scans: Vec<ColumnScan>,
    text: TextColumns,
    kinds: Vec<RecordKind>,
    /// What was guessed.
    notes: Vec<String>,
}

pub(super) fn open(head: &StreamHead<'_>, settings: &Settings) -> Result<Box<dyn StreamFormat>, OpenError> {
    encoding::refuse_utf16(head.path, head.bytes)?;
    let mut bytes = head.bytes.to_vec();
    if bytes.len() < HEAD_BYTES {
        // The only line may lack its line break.
        bytes.push(b'\n');
    }
    let decimal = Decimal::read(settings)?;
    let delimiter = delimiter(head.extension, &bytes, decimal, settings)?;
    let mut cells = Cells::of_stream(Box::new(Cursor::new(bytes.clone())), head.path, delimiter);
    if !cells.advance()? {
        return Err(ReadError::new("it is empty", "give a table with a line per record").in_file(head.path).into());
    }
    let has_header = match settings.has("header") {
        true => settings.bool("header", true)?,
        false => scan::has_header(&bytes, delimiter),
    };
    let is_guess = settings.peek("header").is_none();
    let notes = guessed_header(&cells, has_header).filter(|_| is_guess).into_iter().collect();
    let names = match has_header {
        true => scan::header_names(&cells, || bytes)?,
        false => Names::numbered(cells.len()),
    };
    let scans = names.names.iter().map(|_| ColumnScan::default()).collect();
    let text = TextColumns::read(settings, &names.names)?;
    Ok(Box::new(CsvStream { delimiter, decimal, has_header, names, scans, text, kinds: vec![], notes }))
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
            if found.names != self.names.names {
                return Err(other_columns(&path, &self.names.names, &found.names));
            }
        }
        Ok(Box::new(CsvRecords { cells, path }))
    }

    fn look(&mut self, raw: &RawRecord) {
        if raw.parts.len() == self.scans.len() {
            let both = self.scans.iter_mut().zip(raw.each_part());
            both.for_each(|(scan, (_, cell))| scan.note(cell, raw.path(), raw.line, self.decimal));
        }
    }

    fn columns(&mut self) -> Result<Vec<RecordColumn>, ReadError> {
        let both = self.names.names.iter().zip(&self.scans);
        self.kinds = both.map(|(name, scan)| self.text.kind(name, scan)).collect::<Result<_, _>>()?;
        let both = self.names.names.iter().zip(&self.kinds);
        Ok(both.map(|(name, kind)| RecordColumn { name: name.clone(), kind: kind.clone() }).collect())
    }

    fn parse(&self, raw: &RawRecord, record: &mut Record) -> Result<(), ReadError> {
        let wrong = |message: String| {
            let hint = "correct the line, or skip bad lines with `on_error = \"skip\"`";
            raw.wrong(format!("line {}: {message}", raw.line), hint)
        };
        if raw.parts.len() != self.names.names.len() {
            let (found, wanted) = (raw.parts.len(), self.names.names.len());
            return Err(wrong(format!("the line has {found} cells, but there are {wanted} columns")));
        }
        for (number, (kind, (_, cell))) in self.kinds.iter().zip(raw.each_part()).enumerate() {
            let mut read = scan::read_cell(cell, (kind, self.decimal), number, record);
            if read.is_err() && matches!(kind, RecordKind::Int { .. }) {
                // The first records had whole numbers only, which says nothing about this one.
                read = scan::read_cell(cell, (&RecordKind::Real { shape: vec![] }, self.decimal), number, record);
            }
            read.map_err(|message| wrong(format!("column \"{}\" {message}", self.names.names[number])))?;
        }
        Ok(())
    }

    fn kind_reason(&self, column: usize) -> Option<String> {
        self.scans.get(column)?.reason()
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn is_index(&self, column: usize) -> bool {
        self.kinds.get(column).is_some_and(|kind| self.names.is_index(column, kind))
    }
}
