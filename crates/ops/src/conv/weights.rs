//! The weight gradient: gradients times patches, summed over pixels.
//!
//! Here a patch is needed pixel by pixel with its channels side by side. Transposing every patch would move each pixel as
//! often as the kernel has taps; instead the image is transposed once onto the canvas, `[image, row, column, channel]`,
//! and a packed sliver is a plain copy. Columns of the product are ordered `(tap, channel)` for that, and put right at
//! the end. Few enough channels are taken at a time that canvas and sums stay in the second-level cache.

use super::correlate::{lend, table};
use super::operands::{Patches, Runs, SLACK};
use super::shape::Shape;
use super::transpose::transpose;
use crate::gemm::{self, Gemm, Right, Rows, Start};
use crate::tiles::Address;
use kolo_graph::Team;
use std::ops::Range;

/// Columns of the product to aim at.
const COLUMNS: usize = 1024;
/// Numbers on the canvas to aim at, per thread.
const CANVAS: usize = 128 * 1024;
/// Channels are cut at multiples of a sliver.
const CHANNELS: usize = 32;

/// How the work is cut. Sums are made unit by unit, which the shape alone decides; more threads have more units on the
/// canvas at a time.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Input channels at a time.
    channels: usize,
    /// Images of one product, whose results are added up in order.
    unit: usize,
    /// Images at a time.
    images: usize,
    /// The canvas: the image with its padding.
    height: usize,
    width: usize,
}

impl Cut {
    fn new(shape: &Shape, threads: usize) -> Self {
        let side = |dim: usize| {
            let window = &shape.window;
            let reach = (shape.grid[dim] - 1) * window.stride[dim] + (shape.kernel[dim] - 1) * window.dilation[dim] + 1;
            reach.max(window.padding.before[dim] + shape.image[dim])
        };
        let (height, width) = (side(0), side(1));
        let most = (COLUMNS / shape.taps() / CHANNELS * CHANNELS).max(CHANNELS);
        let parts = shape.inputs.div_ceil(most).max(1);
        let channels = shape.inputs.div_ceil(parts).next_multiple_of(CHANNELS).min(shape.inputs);
        let unit = (CANVAS / (height * width * channels).max(1)).clamp(1, shape.images.max(1));
        let images = (unit * threads).min(shape.images.max(1));
        Self { channels, unit, images, height, width }
    }

    fn canvas_len(&self) -> usize {
        self.images * self.height * self.width * self.channels + SLACK
    }
}

fn lens(shape: &Shape, cut: &Cut) -> [usize; 5] {
    let columns = shape.taps() * cut.channels;
    let sums = if shape.taps() == 1 { 0 } else { shape.outputs * columns };
    [cut.canvas_len(), sums, columns, cut.images * shape.grid_pixels(), shape.image_pixels()]
}

pub fn weight_grad_scratch(shape: &Shape, threads: usize) -> usize {
    let own: usize = lens(shape, &Cut::new(shape, threads)).iter().map(|len| len.next_multiple_of(16)).sum();
    own * 4 + gemm::scratch_bytes(threads)
}

/// `dw[o, c, tap] = Σ grad[n, o, pixel] · x[n, c, pixel through tap]`.
pub fn weight_grad(shape: &Shape, team: &Team, mut scratch: &mut [f32], x: &[f32], grad: &[f32], dw: &mut [f32]) {
    let cut = Cut::new(shape, team.threads());
    let [canvas, sums, columns, pixels, places] = lens(shape, &cut);
    let canvas = lend(&mut scratch, canvas);
    let sums = lend(&mut scratch, sums);
    let columns = table(lend(&mut scratch, columns));
    let pixels = table(lend(&mut scratch, pixels));
    let places = table(lend(&mut scratch, places));
    assert!(u32::try_from(canvas.len()).is_ok(), "offsets are 32 bits");
    let dw = Address(dw.as_mut_ptr());
    for group in 0..shape.window.groups {
        for first in (0..shape.inputs).step_by(cut.channels) {
            let channels = first..(first + cut.channels).min(shape.inputs);
            let part = Part { shape, cut: &cut, group, channels };
            part.list(columns, pixels, places);
            canvas.fill(0.0);
            let offsets = Offsets { columns: &columns[..part.columns()], pixels, places };
            let c = part.target(sums, dw);
            part.multiply((team, scratch), x, grad, canvas, offsets, c);
            part.put_right(team, sums, dw);
        }
    }
}

/// Offsets on the canvas: of columns (tap, channel), of output pixels, of image pixels.
#[derive(Clone, Copy)]
struct Offsets<'a> {
    columns: &'a [u32],
    pixels: &'a [u32],
    places: &'a [u32],
}

/// Some input channels of one group.
struct Part<'a> {
    shape: &'a Shape,
    cut: &'a Cut,
    group: usize,
    channels: Range<usize>,
}

