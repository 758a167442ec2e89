//! The coordinator of a job that somebody else started: a thread in rank 0, which knows of the others by their links alone.

use crate::coordinator::{Notice, Terms};
use crate::driver::{Driver, Hands, News};
use crate::hall::Hall;
use crate::line::Line;
use crate::meet::Observer;
use crate::pace::Pace;
use kolo_comm::Fault;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The coordinator's thread in rank 0.
#[derive(Debug)]
pub(crate) struct Hosting {
    thread: JoinHandle<()>,
    ending: Arc<AtomicBool>,
    pace: Pace,
    /// Where the others find this process, until all have.
    file: Option<PathBuf>,
}

/// Without processes to watch, links are all there is.
struct LinksOnly;

impl Hands for LinksOnly {
    fn news(&mut self) -> Vec<(usize, News)> {
        Vec::new()
    }

    fn signal(&mut self, _: usize, _: i32) {}

    fn kill(&mut self, _: usize) -> bool {
        false
    }

    fn interests(&self, _: &mut Vec<(RawFd, i16)>) {}
}

impl Hosting {
    pub fn start(
        terms: Terms,
        hall: Hall,
        own: Line,
        observer: Observer,
        file: Option<PathBuf>,
    ) -> Result<Self, Fault> {
        let ending = Arc::new(AtomicBool::new(false));
        let (flag, left) = (Arc::clone(&ending), file.clone());
        let serve = move || {
            let mut observe = |notice: &Notice| {
                // Who comes after a job that ended before it began still finds its way here, and is told why.
                if let (Notice::Joined { .. }, Some(file)) = (notice, &file) {
                    let _ = std::fs::remove_file(file);
                }
                observer(notice);
                if matches!(notice, Notice::Ending { .. }) {
                    flag.store(true, Ordering::Release);
                }
            };
            let mut driver = Driver::new(terms, vec![own], Some(hall), LinksOnly, &mut observe);
            while driver.turn([]).is_none() {}
        };
        let thread = std::thread::Builder::new().name("coordinator".into()).spawn(serve);
        let thread = thread.map_err(|error| Fault::thread("starting the coordinator", &error))?;
        Ok(Self { thread, ending, pace: terms.pace, file: left })
    }

    /// Waits a moment until the end of the job was told to all.
    pub fn await_ending(&self) {
        let deadline = Instant::now() + Duration::from_millis(self.pace.settle_ms() + self.pace.grace_ms());
        while !self.ending.load(Ordering::Acquire) && !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Hosting {
    /// The others hear the end of the job from this thread: it may take them a moment to leave.
    fn drop(&mut self) {
        let deadline = Instant::now() + Duration::from_millis(self.pace.orphan_ms());
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = self.file.as_ref().map(std::fs::remove_file);
    }
}
