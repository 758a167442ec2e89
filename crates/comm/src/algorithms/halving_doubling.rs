//! Partners at distances 1, 2, 4, …: the whole vector doubles its ranks each round (small vectors), or is halved each
//! round on the way to the sum and doubled on the way back (larger ones).
//!
//! The lower partner's value is always the left operand and distances grow, so the order of additions is the tree's.
//! Halving needs a power of two; the ranks beyond it are folded into their neighbours first, which for some sizes
//! changes the order.

use super::builder::{ProgramBuilder, slice};
use super::{AlgorithmCost, CallShape, RankGroup};
use crate::call::CallKind;
use crate::program::{BufferRange, Region};

pub(super) fn doubling(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    match shape.kind {
        CallKind::Barrier => barrier(builder, shape),
        CallKind::AllReduce => all_reduce_whole(builder, shape),
        CallKind::AllGather => all_gather(builder, shape),
        _ => scan(builder, shape),
    }
}

pub(super) fn write(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    match shape.kind {
        CallKind::ReduceScatter => reduce_scatter(builder, shape),
        _ => all_reduce(builder, shape),
    }
}

/// In round `k` everyone tells the rank 2^k further that it and all it heard of have come.
fn barrier(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let mut heard = Vec::new();
    let mut distance = 1;
    while distance < shape.size {
        builder.signal((shape.rank + distance) % shape.size, &heard);
        let nothing = BufferRange { region: Region::Scratch, offset: 0, count: 0 };
        heard.push(builder.recv_one((shape.rank + shape.size - distance) % shape.size, nothing));
        distance *= 2;
    }
}

/// Blocks of 2^k ranks that know their sum pair up. Where the upper block is cut short by the number of ranks, its members
/// serve several of the lower block.
fn all_reduce_whole(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let output = shape.output();
    builder.copy(shape.input(), output);
    let slots = [builder.scratch(shape.count), builder.scratch(shape.count)];
    let mut width = 1;
    while width < shape.size {
        let slot = slots[usize::from(width.trailing_zeros() % 2 == 1)];
        let low = shape.rank / (2 * width) * 2 * width;
        let upper = shape.size.min(low + 2 * width).saturating_sub(low + width);
        let index = shape.rank % width;
        if upper > 0 && shape.rank < low + width {
            if index < upper {
                builder.send(low + width + index, output);
            }
            builder.recv(low + width + index % upper, slot);
            builder.combine_all(output, slot, output);
        } else if upper > 0 {
            for served in (index..width).step_by(upper) {
                builder.send(low + served, output);
            }
            builder.recv(low + index, slot);
            builder.combine_all(slot, output, output);
        }
        width *= 2;
    }
    if shape.mean {
        builder.divide(output);
    }
}

fn widths(from: usize, size: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(from), |width| width.checked_mul(2)).take_while(move |width| *width < size)
}

/// Whether a rank sends its block's sum at this distance or a larger one: to a rank above, or to one below that will.
fn gives(rank: usize, from: usize, size: usize) -> bool {
    widths(from, size).any(|width| match rank & width {
        0 => rank + width < size,
        _ => gives(rank ^ width, 2 * width, size),
    })
}

/// Block sums go round by doubling; a rank adds those of the blocks before it, nearest first, which is the order of the
/// tree over the ranks up to it.
fn scan(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let (rank, size) = (shape.rank, shape.size);
    let (input, output) = (shape.input(), shape.output());
    let total = builder.scratch(shape.count);
    if gives(rank, 1, size) {
        builder.copy(input, total);
    }
    let mut prefix = shape.kind == CallKind::Scan;
    if prefix {
        builder.copy(input, output);
    }
    for width in widths(1, size) {
        let (partner, later) = (rank ^ width, gives(rank, 2 * width, size));
        if rank & width == 0 {
            if partner < size {
                builder.send(partner, total);
            }
            if later {
                let slot = builder.scratch(shape.count);
                builder.recv(partner, slot);
                builder.combine_all(total, slot, total);
            }
            continue;
        }
        if gives(partner, 2 * width, size) {
            builder.send(partner, total);
        }
        let slot = builder.scratch(shape.count);
        builder.recv(partner, slot);
        if prefix {
            builder.combine_all(slot, output, output);
        } else {
            builder.copy(slot, output);
            prefix = true;
        }
        if later {
            builder.combine_all(slot, total, total);
        }
    }
}

/// Positions of the parts such that what stays together in each halving lies together.
fn reversed(index: usize, size: usize) -> usize {
    let bits = size.trailing_zeros();
    if bits == 0 { 0 } else { index.reverse_bits() >> (usize::BITS - bits) }
}

/// Ranges that a member and its partner keep at a distance: positions `[start, end)` of its own, and the partner's.
fn halves(me: usize, size: usize, distance: usize) -> ([usize; 2], [usize; 2]) {
    let width = size / distance / 2;
    let start = |member: usize| reversed(member % (2 * distance), 2 * distance) * width;
    let range = |member: usize| [start(member), start(member) + width];
    (range(me), range(me ^ distance))
}

fn range(whole: BufferRange, bounds: &[usize], [start, end]: [usize; 2]) -> BufferRange {
    slice(whole, bounds[start], bounds[end] - bounds[start])
}

/// Each member ends with the combination of all in its own range of `whole`.
fn halve(builder: &mut ProgramBuilder, group: &RankGroup, bounds: &[usize], whole: BufferRange) {
    let mut distance = 1;
    while distance < group.len() {
        let (mine, theirs) = halves(group.me, group.len(), distance);
        let (mine, theirs) = (range(whole, bounds, mine), range(whole, bounds, theirs));
        let partner = group.ranks[group.me ^ distance];
        let slot = builder.scratch(mine.count);
        builder.send(partner, theirs);
        builder.recv(partner, slot);
        let (left, right) = if group.me & distance == 0 { (mine, slot) } else { (slot, mine) };
        builder.combine_all(left, right, mine);
        distance *= 2;
    }
}

