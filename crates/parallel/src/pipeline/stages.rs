//! Which stage of a pipeline every node belongs to.
//!
//! The forward pass is cut between layers into stages of about the same cost, or where the job says. A node of the backward pass
//! belongs to the stage of the layer it comes from. The stage of a node without a layer follows from its inputs and readers.

use crate::strategy::Refusal;
use kolo_graph::graph::Phase;
use kolo_graph::sources::{GrainSum, Input, Param, State};
use kolo_graph::{Graph, Node, NodeId, Stage, ValueId, steps};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// Operations that cost as much as a byte of a result.
const FLOPS_PER_BYTE: f64 = 8.0;

/// Where the stages of a model begin: the same for its training and its evaluation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stages {
    pub count: usize,
    /// The stage of every layer.
    layers: HashMap<Arc<str>, usize>,
    /// The stage that keeps each parameter.
    params: BTreeMap<String, usize>,
}

/// A run of forward nodes that stays together.
struct Layer {
    scopes: Vec<Arc<str>>,
    cost: f64,
}

fn is_forward(node: &Node, phase: Phase) -> bool {
    node.stage == Stage::Forward && phase == Phase::Grain && !node.op.is::<Input>()
}

/// The layer that a name belongs to: the shortest beginning of it that is itself a node's name, such as `h.3` of `h.3.attn`.
fn root<'s>(scope: &'s str, names: &HashSet<&str>) -> &'s str {
    let ends = scope.match_indices('.').map(|(at, _)| at);
    ends.map(|end| &scope[..end]).find(|prefix| names.contains(prefix)).unwrap_or(scope)
}

/// The layers of a model, in order. A layer begins at a named node if no name stands on both sides.
fn layers(graph: &Graph) -> Vec<Layer> {
    let phases = graph.phases();
    let nodes: Vec<&Node> = graph
        .nodes
        .iter()
        .zip(&phases)
        .filter(|(node, phase)| is_forward(node, **phase))
        .map(|(node, _)| node)
        .collect();
    let names: HashSet<&str> = nodes.iter().map(|node| &*node.scope).collect();
    let last: HashMap<&str, usize> =
        nodes.iter().enumerate().map(|(at, node)| (root(&node.scope, &names), at)).collect();
    let mut layers: Vec<Layer> = Vec::new();
    // The layer that each scope was last in.
    let mut known: HashMap<&str, usize> = HashMap::new();
    let mut until = 0;
    for (at, node) in nodes.iter().enumerate() {
        let named = !node.scope.is_empty();
        steps::count(1);
        if layers.is_empty() || named && at > until && !known.contains_key(&*node.scope) {
            layers.push(Layer { scopes: Vec::new(), cost: 0.0 });
        }
        let number = layers.len();
        let Some(layer) = layers.last_mut() else { continue };
        if named {
            until = until.max(last[root(&node.scope, &names)]);
            if known.insert(&node.scope, number) != Some(number) {
                layer.scopes.push(node.scope.clone());
            }
        }
        let (inputs, outputs) = (graph.types(&node.inputs), graph.types(&node.outputs));
        let bytes: usize = outputs.iter().map(kolo_graph::Type::bytes).sum();
        layer.cost += node.op.flops(&inputs, &outputs) as f64 + FLOPS_PER_BYTE * bytes as f64;
    }
    layers
}

/// Where each of `count` runs of these costs begins, so that the dearest is as cheap as possible. Of several such cuts, the last
/// run begins as early as it can, then the one before it.
///
/// As the last run begins later it gets cheaper, and the dearest of those before it gets no cheaper. So the best place is where
/// the one passes the other, and moves only on as there are more layers: time grows with layers times runs.
pub fn balanced(costs: &[f64], count: usize) -> Vec<usize> {
    let sums: Vec<f64> = std::iter::once(0.0)
        .chain(costs.iter().scan(0.0, |sum, cost| {
            *sum += cost;
            Some(*sum)
        }))
        .collect();
    // before[i]: the dearest of the runs so far of the first i layers; from[k][i]: where the last of k runs of them begins.
    let size = costs.len();
    let mut before = vec![f64::INFINITY; size + 1];
    before[0] = 0.0;
    let mut from = vec![vec![0; size + 1]; count + 1];
    for runs in 1..=count {
        let mut best = vec![f64::INFINITY; size + 1];
        let mut passing = runs - 1;
        for end in runs..=size {
            let last = |start: usize| sums[end] - sums[start];
            while passing + 1 < end && before[passing] < last(passing) {
                passing += 1;
            }
            let dearest = |start: usize| before[start].max(last(start));
            let mut start = passing;
            while start >= runs && dearest(start - 1) <= dearest(start) {
                start -= 1;
            }
            (best[end], from[runs][end]) = (dearest(start), start);
        }
        before = best;
    }
    let mut begins = vec![0; count];
    let mut end = size;
    for runs in (1..=count).rev() {
        end = from[runs][end];
        begins[runs - 1] = end;
    }
    begins
}

