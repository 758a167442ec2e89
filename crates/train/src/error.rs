//! What can go wrong with a job. Each error says what, where, and what to do.

use kolo_graph::GraphError;
use kolo_graph::settings::SettingError;

#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The job file or a flag is wrong.
    #[error("{0}")]
    Setting(#[from] SettingError),
    /// The model cannot be built with these settings.
    #[error("the model cannot be built: {0}")]
    Graph(#[from] GraphError),
    /// The loss stopped being a number.
    #[error(
        "the loss is {loss} at step {step} (epoch {epoch}), and the weights were left as they were before it\n  \
         first not finite: {culprit}\n  hint: {hint}"
    )]
    NotFinite { loss: f32, step: usize, epoch: usize, culprit: String, hint: String },
    /// A file could not be written.
    #[error("{path}: {message}\n  hint: choose another --out directory or make room there")]
    Write { path: String, message: String },
}

impl Error {
    /// Whether the command was wrong, as opposed to the job failing.
    pub fn is_usage(&self) -> bool {
        matches!(self, Error::Setting(_) | Error::Graph(_))
    }
}
