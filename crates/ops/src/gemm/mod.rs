//! Matrix product, the engine under linear layers, convolutions, attention and recurrent layers.
//!
//! `c[m, n] = Σ_k a[m, k] · b[k, n]`, blocked as Goto and van de Geijn do it: a sliver of `b` that fits the first-level
//! cache meets one panel of rows of `a` after the other, and a tile of `c` stays in registers for a whole block of `k`.
//! Operands are packed where they do not lie in the order in which the kernel reads them; four ways around that:
//! - rows of `a` that lie along `k` are read where they are, or moved closer if they are far apart;
//! - a sliver of `b` whose columns lie side by side is packed by the kernel, during the first tile it is used for;
//! - one row of `a` is multiplied with the columns of `b` where they lie;
//! - if both lie along `k`, and `a` has few rows or `b` few columns, `cᵀ = bᵀ·aᵀ` is computed: `a` is packed, `b` read where
//!   it lies, and no sliver is half empty.
//!
//! What differs from a library's product, and why this is ours:
//! - operands are packed by a trait, so a convolution packs its patches straight from the image and never stores them;
//! - an operand can be packed once and used many times, which recurrent layers need;
//! - nothing is allocated: the caller lends the scratch;
//! - the order of additions is fixed: terms are cut into equal blocks of at most 256, each block is one chain of fused
//!   multiply-adds that starts from zero, and blocks are added in order to what the product starts from. Only the number
//!   of terms decides where the cuts are, so the bits do not depend on threads, on vector width, on how the product was
//!   cut, or on which way it went; and rounding errors grow with the blocks' length and number, not with their product.

mod halves;
mod kernel;
mod pack;
mod product;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::halves::is_half;
use crate::simd::{Level, level};
use crate::tiles::Address;
pub use halves::{HalfLines, HalfRows, Lines, Output};
use kolo_graph::cpu::BESIDE_MAX;
use kolo_graph::{DType, Taker, Team, Tile};
use pack::{deal, pack_lines, pack_transposed};
use product::Product;
pub(crate) use product::chain_len;
use std::ops::Range;

/// The most terms of a block, and so of a chain: a sliver of `b` this long fits the first-level cache.
pub const K_BLOCK: usize = 256;
/// Rows of `a` packed or moved at a time: with `K_BLOCK` they take a quarter of a second-level cache.
const M_BLOCK: usize = 528;
/// Columns of `b` packed at a time.
const N_BLOCK: usize = 1024;
/// Widest tile of any level.
const TILE_COLUMNS_MAX: usize = 32;
const TILE_ROWS_MAX: usize = 12;

/// Rows and columns of the register tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileShape {
    pub rows: usize,
    pub columns: usize,
}

/// The register tile of the level in use.
pub fn tile_shape() -> TileShape {
    match level() {
        Level::Avx512 => TileShape { rows: 12, columns: 32 },
        Level::Avx2 => TileShape { rows: 6, columns: 16 },
        Level::Portable => TileShape { rows: 4, columns: 16 },
    }
}

/// Something whose lines (rows of `a`, columns of `b`) can be packed.
pub trait Operand: Sync {
    /// For each `k` of `ks` in turn, writes `width` numbers: lines `first..first + count`, then zeros.
    fn pack(&self, first: usize, count: usize, ks: Range<usize>, width: usize, out: &mut [f32]);

    /// Packs many slivers, one after the other; the last one is padded.
    fn pack_slivers(&self, first: usize, count: usize, ks: Range<usize>, width: usize, out: &mut [f32]) {
        for (sliver, out) in out.chunks_mut(width * ks.len()).enumerate().take(count.div_ceil(width)) {
            let skip = sliver * width;
            self.pack(first + skip, width.min(count - skip), ks.clone(), width, out);
        }
    }

    /// The matrix in memory, if it is one.
    fn strided(&self) -> Option<Strided<'_>> {
        None
    }
}

/// Where tiles of `c` go.
pub trait Sink: Sync {
    /// The address and row stride of a tile that lies straight in memory, or `None` if it must be stored piece by piece.
    fn place(&self, row: usize, column: usize, rows: usize, columns: usize) -> Option<(*mut f32, usize)>;
    /// Reads (`load`) or writes the tile from `[row, column]` on of `[rows, columns]`, which does not lie straight.
    fn transfer(&self, area: [usize; 4], tile: &mut [f32], load: bool);
    /// The matrix in memory, if it is one.
    fn rows(&self) -> Option<Rows> {
        None
    }
    /// Work on an element once it is whole, in multiply-adds.
    fn work(&self) -> usize {
        0
    }
    /// The matrix of halves that it is, if it is one: its elements are rounded once all their terms are added up.
    fn rounds(&self) -> Option<HalfRows> {
        None
    }
    /// What is read and written when a tile that does not lie straight is done, and the floats from row to row there.
    fn beside(&self, _row: usize, _column: usize) -> Option<([*const f32; BESIDE_MAX], usize)> {
        None
    }
}

