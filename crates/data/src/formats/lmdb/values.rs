//! What the values of a column are, told from the first few. Values are read as members of WebDataset shards are, by the
//! ending that their contents would have as files.

use super::keys::PLAIN;
use crate::formats::webdataset::columns::{Part, part};
use crate::record::RecordColumn;

/// Names of columns whose texts are whole numbers, if the first ones are.
const LABELS: [&str; 7] = ["cls", "label", "labels", "class", "target", "index", "y"];

/// Whether this is what Python's `pickle` writes, of its second protocol or a later one.
pub(super) fn is_pickled(bytes: &[u8]) -> bool {
    matches!(bytes, [0x80, 2..=5, .., b'.'])
}

fn is_image(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x89PNG\r\n\x1a\n") || bytes.starts_with(&[0xFF, 0xD8, 0xFF])
}

/// The ending that files with these contents would have.
fn ending(name: &str, first: &[Vec<u8>]) -> &'static str {
    let texts = || first.iter().map(|bytes| str::from_utf8(bytes).ok());
    let is_whole = |text: Option<&str>| text.is_some_and(|text| text.trim().parse::<i64>().is_ok());
    match first.first() {
        None => "bin",
        Some(bytes) if is_image(bytes) => "png",
        Some(bytes) if bytes.starts_with(b"\x93NUMPY") => "npy",
        Some(_) if LABELS.contains(&name) && texts().all(is_whole) => "cls",
        Some(_) if texts().any(|text| text.is_none()) => "bin",
        Some(bytes) if bytes.trim_ascii_start().starts_with(b"{") => "json",
        Some(_) => "txt",
    }
}

/// What the column `name` is, by its first values; its record columns are appended. Keys of JSON objects are columns.
pub(super) fn value(name: &str, first: &[Vec<u8>], columns: &mut Vec<RecordColumn>) -> Part {
    let before = columns.len();
    let part = part(ending(name, first), name, first, columns);
    if let (PLAIN, Part::Json(_)) = (name, &part) {
        for column in &mut columns[before..] {
            column.name = column.name.trim_start_matches(PLAIN).trim_start_matches('.').into();
        }
    }
    part
}
