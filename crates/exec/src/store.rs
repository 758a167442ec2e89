//! What outlives a step: parameters in one flat memory, state in another.
//!
//! Each tensor starts on a cache line. Parameters lie in the order in which their gradients become ready, so that a bucket
//! or a shard is a slice.

mod copy;
mod mirror;
mod saved;

pub use copy::Copier;
pub use mirror::{Mirror, Mirrored};
pub use saved::{RestoreError, Saved, Snapshot};

use crate::element::View;
use crate::memory::Memory;
use kolo_graph::layout::align;
use kolo_graph::rng::Stream;
use kolo_graph::sources::{Init, Param};
use kolo_graph::{DType, Graph, Region, Shape, Team, Type};
use kolo_ops::tiles::Address;
use std::collections::HashMap;
use std::sync::Arc;

/// A multiple of four, as one draw of the initial values makes four.
const ELEMENTS_PER_TASK: usize = 1 << 16;

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    Parameter,
    /// State of the optimizer.
    Moment,
    /// State of the model: a running average, a counter.
    Statistic,
}

impl Role {
    pub const ALL: [Role; 3] = [Role::Parameter, Role::Moment, Role::Statistic];
}

/// A tensor that the store holds, or a run of one.
#[derive(Clone, Debug)]
pub struct Entry {
    /// As the graph calls it; that of a run says where it starts.
    pub name: String,
    /// The tensor that it has elements of, the shape of that tensor, and which elements they are.
    pub tensor: String,
    pub whole: Shape,
    pub region: Region,
    pub ty: Type,
    pub role: Role,
    pub init: Init,
    /// Bytes before it in the memory of the parameters or in that of the states.
    pub offset: usize,
}

impl Entry {
    /// Whether it is trained.
    pub fn is_param(&self) -> bool {
        self.role == Role::Parameter
    }
}

#[derive(Debug)]
pub struct Store {
    entries: Vec<Entry>,
    /// Where each name is in `entries`.
    numbers: HashMap<String, usize>,
    params: Arc<Memory>,
    states: Arc<Memory>,
    params_bytes: usize,
    states_bytes: usize,
    /// Which side is the newest, if a device keeps a copy.
    mirrored: Arc<Mirrored>,
}

impl Store {
    /// Room for every parameter and state of the graph, initialised from the seed.
    pub fn new(graph: &Graph, seed: u64) -> Self {
        let store = Self::in_memory(graph, Memory::new(Self::params_bytes(graph)));
        store.initialise(seed);
        store
    }

    /// Bytes that the parameters of a graph take.
    pub fn params_bytes(graph: &Graph) -> usize {
        graph.params().map(|(id, _)| align(graph.ty(id).bytes())).sum()
    }

    /// The entries of a graph with their places, and the bytes of the parameters' and of the states' memory.
    pub fn entries_of(graph: &Graph) -> (Vec<Entry>, [usize; 2]) {
        let mut entries: Vec<Entry> = Vec::new();
        for node in graph.nodes.iter().rev() {
            if let Some(param) = node.op.downcast::<Param>() {
                let (ty, whole, region) = (Type::f32(param.shape.clone()), param.whole().into(), param.region());
                let (name, tensor, role, init) = (param.name.clone(), param.name.clone(), Role::Parameter, param.init);
                entries.push(Entry { name, tensor, whole, region, ty, role, init, offset: 0 });
            }
        }
        let moments = graph.optimizer_states();
        for (id, state) in graph.states() {
            let (tensor, region) = state.shard();
            entries.push(Entry {
                name: state.name.clone(),
                tensor: tensor.into(),
                whole: state.whole().into(),
                region,
                ty: graph.ty(id).clone(),
                role: if moments.contains(&id) { Role::Moment } else { Role::Statistic },
                init: state.init,
                offset: 0,
            });
        }
        let mut bytes = [0, 0];
        for entry in &mut entries {
            let bytes = &mut bytes[usize::from(!entry.is_param())];
            entry.offset = *bytes;
            *bytes += align(entry.ty.bytes());
        }
        (entries, bytes)
    }

    /// Room for every parameter in `params`, and for every state; all as it is, not initialised.
    pub fn in_memory(graph: &Graph, params: Memory) -> Self {
        let (entries, [params_bytes, states_bytes]) = Self::entries_of(graph);
        assert!(params.bytes() >= params_bytes, "{} bytes for {params_bytes} bytes of parameters", params.bytes());
        let states = Arc::new(Memory::new(states_bytes));
        let numbers = entries.iter().enumerate().map(|(at, entry)| (entry.name.clone(), at)).collect();
        let mirrored = Arc::default();
        Self { entries, numbers, params: Arc::new(params), states, params_bytes, states_bytes, mirrored }
    }

    /// Gives every tensor its first values.
    pub fn initialise(&self, seed: u64) {
        self.initialise_where(seed, |_| true);
    }

