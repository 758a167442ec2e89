//! `kolo eval`: how good a trained model is.

use crate::classes;
use crate::fail::{Failure, check_writable, refuse_inputs, write_file};
use crate::load::Kinds;
use crate::output::println;
use crate::progress::Bar;
use crate::saved::{SavedArgs, Trained};
use clap::Args;
use kolo_data::{ChosenSamples, Split};
use kolo_exec::store::Role;
use kolo_exec::{Executor, Options};
use kolo_train::trainer::Evaluation;
use kolo_train::{Job, Trainer};
use serde_json::{Map, json};
use std::path::PathBuf;
use std::sync::Arc;

#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(flatten)]
    pub saved: SavedArgs,
    /// Files to evaluate on, instead of the job's held-out samples
    #[arg(long, value_name = "PATH")]
    pub data: Option<String>,
    /// Evaluate on the job's test files (`data.test`)
    #[arg(long, conflicts_with = "data")]
    pub test: bool,
    /// Write the result (JSON) to this file
    #[arg(long)]
    pub report: Option<PathBuf>,
}

/// Files to evaluate on that are opened without those of the training, and the flag or key that names them.
fn files_alone(args: &EvalArgs, trained: &Trained) -> Result<Option<(String, &'static str)>, Failure> {
    if let Some(path) = &args.data {
        return Ok(Some((path.clone(), "--data")));
    }
    if !trained.trained_from_pipe()? {
        return Ok(None);
    }
    let (key, named) = if args.test { ("test", "data.test") } else { ("validation", "data.validation") };
    let files = trained.files_of(key)?.ok_or_else(|| {
        let message = format!("nothing to evaluate: the run was trained from a pipe, and its job names no `{named}`");
        Failure::usage(message, "name files with --data")
    })?;
    Ok(Some((files, named)))
}

/// The job, with the samples to evaluate on held out.
fn job_of(kinds: &Kinds, args: &EvalArgs, trained: &Trained, executor: &Arc<dyn Executor>) -> Result<Job, Failure> {
    let mut job = match files_alone(args, trained)? {
        Some((files, named_by)) => trained.job_on(kinds, &files, named_by)?,
        None => {
            let mut job = trained.job(kinds)?;
            if args.test {
                if job.split.test_len() == 0 {
                    let hint = "name files with --data, or set `data.test`";
                    return Err(Failure::usage("the job has no test files", hint));
                }
                job.split = job.split.test_as_held_out();
                if let Some(target) = job.source.missing_target(job.split.held_out(0)) {
                    let message =
                        format!("nothing to compare with: the test files have no column \"{target}\", the target");
                    return Err(Failure::usage(message, "add it, or run `kolo predict`, which needs no target"));
                }
            }
            job
        }
    };
    job.run_on(Arc::clone(executor))?;
    if job.split.held_out_len() == 0 {
        let message = "nothing to evaluate: the job holds out no samples";
        return Err(Failure::usage(message, "name files with --data, or set `data.holdout`"));
    }
    Ok(job)
}

/// Held-out samples that an evaluation of this job could read, in their order.
fn readable(job: &Job) -> Vec<usize> {
    let held_out = (0..job.split.held_out_len()).map(|at| job.split.held_out(at));
    held_out.filter(|sample| !job.source.is_unreadable(*sample)).collect()
}

/// The same job with these samples held out alone.
fn with_held_out(job: Job, held_out: &[usize]) -> Job {
    let training = (0..job.split.train_len()).map(|at| job.split.train(at));
    let samples: Vec<usize> = training.chain(held_out.iter().copied()).collect();
    let split = Split::given(samples.len() - held_out.len(), held_out.len());
    Job { source: Box::new(ChosenSamples::new(job.source, samples)), split, ..job }
}

/// What a model is worth, and which.
struct Evaluated {
    job: Arc<Job>,
    trainer: Trainer,
    evaluation: Option<Evaluation>,
}

fn evaluate(job: Job, args: &EvalArgs, trained: &Trained) -> Result<Evaluated, Failure> {
    let job = Arc::new(job);
    let mut trainer = Trainer::new(Arc::clone(&job), Options::for_grains(job.grains, args.saved.threads()?))?;
    trained.fill(trainer.store_mut(), |entry| entry.role != Role::Moment)?;
    let bar = Bar::new(job.split.held_out_len(), "samples");
    let evaluation = trainer.evaluate_telling(&mut |done, _| bar.tell(done))?;
    bar.finish();
    Ok(Evaluated { job, trainer, evaluation })
}

pub fn eval(kinds: &Kinds, args: &EvalArgs) -> Result<(), Failure> {
    args.report.as_deref().map_or(Ok(()), check_writable)?;
    let mut trained = Trained::open(kinds, &args.saved)?;
    let executor = args.saved.device.executor()?;
    trained.leave_layout_out(kinds, &*executor);
    if args.data.is_some() && !trained.reads_files(kinds)? {
        let message = "--data: the run was trained on built-in data, which tell nobody what files must hold";
        return Err(Failure::usage(message, "leave --data out to evaluate on its held-out samples"));
    }
    let job = job_of(kinds, args, &trained, &executor)?;
    let report = args.report.as_deref();
    report.map_or(Ok(()), |path| refuse_inputs("--report", path, &*job.source, args.saved.job.as_deref()))?;
    let mut evaluated = evaluate(job, args, &trained)?;
    let held_out = readable(&evaluated.job);
    let skipped = evaluated.job.split.held_out_len() - held_out.len();
    if skipped > 0 {
        // Others stood in for them, which would count twice.
        let job = with_held_out(job_of(kinds, args, &trained, &executor)?, &held_out);
        evaluated = evaluate(job, args, &trained)?;
    }
    let Evaluated { job, trainer, evaluation } = evaluated;
    let Some(evaluation) = evaluation else { return Ok(()) };
    let what = args.data.as_deref().unwrap_or(if args.test { "test" } else { "held-out" });
    job.source.notes().iter().for_each(|note| println!("  {note}"));
    println!("{} samples, {what}", job.split.held_out_len());
    if skipped > 0 {
        println!("  skipped     {skipped} samples that could not be read");
    }
    println!("  loss        {:.4}", evaluation.loss);
    for (name, value) in &evaluation.metrics {
        println!("  {name:<11} {value:.4}");
    }
    let names = job.source.class_names();
    let classification = evaluation.confusion.as_ref().map(|confusion| confusion.report(names));
    classification.iter().flat_map(classes::lines).for_each(|line| println!("{line}"));
    println!("  weights     {}", trainer.store().digest());
    let Some(path) = &args.report else { return Ok(()) };
    let metrics: Map<String, _> = evaluation.metrics.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    let report = json!({
        "job": job.name, "samples": job.split.held_out_len(), "loss": evaluation.loss, "metrics": metrics,
        "classification": classification, "skipped": skipped, "weights": trainer.store().digest(),
    });
    write_file(path, format!("{report:#}\n"))
}
