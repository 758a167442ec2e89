//! Knowing before running: what a step costs, counted from the graph that will run.
//!
//! FLOPs come from the ops' index expressions, memory from the layout the executor will allocate, time from both and
//! from rates measured on this machine. Nothing of the job is allocated.

pub mod anatomy;
pub mod cluster;
pub mod collective;
mod compose;
pub mod counted;
pub mod device;
pub mod device_bench;
pub mod failures;
pub mod link;
mod mixed;
pub mod op_cost;
mod peers;
pub mod rates;
pub mod run;
pub mod schedule_cache;
pub mod search;
pub mod simulate;
pub mod slow_devices;
pub mod step_model;
mod step_times;
pub mod system;

pub use compose::{Bound, OpKindCost, compose, fit_layers, lower_bound, op_kinds};
pub use counted::Counted;
pub use mixed::KINDS as RECOMPUTE_KINDS;
pub use rates::Rates;
pub use run::{Fleet, RunCost};

use kolo_exec::{Program, SessionBytes, null};
use kolo_graph::collective::{Collective, Movement};
use kolo_graph::layout::align;
use kolo_graph::{Node, Phase, Stage, ValueId, Work};
use std::collections::BTreeMap;

/// Numbers by stage: forward, backward, update.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ByStage {
    pub forward: u64,
    pub backward: u64,
    pub update: u64,
}

impl ByStage {
    pub fn total(&self) -> u64 {
        self.forward + self.backward + self.update
    }

    fn add(&mut self, stage: Stage, amount: u64) {
        match stage {
            Stage::Forward => self.forward += amount,
            Stage::Backward => self.backward += amount,
            Stage::Update => self.update += amount,
        }
    }
}

/// Bytes a training process will hold, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemoryPlan {
    pub weights: usize,
    pub gradients: usize,
    pub optimizer: usize,
    pub activations: usize,
    /// Temporaries of the update, packing space of products.
    pub scratch: usize,
    /// What evaluations between epochs take; not part of a step.
    pub evaluation: usize,
    /// Samples that are ready for a step, or being made.
    pub data: usize,
    /// A copy of the state that is written while training goes on.
    pub checkpoint: usize,
    /// Copies of its own and of another worker's share of the state, for the loss of a worker.
    pub copies: usize,
    /// The program itself: its code, its threads' stacks, the graph and the list of calls.
    pub process: usize,
}

/// Resident memory of a process that trains nothing yet: half of the program's code and constants, its libraries, and what it has
/// allocated (`bench/layouts.py --memory` measures it). And what each node of a graph adds on its way to a call.
const PROCESS_BYTES: usize = 18 << 20;
const BYTES_PER_NODE: usize = 3 << 9;
/// What a thread touches of its stack.
const BYTES_PER_THREAD: usize = 64 << 10;

impl MemoryPlan {
    /// The kinds that a run's report tells apart; they add up to the total.
    pub fn kinds(&self) -> [(&'static str, usize); 6] {
        let Self { weights, gradients, optimizer, activations, scratch, .. } = *self;
        let other = self.total() - weights - gradients - optimizer - activations - scratch;
        [
            ("weights", weights),
            ("gradients", gradients),
            ("optimizer", optimizer),
            ("activations", activations),
            ("scratch", scratch),
            ("other", other),
        ]
    }

    pub fn total(&self) -> usize {
        let step = self.weights + self.gradients + self.optimizer + self.activations + self.scratch;
        step + self.evaluation + self.data + self.checkpoint + self.copies + self.process
    }
}

/// What one step costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    pub parameters: usize,
    /// Floating-point operations per step.
    pub flops: ByStage,
    /// The part of `flops` in matrix products and convolutions; half of it are multiply-adds.
    pub product_flops: ByStage,
    /// Bytes read and written per step, as if nothing were cached.
    pub bytes: ByStage,
    pub memory: MemoryPlan,
    /// Kernel calls per step.
    pub calls: u64,
}

/// Whether an op's time is set by its multiply-adds rather than by its bytes.
pub fn is_product(node: &Node) -> bool {
    node.op.work() != Work::Stream
}

/// Of an op's operations, the share that the model itself has. The backward pass of attention computes scores again, which is one of
/// its five products.
pub(crate) fn model_share(node: &Node) -> f64 {
    if ["attention_grad", "attention_step_grad"].contains(&node.op.name()) { 4.0 / 5.0 } else { 1.0 }
}

