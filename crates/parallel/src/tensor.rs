//! Tensor parallelism: the ranks along an axis share the layers of the model itself.
//!
//! Layers are split by columns and rows, attention by heads, tables and the cross-entropy by classes, convolutions by channels:
//! whatever the splits of the ops make cheapest ([`crate::partition`]). `slices` says how many parts a summed axis has. It
//! belongs to the job like its grains, so that any number of ranks that divides it gives the same bits, one among them.

use crate::mesh::Mesh;
use crate::partition::{Group, Rules, lower, plan};
use crate::strategy::{Facts, Key, KeyValue, Part, Purpose, Refusal, Strategy, StrategyKind};
use kolo_graph::settings::Settings;
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
const SLICES: Key = Key {
    name: "slices",
    value: KeyValue::Count { default: 1, least: 1, most: SLICES_MAX },
    doc: "parts of a sum that workers may share, a power of two and a multiple of `tensor`; part of the job, as grains are",
};

const SEQUENCE: Key = Key {
    name: "sequence",
    value: KeyValue::Choice(&["whole", "tensor"]),
    doc: "`tensor`: what is between layers (norms, dropout, residuals) is split along the sequence among the workers of `tensor`",
};

pub const KIND: StrategyKind = StrategyKind {
    name: "tensor",
    doc: "tensor parallelism: workers share every layer",
    keys: &[RANKS, SLICES, SEQUENCE],
    read: |settings| {
        let strategy = read(settings)?;
        Ok(strategy.map(|one| Arc::new(one) as Arc<dyn Strategy>))
    },
};

fn read(settings: &Settings) -> Result<Option<Tensor>, kolo_graph::settings::SettingError> {
    let (ranks, slices) = (RANKS.count(settings)?, SLICES.count(settings)?);
    for (key, value) in [(RANKS, ranks), (SLICES, slices)] {
        if value > SLICES_MAX {
            let message = format!("is {value}, and at most {SLICES_MAX} are possible");
            return Err(settings.wrong(key.name, message, format!("choose a smaller `{}`", key.name)));
        }
    }
    if !slices.is_power_of_two() {
        let (below, above) = (1 << slices.ilog2(), slices.next_power_of_two());
        let message = format!("is {slices}, which is no power of two");
        return Err(settings.wrong(SLICES.name, message, format!("write {below} or {above}")));
    }
    let sequence = SEQUENCE.choice(settings)? == "tensor";
    Ok((ranks > 1 || slices > 1).then_some(Tensor { ranks, slices, sequence }))
}

/// Tensor parallelism with its settings.
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    pub ranks: usize,
    pub slices: usize,
    /// Activations between layers are cut along the sequence.
    pub sequence: bool,
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
            1 => format!("parallel.{} = {}", SLICES.name, self.slices),
            ranks => format!("parallel.{} = {ranks}", RANKS.name),
        }
    }
    fn axis(&self) -> Option<(&'static str, usize)> {
        Some((TENSOR, self.ranks))
    }
    fn check(&self, job: Facts, others: &[&dyn Strategy]) -> Result<(), Refusal> {
        if let Some(other) = others.iter().find(|other| !other.shares_model()) {
            let message = format!("`{}` cannot be combined with `{}`", self.written(), other.written());
            return Err(Refusal::new(message, "keep one of the two"));
        }
        if job.reproducible && !self.slices.is_multiple_of(self.ranks) {
            let slices = self.ranks.next_power_of_two();
            let hint = match self.ranks.is_power_of_two() {
                true => format!("write `{} = {slices}` beside it, or `job.reproducible = false`", SLICES.name),
                false => format!(
                    "use {} or {slices} workers for it with as many `{}`, or write `job.reproducible = false`",
                    slices / 2,
                    SLICES.name
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
        let rules = match purpose {
            // Weights lie as training left them.
            Purpose::Evaluation { .. } => {
                let rules = Rules { tokens: tokens(training), ..Rules::default() };
                let trained = plan(training, slices, &rules);
                Rules { fixed: trained.named(training), tokens: tokens(&graph), ..Rules::default() }
            }
            Purpose::Training | Purpose::Server => Rules { tokens: tokens(&graph), ..Rules::default() },
        };
        let plan = plan(&graph, slices, &rules);
        Ok(lower(&graph, &plan, &Group { axis: TENSOR.into(), ranks, rank }))
    }
    fn layout(&self) -> Vec<(&'static str, usize)> {
        vec![("slices", self.slices)]
    }
}

/// Samples and tokens of a grain: the shape of its only kind of input that is a sequence of whole numbers.
fn tokens_of(graph: &Graph) -> Option<(usize, usize)> {
    let sequence = |op: &Input| match op.shape[..] {
        [samples, tokens] if op.role == InputRole::Data && op.dtype == DType::I32 => Some((samples, tokens)),
        _ => None,
    };
    graph.inputs().find_map(|(_, op)| sequence(op))
}
