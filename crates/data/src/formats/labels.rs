//! Labels that a CSV file gives beside the data: numbers, or names that become classes.

use crate::record::{Record, RecordKind, narrowed};
use std::collections::BTreeSet;

/// The labels of all records, in their order.
#[derive(Debug, PartialEq)]
pub(crate) enum Labels {
    Ints(Vec<i64>),
    Reals(Vec<f32>),
    /// Indices of sorted names.
    Classes {
        names: Vec<String>,
        indices: Vec<u32>,
    },
}

impl Labels {
    pub fn kind(&self) -> RecordKind {
        match self {
            Self::Ints(values) => {
                let least = values.iter().min().copied().unwrap_or(0);
                let most = values.iter().max().copied().unwrap_or(0);
                let classes = (least >= 0).then(|| usize::try_from(most).ok()?.checked_add(1)).flatten();
                RecordKind::Int { shape: vec![], classes }
            }
            Self::Reals(_) => RecordKind::Real { shape: vec![] },
            Self::Classes { names, .. } => RecordKind::Class { names: names.as_slice().into() },
        }
    }

    /// Whole numbers if all are, numbers if all are, and otherwise names. A number that is too large is an error.
    pub fn of(texts: Vec<String>) -> Result<Self, String> {
        if let Ok(values) = texts.iter().map(|text| text.parse()).collect::<Result<Vec<i64>, _>>() {
            return Ok(Self::Ints(values));
        }
        if let Ok(values) = texts.iter().map(|text| text.parse()).collect::<Result<Vec<f64>, _>>() {
            let values = values.into_iter().map(narrowed).collect::<Result<_, _>>();
            return values.map(Self::Reals).map_err(|value| format!("a label is {value}"));
        }
        let names: Vec<String> = texts.iter().cloned().collect::<BTreeSet<_>>().into_iter().collect();
        let indices = texts.iter().map(|text| names.binary_search(text).unwrap_or_default() as u32).collect();
        Ok(Self::Classes { names, indices })
    }

    /// Adds all labels to a fingerprint.
    pub fn add_to(&self, hasher: &mut blake3::Hasher) {
        match self {
            Self::Ints(values) => values.iter().for_each(|value| _ = hasher.update(&value.to_le_bytes())),
            Self::Reals(values) => values.iter().for_each(|value| _ = hasher.update(&value.to_le_bytes())),
            Self::Classes { names, indices } => {
                names.iter().for_each(|name| _ = hasher.update(name.as_bytes()).update(b"\n"));
                indices.iter().for_each(|index| _ = hasher.update(&index.to_le_bytes()));
            }
        }
    }

    /// Writes the label of record number `at`.
    pub fn write(&self, at: usize, column: usize, record: &mut Record) {
        match self {
            Self::Ints(values) => record.ints(column).push(values[at]),
            Self::Reals(values) => record.reals(column).push(values[at]),
            Self::Classes { indices, .. } => record.ints(column).push(indices[at].into()),
        }
    }
}
