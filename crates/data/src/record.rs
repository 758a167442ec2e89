//! A record: one sample as its file holds it, before anything is decoded or transformed.

use std::path::PathBuf;
use std::sync::Arc;

/// A number of 64 bits as samples have it. One that is finite but beyond 32 bits would become infinite without a word; what is
/// stored as infinite stays so.
pub(crate) fn narrowed(value: f64) -> Result<f32, TooLarge> {
    let narrow = value as f32;
    match narrow.is_infinite() && value.is_finite() {
        true => Err(TooLarge(value)),
        false => Ok(narrow),
    }
}

/// A real number that does not fit in 32 bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TooLarge(f64);

impl std::fmt::Display for TooLarge {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{:e}, which is too large for 32 bits", self.0)
    }
}

/// What to do about it.
pub(crate) const TOO_LARGE_HINT: &str = "scale the numbers, or leave the sample out with `on_error = \"skip\"`";

/// One column of a file's records.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordColumn {
    pub name: String,
    pub kind: RecordKind,
}

/// A column whose type is not read. It matters only to those who ask for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadColumn {
    pub name: String,
    /// As the file's format calls it.
    pub kind: String,
}

/// What a record is called, where its number says less.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordName {
    /// The file that holds it.
    pub file: PathBuf,
    /// What it is called in the file.
    pub key: Option<String>,
}

/// What the values of a column are. Every record of a file has the same columns with the same kinds and shapes.
#[derive(Clone, Debug, PartialEq)]
pub enum RecordKind {
    /// A file of an image: PNG, JPEG, WebP or GIF.
    Image,
    /// Unsigned bytes, channels first: `shape` is `[channels, height, width]`.
    Pixels {
        shape: Vec<usize>,
    },
    Text,
    /// Bytes of no known meaning.
    Bytes,
    Real {
        shape: Vec<usize>,
    },
    /// Whole numbers. `classes`, if the file says it: they lie in `0..classes`.
    Int {
        shape: Vec<usize>,
        classes: Option<usize>,
    },
    /// One whole number: an index into these names.
    Class {
        names: Arc<[String]>,
    },
}

/// One value of a record.
#[derive(Clone, Debug, PartialEq)]
pub enum RecordValue {
    /// An encoded image, pixels, or other bytes.
    Bytes(Vec<u8>),
    Text(String),
    Reals(Vec<f32>),
    /// Also of a class.
    Ints(Vec<i64>),
    /// An empty cell, a null.
    Missing,
}

/// The values of one record, in the order of the columns. A reader is given the same one again and again, so that buffers
/// are used again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    values: Vec<RecordValue>,
}

macro_rules! buffer {
    ($name:ident, $variant:ident, $buffer:ty, $doc:literal) => {
        #[doc = $doc]
        pub fn $name(&mut self, column: usize) -> &mut $buffer {
            if !matches!(self.slot(column), RecordValue::$variant(_)) {
                *self.slot(column) = RecordValue::$variant(<$buffer>::new());
            }
            match self.slot(column) {
                RecordValue::$variant(values) => {
                    values.clear();
                    values
                }
                _ => unreachable!("it was set above"),
            }
        }
    };
}

impl Record {
    pub fn new() -> Self {
        Self::default()
    }

    fn slot(&mut self, column: usize) -> &mut RecordValue {
        if self.values.len() <= column {
            self.values.resize(column + 1, RecordValue::Missing);
        }
        &mut self.values[column]
    }

    buffer!(bytes, Bytes, Vec<u8>, "An empty buffer for the bytes of this column.");
    buffer!(text, Text, String, "An empty buffer for the text of this column.");
    buffer!(reals, Reals, Vec<f32>, "An empty buffer for the numbers of this column.");
    buffer!(ints, Ints, Vec<i64>, "An empty buffer for the whole numbers of this column.");

    pub fn missing(&mut self, column: usize) {
        *self.slot(column) = RecordValue::Missing;
    }

    pub fn value(&self, column: usize) -> &RecordValue {
        self.values.get(column).unwrap_or(&RecordValue::Missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_finite_can_be_too_large() {
        assert_eq!(narrowed(1e-300), Ok(0.0));
        assert_eq!(narrowed(f64::from(f32::MAX)), Ok(f32::MAX));
        assert_eq!(narrowed(f64::NEG_INFINITY), Ok(f32::NEG_INFINITY));
        assert!(narrowed(f64::NAN).unwrap().is_nan());
        assert_eq!(narrowed(-1e39).unwrap_err().to_string(), "-1e39, which is too large for 32 bits");
    }

    #[test]
    fn buffers_are_used_again_and_change_their_kind() {
        let mut record = Record::new();
        record.reals(1).extend([1.0, 2.0]);
        assert_eq!((record.value(0), record.value(1)), (&RecordValue::Missing, &RecordValue::Reals(vec![1.0, 2.0])));
        record.reals(1).push(3.0);
        record.text(0).push('a');
        assert_eq!(record.value(1), &RecordValue::Reals(vec![3.0]));
        record.ints(0).push(7);
        record.missing(1);
        assert_eq!((record.value(0), record.value(1)), (&RecordValue::Ints(vec![7]), &RecordValue::Missing));
    }
}
