//! Index files: where the records of a large file start, kept beside it (`NAME.kolo-index`), so that only the first run has
//! to look.
//!
//! An index counts only if it is of this file (its size and its time of change), of this kind, and whole (its checksum). It
//! is written under another name and then renamed: whoever reads sees an old one, a new one or none, however many ranks
//! write at once. An index that cannot be kept is no error: it is made again by the next run.
//!
//! Layout, little-endian: the magic, then BLAKE3 of all that follows, then the kind (length as u16, text), the file's bytes
//! (u64), its time in ns (i128), and the payload.

use crate::error::ReadError;
use crate::files::{DataFile, open_regular};
use crate::format::OpenError;
use kolo_base::ByteReader;
use kolo_graph::settings::Settings;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"kolo-ix1";
const DIGEST_BYTES: usize = 32;
pub(crate) const EXTENSION: &str = "kolo-index";
/// Bytes of an index file: about those of the offsets of a hundred million records.
const INDEX_BYTES_MAX: u64 = 4 << 30;
/// Hexadecimal digits that tell the files of one name in `data.index_dir`.
const DIGITS: usize = 16;

/// Where the index files are.
#[derive(Clone, Debug, Default)]
pub struct IndexPlace {
    /// A directory for all of them, or beside each file.
    directory: Option<PathBuf>,
}

impl IndexPlace {
    /// What `data.index_dir` says; by default beside the file.
    pub fn of(settings: &Settings) -> Result<Self, OpenError> {
        let directory = settings.text("index_dir", "")?;
        Ok(Self { directory: (!directory.is_empty()).then(|| directory.into()) })
    }

    /// The index file of `file`.
    pub fn path(&self, file: &Path) -> PathBuf {
        let mut name = OsString::new();
        if self.directory.is_some() {
            let full = std::path::absolute(file).unwrap_or_else(|_| file.into());
            let digest = blake3::hash(full.as_os_str().as_encoded_bytes()).to_hex();
            name.push(&digest[..DIGITS]);
            name.push("-");
        }
        name.push(file.file_name().unwrap_or_default());
        name.push(".");
        name.push(EXTENSION);
        match &self.directory {
            Some(directory) => directory.join(name),
            None => file.with_file_name(name),
        }
    }

    /// The payload of the index of `file`: the one that is kept, or else what `make` makes, which is kept if it can be.
    /// `kind` names format and version.
    pub fn load_or_make(
        &self,
        file: &DataFile,
        kind: &str,
        make: impl FnOnce() -> Result<Vec<u8>, ReadError>,
    ) -> Result<Vec<u8>, ReadError> {
        if let Some(payload) = self.load(file, kind) {
            return Ok(payload);
        }
        let payload = make()?;
        // What was written to meanwhile gets no index; the next run looks again.
        if DataFile::at(&file.path).is_ok_and(|now| now == *file) {
            let _ = self.keep(file, kind, &payload);
        }
        Ok(payload)
    }

    /// The payload that is kept, if it is of this file and whole.
    pub fn load(&self, file: &DataFile, kind: &str) -> Option<Vec<u8>> {
        let opened = open_regular(&self.path(&file.path)).ok()?;
        let bytes = opened.metadata().ok().filter(|meta| meta.len() <= INDEX_BYTES_MAX)?.len();
        let mut contents = Vec::with_capacity(bytes as usize);
        opened.take(bytes).read_to_end(&mut contents).ok()?;
        let mut reader = ByteReader::new(&contents);
        if reader.array()? != *MAGIC {
            return None;
        }
        let digest: [u8; DIGEST_BYTES] = reader.array()?;
        if *blake3::hash(reader.rest()).as_bytes() != digest {
            return None;
        }
        let stamp = stamp(file, kind);
        let same = reader.take(stamp.len())? == stamp;
        let start = contents.len() - reader.rest().len();
        same.then(|| contents.split_off(start))
    }

    fn keep(&self, file: &DataFile, kind: &str, payload: &[u8]) -> io::Result<()> {
        let path = self.path(&file.path);
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if self.directory.is_some() {
            std::fs::create_dir_all(directory)?;
        }
        let stamp = stamp(file, kind);
        let mut hasher = blake3::Hasher::new();
        let digest = hasher.update(&stamp).update(payload).finalize();
        let anyone = std::fs::Permissions::from_mode(0o666);
        let mut target = tempfile::Builder::new().prefix(".kolo-index-").permissions(anyone).tempfile_in(directory)?;
        for part in [&MAGIC[..], digest.as_bytes(), &stamp, payload] {
            target.write_all(part)?;
        }
        target.persist(path)?;
        Ok(())
    }
}

