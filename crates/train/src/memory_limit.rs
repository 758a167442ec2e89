//! `memory.limit`: a job of which a worker would take more is refused before anything is allocated, with the layouts that
//! would fit. Each of these was planned like the job itself, for every rank.

use crate::error::Error;
use crate::job::Job;
use crate::job_file;
use crate::machine::format_bytes;
use crate::memory_check::{by_kind, largest_hint};
use crate::step::evaluation_graph;
use crate::worker_plan::WorkerPlan;
use kolo_exec::{Offload, Options};
use kolo_graph::settings::Setting;
use kolo_parallel::axes::{HEADS_AXIS, HEIGHT, RING_AXIS, WIDTH};
use kolo_parallel::keys;
use kolo_parallel::mesh::DATA;
use kolo_parallel::strategy::{Key, Strategy};
use kolo_parallel::{Parallel, Recompute, RecomputePlan};
use kolo_plan::MemoryPlan;
use std::cell::Cell;

/// What the workers of a job take.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// This rank's plan of the memory that its device computes in.
    pub plan: &'a MemoryPlan,
    /// Bytes of the rank that needs most.
    pub largest: u64,
    pub rank: usize,
    /// Who would run the job; `None` if no other layout is to be looked for.
    pub layouts: Option<WorkersNow>,
}

/// The workers that a job was started with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkersNow {
    pub workers: usize,
    /// Threads of each.
    pub threads: usize,
}

/// Refuses a job of which a worker takes more than its `memory.limit`. If all ranks call it, the first explains, and the others'
/// message is empty.
pub fn check(job: &Job, wanted: &Wanted<'_>) -> Result<(), Error> {
    let Some(limit) = job.memory.limit_bytes.filter(|limit| wanted.largest > *limit) else { return Ok(()) };
    if wanted.rank > 0 {
        return Err(Error::Memory(String::new()));
    }
    let own = wanted.plan.total() as u64;
    let whose = match wanted.largest == own {
        true => String::new(),
        false => format!(" at rank 0, which takes {}", format_bytes(own)),
    };
    let (found, hint) = match wanted.layouts.map(|now| fitting(job, limit, now)).transpose()? {
        Some(search) => search.explain(wanted.plan),
        None => (String::new(), largest_hint(wanted.plan).to_string()),
    };
    let of_device = !job.executor.allocates_on_host();
    let of = if of_device { "of its GPU's memory" } else { "of memory" };
    Err(Error::Memory(format!(
        "a worker needs {} {of}, but `memory.limit` allows {}\n  {}{whose}{found}\n  hint: {hint}",
        format_bytes(wanted.largest),
        format_bytes(limit),
        by_kind(wanted.plan, of_device),
    )))
}

/// Layouts that are named, at most.
const NAMED_MAX: usize = 4;
/// Workers of a layout that is considered, at most.
const WORKERS_MAX: usize = 64;
/// Workers that share a model in one way, at most; more that share a layer are seldom on one host.
const SHARED_MAX: usize = 8;

/// Nodes of the graphs that are planned to find layouts, at most: a few seconds.
const NODES_PLANNED_MAX: usize = 400_000;
/// Bytes of a weight and of its gradient, which some worker has; on a device whose host keeps and updates weights, of a half-precision copy.
const LEAST_BYTES: u64 = 8;
const LEAST_BYTES_OF_DEVICE: u64 = 2;

/// What exceeds the limit by one part in so many is far from fitting.
const FAR: u64 = 10;

/// A way to run a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FittingLayout {
    pub workers: usize,
    /// Threads of each.
    pub threads: usize,
    pub recompute: Recompute,
    pub offload: Offload,
    pub zero: usize,
    pub shares: ModelShares,
}

/// How many workers share the model in each way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelShares {
    /// Its layers, one behind the other.
    pub pipeline: usize,
    /// The rows of its images.
    pub spatial: usize,
    /// The tokens of its samples.
    pub context: usize,
    /// Every layer.
    pub tensor: usize,
}

impl ModelShares {
    fn all(self) -> [usize; 4] {
        [self.pipeline, self.spatial, self.context, self.tensor]
    }

    fn ranks(self) -> usize {
        self.all().iter().product()
    }
}

impl FittingLayout {
    /// Whether another one does with as few workers and changes.
    fn is_beside(&self, other: &FittingLayout) -> bool {
        let parts = |one: &FittingLayout| {
            let kept = [one.workers, one.recompute as usize, one.offload as usize, one.zero];
            kept.into_iter().chain(one.shares.all())
        };
        parts(self).zip(parts(other)).all(|(own, other)| own >= other)
    }
}

