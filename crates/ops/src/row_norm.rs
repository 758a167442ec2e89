//! What layer norm and rms norm share: both normalise rows of the last dim, and rms norm is layer norm without the mean and
//! the bias. Only the loops over elements differ.
//!
//! A row has `n` elements. The gradients of weight and bias are summed over blocks of rows of a fixed size, so that threads
//! cannot change them.

use crate::device;
use crate::norm::{ROWS_PER_BLOCK, axes, join_blocks, rows_per_task};
use crate::sums::{self, Values};
use crate::tiles::Address;
use kolo_graph::cuda::{CudaArg, CudaCalls, CudaCx, CudaPlace, CudaSource, Launch};
use kolo_graph::index::Index;
use kolo_graph::{Arg, Case, CpuCx, Dense, GradCx, Op, Tensor, Type};
use std::ops::Range;

/// The index expression `form`, in which `r` stands for all dims but the last.
pub fn index(inputs: &[Type], form: &str) -> Option<Index> {
    let rows = axes(inputs.first()?.rank().checked_sub(1)?, false);
    Some(Index::parse(&form.replace('r', &rows)))
}

/// The gradients of all inputs: `op` makes them from x, the weight, each row's statistics and the gradient.
pub fn grad<'b>(cx: &GradCx<'b>, op: impl Op) -> Vec<Option<Tensor<'b>>> {
    let inputs = [&cx.inputs[..2], &cx.outputs[1..], &[cx.grad()]].concat();
    let grads = cx.input(0).builder().apply_all(op, &inputs);
    grads.into_iter().enumerate().map(|(at, grad)| cx.needs(at).then_some(grad)).collect()
}

/// The definition: of (x, weight, bias) y, means and rstds; of (x, weight), with means of zero, y and rstds.
pub fn define(inputs: &[&Dense], eps: f32, outputs: &[Type]) -> Vec<Dense> {
    let (weight, bias) = (&inputs[1].data, inputs.get(2));
    let n = weight.len();
    let mut made: Vec<Dense> = outputs.iter().map(|ty| Dense::zeros(ty.shape.clone())).collect();
    for (row, x) in inputs[0].data.chunks(n).enumerate() {
        let mean = bias.map_or(0.0, |_| x.iter().sum::<f64>() / n as f64);
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        let rstd = 1.0 / (variance + f64::from(eps)).sqrt();
        for (at, x) in x.iter().enumerate() {
            made[0].data[row * n + at] = (x - mean) * rstd * weight[at] + bias.map_or(0.0, |bias| bias.data[at]);
        }
        let statistics = bias.map(|_| mean).into_iter().chain([rstd]);
        made[1..].iter_mut().zip(statistics).for_each(|(made, value)| made.data[row] = value);
    }
    made
}

/// The definition of the gradients: of (x, weight, mean, rstd, g) those of x, weight and bias; of (x, weight, rstd, g) those
/// of x and weight.
pub fn define_grad(inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
    let [x, weight, .., rstd, g] = inputs else { unreachable!("operands are checked") };
    let (means, n) = ((inputs.len() == 5).then(|| &inputs[2].data), weight.data.len());
    let mut made: Vec<Dense> = outputs.iter().map(|ty| Dense::zeros(ty.shape.clone())).collect();
    for (row, rstd) in rstd.data.iter().enumerate() {
        let range = row * n..(row + 1) * n;
        let mean = means.map_or(0.0, |means| means[row]);
        let normal: Vec<f64> = x.data[range.clone()].iter().map(|x| (x - mean) * rstd).collect();
        let g = &g.data[range];
        let weighted: Vec<f64> = g.iter().zip(&weight.data).map(|(g, weight)| g * weight).collect();
        let shift = means.map_or(0.0, |_| weighted.iter().sum::<f64>() / n as f64);
        let slope = weighted.iter().zip(&normal).map(|(g, normal)| g * normal).sum::<f64>() / n as f64;
        for at in 0..n {
            made[0].data[row * n + at] = rstd * (weighted[at] - shift - normal[at] * slope);
            let sums = [g[at] * normal[at], g[at]];
            made[1..].iter_mut().zip(sums).for_each(|(made, term)| made.data[at] += term);
        }
    }
    made
}

