//! Reading all records of a CSV file in order, and finding out what its columns are.

use super::{LOOKED_AT, RecordKind};
use crate::error::{ReadError, shown};
use crate::file_source::is_target_name;
use crate::files::Contents;
use crate::formats::encoding;
use crate::record::Record;
use csv_core::{ReadRecordResult, ReaderBuilder};
use kolo_base::ShownPath;
use kolo_graph::settings::{SettingError, Settings};
use std::collections::BTreeSet;
use std::io::{Cursor, Read, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Bytes of one record at most: a quote that never closes must not take all memory.
pub(super) const RECORD_BYTES_MAX: usize = 16 << 20;
/// Bytes of the file that one record may take, with doubled quotes and empty lines before it.
const SPAN_BYTES_MAX: u64 = 2 * RECORD_BYTES_MAX as u64;
/// Cells of one record.
const CELLS_MAX: usize = 1 << 16;
/// What is read at once.
const BLOCK_BYTES: usize = 256 << 10;
/// Records after the first that tell whether it is a header.
const HEADER_RECORDS: usize = 1000;
/// Characters of a cell that a message shows.
const SHOWN_CHARS: usize = 40;

/// A new parser. A clone of one would not work: `csv_core` 0.1.13 leaves out half of its tables.
pub(super) fn parser(delimiter: u8) -> csv_core::Reader {
    ReaderBuilder::new().delimiter(delimiter).build()
}

/// The cells of one record after the other.
pub(super) struct Cells {
    stream: Box<dyn Read + Send>,
    path: PathBuf,
    parser: csv_core::Reader,
    block: Vec<u8>,
    /// Of the block: read so far, and filled.
    at: usize,
    filled: usize,
    /// Bytes of the file that records were made of.
    offset: u64,
    bytes: Vec<u8>,
    ends: Vec<usize>,
    count: usize,
    /// The line where the record started.
    line: u64,
    quotes: Quotes,
    delimiter: u8,
}

/// Whether a parser stands inside a quoted cell, which it does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Quotes {
    state: QuoteState,
    /// Where the last one was opened.
    opened: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum QuoteState {
    #[default]
    CellStart,
    Bare,
    Quoted,
    /// After a quote in a quoted cell, which closes it unless another one follows.
    Closing,
}

impl Quotes {
    /// Goes over bytes that start at `offset`.
    fn pass(&mut self, bytes: &[u8], delimiter: u8, offset: u64) {
        // Most of a file is neither: whole blocks without a quote change nothing inside a bare cell.
        if !bytes.contains(&b'"') && self.state != QuoteState::Quoted {
            if let Some(last) = bytes.last() {
                let ends = *last == delimiter || b"\r\n".contains(last);
                self.state = if ends { QuoteState::CellStart } else { QuoteState::Bare };
            }
            return;
        }
        for (at, byte) in bytes.iter().enumerate() {
            self.state = match (self.state, *byte) {
                (QuoteState::CellStart, b'"') => {
                    self.opened = offset + at as u64;
                    QuoteState::Quoted
                }
                (QuoteState::Quoted, b'"') => QuoteState::Closing,
                (QuoteState::Closing, b'"') | (QuoteState::Quoted, _) => QuoteState::Quoted,
                (_, byte) if byte == delimiter || b"\r\n".contains(&byte) => QuoteState::CellStart,
                _ => QuoteState::Bare,
            };
        }
    }
}

impl Cells {
    pub fn new(contents: &Contents, delimiter: u8) -> Self {
        Self::of_stream(Box::new(contents.stream_from(0)), contents.path(), delimiter)
    }

    pub fn of_stream(stream: Box<dyn Read + Send>, path: &Path, delimiter: u8) -> Self {
        Self {
            stream,
            path: path.into(),
            parser: parser(delimiter),
            block: vec![0; BLOCK_BYTES],
            at: 0,
            filled: 0,
            offset: 0,
            bytes: vec![0; 1024],
            ends: vec![0; 64],
            count: 0,
            line: 1,
            quotes: Quotes::default(),
            delimiter,
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a cell of the record may be a number.
    pub fn has_number(&self) -> bool {
        (0..self.len()).any(|at| trimmed(self.cell(at)).is_some_and(is_number))
    }

    /// Where the next record starts.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The line where the record started.
    pub fn line(&self) -> u64 {
        self.line
    }

    /// The number of cells.
    pub fn len(&self) -> usize {
        self.count
    }

    pub fn cell(&self, at: usize) -> &[u8] {
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        &self.bytes[start..self.ends[at]]
    }

    /// Goes to the next record, if there is one.
    pub fn advance(&mut self) -> Result<bool, ReadError> {
        let (mut written, start) = (0, self.offset);
        (self.count, self.line) = (0, self.parser.line());
        loop {
            if self.at == self.filled {
                let read = self.stream.read(&mut self.block);
                let read = read.map_err(|error| ReadError::io(&self.path, &error).at(self.offset))?;
                (self.at, self.filled) = (0, read);
                self.quotes.pass(&self.block[..read], self.delimiter, self.offset);
                if read == 0 && self.quotes.state == QuoteState::Quoted {
                    return Err(self.open_quote());
                }
            }
            let input = &self.block[self.at..self.filled];
            let (outcome, read, wrote, cells) =
                self.parser.read_record(input, &mut self.bytes[written..], &mut self.ends[self.count..]);
            self.at += read;
            self.offset += read as u64;
            written += wrote;
            self.count += cells;
            match outcome {
                ReadRecordResult::InputEmpty => {}
                // Empty lines before a record belong to it.
                ReadRecordResult::Record if self.offset - start > SPAN_BYTES_MAX => return Err(self.too_long(start)),
                ReadRecordResult::Record => return Ok(true),
                ReadRecordResult::End => return Ok(false),
                ReadRecordResult::OutputFull if self.bytes.len() < RECORD_BYTES_MAX => {
                    self.bytes.resize(2 * self.bytes.len(), 0);
                }
                ReadRecordResult::OutputEndsFull if self.ends.len() < CELLS_MAX => {
                    self.ends.resize(2 * self.ends.len(), 0);
                }
                ReadRecordResult::OutputFull | ReadRecordResult::OutputEndsFull => return Err(self.too_long(start)),
            }
        }
    }

    fn open_quote(&self) -> ReadError {
        let message = format!("line {}: the file ends inside a quoted cell", self.line);
        ReadError::new(message, "close the quote, or copy the file again").in_file(&self.path).at(self.quotes.opened)
    }

    fn too_long(&self, start: u64) -> ReadError {
        let line = self.line;
        let message = format!("line {line}: its record has more than {RECORD_BYTES_MAX} bytes or {CELLS_MAX} cells");
        ReadError::new(message, "look for a quote that does not close, or for many empty lines")
            .in_file(&self.path)
            .at(start)
    }
}

/// The cells per record at the start of a file, if it looks like a table with this delimiter: more than one, and the same
/// number in all whole records, or at least in the first two.
pub(super) fn cells_of_head(head: &[u8], delimiter: u8) -> Option<usize> {
    let mut parser = parser(delimiter);
    let (mut bytes, mut ends) = (vec![0; head.len().max(1)], vec![0; CELLS_MAX]);
    let (mut at, mut counts) = (0, Vec::new());
    while counts.len() < LOOKED_AT && at < head.len() {
        let (outcome, read, _, cells) = parser.read_record(&head[at..], &mut bytes, &mut ends);
        at += read;
        match outcome {
            ReadRecordResult::Record => counts.push(cells),
            _ => break,
        }
    }
    let first = counts.first().copied().filter(|first| *first > 1)?;
    counts.iter().all(|count| *count == first).then_some(first)
}

fn trimmed(cell: &[u8]) -> Option<&str> {
    std::str::from_utf8(cell.trim_ascii()).ok()
}

/// No value, in a column of numbers.
fn is_missing(text: &str) -> bool {
    matches!(text, "" | "NA" | "N/A" | "NaN" | "nan" | "null" | "NULL" | "None")
}

/// Whether a text may be meant as a number, whichever way its fraction is written.
fn is_number(text: &str) -> bool {
    text.parse::<f64>().is_ok() || Decimal::Comma.number::<f64>(text).is_some()
}

/// What stands before the fraction of a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Decimal {
    #[default]
    Point,
    Comma,
}

impl Decimal {
    /// What `data.decimal` says.
    pub fn read(settings: &Settings) -> Result<Self, SettingError> {
        Ok(match settings.choice("decimal", &[".", ","])? {
            "," => Self::Comma,
            _ => Self::Point,
        })
    }

    /// The number that a text is. With a comma, a point may stand between thousands, so it is in no number.
    fn number<T: FromStr>(self, text: &str) -> Option<T> {
        match self {
            Self::Comma if text.contains('.') => None,
            Self::Comma if text.contains(',') => text.replacen(',', ".", 1).parse().ok(),
            _ => text.parse().ok(),
        }
    }
}

/// Whether a text is a number with a comma before its fraction.
fn has_decimal_comma(text: &str) -> bool {
    text.contains(',') && Decimal::Comma.number::<f64>(text).is_some()
}

/// What the lines after the first one have below a text of it.
#[derive(Clone, Copy, Debug, Default)]
struct Below {
    numbers: bool,
    texts: bool,
    /// Whether that text stands there again.
    same: bool,
}

/// Whether the first line of a table that starts with these bytes is a header. One without numbers is. One with numbers is one
/// if a column of numbers has a text there, or if a text there is what targets are called and stands nowhere below.
pub(super) fn has_header(head: &[u8], delimiter: u8) -> bool {
    let mut cells = Cells::of_stream(Box::new(Cursor::new(head.to_vec())), Path::new(""), delimiter);
    if !matches!(cells.advance(), Ok(true)) {
        return true;
    }
    let texts: Vec<Option<String>> = (0..cells.len()).map(|at| trimmed(cells.cell(at)).map(String::from)).collect();
    if !texts.iter().flatten().any(|text| is_number(text)) {
        return true;
    }
    let is_name = |text: &String| !is_missing(text) && !is_number(text);
    let names: Vec<(usize, &String)> = texts
        .iter()
        .enumerate()
        .filter_map(|(at, text)| Some((at, text.as_ref().filter(|text| is_name(text))?)))
        .collect();
    let mut below = vec![Below::default(); names.len()];
    let mut records = 0;
    // An error is one of the end, where the bytes were cut off.
    while records < HEADER_RECORDS && matches!(cells.advance(), Ok(true)) {
        records += 1;
        if cells.len() != texts.len() {
            continue;
        }
        for ((at, name), below) in names.iter().zip(&mut below) {
            match trimmed(cells.cell(*at)) {
                Some(text) if is_missing(text) => {}
                Some(text) if is_number(text) => below.numbers = true,
                text => {
                    below.texts = true;
                    below.same |= text == Some(name.as_str());
                }
            }
        }
    }
    names.iter().zip(&below).any(|((_, name), below)| {
        let is_over_numbers = below.numbers && !below.texts;
        is_over_numbers || (is_target_name(name) && (below.numbers || below.texts) && !below.same)
    })
}

/// The names of the columns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    pub names: Vec<String>,
    /// Columns at the start that are called as those of an index are: not at all, or as pandas calls them when it reads them.
    unnamed: usize,
}

impl Names {
    /// Of a table without a header.
    pub fn numbered(count: usize) -> Self {
        Self { names: (0..count).map(|at| format!("column{at}")).collect(), unnamed: 0 }
    }

    /// Whether a column of this kind is of the index of the table that was written to the file: one of the first, without a name,
    /// with whole numbers or text. pandas writes one unless it is told not to, and R writes the names of rows so.
    pub fn is_index(&self, at: usize, kind: &RecordKind) -> bool {
        let is_unnamed = at < self.unnamed && self.unnamed < self.names.len();
        is_unnamed && matches!(kind, RecordKind::Int { .. } | RecordKind::Text)
    }
}

/// The name that pandas gives to a column without one, before its number.
const UNNAMED: &str = "Unnamed: ";

/// The names in a header. `head` are the first bytes of the file, for where a name is not UTF-8.
pub(super) fn header_names(cells: &Cells, head: impl FnOnce() -> Vec<u8>) -> Result<Names, ReadError> {
    let wrong = |message: String, hint: &str| {
        ReadError::new(format!("line {}: {message}", cells.line), hint).in_file(&cells.path)
    };
    let (mut names, mut known, mut unnamed) = (Vec::new(), BTreeSet::new(), 0);
    for at in 0..cells.len() {
        let Some(name) = trimmed(cells.cell(at)) else {
            let message = format!("the name of column {at} is not UTF-8 text");
            return Err(wrong(message, encoding::HINT).at(encoding::first_bad(&head())));
        };
        // The number is that of the place where it stood, which another index moved.
        let is_number = |rest: &str| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit());
        let is_unnamed = name.is_empty() || name.strip_prefix(UNNAMED).is_some_and(is_number);
        unnamed += usize::from(at == unnamed && is_unnamed);
        let name = if name.is_empty() { format!("column{at}") } else { name.to_string() };
        if !known.insert(name.clone()) {
            let hint = "give every column a unique name in the first line, or write `header = false`";
            return Err(wrong(format!("two columns are called {}", shown(&name)), hint).at(0));
        }
        names.push(name);
    }
    Ok(Names { names, unnamed })
}

