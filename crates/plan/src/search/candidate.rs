//! A layout that may be chosen, and how a job file writes it.

use crate::collective::Algorithm;
use crate::device::Precision;
use crate::step_model::Layout;
use kolo_parallel::Recompute;
use kolo_parallel::mesh::DATA;
use kolo_parallel::recompute::table_text;
use std::sync::Arc;

/// How the tokens of a sample are shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sequence {
    /// Every rank has all of them.
    #[default]
    Whole,
    /// Among the ranks that share layers, between those.
    Tensor,
    /// Among ranks of their own, which exchange tokens for heads.
    Heads,
    /// Among ranks of their own, round which keys and values go.
    Context,
}

impl Sequence {
    /// As `parallel.sequence` has it.
    pub fn name(self) -> &'static str {
        match self {
            Sequence::Whole => "whole",
            Sequence::Tensor => "tensor",
            Sequence::Heads => "heads",
            Sequence::Context => "context",
        }
    }

    /// The axis that it adds to the mesh.
    pub fn axis(self) -> Option<&'static str> {
        match self {
            Sequence::Whole | Sequence::Tensor => None,
            Sequence::Heads => Some("sequence"),
            Sequence::Context => Some("context"),
        }
    }
}

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
        let counts = [Recompute::Blocks, Recompute::Selective].map(|what| (what, self.count(what)));
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
    pub sequence: Sequence,
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

    /// The layout for a batch of so many samples.
    pub fn layout(&self, batch: usize, precision: Precision, algorithm: Algorithm) -> Layout {
        let mut axes = vec![(DATA.to_string(), self.data)];
        if self.pipeline > 1 {
            axes.push(("pipeline".into(), self.pipeline));
        }
        if let Some(axis) = self.sequence.axis().filter(|_| self.tokens > 1) {
            axes.push((axis.into(), self.tokens));
        }
        if self.tensor > 1 {
            axes.push(("tensor".into(), self.tensor));
        }
        Layout {
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

    /// Keys of a job file with their values, in the order in which they are written. Those that a job need not write have their
    /// defaults: `None`.
    pub fn keys(&self) -> Vec<(&'static str, &'static str, Option<String>)> {
        let count = |value: usize, usual: usize| (value != usual).then(|| value.to_string());
        let text = |value: &str, usual: &str| (value != usual).then(|| format!("\"{value}\""));
        let own_tokens = self.sequence.axis().is_some() && self.tokens > 1;
        let (slices, tensor_slices) = match own_tokens {
            true => (self.tokens.next_power_of_two(), self.tensor.next_power_of_two()),
            false => (self.tensor.next_power_of_two(), 1),
        };
        vec![
            ("data", "grains", Some(self.grains().to_string())),
            ("parallel", "tensor", count(self.tensor, 1)),
            ("parallel", "slices", count(slices, 1)),
            ("parallel", "sequence", text(self.sequence.name(), "whole")),
            ("parallel", "context", count(if own_tokens { self.tokens } else { 1 }, 1)),
            ("parallel", "tensor_slices", count(tensor_slices, 1)),
            ("parallel", "pipeline", count(self.pipeline, 1)),
            ("parallel", "schedule", text(self.schedule, "1f1b")),
            ("parallel", "chunks", count(self.chunks, 1)),
            // Stages are cut by cost: names of another layout would not fit.
            ("parallel", "stages", None),
            ("parallel", "zero", count(self.zero, 0)),
            ("memory", "recompute", text(self.recompute.name(), "none")),
            ("memory", "layers", self.layers.as_ref().map(|layers| layers.text())),
        ]
    }
}

impl Candidate {
    /// Every key with its value, as `--set` takes them.
    pub fn assignments(&self) -> Vec<String> {
        let keys = self.keys().into_iter();
        keys.map(|(section, key, value)| format!("{section}.{key}={}", value.as_deref().unwrap_or(usual(key))))
            .collect()
    }
}

/// What counts for a key that is not written.
fn usual(key: &str) -> &'static str {
    match key {
        "sequence" => "\"whole\"",
        "schedule" => "\"1f1b\"",
        "recompute" => "\"none\"",
        "layers" => "{}",
        "zero" => "0",
        "stages" => "[]",
        _ => "1",
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
            let tokens = if self.sequence == Sequence::Tensor { " (with tokens)" } else { "" };
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
