//! `kolo bench device`: measures the cores or a GPU at hand as a device of the planner's table.

use crate::args::BenchDevice;
use crate::described;
use crate::fail::{Failure, check_writable, write_file};
use crate::load;
use crate::output::println;
use crate::progress::Waiting;
use kolo_base::ShownPath;
use kolo_cuda::{GpuRate, GpuWork};
use kolo_graph::DType;
use kolo_plan::device::Precision;
use kolo_plan::device_bench::{
    DeviceFacts, DeviceRow, FROM_HOST, LAUNCH, STREAM, TO_HOST, as_toml, device_of, measure,
};

/// Rows and columns of a product that a multiprocessor computes at a time, as the vendor's library has it for large ones.
const GPU_TILE: [usize; 2] = [128, 256];

/// Workers of a host that are measured at once.
const WORKERS_MAX: usize = 1 << 12;

pub fn device(args: &BenchDevice) -> Result<(), Failure> {
    args.write.as_deref().map_or(Ok(()), check_writable)?;
    if args.name.is_empty() || !args.name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)) {
        let message = format!("--name {:?} is not a valid device name", args.name);
        return Err(Failure::usage(message, "use letters, digits, - and _"));
    }
    let waiting = Waiting::new("measuring");
    let measured = args.device.measure(args);
    drop(waiting);
    let (rows, facts) = measured?;
    println!("{:<24} {:>8} {:>22} {:>16}", "work", "in", "shape", "rate");
    for row in &rows {
        let shape: Vec<String> = row.shape.iter().map(usize::to_string).collect();
        let precision = if row.shape.len() > 1 { row.precision.name() } else { "" };
        println!("{:<24} {precision:>8} {:>22} {:>16}", row.work, shape.join(" × "), row.text());
    }
    let text = as_toml(&device_of(&args.name, &rows, &facts));
    match &args.write {
        Some(path) => {
            write_file(path, text)?;
            println!("wrote [{}] to {}", args.name, path.shown());
            Ok(())
        }
        None => {
            println!("{text}");
            Ok(())
        }
    }
}

pub fn of_cores(args: &BenchDevice) -> Result<(Vec<DeviceRow>, DeviceFacts), Failure> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if args.workers == 0 || args.workers > WORKERS_MAX {
        let message = format!("-n {} is out of range", args.workers);
        return Err(Failure::usage(message, &format!("use a number from 1 to {WORKERS_MAX}")));
    }
    let threads = match args.threads {
        Some(_) => load::threads_of(args.threads)?,
        None => (load::threads_of(None)? / args.workers).max(1),
    };
    // All workers at once, as they share caches and memory; those without a core of their own take turns.
    let mut rows = measure((threads * args.workers).min(cores.max(threads)));
    rows.iter_mut().for_each(|row| row.rate /= args.workers as f64);
    let memory = kolo_train::memory_check::host_bytes().unwrap_or(0) as f64 / args.workers as f64;
    Ok((rows, DeviceFacts::of_cores(memory.max(1.0), Some(described::shared_memory()?))))
}

pub fn of_gpu(index: usize) -> Result<(Vec<DeviceRow>, DeviceFacts), Failure> {
    let devices = kolo_cuda::devices().map_err(|error| Failure::device(&error))?;
    let count = devices.len();
    let missing = || Failure::device(&kolo_cuda::CudaError::NoSuchDevice { index, count });
    let info = devices.into_iter().nth(index).ok_or_else(missing)?;
    let rates = kolo_cuda::measure(index).map_err(|error| Failure::device(&error))?;
    let facts = DeviceFacts {
        doc: format!("{}, measured by `kolo bench device`", info.name),
        memory_bytes: info.memory_bytes as f64,
        units: info.target.multiprocessors as usize,
        tile: GPU_TILE,
        peers: None,
        fitted_on: "the fastest product of each type, and copies of 512 MiB".into(),
    };
    Ok((rates.into_iter().map(row).collect(), facts))
}

/// A measurement of a GPU as a row of the table.
fn row(GpuRate { work, shape, rate }: GpuRate) -> DeviceRow {
    let (work, precision) = match work {
        GpuWork::Product { dtype: DType::BF16, .. } => ("product", Precision::Bf16),
        GpuWork::Product { dtype: DType::F16, .. } => ("product", Precision::F16),
        GpuWork::Product { tf32: true, .. } => ("product", Precision::Tf32),
        GpuWork::Product { .. } => ("product", Precision::F32),
        GpuWork::Stream => (STREAM, Precision::F32),
        GpuWork::Launch => (LAUNCH, Precision::F32),
        GpuWork::ToHost => (TO_HOST, Precision::F32),
        GpuWork::FromHost => (FROM_HOST, Precision::F32),
    };
    DeviceRow { work, precision, shape, rate }
}