impl Stages {
    /// Cuts the model of a training graph. `names` are the layers at which stages begin, but for the first; empty: by cost.
    pub fn cut(training: &Graph, count: usize, names: &[String]) -> Result<Self, Refusal> {
        let layers = layers(training);
        if layers.len() < count {
            let message = format!("{count} stages cannot be cut from a model of {} layers", layers.len());
            return Err(Refusal::new(message, format!("use at most {} stages (ranks times chunks)", layers.len())));
        }
        let begins = match names {
            [] => balanced(&layers.iter().map(|layer| layer.cost).collect::<Vec<_>>(), count),
            names => named_begins(&layers, names, count)?,
        };
        let mut of_layer = HashMap::new();
        for (at, layer) in layers.iter().enumerate() {
            let stage = begins.iter().rposition(|begin| *begin <= at).unwrap_or(0);
            layer.scopes.iter().for_each(|scope| _ = of_layer.insert(scope.clone(), stage));
        }
        let mut stages = Self { count, layers: of_layer, params: BTreeMap::new() };
        stages.place_params(training);
        Ok(stages)
    }

    /// A parameter is kept by the first stage that reads it.
    fn place_params(&mut self, graph: &Graph) {
        let labels = self.labels_of_grain(graph);
        let mut homes: HashMap<ValueId, usize> = HashMap::new();
        for (node, label) in graph.nodes.iter().zip(&labels) {
            let Some(stage) = label else { continue };
            let mut todo: Vec<ValueId> = node.inputs.clone();
            while let Some(id) = todo.pop() {
                let maker = graph.maker(id);
                if maker.op.is::<Param>() {
                    let home = homes.entry(id).or_insert(*stage);
                    *home = (*home).min(*stage);
                } else if labels[graph.value(id).node.0 as usize].is_none() {
                    todo.extend(&maker.inputs);
                }
            }
        }
        let homes = graph.params().map(|(id, op)| (op.name.clone(), homes.get(&id).copied().unwrap_or(0)));
        self.params = homes.collect();
    }

    /// The stage that keeps a parameter.
    pub fn of_param(&self, name: &str) -> usize {
        self.params.get(name).copied().unwrap_or(0)
    }

    /// The stage of every node of the grains that computes something; `None` for sources, for what depends on parameters alone
    /// and for what comes after the grains.
    ///
    /// Values only flow with the pass: forward to the same or a later stage, backward to the same or an earlier one. So a node
    /// stands at its layer's stage, but no earlier in its pass than what it reads. A node without a layer stands where its
    /// inputs are made, or where it is read if its inputs are there anyway.
    pub fn labels_of_grain(&self, graph: &Graph) -> Vec<Option<usize>> {
        let (phases, readers) = (graph.phases(), graph.readers());
        let is_source = |node: &Node| node.op.is::<Input>() || node.op.is::<State>() || node.op.is::<Param>();
        let mut labels = vec![None; graph.nodes.len()];
        // Of a backward node that no backward node with a stage leads to: the last stage whose activations it follows from.
        let mut follows: Vec<Option<usize>> = vec![None; graph.nodes.len()];
        let computes = |at: usize| phases[at] == Phase::Grain && !is_source(&graph.nodes[at]);
        for (at, node) in graph.nodes.iter().enumerate().filter(|(at, _)| computes(*at)) {
            let own = self.of_scope(&node.scope);
            labels[at] = match (self.of_pass(graph, node, &labels), own) {
                (Some(made), Some(own)) if is_forward_pass(node) => Some(made.max(own)),
                (Some(made), Some(own)) => Some(made.min(own)),
                (made, own) => made.or(own),
            };
            let makers = node.inputs.iter().map(|id| graph.value(*id).node.0 as usize);
            follows[at] = makers.filter_map(|maker| labels[maker].or(follows[maker])).max();
        }
        for (at, node) in graph.nodes.iter().enumerate().rev().filter(|(at, _)| computes(*at)) {
            if labels[at].is_none() {
                let all = node.outputs.iter().flat_map(|id| &readers[id.0 as usize]);
                let read = all.filter_map(|reader| labels[reader.0 as usize]);
                // What only sums read is about the loss.
                let stage = if is_forward_pass(node) { read.min() } else { read.chain(follows[at]).max() };
                labels[at] = Some(stage.unwrap_or(self.count - 1));
            }
        }
        add_where_made(graph, &mut labels);
        labels
    }

