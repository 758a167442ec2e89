//! Central storage: one copy of the weights per host, read by all its workers, each of which updates its own run.
//!
//! The optimizer is sharded as in ZeRO stage 1. The weights of all ranks being the same memory, gathering them is only
//! waiting: nobody writes before all have read their last, and nobody reads before all have written.

use crate::cut::param_updates;
use crate::data::push_collective;
use crate::mesh::{DATA, Mesh};
use crate::zero::shard_optimizer;
use kolo_graph::collective::{AllGather, Barrier};
use kolo_graph::rewrite::Rebuild;
use kolo_graph::sources::Full;
use kolo_graph::{Graph, Node, Stage, Type, ValueId};
use std::sync::Arc;

/// Shards the optimizer over ranks that share their parameters' memory.
pub fn share_weights(graph: &Graph, mesh: &Mesh, bucket_bytes: usize) -> Graph {
    let sharded = shard_optimizer(graph, mesh, bucket_bytes);
    let updates = param_updates(&sharded);
    let gathers = |node: &Node| node.op.is::<AllGather>() && node.outputs.iter().any(|id| updates.contains(id));
    let lr = sharded.inputs().find(|(_, input)| input.name == "lr").map(|(id, _)| id);
    let reads_lr = |node: &Node| lr.is_some_and(|lr| node.inputs.contains(&lr));
    let mut rebuild = Rebuild::new(&sharded);
    let mut waited = false;
    for node in &sharded.nodes {
        // Every update of a parameter reads the learning rate, so it comes after all ranks have computed their gradients.
        // A rank that updates nothing waits all the same.
        if !waited && (reads_lr(node) || gathers(node)) {
            waited = true;
            let old = lr.filter(|_| reads_lr(node));
            let input = match old {
                Some(lr) => rebuild.get(lr),
                None => zero(&mut rebuild.new),
            };
            let outputs = push_barrier(&mut rebuild.new, vec![input], "weights.read");
            if let Some(lr) = old {
                rebuild.set(lr, outputs[0]);
            }
        }
        if !gathers(node) {
            rebuild.copy(node);
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
