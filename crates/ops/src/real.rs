//! One expression, several readings: an elementwise op is written once over [`Real`]; in f64 it is the definition, in f32 it
//! is branch-free arithmetic that the compiler turns into vectors, and of [symbols](crate::symbol::Symbol) it is a formula
//! to be printed. So a comparison gives no `bool` but a mask, and one chooses by [`Compare::select`], never by `if`.
//!
//! The f32 functions are within a few units in the last place over their whole range (tested below) and call no library,
//! so their bits are the same on every machine.

use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Sub};

/// What a comparison gives: a truth value, or one that is only written down.
pub trait Mask: Copy + BitAnd<Output = Self> + BitOr<Output = Self> + Not<Output = Self> {}

impl Mask for bool {}

/// Numbers that are compared, and chosen by the outcome.
pub trait Compare: Copy {
    type Mask: Mask;

    fn of(value: f64) -> Self;
    /// NaN equals nothing, and is neither less nor more.
    fn is_equal(self, other: Self) -> Self::Mask;
    fn is_less(self, other: Self) -> Self::Mask;
    fn is_at_most(self, other: Self) -> Self::Mask;

    /// `a` where the mask holds, else `b`, without a branch.
    fn select(mask: Self::Mask, a: Self, b: Self) -> Self;

    #[inline(always)]
    fn is_above(self, other: Self) -> Self::Mask {
        other.is_less(self)
    }
    /// Any number but zero is true.
    #[inline(always)]
    fn is_true(self) -> Self::Mask {
        !self.is_equal(Self::of(0.0))
    }
}

macro_rules! compare {
    ($($number:ty),*) => {$(
        impl Compare for $number {
            type Mask = bool;
            #[inline(always)]
            fn of(value: f64) -> Self {
                value as $number
            }
            #[inline(always)]
            fn is_equal(self, other: Self) -> bool {
                self == other
            }
            #[inline(always)]
            fn is_less(self, other: Self) -> bool {
                self < other
            }
            #[inline(always)]
            fn is_at_most(self, other: Self) -> bool {
                self <= other
            }
            #[inline(always)]
            fn select(mask: bool, a: Self, b: Self) -> Self {
                if mask { a } else { b }
            }
        }
    )*};
}

compare!(f32, f64, i32, u32, u8);

pub trait Real:
    Compare + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + Neg<Output = Self>
{
    fn exp(self) -> Self;
    /// `eˣ − 1`, which keeps its digits near zero.
    fn exp_m1(self) -> Self;
    fn ln(self) -> Self;
    /// `ln(1 + x)` for `x` from 0 to 1, which keeps its digits near zero.
    fn ln_1p(self) -> Self;
    fn sqrt(self) -> Self;
    fn abs(self) -> Self;
    fn tanh(self) -> Self;
    fn erf(self) -> Self;
    fn sin(self) -> Self;
    fn cos(self) -> Self;
    fn floor(self) -> Self;
    fn pow(self, exponent: Self) -> Self;

    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        // A NaN on either side comes through.
        Self::select(self.is_above(other) | self.is_nan(), self, other)
    }
    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        Self::select(self.is_less(other) | self.is_nan(), self, other)
    }
    #[inline(always)]
    fn is_nan(self) -> Self::Mask {
        !self.is_equal(self)
    }
    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::of(1.0) / (Self::of(1.0) + (-self).exp())
    }
    /// `1 − betaⁿ` for this whole number `n`, as [`crate::optim::rule::bias_correction`] has it.
    fn bias_correction(self, beta: f64) -> Self;
    /// `self · by + plus` with one rounding.
    fn mul_add(self, by: Self, plus: Self) -> Self;
    /// `self / by` for `by` not below zero, which counts as the smallest normal number if it is less. Quotients that are
    /// too large, and dividends as large as a `by` past 2¹²⁶, need not be right.
    #[inline(always)]
    fn over(self, by: Self) -> Self {
        self / by
    }
    /// `ln(1 + eˣ)` without overflow, and with all digits where it is small.
    #[inline(always)]
    fn softplus(self) -> Self {
        self.larger(Self::of(0.0)) + (-self.abs()).exp().ln_1p()
    }
}

