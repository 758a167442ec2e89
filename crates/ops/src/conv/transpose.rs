//! Transposition in blocks of eight by eight.

use crate::simd::{Level, level};

/// Numbers on a side of a block.
const SIDE: usize = 8;

/// `to(k)[line] = source[line · stride + k]` for all `lines` and `ks`.
///
/// # Safety
/// `source` holds every number read, and `to(k)` points to `lines` numbers that nothing else uses.
#[inline(always)]
pub unsafe fn transpose(source: *const f32, stride: usize, lines: usize, ks: usize, to: impl Fn(usize) -> *mut f32) {
    #[cfg(target_arch = "x86_64")]
    if lines >= SIDE && ks >= SIDE && level() != Level::Portable {
        // SAFETY: the level has AVX2; the rest is the caller's promise.
        return unsafe { blocks(source, stride, lines, ks, to) };
    }
    for k in 0..ks {
        let to = to(k);
        for line in 0..lines {
            // SAFETY: by the caller's promise.
            unsafe { *to.add(line) = *source.add(line * stride + k) };
        }
    }
}

/// The last block of each side overlaps the one before it, so that no edge is left.
///
/// # Safety
/// As above, with at least one block of each side.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn blocks(source: *const f32, stride: usize, lines: usize, ks: usize, to: impl Fn(usize) -> *mut f32) {
    let mut k = 0;
    while k < ks {
        let k_at = k.min(ks - SIDE);
        let mut line = 0;
        while line < lines {
            let line_at = line.min(lines - SIDE);
            // SAFETY: the block lies inside.
            unsafe {
                block(source.add(line_at * stride + k_at), stride, |at| to(k_at + at).add(line_at));
            }
            line += SIDE;
        }
        k += SIDE;
    }
}

/// One block. Halves of two lines are joined while loading, so that sixteen shuffles are enough.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn block(source: *const f32, stride: usize, to: impl Fn(usize) -> *mut f32) {
    use std::arch::x86_64::*;
    // SAFETY: by the caller's promise.
    unsafe {
        for half in 0..2 {
            let pair = |line: usize| {
                let low = _mm256_castps128_ps256(_mm_loadu_ps(source.add(line * stride + half * 4)));
                _mm256_insertf128_ps::<1>(low, _mm_loadu_ps(source.add((line + 4) * stride + half * 4)))
            };
            let (a, b, c, d) = (pair(0), pair(1), pair(2), pair(3));
            let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            _mm256_storeu_ps(to(half * 4), _mm256_shuffle_ps::<0x44>(ab_low, cd_low));
            _mm256_storeu_ps(to(half * 4 + 1), _mm256_shuffle_ps::<0xee>(ab_low, cd_low));
            _mm256_storeu_ps(to(half * 4 + 2), _mm256_shuffle_ps::<0x44>(ab_high, cd_high));
            _mm256_storeu_ps(to(half * 4 + 3), _mm256_shuffle_ps::<0xee>(ab_high, cd_high));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_every_number() {
        for (lines, ks) in [(1, 1), (8, 8), (12, 9), (9, 31), (7, 20), (20, 7)] {
            let stride = ks + 3;
            let source: Vec<f32> = (0..lines * stride).map(|at| at as f32).collect();
            let mut out = vec![-1.0; lines * ks];
            let at = out.as_mut_ptr();
            // SAFETY: both buffers have the sizes named.
            unsafe { transpose(source.as_ptr(), stride, lines, ks, |k| at.add(k * lines)) };
            for line in 0..lines {
                for k in 0..ks {
                    assert_eq!(out[k * lines + line], source[line * stride + k], "{lines}x{ks} at {line},{k}");
                }
            }
        }
    }
}
