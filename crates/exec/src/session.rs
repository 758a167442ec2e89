//! A compiled graph that runs steps: it drives a device through the schedule.
//!
//! A session compiles a graph once: it lays out memory, resolves every operand to an address and sizes the scratch. A
//! step then only calls kernels; it allocates nothing.
//!
//! Grains run on lanes, several at a time if the device can. Either way grain gradients are added as one balanced tree over
//! the grain index, so the bits are the same.

mod probe;
mod step;
mod trial_run;

use crate::exchange::{Collectives, ExchangeError};
use crate::exchanges::Exchanges;
use crate::executor::{Device, Executor, SessionBytes};
use crate::feed::Feed;
use crate::memory::Memory;
use crate::options::Options;
use crate::program::{Order, Program, Turn};
use crate::schedule::{Act, Item, Schedule};
use crate::store::Store;
use kolo_graph::cpu::Buffer;
use kolo_graph::{DType, Graph, NodeId, Phase, ValueId};
use probe::Probe;
pub use probe::{Alive, Stop, Tracer};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
pub use step::StepError;
pub use trial_run::TrialTimes;

/// A graph compiled for a device.
#[derive(Debug)]
pub struct Session {
    program: Program,
    schedule: Arc<Schedule>,
    /// Before the device: they wait for what is in flight in its memory.
    exchanges: Option<Exchanges>,
    device: Box<dyn Device>,
    /// Items after the grains that run before the update, so that the named results are there: those of a rank that gets them from
    /// others.
    early: usize,
    /// Where grains run in segments: for each turn, the items after which an exchange of sums is complete.
    closes_of_turns: Vec<Vec<(usize, usize)>>,
    /// Named results, as the first lane has them.
    outputs: Vec<(String, Buffer)>,
    probe: Probe,
    store: [Arc<Memory>; 2],
    /// What the inputs of each lane's grain hold, as whoever wrote them called it.
    fed: Vec<AtomicU64>,
}

impl Session {
    /// Compiles `graph` for the CPU on the tensors of `store`. Collectives in it are those of one worker.
    ///
    /// # Panics
    ///
    /// If the system refuses a thread or memory; see [`Session::try_new`].
    pub fn new(graph: Graph, store: &Store, options: Options) -> Self {
        Self::try_new(graph, store, options).expect("the system gives what was asked for")
    }

    /// As [`Session::new`]; an [`std::io::Error`] if the system refuses a thread or memory.
    pub fn try_new(graph: Graph, store: &Store, options: Options) -> Result<Self, ExchangeError> {
        Self::compile(Program::cpu(graph, options), store, None)
    }

    /// Compiles `graph` for the CPU with somebody to run its collectives. All ranks call it together.
    pub fn with_collectives(
        graph: Graph,
        store: &Store,
        options: Options,
        collectives: Arc<dyn Collectives>,
    ) -> Result<Self, ExchangeError> {
        Self::compile(Program::cpu(graph, options), store, Some(collectives))
    }

