//! Rewrites that keep every result to the bit: dead nodes out, equal nodes merged.

use crate::graph::{Graph, Node, NodeId, Value, ValueId};
use crate::sources::{Input, Param, State};
use std::collections::HashMap;

/// Maps the values of an old graph to those of the one being built.
#[derive(Debug)]
pub struct Rebuild<'g> {
    pub old: &'g Graph,
    pub new: Graph,
    map: Vec<Option<ValueId>>,
}

impl<'g> Rebuild<'g> {
    pub fn new(old: &'g Graph) -> Self {
        Self { old, new: Graph::default(), map: vec![None; old.values.len()] }
    }

    /// What an old value has become. It must have been copied or replaced before.
    pub fn get(&self, id: ValueId) -> ValueId {
        self.map[id.0 as usize].expect("a rewrite visits nodes in order")
    }

    pub fn set(&mut self, old: ValueId, new: ValueId) {
        self.map[old.0 as usize] = Some(new);
    }

    /// Copies a node as it is.
    pub fn copy(&mut self, node: &Node) -> NodeId {
        let inputs = node.inputs.iter().map(|id| self.get(*id)).collect();
        let outputs = self.old.types(&node.outputs);
        let id = self.new.push_typed(node.op.clone(), inputs, outputs, node.scope.clone(), node.stage);
        self.new.set_segment(id, node.segment);
        for (slot, old) in node.outputs.iter().enumerate() {
            let new = self.new.node(id).outputs[slot];
            self.set(*old, new);
        }
        id
    }

    /// Takes a node as it is.
    fn take(&mut self, mut node: Node) -> NodeId {
        let id = NodeId(self.new.nodes.len() as u32);
        node.inputs.iter_mut().for_each(|input| *input = self.get(*input));
        for (slot, output) in node.outputs.iter_mut().enumerate() {
            let new = ValueId(self.new.values.len() as u32);
            self.new.values.push(Value { ty: self.old.ty(*output).clone(), node: id, slot });
            self.set(*output, new);
            *output = new;
        }
        self.new.nodes.push(node);
        id
    }

    /// Carries outputs and updates over.
    pub fn finish(mut self) -> Graph {
        let outputs = self.old.outputs.iter().map(|(name, id)| (name.clone(), self.get(*id))).collect();
        let updates = self.old.updates.iter().map(|(state, value)| (self.get(*state), self.get(*value))).collect();
        self.new.outputs = outputs;
        self.new.updates = updates;
        self.new
    }
}

/// Which nodes lead to an output or an update, or do something outside the graph.
pub fn live_nodes(graph: &Graph) -> Vec<bool> {
    let mut live: Vec<bool> = graph.nodes.iter().map(|node| !node.op.pure()).collect();
    let mut mark = |id: ValueId| live[graph.value(id).node.0 as usize] = true;
    graph.outputs.iter().for_each(|(_, id)| mark(*id));
    graph.updates.iter().for_each(|(state, value)| {
        mark(*state);
        mark(*value);
    });
    for at in (0..graph.nodes.len()).rev() {
        if live[at] {
            for input in &graph.nodes[at].inputs {
                live[graph.value(*input).node.0 as usize] = true;
            }
        }
    }
    live
}

/// Drops nodes that lead to nothing.
pub fn eliminate_dead(mut graph: Graph) -> Graph {
    let live = live_nodes(&graph);
    if live.iter().all(|live| *live) {
        return graph;
    }
    let nodes = std::mem::take(&mut graph.nodes);
    let mut rebuild = Rebuild::new(&graph);
    for (node, _) in nodes.into_iter().zip(&live).filter(|(_, live)| **live) {
        rebuild.take(node);
    }
    rebuild.finish()
}

/// Merges nodes with the same op, attributes and inputs.
pub fn merge_common(mut graph: Graph) -> Graph {
    let nodes = std::mem::take(&mut graph.nodes);
    let mut rebuild = Rebuild::new(&graph);
    // By op and inputs first: writing attributes down takes longer than all the rest, and few nodes read the same values.
    let mut seen: HashMap<(&'static str, Vec<ValueId>), Vec<NodeId>> = HashMap::new();
    let mut constants: HashMap<String, NodeId> = HashMap::new();
    for node in nodes {
        let inputs: Vec<ValueId> = node.inputs.iter().map(|id| rebuild.get(*id)).collect();
        let twin = match (node.op.pure() && !is_named(&node), inputs.is_empty()) {
            (false, _) => None,
            (true, true) => constants.get(&node.op.signature()).copied(),
            (true, false) => {
                let known = seen.entry((node.op.name(), inputs)).or_default();
                let same = |id: &&NodeId| {
                    let twin = rebuild.new.node(**id);
                    twin.segment == node.segment && twin.op.signature() == node.op.signature()
                };
                let twin = known.iter().find(same).copied();
                known.extend(twin.is_none().then_some(NodeId(rebuild.new.nodes.len() as u32)));
                twin
            }
        };
        match twin {
            Some(twin) => {
                for (slot, old) in node.outputs.iter().enumerate() {
                    let new = rebuild.new.node(twin).outputs[slot];
                    rebuild.set(*old, new);
                }
            }
            None => {
                let constant = (node.inputs.is_empty() && !is_named(&node)).then(|| node.op.signature());
                let id = rebuild.take(node);
                constants.extend(constant.map(|signature| (signature, id)));
            }
        }
    }
    rebuild.finish()
}

/// Inputs, parameters and states: no two of a kind have the same name.
fn is_named(node: &Node) -> bool {
    node.op.is::<Input>() || node.op.is::<Param>() || node.op.is::<State>()
}
