//! What a GPU does per second: products by shape and type, memory, kernels one after the other, copies to the host and back.
//!
//! Everything is measured as training runs it: products by the same library with the same choice of algorithms, small kernels as one
//! recorded graph, copies from and to pinned memory. The best of several rounds counts.

use crate::captured::Recordings;
use crate::commands::{Command, Operands};
use crate::device::sum_source;
use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::memory::{DeviceMemory, copy, download, pinned, upload};
use kolo_graph::cuda::{CudaCall, CudaMatrix, CudaPlace, Launch, Product};
use kolo_graph::{DType, Phase};
use std::sync::Arc;
use std::time::Instant;

/// What was measured of one kind of work.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuRate {
    pub work: GpuWork,
    /// Rows, columns and terms of a product; else bytes.
    pub shape: Vec<usize>,
    /// Operations per second of a product, bytes per second of what moves, kernels per second.
    pub rate: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuWork {
    /// Of operands of this type; of f32 also with operands rounded to TF32.
    Product {
        dtype: DType,
        tf32: bool,
    },
    /// Read and written.
    Stream,
    /// Kernels that do next to nothing, one after the other.
    Launch,
    ToHost,
    FromHost,
}

/// Products as training has them: large, those of a GPT's layers on 16,384 tokens, of few rows, of few terms.
const PRODUCTS: [[usize; 3]; 6] =
    [[8192, 8192, 8192], [16384, 768, 768], [16384, 3072, 768], [16384, 768, 3072], [64, 2048, 512], [4096, 4096, 64]];
const TYPES: [(DType, bool); 4] = [(DType::F32, false), (DType::F32, true), (DType::BF16, false), (DType::F16, false)];
const STREAM_BYTES: usize = 512 << 20;
const HOST_BYTES: usize = 256 << 20;
/// Kernels of a recorded graph.
const KERNELS: usize = 200;
const ROUNDS: usize = 5;
/// A round lasts about so long.
const ROUND_SECONDS: f64 = 0.01;
/// Floating-point operations of the largest product in f32 without TF32, which takes long enough as it is.
const F32_FLOPS_MAX: f64 = 3e11;

/// Measures the GPU of this number.
pub fn measure(index: usize) -> Result<Vec<GpuRate>, CudaError> {
    let gpu = Gpu::open(index)?;
    let mut rates = Vec::new();
    for (dtype, tf32) in TYPES {
        for shape in PRODUCTS {
            let flops = 2.0 * shape.iter().map(|size| *size as f64).product::<f64>();
            if dtype == DType::F32 && !tf32 && flops > F32_FLOPS_MAX {
                continue;
            }
            let seconds = product(&gpu, shape, dtype, tf32)?;
            rates.push(GpuRate {
                work: GpuWork::Product { dtype, tf32 },
                shape: shape.to_vec(),
                rate: flops / seconds,
            });
        }
    }
    let [from, to] = [DeviceMemory::zeroed(&gpu, STREAM_BYTES)?, DeviceMemory::zeroed(&gpu, STREAM_BYTES)?];
    let stream = best(&gpu, || copy(&gpu, from.at(0), to.at(0), STREAM_BYTES))?;
    let bytes = |work, bytes: usize, rate| GpuRate { work, shape: vec![bytes], rate };
    rates.push(bytes(GpuWork::Stream, STREAM_BYTES, 2.0 * STREAM_BYTES as f64 / stream));
    let host = pinned(&gpu, HOST_BYTES)?;
    let seconds = best(&gpu, || download(&gpu, from.at(0), host.at(0), HOST_BYTES))?;
    rates.push(bytes(GpuWork::ToHost, HOST_BYTES, HOST_BYTES as f64 / seconds));
    let seconds = best(&gpu, || upload(&gpu, host.at(0), to.at(0), HOST_BYTES))?;
    rates.push(bytes(GpuWork::FromHost, HOST_BYTES, HOST_BYTES as f64 / seconds));
    rates.push(bytes(GpuWork::Launch, size_of::<f32>(), KERNELS as f64 / kernels(&gpu, &from)?));
    Ok(rates)
}

/// Seconds of a graph of kernels that each add a number to another.
fn kernels(gpu: &Arc<Gpu>, memory: &DeviceMemory) -> Result<f64, CudaError> {
    let source = sum_source();
    gpu.kernels.prepare(gpu, [&source].into_iter())?;
    let Command::Launch(add) = Command::launch(gpu, &Launch::new(source, "add_term", [1, 1, 1], 32, []), Vec::new())?
    else {
        return Err(CudaError::Other("a launch is a launch".into()));
    };
    let (recordings, key) = (Recordings::default(), (Phase::Before, 0, 0, 0, 0));
    let term = [memory.at(0), memory.at(256), 0, 0, 0, 1];
    let all = || recordings.run(gpu, key, || (0..KERNELS).try_for_each(|_| add.start_with(gpu, &term)));
    // The first runs one by one, the second records.
    all().and_then(|()| all())?;
    best(gpu, all)
}

/// Seconds of one product.
fn product(gpu: &Arc<Gpu>, [rows, columns, depth]: [usize; 3], dtype: DType, tf32: bool) -> Result<f64, CudaError> {
    let bytes = |elements: usize| elements * dtype.bytes();
    let [a, b, c] =
        [rows * depth, depth * columns, rows * columns].map(|elements| DeviceMemory::new(gpu, bytes(elements)));
    let (a, b, c) = (a?, b?, c?);
    // Numbers of every sign and size keep a GPU's power, and so its clock, as training does; zeros would not.
    for (memory, byte) in [(&a, 0x3c), (&b, 0xb9)] {
        memory.fill(byte)?;
    }
    let matrix = |place: CudaPlace, columns: usize| CudaMatrix {
        place,
        dtype,
        row_stride: columns,
        batch_stride: 0,
        transposed: false,
    };
    let product = Product {
        rows,
        columns,
        depth,
        batch: 1,
        a: matrix(CudaPlace::input(0), depth),
        b: matrix(CudaPlace::input(1), columns),
        c: matrix(CudaPlace::output(0), columns),
        alpha: 1.0,
        beta: 0.0,
        bias: None,
    };
    let operands = Operands { inputs: vec![a.at(0), b.at(0)], outputs: vec![c.at(0)], scratch: 0 };
    let command = Command::new(gpu, &CudaCall::Product(product), &operands, tf32)?;
    let command = command.ok_or_else(|| CudaError::Other("a product of no elements".into()))?;
    best(gpu, || command.start(gpu))
}

/// Seconds of one call of `work`, of which as many are started at once as fill a round.
fn best(gpu: &Gpu, work: impl Fn() -> Result<(), CudaError>) -> Result<f64, CudaError> {
    let run = |times: usize| -> Result<f64, CudaError> {
        gpu.synchronize()?;
        let begin = Instant::now();
        (0..times).try_for_each(|_| work())?;
        gpu.synchronize()?;
        Ok(begin.elapsed().as_secs_f64() / times as f64)
    };
    run(1)?;
    let times = (ROUND_SECONDS / run(2)?.max(1e-7)).ceil().clamp(1.0, 10_000.0) as usize;
    (0..ROUNDS).try_fold(f64::MAX, |best, _| Ok(best.min(run(times)?)))
}