/// A matrix in memory with any strides: `lines` along m or n, the other along k.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a> {
    pub data: &'a [f32],
    pub line_stride: usize,
    pub k_stride: usize,
}

impl Operand for Strided<'_> {
    fn pack(&self, first: usize, count: usize, ks: Range<usize>, width: usize, out: &mut [f32]) {
        let start = first * self.line_stride + ks.start * self.k_stride;
        let source = &self.data[start..];
        if self.line_stride == 1 {
            pack_lines(source, self.k_stride, count, ks.len(), width, out);
        } else if self.k_stride == 1 {
            pack_transposed(source, self.line_stride, count, ks.len(), width, out);
        } else {
            for k in 0..ks.len() {
                let row = &mut out[k * width..(k + 1) * width];
                row.fill(0.0);
                for line in 0..count {
                    row[line] = source[line * self.line_stride + k * self.k_stride];
                }
            }
        }
    }

    fn pack_slivers(&self, first: usize, count: usize, ks: Range<usize>, width: usize, out: &mut [f32]) {
        let depth = ks.len();
        let whole = if self.line_stride == 1 { count / width } else { 0 };
        if whole > 0 {
            let source = &self.data[first + ks.start * self.k_stride..];
            deal(width, source, self.k_stride, whole, depth, out);
        }
        for sliver in whole..count.div_ceil(width) {
            let skip = sliver * width;
            let out = &mut out[skip * depth..(skip + width) * depth];
            self.pack(first + skip, width.min(count - skip), ks.clone(), width, out);
        }
    }

    fn strided(&self) -> Option<Strided<'_>> {
        Some(*self)
    }
}

/// An operand packed beforehand by [`prepack`].
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    data: &'a [f32],
    lines: usize,
    ks: usize,
}

/// Floats that `prepack` needs.
pub fn prepacked_len(columns: usize, ks: usize) -> usize {
    columns.next_multiple_of(TILE_COLUMNS_MAX) * ks
}

/// Packs all of `b` once: blocks of `k`, in each the slivers one after the other. A product over the first of these `k`
/// keeps their cuts.
pub fn prepack<'a>(b: &impl Operand, columns: usize, ks: usize, out: &'a mut [f32]) -> Packed<'a> {
    let width = tile_shape().columns;
    let padded = columns.next_multiple_of(width);
    let chain = chain_len(ks);
    for start in (0..ks).step_by(chain) {
        let range = start..(start + chain).min(ks);
        let out = &mut out[padded * start..padded * range.end];
        b.pack_slivers(0, columns, range, width, out);
    }
    Packed { data: out, lines: padded, ks }
}

/// The right operand: packed block by block as the product goes, or beforehand.
#[derive(Debug)]
pub enum Right<'a, B> {
    Fresh(&'a B),
    Packed(Packed<'a>),
}

impl<B> Clone for Right<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Right<'_, B> {}

/// A row-major matrix to write.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    pub data: Address,
    pub stride: usize,
}

impl Sink for Rows {
    fn place(&self, row: usize, column: usize, _: usize, _: usize) -> Option<(*mut f32, usize)> {
        // SAFETY: the caller made the matrix large enough for every tile of the product.
        Some((unsafe { self.data.get().add(row * self.stride + column) }, self.stride))
    }
    fn transfer(&self, _: [usize; 4], _: &mut [f32], _: bool) {
        unreachable!("every tile lies straight")
    }
    fn rows(&self) -> Option<Rows> {
        Some(*self)
    }
}

/// A matrix of which each tile is taken as it is made. It has room for nothing: a product into it has one block of terms.
#[derive(Clone, Copy, Debug)]
pub struct Taken<'a> {
    pub taker: &'a dyn Taker,
    pub stride: usize,
}

impl Sink for Taken<'_> {
    fn place(&self, _: usize, _: usize, _: usize, _: usize) -> Option<(*mut f32, usize)> {
        None
    }
    fn transfer(&self, [row, column, rows, columns]: [usize; 4], tile: &mut [f32], load: bool) {
        assert!(!load, "what was taken does not come back");
        let (start, stride, width) = (row * self.stride + column, self.stride, tile_shape().columns);
        // SAFETY: a product makes each of its tiles once.
        unsafe { self.taker.take(Tile { start, stride, rows, columns, data: tile, width }) };
    }
    fn work(&self) -> usize {
        WORK_OF_TAKER
    }
    fn beside(&self, row: usize, column: usize) -> Option<([*const f32; BESIDE_MAX], usize)> {
        let at = |base: *const f32| base.wrapping_add(row * self.stride + column);
        Some((self.taker.beside()?.map(at), self.stride))
    }
}

