//! The proof, before anything runs, that a schedule computes every gradient once, and ends.
//!
//! What is shown, in this order:
//! 1. Numbers are within limits and fit together.
//! 2. Every stage of every micro-batch is run forward once and backward once (whole, or input and weights), on its rank. So every
//!    gradient of weights is added exactly once.
//! 3. What an action reads of its own rank was made before.
//! 4. No rank waits for ever: the order of the ranks and the dependencies between them have no cycle. A send holds up
//!    nobody but later sends to the same rank, which takes them in this order, so this holds for any speed of ranks and links.
//! 5. Messages of a channel are read in the order in which they are sent.
//!
//! Time and memory grow with the number of actions, which the limits bound. `tests/mutations.rs` compares the verdict with a run
//! of the schedule on symbolic values.

use super::error::{ScheduleError, Wait};
use super::schedule::{Action, ActionKind, Channel, Pass, PipelineSchedule};
use super::verified::{ChannelOrder, Step, Verified};
use std::collections::{BTreeMap, VecDeque};

/// Proves a schedule right, or says what is wrong with it: rank, position, action and what it misses.
pub fn verify(schedule: &PipelineSchedule) -> Result<Verified, ScheduleError> {
    schedule.check_sizes()?;
    let positions = Positions::find(schedule)?;
    positions.check_complete()?;
    positions.check_local_order()?;
    let order = positions.run()?;
    let channels = channels(schedule)?;
    Ok(Verified::new(schedule.clone(), order, channels))
}

const NOWHERE: u32 = u32::MAX;

/// Where each action stands in the list of its rank.
struct Positions<'s> {
    schedule: &'s PipelineSchedule,
    /// By stage, micro-batch and kind.
    table: Vec<u32>,
}

impl<'s> Positions<'s> {
    fn find(schedule: &'s PipelineSchedule) -> Result<Self, ScheduleError> {
        let cells = schedule.stages * schedule.micro_batches;
        let mut positions = Self { schedule, table: vec![NOWHERE; cells * ActionKind::ALL.len()] };
        for (rank, actions) in schedule.actions.iter().enumerate() {
            for (position, action) in actions.iter().enumerate() {
                positions.add(rank, position, *action)?;
            }
        }
        Ok(positions)
    }

    fn index(&self, action: Action) -> usize {
        let cell = action.stage * self.schedule.micro_batches + action.micro_batch;
        cell * ActionKind::ALL.len() + action.kind as usize
    }

    fn get(&self, action: Action) -> Option<usize> {
        Some(self.table[self.index(action)]).filter(|position| *position != NOWHERE).map(|position| position as usize)
    }

    fn add(&mut self, rank: usize, position: usize, action: Action) -> Result<(), ScheduleError> {
        let error =
            |message: String, hint: String| Err(ScheduleError::Action { rank, position, action, message, hint });
        let PipelineSchedule { stages, micro_batches, .. } = *self.schedule;
        if action.stage >= stages {
            return error("names a stage that does not exist".into(), format!("stages are 0 to {}", stages - 1));
        }
        if action.micro_batch >= micro_batches {
            let hint = format!("micro-batches are 0 to {}", micro_batches - 1);
            return error("names a micro-batch that does not exist".into(), hint);
        }
        let right = self.schedule.rank_of(action.stage, action.micro_batch);
        if rank != right {
            return error(format!("belongs to rank {right}"), "move it there, or change the placement".into());
        }
        if let Some(first) = self.get(action) {
            return error(format!("was run before, at position {first}"), "run every action once".into());
        }
        let others: &[ActionKind] = match action.kind {
            ActionKind::Forward => &[],
            ActionKind::Backward => &[ActionKind::BackwardInput, ActionKind::BackwardWeight],
            ActionKind::BackwardInput | ActionKind::BackwardWeight => &[ActionKind::Backward],
        };
        for kind in others {
            let other = Action { kind: *kind, ..action };
            if let Some(first) = self.get(other) {
                let message = format!("adds a gradient twice: `{other}` is at position {first}");
                return error(message, "run the backward pass whole (B) or in two parts (I and W)".into());
            }
        }
        let index = self.index(action);
        // Each entry is set once, so positions stay below the size of the table.
        self.table[index] = position as u32;
        Ok(())
    }

    fn check_complete(&self) -> Result<(), ScheduleError> {
        let missing = |action: Action, hint: &str| {
            let rank = self.schedule.rank_of(action.stage, action.micro_batch);
            Err(ScheduleError::Missing { rank, action, hint: hint.into() })
        };
        for stage in 0..self.schedule.stages {
            for micro_batch in 0..self.schedule.micro_batches {
                let has = |kind| self.get(Action::new(kind, stage, micro_batch)).is_some();
                if !has(ActionKind::Forward) {
                    return missing(Action::forward(stage, micro_batch), "every stage runs every micro-batch forward");
                }
                match (has(ActionKind::Backward), has(ActionKind::BackwardInput), has(ActionKind::BackwardWeight)) {
                    (true, ..) | (_, true, true) => {}
                    (_, true, false) => {
                        return missing(Action::weight(stage, micro_batch), "`I` needs a `W` for the weights");
                    }
                    (_, false, true) => {
                        return missing(Action::input(stage, micro_batch), "`W` needs an `I` before it");
                    }
                    _ => return missing(Action::backward(stage, micro_batch), "add it, or `I` and `W` in its place"),
                }
            }
        }
        Ok(())
    }

