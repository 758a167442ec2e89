//! Tokenizers: from text to numbers and back.
//!
//! The plainest takes bytes as tokens, or the characters of an alphabet, and needs no file. The others are files as the library `tokenizers` writes them
//! (`tokenizer.json`), read and trained by that library, behind the cargo feature of its name. Long text is encoded in
//! pieces that end at a line, which is a function of the text alone: any number of threads gives the same tokens.

mod corpus;
mod pieces;
#[cfg(feature = "tokenizers")]
mod training;

pub use corpus::{TextSource, train_on, write_corpus};
pub use pieces::TextPieces;

use crate::arrays::Element;
use crate::error::ReadError;
use serde::{Deserialize, Serialize};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Of a file with a tokenizer.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// Stands between documents, where a tokenizer knows it.
pub const END_OF_TEXT: &str = "<|endoftext|>";
/// Text that a thread encodes before the tokens of all are written.
const BATCH_BYTES_PER_THREAD: usize = 512 << 10;

/// Turns text into tokens and tokens into text. Clones share what they know.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    kind: Arc<TokenizerKind>,
    vocab: usize,
    end_of_text: Option<u32>,
    digest: String,
}

/// Which tokenizer made the tokens of some data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsedTokenizer {
    /// Its file, as the job or the description of a token file names it; empty if bytes are the tokens.
    pub path: String,
    pub digest: String,
    pub vocab: usize,
    /// What the file holds, if it could be read and is not too large.
    pub json: Option<String>,
}

/// Of a tokenizer that is kept with what was trained: larger ones are found by their path.
const KEPT_BYTES_MAX: usize = 16 << 20;

impl UsedTokenizer {
    /// The tokenizer of this file, if it is the one with this digest.
    pub(crate) fn at(path: &str, digest: &str, vocab: usize, beside: &Path) -> Self {
        let found = [PathBuf::from(path), beside.with_file_name(path)].into_iter().find_map(|place| {
            let json = String::from_utf8(kolo_base::read_regular(&place, KEPT_BYTES_MAX as u64).ok()?).ok()?;
            (digest_of(json.as_bytes()) == digest).then_some(json)
        });
        Self { path: path.into(), digest: digest.into(), vocab, json: found }
    }

    pub fn is_bytes(&self) -> bool {
        self.path.is_empty()
    }

    /// The tokenizer itself: what was kept, or else its file, if that is still the same.
    pub fn open(&self) -> Result<Tokenizer, ReadError> {
        if self.is_bytes() {
            return Ok(Tokenizer::bytes());
        }
        let path = Path::new(&self.path);
        if let Some(json) = &self.json {
            return Tokenizer::from_json(json.as_bytes()).map_err(|error| error.in_file(path));
        }
        let tokenizer = Tokenizer::open(path)?;
        self.check(&tokenizer).map_err(|error| error.in_file(path))?;
        Ok(tokenizer)
    }

    /// Whether this is the one.
    pub fn check(&self, tokenizer: &Tokenizer) -> Result<(), ReadError> {
        if self.digest.is_empty() || self.digest == tokenizer.digest {
            return Ok(());
        }
        let message = "it is not the tokenizer that the model was trained with";
        let name = if self.is_bytes() { "bytes are its tokens".into() } else { format!("that was {:?}", self.path) };
        Err(ReadError::new(message, format!("{name}, with the digest {}", self.digest)))
    }
}

#[cfg(feature = "tokenizers")]
fn digest_of(bytes: &[u8]) -> String {
    format!("blake3:{}", blake3::hash(bytes).to_hex())
}

#[cfg(not(feature = "tokenizers"))]
fn digest_of(_bytes: &[u8]) -> String {
    String::new()
}

#[derive(Debug)]
enum TokenizerKind {
    Bytes,
    Characters(Vec<char>),
    #[cfg(feature = "tokenizers")]
    Library(Box<tokenizers::Tokenizer>),
}

impl Tokenizer {
    /// Every byte of the text is a token.
    pub fn bytes() -> Self {
        Self { kind: Arc::new(TokenizerKind::Bytes), vocab: 256, end_of_text: None, digest: "bytes".into() }
    }

    /// Every character of the alphabet is a token, whose number is its place there.
    pub fn characters(alphabet: &str) -> Self {
        let characters: Vec<char> = alphabet.chars().collect();
        let (vocab, digest) = (characters.len(), format!("characters:{alphabet}"));
        Self { kind: Arc::new(TokenizerKind::Characters(characters)), vocab, end_of_text: None, digest }
    }

