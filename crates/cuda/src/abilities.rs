//! What this executor can do with an op, as its calls say.

use crate::host_part::casts_weight;
use kolo_exec::Offload;
use kolo_graph::layout::Abilities;
use kolo_graph::{Graph, Node, Op};
use kolo_ops::cuda_of;

#[derive(Clone, Copy, Debug)]
pub(crate) struct CudaAbilities {
    pub offload: Offload,
}

impl Abilities for CudaAbilities {
    fn in_place(&self, op: &dyn Op) -> Vec<(usize, usize)> {
        cuda_of(op).map_or_else(Vec::new, |op| op.in_place())
    }

    /// The host brings its casts of weights as soon as it has updated them, for the next step.
    fn stays(&self, graph: &Graph, node: &Node) -> bool {
        self.offload != Offload::None && casts_weight(graph, node)
    }
}
