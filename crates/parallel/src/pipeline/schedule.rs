//! The data: actions of ranks, the placement of stages, and the channels that follow from both.

use super::error::ScheduleError;
use std::fmt;

/// The most ranks along the axis `pipeline`.
pub const RANKS_MAX: usize = 1024;
/// The most pairs of a stage and a micro-batch, which bounds the memory and the time of everything here.
pub const CELLS_MAX: usize = 1 << 18;

/// What an action computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ActionKind {
    /// The forward pass of a stage. It keeps what the backward pass reads.
    Forward,
    /// The whole backward pass of a stage: the gradients of its input and of its weights.
    Backward,
    /// The gradient of a stage's input only, which the stage before waits for.
    BackwardInput,
    /// The gradient of a stage's weights only, any time after [`BackwardInput`](Self::BackwardInput).
    BackwardWeight,
}

impl ActionKind {
    pub const ALL: [Self; 4] = [Self::Forward, Self::Backward, Self::BackwardInput, Self::BackwardWeight];

    /// The letter of the text form.
    pub fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Backward => 'B',
            Self::BackwardInput => 'I',
            Self::BackwardWeight => 'W',
        }
    }

    /// The kind with this letter.
    pub fn from_letter(letter: char) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.letter() == letter)
    }

    /// Whether the activations that the forward pass kept are free after this.
    pub fn releases(self) -> bool {
        matches!(self, Self::Backward | Self::BackwardWeight)
    }

    /// The pass whose values this action reads and makes; `None` if it only adds to the gradients of weights.
    pub fn pass(self) -> Option<Pass> {
        match self {
            Self::Forward => Some(Pass::Forward),
            Self::Backward | Self::BackwardInput => Some(Pass::Backward),
            Self::BackwardWeight => None,
        }
    }
}

/// One piece of work of a rank: a stage on a micro-batch. Its text is `F2.5`: kind, stage, micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Action {
    pub kind: ActionKind,
    pub stage: usize,
    pub micro_batch: usize,
}

impl Action {
    pub fn new(kind: ActionKind, stage: usize, micro_batch: usize) -> Self {
        Self { kind, stage, micro_batch }
    }

    pub fn forward(stage: usize, micro_batch: usize) -> Self {
        Self::new(ActionKind::Forward, stage, micro_batch)
    }

    pub fn backward(stage: usize, micro_batch: usize) -> Self {
        Self::new(ActionKind::Backward, stage, micro_batch)
    }

    pub fn input(stage: usize, micro_batch: usize) -> Self {
        Self::new(ActionKind::BackwardInput, stage, micro_batch)
    }

    pub fn weight(stage: usize, micro_batch: usize) -> Self {
        Self::new(ActionKind::BackwardWeight, stage, micro_batch)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}.{}", self.kind.letter(), self.stage, self.micro_batch)
    }
}

/// Which of the two replicas of the model a micro-batch passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    Down,
    Up,
}

/// Which rank runs which stage.
///
/// With one direction every stage lies on one rank. With two, each stage has a rank for micro-batches that go down and one for
/// those that go up; both hold its weights, and the gradients of both are added to one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagePlacement {
    /// The rank of each stage, for micro-batches that go down.
    pub down: Vec<usize>,
    /// The same for those that go up; `None` if all go down.
    pub up: Option<Vec<usize>>,
    /// The direction of each micro-batch.
    pub directions: Vec<Direction>,
}

impl StagePlacement {
    /// Stage `s` lies on rank `s` modulo `ranks`, and all micro-batches go down.
    pub fn round_robin(ranks: usize, stages: usize, micro_batches: usize) -> Self {
        let down = (0..stages).map(|stage| stage % ranks.max(1)).collect();
        Self { down, up: None, directions: vec![Direction::Down; micro_batches] }
    }

