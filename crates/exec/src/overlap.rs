//! The collectives of a session, beside its kernels.
//!
//! An exchange of sums over grains starts when the last lane has closed the last of its sums; any other starts at its
//! place in the order. Each is waited for where its result is first read, or at the end of the step. Lanes close sums in
//! the same order, and the last to close one starts its exchange before it closes the next, so that exchanges start in
//! one order on all ranks.

use crate::exchange::{Collectives, Exchange, ExchangeError, ExchangeKind};
use crate::memory::Memory;
use kolo_graph::collective::{AllGather, Barrier, ReduceScatter, is_collective};
use kolo_graph::cpu::Buffer;
use kolo_graph::layout::{Layout, align, shown_by};
use kolo_graph::sources::GrainSum;
use kolo_graph::{Graph, NodeId, Team, ValueId};
use kolo_ops::simd;
use kolo_ops::tiles::Address;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

#[derive(Debug)]
pub(crate) struct Overlap {
    collectives: Arc<dyn Collectives>,
    /// The number of the first exchange.
    first: usize,
    plans: Vec<Plan>,
    /// The plan of each collective.
    numbers: HashMap<NodeId, usize>,
    /// Each lane's sums.
    sums: Vec<Address>,
    /// Plans whose results are outputs of the graph.
    outputs: Vec<usize>,
    /// Nanoseconds that the step waited.
    waited: AtomicU64,
}

#[derive(Debug)]
struct Plan {
    node: NodeId,
    /// The elements of the sums it exchanges, if that is what it does.
    sums: Option<Range<usize>>,
    /// Lanes that have closed its sums in this step.
    arrived: AtomicUsize,
    /// Started and not waited for.
    pending: AtomicBool,
    /// Tensors that do not lie side by side are exchanged from a copy.
    staging: Option<Staging>,
}

#[derive(Debug)]
struct Staging {
    memory: Memory,
    /// Tensors and their offsets in the copy.
    tensors: Vec<(Buffer, usize)>,
}

impl Staging {
    fn copy(&self, into: bool) {
        for (buffer, offset) in &self.tensors {
            let copy = self.memory.at(*offset);
            let (from, to) = if into { (buffer.data, copy) } else { (copy, buffer.data) };
            // SAFETY: the copy has room for every tensor, and the two memories are distinct.
            unsafe { std::ptr::copy_nonoverlapping(from, to, buffer.ty.bytes()) };
        }
    }
}

/// What an exchange works on.
struct Span {
    data: *mut u8,
    bytes: usize,
    staging: Option<Staging>,
    /// Each tensor's offset in bytes.
    offsets: Vec<usize>,
}

impl Overlap {
    /// Plans the exchanges of a graph; `None` if it has none. `buffer` resolves values, `lanes` are the lanes' sums.
    pub fn new(
        graph: &Graph,
        layout: &Layout,
        collectives: Arc<dyn Collectives>,
        buffer: impl Fn(ValueId) -> Buffer,
        lanes: Vec<Address>,
    ) -> Option<Self> {
        let nodes: Vec<NodeId> =
            layout.after.iter().copied().filter(|id| is_collective(&*graph.node(*id).op)).collect();
        if nodes.is_empty() {
            return None;
        }
        let (mut plans, mut exchanges) = (Vec::new(), Vec::new());
        for (number, id) in nodes.iter().enumerate() {
            let node = graph.node(*id);
            let buffers: Vec<Buffer> = node.outputs.iter().map(|id| buffer(*id)).collect();
            let span = match node.op.is::<Barrier>() {
                true => Span { data: buffers[0].data, bytes: 0, staging: None, offsets: vec![0; buffers.len()] },
                false => span(&buffers),
            };
            exchanges.push(Exchange {
                kind: kind(graph, *id),
                name: if node.scope.is_empty() {
                    format!("{} {number}", node.op.name())
                } else {
                    node.scope.to_string()
                },
                data: span.data.cast(),
                elements: span.bytes / 4,
                parts: parts(graph, *id, &buffers, &span.offsets, collectives.size()),
            });
            let of_sums = node.inputs.iter().all(|id| graph.maker(shown_by(graph, *id)).op.is::<GrainSum>());
            let places = node.inputs.iter().filter_map(|id| layout.places[id.0 as usize]);
            let start = places.map(|place| place.offset + place.within).min();
            let sums = start.filter(|_| of_sums && span.staging.is_none()).map(|at| at / 4..(at + span.bytes) / 4);
            assert!(sums.is_some() || !of_sums, "the sums of an exchange lie side by side");
            plans.push(Plan {
                node: *id,
                sums,
                arrived: AtomicUsize::new(0),
                pending: AtomicBool::new(false),
                staging: span.staging,
            });
        }
        let numbers: HashMap<NodeId, usize> = nodes.into_iter().enumerate().map(|(at, id)| (id, at)).collect();
        let outputs = graph.outputs.iter().filter_map(|(_, id)| plan_of(graph, &numbers, *id)).collect();
        let first = collectives.prepare(exchanges);
        Some(Self { collectives, first, plans, numbers, sums: lanes, outputs, waited: AtomicU64::new(0) })
    }

    /// The exchange that makes this value, seen through views.
    pub fn makes(&self, graph: &Graph, id: ValueId) -> Option<usize> {
        plan_of(graph, &self.numbers, id)
    }

    /// The exchange that a node is.
    pub fn at(&self, node: NodeId) -> Option<usize> {
        self.numbers.get(&node).copied()
    }

