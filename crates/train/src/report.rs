//! The report of a run, as JSON. Keys may be added, none renamed.

use crate::compared::ComparedPart;
use crate::confusion::Classification;
use crate::device_use::DeviceUse;
use crate::quantiles::Quantiles;
use crate::rate_scaling::RateScaling;
use crate::supply::Loader;
use crate::trainer::Evaluation;
use kolo_data::load_times::{LoadTimes, MESSAGES_MAX};
use kolo_parallel::Roles;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepTimes {
    pub median: f64,
    pub p95: f64,
}

impl StepTimes {
    /// From milliseconds of every step; the first, which touches the memory, is left out if there are more.
    pub fn of(all: &[f64]) -> Self {
        Self::from(&Quantiles::of(all))
    }
}

impl From<&Quantiles> for StepTimes {
    fn from(all: &Quantiles) -> Self {
        let [median, p95] = all.at([0.5, 0.95]);
        Self { median, p95 }
    }
}

/// How long steps waited for their samples, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DataWait {
    pub median: f64,
    pub p95: f64,
    /// The part of all steps' time, from 0 to 1.
    pub share: f64,
}

impl DataWait {
    /// From milliseconds of every step, and what each of them waited.
    pub fn of(steps: &Quantiles, waits: &Quantiles) -> Self {
        let StepTimes { median, p95 } = waits.into();
        let (all, waited) = (steps.sum(), waits.sum());
        Self { median, p95, share: if all > 0.0 { waited / all } else { 0.0 } }
    }
}

/// What a sample of files took to load, in milliseconds of a loader's time: means over the samples that this rank made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DataStages {
    pub read: f64,
    pub decode: f64,
    pub transform: f64,
    /// Samples that were made, for evaluations too.
    pub samples: u64,
    /// How many of them came out of the cache.
    pub cached: u64,
}

impl DataStages {
    pub fn of(times: &LoadTimes) -> Self {
        let each = |ns: u64| ns as f64 / 1e6 / times.samples.max(1) as f64;
        Self {
            read: each(times.read_ns),
            decode: each(times.decode_ns),
            transform: each(times.transform_ns),
            samples: times.samples,
            cached: times.cached,
        }
    }
}

/// Samples that could not be read, and for which others stood in (`data.on_error = "skip"`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// How often, on all ranks.
    pub samples: u64,
    /// What was wrong with the first of them, in the order of samples.
    pub messages: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PeakBytes {
    pub rss: u64,
    pub device: u64,
    /// What the first rank has in memory after the last step, by kind; empty on a device with memory of its own.
    pub kinds: BTreeMap<&'static str, u64>,
}

/// What the planner said beforehand.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Planned {
    pub step_ms: f64,
    pub bytes: u64,
    pub flops: u64,
    /// What the first rank computes, by the rates below.
    pub compute_ms: f64,
    /// Its wait for other ranks: exchanges, and the bubble of a pipeline.
    pub waiting_ms: f64,
    /// The parts of it: exchanges along each axis, and waiting for other stages along `pipeline`.
    pub waits_ms: BTreeMap<String, f64>,
    /// What the first rank holds, by kind.
    pub memory: BTreeMap<&'static str, u64>,
    /// Operations and bytes per second of one thread, as they were measured beside the plan.
    pub flops_per_s: f64,
    pub bytes_per_s: f64,
    /// What the model of a step that plans layouts says; `None` for what it does not know, such as servers.
    pub model: Option<PlannedModel>,
}

/// A step by the model that plans layouts, and the device that it was planned on: calibration changes its rates.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PlannedModel {
    pub compute_ms: f64,
    pub waits_ms: BTreeMap<String, f64>,
    pub flops_per_s: f64,
    pub bytes_per_s: f64,
    pub launch_us: f64,
}

/// Where a run stood when it was evaluated, or when it ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EpochRow {
    pub epoch: usize,
    /// Steps made by then; 0 in checkpoints of versions that did not save it.
    #[serde(default)]
    pub step: usize,
    /// Since training began.
    pub seconds: f64,
    /// The mean over the steps since the row before.
    #[serde(deserialize_with = "number_or_null")]
    pub loss: f64,
    #[serde(deserialize_with = "numbers_or_null")]
    pub metrics: BTreeMap<String, f64>,
}

/// JSON has no NaN and no infinities: they were written as null.
pub(crate) fn number_or_null<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

pub(crate) fn numbers_or_null<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let read: BTreeMap<String, Option<f64>> = BTreeMap::deserialize(from)?;
    Ok(read.into_iter().map(|(name, value)| (name, value.unwrap_or(f64::NAN))).collect())
}

impl EpochRow {
    pub fn new((epoch, step): (usize, usize), seconds: f64, loss: f64, evaluation: Option<&Evaluation>) -> Self {
        let mut metrics: BTreeMap<String, f64> = evaluation.iter().flat_map(|e| e.metrics.iter().cloned()).collect();
        if let Some(evaluation) = evaluation {
            metrics.insert("eval_loss".into(), evaluation.loss);
        }
        Self { epoch, step, seconds, loss, metrics }
    }
}

