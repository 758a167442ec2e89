//! A job: everything a job file says, checked and made ready.

use crate::checkpoint::{DataRecord, Every, SavingRule, StartWeights};
use crate::class_weights;
use crate::error::Error;
use crate::foreign_keys;
use crate::job_file;
use crate::loss_scale;
use crate::memory_settings::MemorySettings;
use crate::optimizer::Optimizer;
use crate::rate_scaling::RateScaling;
use crate::residuals;
use crate::schedule::RateSchedule;
use kolo_data::{Field, Kind, ReadError, SOURCES, Source, SourceKind, Split};
use kolo_exec::cpu::Cpu;
use kolo_exec::{Executor, Offload, Precision};
use kolo_graph::settings::{SettingError, Settings};
use kolo_models::{Better, MODELS, Model, ModelKind};
use kolo_parallel::strategy::{Facts, Key};
use kolo_parallel::{Parallel, STRATEGIES, StrategyKind};
use std::sync::Arc;

/// Steps of one run: a million a day for three years.
const STEPS_MAX: usize = 1_000_000_000;

const SECTIONS: [&str; 7] = ["job", "model", "data", "train", "parallel", "memory", "checkpoint"];

/// What every model is trained to lower.
const LOSS: &str = "loss";

/// When to stop before the end.
#[derive(Clone, Debug, PartialEq)]
pub struct EarlyStop {
    pub metric: WatchedMetric,
    /// Evaluations without improvement.
    pub patience: usize,
}

/// A metric whose best value decides something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchedMetric {
    pub name: String,
    pub better: Better,
}

impl WatchedMetric {
    pub fn new(name: impl Into<String>, better: Better) -> Self {
        Self { name: name.into(), better }
    }
}

/// Steps from one logged row to the next.
const LOG_EVERY_STEPS: usize = 50;
/// Samples of an evaluation that may take long, and how many times as many as those of all steps are said to be much.
const EVALUATED_MANY: usize = 100_000;
const EVALUATED_TIMES: usize = 10;

/// How often a run is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEvery {
    /// 0: never.
    pub steps: usize,
    /// The job says so, as opposed to the default.
    pub asked: bool,
}

/// How samples are made ahead of the steps that take them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loading {
    /// Batches that may be ready beside the one in use.
    pub batches: usize,
    pub threads: usize,
    /// The job says so, as opposed to the default.
    pub asked: bool,
}

/// Batches ready by default: one hides a hiccup of the disk, more would only take memory.
const PREFETCH_BATCHES: usize = 2;
const PREFETCH_BATCHES_MAX: usize = 1024;
/// Loader threads by default: one reads while the other decodes. The same on every host, as ranks compare it.
const LOADER_THREADS: usize = 2;
const LOADER_THREADS_MAX: usize = 256;

/// What a job file can name.
#[derive(Clone, Copy, Debug)]
pub struct Kinds<'k> {
    pub models: &'k [ModelKind],
    pub sources: &'k [SourceKind],
    pub strategies: &'k [StrategyKind],
}

impl Default for Kinds<'_> {
    /// All of this workspace.
    fn default() -> Self {
        Self { models: MODELS, sources: SOURCES, strategies: STRATEGIES }
    }
}

/// What becomes of weights after their update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// They stay as they are, f32.
    #[default]
    None,
    /// They become values of bf16, up or down by chance.
    Stochastic,
}

