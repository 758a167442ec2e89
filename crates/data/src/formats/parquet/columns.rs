//! From decoded columns to records: which kind a column has, and the values of one row.

use super::table::{Column, Kind, Schema, Values};
use super::values::{self, Numbers};
use crate::error::ReadError;
use crate::image::is_image;
use crate::record::{Record, RecordColumn, RecordKind, RecordValue, UnreadColumn};
use crate::units::NumberColumn;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// Rows that may be looked at for the first value of a column that is not null.
pub(super) const ROWS_LOOKED_AT: usize = 1024;
/// Values that tell whether bytes are images.
const VALUES_LOOKED_AT: usize = 16;
/// Lists within lists.
const DEPTH_MAX: usize = 8;

/// What a column of the file holds, by its type alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Numbers(Numbers),
    Lists(Numbers),
    Text,
    Bytes,
    /// A struct of `bytes` and `path`.
    ImageStruct,
}

/// A column that is read.
#[derive(Clone, Debug)]
pub(super) struct TableColumn {
    /// Its index in the file's schema.
    pub index: usize,
    content: Content,
    /// Whether its kind is known: the schema or a value has told it.
    is_known: bool,
}

/// The columns that are read, and their record columns as far as the schema says.
#[derive(Clone, Debug)]
pub(super) struct TableColumns {
    pub columns: Vec<TableColumn>,
    pub records: Vec<RecordColumn>,
    pub unread: Vec<UnreadColumn>,
    /// Which of the records' columns number or name the rows.
    pub index: Vec<bool>,
}

fn content(kind: &Kind) -> Option<Content> {
    match kind {
        Kind::Text => Some(Content::Text),
        Kind::Bytes | Kind::FixedBytes(_) => Some(Content::Bytes),
        Kind::Dictionary(_, values) => (**values == Kind::Text).then_some(Content::Text),
        Kind::List(_) | Kind::FixedList(..) => numbers_below(kind, 0).map(Content::Lists),
        Kind::Struct(_) => kind.image_bytes().map(|_| Content::ImageStruct),
        other => values::numbers(other).map(Content::Numbers),
    }
}

fn numbers_below(kind: &Kind, depth: usize) -> Option<Numbers> {
    match kind {
        Kind::List(item) | Kind::FixedList(item, _) => {
            (depth < DEPTH_MAX).then(|| numbers_below(&item.kind, depth + 1)).flatten()
        }
        other => values::numbers(other),
    }
}

impl TableColumns {
    /// The columns of a file.
    pub fn of_schema(schema: &Schema) -> Self {
        let classes = class_names(&schema.metadata);
        let index_names = index_names(&schema.metadata);
        let mut all = Self { columns: Vec::new(), records: Vec::new(), unread: Vec::new(), index: Vec::new() };
        for (index, field) in schema.fields.iter().enumerate() {
            let Some(content) = content(&field.kind) else {
                all.unread.push(UnreadColumn { name: field.name.clone(), kind: values::short(&field.kind) });
                continue;
            };
            let kind = match (content, classes.get(&field.name)) {
                (Content::Numbers(Numbers::Int), Some(names)) => RecordKind::Class { names: Arc::clone(names) },
                (Content::Numbers(Numbers::Int), None) => RecordKind::Int { shape: Vec::new(), classes: None },
                (Content::Numbers(Numbers::Real), _) => RecordKind::Real { shape: Vec::new() },
                // The shape of lists and the kind of bytes come from the first record.
                (Content::Lists(Numbers::Int), _) => RecordKind::Int { shape: vec![0], classes: None },
                (Content::Lists(Numbers::Real), _) => RecordKind::Real { shape: vec![0] },
                (Content::Text, _) => RecordKind::Text,
                (Content::Bytes, _) => RecordKind::Bytes,
                (Content::ImageStruct, _) => RecordKind::Image,
            };
            let is_known = !matches!(content, Content::Lists(_) | Content::Bytes);
            all.columns.push(TableColumn { index, content, is_known });
            all.records.push(RecordColumn { name: field.name.clone(), kind });
            all.index.push(index_names.contains(&field.name) || is_index_name(&field.name));
        }
        all
    }

    /// Whether the first values decide about a kind.
    pub fn need_values(&self) -> bool {
        self.columns.iter().any(|column| !column.is_known)
    }

    /// Completes the kinds from the first values. `decoded` are the columns, in their order.
    pub fn look_at(&mut self, decoded: &[Column]) {
        for ((column, record), values) in self.columns.iter_mut().zip(&mut self.records).zip(decoded) {
            let mut rows = (0..values.len.min(ROWS_LOOKED_AT)).filter(|row| !values.is_null(*row));
            match (column.content, &mut record.kind) {
                _ if column.is_known => {}
                (Content::Lists(_), RecordKind::Int { shape, .. } | RecordKind::Real { shape }) => {
                    let Some(first) = rows.find_map(|row| values::shape(values, row)) else { continue };
                    *shape = first;
                    column.is_known = true;
                }
                (_, kind) => {
                    let (mut images, mut others) = (0, 0);
                    for row in rows.take(VALUES_LOOKED_AT) {
                        match values::bytes(values, row).is_some_and(is_image) {
                            true => images += 1,
                            false => others += 1,
                        }
                    }
                    if images + others == 0 {
                        continue;
                    }
                    // What is none among them is an error when it is decoded.
                    if images > others {
                        *kind = RecordKind::Image;
                    }
                    column.is_known = true;
                }
            }
        }
    }

