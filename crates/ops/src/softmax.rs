//! Softmax and its logarithm over the last dim. Rows are independent; within a row the order of additions depends on its
//! length alone. Backward works from the output, so the input need not be kept.

use crate::device;
use crate::elementwise::ElementwiseMethods;
use crate::pairwise::{self, Pairwise};
use crate::real::{Real, exp_of_negative};
use crate::reduce::ReduceMethods;
use crate::simd;
use crate::tiles::{Address, TILE};
use crate::vectorized;
use kolo_graph::cpu::Buffer;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx, Launch};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};

op! {
    /// `eˣ / Σeˣ` over the last dim.
    pub struct Softmax = "softmax" {}
}

op! {
    /// Backward of softmax from its output: `y·(g − Σ y·g)`.
    pub struct SoftmaxGrad = "softmax_grad" {}
}

op! {
    /// `x − ln Σeˣ` over the last dim.
    pub struct LogSoftmax = "log_softmax" {}
}

op! {
    /// Backward of log_softmax from its output: `g − eʸ·Σg`.
    pub struct LogSoftmaxGrad = "log_softmax_grad" {}
}

/// Elements of work per task.
const ELEMENTS_PER_TASK: usize = 8 * 1024;

/// How many rows of `width` make one task.
pub(crate) fn rows_per_task(width: usize) -> usize {
    (ELEMENTS_PER_TASK / width.max(1)).max(1)
}

/// Every operand walks the same dims, of which the last stays whole.
fn index(inputs: &[Type]) -> Option<Index> {
    let rank = inputs.first()?.rank();
    let axes: Vec<String> = (0..rank).map(|dim| format!("d{dim}")).collect();
    let whole = axes.last().cloned().into_iter().collect();
    Some(Index { inputs: vec![axes.clone(); inputs.len()], outputs: vec![axes], whole, ..Index::default() })
}

fn infer(inputs: &[Type], arity: usize) -> Result<Vec<Type>, String> {
    if inputs.len() != arity {
        return Err(format!("takes {arity} inputs, but got {}", inputs.len()));
    }
    if inputs[0].rank() == 0 {
        return Err("works along the last dim, but a scalar has none; reshape it to [1]".into());
    }
    if let Some(other) = inputs.iter().find(|ty| !ty.dtype.is_float()) {
        return Err(format!("works on floats, not on {}; cast it", other.dtype.name()));
    }
    if let Some(other) = inputs.iter().find(|ty| **ty != inputs[0]) {
        return Err(format!("expects inputs of one type, but got {} and {other}", inputs[0]));
    }
    Ok(vec![inputs[0].clone()])
}

/// Evaluates row by row in f64; `f` maps one row of each input to one row of the output.
fn define(inputs: &[&Dense], output: &Type, f: impl Fn(&[&[f64]]) -> Vec<f64>) -> Vec<Dense> {
    let width = output.last();
    let mut data = Vec::new();
    for row in 0..output.elements() / width.max(1) {
        let rows: Vec<&[f64]> = inputs.iter().map(|input| &input.data[row * width..(row + 1) * width]).collect();
        data.extend(f(&rows));
    }
    vec![Dense::new(output.shape.clone(), data)]
}

/// The largest of a row and `Σ e^(x − largest)`, in f64.
pub(crate) fn define_sum_exp(row: &[f64]) -> (f64, f64) {
    let largest = row.iter().copied().fold(f64::NEG_INFINITY, Real::larger);
    (largest, row.iter().map(|x| (x - largest).exp()).sum())
}

impl Op for Softmax {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        index(inputs)
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        infer(inputs, 1)
    }
    fn flops_per_point(&self) -> u64 {
        4
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        vec![Some(cx.output(0).then(SoftmaxGrad {}, &[cx.grad()]))]
    }
    fn composite(&self) -> bool {
        true
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        define(inputs, &outputs[0], |rows| {
            let (largest, sum) = define_sum_exp(rows[0]);
            rows[0].iter().map(|x| (x - largest).exp() / sum).collect()
        })
    }
}

impl Cpu for Softmax {
    fn run(&self, cx: &mut CpuCx<'_>) {
        for_each_row(cx, 0, |_, row| {
            let sum = exp_in_place(row, simd::max(row));
            scale(row, 1.0 / sum);
        });
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
}

impl Op for SoftmaxGrad {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("y"), Operand::float("g")], &["dx"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        index(inputs)
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        infer(inputs, 2)
    }
    fn flops_per_point(&self) -> u64 {
        4
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let (y, g, w) = (cx.input(0), cx.input(1), cx.grad());
        let last = [y.rank() - 1];
        let by_output = || {
            let centred = g.sub(y.mul(g).sum_keep(&last));
            w.mul(centred).sub(g.mul(w.mul(y).sum_keep(&last)))
        };
        // The Jacobian of softmax is symmetric.
        vec![cx.needs(0).then(by_output), cx.needs(1).then(|| y.then(SoftmaxGrad {}, &[w]))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        define(inputs, &outputs[0], |rows| {
            let (y, g) = (rows[0], rows[1]);
            let dot: f64 = y.iter().zip(g).map(|(y, g)| y * g).sum();
            y.iter().zip(g).map(|(y, g)| y * (g - dot)).collect()
        })
    }
}

impl Cpu for SoftmaxGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (y, width) = (cx.f32(0), cx.outputs[0].ty.last());
        for_each_row(cx, 1, |at, row| {
            let y = &y[at * width..(at + 1) * width];
            centre(row, y, dot_long(y, row));
        });
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(1, 0)]
    }
}

