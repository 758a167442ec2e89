//! What the coordinator of an elastic job knows of one worker: a process, whatever rank it has or had.

use crate::compute::HostLoad;
use crate::deadlines::Deadlines;
use crate::membership::detect::{silent_because, silent_ms};
use crate::message::Hello;
use crate::rank_state::Exit;

#[derive(Clone, Debug)]
pub(super) struct WorkerState {
    /// Its link and how it introduced itself, once it has.
    pub link: Option<usize>,
    pub hello: Option<Hello>,
    /// Where it runs or is to run.
    pub host: String,
    /// The generation it is ready for.
    pub ready: Option<u32>,
    /// How far its state has come, if it has any.
    pub position: Option<u64>,
    /// Others went on without it, so that its state is old.
    pub stale: bool,
    /// The step of its last sign of life, as far as it is known.
    pub step: u64,
    /// A signal that asks it to end was passed on to it.
    pub asked: bool,
    pub heard_ms: u64,
    /// When its process was started, or its link came.
    pub started_ms: u64,
    /// When its process was last seen to compute, and how crowded its host was.
    pub computed_ms: Option<u64>,
    pub load: HostLoad,
    pub stopped_ms: Option<u64>,
    pub closed_ms: Option<u64>,
    pub exit: Option<Exit>,
    /// When it was given up. From then on it has no part in the job.
    pub lost_ms: Option<u64>,
    /// Its link had been closed by then, and not by us.
    pub left: bool,
    /// When its process is to be started again.
    pub restart_ms: Option<u64>,
    /// Whether somebody sees its process, and can end it.
    pub launched: bool,
}

impl WorkerState {
    pub fn new(host: String, launched: bool, now_ms: u64) -> Self {
        Self {
            link: None,
            hello: None,
            host,
            ready: None,
            position: None,
            stale: false,
            step: 0,
            asked: false,
            heard_ms: now_ms,
            started_ms: now_ms,
            computed_ms: None,
            load: HostLoad::default(),
            stopped_ms: None,
            closed_ms: None,
            exit: None,
            lost_ms: None,
            left: false,
            restart_ms: None,
            launched,
        }
    }

    /// Whether it has a part in the job, or may have one soon.
    pub fn is_here(&self) -> bool {
        self.lost_ms.is_none() && self.exit.is_none()
    }

    pub fn is_connected(&self) -> bool {
        self.is_here() && self.link.is_some() && self.closed_ms.is_none()
    }

    /// Whether nothing of it is left: its process, or all that can be seen of it.
    pub fn is_gone(&self) -> bool {
        if self.launched { self.exit.is_some() } else { self.link.is_none() || self.closed_ms.is_some() }
    }

    /// Whether a lost one can do no more harm: its process is gone, or it has given up a coordinator that it does not hear.
    pub fn is_fenced(&self, now_ms: u64, deadlines: Deadlines) -> bool {
        let Some(lost_ms) = self.lost_ms else { return true };
        let lease_ms = deadlines.orphan_ms() + deadlines.grace_ms() + deadlines.beat_ms();
        let left = if self.launched { self.exit.is_some() } else { self.left };
        left || now_ms >= lost_ms + lease_ms
    }

    /// When it counts as lost if it stays as it is.
    pub fn silent_ms(&self, deadlines: Deadlines, join_ms: u64) -> u64 {
        match (self.stopped_ms, self.closed_ms, self.link) {
            (Some(since_ms), _, _) => since_ms + deadlines.stopped_ms(),
            // The end of its process, if somebody sees it, says more.
            (None, Some(since_ms), _) if self.launched => since_ms + deadlines.exit_ms(),
            (None, Some(since_ms), _) => since_ms,
            (None, None, Some(_)) => silent_ms(deadlines, self.heard_ms, self.computed_ms),
            (None, None, None) => self.started_ms + join_ms,
        }
    }

    pub fn silent_because(&self, deadlines: Deadlines, join_ms: u64) -> String {
        match (self.stopped_ms, self.closed_ms, self.link) {
            (Some(_), _, _) => format!("its process was stopped for {} ms", deadlines.stopped_ms()),
            (None, Some(_), _) => "it closed its control link".into(),
            (None, None, Some(_)) => silent_because(deadlines, self.heard_ms, self.computed_ms, self.load),
            (None, None, None) => format!("it did not join within {join_ms} ms"),
        }
    }
}
