//! The CPU executor.
//!
//! A session compiles a graph once: it lays out memory, resolves every operand to an address and sizes the scratch. A
//! step then only calls kernels; it allocates nothing.
//!
//! Threads are used in two ways. With one lane, a grain runs on all threads, each kernel sharing its loop. With several
//! lanes, each lane runs its own grains on its share of the threads, so that nothing is shared until the grains are
//! summed. Either way grain gradients are added as one balanced tree over the grain index, so the bits are the same.

use crate::exchange::{Collectives, ExchangeError};
use crate::memory::Memory;
use crate::overlap::{self, Overlap};
use crate::store::Store;
use kolo_graph::collective::is_collective;
use kolo_graph::layout::{self, Arena, Layout, align};
use kolo_graph::op::{Buffer, CpuCx};
use kolo_graph::sources::{Full, GrainSum, Input, Param, State};
use kolo_graph::{DType, Graph, NodeId, Op, Taker, Team, Tile, Type, ValueId};
use kolo_ops::simd;
use kolo_ops::tiles::Address;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    pub threads: usize,
    /// Grains computed at the same time; a power of two that divides `grains`.
    pub lanes: usize,
    pub grains: usize,
}

impl Options {
    /// One grain on this many threads.
    pub fn single(threads: usize) -> Self {
        Self { threads, lanes: 1, grains: 1 }
    }

    /// As many lanes as there are threads, so that grains need not share loops.
    pub fn for_grains(grains: usize, threads: usize) -> Self {
        let lanes = grains.min(if threads.is_power_of_two() { threads } else { threads.next_power_of_two() / 2 });
        Self { threads, lanes: lanes.max(1), grains }
    }
}

/// One kernel call with its operands resolved.
#[derive(Debug)]
struct Call {
    node: NodeId,
    op: Arc<dyn Op>,
    inputs: Vec<Buffer>,
    outputs: Vec<Buffer>,
    /// An input that the kernel adds up itself, from each lane's sum over grains.
    terms: Vec<Buffer>,
    /// The call that makes an input, which this one takes as it is made.
    maker: Option<Box<Call>>,
    kind: CallKind,
    /// Exchanges that must be done before.
    needs: Vec<usize>,
    nanoseconds: u64,
}

#[derive(Debug)]
enum CallKind {
    Kernel,
    /// Operands in half precision pass through f32 copies.
    Converted {
        inputs: Vec<Buffer>,
        outputs: Vec<Buffer>,
    },
    /// Add to the sum over grains at this element offset.
    Accumulate {
        offset: usize,
        elements: usize,
    },
    /// Start this exchange.
    Exchange(usize),
}

/// What one lane owns.
#[derive(Debug)]
struct Lane {
    calls: Vec<Call>,
    inputs: Vec<(String, Buffer)>,
    team: Arc<Team>,
    scratch: Arc<Memory>,
    _activations: Memory,
    _batch: Memory,
    /// Partial sums of runs of grains; level 0 holds the longest and, at the end, the whole.
    levels: Vec<Memory>,
    /// (call, exchange): after this call of the last grain, the lane's part of the exchange's sums is closed.
    closes: Vec<(usize, usize)>,
}

/// A graph compiled for the CPU.
#[derive(Debug)]
pub struct Session {
    graph: Arc<Graph>,
    layout: Layout,
    options: Options,
    team: Arc<Team>,
    lanes: Vec<Lane>,
    before: Vec<Call>,
    after: Vec<Call>,
    copies: Vec<(Buffer, Buffer)>,
    step_inputs: Vec<(String, Buffer)>,
    outputs: Vec<(String, Vec<Buffer>)>,
    scratch: Arc<Memory>,
    _step: Memory,
    _step_batch: Memory,
    _store: [Arc<Memory>; 2],
    /// Each lane's sums.
    sums: Vec<Address>,
    /// Elements of the sums that are added over lanes before the update; what is not here, the update adds itself.
    joined: Vec<Range<usize>>,
    overlap: Option<Overlap>,
    probe: Probe,
}

/// Sees every call of a session: its lane, node, start and end. The step's own calls are on the lane after the last.
pub type Tracer = Arc<dyn Fn(usize, NodeId, Instant, Instant) + Send + Sync>;

/// Told after every call of a session that it gets on.
pub type Alive = Arc<dyn Fn() + Send + Sync>;

/// Who watches the calls.
#[derive(Clone, Default)]
struct Probe {
    profile: bool,
    tracer: Option<Tracer>,
    alive: Option<Alive>,
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Probe {{ profile: {}, tracer: {} }}", self.profile, self.tracer.is_some())
    }
}

impl Probe {
    fn start(&self) -> Option<Instant> {
        (self.profile || self.tracer.is_some()).then(Instant::now)
    }

    fn end(&self, lane: usize, call: &mut Call, start: Option<Instant>) {
        if let Some(alive) = &self.alive {
            alive();
        }
        let Some(start) = start else { return };
        let end = Instant::now();
        call.nanoseconds += end.duration_since(start).as_nanos() as u64;
        if let Some(tracer) = &self.tracer {
            tracer(lane, call.node, start, end);
        }
    }
}

