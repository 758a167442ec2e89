//! Going on from a checkpoint, on whatever number of workers.

use super::CheckpointDir;
use crate::error::Error;
use crate::job::Job;
use crate::log::Log;
use crate::report::{EpochRow, number_or_null, numbers_or_null};
use crate::together;
use kolo_base::ShownPath;
use kolo_ckpt::{Checkpoint, Header, RealDisk};
use kolo_comm::Communicator;
use kolo_exec::Store;
use kolo_exec::store::{Entry, Role, Saved};
use kolo_graph::settings::WRITTEN;
use kolo_parallel::strategy::Key;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Where a run stood, beside its tensors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainerRecord {
    /// Steps made.
    pub step: usize,
    /// Samples of the training order that were consumed: the cursor.
    pub samples: u64,
    /// The loss since the last row of the history.
    #[serde(deserialize_with = "number_or_null")]
    pub loss_sum: f64,
    pub loss_count: usize,
    pub mean_loss: Option<f64>,
    /// The best value that an early stop has seen, and evaluations since.
    pub stop_best: Option<f64>,
    pub stop_since: usize,
    /// The best value of `checkpoint.best`, and which metric that is.
    pub best: Option<f64>,
    #[serde(default)]
    pub best_metric: Option<String>,
    #[serde(deserialize_with = "numbers_or_null")]
    pub metrics: BTreeMap<String, f64>,
    /// The step after which these were measured.
    #[serde(default)]
    pub evaluated_after: Option<usize>,
    /// How long the run has taken, over all its processes.
    #[serde(default)]
    pub seconds: f64,
    pub history: Vec<EpochRow>,
    pub log: Log,
    /// The evaluation that follows this step is still to be made.
    pub pending: bool,
}

/// Where the data of a run stand beside its [`TrainerRecord`].
pub(crate) const DATA: &str = "data";

/// Which data a run is trained on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DataRecord {
    /// Samples to train on, and those held out.
    pub samples: usize,
    pub held_out: usize,
    pub fingerprint: String,
}

/// A checkpoint to go on from.
#[derive(Debug)]
pub struct Resumed {
    pub checkpoint: Checkpoint,
    pub record: TrainerRecord,
    /// What a user should know: damaged checkpoints that were passed over, keys that differ.
    pub notes: Vec<String>,
}

/// Keys that may differ from those a run was saved with: they change how it runs, never what it learns.
const FREE: [&str; 14] = [
    "job.name",
    "data.cache",
    "data.cache_dir",
    "data.cache_max",
    "data.decoded_max",
    "data.unpacked_max",
    "memory.",
    "checkpoint.",
    "data.prefetch",
    "data.threads",
    "data.index_dir",
    "train.log_every",
    "train.eval_every",
    "train.grad_norm",
];
/// Paths, which may differ where the checkpoint knows its data themselves.
const PATHS: [&str; 3] = ["data.source", "data.validation", "data.test"];
/// Keys that older checkpoints do not have, with what those runs did. `base_batch` matters where rates are scaled only, and
/// `outputs` is what the data say.
const ADDED: [(&str, &str); 9] = [
    ("train.lr_scaling", "\"none\""),
    ("train.base_batch", ""),
    ("data.stream", "false"),
    ("data.labels", "\"\""),
    ("data.ignore", "-1"),
    ("data.split", "\"auto\""),
    ("data.group", "\"\""),
    ("model.outputs", ""),
    ("model.norm_eps", "1e-5"),
];
/// Keys of the length of a run, which may grow.
const LENGTH: [&str; 2] = ["train.steps", "train.epochs"];

/// The newest valid checkpoint of a run, if it has any. All ranks call it together and get the one that the first rank found.
pub fn newest(job: &Job, dir: &CheckpointDir, world: Option<&Communicator>) -> Result<Option<Resumed>, Error> {
    let disk = RealDisk::shared();
    let first = world.is_none_or(|world| world.rank() == 0);
    let found = match first {
        true => find(&dir.root).map_err(|error| error.to_string()),
        false => Ok((None, Vec::new(), 0)),
    };
    let text = serde_json::to_vec(&found).map_err(|error| Error::bug(&error))?;
    let all = together::gather_bytes(world, &text)?;
    let found: Result<(Option<String>, Vec<String>, usize), String> =
        serde_json::from_slice(&all[0]).map_err(|error| Error::bug(&error))?;
    let (path, mut notes, skipped) = found.map_err(|message| Error::checkpoint(&message))?;
    let Some(path) = path else {
        return match skipped {
            0 => Ok(None),
            count => Err(none_is_sound(&dir.root, count, &notes[0])),
        };
    };
    let checkpoint =
        Checkpoint::open(&disk, Path::new(&path)).map_err(|error| Error::checkpoint(&error.to_string()))?;
    let record: TrainerRecord = serde_json::from_value(checkpoint.header().trainer.clone())
        .map_err(|error| Error::checkpoint(&format!("{path}: it has no training state to resume from: {error}\n  hint: start from its weights instead, with `[model] from = \"{path}\"`")))?;
    notes.extend(compare(job, checkpoint.header(), &path)?);
    Ok(Some(Resumed { checkpoint, record, notes }))
}

