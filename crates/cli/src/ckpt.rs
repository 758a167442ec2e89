//! `kolo ckpt`: what a run has kept.

mod transfer;

use kolo_base::ShownPath;
pub use transfer::{candidates, check_config};

use crate::args::Ckpt;
use crate::fail::Failure;
use crate::load::Kinds;
use crate::output::{print_error, println};
use crate::progress::{self, BYTES};
use indicatif::ProgressBar;
use kolo_ckpt::diff::{DiffKind, Difference, TensorDiff, ValueDiff, diff};
use kolo_ckpt::{
    Checkpoint, CkptError, Header, Listed, MANIFEST, RealDisk, Role, SharedDisk, StepName, TensorSource, TensorView,
    checkpoints_of, list, resolve, unfinished,
};
use kolo_train::machine::{format_bytes, format_count};
use std::path::{Path, PathBuf};
use transfer::ImportArgs;

/// Tensors and settings that `diff` lists.
const DIFFERENCES_SHOWN: usize = 20;

pub fn ckpt(kinds: &Kinds, command: &Ckpt) -> Result<(), Failure> {
    let disk = RealDisk::shared();
    match command {
        Ckpt::Ls { run } => ls(&disk, run),
        Ckpt::Show { path } => show(&disk, path),
        Ckpt::Verify { path } => verify(&disk, path),
        Ckpt::Diff { first, second } => compare(&disk, first, second),
        Ckpt::Export { path, out, to, overwrite } => transfer::export(&disk, path, out, (*to, *overwrite)),
        Ckpt::Import { file, out, model, set, overwrite } => {
            transfer::import(kinds, &disk, file, out, &ImportArgs { model, set, overwrite: *overwrite })
        }
    }
}

/// What a path means, with a word on newer checkpoints that are not sound.
fn opened(disk: &SharedDisk, path: &Path) -> Result<TensorSource, Failure> {
    let (source, skipped) = resolve(disk, path)?;
    kolo_ckpt::skipped_notes(&skipped).iter().for_each(|note| print_error(note));
    Ok(source)
}

/// A bar for so many bytes, on a terminal.
fn bar(bytes: u64) -> ProgressBar {
    progress::bar(bytes, BYTES).unwrap_or_else(ProgressBar::hidden)
}

/// Refuses what is not there, or is no directory.
fn check_directory(disk: &SharedDisk, path: &Path, hint: &str) -> Result<(), Failure> {
    match (disk.is_dir(path), path.exists()) {
        (true, _) => Ok(()),
        (false, true) => Err(Failure::usage(format!("{}: not a directory", path.shown()), hint)),
        (false, false) => {
            Err(Failure::usage(format!("{}: there is no such directory", path.shown()), "check the path"))
        }
    }
}

/// The checkpoint that this directory is itself, if its name or a manifest says that it is one.
fn itself(disk: &SharedDisk, path: &Path) -> Option<Listed> {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let name = whole.file_name().and_then(|name| StepName::parse(&name.to_string_lossy()));
    if name.is_none() && !path.join(MANIFEST).exists() {
        return None;
    }
    let checkpoint = Checkpoint::open(disk, path);
    let step = checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.header().step);
    Some(Listed { name: name.unwrap_or(StepName { step, revision: 1 }), path: path.to_path_buf(), checkpoint })
}

