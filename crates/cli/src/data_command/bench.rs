//! `kolo data bench`: whether the data of a job come fast enough for its model.

use crate::args::JobArgs;
use crate::fail::{Failure, check_writable, write_file};
use crate::flags;
use crate::load::{self, Kinds};
use crate::output::println;
use crate::progress::Waiting;
use clap::Args;
use kolo_exec::Options;
use kolo_graph::settings::Setting;
use kolo_train::data_bench::{PipelineRate, pipeline_rate};
use kolo_train::machine::{format_bytes, format_count};
use kolo_train::report::StepTimes;
use kolo_train::{HeldBatch, Job, Trainer};
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Debug, Args)]
pub struct DataBenchArgs {
    #[command(flatten)]
    pub job: JobArgs,
    /// Seconds to measure the data, and the model, at least
    #[arg(long, default_value_t = 3.0)]
    pub seconds: f64,
    /// Write the result (JSON) to this file
    #[arg(long)]
    pub report: Option<PathBuf>,
}

/// Steps that are timed, at least and at most.
const STEPS_MIN: usize = 3;
const STEPS_MAX: usize = 200;
const SECONDS_MAX: f64 = 3600.0;

pub fn bench(kinds: &Kinds, args: &DataBenchArgs) -> Result<(), Failure> {
    if !(args.seconds > 0.0 && args.seconds <= SECONDS_MAX) {
        return Err(Failure::usage(
            format!("--seconds {} is out of range", args.seconds),
            "give a number above 0, up to 3600",
        ));
    }
    flags::check_alone(&args.job.workers, "data bench")?;
    args.report.as_deref().map_or(Ok(()), check_writable)?;
    refuse_pipe(&args.job)?;
    let job = load::job(kinds, &args.job, 1)?;
    let least = Duration::from_secs_f64(args.seconds);
    let threads = load::threads(&args.job)?;
    let waiting = Waiting::new("making batches");
    let rate = pipeline_rate(&job, least)?;
    drop(waiting);
    let waiting = Waiting::new("timing steps of the model");
    let step_ms = step_ms(&job, threads, least)?;
    drop(waiting);
    let needed = job.batch as f64 / (step_ms / 1e3);
    let factor = rate.samples_per_s() / needed;
    println!("data   {}", rate_text(&rate));
    let stages = stages(&rate);
    for (name, share, per_s) in &stages {
        println!("       {name:<10} {:>5.1} % of the time, {} samples/s per thread", share * 100.0, count(*per_s));
    }
    println!("model  {} samples/s ({step_ms:.2} ms for a step of {})", count(needed), job.batch);
    let slowest = stages.iter().max_by(|one, other| one.1.total_cmp(&other.1)).map(|(name, ..)| *name);
    println!("{}", verdict(factor, slowest, &job, rate.threads));
    let Some(path) = &args.report else { return Ok(()) };
    let stages: Vec<_> = stages
        .iter()
        .map(|(name, share, per_s)| json!({ "stage": name, "share": share, "samples_per_s_per_thread": per_s }))
        .collect();
    let report = json!({
        "job": job.name, "samples_per_s": rate.samples_per_s(), "threads": rate.threads,
        "bytes_per_sample": rate.bytes_per_sample, "stages": stages, "step_ms": step_ms,
        "needed_samples_per_s": needed, "factor": factor, "bottleneck": slowest,
    });
    write_file(path, format!("{report:#}\n"))
}

/// A pipe is as fast as whoever writes into it, and what is measured would be gone. Asked before it is opened.
fn refuse_pipe(args: &JobArgs) -> Result<(), Failure> {
    let data = load::settings(args)?.table("data")?;
    match data.peek("source") {
        Some(Setting::Text(source)) if kolo_data::stream::is_pipe(source) => {
            let message = format!("is \"{source}\", a pipe, whose samples come only once");
            let hint = "write some of them to a file and measure that: `--set data.source=FILE --set data.stream=true`";
            Err(data.wrong("source", message, hint).into())
        }
        _ => Ok(()),
    }
}

/// The median time of a step on a batch that is kept.
fn step_ms(job: &Arc<Job>, threads: usize, least: Duration) -> Result<f64, Failure> {
    let held = HeldBatch::new(job);
    let mut trainer = Trainer::new(Arc::clone(job), Options::for_grains(job.grains, threads))?;
    trainer.step_on(&held)?;
    let (begin, mut times) = (Instant::now(), Vec::new());
    while times.len() < STEPS_MIN || (begin.elapsed() < least && times.len() < STEPS_MAX) {
        let start = Instant::now();
        trainer.step_on(&held)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(StepTimes::of(&times).median)
}

fn count(rate: f64) -> String {
    format_count(rate as u64)
}

fn rate_text(rate: &PipelineRate) -> String {
    let bytes = rate.samples_per_s() * rate.bytes_per_sample as f64;
    let threads = if rate.threads == 1 { "1 thread".into() } else { format!("{} threads", rate.threads) };
    format!("{} samples/s, {}/s, on {threads} of its own", count(rate.samples_per_s()), format_bytes(bytes as u64))
}

/// The stages with their shares of the time, and samples per second of one thread that does nothing else.
fn stages(rate: &PipelineRate) -> Vec<(&'static str, f64, f64)> {
    let Some(times) = &rate.times else { return Vec::new() };
    let stages = [("read", times.read_ns), ("decode", times.decode_ns), ("transform", times.transform_ns)];
    let total: u64 = stages.iter().map(|(_, ns)| ns).sum();
    let stage = |(name, ns): (&'static str, u64)| {
        (name, ns as f64 / total.max(1) as f64, times.samples as f64 / (ns as f64 / 1e9).max(1e-9))
    };
    stages.into_iter().filter(|(_, ns)| *ns > 0).map(stage).collect()
}

/// Beyond it, steps seldom wait even if the cores are shared.
const COMFORTABLE: f64 = 1.5;

fn verdict(factor: f64, slowest: Option<&str>, job: &Job, threads: usize) -> String {
    let stage = slowest.map_or(String::new(), |stage| format!("; most of its time goes into {stage}"));
    if factor >= COMFORTABLE {
        return format!("the data can feed the model: {factor:.1} times as fast as it needs{stage}");
    }
    let hint = format!("more `data.threads` than {threads}, `data.cache`, or smaller files");
    match factor >= 1.0 {
        true => format!("the data just feed the model: {factor:.2} times as fast as it needs{stage}; try {hint}"),
        false => format!(
            "the data cannot feed the model: a step of {} would wait for {:.0} % of its time{stage}; try {hint}",
            job.name,
            (1.0 - factor) * 100.0
        ),
    }
}
