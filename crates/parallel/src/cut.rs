//! Who owns what: the parameters that have a gradient, in the order of memory, cut into equal shares.
//!
//! A share may end inside a tensor. Then the tensor is cut in pieces: what follows from its gradient element by element is
//! computed piece by piece, with a piece of every state, and sums of squares are added up from the runs they consist of. So
//! the bits do not depend on where it is cut. A tensor whose update needs it whole belongs to whoever owns its middle.

use crate::data::{buckets, param_of};
use kolo_graph::collective::{AfterGrains, Receive, Send};
use kolo_graph::graph::Phase;
use kolo_graph::layout::{all_shown_by, shown_by};
use kolo_graph::piece::{Join, Piece};
use kolo_graph::rewrite::Rebuild;
use kolo_graph::sources::{GrainSum, Init, Param, State};
use kolo_graph::{Graph, Node, NodeId, Op, Stage, Type, ValueId};
use kolo_ops::optim::{RUN, RunSquares, SumRuns, SumSquares};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// A parameter or a piece of one, with its gradient and what it becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    pub sum: ValueId,
    pub param: ValueId,
    pub updated: ValueId,
    pub owner: usize,
}

/// A step whose parameters are owned.
#[derive(Debug)]
pub(crate) struct Owned {
    pub graph: Graph,
    /// In the order of memory.
    pub units: Vec<Unit>,
}

/// What a rank knows of others' parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Others {
    /// All as they are after the last step.
    Known,
    /// Nothing: what needs a whole parameter needs an owner of all of it.
    Unknown,
}

impl Owned {
    /// Tensors are cut where shares end, if they can be. Ranks have equal shares of all parameters together.
    pub fn cut(graph: &Graph, ranks: usize, others: Others) -> Self {
        let gradients = buckets(graph, usize::MAX).into_iter().filter(|bucket| bucket.gradients);
        Self::cut_each(graph, gradients.map(|bucket| bucket.sums), ranks, others)
    }

    /// The same for groups of sums, which follow each other in memory: ranks have about equal shares of each group, and equal
    /// shares of all.
    pub fn cut_each(
        graph: &Graph,
        groups: impl IntoIterator<Item = Vec<ValueId>>,
        ranks: usize,
        others: Others,
    ) -> Self {
        let runs = Runs::new(graph, groups, ranks);
        let known = Known::new(graph, others);
        let mut rewrite = Rewrite::new(graph);
        for number in 0..runs.sums.len() {
            let cuts = runs.cuts(graph, number);
            if !cuts.is_empty() {
                Family::of(&known, runs.sums[number].id, cuts).into_iter().for_each(|family| rewrite.add(family));
            }
        }
        graph.nodes.iter().for_each(|node| rewrite.node(node));
        rewrite.finish(&runs)
    }
}

/// The sums of gradients, in the order of memory, and where shares of them end.
struct Runs {
    sums: Vec<Summed>,
    /// Of each group, the byte at which the share of each rank but the last ends.
    ends: Vec<Vec<usize>>,
}

/// A sum of gradients.
#[derive(Clone, Copy, Debug)]
struct Summed {
    id: ValueId,
    /// Bytes of sums before it.
    start: usize,
    group: usize,
}

impl Runs {
    fn new(graph: &Graph, groups: impl IntoIterator<Item = Vec<ValueId>>, ranks: usize) -> Self {
        let mut runs = Self { sums: Vec::new(), ends: Vec::new() };
        let (mut total, mut loads) = (0, vec![0; ranks]);
        for (group, ids) in groups.into_iter().enumerate() {
            let (first, start) = (runs.sums.len(), total);
            for id in ids {
                runs.sums.push(Summed { id, start: total, group });
                total += graph.ty(id).bytes();
            }
            runs.ends.push(ends(start..total, &loads));
            for number in first..runs.sums.len() {
                let (Summed { start, .. }, cuts) = (runs.sums[number], runs.cuts(graph, number));
                let ty = graph.ty(runs.sums[number].id);
                for piece in pieces(&cuts, ty.elements()) {
                    let bytes = piece.len() * ty.dtype.bytes();
                    let at = start + piece.start * ty.dtype.bytes();
                    loads[runs.owner(group, at..at + bytes)] += bytes;
                }
            }
        }
        runs
    }

