//! The convolution and its input gradient: products of a matrix of weights with the patches of an image.
//!
//! Some images are put on a canvas, their product is computed, and the canvas is used again: it stays in the
//! second-level cache. An element is one chain of multiply-adds over channels and taps, so the bits depend neither on how
//! many images share a canvas nor on threads.

use super::canvas::{Layout, Source};
use super::operands::{Patches, Planes, Runs, SLACK, Scattered};
use super::shape::Shape;
use super::taps::{Span, Taps};
use crate::gemm::{self, Gemm, Operand, Right, Rows, Sink, Start};
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::Team;
use std::ops::Range;

/// Output pixels that share a canvas, per thread.
const PIXELS_PER_CANVAS: usize = 1024;

fn images_per_canvas(images: usize, pixels: usize, threads: usize) -> usize {
    (PIXELS_PER_CANVAS * threads / pixels.max(1)).clamp(1, images.max(1))
}

/// Numbers as offsets: the same size and alignment.
pub fn table(numbers: &mut [f32]) -> &mut [u32] {
    // SAFETY: both types are four bytes of any value.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), numbers.len()) }
}

/// Takes `len` numbers off the front of the scratch; every part starts on a cache line.
pub fn lend<'a>(scratch: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (part, rest) = std::mem::take(scratch).split_at_mut(len.next_multiple_of(16));
    *scratch = rest;
    &mut part[..len]
}

/// One product: patches of a source along two dims of taps.
struct Correlation<'a> {
    source: Source<'a>,
    taps: [Taps; 2],
    layout: Layout,
}

/// What a correlation computes: `rows` channels of some images.
struct Pass<'a, A, C> {
    images: Range<usize>,
    rows: usize,
    a: &'a A,
    c: &'a C,
    start: Start<'a>,
    /// Whether the canvas holds other things and must be cleared first.
    clean: bool,
}

impl<'a> Correlation<'a> {
    fn new(source: Source<'a>, taps: [Taps; 2]) -> Self {
        Self { source, taps, layout: Layout::new(taps) }
    }

    fn pixels(&self) -> usize {
        self.taps[0].outputs * self.taps[1].outputs
    }

    fn depth(&self) -> usize {
        self.source.channels * self.taps[0].count * self.taps[1].count
    }

    fn canvas_len(&self, images: usize) -> usize {
        if self.layout.direct { 0 } else { images * self.source.channels * self.layout.plane() + SLACK }
    }

    fn scratch_len(&self, images: usize) -> usize {
        let parts = [self.canvas_len(images), images * self.pixels(), self.depth()];
        parts.iter().map(|len| len.next_multiple_of(16)).sum()
    }

    fn run<A: Operand, C: Sink>(&self, team: &Team, pass: Pass<'_, A, C>, mut scratch: &mut [f32]) {
        let Pass { images, rows, a, c, start, clean } = pass;
        let (count, depth) = (images.len(), self.depth());
        let canvas = lend(&mut scratch, self.canvas_len(count));
        let lines = table(lend(&mut scratch, count * self.pixels()));
        let ks = table(lend(&mut scratch, depth));
        let data: &[f32] = if self.layout.direct {
            &self.source.data[images.start * self.source.image_stride..]
        } else {
            if clean {
                canvas.fill(0.0);
            }
            self.layout.fill_canvas(team, &self.source, images.start, count, canvas);
            canvas
        };
        let reach = if self.layout.direct { count * self.source.image_stride } else { data.len() };
        assert!(u32::try_from(reach).is_ok(), "offsets are 32 bits");
        self.layout.pixel_offsets(&self.source, lines);
        self.layout.tap_offsets(ks);
        let patches = Patches::new(data, lines, ks);
        let shape = [rows, lines.len(), depth];
        Gemm { shape, a, b: Right::Fresh(&patches), c, start }.run_on(team, scratch);
    }
}

/// One dim of a convolution.
fn span(shape: &Shape, dim: usize) -> Span {
    let window = &shape.window;
    let (stride, padding, dilation) = (window.stride[dim], window.padding.before[dim], window.dilation[dim]);
    Span { image: shape.image[dim], grid: shape.grid[dim], kernel: shape.kernel[dim], stride, padding, dilation }
}

fn forward_taps(shape: &Shape) -> [Taps; 2] {
    [0, 1].map(|dim| Taps::forward(span(shape, dim)))
}

fn image_source<'a>(shape: &Shape, x: &'a [f32], group: usize) -> Source<'a> {
    let plane = shape.image_pixels();
    let image_stride = shape.window.groups * shape.inputs * plane;
    let data = x.get(group * shape.inputs * plane..).unwrap_or(&[]);
    Source { data, image_stride, channels: shape.inputs }
}

fn grid_source<'a>(shape: &Shape, grad: &'a [f32], group: usize) -> Source<'a> {
    let plane = shape.grid_pixels();
    let image_stride = shape.window.groups * shape.outputs * plane;
    let data = grad.get(group * shape.outputs * plane..).unwrap_or(&[]);
    Source { data, image_stride, channels: shape.outputs }
}

