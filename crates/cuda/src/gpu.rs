//! One GPU of this process: its context, its streams, and what kernels were loaded on it.

use crate::convolutions::{self, Convolutions};
use crate::driver::{self, Driver, Handle, attribute};
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::products::Products;
use kolo_base::lock;
use kolo_graph::cuda::CudaTarget;
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_uint};
use std::sync::{Arc, Mutex};

/// Bytes of a device's name, as the driver writes it.
const NAME_BYTES: usize = 128;
/// Ampere: the first with conversions to bf16 and with asynchronous copies.
const CAPABILITY_MIN: (u32, u32) = (8, 0);

/// What the driver says of a device without a context on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    pub index: usize,
    pub name: String,
    pub memory_bytes: usize,
    pub target: CudaTarget,
}

impl DeviceInfo {
    fn read(driver: &Driver, index: usize) -> Result<(Self, c_int), CudaError> {
        let mut device = 0;
        // SAFETY: the place of a number; the index was compared with the count.
        driver.check("cuDeviceGet", "the driver", unsafe { (driver.device_get)(&mut device, index as c_int) })?;
        let mut name = [0; NAME_BYTES];
        // SAFETY: a place of as many bytes as said.
        let code = unsafe { (driver.device_name)(name.as_mut_ptr(), NAME_BYTES as c_int, device) };
        driver.check("cuDeviceGetName", "the driver", code)?;
        name[NAME_BYTES - 1] = 0;
        // SAFETY: it ends in a zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut memory_bytes = 0;
        // SAFETY: the place of a number.
        let code = unsafe { (driver.device_memory)(&mut memory_bytes, device) };
        driver.check("cuDeviceTotalMem", &name, code)?;
        let number = |attribute: c_int| -> Result<u32, CudaError> {
            let mut number = 0;
            // SAFETY: as above.
            let code = unsafe { (driver.device_attribute)(&mut number, attribute, device) };
            driver.check("cuDeviceGetAttribute", &name, code)?;
            Ok(number.max(0) as u32)
        };
        let target = CudaTarget {
            capability: (number(attribute::CAPABILITY_MAJOR)?, number(attribute::CAPABILITY_MINOR)?),
            multiprocessors: number(attribute::MULTIPROCESSORS)?,
            shared_bytes_max: number(attribute::SHARED_BYTES_MAX)? as usize,
            tf32: false,
            convolutions: convolutions::is_there(),
        };
        Ok((Self { index, name, memory_bytes, target }, device))
    }
}

/// All devices that the driver knows.
pub fn devices() -> Result<Vec<DeviceInfo>, CudaError> {
    let driver = Driver::get()?;
    (0..driver.device_count()?).map(|index| Ok(DeviceInfo::read(driver, index)?.0)).collect()
}

/// A GPU that this process uses. There is one of it per device for the life of the process.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub driver: &'static Driver,
    pub info: DeviceInfo,
    context: Handle,
    /// Everything that computes, in its order.
    pub compute: Stream,
    /// Copies to the host and from it beside what computes, for what the host updates.
    pub to_host: Stream,
    pub from_host: Stream,
    pub kernels: Kernels,
    pub products: Products,
    pub convolutions: Convolutions,
}

// SAFETY: the driver's handles may be used from any thread; each call enters the context first.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

