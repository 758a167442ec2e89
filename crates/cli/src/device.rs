//! Where to compute: `--device`, and what this machine has (`kolo devices`).

use crate::args::{BenchDevice, DevicesArgs};
use crate::bench_device;
use crate::fail::Failure;
use crate::output::println;
use kolo_cuda::Cuda;
use kolo_exec::reference::Reference;
use kolo_exec::{DeviceReading, Executor, cpu};
use kolo_plan::device_bench::{DeviceFacts, DeviceRow};
use kolo_train::machine::format_bytes;
use std::str::FromStr;
use std::sync::Arc;

/// Something that computes, and what its name stands for.
///
/// Parsing, help, errors, `kolo selftest` and `kolo bench device` read [`DEVICES`]; another executor is another entry.
#[derive(Clone, Copy, Debug)]
pub struct DeviceKind {
    pub name: &'static str,
    /// More of it, for `--help`.
    note: &'static str,
    /// What a number behind its name means, as in `cuda:1`, if it can have one.
    number: Option<&'static str>,
    /// `auto` takes the highest that this machine has; 0 is never taken.
    preference: u8,
    is_here: fn() -> bool,
    executor: fn(Option<usize>) -> Result<Arc<dyn Executor>, Failure>,
    /// The executor that `kolo selftest` runs, if it is not what others are compared with.
    tested: Option<fn(Option<usize>) -> Arc<dyn Executor>>,
    /// How `kolo bench device` measures it, if it is a device of the planner's.
    measured: Option<Measure>,
}

/// Rates and facts of a device.
type Measure = fn(&BenchDevice, Option<usize>) -> Result<(Vec<DeviceRow>, DeviceFacts), Failure>;

const CPU: DeviceKind = DeviceKind {
    name: "cpu",
    note: "",
    number: None,
    preference: 1,
    is_here: || true,
    executor: |_| Ok(Arc::new(cpu::Cpu)),
    tested: Some(|_| Arc::new(cpu::Cpu)),
    measured: Some(|args, _| bench_device::of_cores(args)),
};

pub static DEVICES: &[DeviceKind] = &[
    CPU,
    // Without a number, each worker of a host takes the next GPU.
    DeviceKind {
        name: "cuda",
        note: "",
        number: Some("the GPU of this number"),
        preference: 2,
        is_here: gpu_is_usable,
        executor: |index| Ok(Arc::new(cuda(index)?)),
        // All its memory is full of NaNs before every run.
        tested: Some(|index| Arc::new(Cuda { index: index.unwrap_or(0), poison: true, ..Cuda::default() })),
        measured: Some(|_, index| bench_device::of_gpu(index.unwrap_or(0))),
    },
    DeviceKind {
        name: "reference",
        note: "every op by its definition in f64: slow, for one worker",
        number: None,
        preference: 0,
        is_here: || true,
        executor: |_| Ok(Arc::new(Reference)),
        tested: None,
        measured: None,
    },
];

/// What `--device` says.
#[derive(Clone, Copy, Debug)]
pub enum DeviceArg {
    /// The best that this machine has: a GPU if there is one that can be used, else the CPU.
    Auto,
    Kind(&'static DeviceKind, Option<usize>),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == AUTO {
            return Ok(Self::Auto);
        }
        let (name, number) = text.split_once(':').map_or((text, None), |(name, number)| (name, Some(number)));
        let kind = DEVICES.iter().find(|kind| kind.name == name && (number.is_none() || kind.number.is_some()));
        let index = number.map(str::parse).transpose().ok();
        match (kind, index) {
            (Some(kind), Some(index)) => Ok(Self::Kind(kind, index)),
            _ => Err(format!("write {}", joined(all_forms(explained)))),
        }
    }
}

const AUTO: &str = "auto";

/// As [`DeviceKind::forms`], with what the number means.
fn explained(kind: &DeviceKind) -> Vec<String> {
    let mut forms = kind.forms();
    if let (Some(last), Some(number)) = (forms.last_mut(), kind.number) {
        last.push_str(&format!(" ({number})"));
    }
    forms
}

impl DeviceKind {
    /// Its name, and the form with a number: `cuda`, `cuda:N`.
    fn forms(&self) -> Vec<String> {
        let numbered = self.number.map(|_| format!("{}:N", self.name));
        std::iter::once(self.name.into()).chain(numbered).collect()
    }
}

/// `cpu, cuda or cuda:N`.
fn joined(mut names: Vec<String>) -> String {
    let last = names.pop().unwrap_or_default();
    if names.is_empty() { last } else { format!("{} or {last}", names.join(", ")) }
}

/// All that `--device` takes, each kind as `form` writes it.
fn all_forms(form: impl Fn(&DeviceKind) -> Vec<String>) -> Vec<String> {
    std::iter::once(AUTO.into()).chain(DEVICES.iter().flat_map(form)).collect()
}

