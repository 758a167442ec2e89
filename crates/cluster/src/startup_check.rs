//! Decides from the ranks' heartbeat files whether a start can still succeed. Pure: see [`crate::startup_watch`].

use crate::rendezvous::{JOIN_HEARTBEATS, name_ranks};
use kolo_comm::Fault;
use std::collections::BTreeMap;

/// Heartbeats in which the count of a rank must grow, of one on another host too: network file systems look late.
const SILENT_HEARTBEATS: u64 = 3;
const SILENT_ELSEWHERE_HEARTBEATS: u64 = 15;
/// Heartbeats that the start may take as long as all ranks are seen to live, in units of those they have to come.
const SLOW_START: u64 = 5;
/// Heartbeats between two looks of a rank that looks seldom.
pub(crate) const LOOK_HEARTBEATS: u64 = 4;

/// What a look at a rank's file shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Observation {
    pub rank: usize,
    pub host: String,
    pub count: u64,
    /// What the operating system says of a process of this host.
    pub process: ProcessState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessState {
    Runs,
    Stopped,
    Ended,
    /// It is on another host.
    Unknown,
}

/// What is known of a rank.
#[derive(Clone, Debug)]
struct RankRecord {
    observation: Observation,
    /// When its count last grew.
    grew_ms: u64,
    /// It was seen to live, so that its file is not left over from an earlier job.
    lives: bool,
}

/// Decides from looks at the files whether the start can still succeed.
#[derive(Debug)]
pub(crate) struct StartupCheck {
    pub host: String,
    pub world: usize,
    local_world: usize,
    heartbeat_ms: u64,
    records: BTreeMap<usize, RankRecord>,
    pub deadline_ms: u64,
    last_ms: u64,
}

impl StartupCheck {
    pub fn new(host: &str, world: usize, local_world: usize, heartbeat_ms: u64, now_ms: u64) -> Self {
        let (host, records) = (host.to_string(), BTreeMap::new());
        let deadline_ms = now_ms + heartbeat_ms * JOIN_HEARTBEATS;
        Self { host, world, local_world, heartbeat_ms, records, deadline_ms, last_ms: now_ms }
    }

    /// Time in which this process was suspended counts for nobody.
    fn forgive(&mut self, now_ms: u64) {
        let absent_ms = now_ms.saturating_sub(self.last_ms);
        self.last_ms = now_ms;
        if absent_ms > 2 * self.heartbeat_ms {
            self.deadline_ms += absent_ms;
            self.records.values_mut().for_each(|record| record.grew_ms = now_ms);
        }
    }

    fn late(&self, now_ms: u64) -> bool {
        now_ms >= self.deadline_ms
    }

    /// Whether this rank must look at the others. There may be many on one file system: two of them look all the time, the
    /// others only towards the deadline, and seldom.
    pub fn looks(&self, rank: usize, now_ms: u64, turn: u64) -> bool {
        let soon = now_ms + 2 * LOOK_HEARTBEATS * self.heartbeat_ms >= self.deadline_ms;
        rank <= 1 || (soon && turn.is_multiple_of(LOOK_HEARTBEATS))
    }

    /// Time passes without a look at the others, of whom nothing can be said then.
    pub fn pass(&mut self, now_ms: u64) {
        self.forgive(now_ms);
    }

    /// What a look at all ranks shows to be wrong, if anything is.
    pub fn look(&mut self, now_ms: u64, observations: Vec<Observation>) -> Option<Fault> {
        self.gone(now_ms, observations).or_else(|| self.late(now_ms).then(|| self.missing(now_ms)).flatten())
    }

    /// A rank that a look at all ranks shows to have come and gone.
    pub fn gone(&mut self, now_ms: u64, observations: Vec<Observation>) -> Option<Fault> {
        self.forgive(now_ms);
        for observation in observations.into_iter().filter(|observation| observation.rank < self.world) {
            let seen = matches!(observation.process, ProcessState::Runs | ProcessState::Stopped);
            let record = match self.records.get(&observation.rank) {
                None => RankRecord { grew_ms: now_ms, lives: seen, observation },
                Some(record) if record.observation.count != observation.count => {
                    RankRecord { grew_ms: now_ms, lives: true, observation }
                }
                Some(record) => RankRecord { grew_ms: record.grew_ms, lives: record.lives || seen, observation },
            };
            self.records.insert(record.observation.rank, record);
        }
        self.silent(now_ms)
    }

