//! GPUs of several ranks that exchange over NCCL: the executor's side of [`kolo_exec::device_links`].
//!
//! A group has a communicator and a stream of its own. An exchange waits, on the GPU, for what was computed before it, and what reads its
//! result waits for it; the host waits for neither. No call of NCCL blocks: while one is under way we look whether the job goes on, and give
//! the communicator up if not, which also ends what it runs on the GPU.

use crate::commands::{Command, LaunchCall};
use crate::driver::{DevicePointer, Handle};
use crate::error::CudaError;
use crate::gpu::{Event, Gpu, Stream};
use crate::memory::DeviceMemory;
use crate::nccl::{Config, IN_PROGRESS, Nccl, SUCCESS, SUM, UNIQUE_ID_BYTES, UniqueId, data_type};
use crate::nccl_plan::{ExchangePlan, Message, Spot, Step};
use kolo_base::lock;
use kolo_exec::{DeviceGroup, DeviceLinks, Exchange, ExchangeError, GroupPlace, Look};
use kolo_graph::DType;
use kolo_graph::cuda::{CudaSource, Launch};
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Scratch memory of a group, at most, for parts of sums.
pub(crate) const SCRATCH_BYTES_MAX: usize = 64 << 20;
/// Threads of a block, and blocks at most, that add the parts of ranks.
const ADD_BLOCK: usize = 256;
const ADD_BLOCKS_MAX: usize = 512;
/// How long a wait only yields before it sleeps, and how long it sleeps.
const YIELD_FOR: Duration = Duration::from_millis(2);
const PAUSE: Duration = Duration::from_micros(200);

/// Makes groups of GPUs over NCCL.
#[derive(Debug)]
pub(crate) struct NcclLinks {
    pub gpu: Arc<Gpu>,
    pub nccl: &'static Nccl,
    /// Of each group.
    pub scratch_bytes_max: usize,
}

impl NcclLinks {
    pub fn new(gpu: &Arc<Gpu>, nccl: &'static Nccl) -> Self {
        Self { gpu: Arc::clone(gpu), nccl, scratch_bytes_max: SCRATCH_BYTES_MAX }
    }
}

impl DeviceLinks for NcclLinks {
    fn transport(&self) -> &'static str {
        "nccl"
    }

    fn identity(&self) -> Result<Vec<u8>, ExchangeError> {
        Ok(self.gpu.uuid()?.to_vec())
    }

    fn invite(&self) -> Result<Vec<u8>, ExchangeError> {
        self.gpu.enter()?;
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: the place of an id.
        let code = unsafe { (self.nccl.calls.unique_id)(&mut id) };
        self.nccl.check("ncclGetUniqueId", &self.gpu.info.name, code, std::ptr::null_mut())?;
        Ok(id.0.to_vec())
    }

    fn join(&self, invitation: &[u8], place: GroupPlace, look: Look) -> Result<Box<dyn DeviceGroup>, ExchangeError> {
        Ok(Box::new(NcclGroup::join(self, invitation, place, look)?))
    }
}

/// A communicator, until it is given up.
#[derive(Debug)]
struct Comm(Option<Handle>);

// SAFETY: a handle that is used under a lock, one call at a time.
unsafe impl Send for Comm {}

pub(crate) struct NcclGroup {
    gpu: Arc<Gpu>,
    nccl: &'static Nccl,
    place: GroupPlace,
    look: Look,
    stream: Stream,
    comm: Mutex<Comm>,
    state: Mutex<GroupState>,
    scratch_bytes_max: usize,
}

impl std::fmt::Debug for NcclGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NcclGroup of {:?} on {}", self.place, self.gpu.info.name)
    }
}

#[derive(Debug, Default)]
struct GroupState {
    prepared: Vec<Arc<Prepared>>,
    scratch: Option<Arc<DeviceMemory>>,
    adders: Vec<(DType, Arc<LaunchCall>)>,
}

#[derive(Debug)]
struct Prepared {
    name: String,
    plan: ExchangePlan,
    adder: Option<Arc<LaunchCall>>,
    /// What it reads is computed.
    ready: Event,
    done: Event,
}

/// What went wrong on the GPU, in which exchange; other errors know what they are about.
fn named(name: &str, error: ExchangeError) -> ExchangeError {
    if error.is::<CudaError>() { format!("exchange `{name}`: {error}").into() } else { error }
}

/// Why nothing more can be exchanged.
fn given_up() -> ExchangeError {
    "the exchange between GPUs was aborted".into()
}