/// Where a step's inputs are written.
#[derive(Debug)]
pub struct Feed<'a> {
    inputs: &'a [(String, Buffer)],
}

impl Feed<'_> {
    pub fn names(&self) -> impl Iterator<Item = (&str, &Type)> {
        self.inputs.iter().map(|(name, buffer)| (name.as_str(), &buffer.ty))
    }

    fn buffer(&self, name: &str, dtype: DType) -> Option<&Buffer> {
        let (_, buffer) = self.inputs.iter().find(|(key, _)| key == name)?;
        assert_eq!(buffer.ty.dtype, dtype, "input `{name}` is {}", buffer.ty);
        Some(buffer)
    }

    pub fn f32(&mut self, name: &str) -> Option<&mut [f32]> {
        let buffer = self.buffer(name, DType::F32)?;
        // SAFETY: the buffer is the input's own place, borrowed with `self`.
        Some(unsafe { std::slice::from_raw_parts_mut(buffer.data.cast(), buffer.ty.elements()) })
    }

    pub fn i32(&mut self, name: &str) -> Option<&mut [i32]> {
        let buffer = self.buffer(name, DType::I32)?;
        // SAFETY: as above.
        Some(unsafe { std::slice::from_raw_parts_mut(buffer.data.cast(), buffer.ty.elements()) })
    }

    pub fn bytes(&mut self, name: &str) -> Option<&mut [u8]> {
        let (_, buffer) = self.inputs.iter().find(|(key, _)| key == name)?;
        // SAFETY: as above.
        Some(unsafe { std::slice::from_raw_parts_mut(buffer.data, buffer.ty.bytes()) })
    }
}

struct Bases<'a> {
    store: &'a Store,
    grain_input: *mut u8,
    step_input: *mut u8,
    grain: *mut u8,
    step: *mut u8,
    sum: *mut u8,
}

impl Bases<'_> {
    fn buffer(&self, graph: &Graph, layout: &Layout, id: ValueId) -> Buffer {
        let ty = graph.ty(id).clone();
        let Some(place) = layout.places[id.0 as usize] else {
            assert!(layout.is_unstored(graph, id), "a live value has a place");
            return Buffer { data: std::ptr::null_mut(), ty };
        };
        // SAFETY: the layout sized every arena to hold its places.
        let data = unsafe {
            match place.arena {
                Arena::Store => self.stored(graph, ValueId(place.offset as u32)),
                Arena::GrainInput => self.grain_input.add(place.offset),
                Arena::StepInput => self.step_input.add(place.offset),
                Arena::Grain => self.grain.add(place.offset),
                Arena::Step => self.step.add(place.offset),
                Arena::Sum => self.sum.add(place.offset),
            }
        };
        Buffer { data, ty }
    }

    fn stored(&self, graph: &Graph, id: ValueId) -> *mut u8 {
        let op = &graph.maker(id).op;
        let name = op.downcast::<Param>().map(|op| &op.name).or(op.downcast::<State>().map(|op| &op.name));
        let name = name.expect("only parameters and states are stored");
        let entry = self.store.entry(name).unwrap_or_else(|| panic!("the store has no `{name}`"));
        assert_eq!(entry.ty, *graph.ty(id), "`{name}` has another type in the store");
        self.store.address(entry)
    }
}

/// Half-precision operands that the op does not handle itself.
fn needs_conversion(op: &dyn Op, types: &[Type]) -> bool {
    !op.is::<Full>() && op.name() != "cast" && types.iter().any(|ty| matches!(ty.dtype, DType::BF16 | DType::F16))
}

/// Bytes of f32 copies a converted call needs.
fn conversion_bytes(op: &dyn Op, types: &[Type]) -> usize {
    if !needs_conversion(op, types) {
        return 0;
    }
    types.iter().filter(|ty| ty.dtype.is_float()).map(|ty| align(ty.elements() * 4)).sum()
}

/// Scratch that any of these nodes wants, with its conversions.
fn scratch_bytes(graph: &Graph, nodes: &[NodeId], threads: usize) -> usize {
    let need = |id: &NodeId| {
        let node = graph.node(*id);
        let (inputs, outputs) = (graph.types(&node.inputs), graph.types(&node.outputs));
        let all: Vec<Type> = inputs.iter().chain(&outputs).cloned().collect();
        align(node.op.scratch_bytes(&inputs, &outputs, threads)) + conversion_bytes(&*node.op, &all)
    };
    nodes.iter().map(need).max().unwrap_or(0)
}

/// Levels of partial sums that a lane of this many grains needs.
pub fn sum_levels(grains: usize) -> usize {
    (grains.max(2)).ilog2() as usize
}

