//! CSV and TSV with a header. A column of several numbers becomes as many columns, `x.0`, `x.1` and so on.

use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::writer::{Target, WriteError, Writer, WriterKind, class_name, real_text};
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

/// Columns of one record.
const CELLS_MAX: usize = 100_000;

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
            let message = format!("`{}` holds images or bytes, which a CSV file cannot store", column.name);
            Err(WriteError::unfit(message, "write a .tar or a .tfrecord"))
        }
    }
}

fn open(target: Target<'_>, delimiter: char) -> Result<Box<dyn Writer>, WriteError> {
    let mut names = Vec::new();
    for column in target.columns {
        let count = cells(column)?;
        let is_list =
            matches!(&column.kind, RecordKind::Real { shape } | RecordKind::Int { shape, .. } if !shape.is_empty());
        if names.len() + count > CELLS_MAX {
            let message = format!("a record would be a line of more than {CELLS_MAX} cells");
            return Err(WriteError::unfit(message, "write .npz or .jsonl"));
        }
        match is_list {
            true => names.extend((0..count).map(|at| format!("{}.{at}", column.name))),
            false => names.push(column.name.clone()),
        }
    }
    let mut writer = CsvWriter {
        out: BufWriter::new(target.file),
        columns: target.columns.to_vec(),
        delimiter,
        line: String::new(),
        cells: 0,
    };
    for name in &names {
        writer.cell(name);
    }
    writer.end_line()?;
    Ok(Box::new(writer))
}

impl CsvWriter {
    fn cell(&mut self, text: &str) {
        if self.cells > 0 {
            self.line.push(self.delimiter);
        }
        self.cells += 1;
        let is_special = |char: char| char == self.delimiter || ['"', '\n', '\r'].contains(&char);
        // A lone empty cell would be an empty line, which is no record.
        if text.contains(is_special) || text.trim() != text || (text.is_empty() && self.columns.len() == 1) {
            self.line.push('"');
            self.line.push_str(&text.replace('"', "\"\""));
            self.line.push('"');
        } else {
            self.line.push_str(text);
        }
    }

    fn end_line(&mut self) -> Result<(), WriteError> {
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
