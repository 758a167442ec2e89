//! Elastic jobs in virtual time, from a seed: workers that crash, are cut off, stop or join, and steps that every rank of a
//! generation must contribute to. It drives the real core.
//!
//! The data plane is reduced to what matters for safety: a call completes at a rank, some time after all ranks of its
//! generation have entered it, and at each of them at another moment. A worker applies a step when its exchange has completed;
//! what the step is follows from what each rank contributed ([`super::state`]). Ranks also save their state, on a disk whose
//! power may fail ([`super::saves`]). Where nobody is left who has the state, all go back to the newest checkpoint; where there is
//! none, the job ends. A job that ends early is resumed from the newest checkpoint, by other workers.
//!
//! Checked: never do two groups go on, or commit what does not continue one another ([`super::groups`] says it exactly); a
//! worker's state is made of every step once and in order, and is that of an undisturbed job; whatever crashes, the newest
//! checkpoint is whole, no older than the last that was committed, and one that a group committed; nobody acts for a generation
//! that it has left; the job ends, well if enough workers are left.

mod outcome;
mod partition;

use super::groups::Groups;
use super::job::Random;
use super::saves::{self, Saves};
use super::state::{Group, State};
use super::{DEADLINES, JOB};
use crate::coordinator::{CoordinatorAction, CoordinatorEvent, Core, Notice};
use crate::elastic::{Elastic, ElasticConfig};
use crate::introduction::Manifest;
use crate::membership::Verdict;
use crate::message::{ANY_RANK, ControlMessage, Envelope, Hello};
use crate::rank_state::Exit;
use kolo_comm::watch::Activity;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

const HORIZON_MS: u64 = 600_000;
/// Runs of one job: the last is left in peace.
const RUNS_MAX: u32 = 3;
const GRAINS: usize = 8;
/// Until TCP tries again after a link was cut for some seconds.
const RETRANSMISSION_MAX_MS: u64 = 1000;

