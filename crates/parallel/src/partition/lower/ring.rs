//! Attention whose keys and values go round a ring of ranks, and tokens in the order of its slots.
//!
//! A rank has the tokens of its run of slots ([`kolo_ops::attention::ring`]). In each round it attends to the keys and values it
//! has, while those of the next round are on their way: an exchange stands before the round that it runs beside. In the
//! backward pass keys and values go round once more, and their gradients after them, each rank adding its part, until they are
//! home again. Both travel in two halves there, so that the gradients of one half are on their way while those of the other are
//! computed.

use super::{For, Lowering};
use crate::partition::cut::Cut;
use crate::partition::plan::Need;
use kolo_graph::collective::AxisShift;
use kolo_graph::{DType, Node, ValueId};
use kolo_ops::attention::ring::{AttentionClose, AttentionStep, AttentionStepGrad, Meeting, Round, block_of, slot_of};
use kolo_ops::attention::{Attention, AttentionGrad};
use kolo_ops::concat::Concat;
use kolo_ops::slice::Slice;
use std::ops::Range;
use std::sync::Arc;

/// Heads of an attention, whether later tokens are hidden, and whether its operands lie side by side in one tensor.
#[derive(Clone, Copy)]
struct Kind {
    heads: usize,
    causal: bool,
    packed: bool,
    /// Columns of the queries.
    width: usize,
    /// Tokens of a slot.
    rows: usize,
}

impl Kind {
    fn of(node: &Node, cut: &Cut, columns: usize) -> Self {
        let (heads, causal, packed) = match (node.op.downcast::<Attention>(), node.op.downcast::<AttentionGrad>()) {
            (Some(op), _) => (op.heads, op.causal, op.packed),
            (_, Some(op)) => (op.heads, op.causal, op.packed),
            _ => unreachable!("the plan chose it for an attention"),
        };
        let width = if packed { columns / 3 } else { columns };
        Self { heads, causal, packed, width, rows: cut.bounds[1] }
    }
}

/// Gradients as far as they were added up: of queries, and of the halves of keys and values.
struct Gradients {
    dq: Option<ValueId>,
    dkv: Vec<Option<ValueId>>,
}

/// A gradient after the first round, in which every block meets itself.
fn summed(sum: Option<ValueId>) -> ValueId {
    sum.unwrap_or_else(|| unreachable!("every block meets itself in the first round"))
}

/// Whether a meeting of so many slots has a node. Keys of others always have: all ranks read what is exchanged, so that whoever
/// sorts nodes by what follows from them treats it the same on all of them.
fn is_held(meeting: &Meeting, queries: usize, keys: usize) -> bool {
    meeting.round == Round::Next || meeting.pairs(queries, keys) > 0
}

