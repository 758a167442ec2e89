//! From a model's anatomy, a layout and a cluster to the model of a step.
//!
//! The units of the anatomy are dealt to the stages of the pipeline, their calls timed on the device, their exchanges on the
//! cluster's links; what data parallelism and ZeRO exchange follows from the parameters of each stage.

mod bound;
mod exchanges;
mod kinds;
mod layers;
mod memory;
mod stages;
#[cfg(test)]
mod tests;

pub use bound::lower_bound;
pub use kinds::{Bound, OpKindCost, op_kinds};
pub use layers::fit_layers;
pub(crate) use stages::{StageRuns, deal};

use crate::anatomy::{Anatomy, Unit, UnitPass};
use crate::cluster::{Cluster, LevelUse};
use crate::collective::{self, Algorithm, CollectiveKind};
use crate::op_cost::Runner;
use crate::schedule_cache::ScheduleCache;
use crate::step_model::{Compute, ParallelLayout, Pass, PlannedExchange, RankRole, StageModel, StepModel, Transfer};
use kolo_exec::Offload;
use kolo_parallel::axes::PIPELINE;
use kolo_parallel::axes::TENSOR;
use kolo_parallel::mesh::DATA;
use kolo_parallel::strategy::Refusal;

/// What the cores of a host read and write per second while they update for one device: sixteen cores beside an H200 took 135 to 144 GB/s.
const HOST_BYTES_PER_SECOND: f64 = 140e9;
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
    fn seconds(&self) -> f64 {
        self.forward.seconds() + self.backward()
    }

    fn backward(&self) -> f64 {
        self.input.seconds() + self.weight.seconds()
    }
}

/// What the units of an anatomy take on a device, before what data ranks add: the same for many layouts.
#[derive(Debug)]
pub(crate) struct UnitCosts {
    /// By distinct unit.
    by_unit: Vec<UnitTimes>,
}

impl UnitCosts {
    pub(crate) fn new(anatomy: &Anatomy, layout: &ParallelLayout, cluster: &Cluster) -> Self {
        let runner = Runner::new(&cluster.device, layout.precision, &cluster.system);
        let times = |unit: &Unit| {
            let pass = |pass: &UnitPass| pass_times(pass, &runner, layout, cluster);
            UnitTimes { forward: pass(&unit.forward), input: pass(&unit.input), weight: pass(&unit.weight) }
        };
        Self { by_unit: anatomy.units.iter().map(times).collect() }
    }
}

/// What every part of the composition reads.
pub(crate) struct Composition<'a> {
    anatomy: &'a Anatomy,
    layout: &'a ParallelLayout,
    cluster: &'a Cluster,
    /// By distinct unit; empty until the model is made.
    times: Vec<UnitTimes>,
    /// The units of each stage, as a run of the anatomy's order.
    stages: StageRuns,
    /// What the network gives to data ranks.
    data_span: Vec<LevelUse>,
}

/// The model of a step. Refuses layouts that the cluster or the model has no place for.
pub fn compose(anatomy: &Anatomy, layout: &ParallelLayout, cluster: &Cluster) -> Result<StepModel, Refusal> {
    let stages = deal(anatomy, layout.size(PIPELINE) * layout.chunks.max(1), cluster.system.equal_stages)?;
    let costs = UnitCosts::new(anatomy, layout, cluster);
    Composition::new(anatomy, layout, cluster, stages)?.model(&costs, &ScheduleCache::default())
}

impl<'a> Composition<'a> {
    pub(crate) fn new(
        anatomy: &'a Anatomy,
        layout: &'a ParallelLayout,
        cluster: &'a Cluster,
        stages: StageRuns,
    ) -> Result<Self, Refusal> {
        let workers = layout.workers();
        if workers > cluster.devices() {
            let message =
                format!("{workers} devices requested, but \"{}\" describes {}", cluster.name, cluster.devices());
            return Err(Refusal::new(message, "describe more groups in the cluster file, or use fewer workers"));
        }
        let data_span = cluster.span(layout.stride(DATA), layout.size(DATA));
        Ok(Self { anatomy, layout, cluster, times: Vec::new(), stages, data_span })
    }

    pub(crate) fn model(mut self, costs: &UnitCosts, schedules: &ScheduleCache) -> Result<StepModel, Refusal> {
        let places = self.layout.size(PIPELINE);
        let units = self.anatomy.units.iter().zip(&costs.by_unit);
        self.times = units.map(|(unit, times)| self.unit_times(unit, times)).collect();
        let stages: Vec<StageModel> = (0..self.stages.len()).map(|stage| self.stage(stage)).collect();
        let in_flight = self.in_flight(schedules)?;
        let roles: Vec<RankRole> = (0..places).map(|place| self.role(place, &stages, in_flight[place])).collect();
        let model_ranks = self.layout.workers() / self.layout.size(DATA) / places;
        let micro_batches = (self.layout.size(DATA) * self.layout.micro_batches) as f64;
        Ok(StepModel {
            layout: self.layout.clone(),
            stages,
            roles,
            model_flops: self.anatomy.model_flops * model_ranks as f64 * micro_batches,
            peak_flops: self.cluster.device.peak(self.layout.precision),
            overlaps_gradients: self.cluster.system.overlaps_gradients,
            jitter: self.cluster.system.jitter,
            device_memory: self.cluster.device.memory_bytes,
        })
    }

    fn span(&self, axis: &str) -> Vec<LevelUse> {
        self.cluster.span(self.layout.stride(axis), self.layout.size(axis))
    }

