//! The register tile: rows of the left operand times a sliver of the right one.
//!
//! Operands need not be packed. The left one may lie in memory row by row, as activations do: then the kernel reads it
//! there. The right one may be packed by the kernel on the way, while the first tile of a sliver is computed, and lines of
//! the next sliver are asked for meanwhile. So memory is waited for while multiplications run, not before.

use super::TILE_ROWS_MAX;
use crate::simd::{Level, level};

/// What the sums of a tile start from.
#[derive(Clone, Copy)]
pub(super) enum Begin {
    Zero,
    Bias(*const f32),
    Add,
}

/// Rows of the left operand.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub data: *const f32,
    /// Floats between rows that lie straight in memory; 0 if they are packed, the rows of one term side by side.
    pub stride: usize,
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
    pub begin: Begin,
}

/// One register tile over `depth` terms.
///
/// # Safety
/// `left` holds `rows` rows and `right` the level's tile columns of `depth` terms; `copy`, if there is one, has room for
/// them; `target` has `rows` rows of tile columns.
pub(super) unsafe fn kernel(rows: usize, depth: usize, left: Left, right: Sliver, target: Target) {
    macro_rules! by_rows {
        ($kernel:ident: $($n:literal)+) => {{
            // SAFETY: by the caller's contract and the detected level.
            unsafe {
                match (rows, left.stride > 0, !right.copy.is_null()) {
                    $(($n, false, false) => $kernel::<$n, false, false>(depth, left, right, target),
                    ($n, false, true) => $kernel::<$n, false, true>(depth, left, right, target),
                    ($n, true, false) => $kernel::<$n, true, false>(depth, left, right, target),
                    ($n, true, true) => $kernel::<$n, true, true>(depth, left, right, target),)+
                    _ => unreachable!("a panel has at most {TILE_ROWS_MAX} rows"),
                }
            }
        }};
    }
    match level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => by_rows!(kernel_avx512: 1 2 3 4 5 6 7 8 9 10 11 12),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => by_rows!(kernel_avx2: 1 2 3 4 5 6),
        _ => by_rows!(kernel_portable: 1 2 3 4),
    }
}

/// Rows whose addresses follow from one register: its own, and one and two strides further.
#[cfg(target_arch = "x86_64")]
const ROWS_PER_BASE: usize = 3;
/// Floats of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 16;

