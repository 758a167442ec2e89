//! Who is alive, who is at fault, and when it is over.
//!
//! A pure core: `step(now, event) -> actions`. The first fault wins; after it everyone is told to end, then killed, and
//! the job is over when all are gone. All deadlines are fractions or multiples of the heartbeat.
//!
//! Evidence at first hand (a signal, a failure of its own, silence, calls that differ) decides at once. A bare exit code, a
//! closed link, or one rank's report about another may be a consequence of something else: for a moment, the membership waits
//! for stronger evidence.

pub(crate) mod cut;
pub(crate) mod detect;
mod event;

pub use event::{MembershipAction, MembershipEvent, Verdict};

use crate::deadlines::Deadlines;
use crate::rank_state::{Exit, Lag, RankState};
use kolo_comm::watch::Activity;
use kolo_comm::{Fault, Fingerprint};

/// Calls remembered for comparison.
const CALLS: usize = 256;
/// Steps that the first rank must have taken while another did not move, before that one is held to hang.
const HUNG_STEPS: u64 = 16;

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
    reported_by: Option<String>,
    exit_code: i32,
    deadline_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum JobPhase {
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
    deadlines: Deadlines,
    /// Whether exits are reported; otherwise a closed link is all that is seen of an end.
    supervised: bool,
    states: Vec<RankState>,
    /// The first who reported a call, by sequence.
    calls: Vec<Option<(usize, Fingerprint)>>,
    suspicion: Option<Suspicion>,
    verdict: Verdict,
    phase: JobPhase,
    last_ms: u64,
    /// How long this process itself was last suspended, and until when.
    suspended: (u64, u64),
}

impl Membership {
    pub fn new(world: usize, deadlines: Deadlines, supervised: bool, now_ms: u64) -> Self {
        Self {
            deadlines,
            supervised,
            states: (0..world).map(|rank| RankState::new(rank, now_ms)).collect(),
            calls: vec![None; CALLS],
            suspicion: None,
            verdict: Verdict {
                exit_code: 0,
                fault: None,
                culprit: None,
                reported_by: None,
                interrupted: None,
                left: Vec::new(),
            },
            phase: JobPhase::Running,
            last_ms: now_ms,
            suspended: (0, now_ms),
        }
    }

    /// Where ranks are expected, for messages about those who never come.
    pub fn expect(&mut self, hosts: &[String]) {
        self.states.iter_mut().zip(hosts).for_each(|(state, host)| state.host.clone_from(host));
    }

    pub fn rank_state(&self, rank: usize) -> &RankState {
        &self.states[rank]
    }

    /// Whether no fault was found and nobody asked to end.
    pub fn running(&self) -> bool {
        self.phase == JobPhase::Running
    }

    /// Who is at fault, as far as it was decided.
    pub fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// Whether somebody asked it to end.
    pub fn interrupted(&self) -> bool {
        self.verdict.interrupted.is_some()
    }

    /// The slowest rank, if it is not even where another was a heartbeat before. Heartbeats come at different moments:
    /// to compare the last ones would accuse whoever spoke first. And ranks that may drift apart may be a few steps apart.
    pub fn lag(&self) -> Option<Lag> {
        let [before, since] = self.states.iter().map(|state| state.marks).max_by_key(|marks| marks[0].1)?;
        // Who waits in a call of all is not slow, whatever step it is at.
        let busy = |state: &RankState| state.joined && !state.finished && !state.activity.in_call;
        let later = |state: &&RankState| busy(state) && state.spoke_ms >= since.0;
        let slow = self.states.iter().filter(later).min_by_key(|state| state.activity.step)?;
        let behind = before.1.saturating_sub(slow.activity.step);
        let lag = Lag { rank: slow.rank, host: slow.host.clone(), step: slow.activity.step, behind };
        (behind > 0).then_some(lag)
    }

    pub fn step(&mut self, now_ms: u64, event: MembershipEvent) -> Vec<MembershipAction> {
        self.forgive(now_ms);
        let mut actions = Vec::new();
        self.note(now_ms, event, &mut actions);
        self.settle(now_ms, &mut actions);
        self.end(now_ms, &mut actions);
        actions
    }

