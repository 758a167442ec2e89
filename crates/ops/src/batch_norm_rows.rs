//! Batch norm on a GPU where channels lie last: rows are pixels, and threads take neighbouring channels.

use crate::batch_norm;
use crate::device::{self, THREADS, WARP};
use kolo_graph::cuda::{ChannelsLast, CudaArg, CudaCalls, CudaCx, CudaPlace, CudaSource, Launch};

const SOURCE: &str = include_str!("batch_norm_rows.cu");

/// Blocks that sums are cut into, about, and blocks that elements are dealt out to.
const SUM_BLOCKS: usize = 512;
const ELEMENT_BLOCKS: usize = 2048;
/// Rows of a chunk for each line of a block, at least.
const ROWS_PER_LINE: usize = 4;
/// Threads of a block that adds up chunks.
const CHUNK_THREADS: usize = 1024;

/// Images and gradients of four dims: these inputs and the first output.
pub(crate) fn channels_last(cx: &CudaCx<'_>, inputs: &[usize]) -> Option<ChannelsLast> {
    let four = cx.inputs[0].rank() == 4;
    four.then(|| ChannelsLast { inputs: inputs.to_vec(), outputs: vec![0], gains: false })
}

/// What the launches on one batch share.
struct Rows {
    rows: usize,
    channels: usize,
    source: CudaSource,
    /// Channels of a block, and rows that it takes at a time.
    slab: usize,
    lines: usize,
}

/// How rows are cut.
#[derive(Clone, Copy)]
struct Chunks {
    count: usize,
    rows: usize,
}

impl Rows {
    /// `images` are the inputs that hold a number for each pixel and channel.
    fn new(cx: &CudaCx<'_>, pass: &'static str, images: &[usize]) -> Self {
        let channels = cx.inputs[0].shape[1];
        let types = images.iter().map(|at| &cx.inputs[*at]).chain([&cx.outputs[0]]);
        let pack = types.map(|ty| device::pack(channels, ty.dtype)).min().unwrap_or(1);
        let lanes = channels.div_ceil(pack).next_power_of_two().min(WARP);
        let defined = [("THREADS", THREADS), ("LANES", lanes), ("PACK", pack)];
        let source = device::typed(SOURCE, cx).define(pass, 1);
        let source = defined.into_iter().fold(source, |source, (name, value)| source.define(name, value));
        let rows = cx.inputs[0].elements() / channels;
        Self { rows, channels, source, slab: lanes * pack, lines: THREADS / lanes }
    }

    fn chunks(&self, blocks: usize) -> Chunks {
        let wanted = blocks.div_ceil(self.channels.div_ceil(self.slab));
        let rows = self.rows.div_ceil(wanted).next_multiple_of(self.lines * ROWS_PER_LINE);
        Chunks { count: self.rows.div_ceil(rows), rows }
    }

    /// A kernel over all rows: `operands`, then the sizes.
    fn over_rows(&self, calls: &mut CudaCalls, function: &'static str, chunks: Chunks, operands: &[CudaArg]) {
        let sizes = [self.rows, self.channels, chunks.count, chunks.rows].map(device::long);
        let blocks = self.channels.div_ceil(self.slab) * chunks.count;
        let args = [operands, &sizes].concat();
        calls.launch(Launch::new(self.source.clone(), function, [blocks, 1, 1], THREADS, args));
    }

    /// A kernel over all channels that adds up chunks.
    fn over_channels(&self, calls: &mut CudaCalls, function: &'static str, args: Vec<CudaArg>) {
        let launch = Launch::new(self.source.clone(), function, device::grid(self.channels, WARP), CHUNK_THREADS, args);
        calls.launch(launch);
    }

    /// Scratch for so many numbers to a channel.
    fn numbers(&self, calls: &mut CudaCalls, count: usize) -> CudaPlace {
        calls.scratch(self.channels * count * size_of::<f32>())
    }
}

pub(crate) fn forward(cx: &CudaCx<'_>, eps: f32) -> CudaCalls {
    let (mut calls, rows) = (CudaCalls::new(), Rows::new(cx, "FORWARD", &[0]));
    let chunks = rows.chunks(SUM_BLOCKS);
    let (parts, numbers) = (rows.numbers(&mut calls, 2 * chunks.count), rows.numbers(&mut calls, 3));
    rows.over_rows(&mut calls, "row_parts", chunks, &[device::input(0), parts.into()]);
    let operands = [parts.into(), device::input(1), device::input(2)];
    let made = [device::output(1), device::output(2), device::output(3), numbers.into()];
    let sizes = [rows.rows, rows.channels, chunks.count, chunks.rows].map(device::long);
    let args = [&operands[..], &made, &sizes, &[CudaArg::F32(eps)]].concat();
    rows.over_channels(&mut calls, "row_statistics", args);
    let operands = [device::input(0), numbers.into(), device::output(0)];
    rows.over_rows(&mut calls, "scale_rows", rows.chunks(ELEMENT_BLOCKS), &operands);
    calls
}

pub(crate) fn evaluation(cx: &CudaCx<'_>, eps: f32) -> CudaCalls {
    let (mut calls, rows) = (CudaCalls::new(), Rows::new(cx, "EVALUATION", &[0]));
    let numbers = batch_norm::known_statistics(cx, &mut calls, eps);
    let operands = [device::input(0), numbers.into(), device::output(0)];
    rows.over_rows(&mut calls, "scale_rows", rows.chunks(ELEMENT_BLOCKS), &operands);
    calls
}

pub(crate) fn gradient(cx: &CudaCx<'_>) -> CudaCalls {
    let (mut calls, rows) = (CudaCalls::new(), Rows::new(cx, "GRADIENT", &[0, 4]));
    let chunks = rows.chunks(SUM_BLOCKS);
    let (parts, numbers) = (rows.numbers(&mut calls, 2 * chunks.count), rows.numbers(&mut calls, 4));
    let [x, weight, mean, rstd, g] = [0, 1, 2, 3, 4].map(device::input);
    rows.over_rows(&mut calls, "gradient_row_parts", chunks, &[x, g, mean, parts.into()]);
    let operands = [parts.into(), weight, mean, rstd, device::output(1), device::output(2), numbers.into()];
    let sizes = [device::long(rows.channels), device::long(chunks.count), CudaArg::F32(rows.rows as f32)];
    rows.over_channels(&mut calls, "gradient_row_numbers", [&operands[..], &sizes].concat());
    let operands = [x, g, numbers.into(), device::output(0)];
    rows.over_rows(&mut calls, "differentiate_rows", rows.chunks(ELEMENT_BLOCKS), &operands);
    calls
}