/// Bytes a session of this graph allocates, by kind: (activations and inputs, gradient sums, temporaries and scratch).
pub fn planned_bytes(graph: &Graph, layout: &Layout, options: Options) -> [usize; 3] {
    let per_lane = options.grains / options.lanes;
    let (lane_scratch, scratch) = scratches(graph, layout, options);
    let lanes_scratch = if options.lanes == 1 { 0 } else { lane_scratch * options.lanes };
    [
        (layout.grain_bytes + layout.grain_input_bytes) * options.lanes,
        layout.sum_bytes * sum_levels(per_lane) * options.lanes,
        layout.step_bytes + layout.step_input_bytes + lanes_scratch + scratch,
    ]
}

/// Bytes of scratch for each lane and for the step. A lone lane uses the step's.
fn scratches(graph: &Graph, layout: &Layout, options: Options) -> (usize, usize) {
    let lane = scratch_bytes(graph, &layout.grain, (options.threads / options.lanes).max(1));
    let rest = [&layout.before[..], &layout.after[..]].concat();
    let step = scratch_bytes(graph, &rest, options.threads);
    (lane, if options.lanes == 1 { step.max(lane) } else { step })
}

impl Session {
    /// Compiles `graph` on the tensors of `store`. Collectives in it are those of one worker: they do nothing.
    pub fn new(graph: Graph, store: &Store, options: Options) -> Self {
        Self::build(graph, store, options, None).expect("nothing to exchange, nothing to fail")
    }

    /// Compiles `graph` with somebody to run its collectives. All ranks call it together.
    pub fn with_collectives(
        graph: Graph,
        store: &Store,
        options: Options,
        collectives: Arc<dyn Collectives>,
    ) -> Result<Self, ExchangeError> {
        Self::build(graph, store, options, Some(collectives))
    }

    fn build(
        graph: Graph,
        store: &Store,
        options: Options,
        collectives: Option<Arc<dyn Collectives>>,
    ) -> Result<Self, ExchangeError> {
        let Options { threads, lanes: lane_count, grains } = options;
        assert!(lane_count.is_power_of_two() && grains % lane_count == 0, "{lane_count} lanes for {grains} grains");
        if let Err(problem) = kolo_graph::verify::verify(&graph) {
            panic!("the graph is not sound: {problem}");
        }
        let sums = graph.nodes.iter().any(|node| node.op.is::<GrainSum>());
        assert!(grains == 1 || sums || graph.updates.is_empty(), "grains without a sum cannot share one update");
        let layout = layout::plan(&graph, grains, lane_count);
        let step = Memory::new(layout.step_bytes);
        let step_batch = Memory::new(layout.step_input_bytes);
        let lane_threads = (threads / lane_count).max(1);
        let (lane_scratch, step_scratch) = scratches(&graph, &layout, options);
        let scratch = Arc::new(Memory::new(step_scratch));
        let bases = |grain_input: &Memory, grain: &Memory, sum: &Memory| Bases {
            store,
            grain_input: grain_input.at(0),
            step_input: step_batch.at(0),
            grain: grain.at(0),
            step: step.at(0),
            sum: sum.at(0),
        };
        let team = Arc::new(Team::new(threads));
        let mut shared_sums = match &collectives {
            Some(collectives) if layout.sum_bytes > 0 => Some(collectives.memory(layout.sum_bytes)?),
            _ => None,
        };
        let mut outputs: Vec<(String, Vec<Buffer>)> = graph.outputs.iter().map(|(n, _)| (n.clone(), vec![])).collect();
        let mut shared: Option<Bases<'_>> = None;
        let mut lanes: Vec<Lane> = (0..lane_count)
            .map(|_| {
                let activations = Memory::new(layout.grain_bytes);
                let batch = Memory::new(layout.grain_input_bytes);
                let scratch = match lane_count {
                    1 => Arc::clone(&scratch),
                    _ => Arc::new(Memory::new(lane_scratch)),
                };
                let own = |_| Memory::new(layout.sum_bytes);
                let whole = shared_sums.take().unwrap_or_else(|| own(0));
                let rest = (1..sum_levels(grains / lane_count)).map(own);
                let levels: Vec<Memory> = std::iter::once(whole).chain(rest).collect();
                let bases = bases(&batch, &activations, &levels[0]);
                let calls = compile(&graph, &layout, &layout.grain, &bases, &scratch, lane_threads);
                let inputs = input_buffers(&graph, &layout, &bases, false);
                for ((_, id), (_, buffers)) in graph.outputs.iter().zip(&mut outputs) {
                    buffers.push(bases.buffer(&graph, &layout, *id));
                }
                shared.get_or_insert(bases);
                // A lone lane shares the step's threads: another team's would fight with them for the cores.
                let team = if lane_count == 1 { Arc::clone(&team) } else { Arc::new(Team::new(lane_threads)) };
                let closes = Vec::new();
                Lane { calls, inputs, team, scratch, _activations: activations, _batch: batch, levels, closes }
            })
            .collect();
        let shared = shared.expect("there is at least one lane");
        let before = compile(&graph, &layout, &layout.before, &shared, &scratch, threads);
        let mut after = compile(&graph, &layout, &layout.after, &shared, &scratch, threads);
        let buffer = |id: ValueId| shared.buffer(&graph, &layout, id);
        let sums = sum_addresses(&lanes);
        let overlap = collectives.and_then(|them| Overlap::new(&graph, &layout, them, buffer, sums.clone()));
        let mut joined = Vec::new();
        match &overlap {
            Some(overlap) => place_exchanges(&graph, &layout, overlap, &mut lanes, &mut after),
            None => {
                after.retain(|call| !is_collective(&*call.op));
                if lane_count > 1 {
                    joined = leave_terms(&graph, &layout, &sums, &mut after);
                }
            }
        }
        let copies = layout.copies.iter().map(|(from, to)| (buffer(*from), buffer(*to))).collect();
        let step_inputs = input_buffers(&graph, &layout, &shared, true);
        Ok(Self {
            options,
            team,
            lanes,
            before,
            after,
            copies,
            step_inputs,
            outputs,
            scratch,
            _step: step,
            _step_batch: step_batch,
            _store: store.memories().map(Arc::clone),
            sums,
            joined,
            overlap,
            probe: Probe::default(),
            graph: Arc::new(graph),
            layout,
        })
    }

    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    pub fn options(&self) -> Options {
        self.options
    }

