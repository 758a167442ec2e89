//! Two replicas of the model on the same ranks, as GEMS and Chimera have it: stage `s` lies on rank `s` for micro-batches that go
//! down and on rank `p − 1 − s` for those that go up. While one end of the pipeline fills, the other end already works.
//!
//! The order of each rank is that of a run in which every action takes the same time. A rank takes what is ready: of several, the
//! micro-batch that is first in its direction, and of those the backward pass. A stage keeps at most `min(p − s, ⌈p / 2⌉)`
//! micro-batches of a direction, which gives Chimera's memory, from `p / 2 + 1` to `p` activations per rank. It cannot get stuck:
//! the oldest micro-batch of a direction finds every stage empty.

use super::{Sizes, nearest_multiples};
use crate::pipeline::error::ScheduleError;
use crate::pipeline::schedule::{Action, Direction, PipelineSchedule, StagePlacement};

pub(super) fn build(sizes: Sizes) -> Result<PipelineSchedule, ScheduleError> {
    let Sizes { ranks, micro_batches, .. } = sizes;
    if ranks < 2 {
        let message = "`bidirectional` needs at least 2 ranks, not 1".into();
        return Err(ScheduleError::size(message, "set the ranks to 2 or more, or take `1f1b`".into()));
    }
    if micro_batches % 2 != 0 {
        let message = format!("`bidirectional` cannot send {micro_batches} micro-batches in two directions");
        let hint = format!("their number is even, such as {}", nearest_multiples(micro_batches, 2));
        return Err(ScheduleError::size(message, hint));
    }
    let placement = StagePlacement::bidirectional(ranks, micro_batches);
    let run = Run {
        sizes,
        counts: [Direction::Down, Direction::Up].map(|_| vec![Counts::default(); ranks]),
        actions: vec![Vec::new(); ranks],
    };
    Ok(PipelineSchedule { ranks, stages: ranks, micro_batches, placement, actions: run.finish() })
}

/// How many micro-batches of a direction have passed a stage. They pass in order.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    forward: usize,
    backward: usize,
}

struct Run {
    sizes: Sizes,
    /// For each direction, of each stage.
    counts: [Vec<Counts>; 2],
    actions: Vec<Vec<Action>>,
}

/// What a rank may do next: first in order is first in time.
type Candidate = (usize, bool, usize);

impl Run {
    fn finish(mut self) -> Vec<Vec<Action>> {
        let all = self.sizes.micro_batches * 2;
        while self.actions.iter().any(|actions| actions.len() < all) {
            // All ranks choose from what was done before this moment.
            let chosen: Vec<Option<Candidate>> = (0..self.sizes.ranks).map(|rank| self.choose(rank)).collect();
            assert!(chosen.iter().any(Option::is_some), "the oldest micro-batch can always go on");
            for (rank, candidate) in chosen.into_iter().enumerate() {
                candidate.into_iter().for_each(|candidate| self.take(rank, candidate));
            }
        }
        self.actions
    }

    fn stage(&self, rank: usize, direction: usize) -> usize {
        if direction == 0 { rank } else { self.sizes.ranks - 1 - rank }
    }

    fn choose(&self, rank: usize) -> Option<Candidate> {
        let candidates = (0..2).flat_map(|direction| self.candidates(rank, direction));
        candidates.min()
    }

    fn candidates(&self, rank: usize, direction: usize) -> impl Iterator<Item = Candidate> {
        let (stage, stages) = (self.stage(rank, direction), self.sizes.ranks);
        let (counts, half) = (&self.counts[direction], self.sizes.micro_batches / 2);
        let Counts { forward, backward } = counts[stage];
        let arrived = if stage == 0 { half } else { counts[stage - 1].forward };
        let kept_max = (stages - stage).min(stages.div_ceil(2));
        let can_forward = forward < arrived && forward - backward < kept_max;
        let returned = if stage + 1 == stages { forward } else { counts[stage + 1].backward };
        let can_backward = backward < returned;
        let backward = can_backward.then_some((backward, false, direction));
        backward.into_iter().chain(can_forward.then_some((forward, true, direction)))
    }

    fn take(&mut self, rank: usize, (number, is_forward, direction): Candidate) {
        let stage = self.stage(rank, direction);
        let micro_batch = direction * self.sizes.micro_batches / 2 + number;
        let counts = &mut self.counts[direction][stage];
        if is_forward {
            counts.forward += 1;
            self.actions[rank].push(Action::forward(stage, micro_batch));
        } else {
            counts.backward += 1;
            self.actions[rank].push(Action::backward(stage, micro_batch));
        }
    }
}
