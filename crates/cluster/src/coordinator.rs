//! The coordinator of a job: rendezvous and membership behind one interface.
//!
//! A pure core that whoever moves the bytes drives: the local supervisor, the thread in rank 0 of a job that somebody else
//! started, and the simulator. Messages of another job or generation have no effect.

use crate::compute::HostLoad;
use crate::deadlines::Deadlines;
use crate::membership::{Membership, MembershipAction, MembershipEvent, Verdict};
use crate::message::{ControlMessage, Envelope, Hello};
use crate::rank_state::{Exit, Lag, Laggard};
use crate::rendezvous::{Rendezvous, RendezvousAction, RendezvousEvent};
use kolo_comm::Fault;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoordinatorConfig {
    pub world: usize,
    pub job: u64,
    pub generation: u32,
    pub deadlines: Deadlines,
    /// Whether exits of processes are reported.
    pub supervised: bool,
    /// Whether link and rank are the same number, as with inherited sockets.
    pub bound: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub enum CoordinatorEvent {
    Message {
        link: usize,
        envelope: Envelope,
    },
    /// Something malformed came, and the link is no more.
    Rejected {
        link: usize,
        fault: Fault,
    },
    Closed {
        link: usize,
    },
    Exited {
        rank: usize,
        exit: Exit,
    },
    Stopped {
        rank: usize,
    },
    Continued {
        rank: usize,
    },
    /// A rank's process has computed since this was last said; its host's load.
    Computed {
        rank: usize,
        load: HostLoad,
    },
    /// A rank's process cannot be reached or watched any more.
    Trouble {
        rank: usize,
        why: String,
    },
    Interrupt {
        signal: i32,
    },
    /// The others have given this coordinator up before they were connected with it, and have said so.
    GivenUp {
        text: String,
    },
    Tick,
}

#[derive(Clone, Debug, PartialEq)]
pub enum CoordinatorAction {
    Send {
        link: usize,
        envelope: Envelope,
    },
    Signal {
        rank: usize,
        signal: i32,
    },
    /// End this rank by force; `link` is its link, if it has one.
    Kill {
        rank: usize,
        link: Option<usize>,
    },
    /// Start this worker anew.
    Start {
        rank: usize,
    },
    Notice(Notice),
    Ended(Verdict),
}

/// What an observer may want to show.
#[derive(Clone, Debug, PartialEq)]
pub enum Notice {
    /// All ranks have joined.
    Joined { world: usize },
    /// Bytes that a member sent for the observer.
    Event { rank: usize, bytes: Vec<u8> },
    /// A rank fell behind.
    Slow(Lag),
    /// Workers of an elastic job were lost, or its state with all who had it; `text` says who and why.
    Lost { text: String, generation: u32 },
    /// An elastic job goes on.
    Resumed(Resumed),
    /// A worker joined a running job, and waits until it is needed or taken in.
    Spare { rank: usize, host: String },
    /// The ranks were asked to end.
    Interrupted,
    /// This launcher itself did not run for so long: it was suspended, or its machine is overloaded.
    Suspended { ms: u64 },
    /// The job ends before its time, for this reason. The verdict, which follows when all are gone, has it too. `shown` if
    /// another rank has shown it already.
    Ending { text: String, shown: bool },
}

/// A generation of an elastic job that has its state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resumed {
    pub generation: u32,
    pub step: u64,
    /// Ranks of the generation, and workers beside them that wait.
    pub workers: usize,
    pub spares: usize,
    /// The number of the worker that is rank 0, as the launcher counts them.
    pub first: usize,
    /// From when the generation before was over.
    pub took_ms: u64,
}

impl std::fmt::Display for Resumed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { generation, step, workers, spares, took_ms, .. } = self;
        let plural = if *workers == 1 { "" } else { "s" };
        write!(f, "continuing at step {step} with {workers} worker{plural}")?;
        match spares {
            0 => {}
            1 => write!(f, " and a spare")?,
            spares => write!(f, " and {spares} spares")?,
        }
        write!(f, " as generation {generation} after {:.1} s", *took_ms as f64 / 1e3)
    }
}