    /// Bytes planned for (activations and inputs, gradient sums, temporaries and scratch).
    pub fn planned_bytes(&self) -> [usize; 3] {
        planned_bytes(&self.graph, &self.layout, self.options)
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
        let same = store.memories().iter().zip(&self._store).all(|(one, other)| Arc::ptr_eq(one, other));
        assert!(same, "the session was compiled for another store");
        step(&mut Feed { inputs: &self.step_inputs });
        run_calls(&mut self.before, self.lanes.len(), &self.team, &self.scratch, &self.probe);
        let per_lane = self.options.grains / self.options.lanes;
        let probe = &self.probe;
        let overlap = self.overlap.as_ref();
        let lanes = LanePointer(self.lanes.as_mut_ptr());
        self.team.run(self.lanes.len(), |at, _| {
            // SAFETY: every task has a lane of its own.
            let lane = unsafe { &mut *lanes.get().add(at) };
            for local in 0..per_lane {
                grain(at * per_lane + local, &mut Feed { inputs: &lane.inputs });
                lane.run(at, local, probe, overlap, local + 1 == per_lane);
            }
        });
        match overlap {
            Some(overlap) => overlap.wait_outputs(),
            None => {
                self.join_lanes();
                Ok(())
            }
        }
    }

    /// The part after the grains: the update.
    pub fn finish(&mut self, _store: &mut Store) -> Result<(), ExchangeError> {
        match &self.overlap {
            Some(overlap) => {
                run_overlapped(&mut self.after, overlap, self.lanes.len(), &self.team, &self.scratch, &self.probe)?
            }
            None => run_calls(&mut self.after, self.lanes.len(), &self.team, &self.scratch, &self.probe),
        }
        for (from, to) in &self.copies {
            // SAFETY: two different places of the same type.
            unsafe { std::ptr::copy_nonoverlapping(from.data, to.data, to.ty.bytes()) };
        }
        Ok(())
    }

    fn join_lanes(&self) {
        self.joined.iter().for_each(|range| overlap::join(&self.sums, range.clone(), &self.team));
    }

    /// All sums over grains with the padding between them, in the order of memory.
    pub fn sums_mut(&mut self) -> &mut [f32] {
        // SAFETY: `&mut self` is exclusive, and the first lane's sums have this size.
        unsafe { std::slice::from_raw_parts_mut(self.lanes[0].levels[0].at(0).cast(), self.layout.sum_bytes / 4) }
    }

    /// Nanoseconds that steps have waited for collectives since this was last asked.
    pub fn take_waited(&self) -> u64 {
        self.overlap.as_ref().map_or(0, Overlap::take_waited)
    }

    /// A named output, as f32: the sum over grains or step value; for a value of one grain, that of lane 0's last grain.
    pub fn output(&self, name: &str) -> Option<&[f32]> {
        let (_, buffers) = self.outputs.iter().find(|(key, _)| key == name)?;
        assert_eq!(buffers[0].ty.dtype, DType::F32, "output `{name}` is {}", buffers[0].ty);
        // SAFETY: the place holds that many values and nothing runs while `self` is borrowed.
        Some(unsafe { std::slice::from_raw_parts(buffers[0].data.cast(), buffers[0].ty.elements()) })
    }

    /// A named output as raw bytes.
    pub fn output_bytes(&self, name: &str) -> Option<&[u8]> {
        let (_, buffers) = self.outputs.iter().find(|(key, _)| key == name)?;
        // SAFETY: as above.
        Some(unsafe { std::slice::from_raw_parts(buffers[0].data, buffers[0].ty.bytes()) })
    }

