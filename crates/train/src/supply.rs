//! Where the samples of a step come from: made ahead by loader threads, or by the lanes that use them.
//!
//! Loaders are the rule. Lanes make samples only of a source that neither waits nor fails, and only if a whole batch takes
//! less than handing it over. Either way the same source fills the same samples, so the bits are the same. A batch that was
//! made ahead is there as a whole before its step begins: if it cannot be read, the step runs no op and starts no exchange.

use crate::error::Error;
use crate::job::{Job, Loading};
use crate::timeline::{DATA, Timeline};
use kolo_comm::Watch;
use kolo_data::prefetch::{Prefetch, PrefetchPlan, Recipe, Samples, Tracer, Values};
use kolo_data::stream::{Route, Walk};
use kolo_data::{Column, Field, Kind, Purpose, SampleCost, Source, epoch_order};
use kolo_exec::Feed;
use kolo_parallel::GrainShare;
use serde::Serialize;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What a batch costs that goes from a loader to the lanes: two threads woken, cores that change hands, a copy.
const HANDOVER_NS: u64 = 100_000;
/// Shorter waits are not on the timeline.
const WAIT_SHOWN: Duration = Duration::from_micros(20);
/// Finding the number of a sample in an epoch.
const CHOOSE_NS: u64 = 200;

/// Whether lanes make so many samples of a step themselves.
pub(crate) fn by_lanes(job: &Job, samples: usize) -> bool {
    match (job.source.cost(), job.loading) {
        (SampleCost::Read, _) => false,
        (SampleCost::Computed { .. }, Loading { batches: 0, .. }) => true,
        (SampleCost::Computed { .. }, Loading { asked: true, .. }) => false,
        (SampleCost::Computed { ns }, _) => (ns + CHOOSE_NS).saturating_mul(samples as u64) <= HANDOVER_NS,
    }
}

/// Bytes of the buffers for a step of so many samples, made in as many grains as it may be.
pub fn buffer_bytes(job: &Job, samples: usize) -> usize {
    match by_lanes(job, samples) {
        true => samples * size_of::<usize>(),
        false => {
            let batches = Samples::bytes(job.fields.iter(), samples).saturating_mul(job.loading.batches + 1);
            batches.saturating_add(job.source.held_bytes())
        }
    }
}

/// The training samples of a worker's grains.
#[derive(Debug)]
pub(crate) struct TrainingSamples<J> {
    pub job: J,
    pub grains: GrainShare,
}

impl<J: Deref<Target = Job> + Send + Sync + std::fmt::Debug> Recipe for TrainingSamples<J> {
    fn source_name(&self) -> &str {
        &self.job.source_name
    }

    fn source(&self) -> &dyn Source {
        &*self.job.source
    }

    fn columns(&self) -> &[usize] {
        &self.job.columns
    }

    fn epoch(&self, step: usize) -> Option<usize> {
        Some(step / self.job.steps_per_epoch)
    }

    fn choose(&self, step: usize, grain: usize, samples: &mut Vec<usize>) {
        let job = &*self.job;
        let order = epoch_order(job.seed, step / job.steps_per_epoch, job.split.train_len());
        let start = step % job.steps_per_epoch * job.batch + self.grains.at(grain) * job.grain_batch();
        samples.extend((start..start + job.grain_batch()).map(|at| job.split.train(order.at(at))));
    }

    fn walk(&self, first_step: usize, grains: usize) -> Option<Box<dyn Walk>> {
        let job = &*self.job;
        job.source.walk(&Route {
            purpose: Purpose::Training,
            split: job.split,
            first_step,
            steps_per_epoch: job.steps_per_epoch,
            step_samples: job.batch,
            first_sample: self.grains.at(0) * job.grain_batch(),
            grain_samples: job.grain_batch(),
            grains,
            grain_stride: self.grains.stride() * job.grain_batch(),
            run_grains: self.grains.runs().0,
            run_stride: self.grains.runs().1 * job.grain_batch(),
        })
    }
}

/// The held-out samples of a worker's turns: every turn, or step, is a batch.
#[derive(Debug)]
struct HeldOutSamples {
    job: Arc<Job>,
    batch: usize,
    rank: usize,
    ranks: usize,
}

impl Recipe for HeldOutSamples {
    fn source_name(&self) -> &str {
        &self.job.source_name
    }

    fn source(&self) -> &dyn Source {
        &*self.job.source
    }

    fn columns(&self) -> &[usize] {
        &self.job.columns
    }

    fn epoch(&self, _: usize) -> Option<usize> {
        None
    }

