//! Where two states differ.

use crate::error::CkptError;
use crate::source::{TensorSource, TensorView};
use half::{bf16, f16};
use kolo_graph::DType;
use std::collections::BTreeSet;

/// Bytes of each side that are compared at a time.
const BLOCK_BYTES: usize = 1 << 20;

/// How a tensor differs.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorDiff {
    pub name: String,
    pub kind: DiffKind,
}

#[derive(Clone, Debug, PartialEq)]
pub enum DiffKind {
    OnlyInFirst,
    OnlyInSecond,
    /// The types, as `f32[2,3]`.
    OtherType {
        first: String,
        second: String,
    },
    Values(ValueDiff),
}

/// Elements that differ, to the bit.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueDiff {
    /// The first that does, by its place along every dim, and its two values.
    pub index: Vec<usize>,
    pub values: (f64, f64),
    pub count: usize,
    pub elements: usize,
    /// The largest absolute difference of numbers; those that are none on one side are left out.
    pub largest: f64,
}

/// A key with its value on either side.
pub type SettingDiff = (String, Option<String>, Option<String>);

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Difference {
    /// In order of name.
    pub tensors: Vec<TensorDiff>,
    /// Tensors that are the same.
    pub same: usize,
    pub settings: Vec<SettingDiff>,
}

impl Difference {
    /// Whether all tensors are the same, to the bit.
    pub fn is_none(&self) -> bool {
        self.tensors.is_empty()
    }
}

/// Compares all tensors of two sources to the bit, and their settings if both are checkpoints. `progress` hears how many bytes
/// of either were read.
pub fn diff(a: &TensorSource, b: &TensorSource, progress: &dyn Fn(u64)) -> Result<Difference, CkptError> {
    let (first, second) = (a.tensors(), b.tensors());
    let names: BTreeSet<&str> = first.iter().chain(&second).map(|tensor| tensor.name).collect();
    let find = |list: &[TensorView<'_>], name: &str| list.binary_search_by(|tensor| tensor.name.cmp(name)).ok();
    let (mut difference, mut done) = (Difference::default(), 0);
    for name in names {
        let kind = match (find(&first, name), find(&second, name)) {
            (Some(x), Some(y)) => compare(a, b, &first[x], &second[y], &mut |bytes| {
                done += bytes;
                progress(done);
            })?,
            (Some(_), None) => Some(DiffKind::OnlyInFirst),
            _ => Some(DiffKind::OnlyInSecond),
        };
        match kind {
            Some(kind) => difference.tensors.push(TensorDiff { name: name.to_owned(), kind }),
            None => difference.same += 1,
        }
    }
    if let (Some(a), Some(b)) = (a.checkpoint(), b.checkpoint()) {
        difference.settings = settings(&a.header().settings, &b.header().settings);
    }
    Ok(difference)
}

fn settings(first: &[(String, String)], second: &[(String, String)]) -> Vec<SettingDiff> {
    let keys: BTreeSet<&String> = first.iter().chain(second).map(|(key, _)| key).collect();
    let find = |list: &[(String, String)], key: &String| {
        list.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone())
    };
    let both = keys.into_iter().map(|key| (key.clone(), find(first, key), find(second, key)));
    both.filter(|(_, a, b)| a != b).collect()
}

fn compare(
    a: &TensorSource,
    b: &TensorSource,
    first: &TensorView<'_>,
    second: &TensorView<'_>,
    progress: &mut dyn FnMut(u64),
) -> Result<Option<DiffKind>, CkptError> {
    if (first.dtype, first.shape) != (second.dtype, second.shape) {
        let (first, second) = (first.to_string(), second.to_string());
        return Ok(Some(DiffKind::OtherType { first, second }));
    }
    // A type that kolo has not is refused by the first read.
    let dtype = first.dtype.unwrap_or(DType::F32);
    let (size, elements) = (dtype.bytes(), first.elements());
    let mut found: Option<ValueDiff> = None;
    let (mut x, mut y) = (Vec::new(), Vec::new());
    for start in (0..elements).step_by(BLOCK_BYTES / size) {
        let range = start..elements.min(start + BLOCK_BYTES / size);
        x.resize(range.len() * size, 0);
        y.resize(range.len() * size, 0);
        a.read(first.name, range.clone(), &mut x)?;
        b.read(second.name, range.clone(), &mut y)?;
        progress(x.len() as u64);
        if x == y {
            continue;
        }
        let pairs = x.chunks_exact(size).zip(y.chunks_exact(size)).enumerate();
        for (at, (x, y)) in pairs.filter(|(_, (x, y))| x != y) {
            let values = (number(dtype, x), number(dtype, y));
            let found = found.get_or_insert_with(|| ValueDiff {
                index: index_of(start + at, first.shape),
                values,
                count: 0,
                elements,
                largest: 0.0,
            });
            found.count += 1;
            // Beside a NaN no difference can be told; it is not a small one.
            let difference = (values.0 - values.1).abs();
            if difference.is_nan() || difference > found.largest {
                found.largest = difference;
            }
        }
    }
    Ok(found.map(DiffKind::Values))
}

/// The place of an element along every dim.
fn index_of(mut element: usize, shape: &[usize]) -> Vec<usize> {
    let mut index: Vec<usize> = shape
        .iter()
        .rev()
        .map(|size| {
            let at = element % size.max(&1);
            element /= size.max(&1);
            at
        })
        .collect();
    index.reverse();
    index
}

/// An element, little-endian.
pub(crate) fn number(dtype: DType, bytes: &[u8]) -> f64 {
    let word = bytes.iter().rev().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
    match dtype {
        DType::F32 => f64::from(f32::from_bits(word as u32)),
        DType::BF16 => bf16::from_bits(word as u16).to_f64(),
        DType::F16 => f16::from_bits(word as u16).to_f64(),
        DType::I32 => f64::from(word as u32 as i32),
        DType::I64 => word as i64 as f64,
        DType::Bool | DType::U8 => word as f64,
    }
}