/// The newest sound checkpoint, notes on those that were passed over, and their number.
fn find(root: &Path) -> Result<(Option<String>, Vec<String>, usize), kolo_ckpt::CkptError> {
    if !root.exists() {
        return Ok((None, Vec::new(), 0));
    }
    let newest = kolo_ckpt::newest_valid(&RealDisk::shared(), root)?;
    let path = newest.checkpoint.map(|checkpoint| checkpoint.dir().to_string_lossy().into_owned());
    Ok((path, kolo_ckpt::skipped_notes(&newest.skipped), newest.skipped.len()))
}

/// There are checkpoints, but the run cannot go on from any: it must not begin anew beside them.
fn none_is_sound(root: &Path, count: usize, newest: &str) -> Error {
    let newest = newest.trim_start_matches("note: skipped ");
    let what = if count == 1 { "the only checkpoint".into() } else { format!("none of the {count} checkpoints") };
    Error::Checkpoint {
        message: format!("{}: {what} {} be read; {newest}", root.shown(), if count == 1 { "cannot" } else { "can" }),
        hint: "`kolo ckpt verify` lists what is damaged; restore them from a copy, or start again with --overwrite or \
               another --out directory"
            .into(),
    }
}

/// Whether this job has the data that it was saved with; a note if nobody knows.
fn compare_data(job: &Job, saved: Option<&DataRecord>, path: &str) -> Result<Option<String>, Error> {
    let (Some(then), Some(now)) = (saved, job.data_record()) else {
        return Ok(Some(format!("note: {path} does not say which data it was trained on: they must be the same")));
    };
    if *then == now {
        return Ok(None);
    }
    let count =
        |record: &DataRecord| format!("{} samples to train on and {} held out", record.samples, record.held_out);
    let what = match (count(then), count(&now)) {
        (then, now) if then != now => format!("{then} then, {now} now"),
        (same, _) => format!("{same} as before, with other contents or other file names"),
    };
    Err(Error::Checkpoint {
        message: format!("the data are not those that {path} was trained on: {what}"),
        hint: format!("restore them to resume, or start a new run from the weights with `[model] from = \"{path}\"`"),
    })
}

/// The key of `[parallel]` that a setting belongs to, as its strategy declares it.
fn parallel_key<'j>(job: &'j Job, setting: &str) -> Option<&'j Key> {
    let name = setting.strip_prefix("parallel.")?.split('.').next()?;
    job.strategies.iter().flat_map(|kind| kind.keys).find(|key| key.name == name)
}

/// Whether a key may differ, whatever it says.
fn is_free(job: &Job, key: &str, knows_data: bool) -> bool {
    if key.starts_with("parallel.") {
        // A job that does not promise its bits may be split in any way.
        return !job.reproducible || parallel_key(job, key).is_none_or(|key| !key.of_job);
    }
    FREE.iter().any(|free| key == *free || (free.ends_with('.') && key.starts_with(free)))
        || (knows_data && PATHS.contains(&key))
}

/// The key that a setting is of: that one was written, rather than left to its default, is a setting, too.
fn key_of(setting: &str) -> &str {
    setting.strip_suffix(WRITTEN).unwrap_or(setting)
}

fn hint(path: &str) -> String {
    format!("change it back to resume, or start a new run from the weights with `[model] from = \"{path}\"`")
}

