//! What a rank of a pipeline runs after the grains: the update of its stages, and numbers that all ranks get.

use super::lower::{Lowering, PIPELINE};
use kolo_graph::collective::{AfterGrains, AxisJoin};
use kolo_graph::graph::Phase;
use kolo_graph::sources::Full;
use kolo_graph::{DType, Node, Stage, Type, ValueId};
use kolo_ops::concat::Concat;
use kolo_ops::reduce::Reshape;
use kolo_ops::slice::Slice;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

impl Lowering<'_> {
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

    pub(super) fn after(&mut self) {
        self.direction = 0;
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
                let here = own && !self.map.contains_key(&(0, node.outputs[0]));
                if self.phases[at] == Phase::After && levels[at] == level && here && first[at] == early {
                    let number = self.labels[at].map_or(0, |stage| self.segment_of(at, stage));
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
                self.set(*id, number);
            }
            at += size;
        }
    }
}
