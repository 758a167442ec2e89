//! The best layout of a job on a cluster, found exactly: every candidate is either ruled out by memory, or by a bound of its
//! time, or timed; the fastest are simulated.
//!
//! | file | what it is |
//! |---|---|
//! | [`candidate`] | a layout, and how a job file writes it |
//! | [`space`] | all candidates |
//! | `samples` | a rank's work on micro-batches of any size |
//! | [`rank`] | the search: memory first, then a bound from below, then the time, then the simulation |
//! | [`explain`] | why the runner-up lost, and which resource binds |
//! | [`changes`] | what would help most, by the same model |
//!
//! A layout that is named was accepted by whoever trains with it ([`LayoutModels::accepts`]).

pub mod candidate;
pub mod changes;
pub mod explain;
pub mod rank;
mod samples;
pub mod space;
#[cfg(test)]
mod tests;

pub use candidate::{Candidate, Sequence};
pub use rank::{Limits, NearMiss, Ranked, SearchResult, search};
pub use space::SearchSpace;

use crate::cluster::Cluster;
use crate::step_model::StepModel;

/// Who knows the job.
pub trait LayoutModels: Sync {
    /// The model of a candidate's step on a cluster. An error says why the job cannot be laid out so.
    fn model(&self, candidate: &Candidate, cluster: &Cluster) -> Result<StepModel, String>;

    /// Bytes that some rank of a candidate needs at least, known without its model.
    fn memory_bound(&self, _candidate: &Candidate, _cluster: &Cluster) -> f64 {
        0.0
    }

    /// Whether training takes this layout, asked of the few that would be named.
    fn accepts(&self, candidate: &Candidate) -> Result<(), String>;
}
