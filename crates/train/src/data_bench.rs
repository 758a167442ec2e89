//! How fast a job's samples are made, without anybody who computes with them.

use crate::error::Error;
use crate::job::Job;
use crate::supply::TrainingSamples;
use kolo_data::LoadTimes;
use kolo_data::prefetch::{Prefetch, PrefetchPlan, Samples};
use kolo_parallel::GrainShare;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the pipeline did in a while.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineRate {
    pub samples: usize,
    pub seconds: f64,
    /// Threads that made them.
    pub threads: usize,
    /// Of a sample's fields, as the model gets them.
    pub bytes_per_sample: usize,
    /// Where their time went, if the source measures it.
    pub times: Option<LoadTimes>,
}

impl PipelineRate {
    pub fn samples_per_s(&self) -> f64 {
        self.samples as f64 / self.seconds.max(1e-9)
    }
}

/// Batches that are measured at least.
const BATCHES_MIN: usize = 3;

/// Makes the job's batches with as many loader threads as it has, for about this long. The first batch, which opens files and
/// takes memory, is not measured.
pub fn pipeline_rate(job: &Arc<Job>, least: Duration) -> Result<PipelineRate, Error> {
    let recipe = Arc::new(TrainingSamples { job: Arc::clone(job), grains: GrainShare::run(0, job.grains) });
    let threads = job.loading.threads.max(1);
    let plan = PrefetchPlan {
        first: 0,
        end: usize::MAX,
        grains: job.grains,
        samples: job.grain_batch(),
        batches: job.loading.batches.max(1),
        threads,
    };
    let mut loaders = Prefetch::start(recipe, plan, None);
    let mut take = |step: usize| loaders.take::<Error>(step, &mut |_| Ok(()));
    take(0)?;
    // What was made ahead meanwhile was free: it is taken, and the clock starts behind it.
    (1..=plan.batches).try_for_each(&mut take)?;
    let (before, begin) = (job.source.load_times(), Instant::now());
    let mut batches = 0;
    while batches < BATCHES_MIN || begin.elapsed() < least {
        batches += 1;
        take(plan.batches + batches)?;
    }
    let seconds = begin.elapsed().as_secs_f64();
    let times = job.source.load_times().zip(before).map(|(after, before)| after.since(&before));
    let bytes_per_sample = Samples::bytes(job.fields.iter(), 1);
    Ok(PipelineRate {
        samples: batches * job.batch,
        seconds,
        threads: loaders.threads().max(1),
        bytes_per_sample,
        times,
    })
}
