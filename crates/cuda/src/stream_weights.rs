//! Large weights stay in the host's memory and come to the device while they are used: the rewrite.
//!
//! A weight is fetched for each *use*: readers that follow one another closely share a copy, whose memory is free again after the last of
//! them, so the backward pass fetches what the forward pass has given up. A `fetch` stands as far ahead of its first reader as
//! [`window`] says, so that copies run while other weights are computed with. Bits do not change: a copy is a copy.

use crate::host_part::{Held, HostPart, casts_weight};
use kolo_graph::fetch::Fetch;
use kolo_graph::layout::{Layout, all_shown_by};
use kolo_graph::rewrite::{Rebuild, eliminate_dead};
use kolo_graph::sources::{GrainSum, Param};
use kolo_graph::{Graph, Node, NodeId, Phase, ValueId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Weights with fewer elements stay on the device: all of them together are small, and a copy takes some microseconds however short it is.
const STREAMED_ELEMENTS_MIN: usize = if cfg!(test) { 16 } else { 16 << 10 };

/// Weights that are on the device at a time without being read, in the sizes of the largest one: those that come next, and those
/// that are read again soon.
const WINDOW_WEIGHTS: usize = 2;

/// One time that a weight is on the device.
#[derive(Clone, Copy, Debug)]
struct Use {
    weight: ValueId,
    /// The first node that reads it, and the one before which its copy may begin.
    first: NodeId,
    start: NodeId,
    after_grains: bool,
}

/// A graph whose large weights are fetched while they are used. `layout` is that of the graph as it is.
pub(crate) fn stream_weights(graph: &Graph, layout: &Layout, host: &HostPart) -> Graph {
    let search = Search::new(graph, layout, host);
    let weights = search.weights();
    if weights.is_empty() {
        return graph.clone();
    }
    let reads = search.reads(&weights);
    let (uses, use_of) = find_uses(graph, &reads);
    eliminate_dead(Streaming { graph, shown: &search.shown, uses: &uses, use_of, made: BTreeMap::new() }.run())
}

/// A node of the device that reads weights which can be fetched.
#[derive(Debug)]
struct Read {
    node: NodeId,
    phase: Phase,
    weights: BTreeSet<ValueId>,
}

/// What is known of a graph while its weights are looked for.
struct Search<'a> {
    graph: &'a Graph,
    layout: &'a Layout,
    host: &'a HostPart,
    held: Held,
    phases: Vec<Phase>,
    shown: Vec<ValueId>,
}

impl<'a> Search<'a> {
    fn new(graph: &'a Graph, layout: &'a Layout, host: &'a HostPart) -> Self {
        let (held, phases, shown) = (Held::of(graph, layout, host), graph.phases(), all_shown_by(graph));
        Self { graph, layout, host, held, phases, shown }
    }

    /// Nodes that run, views and sources left out.
    fn running(&self) -> impl Iterator<Item = (NodeId, &'a Node)> {
        let Layout { before, grain, after, .. } = self.layout;
        let all = [before, grain, after].into_iter().flatten().map(|id| (*id, self.graph.node(*id)));
        all.filter(|(_, node)| !node.op.view() && !node.inputs.is_empty())
    }