/// Whoever decides what a job's members do next: the same driver serves jobs of a fixed group and elastic ones.
pub trait Core {
    /// The host of each rank, as far as it is known before they come.
    fn expect(&mut self, _hosts: &[String]) {}
    fn step(&mut self, now_ms: u64, event: CoordinatorEvent) -> Vec<CoordinatorAction>;
}

impl Core for Coordinator {
    fn expect(&mut self, hosts: &[String]) {
        Coordinator::expect(self, hosts);
    }

    fn step(&mut self, now_ms: u64, event: CoordinatorEvent) -> Vec<CoordinatorAction> {
        Coordinator::step(self, now_ms, event)
    }
}

/// Steps a rank may be behind before it is worth a word; heartbeats of ranks in step show one or two.
const LAG_STEPS: u64 = 3;

#[derive(Debug)]
pub struct Coordinator {
    config: CoordinatorConfig,
    rendezvous: Rendezvous,
    membership: Membership,
    ranks: BTreeMap<usize, usize>,
    links: Vec<Option<usize>>,
    heartbeat_sent_ms: u64,
    laggard: Laggard,
    /// Why the job ends, for those who come too late.
    ending: Option<String>,
    /// A member has shown why already.
    shown: bool,
}

impl Coordinator {
    pub fn new(config: CoordinatorConfig, now_ms: u64) -> Self {
        Self {
            config,
            rendezvous: Rendezvous::new(config.world, config.deadlines.heartbeat_ms, config.supervised, now_ms),
            membership: Membership::new(config.world, config.deadlines, config.supervised, now_ms),
            ranks: BTreeMap::new(),
            links: vec![None; config.world],
            heartbeat_sent_ms: now_ms,
            laggard: Laggard::default(),
            ending: None,
            shown: false,
        }
    }

    /// What is known of the members, and the verdict on them once there is one.
    pub fn membership(&self) -> &Membership {
        &self.membership
    }

    /// The host of each rank, as far as it is known before they come.
    pub fn expect(&mut self, hosts: &[String]) {
        self.membership.expect(hosts);
    }

    pub fn step(&mut self, now_ms: u64, event: CoordinatorEvent) -> Vec<CoordinatorAction> {
        let mut actions = Vec::new();
        match event {
            CoordinatorEvent::Message { link, envelope } => self.message(now_ms, link, envelope, &mut actions),
            CoordinatorEvent::Rejected { link, fault } => {
                if self.ranks.contains_key(&link) || self.config.bound {
                    self.fault(now_ms, fault, &mut actions);
                }
            }
            CoordinatorEvent::Closed { link } => {
                if let Some(rank) = self.ranks.get(&link) {
                    self.update_membership(now_ms, MembershipEvent::Closed { rank: *rank }, &mut actions);
                }
            }
            CoordinatorEvent::Exited { rank, exit } => {
                self.update_membership(now_ms, MembershipEvent::Exited { rank, exit }, &mut actions)
            }
            CoordinatorEvent::Stopped { rank } => {
                self.update_membership(now_ms, MembershipEvent::Stopped { rank }, &mut actions)
            }
            CoordinatorEvent::Continued { rank } => {
                self.update_membership(now_ms, MembershipEvent::Continued { rank }, &mut actions)
            }
            CoordinatorEvent::Computed { rank, load } => {
                self.update_membership(now_ms, MembershipEvent::Computed { rank, load }, &mut actions)
            }
            CoordinatorEvent::Trouble { rank, why } => {
                self.update_membership(now_ms, MembershipEvent::Trouble { rank, why }, &mut actions)
            }
            CoordinatorEvent::Interrupt { signal } => {
                let first = self.membership.running() && !self.membership.interrupted();
                self.update_membership(now_ms, MembershipEvent::Interrupt { signal }, &mut actions);
                actions.extend(first.then_some(CoordinatorAction::Notice(Notice::Interrupted)));
            }
            CoordinatorEvent::GivenUp { text } => self.fault(now_ms, Fault::Aborted(text), &mut actions),
            CoordinatorEvent::Tick => self.tick(now_ms, &mut actions),
        }
        actions
    }