    /// Starts or stops timing every call.
    pub fn set_profile(&mut self, profile: bool) {
        self.probe.profile = profile;
        self.calls_mut().for_each(|call| call.nanoseconds = 0);
    }

    /// Tells `alive` after every call from now on.
    pub fn set_alive(&mut self, alive: Option<Alive>) {
        self.probe.alive = alive;
    }

    /// Lets `tracer` see every call from now on.
    pub fn set_tracer(&mut self, tracer: Option<Tracer>) {
        self.probe.tracer = tracer;
    }

    fn calls_mut(&mut self) -> impl Iterator<Item = &mut Call> {
        let lanes = self.lanes.iter_mut().flat_map(|lane| &mut lane.calls);
        self.before.iter_mut().chain(lanes).chain(&mut self.after)
    }

    /// Nanoseconds spent in each node since profiling started; lanes add up.
    pub fn times(&self) -> Vec<(NodeId, u64)> {
        let lanes = self.lanes.iter().flat_map(|lane| &lane.calls);
        let mut times = vec![0; self.graph.nodes.len()];
        for call in self.before.iter().chain(lanes).chain(&self.after) {
            times[call.node.0 as usize] += call.nanoseconds;
        }
        times.into_iter().enumerate().filter(|(_, ns)| *ns > 0).map(|(at, ns)| (NodeId(at as u32), ns)).collect()
    }

    /// Runs one grain call by call and names the first node with a result that is not finite.
    pub fn find_nonfinite(&mut self, grain: usize, feed: impl Fn(usize, &mut Feed<'_>)) -> Option<NodeId> {
        let lane = &mut self.lanes[0];
        feed(grain, &mut Feed { inputs: &lane.inputs });
        for call in &mut lane.calls {
            if matches!(call.kind, CallKind::Accumulate { .. }) {
                continue;
            }
            run_call(call, &lane.team, &lane.scratch);
            if call.outputs.iter().any(|output| !is_finite(output)) {
                return Some(call.node);
            }
        }
        // What an update would take is not made before; here it is, for nobody.
        let makers = self.after.iter().filter_map(|call| call.maker.as_deref());
        makers.into_iter().find_map(|maker| {
            let seen = Finite(AtomicBool::new(true));
            run_maker(maker, &self.team, &self.scratch, &seen);
            (!seen.0.into_inner()).then_some(maker.node)
        })
    }
}

/// Takes a result to see whether it is finite.
#[derive(Debug)]
struct Finite(AtomicBool);

impl Taker for Finite {
    fn take(&self, tile: Tile<'_>) {
        let row = |at: usize| &tile.data[at * tile.width..at * tile.width + tile.columns];
        if !(0..tile.rows).all(|at| row(at).iter().all(|value| value.is_finite())) {
            self.0.store(false, Ordering::Relaxed);
        }
    }
}

fn is_finite(buffer: &Buffer) -> bool {
    if buffer.ty.dtype != DType::F32 {
        return true;
    }
    // SAFETY: the buffer holds that many values.
    let values: &[f32] = unsafe { std::slice::from_raw_parts(buffer.data.cast(), buffer.ty.elements()) };
    values.iter().all(|value| value.is_finite())
}

fn sum_addresses(lanes: &[Lane]) -> Vec<Address> {
    lanes.iter().map(|lane| Address(lane.levels[0].at(0).cast())).collect()
}

/// Tells each lane which of its calls close the sums of an exchange, and each later call which exchanges it needs.
fn place_exchanges(graph: &Graph, layout: &Layout, overlap: &Overlap, lanes: &mut [Lane], after: &mut [Call]) {
    let position = |node: NodeId| layout.grain.iter().position(|id| *id == node);
    for lane in lanes {
        let positions: Vec<Option<usize>> = lane.calls.iter().map(|call| position(call.node)).collect();
        let last_call = |sum: usize| positions.iter().rposition(|at| at.is_some_and(|at| at <= sum));
        let closes = overlap.last_sums(graph, layout).into_iter();
        lane.closes = closes.map(|(sum, plan)| (last_call(sum).unwrap_or(0), plan)).collect();
        lane.closes.sort_unstable();
    }
    for call in after {
        let node = graph.node(call.node);
        let mut needs: Vec<usize> = node.inputs.iter().filter_map(|id| overlap.makes(graph, *id)).collect();
        needs.sort_unstable();
        needs.dedup();
        call.needs = needs;
        if let Some(plan) = overlap.at(call.node) {
            call.kind = CallKind::Exchange(plan);
        }
    }
}

/// Gives each update the lanes' terms of its gradient, if nothing else wants their sum: added up as they are used, they
/// pass through memory once. Returns the elements of all other sums.
fn leave_terms(graph: &Graph, layout: &Layout, sums: &[Address], after: &mut [Call]) -> Vec<Range<usize>> {
    let readers = graph.readers();
    let mut joined: Vec<Range<usize>> = Vec::new();
    for id in layout::sum_order(graph) {
        let start = layout.places[id.0 as usize].expect("a sum has a place").offset / 4;
        let output = graph.outputs.iter().any(|(_, output)| *output == id);
        let kept = output || graph.updates.iter().any(|(_, value)| *value == id);
        let reader = match readers[id.0 as usize][..] {
            [reader] if !kept => after.iter_mut().find(|call| call.node == reader),
            _ => None,
        };
        // As that input and no other.
        let takes = |call: &&mut Call| {
            let inputs = graph.node(call.node).inputs.iter().enumerate();
            let mut places = inputs.filter(|(_, input)| **input == id).map(|(at, _)| at);
            matches!(call.kind, CallKind::Kernel) && places.next() == call.op.takes_terms() && places.next().is_none()
        };
        if let Some(call) = reader.filter(takes) {
            // SAFETY: every lane's sums have this place.
            let term = |lane: &Address| unsafe { lane.get().add(start) };
            let buffer = |lane| Buffer { data: term(lane).cast(), ty: graph.ty(id).clone() };
            call.terms = sums.iter().map(buffer).collect();
            continue;
        }
        let end = start + align(graph.ty(id).bytes()) / 4;
        match joined.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => joined.push(start..end),
        }
    }
    joined
}

