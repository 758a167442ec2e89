//! What this executor can do with an op, as its calls say.

use crate::host_part::casts_weight;
use crate::lowering::Lowering;
use kolo_exec::Offload;
use kolo_graph::cuda::{CudaTarget, SCRATCH_ALIGNMENT};
use kolo_graph::fetch::Fetch;
use kolo_graph::layout::Abilities;
use kolo_graph::{Graph, Node, NodeId, Op, ValueId};
use kolo_ops::cuda_of;
use std::collections::HashSet;

/// Scratch of this size has a place among the values of its phase, where memory is free while its node runs. Less comes from one small
/// buffer for all.
const PLACED_BYTES_MIN: usize = 1 << 20;

#[derive(Clone, Debug)]
pub(crate) struct CudaAbilities {
    offload: Offload,
    /// By node.
    scratch_bytes: Vec<usize>,
    /// What is fetched from the host's memory.
    fetched: HashSet<ValueId>,
}

impl CudaAbilities {
    /// For a graph on this GPU.
    pub fn new(graph: &Graph, target: &CudaTarget, offload: Offload) -> Self {
        let lowering = Lowering::new(graph, target, None);
        let placed = |id: NodeId| match lowering.calls(id).map_or(0, |calls| calls.scratch_bytes) {
            // It begins on a multiple of more than values do.
            bytes if bytes >= PLACED_BYTES_MIN => bytes + SCRATCH_ALIGNMENT,
            _ => 0,
        };
        let fetches = graph.nodes.iter().filter(|node| node.op.is::<Fetch>());
        let fetched = fetches.map(|node| node.inputs[0]).collect();
        Self { offload, scratch_bytes: graph.ids().map(placed).collect(), fetched }
    }
}

impl Abilities for CudaAbilities {
    fn in_place(&self, op: &dyn Op) -> Vec<(usize, usize)> {
        cuda_of(op).map_or_else(Vec::new, |op| op.in_place())
    }

    fn on_host(&self, graph: &Graph, node: &Node) -> bool {
        self.fetched.contains(&node.outputs[0]) && casts_weight(graph, node)
    }

    /// The host brings its casts of weights as soon as it has updated them, for the next step.
    fn stays(&self, graph: &Graph, node: &Node) -> bool {
        self.offload != Offload::None && casts_weight(graph, node)
    }

    /// What the host updates lies where sums do.
    fn scatters_sums(&self) -> bool {
        self.offload == Offload::None
    }

