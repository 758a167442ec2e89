//! The coordinator of a job: rendezvous and membership behind one door.
//!
//! A pure core that whoever moves the bytes drives: the local supervisor, the thread in rank 0 of a job that somebody else
//! started, and the simulator. Messages of another job or generation have no effect.

use crate::membership::{self, Membership, Verdict};
use crate::message::{Envelope, Hello, Message};
use crate::pace::Pace;
use crate::rendezvous::{self, Rendezvous};
use crate::seat::{Exit, Lag, Laggard};
use kolo_comm::Fault;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    pub world: usize,
    pub job: u64,
    pub generation: u32,
    pub pace: Pace,
    /// Whether exits of processes are reported.
    pub supervised: bool,
    /// Whether link and rank are the same number, as with inherited sockets.
    pub bound: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
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
    /// A rank's process cannot be reached or watched any more.
    Trouble {
        rank: usize,
        why: String,
    },
    Interrupt {
        signal: i32,
    },
    Tick,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Action {
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
    /// The ranks were asked to end.
    Interrupted,
    /// The job ends before its time, for this reason. The verdict, which follows when all are gone, has it too. `told` if
    /// another rank has shown it already.
    Ending { text: String, told: bool },
}

/// Steps a rank may be behind before it is worth a word; heartbeats of ranks in step show one or two.
const LAG_STEPS: u64 = 3;

#[derive(Debug)]
pub struct Coordinator {
    terms: Terms,
    rendezvous: Rendezvous,
    membership: Membership,
    ranks: BTreeMap<usize, usize>,
    links: Vec<Option<usize>>,
    pulsed_ms: u64,
    laggard: Laggard,
    /// Why the job ends, for those who come too late.
    ending: Option<String>,
    /// A member has shown why already.
    told: bool,
}

impl Coordinator {
    pub fn new(terms: Terms, now_ms: u64) -> Self {
        Self {
            terms,
            rendezvous: Rendezvous::new(terms.world, terms.pace.heartbeat_ms, now_ms),
            membership: Membership::new(terms.world, terms.pace, terms.supervised, now_ms),
            ranks: BTreeMap::new(),
            links: vec![None; terms.world],
            pulsed_ms: now_ms,
            laggard: Laggard::default(),
            ending: None,
            told: false,
        }
    }

    /// The host of each rank, as far as it is known before they come.
    pub fn expect(&mut self, hosts: &[String]) {
        self.membership.expect(hosts);
    }

