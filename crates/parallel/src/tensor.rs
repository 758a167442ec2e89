//! Tensor parallelism: the ranks along an axis share the layers of the model itself.
//!
//! Layers are split by columns and rows, attention by heads, tables and the cross-entropy by classes, convolutions by channels:
//! whatever the splits of the ops make cheapest ([`crate::partition`]). `slices` says how many parts a summed axis has. It
//! belongs to the job like its grains, so that any number of ranks that divides it gives the same bits, one among them.

use crate::mesh::Mesh;
use crate::partition::{Group, Rules, lower, plan};
use crate::strategy::{Facts, Key, KeyValue, Part, Purpose, Refusal, Strategy, StrategyKind};
use kolo_base::matches_pattern;
use kolo_graph::settings::{SettingError, Settings};
use kolo_graph::sources::Input;
use kolo_graph::{DType, Graph, InputRole};
use kolo_ops::cross_entropy_parts::SLICES_MAX;
use std::sync::Arc;

/// The axis along which layers are cut.
pub const TENSOR: &str = "tensor";

const RANKS: Key = Key {
    name: TENSOR,
    value: KeyValue::Count { default: 1, least: 1, most: SLICES_MAX },
    doc: "workers that share every layer: columns, rows, heads, classes, channels",
};
pub(crate) const SLICES: Key = Key {
    name: "slices",
    value: KeyValue::Count { default: 1, least: 1, most: SLICES_MAX },
    doc: "parts of a sum that workers may share, a power of two and a multiple of `tensor`; part of the job, as grains are",
};

pub(crate) const SEQUENCE: Key = Key {
    name: "sequence",
    value: KeyValue::Choice(&["whole", "tensor", "heads", "context"]),
    doc: "`tensor`: what is between layers (norms, dropout, residuals) is split along the sequence among the workers of `tensor`; `heads`: all but attention is, among those of `context`; `context`: attention is, too, and keys and values go round a ring",
};

/// With a sequence that has slices of its own.
pub(crate) const TENSOR_SLICES: Key = Key {
    name: "tensor_slices",
    value: KeyValue::Count { default: 1, least: 1, most: SLICES_MAX },
    doc: "`slices` of layers where those of the tokens are other ones (`sequence = \"heads\"` or `\"context\"`): a power of two and a multiple of `tensor`",
};

const WHOLE: Key = Key {
    name: "whole",
    value: KeyValue::Names,
    doc: "layers that every worker of `tensor` computes whole, such as `[\"h.0.*\", \"head\"]`; `*` stands for any text",
};

pub const KIND: StrategyKind = StrategyKind {
    name: "tensor",
    doc: "tensor parallelism: workers share every layer",
    keys: &[RANKS, SLICES, SEQUENCE, TENSOR_SLICES, WHOLE],
    read: |settings| Ok(read(settings)?.map(|one| Arc::new(one) as Arc<dyn Strategy>)),
};

fn read(settings: &Settings) -> Result<Option<Tensor>, SettingError> {
    let ranks = RANKS.count_within(settings)?;
    let sequence = SEQUENCE.choice(settings)?;
    let by_tokens = matches!(sequence, "heads" | "context");
    for key in [SLICES, TENSOR_SLICES] {
        let slices = key.count_within(settings)?;
        if !slices.is_power_of_two() {
            let (below, above) = (1 << slices.ilog2(), slices.next_power_of_two());
            let message = format!("is {slices}, which is no power of two");
            return Err(settings.wrong(key.name, message, format!("write {below} or {above}")));
        }
    }
    // Slices are those of the tokens then, and layers have others: what tokens are cut into must not depend on who shares layers.
    let key = if by_tokens { TENSOR_SLICES } else { SLICES };
    let (slices, own) = (key.count_within(settings)?, TENSOR_SLICES.count_within(settings)?);
    if own > 1 && !by_tokens {
        let message = format!("is {own}, but tokens have no slices of their own");
        let hint = format!("write `{} = {own}`, or `{} = \"context\"` beside it", SLICES.name, SEQUENCE.name);
        return Err(settings.wrong(TENSOR_SLICES.name, message, hint));
    }
    let (sequence, whole) = (sequence == "tensor", WHOLE.names(settings)?);
    Ok((ranks > 1 || slices > 1).then_some(Tensor { ranks, slices, key: key.name, sequence, whole }))
}

