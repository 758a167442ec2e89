//! From the command line to a job.

use crate::args::{Device, JobArgs};
use crate::fail::Failure;
use kolo_models::ModelKind;
use kolo_train::{Job, job_file};
use std::sync::Arc;

/// The job that runs when no file is given.
const DEFAULT_JOB: &str = include_str!("../../../examples/digits.toml");
const THREADS_MAX: usize = 1024;

/// Reads the job file with the overrides applied.
pub fn job(models: &[ModelKind], args: &JobArgs) -> Result<Arc<Job>, Failure> {
    if args.device == Device::Cuda {
        return Err(Failure::usage("--device cuda: this build runs on the CPU only", "leave --device out"));
    }
    if args.workers != 1 {
        let message = format!("-n {}: this build trains with one worker", args.workers);
        return Err(Failure::usage(message, "use --threads to use more cores"));
    }
    let mut root = match &args.job {
        Some(path) => job_file::read(path)?,
        None => job_file::parse(DEFAULT_JOB, "built-in digits")?,
    };
    for assignment in &args.set {
        job_file::override_with(&mut root, assignment)?;
    }
    Ok(Arc::new(Job::read(&root, models)?))
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
