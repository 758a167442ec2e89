//! A model's step on one rank, unit by unit: its repeated layers, and what comes before and after them.
//!
//! Counted from the graph that the strategies make for a rank, before data parallelism and the pipeline: these exchange whole
//! gradients and cut between units, which [`compose`](crate::compose()) does by arithmetic. Layers that cost the same are one unit
//! that stands in several places ([`Anatomy::order`]), so a model of many layers is counted from one of a few
//! ([`Anatomy::stretched`]).

use crate::collective::CollectiveKind;
use crate::op_cost::{OpCall, body};
use kolo_exec::Offload;
use kolo_graph::collective::Movement;
use kolo_graph::layout::all_shown_by;
use kolo_graph::sources::GrainSum;
use kolo_graph::{DType, Graph, Node, Phase, Stage, Type, ValueId};
use kolo_parallel::recompute::layer_of;
use std::collections::BTreeMap;

/// An exchange inside a unit.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitExchange {
    pub axis: String,
    pub kind: CollectiveKind,
    pub reals: f64,
}

/// A part of a unit's work on a micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UnitPass {
    pub calls: Vec<OpCall>,
    pub exchanges: Vec<UnitExchange>,
}

/// Numbers that are kept, whose width may be the precision's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Kept {
    pub reals: f64,
    pub bytes: f64,
}

impl Kept {
    pub fn bytes_at(&self, width: usize) -> f64 {
        self.reals * width as f64 + self.bytes
    }

    fn add(&mut self, ty: &Type, sign: f64) {
        match ty.dtype {
            DType::F32 => self.reals += sign * ty.elements() as f64,
            _ => self.bytes += sign * ty.bytes() as f64,
        }
    }
}

/// A repeated layer, or what comes before or after them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Unit {
    pub forward: UnitPass,
    pub input: UnitPass,
    pub weight: UnitPass,
    /// Numbers of the parameters that it keeps.
    pub parameters: f64,
    /// Of parameters that it reads and another unit keeps.
    pub borrowed: f64,
    /// What its forward pass keeps for the backward pass.
    pub saved: Kept,
    /// What its backward pass holds at its peak, beyond what all units up to it have saved.
    pub transient: Kept,
    /// What it hands to the next unit.
    pub handed_on: Kept,
    /// Logits of its loss, which a system may copy to f32.
    pub widened: f64,
}

/// A rank's step, unit by unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Anatomy {
    /// The units that differ.
    pub units: Vec<Unit>,
    /// The units of the model in the order of the forward pass, by their number in `units`.
    pub order: Vec<usize>,
    /// Bytes that the update reads and writes, per parameter.
    pub update_bytes: f64,
    /// Calls of the update.
    pub update_calls: f64,
    /// Bytes of the optimizer's state, per parameter.
    pub optimizer_bytes: f64,
    /// What the host keeps and updates instead of the device.
    pub offload: Offload,
    /// Operations of the model on one micro-batch, nothing computed twice; and of one of its repeated layers.
    pub model_flops: f64,
    pub layer_flops: f64,
    /// Samples of the micro-batch.
    pub samples: usize,
    /// Names of the layers, if what each computes again can be chosen: as many as units between the first and the last, or none.
    pub layers: Vec<String>,
}

impl Anatomy {
    /// Counts a rank's training graph of a micro-batch of so many samples. The operations are the [`product_flops`] of the graph
    /// without what is computed again.
    pub fn of(graph: &Graph, samples: usize, (model_flops, layer_flops): (f64, f64)) -> Self {
        let counting = Counting::new(graph);
        let mut all = vec![Unit::default(); counting.count];
        counting.add_calls(&mut all);
        counting.add_parameters(&mut all);
        counting.add_memory(&mut all);
        let (update_bytes, update_calls, optimizer_bytes) = counting.update();
        let (mut units, mut order): (Vec<Unit>, Vec<usize>) = (Vec::new(), Vec::new());
        for unit in all {
            let known = units.iter().position(|other| *other == unit);
            order.push(known.unwrap_or(units.len()));
            if known.is_none() {
                units.push(unit);
            }
        }
        let (offload, layers) = (Offload::None, Vec::new());
        Self {
            units,
            order,
            update_bytes,
            update_calls,
            optimizer_bytes,
            offload,
            model_flops,
            layer_flops,
            samples,
            layers,
        }
    }

