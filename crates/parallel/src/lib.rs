//! Parallel strategies as rewrites of one graph, and the lane on which their collectives run.
//!
//! | file | strategy |
//! |---|---|
//! | [`data`] | data parallelism: sums over grains become sums over all ranks' grains |
//! | [`zero`] | ZeRO: each rank keeps its share of the optimizer, of the gradients and of the weights |
//! | [`central`] | central storage: the ranks of a host share one copy of the weights |
//! | [`servers`] | parameter servers: workers push gradients, servers update and hand weights back |
//! | [`narrow`] | gradients travel as bf16 |
//! | [`sequence`] | sequence parallelism: ranks share the tokens of every sample |
//! | [`spatial`] | spatial parallelism: ranks share the rows and columns of every image |
//! | [`tensor`] | tensor parallelism: ranks share every layer, as [`partition`] derives it |
//! | [`recompute`] | parts of the forward pass run again in the backward pass; no strategy of `[parallel]`, for one rank too |
//!
//! Each is a [`Strategy`] in [`STRATEGIES`]; [`Parallel`] is what a job has chosen of them. None of them is a training loop;
//! each emits ordinary nodes. `zero`, `central` and `servers` share the parameters out in equal runs: `cut`.

pub mod central;
pub mod chosen;
mod cut;
pub mod data;
mod device_calls;
pub mod device_lane;
pub mod grain_share;
pub mod keys;
pub mod lane;
mod layers;
pub mod mesh;
pub mod narrow;
pub mod partition;
pub mod pipeline;
pub mod recompute;
pub mod sequence;
pub mod servers;
pub mod spatial;
pub mod strategy;
pub mod tensor;
pub mod zero;

/// Pipeline schedules as data, for whoever shows or counts them.
pub mod schedules {
    pub use crate::pipeline::{
        Action, ActionKind, Channel, Durations, FAMILIES, Pass, PipelineSchedule, ScheduleError, Sizes, StageDurations,
        Timeline, USUAL, Verified, balanced, draw, family, verify,
    };
}

/// Names of the mesh's axes, for whoever counts what goes along them.
pub mod axes {
    pub use crate::mesh::DATA;
    pub use crate::pipeline::PIPELINE;
    pub use crate::sequence::{HEADS_AXIS, RING_AXIS};
    pub use crate::spatial::{HEIGHT, WIDTH};
    pub use crate::tensor::TENSOR;
}

pub use chosen::Parallel;
pub use data::{push_collective, sum_over_ranks};
pub use device_lane::DeviceLane;
pub use grain_share::GrainShare;
pub use kolo_graph::Placement;
pub use lane::CommLane;
pub use mesh::Mesh;
pub use narrow::NarrowLane;
pub use recompute::{Recompute, RecomputePlan};
pub use servers::Roles;
pub use strategy::{Purpose, STRATEGIES, Strategy, StrategyKind, TrainingGraphs};