impl Real for f64 {
    fn bias_correction(self, beta: f64) -> Self {
        crate::optim::rule::bias_correction(beta, self)
    }
    fn exp(self) -> Self {
        self.exp()
    }
    fn exp_m1(self) -> Self {
        self.exp_m1()
    }
    fn ln(self) -> Self {
        self.ln()
    }
    fn ln_1p(self) -> Self {
        self.ln_1p()
    }
    fn sqrt(self) -> Self {
        self.sqrt()
    }
    fn abs(self) -> Self {
        self.abs()
    }
    fn tanh(self) -> Self {
        self.tanh()
    }
    /// By the Taylor series near zero and the continued fraction far from it.
    fn erf(self) -> Self {
        let x = self.abs();
        if x > 6.0 || self.is_nan() {
            return if self.is_nan() { self } else { self.signum() };
        }
        if x < 2.5 {
            let (mut term, mut sum) = (x, x);
            for n in 1..80 {
                term *= -x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            return self.signum() * sum * std::f64::consts::FRAC_2_SQRT_PI;
        }
        let fraction = (1..60).rev().fold(0.0, |tail, n| f64::from(n) / 2.0 / (x + tail));
        self.signum() * (1.0 - (-x * x).exp() / ((x + fraction) * std::f64::consts::PI.sqrt()))
    }
    fn sin(self) -> Self {
        self.sin()
    }
    fn cos(self) -> Self {
        self.cos()
    }
    fn floor(self) -> Self {
        self.floor()
    }
    fn mul_add(self, by: Self, plus: Self) -> Self {
        self.mul_add(by, plus)
    }
    fn pow(self, exponent: Self) -> Self {
        self.powf(exponent)
    }
}

/// `eˣ` as `2ⁿ · (1 + q)`, where `1 + q` is `eʳ` with `|r| ≤ ln 2 / 2`; the coefficients are Cephes'.
#[inline(always)]
fn exp_parts(x: f32) -> (f32, i32) {
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2²³: adding it rounds to a whole number
    let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4f32;
    p = p.mul_add(r, 1.398_199_9e-3);
    p = p.mul_add(r, 8.333_452e-3);
    p = p.mul_add(r, 4.166_579_6e-2);
    p = p.mul_add(r, 0.166_666_65);
    p = p.mul_add(r, 0.5);
    // The whole number is in the low bits already; a checked cast would leave the vector registers.
    (p.mul_add(r * r, r), (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32))
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) << 23) as u32)
}

/// Below this `eˣ` is less than half of the smallest number.
const EXP_LEAST: f32 = -103.972_08;

/// `eˣ` for `x` up to zero, where nothing overflows. Below −87.3 digits go one by one, as far as there are numbers.
#[inline(always)]
pub fn exp_of_negative(x: f32) -> f32 {
    const HALF_WAY: i32 = 64;
    // Not the nearest number in the range: its result is so small that processors take a hundred cycles over it.
    let (q, n) = exp_parts(if x < EXP_LEAST { 0.0 } else { x });
    // In two steps, the first of which never underflows.
    let y = (1.0 + q) * power_of_two(n + HALF_WAY) * power_of_two(-HALF_WAY);
    if x < EXP_LEAST { 0.0 } else { y }
}

/// `1 / x` for `x` from 1 to 2. Dividing sixteen numbers takes a processor longer than all the rest of a sigmoid.
#[inline(always)]
fn reciprocal(x: f32) -> f32 {
    // What is left of 1 by the best cubic polynomial is at most 1/577, its cube is less than a rounding.
    let mut y = -128.0 / 577.0;
    y = f32::mul_add(y, x, 768.0 / 577.0);
    y = y.mul_add(x, -1696.0 / 577.0);
    y = y.mul_add(x, 1632.0 / 577.0);
    let left = y.mul_add(-x, 1.0);
    y.mul_add(left.mul_add(left, left), y)
}

