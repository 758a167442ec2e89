//! What a step is made of, as the planner, the search, the simulator and the report see it.
//!
//! A [`StepModel`] has one [`StageModel`] per stage of the pipeline and one [`RankRole`] per rank of the pipeline axis: all ranks
//! that differ in other coordinates only do the same. Durations are of one micro-batch on the described device; bytes are those
//! of one rank. It is made by [`compose`](crate::compose()) from an [`Anatomy`](crate::anatomy::Anatomy), which is counted from
//! the graph that the strategies make. Everything here is a function of its arguments: nothing is read or measured.

use crate::collective::{Algorithm, CollectiveKind};
use crate::device::Precision;
use kolo_parallel::recompute::Recompute;
use kolo_parallel::schedules::{PipelineSchedule, ScheduleError, Sizes, family};
use std::collections::BTreeMap;

/// How a job's work is laid out on devices.
#[derive(Clone, Debug, PartialEq)]
pub struct ParallelLayout {
    /// The axes of the mesh with their sizes, outermost first. Rank numbers run fastest along the last.
    pub axes: Vec<(String, usize)>,
    /// What ZeRO shards among data ranks: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too.
    pub zero: usize,
    /// Stages on each rank of the pipeline.
    pub chunks: usize,
    /// The family of the pipeline's schedule, if it has one of its own.
    pub schedule: String,
    /// Samples of a micro-batch (a grain).
    pub micro_batch: usize,
    /// Micro-batches of each data rank in a step.
    pub micro_batches: usize,
    pub recompute: Recompute,
    pub precision: Precision,
    /// How sums over data ranks are exchanged.
    pub algorithm: Algorithm,
}

impl ParallelLayout {
    /// The size of an axis; one if there is none of this name.
    pub fn size(&self, axis: &str) -> usize {
        self.axes.iter().find(|(name, _)| name == axis).map_or(1, |(_, size)| *size)
    }

    /// How far apart the numbers of neighbours along an axis are.
    pub fn stride(&self, axis: &str) -> usize {
        let inner = self.axes.iter().rev().take_while(|(name, _)| name != axis);
        inner.map(|(_, size)| size).product()
    }

    pub fn workers(&self) -> usize {
        self.axes.iter().map(|(_, size)| size).product()
    }

    /// Whether ranks share layers, so that there are exchanges inside them.
    pub fn shares_layers(&self) -> bool {
        use kolo_parallel::axes::{DATA, PIPELINE};
        self.axes.iter().any(|(name, size)| *size > 1 && name != DATA && name != PIPELINE)
    }

    /// The order of work of the pipeline, for so many micro-batches of a step; `None` without a pipeline.
    pub fn schedule(&self, micro_batches: usize) -> Result<Option<PipelineSchedule>, ScheduleError> {
        let ranks = self.size(kolo_parallel::axes::PIPELINE);
        if ranks == 1 {
            return Ok(None);
        }
        family(&self.schedule)?.schedule(Sizes { ranks, micro_batches, chunks: self.chunks }).map(Some)
    }

    /// How many times as long as one rank the slowest of all takes, whose times spread so: the expected largest of so many
    /// normal numbers.
    pub fn straggling(&self, jitter: f64) -> f64 {
        1.0 + jitter * (2.0 * (self.workers() as f64).ln()).sqrt()
    }

    /// Samples of a step over all data ranks.
    pub fn batch(&self) -> usize {
        self.size(kolo_parallel::mesh::DATA) * self.micro_batch * self.micro_batches
    }
}

/// An exchange between the ranks of an axis.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedExchange {
    pub axis: String,
    pub kind: CollectiveKind,
    /// Bytes of the tensor, by [`CollectiveKind`].
    pub bytes: f64,
    /// How often, one behind the other.
    pub times: f64,
    /// Seconds of all times together, if nothing else used the links.
    pub seconds: f64,
    /// The part of them in which the rank has nothing else to do.
    pub exposed: f64,
}

/// Seconds of computing, by what binds them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Compute {
    /// Multiply-adds at the rate of the device.
    pub product: f64,
    /// Bytes to and from memory.
    pub stream: f64,
    /// Starting kernels, and multiprocessors that have nothing to do.
    pub overhead: f64,
    /// Floating-point operations.
    pub flops: f64,
}

impl Compute {
    pub fn seconds(&self) -> f64 {
        self.product + self.stream + self.overhead
    }

    pub fn add(&mut self, other: &Compute) {
        self.product += other.product;
        self.stream += other.stream;
        self.overhead += other.overhead;
        self.flops += other.flops;
    }