impl NcclGroup {
    fn join(links: &NcclLinks, invitation: &[u8], place: GroupPlace, look: Look) -> Result<Self, ExchangeError> {
        let (gpu, nccl) = (Arc::clone(&links.gpu), links.nccl);
        let id = invitation.try_into().map(UniqueId);
        let id =
            id.map_err(|_| format!("an invitation of NCCL has {UNIQUE_ID_BYTES} bytes, not {}", invitation.len()))?;
        let stream = gpu.stream()?;
        let (mut handle, config) = (std::ptr::null_mut(), Config::new());
        // SAFETY: the place of a handle, and a configuration of the size that it says.
        let code =
            unsafe { (nccl.calls.init_rank)(&mut handle, place.size as c_int, id, place.rank as c_int, &config) };
        nccl.check("ncclCommInitRankConfig", &gpu.info.name, code, std::ptr::null_mut())?;
        let (comm, state) = (Mutex::new(Comm(Some(handle))), Mutex::default());
        let scratch_bytes_max = links.scratch_bytes_max;
        let group = Self { gpu, nccl, place, look, stream, comm, state, scratch_bytes_max };
        group.finish_call("ncclCommInitRankConfig")?;
        Ok(group)
    }

    /// Makes a call of NCCL and waits until it has been taken up, which is not until it is done.
    fn call(&self, name: &'static str, call: impl FnOnce(Handle) -> c_int) -> Result<(), ExchangeError> {
        self.gpu.enter()?;
        {
            let comm = lock(&self.comm);
            let handle = comm.0.ok_or_else(given_up)?;
            let code = call(handle);
            self.nccl.check(name, &self.gpu.info.name, code, handle)?;
            if code == SUCCESS {
                return Ok(());
            }
        }
        self.finish_call(name)
    }

    /// Waits for a call that is under way. If the job does not go on, the communicator is given up.
    fn finish_call(&self, name: &'static str) -> Result<(), ExchangeError> {
        let since = Instant::now();
        while self.async_state(name)? == IN_PROGRESS {
            if let Err(error) = (self.look)() {
                self.abort();
                return Err(error);
            }
            if since.elapsed() < YIELD_FOR { std::thread::yield_now() } else { std::thread::sleep(PAUSE) }
        }
        Ok(())
    }

    /// Whether a call is under way, or what went wrong in one.
    fn async_state(&self, name: &'static str) -> Result<c_int, ExchangeError> {
        let comm = lock(&self.comm);
        let handle = comm.0.ok_or_else(given_up)?;
        let mut state = SUCCESS;
        // SAFETY: a communicator that was not given up, and the place of a number.
        let code = unsafe { (self.nccl.calls.async_error)(handle, &mut state) };
        self.nccl.check("ncclCommGetAsyncError", &self.gpu.info.name, code, handle)?;
        self.nccl.check(name, &self.gpu.info.name, state, handle)?;
        Ok(state)
    }

    fn prepared(&self, ticket: usize) -> Arc<Prepared> {
        Arc::clone(&lock(&self.state).prepared[ticket])
    }

    fn adder(&self, state: &mut GroupState, dtype: DType) -> Result<Arc<LaunchCall>, CudaError> {
        if let Some((_, adder)) = state.adders.iter().find(|(known, _)| *known == dtype) {
            return Ok(Arc::clone(adder));
        }
        let adder = Arc::new(adder(&self.gpu, dtype)?);
        state.adders.push((dtype, Arc::clone(&adder)));
        Ok(adder)
    }

    fn spot(&self, spot: Spot, scratch: Option<&Arc<DeviceMemory>>) -> DevicePointer {
        match spot {
            Spot::At(address) => address,
            Spot::Scratch(offset) => scratch.map_or(0, |memory| memory.at(offset)),
        }
    }

    fn run(&self, step: &Step, prepared: &Prepared, scratch: Option<&Arc<DeviceMemory>>) -> Result<(), ExchangeError> {
        let (calls, stream) = (&self.nccl.calls, self.stream.handle);
        let dtype = data_type(prepared.plan.dtype);
        let at = |address: DevicePointer| address as *mut c_void;
        // SAFETY of the calls below: whoever started the exchange lends memory of the device of the sizes that it said.
        match *step {
            Step::Messages { ref sent, ref received } => {
                self.call("ncclGroupEnd", |comm| self.messages(comm, sent, received, dtype, scratch))
            }
            Step::Add { own, slot_elements, to, elements } => {
                let Some(adder) = &prepared.adder else { return Err("a sum of ranks has no kernel".into()) };
                let slots = self.spot(Spot::Scratch(0), scratch);
                let GroupPlace { rank, size } = self.place;
                let args = [own, slots, slot_elements as u64, rank as u64, size as u64, to, elements as u64];
                Ok(adder.start_in(&self.gpu, &self.stream, &args)?)
            }
            Step::AllReduce { from, to, elements } => self.call("ncclAllReduce", |comm| {
                // SAFETY: as above.
                unsafe { (calls.all_reduce)(at(from), at(to), elements, dtype, SUM, comm, stream) }
            }),
            Step::ReduceScatter { from, to, part_elements } => self.call("ncclReduceScatter", |comm| {
                // SAFETY: as above.
                unsafe { (calls.reduce_scatter)(at(from), at(to), part_elements, dtype, SUM, comm, stream) }
            }),
            Step::AllGather { from, to, part_elements } => self.call("ncclAllGather", |comm| {
                // SAFETY: as above.
                unsafe { (calls.all_gather)(at(from), at(to), part_elements, dtype, comm, stream) }
            }),
        }
    }

