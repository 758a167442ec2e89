//! Central storage: one copy of the weights per host, read by all its workers, each of which updates its own run.
//!
//! The optimizer is sharded as in ZeRO stage 1. The weights of all ranks being the same memory, gathering them is only
//! waiting: nobody writes before all have read their last, and nobody reads before all have written.

use crate::cut::param_updates;
use crate::data::{BUCKET_MIB, is_shared, push_after_grains, push_collective, read_bucket_bytes};
use crate::mesh::{DATA, Mesh};
use crate::strategy::{Allocation, Facts, Home, Key, KeyValue, Part, Purpose, Refusal, Strategy, StrategyKind};
use crate::zero::{self, shard_optimizer};
use kolo_comm::{Communicator, Fault};
use kolo_exec::{ExchangeError, Memory};
use kolo_graph::collective::{AfterGrains, AllGather, Barrier};
use kolo_graph::graph::Phase;
use kolo_graph::layout::all_shown_by;
use kolo_graph::rewrite::Rebuild;
use kolo_graph::settings::{SettingError, Settings};
use kolo_graph::sources::{Full, Param};
use kolo_graph::{Graph, Node, Stage, Type, ValueId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const CENTRAL: Key = Key {
    name: "central",
    value: KeyValue::Flag { default: false },
    of_job: false,
    doc: "one copy of the weights per host, read by all its workers, each of which updates its own run; needs shared \
          memory; cannot be combined with `zero`",
};

pub const KIND: StrategyKind = StrategyKind {
    name: "central",
    doc: "central storage: the workers of a host share one copy of the weights, and each updates its share",
    keys: &[CENTRAL, BUCKET_MIB],
    read,
};

fn read(settings: &Settings) -> Result<Option<Arc<dyn Strategy>>, SettingError> {
    let chosen = CENTRAL.flag(settings)?;
    let bucket_bytes = read_bucket_bytes(settings)?;
    Ok(chosen.then(|| Arc::new(Central { bucket_bytes }) as Arc<dyn Strategy>))
}

/// Central storage with its settings.
#[derive(Clone, Copy, Debug)]
pub struct Central {
    pub bucket_bytes: usize,
}

/// What to do instead.
const INSTEAD: &str = "write `zero = 1` instead of `central = true`";

impl Strategy for Central {
    fn name(&self) -> &'static str {
        KIND.name
    }
    fn part(&self) -> Part {
        Part::Update
    }
    fn written(&self) -> String {
        "parallel.central = true".into()
    }
    fn check(&self, _: Facts, others: &[&dyn Strategy]) -> Result<(), Refusal> {
        if let Some(other) = others.iter().find(|other| other.name() == zero::KIND.name) {
            let hint = "keep one of the two: central storage shards the optimizer already";
            let written = other.written();
            let message =
                format!("cannot be combined with `{}`", written.strip_prefix("parallel.").unwrap_or(&written));
            return Err(Refusal::of_key(&CENTRAL, message, hint));
        }
        // Each weight has one writer; ranks along another axis would be a second.
        if let Some(other) = others.iter().find(|other| other.shares_model()) {
            let message = format!("cannot be combined with `{}`", other.written());
            return Err(Refusal::of_key(&CENTRAL, message, "keep one of the two"));
        }
        Ok(())
    }
    fn rewrite(&self, graph: Graph, purpose: Purpose, mesh: &Mesh) -> Graph {
        match is_shared(purpose, mesh) {
            true => share_weights(&graph, mesh, self.bucket_bytes),
            false => graph,
        }
    }
    fn home(&self) -> Home {
        Home::OnePerHost
    }
    fn allocate(&self, at: &Allocation<'_>) -> Result<Memory, ExchangeError> {
        memory_at_first(at.world, at.bytes).map_err(|fault| match fault {
            Fault::BadCall(message) => Fault::BadCall(format!("central storage {message}\n  hint: {INSTEAD}")).into(),
            fault => fault.into(),
        })
    }
    fn needs_updates_in_place(&self) -> Option<Refusal> {
        let message = "central storage needs every parameter to be updated in place, but this model reads one later";
        Some(Refusal::new(message, INSTEAD))
    }
}

