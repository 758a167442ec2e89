//! Windows of a long row of tokens: `x` is a window, `y` the same window one token on. What token files and text are read as.
//!
//! A window never reaches over the end of a file. The tokens of a file that fill no window are left out.

use crate::ahead::ReadAhead;
use crate::arrays::Element;
use crate::error::ReadError;
use crate::files::Contents;
use crate::format::{OpenError, OpenedFiles, Reader};
use crate::parts::Parts;
use crate::record::{Record, RecordColumn, RecordKind};
use crate::tokenizer::UsedTokenizer;
use kolo_graph::settings::{SIZE_MAX, Settings};

/// Tokens of a window, unless `data.context` says otherwise.
const CONTEXT: usize = 128;
/// Tokens of a window at most: 16 M.
const CONTEXT_MAX: usize = 1 << 24;
/// What is read at once where all tokens are looked at.
const SCAN_BYTES: u64 = 1 << 20;

/// The tokens of one file.
#[derive(Clone, Debug)]
pub(crate) struct Tokens {
    pub file: ReadAhead,
    /// Where the first token is.
    pub start: u64,
    pub count: u64,
    pub element: Element,
}

impl Tokens {
    /// All tokens of the contents from `start` on.
    pub fn new(contents: Contents, start: u64, element: Element) -> Result<Self, ReadError> {
        let bytes = contents.bytes().saturating_sub(start);
        let count = bytes / element.bytes();
        if !bytes.is_multiple_of(element.bytes()) {
            let message = format!("{bytes} bytes are not a whole number of {element} tokens");
            return Err(contents.damaged(start + count * element.bytes(), message));
        }
        Ok(Self { file: ReadAhead::new(contents), start, count, element })
    }

    fn windows(&self, shape: &WindowShape) -> usize {
        let last = self.count.checked_sub(1 + shape.context as u64);
        last.map_or(0, |last| usize::try_from(last / shape.stride as u64 + 1).unwrap_or(usize::MAX))
    }

    /// The largest token plus one.
    pub fn find_vocab(&self) -> Result<usize, ReadError> {
        let (mut at, end) = (self.start, self.start + self.count * self.element.bytes());
        let mut most = 0;
        while at < end {
            let len = SCAN_BYTES.min(end - at);
            most = most.max(self.file.with(at, len, |bytes| largest(self.element, bytes))?);
            at += len;
        }
        Ok(most as usize + 1)
    }
}

/// The largest of some tokens.
fn largest(element: Element, bytes: &[u8]) -> u32 {
    match element {
        Element::U8 => bytes.iter().copied().max().unwrap_or(0).into(),
        Element::U16 => bytes.as_chunks().0.iter().map(|two| u16::from_le_bytes(*two)).max().unwrap_or(0).into(),
        _ => bytes.as_chunks().0.iter().map(|four| u32::from_le_bytes(*four)).max().unwrap_or(0),
    }
}

/// How windows lie, by the keys of `[data]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowShape {
    pub context: usize,
    pub stride: usize,
}

impl WindowShape {
    pub fn read(settings: &Settings) -> Result<Self, OpenError> {
        let context = settings.count_in("context", CONTEXT, 2, CONTEXT_MAX)?;
        let stride = settings.count_in("stride", context, 1, SIZE_MAX)?;
        Ok(Self { context, stride })
    }
}

/// The windows of all files.
#[derive(Debug)]
pub(crate) struct Windows {
    columns: Vec<RecordColumn>,
    parts: Parts<Tokens>,
    shape: WindowShape,
    vocab: usize,
    /// Says which tokenizer made the tokens.
    made_by: String,
    tokenizer: Option<UsedTokenizer>,
    /// What was left out.
    notes: Vec<String>,
}