/// How the workers got on together. Times are of one step, medians over the steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Communication {
    pub transport: String,
    /// The mean over ranks of the time spent in collectives.
    pub busy_ms: f64,
    /// The mean over ranks of the time for which compute stood still and waited.
    pub exposed_ms: f64,
    /// The part of `busy_ms` that was hidden behind compute, from 0 to 1.
    pub hidden: f64,
    pub slowest_rank: usize,
    pub ranks: Vec<RankTimes>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankTimes {
    pub rank: usize,
    pub host: String,
    /// A step without the time for which it waited.
    pub compute_ms: f64,
    pub busy_ms: f64,
    pub exposed_ms: f64,
    /// A step's wait for its samples.
    pub data_wait_ms: f64,
    /// Samples that it could not read.
    pub skipped: u64,
    pub peak_rss: u64,
    /// What it was planned to hold at most; 0 if nobody said.
    pub planned_bytes: u64,
    /// Bytes that it sends in a step, by the axis of the mesh.
    pub sent_bytes: BTreeMap<String, u64>,
    /// The parts of `exposed_ms`, by the axis of the mesh; along `pipeline` that is mostly the bubble.
    pub waited_ms: BTreeMap<String, f64>,
    /// What was wrong with some of the samples that it could not read, with their numbers.
    #[serde(skip)]
    pub skip_messages: Vec<(usize, String)>,
}

/// A group of workers that an elastic job had.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GenerationRow {
    pub generation: u32,
    /// The step that it began with.
    pub step: usize,
    pub workers: usize,
    /// Who was lost before it, and why.
    pub lost: Vec<String>,
    /// Milliseconds from the end of the generation before, as the first rank saw it, to the first step of this one.
    pub recovery_ms: u64,
    /// Of these, until the coordinator had formed the group.
    pub agreement_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub job: String,
    pub steps: usize,
    pub epochs: f64,
    pub loss: f64,
    pub metrics: BTreeMap<String, f64>,
    /// Of a classifier that was evaluated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub classification: Option<Classification>,
    pub step_ms: StepTimes,
    pub data_wait_ms: DataWait,
    /// Of a source that reads files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_stages_ms: Option<DataStages>,
    /// Of a run that skipped samples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<Skipped>,
    pub loader: Loader,
    pub samples_per_s: f64,
    pub tokens_per_s: Option<f64>,
    pub weights: String,
    pub workers: usize,
    /// The size of every axis of the mesh, and what the job's strategies add.
    pub layout: BTreeMap<&'static str, usize>,
    pub device: String,
    pub threads: usize,
    /// Of a device that tells of itself, as the first rank's did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_use: Option<DeviceUse>,
    pub peak_bytes: PeakBytes,
    pub planned: Planned,
    /// The plan beside what was measured, part by part.
    pub compared: Vec<ComparedPart>,
    pub grains: usize,
    /// What the step was computed in.
    pub precision: &'static str,
    /// The factor of gradients as the run left it, in f16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f32>,
    /// Steps whose gradient overflowed and that changed nothing, in f16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped_steps: Option<usize>,
    pub learning_rate: RateScaling,
    /// What the backward pass computed again.
    pub recompute: &'static str,
    pub seed: u64,
    pub version: String,
    /// Why the run ended: done, early stop, interrupted.
    pub ended: String,
    pub epochs_per_s: f64,
    /// Each evaluation of the run.
    pub history: Vec<EpochRow>,
    /// What the run was to leave on disk and could not; the command fails then.
    #[serde(skip)]
    pub unwritten: Option<String>,
    /// With parameter servers only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asynchronous: Option<Roles>,
    /// Of an elastic job only: each group of workers it had.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub generations: Vec<GenerationRow>,
    /// With several workers only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub communication: Option<Communication>,
}

impl Report {
    /// Adds what this rank and, with several workers, all others could not read.
    pub(crate) fn count_skipped(&mut self, own: Option<LoadTimes>) {
        let own = own.unwrap_or_default();
        let (samples, messages) = match &self.communication {
            Some(communication) => {
                let of_all = communication.ranks.iter().flat_map(|rank| rank.skip_messages.iter().cloned());
                (communication.ranks.iter().map(|rank| rank.skipped).sum(), of_all.collect())
            }
            None => (own.skipped, own.skip_messages),
        };
        let by_sample: BTreeMap<usize, String> = messages.into_iter().collect();
        let mut messages: Vec<String> = Vec::new();
        for message in by_sample.into_values() {
            if messages.len() < MESSAGES_MAX && !messages.contains(&message) {
                messages.push(message);
            }
        }
        self.skipped = (samples > 0).then_some(Skipped { samples, messages });
    }
}