fn ls(disk: &SharedDisk, run: &Path) -> Result<(), Failure> {
    check_directory(disk, run, "`kolo ckpt show` describes a safetensors file")?;
    let root = checkpoints_of(disk.as_ref(), run);
    let listed = match itself(disk, run) {
        Some(one) => vec![one],
        None => list(disk, &root)?,
    };
    let begun = unfinished(disk.as_ref(), &root)?;
    if listed.is_empty() && begun.is_empty() {
        let hint = "name a run directory that has checkpoints";
        return Err(Failure::usage(format!("{}: it contains no checkpoint", run.shown()), hint));
    }
    println!("{:<18} {:>9} {:>10} {:>7}  {:<20} weights", "checkpoint", "step", "size", "workers", "written (UTC)");
    for Listed { name, checkpoint, .. } in &listed {
        match checkpoint {
            Ok(checkpoint) => {
                let Header { step, weights, created_s, workers, .. } = checkpoint.header();
                let (size, written) = (format_bytes(checkpoint.bytes()), date(*created_s));
                let name = name.to_string();
                println!("{name:<18} {step:>9} {size:>10} {workers:>7}  {written:<20} {weights}");
            }
            Err(error) => println!("{:<18} damaged: {}", name.to_string(), error.brief()),
        }
    }
    for path in begun {
        println!("{} is incomplete", path.shown());
    }
    Ok(())
}

fn show(disk: &SharedDisk, path: &Path) -> Result<(), Failure> {
    let source = opened(disk, path)?;
    println!("{}", source.path().shown());
    let tensors = source.tensors();
    if let Some(checkpoint) = source.checkpoint() {
        show_header(checkpoint);
    }
    for (role, title) in [
        (Some(Role::Parameter), "parameters"),
        (Some(Role::Statistic), "statistics"),
        (Some(Role::Moment), "optimizer"),
        (None, "tensors"),
    ] {
        let of_role: Vec<&TensorView<'_>> = tensors.iter().filter(|tensor| tensor.role == role).collect();
        if of_role.is_empty() {
            continue;
        }
        let elements = of_role.iter().map(|tensor| tensor.elements() as u64).sum();
        let size = of_role.iter().map(|tensor| tensor.bytes).sum();
        println!("\n{title}: {} tensors, {} elements, {}", of_role.len(), format_count(elements), format_bytes(size));
        of_role.iter().for_each(|tensor| println!("  {:<44} {tensor}", tensor.name));
    }
    if let Some(checkpoint) = source.checkpoint() {
        println!("\nsettings");
        checkpoint.header().settings.iter().for_each(|(key, value)| println!("  {key} = {value}"));
    }
    Ok(())
}

fn show_header(checkpoint: &Checkpoint) {
    let Header { step, weights, created_s, version, workers, .. } = checkpoint.header();
    println!("  step     {step}");
    println!("  weights  {weights}");
    println!("  written  {} UTC by kolo {version}, {}", date(*created_s), counted(*workers, "worker"));
    let files = checkpoint.files();
    println!("  size     {}", size(checkpoint));
    files.iter().for_each(|file| println!("           {:<44} {}", file.name, format_bytes(file.bytes)));
}

/// `29.7 KiB in 1 file`.
fn size(checkpoint: &Checkpoint) -> String {
    format!("{} in {}", format_bytes(checkpoint.bytes()), counted(checkpoint.files().len() as u64, "file"))
}

/// `1 file`, `2 files`.
fn counted(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

fn verify(disk: &SharedDisk, path: &Path) -> Result<(), Failure> {
    check_directory(disk, path, "name a checkpoint or a run directory; other files have no digests to check")?;
    // Those of a run must also have the names that its resuming goes by.
    let listed = match itself(disk, path) {
        Some(one) => vec![one],
        None => list(disk, &checkpoints_of(disk.as_ref(), path))?,
    };
    let all: Vec<(PathBuf, Result<Checkpoint, CkptError>)> =
        listed.into_iter().map(|listed| (listed.path, listed.checkpoint)).collect();
    if all.is_empty() {
        let hint = "name a checkpoint, or a run directory that has checkpoints";
        return Err(Failure::usage(format!("{}: it contains no checkpoint", path.shown()), hint));
    }
    let (count, mut damaged) = (all.len() as u64, 0);
    for (path, checkpoint) in all {
        let checkpoint = match checkpoint {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                println!("{}", error.brief());
                damaged += 1;
                continue;
            }
        };
        let bar = bar(checkpoint.bytes());
        let damages = checkpoint.verify(&|bytes| bar.set_position(bytes));
        bar.finish_and_clear();
        damages.iter().for_each(|damage| println!("{}/{damage}", path.shown()));
        if damages.is_empty() {
            println!("{}: sound, {}", path.shown(), size(&checkpoint));
        }
        damaged += usize::from(!damages.is_empty());
    }
    match damaged {
        0 => Ok(()),
        _ => {
            let message = format!("damaged: {damaged} of {}", counted(count, "checkpoint"));
            Err(Failure::job(message, "restore the files from a copy; `--resume` skips damaged checkpoints"))
        }
    }
}

