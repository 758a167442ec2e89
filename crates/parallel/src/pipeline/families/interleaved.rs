//! Megatron-LM's interleaved 1F1B: each rank has `v` chunks of the model, so that a micro-batch passes all ranks `v` times and the
//! pipeline fills `v` times sooner.
//!
//! Ranks take micro-batches in groups of `p`: a group passes the first chunk, then the second, and so on.

use super::{Sizes, nearest_multiples};
use crate::pipeline::error::ScheduleError;
use crate::pipeline::schedule::{Action, PipelineSchedule};

pub(super) fn build(sizes: Sizes) -> Result<PipelineSchedule, ScheduleError> {
    let Sizes { ranks, micro_batches, chunks } = sizes;
    if chunks < 2 {
        let message = "`interleaved` needs at least 2 chunks per rank, not 1".into();
        return Err(ScheduleError::size(message, "set chunks to 2 or more, or take `1f1b`".into()));
    }
    if micro_batches % ranks != 0 {
        let message = format!("`interleaved` on {ranks} ranks cannot take {micro_batches} micro-batches");
        let nearest = nearest_multiples(micro_batches, ranks);
        let hint = format!("their number is a multiple of the ranks, such as {nearest}; `1f1b` takes any");
        return Err(ScheduleError::size(message, hint));
    }
    Ok(sizes.schedule((0..ranks).map(|rank| actions(rank, sizes)).collect()))
}

fn actions(rank: usize, sizes: Sizes) -> Vec<Action> {
    let Sizes { ranks, micro_batches, chunks } = sizes;
    // The chunk and the micro-batch of a rank's action by its number, the same for forward and backward but for the chunk.
    let part = |number: usize| {
        let (group, within) = (number / (ranks * chunks), number % (ranks * chunks));
        (within / ranks, group * ranks + within % ranks)
    };
    let forward = |number| {
        let (chunk, micro_batch) = part(number);
        Action::forward(chunk * ranks + rank, micro_batch)
    };
    let backward = |number| {
        let (chunk, micro_batch) = part(number);
        Action::backward((chunks - 1 - chunk) * ranks + rank, micro_batch)
    };
    let total = micro_batches * chunks;
    let warm_up = (2 * (ranks - 1 - rank) + (chunks - 1) * ranks).min(total);
    let mut actions: Vec<Action> = (0..warm_up).map(forward).collect();
    for number in 0..total {
        let next = number + warm_up;
        actions.extend((next < total).then(|| forward(next)));
        actions.push(backward(number));
    }
    actions
}
