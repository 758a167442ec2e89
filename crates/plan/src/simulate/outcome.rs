//! What a simulated step took, and what it was spent on.

/// Times of one unit, in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UnitTimes {
    pub compute: f64,
    /// Waiting for an exchange of each lane: communication that compute did not hide.
    pub exposed: Vec<f64>,
    /// Waiting for messages of other stages: the bubble of a pipeline, with the time of its messages.
    pub bubble: f64,
    /// When it was done.
    pub end: f64,
}

/// What a lane of a unit did in a while.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    pub unit: u32,
    /// The lane of an exchange; `None` for compute.
    pub lane: Option<u32>,
    pub name: u32,
    pub start: f64,
    pub end: f64,
    pub bytes: u64,
}

/// A simulated step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Until the last unit is done.
    pub seconds: f64,
    pub units: Vec<UnitTimes>,
    /// In the order of their ends, if they were asked for; at most [`SPANS_MAX`].
    pub spans: Vec<Span>,
    pub events: u64,
}

/// Spans that a simulation keeps.
pub const SPANS_MAX: usize = 1_000_000;

impl Outcome {
    /// Mean over all units, each weighted with the replicas that it stands for.
    pub fn mean(&self, weights: &[usize], value: impl Fn(&UnitTimes) -> f64) -> f64 {
        let per_replica = self.units.len() / weights.len().max(1);
        let weight = |unit: usize| weights.get(unit / per_replica.max(1)).copied().unwrap_or(1) as f64;
        let total: f64 = (0..self.units.len()).map(weight).sum();
        let sum: f64 = self.units.iter().enumerate().map(|(unit, times)| weight(unit) * value(times)).sum();
        if total > 0.0 { sum / total } else { 0.0 }
    }
}

/// Why a scenario did not end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimulationError {
    #[error("role {role} of replica {replica} waits for {what}, which never arrives")]
    Stuck { role: usize, replica: usize, what: String },
    #[error("{0}")]
    PipelineSchedule(String),
    #[error("the simulation has more than {0} events\n  hint: simulate fewer micro-batches, or leave out the noise")]
    TooLong(u64),
}