    /// If this core itself did not run for a while, its own suspension is no sign of anybody's death: heartbeats may wait
    /// to be read, and everyone has time for another.
    fn forgive(&mut self, now_ms: u64) {
        let absent_ms = now_ms.saturating_sub(self.last_ms);
        self.last_ms = now_ms;
        if absent_ms > self.deadlines.beat_ms() {
            self.suspended = (absent_ms, now_ms);
            let latest_ms = (now_ms + 2 * self.deadlines.beat_ms()).saturating_sub(self.deadlines.silence_ms());
            // A core that only waited its turn has not missed that a process was stopped, or that it goes on.
            let stops = absent_ms > self.deadlines.heartbeat_ms;
            self.states.iter_mut().for_each(|state| state.forgive(absent_ms, latest_ms, stops));
        }
    }

    fn note(&mut self, now_ms: u64, event: MembershipEvent, actions: &mut Vec<MembershipAction>) {
        match event {
            MembershipEvent::Joined { rank, host } => {
                let state = &mut self.states[rank];
                (state.joined, state.host) = (true, host);
                (state.heard_ms, state.moved_ms) = (now_ms, now_ms);
            }
            MembershipEvent::Heartbeat { rank, activity } => self.beat(now_ms, rank, activity),
            MembershipEvent::Failed { rank, text, culprit } => self.failed(now_ms, rank, text, culprit),
            MembershipEvent::Finished { rank } => {
                self.states[rank].finished = true;
                self.states[rank].heard_ms = now_ms;
            }
            MembershipEvent::Closed { rank } => self.closed(now_ms, rank),
            MembershipEvent::Exited { rank, exit } => self.exited(now_ms, rank, exit),
            MembershipEvent::Stopped { rank } => self.states[rank].stopped_ms = Some(now_ms),
            MembershipEvent::Continued { rank } => {
                let state = &mut self.states[rank];
                (state.stopped_ms, state.heard_ms) = (None, now_ms);
            }
            MembershipEvent::Computed { rank, load } => {
                let state = &mut self.states[rank];
                (state.computed_ms, state.load) = (Some(now_ms), load);
            }
            MembershipEvent::Trouble { rank, why } => {
                let fault = self.lost(rank, why);
                self.suspect(now_ms, Weight::Certain, Some(rank), 1, fault, None);
            }
            MembershipEvent::GivenUp { rank, text, shown } => {
                self.states[rank].reported = true;
                self.given_up(now_ms, text, shown);
            }
            MembershipEvent::Fault(fault) => self.suspect(now_ms, Weight::Certain, fault.culprit(), 1, fault, None),
            MembershipEvent::Interrupt { signal } => self.interrupt(now_ms, signal, actions),
            MembershipEvent::Tick => self.check_silence(now_ms),
        }
    }

