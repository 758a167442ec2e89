//! Sequence parallelism: the ranks along an axis share the tokens of every sample.
//!
//! Layers that treat every token for itself compute their own tokens with whole weights. Attention, which needs all tokens, is
//! split by heads: the ranks exchange tokens for heads and back (DeepSpeed-Ulysses). Gradients of weights are sums over the
//! tokens, made slice by slice as all shared sums are.

use crate::mesh::Mesh;
use crate::partition::{Group, Rules, lower, plan};
use crate::strategy::{Facts, Key, KeyValue, Part, Purpose, Refusal, Strategy, StrategyKind};
use crate::tensor::{SEQUENCE, SLICES, tokens_of};
use kolo_graph::Graph;
use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::cross_entropy_parts::SLICES_MAX;
use std::sync::Arc;

/// The axis along which tokens are cut.
pub const AXIS: &str = "sequence";

const RANKS: Key = Key {
    name: "context",
    value: KeyValue::Count { default: 1, least: 1, most: SLICES_MAX },
    doc: "workers that share the tokens of every sample, with `sequence = \"heads\"`",
};

pub const KIND: StrategyKind = StrategyKind {
    name: "sequence",
    doc: "sequence parallelism: workers share the tokens of every sample, and exchange them for heads where attention needs all",
    keys: &[RANKS, SEQUENCE, SLICES],
    read: |settings| Ok(read(settings)?.map(|one| Arc::new(one) as Arc<dyn Strategy>)),
};

fn read(settings: &Settings) -> Result<Option<Sequence>, SettingError> {
    let (ranks, slices) = (RANKS.count_within(settings)?, SLICES.count_within(settings)?);
    let by_heads = SEQUENCE.choice(settings)? == "heads";
    if ranks > 1 && !by_heads {
        let message = format!("is {ranks}, but the sequence is not split");
        return Err(settings.wrong(RANKS.name, message, format!("write `{} = \"heads\"` beside it", SEQUENCE.name)));
    }
    Ok((by_heads && (ranks > 1 || slices > 1)).then_some(Sequence { ranks, slices }))
}

/// Sequence parallelism with its settings.
#[derive(Clone, Copy, Debug)]
pub struct Sequence {
    pub ranks: usize,
    pub slices: usize,
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
    fn axis(&self) -> Option<(&'static str, usize)> {
        Some((AXIS, self.ranks))
    }
    fn check(&self, job: Facts, _: &[&dyn Strategy]) -> Result<(), Refusal> {
        if job.reproducible && !self.slices.is_multiple_of(self.ranks) {
            let message = format!(
                "is {}, but sums have {} slices, which workers that share a sum divide",
                self.ranks, self.slices
            );
            let hint = format!("write `{} = {}` beside it", SLICES.name, self.ranks.next_power_of_two());
            return Err(Refusal::of_key(&RANKS, message, hint));
        }
        Ok(())
    }
    fn split(&self, graph: Graph, training: &Graph, purpose: Purpose, mesh: &Mesh) -> Result<Graph, Refusal> {
        let (ranks, rank) = (mesh.size(AXIS), mesh.coordinate(AXIS));
        let slices = if self.slices.is_multiple_of(ranks) { self.slices } else { ranks };
        let rules = |graph: &Graph| -> Result<Rules, Refusal> {
            let tokens = tokens_of(graph).filter(|(_, tokens)| tokens.is_multiple_of(slices)).ok_or_else(|| {
                let message =
                    format!("splits sequences of tokens in {slices} slices, and the model has none of such a length");
                Refusal::of_key(
                    &SEQUENCE,
                    message,
                    "use it for a model of tokens whose context is a multiple of `slices`",
                )
            })?;
            Ok(Rules { tokens: Some(tokens), by_tokens: true, ..Rules::default() })
        };
        let mut own = rules(&graph)?;
        if let Purpose::Evaluation { .. } = purpose {
            own.fixed = plan(training, slices, &rules(training)?).named(training);
        }
        let plan = plan(&graph, slices, &own);
        Ok(lower(&graph, &plan, &Group { axis: AXIS.into(), ranks, rank }))
    }
}