    /// A rank that came and went silent.
    fn silent(&self, now_ms: u64) -> Option<Fault> {
        let limit_ms = |observation: &Observation| match observation.process {
            ProcessState::Unknown => SILENT_ELSEWHERE_HEARTBEATS * self.heartbeat_ms,
            _ => SILENT_HEARTBEATS * self.heartbeat_ms,
        };
        let silent = |record: &&RankRecord| record.lives && now_ms >= record.grew_ms + limit_ms(&record.observation);
        let RankRecord { observation, .. } = self.records.values().find(silent)?;
        let limit_ms = limit_ms(observation);
        let why = match observation.process {
            ProcessState::Stopped => format!("its process was stopped for {limit_ms} ms"),
            ProcessState::Ended => "its process has ended".into(),
            ProcessState::Runs | ProcessState::Unknown => format!("no heartbeat for {limit_ms} ms"),
        };
        Some(Fault::Lost { peer: observation.rank, host: observation.host.clone(), during: "its start".into(), why })
    }

    /// Somebody did not come at all, or the start takes too long.
    fn missing(&self, now_ms: u64) -> Option<Fault> {
        let waited_ms = self.heartbeat_ms * JOIN_HEARTBEATS;
        let came: Vec<&RankRecord> = self.records.values().filter(|record| record.lives).collect();
        let here = came.iter().filter(|record| record.observation.host == self.host).count();
        // Without a shared home directory, only the ranks of this host are seen.
        let shared = self.local_world == self.world || came.len() > here;
        let (seen, expected, whose) =
            if shared { (came.len(), self.world, "") } else { (here, self.local_world, " of this host") };
        let came: Vec<usize> = came.iter().map(|record| record.observation.rank).collect();
        let missing: Vec<usize> = (0..self.world).filter(|rank| !came.contains(rank)).collect();
        let hint = "check whether those processes were started, and whether they are stopped";
        if seen < expected {
            let who = match shared {
                true => name_ranks(&missing),
                false => format!("{} of {expected} ranks of this host, beside {},", expected - seen, name_ranks(&came)),
            };
            return Some(Fault::Aborted(format!(
                "{who} did not start within {waited_ms} ms; {seen} of {expected} ranks{whose} wait in MPI_Init\n  hint: {hint}"
            )));
        }
        let slow_ms = waited_ms * SLOW_START;
        let all = if shared { "all ranks are there" } else { "all ranks of this host are there" };
        (now_ms + waited_ms >= self.deadline_ms + slow_ms).then(|| {
            Fault::Aborted(format!(
                "MPI_Init did not return within {slow_ms} ms, though {all}\n  hint: the MPI library cannot connect the hosts, or a rank on another host did not start; see its own messages"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEAT: u64 = 1000;

    /// Ranks that come to a host each at second 1, as `present` says; the first fault, and when.
    fn first(startup_check: &mut StartupCheck, present: impl Fn(u64, usize) -> Option<Observation>) -> (u64, String) {
        let look = |ms: u64, startup_check: &mut StartupCheck| {
            startup_check.look(ms, (0..4).filter_map(|rank| present(ms, rank)).collect())
        };
        (1..2000)
            .map(|half| half * 500)
            .find_map(|ms| Some((ms, look(ms, startup_check)?.to_string())))
            .unwrap_or_default()
    }

    fn observation(rank: usize, host: &str, count: u64, process: ProcessState) -> Option<Observation> {
        Some(Observation { rank, host: host.into(), count, process })
    }

    #[test]
    fn a_rank_that_never_comes_is_named_at_the_deadline() {
        let mut startup_check = StartupCheck::new("a", 4, 4, BEAT, 0);
        let (ms, text) =
            first(
                &mut startup_check,
                |ms, rank| if rank == 2 { None } else { observation(rank, "a", ms, ProcessState::Runs) },
            );
        assert_eq!(ms, 60_000);
        assert!(text.starts_with("rank 2 did not start within 60000 ms; 3 of 4 ranks wait in MPI_Init\n"), "{text}");
        // On another host, whose files are seen, and are not.
        let other =
            |ms: u64, rank: usize| observation(rank, if rank < 2 { "a" } else { "b" }, ms, ProcessState::Unknown);
        let mut startup_check = StartupCheck::new("a", 4, 2, BEAT, 0);
        let (_, text) = first(&mut startup_check, |ms, rank| other(ms, rank).filter(|_| rank != 3));
        assert!(text.starts_with("rank 3 did not start within 60000 ms; 3 of 4 ranks wait"), "{text}");
        let mut startup_check = StartupCheck::new("a", 4, 2, BEAT, 0);
        let (_, text) = first(&mut startup_check, |ms, rank| other(ms, rank).filter(|_| rank == 1));
        assert!(
            text.starts_with("1 of 2 ranks of this host, beside rank 1, did not start within 60000 ms; 1 of 2"),
            "{text}"
        );
        let mut startup_check = StartupCheck::new("a", 4, 2, BEAT, 0);
        let (ms, text) = first(&mut startup_check, |ms, rank| other(ms, rank).filter(|_| rank < 2));
        assert!(
            ms == 300_000 && text.contains("did not return within 300000 ms, though all ranks of this host"),
            "{text}"
        );
    }

    #[test]
    fn a_rank_that_stops_or_ends_is_named_soon() {
        for (process, limit, why) in [
            (ProcessState::Stopped, 3000, "its process was stopped for 3000 ms"),
            (ProcessState::Ended, 3000, "its process has ended"),
            (ProcessState::Unknown, 15_000, "no heartbeat for 15000 ms"),
        ] {
            let mut startup_check = StartupCheck::new("a", 4, 4, BEAT, 0);
            let stops = |ms: u64, rank: usize| {
                let stopped = rank == 3 && ms > 2000;
                observation(
                    rank,
                    "a",
                    if stopped { 2000 } else { ms },
                    if stopped { process } else { ProcessState::Runs },
                )
            };
            let (ms, text) = first(&mut startup_check, stops);
            assert_eq!(ms, 2000 + limit);
            assert!(text.starts_with("rank 3 on a was lost during its start: ") && text.contains(why), "{text}");
        }
    }

    #[test]
    fn what_an_earlier_job_left_behind_is_no_rank() {
        for process in [ProcessState::Ended, ProcessState::Unknown] {
            let mut startup_check = StartupCheck::new("a", 4, 4, BEAT, 0);
            let left = |ms: u64, rank: usize| match rank {
                2 => observation(2, "a", 7, process),
                _ => observation(rank, "a", ms, ProcessState::Runs),
            };
            let (ms, text) = first(&mut startup_check, left);
            assert!(ms == 60_000 && text.starts_with("rank 2 did not start within 60000 ms; 3 of 4"), "{ms} {text}");
        }
    }

    #[test]
    fn own_absence_is_nobodys_silence() {
        let mut startup_check = StartupCheck::new("a", 2, 2, BEAT, 0);
        let both = |count: u64| {
            (0..2).filter_map(|rank| observation(rank, "a", count, ProcessState::Runs)).collect::<Vec<_>>()
        };
        assert_eq!(startup_check.look(500, both(1)), None);
        assert_eq!(startup_check.look(90_000, both(1)), None, "it slept");
        assert_eq!(startup_check.look(92_000, both(2)), None);
        assert!(!startup_check.late(100_000));
        // Who looks seldom says nothing of the others in between.
        (185..190).for_each(|half| startup_check.pass(half * 500));
        assert_eq!(startup_check.look(95_000, both(3)), None);
        let turns = |rank: usize, ms: u64| (0..8).filter(|turn| startup_check.looks(rank, ms, *turn)).count();
        assert_eq!([turns(0, 95_000), turns(1, 1), turns(2, 100_000), turns(2, 149_000)], [8, 8, 0, 2]);
    }
}
