//! A store's tensors on a GPU. Sessions on one store share them; the host's copy is brought up to date when somebody reads it.

use crate::driver::DevicePointer;
use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::memory::{self, DeviceMemory};
use crate::places::stored_name;
use kolo_base::lock;
use kolo_exec::store::{Entry, Mirror, Mirrored};
use kolo_exec::{Memory, Store};
use kolo_graph::layout::Place;
use kolo_graph::{Graph, ValueId};
use std::any::Any;
use std::sync::{Arc, Mutex};

#[derive(Debug)]
pub(crate) struct StoreMirror {
    gpu: Arc<Gpu>,
    params: DeviceMemory,
    states: DeviceMemory,
    /// The host's memories, and how many of their bytes are the store's.
    host: [Arc<Memory>; 2],
    bytes: [usize; 2],
    failed: Mutex<Option<CudaError>>,
}

impl StoreMirror {
    /// That of a store, made with its first session.
    pub fn of(gpu: &Arc<Gpu>, store: &Store) -> Result<(Arc<Self>, Arc<Mirrored>), CudaError> {
        let mirrored = Arc::clone(store.mirrored());
        let mirror = mirrored.get_or_make(|| Ok::<_, CudaError>(Arc::new(Self::new(gpu, store)?)))?;
        let own = (mirror as Arc<dyn Any + Send + Sync>).downcast::<Self>().ok();
        let own = own.filter(|own| Arc::ptr_eq(&own.gpu, gpu));
        let elsewhere = || CudaError::Other("the weights are on another device already\n  hint: use one device".into());
        Ok((own.ok_or_else(elsewhere)?, mirrored))
    }

    fn new(gpu: &Arc<Gpu>, store: &Store) -> Result<Self, CudaError> {
        let bytes = store.memory_bytes();
        Ok(Self {
            gpu: Arc::clone(gpu),
            params: DeviceMemory::zeroed(gpu, bytes[0])?,
            states: DeviceMemory::zeroed(gpu, bytes[1])?,
            host: store.memories().map(Arc::clone),
            bytes,
            failed: Mutex::new(None),
        })
    }

    pub fn address(&self, entry: &Entry) -> DevicePointer {
        if entry.is_param() { self.params.at(entry.offset) } else { self.states.at(entry.offset) }
    }

    /// Where the host has a stored value, or a piece of it.
    pub fn host_address(&self, graph: &Graph, store: &Store, place: &Place) -> *mut u8 {
        let name = stored_name(graph, ValueId(place.offset as u32));
        let entry = store.entry(name).unwrap_or_else(|| panic!("the store has no `{name}`"));
        self.host[usize::from(!entry.is_param())].at(entry.offset + place.within)
    }

    /// Copies everything to the device.
    pub fn upload(&self) -> Result<(), CudaError> {
        for (at, memory) in [&self.params, &self.states].into_iter().enumerate() {
            memory::upload(&self.gpu, self.host[at].at(0), memory.at(0), self.bytes[at])?;
        }
        self.gpu.synchronize()
    }

    /// Why the host's copy could not be brought up to date, if so.
    pub fn failure(&self) -> Option<CudaError> {
        lock(&self.failed).clone()
    }
}

impl Mirror for StoreMirror {
    fn fetch(&self) {
        let fetch = || -> Result<(), CudaError> {
            for (at, memory) in [&self.params, &self.states].into_iter().enumerate() {
                memory::download(&self.gpu, memory.at(0), self.host[at].at(0), self.bytes[at])?;
            }
            self.gpu.synchronize()
        };
        if let Err(error) = fetch() {
            lock(&self.failed).get_or_insert(error);
        }
    }
}
