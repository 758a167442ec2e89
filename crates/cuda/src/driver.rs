//! The CUDA driver: its functions, and the few types of its interface that we hold.

use crate::error::CudaError;
use crate::library::{Library, LibraryName, functions};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

pub(crate) type DevicePointer = u64;
pub(crate) type Handle = *mut c_void;

pub(crate) const DRIVER: LibraryName = LibraryName {
    title: "the NVIDIA driver (libcuda)",
    files: &["libcuda.so.1"],
    wheels: &[],
    needed_for: "`--device cuda`",
    hint: "install NVIDIA's driver, or use `--device cpu`",
};

/// CUDA 12.0: the first whose driver has every function here as we call it.
const VERSION_MIN: c_int = 12_000;

functions! {
    Driver:
    init = "cuInit" (c_uint);
    driver_version = "cuDriverGetVersion" (*mut c_int);
    device_count = "cuDeviceGetCount" (*mut c_int);
    device_get = "cuDeviceGet" (*mut c_int, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_bus = "cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
    device_uuid = "cuDeviceGetUuid_v2" (*mut [u8; 16], c_int);
    device_memory = "cuDeviceTotalMem_v2" (*mut usize, c_int);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    context_retain = "cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    context_set = "cuCtxSetCurrent" (Handle);
    memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    memory_alloc = "cuMemAlloc_v2" (*mut DevicePointer, usize);
    memory_free = "cuMemFree_v2" (DevicePointer);
    host_alloc = "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost" (*mut c_void);
    host_register = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    host_unregister = "cuMemHostUnregister" (*mut c_void);
    copy_to_device = "cuMemcpyHtoDAsync_v2" (DevicePointer, *const c_void, usize, Handle);
    copy_to_host = "cuMemcpyDtoHAsync_v2" (*mut c_void, DevicePointer, usize, Handle);
    copy_on_device = "cuMemcpyDtoDAsync_v2" (DevicePointer, DevicePointer, usize, Handle);
    copy_rows = "cuMemcpy2DAsync_v2" (*const RowCopy, Handle);
    set_bytes = "cuMemsetD8Async" (DevicePointer, u8, usize, Handle);
    stream_create = "cuStreamCreate" (*mut Handle, c_uint);
    stream_destroy = "cuStreamDestroy_v2" (Handle);
    stream_synchronize = "cuStreamSynchronize" (Handle);
    stream_wait = "cuStreamWaitEvent" (Handle, Handle, c_uint);
    stream_begin_capture = "cuStreamBeginCapture_v2" (Handle, c_uint);
    stream_end_capture = "cuStreamEndCapture" (Handle, *mut Handle);
    graph_instantiate = "cuGraphInstantiateWithFlags" (*mut Handle, Handle, u64);
    graph_launch = "cuGraphLaunch" (Handle, Handle);
    graph_exec_destroy = "cuGraphExecDestroy" (Handle);
    graph_destroy = "cuGraphDestroy" (Handle);
    event_create = "cuEventCreate" (*mut Handle, c_uint);
    event_destroy = "cuEventDestroy_v2" (Handle);
    event_record = "cuEventRecord" (Handle, Handle);
    event_synchronize = "cuEventSynchronize" (Handle);
    event_elapsed = "cuEventElapsedTime" (*mut f32, Handle, Handle);
    event_query = "cuEventQuery" (Handle);
    module_load = "cuModuleLoadData" (*mut Handle, *const c_void);
    module_function = "cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    function_attribute = "cuFuncSetAttribute" (Handle, c_int, c_int);
    launch = "cuLaunchKernel" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
    error_name = "cuGetErrorName" (c_int, *mut *const c_char);
    error_text = "cuGetErrorString" (c_int, *mut *const c_char);
}

/// One side of a `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowSide {
    pub x_bytes: usize,
    pub y: usize,
    /// `CUmemorytype`.
    pub memory: c_uint,
    pub host: *const c_void,
    pub device: DevicePointer,
    pub array: Handle,
    pub pitch_bytes: usize,
}

