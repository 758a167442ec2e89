//! What is computed from parameters alone, once before the grains, is part of every grain instead, or of the update: where
//! ranks keep shares, the whole parameter is there only while a grain uses it.

use kolo_graph::collective::AfterGrains;
use kolo_graph::graph::Phase;
use kolo_graph::rewrite::Rebuild;
use kolo_graph::share::EachGrain;
use kolo_graph::sources::Param;
use kolo_graph::{Graph, Node, Op, ValueId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The same step, in which grains read parameters through [`EachGrain`], and nothing before them reads any. What the update
/// needs of that is computed in the update.
pub(super) fn separate(graph: &Graph) -> Graph {
    let phases = graph.phases();
    let follows = follows_params(graph, &phases);
    let mut separate = Separate { rebuild: Rebuild::new(graph), follows, made: BTreeMap::new() };
    for (node, phase) in graph.nodes.iter().zip(phases) {
        if node.op.is::<Param>() {
            separate.rebuild.copy(node);
        } else if !separate.follows[node.outputs[0].0 as usize] {
            separate.copy(node, phase);
        }
    }
    // A result of parameters alone is one of a grain, or of the step where there are sums.
    let last = if graph.updates.is_empty() { Phase::Grain } else { Phase::After };
    for (_, id) in graph.outputs.iter().filter(|(_, id)| separate.follows[id.0 as usize]) {
        let new = separate.get(*id, last);
        separate.rebuild.set(*id, new);
    }
    for (_, id) in graph.updates.iter().filter(|(_, id)| separate.follows[id.0 as usize]) {
        let new = separate.get(*id, Phase::After);
        separate.rebuild.set(*id, new);
    }
    separate.rebuild.finish()
}

/// For each value, whether it is a parameter or is computed before the grains from one.
fn follows_params(graph: &Graph, phases: &[Phase]) -> Vec<bool> {
    let mut follows = vec![false; graph.values.len()];
    for (node, phase) in graph.nodes.iter().zip(phases) {
        let from = node.inputs.iter().any(|id| follows[id.0 as usize]);
        let own = node.op.is::<Param>() || *phase == Phase::Before && from;
        node.outputs.iter().for_each(|id| follows[id.0 as usize] = own);
    }
    follows
}

struct Separate<'g> {
    rebuild: Rebuild<'g>,
    follows: Vec<bool>,
    /// What was made anew in a phase.
    made: BTreeMap<(ValueId, Phase), ValueId>,
}

impl Separate<'_> {
    fn copy(&mut self, node: &Node, phase: Phase) {
        let reads = |id: &ValueId| self.follows[id.0 as usize];
        if !node.inputs.iter().any(reads) {
            self.rebuild.copy(node);
            return;
        }
        let inputs = node.inputs.iter().map(|id| self.get(*id, phase)).collect();
        let outputs = self.push(Arc::clone(&node.op), inputs, node);
        node.outputs.iter().zip(outputs).for_each(|(old, new)| self.rebuild.set(*old, new));
    }

    /// A value as the nodes of a phase see it. The update reads a parameter itself.
    fn get(&mut self, id: ValueId, phase: Phase) -> ValueId {
        let old = self.rebuild.old;
        let is_param = old.maker(id).op.is::<Param>();
        if !self.follows[id.0 as usize] || is_param && phase == Phase::After {
            return self.rebuild.get(id);
        }
        self.in_phase(id, phase)
    }

    fn in_phase(&mut self, id: ValueId, phase: Phase) -> ValueId {
        if !self.follows[id.0 as usize] {
            return self.rebuild.get(id);
        }
        if let Some(made) = self.made.get(&(id, phase)) {
            return *made;
        }
        let node = self.rebuild.old.maker(id);
        let (op, inputs): (Arc<dyn Op>, Vec<ValueId>) = match node.op.is::<Param>() {
            true if phase == Phase::After => (Arc::new(AfterGrains {}), vec![self.rebuild.get(id)]),
            true => (Arc::new(EachGrain {}), vec![self.rebuild.get(id)]),
            false => (Arc::clone(&node.op), node.inputs.iter().map(|id| self.in_phase(*id, phase)).collect()),
        };
        let outputs = self.push(op, inputs, node);
        for (old, new) in node.outputs.iter().zip(&outputs) {
            self.made.insert((*old, phase), *new);
        }
        self.made[&(id, phase)]
    }

    fn push(&mut self, op: Arc<dyn Op>, inputs: Vec<ValueId>, like: &Node) -> Vec<ValueId> {
        let types = self.rebuild.old.types(&like.outputs);
        let node = self.rebuild.new.push_typed(op, inputs, types, like.scope.clone(), like.stage);
        self.rebuild.new.node(node).outputs.clone()
    }
}
