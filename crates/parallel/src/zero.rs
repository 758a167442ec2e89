//! ZeRO: ranks along the data axis keep shares of what each of them would otherwise keep whole.
//!
//! | stage | a rank keeps its share of |
//! |---|---|
//! | 1 | the optimizer's state |
//! | 2 | that and the sums of gradients ([`scatter`]) |
//! | 3 | that and the weights, which are gathered layer by layer while they are used ([`gather`]) |
//!
//! A share is a run of the memory of all parameters and may begin and end inside a tensor; from stage 2 on it is one such run of
//! every bucket or layer. A gradient is summed at its owner alone, the owner's update runs as it would have run anywhere, so the
//! bits are the same, and with stages 1 and 2 the new parameters are gathered. Numbers that are needed everywhere though they
//! come from one owner's share, such as the squares under a global norm, are gathered too.

mod gather;
mod layers;
mod scatter;
mod separate;

use crate::cut::{Others, Owned, Unit, is_piece_of_sum, join};
use crate::data::{
    BUCKET_MIB, Bucket, buckets, copy_grains, exchange_bucket, is_shared, push_after_grains, push_collective,
    read_bucket_bytes,
};
use crate::mesh::{DATA, Mesh};
use crate::strategy::{Facts, Home, Key, KeyValue, Part, Purpose, Refusal, Strategy, StrategyKind};
use gather::Gather;
use kolo_graph::collective::{AfterGrains, AllGather, AllReduce, Receive, ReduceScatter, Send};
use kolo_graph::graph::Phase;
use kolo_graph::layout::shown_by;
use kolo_graph::piece::Join;
use kolo_graph::rewrite::Rebuild;
use kolo_graph::settings::{SettingError, Settings};
use kolo_graph::sources::{Full, GrainSum, Input, Param, State};
use kolo_graph::{Graph, Node, NodeId, Stage, ValueId};
use kolo_ops::concat::Concat;
use kolo_ops::optim::RunSquares;
use layers::{Layers, layers_of_sums};
use scatter::Scatter;
use separate::separate;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The last stage that is built.
const STAGE_MAX: usize = 3;

const ZERO: Key = Key {
    name: "zero",
    value: KeyValue::Count { default: 0, least: 0, most: STAGE_MAX },
    doc: "1: each worker keeps and runs the optimizer of its own equal run of the parameters; 2: and keeps the gradients of \
          that run alone; 3: and its weights, and layers are gathered while they are used; same digest, less memory",
};

const PREFETCH: Key = Key {
    name: "prefetch",
    value: KeyValue::Count { default: 1, least: 0, most: usize::MAX },
    doc: "with `zero = 3`: layers that are gathered before the one in use is done; more hide more of the exchange and take more memory",
};

pub const KIND: StrategyKind = StrategyKind {
    name: "zero",
    doc: "ZeRO: each worker keeps its share of the optimizer (1), of the gradients (2) and of the weights (3)",
    keys: &[ZERO, PREFETCH, BUCKET_MIB],
    read,
};

fn read(settings: &Settings) -> Result<Option<Arc<dyn Strategy>>, SettingError> {
    let stage = ZERO.count(settings)?;
    if stage > STAGE_MAX {
        let message = format!("is {stage}, and stages are 0 to {STAGE_MAX}");
        let hint = "write 1 to shard the optimizer, 2 for the gradients as well, or 3 for the weights, too";
        return Err(settings.wrong(ZERO.name, message, hint));
    }
    let (bucket_bytes, prefetch) = (read_bucket_bytes(settings)?, PREFETCH.count(settings)?);
    Ok((stage > 0).then(|| Arc::new(Zero { stage, bucket_bytes, prefetch }) as Arc<dyn Strategy>))
}

/// Shares with their settings.
#[derive(Clone, Copy, Debug)]
pub struct Zero {
    pub stage: usize,
    pub bucket_bytes: usize,
    /// Layers that are gathered before the one in use is done.
    pub prefetch: usize,
}

