//! `kolo train --auto`: the layout that the search finds for this machine, among those that give the job's own bits.

use crate::args::Train;
use crate::described;
use crate::fail::Failure;
use crate::load::{self, Kinds};
use crate::output::println;
use crate::progress::Waiting;
use crate::simulate::duration;
use kolo_plan::search::{Candidate, Limits, Ranked, search};
use kolo_train::Job;
use kolo_train::layout_models::JobModels;
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
    let chosen = choose(&job, args, given);
    drop(waiting);
    let (workers, best) = chosen?;
    if !args.quiet {
        println!("layout: {} on {workers} workers, {} per step by the model", best.candidate, duration(best.seconds));
    }
    let program = std::env::current_exe()
        .map_err(|error| Failure::job(format!("cannot find this program: {error}"), "start it by its full path"))?;
    let mut words: Vec<OsString> = std::env::args_os().skip(1).filter(|word| word != "--auto").collect();
    let mut added: Vec<OsString> = Vec::new();
    for assignment in best.candidate.assignments() {
        if !PART_OF_THE_JOB.iter().any(|key| assignment.starts_with(key)) {
            added.extend(["--set".into(), assignment.into()]);
        }
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

/// The best layout on as many workers as were asked for, or on any number that the cores allow.
fn choose(job: &Job, args: &Train, given: bool) -> Result<(usize, Ranked), Failure> {
    let cores = load::threads(&args.job)?;
    let counts: Vec<usize> = match given {
        true => vec![args.job.workers.count],
        false => (0..usize::BITS).map(|power| 1usize << power).take_while(|count| *count <= cores).collect(),
    };
    let limits = Limits { steps: 1.0, memory: job.memory.limit_bytes.map(|limit| limit as f64), ..Limits::default() };
    let mut best: Option<(usize, Ranked)> = None;
    for workers in counts {
        let cluster = described::this_machine(workers, (cores / workers.max(1)).max(1))?;
        let models = JobModels::new(job, &cluster)?;
        let Ok(own) = models.own(workers) else { continue };
        // What the job computes in slices, every layout of it does.
        let sliced = models.space(workers).candidates().into_iter().map(|one| Candidate { slices: own.slices, ..one });
        let candidates: Vec<Candidate> = sliced.filter(|one| keeps_bits(job, &own, one)).collect();
        let found = search(&candidates, &models, &cluster, &limits);
        let found = found.ranked.into_iter().next();
        let is_faster = |one: &Ranked| best.as_ref().is_none_or(|(_, best)| one.seconds < best.seconds);
        if let Some(one) = found.filter(is_faster) {
            best = Some((workers, one));
        }
    }
    best.ok_or_else(|| {
        let hint = "run `kolo plan --search` to see why, or train without --auto";
        Failure::usage(
            "no layout of these workers fits into this machine and keeps the job's results bit-identical",
            hint,
        )
    })
}

/// Whether a layout gives the same weights, to the bit: the grains, and the slices of sums, are those of the job.
fn keeps_bits(job: &Job, own: &Candidate, other: &Candidate) -> bool {
    let [slices, _] = own.slices;
    other.grains() == job.grains
        && slices.is_multiple_of(other.tensor)
        && (other.sequence, other.tokens) == (own.sequence, own.tokens)
}
