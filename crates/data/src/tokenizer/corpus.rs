//! From text files to a tokenizer or a token file. Files appear under their names only when they are whole.

use super::{TextPieces, Tokenizer, train};
use crate::error::ReadError;
use crate::files::DataFile;
use crate::formats::tokens::Description;
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Trains a tokenizer on the text of these files and writes it to `out`. `seen` is told the bytes of each piece of text.
pub fn train_on(
    files: &[DataFile],
    vocab: usize,
    out: &Path,
    seen: impl Fn(u64) + Send + Sync,
) -> Result<Tokenizer, ReadError> {
    let target = temporary(out)?;
    let texts = files.iter().flat_map(|file| match file.stream() {
        Ok(stream) => Texts::Pieces(TextPieces::new(stream, &file.path)),
        Err(error) => Texts::Error(Some(error)),
    });
    let texts = texts.inspect(|text| seen(text.as_ref().map_or(0, |text| text.len() as u64)));
    let json = train(vocab, texts)?;
    put(target, json.as_bytes(), out)?;
    Tokenizer::open(out)
}

/// The text of one file, or why there is none.
enum Texts {
    Pieces(TextPieces<Box<dyn io::Read + Send>>),
    Error(Option<ReadError>),
}

impl Iterator for Texts {
    type Item = Result<String, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Texts::Pieces(pieces) => pieces.next(),
            Texts::Error(error) => error.take().map(Err),
        }
    }
}

/// Writes the tokens of these files to `out`, one after the other, each with the token that ends a text if the tokenizer has
/// one. A description goes beside it. `name` is the tokenizer's file, for the description alone; `seen` is told the bytes of
/// each piece of text.
pub fn write_corpus(
    files: &[DataFile],
    tokenizer: &Tokenizer,
    name: &str,
    out: &Path,
    mut seen: impl FnMut(u64),
) -> Result<Description, ReadError> {
    let failed = |error: io::Error| not_written(out, &error);
    let mut target = temporary(out)?;
    let mut count = 0;
    for file in files {
        let pieces = TextPieces::new(file.stream()?, &file.path);
        let pieces = pieces.inspect(|piece| seen(piece.as_ref().map_or(0, |text| text.len() as u64)));
        count += tokenizer.write_tokens(pieces, target.as_file_mut()).map_err(|error| match error.file {
            Some(_) => error,
            None => error.in_file(out),
        })?;
        if let Some(end) = tokenizer.end_of_text() {
            tokenizer.write(&[end], target.as_file_mut()).map_err(failed)?;
            count += 1;
        }
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
    let text = format!("{:#}\n", description.to_json());
    put(target, &[], out)?;
    put(temporary(&beside)?, text.as_bytes(), &beside)?;
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
    ReadError::new(format!("it cannot be written: {error}"), "choose a path that can be written").in_file(path)
}
