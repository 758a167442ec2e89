//! LMDB environments: directories with a `data.mdb`, or single files. Records are keys in their order.
//!
//! A key may name a column: `0001.png` and `0001.cls`, or `image-0001` and `label-0001`, are two columns of one record. All
//! columns must have the same records. `data.labels` names a CSV file with labels for keys. Keys that start with `__`, and `num-samples`, count or list records and are left out.

mod keys;
mod labels;
mod tree;
mod values;

use crate::error::ReadError;
use crate::files::{Contents, DataFile};
use crate::format::{Format, OpenError, OpenedFiles, Reader};
use crate::formats::labels::Labels;
use crate::formats::webdataset::columns::Part;
use crate::record::{Record, RecordColumn, RecordName, UnreadColumn};
use keys::{KeyColumns, Keys};
use kolo_graph::settings::Settings;
use std::path::{Path, PathBuf};
use tree::{Entry, Found, Tree};

pub const FORMAT: Format = Format {
    name: "lmdb",
    doc: "LMDB environments; records are keys in order; one of several databases (`database`); labels of keys from a CSV file (`labels`)",
    extensions: &["lmdb", "mdb"],
    sniff,
    open,
};

/// The column of `data.labels`.
const LABEL: &str = "label";
const DATA_FILE: &str = "data.mdb";
/// Values that the columns are told from.
const LOOKED_AT: usize = 16;
/// A value that is only looked at.
const LOOKED_AT_BYTES_MAX: u32 = 16 << 20;

fn sniff(path: &Path, head: &[u8]) -> bool {
    match path.is_dir() {
        true => path.join(DATA_FILE).is_file(),
        false => head.get(tree::MAGIC_AT..tree::MAGIC_AT + 4) == Some(&0xBEEF_C0DE_u32.to_le_bytes()),
    }
}

/// One environment: the entries of each column.
#[derive(Debug)]
struct Environment {
    contents: Contents,
    entries: Vec<Vec<Entry>>,
}

#[derive(Debug)]
struct LmdbReader {
    environments: Vec<Environment>,
    /// Records of each environment and all before it.
    ends: Vec<usize>,
    parts: Vec<Part>,
    columns: Vec<RecordColumn>,
    unread: Vec<UnreadColumn>,
    /// What `data.labels` says, as the last column.
    labels: Option<Labels>,
}

impl LmdbReader {
    /// The environment of a record, and its row there.
    fn place_of(&self, at: usize) -> Option<(&Environment, usize)> {
        let number = self.ends.partition_point(|end| *end <= at);
        let before = number.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some((self.environments.get(number)?, at - before))
    }
}

impl Reader for LmdbReader {
    fn columns(&self) -> &[RecordColumn] {
        &self.columns
    }

    fn unread(&self) -> &[UnreadColumn] {
        &self.unread
    }

    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        let Some((environment, row)) = self.place_of(at) else {
            let message = format!("record {at} was requested, but there are {}", self.len());
            return Err(ReadError::new(message, "ask for a smaller number"));
        };
        let mut is_there = vec![false; self.columns.len()];
        for (part, entries) in self.parts.iter().zip(&environment.entries) {
            let entry = &entries[row];
            let (contents, len) = (&environment.contents, entry.value_bytes.into());
            if let Part::Image(column) | Part::Bytes(column) = part {
                contents.read_into(entry.value_at, len, record.bytes(*column))?;
                is_there[*column] = true;
                continue;
            }
            let mut bytes = Vec::new();
            contents.read_into(entry.value_at, len, &mut bytes)?;
            let read = part.read(&bytes, record, &mut |column| is_there[column] = true);
            read.map_err(|message| environment.wrong(entry, &message))?;
        }
        if let Some(labels) = &self.labels {
            labels.write(at, self.columns.len() - 1, record);
            is_there[self.columns.len() - 1] = true;
        }
        // Keys that a JSON object does not have.
        (0..is_there.len()).filter(|column| !is_there[*column]).for_each(|column| record.missing(column));
        Ok(())
    }

    fn files(&self) -> Vec<PathBuf> {
        self.environments.iter().map(|environment| environment.contents.path().into()).collect()
    }

    fn name(&self, at: usize) -> Option<RecordName> {
        let (environment, row) = self.place_of(at)?;
        let key = keys::whole_key(&environment.contents, environment.entries.first()?.get(row)?).ok()?;
        let key = String::from_utf8_lossy(keys::record_of(&key)).into_owned();
        Some(RecordName { file: environment.contents.path().into(), key: Some(key) })
    }

    fn fingerprint(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        self.labels.iter().for_each(|labels| labels.add_to(&mut hasher));
        hasher.finalize().to_hex().to_string()
    }
}