/// A layout with the bytes of the worker that needs most, and how it differs from the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    pub layout: FittingLayout,
    pub bytes: u64,
    /// Assignments for `--set`.
    pub changes: Vec<String>,
}

impl std::fmt::Display for Planned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let FittingLayout { workers, threads, .. } = self.layout;
        write!(f, "{:<9} -n {workers} --threads {threads}", format_bytes(self.bytes))?;
        self.changes.iter().try_for_each(|change| write!(f, " --set {change}"))
    }
}

/// What a search found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The nearest first.
    pub fitting: Vec<Planned>,
    /// The smallest of those that do not fit.
    pub smallest: Option<Planned>,
    /// Bytes of each of the most workers that weights and gradients alone take, if no layout was planned for that.
    pub least: Option<u64>,
}

impl Found {
    /// What to say of it, and a hint.
    fn explain(&self, plan: &MemoryPlan) -> (String, String) {
        let lines: Vec<String> = self.fitting.iter().map(|one| format!("\n    {one}")).collect();
        if !lines.is_empty() {
            let hint = "start it with one of these, or raise `memory.limit`";
            return (format!("\n  layouts that fit, with what a worker takes:{}", lines.concat()), hint.into());
        }
        let least = self.least.filter(|_| self.smallest.is_none()).map_or(String::new(), |bytes| {
            format!(": weights and gradients alone take {} on each of {WORKERS_MAX} workers", format_bytes(bytes))
        });
        let smallest = self.smallest.as_ref().map_or(least, |one| format!("; the smallest is\n    {one}"));
        let text =
            format!("\n  no layout of recompute, zero, pipeline, spatial, context, tensor and workers fits{smallest}");
        (text, format!("{}, or raise `memory.limit`", largest_hint(plan)))
    }
}

/// The nearest layouts of a job in which every worker takes at most this many bytes: with the same workers or more, and the
/// fewest changes.
pub fn fitting(job: &Job, limit: u64, now: WorkersNow) -> Result<Found, Error> {
    let space = Space::of(job, now)?;
    let mut found = Found::default();
    for (workers, shares) in space.meshes() {
        // What no layout of these workers can fall below needs no plan.
        let least = space.least_bytes(workers);
        if least > limit {
            found.least = Some(found.least.map_or(least, |known| known.min(least)));
            continue;
        }
        if space.planned_nodes.get() > NODES_PLANNED_MAX {
            break;
        }
        let at = |recompute, offload, zero| FittingLayout { offload, ..space.layout(workers, shares, recompute, zero) };
        let (most, offloads) = (space.zero_of(workers, shares), space.offloads());
        let last = offloads[offloads.len() - 1];
        // Recomputing everything takes the least, or little more if there is not much to recompute: if it is far from fitting with
        // every stage of ZeRO, no layout of these workers fits.
        let recomputes = Recompute::that_differ(shares.ranks() > shares.pipeline);
        let everything = recomputes[recomputes.len() - 1];
        let mut blocks: Vec<Planned> = Vec::new();
        for zero in 0..=most {
            blocks.extend(space.plan(at(everything, last, zero), limit)?);
        }
        let beyond = blocks.iter().filter(|planned| planned.bytes > limit).cloned();
        found.smallest = found.smallest.into_iter().chain(beyond).min_by_key(|planned| planned.bytes);
        if blocks.iter().all(|planned| planned.bytes - planned.bytes / FAR > limit) {
            continue;
        }
        let kept = offloads.iter().flat_map(|offload| recomputes.iter().map(|recompute| (*recompute, *offload)));
        let mut choices: Vec<FittingLayout> =
            kept.flat_map(|(recompute, offload)| (0..=most).map(move |zero| at(recompute, offload, zero))).collect();
        choices.sort_by_key(|layout| (space.changes(layout).len(), layout.recompute));
        for layout in choices {
            if found.fitting.iter().any(|known| layout.is_beside(&known.layout)) {
                continue;
            }
            let planned = match blocks.iter().find(|planned| planned.layout == layout) {
                Some(known) => Some(known.clone()),
                None if layout.recompute == everything && layout.offload == last => None,
                None => space.plan(layout, limit)?,
            };
            found.fitting.extend(planned.filter(|planned| planned.bytes <= limit));
            if found.fitting.len() >= NAMED_MAX {
                return Ok(found);
            }
        }
    }
    Ok(found)
}

/// The layouts that a job may have.
struct Space<'j> {
    job: &'j Job,
    now: WorkersNow,
    zero_max: usize,
    tensor_max: usize,
    /// As the job has it.
    own: FittingLayout,
    /// Parts of sums that workers of `tensor` share.
    slices: usize,
    tiles: usize,
    /// Tokens have slices, so that workers may share them.
    by_tokens: bool,
    /// Images may be cut into more strips: they are in strips, or whole, and no line says how.
    in_strips: bool,
    /// Of the whole model.
    parameters: u64,
    /// Nodes of all graphs that were planned so far.
    planned_nodes: Cell<usize>,
}

