//! From the members of a sample to columns: what each ending holds.

use super::npy::Array;
use crate::error::shown;
use crate::formats::json;
use crate::image;
use crate::record::{Record, RecordColumn, RecordKind, UnreadColumn, narrowed};
use serde_json::Value;
use std::collections::BTreeMap;

/// What the members with some endings become.
#[derive(Debug, PartialEq)]
pub(crate) enum Part {
    Image(usize),
    Int(usize),
    Text(usize),
    Bytes(usize),
    Array {
        column: usize,
        shape: Vec<usize>,
        is_real: bool,
    },
    /// Keys of an object, each a column.
    Json(Vec<JsonKey>),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct JsonKey {
    key: String,
    kind: JsonKind,
    column: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum JsonKind {
    Int,
    Real,
    Text,
}

/// Endings of images that are the `image` of a sample, whichever of them it has.
pub(super) const IMAGES: &[&str] = image::ENDINGS;
const WHOLE_NUMBERS: [&str; 6] = ["cls", "cls2", "class", "count", "index", "inx"];
const TEXTS: [&str; 3] = ["txt", "text", "transcript"];

/// What the endings of some samples become.
#[derive(Debug, Default)]
pub(crate) struct Columns {
    pub columns: Vec<RecordColumn>,
    pub parts: Vec<Part>,
    /// The part of each ending.
    pub part_of: Vec<usize>,
    /// Keys of objects that are no columns.
    pub unread: Vec<UnreadColumn>,
}

/// What these endings become. `looked_at` are the first few members with each, if they [say more](says_more). Images with
/// different endings are one part, unless a sample has two of them.
pub(super) fn of_endings(endings: &[String], has_two_images: bool, looked_at: &[Vec<Vec<u8>>]) -> Columns {
    let mut found = Columns::default();
    let mut image_part = None;
    for (ending, looked_at) in endings.iter().zip(looked_at) {
        let is_image = IMAGES.contains(&ending.as_str()) && !has_two_images;
        if let (true, Some(part)) = (is_image, image_part) {
            found.part_of.push(part);
            continue;
        }
        let name = if is_image { "image" } else { ending };
        let part = part(ending, name, looked_at, (&mut found.columns, &mut found.unread));
        found.part_of.push(found.parts.len());
        image_part = is_image.then_some(found.parts.len()).or(image_part);
        found.parts.push(part);
    }
    found
}

/// Whether the columns of members with this ending depend on what the members hold.
pub(super) fn says_more(ending: &str) -> bool {
    ["json", "npy"].contains(&last(ending))
}

fn last(ending: &str) -> &str {
    ending.rsplit('.').next().unwrap_or(ending)
}

/// The part that members with this ending are, and its columns, which are appended, as are keys of objects that are no columns.
/// `samples` are the first few of them, if they [say more](says_more).
pub(crate) fn part(
    ending: &str,
    name: &str,
    samples: &[Vec<u8>],
    (columns, unread): (&mut Vec<RecordColumn>, &mut Vec<UnreadColumn>),
) -> Part {
    let column = columns.len();
    let mut add = |name: &str, kind: RecordKind| columns.push(RecordColumn { name: name.into(), kind });
    let last = last(ending);
    if IMAGES.contains(&last) {
        add(name, RecordKind::Image);
        return Part::Image(column);
    }
    if WHOLE_NUMBERS.contains(&last) {
        add(name, RecordKind::Int { shape: vec![], classes: None });
        return Part::Int(column);
    }
    if last == "json" {
        let (mut keys, others) = json_keys(samples);
        for (at, key) in keys.iter_mut().enumerate() {
            key.column = column + at;
            let kind = match key.kind {
                JsonKind::Int => RecordKind::Int { shape: vec![], classes: None },
                JsonKind::Real => RecordKind::Real { shape: vec![] },
                JsonKind::Text => RecordKind::Text,
            };
            add(&format!("{name}.{}", key.key), kind);
        }
        if !keys.is_empty() {
            let column =
                |(key, kind): (String, &str)| UnreadColumn { name: format!("{name}.{key}"), kind: kind.into() };
            unread.extend(others.into_iter().map(column));
            return Part::Json(keys);
        }
    }
    if TEXTS.contains(&last) || last == "json" {
        add(name, RecordKind::Text);
        return Part::Text(column);
    }
    if last == "npy"
        && let Some((shape, is_real)) = array_kind(samples)
    {
        let kind = match is_real {
            true => RecordKind::Real { shape: shape.clone() },
            false => RecordKind::Int { shape: shape.clone(), classes: None },
        };
        add(name, kind);
        return Part::Array { column, shape, is_real };
    }
    add(name, RecordKind::Bytes);
    Part::Bytes(column)
}

/// The shape that all these arrays have, and whether any holds fractions. What is no array is an error when it is read.
fn array_kind(samples: &[Vec<u8>]) -> Option<(Vec<usize>, bool)> {
    let arrays: Vec<Array<'_>> = samples.iter().filter_map(|sample| Array::parse(sample).ok()).collect();
    let shape = arrays.first()?.shape.clone();
    arrays.iter().all(|array| array.shape == shape).then(|| (shape, arrays.iter().any(Array::is_float)))
}

/// The keys whose values are numbers, texts or truth values in all samples that have them; and the others, with what they are.
/// What is no JSON object is an error when it is read.
fn json_keys(samples: &[Vec<u8>]) -> (Vec<JsonKey>, Vec<(String, &'static str)>) {
    let mut keys: BTreeMap<String, Result<JsonKind, &'static str>> = BTreeMap::new();
    for sample in samples {
        let Ok(Value::Object(object)) = json::parse(sample) else { continue };
        for (name, value) in object {
            let kind = match value {
                value if json::is_missing(&value) => continue,
                value if json::not_finite(&value).is_some() => Ok(JsonKind::Real),
                Value::Null => continue,
                Value::Bool(_) => Ok(JsonKind::Int),
                Value::Number(number) if number.as_i64().is_some() => Ok(JsonKind::Int),
                Value::Number(_) => Ok(JsonKind::Real),
                Value::String(_) => Ok(JsonKind::Text),
                Value::Array(_) => Err("list"),
                Value::Object(_) => Err("object"),
            };
            let known = keys.entry(name).or_insert(kind);
            *known = match (*known, kind) {
                (known, kind) if known == kind => known,
                (Ok(JsonKind::Int | JsonKind::Real), Ok(JsonKind::Int | JsonKind::Real)) => Ok(JsonKind::Real),
                _ => Err("values of several types"),
            };
        }
    }
    let (mut read, mut others) = (Vec::new(), Vec::new());
    for (key, kind) in keys {
        match kind {
            Ok(kind) => read.push(JsonKey { key, kind, column: 0 }),
            Err(kind) => others.push((key, kind)),
        }
    }
    (read, others)
}

impl Part {
    /// Reads a member into its columns, and calls `found` with each that has a value now.
    pub fn read(&self, bytes: &[u8], record: &mut Record, found: &mut dyn FnMut(usize)) -> Result<(), String> {
        let text = || std::str::from_utf8(bytes).map_err(|_| String::from("the member is not UTF-8 text"));
        match self {
            Self::Image(column) | Self::Bytes(column) => {
                record.bytes(*column).extend_from_slice(bytes);
                found(*column);
            }
            Self::Text(column) => {
                record.text(*column).push_str(text()?);
                found(*column);
            }
            Self::Int(column) => {
                let text = text()?.trim();
                let value = text.parse().map_err(|_| format!("{} is not a whole number", shown(text)))?;
                record.ints(*column).push(value);
                found(*column);
            }
            Self::Array { column, shape, is_real } => {
                read_array(bytes, *column, (shape, *is_real), record)?;
                found(*column);
            }
            Self::Json(keys) => {
                let parsed = json::parse(bytes).map_err(|wrong| format!("this is not JSON: {}", wrong.error))?;
                let Value::Object(object) = parsed else { return Err("this is not a JSON object".into()) };
                for key in keys {
                    if let Some(value) = object.get(&key.key).filter(|value| !json::is_missing(value)) {
                        read_json(key, value, record)?;
                        found(key.column);
                    }
                }
            }
        }
        Ok(())
    }
}

fn read_array(bytes: &[u8], column: usize, kind: (&[usize], bool), record: &mut Record) -> Result<(), String> {
    let array = Array::parse(bytes)?;
    let (shape, is_real) = kind;
    if array.shape != shape {
        return Err(format!("the array has the shape {:?}, the first ones have {shape:?}", array.shape));
    }
    match is_real {
        true => array.reals(record.reals(column)),
        false if array.is_float() => Err("the array has fractions, the first ones have none".into()),
        false => array.ints(record.ints(column)),
    }
}

fn read_json(key: &JsonKey, value: &Value, record: &mut Record) -> Result<(), String> {
    match (key.kind, value) {
        (JsonKind::Real, value) if json::not_finite(value).is_some() => {
            record.reals(key.column).extend(json::not_finite(value));
        }
        (JsonKind::Text, value) if json::not_finite(value).is_some() => {
            record.text(key.column).push_str(&json::text_of(value))
        }
        (JsonKind::Text, Value::String(text)) => record.text(key.column).push_str(text),
        (JsonKind::Int, Value::Bool(value)) => record.ints(key.column).push(i64::from(*value)),
        (JsonKind::Real, Value::Bool(value)) => record.reals(key.column).push(f32::from(*value)),
        (JsonKind::Int, Value::Number(number)) if number.as_i64().is_some() => {
            record.ints(key.column).extend(number.as_i64());
        }
        (JsonKind::Real, Value::Number(number)) => {
            let value = narrowed(number.as_f64().unwrap_or(f64::NAN));
            record
                .reals(key.column)
                .push(value.map_err(|value| format!("the value of {} is {value}", shown(&key.key)))?);
        }
        _ => return Err(format!("the value of {} has another type than in the first samples", shown(&key.key))),
    }
    Ok(())
}
