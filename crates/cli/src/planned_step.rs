//! The planner's word on the step that just ran, part by part: the report puts it beside what was measured.

use crate::described;
use kolo_parallel::axes::PIPELINE;
use kolo_plan::Rates;
use kolo_plan::search::LayoutModels;
use kolo_train::Trainer;
use kolo_train::layout_models::JobModels;
use kolo_train::report::{Planned, PlannedModel};
use kolo_train::step_model::{AnatomyCache, step_model};
use std::collections::BTreeMap;

/// What a plan by this machine's rates says of the first rank.
pub fn planned(trainer: &Trainer) -> Planned {
    let program = trainer.session().program();
    let cost = kolo_plan::cost(program);
    let rates = Rates::measure();
    let compute_ms = kolo_plan::predict_seconds(program, &rates) * 1e3;
    let waits_ms = waits(trainer, &rates).unwrap_or_default();
    let waiting_ms: f64 = waits_ms.values().sum();
    let memory = trainer.memory();
    Planned {
        step_ms: compute_ms + waiting_ms,
        bytes: memory.total() as u64,
        flops: cost.flops.total(),
        compute_ms,
        waiting_ms,
        waits_ms,
        memory: memory.kinds().into_iter().map(|(kind, bytes)| (kind, bytes as u64)).collect(),
        flops_per_s: rates.flops,
        bytes_per_s: rates.bytes,
        model: modelled(trainer, &rates),
    }
}

/// The step as `kolo plan` and the search see it, on workers of one host: what the rank that works the longest computes, and for
/// how long it waits along each axis. `None` for what they do not know, such as servers.
fn modelled(trainer: &Trainer, rates: &Rates) -> Option<PlannedModel> {
    let workers = trainer.world().map_or(1, |world| world.size());
    let cluster = described::machine_of(rates, workers, trainer.session().program().options.threads).ok()?;
    let models = JobModels::new(trainer.job(), &cluster).ok()?;
    let model = models.model(&models.own(workers).ok()?, &cluster).ok()?;
    let times = models.times(&model)?;
    let device = &cluster.device;
    Some(PlannedModel {
        compute_ms: (times.compute + times.update) * 1e3,
        waits_ms: times.exposed.into_iter().map(|(axis, seconds)| (axis, seconds * 1e3)).collect(),
        flops_per_s: device.peak(model.layout.precision),
        bytes_per_s: device.bandwidth,
        launch_us: device.launch * 1e6,
    })
}

/// Milliseconds for which the rank that works the longest waits for others along each axis, as workers of one host: exchanges
/// that nothing hides and, along the pipeline, its bubble. `None` for what the model of a step does not know, such as servers.
fn waits(trainer: &Trainer, rates: &Rates) -> Option<BTreeMap<String, f64>> {
    let world = trainer.world()?;
    let threads = trainer.session().program().options.threads;
    let cluster = described::machine_of(rates, world.size(), threads).ok()?;
    let model = step_model(trainer.job(), world.size(), &cluster, &mut AnatomyCache::default()).ok()?;
    let times = model.times().ok()?;
    let mut waits = times.exposed;
    if model.layout.size(PIPELINE) > 1 {
        *waits.entry(PIPELINE.into()).or_default() += times.bubble;
    }
    Some(waits.into_iter().map(|(axis, seconds)| (axis, seconds * 1e3)).collect())
}
