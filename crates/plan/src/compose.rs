//! From a model's anatomy, a layout and a cluster to the model of a step.
//!
//! The units of the anatomy are dealt to the stages of the pipeline, their calls timed on the device, their exchanges on the
//! cluster's links; what data parallelism and ZeRO exchange follows from the parameters of each stage.

mod exchanges;
mod memory;
mod stages;

pub(crate) use memory::short;

use crate::anatomy::{Anatomy, Unit, UnitPass};
use crate::cluster::{Cluster, LevelUse, SystemTraits};
use crate::collective::{self, Algorithm, CollectiveKind};
use crate::op_cost::Runner;
use crate::step_model::{Compute, Exchange, Layout, Pass, Role, StageModel, StepModel, Transfer};
use kolo_exec::Offload;
use kolo_parallel::axes::PIPELINE;
use kolo_parallel::axes::TENSOR;
use kolo_parallel::mesh::DATA;
use kolo_parallel::strategy::Refusal;

/// What the cores of a host read and write per second while they update for one device. Assumed: the memory of some sixteen cores.
const HOST_BYTES_PER_SECOND: f64 = 100e9;
/// Bytes of a gradient on its way to the host; what comes back is no more.
const GRADIENT_BYTES: f64 = 4.0;

/// What a unit takes on the device, on one micro-batch.
#[derive(Clone, Debug, Default)]
pub(crate) struct UnitTimes {
    forward: Pass,
    input: Pass,
    weight: Pass,
}

impl UnitTimes {
    fn backward(&self) -> f64 {
        self.input.seconds() + self.weight.seconds()
    }
}

/// What every part of the composition reads.
pub(crate) struct Composition<'a> {
    anatomy: &'a Anatomy,
    layout: &'a Layout,
    cluster: &'a Cluster,
    runner: Runner<'a>,
    /// By distinct unit.
    times: Vec<UnitTimes>,
    /// The units of each stage, as a run of the anatomy's order.
    stages: Vec<std::ops::Range<usize>>,
}

/// The model of a step. Refuses layouts that the cluster or the model has no place for.
pub fn compose(anatomy: &Anatomy, layout: &Layout, cluster: &Cluster) -> Result<StepModel, Refusal> {
    let workers = layout.workers();
    if workers > cluster.devices() {
        let message = format!("{workers} devices are wanted, but \"{}\" describes {}", cluster.name, cluster.devices());
        return Err(Refusal::new(message, "describe more groups in the cluster file, or use fewer workers"));
    }
    let places = layout.size(PIPELINE);
    let stages = stages::deal(anatomy, places * layout.chunks.max(1), cluster.system.equal_stages)?;
    let SystemTraits { flash_attention: flash, fuses, .. } = cluster.system;
    let runner = Runner { device: &cluster.device, precision: layout.precision, flash, fuses };
    let mut composition = Composition { anatomy, layout, cluster, runner, times: Vec::new(), stages };
    composition.times = anatomy.units.iter().map(|unit| composition.unit_times(unit)).collect();
    let stages: Vec<StageModel> = (0..composition.stages.len()).map(|stage| composition.stage(stage)).collect();
    let in_flight = memory::in_flight(layout)?;
    let roles: Vec<Role> = (0..places).map(|place| composition.role(place, &stages, in_flight[place])).collect();
    let model_ranks = workers / layout.size(DATA) / places;
    let micro_batches = (layout.size(DATA) * layout.micro_batches) as f64;
    Ok(StepModel {
        layout: layout.clone(),
        stages,
        roles,
        model_flops: anatomy.model_flops * model_ranks as f64 * micro_batches,
        peak_flops: cluster.device.peak(layout.precision),
        overlaps_gradients: cluster.system.overlaps_gradients,
        jitter: cluster.system.jitter,
        device_memory: cluster.device.memory_bytes,
    })
}

