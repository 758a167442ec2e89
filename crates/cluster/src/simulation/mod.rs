//! A whole job in virtual time, from a seed: members, links with delay, and one harm. It drives the real coordinator.
//!
//! Without harm, or with harm that stays under the limits, the job must end well; with harm, the right rank must be named
//! and all must be gone within the stated bound. A failing seed is printed and replays exactly.

use crate::coordinator::{Action, Coordinator, Event, Notice, Terms};
use crate::introduction::Manifest;
use crate::membership::Verdict;
use crate::message::{Envelope, Hello, Message};
use crate::pace::Pace;
use crate::seat::Exit;
use kolo_comm::call::short_name;
use kolo_comm::watch::Activity;
use kolo_comm::{Element, Fault, Fingerprint, Kind, Reduction};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

const SEEDS: u64 = 4000;
const PACE: Pace = Pace { heartbeat_ms: 1000 };
const JOB: u64 = 99;
const GENERATION: u32 = 5;
/// Longest delay that must not raise a false alarm: silence less a beat, less a tick of the coordinator.
const DELAY_MAX_MS: u64 = 1150;
/// No job lasts longer in virtual time.
const HORIZON_MS: u64 = 300_000;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Harm {
    Nothing,
    /// The coordinator itself does not run for a while.
    CoordinatorPause(u64),
    BriefStop(u64),
    SlowRank,
    StaleMessages,
    Crash,
    /// A crash of which the others' own links tell them first.
    CrashHeardByOthers,
    ExitCode(i32),
    Stop,
    Partition,
    Hang,
    OtherCall,
    OwnFailure,
    NeverJoins,
    Twin,
    Garbage,
}

const HARMS: [Harm; 16] = [
    Harm::Nothing,
    Harm::CoordinatorPause(5000),
    Harm::BriefStop(300),
    Harm::SlowRank,
    Harm::StaleMessages,
    Harm::Crash,
    Harm::CrashHeardByOthers,
    Harm::ExitCode(7),
    Harm::Stop,
    Harm::Partition,
    Harm::Hang,
    Harm::OtherCall,
    Harm::OwnFailure,
    Harm::NeverJoins,
    Harm::Twin,
    Harm::Garbage,
];

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let mixed = (self.0 ^ (self.0 >> 31)).wrapping_mul(0xbf58476d1ce4e5b9);
        (mixed ^ (mixed >> 29)) % end.max(1)
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Moment {
    Start(usize),
    ToCoordinator(Event),
    ToMember(usize, Message),
    Tick,
    Beat(usize),
    Computed(usize),
    CallDone(u64),
    End(usize, Exit),
    Wake(usize),
    Harm,
}

/// A member, reduced to what the coordinator sees of it.
#[derive(Clone, Debug)]
struct Model {
    alive: bool,
    stopped: bool,
    hung: bool,
    finished: bool,
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

impl Model {
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

struct World {
    random: Random,
    world: usize,
    steps: u64,
    supervised: bool,
    delay_max_ms: u64,
    harm: Harm,
    victim: usize,
    harmed_ms: Option<u64>,
    coordinator: Coordinator,
    coordinator_until_ms: u64,
    models: Vec<Model>,
    entered: BTreeMap<u64, BTreeSet<usize>>,
    queue: std::collections::BinaryHeap<Reverse<(u64, usize)>>,
    moments: Vec<Option<Moment>>,
    now_ms: u64,
    verdict: Option<(u64, Verdict)>,
    endings: usize,
}

fn call(sequence: u64, kind: Kind) -> Fingerprint {
    Fingerprint {
        communicator: 0,
        kind,
        element: Element::F32,
        reduction: Reduction::Sum,
        root: 0,
        sequence,
        count: 64,
        name: short_name("g"),
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e3779b97f4a7c15) ^ 0x5bf0_3635);
        let harm = HARMS[(seed % HARMS.len() as u64) as usize];
        let world = 2 + random.below(7) as usize;
        let supervised = random.below(2) == 0;
        let delay_max_ms = [1, 20, 300, DELAY_MAX_MS][random.below(4) as usize];
        let models: Vec<Model> = (0..world).map(|_| Model::new(random.below(3) == 0)).collect();
        let terms = Terms { world, job: JOB, generation: GENERATION, pace: PACE, supervised, bound: false };
        let mut this = Self {
            victim: random.below(world as u64) as usize,
            steps: 5 + random.below(30),
            random,
            world,
            supervised,
            delay_max_ms,
            harm,
            harmed_ms: None,
            coordinator: Coordinator::new(terms, 0),
            coordinator_until_ms: 0,
            models,
            entered: BTreeMap::new(),
            queue: Default::default(),
            moments: Vec::new(),
            now_ms: 0,
            verdict: None,
            endings: 0,
        };
        for rank in 0..world {
            let start_ms = this.random.below(2000);
            this.at(start_ms, Moment::Start(rank));
        }
        let harm_ms = 100 + this.random.below(6000);
        this.at(harm_ms, Moment::Harm);
        this.at(0, Moment::Tick);
        this
    }

