//! A team of threads that run one loop together and then wait for the next.
//!
//! Between loops a thread spins for a short while before it sleeps: a training step is thousands of short loops, and
//! waking a sleeper costs more than most of them. Which thread runs which task is left to chance; a kernel's result
//! must not depend on it.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::{JoinHandle, Thread};

const SPINS_BEFORE_SLEEP: u32 = 20_000;

type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// A borrowed closure with its lifetime erased; valid while `run` waits.
struct Job {
    task: *const Task<'static>,
    tasks: usize,
}

struct Shared {
    epoch: AtomicU32,
    job: AtomicPtr<Job>,
    next: AtomicUsize,
    busy: AtomicUsize,
    /// Helpers that have started.
    up: AtomicUsize,
    stop: AtomicBool,
    panicked: AtomicBool,
    asleep: Vec<AtomicBool>,
}

/// A fixed number of threads, the caller's own among them.
pub struct Team {
    shared: Arc<Shared>,
    sleepers: Vec<Thread>,
    handles: Vec<JoinHandle<()>>,
    /// `run` is not reentrant; a nested or concurrent call runs its tasks alone.
    in_use: Mutex<()>,
}

impl fmt::Debug for Team {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Team({})", self.threads())
    }
}

impl Team {
    /// # Panics
    ///
    /// If the system refuses a thread; see [`Team::try_new`].
    pub fn new(threads: usize) -> Self {
        Self::try_new(threads).expect("the system gives the threads that were asked for")
    }

    /// A team of so many threads, if the system has them.
    pub fn try_new(threads: usize) -> io::Result<Self> {
        let helpers = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
            next: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            up: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            asleep: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
        });
        // Dropping it ends those that have started.
        let mut team = Self { shared, sleepers: Vec::new(), handles: Vec::new(), in_use: Mutex::new(()) };
        for helper in 0..helpers {
            let shared = Arc::clone(&team.shared);
            let named = std::thread::Builder::new().name(format!("kolo-{}", helper + 1));
            let handle = named.spawn(move || work(&shared, helper))?;
            team.sleepers.push(handle.thread().clone());
            team.handles.push(handle);
        }
        // A thread allocates as it starts: wait for all, so that no later loop does.
        while team.shared.up.load(Ordering::Acquire) != helpers {
            std::thread::yield_now();
        }
        Ok(team)
    }

    /// A team of the calling thread alone.
    pub fn solo() -> Self {
        Self::new(1)
    }

    pub fn threads(&self) -> usize {
        self.sleepers.len() + 1
    }

    /// Runs `task(i, thread)` for every `i` in `0..tasks`; returns when all are done.
    pub fn run(&self, tasks: usize, task: impl Fn(usize, usize) + Sync) {
        let alone = || (0..tasks).for_each(|at| task(at, 0));
        if self.sleepers.is_empty() || tasks <= 1 {
            return alone();
        }
        let _guard = match self.in_use.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return alone(),
        };
        let erased: *const Task<'_> = &task;
        // SAFETY: only the lifetime changes; the helpers drop the pointer before `busy` falls to zero, which is awaited.
        let task = unsafe { std::mem::transmute::<*const Task<'_>, *const Task<'static>>(erased) };
        let mut job = Job { task, tasks };
        let shared = &*self.shared;
        shared.next.store(0, Ordering::Relaxed);
        shared.busy.store(self.sleepers.len(), Ordering::Relaxed);
        shared.job.store(&mut job, Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        for (sleeper, asleep) in self.sleepers.iter().zip(&shared.asleep) {
            if asleep.load(Ordering::SeqCst) {
                sleeper.unpark();
            }
        }
        // The helpers hold a pointer into this frame: it must outlive them even if a task panics here.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drain(shared, &job, 0)));
        let mut spins = 0u32;
        while shared.busy.load(Ordering::Acquire) != 0 {
            spins += 1;
            if spins < SPINS_BEFORE_SLEEP { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a kernel panicked on a helper thread");
    }

    /// Cuts `0..count` into ranges of `chunk` and runs them; short work stays on the calling thread.
    pub fn chunks(&self, count: usize, chunk: usize, task: impl Fn(Range<usize>, usize) + Sync) {
        let chunk = chunk.max(1);
        let tasks = count.div_ceil(chunk);
        self.run(tasks, |at, thread| task(at * chunk..((at + 1) * chunk).min(count), thread));
    }
}

fn drain(shared: &Shared, job: &Job, thread: usize) {
    // SAFETY: `run` keeps the closure alive until every helper has left.
    let task = unsafe { &*job.task };
    loop {
        let at = shared.next.fetch_add(1, Ordering::Relaxed);
        if at >= job.tasks {
            return;
        }
        task(at, thread);
    }
}

fn work(shared: &Shared, helper: usize) {
    // The first wait sets up what every later one uses.
    std::thread::park_timeout(std::time::Duration::ZERO);
    shared.up.fetch_add(1, Ordering::AcqRel);
    let mut seen = 0;
    loop {
        let mut spins = 0;
        while shared.epoch.load(Ordering::Acquire) == seen {
            spins += 1;
            if spins < SPINS_BEFORE_SLEEP {
                std::hint::spin_loop();
                continue;
            }
            shared.asleep[helper].store(true, Ordering::SeqCst);
            while shared.epoch.load(Ordering::SeqCst) == seen {
                std::thread::park();
            }
            shared.asleep[helper].store(false, Ordering::SeqCst);
        }
        seen = seen.wrapping_add(1);
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        let job = shared.job.load(Ordering::Acquire);
        // SAFETY: the pointer was stored before the epoch moved and lives until `busy` falls to zero.
        let outcome =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drain(shared, unsafe { &*job }, helper + 1)));
        if outcome.is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.busy.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        self.sleepers.iter().for_each(Thread::unpark);
        for handle in self.handles.drain(..) {
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3] {
            let team = Team::new(threads);
            for tasks in [0, 1, 2, 100] {
                let hits: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                team.run(tasks, |at, thread| {
                    assert!(thread < threads);
                    hits[at].fetch_add(1, Ordering::Relaxed);
                });
                assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_survives() {
        let team = Team::new(2);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            team.run(8, |at, _| assert!(at != 5, "task five"));
        }));
        assert!(outcome.is_err());
        let sum = AtomicUsize::new(0);
        team.run(10, |at, _| {
            sum.fetch_add(at, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }
}
