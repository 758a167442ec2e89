//! Tensor parallelism: the ranks along an axis share the layers of the model itself.
//!
//! Layers are split by columns and rows, attention by heads, tables and the cross-entropy by classes, convolutions by channels:
//! whatever the splits of the ops make cheapest ([`crate::partition`]). `slices` says how many parts a summed axis has. It
//! belongs to the job like its grains, so that any number of ranks that divides it gives the same bits, one among them.

use crate::layers::{LAYERS, Layers, Way, layer_of};
use crate::mesh::Mesh;
use crate::partition::{Group, Rules, lower, plan};
use crate::sequence::SequenceSplit;
use crate::spatial;
use crate::strategy::{Facts, Key, KeyValue, Part, Purpose, Refusal, Strategy, StrategyKind, TrainingGraphs};
use kolo_graph::settings::{SettingError, Settings};
use kolo_graph::sources::Input;
use kolo_graph::{DType, Graph, InputRole};
use kolo_ops::cross_entropy_parts::SLICES_MAX;
use std::sync::Arc;

/// The axis along which layers are cut.
pub const TENSOR: &str = "tensor";

pub const RANKS: Key = Key {
    name: TENSOR,
    value: KeyValue::Count { default: 1, least: 1, most: SLICES_MAX },
    of_job: false,
    doc: "workers that share every layer: columns, rows, heads, classes, channels",
};
pub const SLICES: Key = Key {
    name: "slices",
    value: KeyValue::Count { default: 1, least: 1, most: SLICES_MAX },
    of_job: true,
    doc: "parts of a sum that workers may share, a power of two and a multiple of `tensor`; part of the job, as grains are",
};

pub const SEQUENCE: Key = Key {
    name: "sequence",
    value: KeyValue::Choice(&SequenceSplit::NAMES),
    of_job: true,
    doc: "`tensor`: what is between layers (norms, dropout, residuals) is split along the sequence among the workers of `tensor`; `heads`: all but attention is, among those of `context`; `context`: attention is, too, and keys and values go round a ring",
};

/// With a sequence that has slices of its own.
pub const TENSOR_SLICES: Key = Key {
    name: "tensor_slices",
    value: KeyValue::Count { default: 1, least: 1, most: SLICES_MAX },
    of_job: true,
    doc: "`slices` of layers where those of the tokens are other ones (`sequence = \"heads\"` or `\"context\"`): a power of two and a multiple of `tensor`",
};

pub const KIND: StrategyKind = StrategyKind {
    name: "tensor",
    doc: "tensor parallelism: workers share every layer",
    keys: &[RANKS, SLICES, SEQUENCE, TENSOR_SLICES, LAYERS],
    read: |settings| Ok(read(settings)?.map(|one| Arc::new(one) as Arc<dyn Strategy>)),
};

fn read(settings: &Settings) -> Result<Option<Tensor>, SettingError> {
    let (mut ranks, layers) = (RANKS.count_within(settings)?, Layers::read(settings)?);
    let sequence = SequenceSplit::named(SEQUENCE.choice(settings)?);
    let by_tokens = sequence.axis().is_some();
    for key in [SLICES, TENSOR_SLICES] {
        let slices = key.count_within(settings)?;
        if !slices.is_power_of_two() {
            let (below, above) = (1 << slices.ilog2(), slices.next_power_of_two());
            let message = format!("is {slices}, which is not a power of two");
            return Err(settings.wrong(key.name, message, format!("write {below} or {above}")));
        }
    }
    // Slices are those of the tokens then, and layers have others: what tokens are cut into must not depend on who shares layers.
    let key = if by_tokens { TENSOR_SLICES } else { SLICES };
    let (mut slices, own) = (key.count_within(settings)?, TENSOR_SLICES.count_within(settings)?);
    if own > 1 && !by_tokens {
        let message = format!("is {own}, but tokens have no separate slices");
        let hint = format!("write `{} = {own}`, or `{} = \"context\"` beside it", SLICES.name, SEQUENCE.name);
        return Err(settings.wrong(TENSOR_SLICES.name, message, hint));
    }
    // Layers that are split in several ways are shared by the same workers, of whom the other way has the axis.
    let of_layers = ranks == 1 && layers.ranks(Way::Tensor) > 1 && !spatial::is_chosen(settings)?;
    if of_layers {
        ranks = layers.ranks(Way::Tensor);
        slices = slices.max(ranks.next_power_of_two());
    }
    let sequence = sequence == SequenceSplit::Tensor;
    Ok((ranks > 1 || slices > 1).then_some(Tensor { ranks, slices, key: key.name, sequence, layers, of_layers }))
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
    /// Layers that are split otherwise.
    layers: Layers,
    /// Only what a line of theirs names is split.
    of_layers: bool,
}

impl Tensor {
    /// Names of parameters that are not split.
    fn whole(&self, graph: &Graph) -> Vec<String> {
        if !self.of_layers {
            return self.layers.whole_params(Way::Tensor, graph);
        }
        let shared = self.layers.shared_params(Way::Tensor, graph);
        let is_shared = |name: &String| shared.get(layer_of(name)).is_some_and(|own| own.contains(name));
        graph.params().map(|(_, op)| op.name.clone()).filter(|name| !is_shared(name)).collect()
    }
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
    fn axes(&self) -> Vec<(&'static str, usize)> {
        vec![(TENSOR, self.ranks)]
    }
    fn is_of_layers(&self) -> bool {
        self.of_layers
    }
    fn check(&self, job: Facts, _: &[&dyn Strategy]) -> Result<(), Refusal> {
        if self.of_layers {
            self.layers.check_ranks(Way::Tensor, self.ranks)?;
        } else if self.ranks > 1 {
            self.layers.check_exceptions(Way::Tensor)?;
        }
        if self.of_layers && job.reproducible {
            self.layers.check_powers(Way::Tensor)?;
        }
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
    fn split(
        &self,
        graph: Graph,
        training: TrainingGraphs<'_>,
        purpose: Purpose,
        mesh: &Mesh,
    ) -> Result<Graph, Refusal> {
        let (ranks, rank) = (mesh.size(TENSOR), mesh.coordinate(TENSOR));
        let slices = if self.slices.is_multiple_of(ranks) { self.slices } else { ranks };
        let tokens = |graph: &Graph| self.sequence.then(|| tokens_of(graph)).flatten();
        self.layers.check_names(training.whole)?;
        let whole = self.whole(training.whole);
        let rules = match purpose {
            // Weights lie as training left them.
            Purpose::Evaluation { .. } => {
                let rules = Rules { tokens: tokens(training.here), whole, ..Rules::default() };
                let trained = plan(training.here, slices, &rules);
                Rules { fixed: trained.named(training.here), tokens: tokens(&graph), ..Rules::default() }
            }
            Purpose::Training | Purpose::Server => Rules { tokens: tokens(&graph), whole, ..Rules::default() },
        };
        let plan = plan(&graph, slices, &rules);
        let named = plan.named(&graph);
        let is_split = |layer: &str| named.iter().any(|(name, own)| layer_of(name) == layer && own.cut().is_some());
        if self.of_layers {
            self.layers.check_shared(
                Way::Tensor,
                is_split,
                training.whole,
                "use fewer workers, or leave the layer whole",
            )?;
        }
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