/// What an index must say to be of this file.
fn stamp(file: &DataFile, kind: &str) -> Vec<u8> {
    let mut stamp = Vec::new();
    stamp.extend((kind.len() as u16).to_le_bytes());
    stamp.extend(kind.as_bytes());
    stamp.extend(file.bytes.to_le_bytes());
    stamp.extend(file.modified_ns.to_le_bytes());
    stamp
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn sample() -> (tempfile::TempDir, DataFile) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.tar");
        fs::write(&path, b"some data").unwrap();
        let file = DataFile::at(&path).unwrap();
        (directory, file)
    }

    fn never() -> Result<Vec<u8>, ReadError> {
        panic!("the index was kept")
    }

    #[test]
    fn an_index_is_made_once_and_again_when_the_file_changes() {
        let (directory, file) = sample();
        let place = IndexPlace::default();
        assert_eq!(place.load_or_make(&file, "tar 1", || Ok(b"payload".to_vec())).unwrap(), b"payload");
        assert_eq!(place.load_or_make(&file, "tar 1", never).unwrap(), b"payload");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2, "no temporary file stays");
        assert_eq!(place.load(&file, "tar 2"), None);
        for changed in
            [DataFile { bytes: 10, ..file.clone() }, DataFile { modified_ns: file.modified_ns + 1, ..file.clone() }]
        {
            assert_eq!(place.load(&changed, "tar 1"), None);
            // The file on disk is not the one that was listed: nothing is kept.
            assert_eq!(place.load_or_make(&changed, "tar 1", || Ok(vec![1])).unwrap(), [1]);
            assert_eq!(place.load(&changed, "tar 1"), None);
        }
    }

    #[test]
    fn damage_anywhere_is_noticed() {
        let (_directory, file) = sample();
        let place = IndexPlace::default();
        place.load_or_make(&file, "tar 1", || Ok(b"payload".to_vec())).unwrap();
        let path = place.path(&file.path);
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() * 8 {
            let mut bytes = whole.clone();
            bytes[at / 8] ^= 1 << (at % 8);
            fs::write(&path, bytes).unwrap();
            assert_eq!(place.load(&file, "tar 1"), None, "bit {at}");
        }
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(place.load(&file, "tar 1"), None, "{length} bytes");
        }
        assert_eq!(place.load_or_make(&file, "tar 1", || Ok(b"again".to_vec())).unwrap(), b"again");
        assert_eq!(place.load(&file, "tar 1").unwrap(), b"again");
    }

    #[test]
    fn without_a_place_to_keep_it_an_index_is_made_each_time() {
        let (directory, file) = sample();
        // A directory in its place cannot be replaced, whoever runs this.
        fs::create_dir(directory.path().join("a.tar.kolo-index")).unwrap();
        let place = IndexPlace::default();
        for _ in 0..2 {
            assert_eq!(place.load_or_make(&file, "tar 1", || Ok(vec![7])).unwrap(), [7]);
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2, "no temporary file stays");
    }

    #[test]
    fn a_directory_of_its_own_keeps_files_of_one_name_apart() {
        let (directory, file) = sample();
        let (_other_directory, other) = sample();
        let mut settings = Settings::new("data", "job.toml:1");
        let text = directory.path().join("new/indexes").to_string_lossy().into_owned();
        settings.set("index_dir", "job.toml:2", kolo_graph::settings::Setting::Text(text));
        let place = IndexPlace::of(&settings).unwrap();
        place.load_or_make(&file, "tar 1", || Ok(vec![1])).unwrap();
        place.load_or_make(&other, "tar 1", || Ok(vec![2])).unwrap();
        assert_eq!(place.load_or_make(&file, "tar 1", never).unwrap(), [1]);
        assert_eq!(place.load_or_make(&other, "tar 1", never).unwrap(), [2]);
        assert!(!directory.path().join("a.tar.kolo-index").exists());
    }

    #[test]
    fn writers_at_once_leave_a_whole_index() {
        let (_directory, file) = sample();
        std::thread::scope(|scope| {
            for writer in 0..4u8 {
                let file = &file;
                scope.spawn(move || {
                    for _ in 0..20 {
                        let payload = vec![writer; 10_000];
                        IndexPlace::default().keep(file, "tar 1", &payload).unwrap();
                        let read = IndexPlace::default().load(file, "tar 1").unwrap();
                        assert!(read.len() == 10_000 && read.iter().all(|byte| *byte == read[0]));
                    }
                });
            }
        });
    }
}
