//! The null executor: walks a step as its executor would run it, calls no kernel, and tells what each call would cost.
//! The planner adds these up; nothing is allocated.

use crate::program::Program;
use kolo_graph::piece::Join;
use kolo_graph::sources::GrainSum;
use kolo_graph::{Node, NodeId, Phase, ValueId};
use std::collections::HashSet;

/// One node of a step that would run.
#[derive(Debug)]
pub struct Visit<'g> {
    pub id: NodeId,
    pub node: &'g Node,
    /// Floating-point operations of one call.
    pub flops: u64,
    /// Bytes one call reads and writes, as if nothing were cached; a gradient that is never stored has none.
    pub bytes: u64,
    /// Calls per step, over all lanes.
    pub times: u64,
    /// Calls that run at the same time.
    pub lanes: u64,
    /// Threads of one call.
    pub threads: usize,
}

/// Visits every node that runs, in order. Views and sources run nothing; what a parameter becomes needs no joining if its
/// pieces were updated where they are.
pub fn walk(program: &Program, mut visit: impl FnMut(Visit<'_>)) {
    let Program { graph, options, layout, .. } = program;
    let phases = graph.phases();
    let unstored = &layout.unstored;
    let is_stored = |id: &ValueId| !unstored.makes(graph.value(*id).node);
    let new_states: HashSet<ValueId> = graph.updates.iter().map(|(_, value)| *value).collect();
    for id in graph.ids() {
        let node = graph.node(id);
        let joined = node.op.is::<Join>() && new_states.contains(&node.outputs[0]);
        let silent = node.op.view() || joined || node.inputs.is_empty();
        if silent || node.op.is::<GrainSum>() && unstored.makes(id) {
            continue;
        }
        let stored = node.inputs.iter().chain(&node.outputs).filter(|id| is_stored(id));
        let (inputs, outputs) = (graph.types(&node.inputs), graph.types(&node.outputs));
        let per_grain = phases[id.0 as usize] == Phase::Grain || node.op.is::<GrainSum>();
        let (times, lanes, threads) = match per_grain {
            true => (program.times(node.segment), options.lanes, options.lane_threads()),
            false => (1, 1, options.threads),
        };
        visit(Visit {
            id,
            node,
            flops: node.op.flops(&inputs, &outputs),
            bytes: stored.map(|id| graph.ty(*id).bytes() as u64).sum(),
            times: times as u64,
            lanes: lanes as u64,
            threads,
        });
    }
}
