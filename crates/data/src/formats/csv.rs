//! CSV and TSV: lines of cells, with or without a header.
//!
//! All of a file is read once at opening: where each record starts, and what the cells of each column are. A column whose
//! cells are all whole numbers is one of whole numbers, one of numbers only is of reals, any other is text. Records are then
//! read at random. Records with too many or too few cells are found when they are read, so that they can be skipped.

mod scan;
mod stream;

use crate::ahead::ReadAhead;
use crate::error::ReadError;
use crate::files::DataFile;
use crate::format::{Format, OpenError, OpenedFiles, Reader};
use crate::formats::encoding;
use crate::parts::Parts;
use crate::record::{Record, RecordColumn, RecordKind};
use crate::stream::{HEAD_BYTES_MAX, StreamKind, read_head};
use csv_core::ReadRecordResult;
use kolo_graph::settings::Settings;
pub(in crate::formats) use scan::line_of;
use scan::{Cells, ColumnScan, Decimal, Names};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

pub const FORMAT: Format = Format {
    name: "csv",
    doc: "comma, tab or semicolon separated values (`delimiter`), with a header or without (`header`), fractions behind a point or a \
          comma (`decimal`)",
    extensions: &["csv", "tsv"],
    sniff,
    open,
};

/// As a stream.
pub const STREAM: StreamKind = StreamKind { format: FORMAT.name, is_shard, open: stream::open };

const DELIMITERS: [u8; 4] = [b',', b'\t', b';', b'|'];
/// Records looked at to find the delimiter.
const LOOKED_AT: usize = 10;
/// Bytes looked at to find the delimiter and the header, unless the first lines are longer.
const HEAD_BYTES: usize = crate::stream::HEAD_BYTES;

fn is_shard(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let name = name.trim_end_matches(".gz").trim_end_matches(".zst");
    FORMAT.extensions.iter().any(|ending| name.ends_with(&format!(".{ending}")))
}

/// Text in which two lines have the same number of cells, more than one.
fn sniff(path: &Path, head: &[u8]) -> bool {
    let is_text = match std::str::from_utf8(head) {
        Ok(_) => !head.contains(&0),
        Err(error) => error.error_len().is_none() && !head.contains(&0),
    };
    !path.is_dir() && is_text && DELIMITERS.iter().any(|delimiter| scan::cells_of_head(head, *delimiter).is_some())
}

/// One file: where its records start, and where the last one ends.
#[derive(Debug)]
struct CsvFile {
    file: ReadAhead,
    offsets: Vec<u64>,
}

#[derive(Debug)]
struct CsvReader {
    columns: Vec<RecordColumn>,
    /// Why a column is text though most of it is numbers.
    reasons: Vec<Option<String>>,
    parts: Parts<CsvFile>,
    delimiter: u8,
    decimal: Decimal,
    /// Whether each column is of the index of the table.
    index: Vec<bool>,
    /// What was guessed.
    notes: Vec<String>,
}

/// Columns that are text although all their cells may be numbers, such as postal codes: `data.text`, and in a saved run those
/// that were text in training.
#[derive(Debug)]
struct TextColumns {
    names: BTreeSet<String>,
}

impl TextColumns {
    /// Those that the job names must be there.
    fn read(settings: &Settings, columns: &[String]) -> Result<Self, OpenError> {
        let names = settings.texts("text", "[\"code\"]")?;
        let known: BTreeSet<&String> = columns.iter().collect();
        let missing = names.iter().find(|name| !known.contains(name));
        match missing.filter(|_| settings.place_of("text") != Some(TEXT_OF_TRAINING)) {
            Some(name) => {
                let message = format!("names \"{name}\", which is no column");
                Err(settings.wrong("text", message, format!("the columns are {}", columns.join(", "))).into())
            }
            None => Ok(Self { names: names.into_iter().collect() }),
        }
    }

    fn kind(&self, name: &str, scan: &ColumnScan) -> Result<RecordKind, ReadError> {
        match self.names.contains(name) {
            true => Ok(RecordKind::Text),
            false => scan.refuse_commas(name).map(|()| scan.kind()),
        }
    }
}

/// Where `data.text` comes from if other files than these said it.
pub(crate) const TEXT_OF_TRAINING: &str = "the training files";

