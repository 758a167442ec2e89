//! How fast a communicator is: one row per size, as the OSU and NCCL tests print them.
//!
//! Each sample starts at a barrier; its time is that of the slowest rank; the row is the median over the samples. Short
//! calls are timed several at a time, as the clock would weigh more than they do; but not where each has a fresh buffer.
//!
//! Where ranks work in each other's memory, a call that follows another of its kind finds much of it in its own cache: each
//! rank had the same slice before. [`Method::fresh`] is what a trainer sees, where each rank has just written its gradients.

use crate::call::CallKind;
use crate::communicator::{Communicator, Request};
use crate::element::{ElementType, Reduction};
use crate::fault::Fault;
use crate::memory::SharedMemory;
use crate::task::even_parts;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Clone, Debug, PartialEq)]
pub struct BenchRow {
    pub op: &'static str,
    pub bytes: usize,
    pub ranks: usize,
    pub transport: &'static str,
    /// How it was measured.
    pub method: Method,
    pub us_median: f64,
    /// What a quarter of the samples take at most: what is typical where nothing else runs on the machine.
    pub us_quarter: f64,
    /// Bytes that each rank's link must carry in the best algorithm, per time: comparable between numbers of ranks.
    pub busbw_gbps: f64,
}

impl BenchRow {
    pub fn json(&self) -> String {
        format!(
            r#"{{"op":"{}","bytes":{},"ranks":{},"transport":"{}","private":{},"fresh":{},"started":{},"us_median":{:.3},"us_quarter":{:.3},"busbw_gbps":{:.4}}}"#,
            self.op,
            self.bytes,
            self.ranks,
            self.transport,
            self.method.private,
            self.method.fresh,
            self.method.started,
            self.us_median,
            self.us_quarter,
            self.busbw_gbps
        )
    }
}

/// Bytes moved per size, however few samples that leaves.
const BYTES_PER_SIZE: usize = 512 << 20;
const SAMPLES_MIN: usize = 15;
/// Calls up to this size are timed in batches.
const BATCH_BYTES_MAX: usize = 4096;
const BATCH: usize = 50;
/// Some turns of a processor.
const SETTLE: Duration = Duration::from_millis(30);

/// How to measure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Method {
    /// Calls for each size, unless it is so large that fewer do.
    pub iterations: usize,
    /// On buffers that the transport did not allocate.
    pub private: bool,
    /// Each rank writes its buffer anew before every call, outside the measured time.
    pub fresh: bool,
    /// Each call is started and then waited for, as a trainer does, instead of called.
    pub started: bool,
}

/// Measures a kind of call on f32. `bytes` is the whole vector: for the collectives with parts, that of all ranks together.
/// A message goes to the next rank and back; the row has one way.
/// All ranks call it with the same arguments; all get the rows.
pub fn sweep(comm: &Communicator, kind: CallKind, sizes: &[usize], method: Method) -> Result<Vec<BenchRow>, Fault> {
    let largest = sizes.iter().copied().max().unwrap_or(0);
    let allocate = || if method.private { SharedMemory::private(largest) } else { comm.allocate(largest) };
    let buffers = [allocate()?, allocate()?];
    settle(comm)?;
    sizes.iter().map(|bytes| measure(comm, kind, *bytes, method, &buffers)).collect()
}

/// Keeps the processors busy until the system has given each rank one of its own. Ranks that were just started may share one,
/// and as long as they only wait for each other nothing is seen to be wrong with that.
fn settle(comm: &Communicator) -> Result<(), Fault> {
    let begin = Instant::now();
    while begin.elapsed() < SETTLE {
        std::hint::spin_loop();
    }
    comm.barrier()
}

fn measure(
    comm: &Communicator,
    kind: CallKind,
    bytes: usize,
    method: Method,
    buffers: &[Arc<SharedMemory>; 2],
) -> Result<BenchRow, Fault> {
    let request = request(comm, kind, bytes, buffers);
    let ways = if kind.is_message() { 2.0 } else { 1.0 };
    // SAFETY: inside the buffer, which no other rank uses while this one is between two calls.
    let write = || unsafe { std::ptr::write_bytes(buffers[0].at(0), 0, bytes) };
    let times = sorted_us(comm, bytes, method, write, || once(comm, &request, method.started))?;
    let [us_quarter, us_median] = [times.len() / 4, times.len() / 2].map(|at| times[at] / ways);
    let busbw_gbps = bytes as f64 / us_median / 1e3 * bus_factor(kind, comm.size() as f64);
    let (op, ranks, transport) = (kind.name(), comm.size(), comm.transport());
    Ok(BenchRow { op, bytes, ranks, transport, method, us_median, us_quarter, busbw_gbps })
}

