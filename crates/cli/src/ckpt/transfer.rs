//! `kolo ckpt export` and `import`.

use super::opened;
use crate::args::{ExportTarget, JobArgs};
use crate::device::DeviceArg;
use crate::fail::{Failure, write_file};
use crate::load::{self, Kinds};
use crate::out::{self, RunFiles};
use crate::output::println;
use crate::progress::Waiting;
use kolo_base::ShownPath;
use kolo_ckpt::mapping::{ARCHITECTURES, Architecture, OWN, Target};
use kolo_ckpt::transfer::{self, Incoming, Wanted};
use kolo_ckpt::{
    CHECKPOINTS, Disk, Header, Piece, Role, SharedDisk, TensorSource, commit, discard, staging_dir, weights_of,
    write_shard,
};
use kolo_exec::Store;
use kolo_exec::store::{self, Saved};
use kolo_train::Job;
use kolo_train::checkpoint::JOB_FILE;
use kolo_train::machine::format_bytes;
use kolo_train::model_record::model_record;
use kolo_train::step::evaluation_graph;
use serde_json::Value;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

pub fn export(
    disk: &SharedDisk,
    path: &Path,
    out: &Path,
    (to, overwrite): (Option<ExportTarget>, bool),
) -> Result<(), Failure> {
    check_target(out, overwrite)?;
    let source = opened(disk, path)?;
    let architecture = to.map(|to| architecture_of(&source, to)).transpose()?;
    let settings = source.checkpoint().map_or(&[][..], |checkpoint| &checkpoint.header().settings);
    let config = architecture.and_then(|architecture| architecture.config_of(settings));
    let beside = out.with_file_name("config.json");
    let is_there = config.as_ref().map_or(Ok(false), |config| has_config(disk, &beside, config, overwrite))?;
    let waiting = Waiting::new(format!("writing {}", out.display()));
    let written = transfer::export(disk.as_ref(), &source, architecture, out);
    drop(waiting);
    let (tensors, bytes) = written?;
    let names = architecture.map_or("under kolo's names", |architecture| architecture.name);
    println!("{}: {tensors} tensors, {}, {names}", out.shown(), format_bytes(bytes));
    match config {
        Some(_) if is_there => println!("{}: left unchanged", beside.shown()),
        Some(config) => {
            write_file(&beside, format!("{config:#}\n"))?;
            println!("{}: the model's sizes", beside.shown());
        }
        None => {}
    }
    Ok(())
}

/// Refuses a file that is there, unless it may be replaced, and whatever is no file.
fn check_target(out: &Path, overwrite: bool) -> Result<(), Failure> {
    let there = out.metadata().or_else(|_| out.symlink_metadata());
    match there {
        Ok(there) if !there.is_file() => {
            Err(Failure::usage(format!("{} is no regular file", out.shown()), "name a file to write"))
        }
        Ok(_) if !overwrite => {
            let message = format!("{} is there already", out.shown());
            Err(Failure::usage(message, "choose another name, or say --overwrite"))
        }
        _ => Ok(()),
    }
}

/// Whether these sizes stand beside the file already; an error if others do.
fn has_config(disk: &SharedDisk, beside: &Path, config: &Value, overwrite: bool) -> Result<bool, Failure> {
    if !beside.exists() {
        return Ok(false);
    }
    let same = transfer::read_json(disk.as_ref(), beside).is_ok_and(|there| there.as_ref() == Some(config));
    match same || overwrite {
        true => Ok(same),
        false => {
            let message = format!("{} has the sizes of another model", beside.shown());
            Err(Failure::usage(message, "export into another directory, or say --overwrite"))
        }
    }
}

/// The kind of model in a checkpoint, as its settings say.
fn kind_of(settings: &[(String, String)]) -> Option<&str> {
    settings.iter().find(|(key, _)| key == "model.kind").map(|(_, kind)| kind.trim_matches('"'))
}

fn architecture_of(source: &TensorSource, to: ExportTarget) -> Result<&'static Architecture, Failure> {
    let settings = source.checkpoint().map_or(&[][..], |checkpoint| &checkpoint.header().settings);
    let Some(kind) = kind_of(settings) else {
        let message = format!("{}: the kind of model is unknown", source.path().shown());
        return Err(Failure::usage(message, "export a checkpoint, or leave --to out"));
    };
    let target = match to {
        ExportTarget::Hf => Target::Hf,
        ExportTarget::Torch => Target::Torch,
    };
    let of_kind = || ARCHITECTURES.iter().filter(|architecture| architecture.is_of(kind, settings));
    let found = of_kind().find(|architecture| architecture.target == target);
    found.ok_or_else(|| {
        let hint = match of_kind().next() {
            Some(other) => {
                format!("`--to {}` gives {}", if other.target == Target::Hf { "hf" } else { "torch" }, other.name)
            }
            None => "leave --to out: names stay as they are".into(),
        };
        Failure::usage(format!("kolo has no such name mapping for the model `{kind}`"), &hint)
    })
}

