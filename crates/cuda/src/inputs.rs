//! What a step, or a grain, is fed: written to pinned memory by the host, copied to the device when it is whole.

use crate::driver::DevicePointer;
use crate::error::CudaError;
use crate::gpu::{Event, Gpu};
use crate::memory::{self, DeviceMemory, pinned};
use kolo_exec::{Memory, Program};
use kolo_graph::cpu::Buffer;
use kolo_graph::sources::Input;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Inputs {
    /// Sorted by name.
    buffers: Vec<(String, Buffer)>,
    host: Memory,
    device: DevicePointer,
    bytes: usize,
    /// When the device has read the host's memory.
    read: Event,
}

impl Inputs {
    pub fn new(gpu: &Arc<Gpu>, program: &Program, device: &DeviceMemory, per_step: bool) -> Result<Self, CudaError> {
        let layout = &program.layout;
        let bytes = if per_step { layout.step_input_bytes } else { layout.grain_input_bytes };
        let host = pinned(gpu, bytes)?;
        let mut buffers = Vec::new();
        for (id, input) in program.graph.sources::<Input>().filter(|(_, input)| input.per_step == per_step) {
            if let Some(place) = layout.places[id.0 as usize] {
                let (data, ty) = (host.at(place.offset), program.graph.ty(id).clone());
                buffers.push((input.name.clone(), Buffer { data, ty }));
            }
        }
        buffers.sort_by(|one, other| one.0.cmp(&other.0));
        Ok(Self { buffers, host, device: device.at(0), bytes, read: Event::new(gpu)? })
    }

    /// Where they are to be written, once the device has read what was there.
    pub fn buffers(&self) -> Result<&[(String, Buffer)], CudaError> {
        self.read.wait()?;
        Ok(&self.buffers)
    }

    /// Where they are written, if nobody reads them any more.
    pub fn unread(&self) -> &[(String, Buffer)] {
        &self.buffers
    }

    /// They are written: starts to copy them to the device.
    pub fn upload(&self, gpu: &Gpu) -> Result<(), CudaError> {
        memory::upload(gpu, self.host.at(0), self.device, self.bytes)?;
        self.read.record()
    }
}
