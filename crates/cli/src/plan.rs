//! `kolo plan`: what a job will cost, before anything is allocated.

mod calibrate;
pub(crate) mod layouts;
mod placement;
mod shared;
pub(crate) mod text;

use crate::args::PlanArgs;
use crate::fail::Failure;
use crate::load::{self, Kinds};
use crate::output::println;
use crate::progress::Waiting;
use crate::workers;
use kolo_exec::{Options, Program};
use kolo_parallel::Purpose;
use kolo_parallel::mesh::DATA;
use kolo_plan::{Cost, Fleet, MemoryPlan, Rates, RunCost};
use kolo_train::Job;
use kolo_train::grain_cost::GrainCost;
use kolo_train::memory_check::{self, HostUsage, Shortage};
use kolo_train::memory_limit::{self, Wanted, WorkersNow};
use kolo_train::step::{program_of, raw_graph};
use kolo_train::trial_run::{self, TrialRun, TrialSetup};
use kolo_train::worker_plan::WorkerPlan;
use serde_json::json;
use shared::Shared;
use std::path::Path;
use std::sync::Arc;

const SECONDS_PER_DAY: f64 = 86_400.0;
/// The name of a job whose file gives it none.
const JOB_NAME_DEFAULT: &str = "job";

/// Everything the plan says.
struct Prediction {
    cost: Cost,
    /// What a worker holds in the memory of a device that has its own.
    device: Option<MemoryPlan>,
    rates: Rates,
    /// Seconds of a step by the machine's rates.
    modelled_seconds: f64,
    /// How a little of the step went here, if it could be tried.
    measured: Option<TrialRun>,
    setup: TrialSetup,
    hosts: usize,
    run: RunCost,
    samples: f64,
    epochs: f64,
    fleet: Fleet,
    /// A fleet was named; otherwise the run takes its steps' time.
    elsewhere: bool,
    steps: f64,
    /// Bytes of all workers; those of a host may share weights.
    all_bytes: u64,
    /// If there are several workers.
    shared: Option<Shared>,
    /// If it does not fit into this machine.
    shortage: Option<Shortage>,
    /// What the grains cost, if one worker pays for them.
    grain_cost: Option<GrainCost>,
}

impl Prediction {
    fn step_seconds(&self) -> f64 {
        self.measured.map_or(self.modelled_seconds, |measured| measured.step_seconds())
    }

    /// Days of the whole run.
    fn days(&self) -> f64 {
        match self.elsewhere {
            true => self.run.days(&self.fleet),
            false => self.step_seconds() * self.steps / SECONDS_PER_DAY,
        }
    }

    fn price(&self) -> Option<f64> {
        self.fleet.price_per_hour.map(|price| self.days() * 24.0 * self.fleet.devices as f64 * price)
    }
}

pub fn plan(kinds: &Kinds, args: &PlanArgs) -> Result<(), Failure> {
    if let Some(report) = &args.calibrate {
        return calibrate::calibrate(report, args.entry.as_deref());
    }
    if layouts::is_asked(args) {
        return layouts::plan(kinds, args);
    }
    let by_host = workers::asked_by_host(&args.job.workers)?;
    let workers = by_host.iter().sum();
    let job_args = args.job.job_args();
    let mut job = load::job(kinds, &job_args, workers)?;
    // Every host is taken to be like this one.
    let hosts = by_host.len();
    let per_host = by_host.into_iter().max().unwrap_or(1);
    let threads = match args.job.threads {
        None => (load::threads(&job_args)? / per_host).max(1),
        Some(_) => load::threads(&job_args)?,
    };
    check(args)?;
    let waiting = Waiting::new("planning");
    let mut prediction = predict(&job, TrialSetup { workers, per_host, threads }, hosts, args)?;
    if workers == 1 && prediction.shortage.is_none() {
        prediction.grain_cost = grain_cost(&mut job, threads, prediction.measured)?;
    }
    drop(waiting);
    if let Some(file) = &args.schedule {
        let shared = prediction.shared.as_ref();
        let none = || Failure::usage("the job has no pipeline to draw", "set `parallel.pipeline` to 2 or more, and -n");
        return shared.ok_or_else(none)?.draw(file.as_deref());
    }
    let limited = args.max_memory.is_some() || args.max_cost.is_some() || args.deadline.is_some();
    if args.write || limited || args.layouts.is_some() {
        let message = "--write, --max-memory, --max-cost, --deadline and --layouts require --search";
        return Err(Failure::usage(message, "add --search"));
    }
    if args.json {
        println!("{}", as_json(&job, &prediction));
    } else {
        text::print(&title(&job, args.job.job.as_deref()), &job, &prediction);
        if let Some(shared) = prediction.shared.as_ref().filter(|_| args.explain) {
            shared.explain(&job, workers)?;
        }
    }
    Ok(())
}

