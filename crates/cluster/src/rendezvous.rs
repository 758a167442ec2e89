//! How the ranks of a job come together: hello of every rank, then the roster, then any number of all-gathers of small
//! blobs.
//!
//! A pure core: `step(now, event) -> actions`. It keeps one member per rank, all of one version, of one opinion about the
//! number of ranks, and with one job; whoever is missing at the deadline is named.

use crate::introduction::Manifest;
use crate::member::SILENT_HEARTBEATS;
use crate::message::{Hello, RosterEntry};
use kolo_comm::Fault;
use kolo_comm::fault::rank_name;
use kolo_comm::transport::BOOTSTRAP_BYTES_MAX;

/// Heartbeats that ranks may take to join.
pub const JOIN_HEARTBEATS: u64 = 60;
/// Missing ranks named in a message.
const NAMED_MAX: usize = 8;

#[derive(Clone, Debug, PartialEq)]
pub enum RendezvousEvent {
    /// Somebody introduced itself on this link.
    Hello {
        link: usize,
        hello: Hello,
    },
    Blob {
        rank: usize,
        round: u64,
        bytes: Vec<u8>,
    },
    Tick,
}

#[derive(Clone, Debug, PartialEq)]
pub enum RendezvousAction {
    /// The link belongs to this rank from now on.
    Accept {
        link: usize,
        rank: usize,
    },
    /// All are here: send everyone the roster.
    Roster(Vec<RosterEntry>),
    /// An all-gather is complete: send everyone the blobs.
    Blobs {
        round: u64,
        blobs: Vec<Vec<u8>>,
    },
    Fault(Fault),
}

#[derive(Debug)]
pub struct Rendezvous {
    world: usize,
    deadline_ms: u64,
    waited_ms: u64,
    heartbeat_ms: u64,
    last_ms: u64,
    /// How long this process was suspended at a time, at most.
    absent_ms: u64,
    /// By a launcher, not by a thread of rank 0.
    supervised: bool,
    members: Vec<Option<Hello>>,
    joined: usize,
    round: u64,
    blobs: Vec<Option<Vec<u8>>>,
    /// When the first blob of this round came.
    round_since_ms: Option<u64>,
    failed: bool,
}

/// `ranks 1, 2 and 5`, cut if long.
pub fn name_ranks(ranks: &[usize]) -> String {
    let mut names: Vec<String> = ranks.iter().take(NAMED_MAX).map(usize::to_string).collect();
    if ranks.len() > NAMED_MAX {
        names.push(format!("{} more", ranks.len() - NAMED_MAX));
    }
    match names.as_slice() {
        [] => "no rank".into(),
        [one] => format!("rank {one}"),
        [some @ .., last] => format!("ranks {} and {last}", some.join(", ")),
    }
}

/// These ranks, and their host if they have one.
fn name_group(group: &[&Hello]) -> String {
    match group {
        [one] => rank_name(one.rank, &one.label()),
        _ => {
            let ranks = name_ranks(&group.iter().map(|hello| hello.rank).collect::<Vec<_>>());
            let first = group.first().map_or("", |hello| &hello.host);
            let together = group.iter().all(|hello| hello.host == first);
            if together { format!("{ranks} on {first}") } else { ranks }
        }
    }
}

impl Rendezvous {
    pub fn new(world: usize, heartbeat_ms: u64, supervised: bool, now_ms: u64) -> Self {
        let waited_ms = heartbeat_ms * JOIN_HEARTBEATS;
        Self {
            world,
            deadline_ms: now_ms + waited_ms,
            waited_ms,
            heartbeat_ms,
            last_ms: now_ms,
            absent_ms: 0,
            supervised,
            members: vec![None; world],
            joined: 0,
            round: 0,
            blobs: vec![None; world],
            round_since_ms: None,
            failed: false,
        }
    }

    pub fn complete(&self) -> bool {
        self.joined == self.world
    }

    /// Where a rank runs, and what it is, for messages.
    pub fn label(&self, rank: usize) -> String {
        self.members.get(rank).and_then(Option::as_ref).map_or(String::new(), Hello::label)
    }

    /// Ranks that have not joined.
    pub fn missing(&self) -> Vec<usize> {
        (0..self.world).filter(|rank| self.members[*rank].is_none()).collect()
    }

    /// The all-gather some wait in: since when, its number, and who has not come.
    pub fn waiting(&self) -> Option<(u64, u64, Vec<usize>)> {
        let since = self.round_since_ms?;
        Some((since, self.round, (0..self.world).filter(|rank| self.blobs[*rank].is_none()).collect()))
    }

