//! The directory of a run, as it was when the run began.
//!
//! A user may remove, rename or replace a directory while a run still writes into it. What the run writes by path from then on
//! would go nowhere, or among the files of another run, whose newest checkpoint it would be. So whoever makes something visible
//! there, or removes something, compares the directory at the path with the one it began in, and the mark in its lock file with
//! that of its own run.

use crate::error::Error;
use kolo_base::ShownPath;
use kolo_ckpt::CkptError;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The file that says which process uses a directory: `process P on H`, and below it the mark of its run.
pub const LOCK: &str = ".lock";
/// More than any lock file holds.
const LOCK_BYTES_MAX: u64 = 4 << 10;
const MARK_BYTES: usize = 8;

/// A directory that a run uses.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    /// Kept open, so that the system gives its number to no other.
    directory: File,
    /// What this run wrote into the lock file, if it could.
    mark: Option<String>,
}

/// The directory at a run's path is no longer that of the run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {what}\n  hint: {hint}", .path.shown())]
pub struct LostDir {
    path: PathBuf,
    what: String,
    hint: &'static str,
}

/// What a lock file says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LockText {
    /// `process P on H`; empty if it does not say.
    pub holder: String,
    /// Of the run that holds it.
    pub mark: Option<String>,
}

impl LockText {
    /// Of a run that begins now.
    pub fn fresh(holder: String) -> Self {
        let mut bytes = [0; MARK_BYTES];
        let mark = getrandom::fill(&mut bytes).is_ok();
        let mark = mark.then(|| bytes.iter().map(|byte| format!("{byte:02x}")).collect());
        Self { holder, mark }
    }

    /// Of this directory; `None` if there is no lock file that can be read.
    pub fn of(dir: &Path) -> Option<Self> {
        let path = dir.join(LOCK);
        // Whatever else has its name is not opened: a pipe would wait for somebody.
        std::fs::symlink_metadata(&path).ok().filter(Metadata::is_file)?;
        let mut text = Vec::new();
        File::open(&path).ok()?.take(LOCK_BYTES_MAX).read_to_end(&mut text).ok()?;
        let text = String::from_utf8_lossy(&text);
        let mut lines = text.lines().map(str::trim);
        let holder = lines.next().unwrap_or_default().to_string();
        Some(Self { holder, mark: lines.next().filter(|mark| !mark.is_empty()).map(String::from) })
    }

    /// As it stands in the file.
    pub fn written(&self) -> String {
        format!("{}\n{}\n", self.holder, self.mark.as_deref().unwrap_or_default())
    }
}

impl RunDir {
    /// The directory as it is now, in which the lock has this mark if it is this run's.
    pub fn open(path: &Path, mark: Option<String>) -> io::Result<Self> {
        let directory = File::open(path)?;
        match directory.metadata()?.is_dir() {
            true => Ok(Self { path: path.into(), directory, mark }),
            false => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    /// Whether it is still there, and this run's. Over a network it may be on a file system that does not show the lock.
    pub fn check(&self) -> Result<(), LostDir> {
        let lost = |what: String, hint| Err(LostDir { path: self.path.clone(), what, hint });
        let there = match std::fs::metadata(&self.path) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return lost(
                    "it was removed or renamed while this run wrote into it".into(),
                    "a directory that was renamed can be given its name back while the run goes on; what was removed is lost",
                );
            }
            // Whoever writes there says what is wrong.
            Err(_) => return Ok(()),
            Ok(there) => there,
        };
        const ANOTHER: &str = "let each run have a directory of its own; stop a run before its directory is removed";
        let lock = LockText::of(&self.path);
        if let Some(lock) = lock.filter(|lock| self.mark.is_some() && lock.mark != self.mark) {
            let who = if lock.holder.is_empty() { String::new() } else { format!(", {}", lock.holder) };
            return lost(
                format!("it is in use by another run{who}, which began after the directory of this one was removed"),
                ANOTHER,
            );
        }
        let number = |meta: &Metadata| (meta.dev(), meta.ino());
        if self.directory.metadata().is_ok_and(|own| number(&own) != number(&there)) {
            return lost("another directory has its name since it was removed or renamed".into(), ANOTHER);
        }
        Ok(())
    }
}

impl From<LostDir> for Error {
    fn from(lost: LostDir) -> Self {
        let LostDir { path, what, hint } = lost;
        Error::Checkpoint { message: format!("{}: {what}", path.shown()), hint: hint.into() }
    }
}

impl From<LostDir> for CkptError {
    fn from(lost: LostDir) -> Self {
        let LostDir { path, what, hint } = lost;
        CkptError::Refused { path, what, hint: hint.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_directory_is_told_from_another_of_its_name() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("run");
        let lock = |mark: &str| LockText { holder: "process 7 on node3".into(), mark: Some(mark.into()) };
        fs::create_dir(&path).unwrap();
        fs::write(path.join(LOCK), lock("ours").written()).unwrap();
        assert_eq!(LockText::of(&path), Some(lock("ours")));
        let dir = RunDir::open(&path, Some("ours".into())).unwrap();
        assert_eq!(dir.check(), Ok(()));
        let what = || dir.check().unwrap_err().to_string();
        let aside = temp.path().join("aside");
        fs::rename(&path, &aside).unwrap();
        assert!(what().contains("run: it was removed or renamed while this run wrote into it\n  hint: "), "{}", what());
        fs::create_dir(&path).unwrap();
        assert!(what().contains("run: another directory has its name"), "{}", what());
        fs::write(path.join(LOCK), lock("theirs").written()).unwrap();
        assert!(what().contains("run: it is in use by another run, process 7 on node3, which began"), "{}", what());
        // One that has just taken its lock has not written anything yet.
        fs::write(path.join(LOCK), "").unwrap();
        assert!(what().contains("run: it is in use by another run, which began"), "{}", what());
        fs::remove_dir_all(&path).unwrap();
        fs::rename(&aside, &path).unwrap();
        assert_eq!(dir.check(), Ok(()), "it has its name again");
        // Somebody who took the run for dead removed its lock, and nobody has one now.
        fs::remove_file(path.join(LOCK)).unwrap();
        assert_eq!(dir.check(), Ok(()));
        fs::write(path.join(LOCK), lock("theirs").written()).unwrap();
        assert!(what().contains("in use by another run"), "{}", what());
    }
}
