//! The files behind `data.source`: from paths, directories and patterns to a sorted list; reading at an offset; what is
//! compressed, unpacked once.

use crate::error::ReadError;
use crate::pattern::{self, WalkError};
pub use crate::unpack::Packing;
use crate::unpack::{MAGIC_BYTES, Unpacked};
use kolo_base::limit_hint;
use kolo_graph::settings::{SettingError, Settings};
use std::cell::Cell;
use std::fs::{File, FileType};
use std::io::{self, BufReader, Read};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file or directory that `data.source` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFile {
    pub path: PathBuf,
    pub bytes: u64,
    /// Nanoseconds since 1970 of its last change.
    pub modified_ns: i128,
    pub is_directory: bool,
}

/// Bytes that a compressed file may unpack to, unless `data.unpacked_max` says otherwise: 64 GiB.
pub const UNPACKED_BYTES_MAX: u64 = 64 << 30;
/// Files that one pattern may name.
const FILES_MAX: usize = 10_000_000;

pub(crate) use kolo_base::open_regular;

/// Data are read at offsets, and some are read again: what comes only once, as from a pipe, cannot be.
fn refuse_special(path: &Path, kind: FileType) -> Result<(), ReadError> {
    let what = match kind {
        kind if kind.is_file() || kind.is_dir() => return Ok(()),
        kind if kind.is_fifo() => "is a pipe, which only `kolo train` can read, as all of `data.source`",
        kind if kind.is_socket() => "is a socket, not a file",
        kind if kind.is_char_device() => "is a character device, not a file",
        _ => "is a block device, not a file",
    };
    Err(ReadError::new(what, "write the data to a file first, and name that").in_file(path))
}

impl DataFile {
    /// A regular file, or a directory. Nothing of it is opened yet.
    pub fn at(path: &Path) -> Result<Self, ReadError> {
        let meta = std::fs::metadata(path).map_err(|error| not_opened(path, &error))?;
        refuse_special(path, meta.file_type())?;
        let modified_ns = i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec());
        Ok(Self { path: path.into(), bytes: meta.len(), modified_ns, is_directory: meta.is_dir() })
    }

    pub fn open(&self) -> Result<File, ReadError> {
        open_regular(&self.path).map_err(|error| not_opened(&self.path, &error))
    }

    pub fn packing(&self) -> Result<Packing, ReadError> {
        if self.is_directory {
            return Ok(Packing::None);
        }
        let mut magic = Vec::new();
        let start = self.open()?.take(MAGIC_BYTES as u64).read_to_end(&mut magic);
        start.map_err(|error| ReadError::io(&self.path, &error))?;
        Ok(Packing::of(&magic))
    }

    /// The contents from the start, unpacked if they are packed.
    pub fn stream(&self) -> Result<Box<dyn Read + Send>, ReadError> {
        let file = self.open()?;
        Ok(match self.packing()? {
            Packing::None => Box::new(BufReader::new(file)),
            Packing::Gzip => Box::new(Unpacked::gzip(file)),
            Packing::Zstd => Box::new(Unpacked::zstd(file).map_err(|error| ReadError::io(&self.path, &error))?),
        })
    }

    /// The first bytes of the contents, at most `bytes`; of a directory none.
    pub fn head(&self, bytes: usize) -> Result<Vec<u8>, ReadError> {
        let mut head = Vec::new();
        if !self.is_directory {
            let read = self.stream()?.take(bytes as u64).read_to_end(&mut head);
            read.map_err(|error| ReadError::io(&self.path, &error))?;
        }
        Ok(head)
    }

    /// The ending in lower case; that of a packed file without `.gz` or `.zst`.
    pub fn extension(&self) -> String {
        let ending = |path: &Path| path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
        match ending(&self.path) {
            Some(packed) if ["gz", "zst"].contains(&packed.as_str()) => {
                ending(&self.path.with_extension("")).unwrap_or_default()
            }
            Some(ending) if ending == "tgz" => "tar".into(),
            other => other.unwrap_or_default(),
        }
    }

    /// A file with random access to the contents: the file itself, or, if it is packed, what it unpacks to, in a temporary
    /// file without a name that goes with the process.
    pub fn contents(&self, settings: &Settings) -> Result<Contents, crate::format::OpenError> {
        if self.is_directory {
            let message = "it is a folder, but files of one format are wanted";
            return Err(ReadError::new(message, "name the files in it, such as `DIR/*.csv`")
                .in_file(&self.path)
                .into());
        }
        if self.packing()? == Packing::None {
            return Ok(Contents { path: self.path.clone().into(), file: Arc::new(self.open()?), bytes: self.bytes });
        }
        let most = settings.count("unpacked_max", UNPACKED_BYTES_MAX as usize, 1)? as u64;
        let failed = |error: io::Error| ReadError::io(&self.path, &error);
        let mut target = tempfile::tempfile().map_err(failed)?;
        let bytes = io::copy(&mut self.stream()?.take(most + 1), &mut target).map_err(failed)?;
        if bytes > most {
            let message = format!("it unpacks to more than {most} bytes");
            return Err(ReadError::new(message, "check the file, or raise `data.unpacked_max`")
                .in_file(&self.path)
                .at(most)
                .into());
        }
        Ok(Contents { path: self.path.clone().into(), file: Arc::new(target), bytes })
    }
}