impl Lowering<'_> {
    /// The block of tokens that a slice is.
    pub(super) fn block_in(&self, slice: usize) -> usize {
        if self.plan.ring { block_of(slice, self.plan.slices) } else { slice }
    }

    /// These slots of a whole tensor, whose tokens are in their own order.
    pub(super) fn slots_of(&mut self, id: ValueId, cut: &Cut, slots: Range<usize>, who: &For) -> ValueId {
        let blocks: Vec<usize> = slots.map(|slot| block_of(slot, self.plan.slices)).collect();
        self.in_order(id, cut, &blocks, who)
    }

    /// The whole tensor in the order of its tokens, from all ranks' slots.
    pub(super) fn gather_slots(&mut self, id: ValueId, cut: &Cut, who: &For) -> ValueId {
        let whole = if self.is_alone() { id } else { self.gather_as_is(id, cut, who) };
        let slots: Vec<usize> = (0..self.plan.slices).map(|block| slot_of(block, self.plan.slices)).collect();
        self.in_order(whole, cut, &slots, who)
    }

    /// These slices of a tensor that is cut so, one after the other.
    fn in_order(&mut self, id: ValueId, cut: &Cut, slices: &[usize], who: &For) -> ValueId {
        if slices.len() == cut.slices() && slices.is_sorted() {
            return id;
        }
        let range = |slice: usize| cut.bounds[slice]..cut.bounds[slice + 1];
        let parts = slices.iter().map(|slice| self.narrow(id, cut, range(*slice), who)).collect();
        self.join(parts, cut.dim, cut.blocks, who)
    }

    /// An attention or its backward pass, on this rank's slots of its inputs.
    pub(super) fn ring(&mut self, node: &Node, cuts: &[Cut], who: &For) -> Vec<ValueId> {
        // In f32 throughout: what goes round the ring are terms of sums.
        let fetch = |(id, cut): (&ValueId, &Cut)| {
            let own = self.fetch(*id, &Need::Sharded(cut.clone()), who);
            self.cast(own, DType::F32, who)
        };
        let inputs: Vec<ValueId> = node.inputs.iter().zip(cuts).map(fetch).collect();
        let made = self.around(node, cuts, &inputs, who);
        let dtypes: Vec<DType> = node.outputs.iter().map(|id| self.rebuild.old.ty(*id).dtype).collect();
        made.into_iter().zip(dtypes).map(|(id, dtype)| self.cast(id, dtype, who)).collect()
    }

    /// An attention of these operands, or its gradient, round the ring.
    fn around(&mut self, node: &Node, cuts: &[Cut], inputs: &[ValueId], who: &For) -> Vec<ValueId> {
        let columns = self.ty(inputs[0]).last();
        let kind = Kind::of(node, &cuts[0], columns);
        let (q, kv, rest) = match kind.packed {
            true => {
                let column = |start: usize, len: usize| Slice { dim: 2, start, len };
                let q = self.push(column(0, kind.width), vec![inputs[0]], who);
                let kv = self.push(column(kind.width, 2 * kind.width), vec![inputs[0]], who);
                (q, kv, &inputs[1..])
            }
            false => (inputs[0], self.push(Concat { dim: 2 }, inputs[1..3].to_vec(), who), &inputs[3..]),
        };
        if node.op.is::<Attention>() {
            return self.attend(kind, q, kv, who);
        }
        let [y, lse, g] = rest else { unreachable!("a backward pass reads y, lse and g") };
        self.attend_back(kind, [q, kv, *y, *lse, *g], who)
    }

    /// The keys of a rank's slots, from number `first` of them on, meet this rank's queries.
    fn meeting(&self, kind: Kind, other: usize, first: usize, round: Round) -> Meeting {
        let (query, key) = (self.own.start, self.group.slices(other, self.plan.slices).start + first);
        Meeting { causal: kind.causal, blocks: self.plan.slices, rows: kind.rows, query, key, round }
    }

    /// Every rank hands its tensor on to the next.
    fn hand_on(&mut self, id: ValueId, who: &For) -> ValueId {
        let (axis, ranks) = (self.group.axis.clone(), self.group.ranks);
        self.push(AxisShift { axis, by: 1, ranks }, vec![id], who)
    }

    /// The rounds of a rank: whose keys it meets, and in which kind of round.
    fn rounds(&self) -> Vec<(usize, Round)> {
        let (ranks, rank) = (self.group.ranks, self.group.rank);
        let others = (1..ranks).map(|step| ((rank + ranks - step) % ranks, Round::Next));
        [(rank, Round::First)].into_iter().chain(others).chain([(rank, Round::Last)]).collect()
    }

    fn attend(&mut self, kind: Kind, q: ValueId, kv: ValueId, who: &For) -> Vec<ValueId> {
        let (mut held, mut state, slots) = (kv, Vec::new(), self.own.len());
        for (step, (other, round)) in self.rounds().into_iter().enumerate() {
            // What a rank has itself is still there in the end.
            let next = if step + 1 < self.group.ranks { self.hand_on(held, who) } else { kv };
            let meeting = self.meeting(kind, other, 0, round);
            if is_held(&meeting, slots, slots) {
                let Meeting { causal, blocks, rows, query, key, round } = meeting;
                let running = !state.is_empty();
                let op = AttentionStep { heads: kind.heads, causal, blocks, rows, query, key, round, running };
                let inputs = [vec![q, held], state].concat();
                state = self.push_all(Arc::new(op), inputs, who);
            }
            held = next;
        }
        self.push_all(Arc::new(AttentionClose {}), state, who)
    }

    fn attend_back(&mut self, kind: Kind, read: [ValueId; 5], who: &For) -> Vec<ValueId> {
        let [_, kv, ..] = read;
        let ranks = self.group.ranks;
        // The later half of the slots is met first.
        let parts = if self.own.len() > 1 { 2 } else { 1 };
        let each = self.own.len() / parts * kind.rows;
        let half = |this: &mut Self, at: usize| match parts {
            1 => kv,
            _ => this.push(Slice { dim: 1, start: at * each, len: each }, vec![kv], who),
        };
        let own: Vec<ValueId> = (0..parts).map(|at| half(self, at)).collect();
        let (mut held, mut sums) = (own.clone(), Gradients { dq: None, dkv: vec![None; parts] });
        for (step, (other, round)) in self.rounds().into_iter().enumerate() {
            let next = match step + 1 < ranks {
                true => held.iter().map(|id| self.hand_on(*id, who)).collect(),
                false => own.clone(),
            };
            for at in (0..parts).rev() {
                let meeting = self.meeting(kind, other, at * (self.own.len() / parts), round);
                self.differentiate(kind.heads, meeting, (read, held[at]), (&mut sums, at), who);
                // They are home again after as many steps as there are ranks.
                if ranks > 1 && step < ranks {
                    sums.dkv[at] = Some(self.hand_on(summed(sums.dkv[at]), who));
                }
            }
            held = next;
        }
        let dkv: Vec<ValueId> = sums.dkv.into_iter().map(summed).collect();
        let dkv = if parts == 1 { dkv[0] } else { self.push(Concat { dim: 1 }, dkv, who) };
        let dq = summed(sums.dq);
        if kind.packed {
            return vec![self.push(Concat { dim: 2 }, vec![dq, dkv], who)];
        }
        let part = |start: usize| Slice { dim: 2, start, len: kind.width };
        vec![dq, self.push(part(0), vec![dkv], who), self.push(part(kind.width), vec![dkv], who)]
    }

    /// Adds what a meeting gives to the gradients.
    fn differentiate(
        &mut self,
        heads: usize,
        meeting: Meeting,
        (read, held): ([ValueId; 5], ValueId),
        (sums, half): (&mut Gradients, usize),
        who: &For,
    ) {
        let Meeting { causal, blocks, rows, query, key, round } = meeting;
        let keys = self.ty(held).shape[1] / rows;
        if !is_held(&meeting, self.own.len(), keys) {
            return;
        }
        let [q, _, y, lse, g] = read;
        let before = [sums.dq, sums.dkv[half]];
        let [dq, dkv] = before.map(|sum| sum.is_some());
        let op = AttentionStepGrad { heads, causal, blocks, rows, query, key, round, dq, dkv };
        let inputs = [q, held, y, lse, g].into_iter().chain(before.into_iter().flatten()).collect();
        let made = self.push_all(Arc::new(op), inputs, who);
        (sums.dq, sums.dkv[half]) = (Some(made[0]), Some(made[1]));
    }
}