    /// Messages of one group: all at once, so that none waits for another.
    fn messages(
        &self,
        comm: Handle,
        sent: &[Message],
        received: &[Message],
        dtype: c_int,
        scratch: Option<&Arc<DeviceMemory>>,
    ) -> c_int {
        let (calls, stream) = (&self.nccl.calls, self.stream.handle);
        let failed = |code: &c_int| *code != SUCCESS && *code != IN_PROGRESS;
        // SAFETY: as in `run`; a group that was begun ends, whatever came of it.
        unsafe {
            let begun = (calls.group_start)();
            let send = |message: &Message| {
                let from = self.spot(message.spot, scratch) as *const c_void;
                (calls.send)(from, message.elements, dtype, message.peer as c_int, comm, stream)
            };
            let receive = |message: &Message| {
                let to = self.spot(message.spot, scratch) as *mut c_void;
                (calls.receive)(to, message.elements, dtype, message.peer as c_int, comm, stream)
            };
            let wrong = sent.iter().map(send).chain(received.iter().map(receive)).find(failed);
            let ended = (calls.group_end)();
            Some(begun).filter(failed).or(wrong).unwrap_or(ended)
        }
    }
}

/// The kernel that adds the parts of all ranks.
pub(crate) fn add_launch(dtype: DType) -> Launch {
    let name = format!("add_ranks_{}", dtype.name());
    let source = CudaSource::new(include_str!("ranks.cu")).define_type("ELEMENT", dtype).define("KERNEL", &name);
    Launch::new(source, name, [ADD_BLOCKS_MAX, 1, 1], ADD_BLOCK, [])
}

/// The same, compiled.
pub(crate) fn adder(gpu: &Gpu, dtype: DType) -> Result<LaunchCall, CudaError> {
    let launch = add_launch(dtype);
    gpu.kernels.prepare(gpu, [&launch.source].into_iter())?;
    Command::launch_call(gpu, &launch)
}

impl DeviceGroup for NcclGroup {
    fn prepare(&self, exchange: &Exchange, reproducible: bool) -> Result<usize, ExchangeError> {
        let plan = ExchangePlan::new(exchange, self.place, reproducible, self.scratch_bytes_max);
        let mut state = lock(&self.state);
        let adds = plan.steps.iter().any(|step| matches!(step, Step::Add { .. }));
        let adder = adds.then(|| self.adder(&mut state, plan.dtype)).transpose()?;
        if plan.scratch_bytes > state.scratch.as_ref().map_or(0, |scratch| scratch.bytes()) {
            state.scratch = Some(Arc::new(DeviceMemory::zeroed(&self.gpu, plan.scratch_bytes)?));
            // Zeroed in the order of another stream.
            self.gpu.synchronize()?;
        }
        let (ready, done) = (Event::new(&self.gpu)?, Event::new(&self.gpu)?);
        state.prepared.push(Arc::new(Prepared { name: exchange.name.clone(), plan, adder, ready, done }));
        Ok(state.prepared.len() - 1)
    }

    fn start(&self, ticket: usize) -> Result<(), ExchangeError> {
        let prepared = self.prepared(ticket);
        let scratch = lock(&self.state).scratch.clone();
        prepared.ready.record()?;
        self.gpu.wait_in(&self.stream, &prepared.ready)?;
        for step in &prepared.plan.steps {
            self.run(step, &prepared, scratch.as_ref()).map_err(|error| named(&prepared.name, error))?;
        }
        Ok(prepared.done.record_in(&self.stream)?)
    }

    fn order(&self, ticket: usize) -> Result<(), ExchangeError> {
        Ok(self.gpu.wait_in(&self.gpu.compute, &self.prepared(ticket).done)?)
    }

    fn is_done(&self, ticket: usize) -> Result<bool, ExchangeError> {
        if self.prepared(ticket).done.has_happened()? {
            return Ok(true);
        }
        self.async_state("an exchange of NCCL").map(|_| false)
    }

    fn abort(&self) {
        if let Some(handle) = lock(&self.comm).0.take()
            && self.gpu.enter().is_ok()
        {
            // SAFETY: a communicator that nobody uses any more. What fails here is of no consequence: the job has ended.
            unsafe { (self.nccl.calls.abort)(handle) };
        }
    }
}

/// Ends the communicator in good order, with the others, or gives it up if they do not come.
impl Drop for NcclGroup {
    fn drop(&mut self) {
        // SAFETY: a communicator that was not given up.
        let ended = self.call("ncclCommFinalize", |handle| unsafe { (self.nccl.calls.finalize)(handle) }).is_ok();
        let handle = lock(&self.comm).0.take_if(|_| ended);
        match handle {
            // SAFETY: finalised, and nobody else has it.
            Some(handle) => _ = unsafe { (self.nccl.calls.destroy)(handle) },
            None => self.abort(),
        }
        if self.gpu.enter().is_ok() {
            // SAFETY: a stream of this group alone. What still runs on it uses the scratch memory, and waits for nobody any more.
            unsafe {
                (self.gpu.driver.stream_synchronize)(self.stream.handle);
                (self.gpu.driver.stream_destroy)(self.stream.handle);
            }
        }
    }
}