/// Refuses flags that would make the run's cost no number.
fn check(args: &PlanArgs) -> Result<(), Failure> {
    if !(args.utilisation > 0.0 && args.utilisation <= 1.0) {
        return Err(Failure::usage("--utilisation must be a fraction of the peak", "give a number above 0, up to 1"));
    }
    let positive = [
        ("--samples", args.samples),
        ("--epochs", args.epochs),
        ("--devices", Some(args.devices as f64)),
        ("--tflops", args.tflops),
        ("--price", args.price),
    ];
    for (flag, value) in positive {
        if let Some(value) = value.filter(|value| !(value.is_finite() && *value > 0.0)) {
            return Err(Failure::usage(format!("{flag} {value} is not a positive number"), "give a number above 0"));
        }
    }
    Ok(())
}

fn predict(job: &Job, setup: TrialSetup, hosts: usize, args: &PlanArgs) -> Result<Prediction, Failure> {
    let TrialSetup { workers, per_host, threads } = setup;
    // With several workers, the plan is that of the first: its grains, its share of the optimizer.
    let mesh = load::mesh(job, workers, 0)?;
    let options = Options::for_grains(job.grains / mesh.size(DATA), threads);
    job.check_executor()?;
    job.source.share_memory(per_host);
    let WorkerPlan { program, memory, device } = WorkerPlan::new(job, &job.parallel, &mesh, Some(&mesh), options)?;
    let mut cost = Cost { memory, ..kolo_plan::cost(&program) };
    let rates = Rates::measure();
    let all_workers = Shared::new(job, workers, options, &rates)?;
    let shared = all_workers.as_ref().filter(|one| one.splits_model);
    if let Some(largest) = shared.and_then(Shared::largest) {
        let MemoryPlan { evaluation, data, checkpoint, process, .. } = memory;
        cost.memory = MemoryPlan { evaluation, data, checkpoint, process, ..largest.cost.memory };
    }
    // What one worker runs is the whole model; of others' parts the forward pass alone shows all parameters.
    if workers > 1 {
        let whole = Purpose::Evaluation { batch: job.grain_batch() };
        cost.parameters = raw_graph(job, &job.parallel, whole)?.parameter_count();
    }
    check_limit(job, device.as_ref().unwrap_or(&cost.memory), &setup, options)?;
    let usage = HostUsage::alike(&cost.memory, per_host, job.parallel.home().is_shared());
    let all_bytes = usage.bytes() * workers.div_ceil(per_host) as u64;
    let shortage = memory_check::shortage(&cost.memory, usage);
    // The update happens once per step, not per sample: over a whole run it is part of what a sample costs.
    let all = shared.map_or(cost.flops.total() as f64 * workers as f64, Shared::flops);
    let per_sample = all / job.batch as f64;
    let samples = args.samples.unwrap_or(job.split.train_len() as f64);
    let epochs = args.epochs.unwrap_or(job.total_steps as f64 / job.steps_per_epoch as f64);
    let steps = run_steps(args, job);
    // What does not fit cannot be tried.
    let measured = match shortage.is_some() || args.by_rates {
        true => None,
        false => tried(job, &program, setup, shared)?,
    };
    Ok(Prediction {
        modelled_seconds: shared.map_or_else(|| kolo_plan::predict_seconds(&program, &rates), Shared::seconds),
        measured,
        setup,
        hosts,
        run: RunCost::new(per_sample, job.input_bytes_per_sample()? as f64, steps * job.batch as f64, 1.0),
        samples,
        epochs,
        elsewhere: args.tflops.is_some() || args.devices > 1,
        steps,
        all_bytes,
        fleet: Fleet {
            devices: args.devices,
            flops: args.tflops.map_or(rates.flops * threads as f64, |tera| tera * 1e12),
            utilisation: args.utilisation,
            price_per_hour: args.price,
        },
        cost,
        device,
        rates,
        shared: all_workers,
        shortage,
        grain_cost: None,
    })
}

/// How a little of the step went here. `None` if too many workers share the model to try them one by one.
fn tried(job: &Job, first: &Program, setup: TrialSetup, shared: Option<&Shared>) -> Result<Option<TrialRun>, Failure> {
    match shared {
        None => Ok(Some(trial_run::run(job, &first.graph, setup, trial_run::TIME_LIMIT)?)),
        Some(shared) => shared.try_out(job, setup),
    }
}

/// The same of a job of which nothing is known yet, on workers of this host.
pub(crate) fn try_out(job: &Job, setup: TrialSetup) -> Result<Option<TrialRun>, Failure> {
    let mesh = load::mesh(job, setup.workers, 0)?;
    let options = Options::for_grains(job.grains / mesh.size(DATA), setup.threads);
    let program = program_of(job, &job.parallel, &mesh, options)?;
    let shared = Shared::new(job, setup.workers, options, &Rates::measure())?;
    tried(job, &program, setup, shared.as_ref().filter(|one| one.splits_model))
}