impl Op for LogSoftmax {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x")], &["y"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        index(inputs)
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        infer(inputs, 1)
    }
    fn flops_per_point(&self) -> u64 {
        4
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        vec![Some(cx.output(0).then(LogSoftmaxGrad {}, &[cx.grad()]))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        define(inputs, &outputs[0], |rows| {
            let (largest, sum) = define_sum_exp(rows[0]);
            rows[0].iter().map(|x| (x - largest) - sum.ln()).collect()
        })
    }
}

impl Cpu for LogSoftmax {
    fn run(&self, cx: &mut CpuCx<'_>) {
        for_each_row(cx, 0, |_, row| {
            let largest = simd::max(row);
            let log = Real::ln(sum_exp(row, largest));
            subtract_both(row, largest, log);
        });
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
}

impl Op for LogSoftmaxGrad {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("y"), Operand::float("g")], &["dx"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        index(inputs)
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        infer(inputs, 2)
    }
    fn flops_per_point(&self) -> u64 {
        4
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let (y, g, w) = (cx.input(0), cx.input(1), cx.grad());
        let last = [y.rank() - 1];
        let weighted = w.mul(y.exp());
        vec![
            cx.needs(0).then(|| weighted.mul(g.sum_keep(&last)).neg()),
            cx.needs(1).then(|| w.sub(weighted.sum_keep(&last))),
        ]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        define(inputs, &outputs[0], |rows| {
            let (y, g) = (rows[0], rows[1]);
            let sum: f64 = g.iter().sum();
            y.iter().zip(g).map(|(y, g)| g - y.exp() * sum).collect()
        })
    }
}

impl Cpu for LogSoftmaxGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (y, width) = (cx.f32(0), cx.outputs[0].ty.last());
        for_each_row(cx, 1, |at, row| {
            let sum = pairwise::sum(row);
            subtract_exp(row, &y[at * width..(at + 1) * width], sum);
        });
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(1, 0)]
    }
}

/// Copies elements `start..start + out.len()` of an operand to where the result goes; nothing if they are there already.
pub(crate) fn bring(from: &Buffer, start: usize, out: &mut [f32]) {
    assert!(start + out.len() <= from.ty.elements(), "beyond the end of {}", from.ty);
    // SAFETY: the range is inside the operand, which is f32 when a kernel sees it; `copy` allows an overlap.
    unsafe {
        let source = from.data.cast::<f32>().add(start);
        if source.cast_const() != out.as_ptr() {
            std::ptr::copy(source, out.as_mut_ptr(), out.len());
        }
    }
}

/// Runs `f(row number, row)` over the rows of the output, each filled with the row of input `from`.
fn for_each_row(cx: &CpuCx<'_>, from: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    let output = &cx.outputs[0];
    let width = output.ty.last();
    let rows = output.ty.elements() / width.max(1);
    let address = Address(output.data.cast());
    cx.team.chunks(rows, rows_per_task(width), |range, _| {
        for at in range {
            // SAFETY: tasks own disjoint rows.
            let row = unsafe { address.slice(at * width, width) };
            bring(&cx.inputs[from], at * width, row);
            f(at, row);
        }
    });
}

/// `x ← e^(x − shift)`; the sum of the results, as a tree over tiles.
fn exp_in_place(row: &mut [f32], shift: f32) -> f32 {
    Pairwise::of(row.chunks_mut(TILE).map(|tile| {
        exp_tile(tile, shift);
        simd::sum(tile)
    }))
}

/// `Σ e^(x − shift)` in the order of `exp_in_place`.
pub(crate) fn sum_exp(row: &[f32], shift: f32) -> f32 {
    let mut space = [0.0; TILE];
    Pairwise::of(row.chunks(TILE).map(|values| {
        let tile = &mut space[..values.len()];
        tile.copy_from_slice(values);
        exp_tile(tile, shift);
        simd::sum(tile)
    }))
}

fn dot_long(a: &[f32], b: &[f32]) -> f32 {
    Pairwise::of(a.chunks(TILE).zip(b.chunks(TILE)).map(|(a, b)| simd::dot(a, b)))
}

