//! Sequence parallelism: the ranks along an axis share the tokens of every sample.
//!
//! Layers that treat every token for itself compute their own tokens with whole weights. Attention needs all tokens. Either it
//! is split by heads, and the ranks exchange tokens for heads and back (DeepSpeed-Ulysses). Or it is split by tokens as well,
//! and keys and values go round a ring of the ranks while each attends to those it has (ring attention, Megatron's context
//! parallelism). Gradients of weights are sums over the tokens, made slice by slice as all shared sums are.

use crate::mesh::Mesh;
use crate::partition::{Choice, Group, PartitionPlan, Rules, lower, plan, unfit_for_ring};
use crate::strategy::{Facts, Key, KeyValue, Part, Purpose, Refusal, Strategy, StrategyKind, TrainingGraphs};
use crate::tensor::{SEQUENCE, SLICES, TENSOR, TENSOR_SLICES, tokens_of};
use kolo_graph::Graph;
use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::attention::Attention;
use kolo_ops::attention::ring::block_of;
use kolo_ops::cross_entropy_parts::SLICES_MAX;
use std::sync::Arc;

pub const RANKS: Key = Key {
    name: "context",
    value: KeyValue::Count { default: 1, least: 1, most: SLICES_MAX },
    of_job: false,
    doc: "workers that share the tokens of every sample, with `sequence = \"heads\"` or `\"context\"`",
};

pub const KIND: StrategyKind = StrategyKind {
    name: "sequence",
    doc: "sequence parallelism: workers share the tokens of every sample; for attention they exchange them for heads, or hand keys and values round a ring",
    keys: &[RANKS, SEQUENCE, SLICES, TENSOR_SLICES],
    read: |settings| Ok(read(settings)?.map(|one| Arc::new(one) as Arc<dyn Strategy>)),
};

fn read(settings: &Settings) -> Result<Option<Sequence>, SettingError> {
    let (ranks, slices) = (RANKS.count_within(settings)?, SLICES.count_within(settings)?);
    let exchange = match SequenceSplit::named(SEQUENCE.choice(settings)?) {
        SequenceSplit::Heads => Some(TokenExchange::Heads),
        SequenceSplit::Context => Some(TokenExchange::Ring),
        SequenceSplit::Whole | SequenceSplit::Tensor => None,
    };
    if ranks > 1 && exchange.is_none() {
        let message = format!("is {ranks}, but the sequence is not split");
        let hint = format!("write `{0} = \"context\"` or `{0} = \"heads\"` beside it", SEQUENCE.name);
        return Err(settings.wrong(RANKS.name, message, hint));
    }
    let split = exchange.filter(|_| ranks > 1 || slices > 1);
    let with_layers = TENSOR_SLICES.count_within(settings)? > 1;
    Ok(split.map(|exchange| Sequence { ranks, slices, exchange, with_layers }))
}

/// The axes along which tokens are cut: by the ranks that exchange them for heads, and by those round which keys and values go.
pub const HEADS_AXIS: &str = "sequence";
pub const RING_AXIS: &str = "context";

/// What `parallel.sequence` says: how the tokens of a sample are shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum SequenceSplit {
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

impl SequenceSplit {
    pub const ALL: [Self; 4] = [Self::Whole, Self::Tensor, Self::Heads, Self::Context];
    /// In the order of [`SequenceSplit::ALL`], as job files have them.
    pub const NAMES: [&'static str; 4] = ["whole", TENSOR, "heads", "context"];

    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// The split of this name; all tokens on every rank if there is none.
    pub fn named(name: &str) -> Self {
        Self::ALL.into_iter().find(|split| split.name() == name).unwrap_or_default()
    }

    /// The axis that it adds to the mesh.
    pub fn axis(self) -> Option<&'static str> {
        match self {
            Self::Whole | Self::Tensor => None,
            Self::Heads => Some(HEADS_AXIS),
            Self::Context => Some(RING_AXIS),
        }
    }
}

/// What ranks exchange so that attention sees all tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenExchange {
    /// Their tokens for all tokens of some heads.
    Heads,
    /// Keys and values, from one to the next in a ring.
    Ring,
}

/// Sequence parallelism with its settings.
#[derive(Clone, Copy, Debug)]
pub struct Sequence {
    pub ranks: usize,
    pub slices: usize,
    pub exchange: TokenExchange,
    /// Layers have slices as well.
    pub with_layers: bool,
}

