//! Batch normalisation of `[n, c, …]`: one mean and variance per channel, over the images of this grain and their planes.
//!
//! A plane is one channel of one image. Tasks own whole channels and walk images in order, so that a channel's sums are
//! always added in the same order, whatever runs beside them.

use crate::batch_norm_rows;
use crate::device;
use crate::elementwise::ElementwiseMethods;
use crate::norm::{self, Lanes};
use crate::pairwise::Pairwise;
use crate::reduce::ReduceMethods;
use crate::simd::{self, LANES};
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::cuda::{ChannelsLast, Cuda, CudaArg, CudaCalls, CudaCx, CudaPlace, CudaSource, Launch};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};
use std::ops::Range;

/// Channels of one task: their partial sums stay on the stack.
pub(crate) const CHANNELS_MAX: usize = 64;

/// How `[n, c, …]` lies in memory.
#[derive(Clone, Copy)]
pub(crate) struct Planes {
    images: usize,
    pub channels: usize,
    /// Elements of a plane.
    size: usize,
}

impl Planes {
    pub fn of(shape: &[usize]) -> Self {
        Self { images: shape[0], channels: shape[1], size: shape[2..].iter().product() }
    }

    /// Elements that share a channel's statistics.
    fn population(&self) -> usize {
        self.images * self.size
    }

    pub fn channels_per_task(&self) -> usize {
        norm::rows_per_task(self.population()).min(CHANNELS_MAX)
    }

    /// Where each image keeps these channels, one after the other.
    pub fn parts(&self, channels: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (stride, start, end) = (self.channels * self.size, channels.start * self.size, channels.end * self.size);
        (0..self.images).map(move |image| image * stride + start..image * stride + end)
    }

    /// The channel of each element, for the definitions.
    pub fn channel_of(&self, element: usize) -> usize {
        element / self.size % self.channels
    }
}

/// The index expression of `operands`, with `x` for `n c …` and whole planes.
fn planes_index(inputs: &[Type], operands: &str) -> Option<Index> {
    let spatial = norm::axes(inputs.first()?.rank().checked_sub(2)?, true);
    Some(Index::parse(&operands.replace('x', &format!("n! c {spatial}"))))
}

op! {
    /// `(x − mean)/√(variance + eps)·weight + bias` per channel; also mean, `1/√(variance + eps)` and the biased variance.
    pub struct BatchNorm = "batch_norm" { eps: f32 }
}

impl Op for BatchNorm {
    fn operands(&self) -> Operands {
        Operands::new(
            [Operand::float("x"), Operand::float("weight").in_full(), Operand::float("bias").in_full()],
            &["y", "mean", "rstd", "variance"],
        )
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        planes_index(inputs, "x, c, c -> x, c, c, c")
    }
    fn reads_twice(&self) -> bool {
        true
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let index = self.index(inputs).ok_or("takes x, weight and bias, and x is [n, c, …]")?;
        norm::infer(&index, inputs, &[Some(0), None, None, None])
    }
    fn flops_per_point(&self) -> u64 {
        6
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let inputs = [cx.input(0), cx.input(1), cx.output(1), cx.output(2), cx.grad()];
        let grads = cx.input(0).builder().apply_all(BatchNormGrad {}, &inputs);
        let mut grads: Vec<Option<Tensor<'b>>> = (0..3).map(|at| cx.needs(at).then_some(grads[at])).collect();
        if let (Some(dx), Some(more)) = (grads[0], statistics_grad(cx)) {
            grads[0] = Some(dx.add(more));
        }
        grads
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let (x, weight, bias) = (inputs[0], inputs[1], inputs[2]);
        let planes = Planes::of(&x.shape);
        let count = planes.population() as f64;
        let [mut y, mut mean, mut rstd, mut variance] = [0, 1, 2, 3].map(|at| Dense::zeros(outputs[at].shape.clone()));
        for (at, x) in x.data.iter().enumerate() {
            mean.data[planes.channel_of(at)] += x / count;
        }
        for (at, x) in x.data.iter().enumerate() {
            let channel = planes.channel_of(at);
            variance.data[channel] += (x - mean.data[channel]).powi(2) / count;
        }
        for (rstd, variance) in rstd.data.iter_mut().zip(&variance.data) {
            *rstd = 1.0 / (variance + f64::from(self.eps)).sqrt();
        }
        for (at, x) in x.data.iter().enumerate() {
            let c = planes.channel_of(at);
            y.data[at] = (x - mean.data[c]) * (rstd.data[c] * weight.data[c]) + bias.data[c];
        }
        vec![y, mean, rstd, variance]
    }
}

