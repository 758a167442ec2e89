//! Copies of operands in the order in which the kernel reads them.

use crate::simd::{Level, level};
use kolo_graph::vectorized;

/// Rows of memory dealt out together.
const DEAL: usize = 8;

vectorized! {
    /// Deals rows of memory out to slivers of some width.
    pub(super) fn deal(width: usize, source: &[f32], k_stride: usize, slivers: usize, depth: usize, out: &mut [f32]) {
        match width {
            32 => deal_pieces::<32>(source, k_stride, slivers, depth, out),
            16 => deal_pieces::<16>(source, k_stride, slivers, depth, out),
            12 => deal_pieces::<12>(source, k_stride, slivers, depth, out),
            11 => deal_pieces::<11>(source, k_stride, slivers, depth, out),
            10 => deal_pieces::<10>(source, k_stride, slivers, depth, out),
            8 => deal_pieces::<8>(source, k_stride, slivers, depth, out),
            6 => deal_pieces::<6>(source, k_stride, slivers, depth, out),
            _ => {
                for sliver in 0..slivers {
                    let out = &mut out[sliver * width * depth..(sliver + 1) * width * depth];
                    pack_lines(&source[sliver * width..], k_stride, width, depth, width, out);
                }
            }
        }
    }
}

/// A few rows at a time, read from end to end as the memory likes it, and written in runs of several pieces. The width is a
/// constant so that a piece is a register or two, not a call.
#[inline(always)]
fn deal_pieces<const WIDTH: usize>(source: &[f32], k_stride: usize, slivers: usize, depth: usize, out: &mut [f32]) {
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
pub(super) fn pack_lines(source: &[f32], k_stride: usize, count: usize, ks: usize, width: usize, out: &mut [f32]) {
    for k in 0..ks {
        let row = &mut out[k * width..(k + 1) * width];
        row[..count].copy_from_slice(&source[k * k_stride..k * k_stride + count]);
        row[count..].fill(0.0);
    }
}

/// Each line lies along `k`: transpose in blocks of eight.
pub(super) fn pack_transposed(source: &[f32], stride: usize, count: usize, ks: usize, width: usize, out: &mut [f32]) {
    if count < width {
        for k in 0..ks {
            out[k * width + count..(k + 1) * width].fill(0.0);
        }
    }
    transpose(source, stride, count, ks, width, out);
}

/// `out[k, line] = source[line, k]` for rows of memory `stride` and `width` apart.
pub(super) fn transpose(source: &[f32], stride: usize, count: usize, ks: usize, width: usize, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if level() != Level::Portable && count >= 8 && ks >= 8 {
        // SAFETY: the level has AVX2.
        return unsafe { transpose_blocks(source, stride, count, ks, width, out) };
    }
    for line in 0..count {
        for k in 0..ks {
            out[k * width + line] = source[line * stride + k];
        }
    }
}

/// In blocks of eight by eight. The last block of a side overlaps the one before, which writes some numbers twice and needs no
/// remainder.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn transpose_blocks(source: &[f32], stride: usize, count: usize, ks: usize, width: usize, out: &mut [f32]) {
    assert!(source.len() >= (count - 1) * stride + ks && out.len() >= (ks - 1) * width + count, "lines of numbers");
    // Two blocks along `k`, which are a cache line of every source row, for all lines: then what is written is whole.
    for pair in (0..ks).step_by(16) {
        for line in (0..count).step_by(8).map(|line| line.min(count - 8)) {
            for row in line..line + 8 {
                hint(&source[row * stride + pair..], 16);
            }
            for k in (pair..ks.min(pair + 16)).step_by(8).map(|k| k.min(ks - 8)) {
                // SAFETY: checked above.
                unsafe {
                    let (from, to) = (source.as_ptr().add(line * stride + k), out.as_mut_ptr().add(k * width + line));
                    transpose_8x8(from, stride, to, width);
                }
            }
        }
    }
}

/// # Safety
/// Eight lines of eight numbers are at both places.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn transpose_8x8(source: *const f32, stride: usize, out: *mut f32, width: usize) {
    use std::arch::x86_64::*;
    // SAFETY: by the contract above.
    unsafe {
        let row = |at: usize| _mm256_loadu_ps(source.add(at * stride));
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
            _mm256_storeu_ps(out.add(at * width), low);
            _mm256_storeu_ps(out.add((at + 4) * width), high);
        }
    }
}