impl Real for f32 {
    fn bias_correction(self, beta: f64) -> Self {
        crate::optim::rule::bias_correction(beta, f64::from(self)) as f32
    }
    #[inline(always)]
    fn exp(self) -> Self {
        let x = if self > 88.722_83 { 88.722_83 } else { self };
        // Not the nearest number in the range: its result is so small that processors take a hundred cycles over it.
        let x = if x < EXP_LEAST { 0.0 } else { x };
        let (q, n) = exp_parts(x);
        // Two halves of the exponent, so that neither end of the range overflows on the way.
        let half = n >> 1;
        let y = (1.0 + q) * power_of_two(half) * power_of_two(n - half);
        let y = if self > 88.722_83 { f32::INFINITY } else { y };
        if self < EXP_LEAST { 0.0 } else { y }
    }

    /// `2ⁿ·q + (2ⁿ − 1)`: near zero `n` is 0 and `q` is all; elsewhere the two do not cancel.
    #[inline(always)]
    fn exp_m1(self) -> Self {
        // Below this the result is −1.
        const LEAST: f32 = -20.0;
        let x = if self > 88.722_83 { 88.722_83 } else { self };
        let (q, n) = exp_parts(if x < LEAST { LEAST } else { x });
        // Half of it, so that 2¹²⁸ does not overflow on the way.
        let half = power_of_two(n - 1);
        let y = 2.0 * half.mul_add(q, half - 0.5);
        if self > 88.722_83 { f32::INFINITY } else { y }
    }

    /// Splits off the exponent and evaluates Cephes' polynomial on `[√½, √2]`.
    #[inline(always)]
    fn ln(self) -> Self {
        let tiny = self < f32::MIN_POSITIVE;
        let scaled = if tiny { self * 8_388_608.0 } else { self };
        let bits = scaled.to_bits() as i32;
        let mut e = ((bits >> 23) & 0xff) - 126 - if tiny { 23 } else { 0 };
        let m = f32::from_bits(((bits & 0x007f_ffff) | 0x3f00_0000) as u32);
        let small = m < std::f32::consts::FRAC_1_SQRT_2;
        e -= i32::from(small);
        let x = if small { m + m - 1.0 } else { m - 1.0 };
        let z = x * x;
        let mut p = 7.037_683_6e-2f32;
        p = p.mul_add(x, -0.115_146_1);
        p = p.mul_add(x, 0.116_769_98);
        p = p.mul_add(x, -0.124_201_41);
        p = p.mul_add(x, 0.142_493_23);
        p = p.mul_add(x, -0.166_680_57);
        p = p.mul_add(x, 0.200_007_15);
        p = p.mul_add(x, -0.249_999_94);
        p = p.mul_add(x, 0.333_333_3);
        let e = e as f32;
        let y = e.mul_add(-2.121_944_4e-4, p * x * z);
        let y = z.mul_add(-0.5, y);
        let y = e.mul_add(0.693_359_4, x + y);
        let y = if self == f32::INFINITY { self } else { y };
        let y = if self == 0.0 { f32::NEG_INFINITY } else { y };
        // Written so that NaN fails the test too.
        if self >= 0.0 { y } else { f32::NAN }
    }

    /// The logarithm of the rounded sum, and what rounding left out of it. That part counts where the sum is near 1; there,
    /// and at 2, `1 − x/2` is its derivative `1/(1 + x)`.
    #[inline(always)]
    fn ln_1p(self) -> Self {
        let sum = 1.0 + self;
        let left_out = self - (sum - 1.0);
        left_out.mul_add(self.mul_add(-0.5, 1.0), Real::ln(sum))
    }

    /// By way of `e⁻|ˣ|`, which cannot overflow.
    #[inline(always)]
    fn softplus(self) -> Self {
        self.larger(0.0) + Real::ln_1p(exp_of_negative(-self.abs()))
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        self.sqrt()
    }
    #[inline(always)]
    fn abs(self) -> Self {
        self.abs()
    }

