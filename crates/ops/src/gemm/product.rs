//! The ways in which a product is computed, by how its operands lie in memory.

use super::kernel::{Ahead, Base, LINE, Left, Next, Sliver, Target, kernel};
use super::pack::transpose;
use super::{
    K_BLOCK, M_BLOCK, N_BLOCK, Operand, PANELS, Packed, Rows, Sink, Start, Strided, TILE_COLUMNS_MAX, tile_shape,
};
use std::ops::Range;

/// Floats between rows of `a` up to which they are read where they lie: rows further apart share too few sets of the
/// first-level cache.
const STRAIGHT_STRIDE_MAX: usize = 256;
/// Rows of `a` read where they lie, at a time: half of a second-level cache.
const M_BLOCK_STRAIGHT: usize = 1024;
/// Rows of `a` that are packed at a time if both operands lie along `k` and the product is turned, and the most terms then.
const TURNED_ROWS_MAX: usize = 256;
const TURNED_K_BLOCK: usize = 1024;

/// What a product is, but for its operands.
pub(super) struct Product<'a, C> {
    pub rows: Range<usize>,
    pub columns: Range<usize>,
    pub ks: usize,
    pub c: &'a C,
    pub start: Start<'a>,
}

/// Terms of a chain: `ks` in blocks of equal length, as far as they go. Every way to compute a product cuts it here, so the
/// bits do not depend on the way.
pub(crate) fn chain_len(ks: usize) -> usize {
    ks.div_ceil(ks.div_ceil(K_BLOCK).max(1)).next_multiple_of(4).clamp(1, K_BLOCK)
}

/// A thread's scratch: for a block of each operand, and for a tile.
fn cut(scratch: &mut [f32]) -> [&mut [f32]; 3] {
    let (packed_a, rest) = scratch.split_at_mut(PANELS);
    let (packed_b, spill) = rest.split_at_mut(K_BLOCK * (N_BLOCK + TILE_COLUMNS_MAX));
    [packed_a, packed_b, spill]
}

/// Cuts into blocks of some size.
pub(super) fn blocks(ks: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..ks).step_by(size).map(move |start| start..(start + size).min(ks))
}

