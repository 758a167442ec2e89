//! How long a step will take, found by running some of its calls: the real kernels, on the places they will have, with all
//! lanes at once. Calls that are alike are run a few times, however many there are; a step that is short runs whole.

use super::call::{Call, CallKind, run_call};
use super::{Feed, LanePointer, Session};
use crate::memory::Memory;
use crate::overlap;
use kolo_graph::Team;
use std::collections::HashMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

/// What a rehearsal found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rehearsal {
    pub step_seconds: f64,
    /// Kinds of calls that were timed.
    pub kinds: usize,
    /// Steps that were run from begin to end.
    pub whole_steps: usize,
}

/// Runs of each kind in one pass, if a whole step would take too long.
const RUNS_PER_PASS: usize = 2;
/// Passes of a rehearsal, at most.
const PASSES_MAX: usize = 64;
/// A step is run whole if so many fit into the time there is.
const WHOLE_STEPS_MIN: f64 = 6.0;
/// Sums of lanes that are added to learn how long adding takes.
const JOINED_MAX: usize = 1 << 20;
const PAGE_BYTES: usize = 4096;

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
        let mut kind = |call: &Call| {
            let maker = call.maker.as_ref().map_or(String::new(), |maker| maker.op.signature());
            // A sum over grains has its parameter's name among its attributes, and no two would be alike.
            let sums = matches!(call.kind, CallKind::Accumulate { .. });
            let own = if sums { call.op.name().to_string() } else { call.op.signature() };
            let mut key = format!("{maker} {own}");
            for buffer in call.inputs.iter().chain(&call.outputs) {
                let _ = write!(key, " {}", buffer.ty);
            }
            let next = numbers.len();
            *numbers.entry(key).or_insert(next)
        };
        let lane = session.lanes[0].calls.iter().map(&mut kind).collect();
        let before = session.before.iter().map(&mut kind).collect();
        let after = session.after.iter().map(&mut kind).collect();
        let grains = session.options.grains / session.options.lanes;
        Self { lane, before, after, count: numbers.len(), closes: grains.ilog2() as usize + 1 }
    }

    /// Where a lane's times of this call of this grain are.
    fn slot(&self, kind: usize, call: &Call, local: usize) -> usize {
        let closed = if matches!(call.kind, CallKind::Accumulate { .. }) { local.trailing_ones() as usize } else { 0 };
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

/// Gives memory its pages, so that no run is slowed down by it.
fn touch(data: *mut u8, bytes: usize) {
    if data.is_null() {
        return;
    }
    for offset in (0..bytes).step_by(PAGE_BYTES) {
        // SAFETY: inside the memory, which nobody else uses now; what is there stays.
        unsafe {
            let byte = data.add(offset);
            byte.write_volatile(byte.read_volatile());
        }
    }
}

fn touch_call(call: &Call) {
    let maker = call.maker.iter().flat_map(|maker| &maker.inputs);
    for buffer in call.inputs.iter().chain(&call.outputs).chain(&call.terms).chain(maker) {
        touch(buffer.data, buffer.ty.bytes());
    }
}

impl Session {
    /// Times a step within about this time. What the store holds afterwards means nothing.
    pub fn rehearse(
        &mut self,
        step: impl Fn(&mut Feed<'_>),
        grain: impl Fn(usize, &mut Feed<'_>) + Sync,
        patience: Duration,
    ) -> Rehearsal {
        let begin = Instant::now();
        let kinds = Kinds::new(self);
        let mut book = Book::new(&kinds, self.lanes.len());
        let mut extent = Extent::Some;
        self.touch_calls(extent, &kinds);
        for pass in 0..PASSES_MAX {
            let start = Instant::now();
            let seconds = seconds_of(|| {
                step(&mut Feed { inputs: &self.step_inputs });
                self.rehearse_pass(&grain, &kinds, extent, &mut book);
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
        Rehearsal { step_seconds, kinds: kinds.count, whole_steps }
    }

    fn touch_calls(&self, extent: Extent, kinds: &Kinds) {
        for lane in &self.lanes {
            let mut turns = Turns::new(extent, kinds.count);
            for (call, _) in lane.calls.iter().zip(&kinds.lane).filter(|(_, kind)| turns.take(**kind)) {
                touch_call(call);
                if let CallKind::Accumulate { offset, elements } = call.kind {
                    lane.levels.iter().for_each(|level| touch(level.at(offset * 4), elements * 4));
                }
            }
            touch(lane.scratch.at(0), lane.scratch.bytes());
        }
        let mut turns = Turns::new(extent, kinds.count);
        let ends = self.before.iter().zip(&kinds.before).chain(self.after.iter().zip(&kinds.after));
        ends.filter(|(_, kind)| turns.take(**kind)).for_each(|(call, _)| touch_call(call));
        touch(self.scratch.at(0), self.scratch.bytes());
    }

    fn rehearse_pass(
        &mut self,
        grain: &(impl Fn(usize, &mut Feed<'_>) + Sync),
        kinds: &Kinds,
        extent: Extent,
        book: &mut Book,
    ) {
        let mut turns = Turns::new(extent, kinds.count);
        time_calls(&self.before, &kinds.before, &mut turns, &mut book.once, &self.team, &self.scratch);
        let per_lane = self.options.grains / self.options.lanes;
        let lanes = LanePointer(self.lanes.as_mut_ptr());
        let samples = SamplesPointer(book.lanes.as_mut_ptr());
        self.team.run(self.lanes.len(), |at, _| {
            // SAFETY: every task has a lane of its own, and that lane's samples.
            let (lane, samples) = unsafe { (&mut *lanes.get().add(at), &mut *samples.get().add(at)) };
            let mut turns = Turns::new(extent, samples.len());
            let feed = |local: usize| grain(at * per_lane + local, &mut Feed { inputs: &lane.inputs });
            for local in 0..per_lane {
                time(kinds.feed(), &mut turns, samples, || feed(local));
                for (call, kind) in lane.calls.iter().zip(&kinds.lane) {
                    time(kinds.slot(*kind, call, local), &mut turns, samples, || lane.call(call, local));
                }
            }
        });
        for range in &self.joined {
            let end = if extent == Extent::Whole { range.end } else { range.end.min(range.start + JOINED_MAX) };
            let seconds = seconds_of(|| overlap::join(&self.sums, range.start..end, &self.team));
            book.join_per_element.push(seconds / (end - range.start).max(1) as f64);
        }
        time_calls(&self.after, &kinds.after, &mut turns, &mut book.once, &self.team, &self.scratch);
    }

    /// Seconds of a step whose calls all take what is typical of their kind.
    fn added_up(&self, book: &Book, kinds: &Kinds) -> f64 {
        let per_lane = self.options.grains / self.options.lanes;
        let of_lane = |samples: &Samples| -> f64 {
            let typical: Vec<f64> = samples.iter().map(|samples| typical(samples)).collect();
            let calls = || self.lanes[0].calls.iter().zip(&kinds.lane);
            let grain = |local| calls().map(|(call, kind)| typical[kinds.slot(*kind, call, local)]).sum::<f64>();
            (0..per_lane).map(|local| typical[kinds.feed()] + grain(local)).sum()
        };
        let slowest = book.lanes.iter().map(of_lane).fold(0.0, f64::max);
        let once: Vec<f64> = book.once.iter().map(|samples| typical(samples)).collect();
        let ends: f64 = kinds.before.iter().chain(&kinds.after).map(|kind| once[*kind]).sum();
        let joined: usize = self.joined.iter().map(ExactSizeIterator::len).sum();
        slowest + ends + joined as f64 * typical(&book.join_per_element)
    }
}

/// All times so far.
struct Book {
    /// Of each lane.
    lanes: Vec<Samples>,
    /// Of what runs once per step.
    once: Samples,
    join_per_element: Vec<f64>,
    /// Of whole steps.
    whole: Vec<f64>,
}

impl Book {
    fn new(kinds: &Kinds, lanes: usize) -> Self {
        Self {
            lanes: vec![vec![Vec::new(); kinds.feed() + 1]; lanes],
            once: vec![Vec::new(); kinds.count],
            join_per_element: Vec::new(),
            whole: Vec::new(),
        }
    }
}

#[cfg(test)]
impl Session {
    /// Seconds of a step of which every call was seen to take so long, and adding lanes together nothing.
    pub(super) fn rehearsed_by(&self, seconds: f64) -> f64 {
        let kinds = Kinds::new(self);
        let mut book = Book::new(&kinds, self.lanes.len());
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

fn time_calls(
    calls: &[Call],
    kinds: &[usize],
    turns: &mut Turns,
    samples: &mut Samples,
    team: &Team,
    scratch: &Memory,
) {
    for (call, kind) in calls.iter().zip(kinds) {
        time(*kind, turns, samples, || run_call(call, team, scratch));
    }
}

struct SamplesPointer(*mut Samples);
// SAFETY: every task uses another lane's samples.
unsafe impl Sync for SamplesPointer {}
impl SamplesPointer {
    fn get(&self) -> *mut Samples {
        self.0
    }
}