    pub fn step(&mut self, now_ms: u64, event: RendezvousEvent) -> Vec<RendezvousAction> {
        if self.failed {
            return Vec::new();
        }
        self.forgive(now_ms);
        let outcome = match event {
            RendezvousEvent::Hello { link, hello } => self.hello(link, hello),
            RendezvousEvent::Blob { rank, round, bytes } => self.blob(now_ms, rank, round, bytes),
            RendezvousEvent::Tick => self.tick(now_ms),
        };
        outcome.unwrap_or_else(|fault| {
            self.failed = true;
            vec![RendezvousAction::Fault(fault)]
        })
    }

    /// Time in which this process was suspended counts for nobody.
    fn forgive(&mut self, now_ms: u64) {
        let absent_ms = now_ms.saturating_sub(self.last_ms);
        self.last_ms = now_ms;
        if absent_ms > self.heartbeat_ms {
            self.deadline_ms += absent_ms;
            self.absent_ms = self.absent_ms.max(absent_ms);
        }
    }

    fn tick(&mut self, now_ms: u64) -> Result<Vec<RendezvousAction>, Fault> {
        if self.complete() || now_ms < self.deadline_ms {
            return Ok(Vec::new());
        }
        let who = name_ranks(&self.missing());
        let (joined, world, waited) = (self.joined, self.world, self.waited_ms);
        if self.absent_ms >= self.heartbeat_ms * SILENT_HEARTBEATS && !self.supervised {
            // They had a deadline too, and gave it up. A busy host alone makes nobody wait as long.
            return Err(Fault::Aborted(format!(
                "{} was suspended for {} ms while the ranks joined, and {who} did not wait for it\n  hint: check who stopped its process, or whether its host was overloaded",
                rank_name(0, &self.label(0)),
                self.absent_ms
            )));
        }
        Err(Fault::Aborted(format!(
            "{who} did not join within {waited} ms; {joined} of {world} ranks are here\n  hint: check whether those processes were started and can reach this host"
        )))
    }

    fn hello(&mut self, link: usize, hello: Hello) -> Result<Vec<RendezvousAction>, Fault> {
        self.check(&hello)?;
        let rank = hello.rank;
        self.members[rank] = Some(hello);
        self.joined += 1;
        let mut actions = vec![RendezvousAction::Accept { link, rank }];
        if self.complete() {
            // All hear of it, the last one too.
            if let Err(fault) = self.compare() {
                self.failed = true;
                actions.push(RendezvousAction::Fault(fault));
                return Ok(actions);
            }
            let peer =
                |hello: &Hello| RosterEntry { host: hello.host.clone(), pid: hello.pid, role: hello.role.clone() };
            actions.push(RendezvousAction::Roster(self.members.iter().flatten().map(peer).collect()));
        }
        Ok(actions)
    }

    /// Whether all were given the same job. Of several, the one that most ranks have is held against the first other one.
    fn compare(&self) -> Result<(), Fault> {
        let mut groups: Vec<(&Manifest, Vec<&Hello>)> = Vec::new();
        for hello in self.members.iter().flatten().filter(|hello| !hello.manifest.is_empty()) {
            match groups.iter_mut().find(|(manifest, _)| **manifest == hello.manifest) {
                Some((_, group)) => group.push(hello),
                None => groups.push((&hello.manifest, vec![hello])),
            }
        }
        // Of two as large, the one of the lowest rank.
        let Some(most) = (0..groups.len()).rev().max_by_key(|at| groups[*at].1.len()) else { return Ok(()) };
        let (usual, those) = groups.remove(most);
        let Some((odd, these)) = groups.first() else { return Ok(()) };
        let Some((key, value, other)) = odd.difference(usual) else { return Ok(()) };
        let shown = |value: Option<&str>| value.map_or("missing".to_string(), |value| format!("`{value}`"));
        Err(Fault::Aborted(format!(
            "the ranks were given different jobs: `{key}` is {} at {}, but {} at {}\n  hint: start all ranks with the same program, job file, data and flags",
            shown(value),
            name_group(these),
            shown(other),
            name_group(&those)
        )))
    }

