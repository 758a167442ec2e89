//! From the command line to a job.

use crate::args::{Device, JobArgs};
use crate::fail::Failure;
use kolo_models::ModelKind;
use kolo_parallel::Mesh;
use kolo_train::{Job, job_file};
use std::sync::Arc;

/// The job that runs when no file is given.
const DEFAULT_JOB: &str = include_str!("../../../examples/digits.toml");
const WORKERS_MAX: usize = 1024;
const THREADS_MAX: usize = 1024;

/// Reads the job file with the overrides applied, for this many workers.
pub fn job(models: &[ModelKind], args: &JobArgs, workers: usize) -> Result<Arc<Job>, Failure> {
    if args.device == Device::Cuda {
        return Err(Failure::usage("--device cuda: this build runs on the CPU only", "leave --device out"));
    }
    let mut root = match &args.job {
        Some(path) => job_file::read(path)?,
        None => job_file::parse(DEFAULT_JOB, "built-in digits")?,
    };
    for assignment in &args.set {
        job_file::override_with(&mut root, assignment)?;
    }
    let mut job = Job::read(&root, models)?;
    if workers == 0 || workers > WORKERS_MAX {
        return Err(Failure::usage(format!("{workers} workers are out of range"), "use a number from 1 to 1024"));
    }
    job.fit_to(workers)?;
    Ok(Arc::new(job))
}

/// The place of one of this many workers.
pub fn mesh(job: &Job, workers: usize, rank: usize) -> Result<Mesh, Failure> {
    job.parallel
        .mesh(workers, rank)
        .map_err(|refusal| Failure::usage(format!("{workers} workers {}", refusal.message), &refusal.hint))
}

/// The number of threads to use.
pub fn threads(args: &JobArgs) -> Result<usize, Failure> {
    match args.threads {
        Some(threads) if (1..=THREADS_MAX).contains(&threads) => Ok(threads),
        Some(threads) => {
            Err(Failure::usage(format!("--threads {threads} is out of range"), "use a number from 1 to 1024"))
        }
        None => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
    }
}
