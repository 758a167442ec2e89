//! Elastic jobs in virtual time, from a seed: workers that crash, are cut off, stop or join, and steps that every rank of a
//! generation must contribute to. It drives the real core.
//!
//! The data plane is reduced to what matters for safety: a call completes at a rank, some time after all ranks of its
//! generation have entered it, and at each of them at another moment. A worker applies a step when its exchange has completed.
//! Where nobody is left who has the state, all go back to the newest checkpoint; where there is none, the job ends.
//!
//! Checked: a worker's state is made of every step once and in order; a generation never applies a step beyond the one at
//! which its successor began, and nothing once its successor had to go back; nobody acts for a generation that it has left;
//! the job ends, well if enough workers are left.
//! Ranks also save their state, on a disk whose power may fail: what is on it is checked in [`super::saves`].

use super::job::Random;
use super::saves::{self, Saves};
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

const SEEDS: u64 = 3000;
const HORIZON_MS: u64 = 600_000;

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
}

/// The state of a worker: the generation in which each step was applied.
type History = Vec<u32>;

#[derive(Clone, Debug, Default)]
struct Worker {
    /// What the launcher or the core calls it.
    number: usize,
    alive: bool,
    stopped: bool,
    no_control: bool,
    no_data: bool,
    launched: bool,
    /// The newest generation it has heard of, and the one it is a rank of.
    announced: u32,
    generation: Option<u32>,
    rank: usize,
    world: usize,
    roster: usize,
    history: Option<History>,
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
}

/// A call of a generation: who has entered.
#[derive(Clone, Debug, Default)]
struct Call {
    entered: BTreeSet<usize>,
    /// The newest state that a rank brought, for the first call of a generation.
    newest: Option<History>,
    yields: bool,
}

struct Simulation {
    seed: u64,
    random: Random,
    config: ElasticConfig,
    delay_max_ms: u64,
    steps: u64,
    core: Elastic,
    core_until_ms: u64,
    workers: Vec<Worker>,
    /// The process of each link.
    calls: BTreeMap<(u32, u64), Call>,
    members: BTreeMap<u32, BTreeMap<usize, usize>>,
    /// The step at which each generation began.
    began: BTreeMap<u32, u64>,
    /// The furthest step that each generation applied.
    applied: BTreeMap<u32, u64>,
    queue: BinaryHeap<Reverse<(u64, usize)>>,
    events: Vec<Option<Event>>,
    now_ms: u64,
    verdict: Option<Verdict>,
    resumed: u64,
    harms: usize,
    /// Workers whose part of the state others took over.
    relieved: u64,
    /// The state that was saved last, and the generations that went back to it.
    saved: Option<History>,
    went_back: BTreeSet<u32>,
    saves: Saves,
}

/// The first call of a generation brings everyone the newest state; then each step has an exchange and an agreement.
const SYNC: u64 = 0;
/// The call after that of a group that only hands the state over.
const HANDED_OVER: u64 = u64::MAX;

/// Why a job ends of which nobody has the state.
const NOTHING_SAVED: &str = "there is no checkpoint to go back to";

