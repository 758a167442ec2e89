//! Attention whose keys and values go round a ring of ranks.

use super::{Choice, Pass};
use crate::partition::cut::Cut;
use kolo_graph::{Graph, Node, Placement, Split, Type};
use kolo_ops::attention::{Attention, AttentionBiasGrad, AttentionGrad};

/// What is wrong with the attention of a model, if it cannot go round a ring.
pub fn unfit_for_ring(graph: &Graph, tokens: (usize, usize)) -> Option<String> {
    graph.nodes.iter().find_map(|node| {
        let attends = node.op.is::<Attention>() || node.op.is::<AttentionGrad>() || node.op.is::<AttentionBiasGrad>();
        let fits = || ring_operands(node, &graph.types(&node.inputs)).is_some_and(|shape| shape == tokens);
        let name = if node.scope.is_empty() { "the model's top" } else { &node.scope };
        (attends && !fits()).then(|| {
            format!("the attention of `{name}` has a bias, other tokens for keys than for queries, or elements that are not floats")
        })
    })
}

/// Samples and tokens of an attention of tokens to themselves, without a bias.
fn ring_operands(node: &Node, inputs: &[Type]) -> Option<(usize, usize)> {
    let (packed, bias) = match (node.op.downcast::<Attention>(), node.op.downcast::<AttentionGrad>()) {
        (Some(op), _) => (op.packed, op.bias),
        (_, Some(op)) => (op.packed, op.bias),
        _ => return None,
    };
    let operands = &inputs[..if packed { 1 } else { 3 }];
    let [samples, tokens, _] = operands[0].shape[..] else { return None };
    let same = operands.iter().all(|ty| ty.dtype.is_float() && ty.shape[..2] == [samples, tokens]);
    (same && !bias).then_some((samples, tokens))
}

impl Pass<'_> {
    /// How a node runs on slices of the tokens if it is an attention of tokens to themselves.
    pub(super) fn ring(&self, node: &Node) -> Option<Choice> {
        let inputs = self.graph.types(&node.inputs);
        let operands = ring_operands(node, &inputs)?;
        if self.rules.tokens != Some(operands) {
            return None;
        }
        let bounds = self.token_cut(&inputs[0].shape)?.bounds;
        let along = |dim: usize| Cut { dim, blocks: 1, bounds: bounds.clone() };
        // The log-sum-exp is [b, h, t], the last but one of a backward's inputs and the last of a forward's outputs.
        if node.op.is::<Attention>() {
            return Some(Choice::Ring { inputs: vec![along(1); inputs.len()], outputs: vec![along(1), along(2)] });
        }
        let mut cuts = vec![along(1); inputs.len()];
        cuts[inputs.len() - 2] = along(2);
        Some(Choice::Ring { inputs: cuts, outputs: vec![along(1); node.outputs.len()] })
    }

    /// Whether the parts of a split run slice by slice: partial results must be added in one order, the split may not keep the
    /// bits of the whole, or parts must know their place and the slots of a ring are no run of tokens.
    pub(super) fn is_sliced(&self, split: &Split) -> bool {
        !split.exact || split.outputs.contains(&Placement::Partial) || self.rules.ring && split.ordered
    }
}