pub fn forward_scratch(shape: &Shape, threads: usize) -> usize {
    let images = images_per_canvas(shape.images, shape.grid_pixels(), threads);
    let correlation = Correlation::new(image_source(shape, &[], 0), forward_taps(shape));
    correlation.scratch_len(images) * 4 + gemm::scratch_bytes(threads)
}

/// Lays the bias under some images, to be added to.
fn spread_bias(bias: Option<&[f32]>, planes: &Planes, images: usize, rows: Range<usize>) -> Start<'static> {
    let Some(bias) = bias else { return Start::Zero };
    for image in 0..images {
        for (row, value) in bias[rows.clone()].iter().enumerate() {
            // SAFETY: the planes are inside the output, and nothing else writes them now.
            unsafe { planes.data.slice(image * planes.image_stride + row * planes.pixels, planes.pixels) }.fill(*value);
        }
    }
    Start::Add
}

/// `y[n, o] = bias[o] + Σ weight[o, c, tap] · x[n, c, …]`.
pub fn forward(
    shape: &Shape,
    (team, scratch): (&Team, &mut [f32]),
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    y: &mut [f32],
) {
    let taps = forward_taps(shape);
    let (outputs, pixels) = (shape.outputs, shape.grid_pixels());
    let step = images_per_canvas(shape.images, pixels, team.threads());
    let image_stride = shape.window.groups * outputs * pixels;
    let address = Address(y.as_mut_ptr());
    for group in 0..shape.window.groups {
        let correlation = Correlation::new(image_source(shape, x, group), taps);
        let depth = correlation.depth();
        let kernels = &weight[group * outputs * depth..(group + 1) * outputs * depth];
        let a = Runs { data: kernels, line_stride: depth, run: depth, jump: 0 };
        for first in (0..shape.images).step_by(step) {
            let images = first..(first + step).min(shape.images);
            let offset = first * image_stride + group * outputs * pixels;
            // SAFETY: the offset is inside `y`.
            let c = Planes { data: Address(unsafe { address.get().add(offset) }), image_stride, pixels };
            let start = spread_bias(bias, &c, images.len(), group * outputs..(group + 1) * outputs);
            let clean = group == 0 && first == 0;
            correlation.run(team, Pass { images, rows: outputs, a: &a, c: &c, start, clean }, scratch);
        }
    }
}

fn phase_taps(shape: &Shape, phases: [usize; 2]) -> [Taps; 2] {
    [0, 1].map(|dim| Taps::phase(span(shape, dim), phases[dim]))
}

/// Image pixels of the largest phase.
fn phase_pixels(shape: &Shape) -> usize {
    (0..2).map(|dim| shape.image[dim].div_ceil(shape.window.stride[dim])).product()
}

fn phases(shape: &Shape) -> impl Iterator<Item = [usize; 2]> + use<> {
    let [rows, columns] = [0, 1].map(|dim| shape.window.stride[dim].min(shape.image[dim]));
    (0..rows).flat_map(move |row| (0..columns).map(move |column| [row, column]))
}

fn strided(shape: &Shape) -> bool {
    shape.window.stride != [1, 1]
}

/// Numbers that hold the phases of one row phase, and offsets of the kernel's taps.
fn phase_scratch(shape: &Shape, images: usize) -> (usize, usize) {
    match strided(shape) {
        true => (shape.window.stride[1] * shape.inputs * images * phase_pixels(shape), shape.outputs * shape.taps()),
        false => (0, 0),
    }
}

pub fn input_grad_scratch(shape: &Shape, threads: usize) -> usize {
    let images = images_per_canvas(shape.images, phase_pixels(shape), threads);
    let lens = phases(shape)
        .map(|phases| Correlation::new(grid_source(shape, &[], 0), phase_taps(shape, phases)).scratch_len(images));
    let (held, kernels) = phase_scratch(shape, images);
    let own = lens.max().unwrap_or(0) + held.next_multiple_of(16) + kernels.next_multiple_of(16);
    own * 4 + gemm::scratch_bytes(threads)
}

/// `dx[n, c] = bias[c] + Σ weight[o, c, tap] · grad[n, o, …]` over the outputs that read the pixel.
pub fn input_grad(
    shape: &Shape,
    (team, scratch): (&Team, &mut [f32]),
    weight: &[f32],
    grad: &[f32],
    bias: Option<&[f32]>,
    dx: &mut [f32],
) {
    let (inputs, pixels, taps) = (shape.inputs, shape.image_pixels(), shape.taps());
    let step = images_per_canvas(shape.images, phase_pixels(shape), team.threads());
    let image_stride = shape.window.groups * inputs * pixels;
    let address = Address(dx.as_mut_ptr());
    for group in 0..shape.window.groups {
        let kernels = &weight[group * shape.outputs * inputs * taps..(group + 1) * shape.outputs * inputs * taps];
        let source = grid_source(shape, grad, group);
        for first in (0..shape.images).step_by(step) {
            let images = first..(first + step).min(shape.images);
            let offset = first * image_stride + group * inputs * pixels;
            // SAFETY: the offset is inside `dx`.
            let c = Planes { data: Address(unsafe { address.get().add(offset) }), image_stride, pixels };
            let bias = bias.map(|bias| &bias[group * inputs..(group + 1) * inputs]);
            if strided(shape) {
                Phases { shape, source, kernels, bias, c: &c }.run(team, images, scratch);
                continue;
            }
            let start = spread_bias(bias, &c, images.len(), 0..inputs);
            let a = Runs { data: kernels, line_stride: taps, run: taps, jump: inputs * taps };
            let correlation = Correlation::new(source, phase_taps(shape, [0, 0]));
            let clean = group == 0 && first == 0;
            correlation.run(team, Pass { images, rows: inputs, a: &a, c: &c, start, clean }, scratch);
        }
    }
}

