//! `kolo bench train`: times whole steps.

use crate::args::BenchTrain;
use crate::fail::{Failure, check_writable, write_file};
use crate::flags;
use crate::load::{self, Kinds};
use crate::manifest::Agreement;
use crate::output::println;
use crate::progress::{Bar, Progress};
use crate::train::note_grains;
use crate::workers::{self, Worker};
use kolo_cluster::{Introduction, RankInfo};
use kolo_data::LoadTimes;
use kolo_exec::Options;
use kolo_train::machine::peak_rss_bytes;
use kolo_train::report::StepTimes;
use kolo_train::together::Meter;
use kolo_train::{HeldBatch, Job, Trainer};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::BufRead;
use std::sync::Arc;
use std::time::Instant;

pub fn train(kinds: &Kinds, args: &BenchTrain) -> Result<(), Failure> {
    let begin = Instant::now();
    let rank_info = workers::rank_info()?;
    let prepared = prepare(kinds, args, rank_info.as_ref());
    let (job, count) = workers::or_fail_all(prepared, rank_info.as_ref(), &args.job.workers)?;
    match rank_info {
        Some(rank_info) => {
            let introduction = introduction(&job, args);
            let introduction = workers::or_fail_all(introduction, Some(&rank_info), &args.job.workers)?;
            let worker = Worker::join(&rank_info, &args.job.workers, job.reproducible, introduction, None)?;
            let outcome = together(job, args, &worker, begin);
            worker.finish(outcome)
        }
        None if workers::are_started(&args.job.workers, count) => {
            workers::supervise(&args.job.workers, count, 0, None, Progress::plain(false), None)
        }
        None => alone(job, args, begin),
    }
}

fn introduction(job: &Job, args: &BenchTrain) -> Result<Introduction, Failure> {
    let agreement = Agreement::on("bench train").job(job)?.workers(&args.job.workers);
    let agreement = agreement.flag("--steps", args.steps).flag("--warmup", args.warmup);
    let manifest = agreement.flag("--hold-batch", args.hold_batch).manifest();
    Ok(Introduction { manifest, ..Introduction::default() })
}

/// The job, and how many workers run it.
fn prepare(kinds: &Kinds, args: &BenchTrain, rank_info: Option<&RankInfo>) -> Result<(Arc<Job>, usize), Failure> {
    let count = rank_info.map_or_else(|| workers::asked(&args.job.workers), |rank_info| Ok(rank_info.world))?;
    flags::check(&args.job.workers, rank_info, count)?;
    let job = load::job(kinds, &args.job, count)?;
    if args.steps == 0 {
        return Err(Failure::usage("--steps 0 measures nothing", "time at least one step"));
    }
    if args.job.threads.is_some() {
        load::threads(&args.job)?;
    }
    let together = rank_info.is_some() || workers::are_started(&args.job.workers, count);
    if together && (args.serve || args.lanes.is_some() || args.profile) {
        let message = "--serve, --lanes and --profile are for a single process";
        return Err(Failure::usage(message, "leave them out, or -n, --hosts and other launchers"));
    }
    if rank_info.is_none_or(|rank_info| rank_info.rank == 0) {
        args.report.as_deref().map_or(Ok(()), check_writable)?;
    }
    Ok((job, count))
}

