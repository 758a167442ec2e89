//! Gives every value its place, one node after the other.

use super::alias::{Part, Reads, becoming, first_reads, is_stored, parts, shift};
use super::fit::{Life, first_fit};
use super::packs::{made_in_packs, packed_in_store};
use super::{Abilities, Arena, BufferPlace, Layout, Scratch, Sums, align};
use crate::graph::{Graph, Node, NodeId, ValueId};
use crate::piece::Join;
use crate::sources::{GrainSum, Input};
use std::collections::HashMap;
use std::ops::Range;

/// A run of values that share one place.
#[derive(Clone, Copy, Debug)]
struct Block {
    life: Life,
    arena: Arena,
    offset: usize,
}

pub(super) struct Planner<'g> {
    graph: &'g Graph,
    abilities: &'g dyn Abilities,
    order: Vec<NodeId>,
    /// Where the grain phase starts and ends in `order`.
    grain: Range<usize>,
    /// The last position that reads each value.
    last_read: Vec<usize>,
    blocks: Vec<Block>,
    block_of: Vec<Option<usize>>,
    sums: Sums,
    /// Where each sum over grains lies that lies with the others.
    sum_places: Vec<Option<usize>>,
    /// The state that a value becomes a part of, also through ops that only alias, and the bytes before it.
    becomes: Vec<Option<(ValueId, usize)>>,
    reads: Reads,
    /// The part of another value's memory that each is.
    parts: Vec<Part>,
    /// Whether a node reads a value, or it is an output.
    is_wanted: Vec<bool>,
    /// Bytes before each value in its block.
    shifts: Vec<usize>,
    /// For each value, the packed tensor that it is made in, and the bytes before it there.
    made_in: Vec<Option<(ValueId, usize)>>,
    /// Nodes with memory of their own while they run, and its block.
    scratch: Vec<(NodeId, usize)>,
    /// Packed tensors that lie in the store, from this parameter on.
    in_store: HashMap<NodeId, ValueId>,
}

/// The last position that reads each value. `waits` gives the first that reads any of some values.
pub(super) fn last_reads(graph: &Graph, order: &[NodeId], waits: &impl Fn(&[ValueId]) -> usize) -> Vec<usize> {
    let mut last_read = vec![0; graph.values.len()];
    for (position, id) in order.iter().enumerate() {
        graph.node(*id).inputs.iter().for_each(|input| last_read[input.0 as usize] = position);
    }
    // Whoever reads an alias reads what it shows. What is exchanged is in use until somebody waits for the exchange.
    for node in order.iter().rev().map(|id| graph.node(*id)) {
        let exchanged = if node.op.collective().is_some() { waits(&node.outputs) } else { 0 };
        if exchanged > 0 {
            for id in node.inputs.iter().chain(&node.outputs) {
                let read = &mut last_read[id.0 as usize];
                *read = exchanged.max(*read);
            }
        }
        if node.op.aliases() {
            for (output, input) in node.outputs.iter().zip(&node.inputs) {
                let through = last_read[output.0 as usize];
                let read = &mut last_read[input.0 as usize];
                *read = through.max(*read);
            }
        }
    }
    let end = order.len();
    graph.outputs.iter().for_each(|(_, id)| last_read[id.0 as usize] = end);
    graph.updates.iter().for_each(|(_, id)| last_read[id.0 as usize] = end);
    last_read
}

impl<'g> Planner<'g> {
    pub(super) fn new(
        graph: &'g Graph,
        abilities: &'g dyn Abilities,
        layout: &Layout,
        sums: Sums,
        sum_places: Vec<Option<usize>>,
    ) -> Self {
        let order: Vec<NodeId> =
            [&layout.before, &layout.grain, &layout.after].into_iter().flatten().copied().collect();
        let mut is_wanted = graph.output_mask();
        let read = order.iter().flat_map(|id| &graph.node(*id).inputs);
        read.for_each(|input| is_wanted[input.0 as usize] = true);
        let waits = first_reads(graph, &order);
        let last_read = last_reads(graph, &order, &waits);
        let start = layout.before.len();
        let parts = parts(graph);
        let reads = Reads::new(graph, &order, &parts, &waits);
        Self {
            graph,
            abilities,
            grain: start..start + layout.grain.len(),
            order,
            last_read,
            blocks: Vec::new(),
            block_of: vec![None; graph.values.len()],
            sums,
            scratch: Vec::new(),
            sum_places,
            becomes: becoming(graph),
            reads,
            made_in: made_in_packs(graph),
            in_store: packed_in_store(graph, &parts),
            parts,
            is_wanted,
            shifts: vec![0; graph.values.len()],
        }
    }

