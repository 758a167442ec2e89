//! Convolutions by cuDNN.
//!
//! Of the library's algorithms those are used that add in one order: the implicit products. Which kernel one of them is, is the
//! library's choice by sizes, types and its own version; nothing is timed. So the same convolution has the same bits in every run and
//! on every rank.

use crate::description::Description;
use crate::driver::{DevicePointer, Handle};
use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::library::{Library, LibraryName, functions};
use kolo_base::lock;
use kolo_graph::DType;
use kolo_graph::cuda::{ConvolutionKind, ConvolutionPass};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, OnceLock};

pub(crate) const CUDNN: LibraryName = LibraryName {
    title: "cuDNN (libcudnn)",
    files: &["libcudnn.so.9"],
    wheels: &["cudnn"],
    needed_for: "fast convolutions on the GPU (without it they run on slower kernels)",
    hint: "`pip install nvidia-cudnn-cu13` (or -cu12, as the driver is) and set VIRTUAL_ENV or LD_LIBRARY_PATH",
};

functions! {
    Cudnn:
    version = "cudnnGetVersion" ();
    create = "cudnnCreate" (*mut Handle);
    set_stream = "cudnnSetStream" (Handle, Handle);
    tensor_create = "cudnnCreateTensorDescriptor" (*mut Handle);
    tensor_set = "cudnnSetTensor4dDescriptor" (Handle, c_int, c_int, c_int, c_int, c_int, c_int);
    tensor_destroy = "cudnnDestroyTensorDescriptor" (Handle);
    filter_create = "cudnnCreateFilterDescriptor" (*mut Handle);
    filter_set = "cudnnSetFilter4dDescriptor" (Handle, c_int, c_int, c_int, c_int, c_int, c_int);
    filter_destroy = "cudnnDestroyFilterDescriptor" (Handle);
    convolution_create = "cudnnCreateConvolutionDescriptor" (*mut Handle);
    convolution_set = "cudnnSetConvolution2dDescriptor" (
        Handle, c_int, c_int, c_int, c_int, c_int, c_int, c_int, c_int
    );
    convolution_math = "cudnnSetConvolutionMathType" (Handle, c_int);
    convolution_groups = "cudnnSetConvolutionGroupCount" (Handle, c_int);
    convolution_destroy = "cudnnDestroyConvolutionDescriptor" (Handle);
    forward_workspace = "cudnnGetConvolutionForwardWorkspaceSize" (
        Handle, Handle, Handle, Handle, Handle, c_int, *mut usize
    );
    image_workspace = "cudnnGetConvolutionBackwardDataWorkspaceSize" (
        Handle, Handle, Handle, Handle, Handle, c_int, *mut usize
    );
    weight_workspace = "cudnnGetConvolutionBackwardFilterWorkspaceSize" (
        Handle, Handle, Handle, Handle, Handle, c_int, *mut usize
    );
    forward = "cudnnConvolutionForward" (
        Handle, *const c_void, Handle, DevicePointer, Handle, DevicePointer, Handle, c_int, DevicePointer, usize,
        *const c_void, Handle, DevicePointer
    );
    image = "cudnnConvolutionBackwardData" (
        Handle, *const c_void, Handle, DevicePointer, Handle, DevicePointer, Handle, c_int, DevicePointer, usize,
        *const c_void, Handle, DevicePointer
    );
    weight = "cudnnConvolutionBackwardFilter" (
        Handle, *const c_void, Handle, DevicePointer, Handle, DevicePointer, Handle, c_int, DevicePointer, usize,
        *const c_void, Handle, DevicePointer
    );
}

/// `cudnnTensorFormat_t`, `cudnnMathType_t`, `cudnnConvolutionMode_t`, and f32 of `cudnnDataType_t`.
const CHANNELS_FIRST: c_int = 0;
const CHANNELS_LAST: c_int = 1;
const MATH_DEFAULT: c_int = 0;
const MATH_TENSOR_CORES: c_int = 1;
const MATH_EXACT: c_int = 3;
const CROSS_CORRELATION: c_int = 1;
const F32: c_int = 0;

/// The algorithms to try, in this order; each adds its terms in one order. With precomputed indices, then without.
const FORWARD: &[c_int] = &[1, 0];
const BACKWARD: &[c_int] = &[1];

/// Whether the library can be opened.
pub(crate) fn is_there() -> bool {
    version().is_ok()
}

/// The library's version as its makers write it.
pub(crate) fn version() -> Result<String, CudaError> {
    let number = functions()?.version_number();
    Ok(format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100))
}

fn functions() -> Result<&'static Cudnn, CudaError> {
    static FUNCTIONS: OnceLock<Result<Cudnn, CudaError>> = OnceLock::new();
    FUNCTIONS.get_or_init(|| Cudnn::load(&Library::open(CUDNN)?)).as_ref().map_err(CudaError::clone)
}

impl Cudnn {
    fn version_number(&self) -> c_int {
        // SAFETY: it takes nothing and gives a number, which fits.
        unsafe { (self.version)() }
    }
}