impl Cpu for BatchNorm {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (x, weight, bias) = (cx.f32(0), cx.f32(1), cx.f32(2));
        let planes = Planes::of(cx.shape(0));
        let [y, mean, rstd, variance] = [0, 1, 2, 3].map(|at| Address(cx.out_f32(at).as_mut_ptr()));
        cx.team.chunks(planes.channels, planes.channels_per_task(), |range, _| {
            let [mean, rstd, variance] = [mean, rstd, variance]
                // SAFETY: tasks own disjoint channels.
                .map(|address| unsafe { address.slice(range.start, range.len()) });
            measure(planes, x, &range, mean, variance);
            let mut scale = [0.0; CHANNELS_MAX];
            for at in 0..range.len() {
                rstd[at] = norm::reciprocal_deviation(variance[at], self.eps);
                scale[at] = rstd[at] * weight[range.start + at];
            }
            let (scale, bias) = (&scale[..range.len()], &bias[range.clone()]);
            for part in planes.parts(&range) {
                // SAFETY: as above.
                let y = unsafe { y.slice(part.start, part.len()) };
                scale_planes(y, &x[part], mean, scale, bias);
            }
        });
    }
}

/// `[c]` as a shape that stretches over `x`, `[n, c, …]`.
fn per_channel(x: &Tensor<'_>) -> Vec<usize> {
    x.shape()[1..].iter().enumerate().map(|(at, size)| if at == 0 { *size } else { 1 }).collect()
}

/// What the gradients of the statistics add to that of `x`, if they have any. With `d = x − mean` and `n` elements to a
/// channel, `mean` moves by `1/n`, the variance by `2d/n` and `rstd` by `−rstd³·d/n`.
fn statistics_grad<'b>(cx: &GradCx<'b>) -> Option<Tensor<'b>> {
    let x = cx.input(0);
    let share = 1.0 / Planes::of(&x.shape()).population() as f32;
    let (mean, rstd) = (cx.output(1), cx.output(2));
    let stretch = |channels: Tensor<'b>| channels.scale(share).reshape_to(per_channel(&x));
    let by_rstd = cx.grads[2].map(|g| g.mul(rstd.mul(rstd).mul(rstd)).neg());
    let by_variance = cx.grads[3].map(|g| g.scale(2.0));
    let slope = match (by_rstd, by_variance) {
        (Some(a), Some(b)) => Some(a.add(b)),
        (a, b) => a.or(b),
    };
    let by_slope = slope.map(|slope| x.sub(mean.reshape_to(per_channel(&x))).mul(stretch(slope)));
    let by_mean = cx.grads[1].map(|g| stretch(g).expand(x.shape()));
    match (by_mean, by_slope) {
        (Some(a), Some(b)) => Some(a.add(b)),
        (a, b) => a.or(b),
    }
}

/// Mean and biased variance of each channel of `range`.
fn measure(planes: Planes, x: &[f32], range: &Range<usize>, mean: &mut [f32], variance: &mut [f32]) {
    let count = planes.population() as f32;
    let sums = sum_parts(planes, range, |lanes, part| add_values(lanes, &x[part]));
    mean.iter_mut().zip(&sums).for_each(|(mean, [sum])| *mean = sum.total() / count);
    let sums = sum_parts(planes, range, |lanes, part| add_squares(lanes, &x[part], mean));
    variance.iter_mut().zip(&sums).for_each(|(variance, [sum])| *variance = sum.total() / count);
}