/// What the grains cost one worker: tried out, if the job's own step was and the rates say that it is worth it.
fn grain_cost(job: &mut Arc<Job>, threads: usize, measured: Option<TrialRun>) -> Result<Option<GrainCost>, Failure> {
    let predicted = GrainCost::predict(job, threads, Rates::measure)?;
    match (predicted, measured, Arc::get_mut(job)) {
        (Some(predicted), Some(own), Some(job)) => {
            Ok(predicted.time(job, threads, own.step_seconds() * 1e3, trial_run::TIME_LIMIT)?)
        }
        (predicted, ..) => Ok(predicted),
    }
}

/// Steps of the whole run: the job's own, unless flags say how long it is. An epoch leaves out what does not fill a batch.
fn run_steps(args: &PlanArgs, job: &Job) -> f64 {
    let (own, own_per_epoch) = (job.total_steps as f64, job.steps_per_epoch as f64);
    if args.samples.is_none() && args.epochs.is_none() {
        return own;
    }
    let per_epoch = args.samples.map_or(own_per_epoch, |samples| (samples / job.batch as f64).floor().max(1.0));
    per_epoch * args.epochs.unwrap_or(own / own_per_epoch)
}

/// Refuses a job of which a worker needs more than `memory.limit`, whichever it is.
fn check_limit(job: &Job, first: &MemoryPlan, setup: &TrialSetup, options: Options) -> Result<(), Failure> {
    let mut largest = first.total() as u64;
    for rank in (1..setup.workers).filter(|_| job.memory.limit_bytes.is_some()) {
        let mesh = load::mesh(job, setup.workers, rank)?;
        let plan = WorkerPlan::new(job, &job.parallel, &mesh, Some(&mesh), options)?;
        largest = largest.max(plan.limited().total() as u64);
    }
    let now = WorkersNow { workers: setup.workers, threads: setup.threads };
    Ok(memory_limit::check(job, &Wanted { plan: first, largest, rank: 0, layouts: Some(now) })?)
}

/// The job's name or, if it has none of its own, that of its file.
fn title(job: &Job, file: Option<&Path>) -> String {
    let stem = file.and_then(Path::file_stem).map(|stem| stem.to_string_lossy().into_owned());
    stem.filter(|_| job.name == JOB_NAME_DEFAULT).unwrap_or_else(|| job.name.clone())
}

/// Multiply-adds of the forward pass on one sample: a worker has its share of the batch.
fn forward_macs(job: &Job, p: &Prediction) -> f64 {
    p.cost.product_flops.forward as f64 / 2.0 * p.setup.workers as f64 / job.batch as f64
}

fn as_json(job: &Job, p: &Prediction) -> String {
    let by_stage = |v: &kolo_plan::ByStage| json!({"forward": v.forward, "backward": v.backward, "update": v.update});
    let m = &p.cost.memory;
    let value = json!({
        "job": job.name,
        "parameters": p.cost.parameters,
        "workers": p.setup.workers,
        "per": if p.setup.workers == 1 { "step" } else { "step and worker" },
        "forward_macs_per_sample": forward_macs(job, p),
        "learning_rate": job.rate,
        "recompute": job.parallel.recompute().name(),
        "flops": by_stage(&p.cost.flops),
        "bytes": by_stage(&p.cost.bytes),
        "memory": {
            "weights": m.weights, "gradients": m.gradients, "optimizer": m.optimizer,
            "activations": m.activations, "scratch": m.scratch, "evaluation": m.evaluation, "data": m.data, "checkpoint": m.checkpoint, "process": m.process, "total": m.total(),
            "limit": job.memory.limit_bytes, "fits": p.shortage.is_none(),
        },
        "device_memory": p.device.map(|m| json!({
            "weights": m.weights, "gradients": m.gradients, "optimizer": m.optimizer, "activations": m.activations,
            "scratch": m.scratch, "evaluation": m.evaluation, "total": m.total(), "offload": job.memory.offload.name(),
        })),
        "step_ms": p.step_seconds() * 1e3,
        "step_ms_by_rates": p.modelled_seconds * 1e3,
        "measured": p.measured.map(|tried| json!({
            "compute_ms": tried.compute_seconds * 1e3, "exchange_ms": (p.hosts == 1).then_some(tried.exchange_seconds * 1e3),
            "data_wait_ms": tried.data_wait_seconds() * 1e3, "kinds": tried.kinds, "whole_steps": tried.whole_steps,
        })),
        "shared": p.shared.as_ref().map(Shared::as_json),
        "rates": {"flops": p.rates.flops, "bytes": p.rates.bytes},
        "grain_cost": p.grain_cost,
        "run": {
            "samples": p.samples, "epochs": p.epochs, "flops": p.run.flops, "pflop_days": p.run.pflop_days,
            "flops_per_input_byte": p.run.flops_per_input_byte, "devices": p.fleet.devices,
            "days": p.days(), "cost": p.price(),
        },
    });
    format!("{value:#}")
}
