//! Matrix product, the engine under linear layers, convolutions, attention and recurrent layers.
//!
//! `c[m, n] = Σ_k a[m, k] · b[k, n]`, blocked as Goto and van de Geijn do it: a sliver of `b` that fits the first-level
//! cache meets one panel of rows of `a` after the other, and a tile of `c` stays in registers for a whole block of `k`.
//! Operands are packed where they do not lie in the order in which the kernel reads them; three ways around that:
//! - rows of `a` that lie along `k` are read where they are;
//! - a sliver of `b` whose columns lie side by side is packed by the kernel, during the first tile it is used for;
//! - if both lie along `k` and `a` has few rows, `cᵀ = bᵀ·aᵀ` is computed, so that the small operand is the one packed.
//!
//! What differs from a library's product, and why this is ours:
//! - operands are packed by a trait, so a convolution packs its patches straight from the image and never stores them;
//! - an operand can be packed once and used many times, which recurrent layers need;
//! - nothing is allocated: the caller lends the scratch;
//! - each element is one chain of fused multiply-adds over `k` in order, so the bits do not depend on threads, on vector
//!   width, on how the product was cut, or on which way it went.

mod kernel;
mod pack;

use crate::simd::{Level, level};
use crate::tiles::Address;
use kernel::{Begin, Left, Sliver, Target, kernel};
use kolo_graph::Team;
use pack::{deal, pack_lines, pack_transposed, transpose};
use std::ops::Range;

/// `k` per block: a sliver of `b` this long fits the first-level cache.
pub const K_BLOCK: usize = 256;
/// Rows of `a` packed at a time: with `K_BLOCK` they take a fifth of a second-level cache.
const M_BLOCK: usize = 384;
/// Floats between rows of `a` up to which they are read where they lie: rows further apart share too few sets of the
/// first-level cache.
const STRAIGHT_STRIDE_MAX: usize = 256;
/// Rows of `a` read where they lie, at a time: half of a second-level cache.
const M_BLOCK_STRAIGHT: usize = 1024;
/// Columns of `b` packed at a time.
const N_BLOCK: usize = 1024;
/// Rows of `a` up to which it is the operand that is packed if both lie along `k`, and `k` per block then.
const TURNED_ROWS_MAX: usize = 256;
const TURNED_K_BLOCK: usize = 1024;
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
    /// Reads (`load`) or writes a tile that does not lie straight.
    fn transfer(&self, row: usize, column: usize, rows: usize, columns: usize, tile: &mut [f32], load: bool);
    /// The matrix in memory, if it is one.
    fn rows(&self) -> Option<Rows> {
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
            match width {
                32 => deal::<32>(source, self.k_stride, whole, depth, out),
                16 => deal::<16>(source, self.k_stride, whole, depth, out),
                12 => deal::<12>(source, self.k_stride, whole, depth, out),
                11 => deal::<11>(source, self.k_stride, whole, depth, out),
                10 => deal::<10>(source, self.k_stride, whole, depth, out),
                8 => deal::<8>(source, self.k_stride, whole, depth, out),
                6 => deal::<6>(source, self.k_stride, whole, depth, out),
                _ => {
                    for sliver in 0..whole {
                        let out = &mut out[sliver * width * depth..(sliver + 1) * width * depth];
                        pack_lines(&source[sliver * width..], self.k_stride, width, depth, width, out);
                    }
                }
            }
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

/// Packs all of `b` once: blocks of `k`, in each the slivers one after the other.
pub fn prepack<'a>(b: &impl Operand, columns: usize, ks: usize, out: &'a mut [f32]) -> Packed<'a> {
    let width = tile_shape().columns;
    let padded = columns.next_multiple_of(width);
    for start in (0..ks).step_by(K_BLOCK) {
        let range = start..(start + K_BLOCK).min(ks);
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
    fn transfer(&self, _: usize, _: usize, _: usize, _: usize, _: &mut [f32], _: bool) {
        unreachable!("every tile lies straight")
    }
    fn rows(&self) -> Option<Rows> {
        Some(*self)
    }
}

/// What a tile starts from.
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
pub const SCRATCH: usize =
    K_BLOCK * (M_BLOCK + TILE_ROWS_MAX) + K_BLOCK * (N_BLOCK + TILE_COLUMNS_MAX) + TILE_ROWS_MAX * TILE_COLUMNS_MAX;

/// Bytes of scratch a product on this many threads needs.
pub fn scratch_bytes(threads: usize) -> usize {
    SCRATCH * 4 * threads
}

