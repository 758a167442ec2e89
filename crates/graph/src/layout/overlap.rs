//! A check of a layout against the order in which the nodes of a grain really run.

use super::alias::first_reads;
use super::planner::last_reads;
use super::{Arena, Layout};
use crate::graph::{Graph, NodeId, ValueId};
use std::collections::BTreeMap;

/// Two values of a grain that share memory although, in this order, the second is made while the first is still read. The places of
/// a layout come from the order of the graph; whoever runs nodes in another order, such as that of segments, checks it.
pub fn overlap(graph: &Graph, layout: &Layout, order: &[NodeId]) -> Option<(ValueId, ValueId)> {
    let all: Vec<NodeId> = [&layout.before[..], order, &layout.after].concat();
    let last_read = last_reads(graph, &all, &first_reads(graph, &all));
    // What lies in memory, by its first byte: its end, its value.
    let mut held: BTreeMap<usize, (usize, ValueId)> = BTreeMap::new();
    for (position, id) in all.iter().enumerate().skip(layout.before.len()).take(order.len()) {
        let node = graph.node(*id);
        if node.op.aliases() {
            continue;
        }
        for output in &node.outputs {
            let place = layout.places[output.0 as usize].filter(|place| place.arena == Arena::Grain);
            let Some(start) = place.map(|place| place.offset + place.within) else { continue };
            let end = start + graph.ty(*output).bytes();
            while let Some((at, (_, other))) = held.range(..end).next_back().filter(|(_, (to, _))| *to > start) {
                if last_read[other.0 as usize] > position && *other != *output {
                    return Some((*other, *output));
                }
                let at = *at;
                held.remove(&at);
            }
            if end > start {
                held.insert(start, (end, *output));
            }
        }
    }
    None
}
