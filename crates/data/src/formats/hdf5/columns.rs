//! From HDF5 datasets to columns: which kind a dataset has, and its values of a run of records.

use crate::record::{Record, RecordKind, narrowed};
use half::f16;
use hdf5_reader::error::{Error, Result};
use hdf5_reader::{
    ByteOrder, Dataset, Datatype, H5Type, SliceInfo, SliceInfoElem, StringPadding, StringSize, VarLenKind,
    dtype_element_size,
};

/// Bytes of a reference to a text of any length: its own length, an address of eight bytes, and a number.
const REFERENCE_BYTES: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// Bytes of an image; whether its channels come last.
    Pixels {
        channels_last: bool,
    },
    Int,
    Real,
    Text(StringPadding),
    TextReference,
}

/// A dataset that is read.
pub(super) struct DatasetColumn {
    pub name: String,
    pub dataset: Dataset,
    content: Content,
    /// Of one record.
    shape: Vec<usize>,
}

impl std::fmt::Debug for DatasetColumn {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "DatasetColumn({})", self.name)
    }
}

/// Whether the bytes of a dataset are images, by what a user would have meant. `shape` is that of one record.
fn pixels(name: &str, kind: &Datatype, shape: &[usize], layout: &str) -> Option<Content> {
    let last = name.rsplit('/').next().unwrap_or(name).to_lowercase();
    let is_target = ["y", "label", "target", "mask"].iter().any(|word| last.starts_with(word));
    if is_target || !matches!(kind, Datatype::FixedPoint { size: 1, signed: false, .. }) {
        return None;
    }
    let is_channels = |size: usize| [1, 3, 4].contains(&size);
    let channels_last = match (shape, layout) {
        ([_, _], _) | ([_, _, _], "chw") => false,
        ([_, _, _], "hwc") => true,
        ([_, _, last], _) if is_channels(*last) => true,
        ([first, _, _], _) if is_channels(*first) => false,
        _ => return None,
    };
    Some(Content::Pixels { channels_last })
}

fn content(kind: &Datatype, shape: &[usize]) -> Option<Content> {
    match kind {
        Datatype::FixedPoint { size: 1 | 2 | 4 | 8, .. } => Some(Content::Int),
        Datatype::Enum { base, .. } => matches!(**base, Datatype::FixedPoint { .. }).then_some(Content::Int),
        Datatype::FloatingPoint { size: 2 | 4 | 8, .. } => Some(Content::Real),
        Datatype::String { size: StringSize::Fixed(_), padding, .. } if shape.is_empty() => {
            Some(Content::Text(*padding))
        }
        Datatype::String { size: StringSize::Variable, .. } | Datatype::VarLen { kind: VarLenKind::String, .. }
            if shape.is_empty() =>
        {
            Some(Content::TextReference)
        }
        _ => None,
    }
}

/// A type in a few words.
fn short(kind: &Datatype) -> &'static str {
    match kind {
        Datatype::FixedPoint { .. } => "whole numbers of an unusual size",
        Datatype::FloatingPoint { .. } => "real numbers of an unusual size",
        Datatype::String { .. } => "arrays of texts",
        Datatype::Compound { .. } => "compound",
        Datatype::Array { .. } => "array",
        Datatype::Enum { .. } => "enumeration",
        Datatype::VarLen { .. } => "lists of different lengths",
        Datatype::Opaque { .. } => "opaque",
        Datatype::Reference { .. } => "reference",
        Datatype::Bitfield { .. } => "bit field",
    }
}

/// Whether the library says that it does not know how to read something, and not that it makes no sense.
pub(super) fn is_unsupported(error: &str) -> bool {
    error.contains("unsupported ") || error.contains(EXTERNAL)
}

const EXTERNAL: &str = "external raw data file";
/// Filters of HDF5 by the numbers that are registered for them.
const FILTERS: [(&str, &str); 8] = [
    ("307", "bzip2"),
    ("32000", "LZF"),
    ("32001", "Blosc"),
    ("32004", "LZ4"),
    ("32008", "Bitshuffle"),
    ("32013", "ZFP"),
    ("32015", "Zstandard"),
    ("32026", "Blosc2"),
];

