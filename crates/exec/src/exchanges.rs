//! The collectives of a session, beside its kernels.
//!
//! An exchange of sums over grains starts when the last lane has closed the last of its sums; any other starts at its
//! place in the order. Each is waited for where its result is first read, or at the end of its phase. Lanes close sums in
//! the same order, and the last to close one starts its exchange before it closes the next, so that the exchanges of a step
//! start in one order on all ranks; those of grains start in the order of their lane.

use crate::exchange::{Collectives, Exchange, ExchangeError, ExchangeKind};
use crate::executor::Device;
use crate::memory::Memory;
use crate::options::Options;
use crate::schedule::{ExchangeItem, Schedule};
use kolo_graph::collective::{Collective, Movement};
use kolo_graph::cpu::Buffer;
use kolo_graph::layout::{Layout, align};
use kolo_graph::{Graph, Node, NodeId, Phase, Type, ValueId};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

mod halo;
mod rows;
mod staged;
pub use rows::Rows;
pub(crate) use staged::staged_bytes;

/// Makes memory for copies, where the exchanges are.
type Allocate<'a> = &'a dyn Fn(usize) -> Result<Memory, ExchangeError>;

#[derive(Debug)]
pub(crate) struct Exchanges {
    collectives: Arc<dyn Collectives>,
    /// The number of the first exchange.
    first: usize,
    /// Of each exchange of the schedule, one for each lane if it belongs to grains.
    list: Vec<Vec<Running>>,
    lanes: usize,
    /// They are of memory of the device.
    on_device: bool,
    /// Nanoseconds that the step waited, by axis.
    waited: Vec<(String, AtomicU64)>,
}

/// An exchange as one lane, or the step, runs it.
#[derive(Debug)]
struct Running {
    node: NodeId,
    /// Its axis, by its number among those that are waited for.
    axis: usize,
    /// Its number, counted from `first`.
    number: usize,
    /// The elements of the sums it exchanges, if that is what it does.
    sums: Option<Range<usize>>,
    /// Lanes that have closed its sums in this step.
    arrived: AtomicUsize,
    /// Started and not waited for. Whoever waits holds it, and others wait for him.
    pending: Mutex<bool>,
    staging: Staging,
}

/// Copies before and after an exchange whose tensors do not lie as it needs them, with the memory between.
#[derive(Debug, Default)]
struct Staging {
    before: Vec<Rows>,
    after: Vec<Rows>,
    memory: Vec<Memory>,
}

impl Exchanges {
    /// Prepares the exchanges of a schedule. All ranks call it together.
    pub fn new(
        graph: &Graph,
        layout: &Layout,
        schedule: &Schedule,
        device: &dyn Device,
        options: Options,
        collectives: Arc<dyn Collectives>,
    ) -> Result<Self, ExchangeError> {
        let places = options.places();
        let (mut list, mut exchanges) = (Vec::new(), Vec::new());
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        let mut waited: Vec<(String, AtomicU64)> = Vec::new();
        for item in &schedule.exchanges {
            // Ranks of an axis may differ in what they exchange along another.
            let axis = graph.node(item.node).op.collective().map_or("", |collective| collective.axis);
            let count = counts.entry(axis).or_default();
            let at = *count;
            *count += 1;
            let known = waited.iter().position(|(name, _)| name == axis).unwrap_or(waited.len());
            if known == waited.len() {
                waited.push((axis.to_string(), AtomicU64::new(0)));
            }
            let own: Vec<Option<usize>> = match item.phase {
                Phase::Grain => (0..places).map(Some).collect(),
                Phase::Before | Phase::After => vec![None],
            };
            let mut running = Vec::new();
            for lane in own {
                let places = Places { device, lane, on_device: schedule.on_device };
                let (exchange, staging) = plan(graph, at, item, places, &*collectives)?;
                let sums = item.of_sums.then(|| sums_of(graph, layout, item, &exchange));
                let (arrived, pending) = (AtomicUsize::new(0), Mutex::new(false));
                let (node, number) = (item.node, exchanges.len());
                running.push(Running { node, axis: known, number, sums, arrived, pending, staging });
                exchanges.push(exchange);
            }
            list.push(running);
        }
        let first = collectives.prepare(exchanges, places)?;
        Ok(Self { collectives, first, list, lanes: options.lanes, on_device: schedule.on_device, waited })
    }

    fn of(&self, at: usize, lane: usize) -> &Running {
        let running = &self.list[at];
        if running.len() == 1 { &running[0] } else { &running[lane] }
    }

