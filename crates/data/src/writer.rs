//! Writing records: the formats that data can be converted to.

use crate::error::ReadError;
use crate::format::Reader;
use crate::inspect::shown_name;
use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::writers;
use kolo_base::ShownPath;
use kolo_graph::settings::nearest;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;

/// Writes records one after the other.
pub trait Writer: Send + std::fmt::Debug {
    fn write(&mut self, record: &Record) -> Result<(), WriteError>;

    /// Writes what comes after the last record, and hands everything to the system.
    fn finish(self: Box<Self>) -> Result<File, WriteError>;
}

/// Why data could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error("{0}\n  hint: free some space there, or choose another place")]
    Io(#[from] io::Error),
    /// The format cannot hold these records.
    #[error("{message}\n  hint: {hint}")]
    Unfit { message: String, hint: String },
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl WriteError {
    pub(crate) fn unfit(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Unfit { message: message.into(), hint: hint.into() }
    }

    /// The same, about this record and where it lies.
    fn of_record(self, reader: &dyn Reader, at: usize) -> Self {
        match self {
            Self::Unfit { message, hint } => {
                let about = ReadError::new(format!("record {at}: {message}"), "");
                let about = match reader.place(at) {
                    Some((file, offset)) => about.in_file(&file).at(offset),
                    None => about,
                };
                Self::Unfit { message: about.place_and_message(), hint }
            }
            other => other,
        }
    }
}

/// What is to be written, and where.
#[derive(Debug)]
pub struct Target<'t> {
    /// An empty file.
    pub file: File,
    /// What it will be called: its ending may say how it is read.
    pub path: &'t Path,
    pub columns: &'t [RecordColumn],
    /// How many there will be.
    pub records: usize,
}

/// A format that can be written.
#[derive(Clone, Copy, Debug)]
pub struct WriterKind {
    /// That of the format that reads it.
    pub name: &'static str,
    /// One line of documentation.
    pub doc: &'static str,
    /// Endings of its files, without the dot, in lower case.
    pub extensions: &'static [&'static str],
    pub open: fn(Target<'_>) -> Result<Box<dyn Writer>, WriteError>,
}

/// Every format that can be written.
pub const WRITERS: &[WriterKind] = &[
    writers::csv::CSV,
    writers::csv::TSV,
    writers::jsonl::KIND,
    writers::npy::ARRAY,
    writers::npy::ARCHIVE,
    writers::tokens::KIND,
    writers::webdataset::KIND,
    writers::tfrecord::KIND,
];

/// The format of this name, or else of this file's ending.
pub fn choose(name: Option<&str>, path: &Path) -> Result<&'static WriterKind, WriteError> {
    let names = || WRITERS.iter().map(|kind| kind.name).collect::<Vec<_>>().join(", ");
    if let Some(name) = name {
        return WRITERS.iter().find(|kind| kind.name == name).ok_or_else(|| {
            let near = nearest(name, WRITERS.iter().map(|kind| kind.name));
            let near = near.map_or(String::new(), |near| format!("did you mean {near}? "));
            WriteError::unfit(
                format!("the format `{name}` cannot be written"),
                format!("{near}What can be written: {}", names()),
            )
        });
    }
    let ending = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    let found = WRITERS.iter().find(|kind| kind.extensions.contains(&ending.as_str()));
    found.ok_or_else(|| {
        let endings: Vec<String> =
            WRITERS.iter().flat_map(|kind| kind.extensions).map(|ending| format!(".{ending}")).collect();
        let message = format!("{}: the file ending does not name a format", path.shown());
        WriteError::unfit(
            message,
            format!("use one of the endings {}, or add --to with one of {}", endings.join(" "), names()),
        )
    })
}

/// Writes all records of a reader into a file, which will be called `path`, and tells how many are done. Memory holds one
/// record at a time. What is written can be read back: names that the format would confuse, and values that it would lose,
/// are refused.
pub fn convert(
    reader: &dyn Reader,
    kind: &WriterKind,
    path: &Path,
    file: File,
    tell: &mut dyn FnMut(usize),
) -> Result<File, WriteError> {
    check(reader)?;
    let mut writer = (kind.open)(Target { file, path, columns: reader.columns(), records: reader.len() })?;
    let mut record = Record::new();
    for at in 0..reader.len() {
        reader.read(at, &mut record)?;
        writer.write(&record).map_err(|error| error.of_record(reader, at))?;
        tell(at + 1);
    }
    writer.finish()
}

/// Refuses what no format can hold so that it could be read back.
fn check(reader: &dyn Reader) -> Result<(), WriteError> {
    let columns = reader.columns();
    if columns.is_empty() || reader.is_empty() {
        let what = if columns.is_empty() { "columns" } else { "records" };
        return Err(WriteError::unfit(format!("there are no {what} to write"), "name files that have some"));
    }
    let names = columns.iter().map(|column| (&column.name[..], column.name.clone()));
    check_names(names, "rename one of them where the files were made, or choose others with --columns")?;
    let is_empty = |column: &&RecordColumn| shape_of(&column.kind).is_some_and(|shape| shape.contains(&0));
    match columns.iter().find(is_empty) {
        Some(column) => {
            let message = format!("`{}` has lists without any numbers", shown_name(&column.name));
            Err(WriteError::unfit(message, "choose other columns with --columns"))
        }
        None => Ok(()),
    }
}

/// Refuses names that are the same in the file: of each column, and what the file calls it, or a part of it.
pub(crate) fn check_names<'n>(
    names: impl IntoIterator<Item = (&'n str, String)>,
    hint: &str,
) -> Result<(), WriteError> {
    let mut seen = BTreeMap::new();
    for (column, name) in names {
        let Some(other) = seen.insert(name.clone(), column) else { continue };
        let message = match other == column {
            true => format!("two columns are called `{}`", shown_name(column)),
            false => {
                let [other, column, name] = [other, column, &name].map(shown_name);
                format!("`{other}` and `{column}` would both be called `{name}` in the file")
            }
        };
        return Err(WriteError::unfit(message, hint));
    }
    Ok(())
}

/// Refuses a column of which no record had a value, for formats that know a column by its values alone.
pub(crate) fn check_known(name: &str, is_known: bool) -> Result<(), WriteError> {
    match is_known {
        true => Ok(()),
        false => {
            let message = format!("`{}` is missing in all records, and the file would not have it", shown_name(name));
            Err(WriteError::unfit(message, "choose the others with --columns, or write .jsonl"))
        }
    }
}

/// Numbers of a shape, all present: what arrays are made of.
pub(crate) fn shape_of(kind: &RecordKind) -> Option<&[usize]> {
    match kind {
        RecordKind::Pixels { shape } | RecordKind::Real { shape } | RecordKind::Int { shape, .. } => Some(shape),
        RecordKind::Class { .. } => Some(&[]),
        RecordKind::Image | RecordKind::Text | RecordKind::Bytes => None,
    }
}

/// A real number as the shortest text that reads back the same, never as a whole number.
pub(crate) fn real_text(value: f32) -> String {
    format!("{value:?}")
}

/// The name of a class, if the column has names and the value is one of them.
pub(crate) fn class_name<'c>(column: &'c RecordColumn, value: &RecordValue) -> Option<&'c str> {
    let (RecordKind::Class { names }, RecordValue::Ints(ints)) = (&column.kind, value) else { return None };
    names.get(usize::try_from(*ints.first()?).ok()?).map(String::as_str)
}
