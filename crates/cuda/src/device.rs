//! A graph compiled for a GPU.
//!
//! Every call of the schedule starts work on one stream and returns. What fails is kept, nothing runs after it, and the session is
//! told at the end of its phase ([`Device::check`]).

use crate::captured::Recordings;
use crate::commands::{Command, LaunchCall, Operands};
use crate::driver::DevicePointer;
use crate::error::CudaError;
use crate::executor::{Cuda, has_own_scratch, scratch_bytes};
use crate::fetches::{FetchCall, registered};
use crate::gpu::{Event, Gpu};
use crate::host_part::{Held, HostPart};
use crate::host_places::{self, HostPlaces};
use crate::host_work::{HostCall, HostWork};
use crate::inputs::Inputs;
use crate::lowering::Lowering;
use crate::memory::{self, Registered};
use crate::memory_check;
use crate::mirror::StoreMirror;
use crate::places::Arenas;
use kolo_base::lock;
use kolo_exec::schedule::{Act, Item, Schedule};
use kolo_exec::store::Mirrored;
use kolo_exec::{Device, ExchangeError, Memory, Program, Rows, Store};
use kolo_graph::cpu::Buffer;
use kolo_graph::cuda::{CudaCalls, CudaSource, CudaTarget, Launch, SCRATCH_ALIGNMENT};
use kolo_graph::fetch::Fetch;
use kolo_graph::layout::shown_by;
use kolo_graph::{DType, NodeId, Phase, ValueId};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Threads of a block, and blocks at most, that add a term to a sum.
const SUM_BLOCK: usize = 256;
const SUM_BLOCKS_MAX: usize = 1024;

/// What one item does.
#[derive(Debug)]
enum Work {
    Commands(Vec<Command>),
    /// The host does it.
    Host(Arc<HostCall>),
    /// Adds a term to the sum over grains that starts at this place.
    Sum {
        add: LaunchCall,
        term: DevicePointer,
        sum: DevicePointer,
        elements: usize,
    },
}

impl Work {
    fn host(&self) -> Option<&Arc<HostCall>> {
        if let Work::Host(call) = self { Some(call) } else { None }
    }
}

#[derive(Debug)]
pub(crate) struct CudaDevice {
    gpu: Arc<Gpu>,
    program: Program,
    schedule: Arc<Schedule>,
    before: Vec<Work>,
    /// By lane.
    grain: Vec<Vec<Work>>,
    after: Vec<Work>,
    /// Updates that could not be done in place: from, to, bytes.
    copies: Vec<(DevicePointer, DevicePointer, usize)>,
    step_inputs: Inputs,
    grain_inputs: Vec<Inputs>,
    host: HostPlaces,
    /// Where values are that are exchanged in memory of the device, by lane.
    exchanged: BTreeMap<(ValueId, usize), DevicePointer>,
    /// What the host computes.
    host_work: Option<HostWork>,
    outputs_ready: Event,
    /// The update has run since the grains did.
    ended: AtomicBool,
    /// The host may have changed the sums.
    sums_lent: AtomicBool,
    /// Before the memory that recorded calls use.
    recordings: Recordings,
    failed: Mutex<Option<CudaError>>,
    mirrored: Arc<Mirrored>,
    arenas: Arenas,
    poison: bool,
    /// The weights in the host's memory, pinned if any is fetched.
    _registered: Option<Registered>,
    /// The host's memory of the store.
    _store: [Arc<Memory>; 2],
}

