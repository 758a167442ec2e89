//! A store's values on the GPU: all of them, or those that nothing on the host updates.

use crate::driver::DevicePointer;
use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::host_part::{Held, memory_of};
use crate::memory::{self, DeviceMemory};
use crate::places::stored_name;
use kolo_base::lock;
use kolo_exec::store::{Entry, Mirror, Mirrored};
use kolo_exec::{Memory, Store};
use kolo_graph::layout::BufferPlace;
use kolo_graph::{Graph, ValueId};
use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

#[derive(Debug)]
pub(crate) struct StoreMirror {
    gpu: Arc<Gpu>,
    parts: Mutex<Parts>,
    /// The host's memories.
    host: [Arc<Memory>; 2],
    /// Grows whenever weights have changed.
    version: AtomicU64,
    failed: Mutex<Option<CudaError>>,
}

#[derive(Debug, Default)]
struct Parts {
    segments: Vec<Segment>,
    /// What the device changes: memory and range.
    changed: Vec<(usize, Range<usize>)>,
}

/// A run of one of the host's memories on the device.
#[derive(Debug)]
struct Segment {
    memory: usize,
    range: Range<usize>,
    device: DeviceMemory,
}

impl Segment {
    fn address(&self, memory: usize, range: &Range<usize>) -> Option<DevicePointer> {
        let inside = self.memory == memory && self.range.start <= range.start && range.end <= self.range.end;
        inside.then(|| self.device.at(range.start - self.range.start))
    }
}

impl Parts {
    /// What of a run is not there yet.
    fn missing(&self, memory: usize, run: Range<usize>) -> Vec<Range<usize>> {
        let mut missing = vec![run];
        for segment in self.segments.iter().filter(|segment| segment.memory == memory) {
            let (start, end) = (segment.range.start, segment.range.end);
            let parts = missing.iter().flat_map(|one| [one.start..one.end.min(start), one.start.max(end)..one.end]);
            missing = parts.filter(|part| part.start < part.end).collect();
        }
        missing
    }
}

impl StoreMirror {
    /// That of a store, with what a session needs of it.
    pub fn of(gpu: &Arc<Gpu>, store: &Store, held: &Held) -> Result<(Arc<Self>, Arc<Mirrored>), CudaError> {
        let mirrored = Arc::clone(store.mirrored());
        let mirror = mirrored.get_or_make(|| Ok::<_, CudaError>(Arc::new(Self::new(gpu, store))))?;
        let own = (mirror as Arc<dyn Any + Send + Sync>).downcast::<Self>().ok();
        let own = own.filter(|own| Arc::ptr_eq(&own.gpu, gpu));
        let elsewhere = || CudaError::Other("the weights are already on another device\n  hint: use one device".into());
        let own = own.ok_or_else(elsewhere)?;
        if own.missing(held) > 0 {
            // What comes to the device is copied from the host, which so has to be up to date.
            mirrored.write_host();
        }
        own.hold(held)?;
        Ok((own, mirrored))
    }

    fn new(gpu: &Arc<Gpu>, store: &Store) -> Self {
        Self {
            gpu: Arc::clone(gpu),
            parts: Mutex::default(),
            host: store.memories().map(Arc::clone),
            version: AtomicU64::new(1),
            failed: Mutex::new(None),
        }
    }

    /// Bytes that a session would add.
    pub fn missing_bytes(store: &Store, held: &Held) -> usize {
        let known = store.mirrored().made();
        let own = known.and_then(|mirror| (mirror as Arc<dyn Any + Send + Sync>).downcast::<Self>().ok());
        own.map_or_else(|| held.bytes().iter().sum(), |own| own.missing(held))
    }

    fn missing(&self, held: &Held) -> usize {
        let parts = lock(&self.parts);
        let runs = [0, 1].into_iter().flat_map(|memory| held.runs(memory).into_iter().map(move |run| (memory, run)));
        runs.flat_map(|(memory, run)| parts.missing(memory, run)).map(|part| part.len()).sum()
    }

    /// Makes room for what is not there yet.
    fn hold(&self, held: &Held) -> Result<(), CudaError> {
        let mut parts = lock(&self.parts);
        for memory in [0, 1] {
            for run in held.runs(memory) {
                for range in parts.missing(memory, run) {
                    let device = DeviceMemory::zeroed(&self.gpu, range.len())?;
                    parts.segments.push(Segment { memory, range, device });
                }
            }
            let changed = held.changed(memory).into_iter().map(|range| (memory, range));
            let fresh: Vec<_> = changed.filter(|one| !parts.changed.contains(one)).collect();
            parts.changed.extend(fresh);
        }
        Ok(())
    }

    /// Where the device has this much of an entry from some byte on, if it has it.
    pub fn address(&self, entry: &Entry, within: usize, bytes: usize) -> Option<DevicePointer> {
        let start = entry.offset + within;
        let parts = lock(&self.parts);
        parts.segments.iter().find_map(|segment| segment.address(memory_of(entry), &(start..start + bytes)))
    }

    /// Where the host has a stored value, or a piece of it.
    pub fn host_address(&self, graph: &Graph, store: &Store, place: &BufferPlace) -> *mut u8 {
        let name = stored_name(graph, ValueId(place.offset as u32));
        let entry = store.entry(name).unwrap_or_else(|| panic!("the store has no `{name}`"));
        self.host[memory_of(entry)].at(entry.offset + place.within)
    }

    /// Copies to the device all that it holds.
    pub fn upload(&self) -> Result<(), CudaError> {
        for segment in &lock(&self.parts).segments {
            let from = self.host[segment.memory].at(segment.range.start);
            memory::upload(&self.gpu, from, segment.device.at(0), segment.range.len())?;
        }
        self.changed();
        self.gpu.synchronize()
    }

    /// Weights have changed: the new version.
    pub fn changed(&self) -> u64 {
        self.version.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Relaxed)
    }

    /// Why the host's copy could not be brought up to date, if so.
    pub fn failure(&self) -> Option<CudaError> {
        lock(&self.failed).clone()
    }
}

impl Mirror for StoreMirror {
    fn fetch(&self) {
        let fetch = || -> Result<(), CudaError> {
            let parts = lock(&self.parts);
            for (memory, range) in &parts.changed {
                let from = parts.segments.iter().find_map(|segment| segment.address(*memory, range));
                let from = from.ok_or_else(|| CudaError::Other("what the device changes is not on it".into()))?;
                memory::download(&self.gpu, from, self.host[*memory].at(range.start), range.len())?;
            }
            self.gpu.synchronize()
        };
        if let Err(error) = fetch() {
            lock(&self.failed).get_or_insert(error);
        }
    }
}
