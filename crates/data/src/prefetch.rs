//! Samples made ahead of the step that takes them, by threads of their own.
//!
//! What one step takes is a batch, cut into grains. A grain's samples lie in a buffer, which a loader thread fills and a
//! compute lane copies from. There are buffers for the batch in use and for `Plan::batches` more: memory is bounded, and a
//! step in steady state allocates nothing. Loaders take the grains in order, and no sample shows which thread made it.
//!
//! An error or a panic of the source stays with its grain until the step that needs it asks. So it comes at the same step
//! however far ahead the loaders are; of several in a step, that of the first grain counts. Without threads, because none were
//! asked for or the system refused them, whoever takes a batch makes it.

mod samples;
#[cfg(test)]
mod tests;

pub use samples::{Maker, Samples, Values};

use crate::error::ReadError;
use crate::source::Source;
use crate::stream::Walk;
use kolo_base::{lock, wait, wait_timeout};
use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the grains of each step hold.
pub trait Recipe: Send + Sync + fmt::Debug {
    /// What messages call the source.
    fn source_name(&self) -> &str;

    fn source(&self) -> &dyn Source;

    /// The source's fields that are wanted.
    fn columns(&self) -> &[usize];

    /// The epoch that this step trains on; `None` if it evaluates.
    fn epoch(&self, step: usize) -> Option<usize>;

    /// Writes the numbers of the samples of a grain into `samples`, which is empty and has room for as many as the plan says.
    fn choose(&self, step: usize, grain: usize, samples: &mut Vec<usize>);

    /// A way through the samples of so many grains from this step on, if the source has an order of its own: it then chooses
    /// and reads them.
    fn walk(&self, _first_step: usize, _grains: usize) -> Option<Box<dyn Walk>> {
        None
    }
}

/// How much is made ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchPlan {
    /// The first step that will be taken, and the one that is not made ahead any more.
    pub first: usize,
    pub end: usize,
    /// Grains of a step.
    pub grains: usize,
    /// Samples of a grain, at most.
    pub samples: usize,
    /// Batches that may be ready beside the one in use; 0: each is made when it is taken.
    pub batches: usize,
    /// Threads that make them.
    pub threads: usize,
}

impl PrefetchPlan {
    fn slots(&self) -> usize {
        (self.batches + 1) * self.grains
    }

    fn slot(&self, step: usize, grain: usize) -> usize {
        step % (self.batches + 1) * self.grains + grain
    }
}

/// Sees every grain that is made: the thread's number, the step, start and end.
pub type Tracer = Arc<dyn Fn(usize, usize, Instant, Instant) + Send + Sync>;

/// How often a step that waits looks whether it still should.
const LOOK: Duration = Duration::from_millis(5);
/// How long a run that ends waits for loaders in the midst of a sample.
const DROP_WAIT_MAX: Duration = Duration::from_millis(500);

/// The loader threads and what they have made. Dropping it ends them, each after the sample that it is at; it waits half a second for that.
#[derive(Debug)]
pub struct Prefetch {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    recipe: Arc<dyn Recipe>,
    walk: Option<Box<dyn Walk>>,
    plan: PrefetchPlan,
    buffers: Vec<Mutex<Samples>>,
    state: Mutex<QueueState>,
    /// There may be something to make.
    work: Condvar,
    /// A grain was made.
    made: Condvar,
    stop: AtomicBool,
    /// Loaders that have started.
    up: AtomicUsize,
    /// Samples made so far: who waits sees by it that the source gets on.
    count: AtomicUsize,
    tracer: Option<Tracer>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {:?}", self.plan, self.recipe)
    }
}

struct QueueState {
    /// The step in use.
    taken: usize,
    /// The next grain to make: its step and its number.
    next: (usize, usize),
    /// By slot.
    outcomes: Vec<Outcome>,
    /// A step waits.
    waits: bool,
}

enum Outcome {
    Unmade,
    Made,
    Failed(ReadError),
    Panicked(Option<Box<dyn Any + Send>>),
}

impl QueueState {
    /// The next grain, if its step is no later than `last`.
    fn claim(&mut self, plan: &PrefetchPlan, last: usize) -> Option<(usize, usize)> {
        let (step, grain) = self.next;
        if step > last || step >= plan.end.max(self.taken + 1) {
            return None;
        }
        self.next = if grain + 1 == plan.grains { (step + 1, 0) } else { (step, grain + 1) };
        Some((step, grain))
    }

    /// The step in use is over, and its buffers are free.
    fn advance(&mut self, plan: &PrefetchPlan) {
        let start = plan.slot(self.taken, 0);
        self.outcomes[start..start + plan.grains].fill_with(|| Outcome::Unmade);
        self.taken += 1;
    }

    /// What became of the step in use, if all of it is done.
    fn outcome(&mut self, plan: &PrefetchPlan) -> Option<Outcome> {
        let start = plan.slot(self.taken, 0);
        let grains = &mut self.outcomes[start..start + plan.grains];
        if grains.iter().any(|grain| matches!(grain, Outcome::Unmade)) {
            return None;
        }
        let wrong = grains.iter_mut().find(|grain| !matches!(grain, Outcome::Made));
        Some(match wrong {
            None => Outcome::Made,
            Some(Outcome::Panicked(payload)) => Outcome::Panicked(payload.take()),
            Some(Outcome::Failed(error)) => Outcome::Failed(error.clone()),
            Some(_) => return None,
        })
    }
}

