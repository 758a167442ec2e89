//! Recurrent layers over a whole sequence: [`lstm`], [`gru`] and plain [`rnn`], with PyTorch's formulas and weight layouts.
//!
//! Legend: `b` batch, `t` steps, `i` input width, `h` hidden width, `g` rows of the weights (gates times `h`).
//!
//! A layer is one op. What does not depend on the step before is done for all steps at once: the input's share of the
//! gates forward; the weights' and the input's gradients backward. Only the small product with the recurrent weight, whose
//! packing is done once, runs step by step. Samples never meet in that loop, so threads share the batch and do not wait
//! for each other between steps, and the batch can be split with the same bits.
//!
//! The first step has no recurrent term at all: the state before it is not a zero that meets the weight.

pub mod gru;
pub mod lstm;
pub mod rnn;

use crate::gemm::{self, Operand, Packed, Right, Rows, Start, Strided};
use crate::simd;
use crate::tiles::Address;
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Dense, Team, Tensor, Type};
use std::ops::Range;

pub const KINDS: &[OpKind] = &[
    OpKind::of::<lstm::Lstm>(),
    OpKind::of::<lstm::LstmGrad>(),
    OpKind::of::<gru::Gru>(),
    OpKind::of::<gru::GruGrad>(),
    OpKind::of::<rnn::Rnn>(),
    OpKind::of::<rnn::RnnGrad>(),
];

kolo_graph::methods! {
    /// Recurrent layers over `[b, t, i]`, starting from a zero state; each gives the hidden states `[b, t, h]`.
    RecurrentMethods {
        /// Weights `[4h, i]` and `[4h, h]`, biases `[4h]`, in the order input, forget, candidate, output.
        fn lstm(self, w_ih: Tensor<'b>, w_hh: Tensor<'b>, b_ih: Tensor<'b>, b_hh: Tensor<'b>) -> Tensor<'b> {
            self.then(lstm::Lstm {}, &[w_ih, w_hh, b_ih, b_hh])
        }
        /// Weights `[3h, i]` and `[3h, h]`, biases `[3h]`, in the order reset, update, candidate.
        fn gru(self, w_ih: Tensor<'b>, w_hh: Tensor<'b>, b_ih: Tensor<'b>, b_hh: Tensor<'b>) -> Tensor<'b> {
            self.then(gru::Gru {}, &[w_ih, w_hh, b_ih, b_hh])
        }
        /// Weights `[h, i]` and `[h, h]`, biases `[h]`; tanh, or relu.
        fn rnn(self, w_ih: Tensor<'b>, w_hh: Tensor<'b>, b_ih: Tensor<'b>, b_hh: Tensor<'b>, relu: bool) -> Tensor<'b> {
            self.then(rnn::Rnn { relu }, &[w_ih, w_hh, b_ih, b_hh])
        }
    }
}

/// The sizes of one layer.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    steps: usize,
    input: usize,
    hidden: usize,
}

impl Sizes {
    /// From the shapes of `x` and the recurrent weight.
    fn of(x: &[usize], w_hh: &[usize]) -> Self {
        Self { batch: x[0], steps: x[1], input: x[2], hidden: w_hh[1] }
    }

    fn of_types(inputs: &[Type]) -> Self {
        Self::of(&inputs[0].shape, &inputs[2].shape)
    }

    /// Rows of a `[b, t, width]` tensor.
    fn by_sample(self, width: usize) -> Grid {
        Grid { sample_stride: self.steps * width, step_stride: width }
    }

    /// Rows of a `[t, b, width]` tensor.
    fn by_step(self, width: usize) -> Grid {
        Grid { sample_stride: width, step_stride: self.batch * width }
    }

    /// Where the rows of `samples` at `step` lie in a `[t, b, width]` tensor.
    fn at(self, step: usize, samples: &Range<usize>, width: usize) -> Range<usize> {
        let first = (step * self.batch + samples.start) * width;
        first..first + samples.len() * width
    }

    /// Multiply-adds of both forward products.
    fn work(self, gates: usize) -> usize {
        self.batch * self.steps * gates * (self.input + self.hidden)
    }
}