#[derive(Debug)]
pub struct Job {
    pub name: String,
    pub seed: u64,
    pub reproducible: bool,
    pub model: Box<dyn Model>,
    pub source: Box<dyn Source>,
    /// What `data.source` says.
    pub source_name: String,
    pub loading: Loading,
    /// The source's field behind each of the model's.
    pub columns: Vec<usize>,
    pub fields: Vec<Field>,
    pub split: Split,
    pub batch: usize,
    pub grains: usize,
    pub total_steps: usize,
    pub steps_per_epoch: usize,
    /// With the rate that counts.
    pub optimizer: Optimizer,
    /// Where that rate comes from.
    pub rate: RateScaling,
    pub schedule: RateSchedule,
    /// The largest norm of a gradient; infinite if it is only measured.
    pub clip: Option<f32>,
    /// What a step is computed in. Parameters and the optimizer's state are f32 in any case.
    pub precision: Precision,
    /// The job says so, as opposed to the default.
    pub precision_asked: bool,
    pub rounding: Rounding,
    /// What each class weighs in the loss, if they do not weigh the same.
    pub class_weights: Option<Vec<f32>>,
    /// The factor by which gradients are scaled at first, in f16.
    pub loss_scale: Option<f64>,
    /// When held-out samples are evaluated: by steps or epochs.
    pub eval_every: Every,
    pub log_every: LogEvery,
    pub early_stop: Option<EarlyStop>,
    /// Where the first weights come from, and which are trained.
    pub start: StartWeights,
    /// When to save, and what to keep.
    pub saving: SavingRule,
    /// How the work is split among the workers.
    pub parallel: Parallel,
    /// What `[parallel]` may choose from.
    pub strategies: Vec<StrategyKind>,
    pub memory: MemorySettings,
    /// Who runs the graphs; the CPU unless somebody chose otherwise.
    pub executor: Arc<dyn Executor>,
    /// Every key of the job file with the value that counts, the default where none was written.
    pub settings: Vec<(String, String)>,
    /// The job as a file would say it.
    pub text: String,
}

impl Job {
    /// A job with these models, and with the sources and strategies of this workspace.
    pub fn read(root: &Settings, models: &[ModelKind]) -> Result<Self, Error> {
        Self::read_among(root, &Kinds { models, ..Kinds::default() })
    }

    /// A job that names models, sources and strategies of these lists.
    pub fn read_among(root: &Settings, kinds: &Kinds<'_>) -> Result<Self, Error> {
        Self::read_given(root, kinds, None).map_err(foreign_keys::explain)
    }

    /// The same to evaluate alone, on this source instead of the one that `data.source` names, which is not opened. What
    /// says how to train counts for nothing.
    pub fn read_to_evaluate(root: &Settings, kinds: &Kinds<'_>, source: Box<dyn Source>) -> Result<Self, Error> {
        let mut root = root.clone();
        root.remove("checkpoint");
        if let Some(train) = root.table_mut("train", "") {
            let of_training: Vec<String> = train.keys().filter(|key| *key != "precision").map(str::to_string).collect();
            of_training.iter().for_each(|key| train.remove(key));
        }
        Self::read_given(&root, kinds, Some(source)).map_err(foreign_keys::explain)
    }

    fn read_given(root: &Settings, kinds: &Kinds<'_>, given: Option<Box<dyn Source>>) -> Result<Self, Error> {
        job_file::check_sections(root, &SECTIONS)?;
        let [job, model, data, train, parallel, memory, checkpoint] = SECTIONS.map(|section| root.table(section));
        let (job, model, data, train, parallel) = (job?, model?, data?, train?, parallel?);
        let (memory, checkpoint) = (MemorySettings::read(&memory?)?, checkpoint?);

        let (name, seed, reproducible) = read_head(&job)?;
        let start = StartWeights::read(&model)?;
        let section = model;
        let evaluates = given.is_some();
        let Supply { model, source, source_name, columns, fields } = match given {
            Some(source) => supply_of(kinds, &section, source, &data)?,
            None => read_supply(kinds, &section, &data, seed)?,
        };
        if !(start.freeze.is_empty() && start.fresh.is_empty()) {
            start.check(&parameter_names(&*model)?, &section)?;
        }
        let batches = Batches::read(&data, &*source, seed, reproducible)?;
        if !evaluates {
            data.finish()?;
            batches.check(&data)?;
        }
        let Batches { split, batch, grains, loading } = batches;
        // Nobody counts the epochs of what is evaluated only.
        let steps_per_epoch = (split.train_len() / batch).max(usize::from(evaluates));
        let rules = TrainRules::read(&train, &*model, steps_per_epoch, batch)?;
        rules.check_early_stop(&train, &split)?;
        let class_weights = class_weights::read(&train, &*source, &split, &*model)?;
        let precision_asked = train.has("precision");
        train.finish()?;
        let facts = Facts { freezes: !start.freeze.is_empty(), ..rules.facts(reproducible) };
        let parallel = Parallel::read(&parallel, kinds.strategies, facts)?;
        let saving = SavingRule::read(&checkpoint, || measures(&split, &*model))?;
        Ok(Self {
            name,
            seed,
            reproducible,
            model,
            source,
            source_name,
            loading,
            columns,
            fields,
            split,
            batch,
            grains,
            total_steps: rules.total_steps,
            steps_per_epoch,
            optimizer: rules.optimizer,
            rate: rules.rate,
            schedule: rules.schedule,
            clip: rules.clip,
            precision: rules.precision,
            class_weights,
            precision_asked,
            loss_scale: rules.loss_scale,
            rounding: rules.rounding,
            eval_every: rules.eval_every,
            log_every: rules.log_every,
            early_stop: rules.early_stop,
            start,
            saving,
            parallel: parallel.recomputing(memory.recompute.clone()),
            strategies: kinds.strategies.to_vec(),
            memory,
            executor: Arc::new(Cpu),
            settings: root.resolved(),
            text: text_of(root),
        })
    }

