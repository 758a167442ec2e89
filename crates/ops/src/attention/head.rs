//! One head at a time: its operands where they lie, and its rows of scores.

use super::sizes::{BLOCK, Sizes};
use crate::gemm::{self, Gemm, Right, Rows, Start, Strided};
use crate::pairwise;
use crate::real::{Real, exp_of_negative};
use crate::simd;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::CpuCx;

/// One head's operand: rows of `dim` numbers, `stride` apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub data: *const f32,
    pub stride: usize,
    pub rows: usize,
    pub dim: usize,
}

impl Head {
    /// Rows `start..` as lines; `k` runs along the dim.
    pub(super) fn by_row(&self, start: usize) -> Strided<'_> {
        Strided { data: self.slice(start), line_stride: self.stride, k_stride: 1 }
    }
    /// Dims as lines; `k` runs along the rows.
    pub(super) fn by_dim(&self, start: usize) -> Strided<'_> {
        Strided { data: self.slice(start), line_stride: 1, k_stride: self.stride }
    }
    pub(super) fn slice(&self, start: usize) -> &[f32] {
        let len = ((self.rows - start) * self.stride).saturating_sub(self.stride - self.dim);
        // SAFETY: the head was made from an operand with that many rows.
        unsafe { std::slice::from_raw_parts(self.data.add(start * self.stride), len) }
    }
    pub(super) fn row(&self, at: usize) -> &[f32] {
        &self.slice(at)[..self.dim]
    }
    /// Asks for a row. Heads lie in pieces, which no machine foresees by itself.
    pub(super) fn prefetch(&self, at: usize) {
        if at < self.rows {
            simd::prefetch(self.data.wrapping_add(at * self.stride), self.dim);
        }
    }
}

/// q, k and v of one batch item and head.
pub(super) fn heads_of(cx: &CpuCx<'_>, s: &Sizes, packed: bool, batch: usize, head: usize) -> [Head; 3] {
    let width = s.width();
    std::array::from_fn(|which| {
        let rows = if which == 0 { s.queries } else { s.keys };
        let (data, stride, shift) = match packed {
            true => (cx.f32(0), 3 * width, which * width),
            false => (cx.f32(which), width, 0),
        };
        let offset = batch * rows * stride + shift + head * s.dim;
        Head { data: data[offset..].as_ptr(), stride, rows, dim: s.dim }
    })
}

// SAFETY: a head is a read-only view.
unsafe impl Sync for Head {}

/// `row = row·scale + bias`.
#[inline(always)]
pub(super) fn scaled(row: &mut [f32], scale: f32, bias: Option<&[f32]>) {
    match bias {
        Some(bias) => row.iter_mut().zip(bias).for_each(|(x, b)| *x = *x * scale + *b),
        None => row.iter_mut().for_each(|x| *x *= scale),
    }
}

vectorized! {
    /// Turns a row of raw scores, of which some are visible, into probabilities; returns the log of the sum of exponentials: −∞
    /// if none is visible or all scores are −∞, and then all probabilities are zero.
    pub(super) fn soften(row: &mut [f32], scale: f32, bias: Option<&[f32]>, visible: usize) -> f32 {
        scaled(row, scale, bias);
        row[visible..].fill(f32::NEG_INFINITY);
        // Of the whole row, not of its visible part: whole vectors.
        let largest = simd::max_of(row);
        if largest == f32::NEG_INFINITY {
            // A query that sees no key: the mean over nothing is taken as zero, not as 0/0.
            row.fill(0.0);
            return f32::NEG_INFINITY;
        }
        for x in row.iter_mut() {
            *x = exp_of_negative(*x - largest);
        }
        let total = pairwise::sum_of(row);
        let share = 1.0 / total;
        for x in row.iter_mut() {
            *x *= share;
        }
        largest + Real::ln(total)
    }
}

vectorized! {
    /// The probabilities again, from the log of the sum.
    pub(super) fn soften_again(row: &mut [f32], scale: f32, bias: Option<&[f32]>, visible: usize, sum: f32) {
        if sum == f32::NEG_INFINITY {
            return row.fill(0.0);
        }
        scaled(row, scale, bias);
        for x in row.iter_mut() {
            *x = Real::exp(*x - sum);
        }
        row[visible..].fill(Real::exp(f32::NEG_INFINITY - sum));
    }
}

vectorized! {
    /// `dp = p·(dp − delta)·scale`.
    pub(super) fn score_gradient(dp: &mut [f32], p: &[f32], delta: f32, scale: f32) {
        for (dp, p) in dp.iter_mut().zip(p) {
            *dp = p * (*dp - delta) * scale;
        }
    }
}

pub(super) fn bias_row<'a>(
    bias: Option<(&'a [f32], &[usize])>,
    s: &Sizes,
    batch: usize,
    head: usize,
    q: usize,
) -> Option<&'a [f32]> {
    let (data, shape) = bias?;
    let (b, h) = (if shape[0] == 1 { 0 } else { batch }, if shape[1] == 1 { 0 } else { head });
    let start = ((b * shape[1] + h) * s.queries + q) * s.keys;
    Some(&data[start..start + s.keys])
}

/// An operand packed once per head and used by every block of queries.
pub(super) type PackedHead<'a> = Right<'a, Strided<'a>>;

/// Raw scores of a block of queries: `scores[i, ..keys] = q_i · k_j`.
pub(super) fn raw_scores(
    q: &Head,
    k: PackedHead<'_>,
    rows: std::ops::Range<usize>,
    keys: usize,
    scores: &mut [f32],
    scratch: &mut [f32],
) {
    let sink = Rows { data: Address(scores.as_mut_ptr()), stride: keys };
    let shape = [rows.len(), keys, q.dim];
    Gemm { shape, a: &q.by_row(rows.start), b: k, c: &sink, start: Start::Zero }.run(scratch);
}

/// Packs a head's rows as columns of a product over its dim.
pub(super) fn pack_rows<'a>(head: &Head, out: &'a mut [f32]) -> PackedHead<'a> {
    Right::Packed(gemm::prepack(&head.by_row(0), head.rows, head.dim, out))
}

/// Packs a head's dims as columns of a product over its rows.
pub(super) fn pack_dims<'a>(head: &Head, out: &'a mut [f32]) -> PackedHead<'a> {
    Right::Packed(gemm::prepack(&head.by_dim(0), head.dim, head.rows, out))
}

pub(super) fn rows_len(s: &Sizes) -> usize {
    gemm::prepacked_len(s.keys, s.dim)
}

pub(super) fn dims_len(s: &Sizes) -> usize {
    gemm::prepacked_len(s.dim, s.keys)
}

/// Floats of scratch per thread: `tiles` blocks of scores, a product's own, and packed operands.
pub(super) fn thread_scratch(s: &Sizes, tiles: usize) -> usize {
    gemm::SCRATCH + tiles * BLOCK * s.keys.next_multiple_of(16) + 2 * rows_len(s) + dims_len(s)
}
