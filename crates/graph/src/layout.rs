//! The memory plan: where every value lives, decided before anything runs.
//!
//! Values whose lives do not overlap share memory; an output may take over a dying input's place; a view is its input's
//! place. The plan is what the executor allocates and what the planner predicts, so the two cannot differ.

use crate::graph::{Graph, NodeId, Phase, ValueId};
use crate::sources::{GrainSum, Input, Param, State};
use crate::types::DType;
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
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub arena: Arena,
    pub offset: usize,
}

#[derive(Clone, Debug, Default)]
pub struct Layout {
    pub before: Vec<NodeId>,
    pub grain: Vec<NodeId>,
    pub after: Vec<NodeId>,
    /// By value; `None` for values of dead nodes and for those that are never stored.
    pub places: Vec<Option<Place>>,
    pub grain_input_bytes: usize,
    pub step_input_bytes: usize,
    pub grain_bytes: usize,
    pub step_bytes: usize,
    pub sum_bytes: usize,
    /// (from, to): updates that could not be done in place, copied when the step ends.
    pub copies: Vec<(ValueId, ValueId)>,
    /// Gradients that are made by their update and stored nowhere.
    pub unstored: Vec<Unstored>,
}

/// A gradient that its update takes tile by tile, as a product makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unstored {
    pub product: NodeId,
    pub sum: NodeId,
    pub update: NodeId,
}

impl Unstored {
    /// Whether this node's result is what is stored nowhere.
    pub fn makes(&self, node: NodeId) -> bool {
        node == self.product || node == self.sum
    }
}

impl Layout {
    /// Whether a value that runs has no place, because its taker takes it as it is made.
    pub fn is_unstored(&self, graph: &Graph, id: ValueId) -> bool {
        self.unstored.iter().any(|taken| taken.makes(graph.value(id).node))
    }
}

/// A run of values that share one place.
#[derive(Clone, Debug)]
struct Block {
    bytes: usize,
    birth: usize,
    death: usize,
    arena: Arena,
    offset: usize,
}

/// Plans the memory of a graph that is run with this many grains on this many lanes.
///
/// If a lane runs a single grain, a sum over grains starts and ends with one term: whoever makes the term writes it straight
/// into the sum's place. If there is one grain in all, the sum is its term, and a gradient that is a product of smaller
/// tensors need not be kept at all: the product waits for the update, which takes it tile by tile.
pub fn plan(graph: &Graph, grains: usize, lanes: usize) -> Layout {
    let mut layout = Layout { places: vec![None; graph.values.len()], ..Layout::default() };
    if grains == 1 {
        layout.unstored = unstored(graph);
    }
    schedule(graph, &mut layout);
    let sum_places = place_sums(graph, &mut layout);
    let mut planner = Planner::new(graph, &layout, grains == lanes, sum_places);
    for position in 0..planner.order.len() {
        planner.visit(position, &mut layout);
    }
    planner.place(&mut layout);
    let place = |id: ValueId| layout.places[id.0 as usize];
    let apart = graph.updates.iter().filter(|(state, value)| place(*state) != place(*value));
    layout.copies = apart.map(|(state, value)| (*value, *state)).collect();
    layout
}

/// The gradients, with a single grain, that nobody but their update reads and that take at least as much memory as what
/// they are the product of.
pub fn unstored(graph: &Graph) -> Vec<Unstored> {
    let (live, phases, readers) = (crate::rewrite::live_nodes(graph), graph.phases(), graph.readers());
    let kept = |id: ValueId| {
        let updated = graph.updates.iter().any(|(_, value)| *value == id);
        updated || graph.outputs.iter().any(|(_, output)| *output == id)
    };
    let only_reader = |id: ValueId| match readers[id.0 as usize][..] {
        [reader] if !kept(id) && live[reader.0 as usize] => Some(reader),
        _ => None,
    };
    let bytes = |ids: &[ValueId]| ids.iter().map(|id| graph.ty(*id).bytes()).sum::<usize>();
    let taken = |product: NodeId| {
        let node = graph.node(product);
        let all_f32 = node.inputs.iter().chain(&node.outputs).all(|id| graph.ty(*id).dtype == DType::F32);
        if phases[product.0 as usize] != Phase::Grain || !all_f32 || !node.op.gives_tiles(&graph.types(&node.inputs)) {
            return None;
        }
        let sum = only_reader(node.outputs[0]).filter(|sum| graph.node(*sum).op.is::<GrainSum>())?;
        let gradient = graph.node(sum).outputs[0];
        let update = only_reader(gradient)?;
        let inputs = graph.node(update).inputs.iter().enumerate();
        let mut places = inputs.filter(|(_, input)| **input == gradient).map(|(at, _)| at);
        let takes = places.next() == graph.node(update).op.takes_tiles() && places.next().is_none();
        // What an update changes where it is must not be read meanwhile.
        let shown = |id: &ValueId| shown_by(graph, *id);
        let changed: Vec<ValueId> = graph.node(update).inputs.iter().map(shown).collect();
        let apart = node.inputs.iter().all(|id| !changed.contains(&shown(id)));
        let smaller = bytes(&node.inputs) <= bytes(&node.outputs);
        (takes && apart && smaller).then_some(Unstored { product, sum, update })
    };
    graph.ids().filter(|id| live[id.0 as usize]).filter_map(taken).collect()
}

