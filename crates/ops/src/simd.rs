//! Runtime choice of the vector width.
//!
//! A kernel is written once as plain loops and compiled three times; the widest version the machine has is called. The
//! bits do not depend on the choice: reductions name their own lanes, and fused multiply-add is written out.

use std::sync::atomic::{AtomicU8, Ordering};

/// What the machine can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Portable = 1,
    Avx2 = 2,
    Avx512 = 3,
}

static LEVEL: AtomicU8 = AtomicU8::new(0);

/// The level in use, found on first call.
#[inline]
pub fn level() -> Level {
    match LEVEL.load(Ordering::Relaxed) {
        0 => detect(),
        1 => Level::Portable,
        2 => Level::Avx2,
        _ => Level::Avx512,
    }
}

fn detect() -> Level {
    let level = detected();
    LEVEL.store(level as u8, Ordering::Relaxed);
    level
}

#[cfg(target_arch = "x86_64")]
fn detected() -> Level {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq");
    match (avx2, avx512) {
        (true, true) => Level::Avx512,
        (true, false) => Level::Avx2,
        _ => Level::Portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detected() -> Level {
    Level::Portable
}

/// Lowers the level, so that tests can try every version; `None` returns to what the machine has.
///
/// # Safety
/// No kernel runs meanwhile: an operand packed for one level must not meet another level's kernel.
pub unsafe fn limit(level: Option<Level>) {
    let level = level.map_or_else(detected, |level| level.min(detected()));
    LEVEL.store(level as u8, Ordering::Relaxed);
}

/// Compiles a function for every level and calls the best.
#[macro_export]
macro_rules! vectorized {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn wide($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn middle($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }

            match $crate::simd::level() {
                // SAFETY: the level is detected, never assumed.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Level::Avx512 => unsafe { wide($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Level::Avx2 => unsafe { middle($($arg),*) },
                _ => body($($arg),*),
            }
        }
    };
}

/// Independent partial results of a reduction. Fixed, so that the order of additions is the same on every machine.
pub const LANES: usize = 16;

vectorized! {
    /// Sum in a fixed order: 16 interleaved partial sums, joined as a balanced tree.
    pub fn sum(values: &[f32]) -> f32 {
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
