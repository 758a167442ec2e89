//! What is known of a schedule that was proven right: an order of all actions, a slot for every activation, the order of the
//! messages on every channel, and how much memory all of it takes at most.

mod unread;

use super::schedule::{Action, ActionKind, Channel, PipelineSchedule};
use std::collections::{BTreeMap, BTreeSet};

/// An action with its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub rank: usize,
    /// In the list of the rank, from 0.
    pub position: usize,
    pub action: Action,
}

/// The micro-batches whose values travel on a channel, in the order in which they are sent and read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChannelOrder {
    pub channel: Channel,
    pub micro_batches: Vec<usize>,
}

/// A schedule that [`verify`](super::verify()) has proven right.
#[derive(Clone, Debug)]
pub struct Verified {
    schedule: PipelineSchedule,
    order: Vec<Step>,
    channels: Vec<ChannelOrder>,
    slots: Slots,
}

impl Verified {
    pub(super) fn new(schedule: PipelineSchedule, order: Vec<Step>, channels: Vec<ChannelOrder>) -> Self {
        let slots = Slots::assign(&schedule);
        Self { schedule, order, channels, slots }
    }

    pub fn schedule(&self) -> &PipelineSchedule {
        &self.schedule
    }

    /// All actions of all ranks in an order in which everything is made before it is read. A single process may run them so.
    pub fn order(&self) -> &[Step] {
        &self.order
    }

    /// Every channel with its messages, by sender, reader, pass and stage.
    pub fn channels(&self) -> &[ChannelOrder] {
        &self.channels
    }

    /// The messages of a step.
    pub fn messages(&self) -> usize {
        self.channels.iter().map(|channel| channel.micro_batches.len()).sum()
    }

    /// Where a stage keeps the activations of a micro-batch, from its forward pass until the gradients of its weights are added:
    /// a number below the [`peak`](Self::peak) of its rank and stage. Until then no other micro-batch has it.
    pub fn slot(&self, stage: usize, micro_batch: usize) -> usize {
        self.slots.of_cell[stage * self.schedule.micro_batches + micro_batch] as usize
    }

    /// The most micro-batches whose activations a rank keeps for a stage; 0 for a stage that it does not run.
    pub fn peak(&self, rank: usize, stage: usize) -> usize {
        self.slots.peaks.get(&(rank, stage)).copied().unwrap_or(0)
    }

    /// The most activations that a rank keeps at a time, of all its stages together.
    pub fn rank_peak(&self, rank: usize) -> usize {
        self.slots.rank_peaks[rank]
    }

    /// The micro-batches whose gradients a rank adds to the weights of a stage, in order.
    pub fn gradients(&self, rank: usize, stage: usize) -> Vec<usize> {
        let adds = |action: &&Action| action.stage == stage && action.kind.releases();
        self.schedule.actions[rank].iter().filter(adds).map(|action| action.micro_batch).collect()
    }

    /// The most partial sums that a rank keeps for a stage at a time when it adds gradients as a balanced tree over the number of
    /// the micro-batch, each as soon as it can. In ascending order it is what a binary counter needs.
    pub fn partial_sums_peak(&self, rank: usize, stage: usize) -> usize {
        let mut sums: BTreeSet<(u32, usize)> = BTreeSet::new();
        let mut peak = 0;
        for micro_batch in self.gradients(rank, stage) {
            peak = peak.max(sums.len() + 1);
            let (mut level, mut number) = (0, micro_batch);
            while sums.remove(&(level, number ^ 1)) {
                (level, number) = (level + 1, number / 2);
            }
            sums.insert((level, number));
        }
        peak
    }

    /// For each channel, the most messages that can have been sent and not read, however fast or slow each rank is. It bounds the
    /// memory of whoever keeps them for the reader. Takes time in proportion to actions times ranks.
    pub fn unread_peaks(&self) -> Vec<usize> {
        unread::peaks(self)
    }
}

/// Where activations lie.
#[derive(Clone, Debug)]
struct Slots {
    /// By stage and micro-batch.
    of_cell: Vec<u32>,
    /// How many each rank and stage has.
    peaks: BTreeMap<(usize, usize), usize>,
    rank_peaks: Vec<usize>,
}

impl Slots {
    /// The lowest free slot for each forward pass: no assignment needs fewer.
    fn assign(schedule: &PipelineSchedule) -> Self {
        let of_cell = vec![0; schedule.stages * schedule.micro_batches];
        let mut slots = Self { of_cell, peaks: BTreeMap::new(), rank_peaks: schedule.rank_peaks() };
        for (rank, actions) in schedule.actions.iter().enumerate() {
            let mut free: BTreeMap<usize, BTreeSet<u32>> = BTreeMap::new();
            for action in actions {
                let slot = &mut slots.of_cell[action.stage * schedule.micro_batches + action.micro_batch];
                let free = free.entry(action.stage).or_default();
                if action.kind == ActionKind::Forward {
                    let peak = slots.peaks.entry((rank, action.stage)).or_default();
                    *slot = free.pop_first().unwrap_or(*peak as u32);
                    *peak = (*peak).max(*slot as usize + 1);
                } else if action.kind.releases() {
                    free.insert(*slot);
                }
            }
        }
        slots
    }
}