    /// What is said of evaluations that take far more samples than all steps.
    pub fn evaluation_note(&self) -> Option<String> {
        let (evaluated, trained) = (self.split.held_out_len(), self.total_steps.saturating_mul(self.batch));
        let is_much = evaluated > EVALUATED_MANY && evaluated / EVALUATED_TIMES > trained;
        is_much.then(|| {
            let times = evaluated / trained.max(1);
            format!("an evaluation takes {evaluated} samples, {times} times those of all steps: `holdout` can leave it fewer")
        })
    }

    /// What the job says under a key of `[parallel]`, as it is written.
    pub fn parallel_setting(&self, key: &Key) -> Option<&str> {
        let name = format!("parallel.{}", key.name);
        self.settings.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_str())
    }

    /// The model's parameters and statistics, whoever holds them.
    pub(crate) fn tensor_names(&self) -> Result<Vec<String>, Error> {
        let graph = crate::step::evaluation_graph(&*self.model, 1)?;
        let params = graph.params().map(|(_, param)| param.name.clone());
        Ok(params.chain(graph.states().map(|(_, state)| state.shard().0.to_string())).collect())
    }

    /// What strategies may want to know.
    pub fn facts(&self) -> Facts {
        let scales_gradients = self.loss_scale.is_some();
        let (early_stop, freezes) = (self.early_stop.is_some(), !self.start.freeze.is_empty());
        Facts { reproducible: self.reproducible, early_stop, scales_gradients, freezes }
    }

    /// What two ranks must agree on to train the same job: every key with the value that counts, what follows from several of
    /// them, and the data. Ranks compare it when they meet.
    pub fn manifest(&self) -> Result<Vec<(String, String)>, Error> {
        let fingerprint = self.source.fingerprint();
        let fingerprint = fingerprint.map_err(|error| ReadError { source: self.source_name.clone(), ..error })?;
        let derived = [
            ("steps of the whole run", self.total_steps.to_string()),
            ("grains", self.grains.to_string()),
            ("samples to train on", self.split.train_len().to_string()),
            ("device", self.executor.name().to_string()),
            ("fingerprint of the data", fingerprint),
        ];
        let derived = derived.into_iter().map(|(key, value)| (key.to_string(), value));
        Ok(self.settings.iter().cloned().chain(derived).collect())
    }

    /// What tells these data from others; `None` if a sample that this looks at cannot be read.
    pub(crate) fn data_record(&self) -> Option<DataRecord> {
        let (samples, held_out) = (self.split.train_len(), self.split.held_out_len());
        Some(DataRecord { samples, held_out, fingerprint: self.source.fingerprint().ok()? })
    }

    /// Lets this executor run its graphs, in the job's precision and with as much in the host's memory as the job says.
    pub fn run_on(&mut self, executor: Arc<dyn Executor>) -> Result<(), Error> {
        let executor = match self.precision {
            Precision::Tf32 => executor.in_tf32().ok_or_else(|| no_tf32(executor.name()))?,
            _ => executor,
        };
        // What only evaluates has nothing to offload: training looks whether it can.
        self.executor = executor.with_offload(self.memory.offload).unwrap_or(executor);
        Ok(())
    }

    /// Whether its executor has its precision, and a memory beside the host's if something is to be kept there.
    pub fn check_executor(&self) -> Result<(), Error> {
        if self.precision == Precision::Tf32 && self.executor.in_tf32().is_none() {
            return Err(no_tf32(self.executor.name()));
        }
        let offload = self.memory.offload;
        match offload != Offload::None && self.executor.with_offload(offload).is_none() {
            true => Err(no_offload(offload, self.executor.name())),
            false => Ok(()),
        }
    }

    /// Whether its executor can run with this many workers.
    pub fn check_device(&self, workers: usize) -> Result<(), Error> {
        if self.executor.has_collectives() {
            return self.check_home(workers);
        }
        let message = format!("cannot train on the {} executor, which runs one worker", self.executor.name());
        let hint = "leave out `-n` and servers, or use `--device cpu`".into();
        Err(Error::Workers { workers, message, hint })
    }

    /// Weights in one memory of a host are updated there.
    fn check_home(&self, workers: usize) -> Result<(), Error> {
        let shared = self.parallel.strategies().find(|strategy| strategy.home().is_shared());
        let Some(strategy) = shared.filter(|_| !self.executor.allocates_on_host()) else { return Ok(()) };
        let (what, device) = (strategy.written(), self.executor.name());
        let message =
            format!("cannot train with `{what}` on `{device}`: weights in one memory of the host are updated there");
        Err(Error::Workers {
            workers,
            message,
            hint: "write `parallel.zero = 1` instead, or use `--device cpu`".into(),
        })
    }

    /// Fits the grains to this many workers. A job that promises its bits keeps its grains, so the workers must share them
    /// evenly.
    pub fn fit_to(&mut self, workers: usize) -> Result<(), Error> {
        self.grains = self.grains_for(&self.parallel, workers)?;
        Ok(())
    }

    /// The grains of the job if this many workers split it so.
    pub(crate) fn grains_for(&self, parallel: &Parallel, workers: usize) -> Result<usize, Error> {
        // Ranks along other axes than that of the data have the same grains.
        let ranks = parallel.data_ranks(workers).map_err(|refusal| Error::workers(workers, refusal))?;
        if self.grains.is_multiple_of(ranks) && ranks.is_power_of_two() && self.grains.is_power_of_two() {
            return Ok(self.grains);
        }
        let whose = if ranks == workers { String::new() } else { format!("make {ranks} copies of the model, which ") };
        let others = workers / ranks;
        if self.reproducible {
            let fitting: Vec<String> = (0..=self.grains.ilog2()).map(|power| (others << power).to_string()).collect();
            // Grains are a power of two, which no other number of ranks shares evenly.
            let more = if ranks.is_power_of_two() { "more `data.grains`, " } else { "" };
            return Err(Error::Workers {
                workers,
                message: format!("{whose}do not share {} grains evenly", self.grains),
                hint: format!("use {} workers, {more}or `job.reproducible = false`", fitting.join(", ")),
            });
        }
        let per_rank = (self.grains / ranks).max(1);
        // As many grains as before, or fewer if the batch has no more in it.
        let fitting = (0..=per_rank.ilog2()).rev().map(|power| ranks << power);
        fitting.into_iter().find(|grains| self.batch.is_multiple_of(*grains)).ok_or_else(|| {
            // Of both, so that it fits whether the grains are given or not.
            let shared = self.grains.trailing_zeros().min(ranks.trailing_zeros());
            let unit = ranks.saturating_mul(self.grains >> shared);
            let near = self.batch.div_ceil(unit).saturating_mul(unit);
            Error::Workers {
                workers,
                message: format!("{whose}do not share a batch of {} evenly", self.batch),
                hint: format!("make `data.batch` a multiple of {unit}, such as {near}"),
            }
        })
    }

    /// Samples per grain.
    pub fn grain_batch(&self) -> usize {
        self.batch / self.grains
    }

    pub fn epochs(&self) -> usize {
        self.total_steps.div_ceil(self.steps_per_epoch)
    }

    /// Bytes of one sample's inputs, targets left out.
    pub fn input_bytes_per_sample(&self) -> Result<usize, Error> {
        let inputs = crate::step::prediction_inputs(&*self.model)?;
        Ok(self.fields.iter().filter(|field| inputs.contains(&field.name)).map(|field| field.elements() * 4).sum())
    }
}