    /// A lane has closed the sums of an exchange. The last one adds the lanes up and starts it.
    pub fn close(&self, at: usize, lane: usize, device: &dyn Device) {
        let running = self.of(at, 0);
        let Some(range) = &running.sums else { return };
        if running.arrived.fetch_add(1, Ordering::AcqRel) + 1 < self.lanes {
            return;
        }
        running.arrived.store(0, Ordering::Relaxed);
        if self.lanes > 1 {
            device.join(range.clone(), lane);
        }
        self.start(at, 0, device);
    }

    pub fn start(&self, at: usize, lane: usize, device: &dyn Device) {
        let running = self.of(at, lane);
        if !self.on_device {
            device.publish(running.node, lane);
        }
        let mut pending = kolo_base::lock(&running.pending);
        self.copy(&running.staging.before, device);
        *pending = true;
        self.collectives.start(self.first + running.number);
    }

    pub fn wait(&self, at: usize, lane: usize, device: &dyn Device) -> Result<(), ExchangeError> {
        let running = self.of(at, lane);
        let mut pending = kolo_base::lock(&running.pending);
        if !*pending {
            return Ok(());
        }
        let start = Instant::now();
        self.collectives.wait(self.first + running.number)?;
        self.waited[running.axis].1.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.copy(&running.staging.after, device);
        if !self.on_device {
            device.absorb(running.node, lane);
        }
        *pending = false;
        Ok(())
    }

    /// Makes the copies on both sides of an exchange, without the exchange.
    pub fn stage(&self, at: usize, lane: usize, device: &dyn Device) {
        let staging = &self.of(at, lane).staging;
        self.copy(&staging.before, device);
        self.copy(&staging.after, device);
    }

    /// Adds the lanes up in all sums that are exchanged, as the last lane to close them does.
    pub fn join_sums(&self, device: &dyn Device) {
        let sums = self.list.iter().flatten().filter_map(|running| running.sums.clone());
        sums.filter(|_| self.lanes > 1).for_each(|range| device.join(range, 0));
    }

    fn copy(&self, copies: &[Rows], device: &dyn Device) {
        match self.on_device {
            true => copies.iter().for_each(|rows| device.copy_on_device(rows)),
            false => copies.iter().for_each(Rows::copy),
        }
    }

    /// How devices exchange directly, if they do.
    pub fn device_transport(&self) -> Option<&'static str> {
        self.collectives.device_transport().filter(|_| self.on_device)
    }

    /// Waits for exchanges that the device was left to wait for.
    pub fn settle(&self) -> Result<(), ExchangeError> {
        self.collectives.settle()
    }

    /// Waits for all exchanges that the schedule has in this phase, of this lane if it is the grains'.
    pub fn wait_phase(
        &self,
        schedule: &Schedule,
        phase: Phase,
        lane: usize,
        device: &dyn Device,
    ) -> Result<(), ExchangeError> {
        let mut own = schedule.exchanges.iter().enumerate().filter(|(_, exchange)| exchange.phase == phase);
        own.try_for_each(|(at, _)| self.wait(at, lane, device))
    }

    /// Waits for all that were started.
    pub fn wait_all(&self, device: &dyn Device) -> Result<(), ExchangeError> {
        let lanes = |running: &Vec<Running>| 0..running.len();
        let mut all = self.list.iter().enumerate().flat_map(|(at, running)| lanes(running).map(move |lane| (at, lane)));
        all.try_for_each(|(at, lane)| self.wait(at, lane, device))?;
        self.settle()
    }

    /// Bytes that this rank has sent, by axis.
    pub fn sent_bytes(&self) -> BTreeMap<String, u64> {
        self.collectives.sent_bytes()
    }

    /// Nanoseconds that steps have waited for exchanges since this was last asked, by axis.
    pub fn take_waited(&self) -> BTreeMap<String, u64> {
        self.waited.iter().map(|(axis, waited)| (axis.clone(), waited.swap(0, Ordering::Relaxed))).collect()
    }
}

/// What is in flight still uses the session's memory. After a fault nothing more comes.
impl Drop for Exchanges {
    fn drop(&mut self) {
        for running in self.list.iter().flatten() {
            if *kolo_base::lock(&running.pending) && self.collectives.wait(self.first + running.number).is_err() {
                return;
            }
        }
        // Whoever has something to say about it has said it.
        let _ = self.settle();
    }
}

