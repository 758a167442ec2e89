//! Direct exchange: everyone speaks to everyone. The owner of a part receives it from all ranks and adds in tree order,
//! whatever the order of arrival: the reproducible default, and as few bytes as any algorithm.

use super::builder::{ProgramBuilder, range, slice};
use super::{AlgorithmCost, CallShape, RankGroup};
use crate::call::CallKind;
use crate::program::{BufferRange, Region};
use crate::task::RankPart;

/// Segments of each rank's contribution that wait in scratch to be combined. Enough to receive the next ones meanwhile,
/// and few enough to stay in cache.
const WINDOW: usize = 4;

pub(super) fn write(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    match shape.kind {
        CallKind::Broadcast => broadcast(builder, shape),
        CallKind::Reduce => reduce(builder, shape),
        CallKind::AllReduce => {
            let output = CallShape::even(shape.output(), shape.size);
            let group = RankGroup::all(shape);
            reduce_scatter(
                builder,
                &group,
                &CallShape::even(shape.input(), shape.size),
                output[shape.rank],
                shape.mean,
            );
            all_gather(builder, &group, &output);
        }
        CallKind::ReduceScatter => {
            let (parts, own) = (shape.parts(Region::Input), shape.own(Region::Output));
            reduce_scatter(builder, &RankGroup::all(shape), &parts, own, shape.mean);
        }
        CallKind::AllGather => {
            let parts = shape.parts(Region::Output);
            builder.copy(shape.own(Region::Input), parts[shape.rank]);
            all_gather(builder, &RankGroup::all(shape), &parts);
        }
        CallKind::Gather => gather(builder, shape),
        CallKind::Scatter => scatter(builder, shape),
        CallKind::AllToAll => all_to_all(builder, shape),
        CallKind::Send => builder.send_message(shape.peer, shape.input()),
        CallKind::Recv => builder.recv_message(shape.peer, shape.output()),
        CallKind::Barrier | CallKind::Scan | CallKind::ExclusiveScan => {}
    }
}

/// Owners receive their part of `parts` from all members and combine it in tree order into `into`.
pub(super) fn reduce_scatter(
    builder: &mut ProgramBuilder,
    group: &RankGroup,
    parts: &[BufferRange],
    into: BufferRange,
    mean: bool,
) {
    if group.len() == 1 {
        return builder.copy(parts[0], into);
    }
    for other in group.others() {
        builder.send(group.ranks[other], parts[other]);
    }
    let segment = builder.segment().min(into.count);
    let slots = builder.scratch(segment * WINDOW * (group.len() - 1));
    for (number, target) in builder.segments(into).enumerate() {
        let window = number % WINDOW * (group.len() - 1);
        let mut leaves = vec![slice(parts[group.me], number * segment, target.count); group.len()];
        for (slot, other) in group.others().enumerate() {
            leaves[other] = slice(slots, (window + slot) * segment, target.count);
            builder.recv_one(group.ranks[other], leaves[other]);
        }
        builder.tree(leaves, target);
        if mean {
            builder.divide(target);
        }
    }
}

/// Each member's own part is in place; everyone sends it to everyone.
pub(super) fn all_gather(builder: &mut ProgramBuilder, group: &RankGroup, parts: &[BufferRange]) {
    let own = parts[group.me];
    for segment in builder.segments(own) {
        for other in group.others() {
            builder.send_one(group.ranks[other], segment);
        }
    }
    for other in group.others() {
        builder.recv(group.ranks[other], parts[other]);
    }
}

/// Everyone sends all to everyone and adds in tree order: one round.
pub(super) fn exchange(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let group = RankGroup::all(shape);
    let (input, output) = (shape.input(), shape.output());
    if shape.size == 1 {
        return builder.copy(input, output);
    }
    for other in group.others() {
        builder.send(other, input);
    }
    let slots = builder.scratch(shape.count * (shape.size - 1));
    for (number, target) in builder.segments(output).enumerate() {
        let offset = number * builder.segment();
        let mut leaves = vec![slice(input, offset, target.count); shape.size];
        for (slot, other) in group.others().enumerate() {
            leaves[other] = slice(slots, slot * shape.count + offset, target.count);
            builder.recv_one(other, leaves[other]);
        }
        builder.tree(leaves, target);
        if shape.mean {
            builder.divide(target);
        }
    }
}