    pub(super) fn place_all(mut self, layout: &mut Layout) {
        for position in 0..self.order.len() {
            self.visit(position, layout);
            self.add_scratch(position);
        }
        self.place(layout);
    }

    fn sum_place(&self, sum: ValueId) -> BufferPlace {
        let offset = self.sum_places[sum.0 as usize].expect("every sum that runs has its place");
        BufferPlace::at(Arena::Sum, offset)
    }

    fn arena(&self, position: usize) -> Arena {
        if self.grain.contains(&position) { Arena::Grain } else { Arena::Step }
    }

    /// A value computed before the grains and read by them lives until the last grain is done.
    fn death(&self, id: ValueId, position: usize) -> usize {
        let last = self.last_read[id.0 as usize];
        if !self.grain.contains(&position) && self.grain.contains(&last) { self.grain.end } else { last }
    }

    /// Memory that a node has for itself while it runs.
    fn add_scratch(&mut self, position: usize) {
        let node = self.order[position];
        let bytes = align(self.abilities.scratch_bytes(node));
        if bytes > 0 {
            let life = Life { bytes, birth: position, death: position };
            self.scratch.push((node, self.blocks.len()));
            self.blocks.push(Block { life, arena: self.arena(position), offset: 0 });
        }
    }

    fn visit(&mut self, position: usize, layout: &mut Layout) {
        let node = self.graph.node(self.order[position]);
        let output = node.outputs[0];
        if self.sums.are_scattered[output.0 as usize] {
            // The term is the sum.
            return self.alias(node.inputs[0], output, 0, position, layout);
        }
        if let Some(place) = self.fixed_place(position, layout) {
            layout.places[output.0 as usize] = Some(place);
            return;
        }
        if node.op.aliases() {
            for (input, output) in node.inputs.iter().zip(&node.outputs) {
                self.alias(*input, *output, shift(self.graph, node), position, layout);
            }
            return;
        }
        let joined = node.op.is::<Join>().then(|| self.joined(node, layout)).flatten();
        let packed =
            || self.in_store.get(&self.order[position]).map(|first| BufferPlace::at(Arena::Store, first.0 as usize));
        if let Some(place) = joined.or_else(packed) {
            layout.places[output.0 as usize] = Some(place);
            return;
        }
        if !layout.is_unstored(self.graph, output) && self.block_of[output.0 as usize].is_none() {
            self.place_outputs(position, layout);
        }
    }

    /// Where the output of a node lies that is a source, a sum over grains or kept by the host.
    fn fixed_place(&self, position: usize, layout: &mut Layout) -> Option<BufferPlace> {
        let node = self.graph.node(self.order[position]);
        let output = node.outputs[0];
        let bytes = align(self.graph.ty(output).bytes());
        if is_stored(&*node.op) {
            return Some(BufferPlace::at(Arena::Store, output.0 as usize));
        }
        if node.op.is::<GrainSum>() {
            return Some(self.sum_place(output));
        }
        let (arena, size) = if let Some(input) = node.op.downcast::<Input>() {
            match input.per_step {
                true => (Arena::StepInput, &mut layout.step_input_bytes),
                false => (Arena::GrainInput, &mut layout.grain_input_bytes),
            }
        } else if position < self.grain.start && self.abilities.on_host(self.graph, node) {
            (Arena::Host, &mut layout.host_bytes)
        } else {
            return None;
        };
        *size += bytes;
        Some(BufferPlace::at(arena, *size - bytes))
    }

