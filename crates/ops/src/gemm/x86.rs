//! The register tile in vector instructions.
//!
//! Terms are written in assembly. A tile takes nearly all vector registers and most of the others, and a compiler that
//! moves loads or puts an address aside in memory makes it half as fast.

use super::TILE_ROWS_MAX;
use super::kernel::{Ahead, Base, LINE, Left, Next, Sliver, Target};
use kolo_graph::cpu::BESIDE_MAX;
use std::arch::asm;
use std::arch::x86_64::*;

/// Rows whose addresses follow from one register: its own, and one and two strides further.
const ROWS_PER_BASE: usize = 3;
/// Terms of a pass; those that are left over take one each.
const PASS: usize = 4;

/// The address of a row.
macro_rules! row_address {
    (0) => {
        "{base0}"
    };
    (1) => {
        "{base0} + {stride}"
    };
    (2) => {
        "{base0} + 2*{stride}"
    };
    (3) => {
        "{base1}"
    };
    (4) => {
        "{base1} + {stride}"
    };
    (5) => {
        "{base1} + 2*{stride}"
    };
    (6) => {
        "{base2}"
    };
    (7) => {
        "{base2} + {stride}"
    };
    (8) => {
        "{base2} + 2*{stride}"
    };
    (9) => {
        "{base3}"
    };
    (10) => {
        "{base3} + {stride}"
    };
    (11) => {
        "{base3} + 2*{stride}"
    };
}

/// The address of a row's factor in a term.
macro_rules! factor {
    (straight, $at:literal, $count:literal, $row:tt) => {
        concat!("dword ptr [", row_address!($row), " + 4*", $at, "]")
    };
    (packed, $at:literal, $count:literal, $row:tt) => {
        concat!("dword ptr [{base0} + 4*(", $at, "*", $count, " + ", $row, ")]")
    };
}

/// Loads a term's columns. Those in memory are packed, and lines of terms further on are fetched: not many, since terms
/// may lie so that all share one set of the first-level cache; and not by the loads themselves, which may have to wait for
/// stores to the pack whose addresses end in the same digits.
macro_rules! columns {
    (packed, $at:literal, $bytes:literal) => {
        concat!(
            "vmovups {low}, [{b} + ",
            $at,
            "*2*",
            $bytes,
            "]\n",
            "vmovups {high}, [{b} + ",
            $at,
            "*2*",
            $bytes,
            " + ",
            $bytes,
            "]\n",
        )
    };
    (fresh, $at:literal, $bytes:literal) => {
        concat!(
            "vmovups {low}, [{b}]\n",
            "vmovups {high}, [{b} + ",
            $bytes,
            "]\n",
            "prefetcht0 [{b} + 8*{b_stride}]\n",
            "prefetcht0 [{b} + 8*{b_stride} + ",
            $bytes,
            "]\n",
            "vmovups [{copy} + ",
            $at,
            "*2*",
            $bytes,
            "], {low}\n",
            "vmovups [{copy} + ",
            $at,
            "*2*",
            $bytes,
            " + ",
            $bytes,
            "], {high}\n",
            "add {b}, {b_stride}\n",
        )
    };
}

macro_rules! term {
    ($left:ident, $right:ident, $at:literal, $count:literal, $bytes:literal, [$($row:tt $low:ident $high:ident)+]) => {
        concat!(
            columns!($right, $at, $bytes),
            $("vbroadcastss {factor}, ", factor!($left, $at, $count, $row), "\n",
            "vfmadd231ps {", stringify!($low), "}, {factor}, {low}\n",
            "vfmadd231ps {", stringify!($high), "}, {factor}, {high}\n",)+
        )
    };
}

macro_rules! advance {
    (straight, $terms:literal, $count:literal) => {
        concat!(
            "add {base0}, 4*",
            $terms,
            "\n",
            "add {base1}, 4*",
            $terms,
            "\n",
            "add {base2}, 4*",
            $terms,
            "\n",
            "add {base3}, 4*",
            $terms,
            "\n",
        )
    };
    (packed, $terms:literal, $count:literal) => {
        concat!("add {base0}, 4*", $terms, "*", $count, "\n")
    };
}

macro_rules! advance_columns {
    (packed, $terms:literal, $bytes:literal) => {
        concat!("add {b}, ", $terms, "*2*", $bytes, "\n")
    };
    (fresh, $terms:literal, $bytes:literal) => {
        concat!("add {copy}, ", $terms, "*2*", $bytes, "\n")
    };
}

/// What a tile works with.
struct Registers<V> {
    sums: [[V; 2]; TILE_ROWS_MAX],
    bases: [*const f32; TILE_ROWS_MAX / ROWS_PER_BASE],
    stride: usize,
    b: *const f32,
    b_stride: usize,
    copy: *mut f32,
}

