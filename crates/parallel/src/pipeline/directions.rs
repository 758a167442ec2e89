//! Grains that go in two directions: each rank of a stage sums its own, and the rank that keeps the stage's parameters adds both
//! sums. Each is a half of all grains, so that the sum is that of one worker.

use super::lower::{Lowering, receive, send};
use super::schedule::{Direction, PipelineSchedule};
use kolo_graph::collective::AfterGrains;
use kolo_graph::sources::{Full, GrainSum};
use kolo_graph::{DType, Node, Op, ValueId};
use kolo_ops::elementwise::Add;
use std::sync::Arc;

/// The micro-batches of each direction, if each has a half of all in a row: a half is a subtree of the sum over grains.
pub(super) fn halves(schedule: &PipelineSchedule) -> Option<[usize; 2]> {
    let directions = &schedule.placement.directions;
    let half = directions.len() / 2;
    let starts = match directions.first()? {
        Direction::Down => [0, half],
        Direction::Up => [half, 0],
    };
    let (first, second) = directions.split_at(half);
    let alike = |half: &[Direction]| half.windows(2).all(|pair| pair[0] == pair[1]);
    let halved = alike(first) && alike(second) && first.len() == second.len() && first[0] != second[0];
    halved.then_some(starts)
}

/// A sum of the second direction: the gradient of a parameter that this rank does not keep, or not for this direction.
fn other_way(node: &Node) -> Arc<dyn Op> {
    match node.op.downcast::<GrainSum>().filter(|sum| !sum.of.is_empty()) {
        Some(sum) => Arc::new(GrainSum { of: format!("{} up", sum.of) }),
        None => Arc::clone(&node.op),
    }
}

impl Lowering<'_> {
    /// Adds the sums of both directions, if there are two. Whoever waits for a sum has sent its own before.
    pub(super) fn join_directions(&mut self) {
        let (graph, ranks) = (self.graph, self.ranks);
        let ([down, up], rank) = (&ranks.of_stage[..], ranks.rank) else { return };
        let mut own: Vec<(&Node, [Option<ValueId>; 2], usize)> = Vec::new();
        for (at, node) in graph.nodes.iter().enumerate().filter(|(_, node)| node.op.is::<GrainSum>()) {
            let stage = self.labels[at].unwrap_or(0);
            let places = [down[stage], up[stage]];
            let mut sums = [None; 2];
            for direction in (0..2).filter(|direction| places[*direction] == rank) {
                self.direction = direction;
                let number = self.segment_of(at, stage);
                let term = self.get(node.inputs[0]);
                let op = if direction == 0 { Arc::clone(&node.op) } else { other_way(node) };
                sums[direction] = Some(self.push(op, vec![term], node, number)[0]);
            }
            if let [None, Some(sum)] = sums {
                self.push(send(places[0], &self.message(node.outputs[0])), vec![sum], node, 0);
            }
            own.push((node, sums, places[1]));
        }
        self.direction = 0;
        let mut done = None;
        for (node, sums, up) in own {
            let [Some(sum), other] = sums else { continue };
            let other = match other {
                Some(other) => other,
                None => {
                    let done = *done.get_or_insert_with(|| self.after_grains(node));
                    let op = receive(up, graph.ty(node.outputs[0]), true, &self.message(node.outputs[0]));
                    self.push(op, vec![done], node, 0)[0]
                }
            };
            let both = self.push(Arc::new(Add {}), vec![sum, other], node, 0)[0];
            self.set(node.outputs[0], both);
        }
    }

    /// A number that is there when all grains are done.
    fn after_grains(&mut self, like: &Node) -> ValueId {
        let nothing = Full { value: 0.0, dtype: DType::F32, shape: vec![1] };
        let nothing = self.push(Arc::new(nothing), Vec::new(), like, 0);
        self.push(Arc::new(AfterGrains {}), nothing, like, 0)[0]
    }
}
