//! Batch norm on a GPU where channels lie last: rows are pixels, and threads take neighbouring channels. An elementwise chain behind the
//! norm, or one that makes the gradient of its backward pass, runs in the same pass over memory.

use crate::batch_norm::{self, BatchNorm, BatchNormEval, BatchNormGrad};
use crate::cuda_map::Map;
use crate::device::{self, THREADS, WARP};
use kolo_graph::cuda::{ChannelsLast, CudaArg, CudaCalls, CudaCx, CudaPlace, CudaSource, Launch};
use kolo_graph::{Op, Type};

const SOURCE: &str = include_str!("batch_norm_rows.cu");

/// Blocks that sums are cut into, about, and blocks that elements are dealt out to.
const SUM_BLOCKS: usize = 512;
const ELEMENT_BLOCKS: usize = 2048;
/// Rows of a chunk for each line of a block, at least.
const ROWS_PER_LINE: usize = 4;
/// Threads of a block that adds up chunks.
const CHUNK_THREADS: usize = 1024;

/// Inputs of a chain that a kernel takes beside the norm's own: behind a norm, and before its backward pass.
pub(crate) const OTHERS_MAX: usize = 2;
pub(crate) const GIVEN_MAX: usize = 3;

/// Images and gradients of four dims: these inputs and the first output.
pub(crate) fn channels_last(cx: &CudaCx<'_>, inputs: &[usize]) -> Option<ChannelsLast> {
    let four = cx.inputs[0].rank() == 4;
    four.then(|| ChannelsLast { inputs: inputs.to_vec(), outputs: vec![0], gains: false })
}

/// A chain that runs with a norm. The inputs of the two together are the norm's, then the chain's but for the norm's own result.
#[derive(Clone, Copy)]
pub(crate) struct Chain<'a> {
    pub map: &'a Map,
    pub inputs: usize,
    /// Which of the chain's inputs is the norm's result; `None` if the chain makes the gradient for the backward pass.
    pub own: Option<usize>,
}

