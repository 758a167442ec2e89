//! Partners at distances 1, 2, 4, …: the whole vector doubles its ranks each round (small vectors), or is halved each
//! round on the way to the sum and doubled on the way back (larger ones).
//!
//! The lower partner's value is always the left operand and distances grow, so the order of additions is the tree's.
//! Halving needs a power of two; the ranks beyond it are folded into their neighbours first, which for some sizes
//! changes the order.

use super::builder::{Builder, slice};
use super::{Cost, Group, Plan};
use crate::call::Kind;
use crate::program::{Place, Region};

pub(super) fn doubling(builder: &mut Builder, plan: &Plan<'_>) {
    match plan.kind {
        Kind::Barrier => barrier(builder, plan),
        Kind::AllReduce => all_reduce_whole(builder, plan),
        Kind::AllGather => all_gather(builder, plan),
        _ => scan(builder, plan),
    }
}

pub(super) fn write(builder: &mut Builder, plan: &Plan<'_>) {
    match plan.kind {
        Kind::ReduceScatter => reduce_scatter(builder, plan),
        _ => all_reduce(builder, plan),
    }
}

/// In round `k` everyone tells the rank 2^k further that it and all it heard of have come.
fn barrier(builder: &mut Builder, plan: &Plan<'_>) {
    let mut heard = Vec::new();
    let mut distance = 1;
    while distance < plan.size {
        builder.signal((plan.rank + distance) % plan.size, &heard);
        let nothing = Place { region: Region::Scratch, offset: 0, count: 0 };
        heard.push(builder.recv_one((plan.rank + plan.size - distance) % plan.size, nothing));
        distance *= 2;
    }
}