    /// Whether weights are gathered for every use, rather than once per step.
    fn gathers_each_use(&self) -> bool {
        self.layout.zero == 3 && self.layout.size(PIPELINE) == 1 && self.layout.size(DATA) > 1
    }

    /// A unit's costs with what data ranks add, and what other work hides.
    fn unit_times(&self, unit: &Unit, costs: &UnitTimes) -> UnitTimes {
        let mut times = costs.clone();
        times.weight.compute.add(&accumulation(unit.parameters, self.layout, self.cluster));
        if self.cluster.system.overlaps_layers {
            // Weights' gradients wait for nobody: they are computed while the input's gradient travels.
            hide(&mut times.input.exchanges, times.weight.compute.seconds());
        }
        self.add_narrowing(unit, &mut times);
        if self.gathers_each_use() {
            self.add_gathers(unit, &mut times);
        } else if self.anatomy.offload == Offload::Weights {
            self.add_fetches(unit, &mut times);
        }
        times
    }

    /// Weights of 8-bit products become narrow once per step, or whenever they have been gathered.
    fn add_narrowing(&self, unit: &Unit, times: &mut UnitTimes) {
        let runner = Runner::new(&self.cluster.device, self.layout.precision, &self.cluster.system);
        let seconds = runner.narrowing(unit.parameters + unit.borrowed);
        let both = self.gathers_each_use();
        times.forward.compute.stream += if both { seconds } else { seconds / self.layout.micro_batches.max(1) as f64 };
        times.input.compute.stream += if both { seconds } else { 0.0 };
    }

    fn units_of(&self, stage: usize) -> impl DoubleEndedIterator<Item = (usize, &Unit)> {
        self.anatomy.order[self.stages[stage].clone()].iter().map(|at| (*at, &self.anatomy.units[*at]))
    }

    /// The stages of a place of the pipeline, ascending.
    fn stages_of(&self, place: usize) -> Vec<usize> {
        (place..self.stages.len()).step_by(self.layout.size(PIPELINE)).collect()
    }

    fn parameters(&self, own: &[usize]) -> f64 {
        own.iter().flat_map(|stage| self.units_of(*stage)).map(|(_, unit)| unit.parameters).sum()
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

    fn role(&self, place: usize, stages: &[StageModel], in_flight: f64) -> RankRole {
        let (places, data) = (self.layout.size(PIPELINE), self.layout.size(DATA));
        let own = self.stages_of(place);
        let parameters = self.parameters(&own);
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
            Offload::Optimizer | Offload::Weights => {
                (bytes / HOST_BYTES_PER_SECOND).max(parameters / shared * GRADIENT_BYTES / device.host_bandwidth)
            }
        };
        let update = Compute { stream, overhead: calls * device.launch, ..Compute::default() };
        RankRole {
            place,
            ranks: self.layout.workers() / places,
            before: self.before(&own, stages),
            buckets: self.buckets(&own),
            update,
            after: self.after(parameters, &own, stages),
            memory: self.memory(&own, parameters, in_flight),
            parameters,
            stages: own,
        }
    }
}

/// A pass of a unit on a device, with its exchanges on the links of the cluster.
fn pass_times(pass: &UnitPass, runner: &Runner<'_>, layout: &ParallelLayout, cluster: &Cluster) -> Pass {
    let mut compute = Compute::default();
    pass.calls.iter().for_each(|call| compute.add(&runner.compute(call)));
    let width = layout.precision.bytes() as f64;
    let mut exchanges: Vec<PlannedExchange> = Vec::new();
    for one in &pass.exchanges {
        let bytes = one.reals * width;
        let span = cluster.span(layout.stride(&one.axis), layout.size(&one.axis));
        let seconds = collective::seconds(one.kind, Algorithm::Fastest, bytes, &span);
        let (axis, kind) = (one.axis.clone(), one.kind);
        add_exchange(&mut exchanges, &PlannedExchange { axis, kind, bytes, times: 1.0, seconds, exposed: seconds });
    }
    if cluster.system.overlaps_products {
        hide(&mut exchanges, compute.product);
    }
    Pass { compute, exchanges }
}

/// Adding a micro-batch's gradient to those before: all but the first do.
fn accumulation(parameters: f64, layout: &ParallelLayout, cluster: &Cluster) -> Compute {
    let steps = layout.micro_batches.max(1) as f64;
    let gradient = cluster.system.gradient_bytes as f64;
    let bytes = parameters * (layout.precision.bytes() as f64 + 2.0 * gradient) * (steps - 1.0) / steps;
    let device = &cluster.device;
    Compute { stream: bytes / (device.bandwidth * device.stream_share), ..Compute::default() }
}

/// Takes so many seconds of other work from what exchanges wait.
pub(crate) fn hide(exchanges: &mut [PlannedExchange], mut seconds: f64) {
    for one in exchanges {
        let hidden = one.exposed.min(seconds);
        one.exposed -= hidden;
        seconds -= hidden;
    }
}

fn add_exchange(sum: &mut Vec<PlannedExchange>, one: &PlannedExchange) {
    let same = |other: &&mut PlannedExchange| {
        let waits = |exchange: &PlannedExchange| exchange.exposed >= exchange.seconds;
        let key = |exchange: &PlannedExchange| (exchange.kind, exchange.bytes, waits(exchange));
        other.axis == one.axis && key(other) == key(one)
    };
    match sum.iter_mut().find(same) {
        Some(known) => {
            known.times += one.times;
            known.seconds += one.seconds;
            known.exposed += one.exposed;
        }
        None => sum.push(one.clone()),
    }
}
