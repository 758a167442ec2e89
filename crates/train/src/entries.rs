//! What a job needs to go on, by entry: which elements of which tensor, wherever they are kept.
//!
//! Each rank tells what it has: a worker its store, a server its run of the parameters with the moments that belong to it.
//! Together they are every tensor of a run with one worker, and can be given to any other company.

use kolo_exec::Store;
use kolo_graph::Graph;
use kolo_parallel::servers::optimizer_states;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    Parameter,
    /// State of the optimizer.
    Moment,
    /// State of the model: a running average.
    Statistic,
}

impl Role {
    pub(crate) const ALL: [Role; 3] = [Role::Parameter, Role::Moment, Role::Statistic];
}

/// Elements of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub tensor: String,
    /// The first of them.
    pub start: usize,
    pub role: Role,
    pub values: Vec<f32>,
}

impl Entry {
    fn range(&self) -> Range<usize> {
        self.start..self.start + self.values.len()
    }
}

/// Where a store keeps elements of a tensor.
struct Slot {
    /// The store's own name for it: that of a shard says where it starts.
    name: String,
    tensor: String,
    start: usize,
    /// The elements, counted inside the slot.
    kept: Range<usize>,
    role: Role,
}

/// Everything that the store of a graph keeps. Of the parameters, the elements `own` of their memory, if not all.
fn slots(store: &Store, graph: &Graph, own: Option<&Range<usize>>) -> Vec<Slot> {
    let moments: BTreeSet<&str> = {
        let own = optimizer_states(graph);
        graph.states().filter(|(id, _)| own.contains(id)).map(|(_, state)| state.name.as_str()).collect()
    };
    let shards: BTreeMap<&str, (&str, usize)> =
        graph.states().map(|(_, state)| (state.name.as_str(), state.shard())).collect();
    let slot = |entry: &kolo_exec::store::Entry| {
        let (tensor, start) = shards.get(entry.name.as_str()).copied().unwrap_or((&entry.name, 0));
        let (first, elements) = (entry.offset / size_of::<f32>(), entry.ty.elements());
        let within = |at: usize| at.clamp(first, first + elements) - first;
        let kept = match own.filter(|_| entry.trained) {
            Some(own) => within(own.start)..within(own.end),
            None => 0..elements,
        };
        let role = match (entry.trained, moments.contains(entry.name.as_str())) {
            (true, _) => Role::Parameter,
            (false, true) => Role::Moment,
            (false, false) => Role::Statistic,
        };
        Slot { name: entry.name.clone(), tensor: tensor.into(), start, kept, role }
    };
    store.entries().iter().map(slot).filter(|slot| !slot.kept.is_empty()).collect()
}

/// What a store keeps.
pub(crate) fn save(store: &Store, graph: &Graph, own: Option<&Range<usize>>) -> Vec<Entry> {
    let entry = |slot: Slot| {
        let values = store.values(&slot.name)?[slot.kept.clone()].to_vec();
        Some(Entry { tensor: slot.tensor, start: slot.start + slot.kept.start, role: slot.role, values })
    };
    slots(store, graph, own).into_iter().filter_map(entry).collect()
}

/// Gives a store all that it keeps, from entries that may be cut elsewhere. Nothing changes if some of it is missing, which is
/// then named.
pub(crate) fn restore(
    store: &mut Store,
    graph: &Graph,
    own: Option<&Range<usize>>,
    entries: &[Entry],
) -> Result<(), String> {
    let mut by_tensor: BTreeMap<&str, Vec<&Entry>> = BTreeMap::new();
    for entry in entries {
        by_tensor.entry(&entry.tensor).or_default().push(entry);
    }
    by_tensor.values_mut().for_each(|parts| parts.sort_by_key(|entry| entry.start));
    let parts = |slot: &Slot| by_tensor.get(slot.tensor.as_str()).map_or(&[][..], Vec::as_slice);
    let slots = slots(store, graph, own);
    for slot in &slots {
        let wanted = slot.start + slot.kept.start..slot.start + slot.kept.end;
        let covered = parts(slot)
            .iter()
            .map(|entry| entry.range())
            .fold(wanted.start, |end, part| if part.start <= end { end.max(part.end) } else { end });
        if covered < wanted.end {
            return Err(format!("`{}` has no element {covered} in what was saved", slot.tensor));
        }
    }
    for slot in &slots {
        let Some(values) = store.values_mut(&slot.name) else { continue };
        for entry in parts(slot) {
            let range = entry.range();
            let from = range.start.max(slot.start + slot.kept.start);
            let to = range.end.min(slot.start + slot.kept.end);
            if from < to {
                values[from - slot.start..to - slot.start]
                    .copy_from_slice(&entry.values[from - range.start..to - range.start]);
            }
        }
    }
    Ok(())
}