    /// Who owns the middle of these bytes of a group.
    fn owner(&self, group: usize, bytes: Range<usize>) -> usize {
        let middle = bytes.start + bytes.len() / 2;
        self.ends[group].partition_point(|end| *end <= middle)
    }

    /// The elements of a sum at which it is cut: where shares end, moved to the nearest end of a run of squares. What is on
    /// both sides belongs to different ranks.
    fn cuts(&self, graph: &Graph, number: usize) -> Vec<usize> {
        let Summed { id, start, group } = self.sums[number];
        let (ty, size) = (graph.ty(id), graph.ty(id).dtype.bytes());
        let moved = self.ends[group].iter().map(|end| (end.saturating_sub(start) / size + RUN / 2) / RUN * RUN);
        let mut cuts: Vec<usize> = moved.filter(|cut| *cut > 0 && *cut < ty.elements()).collect();
        cuts.dedup();
        loop {
            let pieces = pieces(&cuts, ty.elements());
            let owner = |piece: &Range<usize>| self.owner(group, start + piece.start * size..start + piece.end * size);
            let Some(same) = pieces.windows(2).position(|pair| owner(&pair[0]) == owner(&pair[1])) else { return cuts };
            cuts.remove(same);
        }
    }
}

/// Shares of tensors that nobody updates: the pieces of each, with their owners.
pub(crate) fn shares_of(
    graph: &Graph,
    groups: impl IntoIterator<Item = Vec<ValueId>>,
    ranks: usize,
) -> Vec<(ValueId, Vec<(Range<usize>, usize)>)> {
    let runs = Runs::new(graph, groups, ranks);
    let share = |number: usize| {
        let Summed { id, start, group } = runs.sums[number];
        let (ty, size) = (graph.ty(id), graph.ty(id).dtype.bytes());
        let owner = |piece: &Range<usize>| runs.owner(group, start + piece.start * size..start + piece.end * size);
        let pieces = pieces(&runs.cuts(graph, number), ty.elements());
        (id, pieces.into_iter().map(|piece| (piece.clone(), owner(&piece))).collect())
    };
    (0..runs.sums.len()).map(share).collect()
}

/// Where the shares of these bytes end, but for the last. Who has less than others so far gets more.
fn ends(bytes: Range<usize>, loads: &[usize]) -> Vec<usize> {
    let (ranks, all) = (loads.len(), loads.iter().sum::<usize>() + bytes.len());
    let wanted: Vec<u128> = loads.iter().map(|load| all.saturating_sub(load * ranks) as u128).collect();
    let total = wanted.iter().sum::<u128>().max(1);
    let mut before = 0;
    let end = |wanted: &u128| {
        before += wanted;
        bytes.start + (before * bytes.len() as u128).div_ceil(total) as usize
    };
    wanted[..ranks - 1].iter().map(end).collect()
}

/// The pieces of a tensor that is cut at these elements.
fn pieces(cuts: &[usize], elements: usize) -> Vec<Range<usize>> {
    let starts = [0].into_iter().chain(cuts.iter().copied());
    starts.zip(cuts.iter().copied().chain([elements])).map(|(start, end)| start..end).collect()
}

/// What is asked of a graph for every tensor that may be cut.
struct Known<'g> {
    graph: &'g Graph,
    others: Others,
    readers: Vec<Vec<NodeId>>,
    phases: Vec<Phase>,
    updated: Vec<Option<ValueId>>,
    is_output: Vec<bool>,
    /// The states that each value is the new one of.
    states: BTreeMap<ValueId, Vec<ValueId>>,
    /// The last node after the grains that reads each value, also through views.
    last_reader: BTreeMap<ValueId, NodeId>,
}