    /// Actions read what the same stage made on the same rank.
    fn check_local_order(&self) -> Result<(), ScheduleError> {
        for (rank, actions) in self.schedule.actions.iter().enumerate() {
            for (position, action) in actions.iter().enumerate() {
                let read = match action.kind {
                    ActionKind::Forward => continue,
                    ActionKind::Backward | ActionKind::BackwardInput => ActionKind::Forward,
                    ActionKind::BackwardWeight => ActionKind::BackwardInput,
                };
                let read = Action { kind: read, ..*action };
                if let Some(later) = self.get(read).filter(|later| *later > position) {
                    let message = format!("reads what `{read}` makes, which comes later, at position {later}");
                    let hint = format!("move `{read}` before it");
                    return Err(ScheduleError::Action { rank, position, action: *action, message, hint });
                }
            }
        }
        Ok(())
    }

    /// The action that makes what an action waits for.
    fn producer(&self, action: Action) -> Option<(Action, usize)> {
        let (pass, stage, from) = self.schedule.waits_for(action)?;
        let make = |kind| Action::new(kind, stage, action.micro_batch);
        let kind = match pass {
            Pass::Forward => ActionKind::Forward,
            Pass::Backward if self.get(make(ActionKind::Backward)).is_some() => ActionKind::Backward,
            Pass::Backward => ActionKind::BackwardInput,
        };
        Some((make(kind), from))
    }

    /// Runs all ranks as far as they get. The order in which they did is one in which everything is made before it is read.
    fn run(&self) -> Result<Vec<Step>, ScheduleError> {
        let PipelineSchedule { ranks, ref actions, .. } = *self.schedule;
        let mut next = vec![0; ranks];
        let mut done = vec![false; self.table.len()];
        let mut waiting: BTreeMap<usize, usize> = BTreeMap::new();
        let mut ready: VecDeque<usize> = (0..ranks).collect();
        let mut order = Vec::new();
        while let Some(rank) = ready.pop_front() {
            while let Some(action) = actions[rank].get(next[rank]).copied() {
                let wanted = self.producer(action).map(|(wanted, _)| self.index(wanted));
                if let Some(wanted) = wanted.filter(|wanted| !done[*wanted]) {
                    waiting.insert(wanted, rank);
                    break;
                }
                let index = self.index(action);
                done[index] = true;
                order.push(Step { rank, position: next[rank], action });
                next[rank] += 1;
                ready.extend(waiting.remove(&index));
            }
        }
        match (0..ranks).find(|rank| next[*rank] < actions[*rank].len()) {
            Some(stuck) => Err(ScheduleError::Deadlock { waits: self.cycle(&next, stuck) }),
            None => Ok(order),
        }
    }

    /// The ranks that wait for each other, found from one that is stuck: whatever it waits for is on a rank that is stuck too.
    fn cycle(&self, next: &[usize], stuck: usize) -> Vec<Wait> {
        let mut waits: Vec<Wait> = Vec::new();
        let mut rank = stuck;
        loop {
            if let Some(start) = waits.iter().position(|wait| wait.rank == rank) {
                return waits.split_off(start);
            }
            let position = next[rank];
            let action = self.schedule.actions[rank].get(position).copied();
            let Some((action, (wanted, from))) = action.and_then(|action| Some((action, self.producer(action)?)))
            else {
                return waits;
            };
            waits.push(Wait { rank, position, action, wanted, from });
            rank = from;
        }
    }
}

/// The messages of each channel, in order. The sender's and the reader's must be the same.
fn channels(schedule: &PipelineSchedule) -> Result<Vec<ChannelOrder>, ScheduleError> {
    let mut sent: BTreeMap<Channel, Vec<Action>> = BTreeMap::new();
    for action in schedule.actions.iter().flatten() {
        if let Some(channel) = schedule.sends(*action) {
            sent.entry(channel).or_default().push(*action);
        }
    }
    let mut read: BTreeMap<Channel, usize> = BTreeMap::new();
    for actions in &schedule.actions {
        for (position, action) in actions.iter().enumerate() {
            let Some(channel) = schedule.receives(*action) else { continue };
            let number = read.entry(channel).or_default();
            let message = sent.get(&channel).and_then(|messages| messages.get(*number));
            if let Some(message) = message.filter(|message| message.micro_batch != action.micro_batch) {
                let wanted = Action { micro_batch: action.micro_batch, ..*message };
                let (sent, message) = (*message, *number);
                return Err(ScheduleError::ChannelOrder { channel, message, sent, wanted, position });
            }
            *number += 1;
        }
    }
    let numbers = |messages: Vec<Action>| messages.iter().map(|action| action.micro_batch).collect();
    Ok(sent.into_iter().map(|(channel, sent)| ChannelOrder { channel, micro_batches: numbers(sent) }).collect())
}