/// Several workers: every rank runs the same steps, and the first reports.
fn together(job: Arc<Job>, args: &BenchTrain, worker: &Worker, begin: Instant) -> Result<(), Failure> {
    let (world, threads) = (&worker.world, worker.threads(&args.job));
    let held = args.hold_batch.then(|| HeldBatch::new(&job));
    let mut trainer = Trainer::among(job, threads, Arc::clone(world))?;
    let ready_ms = begin.elapsed().as_secs_f64() * 1e3;
    run(&mut trainer, held.as_ref(), args.warmup.max(1))?;
    trainer.session().take_waited();
    trainer.take_data_wait();
    let mut meter = Meter::default();
    meter.attach(world, None);
    meter.count(&trainer);
    let mut times = Vec::with_capacity(args.steps);
    for _ in 0..args.steps {
        times.extend(run(&mut trainer, held.as_ref(), 1)?);
        meter.step(times[times.len() - 1], &trainer.session().take_waited(), trainer.take_data_wait());
        meter.count(&trainer);
    }
    let communication = meter.gather(world, LoadTimes::default())?;
    if world.rank() > 0 {
        return Ok(());
    }
    let extra = json!({ "workers": world.size(), "communication": communication });
    println!(
        "{} workers over {}: {:.3} ms/step in collectives, {:.3} ms waited ({:.1} % of the step)",
        world.size(),
        communication.transport,
        communication.busy_ms,
        communication.exposed_ms,
        communication.exposed_ms / StepTimes::of(&times).median * 100.0
    );
    let times = BenchTimes { steps_ms: &times, ready_ms, startup_ms: ready_ms };
    report(&trainer, args, threads, &times, extra)
}

fn alone(job: Arc<Job>, args: &BenchTrain, begin: Instant) -> Result<(), Failure> {
    let threads = load::threads(&args.job)?;
    let mut options = Options::for_grains(job.grains, threads);
    if let Some(lanes) = args.lanes {
        if !lanes.is_power_of_two() || !job.grains.is_multiple_of(lanes) {
            let message = format!("--lanes {lanes} does not divide the {} grains", job.grains);
            return Err(Failure::usage(message, "use a power of two that divides the grains"));
        }
        options.lanes = lanes;
    }
    let held = args.hold_batch.then(|| HeldBatch::new(&job));
    let mut trainer = Trainer::new(job, options)?;
    let ready_ms = begin.elapsed().as_secs_f64() * 1e3;
    run(&mut trainer, held.as_ref(), 1)?;
    let startup_ms = begin.elapsed().as_secs_f64() * 1e3;
    if args.serve {
        return serve(&mut trainer, held.as_ref(), startup_ms);
    }
    let bar = Bar::new(args.warmup.max(1) + args.steps, "steps");
    bar.tell(1);
    run_shown(&mut trainer, held.as_ref(), args.warmup.saturating_sub(1), &|done| bar.tell(1 + done))?;
    trainer.session_mut().set_profile(args.profile);
    let times = run_shown(&mut trainer, held.as_ref(), args.steps, &|done| bar.tell(args.warmup.max(1) + done))?;
    bar.finish();
    if args.profile {
        profile(&trainer, args.steps);
    }
    report(&trainer, args, threads, &BenchTimes { steps_ms: &times, ready_ms, startup_ms }, json!({}))?;
    note_grains(trainer.job(), threads);
    Ok(())
}

/// What was measured.
struct BenchTimes<'a> {
    steps_ms: &'a [f64],
    /// From the start of the process until the first step could begin, and until it was done.
    ready_ms: f64,
    startup_ms: f64,
}

/// Prints and writes the times of the steps.
fn report(
    trainer: &Trainer,
    args: &BenchTrain,
    threads: usize,
    times: &BenchTimes<'_>,
    extra: Value,
) -> Result<(), Failure> {
    let BenchTimes { steps_ms: times, ready_ms, startup_ms } = *times;
    let options = trainer.session().options();
    let spread = StepTimes::of(times);
    let (low, high) = times.iter().fold((f64::MAX, 0.0f64), |(low, high), t| (low.min(*t), high.max(*t)));
    let rss = peak_rss_bytes().unwrap_or(0);
    println!(
        "{}: median {:.3} ms, p95 {:.3}, {low:.3} to {high:.3}, {} steps, {threads} threads, {} lanes, ready after {ready_ms:.0} ms, first step done after {startup_ms:.0} ms, peak {:.1} MiB",
        trainer.job().name,
        spread.median,
        spread.p95,
        times.len(),
        options.lanes,
        rss as f64 / (1 << 20) as f64
    );
    let Some(path) = &args.report else { return Ok(()) };
    // By all processes, and with what the driver and libraries take.
    let used = trainer.job().executor.monitor().and_then(|monitor| monitor.read().memory_bytes).map(|[used, _]| used);
    let mut report = json!({
        "job": trainer.job().name, "step_ms": {"median": spread.median, "p95": spread.p95, "min": low, "max": high},
        "samples_ms": times, "threads": threads, "lanes": options.lanes, "grains": options.grains,
        "peak_rss_bytes": rss, "device_bytes": trainer.device_bytes(),
        "device_used_bytes": used, "samples_per_s": trainer.job().batch as f64 / spread.median * 1e3, "ready_ms": ready_ms, "startup_ms": startup_ms,
    });
    if let (Some(report), Value::Object(extra)) = (report.as_object_mut(), extra) {
        report.extend(extra);
    }
    write_file(path, format!("{report:#}\n"))
}

