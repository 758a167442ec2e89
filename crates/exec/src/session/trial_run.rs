//! How long a step will take, found by running some of its calls: the real kernels, on the places they will have, with all
//! lanes at once. Calls that are alike are run a few times, however many there are; a step that is short runs whole.
//!
//! Of an exchange, a rank makes the copies on both sides; what happens between the ranks is not waited for.

use super::Session;
use crate::feed::Feed;
use crate::schedule::{Act, Item};
use kolo_graph::Phase;
use std::collections::HashMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

/// What a trial run found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrialTimes {
    pub step_seconds: f64,
    /// Kinds of calls that were timed.
    pub kinds: usize,
    /// Steps that were run from begin to end.
    pub whole_steps: usize,
}

/// Runs of each kind in one pass, if a whole step would take too long.
const RUNS_PER_PASS: usize = 2;
/// Passes of a trial run, at most.
const PASSES_MAX: usize = 64;
/// A step is run whole if so many fit into the time there is.
const WHOLE_STEPS_MIN: f64 = 6.0;

/// Seconds of the runs of each kind, in the order in which they ran.
type Samples = Vec<Vec<f64>>;

/// The kind of each call: calls are alike if op, attributes and types are.
struct Kinds {
    lane: Vec<usize>,
    before: Vec<usize>,
    after: Vec<usize>,
    count: usize,
    /// Adding a grain to the sums closes more or fewer of them, and each number is a kind of its own.
    closes: usize,
}

impl Kinds {
    fn new(session: &Session) -> Self {
        let mut numbers: HashMap<String, usize> = HashMap::new();
        let graph = session.graph();
        let mut kind = |item: &Item| {
            let node = graph.node(item.node);
            let maker = item.maker.map_or(String::new(), |maker| graph.node(maker).op.signature());
            // A sum over grains has its parameter's name among its attributes, and no two would be alike.
            let sums = matches!(item.act, Act::Sum { .. });
            let own = if sums { node.op.name().to_string() } else { node.op.signature() };
            let mut key = format!("{maker} {own}");
            for id in node.inputs.iter().chain(&node.outputs) {
                let _ = write!(key, " {}", graph.ty(*id));
            }
            let next = numbers.len();
            *numbers.entry(key).or_insert(next)
        };
        let lane = session.schedule.grain.iter().map(&mut kind).collect();
        let before = session.schedule.before.iter().map(&mut kind).collect();
        let after = session.schedule.after.iter().map(&mut kind).collect();
        let grains = session.options().grains_per_lane();
        Self { lane, before, after, count: numbers.len(), closes: grains.ilog2() as usize + 1 }
    }

    /// Where a lane's times of this call of this grain are.
    fn slot(&self, kind: usize, item: &Item, local: usize) -> usize {
        let closed = if matches!(item.act, Act::Sum { .. }) { local.trailing_ones() as usize } else { 0 };
        kind * self.closes + closed
    }

    /// Where a lane's times of making data are.
    fn feed(&self) -> usize {
        self.count * self.closes
    }
}

/// The time that is typical when nothing else disturbs: a low quantile, without the first run if there are others.
fn typical(samples: &[f64]) -> f64 {
    let mut rest = samples[usize::from(samples.len() > 1)..].to_vec();
    rest.sort_by(f64::total_cmp);
    rest.get(rest.len() / 4).copied().unwrap_or(0.0)
}

/// How much of a step a pass runs.
#[derive(Clone, Copy, PartialEq)]
enum Extent {
    Whole,
    Some,
}

/// Whether a call runs in this pass: all do, or the first few of each kind.
struct Turns {
    extent: Extent,
    seen: Vec<usize>,
}

impl Turns {
    fn new(extent: Extent, kinds: usize) -> Self {
        Self { extent, seen: vec![0; kinds] }
    }

    fn take(&mut self, kind: usize) -> bool {
        self.seen[kind] += 1;
        self.extent == Extent::Whole || self.seen[kind] <= RUNS_PER_PASS
    }
}

