//! Many large files read at random: which they are, and open handles to a bounded number of them.

use crate::error::ReadError;
use crate::files::{Contents, DataFile, Listed, Packing};
use crate::format::OpenError;
use crate::index_file;
use crate::notes::IgnoredFiles;
use kolo_base::lock;
use kolo_graph::settings::Settings;
use std::collections::{HashSet, VecDeque};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Files of one set that are open at a time. A process may have a thousand open by default.
const OPEN_FILES_MAX: usize = 128;
/// Bytes that one look at a file reads while records are small.
const LOOK_BYTES: usize = 64 << 10;

/// The files, in order. What is packed was unpacked into a temporary file, which stays open.
#[derive(Debug)]
pub(crate) struct Shards {
    shards: Vec<Shard>,
    /// Those opened last, the latest at the end.
    open: Mutex<VecDeque<(usize, Contents)>>,
}

#[derive(Debug)]
enum Shard {
    Unpacked(Contents),
    Plain(DataFile),
}

impl Shards {
    pub(crate) fn new() -> Self {
        Self { shards: Vec::new(), open: Mutex::default() }
    }

    /// Adds the contents of a file.
    pub(crate) fn push(&mut self, file: &DataFile, contents: Contents, is_packed: bool) {
        self.shards.push(if is_packed { Shard::Unpacked(contents) } else { Shard::Plain(file.clone()) });
    }

    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        let path = |shard: &Shard| match shard {
            Shard::Unpacked(contents) => contents.path().into(),
            Shard::Plain(file) => file.path.clone(),
        };
        self.shards.iter().map(path).collect()
    }

    pub(crate) fn contents(&self, at: usize) -> Result<Contents, ReadError> {
        let file = match &self.shards[at] {
            Shard::Unpacked(contents) => return Ok(contents.clone()),
            Shard::Plain(file) => file,
        };
        let mut open = lock(&self.open);
        if let Some((_, contents)) = open.iter().find(|(shard, _)| *shard == at) {
            return Ok(contents.clone());
        }
        let contents = file.plain_contents()?;
        if open.len() >= OPEN_FILES_MAX {
            open.pop_front();
        }
        open.push_back((at, contents.clone()));
        Ok(contents)
    }
}

/// The files with these endings in each directory, sorted by name, and each file itself; and what is left out of directories.
pub(crate) fn expand(
    files: &[DataFile],
    is_shard: fn(&Path) -> bool,
    settings: &Settings,
) -> Result<Listed, OpenError> {
    let (mut all, mut read) = (Listed::default(), HashSet::new());
    for file in files {
        let meta = std::fs::metadata(&file.path).map_err(|error| ReadError::io(&file.path, &error))?;
        match file.is_directory {
            true if !read.insert((meta.dev(), meta.ino())) => {
                all.notes.push(format!("left out: {}, which was read by another path", file.path.display()));
            }
            true => in_directory(&file.path, is_shard, &mut all)?,
            false => all.files.push(file.clone()),
        }
    }
    match all.files.is_empty() {
        true => Err(settings.wrong("source", "names no file of this format", "check the directory").into()),
        false => Ok(all),
    }
}

fn in_directory(directory: &Path, is_shard: fn(&Path) -> bool, all: &mut Listed) -> Result<(), ReadError> {
    let failed = |error: std::io::Error| ReadError::io(directory, &error);
    let (mut paths, mut ignored) = (Vec::new(), IgnoredFiles::default());
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_index = path.extension().is_some_and(|ending| ending == index_file::EXTENSION);
        match is_shard(&path) && !path.is_dir() {
            _ if is_hidden(&path) || is_index => {}
            true => paths.push(path),
            false => ignored.add(&path),
        }
    }
    paths.sort_unstable();
    for path in paths {
        all.files.push(DataFile::at(&path)?);
    }
    all.notes.extend(ignored.note(directory, "not of this format"));
    Ok(())
}