/// Whether this job is the one that was saved, but for keys that may differ.
fn compare(job: &Job, header: &Header, path: &str) -> Result<Vec<String>, Error> {
    let data = header.trainer.get(DATA).and_then(|data| serde_json::from_value::<DataRecord>(data.clone()).ok());
    let now: BTreeMap<&str, &str> = job.settings.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let then: BTreeMap<&str, &str> =
        header.settings.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let free = |setting: &str| is_free(job, key_of(setting), data.is_some());
    let differ = then.iter().filter(|(key, value)| now.get(*key) != Some(*value));
    let as_before = |key: &str, value: &str| {
        ADDED.iter().any(|(added, usual)| *added == key && (*usual == value || usual.is_empty()))
            || parallel_key(job, key).is_some_and(|key| key.default_text() == value)
            // A key that was not known then was not written.
            || (key_of(key) != key && value == "false")
    };
    let new = now.iter().filter(|(key, value)| !then.contains_key(*key) && !as_before(key, value));
    let new = new.map(|(key, _)| (key, &"left out"));
    let mut notes = Vec::new();
    for (key, value) in differ.chain(new).filter(|(key, _)| !free(key)) {
        let here = now.get(key).unwrap_or(&"left out");
        if LENGTH.contains(&key_of(key)) {
            if key_of(key) == *key {
                let written = format!("{key}{WRITTEN}");
                let or_unset = |all: &BTreeMap<&str, &str>, value: &str| match all.get(written.as_str()) {
                    Some(&"false") => "not set".to_string(),
                    _ => value.to_string(),
                };
                let (value, here) = (or_unset(&then, value), or_unset(&now, here));
                notes.push(format!("note: `{key}` was {value} when {path} was saved and is {here} now"));
            }
            continue;
        }
        if key_of(key) != *key {
            return Err(Error::Checkpoint {
                message: match *value {
                    "true" => format!("{path} was saved with a `{}`, but this job has none", key_of(key)),
                    _ => format!("{path} was saved without a `{}`, but this job has one", key_of(key)),
                },
                hint: hint(path),
            });
        }
        let then = if then.contains_key(key) { format!("with `{key}` = {value}") } else { format!("without `{key}`") };
        return Err(Error::Checkpoint {
            message: format!("{path} was saved {then}, but this job has {here}"),
            hint: hint(path),
        });
    }
    notes.extend(compare_data(job, data.as_ref(), path)?);
    Ok(notes)
}

impl Resumed {
    /// Fills every entry of a store, however its tensors are cut.
    pub fn fill(&self, store: &mut Store) -> Result<(), Error> {
        store.fill(|entry, out| read(&self.checkpoint, entry, out))
    }

    /// All tensors, for whoever keeps them elsewhere.
    pub fn all(&self) -> Result<Vec<Saved>, Error> {
        let mut saved = Vec::new();
        for tensor in self.checkpoint.tensors() {
            let bytes = self.checkpoint.read_all(tensor).map_err(|error| Error::checkpoint(&error.to_string()))?;
            saved.push(Saved {
                tensor: tensor.name.clone(),
                whole: tensor.whole.clone().into(),
                dtype: tensor.dtype,
                role: match tensor.role {
                    kolo_ckpt::Role::Parameter => Role::Parameter,
                    kolo_ckpt::Role::Moment => Role::Moment,
                    kolo_ckpt::Role::Statistic => Role::Statistic,
                },
                start: 0,
                bytes,
            });
        }
        Ok(saved)
    }
}

fn read(checkpoint: &Checkpoint, entry: &Entry, out: &mut [u8]) -> Result<(), Error> {
    let failed = |message: String| Error::checkpoint(&message);
    let Some(tensor) = checkpoint.tensor(&entry.tensor) else {
        let path = checkpoint.dir().shown();
        return Err(failed(format!(
            "{path} has no tensor `{}`\n  hint: resume with the job that saved it: same model, same optimizer",
            entry.tensor
        )));
    };
    if tensor.whole[..] != entry.whole[..] || tensor.dtype != entry.ty.dtype {
        let path = checkpoint.dir().shown();
        return Err(failed(format!(
            "{path} has `{}` as {} of shape {:?}, but the job has {} of shape {:?}\n  \
             hint: resume with the job that saved it: same model, same optimizer",
            entry.tensor,
            tensor.dtype.name(),
            tensor.whole,
            entry.ty.dtype.name(),
            &entry.whole[..]
        )));
    }
    let size = entry.ty.dtype.bytes();
    for (local, start, len) in entry.region.runs(0..entry.ty.elements()) {
        let out = &mut out[local * size..(local + len) * size];
        checkpoint.read(&entry.tensor, start..start + len, out).map_err(|error| failed(error.to_string()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An evaluation may overflow in a run that goes on, and JSON has no number for that.
    #[test]
    fn a_record_with_numbers_that_json_lacks_is_read() {
        let row =
            EpochRow { epoch: 1, step: 9, seconds: 0.5, loss: 0.25, metrics: [("mse".into(), f64::INFINITY)].into() };
        let metrics = [("perplexity".into(), f64::INFINITY), ("loss".into(), 0.1 + 0.2)].into();
        let record =
            TrainerRecord { metrics, history: vec![row], stop_best: Some(f64::NAN), ..TrainerRecord::default() };
        let text = serde_json::to_string(&record).unwrap();
        let read: TrainerRecord = serde_json::from_str(&text).unwrap();
        assert!(read.metrics["perplexity"].is_nan() && read.history[0].metrics["mse"].is_nan());
        assert_eq!((read.metrics["loss"], read.stop_best), (0.1 + 0.2, None));
    }
}
