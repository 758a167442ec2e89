//! The graph that a rank of a pipeline runs: its stages, what it receives and what it sends.
//!
//! A parameter is kept by one stage; other stages that read it receive it when a step begins. Activations and gradients travel in
//! the grains, from the rank that makes them to every rank that reads them. After the grains tensors stay where they are; numbers
//! that several stages want (the loss, the parts of a gradient's norm) are gathered by all ranks.

use super::stages::Stages;
use kolo_graph::collective::{AfterGrains, AxisJoin, Receive, Send};
use kolo_graph::graph::Phase;
use kolo_graph::sources::{Full, GrainSum, Input, Param, State};
use kolo_graph::{DType, Graph, Node, Op, Stage, Type, ValueId};
use kolo_ops::concat::Concat;
use kolo_ops::reduce::Reshape;
use kolo_ops::slice::Slice;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// The axis along which stages lie.
pub const PIPELINE: &str = "pipeline";

/// What a rank does of a stage: forward pass, backward pass or its part for the input, and its part for the weights.
pub(super) const FORWARD: u32 = 0;
pub(super) const BACKWARD: u32 = 1;
pub(super) const WEIGHTS: u32 = 2;
const KINDS: u32 = 3;

/// The number of a segment.
pub(super) fn segment(chunk: usize, kind: u32) -> u32 {
    chunk as u32 * KINDS + kind
}

/// Where the stages lie, and one rank.
#[derive(Clone, Debug)]
pub(super) struct Ranks {
    /// Of every stage.
    pub of_stage: Vec<usize>,
    pub ranks: usize,
    pub rank: usize,
    /// Whether the backward pass is split into gradients of inputs and of weights.
    pub split_backward: bool,
}

impl Ranks {
    /// Which of its rank's stages a stage is.
    fn chunk(&self, stage: usize) -> usize {
        self.of_stage[..stage].iter().filter(|rank| **rank == self.of_stage[stage]).count()
    }

    fn chunks(&self) -> usize {
        self.of_stage.iter().filter(|rank| **rank == self.rank).count()
    }
}

/// A rank's graph.
pub(super) fn lower(graph: &Graph, stages: &Stages, ranks: &Ranks) -> Graph {
    let mut labels = stages.labels_of_grain(graph);
    stages.labels_after(graph, &mut labels);
    let phases = graph.phases();
    let kinds = kinds(graph, &labels, &phases, ranks);
    let mut lowering = Lowering {
        graph,
        stages,
        ranks,
        labels,
        phases,
        kinds,
        new: Graph::default(),
        map: HashMap::new(),
        gathered: None,
        wanted: BTreeMap::new(),
    };
    lowering.find_wanted();
    lowering.send_params();
    lowering.grains();
    lowering.after();
    lowering.new
}

/// The kind of segment of every node of the grains.
fn kinds(graph: &Graph, labels: &[Option<usize>], phases: &[Phase], ranks: &Ranks) -> Vec<u32> {
    let mut kinds: Vec<u32> =
        graph.nodes.iter().map(|node| if node.stage == Stage::Forward { FORWARD } else { BACKWARD }).collect();
    // A sum goes with its term.
    for (at, node) in graph.nodes.iter().enumerate().filter(|(at, _)| phases[*at] == Phase::After) {
        if let Some(id) = node.inputs.first().filter(|_| node.op.is::<GrainSum>()) {
            kinds[at] = kinds[graph.value(*id).node.0 as usize];
        }
    }
    if !ranks.split_backward {
        return kinds;
    }
    // What another stage's backward pass needs comes first; all else is about weights.
    let mut leads = vec![false; graph.nodes.len()];
    for at in (0..graph.nodes.len()).rev() {
        let node = &graph.nodes[at];
        if phases[at] != Phase::Grain || kinds[at] != BACKWARD {
            continue;
        }
        for id in &node.inputs {
            let maker = graph.value(*id).node.0 as usize;
            leads[maker] |= leads[at] || labels[maker] != labels[at];
        }
    }
    for at in 0..graph.nodes.len() {
        let sums = graph.nodes[at].op.is::<GrainSum>();
        if kinds[at] == BACKWARD && phases[at] == Phase::Grain && !leads[at] {
            kinds[at] = WEIGHTS;
        } else if sums && kinds[at] == BACKWARD {
            let maker = graph.value(graph.nodes[at].inputs[0]).node.0 as usize;
            kinds[at] = kinds[maker];
        }
    }
    kinds
}

struct Lowering<'g> {
    graph: &'g Graph,
    stages: &'g Stages,
    ranks: &'g Ranks,
    labels: Vec<Option<usize>>,
    phases: Vec<Phase>,
    kinds: Vec<u32>,
    new: Graph,
    /// What old values are on this rank.
    map: HashMap<ValueId, ValueId>,
    /// What was gathered last.
    gathered: Option<ValueId>,
    /// The other ranks that want a value of the grains, or a parameter.
    wanted: BTreeMap<ValueId, BTreeSet<usize>>,
}

