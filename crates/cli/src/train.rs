//! `kolo train`.

use crate::args::Train;
use crate::auto;
use crate::classes;
use crate::elastic;
use crate::fail::{Failure, check_writable, refuse_inputs, write_file};
use crate::flags;
use crate::folds;
use crate::load::{self, Kinds};
use crate::manifest::Agreement;
use crate::out::{self, RunFiles, RunLock};
use crate::output::{print_error, println};
use crate::planned_step;
use crate::progress::{Progress, Waiting};
use crate::resume;
use crate::workers::{self, RemoteView, Worker};
use kolo_base::ShownPath;
use kolo_cluster::elastic::ElasticOptions;
use kolo_cluster::startup_watch::StartupWatch;
use kolo_cluster::{Introduction, Launcher, RankInfo};
use kolo_comm::Communicator;
use kolo_parallel::strategy::Strategy;
use kolo_train::asynchronous::{self, Roles};
use kolo_train::checkpoint::{CHECKPOINTS, CheckpointDir};
use kolo_train::class_weights;
use kolo_train::compared::most_wrong_memory;
use kolo_train::decision::decision_map;
use kolo_train::grain_cost::GrainCost;
use kolo_train::interrupt::{self, Interrupt, RunPhase};
use kolo_train::machine::{format_bytes, format_count};
use kolo_train::record::OutDir;
use kolo_train::report::{Communication, DataStages, DataWait, Planned, Report, Skipped};
use kolo_train::run_dir::LOCK;
use kolo_train::session::{INTERRUPTED, RunOptions, WorkerGroup};
use kolo_train::timeline::{StepRange, Timeline};
use kolo_train::{Job, Observer, Trainer};
use serde_json::Value;
use std::io::BufReader;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const MAP_COLUMNS: usize = 60;
const MAP_ROWS: usize = 28;
const MAP_PIXELS: usize = 480;
const SERVERS_MAX: usize = 64;

pub fn train(kinds: &Kinds, args: &Train) -> Result<(), Failure> {
    let rank_info = workers::rank_info()?;
    if let Some(count) = args.folds {
        return folds::train(kinds, args, count, rank_info.as_ref());
    }
    if args.auto {
        return match &rank_info {
            None => auto::train(kinds, args),
            Some(found) => {
                let message = format!("--auto: {} started the workers", found.launcher.name());
                Err(Failure::usage(
                    message,
                    "run `kolo plan JOB.toml --search --write` first, and train without --auto",
                ))
            }
        };
    }
    let announced = workers::announce(rank_info.as_ref(), &args.job.workers);
    let prepared = prepare(kinds, args, rank_info.as_ref());
    let claimed = prepared.and_then(|prepared| {
        let (out, lock) = claim_out(args, &prepared.job, rank_info.as_ref())?;
        Ok((out, lock, prepared))
    });
    // An elastic job goes on without a worker that cannot start.
    let teller = rank_info.as_ref().filter(|_| !args.elastic);
    let claimed = workers::or_fail_all(claimed, teller, &args.job.workers)?;
    let (out, lock, Prepared { job, world, roles, elastic }) = claimed;
    let outcome = match rank_info {
        Some(rank_info) => {
            if rank_info.launcher != Launcher::Kolo && rank_info.rank == 0 {
                introduce_all(&job, args, world, roles, out.as_ref());
            }
            work(&job, args, &rank_info, roles, out.clone(), announced)
        }
        None if workers::are_supervised(args, world) => {
            introduce_all(&job, args, world, roles, out.as_ref());
            let view = Progress::new(job.total_steps, args.quiet);
            let servers = roles.map_or(0, |roles| roles.servers);
            let elastic = elastic.map(|options| elastic::inviting(options, out.as_ref()));
            let ended = workers::supervise(&args.job.workers, world, servers, out.as_ref(), view, elastic);
            match job.parallel.strategies().any(Strategy::shares_model) {
                true => ended.map_err(|failure| failure.meaning(|| lost_part(out.as_ref()))),
                false => ended,
            }
        }
        None => alone(&job, args, out.clone()),
    };
    // Of workers elsewhere, none may have seen that the directory is gone here.
    let outcome = outcome.and_then(|()| lock.as_ref().map_or(Ok(()), RunLock::check));
    drop(lock);
    if outcome.is_err() {
        out::remove_if_empty(out.as_ref());
    }
    outcome
}