thread_local! {
    /// The context that is current on this thread.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

impl Gpu {
    /// The device of this index, the first time with a context of its own.
    pub fn open(index: usize) -> Result<Arc<Self>, CudaError> {
        static OPEN: Mutex<Option<HashMap<usize, Arc<Gpu>>>> = Mutex::new(None);
        let mut open = lock(&OPEN);
        let open = open.get_or_insert_default();
        if let Some(gpu) = open.get(&index) {
            return Ok(Arc::clone(gpu));
        }
        let gpu = Arc::new(Self::new(index)?);
        open.insert(index, Arc::clone(&gpu));
        Ok(gpu)
    }

    fn new(index: usize) -> Result<Self, CudaError> {
        let driver = Driver::get()?;
        let version = driver.version()?;
        Self::of_driver(driver, index, |info| Kernels::new(info.target.capability, version))
    }

    /// The device of this index, and with it the kernels that are made for it.
    pub fn of_driver(
        driver: &'static Driver,
        index: usize,
        kernels: impl FnOnce(&DeviceInfo) -> Kernels,
    ) -> Result<Self, CudaError> {
        let count = driver.device_count()?;
        if count == 0 {
            return Err(CudaError::NoDevice);
        }
        if index >= count {
            return Err(CudaError::NoSuchDevice { index, count });
        }
        let (info, device) = DeviceInfo::read(driver, index)?;
        if info.target.capability < CAPABILITY_MIN {
            let text = |(major, minor): (u32, u32)| format!("{major}.{minor}");
            let (found, needed) = (text(info.target.capability), text(CAPABILITY_MIN));
            return Err(CudaError::OldDevice { device: info.name, found, needed });
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: the place of a handle; the context is never released.
        let code = unsafe { (driver.context_retain)(&mut context, device) };
        driver.check("cuDevicePrimaryCtxRetain", &info.name, code)?;
        enter(driver, context, &info.name)?;
        let stream = || Stream::new(driver, &info.name);
        let (compute, to_host, from_host) = (stream()?, stream()?, stream()?);
        let kernels = kernels(&info);
        let (products, convolutions) = (Products::default(), Convolutions::default());
        Ok(Self { driver, info, context, compute, to_host, from_host, kernels, products, convolutions })
    }

    /// Which device it is; no other in the world has the same number.
    pub fn uuid(&self) -> Result<[u8; 16], CudaError> {
        let (mut device, mut uuid) = (0, [0; 16]);
        // SAFETY: the places of a number and of 16 bytes; the index was compared with the count.
        let code = unsafe {
            match (self.driver.device_get)(&mut device, self.info.index as c_int) {
                0 => (self.driver.device_uuid)(&mut uuid, device),
                code => code,
            }
        };
        self.check("cuDeviceGetUuid", code)?;
        Ok(uuid)
    }

    /// One more stream.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        self.enter()?;
        Stream::new(self.driver, &self.info.name)
    }

    /// Makes its context this thread's.
    pub fn enter(&self) -> Result<(), CudaError> {
        enter(self.driver, self.context, &self.info.name)
    }

    pub fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        self.driver.check(call, &self.info.name, code)
    }

    /// Bytes that are free on the device now.
    pub fn free_bytes(&self) -> Result<usize, CudaError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the places of two numbers.
        self.check("cuMemGetInfo", unsafe { (self.driver.memory_info)(&mut free, &mut total) })?;
        Ok(free)
    }

    /// Lets a stream go on only after an event.
    pub fn wait_in(&self, stream: &Stream, event: &Event) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: a stream and an event of this context; no flags.
        self.check("cuStreamWaitEvent", unsafe { (self.driver.stream_wait)(stream.handle, event.handle, 0) })
    }

    /// Waits for everything that was started on its compute stream.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: a stream of this context.
        self.check("cuStreamSynchronize", unsafe { (self.driver.stream_synchronize)(self.compute.handle) })
    }
}

fn enter(driver: &Driver, context: Handle, name: &str) -> Result<(), CudaError> {
    if CURRENT.get() == context as usize {
        return Ok(());
    }
    // SAFETY: a context that is never released.
    driver.check("cuCtxSetCurrent", name, unsafe { (driver.context_set)(context) })?;
    CURRENT.set(context as usize);
    Ok(())
}

/// Calls that run one after the other.
#[derive(Debug)]
pub(crate) struct Stream {
    pub handle: Handle,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// The context must be current. Those of a GPU live as long as the process.
    fn new(driver: &Driver, name: &str) -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place of a handle.
        let code = unsafe { (driver.stream_create)(&mut handle, driver::STREAM_NON_BLOCKING) };
        driver.check("cuStreamCreate", name, code)?;
        Ok(Self { handle })
    }
}

/// A moment in a stream.
#[derive(Debug)]
pub(crate) struct Event {
    handle: Handle,
    gpu: Arc<Gpu>,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        Self::of_kind(gpu, driver::EVENT_DISABLE_TIMING)
    }

    /// One that knows its time.
    pub fn timed(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        Self::of_kind(gpu, driver::EVENT_TIMED)
    }

    fn of_kind(gpu: &Arc<Gpu>, flags: c_uint) -> Result<Self, CudaError> {
        gpu.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place of a handle.
        gpu.check("cuEventCreate", unsafe { (gpu.driver.event_create)(&mut handle, flags) })?;
        Ok(Self { handle, gpu: Arc::clone(gpu) })
    }

    /// Milliseconds from another event to this one, both of which know their time and have happened.
    pub fn ms_since(&self, before: &Event) -> Result<f32, CudaError> {
        self.gpu.enter()?;
        let mut ms = 0.0;
        // SAFETY: the place of a number, and events of this context.
        let code = unsafe { (self.gpu.driver.event_elapsed)(&mut ms, before.handle, self.handle) };
        self.gpu.check("cuEventElapsedTime", code)?;
        Ok(ms)
    }

    /// Now, in the order of the compute stream.
    pub fn record(&self) -> Result<(), CudaError> {
        self.record_in(&self.gpu.compute)
    }

    /// Now, in the order of a stream.
    pub fn record_in(&self, stream: &Stream) -> Result<(), CudaError> {
        self.gpu.enter()?;
        // SAFETY: an event and a stream of this context.
        self.gpu.check("cuEventRecord", unsafe { (self.gpu.driver.event_record)(self.handle, stream.handle) })
    }

    /// Whether it has happened. One that was never recorded has.
    pub fn has_happened(&self) -> Result<bool, CudaError> {
        self.gpu.enter()?;
        // SAFETY: an event of this context.
        match unsafe { (self.gpu.driver.event_query)(self.handle) } {
            driver::NOT_READY => Ok(false),
            code => self.gpu.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits until it has happened. One that was never recorded has.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.gpu.enter()?;
        // SAFETY: an event of this context.
        self.gpu.check("cuEventSynchronize", unsafe { (self.gpu.driver.event_synchronize)(self.handle) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: an event of this context that nobody else has. What fails here is told by the next call that matters.
            unsafe { (self.gpu.driver.event_destroy)(self.handle) };
        }
    }
}
