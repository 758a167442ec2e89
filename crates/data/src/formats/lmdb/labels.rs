//! Labels of records from a CSV file, which `data.labels` names: a header line, then a key and its label per line. A key is
//! one of the environment's, or what several of them have in common: `0001.png`, or `0001`.

use super::{Environment, keys};
use crate::error::{ReadError, shown};
use crate::files::DataFile;
use crate::formats::labels::Labels;
use std::collections::HashMap;
use std::path::Path;

/// Bytes of the file.
const FILE_BYTES_MAX: u64 = 4 << 30;

/// The label of every record, in the order of the environments.
pub(super) fn read(path: &Path, environments: &[Environment]) -> Result<Labels, ReadError> {
    let known = by_key(path)?;
    let mut labels = Vec::new();
    for environment in environments {
        for entry in environment.entries.first().into_iter().flatten() {
            let key = keys::whole_key(&environment.contents, entry)?;
            let label = known.get(&key[..]).or_else(|| known.get(keys::record_of(&key)));
            let Some(label) = label else {
                let message = format!("it has no label for the key {}", shown(&String::from_utf8_lossy(&key)));
                let hint = "write a line `KEY,LABEL` for every record, or leave `data.labels` out";
                return Err(ReadError::new(message, hint).in_file(path));
            };
            labels.push(label.clone());
        }
    }
    Labels::of(labels).map_err(|message| ReadError::new(message, "scale the labels").in_file(path))
}

fn by_key(path: &Path) -> Result<HashMap<Vec<u8>, String>, ReadError> {
    let failed = |error: std::io::Error| ReadError::io(path, &error);
    let file = DataFile::at(path)?.open()?;
    let bytes = file.metadata().map_err(failed)?.len();
    if bytes > FILE_BYTES_MAX {
        let message = format!("it has {bytes} bytes; {FILE_BYTES_MAX} are allowed");
        return Err(ReadError::new(message, "name a file of keys and labels").in_file(path));
    }
    let mut reader = csv::ReaderBuilder::new().has_headers(true).flexible(true).from_reader(file);
    let (mut known, mut line) = (HashMap::new(), csv::StringRecord::new());
    loop {
        let offset = reader.position().byte();
        let wrong =
            |message: String| ReadError::new(message, "write a header line, then `KEY,LABEL`").in_file(path).at(offset);
        if !reader.read_record(&mut line).map_err(|error| wrong(error.to_string()))? {
            return Ok(known);
        }
        let (Some(key), Some(label)) = (line.get(0), line.get(1)) else {
            return Err(wrong("a line has fewer than two columns".into()));
        };
        if label.trim().is_empty() {
            return Err(wrong(format!("the label of {} is empty", shown(key))));
        }
        if known.insert(key.trim().as_bytes().to_vec(), label.trim().to_string()).is_some() {
            return Err(wrong(format!("{} has a second label", shown(key))));
        }
    }
}
