//! The end of a rank's graph: what it updates, and the parameters that all of them gather.

use super::plan::{ShardPlan, owners};
use crate::cut::{Unit, join};
use crate::data::{Bucket, push_collective};
use crate::mesh::DATA;
use kolo_graph::collective::AllGather;
use kolo_graph::layout::shown_by;
use kolo_graph::rewrite::Rebuild;
use kolo_graph::sources::Param;
use kolo_graph::{Graph, ValueId};
use std::collections::BTreeSet;

impl ShardPlan<'_> {
    /// Keeps the updates of this rank's runs, and of what belongs to nobody.
    pub fn finish_shares(&self, mut rebuild: Rebuild<'_>) -> Graph {
        let graph = self.graph;
        let mut updates: Vec<(ValueId, ValueId)> = Vec::new();
        for unit in self.units.iter().filter(|unit| unit.owner == self.rank && unit.updated != unit.param) {
            updates.push((rebuild.get(unit.param), rebuild.get(unit.updated)));
        }
        for (state, value) in graph.updates.iter().filter(|(state, _)| !graph.maker(*state).op.is::<Param>()) {
            if self.places[value.0 as usize].is_none_or(|owner| owner == self.rank) {
                updates.push((rebuild.get(*state), rebuild.get(*value)));
            }
        }
        rebuild.new.outputs = graph.outputs.iter().map(|(name, id)| (name.clone(), rebuild.get(*id))).collect();
        rebuild.new.updates = updates;
        kolo_graph::rewrite::eliminate_dead(rebuild.new)
    }

    /// Gathers the parameters bucket by bucket, keeps the updates of this rank and of what belongs to nobody.
    pub fn finish(&self, mut rebuild: Rebuild<'_>, all: &[Bucket], units_of: Vec<Vec<&Unit>>) -> Graph {
        let graph = self.graph;
        // The new values of each parameter, whole or in pieces, in the order of memory.
        let mut gathered: Vec<(ValueId, Vec<ValueId>)> = Vec::new();
        for (bucket, units) in all.iter().zip(units_of).filter(|(bucket, _)| bucket.gradients) {
            let own = |unit: &&Unit| rebuild.get(if unit.owner == self.rank { unit.updated } else { unit.param });
            let mut inputs: Vec<ValueId> = units.iter().map(own).collect();
            let owners = owners(&units);
            self.wait_for_grains(&mut rebuild.new, &owners, &mut inputs);
            let op = AllGather { axis: DATA.into(), owners };
            let outputs = push_collective(&mut rebuild.new, op, inputs, &bucket.params_name);
            for (unit, output) in units.into_iter().zip(outputs) {
                let param = shown_by(graph, unit.param);
                match gathered.last_mut() {
                    Some((last, values)) if *last == param => values.push(output),
                    _ => gathered.push((param, vec![output])),
                }
            }
        }
        let mut updates: Vec<(ValueId, ValueId)> = Vec::new();
        for (param, values) in &gathered {
            let value = match values[..] {
                [whole] => whole,
                _ => join(&mut rebuild.new, &graph.ty(*param).shape, values.clone()),
            };
            updates.push((rebuild.get(*param), value));
        }
        let params: BTreeSet<ValueId> = gathered.iter().map(|(param, _)| *param).collect();
        for (state, value) in &graph.updates {
            let elsewhere = self.places[value.0 as usize].is_some_and(|owner| owner != self.rank);
            if !elsewhere && !params.contains(state) {
                updates.push((rebuild.get(*state), rebuild.get(*value)));
            }
        }
        rebuild.new.outputs = graph.outputs.iter().map(|(name, id)| (name.clone(), rebuild.get(*id))).collect();
        rebuild.new.updates = updates;
        // States of other ranks' tensors have no reader left.
        kolo_graph::rewrite::eliminate_dead(rebuild.new)
    }
}