/// Milliseconds of each of `count` steps.
fn run(trainer: &mut Trainer, held: Option<&HeldBatch>, count: usize) -> Result<Vec<f64>, Failure> {
    run_shown(trainer, held, count, &|_| ())
}

/// The same; `tell` hears between steps how many are done.
fn run_shown(
    trainer: &mut Trainer,
    held: Option<&HeldBatch>,
    count: usize,
    tell: &dyn Fn(usize),
) -> Result<Vec<f64>, Failure> {
    let one = |number: usize| {
        let start = Instant::now();
        match held {
            Some(held) => trainer.step_on(held)?,
            None => trainer.step()?,
        };
        let milliseconds = start.elapsed().as_secs_f64() * 1e3;
        tell(number + 1);
        Ok(milliseconds)
    };
    (0..count).map(one).collect()
}

/// Answers `run K` lines, so that a driver can let contestants take turns.
fn serve(trainer: &mut Trainer, held: Option<&HeldBatch>, startup_ms: f64) -> Result<(), Failure> {
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|error| Failure::job(format!("standard input: {error}"), "keep it open"))?;
        let count = line.strip_prefix("run ").and_then(|count| count.trim().parse().ok());
        let Some(count) = count else {
            return Err(Failure::usage(format!("`{line}` is not understood"), "write `run K`"));
        };
        let times = run(trainer, held, count)?;
        let answer = json!({
            "step_ms": times, "peak_rss_bytes": peak_rss_bytes().unwrap_or(0), "startup_ms": startup_ms,
        });
        println!("{answer}");
    }
    Ok(())
}

/// Time by kind of op, the most expensive first.
fn profile(trainer: &Trainer, steps: usize) {
    let graph = trainer.session().graph();
    let mut kinds: BTreeMap<String, (u64, u64, u64)> = BTreeMap::new();
    let mut flops_of = vec![0; graph.nodes.len()];
    kolo_exec::null::walk(trainer.session().program(), |visit| {
        flops_of[visit.id.0 as usize] = visit.flops * visit.times
    });
    for (id, nanoseconds) in trainer.session().times() {
        let node = graph.node(id);
        let mut flops = flops_of[id.0 as usize];
        let mut name = format!("{} {}", node.op.name(), node.stage.name());
        if let Some(maker) = trainer.session().program().maker_of(id) {
            flops += flops_of[maker.0 as usize];
            name = format!("{} into {name}", graph.node(maker).op.name());
        }
        let entry = kinds.entry(name).or_default();
        entry.0 += nanoseconds;
        entry.1 += 1;
        entry.2 += flops;
    }
    let mut rows: Vec<_> = kinds.into_iter().collect();
    rows.sort_by_key(|(_, (nanoseconds, _, _))| std::cmp::Reverse(*nanoseconds));
    let total: u64 = rows.iter().map(|(_, (nanoseconds, _, _))| nanoseconds).sum();
    println!("{:<34} {:>5} {:>10} {:>6} {:>9}", "op", "nodes", "ms/step", "%", "GFLOP/s");
    for (name, (nanoseconds, nodes, flops)) in rows {
        let ms = nanoseconds as f64 / 1e6 / steps as f64;
        let percent = nanoseconds as f64 * 100.0 / total as f64;
        let rate = flops as f64 / (ms * 1e6);
        println!("{name:<34} {nodes:>5} {ms:>10.3} {percent:>6.1} {rate:>9.1}");
    }
}
