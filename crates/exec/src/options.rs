//! How a graph is to be run.

/// Threads, lanes and grains of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    pub threads: usize,
    /// Grains computed at the same time; a power of two that divides `grains`.
    pub lanes: usize,
    pub grains: usize,
    /// Grains of the only lane that are on their way at the same time, each with activations of its own: several if grains run
    /// in segments ([`Order`](crate::Order)).
    pub slots: usize,
    /// Ways that grains go, each of which has sums of its own: a half of the grains if there are two.
    pub ways: usize,
}

impl Options {
    /// One grain on this many threads.
    pub fn single(threads: usize) -> Self {
        Self { threads, lanes: 1, grains: 1, slots: 1, ways: 1 }
    }

    /// As many lanes as there are threads, so that grains need not share loops.
    pub fn for_grains(grains: usize, threads: usize) -> Self {
        let lanes = grains.min(if threads.is_power_of_two() { threads } else { threads.next_power_of_two() / 2 });
        Self { threads, lanes: lanes.max(1), grains, slots: 1, ways: 1 }
    }

    /// Grains that each lane runs, one after the other.
    pub fn grains_per_lane(&self) -> usize {
        self.grains / self.lanes
    }

    /// Terms of each of a lane's sums.
    pub fn terms_of_sums(&self) -> usize {
        self.grains_per_lane() / self.ways
    }

    /// One lane with so many grains on their way, each in one of so many ways.
    pub fn with_slots(self, slots: usize, ways: usize) -> Self {
        Self { lanes: 1, slots, ways, ..self }
    }

    /// Sets of activations.
    pub fn places(&self) -> usize {
        self.lanes.max(self.slots)
    }

    /// Threads of each lane.
    pub fn lane_threads(&self) -> usize {
        (self.threads / self.lanes).max(1)
    }
}
