//! Data parallelism: every rank computes its own grains, and sums over grains become sums over all ranks' grains.
//!
//! Sums are exchanged in buckets. A bucket is a run of the memory in which the sums lie, so that nothing is copied, and
//! its exchange starts when the last of its sums is closed, while the rest of the backward pass goes on.

use crate::cut::is_piece_of_sum;
use crate::mesh::{DATA, Mesh};
use crate::strategy::{Key, KeyValue, Part, Purpose, Strategy, StrategyKind};
use kolo_graph::collective::{AfterGrains, AllReduce};
use kolo_graph::graph::Phase;
use kolo_graph::rewrite::Rebuild;
use kolo_graph::settings::{SettingError, Settings};
use kolo_graph::sources::GrainSum;
use kolo_graph::{Graph, Node, Op, Stage, ValueId, layout};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Bytes of one bucket, unless the job says otherwise.
pub const BUCKET_BYTES: usize = 4 << 20;
const MIB: f64 = (1 << 20) as f64;

pub(crate) const BUCKET_MIB: Key = Key {
    name: "bucket_mib",
    value: KeyValue::Number { default: BUCKET_BYTES as f64 / MIB, low: 0.0, high: 4096.0 },
    of_job: false,
    doc: "gradients are exchanged in runs of at least this size, each as soon as it is ready; 0: tensor by tensor",
};

/// What workers do that chose nothing else.
pub const KIND: StrategyKind = StrategyKind {
    name: "data",
    doc: "data parallelism: each worker computes its grains, and sums over grains become sums over all workers' grains",
    keys: &[BUCKET_MIB],
    read: |settings| Ok(Some(Arc::new(Data { bucket_bytes: read_bucket_bytes(settings)? }))),
};

pub(crate) fn read_bucket_bytes(settings: &Settings) -> Result<usize, SettingError> {
    Ok((BUCKET_MIB.number(settings)? * MIB) as usize)
}

/// Data parallelism with its settings.
#[derive(Clone, Copy, Debug)]
pub struct Data {
    pub bucket_bytes: usize,
}

impl Strategy for Data {
    fn name(&self) -> &'static str {
        KIND.name
    }
    fn part(&self) -> Part {
        Part::Update
    }
    fn written(&self) -> String {
        format!("parallel.{} = {}", BUCKET_MIB.name, self.bucket_bytes as f64 / MIB)
    }
    fn is_default(&self) -> bool {
        true
    }
    fn rewrite(&self, graph: Graph, purpose: Purpose, mesh: &Mesh) -> Graph {
        match is_shared(purpose, mesh) {
            true => sum_over_ranks(&graph, self.bucket_bytes),
            false => graph,
        }
    }
}

/// Whether a graph's sums over grains are shared by several ranks.
pub fn is_shared(purpose: Purpose, mesh: &Mesh) -> bool {
    purpose == Purpose::Training && mesh.size(DATA) > 1
}

/// Sums over grains that are exchanged as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// What the exchange of its sums is called.
    pub name: String,
    /// What the exchange of its parameters is called, if their sums are gradients.
    pub params_name: String,
    pub sums: Vec<ValueId>,
    /// Gradients of parameters that this rank keeps, as opposed to the loss, to statistics and to others' gradients.
    pub gradients: bool,
}

fn sum_of(graph: &Graph, id: ValueId) -> Option<&GrainSum> {
    graph.maker(id).op.downcast()
}

/// The name of the parameter whose gradient a sum is.
pub fn param_of(graph: &Graph, id: ValueId) -> &str {
    sum_of(graph, id).map_or("", |sum| &sum.of)
}

/// Cuts the sums, in the order of memory, into buckets of at least `bytes`. What is no gradient is a bucket of its own: it
/// is small and ready early.
pub fn buckets(graph: &Graph, bytes: usize) -> Vec<Bucket> {
    let (gradients, others): (Vec<ValueId>, Vec<ValueId>) =
        layout::sum_order(graph).into_iter().partition(|id| !param_of(graph, *id).is_empty());
    let params: BTreeSet<&str> = graph.params().map(|(_, param)| param.name.as_str()).collect();
    let mut buckets: Vec<Bucket> = Vec::new();
    let mut size = usize::MAX;
    for id in gradients {
        let own = params.contains(param_of(graph, id));
        if size >= bytes || buckets.last().is_some_and(|last| last.gradients != own) {
            let [name, params_name] = ["bucket", "parameters"].map(|what| format!("{what}.{}", buckets.len()));
            buckets.push(Bucket { name, params_name, sums: Vec::new(), gradients: own });
            size = 0;
        }
        size += graph.ty(id).bytes();
        let last = buckets.len() - 1;
        buckets[last].sums.push(id);
    }
    if !others.is_empty() {
        buckets.push(Bucket { name: "loss".into(), params_name: String::new(), sums: others, gradients: false });
    }
    buckets
}

/// Starts a rewrite: copies what runs up to and including the sums over grains.
pub fn copy_grains<'g>(graph: &'g Graph) -> (Rebuild<'g>, Vec<&'g Node>) {
    let mut rebuild = Rebuild::new(graph);
    let mut after = Vec::new();
    for (node, phase) in graph.nodes.iter().zip(graph.phases()) {
        if phase == Phase::After && !node.op.is::<GrainSum>() && !is_piece_of_sum(graph, node) {
            after.push(node);
        } else {
            rebuild.copy(node);
        }
    }
    (rebuild, after)
}

/// Appends a collective on these new values; its outputs.
pub fn push_collective(graph: &mut Graph, op: impl Op, inputs: Vec<ValueId>, name: &str) -> Vec<ValueId> {
    let types = graph.types(&inputs);
    let id = graph.push_typed(Arc::new(op), inputs, types, name.into(), Stage::Update);
    graph.node(id).outputs.clone()
}

/// Appends the value as it is when all grains are done.
pub fn push_after_grains(graph: &mut Graph, id: ValueId) -> ValueId {
    let ty = graph.ty(id).clone();
    let node = graph.push_typed(Arc::new(AfterGrains {}), vec![id], vec![ty], "".into(), Stage::Update);
    graph.node(node).outputs[0]
}

/// Appends a collective on a bucket and lets readers of its sums read the outputs.
pub fn exchange_bucket(rebuild: &mut Rebuild<'_>, op: impl Op, bucket: &Bucket) {
    let inputs = bucket.sums.iter().map(|id| rebuild.get(*id)).collect();
    let outputs = push_collective(&mut rebuild.new, op, inputs, &bucket.name);
    bucket.sums.iter().zip(outputs).for_each(|(old, new)| rebuild.set(*old, new));
}

/// Sums over grains become sums over the grains of all ranks.
pub fn sum_over_ranks(graph: &Graph, bucket_bytes: usize) -> Graph {
    let (mut rebuild, after) = copy_grains(graph);
    for bucket in buckets(graph, bucket_bytes) {
        exchange_bucket(&mut rebuild, AllReduce { axis: DATA.into() }, &bucket);
    }
    after.into_iter().for_each(|node| {
        rebuild.copy(node);
    });
    rebuild.finish()
}