fn run_overlapped(
    calls: &mut [Call],
    overlap: &Overlap,
    lane: usize,
    team: &Team,
    scratch: &Memory,
    probe: &Probe,
) -> Result<(), ExchangeError> {
    for call in calls {
        call.needs.iter().try_for_each(|plan| overlap.wait(*plan))?;
        match call.kind {
            CallKind::Exchange(plan) if overlap.is_of_sums(plan) => {}
            CallKind::Exchange(plan) => overlap.start(plan),
            _ => run_calls(std::slice::from_mut(call), lane, team, scratch, probe),
        }
    }
    overlap.wait_all()
}

struct LanePointer(*mut Lane);
// SAFETY: every task uses another lane.
unsafe impl Sync for LanePointer {}
impl LanePointer {
    fn get(&self) -> *mut Lane {
        self.0
    }
}

fn input_buffers(graph: &Graph, layout: &Layout, bases: &Bases<'_>, per_step: bool) -> Vec<(String, Buffer)> {
    graph
        .sources::<Input>()
        .filter(|(id, input)| input.per_step == per_step && layout.places[id.0 as usize].is_some())
        .map(|(id, input)| (input.name.clone(), bases.buffer(graph, layout, id)))
        .collect()
}

fn compile(
    graph: &Graph,
    layout: &Layout,
    nodes: &[NodeId],
    bases: &Bases<'_>,
    scratch: &Memory,
    threads: usize,
) -> Vec<Call> {
    let runs = |id: &&NodeId| {
        let node = graph.node(**id);
        let op = &node.op;
        // A sum of one term was made in its place.
        let made = op.is::<GrainSum>()
            && layout.places[node.inputs[0].0 as usize] == layout.places[node.outputs[0].0 as usize];
        !(made || op.view() || op.is::<Input>() || op.is::<Param>() || op.is::<State>())
    };
    let call = |id: &NodeId| {
        let node = graph.node(*id);
        let buffers = |ids: &[ValueId]| ids.iter().map(|id| bases.buffer(graph, layout, *id)).collect::<Vec<_>>();
        let (inputs, outputs) = (buffers(&node.inputs), buffers(&node.outputs));
        let kind = if node.op.is::<GrainSum>() {
            let place = layout.places[node.outputs[0].0 as usize].expect("a sum has a place");
            CallKind::Accumulate { offset: place.offset / 4, elements: outputs[0].ty.elements() }
        } else {
            conversion(&*node.op, &inputs, &outputs, scratch, threads)
        };
        let (op, terms, needs) = (Arc::clone(&node.op), Vec::new(), Vec::new());
        Call { node: *id, op, inputs, outputs, terms, maker: None, kind, needs, nanoseconds: 0 }
    };
    let mut calls: Vec<Call> = Vec::new();
    for mut next in nodes.iter().filter(runs).map(call) {
        // A product that is taken stands right before its taker.
        if layout.unstored.iter().any(|taken| taken.update == next.node) {
            next.maker = calls.pop().map(Box::new);
        }
        calls.push(next);
    }
    calls
}

/// Lays f32 copies of half-precision operands behind the op's own scratch.
fn conversion(op: &dyn Op, inputs: &[Buffer], outputs: &[Buffer], scratch: &Memory, threads: usize) -> CallKind {
    let types = |buffers: &[Buffer]| buffers.iter().map(|buffer| buffer.ty.clone()).collect::<Vec<_>>();
    let all = [types(inputs), types(outputs)].concat();
    if !needs_conversion(op, &all) {
        return CallKind::Kernel;
    }
    let mut offset = align(op.scratch_bytes(&types(inputs), &types(outputs), threads));
    let mut copy = |buffer: &Buffer| {
        if !matches!(buffer.ty.dtype, DType::BF16 | DType::F16) {
            return buffer.clone();
        }
        let copy = Buffer { data: scratch.at(offset), ty: Type::f32(buffer.ty.shape.clone()) };
        offset += align(copy.ty.bytes());
        copy
    };
    CallKind::Converted {
        inputs: inputs.iter().map(&mut copy).collect(),
        outputs: outputs.iter().map(&mut copy).collect(),
    }
}

