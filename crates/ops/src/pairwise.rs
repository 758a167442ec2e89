//! Long sums as balanced trees over short runs, so that rounding errors grow with the logarithm of the number of terms
//! and not with the number itself. Where a sum is cut depends on its length alone.

use crate::simd;
use crate::vectorized;

/// Elements that are added straight before runs are joined: 64 in each lane.
pub const RUN: usize = 1024;
/// Rows that are added straight before blocks of them are joined.
const ROWS: usize = 64;
/// The widest strip of columns whose sums are made together: whole cache lines, few enough to stay in the first-level
/// cache.
pub const COLUMNS: usize = 256;

/// Terms that come one after the other, added up as a balanced tree: a binary counter of partial sums.
#[derive(Clone, Copy, Debug)]
pub struct Pairwise {
    /// At each level the sum of `2^level` terms, if that bit of `count` is set.
    sums: [f32; LEVELS],
    count: u32,
}

/// Terms are runs or blocks, so these are more than fit any memory.
const LEVELS: usize = 32;

impl Pairwise {
    pub const EMPTY: Self = Self { sums: [0.0; LEVELS], count: 0 };

    #[inline]
    pub fn add(&mut self, term: f32) {
        let level = self.count.trailing_ones() as usize;
        self.sums[level] = self.sums[..level].iter().fold(term, |sum, earlier| earlier + sum);
        self.count += 1;
    }

    pub fn total(&self) -> f32 {
        let (mut left, mut total) = (self.count, None);
        while left > 0 {
            let earlier = self.sums[left.trailing_zeros() as usize];
            total = Some(total.map_or(earlier, |later: f32| earlier + later));
            left &= left - 1;
        }
        total.unwrap_or(0.0)
    }

    pub fn of(terms: impl Iterator<Item = f32>) -> f32 {
        let mut sum = Self::EMPTY;
        terms.for_each(|term| sum.add(term));
        sum.total()
    }
}

/// The sum of a slice of any length.
pub fn sum(values: &[f32]) -> f32 {
    if values.len() <= RUN {
        return simd::sum(values);
    }
    Pairwise::of(values.chunks(RUN).map(simd::sum))
}

/// [`sum`] within a kernel that is vectorised itself.
#[inline(always)]
pub fn sum_of(values: &[f32]) -> f32 {
    if values.len() <= RUN {
        return simd::sum_of(values);
    }
    Pairwise::of(values.chunks(RUN).map(simd::sum_of))
}

/// `out[i] = Σ_r x[r·stride + i]` for up to [`COLUMNS`] columns.
pub fn sum_rows(out: &mut [f32], x: &[f32], rows: usize, stride: usize) {
    if rows <= ROWS {
        return add_rows(out, x, rows, stride);
    }
    // The left half is the largest power of two of blocks that is not all of them.
    let left = rows.div_ceil(ROWS).next_power_of_two() / 2 * ROWS;
    let mut right = [0.0; COLUMNS];
    let right = &mut right[..out.len()];
    sum_rows(out, x, left, stride);
    sum_rows(right, &x[left * stride..], rows - left, stride);
    simd::add_into(out, right);
}

vectorized! {
    /// `out[i] = Σ_r x[r·stride + i]`, rows in order.
    fn add_rows(out: &mut [f32], x: &[f32], rows: usize, stride: usize) {
        out.fill(0.0);
        let width = out.len();
        let mut row = 0;
        while row + 4 <= rows {
            let at = |r: usize| &x[(row + r) * stride..(row + r) * stride + width];
            let (a, b, c, d) = (at(0), at(1), at(2), at(3));
            for i in 0..width {
                out[i] = (((out[i] + a[i]) + b[i]) + c[i]) + d[i];
            }
            row += 4;
        }
        while row < rows {
            let a = &x[row * stride..row * stride + width];
            for i in 0..width {
                out[i] += a[i];
            }
            row += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_adds_as_a_balanced_tree() {
        let terms: Vec<f32> = (0..13).map(|at| 0.1 + at as f32 * 0.37).collect();
        fn tree(terms: &[f32]) -> f32 {
            match terms {
                [] => 0.0,
                [one] => *one,
                _ => {
                    let left = terms.len().next_power_of_two() / 2;
                    tree(&terms[..left]) + tree(&terms[left..])
                }
            }
        }
        for count in 0..=terms.len() {
            assert_eq!(Pairwise::of(terms[..count].iter().copied()), tree(&terms[..count]), "{count} terms");
        }
    }

    /// Errors of long sums in units of the last place of the sum of magnitudes, against f64. One chain of additions has
    /// thousands of units; PyTorch 2 has 0.2 to 0.6 for the same numbers.
    #[test]
    fn long_sums_stay_accurate() {
        for count in [65_536, 1 << 20] {
            for low in [0.0, -0.5] {
                let values: Vec<f32> = (0..count as u32)
                    .map(|at| low + (at.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32)
                    .collect();
                let exact: f64 = values.iter().map(|x| f64::from(*x)).sum();
                let size: f64 = values.iter().map(|x| f64::from(x.abs())).sum();
                let error = |got: f32| (f64::from(got) - exact).abs() / (size * f64::from(f32::EPSILON));
                assert!(error(sum(&values)) < 2.0, "{count} terms from {low}: {}", error(sum(&values)));
                let mut column = [0.0];
                sum_rows(&mut column, &values, count, 1);
                assert!(error(column[0]) < 4.0, "{count} rows from {low}: {}", error(column[0]));
            }
        }
    }
}