/// Memory of all ranks of a host, which the first of them has. All ranks call it together.
pub(crate) fn memory_at_first(world: &Communicator, bytes: usize) -> Result<Memory, Fault> {
    let shared = world.allocate_at_first(bytes)?;
    let Some(first) = shared.peer(0, 0) else {
        let message = format!("needs all workers on one host, but they communicate over {}", world.transport());
        return Err(Fault::BadCall(message));
    };
    // SAFETY: a zeroed, page-aligned mapping of at least `bytes` bytes that lives as long as its keeper.
    Ok(unsafe { Memory::kept(first, shared.bytes(), Box::new(shared)) })
}

/// Shards the optimizer over ranks that share their parameters' memory.
pub fn share_weights(graph: &Graph, mesh: &Mesh, bucket_bytes: usize) -> Graph {
    let sharded = shard_optimizer(graph, mesh, bucket_bytes);
    let updates = param_updates(&sharded);
    let gathers = |node: &Node| node.op.is::<AllGather>() && node.outputs.iter().any(|id| updates.contains(id));
    let phases = sharded.phases();
    let shown = all_shown_by(&sharded);
    let is_weight = |id: &ValueId| sharded.maker(shown[id.0 as usize]).op.is::<Param>();
    let new: BTreeSet<ValueId> =
        sharded.nodes.iter().filter(|node| gathers(node)).flat_map(|node| node.inputs.clone()).collect();
    let writes = |node: &Node, phase: Phase| {
        phase == Phase::After && !node.op.is::<AfterGrains>() && node.outputs.iter().any(|id| new.contains(id))
    };
    // The weights that this rank writes, as its updates read them.
    let updates = sharded.nodes.iter().zip(&phases).filter(|(node, phase)| writes(node, **phase));
    let written: BTreeSet<ValueId> =
        updates.flat_map(|(node, _)| node.inputs.iter().copied().filter(is_weight)).collect();
    let mut guarded: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let mut rebuild = Rebuild::new(&sharded);
    let mut waited = false;
    for (node, phase) in sharded.nodes.iter().zip(&phases) {
        // No weight is written before all ranks have run their grains. A rank that writes none waits all the same, and where the
        // others do: after the numbers that updates need have been gathered.
        if !waited && (gathers(node) || writes(node, *phase)) {
            waited = true;
            let mut inputs: Vec<ValueId> = written.iter().map(|id| rebuild.get(*id)).collect();
            if inputs.is_empty() {
                inputs.push(zero(&mut rebuild.new));
            }
            let late = inputs.into_iter().map(|id| push_after_grains(&mut rebuild.new, id)).collect();
            let outputs = push_barrier(&mut rebuild.new, late, "weights.read");
            guarded = written.iter().copied().zip(outputs).collect();
        }
        if !gathers(node) {
            let copy = rebuild.copy(node);
            if writes(node, *phase) {
                for (input, old) in rebuild.new.nodes[copy.0 as usize].inputs.iter_mut().zip(&node.inputs) {
                    *input = guarded.get(old).copied().unwrap_or(*input);
                }
            }
            continue;
        }
        let inputs = node.inputs.iter().map(|id| rebuild.get(*id)).collect();
        let outputs = push_barrier(&mut rebuild.new, inputs, &node.scope);
        node.outputs.iter().zip(outputs).for_each(|(old, new)| rebuild.set(*old, new));
    }
    rebuild.finish()
}

fn push_barrier(graph: &mut Graph, inputs: Vec<ValueId>, name: &str) -> Vec<ValueId> {
    push_collective(graph, Barrier { axis: DATA.into() }, inputs, name)
}

fn zero(graph: &mut Graph) -> ValueId {
    let ty = Type::f32([]);
    let full = Full { value: 0.0, dtype: ty.dtype, shape: Vec::new() };
    let node = graph.push_typed(Arc::new(full), Vec::new(), vec![ty], "".into(), Stage::Update);
    graph.node(node).outputs[0]
}