/// The product restricted to `rows` × `columns`, on the calling thread.
#[allow(clippy::too_many_arguments)]
pub fn block<A: Operand, B: Operand, C: Sink>(
    rows: Range<usize>,
    columns: Range<usize>,
    ks: usize,
    a: &A,
    b: Right<'_, B>,
    c: &C,
    start: Start<'_>,
    scratch: &mut [f32],
) {
    let (packed_a, rest) = scratch.split_at_mut(K_BLOCK * (M_BLOCK + TILE_ROWS_MAX));
    let (packed_b, spill) = rest.split_at_mut(K_BLOCK * (N_BLOCK + TILE_COLUMNS_MAX));
    let product = Product { rows, columns, ks, c, start };
    if ks == 0 {
        return product.without_terms(spill);
    }
    let along = a.strided().filter(|a| a.k_stride == 1);
    let left = along.filter(|a| a.line_stride <= STRAIGHT_STRIDE_MAX);
    let b = match b {
        Right::Packed(packed) => return product.prepacked(a, left, packed, packed_a, spill),
        Right::Fresh(b) => b,
    };
    match (b.strided(), along, c.rows()) {
        (Some(b), Some(a), Some(c)) if b.k_stride == 1 && product.is_flat() => product.turned(a, b, c, packed_b, spill),
        (Some(b), ..) => product.fresh(a, left, b, packed_a, packed_b, spill),
        _ => product.packing(a, b, packed_a, packed_b, spill),
    }
}

/// What a product is, but for its operands.
struct Product<'a, C> {
    rows: Range<usize>,
    columns: Range<usize>,
    ks: usize,
    c: &'a C,
    start: Start<'a>,
}

/// Cuts into blocks of equal length, as far as they go.
fn blocks(ks: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let size = ks.div_ceil(ks.div_ceil(most).max(1)).next_multiple_of(4).clamp(1, most);
    (0..ks).step_by(size).map(move |start| start..(start + size).min(ks))
}