    /// Reads a `tokenizer.json`.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let file = crate::files::DataFile::at(path)?;
        if file.bytes > FILE_BYTES_MAX {
            let message = format!("it has {} bytes; a tokenizer has at most {FILE_BYTES_MAX}", file.bytes);
            return Err(ReadError::new(message, "name a file like tokenizer.json").in_file(path));
        }
        let bytes = kolo_base::read_regular(path, FILE_BYTES_MAX).map_err(|error| ReadError::io(path, &error))?;
        Self::from_json(&bytes).map_err(|error| error.in_file(path))
    }

    #[cfg(not(feature = "tokenizers"))]
    fn from_json(_bytes: &[u8]) -> Result<Self, ReadError> {
        Err(not_built())
    }

    #[cfg(feature = "tokenizers")]
    fn from_json(bytes: &[u8]) -> Result<Self, ReadError> {
        let hint = "name a file that `kolo data tokens train` or the library tokenizers wrote (tokenizer.json)";
        let wrong = |error: String| ReadError::new(format!("it is not a tokenizer: {error}"), hint);
        // The library panics on some texts that are no JSON.
        serde_json::from_slice::<serde_json::Value>(bytes).map_err(|error| wrong(error.to_string()))?;
        let library = guarded(|| tokenizers::Tokenizer::from_bytes(bytes)).map_err(wrong)?;
        let highest = library.get_vocab(true).into_values().max();
        let Some(highest) = highest.filter(|highest| *highest < i32::MAX as u32) else {
            return Err(ReadError::new("the tokenizer has no tokens, or too many", hint));
        };
        let end_of_text = library.token_to_id(END_OF_TEXT);
        let digest = digest_of(bytes);
        let kind = Arc::new(TokenizerKind::Library(Box::new(library)));
        Ok(Self { kind, vocab: highest as usize + 1, end_of_text, digest })
    }

    /// Tokens are smaller than this.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The token between documents, if there is one.
    pub fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }

    /// What tells this tokenizer from others.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Whether tokens are just bytes.
    pub fn is_bytes(&self) -> bool {
        matches!(*self.kind, TokenizerKind::Bytes)
    }

    /// The smallest type that has all tokens, of those that token files have: u16 or u32.
    pub(crate) fn element(&self) -> Element {
        if self.vocab <= 1 << 16 { Element::U16 } else { Element::U32 }
    }

    /// The name of that type.
    pub fn dtype(&self) -> &'static str {
        if self.element() == Element::U16 { "u16" } else { "u32" }
    }

    /// Appends the tokens of a text.
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), ReadError> {
        match &*self.kind {
            TokenizerKind::Bytes => out.extend(text.bytes().map(u32::from)),
            TokenizerKind::Characters(alphabet) => {
                let place = |character| alphabet.iter().position(|known| *known == character);
                for (at, character) in text.chars().enumerate() {
                    let token = place(character).ok_or_else(|| unknown_character(alphabet, at, character))?;
                    out.push(token as u32);
                }
            }
            #[cfg(feature = "tokenizers")]
            TokenizerKind::Library(library) => {
                let encoded = guarded(|| library.encode_fast(text, false)).map_err(|error| {
                    ReadError::new(format!("the tokenizer refuses this text: {error}"), "choose another tokenizer")
                })?;
                out.extend_from_slice(encoded.get_ids());
            }
        }
        Ok(())
    }

    /// The text of some tokens. What is no text becomes U+FFFD, as the end of an unfinished character does.
    pub fn decode(&self, tokens: &[u32]) -> String {
        match &*self.kind {
            TokenizerKind::Bytes => {
                let bytes: Vec<u8> = tokens.iter().map(|token| u8::try_from(*token).unwrap_or(b'?')).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            TokenizerKind::Characters(alphabet) => {
                let character = |token: &u32| alphabet.get(*token as usize).copied();
                tokens.iter().map(|token| character(token).unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
            }
            #[cfg(feature = "tokenizers")]
            TokenizerKind::Library(library) => {
                guarded(|| library.decode(tokens, false)).unwrap_or_else(|_| "\u{fffd}".into())
            }
        }
    }

    /// Writes the tokens of a text in the type of [`Self::dtype`], and counts them. An empty piece stands for the end of a
    /// text, and becomes the token for it if there is one. Threads encode, this one writes.
    pub fn write_tokens(
        &self,
        pieces: impl Iterator<Item = Result<String, ReadError>>,
        target: &mut dyn Write,
    ) -> Result<u64, ReadError> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut target = BufWriter::new(target);
        let (mut pieces, mut count) = (pieces.fuse(), 0);
        loop {
            let batch = next_batch(&mut pieces, threads * BATCH_BYTES_PER_THREAD)?;
            if batch.is_empty() {
                break;
            }
            for tokens in self.encode_all(&batch, threads)? {
                count += tokens.len() as u64;
                self.write(&tokens, &mut target).map_err(not_written)?;
            }
        }
        target.flush().map_err(not_written)?;
        Ok(count)
    }

    /// Writes tokens in the type of [`Self::dtype`].
    pub fn write(&self, tokens: &[u32], target: &mut dyn Write) -> std::io::Result<()> {
        let narrow = self.element() == Element::U16;
        let mut bytes = Vec::with_capacity(4 * tokens.len());
        for token in tokens {
            match u16::try_from(*token) {
                Ok(token) if narrow => bytes.extend(token.to_le_bytes()),
                _ => bytes.extend(token.to_le_bytes()),
            }
        }
        target.write_all(&bytes)
    }

    /// The tokens of each piece. Which thread encodes which changes nothing.
    fn encode_all(&self, pieces: &[String], threads: usize) -> Result<Vec<Vec<u32>>, ReadError> {
        let each = |pieces: &[String]| -> Result<Vec<Vec<u32>>, ReadError> {
            let encode = |piece: &String| {
                let mut tokens = Vec::from_iter(self.end_of_text.filter(|_| piece.is_empty()));
                self.encode(piece, &mut tokens).map(|()| tokens)
            };
            pieces.iter().map(encode).collect()
        };
        std::thread::scope(|scope| {
            let parts = pieces.chunks(pieces.len().div_ceil(threads));
            let start = |part| std::thread::Builder::new().spawn_scoped(scope, move || each(part)).map_err(|_| part);
            let running: Vec<_> = parts.map(start).collect();
            let mut all = Vec::new();
            for thread in running {
                let stopped = |_| ReadError::new("a thread of the tokenizer stopped", "choose another tokenizer");
                all.extend(match thread {
                    Ok(thread) => thread.join().map_err(stopped)??,
                    // There was none to be had.
                    Err(part) => each(part)?,
                });
            }
            Ok(all)
        })
    }
}

