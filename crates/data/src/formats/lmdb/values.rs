//! What the values of a column are, told from the first few, and reading one.

use super::keys::PLAIN;
use super::tree::Entry;
use crate::error::ReadError;
use crate::files::Contents;
use crate::record::{Record, RecordColumn, RecordKind};

/// Names of columns whose texts are whole numbers, if the first ones are.
const LABELS: [&str; 7] = ["cls", "label", "labels", "class", "target", "index", "y"];

#[derive(Debug, PartialEq)]
pub(super) enum Value {
    /// Image files and other bytes.
    Bytes(usize),
    Text(usize),
    Int(usize),
}

/// Whether this is what Python's `pickle` writes, of its second protocol or a later one.
pub(super) fn is_pickled(bytes: &[u8]) -> bool {
    matches!(bytes, [0x80, 2..=5, .., b'.'])
}

fn is_image(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x89PNG\r\n\x1a\n") || bytes.starts_with(&[0xFF, 0xD8, 0xFF])
}

/// What the column `name` is, by its first values; its record columns are appended.
pub(super) fn value(name: &str, first: &[Vec<u8>], columns: &mut Vec<RecordColumn>) -> Value {
    let column = columns.len();
    let mut add = |kind| columns.push(RecordColumn { name: name.into(), kind });
    let texts = || first.iter().map(|bytes| str::from_utf8(bytes).ok());
    let is_whole = |text: Option<&str>| text.is_some_and(|text| text.trim().parse::<i64>().is_ok());
    if first.first().is_some_and(|bytes| is_image(bytes)) {
        add(RecordKind::Image);
        Value::Bytes(column)
    } else if name != PLAIN && LABELS.contains(&name) && !first.is_empty() && texts().all(is_whole) {
        add(RecordKind::Int { shape: Vec::new(), classes: None });
        Value::Int(column)
    } else if texts().all(|text| text.is_some()) {
        add(RecordKind::Text);
        Value::Text(column)
    } else {
        add(RecordKind::Bytes);
        Value::Bytes(column)
    }
}

impl Value {
    /// Reads a value. The inner error is of the record, to which the caller adds its key.
    pub fn read(
        &self,
        contents: &Contents,
        entry: &Entry,
        record: &mut Record,
    ) -> Result<Result<(), String>, ReadError> {
        let (at, len) = (entry.value_at, u64::from(entry.value_bytes));
        if let Self::Bytes(column) = self {
            contents.read_into(at, len, record.bytes(*column))?;
            return Ok(Ok(()));
        }
        let mut bytes = Vec::new();
        contents.read_into(at, len, &mut bytes)?;
        Ok(self.parse(&bytes, record))
    }

    fn parse(&self, bytes: &[u8], record: &mut Record) -> Result<(), String> {
        let text = str::from_utf8(bytes).map_err(|_| String::from("its value is no text in UTF-8"));
        match self {
            Self::Bytes(column) => record.bytes(*column).extend_from_slice(bytes),
            Self::Text(column) => record.text(*column).push_str(text?),
            Self::Int(column) => {
                let text = text?.trim();
                let number = text.parse().map_err(|_| format!("{text:.40?} is no whole number"))?;
                record.ints(*column).push(number);
            }
        }
        Ok(())
    }
}