impl CudaDevice {
    pub fn new(
        executor: Cuda,
        gpu: &Arc<Gpu>,
        program: &Program,
        schedule: &Arc<Schedule>,
        store: &Store,
        sums: Option<Memory>,
    ) -> Result<Self, CudaError> {
        let target = CudaTarget { tf32: executor.tf32, ..gpu.info.target.clone() };
        let (graph, layout) = (&program.graph, &program.layout);
        let host_part = HostPart::of(graph, layout, executor.offload);
        let held = Held::of(graph, layout, &host_part);
        let lowering = Lowering::new(graph, &target, Some(gpu)).beside(&host_part).placed(layout);
        let plan = ItemCalls::new(&lowering, schedule, &host_part)?;
        memory_check::check(gpu, program, StoreMirror::missing_bytes(store, &held))?;
        let (mirror, mirrored) = StoreMirror::of(gpu, store, &held)?;
        let scratch = scratch_bytes(&lowering, layout);
        let arenas = Arenas::new(gpu, program, scratch, mirror)?;
        let host = HostPlaces::new(gpu, program, schedule, store, &arenas, sums)?;
        let exchanged = host_places::addresses(program, schedule, store, &arenas);
        gpu.kernels.prepare(gpu, plan.sources())?;
        let alone = schedule.exchanges.is_empty();
        let host_work = HostWork::new(gpu, program, &host_part, store, &arenas, alone)?;
        let (host_works, tf32) = (host_work.as_ref(), executor.tf32);
        let resolver =
            Resolver { gpu, program, store, lowering: &lowering, arenas: &arenas, host_work: host_works, tf32 };
        let before = resolver.phase(&schedule.before, &plan.before, 0)?;
        let places = 0..program.options.places();
        let grain = places.map(|lane| resolver.phase(&schedule.grain, &plan.grain, lane)).collect::<Result<_, _>>()?;
        let after = resolver.phase(&schedule.after, &plan.after, 0)?;
        let copies = resolver.copies()?;
        let grain_inputs = arenas.grain_input.iter().map(|memory| Inputs::new(gpu, program, memory, false));
        let grain_inputs = grain_inputs.collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            program: program.clone(),
            schedule: Arc::clone(schedule),
            before,
            grain,
            after,
            copies,
            step_inputs: Inputs::new(gpu, program, &arenas.step_input, true)?,
            grain_inputs,
            host,
            exchanged,
            host_work,
            outputs_ready: Event::new(gpu)?,
            ended: AtomicBool::new(false),
            sums_lent: AtomicBool::new(false),
            recordings: Recordings::default(),
            failed: Mutex::new(None),
            mirrored,
            arenas,
            poison: executor.poison,
            _registered: registered(gpu, program, store),
            _store: store.memories().map(Arc::clone),
        })
    }

    /// Does something, unless something failed before.
    fn attempt(&self, action: impl FnOnce() -> Result<(), CudaError>) {
        if lock(&self.failed).is_some() {
            return;
        }
        if let Err(error) = action() {
            lock(&self.failed).get_or_insert(error);
        }
    }

    fn work(&self, phase: Phase, item: usize, lane: usize) -> &Work {
        match phase {
            Phase::Before => &self.before[item],
            Phase::Grain => &self.grain[lane][item],
            Phase::After => &self.after[item],
        }
    }

    /// A binary counter of partial sums, as on every device.
    fn start(&self, work: &Work, grain: usize) -> Result<(), CudaError> {
        match work {
            Work::Commands(commands) => commands.iter().try_for_each(|command| command.start(&self.gpu)),
            Work::Host(call) => self.run_on_host(&[call]),
            Work::Sum { add, term, sum, elements } => {
                let (depth, closes) = (u64::from(grain.count_ones()), u64::from(grain.trailing_ones()));
                let level_elements = (self.program.layout.sum_bytes / 4) as u64;
                add.start_with(&self.gpu, &[*term, *sum, level_elements, depth, closes, *elements as u64])
            }
        }
    }

    fn run_on_host(&self, calls: &[&Arc<HostCall>]) -> Result<(), CudaError> {
        let work = self.host_work.as_ref();
        work.map_or(Ok(()), |work| work.run(calls, self.arenas.mirror.version()))
    }

    /// All items of a phase: what the host does in between, and the rest as recordings.
    fn run_all(&self, all: &[Work], phase: Phase, lane: usize, grain: usize) -> Result<(), CudaError> {
        let mut at = 0;
        while at < all.len() {
            let calls: Vec<&Arc<HostCall>> = all[at..].iter().map_while(Work::host).collect();
            let count = all[at..].iter().take_while(|work| work.host().is_none()).count();
            if calls.is_empty() {
                let key = (phase, lane, grain.count_ones(), grain.trailing_ones(), at);
                let part = &all[at..at + count];
                self.recordings.run(&self.gpu, key, || part.iter().try_for_each(|work| self.start(work, grain)))?;
            } else {
                self.run_on_host(&calls)?;
            }
            at += calls.len().max(count);
        }
        Ok(())
    }

    /// Brings changed sums back to the device.
    fn take_back_sums(&self) -> Result<(), CudaError> {
        match &self.host.sums {
            Some(sums) if self.sums_lent.swap(false, Ordering::Relaxed) => {
                memory::upload(&self.gpu, sums.at(0), self.arenas.sums.at(0), self.program.layout.sum_bytes)
            }
            _ => Ok(()),
        }
    }

    /// Whether all of a value's elements are finite.
    fn finite(&self, id: ValueId) -> Result<bool, CudaError> {
        let ty = self.program.graph.ty(id);
        let Some(place) = self.program.layout.places[id.0 as usize].filter(|_| ty.dtype.is_float()) else {
            return Ok(true);
        };
        let from = self.arenas.placed(&place, 0)?;
        let mut bytes = vec![0u8; ty.bytes()];
        memory::download(&self.gpu, from, bytes.as_mut_ptr(), bytes.len())?;
        self.gpu.synchronize()?;
        Ok(match ty.dtype {
            DType::F32 => bytes.as_chunks().0.iter().all(|bytes| f32::from_le_bytes(*bytes).is_finite()),
            // The exponent's bits, all of them ones, are an infinity or NaN.
            DType::BF16 => bytes.as_chunks().0.iter().all(|bytes| u16::from_le_bytes(*bytes) & 0x7f80 != 0x7f80),
            _ => bytes.as_chunks().0.iter().all(|bytes| u16::from_le_bytes(*bytes) & 0x7c00 != 0x7c00),
        })
    }
}

