//! GPipe: every rank runs all forward passes, then all backward passes.
//!
//! The paper runs the backward passes last in, first out. Here they come in the order of the forward passes: it waits no longer,
//! and gradients are added in the order of the grains.

use super::Sizes;
use crate::pipeline::error::ScheduleError;
use crate::pipeline::schedule::{Action, PipelineSchedule};

pub(super) fn build(sizes: Sizes) -> Result<PipelineSchedule, ScheduleError> {
    let all = 0..sizes.micro_batches;
    let rank = |stage| {
        let forward = all.clone().map(|number| Action::forward(stage, number));
        forward.chain(all.clone().map(|number| Action::backward(stage, number))).collect()
    };
    Ok(sizes.schedule((0..sizes.ranks).map(rank).collect()))
}