/// The seed of a job.
pub fn seed(root: &Settings) -> Result<u64, SettingError> {
    read_seed(&root.table("job")?)
}

fn read_seed(job: &Settings) -> Result<u64, SettingError> {
    Ok(job.count("seed", 1, 0)? as u64)
}

/// Name, seed and whether it is reproducible.
fn read_head(job: &Settings) -> Result<(String, u64, bool), SettingError> {
    let head = (read_name(job)?, read_seed(job)?, job.bool("reproducible", true)?);
    job.finish()?;
    Ok(head)
}

/// How the samples become batches.
struct Batches {
    split: Split,
    batch: usize,
    grains: usize,
    loading: Loading,
}

impl Batches {
    fn read(data: &Settings, source: &dyn Source, seed: u64, reproducible: bool) -> Result<Self, SettingError> {
        let (batch, grains) = read_batch(data, reproducible)?;
        let split = source.split().map_or_else(|| Split::read(data, source.len(), seed), Ok)?;
        let loading = read_loading(data)?;
        Ok(Self { split, batch, grains, loading })
    }

    /// Whether there are samples for a step.
    fn check(&self, data: &Settings) -> Result<(), SettingError> {
        let (batch, samples) = (self.batch, self.split.train_len());
        match samples < batch {
            false => Ok(()),
            true => {
                let are = if samples == 1 { "sample is" } else { "samples are" };
                let message = format!("is {batch}, but only {samples} {are} for training");
                let hint = match samples {
                    0 => "give more samples".into(),
                    _ => format!(
                        "make it smaller, such as `batch = {}`, or give more samples",
                        1usize << samples.ilog2()
                    ),
                };
                Err(data.wrong("batch", message, hint))
            }
        }
    }
}

