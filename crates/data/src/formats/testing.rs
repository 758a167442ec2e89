//! What the tests of all formats share.

use crate::error::ReadError;
use crate::files::DataFile;
use crate::format::{Format, OpenError, OpenedFiles, Reader};
use crate::record::Record;
use crate::stream::{StreamFiles, StreamReader, StreamSettings};
use kolo_graph::settings::{Setting, Settings};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A committed file.
pub fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files").join(name)
}

pub fn settings(keys: &[(&str, Setting)]) -> Settings {
    let mut settings = Settings::new("data", "job.toml:1");
    for (key, value) in keys {
        settings.set(key, "job.toml:2", value.clone());
    }
    settings
}

pub fn text(value: &str) -> Setting {
    Setting::Text(value.into())
}

pub fn open(format: &Format, paths: &[PathBuf], keys: &[(&str, Setting)]) -> OpenedFiles {
    let files: Vec<DataFile> = paths.iter().map(|path| DataFile::at(path)).collect::<Result<_, _>>()?;
    (format.open)(&files, &settings(keys))
}

/// Opens a file as a stream.
pub fn open_stream(path: &Path, keys: &[(&str, Setting)]) -> OpenedFiles {
    let stream = StreamSettings { files: true, buffer: 1, samples: None };
    let files = StreamFiles::open(&path.display().to_string(), &settings(keys), "source", stream)?;
    Ok(Box::new(StreamReader::new(Arc::new(files))))
}

/// Opens a file of these bytes. The directory must be kept while it is read.
pub fn open_bytes(format: &Format, bytes: &[u8], keys: &[(&str, Setting)]) -> (tempfile::TempDir, OpenedFiles) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(format!("file.{}", format.extensions[0]));
    std::fs::write(&path, bytes).unwrap();
    let opened = open(format, &[path], keys);
    (dir, opened)
}

pub fn read(reader: &dyn Reader, at: usize) -> Record {
    let mut record = Record::new();
    reader.read(at, &mut record).unwrap();
    record
}

pub fn read_error(opened: OpenedFiles) -> ReadError {
    match opened.expect_err("an error") {
        OpenError::Read(error) => error,
        OpenError::Setting(error) => panic!("an error of the file is expected, not {error}"),
    }
}

/// Every truncation of a file, and every byte of it changed in a few ways, is read or refused, with the file named. Nothing
/// panics, and nothing takes more memory than the file has.
pub fn survive_damage(format: &Format, bytes: &[u8], keys: &[(&str, Setting)]) {
    let try_one = |bytes: &[u8]| {
        let (_dir, opened) = open_bytes(format, bytes, keys);
        let named = |error: ReadError| assert!(error.file.is_some() || error.offset.is_some(), "{error}");
        match opened {
            Ok(reader) => {
                let mut record = Record::new();
                for at in (0..reader.len().min(20)).chain(reader.len().checked_sub(1)) {
                    if let Err(error) = reader.read(at, &mut record) {
                        named(error);
                    }
                }
            }
            Err(OpenError::Read(error)) => named(error),
            Err(OpenError::Setting(_)) => {}
        }
    };
    (0..bytes.len()).for_each(|len| try_one(&bytes[..len]));
    for at in 0..bytes.len() {
        for value in [0, 0x7f, 0xff, bytes[at] ^ 1] {
            let mut damaged = bytes.to_vec();
            damaged[at] = value;
            try_one(&damaged);
        }
    }
}