impl<'g> Known<'g> {
    fn new(graph: &'g Graph, others: Others) -> Self {
        let (phases, shown) = (graph.phases(), all_shown_by(graph));
        let mut last_reader = BTreeMap::new();
        for id in graph.ids().filter(|id| phases[id.0 as usize] == Phase::After) {
            let read = graph.node(id).inputs.iter().map(|input| shown[input.0 as usize]);
            last_reader.extend(read.map(|value| (value, id)));
        }
        let mut states: BTreeMap<ValueId, Vec<ValueId>> = BTreeMap::new();
        graph.updates.iter().for_each(|(state, value)| states.entry(*value).or_default().push(*state));
        Self {
            graph,
            others,
            readers: graph.readers(),
            phases,
            updated: graph.updated_values(),
            is_output: graph.output_mask(),
            states,
            last_reader,
        }
    }
}

/// All that follows from one gradient element by element.
struct Family {
    pieces: Vec<Range<usize>>,
    /// Tensors of the gradient's shape.
    values: BTreeSet<ValueId>,
    nodes: BTreeSet<NodeId>,
    /// Sums of squares of them.
    squares: BTreeSet<NodeId>,
}

impl Family {
    /// `None` if the tensor cannot be cut.
    fn of(known: &Known<'_>, sum: ValueId, cuts: Vec<usize>) -> Option<Self> {
        let graph = known.graph;
        let pieces = pieces(&cuts, graph.ty(sum).elements());
        let mut family = Self { pieces, values: [sum].into(), nodes: BTreeSet::new(), squares: BTreeSet::new() };
        let mut todo = vec![sum];
        while let Some(value) = todo.pop() {
            for reader in &known.readers[value.0 as usize] {
                let node = graph.node(*reader);
                let phase = known.phases[reader.0 as usize];
                if phase != Phase::After {
                    // A parameter is read by the model, and whole; maybe its norm is wanted, too.
                    graph.maker(value).op.downcast::<Param>()?;
                    let is_sent = node.op.is::<Send>();
                    (phase == Phase::Grain || known.others == Others::Known || is_sent).then_some(())?;
                } else if node.op.is::<SumSquares>() {
                    family.squares.insert(*reader);
                } else {
                    let is_view = node.op.is::<AfterGrains>();
                    (is_view || is_elementwise(graph, node, &graph.ty(sum).shape)).then_some(())?;
                    family.nodes.insert(*reader);
                    let tensors = node.inputs.iter().filter(|id| graph.ty(**id).elements() > 1);
                    todo.extend(tensors.chain(&node.outputs).filter(|id| family.values.insert(**id)));
                }
            }
        }
        family.can_be_cut(known, sum).then_some(family)
    }

    /// Whether all tensors come from this gradient, from one parameter and from states, and stay inside.
    fn can_be_cut(&self, known: &Known<'_>, sum: ValueId) -> bool {
        let graph = known.graph;
        let source = |id: &ValueId| {
            let op = &graph.maker(*id).op;
            let state = op.downcast::<State>().is_some_and(|state| matches!(state.init, Init::Constant(_)));
            *id == sum || state || is_whole(&**op) || self.nodes.contains(&graph.value(*id).node)
        };
        let params: Vec<ValueId> = self.values.iter().copied().filter(|id| graph.maker(*id).op.is::<Param>()).collect();
        let [param] = params[..] else { return false };
        let Some(updated) = known.updated[param.0 as usize] else { return false };
        // So that pieces are updated where they are.
        let last = graph.value(updated).node;
        let read_later = known.last_reader.get(&param).is_some_and(|reader| *reader > last);
        // A state inside becomes a value inside, and a value inside becomes a state inside.
        let stays = |id: &ValueId| {
            let mut ends = known.updated[id.0 as usize].iter().chain(known.states.get(id).into_iter().flatten());
            ends.all(|other| self.values.contains(other)) && !known.is_output[id.0 as usize]
        };
        self.values.iter().all(|id| source(id) && stays(id)) && !read_later
    }
}

/// Whether each element of a node's outputs follows from the elements of its inputs with the same number, and from inputs that
/// are one number.
fn is_elementwise(graph: &Graph, node: &Node, shape: &[usize]) -> bool {
    let Some(index) = node.op.index(&graph.types(&node.inputs)) else { return false };
    let same = |ids: &[ValueId], axes: &[Vec<String>], numbers: bool| {
        let fits = |(id, axes): (&ValueId, &Vec<String>)| {
            let ty = graph.ty(*id);
            numbers && ty.elements() == 1 && ty.rank() <= 1 || ty.shape == *shape && *axes == index.outputs[0]
        };
        ids.len() == axes.len() && ids.iter().zip(axes).all(fits)
    };
    index.whole.is_empty() && same(&node.inputs, &index.inputs, true) && same(&node.outputs, &index.outputs, false)
}

