//! Whether NCCL does what is expected of it, in a group of one GPU, and whether the kernel that adds the parts of ranks keeps the promised
//! order, for any number of ranks: what a machine with one GPU can find out.

use crate::driver::DevicePointer;
use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::memory::{self, DeviceMemory};
use crate::nccl::Nccl;
use crate::nccl_group::{NcclLinks, adder};
use kolo_exec::{DeviceGroup, DeviceLinks, Exchange, ExchangeError, ExchangeKind, GroupPlace, bf16, f16};
use kolo_graph::DType;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an exchange with nobody may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// Elements of each exchange: no multiple of anything.
const ELEMENTS: usize = 1_000_003;
/// Elements of each sum over ranks, and ranks.
const ADDED: usize = 10_007;
const RANKS: std::ops::RangeInclusive<usize> = 2..=9;

/// One thing that was tried.
#[derive(Clone, Debug)]
pub struct NcclCheck {
    pub what: String,
    /// How often a number was not what it should be, or why it could not be tried.
    pub outcome: Result<(), String>,
}

/// Tries the exchanges of a group of one on this GPU, and sums over ranks.
pub fn check_nccl(index: usize) -> Result<Vec<NcclCheck>, CudaError> {
    let gpu = Gpu::open(index)?;
    let nccl = Nccl::get()?;
    let mut checks = vec![NcclCheck { what: format!("library {}", nccl.version()?), outcome: Ok(()) }];
    let links = NcclLinks::new(&gpu, nccl);
    let look = Arc::new(|| Ok(()));
    let joined = links.invite().and_then(|id| links.join(&id, GroupPlace { rank: 0, size: 1 }, look));
    let what = "group of one GPU".to_string();
    match joined {
        Err(error) => checks.push(NcclCheck { what, outcome: Err(error.to_string()) }),
        Ok(group) => {
            checks.push(NcclCheck { what, outcome: Ok(()) });
            for dtype in [DType::F32, DType::BF16, DType::F16, DType::I32, DType::I64] {
                checks.extend(
                    trials().into_iter().map(|(kind, promised)| exchange(&gpu, &*group, kind, dtype, promised)),
                );
            }
        }
    }
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::I32, DType::I64] {
        let outcome = RANKS.map(|ranks| sums(&gpu, dtype, ranks)).collect::<Result<Vec<()>, _>>();
        let what = format!("sum over 2 to 9 ranks of {}, in the promised order", dtype.name());
        checks.push(NcclCheck { what, outcome: outcome.map(|_| ()) });
    }
    Ok(checks)
}

/// Exchanges, and whether with the promised bits.
fn trials() -> Vec<(ExchangeKind, bool)> {
    let sums = [ExchangeKind::AllReduce, ExchangeKind::ReduceScatter];
    let both = sums.into_iter().flat_map(|kind| [(kind, false), (kind, true)]);
    let moves = [ExchangeKind::AllGather, ExchangeKind::AllToAll, ExchangeKind::Shift(0), ExchangeKind::Barrier];
    both.chain(moves.map(|kind| (kind, true))).collect()
}

/// In a group of one, every exchange gives what was given.
fn exchange(gpu: &Arc<Gpu>, group: &dyn DeviceGroup, kind: ExchangeKind, dtype: DType, promised: bool) -> NcclCheck {
    let adds = matches!(kind, ExchangeKind::AllReduce | ExchangeKind::ReduceScatter);
    let order = if adds && !promised { ", in NCCL's order" } else { "" };
    let what = format!("{kind:?} of {}{order}", dtype.name());
    let outcome = try_exchange(gpu, group, kind, dtype, promised);
    NcclCheck { what, outcome: outcome.map_err(|error| error.to_string()) }
}

fn try_exchange(
    gpu: &Arc<Gpu>,
    group: &dyn DeviceGroup,
    kind: ExchangeKind,
    dtype: DType,
    promised: bool,
) -> Result<(), ExchangeError> {
    let bytes = ELEMENTS * dtype.bytes();
    let given: Vec<u8> = (0..ELEMENTS).flat_map(|at| number(dtype, at, 0)).collect();
    let (input, output) = (upload(gpu, &given)?, DeviceMemory::zeroed(gpu, bytes)?);
    let (input_at, output_at) = (input.at(0) as *mut u8, output.at(0) as *mut u8);
    let exchange = Exchange {
        kind,
        name: "selftest".into(),
        axis: "data".into(),
        lane: None,
        dtype,
        input: input_at,
        output: output_at,
        elements: ELEMENTS,
        parts: vec![(0, ELEMENTS)],
        of_gradients: false,
    };
    let ticket = group.prepare(&exchange, promised)?;
    group.start(ticket)?;
    group.order(ticket)?;
    let since = Instant::now();
    while !group.is_done(ticket)? {
        if since.elapsed() > PATIENCE {
            group.abort();
            return Err(format!("not done within {} s", PATIENCE.as_secs()).into());
        }
        std::thread::yield_now();
    }
    if kind == ExchangeKind::Barrier {
        return Ok(());
    }
    Ok(compare(&download(gpu, output.at(0), bytes)?, &given, dtype)?)
}

/// The bytes of a number of a rank: sums of such floats depend on their order.
fn number(dtype: DType, at: usize, rank: usize) -> Vec<u8> {
    let mixed = (at as u64 * 0x9e37_79b9 + rank as u64 * 0x85eb_ca6b).wrapping_mul(0xc2b2_ae35) >> 7;
    let float = (mixed % 2001) as f32 / 1000.0 - 1.0;
    let float = float * if at.is_multiple_of(3) { 64.0 } else { 0.125 };
    match dtype {
        DType::F32 => float.to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(float).to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(float).to_le_bytes().to_vec(),
        DType::I32 => (mixed as i32).to_le_bytes().to_vec(),
        DType::I64 => (mixed.wrapping_mul(mixed) as i64).to_le_bytes().to_vec(),
        DType::Bool => vec![(mixed % 2) as u8],
        DType::U8 => vec![mixed as u8],
    }
}