impl DataFile {
    /// The contents of a file that is not packed, if it is still the one that was listed.
    pub(crate) fn plain_contents(&self) -> Result<Contents, ReadError> {
        let file = self.open()?;
        match Self::at(&self.path)? == *self {
            true => Ok(Contents { path: self.path.clone().into(), file: Arc::new(file), bytes: self.bytes }),
            false => {
                let hint = "do not change data while a job reads them; start the job again";
                Err(ReadError::new("it has changed since the job started", hint).in_file(&self.path))
            }
        }
    }
}

fn not_opened(path: &Path, error: &io::Error) -> ReadError {
    let hint = match error.kind() {
        io::ErrorKind::NotFound => "check the path; a relative one starts where kolo was started",
        io::ErrorKind::PermissionDenied => "give this user read permission",
        _ => "check the file, and the disk or network that it is on",
    };
    let hint = limit_hint(error).unwrap_or(hint);
    ReadError::new(format!("cannot be opened: {error}"), hint).in_file(path)
}

thread_local! {
    static LAST_READ: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Where this thread read contents last: what a decoder that does not say where it failed was working on.
#[cfg(any(feature = "parquet", feature = "hdf5"))]
pub(crate) fn last_read() -> Option<u64> {
    LAST_READ.get()
}

/// What is read from here on has nothing to do with what was read before.
#[cfg(any(feature = "parquet", feature = "hdf5"))]
pub(crate) fn forget_last_read() {
    LAST_READ.set(None);
}

/// The contents of a file with random access. Clones share the file.
#[derive(Clone, Debug)]
pub struct Contents {
    path: Arc<Path>,
    file: Arc<File>,
    bytes: u64,
}

impl Contents {
    /// What was unpacked from this file, or made of it.
    pub fn made(path: &Path, file: File) -> Result<Self, ReadError> {
        let bytes = file.metadata().map_err(|error| ReadError::io(path, &error))?.len();
        Ok(Self { path: path.into(), file: Arc::new(file), bytes })
    }

    /// The first so many bytes of what was unpacked from this file, which is still written behind them.
    pub(crate) fn part_of(path: &Path, file: Arc<File>, bytes: u64) -> Self {
        Self { path: path.into(), file, bytes }
    }

    /// All of the contents from `offset` on, in order.
    pub fn stream_from(&self, offset: u64) -> ContentsStream {
        ContentsStream { contents: self.clone(), at: offset }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    /// Of all the contents.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Fills `out` from `offset` on. A range beyond the end is an error before anything is read.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), ReadError> {
        LAST_READ.set(Some(offset));
        self.check(offset, out.len() as u64)?;
        self.file.read_exact_at(out, offset).map_err(|error| ReadError::io(&self.path, &error).at(offset))
    }

    /// Replaces what `out` holds by `len` bytes from `offset` on. Memory is taken only if the file has that many.
    pub fn read_into(&self, offset: u64, len: u64, out: &mut Vec<u8>) -> Result<(), ReadError> {
        self.check(offset, len)?;
        out.clear();
        out.resize(len as usize, 0);
        self.read_at(offset, out)
    }

    /// Whether the contents have this range.
    pub fn check(&self, offset: u64, len: u64) -> Result<(), ReadError> {
        match offset.checked_add(len).is_some_and(|end| end <= self.bytes) {
            true => Ok(()),
            false => {
                let message = format!("{len} bytes are expected here, but the file ends at byte {}", self.bytes);
                Err(self.damaged(offset, message))
            }
        }
    }

    /// What stands at `offset` is whole, as far as that can be told, but of a kind that kolo does not read.
    pub fn unsupported(&self, offset: u64, message: impl Into<String>, hint: impl Into<String>) -> ReadError {
        ReadError::new(message, hint).in_file(&self.path).at(offset)
    }

    /// What stands at `offset` makes no sense.
    pub fn damaged(&self, offset: u64, message: impl Into<String>) -> ReadError {
        damaged(&self.path, offset, message)
    }
}

/// What stands at `offset` of a file makes no sense.
pub(crate) fn damaged(path: &Path, offset: u64, message: impl Into<String>) -> ReadError {
    ReadError::new(message, "the file is damaged or cut short; copy or make it again").in_file(path).at(offset)
}

/// Contents read in order, with a cursor of its own.
#[derive(Debug)]
pub struct ContentsStream {
    contents: Contents,
    at: u64,
}

impl Read for ContentsStream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = self.contents.bytes.saturating_sub(self.at);
        let wanted = out.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let read = self.contents.file.read_at(&mut out[..wanted], self.at)?;
        if read == 0 && wanted > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += read as u64;
        Ok(read)
    }
}