pub fn help() -> String {
    let with_note = |kind: &DeviceKind| match kind.note {
        "" => kind.forms(),
        note => vec![format!("{} ({note})", joined(kind.forms()))],
    };
    format!("Where to compute: {}", joined(all_forms(with_note)))
}

pub fn planned_help() -> String {
    let names = all_forms(|kind| vec![kind.name.into()]).join(", ");
    format!(
        "Where to compute: this machine ({names}), a device by its name, such as h100 or a100-80, or one of a file: FILE.toml or FILE.toml:NAME"
    )
}

pub fn tested_help() -> String {
    let tested = DEVICES.iter().filter(|kind| kind.tested.is_some());
    format!("The device to check: {}", joined(tested.flat_map(DeviceKind::forms).collect()))
}

pub fn measured_help() -> String {
    let measured = DEVICES.iter().filter(|kind| kind.measured.is_some());
    format!("The device to measure: {}", joined(measured.flat_map(DeviceKind::forms).collect()))
}

impl DeviceArg {
    /// The kind that is meant on this machine, and its number.
    fn chosen(self) -> (&'static DeviceKind, Option<usize>) {
        match self {
            Self::Kind(kind, index) => (kind, index),
            Self::Auto => {
                let mut kinds: Vec<&'static DeviceKind> = DEVICES.iter().filter(|kind| kind.preference > 0).collect();
                kinds.sort_by_key(|kind| std::cmp::Reverse(kind.preference));
                let here = kinds.iter().find(|kind| (kind.is_here)()).or(kinds.last());
                (here.expect("the CPU is always here"), None)
            }
        }
    }

    pub fn cpu() -> Self {
        Self::Kind(&CPU, None)
    }

    /// The number that it says.
    pub fn index(self) -> Option<usize> {
        if let Self::Kind(_, index) = self { index } else { None }
    }

    /// The executor that it names.
    pub fn executor(self) -> Result<Arc<dyn Executor>, Failure> {
        let (kind, index) = self.chosen();
        (kind.executor)(index)
    }

    /// The executor that `kolo selftest` compares with the definitions.
    pub fn tested(self) -> Result<Arc<dyn Executor>, Failure> {
        let (kind, index) = self.chosen();
        (kind.executor)(index)?;
        let without = || {
            let message = format!("the {} is what others are compared with", kind.name);
            Failure::usage(message, &format!("use --device {}", comparable(|kind| kind.tested.is_some())))
        };
        kind.tested.map(|tested| tested(index)).ok_or_else(without)
    }

    /// Rates and facts for the planner's table.
    pub fn measure(self, args: &BenchDevice) -> Result<(Vec<DeviceRow>, DeviceFacts), Failure> {
        let (kind, index) = self.chosen();
        let Some(measure) = kind.measured else {
            let message = format!("the {} device cannot be benchmarked", kind.name);
            return Err(Failure::usage(
                message,
                &format!("use --device {}", comparable(|kind| kind.measured.is_some())),
            ));
        };
        measure(args, index)
    }
}

/// Names of the kinds that are so.
fn comparable(is: impl Fn(&DeviceKind) -> bool) -> String {
    joined(DEVICES.iter().filter(|kind| is(kind)).map(|kind| kind.name.into()).collect())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_device_is_read_by_its_name() {
        for kind in DEVICES {
            assert!(matches!(kind.name.parse(), Ok(DeviceArg::Kind(read, None)) if read.name == kind.name));
            let numbered = format!("{}:3", kind.name).parse::<DeviceArg>();
            assert_eq!(numbered.is_ok_and(|read| read.index() == Some(3)), kind.number.is_some(), "{}", kind.name);
        }
        for wrong in ["gpu", "cuda:", "cuda:x", "cpu:0", "cuda:-1", "", "auto:1"] {
            let error = wrong.parse::<DeviceArg>().unwrap_err();
            assert_eq!(error, "write auto, cpu, cuda, cuda:N (the GPU of this number) or reference");
        }
    }

    #[test]
    fn help_names_every_device() {
        assert_eq!(
            help(),
            "Where to compute: auto, cpu, cuda, cuda:N or reference (every op by its definition in f64: slow, for one worker)"
        );
        assert_eq!(tested_help(), "The device to check: cpu, cuda or cuda:N");
        assert_eq!(measured_help(), "The device to measure: cpu, cuda or cuda:N");
        assert!(planned_help().contains("(auto, cpu, cuda, reference)"));
    }

    /// Nobody is given the reference without having asked.
    #[test]
    fn auto_never_takes_the_reference() {
        let (kind, index) = DeviceArg::Auto.chosen();
        assert!(kind.preference > 0 && index.is_none());
        let reference: DeviceArg = "reference".parse().unwrap();
        assert_eq!(reference.chosen().0.preference, 0);
        assert!(reference.tested().is_err());
    }
}