/// Adds two numbers as collectives do.
fn sum(dtype: DType, a: &[u8], b: &[u8]) -> Vec<u8> {
    let four = |x: &[u8]| -> [u8; 4] { std::array::from_fn(|at| x[at]) };
    let eight = |x: &[u8]| -> [u8; 8] { std::array::from_fn(|at| x[at]) };
    let two = |x: &[u8]| -> [u8; 2] { [x[0], x[1]] };
    match dtype {
        DType::F32 => (f32::from_le_bytes(four(a)) + f32::from_le_bytes(four(b))).to_le_bytes().to_vec(),
        DType::BF16 => {
            let both = bf16::from_le_bytes(two(a)).to_f32() + bf16::from_le_bytes(two(b)).to_f32();
            bf16::from_f32(both).to_le_bytes().to_vec()
        }
        DType::F16 => {
            let both = f16::from_le_bytes(two(a)).to_f32() + f16::from_le_bytes(two(b)).to_f32();
            f16::from_f32(both).to_le_bytes().to_vec()
        }
        DType::I64 => i64::from_le_bytes(eight(a)).wrapping_add(i64::from_le_bytes(eight(b))).to_le_bytes().to_vec(),
        DType::I32 => i32::from_le_bytes(four(a)).wrapping_add(i32::from_le_bytes(four(b))).to_le_bytes().to_vec(),
        DType::Bool => vec![a[0] | b[0]],
        DType::U8 => vec![a[0].wrapping_add(b[0])],
    }
}

/// Adds by doubling strides, as the order is defined: `x[i] += x[i + 1]`, `x[i] += x[i + 2]`, `x[i] += x[i + 4]` and so on.
fn tree(dtype: DType, mut terms: Vec<Vec<u8>>) -> Vec<u8> {
    let mut stride = 1;
    while stride < terms.len() {
        for at in (0..terms.len() - stride).step_by(2 * stride) {
            terms[at] = sum(dtype, &terms[at], &terms[at + stride]);
        }
        stride *= 2;
    }
    terms.swap_remove(0)
}

/// The kernel that adds the parts of so many ranks, as the last but one of them.
fn sums(gpu: &Arc<Gpu>, dtype: DType, ranks: usize) -> Result<(), String> {
    let run = || -> Result<Vec<u8>, CudaError> {
        let rank = ranks - 2;
        let part = |rank: usize| (0..ADDED).flat_map(|at| number(dtype, at, rank)).collect::<Vec<u8>>();
        // An odd slot cannot be read in packs, an even one can.
        let slot = ADDED.next_multiple_of(64) + usize::from(ranks % 2 == 1);
        let mut others = vec![0xff; ranks * slot * dtype.bytes()];
        for other in (0..ranks).filter(|other| *other != rank) {
            let start = other * slot * dtype.bytes();
            others[start..start + ADDED * dtype.bytes()].copy_from_slice(&part(other));
        }
        let (own, others) = (upload(gpu, &part(rank))?, upload(gpu, &others)?);
        let args = [own.at(0), others.at(0), slot as u64, rank as u64, ranks as u64, own.at(0), ADDED as u64];
        adder(gpu, dtype)?.start_with(gpu, &args)?;
        download(gpu, own.at(0), ADDED * dtype.bytes())
    };
    let found = run().map_err(|error| error.to_string())?;
    let wanted = |at: usize| tree(dtype, (0..ranks).map(|rank| number(dtype, at, rank)).collect());
    let wanted: Vec<u8> = (0..ADDED).flat_map(wanted).collect();
    compare(&found, &wanted, dtype).map_err(|error| format!("{ranks} ranks: {error}"))
}

fn upload(gpu: &Arc<Gpu>, bytes: &[u8]) -> Result<DeviceMemory, CudaError> {
    let memory = DeviceMemory::new(gpu, bytes.len())?;
    memory::upload(gpu, bytes.as_ptr(), memory.at(0), bytes.len())?;
    gpu.synchronize()?;
    Ok(memory)
}

fn download(gpu: &Gpu, from: DevicePointer, bytes: usize) -> Result<Vec<u8>, CudaError> {
    let mut found = vec![0; bytes];
    memory::download(gpu, from, found.as_mut_ptr(), bytes)?;
    gpu.synchronize()?;
    Ok(found)
}

fn compare(found: &[u8], wanted: &[u8], dtype: DType) -> Result<(), String> {
    let width = dtype.bytes();
    let pairs = || found.chunks(width).zip(wanted.chunks(width)).enumerate();
    let wrong = pairs().filter(|(_, (found, wanted))| found != wanted).count();
    match pairs().find(|(_, (found, wanted))| found != wanted) {
        Some((at, (found, wanted))) => {
            Err(format!("{wrong} numbers differ, the first at {at}: bytes {found:02x?} instead of {wanted:02x?}"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    /// The same checks as on a GPU: a wrong order would be seen.
    #[test]
    fn sums_over_ranks_are_checked_bit_by_bit() {
        let gpu = fake::gpu();
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::I32, DType::I64] {
            RANKS.for_each(|ranks| sums(&gpu, dtype, ranks).unwrap());
        }
        let terms = |at: usize| (0..5).map(|rank| number(DType::F32, at, rank)).collect::<Vec<_>>();
        let backwards = |at: usize| tree(DType::F32, terms(at).into_iter().rev().collect());
        assert!(
            (0..100).any(|at| backwards(at) != tree(DType::F32, terms(at))),
            "the numbers do not tell orders apart"
        );
    }
}