fn open(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let Some(first) = files.first() else {
        return Err(settings.wrong("source", "names no file", "name a file").into());
    };
    let decimal = Decimal::read(settings)?;
    let delimiter = delimiter(&first.extension(), &head_of(first)?, decimal, settings)?;
    let mut header = match settings.has("header") {
        true => Some(settings.bool("header", true)?),
        false => None,
    };
    let (mut names, mut scans, mut parts) = (Names::default(), Vec::new(), Parts::new());
    let mut notes = Vec::new();
    for file in files {
        let contents = file.contents(settings)?;
        encoding::refuse_utf16_in(&contents)?;
        let mut cells = Cells::new(&contents, delimiter);
        let mut offsets = Vec::new();
        let mut start = cells.offset();
        if cells.advance()? {
            let has_header = match header {
                Some(has_header) => has_header,
                None => {
                    let has_header = scan::has_header(&head_of(file)?, delimiter);
                    notes.extend(guessed_header(&cells, has_header));
                    has_header
                }
            };
            header = Some(has_header);
            let found = match has_header {
                true => scan::header_names(&cells, || head_of(file).unwrap_or_default())?,
                false => Names::numbered(cells.len()),
            };
            if names.names.is_empty() {
                (scans, names) = (found.names.iter().map(|_| ColumnScan::default()).collect(), found);
            } else if names.names != found.names {
                return Err(other_columns(&file.path, &names.names, &found.names).into());
            }
            if has_header {
                start = cells.offset();
            } else {
                offsets.push(start);
                scan::note(&mut scans, &cells, decimal);
                start = cells.offset();
            }
        }
        while cells.advance()? {
            offsets.push(start);
            scan::note(&mut scans, &cells, decimal);
            start = cells.offset();
        }
        offsets.push(start);
        let records = offsets.len() - 1;
        parts.push(CsvFile { file: ReadAhead::new(contents), offsets }, records);
    }
    if names.names.is_empty() {
        return Err(ReadError::new("it is empty", "give a file with a line per sample").in_file(&first.path).into());
    }
    let reasons = scans.iter().map(ColumnScan::reason).collect();
    let text = TextColumns::read(settings, &names.names)?;
    let both = names.names.iter().zip(&scans);
    let kinds = both.map(|(name, scan)| text.kind(name, scan)).collect::<Result<Vec<_>, _>>()?;
    let index = kinds.iter().enumerate().map(|(at, kind)| names.is_index(at, kind)).collect();
    let columns = names.names.into_iter().zip(kinds).map(|(name, kind)| RecordColumn { name, kind }).collect();
    Ok(Box::new(CsvReader { columns, reasons, parts, delimiter, decimal, index, notes }))
}

/// The first lines of a file.
fn head_of(file: &DataFile) -> Result<Vec<u8>, ReadError> {
    let head = read_head(&mut file.stream()?, HEAD_BYTES, HEAD_BYTES_MAX);
    let mut head = head.map_err(|error| ReadError::io(&file.path, &error))?;
    if head.len() < HEAD_BYTES {
        // The only line may lack its line break.
        head.push(b'\n');
    }
    Ok(head)
}

/// What `data.delimiter` says, or what the first lines look like.
fn delimiter(extension: &str, head: &[u8], decimal: Decimal, settings: &Settings) -> Result<u8, OpenError> {
    let text = settings.text("delimiter", "auto")?;
    match text.as_bytes() {
        b"auto" if extension == "tsv" => Ok(b'\t'),
        b"auto" => {
            let cells = |delimiter: &u8| scan::cells_of_head(head, *delimiter).unwrap_or(0);
            // Another delimiter between numbers with commas: then commas delimit nothing.
            let is_other = |delimiter: &u8| {
                *delimiter != b',' && cells(delimiter) > 0 && scan::has_decimal_commas(head, *delimiter)
            };
            if let Some(other) = DELIMITERS.into_iter().find(is_other) {
                return Ok(other);
            }
            let is_free = |delimiter: &u8| decimal == Decimal::Point || *delimiter != b',';
            // Of equals the first counts.
            let best = DELIMITERS.into_iter().filter(is_free).rev().max_by_key(cells);
            Ok(best.filter(|best| cells(best) > 0).unwrap_or(b','))
        }
        b"tab" => Ok(b'\t'),
        [byte] if byte.is_ascii() && !b"\"\r\n".contains(byte) => Ok(*byte),
        _ => Err(settings
            .wrong("delimiter", format!("is {text:?}"), "write one character, such as \";\", or \"tab\"")
            .into()),
    }
}