/// The elements of the sums that an exchange works on in place.
fn sums_of(graph: &Graph, layout: &Layout, item: &ExchangeItem, exchange: &Exchange) -> Range<usize> {
    let places = graph.node(item.node).inputs.iter().filter_map(|id| layout.places[id.0 as usize]);
    let start = places.map(|place| place.offset + place.within).min().expect("a sum has a place") / 4;
    start..start + exchange.elements
}

/// Where the tensors of exchanges are, as one lane or the step sees them.
#[derive(Clone, Copy)]
struct Places<'a> {
    device: &'a dyn Device,
    lane: Option<usize>,
    on_device: bool,
}

impl Places<'_> {
    fn buffer(&self, id: ValueId) -> Result<Buffer, ExchangeError> {
        let lane = self.lane.unwrap_or(0);
        if !self.on_device {
            return Ok(self.device.buffer(id, lane));
        }
        let missing = || format!("value {} is exchanged on the device and has no place there", id.0);
        Ok(self.device.device_buffer(id, lane).ok_or_else(missing)?)
    }

    fn allocate(&self, bytes: usize) -> Result<Memory, ExchangeError> {
        if self.on_device { self.device.device_memory(bytes) } else { Ok(Memory::try_new(bytes)?) }
    }
}

/// An exchange in the making: what it reads and writes, and the copies it needs.
struct Draft {
    exchange: Exchange,
    staging: Staging,
    ranks: usize,
    /// Its first input, or its output if it reads nothing.
    input: Buffer,
    outputs: Vec<Buffer>,
}

fn plan(
    graph: &Graph,
    at: usize,
    item: &ExchangeItem,
    places: Places<'_>,
    collectives: &dyn Collectives,
) -> Result<(Exchange, Staging), ExchangeError> {
    let node = graph.node(item.node);
    let collective = node.op.collective().expect("the schedule lists collectives");
    let ranks = collectives.size(collective.axis);
    if let Some(other) = collective.ranks.filter(|other| *other != ranks) {
        let op = node.op.signature();
        return Err(format!("{op} is for {other} ranks, but the axis `{}` has {ranks}\n  hint: build the graph for the mesh that runs it", collective.axis).into());
    }
    let outputs = node.outputs.iter().map(|id| places.buffer(*id)).collect::<Result<Vec<_>, _>>()?;
    let input = node.inputs.first().map_or_else(|| Ok(outputs[0].clone()), |id| places.buffer(*id))?;
    let exchange = Exchange {
        kind: ExchangeKind::Barrier,
        name: name(node, &collective, at),
        axis: collective.axis.into(),
        lane: places.lane,
        dtype: outputs[0].ty.dtype,
        input: input.data,
        output: outputs[0].data,
        elements: 0,
        parts: Vec::new(),
        of_gradients: item.of_gradients,
    };
    let mut draft = Draft { exchange, staging: Staging::default(), ranks, input, outputs };
    let memory: Allocate<'_> = &|bytes| places.allocate(bytes);
    match collective.movement {
        Movement::SumBucket => draft.bucket(ExchangeKind::AllReduce, None, memory)?,
        Movement::ScatterBucket { owners } => draft.bucket(ExchangeKind::ReduceScatter, Some(owners), memory)?,
        Movement::GatherBucket { owners } => draft.bucket(ExchangeKind::AllGather, Some(owners), memory)?,
        movement => draft.transfer(movement, memory)?,
    }
    assert!(!item.of_sums || draft.staging.memory.is_empty(), "the sums of an exchange lie side by side");
    Ok((draft.exchange, draft.staging))
}

/// What messages and timelines call it, and what ranks compare.
fn name(node: &Node, collective: &Collective<'_>, at: usize) -> String {
    match collective.movement {
        Movement::Send { message, .. } | Movement::Receive { message, .. } => message.into(),
        _ if node.scope.is_empty() => format!("{} {at}", node.op.name()),
        _ => node.scope.to_string(),
    }
}

impl Draft {
    /// Many tensors, in place.
    fn bucket(
        &mut self,
        kind: ExchangeKind,
        owners: Option<&[usize]>,
        memory: Allocate<'_>,
    ) -> Result<(), ExchangeError> {
        self.exchange.kind = kind;
        let offsets = self.staging.bucket(&self.outputs, &mut self.exchange, memory)?;
        if let Some(owners) = owners {
            self.exchange.parts = owned_parts(owners, &self.outputs, &offsets, self.ranks);
        }
        Ok(())
    }

