//! What was trained: a run, a checkpoint or a file of weights, with the job that it came from.

use crate::ckpt::{candidates, check_config};
use crate::device::{self, DeviceArg};
use crate::fail::Failure;
use crate::load::{self, Kinds};
use crate::output::print_error;
use clap::Args;
use kolo_base::ShownPath;
use kolo_ckpt::transfer::{Incoming, Wanted, open_files};
use kolo_ckpt::{RealDisk, TensorSource, TensorView};
use kolo_data::tokenizer::{Tokenizer, UsedTokenizer};
use kolo_data::{Field, Source, stream};
use kolo_exec::store::Entry;
use kolo_exec::{Executor, Store};
use kolo_graph::settings::{Setting, SettingError, Settings};
use kolo_train::{Job, job, job_file, model_record};
use std::cell::RefCell;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::NamedTempFile;

/// Which trained model, and how to run it.
#[derive(Debug, Args)]
pub struct SavedArgs {
    /// A run (runs/a), one of its checkpoints, or a safetensors file, the index of several or their directory with --job
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
    #[arg(long, default_value = "auto", help = device::help())]
    pub device: DeviceArg,
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
    /// Every key with the value that counted in training; empty if nobody says so.
    settings: Vec<(String, String)>,
    /// Those of the data that the model was made for, if that is known.
    fields: Option<Vec<Field>>,
    /// How training saw its files, if it had any; or why that is not known.
    preprocessing: Result<Option<String>, Failure>,
    /// `data.labels` was given with this command, and is not that of the training.
    has_own_labels: bool,
    /// What standard input held.
    spooled: RefCell<Vec<NamedTempFile>>,
}

/// Keys of `[model]` that say what training starts from.
const OF_TRAINING: [&str; 3] = ["from", "freeze", "fresh"];

impl Trained {
    pub fn open(kinds: &Kinds, args: &SavedArgs) -> Result<Self, Failure> {
        let (source, skipped) = kolo_ckpt::resolve(&RealDisk::shared(), &args.run)?;
        kolo_ckpt::skipped_notes(&skipped).iter().for_each(|note| print_error(note));
        let header = source.checkpoint().map(kolo_ckpt::Checkpoint::header);
        let saved = header.and_then(|header| model_record::job_text(&header.model));
        let mut root = match (&args.job, saved) {
            (Some(path), _) => job_file::read(path)?,
            (None, Some(text)) if !text.is_empty() => job_file::parse(text, &place(source.path()))?,
            (None, _) => {
                let message = format!("{} does not record which job its weights belong to", args.run.shown());
                return Err(Failure::usage(message, "name the job file with --job"));
            }
        };
        for assignment in &args.set {
            job_file::override_with(&mut root, assignment)?;
        }
        let mut settings = header.map_or_else(Vec::new, |header| header.settings.clone());
        let recorded = header.and_then(|header| model_record::preprocessing(&header.model));
        let mut fields = header.and_then(|header| model_record::data_fields(&header.model));
        let preprocessing = match recorded {
            Some(recorded) => Ok(Some(recorded.to_string())),
            None if !settings.is_empty() && !reads_files(kinds, &root)? => Ok(None),
            // The job says what the weights do not.
            None => read_job(kinds, &root).map(|job| {
                if settings.is_empty() {
                    settings.clone_from(&job.settings);
                }
                fields.get_or_insert_with(|| job.source.fields().to_vec());
                job.source.preprocessing()
            }),
        };
        if settings.is_empty() {
            // Its data are not here, but the model need not know them.
            settings = model_settings(kinds, &root)?;
        }
        let has_own_labels = args.set.iter().any(|assignment| assignment.starts_with("data.labels="));
        Ok(Self { source, root, settings, fields, preprocessing, has_own_labels, spooled: RefCell::default() })
    }

    /// Whether the job reads files, and not what a registered source makes.
    pub fn reads_files(&self, kinds: &Kinds) -> Result<bool, Failure> {
        reads_files(kinds, &self.root)
    }

