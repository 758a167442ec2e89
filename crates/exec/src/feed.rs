//! Where a step's inputs are written.

use crate::element::{Element, Plain, ValueError, Values};
use kolo_graph::cpu::Buffer;
use kolo_graph::{DType, Type};

/// Where a step's inputs are written.
#[derive(Debug)]
pub struct Feed<'a> {
    /// By name; a parameter server has as many as parameters.
    inputs: &'a [(String, Buffer)],
    /// What they hold, as whoever wrote them called it; 0 if nobody said.
    content: u64,
    is_written: bool,
}

impl<'a> Feed<'a> {
    pub(crate) fn new(inputs: &'a [(String, Buffer)], content: u64) -> Self {
        Self { inputs, content, is_written: false }
    }

    /// Whether the inputs still hold what was called `content`; then nothing need be written.
    pub fn holds(&self, content: u64) -> bool {
        content != 0 && self.content == content
    }

    /// Calls what the inputs hold now `content`, which is not 0: until somebody writes there again, [`Feed::holds`] knows it.
    pub fn call(&mut self, content: u64) {
        self.content = content;
    }

    pub(crate) fn content(&self) -> u64 {
        self.content
    }

    pub(crate) fn is_written(&self) -> bool {
        self.is_written
    }

    fn write(&mut self) {
        (self.content, self.is_written) = (0, true);
    }
}

impl Feed<'_> {
    pub fn names(&self) -> impl Iterator<Item = (&str, &Type)> {
        self.inputs.iter().map(|(name, buffer)| (name.as_str(), &buffer.ty))
    }

    fn find(&self, name: &str) -> Option<&Buffer> {
        let at = self.inputs.binary_search_by(|(key, _)| key.as_str().cmp(name)).ok()?;
        Some(&self.inputs[at].1)
    }

    fn typed(&self, name: &str, dtype: DType) -> Result<&Buffer, ValueError> {
        let unknown = || {
            let known: Vec<String> = self.names().map(|(name, ty)| format!("`{name}` ({ty})")).collect();
            ValueError::Unknown { name: name.into(), known: known.join(", ") }
        };
        let buffer = self.find(name).ok_or_else(unknown)?;
        match buffer.ty.dtype == dtype {
            true => Ok(buffer),
            false => Err(ValueError::OtherType { name: name.into(), ty: buffer.ty.clone(), given: dtype }),
        }
    }

    /// The place of an input, to be written in row-major order. For bools, which not every byte is, see [`Feed::set`].
    pub fn slice<T: Plain>(&mut self, name: &str) -> Result<&mut [T], ValueError> {
        self.write();
        let buffer = self.typed(name, T::DTYPE)?;
        // SAFETY: the buffer is the input's own place, borrowed with `self`, and any bits are a `T`.
        Ok(unsafe { std::slice::from_raw_parts_mut(buffer.data.cast(), buffer.ty.elements()) })
    }

    /// Writes an input, in row-major order. Type and length must be the input's.
    pub fn set<'v, T: Element>(&mut self, name: &str, values: &'v [T]) -> Result<(), ValueError>
    where
        Values<'v>: From<&'v [T]>,
    {
        self.set_values(name, Values::from(values))
    }

    pub(crate) fn set_values(&mut self, name: &str, values: Values<'_>) -> Result<(), ValueError> {
        self.write();
        let buffer = self.typed(name, values.dtype())?;
        let (wanted, given) = (buffer.ty.elements(), values.len());
        if wanted != given {
            let (name, ty) = (name.into(), buffer.ty.clone());
            let hint = "its shape was fixed when the graph was built";
            return Err(ValueError::OtherLength { name, ty, wanted, given, hint });
        }
        // SAFETY: both hold that many bytes; the place is the input's own, borrowed with `self`.
        unsafe { std::ptr::copy_nonoverlapping(values.bytes.as_ptr(), buffer.data, values.bytes.len()) };
        Ok(())
    }

    /// The place of an f32 input, if there is one of this name.
    pub fn f32(&mut self, name: &str) -> Option<&mut [f32]> {
        self.named(name)
    }

    /// The place of an i32 input, if there is one of this name.
    pub fn i32(&mut self, name: &str) -> Option<&mut [i32]> {
        self.named(name)
    }

    /// An input of another type is a mistake in the program.
    fn named<T: Plain>(&mut self, name: &str) -> Option<&mut [T]> {
        self.find(name)?;
        Some(self.slice(name).unwrap_or_else(|error| panic!("{error}")))
    }

    pub fn bytes(&mut self, name: &str) -> Option<&mut [u8]> {
        self.write();
        let buffer = self.find(name)?;
        // SAFETY: as above.
        Some(unsafe { std::slice::from_raw_parts_mut(buffer.data, buffer.ty.bytes()) })
    }
}