/// What the library says, with the name of what it calls by a number.
pub(super) fn with_names(error: &str) -> String {
    if error.ends_with("unsupported layout class 3") {
        return format!("{error} (a virtual dataset)");
    }
    match filter(error) {
        Some(name) => format!("{error} ({name})"),
        None => error.into(),
    }
}

/// The filter that an error is about, if its name is known.
fn filter(error: &str) -> Option<&'static str> {
    let (_, id) = error.rsplit_once("filter id ")?;
    FILTERS.iter().find(|(known, _)| *known == id).map(|(_, name)| *name)
}

/// The same in a few words.
fn what_is_unsupported(error: &str) -> String {
    match (filter(error), error.find("unsupported ")) {
        _ if error.contains(EXTERNAL) => "stored in another file".into(),
        (Some(name), _) => format!("packed with {name}"),
        (None, Some(at)) => error[at..].into(),
        (None, None) => error.into(),
    }
}

impl DatasetColumn {
    /// If it cannot be read, what it is.
    pub fn new(name: String, dataset: Dataset, layout: &str) -> std::result::Result<Self, String> {
        let kind = short(dataset.dtype());
        let Some(sizes) = dataset.shape().get(1..) else { return Err("one value without dims".into()) };
        let shape =
            sizes.iter().map(|size| usize::try_from(*size).map_err(|_| kind)).collect::<std::result::Result<_, _>>();
        let shape: Vec<usize> = shape?;
        let content = pixels(&name, dataset.dtype(), &shape, layout).or_else(|| content(dataset.dtype(), &shape));
        let size = |size: Result<usize>| size.map_err(|_| kind);
        let is_known = size(dataset.raw_element_size())? == size(dtype_element_size(dataset.dtype()))?;
        let content = content.filter(|_| is_known).ok_or(kind)?;
        Ok(Self { name, dataset, content, shape })
    }

    /// Why not even the first record can be read, if it is packed or stored in a way that the library does not know: only
    /// reading tells. What is damaged is an error of its records.
    pub fn unsupported(&self) -> Option<String> {
        let error = self.read(0, self.rows().min(1)).err()?.to_string();
        is_unsupported(&error).then(|| what_is_unsupported(&error))
    }

    /// The number of records.
    pub fn rows(&self) -> u64 {
        self.dataset.shape().first().copied().unwrap_or(0)
    }

    pub fn kind(&self) -> RecordKind {
        let shape = self.shape.clone();
        match (self.content, &shape[..]) {
            (Content::Pixels { .. }, [height, width]) => RecordKind::Pixels { shape: vec![1, *height, *width] },
            (Content::Pixels { channels_last: true }, [height, width, channels]) => {
                RecordKind::Pixels { shape: vec![*channels, *height, *width] }
            }
            (Content::Pixels { .. }, _) => RecordKind::Pixels { shape },
            (Content::Int, _) => RecordKind::Int { shape, classes: None },
            (Content::Real, _) => RecordKind::Real { shape },
            (Content::Text(_) | Content::TextReference, _) => RecordKind::Text,
        }
    }

    /// Bytes of one record in the file, unpacked.
    pub fn row_bytes(&self) -> u64 {
        let element = dtype_element_size(self.dataset.dtype()).unwrap_or(1) as u64;
        self.shape.iter().fold(element, |bytes, size| bytes.saturating_mul(*size as u64))
    }

    /// Records of one chunk; `None` if the dataset is in one piece.
    pub fn chunk_rows(&self) -> Option<u64> {
        self.dataset.chunks().and_then(|sizes| sizes.first().map(|rows| u64::from(*rows).max(1)))
    }