    pub fn is_of_sums(&self, plan: usize) -> bool {
        self.plans[plan].sums.is_some()
    }

    /// For each exchange of sums, the last of its sums in the order of the grain phase.
    pub fn last_sums(&self, graph: &Graph, positions: &HashMap<NodeId, usize>) -> Vec<(usize, usize)> {
        let position = |node: NodeId| positions.get(&node).copied();
        let last = |plan: &Plan| {
            let inputs = &graph.node(plan.node).inputs;
            inputs.iter().filter_map(|id| position(graph.value(shown_by(graph, *id)).node)).max()
        };
        let of_sums = self.plans.iter().enumerate().filter(|(_, plan)| plan.sums.is_some());
        of_sums.filter_map(|(at, plan)| Some((last(plan)?, at))).collect()
    }

    /// A lane has closed the sums of an exchange. The last one adds the lanes up and starts it.
    pub fn close(&self, plan: usize, team: &Team) {
        let Some(range) = &self.plans[plan].sums else { return };
        let lanes = self.sums.len();
        if self.plans[plan].arrived.fetch_add(1, Ordering::AcqRel) + 1 < lanes {
            return;
        }
        self.plans[plan].arrived.store(0, Ordering::Relaxed);
        if lanes > 1 {
            join(&self.sums, range.clone(), team);
        }
        self.start(plan);
    }

    pub fn start(&self, plan: usize) {
        if let Some(staging) = &self.plans[plan].staging {
            staging.copy(true);
        }
        self.plans[plan].pending.store(true, Ordering::Release);
        self.collectives.start(self.first + plan);
    }

    pub fn wait(&self, plan: usize) -> Result<(), ExchangeError> {
        if !self.plans[plan].pending.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let start = Instant::now();
        self.collectives.wait(self.first + plan)?;
        self.waited.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        if let Some(staging) = &self.plans[plan].staging {
            staging.copy(false);
        }
        Ok(())
    }

    /// Waits for the exchanges that the graph's outputs come from.
    pub fn wait_outputs(&self) -> Result<(), ExchangeError> {
        self.outputs.iter().try_for_each(|plan| self.wait(*plan))
    }

    pub fn wait_all(&self) -> Result<(), ExchangeError> {
        (0..self.plans.len()).try_for_each(|plan| self.wait(plan))
    }

    /// Nanoseconds that steps have waited for exchanges since this was last asked.
    pub fn take_waited(&self) -> u64 {
        self.waited.swap(0, Ordering::Relaxed)
    }
}

fn plan_of(graph: &Graph, numbers: &HashMap<NodeId, usize>, mut id: ValueId) -> Option<usize> {
    loop {
        let node = graph.value(id).node;
        if let Some(at) = numbers.get(&node) {
            return Some(*at);
        }
        if !graph.node(node).op.view() {
            return None;
        }
        id = graph.node(node).inputs[0];
    }
}

fn kind(graph: &Graph, id: NodeId) -> ExchangeKind {
    let op = &graph.node(id).op;
    if op.is::<ReduceScatter>() {
        ExchangeKind::ReduceScatter
    } else if op.is::<AllGather>() {
        ExchangeKind::AllGather
    } else if op.is::<Barrier>() {
        ExchangeKind::Barrier
    } else {
        ExchangeKind::AllReduce
    }
}

/// The memory of these tensors if they lie side by side in order; otherwise a copy of them.
fn span(buffers: &[Buffer]) -> Span {
    let mut offsets = Vec::with_capacity(buffers.len());
    let mut bytes = 0;
    for buffer in buffers {
        offsets.push(bytes);
        bytes += align(buffer.ty.bytes());
    }
    let data = buffers[0].data;
    let together = buffers.iter().zip(&offsets).all(|(buffer, at)| buffer.data as usize == data as usize + at);
    if together {
        return Span { data, bytes, staging: None, offsets };
    }
    // Memory of this rank alone: whether tensors lie side by side may differ between ranks.
    let memory = Memory::new(bytes);
    let data = memory.at(0);
    let tensors = buffers.iter().cloned().zip(offsets.iter().copied()).collect();
    Span { data, bytes, staging: Some(Staging { memory, tensors }), offsets }
}

/// Each rank's run of elements; the tensors of one owner lie side by side.
fn parts(graph: &Graph, id: NodeId, buffers: &[Buffer], offsets: &[usize], size: usize) -> Vec<(usize, usize)> {
    let op = &graph.node(id).op;
    let owners = op.downcast::<ReduceScatter>().map(|op| &op.owners);
    let Some(owners) = owners.or(op.downcast::<AllGather>().map(|op| &op.owners)) else { return Vec::new() };
    let mut parts = vec![(0, 0); size];
    for ((owner, buffer), offset) in owners.iter().zip(buffers).zip(offsets) {
        let (start, count) = &mut parts[*owner];
        if *count == 0 {
            *start = offset / 4;
        }
        assert_eq!(*start + *count, offset / 4, "the tensors of one owner lie side by side");
        *count += align(buffer.ty.bytes()) / 4;
    }
    parts
}

/// Adds the lanes' sums as a balanced tree, into lane 0's.
pub(crate) fn join(lanes: &[Address], range: Range<usize>, team: &Team) {
    kolo_ops::tiles::for_each_task(team, range.len(), |task, _| {
        // SAFETY: tasks own disjoint ranges, and the lanes' memories are distinct.
        let sum = |lane: usize| unsafe { lanes[lane].slice(range.start + task.start, task.len()) };
        kolo_ops::tiles::add_as_tree(lanes.len(), sum, simd::add_into);
    });
}