/// What `[train]` says.
struct TrainRules {
    total_steps: usize,
    optimizer: Optimizer,
    rate: RateScaling,
    schedule: RateSchedule,
    clip: Option<f32>,
    precision: Precision,
    loss_scale: Option<f64>,
    rounding: Rounding,
    eval_every: Every,
    log_every: LogEvery,
    early_stop: Option<EarlyStop>,
}

impl TrainRules {
    fn read(train: &Settings, model: &dyn Model, steps_per_epoch: usize, batch: usize) -> Result<Self, Error> {
        let total_steps = read_length(train, steps_per_epoch)?;
        let (optimizer, schedule) = read_rule(train, model, total_steps)?;
        let rate = RateScaling::read(train, optimizer.lr(), batch)?;
        let early_stop = read_early_stop(train, model)?;
        let precision = read_precision(train)?;
        Ok(Self {
            total_steps,
            optimizer: optimizer.with_lr(rate.rate),
            rate,
            schedule,
            precision,
            loss_scale: read_loss_scale(train, precision)?,
            rounding: read_rounding(train, precision)?,
            clip: read_clip(train)?,
            eval_every: Every::read_counted(train, "eval_every")?,
            log_every: LogEvery { steps: train.count("log_every", LOG_EVERY_STEPS, 0)?, asked: train.has("log_every") },
            early_stop,
        })
    }

    fn check_early_stop(&self, train: &Settings, split: &Split) -> Result<(), SettingError> {
        if self.early_stop.is_none() || split.held_out_len() > 0 {
            return Ok(());
        }
        let hint = "give `data.holdout` a part of the data, or leave `early_stop` out";
        Err(train.wrong("early_stop", "has nothing to watch: the job holds out no samples", hint))
    }

    fn facts(&self, reproducible: bool) -> Facts {
        let (early_stop, scales_gradients) = (self.early_stop.is_some(), self.loss_scale.is_some());
        Facts { reproducible, early_stop, scales_gradients, freezes: false }
    }
}

/// What a checkpoint can be the best by: nothing, if no sample is held out.
fn measures(split: &Split, model: &dyn Model) -> Vec<WatchedMetric> {
    if split.held_out_len() == 0 { Vec::new() } else { metrics_of(model).unwrap_or_default() }
}

/// The name is shown, and goes into scripts.
fn read_name(job: &Settings) -> Result<String, SettingError> {
    let name = job.text("name", "job")?;
    if name.chars().any(char::is_control) {
        let message = format!("is {name:?}, which contains control characters");
        return Err(job.wrong("name", message, "write a name of one line"));
    }
    if name.trim().is_empty() {
        return Err(job.wrong("name", "is empty", "write a name, or leave it out"));
    }
    Ok(name)
}

/// A model with the data it is fed.
struct Supply {
    model: Box<dyn Model>,
    source: Box<dyn Source>,
    source_name: String,
    /// The source's field behind each of the model's.
    columns: Vec<usize>,
    fields: Vec<Field>,
}