/// Whether an op makes a tensor that every rank has whole: a parameter, or what another stage of a pipeline sends.
fn is_whole(op: &dyn Op) -> bool {
    op.is::<Param>() || op.is::<Receive>()
}

struct Rewrite<'g> {
    rebuild: Rebuild<'g>,
    families: Vec<Family>,
    /// The family of each value, and of each sum of squares by its result.
    family_of: BTreeMap<ValueId, usize>,
    /// The pieces of each tensor that is cut.
    pieces: BTreeMap<ValueId, Vec<ValueId>>,
}

impl<'g> Rewrite<'g> {
    fn new(graph: &'g Graph) -> Self {
        let rebuild = Rebuild::new(graph);
        Self { rebuild, families: Vec::new(), family_of: BTreeMap::new(), pieces: BTreeMap::new() }
    }

    fn add(&mut self, family: Family) {
        let at = self.families.len();
        let squares = family.squares.iter().map(|id| self.rebuild.old.node(*id).outputs[0]);
        for value in family.values.iter().copied().chain(squares) {
            self.family_of.entry(value).or_insert(at);
        }
        self.families.push(family);
    }

    fn node(&mut self, node: &Node) {
        let output = node.outputs[0];
        let id = self.rebuild.old.value(output).node;
        let Some(at) = self.family_of.get(&output).copied() else {
            self.rebuild.copy(node);
            return;
        };
        let (is_square, ranges) = (self.families[at].squares.contains(&id), self.families[at].pieces.clone());
        if is_square {
            let pieces = self.pieces[&node.inputs[0]].clone();
            let runs = pieces.iter().map(|piece| self.push(Arc::new(RunSquares {}), vec![*piece], node)[0]).collect();
            let total = self.push(Arc::new(SumRuns {}), runs, node)[0];
            return self.rebuild.set(output, total);
        }
        if node.op.is::<GrainSum>() || is_whole(&*node.op) {
            self.rebuild.copy(node);
        }
        for (number, range) in ranges.into_iter().enumerate() {
            let (op, inputs): (Arc<dyn Op>, Vec<ValueId>) = match node.op.downcast::<State>() {
                Some(state) => (Arc::new(piece_of(state, &range)), Vec::new()),
                None if node.op.is::<GrainSum>() || is_whole(&*node.op) => {
                    (Arc::new(Piece { start: range.start, len: range.len() }), vec![self.rebuild.get(output)])
                }
                None => {
                    let input = |id: &ValueId| self.pieces.get(id).map_or_else(|| self.rebuild.get(*id), |p| p[number]);
                    (Arc::clone(&node.op), node.inputs.iter().map(input).collect())
                }
            };
            let outputs = self.push(op, inputs, node);
            for (old, new) in node.outputs.iter().zip(outputs) {
                self.pieces.entry(*old).or_default().push(new);
            }
        }
    }

    /// Appends a node like another one.
    fn push(&mut self, op: Arc<dyn Op>, inputs: Vec<ValueId>, like: &Node) -> Vec<ValueId> {
        push(&mut self.rebuild.new, op, inputs, like.scope.clone(), like.stage)
    }

