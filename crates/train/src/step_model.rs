//! From a job to the model of its step on a described cluster: the graph that a rank would run, counted unit by unit.
//!
//! The anatomy of a model depends on how its layers are split, on the samples of a micro-batch and on what is computed again, not
//! on the number of data ranks or stages. [`AnatomyCache`] keeps them, so that a search over many layouts counts few graphs. Models
//! that repeat layers are counted from one with `FEW_LAYERS` of them.

use crate::error::Error;
use crate::job::Job;
use crate::step::{WholeStep, fuse, recompute_again, refused, tidy};
use kolo_graph::{Graph, GraphError};
use kolo_models::Model;
use kolo_parallel::keys;
use kolo_parallel::mesh::DATA;
use kolo_parallel::recompute::layers_of;
use kolo_parallel::strategy::Key;
use kolo_parallel::{Mesh, Parallel, Purpose, Recompute, RecomputePlan};
use kolo_plan::anatomy::{Anatomy, product_flops};
use kolo_plan::cluster::Cluster;
use kolo_plan::collective::Algorithm;
use kolo_plan::device::Precision;
use kolo_plan::step_model::{ParallelLayout, StepModel};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Enough for two layers that are neither the first nor the last, which have to be alike.
const FEW_LAYERS: usize = 4;

/// What an anatomy depends on, beside the model.
type AnatomyKey = (Vec<(&'static str, usize)>, usize, RecomputePlan, bool);

/// Anatomies of one job's model.
#[derive(Debug, Default)]
pub struct AnatomyCache {
    known: BTreeMap<AnatomyKey, Arc<Anatomy>>,
}

impl AnatomyCache {
    /// The anatomy of a job whose micro-batches have so many samples, split by these strategies.
    pub fn anatomy(
        &mut self,
        job: &Job,
        parallel: &Parallel,
        samples: usize,
        fuses: bool,
    ) -> Result<Arc<Anatomy>, GraphError> {
        let within = parallel.within_layers();
        let axes: Vec<(&'static str, usize)> =
            within.strategies().flat_map(|one| one.axes()).filter(|(_, size)| *size > 1).collect();
        let key = (axes, samples, parallel.recompute().clone(), fuses);
        if let Some(known) = self.known.get(&key) {
            return Ok(Arc::clone(known));
        }
        let made = Arc::new(anatomy_of(job, parallel, samples, fuses)?);
        self.known.insert(key, Arc::clone(&made));
        Ok(made)
    }
}

/// Counts the graph of a rank. Layers that differ in what they compute again are taken from graphs in which they do not.
pub fn anatomy_of(job: &Job, parallel: &Parallel, samples: usize, fuses: bool) -> Result<Anatomy, GraphError> {
    let plan = parallel.recompute();
    if !plan.has_lines() {
        return uniform_anatomy(job, parallel, samples, fuses);
    }
    let [none, selective, blocks, full] =
        Recompute::ALL.map(|what| uniform_anatomy(job, &parallel.clone().recomputing(what), samples, fuses));
    let (none, selective, blocks, full) = (none?, selective?, blocks?, full?);
    let what: Vec<Recompute> = none.layers.iter().map(|layer| plan.of(layer)).collect();
    match Anatomy::mixed([&none, &selective, &blocks, &full], &what) {
        Some(mixed) if !what.is_empty() => Ok(mixed),
        _ => count_whole(job, &*job.model, parallel, samples, fuses),
    }
}

/// Counts the graph of a rank whose layers all compute the same again.
fn uniform_anatomy(job: &Job, parallel: &Parallel, samples: usize, fuses: bool) -> Result<Anatomy, GraphError> {
    let count = |model: &dyn Model| count_whole(job, model, parallel, samples, fuses);
    let layers = job.model.layers().filter(|layers| *layers > FEW_LAYERS);
    if let Some((all, few)) = layers.and_then(|all| Some((all, job.model.with_layers(FEW_LAYERS)?)))
        && let Some(stretched) = count(&*few)?.stretched(all - FEW_LAYERS)
    {
        return Ok(stretched);
    }
    count(&*job.model)
}

/// A rank's graph before anything is computed again. Its numbers are f32 whatever the job's precision: what is counted of them
/// takes as many bytes as the layout says.
fn split_graph(job: &Job, model: &dyn Model, parallel: &Parallel, samples: usize) -> Result<Graph, GraphError> {
    let step = WholeStep { model, samples, grains: job.grains, precision: kolo_exec::Precision::F32 };
    let (graph, within) = (step.graph(job, parallel)?, parallel.within_layers());
    let mut axes = vec![(DATA, 1)];
    axes.extend(within.strategies().flat_map(|one| one.axes()));
    let mesh = Mesh::new(&axes, 0).unwrap_or_else(Mesh::alone);
    within.split_model(graph.clone(), &graph, Purpose::Training, &mesh, None).map_err(refused)
}

/// Counts the graph of a rank of this model, layer by layer.
pub fn count_whole(
    job: &Job,
    model: &dyn Model,
    parallel: &Parallel,
    samples: usize,
    fuses: bool,
) -> Result<Anatomy, GraphError> {
    let split = tidy(split_graph(job, model, parallel, samples)?);
    let (flops, layers) = (product_flops(&split), layers_of(&split));
    let again = recompute_again(split, parallel);
    let graph = if fuses { fuse(again) } else { again };
    Ok(Anatomy::of(&graph, samples, flops).naming(layers).offloading(job.memory.offload))
}

/// What a job is planned in, and who says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedPrecision {
    pub precision: Precision,
    pub said_by: PrecisionSource,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrecisionSource {
    /// `[system]` of the cluster file.
    System,
    Job,
    /// Neither: what is usual on the device.
    Device,
}

impl PlannedPrecision {
    /// What the system says, if it says something, or the job, or what is usual on the device: the same wherever a plan is made.
    pub fn of(job: &Job, cluster: &Cluster) -> Self {
        let own = Precision::named(job.precision.name()).unwrap_or_default();
        let (precision, said_by) = match cluster.system.precision {
            Some(precision) => (precision, PrecisionSource::System),
            None if job.precision_asked => (own, PrecisionSource::Job),
            None => (cluster.device.usual_precision(), PrecisionSource::Device),
        };
        Self { precision, said_by }
    }

    /// The key that lets training compute as planned, if the job does not say it.
    pub fn key(&self, job: &Job) -> Option<(&'static str, &'static str, String)> {
        let name = self.precision.name();
        let differs = name != job.precision.name() && kolo_exec::Precision::ALL.iter().any(|one| one.name() == name);
        differs.then(|| ("train", "precision", format!("{name:?}")))
    }
}

/// How the job lays itself out on so many workers.
pub fn layout_of(job: &Job, workers: usize, precision: Precision) -> Result<ParallelLayout, Error> {
    let mesh = job.parallel.mesh(workers, 0).map_err(|refusal| Error::workers(workers, refusal))?;
    let data = mesh.size(DATA);
    if !job.grains.is_multiple_of(data) {
        let message = format!("do not share {} grains evenly among {data} data ranks", job.grains);
        let hint = format!("make `data.grains` a multiple of {data}");
        return Err(Error::Workers { workers, message, hint });
    }
    let extra = job.parallel.layout(workers);
    let size = |key: &Key| extra.get(key.name).copied().unwrap_or(key.default_count());
    let schedule = job.parallel_setting(&keys::SCHEDULE);
    Ok(ParallelLayout {
        axes: mesh.axes().map(|(name, size)| (name.to_string(), size)).collect(),
        zero: size(&keys::ZERO),
        chunks: size(&keys::CHUNKS),
        schedule: schedule.map(|text| text.trim_matches('"').to_string()).unwrap_or_default(),
        micro_batch: job.grain_batch(),
        micro_batches: job.grains / data,
        recompute: job.parallel.recompute().usual(),
        precision,
        algorithm: if job.reproducible { Algorithm::Direct } else { Algorithm::Fastest },
    })
}

/// The model of a step of the job as it is laid out, on a cluster.
pub fn step_model(job: &Job, workers: usize, cluster: &Cluster, cache: &mut AnatomyCache) -> Result<StepModel, Error> {
    let mut layout = layout_of(job, workers, PlannedPrecision::of(job, cluster).precision)?;
    layout.algorithm = cluster.system.algorithm.unwrap_or(layout.algorithm);
    let anatomy = anatomy_on(job, &layout, cluster, cache)?;
    kolo_plan::compose(&anatomy, &layout, cluster).map_err(|refusal| Error::workers(workers, refusal))
}

/// The anatomy of a job as the system of a cluster runs it.
pub fn anatomy_on(
    job: &Job,
    layout: &ParallelLayout,
    cluster: &Cluster,
    cache: &mut AnatomyCache,
) -> Result<Arc<Anatomy>, GraphError> {
    let system = &cluster.system;
    let mut parallel = job.parallel.clone();
    if job.parallel.recompute().has_lines() {
        return cache.anatomy(job, &parallel, layout.micro_batch, system.fuses);
    }
    if Anatomy::repeats_whole_layers(system, layout.recompute) {
        parallel = parallel.recomputing(Recompute::None);
    }
    let anatomy = cache.anatomy(job, &parallel, layout.micro_batch, system.fuses)?;
    Ok(Arc::new(Anatomy::clone(&anatomy).run_by(system, layout.recompute)))
}
