//! Convolutions on the GPU, as calls: by the vendor's library where it is there and knows the kind, else by kernels of our own.

use super::library;
use super::shape::Shape;
use crate::device::{THREADS, flag, int, long};
use crate::sums::{self, Values};
use kolo_graph::DType;
use kolo_graph::cuda::{ChannelsLast, ConvolutionPass, CudaArg, CudaCalls, CudaCx, CudaPlace, CudaSource, Launch};

const SOURCE: &str = include_str!("conv.cu");

/// Rows and columns of a block's tile.
const TILE: usize = 64;
/// Blocks that a weight gradient is cut into, about, and terms of one at least.
const BLOCKS: usize = 512;
const TERMS_MIN: usize = 512;
/// Blocks along z of a grid.
const BLOCKS_Z_MAX: usize = 65_535;

/// The operands: two factors, perhaps a bias, and the result.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operands {
    pub factors: [CudaPlace; 2],
    pub dtype: DType,
    pub bias: Option<Values>,
    pub result: Values,
}

/// What one pass runs.
pub(super) fn calls(pass: ConvolutionPass, shape: &Shape, cx: &CudaCx<'_>, operands: &Operands) -> CudaCalls {
    if library::suits(shape, cx.target) {
        return library::calls(pass, shape, cx, operands);
    }
    match pass {
        ConvolutionPass::Forward => forward(shape, operands),
        ConvolutionPass::Image => input_grad(shape, operands),
        ConvolutionPass::Weight => weight_grad(shape, operands),
    }
}

/// Image, weight and grid, whichever is the output. Tensor cores take their operands with channels last.
pub(super) fn channels_last(shape: &Shape, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
    let by_tensor_cores = cx.inputs[0].dtype != DType::F32 || cx.target.tf32;
    let knows = library::suits(shape, cx.target) && by_tensor_cores;
    knows.then(|| ChannelsLast { inputs: vec![0, 1], outputs: vec![0], gains: true })
}

/// The launch of one pass over `rows` × `columns` of every group, `depths` times along z.
fn launch(
    shape: &Shape,
    pass: &'static str,
    operands: &Operands,
    [rows, columns, depths]: [usize; 3],
    chunk: usize,
) -> Launch {
    let Operands { factors, dtype, bias, result } = *operands;
    let own = bias.unwrap_or(result);
    let source = CudaSource::new(SOURCE).define("PASS", pass).define_type("OPERAND", dtype);
    let source =
        source.define_type("RESULT", result.dtype).define_type("BIAS", bias.map_or(DType::F32, |bias| bias.dtype));
    let places = [factors[0], factors[1], own.place, result.place].map(CudaArg::from);
    let (window, column_tiles) = (&shape.window, columns.div_ceil(TILE));
    let sizes = [shape.images, window.groups, shape.inputs, shape.outputs];
    let planes =
        [shape.image, shape.kernel, shape.grid, window.stride, window.padding.before, window.dilation].concat();
    let sizes = sizes.into_iter().chain(planes).chain([column_tiles]).map(int);
    let head = [flag(bias.is_some()), long(chunk)];
    let args = places.into_iter().chain(head).chain(sizes).collect::<Vec<_>>();
    Launch::new(source, "convolve", [rows.div_ceil(TILE) * column_tiles, window.groups, depths], THREADS, args)
}

fn forward(shape: &Shape, operands: &Operands) -> CudaCalls {
    let sizes = [shape.outputs, shape.images * shape.grid_pixels(), 1];
    launch(shape, "FORWARD", operands, sizes, 0).into()
}

/// Pixels whose places have the same rest by the stride meet the same taps: one layer of blocks for each rest.
fn input_grad(shape: &Shape, operands: &Operands) -> CudaCalls {
    let stride = shape.window.stride;
    let pixels: usize = (0..2).map(|axis| shape.image[axis].div_ceil(stride[axis])).product();
    launch(shape, "INPUT", operands, [shape.inputs, shape.images * pixels, stride[0] * stride[1]], 0).into()
}

/// The terms are all pixels of all images: they are cut into chunks, whose sums are added up.
fn weight_grad(shape: &Shape, operands: &Operands) -> CudaCalls {
    let (rows, columns) = (shape.outputs, shape.inputs * shape.taps());
    let (tiles, terms) = (rows.div_ceil(TILE) * columns.div_ceil(TILE), shape.images * shape.grid_pixels());
    let wanted = BLOCKS.div_ceil(tiles * shape.window.groups);
    let chunk = terms.div_ceil(wanted).max(TERMS_MIN).max(terms.div_ceil(BLOCKS_Z_MAX));
    let (chunks, count) = (terms.div_ceil(chunk), shape.window.groups * rows * columns);
    let mut calls = CudaCalls::new();
    if chunks == 1 {
        calls.launch(launch(shape, "WEIGHT", operands, [rows, columns, 1], chunk));
        return calls;
    }
    let parts = Values::f32(calls.scratch(chunks * count * size_of::<f32>()));
    let partial = Operands { result: parts, ..*operands };
    calls.launch(launch(shape, "WEIGHT", &partial, [rows, columns, chunks], chunk));
    sums::columns(&mut calls, parts, [1, chunks, count], operands.result);
    calls
}
