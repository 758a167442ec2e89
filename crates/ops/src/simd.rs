//! Sums and other basic loops over slices, in an order of additions that is the same on every machine.

pub use kolo_graph::simd::{Level, level, limit};

use crate::vectorized;

/// Independent partial results of a reduction. Fixed, so that the order of additions is the same on every machine.
pub const LANES: usize = 16;

/// Asks for lines of memory that are needed soon, though not at once. Nothing is read.
#[inline(always)]
pub fn prefetch(start: *const f32, count: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..count).step_by(16) {
        // SAFETY: a prefetch reads nothing.
        unsafe {
            use std::arch::x86_64::*;
            _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(line).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, count);
}

vectorized! {
    /// Sum in a fixed order: 16 interleaved partial sums, joined as a balanced tree.
    pub fn sum(values: &[f32]) -> f32 {
        sum_of(values)
    }
}

/// [`sum`] within a kernel that is vectorised itself.
#[inline(always)]
pub fn sum_of(values: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            lanes[lane] += chunk[lane];
        }
    }
    let rest = padded(chunks.remainder(), 0.0);
    for lane in 0..LANES {
        lanes[lane] += rest[lane];
    }
    fold(lanes)
}

vectorized! {
    /// Dot product in the same order as `sum`.
    pub fn dot(a: &[f32], b: &[f32]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        let count = a.len().min(b.len());
        let (xs, ys) = (a[..count].as_chunks::<LANES>(), b[..count].as_chunks::<LANES>());
        for (x, y) in xs.0.iter().zip(ys.0) {
            for lane in 0..LANES {
                lanes[lane] = x[lane].mul_add(y[lane], lanes[lane]);
            }
        }
        let (x, y) = (padded(xs.1, 0.0), padded(ys.1, 0.0));
        for lane in 0..LANES {
            lanes[lane] = x[lane].mul_add(y[lane], lanes[lane]);
        }
        fold(lanes)
    }
}

vectorized! {
    /// Largest value; NaN wins over everything, so that it cannot hide.
    pub fn max(values: &[f32]) -> f32 {
        max_of(values)
    }
}

/// [`max`] within a kernel that is vectorised itself.
#[inline(always)]
pub fn max_of(values: &[f32]) -> f32 {
    // As whole numbers in the order of floats the maximum may be taken in any order, so the compiler picks the best.
    let (mut largest, mut nan) = (i32::MIN, 0u32);
    for value in values {
        let bits = value.to_bits() as i32;
        largest = largest.max(bits ^ ((bits >> 31) & i32::MAX));
        nan |= u32::from(value.is_nan());
    }
    match (nan, largest) {
        (0, i32::MIN) => f32::NEG_INFINITY,
        (0, _) => f32::from_bits((largest ^ ((largest >> 31) & i32::MAX)) as u32),
        _ => f32::NAN,
    }
}

#[inline(always)]
fn padded(rest: &[f32], with: f32) -> [f32; LANES] {
    let mut block = [with; LANES];
    block[..rest.len()].copy_from_slice(rest);
    block
}

vectorized! {
    /// `y += x`.
    pub fn add_into(y: &mut [f32], x: &[f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y += *x;
        }
    }
}

vectorized! {
    /// `out = x + y`.
    pub fn add(out: &mut [f32], x: &[f32], y: &[f32]) {
        for ((out, x), y) in out.iter_mut().zip(x).zip(y) {
            *out = *x + *y;
        }
    }
}

/// Joins the lanes as a balanced tree.
// Not inlined: seen together with the loop that fills the lanes, the tree leads the compiler to scatter them.
#[inline(never)]
pub fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}
