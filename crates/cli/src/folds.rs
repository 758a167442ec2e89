//! `kolo train --folds K`: cross-validation. Every fold is a run of its own, by the same command with `data.folds` and `data.fold`,
//! in a directory of its own under the run's: fold by fold, so that each has all cores.

use crate::args::Train;
use crate::fail::{Failure, check_writable, write_file};
use crate::load::{self, Kinds};
use crate::out::{self, RunFiles};
use crate::output::println;
use crate::resume;
use crate::train;
use kolo_cluster::RankInfo;
use kolo_train::folds::{FoldReport, FoldRow};
use kolo_train::interrupt::{EXIT_SIGNALLED, Interrupt, RunPhase};
use kolo_train::record::OutDir;
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

/// What all folds say together, in the run's directory.
const REPORT: &str = "folds.json";
/// Between two looks at a fold that runs.
const PAUSE: Duration = Duration::from_millis(20);

pub fn train(kinds: &Kinds, args: &Train, folds: usize, rank_info: Option<&RankInfo>) -> Result<(), Failure> {
    let job = check(kinds, args, folds, rank_info)?;
    args.report.as_deref().map_or(Ok(()), check_writable)?;
    let out = directory(args, &job, folds)?;
    let lock = out.as_ref().map(|out| out::lock(&out.path)).transpose()?;
    let outcome = train_all(args, &job, folds, out.as_ref().map(|out| &*out.path));
    drop(lock);
    if outcome.is_err() {
        out::remove_if_empty(out.as_ref());
    }
    outcome
}

fn train_all(args: &Train, job: &str, folds: usize, out: Option<&Path>) -> Result<(), Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::job(format!("cannot find this program: {error}"), "start it by its full path"))?;
    let temporary = tempfile::tempdir()
        .map_err(|error| Failure::job(format!("a directory for reports: {error}"), "free some space there"))?;
    let interrupt = train::listen(false, false)?;
    interrupt.enter(RunPhase::Training);
    let mut rows = Vec::new();
    for fold in 0..folds {
        if !args.quiet {
            println!("fold {fold} of {folds}");
        }
        let report = temporary.path().join(format!("{fold}.json"));
        let mut command = Command::new(&program);
        command.args(words(std::env::args_os().skip(1), (folds, fold), out, &report));
        let failed = |error: io::Error| Failure::job(format!("cannot start fold {fold}: {error}"), "check its limits");
        let status = wait(&mut command.spawn().map_err(failed)?, &interrupt).map_err(failed)?;
        let signal = ended_by(status).or_else(|| interrupt.requested().then(|| interrupt.signal()));
        if let Some(signal) = signal {
            if let Some(out) = out.filter(|_| !args.quiet) {
                println!("all folds go on with: {}", resume::command(std::env::args_os(), args, out));
            }
            return Err(Failure::interrupted(signal));
        }
        if !status.success() {
            let code = status.code().unwrap_or(1);
            return Err(Failure::ended(format!("fold {fold} of {folds} failed"), code, None));
        }
        rows.push(FoldRow::of(fold, &read(&report)?));
    }
    conclude(args, &FoldReport::new(job, rows), out)
}

/// The job's name, if the command makes sense.
fn check(kinds: &Kinds, args: &Train, folds: usize, rank_info: Option<&RankInfo>) -> Result<String, Failure> {
    if let Some(rank_info) = rank_info {
        let message = format!("--folds: {} started the workers", rank_info.launcher.name());
        let hint = "start kolo without it, with -n or --hosts; or train each fold by `data.folds` and `data.fold`";
        return Err(Failure::usage(message, hint));
    }
    if args.trace.is_some() {
        let hint = "trace one of them: leave --folds out, and set `data.folds` and `data.fold`";
        return Err(Failure::usage("--trace is for one run, and every fold is one", hint));
    }
    let data = load::settings(&args.job)?.table("data")?;
    if data.peek("fold").is_some() {
        let hint = "leave `data.fold` out, or --folds";
        return Err(data.wrong("fold", "names one fold, but --folds trains all of them", hint).into());
    }
    let given = kolo_graph::settings::Setting::Int(folds as i64);
    if data.peek("folds").is_some_and(|written| *written != given) {
        return Err(data.wrong("folds", format!("is not the {folds} of --folds"), "leave one of the two out").into());
    }
    let mut root = load::settings(&args.job)?;
    for assignment in assignments(folds, 0) {
        kolo_train::job_file::override_with(&mut root, &assignment)?;
    }
    let job = kinds.read(&root)?;
    match job.split.held_out_len() {
        0 => Err(Failure::usage("--folds: the data hold out no samples of their own", "leave --folds out")),
        _ => Ok(job.name),
    }
}

/// What makes a run that of one fold.
fn assignments(folds: usize, fold: usize) -> [String; 2] {
    [format!("data.folds={folds}"), format!("data.fold={fold}")]
}

fn fold_directory(out: &Path, fold: usize) -> PathBuf {
    out.join(format!("fold-{fold}"))
}