    fn beat(&mut self, now_ms: u64, rank: usize, activity: Activity) {
        let furthest = self.states.iter().map(|state| state.activity.step).max().unwrap_or(0);
        let state = &mut self.states[rank];
        state.hear(now_ms, activity, furthest, self.deadlines.heartbeat_ms);
        let Some(call) = state.world_call().copied() else { return };
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
            host: self.states[rank].host.clone(),
            mine: Box::new(mine),
            peer,
            peer_host: self.states[peer].host.clone(),
            theirs: Box::new(theirs),
        };
        let reported_by = format!("{} was at step {}", self.states[rank].name(), self.states[rank].activity.step);
        self.suspect(now_ms, Weight::Certain, Some(peer), 1, fault, Some(reported_by));
    }

    fn failed(&mut self, now_ms: u64, rank: usize, text: String, culprit: Option<usize>) {
        let culprit = culprit.filter(|culprit| *culprit != rank && *culprit < self.states.len());
        // Whoever is accused knows better.
        let accused = |earlier: &mut Suspicion| earlier.weight == Weight::Hearsay && earlier.culprit == Some(rank);
        self.suspicion.take_if(accused);
        let state = &mut self.states[rank];
        state.reported = true;
        // A fault that already names a rank and its call needs no frame around it.
        let (weight, text, reported_by) = match culprit {
            Some(_) => {
                let reported_by = format!("reported by {} at step {}", state.name(), state.activity.step);
                (Weight::Hearsay, text, Some(reported_by))
            }
            None => {
                let Activity { step, progress, call, .. } = state.activity;
                let began = step > 0 || progress > 0 || call.is_some();
                let at = if began { state.during() } else { "its start".into() };
                (Weight::Certain, format!("{} failed at {at}: {text}", state.name()), None)
            }
        };
        self.suspect(now_ms, weight, culprit.or(Some(rank)), 1, Fault::Aborted(text), reported_by);
    }

    fn closed(&mut self, now_ms: u64, rank: usize) {
        let state = &mut self.states[rank];
        state.closed = true;
        if state.finished || state.reported || state.exit.is_some() {
            return;
        }
        // Others left, while this process was suspended, because they did not hear of it: they are not at fault.
        if let Some(absent_ms) = self.deserted(now_ms) {
            let place = self.states[0].name();
            let text = format!(
                "{place} was suspended for {absent_ms} ms, and the other ranks left in the meantime\n  hint: check who stopped its process, or whether its host was overloaded"
            );
            return self.given_up(now_ms, text, false);
        }
        let fault = self.lost(rank, "it closed its control link".into());
        self.suspect(now_ms, Weight::Closed, Some(rank), 1, fault, None);
    }

    /// How long this core, which lives in rank 0, was absent, if that was too long for the others and all of them are gone.
    fn deserted(&self, now_ms: u64) -> Option<u64> {
        let (absent_ms, until_ms) = self.suspended;
        let gone = self.states.iter().skip(1).all(|state| state.closed || !state.joined);
        let just_now = now_ms < until_ms + self.deadlines.heartbeat_ms;
        (!self.supervised && gone && just_now && absent_ms >= self.deadlines.heartbeat_ms).then_some(absent_ms)
    }

    /// The ranks have ended the job without this core: its own links tell it nothing about who is at fault. Where nobody has
    /// shown it yet, another rank may be about to.
    fn given_up(&mut self, now_ms: u64, text: String, shown: bool) {
        // What it believed before was about ranks that had already left.
        self.suspicion.take_if(|earlier| earlier.weight < Weight::Exited);
        let weight = if shown { Weight::Certain } else { Weight::Exited };
        self.suspect(now_ms, weight, Some(0), 1, Fault::Aborted(text), None);
    }

    fn exited(&mut self, now_ms: u64, rank: usize, exit: Exit) {
        let state = &mut self.states[rank];
        state.exit = Some(exit);
        if state.reported || (state.finished && exit == Exit::Code(0)) {
            return;
        }
        let (weight, code) = match exit {
            Exit::Code(0) => (Weight::Exited, 1),
            Exit::Code(code) => (Weight::Exited, code),
            Exit::Signal(_) | Exit::Unknown => (Weight::Certain, 1),
        };
        let why = if state.joined { exit.to_string() } else { format!("{exit} before it joined the job") };
        let fault = self.lost(rank, why);
        self.suspect(now_ms, weight, Some(rank), code, fault, None);
    }

    fn lost(&self, rank: usize, why: String) -> Fault {
        let state = &self.states[rank];
        Fault::Lost { peer: rank, host: state.host.clone(), during: state.during(), why }
    }

    fn interrupt(&mut self, now_ms: u64, signal: i32, actions: &mut Vec<MembershipAction>) {
        if self.verdict.interrupted.is_none() && matches!(self.phase, JobPhase::Running | JobPhase::Released { .. }) {
            self.verdict.interrupted = Some(signal);
            let here = self.states.iter().filter(|state| state.exit.is_none());
            actions.extend(here.map(|state| MembershipAction::Signal { rank: state.rank, signal }));
            return;
        }
        // Asked twice: no more patience.
        self.verdict.interrupted.get_or_insert(signal);
        if !matches!(self.phase, JobPhase::Ending { killed: true, .. } | JobPhase::Ended) {
            self.phase = JobPhase::Ending { deadline_ms: now_ms, killed: false };
        }
    }

    fn suspect(
        &mut self,
        now_ms: u64,
        weight: Weight,
        culprit: Option<usize>,
        exit_code: i32,
        fault: Fault,
        reported_by: Option<String>,
    ) {
        if !matches!(self.phase, JobPhase::Running | JobPhase::Released { .. }) {
            return;
        }
        let deadline_ms = match &self.suspicion {
            Some(earlier) if earlier.weight >= weight => return,
            Some(earlier) => earlier.deadline_ms,
            None => now_ms + self.deadlines.settle_ms(),
        };
        self.suspicion = Some(Suspicion { weight, fault, culprit, reported_by, exit_code, deadline_ms });
    }

    /// Turns a suspicion into the verdict once it is certain or old enough.
    fn settle(&mut self, now_ms: u64, actions: &mut Vec<MembershipAction>) {
        // The exit of a process whose link closed tells more than its link, and is on its way.
        let ends = |rank: usize| self.supervised && self.states[rank].closed && self.states[rank].exit.is_none();
        let deadline_ms = |suspicion: &Suspicion| match suspicion.culprit {
            Some(rank) if ends(rank) => suspicion.deadline_ms + self.deadlines.exit_ms(),
            _ => suspicion.deadline_ms,
        };
        let decided =
            |suspicion: &mut Suspicion| suspicion.weight == Weight::Certain || now_ms >= deadline_ms(suspicion);
        let Some(suspicion) = self.suspicion.take_if(decided) else { return };
        let text = if let Some(signal) = self.verdict.interrupted {
            // Whoever was asked to end and did so is not at fault.
            format!("the job was interrupted by signal {signal}")
        } else {
            let Suspicion { fault, culprit, reported_by, exit_code, .. } = suspicion;
            self.verdict = Verdict { exit_code, fault: Some(fault), culprit, reported_by, ..self.verdict.clone() };
            self.verdict.text().unwrap_or_default()
        };
        self.phase = JobPhase::Ending { deadline_ms: now_ms + self.deadlines.grace_ms(), killed: false };
        actions.push(MembershipAction::Abort { text });
        // Whoever is stopped can end only by force.
        let stopped = self.states.iter().filter(|state| state.stopped_ms.is_some() && !self.gone(state));
        actions.extend(stopped.map(|state| MembershipAction::Kill { rank: state.rank }));
    }

    fn gone(&self, state: &RankState) -> bool {
        if self.supervised { state.exit.is_some() } else { state.closed || !state.joined }
    }

    /// Moves towards the end.
    fn end(&mut self, now_ms: u64, actions: &mut Vec<MembershipAction>) {
        match self.phase {
            JobPhase::Running if self.suspicion.is_none() && self.states.iter().all(|state| state.finished) => {
                self.phase = JobPhase::Released { deadline_ms: now_ms + self.deadlines.stall_ms() };
                actions.push(MembershipAction::Release);
            }
            JobPhase::Released { deadline_ms } if now_ms >= deadline_ms => {
                if let Some(state) = self.states.iter().find(|state| !self.gone(state)) {
                    let (rank, waited) = (state.rank, self.deadlines.stall_ms());
                    let fault = self.lost(rank, format!("its process did not end within {waited} ms"));
                    self.suspect(now_ms, Weight::Certain, Some(rank), 1, fault, None);
                    self.settle(now_ms, actions);
                }
            }
            JobPhase::Ending { deadline_ms, killed: false } if now_ms >= deadline_ms => {
                let here = self.states.iter().filter(|state| !self.gone(state));
                actions.extend(here.map(|state| MembershipAction::Kill { rank: state.rank }));
                self.phase = JobPhase::Ending { deadline_ms: now_ms + self.deadlines.heartbeat_ms, killed: true };
            }
            _ => {}
        }
        let left: Vec<usize> = self.states.iter().filter(|state| !self.gone(state)).map(|state| state.rank).collect();
        let over = match self.phase {
            JobPhase::Released { .. } => left.is_empty() && self.suspicion.is_none(),
            JobPhase::Ending { deadline_ms, killed } => {
                // Where nobody ends those who come late, they must hear that it is over.
                let awaited = !self.supervised && self.states.iter().any(|state| !state.joined);
                (left.is_empty() && !awaited) || (killed && now_ms >= deadline_ms)
            }
            JobPhase::Running | JobPhase::Ended => false,
        };
        if over {
            // Asked to end, all ranks came to their end in order: the job is done.
            if matches!(self.phase, JobPhase::Released { .. }) {
                self.verdict.interrupted = None;
            }
            self.phase = JobPhase::Ended;
            self.verdict.left = left;
            if let Some(signal) = self.verdict.interrupted {
                self.verdict.exit_code = 128 + signal;
            }
            actions.push(MembershipAction::Ended(self.verdict.clone()));
        }
    }
}

#[cfg(test)]
mod tests;