/// Whether the first records of a table, cut by this delimiter, have numbers with a comma before their fraction.
pub(super) fn has_decimal_commas(head: &[u8], delimiter: u8) -> bool {
    let mut cells = Cells::of_stream(Box::new(Cursor::new(head.to_vec())), Path::new(""), delimiter);
    (0..LOOKED_AT).any(|_| {
        matches!(cells.advance(), Ok(true))
            && (0..cells.len()).any(|at| trimmed(cells.cell(at)).is_some_and(has_decimal_comma))
    })
}

/// What has been seen of a column.
#[derive(Debug, Default)]
pub(super) struct ColumnScan {
    /// Cells that are numbers.
    numbers: u64,
    /// Whether some are not whole.
    real: bool,
    /// The first cell that is no number: its file, line and text.
    text: Option<(PathBuf, u64, String)>,
    /// The first cell that would be a number if a comma stood before its fraction.
    comma: Option<(PathBuf, u64, String)>,
}

/// Looks at the cells of a record. One with another number of cells is an error when it is read.
pub(super) fn note(scans: &mut [ColumnScan], cells: &Cells, decimal: Decimal) {
    if cells.len() != scans.len() {
        return;
    }
    for (at, scan) in scans.iter_mut().enumerate() {
        scan.note(cells.cell(at), &cells.path, cells.line, decimal);
    }
}

