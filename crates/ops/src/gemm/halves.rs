//! Products of halves: operands are widened while they are packed, and results are rounded once, when all their terms are added up.
//!
//! So an operand passes through memory in 16 bits, and the sums are those of the f32 product, in the same order.

use super::pack::transpose;
use super::product::Product;
use super::{K_BLOCK, Operand, Rows, SCRATCH, Sink, Strided};
use crate::halves::{is_half, round, widen, widen_one};
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::DType;
use kolo_graph::cpu::Buffer;
use std::ops::Range;

/// Rows and columns of a result that are added up in f32 before they are rounded: with the operands' blocks they fit the
/// second-level cache.
const STAGE_ROWS: usize = 264;
const STAGE_COLUMNS: usize = 384;
/// Floats for them.
pub(super) const STAGE: usize = STAGE_ROWS * STAGE_COLUMNS;

/// A matrix of any floats in memory, as [`Strided`].
#[derive(Clone, Copy, Debug)]
pub enum Lines<'a> {
    Full(Strided<'a>),
    Half(HalfLines<'a>),
}

/// A matrix of halves in memory, as [`Strided`].
#[derive(Clone, Copy, Debug)]
pub struct HalfLines<'a> {
    pub data: &'a [u16],
    pub dtype: DType,
    pub line_stride: usize,
    pub k_stride: usize,
}

impl<'a> Lines<'a> {
    /// The elements of an operand from `start` on, `len` of them.
    pub fn of(operand: &'a Buffer, start: usize, len: usize, line_stride: usize, k_stride: usize) -> Self {
        assert!(start + len <= operand.ty.elements(), "a part of the operand");
        let dtype = operand.ty.dtype;
        if is_half(dtype) {
            // SAFETY: the executor lays out as many elements there, and nothing writes an input while a kernel runs.
            let data = unsafe { std::slice::from_raw_parts(operand.data.cast::<u16>().add(start), len) };
            return Self::Half(HalfLines { data, dtype, line_stride, k_stride });
        }
        // SAFETY: as above.
        let data = unsafe { std::slice::from_raw_parts(operand.data.cast::<f32>().add(start), len) };
        Self::Full(Strided { data, line_stride, k_stride })
    }
}

impl Operand for Lines<'_> {
    fn pack(&self, first: usize, count: usize, ks: Range<usize>, width: usize, out: &mut [f32]) {
        match self {
            Lines::Full(lines) => lines.pack(first, count, ks, width, out),
            Lines::Half(lines) => lines.pack(first, count, ks, width, out),
        }
    }
    fn pack_slivers(&self, first: usize, count: usize, ks: Range<usize>, width: usize, out: &mut [f32]) {
        match self {
            Lines::Full(lines) => lines.pack_slivers(first, count, ks, width, out),
            Lines::Half(lines) => lines.pack_slivers(first, count, ks, width, out),
        }
    }
    fn strided(&self) -> Option<Strided<'_>> {
        match self {
            Lines::Full(lines) => Some(*lines),
            Lines::Half(_) => None,
        }
    }
}

/// Lines along `k` that are widened and turned together.
const TOGETHER: usize = 8;
/// Columns of one `k` that are widened together.
const RUN: usize = 1024;

impl Operand for HalfLines<'_> {
    fn pack(&self, first: usize, count: usize, ks: Range<usize>, width: usize, out: &mut [f32]) {
        let (source, depth) = (&self.data[first * self.line_stride + ks.start * self.k_stride..], ks.len());
        if count < width {
            out.chunks_mut(width).take(depth).for_each(|row| row[count..].fill(0.0));
        }
        if self.k_stride == 1 && depth <= K_BLOCK {
            let mut scratch = [0.0; TOGETHER * K_BLOCK];
            for start in (0..count).step_by(TOGETHER) {
                let lines = TOGETHER.min(count - start);
                for (line, scratch) in scratch.chunks_mut(K_BLOCK).enumerate().take(lines) {
                    widen(self.dtype, &source[(start + line) * self.line_stride..][..depth], &mut scratch[..depth]);
                }
                transpose(&scratch, K_BLOCK, lines, depth, width, &mut out[start..]);
            }
            return;
        }
        for (k, row) in out.chunks_mut(width).enumerate().take(depth) {
            let source = &source[k * self.k_stride..];
            match self.line_stride {
                1 => widen(self.dtype, &source[..count], &mut row[..count]),
                stride => (0..count).for_each(|line| row[line] = widen_one(self.dtype, source[line * stride])),
            }
        }
    }

    /// Columns that lie side by side are widened a run at a time, as the memory likes it, and dealt out from there.
    fn pack_slivers(&self, first: usize, count: usize, ks: Range<usize>, width: usize, out: &mut [f32]) {
        let depth = ks.len();
        let whole = if self.line_stride == 1 { count / width } else { 0 };
        let mut scratch = [0.0; RUN];
        let together = RUN / width;
        for start in (0..whole).step_by(together) {
            let columns = together.min(whole - start) * width;
            let out = &mut out[start * width * depth..];
            for k in 0..depth {
                let from = first + start * width + (ks.start + k) * self.k_stride;
                widen(self.dtype, &self.data[from..from + columns], &mut scratch[..columns]);
                deal_row(width, &scratch[..columns], depth, k, out);
            }
        }
        for sliver in whole..count.div_ceil(width) {
            let skip = sliver * width;
            let out = &mut out[skip * depth..(skip + width) * depth];
            self.pack(first + skip, width.min(count - skip), ks.clone(), width, out);
        }
    }
}