/// What is said of a first line with numbers in it: whether it was taken for a header is a guess.
fn guessed_header(first: &Cells, has_header: bool) -> Option<String> {
    let guess = match has_header {
        true => "its first line is read as a header; `header = false` reads it as a sample",
        false => "its first line is read as a sample; `header = true` reads it as a header",
    };
    first.has_number().then(|| format!("{}: {guess}", first.path().display()))
}

fn other_columns(path: &Path, wanted: &[String], found: &[String]) -> ReadError {
    let message =
        format!("its columns are {}, but those of the first file are {}", found.join(", "), wanted.join(", "));
    ReadError::new(message, "give files with the same columns").in_file(path).at(0)
}

impl Reader for CsvReader {
    fn columns(&self) -> &[RecordColumn] {
        &self.columns
    }

    fn len(&self) -> usize {
        self.parts.len()
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        let (part, row) = self.parts.find(at)?;
        let (start, end) = (part.offsets[row], part.offsets[row + 1]);
        part.file.with(start, end - start, |bytes| self.read_row(bytes, record))?.map_err(|problem| {
            let contents = part.file.contents();
            // The line breaks before a record belong to its bytes.
            let line = line_of(contents, start).map_or(String::new(), |line| format!("line {line}: "));
            ReadError::new(format!("{line}{}", problem.message), problem.hint).in_file(contents.path()).at(start)
        })
    }

    fn place(&self, at: usize) -> Option<(PathBuf, u64)> {
        let (part, row) = self.parts.find(at).ok()?;
        Some((part.file.contents().path().into(), part.offsets[row]))
    }

    fn kind_reason(&self, column: usize) -> Option<String> {
        self.reasons.get(column).cloned().flatten()
    }

    fn is_index(&self, column: usize) -> bool {
        self.index.get(column).copied().unwrap_or(false)
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }
}

/// What is wrong with a record.
struct Problem {
    message: String,
    hint: &'static str,
}

/// What a thread needs to read a record. Making a parser takes longer than most records do.
struct Parsing {
    delimiter: u8,
    parser: csv_core::Reader,
    cells: Vec<u8>,
    ends: Vec<usize>,
}

thread_local! {
    static PARSING: RefCell<Option<Parsing>> = const { RefCell::new(None) };
}
/// A thread keeps no larger buffer than this.
const CELLS_BYTES_KEPT_MAX: usize = 1 << 20;

impl CsvReader {
    fn read_row(&self, bytes: &[u8], record: &mut Record) -> Result<(), Problem> {
        let kept = PARSING.take().filter(|kept| kept.delimiter == self.delimiter);
        let mut parsing = kept.unwrap_or_else(|| Parsing {
            delimiter: self.delimiter,
            parser: scan::parser(self.delimiter),
            cells: Vec::new(),
            ends: Vec::new(),
        });
        let read = self.parse(bytes, &mut parsing, record);
        if parsing.cells.capacity() <= CELLS_BYTES_KEPT_MAX {
            PARSING.set(Some(parsing));
        }
        read
    }

    fn parse(&self, bytes: &[u8], parsing: &mut Parsing, record: &mut Record) -> Result<(), Problem> {
        let Parsing { parser, cells, ends, .. } = parsing;
        parser.reset();
        cells.resize(bytes.len(), 0);
        ends.resize(self.columns.len() + 1, 0);
        let (mut outcome, read, written, mut count) = parser.read_record(bytes, cells, ends);
        if let ReadRecordResult::InputEmpty = outcome {
            // The last line of a file may lack its line break.
            let (last, _, _, more) = parser.read_record(&bytes[read..], &mut cells[written..], &mut ends[count..]);
            (outcome, count) = (last, count + more);
        }
        if !matches!(outcome, ReadRecordResult::Record) || count != self.columns.len() {
            let found = if count > self.columns.len() { "more".into() } else { count.to_string() };
            let message = format!("the line has {found} cells, but there are {} columns", self.columns.len());
            return Err(Problem { message, hint: "correct the line, or skip bad lines with `on_error = \"skip\"`" });
        }
        let mut start = 0;
        for (number, (column, end)) in self.columns.iter().zip(&*ends).enumerate() {
            scan::read_cell(&cells[start..*end], (&column.kind, self.decimal), number, record).map_err(|message| {
                Problem {
                    message: format!("column \"{}\" {message}", column.name),
                    hint: "correct the cell, or skip bad lines with `on_error = \"skip\"`",
                }
            })?;
            start = *end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
