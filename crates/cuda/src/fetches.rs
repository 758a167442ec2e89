//! Copies of weights from the host's memory, beside what computes.

use crate::driver::DevicePointer;
use crate::error::CudaError;
use crate::gpu::{Event, Gpu};
use crate::memory::{self, Registered};
use crate::places::Arenas;
use kolo_exec::{Program, Store};
use kolo_graph::fetch::Fetch;
use kolo_graph::layout::Arena;
use kolo_graph::{Node, ValueId};
use std::sync::Arc;

/// One copy, which begins when all that computes has come as far as where it stands.
#[derive(Debug)]
pub(crate) struct FetchCall {
    from: Source,
    to: DevicePointer,
    bytes: usize,
    /// Nothing that was started before uses its place any more.
    free: Event,
    arrived: Event,
}

#[derive(Clone, Copy, Debug)]
enum Source {
    Host(usize),
    /// The device has the weight anyway.
    Device(DevicePointer),
}

impl FetchCall {
    pub fn new(
        gpu: &Arc<Gpu>,
        program: &Program,
        store: &Store,
        arenas: &Arenas,
        node: &Node,
        lane: usize,
    ) -> Result<Self, CudaError> {
        let (input, output) = (node.inputs[0], node.outputs[0]);
        let no_place = |id: ValueId| CudaError::Other(format!("value {} of a fetched weight has no place", id.0));
        let place = program.layout.places[input.0 as usize].ok_or_else(|| no_place(input))?;
        let from = match (place.arena, arenas.address(program, store, input, lane)) {
            (_, Some(address)) => Source::Device(address),
            (Arena::Store, None) => Source::Host(arenas.mirror.host_address(&program.graph, store, &place) as usize),
            (_, None) => Source::Host(arenas.host.at(place.offset + place.within) as usize),
        };
        let to = arenas.address(program, store, output, lane).ok_or_else(|| no_place(output))?;
        let bytes = program.graph.ty(output).bytes();
        Ok(Self { from, to, bytes, free: Event::new(gpu)?, arrived: Event::new(gpu)? })
    }

    pub fn start(&self, gpu: &Gpu) -> Result<(), CudaError> {
        match self.from {
            Source::Device(from) => memory::copy(gpu, from, self.to, self.bytes),
            Source::Host(from) => {
                self.free.record()?;
                gpu.wait_in(&gpu.from_host, &self.free)?;
                memory::upload_in(gpu, &gpu.from_host, from as *const u8, self.to, self.bytes)?;
                self.arrived.record_in(&gpu.from_host)
            }
        }
    }

    /// Lets what computes go on only when the weight is there.
    pub fn wait(&self, gpu: &Gpu) -> Result<(), CudaError> {
        match self.from {
            Source::Device(_) => Ok(()),
            Source::Host(_) => gpu.wait_in(&gpu.compute, &self.arrived),
        }
    }
}

/// Pins the parameters in the host's memory if any is fetched.
pub(crate) fn registered(gpu: &Arc<Gpu>, program: &Program, store: &Store) -> Option<Registered> {
    let mut fetched = program.graph.nodes.iter().filter(|node| node.op.is::<Fetch>()).map(|node| node.inputs[0]);
    let stored = |id: ValueId| program.layout.places[id.0 as usize].is_some_and(|place| place.arena == Arena::Store);
    fetched.any(stored).then(|| Registered::new(gpu, store.memories()[0])).flatten()
}