impl Session {
    /// Times a step within about this time. What the store holds afterwards means nothing.
    pub fn trial_run(
        &mut self,
        step: impl Fn(&mut Feed<'_>),
        grain: impl Fn(usize, &mut Feed<'_>) + Sync,
        patience: Duration,
    ) -> TrialTimes {
        let begin = Instant::now();
        let kinds = Kinds::new(self);
        let mut book = Book::new(&kinds, self.options().lanes);
        let mut extent = Extent::Some;
        self.touch_calls(extent, &kinds);
        for pass in 0..PASSES_MAX {
            let start = Instant::now();
            let seconds = seconds_of(|| {
                step(&mut Feed::new(self.device.inputs(None), 0));
                self.device.begin();
                self.trial_pass(&grain, &kinds, extent, &mut book);
            });
            let taken = start.elapsed().as_secs_f64();
            if extent == Extent::Whole {
                book.whole.push(seconds);
            }
            let left = patience.saturating_sub(begin.elapsed()).as_secs_f64();
            if pass == 0 && self.added_up(&book, &kinds) * WHOLE_STEPS_MIN < left {
                extent = Extent::Whole;
                self.touch_calls(extent, &kinds);
                continue;
            }
            // One pass after the first always: the first run of anything is slow.
            if pass > 0 && taken > left {
                break;
            }
        }
        let (step_seconds, whole_steps) = match book.whole.len() {
            0..4 => (self.added_up(&book, &kinds), 0),
            steps => (typical(&book.whole), steps),
        };
        TrialTimes { step_seconds, kinds: kinds.count, whole_steps }
    }

    /// Gives the memory of all calls that will run its pages, so that no run is slowed down by it.
    fn touch_calls(&self, extent: Extent, kinds: &Kinds) {
        for lane in 0..self.options().lanes {
            let mut turns = Turns::new(extent, kinds.count);
            for (at, _) in kinds.lane.iter().enumerate().filter(|(_, kind)| turns.take(**kind)) {
                self.device.touch(Phase::Grain, Some(at), lane);
            }
            self.device.touch(Phase::Grain, None, lane);
        }
        let mut turns = Turns::new(extent, kinds.count);
        for (phase, kinds) in [(Phase::Before, &kinds.before), (Phase::After, &kinds.after)] {
            for (at, _) in kinds.iter().enumerate().filter(|(_, kind)| turns.take(**kind)) {
                self.device.touch(phase, Some(at), 0);
            }
        }
        self.device.touch(Phase::After, None, 0);
    }

    fn trial_pass(
        &self,
        grain: &(impl Fn(usize, &mut Feed<'_>) + Sync),
        kinds: &Kinds,
        extent: Extent,
        book: &mut Book,
    ) {
        let mut turns = Turns::new(extent, kinds.count);
        self.time_phase(Phase::Before, &kinds.before, &mut turns, &mut book.once);
        let per_lane = self.options().grains_per_lane();
        let samples = SamplesPointer(book.lanes.as_mut_ptr());
        self.device.run_lanes(&|lane| {
            // SAFETY: every task has a lane's samples of its own.
            let samples = unsafe { &mut *samples.get().add(lane) };
            let mut turns = Turns::new(extent, samples.len());
            let feed = |local: usize| {
                self.feed_lane(lane, |feed| grain(lane * per_lane + local, feed));
            };
            for local in 0..per_lane {
                time(kinds.feed(), &mut turns, samples, || feed(local));
                for (at, (item, kind)) in self.schedule.grain.iter().zip(&kinds.lane).enumerate() {
                    let run = || self.run_to_its_end(Phase::Grain, at, item, lane, local);
                    time(kinds.slot(*kind, item, local), &mut turns, samples, run);
                }
            }
        });
        let seconds = seconds_of(|| {
            self.device.join_all();
            if let Some(exchanges) = &self.exchanges {
                exchanges.join_sums(&*self.device);
            }
        });
        book.join.push(seconds);
        self.time_phase(Phase::After, &kinds.after, &mut turns, &mut book.once);
    }

    fn run_to_its_end(&self, phase: Phase, at: usize, item: &Item, lane: usize, grain: usize) {
        match (&self.exchanges, item.act) {
            (Some(exchanges), Act::Start(exchange)) => exchanges.stage(exchange, lane, &*self.device),
            _ => {
                self.device.run(phase, at, lane, grain);
                self.device.wait_item();
            }
        }
    }

    fn time_phase(&self, phase: Phase, kinds: &[usize], turns: &mut Turns, samples: &mut Samples) {
        for (at, (item, kind)) in self.schedule.items(phase).iter().zip(kinds).enumerate() {
            time(*kind, turns, samples, || self.run_to_its_end(phase, at, item, 0, 0));
        }
    }

    /// Seconds of a step whose calls all take what is typical of their kind.
    fn added_up(&self, book: &Book, kinds: &Kinds) -> f64 {
        let per_lane = self.options().grains_per_lane();
        let of_lane = |samples: &Samples| -> f64 {
            let typical: Vec<f64> = samples.iter().map(|samples| typical(samples)).collect();
            let calls = || self.schedule.grain.iter().zip(&kinds.lane);
            let grain = |local| calls().map(|(item, kind)| typical[kinds.slot(*kind, item, local)]).sum::<f64>();
            (0..per_lane).map(|local| typical[kinds.feed()] + grain(local)).sum()
        };
        let slowest = book.lanes.iter().map(of_lane).fold(0.0, f64::max);
        let once: Vec<f64> = book.once.iter().map(|samples| typical(samples)).collect();
        let ends: f64 = kinds.before.iter().chain(&kinds.after).map(|kind| once[*kind]).sum();
        slowest + ends + typical(&book.join)
    }
}

/// All times so far.
struct Book {
    /// Of each lane.
    lanes: Vec<Samples>,
    /// Of what runs once per step.
    once: Samples,
    /// Of adding lanes up.
    join: Vec<f64>,
    /// Of whole steps.
    whole: Vec<f64>,
}

impl Book {
    fn new(kinds: &Kinds, lanes: usize) -> Self {
        Self {
            lanes: vec![vec![Vec::new(); kinds.feed() + 1]; lanes],
            once: vec![Vec::new(); kinds.count],
            join: Vec::new(),
            whole: Vec::new(),
        }
    }
}

#[cfg(test)]
impl Session {
    /// Seconds of a step of which every call was seen to take so long, and adding lanes together nothing.
    pub(crate) fn trial_sum(&self, seconds: f64) -> f64 {
        let kinds = Kinds::new(self);
        let mut book = Book::new(&kinds, self.options().lanes);
        book.lanes.iter_mut().flatten().chain(&mut book.once).for_each(|samples| *samples = vec![seconds; 3]);
        self.added_up(&book, &kinds)
    }
}

/// Runs something if it is its turn. Of a whole step only the whole is timed, since watches would weigh more than short calls.
fn time(kind: usize, turns: &mut Turns, samples: &mut Samples, work: impl FnOnce()) {
    match (turns.take(kind), turns.extent) {
        (false, _) => {}
        (true, Extent::Whole) => work(),
        (true, Extent::Some) => samples[kind].push(seconds_of(work)),
    }
}

/// The time that something takes, or the processor's time of this thread if that is less: what the system gave to others
/// meanwhile is not the job's.
fn seconds_of(work: impl FnOnce()) -> f64 {
    let processor = processor_seconds();
    let start = Instant::now();
    work();
    let taken = start.elapsed().as_secs_f64();
    match (processor, processor_seconds()) {
        (Some(before), Some(after)) => taken.min(after - before),
        _ => taken,
    }
}

/// The processor's time of this thread.
fn processor_seconds() -> Option<f64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock of the calling thread, written to a place of our own.
    let done = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    (done == 0).then_some(time.tv_sec as f64 + time.tv_nsec as f64 / 1e9)
}

struct SamplesPointer(*mut Samples);
// SAFETY: every task uses another lane's samples.
unsafe impl Sync for SamplesPointer {}
impl SamplesPointer {
    fn get(&self) -> *mut Samples {
        self.0
    }
}
