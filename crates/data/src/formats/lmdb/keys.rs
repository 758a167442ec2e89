//! From keys to columns and records: `0001.png` is the column `png` of record `0001`, `image-0001` the column `image`.

use super::tree::Entry;
use crate::error::ReadError;
use crate::files::Contents;
use crate::image;

/// Columns that keys may name; where they name more, a dot or a dash is a part of the key.
const COLUMNS_MAX: usize = 16;
const NAME_CHARS_MAX: usize = 32;
/// Endings of images, whichever a record has, are this column.
const IMAGE: &str = "image";
/// The column of keys that name none.
pub(super) const PLAIN: &str = "value";
/// Bytes of a key that a message shows.
const SHOWN_BYTES: usize = 80;

/// One column while keys are read.
#[derive(Debug)]
struct Column {
    name: Vec<u8>,
    records: usize,
    /// Over the records' names in order: columns with the same records have the same.
    hash: blake3::Hasher,
}

/// All keys, in order, each with the number of its column.
#[derive(Debug)]
pub(super) struct KeyColumns {
    columns: Vec<Column>,
    entries: Vec<(Entry, u16)>,
    /// Keys name too many columns to be columns at all.
    is_plain: bool,
}

/// The columns and their entries: as many in each.
pub(super) struct Keys {
    pub names: Vec<String>,
    pub entries: Vec<Vec<Entry>>,
}

/// The column that a key names, and the record.
fn split(key: &[u8]) -> (&[u8], &[u8]) {
    let is_name = |name: &[u8]| {
        name.first().is_some_and(u8::is_ascii_alphabetic)
            && name.len() <= NAME_CHARS_MAX
            && name.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
    };
    if let Some(dash) = key.iter().rposition(|byte| *byte == b'-') {
        let (name, record) = (&key[..dash], &key[dash + 1..]);
        if is_name(name) && !record.is_empty() && record.iter().all(u8::is_ascii_digit) {
            return (name, record);
        }
    }
    if let Some(dot) = key.iter().rposition(|byte| *byte == b'.') {
        let (record, name) = (&key[..dot], &key[dot + 1..]);
        if is_name(name) && !record.is_empty() {
            let is_image = image::ENDINGS.iter().any(|ending| name.eq_ignore_ascii_case(ending.as_bytes()));
            return (if is_image { IMAGE.as_bytes() } else { name }, record);
        }
    }
    (PLAIN.as_bytes(), key)
}

fn counts_records(key: &[u8]) -> bool {
    key.starts_with(b"__") || key == b"num-samples"
}

/// The record that a key names.
pub(super) fn record_of(key: &[u8]) -> &[u8] {
    split(key).1
}

pub(super) fn whole_key(contents: &Contents, entry: &Entry) -> Result<Vec<u8>, ReadError> {
    let mut key = Vec::new();
    contents.read_into(entry.key_at, entry.key_bytes.into(), &mut key)?;
    Ok(key)
}

/// A key as text, for messages.
pub(super) fn key_of(contents: &Contents, entry: &Entry) -> String {
    let mut bytes = vec![0; usize::from(entry.key_bytes).min(SHOWN_BYTES)];
    match contents.read_at(entry.key_at, &mut bytes) {
        Ok(()) => bytes.escape_ascii().to_string(),
        Err(_) => "?".into(),
    }
}

impl KeyColumns {
    pub fn new() -> Self {
        Self { columns: Vec::new(), entries: Vec::new(), is_plain: false }
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn add(&mut self, key: &[u8], entry: Entry) {
        if counts_records(key) {
            return;
        }
        let (name, record) = split(key);
        let mut at = 0;
        if !self.is_plain {
            at = self.columns.iter().position(|column| column.name == name).unwrap_or(self.columns.len());
            if at == self.columns.len() {
                self.columns.push(Column { name: name.into(), records: 0, hash: blake3::Hasher::new() });
            }
            let column = &mut self.columns[at];
            column.hash.update(&(record.len() as u64).to_le_bytes()).update(record);
            column.records += 1;
            self.is_plain = self.columns.len() > COLUMNS_MAX;
        }
        self.entries.push((entry, at as u16));
    }

    /// The columns by name. All must have the same records.
    pub fn finish(self, contents: &Contents) -> Result<Keys, ReadError> {
        if self.is_plain {
            let entries = self.entries.into_iter().map(|(entry, _)| entry).collect();
            return Ok(Keys { names: vec![PLAIN.into()], entries: vec![entries] });
        }
        let mut entries: Vec<Vec<Entry>> =
            self.columns.iter().map(|column| Vec::with_capacity(column.records)).collect();
        self.entries.iter().for_each(|(entry, column)| entries[usize::from(*column)].push(*entry));
        let name = |column: &Column| String::from_utf8_lossy(&column.name).into_owned();
        if let Some((first, others)) = self.columns.split_first() {
            let hash = first.hash.finalize();
            if let Some(other) = others.iter().position(|other| other.hash.finalize() != hash) {
                let names = [name(first), name(&others[other])];
                return Err(not_paired(contents, names, [&entries[0], &entries[other + 1]]));
            }
        }
        let mut columns: Vec<(String, Vec<Entry>)> = self.columns.iter().map(name).zip(entries).collect();
        columns.sort_by(|(one, _), (other, _)| one.cmp(other));
        let (names, entries) = columns.into_iter().unzip();
        Ok(Keys { names, entries })
    }
}

/// Which record one column has and the other does not.
fn not_paired(contents: &Contents, names: [String; 2], entries: [&[Entry]; 2]) -> ReadError {
    let record = |entry: Option<&Entry>| {
        let mut key = vec![0; entry.map_or(0, |entry| usize::from(entry.key_bytes))];
        let read = entry.map(|entry| contents.read_at(entry.key_at, &mut key));
        matches!(read, Some(Ok(()))).then(|| split(&key).1.to_vec())
    };
    let most = entries[0].len().max(entries[1].len());
    let differs = (0..most).find(|at| record(entries[0].get(*at)) != record(entries[1].get(*at))).unwrap_or(0);
    let entry = entries[0].get(differs).or(entries[1].get(differs));
    let key = entry.map_or(String::new(), |entry| key_of(contents, entry));
    let message = format!(
        "the columns \"{}\" and \"{}\" have different records, starting with key \"{key}\"",
        names[0], names[1]
    );
    let hint = "give every record the same columns, such as `0001.png` and `0001.cls`";
    let error = ReadError::new(message, hint).in_file(contents.path());
    match entry {
        Some(entry) => error.at(entry.key_at),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_their_column_and_record() {
        let cases: [(&str, &str, &str); 8] = [
            ("0001.png", "image", "0001"),
            ("a/b.JPEG", "image", "a/b"),
            ("a.b.cls", "cls", "a.b"),
            ("image-000000001", "image", "000000001"),
            ("0001", "value", "0001"),
            ("a-b", "value", "a-b"),
            (".png", "value", ".png"),
            ("v1.25", "value", "v1.25"),
        ];
        for (key, column, record) in cases {
            assert_eq!(split(key.as_bytes()), (column.as_bytes(), record.as_bytes()), "{key}");
        }
    }
}
