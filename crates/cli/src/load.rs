//! From the command line to a job.

use crate::args::JobArgs;
use crate::fail::Failure;
use crate::transports::TransportKind;
use crate::workers;
use kolo_base::ShownPath;
use kolo_data::{SOURCES, Source, SourceKind};
use kolo_exec::Executor;
use kolo_graph::settings::{Setting, Settings};
use kolo_models::{MODELS, ModelKind};
use kolo_parallel::{Mesh, STRATEGIES, StrategyKind};
use kolo_train::step::LayoutCheck;
use kolo_train::{Job, job, job_file, nearest};
use std::path::Path;
use std::sync::Arc;

/// The job that runs when no file is given.
const DEFAULT_JOB: &str = include_str!("../../../examples/digits.toml");
const WORKERS_MAX: usize = 1024;
const THREADS_MAX: usize = 1024;

/// What a job file can name: all of this workspace, and what a program of its own adds.
#[derive(Clone, Debug)]
pub struct Kinds {
    pub models: Vec<ModelKind>,
    pub sources: Vec<SourceKind>,
    pub strategies: Vec<StrategyKind>,
}

impl Default for Kinds {
    fn default() -> Self {
        Self { models: MODELS.to_vec(), sources: SOURCES.to_vec(), strategies: STRATEGIES.to_vec() }
    }
}

impl Kinds {
    fn lists(&self) -> job::Kinds<'_> {
        job::Kinds { models: &self.models, sources: &self.sources, strategies: &self.strategies }
    }

    /// The job of these settings.
    pub fn read(&self, root: &Settings) -> Result<Job, Failure> {
        Ok(Job::read_among(root, &self.lists())?)
    }

    /// The job of these settings, to evaluate on this source.
    pub fn read_to_evaluate(&self, root: &Settings, source: Box<dyn Source>) -> Result<Job, Failure> {
        Ok(Job::read_to_evaluate(root, &self.lists(), source)?)
    }
}

/// The job file with the overrides applied.
pub fn settings(args: &JobArgs) -> Result<Settings, Failure> {
    settings_of(args.job.as_deref(), &args.set)
}

/// The job file at a path with these overrides; the built-in one without a path.
pub fn settings_of(path: Option<&Path>, overrides: &[String]) -> Result<Settings, Failure> {
    let mut root = match path {
        Some(path) => job_file::read(path)?,
        None => job_file::parse(DEFAULT_JOB, "built-in digits")?,
    };
    for assignment in overrides {
        job_file::override_with(&mut root, assignment)?;
    }
    Ok(root)
}

/// Where a job file has keys, the likeliest first.
const PLACES_OF_KEYS: [&str; 9] =
    ["train", "data", "model", "train.optimizer", "train.schedule", "parallel", "memory", "checkpoint", "job"];

/// The key of a job file with this name, with its section: `train.epochs`.
pub fn key_named(kinds: &Kinds, name: &str) -> Option<String> {
    let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    let mut keys = PLACES_OF_KEYS.iter().filter(|_| is_name).map(|place| format!("{place}.{name}"));
    keys.find(|key| {
        let read = settings_of(None, &[format!("{key}=1")]).and_then(|root| kinds.read(&root).map(drop));
        read.err().is_none_or(|failure| !failure.message().contains("unknown key"))
    })
}

/// A pipe has one reader. Asked before the pipe is opened, as every process would take a part of it.
pub fn refuse_shared_pipe(root: &Settings, processes: usize) -> Result<(), Failure> {
    let data = root.table("data")?;
    match data.peek("source") {
        Some(Setting::Text(source)) if processes > 1 && kolo_data::stream::is_pipe(source) => {
            let message = format!("is \"{source}\", a pipe, which only one process can read");
            Err(data.wrong("source", message, "use one worker, or write the samples to files").into())
        }
        _ => Ok(()),
    }
}

/// The same of a job file that comes through a descriptor, such as `<(command)`.
pub fn refuse_shared_job(path: Option<&Path>, processes: usize) -> Result<(), Failure> {
    match path.filter(|path| processes > 1 && kolo_base::is_open_stream(path)) {
        Some(path) => {
            let message = format!("{}: this job file can be read once, and each worker reads it", path.shown());
            Err(Failure::usage(message, "write it to a file first, or use one worker"))
        }
        None => Ok(()),
    }
}

