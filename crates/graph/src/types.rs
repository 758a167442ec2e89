//! Element types and tensor types. Shapes are static: a graph is built for one batch size.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// What an element is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    F32,
    BF16,
    F16,
    I32,
    I64,
    Bool,
    /// A whole number from 0 to 255.
    U8,
}

impl DType {
    pub const ALL: [DType; 7] = [DType::F32, DType::BF16, DType::F16, DType::I32, DType::I64, DType::Bool, DType::U8];

    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::Bool => "bool",
            DType::U8 => "u8",
        }
    }

    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    pub fn bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::BF16 | DType::F16 => 2,
            DType::I64 => 8,
            DType::Bool | DType::U8 => 1,
        }
    }

    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::BF16 | DType::F16)
    }

    /// Rounds `value` to what this type can hold; the reference executor keeps everything in f64 otherwise.
    pub fn round(self, value: f64) -> f64 {
        match self {
            DType::F32 => value,
            DType::BF16 => half::bf16::from_f64(value).to_f64(),
            DType::F16 => half::f16::from_f64(value).to_f64(),
            // As a conversion in Rust: what is too large becomes the largest, what is too small the smallest, NaN becomes zero.
            DType::I32 => f64::from(value as i32),
            DType::I64 => value as i64 as f64,
            DType::Bool => f64::from(value != 0.0),
            DType::U8 => f64::from(value as u8),
        }
    }
}

/// Dims of one tensor. Kernels keep shapes of this length on the stack: a running step allocates nothing.
pub const DIMS_MAX: usize = 8;

/// Elements of one tensor: 2⁴⁴ of f32 are 64 TiB.
pub const ELEMENTS_MAX: usize = 1 << 44;

/// Sizes of a tensor's dims. Copies share memory: a rewrite copies the types of thousands of values.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Shape(Arc<[usize]>);

impl Deref for Shape {
    type Target = [usize];

    #[inline]
    fn deref(&self) -> &[usize] {
        &self.0
    }
}

impl DerefMut for Shape {
    fn deref_mut(&mut self) -> &mut [usize] {
        Arc::make_mut(&mut self.0)
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<Vec<usize>> for Shape {
    fn from(sizes: Vec<usize>) -> Self {
        Self(sizes.into())
    }
}

impl From<&[usize]> for Shape {
    fn from(sizes: &[usize]) -> Self {
        Self(sizes.into())
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(sizes: [usize; N]) -> Self {
        Self(sizes.into())
    }
}

impl From<&Shape> for Shape {
    fn from(shape: &Shape) -> Self {
        shape.clone()
    }
}

impl FromIterator<usize> for Shape {
    fn from_iter<I: IntoIterator<Item = usize>>(sizes: I) -> Self {
        Self(sizes.into_iter().collect())
    }
}

impl<'s> IntoIterator for &'s Shape {
    type Item = &'s usize;
    type IntoIter = std::slice::Iter<'s, usize>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<T: AsRef<[usize]> + ?Sized> PartialEq<T> for Shape {
    fn eq(&self, other: &T) -> bool {
        **self == *other.as_ref()
    }
}

impl PartialEq<Shape> for [usize] {
    fn eq(&self, other: &Shape) -> bool {
        *self == **other
    }
}

impl PartialEq<Shape> for Vec<usize> {
    fn eq(&self, other: &Shape) -> bool {
        **self == **other
    }
}

/// Element type and shape of one value. `f32[]` is a scalar.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Type {
    pub dtype: DType,
    pub shape: Shape,
}

impl Type {
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Self {
        Self { dtype, shape: shape.into() }
    }

    pub fn f32(shape: impl Into<Shape>) -> Self {
        Self::new(DType::F32, shape)
    }

    pub fn i32(shape: impl Into<Shape>) -> Self {
        Self::new(DType::I32, shape)
    }

    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Of a type that does not [fit](Self::fits), `usize::MAX`.
    pub fn elements(&self) -> usize {
        count(&self.shape)
    }

    pub fn bytes(&self) -> usize {
        self.elements().saturating_mul(self.dtype.bytes())
    }

    /// Whether its bytes can be counted and are fewer than any machine could hold.
    pub fn fits(&self) -> bool {
        let elements = self.shape.iter().try_fold(1usize, |total, size| total.checked_mul((*size).max(1)));
        elements.is_some_and(|elements| elements <= ELEMENTS_MAX)
    }

    /// The size of the last dim; 1 for a scalar.
    pub fn last(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype.name())?;
        for (at, size) in self.shape.iter().enumerate() {
            write!(f, "{}{size}", if at == 0 { "" } else { "," })?;
        }
        write!(f, "]")
    }
}

/// Elements of a shape, or `usize::MAX` if they cannot be counted.
pub fn count(shape: &[usize]) -> usize {
    if shape.contains(&0) { 0 } else { shape.iter().fold(1, |total, size| total.saturating_mul(*size)) }
}

/// Row-major strides, in elements.
pub fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim];
    }
    strides
}

/// The shape two shapes broadcast to, by the usual rule: right-aligned, 1 stretches.
pub fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let dim = |shape: &[usize], at: usize| (at + shape.len()).checked_sub(rank).map_or(1, |at| shape[at]);
    (0..rank)
        .map(|at| match (dim(a, at), dim(b, at)) {
            (x, y) if x == y => Some(x),
            (1, y) => Some(y),
            (x, 1) => Some(x),
            _ => None,
        })
        .collect()
}