/// What a norm does together with a chain; `cx` has the inputs of both.
pub(crate) fn calls(norm: &dyn Op, cx: &CudaCx<'_>, chain: Chain<'_>) -> CudaCalls {
    match (norm.downcast::<BatchNorm>(), norm.downcast::<BatchNormEval>()) {
        (Some(BatchNorm { eps }), _) => forward(cx, *eps, Some(chain)),
        (_, Some(BatchNormEval { eps })) => evaluation(cx, *eps, Some(chain)),
        _ => {
            debug_assert!(norm.is::<BatchNormGrad>(), "chains run with batch norms");
            gradient(cx, Some(chain))
        }
    }
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
    fn new(cx: &CudaCx<'_>, pass: &'static str, images: &[usize], chain: Option<Chain<'_>>) -> Self {
        let channels = cx.inputs[0].shape[1];
        let types = images.iter().map(|at| &cx.inputs[*at]).chain([&cx.outputs[0]]);
        let pack = types.map(|ty| device::pack(channels, ty.dtype)).min().unwrap_or(1);
        let lanes = channels.div_ceil(pack).next_power_of_two().min(WARP);
        let defined = [("THREADS", THREADS), ("LANES", lanes), ("PACK", pack)];
        let mut source = device::typed(SOURCE, cx).define(pass, 1);
        if let Some(chain) = chain {
            source.text = format!("{}{SOURCE}", chain.map.device_function("chain", chain.inputs)).into();
        }
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

/// Inputs of kernels that not every launch has: as many as `names`, the first again where there are fewer.
fn named(
    mut source: CudaSource,
    cx: &CudaCx<'_>,
    names: &[&'static str],
    inputs: &[usize],
) -> (CudaSource, Vec<CudaArg>) {
    let at = |place: usize| inputs.get(place).or(inputs.first()).copied().unwrap_or(0);
    for (place, name) in names.iter().enumerate() {
        source = source.define_type(name, cx.inputs[at(place)].dtype);
    }
    (source, (0..names.len()).map(|place| device::input(at(place))).collect())
}

/// What stands behind a norm whose own inputs are the first `own_inputs`.
fn following(cx: &CudaCx<'_>, pass: &'static str, own_inputs: usize, chain: Option<Chain<'_>>) -> (Rows, Vec<CudaArg>) {
    let others: Vec<usize> = (own_inputs..cx.inputs.len()).collect();
    let images: Vec<usize> = [0].into_iter().chain(others.iter().copied()).collect();
    let mut rows = Rows::new(cx, pass, &images, chain);
    let (source, args) = named(rows.source, cx, &["J0", "J1"], &others);
    let own = "to_float(from_float<O0>(value))";
    let text = match chain.and_then(|chain| chain.own) {
        None => "(value)".to_string(),
        Some(at) => {
            let mut operands: Vec<&str> = ["a", "b"][..others.len()].to_vec();
            operands.insert(at, own);
            format!("chain({})", operands.join(", "))
        }
    };
    rows.source = source.define("OTHERS", others.len()).define("FOLLOW(value, a, b)", text);
    (rows, args)
}

/// The last launch of a forward pass.
fn scale(calls: &mut CudaCalls, rows: &Rows, others: &[CudaArg], numbers: CudaPlace) {
    let operands = [&[device::input(0)], others, &[numbers.into(), device::output(0)]].concat();
    rows.over_rows(calls, "scale_rows", rows.chunks(ELEMENT_BLOCKS), &operands);
}

pub(crate) fn forward(cx: &CudaCx<'_>, eps: f32, chain: Option<Chain<'_>>) -> CudaCalls {
    let (mut calls, (rows, others)) = (CudaCalls::new(), following(cx, "FORWARD", 3, chain));
    let chunks = rows.chunks(SUM_BLOCKS);
    let (parts, numbers) = (rows.numbers(&mut calls, 2 * chunks.count), rows.numbers(&mut calls, 3));
    rows.over_rows(&mut calls, "row_parts", chunks, &[device::input(0), parts.into()]);
    let operands = [parts.into(), device::input(1), device::input(2)];
    let made = [device::output(1), device::output(2), device::output(3), numbers.into()];
    let sizes = [rows.rows, rows.channels, chunks.count, chunks.rows].map(device::long);
    let args = [&operands[..], &made, &sizes, &[CudaArg::F32(eps)]].concat();
    rows.over_channels(&mut calls, "row_statistics", args);
    scale(&mut calls, &rows, &others, numbers);
    calls
}

pub(crate) fn evaluation(cx: &CudaCx<'_>, eps: f32, chain: Option<Chain<'_>>) -> CudaCalls {
    let (mut calls, (rows, others)) = (CudaCalls::new(), following(cx, "EVALUATION", 5, chain));
    let numbers = batch_norm::known_statistics(cx, &mut calls, eps);
    scale(&mut calls, &rows, &others, numbers);
    calls
}

/// The gradient is input 4, or what a chain makes of the inputs behind that, which is not read then.
pub(crate) fn gradient(cx: &CudaCx<'_>, chain: Option<Chain<'_>>) -> CudaCalls {
    let given: Vec<usize> = if chain.is_some() { (5..cx.inputs.len()).collect() } else { vec![4] };
    let images: Vec<usize> = [0].into_iter().chain(given.iter().copied()).collect();
    let (mut calls, mut rows) = (CudaCalls::new(), Rows::new(cx, "BACKWARD", &images, chain));
    let (source, from) = named(rows.source, cx, &["G0", "G1", "G2"], &given);
    let made = match chain {
        None => "(a)".to_string(),
        Some(_) => format!("to_float(from_float<I4>(chain({})))", ["a", "b", "c"][..given.len()].join(", ")),
    };
    rows.source = source.define("GIVEN", given.len()).define("GRADIENT(a, b, c)", made);
    let chunks = rows.chunks(SUM_BLOCKS);
    let (parts, numbers) = (rows.numbers(&mut calls, 2 * chunks.count), rows.numbers(&mut calls, 4));
    let [x, weight, mean, rstd] = [0, 1, 2, 3].map(device::input);
    rows.over_rows(&mut calls, "gradient_row_parts", chunks, &[&[x], &from[..], &[mean, parts.into()]].concat());
    let operands = [parts.into(), weight, mean, rstd, device::output(1), device::output(2), numbers.into()];
    let sizes = [device::long(rows.channels), device::long(chunks.count), CudaArg::F32(rows.rows as f32)];
    rows.over_channels(&mut calls, "gradient_row_numbers", [&operands[..], &sizes].concat());
    let operands = [&[x], &from[..], &[numbers.into(), device::output(0)]].concat();
    rows.over_rows(&mut calls, "differentiate_rows", rows.chunks(ELEMENT_BLOCKS), &operands);
    calls
}

/// Whether a type is that of images which a kernel can take beside `like`.
pub(crate) fn is_beside(ty: &Type, like: &Type) -> bool {
    ty.shape == like.shape && ty.dtype.is_float()
}
