//! What a strategy is: a way to spread a job's work over its workers, declared once and registered in a list.
//!
//! A [`StrategyKind`] is an entry of the registry: a name, a line about it, the keys of `[parallel]` that it reads, and a
//! reader. A [`Strategy`] is one that a job has chosen, with its settings: the axis it adds to the mesh, what it refuses, its
//! rewrite, where parameters live, which lane runs its collectives. [`crate::Parallel`] is all that a job has chosen.
//!
//! Nobody outside this crate asks for a strategy by its name. A new one is one file and one line of [`STRATEGIES`], or of the
//! list that a program of one's own hands to `Job::read_among`; `crates/train/tests/train/strategies.rs` brings one from
//! outside.

use crate::layers::Layers;
use crate::mesh::Mesh;
use crate::{central, data, narrow, pipeline, sequence, servers, spatial, tensor, zero};
use kolo_comm::{Communicator, Fault};
use kolo_exec::{Collectives, ExchangeError, Memory, Order};
use kolo_graph::Graph;
use kolo_graph::settings::{Setting, SettingError, Settings};
use std::sync::Arc;

/// All strategies, in the order in which their keys are read.
pub const STRATEGIES: &[StrategyKind] = &[
    data::KIND,
    zero::KIND,
    central::KIND,
    servers::KIND,
    narrow::KIND,
    tensor::KIND,
    sequence::KIND,
    spatial::KIND,
    pipeline::strategy::KIND,
];

/// An entry of the registry.
#[derive(Clone, Copy, Debug)]
pub struct StrategyKind {
    pub name: &'static str,
    /// One line about it.
    pub doc: &'static str,
    /// What it reads of `[parallel]`. Several strategies may read the same key.
    pub keys: &'static [Key],
    /// The strategy with its settings, if the job chooses it.
    pub read: fn(&Settings) -> Result<Option<Arc<dyn Strategy>>, SettingError>,
}

/// A key of `[parallel]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Key {
    pub name: &'static str,
    pub value: KeyValue,
    /// Part of the job, as grains are: another value gives other bits. Others say who does the work.
    pub of_job: bool,
    /// What it does.
    pub doc: &'static str,
}

/// What may be written for a key, and what counts if nothing is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KeyValue {
    Flag {
        default: bool,
    },
    /// A reader refuses what exceeds `most` in its own words.
    Count {
        default: usize,
        least: usize,
        most: usize,
    },
    Number {
        default: f64,
        low: f64,
        high: f64,
    },
    /// The first is the default.
    Choice(&'static [&'static str]),
    Text {
        default: &'static str,
    },
    /// A list of names, empty by default.
    Names,
    /// Two counts, of rows and of columns, or one of rows; one each by default.
    Pair {
        most: usize,
    },
    /// A table of layers, empty by default.
    Layers,
}

impl Key {
    /// Reads the key and forgets its value: a key that was read is known, and part of what ranks must agree on.
    pub(crate) fn touch(&self, settings: &Settings) -> Result<(), SettingError> {
        match self.value {
            KeyValue::Flag { .. } => self.flag(settings).map(drop),
            KeyValue::Count { .. } => self.count(settings).map(drop),
            KeyValue::Number { .. } => self.number(settings).map(drop),
            KeyValue::Choice(_) => self.choice(settings).map(drop),
            KeyValue::Text { .. } => self.text(settings).map(drop),
            KeyValue::Names => self.names(settings).map(drop),
            KeyValue::Pair { .. } => self.pair(settings).map(drop),
            KeyValue::Layers => Layers::read(settings).map(drop),
        }
    }

    /// What counts if nothing is written, as `--set` takes it.
    pub fn default_text(&self) -> String {
        match self.value {
            KeyValue::Flag { default } => default.to_string(),
            KeyValue::Count { default, .. } => default.to_string(),
            KeyValue::Number { default, .. } => default.to_string(),
            KeyValue::Choice(choices) => format!("{:?}", choices[0]),
            KeyValue::Text { default } => format!("{default:?}"),
            KeyValue::Names => "[]".into(),
            KeyValue::Pair { .. } => "[1, 1]".into(),
            KeyValue::Layers => "{}".into(),
        }
    }

