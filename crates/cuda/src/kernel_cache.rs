//! Machine code of kernels and the algorithms of products, kept on disk from one run to the next.
//!
//! A file is named by the hash of everything that its content depends on, and begins with a hash of the content itself: one that is
//! damaged is made again. Files appear whole (written aside, then renamed), so processes may share the folder. When it
//! grows too large, the files that were used longest ago go. Whatever fails here costs time, never a run.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

/// All files together.
const CACHE_BYTES_MAX: u64 = 512 << 20;
/// One file; no kernel comes near it.
const FILE_BYTES_MAX: u64 = 64 << 20;
const HASH_BYTES: usize = 32;

/// What files hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheKind {
    /// Machine code.
    Kernel,
    /// Which algorithm of cuBLASLt is the fastest.
    Algorithm,
}

impl CacheKind {
    fn ending(self) -> &'static str {
        match self {
            CacheKind::Kernel => "cubin",
            CacheKind::Algorithm => "algorithm",
        }
    }
}

#[derive(Debug)]
pub(crate) struct KernelCache {
    folder: PathBuf,
    kind: CacheKind,
}

impl KernelCache {
    /// The user's: `$XDG_CACHE_HOME/kolo/cuda`, or below `$HOME/.cache`.
    pub fn of_user(kind: CacheKind) -> Option<Self> {
        let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
        Self::at(&base.join("kolo").join("cuda"), kind)
    }

    pub fn at(folder: &Path, kind: CacheKind) -> Option<Self> {
        fs::create_dir_all(folder).ok()?;
        Some(Self { folder: folder.into(), kind })
    }

    fn path(&self, key: &[u8; HASH_BYTES]) -> PathBuf {
        self.folder.join(format!("{}.{}", blake3::Hash::from_bytes(*key).to_hex(), self.kind.ending()))
    }

    /// What is there, if it is whole. To have been read counts as use.
    pub fn read(&self, key: &[u8; HASH_BYTES]) -> Option<Vec<u8>> {
        let path = self.path(key);
        if fs::metadata(&path).ok()?.len() > FILE_BYTES_MAX {
            return None;
        }
        let bytes = fs::read(&path).ok()?;
        let (hash, code) = bytes.split_at_checked(HASH_BYTES)?;
        if code.is_empty() || blake3::hash(code).as_bytes() != hash {
            return None;
        }
        let _ = fs::File::options().append(true).open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        Some(code.to_vec())
    }

    pub fn write(&self, key: &[u8; HASH_BYTES], code: &[u8]) {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let aside = self.folder.join(format!("{}-{number}.part", std::process::id()));
        let write = || -> std::io::Result<()> {
            let mut file = fs::File::create(&aside)?;
            file.write_all(blake3::hash(code).as_bytes())?;
            file.write_all(code)?;
            fs::rename(&aside, self.path(key))
        };
        if write().is_err() {
            let _ = fs::remove_file(&aside);
        }
    }

    pub fn remove(&self, key: &[u8; HASH_BYTES]) {
        let _ = fs::remove_file(self.path(key));
    }

    /// Deletes the files that were used longest ago, until the rest is small enough.
    pub fn trim(&self) {
        self.trim_to(CACHE_BYTES_MAX);
    }

    fn trim_to(&self, bytes_max: u64) {
        let Ok(listed) = fs::read_dir(&self.folder) else { return };
        let mut files: Vec<(SystemTime, u64, PathBuf)> = listed
            .flatten()
            .filter_map(|entry| {
                let data = entry.metadata().ok().filter(|data| data.is_file())?;
                Some((data.modified().ok()?, data.len(), entry.path()))
            })
            .collect();
        files.sort();
        let mut total: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, path) in files {
            if total <= bytes_max {
                return;
            }
            if fs::remove_file(&path).is_ok() {
                total -= bytes;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_comes_back_and_damage_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(&folder.path().join("deep/er"), CacheKind::Kernel).unwrap();
        let (key, other) = ([7; HASH_BYTES], [8; HASH_BYTES]);
        assert_eq!(cache.read(&key), None);
        cache.write(&key, b"machine code");
        cache.write(&other, b"more");
        assert_eq!(cache.read(&key).as_deref(), Some(&b"machine code"[..]));
        let algorithms = KernelCache::at(&cache.folder, CacheKind::Algorithm).unwrap();
        assert_eq!(algorithms.read(&key), None, "each kind has files of its own");
        let path = cache.path(&key);
        for wrong in [&b""[..], b"short", &[0; 200]] {
            fs::write(&path, wrong).unwrap();
            assert_eq!(cache.read(&key), None);
        }
        let mut bytes = fs::read(cache.path(&other)).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(cache.path(&other), bytes).unwrap();
        assert_eq!(cache.read(&other), None);
        assert_eq!(fs::read_dir(&cache.folder).unwrap().count(), 2, "nothing is left aside");
    }

    #[test]
    fn what_was_not_used_for_long_goes_first() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(folder.path(), CacheKind::Kernel).unwrap();
        let now = SystemTime::now();
        for at in 0..4u8 {
            cache.write(&[at; HASH_BYTES], &[at; 100]);
            let file = fs::File::options().append(true).open(cache.path(&[at; HASH_BYTES])).unwrap();
            file.set_modified(now - std::time::Duration::from_secs(1000 - u64::from(at))).unwrap();
        }
        assert!(cache.read(&[0; HASH_BYTES]).is_some(), "the oldest is used again");
        cache.trim_to(300);
        let left: Vec<bool> = (0..4u8).map(|at| cache.path(&[at; HASH_BYTES]).exists()).collect();
        assert_eq!(left, [true, false, false, true]);
    }
}