/// What it means that a rank is gone which had a part of the model that no other has.
fn lost_part(out: Option<&OutDir>) -> String {
    let lost = "its part of the model is lost with it, and the others cannot go on without";
    match out.filter(|out| out::has_checkpoints(out)) {
        Some(out) => {
            format!("{lost}; start it again with --resume --out {} in this or any other layout", out.path.shown())
        }
        None => format!("{lost}; there is no checkpoint to go on from (`checkpoint.every`)"),
    }
}

/// A run's directory, and what keeps other runs out of it until this one ends.
type Claimed = (Option<OutDir>, Option<RunLock>);

/// The run's directory, which holds no other run. Whoever is first on this host looks, before anybody is started; whoever started
/// the workers, or the first of them, locks it.
fn claim_out(args: &Train, job: &Job, rank_info: Option<&RankInfo>) -> Result<Claimed, Failure> {
    let started_by_us = rank_info.is_some_and(|rank_info| rank_info.launcher == Launcher::Kolo);
    if let Some(out) = rank_info.and_then(|rank_info| elastic::out_of(args, rank_info)) {
        return Ok((out, None));
    }
    if rank_info.is_some_and(|rank_info| rank_info.rank > 0) {
        return Ok((None, None));
    }
    let locked = |path: &Path| if started_by_us { Ok(None) } else { out::lock(path) };
    if let Some(path) = &args.out {
        let lock = locked(path)?;
        let files = if started_by_us { RunFiles::OfRankZero } else { RunFiles::All };
        let mut stale = match args.resume {
            true => out::clear_logs(path, files).map(|()| Vec::new())?,
            false => out::claim(path, args.overwrite, files)?,
        };
        if args.elastic {
            // Whoever begins the run after a loss does not know of them.
            stale.drain(..).try_for_each(|path| out::remove(&path))?;
        }
        return Ok((Some(marked(OutDir::new(path.clone(), true), lock.as_ref(), args).replacing(stale)), lock));
    }
    if args.resume && !started_by_us {
        if let Some(last) = out::last(&job.name) {
            let lock = locked(&last.path)?;
            out::clear_logs(&last.path, RunFiles::All)?;
            return Ok((Some(marked(last, lock.as_ref(), args)), lock));
        }
        return fresh_out(args, job);
    }
    // Over several hosts there is no telling where rank 0 may write.
    let none = args.no_out || started_by_us || args.job.workers.hosts.is_some();
    match &args.fresh_out {
        Some(_) if !started_by_us => {
            Err(Failure::usage("--fresh-out is for workers that kolo starts itself", "write --out DIR"))
        }
        Some(path) => {
            interrupt::leave_no_empty(path, None);
            Ok((Some(marked(OutDir::new(path.clone(), false), None, args)), None))
        }
        None if none => Ok((None, None)),
        None => fresh_out(args, job),
    }
}

/// With the mark of its run: of the lock that this process holds, or of its supervisor's.
pub fn marked(out: OutDir, lock: Option<&RunLock>, args: &Train) -> OutDir {
    out.marked(lock.map_or_else(|| args.out_mark.clone(), RunLock::mark))
}

/// A directory of this run's own, under `runs`.
fn fresh_out(args: &Train, job: &Job) -> Result<Claimed, Failure> {
    let Some(out) = out::fresh(&job.name, args.quiet) else { return Ok((None, None)) };
    let lock = out::lock(&out.path)?;
    interrupt::leave_no_empty(&out.path, Some(&out.path.join(LOCK)));
    Ok((Some(marked(out, lock.as_ref(), args)), lock))
}

