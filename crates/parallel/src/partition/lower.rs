//! The graph that a rank runs, by a plan.

use super::cut::{Cut, Sharding};
use super::plan::{Choice, Need, PartitionPlan, Parts};
use kolo_graph::collective::{AllToAll, AxisGather, AxisJoin, AxisScatter, AxisSum};
use kolo_graph::rewrite::Rebuild;
use kolo_graph::sources::{Full, GrainSum, Input, Param, State};
use kolo_graph::{DType, Graph, Node, Op, Placement, Region, Stage, Type, ValueId};
use kolo_ops::cast::Cast;
use kolo_ops::concat::Concat;
use kolo_ops::cross_entropy::CrossEntropy;
use kolo_ops::cross_entropy_parts::{CrossEntropyJoin, CrossEntropyPart};
use kolo_ops::elementwise::{Add, Scale};
use kolo_ops::reduce::Reshape;
use kolo_ops::slice::Slice;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use sums::PendingSums;

mod halo;
mod ring;
mod sums;

/// The ranks that share the slices, and one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The axis of the mesh.
    pub axis: String,
    pub ranks: usize,
    pub rank: usize,
}

impl Group {
    /// The slices of a rank.
    fn slices(&self, rank: usize, slices: usize) -> Range<usize> {
        rank * slices / self.ranks..(rank + 1) * slices / self.ranks
    }
}

/// The graph of one rank. The number of ranks divides that of the slices.
pub fn lower(graph: &Graph, plan: &PartitionPlan, group: &Group) -> Graph {
    let own = group.slices(group.rank, plan.slices);
    let sums = PendingSums::new(graph);
    let mut lowering = Lowering { rebuild: Rebuild::new(graph), plan, group, own, made: HashMap::new(), sums };
    for id in graph.ids() {
        lowering.visit(id);
    }
    lowering.finish()
}

/// Values that were made of others: this value, as it is needed, of which slices, and for which stage if it is not worth keeping
/// from one stage to the next.
type Made = HashMap<(ValueId, Need, Range<usize>, Option<Stage>), ValueId>;

struct Lowering<'g> {
    rebuild: Rebuild<'g>,
    plan: &'g PartitionPlan,
    group: &'g Group,
    own: Range<usize>,
    made: Made,
    sums: PendingSums,
}

/// Layer and stage of a node that is made for another.
#[derive(Clone)]
struct For {
    scope: Arc<str>,
    stage: Stage,
}

