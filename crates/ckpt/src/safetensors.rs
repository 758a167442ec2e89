//! Safetensors files: eight bytes with the length of a JSON header, the header, then the tensors' bytes one after the other.
//!
//! The header is written by itself, so that the data can follow from wherever it lies. Reading trusts nothing: lengths are
//! checked against the file before memory is taken.

use crate::disk::{Disk, ReadFile};
use crate::error::CkptError;
use kolo_graph::DType;
use kolo_graph::types::{DIMS_MAX, ELEMENTS_MAX};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The data starts at a multiple of this many bytes, so that it can be mapped and used in place.
const DATA_ALIGNMENT: usize = 64;
/// Bytes of a header, at most: the limit of the format's own library.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// The first four bytes of a zip archive.
const ZIP_MAGIC: u32 = 0x0403_4b50;
const METADATA: &str = "__metadata__";

/// Element types of the format with their bytes, and ours where there is one.
const TYPES: [(&str, usize, Option<DType>); 15] = [
    ("F32", 4, Some(DType::F32)),
    ("BF16", 2, Some(DType::BF16)),
    ("F16", 2, Some(DType::F16)),
    ("I32", 4, Some(DType::I32)),
    ("I64", 8, Some(DType::I64)),
    ("BOOL", 1, Some(DType::Bool)),
    ("U8", 1, Some(DType::U8)),
    ("F64", 8, None),
    ("U64", 8, None),
    ("U32", 4, None),
    ("U16", 2, None),
    ("I16", 2, None),
    ("I8", 1, None),
    ("F8_E4M3", 1, None),
    ("F8_E5M2", 1, None),
];

/// What the format calls an element type.
pub fn type_name(dtype: DType) -> &'static str {
    TYPES.iter().find(|(_, _, own)| *own == Some(dtype)).map_or("F32", |(name, ..)| name)
}

/// A tensor to be written.
#[derive(Clone, Debug)]
pub struct Slot<'a> {
    pub key: &'a str,
    pub dtype: DType,
    pub shape: &'a [usize],
    pub bytes: u64,
}