/// What can be known before anybody is started.
pub struct Prepared {
    pub job: Arc<Job>,
    /// Processes, servers among them.
    world: usize,
    roles: Option<Roles>,
    elastic: Option<ElasticOptions>,
}

fn prepare(kinds: &Kinds, args: &Train, rank_info: Option<&RankInfo>) -> Result<Prepared, Failure> {
    let prepared = check(kinds, args, rank_info.map(|rank_info| rank_info.world))?;
    flags::check(&args.job.workers, rank_info, prepared.world)?;
    // The first rank writes, wherever it runs.
    if rank_info.map_or(args.job.workers.hosts.is_none(), |rank_info| rank_info.rank == 0) {
        for (flag, path) in [("--report", &args.report), ("--trace", &args.trace)] {
            let Some(path) = path else { continue };
            check_writable(path)?;
            refuse_inputs(flag, path, &*prepared.job.source, args.job.job.as_deref())?;
        }
        if let Some(path) = args.trace.as_deref().filter(|path| is_pipe(path)) {
            let message = format!("--trace {} is a pipe", path.shown());
            return Err(Failure::usage(message, "name a regular file: kolo rewrites a timeline while it grows"));
        }
    }
    Ok(prepared)
}

fn is_pipe(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_fifo() || meta.file_type().is_socket())
}

/// All that can be wrong with a command, whoever runs it: `found` is the number of processes that a launcher starts.
pub fn check(kinds: &Kinds, args: &Train, found: Option<usize>) -> Result<Prepared, Failure> {
    let started = found.map_or_else(|| workers::asked(&args.job.workers), Ok)?;
    // Where workers are started elsewhere, this process is one more.
    let processes = started + usize::from(found.is_none() && workers::are_supervised(args, started));
    load::refuse_shared_pipe(&load::settings(&args.job)?, processes)?;
    load::refuse_shared_job(args.job.job.as_deref(), processes)?;
    if let Some(out) =
        args.out.as_deref().filter(|out| std::path::absolute(out).is_ok_and(|path| path.to_str().is_none()))
    {
        let message = format!("--out {}: the name is not UTF-8 text", out.shown());
        return Err(Failure::usage(message, "name another directory: this one is told to other processes as text"));
    }
    let roles = roles(args, started, found.is_some() || args.job.workers.hosts.is_some())?;
    // Of an elastic job's workers, as many share the grains as can.
    let shares = if args.elastic { 1 } else { roles.map_or(started, |roles| roles.workers) };
    let job = match load::job(kinds, &args.job, shares) {
        // One that goes with all workers alone is refused below, for what it is.
        Err(failure) if args.elastic => load::job(kinds, &args.job, started).map_err(|_| failure)?,
        loaded => loaded?,
    };
    let elastic = elastic::options(args, &job, started)?;
    if let Some(roles) = roles {
        // Refuses settings that mean nothing to workers with servers.
        let served = job.parallel.served(roles, job.facts());
        served.map_err(|refusal| Failure::usage(refusal.message, &refusal.hint))?;
    }
    if args.job.threads.is_some() {
        load::threads(&args.job)?;
    }
    if let Some(steps) = args.trace_steps.filter(|steps| steps.first() >= job.total_steps) {
        let message = format!("--trace-steps starts at step {}, but the job has {}", steps.first(), job.total_steps);
        return Err(Failure::usage(message, "steps are counted from 0; begin at an earlier one"));
    }
    Ok(Prepared { job, world: roles.map_or(started, |roles| roles.workers + roles.servers), roles, elastic })
}

/// Who does what in asynchronous training. Servers come on top of the workers of `-n`; where the number of processes is
/// given, by a list of hosts or another launcher, they are among them.
fn roles(args: &Train, started: usize, found: bool) -> Result<Option<Roles>, Failure> {
    if !args.asynchronous {
        return Ok(None);
    }
    let servers = args.servers;
    if servers == 0 || servers > SERVERS_MAX || (found && servers >= started) {
        let message = format!("--servers {servers} is out of range");
        return Err(Failure::usage(message, "use at least one server, and leave at least one worker"));
    }
    let staleness = match args.staleness.as_str() {
        "none" => None,
        text => Some(text.parse().map_err(|_| {
            Failure::usage(format!("--staleness {text} is not a number of steps"), "write 0, 4 or `none`")
        })?),
    };
    Ok(Some(Roles { workers: if found { started - servers } else { started }, servers, staleness }))
}

