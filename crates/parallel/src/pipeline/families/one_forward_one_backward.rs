//! 1F1B, also PipeDream-Flush: after a warm-up each rank runs a backward pass as soon as it can, so that rank `r` of `p` keeps the
//! activations of at most `p − r` micro-batches.

use super::Sizes;
use crate::pipeline::error::ScheduleError;
use crate::pipeline::schedule::{Action, PipelineSchedule};

pub(super) fn build(sizes: Sizes) -> Result<PipelineSchedule, ScheduleError> {
    Ok(sizes.schedule((0..sizes.ranks).map(|rank| actions(rank, sizes)).collect()))
}

fn actions(stage: usize, sizes: Sizes) -> Vec<Action> {
    let warm_up = (sizes.ranks - 1 - stage).min(sizes.micro_batches);
    let mut actions: Vec<Action> = (0..warm_up).map(|number| Action::forward(stage, number)).collect();
    for number in 0..sizes.micro_batches {
        let next = number + warm_up;
        actions.extend((next < sizes.micro_batches).then(|| Action::forward(stage, next)));
        actions.push(Action::backward(stage, number));
    }
    actions
}
