//! ElementType types and reductions.

/// The type of the elements a collective moves or combines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum ElementType {
    F32 = 0,
    F64 = 1,
    Bf16 = 2,
    F16 = 3,
    I32 = 4,
    I64 = 5,
    U8 = 6,
}

impl ElementType {
    pub const ALL: [ElementType; 7] = [
        ElementType::F32,
        ElementType::F64,
        ElementType::Bf16,
        ElementType::F16,
        ElementType::I32,
        ElementType::I64,
        ElementType::U8,
    ];

    pub fn bytes(self) -> usize {
        match self {
            ElementType::F64 | ElementType::I64 => 8,
            ElementType::F32 | ElementType::I32 => 4,
            ElementType::Bf16 | ElementType::F16 => 2,
            ElementType::U8 => 1,
        }
    }

    pub fn name(self) -> &'static str {
        ["f32", "f64", "bf16", "f16", "i32", "i64", "u8"][self as usize]
    }

    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

/// How elements of different ranks become one. `Mean` is the sum divided by the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Reduction {
    Sum = 0,
    Mean = 1,
    Min = 2,
    Max = 3,
    Product = 4,
}

impl Reduction {
    pub const ALL: [Reduction; 5] =
        [Reduction::Sum, Reduction::Mean, Reduction::Min, Reduction::Max, Reduction::Product];

    pub fn name(self) -> &'static str {
        ["sum", "mean", "min", "max", "product"][self as usize]
    }

    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

/// A Rust type that is an [`ElementType`].
///
/// # Safety
/// Every bit pattern is a value, and the size is that of `ELEMENT`.
pub unsafe trait Scalar: Copy + Send + Sync + 'static {
    const ELEMENT: ElementType;
}

macro_rules! scalar {
    ($($ty:ty => $element:ident),+) => {$(
        // SAFETY: plain numbers of the named size.
        unsafe impl Scalar for $ty {
            const ELEMENT: ElementType = ElementType::$element;
        }
    )+};
}
scalar!(f32 => F32, f64 => F64, half::bf16 => Bf16, half::f16 => F16, i32 => I32, i64 => I64, u8 => U8);