fn introduce_all(job: &Job, args: &Train, world: usize, roles: Option<Roles>, out: Option<&OutDir>) {
    let workers = roles.map_or(world, |roles| roles.workers);
    let servers = roles.map_or(String::new(), |roles| format!(" and {}", counted(roles.servers, "server")));
    let share = match args.job.threads {
        Some(threads) => format!("with {} each", counted(threads, "thread")),
        None if world == 1 => "on its cores".into(),
        None => "that share the cores".into(),
    };
    introduce(job, args, &format!("{}{servers} {share}", counted(workers, "worker")), out);
}

/// `1 server`, `2 servers`.
fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn introduce(job: &Job, args: &Train, who: &str, out: Option<&OutDir>) {
    if args.quiet {
        return;
    }
    println!("{}: {}", job.name, job.source.describe());
    job.source.notes().iter().for_each(|note| println!("  {note}"));
    println!(
        "{}, batch {} in {}, {who}, {} to train on, {} held out",
        counted(job.total_steps, "step"),
        job.batch,
        counted(job.grains, "grain"),
        counted(job.split.train_len(), "sample"),
        job.split.held_out_len()
    );
    if let Some(weights) = &job.class_weights {
        println!("  {}", class_weights::described(weights, job.source.class_names()));
    }
    job.evaluation_note().iter().for_each(|note| println!("  {note}"));
    match out {
        Some(out) => println!("checkpoints in {}: {}", out.path.display(), job.saving.describe()),
        None => println!("no checkpoints: this run has no directory; --out DIR names one"),
    }
}

/// Hears signals; whether this process `speaks` of them, or another one does, and whether its launcher passes them on.
pub fn listen(speaks: bool, is_told: bool) -> Result<Interrupt, Failure> {
    interrupt::install(speaks, is_told).map_err(|error| {
        Failure::job(format!("cannot install a handler for Ctrl-C: {error}"), "check the process's limits")
    })
}

fn alone(job: &Arc<Job>, args: &Train, out: Option<OutDir>) -> Result<(), Failure> {
    let threads = load::threads(&args.job)?;
    introduce(job, args, &counted(threads, "thread"), out.as_ref());
    if !args.quiet {
        note_grains(job, threads);
    }
    let interrupt = listen(!args.quiet, false)?;
    let mut progress = Progress::new(job.total_steps, args.quiet);
    let timeline = args.trace.as_deref().map(|path| Timeline::create(path, steps_shown(args))).transpose()?;
    let timeline = timeline.map(Arc::new);
    let checkpoints = checkpoints(job, args, out.as_ref())?;
    let options = RunOptions { out, timeline, checkpoints, ..run_options(threads, interrupt, WorkerGroup::Alone) };
    let outcome = run(job, args, &options, &mut progress, None);
    progress.finish();
    match outcome? {
        Some(signal) => Err(Failure::interrupted(signal)),
        None => Ok(()),
    }
}

/// Says what the grains cost one worker, if that is worth a word.
pub fn note_grains(job: &Job, threads: usize) {
    // What cannot be built is refused, and explained, where it runs.
    if let Ok(Some(cost)) = GrainCost::predict(job, threads, kolo_plan::Rates::usual) {
        print_error(&format!("note: {cost}"));
    }
}

/// Where the state of the run goes. The first rank knows, and tells the others.
pub fn checkpoint_dir(job: &Job, args: &Train, out: &OutDir) -> Result<CheckpointDir, Failure> {
    let absolute = std::path::absolute(&out.path)
        .map_err(|error| Failure::job(format!("{}: {error}", out.path.shown()), "name another --out directory"))?;
    let (root, required, resume) = (absolute.join(CHECKPOINTS), out.required, args.resume);
    Ok(CheckpointDir { root, required, resume, job_text: job.text.clone() })
}