#[cfg(target_arch = "x86_64")]
macro_rules! x86_kernel {
    ($name:ident, $features:literal, $lanes:literal, $reg:ident, $load:ident, $store:ident, $set:ident, $zero:ident, $fma:ident) => {
        #[target_feature(enable = $features)]
        #[allow(clippy::needless_range_loop, reason = "rows of several arrays")]
        unsafe fn $name<const ROWS: usize, const STRAIGHT: bool, const PACK: bool>(
            depth: usize,
            left: Left,
            right: Sliver,
            target: Target,
        ) {
            use std::arch::asm;
            use std::arch::x86_64::*;
            // SAFETY: by the caller's contract; a prefetch may point anywhere.
            unsafe {
                let Target { data: c, stride, begin } = target;
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
                let mut bases = [left.data; TILE_ROWS_MAX / ROWS_PER_BASE];
                for (at, base) in bases.iter_mut().enumerate() {
                    let mut address = base.wrapping_add(at * ROWS_PER_BASE * left.stride) as usize;
                    // Keep them in registers: the compiler would rather work them out again and again.
                    asm!("/* {0} */", inout(reg) address, options(pure, nomem, nostack, preserves_flags));
                    *base = address as *const f32;
                }
                let stride_bytes = left.stride * 4;
                let (mut b, mut copy, mut ahead) = (right.data, right.copy, right.ahead);
                // Loads that the compiler must leave where they are: it would do all of them first, and for lack of
                // registers put them aside.
                macro_rules! straight {
                    ($at:literal, $row:literal, $place:literal) => {{
                        let factor;
                        asm!(
                            concat!("vbroadcastss {factor}, dword ptr [{base} ", $place, " + {shift}]"),
                            factor = lateout($reg) factor,
                            base = in(reg) bases[$row / ROWS_PER_BASE],
                            stride = in(reg) stride_bytes,
                            shift = const 4 * $at,
                            options(readonly, nostack, preserves_flags)
                        );
                        factor
                    }};
                }
                macro_rules! row {
                    ($at:literal, $row:literal, $low:ident, $high:ident) => {
                        if $row < ROWS {
                            let factor = match (STRAIGHT, $row % ROWS_PER_BASE) {
                                (false, _) => $set(*bases[0].add($at * ROWS + $row)),
                                (true, 0) => straight!($at, $row, "/* {stride} */"),
                                (true, 1) => straight!($at, $row, "+ {stride}"),
                                (true, _) => straight!($at, $row, "+ 2*{stride}"),
                            };
                            sums[$row][0] = $fma(factor, $low, sums[$row][0]);
                            sums[$row][1] = $fma(factor, $high, sums[$row][1]);
                        }
                    };
                }
                macro_rules! term {
                    ($at:literal) => {
                        let (low, high) = match PACK {
                            true => {
                                let from = b.add($at * right.stride);
                                let (low, high) = ($load(from), $load(from.add($lanes)));
                                $store(copy.add($at * 2 * $lanes), low);
                                $store(copy.add($at * 2 * $lanes + $lanes), high);
                                (low, high)
                            }
                            false => ($load(b.add($at * 2 * $lanes)), $load(b.add($at * 2 * $lanes + $lanes))),
                        };
                        // Written out: the compiler does not unroll a loop with loads that it must leave where they are.
                        row!($at, 0, low, high);
                        row!($at, 1, low, high);
                        row!($at, 2, low, high);
                        row!($at, 3, low, high);
                        row!($at, 4, low, high);
                        row!($at, 5, low, high);
                        row!($at, 6, low, high);
                        row!($at, 7, low, high);
                        row!($at, 8, low, high);
                        row!($at, 9, low, high);
                        row!($at, 10, low, high);
                        row!($at, 11, low, high);
                    };
                }
                macro_rules! advance {
                    ($terms:literal) => {
                        let used = if STRAIGHT { $terms } else { $terms * ROWS };
                        for base in &mut bases {
                            *base = base.wrapping_add(used);
                        }
                        b = b.wrapping_add($terms * if PACK { right.stride } else { 2 * $lanes });
                        if PACK {
                            copy = copy.wrapping_add($terms * 2 * $lanes);
                        }
                    };
                }
                for four in 0..depth / 4 {
                    _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                    _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(right.ahead_stride).cast());
                    ahead = ahead.wrapping_add(2 * right.ahead_stride);
                    if STRAIGHT && four % (LINE / 4) == 0 {
                        // The same terms of the rows below: they are next.
                        for row in 0..ROWS {
                            let at = (ROWS + row % ROWS_PER_BASE) * left.stride;
                            _mm_prefetch::<_MM_HINT_T0>(bases[row / ROWS_PER_BASE].wrapping_add(at).cast());
                        }
                    }
                    term!(0);
                    term!(1);
                    term!(2);
                    term!(3);
                    advance!(4);
                }
                for _ in 0..depth % 4 {
                    term!(0);
                    advance!(1);
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
    zmm_reg,
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
    ymm_reg,
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
#[allow(clippy::needless_range_loop, reason = "rows and columns of several arrays")]
unsafe fn kernel_portable<const ROWS: usize, const STRAIGHT: bool, const PACK: bool>(
    depth: usize,
    left: Left,
    right: Sliver,
    target: Target,
) {
    const COLUMNS: usize = 16;
    let Target { data: c, stride, begin } = target;
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
        for row in 0..ROWS {
            for column in 0..COLUMNS {
                *c.add(row * stride + column) = sums[row][column];
            }
        }
    }
}
