//! Where to compute: `--device`, and what this machine has (`kolo devices`).

use crate::args::DevicesArgs;
use crate::fail::Failure;
use crate::output::println;
use kolo_cuda::Cuda;
use kolo_exec::reference::Reference;
use kolo_exec::{DeviceReading, Executor, cpu};
use kolo_train::machine::format_bytes;
use std::str::FromStr;
use std::sync::Arc;

/// What `--device` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceArg {
    /// A GPU if there is one that can be used, else the CPU.
    Auto,
    Cpu,
    /// The GPU of this number; without one, each worker of a host takes the next.
    Cuda(Option<usize>),
    /// Every op by its definition, in f64: slow, for one worker, to compare with.
    Reference,
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(None)),
            "reference" => Ok(Self::Reference),
            _ => match text.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(index)) => Ok(Self::Cuda(Some(index))),
                _ => Err("write auto, cpu, cuda, cuda:N (the GPU of this number) or reference".into()),
            },
        }
    }
}

impl DeviceArg {
    /// The executor that it names.
    pub fn executor(self) -> Result<Arc<dyn Executor>, Failure> {
        match self {
            Self::Cpu => Ok(Arc::new(cpu::Cpu)),
            Self::Reference => Ok(Arc::new(Reference)),
            Self::Cuda(index) => Ok(Arc::new(cuda(index)?)),
            Self::Auto => match gpu_is_usable() {
                true => Ok(Arc::new(cuda(None)?)),
                false => Ok(Arc::new(cpu::Cpu)),
            },
        }
    }
}

/// Whether there is a GPU, and every library that it needs.
pub fn gpu_is_usable() -> bool {
    kolo_cuda::devices().is_ok_and(|devices| !devices.is_empty())
        && kolo_cuda::libraries().iter().all(|library| library.found.is_ok() || !library.required)
}

/// This worker's GPU.
pub fn own_gpu() -> Result<Cuda, Failure> {
    cuda(None)
}

/// The GPU of this number. Without one, ranks of a host take the GPUs in turn, and share them if there are more ranks than GPUs.
fn cuda(index: Option<usize>) -> Result<Cuda, Failure> {
    let count = kolo_cuda::devices().map_err(|error| Failure::device(&error))?.len();
    let rank = kolo_cluster::launcher::detect(&|name| std::env::var(name).ok()).ok().flatten();
    let index = index.unwrap_or_else(|| rank.map_or(0, |rank| rank.local_rank % count.max(1)));
    if count == 0 {
        return Err(Failure::device(&kolo_cuda::CudaError::NoDevice));
    }
    if index >= count {
        return Err(Failure::device(&kolo_cuda::CudaError::NoSuchDevice { index, count }));
    }
    Ok(Cuda { index, ..Cuda::default() })
}

/// How a device is: `97 % busy, 8.4 of 139.8 GiB in use, 612 of 700 W, 54 °C`.
pub fn describe(now: &DeviceReading) -> String {
    let mut parts: Vec<String> = Vec::new();
    parts.extend(now.utilisation.map(|busy| format!("{:.0} % busy", busy * 100.0)));
    parts.extend(now.memory_bytes.map(|[used, all]| format!("{} of {} in use", format_bytes(used), format_bytes(all))));
    parts.extend(now.power_watts.map(|watts| match now.power_limit_watts {
        Some(limit) => format!("{watts:.0} of {limit:.0} W"),
        None => format!("{watts:.0} W"),
    }));
    parts.extend(now.celsius.map(|celsius| format!("{celsius:.0} °C")));
    parts.join(", ")
}

/// `kolo devices`.
pub fn devices(_: &DevicesArgs) -> Result<(), Failure> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("cpu        {cores} cores, vectors {}", kolo_graph::simd::level().name());
    match kolo_cuda::devices() {
        Ok(devices) if devices.is_empty() => println!("cuda       no device"),
        Ok(devices) => {
            for device in devices {
                let (major, minor) = device.target.capability;
                println!(
                    "cuda:{:<5} {}, {} of memory, {} multiprocessors, compute capability {major}.{minor}",
                    device.index,
                    device.name,
                    format_bytes(device.memory_bytes as u64),
                    device.target.multiprocessors,
                );
                let executor = Cuda { index: device.index, ..Cuda::default() };
                let now = executor.monitor().map(|monitor| monitor.read()).unwrap_or_default();
                if now != DeviceReading::default() {
                    println!("{:<10} {}", "", describe(&now));
                }
            }
        }
        Err(error) => println!("cuda       not usable: {error}"),
    }
    println!("\nlibraries for NVIDIA GPUs, loaded when a job asks for one");
    for library in kolo_cuda::libraries() {
        match &library.found {
            Ok(version) => println!("  {:<34} {version}", library.title),
            Err(error) => println!("  {:<34} missing: {error}", library.title),
        }
    }
    Ok(())
}