fn read_supply(kinds: &Kinds<'_>, model: &Settings, data: &Settings, seed: u64) -> Result<Supply, Error> {
    let name = data.text("source", "")?;
    if name.is_empty() {
        let hint = "write `source = \"builtin:digits\"` under [data], a synthetic: source, or the path of files";
        return Err(data.wrong("source", "is missing", hint).into());
    }
    // A source takes its shape from the model, or gives the model its defaults.
    let shaped_by_model = kolo_data::find(kinds.sources, &name).is_some_and(|kind| kind.shaped_by_model);
    let open = |wanted: Option<&[Field]>| kolo_data::open(kinds.sources, &name, data, seed, wanted);
    let (model, source) = if shaped_by_model {
        let model = make_model(kinds.models, model, None)?;
        let source = open(Some(&model.fields()))?;
        (model, source)
    } else {
        // What the model takes where no data say otherwise. It may need them, and then nobody knows.
        let alone = kolo_models::make(kinds.models, &model.detached(), None).ok().map(|model| model.fields());
        let source = open(alone.as_deref())?;
        (make_model(kinds.models, model, Some(source.fields()))?, source)
    };
    let fields = model.fields();
    let columns = match_fields(&fields, &*source, &name, data)?;
    Ok(Supply { model, source, source_name: name, columns, fields })
}

/// The model with a source that is open already.
fn supply_of(kinds: &Kinds<'_>, model: &Settings, source: Box<dyn Source>, data: &Settings) -> Result<Supply, Error> {
    let source_name = data.text("source", "")?;
    let model = make_model(kinds.models, model, Some(source.fields()))?;
    let fields = model.fields();
    let columns = match_fields(&fields, &*source, &source_name, data)?;
    Ok(Supply { model, source, source_name, columns, fields })
}

/// How parameters follow their gradients, and the rate over the run.
fn read_rule(train: &Settings, model: &dyn Model, steps: usize) -> Result<(Optimizer, RateSchedule), SettingError> {
    let optimizer = train.table_like("optimizer", "{ kind = \"adamw\" }")?;
    let optimizer = Optimizer::read_for(&optimizer, model.learning_rate())?;
    let schedule = train.table_like("schedule", "{ kind = \"cosine\" }")?;
    let schedule = match train.has("optimizer") || train.has("schedule") {
        true => RateSchedule::read(&schedule, steps)?,
        false => RateSchedule::recipe(steps),
    };
    Ok((optimizer, schedule))
}

/// The model, with inputs that can be held.
fn make_model(kinds: &[ModelKind], model: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    let made = kolo_models::make(kinds, model, data)?;
    for field in made.fields() {
        let indices = matches!(field.kind, Kind::Index { classes } if classes > i32::MAX as usize);
        if indices || field.elements() > isize::MAX as usize / 8 {
            let message = format!("needs {field}, which is more than kolo can index");
            return Err(model.wrong("kind", message, "make its sizes smaller"));
        }
    }
    Ok(made)
}

/// Finds each of the model's fields among the source's.
fn match_fields(
    wanted: &[Field],
    given: &dyn Source,
    source: &str,
    data: &Settings,
) -> Result<Vec<usize>, SettingError> {
    let (reads_files, given) = (given.preprocessing().is_some(), given.fields());
    let find = |field: &Field| -> Result<usize, SettingError> {
        let at = given.iter().position(|other| other.name == field.name && fits(field, other));
        at.ok_or_else(|| {
            let has = given.iter().map(Field::to_string).collect::<Vec<_>>().join("; ");
            let message = format!("is \"{source}\", which has {has}, but the model expects {field}");
            let mut hint =
                String::from("leave the model's size keys out so that the data sets them, or change the model");
            let is_other = |other: &&Field| std::mem::discriminant(&other.kind) != std::mem::discriminant(&field.kind);
            if reads_files && given.iter().any(|other| other.name == field.name && is_other(&other)) {
                hint += "; `types = { COLUMN = \"tokens\" }` says what a column holds: tokens, mask, class or real";
            }
            data.wrong("source", message, hint)
        })
    };
    wanted.iter().map(find).collect()
}

/// Same shape; an index must not exceed what the model knows.
fn fits(model: &Field, data: &Field) -> bool {
    let kinds = match (model.kind, data.kind) {
        (Kind::Real, Kind::Real) => true,
        (Kind::Index { classes: model }, Kind::Index { classes: data }) => data <= model,
        _ => false,
    };
    kinds && model.shape == data.shape
}