    /// Stage `s` lies on rank `s` on the way down and on the opposite rank on the way up. The first half of the micro-batches goes
    /// down: each half is a subtree of the sum over grains.
    pub fn bidirectional(ranks: usize, micro_batches: usize) -> Self {
        let direction = |number| if number < micro_batches.div_ceil(2) { Direction::Down } else { Direction::Up };
        Self {
            down: (0..ranks).collect(),
            up: Some((0..ranks).rev().collect()),
            directions: (0..micro_batches).map(direction).collect(),
        }
    }
}

/// Which way a message goes through the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pass {
    /// Activations, to the rank of the next stage.
    Forward,
    /// Gradients of activations, to the rank of the stage before.
    Backward,
}

/// Messages of one sending stage between two ranks in one pass. They arrive in the order in which they were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Channel {
    pub from: usize,
    pub to: usize,
    pub pass: Pass,
    /// The stage that sends.
    pub stage: usize,
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.pass == Pass::Forward { "activations" } else { "gradients" };
        write!(f, "{what} of stage {} from rank {} to rank {}", self.stage, self.from, self.to)
    }
}

/// What every rank of a pipeline does, in order.
///
/// The fields can hold anything. [`verify`](super::verify()) says whether it is a schedule; the methods here need
/// [`check_sizes`](Self::check_sizes) to have passed, and numbers in range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineSchedule {
    /// Ranks along the axis `pipeline`.
    pub ranks: usize,
    /// Parts of the model, in the order of the forward pass.
    pub stages: usize,
    /// Micro-batches of one step: the grains of a data-parallel rank.
    pub micro_batches: usize,
    pub placement: StagePlacement,
    /// The actions of each rank, in the order in which it runs them.
    pub actions: Vec<Vec<Action>>,
}

impl PipelineSchedule {
    /// The rank that runs a stage on a micro-batch.
    pub fn rank_of(&self, stage: usize, micro_batch: usize) -> usize {
        match (&self.placement.up, self.placement.directions[micro_batch]) {
            (Some(up), Direction::Up) => up[stage],
            _ => self.placement.down[stage],
        }
    }

    /// The ranks that hold a stage's weights, ascending: one, or two whose gradients are added.
    pub fn holders(&self, stage: usize) -> Vec<usize> {
        let up = self.placement.up.iter().map(|up| up[stage]);
        let mut holders: Vec<usize> = up.chain([self.placement.down[stage]]).collect();
        holders.sort_unstable();
        holders.dedup();
        holders
    }

