//! How far a command has read its files: a bar on a terminal, a line now and then elsewhere, nothing when quiet.

use crate::output::println;
use crate::progress::{self, BYTES};
use indicatif::ProgressBar;
use kolo_base::lock;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Lines come at least so far apart.
const LINE_PAUSE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct ByteProgress {
    bar: Option<ProgressBar>,
    quiet: bool,
    message: &'static str,
    done: AtomicU64,
    total: u64,
    last_line: Mutex<Instant>,
}

impl ByteProgress {
    /// Packed files hold more than `total`, the size of the files: the bar then grows with what was read.
    pub fn new(total: u64, message: &'static str, quiet: bool) -> Self {
        let bar = (!quiet).then(|| progress::bar(total, BYTES)).flatten().map(|bar| bar.with_message(message));
        Self { bar, quiet, message, done: AtomicU64::new(0), total, last_line: Mutex::new(Instant::now()) }
    }

    pub fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if let Some(bar) = &self.bar {
            bar.set_length(self.total.max(done));
            return bar.set_position(done);
        }
        let mut last = lock(&self.last_line);
        if !self.quiet && last.elapsed() >= LINE_PAUSE {
            *last = Instant::now();
            println!("{} {:.1} of {:.1} MB", self.message, done as f64 / 1e6, self.total.max(done) as f64 / 1e6);
        }
    }

    /// Bytes so far.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