/// The slowest rank's time in all samples, the shortest first.
fn sorted_us(
    comm: &Communicator,
    bytes: usize,
    method: Method,
    write: impl Fn(),
    work: impl Fn() -> Result<(), Fault>,
) -> Result<Vec<f64>, Fault> {
    let batch = if bytes <= BATCH_BYTES_MAX && !method.fresh { BATCH } else { 1 };
    let calls = method.iterations.min((BYTES_PER_SIZE / bytes.max(1)).max(SAMPLES_MIN));
    let samples = (calls / batch).max(1);
    let mut times = Vec::with_capacity(samples);
    for sample in 0..samples + samples / 10 + 1 {
        if method.fresh {
            write();
        }
        comm.barrier()?;
        let begin = Instant::now();
        for _ in 0..batch {
            work()?;
        }
        let mut slowest = [begin.elapsed().as_secs_f64() * 1e6 / batch as f64];
        comm.all_reduce(&mut slowest, Reduction::Max)?;
        if sample > samples / 10 {
            times.push(slowest[0]);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// One call; for messages, there and back between the first two ranks.
fn once(comm: &Communicator, request: &Request, started: bool) -> Result<(), Fault> {
    let call = |request: &Request| {
        // SAFETY: the buffers live through the measurement, and only this call uses them.
        unsafe {
            match started {
                true => comm.wait(comm.start(request.clone())?),
                false => comm.call(request),
            }
        }
    };
    let turn = |kind: CallKind| call(&Request { kind, peer: 1 - comm.rank(), ..request.clone() });
    match (request.kind, comm.rank()) {
        (CallKind::Send | CallKind::Recv, 0) => turn(CallKind::Send).and_then(|()| turn(CallKind::Recv)),
        (CallKind::Send | CallKind::Recv, 1) => turn(CallKind::Recv).and_then(|()| turn(CallKind::Send)),
        (CallKind::Send | CallKind::Recv, _) => Ok(()),
        _ => call(request),
    }
}

/// In place where that is usual.
fn request(comm: &Communicator, kind: CallKind, bytes: usize, buffers: &[Arc<SharedMemory>; 2]) -> Request {
    let count = bytes / ElementType::F32.bytes();
    let equal = kind == CallKind::AllToAll;
    let parts = even_parts(if equal { count / comm.size() * comm.size() } else { count }, comm.size());
    let own = parts[comm.rank()].offset * ElementType::F32.bytes();
    let (input, output) = match kind {
        CallKind::AllGather | CallKind::Gather => (buffers[0].at(own), buffers[0].at(0)),
        CallKind::ReduceScatter | CallKind::Scatter => (buffers[0].at(0), buffers[0].at(own)),
        CallKind::AllToAll => (buffers[0].at(0), buffers[1].at(0)),
        _ => (buffers[0].at(0), buffers[0].at(0)),
    };
    let whole = |address: *const u8| {
        buffers.iter().find_map(|buffer| buffer.offset_of(address, 0).map(|offset| buffer.bytes() - offset))
    };
    Request {
        count: if matches!(kind, CallKind::Barrier | CallKind::AllToAll) { 0 } else { count },
        input,
        output,
        input_bytes: whole(input).unwrap_or(0),
        output_bytes: whole(output).unwrap_or(0),
        send: parts.clone().into(),
        recv: parts.into(),
        ..Request::new(kind, ElementType::F32)
    }
}

/// The share of a vector that each rank's link must carry in the best algorithm.
pub fn bus_factor(kind: CallKind, ranks: f64) -> f64 {
    match kind {
        CallKind::AllReduce => 2.0 * (ranks - 1.0) / ranks,
        CallKind::ReduceScatter | CallKind::AllGather | CallKind::Gather | CallKind::Scatter | CallKind::AllToAll => {
            (ranks - 1.0) / ranks
        }
        _ => 1.0,
    }
}
