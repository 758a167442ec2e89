//! What the coordinator knows of one rank, and how it says so.

use crate::compute::HostLoad;
use kolo_comm::call::Fingerprint;
use kolo_comm::fault::rank_name;
use kolo_comm::watch::Activity;
use std::fmt;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signal(i32),
    /// Nobody can tell, as with a host that is gone.
    Unknown,
}

/// The number of the communicator of all ranks; only its calls can be compared between any two ranks.
const WORLD_COMMUNICATOR: u32 = 0;

#[derive(Clone, Debug)]
pub struct RankState {
    pub rank: usize,
    pub host: String,
    pub joined: bool,
    /// When its last heartbeat came.
    pub heard_ms: u64,
    /// When its count of progress last changed, and the furthest step of any rank then.
    pub moved_ms: u64,
    pub furthest: u64,
    pub activity: Activity,
    /// When `activity` was heard.
    pub spoke_ms: u64,
    /// When it was at which step: two moments, at least a heartbeat apart.
    pub marks: [(u64, u64); 2],
    /// When its process was last seen to compute, by whoever started it, and how crowded its host was.
    pub computed_ms: Option<u64>,
    pub load: HostLoad,
    /// Since when its process is stopped.
    pub stopped_ms: Option<u64>,
    pub finished: bool,
    /// It told why it gives up; its end needs no other explanation.
    pub reported: bool,
    pub closed: bool,
    pub exit: Option<Exit>,
}

/// A rank that is behind the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lag {
    pub rank: usize,
    pub host: String,
    pub step: u64,
    /// Steps behind the first.
    pub behind: u64,
}

impl fmt::Display for Lag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let who = rank_name(self.rank, &self.host);
        let steps = if self.behind == 1 { "step" } else { "steps" };
        write!(f, "{who} is at step {}, {} {steps} behind", self.step, self.behind)
    }
}

/// Decides when a rank that is behind is worth a word: once, and only if it stays behind. Until it is known that nobody
/// is silent, it may only wait for one who is gone.
#[derive(Debug, Default)]
pub struct Laggard {
    /// The rank, since when, and whether it was told.
    slow: Option<(usize, u64, bool)>,
}

impl Laggard {
    pub fn tell(&mut self, now_ms: u64, patience_ms: u64, lag: Option<Lag>) -> Option<Lag> {
        let Some(lag) = lag else {
            self.slow = None;
            return None;
        };
        let (rank, since_ms, told) = self.slow.filter(|slow| slow.0 == lag.rank).unwrap_or((lag.rank, now_ms, false));
        let due = now_ms >= since_ms + patience_ms;
        self.slow = Some((rank, since_ms, told || due));
        (due && !told).then_some(lag)
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exit::Code(101) => write!(f, "it panicked (exit code 101)"),
            Exit::Code(code) => write!(f, "it exited with code {code}"),
            Exit::Signal(libc::SIGKILL) => {
                write!(f, "it was killed by signal 9 (SIGKILL), by a user or because memory ran out")
            }
            Exit::Signal(signal) => write!(f, "it was killed by signal {signal} ({})", signal_name(*signal)),
            Exit::Unknown => write!(f, "how it ended is unknown"),
        }
    }
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGTERM => "SIGTERM",
        libc::SIGXCPU => "SIGXCPU",
        _ => "see `kill -l`",
    }
}

impl RankState {
    pub fn new(rank: usize, now_ms: u64) -> Self {
        Self {
            rank,
            host: String::new(),
            joined: false,
            heard_ms: now_ms,
            moved_ms: now_ms,
            furthest: 0,
            activity: Activity { step: 0, progress: 0, call: None, in_call: false, waits: false },
            spoke_ms: now_ms,
            marks: [(now_ms, 0); 2],
            computed_ms: None,
            load: HostLoad::default(),
            stopped_ms: None,
            finished: false,
            reported: false,
            closed: false,
            exit: None,
        }
    }

    pub fn name(&self) -> String {
        rank_name(self.rank, &self.host)
    }

    /// Where it was last: `step 12, all_reduce(sum) of 1024 f32 "bucket 3", call 17`.
    pub fn during(&self) -> String {
        let step = self.activity.step;
        match (self.joined, &self.activity.call) {
            (false, _) => "its start".into(),
            _ if self.finished => format!("its end after step {step}"),
            (true, Some(call)) if self.activity.in_call => format!("step {step}, {call}"),
            (true, Some(call)) => format!("step {step}, after {call}"),
            (true, None) => format!("step {step}, before its first call"),
        }
    }

    /// Where it says it is now.
    pub fn hear(&mut self, now_ms: u64, activity: Activity, furthest: u64, heartbeat_ms: u64) {
        self.heard_ms = now_ms;
        if activity.progress != self.activity.progress || activity.step != self.activity.step {
            (self.moved_ms, self.furthest) = (now_ms, furthest.max(activity.step));
        }
        if now_ms >= self.marks[1].0 + heartbeat_ms {
            self.marks = [self.marks[1], (now_ms, activity.step)];
        }
        (self.spoke_ms, self.activity) = (now_ms, activity);
    }

    /// Its last call, if it can be compared with those of other ranks. Messages count per pair, and communicators of one
    /// split share a number.
    pub fn world_call(&self) -> Option<&Fingerprint> {
        self.activity.call.as_ref().filter(|call| call.communicator == WORLD_COMMUNICATOR && !call.kind.is_message())
    }

    /// Time that passed without anybody watching counts for nobody; silence is forgiven up to this moment, and whole stops
    /// if `stops`.
    pub fn forgive(&mut self, absent_ms: u64, latest_ms: u64, stops: bool) {
        self.heard_ms = self.heard_ms.max((self.heard_ms + absent_ms).min(latest_ms));
        self.stopped_ms = self.stopped_ms.map(|since_ms| if stops { since_ms + absent_ms } else { since_ms });
        self.moved_ms += absent_ms;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_stays_behind_is_told_once() {
        let mut laggard = Laggard::default();
        let lag = |rank: usize| Some(Lag { rank, host: "a".into(), step: 7, behind: 3 });
        let mut tell = |now_ms: u64, lag: Option<Lag>| laggard.tell(now_ms, 2000, lag).map(|lag| lag.rank);
        assert_eq!([tell(0, lag(1)), tell(1000, lag(1)), tell(1500, None)], [None; 3], "it caught up");
        assert_eq!([tell(2000, lag(1)), tell(3000, lag(2)), tell(4000, lag(1))], [None; 3], "they take turns");
        assert_eq!([tell(6000, lag(1)), tell(9000, lag(1))], [Some(1), None]);
        assert_eq!([tell(9500, None), tell(10_000, lag(1)), tell(12_000, lag(1))], [None, None, Some(1)], "again");
    }
}