impl Device for CudaDevice {
    fn inputs(&self, lane: Option<usize>) -> &[(String, Buffer)] {
        let inputs = lane.map_or(&self.step_inputs, |lane| &self.grain_inputs[lane]);
        inputs.buffers().unwrap_or_else(|error| {
            lock(&self.failed).get_or_insert(error);
            // Nothing reads them any more.
            inputs.unread()
        })
    }

    fn buffer(&self, id: ValueId, lane: usize) -> Buffer {
        let place = self.host.get(id, lane).expect("named results and exchanged values have a place on the host");
        place.host.clone()
    }

    fn begin(&self) {
        self.ended.store(false, Ordering::Relaxed);
        self.attempt(|| {
            if self.poison {
                self.arenas.poison()?;
                self.arenas.mirror.changed();
            }
            self.mirrored.read_mirror(|| self.arenas.mirror.upload())?;
            self.step_inputs.upload(&self.gpu)
        });
    }

    fn begin_grain(&self, lane: usize) {
        self.attempt(|| self.grain_inputs[lane].upload(&self.gpu));
    }

    fn mirrors_store(&self) -> bool {
        true
    }

    fn run_lanes(&self, body: &(dyn Fn(usize) + Sync)) {
        body(0);
    }

    fn run(&self, phase: Phase, item: usize, lane: usize, grain: usize) {
        self.attempt(|| {
            if phase == Phase::After {
                self.take_back_sums()?;
            }
            self.start(self.work(phase, item, lane), grain)
        });
    }

    fn wait_item(&self) {
        self.attempt(|| self.gpu.synchronize());
    }

    fn run_phase(&self, phase: Phase, lane: usize, grain: usize) -> bool {
        self.attempt(|| {
            let all = match phase {
                Phase::Before => &self.before,
                Phase::Grain => &self.grain[lane],
                Phase::After => &self.after,
            };
            let (lane, grain) = if phase == Phase::Grain { (lane, grain) } else { (0, 0) };
            if phase == Phase::After {
                self.take_back_sums()?;
            }
            self.run_all(all, phase, lane, grain)
        });
        true
    }

    fn join(&self, _: Range<usize>, _: usize) {}

    fn join_all(&self) {}

    fn end(&self) {
        self.attempt(|| {
            self.copies.iter().try_for_each(|(from, to, bytes)| memory::copy(&self.gpu, *from, *to, *bytes))
        });
        if !self.program.graph.updates.is_empty() {
            self.mirrored.mirror_changed();
            let version = self.arenas.mirror.changed();
            self.host_work.iter().for_each(|work| work.weights_changed(version));
        }
        self.ended.store(true, Ordering::Relaxed);
    }