/// `K` sums of each channel of `range`: `add` adds one image's planes to the lanes. So many images share a set of lanes
/// that chains stay short; the sets are then added up as a tree.
pub(crate) fn sum_parts<const K: usize>(
    planes: Planes,
    range: &Range<usize>,
    add: impl Fn(&mut [Lanes<K>], Range<usize>),
) -> [[Pairwise; K]; CHANNELS_MAX] {
    let mut lanes = [[[0.0; LANES]; K]; CHANNELS_MAX];
    let lanes = &mut lanes[..range.len()];
    let mut totals = [[Pairwise::EMPTY; K]; CHANNELS_MAX];
    let block = norm::slices_per_block(planes.size);
    for (image, part) in planes.parts(range).enumerate() {
        add(lanes, part);
        if (image + 1) % block == 0 || image + 1 == planes.images {
            for (total, lanes) in totals.iter_mut().zip(lanes.iter_mut()) {
                let sums = std::mem::replace(lanes, [[0.0; LANES]; K]).map(simd::fold);
                (0..K).for_each(|k| total[k].add(sums[k]));
            }
        }
    }
    totals
}

vectorized! {
    /// Adds the sums of one image's planes, one per channel, to `lanes`.
    fn add_values(lanes: &mut [Lanes<1>], x: &[f32]) {
        let size = x.len() / lanes.len();
        for (channel, lanes) in lanes.iter_mut().enumerate() {
            norm::add_sums(lanes, [&x[channel * size..][..size]], |[x], [sum]| [sum + x]);
        }
    }
}

vectorized! {
    /// Adds the squared distances from each channel's mean over one image's planes to `lanes`.
    pub(crate) fn add_squares(lanes: &mut [Lanes<1>], x: &[f32], mean: &[f32]) {
        let size = x.len() / lanes.len();
        for (channel, (lanes, &mean)) in lanes.iter_mut().zip(mean).enumerate() {
            let plane = [&x[channel * size..][..size]];
            norm::add_sums(lanes, plane, |[x], [sum]| [(x - mean).mul_add(x - mean, sum)]);
        }
    }
}

vectorized! {
    /// `y = (x − mean)·scale + bias` over one image's planes, one per entry of `mean`, `scale` and `bias`.
    fn scale_planes(y: &mut [f32], x: &[f32], mean: &[f32], scale: &[f32], bias: &[f32]) {
        let size = x.len() / mean.len();
        for (channel, ((&mean, &scale), &bias)) in mean.iter().zip(scale).zip(bias).enumerate() {
            norm::affine(&mut y[channel * size..][..size], &x[channel * size..][..size], mean, scale, bias);
        }
    }
}

impl Cases for BatchNorm {
    fn cases() -> Vec<Case> {
        let args = |shape: &[usize]| [Arg::real(shape), Arg::real([shape[1]]), Arg::real([shape[1]])];
        let case = |shape: &[usize]| Case::new(BatchNorm { eps: 1e-3 }, args(shape));
        let large = |shape: &[usize]| Case::new(BatchNorm { eps: 1e-5 }, args(shape).map(Arg::constant));
        vec![
            case(&[4, 3]),
            case(&[2, 3, 2, 2]),
            case(&[3, 2, 17]),
            case(&[1, 1, 5]),
            case(&[2, 2, 2, 3, 2]),
            large(&[3, 150, 4, 4]),
            large(&[3, 5, 31, 33]),
            large(&[2, 3, 80, 80]),
        ]
    }
}

op! {
    /// Backward of batch norm: (x, weight, mean, rstd, g) to the gradients of x, weight and bias.
    pub struct BatchNormGrad = "batch_norm_grad" {}
}

impl Op for BatchNormGrad {
    fn operands(&self) -> Operands {
        Operands::without_rules(
            [
                Operand::float("x"),
                Operand::float("weight").in_full(),
                Operand::float("mean").in_full(),
                Operand::float("rstd").in_full(),
                Operand::float("g"),
            ],
            &["dx", "dweight", "dbias"],
        )
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        planes_index(inputs, "x, c, c, c, x -> x, c, c")
    }
    fn reads_twice(&self) -> bool {
        true
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let index = self.index(inputs).ok_or("takes x, weight, mean, rstd and g, and x is [n, c, …]")?;
        norm::infer(&index, inputs, &[Some(0), Some(1), Some(1)])
    }
    fn flops_per_point(&self) -> u64 {
        9
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let [x, weight, mean, rstd, g] = [0, 1, 2, 3, 4].map(|at| &inputs[at].data);
        let planes = Planes::of(&inputs[0].shape);
        let count = planes.population() as f64;
        let [mut dx, mut dweight, mut dbias] = [0, 1, 2].map(|at| Dense::zeros(outputs[at].shape.clone()));
        for at in 0..x.len() {
            let channel = planes.channel_of(at);
            dbias.data[channel] += g[at];
            dweight.data[channel] += g[at] * (x[at] - mean[channel]);
        }
        for (dweight, rstd) in dweight.data.iter_mut().zip(rstd) {
            *dweight *= rstd;
        }
        for at in 0..x.len() {
            let c = planes.channel_of(at);
            let slope = dweight.data[c] * rstd[c] / count;
            let centred = g[at] - dbias.data[c] / count - (x[at] - mean[c]) * slope;
            dx.data[at] = weight[c] * rstd[c] * centred;
        }
        vec![dx, dweight, dbias]
    }
}