impl ColumnScan {
    /// Looks at the cell of a record that starts at this line.
    pub fn note(&mut self, cell: &[u8], path: &Path, line: u64, decimal: Decimal) {
        if self.text.is_some() {
            return;
        }
        let text = trimmed(cell);
        let whole = text.and_then(|text| text.parse::<i64>().ok());
        match (text, whole) {
            (Some(text), _) if is_missing(text) => {}
            (Some(text), None) if decimal.number::<f64>(text).is_some() => {
                self.numbers += 1;
                self.real = true;
            }
            (_, Some(_)) => self.numbers += 1,
            (Some(text), None) if decimal == Decimal::Point && has_decimal_comma(text) => {
                self.comma.get_or_insert_with(|| (path.into(), line, text.chars().take(SHOWN_CHARS).collect()));
            }
            _ => {
                let shown = String::from_utf8_lossy(cell).chars().take(SHOWN_CHARS).collect();
                self.text = Some((path.into(), line, shown));
            }
        }
    }

    pub fn kind(&self) -> RecordKind {
        match self {
            Self { text: Some(_), .. } | Self { comma: Some(_), .. } => RecordKind::Text,
            Self { real: false, numbers: 1.., .. } => RecordKind::Int { shape: vec![], classes: None },
            _ => RecordKind::Real { shape: vec![] },
        }
    }