    /// The same step with the names of the layers of which can be chosen what each computes again.
    pub fn naming(self, layers: Vec<String>) -> Self {
        let layers = if layers.len() + 2 == self.order.len() { layers } else { Vec::new() };
        Self { layers, ..self }
    }

    /// The same step with this much kept and updated by the host.
    pub fn offloading(self, offload: Offload) -> Self {
        Self { offload, ..self }
    }

    /// The same model with more layers, from one with fewer: the layers between the second and the last but one, which have to
    /// be alike, stand for all that are added. `None` if they are not alike, or too few.
    pub fn stretched(&self, more: usize) -> Option<Self> {
        // Before, first layer, alike layers, last layer, after.
        let inner = self.order.get(2..self.order.len().checked_sub(2)?)?;
        let unit = *inner.first()?;
        if inner.iter().any(|other| *other != unit) {
            return None;
        }
        let mut order = self.order.clone();
        order.splice(2..2, std::iter::repeat_n(unit, more));
        let layers = order.len() as f64 / self.order.len() as f64;
        let model_flops = self.model_flops + self.layer_flops * more as f64;
        let update_calls = self.update_calls * layers;
        let layers = numbered_on(&self.layers, more);
        Some(Self { order, model_flops, update_calls, layers, ..self.clone() })
    }

    /// Numbers of all parameters of the rank.
    pub fn parameters(&self) -> f64 {
        self.order.iter().map(|unit| self.units[*unit].parameters).sum()
    }
}

/// Names that end in the numbers 0, 1, …, with so many more of them; none if they end otherwise.
fn numbered_on(names: &[String], more: usize) -> Vec<String> {
    let Some(prefix) = names.first().and_then(|name| name.strip_suffix('0')) else { return Vec::new() };
    let all: Vec<String> = (0..names.len() + more).map(|number| format!("{prefix}{number}")).collect();
    if all.starts_with(names) { all } else { Vec::new() }
}

/// What part of a step a node belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Forward,
    Input,
    Weight,
}

struct Counting<'g> {
    graph: &'g Graph,
    phases: Vec<Phase>,
    /// The unit of every node of the grains that computes something.
    unit_of: Vec<Option<usize>>,
    count: usize,
    shown: Vec<ValueId>,
}

/// Whether a node of this phase computes something.
fn computes(node: &Node, phase: Phase) -> bool {
    phase == Phase::Grain && !node.inputs.is_empty()
}

impl<'g> Counting<'g> {
    fn new(graph: &'g Graph) -> Self {
        let phases = graph.phases();
        let (unit_of, count) = label(graph, &phases);
        Self { graph, phases, unit_of, count, shown: all_shown_by(graph) }
    }

    fn part_of(&self) -> Vec<Part> {
        let graph = self.graph;
        let mut leads = vec![false; graph.nodes.len()];
        for (at, node) in graph.nodes.iter().enumerate().rev() {
            if self.unit_of[at].is_none() || node.stage != Stage::Backward {
                continue;
            }
            for id in &node.inputs {
                let maker = graph.value(*id).node.0 as usize;
                leads[maker] |= leads[at] || self.unit_of[maker] != self.unit_of[at];
            }
        }
        let part = |(at, node): (usize, &Node)| match node.stage {
            Stage::Forward => Part::Forward,
            _ if leads[at] => Part::Input,
            _ => Part::Weight,
        };
        graph.nodes.iter().enumerate().map(part).collect()
    }

