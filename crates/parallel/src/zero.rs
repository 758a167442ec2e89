//! ZeRO stage 1: every rank keeps the optimizer's state of its own run of parameters, updates those, and passes them on.
//!
//! A tensor belongs to one rank. Its gradient is summed at its owner alone, the owner's update runs as it would have run
//! anywhere, so the bits are the same, and the new parameters are gathered. Numbers that are needed everywhere though they
//! come from one owner's tensor, such as the squares under a global norm, are gathered too.

use crate::data::{Bucket, buckets, copy_grains, exchange_bucket, param_of, push_collective};
use crate::mesh::{DATA, Mesh};
use kolo_graph::collective::{AllGather, AllReduce, ReduceScatter};
use kolo_graph::graph::Phase;
use kolo_graph::rewrite::Rebuild;
use kolo_graph::sources::{Full, GrainSum, Param, State};
use kolo_graph::{Graph, Node, Stage, ValueId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The owner of each parameter that has a gradient, by name: runs of the arena, cut nearest to equal sizes.
pub fn owners(graph: &Graph, ranks: usize) -> BTreeMap<String, usize> {
    let sums: Vec<ValueId> =
        buckets(graph, usize::MAX).into_iter().filter(|b| b.gradients).flat_map(|b| b.sums).collect();
    let total: usize = sums.iter().map(|id| graph.ty(*id).bytes()).sum();
    let mut offset = 0;
    let owner = |id: ValueId| {
        let bytes = graph.ty(id).bytes();
        let middle = offset + bytes / 2;
        offset += bytes;
        (param_of(graph, id).to_string(), (middle * ranks / total.max(1)).min(ranks - 1))
    };
    sums.into_iter().map(owner).collect()
}

/// Where a value is right: everywhere, or at one rank only.
type Place = Option<usize>;

/// Shards the optimizer along the data axis; the result is this rank's graph.
pub fn shard_optimizer(graph: &Graph, mesh: &Mesh, bucket_bytes: usize) -> Graph {
    let plan = Plan::new(graph, mesh);
    let (mut rebuild, after) = copy_grains(graph);
    let all = buckets(graph, bucket_bytes);
    for bucket in &all {
        match bucket.gradients {
            true => exchange_bucket(&mut rebuild, ReduceScatter { axis: DATA.into(), owners: plan.of(bucket) }, bucket),
            false => exchange_bucket(&mut rebuild, AllReduce { axis: DATA.into() }, bucket),
        }
    }
    let early = plan.before_gather(&after);
    let copy = |rebuild: &mut Rebuild<'_>, first: bool| {
        for node in after.iter().filter(|node| early.contains(&node.outputs[0]) == first && plan.runs_here(node)) {
            rebuild.copy(node);
        }
    };
    copy(&mut rebuild, true);
    plan.gather_numbers(&mut rebuild);
    copy(&mut rebuild, false);
    plan.finish(rebuild, &all)
}

struct Plan<'g> {
    graph: &'g Graph,
    rank: usize,
    owners: BTreeMap<String, usize>,
    places: Vec<Place>,
    /// Values of one owner that every rank needs.
    gathered: BTreeSet<ValueId>,
}

impl<'g> Plan<'g> {
    fn new(graph: &'g Graph, mesh: &Mesh) -> Self {
        let owners = owners(graph, mesh.size(DATA));
        let rank = mesh.coordinate(DATA);
        let mut plan = Self { graph, rank, owners, places: Vec::new(), gathered: BTreeSet::new() };
        // Each round gathers the numbers that the first conflict needs; a graph has few.
        while let Some(conflict) = plan.propagate() {
            let before = plan.gathered.len();
            plan.need_everywhere(conflict);
            assert!(plan.gathered.len() > before, "an update of several owners' tensors cannot be sharded");
        }
        plan
    }

    fn of(&self, bucket: &Bucket) -> Vec<usize> {
        bucket.sums.iter().map(|id| self.owners[param_of(self.graph, *id)]).collect()
    }