#[derive(Clone, Debug)]
enum Event {
    Start(usize),
    ToCore(CoordinatorEvent),
    ToWorker(usize, Envelope),
    Tick,
    Beat(usize),
    /// It has computed its part, and enters the call.
    Enter(usize, u32, u64),
    /// The call has completed for it.
    Complete(usize, u32, u64),
    /// It commits a state that all ranks of this generation have written, whether it still is one of them or not.
    Commit(usize, u32, State),
    End(usize, Exit),
    Harm(Harm, usize),
    Wake(usize),
    Heal(usize),
    Join,
    /// Of the disk that they share.
    PowerFailure,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Harm {
    Crash,
    /// Cut off from the coordinator alone, for a while or for ever.
    NoControl(Option<u64>),
    /// Cut off from everybody.
    NoNetwork(Option<u64>),
    Stop(Option<u64>),
    CorePause(u64),
    /// The launcher dies, and its workers with it.
    NoLauncher,
}

#[derive(Clone, Debug, Default)]
struct Worker {
    /// What the launcher or the core calls it.
    number: usize,
    alive: bool,
    /// The core has ended it, or tried to.
    is_given_up: bool,
    stopped: bool,
    was_stopped: bool,
    no_control: bool,
    no_data: bool,
    launched: bool,
    /// The newest generation it has heard of, and the one it is a rank of.
    announced: u32,
    generation: Option<u32>,
    rank: usize,
    world: usize,
    roster: usize,
    state: Option<State>,
    /// What it has written and, as the first rank, is to commit when the call that it is in has completed.
    saving: Option<State>,
    /// When its last commit is done.
    committed_ms: u64,
    /// How many ranks of its group take the state over, if it is there for nothing else.
    keepers: usize,
    /// Others have taken over what it held.
    relieved: bool,
    /// It goes back to the newest checkpoint.
    state_lost: bool,
    in_call: bool,
    progress: u64,
    yields: bool,
    finished: bool,
    released: bool,
    heard_ms: u64,
    arrival_ms: [u64; 2],
    /// Events that came while it was stopped.
    held: Vec<Event>,
    /// What is on its control link while that is cut, and its direction: it arrives if the link heals, as over TCP.
    delayed: Vec<(usize, Event)>,
}

/// A call of a generation: who has entered.
#[derive(Clone, Debug, Default)]
struct Call {
    entered: BTreeSet<usize>,
    /// The newest state that a rank brought, for the first call of a generation.
    newest: Option<State>,
    /// Of what the ranks contributed.
    sum: u64,
    yields: bool,
}

struct Simulation {
    seed: u64,
    run: u32,
    /// What its workers begin with.
    origin: State,
    random: Random,
    config: ElasticConfig,
    delay_max_ms: u64,
    steps: u64,
    core: Elastic,
    core_until_ms: u64,
    /// The newest generation that the core has spoken of.
    core_generation: u32,
    /// The core was told of a step by somebody it had not given up.
    has_heard: bool,
    /// The groups of which the core knows that they go on.
    confirmed: BTreeSet<Group>,
    workers: Vec<Worker>,
    /// The process of each link.
    calls: BTreeMap<(u32, u64), Call>,
    members: BTreeMap<u32, BTreeMap<usize, usize>>,
    groups: Groups,
    queue: BinaryHeap<Reverse<(u64, usize)>>,
    events: Vec<Option<Event>>,
    now_ms: u64,
    verdict: Option<Verdict>,
    is_launcher_gone: bool,
    resumed: u64,
    harms: usize,
    /// When the data links between two groups of hosts are cut, for good, and the workers of the second.
    cut: Option<(u64, BTreeSet<usize>)>,
    /// When a generation last went on, and when which workers were started again.
    resumed_ms: u64,
    restarts: Vec<(u64, usize)>,
    /// Workers whose part of the state others took over.
    relieved: u64,
    /// The checkpoints that generations went back to.
    went_back: BTreeMap<u32, State>,
    saves: Saves,
}

/// The first call of a generation brings everyone the newest state; then each step has an exchange and an agreement.
const SYNC: u64 = 0;
const FIRST_EXCHANGE: u64 = SYNC + 1;
/// The call after that of a group that only hands the state over.
const HANDED_OVER: u64 = u64::MAX;

/// Why a job ends of which nobody has the state.
const NOTHING_SAVED: &str = "there is no checkpoint to go back to";

/// The call after a step, in which ranks say what they want.
fn is_agreement(sequence: u64) -> bool {
    sequence != SYNC && sequence != HANDED_OVER && sequence.is_multiple_of(2)
}

fn is_exchange(sequence: u64) -> bool {
    sequence != HANDED_OVER && sequence % 2 == 1
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let steps = 5 + Random(seed ^ 0x57e9).below(30);
        Self::run_of((seed, 0), steps, State::default(), Saves::new(seed), Groups::default())
    }

    /// The same job once more, from its newest checkpoint.
    fn resume(mut self) -> Self {
        self.saves.fail();
        let [origin, _] = self.find_newest();
        Self::run_of((self.seed, self.run + 1), self.steps, origin, self.saves, self.groups)
    }