impl Lowering<'_> {
    fn rank_of(&self, stage: usize) -> usize {
        self.ranks.of_stage[stage]
    }

    fn label(&self, id: ValueId) -> Option<usize> {
        self.labels[self.graph.value(id).node.0 as usize]
    }

    fn phase(&self, id: ValueId) -> Phase {
        self.phases[self.graph.value(id).node.0 as usize]
    }

    /// The rank that makes a value of the grains or keeps a parameter; `None` for what every rank makes for itself.
    fn home(&self, id: ValueId) -> Option<usize> {
        if let Some(param) = self.graph.maker(id).op.downcast::<Param>() {
            return Some(self.rank_of(self.stages.of_param(&param.name)));
        }
        self.label(id).map(|stage| self.rank_of(stage))
    }

    /// Notes who wants what of others.
    fn find_wanted(&mut self) {
        let graph = self.graph;
        let all: Vec<usize> = (0..self.ranks.ranks).collect();
        for (at, node) in graph.nodes.iter().enumerate() {
            let source = node.inputs.is_empty();
            let ranks: Vec<usize> = match self.labels[at] {
                Some(stage) => vec![self.rank_of(stage)],
                None if self.phases[at] == Phase::After && !source => all.clone(),
                // Before the grains: made by whoever reads it.
                None => continue,
            };
            for rank in ranks {
                node.inputs.iter().for_each(|id| self.want(*id, rank));
            }
        }
        for (_, id) in &graph.outputs {
            if self.phase(*id) != Phase::After {
                all.iter().for_each(|rank| self.want(*id, *rank));
            }
        }
    }

    fn want(&mut self, id: ValueId, rank: usize) {
        match self.home(id) {
            Some(home) if home != rank && self.phase(id) != Phase::After => {
                self.wanted.entry(id).or_default().insert(rank);
            }
            Some(_) => {}
            None if self.phase(id) == Phase::Before => {
                self.graph.maker(id).inputs.iter().for_each(|input| self.want(*input, rank));
            }
            None => {}
        }
    }

    fn push(&mut self, op: Arc<dyn Op>, inputs: Vec<ValueId>, like: &Node, segment: u32) -> Vec<ValueId> {
        let id = match self.new.push(op, inputs, like.scope.clone(), like.stage) {
            Ok(id) => id,
            Err(error) => panic!("a node fits on its rank as it did on one: {error}"),
        };
        self.new.set_segment(id, segment);
        self.new.node(id).outputs.clone()
    }

    /// Parameters that other stages read travel when the step begins.
    fn send_params(&mut self) {
        let rank = self.ranks.rank;
        let graph = self.graph;
        for (id, _) in graph.params() {
            let (node, home) = (graph.maker(id), self.home(id));
            let others = self.wanted.get(&id).cloned().unwrap_or_default();
            if home == Some(rank) {
                let param = self.push(Arc::clone(&node.op), Vec::new(), node, 0)[0];
                self.map.insert(id, param);
                others.iter().for_each(|to| _ = self.push(send(*to), vec![param], node, 0));
            } else if let Some(from) = home.filter(|_| others.contains(&rank)) {
                let op = receive(from, graph.ty(id), true);
                let received = self.push(op, Vec::new(), node, 0)[0];
                self.map.insert(id, received);
            }
        }
    }

    /// The old value on this rank. What depends on parameters alone is made here.
    fn get(&mut self, id: ValueId) -> ValueId {
        if let Some(known) = self.map.get(&id) {
            return *known;
        }
        let graph = self.graph;
        let node = graph.maker(id);
        assert!(
            self.phase(id) == Phase::Before || node.op.is::<Input>() || node.op.is::<State>(),
            "value %{} of `{}` is not on rank {}",
            id.0,
            node.op.signature(),
            self.ranks.rank
        );
        self.emit(node, 0);
        self.map[&id]
    }

    /// Appends a node of the old graph.
    fn emit(&mut self, node: &Node, segment: u32) {
        let inputs = node.inputs.iter().map(|id| self.get(*id)).collect();
        let outputs = self.push(Arc::clone(&node.op), inputs, node, segment);
        node.outputs.iter().zip(outputs).for_each(|(old, new)| _ = self.map.insert(*old, new));
    }

    /// The order in which this rank runs the nodes of a grain: forward by stage, then backward from the last stage.
    fn key(&self, at: usize, stage: usize) -> (usize, u32) {
        let (chunk, chunks) = (self.ranks.chunk(stage), self.ranks.chunks());
        match self.kinds[at] {
            FORWARD => (chunk, FORWARD),
            kind => (2 * chunks - chunk, kind),
        }
    }

    fn grains(&mut self) {
        let (graph, rank) = (self.graph, self.ranks.rank);
        let mut own: Vec<(usize, usize)> = Vec::new();
        for (at, label) in self.labels.iter().enumerate() {
            if let Some(stage) = label.filter(|stage| self.rank_of(*stage) == rank && self.phases[at] == Phase::Grain) {
                own.push((at, stage));
            }
        }
        own.sort_by_key(|(at, stage)| (self.key(*at, *stage), *at));
        for (at, stage) in own {
            let node = &graph.nodes[at];
            let number = segment(self.ranks.chunk(stage), self.kinds[at]);
            for id in &node.inputs {
                self.receive_with(*id, number);
            }
            self.emit(node, number);
            for id in &node.outputs {
                let others = self.wanted.get(id).cloned().unwrap_or_default();
                let here = self.map[id];
                others.iter().for_each(|to| _ = self.push(send(*to), vec![here], node, number));
            }
        }
        // Gradients that another stage makes of parameters kept here.
        for (at, node) in graph.nodes.iter().enumerate().filter(|(_, node)| node.op.is::<GrainSum>()) {
            if let Some(stage) = self.labels[at].filter(|stage| self.rank_of(*stage) == rank) {
                self.receive_with(node.inputs[0], segment(self.ranks.chunk(stage), self.kinds[at]));
            }
        }
        // What all ranks are to show.
        let last = segment(self.ranks.chunks().saturating_sub(1), FORWARD);
        for (_, id) in &graph.outputs {
            if self.phase(*id) == Phase::Grain {
                self.receive_with(*id, last);
            }
        }
    }

    /// Receives a value that another rank makes, and with it all that the same segment of that rank sends here, in its order.
    fn receive_with(&mut self, id: ValueId, number: u32) {
        let (graph, rank) = (self.graph, self.ranks.rank);
        let foreign = |this: &Self, id: ValueId| {
            let home = this.home(id).filter(|home| *home != rank);
            home.filter(|_| this.phase(id) == Phase::Grain && this.label(id).is_some())
        };
        let Some(from) = foreign(self, id) else { return };
        if self.map.contains_key(&id) {
            return;
        }
        let of = |this: &Self, id: ValueId| (this.label(id), this.kinds[graph.value(id).node.0 as usize]);
        let same = of(self, id);
        let together: Vec<ValueId> = self
            .wanted
            .iter()
            .filter(|(other, ranks)| {
                ranks.contains(&rank) && of(self, **other) == same && foreign(self, **other).is_some()
            })
            .map(|(other, _)| *other)
            .collect();
        for other in together {
            let node = graph.maker(other);
            let received = self.push(receive(from, graph.ty(other), false), Vec::new(), node, number)[0];
            self.map.insert(other, received);
        }
    }

    /// How many times numbers were gathered before each node after the grains can run.
    fn levels(&self) -> Vec<usize> {
        let graph = self.graph;
        let mut levels = vec![0; graph.nodes.len()];
        for (at, node) in graph.nodes.iter().enumerate().filter(|(at, _)| self.phases[*at] == Phase::After) {
            let level = |id: &ValueId| {
                let maker = graph.value(*id).node.0 as usize;
                levels[maker] + usize::from(self.crosses(*id, self.labels[at]))
            };
            levels[at] = node.inputs.iter().map(level).max().unwrap_or(0);
        }
        levels
    }

    /// Whether a value after the grains is made by one stage and read by another, or by all.
    fn crosses(&self, id: ValueId, reader: Option<usize>) -> bool {
        let rank = |stage: usize| self.rank_of(stage);
        self.phase(id) == Phase::After
            && self.label(id).is_some_and(|stage| reader.is_none_or(|reader| rank(reader) != rank(stage)))
    }

    fn after(&mut self) {
        let (graph, rank) = (self.graph, self.ranks.rank);
        let levels = self.levels();
        let mut gathered: BTreeMap<usize, BTreeSet<ValueId>> = BTreeMap::new();
        for (at, node) in graph.nodes.iter().enumerate().filter(|(at, _)| self.phases[*at] == Phase::After) {
            for id in node.inputs.iter().filter(|id| self.crosses(**id, self.labels[at])) {
                gathered.entry(levels[graph.value(*id).node.0 as usize]).or_default().insert(*id);
            }
        }
        for (_, id) in graph.outputs.iter().filter(|(_, id)| self.crosses(*id, None)) {
            gathered.entry(levels[graph.value(*id).node.0 as usize]).or_default().insert(*id);
        }
        let most = levels.iter().copied().max().unwrap_or(0).max(gathered.keys().copied().max().unwrap_or(0));
        // What others wait for and what is shown comes before the updates, which a loss that is not finite must prevent.
        let first = self.leading(gathered.values().flatten().copied());
        for (level, early) in (0..=most).map(|level| (level, true)).chain((0..=most).map(|level| (level, false))) {
            for (at, node) in graph.nodes.iter().enumerate() {
                let own = self.labels[at].is_none_or(|stage| self.rank_of(stage) == rank);
                if self.phases[at] == Phase::After && levels[at] == level && own && first[at] == early {
                    let number = self.labels[at].map_or(0, |stage| segment(self.ranks.chunk(stage), self.kinds[at]));
                    self.emit(node, number);
                }
            }
            if let Some(values) = gathered.get(&level).filter(|_| early) {
                self.gather(values, level);
            }
        }
        self.new.outputs = graph.outputs.iter().map(|(name, id)| (name.clone(), self.get(*id))).collect();
        for (state, value) in &graph.updates {
            let home = self.home(*value).or_else(|| self.home(*state));
            if home.is_none_or(|home| home == rank) {
                let pair = (self.get(*state), self.get(*value));
                self.new.updates.push(pair);
            }
        }
    }

    /// For every node, whether these values or the named results follow from it.
    fn leading(&self, values: impl Iterator<Item = ValueId>) -> Vec<bool> {
        let graph = self.graph;
        let mut leads = vec![false; graph.nodes.len()];
        let outputs = graph.outputs.iter().map(|(_, id)| *id);
        values.chain(outputs).for_each(|id| leads[graph.value(id).node.0 as usize] = true);
        for at in (0..graph.nodes.len()).rev() {
            if leads[at] {
                graph.nodes[at].inputs.iter().for_each(|id| leads[graph.value(*id).node.0 as usize] = true);
            }
        }
        leads
    }

    /// All ranks get these numbers, each from the rank that has it.
    fn gather(&mut self, values: &BTreeSet<ValueId>, level: usize) {
        let (graph, rank) = (self.graph, self.ranks.rank);
        let like = Node {
            op: Arc::new(AfterGrains {}),
            inputs: Vec::new(),
            outputs: Vec::new(),
            // Ranks call the exchange the same.
            scope: format!("numbers.{level}").into(),
            stage: Stage::Update,
            segment: 0,
        };
        let mut of_rank: Vec<Vec<ValueId>> = vec![Vec::new(); self.ranks.ranks];
        for id in values {
            assert_eq!(graph.ty(*id), &Type::f32([]), "only numbers travel between stages after the grains");
            of_rank[self.home(*id).unwrap_or(0)].push(*id);
        }
        let mut own: Vec<ValueId> = Vec::new();
        for id in of_rank[rank].clone() {
            let number = self.get(id);
            own.extend(self.push(Arc::new(Reshape { shape: vec![1] }), vec![number], &like, 0));
        }
        if own.is_empty() {
            own = match self.gathered {
                // What follows from the last gathering comes after it, whatever else is moved.
                Some(all) => self.push(Arc::new(Slice { dim: 0, start: 0, len: 1 }), vec![all], &like, 0),
                None => {
                    let nothing = Full { value: 0.0, dtype: DType::F32, shape: vec![1] };
                    let nothing = self.push(Arc::new(nothing), Vec::new(), &like, 0);
                    self.push(Arc::new(AfterGrains {}), nothing, &like, 0)
                }
            };
        }
        let packed = if own.len() == 1 { own[0] } else { self.push(Arc::new(Concat { dim: 0 }), own, &like, 0)[0] };
        let sizes: Vec<usize> = of_rank.iter().map(|ids| ids.len().max(1)).collect();
        let mut at = 0;
        let join = AxisJoin { axis: PIPELINE.into(), dim: 0, sizes: sizes.clone() };
        let all = self.push(Arc::new(join), vec![packed], &like, 0)[0];
        self.gathered = Some(all);
        for (ids, size) in of_rank.iter().zip(sizes) {
            for (number, id) in ids.iter().enumerate() {
                let slice = Slice { dim: 0, start: at + number, len: 1 };
                let one = self.push(Arc::new(slice), vec![all], &like, 0);
                let number = self.push(Arc::new(Reshape { shape: Vec::new() }), one, &like, 0)[0];
                self.map.insert(*id, number);
            }
            at += size;
        }
    }
}

fn send(to: usize) -> Arc<dyn Op> {
    Arc::new(Send { axis: PIPELINE.into(), to })
}

fn receive(from: usize, ty: &Type, per_step: bool) -> Arc<dyn Op> {
    Arc::new(Receive { axis: PIPELINE.into(), from, dtype: ty.dtype, shape: ty.shape.to_vec(), per_step })
}