    fn show_outputs(&self) {
        self.attempt(|| {
            self.host.download_outputs(&self.gpu, self.ended.load(Ordering::Relaxed))?;
            self.outputs_ready.record()
        });
    }

    fn wait_outputs(&self) {
        self.attempt(|| self.outputs_ready.wait());
    }

    fn publish(&self, exchange: NodeId, lane: usize) {
        self.attempt(|| self.host.publish(&self.gpu, exchange, lane));
    }

    fn absorb(&self, exchange: NodeId, lane: usize) {
        self.attempt(|| self.host.absorb(&self.gpu, exchange, lane));
    }

    fn device_buffer(&self, id: ValueId, lane: usize) -> Option<Buffer> {
        let data = self.exchanged.get(&(id, lane)).copied()? as *mut u8;
        Some(Buffer { data, ty: self.program.graph.ty(id).clone() })
    }

    fn device_memory(&self, bytes: usize) -> Result<Memory, ExchangeError> {
        Ok(memory::exchanged(&self.gpu, bytes)?)
    }

    fn copy_on_device(&self, rows: &Rows) {
        self.attempt(|| memory::copy_rows(&self.gpu, rows));
    }

    fn check(&self) -> Result<(), ExchangeError> {
        let failed = lock(&self.failed).clone().or_else(|| self.arenas.mirror.failure());
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    fn is_finite(&self, phase: Phase, item: usize) -> bool {
        let node = self.program.graph.node(self.schedule.items(phase)[item].node);
        // Whoever reads a weight that comes waits for it.
        if node.op.is::<Fetch>() {
            return true;
        }
        let mut finite = true;
        self.attempt(|| {
            for id in &node.outputs {
                finite &= self.finite(*id)?;
            }
            Ok(())
        });
        finite
    }

    fn sums_mut(&mut self) -> &mut [f32] {
        let bytes = self.program.layout.sum_bytes;
        let sums = self.host.sums.get_or_insert_with(|| Memory::new(bytes));
        let (data, gpu, from) = (sums.at(0), &self.gpu, self.arenas.sums.at(0));
        if let Err(error) = memory::download(gpu, from, data, bytes).and_then(|()| gpu.synchronize()) {
            lock(&self.failed).get_or_insert(error);
        }
        self.sums_lent.store(true, Ordering::Relaxed);
        // SAFETY: `&mut self` is exclusive, and the memory holds that many bytes.
        unsafe { std::slice::from_raw_parts_mut(data.cast(), bytes / 4) }
    }
}

/// The calls of every item, before anything has an address.
struct ItemCalls {
    before: Vec<Option<CudaCalls>>,
    grain: Vec<Option<CudaCalls>>,
    after: Vec<Option<CudaCalls>>,
    sum: CudaSource,
}

impl ItemCalls {
    fn new(lowering: &Lowering<'_>, schedule: &Schedule, host: &HostPart) -> Result<Self, CudaError> {
        let calls = |item: &Item| match item.act {
            _ if host.has(item.node) => Ok(None),
            Act::Kernel => lowering.calls(item.node).map(Some),
            Act::Sum { .. } | Act::Start(_) => Ok(None),
        };
        let phase = |items: &[Item]| items.iter().map(calls).collect::<Result<Vec<_>, _>>();
        Ok(Self {
            before: phase(&schedule.before)?,
            grain: phase(&schedule.grain)?,
            after: phase(&schedule.after)?,
            sum: sum_source(),
        })
    }

    fn sources(&self) -> impl Iterator<Item = &CudaSource> {
        let all = [&self.before, &self.grain, &self.after].into_iter().flatten().flatten();
        all.flat_map(CudaCalls::sources).chain([&self.sum])
    }
}

/// The kernel that adds a term to a sum over grains.
pub(crate) fn sum_source() -> CudaSource {
    CudaSource::new(include_str!("sums.cu"))
}

/// Gives calls their addresses.
struct Resolver<'a> {
    gpu: &'a Arc<Gpu>,
    program: &'a Program,
    store: &'a Store,
    lowering: &'a Lowering<'a>,
    arenas: &'a Arenas,
    host_work: Option<&'a HostWork>,
    tf32: bool,
}

