//! Where the time of making samples goes.

use crate::error::ReadError;
use kolo_base::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Messages about samples that were left out, kept for the report.
pub const MESSAGES_MAX: usize = 5;

/// What loading samples took so far, over all threads of this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadTimes {
    /// Samples that were made.
    pub samples: u64,
    pub read_ns: u64,
    /// From a record to a sample: images decoded, columns joined.
    pub decode_ns: u64,
    pub transform_ns: u64,
    /// Samples that came out of the cache.
    pub cached: u64,
    /// Samples that could not be read, and for which another one stood in, or none.
    pub skipped: u64,
    /// What was wrong with the first of them, with the sample's number.
    pub skip_messages: Vec<(usize, String)>,
}

impl LoadTimes {
    /// What came after `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            samples: self.samples - before.samples,
            read_ns: self.read_ns - before.read_ns,
            decode_ns: self.decode_ns - before.decode_ns,
            transform_ns: self.transform_ns - before.transform_ns,
            cached: self.cached - before.cached,
            skipped: self.skipped - before.skipped,
            skip_messages: self.skip_messages.clone(),
        }
    }

    /// The stage that took longest, if any took time.
    pub fn slowest(&self) -> Option<&'static str> {
        let stages = [("read", self.read_ns), ("decode", self.decode_ns), ("transform", self.transform_ns)];
        stages.into_iter().filter(|(_, ns)| *ns > 0).max_by_key(|(_, ns)| *ns).map(|(name, _)| name)
    }
}

/// Counters that loader threads add to.
#[derive(Debug, Default)]
pub(crate) struct LoadMeter {
    samples: AtomicU64,
    read_ns: AtomicU64,
    decode_ns: AtomicU64,
    transform_ns: AtomicU64,
    cached: AtomicU64,
    skipped: AtomicU64,
    messages: Mutex<BTreeMap<usize, String>>,
    /// Samples that could not be read.
    unreadable: Mutex<BTreeSet<usize>>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Stage {
    Read,
    Decode,
    Transform,
}

impl LoadMeter {
    /// Adds the time since `start` to a stage; now.
    pub fn add(&self, stage: Stage, start: Instant) -> Instant {
        let now = Instant::now();
        let counter = match stage {
            Stage::Read => &self.read_ns,
            Stage::Decode => &self.decode_ns,
            Stage::Transform => &self.transform_ns,
        };
        counter.fetch_add(now.duration_since(start).as_nanos() as u64, Ordering::Relaxed);
        now
    }

    /// A sample that was asked for was made, perhaps of what the cache holds. Others that went into it do not count.
    pub fn made(&self, is_hit: bool) {
        self.samples.fetch_add(1, Ordering::Relaxed);
        self.cached.fetch_add(u64::from(is_hit), Ordering::Relaxed);
    }

    pub fn skip(&self, sample: usize, error: &ReadError) {
        self.skipped.fetch_add(1, Ordering::Relaxed);
        lock(&self.unreadable).insert(sample);
        let mut messages = lock(&self.messages);
        let message = error.what();
        // The first in the order of samples, whichever thread met them first.
        if messages.values().any(|known| *known == message) {
            return;
        }
        messages.insert(sample, message);
        if messages.len() > MESSAGES_MAX {
            messages.pop_last();
        }
    }

    /// Whether this sample was skipped.
    pub fn is_unreadable(&self, sample: usize) -> bool {
        lock(&self.unreadable).contains(&sample)
    }

    pub fn times(&self) -> LoadTimes {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LoadTimes {
            samples: of(&self.samples),
            read_ns: of(&self.read_ns),
            decode_ns: of(&self.decode_ns),
            transform_ns: of(&self.transform_ns),
            cached: of(&self.cached),
            skipped: of(&self.skipped),
            skip_messages: lock(&self.messages).clone().into_iter().collect(),
        }
    }
}