impl Strategy for Zero {
    fn name(&self) -> &'static str {
        KIND.name
    }
    fn part(&self) -> Part {
        Part::Update
    }
    fn written(&self) -> String {
        format!("parallel.zero = {}", self.stage)
    }
    fn rewrite(&self, graph: Graph, purpose: Purpose, mesh: &Mesh) -> Graph {
        match (is_shared(purpose, mesh), self.stage) {
            (false, _) => graph,
            (true, 1) => shard_optimizer(&graph, mesh, self.bucket_bytes),
            (true, 2) => shard_gradients(&graph, mesh, self.bucket_bytes),
            (true, _) => shard_weights(&graph, mesh, self.bucket_bytes, self.prefetch),
        }
    }
    fn rewrite_evaluation(&self, graph: Graph, training: &Graph, mesh: &Mesh) -> Graph {
        match self.stage == STAGE_MAX && mesh.size(DATA) > 1 {
            true => gather_weights(&graph, training, mesh, self.prefetch),
            false => graph,
        }
    }
    fn shards_weights(&self) -> bool {
        self.stage == STAGE_MAX
    }
    fn check(&self, _: Facts, others: &[&dyn Strategy]) -> Result<(), Refusal> {
        match others.iter().find(|other| other.goes_both_ways() && self.shards_weights()) {
            Some(other) => {
                let message = format!(
                    "is {}, which cannot be combined with the two directions of `{}`",
                    self.stage,
                    other.written()
                );
                let hint = "write `zero = 2`: a second copy of the weights is whole, whoever keeps the first in shares";
                Err(Refusal::of_key(&ZERO, message, hint))
            }
            None => Ok(()),
        }
    }
    /// So that a sum over ranks is one over neighbouring grains.
    fn takes_turns(&self) -> bool {
        self.stage > 1
    }
    /// The others gather what this rank has updated.
    fn home(&self) -> Home {
        Home::Reached
    }
    fn layout(&self) -> Vec<(&'static str, usize)> {
        vec![("zero", self.stage)]
    }
}

/// Where a value is right: everywhere, or at one rank only.
type ValidAt = Option<usize>;

/// Shards the optimizer along the data axis, in equal shares; the result is this rank's graph.
pub fn shard_optimizer(graph: &Graph, mesh: &Mesh, bucket_bytes: usize) -> Graph {
    shard(&Owned::cut(graph, mesh.size(DATA), Others::Known), mesh, bucket_bytes)
}

/// Shards the optimizer and the sums of gradients; the result is this rank's graph, for its every so-manieth grain.
pub fn shard_gradients(graph: &Graph, mesh: &Mesh, bucket_bytes: usize) -> Graph {
    let groups = of_segments(graph, buckets(graph, bucket_bytes)).into_iter().filter(|bucket| bucket.gradients);
    let owned = Owned::cut_each(graph, groups.map(|bucket| bucket.sums), mesh.size(DATA), Others::Known);
    let plan = ShardPlan::new(&owned, mesh);
    let all = of_segments(plan.graph, buckets(plan.graph, bucket_bytes));
    let units_of = plan.units(&all);
    let mut scatter = Scatter::new(&plan, &all, &units_of);
    let (mut rebuild, after) = copy_with(plan.graph, Some(&mut scatter), None);
    plan.copy_after(&mut rebuild, &after);
    plan.finish(rebuild, &all, units_of)
}

/// Shards the weights, too: each rank keeps its run of every layer, and layers are whole while a grain uses them.
pub fn shard_weights(graph: &Graph, mesh: &Mesh, bucket_bytes: usize, prefetch: usize) -> Graph {
    let owned = own_layers(graph, mesh);
    let layers = Layers::of(&owned, mesh.size(DATA));
    let plan = ShardPlan::of_shares(&owned, mesh);
    let all = of_segments(plan.graph, buckets_of_layers(plan.graph, bucket_bytes));
    let units_of = plan.units(&all);
    let mut scatter = Scatter::new(&plan, &all, &units_of);
    let mut gather = Gather::new(plan.graph, &layers, plan.rank, prefetch);
    let (mut rebuild, after) = copy_with(plan.graph, Some(&mut scatter), Some(&mut gather));
    plan.copy_after(&mut rebuild, &after);
    plan.finish_shares(rebuild)
}

/// The graph of an evaluation, with weights as training keeps them. `training` is that of a rank that keeps them whole.
fn gather_weights(graph: &Graph, training: &Graph, mesh: &Mesh, prefetch: usize) -> Graph {
    let layers = Layers::of(&own_layers(training, mesh), mesh.size(DATA));
    let graph = separate(graph);
    let mut gather = Gather::new(&graph, &layers, mesh.coordinate(DATA), prefetch);
    copy_with(&graph, None, Some(&mut gather)).0.finish()
}

