//! What is known of a schedule that was proven right: an order of all actions, a slot for every activation, the order of the
//! messages on every channel, and how much memory all of it takes at most.

use super::schedule::{Action, ActionKind, Channel, Schedule};
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
    schedule: Schedule,
    order: Vec<Step>,
    channels: Vec<ChannelOrder>,
    /// By stage and micro-batch.
    slots: Vec<u32>,
    /// The number of slots of each rank and stage.
    peaks: BTreeMap<(usize, usize), usize>,
    rank_peaks: Vec<usize>,
}

impl Verified {
    pub(super) fn new(schedule: Schedule, order: Vec<Step>, channels: Vec<ChannelOrder>) -> Self {
        let (slots, peaks, rank_peaks) = assign_slots(&schedule);
        Self { schedule, order, channels, slots, peaks, rank_peaks }
    }

    pub fn schedule(&self) -> &Schedule {
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
        self.slots[stage * self.schedule.micro_batches + micro_batch] as usize
    }

    /// The most micro-batches whose activations a rank keeps for a stage; 0 for a stage that it does not run.
    pub fn peak(&self, rank: usize, stage: usize) -> usize {
        self.peaks.get(&(rank, stage)).copied().unwrap_or(0)
    }

    /// The most activations that a rank keeps at a time, of all its stages together.
    pub fn rank_peak(&self, rank: usize) -> usize {
        self.rank_peaks[rank]
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
        let mut peaks = vec![0; self.channels.len()];
        for to in 0..self.schedule.ranks {
            let channels: Vec<usize> =
                (0..peaks.len()).filter(|number| self.channels[*number].channel.to == to).collect();
            if channels.is_empty() {
                continue;
            }
            let before = self.actions_before(to);
            channels
                .into_iter()
                .for_each(|number| peaks[number] = self.unread_peak(self.channels[number].channel, &before));
        }
        peaks
    }

    /// For each action of each rank, how many actions of rank `to` must have ended before it starts.
    fn actions_before(&self, to: usize) -> Vec<Vec<u32>> {
        let schedule = &self.schedule;
        let mut before: Vec<Vec<u32>> =
            schedule.actions.iter().map(|actions| Vec::with_capacity(actions.len())).collect();
        let mut made: BTreeMap<(Channel, usize), u32> = BTreeMap::new();
        for Step { rank, position, action } in &self.order {
            let own = before[*rank].last().copied().unwrap_or(0);
            let received = schedule.receives(*action).and_then(|channel| made.remove(&(channel, action.micro_batch)));
            let least = if *rank == to { *position as u32 } else { 0 };
            let count = own.max(received.unwrap_or(0)).max(least);
            before[*rank].push(count);
            if let Some(channel) = schedule.sends(*action) {
                let ended = if *rank == to { *position as u32 + 1 } else { count };
                made.insert((channel, action.micro_batch), ended);
            }
        }
        before
    }

    fn unread_peak(&self, channel: Channel, before: &[Vec<u32>]) -> usize {
        let schedule = &self.schedule;
        let reads: Vec<usize> = (0..schedule.actions[channel.to].len())
            .filter(|position| schedule.receives(schedule.actions[channel.to][*position]) == Some(channel))
            .collect();
        let sends = schedule.actions[channel.from].iter().zip(&before[channel.from]);
        let sends = sends.filter(|(action, _)| schedule.sends(**action) == Some(channel));
        let unread = sends.enumerate().map(|(number, (_, before))| {
            let read = reads.partition_point(|position| *position < *before as usize);
            number + 1 - read
        });
        unread.max().unwrap_or(0)
    }
}

/// The lowest free slot for each forward pass: no assignment needs fewer.
fn assign_slots(schedule: &Schedule) -> (Vec<u32>, BTreeMap<(usize, usize), usize>, Vec<usize>) {
    let mut slots = vec![0; schedule.stages * schedule.micro_batches];
    let mut peaks = BTreeMap::new();
    let mut rank_peaks = Vec::with_capacity(schedule.ranks);
    for (rank, actions) in schedule.actions.iter().enumerate() {
        let mut free: BTreeMap<usize, BTreeSet<u32>> = BTreeMap::new();
        let (mut kept, mut rank_peak) = (0usize, 0);
        for action in actions {
            let slot = &mut slots[action.stage * schedule.micro_batches + action.micro_batch];
            let free = free.entry(action.stage).or_default();
            if action.kind == ActionKind::Forward {
                let peak: &mut usize = peaks.entry((rank, action.stage)).or_default();
                *slot = free.pop_first().unwrap_or_else(|| {
                    *peak += 1;
                    *peak as u32 - 1
                });
                kept += 1;
                rank_peak = rank_peak.max(kept);
            } else if action.kind.releases() {
                free.insert(*slot);
                kept -= 1;
            }
        }
        rank_peaks.push(rank_peak);
    }
    (slots, peaks, rank_peaks)
}
