//! An op's calls with every operand an address: what a device does for one item of the schedule.

use crate::convolutions::ConvolutionCall;
use crate::driver::{DevicePointer, Handle};
use crate::error::CudaError;
use crate::fetches::FetchCall;
use crate::gpu::{Gpu, Stream};
use crate::memory;
use crate::products::ProductCall;
use kolo_graph::cuda::{CudaArg, CudaBuffer, CudaCall, CudaPlace, Launch, Product};
use std::ffi::c_void;
use std::sync::Arc;

/// One thing to start on the compute stream.
#[derive(Debug)]
pub(crate) enum Command {
    Launch(LaunchCall),
    Product(ProductCall),
    Convolution(ConvolutionCall),
    Fill {
        to: DevicePointer,
        bytes: usize,
    },
    Copy {
        from: DevicePointer,
        to: DevicePointer,
        bytes: usize,
    },
    /// A weight comes from the host.
    Fetch(Arc<FetchCall>),
    /// It has to be there.
    Await(Arc<FetchCall>),
}

/// A kernel with its arguments, each in eight bytes of its own.
#[derive(Debug)]
pub(crate) struct LaunchCall {
    function: Handle,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    args: Vec<u64>,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for LaunchCall {}
// SAFETY: as above.
unsafe impl Sync for LaunchCall {}

/// Where the operands of an op are.
#[derive(Clone, Debug)]
pub(crate) struct Operands {
    pub inputs: Vec<DevicePointer>,
    pub outputs: Vec<DevicePointer>,
    pub scratch: DevicePointer,
}

impl Operands {
    fn address(&self, place: CudaPlace) -> DevicePointer {
        let base = match place.buffer {
            CudaBuffer::Input(at) => self.inputs[at],
            CudaBuffer::Output(at) => self.outputs[at],
            CudaBuffer::Scratch => self.scratch,
        };
        base + place.offset as u64
    }
}

impl Command {
    pub fn new(gpu: &Arc<Gpu>, call: &CudaCall, operands: &Operands, tf32: bool) -> Result<Option<Self>, CudaError> {
        Ok(match call {
            CudaCall::Launch(launch) => {
                let value = |arg: &CudaArg| match *arg {
                    CudaArg::Address(place) => operands.address(place),
                    CudaArg::I32(value) => u64::from(value as u32),
                    CudaArg::I64(value) => value as u64,
                    CudaArg::U64(value) => value,
                    CudaArg::F32(value) => u64::from(value.to_bits()),
                };
                Some(Self::launch(gpu, launch, launch.args.iter().map(value).collect())?)
            }
            CudaCall::Product(product) => Self::product(gpu, product, operands, tf32)?,
            CudaCall::Convolution(convolution) => {
                let places = [convolution.image, convolution.weight, convolution.grid, convolution.workspace];
                let addresses = places.map(|place| operands.address(place));
                Some(Command::Convolution(gpu.convolutions.compile(gpu, &convolution.kind, tf32, addresses)?))
            }
            CudaCall::Zero { to, bytes } => Some(Command::Fill { to: operands.address(*to), bytes: *bytes }),
            CudaCall::Copy { from, to, bytes } => {
                Some(Command::Copy { from: operands.address(*from), to: operands.address(*to), bytes: *bytes })
            }
        })
    }

    /// A launch with these arguments, if its grid has any block.
    pub fn launch(gpu: &Gpu, launch: &Launch, args: Vec<u64>) -> Result<Self, CudaError> {
        let function = gpu.kernels.function(gpu, launch)?;
        let (grid, block, shared_bytes) = (launch.grid, launch.block, launch.shared_bytes as u32);
        Ok(Command::Launch(LaunchCall { function, grid, block, shared_bytes, args }))
    }

    /// The same as what it is.
    pub fn launch_call(gpu: &Gpu, launch: &Launch) -> Result<LaunchCall, CudaError> {
        match Self::launch(gpu, launch, Vec::new())? {
            Command::Launch(call) => Ok(call),
            _ => Err(CudaError::Other("a launch is a launch".into())),
        }
    }

    fn product(gpu: &Arc<Gpu>, product: &Product, operands: &Operands, tf32: bool) -> Result<Option<Self>, CudaError> {
        let Product { rows, columns, depth, batch, a, b, c, beta, .. } = product;
        if rows * columns * batch == 0 {
            return Ok(None);
        }
        let place = |place: CudaPlace| operands.address(place);
        if *depth == 0 {
            let whole = c.row_stride == *columns && (*batch == 1 || c.batch_stride == rows * columns);
            if *beta != 0.0 || product.bias.is_some() || !whole {
                return Err(CudaError::Other("a product over nothing must fill a whole tensor with zeros".into()));
            }
            let bytes = batch * rows * columns * c.dtype.bytes();
            return Ok(Some(Command::Fill { to: place(c.place), bytes }));
        }
        let addresses = [a, b, c].map(|matrix| place(matrix.place));
        let call = gpu.products.compile(gpu, product, tf32, addresses, product.bias.map(place))?;
        Ok(Some(Command::Product(call)))
    }

    /// Starts it.
    pub fn start(&self, gpu: &Arc<Gpu>) -> Result<(), CudaError> {
        match self {
            Command::Launch(call) => call.start(gpu),
            Command::Product(call) => gpu.products.run(gpu, call),
            Command::Convolution(call) => gpu.convolutions.run(gpu, call),
            Command::Fill { to, bytes } => memory::fill(gpu, *to, 0, *bytes),
            Command::Copy { from, to, bytes } => memory::copy(gpu, *from, *to, *bytes),
            Command::Fetch(call) => call.start(gpu),
            Command::Await(call) => call.wait(gpu),
        }
    }
}

impl LaunchCall {
    fn start(&self, gpu: &Gpu) -> Result<(), CudaError> {
        self.start_with(gpu, &self.args)
    }

    /// The same kernel with other arguments.
    pub fn start_with(&self, gpu: &Gpu, args: &[u64]) -> Result<(), CudaError> {
        self.start_in(gpu, &gpu.compute, args)
    }

    /// The same in the order of a stream.
    pub fn start_in(&self, gpu: &Gpu, stream: &Stream, args: &[u64]) -> Result<(), CudaError> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        gpu.enter()?;
        let mut places = [std::ptr::null_mut::<c_void>(); ARGS_MAX];
        assert!(args.len() <= ARGS_MAX, "a kernel takes at most {ARGS_MAX} arguments");
        for (place, arg) in places.iter_mut().zip(args) {
            *place = std::ptr::from_ref(arg).cast_mut().cast();
        }
        let ([x, y, z], [bx, by, bz]) = (self.grid, self.block);
        // SAFETY: a kernel of this context; the driver copies its arguments, which the op lists in the kernel's order, from
        // eight bytes each.
        let code = unsafe {
            (gpu.driver.launch)(
                self.function,
                x,
                y,
                z,
                bx,
                by,
                bz,
                self.shared_bytes,
                stream.handle,
                places.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        gpu.check("cuLaunchKernel", code)
    }
}

/// Arguments of one kernel.
pub(crate) const ARGS_MAX: usize = 96;
