//! The best layout of a job on a cluster, found exactly: every candidate is either ruled out by memory, or by a bound of its
//! time, or timed; the fastest are simulated.
//!
//! | file | what it is |
//! |---|---|
//! | [`candidate`] | a layout, and how a job file writes it |
//! | [`space`] | all candidates |
//! | `samples` | a rank's work on micro-batches of any size |
//! | [`rank`] | the search: memory first, then bounds from below, then the time, then the simulation |
//! | [`parallel`] | work on many items, on all cores |
//! | [`explain`] | why the runner-up lost, and which resource binds |
//! | [`changes`] | what would help most, by the same model |
//! | [`fitting`] | layouts near one that does not fit, which do |
//!
//! A layout that is named was accepted by whoever trains with it ([`LayoutModels::accepts`]).

pub mod candidate;
pub mod changes;
pub mod explain;
pub mod fitting;
pub mod parallel;
pub mod rank;
mod samples;
pub mod space;
#[cfg(test)]
mod tests;

pub use candidate::{Candidate, LayerChoices};
pub use kolo_parallel::keys::SequenceSplit;
pub use rank::{Limits, NearMiss, Ranked, SearchResult, search};
pub use space::SearchSpace;

use crate::cluster::Cluster;
use crate::step_model::{DeviceMemory, StepModel, StepTimes};

/// Who knows the job.
pub trait LayoutModels: Sync {
    /// The model of a candidate's step on a cluster. An error says why the job cannot be laid out so.
    fn model(&self, candidate: &Candidate, cluster: &Cluster) -> Result<StepModel, String>;

    /// Called once with all candidates of a search: what they have in common can be found on all cores.
    fn prepare(&self, _candidates: &[Candidate]) {}

    /// What the rank that holds the most holds, as [`model`](Self::model) says it; whoever can say it without the model does.
    fn memory(&self, candidate: &Candidate, cluster: &Cluster) -> Result<DeviceMemory, String> {
        Ok(self.model(candidate, cluster)?.largest().map(|role| role.memory).unwrap_or_default())
    }

    /// A candidate in which nothing is computed again, with what its layers have to compute again to take at most so many bytes of every
    /// rank, in the least time. `None` if there is no such choice that is not the same for all layers.
    fn fitted(&self, _candidate: &Candidate, _cluster: &Cluster, _memory: f64) -> Option<Candidate> {
        None
    }

    /// Seconds that a candidate's step takes at least, known without its model.
    fn least_seconds(&self, _candidate: &Candidate, _cluster: &Cluster) -> f64 {
        0.0
    }

    /// How long a step takes, and its parts; `None` if its pipeline has no schedule.
    fn times(&self, model: &StepModel) -> Option<StepTimes> {
        model.times().ok()
    }

    /// Whether training takes this layout, asked of the few that would be named.
    fn accepts(&self, candidate: &Candidate) -> Result<(), String>;
}