impl Cpu for BatchNormGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let [x, weight, mean, rstd, g] = [0, 1, 2, 3, 4].map(|at| cx.f32(at));
        let planes = Planes::of(cx.shape(0));
        let count = planes.population() as f32;
        let [dx, dweight, dbias] = [0, 1, 2].map(|at| Address(cx.out_f32(at).as_mut_ptr()));
        cx.team.chunks(planes.channels, planes.channels_per_task(), |range, _| {
            let [dweight, dbias] = [dweight, dbias]
                // SAFETY: tasks own disjoint channels.
                .map(|address| unsafe { address.slice(range.start, range.len()) });
            let sums = sum_parts(planes, &range, |lanes, part| {
                add_gradients(lanes, &x[part.clone()], &g[part], &mean[range.clone()])
            });
            let mut numbers = [[0.0; 4]; CHANNELS_MAX];
            for (at, channel) in range.clone().enumerate() {
                dbias[at] = sums[at][0].total();
                dweight[at] = sums[at][1].total() * rstd[channel];
                let slope = dweight[at] * rstd[channel] / count;
                numbers[at] = [mean[channel], weight[channel] * rstd[channel], dbias[at] / count, slope];
            }
            for part in planes.parts(&range) {
                // SAFETY: as above.
                let dx = unsafe { dx.slice(part.start, part.len()) };
                differentiate_planes(dx, &x[part.clone()], &g[part], &numbers[..range.len()]);
            }
        });
    }
}

vectorized! {
    /// Adds `Σ g` and `Σ g·(x − mean)` over one image's planes to `lanes`.
    pub(crate) fn add_gradients(lanes: &mut [Lanes<2>], x: &[f32], g: &[f32], mean: &[f32]) {
        let size = x.len() / lanes.len();
        for (channel, (lanes, &mean)) in lanes.iter_mut().zip(mean).enumerate() {
            let planes = [&x[channel * size..][..size], &g[channel * size..][..size]];
            norm::add_sums(lanes, planes, |[x, g], [shift, slope]| [shift + g, g.mul_add(x - mean, slope)]);
        }
    }
}

vectorized! {
    /// [`norm::affine_grad`] over one image's planes, with each channel's numbers.
    pub(crate) fn differentiate_planes(dx: &mut [f32], x: &[f32], g: &[f32], numbers: &[[f32; 4]]) {
        let size = x.len() / numbers.len();
        for (channel, numbers) in numbers.iter().enumerate() {
            let part = channel * size..(channel + 1) * size;
            norm::affine_grad(&mut dx[part.clone()], &x[part.clone()], &g[part], *numbers);
        }
    }
}

impl Cases for BatchNormGrad {
    fn cases() -> Vec<Case> {
        let case = |shape: &[usize]| {
            let c = [shape[1]];
            let args = [Arg::real(shape), Arg::real(c), Arg::real(c), Arg::positive(c), Arg::real(shape)];
            Case::new(BatchNormGrad {}, args.map(Arg::constant))
        };
        vec![
            case(&[4, 3]),
            case(&[2, 3, 2, 2]),
            case(&[1, 1, 5]),
            case(&[3, 150, 4, 4]),
            case(&[3, 5, 31, 33]),
            case(&[2, 3, 80, 80]),
        ]
    }
}