    /// Refuses a column of numbers if the fractions of some stand behind a comma: nothing says yet that they are numbers.
    pub fn refuse_commas(&self, name: &str) -> Result<(), ReadError> {
        let Some((path, line, text)) = self.comma.as_ref().filter(|_| self.text.is_none()) else { return Ok(()) };
        let message = format!("line {line}: column {} has \"{text}\", a number with a comma", shown(name));
        let hint = format!(
            "write `decimal = \",\"` under [data] if its fraction follows, or `text = [\"{name}\"]` if it is text"
        );
        Err(ReadError::new(message, hint).in_file(path))
    }

    /// Why the column is text, if numbers stand in it too.
    pub fn reason(&self) -> Option<String> {
        let (path, line, text) = self.text.as_ref().filter(|_| self.numbers > 0)?;
        Some(format!("{}, line {line}: \"{text}\" is not a number", path.shown()))
    }
}

/// The value of one cell, or what is wrong with it.
pub(super) fn read_cell(
    cell: &[u8],
    (kind, decimal): (&RecordKind, Decimal),
    column: usize,
    record: &mut Record,
) -> Result<(), String> {
    let not_text = || "is not UTF-8 text".to_string();
    if let RecordKind::Text = kind {
        let text = std::str::from_utf8(cell).map_err(|_| not_text())?;
        match text.is_empty() {
            true => record.missing(column),
            false => record.text(column).push_str(text),
        }
        return Ok(());
    }
    let text = trimmed(cell).ok_or_else(not_text)?;
    let shown = || text.chars().take(SHOWN_CHARS).collect::<String>();
    match kind {
        _ if is_missing(text) => record.missing(column),
        RecordKind::Int { .. } => {
            let value = text.parse().map_err(|_| format!("has \"{}\", which is not a whole number", shown()))?;
            record.ints(column).push(value);
        }
        _ => {
            let value = decimal.number::<f32>(text);
            let value = value.ok_or_else(|| format!("has \"{}\", which is not a number", shown()))?;
            if value.is_infinite() && text.contains(|char: char| char.is_ascii_digit()) {
                return Err(format!("has {}, which is too large for 32 bits", shown()));
            }
            record.reals(column).push(value);
        }
    }
    Ok(())
}

/// The number of the line with the first byte of a record, whose bytes may start with the line breaks before it.
pub(in crate::formats) fn line_of(contents: &Contents, offset: u64) -> std::io::Result<u64> {
    let mut lines = Lines { breaks: 0, last: b'\n' };
    std::io::copy(&mut contents.stream_from(0).take(offset), &mut lines)?;
    let mut next = std::io::BufReader::with_capacity(64, contents.stream_from(offset)).bytes();
    while let Some(byte) = next.next().transpose()?.filter(|byte| b"\r\n".contains(byte)) {
        lines.write_all(&[byte])?;
    }
    Ok(lines.breaks + 1)
}

/// Counts line breaks: `\n`, `\r` or both.
struct Lines {
    breaks: u64,
    last: u8,
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        for byte in bytes {
            let second = *byte == b'\n' && self.last == b'\r';
            self.breaks += u64::from(b"\r\n".contains(byte) && !second);
            self.last = *byte;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
