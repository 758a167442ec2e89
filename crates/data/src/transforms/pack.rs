//! `pack`: texts of any length as rows of tokens of one length.
//!
//! The tokens of all texts follow one another, a separator after each, and are cut into rows: no padding, and no text is cut
//! short. It changes which samples there are, so it stands first in the list and works on records. One scan counts the tokens
//! of every text; from then on any row is found by a search, and its texts are read and encoded again. The next token is the
//! target, so a row has one token more than the context.

use crate::error::ReadError;
use crate::format::{OpenError, Reader};
use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::sample::Form;
use crate::tokenizer::{Tokenizer, UsedTokenizer};
use crate::transform::{ALWAYS, Setup, Transform, TransformKind};
use kolo_base::lock;
use kolo_graph::settings::{SIZE_MAX, Settings};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

pub const KIND: TransformKind = TransformKind {
    name: "pack",
    doc: "texts of any length as rows of tokens, a separator after each text; stands first in the list",
    keys: "`context = 128`, `column` (default: the first of text), `tokenizer = \"bytes\"` or a `tokenizer.json`, `separator` (default: the tokenizer's end of text, or byte 0)",
    when: ALWAYS,
    make,
};

/// It is made by [`packed`] if it stands first.
fn make(table: &Settings, _: &mut Form, _: &mut Setup<'_>) -> Result<Box<dyn Transform>, OpenError> {
    Err(table.wrong("kind", "is \"pack\", which must come first in the list", "move it to the front").into())
}

/// From text to tokens.
#[derive(Debug)]
struct Encoder {
    tokenizer: Tokenizer,
    used: UsedTokenizer,
    separator: u32,
}

impl Encoder {
    fn read(table: &Settings) -> Result<Self, OpenError> {
        let tokenizer = match table.text("tokenizer", "bytes")?.as_str() {
            "bytes" => Tokenizer::bytes(),
            path => Tokenizer::open(Path::new(path)).map_err(|error| {
                let message = format!("names a file that cannot be used: {}", error.place_and_message());
                table.wrong("tokenizer", message, error.hint)
            })?,
        };
        let default = tokenizer.end_of_text().unwrap_or(0) as usize;
        let separator = table.count_in("separator", default, 0, tokenizer.vocab() - 1)? as u32;
        let path = match table.text("tokenizer", "bytes")? {
            path if path == "bytes" => String::new(),
            path => path,
        };
        let used = UsedTokenizer::at(&path, tokenizer.digest(), tokenizer.vocab(), Path::new(""));
        Ok(Self { tokenizer, used, separator })
    }
}

/// Rows of tokens of another reader's texts.
#[derive(Debug)]
struct Packed {
    texts: Box<dyn Reader>,
    column: usize,
    columns: [RecordColumn; 1],
    context: usize,
    encoder: Encoder,
    /// Tokens up to the end of each text.
    ends: Vec<u64>,
    scratch: Mutex<Vec<(Record, Vec<u32>)>>,
}

/// Packs the texts of a reader as the table says. Texts that cannot be read are empty if they may be skipped.
pub(crate) fn packed(texts: Box<dyn Reader>, table: &Settings, skips: bool) -> Result<Box<dyn Reader>, OpenError> {
    table.text("kind", "")?;
    let context = table.count_in("context", 128, 1, SIZE_MAX - 1)?;
    let wanted = table.text("column", "")?;
    let is_wanted =
        |column: &RecordColumn| column.kind == RecordKind::Text && (wanted.is_empty() || column.name == wanted);
    let encoder = Encoder::read(table)?;
    table.finish()?;
    let Some(column) = texts.columns().iter().position(is_wanted) else {
        let message = if wanted.is_empty() {
            "is missing, and there is no text column".into()
        } else {
            format!("is \"{wanted}\", which is not a text column")
        };
        return Err(table.wrong("column", message, "name a text column").into());
    };
    let kind = RecordKind::Int { shape: vec![context + 1], classes: Some(encoder.tokenizer.vocab()) };
    let columns = [RecordColumn { name: "tokens".into(), kind }];
    let mut packed = Packed { texts, column, columns, context, encoder, ends: Vec::new(), scratch: Mutex::default() };
    packed.count(skips)?;
    if packed.len() == 0 {
        let tokens = packed.ends.last().copied().unwrap_or(0);
        let message = format!("is {context}, but all texts together have {tokens} tokens");
        return Err(table.wrong("context", message, "make it smaller").into());
    }
    Ok(Box::new(packed))
}

impl Packed {
    fn count(&mut self, skips: bool) -> Result<(), ReadError> {
        let (mut record, mut tokens, mut end) = (Record::new(), Vec::new(), 0u64);
        for at in 0..self.texts.len() {
            tokens.clear();
            match self.text(at, &mut record, &mut tokens) {
                Err(error) if !skips => return Err(error),
                Err(_) => tokens.clear(),
                Ok(()) => {}
            }
            end += tokens.len() as u64;
            self.ends.push(end);
        }
        Ok(())
    }

