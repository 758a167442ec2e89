//! The thread on which a communicator runs started calls, in order.
//!
//! It runs them while whoever started them computes. Whoever has nothing to do but wait for a call runs it, and those before it, on its
//! own thread, unless the engine's has begun: to wake a thread takes longer than many a call, and in a virtual machine whose
//! processors sleep a multiple of that.

use crate::call::Fingerprint;
use crate::communicator::{CommunicatorState, Request};
use crate::fault::Fault;
use kolo_base::{lock, wait};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

pub(crate) struct Engine {
    state: Arc<EngineState>,
    thread: Option<JoinHandle<()>>,
}

struct EngineState {
    shared: Arc<CommunicatorState>,
    queue: Mutex<Queue>,
    /// Work came, or the end.
    work: Condvar,
    /// Something finished.
    finished: Condvar,
    /// Tickets up to here are done; written under the lock, read without.
    done: AtomicU64,
}

struct Queue {
    waiting: VecDeque<(Request, Fingerprint)>,
    pushed: u64,
    /// The thread has started.
    has_begun: bool,
    /// A call that was taken from the queue is not done yet.
    is_running: bool,
    fault: Option<Fault>,
    closed: bool,
}

/// Turns to spin for a call that another thread runs before sleeping.
const SPINS: u32 = 2000;

impl Engine {
    pub fn new(shared: Arc<CommunicatorState>) -> Self {
        let waiting = VecDeque::with_capacity(64);
        let queue = Queue { waiting, pushed: 0, has_begun: false, is_running: false, fault: None, closed: false };
        let state = Arc::new(EngineState {
            shared,
            queue: Mutex::new(queue),
            work: Condvar::new(),
            finished: Condvar::new(),
            done: AtomicU64::new(0),
        });
        let theirs = Arc::clone(&state);
        let thread = std::thread::Builder::new().name("comm".into()).spawn(move || theirs.serve());
        if thread.is_ok() {
            // A thread that starts allocates, and steps do not.
            let mut queue = lock(&state.queue);
            while !queue.has_begun {
                queue = wait(&state.finished, queue);
            }
        }
        Self { state, thread: thread.ok() }
    }

    /// Queues a request; its ticket.
    pub fn push(&self, request: Request, fingerprint: Fingerprint) -> u64 {
        let mut queue = lock(&self.state.queue);
        if self.thread.is_none() {
            let why = "the thread for collectives could not be started\n  hint: raise the limit on processes and threads (`ulimit -u`), or use fewer workers or --threads";
            queue.fault.get_or_insert(Fault::BadCall(why.into()));
        }
        queue.waiting.push_back((request, fingerprint));
        queue.pushed += 1;
        let ticket = queue.pushed;
        drop(queue);
        self.state.work.notify_one();
        ticket
    }

    pub fn done(&self, ticket: u64) -> bool {
        self.state.done.load(Ordering::Acquire) >= ticket
    }

