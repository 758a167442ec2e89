//! Which values are sharded along an axis, and how every node is split.
//!
//! Nodes are visited in order. A node follows the shards that its inputs have, or, in the forward pass, starts to shard a
//! parameter; of the splits that do, it takes the one that moves the fewest bytes and leaves the least work undivided. So the
//! first of two layers is split by columns and the second by rows, attention by heads, a table by its rows. Where a node needs
//! its input in blocks (queries, keys and values side by side), whoever made it is arranged accordingly, and all is visited
//! again. At the end, what is computed whole only to be cut is computed cut.

use super::cut::{Arrangement, Cut, Sharding};
use kolo_graph::sources::{GrainSum, Input, Param, State};
use kolo_graph::{Graph, Node, NodeId, Placement, Split, Stage, Type, ValueId, Work};
use kolo_ops::cast::Cast;
use kolo_ops::cross_entropy::CrossEntropy;
use kolo_ops::embedding::Embedding;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

mod planes;
mod ring;
pub use ring::unfit_for_ring;

/// Passes over a graph: each one settles at least one arrangement.
const PASSES_MAX: usize = 64;
/// How many operations cost as much as a byte that moves.
const FLOPS_PER_BYTE: u64 = 16;

/// What decides beside the graph.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// How parameters and states lie, by name, whatever the graph suggests.
    pub fixed: BTreeMap<String, Sharding>,
    /// Names of parameters that stay whole.
    pub whole: Vec<String>,
    /// Samples and tokens of a grain, if sums over the slices of activations are left in slices of the tokens.
    pub tokens: Option<(usize, usize)>,
    /// Tokens are cut from the start, and parameters are not: layers have slices of the tokens, and what needs all tokens is split
    /// otherwise.
    pub by_tokens: bool,
    /// With `by_tokens`, whatever can be split by tokens is, even where another split or all ranks could compute it for less. So the
    /// plan follows from which dims are tokens alone, and not from sizes that depend on who shares layers.
    pub strict: bool,
    /// With `by_tokens`, attention is split by tokens as well: keys and values go round a ring. Slices of the tokens are blocks of
    /// them in slots ([`kolo_ops::attention::ring`]).
    pub ring: bool,
    /// Planes `[n, c, h, w]` are cut along rows or columns, from the images on.
    pub planes: Option<Planes>,
}

/// How planes are cut.
#[derive(Clone, Debug, Default)]
pub struct Planes {
    /// The dim of `[n, c, h, w]`.
    pub dim: usize,
    /// Scopes of layers that have whole planes.
    pub whole: Vec<String>,
    /// Scopes of layers that cut whole planes, as those after a layer that has them whole.
    pub starts: Vec<String>,
}

/// What a node's input must be.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Need {
    Replicated,
    Sharded(Cut),
    /// The first slice has it, and all others have zeros.
    Term,
    /// Of a dim, each slice has these places.
    Halo(Halo),
}

/// The places of a dim that each slice reads; those of a run of slices go from the first's first to the last's last.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Halo {
    pub dim: usize,
    pub ranges: Arc<[Range<usize>]>,
}

impl Halo {
    pub fn range(&self, slices: &Range<usize>) -> Range<usize> {
        self.ranges[slices.start].start..self.ranges[slices.end - 1].end
    }
}

/// How a node is run.
#[derive(Clone, Debug)]
pub enum Choice {
    /// By every rank, on whole inputs.
    Whole,
    /// In parts.
    Parts(Parts),
    /// A cross-entropy whose classes are cut so.
    Classes(Cut),
    /// Attention, or its backward pass, on slices of the tokens: where each input is cut, and each output.
    Ring { inputs: Vec<Cut>, outputs: Vec<Cut> },
}

#[derive(Clone, Debug)]
pub struct Parts {
    pub split: Split,
    pub(crate) arrangement: Arrangement,
    pub needs: Vec<Need>,
    /// It runs slice by slice: partial results must be added in one order, or the split does not keep the bits of the whole.
    pub sliced: bool,
}

/// The plan of a graph for so many slices.
#[derive(Clone, Debug)]
pub struct PartitionPlan {
    pub slices: usize,
    /// Of every value.
    pub shardings: Vec<Sharding>,
    /// Of every node.
    pub choices: Vec<Choice>,
    /// Slices are slots of a ring: what is cut has them in their order, what is whole has its tokens as they are.
    pub ring: bool,
    /// Slices are tiles of planes.
    pub planes: bool,
}