impl<C: Sink> Product<'_, C> {
    /// Rows of a panel. Panels of equal height waste less than full ones and a remainder: 16 rows are 8 + 8, not 12 + 4.
    fn height(&self) -> usize {
        self.rows.len().div_ceil(self.rows.len().div_ceil(tile_shape().rows).max(1)).max(1)
    }

    /// What tiles of a block of `k` start from.
    fn begin(&self, k_start: usize) -> Start<'_> {
        if k_start == 0 { self.start } else { Start::Add }
    }

    /// Packs rows of `a` in panels, the last of which may be lower.
    fn pack_left<A: Operand>(&self, a: &A, rows: Range<usize>, ks: Range<usize>, height: usize, out: &mut [f32]) {
        let whole = rows.len() / height * height;
        a.pack_slivers(rows.start, whole, ks.clone(), height, out);
        let count = rows.len() - whole;
        if count > 0 {
            let out = &mut out[whole * ks.len()..(whole + count) * ks.len()];
            a.pack(rows.start + whole, count, ks, count, out);
        }
    }

    /// `b` packs itself, many slivers at a time.
    fn packing<A: Operand, B: Operand>(
        &self,
        a: &A,
        b: &B,
        packed_a: &mut [f32],
        packed_b: &mut [f32],
        spill: &mut [f32],
    ) {
        let (tile, height) = (tile_shape(), self.height());
        let m_block = M_BLOCK / height * height;
        for left in self.columns.clone().step_by(N_BLOCK) {
            let right = (left + N_BLOCK).min(self.columns.end);
            for range in blocks(self.ks, K_BLOCK) {
                let depth = range.len();
                b.pack_slivers(left, right - left, range.clone(), tile.columns, packed_b);
                for top in self.rows.clone().step_by(m_block) {
                    let bottom = (top + m_block).min(self.rows.end);
                    self.pack_left(a, top..bottom, range.clone(), height, packed_a);
                    for column in (left..right).step_by(tile.columns) {
                        let sliver = &packed_b[(column - left) * depth..][..tile.columns * depth];
                        let width = tile.columns.min(right - column);
                        for row in (top..bottom).step_by(height) {
                            let count = height.min(bottom - row);
                            let panel = &packed_a[(row - top) * depth..(row - top + count) * depth];
                            let left = Left { data: panel.as_ptr(), stride: 0 };
                            let at = Area { row, column, rows: count, columns: width };
                            // SAFETY: panel and sliver hold `count` rows and a tile's columns of `depth` terms.
                            unsafe {
                                self.tile(at, depth, left, Sliver::packed(sliver), self.begin(range.start), spill)
                            };
                        }
                    }
                }
            }
        }
    }

    /// `b` was packed beforehand.
    fn prepacked<A: Operand>(
        &self,
        a: &A,
        straight: Option<Strided<'_>>,
        b: Packed<'_>,
        packed_a: &mut [f32],
        spill: &mut [f32],
    ) {
        assert!(b.ks >= self.ks && b.lines >= self.columns.end, "the operand was packed for a smaller product");
        let (tile, height) = (tile_shape(), self.height());
        let m_block = if straight.is_some() { M_BLOCK_STRAIGHT } else { M_BLOCK } / height * height;
        for k_start in (0..self.ks).step_by(K_BLOCK) {
            let range = k_start..(k_start + K_BLOCK).min(self.ks);
            let depth = range.len();
            // Slivers are as far apart as they were packed; of one packed for more terms the first are used.
            let packed_depth = K_BLOCK.min(b.ks - k_start);
            let slivers = &b.data[b.lines * k_start..];
            for top in self.rows.clone().step_by(m_block) {
                let bottom = (top + m_block).min(self.rows.end);
                if straight.is_none() {
                    self.pack_left(a, top..bottom, range.clone(), height, packed_a);
                }
                for column in self.columns.clone().step_by(tile.columns) {
                    let sliver = &slivers[column * packed_depth..][..tile.columns * depth];
                    let width = tile.columns.min(self.columns.end - column);
                    for row in (top..bottom).step_by(height) {
                        let count = height.min(bottom - row);
                        let left = left_of(straight, row..row + count, &range, top, packed_a);
                        let at = Area { row, column, rows: count, columns: width };
                        // SAFETY: `left_of` checked the rows; the sliver holds a tile's columns of `depth` terms.
                        unsafe { self.tile(at, depth, left, Sliver::packed(sliver), self.begin(k_start), spill) };
                    }
                }
            }
        }
    }

    /// `b` lies in memory: a sliver at a time is packed into one place, by the kernel itself if its columns lie side by
    /// side.
    fn fresh<A: Operand>(
        &self,
        a: &A,
        straight: Option<Strided<'_>>,
        b: Strided<'_>,
        packed_a: &mut [f32],
        packed_b: &mut [f32],
        spill: &mut [f32],
    ) {
        let (tile, height) = (tile_shape(), self.height());
        let m_block = if straight.is_some() { M_BLOCK_STRAIGHT } else { M_BLOCK } / height * height;
        for range in blocks(self.ks, K_BLOCK) {
            let depth = range.len();
            for top in self.rows.clone().step_by(m_block) {
                let bottom = (top + m_block).min(self.rows.end);
                if straight.is_none() {
                    self.pack_left(a, top..bottom, range.clone(), height, packed_a);
                }
                for column in self.columns.clone().step_by(tile.columns) {
                    let width = tile.columns.min(self.columns.end - column);
                    let by_kernel = b.line_stride == 1 && width == tile.columns;
                    if !by_kernel {
                        b.pack(column, width, range.clone(), tile.columns, packed_b);
                    }
                    let here = &b.data[column * b.line_stride + range.start * b.k_stride..];
                    let room = &mut packed_b[..tile.columns * depth];
                    for (panel, row) in (top..bottom).step_by(height).enumerate() {
                        let count = height.min(bottom - row);
                        let left = left_of(straight, row..row + count, &range, top, packed_a);
                        let mut sliver = Sliver::packed(room);
                        if by_kernel && panel == 0 {
                            assert!(here.len() >= (depth - 1) * b.k_stride + tile.columns, "a sliver is cut short");
                            (sliver.data, sliver.stride, sliver.copy) = (here.as_ptr(), b.k_stride, room.as_mut_ptr());
                        }
                        (sliver.ahead, sliver.ahead_stride) = next_lines(&b, here, panel, tile.columns);
                        let at = Area { row, column, rows: count, columns: width };
                        // SAFETY: `left_of` checked the rows; the sliver was checked above, or packed.
                        unsafe { self.tile(at, depth, left, sliver, self.begin(range.start), spill) };
                    }
                }
            }
        }
    }

    /// Few rows and many columns, in whole slivers or nearly.
    fn is_flat(&self) -> bool {
        let (rows, width) = (self.rows.len(), tile_shape().columns);
        let used = rows as f64 / rows.next_multiple_of(width) as f64;
        rows <= TURNED_ROWS_MAX && used > 0.8 && self.columns.len() >= 2 * rows
    }

    /// Both operands lie along `k`: `cᵀ` is computed, with `b`'s lines as rows, read where they are, once.
    fn turned(&self, a: Strided<'_>, b: Strided<'_>, c: Rows, packed: &mut [f32], spill: &mut [f32]) {
        let start = match self.start {
            Start::Bias(bias) => Start::RowBias(bias),
            Start::RowBias(bias) => Start::Bias(bias),
            same => same,
        };
        let (rows, columns) = (self.columns.clone(), self.rows.clone());
        let turned = Product { rows, columns, ks: self.ks, c: &Turned(c), start };
        let (tile, height) = (tile_shape(), turned.height());
        for range in blocks(self.ks, TURNED_K_BLOCK) {
            let depth = range.len();
            a.pack_slivers(turned.columns.start, turned.columns.len(), range.clone(), tile.columns, packed);
            for row in turned.rows.clone().step_by(height) {
                let count = height.min(turned.rows.end - row);
                let left = left_of(Some(b), row..row + count, &range, 0, &[]);
                for (number, column) in turned.columns.clone().step_by(tile.columns).enumerate() {
                    let sliver = &packed[number * tile.columns * depth..][..tile.columns * depth];
                    let width = tile.columns.min(turned.columns.end - column);
                    let at = Area { row, column, rows: count, columns: width };
                    // SAFETY: `left_of` checked the rows; the sliver holds a tile's columns of `depth` terms.
                    unsafe { turned.tile(at, depth, left, Sliver::packed(sliver), turned.begin(range.start), spill) };
                }
            }
        }
    }

    /// No terms: every element is what it starts from.
    fn without_terms(&self, spill: &mut [f32]) {
        let tile = tile_shape();
        for row in self.rows.clone().step_by(tile.rows) {
            for column in self.columns.clone().step_by(tile.columns) {
                let (rows, columns) = (tile.rows.min(self.rows.end - row), tile.columns.min(self.columns.end - column));
                let left = Left { data: std::ptr::null(), stride: 0 };
                let at = Area { row, column, rows, columns };
                // SAFETY: of no terms nothing is read.
                unsafe { self.tile(at, 0, left, Sliver::packed(&[]), self.start, spill) };
            }
        }
    }

    /// One tile, in place if it is whole and lies straight, else by way of the spill.
    ///
    /// # Safety
    /// The operands hold what [`kernel`] asks for.
    #[inline]
    unsafe fn tile(&self, at: Area, depth: usize, left: Left, right: Sliver, start: Start<'_>, spill: &mut [f32]) {
        let Area { row, column, rows, columns } = at;
        let (c, width) = (self.c, tile_shape().columns);
        if columns == width
            && let Some((data, stride)) = c.place(row, column, rows, columns)
            && let Some(begin) = match start {
                Start::Bias(bias) => Some(Begin::Bias(bias[column..column + columns].as_ptr())),
                Start::RowBias(_) => None,
                Start::Zero => Some(Begin::Zero),
                Start::Add => Some(Begin::Add),
            }
        {
            // SAFETY: the sink vouches for the tile, the caller for the operands.
            return unsafe { kernel(rows, depth, left, right, Target { data, stride, begin }) };
        }
        let spill = &mut spill[..rows * width];
        let mut padded = [0.0; TILE_COLUMNS_MAX];
        let begin = match start {
            Start::Bias(bias) => {
                padded[..columns].copy_from_slice(&bias[column..column + columns]);
                Begin::Bias(padded.as_ptr())
            }
            Start::RowBias(bias) => {
                spill.chunks_mut(width).zip(&bias[row..row + rows]).for_each(|(line, bias)| line.fill(*bias));
                Begin::Add
            }
            Start::Zero => Begin::Zero,
            Start::Add => {
                move_tile(row, column, rows, columns, c, spill, width, true);
                Begin::Add
            }
        };
        // SAFETY: the spill holds the whole tile; the caller vouches for the operands.
        unsafe { kernel(rows, depth, left, right, Target { data: spill.as_mut_ptr(), stride: width, begin }) };
        move_tile(row, column, rows, columns, c, spill, width, false);
    }
}