impl Composition<'_> {
    fn span(&self, axis: &str) -> Vec<LevelUse> {
        self.cluster.span(self.layout.stride(axis), self.layout.size(axis))
    }

    /// Whether weights are gathered for every use, rather than once per step.
    fn gathers_each_use(&self) -> bool {
        self.layout.zero == 3 && self.layout.size(PIPELINE) == 1 && self.layout.size(DATA) > 1
    }

    fn unit_times(&self, unit: &Unit) -> UnitTimes {
        let mut times = UnitTimes {
            forward: self.pass(&unit.forward),
            input: self.pass(&unit.input),
            weight: self.pass(&unit.weight),
        };
        times.weight.compute.add(&self.accumulation(unit));
        if self.cluster.system.overlaps_products {
            [&mut times.forward, &mut times.input, &mut times.weight].into_iter().for_each(|pass| {
                let products = pass.compute.product;
                hide(&mut pass.exchanges, products);
            });
        }
        if self.cluster.system.overlaps_layers {
            // Weights' gradients wait for nobody: they are computed while the input's gradient travels.
            hide(&mut times.input.exchanges, times.weight.compute.seconds());
        }
        if self.gathers_each_use() {
            self.add_gathers(unit, &mut times);
        }
        times
    }

    fn pass(&self, pass: &UnitPass) -> Pass {
        let mut compute = Compute::default();
        pass.calls.iter().for_each(|call| compute.add(&self.runner.compute(call)));
        let width = self.layout.precision.bytes() as f64;
        let mut exchanges: Vec<Exchange> = Vec::new();
        for one in &pass.exchanges {
            let bytes = one.reals * width;
            let seconds = collective::seconds(one.kind, Algorithm::Fastest, bytes, &self.span(&one.axis));
            let same = |other: &&mut Exchange| other.axis == one.axis && other.kind == one.kind && other.bytes == bytes;
            match exchanges.iter_mut().find(same) {
                Some(known) => {
                    known.times += 1.0;
                    known.seconds += seconds;
                    known.exposed += seconds;
                }
                None => exchanges.push(Exchange {
                    axis: one.axis.clone(),
                    kind: one.kind,
                    bytes,
                    times: 1.0,
                    seconds,
                    exposed: seconds,
                }),
            }
        }
        Pass { compute, exchanges }
    }

    /// Adding a micro-batch's gradient to those before: all but the first do.
    fn accumulation(&self, unit: &Unit) -> Compute {
        let steps = self.layout.micro_batches.max(1) as f64;
        let gradient = self.cluster.system.gradient_bytes as f64;
        let bytes = unit.parameters * (self.layout.precision.bytes() as f64 + 2.0 * gradient) * (steps - 1.0) / steps;
        let device = &self.cluster.device;
        Compute { stream: bytes / (device.bandwidth * device.stream_share), ..Compute::default() }
    }

    fn units_of(&self, stage: usize) -> impl DoubleEndedIterator<Item = (usize, &Unit)> {
        self.anatomy.order[self.stages[stage].clone()].iter().map(|at| (*at, &self.anatomy.units[*at]))
    }

    fn stage(&self, stage: usize) -> StageModel {
        let mut model = StageModel::default();
        for (at, _) in self.units_of(stage) {
            let UnitTimes { forward, input, weight } = &self.times[at];
            for (sum, part) in [(&mut model.forward, forward), (&mut model.input, input), (&mut model.weight, weight)] {
                sum.compute.add(&part.compute);
                part.exchanges.iter().for_each(|one| add_exchange(&mut sum.exchanges, one));
            }
        }
        let width = self.layout.precision.bytes();
        let handed = |stage: usize| {
            let last = self.stages[stage].clone().next_back();
            last.map_or(0.0, |at| self.anatomy.units[self.anatomy.order[at]].handed_on.bytes_at(width))
        };
        let last = stage + 1 == self.stages.len();
        let bytes = [if last { 0.0 } else { handed(stage) }, if stage == 0 { 0.0 } else { handed(stage - 1) }];
        model.sends = bytes.map(|bytes| self.transfer(bytes));
        model
    }

    /// A message to a neighbour of the pipeline; the slowest one, where neighbours lie differently far apart.
    fn transfer(&self, bytes: f64) -> Transfer {
        let span = self.span(PIPELINE);
        if bytes == 0.0 || span.is_empty() {
            return Transfer::default();
        }
        let sharers = self.layout.size(TENSOR);
        let part = if self.cluster.system.scatters_sends { bytes / sharers as f64 } else { bytes };
        let mut seconds = collective::seconds(CollectiveKind::Send, Algorithm::Fastest, part, &span);
        if part < bytes {
            seconds += collective::seconds(CollectiveKind::AllGather, Algorithm::Fastest, bytes, &self.span(TENSOR));
        }
        Transfer { bytes: part, seconds }
    }

    fn role(&self, place: usize, stages: &[StageModel], in_flight: f64) -> Role {
        let (places, data) = (self.layout.size(PIPELINE), self.layout.size(DATA));
        let own: Vec<usize> = (place..self.stages.len()).step_by(places).collect();
        let parameters: f64 = own.iter().flat_map(|stage| self.units_of(*stage)).map(|(_, unit)| unit.parameters).sum();
        let shared = if self.layout.zero > 0 { data as f64 } else { 1.0 };
        let device = &self.cluster.device;
        // A half-precision copy of the weights is made of the new masters.
        let cast = if self.layout.precision.is_mixed() { 6.0 } else { 0.0 };
        let bytes = parameters / shared * (self.anatomy.update_bytes + cast);
        let calls = match self.cluster.system.fuses {
            true => 1.0,
            false => self.anatomy.update_calls * parameters / self.anatomy.parameters().max(1.0),
        };
        let stream = match self.anatomy.offload {
            Offload::None => bytes / (device.bandwidth * device.stream_share),
            // Gradients come to the host piece by piece, while it updates others and yet others leave.
            Offload::Optimizer => {
                (bytes / HOST_BYTES_PER_SECOND).max(parameters / shared * GRADIENT_BYTES / device.host_bandwidth)
            }
        };
        let update = Compute { stream, overhead: calls * device.launch, ..Compute::default() };
        Role {
            place,
            ranks: self.layout.workers() / places,
            before: self.before(&own, stages),
            buckets: self.buckets(&own),
            update,
            after: self.after(parameters),
            memory: self.memory(&own, parameters, in_flight),
            parameters,
            stages: own,
        }
    }
}

/// Takes so many seconds of other work from what exchanges wait.
pub(crate) fn hide(exchanges: &mut [Exchange], mut seconds: f64) {
    for one in exchanges {
        let hidden = one.exposed.min(seconds);
        one.exposed -= hidden;
        seconds -= hidden;
    }
}

fn add_exchange(sum: &mut Vec<Exchange>, one: &Exchange) {
    let same = |other: &&mut Exchange| other.axis == one.axis && other.kind == one.kind && other.bytes == one.bytes;
    match sum.iter_mut().find(same) {
        Some(known) => {
            known.times += one.times;
            known.seconds += one.seconds;
            known.exposed += one.exposed;
        }
        None => sum.push(one.clone()),
    }
}