    fn at(&mut self, ms: u64, moment: Moment) {
        let number = self.moments.len();
        self.moments.push(Some(moment));
        self.queue.push(Reverse((ms.max(self.now_ms), number)));
    }

    fn partitioned(&self, rank: usize) -> bool {
        self.harm == Harm::Partition && self.harmed_ms.is_some() && rank == self.victim
    }

    fn arrival(&mut self, rank: usize, direction: usize) -> u64 {
        let ms = self.now_ms + self.random.below(self.delay_max_ms);
        let slot = &mut self.models[rank].arrival_ms[direction];
        *slot = (*slot).max(ms);
        *slot
    }

    fn say(&mut self, rank: usize, message: Message) {
        if !self.partitioned(rank) {
            let ms = self.arrival(rank, 0);
            let envelope = Envelope { job: JOB, generation: GENERATION, message };
            self.at(ms, Moment::ToCoordinator(Event::Message { link: rank + 100, envelope }));
        }
    }

    fn activity(&self, rank: usize) -> Activity {
        let model = &self.models[rank];
        let other = self.harm == Harm::OtherCall && self.harmed_ms.is_some() && rank == self.victim && model.in_call;
        let kind = if other { Kind::Broadcast } else { Kind::AllReduce };
        let begun = model.in_call || model.step > 0;
        let sequence = if model.in_call { model.step } else { model.step.saturating_sub(1) };
        let call = begun.then(|| call(sequence, kind));
        let waits = model.in_call && !model.hung;
        Activity { step: model.step, progress: model.progress, call, in_call: model.in_call, waits }
    }

    fn run(&mut self) -> (u64, Verdict) {
        while self.verdict.is_none() {
            let Reverse((ms, number)) = self.queue.pop().expect("the coordinator always ticks");
            assert!(ms < HORIZON_MS, "the job did not end");
            self.now_ms = ms;
            let moment = self.moments[number].take().expect("once");
            let deferred = matches!(moment, Moment::Tick | Moment::ToCoordinator(_)) && ms < self.coordinator_until_ms;
            if deferred {
                // What waits keeps its order.
                self.moments[number] = Some(moment);
                self.queue.push(Reverse((self.coordinator_until_ms, number)));
                continue;
            }
            self.happen(moment);
        }
        self.verdict.clone().expect("just seen")
    }

    fn happen(&mut self, moment: Moment) {
        match moment {
            Moment::Start(rank) => self.start(rank),
            Moment::Tick => {
                self.coordinate(Event::Tick);
                self.at(self.now_ms + PACE.tick_ms(), Moment::Tick);
            }
            Moment::ToCoordinator(event) => self.coordinate(event),
            Moment::ToMember(rank, message) => self.hear(rank, message),
            Moment::Beat(rank) => {
                if self.models[rank].alive && !self.models[rank].finished {
                    if !self.models[rank].stopped {
                        self.say(rank, Message::Beat(self.activity(rank)));
                    }
                    self.at(self.now_ms + PACE.beat_ms(), Moment::Beat(rank));
                }
            }
            Moment::Computed(rank) => self.computed(rank),
            Moment::CallDone(sequence) => self.call_done(sequence),
            Moment::End(rank, exit) => self.end(rank, exit),
            Moment::Wake(rank) => self.models[rank].stopped = false,
            Moment::Harm => self.do_harm(),
        }
    }

