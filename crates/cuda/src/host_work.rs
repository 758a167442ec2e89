//! What the host computes while the optimizer is offloaded: rules of the optimizer and casts of weights, piece by piece.
//!
//! While the host works on one piece, the gradient of a later one is on its way to the host and what an earlier one became on its way
//! to the device: each piece has a slot of pinned memory, and slots are used in turn.

use crate::driver::DevicePointer;
use crate::error::CudaError;
use crate::gpu::{Event, Gpu};
use crate::host_part::HostPart;
use crate::memory::{Registered, download_in, pinned, upload_in};
use crate::places::Arenas;
use kolo_exec::{Memory, Program, Store};
use kolo_graph::cpu::{Buffer, Cpu, CpuCx};
use kolo_graph::layout::{Arena, Layout, align};
use kolo_graph::{Graph, NodeId, Op, Team, Type, ValueId};
use kolo_ops::cast::Cast;
use kolo_ops::cpu_of;
use kolo_ops::optim::RoundBf16;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Elements of a piece: large enough to hide the time to start a copy, small enough that three of them are soon filled.
const PIECE_ELEMENTS: usize = if cfg!(test) { 1 << 10 } else { 4 << 20 };
/// Pieces on their way: one arrives, one is computed, one leaves.
const SLOTS: usize = 3;
/// Numbers that the rules of one graph read: rate, scale and step, and norms of every tensor in some.
const SCALAR_BYTES: usize = 64;

/// One node that the host runs.
#[derive(Debug)]
pub(crate) struct HostCall {
    op: Arc<dyn Op>,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
    elements: usize,
    /// Casts of what it makes, which are made at once for the next step.
    casts: Vec<Arc<HostCall>>,
    /// Of a cast: the version of the weights that the device has its result of.
    made_of: AtomicU64,
}

#[derive(Clone, Debug)]
struct Operand {
    ty: Type,
    /// Where the host keeps it.
    host: Option<usize>,
    /// Where the device has it, or gets it.
    device: Option<DevicePointer>,
}

impl Operand {
    /// Elements of a piece of it; of a number, itself.
    fn piece(&self, piece: &Piece) -> Type {
        let count = if self.ty.elements() == piece.of { piece.count } else { self.ty.elements() };
        Type::new(self.ty.dtype, [count])
    }

    fn shift(&self, piece: &Piece) -> usize {
        if self.ty.elements() == piece.of { piece.start * self.ty.dtype.bytes() } else { 0 }
    }
}

/// So many elements of a call, of so many.
#[derive(Clone, Copy, Debug)]
struct Piece {
    start: usize,
    count: usize,
    of: usize,
}

/// Pinned memory for one piece.
#[derive(Debug)]
struct Slot {
    arriving: Memory,
    leaving: Memory,
    arrived: Event,
    left: Event,
}

#[derive(Debug)]
pub(crate) struct HostWork {
    gpu: Arc<Gpu>,
    team: Team,
    slots: Vec<Slot>,
    /// Numbers that rules read, by where the device has them.
    scalars: BTreeMap<DevicePointer, usize>,
    scalar_memory: Memory,
    ready: Event,
    numbers_arrived: Event,
    done: Event,
    calls: BTreeMap<NodeId, Arc<HostCall>>,
    /// Casts that rules make at once.
    followers: Vec<Arc<HostCall>>,
    _registered: Option<Registered>,
}

impl HostWork {
    /// `None` if the host runs nothing.
    pub fn new(
        gpu: &Arc<Gpu>,
        program: &Program,
        host: &HostPart,
        store: &Store,
        arenas: &Arenas,
        alone: bool,
    ) -> Result<Option<Self>, CudaError> {
        if host.is_empty() {
            return Ok(None);
        }
        let (calls, followers) = calls(program, host, store, arenas, alone);
        let [arriving, leaving] = piece_bytes(&program.graph, &program.layout, host);
        let slot = |_| -> Result<Slot, CudaError> {
            let (arriving, leaving) = (pinned(gpu, arriving)?, pinned(gpu, leaving)?);
            Ok(Slot { arriving, leaving, arrived: Event::new(gpu)?, left: Event::new(gpu)? })
        };
        let mut scalars: BTreeMap<DevicePointer, usize> = BTreeMap::new();
        for address in calls.values().flat_map(|call| call.scalars()) {
            let next = scalars.len() * SCALAR_BYTES;
            scalars.entry(address).or_insert(next);
        }
        let kept = |operand: &Operand| operand.host.is_some() && operand.device.is_some();
        let sends_weights = calls.values().any(|call| call.outputs.iter().any(kept));
        Ok(Some(Self {
            gpu: Arc::clone(gpu),
            team: Team::try_new(program.options.threads.max(1)).unwrap_or_else(|_| Team::solo()),
            slots: (0..SLOTS).map(slot).collect::<Result<_, _>>()?,
            scalar_memory: pinned(gpu, scalars.len() * SCALAR_BYTES)?,
            scalars,
            ready: Event::new(gpu)?,
            numbers_arrived: Event::new(gpu)?,
            done: Event::new(gpu)?,
            calls,
            followers,
            _registered: sends_weights.then(|| Registered::new(gpu, store.memories()[0])).flatten(),
        }))
    }