    /// Leaves out what says how workers and devices share the training: one process uses the model, on this executor.
    pub fn leave_layout_out(&mut self, kinds: &Kinds, executor: &dyn Executor) {
        let keys = kinds.strategies.iter().flat_map(|kind| kind.keys).filter(|key| !key.of_job);
        if let Some(parallel) = self.root.table_mut("parallel", "") {
            keys.for_each(|key| parallel.remove(key.name));
        }
        self.root.remove("memory");
        if let Some(train) = self.root.table_mut("train", "")
            && train.peek("precision") == Some(&Setting::Text("tf32".into()))
            && executor.in_tf32().is_none()
        {
            // Products of another device; the weights are those of f32.
            train.remove("precision");
        }
    }

    /// A key of the job, with the value that counted in training; as text without quotes.
    pub fn setting(&self, key: &str) -> Option<String> {
        let value = self.settings.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str());
        value.map(|value| value.trim_matches('"').to_string())
    }

    /// The job, with the samples of these files held out, which a flag or a key named. Those of the training need not be
    /// there, unless the run is of an earlier version, which did not save what its targets were.
    pub fn job_on(&self, kinds: &Kinds, files: &str, named_by: &str) -> Result<Job, Failure> {
        if stream::is_pipe(files) {
            let message = format!("{named_by}: {files} is a pipe, but an evaluation may read its samples again");
            return Err(Failure::usage(message, "write them to a file first"));
        }
        let recorded = self.preprocessing.as_ref().map_err(Clone::clone)?;
        let mut data = self.data_of_others()?;
        data.set("source", named_by, Setting::Text(files.into()));
        if let Some(recorded) = recorded {
            let opened = kolo_data::open_for_evaluation(files, &data, recorded, job::seed(&self.root)?);
            if let Some(source) = opened.map_err(|error| of_input(error, files, files))? {
                let mut root = self.root.clone();
                if let Some(data) = root.table_mut("data", named_by) {
                    data.set("source", named_by, Setting::Text(files.into()));
                }
                return kinds.read_to_evaluate(&root, Box::new(source));
            }
        }
        let mut root = self.root.clone();
        if let Some(data) = root.table_mut("data", named_by) {
            data.set("test", named_by, Setting::Text(files.into()));
        }
        let mut job = read_job(kinds, &root)?;
        job.split = job.split.test_as_held_out();
        let first = (job.split.held_out_len() > 0).then(|| job.split.held_out(0));
        if let Some(target) = first.and_then(|first| job.source.missing_target(first)) {
            let message = format!("nothing to compare with: {files} has no column \"{target}\", the target");
            return Err(Failure::usage(message, "add it, or run `kolo predict`, which needs no target"));
        }
        Ok(job)
    }

    /// The `[data]` section for other files than those of the training, whose labels are not theirs.
    fn data_of_others(&self) -> Result<Settings, Failure> {
        let mut data = self.root.table("data")?;
        if !self.has_own_labels {
            data.remove("labels");
        }
        Ok(data)
    }

    /// A key of `[data]` that names files.
    pub fn files_of(&self, key: &str) -> Result<Option<String>, Failure> {
        match self.root.table("data")?.peek(key) {
            Some(Setting::Text(files)) if !files.is_empty() => Ok(Some(files.clone())),
            _ => Ok(None),
        }
    }

    /// Whether the samples of the training came through a pipe, and are gone.
    pub fn trained_from_pipe(&self) -> Result<bool, Failure> {
        Ok(self.files_of("source")?.is_some_and(|source| stream::is_pipe(&source)))
    }

    /// The whole job, with its data.
    pub fn job(&self, kinds: &Kinds) -> Result<Job, Failure> {
        read_job(kinds, &self.root)
    }

    /// Which tokenizer made the tokens of the training, if that is known.
    pub fn tokenizer(&self) -> Option<UsedTokenizer> {
        kolo_data::tokenizer_used(self.preprocessing.as_ref().ok()?.as_ref()?)
    }

    /// The tokenizer file that the job names.
    pub fn named_tokenizer(&self) -> Result<Option<String>, Failure> {
        let of_job = match self.root.table("data")?.peek("tokenizer") {
            Some(Setting::Text(path)) => Some(path.clone()),
            _ => None,
        };
        Ok(self.setting("data.tokenizer").or(of_job).filter(|path| !path.is_empty()))
    }

    /// The tokenizer of a registered source whose tokens are single characters.
    pub fn alphabet(&self, kinds: &Kinds) -> Result<Option<Tokenizer>, Failure> {
        if self.reads_files(kinds)? {
            return Ok(None);
        }
        Ok(self.job(kinds)?.source.alphabet().map(Tokenizer::characters))
    }

    /// New files, seen as training saw its own. The data of the training need not be there. If it had no files, these must
    /// hold what the model takes.
    pub fn inputs(&self, path: &str, wanted: &[Field]) -> Result<Box<dyn Source>, Failure> {
        self.open_inputs(path, path, wanted)
    }

    /// Opens files that a user knows as `shown`.
    fn open_inputs(&self, path: &str, shown: &str, wanted: &[Field]) -> Result<Box<dyn Source>, Failure> {
        let Some(preprocessing) = self.preprocessing.as_ref().map_err(Clone::clone)? else {
            let [field] = wanted else {
                let message = "the run was not trained on files, and its model takes several inputs";
                return Err(Failure::usage(message, "leave the files out to predict its held-out samples"));
            };
            let source = kolo_data::open_for_field(path, field).map_err(|error| of_input(error, path, shown))?;
            return Ok(Box::new(source));
        };
        let mut settings = self.data_of_others()?;
        settings.set("source", path, Setting::Text(path.into()));
        let source = kolo_data::open_for_prediction(path, &settings, preprocessing);
        Ok(Box::new(source.map_err(|error| of_input(error, path, shown))?))
    }

    /// The same of what a reader gives to its end, which has the format of the training's files, or that of `data.format`.
    pub fn inputs_of(&self, reader: &mut dyn Read, wanted: &[Field]) -> Result<Box<dyn Source>, Failure> {
        let data = self.root.table("data")?;
        let ending = match data.peek("source") {
            Some(Setting::Text(source)) => Path::new(source).extension().map(|ending| format!(".{}", ending.display())),
            _ => None,
        };
        let failed =
            |error: std::io::Error| Failure::job(format!("standard input: {error}"), "write it to a file first");
        let mut file = tempfile::Builder::new()
            .prefix("standard-input-")
            .suffix(&ending.unwrap_or_default())
            .tempfile()
            .map_err(failed)?;
        std::io::copy(reader, file.as_file_mut()).map_err(failed)?;
        let path = file.path().to_string_lossy().into_owned();
        let source = self.open_inputs(&path, "standard input", wanted);
        // Some formats open their files again.
        self.spooled.borrow_mut().push(file);
        source
    }

    /// The model alone. Its sizes, and the fields of its data, are those of the training, so the data need not be there.
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
        Ok(kolo_models::make(&kinds.models, &section, self.fields.as_deref())?.into())
    }

    /// Fills the chosen tensors of a store, each of which must be there.
    pub fn fill(&self, store: &mut Store, chosen: impl Fn(&Entry) -> bool) -> Result<(), Failure> {
        let wanted: Vec<Entry> = store.entries().iter().filter(|entry| chosen(entry)).cloned().collect();
        let held = self.source.tensors();
        if self.source.checkpoint().is_none() {
            let under_own_names = wanted.iter().all(|entry| is_held(&held, entry));
            return self.fill_from_files(store, &wanted, under_own_names);
        }
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

    /// The same from a safetensors file, perhaps of another library, as `kolo ckpt import` takes it.
    fn fill_from_files(&self, store: &mut Store, entries: &[Entry], under_own_names: bool) -> Result<(), Failure> {
        let (disk, path) = (RealDisk::shared(), self.source.path());
        let wanted = entries.iter().map(|entry| Wanted { name: entry.tensor.clone(), shape: entry.whole.to_vec() });
        let wanted: Vec<Wanted> = wanted.collect();
        let incoming = Incoming::find(open_files(disk.as_ref(), path)?, &candidates(&self.settings), &wanted)?;
        incoming.check_tied()?;
        let unchecked = check_config(disk.as_ref(), path, incoming.architecture, &self.settings)?;
        unchecked.iter().filter(|_| !under_own_names).for_each(|note| print_error(&format!("note: {note}")));
        for entry in entries {
            if let (Some(values), Some(place)) = (incoming.read(&entry.tensor)?, store.values_mut(&entry.name)) {
                place.copy_from_slice(&values);
            }
        }
        Ok(())
    }
}

