//! ZeRO: ranks along the data axis keep shares of what each of them would otherwise keep whole.
//!
//! | stage | a rank keeps its share of |
//! |---|---|
//! | 1 | the optimizer's state |
//! | 2 | that and the sums of gradients (`scatter`) |
//! | 3 | that and the weights, which are gathered layer by layer while they are used (`gather`) |
//!
//! A share is a run of the memory of all parameters and may begin and end inside a tensor; from stage 2 on it is one such run of
//! every bucket or layer. A gradient is summed at its owner alone, the owner's update runs as it would have run anywhere, so the
//! bits are the same, and with stages 1 and 2 the new parameters are gathered. Numbers that are needed everywhere though they
//! come from one owner's share, such as the squares under a global norm, are gathered too.

mod finish;
mod gather;
mod layers;
mod plan;
mod scatter;
mod separate;

use crate::cut::{Others, Owned, is_piece_of_sum};
use crate::data::{
    BUCKET_MIB, Bucket, buckets, copy_grains, exchange_bucket, is_shared, push_collective, read_bucket_bytes,
};
use crate::mesh::{DATA, Mesh};
use crate::strategy::{Facts, Home, Key, KeyValue, Part, Purpose, Refusal, Strategy, StrategyKind};
use gather::Gather;
use kolo_graph::collective::{AllReduce, ReduceScatter};
use kolo_graph::graph::Phase;
use kolo_graph::rewrite::Rebuild;
use kolo_graph::settings::{SettingError, Settings};
use kolo_graph::sources::{GrainSum, Input};
use kolo_graph::{Graph, Node, NodeId, ValueId};
use layers::{Layers, layers_of_sums};
use plan::{ShardPlan, owners};
use scatter::Scatter;
use separate::separate;
use std::sync::Arc;

/// The last stage that is built.
pub const STAGE_MAX: usize = 3;

pub const ZERO: Key = Key {
    name: "zero",
    value: KeyValue::Count { default: 0, least: 0, most: STAGE_MAX },
    of_job: false,
    doc: "1: each worker keeps and runs the optimizer of its own equal run of the parameters; 2: and keeps the gradients of \
          that run alone; 3: and its weights, and layers are gathered while they are used; same digest, less memory",
};

const PREFETCH: Key = Key {
    name: "prefetch",
    value: KeyValue::Count { default: 1, least: 0, most: usize::MAX },
    of_job: false,
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
        let message = format!("is {stage}, but stages are 0 to {STAGE_MAX}");
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
                let hint = "write `zero = 2`: the second replica needs its weights whole";
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
