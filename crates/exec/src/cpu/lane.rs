//! A lane: its memory, its calls, and the sums of its grains.

use super::bases::Bases;
use super::call::{Call, CallKind, run_call};
use crate::memory::Memory;
use crate::program::Program;
use crate::store::Store;
use kolo_graph::cpu::Buffer;
use kolo_graph::layout::{self, align};
use kolo_graph::{NodeId, Team};
use kolo_ops::simd;
use kolo_ops::tiles::Address;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// What one lane owns.
#[derive(Debug)]
pub(super) struct Lane {
    pub calls: Vec<Option<Call>>,
    pub inputs: Vec<(String, Buffer)>,
    pub team: Arc<Team>,
    pub scratch: Arc<Memory>,
    activations: Memory,
    batch: Memory,
    /// Partial sums of runs of grains; level 0 holds the longest and, at the end, the whole.
    levels: Arc<Vec<Memory>>,
}

/// Levels of partial sums that sums of this many terms need.
pub(super) fn sum_levels(terms: usize) -> usize {
    (terms.max(2)).ilog2() as usize
}

impl Lane {
    /// A lane's memory, without calls. `sums` is its first level, if that is somebody else's.
    pub fn new(
        program: &Program,
        sums: Option<Memory>,
        team: Arc<Team>,
        scratch: Arc<Memory>,
    ) -> std::io::Result<Self> {
        let layout = &program.layout;
        let own = |_| Memory::try_new(layout.sum_bytes);
        let whole = sums.map_or_else(|| own(0), Ok);
        let rest = (1..sum_levels(program.options.terms_of_sums())).map(own);
        Ok(Self {
            calls: Vec::new(),
            inputs: Vec::new(),
            team,
            scratch,
            activations: Memory::try_new(layout.grain_bytes)?,
            batch: Memory::try_new(layout.grain_input_bytes)?,
            levels: Arc::new(std::iter::once(whole).chain(rest).collect::<std::io::Result<Vec<Memory>>>()?),
        })
    }

    /// The memory of further grains that are on their way beside those of another lane, and add to the same sums.
    pub fn beside(program: &Program, other: &Self, team: Arc<Team>, scratch: Arc<Memory>) -> std::io::Result<Self> {
        Ok(Self {
            calls: Vec::new(),
            inputs: Vec::new(),
            team,
            scratch,
            activations: Memory::try_new(program.layout.grain_bytes)?,
            batch: Memory::try_new(program.layout.grain_input_bytes)?,
            levels: Arc::clone(&other.levels),
        })
    }

    /// Bytes of its activations and inputs that have pages.
    pub fn resident_bytes(&self) -> usize {
        self.activations.resident_bytes() + self.batch.resident_bytes()
    }

    /// Bytes of its sums that have pages.
    pub fn resident_sums(&self) -> usize {
        self.levels.iter().map(Memory::resident_bytes).sum()
    }

    /// Where values are, as this lane sees them.
    pub fn bases<'a>(&self, store: &'a Store, step: &Memory, step_batch: &Memory) -> Bases<'a> {
        Bases {
            store,
            grain_input: self.batch.at(0),
            step_input: step_batch.at(0),
            grain: self.activations.at(0),
            step: step.at(0),
            sum: self.levels[0].at(0),
        }
    }

    pub fn sums(&self) -> Address {
        Address(self.levels[0].at(0).cast())
    }

    /// Touches the sums that a call adds to.
    pub fn touch_sums(&self, call: &Call) {
        if let CallKind::Accumulate { offset, elements } = call.kind {
            self.levels.iter().for_each(|level| level.touch(offset * 4, elements * 4));
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

/// Gives each update the lanes' terms of its gradient, if nothing else wants their sum: added up as they are used, they
/// pass through memory once. Returns the elements of all other sums that no exchange adds up.
pub(super) fn leave_terms(
    program: &Program,
    exchanged: &HashSet<NodeId>,
    sums: &[Address],
    after: &mut [Option<Call>],
) -> Vec<Range<usize>> {
    let Program { graph, layout, .. } = program;
    let (readers, is_kept) = (graph.readers(), graph.kept_mask());
    let calls: HashMap<NodeId, usize> =
        after.iter().enumerate().filter_map(|(at, call)| Some((call.as_ref()?.node, at))).collect();
    let mut joined: Vec<Range<usize>> = Vec::new();
    for id in layout::sum_order(graph).into_iter().filter(|id| !exchanged.contains(&graph.value(*id).node)) {
        let start = layout.places[id.0 as usize].expect("a sum has a place").offset / 4;
        let reader = match readers[id.0 as usize][..] {
            [reader] if !is_kept[id.0 as usize] => calls.get(&reader).and_then(|at| after[*at].as_mut()),
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
