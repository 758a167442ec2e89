//! Which nodes of a graph the host runs while the optimizer is offloaded, and what of the store the device then holds.
//!
//! The host runs the optimizer's rules and, of a weight that the device reads in half precision alone, the cast. Both give the same
//! bits on either side. A stored tensor is on the device if any node that runs there reads or writes it.

use crate::places::stored_name;
use kolo_exec::store::Entry;
use kolo_exec::{Offload, Store};
use kolo_graph::fetch::Fetch;
use kolo_graph::layout::{Arena, Layout, align, shown_by};
use kolo_graph::sources::{Input, Param, State};
use kolo_graph::{DType, Graph, Node, NodeId, Op, ValueId};
use kolo_ops::cast::Cast;
use kolo_ops::optim::RoundBf16;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

/// The nodes that the host runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct HostPart {
    nodes: BTreeSet<NodeId>,
    offload: Offload,
}

impl HostPart {
    pub fn of(graph: &Graph, layout: &Layout, offload: Offload) -> Self {
        if offload == Offload::None {
            return Self::default();
        }
        let copied: BTreeSet<ValueId> = layout.copies.iter().map(|(from, _)| *from).collect();
        let in_place = |node: &Node| !node.outputs.iter().any(|id| copied.contains(id));
        let rule = |id: &&NodeId| is_update(&*graph.node(**id).op) && in_place(graph.node(**id));
        let rules: BTreeSet<NodeId> = layout.after.iter().filter(rule).copied().collect();
        let cast = |id: &&NodeId| casts_weight(graph, graph.node(**id)) && reads_store(graph, layout, **id);
        let casts: BTreeSet<NodeId> = layout.before.iter().filter(cast).copied().collect();
        let both = Self { nodes: rules.union(&casts).copied().collect(), offload };
        let held = Held::of(graph, layout, &both);
        // A weight that the device has anyway is cast there, if it is the device that reads the copy.
        let host_casts = casts.into_iter().filter(|id| {
            let node = graph.node(*id);
            lies_on_host(layout, node) || !held.covers_any(graph, layout, node.inputs[0])
        });
        Self { nodes: rules.iter().copied().chain(host_casts).collect(), offload }
    }

    pub fn has(&self, node: NodeId) -> bool {
        self.nodes.contains(&node)
    }

    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.nodes.iter().copied()
    }
}

/// Whether an op is a part of the optimizer's update that the host can run.
fn is_update(op: &dyn Op) -> bool {
    op.is_update_rule() || op.is::<RoundBf16>()
}

/// Whether a node makes a half-precision copy of a weight.
pub(crate) fn casts_weight(graph: &Graph, node: &Node) -> bool {
    let halves = node.op.downcast::<Cast>().is_some_and(|cast| matches!(cast.to, DType::BF16 | DType::F16));
    halves && graph.maker(shown_by(graph, node.inputs[0])).op.is::<Param>()
}

fn reads_store(graph: &Graph, layout: &Layout, id: NodeId) -> bool {
    layout.places[graph.node(id).inputs[0].0 as usize].is_some_and(|place| place.arena == Arena::Store)
}

fn lies_on_host(layout: &Layout, node: &Node) -> bool {
    layout.places[node.outputs[0].0 as usize].is_some_and(|place| place.arena == Arena::Host)
}

/// What of the store a device holds: of the parameters' memory and of the states', whole entries in the order of memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Held {
    entries: HashMap<String, (usize, Range<usize>)>,
    /// By memory: where each entry lies, with its padding, and whether it is held and whether the device changes it.
    lies: [Vec<(Range<usize>, bool, bool)>; 2],
}

impl Held {
    /// All of it.
    pub fn everything(graph: &Graph) -> Self {
        let mut held = Self::nothing(graph);
        held.lies.iter_mut().flatten().for_each(|(_, held, changed)| (*held, *changed) = (true, true));
        held
    }

