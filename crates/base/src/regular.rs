//! Files that a user names, or that stand under a fixed name, and must be regular ones: opening a pipe would wait for whoever is
//! at its other end, perhaps for ever, and a device may have no end.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Opens a regular file to read.
pub fn open_regular(path: &Path) -> io::Result<File> {
    checked(OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?)
}

/// Makes a regular file, or empties the one that is there.
pub fn create_regular(path: &Path) -> io::Result<File> {
    let options = |options: &mut OpenOptions| options.write(true).custom_flags(libc::O_NONBLOCK).open(path);
    // What is emptied must be known to be a file first.
    match options(&mut OpenOptions::new()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            checked(options(OpenOptions::new().create(true).truncate(false))?)
        }
        // A pipe that nobody reads.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Err(refused("it is not a regular file, but a pipe")),
        opened => {
            let file = checked(opened?)?;
            file.set_len(0)?;
            Ok(file)
        }
    }
}

/// What a regular file holds, which is an error if it is more than so many bytes.
pub fn read_regular(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    read_limited(open_regular(path)?, bytes_max)
}

/// What is left to read, which is an error if it is more than so many bytes.
pub fn read_limited(from: impl Read, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > bytes_max {
        true => Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {bytes_max} bytes"))),
        false => Ok(bytes),
    }
}

/// Whether a path stands for a stream that this process has open already, such as what a shell makes of `<(command)`, or
/// `/dev/stdin` behind a pipe: it can be read once, and somebody is there to write it. A regular file that is open can be opened
/// again.
pub fn is_open_stream(path: &Path) -> bool {
    let is_open = path == Path::new("/dev/stdin") || path.starts_with("/dev/fd") || path.starts_with("/proc/self/fd");
    is_open && std::fs::metadata(path).is_ok_and(|meta| !meta.is_file())
}

fn refused(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

fn checked(file: File) -> io::Result<File> {
    match what_else(file.metadata()?.file_type()) {
        None => Ok(file),
        // The error that a read would give.
        Some("a directory") => Err(io::Error::from_raw_os_error(libc::EISDIR)),
        Some(what) => Err(refused(&format!("it is not a regular file, but {what}"))),
    }
}

fn what_else(kind: FileType) -> Option<&'static str> {
    Some(match kind {
        kind if kind.is_file() => return None,
        kind if kind.is_dir() => "a directory",
        kind if kind.is_fifo() => "a pipe",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::AsRawFd;

    #[test]
    fn only_regular_files_are_opened_and_nothing_is_waited_for() {
        let directory = std::env::temp_dir().join(format!("kolo-regular-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let (file, pipe) = (directory.join("file"), directory.join("pipe"));
        fs::write(&file, "hello").unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let why = |outcome: io::Result<File>| outcome.unwrap_err().to_string();
        assert_eq!(why(open_regular(&pipe)), "it is not a regular file, but a pipe");
        assert_eq!(why(create_regular(&pipe)), "it is not a regular file, but a pipe");
        // One that somebody reads is no file either.
        let reader = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&pipe).unwrap();
        assert_eq!(why(create_regular(&pipe)), "it is not a regular file, but a pipe");
        drop(reader);
        assert_eq!(why(open_regular(Path::new("/dev/zero"))), "it is not a regular file, but a device");
        assert!(open_regular(&directory).is_err() && create_regular(&directory).is_err());
        assert_eq!(read_regular(&file, 5).unwrap(), b"hello");
        assert_eq!(read_regular(&file, 4).unwrap_err().to_string(), "it has more than 4 bytes");
        assert_eq!(create_regular(&file).unwrap().metadata().unwrap().len(), 0);
        assert!(create_regular(&directory.join("new")).unwrap().metadata().unwrap().is_file());
        let ((reader, _writer), open) = (io::pipe().unwrap(), File::open(&file).unwrap());
        let by_number = |number: i32| is_open_stream(Path::new(&format!("/dev/fd/{number}")));
        assert!(
            by_number(reader.as_raw_fd()) && !by_number(open.as_raw_fd()) && !is_open_stream(Path::new("/dev/zero"))
        );
        fs::remove_dir_all(&directory).unwrap();
    }
}