    /// Gives each output of a node the place of its sum or packed tensor, that of an input it may overwrite, or a new one.
    fn place_outputs(&mut self, position: usize, layout: &mut Layout) {
        let node = self.graph.node(self.order[position]);
        let mut taken = Vec::new();
        for (slot, output) in node.outputs.iter().enumerate() {
            let sum = self.sums.of[output.0 as usize].filter(|sum| !self.sums.are_scattered[sum.0 as usize]);
            if let Some(sum) = sum {
                layout.places[output.0 as usize] = Some(self.sum_place(sum));
                continue;
            }
            if let Some((whole, start)) = self.made_in[output.0 as usize] {
                if self.block_of[whole.0 as usize].is_none() {
                    self.fresh(whole, position);
                }
                self.block_of[output.0 as usize] = self.block_of[whole.0 as usize];
                self.shifts[output.0 as usize] = start;
                continue;
            }
            let heir = self.abilities.in_place(&*node.op).into_iter().find_map(|(input, to)| {
                let input = *node.inputs.get(input).filter(|_| to == slot)?;
                self.can_take(input, *output, position, layout).filter(|_| !taken.contains(&input)).map(|_| input)
            });
            match heir {
                Some(input) => {
                    taken.push(input);
                    self.alias(input, *output, 0, position, layout);
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
        if let Some((state, at)) = becomes {
            // A value that becomes a state goes straight into the state's place if it can; never into a temporary of its own.
            let part = self.parts[input.0 as usize];
            let same = (part.of, part.start) == (state, at) && layout.places[input.0 as usize].is_some();
            return (same && !self.reads.is_read_after(state, part.start..part.end, position)).then_some(());
        }
        if layout.places[input.0 as usize].is_some() {
            return None;
        }
        let block = &self.blocks[self.block_of[input.0 as usize]?];
        let inputs = &graph.node(self.order[position]).inputs;
        let once_read = inputs.iter().filter(|id| **id == input).count() == 1;
        // Not if another piece of the same memory is read here too.
        let apart = |id: &ValueId| {
            let [at, place] = [id, &input].map(|id| (self.block_of[id.0 as usize], self.shifts[id.0 as usize]));
            at.0 != place.0 || at.1 == place.1
        };
        let free = once_read && inputs.iter().all(apart);
        (block.life.death == position && block.arena == self.arena(position) && free).then_some(())
    }

    /// Where all inputs of a join lie, if it is what a state becomes and nobody else reads it, and they lie side by side
    /// where that state is.
    fn joined(&self, node: &Node, layout: &Layout) -> Option<BufferPlace> {
        let output = node.outputs[0];
        let is_wanted = self.is_wanted[output.0 as usize];
        let (state, _) = self.becomes[output.0 as usize].filter(|(_, at)| *at == 0 && !is_wanted)?;
        let start = BufferPlace::at(Arena::Store, state.0 as usize);
        let mut bytes = 0;
        for input in &node.inputs {
            if layout.places[input.0 as usize] != Some(start.further(bytes)) {
                return None;
            }
            bytes += self.graph.ty(*input).bytes();
        }
        Some(start)
    }

    /// `output` is `input`'s memory, from some bytes on.
    fn alias(&mut self, input: ValueId, output: ValueId, shift: usize, position: usize, layout: &mut Layout) {
        layout.places[output.0 as usize] = layout.places[input.0 as usize].map(|place| place.further(shift));
        self.shifts[output.0 as usize] = self.shifts[input.0 as usize] + shift;
        if let Some(block) = self.block_of[input.0 as usize] {
            self.block_of[output.0 as usize] = Some(block);
            let mut death = self.death(output, position).max(position);
            if self.blocks[block].arena == Arena::Step && self.grain.contains(&death) {
                death = self.grain.end;
            }
            let life = &mut self.blocks[block].life;
            life.death = life.death.max(death);
        }
    }

    fn fresh(&mut self, output: ValueId, position: usize) {
        let mut life = Life {
            bytes: align(self.graph.ty(output).bytes()),
            birth: position,
            death: self.death(output, position).max(position),
        };
        if position < self.grain.start && self.abilities.stays(self.graph, self.graph.node(self.order[position])) {
            (life.birth, life.death) = (0, self.order.len());
        }
        let block = Block { life, arena: self.arena(position), offset: 0 };
        self.block_of[output.0 as usize] = Some(self.blocks.len());
        self.blocks.push(block);
    }

    /// Places the blocks of each arena.
    fn place(&mut self, layout: &mut Layout) {
        for arena in [Arena::Grain, Arena::Step] {
            let own: Vec<usize> = (0..self.blocks.len()).filter(|at| self.blocks[*at].arena == arena).collect();
            let lives: Vec<Life> = own.iter().map(|at| self.blocks[*at].life).collect();
            let (offsets, size) = first_fit(&lives);
            own.into_iter().zip(offsets).for_each(|(at, offset)| self.blocks[at].offset = offset);
            match arena {
                Arena::Grain => layout.grain_bytes = size,
                _ => layout.step_bytes = size,
            }
        }
        for (node, block) in &self.scratch {
            let Block { life, arena, offset } = self.blocks[*block];
            layout.scratch.insert(*node, Scratch { place: BufferPlace::at(arena, offset), bytes: life.bytes });
        }
        for (value, block) in self.block_of.iter().enumerate() {
            if let Some(block) = block {
                let block = &self.blocks[*block];
                layout.places[value] = Some(BufferPlace::at(block.arena, block.offset).further(self.shifts[value]));
            }
        }
    }
}