/// A tile's place in the product.
#[derive(Clone, Copy)]
struct Area {
    row: usize,
    column: usize,
    rows: usize,
    columns: usize,
}

impl Sliver {
    fn packed(data: &[f32]) -> Self {
        let data = data.as_ptr();
        Self { data, copy: std::ptr::null_mut(), stride: 0, ahead: data, ahead_stride: 0 }
    }
}

/// Rows of the left operand where they lie, or else from `panels`, packed from row `top` on.
fn left_of(straight: Option<Strided<'_>>, rows: Range<usize>, ks: &Range<usize>, top: usize, panels: &[f32]) -> Left {
    match straight {
        Some(a) => {
            let data = &a.data[rows.start * a.line_stride + ks.start..(rows.end - 1) * a.line_stride + ks.end];
            Left { data: data.as_ptr(), stride: a.line_stride.max(1) }
        }
        None => {
            let data = &panels[(rows.start - top) * ks.len()..(rows.end - top) * ks.len()];
            Left { data: data.as_ptr(), stride: 0 }
        }
    }
}

/// Lines of the next sliver that the kernel asks for during a panel: each panel for a part of them, those first in need
/// first. May point past the end, where nothing is read.
fn next_lines(b: &Strided<'_>, here: &[f32], panel: usize, columns: usize) -> (*const f32, usize) {
    let next = here.as_ptr().wrapping_add(columns * b.line_stride);
    if b.line_stride == 1 {
        // Every second term, the left or the right half of its columns.
        let at = panel % 2 * b.k_stride + panel / 2 % 2 * (columns / 2);
        if panel < 4 { (next.wrapping_add(at), 2 * b.k_stride) } else { (here.as_ptr(), 0) }
    } else if panel < columns {
        (next.wrapping_add(panel * b.line_stride), 2)
    } else {
        (here.as_ptr(), 0)
    }
}

