//! A lane: its memory, its calls, and the sums of its grains.

use super::call::{Call, CallKind, run_call};
use super::probe::Probe;
use crate::memory::Memory;
use crate::overlap::Overlap;
use kolo_graph::cpu::Buffer;
use kolo_graph::layout::{self, Layout, align};
use kolo_graph::{Graph, NodeId, Team};
use kolo_ops::simd;
use kolo_ops::tiles::Address;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// What one lane owns.
#[derive(Debug)]
pub(super) struct Lane {
    pub calls: Vec<Call>,
    pub inputs: Vec<(String, Buffer)>,
    pub team: Arc<Team>,
    pub scratch: Arc<Memory>,
    pub _activations: Memory,
    pub _batch: Memory,
    /// Partial sums of runs of grains; level 0 holds the longest and, at the end, the whole.
    pub levels: Vec<Memory>,
    /// (call, exchange): after this call of the last grain, the lane's part of the exchange's sums is closed.
    pub closes: Vec<(usize, usize)>,
}

/// Levels of partial sums that a lane of this many grains needs.
pub fn sum_levels(grains: usize) -> usize {
    (grains.max(2)).ilog2() as usize
}

impl Lane {
    /// Runs one grain; `number` is the lane's, `local` the grain's within the lane. In the lane's `last` grain its sums are
    /// closed for `overlap`.
    pub fn run(&mut self, number: usize, local: usize, probe: &Probe, overlap: Option<&Overlap>, last: bool) {
        let mut closes = 0;
        for at in 0..self.calls.len() {
            if probe.stops() {
                return;
            }
            let start = probe.start();
            self.call(&self.calls[at], local);
            probe.end(number, &mut self.calls[at], start);
            let Some(overlap) = overlap.filter(|_| last) else { continue };
            while let Some((_, plan)) = self.closes.get(closes).filter(|(call, _)| *call == at) {
                overlap.close(*plan, &self.team);
                closes += 1;
            }
        }
    }

    /// Runs one of the lane's calls for this grain.
    pub fn call(&self, call: &Call, local: usize) {
        match call.kind {
            CallKind::Accumulate { offset, elements } => {
                self.accumulate(local, Address(call.inputs[0].data.cast()), offset, elements);
            }
            _ => run_call(call, &self.team, &self.scratch),
        }
    }

    /// A binary counter of partial sums. Grain `local` closes as many runs as it has trailing one bits; the sum lands in
    /// the level given by the ones above them, so that runs of equal length are always added left to right.
    fn accumulate(&self, local: usize, term: Address, offset: usize, elements: usize) {
        let closes = local.trailing_ones() as usize;
        let depth = local.count_ones() as usize;
        let level = |at: usize| Address(self.levels[at].at(offset * 4).cast());
        kolo_ops::tiles::for_each_task(&self.team, elements, |range, _| {
            // SAFETY: tasks own disjoint ranges; a term and the levels are distinct memories.
            unsafe {
                let term = term.slice(range.start, range.len());
                if closes == 0 {
                    level(depth).slice(range.start, range.len()).copy_from_slice(term);
                    return;
                }
                let mut carry: &mut [f32] = term;
                for close in 0..closes {
                    let sum = level(depth - 1 - close).slice(range.start, range.len());
                    simd::add_into(sum, carry);
                    carry = sum;
                }
            }
        });
    }
}

pub(super) fn sum_addresses(lanes: &[Lane]) -> Vec<Address> {
    lanes.iter().map(|lane| Address(lane.levels[0].at(0).cast())).collect()
}

/// The position of each node of the grain phase.
fn grain_positions(layout: &Layout) -> HashMap<NodeId, usize> {
    layout.grain.iter().enumerate().map(|(at, id)| (*id, at)).collect()
}

/// Tells each lane which of its calls close the sums of an exchange, and each later call which exchanges it needs.
pub(super) fn place_exchanges(
    graph: &Graph,
    layout: &Layout,
    overlap: &Overlap,
    lanes: &mut [Lane],
    after: &mut [Call],
) {
    let positions = grain_positions(layout);
    let last_sums = overlap.last_sums(graph, &positions);
    for lane in lanes {
        // Calls are in the order of the grain phase.
        let called: Vec<usize> = lane.calls.iter().map(|call| positions[&call.node]).collect();
        let last_call = |sum: usize| called.partition_point(|at| *at <= sum).saturating_sub(1);
        lane.closes = last_sums.iter().map(|(sum, plan)| (last_call(*sum), *plan)).collect();
        lane.closes.sort_unstable();
    }
    for call in after {
        let node = graph.node(call.node);
        let mut needs: Vec<usize> = node.inputs.iter().filter_map(|id| overlap.makes(graph, *id)).collect();
        needs.sort_unstable();
        needs.dedup();
        call.needs = needs;
        if let Some(plan) = overlap.at(call.node) {
            call.kind = CallKind::Exchange(plan);
        }
    }
}

/// Gives each update the lanes' terms of its gradient, if nothing else wants their sum: added up as they are used, they
/// pass through memory once. Returns the elements of all other sums.
pub(super) fn leave_terms(graph: &Graph, layout: &Layout, sums: &[Address], after: &mut [Call]) -> Vec<Range<usize>> {
    let (readers, is_kept) = (graph.readers(), graph.kept_mask());
    let calls: HashMap<NodeId, usize> = after.iter().enumerate().map(|(at, call)| (call.node, at)).collect();
    let mut joined: Vec<Range<usize>> = Vec::new();
    for id in layout::sum_order(graph) {
        let start = layout.places[id.0 as usize].expect("a sum has a place").offset / 4;
        let reader = match readers[id.0 as usize][..] {
            [reader] if !is_kept[id.0 as usize] => calls.get(&reader).map(|at| &mut after[*at]),
            _ => None,
        };
        // As that input and no other.
        let takes = |call: &&mut Call| {
            let inputs = graph.node(call.node).inputs.iter().enumerate();
            let mut places = inputs.filter(|(_, input)| **input == id).map(|(at, _)| at);
            let takes_terms = kolo_ops::cpu_of(&*call.op).and_then(|op| op.takes_terms());
            matches!(call.kind, CallKind::Kernel) && places.next() == takes_terms && places.next().is_none()
        };
        if let Some(call) = reader.filter(takes) {
            // SAFETY: every lane's sums have this place.
            let term = |lane: &Address| unsafe { lane.get().add(start) };
            let buffer = |lane| Buffer { data: term(lane).cast(), ty: graph.ty(id).clone() };
            call.terms = sums.iter().map(buffer).collect();
            continue;
        }
        let end = start + align(graph.ty(id).bytes()) / 4;
        match joined.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => joined.push(start..end),
        }
    }
    joined
}
