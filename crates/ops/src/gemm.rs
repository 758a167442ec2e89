//! Matrix product, the engine under linear layers, convolutions, attention and recurrent layers.
//!
//! `c[m, n] = Σ_k a[m, k] · b[k, n]`, blocked as Goto and van de Geijn do it: slivers of both operands are packed so that
//! the inner kernel reads them straight through, and a tile of `c` stays in registers for a whole block of `k`.
//!
//! What differs from a library's product, and why this is ours:
//! - operands are packed by a trait, so a convolution packs its patches straight from the image and never stores them;
//! - an operand can be packed once and used many times, which recurrent layers need;
//! - nothing is allocated: the caller lends the scratch;
//! - each element is one chain of fused multiply-adds over `k` in order, cut every [`K_BLOCK`], so the bits do not depend
//!   on threads, on vector width, or on how `m` and `n` were split.

use crate::simd::{Level, level};
use crate::tiles::Address;
use kolo_graph::Team;
use std::ops::Range;

/// `k` per block: a sliver of `b` this long fits the first-level cache. It is part of the definition of the result.
pub const K_BLOCK: usize = 256;
/// Rows of `a` packed at a time: with `K_BLOCK` they take a fifth of a second-level cache.
const M_BLOCK: usize = 384;
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
}

/// Where tiles of `c` go.
pub trait Sink: Sync {
    /// The address and row stride of a tile that lies straight in memory, or `None` if it must be stored piece by piece.
    fn place(&self, row: usize, column: usize, rows: usize, columns: usize) -> Option<(*mut f32, usize)>;
    /// Reads (`load`) or writes a tile that does not lie straight.
    fn transfer(&self, row: usize, column: usize, rows: usize, columns: usize, tile: &mut [f32], load: bool);
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
}

/// Rows of memory dealt out together.
const DEAL: usize = 8;

/// Deals rows of memory out to slivers: a few rows at a time, read from end to end as the memory likes it, and written in
/// runs of several pieces. The width is a constant so that a piece is a register or two, not a call.
#[inline(always)]
fn deal<const WIDTH: usize>(source: &[f32], k_stride: usize, slivers: usize, depth: usize, out: &mut [f32]) {
    let (slots, _) = out.as_chunks_mut::<WIDTH>();
    for k in (0..depth).step_by(DEAL) {
        let rows = DEAL.min(depth - k);
        for sliver in 0..slivers {
            let slots = &mut slots[sliver * depth + k..sliver * depth + k + rows];
            for (row, slot) in slots.iter_mut().enumerate() {
                let start = (k + row) * k_stride + sliver * WIDTH;
                hint(&source[start..], DEAL * k_stride);
                slot.copy_from_slice(&source[start..start + WIDTH]);
            }
        }
    }
}

