//! What the values of a key are, over all lines, and reading them as that.

use crate::formats::json;
use crate::record::{Record, RecordKind};
use kolo_base::ShownPath;
use kolo_graph::types::DIMS_MAX;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Characters of a value that a message shows.
const SHOWN_CHARS: usize = 40;

/// What has been seen of a key.
#[derive(Debug, Default)]
pub(super) struct KeyScan {
    /// The shape of the first number or list of numbers.
    shape: Option<Vec<usize>>,
    /// Whether some numbers are not whole.
    real: bool,
    /// The first value that is no number: its file, line and text.
    text: Option<(PathBuf, u64, String)>,
}

/// Looks at the values of one line.
pub(super) fn note(keys: &mut BTreeMap<String, KeyScan>, object: &Map<String, Value>, path: &Path, line: u64) {
    for (key, value) in object {
        if !keys.contains_key(key) {
            keys.insert(key.clone(), KeyScan::default());
        }
        let Some(scan) = keys.get_mut(key).filter(|scan| scan.text.is_none()) else { continue };
        let shape = shape_of(value);
        match (value, shape) {
            (value, _) if json::is_missing(value) => {}
            (value, Some(shape)) => {
                scan.shape.get_or_insert(shape);
                scan.real |= !is_whole(value);
            }
            (value, None) => {
                let shown = text_of(value).chars().take(SHOWN_CHARS).collect();
                scan.text = Some((path.into(), line, shown));
            }
        }
    }
}

impl KeyScan {
    /// A row of whole numbers is one of tokens if `data.vocab` says how many there are.
    pub fn kind(&self, vocab: usize) -> RecordKind {
        match (&self.text, self.shape.clone()) {
            (Some(_), _) => RecordKind::Text,
            (None, Some(shape)) if !self.real => {
                let classes = (shape.len() == 1 && vocab > 0).then_some(vocab);
                RecordKind::Int { shape, classes }
            }
            (None, shape) => RecordKind::Real { shape: shape.unwrap_or_default() },
        }
    }

    /// Why the column is text, if numbers stand in it too.
    pub fn reason(&self) -> Option<String> {
        let (path, line, text) = self.text.as_ref().filter(|_| self.shape.is_some())?;
        Some(format!("{}, line {line}: \"{text}\" is not a number", path.shown()))
    }
}

/// A whole number; `true` and `false` are 1 and 0.
fn whole(value: &Value) -> Option<i64> {
    match value {
        Value::Bool(value) => Some(i64::from(*value)),
        value => value.as_i64(),
    }
}

/// Whether all numbers in it are whole.
fn is_whole(value: &Value) -> bool {
    match value {
        Value::Array(values) => values.iter().all(is_whole),
        value => whole(value).is_some(),
    }
}

/// The shape of a number or of nested lists of numbers; `None` if it is anything else, lists differ in length, or lists lie
/// deeper than a tensor has dims. Every value is looked at once.
fn shape_of(value: &Value) -> Option<Vec<usize>> {
    let (mut shape, mut first) = (Vec::new(), value);
    while let Value::Array(values) = first {
        if shape.len() == DIMS_MAX {
            return None;
        }
        shape.push(values.len());
        first = values.first()?;
    }
    has_shape(value, &shape).then_some(shape)
}

/// Whether this is a number, or lists of these lengths with numbers in them.
fn has_shape(value: &Value, shape: &[usize]) -> bool {
    match (value, shape) {
        (Value::Bool(_) | Value::Number(_), []) => true,
        (Value::String(_), []) => json::not_finite(value).is_some(),
        (Value::Array(values), [len, inner @ ..]) => {
            values.len() == *len && values.iter().all(|value| has_shape(value, inner))
        }
        _ => false,
    }
}

fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) if json::not_finite(value).is_none() => text.clone(),
        other => json::text_of(other),
    }
}

/// Writes a value as the column has it, or says what is wrong with it.
pub(super) fn read_value(value: Value, kind: &RecordKind, column: usize, record: &mut Record) -> Result<(), String> {
    match (value, kind) {
        (value, _) if json::is_missing(&value) => record.missing(column),
        (value, RecordKind::Text) => record.text(column).push_str(&text_of(&value)),
        (value, RecordKind::Int { shape, .. } | RecordKind::Real { shape }) => {
            if !has_shape(&value, shape) {
                return Err(match shape_of(&value) {
                    Some(found) => format!("has a value of the shape {found:?}, but the first one has {shape:?}"),
                    None => "has a value that is neither a number nor nested lists of numbers of one shape".into(),
                });
            }
            match kind {
                RecordKind::Int { classes, .. } => {
                    let ints = record.ints(column);
                    push_ints(&value, ints)?;
                    let classes = classes.map_or(i64::MAX, |classes| classes as i64);
                    // A number below 0 may stand in a target for what does not count.
                    if classes < i64::MAX && ints.iter().any(|value| *value >= classes) {
                        return Err(format!("has a token outside of the vocabulary of {classes}"));
                    }
                }
                _ => push_reals(&value, record.reals(column))?,
            }
        }
        (_, _) => return Err("is not a JSON value".into()),
    }
    Ok(())
}

fn push_ints(value: &Value, out: &mut Vec<i64>) -> Result<(), String> {
    match value {
        Value::Array(values) => values.iter().try_for_each(|value| push_ints(value, out)),
        value => {
            out.push(whole(value).ok_or_else(|| format!("has {}, which is not a whole number", text_of(value)))?);
            Ok(())
        }
    }
}

fn push_reals(value: &Value, out: &mut Vec<f32>) -> Result<(), String> {
    match value {
        Value::Array(values) => values.iter().try_for_each(|value| push_reals(value, out)),
        value if json::not_finite(value).is_some() => {
            out.extend(json::not_finite(value));
            Ok(())
        }
        value => {
            let number = value.as_f64().or(whole(value).map(|whole| whole as f64)).unwrap_or(f64::NAN) as f32;
            if !number.is_finite() {
                return Err(format!("has {value}, which is too large for 32 bits"));
            }
            out.push(number);
            Ok(())
        }
    }
}