/// Bytes of the host's memory that a step takes as its executor will run it.
pub fn memory(program: &Program) -> MemoryPlan {
    let Program { graph, options, executor, .. } = program;
    let SessionBytes { activations, gradients, scratch, .. } = match (program.bytes(), executor.allocates_on_host()) {
        (bytes, true) => bytes,
        // What is on its way to the device and from it.
        (bytes, false) => SessionBytes { scratch: bytes.staging, ..SessionBytes::default() },
    };
    let stored = |trained: bool| -> usize {
        let params = graph.params().map(|(id, _)| graph.ty(id).bytes());
        let states = graph.states().map(|(id, _)| graph.ty(id).bytes());
        if trained { params.sum() } else { states.sum() }
    };
    let process = PROCESS_BYTES + graph.nodes.len() * BYTES_PER_NODE + options.threads * BYTES_PER_THREAD;
    let (weights, optimizer) = (stored(true), stored(false));
    MemoryPlan { weights, gradients, optimizer, activations, scratch, process, ..MemoryPlan::default() }
}

/// Bytes of the memory of a device that has its own; `None` of one that computes in the host's.
pub fn device_memory(program: &Program) -> Option<MemoryPlan> {
    if program.executor.allocates_on_host() {
        return None;
    }
    let [weights, optimizer] = program.executor.stored_bytes(&program.graph, &program.layout);
    let SessionBytes { activations, gradients, scratch, .. } = program.bytes();
    Some(MemoryPlan { weights, optimizer, gradients, activations, scratch, ..MemoryPlan::default() })
}

/// Bytes that a rank sends in a step, by the axis of the mesh; `place` says where it lies along an axis, and how many ranks that
/// has. A sum is exchanged in two rounds: each rank sends all but its own part, and then its own part to all others. Tensors
/// that travel as one begin at cache lines.
pub fn sent_bytes(program: &Program, place: &dyn Fn(&str) -> (usize, usize)) -> BTreeMap<String, u64> {
    let graph = &program.graph;
    let mut sent: BTreeMap<String, u64> = BTreeMap::new();
    for (node, phase) in graph.nodes.iter().zip(graph.phases()) {
        let Some(Collective { axis, movement, .. }) = node.op.collective() else { continue };
        let times = if phase == Phase::Grain { program.times(node.segment) } else { 1 };
        *sent.entry(axis.to_string()).or_default() += sent_once(program, node, movement, place(axis)) * times as u64;
    }
    sent
}

/// Bytes that a rank sends in one exchange.
fn sent_once(program: &Program, node: &Node, movement: Movement<'_>, (rank, ranks): (usize, usize)) -> u64 {
    let graph = &program.graph;
    let padded = |id: &ValueId| align(graph.ty(*id).bytes());
    let first =
        |ids: &[ValueId]| ids.first().map_or((0, 1), |id| (graph.ty(*id).elements(), graph.ty(*id).dtype.bytes()));
    let ((input, width), others) = (first(&node.inputs), ranks.saturating_sub(1));
    let owned = |owners: &[usize]| -> usize {
        owners.iter().zip(&node.inputs).filter(|(owner, _)| **owner == rank).map(|(_, id)| padded(id)).sum()
    };
    let bucket: usize = node.inputs.iter().map(padded).sum();
    // Of a sum of so many elements: the first ranks have one more if it does not come out even.
    let summed = |elements: usize| {
        let own = elements / ranks + usize::from(rank < elements % ranks);
        elements - own + own * others
    };
    let bytes = match movement {
        _ if others == 0 => 0,
        Movement::SumBucket => summed(bucket / 4) * 4,
        Movement::Sum => summed(input) * width,
        Movement::ScatterBucket { owners } => bucket - owned(owners),
        Movement::GatherBucket { owners } => owned(owners) * others,
        Movement::Share { sizes } => (sizes.iter().sum::<usize>() - sizes[rank]) * width,
        Movement::Scatter { .. } | Movement::AllToAll { .. } => input / ranks * others * width,
        Movement::Gather { .. } | Movement::Join { .. } => input * others * width,
        Movement::Halo(halo) => input / halo.own(rank).len().max(1) * halo.sent() * width,
        Movement::Send { .. } | Movement::Shift { .. } => input * width,
        Movement::Receive { .. } | Movement::Barrier => 0,
    };
    bytes as u64
}

/// Counts a step as its executor will run it.
pub fn cost(program: &Program) -> Cost {
    let mut cost = Cost {
        parameters: program.graph.parameter_count(),
        flops: ByStage::default(),
        product_flops: ByStage::default(),
        bytes: ByStage::default(),
        memory: memory(program),
        calls: 0,
    };
    null::walk(program, |visit| {
        cost.calls += visit.times;
        cost.flops.add(visit.node.stage, visit.flops * visit.times);
        cost.bytes.add(visit.node.stage, visit.bytes * visit.times);
        if is_product(visit.node) {
            cost.product_flops.add(visit.node.stage, visit.flops * visit.times);
        }
    });
    cost
}

/// Predicted seconds per step: each call takes as long as its multiply-adds or its bytes, whichever is more.
pub fn predict_seconds(program: &Program, rates: &Rates) -> f64 {
    let mut total = 0.0;
    null::walk(program, |visit| {
        let one = rates.seconds(visit.flops, visit.bytes, visit.node.op.work(), visit.threads as f64);
        total += one * (visit.times / visit.lanes) as f64;
    });
    total
}