    fn finish(mut self, runs: &Runs) -> Owned {
        let old = self.rebuild.old;
        let (mut updates, mut units) = (Vec::new(), Vec::new());
        for (state, value) in &old.updates {
            let is_param = old.maker(*state).op.is::<Param>();
            match (self.pieces.get(state), self.pieces.get(value)) {
                (Some(_), Some(values)) if is_param => {
                    let join = join(&mut self.rebuild.new, &old.ty(*state).shape, values.clone());
                    updates.push((self.rebuild.get(*state), join));
                }
                (Some(states), Some(values)) => updates.extend(states.iter().copied().zip(values.iter().copied())),
                _ => updates.push((self.rebuild.get(*state), self.rebuild.get(*value))),
            }
        }
        let params: BTreeMap<&str, ValueId> = old.params().map(|(id, op)| (op.name.as_str(), id)).collect();
        let updated_values = old.updated_values();
        for Summed { id: sum, start, group } in &runs.sums {
            let param = params[param_of(old, *sum)];
            let updated = updated_values[param.0 as usize].unwrap_or(param);
            let [sums, params, values] = [*sum, param, updated].map(|id| self.parts(id));
            let mut at = *start;
            for ((sum, param), updated) in sums.into_iter().zip(params).zip(values) {
                let end = at + self.rebuild.new.ty(sum).bytes();
                units.push(Unit { sum, param, updated, owner: runs.owner(*group, at..end) });
                at = end;
            }
        }
        self.rebuild.new.outputs = old.outputs.iter().map(|(name, id)| (name.clone(), self.rebuild.get(*id))).collect();
        self.rebuild.new.updates = updates;
        Owned { graph: self.rebuild.new, units }
    }

    /// What an old value has become: its pieces, or one value.
    fn parts(&self, id: ValueId) -> Vec<ValueId> {
        self.pieces.get(&id).cloned().unwrap_or_else(|| vec![self.rebuild.get(id)])
    }
}

/// The state of a piece, which knows where it starts.
fn piece_of(state: &State, range: &Range<usize>) -> State {
    let name = format!("{}@{}", state.name, range.start);
    let (of, region) = state.shard();
    let (of, region, whole) = (of.to_string(), region.skip(range.start).to_numbers(), state.whole().to_vec());
    State { name, shape: vec![range.len()], of, region, whole, ..state.clone() }
}

/// Appends the join of these values.
pub(crate) fn join(graph: &mut Graph, shape: &[usize], pieces: Vec<ValueId>) -> ValueId {
    push(graph, Arc::new(Join { shape: shape.to_vec() }), pieces, "".into(), Stage::Update)[0]
}

fn push(graph: &mut Graph, op: Arc<dyn Op>, inputs: Vec<ValueId>, scope: Arc<str>, stage: Stage) -> Vec<ValueId> {
    let types: Vec<Type> =
        kolo_graph::checked_types(&*op, &graph.types(&inputs)).expect("a piece fits where its tensor did");
    let id = graph.push_typed(op, inputs, types, scope, stage);
    graph.node(id).outputs.clone()
}

/// Whether a value is a piece of a sum over grains.
pub(crate) fn is_piece_of_sum(graph: &Graph, node: &Node) -> bool {
    node.op.is::<Piece>() && graph.maker(shown_by(graph, node.outputs[0])).op.is::<GrainSum>()
}