/// Where the row of each sample and step lies.
#[derive(Clone, Copy, Debug)]
struct Grid {
    sample_stride: usize,
    step_stride: usize,
}

/// The rows of every step and sample as the depth of a product: `k = step · batch + sample`.
#[derive(Debug)]
struct Depth<'a> {
    data: &'a [f32],
    grid: Grid,
    batch: usize,
}

impl Depth<'_> {
    /// A copy of known length is a few moves; of any length, a call.
    #[inline(always)]
    fn copy_rows(&self, first: usize, count: usize, ks: Range<usize>, width: usize, out: &mut [f32]) {
        let (mut step, mut sample) = (ks.start / self.batch, ks.start % self.batch);
        for row in out.chunks_exact_mut(width).take(ks.len()) {
            let at = step * self.grid.step_stride + sample * self.grid.sample_stride + first;
            row[..count].copy_from_slice(&self.data[at..at + count]);
            row[count..].fill(0.0);
            sample += 1;
            if sample == self.batch {
                (step, sample) = (step + 1, 0);
            }
        }
    }
}

impl Operand for Depth<'_> {
    fn pack(&self, first: usize, count: usize, ks: Range<usize>, width: usize, out: &mut [f32]) {
        match (count, width) {
            (12, 12) => self.copy_rows(first, 12, ks, 12, out),
            (32, 32) => self.copy_rows(first, 32, ks, 32, out),
            _ => self.copy_rows(first, count, ks, width, out),
        }
    }
}

/// Output types of a layer whose weights have `gates · h` rows, or what is wrong with the inputs.
fn infer(index: Option<Index>, inputs: &[Type], gates: usize) -> Result<Vec<Type>, String> {
    let shapes = index.ok_or("no index")?.output_shapes(inputs)?;
    let (rows, hidden) = (inputs[2].shape[0], inputs[2].shape[1]);
    if rows != gates * hidden {
        let wanted = gates * hidden;
        return Err(format!("input 2, the recurrent weight, is {}: width {hidden} needs {wanted} rows", inputs[2]));
    }
    if let Some(at) = inputs.iter().position(|input| !input.dtype.is_float()) {
        return Err(format!("works on floats, but input {at} is {}; cast it", inputs[at]));
    }
    Ok(shapes.into_iter().map(|shape| Type::new(inputs[0].dtype, shape)).collect())
}

/// Floats to a cache line: every piece of scratch starts on one.
const LINE: usize = 16;

/// Bytes of scratch for pieces of these lengths and for the products.
fn scratch_bytes(lengths: &[usize], threads: usize) -> usize {
    lengths.iter().map(|length| length.next_multiple_of(LINE) * 4).sum::<usize>() + gemm::scratch_bytes(threads)
}

