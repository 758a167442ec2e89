//! What outlives a step: parameters, then state, in one flat memory.
//!
//! Each tensor starts on a cache line. Parameters come first and in the order in which their gradients become ready, so
//! that a bucket or a shard is a slice.

use crate::memory::Memory;
use kolo_graph::layout::align;
use kolo_graph::rng::Stream;
use kolo_graph::sources::{Init, Param, State};
use kolo_graph::{DType, Graph, Team, Type};
use kolo_ops::tiles::Address;
use std::sync::Arc;

/// A multiple of four, as one draw of the initial values makes four.
const ELEMENTS_PER_TASK: usize = 1 << 16;

#[derive(Clone, Debug)]
pub struct Entry {
    pub name: String,
    pub ty: Type,
    pub init: Init,
    /// A parameter, as opposed to state.
    pub trained: bool,
    pub offset: usize,
}

#[derive(Debug)]
pub struct Store {
    entries: Vec<Entry>,
    memory: Arc<Memory>,
    bytes: usize,
}

/// A copy of everything a store holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    bytes: Vec<u8>,
}

impl Store {
    /// Room for every parameter and state of the graph, initialised from the seed.
    pub fn new(graph: &Graph, seed: u64) -> Self {
        let mut entries: Vec<Entry> = Vec::new();
        for node in graph.nodes.iter().rev() {
            if let Some(Param { name, shape, init }) = node.op.downcast() {
                let ty = Type::f32(shape.clone());
                entries.push(Entry { name: name.clone(), ty, init: *init, trained: true, offset: 0 });
            }
        }
        for node in &graph.nodes {
            if let Some(State { name, dtype, shape, init }) = node.op.downcast() {
                let ty = Type::new(*dtype, shape.clone());
                entries.push(Entry { name: name.clone(), ty, init: *init, trained: false, offset: 0 });
            }
        }
        let mut bytes = 0;
        for entry in &mut entries {
            entry.offset = bytes;
            bytes += align(entry.ty.bytes());
        }
        let store = Self { entries, memory: Arc::new(Memory::new(bytes)), bytes };
        store.initialise(seed);
        store
    }

    fn initialise(&self, seed: u64) {
        let team = Team::new(std::thread::available_parallelism().map_or(1, usize::from));
        // The memory starts as zeros, so whatever starts at zero need not be touched.
        for entry in self.entries.iter().filter(|entry| entry.init != Init::ZEROS) {
            let stream = Stream::new(seed, &format!("init.{}", entry.name));
            // SAFETY: nothing else refers to the memory yet.
            let values = unsafe { self.slice_mut(entry) };
            let address = Address(values.as_mut_ptr());
            team.chunks(values.len(), ELEMENTS_PER_TASK, |range, _| {
                // SAFETY: tasks own disjoint ranges of the tensor.
                entry.init.fill(&stream, range.start, unsafe { address.slice(range.start, range.len()) });
            });
        }
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// # Safety
    /// No session runs on this store meanwhile, and no other slice of the entry is in use.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slice_mut(&self, entry: &Entry) -> &mut [f32] {
        assert_eq!(entry.ty.dtype, DType::F32, "`{}` is not f32", entry.name);
        // SAFETY: the entry lies inside the memory; exclusivity by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.memory.at(entry.offset).cast(), entry.ty.elements()) }
    }

    /// The values of one tensor.
    pub fn values(&self, name: &str) -> Option<&[f32]> {
        // SAFETY: shared borrow; sessions take the store mutably while they run.
        self.entry(name).map(|entry| unsafe { &*self.slice_mut(entry) })
    }

    pub fn values_mut(&mut self, name: &str) -> Option<&mut [f32]> {
        let entry = self.entries.iter().find(|entry| entry.name == name)?;
        // SAFETY: `&mut self` is exclusive.
        Some(unsafe { self.slice_mut(entry) })
    }

    /// BLAKE3 over all parameters in name order: name, dtype, shape, then the values, little-endian.
    pub fn digest(&self) -> String {
        let mut trained: Vec<&Entry> = self.entries.iter().filter(|entry| entry.trained).collect();
        trained.sort_by(|a, b| a.name.cmp(&b.name));
        let mut hasher = blake3::Hasher::new();
        for entry in trained {
            hasher.update(entry.name.as_bytes());
            hasher.update(&[0]);
            hasher.update(entry.ty.to_string().as_bytes());
            hasher.update(&[0]);
            // SAFETY: the entry lies inside the memory, and nothing writes it while `self` is borrowed.
            let bytes = unsafe { std::slice::from_raw_parts(self.memory.at(entry.offset), entry.ty.bytes()) };
            if cfg!(target_endian = "little") {
                hasher.update(bytes);
            } else {
                bytes.chunks(4).for_each(|word| {
                    hasher.update(&[word[3], word[2], word[1], word[0]]);
                });
            }
        }
        format!("blake3:{}", hasher.finalize().to_hex())
    }

    pub fn snapshot(&self) -> Snapshot {
        // SAFETY: nothing writes the memory while `self` is borrowed.
        Snapshot { bytes: unsafe { std::slice::from_raw_parts(self.memory.at(0), self.bytes) }.to_vec() }
    }

    /// Returns to a snapshot of a store of the same graph.
    pub fn restore(&mut self, snapshot: &Snapshot) {
        assert_eq!(snapshot.bytes.len(), self.bytes, "the snapshot is of another model");
        // SAFETY: `&mut self` is exclusive, and the sizes are equal.
        unsafe { std::ptr::copy_nonoverlapping(snapshot.bytes.as_ptr(), self.memory.at(0), self.bytes) };
    }
}