/// What a value shows, seen through views.
fn shown_by(graph: &Graph, mut id: ValueId) -> ValueId {
    while graph.maker(id).op.view() {
        id = graph.maker(id).inputs[0];
    }
    id
}

/// The order to run in: each phase in graph order, but a sum over grains right after its term, so that the term's memory
/// is free again at once. The order of the sums is the order in which gradients become ready.
fn schedule(graph: &Graph, layout: &mut Layout) {
    let live = crate::rewrite::live_nodes(graph);
    let phases = graph.phases();
    let readers = graph.readers();
    let waits = |id: NodeId| layout.unstored.iter().any(|taken| taken.makes(id));
    let ids: Vec<NodeId> = graph.ids().filter(|id| live[id.0 as usize] && !waits(*id)).collect();
    for id in ids {
        let node = graph.node(id);
        layout.after.extend(layout.unstored.iter().filter(|taken| taken.update == id).map(|taken| taken.product));
        if node.op.is::<GrainSum>() {
            let made = phases[graph.value(node.inputs[0]).node.0 as usize];
            let source = graph.maker(node.inputs[0]).inputs.is_empty();
            if made != Phase::Grain || source {
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
                layout
                    .grain
                    .extend(sums.filter(|reader| live[reader.0 as usize] && graph.node(**reader).op.is::<GrainSum>()));
            }
        }
    }
}

/// For each value whose only reader is a sum over grains, that sum.
fn only_sums(graph: &Graph) -> Vec<Option<ValueId>> {
    let readers = graph.readers();
    let kept = |id: ValueId| graph.outputs.iter().any(|(_, output)| *output == id);
    let sum = |at: usize| match readers[at][..] {
        [reader] if graph.node(reader).op.is::<GrainSum>() && !kept(ValueId(at as u32)) => {
            let maker = graph.maker(ValueId(at as u32));
            (!maker.inputs.is_empty() && !maker.op.view()).then_some(graph.node(reader).outputs[0])
        }
        _ => None,
    };
    (0..graph.values.len()).map(sum).collect()
}

/// Sums of gradients lie in the order in which a store holds their parameters, the last made first, which is about the
/// order in which they become ready: a run of parameters and the run of their gradients correspond. Other sums follow.
fn place_sums(graph: &Graph, layout: &mut Layout) -> Vec<Option<usize>> {
    let mut places = vec![None; graph.values.len()];
    for id in sorted_sums(graph, &layout.grain) {
        places[id.0 as usize] = Some(layout.sum_bytes);
        layout.sum_bytes += align(graph.ty(id).bytes());
    }
    places
}

fn sorted_sums(graph: &Graph, grain: &[NodeId]) -> Vec<ValueId> {
    let order: HashMap<&str, usize> = graph.params().enumerate().map(|(at, (_, op))| (op.name.as_str(), at)).collect();
    let sum = |id: &NodeId| Some((graph.node(*id).outputs[0], graph.node(*id).op.downcast::<GrainSum>()?));
    let mut sums: Vec<(ValueId, &GrainSum)> = grain.iter().filter_map(sum).collect();
    // A stable sort: sums that belong to no parameter keep the order in which they become ready.
    sums.sort_by_key(|(_, sum)| order.get(sum.of.as_str()).map_or((1, 0), |at| (0, order.len() - at)));
    sums.into_iter().map(|(id, _)| id).collect()
}

