//! Direct exchange: everyone speaks to everyone. The owner of a part receives it from all ranks and adds in tree order,
//! whatever the order of arrival: the reproducible default, and as few bytes as any algorithm.

use super::builder::{Builder, place, slice};
use super::{Cost, Group, Plan};
use crate::call::Kind;
use crate::program::{Place, Region};
use crate::task::Part;

/// Segments of each rank's contribution that wait in scratch to be combined. Enough to receive the next ones meanwhile,
/// and few enough to stay in cache.
const WINDOW: usize = 4;

pub(super) fn write(builder: &mut Builder, plan: &Plan<'_>) {
    match plan.kind {
        Kind::Broadcast => broadcast(builder, plan),
        Kind::Reduce => reduce(builder, plan),
        Kind::AllReduce => {
            let output = Plan::even(plan.output(), plan.size);
            let group = Group::all(plan);
            reduce_scatter(builder, &group, &Plan::even(plan.input(), plan.size), output[plan.rank], plan.mean);
            all_gather(builder, &group, &output);
        }
        Kind::ReduceScatter => {
            let (parts, own) = (plan.parts(Region::Input), plan.own(Region::Output));
            reduce_scatter(builder, &Group::all(plan), &parts, own, plan.mean);
        }
        Kind::AllGather => {
            let parts = plan.parts(Region::Output);
            builder.copy(plan.own(Region::Input), parts[plan.rank]);
            all_gather(builder, &Group::all(plan), &parts);
        }
        Kind::Gather => gather(builder, plan),
        Kind::Scatter => scatter(builder, plan),
        Kind::AllToAll => all_to_all(builder, plan),
        Kind::Send => builder.send_message(plan.peer, plan.input()),
        Kind::Recv => builder.recv_message(plan.peer, plan.output()),
        Kind::Barrier | Kind::Scan | Kind::ExclusiveScan => {}
    }
}

/// Owners receive their part of `parts` from all members and combine it in tree order into `into`.
pub(super) fn reduce_scatter(builder: &mut Builder, group: &Group, parts: &[Place], into: Place, mean: bool) {
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
pub(super) fn all_gather(builder: &mut Builder, group: &Group, parts: &[Place]) {
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
pub(super) fn exchange(builder: &mut Builder, plan: &Plan<'_>) {
    let group = Group::all(plan);
    let (input, output) = (plan.input(), plan.output());
    if plan.size == 1 {
        return builder.copy(input, output);
    }
    for other in group.others() {
        builder.send(other, input);
    }
    let slots = builder.scratch(plan.count * (plan.size - 1));
    for (number, target) in builder.segments(output).enumerate() {
        let offset = number * builder.segment();
        let mut leaves = vec![slice(input, offset, target.count); plan.size];
        for (slot, other) in group.others().enumerate() {
            leaves[other] = slice(slots, slot * plan.count + offset, target.count);
            builder.recv_one(other, leaves[other]);
        }
        builder.tree(leaves, target);
        if plan.mean {
            builder.divide(target);
        }
    }
}

/// The root gives each rank a part, and all gather them.
fn broadcast(builder: &mut Builder, plan: &Plan<'_>) {
    let parts = Plan::even(plan.output(), plan.size);
    let group = Group::all(plan);
    if plan.rank == plan.root {
        for other in group.others() {
            builder.send(other, parts[other]);
        }
    } else {
        builder.recv(plan.root, parts[plan.rank]);
    }
    for other in group.others().filter(|other| *other != plan.root) {
        builder.send(other, parts[plan.rank]);
        if plan.rank != plan.root {
            builder.recv(other, parts[other]);
        }
    }
    if plan.rank != plan.root {
        builder.recv(plan.root, parts[plan.root]);
    }
}

/// Owners add their parts and send them to the root.
fn reduce(builder: &mut Builder, plan: &Plan<'_>) {
    let group = Group::all(plan);
    let parts = Plan::even(plan.input(), plan.size);
    if plan.rank == plan.root {
        let output = Plan::even(plan.output(), plan.size);
        reduce_scatter(builder, &group, &parts, output[plan.rank], plan.mean);
        for other in group.others() {
            builder.recv(other, output[other]);
        }
    } else {
        let own = builder.scratch(parts[plan.rank].count);
        reduce_scatter(builder, &group, &parts, own, plan.mean);
        builder.send(plan.root, own);
    }
}

fn gather(builder: &mut Builder, plan: &Plan<'_>) {
    let own = plan.own(Region::Input);
    if plan.rank != plan.root {
        return builder.send(plan.root, own);
    }
    let parts = plan.parts(Region::Output);
    builder.copy(own, parts[plan.rank]);
    for other in Group::all(plan).others() {
        builder.recv(other, parts[other]);
    }
}

fn scatter(builder: &mut Builder, plan: &Plan<'_>) {
    let own = plan.own(Region::Output);
    if plan.rank != plan.root {
        return builder.recv(plan.root, own);
    }
    let parts = plan.parts(Region::Input);
    for other in Group::all(plan).others() {
        builder.send(other, parts[other]);
    }
    builder.copy(parts[plan.rank], own);
}

/// Only the two ends know a part's count, so even an empty part is sent: a disagreement is then seen.
fn all_to_all(builder: &mut Builder, plan: &Plan<'_>) {
    let part = |region, part: Part| place(region, part);
    builder.copy(part(Region::Input, plan.send[plan.rank]), part(Region::Output, plan.recv[plan.rank]));
    for step in 1..plan.size {
        let to = (plan.rank + step) % plan.size;
        let from = (plan.rank + plan.size - step) % plan.size;
        builder.send_message(to, part(Region::Input, plan.send[to]));
        builder.recv_message(from, part(Region::Output, plan.recv[from]));
    }
}

pub(super) fn exchange_cost(plan: &Plan<'_>) -> Cost {
    let (ranks, count) = plan.numbers();
    let sent = (ranks - 1.0) * count;
    Cost { rounds: 1.0, messages: ranks - 1.0, sent, combined: sent, leaving: plan.leaving_evenly(sent) }
}

pub(super) fn cost(plan: &Plan<'_>) -> Cost {
    let (ranks, count) = plan.numbers();
    let others = ranks - 1.0;
    let share = count * others / ranks;
    let (rounds, messages, sent, combined) = match plan.kind {
        Kind::Broadcast => (if ranks > 2.0 { 2.0 } else { 1.0 }, 2.0 * others, 2.0 * share, 0.0),
        Kind::Reduce => (2.0, ranks, count, share),
        Kind::AllReduce => (2.0, 2.0 * others, 2.0 * share, share),
        Kind::ReduceScatter => (1.0, others, share, share),
        Kind::AllGather | Kind::Scatter => (1.0, others, share, 0.0),
        Kind::Gather => (1.0, 1.0, count / ranks, 0.0),
        Kind::AllToAll => {
            let sent: usize = plan.send.iter().map(|part| part.count).sum();
            (1.0, others, sent as f64 * others / ranks, 0.0)
        }
        _ => (1.0, 1.0, count, 0.0),
    };
    Cost { rounds, messages, sent, combined, leaving: plan.leaving_evenly(sent) }
}
