//! Central storage: one copy of the weights per host, read by all its workers, each of which updates its own run.
//!
//! The optimizer is sharded as in ZeRO stage 1. The weights of all ranks being the same memory, gathering them is only
//! waiting: nobody writes before all have read their last, and nobody reads before all have written.

use crate::data::push_collective;
use crate::mesh::{DATA, Mesh};
use crate::zero::shard_optimizer;
use kolo_graph::Graph;
use kolo_graph::collective::{AllGather, Barrier};
use kolo_graph::rewrite::Rebuild;
use kolo_graph::sources::{Input, Param};

/// Shards the optimizer over ranks that share their parameters' memory.
pub fn share_weights(graph: &Graph, mesh: &Mesh, bucket_bytes: usize) -> Graph {
    let sharded = shard_optimizer(graph, mesh, bucket_bytes);
    let mut rebuild = Rebuild::new(&sharded);
    let reads = read_barrier(&sharded);
    for (at, node) in sharded.nodes.iter().enumerate() {
        // Every update of a parameter reads the learning rate, so it comes after all ranks have computed their gradients.
        if Some(at) == reads.map(|(at, _)| at)
            && let Some((_, lr)) = reads
        {
            let new = rebuild.get(lr);
            let outputs = push_collective(&mut rebuild.new, Barrier { axis: DATA.into() }, vec![new], "weights.read");
            rebuild.set(lr, outputs[0]);
        }
        let gathers = node.op.is::<AllGather>() && node.inputs.iter().any(|id| becomes_param(&sharded, *id));
        match gathers {
            false => {
                rebuild.copy(node);
            }
            true => {
                let inputs = node.inputs.iter().map(|id| rebuild.get(*id)).collect();
                let outputs = push_collective(&mut rebuild.new, Barrier { axis: DATA.into() }, inputs, &node.scope);
                node.outputs.iter().zip(outputs).for_each(|(old, new)| rebuild.set(*old, new));
            }
        }
    }
    rebuild.finish()
}

/// The first node of the update that reads the learning rate, and that rate.
fn read_barrier(graph: &Graph) -> Option<(usize, kolo_graph::ValueId)> {
    let lr = graph.inputs().find(|(_, input): &(_, &Input)| input.name == "lr").map(|(id, _)| id)?;
    graph.nodes.iter().position(|node| node.inputs.contains(&lr)).map(|at| (at, lr))
}

/// Whether a value is a parameter, or what one becomes.
fn becomes_param(graph: &Graph, id: kolo_graph::ValueId) -> bool {
    let output =
        |node: &kolo_graph::Node| node.outputs.iter().any(|out| graph.updates.iter().any(|(_, new)| new == out));
    graph.maker(id).op.is::<Param>()
        || graph.nodes.iter().any(|node| node.op.is::<AllGather>() && node.inputs.contains(&id) && output(node))
}