    fn check(&self, hello: &Hello) -> Result<(), Fault> {
        let name = format!("{} (pid {})", rank_name(hello.rank, &hello.label()), hello.pid);
        if hello.world != self.world || hello.rank >= self.world {
            return Err(Fault::Aborted(format!(
                "{name} expects {} ranks, but this job has {}\n  hint: the launcher started processes of different jobs, or variables of another launcher are left in the environment",
                hello.world, self.world
            )));
        }
        if let Some(other) = &self.members[hello.rank] {
            return Err(Fault::Aborted(format!(
                "two processes claim to be rank {}: pid {} on {} and pid {} on {}\n  hint: the launcher gave each process its own world; start the job with one launcher only",
                hello.rank, other.pid, other.host, hello.pid, hello.host
            )));
        }
        match self.members.iter().flatten().find(|other| other.version != hello.version) {
            Some(other) => Err(Fault::Aborted(format!(
                "{name} runs version {}, but {} runs {}\n  hint: install the same version on all hosts",
                hello.version,
                rank_name(other.rank, &other.label()),
                other.version
            ))),
            None => Ok(()),
        }
    }

    fn blob(&mut self, now_ms: u64, rank: usize, round: u64, bytes: Vec<u8>) -> Result<Vec<RendezvousAction>, Fault> {
        let rejected = |why: String| Fault::Rejected { from: rank_name(rank, &self.label(rank)), why };
        if !self.complete() || rank >= self.world {
            return Err(rejected("an exchange before the roster".into()));
        }
        if bytes.len() > BOOTSTRAP_BYTES_MAX {
            return Err(rejected(format!("{} bytes in an exchange, at most {BOOTSTRAP_BYTES_MAX}", bytes.len())));
        }
        if round != self.round || self.blobs[rank].is_some() {
            return Err(rejected(format!("a part of exchange {round} during exchange {}", self.round)));
        }
        self.blobs[rank] = Some(bytes);
        self.round_since_ms.get_or_insert(now_ms);
        if self.blobs.iter().any(Option::is_none) {
            return Ok(Vec::new());
        }
        self.round_since_ms = None;
        self.round += 1;
        let blobs = self.blobs.iter_mut().map(|blob| blob.take().unwrap_or_default()).collect();
        Ok(vec![RendezvousAction::Blobs { round, blobs }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(rank: usize, world: usize) -> RendezvousEvent {
        given(rank, world, &[])
    }

    fn given(rank: usize, world: usize, job: &[(&str, &str)]) -> RendezvousEvent {
        let hello = Hello {
            rank,
            world,
            host: format!("n{rank}"),
            pid: 10 + rank as u32,
            version: "1".into(),
            role: if rank == 3 { "server 0".into() } else { String::new() },
            manifest: Manifest::new(job.iter().map(|(key, value)| (key.to_string(), value.to_string()))),
        };
        RendezvousEvent::Hello { link: rank + 100, hello }
    }

    #[test]
    fn ranks_with_different_jobs_are_named_with_the_key() {
        let meet = |jobs: &[&[(&str, &str)]]| {
            let mut core = Rendezvous::new(jobs.len(), 1000, false, 0);
            let all = jobs.iter().enumerate().map(|(rank, job)| core.step(1, given(rank, jobs.len(), job)));
            all.collect::<Vec<_>>().pop().unwrap()
        };
        let (usual, odd) =
            (&[("job.seed", "1"), ("data.holdout", "0.2")], &[("job.seed", "1"), ("data.holdout", "0.21")]);
        let expected = |text: &str| format!("the ranks were given different jobs: `data.holdout` is {text}\n  hint: ");
        let text = fault(&meet(&[usual, usual, usual, odd]));
        assert!(
            text.starts_with(&expected("`0.21` at rank 3 on n3 (server 0), but `0.2` at ranks 0, 1 and 2")),
            "{text}"
        );
        let text = fault(&meet(&[odd, usual, usual]));
        assert!(text.starts_with(&expected("`0.21` at rank 0 on n0, but `0.2` at ranks 1 and 2")), "{text}");
        let text = fault(&meet(&[usual, odd]));
        assert!(text.starts_with(&expected("`0.21` at rank 1 on n1, but `0.2` at rank 0 on n0")), "{text}");
        let text = fault(&meet(&[usual, &usual[..1]]));
        assert!(text.starts_with(&expected("missing at rank 1 on n1, but `0.2` at rank 0 on n0")), "{text}");
        // Who only comes to say why it cannot take part has no opinion.
        assert!(matches!(
            meet(&[usual, &[], usual])[..],
            [RendezvousAction::Accept { .. }, RendezvousAction::Roster(_)]
        ));
    }

    fn fault(actions: &[RendezvousAction]) -> String {
        match actions {
            [RendezvousAction::Fault(fault)] | [RendezvousAction::Accept { .. }, RendezvousAction::Fault(fault)] => {
                fault.to_string()
            }
            other => panic!("no fault: {other:?}"),
        }
    }

    #[test]
    fn roster_comes_with_the_last_hello_and_exchanges_follow() {
        let mut core = Rendezvous::new(2, 1000, false, 0);
        assert_eq!(core.step(1, hello(1, 2)), [RendezvousAction::Accept { link: 101, rank: 1 }]);
        let actions = core.step(2, hello(0, 2));
        let peers = vec![
            RosterEntry { host: "n0".into(), pid: 10, role: String::new() },
            RosterEntry { host: "n1".into(), pid: 11, role: String::new() },
        ];
        assert_eq!(actions, [RendezvousAction::Accept { link: 100, rank: 0 }, RendezvousAction::Roster(peers)]);
        for round in 0..3 {
            assert_eq!(core.step(3, RendezvousEvent::Blob { rank: 1, round, bytes: vec![1] }), []);
            assert_eq!(core.waiting(), Some((3, round, vec![0])));
            let blobs = vec![vec![], vec![1]];
            let done = core.step(3, RendezvousEvent::Blob { rank: 0, round, bytes: vec![] });
            assert_eq!(done, [RendezvousAction::Blobs { round, blobs }]);
        }
        assert_eq!(core.step(1_000_000, RendezvousEvent::Tick), []);
    }

    #[test]
    fn who_does_not_come_is_named() {
        let mut core = Rendezvous::new(3, 1000, false, 0);
        core.step(5, hello(1, 3));
        let text = fault(&ticks(&mut core, 0, 60_000));
        assert!(text.starts_with("ranks 0 and 2 did not join within 60000 ms; 1 of 3 ranks are here"), "{text}");
    }

    /// The actions of the first tick that has any.
    fn ticks(core: &mut Rendezvous, from_ms: u64, to_ms: u64) -> Vec<RendezvousAction> {
        let mut ticks = (from_ms..to_ms).step_by(500).map(|now_ms| core.step(now_ms, RendezvousEvent::Tick));
        assert_eq!(ticks.find(|actions| !actions.is_empty()), None);
        core.step(to_ms, RendezvousEvent::Tick)
    }

    #[test]
    fn who_was_suspended_itself_accuses_nobody() {
        for (supervised, named) in [(false, "rank 0 on n0 was suspended for 70000 ms"), (true, "ranks 1 and 2 did not")]
        {
            let mut core = Rendezvous::new(3, 1000, supervised, 0);
            core.step(5, hello(0, 3));
            let text = fault(&ticks(&mut core, 70_005, 130_005));
            assert!(text.starts_with(named), "{text}");
        }
        let mut core = Rendezvous::new(2, 1000, false, 0);
        core.step(5, hello(0, 2));
        core.step(70_005, RendezvousEvent::Tick);
        assert_eq!(core.step(70_010, hello(1, 2)).len(), 2, "who waited is welcome");
    }

    #[test]
    fn twins_strangers_and_other_versions_are_named() {
        let mut core = Rendezvous::new(2, 1000, false, 0);
        core.step(1, hello(0, 2));
        let text = fault(&core.step(2, hello(0, 2)));
        assert!(text.starts_with("two processes claim to be rank 0: pid 10 on n0 and pid 10 on n0"), "{text}");
        let text = fault(&Rendezvous::new(2, 1000, false, 0).step(2, hello(0, 1)));
        assert!(text.starts_with("rank 0 on n0 (pid 10) expects 1 ranks, but this job has 2"), "{text}");
        let mut core = Rendezvous::new(2, 1000, false, 0);
        core.step(1, hello(0, 2));
        let RendezvousEvent::Hello { link, hello } = hello(1, 2) else { unreachable!() };
        let other = RendezvousEvent::Hello { link, hello: Hello { version: "2".into(), ..hello } };
        let text = fault(&core.step(2, other));
        assert!(text.starts_with("rank 1 on n1 (pid 11) runs version 2, but rank 0 on n0 runs 1"), "{text}");
    }

    #[test]
    fn an_exchange_out_of_turn_is_rejected() {
        let mut core = Rendezvous::new(1, 1000, false, 0);
        let early = core.step(0, RendezvousEvent::Blob { rank: 0, round: 0, bytes: vec![] });
        assert!(fault(&early).contains("before the roster"));
        let mut core = Rendezvous::new(1, 1000, false, 0);
        core.step(0, hello(0, 1));
        assert!(
            fault(&core.step(0, RendezvousEvent::Blob { rank: 0, round: 7, bytes: vec![] })).contains("exchange 7")
        );
    }

    #[test]
    fn names_are_cut() {
        assert_eq!(name_ranks(&[4]), "rank 4");
        assert_eq!(name_ranks(&(0..20).collect::<Vec<_>>()), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more");
    }
}