fn compare(disk: &SharedDisk, first: &Path, second: &Path) -> Result<(), Failure> {
    let (a, b) = (opened(disk, first)?, opened(disk, second)?);
    let bar = bar(a.tensors().iter().map(|tensor| tensor.bytes).sum());
    let difference = diff(&a, &b, &|bytes| bar.set_position(bytes));
    bar.finish_and_clear();
    let Difference { tensors, same, settings } = difference?;
    println!("A {}\nB {}", a.path().shown(), b.path().shown());
    for (key, a, b) in settings.iter().take(DIFFERENCES_SHOWN) {
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "not set".into());
        println!("setting {key}: {} in A, {} in B", text(a), text(b));
    }
    if let Some(more) = settings.len().checked_sub(DIFFERENCES_SHOWN).filter(|more| *more > 0) {
        println!("and {more} more settings");
    }
    tensors.iter().take(DIFFERENCES_SHOWN).for_each(|tensor| println!("{}", words(tensor)));
    if let Some(more) = tensors.len().checked_sub(DIFFERENCES_SHOWN).filter(|more| *more > 0) {
        println!("and {more} more tensors");
    }
    let largest = tensors.iter().filter_map(|tensor| match &tensor.kind {
        DiffKind::Values(values) => Some(values.largest),
        _ => None,
    });
    match tensors.is_empty() {
        true => println!("{same} tensors are the same to the bit"),
        false => {
            let more = |a: f64, b: f64| if b.is_nan() || b > a { b } else { a };
            let largest = largest.reduce(more).map_or(String::new(), |largest| format!("; {}", by_at_most(largest)));
            println!("{} of {} tensors differ{largest}", tensors.len(), tensors.len() + same);
        }
    }
    if tensors.is_empty() { Ok(()) } else { Err(Failure::reported()) }
}

fn by_at_most(largest: f64) -> String {
    match largest.is_nan() {
        true => "some are not a number".into(),
        false => format!("by {largest:e} at most"),
    }
}

fn words(tensor: &TensorDiff) -> String {
    let TensorDiff { name, kind } = tensor;
    match kind {
        DiffKind::OnlyInFirst => format!("`{name}` is only in A"),
        DiffKind::OnlyInSecond => format!("`{name}` is only in B"),
        DiffKind::OtherType { first, second } => format!("`{name}` is {first} in A and {second} in B"),
        DiffKind::Values(ValueDiff { index, values: (a, b), count, elements, largest }) => {
            let by = by_at_most(*largest);
            format!("`{name}` first differs at {index:?}: {a:?} and {b:?}; {count} of {elements} elements differ, {by}")
        }
    }
}

/// `2026-11-16 13:40:12`, of seconds since 1970.
fn date(seconds: u64) -> String {
    let (days, second) = ((seconds / 86_400) as i64, seconds % 86_400);
    // Years that begin in March, in eras of 400: leap days come last.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {:02}:{:02}:{:02}", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn dates_know_leap_years() {
        let dates = [0, 951_782_399, 951_782_400, 4_107_542_399, 1_794_836_412].map(date);
        let wanted = [
            "1970-01-01 00:00:00",
            "2000-02-28 23:59:59",
            "2000-02-29 00:00:00",
            "2100-02-28 23:59:59",
            "2026-11-16 13:40:12",
        ];
        assert_eq!(dates, wanted);
    }
}
