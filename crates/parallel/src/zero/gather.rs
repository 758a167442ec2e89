//! Parameters that are gathered layer by layer while a grain uses them, and kept in shares otherwise.
//!
//! A layer is gathered when its use begins, or so many layers earlier as are prefetched, and freed behind the last node that
//! reads it: the backward pass gathers it again. Where grains run in segments, each segment gathers for itself: a layer that
//! stayed until the next one would lie idle while other grains run. A parameter that another stage of a pipeline reads is gathered
//! once per step and sent whole. What is computed from weights alone is computed from what was gathered, so
//! that nothing of the size of the weights outlives their use.

use super::layers::{Layer, Layers};
use super::scatter::{push, tensor_at};
use super::set_segments;
use crate::mesh::DATA;
use kolo_graph::collective::{AxisJoin, Send};
use kolo_graph::graph::Phase;
use kolo_graph::piece::Piece;
use kolo_graph::rewrite::Rebuild;
use kolo_graph::share::{EachGrain, Pack};
use kolo_graph::sources::{Full, GrainSum, Param};
use kolo_graph::{DType, Graph, Node, NodeId, Stage, ValueId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// One time that a layer is whole.
#[derive(Clone, Debug)]
struct Use {
    layer: usize,
    /// The first node that reads it.
    first: NodeId,
    stage: Stage,
    segment: u32,
    /// The packed layer, once it is gathered.
    gathered: Option<ValueId>,
}

/// Copies nodes that read weights.
pub(super) struct Gather<'p, 'g> {
    graph: &'g Graph,
    layers: &'p Layers,
    /// Each parameter's layer and place in it.
    places: BTreeMap<&'p str, (usize, usize)>,
    rank: usize,
    /// Layers that are gathered before the one in use is done.
    prefetch: usize,
    /// For each value, the layers whose weights it is computed from, if from nothing else of a grain.
    weights: Vec<BTreeSet<usize>>,
    /// In the order of their first nodes.
    uses: Vec<Use>,
    /// Which use of a layer a node reads.
    use_of: BTreeMap<(NodeId, usize), usize>,
    started: usize,
    /// This rank's run of each parameter.
    own: BTreeMap<&'p str, ValueId>,
    /// What was made of the weights of these uses.
    made: BTreeMap<(ValueId, Vec<usize>), ValueId>,
    /// Layers that are gathered before the grains.
    early: BTreeMap<usize, ValueId>,
}

impl<'p, 'g> Gather<'p, 'g> {
    /// For a graph whose grains read parameters through [`EachGrain`].
    pub fn new(graph: &'g Graph, layers: &'p Layers, rank: usize, prefetch: usize) -> Self {
        let (places, weights) = (layers.places(), Vec::new());
        let (uses, use_of, own, made) = (Vec::new(), BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (started, early) = (0, BTreeMap::new());
        let mut gather =
            Self { graph, layers, places, rank, prefetch, weights, uses, use_of, started, own, made, early };
        gather.find_weights();
        gather.find_uses();
        gather
    }

    fn find_weights(&mut self) {
        let (graph, phases) = (self.graph, self.graph.phases());
        self.weights = vec![BTreeSet::new(); graph.values.len()];
        let is_constant = |id: &ValueId| phases[graph.value(*id).node.0 as usize] == Phase::Before;
        // What a grain leaves behind is made once, wherever it comes from.
        let mut is_left = graph.output_mask();
        let sums = graph.nodes.iter().filter(|node| node.op.is::<GrainSum>());
        sums.flat_map(|node| &node.inputs).for_each(|id| is_left[id.0 as usize] = true);
        for node in &graph.nodes {
            let own: BTreeSet<usize> = match node.op.is::<EachGrain>() {
                true => self.layer_of(node).into_iter().collect(),
                false => {
                    let of = |id: &ValueId| &self.weights[id.0 as usize];
                    let alone = node.inputs.iter().all(|id| !of(id).is_empty() || is_constant(id));
                    let left = node.outputs.iter().any(|id| is_left[id.0 as usize]);
                    let alone = alone && !left && node.op.pure();
                    node.inputs.iter().filter(|_| alone).flat_map(of).copied().collect()
                }
            };
            node.outputs.iter().for_each(|id| self.weights[id.0 as usize].clone_from(&own));
        }
    }

    fn layer_of(&self, each_grain: &Node) -> Option<usize> {
        let param = self.graph.maker(each_grain.inputs[0]).op.downcast::<Param>()?;
        Some(self.places[param.name.as_str()].0)
    }

    /// A use of a layer goes on as long as the next node of its segment that reads weights at all reads its.
    fn find_uses(&mut self) {
        let mut last: BTreeMap<usize, usize> = BTreeMap::new();
        for (id, node) in self.graph.ids().zip(&self.graph.nodes) {
            if self.is_weight(node) {
                continue;
            }
            let read: BTreeSet<usize> =
                node.inputs.iter().flat_map(|id| &self.weights[id.0 as usize]).copied().collect();
            if read.is_empty() {
                continue;
            }
            let mut now = BTreeMap::new();
            for layer in read {
                let same = |number: &&usize| self.uses[**number].segment == node.segment;
                let number = last.get(&layer).filter(same).copied().unwrap_or(self.uses.len());
                if number == self.uses.len() {
                    let Node { stage, segment, .. } = *node;
                    self.uses.push(Use { layer, first: id, stage, segment, gathered: None });
                }
                self.use_of.insert((id, layer), number);
                now.insert(layer, number);
            }
            last = now;
        }
    }

    /// Whether a node's result follows from weights alone: it is made where it is read.
    pub fn is_weight(&self, node: &Node) -> bool {
        node.outputs.iter().any(|id| !self.weights[id.0 as usize].is_empty())
    }

    /// Whether a node is a parameter or a piece of one, and which.
    pub fn kept(&self, node: &Node) -> Option<&'g Param> {
        let op = match node.op.is::<Piece>() {
            true => &self.graph.maker(node.inputs[0]).op,
            false => &self.graph.maker(node.outputs[0]).op,
        };
        op.downcast::<Param>()
    }

    /// Keeps this rank's runs of all parameters, those among them that this graph does not read itself: others may gather them.
    pub fn keep_all(&mut self, rebuild: &mut Rebuild<'g>) {
        for node in &self.graph.nodes {
            if let Some(param) = self.kept(node) {
                self.keep(rebuild, node, param);
            }
        }
        for member in self.layers.0.iter().flat_map(|layer| &layer.members) {
            if !self.own.contains_key(member.name()) {
                self.own.extend(member.own(self.rank).map(|op| {
                    let new = push(&mut rebuild.new, op, Vec::new(), "", Stage::Forward);
                    (member.name(), new)
                }));
            }
        }
    }

    /// Keeps this rank's run of a parameter, or says what a piece of it is.
    fn keep(&mut self, rebuild: &mut Rebuild<'g>, node: &Node, param: &Param) {
        let output = node.outputs[0];
        let (layer, member) = self.places[param.name.as_str()];
        let member = &self.layers.0[layer].members[member];
        let Some(run) = member.runs.iter().find(|run| run.owner == self.rank) else { return };
        if let Some(piece) = node.op.downcast::<Piece>() {
            if run.elements.start == piece.start {
                rebuild.set(output, self.own[member.name()]);
            }
            return;
        }
        if let Some(op) = member.own(self.rank) {
            let new = push(&mut rebuild.new, op, Vec::new(), &node.scope, node.stage);
            self.own.insert(member.name(), new);
            if member.runs.len() == 1 {
                rebuild.set(output, new);
            }
        }
    }

    /// Copies a node, after what it reads was gathered.
    pub fn copy(&mut self, rebuild: &mut Rebuild<'g>, id: NodeId, node: &Node) {
        while self.uses.get(self.started.saturating_sub(self.prefetch)).is_some_and(|next| next.first <= id) {
            if self.started == self.uses.len() {
                break;
            }
            self.start(&mut rebuild.new);
        }
        let from = rebuild.new.nodes.len();
        let inputs = node.inputs.iter().map(|input| self.input(rebuild, id, *input)).collect();
        let types = self.graph.types(&node.outputs);
        let new = rebuild.new.push_typed(Arc::clone(&node.op), inputs, types, node.scope.clone(), node.stage);
        set_segments(&mut rebuild.new, from, node.segment);
        for (slot, old) in node.outputs.iter().enumerate() {
            let new = rebuild.new.node(new).outputs[slot];
            rebuild.set(*old, new);
        }
    }

    /// Whether a node sends a parameter to another stage.
    pub fn is_sent(&self, node: &Node) -> bool {
        node.op.is::<Send>() && self.graph.maker(node.inputs[0]).op.is::<Param>()
    }

    /// Sends a parameter, once its layer is gathered, before the grains.
    pub fn send(&mut self, rebuild: &mut Rebuild<'g>, node: &Node) {
        let Some(param) = self.graph.maker(node.inputs[0]).op.downcast::<Param>() else { return };
        let (layer, member) = self.places[param.name.as_str()];
        let new = &mut rebuild.new;
        let flat = match self.early.get(&layer) {
            Some(flat) => *flat,
            None => self.gathered(new, layer, node.stage, false),
        };
        self.early.insert(layer, flat);
        let start = self.layers.0[layer].members[member].start;
        let whole = tensor_at(new, flat, start, &self.graph.ty(node.inputs[0]).shape, node.stage);
        let types = self.graph.types(&node.outputs);
        let sent = new.push_typed(Arc::clone(&node.op), vec![whole], types, node.scope.clone(), node.stage);
        let output = new.node(sent).outputs[0];
        rebuild.set(node.outputs[0], output);
    }

    /// Gathers the layer of the next use.
    fn start(&mut self, new: &mut Graph) {
        let Use { layer, stage, segment, .. } = self.uses[self.started];
        let from = new.nodes.len();
        self.uses[self.started].gathered = Some(self.gathered(new, layer, stage, true));
        set_segments(new, from, segment);
        self.started += 1;
    }

    /// A packed layer, whole: in each grain, or once before them.
    fn gathered(&self, new: &mut Graph, layer: usize, stage: Stage, each_grain: bool) -> ValueId {
        let Layer { name, members, sizes } = &self.layers.0[layer];
        let own: Vec<ValueId> = members.iter().filter_map(|member| self.own.get(member.name()).copied()).collect();
        let name = format!("weights.{name}");
        let timed = |new: &mut Graph, id: ValueId| match each_grain {
            true => push(new, EachGrain {}, vec![id], &name, stage),
            false => id,
        };
        let input = match own.is_empty() {
            true => {
                let nothing = Full { value: 0.0, dtype: DType::F32, shape: vec![0] };
                let nothing = push(new, nothing, Vec::new(), &name, stage);
                timed(new, nothing)
            }
            false => {
                let runs = own.into_iter().map(|id| timed(new, id)).collect();
                push(new, Pack {}, runs, &name, stage)
            }
        };
        let op = AxisJoin { axis: DATA.into(), dim: 0, sizes: sizes.clone() };
        push(new, op, vec![input], &name, stage)
    }

    /// A value as this node reads it.
    fn input(&mut self, rebuild: &mut Rebuild<'g>, reader: NodeId, id: ValueId) -> ValueId {
        let layers = &self.weights[id.0 as usize];
        if layers.is_empty() {
            return rebuild.get(id);
        }
        let uses: Vec<usize> = layers.iter().map(|layer| self.use_of[&(reader, *layer)]).collect();
        if let Some(made) = self.made.get(&(id, uses.clone())) {
            return *made;
        }
        let node = self.graph.maker(id);
        let outputs = match node.op.is::<EachGrain>() {
            true => vec![self.weight(&mut rebuild.new, node, uses[0])],
            false => {
                let inputs = node.inputs.iter().map(|input| self.input(rebuild, reader, *input)).collect();
                let types = self.graph.types(&node.outputs);
                let new = rebuild.new.push_typed(Arc::clone(&node.op), inputs, types, node.scope.clone(), node.stage);
                rebuild.new.node(new).outputs.clone()
            }
        };
        for (old, new) in node.outputs.iter().zip(outputs) {
            self.made.insert((*old, uses.clone()), new);
        }
        self.made[&(id, uses)]
    }

    /// A parameter in the layer that was gathered.
    fn weight(&self, new: &mut Graph, node: &Node, number: usize) -> ValueId {
        let param = self.graph.maker(node.inputs[0]).op.downcast::<Param>();
        let (layer, member) = self.places[param.map_or("", |param| param.name.as_str())];
        let start = self.layers.0[layer].members[member].start;
        let flat = self.uses[number].gathered.expect("a layer is gathered before it is read");
        tensor_at(new, flat, start, &self.graph.ty(node.outputs[0]).shape, self.uses[number].stage)
    }
}