    fn choose(&self, turn: usize, _: usize, samples: &mut Vec<usize>) {
        let split = &self.job.split;
        let start = (turn * self.ranks + self.rank) * self.batch;
        samples.extend((start..(start + self.batch).min(split.held_out_len())).map(|at| split.held_out(at)));
    }

    fn walk(&self, first_step: usize, grains: usize) -> Option<Box<dyn Walk>> {
        self.job.source.walk(&Route {
            purpose: Purpose::HeldOut,
            split: self.job.split,
            first_step,
            // An evaluation is one epoch.
            steps_per_epoch: usize::MAX,
            step_samples: self.ranks * self.batch,
            first_sample: self.rank * self.batch,
            grain_samples: self.batch,
            grains,
            grain_stride: self.batch,
            run_grains: grains,
            run_stride: 0,
        })
    }
}

/// Where the samples of steps come from, one step after the other.
#[derive(Debug)]
pub(crate) struct Supply {
    job: Arc<Job>,
    recipe: Arc<dyn Recipe>,
    plan: PrefetchPlan,
    made: Made,
    /// Lanes that share the making.
    lanes: usize,
    /// Nanoseconds that steps have waited for samples, or made them, since this was last asked.
    waited_ns: AtomicU64,
    timeline: Option<Arc<Timeline>>,
}

#[derive(Debug)]
enum Made {
    /// By lanes; room for the numbers of each grain's samples.
    ByLanes(Vec<Mutex<Vec<usize>>>),
    /// By loaders, which start with the first step.
    Ahead(Option<Prefetch>),
}

/// How samples were made ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Loader {
    /// Batches that may be ready beside the one in use.
    pub batches: usize,
    /// Threads that make them; 0 if the step does.
    pub threads: usize,
}

impl Supply {
    /// The samples of a worker that computes these grains of each step, on so many lanes.
    pub fn of_training(job: &Arc<Job>, grains: GrainShare, lanes: usize) -> Self {
        let recipe = Arc::new(TrainingSamples { job: Arc::clone(job), grains });
        let plan = PrefetchPlan { grains: grains.count(), samples: job.grain_batch(), ..plan(job, job.total_steps) };
        Self::new(job, recipe, plan, lanes)
    }

    /// The held-out samples in batches, of which this rank has its turns.
    pub fn of_evaluation(job: &Arc<Job>, batch: usize, (rank, ranks): (usize, usize)) -> Self {
        let turns = job.split.held_out_len().div_ceil(batch).saturating_sub(rank).div_ceil(ranks);
        let recipe = Arc::new(HeldOutSamples { job: Arc::clone(job), batch, rank, ranks });
        Self::new(job, recipe, PrefetchPlan { samples: batch, ..plan(job, turns) }, 1)
    }

    fn new(job: &Arc<Job>, recipe: Arc<dyn Recipe>, plan: PrefetchPlan, lanes: usize) -> Self {
        let made = match by_lanes(job, plan.grains * plan.samples) {
            true => Made::ByLanes((0..plan.grains).map(|_| Mutex::new(Vec::with_capacity(plan.samples))).collect()),
            false => Made::Ahead(None),
        };
        Self { job: Arc::clone(job), recipe, plan, made, lanes, waited_ns: AtomicU64::new(0), timeline: None }
    }

    /// Shows what loaders make, and how long steps wait for it.
    pub fn traced_by(self, timeline: Option<&Arc<Timeline>>) -> Self {
        Self { timeline: timeline.cloned(), ..self }
    }

    fn start(&self, step: usize) -> Prefetch {
        let tracer = self.timeline.clone().map(|timeline| {
            let tracer: Tracer = Arc::new(move |thread, step, start, end| {
                timeline.add_of_step(step, DATA + thread, "make samples", start..end);
            });
            tracer
        });
        Prefetch::start(Arc::clone(&self.recipe), PrefetchPlan { first: step, ..self.plan }, tracer)
    }

