//! Gradients of weights that are exchanged in every grain, and when they are added to the sums over grains.
//!
//! A graph has those sums at its end. What was exchanged would have to stay until then: twice the bytes of all weights, for ranks
//! that have whole weights and cut images to save memory, or that keep a part of weights whose gradients are summed whole. So each
//! gradient is added to its sum when the next one is exchanged: by then it has arrived, or there was something to do meanwhile.

use super::Lowering;
use crate::partition::plan::{Choice, Need};
use kolo_graph::sources::GrainSum;
use kolo_graph::{Graph, NodeId, Placement, Stage};
use std::collections::BTreeSet;

/// Sums over grains that come before their place in the graph.
pub(super) struct PendingSums {
    /// Of every value.
    readers: Vec<Vec<NodeId>>,
    /// Those whose terms were exchanged last.
    waiting: Vec<NodeId>,
    done: BTreeSet<NodeId>,
}

impl PendingSums {
    pub fn new(graph: &Graph) -> Self {
        Self { readers: graph.readers(), waiting: Vec::new(), done: BTreeSet::new() }
    }
}

/// Whether a sum keeps less of its terms than is exchanged.
fn takes_a_part(sum: &Choice) -> bool {
    let is_cut = |need: &Need| matches!(need, Need::Sharded(_));
    matches!(sum, Choice::Parts(parts) if parts.needs.iter().any(is_cut))
}

impl Lowering<'_> {
    pub(super) fn visit(&mut self, id: NodeId) {
        if self.sums.done.contains(&id) {
            return;
        }
        let (old, plan) = (self.rebuild.old, self.plan);
        let (node, choice) = (old.node(id), &plan.choices[id.0 as usize]);
        self.node(node, choice);
        let Choice::Parts(parts) = choice else { return };
        if self.is_alone() || node.stage != Stage::Backward {
            return;
        }
        let summed = node.outputs.iter().zip(&parts.split.outputs).filter(|(_, placed)| **placed == Placement::Partial);
        let readers = summed.flat_map(|(output, _)| &self.sums.readers[output.0 as usize]);
        let comes_early = |id: &&NodeId| plan.planes || takes_a_part(&plan.choices[id.0 as usize]);
        let sums = readers.filter(|id| old.node(**id).op.is::<GrainSum>()).filter(comes_early);
        let sums: Vec<NodeId> = sums.copied().collect();
        if sums.is_empty() {
            return;
        }
        for id in std::mem::replace(&mut self.sums.waiting, sums) {
            if self.sums.done.insert(id) {
                self.node(old.node(id), &plan.choices[id.0 as usize]);
            }
        }
    }
}