impl PartitionPlan {
    pub fn of(&self, id: ValueId) -> &Sharding {
        &self.shardings[id.0 as usize]
    }

    /// The parameters and states that are sharded, by name, and those that are not.
    pub fn named(&self, graph: &Graph) -> BTreeMap<String, Sharding> {
        let name = |node: &Node| {
            let param = node.op.downcast::<Param>().map(|op| op.name.clone());
            param.or_else(|| node.op.downcast::<State>().map(|op| op.name.clone()))
        };
        let all = graph.nodes.iter().filter_map(|node| Some((name(node)?, self.of(node.outputs[0]).clone())));
        all.collect()
    }
}

/// Makes the plan.
pub fn plan(graph: &Graph, slices: usize, rules: &Rules) -> PartitionPlan {
    let mut arranged: HashMap<NodeId, Arrangement> = HashMap::new();
    for _ in 0..PASSES_MAX {
        let mut pass = Pass::new(graph, slices, rules, &arranged);
        for id in graph.ids() {
            pass.visit(id);
        }
        let mut wanted = std::mem::take(&mut pass.wanted);
        wanted.retain(|(id, _)| !arranged.contains_key(id));
        if wanted.is_empty() {
            return pass.finish();
        }
        drop(pass);
        for (id, arrangement) in wanted {
            arranged.entry(id).or_insert(arrangement);
        }
    }
    Pass::new(graph, slices, rules, &HashMap::new()).whole()
}

/// The splits of a node by which its inputs are cut without a halo.
fn splits_of(node: &Node, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
    let mut splits = node.op.splits(inputs, outputs);
    splits.retain(|split| split.reach.is_none());
    splits
}

/// Where parameters are to be found.
struct Params<'g> {
    by_name: HashMap<&'g str, ValueId>,
    /// In their order.
    by_scope: HashMap<&'g str, Vec<ValueId>>,
    /// Those that stay whole.
    whole: HashSet<&'g str>,
}

impl<'g> Params<'g> {
    fn new(graph: &'g Graph, rules: &'g Rules) -> Self {
        let mut params = Self { by_name: HashMap::new(), by_scope: HashMap::new(), whole: HashSet::new() };
        for (id, op) in graph.params() {
            params.by_name.entry(&op.name).or_insert(id);
            params.by_scope.entry(&graph.maker(id).scope).or_default().push(id);
        }
        params.whole.extend(rules.whole.iter().map(String::as_str));
        params
    }
}

struct Pass<'g> {
    graph: &'g Graph,
    slices: usize,
    rules: &'g Rules,
    arranged: &'g HashMap<NodeId, Arrangement>,
    /// `None`: a parameter or state that nobody has used yet.
    shardings: Vec<Option<Sharding>>,
    choices: Vec<Choice>,
    readers: Vec<Vec<NodeId>>,
    params: Params<'g>,
    /// Arrangements that would fit those who read a node's outputs.
    wanted: Vec<(NodeId, Arrangement)>,
}

impl<'g> Pass<'g> {
    fn new(graph: &'g Graph, slices: usize, rules: &'g Rules, arranged: &'g HashMap<NodeId, Arrangement>) -> Self {
        let shardings = vec![Some(Sharding::Replicated); graph.values.len()];
        let (readers, params) = (graph.readers(), Params::new(graph, rules));
        Self { graph, slices, rules, arranged, shardings, choices: Vec::new(), readers, params, wanted: Vec::new() }
    }

    /// Nothing is split.
    fn whole(self) -> PartitionPlan {
        let shardings = vec![Sharding::Replicated; self.graph.values.len()];
        let choices = vec![Choice::Whole; self.graph.nodes.len()];
        PartitionPlan { slices: self.slices, shardings, choices, ring: false, planes: false }
    }

    fn get(&self, id: ValueId) -> Option<&Sharding> {
        self.shardings[id.0 as usize].as_ref()
    }

    fn cut_of(&self, id: ValueId) -> Option<&Cut> {
        self.get(id).and_then(Sharding::cut)
    }

    fn visit(&mut self, id: NodeId) {
        let node = self.graph.node(id);
        if node.outputs.iter().any(|id| self.copied_param(*id).is_some_and(|param| self.get(param).is_none())) {
            // It lies as its parameter does, which nobody has used yet.
            self.shardings[node.outputs[0].0 as usize] = None;
            self.choices.push(Choice::Whole);
            return;
        }
        let choice = match self.source(node) {
            true => Choice::Whole,
            false => self.choose(id, node),
        };
        self.settle(node, &choice);
        self.choices.push(choice);
    }