impl Sequence {
    /// The axis along which tokens are cut.
    const fn axis_name(&self) -> &'static str {
        match self.exchange {
            TokenExchange::Heads => HEADS_AXIS,
            TokenExchange::Ring => RING_AXIS,
        }
    }

    fn rules(&self, graph: &Graph, slices: usize) -> Result<Rules, Refusal> {
        let Some((samples, tokens)) = tokens_of(graph) else {
            let message = "splits sequences of tokens, but the model has none";
            let hint = "use it for a model of tokens, such as `gpt`, and `tensor` or `pipeline` for this one";
            return Err(Refusal::of_key(&SEQUENCE, message, hint));
        };
        if !tokens.is_multiple_of(slices) {
            return Err(self.uneven(tokens, slices));
        }
        let ring = self.exchange == TokenExchange::Ring;
        if let Some(problem) = unfit_for_ring(graph, (samples, tokens)).filter(|_| ring) {
            let message = format!("is \"context\", but {problem}");
            return Err(Refusal::of_key(
                &SEQUENCE,
                message,
                "write `sequence = \"heads\"`, or `\"tensor\"` with `tensor`",
            ));
        }
        let strict = ring || self.with_layers;
        Ok(Rules { tokens: Some((samples, tokens)), by_tokens: true, strict, ring, ..Rules::default() })
    }

    /// Why so many tokens do not do, and what would.
    fn uneven(&self, tokens: usize, slices: usize) -> Refusal {
        let message = format!("splits the {tokens} tokens of a sample in {slices} slices, which are not of one length");
        let most = 1 << tokens.trailing_zeros();
        let lengths = match tokens / slices * slices {
            0 => format!("a context of {slices} tokens"),
            below => format!("a context of {below} or {} tokens", below + slices),
        };
        let hint = match most >= self.ranks && self.ranks.is_power_of_two() && most > 1 {
            true => format!("write `{} = {}`, or use {lengths}", SLICES.name, most.min(slices)),
            false => format!("use {lengths}"),
        };
        Refusal::of_key(&SEQUENCE, message, hint)
    }

    /// Refuses a plan in which all ranks compute an attention whole: what follows would be added up in another order.
    fn check_heads(&self, graph: &Graph, plan: &PartitionPlan, slices: usize, mesh: &Mesh) -> Result<(), Refusal> {
        let mut attention = graph.nodes.iter().zip(&plan.choices);
        let whole = attention.find_map(|(node, choice)| {
            node.op.downcast::<Attention>().filter(|_| self.with_layers && matches!(choice, Choice::Whole))
        });
        let Some(Attention { heads, .. }) = whole else { return Ok(()) };
        let ranks = mesh.size(TENSOR);
        let message = format!(
            "is \"heads\", but the {heads} heads of a worker (`tensor = {ranks}`) are fewer than the {slices} slices"
        );
        let hint =
            format!("write `{} = \"context\"`, or use fewer `{}` or a smaller `{TENSOR}`", SEQUENCE.name, SLICES.name);
        Err(Refusal::of_key(&SEQUENCE, message, hint))
    }
}

impl Strategy for Sequence {
    fn name(&self) -> &'static str {
        KIND.name
    }
    fn part(&self) -> Part {
        Part::Model
    }
    fn written(&self) -> String {
        format!("parallel.{} = {}", RANKS.name, self.ranks)
    }
    fn axes(&self) -> Vec<(&'static str, usize)> {
        vec![(self.axis_name(), self.ranks)]
    }
    fn check(&self, job: Facts, _: &[&dyn Strategy]) -> Result<(), Refusal> {
        if job.reproducible && !self.slices.is_multiple_of(self.ranks) {
            let message = format!(
                "is {}, but sums have {} slices, which workers that share a sum divide",
                self.ranks, self.slices
            );
            let least = self.ranks.next_power_of_two();
            let hint = match self.exchange {
                TokenExchange::Heads => format!("write `{} = {least}` beside it", SLICES.name),
                // Two blocks each: an early one and a late one, so that all have as much to do.
                TokenExchange::Ring => format!("write `{} = {}` beside it", SLICES.name, (2 * least).min(SLICES_MAX)),
            };
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
        let (ranks, rank) = (mesh.size(self.axis_name()), mesh.coordinate(self.axis_name()));
        let slices = if self.slices.is_multiple_of(ranks) { self.slices } else { ranks };
        let mut own = self.rules(&graph, slices)?;
        if let Purpose::Evaluation { .. } = purpose {
            own.fixed = plan(training.here, slices, &self.rules(training.here, slices)?).named(training.here);
        }
        let plan = plan(&graph, slices, &own);
        self.check_heads(&graph, &plan, slices, mesh)?;
        Ok(lower(&graph, &plan, &Group { axis: self.axis_name().into(), ranks, rank }))
    }
    fn explain(&self) -> Vec<String> {
        let (ranks, slices) = (self.ranks, self.slices.max(self.ranks));
        let blocks = |rank: usize| {
            let slots = rank * slices / ranks..(rank + 1) * slices / ranks;
            let mut blocks: Vec<usize> = match self.exchange {
                TokenExchange::Heads => slots.collect(),
                TokenExchange::Ring => slots.map(|slot| block_of(slot, slices)).collect(),
            };
            blocks.sort_unstable();
            let blocks: Vec<String> = blocks.iter().map(usize::to_string).collect();
            format!("  {rank} of `{}`: {}", self.axis_name(), blocks.join(" "))
        };
        let title = format!("tokens of every sample, in {slices} blocks, and who has which of them");
        [title].into_iter().chain((0..ranks).map(blocks)).collect()
    }
    fn layout(&self) -> Vec<(&'static str, usize)> {
        vec![(SLICES.name, self.slices)]
    }
}
