//! The memory plan: where every value lives, decided before anything runs.
//!
//! Values whose lives do not overlap share memory; an output may take over a dying input's place; a view is its input's
//! place, or a piece of it. The plan is what the executor allocates and what the planner predicts, so the two cannot differ.

mod alias;
mod fit;
mod overlap;
mod packs;
mod planner;
mod unstored;

pub use alias::{all_shown_by, shown_by};
pub use overlap::overlap;
pub use unstored::{Unstored, UnstoredGradients, unstored};

use crate::graph::{Graph, Node, NodeId, Phase, ValueId};
use crate::op::Op;
use crate::sources::{GrainSum, Param};
use crate::types::Type;
use planner::Planner;
use std::collections::HashMap;

/// Every place starts on a cache line, which is also the widest vector.
pub const ALIGNMENT: usize = 64;

/// Rounds up to the alignment.
pub fn align(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Arena {
    /// Parameters and state, which outlive the step; the offset is the value's number.
    Store,
    /// Inputs of one grain, one copy per lane.
    GrainInput,
    /// Inputs of the step.
    StepInput,
    /// Values of one grain, one copy per lane.
    Grain,
    /// Values computed once per step.
    Step,
    /// Sums over grains.
    Sum,
    /// What a device with memory of its own leaves in the host's: made before the grains, and kept beyond the step.
    Host,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferPlace {
    pub arena: Arena,
    pub offset: usize,
    /// Bytes further on, if it is a piece of what lies there.
    pub within: usize,
}

impl BufferPlace {
    fn at(arena: Arena, offset: usize) -> Self {
        Self { arena, offset, within: 0 }
    }

    fn further(self, bytes: usize) -> Self {
        Self { within: self.within + bytes, ..self }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Layout {
    pub before: Vec<NodeId>,
    pub grain: Vec<NodeId>,
    pub after: Vec<NodeId>,
    /// By value; `None` for values of dead nodes and for those that are never stored.
    pub places: Vec<Option<BufferPlace>>,
    pub grain_input_bytes: usize,
    pub step_input_bytes: usize,
    pub grain_bytes: usize,
    pub step_bytes: usize,
    pub sum_bytes: usize,
    pub host_bytes: usize,
    /// (from, to): updates that could not be done in place, copied when the step ends.
    pub copies: Vec<(ValueId, ValueId)>,
    /// Gradients that are made by their update and stored nowhere.
    pub unstored: UnstoredGradients,
    /// What some nodes need while they run, beside their operands.
    pub scratch: HashMap<NodeId, Scratch>,
}

/// Memory that a node has for itself while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    pub place: BufferPlace,
    pub bytes: usize,
}

impl Layout {
    /// Whether a value that runs has no place, because its taker takes it as it is made.
    pub fn is_unstored(&self, graph: &Graph, id: ValueId) -> bool {
        self.unstored.makes(graph.value(id).node)
    }
}

/// What an executor can do with an op beyond reading stored operands and writing its outputs elsewhere. By default nothing.
pub trait Abilities {
    /// Pairs (input, output) that may share one place.
    fn in_place(&self, _op: &dyn Op) -> Vec<(usize, usize)> {
        Vec::new()
    }

    /// Whether it can hand over the op's only output piece by piece as it is made, and store it nowhere.
    fn gives_tiles(&self, _op: &dyn Op, _inputs: &[Type]) -> bool {
        false
    }

    /// The input that it can take in that way.
    fn takes_tiles(&self, _op: &dyn Op) -> Option<usize> {
        None
    }

    /// Whether the host keeps what a node before the grains makes, in its own memory.
    fn on_host(&self, _graph: &Graph, _node: &Node) -> bool {
        false
    }

    /// Whether what a node before the grains makes stays in its place beyond the step: nothing else is ever put there.
    fn stays(&self, _graph: &Graph, _node: &Node) -> bool {
        false
    }

    /// Whether a sum over grains of one term may lie among the values of the grain, and not where sums lie side by side.
    fn scatters_sums(&self) -> bool {
        false
    }

    /// Bytes that a node needs while it runs, beside its operands, in the arena of its phase.
    fn scratch_bytes(&self, _node: NodeId) -> usize {
        0
    }
}

/// An executor that has none of these abilities.
#[derive(Clone, Copy, Debug)]
pub struct NoAbilities;

impl Abilities for NoAbilities {}

/// Plans the memory of a graph that is run with this many grains on this many lanes, by an executor with these abilities.
///
/// If a lane runs a single grain, a sum over grains starts and ends with one term: whoever makes the term writes it straight
/// into the sum's place. If there is one grain in all, the sum is its term, and a gradient that is a product of smaller
/// tensors need not be kept at all: the product waits for the update, which takes it tile by tile. Else, if the executor allows it, it lies
/// among the grain's values, where memory is free by then: nothing is kept for gradients before they are made.
pub fn plan(graph: &Graph, grains: usize, lanes: usize, abilities: &dyn Abilities) -> Layout {
    let mut layout = Layout { places: vec![None; graph.values.len()], ..Layout::default() };
    if grains == 1 {
        layout.unstored = unstored(graph, abilities);
    }
    schedule(graph, &mut layout);
    let sums = Sums {
        of: if grains == lanes { only_sums(graph) } else { vec![None; graph.values.len()] },
        are_scattered: scattered_sums(graph, grains, abilities),
    };
    let sum_places = place_sums(graph, &mut layout, &sums.are_scattered);
    Planner::new(graph, abilities, &layout, sums, sum_places).place_all(&mut layout);
    let place = |id: ValueId| layout.places[id.0 as usize];
    let apart = graph.updates.iter().filter(|(state, value)| place(*state) != place(*value));
    layout.copies = apart.map(|(state, value)| (*value, *state)).collect();
    layout
}

/// The order to run in: each phase in graph order, but a sum over grains right after its term, so that the term's memory
/// is free again at once; a sum of what is exchanged stays where it is, so that others run meanwhile. The order of the sums is
/// the order in which gradients become ready.
fn schedule(graph: &Graph, layout: &mut Layout) {
    let live = crate::rewrite::live_nodes(graph);
    let phases = graph.phases();
    let readers = graph.readers();
    let shown = all_shown_by(graph);
    let follows_term = |id: NodeId| {
        let term = graph.node(id).inputs[0];
        let maker = graph.maker(term);
        let exchanged = graph.maker(shown[term.0 as usize]).op.collective().is_some();
        let per_grain = phases[graph.value(term).node.0 as usize] == Phase::Grain;
        per_grain && !maker.inputs.is_empty() && !exchanged
    };
    let ids: Vec<NodeId> = graph.ids().filter(|id| live[id.0 as usize] && !layout.unstored.makes(*id)).collect();
    for id in ids {
        let node = graph.node(id);
        layout.after.extend(layout.unstored.taken_by(id).map(|taken| taken.product));
        if node.op.is::<GrainSum>() {
            if !follows_term(id) {
                layout.grain.push(id);
            }
            continue;
        }
        match phases[id.0 as usize] {
            Phase::Before => layout.before.push(id),
            Phase::After => layout.after.push(id),
            Phase::Grain => {
                layout.grain.push(id);
                if node.inputs.is_empty() {
                    continue;
                }
                let sums = node.outputs.iter().flat_map(|output| &readers[output.0 as usize]);
                let sums = sums.filter(|id| live[id.0 as usize] && graph.node(**id).op.is::<GrainSum>());
                layout.grain.extend(sums.filter(|id| follows_term(**id)));
            }
        }
    }
}

/// What is known of sums over grains before they have places.
struct Sums {
    /// For each value, the sum that is its only reader and in whose place it can be made.
    of: Vec<Option<ValueId>>,
    /// Whether a value is a sum that lies among the grain's values.
    are_scattered: Vec<bool>,
}

/// The gradients that lie among the grain's values: with a single grain, of a worker that updates its parameters itself and
/// exchanges nothing.
fn scattered_sums(graph: &Graph, grains: usize, abilities: &dyn Abilities) -> Vec<bool> {
    let mut scattered = vec![false; graph.values.len()];
    let exchanges = graph.nodes.iter().any(|node| node.op.collective().is_some());
    let updates_itself = graph.updates.iter().any(|(state, _)| graph.maker(*state).op.is::<Param>());
    if grains != 1 || exchanges || !updates_itself || !abilities.scatters_sums() {
        return scattered;
    }
    let (readers, is_kept) = (graph.readers(), graph.kept_mask());
    for sum in only_sums(graph).into_iter().flatten() {
        let at = sum.0 as usize;
        let is_gradient = graph.maker(sum).op.downcast::<GrainSum>().is_some_and(|sum| !sum.of.is_empty());
        scattered[at] = is_gradient && !is_kept[at] && !readers[at].is_empty();
    }
    scattered
}

/// For each value whose only reader is a sum over grains, that sum.
fn only_sums(graph: &Graph) -> Vec<Option<ValueId>> {
    let (readers, is_output, phases) = (graph.readers(), graph.output_mask(), graph.phases());
    let sum = |at: usize| match readers[at][..] {
        [reader] if graph.node(reader).op.is::<GrainSum>() && !is_output[at] => {
            let made = graph.value(ValueId(at as u32)).node;
            let maker = graph.node(made);
            // What is made once is a term of every grain, and what is exchanged is there only when somebody has waited.
            let in_grain = phases[made.0 as usize] == Phase::Grain && maker.op.collective().is_none();
            (in_grain && !maker.inputs.is_empty() && !maker.op.view()).then_some(graph.node(reader).outputs[0])
        }
        _ => None,
    };
    (0..graph.values.len()).map(sum).collect()
}

/// Sums of gradients lie in the order in which a store holds their parameters, the last made first, which is about the
/// order in which they become ready: a run of parameters and the run of their gradients correspond. Other sums follow.
fn place_sums(graph: &Graph, layout: &mut Layout, are_scattered: &[bool]) -> Vec<Option<usize>> {
    let mut places = vec![None; graph.values.len()];
    for id in sorted_sums(graph, &layout.grain).into_iter().filter(|id| !are_scattered[id.0 as usize]) {
        places[id.0 as usize] = Some(layout.sum_bytes);
        layout.sum_bytes += align(graph.ty(id).bytes());
    }
    places
}

fn sorted_sums(graph: &Graph, grain: &[NodeId]) -> Vec<ValueId> {
    let order: HashMap<&str, usize> = graph.params().enumerate().map(|(at, (_, op))| (op.name.as_str(), at)).collect();
    let sum = |id: &NodeId| Some((graph.node(*id).outputs[0], graph.node(*id).op.downcast::<GrainSum>()?));
    let mut sums: Vec<(ValueId, &GrainSum)> = grain.iter().filter_map(sum).collect();
    // A stable sort: sums that belong to no parameter keep the order in which they become ready, gradients of others' first.
    let others = |sum: &GrainSum| (1 + usize::from(sum.of.is_empty()), 0);
    sums.sort_by_key(|(_, sum)| order.get(sum.of.as_str()).map_or(others(sum), |at| (0, order.len() - at)));
    sums.into_iter().map(|(id, _)| id).collect()
}

/// All sums over grains that run, in the order in which they lie in memory if all are stored.
pub fn sum_order(graph: &Graph) -> Vec<ValueId> {
    let mut layout = Layout::default();
    schedule(graph, &mut layout);
    sorted_sums(graph, &layout.grain)
}