op! {
    /// Batch norm with known statistics: (x, weight, bias, mean, variance) to y.
    pub struct BatchNormEval = "batch_norm_eval" { eps: f32 }
}

impl Op for BatchNormEval {
    fn operands(&self) -> Operands {
        Operands::new(
            [
                Operand::float("x"),
                Operand::float("weight").in_full(),
                Operand::float("bias").in_full(),
                Operand::float("mean").in_full(),
                Operand::float("variance").in_full(),
            ],
            &["y"],
        )
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let spatial = norm::axes(inputs.first()?.rank().checked_sub(2)?, false);
        Some(Index::parse(&format!("n c {spatial}, c, c, c, c -> n c {spatial}")))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let index = self.index(inputs).ok_or("takes x, weight, bias, mean and variance, and x is [n, c, …]")?;
        norm::infer(&index, inputs, &[Some(0)])
    }
    fn flops_per_point(&self) -> u64 {
        3
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let (x, weight, g) = (cx.input(0), cx.input(1), cx.grad());
        let stretch = |channels: Tensor<'b>| channels.reshape_to(per_channel(&x));
        let others: Vec<usize> = (0..x.rank()).filter(|dim| *dim != 1).collect();
        let rstd = || cx.input(4).shift(self.eps).rsqrt();
        // `Σ g·(x − mean)` of each channel.
        let slope = || g.mul(x.sub(stretch(cx.input(3)))).sum(&others);
        vec![
            cx.needs(0).then(|| g.mul(stretch(rstd().mul(weight)))),
            cx.needs(1).then(|| slope().mul(rstd())),
            cx.needs(2).then(|| g.sum(&others)),
            cx.needs(3).then(|| g.sum(&others).mul(rstd().mul(weight)).neg()),
            cx.needs(4).then(|| {
                let rstd = rstd();
                slope().mul(weight).mul(rstd.mul(rstd).mul(rstd)).scale(-0.5)
            }),
        ]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let [x, weight, bias, mean, variance] = [0, 1, 2, 3, 4].map(|at| &inputs[at].data);
        let planes = Planes::of(&inputs[0].shape);
        let value = |(at, x): (usize, &f64)| {
            let c = planes.channel_of(at);
            (x - mean[c]) * (weight[c] / (variance[c] + f64::from(self.eps)).sqrt()) + bias[c]
        };
        vec![Dense::new(outputs[0].shape.clone(), x.iter().enumerate().map(value).collect())]
    }
}

impl Cpu for BatchNormEval {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let [x, weight, bias, mean, variance] = [0, 1, 2, 3, 4].map(|at| cx.f32(at));
        let planes = Planes::of(cx.shape(0));
        let y = Address(cx.out_f32(0).as_mut_ptr());
        cx.team.chunks(planes.channels, planes.channels_per_task(), |range, _| {
            let mut scale = [0.0; CHANNELS_MAX];
            for (scale, channel) in scale.iter_mut().zip(range.clone()) {
                *scale = weight[channel] * norm::reciprocal_deviation(variance[channel], self.eps);
            }
            let (mean, scale, bias) = (&mean[range.clone()], &scale[..range.len()], &bias[range.clone()]);
            for part in planes.parts(&range) {
                // SAFETY: tasks own disjoint channels.
                let y = unsafe { y.slice(part.start, part.len()) };
                scale_planes(y, &x[part], mean, scale, bias);
            }
        });
    }
}

impl Cases for BatchNormEval {
    fn cases() -> Vec<Case> {
        let args = |shape: &[usize]| {
            let c = [shape[1]];
            [Arg::real(shape), Arg::real(c), Arg::real(c), Arg::real(c), Arg::positive(c)]
        };
        let case = |shape: &[usize]| Case::new(BatchNormEval { eps: 1e-3 }, args(shape));
        let large = |shape: &[usize]| Case::new(BatchNormEval { eps: 1e-5 }, args(shape).map(Arg::constant));
        vec![
            case(&[4, 3]),
            case(&[2, 3, 2, 2]),
            case(&[1, 1, 5]),
            case(&[3, 2, 17]),
            large(&[3, 150, 4, 4]),
            large(&[3, 5, 31, 33]),
        ]
    }
}