/// The directory of all folds, if there is to be one.
fn directory(args: &Train, job: &str, folds: usize) -> Result<Option<OutDir>, Failure> {
    let last = || out::last_with(job, |path| fold_directory(path, 0).is_dir());
    let out = match &args.out {
        _ if args.no_out => None,
        Some(path) => Some(OutDir::new(path.clone(), true)),
        None => args.resume.then(last).flatten().or_else(|| out::fresh(job, args.quiet)),
    };
    let Some(OutDir { path, .. }) = &out else { return Ok(None) };
    out::claim(path, false, RunFiles::All)?;
    if fold_directory(path, folds).exists() {
        let message = format!("{} contains more folds than {folds}, of another run", path.display());
        return Err(Failure::usage(message, "name another directory"));
    }
    Ok(out)
}

/// This command for one fold: with that fold's settings, directory and report.
fn words(
    given: impl Iterator<Item = OsString>,
    (folds, fold): (usize, usize),
    out: Option<&Path>,
    report: &Path,
) -> Vec<OsString> {
    let mut kept: Vec<OsString> = Vec::new();
    let mut given = given.peekable();
    while let Some(word) = given.next() {
        let text = word.to_string_lossy();
        if text == "--" {
            // Behind it all words are files.
            kept.push(word);
            kept.extend(given);
            break;
        }
        match ["--folds", "--out", "--report"].into_iter().find(|flag| text.starts_with(flag)) {
            Some(flag) if text == flag => drop(given.next()),
            Some(flag) if text[flag.len()..].starts_with('=') => {}
            _ => kept.push(word),
        }
    }
    let mut added: Vec<OsString> = vec!["--report".into(), report.into()];
    added.extend(assignments(folds, fold).into_iter().flat_map(|assignment| ["--set".into(), assignment.into()]));
    if let Some(out) = out {
        added.extend(["--out".into(), fold_directory(out, fold).into()]);
    }
    // Right after the command's name: behind a `--` they would be files.
    kept.splice(1..1, added);
    kept
}

/// Waits for a fold's end, and passes a signal on that it has not heard itself.
fn wait(child: &mut Child, interrupt: &Interrupt) -> io::Result<ExitStatus> {
    let mut is_told = false;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if interrupt.requested() && !is_told {
            is_told = true;
            // Ctrl-C goes to all processes of the terminal, and twice means at once.
            if !(interrupt.signal() == libc::SIGINT && io::stdin().is_terminal()) {
                // SAFETY: a process that this one started and has not waited for.
                unsafe { libc::kill(child.id() as i32, interrupt.signal()) };
            }
        }
        std::thread::sleep(PAUSE);
    }
}

/// The signal that ended a fold, whether it did so in order or not.
fn ended_by(status: ExitStatus) -> Option<i32> {
    let asked = [libc::SIGHUP, libc::SIGINT, libc::SIGTERM];
    let by_code = status.code().map(|code| code - EXIT_SIGNALLED);
    status.signal().or(by_code.filter(|signal| asked.contains(signal)))
}

fn read(path: &Path) -> Result<serde_json::Value, Failure> {
    let text = std::fs::read(path).map_err(|error| error.to_string());
    let value = text.and_then(|text| serde_json::from_slice(&text).map_err(|error| error.to_string()));
    value.map_err(|error| Failure::job(format!("the report of a fold: {error}"), "free some space in TMPDIR"))
}

fn conclude(args: &Train, report: &FoldReport, out: Option<&Path>) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(report)
        .map_err(|error| Failure::job(format!("the report: {error}"), "this is a bug; please report it"))?;
    let paths = out.map(|out| out.join(REPORT)).into_iter().chain(args.report.clone());
    paths.into_iter().try_for_each(|path| write_file(&path, format!("{text}\n")))?;
    if !args.quiet {
        println!("{} folds: mean ± standard deviation, then each fold", report.folds.len());
        report.lines().iter().for_each(|line| println!("{line}"));
        if let Some(out) = out {
            println!("  files       {}", out.display());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fold_is_the_same_command_with_settings_of_its_own() {
        let given = "train job.toml --folds 5 --out=x --report r.json --outer -n 2 --set a.b=1 -- --folds";
        let given = given.split(' ').map(OsString::from);
        let made = words(given, (5, 3), Some(Path::new("runs/a")), Path::new("t/3.json"));
        let made: Vec<String> = made.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        assert_eq!(
            made.join(" "),
            "train --report t/3.json --set data.folds=5 --set data.fold=3 --out runs/a/fold-3 job.toml --outer -n 2 \
             --set a.b=1 -- --folds"
        );
    }

    #[test]
    fn a_signal_is_known_however_it_ended_a_fold() {
        let status = ExitStatus::from_raw;
        assert_eq!(
            [0, 130 << 8, 143 << 8, 1 << 8, 9].map(|raw| ended_by(status(raw))),
            [None, Some(libc::SIGINT), Some(libc::SIGTERM), None, Some(libc::SIGKILL)]
        );
    }
}
