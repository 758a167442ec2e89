//! Recurrent layers over a whole sequence: [`lstm`], [`gru`] and plain [`rnn`], with PyTorch's formulas and weight layouts.
//!
//! Legend: `b` batch, `t` steps, `i` input width, `h` hidden width, `g` rows of the weights (gates times `h`).
//!
//! A layer is one op. What does not depend on the step before is done for all steps at once: the input's share of the
//! gates forward; the weights' and the input's gradients backward. Only the small product with the recurrent weight, whose
//! packing is done once, runs step by step. Samples never meet in that loop, so threads share the batch and do not wait
//! for each other between steps, and the batch can be split with the same bits.
//!
//! Forward, the first step has no recurrent term; in the recurrent weight's gradient the state before it is zero.

mod gpu;
pub mod gru;
mod layer;
pub mod lstm;
mod plain;
pub mod rnn;
mod steps;
mod weights;

use crate::gemm::{self, Gemm, Packed, Right, Rows, Start, Strided};
use crate::simd;
use crate::tiles::Address;
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::split::{Placement, Split};
use kolo_graph::{DType, Team, Tensor, Type};
use std::ops::Range;

pub const KINDS: &[OpKind] = &[
    OpKind::of::<lstm::Lstm>().with_cuda::<lstm::Lstm>(),
    OpKind::of::<lstm::LstmGrad>().with_cuda::<lstm::LstmGrad>(),
    OpKind::of::<gru::Gru>().with_cuda::<gru::Gru>(),
    OpKind::of::<gru::GruGrad>().with_cuda::<gru::GruGrad>(),
    OpKind::of::<rnn::Rnn>().with_cuda::<rnn::Rnn>(),
    OpKind::of::<rnn::RnnGrad>().with_cuda::<rnn::RnnGrad>(),
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

    /// The rows of `samples` at `step` of a `[t, b, width]` tensor.
    ///
    /// # Safety
    /// The tensor is at `of`, and nobody else uses these rows meanwhile.
    unsafe fn rows<'a>(self, of: Address, step: usize, samples: &Range<usize>, width: usize) -> &'a mut [f32] {
        let range = self.at(step, samples, width);
        // SAFETY: by the contract above.
        unsafe { of.slice(range.start, range.len()) }
    }

    /// Multiply-adds of both forward products.
    fn work(self, gates: usize) -> usize {
        kolo_graph::types::count(&[self.batch, self.steps, gates, self.input + self.hidden])
    }
}

/// Where the row of each sample and step lies.
#[derive(Clone, Copy, Debug)]
struct Grid {
    sample_stride: usize,
    step_stride: usize,
}

/// The splits of a backward op: by samples, and by the input's columns, of which only the input's own weight and gradient
/// know. Outputs are the gradients of the weights first and perhaps that of the input last.
fn backward_splits(index: Option<Index>, inputs: &[Type], gradients: usize, outputs: usize) -> Vec<Split> {
    let mut splits = index.map_or_else(Vec::new, |index| index.splits(inputs));
    let mut from = vec![Placement::Replicate; inputs.len()];
    (from[0], from[1]) = (Placement::Shard(2), Placement::Shard(1));
    let mut to = vec![Placement::Replicate; outputs];
    to[0] = Placement::Shard(1);
    to[gradients..].fill(Placement::Shard(2));
    splits.push(Split::new("i", inputs[0].shape[2], from, to));
    splits
}

/// Output types of a layer whose weights have `gates · h` rows, or what is wrong with the inputs.
fn infer(index: Option<Index>, inputs: &[Type], gates: usize) -> Result<Vec<Type>, String> {
    let shapes = index.ok_or("no index")?.output_shapes(inputs)?;
    let (rows, hidden) = (inputs[2].shape[0], inputs[2].shape[1]);
    if rows != gates * hidden {
        let wanted = gates * hidden;
        return Err(format!("input 2, the recurrent weight, is {}: width {hidden} needs {wanted} rows", inputs[2]));
    }
    if let Some(at) = inputs.iter().position(|input| input.elements() == 0) {
        return Err(format!("none of batch, time, input and width may be empty, but input {at} is {}", inputs[at]));
    }
    Ok(shapes.into_iter().map(|shape| Type::new(inputs[0].dtype, shape)).collect())
}

/// Output types of a layer's gradient: those of weights and biases are f32, that of the input is as the input.
fn infer_grad(index: Option<Index>, inputs: &[Type], gates: usize, need_dx: bool) -> Result<Vec<Type>, String> {
    let mut types = infer(index, inputs, gates)?;
    let weights = types.len() - usize::from(need_dx);
    types[..weights].iter_mut().for_each(|ty| ty.dtype = DType::F32);
    Ok(types)
}

/// Floats to a cache line: every piece of scratch starts on one.
const LINE: usize = 16;

/// Bytes of scratch for pieces of these lengths and for the products.
fn scratch_bytes(lengths: &[usize], threads: usize) -> usize {
    lengths.iter().map(|length| length.next_multiple_of(LINE) * 4).sum::<usize>() + gemm::scratch_bytes(threads)
}

/// Cuts the lent scratch into pieces.
fn cut<const PIECES: usize>(mut scratch: &mut [f32], lengths: [usize; PIECES]) -> ([&mut [f32]; PIECES], &mut [f32]) {
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
fn product(shape: [usize; 3], a: Strided<'_>, b: Packed<'_>, c: Rows, start: Start<'_>, scratch: &mut [f32]) {
    Gemm { shape, a: &a, b: Right::<Strided<'_>>::Packed(b), c: &c, start }.run(scratch);
}

/// A matrix whose rows belong to samples and steps.
#[derive(Clone, Copy, Debug)]
struct Sheet<T> {
    data: T,
    grid: Grid,
    width: usize,
}

/// Rows from which a product is near its best rate.
const ROWS_MIN: usize = 8;

/// `c = start + a · b` for every step of `samples`.
fn product_of_all_steps(
    (steps, samples): (usize, Range<usize>),
    a: Sheet<&[f32]>,
    b: Packed<'_>,
    c: Sheet<Address>,
    start: Start<'_>,
    scratch: &mut [f32],
) {
    // Rows lie evenly along either axis: one product for each place on the other. A batch that fills tiles is packed
    // best step by step, as the recurrent product is; a smaller one wastes less along the steps.
    let along_steps = samples.len() < ROWS_MIN && steps > samples.len();
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
        product([rows, c.width, a.width], a_rows, b, Rows { data, stride }, start, scratch);
    }
}

/// The state of every sample before `step`, one row each; `y` is `[samples, t, h]`.
fn states_before(y: &[f32], sizes: Sizes, step: usize) -> Strided<'_> {
    Strided { data: &y[(step - 1) * sizes.hidden..], line_stride: sizes.steps * sizes.hidden, k_stride: 1 }
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