    /// The values of the records from `start` to `end`.
    pub fn read(&self, start: u64, end: u64) -> Result<Values> {
        let mut selections = vec![SliceInfoElem::Slice { start, end, step: 1 }];
        selections.extend(self.shape.iter().map(|size| SliceInfoElem::Slice { start: 0, end: *size as u64, step: 1 }));
        let selection = SliceInfo { selections };
        macro_rules! read {
            ($kind:ty, $variant:ident, $convert:expr) => {{
                let array = self.dataset.read_slice::<$kind>(&selection)?;
                Values::$variant(array.into_iter().map($convert).collect())
            }};
        }
        Ok(match (self.content, self.dataset.dtype()) {
            (Content::Pixels { .. }, _) => {
                Values::Bytes(self.dataset.read_slice::<u8>(&selection)?.into_raw_vec_and_offset().0)
            }
            // One type for all whole numbers, and one for the other real ones: each takes seconds of every build.
            (Content::Int, _) => read!(Whole, Ints, |value| value.0),
            (Content::Real, Datatype::FloatingPoint { size: 4, .. }) => read!(f32, Reals, |value| value),
            (Content::Real, _) => read!(Real, Doubles, |value| value.0),
            (Content::Text(_) | Content::TextReference, _) => read!(Raw, Texts, |value| value.0),
        })
    }

    /// Writes record `row` of what [`read`](Self::read) gave.
    pub fn write(
        &self,
        values: &Values,
        row: usize,
        at: usize,
        record: &mut Record,
    ) -> std::result::Result<(), String> {
        let elements: usize = self.shape.iter().product();
        let range = row * elements..(row + 1) * elements;
        let cut = || String::from("it has fewer values than its shape says");
        match (self.content, values) {
            (Content::Pixels { channels_last }, Values::Bytes(bytes)) => {
                let bytes = bytes.get(range).ok_or_else(cut)?;
                let out = record.bytes(at);
                match (channels_last, &self.shape[..]) {
                    (true, [_, _, channels]) if *channels > 1 => {
                        (0..*channels).for_each(|channel| out.extend(bytes.iter().skip(channel).step_by(*channels)));
                    }
                    _ => out.extend_from_slice(bytes),
                }
            }
            (_, Values::Ints(ints)) => {
                let ints = ints.get(range).ok_or_else(cut)?;
                if ints.contains(&i64::MIN) && !self.is_signed() {
                    return Err(format!("a number is larger than {}", i64::MAX));
                }
                record.ints(at).extend_from_slice(ints);
            }
            (_, Values::Reals(reals)) => record.reals(at).extend_from_slice(reals.get(range).ok_or_else(cut)?),
            (_, Values::Doubles(reals)) => {
                let out = record.reals(at);
                for value in reals.get(range).ok_or_else(cut)? {
                    out.push(narrowed(*value).map_err(|value| format!("it has {value}"))?);
                }
            }
            (content, Values::Texts(texts)) => {
                let raw = texts.get(row).ok_or_else(cut)?;
                let bytes = match content {
                    Content::Text(padding) => unpadded(raw, padding).to_vec(),
                    _ => self.resolve(raw)?,
                };
                let text = str::from_utf8(&bytes).map_err(|_| "it is not UTF-8 text")?;
                record.text(at).push_str(text);
            }
            (_, Values::Bytes(_)) => return Err(cut()),
        }
        Ok(())
    }

    fn is_signed(&self) -> bool {
        !matches!(self.dataset.dtype(), Datatype::FixedPoint { signed: false, .. })
    }

    fn resolve(&self, reference: &[u8]) -> std::result::Result<Vec<u8>, String> {
        if reference.len() != REFERENCE_BYTES || reference.iter().all(|byte| *byte == 0) {
            return Ok(Vec::new());
        }
        let bytes = self.dataset.resolve_vlen_reference_bytes(reference, 1).map_err(|error| error.to_string())?;
        Ok(unpadded(&bytes, StringPadding::NullTerminate).to_vec())
    }
}

