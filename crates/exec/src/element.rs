//! Values as Rust sees them: which Rust type an element type is, slices of any of them, and views that know their shape.

use half::{bf16, f16};
use kolo_graph::cpu::Buffer;
use kolo_graph::{DType, Type};

/// A Rust type that is an element type. There is one for each [`DType`].
pub trait Element: Copy + private::Sealed + 'static {
    const DTYPE: DType;
}

/// An element type of which any bits are a value; all but `bool`.
pub trait Plain: Element {}

mod private {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($t:ty => $dtype:ident),*) => {$(
        impl private::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$dtype;
        }
        impl<'a> From<&'a [$t]> for Values<'a> {
            fn from(values: &'a [$t]) -> Self {
                // SAFETY: elements are plain memory, which is borrowed as long.
                let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) };
                Self { dtype: DType::$dtype, bytes }
            }
        }
        impl<'a, const N: usize> From<&'a [$t; N]> for Values<'a> {
            fn from(values: &'a [$t; N]) -> Self {
                Self::from(&values[..])
            }
        }
        impl<'a> From<&'a Vec<$t>> for Values<'a> {
            fn from(values: &'a Vec<$t>) -> Self {
                Self::from(&values[..])
            }
        }
    )*};
}

elements!(f32 => F32, bf16 => BF16, f16 => F16, i32 => I32, i64 => I64, bool => Bool, u8 => U8);

impl Plain for f32 {}
impl Plain for bf16 {}
impl Plain for f16 {}
impl Plain for i32 {}
impl Plain for i64 {}
impl Plain for u8 {}

/// A slice of any element type.
#[derive(Clone, Copy, Debug)]
pub struct Values<'a> {
    pub(crate) dtype: DType,
    pub(crate) bytes: &'a [u8],
}

impl Values<'_> {
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// Values that do not fit the tensor they are given to or asked from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    #[error("there is no input `{name}`\n  hint: the inputs are {known}")]
    Unknown { name: String, known: String },
    #[error("input `{name}` was not given\n  hint: it is {ty}; give every input")]
    Absent { name: String, ty: Type },
    #[error("`{name}` is {ty}, not {}\n  hint: convert the values to {}", .given.name(), .ty.dtype.name())]
    OtherType { name: String, ty: Type, given: DType },
    #[error("`{name}` is {ty}, which takes {wanted} values, but there are {given}\n  hint: {hint}")]
    OtherLength { name: String, ty: Type, wanted: usize, given: usize, hint: &'static str },
}

/// A tensor's values with their type and shape.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    name: &'a str,
    ty: &'a Type,
    bytes: &'a [u8],
}

impl<'a> View<'a> {
    /// # Safety
    /// The buffer holds its type's bytes, and nothing writes them for as long as the view lives.
    pub(crate) unsafe fn new(name: &'a str, ty: &'a Type, data: *const u8) -> Self {
        // SAFETY: by the contract above.
        Self { name, ty, bytes: unsafe { std::slice::from_raw_parts(data, ty.bytes()) } }
    }

    pub fn ty(&self) -> &'a Type {
        self.ty
    }

    pub fn shape(&self) -> &'a [usize] {
        &self.ty.shape
    }

    pub fn dtype(&self) -> DType {
        self.ty.dtype
    }

    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The values in row-major order, if they are of this type.
    pub fn values<T: Plain>(&self) -> Result<&'a [T], ValueError> {
        if T::DTYPE != self.ty.dtype {
            return Err(ValueError::OtherType { name: self.name.into(), ty: self.ty.clone(), given: T::DTYPE });
        }
        // SAFETY: the executor lays out that many elements there, aligned, and any bits are a `T`.
        Ok(unsafe { std::slice::from_raw_parts(self.bytes.as_ptr().cast(), self.ty.elements()) })
    }

    /// The values in row-major order as f64, whatever their type.
    pub fn to_f64(&self) -> Vec<f64> {
        let buffer = Buffer { data: self.bytes.as_ptr().cast_mut(), ty: self.ty.clone() };
        (0..self.ty.elements()).map(|at| kolo_ops::cast::read(&buffer, at)).collect()
    }

    /// The element at these indices as f64, if there is one.
    pub fn at(&self, indices: &[usize]) -> Option<f64> {
        let inside = indices.len() == self.ty.rank() && indices.iter().zip(&self.ty.shape).all(|(at, size)| at < size);
        let offset = indices.iter().zip(&self.ty.shape).fold(0, |offset, (at, size)| offset * size + at);
        let buffer = Buffer { data: self.bytes.as_ptr().cast_mut(), ty: self.ty.clone() };
        inside.then(|| kolo_ops::cast::read(&buffer, offset))
    }
}
