//! Where every value lies on the device: the arenas of the layout, one allocation each.

use crate::driver::DevicePointer;
use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::memory::{DeviceMemory, pinned};
use crate::mirror::StoreMirror;
use kolo_exec::{Memory, Options, Program, Store};
use kolo_graph::layout::{Arena, BufferPlace};
use kolo_graph::sources::{Param, State};
use kolo_graph::{Graph, ValueId};
use std::sync::Arc;

/// Levels of partial sums that a lane of this many grains needs.
pub(crate) fn sum_levels(options: Options) -> usize {
    options.grains_per_lane().max(2).ilog2() as usize
}

/// The arenas of a session.
#[derive(Debug)]
pub(crate) struct Arenas {
    pub grain_input: Vec<DeviceMemory>,
    pub grain: Vec<DeviceMemory>,
    pub step_input: DeviceMemory,
    pub step: DeviceMemory,
    /// All levels of the sums, one behind the other.
    pub sums: DeviceMemory,
    pub scratch: DeviceMemory,
    /// What is left in the host's memory, pinned.
    pub host: Memory,
    pub mirror: Arc<StoreMirror>,
}

impl Arenas {
    pub fn new(
        gpu: &Arc<Gpu>,
        program: &Program,
        scratch_bytes: usize,
        mirror: Arc<StoreMirror>,
    ) -> Result<Self, CudaError> {
        let (layout, places) = (&program.layout, program.options.places());
        let each = |bytes: usize| (0..places).map(|_| DeviceMemory::zeroed(gpu, bytes)).collect::<Result<Vec<_>, _>>();
        Ok(Self {
            grain_input: each(layout.grain_input_bytes)?,
            grain: each(layout.grain_bytes)?,
            step_input: DeviceMemory::zeroed(gpu, layout.step_input_bytes)?,
            step: DeviceMemory::zeroed(gpu, layout.step_bytes)?,
            sums: DeviceMemory::zeroed(gpu, layout.sum_bytes * sum_levels(program.options))?,
            scratch: DeviceMemory::zeroed(gpu, scratch_bytes)?,
            host: pinned(gpu, layout.host_bytes)?,
            mirror,
        })
    }

    /// Fills everything that a step computes with NaNs, and whole numbers with nonsense.
    pub fn poison(&self) -> Result<(), CudaError> {
        self.grain.iter().chain([&self.step, &self.sums, &self.scratch]).try_for_each(|memory| memory.fill(0xff))
    }

    /// Where a value is, as this lane sees it; `None` if it has no place on the device.
    pub fn address(&self, program: &Program, store: &Store, id: ValueId, lane: usize) -> Option<DevicePointer> {
        let place = program.layout.places[id.0 as usize]?;
        if place.arena == Arena::Store {
            return self.stored(&program.graph, store, &place, program.graph.ty(id).bytes());
        }
        self.placed(&place, lane).ok()
    }

    /// A place of an arena, as this lane sees it; not of the store.
    pub fn placed(&self, place: &BufferPlace, lane: usize) -> Result<DevicePointer, CudaError> {
        let base = match place.arena {
            Arena::Store => return Err(CudaError::Other("a stored value is found by its name".into())),
            Arena::Host => return Err(CudaError::Other("what the host keeps has no place on the device".into())),
            Arena::GrainInput => self.grain_input[lane].at(place.offset),
            Arena::StepInput => self.step_input.at(place.offset),
            Arena::Grain => self.grain[lane].at(place.offset),
            Arena::Step => self.step.at(place.offset),
            Arena::Sum => self.sums.at(place.offset),
        };
        Ok(base + place.within as u64)
    }

    fn stored(&self, graph: &Graph, store: &Store, place: &BufferPlace, bytes: usize) -> Option<DevicePointer> {
        let id = ValueId(place.offset as u32);
        let name = stored_name(graph, id);
        let entry = store.entry(name).unwrap_or_else(|| panic!("the store has no `{name}`"));
        assert_eq!(entry.ty, *graph.ty(id), "`{name}` has another type in the store");
        self.mirror.address(entry, place.within, bytes)
    }
}

pub(crate) fn stored_name(graph: &Graph, id: ValueId) -> &str {
    let op = &graph.maker(id).op;
    let name = op.downcast::<Param>().map(|op| &op.name).or(op.downcast::<State>().map(|op| &op.name));
    name.expect("only parameters and states are stored")
}
