//! How a collective fails. Every fault names the rank and the call, and says what to do.

use crate::call::Fingerprint;

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// Two ranks made different calls at the same place.
    #[error(
        "ranks disagree: {} called {mine}; {} called {theirs}\n  hint: all ranks must make the same calls in the same order with the same sizes",
        rank_name(*rank, host), rank_name(*peer, peer_host)
    )]
    Mismatch {
        rank: usize,
        host: String,
        mine: Box<Fingerprint>,
        peer: usize,
        peer_host: String,
        theirs: Box<Fingerprint>,
    },
    /// A peer is gone.
    #[error("{} was lost during {during}: {why}\n  hint: its log may say why, or the system's (dmesg) if memory ran out", rank_name(*peer, host))]
    Lost { peer: usize, host: String, during: String, why: String },
    /// A call took longer than the deadline.
    #[error("{} did not reach {during} within {waited_ms} ms\n  hint: that rank is stuck or far slower than the others; its log says where it is", rank_name(*peer, host))]
    Stalled { peer: usize, host: String, during: String, waited_ms: u64 },
    /// A peer told that it failed, for a reason of its own.
    #[error("{} failed: {why}", rank_name(*peer, host))]
    Failed { peer: usize, host: String, why: String },
    /// The job was ended from outside this rank; the text is the coordinator's.
    #[error("{0}")]
    Aborted(String),
    /// The workers of an elastic job form a new group: what this one had under way has no meaning any more.
    #[error("the workers of the job regroup as generation {generation}")]
    Regroup { generation: u32 },
    /// Something unauthentic or malformed came over a link.
    #[error(
        "a message from {from} was rejected: {why}\n  hint: something other than this job uses its connections, or a link corrupts data"
    )]
    Rejected { from: String, why: String },
    /// The caller's arguments make no sense.
    #[error("{0}")]
    BadCall(String),
    /// The operating system refused.
    #[error("{what}: {error}")]
    System { what: String, error: String },
}

/// `rank 3 on node7`.
pub fn rank_name(rank: usize, host: &str) -> String {
    if host.is_empty() { format!("rank {rank}") } else { format!("rank {rank} on {host}") }
}

impl Fault {
    /// The system refused; with a hint where a limit of it was reached.
    pub fn system(what: impl Into<String>, error: &std::io::Error) -> Self {
        if let Some(hint) = kolo_base::open_files_hint(error) {
            return Self::hinted(what, error, &format!("{hint}, or use fewer workers"));
        }
        let hint = match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => "free some space there, or write elsewhere",
            _ => "",
        };
        Self::hinted(what, error, hint)
    }

    /// The system refused a thread or a process.
    pub fn thread(what: impl Into<String>, error: &std::io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::ENOMEM) => {
                let hint = "raise the limit on processes and threads (`ulimit -u`), or use fewer workers or --threads";
                Self::hinted(what, error, hint)
            }
            _ => Self::system(what, error),
        }
    }

    fn hinted(what: impl Into<String>, error: &std::io::Error, hint: &str) -> Self {
        let error = if hint.is_empty() { error.to_string() } else { format!("{error}\n  hint: {hint}") };
        Fault::System { what: what.into(), error }
    }

    /// Whether an elastic job goes on after it, with the workers that are left.
    pub fn is_survivable(&self) -> bool {
        matches!(self, Fault::Lost { .. } | Fault::Stalled { .. } | Fault::Failed { .. } | Fault::Regroup { .. })
    }

    /// The rank that is to blame, if the fault names one.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Fault::Mismatch { peer, .. }
            | Fault::Lost { peer, .. }
            | Fault::Stalled { peer, .. }
            | Fault::Failed { peer, .. } => Some(*peer),
            _ => None,
        }
    }
}