impl<C: Sink> Product<'_, C> {
    /// Rows of a panel. Panels of equal height waste less than full ones and a remainder: 16 rows are 8 + 8, not 12 + 4.
    fn height(&self) -> usize {
        self.rows.len().div_ceil(self.rows.len().div_ceil(tile_shape().rows).max(1)).max(1)
    }

    /// The whole of it, the best way that its operands allow.
    pub fn run<A: Operand, B: Operand>(&self, a: &A, b: &B, scratch: &mut [f32]) {
        let [packed_a, packed_b, spill] = cut(scratch);
        if self.ks == 0 {
            return self.without_terms(spill);
        }
        let along = a.strided().filter(|a| a.k_stride == 1);
        match (b.strided(), along, self.c.rows()) {
            (Some(b), Some(a), Some(c)) if b.line_stride == 1 && self.is_vector() => self.vector(a, b, c, packed_b),
            #[cfg(target_arch = "x86_64")]
            (Some(b), Some(a), Some(c)) if b.k_stride == 1 && self.can_turn_columns() => self.vector_along(a, b, c),
            (Some(b), Some(a), Some(c)) if b.k_stride == 1 && self.is_better_turned() => {
                self.turned(a, b, c, packed_b, spill)
            }
            (Some(b), ..) => self.slivers(a, Slivers::Strided(b), packed_a, packed_b, spill),
            _ => self.packing(a, b, packed_a, packed_b, spill),
        }
    }

    /// The whole of it with a right operand that was packed beforehand.
    pub fn with_packed<A: Operand>(&self, a: &A, b: Packed<'_>, scratch: &mut [f32]) {
        let [packed_a, packed_b, spill] = cut(scratch);
        if self.ks == 0 {
            return self.without_terms(spill);
        }
        assert!(b.ks >= self.ks && b.lines >= self.columns.end, "the operand was packed for a smaller product");
        self.slivers(a, Slivers::Packed(b), packed_a, packed_b, spill);
    }

    /// What tiles of a block of `k` start from.
    fn begin(&self, k_start: usize) -> Start<'_> {
        if k_start == 0 { self.start } else { Start::Add }
    }

    /// The tile below, or the first of the next sliver.
    fn next_tile(&self, below: usize, column: usize, block: Range<usize>) -> (usize, usize) {
        if below < block.end {
            return (below, column);
        }
        (block.start, (column + tile_shape().columns).min(self.columns.end - 1))
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
    pub fn packing<A: Operand, B: Operand>(
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
            for range in blocks(self.ks, chain_len(self.ks)) {
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
                            let left = Left::packed(panel);
                            let next = self.next_tile(row + count, column, top..bottom);
                            let at = Area { row, column, rows: count, columns: width, chain: depth, next };
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

    /// `b` was packed beforehand, or lies in memory: then a sliver at a time is packed into one place, by the kernel itself if
    /// its columns lie side by side.
    pub fn slivers<A: Operand>(
        &self,
        a: &A,
        b: Slivers<'_>,
        packed_a: &mut [f32],
        packed_b: &mut [f32],
        spill: &mut [f32],
    ) {
        let (tile, height, form) = (tile_shape(), self.height(), Form::of(a));
        let m_block = if matches!(form, Form::Near(_)) { M_BLOCK_STRAIGHT } else { M_BLOCK } / height * height;
        for range in blocks(self.ks, b.chain_len(self.ks)) {
            let depth = range.len();
            for top in self.rows.clone().step_by(m_block) {
                let bottom = (top + m_block).min(self.rows.end);
                if let Form::Other = form {
                    self.pack_left(a, top..bottom, range.clone(), height, packed_a);
                }
                for (number, column) in self.columns.clone().step_by(tile.columns).enumerate() {
                    let width = tile.columns.min(self.columns.end - column);
                    let (first, rest) = b.sliver(column, width, &range, packed_b);
                    for (panel, row) in (top..bottom).step_by(height).enumerate() {
                        let rows = row..(row + height).min(bottom);
                        if number == 0 {
                            form.fetch(rows.clone(), &range, top, packed_a);
                        }
                        let mut left = form.rows(rows.clone(), &range, top, packed_a);
                        if number == 0 {
                            left.ahead = form.below(rows.clone(), &range);
                        }
                        let mut sliver = if panel == 0 { first } else { rest };
                        if let Some(next) = b.next_lines(column, &range, panel) {
                            (sliver.ahead, sliver.ahead_stride) = next;
                        }
                        let next = self.next_tile(rows.end, column, top..bottom);
                        let at = Area { row, column, rows: rows.len(), columns: width, chain: depth, next };
                        // SAFETY: the operands' slices were checked where they were taken.
                        unsafe { self.tile(at, depth, left, sliver, self.begin(range.start), spill) };
                    }
                }
            }
        }
    }

    /// Whether `cᵀ` is computed if both operands lie along `k`: there are few rows and many columns, or so few columns that
    /// a sliver of them would be half empty; and the rows are whole slivers or nearly.
    pub fn is_better_turned(&self) -> bool {
        let (rows, width) = (self.rows.len(), tile_shape().columns);
        let used = rows as f64 / rows.next_multiple_of(width) as f64;
        let flat = rows <= TURNED_ROWS_MAX && self.columns.len() >= 2 * rows;
        used > 0.8 && (flat || is_narrow(self.columns.len()))
    }

    /// Both operands lie along `k`: `cᵀ` is computed, with `b`'s lines as rows, read where they are, once.
    pub fn turned(&self, a: Strided<'_>, b: Strided<'_>, c: Rows, packed: &mut [f32], spill: &mut [f32]) {
        let start = match self.start {
            Start::Bias(bias) => Start::RowBias(bias),
            Start::RowBias(bias) => Start::Bias(bias),
            same => same,
        };
        for top in self.rows.clone().step_by(TURNED_ROWS_MAX) {
            let (rows, columns) = (self.columns.clone(), top..(top + TURNED_ROWS_MAX).min(self.rows.end));
            let turned = Product { rows, columns, ks: self.ks, c: &Turned(c), start };
            turned.as_turned(a, b, packed, spill);
        }
    }
}

/// So few columns that most of a sliver would be empty.
pub(super) fn is_narrow(columns: usize) -> bool {
    2 * columns <= tile_shape().columns
}

impl Product<'_, Turned> {
    /// The product of the turned operands: `a`'s lines are columns now, and packed.
    fn as_turned(&self, a: Strided<'_>, b: Strided<'_>, packed: &mut [f32], spill: &mut [f32]) {
        let (tile, height) = (tile_shape(), self.height());
        let chain = chain_len(self.ks);
        // Whole chains, as many at a time as fit, in parts of equal length.
        let (chains, most) = (self.ks.div_ceil(chain), TURNED_K_BLOCK / chain);
        let together = chains.div_ceil(chains.div_ceil(most).max(1)).max(1);
        for range in blocks(self.ks, together * chain) {
            let depth = range.len();
            a.pack_slivers(self.columns.start, self.columns.len(), range.clone(), tile.columns, packed);
            for row in self.rows.clone().step_by(height) {
                let count = height.min(self.rows.end - row);
                let form = Form::Near(b);
                for (number, column) in self.columns.clone().step_by(tile.columns).enumerate() {
                    let sliver = &packed[number * tile.columns * depth..][..tile.columns * depth];
                    let width = tile.columns.min(self.columns.end - column);
                    let mut left = form.rows(row..row + count, &range, 0, &[]);
                    if number == 0 {
                        left.ahead = form.below(row..row + count, &range);
                    }
                    let at = Area { row, column, rows: count, columns: width, chain, next: (row, column) };
                    // SAFETY: the rows were checked as they were taken; the sliver holds a tile's columns of `depth` terms.
                    unsafe { self.tile(at, depth, left, Sliver::packed(sliver), self.begin(range.start), spill) };
                }
            }
        }
    }
}

impl<C: Sink> Product<'_, C> {
    /// No terms: every element is what it starts from.
    pub fn without_terms(&self, spill: &mut [f32]) {
        let tile = tile_shape();
        for row in self.rows.clone().step_by(tile.rows) {
            for column in self.columns.clone().step_by(tile.columns) {
                let (rows, columns) = (tile.rows.min(self.rows.end - row), tile.columns.min(self.columns.end - column));
                let at = Area { row, column, rows, columns, chain: 1, next: (row, column) };
                // SAFETY: of no terms nothing is read.
                unsafe { self.tile(at, 0, Left::packed(&[]), Sliver::packed(&[]), self.start, spill) };
            }
        }
    }

    /// One tile, in place if it is whole and lies straight, else by way of the spill.
    ///
    /// # Safety
    /// The operands hold what [`kernel`] asks for.
    #[inline]
    unsafe fn tile(&self, at: Area, depth: usize, left: Left, right: Sliver, start: Start<'_>, spill: &mut [f32]) {
        let Area { row, column, rows, columns, chain, next } = at;
        let (c, width) = (self.c, tile_shape().columns);
        if columns == width
            && let Some((data, stride)) = c.place(row, column, rows, columns)
            && let Some(base) = match start {
                Start::Bias(bias) => Some(Base::Bias(bias[column..column + columns].as_ptr())),
                Start::RowBias(_) => None,
                Start::Zero => Some(Base::Zero),
                Start::Add => Some(Base::Target),
            }
        {
            let next = Next::Tile(c.place(next.0, next.1, 1, 1).map_or(data, |(next, _)| next));
            // SAFETY: the sink vouches for the tile, the caller for the operands.
            return unsafe { kernel(rows, depth, left, right, Target { data, stride, base, chain, next }) };
        }
        let spill = &mut spill[..rows * width];
        let mut padded = [0.0; TILE_COLUMNS_MAX];
        let base = match start {
            Start::Bias(bias) => {
                padded[..columns].copy_from_slice(&bias[column..column + columns]);
                Base::Bias(padded.as_ptr())
            }
            Start::RowBias(bias) => {
                spill.chunks_mut(width).zip(&bias[row..row + rows]).for_each(|(line, bias)| line.fill(*bias));
                Base::Target
            }
            Start::Zero => Base::Zero,
            Start::Add => {
                move_tile(c, [row, column, rows, columns], spill, width, true);
                Base::Target
            }
        };
        let data = spill.as_mut_ptr();
        let next = match c.beside(row, column) {
            Some((beside, stride)) if left.stride == 0 => Next::Beside(beside, stride),
            _ => Next::Tile(data),
        };
        // SAFETY: the spill holds the whole tile; the caller vouches for the operands.
        unsafe { kernel(rows, depth, left, right, Target { data, stride: width, base, chain, next }) };
        move_tile(c, [row, column, rows, columns], spill, width, false);
    }
}