    /// The last stage of the pass that makes an input of a node in the same pass.
    fn of_pass(&self, graph: &Graph, node: &Node, labels: &[Option<usize>]) -> Option<usize> {
        let forward = is_forward_pass(node);
        let makers = node.inputs.iter().map(|id| graph.value(*id).node.0 as usize);
        let same_pass = makers.filter(|maker| is_forward_pass(&graph.nodes[*maker]) == forward);
        let stages = same_pass.filter_map(|maker| labels[maker]);
        if forward { stages.max() } else { stages.min() }
    }

    fn of_scope(&self, scope: &str) -> Option<usize> {
        let layer = self.layers.get(scope).copied();
        // The layer of a parameter that only its gradient's sum has.
        let of_param = || {
            let inside = format!("{scope}.");
            let (name, stage) = self.params.range(inside.clone()..).next()?;
            name.starts_with(&inside).then_some(*stage)
        };
        if scope.is_empty() { None } else { layer.or_else(of_param) }
    }

    /// The stage of every node after the grains, given those of the grains: where its tensors are. `None`: of numbers from several
    /// stages, which all ranks compute.
    pub fn labels_after(&self, graph: &Graph, labels: &mut [Option<usize>]) {
        let phases = graph.phases();
        for (at, node) in graph.nodes.iter().enumerate().filter(|(at, _)| phases[*at] == Phase::After) {
            labels[at] = match node.op.downcast::<GrainSum>() {
                Some(sum) if !sum.of.is_empty() => Some(self.of_param(&sum.of)),
                _ => self.of_inputs(graph, node, labels),
            };
        }
    }

    fn of_inputs(&self, graph: &Graph, node: &Node, labels: &[Option<usize>]) -> Option<usize> {
        let of = |id: &ValueId| {
            let maker = graph.maker(*id);
            match maker.op.downcast::<Param>() {
                Some(param) => Some(self.of_param(&param.name)),
                None => labels[graph.value(*id).node.0 as usize],
            }
        };
        let tensors = node.inputs.iter().filter(|id| graph.ty(**id).rank() > 0).find_map(of);
        let mut all: Vec<usize> = node.inputs.iter().filter_map(of).collect();
        all.dedup();
        tensors.or(match all[..] {
            [one] => Some(one),
            _ => None,
        })
    }
}

/// Whether a node of the grains runs in the forward pass; all else runs in the backward pass.
fn is_forward_pass(node: &Node) -> bool {
    node.stage == Stage::Forward
}

/// A gradient of which another stage makes all parts is added up there, so that one tensor travels instead of its parts: a tensor
/// that several nodes of the next layer read has one of each.
fn add_where_made(graph: &Graph, labels: &mut [Option<usize>]) {
    let (readers, is_kept) = (graph.readers(), graph.kept_mask());
    for (at, node) in graph.nodes.iter().enumerate().filter(|(_, node)| node.stage == Stage::Backward) {
        let maker = |id: &ValueId| labels[graph.value(*id).node.0 as usize];
        let other = node.inputs.first().and_then(maker).filter(|other| labels[at].is_some_and(|own| own != *other));
        // Nobody else wants it elsewhere.
        let stays = |reader: &NodeId| reader.0 as usize == at || labels[reader.0 as usize] == other;
        let only =
            |id: &ValueId| maker(id) == other && readers[id.0 as usize].iter().all(stays) && !is_kept[id.0 as usize];
        let bytes = |ids: &[ValueId]| ids.iter().map(|id| graph.ty(*id).bytes()).sum::<usize>();
        if other.is_some() && node.inputs.iter().all(only) && bytes(&node.outputs) < bytes(&node.inputs) {
            labels[at] = other;
        }
    }
}

