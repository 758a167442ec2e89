//! The schedules of the literature, each a function of ranks, micro-batches and chunks.
//!
//! A family is one file and one line in [`FAMILIES`]. Within a direction all of them take the micro-batches of a stage in
//! ascending order, forward and backward: so messages keep their order, and the sum over grains needs few partial sums.

mod bidirectional;
mod gpipe;
mod interleaved;
mod one_forward_one_backward;
mod zero_bubble;

use super::error::ScheduleError;
use super::schedule::{Action, PipelineSchedule, StagePlacement, check_counts};

/// What a family is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Ranks along the axis `pipeline`.
    pub ranks: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Stages per rank and direction.
    pub chunks: usize,
}

impl Sizes {
    /// The stages of the model.
    pub fn stages(self) -> usize {
        self.ranks.saturating_mul(self.chunks)
    }

    /// A schedule with stages placed in turn.
    fn schedule(self, actions: Vec<Vec<Action>>) -> PipelineSchedule {
        let placement = StagePlacement::round_robin(self.ranks, self.stages(), self.micro_batches);
        PipelineSchedule {
            ranks: self.ranks,
            stages: self.stages(),
            micro_batches: self.micro_batches,
            placement,
            actions,
        }
    }
}

/// A kind of schedule.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// Its name in job files.
    pub name: &'static str,
    /// What it is, in one line.
    pub about: &'static str,
    build: fn(Sizes) -> Result<PipelineSchedule, ScheduleError>,
    /// Whether a rank may have several chunks.
    pub has_chunks: bool,
}

impl Family {
    /// The schedule for these sizes. An error says which sizes would be possible.
    pub fn schedule(&self, sizes: Sizes) -> Result<PipelineSchedule, ScheduleError> {
        if sizes.chunks == 0 {
            return Err(ScheduleError::size("a rank needs chunks of the model".into(), "chunks are 1 or more".into()));
        }
        check_counts(sizes.ranks, sizes.stages(), sizes.micro_batches)?;
        if sizes.chunks > 1 && !self.has_chunks {
            let message = format!("`{}` has one chunk per rank, not {}", self.name, sizes.chunks);
            return Err(ScheduleError::size(message, "set chunks to 1, or take `interleaved`".into()));
        }
        (self.build)(sizes)
    }
}

/// All families, the simplest first.
pub const FAMILIES: [Family; 5] = [
    Family {
        name: "gpipe",
        about: "all forward passes, then all backward passes",
        build: gpipe::build,
        has_chunks: false,
    },
    Family {
        name: "1f1b",
        about: "one forward, one backward: few activations are kept",
        build: one_forward_one_backward::build,
        has_chunks: false,
    },
    Family {
        name: "interleaved",
        about: "several chunks of the model per rank: less waiting, more messages",
        build: interleaved::build,
        has_chunks: true,
    },
    Family {
        name: "zero-bubble",
        about: "gradients of weights fill the time in which 1f1b waits",
        build: zero_bubble::build,
        has_chunks: false,
    },
    Family {
        name: "bidirectional",
        about: "two replicas of the model run through the ranks in opposite directions",
        build: bidirectional::build,
        has_chunks: false,
    },
];

/// The family of a job that names none: it goes with every number of ranks and micro-batches.
pub const USUAL: Family = FAMILIES[1];

/// The family with this name.
pub fn family(name: &str) -> Result<&'static Family, ScheduleError> {
    FAMILIES.iter().find(|family| family.name == name).ok_or_else(|| {
        let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
        let shown: String = name.chars().take(40).collect();
        ScheduleError::size(format!("unknown schedule {shown:?}"), format!("schedules are {}", names.join(", ")))
    })
}

/// The nearest multiples of `unit` around `count`, as words.
fn nearest_multiples(count: usize, unit: usize) -> String {
    match count / unit * unit {
        0 => unit.to_string(),
        below => format!("{below} or {}", below + unit),
    }
}
