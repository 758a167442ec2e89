//! Which rank runs what of the updates, and which numbers all of them need.

use crate::cut::{Owned, Unit};
use crate::data::{Bucket, push_after_grains, push_collective};
use crate::mesh::{DATA, Mesh};
use kolo_graph::collective::{AfterGrains, AllGather, Receive, Send};
use kolo_graph::graph::Phase;
use kolo_graph::layout::shown_by;
use kolo_graph::piece::Join;
use kolo_graph::rewrite::Rebuild;
use kolo_graph::sources::{Full, GrainSum, Param, State};
use kolo_graph::{Graph, Node, NodeId, Stage, ValueId};
use kolo_ops::concat::Concat;
use kolo_ops::optim::RunSquares;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Where a value is right: everywhere, or at one rank only.
type ValidAt = Option<usize>;

/// A node reads values of two owners.
#[derive(Debug, PartialEq, Eq)]
struct Conflict;

/// The order of a graph's nodes.
struct Order {
    phases: Vec<Phase>,
    readers: Vec<Vec<NodeId>>,
}

impl Order {
    /// Whether what a node makes may be right at one rank only. Pieces of several owners are joined after they were gathered.
    fn has_place(&self, graph: &Graph, id: NodeId) -> bool {
        self.phases[id.0 as usize] == Phase::After && !graph.node(id).op.is::<Join>()
    }
}

pub(super) fn owners(units: &[&Unit]) -> Vec<usize> {
    units.iter().map(|unit| unit.owner).collect()
}

/// Which rank runs what after the grains, and what ranks gather of each other.
pub(super) struct ShardPlan<'g> {
    pub graph: &'g Graph,
    pub units: &'g [Unit],
    pub rank: usize,
    pub ranks: usize,
    /// The owner of each sum, or piece of a sum.
    owners: BTreeMap<ValueId, usize>,
    /// A rank knows nothing but its own runs of parameters.
    shares: bool,
    pub places: Vec<ValidAt>,
    /// Values of one owner that every rank needs.
    gathered: BTreeSet<ValueId>,
}

impl<'g> ShardPlan<'g> {
    pub fn new(owned: &'g Owned, mesh: &Mesh) -> Self {
        Self::resolved(owned, mesh, false)
    }

    /// Of ranks that keep shares of the parameters.
    pub fn of_shares(owned: &'g Owned, mesh: &Mesh) -> Self {
        Self::resolved(owned, mesh, true)
    }

    fn resolved(owned: &'g Owned, mesh: &Mesh, shares: bool) -> Self {
        let Owned { graph, units } = owned;
        let owners = units.iter().map(|unit| (unit.sum, unit.owner)).collect();
        let (rank, ranks, places, gathered) = (mesh.coordinate(DATA), mesh.size(DATA), Vec::new(), BTreeSet::new());
        let mut plan = Self { graph, units, rank, ranks, owners, shares, places, gathered };
        plan.propagate();
        plan
    }

    /// Copies what runs after the grains, as far as this rank runs it. What others' numbers follow from comes first, then the
    /// numbers, and so on.
    pub fn copy_after(&self, rebuild: &mut Rebuild<'_>, after: &[&Node]) {
        let mut done: BTreeSet<ValueId> = BTreeSet::new();
        // Messages keep their order, and whoever waits for one has sent its own.
        for node in after.iter().filter(|node| self.is_message(node)) {
            rebuild.copy(node);
            done.insert(node.outputs[0]);
        }
        for numbers in self.rounds() {
            let before = self.before(after, &numbers);
            for node in after.iter().filter(|node| before.contains(&node.outputs[0]) && self.runs_here(node)) {
                if done.insert(node.outputs[0]) {
                    rebuild.copy(node);
                }
            }
            self.gather_numbers(rebuild, numbers);
        }
        for node in after.iter().filter(|node| !done.contains(&node.outputs[0]) && self.runs_here(node)) {
            rebuild.copy(node);
        }
    }

    /// Whether a node after the grains sends a sum to another stage, receives one, or says when.
    fn is_message(&self, node: &Node) -> bool {
        let is_sum = |id: &ValueId| self.graph.maker(*id).op.is::<GrainSum>();
        let is_constant = |id: &ValueId| self.graph.maker(*id).op.is::<Full>();
        node.op.is::<Receive>()
            || node.op.is::<Send>() && node.inputs.iter().all(is_sum)
            || node.op.is::<AfterGrains>() && node.inputs.iter().all(is_constant)
    }