    fn run_of((seed, run): (u64, u32), steps: u64, origin: State, saves: Saves, groups: Groups) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (0x1234_5678 + (u64::from(run) << 40)));
        let workers = 2 + random.below(7) as usize;
        let supervised = random.below(3) > 0;
        let mut config = ElasticConfig {
            job: JOB,
            workers,
            min: 1,
            grains: GRAINS,
            restarts: if supervised { random.below(6) as u32 } else { 0 },
            deadlines: DEADLINES,
            supervised,
            sharded: seed % 2 == 1,
        };
        config.min = config.ranks(1 + random.below(workers as u64) as usize);
        let hosts: Vec<String> = (0..workers).map(|worker| format!("n{worker}")).collect();
        let mut this = Self {
            seed,
            run,
            origin,
            steps,
            delay_max_ms: [1, 20, 300][random.below(3) as usize],
            random,
            config,
            core: Elastic::new(config, &hosts, 0),
            core_until_ms: 0,
            core_generation: 0,
            has_heard: false,
            confirmed: BTreeSet::new(),
            workers: Vec::new(),
            calls: BTreeMap::new(),
            members: BTreeMap::new(),
            groups,
            queue: BinaryHeap::new(),
            events: Vec::new(),
            now_ms: 0,
            verdict: None,
            is_launcher_gone: false,
            resumed: 0,
            harms: 0,
            cut: None,
            resumed_ms: 0,
            restarts: Vec::new(),
            relieved: 0,
            went_back: BTreeMap::new(),
            saves,
        };
        for number in 0..workers {
            this.launch(number, supervised, 0);
        }
        let harms = if run + 1 < RUNS_MAX { this.random.below(5) } else { 0 };
        for _ in 0..harms {
            let (ms, harm) = (100 + this.random.below(9000), this.harm());
            let victim = this.random.below(workers as u64 + 2) as usize;
            // A switch or a host is lost with all that depend on it.
            let victims = if this.random.below(2) == 0 { 1 + this.random.below(workers as u64) as usize } else { 1 };
            (victim..victim + victims).for_each(|victim| this.at(ms, Event::Harm(harm, victim % (workers + 2))));
        }
        for _ in 0..this.random.below(3) {
            let ms = this.random.below(8000);
            this.at(ms, Event::Join);
        }
        if seed % 8 == 5 && run == 0 {
            // All that were started, at once.
            let ms = 2000 + this.random.below(6000);
            (0..workers).for_each(|victim| this.at(ms, Event::Harm(Harm::Crash, victim)));
        }
        let ms = this.saves.power_fails_ms();
        this.at(ms, Event::PowerFailure);
        this.at(0, Event::Tick);
        this
    }

    fn harm(&mut self) -> Harm {
        // Most races are with those who come back about when they are given up.
        let about_silence = DEADLINES.silence_ms() + self.random.below(DEADLINES.heartbeat_ms);
        let brief = [about_silence, 100 + self.random.below(6000)][self.random.below(2) as usize];
        let brief = Some(brief).filter(|_| self.random.below(2) == 0);
        match self.random.below(10) {
            0 => Harm::NoControl(brief),
            1 | 2 => Harm::NoNetwork(brief),
            5 | 6 => Harm::Stop(brief),
            3 => Harm::CorePause(self.random.below(4000)),
            4 if self.random.below(4) == 0 => Harm::NoLauncher,
            _ => Harm::Crash,
        }
    }

    fn at(&mut self, ms: u64, event: Event) {
        self.queue.push(Reverse((ms.max(self.now_ms), self.events.len())));
        self.events.push(Some(event));
    }

    fn launch(&mut self, number: usize, launched: bool, ms: u64) {
        let process = self.workers.len();
        self.workers.push(Worker { number, launched, ..Worker::default() });
        let ms = self.now_ms + ms + self.random.below(500);
        self.at(ms, Event::Start(process));
    }

    fn arrival(&mut self, process: usize, direction: usize) -> u64 {
        let ms = self.now_ms + self.random.below(self.delay_max_ms);
        let slot = &mut self.workers[process].arrival_ms[direction];
        *slot = (*slot).max(ms);
        *slot
    }

    /// What a process says. Processes are links.
    fn send(&mut self, process: usize, generation: u32, message: ControlMessage) {
        let envelope = Envelope { job: JOB, generation, message };
        self.deliver(process, 0, Event::ToCore(CoordinatorEvent::Message { link: process, envelope }));
    }

    /// Something goes over a process's control link.
    fn deliver(&mut self, process: usize, direction: usize, event: Event) {
        if self.workers[process].no_control {
            return self.workers[process].delayed.push((direction, event));
        }
        let ms = self.arrival(process, direction);
        self.at(ms, event);
    }

    /// What came of it, unless its launcher died.
    fn run(&mut self) -> Option<Verdict> {
        loop {
            if self.verdict.is_some() || self.is_launcher_gone {
                return self.verdict.take();
            }
            let Reverse((ms, number)) = self.queue.pop().expect("the core always ticks");
            assert!(ms < HORIZON_MS, "the job of seed {} did not end", self.seed);
            self.now_ms = ms;
            let event = self.events[number].take().expect("once");
            if matches!(event, Event::Tick | Event::ToCore(_)) && ms < self.core_until_ms {
                self.events[number] = Some(event);
                self.queue.push(Reverse((self.core_until_ms, number)));
                continue;
            }
            self.handle(event);
        }
    }

    /// A stopped process does nothing until it goes on.
    fn held(&mut self, process: usize, event: &Event) -> bool {
        let stopped = self.workers[process].stopped && self.workers[process].alive;
        if stopped {
            self.workers[process].held.push(event.clone());
        }
        stopped
    }

    fn handle(&mut self, event: Event) {
        match event.clone() {
            Event::Start(process) => self.start(process),
            Event::ToCore(event) => self.coordinate(event),
            Event::Tick => {
                self.coordinate(CoordinatorEvent::Tick);
                self.at(self.now_ms + DEADLINES.tick_ms(), Event::Tick);
            }
            Event::ToWorker(process, envelope) => {
                if !self.held(process, &event) {
                    self.receive(process, envelope);
                }
            }
            Event::Beat(process) => self.beat(process),
            Event::Enter(process, generation, sequence) => {
                if !self.held(process, &event) {
                    self.enter(process, generation, sequence);
                }
            }
            Event::Complete(process, generation, sequence) => {
                if !self.held(process, &event) {
                    self.complete(process, generation, sequence);
                }
            }
            Event::Commit(process, generation, ref state) => {
                if !self.held(process, &event) && self.workers[process].alive {
                    self.commit(generation, state);
                }
            }
            Event::End(process, exit) => self.end(process, exit),
            Event::Harm(harm, victim) => self.inflict(harm, victim),
            Event::Wake(process) => {
                self.workers[process].stopped = false;
                if self.workers[process].launched && self.workers[process].alive {
                    let rank = self.workers[process].number;
                    self.at(self.now_ms, Event::ToCore(CoordinatorEvent::Continued { rank }));
                }
                for event in std::mem::take(&mut self.workers[process].held) {
                    self.at(self.now_ms, event);
                }
            }
            Event::Heal(process) => {
                let again_ms = [(); 2].map(|()| self.now_ms + self.random.below(RETRANSMISSION_MAX_MS));
                let worker = &mut self.workers[process];
                (worker.no_control, worker.no_data, worker.arrival_ms) = (false, false, again_ms);
                for (direction, event) in std::mem::take(&mut self.workers[process].delayed) {
                    self.deliver(process, direction, event);
                }
            }
            Event::Join => self.launch(ANY_RANK, false, 0),
            Event::PowerFailure => {
                if self.saves.loses_power() {
                    self.find_newest();
                }
            }
        }
    }

    fn inflict(&mut self, harm: Harm, victim: usize) {
        if victim >= self.workers.len() || !self.workers[victim].alive {
            return;
        }
        self.harms += 1;
        let worker = &mut self.workers[victim];
        let heals = |ms: u64| self.now_ms + ms;
        match harm {
            Harm::Crash => self.end(victim, Exit::Signal(9)),
            Harm::NoControl(brief) => {
                worker.no_control = true;
                brief.map(heals).into_iter().for_each(|ms| self.at(ms, Event::Heal(victim)));
            }
            Harm::NoNetwork(brief) => {
                (worker.no_control, worker.no_data) = (true, true);
                brief.map(heals).into_iter().for_each(|ms| self.at(ms, Event::Heal(victim)));
            }
            Harm::Stop(brief) => {
                (worker.stopped, worker.was_stopped) = (true, true);
                let (launched, rank) = (worker.launched, worker.number);
                brief.map(heals).into_iter().for_each(|ms| self.at(ms, Event::Wake(victim)));
                if launched {
                    self.at(self.now_ms, Event::ToCore(CoordinatorEvent::Stopped { rank }));
                }
            }
            Harm::CorePause(ms) => self.core_until_ms = self.now_ms + ms,
            Harm::NoLauncher => self.is_launcher_gone = true,
        }
    }

    fn group(&self, generation: u32) -> Group {
        Group { run: self.run, generation }
    }

    /// The newest state on the disk, and what it would be after a power failure: each of them one that may be there.
    fn find_newest(&mut self) -> [State; 2] {
        let newest = self.saves.newest();
        newest.iter().for_each(|newest| self.groups.finds(newest));
        newest
    }

    fn coordinate(&mut self, event: CoordinatorEvent) {
        if let CoordinatorEvent::Message { link, envelope } = &event {
            let told = matches!(&envelope.message, ControlMessage::Heartbeat(activity) if activity.step > 0);
            self.has_heard |= told && envelope.generation == self.core_generation && !self.workers[*link].is_given_up;
        }
        for action in self.core.step(self.now_ms, event) {
            match action {
                CoordinatorAction::Send { link, envelope } => {
                    self.core_generation = self.core_generation.max(envelope.generation);
                    self.deliver(link, 1, Event::ToWorker(link, envelope));
                }
                CoordinatorAction::Kill { rank, link } => self.kill(rank, link),
                CoordinatorAction::Start { rank } => {
                    self.restarts.push((self.now_ms, rank));
                    self.launch(rank, true, 300);
                }
                CoordinatorAction::Notice(Notice::Resumed(resumed)) => {
                    (self.resumed, self.resumed_ms) = (self.resumed + 1, self.now_ms);
                    self.confirmed.insert(self.group(resumed.generation));
                }
                CoordinatorAction::Ended(verdict) => self.verdict = Some(verdict),
                _ => {}
            }
        }
    }

    fn kill(&mut self, number: usize, link: Option<usize>) {
        link.into_iter().for_each(|process| self.workers[process].is_given_up = true);
        let newest =
            |(process, worker): (usize, &Worker)| (worker.launched && worker.number == number).then_some(process);
        if let Some(process) = self.workers.iter().enumerate().rev().find_map(newest) {
            return self.at(self.now_ms + 1, Event::End(process, Exit::Signal(9)));
        }
        // Only the link can be closed. Whoever hears of it goes.
        let Some(process) = link else { return };
        self.at(self.now_ms, Event::ToCore(CoordinatorEvent::Closed { link: process }));
        self.deliver(process, 1, Event::End(process, Exit::Code(1)));
    }

    fn start(&mut self, process: usize) {
        let worker = &mut self.workers[process];
        (worker.alive, worker.heard_ms) = (true, self.now_ms);
        let (rank, world) = (worker.number, self.config.workers);
        let (role, manifest) = (String::new(), Manifest::default());
        let hello = Hello { rank, world, host: "n".into(), pid: process as u32, version: "1".into(), role, manifest };
        self.send(process, 0, ControlMessage::Hello(hello));
        self.at(self.now_ms, Event::Beat(process));
    }

    fn end(&mut self, process: usize, exit: Exit) {
        let worker = &mut self.workers[process];
        if !std::mem::replace(&mut worker.alive, false) {
            return;
        }
        if exit != Exit::Code(0) {
            self.find_newest();
        }
        let worker = &self.workers[process];
        let (launched, rank, cut) = (worker.launched, worker.number, worker.no_control);
        let last = worker.arrival_ms[0];
        self.deliver(process, 0, Event::ToCore(CoordinatorEvent::Closed { link: process }));
        if launched {
            let ms = if cut { self.now_ms } else { last.max(self.now_ms) } + self.random.below(10);
            self.at(ms, Event::ToCore(CoordinatorEvent::Exited { rank, exit }));
        }
    }

    fn beat(&mut self, process: usize) {
        let worker = &self.workers[process];
        if !worker.alive || worker.released {
            return;
        }
        if !worker.stopped {
            // Nobody is seen to end it, so it ends itself once the coordinator is silent.
            if self.now_ms > worker.heard_ms + DEADLINES.orphan_ms() && !worker.launched {
                return self.end(process, Exit::Code(1));
            }
            let generation = worker.generation.unwrap_or(0);
            let step = worker.state.as_ref().map_or(0, State::step);
            let (progress, in_call) = (worker.progress, worker.in_call);
            let activity = Activity { step, progress, call: None, in_call, waits: in_call };
            self.send(process, generation, ControlMessage::Heartbeat(activity));
            let ranks = self.unreachable(process);
            if !ranks.is_empty() {
                self.send(process, generation, ControlMessage::Unreachable { ranks });
            }
        }
        self.at(self.now_ms + DEADLINES.beat_ms(), Event::Beat(process));
    }

    fn receive(&mut self, process: usize, envelope: Envelope) {
        let worker = &mut self.workers[process];
        if !worker.alive {
            return;
        }
        worker.heard_ms = self.now_ms;
        if envelope.generation < worker.announced {
            return;
        }
        match envelope.message {
            ControlMessage::Regroup => {
                (worker.announced, worker.generation, worker.in_call) = (envelope.generation, None, false);
                (worker.yields, worker.finished, worker.saving) = (false, false, None);
                let held = worker.state.as_ref().filter(|_| !worker.relieved);
                let position = held.map(|state| 2 * state.step() + 1);
                self.send(process, envelope.generation, ControlMessage::Ready { position });
            }
            ControlMessage::Assign(assignment) => {
                worker.announced = envelope.generation;
                (worker.rank, worker.world, worker.roster) = (assignment.rank, assignment.world, 0);
                worker.keepers = assignment.keepers;
                worker.state_lost = assignment.state_lost;
                if assignment.state_lost {
                    // What a spare holds yet is of a time before.
                    (worker.state, worker.relieved) = (None, false);
                }
            }
            ControlMessage::Roster { rank, .. } if worker.world > 0 => {
                assert_eq!(rank, worker.roster);
                worker.roster += 1;
                if worker.roster == worker.world {
                    worker.generation = Some(envelope.generation);
                    let rank = worker.rank;
                    let taken = self.members.entry(envelope.generation).or_default().insert(rank, process);
                    assert_eq!(taken, None, "two ranks {rank} in generation {}", envelope.generation);
                    self.compute(process, SYNC);
                }
            }
            ControlMessage::Yield => worker.yields = true,
            ControlMessage::Abort { .. } => {
                let ms = self.now_ms + self.random.below(100);
                self.at(ms, Event::End(process, Exit::Code(1)));
            }
            ControlMessage::Release => {
                worker.released = true;
                let ms = self.now_ms + self.random.below(50);
                self.at(ms, Event::End(process, Exit::Code(0)));
            }
            _ => {}
        }
    }

    fn compute(&mut self, process: usize, sequence: u64) {
        let Some(generation) = self.workers[process].generation else { return };
        let ms = self.now_ms + 20 + self.random.below(200);
        self.at(ms, Event::Enter(process, generation, sequence));
    }

    /// All have contributed to a call once all have entered it; then it completes at each of them, at its own moment.
    fn enter(&mut self, process: usize, generation: u32, sequence: u64) {
        let worker = &mut self.workers[process];
        if !worker.alive || worker.generation != Some(generation) {
            return;
        }
        if worker.no_data {
            return self.at(self.now_ms + 50, Event::Enter(process, generation, sequence));
        }
        (worker.in_call, worker.progress) = (true, worker.progress + 1);
        let group = Group { run: self.run, generation };
        let (state, yields, rank, world) = (worker.state.clone(), worker.yields, worker.rank, worker.world);
        let step = state.as_ref().map_or(0, State::step);
        // What a generation begins with may have been saved by the one before, or not: nobody has seen the end of it.
        let saves = (is_agreement(sequence) && (saves::is_due(step) || step == self.steps))
            || (sequence == FIRST_EXCHANGE && saves::is_due(step));
        if let Some(state) = state.as_ref().filter(|_| saves) {
            worker.saving = Some(state.clone());
            self.saves.write(group, state, (rank, world));
        }
        let is_cut = self.is_cut(generation);
        let call = self.calls.entry((generation, sequence)).or_default();
        call.entered.insert(process);
        call.yields |= yields;
        if let Some(state) = state.as_ref().filter(|_| is_exchange(sequence)) {
            let grains = GRAINS * rank / world..GRAINS * (rank + 1) / world;
            call.sum = call.sum.wrapping_add(state.contribution(grains));
        }
        if sequence == SYNC && state.as_ref().map(State::step) > call.newest.as_ref().map(State::step) {
            call.newest = state;
        }
        if call.entered.len() == world && !is_cut {
            let entered = call.entered.clone();
            // One that wakes when its group is over finds the answers of the others, and may end the step before it sees more.
            if !self.workers[process].was_stopped {
                self.groups.decides(group);
            }
            for process in entered {
                let ms = self.now_ms + 1 + self.random.below(4 * self.delay_max_ms);
                self.at(ms, Event::Complete(process, generation, sequence));
            }
        }
    }

    fn complete(&mut self, process: usize, generation: u32, sequence: u64) {
        let worker = &self.workers[process];
        // Once told to regroup, every wait has ended.
        if !worker.alive || worker.generation != Some(generation) {
            return;
        }
        if worker.no_data {
            return self.at(self.now_ms + 50, Event::Complete(process, generation, sequence));
        }
        let (call, group) = (self.calls[&(generation, sequence)].clone(), self.group(generation));
        let worker = &mut self.workers[process];
        (worker.in_call, worker.progress) = (false, worker.progress + 1);
        if sequence == SYNC {
            let state = match worker.state_lost {
                false => call.newest.unwrap_or_else(|| self.origin.clone()),
                true => match self.checkpoint_for(generation) {
                    Some(saved) => saved,
                    None => {
                        let text = NOTHING_SAVED.into();
                        return self.send(process, generation, ControlMessage::Fail { text, culprit: None });
                    }
                },
            };
            let worker = &mut self.workers[process];
            let (step, went_back) = (state.step(), worker.state_lost);
            worker.state = Some(state.clone());
            if worker.keepers > 0 {
                assert!(self.config.sharded && worker.keepers < worker.world, "nothing to hand over");
                worker.relieved = worker.rank >= worker.keepers;
                self.relieved += u64::from(worker.relieved);
                return self.compute(process, HANDED_OVER);
            }
            worker.relieved = false;
            let ahead = |other: &Worker| other.alive && other.state.as_ref().map(State::step) > Some(step);
            let is_left = self.workers.iter().any(ahead);
            let told_of_none = state == self.origin && !self.has_heard;
            let unheard =
                |earlier: Group| went_back || (!is_left && (told_of_none || !self.confirmed.contains(&earlier)));
            self.groups.begins(group, &state, unheard);
            if self.workers[process].rank == 0 {
                self.send(process, generation, ControlMessage::Resumed { step });
            }
        } else if sequence == HANDED_OVER {
            return self.send(process, generation, ControlMessage::Yielded);
        } else if is_exchange(sequence) {
            self.apply(process, generation, call.sum);
        }
        let worker = &mut self.workers[process];
        let (step, first) = (worker.state.as_ref().map_or(0, State::step), worker.rank == 0);
        if let Some(state) = worker.saving.take().filter(|_| first) {
            if state.step() == self.steps {
                // Nobody leaves before the last one is there.
                self.commit(generation, &state);
            } else {
                let ms = worker.committed_ms.max(self.now_ms) + self.saves.commit_takes_ms();
                worker.committed_ms = ms;
                self.at(ms, Event::Commit(process, generation, state));
            }
        }
        if is_agreement(sequence) && call.yields {
            return self.send(process, generation, ControlMessage::Yielded);
        }
        if sequence.is_multiple_of(2) && step == self.steps {
            self.workers[process].finished = true;
            return self.send(process, generation, ControlMessage::Finish);
        }
        self.compute(process, sequence + 1);
    }

    /// The checkpoint that all ranks of a generation go back to, which its first rank has found; `None` if there is none.
    fn checkpoint_for(&mut self, generation: u32) -> Option<State> {
        if !self.went_back.contains_key(&generation) {
            let [newest, _] = self.find_newest();
            self.went_back.insert(generation, newest);
        }
        self.went_back.get(&generation).filter(|state| state.step() > 0).cloned()
    }

    fn apply(&mut self, process: usize, generation: u32, sum: u64) {
        let group = self.group(generation);
        let Some(state) = &mut self.workers[process].state else { panic!("a step without a state") };
        assert!(state.step() < self.steps, "a step beyond the last");
        assert!(state.makers.last().is_none_or(|before| *before <= group), "an older generation after a newer one");
        state.advance(group, sum);
        self.groups.makes(group, state);
    }

    fn commit(&mut self, generation: u32, state: &State) {
        let group = self.group(generation);
        let commit = self.groups.commits(group, state);
        if self.saves.commit(group, state.step()) {
            self.groups.committed(commit);
        }
        self.find_newest();
    }
}