/// Asks for the cache line this many floats further on. A hint may point anywhere; past the end it does nothing.
#[inline(always)]
fn hint(at: &[f32], ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing.
    unsafe {
        use std::arch::x86_64::*;
        _mm_prefetch::<_MM_HINT_T0>(at.as_ptr().wrapping_add(ahead).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (at, ahead);
}

/// Lines lie next to each other: each `k` is one copy.
fn pack_lines(source: &[f32], k_stride: usize, count: usize, ks: usize, width: usize, out: &mut [f32]) {
    for k in 0..ks {
        let row = &mut out[k * width..(k + 1) * width];
        row[..count].copy_from_slice(&source[k * k_stride..k * k_stride + count]);
        row[count..].fill(0.0);
    }
}

/// Each line lies along `k`: transpose in blocks of eight.
fn pack_transposed(source: &[f32], stride: usize, count: usize, ks: usize, width: usize, out: &mut [f32]) {
    if count < width {
        for k in 0..ks {
            out[k * width + count..(k + 1) * width].fill(0.0);
        }
    }
    #[cfg(target_arch = "x86_64")]
    if level() != Level::Portable && count >= 8 && ks >= 8 {
        // The last block of a side overlaps the one before, which writes some numbers twice and needs no remainder.
        for line in (0..count).step_by(8).map(|line| line.min(count - 8)) {
            for k in (0..ks).step_by(8).map(|k| k.min(ks - 8)) {
                // SAFETY: the level has AVX2; eight lines of eight numbers are inside both slices.
                unsafe { transpose_8x8(&source[line * stride + k..], stride, &mut out[k * width + line..], width) };
            }
        }
        return;
    }
    for line in 0..count {
        for k in 0..ks {
            out[k * width + line] = source[line * stride + k];
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn transpose_8x8(source: &[f32], stride: usize, out: &mut [f32], width: usize) {
    use std::arch::x86_64::*;
    assert!(source.len() >= 7 * stride + 8 && out.len() >= 7 * width + 8, "eight lines of eight");
    // SAFETY: checked above.
    unsafe {
        let row = |at: usize| {
            let line = source.as_ptr().add(at * stride);
            // The same place of the next eight lines: they are next.
            _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(8 * stride).cast());
            _mm256_loadu_ps(line)
        };
        let pair = |a: usize, b: usize| {
            let (x, y) = (row(a), row(b));
            (_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y))
        };
        let ((a, b), (c, d), (e, f), (g, h)) = (pair(0, 1), pair(2, 3), pair(4, 5), pair(6, 7));
        let quads = [
            _mm256_shuffle_ps::<0x44>(a, c),
            _mm256_shuffle_ps::<0xee>(a, c),
            _mm256_shuffle_ps::<0x44>(b, d),
            _mm256_shuffle_ps::<0xee>(b, d),
            _mm256_shuffle_ps::<0x44>(e, g),
            _mm256_shuffle_ps::<0xee>(e, g),
            _mm256_shuffle_ps::<0x44>(f, h),
            _mm256_shuffle_ps::<0xee>(f, h),
        ];
        for at in 0..4 {
            let low = _mm256_permute2f128_ps::<0x20>(quads[at], quads[at + 4]);
            let high = _mm256_permute2f128_ps::<0x31>(quads[at], quads[at + 4]);
            _mm256_storeu_ps(out.as_mut_ptr().add(at * width), low);
            _mm256_storeu_ps(out.as_mut_ptr().add((at + 4) * width), high);
        }
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
}

/// What a tile starts from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Start<'a> {
    Zero,
    /// A number per column.
    Bias(&'a [f32]),
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
    let tile = tile_shape();
    // Panels of equal height waste less than full ones and a remainder: 16 rows are 8 + 8, not 12 + 4.
    let height = rows.len().div_ceil(rows.len().div_ceil(tile.rows).max(1)).max(1);
    let (packed_a, rest) = scratch.split_at_mut(K_BLOCK * (M_BLOCK + TILE_ROWS_MAX));
    let (packed_b, spill) = rest.split_at_mut(K_BLOCK * (N_BLOCK + TILE_COLUMNS_MAX));
    let m_block = M_BLOCK / height * height;
    if ks == 0 {
        return zero_depth(&rows, &columns, c, start, spill);
    }
    for left in columns.clone().step_by(N_BLOCK) {
        let right = (left + N_BLOCK).min(columns.end);
        for k_start in (0..ks).step_by(K_BLOCK) {
            let range = k_start..(k_start + K_BLOCK).min(ks);
            let depth = range.len();
            // Slivers are as far apart as they were packed; of one packed for more terms the first are used.
            let (slivers, packed_depth): (&[f32], usize) = match b {
                Right::Packed(packed) => {
                    assert!(
                        packed.ks >= ks && packed.lines >= columns.end,
                        "the operand was packed for a smaller product"
                    );
                    let packed_depth = K_BLOCK.min(packed.ks - k_start);
                    (&packed.data[packed.lines * k_start + left * packed_depth..], packed_depth)
                }
                Right::Fresh(b) => {
                    b.pack_slivers(left, right - left, range.clone(), tile.columns, packed_b);
                    (packed_b, depth)
                }
            };
            let begin = if k_start == 0 { start } else { Start::Add };
            for top in rows.clone().step_by(m_block) {
                let bottom = (top + m_block).min(rows.end);
                let whole = (bottom - top) / height * height;
                a.pack_slivers(top, whole, range.clone(), height, packed_a);
                if top + whole < bottom {
                    let count = bottom - top - whole;
                    a.pack(
                        top + whole,
                        count,
                        range.clone(),
                        count,
                        &mut packed_a[whole * depth..(whole + count) * depth],
                    );
                }
                for column in (left..right).step_by(tile.columns) {
                    let sliver = &slivers[(column - left) * packed_depth..][..tile.columns * depth];
                    let width = tile.columns.min(right - column);
                    for row in (top..bottom).step_by(height) {
                        let count = height.min(bottom - row);
                        let panel = &packed_a[(row - top) * depth..(row - top + count) * depth];
                        one_tile(row, column, count, width, panel, sliver, c, begin, spill);
                    }
                }
            }
        }
    }
}

/// No terms: every element is what it starts from.
fn zero_depth<C: Sink>(rows: &Range<usize>, columns: &Range<usize>, c: &C, start: Start<'_>, spill: &mut [f32]) {
    let tile = tile_shape();
    for row in rows.clone().step_by(tile.rows) {
        for column in columns.clone().step_by(tile.columns) {
            let (count, width) = (tile.rows.min(rows.end - row), tile.columns.min(columns.end - column));
            one_tile(row, column, count, width, &[], &[], c, start, spill);
        }
    }
}

#[allow(clippy::too_many_arguments)]
#[inline]
fn one_tile<C: Sink>(
    row: usize,
    column: usize,
    rows: usize,
    columns: usize,
    panel: &[f32],
    sliver: &[f32],
    c: &C,
    start: Start<'_>,
    spill: &mut [f32],
) {
    let tile = tile_shape();
    let full = columns == tile.columns;
    if let (Some((data, stride)), true) = (c.place(row, column, rows, columns), full) {
        let begin = match start {
            Start::Bias(bias) => Begin::Bias(bias[column..column + columns].as_ptr()),
            Start::Zero => Begin::Zero,
            Start::Add => Begin::Add,
        };
        // SAFETY: the sink vouches for the tile; panel and sliver hold `rows` and `tile.columns` numbers per k.
        return unsafe { kernel(rows, panel, sliver, data, stride, begin) };
    }
    let spill = &mut spill[..rows * tile.columns];
    let mut padded = [0.0; TILE_COLUMNS_MAX];
    let begin = match start {
        Start::Bias(bias) => {
            padded[..columns].copy_from_slice(&bias[column..column + columns]);
            Begin::Bias(padded.as_ptr())
        }
        Start::Zero => Begin::Zero,
        Start::Add => {
            move_tile(row, column, rows, columns, c, spill, tile.columns, true);
            Begin::Add
        }
    };
    // SAFETY: the spill holds the whole tile.
    unsafe { kernel(rows, panel, sliver, spill.as_mut_ptr(), tile.columns, begin) };
    move_tile(row, column, rows, columns, c, spill, tile.columns, false);
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

#[derive(Clone, Copy)]
enum Begin {
    Zero,
    Bias(*const f32),
    Add,
}

/// One register tile.
///
/// # Safety
/// `panel` and `sliver` hold `rows` and the level's tile columns per k; `c` has `rows` rows of tile columns.
unsafe fn kernel(rows: usize, panel: &[f32], sliver: &[f32], c: *mut f32, stride: usize, begin: Begin) {
    let (a, b, depth) = (panel.as_ptr(), sliver.as_ptr(), panel.len() / rows);
    macro_rules! by_rows {
        ($kernel:ident: $($n:literal)+) => {
            match rows {
                $($n => unsafe { $kernel::<$n>(depth, a, b, c, stride, begin) },)+
                _ => unreachable!("a panel has at most {TILE_ROWS_MAX} rows"),
            }
        };
    }
    match level() {
        // SAFETY: by the caller's contract and the detected level.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => by_rows!(kernel_avx512: 1 2 3 4 5 6 7 8 9 10 11 12),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => by_rows!(kernel_avx2: 1 2 3 4 5 6),
        _ => by_rows!(kernel_portable: 1 2 3 4),
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! x86_kernel {
    ($name:ident, $features:literal, $lanes:literal, $load:ident, $store:ident, $set:ident, $zero:ident, $fma:ident) => {
        #[target_feature(enable = $features)]
        unsafe fn $name<const ROWS: usize>(
            depth: usize,
            mut a: *const f32,
            mut b: *const f32,
            c: *mut f32,
            stride: usize,
            begin: Begin,
        ) {
            use std::arch::x86_64::*;
            // SAFETY: by the caller's contract.
            unsafe {
                let mut sums = [[$zero(); 2]; ROWS];
                match begin {
                    Begin::Zero => {}
                    Begin::Bias(bias) => sums = [[$load(bias), $load(bias.add($lanes))]; ROWS],
                    Begin::Add => {
                        for row in 0..ROWS {
                            let at = c.add(row * stride);
                            sums[row] = [$load(at), $load(at.add($lanes))];
                        }
                    }
                }
                // The tile is written last; by then it should have arrived.
                for row in 0..ROWS {
                    let at = c.add(row * stride).cast::<i8>();
                    _mm_prefetch::<_MM_HINT_T0>(at);
                    _mm_prefetch::<_MM_HINT_T0>(at.add(64));
                }
                for _ in 0..depth {
                    let (left, right) = ($load(b), $load(b.add($lanes)));
                    for row in 0..ROWS {
                        let factor = $set(*a.add(row));
                        sums[row][0] = $fma(factor, left, sums[row][0]);
                        sums[row][1] = $fma(factor, right, sums[row][1]);
                    }
                    a = a.add(ROWS);
                    b = b.add(2 * $lanes);
                }
                for row in 0..ROWS {
                    let at = c.add(row * stride);
                    $store(at, sums[row][0]);
                    $store(at.add($lanes), sums[row][1]);
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
x86_kernel!(
    kernel_avx512,
    "avx512f",
    16,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_set1_ps,
    _mm512_setzero_ps,
    _mm512_fmadd_ps
);
#[cfg(target_arch = "x86_64")]
x86_kernel!(
    kernel_avx2,
    "avx2,fma",
    8,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_setzero_ps,
    _mm256_fmadd_ps
);

/// The same arithmetic without vector instructions.
///
/// # Safety
/// As for `kernel`.
unsafe fn kernel_portable<const ROWS: usize>(
    depth: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    stride: usize,
    begin: Begin,
) {
    const COLUMNS: usize = 16;
    let mut sums = [[0.0f32; COLUMNS]; ROWS];
    // SAFETY: by the caller's contract.
    unsafe {
        for row in 0..ROWS {
            for column in 0..COLUMNS {
                sums[row][column] = match begin {
                    Begin::Zero => 0.0,
                    Begin::Bias(bias) => *bias.add(column),
                    Begin::Add => *c.add(row * stride + column),
                };
            }
        }
        for k in 0..depth {
            for row in 0..ROWS {
                for column in 0..COLUMNS {
                    sums[row][column] =
                        (*a.add(k * ROWS + row)).mul_add(*b.add(k * COLUMNS + column), sums[row][column]);
                }
            }
        }
        for row in 0..ROWS {
            for column in 0..COLUMNS {
                *c.add(row * stride + column) = sums[row][column];
            }
        }
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
mod tests {
    use super::*;

    fn numbers(count: usize, salt: u32) -> Vec<f32> {
        (0..count as u32).map(|at| ((at.wrapping_mul(2_654_435_761) ^ salt) >> 16) as f32 / 65536.0 - 0.5).collect()
    }

    fn product(m: usize, n: usize, k: usize, threads: usize, ta: bool, tb: bool, prepacked: bool) -> Vec<f32> {
        let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
        let team = Team::new(threads);
        let mut c = vec![0.0; m * n];
        let mut scratch = vec![0.0; SCRATCH * threads];
        let a = Strided { data: &a, line_stride: if ta { 1 } else { k }, k_stride: if ta { m } else { 1 } };
        let b = Strided { data: &b, line_stride: if tb { k } else { 1 }, k_stride: if tb { 1 } else { n } };
        let sink = Rows { data: Address(c.as_mut_ptr()), stride: n };
        let mut room = vec![0.0; prepacked_len(n, k)];
        let right = match prepacked {
            true => Right::Packed(prepack(&b, n, k, &mut room)),
            false => Right::Fresh(&b),
        };
        multiply(&team, m, n, k, &a, right, &sink, Start::Zero, &mut scratch);
        c
    }

    #[test]
    fn matches_the_definition_in_every_form() {
        for (m, n, k) in
            [(1, 1, 1), (5, 7, 3), (12, 32, 256), (13, 33, 257), (16, 100, 600), (400, 40, 20), (3, 1100, 5), (2, 3, 0)]
        {
            for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
                let got = product(m, n, k, 1, ta, tb, false);
                let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
                for row in 0..m {
                    for column in 0..n {
                        let want: f64 = (0..k)
                            .map(|at| {
                                let x = if ta { a[at * m + row] } else { a[row * k + at] };
                                let y = if tb { b[column * k + at] } else { b[at * n + column] };
                                f64::from(x) * f64::from(y)
                            })
                            .sum();
                        let got = f64::from(got[row * n + column]);
                        assert!((got - want).abs() < 1e-4, "{m}x{n}x{k} {ta} {tb} at {row},{column}: {got} {want}");
                    }
                }
                assert_eq!(got, product(m, n, k, 2, ta, tb, false), "two threads differ");
                assert_eq!(got, product(m, n, k, 1, ta, tb, true), "prepacked differs");
            }
        }
    }
}
