//! Saving what a run has learnt, and going on from it.
//!
//! After a step that is due, each rank copies its share of the state while the next step computes, and a thread of its own
//! writes the copy. When all ranks have written, the first one writes the manifest and makes the checkpoint visible. Nobody
//! waits but for the copy, and that only where the next update would change what is copied.
//!
//! A tensor that several ranks hold is written by one of them: shares are balanced by bytes, from a list that all ranks see.

mod restore;
mod rule;
mod saver;
mod share;
mod start;

pub(crate) use restore::DataRecord;
pub use restore::{Resumed, TrainerRecord, newest};
pub use rule::{Every, SavingRule};
pub(crate) use saver::{Gate, Handover, Saver};
pub use share::copied_bytes;
pub use start::StartWeights;

use crate::error::Error;
use crate::together;
use kolo_comm::Communicator;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Where checkpoints go, and what is written into them beside the state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointDir {
    /// Holds a directory for each checkpoint.
    pub root: PathBuf,
    /// The user asked for it: if the last state cannot be saved, the run fails. Otherwise it says so and ends well.
    pub required: bool,
    /// The job file with all overrides, from which the model can be built again.
    pub job_text: String,
    /// Go on from the newest checkpoint, if there is one.
    pub resume: bool,
}

impl CheckpointDir {
    /// What the first rank says, as only it may know where the run's files go. All ranks call it together.
    pub(crate) fn of_first(mine: Option<&Self>, world: Option<&Communicator>) -> Result<Option<Self>, Error> {
        let text = serde_json::to_vec(&mine).map_err(|error| Error::bug(&error))?;
        let all = together::gather_bytes(world, &text)?;
        serde_json::from_slice(&all[0]).map_err(|error| Error::bug(&error))
    }
}

/// The directory of checkpoints inside a run's.
pub const CHECKPOINTS: &str = "checkpoints";
/// The job file inside a run's directory.
pub const JOB_FILE: &str = "job.toml";