    fn coordinate(&mut self, event: Event) {
        for action in self.coordinator.step(self.now_ms, event) {
            match action {
                Action::Send { link, envelope } => {
                    let rank = link - 100;
                    if rank < self.world && !self.partitioned(rank) {
                        let ms = self.arrival(rank, 1);
                        self.at(ms, Moment::ToMember(rank, envelope.message));
                    }
                }
                Action::Kill { rank, .. } if self.supervised => self.end(rank, Exit::Signal(9)),
                // Only the link can be closed; whoever hears of it goes.
                Action::Kill { rank, .. } if !self.partitioned(rank) && !self.models[rank].stopped => {
                    let ms = self.arrival(rank, 1);
                    self.at(ms, Moment::End(rank, Exit::Code(1)));
                }
                Action::Ended(verdict) => self.verdict = Some((self.now_ms, verdict)),
                Action::Notice(Notice::Ending { .. }) => self.endings += 1,
                _ => {}
            }
        }
    }

    fn start(&mut self, rank: usize) {
        self.models[rank].alive = true;
        if self.harm == Harm::NeverJoins && rank == self.victim {
            self.models[rank].alive = self.supervised;
            self.harmed_ms = Some(0);
            return;
        }
        let hello = Hello {
            rank,
            world: self.world,
            host: format!("n{rank}"),
            pid: rank as u32,
            version: "1".into(),
            role: String::new(),
            manifest: Manifest::new([("job.seed".to_string(), "1".to_string())]),
        };
        self.say(rank, Message::Hello(hello));
        self.at(self.now_ms, Moment::Beat(rank));
    }

    fn hear(&mut self, rank: usize, message: Message) {
        let model = &mut self.models[rank];
        if !model.alive || model.stopped {
            return;
        }
        match message {
            Message::Roster { rank: line, peer } => {
                assert_eq!((line, peer.pid as usize), (model.roster, line));
                model.roster += 1;
                if model.roster == self.world {
                    self.say(rank, Message::Blob { round: 0, rank, bytes: vec![rank as u8] });
                }
            }
            Message::Blob { round: 0, rank: line, bytes } => {
                assert_eq!((line, bytes), (model.blobs, vec![model.blobs as u8]));
                model.blobs += 1;
                if model.blobs == self.world {
                    self.compute(rank);
                }
            }
            Message::Abort { .. } => {
                // Deaf ones are ended by a supervisor, or by their own monitor.
                let wait_ms = if model.deaf { PACE.grace_ms() } else { self.random.below(100) };
                if !(model.deaf && self.supervised) {
                    self.at(self.now_ms + wait_ms, Moment::End(rank, Exit::Code(1)));
                }
            }
            Message::Release => {
                let ms = self.now_ms + self.random.below(50);
                self.at(ms, Moment::End(rank, Exit::Code(0)));
            }
            _ => {}
        }
    }

    fn compute(&mut self, rank: usize) {
        let slow = self.harm == Harm::SlowRank && rank == self.victim;
        let ms = if slow { 3000 + self.random.below(2000) } else { 20 + self.random.below(300) };
        self.at(self.now_ms + ms, Moment::Computed(rank));
    }

    fn computed(&mut self, rank: usize) {
        let model = &mut self.models[rank];
        if !model.alive || model.hung {
            return;
        }
        if model.stopped {
            return self.at(self.now_ms + 10, Moment::Computed(rank));
        }
        let step = model.step;
        (model.progress, model.in_call) = (model.progress + 1, true);
        if self.harm == Harm::OtherCall && self.harmed_ms.is_some() && rank == self.victim {
            return;
        }
        let entered = self.entered.entry(step).or_default();
        entered.insert(rank);
        if entered.len() == self.world {
            self.at(self.now_ms + 1, Moment::CallDone(step));
        }
    }

    fn call_done(&mut self, sequence: u64) {
        for rank in 0..self.world {
            let model = &mut self.models[rank];
            if !model.alive || !model.in_call || model.step != sequence {
                continue;
            }
            (model.in_call, model.step, model.progress) = (false, sequence + 1, model.progress + 1);
            if model.step == self.steps {
                self.say(rank, Message::Beat(self.activity(rank)));
                self.say(rank, Message::Finish);
                self.models[rank].finished = true;
            } else {
                self.compute(rank);
            }
        }
    }

