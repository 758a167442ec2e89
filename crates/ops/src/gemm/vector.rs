//! One row times a matrix: the product of decoding, where every weight is read once and memory sets the time.
//!
//! Nothing is packed, and weights are read in the order in which they lie. If columns lie side by side, the sums of many wait
//! in the first-level cache meanwhile. If each column lies along `k`, sixteen at a time are turned in registers. Chains are cut
//! as everywhere, so the bits are those of any other way.

use super::product::{Product, blocks, chain_len};
use super::{Rows, Sink, Start, Strided};
use crate::simd;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Level, level};
use crate::vectorized;

/// Columns whose sums are made together: with four rows of as many weights and as many to come they fit the first-level cache.
const STRIP: usize = 1024;
/// Terms added to the sums at a time.
const TERMS: usize = 4;

impl<C: Sink> Product<'_, C> {
    /// Whether it is one row.
    pub fn is_vector(&self) -> bool {
        self.rows.len() == 1
    }

    /// One row `a`, which lies along `k`, times `b`, whose columns lie side by side.
    pub fn vector(&self, a: Strided<'_>, b: Strided<'_>, c: Rows, scratch: &mut [f32]) {
        let row = self.rows.start;
        let factors = &a.data[row * a.line_stride..][..self.ks];
        for left in self.columns.clone().step_by(STRIP) {
            let columns = left..(left + STRIP).min(self.columns.end);
            let sums = &mut scratch[..columns.len()];
            for ks in blocks(self.ks, chain_len(self.ks)) {
                sums.fill(0.0);
                add_terms(sums, &factors[ks.clone()], &b.data[ks.start * b.k_stride + left..], b.k_stride);
                self.add_chain(c, left, ks.start == 0, sums);
            }
        }
    }

    /// Adds the sums of a chain to what is there, or, of the first, to what the product starts from.
    fn add_chain(&self, c: Rows, left: usize, first: bool, sums: &[f32]) {
        let row = self.rows.start;
        // SAFETY: the caller made the matrix large enough for every column of the product.
        let out = unsafe { c.data.slice(row * c.stride + left, sums.len()) };
        match self.start {
            Start::Zero if first => out.copy_from_slice(sums),
            Start::Bias(bias) if first => simd::add(out, &bias[left..left + sums.len()], sums),
            Start::RowBias(bias) if first => {
                out.fill(bias[row]);
                simd::add_into(out, sums);
            }
            _ => simd::add_into(out, sums),
        }
    }

    /// Whether [`Product::vector_along`] can run here.
    #[cfg(target_arch = "x86_64")]
    pub fn can_turn_columns(&self) -> bool {
        level() == Level::Avx512 && self.is_vector()
    }

    /// One row `a` times `b`, each of whose columns lies along `k`, as `a` does.
    #[cfg(target_arch = "x86_64")]
    pub fn vector_along(&self, a: Strided<'_>, b: Strided<'_>, c: Rows) {
        let factors = &a.data[self.rows.start * a.line_stride..][..self.ks];
        for left in self.columns.clone().step_by(LINES) {
            let count = LINES.min(self.columns.end - left);
            let lines = &b.data[left * b.line_stride..(left + count - 1) * b.line_stride + self.ks];
            for ks in blocks(self.ks, chain_len(self.ks)) {
                // SAFETY: `can_turn_columns` was asked; the slice holds `count` lines of all terms.
                let sums = unsafe { dot_lines(&factors[ks.clone()], &lines[ks.start..], b.line_stride, count) };
                self.add_chain(c, left, ks.start == 0, &sums[..count]);
            }
        }
    }
}

/// Columns that are turned at a time, and terms of each.
#[cfg(target_arch = "x86_64")]
const LINES: usize = 16;

