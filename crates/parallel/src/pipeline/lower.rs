//! The graph that a rank of a pipeline runs: its stages, what it receives and what it sends.
//!
//! A parameter is kept by one stage; other stages that read it receive it when a step begins. Activations and gradients travel in
//! the grains, from the rank that makes them to every rank that reads them. After the grains tensors stay where they are; numbers
//! that several stages want (the loss, the parts of a gradient's norm) are gathered by all ranks.
//!
//! Where grains go in two directions, a rank has a copy of its stages' nodes for each, and a grain runs those of its own direction.
//! A parameter is kept where the first direction has its stage; [`super::directions`] adds the sums of both there.

use super::stages::Stages;
use kolo_graph::collective::{Receive, Send};
use kolo_graph::graph::Phase;
use kolo_graph::sources::{GrainSum, Input, Param, State};
use kolo_graph::{Graph, Node, Op, Stage, Type, ValueId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// The axis along which stages lie.
pub const PIPELINE: &str = "pipeline";

/// What a rank does of a stage: forward pass, backward pass or its part for the input, and its part for the weights.
pub(super) const FORWARD: u32 = 0;
pub(super) const BACKWARD: u32 = 1;
pub(super) const WEIGHTS: u32 = 2;
const KINDS: u32 = 3;

/// A stage of a rank: the direction it is for, and which of the rank's stages in that direction it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub direction: usize,
    pub number: usize,
}

/// Where the stages lie, and one rank.
#[derive(Clone, Debug)]
pub(super) struct Ranks {
    /// Of every stage, in each direction.
    pub of_stage: Vec<Vec<usize>>,
    pub ranks: usize,
    pub rank: usize,
    /// Whether the backward pass is split into gradients of inputs and of weights.
    pub split_backward: bool,
}

impl Ranks {
    /// Which of its rank's stages a stage is.
    pub fn chunk(&self, direction: usize, stage: usize) -> Chunk {
        let ranks = &self.of_stage[direction];
        Chunk { direction, number: ranks[..stage].iter().filter(|rank| **rank == ranks[stage]).count() }
    }

    fn chunks(&self, direction: usize, rank: usize) -> usize {
        self.of_stage[direction].iter().filter(|other| **other == rank).count()
    }

    /// The number of a segment.
    pub fn segment(&self, chunk: Chunk, kind: u32) -> u32 {
        (chunk.direction * self.of_stage[0].len() + chunk.number) as u32 * KINDS + kind
    }
}

/// A rank's graph.
pub(super) fn lower(graph: &Graph, stages: &Stages, ranks: &Ranks) -> Graph {
    let mut labels = stages.labels_of_grain(graph);
    stages.labels_after(graph, &mut labels);
    let phases = graph.phases();
    if ranks.of_stage.len() > 1 {
        // Each direction has a sum, and one rank that adds them.
        let sums = graph.nodes.iter().zip(&mut labels).filter(|(node, _)| node.op.is::<GrainSum>());
        sums.for_each(|(_, label)| _ = label.get_or_insert(0));
    }
    let kinds = kinds(graph, &labels, &phases, ranks);
    let mut lowering = Lowering {
        graph,
        stages,
        ranks,
        labels,
        phases,
        kinds,
        direction: 0,
        new: Graph::default(),
        map: HashMap::new(),
        gathered: None,
        wanted: BTreeMap::new(),
    };
    let directions = 0..ranks.of_stage.len();
    for direction in directions.clone() {
        lowering.direction = direction;
        lowering.find_wanted();
    }
    lowering.send_params();
    for direction in directions {
        lowering.direction = direction;
        lowering.grains();
    }
    lowering.join_directions();
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

pub(super) struct Lowering<'g> {
    pub(super) graph: &'g Graph,
    stages: &'g Stages,
    pub(super) ranks: &'g Ranks,
    pub(super) labels: Vec<Option<usize>>,
    pub(super) phases: Vec<Phase>,
    pub(super) kinds: Vec<u32>,
    /// The direction whose grains are in hand; the first one's ranks keep what is not of grains.
    pub(super) direction: usize,
    pub(super) new: Graph,
    /// What old values are on this rank, by the direction of their grains.
    pub(super) map: HashMap<(usize, ValueId), ValueId>,
    /// What was gathered last.
    pub(super) gathered: Option<ValueId>,
    /// The other ranks that want a value of a direction's grains, or a parameter.
    wanted: BTreeMap<(usize, ValueId), BTreeSet<usize>>,
}