/// The library on one GPU, opened with the first convolution.
#[derive(Debug, Default)]
pub(crate) struct Convolutions {
    open: OnceLock<Result<Open, CudaError>>,
    /// What was found for each kind, and whether in TF32.
    known: Mutex<HashMap<(ConvolutionKind, bool), Option<c_int>>>,
}

#[derive(Debug)]
struct Open {
    functions: &'static Cudnn,
    /// One call at a time.
    handle: Mutex<LibraryHandle>,
}

#[derive(Debug)]
struct LibraryHandle(Handle);

// SAFETY: the library's handle may be used from any thread, one call at a time.
unsafe impl Send for LibraryHandle {}

impl Open {
    fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        let functions = functions()?;
        gpu.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place of a handle, in the context of this GPU.
        check(gpu, "cudnnCreate", unsafe { (functions.create)(&mut handle) })?;
        // SAFETY: the handle and a stream of this context, which live as long as the process.
        check(gpu, "cudnnSetStream", unsafe { (functions.set_stream)(handle, gpu.compute.handle) })?;
        Ok(Self { functions, handle: Mutex::new(LibraryHandle(handle)) })
    }
}

/// `cudnnStatus_t` as an error.
fn check(gpu: &Gpu, call: &'static str, code: c_int) -> Result<(), CudaError> {
    let text = match code {
        0 => return Ok(()),
        1002 | 1008 => "a part of the library is missing or of another version",
        1000..2000 => "not initialised",
        2000..3000 => "a wrong value",
        3000..4000 => "not supported",
        4000..5000 => "an error of its own",
        _ => "failed",
    };
    let hint = "if it happens again, check `nvidia-smi`, and report it with the output of `kolo devices`";
    Err(CudaError::Call { call, device: gpu.info.name.clone(), code, text: text.into(), hint })
}

/// The three tensors and how they belong together.
#[derive(Debug)]
struct Descriptions {
    image: Description,
    weight: Description,
    grid: Description,
    convolution: Description,
}

/// A convolution with its operands resolved and its algorithm chosen.
#[derive(Debug)]
pub(crate) struct ConvolutionCall {
    pass: ConvolutionPass,
    described: Descriptions,
    algorithm: c_int,
    image: DevicePointer,
    weight: DevicePointer,
    grid: DevicePointer,
    workspace: DevicePointer,
    workspace_bytes: usize,
}

// SAFETY: descriptions may be used from any thread, one call at a time.
unsafe impl Send for ConvolutionCall {}
// SAFETY: as above; they are only read.
unsafe impl Sync for ConvolutionCall {}

fn type_code(dtype: DType) -> Result<c_int, CudaError> {
    match dtype {
        DType::F32 => Ok(F32),
        DType::F16 => Ok(2),
        DType::BF16 => Ok(9),
        other => Err(CudaError::Other(format!("images of {} cannot be convolved", other.name()))),
    }
}

impl Convolutions {
    fn open<'c>(&'c self, gpu: &Gpu) -> Result<&'c Open, CudaError> {
        self.open.get_or_init(|| Open::new(gpu)).as_ref().map_err(CudaError::clone)
    }

    /// The algorithm for a kind; `None` if the library has none.
    pub fn algorithm(&self, gpu: &Gpu, kind: &ConvolutionKind, tf32: bool) -> Result<Option<c_int>, CudaError> {
        let mut known = lock(&self.known);
        if let Some(algorithm) = known.get(&(*kind, tf32)) {
            return Ok(*algorithm);
        }
        let open = self.open(gpu)?;
        gpu.enter()?;
        let described = open.describe(gpu, kind, tf32)?;
        let candidates = if kind.pass == ConvolutionPass::Forward { FORWARD } else { BACKWARD };
        let fits = |algorithm: &c_int| open.workspace(kind.pass, &described, *algorithm);
        let fits = |algorithm: &c_int| fits(algorithm).is_some_and(|bytes| bytes <= kind.workspace_bytes());
        let algorithm = candidates.iter().copied().find(fits);
        known.insert((*kind, tf32), algorithm);
        Ok(algorithm)
    }

    /// Describes a convolution of tensors at these addresses: image, weight, grid, workspace.
    pub fn compile(
        &self,
        gpu: &Arc<Gpu>,
        kind: &ConvolutionKind,
        tf32: bool,
        [image, weight, grid, workspace]: [DevicePointer; 4],
    ) -> Result<ConvolutionCall, CudaError> {
        let algorithm = self.algorithm(gpu, kind, tf32)?;
        let algorithm = algorithm.ok_or_else(|| CudaError::Other(format!("cuDNN has no algorithm for {kind:?}")))?;
        let described = self.open(gpu)?.describe(gpu, kind, tf32)?;
        let (pass, workspace_bytes) = (kind.pass, kind.workspace_bytes());
        Ok(ConvolutionCall { pass, described, algorithm, image, weight, grid, workspace, workspace_bytes })
    }

    /// Starts a convolution in the order of the compute stream.
    pub fn run(&self, gpu: &Arc<Gpu>, call: &ConvolutionCall) -> Result<(), CudaError> {
        let open = self.open(gpu)?;
        gpu.enter()?;
        let Descriptions { image, weight, grid, convolution } = &call.described;
        let (image, weight, grid) = ((image, call.image), (weight, call.weight), (grid, call.grid));
        let (name, function, first, second, result) = match call.pass {
            ConvolutionPass::Forward => ("cudnnConvolutionForward", open.functions.forward, image, weight, grid),
            ConvolutionPass::Image => ("cudnnConvolutionBackwardData", open.functions.image, weight, grid, image),
            ConvolutionPass::Weight => ("cudnnConvolutionBackwardFilter", open.functions.weight, image, grid, weight),
        };
        let (one, zero) = (1.0f32, 0.0f32);
        let number = |number: &f32| std::ptr::from_ref(number).cast::<c_void>();
        let handle = lock(&open.handle);
        // SAFETY: descriptions of memory that the layout placed, two numbers of the host, and a workspace of its size that only
        // this stream uses.
        let code = unsafe {
            function(
                handle.0,
                number(&one),
                first.0.handle,
                first.1,
                second.0.handle,
                second.1,
                convolution.handle,
                call.algorithm,
                call.workspace,
                call.workspace_bytes,
                number(&zero),
                result.0.handle,
                result.1,
            )
        };
        check(gpu, name, code)
    }
}

