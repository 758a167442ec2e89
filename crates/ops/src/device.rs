//! What the GPU sides of ops share: sources with their element types, launches over elements or rows, and sizes as arguments.

use kolo_graph::cuda::{CudaArg, CudaCx, CudaPlace, CudaSource};
use kolo_graph::{DType, Type};

/// Threads of a block where nothing asks for another number.
pub(crate) const THREADS: usize = 256;

/// Threads that run in step.
pub(crate) const WARP: usize = 32;

const INPUTS: [&str; 8] = ["I0", "I1", "I2", "I3", "I4", "I5", "I6", "I7"];
const OUTPUTS: [&str; 5] = ["O0", "O1", "O2", "O3", "O4"];

/// A source in which `I0`, `I1`, … are the element types of the inputs and `O0`, … those of the outputs.
pub(crate) fn typed(text: &'static str, cx: &CudaCx<'_>) -> CudaSource {
    let named = |source: CudaSource, (name, ty): (&&'static str, &Type)| source.define_type(name, ty.dtype);
    let source = INPUTS.iter().zip(cx.inputs).fold(CudaSource::new(text), named);
    OUTPUTS.iter().zip(cx.outputs).fold(source, named)
}

/// A source that reads elements of type `FROM` and writes those of type `TO`.
pub(crate) fn converting(text: &'static str, from: DType, to: DType) -> CudaSource {
    CudaSource::new(text).define_type("FROM", from).define_type("TO", to)
}

pub(crate) fn input(at: usize) -> CudaArg {
    CudaPlace::input(at).into()
}

pub(crate) fn output(at: usize) -> CudaArg {
    CudaPlace::output(at).into()
}

/// A size as `long long`.
pub(crate) fn long(size: usize) -> CudaArg {
    CudaArg::I64(size as i64)
}

/// A size as `int`. Sizes that could be larger go as [`long`].
pub(crate) fn int(size: usize) -> CudaArg {
    CudaArg::I32(i32::try_from(size).expect("a size below 2³¹"))
}

/// A truth value as `int`.
pub(crate) fn flag(holds: bool) -> CudaArg {
    CudaArg::I32(i32::from(holds))
}

/// A grid of blocks along x alone, of which each does so many of the units.
pub(crate) fn grid(units: usize, per_block: usize) -> [usize; 3] {
    [units.div_ceil(per_block).max(1), 1, 1]
}

/// A row of so many elements goes to a warp if it is short, else to a block of threads.
pub(crate) fn row_threads(width: usize) -> usize {
    match width {
        0..=1024 => WARP,
        1025..=8192 => THREADS,
        _ => 1024,
    }
}

/// The grid and the threads of a block if every row has so many threads.
pub(crate) fn row_grid(rows: usize, threads: usize) -> ([usize; 3], usize) {
    let per_block = if threads == WARP { THREADS / WARP } else { 1 };
    (grid(rows, per_block), threads * per_block)
}

/// The elements that one access of 16 bytes takes, if rows of so many are made of such; else one.
pub(crate) fn pack(width: usize, dtype: DType) -> usize {
    let elements = 16 / dtype.bytes();
    if width.is_multiple_of(elements) { elements } else { 1 }
}
