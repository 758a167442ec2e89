//! Tensors that are made where they are packed, or lie packed already.

use super::alias::Part;
use super::align;
use crate::graph::{Graph, NodeId, Phase, ValueId};
use crate::share::{Pack, packed};
use crate::sources::Param;
use std::collections::HashMap;

/// For each value, the packed tensor that it is made in and the bytes before it there: nobody else reads it.
pub(super) fn made_in_packs(graph: &Graph) -> Vec<Option<(ValueId, usize)>> {
    let mut made_in = vec![None; graph.values.len()];
    if !graph.nodes.iter().any(|node| node.op.is::<Pack>()) {
        return made_in;
    }
    let (readers, is_kept, phases) = (graph.readers(), graph.kept_mask(), graph.phases());
    for (id, node) in graph.ids().zip(&graph.nodes).filter(|(_, node)| node.op.is::<Pack>()) {
        let mut start = 0;
        for input in &node.inputs {
            let at = start;
            start += packed(graph.ty(*input).elements()) * size_of::<f32>();
            let maker = graph.maker(*input);
            let own = maker.op.collective().is_none() && !maker.op.aliases() && !maker.inputs.is_empty();
            let same = phases[graph.value(*input).node.0 as usize] == phases[id.0 as usize];
            let once = node.inputs.iter().filter(|other| *other == input).count() == 1;
            let [reader] = readers[input.0 as usize][..] else { continue };
            if own && same && once && reader == id && !is_kept[input.0 as usize] {
                made_in[input.0 as usize] = Some((node.outputs[0], at));
            }
        }
    }
    made_in
}

/// For each packed tensor whose parts are parameters that a store holds one behind the other, the first of them.
pub(super) fn packed_in_store(graph: &Graph, parts: &[Part]) -> HashMap<NodeId, ValueId> {
    let mut offsets: HashMap<ValueId, usize> = HashMap::new();
    let mut bytes = 0;
    for node in graph.nodes.iter().rev().filter(|node| node.op.is::<Param>()) {
        offsets.insert(node.outputs[0], bytes);
        bytes += align(graph.ty(node.outputs[0]).bytes());
    }
    let first = |id: NodeId| {
        let node = graph.node(id);
        let of = |input: &ValueId| {
            let part = parts[input.0 as usize];
            (part.start == 0 && part.end == graph.ty(part.of).bytes()).then_some(part.of)
        };
        let first = of(node.inputs.first()?)?;
        let mut next = *offsets.get(&first)?;
        for input in &node.inputs {
            let param = of(input)?;
            (offsets.get(&param) == Some(&next)).then_some(())?;
            next += align(graph.ty(param).bytes());
        }
        Some((id, first))
    };
    let packs = graph.ids().zip(graph.phases()).filter(|(id, _)| graph.node(*id).op.is::<Pack>());
    packs.filter(|(_, phase)| *phase != Phase::After).filter_map(|(id, _)| first(id)).collect()
}