impl Lowering<'_> {
    pub(super) fn rank_of(&self, stage: usize) -> usize {
        self.ranks.of_stage[self.direction][stage]
    }

    /// A value, with the direction in hand if grains of each have one of their own.
    fn key_of(&self, id: ValueId) -> (usize, ValueId) {
        let of_grain = self.phase(id) == Phase::Grain && self.label(id).is_some();
        (if of_grain { self.direction } else { 0 }, id)
    }

    pub(super) fn set(&mut self, old: ValueId, new: ValueId) {
        let key = self.key_of(old);
        self.map.insert(key, new);
    }

    /// The ranks that want a value of this one.
    fn wanting(&self, id: ValueId) -> BTreeSet<usize> {
        self.wanted.get(&self.key_of(id)).cloned().unwrap_or_default()
    }

    /// The segment of a node of the direction in hand.
    pub(super) fn segment_of(&self, at: usize, stage: usize) -> u32 {
        self.ranks.segment(self.ranks.chunk(self.direction, stage), self.kinds[at])
    }

    pub(super) fn label(&self, id: ValueId) -> Option<usize> {
        self.labels[self.graph.value(id).node.0 as usize]
    }

    pub(super) fn phase(&self, id: ValueId) -> Phase {
        self.phases[self.graph.value(id).node.0 as usize]
    }

    /// The rank that makes a value of the grains or keeps a parameter; `None` for what every rank makes for itself.
    pub(super) fn home(&self, id: ValueId) -> Option<usize> {
        if let Some(param) = self.graph.maker(id).op.downcast::<Param>() {
            return Some(self.ranks.of_stage[0][self.stages.of_param(&param.name)]);
        }
        self.label(id).map(|stage| self.rank_of(stage))
    }

    /// Notes who wants what of others.
    fn find_wanted(&mut self) {
        let graph = self.graph;
        let all: Vec<usize> = (0..self.ranks.ranks).collect();
        for (at, node) in graph.nodes.iter().enumerate() {
            // The grains of each direction are summed where it has the stage; all else is for the first one's ranks.
            if self.direction > 0 && self.phases[at] != Phase::Grain && !node.op.is::<GrainSum>() {
                continue;
            }
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
            if self.phase(*id) != Phase::After && self.direction == 0 {
                all.iter().for_each(|rank| self.want(*id, *rank));
            }
        }
    }

    fn want(&mut self, id: ValueId, rank: usize) {
        match self.home(id) {
            Some(home) if home != rank && self.phase(id) != Phase::After => {
                let key = self.key_of(id);
                self.wanted.entry(key).or_default().insert(rank);
            }
            Some(_) => {}
            None if self.phase(id) == Phase::Before => {
                self.graph.maker(id).inputs.iter().for_each(|input| self.want(*input, rank));
            }
            None => {}
        }
    }

    pub(super) fn push(&mut self, op: Arc<dyn Op>, inputs: Vec<ValueId>, like: &Node, segment: u32) -> Vec<ValueId> {
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
            let (others, message) = (self.wanting(id), self.message(id));
            if home == Some(rank) {
                let param = self.push(Arc::clone(&node.op), Vec::new(), node, 0)[0];
                self.set(id, param);
                others.iter().for_each(|to| _ = self.push(send(*to, &message), vec![param], node, 0));
            } else if let Some(from) = home.filter(|_| others.contains(&rank)) {
                let op = receive(from, graph.ty(id), true, &message);
                let received = self.push(op, Vec::new(), node, 0)[0];
                self.set(id, received);
            }
        }
    }

    /// The old value on this rank. What depends on parameters alone is made here.
    pub(super) fn get(&mut self, id: ValueId) -> ValueId {
        let key = self.key_of(id);
        if let Some(known) = self.map.get(&key) {
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
        self.map[&key]
    }

    /// Appends a node of the old graph.
    pub(super) fn emit(&mut self, node: &Node, segment: u32) {
        let inputs = node.inputs.iter().map(|id| self.get(*id)).collect();
        let outputs = self.push(Arc::clone(&node.op), inputs, node, segment);
        node.outputs.iter().zip(outputs).for_each(|(old, new)| self.set(*old, new));
    }

    /// When the rank of a stage runs a node of a grain: forward by stage, then backward from the last stage. The order of a stage
    /// and its rank does not depend on the schedule: each pass needs the one before.
    fn turn_of(&self, at: usize, stage: usize) -> (usize, u32) {
        let rank = self.rank_of(stage);
        let (chunk, chunks) = (self.ranks.chunk(self.direction, stage).number, self.ranks.chunks(self.direction, rank));
        match self.kinds[at] {
            FORWARD => (chunk, FORWARD),
            kind => (2 * chunks - chunk, kind),
        }
    }

    fn grains(&mut self) {
        let (graph, rank) = (self.graph, self.ranks.rank);
        let mut own: Vec<(Position, usize)> = Vec::new();
        for (at, label) in self.labels.iter().enumerate() {
            if let Some(stage) = label.filter(|stage| self.rank_of(*stage) == rank && self.phases[at] == Phase::Grain) {
                own.push((self.position_of(at, stage), at));
            }
        }
        own.sort_by_key(|(position, _)| *position);
        let mut arrivals = self.arrivals(&own).into_iter().peekable();
        for (position, at) in own {
            while let Some((_, ids)) = arrivals.next_if(|(by, _)| *by <= position) {
                self.receive_all(ids);
            }
            let node = &graph.nodes[at];
            self.emit(node, position.segment);
            for id in &node.outputs {
                let others = self.wanting(*id);
                let here = self.get(*id);
                let message = self.message(*id);
                others.iter().for_each(|to| _ = self.push(send(*to, &message), vec![here], node, position.segment));
            }
        }
        arrivals.for_each(|(_, ids)| self.receive_all(ids));
    }

    fn position_of(&self, at: usize, stage: usize) -> Position {
        Position { turn: self.turn_of(at, stage), at, segment: self.segment_of(at, stage) }
    }

    /// What this rank receives in a grain, by the position before which it does, each with the segment that it is received in.
    ///
    /// Both ends of a channel take its messages in one order, that of the sender: before the first message that a node reads come
    /// all that were sent before it. They have been sent by then, so nobody waits longer for that.
    fn arrivals(&self, own: &[(Position, usize)]) -> BTreeMap<Position, Vec<(ValueId, u32)>> {
        let first = self.first_reads(own);
        // By sender, in the order of its sends.
        let mut channels: BTreeMap<usize, Vec<(Position, ValueId)>> = BTreeMap::new();
        for ((direction, id), readers) in &self.wanted {
            let of_grain = self.phase(*id) == Phase::Grain;
            if *direction != self.direction || !of_grain || !readers.contains(&self.ranks.rank) {
                continue;
            }
            let (maker, stage) = (self.graph.value(*id).node.0 as usize, self.label(*id));
            let stage = stage.expect("a value of the grains that another rank makes has a stage");
            channels.entry(self.rank_of(stage)).or_default().push((self.position_of(maker, stage), *id));
        }
        let mut arrivals: BTreeMap<Position, Vec<(ValueId, u32)>> = BTreeMap::new();
        for sends in channels.values_mut() {
            sends.sort_unstable();
            // What one segment of the sender sends is received together.
            let mut until: Option<Position> = None;
            let mut of_channel: Vec<(Position, ValueId)> = Vec::new();
            for together in sends.chunk_by(|one, other| one.0.turn == other.0.turn).rev() {
                let needed = together.iter().filter_map(|(_, id)| first.get(id).copied()).chain(until).min();
                let needed = needed.expect("a value that this rank wants is read here");
                until = Some(needed);
                of_channel.extend(together.iter().rev().map(|(_, id)| (needed, *id)));
            }
            for (needed, id) in of_channel.into_iter().rev() {
                arrivals.entry(needed).or_default().push((id, needed.segment));
            }
        }
        arrivals
    }

    /// Where this rank reads each value of the grains first.
    fn first_reads(&self, own: &[(Position, usize)]) -> HashMap<ValueId, Position> {
        let (graph, rank) = (self.graph, self.ranks.rank);
        let mut first: HashMap<ValueId, Position> = HashMap::new();
        let mut read = |id: ValueId, position: Position| {
            let known = first.entry(id).or_insert(position);
            *known = position.min(*known);
        };
        for (position, at) in own {
            graph.nodes[*at].inputs.iter().for_each(|id| read(*id, *position));
        }
        // Gradients that another stage makes of parameters kept here.
        for (at, node) in graph.nodes.iter().enumerate().filter(|(_, node)| node.op.is::<GrainSum>()) {
            if let Some(stage) = self.labels[at].filter(|stage| self.rank_of(*stage) == rank) {
                read(node.inputs[0], Position { at: usize::MAX, ..self.position_of(at, stage) });
            }
        }
        // What all ranks are to show.
        let number = self.ranks.chunks(self.direction, rank).saturating_sub(1);
        let segment = self.ranks.segment(Chunk { direction: self.direction, number }, FORWARD);
        let last = Position { turn: (number, FORWARD), at: usize::MAX, segment };
        graph.outputs.iter().filter(|(_, id)| self.phase(*id) == Phase::Grain).for_each(|(_, id)| read(*id, last));
        first
    }

    /// Receives values that other ranks make, each in its segment.
    fn receive_all(&mut self, ids: Vec<(ValueId, u32)>) {
        let graph = self.graph;
        for (id, segment) in ids {
            let from = self.home(id).expect("a value that another rank makes has a home");
            let op = receive(from, graph.ty(id), false, &self.message(id));
            let received = self.push(op, Vec::new(), graph.maker(id), segment)[0];
            self.set(id, received);
        }
    }

    /// What both ends of a message call a value: its number in the graph that is cut, the direction of its grain, its layer.
    pub(super) fn message(&self, id: ValueId) -> String {
        let up = if self.key_of(id).0 > 0 { " up" } else { "" };
        format!("%{}{up} {}", id.0, self.graph.maker(id).scope).trim_end().into()
    }
}

/// When a rank runs something in a grain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Position {
    turn: (usize, u32),
    /// The node that runs; the largest number at the end of the turn.
    at: usize,
    segment: u32,
}

pub(super) fn send(to: usize, message: &str) -> Arc<dyn Op> {
    Arc::new(Send { axis: PIPELINE.into(), to, message: message.into() })
}

pub(super) fn receive(from: usize, ty: &Type, per_step: bool, message: &str) -> Arc<dyn Op> {
    let (axis, message) = (PIPELINE.into(), message.into());
    Arc::new(Receive { axis, from, dtype: ty.dtype, shape: ty.shape.to_vec(), per_step, message })
}