    fn scratch_bytes(&self, node: NodeId) -> usize {
        self.scratch_bytes[node.0 as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::scratch_bytes;
    use kolo_graph::layout::{Arena, BufferPlace, Layout, plan};
    use kolo_graph::sources::GrainSum;
    use kolo_graph::{Builder, Init, Type, ValueId};
    use kolo_ops::optim::Adam;
    use kolo_ops::prelude::*;
    use std::ops::Range;

    /// A step of a small network of convolutions.
    fn graph() -> Graph {
        let builder = Builder::new();
        let [lr, scale, step] = ["lr", "scale", "step"].map(|name| builder.step_input(name, Type::f32([])));
        let mut x = builder.input("x", Type::f32([4, 3, 12, 12]));
        let mut params = Vec::new();
        for (at, inputs) in [3, 8, 8].into_iter().enumerate() {
            let weight = builder.param(&format!("conv{at}"), [8, inputs, 3, 3], Init::ONES);
            params.push(weight);
            x = x.conv2d(weight, None, [1, 1], [1, 1], [1, 1], 1).relu();
        }
        let loss = x.mul(x).sum_all();
        for (param, grad) in params.iter().zip(kolo_ops::gradients(&builder, loss, 1.0, &params)) {
            let (name, ty, grad) = (format!("of {:?}", param.id()), param.ty(), grad.unwrap());
            let grad = grad.then(GrainSum { of: name.clone() }, &[]);
            let [m, v] = ["m", "v"].map(|state| builder.state(&format!("{name}.{state}"), ty.clone(), Init::ZEROS));
            let made = builder.apply_all(Adam::default(), &[*param, grad, m, v, lr, scale, step]);
            [*param, m, v].into_iter().zip(made).for_each(|(state, value)| builder.update(state, value));
        }
        builder.output("loss", loss);
        builder.finish().unwrap()
    }

    fn target() -> CudaTarget {
        CudaTarget { convolutions: true, tf32: true, ..CudaTarget::default() }
    }

    /// What shares a byte with another that is alive, told by who makes and who reads what.
    fn conflicts(graph: &Graph, layout: &Layout) -> Vec<String> {
        let order: Vec<NodeId> =
            [&layout.before, &layout.grain, &layout.after].into_iter().flatten().copied().collect();
        let at = |id: NodeId| order.iter().position(|other| *other == id);
        let readers = graph.readers();
        let place_of = |id: &ValueId| layout.places[id.0 as usize];
        let in_place = |node: &Node| place_of(&node.inputs[0]) == place_of(&node.outputs[0]);
        let shows = |node: &Node| node.op.aliases() || node.op.is::<GrainSum>() && in_place(node);
        let mut last: Vec<usize> = vec![0; graph.values.len()];
        for node in order.iter().rev().map(|id| graph.node(*id)) {
            for id in &node.outputs {
                let of = |reader: &NodeId| {
                    let through = graph.node(*reader);
                    let seen = if shows(through) { last[through.outputs[0].0 as usize] } else { 0 };
                    at(*reader).map_or(0, |at| at.max(seen))
                };
                last[id.0 as usize] = readers[id.0 as usize].iter().map(of).max().unwrap_or(0);
            }
        }
        let range = |place: &BufferPlace, bytes: usize| {
            let start = place.offset + place.within;
            (place.arena, start..start + bytes)
        };
        let meet = |a: &(Arena, Range<usize>), b: &(Arena, Range<usize>)| {
            a.0 == b.0 && a.1.start < b.1.end && b.1.start < a.1.end
        };
        // Of each value its birth, death and bytes.
        let mut alive = Vec::new();
        for (number, value) in graph.values.iter().enumerate() {
            let (Some(place), Some(birth)) = (layout.places[number], at(value.node)) else { continue };
            let own = matches!(place.arena, Arena::Grain | Arena::Step) && !shows(graph.node(value.node));
            if own {
                let death = last[number].max(birth);
                alive.push((ValueId(number as u32), birth, death, range(&place, value.ty.bytes())));
            }
        }
        let mut found = Vec::new();
        for (id, birth, death, bytes) in &alive {
            for (other, born, _, others) in &alive {
                let later = born > birth || born == birth && other > id;
                let handed_over = born == death && born > birth && bytes == others;
                if later && born <= death && !handed_over && meet(bytes, others) {
                    found.push(format!("{id:?} and {other:?}"));
                }
            }
            for (node, scratch) in &layout.scratch {
                let when = at(*node).unwrap();
                if (*birth..=*death).contains(&when) && meet(bytes, &range(&scratch.place, scratch.bytes)) {
                    found.push(format!("{id:?} and the scratch of {node:?}"));
                }
            }
        }
        found
    }

    #[test]
    fn gradients_and_scratch_lie_among_activations() {
        let (graph, target) = (graph(), target());
        let abilities = CudaAbilities::new(&graph, &target, Offload::None);
        let layout = plan(&graph, 1, 1, &abilities);
        assert_eq!(conflicts(&graph, &layout), Vec::<String>::new());
        assert_eq!(layout.sum_bytes, 0, "no gradient has memory of its own");
        let sums = graph.ids().filter(|id| graph.node(*id).op.is::<GrainSum>());
        for sum in sums {
            let node = graph.node(sum);
            let [term, place] = [node.inputs[0], node.outputs[0]].map(|id| layout.places[id.0 as usize].unwrap());
            assert_eq!((term, place.arena), (place, Arena::Grain));
        }
        let lowering = Lowering::new(&graph, &target, None).placed(&layout);
        assert!(layout.scratch.len() >= 8, "{:?}", layout.scratch);
        assert!(scratch_bytes(&lowering, &layout) < PLACED_BYTES_MIN);
    }

    #[test]
    fn sums_of_several_terms_and_for_the_host_lie_side_by_side() {
        let (graph, target) = (graph(), target());
        for (grains, offload) in [(2, Offload::None), (1, Offload::Optimizer)] {
            let layout = plan(&graph, grains, 1, &CudaAbilities::new(&graph, &target, offload));
            assert_eq!(conflicts(&graph, &layout), Vec::<String>::new());
            assert!(layout.sum_bytes >= 4 * 8 * (3 + 8 + 8) * 9, "{}", layout.sum_bytes);
        }
    }
}
