//! A text as a row of pieces that are checked to be UTF-8, each small enough to be encoded at once.

use crate::error::ReadError;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Bytes of a piece at most.
const PIECE_BYTES: usize = 64 << 10;

/// The pieces of a text. A piece ends behind a line whose next line starts with no white space, since tokenizers may treat
/// a run of white space as one; where there is no such place, before white space; otherwise anywhere between characters.
#[derive(Debug)]
pub struct TextPieces<R> {
    stream: R,
    path: PathBuf,
    buffer: Vec<u8>,
    /// Of the buffer's first byte.
    offset: u64,
    at_end: bool,
    failed: bool,
}

impl<R: Read> TextPieces<R> {
    /// Errors name `path`.
    pub fn new(stream: R, path: &Path) -> Self {
        Self { stream, path: path.into(), buffer: Vec::new(), offset: 0, at_end: false, failed: false }
    }

    /// Bytes of the text handed out.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    fn fill(&mut self) -> Result<(), ReadError> {
        if self.at_end {
            return Ok(());
        }
        let wanted = PIECE_BYTES - self.buffer.len();
        let read = self.stream.by_ref().take(wanted as u64).read_to_end(&mut self.buffer);
        let end = self.offset + self.buffer.len() as u64;
        let read = read.map_err(|error| ReadError::io(&self.path, &error).at(end))?;
        self.at_end = read < wanted;
        Ok(())
    }

    fn piece(&mut self) -> Result<Option<String>, ReadError> {
        self.fill()?;
        let valid = match std::str::from_utf8(&self.buffer) {
            Ok(text) => text,
            Err(error) if error.error_len().is_none() && !self.at_end => {
                std::str::from_utf8(&self.buffer[..error.valid_up_to()]).unwrap_or_default()
            }
            Err(error) => {
                let message = "this is not UTF-8 text";
                let hint = "convert the file to UTF-8, such as by `iconv -f latin1 -t utf-8`";
                let offset = self.offset + error.valid_up_to() as u64;
                return Err(ReadError::new(message, hint).in_file(&self.path).at(offset));
            }
        };
        let end = if self.at_end { valid.len() } else { cut(valid) };
        let piece = valid[..end].to_string();
        self.buffer.drain(..end);
        self.offset += end as u64;
        Ok((!piece.is_empty()).then_some(piece))
    }
}

impl<R: Read> Iterator for TextPieces<R> {
    type Item = Result<String, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let piece = self.piece();
        self.failed = piece.is_err();
        piece.transpose()
    }
}

/// Where to end a piece.
fn cut(text: &str) -> usize {
    let starts_word = |at: usize| text[at..].starts_with(|char: char| !char.is_whitespace());
    let line = text.rmatch_indices('\n').map(|(at, _)| at + 1).find(|at| starts_word(*at));
    let mut starts = text.char_indices().rev().map(|(at, _)| at);
    let word =
        || starts.find(|at| *at > 0 && !starts_word(*at) && text[..*at].ends_with(|char: char| !char.is_whitespace()));
    line.or_else(word).unwrap_or(text.len())
}