/// The input gradient of a strided convolution: each phase by itself, then dealt out to its pixels.
struct Phases<'a> {
    shape: &'a Shape,
    source: Source<'a>,
    kernels: &'a [f32],
    bias: Option<&'a [f32]>,
    c: &'a Planes,
}

impl Phases<'_> {
    fn run(&self, team: &Team, images: Range<usize>, mut scratch: &mut [f32]) {
        let shape = self.shape;
        let (held, kernel_offsets) = phase_scratch(shape, images.len());
        let held = lend(&mut scratch, held);
        let kernel_offsets = table(lend(&mut scratch, kernel_offsets));
        let [row_stride, column_stride] = shape.window.stride;
        let part = held.len() / column_stride;
        for row_phase in 0..row_stride.min(shape.image[0]) {
            for column_phase in 0..column_stride.min(shape.image[1]) {
                let correlation = Correlation::new(self.source, phase_taps(shape, [row_phase, column_phase]));
                let out = &mut held[column_phase * part..(column_phase + 1) * part];
                let columns = images.len() * correlation.pixels();
                let start = match self.bias {
                    Some(bias) => {
                        out.chunks_exact_mut(columns).zip(bias).for_each(|(row, bias)| row.fill(*bias));
                        Start::Add
                    }
                    None => Start::Zero,
                };
                let c = Rows { data: Address(out.as_mut_ptr()), stride: columns };
                let ks = &mut kernel_offsets[..correlation.depth()];
                list_kernels(shape, &correlation.taps, ks);
                let a = Scattered { data: self.kernels, line_stride: shape.taps(), ks };
                let (images, rows) = (images.clone(), shape.inputs);
                correlation.run(team, Pass { images, rows, a: &a, c: &c, start, clean: true }, scratch);
            }
            self.deal_out(team, row_phase, held, images.len());
        }
    }

    /// Writes the pixels of one row phase: the column phases take turns.
    fn deal_out(&self, team: &Team, row_phase: usize, held: &[f32], images: usize) {
        let (shape, c) = (self.shape, self.c);
        let [height, width] = shape.image;
        let [row_stride, column_stride] = shape.window.stride;
        let (rows, part) = ((height - row_phase).div_ceil(row_stride), held.len() / column_stride);
        team.chunks(images * shape.inputs, (PIXELS_PER_CANVAS * 8 / c.pixels).max(1), |range, _| {
            for at in range {
                let (channel, image) = (at / images, at % images);
                // SAFETY: every task has its own planes of the output.
                let plane = unsafe { c.data.slice(image * c.image_stride + channel * c.pixels, c.pixels) };
                for row in 0..rows {
                    let y = row * row_stride + row_phase;
                    let line = &mut plane[y * width..(y + 1) * width];
                    let from = |phase: usize| {
                        let columns = (width - phase).div_ceil(column_stride);
                        let start = phase * part + ((channel * images + image) * rows + row) * columns;
                        &held[start..start + columns]
                    };
                    match column_stride {
                        2 if width > 1 => zip(from(0), from(1), line),
                        _ => (0..column_stride.min(width))
                            .for_each(|phase| spread(from(phase), &mut line[phase..], column_stride)),
                    }
                }
            }
        });
    }
}

/// Where the taps of a phase lie in the weights, output channel by output channel.
fn list_kernels(shape: &Shape, [rows, columns]: &[Taps; 2], ks: &mut [u32]) {
    let taps = rows.count * columns.count;
    for (at, slot) in ks.iter_mut().enumerate() {
        let (output, tap) = (at / taps, at % taps);
        let (row, column) = (rows.kernel(tap / columns.count), columns.kernel(tap % columns.count));
        *slot = ((output * shape.inputs * shape.kernel[0] + row) * shape.kernel[1] + column) as u32;
    }
}

vectorized! {
    /// Even pixels from `even`, odd ones from `odd`.
    fn zip(even: &[f32], odd: &[f32], out: &mut [f32]) {
        for ((pair, even), odd) in out.chunks_exact_mut(2).zip(even).zip(odd) {
            pair[0] = *even;
            pair[1] = *odd;
        }
        if out.len() % 2 == 1 {
            out[out.len() - 1] = even[even.len() - 1];
        }
    }
}

/// `out[i · stride] = from[i]`.
fn spread(from: &[f32], out: &mut [f32], stride: usize) {
    out.iter_mut().step_by(stride).zip(from).for_each(|(out, from)| *out = *from);
}