    /// The units of each bucket.
    pub fn units(&self, buckets: &[Bucket]) -> Vec<Vec<&'g Unit>> {
        let sums = buckets.iter().enumerate().flat_map(|(at, bucket)| bucket.sums.iter().map(move |sum| (*sum, at)));
        let bucket_of: BTreeMap<ValueId, usize> = sums.collect();
        let mut units: Vec<Vec<&'g Unit>> = vec![Vec::new(); buckets.len()];
        for unit in self.units {
            if let Some(at) = bucket_of.get(&shown_by(self.graph, unit.sum)) {
                units[*at].push(unit);
            }
        }
        units
    }

    /// Gives every value its place. Where a node reads values of two owners, the numbers that it needs are gathered.
    fn propagate(&mut self) {
        self.places = vec![None; self.graph.values.len()];
        for unit in self.units.iter().filter(|_| self.shares) {
            self.places[unit.param.0 as usize] = Some(unit.owner);
        }
        let graph = self.graph;
        let order = Order { phases: graph.phases(), readers: graph.readers() };
        for id in graph.ids().filter(|id| order.has_place(graph, *id)) {
            let node = graph.node(id);
            let place = loop {
                match self.place_of(node) {
                    Ok(place) => break place,
                    Err(Conflict) => self.resolve(node, &order, id),
                }
            };
            for output in &node.outputs {
                self.places[output.0 as usize] = place.filter(|_| !self.gathered.contains(output));
            }
        }
        while let Some(node) = self.output_elsewhere() {
            self.resolve(node, &order, NodeId(graph.nodes.len() as u32));
        }
    }

    /// The place of what a node makes, unless it is gathered.
    fn place_of(&self, node: &Node) -> Result<ValidAt, Conflict> {
        let mut place = self.owners.get(&node.outputs[0]).copied();
        for input in &node.inputs {
            let other = self.places[input.0 as usize];
            if place.is_some() && other.is_some() && place != other {
                return Err(Conflict);
            }
            place = place.or(other);
        }
        // What ranks of another axis exchange, all ranks of this one do.
        if place.is_some() && node.op.collective().is_some() { Err(Conflict) } else { Ok(place) }
    }

    /// Gathers the numbers that a node needs. What nodes before `end` make of them is known everywhere as well, if it follows
    /// from nothing else; as no value gets an owner that way, the work of all calls together is bounded by the readers of all
    /// values.
    fn resolve(&mut self, conflict: &Node, order: &Order, end: NodeId) {
        let mut known = Vec::new();
        self.need_everywhere(conflict, &mut known);
        assert!(!known.is_empty(), "an update of several owners' tensors cannot be sharded");
        known.iter().for_each(|id| self.places[id.0 as usize] = None);
        while let Some(id) = known.pop() {
            let readers = order.readers[id.0 as usize].iter();
            for reader in readers.filter(|reader| **reader < end && order.has_place(self.graph, **reader)) {
                let node = self.graph.node(*reader);
                if self.place_of(node) != Ok(None) {
                    continue;
                }
                for output in &node.outputs {
                    if self.places[output.0 as usize].take().is_some() {
                        known.push(*output);
                    }
                }
            }
        }
    }

    /// The node of an output that one rank alone would have.
    fn output_elsewhere(&self) -> Option<&'g Node> {
        let outputs = self.graph.outputs.iter().map(|(_, id)| *id);
        outputs.filter(|id| self.places[id.0 as usize].is_some()).map(|id| self.graph.maker(id)).next()
    }

    /// Makes the numbers among a node's inputs known everywhere: those computed from numbers are recomputed, those computed
    /// from a tensor are gathered, and added to `found`.
    fn need_everywhere(&mut self, node: &Node, found: &mut Vec<ValueId>) {
        for input in &node.inputs {
            if self.places[input.0 as usize].is_none() || !self.is_number(*input) {
                continue;
            }
            let maker = self.graph.maker(*input);
            let known = |id: &ValueId| self.places[id.0 as usize].is_none() && self.graph.ty(*id).elements() == 1;
            let numbers = maker.inputs.iter().all(|id| known(id) || self.is_number(*id));
            if !maker.op.is::<RunSquares>() && numbers {
                self.need_everywhere(maker, found);
            } else if self.gathered.insert(*input) {
                found.push(*input);
            }
        }
    }

    /// Whether a value is a number that is computed, or a few of them side by side.
    pub fn is_number(&self, id: ValueId) -> bool {
        let maker = self.graph.maker(id);
        let known = |id: &ValueId| self.places[id.0 as usize].is_none();
        let joined = || maker.op.is::<Concat>() && maker.inputs.iter().all(|id| known(id) || self.is_number(*id));
        let one = self.graph.ty(id).elements() == 1 || maker.op.is::<RunSquares>();
        !self.is_tensor(maker) && (one || joined())
    }

    /// Whether a node makes a tensor that lives at its owner, however small.
    fn is_tensor(&self, node: &Node) -> bool {
        let op = &self.graph.maker(shown_by(self.graph, node.outputs[0])).op;
        op.is::<Param>() || op.is::<State>() || op.is::<GrainSum>()
    }

    pub fn runs_here(&self, node: &Node) -> bool {
        if node.op.is::<Join>() {
            return false;
        }
        let place = node.inputs.iter().find_map(|id| self.places[id.0 as usize]);
        place.is_none_or(|owner| owner == self.rank)
    }

    /// The values to gather, in rounds: those of one follow from those of earlier ones.
    fn rounds(&self) -> Vec<Vec<ValueId>> {
        let mut rounds: Vec<Vec<ValueId>> = Vec::new();
        let mut round = vec![0; self.graph.values.len()];
        for node in &self.graph.nodes {
            let after = |id: &ValueId| round[id.0 as usize] + usize::from(self.gathered.contains(id));
            let own = node.inputs.iter().map(after).max().unwrap_or(0);
            for output in &node.outputs {
                round[output.0 as usize] = own;
                if self.gathered.contains(output) {
                    rounds.resize_with(rounds.len().max(own + 1), Vec::new);
                    rounds[own].push(*output);
                }
            }
        }
        rounds
    }

    /// The nodes, by first output, that these numbers are computed from.
    fn before(&self, after: &[&Node], numbers: &[ValueId]) -> BTreeSet<ValueId> {
        let numbers: BTreeSet<ValueId> = numbers.iter().copied().collect();
        let mut before: BTreeSet<ValueId> = BTreeSet::new();
        for node in after.iter().rev() {
            let wanted = node.outputs.iter().any(|id| numbers.contains(id)) || before.contains(&node.outputs[0]);
            if wanted {
                before.insert(node.outputs[0]);
                before.extend(node.inputs.iter().map(|id| self.graph.maker(*id).outputs[0]));
            }
        }
        before
    }

    pub fn gather_numbers(&self, rebuild: &mut Rebuild<'_>, mut numbers: Vec<ValueId>) {
        numbers.sort_by_key(|id| (self.owner_of_number(*id), *id));
        let (mut owners, mut inputs) = (Vec::new(), Vec::new());
        for id in &numbers {
            let owner = self.owner_of_number(*id);
            owners.push(owner);
            if owner == self.rank {
                inputs.push(rebuild.get(*id));
                continue;
            }
            let ty = self.graph.ty(*id);
            let zero = Full { value: 0.0, dtype: ty.dtype, shape: ty.shape.to_vec() };
            let node = rebuild.new.push_typed(Arc::new(zero), vec![], vec![ty.clone()], "".into(), Stage::Update);
            inputs.push(rebuild.new.node(node).outputs[0]);
        }
        self.wait_for_grains(&mut rebuild.new, &owners, &mut inputs);
        let outputs = push_collective(&mut rebuild.new, AllGather { axis: DATA.into(), owners }, inputs, "norms");
        numbers.into_iter().zip(outputs).for_each(|(old, new)| rebuild.set(old, new));
    }

    /// What a rank has none of, its gather would take before the grains; but all ranks gather in one order.
    pub fn wait_for_grains(&self, graph: &mut Graph, owners: &[usize], inputs: &mut [ValueId]) {
        if !owners.contains(&self.rank) {
            inputs.iter_mut().for_each(|id| *id = push_after_grains(graph, *id));
        }
    }

    fn owner_of_number(&self, id: ValueId) -> usize {
        let inputs = &self.graph.maker(id).inputs;
        // What every rank can compute may as well come from the first.
        inputs.iter().find_map(|id| self.places[id.0 as usize]).unwrap_or(0)
    }
}
