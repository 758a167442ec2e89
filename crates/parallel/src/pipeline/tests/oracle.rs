//! A run of a schedule on symbolic values, written without the verifier's tables: ranks in turn, queues as channels, activations in
//! slots. It ends, because every round runs an action or is the last.

use crate::pipeline::{Action, ActionKind, Pass, PipelineSchedule, Verified};
use std::collections::{BTreeMap, VecDeque};

/// A value by what it was computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Value {
    pass: Pass,
    stage: usize,
    micro_batch: usize,
}

/// From rank, to rank (which may be the same), pass, sending stage. What stays on a rank is found by its name, so its queues are
/// apart for each micro-batch.
type Queue = (usize, usize, Pass, usize, Option<usize>);

struct Run<'s> {
    schedule: &'s PipelineSchedule,
    queues: BTreeMap<Queue, VecDeque<Value>>,
    /// Of each rank and stage, the micro-batch in each slot and whether its input gradient is computed.
    stash: BTreeMap<(usize, usize), BTreeMap<usize, (Value, bool)>>,
    verified: Option<&'s Verified>,
    /// Contributions to the gradient of each stage.
    gradients: Vec<Vec<usize>>,
}

/// Runs a schedule: `Err` says why it does not compute every gradient once. With a [`Verified`], activations lie in its slots.
pub fn run(schedule: &PipelineSchedule, verified: Option<&Verified>) -> Result<(), String> {
    let mut run = Run {
        schedule,
        queues: BTreeMap::new(),
        stash: BTreeMap::new(),
        verified,
        gradients: vec![Vec::new(); schedule.stages],
    };
    let mut next = vec![0; schedule.ranks];
    loop {
        let mut progress = false;
        for (rank, next) in next.iter_mut().enumerate() {
            while let Some(action) = schedule.actions[rank].get(*next) {
                if !run.act(rank, *action)? {
                    break;
                }
                *next += 1;
                progress = true;
            }
        }
        if !progress {
            break;
        }
    }
    if (0..schedule.ranks).any(|rank| next[rank] < schedule.actions[rank].len()) {
        return Err("stuck".into());
    }
    run.finish()
}

impl Run<'_> {
    fn queue(&self, pass: Pass, from: (usize, usize), to: usize, micro_batch: usize) -> Queue {
        let (rank, stage) = from;
        (rank, to, pass, stage, (rank == to).then_some(micro_batch))
    }

    /// Whether the action could run; otherwise it waits for a message.
    fn act(&mut self, rank: usize, action: Action) -> Result<bool, String> {
        let Action { kind, stage, micro_batch } = action;
        if stage >= self.schedule.stages || micro_batch >= self.schedule.micro_batches {
            return Err("no such thing".into());
        }
        if self.schedule.rank_of(stage, micro_batch) != rank {
            return Err("the input or the weights are elsewhere".into());
        }
        match kind {
            ActionKind::Forward => {
                let Some(input) = self.take(Pass::Forward, rank, stage, micro_batch)? else { return Ok(false) };
                self.keep(rank, stage, input)?;
                self.give(Pass::Forward, rank, stage, micro_batch);
            }
            ActionKind::Backward | ActionKind::BackwardInput => {
                if self.take(Pass::Backward, rank, stage, micro_batch)?.is_none() {
                    return Ok(false);
                }
                let is_last = kind == ActionKind::Backward;
                self.read_stash(rank, stage, micro_batch, false, is_last)?;
                self.give(Pass::Backward, rank, stage, micro_batch);
            }
            ActionKind::BackwardWeight => self.read_stash(rank, stage, micro_batch, true, true)?,
        }
        Ok(true)
    }

    /// What the neighbouring stage made, `None` if it has not come.
    fn take(&mut self, pass: Pass, rank: usize, stage: usize, micro_batch: usize) -> Result<Option<Value>, String> {
        let neighbour = match pass {
            Pass::Forward if stage > 0 => stage - 1,
            Pass::Backward if stage + 1 < self.schedule.stages => stage + 1,
            _ => return Ok(Some(Value { pass, stage, micro_batch })),
        };
        let from = self.schedule.rank_of(neighbour, micro_batch);
        let queue = self.queue(pass, (from, neighbour), rank, micro_batch);
        let Some(value) = self.queues.get_mut(&queue).and_then(VecDeque::pop_front) else { return Ok(None) };
        let right = Value { pass, stage: neighbour, micro_batch };
        if value == right { Ok(Some(Value { stage, ..value })) } else { Err(format!("{value:?} came for {right:?}")) }
    }

    fn give(&mut self, pass: Pass, rank: usize, stage: usize, micro_batch: usize) {
        let neighbour = match pass {
            Pass::Forward => stage + 1,
            Pass::Backward => stage.wrapping_sub(1),
        };
        if neighbour < self.schedule.stages {
            let to = self.schedule.rank_of(neighbour, micro_batch);
            let queue = self.queue(pass, (rank, stage), to, micro_batch);
            self.queues.entry(queue).or_default().push_back(Value { pass, stage, micro_batch });
        }
    }

    fn slot(&self, stage: usize, micro_batch: usize) -> usize {
        self.verified.map_or(micro_batch, |verified| verified.slot(stage, micro_batch))
    }

    fn keep(&mut self, rank: usize, stage: usize, value: Value) -> Result<(), String> {
        let slot = self.slot(stage, value.micro_batch);
        if self.verified.is_some_and(|verified| slot >= verified.peak(rank, stage)) {
            return Err(format!("slot {slot} of rank {rank}, stage {stage} is beyond the peak"));
        }
        let stash = self.stash.entry((rank, stage)).or_default();
        match stash.insert(slot, (value, false)) {
            Some(other) => Err(format!("slot {slot} of rank {rank}, stage {stage} still holds {other:?}")),
            None => self.check_rank_peak(rank),
        }
    }

    fn check_rank_peak(&self, rank: usize) -> Result<(), String> {
        let kept: usize = self.stash.range((rank, 0)..(rank + 1, 0)).map(|(_, stash)| stash.len()).sum();
        match self.verified {
            Some(verified) if kept > verified.rank_peak(rank) => Err(format!("rank {rank} keeps {kept}")),
            _ => Ok(()),
        }
    }

    fn read_stash(
        &mut self,
        rank: usize,
        stage: usize,
        number: usize,
        has_input: bool,
        frees: bool,
    ) -> Result<(), String> {
        let slot = self.slot(stage, number);
        let stash = self.stash.entry((rank, stage)).or_default();
        let (value, input_done) = stash.get_mut(&slot).ok_or("no activations")?;
        if value.micro_batch != number || *input_done != has_input {
            return Err(format!("{value:?} is not what the backward pass of {number} needs"));
        }
        *input_done = true;
        if frees {
            self.gradients[stage].push(value.micro_batch);
            stash.remove(&slot);
        }
        Ok(())
    }

    fn finish(mut self) -> Result<(), String> {
        if self.queues.values().any(|queue| !queue.is_empty()) {
            return Err("a message was not read".into());
        }
        if self.stash.values().any(|stash| !stash.is_empty()) {
            return Err("activations are left".into());
        }
        let right: Vec<usize> = (0..self.schedule.micro_batches).collect();
        for (stage, found) in self.gradients.iter_mut().enumerate() {
            found.sort_unstable();
            if *found != right {
                return Err(format!("the gradient of stage {stage} has {found:?}"));
            }
        }
        Ok(())
    }
}