    /// The stages whose weights a rank holds, ascending.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        (0..self.stages).filter(|stage| self.holders(*stage).contains(&rank)).collect()
    }

    /// The most activations that each rank keeps at a time, of all its stages together.
    pub fn rank_peaks(&self) -> Vec<usize> {
        let peak = |actions: &Vec<Action>| {
            let (mut kept, mut most) = (0usize, 0);
            for action in actions {
                kept += usize::from(action.kind == ActionKind::Forward);
                most = most.max(kept);
                kept = kept.saturating_sub(usize::from(action.kind.releases()));
            }
            most
        };
        self.actions.iter().map(peak).collect()
    }

    /// The stage whose value an action reads, from this rank or another; `None` where the model begins or ends.
    fn source(&self, action: Action) -> Option<(Pass, usize)> {
        match action.kind.pass()? {
            Pass::Forward => Some((Pass::Forward, action.stage.checked_sub(1)?)),
            Pass::Backward => Some((Pass::Backward, action.stage + 1)).filter(|(_, stage)| *stage < self.stages),
        }
    }

    /// The pass and the stage that an action waits for, with the rank that runs it for this micro-batch.
    pub fn waits_for(&self, action: Action) -> Option<(Pass, usize, usize)> {
        let (pass, stage) = self.source(action)?;
        Some((pass, stage, self.rank_of(stage, action.micro_batch)))
    }

    /// The channel from which an action receives; `None` if what it reads was made on its rank.
    pub fn receives(&self, action: Action) -> Option<Channel> {
        let (pass, stage, from) = self.waits_for(action)?;
        let to = self.rank_of(action.stage, action.micro_batch);
        (from != to).then_some(Channel { from, to, pass, stage })
    }

    /// The channel into which an action sends its result; `None` if nobody or its own rank reads it.
    pub fn sends(&self, action: Action) -> Option<Channel> {
        let pass = action.kind.pass()?;
        let reader = match pass {
            Pass::Forward => Some(action.stage + 1).filter(|stage| *stage < self.stages)?,
            Pass::Backward => action.stage.checked_sub(1)?,
        };
        let from = self.rank_of(action.stage, action.micro_batch);
        let to = self.rank_of(reader, action.micro_batch);
        (from != to).then_some(Channel { from, to, pass, stage: action.stage })
    }

    /// Whether the numbers fit together: limits, lengths and ranges of the placement, a stage for every rank.
    pub fn check_sizes(&self) -> Result<(), ScheduleError> {
        check_counts(self.ranks, self.stages, self.micro_batches)?;
        let Self { placement, .. } = self;
        let (lists, directions) = (self.actions.len(), placement.directions.len());
        if lists != self.ranks {
            let message = format!("{} ranks have {lists} lists of actions", self.ranks);
            return Err(ScheduleError::size(message, "give each rank one list".into()));
        }
        if directions != self.micro_batches {
            let message = format!("{} micro-batches have {directions} directions", self.micro_batches);
            return Err(ScheduleError::size(message, "give each micro-batch one direction".into()));
        }
        for (name, ranks) in [("down", Some(&placement.down)), ("up", placement.up.as_ref())] {
            if let Some(ranks) = ranks {
                self.check_direction(name, ranks)?;
            }
        }
        if placement.up.is_none() && placement.directions.contains(&Direction::Up) {
            let message = "a micro-batch goes up, but stages have no rank for that direction".into();
            return Err(ScheduleError::size(message, "give the placement of that direction".into()));
        }
        let mut holds = vec![false; self.ranks];
        placement.down.iter().chain(placement.up.iter().flatten()).for_each(|rank| holds[*rank] = true);
        match holds.iter().position(|holds| !holds) {
            Some(rank) => Err(ScheduleError::size(
                format!("rank {rank} has no stage"),
                "place a stage on every rank, or use fewer ranks".into(),
            )),
            None => Ok(()),
        }
    }

    fn check_direction(&self, name: &str, ranks: &[usize]) -> Result<(), ScheduleError> {
        if ranks.len() != self.stages {
            let message = format!("the placement {name} names {} ranks for {} stages", ranks.len(), self.stages);
            return Err(ScheduleError::size(message, "name one rank for every stage".into()));
        }
        match ranks.iter().enumerate().find(|(_, rank)| **rank >= self.ranks) {
            Some((stage, rank)) => Err(ScheduleError::size(
                format!("the placement {name} puts stage {stage} on rank {rank}"),
                format!("ranks are 0 to {}", self.ranks - 1),
            )),
            None => Ok(()),
        }
    }
}

/// Whether so many ranks, stages and micro-batches are within the limits.
pub(super) fn check_counts(ranks: usize, stages: usize, micro_batches: usize) -> Result<(), ScheduleError> {
    for (count, what) in [(ranks, "ranks"), (stages, "stages"), (micro_batches, "micro-batches")] {
        if count == 0 {
            return Err(ScheduleError::size(format!("a schedule needs {what}"), format!("{what} are 1 or more")));
        }
    }
    if ranks > RANKS_MAX {
        let message = format!("{ranks} ranks are too many for one pipeline");
        return Err(ScheduleError::size(message, format!("at most {RANKS_MAX}")));
    }
    if stages.checked_mul(micro_batches).is_none_or(|cells| cells > CELLS_MAX) {
        let message = format!("{stages} stages of {micro_batches} micro-batches are too many");
        return Err(ScheduleError::size(message, format!("stages times micro-batches are at most {CELLS_MAX}")));
    }
    Ok(())
}
