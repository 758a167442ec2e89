//! The coordinator of an elastic job: workers come and go, and those that are there form generations.
//!
//! A pure core, as [`Coordinator`]: `step(now, event) -> actions`. A generation is a fixed group with its own [`Coordinator`],
//! which finds its faults. Where a fixed job ends at the first one, here the lost worker is fenced, the others leave the
//! generation and say how far their state has come, and as many as the grains allow become ranks of the next one; the rest
//! wait as spares. In events and actions of this core, `rank` is the number of a worker: those the launcher started count
//! from 0, those that join later follow.
//!
//! Invariants, which `simulation::elastic` checks: a generation forms only when all of the one before that are still here have
//! left it, and whoever was lost is gone or has given up; so a generation gets no further than the step in flight when the
//! next one begins. Messages of an older generation have no effect. A generation that is lost as a whole before this core has
//! heard that it goes on is the exception: those who are left begin where it did, and make the same steps again.
//!
//! Where each worker holds a part of the state, all of them are needed to put it together. If they are more than the grains
//! allow, they first form a group that hands the state over to as many of its ranks, and then regroups.

mod worker;

use crate::coordinator::{Coordinator, CoordinatorAction, CoordinatorEvent, Core, Notice, Resumed};
use crate::deadlines::Deadlines;
use crate::membership::Verdict;
use crate::message::{ANY_RANK, ControlMessage, Envelope, Hello};
use crate::rank_state::Exit;
use crate::rendezvous::JOIN_HEARTBEATS;
use kolo_comm::Fault;
use kolo_comm::fault::rank_name;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use worker::WorkerState;

/// Most workers that a job knows at a time, lost ones that may not be gone among them.
const WORKERS_MAX: usize = 1 << 12;
/// Heartbeats before a lost worker is started again; each time it doubles.
const RESTART_HEARTBEATS: f64 = 0.25;
const RESTART_DOUBLINGS_MAX: u32 = 6;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ElasticConfig {
    pub job: u64,
    /// Workers that the launcher starts.
    pub workers: usize,
    /// Fewest ranks with which the job goes on.
    pub min: usize,
    /// The number of ranks must divide it.
    pub grains: usize,
    /// How many restarts of lost workers are allowed, in total.
    pub restarts: u32,
    pub deadlines: Deadlines,
    /// Whether exits of the launcher's workers are reported.
    pub supervised: bool,
    /// Whether each worker holds a part of the state.
    pub sharded: bool,
}

/// What makes a launcher's job elastic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ElasticOptions {
    /// Fewest ranks with which the job goes on.
    pub min: usize,
    /// The number of ranks must divide it.
    pub grains: usize,
    /// How many restarts of lost workers are allowed, in total.
    pub restarts: u32,
    /// Whether each worker holds a part of the state, so that all are needed to put it together.
    pub sharded: bool,
    /// Where those who join later find the job, and the command that they run. Without it nobody can.
    pub invitation: Option<Invitation>,
}

/// A file, for the user alone, that lets further workers join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invitation {
    pub path: PathBuf,
    /// The words of the command, without the program.
    pub command: Vec<String>,
}

impl ElasticOptions {
    pub(crate) fn core(&self, job: u64, deadlines: Deadlines, hosts: &[String], supervised: bool) -> Elastic {
        let ElasticOptions { min, grains, restarts, sharded, .. } = *self;
        let workers = hosts.len();
        let config = ElasticConfig { job, workers, min, grains, restarts, deadlines, supervised, sharded };
        Elastic { home: crate::host_name(), ..Elastic::new(config, hosts, 0) }
    }
}

impl ElasticConfig {
    /// The most ranks that so many workers can form.
    pub fn ranks(&self, workers: usize) -> usize {
        (1..=workers.min(self.grains)).rev().find(|ranks| self.grains.is_multiple_of(*ranks)).unwrap_or(0)
    }