    /// Notes how a parameter or a state lies, if that is said already; whether the node is one.
    fn source(&mut self, node: &Node) -> bool {
        if self.image(node) {
            return true;
        }
        if let Some(input) = node.op.downcast::<Input>().filter(|input| self.rules.by_tokens && !input.per_step) {
            let cut = self.rules.tokens.filter(|(samples, tokens)| input.shape[..] == [*samples, *tokens]);
            if let Some(cut) = cut.and_then(|_| self.token_cut(&input.shape)) {
                self.shardings[node.outputs[0].0 as usize] = Some(Sharding::Sharded(cut));
            }
            return true;
        }
        let (name, is_param) = match (node.op.downcast::<Param>(), node.op.downcast::<State>()) {
            (Some(param), _) => (&param.name, true),
            (_, Some(state)) => (&state.name, false),
            _ => return false,
        };
        let slot = node.outputs[0];
        let known = match self.rules.fixed.get(name) {
            Some(sharding) => Some(sharding.clone()),
            None if self.rules.by_tokens || self.params.whole.contains(name.as_str()) => Some(Sharding::Replicated),
            // A statistic lies as the parameters of its layer do.
            None if !is_param => self.neighbour(node),
            None => None,
        };
        self.shardings[slot.0 as usize] = known;
        true
    }

    /// The parameter that a value is in another type.
    fn copied_param(&self, id: ValueId) -> Option<ValueId> {
        let maker = self.graph.maker(id);
        let param = maker.op.is::<Cast>().then(|| maker.inputs[0])?;
        self.graph.maker(param).op.is::<Param>().then_some(param)
    }

    /// Notes how a value lies that nobody has used yet. A parameter and its copies in other types lie alike.
    fn assign(&mut self, id: ValueId, sharding: &Sharding) {
        let param = self.copied_param(id).unwrap_or(id);
        for reader in self.readers[param.0 as usize].clone() {
            let copy = self.graph.node(reader).outputs[0];
            if self.get(copy).is_none() && self.copied_param(copy) == Some(param) {
                self.shardings[copy.0 as usize] = Some(sharding.clone());
                let parts = sharding.cut().and_then(|cut| self.parts_with(self.graph.node(reader), cut));
                self.choices[reader.0 as usize] = parts.map_or(Choice::Whole, Choice::Parts);
            }
        }
        self.shardings[param.0 as usize].get_or_insert_with(|| sharding.clone());
    }

    /// How a sharded parameter of the same layer and shape lies.
    fn neighbour(&self, node: &Node) -> Option<Sharding> {
        if node.scope.is_empty() {
            return None;
        }
        let ty = self.graph.ty(node.outputs[0]);
        let before = |id: &&ValueId| (self.graph.value(**id).node.0 as usize) < self.choices.len();
        let mut params = self.params.by_scope.get(&*node.scope)?.iter().take_while(before);
        let same = params.find(|other| self.graph.ty(**other) == ty && self.cut_of(**other).is_some())?;
        self.get(*same).cloned()
    }

    fn choose(&mut self, id: NodeId, node: &Node) -> Choice {
        if let Some(cut) = self.classes(node) {
            return Choice::Classes(cut);
        }
        // A gradient lies as its weight does: what the update makes needs no exchange.
        if let Some(sharding) = node.op.downcast::<GrainSum>().and_then(|sum| self.sharding_of_param(&sum.of)) {
            let cut = sharding.cut().and_then(|cut| self.parts_with(node, cut));
            return cut.map_or(Choice::Whole, Choice::Parts);
        }
        if let Some(choice) = self.rules.ring.then(|| self.ring(node)).flatten() {
            return choice;
        }
        if let Some(choice) = self.on_planes(node) {
            return choice;
        }
        let inputs = self.graph.types(&node.inputs);
        let outputs = self.graph.types(&node.outputs);
        let mut best = (self.cost_whole(node, &inputs, &outputs), Choice::Whole);
        // Whatever multiplies by a parameter is shared if it can be.
        if self.can_start(node) && node.inputs.iter().any(|id| self.is_unused_param(*id)) {
            best.0 = u64::MAX;
        }
        if node.inputs.iter().all(|id| self.get(*id) == Some(&Sharding::Replicated)) {
            return best.1;
        }
        let starts = best.0 == u64::MAX;
        if self.rules.strict || self.stays_where_it_is(node) {
            best.0 = u64::MAX;
        }
        let only_tokens = self.rules.strict && self.can_keep_tokens(node, (&inputs, &outputs));
        for split in splits_of(node, &inputs, &outputs) {
            let shards =
                |(id, placement): (&ValueId, &Placement)| placement.cut().is_some() && self.is_unused_param(*id);
            if starts && !node.inputs.iter().zip(&split.inputs).any(shards) {
                continue;
            }
            let Some(parts) = self.parts(id, node, split, (&inputs, &outputs)) else { continue };
            if self.rules.by_tokens && node.op.work() == Work::Product && !self.keeps_tokens(&parts, &outputs) {
                continue;
            }
            if only_tokens && !self.is_by_tokens(node, &parts, &outputs) {
                continue;
            }
            let cost = self.cost(node, &parts, &inputs, &outputs);
            if cost < best.0 {
                best = (cost, Choice::Parts(parts));
            }
        }
        if self.rules.by_tokens {
            self.exchange(node, (&inputs, &outputs), &mut best);
        }
        if matches!(best.1, Choice::Whole) {
            self.request_blocks(node, &inputs, &outputs);
        }
        best.1
    }