impl Prefetch {
    /// Starts to make the first batches. Where the system refuses threads, it does with fewer, or with none.
    pub fn start(recipe: Arc<dyn Recipe>, plan: PrefetchPlan, tracer: Option<Tracer>) -> Self {
        assert!(plan.grains > 0, "a batch has a grain");
        let buffers = (0..plan.slots()).map(|_| Mutex::new(Samples::new(&*recipe, plan.samples))).collect();
        let outcomes = (0..plan.slots()).map(|_| Outcome::Unmade).collect();
        let state = QueueState { taken: plan.first, next: (plan.first, 0), outcomes, waits: false };
        let shared = Arc::new(Shared {
            walk: recipe.walk(plan.first, plan.grains),
            recipe,
            plan,
            buffers,
            state: Mutex::new(state),
            work: Condvar::new(),
            made: Condvar::new(),
            stop: AtomicBool::new(false),
            up: AtomicUsize::new(0),
            count: AtomicUsize::new(0),
            tracer,
        });
        let wanted = if plan.batches == 0 { 0 } else { plan.threads };
        let spawn = |thread: usize| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new().name(format!("kolo-data-{thread}")).spawn(move || shared.load(thread)).ok()
        };
        let threads: Vec<JoinHandle<()>> = (0..wanted).map_while(spawn).collect();
        // A thread allocates as it starts: wait for all, so that no later step does.
        while shared.up.load(Ordering::Acquire) != threads.len() {
            std::thread::yield_now();
        }
        Self { shared, threads }
    }

    pub fn plan(&self) -> &PrefetchPlan {
        &self.shared.plan
    }

    /// Loader threads that the system granted.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Whether `step` comes next, or is in use already.
    pub fn can_take(&self, step: usize) -> bool {
        let taken = lock(&self.shared.state).taken;
        step == taken || step == taken + 1
    }

    /// Waits until all of `step` is made, which then is in use, and the step before it no more. While it waits, `look` is
    /// asked now and then whether it should, and told whether a sample was made meanwhile.
    pub fn take<E: From<ReadError>>(
        &mut self,
        step: usize,
        look: &mut dyn FnMut(bool) -> Result<(), E>,
    ) -> Result<(), E> {
        assert!(self.can_take(step), "batches are taken in order");
        let shared = &*self.shared;
        let mut state = lock(&shared.state);
        if state.taken != step {
            state.advance(&shared.plan);
            shared.work.notify_all();
        }
        let mut count = shared.count.load(Ordering::Relaxed);
        loop {
            match state.outcome(&shared.plan) {
                Some(Outcome::Made) => return Ok(()),
                Some(Outcome::Failed(error)) => return Err(error.into()),
                Some(Outcome::Panicked(Some(payload))) => {
                    drop(state);
                    resume_unwind(payload);
                }
                Some(_) => panic!("the source panicked on step {step}"),
                None => {}
            }
            if self.threads.is_empty() {
                // Before a grain is claimed: whoever gives up here may ask for the step again.
                drop(state);
                look(true)?;
                state = lock(&shared.state);
                let Some(unit) = state.claim(&shared.plan, step) else { continue };
                drop(state);
                shared.make(0, unit);
                state = lock(&shared.state);
                continue;
            }
            state.waits = true;
            state = wait_timeout(&shared.made, state, LOOK);
            let now = shared.count.load(Ordering::Relaxed);
            look(std::mem::replace(&mut count, now) != now)?;
        }
    }

    /// A grain of the step in use.
    pub fn grain(&self, step: usize, grain: usize) -> MutexGuard<'_, Samples> {
        lock(&self.shared.buffers[self.shared.plan.slot(step, grain)])
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        {
            // Under the lock, so that no loader misses it between looking and sleeping.
            let _state = lock(&self.shared.state);
            self.shared.stop.store(true, Ordering::Relaxed);
            self.shared.work.notify_all();
        }
        // A loader that is in the midst of a sample ends after it; a source that hangs must not keep the run from its end.
        let deadline = Instant::now() + DROP_WAIT_MAX;
        while self.threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        // A panic of a loader was a source's, and stays with its grain.
        self.threads.drain(..).filter(|thread| thread.is_finished()).for_each(|thread| _ = thread.join());
    }
}

impl Shared {
    /// A loader thread.
    fn load(&self, thread: usize) {
        self.up.fetch_add(1, Ordering::Release);
        loop {
            let unit = {
                let mut state = lock(&self.state);
                loop {
                    if self.stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let last = state.taken + self.plan.batches;
                    match state.claim(&self.plan, last) {
                        Some(unit) => break unit,
                        None => state = wait(&self.work, state),
                    }
                }
            };
            self.make(thread, unit);
        }
    }

    fn maker(&self) -> Maker<'_> {
        Maker { recipe: &*self.recipe, walk: self.walk.as_deref() }
    }

    fn make(&self, thread: usize, (step, grain): (usize, usize)) {
        let start = Instant::now();
        let slot = self.plan.slot(step, grain);
        let go_on = || {
            self.count.fetch_add(1, Ordering::Relaxed);
            !self.stop.load(Ordering::Relaxed)
        };
        // A panic of a source is kept as the outcome of its grain; what it left in the buffer is not used.
        let fill = || lock(&self.buffers[slot]).make(self.maker(), step, grain, &go_on);
        let outcome = match catch_unwind(AssertUnwindSafe(fill)) {
            Ok(Ok(())) => Outcome::Made,
            Ok(Err(error)) => Outcome::Failed(error),
            Err(payload) => Outcome::Panicked(Some(payload)),
        };
        if let Some(tracer) = &self.tracer {
            tracer(thread, step, start, Instant::now());
        }
        let mut state = lock(&self.state);
        state.outcomes[slot] = outcome;
        if std::mem::take(&mut state.waits) {
            self.made.notify_one();
        }
    }
}