    fn add_calls(&self, units: &mut [Unit]) {
        let parts = self.part_of();
        for (at, node) in self.graph.nodes.iter().enumerate() {
            let Some(unit) = self.unit_of[at] else { continue };
            let pass = match parts[at] {
                Part::Forward => &mut units[unit].forward,
                Part::Input => &mut units[unit].input,
                Part::Weight => &mut units[unit].weight,
            };
            if let Some(exchange) = self.exchange(node) {
                pass.exchanges.push(exchange);
            } else if !node.op.view() {
                pass.calls.push(self.call(node));
                if let Some(input) = node.op.widened().filter(|_| parts[at] == Part::Forward) {
                    units[unit].widened += self.graph.ty(node.inputs[input]).elements() as f64;
                }
            }
        }
    }

    fn call(&self, node: &Node) -> OpCall {
        let (inputs, outputs) = (self.graph.types(&node.inputs), self.graph.types(&node.outputs));
        let flops = node.op.flops(&inputs, &outputs) as f64;
        let mut moved = Kept::default();
        inputs.iter().chain(&outputs).for_each(|ty| moved.add(ty, 1.0));
        let reals_of = |chosen: &dyn Fn(&ValueId) -> bool| {
            let mut kept = Kept::default();
            node.inputs.iter().filter(|id| chosen(id)).for_each(|id| kept.add(self.graph.ty(*id), 1.0));
            kept.reals
        };
        let weights = reals_of(&|id| self.phases[self.graph.value(*id).node.0 as usize] == Phase::Before);
        let reread = if node.op.reads_twice() { reals_of(&|_| true) } else { 0.0 };
        let body = body(&*node.op, flops, &inputs, &outputs);
        let (name, composite) = (node.op.name(), node.op.composite());
        OpCall { name, body, flops, reals: moved.reals, bytes: moved.bytes, weights, reread, composite }
    }

    fn exchange(&self, node: &Node) -> Option<UnitExchange> {
        let collective = node.op.collective()?;
        let reals = |ids: &[ValueId]| ids.first().map_or(0.0, |id| self.graph.ty(*id).elements() as f64);
        let (kind, reals) = match collective.movement {
            Movement::Sum | Movement::SumBucket => (CollectiveKind::AllReduce, reals(&node.inputs)),
            Movement::Gather { .. } | Movement::Join { .. } | Movement::GatherBucket { .. } => {
                (CollectiveKind::AllGather, reals(&node.outputs))
            }
            Movement::Scatter { .. } | Movement::Share { .. } | Movement::ScatterBucket { .. } => {
                (CollectiveKind::ReduceScatter, reals(&node.inputs))
            }
            Movement::AllToAll { .. } => (CollectiveKind::AllToAll, reals(&node.inputs)),
            Movement::Halo(halo) => {
                let rows = halo.own(halo.rank).len().max(1);
                (CollectiveKind::Send, reals(&node.inputs) / rows as f64 * halo.sent() as f64)
            }
            Movement::Shift { .. } | Movement::Send { .. } => (CollectiveKind::Send, reals(&node.inputs)),
            Movement::Receive { .. } | Movement::Barrier => (CollectiveKind::Send, 0.0),
        };
        Some(UnitExchange { axis: collective.axis.into(), kind, reals })
    }

    /// A parameter belongs to the first unit that reads it; others borrow it.
    fn add_parameters(&self, units: &mut [Unit]) {
        let readers = self.graph.readers();
        for (id, _) in self.graph.params() {
            let mut reading: Vec<usize> = Vec::new();
            let mut todo = vec![id];
            while let Some(value) = todo.pop() {
                for reader in &readers[value.0 as usize] {
                    let node = self.graph.node(*reader);
                    match self.unit_of[reader.0 as usize] {
                        Some(unit) if node.stage == Stage::Forward => reading.push(unit),
                        Some(_) => {}
                        None if self.phases[reader.0 as usize] == Phase::Before => todo.extend(&node.outputs),
                        None => {}
                    }
                }
            }
            reading.sort_unstable();
            reading.dedup();
            let elements = self.graph.ty(id).elements() as f64;
            let home = reading.first().copied().unwrap_or(0);
            units[home].parameters += elements;
            reading.iter().skip(1).for_each(|unit| units[*unit].borrowed += elements);
        }
    }