impl Windows {
    pub fn open(
        files: Vec<Tokens>,
        shape: WindowShape,
        vocab: usize,
        (made_by, tokenizer): (String, Option<UsedTokenizer>),
    ) -> OpenedFiles {
        let kind = RecordKind::Int { shape: vec![shape.context], classes: Some(vocab) };
        let columns = ["x", "y"].map(|name| RecordColumn { name: name.into(), kind: kind.clone() }).into();
        let most = files.iter().max_by_key(|file| file.count).cloned();
        let (mut parts, all, mut short) = (Parts::new(), files.len(), 0);
        for file in files {
            let windows = file.windows(&shape);
            short += usize::from(windows == 0);
            parts.push(file, windows);
        }
        let needed = shape.context + 1;
        let note = format!("left out: {short} of {all} files, which have fewer than the {needed} tokens of a sample");
        let notes = if short > 0 { vec![note] } else { vec![] };
        match (parts.len(), most) {
            (0, Some(longest)) => {
                let message = format!("it has {} tokens, but a sample needs {}", longest.count, shape.context + 1);
                let path = longest.file.contents().path();
                Err(ReadError::new(message, "lower `data.context`, or give more text").in_file(path).into())
            }
            _ => Ok(Box::new(Self { columns, parts, shape, vocab, made_by, tokenizer, notes })),
        }
    }

    fn outside(&self, tokens: &Tokens, offset: u64, bytes: &[u8]) -> ReadError {
        let size = tokens.element.bytes() as usize;
        let at = bytes.chunks_exact(size).position(|token| largest(tokens.element, token) as usize >= self.vocab);
        let at = at.unwrap_or(0) * size;
        let token = largest(tokens.element, &bytes[at..at + size]);
        let message = format!("token {token} is outside of the vocabulary of {}", self.vocab);
        let hint = "set `data.vocab` and `data.dtype` to those of the tokens, or make the file again";
        ReadError::new(message, hint).in_file(tokens.file.contents().path()).at(offset + at as u64)
    }
}

impl Reader for Windows {
    fn columns(&self) -> &[RecordColumn] {
        &self.columns
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn len(&self) -> usize {
        self.parts.len()
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        let (tokens, window) = self.parts.find(at)?;
        let (size, context) = (tokens.element.bytes(), self.shape.context as u64);
        let offset = tokens.start + window as u64 * self.shape.stride as u64 * size;
        tokens.file.with(offset, (context + 1) * size, |bytes| {
            if largest(tokens.element, bytes) as usize >= self.vocab {
                return Err(self.outside(tokens, offset, bytes));
            }
            let (inputs, targets) = (&bytes[..bytes.len() - size as usize], &bytes[size as usize..]);
            let inputs = tokens.element.ints(inputs, record.ints(0));
            inputs.and(tokens.element.ints(targets, record.ints(1))).map_err(|_| self.outside(tokens, offset, bytes))
        })?
    }

    fn tokenizer(&self) -> Option<UsedTokenizer> {
        self.tokenizer.clone()
    }

    fn fingerprint(&self) -> String {
        self.made_by.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::DataFile;

    /// `cargo test --release -p kolo-data --lib windows -- --ignored --nocapture` prints how fast windows are read.
    #[test]
    #[ignore = "measures"]
    fn speed_of_windows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("corpus.bin");
        let tokens: Vec<u8> = (0..1 << 26).flat_map(|token: u32| ((token % 50_000) as u16).to_le_bytes()).collect();
        std::fs::write(&path, &tokens).unwrap();
        for context in [128, 1024] {
            let contents = DataFile::at(&path).unwrap().contents(&Settings::new("data", "job.toml:1")).unwrap();
            let tokens = Tokens::new(contents, 0, Element::U16).unwrap();
            let shape = WindowShape { context, stride: context };
            let reader = Windows::open(vec![tokens], shape, 50_000, (String::new(), None)).unwrap();
            for (name, factor) in [("in order", 1), ("scattered", 7919)] {
                let (start, mut record) = (std::time::Instant::now(), Record::new());
                (0..reader.len()).for_each(|at| reader.read(at * factor % reader.len(), &mut record).unwrap());
                let bytes = (reader.len() * context * 2) as f64;
                println!("context {context}, {name}: {:.2} GB/s", bytes / start.elapsed().as_secs_f64() / 1e9);
            }
        }
    }
}