    /// Considers splits that no input is cut for yet: those that give slices of the tokens, or for an op that has none, any.
    fn exchange(&self, node: &Node, (inputs, outputs): (&[Type], &[Type]), best: &mut (u64, Choice)) {
        let (mut others, mut has_tokens) = (Vec::new(), false);
        for split in splits_of(node, inputs, outputs) {
            for arrangement in self.arrangements(&split) {
                let whole = split.exact && !split.ordered && !split.outputs.contains(&Placement::Partial);
                let Some(parts) = self.parts_of(node, split.clone(), arrangement, (inputs, outputs)) else { continue };
                let by_tokens = self.is_by_tokens(node, &parts, outputs);
                let cost = self.cost(node, &parts, inputs, outputs);
                has_tokens |= by_tokens;
                if by_tokens && cost < best.0 {
                    *best = (cost, Choice::Parts(parts));
                } else if whole {
                    others.push((cost, parts));
                }
            }
        }
        // Units of work that stand for themselves, such as heads; samples are shared by nobody.
        let units =
            others.into_iter().filter(|(_, parts)| parts.split.outputs[0].cut().is_some_and(|(dim, _)| dim > 0));
        if matches!(best.1, Choice::Whole)
            && !has_tokens
            && !self.rules.ring
            && let Some((cost, parts)) = units.min_by_key(|(cost, _)| *cost).filter(|(cost, _)| *cost < best.0)
        {
            *best = (cost, Choice::Parts(parts));
        }
    }

    /// Whether these parts make slices of the tokens, or terms of a sum over them.
    fn is_by_tokens(&self, node: &Node, parts: &Parts, outputs: &[Type]) -> bool {
        let Parts { split, arrangement, needs, .. } = parts;
        let cut = |(id, need): (&ValueId, &Need)| !matches!(need, Need::Sharded(_)) || self.is_token_cut(*id, need);
        if split.outputs.contains(&Placement::Partial) && node.inputs.iter().zip(needs).all(cut) {
            return true;
        }
        let made = split.outputs[0]
            .cut()
            .and_then(|(dim, _)| arrangement.cut(split.outputs[0], outputs[0].shape[dim], split.size));
        made.is_some() && made == self.token_cut(&outputs[0].shape)
    }

    /// Whether some split of a node makes slices of the tokens, or a sum over them.
    fn can_keep_tokens(&self, node: &Node, (inputs, outputs): (&[Type], &[Type])) -> bool {
        let keeps = |split: Split| {
            let mut all = self.arrangements(&split).into_iter();
            all.any(|arrangement| {
                let parts = self.parts_of(node, split.clone(), arrangement, (inputs, outputs));
                parts.is_some_and(|parts| self.is_by_tokens(node, &parts, outputs))
            })
        };
        splits_of(node, inputs, outputs).into_iter().any(keeps)
    }

    /// The ways to deal out the units of a split: in runs, or if they are rows of all samples, in runs of each sample's.
    fn arrangements(&self, split: &Split) -> Vec<Arrangement> {
        let even = Arrangement::even(split.size, self.slices);
        let rows = self.rules.tokens.filter(|(samples, tokens)| *samples > 1 && samples * tokens == split.size);
        let by_sample = rows.and_then(|(samples, tokens)| {
            Some(Arrangement { blocks: samples, ..Arrangement::even(tokens, self.slices)? })
        });
        even.into_iter().chain(by_sample).collect()
    }

