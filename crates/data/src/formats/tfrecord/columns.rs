//! From features to columns: what each feature holds, told from the first records.

use super::example::{self, FeatureList, Malformed};
use crate::error::shown;
use crate::image;
use crate::record::{Record, RecordColumn, RecordKind, UnreadColumn};
use std::collections::BTreeMap;

/// How the values of a column are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Column {
    Bytes {
        is_text: bool,
        is_image: bool,
    },
    Floats(Dims),
    Ints(Dims),
    /// No column, for what is said here.
    Uneven(&'static str),
}

/// How many numbers a value has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Dims {
    /// Of a sequence.
    steps: Option<usize>,
    /// Of each step, or of the value if it is no sequence.
    numbers: usize,
}

impl Dims {
    fn list(numbers: usize) -> Self {
        Self { steps: None, numbers }
    }

    /// What is one number has no dims, and steps of one number have one.
    fn shape(self) -> Vec<usize> {
        let numbers = Some(self.numbers).filter(|numbers| *numbers != 1);
        self.steps.into_iter().chain(numbers).collect()
    }

    fn described(self) -> String {
        match self.steps {
            None => format!("{} values", self.numbers),
            Some(steps) => format!("{steps} steps of {} values", self.numbers),
        }
    }
}

/// One column of the records.
#[derive(Debug)]
pub(super) struct Feature {
    pub name: String,
    pub column: Column,
}

/// What the features of some records are.
#[derive(Debug, Default)]
pub(super) struct Found {
    features: BTreeMap<String, Column>,
    records: usize,
}

impl Found {
    /// The number of records that were added.
    pub fn records(&self) -> usize {
        self.records
    }

    /// Adds the features of a record. One that is malformed adds nothing.
    pub fn add(&mut self, record: &[u8]) -> Result<(), Malformed> {
        let mut features = Vec::new();
        example::features(record, |name, list| {
            // A name that is no UTF-8 is no name that a job could say.
            if let (Ok(name), Some(column)) = (std::str::from_utf8(name), column(list)?) {
                features.push((name, column));
            }
            Ok(())
        })?;
        for (name, column) in features {
            match self.features.get_mut(name) {
                Some(known) => *known = known.with(column),
                None => _ = self.features.insert(name.into(), column),
            }
        }
        self.records += 1;
        Ok(())
    }

    /// The columns and how they are read, sorted by name, and the features that are none.
    pub fn columns(self) -> (Vec<RecordColumn>, Vec<Feature>, Vec<UnreadColumn>) {
        let (mut columns, mut features, mut unread) = (Vec::new(), Vec::new(), Vec::new());
        for (name, column) in self.features {
            let kind = match column {
                Column::Bytes { is_image: true, .. } => RecordKind::Image,
                Column::Bytes { is_text: true, .. } => RecordKind::Text,
                Column::Bytes { .. } => RecordKind::Bytes,
                Column::Floats(dims) => RecordKind::Real { shape: dims.shape() },
                Column::Ints(dims) => RecordKind::Int { shape: dims.shape(), classes: None },
                Column::Uneven(kind) => {
                    unread.push(UnreadColumn { name, kind: kind.into() });
                    continue;
                }
            };
            columns.push(RecordColumn { name: name.clone(), kind });
            features.push(Feature { name, column });
        }
        (columns, features, unread)
    }
}

const SEVERAL_BYTES: &str = "lists of texts or bytes";
const OTHER_LENGTHS: &str = "lists of different lengths";
const OTHER_TYPES: &str = "values of several types";

/// What no feature being a column is called.
pub(super) fn no_columns(unread: &[UnreadColumn]) -> String {
    match unread.first() {
        Some(first) => format!("none of its features is read: \"{}\" has {}", first.name, first.kind),
        None => "the records are not `tf.train.Example`s with features".into(),
    }
}

/// What this list holds; nothing if it is empty.
fn column(list: FeatureList<'_>) -> Result<Option<Column>, Malformed> {
    Ok(match list {
        FeatureList::Empty => None,
        FeatureList::Bytes(bytes) => match single(bytes)? {
            (_, 0) => None,
            (value, 1) => Some(Column::Bytes { is_text: is_text(value), is_image: image::is_image(value) }),
            _ => Some(Column::Uneven(SEVERAL_BYTES)),
        },
        FeatureList::Floats(bytes) => {
            let mut values = Vec::new();
            example::floats_of(bytes, &mut values)?;
            (!values.is_empty()).then_some(Column::Floats(Dims::list(values.len())))
        }
        FeatureList::Ints(bytes) => {
            let mut values = Vec::new();
            example::ints_of(bytes, &mut values)?;
            (!values.is_empty()).then_some(Column::Ints(Dims::list(values.len())))
        }
        FeatureList::Steps(bytes) => sequence(bytes)?,
    })
}

/// What the steps of this sequence hold; nothing if there is none.
fn sequence(bytes: &[u8]) -> Result<Option<Column>, Malformed> {
    let (mut step, mut steps) = (None, 0);
    example::steps_of(bytes, |list| {
        let held = column(list)?.unwrap_or(Column::Uneven(OTHER_LENGTHS));
        (step, steps) = (Some(step.map_or(held, |step: Column| step.with(held))), steps + 1);
        Ok(())
    })?;
    Ok(step.map(|step| match step {
        Column::Floats(dims) => Column::Floats(Dims { steps: Some(steps), ..dims }),
        Column::Ints(dims) => Column::Ints(Dims { steps: Some(steps), ..dims }),
        Column::Bytes { .. } => Column::Uneven(SEVERAL_BYTES),
        Column::Uneven(what) => Column::Uneven(what),
    }))
}