    pub fn times(&self, factor: f64) -> Compute {
        Compute {
            product: self.product * factor,
            stream: self.stream * factor,
            overhead: self.overhead * factor,
            flops: self.flops * factor,
        }
    }
}

/// A part of a stage's work on a micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pass {
    pub compute: Compute,
    pub exchanges: Vec<PlannedExchange>,
}

impl Pass {
    /// Seconds for which exchanges hold it up.
    pub fn exposed(&self) -> f64 {
        self.exchanges.iter().map(|one| one.exposed).sum()
    }

    pub fn seconds(&self) -> f64 {
        self.compute.seconds() + self.exposed()
    }
}

/// One stage of the pipeline, or the whole model of a rank where there is none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageModel {
    pub forward: Pass,
    /// The gradient of its input, with what is computed again.
    pub input: Pass,
    /// The gradient of its weights.
    pub weight: Pass,
    /// To the next stage and to the one before: bytes of a micro-batch, and seconds from rank to rank.
    pub sends: [Transfer; 2],
}

/// A message between neighbours of the pipeline.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Transfer {
    pub bytes: f64,
    pub seconds: f64,
}

/// Gradients, or weights, that travel as one.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedBucket {
    pub kind: CollectiveKind,
    /// The axis whose ranks exchange it: `data`, or `pipeline` for weights that two stages read.
    pub axis: String,
    /// Bytes of the whole tensor.
    pub bytes: f64,
    pub seconds: f64,
    /// Seconds before the end of the rank's last backward pass at which its last gradient is ready.
    pub ready_before_end: f64,
}

/// Bytes that a rank holds on its device, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeviceMemory {
    pub weights: f64,
    pub gradients: f64,
    pub optimizer: f64,
    /// Kept from forward passes for backward passes, of all micro-batches on their way.
    pub activations: f64,
    /// What one layer needs beyond that while it is computed, and weights that are gathered for it.
    pub transient: f64,
    /// The framework itself.
    pub reserved: f64,
}

impl DeviceMemory {
    pub fn total(&self) -> f64 {
        self.weights + self.gradients + self.optimizer + self.activations + self.transient + self.reserved
    }
}

/// What all ranks at one place of the pipeline do.
#[derive(Clone, Debug, PartialEq)]
pub struct RankRole {
    /// The place along the pipeline axis.
    pub place: usize,
    /// How many ranks do the same.
    pub ranks: usize,
    /// Its stages, ascending.
    pub stages: Vec<usize>,
    /// Before the first micro-batch: weights that are gathered or received once per step.
    pub before: Vec<PlannedExchange>,
    /// Gradients as they become ready in the last backward pass, in that order.
    pub buckets: Vec<PlannedBucket>,
    /// Computing the new weights of its share.
    pub update: Compute,
    /// After the update: shares of new weights that are gathered.
    pub after: Vec<PlannedExchange>,
    pub memory: DeviceMemory,
    /// Parameters that it holds, shards of weights counted whole.
    pub parameters: f64,
}

impl RankRole {
    /// Seconds for which it waits before its first micro-batch.
    pub fn before_seconds(&self) -> f64 {
        self.before.iter().map(|one| one.exposed).sum()
    }
}

/// A step, by its distinct roles.
#[derive(Clone, Debug, PartialEq)]
pub struct StepModel {
    pub layout: ParallelLayout,
    pub stages: Vec<StageModel>,
    pub roles: Vec<RankRole>,
    /// Floating-point operations that the model itself takes, nothing computed twice, over all ranks.
    pub model_flops: f64,
    /// Peak operations per second of one device in this precision.
    pub peak_flops: f64,
    /// Whether gradients are exchanged while the last backward pass goes on.
    pub overlaps_gradients: bool,
    /// The spread of a rank's step time, as a share of it.
    pub jitter: f64,
    /// Memory of a device.
    pub device_memory: f64,
}

/// Where a step's time goes. The parts add up to `seconds`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepTimes {
    pub seconds: f64,
    pub compute: f64,
    /// Waiting for exchanges, by axis.
    pub exposed: BTreeMap<String, f64>,
    /// Waiting for other stages of the pipeline.
    pub bubble: f64,
    pub update: f64,
    /// Waiting for the slowest of all ranks, where their times spread.
    pub straggling: f64,
    /// Of [`StepModel::model_flops`], the share of what the devices could have done.
    pub utilisation: f64,
}

impl StepModel {
    /// The role that holds the most.
    pub fn largest(&self) -> Option<&RankRole> {
        self.roles.iter().max_by(|a, b| a.memory.total().total_cmp(&b.memory.total()))
    }

    pub fn fits(&self) -> bool {
        self.largest().is_none_or(|role| role.memory.total() <= self.device_memory)
    }
}