    /// Whether the products of these parts are slices of the tokens, or terms of a sum over them.
    fn keeps_tokens(&self, parts: &Parts, outputs: &[Type]) -> bool {
        let kept = |(placement, ty): (&Placement, &Type)| {
            let Some((dim, _)) = placement.cut() else { return *placement == Placement::Partial };
            let cut = parts.arrangement.cut(*placement, ty.shape[dim], parts.split.size);
            cut.is_some() && cut == self.token_cut(&ty.shape)
        };
        parts.split.outputs.iter().zip(outputs).all(kept)
    }

    fn is_token_cut(&self, id: ValueId, need: &Need) -> bool {
        matches!(need, Need::Sharded(cut) if self.token_cut(&self.graph.ty(id).shape).as_ref() == Some(cut))
    }

    /// Where a tensor of this shape is cut if its tokens are.
    fn token_cut(&self, shape: &[usize]) -> Option<Cut> {
        let (samples, tokens) = self.rules.tokens.filter(|(_, tokens)| tokens.is_multiple_of(self.slices))?;
        let bounds = (0..=self.slices).map(|slice| slice * tokens / self.slices).collect();
        match shape {
            [first, second, ..] if (*first, *second) == (samples, tokens) => Some(Cut { dim: 1, blocks: 1, bounds }),
            [rows, _] if *rows == samples * tokens => Some(Cut { dim: 0, blocks: samples, bounds }),
            _ => None,
        }
    }

    /// Where the classes of a cross-entropy are cut, if they are.
    fn classes(&self, node: &Node) -> Option<Cut> {
        node.op.downcast::<CrossEntropy>()?;
        let cut = self.cut_of(node.inputs[0])?;
        let last = self.graph.ty(node.inputs[0]).rank() - 1;
        (cut.dim == last && cut.blocks == 1).then(|| cut.clone())
    }

    /// The parts of a node along a split: `None` if nothing suggests it, or it cannot be cut so.
    fn parts(&self, id: NodeId, node: &Node, split: Split, (inputs, outputs): (&[Type], &[Type])) -> Option<Parts> {
        let arrangement = self.arrangement(id, node, &split, inputs)?;
        self.parts_of(node, split, arrangement, (inputs, outputs))
    }

    fn parts_of(
        &self,
        node: &Node,
        split: Split,
        arrangement: Arrangement,
        (inputs, outputs): (&[Type], &[Type]),
    ) -> Option<Parts> {
        if split.ordered && arrangement.blocks != 1 {
            return None;
        }
        let need = |(placement, ty): (&Placement, &Type)| match placement {
            Placement::Partial => Need::Term,
            Placement::Replicate | Placement::Halo(_) => Need::Replicated,
            cut => {
                let (dim, _) = cut.cut().unwrap_or((0, 1));
                arrangement.cut(*cut, ty.shape[dim], split.size).map_or(Need::Replicated, Need::Sharded)
            }
        };
        let needs: Vec<Need> = split.inputs.iter().zip(inputs).map(need).collect();
        let sliced = self.is_sliced(&split);
        // Terms of a sum are f32, also of one that is a half.
        let is_wide = node.op.wide().is_some();
        let summed = |(placement, ty): (&Placement, &Type)| {
            *placement != Placement::Partial || ty.dtype == kolo_graph::DType::F32 || is_wide
        };
        split.outputs.iter().zip(outputs).all(summed).then_some(Parts { split, arrangement, needs, sliced })
    }

    /// Which units the slices take: as an input is cut that the split shards too, or evenly where a parameter starts to be.
    fn arrangement(&self, id: NodeId, node: &Node, split: &Split, inputs: &[Type]) -> Option<Arrangement> {
        let placed = || node.inputs.iter().zip(&split.inputs).zip(inputs);
        let of_input = |((id, placement), ty): ((&ValueId, &Placement), &Type)| {
            let cut = self.cut_of(*id)?;
            let (dim, _) = placement.cut()?;
            Arrangement::of_operand(cut, *placement, ty.shape[dim], split.size)
        };
        if let Some(found) = placed().find_map(of_input) {
            return found.is_full().then_some(found);
        }
        // Nobody starts to shard a value that is whole, or to share the rows of a batch.
        let starts = |((id, placement), _): ((&ValueId, &Placement), &Type)| {
            placement.cut().is_some() && self.is_unused_param(*id)
        };
        if !self.can_start(node) || !placed().any(starts) {
            return None;
        }
        let wanted = self.arranged.get(&id).filter(|wanted| wanted.blocks * wanted.bounds[self.slices] == split.size);
        let arrangement = wanted.cloned().or_else(|| Arrangement::even(split.size, self.slices))?;
        arrangement.is_full().then_some(arrangement)
    }