    /// What a node does.
    pub fn call(&self, node: NodeId) -> Option<&Arc<HostCall>> {
        self.calls.get(&node)
    }

    /// The device has what casts make of this version of the weights.
    pub fn weights_changed(&self, version: u64) {
        self.followers.iter().for_each(|cast| cast.made_of.store(version, Ordering::Relaxed));
    }

    /// Runs calls one after the other. Casts whose result the device has of this version of the weights are left out.
    pub fn run(&self, calls: &[&Arc<HostCall>], version: u64) -> Result<(), CudaError> {
        let due = calls.iter().filter(|call| call.made_of.load(Ordering::Relaxed) != version);
        let due: Vec<&Arc<HostCall>> = due.copied().collect();
        // What a call reads is on its way before those ahead of it are done: it must not be theirs.
        let mut rest = &due[..];
        while !rest.is_empty() {
            let (apart, others) = rest.split_at(independent(rest));
            self.run_apart(apart)?;
            rest = others;
        }
        due.iter().filter(|call| call.op.is::<Cast>()).for_each(|call| call.made_of.store(version, Ordering::Relaxed));
        Ok(())
    }

    /// Runs calls of which none reads what another makes.
    fn run_apart(&self, due: &[&Arc<HostCall>]) -> Result<(), CudaError> {
        let pieces: Vec<(&Arc<HostCall>, Piece)> = due.iter().flat_map(|call| call.pieces()).collect();
        if pieces.is_empty() {
            return Ok(());
        }
        let gpu = &*self.gpu;
        self.ready.record()?;
        gpu.wait_in(&gpu.to_host, &self.ready)?;
        gpu.wait_in(&gpu.from_host, &self.ready)?;
        self.fetch_numbers(due)?;
        for at in 0..pieces.len().min(SLOTS) {
            self.fetch(&pieces[at], &self.slots[at])?;
        }
        self.numbers_arrived.wait()?;
        for (at, piece) in pieces.iter().enumerate() {
            let slot = &self.slots[at % SLOTS];
            slot.arrived.wait()?;
            slot.left.wait()?;
            self.compute(piece, slot)?;
            slot.left.record_in(&gpu.from_host)?;
            if let Some(later) = pieces.get(at + SLOTS) {
                self.fetch(later, slot)?;
            }
        }
        self.done.record_in(&gpu.from_host)?;
        gpu.wait_in(&gpu.compute, &self.done)
    }

    /// Starts to copy the numbers that these calls read to the host.
    fn fetch_numbers(&self, calls: &[&Arc<HostCall>]) -> Result<(), CudaError> {
        let read: BTreeSet<DevicePointer> = calls.iter().flat_map(|call| call.scalars()).collect();
        for address in read {
            let to = self.scalar_memory.at(self.scalars[&address]);
            download_in(&self.gpu, &self.gpu.to_host, address, to, size_of::<f32>())?;
        }
        self.numbers_arrived.record_in(&self.gpu.to_host)
    }

    /// Starts to copy what a piece reads of the device's memory to its slot.
    fn fetch(&self, (call, piece): &(&Arc<HostCall>, Piece), slot: &Slot) -> Result<(), CudaError> {
        let mut offset = 0;
        for operand in call.inputs.iter().filter(|operand| call.arrives(operand)) {
            let (bytes, from) = (operand.piece(piece).bytes(), operand.device.unwrap_or_default());
            let from = from + operand.shift(piece) as u64;
            download_in(&self.gpu, &self.gpu.to_host, from, slot.arriving.at(offset), bytes)?;
            offset += align(bytes);
        }
        slot.arrived.record_in(&self.gpu.to_host)
    }

