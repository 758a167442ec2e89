//! What workers print: a file per rank, the first rank's on the terminal too, and the end of a file for messages.
//!
//! Without a directory of the user's, a log has no name while the job runs, so that nothing is left however this process
//! ends. Logs may hold anything that a program prints: nobody but the user reads them.

use crate::coordinator::Notice;
use crate::poll;
use crate::printable;
use kolo_base::ShownPath;
use kolo_base::lock;
use kolo_comm::Fault;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Lines and bytes of a log that a message shows.
const TAIL_LINES: usize = 20;
const TAIL_BYTES: u64 = 8 << 10;
const COPY_BYTES: usize = 16 << 10;
/// For the user alone.
const LOG_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;
/// How long an unfinished line is held back.
const LINE_PAUSE: Duration = Duration::from_millis(50);
/// Output that may wait to be written.
const WAITING_BYTES_MAX: usize = 64 << 20;

/// Which stream of a process some bytes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputStream {
    Out,
    Err,
}

/// Gets what the first rank prints. If it cannot be written, the job goes on and fails at its end.
pub type Echo = Arc<dyn Fn(OutputStream, &[u8]) -> std::io::Result<()> + Send + Sync>;

/// An [`Echo`] to this process's own streams.
pub fn terminal() -> Echo {
    Arc::new(|source, bytes| match source {
        OutputStream::Out => std::io::stdout().write_all(bytes).and_then(|()| std::io::stdout().flush()),
        // Complaints that nobody hears are no reason to fail.
        OutputStream::Err => std::io::stderr().write_all(bytes).or(Ok(())),
    })
}

/// A line on standard error, if anybody hears it.
pub fn print_error(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", printable(text));
}

/// The first write that failed, for the end of the job.
#[derive(Clone, Debug, Default)]
pub struct WriteErrors(Arc<Mutex<Option<String>>>);

impl WriteErrors {
    fn note(&self, what: &str, outcome: std::io::Result<()>) {
        if let Err(error) = outcome {
            let mut first = lock(&self.0);
            first.get_or_insert_with(|| format!("{what}: {error}\n  hint: free some space there, or write elsewhere"));
        }
    }

    fn note_echo(&self, source: OutputStream, outcome: std::io::Result<()>) {
        self.note(if source == OutputStream::Out { "standard output" } else { "standard error" }, outcome);
    }

    pub fn take(&self) -> Option<String> {
        lock(&self.0).take()
    }
}

pub fn log_path(out: &Path, rank: usize) -> PathBuf {
    out.join(format!("rank-{rank}.log"))
}

/// The log of a rank, written at its end by whoever holds it.
#[derive(Debug)]
pub(crate) struct RankLog {
    file: File,
    /// For messages.
    name: String,
}

impl RankLog {
    fn named(path: &Path) -> std::io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).read(true).mode(LOG_MODE).open(path)?;
        // One that was there already; but a device is left as it is.
        if file.metadata()?.is_file() {
            file.set_permissions(Permissions::from_mode(LOG_MODE))?;
            file.set_len(0)?;
        }
        Ok(Self { file, name: path.shown().to_string() })
    }

    fn unnamed(rank: usize) -> std::io::Result<Self> {
        let name = format!("the log of rank {rank} in {}", std::env::temp_dir().shown());
        Ok(Self { file: tempfile::tempfile()?, name })
    }

    pub fn share(&self) -> Result<Self, Fault> {
        let file = self.file.try_clone().map_err(|error| Fault::system("sharing a log", &error))?;
        Ok(Self { file, name: self.name.clone() })
    }

    pub fn into_file(self) -> File {
        self.file
    }

    fn write(&mut self, bytes: &[u8], unwritten: &WriteErrors) {
        unwritten.note(&self.name, self.file.write_all(bytes));
    }
}

/// The logs of all ranks.
#[derive(Debug)]
pub(crate) struct Logs {
    out: Option<PathBuf>,
    logs: Vec<RankLog>,
}

impl Logs {
    /// In this directory, or without a name.
    pub fn create(out: Option<&PathBuf>, world: usize) -> Result<Self, Fault> {
        let refused = |what: String| move |error: std::io::Error| Fault::system(format!("writing {what}"), &error);
        if let Some(out) = out {
            std::fs::create_dir_all(out).map_err(refused(out.shown().to_string()))?;
        }
        let create = |rank: usize| match out {
            Some(out) => RankLog::named(&log_path(out, rank)).map_err(refused(log_path(out, rank).shown().to_string())),
            None => RankLog::unnamed(rank).map_err(refused(format!("a log in {}", std::env::temp_dir().shown()))),
        };
        Ok(Self { out: out.cloned(), logs: (0..world).map(create).collect::<Result<_, _>>()? })
    }

    pub fn of(&self, rank: usize) -> Result<RankLog, Fault> {
        self.logs[rank].share()
    }