/// The root gives each rank a part, and all gather them.
fn broadcast(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let parts = CallShape::even(shape.output(), shape.size);
    let group = RankGroup::all(shape);
    if shape.rank == shape.root {
        for other in group.others() {
            builder.send(other, parts[other]);
        }
    } else {
        builder.recv(shape.root, parts[shape.rank]);
    }
    for other in group.others().filter(|other| *other != shape.root) {
        builder.send(other, parts[shape.rank]);
        if shape.rank != shape.root {
            builder.recv(other, parts[other]);
        }
    }
    if shape.rank != shape.root {
        builder.recv(shape.root, parts[shape.root]);
    }
}

/// Owners add their parts and send them to the root.
fn reduce(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let group = RankGroup::all(shape);
    let parts = CallShape::even(shape.input(), shape.size);
    if shape.rank == shape.root {
        let output = CallShape::even(shape.output(), shape.size);
        reduce_scatter(builder, &group, &parts, output[shape.rank], shape.mean);
        for other in group.others() {
            builder.recv(other, output[other]);
        }
    } else {
        let own = builder.scratch(parts[shape.rank].count);
        reduce_scatter(builder, &group, &parts, own, shape.mean);
        builder.send(shape.root, own);
    }
}

fn gather(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let own = shape.own(Region::Input);
    if shape.rank != shape.root {
        return builder.send(shape.root, own);
    }
    let parts = shape.parts(Region::Output);
    builder.copy(own, parts[shape.rank]);
    for other in RankGroup::all(shape).others() {
        builder.recv(other, parts[other]);
    }
}

fn scatter(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let own = shape.own(Region::Output);
    if shape.rank != shape.root {
        return builder.recv(shape.root, own);
    }
    let parts = shape.parts(Region::Input);
    for other in RankGroup::all(shape).others() {
        builder.send(other, parts[other]);
    }
    builder.copy(parts[shape.rank], own);
}

/// Only the two ends know a part's count, so even an empty part is sent: a disagreement is then seen.
fn all_to_all(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let part = |region, part: RankPart| range(region, part);
    builder.copy(part(Region::Input, shape.send[shape.rank]), part(Region::Output, shape.recv[shape.rank]));
    for step in 1..shape.size {
        let to = (shape.rank + step) % shape.size;
        let from = (shape.rank + shape.size - step) % shape.size;
        builder.send_message(to, part(Region::Input, shape.send[to]));
        builder.recv_message(from, part(Region::Output, shape.recv[from]));
    }
}

pub(super) fn exchange_cost(shape: &CallShape<'_>) -> AlgorithmCost {
    let (ranks, count) = shape.numbers();
    let sent = (ranks - 1.0) * count;
    AlgorithmCost { rounds: 1.0, messages: ranks - 1.0, sent, combined: sent, leaving: shape.leaving_evenly(sent) }
}

pub(super) fn cost(shape: &CallShape<'_>) -> AlgorithmCost {
    let (ranks, count) = shape.numbers();
    let others = ranks - 1.0;
    let share = count * others / ranks;
    let (rounds, messages, sent, combined) = match shape.kind {
        CallKind::Broadcast => (if ranks > 2.0 { 2.0 } else { 1.0 }, 2.0 * others, 2.0 * share, 0.0),
        CallKind::Reduce => (2.0, ranks, count, share),
        CallKind::AllReduce => (2.0, 2.0 * others, 2.0 * share, share),
        CallKind::ReduceScatter => (1.0, others, share, share),
        CallKind::AllGather | CallKind::Scatter => (1.0, others, share, 0.0),
        CallKind::Gather => (1.0, 1.0, count / ranks, 0.0),
        CallKind::AllToAll => {
            let sent: usize = shape.send.iter().map(|part| part.count).sum();
            (1.0, others, sent as f64 * others / ranks, 0.0)
        }
        _ => (1.0, 1.0, count, 0.0),
    };
    AlgorithmCost { rounds, messages, sent, combined, leaving: shape.leaving_evenly(sent) }
}