    fn end(&mut self, rank: usize, exit: Exit) {
        if !std::mem::replace(&mut self.models[rank].alive, false) {
            return;
        }
        if !self.partitioned(rank) {
            let ms = self.arrival(rank, 0);
            self.at(ms, Moment::ToCoordinator(Event::Closed { link: rank + 100 }));
        }
        if self.supervised {
            // The supervisor has heard the last words of a process before it sees its end.
            let last = if self.partitioned(rank) { self.now_ms } else { self.models[rank].arrival_ms[0] };
            let ms = last + self.random.below(10);
            self.at(ms, Moment::ToCoordinator(Event::Exited { rank, exit }));
        }
    }

    fn do_harm(&mut self) {
        let victim = self.victim;
        let model = &self.models[victim];
        // Most harm needs a victim at work.
        let late = model.step + 1 >= self.steps;
        if late || self.harmed_ms.is_some() {
            return;
        }
        if model.blobs < self.world && !matches!(self.harm, Harm::CoordinatorPause(_)) {
            return self.at(self.now_ms + 50, Moment::Harm);
        }
        self.harmed_ms = Some(self.now_ms);
        match self.harm {
            Harm::Nothing | Harm::SlowRank | Harm::Partition | Harm::OtherCall | Harm::NeverJoins => {}
            Harm::CoordinatorPause(ms) => self.coordinator_until_ms = self.now_ms + self.random.below(ms),
            Harm::BriefStop(ms) => {
                self.models[victim].stopped = self.delay_max_ms <= 300;
                let wake_ms = self.now_ms + self.random.below(ms);
                self.at(wake_ms, Moment::Wake(victim));
            }
            Harm::StaleMessages => self.stale(),
            Harm::Crash => self.end(victim, Exit::Signal(9)),
            Harm::CrashHeardByOthers => {
                let fault = format!("rank {victim} is gone");
                for rank in (0..self.world).filter(|rank| *rank != victim) {
                    // Their word may arrive up to the time to settle before the evidence itself.
                    self.say(rank, Message::Fail { text: fault.clone(), culprit: Some(victim) });
                    if self.random.below(2) == 0 {
                        self.end(rank, Exit::Code(1));
                    }
                }
                self.end(victim, Exit::Signal(9));
            }
            Harm::ExitCode(code) => self.end(victim, Exit::Code(code)),
            Harm::Stop => self.models[victim].stopped = true,
            Harm::Hang => self.models[victim].hung = true,
            Harm::OwnFailure => {
                self.say(victim, Message::Fail { text: "no space".into(), culprit: None });
                self.end(victim, Exit::Code(1));
            }
            Harm::Twin => self.twin(),
            Harm::Garbage => {
                let fault = Fault::Rejected { from: format!("rank {victim}"), why: "noise".into() };
                self.at(self.now_ms, Moment::ToCoordinator(Event::Rejected { link: victim + 100, fault }));
            }
        }
    }

    /// A second process says that it is the victim's rank.
    fn twin(&mut self) {
        let (rank, world) = (self.victim, self.world);
        let (role, manifest) = (String::new(), Manifest::default());
        let hello = Hello { rank, world, host: "x".into(), pid: 1, version: "1".into(), role, manifest };
        let envelope = Envelope { job: JOB, generation: GENERATION, message: Message::Hello(hello) };
        self.at(self.now_ms, Moment::ToCoordinator(Event::Message { link: 999, envelope }));
    }

    /// Words of an older generation and of another job.
    fn stale(&mut self) {
        for rank in 0..self.world {
            for (job, generation) in [(JOB, GENERATION - 1), (JOB, GENERATION + 1), (JOB + 1, GENERATION)] {
                let fail = Message::Fail { text: "old".into(), culprit: None };
                for message in [fail, Message::Finish, Message::Abort { text: "old".into() }] {
                    let envelope = Envelope { job, generation, message };
                    self.at(self.now_ms, Moment::ToCoordinator(Event::Message { link: rank + 100, envelope }));
                }
            }
        }
    }
}

fn harmless(harm: Harm) -> bool {
    matches!(
        harm,
        Harm::Nothing | Harm::CoordinatorPause(_) | Harm::BriefStop(_) | Harm::SlowRank | Harm::StaleMessages
    )
}

