//! Recomputation (activation checkpointing): values of the forward pass are computed again where the backward pass needs
//! them, instead of being kept until then. A graph → graph rewrite like any other strategy.
//!
//! The model is cut into blocks (`blocks`): its repeated layers, or runs of about √n nodes. What crosses from one block to
//! another is kept. Of what the backward pass reads of a block's inside, `choose` says what is computed again; its nodes are
//! copied to just before the first node that reads one, into its segment of a pipeline: their lives are short.
//!
//! The copies are the same ops on the same values, so no bit changes; dropout draws its mask again from the same counters.
//! They are also what [`merge_common`](kolo_graph::rewrite::merge_common) takes for doubles: nothing may merge after this.
//!
//! What is computed again may differ from layer to layer ([`RecomputePlan`]): a layer that keeps everything is a block of which
//! nothing runs again.
//!
//! An exchange between ranks is repeated under `full` alone: it costs the time of the link once more. Otherwise its result is kept,
//! which is as large as what every rank has of a block's input, times the ranks where these share its tokens. Ranks have to repeat
//! the same exchanges in the same order, whatever sizes their parts have: under `full`, what runs again follows from who reads what,
//! not from bytes, and a model that has no layers, and is cut where few bytes cross, repeats none.

mod blocks;
mod choose;
mod plan;

pub use blocks::{layer_of, layers_of};
pub use plan::{RecomputePlan, table_text};

use kolo_graph::rewrite::Rebuild;
use kolo_graph::{Graph, Node, NodeId, Phase, Stage, ValueId};
use std::collections::BTreeMap;

/// What the backward pass computes again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// What is cheap for its size: elementwise ops, norms, dropout. Results of products are kept.
    Selective,
    /// Whole blocks, from their inputs. Results of exchanges inside them are kept.
    Blocks,
    /// Whole layers, exchanges and all: of a layer only its input is kept.
    Full,
}

impl Recompute {
    /// From the one that takes the least time to the one that takes the least memory.
    pub const ALL: [Recompute; 4] = [Recompute::None, Recompute::Selective, Recompute::Blocks, Recompute::Full];
    /// How a job file writes them; the default comes first.
    pub const NAMES: [&'static str; 4] = ["none", "blocks", "selective", "full"];

    /// Those that differ: without exchanges inside layers, `full` is `blocks`.
    pub fn that_differ(exchanges_in_layers: bool) -> &'static [Recompute] {
        if exchanges_in_layers { &Self::ALL } else { &Self::ALL[..Self::ALL.len() - 1] }
    }

    pub fn name(self) -> &'static str {
        match self {
            Recompute::None => "none",
            Recompute::Blocks => "blocks",
            Recompute::Full => "full",
            Recompute::Selective => "selective",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }
}

/// The training step `graph`, which was tidied and whose ops are not fused yet, with some of its forward pass computed again.
pub fn recompute(graph: Graph, plan: &RecomputePlan) -> Graph {
    if plan.is_nothing() {
        return graph;
    }
    let known = Known::of(&graph);
    let again = choose::again(&known, &known.of_blocks(plan));
    if !again.contains(&true) {
        return graph;
    }
    let mut rewrite = Rewrite { rebuild: Rebuild::new(&graph), again: &again, copies: BTreeMap::new() };
    for (at, node) in graph.nodes.iter().enumerate() {
        if known.is_backward(at) {
            rewrite.copy_reading_again(NodeId(at as u32));
        } else {
            rewrite.rebuild.copy(node);
        }
    }
    rewrite.rebuild.finish()
}

/// What is asked of a graph again and again.
struct Known<'g> {
    graph: &'g Graph,
    phases: Vec<Phase>,
    /// The block of each node, if it is in one.
    block_of: Vec<Option<usize>>,
    /// The layers that the blocks are; empty if the model has none.
    layers: Vec<String>,
}

impl<'g> Known<'g> {
    fn of(graph: &'g Graph) -> Self {
        let phases = graph.phases();
        let forward = blocks::forward_nodes(graph, &phases);
        let (block_of, layers) = blocks::of(graph, &forward);
        Self { graph, phases, block_of, layers }
    }

    /// What is computed again of each block.
    fn of_blocks(&self, plan: &RecomputePlan) -> Vec<Recompute> {
        let blocks = self.block_of.iter().flatten().max().map_or(0, |last| last + 1);
        (0..blocks).map(|block| self.layers.get(block).map_or(plan.usual(), |layer| plan.of(layer))).collect()
    }

    /// Whether a node of a grain belongs to the backward pass.
    fn is_backward(&self, at: usize) -> bool {
        self.graph.nodes[at].stage == Stage::Backward && self.phases[at] == Phase::Grain
    }

    /// The number of the node that makes a value.
    fn maker(&self, id: ValueId) -> usize {
        self.graph.value(id).node.0 as usize
    }
}

struct Rewrite<'g> {
    rebuild: Rebuild<'g>,
    /// By node.
    again: &'g [bool],
    /// Old values and those that are computed again.
    copies: BTreeMap<ValueId, ValueId>,
}

impl Rewrite<'_> {
    /// Copies a node of the backward pass, after what it reads was computed again.
    fn copy_reading_again(&mut self, id: NodeId) {
        let old = self.rebuild.old;
        let node = old.node(id);
        for id in self.missing(&node.inputs) {
            let made = self.push(old.node(id), node.segment);
            self.copies.extend(old.node(id).outputs.iter().copied().zip(made));
        }
        let made = self.push(node, node.segment);
        node.outputs.iter().zip(made).for_each(|(old, new)| self.rebuild.set(*old, new));
    }

    /// The nodes that have to run again, and have not yet, before these values can be read; in order.
    fn missing(&self, values: &[ValueId]) -> Vec<NodeId> {
        let old = self.rebuild.old;
        let mut found = Vec::new();
        let mut todo = values.to_vec();
        let mut seen = std::collections::BTreeSet::new();
        while let Some(value) = todo.pop() {
            let maker = old.value(value).node;
            if self.again[maker.0 as usize] && !self.copies.contains_key(&value) && seen.insert(maker) {
                found.push(maker);
                todo.extend(&old.node(maker).inputs);
            }
        }
        found.sort_unstable();
        found
    }

    /// Appends a node to the backward pass, as part of this segment of a grain. What it makes:
    fn push(&mut self, node: &Node, segment: u32) -> Vec<ValueId> {
        let inputs = node.inputs.iter().map(|id| self.latest(*id)).collect();
        let types = self.rebuild.old.types(&node.outputs);
        let graph = &mut self.rebuild.new;
        let id = graph.push_typed(node.op.clone(), inputs, types, node.scope.clone(), Stage::Backward);
        graph.set_segment(id, segment);
        graph.node(id).outputs.clone()
    }

    /// What the backward pass reads for a value.
    fn latest(&self, id: ValueId) -> ValueId {
        self.copies.get(&id).copied().unwrap_or_else(|| self.rebuild.get(id))
    }
}

#[cfg(test)]
mod tests;