fn run_calls(calls: &mut [Call], lane: usize, team: &Team, scratch: &Memory, probe: &Probe) {
    for call in calls {
        let start = probe.start();
        run_call(call, team, scratch);
        probe.end(lane, call, start);
    }
}

fn run_call(call: &Call, team: &Team, scratch: &Memory) {
    let kernel = |inputs: &[Buffer], outputs: &[Buffer]| {
        // SAFETY: buffers were resolved by the layout; the scratch belongs to this lane or to the step.
        let mut cx = unsafe { CpuCx::new(inputs, outputs, team, (scratch.at(0), scratch.bytes())) };
        cx.terms = &call.terms;
        let Some(maker) = &call.maker else { return call.op.cpu(&mut cx) };
        call.op.cpu_taking(&mut cx, &mut |taker| run_maker(maker, team, scratch, taker));
    };
    match &call.kind {
        CallKind::Kernel => kernel(&call.inputs, &call.outputs),
        CallKind::Converted { inputs, outputs } => {
            call.inputs.iter().zip(inputs).for_each(|(from, to)| convert(from, to));
            kernel(inputs, outputs);
            outputs.iter().zip(&call.outputs).for_each(|(from, to)| convert(from, to));
        }
        CallKind::Accumulate { .. } | CallKind::Exchange(_) => unreachable!("lanes add sums, exchanges are started"),
    }
}

/// Runs a call whose output goes to `taker` and nowhere else.
fn run_maker(call: &Call, team: &Team, scratch: &Memory, taker: &dyn Taker) {
    // SAFETY: as in `run_call`; the output has no place and is not written.
    let mut cx = unsafe { CpuCx::new(&call.inputs, &call.outputs, team, (scratch.at(0), scratch.bytes())) };
    cx.taker = Some(taker);
    call.op.cpu(&mut cx);
}

/// Copies between half precision and f32; same type means same buffer.
fn convert(from: &Buffer, to: &Buffer) {
    if from.data == to.data {
        return;
    }
    kolo_ops::cast::convert(from, to);
}

impl Lane {
    /// Runs one grain; `number` is the lane's, `local` the grain's within the lane. In the lane's `last` grain its sums are
    /// closed for `overlap`.
    fn run(&mut self, number: usize, local: usize, probe: &Probe, overlap: Option<&Overlap>, last: bool) {
        let mut closes = 0;
        for at in 0..self.calls.len() {
            let start = probe.start();
            let call = &self.calls[at];
            match call.kind {
                CallKind::Accumulate { offset, elements } => {
                    self.accumulate(local, Address(call.inputs[0].data.cast()), offset, elements);
                }
                _ => run_call(call, &self.team, &self.scratch),
            }
            probe.end(number, &mut self.calls[at], start);
            let Some(overlap) = overlap.filter(|_| last) else { continue };
            while let Some((_, plan)) = self.closes.get(closes).filter(|(call, _)| *call == at) {
                overlap.close(*plan, &self.team);
                closes += 1;
            }
        }
    }

