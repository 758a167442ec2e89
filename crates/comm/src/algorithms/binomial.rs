//! Binomial trees: every round doubles the ranks that have sent or received. Few messages, whole vectors: for small ones.
//!
//! A reduction joins neighbouring blocks of ranks, the lower one on the left, whoever of them holds the sum: the root does
//! for its own blocks, so that any root gets the bits of the tree.

use super::builder::{ProgramBuilder, slice};
use super::{AlgorithmCost, CallShape, RankGroup};
use crate::call::CallKind;
use crate::program::{BufferRange, Region};

pub(super) fn write(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let group = RankGroup::all(shape);
    match shape.kind {
        CallKind::Broadcast => broadcast(builder, &group, shape.root, shape.output()),
        CallKind::Reduce if shape.rank == shape.root => {
            reduce(builder, &group, shape.root, shape.input(), shape.output(), shape.mean);
        }
        CallKind::Reduce => {
            let sum = builder.scratch(shape.count);
            reduce(builder, &group, shape.root, shape.input(), sum, shape.mean);
        }
        CallKind::Gather => gather(builder, shape),
        CallKind::Scatter => scatter(builder, shape),
        _ => {
            reduce(builder, &group, 0, shape.input(), shape.output(), shape.mean);
            broadcast(builder, &group, 0, shape.output());
        }
    }
}

/// The part of the group that starts at `child` and hangs on one edge of the tree, for members counted from the root.
fn subtree(child: usize, len: usize) -> usize {
    let whole = if child == 0 { len } else { 1 << child.trailing_zeros() };
    whole.min(len - child)
}

/// The children of a member, largest subtree first, and its parent.
fn relatives(member: usize, len: usize) -> (Vec<usize>, Option<usize>) {
    let reach = if member == 0 { len.next_power_of_two() } else { 1 << member.trailing_zeros() };
    let strides = (0..reach.trailing_zeros()).rev().map(|bit| 1usize << bit);
    let children = strides.map(|stride| member + stride).filter(|child| *child < len).collect();
    (children, (member > 0).then(|| member & (member - 1)))
}

/// From member `root` of the group to all.
pub(super) fn broadcast(builder: &mut ProgramBuilder, group: &RankGroup, root: usize, whole: BufferRange) {
    let len = group.len();
    let rank = |member: usize| group.ranks[(member + root) % len];
    let (children, parent) = relatives((group.me + len - root) % len, len);
    for segment in builder.segments(whole) {
        if let Some(parent) = parent {
            builder.recv_one(rank(parent), segment);
        }
        for child in &children {
            builder.send_one(rank(*child), segment);
        }
    }
}

/// Combines `input` of all members into `sum` of member `root`; the others use theirs on the way.
pub(super) fn reduce(
    builder: &mut ProgramBuilder,
    group: &RankGroup,
    root: usize,
    input: BufferRange,
    sum: BufferRange,
    mean: bool,
) {
    let len = group.len();
    if len == 1 {
        return builder.copy(input, sum);
    }
    let holder = |low: usize, high: usize| if (low..high).contains(&root) { root } else { low };
    let slot = builder.scratch(input.count);
    let mut current = input;
    let mut width = 1;
    while width < len {
        let low = group.me / (2 * width) * 2 * width;
        let (middle, high) = (low + width, len.min(low + 2 * width));
        width *= 2;
        if middle >= high {
            continue;
        }
        let (lower, upper) = (holder(low, middle), holder(middle, high));
        let (keeper, giver) = if holder(low, high) == upper { (upper, lower) } else { (lower, upper) };
        if group.me == giver {
            return builder.send(group.ranks[keeper], current);
        }
        if group.me != keeper {
            return;
        }
        builder.recv(group.ranks[giver], slot);
        let (left, right) = if keeper == lower { (current, slot) } else { (slot, current) };
        builder.combine_all(left, right, sum);
        current = sum;
    }
    if mean {
        builder.divide(sum);
    }
}

/// Offsets of the parts of consecutive members counted from the root, from `first` on.
fn packed(shape: &CallShape<'_>, first: usize, members: usize) -> Vec<usize> {
    let mut bounds = vec![0];
    for member in first..first + members {
        let count = shape.recv[(member + shape.root) % shape.size].count;
        bounds.push(bounds[member - first] + count);
    }
    bounds
}

fn gather(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let rank = |member: usize| (member + shape.root) % shape.size;
    let me = (shape.rank + shape.size - shape.root) % shape.size;
    let members = subtree(me, shape.size);
    let own = shape.own(Region::Input);
    let (children, parent) = relatives(me, shape.size);
    if let (Some(parent), 1) = (parent, members) {
        return builder.send(rank(parent), own);
    }
    let bounds = packed(shape, me, members);
    let held = builder.scratch(bounds[members]);
    for child in &children {
        let (start, end) = (child - me, child - me + subtree(*child, shape.size));
        builder.recv(rank(*child), slice(held, bounds[start], bounds[end] - bounds[start]));
    }
    if let Some(parent) = parent {
        builder.copy(own, slice(held, 0, own.count));
        return builder.send(rank(parent), held);
    }
    let parts = shape.parts(Region::Output);
    builder.copy(own, parts[shape.rank]);
    for member in 1..shape.size {
        let from = slice(held, bounds[member], bounds[member + 1] - bounds[member]);
        builder.copy(from, parts[rank(member)]);
    }
}

fn scatter(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let rank = |member: usize| (member + shape.root) % shape.size;
    let me = (shape.rank + shape.size - shape.root) % shape.size;
    let members = subtree(me, shape.size);
    let own = shape.own(Region::Output);
    let (children, parent) = relatives(me, shape.size);
    if let (Some(parent), 1) = (parent, members) {
        return builder.recv(rank(parent), own);
    }
    let bounds = packed(shape, me, members);
    let held = builder.scratch(bounds[members]);
    if let Some(parent) = parent {
        builder.recv(rank(parent), held);
        builder.copy(slice(held, 0, own.count), own);
    } else {
        let parts = shape.parts(Region::Input);
        for member in 1..shape.size {
            let into = slice(held, bounds[member], bounds[member + 1] - bounds[member]);
            builder.copy(parts[rank(member)], into);
        }
        builder.copy(parts[shape.rank], own);
    }
    for child in &children {
        let (start, end) = (child - me, child - me + subtree(*child, shape.size));
        builder.send(rank(*child), slice(held, bounds[start], bounds[end] - bounds[start]));
    }
}

pub(super) fn cost(shape: &CallShape<'_>) -> AlgorithmCost {
    let (ranks, count) = shape.numbers();
    let rounds = ranks.log2().ceil();
    let (rounds, messages, sent, combined) = match shape.kind {
        CallKind::Broadcast => (rounds, rounds, rounds * count, 0.0),
        CallKind::Reduce => (rounds, 1.0, count, rounds * count),
        CallKind::Gather => {
            let most = (ranks - rounds.exp2() / 2.0).max(rounds.exp2() / 4.0);
            (rounds, 1.0, count * most / ranks, 0.0)
        }
        CallKind::Scatter => (rounds, rounds, count * (ranks - 1.0) / ranks, 0.0),
        _ => (2.0 * rounds, rounds, rounds * count, rounds * count),
    };
    AlgorithmCost { rounds, messages, sent, combined, leaving: shape.leaving_by(1.0, sent) }
}