/// Some terms, for one number of rows.
macro_rules! pass {
    (
        $left:ident, $right:ident, $on:ident, $class:ident, $bytes:literal, $terms:literal, [$($at:literal)+],
        $count:literal, $rows:tt, [$($row:tt $low:ident $high:ident)+]
    ) => {
        asm!(
            // Operands must be mentioned; not every form needs all of them.
            "/* {base1} {base2} {base3} {stride} {b_stride} {copy} */",
            $(term!($left, $right, $at, $count, $bytes, $rows),)+
            advance!($left, $terms, $count),
            advance_columns!($right, $terms, $bytes),
            $($low = inout($class) $on.sums[$row][0], $high = inout($class) $on.sums[$row][1],)+
            factor = out($class) _,
            low = out($class) _,
            high = out($class) _,
            base0 = inout(reg) $on.bases[0],
            base1 = inout(reg) $on.bases[1],
            base2 = inout(reg) $on.bases[2],
            base3 = inout(reg) $on.bases[3],
            stride = in(reg) $on.stride,
            b = inout(reg) $on.b,
            b_stride = in(reg) $on.b_stride,
            copy = inout(reg) $on.copy,
            options(nostack)
        )
    };
}

/// The tiles of one vector width, for every number of rows.
macro_rules! tiles {
    (
        $name:ident, $features:literal, $class:ident, $lanes:literal, $bytes:literal, $load:ident, $store:ident, $zero:ident, $add:ident;
        $($count:literal: $rows:tt)+
    ) => {
        /// # Safety
        /// As for `kernel`, on a machine with the instructions.
        #[target_feature(enable = $features)]
        #[allow(clippy::needless_range_loop, reason = "rows of several arrays")]
        pub(super) unsafe fn $name<const ROWS: usize, const STRAIGHT: bool, const PACK: bool, const BESIDE: bool>(
            depth: usize,
            left: Left,
            right: Sliver,
            target: Target,
        ) {
            // SAFETY: by the caller's contract; a prefetch may point anywhere.
            unsafe {
                let Target { data: c, stride: c_stride, base, next, .. } = target;
                let row_base = |at: usize| left.data.wrapping_add(at * ROWS_PER_BASE * left.stride);
                let mut on = Registers {
                    sums: [[$zero(); 2]; TILE_ROWS_MAX],
                    bases: [row_base(0), row_base(1), row_base(2), row_base(3)],
                    stride: left.stride * 4,
                    b: right.data,
                    b_stride: right.stride * 4,
                    copy: right.copy,
                };
                macro_rules! terms {
                    ($terms:literal, $places:tt) => {
                        match ROWS {
                            $($count => {
                                if STRAIGHT && PACK {
                                    pass!(straight, fresh, on, $class, $bytes, $terms, $places, $count, $rows, $rows)
                                } else if STRAIGHT {
                                    pass!(straight, packed, on, $class, $bytes, $terms, $places, $count, $rows, $rows)
                                } else if PACK {
                                    pass!(packed, fresh, on, $class, $bytes, $terms, $places, $count, $rows, $rows)
                                } else {
                                    pass!(packed, packed, on, $class, $bytes, $terms, $places, $count, $rows, $rows)
                                }
                            })+
                            _ => unreachable!("a tile has at most {TILE_ROWS_MAX} rows"),
                        }
                    };
                }
                let mut ahead_b = right.ahead;
                // Beside a tile lie rows of several matrices, next is one.
                let (mut ahead_c, mut beside, ahead_stride) = match next {
                    Next::Tile(next) => (next, [std::ptr::null(); BESIDE_MAX], c_stride),
                    Next::Beside(beside, stride) => (std::ptr::null(), beside, stride),
                };
                let (mut base, mut passes, mut left_over) = (base, 0, depth);
                // Once, but for operands that hold the terms of several chains.
                loop {
                    let terms = left_over.min(target.chain);
                    for pass in 0..terms / PASS {
                        // What the sums are added to at the end, one row at a time; packed terms have pushed it out.
                        if pass + ROWS >= terms / PASS && !matches!(base, Base::Zero) {
                            let at = c.wrapping_add((terms / PASS - 1 - pass) * c_stride);
                            _mm_prefetch::<_MM_HINT_ET0>(at.cast());
                            _mm_prefetch::<_MM_HINT_ET0>(at.wrapping_add($lanes).cast());
                        }
                        _mm_prefetch::<_MM_HINT_T1>(ahead_b.cast());
                        _mm_prefetch::<_MM_HINT_T1>(ahead_b.wrapping_add(right.ahead_stride).cast());
                        ahead_b = ahead_b.wrapping_add(2 * right.ahead_stride);
                        if !left.ahead.rows.is_null() {
                            let Ahead { rows, stride } = left.ahead;
                            // Four passes for a line of sixteen rows.
                            let at = rows.wrapping_add(passes / 4 * LINE + passes % 4 * 4 * stride);
                            for row in 0..4 {
                                _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(row * stride).cast());
                            }
                        }
                        if BESIDE && passes < ROWS {
                            for at in &mut beside {
                                _mm_prefetch::<_MM_HINT_ET0>(at.cast());
                                _mm_prefetch::<_MM_HINT_ET0>(at.wrapping_add($lanes).cast());
                                *at = at.wrapping_add(ahead_stride);
                            }
                        }
                        if !BESIDE && passes < ROWS {
                            _mm_prefetch::<_MM_HINT_ET0>(ahead_c.cast());
                            _mm_prefetch::<_MM_HINT_ET0>(ahead_c.wrapping_add($lanes).cast());
                            ahead_c = ahead_c.wrapping_add(ahead_stride);
                        }
                        terms!(4, [0 1 2 3]);
                        passes += 1;
                    }
                    for _ in 0..terms % PASS {
                        terms!(1, [0]);
                    }
                    // Where the numbers to add to lie, and how far apart those of two rows are.
                    let (from, step) = match base {
                        Base::Zero => (std::ptr::null(), 0),
                        Base::Bias(bias) => (bias, 0),
                        Base::Target => (c.cast_const(), c_stride),
                    };
                    for row in 0..ROWS {
                        let at = c.add(row * c_stride);
                        let [mut low, mut high] = on.sums[row];
                        if !from.is_null() {
                            let from = from.add(row * step);
                            (low, high) = ($add($load(from), low), $add($load(from.add($lanes)), high));
                        }
                        $store(at, low);
                        $store(at.add($lanes), high);
                    }
                    left_over -= terms;
                    if left_over == 0 {
                        return;
                    }
                    base = Base::Target;
                    on.sums = [[$zero(); 2]; TILE_ROWS_MAX];
                }
            }
        }
    };
}