    /// The count that counts if nothing is written.
    pub fn default_count(&self) -> usize {
        match self.value {
            KeyValue::Count { default, .. } => default,
            other => panic!("key `{}` is {other:?}, no count", self.name),
        }
    }

    /// The largest count that may be written.
    pub fn most(&self) -> Option<usize> {
        match self.value {
            KeyValue::Count { most, .. } | KeyValue::Pair { most } => Some(most),
            _ => None,
        }
    }

    pub fn flag(&self, settings: &Settings) -> Result<bool, SettingError> {
        match self.value {
            KeyValue::Flag { default } => settings.bool(self.name, default),
            other => panic!("key `{}` is {other:?}, no flag", self.name),
        }
    }

    pub fn count(&self, settings: &Settings) -> Result<usize, SettingError> {
        match self.value {
            KeyValue::Count { default, least, .. } => settings.count(self.name, default, least),
            other => panic!("key `{}` is {other:?}, no count", self.name),
        }
    }

    /// The same, refused if it is more than the key allows.
    pub fn count_within(&self, settings: &Settings) -> Result<usize, SettingError> {
        let count = self.count(settings)?;
        match self.value {
            KeyValue::Count { most, .. } if count > most => {
                let message = format!("is {count}, but at most {most} are possible");
                Err(settings.wrong(self.name, message, format!("write a number up to {most}")))
            }
            _ => Ok(count),
        }
    }

    pub fn number(&self, settings: &Settings) -> Result<f64, SettingError> {
        match self.value {
            KeyValue::Number { default, low, high } => settings.float_in(self.name, default, low, high),
            other => panic!("key `{}` is {other:?}, no number", self.name),
        }
    }

    pub fn choice(&self, settings: &Settings) -> Result<&'static str, SettingError> {
        match self.value {
            KeyValue::Choice(choices) => settings.choice(self.name, choices),
            other => panic!("key `{}` is {other:?}, no choice", self.name),
        }
    }

    pub fn text(&self, settings: &Settings) -> Result<String, SettingError> {
        match self.value {
            KeyValue::Text { default } => settings.text(self.name, default),
            other => panic!("key `{}` is {other:?}, no text", self.name),
        }
    }

    pub fn names(&self, settings: &Settings) -> Result<Vec<String>, SettingError> {
        match self.value {
            KeyValue::Names => settings.texts(self.name, "[\"h.3\"]"),
            other => panic!("key `{}` is {other:?}, no list of names", self.name),
        }
    }

    /// Rows and columns; a number alone is of rows.
    pub fn pair(&self, settings: &Settings) -> Result<[usize; 2], SettingError> {
        let KeyValue::Pair { most } = self.value else { panic!("key `{}` is {:?}, no pair", self.name, self.value) };
        let pair = match settings.peek(self.name) {
            Some(Setting::Int(_)) => [settings.count(self.name, 1, 1)?, 1],
            _ => settings.counts(self.name, &[1, 1])?.try_into().map_err(|list: Vec<usize>| {
                let message = format!("must be two numbers, of rows and of columns, but is {list:?}");
                settings.wrong(self.name, message, format!("write `{} = [2, 1]` for two strips", self.name))
            })?,
        };
        match pair.iter().find(|count| **count > most) {
            Some(count) => {
                let message = format!("is {pair:?}, but at most {most} are possible, not {count}");
                Err(settings.wrong(self.name, message, format!("write numbers up to {most}")))
            }
            None => Ok(pair),
        }
    }

    /// A row of the guide's table of keys: name, values, default, meaning.
    pub fn row(&self) -> String {
        let (values, default) = match self.value {
            KeyValue::Flag { default } => ("bool".into(), default.to_string()),
            KeyValue::Count { default, least, most } => {
                let values = match most - least {
                    0 => least.to_string(),
                    1 => format!("{least} or {most}"),
                    _ if most == usize::MAX => format!("{least} or more"),
                    _ => format!("{least} to {most}"),
                };
                (values, default.to_string())
            }
            KeyValue::Number { default, low, high } => (format!("{low} to {high}"), default.to_string()),
            KeyValue::Choice(choices) => {
                let all: Vec<String> = choices.iter().map(|choice| format!("`{choice}`")).collect();
                (all.join(" "), all[0].clone())
            }
            KeyValue::Text { default } => ("text".into(), format!("`{default}`")),
            KeyValue::Names => ("list of names".into(), "none".into()),
            KeyValue::Layers => ("table".into(), "none".into()),
            KeyValue::Pair { most } => (format!("[rows, columns], 1 to {most} each"), "[1, 1]".into()),
        };
        format!("| `{}` | {values} | {default} | {} |", self.name, self.doc)
    }
}