    /// Bytes that the update moves and calls it makes, and bytes of state, per parameter.
    fn update(&self) -> (f64, f64, f64) {
        let graph = self.graph;
        let parameters = (graph.parameter_count() as f64).max(1.0);
        let (mut bytes, mut calls) = (0.0, 0.0);
        for (at, node) in graph.nodes.iter().enumerate() {
            if self.phases[at] != Phase::After || node.op.view() || node.op.is::<GrainSum>() || node.inputs.is_empty() {
                continue;
            }
            calls += 1.0;
            bytes += node.inputs.iter().chain(&node.outputs).map(|id| graph.ty(*id).bytes() as f64).sum::<f64>();
        }
        let optimizer = graph.optimizer_states();
        let states = graph.states().filter(|(id, _)| optimizer.contains(id)).map(|(id, _)| graph.ty(id).bytes() as f64);
        (bytes / parameters, calls, states.sum::<f64>() / parameters)
    }

    /// Counts what lives when: what forward passes keep, and what is on top of it in each unit's backward pass.
    fn add_memory(&self, units: &mut [Unit]) {
        let graph = self.graph;
        let (end, summed) = self.lives();
        let mut ends: Vec<Vec<ValueId>> = vec![Vec::new(); graph.nodes.len()];
        let mut live = Kept::default();
        let mut peaks = vec![Kept::default(); units.len()];
        for (at, node) in graph.nodes.iter().enumerate().filter(|(at, _)| self.phases[*at] == Phase::Grain) {
            for id in node.outputs.iter().filter(|id| self.shown[id.0 as usize] == **id && !summed[id.0 as usize]) {
                let Some(last) = end[id.0 as usize] else { continue };
                live.add(graph.ty(*id), 1.0);
                ends[last].push(*id);
                if node.stage == Stage::Forward && graph.nodes[last].stage == Stage::Backward {
                    units[self.unit_of[at].unwrap_or(0)].saved.add(graph.ty(*id), 1.0);
                }
            }
            let backward = node.stage == Stage::Backward;
            if let Some(unit) = self.unit_of[at].filter(|_| backward) {
                peaks[unit].reals = peaks[unit].reals.max(live.reals);
                peaks[unit].bytes = peaks[unit].bytes.max(live.bytes);
            }
            std::mem::take(&mut ends[at]).iter().for_each(|id| live.add(graph.ty(*id), -1.0));
        }
        let mut below = Kept::default();
        for (unit, peak) in units.iter_mut().zip(peaks) {
            below = Kept { reals: below.reals + unit.saved.reals, bytes: below.bytes + unit.saved.bytes };
            unit.transient =
                Kept { reals: (peak.reals - below.reals).max(0.0), bytes: (peak.bytes - below.bytes).max(0.0) };
        }
        self.add_handed_on(units);
    }

    /// The last node of the grains that reads each value, seen through views, and whether it is the term of a sum over grains,
    /// which lies among the gradients.
    fn lives(&self) -> (Vec<Option<usize>>, Vec<bool>) {
        let (mut end, mut summed) = (vec![None; self.graph.values.len()], vec![false; self.graph.values.len()]);
        for (at, node) in self.graph.nodes.iter().enumerate() {
            for id in &node.inputs {
                let root = self.shown[id.0 as usize].0 as usize;
                if node.op.is::<GrainSum>() {
                    summed[root] = true;
                } else if self.phases[at] == Phase::Grain {
                    end[root] = Some(at);
                }
            }
        }
        (end, summed)
    }