    fn sharding_of_param(&self, name: &str) -> Option<Sharding> {
        self.get(*self.params.by_name.get(name)?).cloned()
    }

    /// How the weight lies whose gradient a node makes, and nothing else.
    fn wanted_of(&self, node: &Node) -> Option<Sharding> {
        let [output] = node.outputs[..] else { return None };
        let [reader] = self.readers[output.0 as usize][..] else { return None };
        let sum = self.graph.node(reader).op.downcast::<GrainSum>()?;
        self.sharding_of_param(&sum.of)
    }

    /// Bytes to be moved because a gradient is made otherwise than its weight lies.
    fn misplaced(&self, node: &Node, parts: Option<&Parts>, outputs: &[Type]) -> u64 {
        let Some(wanted) = self.wanted_of(node) else { return 0 };
        let made = parts.and_then(|parts| {
            let (dim, _) = parts.split.outputs[0].cut()?;
            parts.arrangement.cut(parts.split.outputs[0], outputs[0].shape[dim], parts.split.size)
        });
        let same = wanted.cut() == made.as_ref() || (made.is_none() && parts.is_none());
        if same { 0 } else { 3 * outputs[0].bytes() as u64 }
    }

    fn is_unused_param(&self, id: ValueId) -> bool {
        self.get(id).is_none() && (self.graph.maker(id).op.is::<Param>() || self.copied_param(id).is_some())
    }

    /// Whether the node may be the first to shard a parameter.
    fn can_start(&self, node: &Node) -> bool {
        !self.rules.by_tokens
            && node.stage == Stage::Forward
            && (node.op.work() != Work::Stream || node.op.is::<Embedding>())
    }

    /// Whether a node multiplies by a parameter that training cut, so that it is split as it was in training: no rank need have
    /// all of the weight, or a frozen bias that the first slice alone adds.
    fn stays_where_it_is(&self, node: &Node) -> bool {
        let cut = |id: &ValueId| {
            let param = self.graph.maker(self.copied_param(*id).unwrap_or(*id)).op.downcast::<Param>();
            param.and_then(|param| self.rules.fixed.get(&param.name)).is_some_and(|fixed| fixed.cut().is_some())
        };
        self.can_start(node) && node.inputs.iter().any(cut)
    }

    /// Bytes to be moved so that an input is as it must be.
    fn move_cost(&self, id: ValueId, need: &Need) -> u64 {
        match (self.get(id), need) {
            (None, _) | (Some(Sharding::Replicated), _) => 0,
            (Some(Sharding::Sharded(cut)), Need::Sharded(wanted)) if cut == wanted => 0,
            // Every rank hands each other one its part.
            (Some(Sharding::Sharded(_)), Need::Sharded(_)) if self.rules.by_tokens => self.graph.ty(id).bytes() as u64,
            // Gathered here, and the gradient is a sum over the ranks.
            (Some(Sharding::Sharded(_)), _) => 3 * self.graph.ty(id).bytes() as u64,
        }
    }

    /// Bytes to be moved some time because a value that all ranks have is cut in the forward pass.
    fn cut_cost(&self, node: &Node, id: ValueId, need: &Need) -> u64 {
        let cut = matches!((self.get(id), need), (Some(Sharding::Replicated), Need::Sharded(_)));
        let activation = node.stage == Stage::Forward && !self.graph.maker(id).inputs.is_empty();
        if cut && activation { 4 * self.graph.ty(id).bytes() as u64 } else { 0 }
    }

    fn cost_whole(&self, node: &Node, inputs: &[Type], outputs: &[Type]) -> u64 {
        let moved: u64 = node.inputs.iter().map(|id| self.move_cost(*id, &Need::Replicated)).sum();
        moved + self.misplaced(node, None, outputs) + node.op.flops(inputs, outputs) / FLOPS_PER_BYTE
    }