impl RowSide {
    /// Rows in memory of the device.
    pub fn new(device: DevicePointer, pitch_bytes: usize) -> Self {
        let (host, array) = (std::ptr::null(), std::ptr::null_mut());
        Self { x_bytes: 0, y: 0, memory: MEMORY_OF_DEVICE, host, device, array, pitch_bytes }
    }
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowCopy {
    pub from: RowSide,
    pub to: RowSide,
    pub width_bytes: usize,
    pub height: usize,
}

const MEMORY_OF_DEVICE: c_uint = 2;
/// `CUDA_ERROR_NOT_READY`: what was asked for has not happened yet.
pub(crate) const NOT_READY: c_int = 600;

/// `CUdevice_attribute`.
pub(crate) mod attribute {
    pub const MULTIPROCESSORS: i32 = 16;
    pub const CAPABILITY_MAJOR: i32 = 75;
    pub const CAPABILITY_MINOR: i32 = 76;
    pub const SHARED_BYTES_MAX: i32 = 97;
}
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
pub(crate) const DYNAMIC_SHARED_BYTES: i32 = 8;
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
pub(crate) const EVENT_TIMED: c_uint = 0;
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
/// Other threads may go on to call what a capture could not hold.
pub(crate) const CAPTURE_THREAD_LOCAL: c_uint = 1;
const NO_DEVICE: c_int = 100;

/// What to do about codes of `CUresult` that are not kolo's mistakes.
const HINTS: &[(&[c_int], &str)] = &[
    (&[2], "another process may use the GPU (`nvidia-smi`); else see `[memory]` in the guide"),
    (&[34], "the library found is the toolkit's stub: take its folder out of LD_LIBRARY_PATH"),
    (&[46], "another process uses the GPU exclusively: check `nvidia-smi`"),
    (
        &[4, 62, 63, 214, 221, 224, 226, 719, 720, 910],
        "the GPU failed or was lost: check `nvidia-smi` and `dmesg` (Xid), restart the machine if it does not come back, and \
         continue from the last checkpoint with `--resume`",
    ),
    (
        &[700, 715, 716, 717, 718],
        "a kernel failed: report it with the output of `kolo devices`; continue from a checkpoint with `--resume`",
    ),
    (&[802], "the system is not ready: on machines with NVSwitch, start nvidia-fabricmanager"),
    (&[803, 804], "the driver's library and its kernel module are of different versions: restart after the update"),
];
const OTHER_HINT: &str =
    "if it happens again, check `nvidia-smi` and `dmesg`; continue from a checkpoint with `--resume`";

impl Driver {
    /// The driver, initialised. The first answer stays: a driver does not come while the program runs.
    pub fn get() -> Result<&'static Self, CudaError> {
        static LOADED: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
        LOADED.get_or_init(Self::open).as_ref().map_err(CudaError::clone)
    }

    fn open() -> Result<Self, CudaError> {
        let driver = Self::load(&Library::open(DRIVER)?)?;
        // SAFETY: the first call of the driver, with the only flags there are.
        match unsafe { (driver.init)(0) } {
            NO_DEVICE => return Err(CudaError::NoDevice),
            code => driver.check("cuInit", "the driver", code)?,
        }
        let found = driver.version()?;
        if found < VERSION_MIN {
            return Err(CudaError::OldDriver { found: version_text(found), needed: version_text(VERSION_MIN) });
        }
        Ok(driver)
    }

    /// As 13000 for CUDA 13.0.
    pub fn version(&self) -> Result<c_int, CudaError> {
        let mut version = 0;
        // SAFETY: the place of a number.
        self.check("cuDriverGetVersion", "the driver", unsafe { (self.driver_version)(&mut version) })?;
        Ok(version)
    }

    pub fn device_count(&self) -> Result<usize, CudaError> {
        let mut count = 0;
        // SAFETY: the place of a number.
        self.check("cuDeviceGetCount", "the driver", unsafe { (self.device_count)(&mut count) })?;
        Ok(count.max(0) as usize)
    }

    /// An error of the code, if it is one.
    pub fn check(&self, call: &'static str, device: &str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
        // SAFETY: the driver writes addresses of texts that live as long as it, or leaves null.
        let words = unsafe {
            (self.error_name)(code, &mut name);
            (self.error_text)(code, &mut text);
            [name, text].map(|words| if words.is_null() { "".into() } else { CStr::from_ptr(words).to_string_lossy() })
        };
        let text = if words[0].is_empty() { "unknown error".into() } else { words.join(", ") };
        let hint = HINTS.iter().find(|(codes, _)| codes.contains(&code)).map_or(OTHER_HINT, |(_, hint)| hint);
        Err(CudaError::Call { call, device: device.into(), code, text, hint })
    }
}

/// Such as 13.0.
pub(crate) fn version_text(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}