/// Blocks of 2^k ranks that know their sum pair up. Where the upper block is cut short by the number of ranks, its members
/// serve several of the lower block.
fn all_reduce_whole(builder: &mut Builder, plan: &Plan<'_>) {
    let output = plan.output();
    builder.copy(plan.input(), output);
    let slots = [builder.scratch(plan.count), builder.scratch(plan.count)];
    let mut width = 1;
    while width < plan.size {
        let slot = slots[usize::from(width.trailing_zeros() % 2 == 1)];
        let low = plan.rank / (2 * width) * 2 * width;
        let upper = plan.size.min(low + 2 * width).saturating_sub(low + width);
        let index = plan.rank % width;
        if upper > 0 && plan.rank < low + width {
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
    if plan.mean {
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
fn scan(builder: &mut Builder, plan: &Plan<'_>) {
    let (rank, size) = (plan.rank, plan.size);
    let (input, output) = (plan.input(), plan.output());
    let total = builder.scratch(plan.count);
    if gives(rank, 1, size) {
        builder.copy(input, total);
    }
    let mut prefix = plan.kind == Kind::Scan;
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
                let slot = builder.scratch(plan.count);
                builder.recv(partner, slot);
                builder.combine_all(total, slot, total);
            }
            continue;
        }
        if gives(partner, 2 * width, size) {
            builder.send(partner, total);
        }
        let slot = builder.scratch(plan.count);
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

fn range(whole: Place, bounds: &[usize], [start, end]: [usize; 2]) -> Place {
    slice(whole, bounds[start], bounds[end] - bounds[start])
}

/// Each member ends with the combination of all in its own range of `whole`.
fn halve(builder: &mut Builder, group: &Group, bounds: &[usize], whole: Place) {
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
fn double(builder: &mut Builder, group: &Group, bounds: &[usize], whole: Place) {
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

fn all_reduce(builder: &mut Builder, plan: &Plan<'_>) {
    let power = (plan.size + 1).next_power_of_two() / 2;
    let folded = 2 * (plan.size - power);
    let output = plan.output();
    if plan.rank < folded && plan.rank % 2 == 1 {
        builder.send(plan.rank - 1, plan.input());
        return builder.recv(plan.rank - 1, output);
    }
    if plan.rank < folded {
        let slot = builder.scratch(plan.count);
        builder.recv(plan.rank + 1, slot);
        builder.combine_all(plan.input(), slot, output);
    } else {
        builder.copy(plan.input(), output);
    }
    let ranks: Vec<usize> = (0..folded).step_by(2).chain(folded..plan.size).collect();
    let me = if plan.rank < folded { plan.rank / 2 } else { plan.rank - folded / 2 };
    let group = Group { ranks, me };
    let bounds = bounds(Plan::even(output, power).iter().map(|part| part.count));
    halve(builder, &group, &bounds, output);
    if plan.mean {
        let at = reversed(me, power);
        builder.divide(range(output, &bounds, [at, at + 1]));
    }
    double(builder, &group, &bounds, output);
    if plan.rank < folded {
        builder.send(plan.rank + 1, output);
    }
}

/// Parts are packed in the order in which halving keeps them together.
fn reduce_scatter(builder: &mut Builder, plan: &Plan<'_>) {
    let own = plan.own(Region::Output);
    let parts = plan.parts(Region::Input);
    if plan.size == 1 {
        return builder.copy(parts[0], own);
    }
    let bounds = bounds((0..plan.size).map(|at| parts[reversed(at, plan.size)].count));
    let packed = builder.scratch(bounds[plan.size]);
    for at in 0..plan.size {
        builder.copy(parts[reversed(at, plan.size)], range(packed, &bounds, [at, at + 1]));
    }
    halve(builder, &Group::all(plan), &bounds, packed);
    let at = reversed(plan.rank, plan.size);
    let result = range(packed, &bounds, [at, at + 1]);
    if plan.mean {
        builder.divide(result);
    }
    builder.copy(result, own);
}

fn all_gather(builder: &mut Builder, plan: &Plan<'_>) {
    let parts = plan.parts(Region::Output);
    if plan.size == 1 {
        return builder.copy(plan.own(Region::Input), parts[0]);
    }
    let bounds = bounds((0..plan.size).map(|at| parts[reversed(at, plan.size)].count));
    let packed = builder.scratch(bounds[plan.size]);
    let at = reversed(plan.rank, plan.size);
    builder.copy(plan.own(Region::Input), range(packed, &bounds, [at, at + 1]));
    double(builder, &Group::all(plan), &bounds, packed);
    for at in 0..plan.size {
        builder.copy(range(packed, &bounds, [at, at + 1]), parts[reversed(at, plan.size)]);
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

pub(super) fn doubling_cost(plan: &Plan<'_>) -> Cost {
    let (ranks, count) = plan.numbers();
    let rounds = ranks.log2().ceil();
    let (messages, sent, combined) = match plan.kind {
        Kind::Barrier => (rounds, 0.0, 0.0),
        Kind::AllReduce => {
            let messages = whole_messages(plan.size) as f64;
            (messages, messages * count, rounds * count)
        }
        Kind::AllGather => (rounds, count * (ranks - 1.0) / ranks, 0.0),
        _ => (rounds, rounds * count, 2.0 * rounds * count),
    };
    Cost { rounds, messages, sent, combined, leaving: plan.leaving_by(plan.per_host().0, sent) }
}

pub(super) fn cost(plan: &Plan<'_>) -> Cost {
    let (ranks, count) = plan.numbers();
    let power = ranks.log2().floor().exp2();
    let share = count * (power - 1.0) / power;
    let fold = if power < ranks { 1.0 } else { 0.0 };
    let (rounds, messages, sent, combined) = match plan.kind {
        Kind::ReduceScatter => (power.log2(), power.log2(), share, share),
        _ => (
            2.0 * power.log2() + 2.0 * fold,
            2.0 * power.log2() + fold,
            2.0 * share + fold * count,
            share + fold * count,
        ),
    };
    Cost { rounds, messages, sent, combined, leaving: plan.leaving_by(plan.per_host().0, sent) }
}