    /// Gives every value its place; a node that reads values of two owners, if there is one.
    fn propagate(&mut self) -> Option<&'g Node> {
        self.places = vec![None; self.graph.values.len()];
        let graph = self.graph;
        for (node, phase) in graph.nodes.iter().zip(graph.phases()) {
            if phase != Phase::After {
                continue;
            }
            let mut place = self.owners.get(param_of(graph, node.outputs[0])).copied();
            for input in &node.inputs {
                let other = self.places[input.0 as usize];
                if place.is_some() && other.is_some() && place != other {
                    return Some(node);
                }
                place = place.or(other);
            }
            for output in &node.outputs {
                self.places[output.0 as usize] = place.filter(|_| !self.gathered.contains(output));
            }
        }
        None
    }

    /// Makes the numbers among a node's inputs known everywhere: those computed from numbers are recomputed, those computed
    /// from a tensor are gathered.
    fn need_everywhere(&mut self, node: &Node) {
        for input in &node.inputs {
            if self.places[input.0 as usize].is_none() || self.graph.ty(*input).elements() > 1 {
                continue;
            }
            let maker = self.graph.maker(*input);
            let number = |id: &ValueId| self.graph.ty(*id).elements() == 1 && !is_tensor(self.graph.maker(*id));
            if maker.inputs.iter().all(number) {
                self.need_everywhere(maker);
            } else {
                self.gathered.insert(*input);
            }
        }
    }

    fn runs_here(&self, node: &Node) -> bool {
        let place = node.inputs.iter().find_map(|id| self.places[id.0 as usize]);
        place.is_none_or(|owner| owner == self.rank)
    }

    /// The nodes, by first output, that gathered numbers are computed from.
    fn before_gather(&self, after: &[&Node]) -> BTreeSet<ValueId> {
        let mut early: BTreeSet<ValueId> = BTreeSet::new();
        for node in after.iter().rev() {
            let wanted = node.outputs.iter().any(|id| self.gathered.contains(id)) || early.contains(&node.outputs[0]);
            if wanted {
                early.insert(node.outputs[0]);
                early.extend(node.inputs.iter().map(|id| self.graph.maker(*id).outputs[0]));
            }
        }
        early
    }

    fn gather_numbers(&self, rebuild: &mut Rebuild<'_>) {
        if self.gathered.is_empty() {
            return;
        }
        let mut owners = Vec::new();
        let mut sorted: Vec<ValueId> = self.gathered.iter().copied().collect();
        sorted.sort_by_key(|id| (self.owner_of_number(*id), *id));
        let mut inputs = Vec::new();
        for id in &sorted {
            let owner = self.owner_of_number(*id);
            owners.push(owner);
            if owner == self.rank {
                inputs.push(rebuild.get(*id));
                continue;
            }
            let ty = self.graph.ty(*id);
            let zero = Full { value: 0.0, dtype: ty.dtype, shape: ty.shape.clone() };
            let node = rebuild.new.push_typed(Arc::new(zero), vec![], vec![ty.clone()], "".into(), Stage::Update);
            inputs.push(rebuild.new.node(node).outputs[0]);
        }
        let outputs = push_collective(&mut rebuild.new, AllGather { axis: DATA.into(), owners }, inputs, "norms");
        sorted.into_iter().zip(outputs).for_each(|(old, new)| rebuild.set(old, new));
    }

    fn owner_of_number(&self, id: ValueId) -> usize {
        let inputs = &self.graph.maker(id).inputs;
        inputs.iter().find_map(|id| self.places[id.0 as usize]).unwrap_or(0)
    }

    /// Gathers the parameters bucket by bucket, keeps the updates of this rank and of what belongs to nobody.
    fn finish(&self, mut rebuild: Rebuild<'_>, all: &[Bucket]) -> Graph {
        let graph = self.graph;
        let mut updates: Vec<(ValueId, ValueId)> = Vec::new();
        let params: BTreeMap<&str, ValueId> = graph.params().map(|(id, op)| (op.name.as_str(), id)).collect();
        let new_value = |id: ValueId| graph.updates.iter().find(|(param, _)| *param == id).map(|(_, value)| *value);
        for bucket in all.iter().filter(|bucket| bucket.gradients) {
            let ids: Vec<ValueId> = bucket.sums.iter().map(|id| params[param_of(graph, *id)]).collect();
            let owners = self.of(bucket);
            let own = |(id, owner): (&ValueId, &usize)| match new_value(*id).filter(|_| *owner == self.rank) {
                Some(value) => rebuild.get(value),
                None => rebuild.get(*id),
            };
            let inputs = ids.iter().zip(&owners).map(own).collect();
            let name = bucket.name.replace("bucket", "parameters");
            let outputs = push_collective(&mut rebuild.new, AllGather { axis: DATA.into(), owners }, inputs, &name);
            updates.extend(ids.iter().map(|id| rebuild.get(*id)).zip(outputs));
        }
        for (state, value) in &graph.updates {
            let op = &graph.maker(*state).op;
            let gathered = op.downcast::<Param>().is_some_and(|op| self.owners.contains_key(&op.name));
            let elsewhere = self.places[value.0 as usize].is_some_and(|owner| owner != self.rank);
            if !gathered && !elsewhere {
                updates.push((rebuild.get(*state), rebuild.get(*value)));
            }
        }
        rebuild.new.outputs = graph.outputs.iter().map(|(name, id)| (name.clone(), rebuild.get(*id))).collect();
        rebuild.new.updates = updates;
        // States of other ranks' tensors have no reader left.
        kolo_graph::rewrite::eliminate_dead(&rebuild.new)
    }
}

/// Whether a node makes a tensor that lives at its owner, however small.
fn is_tensor(node: &Node) -> bool {
    node.op.is::<Param>() || node.op.is::<State>() || node.op.is::<GrainSum>()
}
