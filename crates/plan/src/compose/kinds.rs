//! Where a step's time goes, by the kind of op: what binds each, on the mean rank of the pipeline.

use crate::anatomy::Anatomy;
use crate::cluster::Cluster;
use crate::op_cost::Runner;
use crate::step_model::{Compute, ParallelLayout, PlannedExchange, StepModel};
use kolo_parallel::axes::PIPELINE;
use std::collections::BTreeMap;

/// What sets the time of a kind of op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bound {
    Arithmetic,
    Memory,
    /// Starting kernels, and multiprocessors that have nothing to do.
    Overhead,
    Network,
}

impl Bound {
    pub const ALL: [Bound; 4] = [Bound::Arithmetic, Bound::Memory, Bound::Overhead, Bound::Network];

    pub fn name(self) -> &'static str {
        match self {
            Bound::Arithmetic => "arithmetic",
            Bound::Memory => "memory",
            Bound::Overhead => "overhead",
            Bound::Network => "network",
        }
    }
}

/// All ops of a kind in a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpKindCost {
    /// The op's name, or the collective's and its axis.
    pub name: String,
    pub compute: Compute,
    /// Bytes to and from memory.
    pub bytes: f64,
    /// Seconds of a collective that nothing hides.
    pub exposed: f64,
    pub calls: f64,
}

impl OpKindCost {
    pub fn seconds(&self) -> f64 {
        self.compute.seconds() + self.exposed
    }

    /// What takes most of its time.
    pub fn bound(&self) -> Bound {
        let parts = [self.compute.product, self.compute.stream, self.compute.overhead, self.exposed];
        let most = (0..parts.len()).max_by(|one, other| parts[*one].total_cmp(&parts[*other])).unwrap_or(0);
        Bound::ALL[most]
    }
}

/// Every kind of op of a step with its costs, the dearest first. `model` is that of the same anatomy, layout and cluster.
pub fn op_kinds(anatomy: &Anatomy, model: &StepModel, cluster: &Cluster) -> Vec<OpKindCost> {
    let ParallelLayout { precision, micro_batches, .. } = model.layout;
    let system = &cluster.system;
    let runner = Runner::new(&cluster.device, precision, system);
    let places = model.layout.size(PIPELINE) as f64;
    let mut kinds: BTreeMap<String, OpKindCost> = BTreeMap::new();
    for (at, unit) in anatomy.units.iter().enumerate() {
        let count = anatomy.order.iter().filter(|other| **other == at).count() as f64;
        let times = count * micro_batches as f64 / places;
        for call in [&unit.forward, &unit.input, &unit.weight].into_iter().flat_map(|pass| &pass.calls) {
            let kind = kinds.entry(call.name.into()).or_default();
            kind.compute.add(&runner.compute(call).times(times));
            kind.bytes += call.moved_bytes(precision) * times;
            kind.calls += times;
        }
    }
    add_shared_work(&mut kinds, model, places);
    add_exchanges(&mut kinds, model, places);
    let mut all: Vec<OpKindCost> = kinds.into_iter().map(|(name, kind)| OpKindCost { name, ..kind }).collect();
    all.retain(|kind| kind.seconds() > 0.0);
    all.sort_by(|one, other| other.seconds().total_cmp(&one.seconds()).then(one.name.cmp(&other.name)));
    all
}

/// What belongs to no op of the model: adding gradients up, what hidden exchanges take of the device, and the update.
fn add_shared_work(kinds: &mut BTreeMap<String, OpKindCost>, model: &StepModel, places: f64) {
    let (mut counted, mut all) = (Compute::default(), Compute::default());
    kinds.values().for_each(|kind| counted.add(&kind.compute));
    let passes = model.stages.iter().flat_map(|stage| [&stage.forward, &stage.input, &stage.weight]);
    passes.for_each(|pass| all.add(&pass.compute.times(model.layout.micro_batches as f64 / places)));
    // What rounding leaves is nothing.
    let beyond = |all: f64, counted: f64| if all - counted > 1e-9 * all { all - counted } else { 0.0 };
    kinds.entry("adding gradients".into()).or_default().compute.stream = beyond(all.stream, counted.stream);
    kinds.entry("multiprocessors of exchanges".into()).or_default().compute.overhead =
        beyond(all.overhead, counted.overhead);
    let update = kinds.entry("update".into()).or_default();
    for role in &model.roles {
        update.compute.add(&role.update.times(1.0 / places));
    }
}

/// Collectives, as far as nothing hides them.
fn add_exchanges(kinds: &mut BTreeMap<String, OpKindCost>, model: &StepModel, places: f64) {
    let mut add = |exchange: &PlannedExchange, times: f64| {
        let kind = kinds.entry(format!("{} along {}", exchange.kind.name(), exchange.axis)).or_default();
        kind.exposed += exchange.exposed * times;
        kind.calls += exchange.times * times;
    };
    let times = model.layout.micro_batches as f64 / places;
    for stage in &model.stages {
        let passes = [&stage.forward, &stage.input, &stage.weight];
        passes.iter().flat_map(|pass| &pass.exchanges).for_each(|one| add(one, times));
    }
    for role in &model.roles {
        role.before.iter().chain(&role.after).for_each(|one| add(one, 1.0 / places));
        if let Some(bucket) = role.buckets.last() {
            let (axis, kind, seconds) = (bucket.axis.clone(), bucket.kind, bucket.seconds);
            let exposed = model.gradients_exposed(role);
            let times = role.buckets.len() as f64;
            add(&PlannedExchange { axis, kind, bytes: bucket.bytes, times, seconds, exposed }, 1.0 / places);
        }
    }
}