    /// Gives the chosen tensors their first values.
    pub fn initialise_where(&self, seed: u64, chosen: impl Fn(&Entry) -> bool) {
        self.mirrored.write_host();
        // The memory starts as zeros, so whatever starts at zero need not be touched.
        let filled: Vec<&Entry> =
            self.entries.iter().filter(|entry| entry.init != Init::ZEROS && chosen(entry)).collect();
        // A small model is filled before a thread has started.
        let team = match filled.iter().any(|entry| entry.ty.elements() > ELEMENTS_PER_TASK) {
            true => {
                let threads = std::thread::available_parallelism().map_or(1, usize::from);
                Team::try_new(threads).unwrap_or_else(|_| Team::solo())
            }
            false => Team::solo(),
        };
        for entry in filled {
            let stream = Stream::new(seed, &format!("init.{}", entry.tensor));
            // SAFETY: nothing else refers to the memory yet.
            let values = unsafe { self.slice_mut(entry) };
            let address = Address(values.as_mut_ptr());
            team.chunks(values.len(), ELEMENTS_PER_TASK, |range, _| {
                // SAFETY: tasks own disjoint ranges of the tensor.
                let out = unsafe { address.slice(range.start, range.len()) };
                entry.init.fill_shard(&stream, entry.region, range, out);
            });
        }
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.numbers.get(name).map(|at| &self.entries[*at])
    }

    /// The memories of parameters and of states. A device that keeps a copy of its own asks [`Store::mirrored`] which is newer.
    pub fn memories(&self) -> [&Arc<Memory>; 2] {
        [&self.params, &self.states]
    }

    /// How many bytes of each of its memories it uses.
    pub fn memory_bytes(&self) -> [usize; 2] {
        [self.params_bytes, self.states_bytes]
    }

    /// Which side is the newest, if a device keeps a copy.
    pub fn mirrored(&self) -> &Arc<Mirrored> {
        &self.mirrored
    }

    /// Where the host has an entry. What lies there is brought up to date first.
    pub(crate) fn address(&self, entry: &Entry) -> *mut u8 {
        self.mirrored.read_host();
        let memory = if entry.is_param() { &self.params } else { &self.states };
        memory.at(entry.offset)
    }

    pub fn bytes(&self) -> usize {
        self.params_bytes + self.states_bytes
    }

    /// Elements of the parameters' memory, with the padding between tensors.
    pub fn params_elements(&self) -> usize {
        self.params_bytes / 4
    }

    /// # Safety
    /// No session runs on this store meanwhile, and no other slice of the entry is in use.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slice_mut(&self, entry: &Entry) -> &mut [f32] {
        assert_eq!(entry.ty.dtype, DType::F32, "`{}` is not f32", entry.name);
        // SAFETY: the entry lies inside the memory; exclusivity by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.address(entry).cast(), entry.ty.elements()) }
    }

    /// The values of one tensor.
    pub fn values(&self, name: &str) -> Option<&[f32]> {
        // SAFETY: shared borrow; sessions take the store mutably while they run.
        self.entry(name).map(|entry| unsafe { &*self.slice_mut(entry) })
    }

    /// One tensor with its type and shape.
    pub fn tensor(&self, name: &str) -> Option<View<'_>> {
        let entry = self.entry(name)?;
        // SAFETY: the entry lies inside the memory; sessions take the store mutably while they run.
        Some(unsafe { View::new(&entry.name, &entry.ty, self.address(entry)) })
    }

    pub fn values_mut(&mut self, name: &str) -> Option<&mut [f32]> {
        self.mirrored.write_host();
        let entry = self.entry(name)?;
        // SAFETY: `&mut self` is exclusive.
        Some(unsafe { self.slice_mut(entry) })
    }

    /// All parameters with the padding between them, in the order of memory.
    pub fn params_mut(&mut self) -> &mut [f32] {
        self.mirrored.write_host();
        // SAFETY: `&mut self` is exclusive, and the memory holds that many bytes.
        unsafe { std::slice::from_raw_parts_mut(self.params.at(0).cast(), self.params_bytes / 4) }
    }

    /// All state with the padding between, in the order of memory.
    pub fn states_mut(&mut self) -> &mut [u8] {
        self.mirrored.write_host();
        // SAFETY: `&mut self` is exclusive, and the memory holds that many bytes.
        unsafe { std::slice::from_raw_parts_mut(self.states.at(0), self.states_bytes) }
    }

    /// BLAKE3 over all parameters in name order: name, dtype, shape, then the values, little-endian.
    pub fn digest(&self) -> String {
        let mut trained: Vec<&Entry> = self.entries.iter().filter(|entry| entry.is_param()).collect();
        trained.sort_by(|a, b| a.name.cmp(&b.name));
        let mut digest = Digest::default();
        for entry in trained {
            // SAFETY: the entry lies inside the memory, and nothing writes it while `self` is borrowed.
            let values = unsafe { std::slice::from_raw_parts(self.address(entry).cast(), entry.ty.elements()) };
            digest.add(&entry.name, &entry.ty.shape, values);
        }
        digest.finish()
    }
}

/// The digest of parameters, which are to be added in the order of their names.
#[derive(Debug, Default)]
pub struct Digest(blake3::Hasher);

impl Digest {
    pub fn add(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        self.begin(name, shape);
        self.add_values(values);
    }

    /// The next parameter, whose values follow.
    pub fn begin(&mut self, name: &str, shape: &[usize]) {
        self.0.update(name.as_bytes());
        self.0.update(&[0]);
        self.0.update(Type::f32(shape).to_string().as_bytes());
        self.0.update(&[0]);
    }

    /// The next values of the parameter that was begun.
    pub fn add_values(&mut self, values: &[f32]) {
        if cfg!(target_endian = "little") {
            // SAFETY: floats are bytes as well.
            self.0.update(unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) });
        } else {
            values.iter().for_each(|value| {
                self.0.update(&value.to_le_bytes());
            });
        }
    }

    pub fn finish(&self) -> String {
        format!("blake3:{}", self.0.finalize().to_hex())
    }
}
