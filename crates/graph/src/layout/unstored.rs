//! Gradients that are made by their update and stored nowhere.

use super::Abilities;
use super::alias::all_shown_by;
use crate::graph::{Graph, NodeId, Phase, ValueId};
use crate::sources::GrainSum;
use crate::types::DType;
use std::collections::HashMap;

/// A gradient that its update takes tile by tile, as a product makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unstored {
    pub product: NodeId,
    pub sum: NodeId,
    pub update: NodeId,
}

/// All of a graph.
#[derive(Clone, Debug, Default)]
pub struct UnstoredGradients {
    list: Vec<Unstored>,
    /// Products and sums.
    makers: HashMap<NodeId, usize>,
    updates: HashMap<NodeId, usize>,
}

impl UnstoredGradients {
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Whether this node's result is what is stored nowhere.
    pub fn makes(&self, node: NodeId) -> bool {
        self.makers.contains_key(&node)
    }

    /// What this node takes as it is made.
    pub fn taken_by(&self, update: NodeId) -> Option<&Unstored> {
        self.updates.get(&update).map(|at| &self.list[*at])
    }
}

impl FromIterator<Unstored> for UnstoredGradients {
    fn from_iter<I: IntoIterator<Item = Unstored>>(all: I) -> Self {
        let mut gradients = Self::default();
        for taken in all {
            let at = gradients.list.len();
            gradients.makers.extend([(taken.product, at), (taken.sum, at)]);
            gradients.updates.insert(taken.update, at);
            gradients.list.push(taken);
        }
        gradients
    }
}

/// The gradients, with a single grain, that nobody but their update reads and that take at least as much memory as what
/// they are the product of.
pub fn unstored(graph: &Graph, abilities: &dyn Abilities) -> UnstoredGradients {
    let (live, phases, readers) = (crate::rewrite::live_nodes(graph), graph.phases(), graph.readers());
    let (is_kept, shown) = (graph.kept_mask(), all_shown_by(graph));
    let only_reader = |id: ValueId| match readers[id.0 as usize][..] {
        [reader] if !is_kept[id.0 as usize] && live[reader.0 as usize] => Some(reader),
        _ => None,
    };
    let bytes = |ids: &[ValueId]| ids.iter().map(|id| graph.ty(*id).bytes()).sum::<usize>();
    let taken = |product: NodeId| {
        let node = graph.node(product);
        let all_f32 = node.inputs.iter().chain(&node.outputs).all(|id| graph.ty(*id).dtype == DType::F32);
        let gives = || abilities.gives_tiles(&*node.op, &graph.types(&node.inputs));
        if phases[product.0 as usize] != Phase::Grain || !all_f32 || !gives() {
            return None;
        }
        let sum = only_reader(node.outputs[0]).filter(|sum| graph.node(*sum).op.is::<GrainSum>())?;
        let gradient = graph.node(sum).outputs[0];
        let update = only_reader(gradient)?;
        let inputs = graph.node(update).inputs.iter().enumerate();
        let mut places = inputs.filter(|(_, input)| **input == gradient).map(|(at, _)| at);
        let takes = places.next() == abilities.takes_tiles(&*graph.node(update).op) && places.next().is_none();
        // What an update changes where it is must not be read meanwhile.
        let shown = |id: &ValueId| shown[id.0 as usize];
        let changed: Vec<ValueId> = graph.node(update).inputs.iter().map(shown).collect();
        let apart = node.inputs.iter().all(|id| !changed.contains(&shown(id)));
        let smaller = bytes(&node.inputs) <= bytes(&node.outputs);
        (takes && apart && smaller).then_some(Unstored { product, sum, update })
    };
    graph.ids().filter(|id| live[id.0 as usize]).filter_map(taken).collect()
}