vectorized! {
    /// Deals the columns of term `k` out to slivers of `depth` terms.
    fn deal_row(width: usize, row: &[f32], depth: usize, k: usize, out: &mut [f32]) {
        match width {
            32 => deal_pieces::<32>(row, depth, k, out),
            16 => deal_pieces::<16>(row, depth, k, out),
            12 => deal_pieces::<12>(row, depth, k, out),
            6 => deal_pieces::<6>(row, depth, k, out),
            _ => {
                for (sliver, piece) in row.chunks(width).enumerate() {
                    let at = (sliver * depth + k) * width;
                    out[at..at + width].copy_from_slice(piece);
                }
            }
        }
    }
}

/// The width is a constant so that a piece is a register or two, not a call.
#[inline(always)]
fn deal_pieces<const WIDTH: usize>(row: &[f32], depth: usize, k: usize, out: &mut [f32]) {
    let (slots, _) = out.as_chunks_mut::<WIDTH>();
    for (sliver, piece) in row.as_chunks::<WIDTH>().0.iter().enumerate() {
        slots[sliver * depth + k] = *piece;
    }
}

/// A row-major matrix of any floats to write.
#[derive(Clone, Copy, Debug)]
pub enum Output {
    Full(Rows),
    Half(HalfRows),
}

/// A row-major matrix of halves to write. A result is stored once, so it must be whole.
#[derive(Clone, Copy, Debug)]
pub struct HalfRows {
    data: *mut u16,
    dtype: DType,
    stride: usize,
}

// SAFETY: whoever writes it writes disjoint parts.
unsafe impl Send for HalfRows {}
// SAFETY: as above.
unsafe impl Sync for HalfRows {}

impl Output {
    /// The elements of an output from `start` on, in rows of `stride`.
    pub fn of(output: &Buffer, start: usize, stride: usize) -> Self {
        assert!(start <= output.ty.elements(), "a part of the output");
        let dtype = output.ty.dtype;
        // SAFETY: the place is inside the output, or just behind it.
        unsafe {
            match is_half(dtype) {
                true => Self::Half(HalfRows { data: output.data.cast::<u16>().add(start), dtype, stride }),
                false => Self::Full(Rows { data: Address(output.data.cast::<f32>().add(start)), stride }),
            }
        }
    }
}

impl Sink for Output {
    fn place(&self, row: usize, column: usize, rows: usize, columns: usize) -> Option<(*mut f32, usize)> {
        match self {
            Output::Full(sink) => sink.place(row, column, rows, columns),
            Output::Half(_) => None,
        }
    }
    fn transfer(&self, _: [usize; 4], _: &mut [f32], _: bool) {
        unreachable!("halves are staged, and every tile of f32 lies straight")
    }
    fn rows(&self) -> Option<Rows> {
        match self {
            Output::Full(sink) => Some(*sink),
            Output::Half(_) => None,
        }
    }
    fn rounds(&self) -> Option<HalfRows> {
        match self {
            Output::Full(_) => None,
            Output::Half(sink) => Some(*sink),
        }
    }
}

impl HalfRows {
    /// Rounds what was added up of these rows and columns.
    fn store(&self, rows: Range<usize>, columns: Range<usize>, stage: &[f32]) {
        for (row, line) in rows.zip(stage.chunks(STAGE_COLUMNS)) {
            let start = row * self.stride + columns.start;
            // SAFETY: the caller made the matrix large enough for the product, and this part of it is this thread's.
            let out = unsafe { std::slice::from_raw_parts_mut(self.data.add(start), columns.len()) };
            round(self.dtype, &line[..columns.len()], out);
        }
    }
}

/// A part of a product at a time: added up in f32, then rounded.
pub(super) fn staged<C: Sink, A: Operand, B: Operand>(
    product: &Product<'_, C>,
    sink: HalfRows,
    (a, b): (&A, &B),
    scratch: &mut [f32],
) {
    let (scratch, stage) = scratch.split_at_mut(SCRATCH);
    for top in product.rows.clone().step_by(STAGE_ROWS) {
        let rows = top..(top + STAGE_ROWS).min(product.rows.end);
        for left in product.columns.clone().step_by(STAGE_COLUMNS) {
            let columns = left..(left + STAGE_COLUMNS).min(product.columns.end);
            // As if the stage were the whole result.
            let data = Address(stage.as_mut_ptr().wrapping_sub(top * STAGE_COLUMNS + left));
            let c = Rows { data, stride: STAGE_COLUMNS };
            let (ks, start) = (product.ks, product.start);
            Product { rows: rows.clone(), columns: columns.clone(), ks, c: &c, start }.run(a, b, scratch);
            sink.store(rows.clone(), columns, stage);
        }
    }
}
