//! What can go wrong with a checkpoint. Every message names the file, and ends in a hint.

use kolo_base::ShownPath;
use std::io;
use std::path::{Path, PathBuf};

/// Why a checkpoint could not be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CkptError {
    /// The system refused.
    #[error("{}: cannot {action}{}: {source}\n  hint: {}", .path.shown(), of_bytes(*.bytes), io_hint(.action, .source))]
    Io {
        path: PathBuf,
        action: &'static str,
        /// Bytes that were to be written or read, or that the file already has.
        bytes: Option<u64>,
        source: io::Error,
    },
    /// A file is not what the manifest says, or the manifest is not what was written.
    #[error("{}: {what}\n  hint: restore the file from a copy, or use another checkpoint (`kolo ckpt ls` lists them)", .path.shown())]
    Damaged { path: PathBuf, what: String },
    /// A file makes no sense, whoever wrote it.
    #[error("{}: {what}\n  hint: {hint}", .path.shown())]
    Refused { path: PathBuf, what: String, hint: String },
    /// What was asked for is not in the checkpoint, or is of another type.
    #[error("{}: tensor `{tensor}` {what}\n  hint: {hint}", .path.shown())]
    Tensor { path: PathBuf, tensor: String, what: String, hint: String },
    /// What ranks brought together is no whole state.
    #[error("this state cannot be saved: {what}\n  hint: {hint}")]
    Unsound { what: String, hint: String },
}

impl CkptError {
    pub(crate) fn io(path: &Path, action: &'static str, bytes: Option<u64>) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, action, bytes, source }
    }

    pub(crate) fn damaged(path: &Path, what: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_path_buf(), what: what.into() }
    }

    pub(crate) fn refused(path: &Path, what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Refused { path: path.to_path_buf(), what: what.into(), hint: hint.into() }
    }

    pub(crate) fn unsound(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Unsound { what: what.into(), hint: hint.into() }
    }

    /// Without the hint, for lists.
    pub fn brief(&self) -> String {
        let text = self.to_string();
        text.split("\n  hint: ").next().unwrap_or(&text).to_owned()
    }
}

fn of_bytes(bytes: Option<u64>) -> String {
    bytes.map_or(String::new(), |bytes| format!(" {}", human(bytes)))
}

/// `512 bytes`, `1.50 MiB (1572864 bytes)`.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} bytes");
    }
    let mut scaled = bytes as f64 / 1024.0;
    let mut unit = 0;
    while scaled >= 1023.995 && unit + 1 < UNITS.len() {
        (scaled, unit) = (scaled / 1024.0, unit + 1);
    }
    format!("{scaled:.2} {} ({bytes} bytes)", UNITS[unit])
}

/// What is done to something that is there already.
const READING: [&str; 4] = ["open", "read", "list", "find"];

fn io_hint(action: &str, error: &io::Error) -> &'static str {
    if let Some(hint) = kolo_base::limit_hint(error) {
        return hint;
    }
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free space on that file system, or keep fewer checkpoints (`checkpoint.keep`); earlier ones are intact"
        }
        io::ErrorKind::PermissionDenied if READING.contains(&action) => "run kolo as a user who may read it",
        io::ErrorKind::NotADirectory | io::ErrorKind::InvalidInput if READING.contains(&action) => {
            "name a run, one of its checkpoints or a safetensors file"
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            "choose a writable directory; earlier checkpoints are intact"
        }
        io::ErrorKind::NotFound => {
            "check the path; with several hosts, it must be on a file system that they all share"
        }
        _ => "check the system log for errors of this disk; earlier checkpoints are intact",
    }
}