    /// Computes a piece and what follows from it, and starts to copy what the device needs of it.
    fn compute(&self, (call, piece): &(&Arc<HostCall>, Piece), slot: &Slot) -> Result<(), CudaError> {
        let (mut arrived, mut leaving) = (0, 0);
        let inputs: Vec<Buffer> =
            call.inputs.iter().map(|operand| self.input(call, operand, piece, slot, &mut arrived)).collect();
        self.apply(call, &inputs, piece, slot, &mut leaving)?;
        for cast in &call.casts {
            let weights = &cast.inputs[0];
            let host = weights.host.unwrap_or_default() + weights.shift(piece);
            let input = Buffer { data: host as *mut u8, ty: weights.piece(piece) };
            self.apply(cast, &[input], piece, slot, &mut leaving)?;
        }
        Ok(())
    }

    fn input(&self, call: &HostCall, operand: &Operand, piece: &Piece, slot: &Slot, arrived: &mut usize) -> Buffer {
        let ty = operand.piece(piece);
        let data = match operand.host {
            Some(host) => (host + operand.shift(piece)) as *mut u8,
            None if call.arrives(operand) => {
                *arrived += align(ty.bytes());
                slot.arriving.at(*arrived - align(ty.bytes()))
            }
            None => self.scalar_memory.at(self.scalars[&operand.device.unwrap_or_default()]),
        };
        Buffer { data, ty }
    }

    /// Runs a kernel on a piece, and sends its results.
    fn apply(
        &self,
        call: &HostCall,
        inputs: &[Buffer],
        piece: &Piece,
        slot: &Slot,
        leaving: &mut usize,
    ) -> Result<(), CudaError> {
        let output = |operand: &Operand| {
            let ty = operand.piece(piece);
            let data = match operand.host {
                Some(host) => (host + operand.shift(piece)) as *mut u8,
                None => {
                    *leaving += align(ty.bytes());
                    slot.leaving.at(*leaving - align(ty.bytes()))
                }
            };
            Buffer { data, ty }
        };
        let outputs: Vec<Buffer> = call.outputs.iter().map(output).collect();
        // SAFETY: operands lie in the store or in the slot, which nobody else uses now; rules and casts want no scratch.
        let mut cx = unsafe { CpuCx::new(inputs, &outputs, &self.team, (std::ptr::null_mut(), 0)) };
        let missing = || CudaError::Other(format!("the host has no `{}`", call.op.name()));
        match call.op.downcast::<RoundBf16>() {
            // Its random numbers are counted by elements of the whole.
            Some(round) => round.skip(piece.start).run(&mut cx),
            None => cpu_of(&*call.op).ok_or_else(missing)?.run(&mut cx),
        }
        for (operand, made) in call.outputs.iter().zip(&outputs) {
            if let Some(device) = operand.device {
                let to = device + operand.shift(piece) as u64;
                upload_in(&self.gpu, &self.gpu.from_host, made.data, to, made.ty.bytes())?;
            }
        }
        Ok(())
    }
}

impl HostCall {
    fn new(graph: &Graph, id: NodeId, place: &dyn Fn(ValueId) -> Operand) -> Self {
        let node = graph.node(id);
        let operands = |ids: &[ValueId]| ids.iter().map(|id| place(*id)).collect::<Vec<_>>();
        Self {
            op: Arc::clone(&node.op),
            inputs: operands(&node.inputs),
            outputs: operands(&node.outputs),
            elements: graph.ty(node.outputs[0]).elements(),
            casts: Vec::new(),
            made_of: AtomicU64::new(0),
        }
    }

    /// Whether an input comes to the host piece by piece.
    fn arrives(&self, operand: &Operand) -> bool {
        operand.host.is_none() && operand.ty.elements() == self.elements
    }

    /// Inputs that are one number for all elements.
    fn scalars(&self) -> impl Iterator<Item = DevicePointer> {
        let inputs = self.inputs.iter().filter(|operand| operand.host.is_none() && !self.arrives(operand));
        inputs.filter_map(|operand| operand.device)
    }

    fn pieces<'c>(self: &'c &Arc<Self>) -> impl Iterator<Item = (&'c Arc<Self>, Piece)> {
        let of = self.elements;
        (0..of)
            .step_by(PIECE_ELEMENTS)
            .map(move |start| (*self, Piece { start, count: PIECE_ELEMENTS.min(of - start), of }))
    }
}

