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

/// The environment variable that names the widest instructions to use. The bits stay the same.
pub const LIMIT: &str = "KOLO_VECTORS";

impl Level {
    /// The names that [`LIMIT`] takes.
    pub const NAMES: [(&'static str, Level); 3] =
        [("portable", Level::Portable), ("avx2", Level::Avx2), ("avx512", Level::Avx512)];

    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize - 1].0
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, level)| *level)
    }
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
    let wanted = std::env::var(LIMIT).ok().and_then(|name| Level::named(&name));
    let level = detected().min(wanted.unwrap_or(Level::Avx512));
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

/// Compiles a function for every level and calls the best. Its parameters are plain slices, however many: of those the
/// compiler knows that none overlaps another, which it does not of slices inside a struct.
#[macro_export]
macro_rules! vectorized {
    (
        $(#[$meta:meta])* $vis:vis fn $name:ident $(<$generic:ident : $bound:path>)? ($($arg:ident : $ty:ty),* $(,)?)
        $(-> $ret:ty)? $body:block
    ) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name $(<$generic: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body $(<$generic: $bound>)? ($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn wide $(<$generic: $bound>)? ($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn middle $(<$generic: $bound>)? ($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }

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