/// Runs `task(rows, their x, their y)` for all rows of `x`, the first input, and `y`, the first output.
pub fn for_rows(cx: &CpuCx<'_>, n: usize, task: impl Fn(Range<usize>, &[f32], &mut [f32]) + Sync) {
    let (x, y) = (cx.f32(0), Address(cx.out_f32(0).as_mut_ptr()));
    cx.team.chunks(cx.outputs[1].ty.elements(), rows_per_task(n), |rows, _| {
        let part = rows.start * n..rows.end * n;
        // SAFETY: tasks own disjoint rows.
        let y = unsafe { y.slice(part.start, part.len()) };
        task(rows, &x[part], y);
    });
}

/// A block of rows of a backward pass.
#[derive(Debug)]
pub struct Block<'a> {
    pub rows: Range<usize>,
    /// Their elements.
    pub part: Range<usize>,
    pub dx: &'a mut [f32],
    /// The block's share of each parameter's gradient, one after the other.
    pub sums: &'a mut [f32],
}

/// Runs `task` for all blocks of rows, then adds up the parameters' gradients: the outputs after the first.
pub fn for_blocks(cx: &CpuCx<'_>, n: usize, task: impl Fn(Block<'_>) + Sync) {
    let (rows, parameters) = (cx.inputs[2].ty.elements(), cx.outputs.len() - 1);
    let (blocks, width) = (rows.div_ceil(ROWS_PER_BLOCK), parameters * n);
    let partials = &mut cx.scratch()[..blocks * width];
    let [dx, sums] = [cx.out_f32(0).as_mut_ptr(), partials.as_mut_ptr()].map(Address);
    cx.team.chunks(blocks, rows_per_task(ROWS_PER_BLOCK * n), |range, _| {
        for block in range {
            let rows = block * ROWS_PER_BLOCK..((block + 1) * ROWS_PER_BLOCK).min(rows);
            let part = rows.start * n..rows.end * n;
            // SAFETY: tasks own disjoint blocks.
            let (dx, sums) = unsafe { (dx.slice(part.start, part.len()), sums.slice(block * width, width)) };
            task(Block { rows, part, dx, sums });
        }
    });
    (0..parameters).for_each(|at| join_blocks(cx, &partials[at * n..], width, cx.out_f32(1 + at)));
}

/// Scratch of [`for_blocks`].
pub fn scratch_bytes(inputs: &[Type], outputs: &[Type]) -> usize {
    let blocks = inputs[2].elements().div_ceil(ROWS_PER_BLOCK);
    blocks * (outputs.len() - 1) * inputs[1].elements() * size_of::<f32>()
}

const SOURCE: &str = concat!(include_str!("rows.cuh"), include_str!("row_norm.cu"));
/// Rows whose parameter gradients one block of the GPU adds up, and blocks along y of a grid.
const ROWS_PER_CHUNK: usize = 128;
const CHUNKS_MAX: usize = 65_535;
/// With so many chunks a block for each keeps a GPU busy: then one pass makes all gradients. No bit depends on it.
const CHUNKS_OF_ONE_PASS: usize = 64;

/// The source for rows of `n` elements, with the launch's grid and block.
fn source(cx: &CudaCx<'_>, rows: usize, n: usize, has_mean: bool) -> (CudaSource, [usize; 3], usize) {
    let threads = device::row_threads(n);
    let (grid, block) = device::row_grid(rows, threads);
    let source = device::typed(SOURCE, cx).define("GROUP", threads).define("HAS_MEAN", i32::from(has_mean));
    (source.define("PACK", device::pack(n, cx.inputs[0].dtype)), grid, block)
}

/// The forward pass on the GPU; with means there is a bias.
pub fn forward_calls(cx: &CudaCx<'_>, eps: f32, has_mean: bool) -> CudaCalls {
    let (rows, n) = (cx.outputs[1].elements(), cx.inputs[1].elements());
    let (source, grid, block) = source(cx, rows, n, has_mean);
    let operands = (0..cx.inputs.len()).map(device::input).chain((0..cx.outputs.len()).map(device::output));
    let args = operands.chain([device::long(rows), device::long(n), CudaArg::F32(eps)]);
    Launch::new(source.define("FORWARD", 1), "normalize", grid, block, args.collect::<Vec<_>>()).into()
}

