//! Within each host first, then across hosts: little crosses the network, however many ranks a host has.
//!
//! With equally many ranks on each host, every rank carries its share across; otherwise one rank of each host does.

use super::builder::ProgramBuilder;
use super::{AlgorithmCost, CallShape, RankGroup, binomial, direct};
use crate::call::CallKind;
use std::collections::BTreeMap;

/// Ranks by host; hosts in the order of their first rank.
fn by_host(hosts: &[usize]) -> Vec<Vec<usize>> {
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (rank, host) in hosts.iter().enumerate() {
        groups.entry(*host).or_default().push(rank);
    }
    let mut groups: Vec<Vec<usize>> = groups.into_values().collect();
    groups.sort_by_key(|group| group[0]);
    groups
}

/// If hosts hold equal runs of ranks, a power of two long, the sum of sums is the tree's.
pub(super) fn keeps_order(hosts: &[usize]) -> bool {
    let groups = by_host(hosts);
    let len = groups[0].len();
    len.is_power_of_two()
        && groups.iter().enumerate().all(|(host, group)| group.iter().copied().eq(host * len..(host + 1) * len))
}

fn group_of(rank: usize, ranks: Vec<usize>) -> Option<RankGroup> {
    ranks.iter().position(|member| *member == rank).map(|me| RankGroup { ranks, me })
}

pub(super) fn write(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let hosts = by_host(shape.hosts);
    match shape.kind {
        CallKind::Broadcast => broadcast(builder, shape, &hosts),
        _ if hosts.iter().all(|host| host.len() == hosts[0].len()) => all_reduce_shares(builder, shape, &hosts),
        _ => all_reduce_leaders(builder, shape, &hosts),
    }
}

/// This rank's group on its host.
fn local(shape: &CallShape<'_>, hosts: &[Vec<usize>]) -> Option<RankGroup> {
    hosts.iter().find_map(|host| group_of(shape.rank, host.clone()))
}

fn all_reduce_shares(builder: &mut ProgramBuilder, shape: &CallShape<'_>, hosts: &[Vec<usize>]) {
    let Some(inside) = local(shape, hosts) else { return };
    let Some(across) = group_of(shape.rank, hosts.iter().map(|host| host[inside.me]).collect()) else { return };
    let inputs = CallShape::even(shape.input(), inside.len());
    let outputs = CallShape::even(shape.output(), inside.len());
    let share = outputs[inside.me];
    direct::reduce_scatter(builder, &inside, &inputs, share, false);
    let pieces = CallShape::even(share, across.len());
    direct::reduce_scatter(builder, &across, &pieces, pieces[across.me], false);
    if shape.mean {
        builder.divide(pieces[across.me]);
    }
    direct::all_gather(builder, &across, &pieces);
    direct::all_gather(builder, &inside, &outputs);
}

fn all_reduce_leaders(builder: &mut ProgramBuilder, shape: &CallShape<'_>, hosts: &[Vec<usize>]) {
    let Some(inside) = local(shape, hosts) else { return };
    let output = shape.output();
    binomial::reduce(builder, &inside, 0, shape.input(), output, false);
    if let Some(leaders) = group_of(shape.rank, hosts.iter().map(|host| host[0]).collect()) {
        let pieces = CallShape::even(output, leaders.len());
        direct::reduce_scatter(builder, &leaders, &pieces, pieces[leaders.me], false);
        if shape.mean {
            builder.divide(pieces[leaders.me]);
        }
        direct::all_gather(builder, &leaders, &pieces);
    }
    binomial::broadcast(builder, &inside, 0, output);
}

/// The root speaks for its host; elsewhere the first rank does.
fn broadcast(builder: &mut ProgramBuilder, shape: &CallShape<'_>, hosts: &[Vec<usize>]) {
    let Some(inside) = local(shape, hosts) else { return };
    let leader = |host: &Vec<usize>| if host.contains(&shape.root) { shape.root } else { host[0] };
    let leaders: Vec<usize> = hosts.iter().map(leader).collect();
    let root = leaders.iter().position(|rank| *rank == shape.root).unwrap_or(0);
    let mine = leader(&inside.ranks);
    if let Some(across) = group_of(shape.rank, leaders) {
        binomial::broadcast(builder, &across, root, shape.output());
    }
    let first = inside.ranks.iter().position(|rank| *rank == mine).unwrap_or(0);
    binomial::broadcast(builder, &inside, first, shape.output());
}

pub(super) fn cost(shape: &CallShape<'_>) -> AlgorithmCost {
    let (_, count) = shape.numbers();
    let groups = by_host(shape.hosts);
    let hosts = groups.len() as f64;
    let local = groups.iter().map(Vec::len).max().unwrap_or(1) as f64;
    let even = groups.iter().all(|group| group.len() == groups[0].len());
    let (up, across) = (local.log2().ceil(), hosts.log2().ceil());
    let stage = |ranks: f64| if ranks > 1.0 { 2.0 } else { 0.0 };
    let share = |count: f64, ranks: f64| count * (ranks - 1.0) / ranks;
    match shape.kind {
        CallKind::Broadcast => {
            let rounds = up + across;
            let leaving = shape.leaving_by(1.0, across * count);
            AlgorithmCost { rounds, messages: rounds, sent: rounds * count, combined: 0.0, leaving }
        }
        _ if even => {
            let crossing = 2.0 * share(count / local, hosts);
            AlgorithmCost {
                rounds: stage(local) + stage(hosts),
                messages: 2.0 * (local - 1.0) + 2.0 * (hosts - 1.0),
                sent: 2.0 * share(count, local) + crossing,
                combined: share(count, local) + share(count / local, hosts),
                leaving: local * crossing,
            }
        }
        _ => AlgorithmCost {
            rounds: 2.0 * up + stage(hosts),
            messages: up + 2.0 * (hosts - 1.0),
            sent: up * count + 2.0 * share(count, hosts),
            combined: up * count + share(count, hosts),
            leaving: 2.0 * share(count, hosts),
        },
    }
}
