//! What the membership is told, what it decides, and its verdict on the job.

use crate::compute::HostLoad;
use crate::rank_state::Exit;
use kolo_comm::Fault;
use kolo_comm::watch::Activity;

#[derive(Clone, Debug, PartialEq)]
pub enum MembershipEvent {
    Joined {
        rank: usize,
        host: String,
    },
    Heartbeat {
        rank: usize,
        activity: Activity,
    },
    /// A rank gives up; `culprit` is the rank it blames.
    Failed {
        rank: usize,
        text: String,
        culprit: Option<usize>,
    },
    Finished {
        rank: usize,
    },
    /// Its link is closed.
    Closed {
        rank: usize,
    },
    /// Its process is gone.
    Exited {
        rank: usize,
        exit: Exit,
    },
    /// Its process was stopped by a signal.
    Stopped {
        rank: usize,
    },
    Continued {
        rank: usize,
    },
    /// Its process has computed since this was last said; its host's load.
    Computed {
        rank: usize,
        load: HostLoad,
    },
    /// Its process cannot be reached or watched any more.
    Trouble {
        rank: usize,
        why: String,
    },
    /// A rank has given up the coordinator, which was silent for too long; `shown` if it has shown that to the user.
    GivenUp {
        rank: usize,
        text: String,
        shown: bool,
    },
    /// A fault found elsewhere.
    Fault(Fault),
    /// Somebody asks the job to end.
    Interrupt {
        signal: i32,
    },
    Tick,
}

#[derive(Clone, Debug, PartialEq)]
pub enum MembershipAction {
    /// Pass a signal on to a rank.
    Signal { rank: usize, signal: i32 },
    /// Tell everyone to end.
    Abort { text: String },
    /// End this rank by force.
    Kill { rank: usize },
    /// All have finished: let them go.
    Release,
    /// The job is over.
    Ended(Verdict),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// 0 only if all ended well.
    pub exit_code: i32,
    pub fault: Option<Fault>,
    /// The rank whose log tells more.
    pub culprit: Option<usize>,
    /// Who reported it, and at which step that was, where the fault itself does not say.
    pub reported_by: Option<String>,
    pub interrupted: Option<i32>,
    /// Ranks that may still be running.
    pub left: Vec<usize>,
}

impl Verdict {
    /// Why the job did not end well: what happened, where, and a hint.
    pub fn text(&self) -> Option<String> {
        let text = self.fault.as_ref()?.to_string();
        Some(match (&self.reported_by, text.split_once('\n')) {
            (None, _) => text,
            (Some(reported_by), None) => format!("{text}\n  {reported_by}"),
            (Some(reported_by), Some((what, hint))) => format!("{what}\n  {reported_by}\n{hint}"),
        })
    }
}