/// Cuts the lent scratch into pieces.
fn cut<'a, const PIECES: usize>(
    mut scratch: &'a mut [f32],
    lengths: [usize; PIECES],
) -> ([&'a mut [f32]; PIECES], &'a mut [f32]) {
    let pieces = lengths.map(|length| {
        let (piece, rest) = std::mem::take(&mut scratch).split_at_mut(length.next_multiple_of(LINE));
        scratch = rest;
        &mut piece[..length]
    });
    (pieces, scratch)
}

/// Multiply-adds below which a second thread costs more than it saves.
const WORK_MIN: usize = 1 << 18;

/// Shares the batch among the threads: `task(samples, scratch of one product)`.
fn share(team: &Team, batch: usize, work: usize, scratch: &mut [f32], task: impl Fn(Range<usize>, &mut [f32]) + Sync) {
    if work < WORK_MIN {
        return task(0..batch, scratch);
    }
    let lent = Address(scratch.as_mut_ptr());
    team.chunks(batch, batch.div_ceil(team.threads()), |samples, thread| {
        // SAFETY: each thread has its own part of the scratch.
        task(samples, unsafe { lent.slice(thread * gemm::SCRATCH, gemm::SCRATCH) });
    });
}

/// `c = start + a · b` on the calling thread, `b` packed before.
#[allow(clippy::too_many_arguments)]
fn product(
    rows: usize,
    columns: usize,
    ks: usize,
    a: Strided<'_>,
    b: Packed<'_>,
    c: Rows,
    start: Start<'_>,
    scratch: &mut [f32],
) {
    gemm::block(0..rows, 0..columns, ks, &a, Right::<Strided<'_>>::Packed(b), &c, start, scratch);
}

/// A matrix whose rows belong to samples and steps.
#[derive(Clone, Copy, Debug)]
struct Sheet<T> {
    data: T,
    grid: Grid,
    width: usize,
}

/// `c = start + a · b` for every step of `samples`.
fn product_of_all_steps(
    (steps, samples): (usize, Range<usize>),
    a: Sheet<&[f32]>,
    b: Packed<'_>,
    c: Sheet<Address>,
    start: Start<'_>,
    scratch: &mut [f32],
) {
    // Along the longer of the two axes the rows lie evenly: one product for each place on the other.
    let along_steps = steps >= samples.len();
    let (outer, rows) = if along_steps { (samples.clone(), steps) } else { (0..steps, samples.len()) };
    for at in outer {
        let place = |grid: Grid| match along_steps {
            true => (at * grid.sample_stride, grid.step_stride),
            false => (samples.start * grid.sample_stride + at * grid.step_stride, grid.sample_stride),
        };
        let ((from, line_stride), (to, stride)) = (place(a.grid), place(c.grid));
        // SAFETY: the sheet of `c` holds a row for every sample and step, and no two threads share samples.
        let data = Address(unsafe { c.data.get().add(to) });
        let a_rows = Strided { data: &a.data[from..], line_stride, k_stride: 1 };
        product(rows, c.width, a.width, a_rows, b, Rows { data, stride }, start, scratch);
    }
}

/// The state of every sample before `step`, one row each; `y` is `[samples, t, h]`.
fn states_before(y: &[f32], sizes: Sizes, step: usize) -> Strided<'_> {
    Strided { data: &y[(step - 1) * sizes.hidden..], line_stride: sizes.steps * sizes.hidden, k_stride: 1 }
}

/// The gradients of a layer's gates' sums: `[t, b, stride]`.
#[derive(Clone, Copy, Debug)]
struct GateGrads<'a> {
    data: &'a [f32],
    stride: usize,
}

/// Floats from one row of gradients to the next. Rows a power of two apart would fight for the same lines of the cache
/// when a product reads down a column.
fn padded(width: usize) -> usize {
    width.next_multiple_of(LINE) + LINE
}

/// One block of rows of a weight's gradient: the gates' `columns` against the input, or the state before.
#[derive(Clone, Copy, Debug)]
enum Against<'a> {
    Input(&'a [f32]),
    StateBefore(&'a [f32]),
}

impl GateGrads<'_> {
    /// `out = dgatesᵀ · rows`, summed over steps and samples.
    fn weight(
        &self,
        team: &Team,
        sizes: Sizes,
        columns: Range<usize>,
        rows: Against<'_>,
        out: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (data, width, first_step) = match rows {
            Against::Input(x) => (x, sizes.input, 0),
            Against::StateBefore(y) => (y, sizes.hidden, 1),
        };
        let depth = (sizes.steps - first_step) * sizes.batch;
        let grid = sizes.by_step(self.stride);
        let gates = &self.data[first_step * grid.step_stride..];
        let gates = Depth { data: gates.get(columns.start..).unwrap_or(&[]), grid, batch: sizes.batch };
        let rows = Depth { data, grid: sizes.by_sample(width), batch: sizes.batch };
        let sink = Rows { data: Address(out.as_mut_ptr()), stride: width };
        gemm::multiply(team, columns.len(), width, depth, &gates, Right::Fresh(&rows), &sink, Start::Zero, scratch);
    }

    /// The gates' `columns` times rows of the input weight, for every step: the input's gradient or a part of it.
    #[allow(clippy::too_many_arguments)]
    fn input(
        &self,
        team: &Team,
        sizes: Sizes,
        columns: Range<usize>,
        w: &[f32],
        start: Start<'_>,
        dx: Address,
        room: &mut [f32],
        scratch: &mut [f32],
    ) {
        let weight = Strided { data: w, line_stride: 1, k_stride: sizes.input };
        let packed = gemm::prepack(&weight, sizes.input, columns.len(), room);
        let work = sizes.batch * sizes.steps * sizes.input * columns.len();
        share(team, sizes.batch, work, scratch, |samples, scratch| {
            let gates = &self.data[columns.start.min(self.data.len())..];
            let from = Sheet { data: gates, grid: sizes.by_step(self.stride), width: columns.len() };
            let to = Sheet { data: dx, grid: sizes.by_sample(sizes.input), width: sizes.input };
            product_of_all_steps((sizes.steps, samples), from, packed, to, start, scratch);
        });
    }
}

