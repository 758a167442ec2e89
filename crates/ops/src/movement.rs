//! What the ops that only move elements share: element types by width, copies of rows, and the names of axes.
//!
//! Moving does not look inside an element, so one kernel per width (1, 2, 4 or 8 bytes) serves every dtype.

use crate::tiles::DIMS_MAX;
use kolo_graph::cpu::Buffer;
use kolo_graph::{CpuCx, DType, Team, Type};

/// Bytes one task moves; less is not worth a second thread.
pub const BYTES_PER_TASK: usize = 64 * 1024;
/// Elements one task computes on; less is not worth a second thread.
pub const ELEMENTS_PER_TASK: usize = 16 * 1024;

/// An unsigned integer as wide as an element.
pub trait Element: Copy + Send + Sync + 'static {
    fn of(bits: u64) -> Self;
}

macro_rules! element {
    ($($t:ty),*) => {$(impl Element for $t {
        fn of(bits: u64) -> Self {
            bits as $t
        }
    })*};
}

element!(u8, u16, u32, u64);

/// Calls `f::<T>(…)` with the element type that is as wide as `dtype`.
macro_rules! by_width {
    ($dtype:expr, $f:ident($($arg:expr),* $(,)?)) => {
        match $dtype.bytes() {
            1 => $f::<u8>($($arg),*),
            2 => $f::<u16>($($arg),*),
            4 => $f::<u32>($($arg),*),
            _ => $f::<u64>($($arg),*),
        }
    };
}
pub(crate) use by_width;

/// The bits of `value` as an element of `dtype`; NaN becomes zero where there is no NaN.
pub fn bits(dtype: DType, value: f32) -> u64 {
    match dtype {
        DType::F32 => u64::from(value.to_bits()),
        DType::BF16 => u64::from(half::bf16::from_f32(value).to_bits()),
        DType::F16 => u64::from(half::f16::from_f32(value).to_bits()),
        DType::I32 => u64::from(value as i32 as u32),
        DType::I64 => value as i64 as u64,
        DType::Bool => u64::from(value != 0.0 && !value.is_nan()),
        DType::U8 => u64::from(value as u8),
    }
}

/// What a read outside the tensor gives: NaN, or zero in types without one.
pub fn missing(dtype: DType) -> f32 {
    if dtype.is_float() { f32::NAN } else { 0.0 }
}

/// `index` as a position in `0..size`, if it is one.
#[inline(always)]
pub fn within(index: i32, size: usize) -> Option<usize> {
    usize::try_from(index).ok().filter(|index| *index < size)
}

/// The reference's `within`: its indices are f64.
pub fn within_f64(index: f64, size: usize) -> Option<usize> {
    within(index as i32, size)
}

/// An input's elements as bits.
pub fn input<'a, T: Element>(cx: &CpuCx<'a>, at: usize) -> &'a [T] {
    let buffer = &cx.inputs[at];
    assert_eq!(buffer.ty.dtype.bytes(), size_of::<T>(), "the element type is chosen by width");
    // SAFETY: the executor lays out that many elements there, and any bits are a valid `T`.
    unsafe { std::slice::from_raw_parts(buffer.data.cast(), buffer.ty.elements()) }
}

/// The first output, written in disjoint parts by several threads.
#[derive(Clone, Copy, Debug)]
pub struct Target<T>(*mut T);
// SAFETY: every user writes disjoint parts.
unsafe impl<T> Send for Target<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Target<T> {}

impl<T: Element> Target<T> {
    pub fn of(cx: &CpuCx<'_>) -> Self {
        assert_eq!(cx.outputs[0].ty.dtype.bytes(), size_of::<T>(), "the element type is chosen by width");
        Self(cx.outputs[0].data.cast())
    }
    pub fn get(&self) -> *mut T {
        self.0
    }
    /// # Safety
    /// `start..start + len` is inside the buffer and no other thread touches it meanwhile.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice<'a>(&self, start: usize, len: usize) -> &'a mut [T] {
        // SAFETY: by the contract above.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

/// Copies `count` rows of `bytes`; `place` gives a row's byte offsets in the source and in the target.
///
/// # Safety
/// No two rows overlap in the target. That they lie inside their buffers is checked here.
pub unsafe fn copy_rows(
    team: &Team,
    (source, target): (&Buffer, &Buffer),
    (count, bytes): (usize, usize),
    place: impl Fn(usize) -> (usize, usize) + Sync,
) {
    let (source_bytes, target_bytes) = (source.ty.bytes(), target.ty.bytes());
    // A long row is cut, so that one huge row keeps every thread busy.
    let piece = bytes.clamp(1, BYTES_PER_TASK);
    let pieces = bytes.div_ceil(piece);
    team.chunks(count * pieces, BYTES_PER_TASK / piece, |range, _| {
        for at in range {
            let (row, start) = (at / pieces, at % pieces * piece);
            let len = piece.min(bytes - start);
            let (from, to) = place(row);
            assert!(from + start + len <= source_bytes && to + start + len <= target_bytes, "a row outside its buffer");
            // SAFETY: inside both buffers by the check above; the target's rows are disjoint by contract, and a node's
            // output never overlaps its input unless the op says so.
            unsafe {
                std::ptr::copy_nonoverlapping(source.data.add(from + start), target.data.add(to + start), len);
            }
        }
    });
}

/// Elements before and after `dim`: the tensor as `outer × size × inner`.
pub fn around(shape: &[usize], dim: usize) -> (usize, usize) {
    (shape[..dim].iter().product(), shape[dim + 1..].iter().product())
}

/// Axis names `d0 d1 …`.
pub fn axes(rank: usize) -> Vec<String> {
    (0..rank).map(|dim| format!("d{dim}")).collect()
}

/// The same with another name for `dim`.
pub fn axes_but(rank: usize, dim: usize, name: &str) -> Vec<String> {
    let mut axes = axes(rank);
    if let Some(axis) = axes.get_mut(dim) {
        *axis = name.into();
    }
    axes
}

pub fn check_dim(ty: &Type, dim: usize) -> Result<(), String> {
    if dim < ty.rank() { Ok(()) } else { Err(format!("there is no dim {dim} in {ty}; count dims from 0")) }
}

pub fn check_rank(ty: &Type) -> Result<(), String> {
    if ty.rank() <= DIMS_MAX { Ok(()) } else { Err(format!("{ty} has more than {DIMS_MAX} dims; merge some")) }
}

pub fn check_ids(ty: &Type) -> Result<(), String> {
    if ty.dtype == DType::I32 {
        Ok(())
    } else {
        Err(format!("indices must be i32, not {}; cast them", ty.dtype.name()))
    }
}

pub fn check_f32(ty: &Type) -> Result<(), String> {
    if ty.dtype == DType::F32 { Ok(()) } else { Err(format!("works on f32, not on {}; cast it", ty.dtype.name())) }
}
