//! A communication lane that sends gradients as bf16, for jobs that do not ask for the promised bits.
//!
//! Half the bytes travel; what rounding takes away is kept and added in the next step (error feedback). Whatever is no
//! gradient travels as it is. Exchanges run in order on a thread with a communicator of its own.

use crate::data::{self, param_of};
use crate::lane::{request, shared_memory};
use crate::strategy::{Facts, Key, KeyValue, Part, Refusal, Strategy, StrategyKind};
use kolo_comm::compress::{self, Feedback};
use kolo_comm::{Communicator, Fault, Reduction};
use kolo_exec::{Collectives, Exchange, ExchangeError, ExchangeKind, Memory};
use kolo_graph::Graph;
use kolo_graph::collective::AllReduce;
use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

const WIRE: Key = Key {
    name: "wire",
    value: KeyValue::Choice(&["f32", "bf16"]),
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
            return Err(Refusal::of_key(&WIRE, "is \"bf16\" beside a sharded optimizer", "keep one of the two"));
        }
        Ok(())
    }
    fn lane(&self, graph: &Graph, world: &Arc<Communicator>) -> Option<Result<Arc<dyn Collectives>, Fault>> {
        let lane = NarrowLane::new(Arc::clone(world), gradient_exchanges(graph));
        Some(lane.map(|lane| Arc::new(lane) as Arc<dyn Collectives>))
    }
}

/// The exchanges in which nothing but gradients is summed.
fn gradient_exchanges(graph: &Graph) -> BTreeSet<String> {
    let sums = graph.nodes.iter().filter(|node| node.op.is::<AllReduce>());
    let gradients = sums.filter(|node| node.inputs.iter().all(|id| !param_of(graph, *id).is_empty()));
    gradients.map(|node| node.scope.to_string()).collect()
}

#[derive(Debug)]
pub struct NarrowLane {
    world: Arc<Communicator>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// The exchanges that travel as bf16, by name.
    narrow: BTreeSet<String>,
}

#[derive(Debug, Default)]
struct State {
    exchanges: Vec<Exchange>,
    queue: VecDeque<usize>,
    /// For each exchange, how many were started up to and with it.
    started_at: Vec<u64>,
    started: u64,
    finished: u64,
    fault: Option<Fault>,
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
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
            let outcome = self.run(own, &exchange, &mut feedback[number]);
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

    fn run(&self, own: &Communicator, exchange: &Exchange, feedback: &mut Feedback) -> Result<(), Fault> {
        if exchange.kind == ExchangeKind::AllReduce && self.narrow.contains(&exchange.name) {
            // SAFETY: the session lends the memory until `wait` on this exchange returns.
            let data = unsafe { std::slice::from_raw_parts_mut(exchange.data, exchange.elements) };
            return compress::all_reduce(own, data, Reduction::Sum, feedback);
        }
        // SAFETY: as above.
        unsafe { own.call(&request(exchange, own.rank())) }
    }
}

impl NarrowLane {
    /// A lane on which the sums of these exchanges travel as bf16. All ranks call it together.
    pub fn new(world: Arc<Communicator>, narrow: BTreeSet<String>) -> Result<Self, Fault> {
        let own = world.split(0, world.rank() as i64)?;
        let shared = Arc::new(Shared { narrow, ..Shared::default() });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("comm".into()).spawn(move || theirs.serve(&own));
        let thread = thread.map_err(|error| Fault::thread("starting the thread for collectives", &error))?;
        Ok(Self { world, shared, thread: Some(thread) })
    }
}

impl Collectives for NarrowLane {
    fn size(&self) -> usize {
        self.world.size()
    }

    fn memory(&self, bytes: usize) -> Result<Memory, ExchangeError> {
        shared_memory(&self.world, bytes)
    }

    fn prepare(&self, exchanges: Vec<Exchange>) -> usize {
        let mut state = self.shared.lock();
        let first = state.exchanges.len();
        state.exchanges.extend(exchanges);
        let count = state.exchanges.len();
        state.started_at.resize(count, 0);
        first
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
