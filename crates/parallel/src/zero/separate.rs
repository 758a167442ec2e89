//! What is computed from parameters alone, once before the grains, is part of every grain instead, or of the update: where
//! ranks keep shares, the whole parameter is there only while a grain uses it.

use kolo_graph::collective::{AfterGrains, Send};
use kolo_graph::graph::Phase;
use kolo_graph::rewrite::Rebuild;
use kolo_graph::share::EachGrain;
use kolo_graph::sources::{GrainSum, Param};
use kolo_graph::{Graph, Node, Op, ValueId};
use kolo_ops::reduce::Reshape;
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
    separate.finish()
}

/// For each value, whether it is a parameter or is computed before the grains from one.
fn follows_params(graph: &Graph, phases: &[Phase]) -> Vec<bool> {
    let mut follows = vec![false; graph.values.len()];
    for (node, phase) in graph.nodes.iter().zip(phases) {
        let from = node.inputs.iter().any(|id| follows[id.0 as usize]);
        // What is sent to another stage leaves before the grains.
        let own = node.op.is::<Param>() || *phase == Phase::Before && from && !node.op.is::<Send>();
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
    /// A result of parameters alone is one of a grain, or of the step where there are sums.
    fn finish(mut self) -> Graph {
        let old = self.rebuild.old;
        let has_sums = old.nodes.iter().any(|node| node.op.is::<GrainSum>());
        let mut results: BTreeMap<ValueId, ValueId> = BTreeMap::new();
        for (_, id) in &old.outputs {
            let new = if has_sums { self.get(*id, Phase::After, 0) } else { self.of_grain(*id, 0) };
            results.insert(*id, new);
        }
        let result = |(name, id): &(String, ValueId)| (name.clone(), results[id]);
        let outputs = old.outputs.iter().map(result).collect();
        let update =
            |(state, value): &(ValueId, ValueId)| (self.rebuild.get(*state), self.get(*value, Phase::After, 0));
        let updates = old.updates.iter().map(update).collect();
        let mut new = self.rebuild.new;
        (new.outputs, new.updates) = (outputs, updates);
        new
    }

    /// A value as something that a grain leaves behind: never a parameter itself.
    fn of_grain(&mut self, id: ValueId, segment: u32) -> ValueId {
        let new = self.get(id, Phase::Grain, segment);
        let node = self.rebuild.old.maker(id);
        match node.op.is::<Param>() {
            true => {
                let shape = self.rebuild.old.ty(id).shape.to_vec();
                self.push(Arc::new(Reshape { shape }), vec![new], node, segment)[0]
            }
            false => new,
        }
    }

    fn copy(&mut self, node: &Node, phase: Phase) {
        let reads = |id: &ValueId| self.follows[id.0 as usize];
        if !node.inputs.iter().any(reads) || node.op.is::<Send>() && phase == Phase::Before {
            self.rebuild.copy(node);
            return;
        }
        let inputs = match node.op.is::<GrainSum>() {
            true => node.inputs.iter().map(|id| self.of_grain(*id, node.segment)).collect(),
            false => node.inputs.iter().map(|id| self.get(*id, phase, node.segment)).collect(),
        };
        let outputs = self.push(Arc::clone(&node.op), inputs, node, node.segment);
        node.outputs.iter().zip(outputs).for_each(|(old, new)| self.rebuild.set(*old, new));
    }

    /// A value as the nodes of a phase see it. The update reads a parameter itself.
    fn get(&mut self, id: ValueId, phase: Phase, segment: u32) -> ValueId {
        let old = self.rebuild.old;
        let is_param = old.maker(id).op.is::<Param>();
        if !self.follows[id.0 as usize] || is_param && phase == Phase::After {
            return self.rebuild.get(id);
        }
        self.in_phase(id, phase, segment)
    }

    /// What is made anew in a grain is made in the segment that reads it first: the first segment of a rank may be long over.
    fn in_phase(&mut self, id: ValueId, phase: Phase, segment: u32) -> ValueId {
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
            false => (Arc::clone(&node.op), node.inputs.iter().map(|id| self.in_phase(*id, phase, segment)).collect()),
        };
        let outputs = self.push(op, inputs, node, segment);
        for (old, new) in node.outputs.iter().zip(&outputs) {
            self.made.insert((*old, phase), *new);
        }
        self.made[&(id, phase)]
    }

    fn push(&mut self, op: Arc<dyn Op>, inputs: Vec<ValueId>, like: &Node, segment: u32) -> Vec<ValueId> {
        let types = self.rebuild.old.types(&like.outputs);
        let node = self.rebuild.new.push_typed(op, inputs, types, like.scope.clone(), like.stage);
        self.rebuild.new.set_segment(node, segment);
        self.rebuild.new.node(node).outputs.clone()
    }
}
