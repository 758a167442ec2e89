//! The most messages of a channel that can have been sent and not read.
//!
//! When a message is sent, the reader must have come as far as everything before the send depends on it, and need not have come
//! further. So what is unread at most is what was sent until then, less what the reader reads on that part of its way. How far
//! each rank must have come follows from one pass over all actions per reader.

use super::{Step, Verified};
use crate::pipeline::schedule::{Action, Channel, Pass};
use std::collections::BTreeMap;

const NOTHING: u32 = u32::MAX;

/// What an action reads and makes, as numbers of values; in the order in which everything is made before it is read.
struct Use {
    rank: u32,
    position: u32,
    read: u32,
    made: u32,
}

/// The sends of a channel as numbers of uses, and the positions of the reader's receives.
#[derive(Default)]
struct Ends {
    sends: Vec<u32>,
    reads: Vec<u32>,
}

pub(super) fn peaks(verified: &Verified) -> Vec<usize> {
    let (schedule, order) = (&verified.schedule, &verified.order);
    let (stages, count) = (schedule.stages, schedule.micro_batches);
    // Both counts are within the limits of a schedule, so numbers of values and of uses fit.
    let value = |pass: Pass, stage: usize, action: &Action| {
        let first = if pass == Pass::Forward { 0 } else { stages * count };
        (first + stage * count + action.micro_batch) as u32
    };
    let mut uses = Vec::with_capacity(order.len());
    let mut ends: BTreeMap<Channel, Ends> = BTreeMap::new();
    for (number, Step { rank, position, action }) in order.iter().enumerate() {
        let read = schedule.waits_for(*action).map_or(NOTHING, |(pass, stage, _)| value(pass, stage, action));
        let made = action.kind.pass().map_or(NOTHING, |pass| value(pass, action.stage, action));
        uses.push(Use { rank: *rank as u32, position: *position as u32, read, made });
        if let Some(channel) = schedule.sends(*action) {
            ends.entry(channel).or_default().sends.push(number as u32);
        }
        if let Some(channel) = schedule.receives(*action) {
            ends.entry(channel).or_default().reads.push(*position as u32);
        }
    }
    let mut peaks = vec![0; verified.channels.len()];
    for reader in 0..schedule.ranks {
        let channels = verified.channels.iter().zip(&mut peaks).filter(|(order, _)| order.channel.to == reader);
        let channels: Vec<_> = channels.collect();
        if channels.is_empty() {
            continue;
        }
        let progress = progress(&uses, reader as u32, schedule.ranks, 2 * stages * count);
        for (order, peak) in channels {
            *peak = ends.get(&order.channel).map_or(0, |ends| most_unread(ends, &progress));
        }
    }
    peaks
}

/// How many actions of the reader must have ended before each use starts.
fn progress(uses: &[Use], reader: u32, ranks: usize, values: usize) -> Vec<u32> {
    let (mut of_rank, mut of_value) = (vec![0u32; ranks], vec![0u32; values]);
    let before = |each: &Use| {
        let read = if each.read == NOTHING { 0 } else { of_value[each.read as usize] };
        let start = of_rank[each.rank as usize].max(read);
        let end = if each.rank == reader { each.position + 1 } else { start };
        of_rank[each.rank as usize] = end;
        if each.made != NOTHING {
            of_value[each.made as usize] = end;
        }
        start
    };
    uses.iter().map(before).collect()
}

fn most_unread(ends: &Ends, progress: &[u32]) -> usize {
    let unread = ends.sends.iter().enumerate().map(|(number, send)| {
        let read = ends.reads.partition_point(|position| *position < progress[*send as usize]);
        number + 1 - read
    });
    unread.max().unwrap_or(0)
}