/// Pieces of so many bytes together, or more; fewer at the end.
fn next_batch(
    pieces: &mut impl Iterator<Item = Result<String, ReadError>>,
    bytes: usize,
) -> Result<Vec<String>, ReadError> {
    let (mut batch, mut total) = (Vec::new(), 0);
    while total < bytes {
        let Some(piece) = pieces.next().transpose()? else { break };
        // An end of a text is small, but not nothing.
        total += piece.len().max(1);
        batch.push(piece);
    }
    Ok(batch)
}

/// Calls the library, which panics where a tokenizer's file is odd enough.
#[cfg(feature = "tokenizers")]
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)) {
        Ok(outcome) => outcome.map_err(|error| error.to_string()),
        Err(_) => Err("the library stopped at it".into()),
    }
}

fn unknown_character(alphabet: &[char], at: usize, character: char) -> ReadError {
    let known: String = alphabet.iter().collect();
    let message = format!("character {} of the text, {character:?}, is no token", at + 1);
    ReadError::new(message, format!("the model knows the characters {known}"))
}

fn not_written(error: std::io::Error) -> ReadError {
    ReadError::new(format!("the tokens cannot be written: {error}"), "free some space there, or write elsewhere")
}

/// Trains a byte-pair tokenizer on these pieces of text and returns its file. What it learns depends on the text only.
#[cfg(feature = "tokenizers")]
fn train(vocab: usize, pieces: impl Iterator<Item = Result<String, ReadError>> + Send) -> Result<String, ReadError> {
    training::train(vocab, pieces)
}

/// This program was built without the library.
#[cfg(not(feature = "tokenizers"))]
fn train(_: usize, _: impl Iterator<Item = Result<String, ReadError>> + Send) -> Result<String, ReadError> {
    Err(not_built())
}

#[cfg(not(feature = "tokenizers"))]
fn not_built() -> ReadError {
    ReadError::new("this program was built without tokenizers", "build it with the cargo feature `tokenizers`")
}

#[cfg(test)]
mod tests;
