//! Where a step's inputs are written.

use kolo_graph::op::Buffer;
use kolo_graph::{DType, Type};

/// Where a step's inputs are written.
#[derive(Debug)]
pub struct Feed<'a> {
    /// By name; a parameter server has as many as parameters.
    pub(super) inputs: &'a [(String, Buffer)],
}

impl Feed<'_> {
    pub fn names(&self) -> impl Iterator<Item = (&str, &Type)> {
        self.inputs.iter().map(|(name, buffer)| (name.as_str(), &buffer.ty))
    }

    fn place(&self, name: &str) -> Option<&Buffer> {
        let at = self.inputs.binary_search_by(|(key, _)| key.as_str().cmp(name)).ok()?;
        Some(&self.inputs[at].1)
    }

    fn buffer(&self, name: &str, dtype: DType) -> Option<&Buffer> {
        let buffer = self.place(name)?;
        assert_eq!(buffer.ty.dtype, dtype, "input `{name}` is {}", buffer.ty);
        Some(buffer)
    }

    pub fn f32(&mut self, name: &str) -> Option<&mut [f32]> {
        let buffer = self.buffer(name, DType::F32)?;
        // SAFETY: the buffer is the input's own place, borrowed with `self`.
        Some(unsafe { std::slice::from_raw_parts_mut(buffer.data.cast(), buffer.ty.elements()) })
    }

    pub fn i32(&mut self, name: &str) -> Option<&mut [i32]> {
        let buffer = self.buffer(name, DType::I32)?;
        // SAFETY: as above.
        Some(unsafe { std::slice::from_raw_parts_mut(buffer.data.cast(), buffer.ty.elements()) })
    }

    pub fn bytes(&mut self, name: &str) -> Option<&mut [u8]> {
        let buffer = self.place(name)?;
        // SAFETY: as above.
        Some(unsafe { std::slice::from_raw_parts_mut(buffer.data, buffer.ty.bytes()) })
    }
}
