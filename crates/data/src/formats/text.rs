//! Plain UTF-8 text, read in windows of tokens. Bytes are the tokens, or a tokenizer makes them once, at opening, into a
//! temporary file without a name.

use crate::arrays::Element;
use crate::error::ReadError;
use crate::files::{Contents, DataFile};
use crate::format::{Format, OpenedFiles};
use crate::formats::encoding;
use crate::tokenizer::{TextPieces, Tokenizer, UsedTokenizer};
use crate::windows::{Tokens, WindowShape, Windows};
use kolo_graph::settings::Settings;
use std::path::Path;

pub const FORMAT: Format = Format {
    name: "text",
    doc: "plain UTF-8 text, its bytes or what `tokenizer` makes of it, in windows of `context` tokens, `stride` apart",
    extensions: &["txt", "text", "md"],
    sniff,
    open,
};

/// Text without control characters other than white space; its last character may be cut.
fn sniff(path: &Path, head: &[u8]) -> bool {
    let valid = match std::str::from_utf8(head) {
        Ok(text) => Some(text),
        Err(error) if error.error_len().is_none() => std::str::from_utf8(&head[..error.valid_up_to()]).ok(),
        Err(_) => None,
    };
    let is_text =
        |text: &str| !text.is_empty() && !text.contains(|char: char| char.is_control() && !char.is_whitespace());
    path.is_file() && valid.is_some_and(is_text)
}

fn open(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let shape = WindowShape::read(settings)?;
    let path = settings.text("tokenizer", "")?;
    let tokenizer = match path.as_str() {
        "" => Tokenizer::bytes(),
        path => Tokenizer::open(Path::new(path))?,
    };
    let vocab = settings.count("vocab", tokenizer.vocab(), 1)?;
    if vocab < tokenizer.vocab() {
        let message = format!("is {vocab}, but the tokenizer has {} tokens", tokenizer.vocab());
        return Err(settings.wrong("vocab", message, "leave it out").into());
    }
    let mut all = Vec::new();
    for file in files {
        let contents = file.contents(settings)?;
        encoding::refuse_utf16_in(&contents)?;
        all.push(match tokenizer.is_bytes() {
            true => {
                check_text(&contents)?;
                Tokens::new(contents, 0, Element::U8)?
            }
            false => encoded(&contents, &tokenizer)?,
        });
    }
    let digest = tokenizer.digest();
    let beside = files.first().map_or(Path::new(""), |file| &file.path);
    let used = UsedTokenizer::at(&path, digest, tokenizer.vocab(), beside);
    Windows::open(all, shape, vocab, (digest.into(), Some(used)))
}

fn check_text(contents: &Contents) -> Result<(), ReadError> {
    TextPieces::new(contents.stream_from(0), contents.path()).try_for_each(|piece| piece.map(|_| ()))
}

/// The tokens of a file, in a temporary one.
fn encoded(contents: &Contents, tokenizer: &Tokenizer) -> Result<Tokens, ReadError> {
    let failed = |error: std::io::Error| ReadError::io(contents.path(), &error);
    let mut target = tempfile::tempfile().map_err(failed)?;
    let pieces = TextPieces::new(contents.stream_from(0), contents.path());
    let element = tokenizer.element();
    tokenizer.write_tokens(pieces, &mut target)?;
    Tokens::new(Contents::made(contents.path(), target)?, 0, element)
}

#[cfg(test)]
mod tests;
