//! Moving elements on the GPU, as calls. A move is dims with a step in the source and one in the target; as many neighbours move
//! together as 16 bytes hold.

use crate::device::{THREADS, grid, input, int, long, output};
use crate::movement::around;
use kolo_graph::cuda::{CudaArg, CudaCalls, CudaCx, CudaPlace, CudaSource, Launch};
use kolo_graph::types::DIMS_MAX;

const MOVES: &str = include_str!("movement.cu");
/// Kernels that make elements of numbers, so that an element is one of at most eight bytes.
pub(crate) const PICKS: &str = include_str!("pick.cu");

/// Bytes that move at once, at most.
const BYTES_MAX: usize = 16;
/// Side of a square of a transpose.
const TILE: usize = 32;

/// One dim of a move: its size and a step along it in the source and in the target, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    pub size: usize,
    pub from: usize,
    pub to: usize,
}

/// A source for elements of so many bytes.
pub(crate) fn source(text: &'static str, bytes: usize) -> CudaSource {
    let element = match bytes {
        1 => "unsigned char",
        2 => "unsigned short",
        4 => "unsigned int",
        8 => "unsigned long long",
        _ => "uint4",
    };
    CudaSource::new(text).define("ELEMENT", element)
}

/// The sizes (or steps) as the arguments of eight dims, the innermost first; `rest` fills what is left.
fn eight(sizes: impl DoubleEndedIterator<Item = usize>, rest: usize) -> Vec<CudaArg> {
    sizes.rev().chain(std::iter::repeat(rest)).take(DIMS_MAX).map(long).collect()
}

fn walk_args(walks: &[Walk]) -> Vec<CudaArg> {
    let (sizes, from, to) =
        (walks.iter().map(|walk| walk.size), walks.iter().map(|walk| walk.from), walks.iter().map(|walk| walk.to));
    [eight(sizes, 1), eight(from, 0), eight(to, 0)].concat()
}

/// Dims without those of size one, neighbours that lie alike merged.
fn merged(walks: &[Walk]) -> Vec<Walk> {
    let mut merged: Vec<Walk> = Vec::new();
    for walk in walks.iter().filter(|walk| walk.size != 1) {
        match merged.last_mut() {
            Some(outer) if outer.from == walk.size * walk.from && outer.to == walk.size * walk.to => {
                *outer = Walk { size: outer.size * walk.size, ..*walk };
            }
            _ => merged.push(*walk),
        }
    }
    merged
}

/// Moves elements of `bytes`: along `walks`, the outermost first, from these places of source and target.
pub(crate) fn elements(
    calls: &mut CudaCalls,
    bytes: usize,
    walks: &[Walk],
    (from, from_start): (CudaPlace, usize),
    (to, to_start): (CudaPlace, usize),
) {
    let mut walks = merged(walks);
    if walks.iter().any(|walk| walk.size == 0) {
        return;
    }
    if let Some(tiles) = transposed(bytes, &walks, (from, from_start), (to, to_start)) {
        return calls.launch(tiles);
    }
    if let Some(runs) = in_runs(bytes, &walks, (from, from_start), (to, to_start)) {
        return calls.launch(runs);
    }
    let (mut bytes, mut starts) = (bytes, [from_start, to_start]);
    // Two neighbours become one element as long as everything stays whole.
    while bytes < BYTES_MAX && halves(&walks, starts) {
        bytes *= 2;
        starts = starts.map(|start| start / 2);
        let last = walks.len() - 1;
        walks[last].size /= 2;
        walks[..last].iter_mut().for_each(|walk| (walk.from, walk.to) = (walk.from / 2, walk.to / 2));
    }
    let count: usize = walks.iter().map(|walk| walk.size).product();
    let sizes = [long(count), int(walks.len()), long(starts[0]), long(starts[1])];
    let args = [&[from.into(), to.into()], &sizes[..], &walk_args(&walks)].concat();
    calls.launch(Launch::new(source(MOVES, bytes), "move_elements", grid(count, THREADS), THREADS, args));
}

/// Whether pairs of neighbours lie together in the source and in the target.
fn halves(walks: &[Walk], starts: [usize; 2]) -> bool {
    let even = |number: usize| number.is_multiple_of(2);
    let Some((last, outer)) = walks.split_last() else { return false };
    let runs = last.from == 1 && last.to == 1 && even(last.size);
    runs && starts.into_iter().all(even) && outer.iter().all(|walk| even(walk.from) && even(walk.to))
}

