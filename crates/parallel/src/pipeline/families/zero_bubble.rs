//! ZB-H1 of "Zero Bubble Pipeline Parallelism" (Qi et al.): 1F1B whose backward passes are split. The gradient of the input goes
//! to the stage before at once; the gradient of the weights waits until the rank would be idle.
//!
//! Rank `r` runs it `r` micro-batches late. Then every rank keeps at most `p` activations, as many as the first rank of 1F1B.

use super::Sizes;
use crate::pipeline::error::ScheduleError;
use crate::pipeline::schedule::{Action, PipelineSchedule};

pub(super) fn build(sizes: Sizes) -> Result<PipelineSchedule, ScheduleError> {
    Ok(sizes.schedule((0..sizes.ranks).map(|rank| actions(rank, sizes)).collect()))
}

fn actions(stage: usize, sizes: Sizes) -> Vec<Action> {
    let (count, warm_up) = (sizes.micro_batches, (sizes.ranks - 1 - stage).min(sizes.micro_batches));
    let mut actions: Vec<Action> = (0..warm_up).map(|number| Action::forward(stage, number)).collect();
    let mut weights = 0;
    for number in 0..count {
        let next = number + warm_up;
        actions.extend((next < count).then(|| Action::forward(stage, next)));
        actions.push(Action::input(stage, number));
        // Once no forward pass is left, the rank waits for each gradient: time for one of the weights.
        if number >= stage || next >= count {
            actions.push(Action::weight(stage, weights));
            weights += 1;
        }
    }
    actions.extend((weights..count).map(|number| Action::weight(stage, number)));
    actions
}