    /// All values of these rows, if each is one number, and none is missing or could be wrong.
    pub fn all_numbers(&self, decoded: &[Column], rows: &Range<usize>) -> Option<Vec<NumberColumn>> {
        if decoded.len() != self.columns.len() {
            return None;
        }
        let numbers = |((column, record), values): ((&TableColumn, &RecordColumn), &Column)| {
            let Content::Numbers(kind) = column.content else { return None };
            if matches!(record.kind, RecordKind::Class { .. }) {
                return None;
            }
            match kind {
                Numbers::Int => {
                    let mut ints = Vec::with_capacity(rows.len());
                    values::extend_ints(values, rows.clone(), &mut ints).ok()?;
                    Some(NumberColumn::Ints(ints))
                }
                Numbers::Real => {
                    let mut reals = Vec::with_capacity(rows.len());
                    values::extend_reals(values, rows.clone(), &mut reals).ok()?;
                    Some(NumberColumn::Reals(reals))
                }
            }
        };
        self.columns.iter().zip(&self.records).zip(decoded).map(numbers).collect()
    }

    /// The values of one row.
    pub fn read(&self, decoded: &[Column], row: usize, record: &mut Record) -> Result<(), String> {
        for (at, (column, values)) in self.columns.iter().zip(decoded).enumerate() {
            let named = |message: String| format!("column \"{}\": {message}", self.records[at].name);
            if values::is_null(values, row) {
                record.missing(at);
                continue;
            }
            self.read_value(at, column.content, values, row, record).map_err(named)?;
            if let (RecordKind::Class { names }, RecordValue::Ints(class)) = (&self.records[at].kind, record.value(at))
            {
                match class[..] {
                    // Hugging Face marks samples without a label so.
                    [-1] => record.missing(at),
                    [class] if (0..names.len() as i64).contains(&class) => {}
                    _ => return Err(named(format!("{class:?} is not one of its {} classes", names.len()))),
                }
            }
        }
        Ok(())
    }

    fn read_value(
        &self,
        at: usize,
        content: Content,
        column: &Column,
        row: usize,
        record: &mut Record,
    ) -> Result<(), String> {
        match content {
            Content::Numbers(Numbers::Int) => values::extend_ints(column, row..row + 1, record.ints(at)),
            Content::Numbers(Numbers::Real) => values::extend_reals(column, row..row + 1, record.reals(at)),
            Content::Lists(kind) => {
                let (items, range) = values::items(column, row, self.shape(at))?;
                match kind {
                    Numbers::Int => values::extend_ints(items, range, record.ints(at)),
                    Numbers::Real => values::extend_reals(items, range, record.reals(at)),
                }
            }
            Content::Text => {
                let text = values::text(column, row).ok_or("it is not valid UTF-8")?;
                record.text(at).push_str(text);
                Ok(())
            }
            Content::Bytes => {
                let bytes = values::bytes(column, row).ok_or("it has no bytes")?;
                record.bytes(at).extend_from_slice(bytes);
                Ok(())
            }
            Content::ImageStruct => match &column.values {
                Values::Image(bytes) if bytes.is_null(row) => {
                    Err("the image is not in the file, only its path is; store the bytes, or read the folder".into())
                }
                Values::Image(bytes) => {
                    let bytes = values::bytes(bytes, row).ok_or("it has no bytes")?;
                    record.bytes(at).extend_from_slice(bytes);
                    Ok(())
                }
                _ => Err("it has no bytes".into()),
            },
        }
    }

    fn shape(&self, at: usize) -> &[usize] {
        match &self.records[at].kind {
            RecordKind::Int { shape, .. } | RecordKind::Real { shape } => shape,
            _ => &[],
        }
    }
}

/// The names of classes that Hugging Face's `datasets` keeps in the schema's metadata, by column.
fn class_names(metadata: &HashMap<String, String>) -> HashMap<String, Arc<[String]>> {
    let parsed = metadata.get("huggingface").and_then(|text| serde_json::from_str::<serde_json::Value>(text).ok());
    let features = parsed.as_ref().and_then(|value| value["info"]["features"].as_object());
    let names = |feature: &serde_json::Value| -> Option<Arc<[String]>> {
        (feature["_type"] == "ClassLabel").then_some(())?;
        feature["names"].as_array()?.iter().map(|name| name.as_str().map(String::from)).collect()
    };
    features.into_iter().flatten().filter_map(|(column, feature)| Some((column.clone(), names(feature)?))).collect()
}

/// The columns of a DataFrame's index, as pandas names them in the schema's metadata.
fn index_names(metadata: &HashMap<String, String>) -> BTreeSet<String> {
    let parsed = metadata.get("pandas").and_then(|text| serde_json::from_str::<serde_json::Value>(text).ok());
    let names = parsed.as_ref().and_then(|value| value["index_columns"].as_array());
    // An index of numbers that follow one another is an object with its range, and no column.
    names.into_iter().flatten().filter_map(|name| name.as_str().map(String::from)).collect()
}

/// What pandas calls an index without a name: other programs keep the column and lose the metadata.
fn is_index_name(name: &str) -> bool {
    let level = name.strip_prefix("__index_level_").and_then(|rest| rest.strip_suffix("__"));
    level.is_some_and(|level| !level.is_empty() && level.bytes().all(|byte| byte.is_ascii_digit()))
}

/// An error of a decoder in the words of this crate.
pub(super) fn decode_error(path: &std::path::Path, what: &str, error: impl std::fmt::Display) -> ReadError {
    let message = format!("{what}: {error}");
    let lower = message.to_lowercase();
    let hint = match UNSUPPORTED.iter().any(|word| lower.contains(word)) {
        true => "kolo does not read this: write the table again as pyarrow does by default",
        false => "the file is damaged or cut short; copy or make it again",
    };
    ReadError::new(message, hint).in_file(path)
}

/// Words in which decoders say that they do not know how to read something, and not that it makes no sense.
const UNSUPPORTED: [&str; 4] = ["unsupported", "not supported", "nyi: ", "disabled feature"];
