//! The simulated job: its members, its links and the order in which things happen.

use super::{DEADLINES, DELAY_MAX_MS, GENERATION, HORIZON_MS, INJECTED_FAULTS, InjectedFault, JOB};
use crate::coordinator::{Coordinator, CoordinatorAction, CoordinatorConfig, CoordinatorEvent, Notice};
use crate::introduction::Manifest;
use crate::membership::Verdict;
use crate::message::{ControlMessage, Envelope, Hello};
use crate::rank_state::Exit;
use kolo_comm::call::short_name;
use kolo_comm::watch::Activity;
use kolo_comm::{CallKind, ElementType, Fault, Fingerprint, Reduction};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

pub(super) struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let mixed = (self.0 ^ (self.0 >> 31)).wrapping_mul(0xbf58476d1ce4e5b9);
        (mixed ^ (mixed >> 29)) % end.max(1)
    }
}

#[derive(Clone, Debug, PartialEq)]
enum SimulatedEvent {
    Start(usize),
    ToCoordinator(CoordinatorEvent),
    ToMember(usize, ControlMessage),
    Tick,
    Beat(usize),
    Computed(usize),
    CallDone(u64),
    End(usize, Exit),
    Wake(usize),
    Inject,
}

/// A member, reduced to what the coordinator sees of it.
#[derive(Clone, Debug)]
pub(super) struct SimulatedMember {
    pub alive: bool,
    stopped: bool,
    hung: bool,
    pub finished: bool,
    roster: usize,
    blobs: usize,
    step: u64,
    progress: u64,
    in_call: bool,
    /// Does nothing when told to end.
    deaf: bool,
    /// When the last message to and from it arrives: links keep their order.
    arrival_ms: [u64; 2],
}

impl SimulatedMember {
    fn new(deaf: bool) -> Self {
        Self {
            alive: false,
            stopped: false,
            hung: false,
            finished: false,
            roster: 0,
            blobs: 0,
            step: 0,
            progress: 0,
            in_call: false,
            deaf,
            arrival_ms: [0; 2],
        }
    }
}

pub(super) struct Simulation {
    random: Random,
    pub size: usize,
    steps: u64,
    pub supervised: bool,
    pub delay_max_ms: u64,
    pub injected: InjectedFault,
    pub victim: usize,
    pub injected_ms: Option<u64>,
    coordinator: Coordinator,
    coordinator_until_ms: u64,
    pub members: Vec<SimulatedMember>,
    entered: BTreeMap<u64, BTreeSet<usize>>,
    queue: std::collections::BinaryHeap<Reverse<(u64, usize)>>,
    events: Vec<Option<SimulatedEvent>>,
    now_ms: u64,
    verdict: Option<(u64, Verdict)>,
    pub endings: usize,
}

fn call(sequence: u64, kind: CallKind) -> Fingerprint {
    Fingerprint {
        communicator: 0,
        kind,
        element: ElementType::F32,
        reduction: Reduction::Sum,
        root: 0,
        sequence,
        count: 64,
        name: short_name("g"),
    }
}

