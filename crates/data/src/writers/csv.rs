//! CSV and TSV with a header. A column of several numbers becomes as many columns, `x.0`, `x.1` and so on.

use crate::inspect::shown_name;
use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::writer::{Target, WriteError, Writer, WriterKind, check_names, class_name, real_text};
use std::fs::File;
use std::io::{BufWriter, Write};

pub const CSV: WriterKind = WriterKind {
    name: "csv",
    doc: "comma separated values with a header",
    extensions: &["csv"],
    open: |target| open(target, ','),
};

pub const TSV: WriterKind = WriterKind {
    name: "tsv",
    doc: "tab separated values with a header",
    extensions: &["tsv"],
    open: |target| open(target, '\t'),
};

/// Cells and bytes of one record: the reader takes no more.
const CELLS_MAX: usize = 1 << 16;
const RECORD_BYTES_MAX: usize = 16 << 20;

#[derive(Debug)]
struct CsvWriter {
    out: BufWriter<File>,
    columns: Vec<RecordColumn>,
    delimiter: char,
    line: String,
    /// In the line so far.
    cells: usize,
}

/// Cells of a column.
fn cells(column: &RecordColumn) -> Result<usize, WriteError> {
    match &column.kind {
        RecordKind::Text | RecordKind::Class { .. } => Ok(1),
        RecordKind::Real { shape } | RecordKind::Int { shape, .. } => Ok(shape.iter().product()),
        RecordKind::Image | RecordKind::Pixels { .. } | RecordKind::Bytes => {
            let message =
                format!("`{}` holds images or bytes, which a CSV file cannot store", shown_name(&column.name));
            Err(WriteError::unfit(message, "write a .tar or a .tfrecord"))
        }
    }
}

fn open(target: Target<'_>, delimiter: char) -> Result<Box<dyn Writer>, WriteError> {
    let mut names = Vec::new();
    for (at, column) in target.columns.iter().enumerate() {
        let count = cells(column)?;
        let is_list =
            matches!(&column.kind, RecordKind::Real { shape } | RecordKind::Int { shape, .. } if !shape.is_empty());
        if names.len() + count > CELLS_MAX {
            let message = format!("a record would be a line of more than {CELLS_MAX} cells");
            return Err(WriteError::unfit(message, "write .npz or .jsonl"));
        }
        match is_list {
            true => names.extend((0..count).map(|number| (at, format!("{}.{number}", column.name)))),
            false => names.push((at, column.name.clone())),
        }
    }
    check_header(target.columns, &names)?;
    let mut writer = CsvWriter {
        out: BufWriter::new(target.file),
        columns: target.columns.to_vec(),
        delimiter,
        line: String::new(),
        cells: 0,
    };
    for (_, name) in &names {
        writer.cell(name);
    }
    writer.end_line()?;
    Ok(Box::new(writer))
}

/// Refuses names that the reader would not take for those of different columns: it leaves out space around them, numbers
/// those that are empty, and takes a line with a number in it for a record. Each name comes with the place of its column.
fn check_header(columns: &[RecordColumn], names: &[(usize, String)]) -> Result<(), WriteError> {
    let hint = "rename the column where the files were made, leave it out with --columns, or write .jsonl";
    let read = names.iter().enumerate().map(|(at, (column, name))| {
        let read = match name.trim_ascii() {
            "" => format!("column{at}"),
            name => name.into(),
        };
        (&columns[*column].name[..], read)
    });
    if let Some((_, name)) = read.clone().find(|(_, name)| name.parse::<f64>().is_ok()) {
        let message = format!("a column is called `{name}`, and a line with a number in it is not read as a header");
        return Err(WriteError::unfit(message, hint));
    }
    check_names(read, hint)
}

impl CsvWriter {
    fn cell(&mut self, text: &str) {
        if self.cells > 0 {
            self.line.push(self.delimiter);
        }
        self.cells += 1;
        let is_special = |char: char| char == self.delimiter || ['"', '\n', '\r'].contains(&char);
        // A lone empty cell would be an empty line, which is no record; a mark of byte order would be left out.
        let is_lost = text.starts_with('\u{feff}') || (text.is_empty() && self.columns.len() == 1);
        if text.contains(is_special) || text.trim() != text || is_lost {
            self.line.push('"');
            self.line.push_str(&text.replace('"', "\"\""));
            self.line.push('"');
        } else {
            self.line.push_str(text);
        }
    }

    fn end_line(&mut self) -> Result<(), WriteError> {
        if self.line.len() >= RECORD_BYTES_MAX {
            let message = format!("it would be a line of more than {RECORD_BYTES_MAX} bytes");
            return Err(WriteError::unfit(message, "write .tfrecord or .tar"));
        }
        self.line.push('\n');
        self.out.write_all(self.line.as_bytes())?;
        self.line.clear();
        self.cells = 0;
        Ok(())
    }
}

impl Writer for CsvWriter {
    fn write(&mut self, record: &Record) -> Result<(), WriteError> {
        for at in 0..self.columns.len() {
            let column = self.columns[at].clone();
            let value = record.value(at);
            let texts: Vec<String> = match value {
                RecordValue::Text(text) => vec![text.clone()],
                RecordValue::Reals(values) => values.iter().map(|value| real_text(*value)).collect(),
                RecordValue::Ints(values) => match class_name(&column, value) {
                    Some(name) => vec![name.into()],
                    None => values.iter().map(i64::to_string).collect(),
                },
                RecordValue::Missing | RecordValue::Bytes(_) => vec![String::new(); cells(&column)?],
            };
            texts.iter().for_each(|text| self.cell(text));
        }
        self.end_line()
    }

    fn finish(self: Box<Self>) -> Result<File, WriteError> {
        Ok(self.out.into_inner().map_err(std::io::IntoInnerError::into_error)?)
    }
}
