//! Memory of the copies around exchanges, counted before any is made.

use kolo_graph::collective::Movement;
use kolo_graph::layout::{Arena, BufferPlace, Layout, align};
use kolo_graph::{Graph, Node, NodeId, Type, ValueId};
use std::collections::HashMap;

/// Bytes of memory that [`super::Exchanges`] takes for copies of tensors that do not lie as they travel.
pub fn staged_bytes(graph: &Graph, layout: &Layout, lanes: usize) -> usize {
    let staged = Staged { graph, layout, params: places_of_params(graph) };
    let bytes = |ids: &[NodeId]| -> usize { ids.iter().map(|id| staged.bytes(graph.node(*id))).sum() };
    bytes(&layout.before) + bytes(&layout.grain) * lanes + bytes(&layout.after)
}

/// Where parameters lie in the store, by their values: in the opposite order of the graph.
fn places_of_params(graph: &Graph) -> HashMap<usize, usize> {
    let params: Vec<ValueId> = graph.params().map(|(id, _)| id).collect();
    let mut end = 0;
    let place = |id: &ValueId| {
        let at = end;
        end += align(graph.ty(*id).bytes());
        (id.0 as usize, at)
    };
    params.iter().rev().map(place).collect()
}

struct Staged<'a> {
    graph: &'a Graph,
    layout: &'a Layout,
    params: HashMap<usize, usize>,
}

impl Staged<'_> {
    fn bytes(&self, node: &Node) -> usize {
        let Some(collective) = node.op.collective() else { return 0 };
        let first = |ids: &[ValueId]| ids.first().map(|id| self.graph.ty(*id));
        let (Some(output), input) = (first(&node.outputs), first(&node.inputs)) else { return 0 };
        match (collective.movement, input) {
            (Movement::SumBucket | Movement::ScatterBucket { .. } | Movement::GatherBucket { .. }, _) => {
                self.bucket(&node.outputs)
            }
            (Movement::Gather { dim } | Movement::Join { dim, .. }, Some(input)) if input.shape != output.shape => {
                of_rows(output, dim)
            }
            (Movement::Scatter { dim }, Some(input)) if input.shape != output.shape => of_rows(input, dim),
            (Movement::AllToAll { split, join }, Some(input)) if input.shape != output.shape => {
                of_rows(input, split) + of_rows(output, join)
            }
            (Movement::Halo(halo), Some(input)) => {
                let place = input.bytes() / input.shape[halo.dim].max(1);
                let others = |between: &dyn Fn(usize) -> usize| -> usize {
                    (0..halo.ranks()).filter(|rank| *rank != halo.rank).map(between).sum()
                };
                let sent = others(&|to| halo.between(halo.rank, to).len());
                let received = others(&|from| halo.between(from, halo.rank).len());
                2 * sent.max(received) * place
            }
            _ => 0,
        }
    }

    /// Tensors that travel as one are copied unless they lie side by side.
    fn bucket(&self, ids: &[ValueId]) -> usize {
        let bytes = |id: &ValueId| align(self.graph.ty(*id).bytes());
        let mut ends = ids.iter().map(|id| {
            let BufferPlace { arena, offset, within } = self.layout.places[id.0 as usize]?;
            let base = if arena == Arena::Store { *self.params.get(&offset)? } else { offset };
            Some((arena, base + within, base + within + bytes(id)))
        });
        let Some(Some(mut last)) = ends.next() else { return 0 };
        let follows = |next: Option<(Arena, usize, usize)>| {
            let Some(next) = next else { return false };
            let together = next.0 == last.0 && next.1 == last.2;
            last = next;
            together
        };
        if ends.all(follows) { 0 } else { ids.iter().map(bytes).sum() }
    }
}

/// Bytes of a tensor whose parts along a dim do not lie one behind the other.
fn of_rows(ty: &Type, dim: usize) -> usize {
    if ty.shape[..dim].iter().product::<usize>() > 1 { ty.bytes() } else { 0 }
}