    fn cost(&self, node: &Node, parts: &Parts, inputs: &[Type], outputs: &[Type]) -> u64 {
        let cost = |(id, need): (&ValueId, &Need)| self.move_cost(*id, need) + self.cut_cost(node, *id, need);
        let moved: u64 = node.inputs.iter().zip(&parts.needs).map(cost).sum();
        let left = |(placement, ty): (&Placement, &Type)| match placement {
            // A sum travels to all and back.
            Placement::Partial => 2 * ty.bytes() as u64,
            _ => 0,
        };
        let sums: u64 = parts.split.outputs.iter().zip(outputs).map(left).sum();
        // A table is looked up by rows, which keeps it in step with a layer that shares it.
        let table = !self.rules.by_tokens && node.op.is::<Embedding>() && parts.split.axis != "vocab";
        let shared = if table { u64::MAX / 4 } else { 0 };
        moved
            + sums
            + shared
            + self.misplaced(node, Some(parts), outputs)
            + node.op.flops(inputs, outputs) / FLOPS_PER_BYTE / self.slices as u64
    }

    /// A node that would take an input in parts if it were cut in blocks asks its makers for that.
    fn request_blocks(&mut self, node: &Node, inputs: &[Type], outputs: &[Type]) {
        for split in splits_of(node, inputs, outputs) {
            for ((id, placement), ty) in node.inputs.iter().zip(&split.inputs).zip(inputs) {
                let (Some(cut), Some((dim, blocks))) = (self.cut_of(*id), placement.cut()) else { continue };
                if cut.dim != dim || cut.blocks == blocks {
                    continue;
                }
                let even = Arrangement::even(split.size, self.slices);
                let Some(wanted) = even.and_then(|even| even.cut(*placement, ty.shape[dim], split.size)) else {
                    continue;
                };
                return self.ask(*id, &wanted);
            }
        }
    }

    /// Asks whoever makes a value to cut it so, and whoever makes what it is made of.
    fn ask(&mut self, id: ValueId, wanted: &Cut) {
        let maker = self.graph.value(id).node;
        let Some(Choice::Parts(parts)) = self.choices.get(maker.0 as usize) else { return };
        let (node, parts) = (self.graph.node(maker), parts.clone());
        let placement = parts.split.outputs[self.graph.value(id).slot];
        let Some((dim, _)) = placement.cut() else { return };
        let extent = self.graph.ty(id).shape[dim];
        let Some(arrangement) = Arrangement::of_operand(wanted, placement, extent, parts.split.size) else { return };
        for (input, placement) in node.inputs.iter().zip(&parts.split.inputs) {
            let Some((dim, _)) = placement.cut() else { continue };
            let extent = self.graph.ty(*input).shape[dim];
            if let Some(cut) = arrangement.cut(*placement, extent, parts.split.size) {
                self.ask(*input, &cut);
            }
        }
        self.wanted.push((maker, arrangement));
    }

    /// Notes what follows from a choice.
    fn settle(&mut self, node: &Node, choice: &Choice) {
        if node.inputs.is_empty() {
            return;
        }
        let needs: Vec<Need> = match choice {
            Choice::Parts(parts) => parts.needs.clone(),
            Choice::Classes(cut) => vec![Need::Sharded(cut.clone()), Need::Replicated],
            Choice::Ring { inputs, .. } => inputs.iter().cloned().map(Need::Sharded).collect(),
            Choice::Whole => vec![Need::Replicated; node.inputs.len()],
        };
        for (id, need) in node.inputs.iter().zip(needs) {
            if self.get(*id).is_none() {
                let sharding = match need {
                    Need::Sharded(cut) => Sharding::Sharded(cut),
                    Need::Replicated | Need::Term | Need::Halo(_) => Sharding::Replicated,
                };
                self.assign(*id, &sharding);
            }
        }
        if let Choice::Ring { outputs, .. } = choice {
            for (id, cut) in node.outputs.iter().zip(outputs) {
                self.shardings[id.0 as usize] = Some(Sharding::Sharded(cut.clone()));
            }
        }
        let Choice::Parts(parts) = choice else { return };
        for (id, placement) in node.outputs.iter().zip(&parts.split.outputs) {
            if *placement == Placement::Partial {
                // A sum over the tokens themselves has none left.
                let is_cut = |(id, need): (&ValueId, &Need)| self.is_token_cut(*id, need);
                let over_tokens =
                    self.rules.ring || self.rules.planes.is_some() || node.inputs.iter().zip(&parts.needs).any(is_cut);
                let sum = if over_tokens { Sharding::Replicated } else { self.sum_of(*id) };
                self.shardings[id.0 as usize] = Some(sum);
                continue;
            }
            let extent = placement.cut().map_or(0, |(dim, _)| self.graph.ty(*id).shape[dim]);
            let cut = parts.arrangement.cut(*placement, extent, parts.split.size);
            self.shardings[id.0 as usize] = Some(cut.map_or(Sharding::Replicated, Sharding::Sharded));
        }
    }