fn checkpoints(job: &Job, args: &Train, out: Option<&OutDir>) -> Result<Option<CheckpointDir>, Failure> {
    out.map(|out| checkpoint_dir(job, args, out)).transpose()
}

fn steps_shown(args: &Train) -> StepRange {
    args.trace_steps.unwrap_or(StepRange::ALL)
}

pub fn run_options(threads: usize, interrupt: Interrupt, group: WorkerGroup) -> RunOptions {
    RunOptions {
        threads,
        out: None,
        interrupt,
        planned: Planned::default(),
        group,
        timeline: None,
        checkpoints: None,
        elastic: None,
    }
}

/// This process is one of several.
fn work(
    job: &Arc<Job>,
    args: &Train,
    rank_info: &RankInfo,
    roles: Option<Roles>,
    out: Option<OutDir>,
    announced: Option<StartupWatch>,
) -> Result<(), Failure> {
    // A launcher of our own says itself what it does.
    let is_told = rank_info.launcher == Launcher::Kolo;
    let interrupt = listen(!args.quiet && !is_told && rank_info.rank == 0, is_told)?;
    let introduction = introduction(job, args, rank_info, roles);
    let introduction = workers::or_fail_all(introduction, Some(rank_info), &args.job.workers)?;
    if args.elastic {
        let joined = workers::join(rank_info, &args.job.workers, introduction)?;
        drop(announced);
        return elastic::work(job, args, joined.member, interrupt, out);
    }
    let worker = Worker::join(rank_info, &args.job.workers, job.reproducible, introduction, announced)?;
    let outcome = take_part(job, args, &worker, interrupt, roles, out);
    let signal = outcome.as_ref().ok().copied().flatten();
    worker.finish(outcome.map(drop))?;
    match signal {
        // One that kolo started has told its launcher, which ends so.
        Some(signal) if !is_told => Err(Failure::interrupted(signal)),
        _ => Ok(()),
    }
}

/// What this rank tells the others when it joins.
pub fn introduction(
    job: &Job,
    args: &Train,
    rank_info: &RankInfo,
    roles: Option<Roles>,
) -> Result<Introduction, Failure> {
    let mut agreement = Agreement::on("train").job(job)?.workers(&args.job.workers);
    agreement = agreement.flag("--trace", if args.trace.is_some() { "given" } else { "left out" });
    agreement = agreement.flag("--async", args.asynchronous).flag("--resume", args.resume);
    if let Some(Roles { servers, staleness, .. }) = roles {
        let staleness = staleness.map_or("none".into(), |steps| steps.to_string());
        agreement = agreement.flag("--servers", servers).flag("--staleness", staleness).flag("--compare", args.compare);
    }
    let server = roles.and_then(|roles| roles.server(rank_info.rank)).map(workers::server);
    let agreement = agreement.flag("--elastic", args.elastic);
    let elastic = elastic::options(args, job, rank_info.world)?;
    Ok(Introduction { manifest: agreement.manifest(), role: server, elastic, failure: None })
}