/// Samples of a step, and grains. A job that does not promise its bits may write any number of grains: what trains it takes the nearest
/// that its workers can share.
fn read_batch(data: &Settings, reproducible: bool) -> Result<(usize, usize), SettingError> {
    let batch = data.count("batch", 64, 1)?;
    // A default that works for any batch: the largest power of two up to eight that divides it.
    let default = 1usize << batch.trailing_zeros().min(3);
    let grains = data.count("grains", default, 1)?;
    if reproducible && !grains.is_power_of_two() {
        let near = grains.next_power_of_two();
        let message = format!("is {grains}, which is not a power of two");
        let fitting = [near, near / 2].into_iter().filter(|near| batch.is_multiple_of(*near));
        let fitting: Vec<String> = fitting.map(|near| near.to_string()).collect();
        let hint = match fitting.as_slice() {
            [first, second] => format!("write `grains = {first}` or {second}"),
            [one] => format!("write `grains = {one}`"),
            _ => format!("write `grains = {default}`, which divides the batch"),
        };
        return Err(data.wrong("grains", message, hint));
    }
    if batch % grains != 0 {
        let message = format!("is {grains}, which does not divide the batch of {batch}");
        let hint = format!("write `grains = {default}`, or a batch that is a multiple of {grains}");
        return Err(data.wrong("grains", message, hint));
    }
    Ok((batch, grains))
}

fn read_loading(data: &Settings) -> Result<Loading, SettingError> {
    Ok(Loading {
        batches: data.count_in("prefetch", PREFETCH_BATCHES, 0, PREFETCH_BATCHES_MAX)?,
        threads: data.count_in("threads", LOADER_THREADS, 1, LOADER_THREADS_MAX)?,
        asked: data.has("prefetch") || data.has("threads"),
    })
}

/// A key that came from the command line.
fn is_overridden(section: &Settings, key: &str) -> bool {
    section.place_of(key).is_some_and(|place| place.starts_with("--set"))
}

/// The job as a file would say it: of two lengths, the one that counts.
fn text_of(root: &Settings) -> String {
    let mut root = root.clone();
    if let Some(train) = root.table_mut("train", "") {
        match (is_overridden(train, "steps"), is_overridden(train, "epochs")) {
            (true, false) => train.remove("epochs"),
            (false, true) => train.remove("steps"),
            _ => {}
        }
    }
    job_file::write(&root)
}

/// Steps of the whole run. A length given on the command line wins over one in the file.
fn read_length(train: &Settings, steps_per_epoch: usize) -> Result<usize, SettingError> {
    let (steps, epochs) = (train.count("steps", 1, 1)?, train.count("epochs", 10, 1)?);
    let by_steps = match (train.has("steps"), train.has("epochs")) {
        (true, true) if is_overridden(train, "steps") == is_overridden(train, "epochs") => {
            return Err(train.wrong("steps", "cannot be combined with `epochs`", "keep one of the two"));
        }
        (true, true) => is_overridden(train, "steps"),
        (by_steps, _) => by_steps,
    };
    let (key, total) = if by_steps { ("steps", Some(steps)) } else { ("epochs", epochs.checked_mul(steps_per_epoch)) };
    match total.filter(|total| *total <= STEPS_MAX) {
        Some(total) => Ok(total),
        None => Err(train.wrong(key, "is more than any run could take", format!("stay below {STEPS_MAX} steps"))),
    }
}

fn read_clip(train: &Settings) -> Result<Option<f32>, SettingError> {
    let clip = train.float("clip", 0.0)?;
    if train.has("clip") && (clip <= 0.0 || !clip.is_finite()) {
        return Err(train.wrong(
            "clip",
            format!("is {clip}"),
            "write a positive norm such as `clip = 1.0`, or leave it out",
        ));
    }
    // A norm to be measured is one that nothing exceeds.
    let measured = train.bool("grad_norm", false)?.then_some(f32::INFINITY);
    Ok(train.has("clip").then_some(clip as f32).or(measured))
}