impl Simulation {
    pub fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e3779b97f4a7c15) ^ 0x5bf0_3635);
        let injected = INJECTED_FAULTS[(seed % INJECTED_FAULTS.len() as u64) as usize];
        let world = 2 + random.below(7) as usize;
        let supervised = random.below(2) == 0;
        let delay_max_ms = [1, 20, 300, DELAY_MAX_MS][random.below(4) as usize];
        let members: Vec<SimulatedMember> = (0..world).map(|_| SimulatedMember::new(random.below(3) == 0)).collect();
        let config = CoordinatorConfig {
            world,
            job: JOB,
            generation: GENERATION,
            deadlines: DEADLINES,
            supervised,
            bound: false,
        };
        let mut this = Self {
            victim: random.below(world as u64) as usize,
            steps: 5 + random.below(30),
            random,
            size: world,
            supervised,
            delay_max_ms,
            injected,
            injected_ms: None,
            coordinator: Coordinator::new(config, 0),
            coordinator_until_ms: 0,
            members,
            entered: BTreeMap::new(),
            queue: Default::default(),
            events: Vec::new(),
            now_ms: 0,
            verdict: None,
            endings: 0,
        };
        for rank in 0..world {
            let start_ms = this.random.below(2000);
            this.at(start_ms, SimulatedEvent::Start(rank));
        }
        let inject_ms = 100 + this.random.below(6000);
        this.at(inject_ms, SimulatedEvent::Inject);
        this.at(0, SimulatedEvent::Tick);
        this
    }

    fn at(&mut self, ms: u64, event: SimulatedEvent) {
        let number = self.events.len();
        self.events.push(Some(event));
        self.queue.push(Reverse((ms.max(self.now_ms), number)));
    }

    fn partitioned(&self, rank: usize) -> bool {
        self.injected == InjectedFault::Partition && self.injected_ms.is_some() && rank == self.victim
    }

    fn arrival(&mut self, rank: usize, direction: usize) -> u64 {
        let ms = self.now_ms + self.random.below(self.delay_max_ms);
        let slot = &mut self.members[rank].arrival_ms[direction];
        *slot = (*slot).max(ms);
        *slot
    }

    fn send(&mut self, rank: usize, message: ControlMessage) {
        if !self.partitioned(rank) {
            let ms = self.arrival(rank, 0);
            let envelope = Envelope { job: JOB, generation: GENERATION, message };
            self.at(ms, SimulatedEvent::ToCoordinator(CoordinatorEvent::Message { link: rank + 100, envelope }));
        }
    }

    fn activity(&self, rank: usize) -> Activity {
        let member = &self.members[rank];
        let other = self.injected == InjectedFault::OtherCall
            && self.injected_ms.is_some()
            && rank == self.victim
            && member.in_call;
        let kind = if other { CallKind::Broadcast } else { CallKind::AllReduce };
        let begun = member.in_call || member.step > 0;
        let sequence = if member.in_call { member.step } else { member.step.saturating_sub(1) };
        let call = begun.then(|| call(sequence, kind));
        let waits = member.in_call && !member.hung;
        Activity { step: member.step, progress: member.progress, call, in_call: member.in_call, waits }
    }

    pub fn run(&mut self) -> (u64, Verdict) {
        while self.verdict.is_none() {
            let Reverse((ms, number)) = self.queue.pop().expect("the coordinator always ticks");
            assert!(ms < HORIZON_MS, "the job did not end");
            self.now_ms = ms;
            let event = self.events[number].take().expect("once");
            let deferred = matches!(event, SimulatedEvent::Tick | SimulatedEvent::ToCoordinator(_))
                && ms < self.coordinator_until_ms;
            if deferred {
                // What waits keeps its order.
                self.events[number] = Some(event);
                self.queue.push(Reverse((self.coordinator_until_ms, number)));
                continue;
            }
            self.handle(event);
        }
        self.verdict.clone().expect("just seen")
    }

    fn handle(&mut self, event: SimulatedEvent) {
        match event {
            SimulatedEvent::Start(rank) => self.start(rank),
            SimulatedEvent::Tick => {
                self.coordinate(CoordinatorEvent::Tick);
                self.at(self.now_ms + DEADLINES.tick_ms(), SimulatedEvent::Tick);
            }
            SimulatedEvent::ToCoordinator(event) => self.coordinate(event),
            SimulatedEvent::ToMember(rank, message) => self.receive(rank, message),
            SimulatedEvent::Beat(rank) => {
                if self.members[rank].alive && !self.members[rank].finished {
                    if !self.members[rank].stopped {
                        self.send(rank, ControlMessage::Heartbeat(self.activity(rank)));
                    }
                    self.at(self.now_ms + DEADLINES.beat_ms(), SimulatedEvent::Beat(rank));
                }
            }
            SimulatedEvent::Computed(rank) => self.computed(rank),
            SimulatedEvent::CallDone(sequence) => self.call_done(sequence),
            SimulatedEvent::End(rank, exit) => self.end(rank, exit),
            SimulatedEvent::Wake(rank) => self.members[rank].stopped = false,
            SimulatedEvent::Inject => self.inject(),
        }
    }

    fn coordinate(&mut self, event: CoordinatorEvent) {
        for action in self.coordinator.step(self.now_ms, event) {
            match action {
                CoordinatorAction::Send { link, envelope } => {
                    let rank = link - 100;
                    if rank < self.size && !self.partitioned(rank) {
                        let ms = self.arrival(rank, 1);
                        self.at(ms, SimulatedEvent::ToMember(rank, envelope.message));
                    }
                }
                CoordinatorAction::Kill { rank, .. } if self.supervised => self.end(rank, Exit::Signal(9)),
                // Only the link can be closed; whoever hears of it goes.
                CoordinatorAction::Kill { rank, .. } if !self.partitioned(rank) && !self.members[rank].stopped => {
                    let ms = self.arrival(rank, 1);
                    self.at(ms, SimulatedEvent::End(rank, Exit::Code(1)));
                }
                CoordinatorAction::Ended(verdict) => self.verdict = Some((self.now_ms, verdict)),
                CoordinatorAction::Notice(Notice::Ending { .. }) => self.endings += 1,
                _ => {}
            }
        }
    }

    fn start(&mut self, rank: usize) {
        self.members[rank].alive = true;
        if self.injected == InjectedFault::NeverJoins && rank == self.victim {
            self.members[rank].alive = self.supervised;
            self.injected_ms = Some(0);
            return;
        }
        let hello = Hello {
            rank,
            world: self.size,
            host: format!("n{rank}"),
            pid: rank as u32,
            version: "1".into(),
            role: String::new(),
            manifest: Manifest::new([("job.seed".to_string(), "1".to_string())]),
        };
        self.send(rank, ControlMessage::Hello(hello));
        self.at(self.now_ms, SimulatedEvent::Beat(rank));
    }

    fn receive(&mut self, rank: usize, message: ControlMessage) {
        let member = &mut self.members[rank];
        if !member.alive || member.stopped {
            return;
        }
        match message {
            ControlMessage::Roster { rank: line, peer } => {
                assert_eq!((line, peer.pid as usize), (member.roster, line));
                member.roster += 1;
                if member.roster == self.size {
                    self.send(rank, ControlMessage::Blob { round: 0, rank, bytes: vec![rank as u8] });
                }
            }
            ControlMessage::Blob { round: 0, rank: line, bytes } => {
                assert_eq!((line, bytes), (member.blobs, vec![member.blobs as u8]));
                member.blobs += 1;
                if member.blobs == self.size {
                    self.compute(rank);
                }
            }
            ControlMessage::Abort { .. } => {
                // Deaf ones are ended by a supervisor, or by their own monitor.
                let wait_ms = if member.deaf { DEADLINES.grace_ms() } else { self.random.below(100) };
                if !(member.deaf && self.supervised) {
                    self.at(self.now_ms + wait_ms, SimulatedEvent::End(rank, Exit::Code(1)));
                }
            }
            ControlMessage::Release => {
                let ms = self.now_ms + self.random.below(50);
                self.at(ms, SimulatedEvent::End(rank, Exit::Code(0)));
            }
            _ => {}
        }
    }

    fn compute(&mut self, rank: usize) {
        let slow = self.injected == InjectedFault::SlowRank && rank == self.victim;
        let ms = if slow { 3000 + self.random.below(2000) } else { 20 + self.random.below(300) };
        self.at(self.now_ms + ms, SimulatedEvent::Computed(rank));
    }

    fn computed(&mut self, rank: usize) {
        let member = &mut self.members[rank];
        if !member.alive || member.hung {
            return;
        }
        if member.stopped {
            return self.at(self.now_ms + 10, SimulatedEvent::Computed(rank));
        }
        let step = member.step;
        (member.progress, member.in_call) = (member.progress + 1, true);
        if self.injected == InjectedFault::OtherCall && self.injected_ms.is_some() && rank == self.victim {
            return;
        }
        let entered = self.entered.entry(step).or_default();
        entered.insert(rank);
        if entered.len() == self.size {
            self.at(self.now_ms + 1, SimulatedEvent::CallDone(step));
        }
    }

    fn call_done(&mut self, sequence: u64) {
        for rank in 0..self.size {
            let member = &mut self.members[rank];
            if !member.alive || !member.in_call || member.step != sequence {
                continue;
            }
            (member.in_call, member.step, member.progress) = (false, sequence + 1, member.progress + 1);
            if member.step == self.steps {
                self.send(rank, ControlMessage::Heartbeat(self.activity(rank)));
                self.send(rank, ControlMessage::Finish);
                self.members[rank].finished = true;
            } else {
                self.compute(rank);
            }
        }
    }

    fn end(&mut self, rank: usize, exit: Exit) {
        if !std::mem::replace(&mut self.members[rank].alive, false) {
            return;
        }
        if !self.partitioned(rank) {
            let ms = self.arrival(rank, 0);
            self.at(ms, SimulatedEvent::ToCoordinator(CoordinatorEvent::Closed { link: rank + 100 }));
        }
        if self.supervised {
            // The supervisor has heard the last words of a process before it sees its end.
            let last = if self.partitioned(rank) { self.now_ms } else { self.members[rank].arrival_ms[0] };
            let ms = last + self.random.below(10);
            self.at(ms, SimulatedEvent::ToCoordinator(CoordinatorEvent::Exited { rank, exit }));
        }
    }

    fn inject(&mut self) {
        let victim = self.victim;
        let member = &self.members[victim];
        // Most faults need a victim at work.
        let late = member.step + 1 >= self.steps;
        if late || self.injected_ms.is_some() {
            return;
        }
        if member.blobs < self.size && !matches!(self.injected, InjectedFault::CoordinatorPause(_)) {
            return self.at(self.now_ms + 50, SimulatedEvent::Inject);
        }
        self.injected_ms = Some(self.now_ms);
        match self.injected {
            InjectedFault::Nothing
            | InjectedFault::SlowRank
            | InjectedFault::Partition
            | InjectedFault::OtherCall
            | InjectedFault::NeverJoins => {}
            InjectedFault::CoordinatorPause(ms) => self.coordinator_until_ms = self.now_ms + self.random.below(ms),
            InjectedFault::BriefStop(ms) => {
                self.members[victim].stopped = self.delay_max_ms <= 300;
                let wake_ms = self.now_ms + self.random.below(ms);
                self.at(wake_ms, SimulatedEvent::Wake(victim));
            }
            InjectedFault::StaleMessages => self.stale(),
            InjectedFault::Crash => self.end(victim, Exit::Signal(9)),
            InjectedFault::CrashHeardByOthers => {
                let fault = format!("rank {victim} is gone");
                for rank in (0..self.size).filter(|rank| *rank != victim) {
                    // Their word may arrive up to the time to settle before the evidence itself.
                    self.send(rank, ControlMessage::Fail { text: fault.clone(), culprit: Some(victim) });
                    if self.random.below(2) == 0 {
                        self.end(rank, Exit::Code(1));
                    }
                }
                self.end(victim, Exit::Signal(9));
            }
            InjectedFault::ExitCode(code) => self.end(victim, Exit::Code(code)),
            InjectedFault::Stop => self.members[victim].stopped = true,
            InjectedFault::Hang => self.members[victim].hung = true,
            InjectedFault::OwnFailure => {
                self.send(victim, ControlMessage::Fail { text: "no space".into(), culprit: None });
                self.end(victim, Exit::Code(1));
            }
            InjectedFault::Twin => self.twin(),
            InjectedFault::Garbage => {
                let fault = Fault::Rejected { from: format!("rank {victim}"), why: "noise".into() };
                self.at(
                    self.now_ms,
                    SimulatedEvent::ToCoordinator(CoordinatorEvent::Rejected { link: victim + 100, fault }),
                );
            }
        }
    }

    /// A second process says that it is the victim's rank.
    fn twin(&mut self) {
        let (rank, world) = (self.victim, self.size);
        let (role, manifest) = (String::new(), Manifest::default());
        let hello = Hello { rank, world, host: "x".into(), pid: 1, version: "1".into(), role, manifest };
        let envelope = Envelope { job: JOB, generation: GENERATION, message: ControlMessage::Hello(hello) };
        self.at(self.now_ms, SimulatedEvent::ToCoordinator(CoordinatorEvent::Message { link: 999, envelope }));
    }

    /// Words of an older generation and of another job.
    fn stale(&mut self) {
        for rank in 0..self.size {
            for (job, generation) in [(JOB, GENERATION - 1), (JOB, GENERATION + 1), (JOB + 1, GENERATION)] {
                let fail = ControlMessage::Fail { text: "old".into(), culprit: None };
                for message in [fail, ControlMessage::Finish, ControlMessage::Abort { text: "old".into() }] {
                    let envelope = Envelope { job, generation, message };
                    self.at(
                        self.now_ms,
                        SimulatedEvent::ToCoordinator(CoordinatorEvent::Message { link: rank + 100, envelope }),
                    );
                }
            }
        }
    }
}
