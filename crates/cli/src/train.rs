//! `kolo train`.

use crate::args::Train;
use crate::fail::{Failure, check_writable, write_file};
use crate::load;
use crate::progress::Progress;
use kolo_exec::Options;
use kolo_models::ModelKind;
use kolo_plan::Rates;
use kolo_train::decision::decision_map;
use kolo_train::machine::{format_bytes, format_count};
use kolo_train::report::{Planned, Report};
use kolo_train::session::RunOptions;
use kolo_train::{Trainer, interrupt};

const MAP_COLUMNS: usize = 60;
const MAP_ROWS: usize = 28;
const MAP_PIXELS: usize = 480;

pub fn train(models: &[ModelKind], args: &Train) -> Result<(), Failure> {
    let job = load::job(models, &args.job)?;
    let threads = load::threads(&args.job)?;
    args.report.as_deref().map_or(Ok(()), check_writable)?;
    let interrupt = interrupt::install()
        .map_err(|error| Failure::job(format!("cannot listen for Ctrl-C: {error}"), "check the process's limits"))?;
    if !args.quiet {
        println!("{}: {}", job.name, job.source.describe());
        println!(
            "{} steps, batch {} in {} grains, {threads} threads, {} samples to train on, {} held out",
            job.total_steps,
            job.batch,
            job.grains,
            job.split.train_len(),
            job.split.held_out_len()
        );
    }
    let mut progress = Progress::new(job.total_steps, args.quiet);
    let options = RunOptions {
        threads,
        out: args.out.clone(),
        interrupt,
        planned: Planned::default(),
        world: None,
        timeline: None,
    };
    let outcome = kolo_train::run(job, &options, &mut progress);
    progress.finish();
    let (mut trainer, mut report) = outcome?;
    report.planned = planned(&trainer, threads);
    if let Some(path) = &args.report {
        let text = serde_json::to_string_pretty(&report)
            .map_err(|error| Failure::job(format!("the report: {error}"), "this is a bug; please report it"))?;
        write_file(path, text + "\n")?;
    }
    show_map(&mut trainer, args)?;
    if !args.quiet {
        summary(&report);
    }
    Ok(())
}

/// The planner's word on the graph that just ran.
fn planned(trainer: &Trainer, threads: usize) -> Planned {
    let graph = trainer.session().graph();
    let options = Options::for_grains(trainer.job().grains, threads);
    let cost = kolo_plan::cost(graph, options);
    Planned {
        step_ms: kolo_plan::predict_seconds(graph, options, &Rates::measure()) * 1e3,
        bytes: cost.memory.total() as u64,
        flops: cost.flops.total(),
    }
}

fn show_map(trainer: &mut Trainer, args: &Train) -> Result<(), Failure> {
    if args.quiet && args.out.is_none() {
        return Ok(());
    }
    let Some(map) = decision_map(trainer)? else { return Ok(()) };
    if !args.quiet {
        println!("{}", map.ascii(MAP_COLUMNS, MAP_ROWS));
    }
    match &args.out {
        Some(dir) => write_file(&dir.join("decision.png"), map.picture(MAP_PIXELS, MAP_PIXELS).png()),
        None => Ok(()),
    }
}

fn summary(report: &Report) {
    println!("{} after {} steps ({:.1} epochs)", report.ended, report.steps, report.epochs);
    println!("  loss        {:.4}", report.loss);
    for (name, value) in &report.metrics {
        println!("  {name:<11} {value:.4}");
    }
    let tokens = report.tokens_per_s.map_or(String::new(), |rate| format!(", {} tokens/s", format_count(rate as u64)));
    println!("  speed       {} samples/s{tokens}", format_count(report.samples_per_s as u64));
    println!("              planned     measured");
    println!("  step time   {:<10}  {:.2} ms", format!("{:.2} ms", report.planned.step_ms), report.step_ms.median);
    let rate = report.planned.flops as f64 / report.step_ms.median / 1e6;
    println!("  FLOP/step   {:<10}  at {rate:.1} GFLOP/s", format_count(report.planned.flops));
    let (plan, peak) = (format_bytes(report.planned.bytes), format_bytes(report.peak_bytes.rss));
    println!("  memory      {plan:<10}  {peak} peak of the whole process");
    println!("  weights     {}", report.weights);
}
