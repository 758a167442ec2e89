//! A file that has another name until it is whole: what was there stays if anything fails.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

/// A file on its way to its name. Dropping it unfinished leaves nothing.
#[derive(Debug)]
pub struct WholeFile {
    file: File,
    /// Where it is, and where it goes; `None` if what has the name is no regular file: then it is written as it is.
    names: Option<(PathBuf, PathBuf)>,
}

impl WholeFile {
    pub fn create(path: &Path) -> io::Result<Self> {
        match path.metadata() {
            Ok(there) if there.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            _ if let Some(open) = descriptor(path) => Ok(Self { file: open.try_clone_to_owned()?.into(), names: None }),
            Ok(there) if !there.is_file() => Ok(Self { file: OpenOptions::new().write(true).open(path)?, names: None }),
            // A link stays a link, and what only the user may read stays so.
            Ok(there) => {
                let whole = Self::beside(path.canonicalize()?)?;
                whole.file.set_permissions(there.permissions())?;
                Ok(whole)
            }
            Err(_) => Self::beside(path.into()),
        }
    }

    fn beside(path: PathBuf) -> io::Result<Self> {
        let mut name = path.as_os_str().to_os_string();
        name.push(format!(".part-{}", std::process::id()));
        let temporary = PathBuf::from(name);
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&temporary)?;
        Ok(Self { file, names: Some((temporary, path)) })
    }

    /// A handle to write to.
    pub fn handle(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Gives it its name; its bytes.
    pub fn finish(mut self) -> io::Result<u64> {
        self.file.flush()?;
        let bytes = self.file.metadata()?.len();
        if let Some((temporary, path)) = &self.names {
            self.file.sync_all()?;
            std::fs::rename(temporary, path)?;
            self.names = None;
        }
        Ok(bytes)
    }
}

/// The open file that a name such as /dev/stdout stands for. What is written goes on where that is, whatever it was redirected
/// to.
fn descriptor(path: &Path) -> Option<BorrowedFd<'static>> {
    let number = match path.to_str()? {
        "/dev/stdout" => 1,
        "/dev/stderr" => 2,
        path => ["/dev/fd/", "/proc/self/fd/"].iter().find_map(|start| path.strip_prefix(start))?.parse().ok()?,
    };
    // SAFETY: an open descriptor, which is used only to copy it; closed ones are refused by the system.
    path.exists().then(|| unsafe { BorrowedFd::borrow_raw(number) })
}

impl Drop for WholeFile {
    fn drop(&mut self) {
        if let Some((temporary, _)) = &self.names {
            let _ = std::fs::remove_file(temporary);
        }
    }
}
