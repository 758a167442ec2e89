//! Elements as they are stored, and the numbers in which they are combined.

/// Elements handled at once: loads of a chunk come before its store, which allows any operand to be the target. Few
/// stay in registers.
const LANES: usize = 32;
/// For elements that are widened: a loop long enough that the compiler vectorises it instead of unrolling it.
const LANES_WIDENED: usize = 256;

/// An element as stored, and the number in which it is combined.
pub(crate) trait Number: Copy {
    type Wide: Arithmetic;
    type Chunk: Copy + AsRef<[Self]> + AsMut<[Self]>;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
}

pub(crate) trait Arithmetic: Copy {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
}

macro_rules! plain {
    ($($ty:ty),+) => {$(
        impl Number for $ty {
            type Wide = $ty;
            type Chunk = [$ty; LANES];
            #[inline(always)]
            fn widen(self) -> $ty {
                self
            }
            #[inline(always)]
            fn narrow(wide: $ty) -> $ty {
                wide
            }
        }
    )+};
}
plain!(f32, f64, i32, i64, u8);

macro_rules! float {
    ($($ty:ty),+) => {$(
        impl Arithmetic for $ty {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                if self < other || self.is_nan() { self } else { other }
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if self > other || self.is_nan() { self } else { other }
            }
        }
    )+};
}
float!(f32, f64);

macro_rules! integer {
    ($($ty:ty),+) => {$(
        impl Arithmetic for $ty {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                if self < other { self } else { other }
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if self > other { self } else { other }
            }
        }
    )+};
}
integer!(i32, i64, u8);

#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Bf16(pub u16);

impl Number for Bf16 {
    type Wide = f32;
    type Chunk = [Self; LANES_WIDENED];

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        let bits = wide.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet = bits >> 16 | 0x40;
        Self(if wide.is_nan() { quiet } else { rounded } as u16)
    }
}

/// Half precision by integer arithmetic without branches, which vectorises on every machine to the same bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct F16(pub u16);

impl Number for F16 {
    type Wide = f32;
    type Chunk = [Self; LANES_WIDENED];

    #[inline(always)]
    fn widen(self) -> f32 {
        let magnitude = u32::from(self.0 & 0x7fff) << 13;
        // The exponent bias differs by 112. A subnormal half is the difference of two normal numbers: arithmetic on
        // subnormal ones would be a hundred times slower.
        let normal = magnitude + (112 << 23);
        let subnormal = (f32::from_bits(magnitude + (113 << 23)) - f32::from_bits(113 << 23)).to_bits();
        let finite = if magnitude < 0x400 << 13 { subnormal } else { normal };
        let bits = if magnitude < 0x7c00 << 13 { finite } else { magnitude | 0x7f80_0000 };
        f32::from_bits(bits | u32::from(self.0 & 0x8000) << 16)
    }

    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        let bits = wide.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        // Rounds to even; what rounds up to 65536 carries into infinity.
        let normal = magnitude.wrapping_add(0xc800_0fff + (magnitude >> 13 & 1)) >> 13;
        // Adding one half moves the last bit of a subnormal half to the last bit of the sum.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
        let large = if magnitude > 0x7f80_0000 { 0x7e00 | magnitude >> 13 & 0x3ff } else { 0x7c00 };
        let small = if magnitude < 0x3880_0000 { subnormal } else { normal };
        let half = if magnitude >= 0x4780_0000 { large } else { small };
        Self((half | bits >> 16 & 0x8000) as u16)
    }
}