/// The part of a step that a strategy changes. Rewrites run in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// What the model computes: splits it along an axis of its own, recomputes some of it. A job may choose several.
    Model,
    /// How gradients become new parameters: who sums, who updates. A job has exactly one.
    Update,
    /// How bytes travel. A job has one at most.
    Transfer,
}

/// What a graph is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A step of a worker.
    Training,
    /// The forward pass of this many samples.
    Evaluation { batch: usize },
    /// A server's part of a step.
    Server,
}

/// The graph of training, whatever a graph is wanted for.
#[derive(Clone, Copy, Debug)]
pub struct TrainingGraphs<'g> {
    /// Of a single worker.
    pub whole: &'g Graph,
    /// As the strategies before this one have split it for this rank.
    pub here: &'g Graph,
}

impl<'g> TrainingGraphs<'g> {
    /// For the first strategy.
    pub fn new(whole: &'g Graph) -> Self {
        Self { whole, here: whole }
    }
}

/// Where a rank's parameters live. State always lies in a rank's own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Home {
    /// In its own memory.
    Own,
    /// In memory of its own that the others' collectives reach.
    Reached,
    /// In one memory for all ranks of a host, which the first of them initialises.
    OnePerHost,
}

impl Home {
    /// Whether this rank gives its parameters their first values.
    pub fn initialises(self, rank: usize) -> bool {
        self != Home::OnePerHost || rank == 0
    }

    /// Whether the parameters of all ranks of a host are the same memory.
    pub fn is_shared(self) -> bool {
        self == Home::OnePerHost
    }
}

/// Where parameters are to be allocated.
#[derive(Debug)]
pub struct Allocation<'a> {
    pub bytes: usize,
    pub world: &'a Communicator,
    pub lane: &'a dyn Collectives,
}

/// Why a strategy does not go with a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Where what is at fault is written, if not at a key of `[parallel]`.
    pub place: Option<String>,
    /// The key of `[parallel]` at fault, which the message then goes on from; the message stands alone if there is none.
    pub key: Option<&'static str>,
    pub message: String,
    pub hint: String,
}

impl Refusal {
    pub fn of_key(key: &Key, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { place: None, key: Some(key.name), message: message.into(), hint: hint.into() }
    }

    pub fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { place: None, key: None, message: message.into(), hint: hint.into() }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}\n  hint: {}", self.message, self.hint)
    }
}

/// What strategies may want to know of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The job promises its bits.
    pub reproducible: bool,
    /// The job may end before its last step.
    pub early_stop: bool,
    /// Gradients are scaled on their way, and a step may turn out to change nothing.
    pub scales_gradients: bool,
    /// Some parameters are not trained.
    pub freezes: bool,
}

/// A strategy that a job has chosen, with its settings.
pub trait Strategy: std::fmt::Debug + Send + Sync {
    /// The name of its kind.
    fn name(&self) -> &'static str;

    fn part(&self) -> Part;

    /// How a job file chooses it, such as `parallel.zero = 1`.
    fn written(&self) -> String;

    /// Whether it is what a job does that chooses nothing else for the same part.
    fn is_default(&self) -> bool {
        false
    }

    /// The axes that it adds to the mesh, with their sizes. Whatever the axes of all strategies leave is the data axis.
    fn axes(&self) -> Vec<(&'static str, usize)> {
        Vec::new()
    }

    /// Whether its axes come from `[parallel.layers]`, which a single worker takes as the parts of its own work.
    fn is_of_layers(&self) -> bool {
        false
    }

