//! Whose memory a value is, and who reads it when.

use crate::graph::{Graph, Node, NodeId, Value, ValueId};
use crate::op::Op;
use crate::piece::{Join, Piece};
use crate::sources::{Param, State};
use std::collections::HashMap;
use std::ops::Range;

/// What a value shows, seen through views. Whoever asks for many values asks [`all_shown_by`] once.
pub fn shown_by(graph: &Graph, mut id: ValueId) -> ValueId {
    while graph.maker(id).op.view() {
        id = graph.maker(id).inputs[0];
    }
    id
}

/// What each value shows, seen through views.
pub fn all_shown_by(graph: &Graph) -> Vec<ValueId> {
    let mut shown: Vec<ValueId> = (0..graph.values.len() as u32).map(ValueId).collect();
    for node in graph.nodes.iter().filter(|node| node.op.view()) {
        shown[node.outputs[0].0 as usize] = shown[node.inputs[0].0 as usize];
    }
    shown
}

/// Bytes from the start of what a node aliases to its output.
pub(super) fn shift(graph: &Graph, node: &Node) -> usize {
    let piece = node.op.downcast::<Piece>();
    piece.map_or(0, |piece| piece.start * graph.ty(node.outputs[0]).dtype.bytes())
}

/// Bytes of a value, from the start of the value whose memory it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub of: ValueId,
    pub start: usize,
    pub end: usize,
}

/// For each value, the part that it is, seen through ops that only alias.
pub(super) fn parts(graph: &Graph) -> Vec<Part> {
    let whole = |(at, value): (usize, &Value)| Part { of: ValueId(at as u32), start: 0, end: value.ty.bytes() };
    let mut parts: Vec<Part> = graph.values.iter().enumerate().map(whole).collect();
    for node in graph.nodes.iter().filter(|node| node.op.aliases()) {
        let shift = shift(graph, node);
        for (input, output) in node.inputs.iter().zip(&node.outputs) {
            let Part { of, start, .. } = parts[input.0 as usize];
            let start = start + shift;
            parts[output.0 as usize] = Part { of, start, end: start + graph.ty(*output).bytes() };
        }
    }
    parts
}

/// Who reads which part of each parameter and state, and when.
#[derive(Debug, Default)]
pub(super) struct Reads(HashMap<ValueId, Vec<(Range<usize>, usize)>>);

impl Reads {
    pub(super) fn new(graph: &Graph, order: &[NodeId], parts: &[Part], waits: &dyn Fn(&[ValueId]) -> usize) -> Self {
        let mut reads = Self::default();
        let mut add = |id: ValueId, position: usize| {
            let part = parts[id.0 as usize];
            if is_stored(&*graph.maker(part.of).op) {
                reads.0.entry(part.of).or_default().push((part.start..part.end, position));
            }
        };
        for (position, id) in order.iter().enumerate().filter(|(_, id)| !graph.node(**id).op.view()) {
            let node = graph.node(*id);
            node.inputs.iter().for_each(|input| add(*input, position));
            // An exchange reads until somebody waits for it.
            if node.op.collective().is_some() {
                let wait = waits(&node.outputs);
                node.inputs.iter().for_each(|input| add(*input, wait));
            }
        }
        let kept = graph.outputs.iter().map(|(_, id)| id).chain(graph.updates.iter().map(|(_, value)| value));
        kept.for_each(|id| add(*id, order.len()));
        reads
    }

    /// Whether anybody reads a part of a state after this position, or, there, another part that it overlaps with.
    pub(super) fn is_read_after(&self, state: ValueId, part: Range<usize>, position: usize) -> bool {
        let reads = self.0.get(&state).into_iter().flatten();
        let mut overlapping = reads.filter(|(other, _)| other.start < part.end && part.start < other.end);
        overlapping.any(|(other, at)| *at > position || *at == position && *other != part)
    }
}

/// Whether an op's result outlives the step.
pub(super) fn is_stored(op: &dyn Op) -> bool {
    op.is::<Param>() || op.is::<State>()
}

/// For each value, the state that it becomes a part of, and the bytes before that part, seen through ops that only alias and
/// joins.
pub(super) fn becoming(graph: &Graph) -> Vec<Option<(ValueId, usize)>> {
    let mut becomes = vec![None; graph.values.len()];
    let mut todo: Vec<(ValueId, ValueId, usize)> =
        graph.updates.iter().map(|(state, value)| (*value, *state, 0)).collect();
    while let Some((value, state, mut at)) = todo.pop() {
        becomes[value.0 as usize] = Some((state, at));
        let node = graph.maker(value);
        if node.op.is::<Join>() {
            for input in &node.inputs {
                todo.push((*input, state, at));
                at += graph.ty(*input).bytes();
            }
        } else if node.op.aliases() && !node.op.is::<Piece>() {
            todo.push((node.inputs[graph.value(value).slot], state, at));
        }
    }
    becomes
}

/// For some values, the first position at which one of them is read, also through views; the end if none is.
pub(super) fn first_reads(graph: &Graph, order: &[NodeId]) -> impl Fn(&[ValueId]) -> usize + use<> {
    let mut first = vec![order.len(); graph.values.len()];
    for (position, id) in order.iter().enumerate().rev() {
        let node = graph.node(*id);
        let read = if node.op.view() { first[node.outputs[0].0 as usize] } else { position };
        node.inputs.iter().for_each(|input| {
            let slot = &mut first[input.0 as usize];
            *slot = read.min(*slot);
        });
    }
    move |values| values.iter().map(|id| first[id.0 as usize]).min().unwrap_or(0)
}
