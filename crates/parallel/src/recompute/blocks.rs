//! Where a model is cut into blocks.

use kolo_graph::layout::all_shown_by;
use kolo_graph::{Graph, NodeId, Phase, Stage};
use std::collections::BTreeMap;

/// Fewer layers than these are no repetition.
const LAYERS_MIN: usize = 2;

/// The repeated layers of a model, in the order of its forward pass, whose recomputation can be chosen one by one; none of a model
/// that is cut elsewhere.
pub fn layers_of(graph: &Graph) -> Vec<String> {
    let forward = forward_nodes(graph, &graph.phases());
    by_layer(graph, &forward).map(|(_, layers)| layers).unwrap_or_default()
}

/// Nodes of the forward pass that compute something.
pub(super) fn forward_nodes(graph: &Graph, phases: &[Phase]) -> Vec<NodeId> {
    let is_forward = |id: &NodeId| {
        let node = graph.node(*id);
        node.stage == Stage::Forward && phases[id.0 as usize] == Phase::Grain && !node.inputs.is_empty()
    };
    graph.ids().filter(is_forward).collect()
}

/// The block of each node of a graph, given those of its forward pass, and the names of blocks that are layers: its repeated
/// layers, if these hold most of it, or else runs of nodes. What belongs to no layer (a stem, a head) is in no block.
pub(super) fn of(graph: &Graph, forward: &[NodeId]) -> (Vec<Option<usize>>, Vec<String>) {
    if let Some(found) = by_layer(graph, forward) {
        return found;
    }
    let mut block_of = vec![None; graph.nodes.len()];
    for (number, run) in runs(graph, forward).into_iter().enumerate() {
        run.iter().for_each(|id| block_of[id.0 as usize] = Some(number));
    }
    (block_of, Vec::new())
}

/// The layer of each node and the names of layers, if there are enough of them.
fn by_layer(graph: &Graph, forward: &[NodeId]) -> Option<(Vec<Option<usize>>, Vec<String>)> {
    let mut block_of = vec![None; graph.nodes.len()];
    let (mut numbers, mut layers): (BTreeMap<&str, usize>, Vec<String>) = (BTreeMap::new(), Vec::new());
    for id in forward {
        if let Some(layer) = layer_of(&graph.node(*id).scope) {
            let number = *numbers.entry(layer).or_insert_with(|| {
                layers.push(layer.into());
                layers.len() - 1
            });
            block_of[id.0 as usize] = Some(number);
        }
    }
    let inside = block_of.iter().flatten().count();
    (layers.len() >= LAYERS_MIN && 2 * inside >= forward.len()).then_some((block_of, layers))
}

/// The repeated layer that a scope lies in: it ends in the first part that is a number, as `h.3` of `h.3.attn`.
pub fn layer_of(scope: &str) -> Option<&str> {
    let mut end = 0;
    for (at, part) in scope.split('.').enumerate() {
        end += part.len() + usize::from(at > 0);
        if at > 0 && !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            return Some(&scope[..end]);
        }
    }
    None
}

/// Runs of about √n nodes, each of which ends where few bytes cross: at the best point between half and three halves of its
/// length.
fn runs<'f>(graph: &Graph, forward: &'f [NodeId]) -> Vec<&'f [NodeId]> {
    let crossing = crossing_bytes(graph, forward);
    let length = forward.len().isqrt().max(1);
    let (mut runs, mut start) = (Vec::new(), 0);
    while start < forward.len() {
        let window = start + length.div_ceil(2)..=start + length + length / 2;
        let end = match window.contains(&forward.len()) || *window.end() > forward.len() {
            true => forward.len(),
            false => window.min_by_key(|at| crossing[*at]).unwrap_or(forward.len()),
        };
        runs.push(&forward[start..end]);
        start = end;
    }
    runs
}

/// For each point between nodes of the forward pass, the bytes that were made before and are read after it.
fn crossing_bytes(graph: &Graph, forward: &[NodeId]) -> Vec<usize> {
    let shown = all_shown_by(graph);
    let place: BTreeMap<NodeId, usize> = forward.iter().enumerate().map(|(at, id)| (*id, at)).collect();
    let mut last_read: BTreeMap<_, usize> = BTreeMap::new();
    for (at, id) in forward.iter().enumerate() {
        graph.node(*id).inputs.iter().for_each(|input| {
            last_read.insert(shown[input.0 as usize], at);
        });
    }
    // What begins and what ends to cross at each point.
    let mut change = vec![0isize; forward.len() + 2];
    for (value, last) in last_read {
        if let Some(made) = place.get(&graph.value(value).node) {
            let bytes = graph.ty(value).bytes() as isize;
            change[made + 1] += bytes;
            change[last + 1] -= bytes;
        }
    }
    let mut now = 0isize;
    let sums = change.into_iter().map(|change| {
        now += change;
        now as usize
    });
    sums.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_ends_in_its_number() {
        let layers = ["h.3.attn.c_attn", "h.3", "layer2.1.conv1", "encoder.layers.11.mlp.0"].map(layer_of);
        assert_eq!(layers, [Some("h.3"), Some("h.3"), Some("layer2.1"), Some("encoder.layers.11")]);
        assert_eq!(["", "conv1", "h", "3", "h.x3", "a..b"].map(layer_of), [None; 6]);
    }
}