    /// By way of `e⁻|ˣ|`, which cannot overflow.
    #[inline(always)]
    fn sigmoid(self) -> Self {
        let e = exp_of_negative(-self.abs());
        let right = reciprocal(1.0 + e);
        if self < 0.0 { e * right } else { right }
    }

    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        self.mul_add(by, plus)
    }

    /// By multiplications, to within a rounding. A processor divides sixteen numbers in the time of thirty of them.
    #[inline(always)]
    fn over(self, by: Self) -> Self {
        // Past this the reciprocal loses digits. What one divides by it vanishes, unless it is not finite.
        const MOST: f32 = 8.507_059e37;
        let by = if by < f32::MIN_POSITIVE { f32::MIN_POSITIVE } else { by };
        // Turning the exponent around gives the reciprocal to one part in 19; what is left of 1 is then cubed and squared.
        let near = f32::from_bits(0x7ef1_27ea_u32.wrapping_sub(by.to_bits()));
        let left = near.mul_add(-by, 1.0);
        let near = near.mul_add(left.mul_add(left, left), near);
        let quotient = self * near;
        let quotient = quotient.mul_add(-by, self).mul_add(near, quotient);
        if by > MOST { self * 0.0 } else { quotient }
    }

    /// A polynomial near zero, where `(1 − e⁻²ˣ) / (1 + e⁻²ˣ)` would cancel.
    #[inline(always)]
    fn tanh(self) -> Self {
        let a = self.abs();
        let z = self * self;
        let mut p = -5.704_988_7e-3f32;
        p = p.mul_add(z, 2.063_908_8e-2);
        p = p.mul_add(z, -5.373_971e-2);
        p = p.mul_add(z, 0.133_314_42);
        p = p.mul_add(z, -0.333_332_8);
        let near = p.mul_add(z * self, self);
        let e = exp_of_negative(-(a + a));
        let far = ((1.0 - e) * reciprocal(1.0 + e)).copysign(self);
        if a < 0.625 { near } else { far }
    }

    /// Abramowitz and Stegun 7.1.26 far from zero, the Taylor series near it.
    #[inline(always)]
    fn erf(self) -> Self {
        let a = self.abs();
        let z = self * self;
        let mut p = -1.0 / 1320.0;
        p = f32::mul_add(p, z, 1.0 / 216.0);
        p = p.mul_add(z, -1.0 / 42.0);
        p = p.mul_add(z, 0.1);
        p = p.mul_add(z, -1.0 / 3.0);
        p = p.mul_add(z, 1.0);
        let near = p * self * std::f32::consts::FRAC_2_SQRT_PI;
        let t = 1.0 / 0.327_591_1f32.mul_add(a, 1.0);
        let mut q = 1.061_405_4f32;
        q = q.mul_add(t, -1.453_152);
        q = q.mul_add(t, 1.421_413_7);
        q = q.mul_add(t, -0.284_496_74);
        q = q.mul_add(t, 0.254_829_6);
        let far = (1.0 - q * t * Real::exp(-z)).copysign(self);
        if a < 0.5 { near } else { far }
    }
    fn sin(self) -> Self {
        f64::from(self).sin() as f32
    }
    fn cos(self) -> Self {
        f64::from(self).cos() as f32
    }
    #[inline(always)]
    fn floor(self) -> Self {
        f32::floor(self)
    }
    fn pow(self, exponent: Self) -> Self {
        f64::from(self).powf(f64::from(exponent)) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(range: std::ops::Range<f64>, f: impl Fn(f32) -> f32, g: impl Fn(f64) -> f64, floor: f64) -> f64 {
        (0..200_000)
            .map(|i| (range.start + (range.end - range.start) * f64::from(i) / 200_000.0) as f32)
            .map(|x| {
                let (got, want) = (f64::from(f(x)), g(f64::from(x)));
                (got - want).abs() / want.abs().max(floor)
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn functions_are_accurate() {
        assert!(worst(-87.0..88.0, Real::exp, f64::exp, 1e-37) < 2e-7);
        assert!(worst(-87.3..0.0, exp_of_negative, f64::exp, 1e-38) < 2e-7);
        // Where numbers lose digits, to within two of the last one.
        assert!(worst(-104.0..-87.0, exp_of_negative, f64::exp, 1e-38) < 3e-7);
        assert!(worst(-104.0..-87.0, Real::exp, f64::exp, 1e-38) < 3e-7);
        for (low, high) in [(-1e-6, 1e-6), (-0.5, 0.5), (-20.0, 0.0), (0.0, 88.0)] {
            assert!(worst(low..high, Real::exp_m1, f64::exp_m1, 1e-30) < 2e-7, "{low}..{high}");
        }
        for high in [1.0, 1e-3, 1e-6, 1e-9, 1e-30] {
            assert!(worst(0.0..high, Real::ln_1p, f64::ln_1p, 1e-37) < 3e-7, "0..{high}");
        }
        assert!(worst(-87.3..40.0, Real::softplus, Real::softplus, 1e-38) < 4e-7);
        assert!(worst(-104.0..-87.0, Real::softplus, Real::softplus, 1e-38) < 4e-7);
        assert!(worst(1e-6..100.0, Real::ln, f64::ln, 1e-3) < 2e-6);
        assert!(worst(-10.0..10.0, Real::tanh, f64::tanh, 1e-30) < 4e-7);
        assert!(worst(-4.0..4.0, Real::erf, Real::erf, 0.05) < 1e-6);
        assert!(worst(-104.0..20.0, Real::sigmoid, Real::sigmoid, 1e-38) < 4e-7);
        assert!(worst(1.0..4.0, |x| 1.0.over(x), |x| 1.0 / x, 1e-3) < 1e-7);
        for power in -120..125 {
            let scale = f64::from(power).exp2();
            assert!(worst(scale..2.0 * scale, |x| 3.0.over(x), |x| 3.0 / x, 1e-37) < 1e-7, "2^{power}");
        }
        assert!(worst(1.0..2.0, reciprocal, |x| 1.0 / x, 1.0) < 1e-7);
        assert!((Real::erf(1.0f64) - 0.842_700_792_949_714_9).abs() < 1e-15);
        assert!((Real::erf(3.0f64) - 0.999_977_909_503_001_4).abs() < 1e-14);
    }

    #[test]
    fn edges_are_right() {
        assert_eq!(Real::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(Real::exp(f32::INFINITY), f32::INFINITY);
        assert_eq!([f32::NEG_INFINITY, -1e30, -104.1, 0.0].map(exp_of_negative), [0.0, 0.0, 0.0, 1.0]);
        assert_eq!([f32::NEG_INFINITY, -1e30, -0.0, f32::INFINITY].map(Real::exp_m1), [-1.0, -1.0, 0.0, f32::INFINITY]);
        assert_eq!([0.0f32, 1e-45, 1e-40].map(Real::ln_1p), [0.0, 1e-45, 1e-40]);
        assert_eq!([f32::NEG_INFINITY, f32::INFINITY].map(Real::softplus), [0.0, f32::INFINITY]);
        assert!(Real::exp_m1(f32::NAN).is_nan() && Real::softplus(f32::NAN).is_nan());
        assert!(Real::exp(f32::NAN).is_nan() && Real::ln(f32::NAN).is_nan() && Real::ln(-1.0f32).is_nan());
        assert_eq!(Real::ln(0.0f32), f32::NEG_INFINITY);
        assert_eq!(Real::ln(f32::INFINITY), f32::INFINITY);
        assert_eq!([f32::INFINITY, f32::NEG_INFINITY, 0.0].map(Real::tanh), [1.0, -1.0, 0.0]);
        assert_eq!([f32::INFINITY, f32::NEG_INFINITY, 0.0].map(Real::sigmoid), [1.0, 0.0, 0.5]);
        assert!(exp_of_negative(f32::NAN).is_nan());
        assert_eq!([2.0f32.over(f32::INFINITY), 0.0f32.over(1e-8), (-3.0f32).over(1e38)], [0.0; 3]);
        assert_eq!([0.0, 1e-45, f32::MIN_POSITIVE].map(|by| 0.0f32.over(by)), [0.0; 3]);
        assert!((1e-3f32.over(f32::MIN_POSITIVE) * f32::MIN_POSITIVE - 1e-3).abs() < 1e-9);
        assert!(
            f32::NAN.over(1.0).is_nan() && 1.0.over(f32::NAN).is_nan() && f32::INFINITY.over(f32::INFINITY).is_nan()
        );
        assert!(Real::tanh(f32::NAN).is_nan() && Real::sigmoid(f32::NAN).is_nan());
        assert!(f32::NAN.larger(1.0).is_nan() && 1.0f32.larger(f32::NAN).is_nan());
    }
}