/// Every key of the model with the value that it has without any data.
fn model_settings(kinds: &Kinds, root: &Settings) -> Result<Vec<(String, String)>, Failure> {
    let root = root.clone();
    let section = root.table("model")?;
    OF_TRAINING.iter().for_each(|key| _ = section.has(key));
    kolo_models::make(&kinds.models, &section, None)?;
    Ok(root.resolved().into_iter().filter(|(key, _)| key.starts_with("model.")).collect())
}

/// Whether a file has a tensor as the store wants it.
fn is_held(held: &[TensorView<'_>], entry: &Entry) -> bool {
    let found = held.binary_search_by(|tensor| tensor.name.cmp(&entry.tensor));
    found.is_ok_and(|at| held[at].dtype == Some(entry.ty.dtype) && *held[at].shape == *entry.whole)
}

/// An error of the training's keys, told of an input that a command names.
fn of_input(error: SettingError, path: &str, shown: &str) -> SettingError {
    let SettingError { message, hint, .. } = error;
    let rest = message
        .strip_prefix("`data.source` names files that cannot be read: ")
        .or_else(|| message.strip_prefix("`data.source` names files that cannot be used: "))
        .or_else(|| message.strip_prefix(&format!("`data.source` is \"{path}\", ")));
    let message = match rest.map(|rest| rest.split_once(' ').unwrap_or((rest, ""))) {
        Some(("but", rest)) => rest.into(),
        Some(("which", rest)) => format!("it {rest}"),
        Some(("whose", rest)) => format!("its {rest}"),
        Some(_) => {
            let rest = rest.unwrap_or_default().trim_start_matches(&format!("{path}, "));
            rest.trim_start_matches(&format!("{path}: ")).to_string()
        }
        None => message,
    };
    SettingError { place: shown.into(), message, hint }
}

/// The job with its data, which must not come from a pipe: whoever reads it would wait for samples of a training.
fn read_job(kinds: &Kinds, root: &Settings) -> Result<Job, Failure> {
    let data = root.table("data")?;
    match data.peek("source") {
        Some(Setting::Text(source)) if stream::is_pipe(source) => {
            let message = format!("is \"{source}\", a pipe, whose samples are gone");
            let hint = "name files: `kolo eval RUN --data FILES`, or `kolo predict RUN FILES`";
            Err(data.wrong("source", message, hint).into())
        }
        _ => kinds.read(root),
    }
}

/// Whether the job of these settings reads files.
fn reads_files(kinds: &Kinds, root: &Settings) -> Result<bool, Failure> {
    let data = root.table("data")?;
    let Some(Setting::Text(source)) = data.peek("source") else { return Ok(false) };
    Ok(kolo_data::find(&kinds.sources, source).is_none())
}

fn place(path: &Path) -> String {
    path.shown().to_string()
}

/// Whether the job file itself has a key such as `model.width`.
fn has(root: &Settings, key: &str) -> bool {
    let Some((section, key)) = key.split_once('.') else { return false };
    let key = key.split('.').next().unwrap_or(key);
    root.table(section).is_ok_and(|table| table.keys().any(|known| known == key))
}