/// A move whose innermost dim lies across in the source: squares of it are turned in shared memory.
fn transposed(
    bytes: usize,
    walks: &[Walk],
    (from, from_start): (CudaPlace, usize),
    (to, to_start): (CudaPlace, usize),
) -> Option<Launch> {
    let (last, outer) = walks.split_last()?;
    let inner = outer.iter().position(|walk| walk.from == 1)?;
    let enough = last.size >= TILE / 2 && outer[inner].size >= TILE / 2;
    if last.to != 1 || last.from == 1 || !enough {
        return None;
    }
    let (rows, columns) = (last, outer[inner]);
    let others: Vec<Walk> = outer.iter().enumerate().filter(|(at, _)| *at != inner).map(|(_, walk)| *walk).collect();
    let tiles = [rows.size.div_ceil(TILE), columns.size.div_ceil(TILE)];
    let batch: usize = others.iter().map(|walk| walk.size).product();
    let sizes = [rows.size, columns.size, rows.from, columns.to, tiles[0], tiles[1]].map(long);
    let places = [from.further(from_start * bytes).into(), to.further(to_start * bytes).into()];
    let args = [&places[..], &sizes, &walk_args(&others)].concat();
    Some(Launch::new(source(MOVES, bytes), "transpose_tiles", [batch * tiles[0] * tiles[1], 1, 1], THREADS, args))
}

/// A move between a short dim and a long one, where neighbours in the one lie apart in the other: a thread moves the short one, so
/// that neighbouring threads are neighbours on the other side.
fn in_runs(
    bytes: usize,
    walks: &[Walk],
    (from, from_start): (CudaPlace, usize),
    (to, to_start): (CudaPlace, usize),
) -> Option<Launch> {
    let (last, outer) = walks.split_last()?;
    let inner = outer.iter().position(|walk| walk.from == 1)?;
    let (short, long_size) = (last.size.min(outer[inner].size), last.size.max(outer[inner].size));
    if last.to != 1 || last.from == 1 || short >= TILE || long_size < TILE {
        return None;
    }
    let run = if last.size == short { walks.len() - 1 } else { inner };
    let mut others = walks.to_vec();
    let Walk { size, from: from_run, to: to_run } = others.remove(run);
    // Threads count along the long dim first.
    let long_dim = if run == inner { others.len() - 1 } else { inner };
    let threads = others.remove(long_dim);
    others.push(threads);
    let count: usize = others.iter().map(|walk| walk.size).product();
    let sizes = [long(count), int(others.len()), long(size), long(from_run), long(to_run)];
    let places = [from.further(from_start * bytes).into(), to.further(to_start * bytes).into()];
    let args = [&places[..], &sizes, &walk_args(&others)].concat();
    Some(Launch::new(source(MOVES, bytes), "move_runs", grid(count, THREADS), THREADS, args))
}

/// Pads `inner` dims with `value` to `outer` ones, after `before` elements of each.
pub(crate) fn padded(bytes: usize, outer: &[usize], inner: &[usize], before: &[usize], value: u64) -> Launch {
    let count: usize = outer.iter().product();
    let dims = [(outer, 1), (inner, 1), (before, 0)].map(|(sizes, rest)| eight(sizes.iter().copied(), rest)).concat();
    let head = [input(0), output(0), long(count), CudaArg::U64(value)];
    Launch::new(source(PICKS, bytes), "pad_elements", grid(count, THREADS), THREADS, [&head[..], &dims].concat())
}

/// Input `x` read along `dim` at the places in input `index`, `missing` where there is none: the first output.
pub(crate) fn taken(cx: &CudaCx<'_>, (x, index): (usize, usize), dim: usize, missing: u64) -> Launch {
    let (ty, count) = (&cx.inputs[x], cx.outputs[0].elements());
    let (_, inner) = around(&ty.shape, dim);
    let sizes = [count, ty.shape[dim], cx.inputs[index].shape[dim], inner].map(long);
    let args = [&[input(x), input(index), output(0)], &sizes[..], &[CudaArg::U64(missing)]].concat();
    Launch::new(source(PICKS, ty.dtype.bytes()), "take_elements", grid(count, THREADS), THREADS, args)
}

/// Rows of input `table` that input `ids` names: the first output. The table's rows are those from `first` on of `vocab`.
pub(crate) fn taken_rows(
    cx: &CudaCx<'_>,
    (table, ids): (usize, usize),
    (first, vocab): (usize, usize),
    missing: u64,
) -> Launch {
    let (ty, count) = (&cx.inputs[table], cx.outputs[0].elements());
    let width: usize = ty.shape[1..].iter().product();
    let sizes = [count, width, ty.shape[0], first, vocab].map(long);
    let args = [&[input(table), input(ids), output(0)], &sizes[..], &[CudaArg::U64(missing)]].concat();
    Launch::new(source(PICKS, ty.dtype.bytes()), "take_rows", grid(count, THREADS), THREADS, args)
}