/// A tile's place in the product, and how long its chains of terms are.
#[derive(Clone, Copy)]
struct Area {
    row: usize,
    column: usize,
    rows: usize,
    columns: usize,
    chain: usize,
    /// The row and column of the tile after it.
    next: (usize, usize),
}

impl Left {
    /// Rows of a packed panel.
    fn packed(panel: &[f32]) -> Self {
        Self { data: panel.as_ptr(), stride: 0, ahead: Ahead::NOTHING }
    }
}

impl Sliver {
    fn packed(data: &[f32]) -> Self {
        let data = data.as_ptr();
        Self { data, copy: std::ptr::null_mut(), stride: 0, ahead: data, ahead_stride: 0 }
    }
}

/// How the left operand lies in memory, and so how the kernel gets at its rows.
#[derive(Clone, Copy)]
enum Form<'a> {
    /// Along `k`, rows not far apart: they are read where they lie, and asked for one panel ahead.
    Near(Strided<'a>),
    /// Along `k`, rows so far apart that they share too few sets of the first-level cache: they are moved closer, a
    /// panel at a time, during the first sliver.
    Far(Strided<'a>),
    /// Whatever it is, it packs itself, a block at a time.
    Other,
}

impl<'a> Form<'a> {
    fn of<A: Operand>(a: &'a A) -> Self {
        match a.strided() {
            Some(a) if a.k_stride == 1 && a.line_stride <= STRAIGHT_STRIDE_MAX => Form::Near(a),
            Some(a) if a.k_stride == 1 => Form::Far(a),
            _ => Form::Other,
        }
    }

    /// Floats between rows that were moved closer: not a power of two.
    fn moved_stride(depth: usize) -> usize {
        depth.next_multiple_of(LINE) + LINE
    }

    /// Moves the rows of one panel closer, if they are to be.
    fn fetch(self, rows: Range<usize>, ks: &Range<usize>, top: usize, panels: &mut [f32]) {
        match self {
            Form::Near(_) | Form::Other => {}
            Form::Far(a) => {
                let stride = Self::moved_stride(ks.len());
                for row in rows {
                    let from = row * a.line_stride + ks.start;
                    panels[(row - top) * stride..][..ks.len()].copy_from_slice(&a.data[from..from + ks.len()]);
                }
            }
        }
    }

    /// The rows of one panel, fetched before if they are not read where they lie.
    fn rows(self, rows: Range<usize>, ks: &Range<usize>, top: usize, panels: &[f32]) -> Left {
        let (data, stride) = match self {
            Form::Near(a) => {
                let (start, end) = (rows.start * a.line_stride + ks.start, (rows.end - 1) * a.line_stride + ks.end);
                (&a.data[start..end], a.line_stride.max(1))
            }
            Form::Far(_) => {
                let stride = Self::moved_stride(ks.len());
                (&panels[(rows.start - top) * stride..][..(rows.len() - 1) * stride + ks.len()], stride)
            }
            Form::Other => (&panels[(rows.start - top) * ks.len()..(rows.end - top) * ks.len()], 0),
        };
        Left { data: data.as_ptr(), stride, ahead: Ahead::NOTHING }
    }

    /// The rows below a panel. May point past the end, where nothing is read.
    fn below(self, rows: Range<usize>, ks: &Range<usize>) -> Ahead {
        match self {
            Form::Near(a) | Form::Far(a) => {
                Ahead { rows: a.data.as_ptr().wrapping_add(rows.end * a.line_stride + ks.start), stride: a.line_stride }
            }
            Form::Other => Ahead::NOTHING,
        }
    }
}

/// The right operand, of which the kernel takes slivers.
#[derive(Clone, Copy)]
pub(super) enum Slivers<'a> {
    Packed(Packed<'a>),
    Strided(Strided<'a>),
}

impl Slivers<'_> {
    /// What is packed was cut by its own number of terms, of which the product may want fewer.
    fn chain_len(&self, ks: usize) -> usize {
        match self {
            Slivers::Packed(b) => chain_len(b.ks),
            Slivers::Strided(_) => chain_len(ks),
        }
    }

    /// A sliver, as the first panel finds it and as the others do.
    fn sliver(&self, column: usize, width: usize, ks: &Range<usize>, scratch: &mut [f32]) -> (Sliver, Sliver) {
        let (tile, depth) = (tile_shape(), ks.len());
        match self {
            Slivers::Packed(b) => {
                // Slivers are as far apart as they were packed; of one packed for more terms the first are used.
                let packed_depth = chain_len(b.ks).min(b.ks - ks.start);
                let sliver = &b.data[b.lines * ks.start + column * packed_depth..][..tile.columns * depth];
                (Sliver::packed(sliver), Sliver::packed(sliver))
            }
            Slivers::Strided(b) => {
                let scratch = &mut scratch[..tile.columns * depth];
                if b.line_stride != 1 || width < tile.columns {
                    b.pack(column, width, ks.clone(), tile.columns, scratch);
                    return (Sliver::packed(scratch), Sliver::packed(scratch));
                }
                let here = &b.data[column + ks.start * b.k_stride..][..(depth - 1) * b.k_stride + tile.columns];
                // Both from one pointer: what the first panel writes there, the others read.
                let copy = scratch.as_mut_ptr();
                let rest = Sliver { data: copy, copy: std::ptr::null_mut(), stride: 0, ahead: copy, ahead_stride: 0 };
                (Sliver { data: here.as_ptr(), stride: b.k_stride, copy, ..rest }, rest)
            }
        }
    }

    /// Lines of the next sliver that the kernel asks for during a panel: each panel for a part of them, those first in need
    /// first. May point past the end, where nothing is read.
    fn next_lines(&self, column: usize, ks: &Range<usize>, panel: usize) -> Option<(*const f32, usize)> {
        let Slivers::Strided(b) = self else { return None };
        let columns = tile_shape().columns;
        let next = b.data.as_ptr().wrapping_add((column + columns) * b.line_stride + ks.start * b.k_stride);
        if b.line_stride == 1 && panel < 4 {
            // Every second term, the left or the right half of its columns.
            Some((next.wrapping_add(panel % 2 * b.k_stride + panel / 2 % 2 * (columns / 2)), 2 * b.k_stride))
        } else if b.line_stride != 1 && panel < columns {
            Some((next.wrapping_add(panel * b.line_stride), 2))
        } else {
            None
        }
    }
}

/// Rows in memory seen as columns.
struct Turned(Rows);

impl Sink for Turned {
    fn place(&self, _: usize, _: usize, _: usize, _: usize) -> Option<(*mut f32, usize)> {
        None
    }
    fn transfer(&self, [row, column, rows, columns]: [usize; 4], tile: &mut [f32], load: bool) {
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
fn move_tile<C: Sink>(c: &C, area: [usize; 4], spill: &mut [f32], width: usize, load: bool) {
    let [row, column, rows, columns] = area;
    let Some((data, stride)) = c.place(row, column, rows, columns) else {
        return c.transfer(area, spill, load);
    };
    for at in 0..rows {
        // SAFETY: the sink vouches for `rows` × `columns` at this place.
        let line = unsafe { std::slice::from_raw_parts_mut(data.add(at * stride), columns) };
        let kept = &mut spill[at * width..at * width + columns];
        if load { kept.copy_from_slice(line) } else { line.copy_from_slice(kept) }
    }
}