/// Whether a directory holds a file of this kind.
pub(crate) fn holds(directory: &Path, is_shard: fn(&Path) -> bool) -> bool {
    let Ok(entries) = std::fs::read_dir(directory) else { return false };
    entries.flatten().any(|entry| is_shard(&entry.path()) && !is_hidden(&entry.path()))
}

pub(crate) fn is_hidden(path: &Path) -> bool {
    path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."))
}

/// Opens the contents of a file, and says whether they were packed.
pub(crate) fn unpack(file: &DataFile, settings: &Settings) -> Result<(Contents, bool), OpenError> {
    Ok((file.contents(settings)?, file.packing()? != Packing::None))
}

/// Reading headers at rising offsets of a file: many at once where they lie close together, one by one where they do not.
#[derive(Debug)]
pub(crate) struct Headers<'c> {
    contents: &'c Contents,
    start: u64,
    bytes: Vec<u8>,
    last: u64,
}

impl<'c> Headers<'c> {
    pub(crate) fn new(contents: &'c Contents) -> Self {
        Self { contents, start: 0, bytes: Vec::new(), last: 0 }
    }

    pub(crate) fn contents(&self) -> &Contents {
        self.contents
    }

    /// `len` bytes from `offset` on; an error if the file does not have them.
    pub(crate) fn read(&mut self, offset: u64, len: usize) -> Result<&[u8], ReadError> {
        let ahead = offset.checked_sub(self.start).map_or(usize::MAX, |ahead| ahead as usize);
        if ahead.checked_add(len).is_some_and(|end| end <= self.bytes.len()) {
            self.last = offset;
            return Ok(&self.bytes[ahead..ahead + len]);
        }
        self.contents.check(offset, len as u64)?;
        let is_near = offset.abs_diff(self.last) <= (LOOK_BYTES / 8) as u64;
        let wanted = if is_near { LOOK_BYTES.max(len) } else { len };
        let look = (self.contents.bytes() - offset).min(wanted as u64);
        (self.start, self.last) = (offset, offset);
        self.contents.read_into(offset, look, &mut self.bytes)?;
        Ok(&self.bytes[..len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(directory: &Path, name: &str, bytes: &[u8]) -> DataFile {
        let path = directory.join(name);
        std::fs::write(&path, bytes).unwrap();
        DataFile::at(&path).unwrap()
    }

    #[test]
    fn more_files_than_may_be_open_are_read_all_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let mut shards = Shards::new();
        let count = OPEN_FILES_MAX + 3;
        for at in 0..count {
            let file = file(directory.path(), &at.to_string(), &(at as u32).to_le_bytes());
            shards.push(&file, file.plain_contents().unwrap(), false);
        }
        let mut bytes = [0; 4];
        for at in (0..count).chain((0..count).rev()) {
            shards.contents(at).unwrap().read_at(0, &mut bytes).unwrap();
            assert_eq!(u32::from_le_bytes(bytes) as usize, at);
            assert!(lock(&shards.open).len() <= OPEN_FILES_MAX);
        }
    }

    #[test]
    fn a_file_that_changed_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let listed = file(directory.path(), "a", b"1234");
        file(directory.path(), "a", b"12345");
        let mut shards = Shards::new();
        shards.push(
            &listed,
            listed.open().map(|_| listed.contents(&Settings::new("data", "job.toml:1"))).unwrap().unwrap(),
            false,
        );
        let error = shards.contents(0).unwrap_err();
        assert!(error.message.contains("changed"), "{error}");
    }

    #[test]
    fn headers_near_and_far_are_the_bytes_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..400_000u32).map(|at| (at / 7) as u8).collect();
        let file = file(directory.path(), "a", &bytes);
        let contents = file.plain_contents().unwrap();
        for hop in [1, 13, 9_000, 70_000] {
            let mut headers = Headers::new(&contents);
            for offset in (0..bytes.len() - 12).step_by(hop) {
                assert_eq!(headers.read(offset as u64, 12).unwrap(), &bytes[offset..offset + 12]);
            }
            let end = headers.read(bytes.len() as u64 - 5, 12).unwrap_err();
            assert_eq!(end.offset, Some(bytes.len() as u64 - 5));
        }
    }
}