/// Elements of a channel that one block of the GPU adds up, at least.
const ELEMENTS_PER_CHUNK: usize = 16 * 1024;

/// The kernels of all passes.
pub(crate) const SOURCE: &str = include_str!("batch_norm.cu");

/// What the launches on one batch share.
pub(crate) struct GpuPlanes<'a> {
    cx: &'a CudaCx<'a>,
    pub(crate) planes: Planes,
    source: CudaSource,
    /// Elements that a thread takes at once.
    pack: usize,
    images_per_chunk: usize,
    pub(crate) chunks: usize,
}

impl<'a> GpuPlanes<'a> {
    pub(crate) fn new(cx: &'a CudaCx<'a>, pass: &'static str) -> Self {
        Self::with_source(cx, device::typed(SOURCE, cx).define(pass, 1))
    }

    /// The same with a source in which the operands have the names of other passes.
    pub(crate) fn with_source(cx: &'a CudaCx<'a>, source: CudaSource) -> Self {
        let planes = Planes::of(&cx.inputs[0].shape);
        let pack = cx.inputs.iter().map(|ty| device::pack(planes.size, ty.dtype)).min().unwrap_or(1);
        let source = source.define("PACK", pack);
        let images_per_chunk = (ELEMENTS_PER_CHUNK / planes.size.max(1)).max(1);
        Self { cx, planes, source, pack, images_per_chunk, chunks: planes.images.div_ceil(images_per_chunk) }
    }

    pub(crate) fn launch(&self, function: &'static str, grid: [usize; 3], args: Vec<CudaArg>) -> Launch {
        Launch::new(self.source.clone(), function, grid, device::THREADS, args)
    }

    /// Scratch for so many numbers to a channel.
    pub(crate) fn numbers(&self, calls: &mut CudaCalls, count: usize) -> CudaPlace {
        calls.scratch(self.planes.channels * count * size_of::<f32>())
    }

    fn count(&self) -> CudaArg {
        CudaArg::F32(self.planes.population() as f32)
    }

    /// A block to each chunk of each channel.
    pub(crate) fn chunk_grid(&self) -> [usize; 3] {
        [self.planes.channels * self.chunks, 1, 1]
    }

    /// A warp to a channel.
    fn warp_grid(&self) -> [usize; 3] {
        device::grid(self.planes.channels, device::THREADS / device::WARP)
    }

    pub(crate) fn sizes(&self) -> [CudaArg; 5] {
        let Planes { images, channels, size } = self.planes;
        [images, channels, size, self.chunks, self.images_per_chunk].map(device::long)
    }

    /// The mean over each channel of x, or of the squared distances from `means`.
    fn means(&self, calls: &mut CudaCalls, means: Option<CudaPlace>) -> CudaPlace {
        let (parts, made) = (self.numbers(calls, self.chunks), self.numbers(calls, 1));
        let from = [device::input(0), means.unwrap_or(made).into(), parts.into()];
        let args = [&from[..], &self.sizes(), &[device::flag(means.is_some())]].concat();
        calls.launch(self.launch("channel_parts", self.chunk_grid(), args));
        let sizes = [device::long(self.planes.channels), device::long(self.chunks), self.count()];
        let args = [&[parts.into(), made.into()], &sizes[..]].concat();
        calls.launch(self.launch("channel_means", self.warp_grid(), args));
        made
    }

    /// The last launch, over all elements: `operands`, then the sizes.
    pub(crate) fn over_elements(&self, calls: &mut CudaCalls, function: &'static str, operands: &[CudaArg]) {
        let packs = self.cx.inputs[0].elements() / self.pack;
        let args = [operands, &[packs, self.planes.channels, self.planes.size].map(device::long)].concat();
        calls.launch(self.launch(function, device::grid(packs, device::THREADS), args));
    }
}