/// Adds the samples' rows of `[b, width]` in order, `columns` only.
fn add_samples(rows: &[f32], width: usize, columns: Range<usize>, out: &mut [f32]) {
    out.fill(0.0);
    for row in rows.chunks_exact(width.max(1)) {
        simd::add_into(out, &row[columns.clone()]);
    }
}

/// Splits a row into `N` parts of one width.
fn parts<const N: usize>(row: &[f32]) -> [&[f32]; N] {
    let width = row.len() / N;
    std::array::from_fn(|at| &row[at * width..(at + 1) * width])
}

/// As `parts`, to write.
fn parts_mut<const N: usize>(mut row: &mut [f32]) -> [&mut [f32]; N] {
    let width = row.len() / N;
    std::array::from_fn(|_| {
        let (part, rest) = std::mem::take(&mut row).split_at_mut(width);
        row = rest;
        part
    })
}

/// Test arguments of a layer. The weights are as small as a new layer's: much larger ones make long sequences chaotic.
fn layer(batch: usize, steps: usize, input: usize, hidden: usize, gates: usize) -> Vec<Arg> {
    let rows = gates * hidden;
    let weights = [vec![rows, input], vec![rows, hidden], vec![rows], vec![rows]];
    let mut args = vec![Arg::real([batch, steps, input])];
    let size = 1.0 / (hidden as f64).sqrt();
    args.extend(weights.map(|shape| Arg::real(shape).within(-size, size)));
    args
}

fn constant(args: Vec<Arg>) -> Vec<Arg> {
    args.into_iter().map(Arg::constant).collect()
}

/// The plain definitions in f64, row by row, that the three layers' references share.
mod plain {
    use super::Dense;

    /// The last dim at `[a, b]` of a tensor of three.
    pub fn row(tensor: &Dense, a: usize, b: usize) -> &[f64] {
        let width = tensor.shape[2];
        let at = (a * tensor.shape[1] + b) * width;
        &tensor.data[at..at + width]
    }

    pub fn set_row(tensor: &mut Dense, a: usize, b: usize, values: &[f64]) {
        let at = (a * tensor.shape[1] + b) * tensor.shape[2];
        tensor.data[at..at + values.len()].copy_from_slice(values);
    }

    /// `bias + w · x`; no `x`, no product.
    pub fn affine(w: &Dense, x: Option<&[f64]>, bias: &Dense) -> Vec<f64> {
        let mut out = bias.data.clone();
        let Some(x) = x else { return out };
        for (out, weights) in out.iter_mut().zip(w.data.chunks(w.shape[1])) {
            *out += weights.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
        }
        out
    }

    /// `wᵀ · g`.
    pub fn transposed(w: &Dense, g: &[f64]) -> Vec<f64> {
        let mut out = vec![0.0; w.shape[1]];
        for (weights, g) in w.data.chunks(w.shape[1]).zip(g) {
            out.iter_mut().zip(weights).for_each(|(out, w)| *out += w * g);
        }
        out
    }

    /// `dw += g · xᵀ`.
    pub fn add_outer(dw: &mut Dense, g: &[f64], x: &[f64]) {
        for (row, g) in dw.data.chunks_mut(x.len()).zip(g) {
            row.iter_mut().zip(x).for_each(|(dw, x)| *dw += g * x);
        }
    }

    pub fn add(sum: &mut [f64], values: &[f64]) {
        sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
    }
}
