//! When each action starts, for given durations, and the share of time in which ranks wait.
//!
//! A rank runs one action at a time, each as soon as what it reads has arrived. A message takes its time and nothing else: links are
//! never full. So the times are exact for this model, and a bound from below for real links.

use super::error::ScheduleError;
use super::schedule::{Action, ActionKind, Channel};
use super::verified::{Step, Verified};

/// How long the actions of a stage take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageDurations {
    pub forward: f64,
    /// The whole backward pass.
    pub backward: f64,
    /// The gradient of the input alone.
    pub input: f64,
    /// The gradient of the weights alone.
    pub weight: f64,
    /// A message of this stage to the rank of the next or of the one before.
    pub transfer: f64,
}

/// How long everything takes, all in one unit, which may be any.
#[derive(Clone, Debug, PartialEq)]
pub struct Durations {
    pub stages: Vec<StageDurations>,
}

impl Durations {
    /// The same for all stages.
    pub fn uniform(stages: usize, durations: StageDurations) -> Self {
        Self { stages: vec![durations; stages] }
    }

    /// As papers draw it: a forward pass takes 1, a backward pass 2, each of its halves 1, a message nothing.
    pub fn textbook(stages: usize) -> Self {
        let durations = StageDurations { forward: 1.0, backward: 2.0, input: 1.0, weight: 1.0, transfer: 0.0 };
        Self::uniform(stages, durations)
    }

    /// How long an action takes.
    pub fn of(&self, action: Action) -> f64 {
        let stage = &self.stages[action.stage];
        match action.kind {
            ActionKind::Forward => stage.forward,
            ActionKind::Backward => stage.backward,
            ActionKind::BackwardInput => stage.input,
            ActionKind::BackwardWeight => stage.weight,
        }
    }

    fn check(&self, stages: usize) -> Result<(), ScheduleError> {
        if self.stages.len() != stages {
            let message = format!("there are durations of {} stages for a schedule of {stages}", self.stages.len());
            return Err(ScheduleError::size(message, "give the durations of every stage".into()));
        }
        for (number, stage) in self.stages.iter().enumerate() {
            let StageDurations { forward, backward, input, weight, transfer } = *stage;
            let named = [
                ("forward pass", forward),
                ("backward pass", backward),
                ("input gradient", input),
                ("weight gradient", weight),
                ("transfer", transfer),
            ];
            if let Some((name, value)) = named.into_iter().find(|(_, value)| !(0.0..=DURATION_MAX).contains(value)) {
                let message = format!("the {name} of stage {number} cannot take {value}");
                return Err(ScheduleError::size(message, "durations are 0 or more, and finite".into()));
            }
        }
        Ok(())
    }
}

/// Large enough for any unit, and small enough for sums of all actions to be finite.
const DURATION_MAX: f64 = 1e200;

/// When every action starts and ends.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Start and end of each action of each rank, in the order of the schedule.
    pub spans: Vec<Vec<(f64, f64)>>,
    /// When the last action ends.
    pub total: f64,
}

impl Timeline {
    /// How long a rank works.
    pub fn busy(&self, rank: usize) -> f64 {
        self.spans[rank].iter().map(|(start, end)| end - start).sum()
    }

    /// The share of all ranks' time in which they wait: 0 if nothing takes any time.
    pub fn bubble_share(&self) -> f64 {
        let busy: f64 = (0..self.spans.len()).map(|rank| self.busy(rank)).sum();
        let all = self.total * self.spans.len() as f64;
        if all > 0.0 { (all - busy) / all } else { 0.0 }
    }
}

impl Verified {
    /// When every action starts and ends if all start as soon as they can.
    pub fn timeline(&self, durations: &Durations) -> Result<Timeline, ScheduleError> {
        let schedule = self.schedule();
        durations.check(schedule.stages)?;
        let mut spans: Vec<Vec<(f64, f64)>> =
            schedule.actions.iter().map(|list| Vec::with_capacity(list.len())).collect();
        // By pass, sending stage and micro-batch: a micro-batch goes one way, so no other message is like it.
        let message = |channel: Channel, micro_batch: usize| {
            (channel.pass as usize * schedule.stages + channel.stage) * schedule.micro_batches + micro_batch
        };
        let mut arrivals = vec![0.0; 2 * schedule.stages * schedule.micro_batches];
        for Step { rank, action, .. } in self.order() {
            // What the rank itself has made is there once its last action has ended.
            let free = spans[*rank].last().map_or(0.0, |(_, end)| *end);
            let arrived = schedule.receives(*action).map(|channel| arrivals[message(channel, action.micro_batch)]);
            let start = free.max(arrived.unwrap_or(0.0));
            let end = start + durations.of(*action);
            spans[*rank].push((start, end));
            if let Some(channel) = schedule.sends(*action) {
                arrivals[message(channel, action.micro_batch)] = end + durations.stages[action.stage].transfer;
            }
        }
        let total = spans.iter().filter_map(|spans| spans.last()).map(|(_, end)| *end).fold(0.0, f64::max);
        Ok(Timeline { spans, total })
    }
}