    /// Parameters that the host alone changes, and half-precision copies of them, as far as nothing but grains and the end of the step
    /// reads them.
    fn weights(&self) -> BTreeSet<ValueId> {
        let graph = self.graph;
        let is_kept = graph.kept_mask();
        let kept = (0..graph.values.len()).filter(|at| is_kept[*at]).map(|at| self.shown[at]);
        let mut excluded: BTreeSet<ValueId> = kept.collect();
        let (mut found, mut read) = (BTreeSet::new(), BTreeSet::new());
        for (id, node) in self.running() {
            let roots = node.inputs.iter().map(|input| self.shown[input.0 as usize]);
            match self.phases[id.0 as usize] {
                Phase::Before if casts_weight(graph, node) => {
                    let large = graph.ty(node.outputs[0]).elements() >= STREAMED_ELEMENTS_MIN;
                    let root = node.inputs.last().map(|input| self.shown[input.0 as usize]);
                    found.extend((large && self.is_hosts(root)).then_some(node.outputs[0]));
                }
                Phase::Before => excluded.extend(roots),
                // A term may be made in the place of its sum, where nobody would wait for it.
                _ if node.op.is::<GrainSum>() => excluded.extend(roots),
                Phase::Grain | Phase::After if self.host.has(id) => (),
                // Exchanges take what the host has, but those of a lone worker, which are copies on the device.
                Phase::Grain | Phase::After if node.op.collective().is_some() => excluded.extend(roots),
                Phase::Grain | Phase::After => read.extend(roots),
            }
        }
        let params = graph.params().map(|(id, _)| id);
        let large = params.filter(|id| graph.ty(*id).elements() >= STREAMED_ELEMENTS_MIN && self.is_hosts(Some(*id)));
        found.extend(large);
        found.retain(|id| read.contains(id) && !excluded.contains(id));
        found
    }

    /// Whether this is a parameter whose newest value the host has at all times.
    fn is_hosts(&self, id: Option<ValueId>) -> bool {
        let param = id.filter(|id| self.graph.maker(*id).op.is::<Param>());
        param.is_some_and(|id| !self.held.changes(self.graph, self.layout, id))
    }

    /// Who reads which of the weights on the device, in the order in which they run.
    fn reads(&self, weights: &BTreeSet<ValueId>) -> Vec<Read> {
        let read = |(node, of): (NodeId, &Node)| {
            let phase = self.phases[node.0 as usize];
            let hosts = phase == Phase::Before || self.host.has(node);
            let roots = of.inputs.iter().map(|input| self.shown[input.0 as usize]);
            let weights: BTreeSet<ValueId> = roots.filter(|root| !hosts && weights.contains(root)).collect();
            (!weights.is_empty()).then_some(Read { node, phase, weights })
        };
        self.running().filter_map(read).collect()
    }
}

/// Bytes of weights that may be on the device without being read now.
fn window(graph: &Graph, reads: &[Read]) -> usize {
    let largest = reads.iter().flat_map(|read| &read.weights).map(|id| graph.ty(*id).bytes()).max();
    WINDOW_WEIGHTS * largest.unwrap_or(0)
}

/// The uses in the order in which they begin, and for each reader of a weight its use.
///
/// Time is counted in bytes of weights that begin to be used: a weight that is read again before a window of others has passed stays, and
/// one that comes next is fetched when less than a window lies between.
fn find_uses(graph: &Graph, reads: &[Read]) -> (Vec<Use>, BTreeMap<(NodeId, ValueId), usize>) {
    let window = window(graph, reads);
    let (mut uses, mut use_of): (Vec<Use>, BTreeMap<(NodeId, ValueId), usize>) = (Vec::new(), BTreeMap::new());
    let mut last: BTreeMap<ValueId, (usize, usize)> = BTreeMap::new();
    let mut clock = 0;
    for Read { node, phase, weights } in reads {
        for weight in weights {
            let near = |(number, at): &(usize, usize)| {
                let Use { first, after_grains, .. } = uses[*number];
                clock - at <= window && !after_grains && graph.node(first).segment == graph.node(*node).segment
            };
            let after_grains = *phase == Phase::After;
            let known = last.get(weight).copied().filter(|use_and_time| !after_grains && near(use_and_time));
            let number = known.map_or(uses.len(), |(number, _)| number);
            if known.is_none() {
                clock += graph.ty(*weight).bytes();
                uses.push(Use { weight: *weight, first: *node, start: *node, after_grains });
            }
            use_of.insert((*node, *weight), number);
            last.insert(*weight, (number, clock));
        }
    }
    for at in 0..uses.len() {
        uses[at].start = start_of(graph, &uses, at, window);
    }
    (uses, use_of)
}