    /// Compiles a program, with somebody to run its collectives if there are other ranks, who then all call it together.
    pub fn compile(
        program: Program,
        store: &Store,
        collectives: Option<Arc<dyn Collectives>>,
    ) -> Result<Self, ExchangeError> {
        let Program { executor, graph, layout, options, .. } = &program;
        let Options { lanes, grains, .. } = *options;
        assert!(lanes.is_power_of_two() && grains % lanes == 0, "{lanes} lanes for {grains} grains");
        if let Err(problem) = kolo_graph::verify::verify(graph) {
            panic!("the graph is not sound: {problem}");
        }
        let phases = graph.phases();
        let of_grain = |value: &ValueId| phases[graph.value(*value).node.0 as usize] == Phase::Grain;
        let from_grain = graph.updates.iter().any(|(_, value)| of_grain(value));
        assert!(grains == 1 || !from_grain, "grains without a sum cannot share one update");
        if collectives.is_some() && !executor.has_collectives() {
            return Err(
                format!("the {} executor runs one worker only\n  hint: use `--device cpu`", executor.name()).into()
            );
        }
        let mut schedule = Schedule::new(graph, layout, collectives.is_none());
        if let Some(collectives) = &collectives {
            let mine = executor.can_exchange_on_device(&program, &schedule);
            schedule.on_device = collectives.on_device(mine)?;
        }
        let schedule = Arc::new(schedule);
        let shared_sums = match &collectives {
            // Also without sums of its own: other ranks may have some.
            Some(collectives) if !schedule.on_device => Some(collectives.memory(layout.sum_bytes)?),
            _ => None,
        };
        let device = executor.compile(&program, &schedule, store, shared_sums)?;
        // Also with nothing to exchange: all ranks make their communicators together.
        let exchanges = match collectives {
            Some(them) => Some(Exchanges::new(graph, layout, &schedule, &*device, *options, them)?),
            None => None,
        };
        let exchanges = exchanges.filter(|_| !schedule.exchanges.is_empty());
        let outputs = graph.outputs.iter().map(|(name, id)| (name.clone(), device.buffer(*id, 0))).collect();
        let (probe, store) = (Probe::new(graph), store.memories().map(Arc::clone));
        let early = if program.order.is_some() { schedule.items_before_outputs(graph) } else { 0 };
        let closes_of_turns = program.order.as_ref().map(|order| schedule.closes_of_turns(order)).unwrap_or_default();
        let fed = (0..program.options.places()).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { program, schedule, device, exchanges, early, closes_of_turns, outputs, probe, store, fed })
    }

    /// Has the inputs of a grain written, and sent to the device unless they are as they were.
    fn feed_lane(&self, lane: usize, write: impl FnOnce(&mut Feed<'_>)) {
        let mut feed = Feed::new(self.device.inputs(Some(lane)), self.fed[lane].load(Ordering::Relaxed));
        write(&mut feed);
        if feed.is_written() {
            self.fed[lane].store(feed.content(), Ordering::Relaxed);
            self.device.begin_grain(lane);
        }
    }

    pub fn graph(&self) -> &Graph {
        &self.program.graph
    }

    pub fn program(&self) -> &Program {
        &self.program
    }

    pub fn executor(&self) -> &Arc<dyn Executor> {
        &self.program.executor
    }

    pub fn options(&self) -> Options {
        self.program.options
    }

    /// Bytes planned for it.
    pub fn planned_bytes(&self) -> SessionBytes {
        self.program.bytes()
    }

    /// Bytes of it that are in the host's memory now, if that is where the device computes.
    pub fn resident_bytes(&self) -> Option<SessionBytes> {
        self.device.resident_bytes()
    }

    /// The device, to look at what it compiled.
    pub fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// One whole step. `step` writes the per-step inputs, `grain` those of one grain.
    pub fn run(
        &mut self,
        store: &mut Store,
        step: impl Fn(&mut Feed<'_>),
        grain: impl Fn(usize, &mut Feed<'_>) + Sync,
    ) -> Result<(), ExchangeError> {
        self.run_grains(store, step, grain)?;
        self.finish(store)
    }

    /// The part before the update: parameters and state are not touched yet.
    pub fn run_grains(
        &mut self,
        store: &mut Store,
        step: impl Fn(&mut Feed<'_>),
        grain: impl Fn(usize, &mut Feed<'_>) + Sync,
    ) -> Result<(), ExchangeError> {
        let same = store.memories().iter().zip(&self.store).all(|(one, other)| Arc::ptr_eq(one, other));
        assert!(same, "the session was compiled for another store");
        match (self.device.mirrors_store(), self.graph().updates.is_empty()) {
            (true, _) => (),
            (false, true) => store.mirrored().read_host(),
            (false, false) => store.mirrored().write_host(),
        }
        step(&mut Feed::new(self.device.inputs(None), 0));
        self.device.begin();
        self.run_once(Phase::Before, 0..usize::MAX)?;
        if let Some(order) = self.program.order.clone() {
            self.run_segments(&order, grain)?;
            self.run_once(Phase::After, 0..self.early)?;
            return self.end_grains();
        }
        let per_lane = self.options().grains_per_lane();
        let failed: Mutex<Option<ExchangeError>> = Mutex::new(None);
        self.device.run_lanes(&|lane| {
            for local in 0..per_lane {
                self.feed_lane(lane, |feed| grain(lane * per_lane + local, feed));
                if let Err(error) = self.run_grain(lane, local) {
                    kolo_base::lock(&failed).get_or_insert(error);
                    return;
                }
            }
        });
        if let Some(error) = kolo_base::lock(&failed).take() {
            return Err(error);
        }
        self.device.join_all();
        self.end_grains()
    }

    /// After the last grain: the named results can be read.
    fn end_grains(&self) -> Result<(), ExchangeError> {
        self.wait_for_outputs()?;
        self.device.show_outputs();
        self.device.check()
    }

    fn wait_for_outputs(&self) -> Result<(), ExchangeError> {
        match &self.exchanges {
            Some(exchanges) => self.schedule.outputs.iter().try_for_each(|at| exchanges.wait(*at, 0, &*self.device)),
            None => Ok(()),
        }
    }

    /// All grains, segment by segment.
    fn run_segments(&self, order: &Order, feed: impl Fn(usize, &mut Feed<'_>) + Sync) -> Result<(), ExchangeError> {
        let mut begun = vec![false; self.options().grains];
        for (Turn { segment, grain, slot, term }, closes) in order.turns.iter().copied().zip(&self.closes_of_turns) {
            if !std::mem::replace(&mut begun[grain], true) {
                // What the slot's last grain sent still uses its memory.
                if let Some(exchanges) = &self.exchanges {
                    exchanges.wait_phase(&self.schedule, Phase::Grain, slot, &*self.device)?;
                }
                self.feed_lane(slot, |inputs| feed(grain, inputs));
            }
            let items = self.schedule.grain.iter().enumerate();
            for (at, item) in items.filter(|(_, item)| item.segment == segment) {
                self.run_item(Phase::Grain, at, item, slot, term)?;
                let Some(exchanges) = &self.exchanges else { continue };
                let closed = closes.iter().filter(|(item, _)| *item == at);
                closed.for_each(|(_, exchange)| exchanges.close(*exchange, 0, &*self.device));
            }
        }
        match &self.exchanges {
            Some(exchanges) => (0..order.slots)
                .try_for_each(|slot| exchanges.wait_phase(&self.schedule, Phase::Grain, slot, &*self.device)),
            None => Ok(()),
        }
    }

    /// One grain of a lane. In the lane's last, sums are closed for their exchanges.
    fn run_grain(&self, lane: usize, local: usize) -> Result<(), ExchangeError> {
        if self.exchanges.is_none() && self.probe.run_unseen(|| self.device.run_phase(Phase::Grain, lane, local)) {
            return Ok(());
        }
        let last = local + 1 == self.options().grains_per_lane();
        for (at, item) in self.schedule.grain.iter().enumerate() {
            if self.probe.stops() {
                return Ok(());
            }
            self.run_item(Phase::Grain, at, item, lane, local)?;
            if let Some(exchanges) = self.exchanges.as_ref().filter(|_| last) {
                item.closes.iter().for_each(|exchange| exchanges.close(*exchange, lane, &*self.device));
            }
        }
        match &self.exchanges {
            Some(exchanges) => exchanges.wait_phase(&self.schedule, Phase::Grain, lane, &*self.device),
            None => Ok(()),
        }
    }

    /// A phase that happens once per step.
    fn run_once(&self, phase: Phase, items: Range<usize>) -> Result<(), ExchangeError> {
        let whole = items == (0..usize::MAX) && self.exchanges.is_none();
        if whole && self.probe.run_unseen(|| self.device.run_phase(phase, 0, 0)) {
            return Ok(());
        }
        for (at, item) in self.schedule.items(phase).iter().enumerate().take(items.end).skip(items.start) {
            if self.probe.stops() {
                return Ok(());
            }
            self.run_item(phase, at, item, self.options().lanes, 0)?;
        }
        Ok(())
    }

    /// One item, after what it needs. What happens once per step is shown on the lane after the last.
    fn run_item(&self, phase: Phase, at: usize, item: &Item, lane: usize, local: usize) -> Result<(), ExchangeError> {
        let Some(exchanges) = &self.exchanges else {
            self.timed(phase, at, item, lane, local);
            return Ok(());
        };
        item.needs.iter().try_for_each(|exchange| exchanges.wait(*exchange, lane, &*self.device))?;
        match item.act {
            Act::Start(exchange) => exchanges.start(exchange, lane, &*self.device),
            Act::Kernel | Act::Sum { .. } => self.timed(phase, at, item, lane, local),
        }
        Ok(())
    }

    fn timed(&self, phase: Phase, at: usize, item: &Item, lane: usize, local: usize) {
        let start = self.probe.start();
        self.device.run(phase, at, lane, local);
        if start.is_some() {
            self.device.wait_item();
        }
        self.probe.end(lane, item.node, start);
    }

    /// Waits for every exchange under way. What it would break leaves parameters and state as they were; without exchanges
    /// of its own, the update that follows cannot fail.
    pub fn settle(&mut self) -> Result<(), ExchangeError> {
        self.exchanges.as_ref().map_or(Ok(()), |exchanges| exchanges.wait_all(&*self.device))
    }

    /// Whether the update itself exchanges something.
    pub fn exchanges_in_update(&self) -> bool {
        self.exchanges.is_some() && self.schedule.after.iter().any(|item| matches!(item.act, Act::Start(_)))
    }

    /// The part after the grains: the update.
    pub fn finish(&mut self, _store: &mut Store) -> Result<(), ExchangeError> {
        self.run_once(Phase::After, self.early..usize::MAX)?;
        if let Some(exchanges) = &self.exchanges {
            exchanges.wait_phase(&self.schedule, Phase::Before, 0, &*self.device)?;
            exchanges.wait_phase(&self.schedule, Phase::After, 0, &*self.device)?;
            // What the device was left to wait for may have failed, and its results with it.
            exchanges.settle()?;
        }
        self.device.end();
        self.device.show_outputs();
        self.device.check()
    }

    /// All sums over grains with the padding between them, in the order of memory.
    pub fn sums_mut(&mut self) -> &mut [f32] {
        self.device.sums_mut()
    }

    /// Nanoseconds that steps have waited for collectives since this was last asked, by axis.
    pub fn take_waited(&self) -> BTreeMap<String, u64> {
        self.exchanges.as_ref().map(Exchanges::take_waited).unwrap_or_default()
    }

    /// How devices exchange directly, if they do.
    pub fn device_transport(&self) -> Option<&'static str> {
        self.exchanges.as_ref().and_then(Exchanges::device_transport)
    }

    /// Bytes that this rank has sent in exchanges so far, by axis.
    pub fn sent_bytes(&self) -> BTreeMap<String, u64> {
        self.exchanges.as_ref().map(Exchanges::sent_bytes).unwrap_or_default()
    }

    fn found(&self, name: &str) -> Option<&Buffer> {
        self.device.wait_outputs();
        self.outputs.iter().find(|(key, _)| key == name).map(|(_, buffer)| buffer)
    }

    /// A named output, as f32: the sum over grains or step value; for a value of one grain, that of lane 0's last grain.
    pub fn output(&self, name: &str) -> Option<&[f32]> {
        let buffer = self.found(name)?;
        assert_eq!(buffer.ty.dtype, DType::F32, "output `{name}` is {}", buffer.ty);
        // SAFETY: the place holds that many values and nothing runs while `self` is borrowed.
        Some(unsafe { std::slice::from_raw_parts(buffer.data.cast(), buffer.ty.elements()) })
    }

    /// A named output as raw bytes.
    pub fn output_bytes(&self, name: &str) -> Option<&[u8]> {
        let buffer = self.found(name)?;
        // SAFETY: as above.
        Some(unsafe { std::slice::from_raw_parts(buffer.data, buffer.ty.bytes()) })
    }

    /// Starts or stops timing every call.
    pub fn set_profile(&mut self, profile: bool) {
        self.probe.set_profile(profile);
    }

    /// Tells `alive` after every call from now on.
    pub fn set_alive(&mut self, alive: Option<Alive>) {
        self.probe.alive = alive;
    }

    /// From now on, a run leaves out all calls from the moment that `stop` is true; what it left undone is for the caller to
    /// know. Not for a session with collectives, whose other ranks would wait.
    pub fn set_stop(&mut self, stop: Option<Stop>) {
        assert!(stop.is_none() || self.exchanges.is_none(), "other ranks would wait for a run that stops");
        self.probe.stop = stop;
    }

    /// Lets `tracer` see every call from now on.
    pub fn set_tracer(&mut self, tracer: Option<Tracer>) {
        self.probe.tracer = tracer;
    }

    /// Nanoseconds spent in each node since profiling started; lanes add up.
    pub fn times(&self) -> Vec<(NodeId, u64)> {
        self.probe.times()
    }

    /// Whether grains exchange tensors.
    pub fn exchanges_in_grains(&self) -> bool {
        self.exchanges.is_some() && self.schedule.exchanges.iter().any(|exchange| exchange.phase == Phase::Grain)
    }

    /// Runs one grain call by call and names the first node with a result that is not finite. Where grains exchange tensors, all
    /// ranks call it together for every grain.
    pub fn find_nonfinite(&mut self, grain: usize, feed: impl Fn(usize, &mut Feed<'_>)) -> Option<NodeId> {
        self.feed_lane(0, |inputs| feed(grain, inputs));
        let (mut found, together) = (None, self.exchanges_in_grains());
        for (at, item) in self.schedule.grain.iter().enumerate() {
            let is_kernel = item.act == Act::Kernel;
            if is_kernel || together && matches!(item.act, Act::Start(_)) {
                // Whoever waits in vain says so when it exchanges the next time.
                self.run_item(Phase::Grain, at, item, 0, 0).ok()?;
            }
            if is_kernel && found.is_none() && !self.device.is_finite(Phase::Grain, at) {
                found = Some(item.node);
                if !together {
                    return found;
                }
            }
        }
        if let Some(exchanges) = self.exchanges.as_ref().filter(|_| together) {
            exchanges.wait_phase(&self.schedule, Phase::Grain, 0, &*self.device).ok()?;
        }
        if found.is_some() {
            return found;
        }
        // What an update would take is not made before; the device looks at it as it makes it.
        let taken = self.schedule.after.iter().enumerate().filter_map(|(at, item)| Some((at, item.maker?)));
        taken.into_iter().find_map(|(at, maker)| (!self.device.is_finite(Phase::After, at)).then_some(maker))
    }
}