impl Part<'_> {
    fn columns(&self) -> usize {
        self.shape.taps() * self.channels.len()
    }

    /// Fills the tables of offsets on the canvas: of columns (tap, channel), of output pixels, of image pixels.
    fn list(&self, columns: &mut [u32], pixels: &mut [u32], places: &mut [u32]) {
        let (shape, window, channels) = (self.shape, &self.shape.window, self.channels.len());
        let place = |y: usize, x: usize| (y * self.cut.width + x) * channels;
        for (tap, slots) in columns.chunks_mut(channels).enumerate().take(shape.taps()) {
            let (ky, kx) = (tap / shape.kernel[1], tap % shape.kernel[1]);
            let start = place(ky * window.dilation[0], kx * window.dilation[1]);
            slots.iter_mut().enumerate().for_each(|(channel, slot)| *slot = (start + channel) as u32);
        }
        let image = self.cut.height * self.cut.width * channels;
        for (row, slots) in pixels.chunks_exact_mut(shape.grid[1]).enumerate() {
            let start = row / shape.grid[0] * image + place(row % shape.grid[0] * window.stride[0], 0);
            let step = window.stride[1] * channels;
            slots.iter_mut().enumerate().for_each(|(x, slot)| *slot = (start + x * step) as u32);
        }
        for (y, slots) in places.chunks_exact_mut(shape.image[1]).enumerate() {
            let start = place(y + window.padding.before[0], window.padding.before[1]);
            slots.iter_mut().enumerate().for_each(|(x, slot)| *slot = (start + x * channels) as u32);
        }
    }

    /// Transposes these channels of some images onto the canvas.
    fn fill_canvas(&self, team: &Team, x: &[f32], images: Range<usize>, places: &[u32], canvas: &mut [f32]) {
        let (shape, channels, pixels) = (self.shape, self.channels.len(), self.shape.image_pixels());
        let image_len = self.cut.height * self.cut.width * channels;
        assert!(canvas.len() >= images.len() * image_len, "room for every image");
        let address = Address(canvas.as_mut_ptr());
        team.run(images.len(), |at, _| {
            let plane = ((images.start + at) * shape.window.groups + self.group) * shape.inputs + self.channels.start;
            let source = &x[plane * pixels..(plane + channels) * pixels];
            // SAFETY: the source holds every channel; each task has its own image of the canvas.
            unsafe {
                let image = address.slice(at * image_len, image_len).as_mut_ptr();
                transpose(source.as_ptr(), pixels, channels, pixels, |pixel| image.add(places[pixel] as usize));
            }
        });
    }

    /// Where the sums go: of one tap, straight into the gradient.
    fn target(&self, sums: &mut [f32], dw: Address) -> Rows {
        match self.shape.taps() {
            // SAFETY: the first of these channels is inside the gradient.
            1 => Rows { data: Address(unsafe { dw.get().add(self.place(0)) }), stride: self.shape.inputs },
            _ => Rows { data: Address(sums.as_mut_ptr()), stride: self.columns() },
        }
    }

    fn multiply(
        &self,
        (team, scratch): (&Team, &mut [f32]),
        x: &[f32],
        grad: &[f32],
        canvas: &mut [f32],
        Offsets { columns, pixels, places }: Offsets<'_>,
        c: Rows,
    ) {
        let (shape, grid) = (self.shape, self.shape.grid_pixels());
        let image_stride = shape.window.groups * shape.outputs * grid;
        for first in (0..shape.images.max(1)).step_by(self.cut.images) {
            let images = first..(first + self.cut.images).min(shape.images);
            self.fill_canvas(team, x, images.clone(), places, canvas);
            // Once, even without images: no terms are zero.
            for unit in (first..images.end.max(first + 1)).step_by(self.cut.unit) {
                let ends = [unit, (unit + self.cut.unit).min(images.end)].map(|image| (image - first) * grid);
                let pixels = &pixels[ends[0]..ends[1]];
                let data = grad.get(unit * image_stride + self.group * shape.outputs * grid..).unwrap_or(&[]);
                let a = Runs { data, line_stride: grid, run: grid, jump: image_stride };
                let b = Right::Fresh(&Patches::new(canvas, columns, pixels));
                let start = if unit == 0 { Start::Zero } else { Start::Add };
                let shape = [shape.outputs, columns.len(), pixels.len()];
                Gemm { shape, a: &a, b, c: &c, start }.run_on(team, scratch);
            }
        }
    }

    /// Where output channel `output` of these channels starts in the weights.
    fn place(&self, output: usize) -> usize {
        ((self.group * self.shape.outputs + output) * self.shape.inputs + self.channels.start) * self.shape.taps()
    }

    /// From `(tap, channel)` to `(channel, tap)`.
    fn put_right(&self, team: &Team, sums: &[f32], dw: Address) {
        let (taps, channels, columns) = (self.shape.taps(), self.channels.len(), self.columns());
        if taps == 1 {
            return;
        }
        team.chunks(self.shape.outputs, (16 * 1024 / columns).max(1), |range, _| {
            for output in range {
                let source = &sums[output * columns..(output + 1) * columns];
                // SAFETY: every output channel has its own part of the weights.
                unsafe {
                    let out = dw.slice(self.place(output), columns).as_mut_ptr();
                    transpose(source.as_ptr(), channels, taps, channels, |channel| out.add(channel * taps));
                }
            }
        });
    }
}