    /// A binary counter of partial sums. Grain `local` closes as many runs as it has trailing one bits; the sum lands in
    /// the level given by the ones above them, so that runs of equal length are always added left to right.
    fn accumulate(&self, local: usize, term: Address, offset: usize, elements: usize) {
        let closes = local.trailing_ones() as usize;
        let depth = local.count_ones() as usize;
        let level = |at: usize| Address(self.levels[at].at(offset * 4).cast());
        kolo_ops::tiles::for_each_task(&self.team, elements, |range, _| {
            // SAFETY: tasks own disjoint ranges; a term and the levels are distinct memories.
            unsafe {
                let term = term.slice(range.start, range.len());
                if closes == 0 {
                    level(depth).slice(range.start, range.len()).copy_from_slice(term);
                    return;
                }
                let mut carry: &mut [f32] = term;
                for close in 0..closes {
                    let sum = level(depth - 1 - close).slice(range.start, range.len());
                    simd::add_into(sum, carry);
                    carry = sum;
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::Builder;
    use kolo_graph::sources::Init;
    use kolo_ops::matmul::MatMul;
    use kolo_ops::optim::adam::Adam;
    use kolo_ops::optim::sgd::SgdPlain;

    /// Longer than a task of an update.
    const ELEMENTS: usize = 40_003;

    /// Trains a step on a gradient that is its input; whether the lanes' sums are left to the update, and all state after.
    fn step(lanes: usize, wanted: &str) -> (bool, Vec<f32>) {
        let builder = Builder::new();
        let w = builder.param("w", [ELEMENTS], Init::Constant(1.0));
        let sum = builder.input("x", Type::f32([ELEMENTS])).then(GrainSum { of: "w".into() }, &[]);
        let (lr, scale) = (builder.scalar(0.1), builder.scalar(1.0));
        builder.update(w, w.then(SgdPlain { weight_decay: 0.0 }, &[sum, lr, scale]));
        match wanted {
            "output" => builder.output("sum", sum),
            "state" => builder.update(builder.state("last", sum.ty(), Init::Constant(0.0)), sum),
            _ => {}
        }
        let graph = builder.finish().unwrap();
        let mut store = Store::new(&graph, 1);
        let mut session = Session::new(graph, &store, Options { threads: lanes, lanes, grains: 4 });
        let fill = |grain: usize, feed: &mut Feed<'_>| {
            let x = feed.f32("x").unwrap();
            x.iter_mut().enumerate().for_each(|(at, x)| *x = 0.1 + (grain * at) as f32 * 1e-5);
        };
        session.run(&mut store, |_| {}, fill).unwrap();
        let names = ["w", "last"].into_iter().filter_map(|name| store.values(name));
        let all = names.chain(session.output("sum")).flatten().copied().collect();
        (session.after.iter().any(|call| !call.terms.is_empty()), all)
    }

    /// Trains three steps on a gradient that is a product; whether it is stored, and all state after.
    fn product_step(
        [rows, columns, terms]: [usize; 3],
        threads: usize,
        as_output: bool,
        scale: f32,
    ) -> (bool, Vec<f32>, Option<String>) {
        let builder = Builder::new();
        let ty = Type::f32([rows, columns]);
        let w = builder.param("w", [rows, columns], Init::Constant(1.0));
        let [m, v] = ["m", "v"].map(|name| builder.state(name, ty.clone(), Init::Constant(0.01)));
        let (x, y) = (builder.input("x", Type::f32([terms, rows])), builder.input("y", Type::f32([terms, columns])));
        let sum = x.then(MatMul { ta: true, tb: false }, &[y]).then(GrainSum { of: "w".into() }, &[]);
        let numbers = [0.1, 0.5, 3.0].map(|value| builder.scalar(value));
        let adam = Adam { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, decoupled: true };
        let updated = builder.apply_all(adam, &[w, sum, m, v, numbers[0], numbers[1], numbers[2]]);
        [w, m, v].into_iter().zip(updated).for_each(|(state, value)| builder.update(state, value));
        if as_output {
            builder.output("sum", sum);
        }
        let graph = builder.finish().unwrap();
        let mut store = Store::new(&graph, 1);
        let mut session = Session::new(graph, &store, Options::single(threads));
        let fill = |_: usize, feed: &mut Feed<'_>| {
            for (name, step) in [("x", 0.37f32), ("y", 0.61)] {
                let values = feed.f32(name).unwrap();
                values.iter_mut().enumerate().for_each(|(at, value)| *value = scale * (at as f32 * step).sin());
            }
        };
        for _ in 0..3 {
            session.run(&mut store, |_| {}, fill).unwrap();
        }
        let stored = session.layout.unstored.is_empty();
        let bad = session.find_nonfinite(0, fill).map(|node| session.graph().node(node).op.name().to_owned());
        (stored, ["w", "m", "v"].into_iter().flat_map(|name| store.values(name).unwrap()).copied().collect(), bad)
    }

    #[test]
    fn an_update_takes_a_large_product_as_it_is_made() {
        // Whole tiles and remainders; one sum is no larger than what it is the sum of, one has too many terms.
        let shapes = [([96, 128, 8], false), ([531, 217, 100], false), ([50, 37, 3], false), ([64, 64, 33], true)];
        for (shape, too_small) in shapes.into_iter().chain([([700, 700, 300], true)]) {
            let (stored, wanted, bad) = product_step(shape, 1, true, 1.0);
            assert!(stored && bad.is_none(), "{shape:?}: an output is stored");
            for threads in [1, 2, 3] {
                let (stored, state, bad) = product_step(shape, threads, false, 1.0);
                assert_eq!((stored, bad), (too_small, None), "{shape:?}");
                assert!(state == wanted, "{shape:?} on {threads} threads");
            }
        }
    }

    #[test]
    fn a_product_that_nobody_stores_is_looked_at_too() {
        let (stored, _, bad) = product_step([96, 128, 8], 1, false, 1e20);
        assert_eq!((stored, bad.as_deref()), (false, Some("matmul")));
    }

    #[test]
    fn lanes_are_added_by_the_update_if_it_is_alone() {
        for wanted in ["nothing", "output", "state"] {
            let (left, one) = step(1, wanted);
            assert!(!left, "one lane has one sum");
            for lanes in [2, 4] {
                let (left, several) = step(lanes, wanted);
                assert_eq!(left, wanted == "nothing", "{lanes} lanes, {wanted} wanted");
                assert!(several == one, "{lanes} lanes, {wanted} wanted");
            }
        }
    }
}