/// Whether workers can share what the job's strategies share: told before anything is launched.
fn check_links(job: &Job, args: &JobArgs, workers: usize) -> Result<(), Failure> {
    let shared = job.parallel.strategies().find(|strategy| workers > 1 && strategy.home().is_shared());
    let Some(strategy) = shared else { return Ok(()) };
    let transport = args.workers.transport;
    let by_mpi = workers::rank_info()?.is_some_and(|rank_info| rank_info.launcher.is_mpi());
    let hosts = workers::asked_by_host(&args.workers)?.len();
    let why = match transport.shares_memory(by_mpi) {
        true if hosts > 1 => format!("--hosts names {hosts} hosts"),
        true => return Ok(()),
        false if transport.link.is_some() => format!("they exchange over --transport {}", transport.name),
        false => "they exchange over MPI".into(),
    };
    let message = format!("`{}` needs all workers in the shared memory of one host, but {why}", strategy.written());
    Err(Failure::usage(message, "write `parallel.zero = 1` instead, or start all workers on one host with -n"))
}

/// Reads the job file with the overrides applied, for this many workers.
pub fn job(kinds: &Kinds, args: &JobArgs, workers: usize) -> Result<Arc<Job>, Failure> {
    if workers == 0 || workers > WORKERS_MAX {
        return Err(Failure::usage(format!("{workers} workers are out of range"), "use a number from 1 to 1024"));
    }
    let root = settings(args)?;
    refuse_shared_pipe(&root, workers)?;
    // Who starts the workers in another way has no -n to change.
    let counted = args.workers.hosts.is_none() && args.workers.count == workers;
    let named = |layout: String| match layout.strip_prefix("-n ").map(|rest| rest.split_once(' ').unwrap_or((rest, "")))
    {
        Some((count, rest)) if !counted => format!("{count} workers {rest}").trim_end().to_string(),
        _ => layout,
    };
    let near = |error: kolo_train::Error| {
        let layouts: Vec<String> = nearest::layouts(&root, &kinds.lists(), workers).into_iter().map(named).collect();
        Failure::from(error).beside(&layouts)
    };
    let mut job = Job::read_among(&root, &kinds.lists()).map_err(near)?;
    job.run_on(linked(args.device.executor()?, args.workers.transport, workers)?)?;
    if workers > 1 {
        job.check_device(workers)?;
    }
    check_links(&job, args, workers)?;
    fit(&mut job, workers).map_err(near)?;
    Ok(Arc::new(job))
}

/// The executor with the links between devices that `--transport` asks for.
fn linked(executor: Arc<dyn Executor>, transport: TransportKind, workers: usize) -> Result<Arc<dyn Executor>, Failure> {
    match executor.with_links(transport.devices) {
        Some(linked) => Ok(linked),
        None if transport.joins_devices() && workers > 1 => {
            let (name, device) = (transport.name, executor.name());
            let message = format!("--transport {name} connects GPUs, but these workers compute on `{device}`");
            Err(Failure::usage(message, "use --device cuda, or leave --transport out"))
        }
        None => Ok(executor),
    }
}

/// Fits a job to its workers, and finds out whether they can share its model. Told once, before anything is launched.
fn fit(job: &mut Job, workers: usize) -> Result<(), kolo_train::Error> {
    job.fit_to(workers)?;
    match workers > 1 && job.parallel.splits_model() {
        true => LayoutCheck::new(job)?.run(&job.parallel, workers),
        false => Ok(()),
    }
}

/// The place of one of this many workers.
pub fn mesh(job: &Job, workers: usize, rank: usize) -> Result<Mesh, Failure> {
    job.parallel
        .mesh(workers, rank)
        .map_err(|refusal| Failure::usage(format!("{workers} workers {}", refusal.message), &refusal.hint))
}

/// The number of threads to use.
pub fn threads(args: &JobArgs) -> Result<usize, Failure> {
    threads_of(args.threads)
}

/// The number of threads to use, if this many were asked for.
pub fn threads_of(asked: Option<usize>) -> Result<usize, Failure> {
    match asked {
        Some(threads) if (1..=THREADS_MAX).contains(&threads) => Ok(threads),
        Some(threads) => {
            Err(Failure::usage(format!("--threads {threads} is out of range"), "use a number from 1 to 1024"))
        }
        None => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
    }
}
