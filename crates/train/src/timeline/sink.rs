//! The file that events go to. Whenever the run ends, however it ends, the file is whole: every write ends with the document's
//! end, and the next one begins where that began.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const HEAD: &[u8] = b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
const TAIL: &[u8] = b"\n]}\n";
/// What stands between two events.
const COMMA: &[u8] = b",\n";

/// Bytes that are read, sent and written at once when ranks' parts are joined.
pub(super) const CHUNK_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Sink {
    file: File,
    path: PathBuf,
    /// Bytes before the tail.
    end: u64,
    tail: &'static [u8],
    is_empty: bool,
}

impl Sink {
    /// The document itself.
    pub(super) fn document(path: &Path) -> io::Result<Self> {
        let file = File::create(path)?;
        let mut sink = Self { file, path: path.into(), end: 0, tail: TAIL, is_empty: true };
        sink.write(HEAD)?;
        Ok(sink)
    }

    /// A rank's events until they travel to the document. The file has no name, so that it is gone with the process; it lies
    /// beside the document if it can, and otherwise where temporary files do.
    pub(super) fn part(document: &Path, rank: usize) -> io::Result<Self> {
        let beside = document.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let name = format!(".kolo-trace-{}-{rank}", std::process::id());
        let open = |dir: &Path| {
            let path = dir.join(&name);
            let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
            std::fs::remove_file(&path)?;
            Ok(Self { file, path, end: 0, tail: b"", is_empty: true })
        };
        open(beside).or_else(|_: io::Error| open(&std::env::temp_dir()))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn bytes(&self) -> u64 {
        self.end
    }

    /// Appends events, each with what stands before it.
    pub(super) fn append(&mut self, events: &[u8]) -> io::Result<()> {
        if events.is_empty() {
            return Ok(());
        }
        let first = self.is_empty && !self.tail.is_empty();
        self.write(if first { &events[COMMA.len()..] } else { events })?;
        self.is_empty = false;
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let whole = [bytes, self.tail].concat();
        if let Err(error) = self.file.write_all_at(&whole, self.end) {
            // What was there before fitted.
            let _ = self.file.set_len(self.end);
            let _ = self.file.write_all_at(self.tail, self.end);
            return Err(error);
        }
        self.end += bytes.len() as u64;
        Ok(())
    }

    /// Reads the next part of what was written.
    pub(super) fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }
}

/// Writes one event into `text`, with what stands before it.
pub(super) fn push_event(text: &mut Vec<u8>, event: &serde_json::Value) {
    text.extend_from_slice(COMMA);
    text.extend_from_slice(event.to_string().as_bytes());
}
