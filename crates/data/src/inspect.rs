//! What files hold, told from some of their records.

use crate::error::ReadError;
use crate::format::Reader;
use crate::image::{self, Pixels};
use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::writer::{class_name, real_text};
use std::collections::BTreeMap;

/// Different values of a column that are counted.
const VALUES_MAX: usize = 1000;
/// Characters of a text that is counted as a value.
const VALUE_CHARS_MAX: usize = 40;
/// Numbers of a list, and characters of a text, that are shown of a record.
const SHOWN_NUMBERS: usize = 6;
const SHOWN_CHARS: usize = 60;
/// Characters of a name that are shown.
const NAME_CHARS_MAX: usize = 60;
/// Records that could not be read, of which the message is kept.
const ERRORS_MAX: usize = 5;

/// What some records of a reader hold.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    pub records: usize,
    /// Of them, spread evenly.
    pub looked_at: usize,
    pub columns: Vec<ColumnSummary>,
    /// Records that could not be read, and why the first few could not.
    pub unreadable: usize,
    pub errors: Vec<(usize, ReadError)>,
}

/// What the values of one column are.
#[derive(Clone, Debug)]
pub struct ColumnSummary {
    pub column: RecordColumn,
    pub missing: usize,
    /// Of numbers and pixels.
    pub numbers: Numbers,
    /// Characters of texts, bytes of bytes and images.
    pub lengths: Numbers,
    /// Channels, height and width of images, and how many are of each.
    pub sizes: BTreeMap<[usize; 3], usize>,
    /// Images whose headers make no sense; pixels are not decoded.
    pub broken: usize,
    /// How often each value comes up, of one whole number, a class or a short text; `None` if there are too many.
    pub values: Option<BTreeMap<Value, usize>>,
}

/// A value that is counted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Value {
    Int(i64),
    Text(String),
}

/// Range and moments of some numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numbers {
    pub count: u64,
    pub least: f64,
    pub most: f64,
    sum: f64,
    squares: f64,
    pub not_finite: u64,
}

impl Default for Numbers {
    fn default() -> Self {
        let (least, most) = (f64::INFINITY, f64::NEG_INFINITY);
        Self { count: 0, least, most, sum: 0.0, squares: 0.0, not_finite: 0 }
    }
}

impl Numbers {
    fn add(&mut self, value: f64) {
        if !value.is_finite() {
            self.not_finite += 1;
            return;
        }
        self.count += 1;
        (self.least, self.most) = (self.least.min(value), self.most.max(value));
        (self.sum, self.squares) = (self.sum + value, self.squares + value * value);
    }

    pub fn mean(&self) -> f64 {
        self.sum / self.count.max(1) as f64
    }

    pub fn deviation(&self) -> f64 {
        (self.squares / self.count.max(1) as f64 - self.mean().powi(2)).max(0.0).sqrt()
    }
}

impl ColumnSummary {
    fn new(column: &RecordColumn) -> Self {
        let one = match &column.kind {
            RecordKind::Int { shape, .. } => shape.is_empty(),
            RecordKind::Class { .. } | RecordKind::Text => true,
            _ => false,
        };
        Self {
            column: column.clone(),
            missing: 0,
            numbers: Numbers::default(),
            lengths: Numbers::default(),
            sizes: BTreeMap::new(),
            broken: 0,
            values: one.then(BTreeMap::new),
        }
    }

    fn count(&mut self, value: Option<Value>) {
        let Some(values) = &mut self.values else { return };
        match value {
            Some(value) if values.len() < VALUES_MAX || values.contains_key(&value) => {
                *values.entry(value).or_default() += 1;
            }
            _ => self.values = None,
        }
    }

    fn add(&mut self, value: &RecordValue) {
        match (value, &self.column.kind) {
            (RecordValue::Missing, _) => self.missing += 1,
            (RecordValue::Bytes(bytes), RecordKind::Pixels { .. }) => {
                bytes.iter().for_each(|byte| self.numbers.add(f64::from(*byte)));
            }
            (RecordValue::Bytes(bytes), kind) => {
                self.lengths.add(bytes.len() as f64);
                if *kind == RecordKind::Image {
                    match image::size(bytes) {
                        Ok(size) => *self.sizes.entry([size.channels, size.height, size.width]).or_default() += 1,
                        Err(_) => self.broken += 1,
                    }
                }
            }
            (RecordValue::Text(text), _) => {
                let chars = text.chars().count();
                self.lengths.add(chars as f64);
                self.count((chars <= VALUE_CHARS_MAX).then(|| Value::Text(text.clone())));
            }
            (RecordValue::Reals(values), _) => values.iter().for_each(|value| self.numbers.add(f64::from(*value))),
            (RecordValue::Ints(values), _) => {
                values.iter().for_each(|value| self.numbers.add(*value as f64));
                let named = class_name(&self.column, value).map(|name| Value::Text(name.into()));
                self.count(named.or(values.first().map(|value| Value::Int(*value))));
            }
        }
    }
}

impl Summary {
    /// Looks at up to `most` records, spread evenly, and tells how many are done. Records that cannot be read are counted.
    pub fn of(reader: &dyn Reader, most: usize, tell: &mut dyn FnMut(usize)) -> Self {
        let mut columns: Vec<ColumnSummary> = reader.columns().iter().map(ColumnSummary::new).collect();
        let (records, mut record) = (reader.len(), Record::new());
        let looked_at = records.min(most);
        let mut summary = Self { records, looked_at, ..Self::default() };
        for number in 0..looked_at {
            let at = (number as u128 * records as u128 / looked_at as u128) as usize;
            match reader.read(at, &mut record) {
                Ok(()) => columns.iter_mut().enumerate().for_each(|(at, column)| column.add(record.value(at))),
                Err(error) => {
                    summary.unreadable += 1;
                    if summary.errors.len() < ERRORS_MAX {
                        summary.errors.push((at, error));
                    }
                }
            }
            tell(number + 1);
        }
        Self { columns, ..summary }
    }
}