    /// What forward nodes of later units read of a unit goes from one to the next.
    fn add_handed_on(&self, units: &mut [Unit]) {
        let graph = self.graph;
        let mut until: BTreeMap<ValueId, (usize, usize)> = BTreeMap::new();
        for (at, node) in graph.nodes.iter().enumerate().filter(|(_, node)| node.stage == Stage::Forward) {
            let Some(reader) = self.unit_of[at] else { continue };
            for id in &node.inputs {
                let root = self.shown[id.0 as usize];
                let Some(maker) = self.unit_of[graph.value(root).node.0 as usize].filter(|maker| *maker < reader)
                else {
                    continue;
                };
                let entry = until.entry(root).or_insert((maker, reader));
                entry.1 = entry.1.max(reader);
            }
        }
        for (value, (first, last)) in until {
            units[first..last].iter_mut().for_each(|unit| unit.handed_on.add(graph.ty(value), 1.0));
        }
    }
}

/// Operations of the products of a rank's grain: of a graph in which nothing is computed again, those of the model. In all, and
/// of the second of its repeated layers.
pub fn product_flops(graph: &Graph) -> (f64, f64) {
    let phases = graph.phases();
    let (unit_of, _) = label(graph, &phases);
    let (mut all, mut of_layer) = (0.0, 0.0);
    for (at, node) in graph.nodes.iter().enumerate().filter(|(at, _)| phases[*at] == Phase::Grain) {
        if crate::is_product(node) {
            let flops = node.op.flops(&graph.types(&node.inputs), &graph.types(&node.outputs)) as f64;
            let flops = flops * crate::model_share(node);
            all += flops;
            of_layer += if unit_of[at] == Some(SECOND_LAYER) { flops } else { 0.0 };
        }
    }
    (all, of_layer)
}

/// Unit 0 is what comes before the layers.
const SECOND_LAYER: usize = 2;

/// The unit of every node of the grains that computes something, and how many units there are: what comes before the layers, each
/// layer, and what comes after them. What has no layer of its own goes with the node before it.
fn label(graph: &Graph, phases: &[Phase]) -> (Vec<Option<usize>>, usize) {
    let mut layers: BTreeMap<&str, usize> = BTreeMap::new();
    let forward = |node: &Node| node.stage == Stage::Forward;
    let inside = |at: usize, node: &Node| computes(node, phases[at]);
    let numbered = graph.nodes.iter().any(|node| layer_of(&node.scope).is_some());
    // Layers without numbers are the first names of scopes.
    let layer_of = |scope: &'_ str| -> Option<usize> {
        let first = scope.find('.').unwrap_or(scope.len());
        match numbered {
            true => layer_of(scope).map(str::len),
            false => (first > 0).then_some(first),
        }
    };
    let mut last_layered = 0;
    for (at, node) in graph.nodes.iter().enumerate().filter(|(at, node)| inside(*at, node) && forward(node)) {
        if let Some(length) = layer_of(&node.scope) {
            let next = layers.len() + 1;
            layers.entry(&node.scope[..length]).or_insert(next);
            last_layered = at;
        }
    }
    let after = layers.len() + 1;
    let last_backward = graph.nodes.iter().rposition(|node| !forward(node) && layer_of(&node.scope).is_some());
    let (mut unit, mut labels) = (0, vec![None; graph.nodes.len()]);
    let mut turned = false;
    for (at, node) in graph.nodes.iter().enumerate().filter(|(at, node)| inside(*at, node)) {
        if !forward(node) && !turned {
            (turned, unit) = (true, after);
        }
        let layer = layer_of(&node.scope).and_then(|length| layers.get(&node.scope[..length]).copied());
        unit = match layer {
            Some(layer) => layer,
            None if forward(node) && at > last_layered => after,
            None if !forward(node) && last_backward.is_none_or(|last| at > last) => 0,
            None => unit,
        };
        labels[at] = Some(unit);
    }
    (labels, after + 1)
}