vectorized! {
    fn exp_tile(tile: &mut [f32], shift: f32) {
        for x in tile {
            *x = exp_of_negative(*x - shift);
        }
    }
}

vectorized! {
    fn scale(row: &mut [f32], factor: f32) {
        for x in row {
            *x *= factor;
        }
    }
}

vectorized! {
    /// `x ← (x − first) − second`: two steps, because the sum of both may have lost the second's digits.
    fn subtract_both(row: &mut [f32], first: f32, second: f32) {
        for x in row {
            *x = (*x - first) - second;
        }
    }
}

vectorized! {
    /// `g ← y·(g − dot)`.
    fn centre(row: &mut [f32], y: &[f32], dot: f32) {
        for (g, y) in row.iter_mut().zip(y) {
            *g = *y * (*g - dot);
        }
    }
}

vectorized! {
    /// `g ← g − eʸ·sum`.
    fn subtract_exp(row: &mut [f32], y: &[f32], sum: f32) {
        for (g, y) in row.iter_mut().zip(y) {
            *g -= Real::exp(*y) * sum;
        }
    }
}

/// One launch over the rows of the output; `function` takes the inputs, the output, rows and width.
fn row_calls(cx: &CudaCx<'_>, function: &'static str) -> CudaCalls {
    let text = concat!(include_str!("rows.cuh"), include_str!("softmax.cu"));
    let width = cx.outputs[0].last();
    let threads = device::row_threads(width);
    let pack = device::pack(width, cx.inputs[0].dtype);
    let source = device::typed(text, cx).define("GROUP", threads).define("PACK", pack);
    let rows = cx.outputs[0].elements() / width.max(1);
    let (grid, block) = device::row_grid(rows, threads);
    let operands = (0..cx.inputs.len()).map(device::input);
    let args = operands.chain([device::output(0), device::long(rows), device::long(width)]);
    Launch::new(source, function, grid, block, args.collect::<Vec<_>>()).into()
}

impl Cuda for Softmax {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        row_calls(cx, "softmax")
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
}

impl Cuda for SoftmaxGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        row_calls(cx, "softmax_grad")
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(1, 0)]
    }
}

impl Cuda for LogSoftmax {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        row_calls(cx, "log_softmax")
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
}

impl Cuda for LogSoftmaxGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        row_calls(cx, "log_softmax_grad")
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(1, 0)]
    }
}

fn shapes() -> [Vec<usize>; 5] {
    [vec![5], vec![3, 17], vec![2, 1, 33], vec![4, 1], vec![2, 3, 2, 5]]
}

/// Long rows, and enough of them for several tasks; too many for finite differences.
fn long_shapes() -> [Vec<usize>; 2] {
    [vec![37, 1021], vec![3, 4099]]
}

fn forward<T: Op>(op: fn() -> T) -> Vec<Case> {
    let long = long_shapes().map(|shape| Case::new(op(), [Arg::real(shape).constant()]));
    shapes().map(|shape| Case::new(op(), [Arg::real(shape)])).into_iter().chain(long).collect()
}

fn backward<T: Op>(op: fn() -> T, low: f64, high: f64) -> Vec<Case> {
    let case = |shape: Vec<usize>| Case::new(op(), [Arg::real(shape.clone()).within(low, high), Arg::real(shape)]);
    let constant = |mut case: Case| {
        case.args.iter_mut().for_each(|arg| arg.differentiate = false);
        case
    };
    shapes().map(case).into_iter().chain(long_shapes().map(case).map(constant)).collect()
}

impl Cases for Softmax {
    fn cases() -> Vec<Case> {
        forward(|| Softmax {})
    }
}

impl Cases for SoftmaxGrad {
    fn cases() -> Vec<Case> {
        backward(|| SoftmaxGrad {}, 0.0, 0.2)
    }
}

impl Cases for LogSoftmax {
    fn cases() -> Vec<Case> {
        forward(|| LogSoftmax {})
    }
}

impl Cases for LogSoftmaxGrad {
    fn cases() -> Vec<Case> {
        backward(|| LogSoftmaxGrad {}, -6.0, -0.5)
    }
}

pub const KINDS: &[OpKind] = &[
    OpKind::of::<Softmax>().with_cuda::<Softmax>(),
    OpKind::of::<SoftmaxGrad>().with_cuda::<SoftmaxGrad>(),
    OpKind::of::<LogSoftmax>().with_cuda::<LogSoftmax>(),
    OpKind::of::<LogSoftmaxGrad>().with_cuda::<LogSoftmaxGrad>(),
];

kolo_graph::methods! {
    /// Softmax over the last dim.
    SoftmaxMethods {
        fn softmax(self) -> Tensor<'b> { self.then(Softmax {}, &[]) }
        fn log_softmax(self) -> Tensor<'b> { self.then(LogSoftmax {}, &[]) }
    }
}