    /// How the sum of partial results lies: on all ranks, or in slices of the tokens.
    fn sum_of(&self, id: ValueId) -> Sharding {
        let ty = self.graph.ty(id);
        let activation = ty.rank() > 1 && ty.last() > 1;
        self.token_cut(&ty.shape).filter(|_| activation).map_or(Sharding::Replicated, Sharding::Sharded)
    }

    fn finish(mut self) -> PartitionPlan {
        self.cut_early();
        let shardings = self.shardings.into_iter().map(|one| one.unwrap_or(Sharding::Replicated)).collect();
        let (ring, planes) = (self.rules.ring, self.rules.planes.is_some());
        PartitionPlan { slices: self.slices, shardings, choices: self.choices, ring, planes }
    }

    /// Computes in parts what is computed whole and then only used in parts.
    fn cut_early(&mut self) {
        let graph = self.graph;
        let readers = graph.readers();
        let kept = graph.kept_mask();
        for at in (0..graph.nodes.len()).rev() {
            let node = &graph.nodes[at];
            let id = NodeId(at as u32);
            let [output] = node.outputs[..] else { continue };
            if !matches!(self.choices[at], Choice::Whole) || kept[output.0 as usize] || node.inputs.is_empty() {
                continue;
            }
            let uses = readers[output.0 as usize].iter().flat_map(|reader| self.uses(*reader, output));
            let mut wanted: Vec<Need> = uses.collect();
            wanted.dedup();
            let [Need::Sharded(cut)] = &wanted[..] else { continue };
            if let Some(parts) = self.parts_making(id, node, cut) {
                let choice = Choice::Parts(parts);
                self.settle(node, &choice);
                self.choices[at] = choice;
            }
        }
    }

    /// How a node uses a value.
    fn uses(&self, reader: NodeId, value: ValueId) -> Vec<Need> {
        let node = self.graph.node(reader);
        let of = |at: usize| match &self.choices[reader.0 as usize] {
            Choice::Parts(parts) => parts.needs[at].clone(),
            Choice::Classes(cut) if at == 0 => Need::Sharded(cut.clone()),
            Choice::Ring { inputs, .. } => Need::Sharded(inputs[at].clone()),
            _ => Need::Replicated,
        };
        let inputs = node.inputs.iter().enumerate().filter(|(_, id)| **id == value);
        inputs.map(|(at, _)| of(at)).collect()
    }

    /// The parts of an elementwise node that make this shard, wherever its inputs are.
    fn parts_with(&self, node: &Node, cut: &Cut) -> Option<Parts> {
        let (inputs, outputs) = (self.graph.types(&node.inputs), self.graph.types(&node.outputs));
        splits_of(node, &inputs, &outputs).into_iter().find_map(|split| {
            let (dim, _) = split.outputs[0].cut()?;
            let arrangement = Arrangement::of_operand(cut, split.outputs[0], outputs[0].shape[dim], split.size)?;
            self.parts_of(node, split, arrangement, (&inputs, &outputs))
        })
    }

    /// The parts that make this shard from whole inputs, or from inputs that are cut so already, with nothing to add up.
    fn parts_making(&self, _: NodeId, node: &Node, cut: &Cut) -> Option<Parts> {
        let (inputs, outputs) = (self.graph.types(&node.inputs), self.graph.types(&node.outputs));
        splits_of(node, &inputs, &outputs).into_iter().find_map(|split| {
            let (dim, _) = split.outputs[0].cut()?;
            let arrangement = Arrangement::of_operand(cut, split.outputs[0], outputs[0].shape[dim], split.size)?;
            let fits = arrangement.is_full() && split.exact && !(split.ordered && arrangement.blocks != 1);
            let need = |(placement, ty): (&Placement, &Type)| match placement.cut() {
                Some((dim, _)) => arrangement.cut(*placement, ty.shape[dim], split.size).map(Need::Sharded),
                None => Some(if *placement == Placement::Partial { Need::Term } else { Need::Replicated }),
            };
            let needs: Vec<Need> = split.inputs.iter().zip(&inputs).map(need).collect::<Option<_>>()?;
            let free = node.inputs.iter().zip(&needs).all(|(id, need)| self.move_cost(*id, need) == 0);
            let whole = !needs.contains(&Need::Term);
            (fits && free && whole).then(|| Parts { sliced: self.is_sliced(&split), split, arrangement, needs })
        })
    }
}
