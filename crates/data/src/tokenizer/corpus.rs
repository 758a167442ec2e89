//! From text to a tokenizer or a token file. Files appear under their names only when they are whole.

use super::{TextPieces, Tokenizer, train};
use crate::error::ReadError;
use crate::files::DataFile;
use crate::format::{OpenError, Reader, choose};
use crate::formats::tokens::Description;
use crate::record::{Record, RecordKind, RecordValue};
use kolo_base::ShownPath;
use kolo_graph::settings::Settings;
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Endings of files whose text is in a column.
const TABLES: [&str; 5] = ["csv", "tsv", "jsonl", "ndjson", "parquet"];

/// Text to read: whole files, or a column of a table, each cell a text of its own.
#[derive(Debug)]
pub struct TextSource(Kind);

#[derive(Debug)]
enum Kind {
    Files(Vec<DataFile>),
    Column { reader: Box<dyn Reader>, column: usize },
}

type Texts<'a> = Box<dyn Iterator<Item = Result<String, ReadError>> + Send + 'a>;

impl TextSource {
    /// The text of these files, of this column if there is one. `settings` may say how the files are to be read; errors name
    /// the key `column`.
    pub fn open(files: Vec<DataFile>, column: Option<&str>, settings: &Settings) -> Result<Self, OpenError> {
        let table = files.iter().find(|file| TABLES.contains(&file.extension().as_str()));
        let (column, reader) = match (column, table) {
            (Some(column), _) => (column, (choose(&files, settings)?.open)(&files, settings)?),
            (None, None) => return Ok(Self(Kind::Files(files))),
            (None, Some(table)) => {
                let message = format!("is missing, and {} is a table", table.path.shown());
                return Err(settings.wrong("column", message, "name the column with the text").into());
            }
        };
        let is_it = |at: &usize| {
            let found = &reader.columns()[*at];
            found.name == column && found.kind == RecordKind::Text
        };
        match (0..reader.columns().len()).find(is_it) {
            Some(column) => Ok(Self(Kind::Column { reader, column })),
            None => {
                let texts = reader.columns().iter().filter(|column| column.kind == RecordKind::Text);
                let names = texts.map(|column| column.name.as_str()).collect::<Vec<_>>().join(", ");
                let message = format!("is \"{column}\", which is not a text column");
                Err(settings.wrong("column", message, format!("the text columns are: {names}")).into())
            }
        }
    }

    /// Each text as a row of pieces. A cell that is missing is no text.
    fn texts(&self) -> Box<dyn Iterator<Item = Texts<'_>> + Send + '_> {
        match &self.0 {
            Kind::Files(files) => Box::new(files.iter().map(|file| match file.stream() {
                Ok(stream) => Box::new(TextPieces::new(stream, &file.path)) as Texts<'_>,
                Err(error) => Box::new(std::iter::once(Err(error))),
            })),
            Kind::Column { reader, column } => {
                Box::new((0..reader.len()).filter_map(|at| cell(&**reader, at, *column)))
            }
        }
    }
}

/// The pieces of one cell, unless it is missing.
fn cell(reader: &dyn Reader, at: usize, column: usize) -> Option<Texts<'static>> {
    let mut record = Record::new();
    let pieces: Vec<_> = match reader.read(at, &mut record).map(|()| record.value(column)) {
        Ok(RecordValue::Text(text)) => TextPieces::new(text.as_bytes(), Path::new("")).collect(),
        Ok(_) => return None,
        Err(error) => vec![Err(error)],
    };
    Some(Box::new(pieces.into_iter()))
}

/// Trains a tokenizer on some text and writes it to `out`. `seen` is told the bytes of each piece of text.
pub fn train_on(
    text: &TextSource,
    vocab: usize,
    out: &Path,
    seen: impl Fn(u64) + Send + Sync,
) -> Result<Tokenizer, ReadError> {
    let target = temporary(out)?;
    let pieces = text.texts().flatten();
    let pieces = pieces.inspect(|piece| seen(piece.as_ref().map_or(0, |text| text.len() as u64)));
    let json = train(vocab, pieces)?;
    put(target, json.as_bytes(), out)?;
    Tokenizer::open(out)
}

/// Writes the tokens of some text to `out`, each text with the token that ends it if the tokenizer has one. A description
/// goes beside it. `name` is the tokenizer's file, for the description alone; `seen` is told the bytes of each piece of text.
pub fn write_corpus(
    text: &TextSource,
    tokenizer: &Tokenizer,
    name: &str,
    out: &Path,
    seen: impl Fn(u64) + Send + Sync,
) -> Result<Description, ReadError> {
    let mut target = temporary(out)?;
    // The end of a text is an empty piece.
    let pieces = text.texts().flat_map(|text| text.chain(std::iter::once(Ok(String::new()))));
    let pieces = pieces.inspect(|piece| seen(piece.as_ref().map_or(0, |text| text.len() as u64)));
    let written = tokenizer.write_tokens(pieces, target.as_file_mut());
    let count = written.map_err(|error| if error.file.is_some() { error } else { error.in_file(out) })?;
    if count == 0 {
        return Err(ReadError::new("the text has no tokens", "give files, or a column, with text"));
    }
    let description = Description {
        dtype: tokenizer.dtype().into(),
        vocab: tokenizer.vocab(),
        count,
        tokenizer: name.into(),
        digest: tokenizer.digest().into(),
    };
    // A description of an earlier file must never stand beside this one.
    let beside = Description::path(out);
    match std::fs::remove_file(&beside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(not_written(&beside, &error)),
        _ => {}
    }
    let json = format!("{:#}\n", description.to_json());
    put(target, &[], out)?;
    put(temporary(&beside)?, json.as_bytes(), &beside)?;
    Ok(description)
}

/// An empty file beside `out`, which goes if it is not put there.
fn temporary(out: &Path) -> Result<NamedTempFile, ReadError> {
    let dir = out.parent().filter(|dir| !dir.as_os_str().is_empty()).map_or(PathBuf::from("."), Path::to_path_buf);
    let made = tempfile::Builder::new().prefix(".kolo-").permissions(Permissions::from_mode(0o666)).tempfile_in(dir);
    made.map_err(|error| not_written(out, &error))
}

/// Appends these bytes to the file and gives it its name.
fn put(mut file: NamedTempFile, bytes: &[u8], out: &Path) -> Result<(), ReadError> {
    let failed = |error: io::Error| not_written(out, &error);
    file.write_all(bytes).map_err(failed)?;
    file.as_file().sync_all().map_err(failed)?;
    file.persist(out).map(|_| ()).map_err(|error| failed(error.error))
}

fn not_written(path: &Path, error: &io::Error) -> ReadError {
    ReadError::new(format!("it cannot be written: {error}"), "choose a writable path").in_file(path)
}