impl Lowering<'_> {
    fn is_alone(&self) -> bool {
        self.group.ranks == 1
    }

    fn push_all(&mut self, op: Arc<dyn Op>, inputs: Vec<ValueId>, who: &For) -> Vec<ValueId> {
        let new = &mut self.rebuild.new;
        let id = match new.push(op, inputs, who.scope.clone(), who.stage) {
            Ok(id) => id,
            Err(error) => panic!("a part fits where the whole did: {error}"),
        };
        new.node(id).outputs.clone()
    }

    fn push(&mut self, op: impl Op, inputs: Vec<ValueId>, who: &For) -> ValueId {
        self.push_all(Arc::new(op), inputs, who)[0]
    }

    fn ty(&self, id: ValueId) -> Type {
        self.rebuild.new.ty(id).clone()
    }

    fn node(&mut self, node: &Node, choice: &Choice) {
        let who = For { scope: node.scope.clone(), stage: node.stage };
        if let Some(cut) = self.cut_of_input(node) {
            // Samples are small, and every rank reads its part of them.
            let whole = self.push_all(Arc::clone(&node.op), Vec::new(), &who)[0];
            let part = self.narrow_own(whole, &cut, &who);
            return self.rebuild.set(node.outputs[0], part);
        }
        if let Some(op) = self.shard_of_source(node) {
            let new = self.push_all(op, Vec::new(), &who)[0];
            return self.rebuild.set(node.outputs[0], new);
        }
        let outputs = match choice {
            Choice::Classes(cut) => self.cross_entropy(node, cut, &who),
            Choice::Parts(parts) if parts.sliced => self.sliced(node, parts, &who),
            Choice::Ring { inputs, .. } => self.ring(node, inputs, &who),
            Choice::Parts(parts) if !self.is_alone() || self.plan.ring => self.part(node, parts, &who),
            Choice::Parts(_) | Choice::Whole => {
                // What is done to a gradient before its sum belongs to the layer that made it.
                let layer =
                    node.inputs.first().filter(|_| node.op.is::<GrainSum>()).map(|id| self.rebuild.old.maker(*id));
                let by = layer.map_or(who.clone(), |maker| For { scope: maker.scope.clone(), stage: maker.stage });
                let fetched = node.inputs.iter().map(|id| self.fetch(*id, &Need::Replicated, &by)).collect();
                self.push_all(Arc::clone(&node.op), fetched, &who)
            }
        };
        node.outputs.iter().zip(outputs).for_each(|(old, new)| self.rebuild.set(*old, new));
    }

    /// Where an input is cut, if it is and there are other ranks or it is put in another order.
    fn cut_of_input(&self, node: &Node) -> Option<Cut> {
        let cut = node.op.is::<Input>().then(|| self.plan.of(node.outputs[0]).cut()).flatten()?;
        (!self.is_alone() || self.plan.ring).then(|| cut.clone())
    }

    /// This rank's shard of a parameter or a state.
    fn shard_of_source(&self, node: &Node) -> Option<Arc<dyn Op>> {
        if self.is_alone() {
            return None;
        }
        let cut = self.plan.of(*node.outputs.first()?).cut()?;
        let shard = |whole: &[usize]| {
            let mut shape = whole.to_vec();
            shape[cut.dim] = cut.size(&self.own);
            (shape, Region::of_dim(whole, cut.dim, cut.blocks, &cut.range(&self.own)).to_numbers())
        };
        if let Some(param) = node.op.downcast::<Param>() {
            let (shape, region) = shard(&param.shape);
            return Some(Arc::new(Param { shape, region, whole: param.shape.clone(), ..param.clone() }));
        }
        let state = node.op.downcast::<State>()?;
        let (shape, region) = shard(&state.shape);
        let (of, whole) = (state.name.clone(), state.shape.clone());
        Some(Arc::new(State { shape, region, of, whole, ..state.clone() }))
    }

    /// This rank's part of a node.
    fn part(&mut self, node: &Node, parts: &Parts, who: &For) -> Vec<ValueId> {
        let inputs = node.inputs.iter().zip(&parts.needs).map(|(id, need)| self.fetch(*id, need, who)).collect();
        let (first, units) = parts.arrangement.units(&self.own);
        self.push_all(parts.split.part(&node.op, first, units), inputs, who)
    }

    /// A node slice by slice.
    fn sliced(&mut self, node: &Node, parts: &Parts, who: &For) -> Vec<ValueId> {
        let mut slices: Vec<Vec<ValueId>> = Vec::new();
        let op = self.op_of_terms(node, parts);
        for slice in self.own.clone() {
            let inputs = node.inputs.iter().zip(&parts.needs).map(|(id, need)| self.fetch_slice(*id, need, slice, who));
            let inputs: Vec<ValueId> = inputs.collect();
            let place = self.block_in(slice);
            let (first, units) = parts.arrangement.units(&(place..place + 1));
            slices.push(self.push_all(parts.split.part(&op, first, units), inputs, who));
        }
        let placements = parts.split.outputs.iter().enumerate();
        let joined = placements.map(|(slot, placement)| {
            let own: Vec<ValueId> = slices.iter().map(|outputs| outputs[slot]).collect();
            match placement {
                Placement::Partial => {
                    let left = self.plan.of(node.outputs[slot]).cut().cloned();
                    let sum = self.sum(own, left.as_ref(), who);
                    self.cast(sum, self.rebuild.old.ty(node.outputs[slot]).dtype, who)
                }
                Placement::Replicate => own[0],
                _ => {
                    let blocks = self.plan.of(node.outputs[slot]).cut().map_or(1, |cut| cut.blocks);
                    self.join(own, placement.cut().map_or(0, |(dim, _)| dim), blocks, who)
                }
            }
        });
        joined.collect()
    }

    /// What each slice of a node runs: if its results are terms of a sum, f32 whatever the sum is.
    fn op_of_terms(&self, node: &Node, parts: &Parts) -> Arc<dyn Op> {
        let is_term = |(placement, id): (&Placement, &ValueId)| {
            *placement == Placement::Partial && self.rebuild.old.ty(*id).dtype != DType::F32
        };
        let wide = parts.split.outputs.iter().zip(&node.outputs).any(is_term).then(|| node.op.wide()).flatten();
        wide.unwrap_or_else(|| Arc::clone(&node.op))
    }

    /// The value in another type, if it has not that type.
    fn cast(&mut self, id: ValueId, to: DType, who: &For) -> ValueId {
        if self.ty(id).dtype == to { id } else { self.push(Cast { to }, vec![id], who) }
    }

    /// The sum over all slices, of which these are this rank's: a balanced tree. All of it, or this rank's part of a cut.
    fn sum(&mut self, mut terms: Vec<ValueId>, cut: Option<&Cut>, who: &For) -> ValueId {
        while terms.len() > 1 {
            let pairs = terms.chunks(2).map(|pair| match pair {
                [one] => *one,
                pair => self.push(Add {}, pair.to_vec(), who),
            });
            terms = pairs.collect();
        }
        if self.is_alone() {
            return terms[0];
        }
        let (axis, ranks) = (self.group.axis.clone(), self.group.ranks);
        let Some(Cut { dim, blocks, .. }) = cut.cloned() else {
            return self.push(AxisSum { axis, ranks }, terms, who);
        };
        let open = self.open_blocks(terms[0], dim, blocks, who);
        let at = if blocks == 1 { dim } else { dim + 1 };
        let part = self.push(AxisScatter { axis, dim: at, ranks }, vec![open], who);
        self.close_blocks(part, dim, blocks, who)
    }

    /// This rank's slices as one tensor, each of which has its part of every block.
    fn join(&mut self, slices: Vec<ValueId>, dim: usize, blocks: usize, who: &For) -> ValueId {
        if slices.len() == 1 {
            return slices[0];
        }
        let open: Vec<ValueId> = slices.into_iter().map(|id| self.open_blocks(id, dim, blocks, who)).collect();
        let at = if blocks == 1 { dim } else { dim + 1 };
        let joined = self.push(Concat { dim: at }, open, who);
        self.close_blocks(joined, dim, blocks, who)
    }

    /// A dim of several blocks as two dims.
    fn open_blocks(&mut self, id: ValueId, dim: usize, blocks: usize, who: &For) -> ValueId {
        if blocks == 1 {
            return id;
        }
        let mut shape = self.ty(id).shape.to_vec();
        shape[dim] /= blocks;
        shape.insert(dim, blocks);
        self.push(Reshape { shape }, vec![id], who)
    }

    /// The two dims as one.
    fn close_blocks(&mut self, id: ValueId, dim: usize, blocks: usize, who: &For) -> ValueId {
        if blocks == 1 {
            return id;
        }
        let mut shape = self.ty(id).shape.to_vec();
        let inner = shape.remove(dim + 1);
        shape[dim] *= inner;
        self.push(Reshape { shape }, vec![id], who)
    }

    /// A cross-entropy whose classes are cut: what every slice says of the rows, on all ranks, and the loss from that.
    fn cross_entropy(&mut self, node: &Node, cut: &Cut, who: &For) -> Vec<ValueId> {
        let Some(CrossEntropy { ignore, smoothing, mean }) = node.op.downcast().cloned() else {
            unreachable!("the plan chose it for a cross-entropy")
        };
        let targets = self.fetch(node.inputs[1], &Need::Replicated, who);
        let mut numbers = Vec::new();
        for slice in self.own.clone() {
            let logits = self.fetch_slice(node.inputs[0], &Need::Sharded(cut.clone()), slice, who);
            let op = CrossEntropyPart { first: cut.bounds[slice], smoothing: smoothing != 0.0 };
            numbers.push(self.push(op, vec![logits, targets], who));
        }
        let own = self.join(numbers, 0, 1, who);
        let all = match self.is_alone() {
            true => own,
            false => {
                let op = AxisGather { axis: self.group.axis.clone(), dim: 0, ranks: self.group.ranks };
                self.push(op, vec![own], who)
            }
        };
        let sizes = cut.bounds.windows(2).map(|pair| pair[1] - pair[0]).collect();
        self.push_all(Arc::new(CrossEntropyJoin { ignore, smoothing, mean, sizes }), vec![all, targets], who)
    }

    /// A value as a node of this rank needs it.
    fn fetch(&mut self, id: ValueId, need: &Need, who: &For) -> ValueId {
        let (here, own) = (self.rebuild.get(id), self.own.clone());
        if self.is_alone() && !self.plan.ring {
            return here;
        }
        let plan = self.plan;
        match (plan.of(id), need) {
            (Sharding::Sharded(cut), Need::Sharded(wanted)) if cut == wanted => here,
            (Sharding::Replicated, Need::Replicated) => here,
            (Sharding::Replicated, Need::Sharded(cut)) => {
                self.cached(id, need, own, None, |this| this.narrow_own(here, cut, who))
            }
            (Sharding::Sharded(cut), Need::Replicated) => {
                self.cached(id, need, own, None, |this| this.gather(here, cut, who))
            }
            (Sharding::Sharded(from), Need::Sharded(cut)) if !self.plan.ring && self.are_even(from, cut) => {
                self.cached(id, need, own, None, |this| this.exchange(here, from, cut, who))
            }
            (Sharding::Sharded(_), Need::Sharded(cut)) => {
                let whole = self.fetch(id, &Need::Replicated, who);
                self.cached(id, need, own, None, |this| this.narrow_own(whole, cut, who))
            }
            (sharding, Need::Halo(halo)) => {
                let cut = sharding.cut();
                self.cached(id, need, own, Some(who.stage), |this| this.widen(here, cut, halo, who))
            }
            (_, Need::Term) => {
                let whole = self.fetch(id, &Need::Replicated, who);
                if self.own.start == 0 { whole } else { self.zeros_beside(id, whole, who) }
            }
        }
    }

    /// One slice of a value as a node needs it.
    fn fetch_slice(&mut self, id: ValueId, need: &Need, slice: usize, who: &For) -> ValueId {
        let cut = match need {
            Need::Replicated => return self.fetch(id, need, who),
            Need::Term => {
                let whole = self.fetch(id, &Need::Replicated, who);
                return if slice == 0 { whole } else { self.zeros_beside(id, whole, who) };
            }
            Need::Halo(halo) => return self.fetch_reached(id, halo, slice, who),
            Need::Sharded(cut) => cut,
        };
        let own = self.fetch(id, need, who);
        if self.own.len() == 1 {
            return own;
        }
        // Of what this rank has of every block.
        let first = cut.bounds[self.own.start];
        let range = cut.bounds[slice] - first..cut.bounds[slice + 1] - first;
        self.cached(id, need, slice..slice + 1, None, |this| this.narrow(own, cut, range, who))
    }

    fn cached(
        &mut self,
        id: ValueId,
        need: &Need,
        slices: Range<usize>,
        stage: Option<Stage>,
        make: impl FnOnce(&mut Self) -> ValueId,
    ) -> ValueId {
        let key = (id, need.clone(), slices, stage);
        if let Some(made) = self.made.get(&key) {
            return *made;
        }
        let made = make(self);
        self.made.insert(key, made);
        made
    }

    /// Zeros in place of what the first slice alone adds. Other ranks read a frozen parameter all the same: nothing else in a step
    /// would keep it there, and an evaluation, which may be split otherwise, finds what training keeps.
    fn zeros_beside(&mut self, id: ValueId, whole: ValueId, who: &For) -> ValueId {
        let zeros = self.zeros(whole, who);
        if self.own.start == 0 || !self.is_frozen(id) {
            return zeros;
        }
        let nothing = self.push(Scale { factor: 0.0 }, vec![whole], who);
        // A product with zero may be a negative zero; this sum is none.
        self.push(Add {}, vec![zeros, nothing], who)
    }

    /// Whether a value of a training step is a parameter that nothing updates, perhaps in another type.
    fn is_frozen(&self, id: ValueId) -> bool {
        let old = self.rebuild.old;
        let maker = old.maker(id);
        let id = if maker.op.is::<Cast>() { maker.inputs[0] } else { id };
        let is_updated = old.updates.iter().any(|(state, _)| *state == id);
        old.maker(id).op.is::<Param>() && !old.updates.is_empty() && !is_updated
    }

    fn zeros(&mut self, like: ValueId, who: &For) -> ValueId {
        let ty = self.ty(like);
        self.push(Full { value: 0.0, dtype: ty.dtype, shape: ty.shape.to_vec() }, Vec::new(), who)
    }

    /// These elements of every block.
    fn narrow(&mut self, id: ValueId, cut: &Cut, range: Range<usize>, who: &For) -> ValueId {
        let Cut { dim, blocks, .. } = *cut;
        if self.ty(id).shape[dim] == blocks * range.len() {
            return id;
        }
        let open = self.open_blocks(id, dim, blocks, who);
        let at = if blocks == 1 { dim } else { dim + 1 };
        let slice = self.push(Slice { dim: at, start: range.start, len: range.len() }, vec![open], who);
        self.close_blocks(slice, dim, blocks, who)
    }

    /// This rank's slices of a whole tensor.
    fn narrow_own(&mut self, id: ValueId, cut: &Cut, who: &For) -> ValueId {
        let own = self.own.clone();
        match self.plan.ring {
            true => self.slots_of(id, cut, own, who),
            false => self.narrow(id, cut, cut.range(&own), who),
        }
    }

    /// All ranks' shards as one tensor.
    fn gather(&mut self, id: ValueId, cut: &Cut, who: &For) -> ValueId {
        if self.plan.ring {
            return self.gather_slots(id, cut, who);
        }
        self.gather_as_is(id, cut, who)
    }

    fn gather_as_is(&mut self, id: ValueId, cut: &Cut, who: &For) -> ValueId {
        let Cut { dim, blocks, .. } = *cut;
        let (axis, ranks) = (self.group.axis.clone(), self.group.ranks);
        let sizes: Vec<usize> =
            (0..ranks).map(|rank| cut.range(&self.group.slices(rank, self.plan.slices)).len()).collect();
        let open = self.open_blocks(id, dim, blocks, who);
        let at = if blocks == 1 { dim } else { dim + 1 };
        let whole = match sizes.iter().all(|size| *size == sizes[0]) {
            true => self.push(AxisGather { axis, dim: at, ranks }, vec![open], who),
            false => self.push(AxisJoin { axis, dim: at, sizes }, vec![open], who),
        };
        self.close_blocks(whole, dim, blocks, who)
    }

    /// Whether all ranks have equal parts of two cuts along different dims.
    fn are_even(&self, one: &Cut, other: &Cut) -> bool {
        let even = |cut: &Cut| {
            let size = |rank: usize| cut.range(&self.group.slices(rank, self.plan.slices)).len();
            (0..self.group.ranks).all(|rank| size(rank) == size(0))
        };
        one.dim != other.dim && even(one) && even(other)
    }

    /// From one cut to another: every rank hands each other one its part.
    fn exchange(&mut self, id: ValueId, from: &Cut, to: &Cut, who: &For) -> ValueId {
        // With the blocks of both as dims of their own; the later dim first, so that the earlier keeps its number.
        let (first, second) = if from.dim > to.dim { (from, to) } else { (to, from) };
        let open = self.open_blocks(id, first.dim, first.blocks, who);
        let open = self.open_blocks(open, second.dim, second.blocks, who);
        let moved = |cut: &Cut| {
            let before = usize::from(cut.dim == first.dim && second.blocks > 1);
            cut.dim + before + usize::from(cut.blocks > 1)
        };
        let (split, join) = (moved(to), moved(from));
        let op = AllToAll { axis: self.group.axis.clone(), split, join, ranks: self.group.ranks };
        let done = self.push(op, vec![open], who);
        let closed = self.close_blocks(done, second.dim, second.blocks, who);
        self.close_blocks(closed, first.dim, first.blocks, who)
    }

    fn finish(mut self) -> Graph {
        let old = self.rebuild.old;
        let who = For { scope: "".into(), stage: Stage::Update };
        for (name, id) in &old.outputs {
            let whole = self.fetch(*id, &Need::Replicated, &who);
            self.rebuild.new.outputs.push((name.clone(), whole));
        }
        for (state, value) in &old.updates {
            let need = match self.plan.of(*state) {
                Sharding::Replicated => Need::Replicated,
                Sharding::Sharded(cut) => Need::Sharded(cut.clone()),
            };
            let made = self.rebuild.get(*value);
            let mut value = self.fetch(*value, &need, &who);
            if value != made {
                // What was exchanged is not yet where a state can take it from.
                value = self.push(Scale { factor: 1.0 }, vec![value], &who);
            }
            self.rebuild.new.updates.push((self.rebuild.get(*state), value));
        }
        self.rebuild.new
    }
}