fn own_layers(graph: &Graph, mesh: &Mesh) -> Owned {
    let graph = separate(graph);
    let groups = layers_of_sums(&graph);
    Owned::cut_each(&graph, groups, mesh.size(DATA), Others::Unknown)
}

/// Buckets of at least so many bytes for the gradients of each layer, and that of the other sums.
fn buckets_of_layers(graph: &Graph, bytes: usize) -> Vec<Bucket> {
    let mut all: Vec<Bucket> = Vec::new();
    for layer in layers_of_sums(graph) {
        let mut size = usize::MAX;
        for sum in layer {
            if size >= bytes {
                let (name, params_name) = (format!("bucket.{}", all.len()), String::new());
                all.push(Bucket { name, params_name, sums: Vec::new(), gradients: true });
                size = 0;
            }
            size += graph.ty(sum).bytes();
            let last = all.len() - 1;
            all[last].sums.push(sum);
        }
    }
    all.extend(buckets(graph, usize::MAX).into_iter().filter(|bucket| !bucket.gradients));
    all
}

/// Buckets whose gradients are made in one segment of a grain each: segments of different grains alternate, and not every grain
/// runs all of them.
fn of_segments(graph: &Graph, buckets: Vec<Bucket>) -> Vec<Bucket> {
    let segment = |sum: &ValueId| graph.maker(graph.maker(*sum).inputs[0]).segment;
    let mut all: Vec<Bucket> = Vec::new();
    for Bucket { name, params_name, sums, gradients } in buckets {
        for (part, sums) in sums.chunk_by(|one, next| segment(one) == segment(next)).enumerate() {
            let named = |name: &str| if part == 0 { name.to_string() } else { format!("{name}.{part}") };
            let (name, params_name) = (named(&name), named(&params_name));
            all.push(Bucket { name, params_name, sums: sums.to_vec(), gradients });
        }
    }
    all
}

/// Makes the nodes from this one on part of a segment.
fn set_segments(graph: &mut Graph, from: usize, segment: u32) {
    (from..graph.nodes.len()).for_each(|at| graph.set_segment(NodeId(at as u32), segment));
}

/// Copies what runs up to the sums over grains, with exchanges in it; what runs after them.
fn copy_with<'g>(
    graph: &'g Graph,
    mut scatter: Option<&mut Scatter<'_, 'g>>,
    mut gather: Option<&mut Gather<'_, 'g>>,
) -> (Rebuild<'g>, Vec<&'g Node>) {
    let (mut rebuild, mut after) = (Rebuild::new(graph), Vec::new());
    if let Some(gather) = &mut gather {
        gather.keep_all(&mut rebuild);
    }
    let mut segment = 0;
    for ((id, node), phase) in graph.ids().zip(&graph.nodes).zip(graph.phases()) {
        if node.op.is::<GrainSum>() || is_piece_of_sum(graph, node) {
            continue;
        }
        if phase == Phase::After {
            after.push(node);
            continue;
        }
        match &mut gather {
            Some(gather) if gather.is_weight(node) || gather.kept(node).is_some() => continue,
            Some(gather) if gather.is_sent(node) => gather.send(&mut rebuild, node),
            Some(gather) => gather.copy(&mut rebuild, id, node),
            None => drop(rebuild.copy(node)),
        }
        let Some(scatter) = &mut scatter else { continue };
        if phase == Phase::Grain && !node.op.is::<Input>() && node.segment != segment {
            scatter.add_up(&mut rebuild, segment);
            segment = node.segment;
        }
        scatter.close(&mut rebuild, id);
    }
    if let Some(scatter) = scatter {
        scatter.add_up(&mut rebuild, segment);
    }
    (rebuild, after)
}

pub(crate) fn shard(owned: &Owned, mesh: &Mesh, bucket_bytes: usize) -> Graph {
    let plan = ShardPlan::new(owned, mesh);
    let (mut rebuild, after) = copy_grains(plan.graph);
    let all = buckets(plan.graph, bucket_bytes);
    let units_of = plan.units(&all);
    for (bucket, units) in all.iter().zip(&units_of) {
        if !bucket.gradients {
            exchange_bucket(&mut rebuild, AllReduce { axis: DATA.into() }, bucket);
            continue;
        }
        let inputs = units.iter().map(|unit| rebuild.get(unit.sum)).collect();
        let op = ReduceScatter { axis: DATA.into(), owners: owners(units) };
        let outputs = push_collective(&mut rebuild.new, op, inputs, &bucket.name);
        units.iter().zip(outputs).for_each(|(unit, new)| rebuild.set(unit.sum, new));
    }
    plan.copy_after(&mut rebuild, &after);
    plan.finish(rebuild, &all, units_of)
}