/// Before which node the copy of a use may begin: the first of the earliest use from which on less than a window is fetched. Segments of
/// grains fetch for themselves, and what comes after the grains is fetched where it is read.
fn start_of(graph: &Graph, uses: &[Use], of: usize, window: usize) -> NodeId {
    let together = |one: &Use, other: &Use| {
        !one.after_grains && !other.after_grains && graph.node(one.first).segment == graph.node(other.first).segment
    };
    let (mut at, mut ahead) = (of, graph.ty(uses[of].weight).bytes());
    while at > 0 && ahead <= window && together(&uses[at - 1], &uses[of]) {
        at -= 1;
        ahead += graph.ty(uses[at].weight).bytes();
    }
    uses[at].first
}

/// Copies a graph with fetches in it.
struct Streaming<'g> {
    graph: &'g Graph,
    shown: &'g [ValueId],
    uses: &'g [Use],
    use_of: BTreeMap<(NodeId, ValueId), usize>,
    /// What views show of the copy of a use.
    made: BTreeMap<(ValueId, usize), ValueId>,
}

impl<'g> Streaming<'g> {
    fn run(mut self) -> Graph {
        let mut rebuild = Rebuild::new(self.graph);
        let mut started = 0;
        let mut order: Vec<usize> = (0..self.uses.len()).collect();
        order.sort_by_key(|at| (self.uses[*at].start, *at));
        // Weights are there before anything fetches them.
        let phases = self.graph.phases();
        let is_early = |id: &NodeId| phases[id.0 as usize] == Phase::Before;
        self.graph.ids().filter(is_early).for_each(|id| _ = rebuild.copy(self.graph.node(id)));
        for (id, node) in self.graph.ids().zip(&self.graph.nodes).filter(|(id, _)| !is_early(id)) {
            while order.get(started).is_some_and(|at| self.uses[*at].start <= id) {
                self.fetch(&mut rebuild, order[started]);
                started += 1;
            }
            let reads = node.inputs.iter().any(|input| self.use_of.contains_key(&(id, self.shown[input.0 as usize])));
            if !reads {
                rebuild.copy(node);
                continue;
            }
            let inputs = node.inputs.iter().map(|input| self.input(&mut rebuild, id, *input)).collect();
            let types = self.graph.types(&node.outputs);
            let new = rebuild.new.push_typed(Arc::clone(&node.op), inputs, types, node.scope.clone(), node.stage);
            rebuild.new.set_segment(new, node.segment);
            for (slot, old) in node.outputs.iter().enumerate() {
                let new = rebuild.new.node(new).outputs[slot];
                rebuild.set(*old, new);
            }
        }
        rebuild.finish()
    }

    fn fetch(&mut self, rebuild: &mut Rebuild<'g>, number: usize) {
        let Use { weight, first, after_grains, .. } = self.uses[number];
        let reader = self.graph.node(first);
        let (input, ty) = (rebuild.get(weight), self.graph.ty(weight).clone());
        let op = Arc::new(Fetch { number, after_grains });
        let new = rebuild.new.push_typed(op, vec![input], vec![ty], reader.scope.clone(), reader.stage);
        rebuild.new.set_segment(new, reader.segment);
        self.made.insert((weight, number), rebuild.new.node(new).outputs[0]);
    }

    /// A value as this node reads it: if it shows a weight, what it shows of the copy.
    fn input(&mut self, rebuild: &mut Rebuild<'g>, reader: NodeId, id: ValueId) -> ValueId {
        let root = self.shown[id.0 as usize];
        let Some(number) = self.use_of.get(&(reader, root)).copied() else { return rebuild.get(id) };
        if let Some(made) = self.made.get(&(id, number)) {
            return *made;
        }
        let view = self.graph.maker(id);
        let input = self.input(rebuild, reader, view.inputs[0]);
        let types = self.graph.types(&view.outputs);
        let new = rebuild.new.push_typed(Arc::clone(&view.op), vec![input], types, view.scope.clone(), view.stage);
        rebuild.new.set_segment(new, self.graph.node(reader).segment);
        let output = rebuild.new.node(new).outputs[0];
        self.made.insert((id, number), output);
        output
    }
}
