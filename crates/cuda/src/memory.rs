//! Memory of the device, and memory of the host that the device can reach.

use crate::driver::{DevicePointer, RowCopy, RowSide};
use crate::error::CudaError;
use crate::gpu::{Gpu, Stream};
use kolo_exec::{Memory, Rows};
use kolo_graph::layout::ALIGNMENT;
use std::ffi::c_void;
use std::sync::Arc;

/// One allocation on a GPU.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    gpu: Arc<Gpu>,
    address: DevicePointer,
    bytes: usize,
}

impl DeviceMemory {
    /// So many bytes, with any content.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        gpu.enter()?;
        let (mut address, bytes) = (0, bytes.max(ALIGNMENT));
        // SAFETY: the place of an address.
        gpu.check("cuMemAlloc", unsafe { (gpu.driver.memory_alloc)(&mut address, bytes) })?;
        Ok(Self { gpu: Arc::clone(gpu), address, bytes })
    }

    /// The same, all zeros.
    pub fn zeroed(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        let memory = Self::new(gpu, bytes)?;
        memory.fill(0)?;
        Ok(memory)
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn at(&self, offset: usize) -> DevicePointer {
        assert!(offset <= self.bytes, "offset {offset} is outside {} bytes", self.bytes);
        self.address + offset as u64
    }

    /// Writes this byte everywhere, in the order of the compute stream.
    pub fn fill(&self, byte: u8) -> Result<(), CudaError> {
        fill(&self.gpu, self.address, byte, self.bytes)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // What still runs may use it.
        if self.gpu.synchronize().is_ok() {
            // SAFETY: allocated here, and nobody else has it. A GPU that failed has given everything back already.
            unsafe { (self.gpu.driver.memory_free)(self.address) };
        }
    }
}

/// Writes a byte to so many places on the device, in the order of the compute stream.
pub(crate) fn fill(gpu: &Gpu, to: DevicePointer, byte: u8, bytes: usize) -> Result<(), CudaError> {
    if bytes == 0 {
        return Ok(());
    }
    gpu.enter()?;
    // SAFETY: whoever calls has that many bytes there.
    gpu.check("cuMemsetD8Async", unsafe { (gpu.driver.set_bytes)(to, byte, bytes, gpu.compute.handle) })
}

/// Copies from one place on the device to another one, in the order of the compute stream.
pub(crate) fn copy(gpu: &Gpu, from: DevicePointer, to: DevicePointer, bytes: usize) -> Result<(), CudaError> {
    if bytes == 0 || from == to {
        return Ok(());
    }
    gpu.enter()?;
    // SAFETY: whoever calls has that many bytes at both places.
    gpu.check("cuMemcpyDtoDAsync", unsafe { (gpu.driver.copy_on_device)(to, from, bytes, gpu.compute.handle) })
}

/// Copies rows of bytes from one place on the device to another one, in the order of the compute stream.
pub(crate) fn copy_rows(gpu: &Gpu, rows: &Rows) -> Result<(), CudaError> {
    let &Rows { from, to, rows, bytes, from_stride, to_stride } = rows;
    if rows == 1 {
        return copy(gpu, from as DevicePointer, to as DevicePointer, bytes);
    }
    if rows == 0 || bytes == 0 {
        return Ok(());
    }
    gpu.enter()?;
    let from = RowSide::new(from as DevicePointer, from_stride);
    let copy = RowCopy { from, to: RowSide::new(to as DevicePointer, to_stride), width_bytes: bytes, height: rows };
    // SAFETY: whoever calls has all rows at both places.
    gpu.check("cuMemcpy2DAsync", unsafe { (gpu.driver.copy_rows)(&copy, gpu.compute.handle) })
}

/// Starts a copy to the device, in the order of the compute stream. The host's memory must stay as it is until that has happened.
pub(crate) fn upload(gpu: &Gpu, from: *const u8, to: DevicePointer, bytes: usize) -> Result<(), CudaError> {
    upload_in(gpu, &gpu.compute, from, to, bytes)
}