/// Tensor parallelism with its settings.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub ranks: usize,
    pub slices: usize,
    /// The key that says how many slices there are.
    pub key: &'static str,
    /// Activations between layers are cut along the sequence.
    pub sequence: bool,
    /// Names of layers that are not split.
    pub whole: Vec<String>,
}

impl Strategy for Tensor {
    fn name(&self) -> &'static str {
        KIND.name
    }
    fn part(&self) -> Part {
        Part::Model
    }
    fn written(&self) -> String {
        match self.ranks {
            1 => format!("parallel.{} = {}", self.key, self.slices),
            ranks => format!("parallel.{} = {ranks}", RANKS.name),
        }
    }
    fn axis(&self) -> Option<(&'static str, usize)> {
        Some((TENSOR, self.ranks))
    }
    fn check(&self, job: Facts, _: &[&dyn Strategy]) -> Result<(), Refusal> {
        if job.reproducible && !self.slices.is_multiple_of(self.ranks) {
            let (key, above) = (self.key, self.ranks.next_power_of_two());
            let hint = match (self.ranks.is_power_of_two(), self.slices >= above) {
                (true, _) => format!("write `{key} = {above}` beside it, or `job.reproducible = false`"),
                (false, true) => format!("use {} or {above} workers for it, or `job.reproducible = false`", above / 2),
                (false, false) => format!(
                    "use {} or {above} workers for it with as many `{key}`, or write `job.reproducible = false`",
                    above / 2
                ),
            };
            let message = format!(
                "is {}, but sums have {} slice{}: workers that share a sum need a slice each, so that its order is that of the job",
                self.ranks,
                self.slices,
                if self.slices == 1 { "" } else { "s" }
            );
            return Err(Refusal::of_key(&RANKS, message, hint));
        }
        Ok(())
    }
    fn split(&self, graph: Graph, training: &Graph, purpose: Purpose, mesh: &Mesh) -> Result<Graph, Refusal> {
        let (ranks, rank) = (mesh.size(TENSOR), mesh.coordinate(TENSOR));
        let slices = if self.slices.is_multiple_of(ranks) { self.slices } else { ranks };
        let tokens = |graph: &Graph| self.sequence.then(|| tokens_of(graph)).flatten();
        let whole = whole_params(training, &self.whole)?;
        let rules = match purpose {
            // Weights lie as training left them.
            Purpose::Evaluation { .. } => {
                let rules = Rules { tokens: tokens(training), whole, ..Rules::default() };
                let trained = plan(training, slices, &rules);
                Rules { fixed: trained.named(training), tokens: tokens(&graph), ..Rules::default() }
            }
            Purpose::Training | Purpose::Server => Rules { tokens: tokens(&graph), whole, ..Rules::default() },
        };
        let plan = plan(&graph, slices, &rules);
        Ok(lower(&graph, &plan, &Group { axis: TENSOR.into(), ranks, rank }))
    }
    fn layout(&self) -> Vec<(&'static str, usize)> {
        vec![(self.key, self.slices)]
    }
}

/// Samples and tokens of a grain: the shape of its only kind of input that is a sequence of whole numbers.
pub(crate) fn tokens_of(graph: &Graph) -> Option<(usize, usize)> {
    let sequence = |op: &Input| match op.shape[..] {
        [samples, tokens] if op.role == InputRole::Data && op.dtype == DType::I32 => Some((samples, tokens)),
        _ => None,
    };
    graph.inputs().find_map(|(_, op)| sequence(op))
}

/// The parameters of the layers that these patterns name; an error for one that names none.
fn whole_params(graph: &Graph, patterns: &[String]) -> Result<Vec<String>, Refusal> {
    let mut found = Vec::new();
    for pattern in patterns {
        let before = found.len();
        let fits = |name: &str| {
            let layer = name.rsplit_once('.').map_or("", |(layer, _)| layer);
            [name, layer].iter().any(|text| matches_pattern(pattern, text))
        };
        found.extend(graph.params().filter(|(_, op)| fits(&op.name)).map(|(_, op)| op.name.clone()));
        if found.len() == before {
            let names: Vec<&str> = graph.params().map(|(_, op)| op.name.as_str()).take(6).collect();
            let message = format!("names \"{pattern}\", which is no layer or parameter of the model");
            return Err(Refusal::of_key(&WHOLE, message, format!("parameters are {} …", names.join(", "))));
        }
    }
    Ok(found)
}
