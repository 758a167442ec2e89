//! Writing records: the formats that data can be converted to.

use crate::error::ReadError;
use crate::format::Reader;
use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::writers;
use kolo_graph::settings::nearest;
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
}

/// What is to be written, and where.
#[derive(Debug)]
pub struct Target<'t> {
    /// An empty file.
    pub file: File,
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
        let message = format!("{}: the file ending does not name a format", path.display());
        WriteError::unfit(
            message,
            format!("use one of the endings {}, or add --to with one of {}", endings.join(" "), names()),
        )
    })
}

/// Writes all records of a reader into a file, and tells how many are done. Memory holds one record at a time.
pub fn convert(
    reader: &dyn Reader,
    kind: &WriterKind,
    file: File,
    tell: &mut dyn FnMut(usize),
) -> Result<File, WriteError> {
    let mut writer = (kind.open)(Target { file, columns: reader.columns(), records: reader.len() })?;
    let mut record = Record::new();
    for at in 0..reader.len() {
        reader.read(at, &mut record)?;
        writer.write(&record)?;
        tell(at + 1);
    }
    writer.finish()
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
