//! Sixteen numbers at a time, whatever the vector width: a kernel is written once over [`Lanes`] and compiled for each
//! level by [`by_level!`]. Every lane goes through the same operations at every level, so the bits are the same.

/// Numbers at a time.
pub const LANES: usize = 16;

/// Sixteen numbers.
pub trait Lanes: Copy {
    /// Rows of two such vectors that stay in registers together.
    const ROWS: usize;

    /// # Safety
    /// Here and below: the machine has the level's instructions, and sixteen numbers lie at the pointer.
    unsafe fn load(from: *const f32) -> Self;
    /// # Safety
    /// As for `load`.
    unsafe fn store(self, to: *mut f32);
    /// # Safety
    /// As for `load`.
    unsafe fn splat(value: f32) -> Self;
    /// # Safety
    /// As for `load`.
    unsafe fn add(self, other: Self) -> Self;
    /// # Safety
    /// As for `load`.
    unsafe fn sub(self, other: Self) -> Self;
    /// # Safety
    /// As for `load`.
    unsafe fn mul(self, other: Self) -> Self;
    /// `self · factor + term`, rounded once.
    /// # Safety
    /// As for `load`.
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self;
}

/// Without vector instructions.
pub type Plain = [f32; LANES];

macro_rules! each {
    ($lane:ident => $value:expr) => {{
        let mut out = [0.0; LANES];
        for $lane in 0..LANES {
            out[$lane] = $value;
        }
        out
    }};
}

impl Lanes for Plain {
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: by the caller's promise.
        unsafe { from.cast::<Self>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: by the caller's promise.
        unsafe { to.cast::<Self>().write_unaligned(self) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        each!(lane => self[lane] + other[lane])
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        each!(lane => self[lane] - other[lane])
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        each!(lane => self[lane] * other[lane])
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        each!(lane => self[lane].mul_add(factor[lane], term[lane]))
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Middle, Wide};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Lanes;
    use std::arch::x86_64::*;

    /// AVX-512: one register.
    pub type Wide = __m512;

    impl Lanes for Wide {
        const ROWS: usize = 12;

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: by the caller's promise.
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: by the caller's promise.
            unsafe { _mm512_storeu_ps(to, self) }
        }
        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: by the caller's promise.
            unsafe { _mm512_set1_ps(value) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: by the caller's promise.
            unsafe { _mm512_add_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: by the caller's promise.
            unsafe { _mm512_sub_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: by the caller's promise.
            unsafe { _mm512_mul_ps(self, other) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
            // SAFETY: by the caller's promise.
            unsafe { _mm512_fmadd_ps(self, factor, term) }
        }
    }

    /// AVX2: two registers.
    #[derive(Clone, Copy)]
    pub struct Middle(__m256, __m256);

    impl Lanes for Middle {
        const ROWS: usize = 3;

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: by the caller's promise.
            unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: by the caller's promise.
            unsafe {
                _mm256_storeu_ps(to, self.0);
                _mm256_storeu_ps(to.add(8), self.1);
            }
        }
        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: by the caller's promise.
            unsafe { Self(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: by the caller's promise.
            unsafe { Self(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: by the caller's promise.
            unsafe { Self(_mm256_sub_ps(self.0, other.0), _mm256_sub_ps(self.1, other.1)) }
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: by the caller's promise.
            unsafe { Self(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1)) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
            // SAFETY: by the caller's promise.
            unsafe { Self(_mm256_fmadd_ps(self.0, factor.0, term.0), _mm256_fmadd_ps(self.1, factor.1, term.1)) }
        }
    }
}

/// Compiles a kernel over [`Lanes`] for every level; the function calls the best. The kernel must be `#[inline(always)]`,
/// so that it takes on the level's instructions.
macro_rules! by_level {
    ($(#[$meta:meta])* $vis:vis unsafe fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $kernel:ident) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn wide($($arg: $ty),*) {
                // SAFETY: the level is there; the rest is the caller's promise.
                unsafe { $kernel::<$crate::conv::lanes::Wide>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn middle($($arg: $ty),*) {
                // SAFETY: the level is there; the rest is the caller's promise.
                unsafe { $kernel::<$crate::conv::lanes::Middle>($($arg),*) }
            }
            // SAFETY: the level was detected; the rest is the caller's promise.
            unsafe {
                match $crate::simd::level() {
                    #[cfg(target_arch = "x86_64")]
                    $crate::simd::Level::Avx512 => wide($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::simd::Level::Avx2 => middle($($arg),*),
                    _ => $kernel::<$crate::conv::lanes::Plain>($($arg),*),
                }
            }
        }
    };
}
pub(crate) use by_level;