    /// Whatever nodes beside the host's read or write.
    pub fn of(graph: &Graph, layout: &Layout, host: &HostPart) -> Self {
        let streams = host.offload == Offload::Weights;
        if host.is_empty() && !streams {
            return Self::everything(graph);
        }
        let mut held = Self::nothing(graph);
        let all = [&layout.before, &layout.grain, &layout.after].into_iter().flatten();
        let all = all.filter(|id| !host.has(**id)).map(|id| graph.node(*id)).filter(|node| runs(node));
        // What is fetched is copied from the host's memory.
        for node in all.filter(|node| !node.op.is::<Fetch>()) {
            node.inputs.iter().for_each(|id| held.mark(graph, layout, *id, false));
            node.outputs.iter().for_each(|id| held.mark(graph, layout, *id, true));
        }
        for (from, to) in &layout.copies {
            held.mark(graph, layout, *from, false);
            held.mark(graph, layout, *to, true);
        }
        held
    }

    fn nothing(graph: &Graph) -> Self {
        let mut held = Self::default();
        for entry in Store::entries_of(graph).0 {
            let (memory, range) = (memory_of(&entry), entry.offset..entry.offset + align(entry.ty.bytes()));
            held.lies[memory].push((range.clone(), false, false));
            held.entries.insert(entry.name, (memory, range));
        }
        held
    }

    /// Where a value lies in the store, if it does.
    fn range(&self, graph: &Graph, layout: &Layout, id: ValueId) -> Option<(usize, Range<usize>)> {
        let place = layout.places[id.0 as usize].filter(|place| place.arena == Arena::Store)?;
        let (memory, entry) = self.entries.get(stored_name(graph, ValueId(place.offset as u32)))?;
        let start = entry.start + place.within;
        Some((*memory, start..start + graph.ty(id).bytes()))
    }

    fn mark(&mut self, graph: &Graph, layout: &Layout, id: ValueId, changed: bool) {
        let Some((memory, range)) = self.range(graph, layout, id) else { return };
        let entries = self.lies[memory].iter_mut();
        for entry in entries.filter(|entry| entry.0.start < range.end && range.start < entry.0.end) {
            (entry.1, entry.2) = (true, entry.2 | changed);
        }
    }

    /// Whether it has an entry that this value is a part of.
    fn covers_any(&self, graph: &Graph, layout: &Layout, id: ValueId) -> bool {
        self.range(graph, layout, id).is_some_and(|(memory, range)| {
            self.lies[memory].iter().any(|(entry, held, _)| *held && entry.start < range.end && range.start < entry.end)
        })
    }

    /// Whether the device changes an entry that this value is a part of.
    pub fn changes(&self, graph: &Graph, layout: &Layout, id: ValueId) -> bool {
        self.range(graph, layout, id).is_some_and(|(memory, range)| {
            let entries = self.lies[memory].iter().filter(|(.., changed)| *changed);
            entries.into_iter().any(|(entry, ..)| entry.start < range.end && range.start < entry.end)
        })
    }

    /// What is held, as few runs as there are.
    pub fn runs(&self, memory: usize) -> Vec<Range<usize>> {
        joined(self.lies[memory].iter().filter(|(_, held, _)| *held).map(|(range, ..)| range.clone()))
    }

    /// What the device changes.
    pub fn changed(&self, memory: usize) -> Vec<Range<usize>> {
        joined(self.lies[memory].iter().filter(|(.., changed)| *changed).map(|(range, ..)| range.clone()))
    }

    /// Bytes that are held of each memory.
    pub fn bytes(&self) -> [usize; 2] {
        [0, 1].map(|memory| self.runs(memory).iter().map(ExactSizeIterator::len).sum())
    }
}

/// The memory of the parameters or of the states.
pub(crate) fn memory_of(entry: &Entry) -> usize {
    usize::from(!entry.is_param())
}

/// Whether a node does anything: sources and views are where they are.
fn runs(node: &Node) -> bool {
    let op = &node.op;
    let shows = op.aliases() && !op.changes_input();
    !(shows || op.is::<Input>() || op.is::<Param>() || op.is::<State>())
}

fn joined(ranges: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}