/// The call after a step, in which ranks say what they want.
fn is_agreement(sequence: u64) -> bool {
    sequence != SYNC && sequence != HANDED_OVER && sequence.is_multiple_of(2)
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678);
        let workers = 2 + random.below(7) as usize;
        let supervised = random.below(3) > 0;
        let mut config = ElasticConfig {
            job: JOB,
            workers,
            min: 1,
            grains: 8,
            restarts: if supervised { random.below(6) as u32 } else { 0 },
            deadlines: DEADLINES,
            supervised,
            sharded: seed % 2 == 1,
        };
        config.min = config.ranks(1 + random.below(workers as u64) as usize);
        let hosts: Vec<String> = (0..workers).map(|worker| format!("n{worker}")).collect();
        let mut this = Self {
            seed,
            steps: 5 + random.below(30),
            delay_max_ms: [1, 20, 300][random.below(3) as usize],
            random,
            config,
            core: Elastic::new(config, &hosts, 0),
            core_until_ms: 0,
            workers: Vec::new(),
            calls: BTreeMap::new(),
            members: BTreeMap::new(),
            began: BTreeMap::new(),
            applied: BTreeMap::new(),
            queue: BinaryHeap::new(),
            events: Vec::new(),
            now_ms: 0,
            verdict: None,
            resumed: 0,
            harms: 0,
            relieved: 0,
            saved: None,
            went_back: BTreeSet::new(),
            saves: Saves::new(seed),
        };
        for number in 0..workers {
            this.launch(number, supervised, 0);
        }
        for _ in 0..this.random.below(5) {
            let (ms, harm) = (100 + this.random.below(9000), this.harm());
            let victim = this.random.below(workers as u64 + 2) as usize;
            this.at(ms, Event::Harm(harm, victim));
        }
        for _ in 0..this.random.below(3) {
            let ms = this.random.below(8000);
            this.at(ms, Event::Join);
        }
        if seed % 8 == 5 {
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
        let brief = Some(100 + self.random.below(6000)).filter(|_| self.random.below(2) == 0);
        match self.random.below(8) {
            0 => Harm::NoControl(brief),
            1 => Harm::NoNetwork(brief),
            2 => Harm::Stop(brief),
            3 => Harm::CorePause(self.random.below(4000)),
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
        if !self.workers[process].no_control {
            let ms = self.arrival(process, 0);
            let envelope = Envelope { job: JOB, generation, message };
            self.at(ms, Event::ToCore(CoordinatorEvent::Message { link: process, envelope }));
        }
    }

    fn run(&mut self) -> Verdict {
        loop {
            if let Some(verdict) = self.verdict.take() {
                return verdict;
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
            Event::Heal(process) => (self.workers[process].no_control, self.workers[process].no_data) = (false, false),
            Event::Join => self.launch(ANY_RANK, false, 0),
            Event::PowerFailure => self.saves.fail(),
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
                worker.stopped = true;
                let (launched, rank) = (worker.launched, worker.number);
                brief.map(heals).into_iter().for_each(|ms| self.at(ms, Event::Wake(victim)));
                if launched {
                    self.at(self.now_ms, Event::ToCore(CoordinatorEvent::Stopped { rank }));
                }
            }
            Harm::CorePause(ms) => self.core_until_ms = self.now_ms + ms,
        }
    }

    fn coordinate(&mut self, event: CoordinatorEvent) {
        for action in self.core.step(self.now_ms, event) {
            match action {
                CoordinatorAction::Send { link, envelope } => {
                    if !self.workers[link].no_control {
                        let ms = self.arrival(link, 1);
                        self.at(ms, Event::ToWorker(link, envelope));
                    }
                }
                CoordinatorAction::Kill { rank, link } => self.kill(rank, link),
                CoordinatorAction::Start { rank } => self.launch(rank, true, 300),
                CoordinatorAction::Notice(Notice::Resumed(_)) => self.resumed += 1,
                CoordinatorAction::Ended(verdict) => self.verdict = Some(verdict),
                _ => {}
            }
        }
    }

    fn kill(&mut self, number: usize, link: Option<usize>) {
        let newest =
            |(process, worker): (usize, &Worker)| (worker.launched && worker.number == number).then_some(process);
        if let Some(process) = self.workers.iter().enumerate().rev().find_map(newest) {
            return self.at(self.now_ms + 1, Event::End(process, Exit::Signal(9)));
        }
        // Only the link can be closed. Whoever hears of it goes.
        let Some(process) = link else { return };
        self.at(self.now_ms, Event::ToCore(CoordinatorEvent::Closed { link: process }));
        if !self.workers[process].no_control {
            let ms = self.arrival(process, 1);
            self.at(ms, Event::End(process, Exit::Code(1)));
        }
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
        let (launched, rank, cut) = (worker.launched, worker.number, worker.no_control);
        let last = worker.arrival_ms[0];
        if !cut {
            let ms = self.arrival(process, 0);
            self.at(ms, Event::ToCore(CoordinatorEvent::Closed { link: process }));
        }
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
            let step = worker.history.as_ref().map_or(0, |history| history.len() as u64);
            let (progress, in_call) = (worker.progress, worker.in_call);
            let activity = Activity { step, progress, call: None, in_call, waits: in_call };
            self.send(process, generation, ControlMessage::Heartbeat(activity));
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
                (worker.yields, worker.finished) = (false, false);
                let held = worker.history.as_ref().filter(|_| !worker.relieved);
                let position = held.map(|history| 2 * history.len() as u64 + 1);
                self.send(process, envelope.generation, ControlMessage::Ready { position });
            }
            ControlMessage::Assign(assignment) => {
                worker.announced = envelope.generation;
                (worker.rank, worker.world, worker.roster) = (assignment.rank, assignment.world, 0);
                worker.keepers = assignment.keepers;
                worker.state_lost = assignment.state_lost;
                if assignment.state_lost {
                    // What a spare holds yet is of a time before.
                    (worker.history, worker.relieved) = (None, false);
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
        let (history, yields, rank, world) = (worker.history.clone(), worker.yields, worker.rank, worker.world);
        let step = history.as_ref().map_or(0, Vec::len) as u64;
        if is_agreement(sequence) && saves::is_due(step) {
            self.saves.write(generation, step, (rank, world));
        }
        let call = self.calls.entry((generation, sequence)).or_default();
        call.entered.insert(process);
        call.yields |= yields;
        if sequence == SYNC && history.as_ref().map(Vec::len) > call.newest.as_ref().map(Vec::len) {
            call.newest = history;
        }
        if call.entered.len() == world {
            for process in call.entered.clone() {
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
        let call = self.calls[&(generation, sequence)].clone();
        let worker = &mut self.workers[process];
        (worker.in_call, worker.progress) = (false, worker.progress + 1);
        if sequence == SYNC {
            let worker = &self.workers[process];
            let history = match (worker.state_lost, self.saved.clone()) {
                (false, _) => call.newest.unwrap_or_default(),
                (true, Some(saved)) => saved,
                (true, None) => {
                    let text = NOTHING_SAVED.into();
                    return self.send(process, generation, ControlMessage::Fail { text, culprit: None });
                }
            };
            if worker.state_lost {
                self.went_back.insert(generation);
            }
            let worker = &mut self.workers[process];
            let step = history.len() as u64;
            worker.history = Some(history);
            if worker.keepers > 0 {
                assert!(self.config.sharded && worker.keepers < worker.world, "nothing to hand over");
                worker.relieved = worker.rank >= worker.keepers;
                self.relieved += u64::from(worker.relieved);
                return self.compute(process, HANDED_OVER);
            }
            worker.relieved = false;
            assert_eq!(*self.began.entry(generation).or_insert(step), step, "ranks begin at one step");
            if self.workers[process].rank == 0 {
                self.send(process, generation, ControlMessage::Resumed { step });
            }
        } else if sequence == HANDED_OVER {
            return self.send(process, generation, ControlMessage::Yielded);
        } else if sequence % 2 == 1 {
            self.apply(process, generation);
        }
        let step = self.workers[process].history.as_ref().map_or(0, Vec::len) as u64;
        if is_agreement(sequence) && self.workers[process].rank == 0 && saves::is_due(step) {
            let later = self.began.range(generation + 1..).map(|(_, began)| *began);
            let commits = self.saves.commits;
            self.saves.commit(generation, step, later);
            if self.saves.commits > commits {
                self.saved = self.workers[process].history.clone();
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

    fn apply(&mut self, process: usize, generation: u32) {
        let Some(history) = &mut self.workers[process].history else { panic!("a step without a state") };
        let step = history.len() as u64;
        assert!(step < self.steps, "a step beyond the last");
        assert!(history.last().is_none_or(|before| *before <= generation), "an older generation after a newer one");
        history.push(generation);
        let furthest = self.applied.entry(generation).or_insert(step);
        *furthest = (*furthest).max(step);
        let back = self.went_back.range(generation + 1..).next();
        assert_eq!(back, None, "generation {generation} applies step {step} after a later one went back");
        for (later, began) in self.began.range(generation + 1..) {
            assert!(step <= *began, "generation {generation} applies step {step}, but {later} began at {began}");
        }
    }
}

/// How many harms were done, generations went on, workers handed over and generations went back; whether the job ended well.
fn check(seed: u64) -> (usize, [u64; 3], bool, Saves) {
    let mut simulation = Simulation::new(seed);
    let verdict = simulation.run();
    simulation.saves.check();
    simulation.saves.fail();
    let about = format!(
        "seed {seed}: {:?}, {} steps, delay {} ms, {} harms: {verdict:?}",
        simulation.config, simulation.steps, simulation.delay_max_ms, simulation.harms
    );
    for (generation, furthest) in &simulation.applied {
        let end = simulation.went_back.range(generation + 1..).next().copied().unwrap_or(u32::MAX);
        for (_, began) in simulation.began.range(generation + 1..end) {
            assert!(furthest <= began, "two groups went on from generation {generation}, {about}");
        }
    }
    let done = verdict.exit_code == 0;
    let finished = simulation.workers.iter().filter(|worker| worker.finished).count();
    if done {
        assert!(finished >= 1, "nobody finished, {about}");
    } else {
        let text = verdict.text().unwrap_or_default();
        // Where nobody sees their processes, workers leave a coordinator that does not run.
        let expected =
            ["the job needs at least", NOTHING_SAVED, "left in the meantime"].iter().any(|part| text.contains(part));
        assert!(expected && simulation.harms > 0, "ended for another reason, {about}");
    }
    assert!(done || simulation.harms > 0, "failed without harm, {about}");
    for worker in simulation.workers.iter().filter(|worker| worker.finished && done) {
        assert_eq!(worker.history.as_ref().map_or(0, Vec::len) as u64, simulation.steps, "{about}");
    }
    let went_back = simulation.went_back.len() as u64;
    (simulation.harms, [simulation.resumed, simulation.relieved, went_back], done, simulation.saves)
}

#[test]
fn thousands_of_elastic_jobs() {
    let (mut totals, mut counts, mut saved) = ((0, 0), [0; 3], (0, 0));
    for seed in 0..SEEDS {
        let (harms, of_job, done, saves) = check(seed);
        totals = (totals.0 + harms, totals.1 + u64::from(done));
        counts.iter_mut().zip(of_job).for_each(|(total, count)| *total += count);
        saved = (saved.0 + saves.commits, saved.1 + saves.failures);
    }
    let ((harms, done), [resumed, relieved, went_back]) = (totals, counts);
    // The jobs are harmed, and most survive.
    assert!(harms > 2000 && resumed > SEEDS + 1000 && done * 10 > SEEDS * 6, "{totals:?} {counts:?}");
    assert!(relieved > 100 && went_back > 20, "{counts:?}");
    let (commits, failures) = saved;
    assert!(commits > 2 * SEEDS && failures > SEEDS + 1000, "{saved:?}");
}
