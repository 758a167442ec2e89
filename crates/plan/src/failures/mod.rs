//! Weeks of training on a cluster whose parts fail: goodput, availability, and the best interval between checkpoints.
//!
//! | file | what it is |
//! |---|---|
//! | [`clock`] | when a part fails: exponential or Weibull times, drawn from a seed |
//! | [`run`] | a run of weeks, from failure to failure |
//! | [`interval`] | how often to save |
//!
//! The step itself was simulated or predicted before: here it is a speed. Nothing here knows of a job.

pub mod clock;
pub mod interval;
pub mod run;
#[cfg(test)]
mod tests;

pub use clock::{Clock, Part};
pub use interval::{BestInterval, IntervalBasis, best_interval, daly_interval};
pub use run::{LayoutSpeed, Period, PeriodKind, Recovery, RunOutcome, RunSpec, simulate_run};