impl<'j> Space<'j> {
    fn of(job: &'j Job, now: WorkersNow) -> Result<Self, Error> {
        let sizes = job.parallel.layout(now.workers);
        let size = |key: &Key| sizes.get(key.name).copied().unwrap_or(key.default_count());
        let along = |axis: &str| sizes.get(axis).copied().unwrap_or(1);
        let own = FittingLayout {
            workers: now.workers,
            threads: now.threads,
            recompute: job.parallel.recompute().usual(),
            offload: job.memory.offload,
            zero: size(&keys::ZERO),
            shares: ModelShares {
                pipeline: size(&keys::PIPELINE),
                spatial: along(HEIGHT),
                context: along(RING_AXIS).max(along(HEADS_AXIS)),
                tensor: size(&keys::TENSOR),
            },
        };
        let (zero_max, tensor_max) = (most(job, &keys::ZERO), most(job, &keys::TENSOR));
        let by_tokens = sizes.contains_key(RING_AXIS) || sizes.contains_key(HEADS_AXIS);
        let slices = size(slices_key(by_tokens));
        let (tensor_max, tiles) = (tensor_max.min(SHARED_MAX), along(keys::TILES.name));
        let in_strips = along(WIDTH) == 1 && !job.parallel.strategies().any(Strategy::is_of_layers);
        let parameters = evaluation_graph(&*job.model, 1)?.parameter_count() as u64;
        let planned_nodes = Cell::new(0);
        Ok(Self { job, now, zero_max, tensor_max, own, slices, tiles, by_tokens, in_strips, parameters, planned_nodes })
    }

    /// Bytes that one of so many workers takes at least, however they share the model: nobody can do without weights and gradients.
    fn least_bytes(&self, workers: usize) -> u64 {
        let each = match (self.job.executor.allocates_on_host(), self.offloads().contains(&Offload::Weights)) {
            (true, _) => LEAST_BYTES,
            (false, false) => LEAST_BYTES_OF_DEVICE,
            (false, true) => 0,
        };
        self.parameters * each / workers as u64
    }

    /// Ways to share the model that differ from the job's in one number, those that leave its bits as they are first.
    fn shares(&self, workers: usize) -> Vec<ModelShares> {
        let own = self.own.shares;
        let powers = |most: usize| (0..=most.max(1).ilog2()).map(|power| 1usize << power);
        let most = SHARED_MAX.min(workers);
        let context = if self.by_tokens { most } else { 1 };
        let spatial = if self.in_strips { most } else { 1 };
        let mut all = vec![own];
        all.extend(powers(most).map(|pipeline| ModelShares { pipeline, ..own }));
        all.extend(powers(context).map(|context| ModelShares { context, ..own }));
        all.extend(powers(spatial).map(|spatial| ModelShares { spatial, ..own }));
        all.extend(powers(self.tensor_max).map(|tensor| ModelShares { tensor, ..own }));
        all
    }

    /// Workers, and how they share the model, the nearest first.
    fn meshes(&self) -> Vec<(usize, ModelShares)> {
        let powers = |most: usize| (0..=most.max(1).ilog2()).map(|power| 1usize << power);
        let workers = powers(WORKERS_MAX).map(|times| self.now.workers.saturating_mul(times));
        let workers = workers.filter(|workers| *workers <= WORKERS_MAX.max(self.now.workers));
        let mut meshes: Vec<(usize, ModelShares)> = Vec::new();
        for workers in workers {
            for shares in self.shares(workers) {
                if workers.is_multiple_of(shares.ranks()) && !meshes.contains(&(workers, shares)) {
                    meshes.push((workers, shares));
                }
            }
        }
        meshes
    }

    /// The stage of ZeRO that shares the most among these workers: none if nobody shares the grains.
    fn zero_of(&self, workers: usize, shares: ModelShares) -> usize {
        if workers > shares.ranks() { self.zero_max } else { 0 }
    }

    fn layout(&self, workers: usize, shares: ModelShares, recompute: Recompute, zero: usize) -> FittingLayout {
        // The cores are shared by whoever is on them.
        let threads = (self.now.threads * self.now.workers / workers).max(1);
        FittingLayout { workers, threads, recompute, offload: self.own.offload, zero, shares }
    }

    /// From what the job leaves in the host's memory to the most that its device can.
    fn offloads(&self) -> Vec<Offload> {
        let executor = &self.job.executor;
        let more = Offload::ALL.into_iter().filter(|more| *more > self.own.offload);
        let more = more.filter(|offload| executor.with_offload(*offload).is_some());
        std::iter::once(self.own.offload).chain(more).collect()
    }