fn read_early_stop(train: &Settings, model: &dyn Model) -> Result<Option<EarlyStop>, Error> {
    if !train.has("early_stop") {
        return Ok(None);
    }
    let table = train.table_like("early_stop", "{ metric = \"loss\", patience = 3 }")?;
    let (name, patience) = (table.text("metric", LOSS)?, table.count("patience", 3, 1)?);
    table.finish()?;
    let mut known = metrics_of(model)?;
    let Some(at) = known.iter().position(|metric| metric.name == name) else {
        let names: Vec<&str> = known.iter().map(|metric| metric.name.as_str()).collect();
        let message = format!("is \"{name}\", which this model does not measure");
        return Err(table.wrong("metric", message, format!("the metrics are {}", names.join(", "))).into());
    };
    Ok(Some(EarlyStop { metric: known.swap_remove(at), patience }))
}

/// The model's parameters.
fn parameter_names(model: &dyn Model) -> Result<Vec<String>, Error> {
    let graph = crate::step::evaluation_graph(model, 1)?;
    Ok(graph.params().map(|(_, param)| param.name.clone()).collect())
}

/// What an evaluation of the model yields: the loss, the model's metrics, those of a confusion matrix, and what follows from them.
fn metrics_of(model: &dyn Model) -> Result<Vec<WatchedMetric>, Error> {
    let graph = crate::step::evaluation_graph(model, 1)?;
    let names = crate::trainer::metric_names(&graph);
    let mut metrics: Vec<(String, f64)> =
        names.into_iter().filter(|name| name != LOSS).map(|name| (name, 1.0)).collect();
    let own = metrics.len();
    if graph.output(crate::step::CONFUSION).is_some() {
        metrics.extend(["precision", "recall"].map(|name| (name.to_string(), 1.0)));
    }
    let counted = own..metrics.len();
    if graph.output(crate::step::RESIDUALS).is_some() {
        let own = |name: &&str| metrics.iter().any(|(known, _)| known == name);
        let new: Vec<&str> = residuals::NAMES.into_iter().filter(|name| !own(name)).collect();
        metrics.extend(new.into_iter().map(|name| (name.to_string(), 1.0)));
    }
    let of_residuals = counted.end..metrics.len();
    model.derive(1.0, &mut metrics);
    let better = |at: usize, name: &str| match (counted.contains(&at), of_residuals.contains(&at)) {
        (true, _) => Better::Higher,
        (_, true) => residuals::better(name),
        _ => model.better(name),
    };
    let metrics = metrics.iter().enumerate().map(|(at, (name, _))| WatchedMetric::new(name, better(at, name)));
    Ok([WatchedMetric::new(LOSS, Better::Lower)].into_iter().chain(metrics).collect())
}

fn read_loss_scale(train: &Settings, precision: Precision) -> Result<Option<f64>, SettingError> {
    match precision {
        Precision::F16 => loss_scale::read(train).map(Some),
        _ if train.has("loss_scale") => {
            let message = format!("has no effect with `precision = \"{}\"`", precision.name());
            Err(train.wrong("loss_scale", message, "leave it out, or write `precision = \"f16\"`"))
        }
        _ => Ok(None),
    }
}

fn read_rounding(train: &Settings, precision: Precision) -> Result<Rounding, SettingError> {
    match (train.choice("rounding", &["none", "stochastic"])?, precision) {
        ("none", _) => Ok(Rounding::None),
        (_, Precision::Bf16) => Ok(Rounding::Stochastic),
        (_, other) => {
            let message = format!("rounds weights to bf16, but `precision` is \"{}\"", other.name());
            Err(train.wrong("rounding", message, "leave it out, or write `precision = \"bf16\"`"))
        }
    }
}

fn no_offload(offload: Offload, device: &str) -> Error {
    let name = offload.name();
    Error::Unfit {
        message: format!(
            "`memory.offload` is \"{name}\", which is for GPUs: on the {device} all is in the host's memory"
        ),
        hint: "leave it out, or train with `--device cuda`; `memory.recompute` saves memory on any device".into(),
    }
}

fn no_tf32(device: &str) -> Error {
    let message = format!("`train.precision` is \"tf32\", which the device `{device}` does not have");
    Error::Unfit {
        message,
        hint: "write `precision = \"f32\"`, or \"bf16\"; TF32 is a way that some GPUs multiply".into(),
    }
}

fn read_precision(train: &Settings) -> Result<Precision, SettingError> {
    let name = train.choice("precision", &Precision::ALL.map(Precision::name))?;
    Ok(Precision::named(name).unwrap_or_default())
}
