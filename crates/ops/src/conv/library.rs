//! Convolutions by the vendor's libraries, as calls. With channels last, a kernel of one tap that moves by one is a matrix product of
//! pixels and channels, for which there is a library of its own.

use super::gpu::Operands;
use super::shape::Shape;
use crate::cast::Cast;
use crate::cuda_map;
use crate::elementwise::Add;
use crate::sums::Values;
use kolo_graph::cuda::{
    Convolution, ConvolutionKind, ConvolutionPass, ConvolutionShape, Cuda, CudaBuffer, CudaCalls, CudaCx, CudaMatrix,
    CudaPlace, CudaTarget, Product,
};
use kolo_graph::{DType, Type};

/// Elements of a tensor that the library counts with.
const ELEMENTS_MAX: usize = i32::MAX as usize;

/// Whether the library is there and can say what is asked: it pads both sides alike.
pub(super) fn suits(shape: &Shape, target: &CudaTarget) -> bool {
    let padding = shape.window.padding;
    let largest =
        [shape.image_type(), shape.weight_type(), shape.grid_type()].map(|ty| ty.elements()).into_iter().max();
    target.convolutions && padding.before == padding.after && largest.is_some_and(|largest| largest <= ELEMENTS_MAX)
}

/// The places of image, weight and grid, one of which is the result.
struct Tensors {
    image: CudaPlace,
    weight: CudaPlace,
    grid: CudaPlace,
}

impl Tensors {
    fn new(pass: ConvolutionPass, [first, second]: [CudaPlace; 2], result: CudaPlace) -> Self {
        match pass {
            ConvolutionPass::Forward => Self { image: first, weight: second, grid: result },
            ConvolutionPass::Image => Self { weight: first, grid: second, image: result },
            ConvolutionPass::Weight => Self { image: first, grid: second, weight: result },
        }
    }
}

pub(super) fn calls(pass: ConvolutionPass, shape: &Shape, cx: &CudaCx<'_>, operands: &Operands) -> CudaCalls {
    if cx.channels_last && is_product(shape) {
        return product(pass, shape, operands).into();
    }
    let mut calls = CudaCalls::new();
    let (dtype, result) = (operands.dtype, operands.result);
    let kind = ConvolutionKind { pass, shape: library_shape(shape), dtype, channels_last: cx.channels_last };
    let workspace = calls.scratch(kind.workspace_bytes());
    // The library gives results of its operands' type.
    let count = if pass == ConvolutionPass::Weight { shape.weight_type().elements() } else { 0 };
    let made = if result.dtype == dtype { result.place } else { calls.scratch(count * dtype.bytes()) };
    let Tensors { image, weight, grid } = Tensors::new(pass, operands.factors, made);
    calls.convolution(Convolution { kind, image, weight, grid, workspace });
    if result.dtype != dtype {
        let (from, to) = (Type::new(dtype, [count]), Type::new(result.dtype, [count]));
        let cast = Cast { to: result.dtype }.calls(&CudaCx::new(&[from], &[to], cx.target));
        calls.append(cast, |place| if place.buffer == CudaBuffer::Input(0) { made } else { result.place });
    }
    if let Some(bias) = operands.bias {
        add_bias(&mut calls, pass, shape, cx, (result, bias));
    }
    calls
}

fn library_shape(shape: &Shape) -> ConvolutionShape {
    let window = shape.window;
    ConvolutionShape {
        images: shape.images,
        inputs: window.groups * shape.inputs,
        outputs: window.groups * shape.outputs,
        groups: window.groups,
        image: shape.image,
        kernel: shape.kernel,
        grid: shape.grid,
        stride: window.stride,
        padding: window.padding.before,
        dilation: window.dilation,
    }
}

/// Whether each pixel of the grid is made of one pixel, and in their order.
fn is_product(shape: &Shape) -> bool {
    let window = shape.window;
    let padding = [window.padding.both(0), window.padding.both(1)];
    window.groups == 1 && shape.kernel == [1, 1] && padding == [0, 0] && shape.image == shape.grid
}

fn product(pass: ConvolutionPass, shape: &Shape, operands: &Operands) -> Product {
    let Tensors { image, weight, grid } = Tensors::new(pass, operands.factors, operands.result.place);
    let (inputs, outputs, pixels) = (shape.inputs, shape.outputs, shape.images * shape.image_pixels());
    let matrix = |place: CudaPlace, row_stride: usize, transposed: bool| {
        let dtype = if place == operands.result.place { operands.result.dtype } else { operands.dtype };
        CudaMatrix { place, dtype, row_stride, batch_stride: 0, transposed }
    };
    let ([rows, columns, depth], [a, b, c]) = match pass {
        ConvolutionPass::Forward => (
            [pixels, outputs, inputs],
            [matrix(image, inputs, false), matrix(weight, inputs, true), matrix(grid, outputs, false)],
        ),
        ConvolutionPass::Image => (
            [pixels, inputs, outputs],
            [matrix(grid, outputs, false), matrix(weight, inputs, false), matrix(image, inputs, false)],
        ),
        ConvolutionPass::Weight => (
            [outputs, inputs, pixels],
            [matrix(grid, outputs, true), matrix(image, inputs, false), matrix(weight, inputs, false)],
        ),
    };
    let bias = operands.bias.map(|bias| bias.place);
    Product { rows, columns, depth, batch: 1, a, b, c, alpha: 1.0, beta: 0.0, bias }
}

/// Adds each channel's bias to a result that lies there.
fn add_bias(
    calls: &mut CudaCalls,
    pass: ConvolutionPass,
    shape: &Shape,
    cx: &CudaCx<'_>,
    (result, bias): (Values, Values),
) {
    let ty = if pass == ConvolutionPass::Forward { shape.grid_type() } else { shape.image_type() };
    let (channels, pixels) = (ty.shape[1], ty.shape[2] * ty.shape[3]);
    let (result_shape, bias_shape) = match cx.channels_last {
        true => (vec![shape.images * pixels, channels], vec![channels]),
        false => (vec![shape.images, channels, pixels], vec![channels, 1]),
    };
    let typed = |dtype: DType, shape: Vec<usize>| Type::new(dtype, shape);
    let outputs = [typed(result.dtype, result_shape.clone())];
    let inputs = [typed(result.dtype, result_shape), typed(bias.dtype, bias_shape)];
    let add = cuda_map::formula_calls(&Add {}, &CudaCx::new(&inputs, &outputs, cx.target));
    calls.append(add, |place| if place.buffer == CudaBuffer::Input(1) { bias.place } else { result.place });
}
