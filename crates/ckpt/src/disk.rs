//! What a checkpoint needs of a file system, and no more, so that a simulated one can stand in its place.

use std::fmt::Debug;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

/// A file system.
///
/// What is written to a file survives a power failure once the file was synced; that a name exists, is gone or belongs to
/// another file does once its directory was. Nothing else is promised, in particular no order.
pub trait Disk: Debug + Send + Sync {
    /// Makes one directory; `AlreadyExists` if there is something of that name.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// Makes a file to write, empty; one of that name is emptied.
    fn create(&self, path: &Path) -> io::Result<Box<dyn WriteFile>>;

    fn open(&self, path: &Path) -> io::Result<Box<dyn ReadFile>>;

    /// What a directory holds, in order of name.
    fn list(&self, path: &Path) -> io::Result<Vec<Item>>;

    /// Gives a file or directory another name in the same directory. A file of that name is replaced; a directory must not be
    /// there.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty directory.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;

    /// Makes the names in a directory durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    fn is_dir(&self, path: &Path) -> bool;
}

/// A disk that a checkpoint can keep.
pub type SharedDisk = Arc<dyn Disk>;

/// A file being written, from its beginning to its end.
pub trait WriteFile: Debug + Send {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Makes what was written durable.
    fn sync(&mut self) -> io::Result<()>;
}

pub trait ReadFile: Debug + Send + Sync {
    fn bytes(&self) -> u64;

    /// Fills `out` from `offset` on, or fails.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    pub name: String,
    pub is_dir: bool,
}

/// The disk of the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealDisk;

impl RealDisk {
    pub fn shared() -> SharedDisk {
        Arc::new(Self)
    }
}

impl Disk for RealDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn WriteFile>> {
        Ok(Box::new(RealFile { file: File::create(path)?, written: 0, started: 0 }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn ReadFile>> {
        let file = kolo_base::open_regular(path)?;
        let bytes = file.metadata()?.len();
        Ok(Box::new(RealReader { file, bytes }))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Item>> {
        let mut items = Vec::new();
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            // A name that is no text is none of ours.
            if let Ok(name) = entry.file_name().into_string() {
                items.push(Item { name, is_dir: entry.file_type()?.is_dir() });
            }
        }
        items.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(items)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        match cfg!(unix) {
            true => File::open(path)?.sync_all(),
            // Elsewhere a directory cannot be opened, and its changes are ordered.
            false => Ok(()),
        }
    }

    fn is_dir(&self, path: &Path) -> bool {
        path.is_dir()
    }
}

#[derive(Debug)]
struct RealFile {
    file: File,
    written: u64,
    /// Bytes whose writeback was started.
    started: u64,
}

/// Bytes after which writeback starts, so that the disk works while the rest is still being copied.
const WRITEBACK_BYTES: u64 = 8 << 20;

impl WriteFile for RealFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.written += bytes.len() as u64;
        if self.written - self.started >= WRITEBACK_BYTES {
            start_writeback(&self.file, self.started, self.written - self.started);
            self.started = self.written;
        }
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_all()
    }
}

/// Starts the writeback of a range of a file without waiting for it. An error does no harm: `sync` reports it.
#[cfg(target_os = "linux")]
fn start_writeback(file: &File, offset: u64, bytes: u64) {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor is open, and no memory is passed.
    unsafe {
        libc::sync_file_range(file.as_raw_fd(), offset as i64, bytes as i64, libc::SYNC_FILE_RANGE_WRITE);
    }
}

#[cfg(not(target_os = "linux"))]
fn start_writeback(_: &File, _: u64, _: u64) {}

#[derive(Debug)]
struct RealReader {
    file: File,
    bytes: u64,
}

impl ReadFile for RealReader {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    #[cfg(unix)]
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, out, offset)
    }

    #[cfg(not(unix))]
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = self.file.try_clone()?;
        file.seek(SeekFrom::Start(offset))?;
        file.read_exact(out)
    }
}