    /// Appends the tokens of a text, and the separator. A text that is missing has none.
    fn text(&self, at: usize, record: &mut Record, tokens: &mut Vec<u32>) -> Result<(), ReadError> {
        self.texts.read(at, record)?;
        if let RecordValue::Text(text) = record.value(self.column) {
            self.encoder.tokenizer.encode(text, tokens)?;
            tokens.push(self.encoder.separator);
        }
        Ok(())
    }
}

impl Reader for Packed {
    fn columns(&self) -> &[RecordColumn] {
        &self.columns
    }

    fn len(&self) -> usize {
        let tokens = self.ends.last().copied().unwrap_or(0);
        (tokens.saturating_sub(1) / self.context as u64) as usize
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        let (mut text_record, mut tokens) = lock(&self.scratch).pop().unwrap_or_default();
        let start = at as u64 * self.context as u64;
        let mut text = self.ends.partition_point(|end| *end <= start);
        let mut place = text.checked_sub(1).map_or(0, |before| self.ends[before]);
        let row = record.ints(0);
        while row.len() <= self.context {
            tokens.clear();
            let whole = self.text(text, &mut text_record, &mut tokens);
            let expected = self.ends[text] - place;
            if let Err(error) = whole.and_then(|()| changed(tokens.len() as u64, expected)) {
                // Only a text that was counted as empty may stay so.
                if expected > 0 {
                    return Err(error);
                }
                tokens.clear();
            }
            let first = start.saturating_sub(place).min(tokens.len() as u64) as usize;
            let left = self.context + 1 - row.len();
            row.extend(tokens[first..].iter().take(left).map(|token| i64::from(*token)));
            (place, text) = (self.ends[text], text + 1);
        }
        lock(&self.scratch).push((text_record, tokens));
        Ok(())
    }

    fn files(&self) -> Vec<PathBuf> {
        self.texts.files()
    }

    fn tokenizer(&self) -> Option<UsedTokenizer> {
        Some(self.encoder.used.clone())
    }

    fn fingerprint(&self) -> String {
        format!("{} {}", self.texts.fingerprint(), self.encoder.tokenizer.digest())
    }
}

/// The text must have as many tokens as when it was counted.
fn changed(tokens: u64, expected: u64) -> Result<(), ReadError> {
    match tokens == expected {
        true => Ok(()),
        false => {
            let message = format!("a text has {tokens} tokens, but had {expected} when the job started");
            Err(ReadError::new(message, "do not change the files while a job runs"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transform::tests::{Few, image, made, table, text};
    use kolo_graph::settings::Setting;

    #[derive(Debug)]
    struct Texts(Vec<Option<&'static str>>, [RecordColumn; 1]);

    impl Reader for Texts {
        fn columns(&self) -> &[RecordColumn] {
            &self.1
        }

        fn len(&self) -> usize {
            self.0.len()
        }

        fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
            match self.0[at] {
                Some("broken") => return Err(ReadError::new("half a text", "copy it")),
                Some(text) => record.text(0).push_str(text),
                None => record.missing(0),
            }
            Ok(())
        }
    }

    fn rows(texts: &[Option<&'static str>], context: i64, skips: bool) -> Result<Vec<String>, String> {
        let column = RecordColumn { name: "text".into(), kind: RecordKind::Text };
        let keys = [("kind", text("pack")), ("context", Setting::Int(context)), ("separator", Setting::Int(124))];
        let texts = Box::new(Texts(texts.into(), [column]));
        let packed = packed(texts, &table(&keys), skips).map_err(|error| error.to_string())?;
        let mut record = Record::new();
        // In any order, with a record that is used again.
        let row = |at: usize| {
            packed.read(at, &mut record).unwrap();
            let RecordValue::Ints(tokens) = record.value(0) else { panic!() };
            tokens.iter().map(|token| *token as u8 as char).collect()
        };
        let mut rows: Vec<String> = (0..packed.len()).rev().map(row).collect();
        rows.reverse();
        Ok(rows)
    }

    #[test]
    fn texts_follow_one_another() {
        let texts = [Some("abc"), None, Some(""), Some("defgh"), Some("ij")];
        assert_eq!(rows(&texts, 4, false).unwrap(), ["abc||", "|defg", "gh|ij"]);
        assert_eq!(rows(&texts, 12, false).unwrap(), ["abc||defgh|ij"]);
        assert_eq!(rows(&texts, 1, false).unwrap().len(), 13);
        assert!(rows(&texts, 14, false).unwrap_err().contains("all texts together have 14 tokens"));
    }

    #[test]
    fn broken_texts_stop_or_count_as_empty() {
        let texts = [Some("abc"), Some("broken"), Some("def")];
        assert!(rows(&texts, 2, false).unwrap_err().contains("half a text"));
        assert_eq!(rows(&texts, 3, true).unwrap(), ["abc|", "|def"]);
    }

    #[test]
    fn it_stands_first() {
        let (mut form, _) = image(3, 2, 2);
        let error = made(&[("kind", text("pack"))], &mut form, &Few::default()).unwrap_err();
        assert!(error.contains("must come first in the list"), "{error}");
    }
}