    /// One tensor to another one.
    fn transfer(&mut self, movement: Movement<'_>, memory: Allocate<'_>) -> Result<(), ExchangeError> {
        let Self { exchange, staging, ranks, input, outputs } = self;
        let (output, ranks) = (&outputs[0], *ranks);
        exchange.elements = input.ty.elements();
        match movement {
            Movement::Sum => {
                exchange.kind = ExchangeKind::AllReduce;
                staging.before.push(Rows::all(input, output));
                exchange.input = exchange.output;
            }
            Movement::Gather { dim } => {
                exchange.kind = ExchangeKind::AllGather;
                exchange.cut(output.ty.elements(), ranks);
                staging.unpack(output, dim, ranks, exchange, memory)?;
            }
            Movement::Join { dim, sizes } => {
                exchange.kind = ExchangeKind::AllGather;
                exchange.join(&output.ty, dim, sizes);
                staging.unpack_sizes(output, dim, sizes, exchange, memory)?;
            }
            Movement::Scatter { dim } => {
                exchange.kind = ExchangeKind::ReduceScatter;
                exchange.cut(input.ty.elements(), ranks);
                staging.pack(input, dim, ranks, exchange, memory)?;
            }
            Movement::Share { sizes } => {
                exchange.kind = ExchangeKind::ReduceScatter;
                exchange.join(&input.ty, 0, sizes);
            }
            Movement::AllToAll { split, join } => {
                exchange.kind = ExchangeKind::AllToAll;
                exchange.cut(input.ty.elements(), ranks);
                staging.pack(input, split, ranks, exchange, memory)?;
                staging.unpack(output, join, ranks, exchange, memory)?;
            }
            Movement::Shift { by } => exchange.kind = ExchangeKind::Shift(by),
            Movement::Halo(halo) => {
                exchange.kind = ExchangeKind::EachToEach;
                staging.halo(halo, input, output, exchange, memory)?;
            }
            Movement::Send { to, .. } => {
                exchange.kind = ExchangeKind::Send(to);
                // The copy is what travels.
                staging.before.push(Rows::all(input, output));
                exchange.input = exchange.output;
            }
            Movement::Receive { from, .. } => {
                exchange.kind = ExchangeKind::Receive(from);
                exchange.elements = output.ty.elements();
            }
            _ => exchange.elements = 0,
        }
        Ok(())
    }
}

impl Exchange {
    /// Equal parts of this many elements.
    fn cut(&mut self, elements: usize, ranks: usize) {
        self.elements = elements;
        self.parts = (0..ranks).map(|rank| (rank * (elements / ranks), elements / ranks)).collect();
    }
}

impl Exchange {
    /// Parts of these sizes along a dim.
    fn join(&mut self, whole: &Type, dim: usize, sizes: &[usize]) {
        let others = whole.elements() / whole.shape[dim].max(1);
        self.elements = whole.elements();
        let mut at = 0;
        let part = |size: &usize| {
            let part = (at, size * others);
            at += part.1;
            part
        };
        self.parts = sizes.iter().map(part).collect();
    }
}

impl Staging {
    /// Works on these tensors in place if they lie side by side in order, otherwise on a copy of them; each one's offset in
    /// bytes.
    fn bucket(
        &mut self,
        buffers: &[Buffer],
        exchange: &mut Exchange,
        memory: Allocate<'_>,
    ) -> Result<Vec<usize>, ExchangeError> {
        let mut offsets = Vec::with_capacity(buffers.len());
        let mut bytes = 0;
        for buffer in buffers {
            offsets.push(bytes);
            bytes += align(buffer.ty.bytes());
        }
        let mut data = buffers[0].data;
        let together = buffers.iter().zip(&offsets).all(|(buffer, at)| buffer.data as usize == data as usize + at);
        if !together {
            // Memory of this rank alone: whether tensors lie side by side may differ between ranks.
            let memory = memory(bytes)?;
            data = memory.at(0);
            for (buffer, offset) in buffers.iter().zip(&offsets) {
                let (place, bytes) = (memory.at(*offset), buffer.ty.bytes());
                let rows = |from, to| Rows { from, to, rows: 1, bytes, from_stride: 0, to_stride: 0 };
                self.before.push(rows(buffer.data, place));
                self.after.push(rows(place, buffer.data));
            }
            self.memory.push(memory);
        }
        (exchange.input, exchange.output, exchange.elements) = (data, data, bytes / 4);
        Ok(offsets)
    }