/// All sums over grains that run, in the order in which they lie in memory if all are stored.
pub fn sum_order(graph: &Graph) -> Vec<ValueId> {
    let mut layout = Layout::default();
    schedule(graph, &mut layout);
    sorted_sums(graph, &layout.grain)
}

/// For each value, the state that it becomes, seen through ops that only alias.
fn becoming(graph: &Graph) -> Vec<Option<ValueId>> {
    let mut becomes = vec![None; graph.values.len()];
    for (state, value) in &graph.updates {
        let mut at = *value;
        becomes[at.0 as usize] = Some(*state);
        while graph.maker(at).op.aliases() {
            at = graph.maker(at).inputs[graph.value(at).slot];
            becomes[at.0 as usize] = Some(*state);
        }
    }
    becomes
}

struct Planner<'g> {
    graph: &'g Graph,
    order: Vec<NodeId>,
    /// Where the grain phase starts and ends in `order`.
    grain: std::ops::Range<usize>,
    /// The last position that reads each value.
    last_read: Vec<usize>,
    blocks: Vec<Block>,
    block_of: Vec<Option<usize>>,
    /// For each value, the sum that is its only reader and in whose place it can be made.
    sum_of: Vec<Option<ValueId>>,
    /// Where each sum over grains lies.
    sum_places: Vec<Option<usize>>,
    /// The state that a value becomes, also through ops that only alias.
    becomes: Vec<Option<ValueId>>,
}

impl<'g> Planner<'g> {
    fn new(graph: &'g Graph, layout: &Layout, one_grain: bool, sum_places: Vec<Option<usize>>) -> Self {
        let order: Vec<NodeId> =
            [&layout.before, &layout.grain, &layout.after].into_iter().flatten().copied().collect();
        let mut last_read = vec![0; graph.values.len()];
        for (position, id) in order.iter().enumerate() {
            for input in &graph.node(*id).inputs {
                last_read[input.0 as usize] = position;
            }
        }
        // Whoever reads an alias reads what it shows.
        for node in order.iter().rev().map(|id| graph.node(*id)).filter(|node| node.op.aliases()) {
            for (output, input) in node.outputs.iter().zip(&node.inputs) {
                let through = last_read[output.0 as usize];
                let read = &mut last_read[input.0 as usize];
                *read = through.max(*read);
            }
        }
        let end = order.len();
        graph.outputs.iter().for_each(|(_, id)| last_read[id.0 as usize] = end);
        graph.updates.iter().for_each(|(_, id)| last_read[id.0 as usize] = end);
        let start = layout.before.len();
        Self {
            graph,
            grain: start..start + layout.grain.len(),
            order,
            last_read,
            blocks: Vec::new(),
            block_of: vec![None; graph.values.len()],
            sum_of: if one_grain { only_sums(graph) } else { vec![None; graph.values.len()] },
            sum_places,
            becomes: becoming(graph),
        }
    }

    fn sum_place(&self, sum: ValueId) -> Place {
        let offset = self.sum_places[sum.0 as usize].expect("every sum that runs has its place");
        Place { arena: Arena::Sum, offset }
    }

    fn arena(&self, position: usize) -> Arena {
        if self.grain.contains(&position) { Arena::Grain } else { Arena::Step }
    }

    /// A value computed before the grains and read by them lives until the last grain is done.
    fn death(&self, id: ValueId, position: usize) -> usize {
        let last = self.last_read[id.0 as usize];
        if !self.grain.contains(&position) && self.grain.contains(&last) { self.grain.end } else { last }
    }

    fn visit(&mut self, position: usize, layout: &mut Layout) {
        let node = self.graph.node(self.order[position]);
        let op = &node.op;
        let output = node.outputs[0];
        let bytes = align(self.graph.ty(output).bytes());
        let fixed = if op.is::<Param>() || op.is::<State>() {
            Some(Place { arena: Arena::Store, offset: output.0 as usize })
        } else if let Some(input) = op.downcast::<Input>() {
            let (arena, size) = match input.per_step {
                true => (Arena::StepInput, &mut layout.step_input_bytes),
                false => (Arena::GrainInput, &mut layout.grain_input_bytes),
            };
            *size += bytes;
            Some(Place { arena, offset: *size - bytes })
        } else if op.is::<GrainSum>() {
            Some(self.sum_place(output))
        } else {
            None
        };
        if fixed.is_some() {
            layout.places[output.0 as usize] = fixed;
            return;
        }
        if op.aliases() {
            for (input, output) in node.inputs.iter().zip(&node.outputs) {
                self.alias(*input, *output, position, layout);
            }
            return;
        }
        if layout.is_unstored(self.graph, output) {
            return;
        }
        let mut taken = Vec::new();
        for (slot, output) in node.outputs.iter().enumerate() {
            if let Some(sum) = self.sum_of[output.0 as usize] {
                layout.places[output.0 as usize] = Some(self.sum_place(sum));
                continue;
            }
            let heir = op.in_place().into_iter().find_map(|(input, to)| {
                let input = *node.inputs.get(input).filter(|_| to == slot)?;
                self.can_take(input, *output, position, layout).filter(|_| !taken.contains(&input)).map(|_| input)
            });
            match heir {
                Some(input) => {
                    taken.push(input);
                    self.alias(input, *output, position, layout);
                }
                None => self.fresh(*output, position),
            }
        }
    }