    /// Waits until the samples of `step` are there. A job that has ended elsewhere ends the wait; so does `stop`, with
    /// [`Error::Interrupted`], and the step can be asked for again.
    pub fn begin(&mut self, step: usize, watch: Option<&Watch>, stop: &dyn Fn() -> bool) -> Result<(), Error> {
        let begin = Instant::now();
        match &self.made {
            Made::ByLanes(_) => return Ok(()),
            Made::Ahead(Some(loaders)) if loaders.can_take(step) => {}
            // The first step, or another one than the next.
            Made::Ahead(_) => self.made = Made::Ahead(Some(self.start(step))),
        }
        let Made::Ahead(Some(loaders)) = &mut self.made else { return Ok(()) };
        let taken = loaders.take(step, &mut |gets_on| {
            if stop() {
                return Err(Error::Interrupted);
            }
            let Some(watch) = watch else { return Ok(()) };
            if gets_on {
                watch.touch();
            }
            watch.check().map_err(Error::from)
        });
        let end = Instant::now();
        self.waited_ns.fetch_add(end.duration_since(begin).as_nanos() as u64, Ordering::Relaxed);
        if let Some(timeline) = self.timeline.as_ref().filter(|_| end.duration_since(begin) > WAIT_SHOWN) {
            timeline.add(self.lanes, "wait for samples", begin, end, 0);
        }
        taken
    }

    /// Writes the samples of a grain of the step that has begun.
    pub fn feed(&self, step: usize, grain: usize, feed: &mut Feed<'_>) {
        match &self.made {
            Made::ByLanes(numbers) => {
                let begin = Instant::now();
                let mut numbers = kolo_base::lock(&numbers[grain]);
                fill(&*self.recipe, &self.job.fields, (step, grain), &mut numbers, feed);
                let spent = begin.elapsed().as_nanos() as u64 / self.lanes as u64;
                self.waited_ns.fetch_add(spent, Ordering::Relaxed);
            }
            Made::Ahead(Some(loaders)) => copy(&self.job.fields, &loaders.grain(step, grain), feed),
            Made::Ahead(None) => unreachable!("a step begins before its grains are fed"),
        }
    }

    /// Nanoseconds that steps have waited for samples since this was last asked: in front of a step, or in its lanes.
    pub fn take_waited(&self) -> u64 {
        self.waited_ns.swap(0, Ordering::Relaxed)
    }

    /// Samples of a grain, or of a turn; the last turn may have fewer.
    pub fn samples(&self) -> usize {
        self.plan.samples
    }

    pub fn loader(&self) -> Loader {
        match &self.made {
            Made::Ahead(Some(loaders)) => Loader { batches: self.plan.batches, threads: loaders.threads() },
            Made::Ahead(None) | Made::ByLanes(_) => Loader::default(),
        }
    }

    /// What a user should know if the system refused threads.
    pub fn refusal(&self) -> Option<String> {
        let Loader { batches, threads } = self.loader();
        let wanted = self.plan.threads;
        let refused = batches > 0 && threads < wanted;
        refused.then(|| match threads {
            0 => "note: the system refused a thread for the data; each step makes its own samples".into(),
            _ => format!("note: the system refused some of `data.threads = {wanted}`; {threads} make samples"),
        })
    }
}

fn plan(job: &Job, end: usize) -> PrefetchPlan {
    let Loading { batches, threads, .. } = job.loading;
    PrefetchPlan { first: 0, end, grains: 1, samples: 1, batches, threads }
}

/// Makes the samples of a grain where the step reads them.
pub(crate) fn fill(
    recipe: &dyn Recipe,
    fields: &[Field],
    (step, grain): (usize, usize),
    numbers: &mut Vec<usize>,
    feed: &mut Feed<'_>,
) {
    numbers.clear();
    recipe.choose(step, grain, numbers);
    for (field, column) in fields.iter().zip(recipe.columns()) {
        let size = field.elements();
        let one = |sample: usize, out: Column<'_>| match recipe.source().fill(sample, *column, out) {
            Ok(()) => {}
            Err(error) => panic!("a source that says it computes its samples failed: {error}"),
        };
        match field.kind {
            Kind::Real => {
                let Some(values) = feed.f32(&field.name) else { continue };
                let places = values.chunks_exact_mut(size.max(1));
                numbers.iter().zip(places).for_each(|(sample, place)| one(*sample, Column::F32(place)));
            }
            Kind::Index { .. } => {
                let Some(values) = feed.i32(&field.name) else { continue };
                let places = values.chunks_exact_mut(size.max(1));
                numbers.iter().zip(places).for_each(|(sample, place)| one(*sample, Column::I32(place)));
            }
        }
    }
}

/// Copies the samples of a grain to where the step reads them.
pub(crate) fn copy(fields: &[Field], samples: &Samples, feed: &mut Feed<'_>) {
    for (at, field) in fields.iter().enumerate() {
        match samples.values(at) {
            Values::F32(values) => feed.f32(&field.name).map(|place| place.copy_from_slice(values)),
            Values::I32(values) => feed.i32(&field.name).map(|place| place.copy_from_slice(values)),
        };
    }
}
