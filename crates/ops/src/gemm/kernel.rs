//! The register tile: rows of the left operand times a sliver of the right one.
//!
//! Operands need not be packed. The left one may lie in memory row by row, as activations do: then the kernel reads it
//! there. The right one may be packed by the kernel on the way, while the first tile of a sliver is computed. What comes
//! next (lines of the next sliver, rows of the next panel, the next tile of the result) is asked for meanwhile, a few lines
//! at a time: in a burst they would hold up the loads of the tile itself. So memory is waited for while multiplications
//! run, not before.

use super::TILE_ROWS_MAX;
use crate::simd::{Level, level};
use kolo_graph::cpu::BESIDE_MAX;

/// What the sums of a tile are added to. The sums themselves always start from zero.
#[derive(Clone, Copy)]
pub(super) enum Base {
    Zero,
    /// A number per column.
    Bias(*const f32),
    /// What the target holds.
    Target,
}

/// Rows of the left operand.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub data: *const f32,
    /// Floats between rows that lie straight in memory; 0 if they are packed, the rows of one term side by side.
    pub stride: usize,
    pub ahead: Ahead,
}

/// A sliver of the right operand.
#[derive(Clone, Copy)]
pub(super) struct Sliver {
    pub data: *const f32,
    /// Where to pack what is read from `data`, whose terms lie `stride` floats apart; null if it is packed.
    pub copy: *mut f32,
    pub stride: usize,
    /// A line to ask for every second term, and the floats from one to the next.
    pub ahead: *const f32,
    pub ahead_stride: usize,
}

/// A tile of the result: rows of as many columns as the level's tile has.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub data: *mut f32,
    pub stride: usize,
    pub base: Base,
    /// The most terms of a chain: each starts from zero, and they are added up in order.
    pub chain: usize,
    pub next: Next,
}

/// What is asked for while a tile is computed: rows of a tile's columns, `stride` floats apart. They may be anywhere.
#[derive(Clone, Copy)]
pub(super) enum Next {
    /// The tile after this one, whose rows are as far apart as this one's.
    Tile(*const f32),
    /// What is read and written when this one is done. Not with straight rows, which are asked for ahead themselves.
    Beside([*const f32; BESIDE_MAX], usize),
}

/// Floats of a cache line.
pub(super) const LINE: usize = 16;

/// Rows of the left operand that are needed soon, `stride` floats apart: four lines of them are asked for at every fourth
/// term, so that sixteen rows are in sixteen terms. May point anywhere; nothing if null.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    pub rows: *const f32,
    pub stride: usize,
}

impl Ahead {
    pub const NOTHING: Self = Self { rows: std::ptr::null(), stride: 0 };
}

/// One register tile over `depth` terms.
///
/// # Safety
/// `left` holds `rows` rows and `right` the level's tile columns of `depth` terms; `copy`, if there is one, has room for
/// them; `target` has `rows` rows of tile columns.
pub(super) unsafe fn kernel(rows: usize, depth: usize, left: Left, right: Sliver, target: Target) {
    let beside = matches!(target.next, Next::Beside(..));
    macro_rules! by_rows {
        ($kernel:path: $($n:literal)+) => {{
            use $kernel as tile;
            // SAFETY: by the caller's contract and the detected level.
            unsafe {
                match (rows, left.stride > 0, !right.copy.is_null()) {
                    $(($n, false, false) if beside => tile::<$n, false, false, true>(depth, left, right, target),
                    ($n, false, true) if beside => tile::<$n, false, true, true>(depth, left, right, target),
                    ($n, false, false) => tile::<$n, false, false, false>(depth, left, right, target),
                    ($n, false, true) => tile::<$n, false, true, false>(depth, left, right, target),
                    ($n, true, false) => tile::<$n, true, false, false>(depth, left, right, target),
                    ($n, true, true) => tile::<$n, true, true, false>(depth, left, right, target),)+
                    _ => unreachable!("a panel has at most {TILE_ROWS_MAX} rows"),
                }
            }
        }};
    }
    match level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => by_rows!(super::x86::tile_avx512: 1 2 3 4 5 6 7 8 9 10 11 12),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => by_rows!(super::x86::tile_avx2: 1 2 3 4 5 6),
        _ => by_rows!(tile_portable: 1 2 3 4),
    }
}

/// The same arithmetic without vector instructions.
///
/// # Safety
/// As for `kernel`.
#[allow(clippy::needless_range_loop, reason = "rows and columns of several arrays")]
unsafe fn tile_portable<const ROWS: usize, const STRAIGHT: bool, const PACK: bool, const BESIDE: bool>(
    depth: usize,
    left: Left,
    right: Sliver,
    target: Target,
) {
    const COLUMNS: usize = 16;
    let Target { data: c, stride, mut base, .. } = target;
    let mut sums = [[0.0f32; COLUMNS]; ROWS];
    // SAFETY: by the caller's contract.
    unsafe {
        for k in 0..depth {
            if k > 0 && k % target.chain == 0 {
                finish(&sums, c, stride, base);
                (base, sums) = (Base::Target, [[0.0; COLUMNS]; ROWS]);
            }
            let b = right.data.add(k * if PACK { right.stride } else { COLUMNS });
            if PACK {
                std::ptr::copy_nonoverlapping(b, right.copy.add(k * COLUMNS), COLUMNS);
            }
            for row in 0..ROWS {
                let factor = *left.data.add(if STRAIGHT { row * left.stride + k } else { k * ROWS + row });
                for column in 0..COLUMNS {
                    sums[row][column] = factor.mul_add(*b.add(column), sums[row][column]);
                }
            }
        }
        finish(&sums, c, stride, base);
    }
}

/// Adds the sums of a chain to what they are to be added to.
///
/// # Safety
/// The target has room for them, the bias a number for each column.
unsafe fn finish<const COLUMNS: usize>(sums: &[[f32; COLUMNS]], c: *mut f32, stride: usize, base: Base) {
    for (row, sums) in sums.iter().enumerate() {
        for (column, sum) in sums.iter().enumerate() {
            // SAFETY: by the caller's contract.
            unsafe {
                let at = c.add(row * stride + column);
                *at = match base {
                    Base::Zero => *sum,
                    Base::Bias(bias) => *bias.add(column) + sum,
                    Base::Target => *at + sum,
                };
            }
        }
    }
}