    /// Whether it gives workers parts of the model: what it adds to the mesh is more than one rank.
    fn shares_model(&self) -> bool {
        self.axes().iter().any(|(_, ranks)| *ranks > 1)
    }

    /// Of a strategy that changes the model: whether it gives ranks whole layers, rather than a part of every layer.
    fn cuts_between_layers(&self) -> bool {
        false
    }

    /// Refuses a job, or another strategy that it has chosen.
    fn check(&self, _job: Facts, _others: &[&dyn Strategy]) -> Result<(), Refusal> {
        Ok(())
    }

    /// The largest norm of a gradient that the graph for this purpose keeps to, given the job's.
    fn clip(&self, clip: Option<f32>, _purpose: Purpose) -> Option<f32> {
        clip
    }

    /// The graph that a rank runs, from that of a single worker or of the strategies before it.
    fn rewrite(&self, graph: Graph, _purpose: Purpose, _mesh: &Mesh) -> Graph {
        graph
    }

    /// The graph of an evaluation, from that of a single worker or of the strategies before it. `training` is the graph of
    /// training as it was before this kind of rewrite; only who [shards weights](Strategy::shards_weights) is asked.
    fn rewrite_evaluation(&self, graph: Graph, _training: &Graph, _mesh: &Mesh) -> Graph {
        graph
    }

    /// Whether ranks along the data axis have parameters in shares.
    fn shards_weights(&self) -> bool {
        false
    }

    /// Of a strategy that changes the model: the graph of a rank, before ops are fused. Whatever the purpose, parameters lie as
    /// training has them.
    fn split(
        &self,
        graph: Graph,
        _training: TrainingGraphs<'_>,
        purpose: Purpose,
        mesh: &Mesh,
    ) -> Result<Graph, Refusal> {
        Ok(self.rewrite(graph, purpose, mesh))
    }

    /// Of a strategy that changes the model: proves that the graphs which its [`split`](Strategy::split) of this one gives the ranks
    /// run together, with so many grains on each data rank.
    fn prove(&self, _graph: &Graph, _training: &Graph, _mesh: &Mesh, _grains: usize) -> Result<(), Refusal> {
        Ok(())
    }

    /// The schedule of a pipeline for so many grains.
    fn schedule(&self, _mesh: &Mesh, _grains: usize) -> Result<Option<pipeline::PipelineSchedule>, Refusal> {
        Ok(None)
    }

    /// In which order a rank works on so many grains, if not grain by grain.
    fn order(&self, _mesh: &Mesh, _grains: usize) -> Result<Option<Order>, Refusal> {
        Ok(None)
    }

    /// Whether ranks take turns in grains: what they compute at a time are neighbours. Otherwise each has a run of them.
    fn takes_turns(&self) -> bool {
        false
    }

    /// Whether each rank sums a part of the first half of all grains and a part of the second apart from each other.
    fn goes_both_ways(&self) -> bool {
        false
    }

    fn home(&self) -> Home {
        Home::Own
    }

    /// Zeroed memory for a rank's parameters. All ranks call it together.
    fn allocate(&self, at: &Allocation<'_>) -> Result<Memory, ExchangeError> {
        match self.home() {
            Home::Own => Ok(Memory::new(at.bytes)),
            Home::Reached => at.lane.memory(at.bytes),
            Home::OnePerHost => Ok(central::memory_at_first(at.world, at.bytes)?),
        }
    }

    /// The lane for the exchanges along the axes of a mesh, if it wants another than [`crate::CommLane`]. All ranks call it
    /// together.
    fn lane(&self, _mesh: &Mesh, _world: &Arc<Communicator>) -> Option<Result<Arc<dyn Collectives>, Fault>> {
        None
    }

    /// What to say if the executor cannot update every parameter where it is, and this strategy needs that.
    fn needs_updates_in_place(&self) -> Option<Refusal> {
        None
    }

    /// Lines about who has what, for whoever asks how a job is split.
    fn explain(&self) -> Vec<String> {
        Vec::new()
    }

    /// What it adds to the report's `layout`, beside the sizes of the axes.
    fn layout(&self) -> Vec<(&'static str, usize)> {
        Vec::new()
    }
}