impl Cuda for BatchNorm {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        if cx.channels_last {
            return batch_norm_rows::forward(cx, self.eps, None);
        }
        let (mut calls, gpu) = (CudaCalls::new(), GpuPlanes::new(cx, "FORWARD"));
        let means = gpu.means(&mut calls, None);
        let variances = gpu.means(&mut calls, Some(means));
        let numbers = gpu.numbers(&mut calls, 3);
        let inputs = [means.into(), variances.into(), device::input(1), device::input(2)];
        let outputs = [device::output(1), device::output(2), device::output(3), numbers.into()];
        let channels = gpu.planes.channels;
        let args = [&inputs[..], &outputs, &[device::long(channels), CudaArg::F32(self.eps)]].concat();
        calls.launch(gpu.launch("channel_statistics", device::grid(channels, device::THREADS), args));
        gpu.over_elements(&mut calls, "scale_planes", &[device::input(0), numbers.into(), device::output(0)]);
        calls
    }
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        batch_norm_rows::channels_last(cx, &[0])
    }
}

/// The mean, scale and bias of each channel, in scratch.
pub(crate) fn known_statistics(cx: &CudaCx<'_>, calls: &mut CudaCalls, eps: f32) -> CudaPlace {
    let gpu = GpuPlanes::new(cx, "EVALUATION");
    let (numbers, channels) = (gpu.numbers(calls, 3), gpu.planes.channels);
    let inputs = [1, 2, 3, 4].map(device::input);
    let args = [&inputs[..], &[numbers.into(), device::long(channels), CudaArg::F32(eps)]].concat();
    calls.launch(gpu.launch("known_statistics", device::grid(channels, device::THREADS), args));
    numbers
}

impl Cuda for BatchNormEval {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        if cx.channels_last {
            return batch_norm_rows::evaluation(cx, self.eps, None);
        }
        let (mut calls, gpu) = (CudaCalls::new(), GpuPlanes::new(cx, "EVALUATION"));
        let numbers = known_statistics(cx, &mut calls, self.eps);
        gpu.over_elements(&mut calls, "scale_planes", &[device::input(0), numbers.into(), device::output(0)]);
        calls
    }
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        batch_norm_rows::channels_last(cx, &[0])
    }
}

impl Cuda for BatchNormGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        if cx.channels_last {
            return batch_norm_rows::gradient(cx, None);
        }
        let (mut calls, gpu) = (CudaCalls::new(), GpuPlanes::new(cx, "GRADIENT"));
        let (parts, numbers) = (gpu.numbers(&mut calls, 2 * gpu.chunks), gpu.numbers(&mut calls, 4));
        let [x, weight, mean, rstd, g] = [0, 1, 2, 3, 4].map(device::input);
        let args = [&[x, g, mean, parts.into()], &gpu.sizes()[..]].concat();
        calls.launch(gpu.launch("gradient_parts", gpu.chunk_grid(), args));
        let operands = [parts.into(), weight, mean, rstd, device::output(1), device::output(2), numbers.into()];
        let sizes = [device::long(gpu.planes.channels), device::long(gpu.chunks), gpu.count()];
        calls.launch(gpu.launch("gradient_numbers", gpu.warp_grid(), [&operands[..], &sizes].concat()));
        gpu.over_elements(&mut calls, "differentiate", &[x, g, numbers.into(), device::output(0)]);
        calls
    }
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        batch_norm_rows::channels_last(cx, &[0, 4])
    }
}

pub const KINDS: &[OpKind] = &[
    OpKind::of::<BatchNorm>().with_cuda::<BatchNorm>(),
    OpKind::of::<BatchNormGrad>().with_cuda::<BatchNormGrad>(),
    OpKind::of::<BatchNormEval>().with_cuda::<BatchNormEval>(),
];

kolo_graph::methods! {
    /// Batch normalisation of `[n, c, …]`.
    BatchNormMethods {
        /// Normalises each channel by its own statistics: (y, mean, biased variance).
        fn batch_norm(
            self, weight: Tensor<'b>, bias: Tensor<'b>, eps: f32,
        ) -> (Tensor<'b>, Tensor<'b>, Tensor<'b>) {
            let outputs = self.builder().apply_all(BatchNorm { eps }, &[self, weight, bias]);
            (outputs[0], outputs[1], outputs[3])
        }
        /// Normalises each channel by the given statistics.
        fn batch_norm_eval(
            self, weight: Tensor<'b>, bias: Tensor<'b>, mean: Tensor<'b>, variance: Tensor<'b>, eps: f32,
        ) -> Tensor<'b> {
            self.then(BatchNormEval { eps }, &[weight, bias, mean, variance])
        }
    }
}