fn take_part(
    job: &Arc<Job>,
    args: &Train,
    worker: &Worker,
    interrupt: Interrupt,
    roles: Option<Roles>,
    out: Option<OutDir>,
) -> Result<Option<i32>, Failure> {
    let quiet = args.quiet || worker.member.rank > 0;
    let threads = worker.threads(&args.job);
    let mut view = RemoteView::new(worker.member.events(), Progress::plain(quiet));
    let world = Arc::clone(&worker.world);
    let timeline = args.trace.as_deref().map(|path| Timeline::among(path, steps_shown(args), &world)).transpose()?;
    let timeline = timeline.map(Arc::new);
    let checkpoints = checkpoints(job, args, out.as_ref())?;
    let Some(roles) = roles else {
        let group = WorkerGroup::Workers(world);
        let options = RunOptions { out, timeline, checkpoints, ..run_options(threads, interrupt, group) };
        let signal = run(job, args, &options, &mut view, None)?;
        view.interrupted(signal);
        return Ok(signal);
    };
    let serves = world.rank() >= roles.workers;
    if serves {
        // It ends with the workers, who are asked as well.
        interrupt.enter(RunPhase::Training);
    }
    let mut beside = None;
    if args.compare {
        let group = Arc::new(world.split(i64::from(serves), world.rank() as i64)?);
        if !serves {
            let options = run_options(threads, interrupt.clone(), WorkerGroup::Workers(group));
            beside = Some(kolo_train::run(Arc::clone(job), &options, &mut view)?.1);
        }
    }
    if serves {
        asynchronous::serve(job, threads, &world, roles, timeline.as_ref())?;
        finish_timeline(timeline.as_deref(), Some(&world))?;
        return Ok(None);
    }
    let group = WorkerGroup::Served(world, roles);
    let options = RunOptions { out, timeline, checkpoints, ..run_options(threads, interrupt, group) };
    let signal = run(job, args, &options, &mut view, beside)?;
    view.interrupted(signal);
    Ok(signal)
}

/// Trains, and writes and prints what came of it; of several workers, the first does, and knows the signal that ended the run.
fn run(
    job: &Arc<Job>,
    args: &Train,
    options: &RunOptions,
    observer: &mut dyn Observer,
    beside: Option<Report>,
) -> Result<Option<i32>, Failure> {
    let (mut trainer, report) = kolo_train::run(Arc::clone(job), options, observer)?;
    let world = match &options.group {
        WorkerGroup::Alone => None,
        WorkerGroup::Workers(world) | WorkerGroup::Served(world, _) => Some(world),
    };
    finish_timeline(options.timeline.as_deref(), world.map(|world| &**world))?;
    let is_rank_zero = world.is_none_or(|world| world.rank() == 0);
    if !is_rank_zero {
        return Ok(None);
    }
    conclude(args, options, &mut trainer, report, beside)
}

/// Writes and prints what came of a run; the signal that ended it, if one did.
pub fn conclude(
    args: &Train,
    options: &RunOptions,
    trainer: &mut Trainer,
    mut report: Report,
    beside: Option<Report>,
) -> Result<Option<i32>, Failure> {
    // What follows takes memory and time, and must not cost the run its report.
    let is_file = |path: &PathBuf| std::fs::metadata(path).map_or(true, |meta| meta.is_file());
    if args.report.as_ref().is_none_or(is_file) {
        write_report(args, options, &report, beside.as_ref())?;
    }
    let is_interrupted = report.ended == INTERRUPTED;
    let waiting = (!args.quiet).then(|| Waiting::new("writing the report"));
    report.planned = planned_step::planned(trainer);
    drop(waiting);
    report.compared = report.compare();
    write_report(args, options, &report, beside.as_ref())?;
    show_map(trainer, args, options.out.as_ref())?;
    if !args.quiet {
        if let Some(beside) = &beside {
            compare(beside, &report);
        }
        summary(&report);
        if let Some(out) = &options.out {
            println!("  files       {}", out.path.shown());
        }
        if is_interrupted {
            println!("{}", how_to_go_on(args, options));
        }
    }
    match report.unwritten {
        Some(message) => Err(Failure::job(message, "free some space there, or choose another --out directory")),
        None => Ok(is_interrupted.then(|| options.interrupt.signal())),
    }
}

/// What to do after a run that was interrupted.
fn how_to_go_on(args: &Train, options: &RunOptions) -> String {
    match options.out.as_ref().filter(|out| out::has_checkpoints(out)) {
        Some(out) => format!("go on with: {}", resume::command(std::env::args_os(), args, &out.path)),
        None => "nothing was saved: this run has no directory, or could not write there".into(),
    }
}