/// An update takes as long per element as this many multiply-adds.
const WORK_OF_TAKER: usize = 32;

/// What the sums of a tile are added to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Start<'a> {
    Zero,
    /// A number per column.
    Bias(&'a [f32]),
    /// A number per row.
    RowBias(&'a [f32]),
    /// Whatever `c` holds.
    Add,
}

/// Floats of scratch one thread needs.
pub const SCRATCH: usize = PANELS + K_BLOCK * (N_BLOCK + TILE_COLUMNS_MAX) + TILE_ROWS_MAX * TILE_COLUMNS_MAX;

/// Floats for a block of `a`, whose rows may lie a cache line or two further apart than they are long.
const PANELS: usize = (K_BLOCK + kernel::LINE) * (M_BLOCK + TILE_ROWS_MAX);

/// Bytes of scratch a product on this many threads needs.
pub fn scratch_bytes(threads: usize) -> usize {
    SCRATCH * 4 * threads
}

/// Bytes of scratch a product on this many threads needs whose result is of this type, and whose bias is of as many halves.
pub fn scratch_bytes_of(result: DType, bias: usize, threads: usize) -> usize {
    let stage = if is_half(result) { halves::STAGE } else { 0 };
    ((SCRATCH + stage) * threads + bias) * 4
}

/// A matrix product `c = start + a · b`, said in full; nothing is computed yet.
#[derive(Debug)]
pub struct Gemm<'a, A, B, C> {
    /// Rows of `c`, columns of `c`, and terms of each element.
    pub shape: [usize; 3],
    pub a: &'a A,
    pub b: Right<'a, B>,
    pub c: &'a C,
    pub start: Start<'a>,
}

impl<A: Operand, B: Operand, C: Sink> Gemm<'_, A, B, C> {
    /// The whole product on the calling thread.
    pub fn run(&self, scratch: &mut [f32]) {
        self.run_block(0..self.shape[0], 0..self.shape[1], scratch);
    }

    /// The product restricted to `rows` × `columns`, on the calling thread.
    pub fn run_block(&self, rows: Range<usize>, columns: Range<usize>, scratch: &mut [f32]) {
        let (ks, a, c, start) = (self.shape[2], self.a, self.c, self.start);
        let product = Product { rows, columns, ks, c, start };
        match (self.b, c.rounds()) {
            (Right::Packed(packed), None) => product.with_packed(a, packed, scratch),
            (Right::Fresh(b), None) => product.run(a, b, scratch),
            (Right::Fresh(b), Some(sink)) => halves::staged(&product, sink, (a, b), scratch),
            (Right::Packed(_), Some(_)) => unreachable!("recurrent layers make f32"),
        }
    }

    /// The whole product on a team. `scratch` holds `scratch_bytes(team.threads())`.
    pub fn run_on(&self, team: &Team, scratch: &mut [f32]) {
        let [rows, columns, ks] = self.shape;
        let work = rows * columns * (ks + self.c.work()).max(1);
        let wanted = team.threads().min(work / WORK_PER_TASK).max(1);
        if wanted == 1 {
            return self.run(scratch);
        }
        let own = SCRATCH + if self.c.rounds().is_some() { halves::STAGE } else { 0 };
        assert!(scratch.len() >= own * team.threads(), "the caller lends what `scratch_bytes` says");
        let lent = Address(scratch.as_mut_ptr());
        // Cut the longer side, on tile borders: the bits are the same, but a whole tile is faster.
        let tile = tile_shape();
        let by_rows = rows * tile.columns >= columns * tile.rows;
        let row_unit =
            if product::is_narrow(columns) && both_along(self.a, &self.b) { tile.columns } else { tile.rows };
        let (total, unit) = if by_rows { (rows, row_unit) } else { (columns, tile.columns) };
        let size = total.div_ceil(wanted).next_multiple_of(unit);
        team.run(total.div_ceil(size), |at, thread| {
            let cut = at * size..((at + 1) * size).min(total);
            // SAFETY: each thread has its own scratch.
            let scratch = unsafe { lent.slice(thread * own, own) };
            match by_rows {
                true => self.run_block(cut, 0..columns, scratch),
                false => self.run_block(0..rows, cut, scratch),
            }
        });
    }
}

/// Whether both operands lie along `k`, so that the product can be turned.
fn both_along<A: Operand, B: Operand>(a: &A, b: &Right<'_, B>) -> bool {
    let Right::Fresh(b) = b else { return false };
    [a.strided(), b.strided()].iter().all(|operand| operand.is_some_and(|operand| operand.k_stride == 1))
}

/// Multiply-adds below which a second thread costs more than it saves.
const WORK_PER_TASK: usize = 1 << 18;