/// The layers at which stages begin by name.
fn named_begins(layers: &[Layer], names: &[String], count: usize) -> Result<Vec<usize>, Refusal> {
    if names.len() + 1 != count {
        let message = format!("{} names begin {} stages, but there are {count}", names.len(), names.len() + 1);
        return Err(Refusal::new(message, format!("name {} layers: the first stage begins by itself", count - 1)));
    }
    let mut begins = vec![0];
    for name in names {
        let inside = |scope: &Arc<str>| {
            **scope == **name || scope.strip_prefix(&**name).is_some_and(|rest| rest.starts_with('.'))
        };
        let found = layers.iter().position(|layer| layer.scopes.iter().any(inside));
        match found.filter(|at| begins.last().is_some_and(|last| at > last)) {
            Some(at) => begins.push(at),
            None => {
                let shortest =
                    |layer: &Layer| layer.scopes.iter().min_by_key(|scope| scope.len()).map(|scope| scope.to_string());
                let known: Vec<String> = layers.iter().filter_map(shortest).collect();
                let message = format!("no stage can begin at `{name}`");
                return Err(Refusal::new(
                    message,
                    format!("name layers in their order; there are {}", known.join(", ")),
                ));
            }
        }
    }
    Ok(begins)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_balanced() {
        assert_eq!(balanced(&[1.0, 1.0, 1.0, 1.0], 2), [0, 2]);
        assert_eq!(balanced(&[5.0, 1.0, 1.0, 1.0], 2), [0, 1]);
        assert_eq!(balanced(&[1.0, 2.0, 3.0], 3), [0, 1, 2]);
        assert_eq!(balanced(&[1.0, 2.0, 3.0], 1), [0]);
    }

    /// Every place for every run.
    fn tried(costs: &[f64], count: usize) -> Vec<usize> {
        let sums: Vec<f64> =
            (0..=costs.len()).map(|end| costs[..end].iter().fold(0.0, |sum, cost| sum + cost)).collect();
        let mut best = vec![vec![f64::INFINITY; costs.len() + 1]; count + 1];
        let mut from = vec![vec![0; costs.len() + 1]; count + 1];
        best[0][0] = 0.0;
        for (runs, end) in (1..=count).flat_map(|runs| (runs..=costs.len()).map(move |end| (runs, end))) {
            for start in runs - 1..end {
                let dearest = best[runs - 1][start].max(sums[end] - sums[start]);
                if dearest < best[runs][end] {
                    (best[runs][end], from[runs][end]) = (dearest, start);
                }
            }
        }
        let (mut begins, mut end) = (vec![0; count], costs.len());
        for runs in (1..=count).rev() {
            end = from[runs][end];
            begins[runs - 1] = end;
        }
        begins
    }

    #[test]
    fn balanced_finds_what_trying_everything_finds() {
        let stream = kolo_graph::rng::Stream::new(3, "costs of layers");
        for case in 0..200u64 {
            let numbers: Vec<u32> = (0..4).flat_map(|block| stream.block(case, block)).collect();
            // Few different costs, with equal ones and zeros, and many.
            let costs: Vec<f64> = match case % 3 {
                0 => numbers.iter().map(|one| f64::from(one % 3)).collect(),
                1 => numbers.iter().map(|one| f64::from(*one) * 1e-3).collect(),
                _ => [[5.0].as_slice(), &[1.1; 12], &[7.3]].concat(),
            };
            for count in 1..=costs.len() {
                assert_eq!(balanced(&costs, count), tried(&costs, count), "{count} runs of {costs:?}");
            }
        }
    }
}