    pub fn wait(&self, ticket: u64) -> Result<(), Fault> {
        if self.done(ticket) {
            return Ok(());
        }
        let mut queue = lock(&self.state.queue);
        while !self.done(ticket) && queue.fault.is_none() {
            if !queue.is_running {
                queue = self.state.run_next(queue);
                continue;
            }
            drop(queue);
            for _ in 0..SPINS {
                if self.done(ticket) {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            queue = lock(&self.state.queue);
            if queue.is_running && !self.done(ticket) && queue.fault.is_none() {
                queue = wait(&self.state.finished, queue);
            }
        }
        match &queue.fault {
            Some(fault) if !self.done(ticket) => Err(fault.clone()),
            _ => Ok(()),
        }
    }

    pub fn drain(&self) -> Result<(), Fault> {
        let pushed = lock(&self.state.queue).pushed;
        self.wait(pushed)
    }
}

impl EngineState {
    fn serve(&self) {
        let mut queue = lock(&self.queue);
        queue.has_begun = true;
        self.finished.notify_all();
        while !queue.closed {
            queue = match queue.waiting.is_empty() || queue.is_running {
                true => wait(&self.work, queue),
                false => self.run_next(queue),
            };
        }
    }

    /// Runs the call that is next, if there is one, on this thread. Nobody else runs one.
    fn run_next<'q>(&'q self, mut queue: MutexGuard<'q, Queue>) -> MutexGuard<'q, Queue> {
        let Some((request, fingerprint)) = queue.waiting.pop_front() else { return queue };
        queue.is_running = true;
        drop(queue);
        // SAFETY: whoever started the request promised its buffers until the ticket is done.
        let run = AssertUnwindSafe(|| unsafe { self.shared.run(&request, fingerprint) });
        // Nobody may wait for a thread that is gone.
        let panicked = |_| {
            Err(Fault::BadCall(format!(
                "the thread for collectives panicked in {fingerprint}\n  hint: this is a bug; please report it with the log"
            )))
        };
        let outcome = catch_unwind(run).unwrap_or_else(panicked);
        let mut queue = lock(&self.queue);
        queue.is_running = false;
        match outcome {
            Ok(()) => {
                self.done.fetch_add(1, Ordering::Release);
            }
            Err(fault) => {
                // What comes after a failed call has no meaning: nobody will wait for it in vain.
                queue.fault.get_or_insert(fault);
                queue.waiting.clear();
                queue.closed = true;
            }
        }
        self.finished.notify_all();
        if queue.closed || !queue.waiting.is_empty() {
            self.work.notify_one();
        }
        queue
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        lock(&self.state.queue).closed = true;
        self.state.work.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::CallKind;
    use crate::communicator::Communicator;
    use crate::element::ElementType;
    use crate::run::Programs;
    use crate::watch::Watch;
    use crate::wire::{SplitWire, Wire};

    /// A wire with a bug.
    struct Broken;

    impl Wire for Broken {
        fn rank(&self) -> usize {
            0
        }
        fn size(&self) -> usize {
            2
        }
        unsafe fn send(&mut self, _: usize, _: &Fingerprint, _: *const u8, _: usize) -> Result<u64, Fault> {
            panic!("a bug")
        }
        unsafe fn recv(&mut self, _: usize, _: &Fingerprint, _: *mut u8, _: usize) -> Result<u64, Fault> {
            panic!("a bug")
        }
        fn progress(&mut self) -> Result<bool, Fault> {
            panic!("a bug")
        }
        fn sent(&mut self, _: u64) -> bool {
            false
        }
        fn received(&mut self, _: u64) -> bool {
            false
        }
        fn cancel(&mut self, _: &Fault) {}
    }

    impl SplitWire for Broken {
        fn name(&self) -> &'static str {
            "broken"
        }
        fn hosts(&self) -> &[usize] {
            &[0, 0]
        }
        fn job_rank(&self, rank: usize) -> usize {
            rank
        }
        fn split(&mut self, _: &[usize], _: u32) -> Result<Self, Fault> {
            Ok(Self)
        }
    }

    #[test]
    fn nobody_waits_for_an_engine_that_panicked() {
        let watch = Watch::alone();
        let communicator = Communicator::new(Box::new(Programs::new(Broken, Arc::clone(&watch))), watch, true);
        let mut data = [1.0f32; 8];
        for _ in 0..2 {
            let (at, bytes) = (data.as_mut_ptr().cast::<u8>(), size_of_val(&data));
            let request = Request {
                count: data.len(),
                input: at,
                input_bytes: bytes,
                output: at,
                output_bytes: bytes,
                ..Request::new(CallKind::AllReduce, ElementType::F32)
            };
            // SAFETY: the data outlives the call, which is waited for.
            let outcome = unsafe { communicator.start(request) }.and_then(|ticket| communicator.wait(ticket));
            let message = outcome.unwrap_err().to_string();
            let wanted = "the thread for collectives panicked in all_reduce(sum) of 8 f32";
            assert!(message.contains(wanted), "{message}");
        }
    }
}