    /// Keeps the logs of a failed job if there is something to read in them; what the first rank printed was seen if there is
    /// an echo. Where they are.
    pub fn close(mut self, failed: bool, echoed: bool) -> Option<PathBuf> {
        if self.out.is_some() || !failed {
            return self.out;
        }
        let holds = |log: &RankLog| log.file.metadata().is_ok_and(|data| data.len() > 0);
        if !self.logs.iter().skip(usize::from(echoed)).any(holds) {
            return None;
        }
        let mode = Permissions::from_mode(DIRECTORY_MODE);
        let directory = tempfile::Builder::new().prefix("kolo-").permissions(mode).tempdir().ok()?.keep();
        for (rank, log) in self.logs.iter_mut().enumerate().filter(|(_, log)| holds(log)) {
            let mut copy = || -> std::io::Result<()> {
                let mut named = RankLog::named(&log_path(&directory, rank))?;
                log.file.seek(SeekFrom::Start(0))?;
                std::io::copy(&mut log.file, &mut named.file).map(drop)
            };
            if let Err(error) = copy() {
                print_error(&format!("the log of rank {rank} is not complete: {error}"));
            }
        }
        Some(directory)
    }
}

/// Copies a stream into a log and to `echo` until it ends.
pub(crate) fn tee(
    from: impl Read + AsRawFd + Send + 'static,
    mut log: RankLog,
    source: OutputStream,
    echo: Echo,
    unwritten: WriteErrors,
) -> Result<JoinHandle<()>, Fault> {
    let copy = move || {
        copy_lines(from, |lines| {
            log.write(lines, &unwritten);
            unwritten.note_echo(source, echo(source, lines));
            true
        });
    };
    let started = std::thread::Builder::new().name("echo".into()).spawn(copy);
    started.map_err(|error| Fault::thread("starting a thread for output", &error))
}

/// Passes on what comes as whole lines, so that two streams of a process do not mix within one. What is long, or not
/// continued for a moment, is passed on as it is. Ends with the stream, or when `sink` wants no more.
pub(crate) fn copy_lines(mut from: impl Read + AsRawFd, mut sink: impl FnMut(&[u8]) -> bool) {
    let mut held = Vec::with_capacity(2 * COPY_BYTES);
    let mut buffer = [0; COPY_BYTES];
    loop {
        let quiet = !held.is_empty() && !poll::readable(from.as_raw_fd(), LINE_PAUSE);
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

/// Whose output is shown, and not only logged: that of rank 0. Of an elastic job's workers each may become it, and only rank 0
/// prints results, so all results are shown, and its complaints alone.
#[derive(Clone, Debug)]
pub(crate) struct Speakers {
    elastic: bool,
    first: Arc<AtomicUsize>,
}

impl Speakers {
    pub fn new(elastic: bool) -> Self {
        Self { elastic, first: Arc::default() }
    }

    pub fn hear(&self, notice: &Notice) {
        if let Notice::Resumed(resumed) = notice {
            self.first.store(resumed.first, Ordering::Relaxed);
        }
    }

    pub fn heard(&self, worker: usize, source: OutputStream) -> bool {
        (self.elastic && source == OutputStream::Out) || self.first.load(Ordering::Relaxed) == worker
    }
}

/// A thread that writes what other hosts' workers print, so that a slow disk or terminal does not hold up the watch.
#[derive(Debug)]
pub(crate) struct LogWriter {
    sender: Option<Sender<(usize, OutputStream, Vec<u8>)>>,
    waiting: Arc<AtomicUsize>,
    thread: JoinHandle<()>,
}

impl LogWriter {
    pub fn start(
        mut logs: Vec<RankLog>,
        echo: Option<Echo>,
        unwritten: WriteErrors,
        speakers: Speakers,
    ) -> Result<Self, Fault> {
        let (sender, receiver) = channel::<(usize, OutputStream, Vec<u8>)>();
        let waiting = Arc::new(AtomicUsize::new(0));
        let theirs = Arc::clone(&waiting);
        let write = move || {
            for (rank, source, bytes) in receiver {
                logs[rank].write(&bytes, &unwritten);
                if let Some(echo) = echo.as_ref().filter(|_| speakers.heard(rank, source)) {
                    unwritten.note_echo(source, echo(source, &bytes));
                }
                theirs.fetch_sub(bytes.len(), Ordering::Relaxed);
            }
        };
        let thread = std::thread::Builder::new().name("logs".into()).spawn(write);
        let thread = thread.map_err(|error| Fault::thread("starting a thread for logs", &error))?;
        Ok(Self { sender: Some(sender), waiting, thread })
    }

    /// What cannot be written for long is lost.
    pub fn write(&self, rank: usize, source: OutputStream, bytes: Vec<u8>) {
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
            let piece = pieces.recv_timeout(Duration::from_secs(60)).unwrap();
            assert!(piece.ends_with(b"\n"), "{piece:?}");
            text.extend(piece);
        }
        assert_eq!(text, b"one line\nand another\n");
        from.write_all(b"a question? ").unwrap();
        assert_eq!(pieces.recv_timeout(Duration::from_secs(60)).unwrap(), b"a question? ");
        from.write_all(b"the end").unwrap();
        drop(from);
        assert_eq!(pieces.recv_timeout(Duration::from_secs(60)).unwrap(), b"the end");
        copy.join().unwrap();
    }
}
