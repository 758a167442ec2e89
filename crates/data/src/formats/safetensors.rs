//! Safetensors files as data: a column per tensor, whose first dim is the sample.
//!
//! Eight bytes with the length of the header, the header as JSON, then the tensors. As its specification asks, tensors must
//! follow one another without gaps and overlaps: no two names share bytes, and nothing hides between them.

use crate::arrays::{Array, ArrayReader, Element, FileArrays, Unreadable};
use crate::error::ReadError;
use crate::files::{Contents, DataFile};
use crate::format::{Format, OpenedFiles};
use kolo_graph::settings::Settings;
use serde_json::Value;
use std::path::Path;

pub const FORMAT: Format = Format {
    name: "safetensors",
    doc: "safetensors files, a column per tensor, whose first dim is the sample",
    extensions: &["safetensors"],
    sniff,
    open,
};

/// Of the header. The format's own library allows 100 MB; a column takes a hundred bytes.
const HEADER_BYTES_MAX: u64 = 16 << 20;
const LENGTH_BYTES: u64 = 8;

fn sniff(_path: &Path, head: &[u8]) -> bool {
    let length = head.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    length.is_some_and(|length| (2..=HEADER_BYTES_MAX).contains(&length)) && head[8..].starts_with(b"{\"")
}

fn open(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let mut all = Vec::new();
    for file in files {
        let contents = file.contents(settings)?;
        let (tensors, data) = tensors(&contents)?;
        all.push(FileArrays::open(&tensors, settings, |name, entry| entry.array(name, &contents, data))?);
    }
    ArrayReader::open_files(all, settings)
}

/// The tensors of a file, sorted by name, and where their data start.
fn tensors(contents: &Contents) -> Result<(Vec<(String, Entry)>, u64), ReadError> {
    let mut length = [0; LENGTH_BYTES as usize];
    contents.read_at(0, &mut length)?;
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > HEADER_BYTES_MAX {
        let message = format!("the header claims {header_bytes} bytes; at most {HEADER_BYTES_MAX} are allowed");
        return Err(contents.damaged(0, message));
    }
    let mut header = Vec::new();
    contents.read_into(LENGTH_BYTES, header_bytes, &mut header)?;
    let damaged = |message: String| contents.damaged(LENGTH_BYTES, message);
    let header: Value = serde_json::from_slice(&header).map_err(|error| {
        let message = format!("the header is not JSON: {error}");
        contents.damaged(LENGTH_BYTES + error.column().saturating_sub(1) as u64, message)
    })?;
    let Value::Object(header) = header else { return Err(damaged("the header is not a JSON object".into())) };
    let data = LENGTH_BYTES + header_bytes;
    let mut found = Vec::new();
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let entry =
            Entry::read(entry).ok_or_else(|| damaged(format!("the description of tensor \"{name}\" is malformed")))?;
        found.push((name.clone(), entry));
    }
    found.sort_by(|(a, one), (b, other)| (one.begin, one.end, a).cmp(&(other.begin, other.end, b)));
    let mut next = 0;
    for (name, entry) in &found {
        if entry.begin != next || entry.end < entry.begin {
            let message =
                format!("tensor \"{name}\" has the bytes {} to {}, but must start at {next}", entry.begin, entry.end);
            return Err(damaged(message));
        }
        next = entry.end;
    }
    if next != contents.bytes() - data {
        let message =
            format!("the tensors end at byte {next} of the data, but the file has {}", contents.bytes() - data);
        return Err(damaged(message));
    }
    found.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok((found, data))
}

/// What the header says of a tensor.
#[derive(Debug)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    begin: u64,
    end: u64,
}

impl Entry {
    fn read(value: &Value) -> Option<Self> {
        let dtype = value.get("dtype")?.as_str()?.to_string();
        let shape = value.get("shape")?.as_array()?;
        let shape = shape.iter().map(|dim| usize::try_from(dim.as_u64()?).ok()).collect::<Option<_>>()?;
        let [begin, end] = value.get("data_offsets")?.as_array()?.as_slice() else { return None };
        Some(Self { dtype, shape, begin: begin.as_u64()?, end: end.as_u64()? })
    }

    fn array(&self, name: &str, contents: &Contents, data: u64) -> Result<Array, Unreadable> {
        let element = match self.dtype.as_str() {
            "BOOL" => Element::Bool,
            "U8" => Element::U8,
            "I8" => Element::I8,
            "U16" => Element::U16,
            "I16" => Element::I16,
            "U32" => Element::U32,
            "I32" => Element::I32,
            "U64" => Element::U64,
            "I64" => Element::I64,
            "F16" => Element::F16,
            "BF16" => Element::BF16,
            "F32" => Element::F32,
            "F64" => Element::F64,
            other => {
                let message = format!("tensor \"{name}\" has the type {other}, which cannot be read");
                let hint = "store it as F32, I64, U8 or the like";
                let error = ReadError::new(message, hint).in_file(contents.path()).at(LENGTH_BYTES);
                return Err(Unreadable::kind(other, error));
            }
        };
        let bytes = self.end - self.begin;
        Array::new(name, contents, (data + self.begin, bytes), element, self.shape.clone())
    }
}

#[cfg(test)]
mod tests;
