//! Who is alive, who is at fault, and when it is over.
//!
//! A pure core: `step(now, event) -> actions`. The first fault wins; after it everyone is told to end, then killed, and
//! the job is over when all are gone. All deadlines are fractions or multiples of the heartbeat.
//!
//! Evidence at first hand (a signal, a failure of its own, silence, calls that differ) decides at once. A bare exit code, a
//! closed link, or one rank's word about another may be the echo of something else: for a moment, stronger evidence may
//! still come.

use crate::pace::Pace;
use crate::seat::{Exit, Lag, Seat};
use kolo_comm::watch::Activity;
use kolo_comm::{Fault, Fingerprint};

/// Calls remembered for comparison.
const CALLS: usize = 256;
/// Steps that the first rank must have taken while another did not move, before that one is held to hang.
const HUNG_STEPS: u64 = 16;

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Joined {
        rank: usize,
        host: String,
    },
    Beat {
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
    /// Its process cannot be reached or watched any more.
    Trouble {
        rank: usize,
        why: String,
    },
    /// A rank has given up the coordinator, which was silent for too long; `told` if it has shown that to the user.
    GivenUp {
        rank: usize,
        text: String,
        told: bool,
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
pub enum Action {
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
    /// Who told, and at which step that was, where the fault itself does not say.
    pub told: Option<String>,
    pub interrupted: Option<i32>,
    /// Ranks that could not be seen to end.
    pub left: Vec<usize>,
}

impl Verdict {
    /// Why the job did not end well: what happened, where, and a hint.
    pub fn text(&self) -> Option<String> {
        let text = self.fault.as_ref()?.to_string();
        Some(match (&self.told, text.split_once('\n')) {
            (None, _) => text,
            (Some(told), None) => format!("{text}\n  {told}"),
            (Some(told), Some((what, hint))) => format!("{what}\n  {told}\n{hint}"),
        })
    }
}

#[derive(Clone, Debug, PartialEq, PartialOrd)]
enum Weight {
    Hearsay,
    Closed,
    Exited,
    Certain,
}

#[derive(Clone, Debug)]
struct Suspicion {
    weight: Weight,
    fault: Fault,
    culprit: Option<usize>,
    told: Option<String>,
    exit_code: i32,
    deadline_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Running,
    /// All have finished; their processes may take this long to end.
    Released {
        deadline_ms: u64,
    },
    /// Told to end; at the deadline those still here are killed, and at the next one given up.
    Ending {
        deadline_ms: u64,
        killed: bool,
    },
    Ended,
}

#[derive(Debug)]
pub struct Membership {
    pace: Pace,
    /// Whether exits are reported; otherwise a closed link is all that is seen of an end.
    supervised: bool,
    seats: Vec<Seat>,
    /// The first who reported a call, by sequence.
    calls: Vec<Option<(usize, Fingerprint)>>,
    suspicion: Option<Suspicion>,
    verdict: Verdict,
    phase: Phase,
    last_ms: u64,
    /// How long this core itself last did not run, and until when.
    absence: (u64, u64),
}

impl Membership {
    pub fn new(world: usize, pace: Pace, supervised: bool, now_ms: u64) -> Self {
        Self {
            pace,
            supervised,
            seats: (0..world).map(|rank| Seat::new(rank, now_ms)).collect(),
            calls: vec![None; CALLS],
            suspicion: None,
            verdict: Verdict {
                exit_code: 0,
                fault: None,
                culprit: None,
                told: None,
                interrupted: None,
                left: Vec::new(),
            },
            phase: Phase::Running,
            last_ms: now_ms,
            absence: (0, now_ms),
        }
    }

    /// Where ranks are expected, for messages about those who never come.
    pub fn expect(&mut self, hosts: &[String]) {
        self.seats.iter_mut().zip(hosts).for_each(|(seat, host)| seat.host.clone_from(host));
    }

    pub fn seat(&self, rank: usize) -> &Seat {
        &self.seats[rank]
    }

    /// Whether no fault was found and nobody asked to end.
    pub fn running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// Whether somebody asked it to end.
    pub fn interrupted(&self) -> bool {
        self.verdict.interrupted.is_some()
    }

    /// The slowest rank, if it is not even where another was a heartbeat before. Signs of life come at different moments:
    /// to compare the last ones would accuse whoever spoke first. And ranks that may drift apart may be a few steps apart.
    pub fn lag(&self) -> Option<Lag> {
        let [before, since] = self.seats.iter().map(|seat| seat.marks).max_by_key(|marks| marks[0].1)?;
        // Who waits in a call of all is not slow, whatever step it is at.
        let busy = |seat: &Seat| seat.joined && !seat.finished && !seat.activity.in_call;
        let later = |seat: &&Seat| busy(seat) && seat.spoke_ms >= since.0;
        let slow = self.seats.iter().filter(later).min_by_key(|seat| seat.activity.step)?;
        let behind = before.1.saturating_sub(slow.activity.step);
        let lag = Lag { rank: slow.rank, host: slow.host.clone(), step: slow.activity.step, behind };
        (behind > 0).then_some(lag)
    }

    pub fn step(&mut self, now_ms: u64, event: Event) -> Vec<Action> {
        self.forgive(now_ms);
        let mut actions = Vec::new();
        self.note(now_ms, event, &mut actions);
        self.settle(now_ms, &mut actions);
        self.end(now_ms, &mut actions);
        actions
    }

    /// If this core itself did not run for a while, its own absence is no sign of anybody's death: signs of life may wait
    /// to be read, and everyone has time for another.
    fn forgive(&mut self, now_ms: u64) {
        let absent_ms = now_ms.saturating_sub(self.last_ms);
        self.last_ms = now_ms;
        if absent_ms > self.pace.beat_ms() {
            self.absence = (absent_ms, now_ms);
            let latest_ms = (now_ms + 2 * self.pace.beat_ms()).saturating_sub(self.pace.silence_ms());
            // A core that only waited its turn has not missed that a process was stopped, or that it goes on.
            let stops = absent_ms > self.pace.heartbeat_ms;
            self.seats.iter_mut().for_each(|seat| seat.forgive(absent_ms, latest_ms, stops));
        }
    }

    fn note(&mut self, now_ms: u64, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Joined { rank, host } => {
                let seat = &mut self.seats[rank];
                (seat.joined, seat.host) = (true, host);
                (seat.heard_ms, seat.moved_ms) = (now_ms, now_ms);
            }
            Event::Beat { rank, activity } => self.beat(now_ms, rank, activity),
            Event::Failed { rank, text, culprit } => self.failed(now_ms, rank, text, culprit),
            Event::Finished { rank } => {
                self.seats[rank].finished = true;
                self.seats[rank].heard_ms = now_ms;
            }
            Event::Closed { rank } => self.closed(now_ms, rank),
            Event::Exited { rank, exit } => self.exited(now_ms, rank, exit),
            Event::Stopped { rank } => self.seats[rank].stopped_ms = Some(now_ms),
            Event::Continued { rank } => {
                let seat = &mut self.seats[rank];
                (seat.stopped_ms, seat.heard_ms) = (None, now_ms);
            }
            Event::Trouble { rank, why } => {
                let fault = self.lost(rank, why);
                self.suspect(now_ms, Weight::Certain, Some(rank), 1, fault, None);
            }
            Event::GivenUp { rank, text, told } => {
                self.seats[rank].reported = true;
                self.given_up(now_ms, text, told);
            }
            Event::Fault(fault) => self.suspect(now_ms, Weight::Certain, fault.culprit(), 1, fault, None),
            Event::Interrupt { signal } => self.interrupt(now_ms, signal, actions),
            Event::Tick => self.look(now_ms),
        }
    }

    fn beat(&mut self, now_ms: u64, rank: usize, activity: Activity) {
        let furthest = self.seats.iter().map(|seat| seat.activity.step).max().unwrap_or(0);
        let seat = &mut self.seats[rank];
        seat.hear(now_ms, activity, furthest, self.pace.heartbeat_ms);
        let Some(call) = seat.world_call().copied() else { return };
        match &mut self.calls[call.sequence as usize % CALLS] {
            Some((other, first)) if first.sequence == call.sequence => {
                if *first != call {
                    let (other, theirs) = (*other, *first);
                    self.mismatch(now_ms, rank, call, other, theirs);
                }
            }
            Some((_, later)) if later.sequence > call.sequence => {}
            slot => *slot = Some((rank, call)),
        }
    }

    fn mismatch(&mut self, now_ms: u64, rank: usize, mine: Fingerprint, peer: usize, theirs: Fingerprint) {
        let fault = Fault::Mismatch {
            rank,
            host: self.seats[rank].host.clone(),
            mine: Box::new(mine),
            peer,
            peer_host: self.seats[peer].host.clone(),
            theirs: Box::new(theirs),
        };
        let told = format!("{} was at step {}", self.seats[rank].place(), self.seats[rank].activity.step);
        self.suspect(now_ms, Weight::Certain, Some(peer), 1, fault, Some(told));
    }

    fn failed(&mut self, now_ms: u64, rank: usize, text: String, culprit: Option<usize>) {
        let culprit = culprit.filter(|culprit| *culprit != rank && *culprit < self.seats.len());
        // Whoever is accused knows better.
        let accused = |earlier: &mut Suspicion| earlier.weight == Weight::Hearsay && earlier.culprit == Some(rank);
        self.suspicion.take_if(accused);
        let seat = &mut self.seats[rank];
        seat.reported = true;
        // A fault that already names a rank and its call needs no frame around it.
        let (weight, text, told) = match culprit {
            Some(_) => {
                let told = format!("told by {} at step {}", seat.place(), seat.activity.step);
                (Weight::Hearsay, text, Some(told))
            }
            None => {
                let Activity { step, progress, call, .. } = seat.activity;
                let began = step > 0 || progress > 0 || call.is_some();
                let at = if began { seat.during() } else { "its start".into() };
                (Weight::Certain, format!("{} failed at {at}: {text}", seat.place()), None)
            }
        };
        self.suspect(now_ms, weight, culprit.or(Some(rank)), 1, Fault::Aborted(text), told);
    }

    fn closed(&mut self, now_ms: u64, rank: usize) {
        let seat = &mut self.seats[rank];
        seat.closed = true;
        if seat.finished || seat.reported || seat.exit.is_some() {
            return;
        }
        // Others left, while this process was suspended, because they did not hear of it: they are not at fault.
        if let Some(absent_ms) = self.deserted(now_ms) {
            let place = self.seats[0].place();
            let text = format!(
                "{place} was suspended for {absent_ms} ms, and the other ranks have left meanwhile\n  hint: see who stopped its process, or whether its host was overloaded"
            );
            return self.given_up(now_ms, text, false);
        }
        let fault = self.lost(rank, "it closed its control link".into());
        self.suspect(now_ms, Weight::Closed, Some(rank), 1, fault, None);
    }

    /// How long this core, which lives in rank 0, was absent, if that was too long for the others and all of them are gone.
    fn deserted(&self, now_ms: u64) -> Option<u64> {
        let (absent_ms, until_ms) = self.absence;
        let gone = self.seats.iter().skip(1).all(|seat| seat.closed || !seat.joined);
        let just_now = now_ms < until_ms + self.pace.heartbeat_ms;
        (!self.supervised && gone && just_now && absent_ms >= self.pace.heartbeat_ms).then_some(absent_ms)
    }

    /// The ranks have ended the job without this core: its own links tell it nothing about who is at fault. Where nobody has
    /// shown it yet, another rank may be about to.
    fn given_up(&mut self, now_ms: u64, text: String, told: bool) {
        // What it believed before was about ranks that had already left.
        self.suspicion.take_if(|earlier| earlier.weight < Weight::Exited);
        let weight = if told { Weight::Certain } else { Weight::Exited };
        self.suspect(now_ms, weight, Some(0), 1, Fault::Aborted(text), None);
    }

    fn exited(&mut self, now_ms: u64, rank: usize, exit: Exit) {
        let seat = &mut self.seats[rank];
        seat.exit = Some(exit);
        if seat.reported || (seat.finished && exit == Exit::Code(0)) {
            return;
        }
        let (weight, code) = match exit {
            Exit::Code(0) => (Weight::Exited, 1),
            Exit::Code(code) => (Weight::Exited, code),
            Exit::Signal(_) | Exit::Unknown => (Weight::Certain, 1),
        };
        let why = if seat.joined { exit.to_string() } else { format!("{exit} before it joined the job") };
        let fault = self.lost(rank, why);
        self.suspect(now_ms, weight, Some(rank), code, fault, None);
    }

    fn lost(&self, rank: usize, why: String) -> Fault {
        let seat = &self.seats[rank];
        Fault::Lost { peer: rank, host: seat.host.clone(), during: seat.during(), why }
    }

    fn interrupt(&mut self, now_ms: u64, signal: i32, actions: &mut Vec<Action>) {
        if self.verdict.interrupted.is_none() && matches!(self.phase, Phase::Running | Phase::Released { .. }) {
            self.verdict.interrupted = Some(signal);
            let here = self.seats.iter().filter(|seat| seat.exit.is_none());
            actions.extend(here.map(|seat| Action::Signal { rank: seat.rank, signal }));
            return;
        }
        // Asked twice: no more patience.
        self.verdict.interrupted.get_or_insert(signal);
        if !matches!(self.phase, Phase::Ending { killed: true, .. } | Phase::Ended) {
            self.phase = Phase::Ending { deadline_ms: now_ms, killed: false };
        }
    }

    /// Looks for what shows by its absence.
    fn look(&mut self, now_ms: u64) {
        if self.phase != Phase::Running {
            return;
        }
        let (stopped_ms, silence_ms) = (self.pace.stopped_ms(), self.pace.silence_ms());
        let deadline = |seat: &Seat| match seat.stopped_ms {
            Some(since_ms) => since_ms + stopped_ms,
            None if seat.joined => seat.heard_ms + silence_ms,
            None => u64::MAX,
        };
        let silent =
            self.seats.iter().filter(|seat| seat.exit.is_none() && !seat.closed).min_by_key(|seat| deadline(seat));
        if let Some(seat) = silent.filter(|seat| now_ms >= deadline(seat)) {
            let why = match seat.stopped_ms {
                Some(_) => format!("its process was stopped for {stopped_ms} ms"),
                None => format!("no sign of life for {silence_ms} ms; its process is stopped or its host is gone"),
            };
            let (rank, fault) = (seat.rank, self.lost(seat.rank, why));
            return self.suspect(now_ms, Weight::Certain, Some(rank), 1, fault, None);
        }
        if let Some((rank, fault)) = self.stalled(now_ms).or_else(|| self.hung(now_ms)) {
            self.suspect(now_ms, Weight::Certain, Some(rank), 1, fault, None);
        }
    }

    /// A rank that does not move while another waits in a call it has not reached.
    fn stalled(&self, now_ms: u64) -> Option<(usize, Fault)> {
        let reached = |seat: &Seat| seat.world_call().map_or(0, |call| call.sequence + 1);
        let waits = |seat: &&Seat| seat.finished || (seat.activity.in_call && seat.world_call().is_some());
        let ahead = |seat: &Seat| if seat.finished { u64::MAX } else { reached(seat) };
        let first = self.seats.iter().filter(waits).max_by_key(|seat| ahead(seat))?;
        let comparable = |seat: &Seat| seat.activity.call.is_none() || seat.world_call().is_some();
        // One that itself waited for long, and rightly, may not have said yet that it is over.
        let waited_ms = |seat: &Seat| now_ms.saturating_sub(seat.moved_ms.max(first.moved_ms));
        let stuck = |seat: &&Seat| {
            seat.joined && comparable(seat) && reached(seat) < ahead(first) && waited_ms(seat) >= self.pace.stall_ms()
        };
        let slow = self.seats.iter().filter(|seat| !seat.finished).filter(stuck).min_by_key(|seat| reached(seat))?;
        let target = match first.world_call() {
            Some(call) if !first.finished => call.to_string(),
            _ => "the end of the job".into(),
        };
        let during = format!("{target} ({} waits there; this one is at {})", first.place(), slow.during());
        let fault = Fault::Stalled { peer: slow.rank, host: slow.host.clone(), during, waited_ms: waited_ms(slow) };
        Some((slow.rank, fault))
    }

    /// A rank that neither moves nor waits, while others that do not wait for it get on: it is stuck in its work or halted in
    /// a call. As long as none of them took many steps meanwhile, its work may just be long.
    fn hung(&self, now_ms: u64) -> Option<(usize, Fault)> {
        let ahead = self.seats.iter().max_by_key(|seat| seat.activity.step)?;
        let waited_ms = |seat: &Seat| now_ms.saturating_sub(seat.moved_ms);
        let works = |seat: &Seat| seat.joined && !seat.finished && !seat.activity.waits;
        let hangs = |seat: &&Seat| {
            let passed = ahead.activity.step >= seat.furthest + HUNG_STEPS;
            works(seat) && passed && waited_ms(seat) >= self.pace.stall_ms()
        };
        let seat = self.seats.iter().filter(hangs).max_by_key(|seat| waited_ms(seat))?;
        let (first, step, here) = (ahead.place(), ahead.activity.step, seat.during());
        let during = format!("its next step ({first} is at step {step}; this one is at {here})");
        let fault = Fault::Stalled { peer: seat.rank, host: seat.host.clone(), during, waited_ms: waited_ms(seat) };
        Some((seat.rank, fault))
    }

    fn suspect(
        &mut self,
        now_ms: u64,
        weight: Weight,
        culprit: Option<usize>,
        exit_code: i32,
        fault: Fault,
        told: Option<String>,
    ) {
        if !matches!(self.phase, Phase::Running | Phase::Released { .. }) {
            return;
        }
        let deadline_ms = match &self.suspicion {
            Some(earlier) if earlier.weight >= weight => return,
            Some(earlier) => earlier.deadline_ms,
            None => now_ms + self.pace.settle_ms(),
        };
        self.suspicion = Some(Suspicion { weight, fault, culprit, told, exit_code, deadline_ms });
    }

    /// Turns a suspicion into the verdict once it is certain or old enough.
    fn settle(&mut self, now_ms: u64, actions: &mut Vec<Action>) {
        // The exit of a process whose link closed tells more than its link, and is on its way.
        let ends = |rank: usize| self.supervised && self.seats[rank].closed && self.seats[rank].exit.is_none();
        let deadline_ms = |suspicion: &Suspicion| match suspicion.culprit {
            Some(rank) if ends(rank) => suspicion.deadline_ms + self.pace.exit_ms(),
            _ => suspicion.deadline_ms,
        };
        let decided =
            |suspicion: &mut Suspicion| suspicion.weight == Weight::Certain || now_ms >= deadline_ms(suspicion);
        let Some(suspicion) = self.suspicion.take_if(decided) else { return };
        let text = if let Some(signal) = self.verdict.interrupted {
            // Whoever was asked to end and did so is not at fault.
            format!("the job was interrupted by signal {signal}")
        } else {
            let Suspicion { fault, culprit, told, exit_code, .. } = suspicion;
            self.verdict = Verdict { exit_code, fault: Some(fault), culprit, told, ..self.verdict.clone() };
            self.verdict.text().unwrap_or_default()
        };
        self.phase = Phase::Ending { deadline_ms: now_ms + self.pace.grace_ms(), killed: false };
        actions.push(Action::Abort { text });
        // Whoever is stopped can end only by force.
        let stopped = self.seats.iter().filter(|seat| seat.stopped_ms.is_some() && !self.gone(seat));
        actions.extend(stopped.map(|seat| Action::Kill { rank: seat.rank }));
    }

    fn gone(&self, seat: &Seat) -> bool {
        if self.supervised { seat.exit.is_some() } else { seat.closed || !seat.joined }
    }

    /// Moves towards the end.
    fn end(&mut self, now_ms: u64, actions: &mut Vec<Action>) {
        match self.phase {
            Phase::Running if self.suspicion.is_none() && self.seats.iter().all(|seat| seat.finished) => {
                self.phase = Phase::Released { deadline_ms: now_ms + self.pace.stall_ms() };
                actions.push(Action::Release);
            }
            Phase::Released { deadline_ms } if now_ms >= deadline_ms => {
                if let Some(seat) = self.seats.iter().find(|seat| !self.gone(seat)) {
                    let (rank, waited) = (seat.rank, self.pace.stall_ms());
                    let fault = self.lost(rank, format!("its process did not end within {waited} ms"));
                    self.suspect(now_ms, Weight::Certain, Some(rank), 1, fault, None);
                    self.settle(now_ms, actions);
                }
            }
            Phase::Ending { deadline_ms, killed: false } if now_ms >= deadline_ms => {
                let here = self.seats.iter().filter(|seat| !self.gone(seat));
                actions.extend(here.map(|seat| Action::Kill { rank: seat.rank }));
                self.phase = Phase::Ending { deadline_ms: now_ms + self.pace.heartbeat_ms, killed: true };
            }
            _ => {}
        }
        let left: Vec<usize> = self.seats.iter().filter(|seat| !self.gone(seat)).map(|seat| seat.rank).collect();
        let over = match self.phase {
            Phase::Released { .. } => left.is_empty() && self.suspicion.is_none(),
            Phase::Ending { deadline_ms, killed } => {
                // Where nobody ends those who come late, they must hear that it is over.
                let awaited = !self.supervised && self.seats.iter().any(|seat| !seat.joined);
                (left.is_empty() && !awaited) || (killed && now_ms >= deadline_ms)
            }
            Phase::Running | Phase::Ended => false,
        };
        if over {
            // Asked to end, all ranks came to their end in order: the job is done.
            if matches!(self.phase, Phase::Released { .. }) {
                self.verdict.interrupted = None;
            }
            self.phase = Phase::Ended;
            self.verdict.left = left;
            if let Some(signal) = self.verdict.interrupted {
                self.verdict.exit_code = 128 + signal;
            }
            actions.push(Action::Ended(self.verdict.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_comm::call::short_name;
    use kolo_comm::{Element, Kind, Reduction};

    const PACE: Pace = Pace { heartbeat_ms: 1000 };

    fn call(sequence: u64) -> Fingerprint {
        Fingerprint {
            communicator: 0,
            kind: Kind::AllReduce,
            element: Element::F32,
            reduction: Reduction::Sum,
            root: 0,
            sequence,
            count: 8,
            name: short_name("bucket 3"),
        }
    }

    fn joined(world: usize) -> Membership {
        let mut core = Membership::new(world, PACE, true, 0);
        for rank in 0..world {
            core.step(0, Event::Joined { rank, host: format!("node{rank}") });
        }
        core
    }

    fn at(step: u64, call: Option<Fingerprint>, in_call: bool) -> Activity {
        Activity { step, progress: step * 2 + u64::from(in_call), call, in_call, waits: in_call }
    }

    /// Beats of all until this time; the first actions that are not nothing.
    fn run(core: &mut Membership, end_ms: u64, activities: &[Activity]) -> Vec<Action> {
        for now_ms in (0..=end_ms).step_by(250) {
            for (rank, activity) in activities.iter().enumerate() {
                let actions = core.step(now_ms, Event::Beat { rank, activity: *activity });
                if !actions.is_empty() {
                    return actions;
                }
            }
            let actions = core.step(now_ms, Event::Tick);
            if !actions.is_empty() {
                return actions;
            }
        }
        Vec::new()
    }

    fn text(actions: &[Action]) -> &str {
        match actions {
            [Action::Abort { text }] => text,
            other => panic!("no abort: {other:?}"),
        }
    }

    #[test]
    fn the_rank_that_others_wait_for_is_named() {
        let mut core = joined(3);
        let waits = at(7, Some(call(7)), true);
        let actions = run(&mut core, 100_000, &[waits, at(7, Some(call(6)), false), waits]);
        let expected = "rank 1 on node1 did not come to all_reduce(sum) of 8 f32 \"bucket 3\", call 7 (rank 2 on node2 \
            waits there; this one is at step 7, after all_reduce(sum) of 8 f32 \"bucket 3\", call 6) within 60000 ms";
        assert!(text(&actions).starts_with(expected), "{}", text(&actions));
    }

    #[test]
    fn all_in_one_call_is_the_business_of_their_links() {
        let waits = at(7, Some(call(7)), true);
        assert_eq!(run(&mut joined(2), 100_000, &[waits, waits]), []);
        // Messages count per pair, and groups of a split share a number: they say nothing about each other.
        let message = Fingerprint { kind: Kind::Send, count: 3, ..call(7) };
        let group = Fingerprint { communicator: 5, count: 9, ..call(7) };
        assert_eq!(run(&mut joined(3), 100_000, &[waits, at(7, Some(message), true), at(7, Some(group), true)]), []);
    }

    #[test]
    fn whoever_is_accused_has_the_word() {
        let mut core = joined(3);
        let fail =
            |rank: usize, text: &str, culprit: usize| Event::Failed { rank, text: text.into(), culprit: Some(culprit) };
        core.step(10, fail(0, "rank 1 is gone", 1));
        core.step(12, fail(1, "ranks disagree", 0));
        core.step(14, fail(2, "rank 1 is gone", 1));
        let actions = core.step(100, Event::Tick);
        assert_eq!(text(&actions), "ranks disagree\n  told by rank 1 on node1 at step 0");
    }

    #[test]
    fn an_exit_is_awaited_where_a_link_closed() {
        let mut core = joined(2);
        core.step(10, Event::Closed { rank: 1 });
        assert_eq!(core.step(200, Event::Tick), []);
        let actions = core.step(250, Event::Exited { rank: 1, exit: Exit::Signal(9) });
        assert!(text(&actions).contains("signal 9"), "{actions:?}");
        let mut core = joined(2);
        core.step(10, Event::Closed { rank: 1 });
        assert!(text(&core.step(400, Event::Tick)).contains("closed its control link"));
    }

    #[test]
    fn a_stopped_rank_gets_no_grace() {
        let mut core = joined(2);
        core.step(10, Event::Stopped { rank: 1 });
        let actions = (1..=10).flat_map(|turn| core.step(10 + 100 * turn, Event::Tick)).collect::<Vec<_>>();
        assert!(matches!(&actions[..], [Action::Abort { text }, Action::Kill { rank: 1 }] if text.contains("stopped")));
    }

    #[test]
    fn a_long_wait_that_ends_is_no_stall() {
        let mut core = joined(2);
        let stall_ms = core.pace.stall_ms();
        let mut beat = |now_ms: u64, rank: usize, sequence: u64| {
            // Out of its first call, rank 0 computes, and gets on.
            let (in_call, progress) = if sequence == 0 { (false, now_ms) } else { (true, u64::MAX - sequence) };
            let activity = Activity { progress, ..at(3, Some(call(sequence)), in_call) };
            core.step(now_ms, Event::Beat { rank, activity });
            core.step(now_ms, Event::Tick)
        };
        // Rank 1 is in call 1 for long, as rank 0 computes; both say now and then that they live.
        for now_ms in (0..2 * stall_ms).step_by(200) {
            assert_eq!(beat(now_ms, 1, 1), []);
            assert_eq!(beat(now_ms, 0, 0), []);
        }
        // Rank 0 comes, both go on, and rank 0 says so first.
        assert_eq!(beat(2 * stall_ms, 0, 2), []);
        for now_ms in (2 * stall_ms..3 * stall_ms).step_by(200) {
            assert_eq!(beat(now_ms, 1, 1), []);
            assert_eq!(beat(now_ms, 0, 2), []);
        }
        // If rank 1 does not come even then, it is stuck.
        let actions = [beat(3 * stall_ms, 0, 2), beat(3 * stall_ms + 200, 1, 1)].concat();
        assert!(text(&actions).contains("rank 1 on node1 did not come"), "{actions:?}");
    }

    #[test]
    fn who_hangs_while_others_get_on_is_found() {
        let mut core = joined(3);
        let stall_ms = core.pace.stall_ms();
        let mut run = |from_ms: u64, to_ms: u64, others: fn(u64) -> u64, waits: bool| {
            let mut seen = Vec::new();
            for now_ms in (from_ms..to_ms).step_by(200) {
                for rank in 0..2 {
                    core.step(now_ms, Event::Beat { rank, activity: at(others(now_ms), None, false) });
                }
                let activity = Activity { waits, ..at(4, None, false) };
                core.step(now_ms, Event::Beat { rank: 2, activity });
                seen.extend(core.step(now_ms, Event::Tick));
            }
            seen
        };
        // Everyone's steps are long; or this one waits for a server that others keep busy.
        assert_eq!(run(0, 3 * stall_ms, |now_ms| 4 + now_ms / 200 % 2, false), []);
        assert_eq!(run(3 * stall_ms, 6 * stall_ms, |now_ms| now_ms / 100, true), []);
        let actions = run(6 * stall_ms, 8 * stall_ms, |now_ms| now_ms / 100, false);
        let told = text(&actions);
        assert!(told.contains("rank 2 on node2 did not come to its next step (rank 1"), "{told}");
        assert!(told.contains("this one is at step 4, before its first call"), "{told}");
        // That another is far ahead says nothing: it must have got there meanwhile.
        let mut core = joined(2);
        for now_ms in (0..3 * stall_ms).step_by(200) {
            core.step(now_ms, Event::Beat { rank: 0, activity: at(500 + now_ms / 200 % 9, None, false) });
            core.step(now_ms, Event::Beat { rank: 1, activity: at(4, None, false) });
            assert_eq!(core.step(now_ms, Event::Tick), []);
        }
    }

    /// The core lives in rank 0. While that was suspended, the others gave it up and left.
    #[test]
    fn a_core_that_was_suspended_accuses_nobody() {
        let suspended = |words: &dyn Fn(&mut Membership) -> Vec<Action>| {
            let mut core = Membership { supervised: false, ..joined(3) };
            core.step(1000, Event::Beat { rank: 0, activity: at(3, None, false) });
            let actions = words(&mut core);
            let [Action::Abort { text }, ..] = &actions[..] else { panic!("{actions:?}") };
            text.clone()
        };
        let text = suspended(&|core| {
            core.step(9000, Event::Closed { rank: 1 });
            core.step(9001, Event::GivenUp { rank: 2, text: "rank 0 on node0 fell silent".into(), told: false });
            core.step(9002, Event::GivenUp { rank: 1, text: "rank 0 on node0 is gone".into(), told: true })
        });
        assert_eq!(text, "rank 0 on node0 is gone");
        // Its launcher ended them before they could say so.
        let text = suspended(&|core| {
            assert_eq!(core.step(9000, Event::Closed { rank: 2 }), []);
            assert_eq!(core.step(9001, Event::Closed { rank: 1 }), []);
            core.step(9060, Event::Tick)
        });
        assert!(text.starts_with("rank 0 on node0 was suspended for 8000 ms, and the other ranks have left"), "{text}");
        // All were suspended, and one of them is gone.
        let text = suspended(&|core| {
            core.step(9000, Event::Closed { rank: 2 });
            core.step(9001, Event::Beat { rank: 1, activity: at(3, None, false) });
            core.step(9100, Event::Tick)
        });
        assert!(text.starts_with("rank 2 on node2 is gone") && text.contains("closed its control link"), "{text}");
    }

    #[test]
    fn the_slowest_is_known() {
        let mut core = joined(4);
        let mut beat = |now_ms: u64, steps: [u64; 4]| {
            for (rank, step) in steps.into_iter().enumerate() {
                core.step(now_ms, Event::Beat { rank, activity: at(step, None, false) });
            }
            core.lag()
        };
        // Quick steps between two beats are no lag.
        assert_eq!(beat(1000, [124, 900, 123, 120]), None);
        assert_eq!(beat(1250, [1824, 900, 1700, 1650]), None);
        assert_eq!(beat(2000, [1824, 1824, 1823, 1820]), None);
        let lag = beat(3000, [2824, 2824, 2823, 1820]).unwrap();
        assert_eq!(lag.to_string(), "rank 3 on node3 is at step 1820, 4 steps behind");
    }

    #[test]
    fn an_interrupt_is_passed_on_once_and_then_meant() {
        let mut core = joined(2);
        let first = core.step(10, Event::Interrupt { signal: 2 });
        assert_eq!(first, [Action::Signal { rank: 0, signal: 2 }, Action::Signal { rank: 1, signal: 2 }]);
        let second = core.step(20, Event::Interrupt { signal: 2 });
        assert_eq!(second, [Action::Kill { rank: 0 }, Action::Kill { rank: 1 }]);
        core.step(21, Event::Exited { rank: 0, exit: Exit::Signal(9) });
        let last = core.step(22, Event::Exited { rank: 1, exit: Exit::Signal(9) });
        let [Action::Ended(verdict)] = &last[..] else { panic!("{last:?}") };
        assert_eq!((verdict.exit_code, &verdict.fault, &verdict.left), (130, &None, &vec![]));
    }
}
