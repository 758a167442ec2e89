//! How a graph is to be run.

/// Threads, lanes and grains of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    pub threads: usize,
    /// Grains computed at the same time; a power of two that divides `grains`.
    pub lanes: usize,
    pub grains: usize,
}

impl Options {
    /// One grain on this many threads.
    pub fn single(threads: usize) -> Self {
        Self { threads, lanes: 1, grains: 1 }
    }

    /// As many lanes as there are threads, so that grains need not share loops.
    pub fn for_grains(grains: usize, threads: usize) -> Self {
        let lanes = grains.min(if threads.is_power_of_two() { threads } else { threads.next_power_of_two() / 2 });
        Self { threads, lanes: lanes.max(1), grains }
    }

    /// Grains that each lane runs, one after the other.
    pub fn grains_per_lane(&self) -> usize {
        self.grains / self.lanes
    }

    /// Threads of each lane.
    pub fn lane_threads(&self) -> usize {
        (self.threads / self.lanes).max(1)
    }
}
