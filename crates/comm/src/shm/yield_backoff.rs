//! Whether yielding the processor is better than sleeping.
//!
//! Among ranks that wait for each other a yield takes a microsecond, and sleeping some fifty. But a thread that computes
//! does not give the processor back before its time is up, some milliseconds later, while a sleeper that is woken comes
//! before it. Which of the two it is shows in how long a yield takes.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// A yield that takes longer met somebody who computes.
const SLOW: Duration = Duration::from_micros(300);
/// How long no yield is tried after a slow one; doubled each time it is slow again.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct YieldBackoff {
    resumes: Cell<Option<Instant>>,
    pause: Cell<Duration>,
}

impl Default for YieldBackoff {
    fn default() -> Self {
        Self { resumes: Cell::new(None), pause: Cell::new(PAUSE_MIN) }
    }
}

impl YieldBackoff {
    /// Yields, if that is quick these days; whether it was.
    pub fn yield_now(&self) -> bool {
        let begin = Instant::now();
        if self.resumes.get().is_some_and(|resumes| begin < resumes) {
            return false;
        }
        std::thread::yield_now();
        let end = Instant::now();
        if end.duration_since(begin) < SLOW {
            if self.resumes.take().is_some() {
                self.pause.set(PAUSE_MIN);
            }
            return true;
        }
        self.resumes.set(Some(end + self.pause.get()));
        self.pause.set((2 * self.pause.get()).min(PAUSE_MAX));
        false
    }
}
