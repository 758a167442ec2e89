//! What can go wrong with a job. Each error says what, where, and what to do.

use kolo_comm::Fault;
use kolo_data::ReadError;
use kolo_exec::store::RestoreError;
use kolo_graph::GraphError;
use kolo_graph::settings::SettingError;
use kolo_parallel::strategy::Refusal;

#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The job file or a flag is wrong.
    #[error("{0}")]
    Setting(#[from] SettingError),
    /// The model cannot be built with these settings.
    #[error("the model cannot be built: {0}")]
    Graph(GraphError),
    /// The loss stopped being a number.
    #[error(
        "the loss is {loss} at step {step} (epoch {epoch}), and the weights were left as they were before it\n  \
         first not finite: {culprit}\n  hint: {hint}"
    )]
    NotFinite { loss: f32, step: usize, epoch: usize, culprit: String, hint: String },
    /// A sample could not be read; `when` says what that did to the run, if one began.
    #[error("{}{when}\n  hint: {}", error.what(), error.hint)]
    Data { when: String, error: ReadError },
    /// A part of the loss ignores targets, so that the loss is no mean over the batch.
    #[error(
        "{targets} targets of step {step} are ignored, but the loss is a formula of means over the counted ones: over \
         {grains} grains it would not be the mean of the batch\n  \
         hint: let the model return a sum and a count as its loss (`Mean::counted`), or write `data.grains = 1`"
    )]
    Ignored { targets: usize, step: usize, grains: usize },
    /// As [`Error::Ignored`], of an evaluation.
    #[error(
        "{targets} targets of the held-out samples {first}..{end} are ignored, but the loss or a metric is a formula of means \
         over the counted ones: over {batches} batches it would not be the mean of the held-out samples\n  \
         hint: let the model return a sum and a count for it (`Mean::counted`)"
    )]
    IgnoredInEvaluation { targets: usize, first: usize, end: usize, batches: usize },
    /// This many workers cannot share the job.
    #[error("{workers} workers {message}\n  hint: {hint}")]
    Workers { workers: usize, message: String, hint: String },
    /// Another rank found a number that is not finite, and reports it.
    #[error("the loss is not finite at step {step}; rank {rank} reports why")]
    ReportedElsewhere { step: usize, rank: usize },
    /// What was saved is not of this job.
    #[error("{0}")]
    Saved(#[from] RestoreError),
    /// A checkpoint could not be saved or read.
    #[error("{message}\n  hint: {hint}")]
    Checkpoint { message: String, hint: String },
    /// What was asked of a trained model does not go with it.
    #[error("{message}\n  hint: {hint}")]
    Unfit { message: String, hint: String },
    /// There is not enough memory.
    #[error("{0}")]
    Memory(String),
    /// Working together failed.
    #[error("{0}")]
    Together(Fault),
    /// An evaluation was interrupted, here or at another rank.
    #[error("the evaluation was interrupted")]
    Interrupted,
    /// The timeline could not be written.
    #[error(
        "{path}: {message}\n  hint: free space there, choose another file for --trace, or fewer steps with --trace-steps"
    )]
    Trace { path: String, message: String },
    /// A file could not be written.
    #[error("{path}: {message}\n  hint: choose another --out directory or free some space there")]
    Write { path: String, message: String },
}

impl Error {
    /// Something that cannot happen did.
    pub(crate) fn bug(error: &dyn std::error::Error) -> Self {
        Error::Checkpoint { message: error.to_string(), hint: "this is a bug; please report it".into() }
    }

    /// From a message that ends in its hint.
    pub fn checkpoint(message: &str) -> Self {
        let (message, hint) = message.split_once("\n  hint: ").unwrap_or((message, "check the directory"));
        Error::Checkpoint { message: message.into(), hint: hint.into() }
    }

    /// A strategy does not go with this many workers.
    pub(crate) fn workers(workers: usize, refusal: Refusal) -> Self {
        Error::Workers { workers, message: refusal.message, hint: refusal.hint }
    }
}

impl From<GraphError> for Error {
    fn from(error: GraphError) -> Self {
        Error::Graph(error.change_inputs("change the sizes under [model] or the data"))
    }
}

impl From<ReadError> for Error {
    fn from(error: ReadError) -> Self {
        Error::Data { when: String::new(), error }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Error::Together(fault)
    }
}

impl From<kolo_exec::ExchangeError> for Error {
    fn from(error: kolo_exec::ExchangeError) -> Self {
        let error = match error.downcast::<Fault>() {
            Ok(fault) => return Error::Together(*fault),
            Err(error) => error,
        };
        match error.downcast_ref::<std::io::Error>() {
            Some(refused) if refused.kind() == std::io::ErrorKind::OutOfMemory => Error::Memory(format!(
                "the system refused {refused}\n  hint: use fewer threads or a smaller `data.batch`, or raise the limit (`ulimit -v`)"
            )),
            Some(refused) => Error::Together(Fault::thread("starting a thread", refused)),
            None => Error::Together(Fault::BadCall(error.to_string())),
        }
    }
}

impl Error {
    /// The same, with where a run stood when a sample could not be read.
    pub(crate) fn when(self, text: impl FnOnce() -> String) -> Self {
        match self {
            Error::Data { error, .. } => Error::Data { when: format!("\n  {}", text()), error },
            other => other,
        }
    }

    /// Whether the command was wrong, as opposed to the job failing.
    pub fn is_usage(&self) -> bool {
        matches!(self, Error::Setting(_) | Error::Graph(_) | Error::Workers { .. } | Error::Unfit { .. })
    }

    /// The rank that is to blame, if it is another one: its own word says more.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Error::ReportedElsewhere { rank, .. } => Some(*rank),
            Error::Together(fault) => fault.culprit(),
            _ => None,
        }
    }
}