/// The products of `factors` with each of up to sixteen lines, which are `stride` apart. The lines after them are asked for
/// meanwhile.
///
/// # Safety
/// The machine has AVX-512, and `lines` has `count` lines of as many terms as there are factors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn dot_lines(factors: &[f32], lines: &[f32], stride: usize, count: usize) -> [f32; LINES] {
    use std::arch::x86_64::*;
    let mut sum = _mm512_setzero_ps();
    for start in (0..factors.len()).step_by(LINES) {
        let terms = LINES.min(factors.len() - start);
        let mask = (0xffff_u32 >> (LINES - terms)) as __mmask16;
        let mut rows = [_mm512_setzero_ps(); LINES];
        for (line, row) in rows.iter_mut().enumerate().take(count) {
            let at = lines.as_ptr().wrapping_add(line * stride + start);
            // SAFETY: the terms that the mask has are in the line; a prefetch reads nothing.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(LINES * stride).cast());
                *row = _mm512_maskz_loadu_ps(mask, at);
            }
        }
        let turned = turn(rows);
        for (factor, column) in factors[start..start + terms].iter().zip(turned) {
            sum = _mm512_fmadd_ps(_mm512_set1_ps(*factor), column, sum);
        }
    }
    let mut sums = [0.0; LINES];
    // SAFETY: sixteen numbers have room there.
    unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), sum) };
    sums
}

/// A matrix of sixteen by sixteen, turned.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn turn(rows: [std::arch::x86_64::__m512; LINES]) -> [std::arch::x86_64::__m512; LINES] {
    use std::arch::x86_64::*;
    let mut pairs = rows;
    for at in (0..LINES).step_by(2) {
        pairs[at] = _mm512_unpacklo_ps(rows[at], rows[at + 1]);
        pairs[at + 1] = _mm512_unpackhi_ps(rows[at], rows[at + 1]);
    }
    // Quad `4·i + j` has, in its part `l` of four numbers, column `4·l + j` of rows `4·i` and the three after it.
    let mut quads = pairs;
    for at in (0..LINES).step_by(4) {
        let (a, b) = (_mm512_castps_pd(pairs[at]), _mm512_castps_pd(pairs[at + 1]));
        let (c, d) = (_mm512_castps_pd(pairs[at + 2]), _mm512_castps_pd(pairs[at + 3]));
        quads[at] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        quads[at + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        quads[at + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        quads[at + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    let mut columns = quads;
    for at in 0..4 {
        let (a, b, c, d) = (quads[at], quads[at + 4], quads[at + 8], quads[at + 12]);
        let (even, odd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
        let (even_below, odd_below) = (_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xdd>(c, d));
        columns[at] = _mm512_shuffle_f32x4::<0x88>(even, even_below);
        columns[at + 8] = _mm512_shuffle_f32x4::<0xdd>(even, even_below);
        columns[at + 4] = _mm512_shuffle_f32x4::<0x88>(odd, odd_below);
        columns[at + 12] = _mm512_shuffle_f32x4::<0xdd>(odd, odd_below);
    }
    columns
}

vectorized! {
    /// `sums[i] += Σ_k factors[k]·terms[k, i]`, in order of `k`, where rows of terms are `stride` apart.
    fn add_terms(sums: &mut [f32], factors: &[f32], terms: &[f32], stride: usize) {
        let width = sums.len();
        let (fours, rest) = factors.as_chunks::<TERMS>();
        for (at, [fa, fb, fc, fd]) in fours.iter().enumerate() {
            let start = at * TERMS * stride;
            let row = |at: usize| &terms[start + at * stride..start + at * stride + width];
            let (a, b, c, d) = (row(0), row(1), row(2), row(3));
            // The rows after these: each is a run of its own, which no machine foresees.
            for at in TERMS..2 * TERMS {
                prefetch(terms.as_ptr().wrapping_add(start + at * stride), width);
            }
            for i in 0..width {
                let sum = fb.mul_add(b[i], fa.mul_add(a[i], sums[i]));
                sums[i] = fd.mul_add(d[i], fc.mul_add(c[i], sum));
            }
        }
        for (k, factor) in (fours.len() * TERMS..).zip(rest) {
            let row = &terms[k * stride..k * stride + width];
            for i in 0..width {
                sums[i] = factor.mul_add(row[i], sums[i]);
            }
        }
    }
}

/// Asks for lines of memory that are needed next. Nothing is read, so it may point anywhere.
#[inline(always)]
fn prefetch(start: *const f32, count: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..count).step_by(16) {
        // SAFETY: a prefetch reads nothing.
        unsafe {
            use std::arch::x86_64::*;
            _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(line).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, count);
}