    /// Each rank's part of a tensor along a dim: (its rows in the tensor, its place among the parts).
    fn parts(buffer: &Buffer, dim: usize, ranks: usize) -> impl Iterator<Item = (usize, usize)> {
        let bytes = buffer.ty.bytes();
        let outer: usize = buffer.ty.shape[..dim].iter().product();
        let row = bytes.checked_div(outer).unwrap_or(0) / ranks;
        (0..ranks).map(move |rank| (rank * row, rank * (bytes / ranks)))
    }

    /// Rows of a tensor's part along a dim, and the bytes of each.
    fn rows(buffer: &Buffer, dim: usize, ranks: usize) -> (usize, usize) {
        let outer: usize = buffer.ty.shape[..dim].iter().product();
        (outer, buffer.ty.bytes().checked_div(outer).unwrap_or(0) / ranks)
    }

    /// Lays the parts of the input one behind the other, if they do not lie so already.
    fn pack(
        &mut self,
        buffer: &Buffer,
        dim: usize,
        ranks: usize,
        exchange: &mut Exchange,
        memory: Allocate<'_>,
    ) -> Result<(), ExchangeError> {
        let (rows, bytes) = Self::rows(buffer, dim, ranks);
        if rows <= 1 || ranks == 1 {
            return Ok(());
        }
        let memory = memory(buffer.ty.bytes())?;
        for (inside, among) in Self::parts(buffer, dim, ranks) {
            let from = buffer.data.wrapping_add(inside);
            let (from_stride, to_stride) = (bytes * ranks, bytes);
            self.before.push(Rows { from, to: memory.at(among), rows, bytes, from_stride, to_stride });
        }
        exchange.input = memory.at(0);
        self.memory.push(memory);
        Ok(())
    }

    /// Takes the output from parts one behind the other, if it does not lie so itself.
    fn unpack(
        &mut self,
        buffer: &Buffer,
        dim: usize,
        ranks: usize,
        exchange: &mut Exchange,
        memory: Allocate<'_>,
    ) -> Result<(), ExchangeError> {
        let (rows, bytes) = Self::rows(buffer, dim, ranks);
        if rows <= 1 || ranks == 1 {
            return Ok(());
        }
        let memory = memory(buffer.ty.bytes())?;
        for (inside, among) in Self::parts(buffer, dim, ranks) {
            let to = buffer.data.wrapping_add(inside);
            let (from_stride, to_stride) = (bytes, bytes * ranks);
            self.after.push(Rows { from: memory.at(among), to, rows, bytes, from_stride, to_stride });
        }
        exchange.output = memory.at(0);
        self.memory.push(memory);
        Ok(())
    }
}

impl Staging {
    /// As [`Staging::unpack`], from parts of unequal sizes.
    fn unpack_sizes(
        &mut self,
        buffer: &Buffer,
        dim: usize,
        sizes: &[usize],
        exchange: &mut Exchange,
        memory: Allocate<'_>,
    ) -> Result<(), ExchangeError> {
        let rows: usize = buffer.ty.shape[..dim].iter().product();
        if rows <= 1 || sizes.len() == 1 {
            return Ok(());
        }
        let memory = memory(buffer.ty.bytes())?;
        let to_stride = buffer.ty.bytes() / rows;
        let (mut inside, mut among) = (0, 0);
        for size in sizes {
            let bytes = to_stride / buffer.ty.shape[dim] * size;
            let to = buffer.data.wrapping_add(inside);
            self.after.push(Rows { from: memory.at(among), to, rows, bytes, from_stride: bytes, to_stride });
            inside += bytes;
            among += bytes * rows;
        }
        exchange.output = memory.at(0);
        self.memory.push(memory);
        Ok(())
    }
}

/// Each rank's run of elements; the tensors of one owner lie side by side.
fn owned_parts(owners: &[usize], buffers: &[Buffer], offsets: &[usize], size: usize) -> Vec<(usize, usize)> {
    let mut parts = vec![(0, 0); size];
    for ((owner, buffer), offset) in owners.iter().zip(buffers).zip(offsets) {
        let (start, count) = &mut parts[*owner];
        if *count == 0 {
            *start = offset / 4;
        }
        assert_eq!(*start + *count, offset / 4, "the tensors of one owner lie side by side");
        *count += align(buffer.ty.bytes()) / 4;
    }
    parts
}