    /// Whether `output` may overwrite `input` here: nobody reads the input later, and it is not a source, or it is the
    /// very state that the output becomes.
    fn can_take(&self, input: ValueId, output: ValueId, position: usize, layout: &Layout) -> Option<()> {
        let graph = self.graph;
        if graph.ty(input).bytes() != graph.ty(output).bytes() || graph.ty(input).dtype != graph.ty(output).dtype {
            return None;
        }
        let becomes = self.becomes[output.0 as usize];
        if becomes == Some(input) {
            return (self.last_read[input.0 as usize] == position).then_some(());
        }
        // A value that becomes a state goes straight into the state's place if it can; never into a temporary of its own.
        if becomes.is_some() || layout.places[input.0 as usize].is_some() {
            return None;
        }
        let block = &self.blocks[self.block_of[input.0 as usize]?];
        let once_read = graph.node(self.order[position]).inputs.iter().filter(|id| **id == input).count() == 1;
        (block.death == position && block.arena == self.arena(position) && once_read).then_some(())
    }

    fn alias(&mut self, input: ValueId, output: ValueId, position: usize, layout: &mut Layout) {
        layout.places[output.0 as usize] = layout.places[input.0 as usize];
        if let Some(block) = self.block_of[input.0 as usize] {
            self.block_of[output.0 as usize] = Some(block);
            let mut death = self.death(output, position).max(position);
            if self.blocks[block].arena == Arena::Step && self.grain.contains(&death) {
                death = self.grain.end;
            }
            self.blocks[block].death = self.blocks[block].death.max(death);
        }
    }

    fn fresh(&mut self, output: ValueId, position: usize) {
        let block = Block {
            bytes: align(self.graph.ty(output).bytes()),
            birth: position,
            death: self.death(output, position).max(position),
            arena: self.arena(position),
            offset: 0,
        };
        self.block_of[output.0 as usize] = Some(self.blocks.len());
        self.blocks.push(block);
    }

    /// Places the largest blocks first, each at the lowest offset that no overlapping life holds.
    fn place(&mut self, layout: &mut Layout) {
        for arena in [Arena::Grain, Arena::Step] {
            let mut todo: Vec<usize> = (0..self.blocks.len()).filter(|at| self.blocks[*at].arena == arena).collect();
            todo.sort_by_key(|at| (std::cmp::Reverse(self.blocks[*at].bytes), self.blocks[*at].birth));
            let mut placed: Vec<usize> = Vec::new();
            let mut size = 0;
            for at in todo {
                let (bytes, birth, death) = (self.blocks[at].bytes, self.blocks[at].birth, self.blocks[at].death);
                let mut offset = 0;
                for other in placed.iter().map(|other| &self.blocks[*other]) {
                    let together = other.birth <= death && birth <= other.death;
                    if together && other.offset < offset + bytes && offset < other.offset + other.bytes {
                        offset = other.offset + other.bytes;
                    }
                }
                self.blocks[at].offset = offset;
                size = size.max(offset + bytes);
                let slot = placed.partition_point(|other| self.blocks[*other].offset <= offset);
                placed.insert(slot, at);
            }
            match arena {
                Arena::Grain => layout.grain_bytes = size,
                _ => layout.step_bytes = size,
            }
        }
        for (value, block) in self.block_of.iter().enumerate() {
            if let Some(block) = block {
                let block = &self.blocks[*block];
                layout.places[value] = Some(Place { arena: block.arena, offset: block.offset });
            }
        }
    }
}
