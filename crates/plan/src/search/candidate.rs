//! A layout that may be chosen, and how a job file writes it.

use crate::collective::Algorithm;
use crate::device::Precision;
use crate::step_model::ParallelLayout;
use kolo_parallel::Recompute;
use kolo_parallel::axes::{DATA, PIPELINE, TENSOR};
use kolo_parallel::keys::{self, SequenceSplit};
use kolo_parallel::recompute::table_text;
use kolo_parallel::strategy::Key;
use std::sync::Arc;

/// What each layer of a model computes again.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LayerChoices {
    /// In the order of the forward pass, by name.
    pub layers: Vec<(String, Recompute)>,
}

impl LayerChoices {
    pub fn count(&self, what: Recompute) -> usize {
        self.layers.iter().filter(|(_, own)| *own == what).count()
    }

    /// As `memory.layers` has it.
    pub fn text(&self) -> String {
        table_text(&self.layers.iter().map(|(name, what)| (name.as_str(), *what)).collect::<Vec<_>>())
    }
}

/// `blocks of 12 of 32 layers, selective of 4`.
impl std::fmt::Display for LayerChoices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let counts = [Recompute::Full, Recompute::Blocks, Recompute::Selective].map(|what| (what, self.count(what)));
        for (at, (what, count)) in counts.into_iter().filter(|(_, count)| *count > 0).enumerate() {
            let all = if at == 0 { format!(" of {} layers", self.layers.len()) } else { String::new() };
            write!(f, "{}{} of {count}{all}", if at == 0 { "" } else { ", " }, what.name())?;
        }
        Ok(())
    }
}

/// One way to lay a job out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate {
    pub data: usize,
    pub pipeline: usize,
    pub tensor: usize,
    /// Ranks that share the tokens of a sample, beside those that share layers.
    pub tokens: usize,
    pub sequence: SequenceSplit,
    /// Slices of layers, and of tokens where `sequence` gives them their own, that a job computes at least: as many as ranks share
    /// them if those are more.
    pub slices: [usize; 2],
    pub zero: usize,
    /// Of every layer; nothing where each has a choice of its own.
    pub recompute: Recompute,
    pub layers: Option<Arc<LayerChoices>>,
    /// Micro-batches of each data rank.
    pub micro_batches: usize,
    /// The family of the pipeline's schedule.
    pub schedule: &'static str,
    pub chunks: usize,
}

impl Candidate {
    pub fn devices(&self) -> usize {
        self.data * self.pipeline * self.tensor * self.tokens
    }

    pub fn grains(&self) -> usize {
        self.data * self.micro_batches
    }

    /// Whether it gives the same weights as another one, to the bit: the grains, the slices of sums, and how tokens are shared are part
    /// of what a job computes.
    pub fn has_bits_of(&self, own: &Candidate) -> bool {
        let [slices, _] = own.slices;
        self.grains() == own.grains()
            && slices.is_multiple_of(self.tensor)
            && (self.sequence, self.tokens) == (own.sequence, own.tokens)
    }

    /// The layout for a batch of so many samples.
    pub fn layout(&self, batch: usize, precision: Precision, algorithm: Algorithm) -> ParallelLayout {
        let mut axes = vec![(DATA.to_string(), self.data)];
        if self.pipeline > 1 {
            axes.push((PIPELINE.into(), self.pipeline));
        }
        if let Some(axis) = self.sequence.axis().filter(|_| self.tokens > 1) {
            axes.push((axis.into(), self.tokens));
        }
        if self.tensor > 1 {
            axes.push((TENSOR.into(), self.tensor));
        }
        ParallelLayout {
            axes,
            zero: self.zero,
            chunks: self.chunks,
            schedule: self.schedule.into(),
            micro_batch: batch / self.grains(),
            micro_batches: self.micro_batches,
            recompute: self.recompute,
            precision,
            algorithm,
        }
    }

    /// What it writes under `[parallel]`; `None` for what is always left to its default.
    fn parallel_keys(&self) -> [(Key, Option<String>); 10] {
        let count = |key: Key, value: usize| (key, Some(value.to_string()));
        let text = |key: Key, value: &str| (key, Some(format!("{value:?}")));
        let own_tokens = self.sequence.axis().is_some();
        let [of_layers, of_tokens] = self.slices;
        let of_layers = of_layers.max(self.tensor.next_power_of_two());
        let (slices, tensor_slices) = match own_tokens {
            true => (of_tokens.max(self.tokens.next_power_of_two()), of_layers),
            false => (of_layers, 1),
        };
        [
            count(keys::TENSOR, self.tensor),
            count(keys::SLICES, slices),
            text(keys::SEQUENCE, self.sequence.name()),
            count(keys::CONTEXT, if own_tokens { self.tokens } else { 1 }),
            count(keys::TENSOR_SLICES, tensor_slices),
            count(keys::PIPELINE, self.pipeline),
            text(keys::SCHEDULE, self.schedule),
            count(keys::CHUNKS, self.chunks),
            // Stages are cut by cost: names of another layout would not fit.
            (keys::STAGES, None),
            count(keys::ZERO, self.zero),
        ]
    }

    /// Keys of a job file with their values, in the order in which they are written, and with their defaults.
    fn all_keys(&self) -> Vec<(&'static str, &'static str, Option<String>, String)> {
        let own = self.parallel_keys().map(|(key, value)| ("parallel", key.name, value, key.default_text()));
        let grains = self.grains().to_string();
        let mut all = vec![("data", "grains", Some(grains), String::new())];
        all.extend(own);
        let [again, nothing] = [self.recompute, Recompute::None].map(|what| format!("{:?}", what.name()));
        all.push(("memory", "recompute", Some(again), nothing));
        all.push(("memory", "layers", self.layers.as_ref().map(|layers| layers.text()), "{}".into()));
        all
    }

    /// Keys of a job file with their values, in the order in which they are written. Those that a job need not write have their
    /// defaults: `None`.
    pub fn keys(&self) -> Vec<(&'static str, &'static str, Option<String>)> {
        let own = self.all_keys().into_iter();
        own.map(|(section, key, value, usual)| (section, key, value.filter(|value| *value != usual))).collect()
    }

    /// Every key with its value, as `--set` takes them.
    pub fn assignments(&self) -> Vec<String> {
        let own = self.all_keys().into_iter();
        own.map(|(section, key, value, usual)| format!("{section}.{key}={}", value.unwrap_or(usual))).collect()
    }
}

/// `8 data × 2 pipeline (1f1b) × 4 tensor, ZeRO-1, recompute blocks, 16 micro-batches`.
impl std::fmt::Display for Candidate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} data", self.data)?;
        if self.pipeline > 1 {
            let chunks = if self.chunks > 1 { format!(", {} chunks", self.chunks) } else { String::new() };
            write!(f, " × {} pipeline ({}{chunks})", self.pipeline, self.schedule)?;
        }
        if self.tokens > 1 {
            write!(f, " × {} {}", self.tokens, self.sequence.name())?;
        }
        if self.tensor > 1 {
            let tokens = if self.sequence == SequenceSplit::Tensor { " (with tokens)" } else { "" };
            write!(f, " × {} tensor{tokens}", self.tensor)?;
        }
        if self.zero > 0 {
            write!(f, ", ZeRO-{}", self.zero)?;
        }
        if self.recompute != Recompute::None {
            write!(f, ", recompute {}", self.recompute.name())?;
        }
        if let Some(layers) = &self.layers {
            write!(f, ", recompute {layers}")?;
        }
        write!(f, ", {} micro-batch{}", self.micro_batches, if self.micro_batches == 1 { "" } else { "es" })
    }
}