/// The same in the order of a stream.
pub(crate) fn upload_in(
    gpu: &Gpu,
    stream: &Stream,
    from: *const u8,
    to: DevicePointer,
    bytes: usize,
) -> Result<(), CudaError> {
    if bytes == 0 {
        return Ok(());
    }
    gpu.enter()?;
    // SAFETY: whoever calls has that many bytes at both places.
    let code = unsafe { (gpu.driver.copy_to_device)(to, from.cast::<c_void>(), bytes, stream.handle) };
    gpu.check("cuMemcpyHtoDAsync", code)
}

/// Starts a copy to the host, likewise.
pub(crate) fn download(gpu: &Gpu, from: DevicePointer, to: *mut u8, bytes: usize) -> Result<(), CudaError> {
    download_in(gpu, &gpu.compute, from, to, bytes)
}

/// The same in the order of a stream.
pub(crate) fn download_in(
    gpu: &Gpu,
    stream: &Stream,
    from: DevicePointer,
    to: *mut u8,
    bytes: usize,
) -> Result<(), CudaError> {
    if bytes == 0 {
        return Ok(());
    }
    gpu.enter()?;
    // SAFETY: as above.
    let code = unsafe { (gpu.driver.copy_to_host)(to.cast::<c_void>(), from, bytes, stream.handle) };
    gpu.check("cuMemcpyDtoHAsync", code)
}

/// Memory of the device for what is exchanged, which the host cannot read. It is zeroed.
pub(crate) fn exchanged(gpu: &Arc<Gpu>, bytes: usize) -> Result<Memory, CudaError> {
    let memory = DeviceMemory::zeroed(gpu, bytes)?;
    // SAFETY: an address of the device, zeroed and kept by the keeper; nobody on the host reads there.
    Ok(unsafe { Memory::kept(memory.at(0) as *mut u8, memory.bytes, Box::new(memory)) })
}

/// Gives pinned memory back.
#[derive(Debug)]
struct Pinned {
    gpu: Arc<Gpu>,
    address: usize,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.gpu.synchronize().is_ok() {
            // SAFETY: allocated by `pinned`, and given back once.
            unsafe { (self.gpu.driver.host_free)(self.address as *mut c_void) };
        }
    }
}

/// Zeroed memory of the host that the device copies from and to without the host's help.
pub(crate) fn pinned(gpu: &Arc<Gpu>, bytes: usize) -> Result<Memory, CudaError> {
    gpu.enter()?;
    let (mut address, bytes) = (std::ptr::null_mut::<c_void>(), bytes.max(ALIGNMENT));
    // SAFETY: the place of an address; no flags.
    gpu.check("cuMemHostAlloc", unsafe { (gpu.driver.host_alloc)(&mut address, bytes, 0) })?;
    // SAFETY: that many bytes were allocated.
    unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, bytes) };
    let keeper = Box::new(Pinned { gpu: Arc::clone(gpu), address: address as usize });
    // SAFETY: pages of the driver, zeroed above and kept by the keeper.
    Ok(unsafe { Memory::kept(address.cast(), bytes, keeper) })
}

/// Memory of the host that was made for something else, pinned as long as this lives.
#[derive(Debug)]
pub(crate) struct Registered {
    gpu: Arc<Gpu>,
    memory: Arc<Memory>,
}

impl Registered {
    /// `None` if the driver refuses: copies then take a way through memory of the driver's.
    pub fn new(gpu: &Arc<Gpu>, memory: &Arc<Memory>) -> Option<Self> {
        gpu.enter().ok()?;
        // SAFETY: memory that lives as long as this; no flags.
        let code = unsafe { (gpu.driver.host_register)(memory.at(0).cast(), memory.bytes(), 0) };
        (code == 0).then(|| Self { gpu: Arc::clone(gpu), memory: Arc::clone(memory) })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if self.gpu.synchronize().is_ok() {
            // SAFETY: registered above, and the memory is still there.
            unsafe { (self.gpu.driver.host_unregister)(self.memory.at(0).cast()) };
        }
    }
}