/// Makes a description with the library's functions for its kind.
macro_rules! describe {
    ($open:ident, $gpu:ident, $create:ident, $destroy:ident, $set:ident($($value:expr),*)) => {{
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place of a handle.
        check($gpu, concat!("cudnn ", stringify!($create)), unsafe { ($open.functions.$create)(&mut handle) })?;
        let made = Description { handle, destroy: $open.functions.$destroy };
        // SAFETY: a description of this kind, and numbers.
        check($gpu, concat!("cudnn ", stringify!($set)), unsafe { ($open.functions.$set)(handle, $($value),*) })?;
        made
    }};
}

impl Open {
    fn describe(&self, gpu: &Gpu, kind: &ConvolutionKind, tf32: bool) -> Result<Descriptions, CudaError> {
        let (shape, dtype) = (&kind.shape, type_code(kind.dtype)?);
        let order = if kind.channels_last { CHANNELS_LAST } else { CHANNELS_FIRST };
        let int = |size: usize| c_int::try_from(size).unwrap_or(c_int::MAX);
        let [images, inputs, outputs] = [shape.images, shape.inputs, shape.outputs].map(int);
        let ([height, width], [rows, columns]) = (shape.image.map(int), shape.grid.map(int));
        let ([kh, kw], part) = (shape.kernel.map(int), int(shape.inputs / shape.groups));
        let ([top, left], [down, right], [dy, dx]) =
            (shape.padding.map(int), shape.stride.map(int), shape.dilation.map(int));
        let image = describe!(
            self,
            gpu,
            tensor_create,
            tensor_destroy,
            tensor_set(order, dtype, images, inputs, height, width)
        );
        let grid = describe!(
            self,
            gpu,
            tensor_create,
            tensor_destroy,
            tensor_set(order, dtype, images, outputs, rows, columns)
        );
        let weight =
            describe!(self, gpu, filter_create, filter_destroy, filter_set(dtype, order, outputs, part, kh, kw));
        let convolution = describe!(
            self,
            gpu,
            convolution_create,
            convolution_destroy,
            convolution_set(top, left, down, right, dy, dx, CROSS_CORRELATION, F32)
        );
        let math = match (kind.dtype, tf32) {
            (DType::F32, false) => MATH_EXACT,
            (DType::F32, true) => MATH_DEFAULT,
            _ => MATH_TENSOR_CORES,
        };
        // SAFETY: a description of this kind, and numbers.
        let codes = unsafe {
            [
                (self.functions.convolution_math)(convolution.handle, math),
                (self.functions.convolution_groups)(convolution.handle, int(shape.groups)),
            ]
        };
        codes.into_iter().try_for_each(|code| check(gpu, "cudnnSetConvolutionMathType", code))?;
        Ok(Descriptions { image, weight, grid, convolution })
    }

    /// Bytes that an algorithm wants; `None` if it cannot do this.
    fn workspace(&self, pass: ConvolutionPass, described: &Descriptions, algorithm: c_int) -> Option<usize> {
        let Descriptions { image, weight, grid, convolution } = described;
        let (function, first, second, result) = match pass {
            ConvolutionPass::Forward => (self.functions.forward_workspace, image, weight, grid),
            ConvolutionPass::Image => (self.functions.image_workspace, weight, grid, image),
            ConvolutionPass::Weight => (self.functions.weight_workspace, image, grid, weight),
        };
        let (mut bytes, handle) = (0, lock(&self.handle));
        // SAFETY: descriptions of the library's, and the place of a number.
        let code = unsafe {
            function(handle.0, first.handle, second.handle, convolution.handle, result.handle, algorithm, &mut bytes)
        };
        (code == 0).then_some(bytes)
    }
}