fn owners(units: &[&Unit]) -> Vec<usize> {
    units.iter().map(|unit| unit.owner).collect()
}

struct ShardPlan<'g> {
    graph: &'g Graph,
    units: &'g [Unit],
    rank: usize,
    ranks: usize,
    /// The owner of each sum, or piece of a sum.
    owners: BTreeMap<ValueId, usize>,
    /// A rank knows nothing but its own runs of parameters.
    shares: bool,
    places: Vec<ValidAt>,
    /// Values of one owner that every rank needs.
    gathered: BTreeSet<ValueId>,
}

impl<'g> ShardPlan<'g> {
    fn new(owned: &'g Owned, mesh: &Mesh) -> Self {
        Self::resolved(owned, mesh, false)
    }

    /// Of ranks that keep shares of the parameters.
    fn of_shares(owned: &'g Owned, mesh: &Mesh) -> Self {
        Self::resolved(owned, mesh, true)
    }

    fn resolved(owned: &'g Owned, mesh: &Mesh, shares: bool) -> Self {
        let Owned { graph, units } = owned;
        let owners = units.iter().map(|unit| (unit.sum, unit.owner)).collect();
        let (rank, ranks, places, gathered) = (mesh.coordinate(DATA), mesh.size(DATA), Vec::new(), BTreeSet::new());
        let mut plan = Self { graph, units, rank, ranks, owners, shares, places, gathered };
        // Each round gathers the numbers that the first conflict needs; a graph has few.
        while let Some(conflict) = plan.propagate().or_else(|| plan.output_elsewhere()) {
            let before = plan.gathered.len();
            plan.need_everywhere(conflict);
            assert!(plan.gathered.len() > before, "an update of several owners' tensors cannot be sharded");
        }
        plan
    }

    /// Copies what runs after the grains, as far as this rank runs it. What others' numbers follow from comes first, then the
    /// numbers, and so on.
    fn copy_after(&self, rebuild: &mut Rebuild<'_>, after: &[&Node]) {
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
    fn units(&self, buckets: &[Bucket]) -> Vec<Vec<&'g Unit>> {
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

    /// Gives every value its place; a node that reads values of two owners, if there is one.
    fn propagate(&mut self) -> Option<&'g Node> {
        self.places = vec![None; self.graph.values.len()];
        for unit in self.units.iter().filter(|_| self.shares) {
            self.places[unit.param.0 as usize] = Some(unit.owner);
        }
        let graph = self.graph;
        for (node, phase) in graph.nodes.iter().zip(graph.phases()) {
            // Pieces of several owners are joined after they were gathered.
            if phase != Phase::After || node.op.is::<Join>() {
                continue;
            }
            let mut place = self.owners.get(&node.outputs[0]).copied();
            for input in &node.inputs {
                let other = self.places[input.0 as usize];
                if place.is_some() && other.is_some() && place != other {
                    return Some(node);
                }
                place = place.or(other);
            }
            // What ranks of another axis exchange, all ranks of this one do.
            if place.is_some() && node.op.collective().is_some() {
                return Some(node);
            }
            for output in &node.outputs {
                self.places[output.0 as usize] = place.filter(|_| !self.gathered.contains(output));
            }
        }
        None
    }