tiles! {
    tile_avx512, "avx512f", zmm_reg, 16, 64, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_setzero_ps,
    _mm512_add_ps;
    1: [0 l0 h0]
    2: [0 l0 h0 1 l1 h1]
    3: [0 l0 h0 1 l1 h1 2 l2 h2]
    4: [0 l0 h0 1 l1 h1 2 l2 h2 3 l3 h3]
    5: [0 l0 h0 1 l1 h1 2 l2 h2 3 l3 h3 4 l4 h4]
    6: [0 l0 h0 1 l1 h1 2 l2 h2 3 l3 h3 4 l4 h4 5 l5 h5]
    7: [0 l0 h0 1 l1 h1 2 l2 h2 3 l3 h3 4 l4 h4 5 l5 h5 6 l6 h6]
    8: [0 l0 h0 1 l1 h1 2 l2 h2 3 l3 h3 4 l4 h4 5 l5 h5 6 l6 h6 7 l7 h7]
    9: [0 l0 h0 1 l1 h1 2 l2 h2 3 l3 h3 4 l4 h4 5 l5 h5 6 l6 h6 7 l7 h7 8 l8 h8]
    10: [0 l0 h0 1 l1 h1 2 l2 h2 3 l3 h3 4 l4 h4 5 l5 h5 6 l6 h6 7 l7 h7 8 l8 h8 9 l9 h9]
    11: [0 l0 h0 1 l1 h1 2 l2 h2 3 l3 h3 4 l4 h4 5 l5 h5 6 l6 h6 7 l7 h7 8 l8 h8 9 l9 h9 10 l10 h10]
    12: [0 l0 h0 1 l1 h1 2 l2 h2 3 l3 h3 4 l4 h4 5 l5 h5 6 l6 h6 7 l7 h7 8 l8 h8 9 l9 h9 10 l10 h10 11 l11 h11]
}

tiles! {
    tile_avx2, "avx2,fma", ymm_reg, 8, 32, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_setzero_ps,
    _mm256_add_ps;
    1: [0 l0 h0]
    2: [0 l0 h0 1 l1 h1]
    3: [0 l0 h0 1 l1 h1 2 l2 h2]
    4: [0 l0 h0 1 l1 h1 2 l2 h2 3 l3 h3]
    5: [0 l0 h0 1 l1 h1 2 l2 h2 3 l3 h3 4 l4 h4]
    6: [0 l0 h0 1 l1 h1 2 l2 h2 3 l3 h3 4 l4 h4 5 l5 h5]
}
