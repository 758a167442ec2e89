//! A communication lane that sends gradients as bf16, for jobs that do not ask for the promised bits.
//!
//! Half the bytes travel; what rounding takes away is kept and added in the next step (error feedback). Whatever is no
//! gradient travels as it is. Exchanges run in order on a thread with a communicator of its own.

use crate::data;
use crate::lane::{request, shared_memory};
use crate::mesh::{DATA, Mesh};
use crate::strategy::{Facts, Key, KeyValue, Part, Refusal, Strategy, StrategyKind};
use kolo_comm::compress::{self, Feedback};
use kolo_comm::{Communicator, Fault, Reduction};
use kolo_exec::{Collectives, Exchange, ExchangeError, ExchangeKind, Memory};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

const WIRE: Key = Key {
    name: "wire",
    value: KeyValue::Choice(&["f32", "bf16"]),
    of_job: true,
    doc: "bf16: gradients travel in half the bytes, and what rounding takes is added in the next step; needs \
          `job.reproducible = false`",
};

pub const KIND: StrategyKind = StrategyKind {
    name: "narrow",
    doc: "gradients travel as bf16, and what rounding takes away is added in the next step",
    keys: &[WIRE],
    read: |settings| Ok((WIRE.choice(settings)? == "bf16").then(|| Arc::new(Narrow) as Arc<dyn Strategy>)),
};

/// Gradients travel as bf16.
#[derive(Clone, Copy, Debug)]
pub struct Narrow;

impl Strategy for Narrow {
    fn name(&self) -> &'static str {
        KIND.name
    }
    fn part(&self) -> Part {
        Part::Transfer
    }
    fn written(&self) -> String {
        "parallel.wire = \"bf16\"".into()
    }
    fn check(&self, job: Facts, others: &[&dyn Strategy]) -> Result<(), Refusal> {
        if job.reproducible {
            let hint = "write `reproducible = false` under [job], or `wire = \"f32\"`";
            return Err(Refusal::of_key(&WIRE, "is \"bf16\", which changes the bits of the sums", hint));
        }
        // Only whole sums are known to travel; the shares of a sharded optimizer do not.
        if others.iter().any(|other| other.part() == Part::Update && other.name() != data::KIND.name) {
            return Err(Refusal::of_key(
                &WIRE,
                "is \"bf16\", which cannot be combined with a sharded optimizer",
                "keep one of the two",
            ));
        }
        if let Some(other) = others.iter().find(|other| other.shares_model()) {
            let message = format!("is \"bf16\", which cannot be combined with `{}`", other.written());
            return Err(Refusal::of_key(&WIRE, message, "keep one of the two"));
        }
        Ok(())
    }
    fn lane(&self, _: &Mesh, world: &Arc<Communicator>) -> Option<Result<Arc<dyn Collectives>, Fault>> {
        Some(NarrowLane::new(Arc::clone(world)).map(|lane| Arc::new(lane) as Arc<dyn Collectives>))
    }
}

#[derive(Debug)]
pub struct NarrowLane {
    world: Arc<Communicator>,
    shared: Arc<NarrowShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct NarrowShared {
    state: Mutex<NarrowState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct NarrowState {
    exchanges: Vec<Exchange>,
    queue: VecDeque<usize>,
    /// For each exchange, how many were started up to and with it.
    started_at: Vec<u64>,
    started: u64,
    finished: u64,
    fault: Option<Fault>,
    closed: bool,
}

impl NarrowShared {
    fn lock(&self) -> MutexGuard<'_, NarrowState> {
        kolo_base::lock(&self.state)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, NarrowState>) -> MutexGuard<'a, NarrowState> {
        kolo_base::wait(&self.changed, state)
    }

    fn serve(&self, own: &Communicator) {
        let mut feedback: Vec<Feedback> = Vec::new();
        let mut state = self.lock();
        loop {
            let Some(number) = state.queue.pop_front() else {
                if state.closed {
                    return;
                }
                state = self.wait(state);
                continue;
            };
            let exchange = state.exchanges[number].clone();
            feedback.resize_with(state.exchanges.len(), Feedback::new);
            drop(state);
            let outcome = run(own, &exchange, &mut feedback[number]);
            state = self.lock();
            match outcome {
                Ok(()) => state.finished += 1,
                Err(fault) => {
                    state.fault.get_or_insert(fault);
                    state.queue.clear();
                    state.closed = true;
                }
            }
            self.changed.notify_all();
        }
    }
}

fn run(own: &Communicator, exchange: &Exchange, feedback: &mut Feedback) -> Result<(), Fault> {
    if exchange.kind == ExchangeKind::AllReduce && exchange.of_gradients {
        // SAFETY: the session lends the memory until `wait` on this exchange returns.
        let data = unsafe { std::slice::from_raw_parts_mut(exchange.output.cast::<f32>(), exchange.elements) };
        return compress::all_reduce(own, data, Reduction::Sum, feedback);
    }
    // SAFETY: as above.
    unsafe { own.call(&request(exchange, (own.rank(), own.size()))) }
}

impl NarrowLane {
    /// All ranks call it together.
    pub fn new(world: Arc<Communicator>) -> Result<Self, Fault> {
        let own = world.split(0, world.rank() as i64)?;
        let shared = Arc::new(NarrowShared::default());
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("comm".into()).spawn(move || theirs.serve(&own));
        let thread = thread.map_err(|error| Fault::thread("starting the thread for collectives", &error))?;
        Ok(Self { world, shared, thread: Some(thread) })
    }
}

impl Collectives for NarrowLane {
    fn size(&self, axis: &str) -> usize {
        if axis == DATA { self.world.size() } else { 1 }
    }

    fn memory(&self, bytes: usize) -> Result<Memory, ExchangeError> {
        shared_memory(&self.world, bytes)
    }

    fn prepare(&self, exchanges: Vec<Exchange>, _lanes: usize) -> Result<usize, ExchangeError> {
        if let Some(other) = exchanges.iter().find(|exchange| exchange.axis != DATA || exchange.lane.is_some()) {
            let message = format!("`{}` is exchanged inside a grain or along the axis `{}`", other.name, other.axis);
            return Err(Fault::BadCall(format!("{message}, which cannot be combined with compressed gradients")).into());
        }
        let mut state = self.shared.lock();
        let first = state.exchanges.len();
        state.exchanges.extend(exchanges);
        let count = state.exchanges.len();
        state.started_at.resize(count, 0);
        Ok(first)
    }

    fn start(&self, number: usize) {
        let mut state = self.shared.lock();
        state.started += 1;
        state.started_at[number] = state.started;
        state.queue.push_back(number);
        self.shared.changed.notify_all();
    }

    fn wait(&self, number: usize) -> Result<(), ExchangeError> {
        let mut state = self.shared.lock();
        while state.finished < state.started_at[number] {
            if let Some(fault) = &state.fault {
                return Err(fault.clone().into());
            }
            state = self.shared.wait(state);
        }
        Ok(())
    }
}

impl Drop for NarrowLane {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
