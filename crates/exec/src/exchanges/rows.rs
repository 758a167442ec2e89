//! Copies around an exchange whose tensors do not lie as they travel.

use kolo_graph::cpu::Buffer;

/// Rows of bytes to be copied.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    pub from: *const u8,
    pub to: *mut u8,
    pub rows: usize,
    /// Of one row.
    pub bytes: usize,
    /// From a row to the next.
    pub from_stride: usize,
    pub to_stride: usize,
}

// SAFETY: addresses inside memory that the session and the staging own.
unsafe impl Send for Rows {}
// SAFETY: as above.
unsafe impl Sync for Rows {}

impl Rows {
    /// A whole tensor.
    pub(super) fn all(from: &Buffer, to: &Buffer) -> Self {
        Self { from: from.data, to: to.data, rows: 1, bytes: from.ty.bytes(), from_stride: 0, to_stride: 0 }
    }

    /// The way back.
    pub(super) fn reversed(self) -> Self {
        let Self { from, to, rows, bytes, from_stride, to_stride } = self;
        Self { from: to, to: from.cast_mut(), rows, bytes, from_stride: to_stride, to_stride: from_stride }
    }

    /// Copies them in memory of the host.
    pub(super) fn copy(&self) {
        for row in 0..self.rows {
            // SAFETY: both places have room for all rows, and the memories are distinct.
            unsafe {
                let (from, to) = (self.from.add(row * self.from_stride), self.to.add(row * self.to_stride));
                std::ptr::copy_nonoverlapping(from, to, self.bytes);
            }
        }
    }
}
