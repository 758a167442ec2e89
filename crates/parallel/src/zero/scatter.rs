//! Gradients that are summed over ranks in every grain: each rank keeps the sums of its own run alone.
//!
//! With R ranks, rank r computes the grains r, R + r, 2R + r, … So what the ranks compute at a time are R neighbouring grains,
//! the sum over ranks is a subtree of the sum over grains, and its owner adds those up as it would add grains. A bucket is
//! summed as soon as the last of its gradients is there, and waited for when the next one is.

use super::plan::ShardPlan;
use super::set_segments;
use crate::cut::Unit;
use crate::data::Bucket;
use crate::mesh::DATA;
use kolo_graph::collective::AxisSum;
use kolo_graph::piece::Piece;
use kolo_graph::rewrite::Rebuild;
use kolo_graph::share::{AxisShare, Pack, packed};
use kolo_graph::{Graph, NodeId, Op, Shape, Stage, ValueId};
use kolo_ops::reduce::Reshape;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What runs in the grains and before them, with sums over ranks in it.
pub(super) struct Scatter<'p, 'g> {
    plan: &'p ShardPlan<'g>,
    buckets: &'p [Bucket],
    units_of: &'p [Vec<&'g Unit>],
    /// The buckets that are complete after each node.
    complete: BTreeMap<NodeId, Vec<usize>>,
    /// Sums over ranks that were started and not added up: the old sum, the new term.
    pending: Vec<(ValueId, ValueId)>,
    /// What the last sum over ranks makes.
    last: Option<ValueId>,
}

impl<'p, 'g> Scatter<'p, 'g> {
    pub fn new(plan: &'p ShardPlan<'g>, buckets: &'p [Bucket], units_of: &'p [Vec<&'g Unit>]) -> Self {
        let mut complete: BTreeMap<NodeId, Vec<usize>> = BTreeMap::new();
        for (number, bucket) in buckets.iter().enumerate() {
            let made = |sum: &ValueId| plan.graph.value(term(plan.graph, *sum)).node;
            if let Some(last) = bucket.sums.iter().map(made).max() {
                complete.entry(last).or_default().push(number);
            }
        }
        Self { plan, buckets, units_of, complete, pending: Vec::new(), last: None }
    }

    /// Starts the sums over ranks of the buckets that this node completes.
    pub fn close(&mut self, rebuild: &mut Rebuild<'g>, made: NodeId) {
        let segment = self.plan.graph.node(made).segment;
        for number in self.complete.remove(&made).unwrap_or_default() {
            self.add_up(rebuild, segment);
            let from = rebuild.new.nodes.len();
            let bucket = &self.buckets[number];
            let mut terms: Vec<ValueId> =
                bucket.sums.iter().map(|sum| rebuild.get(term(self.plan.graph, *sum))).collect();
            let new = &mut rebuild.new;
            // Whoever has nothing of the last bucket waits for it, too: the memory of its gradients is in use until then.
            terms.extend(self.last.map(|last| push(new, Piece { start: 0, len: 0 }, vec![last], "", Stage::Backward)));
            let flat = push(new, Pack {}, terms, &bucket.name, Stage::Backward);
            self.pending = match bucket.gradients {
                true => self.scatter(new, flat, number),
                false => self.sum(new, flat, bucket),
            };
            set_segments(&mut rebuild.new, from, segment);
        }
    }

    /// This rank's units of a bucket, summed over the ranks.
    fn scatter(&mut self, new: &mut Graph, flat: ValueId, number: usize) -> Vec<(ValueId, ValueId)> {
        let (graph, rank) = (self.plan.graph, self.plan.rank);
        let elements = |unit: &Unit| packed(graph.ty(unit.sum).elements());
        let mut sizes = vec![0; self.plan.ranks];
        self.units_of[number].iter().for_each(|unit| sizes[unit.owner] += elements(unit));
        let share = push(
            new,
            AxisShare { axis: DATA.into(), sizes, rank },
            vec![flat],
            &self.buckets[number].name,
            Stage::Backward,
        );
        self.last = Some(share);
        let mut at = 0;
        let term = |unit: &&&Unit| {
            let start = at;
            at += elements(unit);
            (unit.sum, tensor_at(new, share, start, &graph.ty(unit.sum).shape, Stage::Backward))
        };
        self.units_of[number].iter().filter(|unit| unit.owner == rank).collect::<Vec<_>>().iter().map(term).collect()
    }

    /// Other sums, which all ranks need.
    fn sum(&mut self, new: &mut Graph, flat: ValueId, bucket: &Bucket) -> Vec<(ValueId, ValueId)> {
        let op = AxisSum { axis: DATA.into(), ranks: self.plan.ranks };
        let all = push(new, op, vec![flat], &bucket.name, Stage::Backward);
        self.last = Some(all);
        let mut at = 0;
        let term = |sum: &ValueId| {
            let ty = self.plan.graph.ty(*sum);
            let start = at;
            at += packed(ty.elements());
            (*sum, tensor_at(new, all, start, &ty.shape, Stage::Backward))
        };
        bucket.sums.iter().map(term).collect()
    }

    /// Adds what the last sum over ranks has brought to the sums over grains, in this segment of a grain.
    pub fn add_up(&mut self, rebuild: &mut Rebuild<'g>, segment: u32) {
        for (sum, term) in self.pending.drain(..) {
            let of = kolo_graph::layout::shown_by(self.plan.graph, sum);
            let op = Arc::clone(&self.plan.graph.maker(of).op);
            let ty = rebuild.new.ty(term).clone();
            let node = rebuild.new.push_typed(op, vec![term], vec![ty], "".into(), Stage::Update);
            rebuild.new.set_segment(node, segment);
            let new = rebuild.new.node(node).outputs[0];
            rebuild.set(sum, new);
        }
    }
}

/// What a sum over grains adds up.
fn term(graph: &Graph, sum: ValueId) -> ValueId {
    graph.maker(sum).inputs[0]
}

/// The tensor of this shape that starts at an element of a packed one.
pub(super) fn tensor_at(graph: &mut Graph, flat: ValueId, start: usize, shape: &Shape, stage: Stage) -> ValueId {
    let piece = push(graph, Piece { start, len: shape.iter().product() }, vec![flat], "", stage);
    match shape[..] {
        [_] => piece,
        _ => push(graph, Reshape { shape: shape.to_vec() }, vec![piece], "", stage),
    }
}

/// Appends a node of one output.
pub(super) fn push(graph: &mut Graph, op: impl Op, inputs: Vec<ValueId>, name: &str, stage: Stage) -> ValueId {
    match graph.push(Arc::new(op), inputs, name.into(), stage) {
        Ok(node) => graph.node(node).outputs[0],
        Err(error) => panic!("a share fits where the whole did: {error}"),
    }
}