/// How many calls from the first on read nothing that one of them sends to the device.
fn independent(calls: &[&Arc<HostCall>]) -> usize {
    let mut sent: BTreeSet<DevicePointer> = BTreeSet::new();
    let reads_sent = |call: &HostCall, sent: &BTreeSet<DevicePointer>| {
        let fetched = call.inputs.iter().filter(|operand| operand.host.is_none()).filter_map(|operand| operand.device);
        fetched.into_iter().any(|address| sent.contains(&address))
    };
    for (at, call) in calls.iter().enumerate() {
        if reads_sent(call, &sent) {
            return at;
        }
        sent.extend(call.outputs.iter().filter_map(|operand| operand.device));
    }
    calls.len()
}

/// The calls of the host by their nodes, and the casts that rules make at once: not where other ranks have a share in the weights.
fn calls(
    program: &Program,
    host: &HostPart,
    store: &Store,
    arenas: &Arenas,
    alone: bool,
) -> (BTreeMap<NodeId, Arc<HostCall>>, Vec<Arc<HostCall>>) {
    let graph = &program.graph;
    let place = |id: ValueId| {
        let host = program.layout.places[id.0 as usize].and_then(|place| match place.arena {
            Arena::Store => Some(arenas.mirror.host_address(graph, store, &place)),
            Arena::Host => Some(arenas.host.at(place.offset + place.within)),
            _ => None,
        });
        Operand {
            ty: graph.ty(id).clone(),
            host: host.map(|address| address as usize),
            device: arenas.address(program, store, id, 0),
        }
    };
    let (mut calls, mut followers) = (BTreeMap::new(), Vec::new());
    for id in host.nodes().filter(|id| graph.node(*id).op.is::<Cast>()) {
        calls.insert(id, Arc::new(HostCall::new(graph, id, &place)));
    }
    let casts: Vec<Arc<HostCall>> = calls.values().cloned().collect();
    // What is rounded is cast when it was.
    let rounds = host.nodes().map(|id| graph.node(id)).filter(|node| node.op.is::<RoundBf16>());
    let rounded: BTreeSet<ValueId> = rounds.map(|node| node.inputs[0]).collect();
    for id in host.nodes().filter(|id| !graph.node(*id).op.is::<Cast>()) {
        let mut call = HostCall::new(graph, id, &place);
        let made = |cast: &&Arc<HostCall>| {
            let read = &cast.inputs[0];
            call.outputs.iter().any(|output| output.host == read.host && output.ty.elements() == read.ty.elements())
        };
        let last = !graph.node(id).outputs.iter().any(|output| rounded.contains(output));
        call.casts = casts.iter().filter(|cast| alone && last && made(cast)).cloned().collect();
        followers.extend(call.casts.iter().cloned());
        calls.insert(id, Arc::new(call));
    }
    (calls, followers)
}

/// Bytes of a slot that arrive for the largest piece, and that leave.
fn piece_bytes(graph: &Graph, layout: &Layout, host: &HostPart) -> [usize; 2] {
    let at_hosts = |arena: Arena| matches!(arena, Arena::Store | Arena::Host);
    let stored = |id: &ValueId| layout.places[id.0 as usize].is_some_and(|place| at_hosts(place.arena));
    let bytes = |ids: &[ValueId]| -> usize {
        let staged = ids.iter().filter(|id| !stored(id)).map(|id| graph.ty(*id));
        staged.map(|ty| align(ty.elements().min(PIECE_ELEMENTS) * ty.dtype.bytes())).sum()
    };
    let most = |casts: bool, ids: fn(&kolo_graph::Node) -> &[ValueId]| {
        let nodes = host.nodes().map(|id| graph.node(id)).filter(|node| node.op.is::<Cast>() == casts);
        nodes.map(|node| bytes(ids(node))).max().unwrap_or(0)
    };
    let casts = host.nodes().map(|id| graph.node(id)).filter(|node| node.op.is::<Cast>());
    // A tied weight may be cast more than once.
    let mut of_weight: BTreeMap<ValueId, usize> = BTreeMap::new();
    casts.for_each(|node| *of_weight.entry(node.inputs[0]).or_default() += bytes(&node.outputs));
    [most(false, |node| &node.inputs), most(false, |node| &node.outputs) + of_weight.values().max().unwrap_or(&0)]
}

/// Pinned bytes that all slots take.
pub(crate) fn staging_bytes(graph: &Graph, layout: &Layout, host: &HostPart) -> usize {
    if host.is_empty() { 0 } else { SLOTS * piece_bytes(graph, layout, host).iter().sum::<usize>() }
}
