//! `kolo bench comm --transport nccl`: exchanges between GPUs, in their own memory and through the lane that training uses.

use kolo_comm::bench::{BenchRow, Method, bus_factor};
use kolo_comm::{CallKind, Communicator, Fault, Reduction, Watch, thread};
use kolo_cuda::Cuda;
use kolo_exec::{Collectives, Exchange, ExchangeError, ExchangeKind, Executor, LinkPreference, Memory};
use kolo_graph::DType;
use kolo_parallel::mesh::DATA;
use kolo_parallel::{Mesh, device_lane};
use std::sync::Arc;
use std::time::Instant;

/// What NCCL is used for.
pub const KINDS: [CallKind; 4] =
    [CallKind::AllReduce, CallKind::ReduceScatter, CallKind::AllGather, CallKind::AllToAll];
/// Bytes moved per size, however few calls that leaves, and calls at least.
const BYTES_PER_SIZE: usize = 4 << 30;
const CALLS_MIN: usize = 15;

/// A world of this process alone.
pub fn alone() -> Result<Arc<Communicator>, Fault> {
    let watches = [Watch::alone()];
    let transport = thread::world(&watches).pop().ok_or_else(|| Fault::BadCall("a world has its ranks".into()))?;
    Ok(Arc::new(Communicator::new(transport, Arc::clone(&watches[0]), true)))
}

/// Measures kinds of exchanges of f32 on this rank's GPU. All ranks call it together; all get the rows.
pub fn sweep(
    world: &Arc<Communicator>,
    gpu: Cuda,
    kinds: &[CallKind],
    sizes: &[usize],
    iterations: usize,
) -> Result<Vec<BenchRow>, Fault> {
    let fault =
        |error: ExchangeError| error.downcast().map_or_else(|error| Fault::BadCall(error.to_string()), |it| *it);
    let links = Cuda { links: LinkPreference::Always, ..gpu }.links();
    let mesh =
        Mesh::data(world.size(), world.rank()).ok_or_else(|| Fault::BadCall("a rank is below the size".into()))?;
    let largest = sizes.iter().copied().max().unwrap_or(0);
    let memory = || gpu.exchanged_memory(largest).map_err(|error| fault(error.into()));
    let memories = [memory()?, memory()?];
    let lane = device_lane::lane(&mesh, world, links)?;
    lane.on_device(true).map_err(fault)?;
    let mut rows = Vec::new();
    for kind in kinds {
        for bytes in sizes {
            let exchange = exchange(*kind, *bytes, world.size(), &memories);
            let number = lane.prepare(vec![exchange], 1).map_err(fault)?;
            let calls = iterations.min((BYTES_PER_SIZE / bytes.max(&1)).max(CALLS_MIN));
            let times = sorted_us(world, &*lane, number, calls).map_err(fault)?;
            let [us_quarter, us_median] = [times.len() / 4, times.len() / 2].map(|at| times[at]);
            let busbw_gbps = *bytes as f64 / us_median / 1e3 * bus_factor(*kind, world.size() as f64);
            let method = Method { iterations, ..Method::default() };
            let (op, ranks) = (kind.name(), world.size());
            let (bytes, transport) = (*bytes, "nccl");
            rows.push(BenchRow { op, bytes, ranks, transport, method, us_median, us_quarter, busbw_gbps });
        }
    }
    Ok(rows)
}

/// The slowest rank's time in all calls, from the start to when the host sees it done; the shortest first.
fn sorted_us(
    world: &Communicator,
    lane: &dyn Collectives,
    number: usize,
    calls: usize,
) -> Result<Vec<f64>, ExchangeError> {
    let mut times = Vec::with_capacity(calls);
    for call in 0..calls + calls / 10 + 1 {
        world.barrier()?;
        let begin = Instant::now();
        lane.start(number);
        lane.settle()?;
        let mut slowest = [begin.elapsed().as_secs_f64() * 1e6];
        world.all_reduce(&mut slowest, Reduction::Max)?;
        if call > calls / 10 {
            times.push(slowest[0]);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// Where the parts of ranks are equal; in place but for what goes from each to each.
fn exchange(kind: CallKind, bytes: usize, ranks: usize, memories: &[Memory; 2]) -> Exchange {
    let each = bytes / DType::F32.bytes() / ranks;
    let (kind, output) = match kind {
        CallKind::ReduceScatter => (ExchangeKind::ReduceScatter, &memories[0]),
        CallKind::AllGather => (ExchangeKind::AllGather, &memories[0]),
        CallKind::AllToAll => (ExchangeKind::AllToAll, &memories[1]),
        _ => (ExchangeKind::AllReduce, &memories[0]),
    };
    let parts =
        if kind == ExchangeKind::AllReduce { Vec::new() } else { (0..ranks).map(|at| (at * each, each)).collect() };
    Exchange {
        kind,
        name: "bench".into(),
        axis: DATA.into(),
        lane: None,
        dtype: DType::F32,
        input: memories[0].at(0),
        output: output.at(0),
        elements: if parts.is_empty() { bytes / DType::F32.bytes() } else { each * ranks },
        parts,
        of_gradients: false,
    }
}
