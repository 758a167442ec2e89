//! The gradients that need no order of steps, from the gradients of the gates: of both weights, and of the input.
//!
//! Both weights multiply the same gates, by the input and by the state before. One product against the two side by side
//! packs the gates, the larger operand, once.

use super::{Grid, LINE, Sheet, Sizes, product_of_all_steps, share};
use crate::gemm::{self, Gemm, Operand, Right, Rows, Sink, Start, Strided};
use crate::tiles::Address;
use kolo_graph::Team;
use std::ops::Range;

/// The gradients of the gates' sums: `[t, b, stride]`.
#[derive(Clone, Copy, Debug)]
pub struct GateGrads<'a> {
    pub data: &'a [f32],
    pub stride: usize,
}

/// Floats from one row of gradients to the next. Rows a power of two apart would fight for the same lines of the cache
/// when a product reads down a column.
pub fn padded(width: usize) -> usize {
    width.next_multiple_of(LINE) + LINE
}

/// What a weight was multiplied by (`x` or `y`, `[b, t, width]`), and some rows of its gradient.
#[derive(Debug)]
pub struct Factor<'a> {
    pub rows: &'a [f32],
    pub d_weight: &'a mut [f32],
}

/// The rows to multiply by and the gradient to fill; a missing factor has no columns.
fn open(factor: Option<Factor<'_>>, width: usize) -> (&[f32], Rows) {
    match factor {
        Some(Factor { rows, d_weight }) => (rows, Rows { data: Address(d_weight.as_mut_ptr()), stride: width }),
        None => (&[], Rows { data: Address(std::ptr::null_mut()), stride: 0 }),
    }
}

impl GateGrads<'_> {
    /// The gradients of weights whose rows are the gates' `columns`, summed over steps and samples.
    pub fn weights(
        &self,
        (team, scratch): (&Team, &mut [f32]),
        sizes: Sizes,
        columns: Range<usize>,
        input: Option<Factor<'_>>,
        state: Option<Factor<'_>>,
    ) {
        let depth = |data, grid, delay| Depth { data, grid, batch: sizes.batch, delay };
        let gates = self.data.get(columns.start..).unwrap_or(&[]);
        let gates = Strided { data: gates, line_stride: 1, k_stride: self.stride };
        let (x, left) = open(input, sizes.input);
        let (y, right) = open(state, sizes.hidden);
        let (cut, ks) = (left.stride, sizes.steps * sizes.batch);
        let x = depth(x, sizes.by_sample(sizes.input), 0);
        let y = depth(y, sizes.by_sample(sizes.hidden), 1);
        let (b, c) = (Beside { left: x, right: y, cut }, Beside { left, right, cut });
        let width = left.stride + right.stride;
        let shape = [columns.len(), width, ks];
        Gemm { shape, a: &gates, b: Right::Fresh(&b), c: &c, start: Start::Zero }.run_on(team, scratch);
    }

    /// The gates' `columns` times rows of the input weight, for every step: the input's gradient or a part of it.
    pub fn input(
        &self,
        (team, scratch): (&Team, &mut [f32]),
        sizes: Sizes,
        columns: Range<usize>,
        (weight, packing): (&[f32], &mut [f32]),
        start: Start<'_>,
        dx: Address,
    ) {
        let weight = Strided { data: weight, line_stride: 1, k_stride: sizes.input };
        let packed = gemm::prepack(&weight, sizes.input, columns.len(), packing);
        let work = sizes.batch * sizes.steps * sizes.input * columns.len();
        share(team, sizes.batch, work, scratch, |samples, scratch| {
            let gates = self.data.get(columns.start..).unwrap_or(&[]);
            let from = Sheet { data: gates, grid: sizes.by_step(self.stride), width: columns.len() };
            let to = Sheet { data: dx, grid: sizes.by_sample(sizes.input), width: sizes.input };
            product_of_all_steps((sizes.steps, samples), from, packed, to, start, scratch);
        });
    }
}

/// The rows of all steps and samples as the depth of a product, `k = step · batch + sample`; each row comes `delay` steps
/// later, after rows of zeros.
#[derive(Debug)]
struct Depth<'a> {
    data: &'a [f32],
    grid: Grid,
    batch: usize,
    delay: usize,
}

impl Depth<'_> {
    /// For each `k`, numbers `first..first + count` of its row, to `offset` of every `width`.
    #[inline(always)]
    fn copy(&self, (first, count): (usize, usize), ks: Range<usize>, width: usize, offset: usize, out: &mut [f32]) {
        let (mut step, mut sample) = (ks.start / self.batch, ks.start % self.batch);
        for row in out.chunks_exact_mut(width).take(ks.len()) {
            let row = &mut row[offset..offset + count];
            if step < self.delay {
                row.fill(0.0);
            } else {
                let at = (step - self.delay) * self.grid.step_stride + sample * self.grid.sample_stride + first;
                row.copy_from_slice(&self.data[at..at + count]);
            }
            sample += 1;
            if sample == self.batch {
                (step, sample) = (step + 1, 0);
            }
        }
    }
}

impl Operand for Depth<'_> {
    fn pack(&self, first: usize, count: usize, ks: Range<usize>, width: usize, out: &mut [f32]) {
        // The sizes of whole tiles: a copy of known length is a few moves, of any length a call.
        match (count, width) {
            (16, 16) => return self.copy((first, 16), ks, 16, 0, out),
            (32, 32) => return self.copy((first, 32), ks, 32, 0, out),
            _ => {}
        }
        if count < width {
            out[..ks.len() * width].fill(0.0);
        }
        self.copy((first, count), ks, width, 0, out);
    }
}

/// Two matrices side by side; columns from `cut` on are the right one's.
#[derive(Debug)]
struct Beside<T> {
    left: T,
    right: T,
    cut: usize,
}

impl Operand for Beside<Depth<'_>> {
    fn pack(&self, first: usize, count: usize, ks: Range<usize>, width: usize, out: &mut [f32]) {
        if first >= self.cut {
            return self.right.pack(first - self.cut, count, ks, width, out);
        }
        let lefts = count.min(self.cut - first);
        self.left.pack(first, lefts, ks.clone(), width, out);
        if lefts < count {
            self.right.copy((0, count - lefts), ks, width, lefts, out);
        }
    }
}

impl Sink for Beside<Rows> {
    fn place(&self, row: usize, column: usize, rows: usize, columns: usize) -> Option<(*mut f32, usize)> {
        if column >= self.cut {
            self.right.place(row, column - self.cut, rows, columns)
        } else if column + columns <= self.cut {
            self.left.place(row, column, rows, columns)
        } else {
            None
        }
    }
    fn transfer(&self, [row, column, rows, columns]: [usize; 4], tile: &mut [f32], load: bool) {
        let width = gemm::tile_shape().columns;
        for at in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
            let kept = &mut tile[at.0 * width + at.1];
            let Some((data, _)) = self.place(row + at.0, column + at.1, 1, 1) else { continue };
            // SAFETY: one element of one of the two matrices, each large enough for its part of the product.
            unsafe { if load { *kept = *data } else { *data = *kept } }
        }
    }
}