    pub fn step(&mut self, now_ms: u64, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Message { link, envelope } => self.message(now_ms, link, envelope, &mut actions),
            Event::Rejected { link, fault } => {
                if self.ranks.contains_key(&link) || self.terms.bound {
                    self.fault(now_ms, fault, &mut actions);
                }
            }
            Event::Closed { link } => {
                if let Some(rank) = self.ranks.get(&link) {
                    self.watch(now_ms, membership::Event::Closed { rank: *rank }, &mut actions);
                }
            }
            Event::Exited { rank, exit } => self.watch(now_ms, membership::Event::Exited { rank, exit }, &mut actions),
            Event::Stopped { rank } => self.watch(now_ms, membership::Event::Stopped { rank }, &mut actions),
            Event::Continued { rank } => self.watch(now_ms, membership::Event::Continued { rank }, &mut actions),
            Event::Trouble { rank, why } => self.watch(now_ms, membership::Event::Trouble { rank, why }, &mut actions),
            Event::Interrupt { signal } => {
                let first = self.membership.running() && !self.membership.interrupted();
                self.watch(now_ms, membership::Event::Interrupt { signal }, &mut actions);
                actions.extend(first.then_some(Action::Notice(Notice::Interrupted)));
            }
            Event::Tick => self.tick(now_ms, &mut actions),
        }
        actions
    }

    fn message(&mut self, now_ms: u64, link: usize, envelope: Envelope, actions: &mut Vec<Action>) {
        if envelope.job != self.terms.job || envelope.generation != self.terms.generation {
            return;
        }
        let rank = match (self.ranks.get(&link), envelope.message) {
            (None, Message::Hello(hello)) => return self.hello(now_ms, link, hello, actions),
            (Some(rank), message) => return self.member(now_ms, *rank, message, actions),
            (None, _) => format!("link {link}"),
        };
        let why = "it spoke before it introduced itself".into();
        self.fault(now_ms, Fault::Rejected { from: rank, why }, actions);
    }

    fn hello(&mut self, now_ms: u64, link: usize, hello: Hello, actions: &mut Vec<Action>) {
        if let Some(text) = self.ending.clone() {
            let envelope = self.envelope(Message::Abort { text });
            return actions.push(Action::Send { link, envelope });
        }
        if self.terms.bound && hello.rank != link {
            let why = format!("rank {link} says that it is rank {}", hello.rank);
            return self.fault(now_ms, Fault::Rejected { from: format!("rank {link}"), why }, actions);
        }
        let done = self.rendezvous.step(now_ms, rendezvous::Event::Hello { link, hello });
        self.meet(now_ms, done, actions);
        // Whoever was refused hears why.
        if let (None, Some(text)) = (self.ranks.get(&link), self.ending.clone()) {
            let envelope = self.envelope(Message::Abort { text });
            actions.push(Action::Send { link, envelope });
        }
    }

    fn member(&mut self, now_ms: u64, rank: usize, message: Message, actions: &mut Vec<Action>) {
        let event = match message {
            Message::Blob { round, bytes, .. } => {
                let done = self.rendezvous.step(now_ms, rendezvous::Event::Blob { rank, round, bytes });
                return self.meet(now_ms, done, actions);
            }
            Message::Event(bytes) => return actions.push(Action::Notice(Notice::Event { rank, bytes })),
            Message::Beat(activity) => membership::Event::Beat { rank, activity },
            Message::Fail { text, culprit } => membership::Event::Failed { rank, text, culprit },
            Message::Finish => membership::Event::Finished { rank },
            Message::GiveUp { text, told } => {
                self.told |= told;
                membership::Event::GivenUp { rank, text, told }
            }
            _ => {
                let from = self.membership.seat(rank).place();
                let why = "a message that only the coordinator may send".into();
                return self.fault(now_ms, Fault::Rejected { from, why }, actions);
            }
        };
        self.watch(now_ms, event, actions);
    }

    /// Carries out what the rendezvous decided.
    fn meet(&mut self, now_ms: u64, done: Vec<rendezvous::Action>, actions: &mut Vec<Action>) {
        for action in done {
            match action {
                rendezvous::Action::Accept { link, rank } => {
                    self.ranks.insert(link, rank);
                    self.links[rank] = Some(link);
                    let host = self.rendezvous.label(rank);
                    self.watch(now_ms, membership::Event::Joined { rank, host }, actions);
                }
                rendezvous::Action::Roster(peers) => {
                    for (rank, peer) in peers.into_iter().enumerate() {
                        self.tell_all(&Message::Roster { rank, peer }, actions);
                    }
                    actions.push(Action::Notice(Notice::Joined { world: self.terms.world }));
                }
                rendezvous::Action::Blobs { round, blobs } => {
                    for (rank, bytes) in blobs.into_iter().enumerate() {
                        self.tell_all(&Message::Blob { round, rank, bytes }, actions);
                    }
                }
                rendezvous::Action::Fault(fault) => self.fault(now_ms, fault, actions),
            }
        }
    }

    fn fault(&mut self, now_ms: u64, fault: Fault, actions: &mut Vec<Action>) {
        self.watch(now_ms, membership::Event::Fault(fault), actions);
    }

    /// Tells the membership, and carries out what it decided.
    fn watch(&mut self, now_ms: u64, event: membership::Event, actions: &mut Vec<Action>) {
        for action in self.membership.step(now_ms, event) {
            match action {
                membership::Action::Signal { rank, signal } => actions.push(Action::Signal { rank, signal }),
                membership::Action::Abort { text } => {
                    self.tell_all(&Message::Abort { text: text.clone() }, actions);
                    self.ending = Some(text.clone());
                    actions.push(Action::Notice(Notice::Ending { text, told: self.told }));
                }
                membership::Action::Kill { rank } => actions.push(Action::Kill { rank, link: self.links[rank] }),
                membership::Action::Release => self.tell_all(&Message::Release, actions),
                membership::Action::Ended(verdict) => actions.push(Action::Ended(verdict)),
            }
        }
    }

    fn envelope(&self, message: Message) -> Envelope {
        Envelope { job: self.terms.job, generation: self.terms.generation, message }
    }

    fn tell_all(&self, message: &Message, actions: &mut Vec<Action>) {
        let send = |link: &usize| Action::Send { link: *link, envelope: self.envelope(message.clone()) };
        actions.extend(self.links.iter().flatten().map(send));
    }

    fn tick(&mut self, now_ms: u64, actions: &mut Vec<Action>) {
        if self.membership.running() {
            let done = self.rendezvous.step(now_ms, rendezvous::Event::Tick);
            self.meet(now_ms, done, actions);
            self.late(now_ms, actions);
        }
        if now_ms >= self.pulsed_ms + self.terms.pace.beat_ms() {
            let moved = (0..self.terms.world).any(|rank| self.membership.seat(rank).moved_ms >= self.pulsed_ms);
            self.pulsed_ms = now_ms;
            self.tell_all(&Message::Pulse { moved }, actions);
            self.tell_slow(now_ms, actions);
        }
        self.watch(now_ms, membership::Event::Tick, actions);
    }

    /// Somebody does not come to an exchange, and does nothing else either.
    fn late(&mut self, now_ms: u64, actions: &mut Vec<Action>) {
        let Some((since_ms, round, missing)) = self.rendezvous.waiting() else { return };
        let stall_ms = self.terms.pace.stall_ms();
        let still = |rank: &&usize| now_ms >= self.membership.seat(**rank).moved_ms.max(since_ms) + stall_ms;
        if let Some(rank) = missing.iter().find(still) {
            let seat = self.membership.seat(*rank);
            let during = format!("exchange {round} of the start");
            let fault = Fault::Stalled { peer: *rank, host: seat.host.clone(), during, waited_ms: stall_ms };
            self.fault(now_ms, fault, actions);
        }
    }

    fn tell_slow(&mut self, now_ms: u64, actions: &mut Vec<Action>) {
        let lag = self.membership.lag().filter(|lag| lag.behind >= LAG_STEPS);
        let told = self.laggard.tell(now_ms, self.terms.pace.orphan_ms(), lag);
        actions.extend(told.map(|lag| Action::Notice(Notice::Slow(lag))));
    }
}