/// The backward pass on the GPU.
pub fn backward_calls(cx: &CudaCx<'_>, has_mean: bool) -> CudaCalls {
    let (rows, n) = (cx.inputs[2].elements(), cx.inputs[1].elements());
    let (source, grid, block) = source(cx, rows, n, has_mean);
    let inputs: Vec<CudaArg> = (0..cx.inputs.len()).map(device::input).collect();
    let chunk = ROWS_PER_CHUNK.max(rows.div_ceil(CHUNKS_MAX));
    let chunks = rows.div_ceil(chunk);
    let mut calls = CudaCalls::new();
    let parts = calls.scratch(chunks * n * (cx.outputs.len() - 1) * size_of::<f32>());
    let sizes = [device::long(rows), device::long(n), device::long(chunk)];
    let strips = n.div_ceil(device::WARP * device::pack(n, cx.inputs[0].dtype));
    let source = source.define("STRIPS", strips);
    if chunks >= CHUNKS_OF_ONE_PASS && device::row_threads(n) == device::WARP {
        let args = [&inputs[..], &[device::output(0), parts.into()], &sizes].concat();
        calls.launch(Launch::new(source, "differentiate_all", [chunks, 1, 1], device::THREADS, args));
    } else {
        let args = [&inputs[..], &[device::output(0)], &sizes[..2]].concat();
        calls.launch(Launch::new(source.clone(), "differentiate", grid, block, args));
        let args = [&inputs[..1], &inputs[2..], &[parts.into()], &sizes].concat();
        calls.launch(Launch::new(source, "parameter_parts", [strips, chunks, 1], device::THREADS, args));
    }
    for at in 1..cx.outputs.len() {
        let from = Values::f32(parts.further((at - 1) * chunks * n * size_of::<f32>()));
        sums::columns(&mut calls, from, [1, chunks, n], Values::new(CudaPlace::output(at), cx.outputs[at].dtype));
    }
    calls
}

/// The usual cases: `op(eps)` on x and this many parameters.
pub fn cases<T: Op>(op: fn(f32) -> T, parameters: usize) -> Vec<Case> {
    let args = |shape: &[usize]| {
        let parameter = |_| Arg::real([shape[shape.len() - 1]]);
        std::iter::once(Arg::real(shape)).chain((0..parameters).map(parameter)).collect::<Vec<Arg>>()
    };
    let small: [&[usize]; 5] = [&[7], &[3, 5], &[4, 1], &[1, 33], &[2, 3, 17]];
    let large: [&[usize]; 3] = [&[90, 256], &[3, 5000], &[3000, 5]];
    let constant = |shape: &[usize]| args(shape).into_iter().map(Arg::constant).collect::<Vec<Arg>>();
    let small = small.into_iter().map(|shape| Case::new(op(1e-3), args(shape)));
    small.chain(large.into_iter().map(|shape| Case::new(op(1e-5), constant(shape)))).collect()
}

/// The usual cases of a backward op: x, weight, means if it has any, rstds, g.
pub fn grad_cases<T: Op>(op: fn() -> T, has_means: bool) -> Vec<Case> {
    let shapes: [&[usize]; 7] = [&[7], &[4, 1], &[2, 3, 17], &[100, 300], &[2, 5000], &[3000, 5], &[8200, 20]];
    let case = |shape: &[usize]| {
        let (rows, n) = shape.split_at(shape.len() - 1);
        let means = has_means.then(|| Arg::real(rows));
        let args = [Arg::real(shape), Arg::real(n)].into_iter().chain(means);
        let args = args.chain([Arg::positive(rows), Arg::real(shape)]).map(Arg::constant);
        Case::new(op(), args.collect::<Vec<Arg>>())
    };
    shapes.into_iter().map(case).collect()
}