    /// The node of an output that one rank alone would have.
    fn output_elsewhere(&self) -> Option<&'g Node> {
        let outputs = self.graph.outputs.iter().map(|(_, id)| *id);
        outputs.filter(|id| self.places[id.0 as usize].is_some()).map(|id| self.graph.maker(id)).next()
    }

    /// Makes the numbers among a node's inputs known everywhere: those computed from numbers are recomputed, those computed
    /// from a tensor are gathered.
    fn need_everywhere(&mut self, node: &Node) {
        for input in &node.inputs {
            if self.places[input.0 as usize].is_none() || !self.is_number(*input) {
                continue;
            }
            let maker = self.graph.maker(*input);
            let known = |id: &ValueId| self.places[id.0 as usize].is_none() && self.graph.ty(*id).elements() == 1;
            let numbers = maker.inputs.iter().all(|id| known(id) || self.is_number(*id));
            if !maker.op.is::<RunSquares>() && numbers {
                self.need_everywhere(maker);
            } else {
                self.gathered.insert(*input);
            }
        }
    }

    /// Whether a value is a number that is computed, or a few of them side by side.
    fn is_number(&self, id: ValueId) -> bool {
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

    fn runs_here(&self, node: &Node) -> bool {
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

    fn gather_numbers(&self, rebuild: &mut Rebuild<'_>, mut numbers: Vec<ValueId>) {
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
    fn wait_for_grains(&self, graph: &mut Graph, owners: &[usize], inputs: &mut [ValueId]) {
        if !owners.contains(&self.rank) {
            inputs.iter_mut().for_each(|id| *id = push_after_grains(graph, *id));
        }
    }

    fn owner_of_number(&self, id: ValueId) -> usize {
        let inputs = &self.graph.maker(id).inputs;
        // What every rank can compute may as well come from the first.
        inputs.iter().find_map(|id| self.places[id.0 as usize]).unwrap_or(0)
    }

    /// Keeps the updates of this rank's runs, and of what belongs to nobody.
    fn finish_shares(&self, mut rebuild: Rebuild<'_>) -> Graph {
        let graph = self.graph;
        let mut updates: Vec<(ValueId, ValueId)> = Vec::new();
        for unit in self.units.iter().filter(|unit| unit.owner == self.rank && unit.updated != unit.param) {
            updates.push((rebuild.get(unit.param), rebuild.get(unit.updated)));
        }
        for (state, value) in graph.updates.iter().filter(|(state, _)| !graph.maker(*state).op.is::<Param>()) {
            if self.places[value.0 as usize].is_none_or(|owner| owner == self.rank) {
                updates.push((rebuild.get(*state), rebuild.get(*value)));
            }
        }
        rebuild.new.outputs = graph.outputs.iter().map(|(name, id)| (name.clone(), rebuild.get(*id))).collect();
        rebuild.new.updates = updates;
        kolo_graph::rewrite::eliminate_dead(rebuild.new)
    }

    /// Gathers the parameters bucket by bucket, keeps the updates of this rank and of what belongs to nobody.
    fn finish(&self, mut rebuild: Rebuild<'_>, all: &[Bucket], units_of: Vec<Vec<&Unit>>) -> Graph {
        let graph = self.graph;
        // The new values of each parameter, whole or in pieces, in the order of memory.
        let mut gathered: Vec<(ValueId, Vec<ValueId>)> = Vec::new();
        for (bucket, units) in all.iter().zip(units_of).filter(|(bucket, _)| bucket.gradients) {
            let own = |unit: &&Unit| rebuild.get(if unit.owner == self.rank { unit.updated } else { unit.param });
            let mut inputs: Vec<ValueId> = units.iter().map(own).collect();
            let owners = owners(&units);
            self.wait_for_grains(&mut rebuild.new, &owners, &mut inputs);
            let op = AllGather { axis: DATA.into(), owners };
            let outputs = push_collective(&mut rebuild.new, op, inputs, &bucket.params_name);
            for (unit, output) in units.into_iter().zip(outputs) {
                let param = shown_by(graph, unit.param);
                match gathered.last_mut() {
                    Some((last, values)) if *last == param => values.push(output),
                    _ => gathered.push((param, vec![output])),
                }
            }
        }
        let mut updates: Vec<(ValueId, ValueId)> = Vec::new();
        for (param, values) in &gathered {
            let value = match values[..] {
                [whole] => whole,
                _ => join(&mut rebuild.new, &graph.ty(*param).shape, values.clone()),
            };
            updates.push((rebuild.get(*param), value));
        }
        let params: BTreeSet<ValueId> = gathered.iter().map(|(param, _)| *param).collect();
        for (state, value) in &graph.updates {
            let elsewhere = self.places[value.0 as usize].is_some_and(|owner| owner != self.rank);
            if !elsewhere && !params.contains(state) {
                updates.push((rebuild.get(*state), rebuild.get(*value)));
            }
        }
        rebuild.new.outputs = graph.outputs.iter().map(|(name, id)| (name.clone(), rebuild.get(*id))).collect();
        rebuild.new.updates = updates;
        // States of other ranks' tensors have no reader left.
        kolo_graph::rewrite::eliminate_dead(rebuild.new)
    }
}
