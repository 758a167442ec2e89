//! What workers print: a file per rank, the first rank's on the terminal too, and the end of a file for messages.

use kolo_comm::Fault;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Lines and bytes of a log that a message shows.
const TAIL_LINES: usize = 20;
const TAIL_BYTES: u64 = 8 << 10;
const COPY_BYTES: usize = 16 << 10;

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
pub fn tee(mut from: impl Read + Send + 'static, mut log: File, source: Source, echo: Echo) -> Option<JoinHandle<()>> {
    let copy = move || {
        let mut buffer = [0; COPY_BYTES];
        while let Ok(count) = from.read(&mut buffer) {
            if count == 0 {
                break;
            }
            let _ = log.write_all(&buffer[..count]);
            echo(source, &buffer[..count]);
        }
    };
    std::thread::Builder::new().name("echo".into()).spawn(copy).ok()
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