/// The way back: each member starts with its own range and ends with all.
fn double(builder: &mut ProgramBuilder, group: &RankGroup, bounds: &[usize], whole: BufferRange) {
    let mut distance = group.len() / 2;
    while distance > 0 {
        let (mine, theirs) = halves(group.me, group.len(), distance);
        let partner = group.ranks[group.me ^ distance];
        builder.send(partner, range(whole, bounds, mine));
        builder.recv(partner, range(whole, bounds, theirs));
        distance /= 2;
    }
}

fn bounds(counts: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut bounds = vec![0];
    bounds.extend(counts.scan(0, |sum, count| {
        *sum += count;
        Some(*sum)
    }));
    bounds
}

fn all_reduce(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let power = (shape.size + 1).next_power_of_two() / 2;
    let folded = 2 * (shape.size - power);
    let output = shape.output();
    if shape.rank < folded && shape.rank % 2 == 1 {
        builder.send(shape.rank - 1, shape.input());
        return builder.recv(shape.rank - 1, output);
    }
    if shape.rank < folded {
        let slot = builder.scratch(shape.count);
        builder.recv(shape.rank + 1, slot);
        builder.combine_all(shape.input(), slot, output);
    } else {
        builder.copy(shape.input(), output);
    }
    let ranks: Vec<usize> = (0..folded).step_by(2).chain(folded..shape.size).collect();
    let me = if shape.rank < folded { shape.rank / 2 } else { shape.rank - folded / 2 };
    let group = RankGroup { ranks, me };
    let bounds = bounds(CallShape::even(output, power).iter().map(|part| part.count));
    halve(builder, &group, &bounds, output);
    if shape.mean {
        let at = reversed(me, power);
        builder.divide(range(output, &bounds, [at, at + 1]));
    }
    double(builder, &group, &bounds, output);
    if shape.rank < folded {
        builder.send(shape.rank + 1, output);
    }
}

/// Parts are packed in the order in which halving keeps them together.
fn reduce_scatter(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let own = shape.own(Region::Output);
    let parts = shape.parts(Region::Input);
    if shape.size == 1 {
        return builder.copy(parts[0], own);
    }
    let bounds = bounds((0..shape.size).map(|at| parts[reversed(at, shape.size)].count));
    let packed = builder.scratch(bounds[shape.size]);
    for at in 0..shape.size {
        builder.copy(parts[reversed(at, shape.size)], range(packed, &bounds, [at, at + 1]));
    }
    halve(builder, &RankGroup::all(shape), &bounds, packed);
    let at = reversed(shape.rank, shape.size);
    let result = range(packed, &bounds, [at, at + 1]);
    if shape.mean {
        builder.divide(result);
    }
    builder.copy(result, own);
}

fn all_gather(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let parts = shape.parts(Region::Output);
    if shape.size == 1 {
        return builder.copy(shape.own(Region::Input), parts[0]);
    }
    let bounds = bounds((0..shape.size).map(|at| parts[reversed(at, shape.size)].count));
    let packed = builder.scratch(bounds[shape.size]);
    let at = reversed(shape.rank, shape.size);
    builder.copy(shape.own(Region::Input), range(packed, &bounds, [at, at + 1]));
    double(builder, &RankGroup::all(shape), &bounds, packed);
    for at in 0..shape.size {
        builder.copy(range(packed, &bounds, [at, at + 1]), parts[reversed(at, shape.size)]);
    }
}

/// Whole vectors that the busiest rank sends: M(P) of the documentation.
fn whole_messages(size: usize) -> usize {
    let power = (size + 1).next_power_of_two() / 2;
    let rounds = power.trailing_zeros() as usize;
    match size - power {
        0 => rounds,
        beyond => (rounds + 1).max(whole_messages(beyond) + power.div_ceil(beyond)),
    }
}

pub(super) fn doubling_cost(shape: &CallShape<'_>) -> AlgorithmCost {
    let (ranks, count) = shape.numbers();
    let rounds = ranks.log2().ceil();
    let (messages, sent, combined) = match shape.kind {
        CallKind::Barrier => (rounds, 0.0, 0.0),
        CallKind::AllReduce => {
            let messages = whole_messages(shape.size) as f64;
            (messages, messages * count, rounds * count)
        }
        CallKind::AllGather => (rounds, count * (ranks - 1.0) / ranks, 0.0),
        _ => (rounds, rounds * count, 2.0 * rounds * count),
    };
    AlgorithmCost { rounds, messages, sent, combined, leaving: shape.leaving_by(shape.per_host().0, sent) }
}

pub(super) fn cost(shape: &CallShape<'_>) -> AlgorithmCost {
    let (ranks, count) = shape.numbers();
    let power = ranks.log2().floor().exp2();
    let share = count * (power - 1.0) / power;
    let fold = if power < ranks { 1.0 } else { 0.0 };
    let (rounds, messages, sent, combined) = match shape.kind {
        CallKind::ReduceScatter => (power.log2(), power.log2(), share, share),
        _ => (
            2.0 * power.log2() + 2.0 * fold,
            2.0 * power.log2() + fold,
            2.0 * share + fold * count,
            share + fold * count,
        ),
    };
    AlgorithmCost { rounds, messages, sent, combined, leaving: shape.leaving_by(shape.per_host().0, sent) }
}
