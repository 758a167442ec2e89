//! Sets of activations: which one each grain of a step uses, the same on all ranks.
//!
//! Grains take the slots in turns, in the order in which they set out; where they go in two directions, one of each direction in
//! turn. A slot is taken again when its last grain is done on this rank and what that sent was read. No rank may have two grains
//! in one slot, and nobody may wait in a circle.

use super::schedule::{Action, Direction, PipelineSchedule};

/// The slot of every grain, and how many there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slots {
    pub count: usize,
    pub of_grain: Vec<usize>,
}

impl Slots {
    /// The fewest that do. The schedule is proven.
    pub fn find(schedule: &PipelineSchedule) -> Self {
        let turns = turns(schedule);
        let slots = |count: usize| Self { count, of_grain: turns.iter().map(|turn| turn % count).collect() };
        let fits =
            |slots: &Self| is_alone(schedule, slots) && (schedule.placement.up.is_none() || ends(schedule, slots));
        let all = schedule.micro_batches;
        (1..all).map(slots).find(fits).unwrap_or_else(|| slots(all))
    }
}

/// When each grain sets out, relative to the others.
fn turns(schedule: &PipelineSchedule) -> Vec<usize> {
    let mut next = [0; 2];
    let two = schedule.placement.up.is_some();
    let turn = |direction: &Direction| {
        let number = &mut next[*direction as usize];
        let turn = if two { 2 * *number + *direction as usize } else { *number };
        *number += 1;
        turn
    };
    schedule.placement.directions.iter().map(turn).collect()
}

/// Whether no rank has two grains in one slot at a time.
fn is_alone(schedule: &PipelineSchedule, slots: &Slots) -> bool {
    schedule.actions.iter().all(|actions| {
        let mut left = vec![0usize; schedule.micro_batches];
        actions.iter().for_each(|action| left[action.micro_batch] += 1);
        let mut holder: Vec<Option<usize>> = vec![None; slots.count];
        actions.iter().all(|action| {
            let slot = &mut holder[slots.of_grain[action.micro_batch]];
            let free = slot.is_none_or(|grain| grain == action.micro_batch);
            left[action.micro_batch] -= 1;
            *slot = (left[action.micro_batch] > 0).then_some(action.micro_batch);
            free
        })
    })
}

/// An action that reads a message, by its rank and its place in that rank's list.
type Reader = (usize, usize);

/// Whether a step ends though a slot is free only when what its last grain sent is being read.
fn ends(schedule: &PipelineSchedule, slots: &Slots) -> bool {
    let readers = readers(schedule);
    let mut next = vec![0; schedule.ranks];
    // What the last grain of each slot has sent, on each rank.
    let mut sent: Vec<Vec<(usize, Vec<Reader>)>> = vec![vec![(usize::MAX, Vec::new()); slots.count]; schedule.ranks];
    loop {
        let before = next.clone();
        for rank in 0..schedule.ranks {
            while let Some(action) = schedule.actions[rank].get(next[rank]) {
                let (grain, messages) = &mut sent[rank][slots.of_grain[action.micro_batch]];
                let is_new = *grain != action.micro_batch;
                let is_free = !is_new || messages.iter().all(|(rank, at)| next[*rank] >= *at);
                let has_come = writer(schedule, &readers, *action).is_none_or(|(rank, at)| next[rank] > at);
                if !is_free || !has_come {
                    break;
                }
                if is_new {
                    (*grain, *messages) = (action.micro_batch, Vec::new());
                }
                messages.extend(read_by(schedule, *action).and_then(|reader| find(schedule, &readers, reader)));
                next[rank] += 1;
            }
        }
        if next == before {
            return next.iter().zip(&schedule.actions).all(|(next, actions)| *next == actions.len());
        }
    }
}

/// Where the forward and the backward pass of every cell stand.
fn readers(schedule: &PipelineSchedule) -> Vec<[Option<usize>; 2]> {
    let mut places = vec![[None; 2]; schedule.stages * schedule.micro_batches];
    for actions in &schedule.actions {
        for (at, action) in actions.iter().enumerate() {
            if let Some(pass) = action.kind.pass() {
                places[action.stage * schedule.micro_batches + action.micro_batch][pass as usize] = Some(at);
            }
        }
    }
    places
}

fn find(
    schedule: &PipelineSchedule,
    places: &[[Option<usize>; 2]],
    (pass, stage, grain): (usize, usize, usize),
) -> Option<Reader> {
    Some((schedule.rank_of(stage, grain), places[stage * schedule.micro_batches + grain][pass]?))
}

/// The pass that another rank runs with what this action makes.
fn read_by(schedule: &PipelineSchedule, action: Action) -> Option<(usize, usize, usize)> {
    let channel = schedule.sends(action)?;
    let forward = channel.pass == super::schedule::Pass::Forward;
    let stage = if forward { action.stage + 1 } else { action.stage.checked_sub(1)? };
    Some((channel.pass as usize, stage, action.micro_batch))
}

/// The pass that makes what this action reads.
fn writer(schedule: &PipelineSchedule, places: &[[Option<usize>; 2]], action: Action) -> Option<Reader> {
    let (pass, stage, _) = schedule.waits_for(action)?;
    find(schedule, places, (pass as usize, stage, action.micro_batch))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{Sizes, family};

    fn slots(name: &str, ranks: usize, micro_batches: usize) -> Slots {
        Slots::find(&family(name).unwrap().schedule(Sizes { ranks, micro_batches, chunks: 1 }).unwrap())
    }

    #[test]
    fn grains_take_slots_in_turns() {
        assert_eq!(slots("1f1b", 2, 4), Slots { count: 2, of_grain: vec![0, 1, 0, 1] });
        assert_eq!(slots("gpipe", 2, 4).count, 4);
        let both = slots("bidirectional", 2, 8);
        assert_eq!(both.of_grain[0] % both.count, 0);
        assert_eq!(both.of_grain[4], 1, "the first that goes up takes the second slot");
    }

    /// No more than the memory that the schedule keeps, and two.
    #[test]
    fn two_directions_take_few_slots() {
        for (ranks, micro_batches) in [(2, 4), (2, 16), (3, 8), (4, 4), (4, 8), (4, 32), (5, 16), (8, 32)] {
            let slots = slots("bidirectional", ranks, micro_batches);
            assert!(slots.count <= micro_batches.min(2 * ranks), "{ranks} ranks, {micro_batches}: {}", slots.count);
        }
    }
}