    fn message(&mut self, now_ms: u64, link: usize, envelope: Envelope, actions: &mut Vec<CoordinatorAction>) {
        if envelope.job != self.config.job || envelope.generation != self.config.generation {
            return;
        }
        let rank = match (self.ranks.get(&link), envelope.message) {
            (None, ControlMessage::Hello(hello)) => return self.hello(now_ms, link, hello, actions),
            (Some(rank), message) => return self.member(now_ms, *rank, message, actions),
            (None, _) => format!("link {link}"),
        };
        let why = "it sent a message before the handshake".into();
        self.fault(now_ms, Fault::Rejected { from: rank, why }, actions);
    }

    fn hello(&mut self, now_ms: u64, link: usize, hello: Hello, actions: &mut Vec<CoordinatorAction>) {
        if let Some(text) = self.ending.clone() {
            let envelope = self.envelope(ControlMessage::Abort { text });
            return actions.push(CoordinatorAction::Send { link, envelope });
        }
        if self.config.bound && hello.rank != link {
            let why = format!("rank {link} claims to be rank {}", hello.rank);
            return self.fault(now_ms, Fault::Rejected { from: format!("rank {link}"), why }, actions);
        }
        let done = self.rendezvous.step(now_ms, RendezvousEvent::Hello { link, hello });
        self.apply_rendezvous(now_ms, done, actions);
        // Whoever was refused hears why.
        if let (None, Some(text)) = (self.ranks.get(&link), self.ending.clone()) {
            let envelope = self.envelope(ControlMessage::Abort { text });
            actions.push(CoordinatorAction::Send { link, envelope });
        }
    }

    fn member(&mut self, now_ms: u64, rank: usize, message: ControlMessage, actions: &mut Vec<CoordinatorAction>) {
        let event = match message {
            ControlMessage::Blob { round, bytes, .. } => {
                let done = self.rendezvous.step(now_ms, RendezvousEvent::Blob { rank, round, bytes });
                return self.apply_rendezvous(now_ms, done, actions);
            }
            ControlMessage::Event(bytes) => {
                return actions.push(CoordinatorAction::Notice(Notice::Event { rank, bytes }));
            }
            ControlMessage::Heartbeat(activity) => MembershipEvent::Heartbeat { rank, activity },
            ControlMessage::Fail { text, culprit } => MembershipEvent::Failed { rank, text, culprit },
            ControlMessage::Finish => MembershipEvent::Finished { rank },
            ControlMessage::GiveUp { text, shown } => {
                self.shown |= shown;
                MembershipEvent::GivenUp { rank, text, shown }
            }
            // A fixed group cannot go on without any of its ranks.
            ControlMessage::Unreachable { .. } => return,
            _ => {
                let from = self.membership.rank_state(rank).name();
                let why = "a message that only the coordinator may send".into();
                return self.fault(now_ms, Fault::Rejected { from, why }, actions);
            }
        };
        self.update_membership(now_ms, event, actions);
    }

    /// Carries out what the rendezvous decided.
    fn apply_rendezvous(&mut self, now_ms: u64, done: Vec<RendezvousAction>, actions: &mut Vec<CoordinatorAction>) {
        for action in done {
            match action {
                RendezvousAction::Accept { link, rank } => {
                    self.ranks.insert(link, rank);
                    self.links[rank] = Some(link);
                    let host = self.rendezvous.label(rank);
                    self.update_membership(now_ms, MembershipEvent::Joined { rank, host }, actions);
                }
                RendezvousAction::Roster(peers) => {
                    for (rank, peer) in peers.into_iter().enumerate() {
                        self.send_all(&ControlMessage::Roster { rank, peer }, actions);
                    }
                    actions.push(CoordinatorAction::Notice(Notice::Joined { world: self.config.world }));
                }
                RendezvousAction::Blobs { round, blobs } => {
                    for (rank, bytes) in blobs.into_iter().enumerate() {
                        self.send_all(&ControlMessage::Blob { round, rank, bytes }, actions);
                    }
                }
                RendezvousAction::Fault(fault) => self.fault(now_ms, fault, actions),
            }
        }
    }

