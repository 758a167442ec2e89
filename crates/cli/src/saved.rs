//! What was trained: a run, a checkpoint or a file of weights, with the job that it came from.

use crate::fail::Failure;
use crate::load::{self, Kinds};
use crate::output::print_error;
use clap::Args;
use kolo_ckpt::{RealDisk, TensorSource};
use kolo_data::tokenizer::UsedTokenizer;
use kolo_data::{Field, Source};
use kolo_exec::Store;
use kolo_exec::store::Entry;
use kolo_graph::settings::Settings;
use kolo_train::{Job, job_file};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Which trained model, and how to run it.
#[derive(Debug, Args)]
pub struct SavedArgs {
    /// A run (runs/a), one of its checkpoints, or a safetensors file with --job
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// The job file that the weights belong to, instead of the one that was saved with them
    #[arg(long, value_name = "JOB.toml")]
    pub job: Option<PathBuf>,
    /// Override a key of the job file, such as --set data.threads=4
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Threads; all cores by default
    #[arg(long)]
    pub threads: Option<usize>,
}

impl SavedArgs {
    pub fn threads(&self) -> Result<usize, Failure> {
        load::threads_of(self.threads)
    }
}

/// Weights and their job.
#[derive(Debug)]
pub struct Trained {
    pub source: TensorSource,
    /// The job file, with the overrides.
    pub root: Settings,
    /// Every key with the value that counted in training; empty if no run says so.
    settings: Vec<(String, String)>,
}

/// Keys of `[model]` that say what training starts from.
const OF_TRAINING: [&str; 3] = ["from", "freeze", "fresh"];

impl Trained {
    pub fn open(args: &SavedArgs) -> Result<Self, Failure> {
        let (source, skipped) = kolo_ckpt::resolve(&RealDisk::shared(), &args.run)?;
        for (path, why) in skipped {
            print_error(&format!("note: skipped {}: {why}", path.display()));
        }
        let header = source.checkpoint().map(kolo_ckpt::Checkpoint::header);
        let saved = header.and_then(|header| header.model.get("job")?.as_str());
        let mut root = match (&args.job, saved) {
            (Some(path), _) => job_file::read(path)?,
            (None, Some(text)) if !text.is_empty() => job_file::parse(text, &place(source.path()))?,
            (None, _) => {
                let message = format!("{} does not record which job its weights belong to", args.run.display());
                return Err(Failure::usage(message, "name the job file with --job"));
            }
        };
        for assignment in &args.set {
            job_file::override_with(&mut root, assignment)?;
        }
        let settings = header.map_or_else(Vec::new, |header| header.settings.clone());
        Ok(Self { source, root, settings })
    }

    /// A key of the job, with the value that counted in training; as text without quotes.
    pub fn setting(&self, key: &str) -> Option<String> {
        let value = self.settings.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str());
        value.map(|value| value.trim_matches('"').to_string())
    }

    /// Sets a key of the job to a text.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), Failure> {
        Ok(job_file::override_with(&mut self.root, &format!("{key}={value:?}"))?)
    }

    /// The whole job, with its data.
    pub fn job(&self, kinds: &Kinds) -> Result<Job, Failure> {
        kinds.read(&self.root)
    }

    /// How training saw its files, if it had any.
    fn preprocessing(&self) -> Option<&str> {
        let header = self.source.checkpoint().map(kolo_ckpt::Checkpoint::header);
        header.and_then(|header| header.model.get("preprocessing")?.as_str())
    }

    /// Which tokenizer made the tokens of the training, if the run says so.
    pub fn tokenizer(&self) -> Option<UsedTokenizer> {
        kolo_data::tokenizer_used(self.preprocessing()?)
    }

    /// New files, seen as training saw its own. The data of the training need not be there. If it had no files, these must
    /// hold what the model takes.
    pub fn inputs(&self, path: &str, wanted: &[Field]) -> Result<Box<dyn Source>, Failure> {
        let Some(preprocessing) = self.preprocessing() else {
            let [field] = wanted else {
                let message = "the run was not trained on files, and its model takes several inputs";
                return Err(Failure::usage(message, "leave the files out to predict its held-out samples"));
            };
            return Ok(Box::new(kolo_data::open_for_field(path, field)?));
        };
        let settings = self.root.table("data")?;
        let source = kolo_data::open_for_prediction(path, &settings, preprocessing)?;
        Ok(Box::new(source))
    }

    /// The model alone. Its sizes are those of the training, so the data need not be there.
    pub fn model(&self, kinds: &Kinds) -> Result<Arc<dyn kolo_models::Model>, Failure> {
        let mut root = self.root.clone();
        // Where training started from is over; and some entries are no keys, but whether a key was written.
        let is_key = |key: &str| !OF_TRAINING.contains(&key) && !key.contains(' ');
        let is_size = |key: &str| key.strip_prefix("model.").is_some_and(is_key);
        let sizes = self.settings.iter().filter(|(key, _)| is_size(key));
        for (key, value) in sizes.filter(|(key, _)| !has(&self.root, key)) {
            job_file::override_with(&mut root, &format!("{key}={value}"))?;
        }
        let section = root.table("model")?;
        OF_TRAINING.iter().for_each(|key| _ = section.has(key));
        Ok(kolo_models::make(&kinds.models, &section, None)?.into())
    }

    /// Fills the chosen tensors of a store, each of which must be there.
    pub fn fill(&self, store: &mut Store, chosen: impl Fn(&Entry) -> bool) -> Result<(), Failure> {
        let wanted: Vec<Entry> = store.entries().iter().filter(|entry| chosen(entry)).cloned().collect();
        let held = self.source.tensors();
        for entry in wanted {
            let Ok(at) = held.binary_search_by(|tensor| tensor.name.cmp(&entry.tensor)) else {
                let message = format!("{} has no tensor `{}`", place(self.source.path()), entry.tensor);
                return Err(Failure::usage(message, "give the job that these weights were trained with"));
            };
            let tensor = &held[at];
            if tensor.dtype != Some(entry.ty.dtype) || *tensor.shape != *entry.whole {
                let message = format!(
                    "`{}` is {tensor} in {}, but the model expects {}",
                    entry.tensor,
                    place(self.source.path()),
                    entry.ty
                );
                return Err(Failure::usage(message, "give the job that these weights were trained with"));
            }
            let Some(values) = store.values_mut(&entry.name) else { continue };
            let mut bytes = vec![0; values.len() * 4];
            let range = entry.region.start..entry.region.start + values.len();
            self.source.read(&entry.tensor, range, &mut bytes).map_err(Failure::from)?;
            values.iter_mut().zip(bytes.as_chunks().0).for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
        }
        Ok(())
    }
}

fn place(path: &Path) -> String {
    path.display().to_string()
}

/// Whether the job file itself has a key such as `model.width`.
fn has(root: &Settings, key: &str) -> bool {
    let Some((section, key)) = key.split_once('.') else { return false };
    let key = key.split('.').next().unwrap_or(key);
    root.table(section).is_ok_and(|table| table.keys().any(|known| known == key))
}
