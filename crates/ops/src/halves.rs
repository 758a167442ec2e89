//! bf16 and f16 as kernels meet them: runs of 16-bit numbers, widened to f32 and rounded to nearest even.
//!
//! The conversions are integer arithmetic without branches, so that one loop serves every vector width with the same bits,
//! which are those of the crate `half`.

use crate::vectorized;
use kolo_graph::DType;

/// A bf16 in f32, which holds it exactly.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest bf16, of two the even one; NaN stays NaN.
#[inline(always)]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded }) as u16
}

/// An f16 in f32, which holds it exactly.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    const EXPONENT: u32 = 0x7c00 << 13;
    let shifted = u32::from(bits & 0x7fff) << 13;
    let normal = shifted + ((127 - 15) << 23);
    // Below the smallest normal number: the bits count units of 2⁻²⁴, which a subtraction turns into a float.
    let small = (f32::from_bits(normal + (1 << 23)) - f32::from_bits((127 - 14) << 23)).to_bits();
    let quiet = if shifted > EXPONENT { 0x40_0000 } else { 0 };
    let large = (normal + ((128 - 16) << 23)) | quiet;
    let value = match shifted & EXPONENT {
        0 => small,
        EXPONENT => large,
        _ => normal,
    };
    f32::from_bits(value | u32::from(bits & 0x8000) << 16)
}

/// The nearest f16, of two the even one; what is too large becomes infinite, NaN stays NaN.
#[inline(always)]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let absolute = bits & 0x7fff_ffff;
    let odd = (absolute >> 13) & 1;
    let normal = absolute.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + odd) >> 13;
    // Adding a half aligns the mantissa with units of 2⁻²⁴, and rounds it there.
    let small = (f32::from_bits(absolute) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let nan = 0x7e00 | (absolute >> 13 & 0x3ff);
    let large = if absolute > 0x7f80_0000 { nan } else { 0x7c00 };
    let value = if absolute >= (127 + 16) << 23 {
        large
    } else if absolute < (127 - 14) << 23 {
        small
    } else {
        normal
    };
    (value | (bits >> 16 & 0x8000)) as u16
}

vectorized! {
    fn widen_bf16(from: &[u16], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = bf16_to_f32(*from);
        }
    }
}

vectorized! {
    fn widen_f16(from: &[u16], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = f16_to_f32(*from);
        }
    }
}

vectorized! {
    fn round_bf16(from: &[f32], to: &mut [u16]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32_to_bf16(*from);
        }
    }
}

vectorized! {
    fn round_f16(from: &[f32], to: &mut [u16]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32_to_f16(*from);
        }
    }
}

vectorized! {
    /// `out` is `x` as if it had been stored as bf16.
    fn through_bf16(out: &mut [f32], x: &[f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = bf16_to_f32(f32_to_bf16(*x));
        }
    }
}

vectorized! {
    fn through_f16(out: &mut [f32], x: &[f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = f16_to_f32(f32_to_f16(*x));
        }
    }
}

/// Whether an element takes 16 bits and is a float.
pub fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// Halves of this type in f32.
pub fn widen(dtype: DType, from: &[u16], to: &mut [f32]) {
    match dtype {
        DType::BF16 => widen_bf16(from, to),
        DType::F16 => widen_f16(from, to),
        _ => unreachable!("{} is not a half type", dtype.name()),
    }
}

/// f32 as halves of this type.
pub fn round(dtype: DType, from: &[f32], to: &mut [u16]) {
    match dtype {
        DType::BF16 => round_bf16(from, to),
        DType::F16 => round_f16(from, to),
        _ => unreachable!("{} is not a half type", dtype.name()),
    }
}

/// f32 as it would be after it was stored as this type.
pub fn through(dtype: DType, out: &mut [f32], x: &[f32]) {
    match dtype {
        DType::BF16 => through_bf16(out, x),
        DType::F16 => through_f16(out, x),
        _ => out.copy_from_slice(x),
    }
}

/// One half of this type in f32.
#[inline(always)]
pub fn widen_one(dtype: DType, bits: u16) -> f32 {
    if dtype == DType::BF16 { bf16_to_f32(bits) } else { f16_to_f32(bits) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn every_half_is_widened_as_the_crate_half_does() {
        for bits in 0..=u16::MAX {
            assert_eq!(bf16_to_f32(bits).to_bits(), u32::from(bits) << 16);
            let (ours, theirs) = (f16_to_f32(bits), f16::from_bits(bits).to_f32());
            assert_eq!(ours.is_nan(), theirs.is_nan(), "{bits:#x}");
            assert!(ours.is_nan() || ours.to_bits() == theirs.to_bits(), "{bits:#x}: {ours} and {theirs}");
        }
    }

    /// Around every half: itself, its neighbours in f32, the ties and what lies beside them.
    #[test]
    fn floats_are_rounded_as_the_crate_half_does() {
        let check = |value: f32| {
            let (ours, theirs) = (f32_to_bf16(value), bf16::from_f32(value).to_bits());
            assert!(ours == theirs || (value.is_nan() && bf16::from_bits(ours).is_nan()), "{value:e} as bf16");
            let (ours, theirs) = (f32_to_f16(value), f16::from_f32(value).to_bits());
            assert!(ours == theirs || (value.is_nan() && f16::from_bits(ours).is_nan()), "{value:e} as f16");
        };
        for high in 0..=u32::from(u16::MAX) {
            for low in [0, 1, 0x0fff, 0x1000, 0x1001, 0x2000, 0x7fff, 0x8000, 0x8001, 0xffff] {
                check(f32::from_bits(high << 16 | low));
            }
        }
    }
}