    fn fault(&mut self, now_ms: u64, fault: Fault, actions: &mut Vec<CoordinatorAction>) {
        self.update_membership(now_ms, MembershipEvent::Fault(fault), actions);
    }

    /// Tells the membership, and carries out what it decided.
    fn update_membership(&mut self, now_ms: u64, event: MembershipEvent, actions: &mut Vec<CoordinatorAction>) {
        for action in self.membership.step(now_ms, event) {
            match action {
                MembershipAction::Signal { rank, signal } => actions.push(CoordinatorAction::Signal { rank, signal }),
                MembershipAction::Abort { text } => {
                    self.send_all(&ControlMessage::Abort { text: text.clone() }, actions);
                    self.ending = Some(text.clone());
                    actions.push(CoordinatorAction::Notice(Notice::Ending { text, shown: self.shown }));
                }
                MembershipAction::Kill { rank } => {
                    actions.push(CoordinatorAction::Kill { rank, link: self.links[rank] })
                }
                MembershipAction::Release => self.send_all(&ControlMessage::Release, actions),
                MembershipAction::Ended(verdict) => actions.push(CoordinatorAction::Ended(verdict)),
            }
        }
    }

    fn envelope(&self, message: ControlMessage) -> Envelope {
        Envelope { job: self.config.job, generation: self.config.generation, message }
    }

    fn send_all(&self, message: &ControlMessage, actions: &mut Vec<CoordinatorAction>) {
        let send = |link: &usize| CoordinatorAction::Send { link: *link, envelope: self.envelope(message.clone()) };
        actions.extend(self.links.iter().flatten().map(send));
    }

    fn tick(&mut self, now_ms: u64, actions: &mut Vec<CoordinatorAction>) {
        if self.membership.running() {
            let done = self.rendezvous.step(now_ms, RendezvousEvent::Tick);
            self.apply_rendezvous(now_ms, done, actions);
            self.check_exchange(now_ms, actions);
        }
        if now_ms >= self.heartbeat_sent_ms + self.config.deadlines.beat_ms() {
            let moved =
                (0..self.config.world).any(|rank| self.membership.rank_state(rank).moved_ms >= self.heartbeat_sent_ms);
            self.heartbeat_sent_ms = now_ms;
            self.send_all(&ControlMessage::CoordinatorHeartbeat { moved }, actions);
            self.report_slow(now_ms, actions);
        }
        self.update_membership(now_ms, MembershipEvent::Tick, actions);
    }

    /// Somebody does not come to an exchange, and does nothing else either.
    fn check_exchange(&mut self, now_ms: u64, actions: &mut Vec<CoordinatorAction>) {
        let Some((since_ms, round, missing)) = self.rendezvous.waiting() else { return };
        let stall_ms = self.config.deadlines.stall_ms();
        let still = |rank: &&usize| now_ms >= self.membership.rank_state(**rank).moved_ms.max(since_ms) + stall_ms;
        if let Some(rank) = missing.iter().find(still) {
            let state = self.membership.rank_state(*rank);
            let during = format!("exchange {round} of the start");
            let fault = Fault::Stalled { peer: *rank, host: state.host.clone(), during, waited_ms: stall_ms };
            self.fault(now_ms, fault, actions);
        }
    }

    fn report_slow(&mut self, now_ms: u64, actions: &mut Vec<CoordinatorAction>) {
        let lag = self.membership.lag().filter(|lag| lag.behind >= LAG_STEPS);
        let shown = self.laggard.tell(now_ms, self.config.deadlines.orphan_ms(), lag);
        actions.extend(shown.map(|lag| CoordinatorAction::Notice(Notice::Slow(lag))));
    }
}
