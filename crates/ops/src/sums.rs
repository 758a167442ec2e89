//! Sums on the GPU, as calls: over rows, over columns, over both ends of three dims. Long ones take two launches or more, which
//! depends on the number of terms alone, as their order does.

use crate::device::{self, THREADS, WARP, converting, grid, long};
use kolo_graph::DType;
use kolo_graph::cuda::{CudaArg, CudaCalls, CudaPlace, Launch};

const SOURCE: &str = include_str!("reduce.cu");

/// Terms that one block adds up, at most, and rows of a chunk of columns.
const CHUNK: usize = 16 * 1024;
const ROWS: usize = 256;
/// Terms that one warp adds up, at most.
const SHORT: usize = 1024;

/// Elements of a type at a place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Values {
    pub place: CudaPlace,
    pub dtype: DType,
}

impl Values {
    pub fn new(place: CudaPlace, dtype: DType) -> Self {
        Self { place, dtype }
    }

    pub fn f32(place: CudaPlace) -> Self {
        Self::new(place, DType::F32)
    }
}

fn launch(function: &'static str, (from, to): (Values, Values), blocks: usize, sizes: &[usize]) -> Launch {
    let source = converting(SOURCE, from.dtype, to.dtype);
    let args = [CudaArg::from(from.place), to.place.into()].into_iter().chain(sizes.iter().map(|size| long(*size)));
    Launch::new(source, function, [blocks, 1, 1], THREADS, args.collect::<Vec<_>>())
}

/// Where sums of chunks go: to the end if there is one chunk, else to scratch.
fn partial(calls: &mut CudaCalls, chunks: usize, count: usize, to: Values) -> Values {
    if chunks == 1 { to } else { Values::f32(calls.scratch(count * chunks * size_of::<f32>())) }
}

/// `to[row] = Σ from[row, at]` over `inner` elements.
pub(crate) fn rows(calls: &mut CudaCalls, from: Values, [rows, inner]: [usize; 2], to: Values) {
    if inner <= SHORT {
        let blocks = grid(rows, THREADS / WARP)[0];
        return calls.launch(launch("sum_short_rows", (from, to), blocks, &[rows, inner]));
    }
    let chunks = inner.div_ceil(CHUNK);
    let parts = partial(calls, chunks, rows, to);
    calls.launch(launch("sum_long_rows", (from, parts), rows * chunks, &[inner, chunks, CHUNK]));
    if chunks > 1 {
        self::rows(calls, parts, [rows, chunks], to);
    }
}

/// `to[outer, column] = Σ from[outer, row, column]` over the rows.
pub(crate) fn columns(calls: &mut CudaCalls, from: Values, [outer, rows, inner]: [usize; 3], to: Values) {
    // Threads take several columns where there are enough of them.
    let pack = device::pack(inner, from.dtype);
    let pack = if inner >= WARP * pack && from.place.offset.is_multiple_of(16) { pack } else { 1 };
    let (chunks, strips) = (rows.div_ceil(ROWS).max(1), inner.div_ceil(WARP * pack));
    let parts = partial(calls, chunks, outer * inner, to);
    let sizes = [rows, inner, chunks, ROWS, strips];
    let mut launch = launch("sum_columns", (from, parts), outer * chunks * strips, &sizes);
    launch.source = launch.source.define("PACK", pack);
    calls.launch(launch);
    if chunks > 1 {
        columns(calls, parts, [outer, chunks, inner], to);
    }
}

/// `to[row] = Σ from[outer, row, at]` over `outer` and `inner`.
pub(crate) fn middle(calls: &mut CudaCalls, from: Values, [outer, rows, inner]: [usize; 3], to: Values) {
    let slices = (CHUNK / inner.max(1)).max(1);
    let chunks = outer.div_ceil(slices).max(1);
    let parts = partial(calls, chunks, rows, to);
    let sizes = [outer, rows, inner, chunks, slices];
    calls.launch(launch("sum_middle", (from, parts), rows * chunks, &sizes));
    if chunks > 1 {
        self::rows(calls, parts, [rows, chunks], to);
    }
}

/// Any other pattern: kept dims and summed dims, the outermost first, each a size and its stride in `from`.
pub(crate) fn any(calls: &mut CudaCalls, from: Values, kept: &[[usize; 2]], summed: &[[usize; 2]], to: Values) {
    let count = |dims: &[[usize; 2]]| dims.iter().map(|[size, _]| size).product::<usize>();
    let eight = |dims: &[[usize; 2]], which: usize| {
        let own = dims.iter().rev().map(|dim| dim[which]).collect::<Vec<_>>();
        own.into_iter().chain(std::iter::repeat(usize::from(which == 0))).take(8).collect::<Vec<_>>()
    };
    let outputs = count(kept);
    let sizes = [vec![outputs, count(summed)], eight(kept, 0), eight(kept, 1), eight(summed, 0), eight(summed, 1)];
    calls.launch(launch("sum_any", (from, to), grid(outputs, THREADS)[0], &sizes.concat()));
}
