//! Which nodes of a block are computed again.

use super::{Known, Recompute};
use kolo_graph::layout::all_shown_by;
use kolo_graph::{ValueId, Work};
use std::collections::BTreeSet;

/// A node that runs again has to save at least this part of the bytes that it makes: a norm is not repeated for its statistics.
const SAVED_PART: usize = 8;

/// For each node, whether the backward pass runs it again, given what is computed again of each block.
///
/// Nodes are taken from the last to the first, so that of each it is known who needs what it makes. One is run again if this
/// saves enough bytes: those that are needed of it, less those that would have to be kept in their stead.
pub(super) fn again(known: &Known<'_>, of_blocks: &[Recompute]) -> Vec<bool> {
    let graph = known.graph;
    let choice = Choice { known, of_blocks, kept: crossing(known) };
    let mut needed = vec![false; graph.values.len()];
    for (at, node) in graph.nodes.iter().enumerate().filter(|(at, _)| known.is_backward(*at)) {
        debug_assert!(known.block_of[at].is_none());
        node.inputs.iter().for_each(|id| needed[id.0 as usize] = true);
    }
    let mut again = vec![false; graph.nodes.len()];
    for (at, node) in graph.nodes.iter().enumerate().rev().filter(|(at, _)| known.block_of[*at].is_some()) {
        let is_needed = node.outputs.iter().any(|id| needed[id.0 as usize]);
        // A view costs nothing, and follows whatever it shows.
        if is_needed && choice.may_repeat(at) && (node.op.view() || choice.repeats(at, &needed)) {
            again[at] = true;
            node.inputs.iter().for_each(|id| needed[id.0 as usize] = true);
        }
    }
    again
}

/// For each value, whether the forward pass itself takes it out of the block that makes it, seen through views.
fn crossing(known: &Known<'_>) -> Vec<bool> {
    let (graph, shown) = (known.graph, all_shown_by(known.graph));
    let mut kept = graph.kept_mask();
    for (at, node) in graph.nodes.iter().enumerate().filter(|(at, _)| !known.is_backward(*at)) {
        // A sum over grains takes its term at once.
        if known.phases[at] == kolo_graph::Phase::Grain {
            for id in &node.inputs {
                let made = known.block_of[known.maker(shown[id.0 as usize])];
                kept[shown[id.0 as usize].0 as usize] |= made != known.block_of[at];
            }
        }
    }
    for value in 0..kept.len() {
        kept[value] |= kept[shown[value].0 as usize];
    }
    kept
}

struct Choice<'k> {
    known: &'k Known<'k>,
    of_blocks: &'k [Recompute],
    /// What is kept whatever is chosen, by value.
    kept: Vec<bool>,
}

impl Choice<'_> {
    /// What is computed again of the block of a node.
    fn chosen(&self, at: usize) -> Recompute {
        self.known.block_of[at].map_or(Recompute::None, |block| self.of_blocks[block])
    }

    /// Whether a node of a block may run twice: not if it acts outside the graph, and if it exchanges something only under `full`.
    fn may_repeat(&self, at: usize) -> bool {
        let node = &self.known.graph.nodes[at];
        let chosen = match self.chosen(at) {
            Recompute::Blocks | Recompute::Full => true,
            Recompute::Selective => node.op.work() == Work::Stream,
            Recompute::None => false,
        };
        chosen && if node.op.collective().is_some() { self.repeats_exchanges(at) } else { node.op.pure() }
    }

    fn repeats_exchanges(&self, at: usize) -> bool {
        self.chosen(at) == Recompute::Full && !self.known.layers.is_empty()
    }

    /// Whether to run this node again. Where exchanges are repeated, the answer has to be that of every rank: no size decides.
    fn repeats(&self, at: usize, needed: &[bool]) -> bool {
        if self.repeats_exchanges(at) {
            let outputs = &self.known.graph.nodes[at].outputs;
            return outputs.iter().any(|id| needed[id.0 as usize] && !self.kept[id.0 as usize]);
        }
        self.is_worth(at, needed)
    }

    fn bytes(&self, id: ValueId) -> usize {
        self.known.graph.ty(id).bytes()
    }

    /// Whether to run this node again saves enough of what is needed of it.
    fn is_worth(&self, at: usize, needed: &[bool]) -> bool {
        let node = &self.known.graph.nodes[at];
        let wanted = node.outputs.iter().filter(|id| needed[id.0 as usize] && !self.kept[id.0 as usize]);
        let saved: usize = wanted.map(|id| self.bytes(*id)).sum();
        let made: usize = node.outputs.iter().map(|id| self.bytes(*id)).sum();
        let least = (made / SAVED_PART).max(1);
        saved >= least && self.bytes_instead(at, needed, saved) + least <= saved
    }

    /// Bytes that would have to be kept, and are not so far, to run this node again; no more than `limit` are counted.
    fn bytes_instead(&self, at: usize, needed: &[bool], limit: usize) -> usize {
        let (graph, block) = (self.known.graph, self.known.block_of[at]);
        let mut seen = BTreeSet::new();
        let mut todo = graph.nodes[at].inputs.clone();
        let mut bytes = 0;
        while let Some(value) = todo.pop() {
            let maker = self.known.maker(value);
            let free = self.kept[value.0 as usize] || needed[value.0 as usize];
            if free || self.known.block_of[maker] != block || !seen.insert(value) {
                continue;
            }
            match self.may_repeat(maker) {
                true => todo.extend(&graph.nodes[maker].inputs),
                false => bytes += self.bytes(value),
            }
            if bytes >= limit {
                break;
            }
        }
        bytes
    }
}