/// What an import is told beside its two paths.
#[derive(Clone, Copy, Debug)]
pub struct ImportArgs<'a> {
    /// The job file.
    pub model: &'a Path,
    pub set: &'a [String],
    pub overwrite: bool,
}

/// What weights of these names may be called in files, the likeliest first.
pub fn candidates(settings: &[(String, String)]) -> Vec<&'static Architecture> {
    let kind = kind_of(settings).unwrap_or_default();
    ARCHITECTURES.iter().filter(|architecture| architecture.is_of(kind, settings)).chain([&OWN]).collect()
}

pub fn import(kinds: &Kinds, disk: &SharedDisk, file: &Path, out: &Path, args: &ImportArgs<'_>) -> Result<(), Failure> {
    let file = &weights_of(disk.as_ref(), file);
    let job = read_job(kinds, args.model, args.set)?;
    let root = out.join(CHECKPOINTS);
    // Held to the end.
    let _lock = out::lock(out)?;
    let stale = out::claim(out, args.overwrite, RunFiles::All)?;
    let graph = evaluation_graph(&*job.model, 1)?;
    let mut store = Store::new(&graph, job.seed);
    let entries = store.entries().to_vec();
    let wanted = entries.iter().map(|entry| Wanted { name: entry.tensor.clone(), shape: entry.whole.to_vec() });
    let wanted: Vec<Wanted> = wanted.collect();
    let incoming = Incoming::find(transfer::open_files(disk.as_ref(), file)?, &candidates(&job.settings), &wanted)?;
    incoming.check_tied()?;
    let unchecked = check_config(disk.as_ref(), file, incoming.architecture, &job.settings)?;
    unchecked.iter().for_each(|note| println!("{note}"));
    for entry in &entries {
        if let (Some(values), Some(place)) = (incoming.read(&entry.tensor)?, store.values_mut(&entry.name)) {
            place.copy_from_slice(&values);
        }
    }
    // What is replaced goes when what replaces it is on the disk.
    let staging = staging_dir(out, 0, 0);
    let written = store.save(None);
    let summary = write_shard(disk.as_ref(), &staging, 0, 1, &mut written.iter().map(piece), &|_| ());
    let summary = summary.inspect_err(|_| discard(disk.as_ref(), &staging))?;
    stale.iter().try_for_each(|path| out::remove(path))?;
    let path = commit(disk.as_ref(), &root, &staging, &header_of(&store, &job), &[summary])?;
    write_file(&out.join(JOB_FILE), &job.text)?;
    println!(
        "{}: {} tensors of {}, weights {}",
        path.shown(),
        entries.len(),
        incoming.architecture.name,
        store.digest()
    );
    Ok(())
}

fn read_job(kinds: &Kinds, path: &Path, set: &[String]) -> Result<std::sync::Arc<Job>, Failure> {
    let workers = crate::args::Workers::alone();
    let args =
        JobArgs { job: Some(path.to_path_buf()), set: set.to_vec(), threads: None, device: DeviceArg::cpu(), workers };
    load::job(kinds, &args, 1)
}

/// What the shapes of tensors do not tell, such as the number of heads, stands in a file beside them. Without it, what to tell
/// the user.
pub fn check_config(
    disk: &dyn Disk,
    file: &Path,
    architecture: &Architecture,
    settings: &[(String, String)],
) -> Result<Option<String>, Failure> {
    if architecture.config.is_empty() {
        return Ok(None);
    }
    let beside = file.with_file_name("config.json");
    let Some(config) = transfer::read_json(disk, &beside)? else {
        return Ok(Some(format!("{}: missing, so heads, activation and epsilon are not checked", beside.shown())));
    };
    let wrong = architecture.refuses_config(&config, settings);
    match wrong.is_empty() {
        true => Ok(None),
        false => {
            let hint = "change `[model]` where the sizes differ; kolo cannot represent the model where its kind does";
            Err(Failure::job(format!("{}: {}", beside.shown(), wrong.join("; ")), hint))
        }
    }
}

/// Of a checkpoint as one worker writes it before the first step.
fn header_of(store: &Store, job: &Job) -> Header {
    Header {
        step: 0,
        weights: store.digest(),
        settings: job.settings.clone(),
        model: model_record(job, &job.text),
        created_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs()),
        version: env!("CARGO_PKG_VERSION").into(),
        workers: 1,
        ..Header::default()
    }
}

fn piece(saved: &Saved) -> Piece<'_> {
    let role = match saved.role {
        store::Role::Parameter => Role::Parameter,
        store::Role::Moment => Role::Moment,
        store::Role::Statistic => Role::Statistic,
    };
    let Saved { tensor, whole, dtype, start, bytes, .. } = saved;
    Piece { tensor, whole, dtype: *dtype, role, region: kolo_graph::Region::from(*start), bytes }
}

#[cfg(test)]
mod tests;
