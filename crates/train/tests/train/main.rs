//! Training as a whole: against PyTorch, the same bits in every layout, known counts, honest errors.

mod checkpoints;
mod counts;
mod data;
mod depth;
mod files;
mod generate;
mod goldens;
mod ignored;
mod layer_goldens;
mod layouts;
mod metrics;
mod op_goldens;
mod pipelines;
mod precision;
mod reference;
mod regroup;
mod same_bits;
mod sent;
mod spatial;
mod strategies;
mod workers;
mod wrong;
mod zero;

use kolo_exec::Options;
use kolo_models::MODELS;
use kolo_train::{Job, Trainer, job_file};
use std::sync::Arc;

fn job(text: &str) -> Arc<Job> {
    let root = job_file::parse(text, "test.toml").unwrap();
    Arc::new(Job::read(&root, MODELS).unwrap_or_else(|error| panic!("{error}")))
}

fn trainer(text: &str, threads: usize, lanes: usize) -> Trainer {
    let job = job(text);
    let grains = job.grains;
    Trainer::new(job, Options { threads, lanes, grains, slots: 1, ways: 1 }).unwrap_or_else(|error| panic!("{error}"))
}