impl Environment {
    /// The columns that the keys name, each with its entries in order.
    fn open(contents: Contents, database: &str) -> Result<(Self, Vec<String>), ReadError> {
        let mut tree = Tree::open(&contents)?;
        if !database.is_empty() {
            let mut root = None;
            tree.walk(&mut |key, found| {
                if let (true, Found::Database(found)) = (key == database.as_bytes(), &found) {
                    root = Some(*found);
                }
                Ok(())
            })?;
            let missing = || {
                let message = format!("it has no database named \"{database}\"");
                ReadError::new(message, "correct `data.database`, or leave it out").in_file(contents.path())
            };
            tree.go_into(root.ok_or_else(missing)?);
        }
        let mut keys = KeyColumns::new();
        let mut databases = Vec::new();
        tree.walk(&mut |key, found| {
            match found {
                Found::Value(entry) => keys.add(key, entry),
                Found::Database(_) => databases.push(String::from_utf8_lossy(key).into_owned()),
            }
            Ok(())
        })?;
        if keys.is_empty() && !databases.is_empty() {
            databases.truncate(8);
            let message = format!("its records are in named databases: {}", databases.join(", "));
            let hint = format!("write `database = \"{}\"` in [data]", databases[0]);
            return Err(ReadError::new(message, hint).in_file(contents.path()));
        }
        let Keys { names, entries } = keys.finish(&contents)?;
        Ok((Self { contents, entries }, names))
    }

    fn records(&self) -> usize {
        self.entries.first().map_or(0, Vec::len)
    }

    fn wrong(&self, entry: &Entry, message: &str) -> ReadError {
        let key = keys::key_of(&self.contents, entry);
        let hint = "make the record again, or leave it out with `on_error = \"skip\"`";
        ReadError::new(format!("key \"{key}\": {message}"), hint).in_file(self.contents.path()).at(entry.value_at)
    }

    /// The first values of a column.
    fn first_values(&self, column: usize, name: &str) -> Result<Vec<Vec<u8>>, ReadError> {
        let short = self.entries[column].iter().filter(|entry| entry.value_bytes <= LOOKED_AT_BYTES_MAX);
        let entries: Vec<&Entry> = short.take(LOOKED_AT).collect();
        let mut values = Vec::new();
        for entry in &entries {
            let mut bytes = Vec::new();
            self.contents.read_into(entry.value_at, entry.value_bytes.into(), &mut bytes)?;
            values.push(bytes);
        }
        match values::first_pickle(name, &values) {
            None => Ok(values),
            Some(at) => {
                let hint = "pickles can run arbitrary code, so kolo does not read them: store image files, text, JSON or `.npy` files";
                let error = self.wrong(entries[at], "its value is a Python pickle");
                Err(ReadError { hint: hint.into(), ..error })
            }
        }
    }
}

fn open(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let database = settings.text("database", "")?;
    let mut reader =
        LmdbReader { environments: vec![], ends: vec![], parts: vec![], columns: vec![], unread: vec![], labels: None };
    let mut first_names: Option<Vec<String>> = None;
    for file in files {
        let file = match file.is_directory {
            true => DataFile::at(&file.path.join(DATA_FILE))?,
            false => file.clone(),
        };
        let (environment, names) = Environment::open(file.contents(settings)?, &database)?;
        match &first_names {
            None => {
                for (column, name) in names.iter().enumerate() {
                    let first = environment.first_values(column, name)?;
                    reader.parts.push(values::value(name, &first, &mut reader.columns, &mut reader.unread));
                }
                first_names = Some(names);
            }
            Some(first) if *first != names => return Err(other_columns(&file.path, first, &names)),
            Some(_) => {}
        }
        reader.ends.push(reader.len() + environment.records());
        reader.environments.push(environment);
    }
    let path = settings.text("labels", "")?;
    if !path.is_empty() {
        reader.add_labels(&path, settings)?;
    }
    Ok(Box::new(reader))
}

impl LmdbReader {
    fn add_labels(&mut self, path: &str, settings: &Settings) -> Result<(), OpenError> {
        if self.columns.iter().any(|column| column.name == LABEL) {
            let message = format!("names labels, but the keys name a column \"{LABEL}\" already");
            return Err(settings.wrong("labels", message, "leave it out").into());
        }
        let labels = labels::read(Path::new(path), &self.environments)?;
        self.columns.push(RecordColumn { name: LABEL.into(), kind: labels.kind() });
        self.labels = Some(labels);
        Ok(())
    }
}

fn other_columns(path: &Path, first: &[String], names: &[String]) -> OpenError {
    let message = format!(
        "its keys name the columns {}, but those of the first file name {}",
        names.join(", "),
        first.join(", ")
    );
    ReadError::new(message, "environments that are read together need the same columns").in_file(path).into()
}

#[cfg(test)]
mod tests;