/// Files that a text names.
#[derive(Clone, Debug, Default)]
pub struct Listed {
    pub files: Vec<DataFile>,
    /// What was left out of them.
    pub notes: Vec<String>,
}

/// The files that this text names: paths, patterns such as `shards/*.tar` or `photos/**/*.jpg`, and ranges such as
/// `shards/{000..099}.tar`, of which every file must be there; separated by commas where
/// no file of that name exists. Sorted by name within a pattern, so that every rank sees the same order.
pub fn list(source: &str, settings: &Settings, key: &str) -> Result<Listed, crate::format::OpenError> {
    let texts: Vec<&str> = match Path::new(source).exists() {
        true => vec![source],
        false => source.split(',').map(str::trim).filter(|text| !text.is_empty()).collect(),
    };
    let mut listed = Listed::default();
    for text in texts {
        match Path::new(text).exists() {
            true => listed.files.push(DataFile::at(Path::new(text))?),
            false => {
                let hint = "write `train-{000000..000099}.tar`";
                for name in crate::ranges::expand(text).map_err(|message| settings.wrong(key, message, hint))? {
                    matches(&name, settings, key, &mut listed)?;
                }
            }
        }
    }
    match listed.files.is_empty() {
        true => Err(settings.wrong(key, "names no file", "name a file, a directory or a pattern").into()),
        false => Ok(listed),
    }
}

fn matches(pattern: &str, settings: &Settings, key: &str, listed: &mut Listed) -> Result<(), crate::format::OpenError> {
    let wrong = |message: String, hint: &str| -> SettingError { settings.wrong(key, message, hint) };
    let is_pattern = pattern.contains(['*', '?', '[']);
    let found = pattern::matches(pattern, FILES_MAX).map_err(|error| -> crate::format::OpenError {
        match error {
            WalkError::Pattern(error) => {
                wrong(format!("has the pattern \"{pattern}\": {error}"), "write `*`, `?`, `[a-z]` or `**/`").into()
            }
            WalkError::Read(path, error) => not_opened(&path, &error).into(),
        }
    })?;
    if found.again > 0 && !found.paths.is_empty() {
        let folders = if found.again == 1 { "a folder that links lead" } else { "folders that links lead" };
        listed.notes.push(format!("left out of \"{pattern}\": {folders} to a second time"));
    }
    let before = listed.files.len();
    for path in found.paths {
        listed.files.push(DataFile::at(&path)?);
        if listed.files.len() > FILES_MAX {
            let message = format!("matches more than {FILES_MAX} files with \"{pattern}\"");
            return Err(wrong(message, "pack them into tar shards (`kolo data convert`)").into());
        }
    }
    if listed.files.len() == before {
        let what = if is_pattern { "which matches no file" } else { "but there is no such file" };
        let hint = "check the path; a relative one starts where kolo was started";
        return Err(wrong(format!("is \"{pattern}\", {what}"), hint).into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing waits for the writer of a pipe, and nothing is opened that comes only once.
    #[test]
    fn only_regular_files_and_directories_are_data() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("a.csv");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("b.csv")).unwrap();
        let settings = Settings::new("data", "job.toml:1");
        for (path, what) in [
            (pipe.clone(), "is a pipe, which only `kolo train` can read"),
            (dir.path().join("b.csv"), "is a socket"),
            ("/dev/zero".into(), "is a character device"),
        ] {
            let error = list(path.to_str().unwrap(), &settings, "source").unwrap_err().to_string();
            assert!(error.contains(&format!("{}: {what}", path.display())), "{error}");
            assert!(error.ends_with("hint: write the data to a file first, and name that"), "{error}");
            assert!(open_regular(&path).is_err());
        }
        std::fs::write(dir.path().join("c.csv"), "a\n1\n").unwrap();
        let both = format!("{},{}", dir.path().join("c.csv").display(), pipe.display());
        for several in [both, dir.path().join("*.csv").display().to_string()] {
            let error = list(&several, &settings, "validation").unwrap_err().to_string();
            assert!(error.contains("a.csv: is a pipe"), "{error}");
        }
        assert!(DataFile::at(dir.path()).unwrap().is_directory);
        assert_eq!(DataFile::at(&dir.path().join("c.csv")).unwrap().bytes, 4);
    }
}