/// Milliseconds from the harm to the end of everything, at most.
fn bound_ms(world: &World) -> u64 {
    let detect = match world.harm {
        Harm::Stop | Harm::Partition => PACE.silence_ms(),
        Harm::Hang => PACE.stall_ms() + 1000,
        // Up to a beat until it shows, and the others must come to their call too.
        Harm::OtherCall => PACE.beat_ms() + 1000,
        Harm::NeverJoins => PACE.heartbeat_ms * crate::rendezvous::JOIN_HEARTBEATS,
        _ => PACE.settle_ms(),
    };
    let unseen = if world.supervised { 0 } else { PACE.heartbeat_ms };
    detect + PACE.grace_ms() + unseen + 4 * PACE.tick_ms() + 5 * world.delay_max_ms + 20
}

/// Whether nobody can see or bring about the end of this rank.
fn expected_left(world: &World, rank: usize) -> bool {
    !world.supervised && rank == world.victim && matches!(world.harm, Harm::Stop | Harm::Partition)
}

/// Whether the verdict says what happened.
fn rightly_blamed(world: &World, verdict: &Verdict, fault: &Fault) -> bool {
    let text = fault.to_string();
    match world.harm {
        Harm::NeverJoins => text.contains("did not join") && text.contains(&world.victim.to_string()),
        Harm::Twin => text.contains(&format!("two processes say they are rank {}", world.victim)),
        Harm::OtherCall => {
            matches!(fault, Fault::Mismatch { rank, peer, .. } if *rank == world.victim || *peer == world.victim)
        }
        // Where the evidence comes in time, it speaks for itself.
        Harm::CrashHeardByOthers if world.supervised && world.delay_max_ms <= 20 => {
            matches!(fault, Fault::Lost { peer, why, .. } if *peer == world.victim && why.contains("signal 9"))
        }
        Harm::Garbage => matches!(fault, Fault::Rejected { .. }),
        Harm::Hang => matches!(fault, Fault::Stalled { .. }) && verdict.culprit == Some(world.victim),
        _ => verdict.culprit == Some(world.victim),
    }
}

fn check(seed: u64) {
    let mut world = World::new(seed);
    let (ended_ms, verdict) = world.run();
    let about = format!(
        "seed {seed}: {:?} on rank {} of {} ({}supervised, delay {} ms): {verdict:?}",
        world.harm,
        world.victim,
        world.world,
        if world.supervised { "" } else { "not " },
        world.delay_max_ms
    );
    if harmless(world.harm) || world.harmed_ms.is_none() {
        assert!(verdict.exit_code == 0 && verdict.fault.is_none() && world.endings == 0, "false alarm, {about}");
        return assert!(world.models.iter().all(|model| model.finished), "ended early, {about}");
    }
    let fault = verdict.fault.as_ref().unwrap_or_else(|| panic!("not found, {about}"));
    assert!(verdict.exit_code != 0 && world.endings == 1, "{about}");
    let right = rightly_blamed(&world, &verdict, fault);
    assert!(right, "wrong culprit, {about}");
    if world.harm == Harm::ExitCode(7) && world.supervised {
        assert_eq!(verdict.exit_code, 7, "{about}");
    }
    // Without a supervisor, whoever had not joined yet goes when the coordinator's links close.
    let here = |rank: &usize| world.models[*rank].alive && (world.supervised || expected_left(&world, *rank));
    let here: Vec<usize> = (0..world.world).filter(here).collect();
    let expected: Vec<usize> = (0..world.world).filter(|rank| expected_left(&world, *rank)).collect();
    if world.delay_max_ms <= 300 {
        assert_eq!((&verdict.left, &here), (&expected, &expected), "somebody is left, {about}");
    }
    let took_ms = ended_ms - world.harmed_ms.unwrap_or(0);
    assert!(took_ms <= bound_ms(&world), "took {took_ms} ms, more than {}, {about}", bound_ms(&world));
    if world.supervised && world.delay_max_ms == 1 {
        let limit_ms = match world.harm {
            Harm::Hang | Harm::NeverJoins => u64::MAX,
            Harm::Stop | Harm::Partition => 2 * PACE.heartbeat_ms,
            _ => PACE.heartbeat_ms,
        };
        assert!(took_ms <= limit_ms, "took {took_ms} ms, {about}");
    }
}

#[test]
fn thousands_of_jobs() {
    for seed in 0..SEEDS {
        check(seed);
    }
}