impl Resolver<'_> {
    fn address(&self, id: ValueId, lane: usize) -> Result<DevicePointer, CudaError> {
        let missing = || CudaError::Other(format!("value {} has no place", id.0));
        self.arenas.address(self.program, self.store, id, lane).ok_or_else(missing)
    }

    /// Where a node finds so many bytes of scratch.
    fn scratch(&self, id: NodeId, bytes: usize, lane: usize) -> Result<DevicePointer, CudaError> {
        let layout = &self.program.layout;
        match layout.scratch.get(&id) {
            Some(own) if has_own_scratch(layout, id, bytes) => {
                Ok(self.arenas.placed(&own.place, lane)?.next_multiple_of(SCRATCH_ALIGNMENT as DevicePointer))
            }
            _ => Ok(self.arenas.scratch.at(0)),
        }
    }

    /// From where to where how many bytes are copied after the grains.
    fn copies(&self) -> Result<Vec<(DevicePointer, DevicePointer, usize)>, CudaError> {
        let bytes = |id: ValueId| self.program.graph.ty(id).bytes();
        let copies = self.program.layout.copies.iter();
        copies.map(|(from, to)| Ok((self.address(*from, 0)?, self.address(*to, 0)?, bytes(*to)))).collect()
    }

    fn phase(&self, items: &[Item], calls: &[Option<CudaCalls>], lane: usize) -> Result<Vec<Work>, CudaError> {
        let (mut works, mut on_way): (Vec<Work>, HashMap<ValueId, Arc<FetchCall>>) = Default::default();
        for (item, calls) in items.iter().zip(calls) {
            let node = self.program.graph.node(item.node);
            // The first reader waits, and those behind it are behind it.
            let read = self.lowering.inputs(item.node).into_iter().map(|id| shown_by(&self.program.graph, id));
            let awaited: Vec<Command> = read.filter_map(|id| on_way.remove(&id)).map(Command::Await).collect();
            let mut work = if node.op.is::<Fetch>() {
                let call = Arc::new(FetchCall::new(self.gpu, self.program, self.store, self.arenas, node, lane)?);
                on_way.insert(node.outputs[0], Arc::clone(&call));
                Work::Commands(vec![Command::Fetch(call)])
            } else {
                self.work(item, calls.as_ref(), lane)?
            };
            if let Work::Commands(commands) = &mut work {
                commands.splice(0..0, awaited);
            }
            works.push(work);
        }
        Ok(works)
    }

    fn work(&self, item: &Item, calls: Option<&CudaCalls>, lane: usize) -> Result<Work, CudaError> {
        let node = self.program.graph.node(item.node);
        if let Some(call) = self.host_work.and_then(|work| work.call(item.node)) {
            return Ok(Work::Host(Arc::clone(call)));
        }
        if let Act::Sum { offset, elements } = item.act {
            let blocks = elements.div_ceil(SUM_BLOCK).min(SUM_BLOCKS_MAX);
            let launch = Launch::new(sum_source(), "add_term", [blocks, 1, 1], SUM_BLOCK, []);
            let add = Command::launch_call(self.gpu, &launch)?;
            let (term, sum) = (self.address(node.inputs[0], lane)?, self.arenas.sums.at(offset * 4));
            return Ok(Work::Sum { add, term, sum, elements });
        }
        let Some(calls) = calls else { return Ok(Work::Commands(Vec::new())) };
        let addresses = |ids: &[ValueId]| ids.iter().map(|id| self.address(*id, lane)).collect::<Result<Vec<_>, _>>();
        let operands = Operands {
            inputs: addresses(&self.lowering.inputs(item.node))?,
            outputs: addresses(&node.outputs)?,
            scratch: self.scratch(item.node, calls.scratch_bytes, lane)?,
        };
        let mut commands = Vec::with_capacity(calls.calls.len());
        for call in &calls.calls {
            let made = Command::new(self.gpu, call, &operands, self.tf32).map_err(|error| {
                let layer =
                    if node.scope.is_empty() { "the model's top".into() } else { format!("layer `{}`", node.scope) };
                CudaError::Other(format!("op `{}` in {layer}: {error}", node.op.name()))
            })?;
            commands.extend(made);
        }
        Ok(Work::Commands(commands))
    }
}