    /// Keys of `[parallel]` that differ from the job's.
    fn keys(&self, layout: &FittingLayout) -> Vec<(&'static str, usize)> {
        let (shares, own) = (layout.shares, self.own.shares);
        let slices = self.slices.max(shares.tensor.next_power_of_two());
        // Tiles that a job has stay as they are.
        let tiles = if self.tiles == 1 { shares.spatial } else { self.tiles };
        let keys = [
            (keys::ZERO.name, layout.zero, self.own.zero),
            (keys::PIPELINE.name, shares.pipeline, own.pipeline),
            (keys::SPATIAL.name, shares.spatial, own.spatial),
            (keys::TILES.name, tiles, self.tiles),
            (keys::CONTEXT.name, shares.context, own.context),
            (keys::TENSOR.name, shares.tensor, own.tensor),
            (slices_key(self.by_tokens).name, slices, self.slices),
        ];
        keys.into_iter().filter(|(_, value, own)| value != own).map(|(key, value, _)| (key, value)).collect()
    }

    fn changes(&self, layout: &FittingLayout) -> Vec<String> {
        let keys = self.keys(layout).into_iter().map(|(key, value)| format!("parallel.{key}={value}"));
        let again = (layout.recompute != self.own.recompute).then(|| layout.recompute.name());
        let kept = (layout.offload != self.own.offload).then(|| layout.offload.name());
        let kept = kept.map(|name| format!("memory.offload={name}"));
        // One word for all layers takes the place of lines for some.
        let lines = again.filter(|_| self.job.parallel.recompute().has_lines()).map(|_| "memory.layers={}".to_string());
        keys.chain(again.map(|name| format!("memory.recompute={name}"))).chain(lines).chain(kept).collect()
    }

    /// Plans a layout: bytes are those of the rank that needs most, or of the first copy of the model if that exceeds the limit. `None` if the job cannot have it.
    fn plan(&self, layout: FittingLayout, limit: u64) -> Result<Option<Planned>, Error> {
        let recompute = match layout.recompute == self.own.recompute {
            true => self.job.parallel.recompute().clone(),
            false => layout.recompute.into(),
        };
        let Ok(parallel) = parallel_with(self.job, &self.keys(&layout), recompute) else { return Ok(None) };
        let Ok(data) = parallel.data_ranks(layout.workers) else { return Ok(None) };
        if !(self.job.grains.is_multiple_of(data) && data.is_power_of_two()) {
            return Ok(None);
        }
        let options = Options::for_grains(self.job.grains / data, layout.threads);
        let mut bytes = 0;
        for rank in 0..layout.workers {
            let Ok(mesh) = parallel.mesh(layout.workers, rank) else { return Ok(None) };
            debug_assert_eq!(mesh.size(DATA), data);
            // A model that cannot be split so is no layout of this job.
            let Ok(plan) = WorkerPlan::new(self.job, &parallel, &mesh, Some(&mesh), options) else { return Ok(None) };
            self.planned_nodes.set(self.planned_nodes.get() + plan.program.graph.nodes.len());
            let memory = match layout.offload == self.own.offload {
                true => *plan.limited(),
                false => plan.offloaded(layout.offload).unwrap_or(*plan.limited()),
            };
            bytes = bytes.max(memory.total() as u64);
            // The first copy of the model has shown what its parts take.
            if bytes > limit && rank + 1 >= layout.workers / data {
                break;
            }
        }
        Ok(Some(Planned { layout, bytes, changes: self.changes(&layout) }))
    }
}

/// The most that a count of `[parallel]` may be; its default if no strategy of the job reads it.
fn slices_key(by_tokens: bool) -> &'static Key {
    if by_tokens { &keys::TENSOR_SLICES } else { &keys::SLICES }
}

fn most(job: &Job, key: &Key) -> usize {
    let is_read = job.strategies.iter().any(|kind| kind.keys.contains(key));
    key.most().filter(|_| is_read).unwrap_or(key.default_count())
}

/// A job's strategies with other numbers under some keys of `[parallel]`, and this computed again.
fn parallel_with(job: &Job, keys: &[(&str, usize)], recompute: RecomputePlan) -> Result<Parallel, Error> {
    let mut root = job_file::parse(&job.text, "job")?;
    if let Some(parallel) = root.table_mut("parallel", "job") {
        keys.iter().for_each(|(key, value)| parallel.set(key, "job", Setting::Int(*value as i64)));
    }
    let parallel = Parallel::read(&root.table("parallel")?, &job.strategies, job.facts())?;
    Ok(parallel.recomputing(recompute))
}