/// All values that a parameter becomes, and the pieces of those that are joined.
pub(crate) fn param_updates(graph: &Graph) -> BTreeSet<ValueId> {
    let mut all = BTreeSet::new();
    for (_, value) in graph.updates.iter().filter(|(state, _)| graph.maker(*state).op.is::<Param>()) {
        all.insert(*value);
        let maker = graph.maker(*value);
        if maker.op.is::<Join>() {
            all.extend(&maker.inputs);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::Builder;
    use kolo_graph::rng::Stream;
    use kolo_ops::optim::Sgd;
    use kolo_ops::prelude::*;

    /// A step of momentum on tensors of these sizes, and what `also` adds to it, given (parameter, sum, state, updated).
    fn step(sizes: &[usize], init: Init, also: impl Fn(&Builder, [Tensor<'_>; 4])) -> Graph {
        let builder = Builder::new();
        let (lr, scale) = (builder.scalar(0.1), builder.scalar(1.0));
        for (number, size) in sizes.iter().enumerate() {
            let name = format!("p{number}");
            let param = builder.param(&name, [*size], Init::ZEROS);
            let loss = builder.input(&format!("x{number}"), Type::f32([*size])).mul(param);
            let sum = loss.then(GrainSum { of: name.clone() }, &[]);
            let state = builder.state(&format!("optim.{name}"), sum.ty(), init);
            let op = Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 };
            let updated = builder.apply_all(op, &[param, sum, state, lr, scale]);
            builder.update(param, updated[0]);
            builder.update(state, updated[1]);
            also(&builder, [param, sum, state, updated[0]]);
        }
        builder.finish().unwrap()
    }

    fn plain(sizes: &[usize]) -> Graph {
        step(sizes, Init::ZEROS, |_, _| {})
    }

    /// Elements of each unit with its owner.
    fn owned(graph: &Graph, ranks: usize) -> Vec<(usize, usize)> {
        let Owned { graph, units } = Owned::cut(graph, ranks, Others::Known);
        kolo_graph::verify::verify(&graph).unwrap();
        units.iter().map(|unit| (graph.ty(unit.sum).elements(), unit.owner)).collect()
    }

    #[test]
    fn shares_are_even_and_neighbours_differ() {
        let stream = Stream::new(1, "cut");
        for case in 0..300 {
            let mut draws = [0.0f32; 8];
            stream.fill(0, case * 2, &mut draws, kolo_graph::rng::unit);
            let sizes: Vec<usize> =
                draws[..1 + case as usize % 4].iter().map(|draw| 1 + (draw * 60_000.0) as usize).collect();
            let ranks = 2 + (draws[5] * 7.0) as usize;
            let graph = plain(&sizes);
            let total: usize = sizes.iter().sum();
            let mut shares = vec![0; ranks];
            for (elements, owner) in owned(&graph, ranks) {
                shares[owner] += elements;
            }
            // Where a share begins and where it ends is moved by half a run at most.
            let most = total / ranks + RUN + 1;
            assert!(shares.iter().all(|share| *share <= most), "{sizes:?} on {ranks} ranks: {shares:?}");
            let Owned { graph, units } = Owned::cut(&graph, ranks, Others::Known);
            let of = |unit: &Unit| shown_by(&graph, unit.sum);
            let divided = units.windows(2).any(|pair| of(&pair[0]) == of(&pair[1]) && pair[0].owner == pair[1].owner);
            assert!(!divided, "{sizes:?} on {ranks} ranks: {units:?}");
            assert!(units.is_sorted_by_key(|unit| unit.owner));
        }
    }

    #[test]
    fn a_rest_of_one_element_is_a_piece() {
        assert_eq!(owned(&plain(&[4097]), 2), [(4096, 0), (1, 1)]);
        assert_eq!(owned(&plain(&[8193]), 2), [(4096, 0), (4097, 1)]);
        assert_eq!(owned(&plain(&[8200, 8193]), 2), [(8193, 0), (8200, 1)]);
        assert_eq!(owned(&plain(&[12_288, 4097]), 4), [(4096, 0), (1, 1), (4096, 1), (4096, 2), (4096, 3)]);
    }

    #[test]
    fn what_needs_the_whole_is_not_cut() {
        let size = [5 * RUN];
        let count = |graph: &Graph| owned(graph, 2).len();
        assert_eq!(count(&plain(&size)), 2);
        assert_eq!(count(&step(&size, Init::Normal { deviation: 1.0 }, |_, _| {})), 1, "a state of random numbers");
        let also = |add: fn(&Builder, [Tensor<'_>; 4])| count(&step(&size, Init::ZEROS, add));
        assert_eq!(also(|builder, [_, _, _, updated]| builder.output("new", updated)), 1);
        assert_eq!(also(|builder, [_, sum, ..]| builder.output("gradient", sum)), 1);
        assert_eq!(also(|builder, [_, sum, ..]| builder.output("mean", sum.mean_all())), 1, "a sum in another order");
        assert_eq!(also(|builder, [.., state, _]| builder.output("state", state)), 1);
        assert_eq!(also(|builder, [param, ..]| builder.output("later", param.scale(2.0))), 2, "before the grains");
        let later = |builder: &Builder, [param, sum, ..]: [Tensor<'_>; 4]| {
            builder.output("later", param.add(sum).sum_squares())
        };
        assert_eq!(also(later), 1, "read after it was updated");
        assert_eq!(
            also(|builder, [_, sum, ..]| builder.output("norm", sum.sum_squares())),
            2,
            "a norm is a sum of runs"
        );
    }
}