/// Writes the report where it was asked for, and into the run's directory.
fn write_report(args: &Train, options: &RunOptions, report: &Report, beside: Option<&Report>) -> Result<(), Failure> {
    options.out.as_ref().map_or(Ok(()), OutDir::check)?;
    let failed = |error| Failure::job(format!("the report: {error}"), "this is a bug; please report it");
    let mut value = serde_json::to_value(report).map_err(failed)?;
    if let Some(beside) = beside {
        value["synchronous"] = serde_json::to_value(beside).map_err(failed)?;
    }
    if let Some(out) = options.out.as_ref().filter(|_| report.step_ms.median == 0.0) {
        keep_measured(&mut value, &out.path.join("report.json"));
    }
    let text = format!("{value:#}\n");
    args.report.as_ref().map_or(Ok(()), |path| write_file(path, &text))?;
    options.out.as_ref().map_or(Ok(()), |out| write_into(out, "report.json", &text))
}

/// What steps measure.
const MEASURED: [&str; 10] = [
    "step_ms",
    "samples_per_s",
    "tokens_per_s",
    "epochs_per_s",
    "data_wait_ms",
    "data_stages_ms",
    "loader",
    "communication",
    "skipped",
    "device_use",
];

/// A run that was resumed after its last step keeps what its steps measured, and if it was over, the whole report.
fn keep_measured(report: &mut Value, path: &Path) {
    let Some(before) = kolo_base::open_regular(path)
        .ok()
        .and_then(|file| serde_json::from_reader::<_, Value>(BufReader::new(file)).ok())
    else {
        return;
    };
    if before["weights"] != report["weights"] || before["steps"] != report["steps"] {
        return;
    }
    let was_over = before["ended"].as_str().is_some_and(|ended| ended != INTERRUPTED);
    if was_over && report["ended"] == INTERRUPTED {
        *report = before;
        return;
    }
    for key in MEASURED {
        if let Some(measured) = before.get(key) {
            report[key] = measured.clone();
        }
    }
}

/// Writes a file into a run's directory, which the run may be able to do without.
fn write_into(out: &OutDir, name: &str, contents: impl AsRef<[u8]>) -> Result<(), Failure> {
    out.check()?;
    match write_file(&out.path.join(name), contents) {
        Err(failure) if !out.required => {
            print_error(&format!("note: {}", failure.message()));
            Ok(())
        }
        outcome => outcome,
    }
}

/// Closes the timeline if one was asked for. All ranks come here, servers too, and the first has the file.
fn finish_timeline(timeline: Option<&Timeline>, world: Option<&Communicator>) -> Result<(), Failure> {
    Ok(timeline.map_or(Ok(()), |timeline| timeline.finish(world))?)
}

/// Synchronous and asynchronous training side by side, epoch by epoch.
fn compare(sync: &Report, free: &Report) {
    let metric = sync.metrics.keys().find(|name| *name != "eval_loss").cloned().unwrap_or("eval_loss".into());
    println!("{:>5}  {:^29}  {:^29}", "", "synchronous", "asynchronous");
    let head = format!("{:>8} {:>9} {metric:>10}", "seconds", "loss");
    println!("{:>5}  {head}  {head}", "epoch");
    for (one, other) in sync.history.iter().zip(&free.history) {
        let row = |row: &kolo_train::report::EpochRow| {
            let value = row.metrics.get(&metric).copied().unwrap_or(f64::NAN);
            format!("{:>8.2} {:>9.4} {value:>10.4}", row.seconds, row.loss)
        };
        println!("{:>5}  {}  {}", one.epoch, row(one), row(other));
    }
    let (a, b) = (sync.epochs_per_s, free.epochs_per_s);
    println!("epochs/s {a:>10.3} synchronous, {b:.3} asynchronous ({:.2} times)", b / a);
}

fn show_map(trainer: &mut Trainer, args: &Train, out: Option<&OutDir>) -> Result<(), Failure> {
    if args.quiet && out.is_none() {
        return Ok(());
    }
    let Some(map) = decision_map(trainer)? else { return Ok(()) };
    if !args.quiet {
        println!("{}", map.ascii(MAP_COLUMNS, MAP_ROWS));
    }
    out.map_or(Ok(()), |out| write_into(out, "decision.png", map.picture(MAP_PIXELS, MAP_PIXELS).png()))
}

