//! The CPU executor.
//!
//! Threads are used in two ways. With one lane, a grain runs on all threads, each kernel sharing its loop. With several
//! lanes, each lane runs its own grains on its share of the threads, so that nothing is shared until the grains are
//! summed.

mod abilities;
mod bases;
mod call;
mod lane;
#[cfg(test)]
mod tests;

use crate::exchanges::staged_bytes;
use crate::executor::{CompileError, Device, Executor, SessionBytes};
use crate::memory::Memory;
use crate::options::Options;
use crate::program::Program;
use crate::schedule::Schedule;
use crate::store::Store;
pub use abilities::CpuAbilities;
use bases::input_buffers;
pub use call::MissingKernel;
use call::{Call, Finite, compile, is_finite, run_call, run_maker, scratch_bytes, touch_call};
use kolo_graph::cpu::Buffer;
use kolo_graph::layout::{self, Layout};
use kolo_graph::{Graph, Phase, Team, ValueId};
use kolo_ops::simd;
use kolo_ops::tiles::Address;
use lane::{Lane, leave_terms, sum_levels};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Runs graphs on the processor's cores.
#[derive(Clone, Copy, Debug)]
pub struct Cpu;

impl Executor for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn layout(&self, graph: &Graph, options: Options) -> Layout {
        layout::plan(graph, options.grains, options.lanes, &CpuAbilities)
    }

    fn bytes(&self, graph: &Graph, layout: &Layout, options: Options) -> SessionBytes {
        let (lane_scratch, scratch) = scratches(graph, layout, options);
        let lanes_scratch = if options.lanes == 1 { 0 } else { lane_scratch * options.lanes };
        SessionBytes {
            activations: (layout.grain_bytes + layout.grain_input_bytes) * options.places(),
            gradients: layout.sum_bytes * sum_levels(options.terms_of_sums()) * options.lanes,
            scratch: layout.step_bytes
                + layout.step_input_bytes
                + lanes_scratch
                + scratch
                + staged_bytes(graph, layout, options.lanes),
            staging: 0,
        }
    }

    fn compile(
        &self,
        program: &Program,
        schedule: &Arc<Schedule>,
        store: &Store,
        sums: Option<Memory>,
    ) -> Result<Box<dyn Device>, CompileError> {
        Ok(Box::new(CpuDevice::new(program, schedule, store, sums)?))
    }
}

/// Bytes of scratch for each lane and for the step. A lone lane uses the step's.
fn scratches(graph: &Graph, layout: &Layout, options: Options) -> (usize, usize) {
    let lane = scratch_bytes(graph, &layout.grain, options.lane_threads());
    let rest = [&layout.before[..], &layout.after[..]].concat();
    let step = scratch_bytes(graph, &rest, options.threads);
    (lane, if options.lanes == 1 { step.max(lane) } else { step })
}

/// A schedule with every operand an address.
#[derive(Debug)]
struct CpuDevice {
    lanes: Vec<Lane>,
    before: Vec<Option<Call>>,
    after: Vec<Option<Call>>,
    /// Updates that could not be done in place, from and to.
    copies: Vec<(Buffer, Buffer)>,
    step_inputs: Vec<(String, Buffer)>,
    /// Where each value is, by lane.
    buffers: Vec<Vec<Option<Buffer>>>,
    team: Arc<Team>,
    scratch: Arc<Memory>,
    /// Each lane's sums, and their bytes.
    sums: Vec<Address>,
    sum_bytes: usize,
    /// Elements of the sums that are added over lanes before the update; what is not here, the update adds itself.
    joined: Vec<Range<usize>>,
    step: Memory,
    step_batch: Memory,
    _store: [Arc<Memory>; 2],
}

impl CpuDevice {
    fn new(
        program: &Program,
        schedule: &Arc<Schedule>,
        store: &Store,
        mut shared_sums: Option<Memory>,
    ) -> Result<Self, CompileError> {
        let Program { graph, layout, options, .. } = program;
        let step = Memory::try_new(layout.step_bytes)?;
        let step_batch = Memory::try_new(layout.step_input_bytes)?;
        let (lane_scratch, step_scratch) = scratches(graph, layout, *options);
        let scratch = Arc::new(Memory::try_new(step_scratch)?);
        let team = Arc::new(Team::try_new(options.threads)?);
        let (mut lanes, mut buffers) = (Vec::with_capacity(options.lanes), Vec::new());
        for place in 0..options.places() {
            // A lone lane shares the step's threads: another team's would fight with them for the cores.
            let (team, scratch) = match options.lanes {
                1 => (Arc::clone(&team), Arc::clone(&scratch)),
                _ => (Arc::new(Team::try_new(options.lane_threads())?), Arc::new(Memory::try_new(lane_scratch)?)),
            };
            let mut lane = match lanes.first() {
                // Slots of one lane add to the same sums.
                Some(first) if place > 0 && options.lanes == 1 => Lane::beside(program, first, team, scratch)?,
                _ => Lane::new(program, shared_sums.take(), team, scratch)?,
            };
            let bases = lane.bases(store, &step, &step_batch);
            lane.calls = compile(program, &schedule.grain, &bases, &lane.scratch, options.lane_threads())?;
            lane.inputs = input_buffers(graph, layout, &bases, false);
            buffers.push(bases.all(graph, layout));
            lanes.push(lane);
        }
        let shared = lanes[0].bases(store, &step, &step_batch);
        let before = compile(program, &schedule.before, &shared, &scratch, options.threads)?;
        let mut after = compile(program, &schedule.after, &shared, &scratch, options.threads)?;
        let buffer = |id: ValueId| shared.buffer(graph, layout, id);
        let copies = layout.copies.iter().map(|(from, to)| (buffer(*from), buffer(*to))).collect();
        let step_inputs = input_buffers(graph, layout, &shared, true);
        let sums: Vec<Address> = lanes.iter().map(Lane::sums).collect();
        let joined = match options.lanes {
            1 => Vec::new(),
            _ => leave_terms(program, &schedule.exchanged_sums(graph), &sums, &mut after),
        };
        Ok(Self {
            lanes,
            before,
            after,
            copies,
            step_inputs,
            buffers,
            team,
            scratch,
            sums,
            sum_bytes: layout.sum_bytes,
            joined,
            step,
            step_batch,
            _store: store.memories().map(Arc::clone),
        })
    }

