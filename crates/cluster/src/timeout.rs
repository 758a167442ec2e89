//! How long somebody was not heard, not counting the time in which nobody listened.
//!
//! A process that was suspended finds an old clock when it wakes, and heartbeats that wait to be read: its own suspension is
//! no sign of anybody's death.

use std::time::{Duration, Instant};

#[derive(Debug)]
pub(crate) struct HeartbeatTimeout {
    heard: Instant,
    looked: Instant,
    limit: Duration,
}

impl HeartbeatTimeout {
    pub fn new(now: Instant, limit_ms: u64) -> Self {
        Self { heard: now, looked: now, limit: Duration::from_millis(limit_ms) }
    }

    pub fn reset(&mut self, now: Instant) {
        self.heard = now;
    }

    /// Whether it has lasted longer than the limit. To be asked often: after a gap of half the limit, the time starts anew.
    pub fn expired(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.looked) > self.limit / 2 {
            self.heard = now;
        }
        self.looked = now;
        now.saturating_duration_since(self.heard) > self.limit
    }
}

/// Whether this process itself was suspended, as turns of a loop that come far too late show.
#[derive(Debug)]
pub(crate) struct SuspensionDetector {
    turned: Instant,
    limit: Duration,
    longest: Option<Duration>,
    total: Duration,
}

impl SuspensionDetector {
    /// A tick of the loop takes less than this.
    pub fn new(now: Instant, limit_ms: u64) -> Self {
        Self { turned: now, limit: Duration::from_millis(limit_ms), longest: None, total: Duration::ZERO }
    }

    pub fn tick(&mut self, now: Instant) {
        let gap = now.saturating_duration_since(self.turned);
        self.turned = now;
        if gap > self.limit {
            self.longest = self.longest.max(Some(gap));
            self.total += gap;
        }
    }

    pub fn longest(&self) -> Option<Duration> {
        self.longest
    }

    pub fn total(&self) -> Duration {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_counts_only_while_somebody_listens() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut timeout = HeartbeatTimeout::new(start, 2000);
        let mut first = |from: u64| (from..20_000).step_by(250).find(|ms| timeout.expired(at(*ms)));
        assert_eq!(first(250), Some(2250), "nobody speaks");
        // Asleep for a while: from then on, the whole time is given again.
        assert_eq!(first(4000), Some(6250));
        // A tick that came late is no sleep.
        timeout.reset(at(6250));
        let asked = [7200, 8200].map(|ms| timeout.expired(at(ms)));
        assert_eq!((asked, timeout.expired(at(8300))), ([false; 2], true));
    }
}