/// The last value of a list of bytes, and how many there are.
fn single(bytes: &[u8]) -> Result<(&[u8], usize), Malformed> {
    let (mut value, mut count) = (&[][..], 0);
    example::bytes_of(bytes, |found| (value, count) = (found, count + 1))?;
    Ok((value, count))
}

fn is_text(bytes: &[u8]) -> bool {
    let is_strange = |character: char| character.is_control() && !"\t\r\n".contains(character);
    std::str::from_utf8(bytes).is_ok_and(|text| !text.contains(is_strange))
}

impl Column {
    /// What holds these and those values.
    fn with(self, other: Self) -> Self {
        match (self, other) {
            (Self::Bytes { is_text, is_image }, Self::Bytes { is_text: more_text, is_image: more_images }) => {
                Self::Bytes { is_text: is_text && more_text, is_image: is_image && more_images }
            }
            (one, another) if one == another => one,
            (Self::Uneven(kind), _) | (_, Self::Uneven(kind)) => Self::Uneven(kind),
            (Self::Floats(_), Self::Floats(_)) | (Self::Ints(_), Self::Ints(_)) => Self::Uneven(OTHER_LENGTHS),
            _ => Self::Uneven(OTHER_TYPES),
        }
    }
}

/// What became of the values of a feature.
#[derive(Debug, PartialEq)]
pub(super) enum Values {
    Read,
    /// There are none.
    Missing,
    Wrong(String),
}

impl Values {
    pub fn wrong(self) -> Option<String> {
        match self {
            Self::Wrong(message) => Some(message),
            _ => None,
        }
    }
}

/// Reads the steps of a sequence, of which `read` says how many numbers each has. Where they differ from those that are wanted,
/// the first that does counts.
fn read_steps<'r>(
    bytes: &'r [u8],
    wanted: Dims,
    mut read: impl FnMut(FeatureList<'r>) -> Result<Option<usize>, Malformed>,
) -> Result<Dims, Malformed> {
    let mut found = Dims { steps: Some(0), numbers: wanted.numbers };
    example::steps_of(bytes, |step| {
        let numbers = read(step)?.unwrap_or(0);
        found.steps = found.steps.map(|steps| steps + 1);
        if found.numbers == wanted.numbers {
            found.numbers = numbers;
        }
        Ok(())
    })?;
    Ok(found)
}

impl Feature {
    /// Reads the values into column `at`. An error is about the record as a whole.
    pub fn read(&self, list: FeatureList<'_>, at: usize, record: &mut Record) -> Result<Values, Malformed> {
        let (found, wanted) = match (list, self.column) {
            (FeatureList::Empty, _) => return Ok(Values::Missing),
            (FeatureList::Bytes(bytes), Column::Bytes { is_text, is_image }) => match single(bytes)? {
                (value, 1) => return Ok(self.read_bytes(value, is_text && !is_image, at, record)),
                (_, count) => (Dims::list(count), Dims::list(1)),
            },
            (FeatureList::Floats(bytes), Column::Floats(wanted @ Dims { steps: None, .. })) => {
                let values = record.reals(at);
                example::floats_of(bytes, values)?;
                (Dims::list(values.len()), wanted)
            }
            (FeatureList::Ints(bytes), Column::Ints(wanted @ Dims { steps: None, .. })) => {
                let values = record.ints(at);
                example::ints_of(bytes, values)?;
                (Dims::list(values.len()), wanted)
            }
            (FeatureList::Steps(bytes), Column::Floats(wanted @ Dims { steps: Some(_), .. })) => {
                let values = record.reals(at);
                let found = read_steps(bytes, wanted, |step| match step {
                    FeatureList::Floats(list) => {
                        let before = values.len();
                        example::floats_of(list, values).map(|()| Some(values.len() - before))
                    }
                    _ => Ok(None),
                })?;
                (found, wanted)
            }
            (FeatureList::Steps(bytes), Column::Ints(wanted @ Dims { steps: Some(_), .. })) => {
                let values = record.ints(at);
                let found = read_steps(bytes, wanted, |step| match step {
                    FeatureList::Ints(list) => {
                        let before = values.len();
                        example::ints_of(list, values).map(|()| Some(values.len() - before))
                    }
                    _ => Ok(None),
                })?;
                (found, wanted)
            }
            _ => return Ok(self.wrong("has another type than in the first records")),
        };
        Ok(match found {
            Dims { steps: None, numbers: 0 } | Dims { steps: Some(0), .. } => Values::Missing,
            found if found == wanted => Values::Read,
            found => self.wrong(&format!("has {} instead of {}", found.described(), wanted.described())),
        })
    }

    fn wrong(&self, what: &str) -> Values {
        Values::Wrong(format!("the feature {} {what}", shown(&self.name)))
    }

    fn read_bytes(&self, value: &[u8], is_text: bool, at: usize, record: &mut Record) -> Values {
        if !is_text {
            record.bytes(at).extend_from_slice(value);
            return Values::Read;
        }
        match std::str::from_utf8(value) {
            Ok(text) => record.text(at).push_str(text),
            Err(_) => return self.wrong("is not UTF-8 text"),
        }
        Values::Read
    }
}
