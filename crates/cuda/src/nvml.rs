//! NVIDIA's management library: how busy, full, hot and hungry a GPU is. Nothing depends on it: without it nothing is told.

use crate::driver::{Driver, Handle};
use crate::error::CudaError;
use crate::library::{Library, LibraryName, functions};
use kolo_exec::{DeviceReading, Monitor};
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::OnceLock;

pub(crate) const NVML: LibraryName = LibraryName {
    title: "NVML (libnvidia-ml)",
    files: &["libnvidia-ml.so.1"],
    wheels: &[],
    needed_for: "utilisation, power and temperature of GPUs",
    hint: "it comes with NVIDIA's driver; training does not need it",
};

/// `nvmlUtilization_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Utilisation {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

functions! {
    Nvml:
    init = "nvmlInit_v2" ();
    driver_version = "nvmlSystemGetDriverVersion" (*mut c_char, c_uint);
    handle = "nvmlDeviceGetHandleByPciBusId_v2" (*const c_char, *mut Handle);
    utilisation = "nvmlDeviceGetUtilizationRates" (Handle, *mut Utilisation);
    memory = "nvmlDeviceGetMemoryInfo" (Handle, *mut MemoryInfo);
    power = "nvmlDeviceGetPowerUsage" (Handle, *mut c_uint);
    power_limit = "nvmlDeviceGetEnforcedPowerLimit" (Handle, *mut c_uint);
    temperature = "nvmlDeviceGetTemperature" (Handle, c_uint, *mut c_uint);
}

/// `NVML_TEMPERATURE_GPU`.
const OF_THE_GPU: c_uint = 0;
/// Bytes of a version, and of a bus's number, as the libraries write them.
const TEXT_BYTES: usize = 96;
const MILLIWATTS_PER_WATT: f64 = 1000.0;

impl Nvml {
    /// The library, initialised. The first answer stays.
    pub fn get() -> Result<&'static Self, CudaError> {
        static LOADED: OnceLock<Result<Nvml, CudaError>> = OnceLock::new();
        LOADED.get_or_init(Self::open).as_ref().map_err(CudaError::clone)
    }

    fn open() -> Result<Self, CudaError> {
        let nvml = Self::load(&Library::open(NVML)?)?;
        // SAFETY: the first call of the library.
        nvml.check("nvmlInit", unsafe { (nvml.init)() })?;
        Ok(nvml)
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        let text = match code {
            0 => return Ok(()),
            3 => "not supported by this GPU",
            4 => "no permission",
            6 => "no such GPU",
            9 => "the driver is not loaded",
            15 => "the GPU has fallen off the bus",
            18 => "the library and the driver are of different versions",
            _ => "it failed",
        };
        Err(CudaError::Call { call, device: "NVML".into(), code, text: text.into(), hint: NVML.hint })
    }

    /// The version of the kernel's driver, such as 580.95.05.
    pub fn version(&self) -> Result<String, CudaError> {
        let mut text = [0; TEXT_BYTES];
        // SAFETY: a place of as many bytes as said.
        let code = unsafe { (self.driver_version)(text.as_mut_ptr(), TEXT_BYTES as c_uint - 1) };
        self.check("nvmlSystemGetDriverVersion", code)?;
        // SAFETY: at least the last byte is zero.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }
}

/// A GPU as NVML knows it.
#[derive(Debug)]
pub(crate) struct GpuMonitor {
    nvml: &'static Nvml,
    device: Handle,
}

// SAFETY: the library's handles may be used from any thread.
unsafe impl Send for GpuMonitor {}
// SAFETY: as above.
unsafe impl Sync for GpuMonitor {}

impl GpuMonitor {
    /// The GPU of this number as the driver counts, which may be another one for NVML: the bus tells which.
    pub fn open(index: usize) -> Result<Self, CudaError> {
        let (driver, nvml) = (Driver::get()?, Nvml::get()?);
        let (mut number, mut bus) = (0, [0; TEXT_BYTES]);
        // SAFETY: the places of a number, and of as many bytes as said.
        unsafe {
            driver.check("cuDeviceGet", "the driver", (driver.device_get)(&mut number, index as c_int))?;
            let code = (driver.device_bus)(bus.as_mut_ptr(), TEXT_BYTES as c_int - 1, number);
            driver.check("cuDeviceGetPCIBusId", "the driver", code)?;
        }
        let mut device = std::ptr::null_mut();
        // SAFETY: a text that ends in a zero, and the place of a handle.
        nvml.check("nvmlDeviceGetHandleByPciBusId", unsafe { (nvml.handle)(bus.as_ptr(), &mut device) })?;
        Ok(Self { nvml, device })
    }
}

impl Monitor for GpuMonitor {
    fn read(&self) -> DeviceReading {
        let (nvml, device) = (self.nvml, self.device);
        let mut utilisation = Utilisation::default();
        let mut memory = MemoryInfo::default();
        let [mut power, mut limit, mut celsius] = [0; 3];
        // SAFETY: a device of the library, and the places of what each call writes.
        let known = unsafe {
            [
                (nvml.utilisation)(device, &mut utilisation),
                (nvml.memory)(device, &mut memory),
                (nvml.power)(device, &mut power),
                (nvml.power_limit)(device, &mut limit),
                (nvml.temperature)(device, OF_THE_GPU, &mut celsius),
            ]
            .map(|code| code == 0)
        };
        let watts = |known: bool, milliwatts: c_uint| known.then(|| f64::from(milliwatts) / MILLIWATTS_PER_WATT);
        DeviceReading {
            utilisation: known[0].then(|| f64::from(utilisation.gpu) / 100.0),
            memory_bytes: known[1].then_some([memory.used, memory.total]),
            power_watts: watts(known[2], power),
            power_limit_watts: watts(known[3], limit),
            celsius: known[4].then(|| f64::from(celsius)),
        }
    }
}
