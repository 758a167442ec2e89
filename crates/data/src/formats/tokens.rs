//! Token files: the numbers of tokens one after the other, u16 or u32, lowest byte first. Without a header, as `kolo data
//! tokens` and nanoGPT write them, or with the header of llm.c.
//!
//! What `kolo data tokens` writes has a description beside it, `corpus.bin.json`. Of other files `data.dtype` and
//! `data.vocab` may say what they hold; where they do not, u16 is taken, and all tokens are looked at once.

use crate::arrays::Element;
use crate::error::ReadError;
use crate::files::{Contents, DataFile, open_regular};
use crate::format::{Format, OpenError, OpenedFiles};
use crate::tokenizer::UsedTokenizer;
use crate::windows::{Tokens, WindowShape, Windows};
use kolo_graph::settings::{SIZE_MAX, Settings};
use serde_json::Value;
use std::io::Read;
use std::path::{Path, PathBuf};

pub const FORMAT: Format = Format {
    name: "tokens",
    doc: "token files of u16 or u32 (`dtype`), read in windows of `context` tokens, `stride` apart",
    extensions: &["bin", "u16", "u32", "tokens"],
    sniff: |path, _| path.is_file() && ENDINGS.iter().any(|ending| has_ending(path, ending)),
    open,
};

const ENDINGS: [&str; 4] = ["bin", "u16", "u32", "tokens"];
/// llm.c: 256 numbers of 32 bits, of which the first three are these, the version and the count of tokens.
const LLM_C_U16: u32 = 20_240_520;
const LLM_C_U32: u32 = 20_240_801;
const LLM_C_BYTES: u64 = 1024;
/// Of the description.
const DESCRIPTION_BYTES_MAX: u64 = 64 << 10;

fn has_ending(path: &Path, ending: &str) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    let name = name.strip_suffix(".gz").or(name.strip_suffix(".zst")).unwrap_or(&name);
    name.ends_with(&format!(".{ending}"))
}

/// What stands beside a token file that `kolo data tokens` wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// u16 or u32.
    pub dtype: String,
    pub vocab: usize,
    /// Of tokens.
    pub count: u64,
    /// The file with the tokenizer; empty if bytes are the tokens.
    pub tokenizer: String,
    /// Its digest.
    pub digest: String,
}

impl Description {
    /// Where the description of a token file is.
    pub fn path(tokens: &Path) -> PathBuf {
        let mut name = tokens.as_os_str().to_os_string();
        name.push(".json");
        name.into()
    }

    pub fn to_json(&self) -> Value {
        serde_json::json!({
            "format": "tokens", "dtype": self.dtype, "vocab": self.vocab, "count": self.count,
            "tokenizer": self.tokenizer, "tokenizer_digest": self.digest,
        })
    }

    /// That of a token file, if it has one.
    pub fn beside(tokens: &Path) -> Result<Option<Self>, ReadError> {
        let path = Self::path(tokens);
        let mut text = Vec::new();
        let file = match open_regular(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(ReadError::io(&path, &error)),
        };
        file.take(DESCRIPTION_BYTES_MAX).read_to_end(&mut text).map_err(|error| ReadError::io(&path, &error))?;
        let wrong = |message: String| {
            let hint =
                "make it again with `kolo data tokens apply`, or remove it and set `data.dtype` and `data.vocab`";
            ReadError::new(message, hint).in_file(&path)
        };
        let value: Value = serde_json::from_slice(&text).map_err(|error| wrong(format!("it is not JSON: {error}")))?;
        let read = || {
            let text = |key: &str| value.get(key).and_then(Value::as_str).map(String::from);
            let vocab = value.get("vocab")?.as_u64().filter(|vocab| (1..=SIZE_MAX as u64).contains(vocab))?;
            let dtype = text("dtype").filter(|dtype| element(dtype).is_some())?;
            let (tokenizer, digest) =
                (text("tokenizer").unwrap_or_default(), text("tokenizer_digest").unwrap_or_default());
            Some(Self { dtype, vocab: vocab as usize, count: value.get("count")?.as_u64()?, tokenizer, digest })
        };
        read().map(Some).ok_or_else(|| wrong("it lacks `dtype`, `vocab` or `count`".into()))
    }
}

fn element(dtype: &str) -> Option<Element> {
    match dtype {
        "u16" => Some(Element::U16),
        "u32" => Some(Element::U32),
        _ => None,
    }
}

fn open(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let shape = WindowShape::read(settings)?;
    let dtype = settings.choice("dtype", &["auto", "u16", "u32"])?;
    let vocab = settings.count_in("vocab", 0, 0, SIZE_MAX)?;
    let (mut all, mut found, mut made_by, mut used) = (Vec::new(), 0, String::new(), None);
    for file in files {
        let (tokens, description) = tokens(file, dtype, settings)?;
        found = found.max(match (&description, vocab) {
            (_, 1..) => vocab,
            (Some(description), _) => description.vocab,
            (None, _) => tokens.find_vocab()?,
        });
        if let Some(description) = description.filter(|description| !made_by.contains(&description.digest)) {
            made_by += &description.digest;
            let Description { tokenizer, digest, vocab, .. } = &description;
            used.get_or_insert_with(|| UsedTokenizer::at(tokenizer, digest, *vocab, &file.path));
        }
        all.push(tokens);
    }
    Windows::open(all, shape, found, (made_by, used))
}

/// The tokens of one file, and what is written about them.
fn tokens(file: &DataFile, dtype: &str, settings: &Settings) -> Result<(Tokens, Option<Description>), OpenError> {
    let contents = file.contents(settings)?;
    let description = Description::beside(&file.path)?;
    let header = LlmC::read(&contents)?;
    let by_ending = || ["u16", "u32"].into_iter().find(|ending| has_ending(&file.path, ending));
    let described = description.as_ref().map(|description| description.dtype.as_str());
    let known = match (dtype, &header) {
        ("auto", Some(header)) => Some(header.element),
        ("auto", None) => described.or(by_ending()).and_then(element),
        (dtype, _) => element(dtype),
    };
    let (start, element) = (header.as_ref().map_or(0, |_| LLM_C_BYTES), known.unwrap_or(Element::U16));
    let tokens = Tokens::new(contents.clone(), start, element)?;
    let said = description.as_ref().map(|known| known.count).or(header.map(|header| header.count));
    match said {
        Some(count) if count != tokens.count => {
            let message = format!("it has {} tokens of {element}, but its metadata say {count}", tokens.count);
            Err(contents.damaged(start, message).into())
        }
        _ => Ok((tokens, description)),
    }
}

/// The header of llm.c.
#[derive(Debug)]
struct LlmC {
    element: Element,
    count: u64,
}

impl LlmC {
    fn read(contents: &Contents) -> Result<Option<Self>, ReadError> {
        if contents.bytes() < LLM_C_BYTES {
            return Ok(None);
        }
        let mut head = [0; 12];
        contents.read_at(0, &mut head)?;
        let [magic, version, count] =
            [0, 4, 8].map(|at| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]));
        let element = match (magic, version) {
            (LLM_C_U16, 1) => Element::U16,
            (LLM_C_U32, 7) => Element::U32,
            (LLM_C_U16 | LLM_C_U32, version) => {
                return Err(contents.damaged(4, format!("version {version} of llm.c's token files is not known")));
            }
            _ => return Ok(None),
        };
        Ok(Some(Self { element, count: count.into() }))
    }
}

#[cfg(test)]
mod tests;
