//! The CPU executor.
//!
//! A session compiles a graph once: it lays out memory, resolves every operand to an address and sizes the scratch. A
//! step then only calls kernels; it allocates nothing.
//!
//! Threads are used in two ways. With one lane, a grain runs on all threads, each kernel sharing its loop. With several
//! lanes, each lane runs its own grains on its share of the threads, so that nothing is shared until the grains are
//! summed. Either way grain gradients are added as one balanced tree over the grain index, so the bits are the same.

mod abilities;
mod bases;
mod call;
mod feed;
mod lane;
mod probe;
mod rehearse;
#[cfg(test)]
mod tests;
mod whole;

use crate::exchange::{Collectives, ExchangeError};
use crate::memory::Memory;
use crate::overlap::{self, Overlap};
use crate::store::Store;
pub use abilities::CpuAbilities;
use bases::{Bases, input_buffers};
pub use call::MissingKernel;
use call::{Call, CallKind, Finite, check_kernels, compile, is_finite, run_call, run_calls, run_maker, scratch_bytes};
pub use feed::Feed;
use kolo_graph::collective::is_collective;
use kolo_graph::cpu::Buffer;
use kolo_graph::layout::{self, Layout};
use kolo_graph::sources::{GrainSum, Param};
use kolo_graph::{DType, Graph, NodeId, Team, ValueId};
use kolo_ops::tiles::Address;
pub use lane::sum_levels;
use lane::{Lane, leave_terms, place_exchanges, sum_addresses};
use probe::Probe;
pub use probe::{Alive, Stop, Tracer};
pub use rehearse::Rehearsal;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
pub use whole::StepError;

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
    ///
    /// # Panics
    ///
    /// If the system refuses a thread or memory; see [`Session::try_new`].
    pub fn new(graph: Graph, store: &Store, options: Options) -> Self {
        Self::try_new(graph, store, options).expect("the system gives what was asked for")
    }

    /// As [`Session::new`]; an [`std::io::Error`] if the system refuses a thread or memory.
    pub fn try_new(graph: Graph, store: &Store, options: Options) -> Result<Self, ExchangeError> {
        Self::build(graph, store, options, None)
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
        let layout = layout::plan(&graph, grains, lane_count, &CpuAbilities);
        check_kernels(&graph, &layout)?;
        let step = Memory::try_new(layout.step_bytes)?;
        let step_batch = Memory::try_new(layout.step_input_bytes)?;
        let lane_threads = (threads / lane_count).max(1);
        let (lane_scratch, step_scratch) = scratches(&graph, &layout, options);
        let scratch = Arc::new(Memory::try_new(step_scratch)?);
        let bases = |grain_input: &Memory, grain: &Memory, sum: &Memory| Bases {
            store,
            grain_input: grain_input.at(0),
            step_input: step_batch.at(0),
            grain: grain.at(0),
            step: step.at(0),
            sum: sum.at(0),
        };
        let team = Arc::new(Team::try_new(threads)?);
        // A lone lane shares the step's threads: another team's would fight with them for the cores.
        let lane_team =
            |_| if lane_count == 1 { Ok(Arc::clone(&team)) } else { Team::try_new(lane_threads).map(Arc::new) };
        let lane_teams = (0..lane_count).map(lane_team).collect::<std::io::Result<Vec<_>>>()?.into_iter();
        let mut shared_sums = match &collectives {
            Some(collectives) if layout.sum_bytes > 0 => Some(collectives.memory(layout.sum_bytes)?),
            _ => None,
        };
        let mut outputs: Vec<(String, Vec<Buffer>)> = graph.outputs.iter().map(|(n, _)| (n.clone(), vec![])).collect();
        let mut shared: Option<Bases<'_>> = None;
        let mut lanes: Vec<Lane> = lane_teams
            .map(|team| {
                let activations = Memory::try_new(layout.grain_bytes)?;
                let batch = Memory::try_new(layout.grain_input_bytes)?;
                let scratch = match lane_count {
                    1 => Arc::clone(&scratch),
                    _ => Arc::new(Memory::try_new(lane_scratch)?),
                };
                let own = |_| Memory::try_new(layout.sum_bytes);
                let whole = shared_sums.take().map_or_else(|| own(0), Ok);
                let rest = (1..sum_levels(grains / lane_count)).map(own);
                let levels = std::iter::once(whole).chain(rest).collect::<std::io::Result<Vec<Memory>>>()?;
                let bases = bases(&batch, &activations, &levels[0]);
                let calls = compile(&graph, &layout, &layout.grain, &bases, &scratch, lane_threads);
                let inputs = input_buffers(&graph, &layout, &bases, false);
                for ((_, id), (_, buffers)) in graph.outputs.iter().zip(&mut outputs) {
                    buffers.push(bases.buffer(&graph, &layout, *id));
                }
                shared.get_or_insert(bases);
                let closes = Vec::new();
                Ok(Lane { calls, inputs, team, scratch, _activations: activations, _batch: batch, levels, closes })
            })
            .collect::<std::io::Result<_>>()?;
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

    /// The product whose result a node takes as it is made; their time is measured together, as the node's.
    pub fn maker_of(&self, node: NodeId) -> Option<NodeId> {
        self.layout.unstored.taken_by(node).map(|taken| taken.product)
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

    /// Whether the step changes every parameter where it is, and copies none at its end.
    pub fn updates_params_in_place(&self) -> bool {
        self.layout.copies.iter().all(|(_, state)| !self.graph.maker(*state).op.is::<Param>())
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

    /// From now on, a run leaves out all calls from the moment that `stop` is true; what it left undone is for the caller to
    /// know. Not for a session with collectives, whose other ranks would wait.
    pub fn set_stop(&mut self, stop: Option<Stop>) {
        assert!(stop.is_none() || self.overlap.is_none(), "other ranks would wait for a run that stops");
        self.probe.stop = stop;
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
