//! A small NumPy array as a member of a sample: numbers in C order, little-endian. Objects are never unpickled.

use crate::arrays::Element;
use crate::formats::npy::header::{self, Header};

/// An array in an `.npy` file.
#[derive(Debug, PartialEq)]
pub(super) struct Array<'b> {
    element: Element,
    pub shape: Vec<usize>,
    bytes: &'b [u8],
}

impl<'b> Array<'b> {
    pub fn parse(file: &'b [u8]) -> Result<Self, String> {
        let (header, bytes) = header::split(file).map_err(|wrong| format!("the array: {}", wrong.message))?;
        let Header { element, big_endian, shape } = header;
        if big_endian {
            return Err("the array has elements other than plain little-endian numbers".into());
        }
        let count = shape.iter().try_fold(element.bytes() as usize, |product, size| product.checked_mul(*size));
        if count != Some(bytes.len()) {
            return Err(format!("the array says it has the shape {shape:?}, but holds {} bytes", bytes.len()));
        }
        Ok(Self { element, shape, bytes })
    }

    pub fn is_float(&self) -> bool {
        self.element.is_real()
    }

    /// The elements as f32.
    pub fn reals(&self, out: &mut Vec<f32>) -> Result<(), String> {
        if self.is_float() {
            return self.element.reals(self.bytes, out).map_err(|(_, value)| format!("the array has {value}"));
        }
        let mut whole = Vec::new();
        self.ints(&mut whole)?;
        out.extend(whole.iter().map(|value| *value as f32));
        Ok(())
    }

    /// The elements of an array of whole numbers.
    pub fn ints(&self, out: &mut Vec<i64>) -> Result<(), String> {
        self.element.ints(self.bytes, out).map_err(|(_, value)| format!("the array has {value}"))
    }
}
