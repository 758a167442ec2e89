//! `kolo train --auto`: the layout that the search finds for this machine, among those that give the job's own bits.

use crate::args::Train;
use crate::described;
use crate::fail::Failure;
use crate::load::{self, Kinds};
use crate::output::println;
use crate::plan;
use crate::progress::Waiting;
use crate::simulate::duration;
use kolo_plan::search::{Candidate, Limits, Ranked, search};
use kolo_train::layout_models::JobModels;
use kolo_train::trial_run::TrialSetup;
use kolo_train::{Job, job_file};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;

/// Keys that are part of what a job computes: they stay as the job has them.
const PART_OF_THE_JOB: [&str; 5] =
    ["data.grains=", "parallel.slices=", "parallel.tensor_slices=", "parallel.sequence=", "parallel.context="];

/// Starts the same command again with the best layout in place of `--auto`. Returns only if that failed.
pub fn train(kinds: &Kinds, args: &Train) -> Result<(), Failure> {
    if args.job.workers.hosts.is_some() || args.asynchronous || args.elastic {
        let hint = "leave it out; `kolo plan --search --cluster FILE --write` finds a layout for other machines";
        return Err(Failure::usage("--auto is for workers of this machine", hint));
    }
    let job = kinds.read(&load::settings(&args.job)?)?;
    let given = args.job.workers.given.iter().any(|flag| flag == "count");
    let waiting = (!args.quiet).then(|| Waiting::new("searching for the fastest layout"));
    let mut found = choose(&job, args, given)?;
    // Rates say which layouts are worth trying; how fast they are, a trial says.
    let cores = load::threads(&args.job)?;
    for one in &mut found {
        one.tried = tried(kinds, args, one, cores).ok().flatten();
    }
    drop(waiting);
    found.sort_by(|one, other| one.order().total_cmp(&other.order()));
    if !args.quiet {
        say(&found);
    }
    let Some(Choice { workers, ranked: best, .. }) = found.into_iter().next() else { return Err(nothing_fits()) };
    let program = std::env::current_exe()
        .map_err(|error| Failure::job(format!("cannot find this program: {error}"), "start it by its full path"))?;
    let mut words: Vec<OsString> = std::env::args_os().skip(1).filter(|word| word != "--auto").collect();
    let mut added: Vec<OsString> = Vec::new();
    for assignment in own_assignments(&best.candidate) {
        added.extend(["--set".into(), assignment.into()]);
    }
    if !given {
        added.extend(["-n".into(), workers.to_string().into()]);
    }
    // Right after the command's name, so that what the user set counts.
    words.splice(1..1, added);
    let error = std::process::Command::new(program).args(words).exec();
    Err(Failure::job(
        format!("cannot start again: {error}"),
        "run `kolo plan JOB.toml --search --write` and train without --auto",
    ))
}

/// Layouts that are tried.
const TRIED_MAX: usize = 3;

/// A layout on so many workers.
struct Choice {
    workers: usize,
    ranked: Ranked,
    /// Seconds of a step, as a trial run of it says; `None` if it could not be tried.
    tried: Option<f64>,
}

impl Choice {
    /// What was tried goes by its time; what was not comes behind.
    fn order(&self) -> f64 {
        self.tried.unwrap_or(f64::MAX)
    }

    fn seconds(&self) -> String {
        match self.tried {
            Some(seconds) => format!("{} per step by a trial run", duration(seconds)),
            None => format!("{} per step by rates alone, which know no caches", duration(self.ranked.seconds)),
        }
    }
}

/// Tells of the layout that is taken, and of the one behind it.
fn say(found: &[Choice]) {
    let on = |one: &Choice| {
        let workers = format!("{} worker{}", one.workers, if one.workers == 1 { "" } else { "s" });
        format!("{} on {workers}, {}", one.ranked.candidate, one.seconds())
    };
    for (what, one) in ["layout", "runner-up"].into_iter().zip(found) {
        println!("{what}: {}", on(one));
    }
}

/// Seconds of a step of the job in this layout, as a trial run says.
fn tried(kinds: &Kinds, args: &Train, one: &Choice, cores: usize) -> Result<Option<f64>, Failure> {
    let mut root = load::settings(&args.job)?;
    for assignment in own_assignments(&one.ranked.candidate) {
        job_file::override_with(&mut root, &assignment)?;
    }
    let mut job = kinds.read(&root)?;
    job.run_on(args.job.device.executor()?)?;
    job.fit_to(one.workers)?;
    let setup = TrialSetup { workers: one.workers, per_host: one.workers, threads: (cores / one.workers).max(1) };
    Ok(plan::try_out(&job, setup)?.map(|tried| tried.step_seconds()))
}

/// What a layout sets, but for what is part of the job.
fn own_assignments(candidate: &Candidate) -> impl Iterator<Item = String> {
    let is_own = |one: &String| !PART_OF_THE_JOB.iter().any(|key| one.starts_with(key));
    candidate.assignments().into_iter().filter(is_own)
}

fn nothing_fits() -> Failure {
    let message = "no layout of these workers fits into this machine and keeps the job's results bit-identical";
    Failure::usage(message, "run `kolo plan --search` to see why, or train without --auto")
}

/// The fastest layouts by rates, on as many workers as were asked for, or on any number that the cores allow.
fn choose(job: &Job, args: &Train, given: bool) -> Result<Vec<Choice>, Failure> {
    let cores = load::threads(&args.job)?;
    let counts: Vec<usize> = match given {
        true => vec![args.job.workers.count],
        false => (0..usize::BITS).map(|power| 1usize << power).take_while(|count| *count <= cores).collect(),
    };
    let limits = Limits { steps: 1.0, memory: job.memory.limit_bytes.map(|limit| limit as f64), ..Limits::default() };
    let mut all: Vec<Choice> = Vec::new();
    for workers in counts {
        let cluster = described::this_machine(workers, (cores / workers.max(1)).max(1))?;
        let models = JobModels::new(job, &cluster)?;
        let Ok(own) = models.own(workers) else { continue };
        // What the job computes in slices, every layout of it does.
        let sliced = models.space(workers).candidates().into_iter().map(|one| Candidate { slices: own.slices, ..one });
        let candidates: Vec<Candidate> =
            sliced.filter(|one| one.grains() == job.grains && one.has_bits_of(&own)).collect();
        let found = search(&candidates, &models, &cluster, &limits).ranked.into_iter().take(TRIED_MAX);
        all.extend(found.map(|ranked| Choice { workers, ranked, tried: None }));
    }
    all.sort_by(|one, other| one.ranked.seconds.total_cmp(&other.ranked.seconds));
    // Of every number of workers one is tried, and of the others the fastest.
    let mut seen = Vec::new();
    let (firsts, others): (Vec<Choice>, Vec<Choice>) = all.into_iter().partition(|one| {
        let is_first = !seen.contains(&one.workers);
        seen.push(one.workers);
        is_first
    });
    let found: Vec<Choice> = firsts.into_iter().chain(others).take(TRIED_MAX).collect();
    if found.is_empty() { Err(nothing_fits()) } else { Ok(found) }
}