/// A name from a file, or another word of its, as it may be printed: short, and with characters that are no text escaped, so
/// that none of them reaches a terminal.
pub fn shown_name(name: &str) -> String {
    // No more is escaped than is shown.
    let start: String = name.chars().take(NAME_CHARS_MAX + 1).collect();
    let quoted = format!("{start:?}");
    let escaped = quoted[1..quoted.len() - 1].replace("\\\"", "\"");
    match escaped.char_indices().nth(NAME_CHARS_MAX) {
        Some(_) => escaped.chars().take(NAME_CHARS_MAX - 1).chain(['…']).collect(),
        None => escaped,
    }
}

/// A message about a file as it may be printed in one line: control characters, which names in it may have, are escaped.
pub fn printable(message: &str) -> String {
    let mut text = String::with_capacity(message.len());
    for char in message.chars() {
        match char.is_control() {
            true => text.extend(char.escape_debug()),
            false => text.push(char),
        }
    }
    text
}

/// A value in a few words. Images are decoded, so that one whose pixels are damaged is told, too.
pub fn shown(column: &RecordColumn, value: &RecordValue) -> String {
    let list = |count: usize, mut first: Vec<String>| {
        if count == 1 {
            return first.remove(0);
        }
        let more = if count > first.len() { format!(", … {count} in all") } else { String::new() };
        format!("[{}{more}]", first.join(", "))
    };
    match value {
        RecordValue::Missing => "missing".into(),
        RecordValue::Text(text) => {
            let start: String = text.chars().take(SHOWN_CHARS).collect();
            format!("{start:?}{}", if start.len() < text.len() { "…" } else { "" })
        }
        RecordValue::Reals(values) if values.is_empty() => "[]".into(),
        RecordValue::Ints(values) if values.is_empty() => "[]".into(),
        RecordValue::Reals(values) => {
            list(values.len(), values.iter().take(SHOWN_NUMBERS).map(|value| real_text(*value)).collect())
        }
        RecordValue::Ints(values) => match class_name(column, value) {
            Some(name) => shown_name(name),
            None => list(values.len(), values.iter().take(SHOWN_NUMBERS).map(i64::to_string).collect()),
        },
        RecordValue::Bytes(bytes) => match &column.kind {
            RecordKind::Image => {
                let mut pixels = Pixels::default();
                match image::decode(bytes, &mut pixels) {
                    Ok(()) => {
                        let Pixels { width, height, channels, .. } = pixels;
                        format!("image {width} × {height}, {channels} channels, {} bytes", bytes.len())
                    }
                    Err(message) => format!("broken image: {message}"),
                }
            }
            RecordKind::Pixels { shape } => format!("pixels {shape:?}"),
            _ => format!("{} bytes", bytes.len()),
        },
    }
}

/// A kind of column in a few words.
pub fn kind_name(kind: &RecordKind) -> String {
    let of = |name: &str, shape: &[usize]| if shape.is_empty() { name.into() } else { format!("{name} {shape:?}") };
    match kind {
        RecordKind::Image => "image".into(),
        RecordKind::Pixels { shape } => of("pixels", shape),
        RecordKind::Text => "text".into(),
        RecordKind::Bytes => "bytes".into(),
        RecordKind::Real { shape } => of("real", shape),
        RecordKind::Int { shape, .. } => of("int", shape),
        RecordKind::Class { .. } => "class".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_without_control_characters() {
        let long = shown_name(&"ß".repeat(70_000));
        assert_eq!((long.chars().count(), long.chars().last()), (NAME_CHARS_MAX, Some('…')));
        for (name, expected) in [
            ("age", "age"),
            ("日本 é", "日本 é"),
            ("it's \"x\"", "it's \"x\""),
            ("a\nb\t", "a\\nb\\t"),
            ("\u{1b}[2J", "\\u{1b}[2J"),
            ("a\u{202e}b", "a\\u{202e}b"),
            ("", ""),
        ] {
            assert_eq!(shown_name(name), expected, "{name:?}");
        }
        assert_eq!(shown_name(&"a".repeat(NAME_CHARS_MAX)), "a".repeat(NAME_CHARS_MAX));
        assert_eq!(shown_name(&"\0".repeat(NAME_CHARS_MAX)).chars().count(), NAME_CHARS_MAX);
        assert_eq!(printable("key \"a\u{1b}\n\" is é"), "key \"a\\u{1b}\\n\" is é");
        let names = ["a\u{1b}b".to_string()].into();
        let column = RecordColumn { name: "label".into(), kind: RecordKind::Class { names } };
        assert_eq!(shown(&column, &RecordValue::Ints(vec![0])), "a\\u{1b}b");
    }

    #[test]
    fn images_are_decoded_where_they_are_shown() {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, 2, 1);
        encoder.set_color(png::ColorType::Grayscale);
        encoder.write_header().unwrap().write_image_data(&[10, 240]).unwrap();
        let column = RecordColumn { name: "image".into(), kind: RecordKind::Image };
        let whole = shown(&column, &RecordValue::Bytes(file.clone()));
        assert_eq!(whole, format!("image 2 × 1, 1 channels, {} bytes", file.len()));
        file.truncate(file.len() - 14);
        assert!(image::size(&file).is_ok());
        let cut = shown(&column, &RecordValue::Bytes(file));
        assert!(cut.starts_with("broken image: the PNG is damaged: "), "{cut}");
    }
}
