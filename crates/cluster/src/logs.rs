//! What workers print: a file per rank, the first rank's on the terminal too, and the end of a file for messages.

use crate::line;
use kolo_comm::Fault;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Lines and bytes of a log that a message shows.
const TAIL_LINES: usize = 20;
const TAIL_BYTES: u64 = 8 << 10;
const COPY_BYTES: usize = 16 << 10;
/// How long an unfinished line is held back.
const LINE_PAUSE: Duration = Duration::from_millis(50);
/// Output that may wait to be written.
const WAITING_BYTES_MAX: usize = 64 << 20;

/// Which stream of a process some bytes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Out,
    Err,
}

/// Gets what the first rank prints.
pub type Echo = Arc<dyn Fn(Source, &[u8]) + Send + Sync>;

/// An [`Echo`] to this process's own streams.
pub fn terminal() -> Echo {
    Arc::new(|source, bytes| {
        // A terminal that went away is no reason to end the job.
        let _ = match source {
            Source::Out => std::io::stdout().write_all(bytes).and_then(|()| std::io::stdout().flush()),
            Source::Err => std::io::stderr().write_all(bytes),
        };
    })
}

pub fn log_path(out: &Path, rank: usize) -> PathBuf {
    out.join(format!("rank-{rank}.log"))
}

/// A fresh log, written at its end by whoever holds it.
pub fn create(out: &Path, rank: usize) -> Result<File, Fault> {
    let path = log_path(out, rank);
    let refused = |error: std::io::Error| Fault::system(format!("writing {}", path.display()), &error);
    std::fs::create_dir_all(out).map_err(refused)?;
    File::create(&path).map_err(refused)?;
    OpenOptions::new().append(true).open(&path).map_err(refused)
}

/// Copies a stream into a log and to `echo` until it ends.
pub(crate) fn tee(
    from: impl Read + AsRawFd + Send + 'static,
    mut log: File,
    source: Source,
    echo: Echo,
) -> Option<JoinHandle<()>> {
    let copy = move || {
        copy_lines(from, |lines| {
            let _ = log.write_all(lines);
            echo(source, lines);
            true
        });
    };
    std::thread::Builder::new().name("echo".into()).spawn(copy).ok()
}

/// Passes on what comes as whole lines, so that two streams of a process do not mix within one. What is long, or not
/// continued for a moment, is passed on as it is. Ends with the stream, or when `sink` wants no more.
pub(crate) fn copy_lines(mut from: impl Read + AsRawFd, mut sink: impl FnMut(&[u8]) -> bool) {
    let mut held = Vec::with_capacity(2 * COPY_BYTES);
    let mut buffer = [0; COPY_BYTES];
    loop {
        let quiet = !held.is_empty() && !line::readable(from.as_raw_fd(), LINE_PAUSE);
        let count = if quiet { 0 } else { from.read(&mut buffer).unwrap_or(0) };
        let over = count == 0 && !quiet;
        held.extend_from_slice(&buffer[..count]);
        let last = held.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let end = if quiet || over || held.len() > COPY_BYTES { held.len() } else { last };
        if (end > 0 && !sink(&held[..end])) || over {
            return;
        }
        held.drain(..end);
    }
}

/// A thread that writes what other hosts' workers print, so that a slow disk or terminal does not hold up the watch.
#[derive(Debug)]
pub(crate) struct Scribe {
    sender: Option<Sender<(usize, Source, Vec<u8>)>>,
    waiting: Arc<AtomicUsize>,
    thread: JoinHandle<()>,
}

impl Scribe {
    pub fn start(mut logs: Vec<File>, echo: Option<Echo>) -> Result<Self, Fault> {
        let (sender, receiver) = channel::<(usize, Source, Vec<u8>)>();
        let waiting = Arc::new(AtomicUsize::new(0));
        let theirs = Arc::clone(&waiting);
        let write = move || {
            for (rank, source, bytes) in receiver {
                let _ = logs[rank].write_all(&bytes);
                if let Some(echo) = echo.as_ref().filter(|_| rank == 0) {
                    echo(source, &bytes);
                }
                theirs.fetch_sub(bytes.len(), Ordering::Relaxed);
            }
        };
        let thread = std::thread::Builder::new().name("logs".into()).spawn(write);
        let thread = thread.map_err(|error| Fault::system("starting a thread for logs", &error))?;
        Ok(Self { sender: Some(sender), waiting, thread })
    }

    /// What cannot be written for long is lost.
    pub fn write(&self, rank: usize, source: Source, bytes: Vec<u8>) {
        if self.waiting.load(Ordering::Relaxed) > WAITING_BYTES_MAX {
            return;
        }
        self.waiting.fetch_add(bytes.len(), Ordering::Relaxed);
        if let Some(sender) = &self.sender {
            let _ = sender.send((rank, source, bytes));
        }
    }

    /// Waits until all is written, or the deadline has come.
    pub fn finish(&mut self, deadline: Instant) {
        self.sender = None;
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Waits until the copies are complete. A stream that something else still holds open is left after this time.
pub fn join(copies: Vec<JoinHandle<()>>, at_most: Duration) {
    let deadline = Instant::now() + at_most;
    while copies.iter().any(|copy| !copy.is_finished()) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The last lines of a log; empty if there are none.
pub fn tail(path: &Path) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let start = file.metadata()?.len().saturating_sub(TAIL_BYTES);
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn lines_stay_whole_and_nothing_is_held_for_long() {
        let (mut from, to) = UnixStream::pair().unwrap();
        let (sender, pieces) = channel();
        let copy = std::thread::spawn(move || copy_lines(to, |piece| sender.send(piece.to_vec()).is_ok()));
        for part in ["one ", "line\nand ", "another\n"] {
            from.write_all(part.as_bytes()).unwrap();
        }
        let mut text = Vec::new();
        while text.len() < 21 {
            let piece = pieces.recv_timeout(Duration::from_secs(5)).unwrap();
            assert!(piece.ends_with(b"\n"), "{piece:?}");
            text.extend(piece);
        }
        assert_eq!(text, b"one line\nand another\n");
        from.write_all(b"a question? ").unwrap();
        assert_eq!(pieces.recv_timeout(Duration::from_secs(5)).unwrap(), b"a question? ");
        from.write_all(b"the end").unwrap();
        drop(from);
        assert_eq!(pieces.recv_timeout(Duration::from_secs(5)).unwrap(), b"the end");
        copy.join().unwrap();
    }
}