fn summary(report: &Report) {
    println!("{} after {} ({:.1} epochs)", report.ended, counted(report.steps, "step"), report.epochs);
    println!("  train_loss  {:.4}", report.loss);
    for (name, value) in &report.metrics {
        println!("  {name:<11} {value:.4}");
    }
    report.classification.iter().flat_map(classes::lines).for_each(|line| println!("{line}"));
    let tokens = report.tokens_per_s.map_or(String::new(), |rate| format!(", {} tokens/s", format_count(rate as u64)));
    if report.step_ms.median > 0.0 {
        println!("  speed       {} samples/s{tokens}", format_count(report.samples_per_s as u64));
    }
    let (median, memory) = (report.step_ms.median, report.peak_bytes.rss);
    // A run that was resumed after its last step makes none.
    if median > 0.0 {
        let whose = if report.workers > 1 { ", per worker" } else { "" };
        let (flops, rate) = (format_count(report.planned.flops), report.planned.flops as f64 / median / 1e6);
        println!("  step time   {median:.2} ms for {flops} FLOP{whose}: {rate:.1} GFLOP/s");
    }
    let [planned, peak] = [report.planned.bytes, memory].map(format_bytes);
    println!("  memory      {peak} at the peak of the whole process, {planned} planned");
    if let Some(one) = most_wrong_memory(&report.compared) {
        let [planned, measured] = [one.planned, one.measured].map(|bytes| format_bytes(bytes as u64));
        println!("  plan        largest error: {}: {planned} planned, {measured} measured", one.part);
    }
    show_data_wait(report);
    if let Some(communication) = &report.communication {
        show_communication(communication);
    }
    println!("  weights     {}", report.weights);
}

/// Steps that wait for their samples, by more than this part of their time, are worth a line; shorter waits than this never.
const DATA_WAIT_SHOWN: f64 = 0.01;
const DATA_WAIT_SHOWN_MS: f64 = 0.1;

fn show_data_wait(report: &Report) {
    let DataWait { median, share, .. } = report.data_wait_ms;
    if share > DATA_WAIT_SHOWN && median > DATA_WAIT_SHOWN_MS {
        println!("  data        {median:.2} ms/step waited for samples, {:.1} % of the time", share * 100.0);
        if let Some(DataStages { read, decode, transform, .. }) = report.data_stages_ms {
            println!(
                "              a sample takes {read:.3} ms to read, {decode:.3} to decode, {transform:.3} to transform"
            );
        }
    }
    if let Some(Skipped { samples, messages }) = &report.skipped {
        let first = messages.first().map_or(String::new(), |message| format!("; {message}"));
        println!("  skipped     {samples} times a sample that could not be read{first}");
    }
    let ranks = report.communication.iter().flat_map(|together| &together.ranks);
    let slowest = ranks.filter(|rank| rank.rank > 0).max_by(|a, b| a.data_wait_ms.total_cmp(&b.data_wait_ms));
    let shown = (DATA_WAIT_SHOWN.max(share) * report.step_ms.median).max(DATA_WAIT_SHOWN_MS);
    if let Some(rank) = slowest.filter(|rank| rank.data_wait_ms > shown) {
        println!("  data        {:.2} ms/step waited for samples by rank {}", rank.data_wait_ms, rank.rank);
    }
}

fn show_communication(communication: &Communication) {
    let Communication { transport, busy_ms, exposed_ms, hidden, slowest_rank, ranks } = communication;
    println!(
        "  together    {} workers over {transport}: {busy_ms:.2} ms/step in collectives, {:.0} % hidden behind compute, {exposed_ms:.2} ms waited",
        ranks.len(),
        hidden * 100.0
    );
    let compute = ranks.get(*slowest_rank).map_or(0.0, |rank| rank.compute_ms);
    let fastest = ranks.iter().map(|rank| rank.compute_ms).fold(f64::MAX, f64::min);
    println!("  slowest     rank {slowest_rank} computes {compute:.2} ms/step, the fastest {fastest:.2}");
}
