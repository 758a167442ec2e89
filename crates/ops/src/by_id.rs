//! Sums by index on the GPU, as calls: rows by the id of each, and columns by an index of each element. Their order is that of the
//! source's positions, as on the CPU.

use crate::device::{THREADS, grid, input, long, output};
use crate::movement::around;
use kolo_graph::cuda::{CudaCalls, CudaCx, CudaSource, Launch};

const SOURCE: &str = include_str!("by_id.cu");

/// Positions that are ranked together.
const CHUNK: usize = 1024;

/// Input `source` added along `dim` at the places in input `index`, to input `base` or to zeros: the first output.
pub(crate) fn column_sums(
    cx: &CudaCx<'_>,
    (base, index, source): (Option<usize>, usize, usize),
    dim: usize,
) -> CudaCalls {
    let (from, to) = (&cx.inputs[source], &cx.outputs[0]);
    let (outer, inner) = around(&to.shape, dim);
    let mut text = CudaSource::new(SOURCE).define_type("SOURCE", from.dtype).define_type("O0", to.dtype);
    if let Some(base) = base {
        text = text.define_type("BASE", cx.inputs[base].dtype);
    }
    let columns = outer * inner;
    let sizes = [columns, to.shape[dim], from.shape[dim], inner].map(long);
    let operands = base.into_iter().chain([index, source]).map(input).chain([output(0)]);
    let args = operands.chain(sizes).collect::<Vec<_>>();
    Launch::new(text, "add_columns", grid(columns, THREADS), THREADS, args).into()
}

/// Rows of input `values` added up by the id of each in input `ids`, `rows` of them counted from `first`: the first output.
pub(crate) fn row_sums(cx: &CudaCx<'_>, (values, ids): (usize, usize), (first, rows): (usize, usize)) -> CudaCalls {
    let (n, to) = (cx.inputs[ids].elements(), &cx.outputs[0]);
    let (width, chunks) = (to.elements() / rows.max(1), n.div_ceil(CHUNK).max(1));
    let pack = if width.is_multiple_of(4) { 4 } else { 1 };
    let source = CudaSource::new(SOURCE).define_type("VALUES", cx.inputs[values].dtype).define_type("O0", to.dtype);
    let source = source.define("PACK", pack);
    let mut calls = CudaCalls::new();
    let [counts, taken, starts, totals, ranks, order] =
        [chunks * rows, 1, rows, rows, n.max(1), n.max(1)].map(|count| calls.scratch(count * size_of::<i32>()));
    // What is counted and the end of the last run start as zeros; they lie one after the other.
    calls.zero(counts, taken.offset + size_of::<i32>() - counts.offset);
    let ids = input(ids);
    if n > 0 {
        let sizes = [n, first, rows].map(long);
        let args = [&[ids, ranks.into(), counts.into()], &sizes[..]].concat();
        calls.launch(Launch::new(source.clone(), "rank_ids", [chunks, 1, 1], CHUNK, args));
    }
    let places = [counts.into(), starts.into(), totals.into(), taken.into(), long(rows), long(chunks)];
    calls.launch(Launch::new(source.clone(), "reserve_runs", grid(rows, THREADS), THREADS, places));
    if n > 0 {
        let places = [ids, ranks.into(), counts.into(), starts.into(), order.into(), long(n), long(first), long(rows)];
        calls.launch(Launch::new(source.clone(), "place_positions", grid(n, THREADS), THREADS, places));
    }
    let packs = to.elements() / pack;
    let args = [input(values), order.into(), starts.into(), totals.into(), output(0), long(packs), long(width)];
    calls.launch(Launch::new(source, "add_rows", grid(packs, THREADS), THREADS, args));
    calls
}