    fn join_ms(&self) -> u64 {
        self.deadlines.heartbeat_ms * JOIN_HEARTBEATS
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum JobPhase {
    /// Workers leave the generation before, or come for the first time.
    Gathering {
        deadline_ms: u64,
    },
    Running,
    /// All have finished, or the first rank and nobody is needed any more.
    Released {
        deadline_ms: u64,
    },
    Ending {
        deadline_ms: u64,
        killed: bool,
    },
    Ended,
}

/// The generation that runs.
#[derive(Debug)]
struct Group {
    coordinator: Coordinator,
    /// The worker of each rank.
    members: Vec<usize>,
    /// Its members were asked to regroup after their step.
    yields: bool,
    /// It only hands the state over.
    hands_over: bool,
    /// Of those lost, as many as its members were told of.
    told: usize,
    /// Whom each rank cannot reach, of those who cannot reach somebody.
    unreachable: BTreeMap<usize, Vec<usize>>,
    /// When it is decided who goes on, if some cannot reach each other.
    cut_ms: Option<u64>,
}

#[derive(Debug)]
pub struct Elastic {
    config: ElasticConfig,
    phase: JobPhase,
    generation: u32,
    workers: BTreeMap<usize, WorkerState>,
    /// The hosts of the launcher's workers, as far as they are known.
    places: Vec<String>,
    /// The coordinator's own host.
    home: String,
    /// Hosts that the others could not reach: nobody is started there.
    cut_off: BTreeSet<String>,
    links: BTreeMap<usize, usize>,
    group: Option<Group>,
    /// Whether a generation has formed.
    formed: bool,
    /// Whether a step is known to be done, so that there is a state that can be lost: any worker can make that of the start.
    progressed: bool,
    /// The last generation that went on, and the last step that is known of.
    resumed: u32,
    step: u64,
    /// Workers lost since a generation went on without knowing of them, in words.
    lost: Vec<String>,
    restarts: u32,
    /// How many have joined later.
    joined: usize,
    /// When the last generation was over.
    over_ms: u64,
    interrupted: Option<i32>,
    verdict: Verdict,
    heartbeat_sent_ms: u64,
    last_ms: u64,
}

type Actions = Vec<CoordinatorAction>;

impl Elastic {
    /// `hosts` are those of the launcher's workers, as far as they are known.
    pub fn new(config: ElasticConfig, hosts: &[String], now_ms: u64) -> Self {
        let host = |worker: usize| hosts.get(worker).cloned().unwrap_or_default();
        let start = |worker: usize| (worker, WorkerState::new(host(worker), config.supervised, now_ms));
        Self {
            config,
            phase: JobPhase::Gathering { deadline_ms: now_ms + config.join_ms() },
            generation: 0,
            workers: (0..config.workers).map(start).collect(),
            places: hosts.to_vec(),
            home: String::new(),
            cut_off: BTreeSet::new(),
            links: BTreeMap::new(),
            group: None,
            formed: false,
            progressed: false,
            resumed: 0,
            step: 0,
            lost: Vec::new(),
            restarts: 0,
            joined: 0,
            over_ms: now_ms,
            interrupted: None,
            verdict: Verdict {
                exit_code: 0,
                fault: None,
                culprit: None,
                reported_by: None,
                interrupted: None,
                left: Vec::new(),
            },
            heartbeat_sent_ms: now_ms,
            last_ms: now_ms,
        }
    }

    fn envelope(&self, message: ControlMessage) -> Envelope {
        Envelope { job: self.config.job, generation: self.generation, message }
    }

    fn send(&self, link: usize, message: ControlMessage, actions: &mut Actions) {
        actions.push(CoordinatorAction::Send { link, envelope: self.envelope(message) });
    }

    /// Tells every worker with a link that `chosen` chooses.
    fn tell(&self, message: &ControlMessage, chosen: impl Fn(usize) -> bool, actions: &mut Actions) {
        let connected = self.workers.iter().filter(|(worker, state)| state.is_connected() && chosen(**worker));
        for link in connected.filter_map(|(_, state)| state.link) {
            self.send(link, message.clone(), actions);
        }
    }

    fn rank(&self, worker: usize) -> Option<usize> {
        self.group.as_ref()?.members.iter().position(|member| *member == worker)
    }

    fn connected(&self) -> Vec<usize> {
        self.workers.iter().filter(|(_, state)| state.is_connected()).map(|(worker, _)| *worker).collect()
    }

    /// Time in which this core did not run is nobody's silence.
    fn forgive(&mut self, now_ms: u64) {
        let absent_ms = now_ms.saturating_sub(self.last_ms);
        self.last_ms = now_ms;
        let deadlines = self.config.deadlines;
        if absent_ms <= deadlines.beat_ms() {
            return;
        }
        let latest_ms = (now_ms + 2 * deadlines.beat_ms()).saturating_sub(deadlines.silence_ms());
        for state in self.workers.values_mut() {
            state.heard_ms = state.heard_ms.max((state.heard_ms + absent_ms).min(latest_ms));
            state.stopped_ms = state.stopped_ms.map(|since_ms| since_ms + absent_ms);
        }
        if let Some(cut_ms) = self.group.as_mut().and_then(|group| group.cut_ms.as_mut()) {
            *cut_ms += absent_ms;
        }
    }

    /// Passes an event on to the generation's own coordinator, and carries out what that decides.
    fn forward(&mut self, now_ms: u64, event: CoordinatorEvent, actions: &mut Actions) {
        let Some(group) = self.group.as_mut().filter(|_| self.phase == JobPhase::Running) else { return };
        let decided = group.coordinator.step(now_ms, event);
        self.carry_out(now_ms, decided, actions);
    }

    fn carry_out(&mut self, now_ms: u64, decided: Actions, actions: &mut Actions) {
        let Some(group) = &self.group else { return };
        let ending = |action: &CoordinatorAction| matches!(action, CoordinatorAction::Notice(Notice::Ending { .. }));
        if decided.iter().any(ending) {
            let verdict = group.coordinator.membership().verdict().clone();
            return self.judge(now_ms, verdict, actions);
        }
        let mut released = false;
        for action in decided {
            match action {
                CoordinatorAction::Send { envelope: Envelope { message: ControlMessage::Release, .. }, .. } => {
                    released = true;
                }
                CoordinatorAction::Signal { rank, signal } => {
                    actions.push(CoordinatorAction::Signal { rank: group.members[rank], signal });
                }
                // A generation is never all there is, and its members are ended by this core.
                CoordinatorAction::Notice(Notice::Joined { .. })
                | CoordinatorAction::Kill { .. }
                | CoordinatorAction::Ended(_) => {}
                other => actions.push(other),
            }
        }
        if released {
            self.release(now_ms, actions);
        }
    }

    /// The job is done: all may go.
    fn release(&mut self, now_ms: u64, actions: &mut Actions) {
        self.phase = JobPhase::Released { deadline_ms: now_ms + self.config.deadlines.stall_ms() };
        self.tell(&ControlMessage::Release, |_| true, actions);
    }

    /// A generation found a fault: either one of its workers is lost, or the job cannot go on.
    fn judge(&mut self, now_ms: u64, verdict: Verdict, actions: &mut Actions) {
        let culprit = verdict.culprit.and_then(|rank| self.group.as_ref()?.members.get(rank).copied());
        let hearsay = verdict.reported_by.is_some();
        match (culprit, &verdict.fault) {
            (Some(worker), Some(fault)) if is_loss(fault, hearsay) => {
                let why = match fault {
                    Fault::Lost { why, .. } => why.clone(),
                    fault => first_line(&fault.to_string()),
                };
                self.lose(now_ms, worker, why, actions);
            }
            _ => {
                let culprit = culprit.or(verdict.culprit);
                self.end(now_ms, Verdict { culprit, ..verdict }, actions);
            }
        }
    }

    /// This worker has no part in the job any more.
    fn lose(&mut self, now_ms: u64, worker: usize, why: String, actions: &mut Actions) {
        self.lose_all(now_ms, &[worker], &why, actions);
    }

    /// All of these at once: the others regroup a single time.
    fn lose_all(&mut self, now_ms: u64, lost: &[usize], why: &str, actions: &mut Actions) {
        if matches!(self.phase, JobPhase::Released { .. } | JobPhase::Ending { .. } | JobPhase::Ended) {
            return;
        }
        let texts: Vec<String> = lost.iter().filter_map(|worker| self.give_up(now_ms, *worker, why, actions)).collect();
        if texts.is_empty() {
            return;
        }
        match self.phase {
            JobPhase::Running if lost.iter().all(|worker| self.rank(*worker).is_none()) => {
                let members = self.group.as_ref().map_or(Vec::new(), |group| group.members.clone());
                for text in texts {
                    self.tell(&ControlMessage::Lost { text }, |worker| members.contains(&worker), actions);
                }
            }
            JobPhase::Running => {
                let finished =
                    self.group.as_ref().is_some_and(|group| group.coordinator.membership().rank_state(0).finished);
                // The first rank has written all results: nobody is needed any more.
                if finished { self.release(now_ms, actions) } else { self.gather(now_ms, actions) }
            }
            _ => self.try_to_form(now_ms, actions),
        }
    }

    /// Ends what it can of a worker that was not lost before, and says who it was, and why.
    fn give_up(&mut self, now_ms: u64, worker: usize, why: &str, actions: &mut Actions) -> Option<String> {
        let (rank, is_cut_off) = (self.rank(worker), self.cut_off.contains(self.place(worker)));
        let state = self.workers.get_mut(&worker).filter(|state| state.lost_ms.is_none())?;
        // The link that we close now says nothing of the process behind it, even if its end is seen in this millisecond.
        (state.lost_ms, state.left) = (Some(now_ms), state.closed_ms.is_some());
        let host = state.hello.as_ref().map_or(state.host.clone(), Hello::label);
        let link = state.link;
        self.links.retain(|_, of| *of != worker);
        let (launched, gone) = (state.launched, state.is_gone());
        if let Some(link) = link.filter(|_| !launched && !gone) {
            // Nobody shows the job's words where it was started.
            let text = format!("the job goes on without this worker: {why}");
            self.send(link, ControlMessage::Abort { text }, actions);
        }
        if !gone {
            actions.push(CoordinatorAction::Kill { rank: worker, link });
        }
        let state = self.workers.get_mut(&worker)?;
        let text = match rank {
            // One that has made no step here was about to make that of the others.
            Some(rank) => {
                let step = if state.step > 0 { state.step } else { self.step };
                format!("{} was lost at step {step}: {why}", rank_name(rank, &host))
            }
            None => {
                format!("worker {worker}{} was lost: {why}", if host.is_empty() { host } else { format!(" on {host}") })
            }
        };
        // Whoever was asked to end before there was anything to save, and did so, is not lost.
        let obeyed = self.interrupted.is_some_and(|signal| {
            state.asked
                && matches!(state.exit, Some(exit) if exit == Exit::Code(128 + signal) || exit == Exit::Signal(signal))
        });
        let may_restart = self.restarts < self.config.restarts && self.interrupted.is_none() && !is_cut_off;
        if state.launched && may_restart {
            let doublings = self.restarts.min(RESTART_DOUBLINGS_MAX);
            let pause_ms = RESTART_HEARTBEATS * self.config.deadlines.heartbeat_ms as f64 * f64::from(1 << doublings);
            state.restart_ms = Some(now_ms + pause_ms as u64);
            self.restarts += 1;
        }
        if !obeyed {
            self.lost.push(text.clone());
            actions.push(CoordinatorAction::Notice(Notice::Lost { text: text.clone(), generation: self.generation }));
        }
        Some(text)
    }

    /// The generation is over: all who are here leave it and say where they stand.
    fn gather(&mut self, now_ms: u64, actions: &mut Actions) {
        self.generation += 1;
        // A group that handed the state over is part of the recovery.
        if !self.group.take().is_some_and(|group| group.hands_over) {
            self.over_ms = now_ms;
        }
        self.phase = JobPhase::Gathering { deadline_ms: now_ms + self.config.deadlines.stall_ms() };
        self.workers.values_mut().for_each(|state| state.ready = None);
        self.tell(&ControlMessage::Regroup, |_| true, actions);
        self.try_to_form(now_ms, actions);
    }

    /// The job ends before its time.
    fn end(&mut self, now_ms: u64, verdict: Verdict, actions: &mut Actions) {
        if matches!(self.phase, JobPhase::Ending { .. } | JobPhase::Ended) {
            return;
        }
        let text = verdict.text().unwrap_or_else(|| "the job was interrupted".into());
        self.tell(&ControlMessage::Abort { text: text.clone() }, |_| true, actions);
        actions.push(CoordinatorAction::Notice(Notice::Ending { text, shown: false }));
        (self.verdict, self.group) = (verdict, None);
        self.phase = JobPhase::Ending { deadline_ms: now_ms + self.config.deadlines.grace_ms(), killed: false };
    }

    /// Moves towards the end, once it has begun.
    fn finish(&mut self, now_ms: u64, actions: &mut Actions) {
        let left: Vec<usize> =
            self.workers.iter().filter(|(_, state)| !state.is_gone()).map(|(worker, _)| *worker).collect();
        let over = match self.phase {
            JobPhase::Released { deadline_ms } | JobPhase::Ending { deadline_ms, killed: false } => {
                if now_ms >= deadline_ms && !left.is_empty() {
                    for worker in &left {
                        actions.push(CoordinatorAction::Kill { rank: *worker, link: self.workers[worker].link });
                    }
                    let deadline_ms = now_ms + self.config.deadlines.heartbeat_ms;
                    self.phase = JobPhase::Ending { deadline_ms, killed: true };
                }
                left.is_empty()
            }
            JobPhase::Ending { deadline_ms, killed: true } => left.is_empty() || now_ms >= deadline_ms,
            _ => return,
        };
        if over {
            // Asked to end, all came to their end in order: the job is done.
            let interrupted = self.interrupted.filter(|_| !matches!(self.phase, JobPhase::Released { .. }));
            self.verdict.interrupted = interrupted;
            if let Some(signal) = interrupted {
                self.verdict.exit_code = 128 + signal;
            }
            self.verdict.left = left;
            self.phase = JobPhase::Ended;
            actions.push(CoordinatorAction::Ended(self.verdict.clone()));
        }
    }
}

/// Whether a fault is the loss of a rank, which an elastic job survives.
fn is_loss(fault: &Fault, hearsay: bool) -> bool {
    matches!(fault, Fault::Lost { .. } | Fault::Stalled { .. }) || (hearsay && matches!(fault, Fault::Aborted(_)))
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().into()
}

mod events;
mod forming;
mod partition;
#[cfg(test)]
mod tests;