/// The bytes before the data of a file with these tensors in this order. Tensors of wider elements must come first, so that
/// all are aligned.
pub fn header<'a>(slots: impl Iterator<Item = Slot<'a>>, metadata: &[(&str, &str)]) -> Vec<u8> {
    let mut entries = Map::new();
    if !metadata.is_empty() {
        let pairs = metadata.iter().map(|(key, value)| ((*key).to_owned(), json!(value)));
        entries.insert(METADATA.into(), Value::Object(pairs.collect()));
    }
    let mut offset = 0;
    for Slot { key, dtype, shape, bytes } in slots {
        let place = json!({ "dtype": type_name(dtype), "shape": shape, "data_offsets": [offset, offset + bytes] });
        entries.insert(key.to_owned(), place);
        offset += bytes;
    }
    let mut text = Value::Object(entries).to_string().into_bytes();
    let padded = (text.len() + 8).next_multiple_of(DATA_ALIGNMENT) - 8;
    text.resize(padded, b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

/// Whether a tensor can have this name in a file.
pub fn is_key(name: &str) -> bool {
    name != METADATA
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredTensor {
    pub name: String,
    /// As the file says, which may be a type that kolo has not.
    pub type_name: String,
    pub shape: Vec<usize>,
    /// Where its bytes are in the file.
    pub place: Range<u64>,
}

impl StoredTensor {
    /// The type of its elements, if kolo has it.
    pub fn dtype(&self) -> Option<DType> {
        TYPES.iter().find(|(name, ..)| *name == self.type_name).and_then(|(.., dtype)| *dtype)
    }

    pub fn elements(&self) -> usize {
        kolo_graph::types::count(&self.shape)
    }
}

/// A safetensors file that was opened.
#[derive(Debug)]
pub struct SafetensorsFile {
    pub path: PathBuf,
    file: Box<dyn ReadFile>,
    /// In order of their place.
    pub tensors: Vec<StoredTensor>,
    pub metadata: Vec<(String, String)>,
}

impl SafetensorsFile {
    pub fn open(disk: &dyn Disk, path: &Path) -> Result<Self, CkptError> {
        let file = disk.open(path).map_err(CkptError::io(path, "open", None))?;
        let (tensors, metadata) = read_header(path, file.as_ref())?;
        Ok(Self { path: path.to_path_buf(), file, tensors, metadata })
    }

    pub fn tensor(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Bytes `range` of a tensor's own.
    pub fn read(&self, tensor: &StoredTensor, range: Range<u64>, out: &mut [u8]) -> Result<(), CkptError> {
        let fits = range.start <= range.end && range.end <= tensor.place.end - tensor.place.start;
        if !fits || range.end - range.start != out.len() as u64 {
            return Err(CkptError::Tensor {
                path: self.path.clone(),
                tensor: tensor.name.clone(),
                what: format!("has no bytes {range:?}"),
                hint: "check its shape".into(),
            });
        }
        let failed = CkptError::io(&self.path, "read", Some(out.len() as u64));
        self.file.read_at(tensor.place.start + range.start, out).map_err(failed)
    }
}

fn read_header(path: &Path, file: &dyn ReadFile) -> Result<(Vec<StoredTensor>, Vec<(String, String)>), CkptError> {
    let refused = |what: String| CkptError::refused(path, what, "give a whole safetensors file");
    let mut length = [0; 8];
    if file.bytes() < 8 {
        return Err(refused(format!("{} bytes are too few for a safetensors file", file.bytes())));
    }
    file.read_at(0, &mut length).map_err(CkptError::io(path, "read", Some(8)))?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES_MAX && length as u32 == ZIP_MAGIC {
        let hint = "convert it in Python: safetensors.torch.save_file(torch.load(FILE), \"model.safetensors\")";
        return Err(CkptError::refused(
            path,
            "is a zip archive, as torch.save writes it, which can contain code",
            hint,
        ));
    }
    if length > HEADER_BYTES_MAX || length > file.bytes() - 8 {
        let bytes = file.bytes();
        return Err(refused(format!("claims a header of {length} bytes, but the whole file has {bytes}")));
    }
    let mut text = vec![0; length as usize];
    file.read_at(8, &mut text).map_err(CkptError::io(path, "read", Some(length)))?;
    let Entries(entries) = serde_json::from_slice(&text).map_err(|error| refused(format!("header: {error}")))?;
    let (mut tensors, mut metadata) = (Vec::new(), Vec::new());
    for (name, value) in entries {
        if name == METADATA {
            let Value::Object(pairs) = value else { return Err(refused("header: its metadata is not a table".into())) };
            let text = |value: Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            metadata = pairs.into_iter().map(|(key, value)| (key, text(value))).collect();
            continue;
        }
        tensors
            .push(stored(&name, value, 8 + length, file.bytes()).map_err(|what| refused(format!("`{name}` {what}")))?);
    }
    tensors.sort_by_key(|tensor| (tensor.place.start, tensor.place.end));
    if let Some(pair) = tensors.windows(2).find(|pair| pair[1].place.start < pair[0].place.end) {
        return Err(refused(format!("`{}` and `{}` share bytes", pair[0].name, pair[1].name)));
    }
    Ok((tensors, metadata))
}

fn stored(name: &str, value: Value, data: u64, file_bytes: u64) -> Result<StoredTensor, String> {
    #[derive(Deserialize)]
    struct HeaderEntry {
        dtype: String,
        shape: Vec<u64>,
        data_offsets: [u64; 2],
    }
    let HeaderEntry { dtype, shape, data_offsets: [start, end] } =
        serde_json::from_value(value).map_err(|error| format!("lacks a type, a shape or offsets: {error}"))?;
    if start > end || end > file_bytes - data {
        return Err(format!("has bytes {start} to {end} of {}", file_bytes - data));
    }
    let dims = shape.len();
    let elements = shape.iter().try_fold(1u64, |total, size| total.checked_mul((*size).max(1)));
    let Some(_) = elements.filter(|elements| dims <= DIMS_MAX && *elements <= ELEMENTS_MAX as u64) else {
        return Err(format!("has the shape {shape:?}, which is too large"));
    };
    let elements: u64 = shape.iter().product();
    if let Some((_, size, _)) = TYPES.iter().find(|(name, ..)| *name == dtype)
        && elements * *size as u64 != end - start
    {
        return Err(format!("is {dtype} of shape {shape:?}, and has {} bytes", end - start));
    }
    let shape = shape.into_iter().map(|size| size as usize).collect();
    Ok(StoredTensor { name: name.to_owned(), type_name: dtype, shape, place: data + start..data + end })
}

/// A JSON object in which no key stands twice.
struct Entries(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries: Vec<(String, Value)> = Vec::new();
                let mut seen = std::collections::HashSet::new();
                while let Some((key, value)) = map.next_entry::<String, Value>()? {
                    if !seen.insert(key.clone()) {
                        return Err(serde::de::Error::custom(format!("`{key}` appears twice")));
                    }
                    entries.push((key, value));
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}