fn unpadded(bytes: &[u8], padding: StringPadding) -> &[u8] {
    let kept = match padding {
        StringPadding::NullTerminate => bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len()),
        StringPadding::NullPad => bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1),
        StringPadding::SpacePad => bytes.iter().rposition(|byte| *byte != b' ').map_or(0, |last| last + 1),
    };
    &bytes[..kept]
}

/// Values of a run of records.
pub(super) enum Values {
    Bytes(Vec<u8>),
    Ints(Vec<i64>),
    Reals(Vec<f32>),
    /// Of 64 bits: some may be too large for `f32`.
    Doubles(Vec<f64>),
    /// Texts with their padding, or references to them.
    Texts(Vec<Vec<u8>>),
}

/// A whole number of any size, or of an enumeration, such as h5py's booleans.
#[derive(Clone)]
struct Whole(i64);
/// A real number of 16 or 64 bits.
#[derive(Clone)]
struct Real(f64);
/// The bytes of one element.
#[derive(Clone)]
struct Raw(Vec<u8>);

fn mismatch(kind: &Datatype) -> Error {
    Error::TypeMismatch { expected: "a number".into(), actual: format!("{kind:?}") }
}

/// The bytes of a number, the lowest first, followed by `rest`.
fn word(bytes: &[u8], order: ByteOrder, rest: u8) -> [u8; 8] {
    let mut word = [rest; 8];
    let places = word.iter_mut().zip(0..bytes.len());
    places.for_each(|(place, at)| {
        *place = match order {
            ByteOrder::LittleEndian => bytes[at],
            ByteOrder::BigEndian => bytes[bytes.len() - 1 - at],
        }
    });
    word
}

impl H5Type for Whole {
    fn hdf5_type() -> Datatype {
        i64::hdf5_type()
    }

    fn from_bytes(bytes: &[u8], kind: &Datatype) -> Result<Self> {
        let number = match kind {
            Datatype::Enum { base, .. } => base,
            kind => kind,
        };
        let Datatype::FixedPoint { size: size @ 1..=8, signed, byte_order } = *number else {
            return Err(mismatch(kind));
        };
        let bytes = bytes.get(..size.into()).ok_or_else(|| mismatch(kind))?;
        let value = i64::from_le_bytes(word(bytes, byte_order, 0));
        let unused = 64 - 8 * u32::from(size);
        Ok(Self(match signed {
            true => value << unused >> unused,
            // Larger ones are told apart by their sign, which no unsigned number has.
            false if value < 0 => i64::MIN,
            false => value,
        }))
    }

    fn element_size(kind: &Datatype) -> usize {
        dtype_element_size(kind).unwrap_or(1)
    }
}

impl H5Type for Real {
    fn hdf5_type() -> Datatype {
        f64::hdf5_type()
    }

    fn from_bytes(bytes: &[u8], kind: &Datatype) -> Result<Self> {
        let Datatype::FloatingPoint { size, byte_order } = *kind else { return Err(mismatch(kind)) };
        let bytes = bytes.get(..size.into()).ok_or_else(|| mismatch(kind))?;
        let word = word(bytes, byte_order, 0);
        match size {
            2 => Ok(Self(f16::from_le_bytes([word[0], word[1]]).to_f64())),
            8 => Ok(Self(f64::from_le_bytes(word))),
            _ => Err(mismatch(kind)),
        }
    }

    fn element_size(kind: &Datatype) -> usize {
        dtype_element_size(kind).unwrap_or(1)
    }
}

impl H5Type for Raw {
    fn hdf5_type() -> Datatype {
        u8::hdf5_type()
    }

    fn from_bytes(bytes: &[u8], kind: &Datatype) -> Result<Self> {
        let len = dtype_element_size(kind)?;
        Ok(Self(bytes.get(..len).ok_or_else(|| mismatch(kind))?.to_vec()))
    }

    fn element_size(kind: &Datatype) -> usize {
        dtype_element_size(kind).unwrap_or(1)
    }
}