    fn call(&self, phase: Phase, item: usize, lane: usize) -> Option<&Call> {
        match phase {
            Phase::Before => self.before[item].as_ref(),
            Phase::Grain => self.lanes[lane].calls[item].as_ref(),
            Phase::After => self.after[item].as_ref(),
        }
    }
}

impl Device for CpuDevice {
    fn inputs(&self, lane: Option<usize>) -> &[(String, Buffer)] {
        lane.map_or(&self.step_inputs, |lane| &self.lanes[lane].inputs)
    }

    fn resident_bytes(&self) -> Option<SessionBytes> {
        // A lone lane has the step's scratch, and its slots its sums.
        let is_lone = self.lanes.first().is_some_and(|lane| Arc::ptr_eq(&lane.scratch, &self.scratch));
        let sums = if is_lone { &self.lanes[..1] } else { &self.lanes[..] };
        let of_lanes = self.lanes.iter().filter(|_| !is_lone).map(|lane| lane.scratch.resident_bytes());
        let scratch = self.scratch.resident_bytes() + of_lanes.sum::<usize>();
        Some(SessionBytes {
            activations: self.lanes.iter().map(Lane::resident_bytes).sum(),
            gradients: sums.iter().map(Lane::resident_sums).sum(),
            scratch: self.step.resident_bytes() + self.step_batch.resident_bytes() + scratch,
            staging: 0,
        })
    }

    fn buffer(&self, id: ValueId, lane: usize) -> Buffer {
        self.buffers[lane][id.0 as usize].clone().expect("a value that is asked for has a place")
    }

    fn run_lanes(&self, body: &(dyn Fn(usize) + Sync)) {
        self.team.run(self.lanes.len(), |lane, _| body(lane));
    }

    fn run(&self, phase: Phase, item: usize, lane: usize, grain: usize) {
        let Some(call) = self.call(phase, item, lane) else { return };
        match phase {
            Phase::Grain => self.lanes[lane].call(call, grain),
            Phase::Before | Phase::After => run_call(call, &self.team, &self.scratch),
        }
    }

    fn join(&self, elements: Range<usize>, lane: usize) {
        join(&self.sums, elements, &self.lanes[lane].team);
    }

    fn join_all(&self) {
        self.joined.iter().for_each(|range| join(&self.sums, range.clone(), &self.team));
    }

    fn end(&self) {
        for (from, to) in &self.copies {
            // SAFETY: two different places of the same type.
            unsafe { std::ptr::copy_nonoverlapping(from.data, to.data, to.ty.bytes()) };
        }
    }

    fn is_finite(&self, phase: Phase, item: usize) -> bool {
        let Some(call) = self.call(phase, item, 0) else { return true };
        let Some(maker) = &call.maker else { return call.outputs.iter().all(is_finite) };
        let seen = Finite(AtomicBool::new(true));
        run_maker(maker, &self.team, &self.scratch, &seen);
        seen.0.into_inner()
    }

    fn sums_mut(&mut self) -> &mut [f32] {
        // SAFETY: `&mut self` is exclusive, and the first lane's sums have this size.
        unsafe { self.sums[0].slice(0, self.sum_bytes / 4) }
    }

    fn touch(&self, phase: Phase, item: Option<usize>, lane: usize) {
        let Some(item) = item else {
            let scratch = if phase == Phase::Grain { &self.lanes[lane].scratch } else { &self.scratch };
            return scratch.touch(0, scratch.bytes());
        };
        let Some(call) = self.call(phase, item, lane) else { return };
        touch_call(call);
        if phase == Phase::Grain {
            self.lanes[lane].touch_sums(call);
        }
    }
}

/// Adds the lanes' sums as a balanced tree, into lane 0's.
fn join(lanes: &[Address], range: Range<usize>, team: &Team) {
    kolo_ops::tiles::for_each_task(team, range.len(), |task, _| {
        // SAFETY: tasks own disjoint ranges, and the lanes' memories are distinct.
        let sum = |lane: usize| unsafe { lanes[lane].slice(range.start + task.start, task.len()) };
        kolo_ops::tiles::add_as_tree(lanes.len(), sum, simd::add_into);
    });
}
