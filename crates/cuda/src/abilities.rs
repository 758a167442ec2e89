//! What this executor can do with an op, as its calls say.

use crate::host_part::casts_weight;
use kolo_exec::Offload;
use kolo_graph::fetch::Fetch;
use kolo_graph::layout::Abilities;
use kolo_graph::{Graph, Node, Op, ValueId};
use kolo_ops::cuda_of;
use std::collections::HashSet;

#[derive(Clone, Debug)]
pub(crate) struct CudaAbilities {
    offload: Offload,
    /// What is fetched from the host's memory.
    fetched: HashSet<ValueId>,
}

impl CudaAbilities {
    pub fn new(graph: &Graph, offload: Offload) -> Self {
        let fetches = graph.nodes.iter().filter(|node| node.op.is::<Fetch>());
        Self { offload, fetched: fetches.map(|node| node.inputs[0]).collect() }
    }
}

impl Abilities for CudaAbilities {
    fn in_place(&self, op: &dyn Op) -> Vec<(usize, usize)> {
        cuda_of(op).map_or_else(Vec::new, |op| op.in_place())
    }

    fn on_host(&self, graph: &Graph, node: &Node) -> bool {
        self.fetched.contains(&node.outputs[0]) && casts_weight(graph, node)
    }

    /// The host brings its casts of weights as soon as it has updated them, for the next step.
    fn stays(&self, graph: &Graph, node: &Node) -> bool {
        self.offload != Offload::None && casts_weight(graph, node)
    }
}