/// Rows in memory seen as columns.
struct Turned(Rows);

impl Sink for Turned {
    fn place(&self, _: usize, _: usize, _: usize, _: usize) -> Option<(*mut f32, usize)> {
        None
    }
    fn transfer(&self, row: usize, column: usize, rows: usize, columns: usize, tile: &mut [f32], load: bool) {
        let (width, stride) = (tile_shape().columns, self.0.stride);
        // SAFETY: the caller made the matrix large enough for every tile of the product.
        let lines = unsafe { self.0.data.slice(column * stride + row, (columns - 1) * stride + rows) };
        match load {
            true => transpose(lines, stride, columns, rows, width, tile),
            false => transpose(tile, width, rows, columns, stride, lines),
        }
    }
}

/// Copies a partial or scattered tile between `c` and the spill.
#[allow(clippy::too_many_arguments)]
fn move_tile<C: Sink>(
    row: usize,
    column: usize,
    rows: usize,
    columns: usize,
    c: &C,
    spill: &mut [f32],
    width: usize,
    load: bool,
) {
    let Some((data, stride)) = c.place(row, column, rows, columns) else {
        return c.transfer(row, column, rows, columns, spill, load);
    };
    for at in 0..rows {
        // SAFETY: the sink vouches for `rows` × `columns` at this place.
        let line = unsafe { std::slice::from_raw_parts_mut(data.add(at * stride), columns) };
        let kept = &mut spill[at * width..at * width + columns];
        if load { kept.copy_from_slice(line) } else { line.copy_from_slice(kept) }
    }
}

/// Multiply-adds below which a second thread costs more than it saves.
const WORK_PER_TASK: usize = 1 << 18;

/// The whole product on a team. `scratch` holds `scratch_bytes(team.threads())`.
#[allow(clippy::too_many_arguments)]
pub fn multiply<A: Operand, B: Operand, C: Sink>(
    team: &Team,
    rows: usize,
    columns: usize,
    ks: usize,
    a: &A,
    b: Right<'_, B>,
    c: &C,
    start: Start<'_>,
    scratch: &mut [f32],
) {
    let work = rows * columns * ks.max(1);
    let wanted = team.threads().min(work / WORK_PER_TASK).max(1);
    if wanted == 1 {
        return block(0..rows, 0..columns, ks, a, b, c, start, scratch);
    }
    let lent = Address(scratch.as_mut_ptr());
    // Cut the longer side, on tile borders: the bits are the same, but a whole tile is faster.
    let tile = tile_shape();
    let by_rows = rows * tile.columns >= columns * tile.rows;
    let (total, unit) = if by_rows { (rows, tile.rows) } else { (columns, tile.columns) };
    let size = total.div_ceil(wanted).next_multiple_of(unit);
    team.run(total.div_ceil(size), |at, thread| {
        let cut = at * size..((at + 1) * size).min(total);
        // SAFETY: each thread has its own scratch.
        let scratch = unsafe { lent.slice(thread * SCRATCH, SCRATCH) };
        match by_rows {
            true => block(cut, 0..columns, ks, a, b, c, start, scratch),
            false => block(0..rows, cut, ks, a, b, c, start, scratch),
        }
    });
}

#[cfg(test)]
mod tests;
