//! Images with their padding around them, so that reading a patch has no border cases.
//!
//! Columns are dealt out by their remainder modulo the stride, so that neighbouring outputs read neighbouring numbers
//! whatever the stride. An image that needs neither is read where it is.

use super::operands::copy_run;
use super::taps::Taps;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::Team;

/// Channels of some images: `data[image · image_stride + channel · pixels + pixel]`.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    pub data: &'a [f32],
    pub image_stride: usize,
    pub channels: usize,
}

/// Where pixels lie on the canvas.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    rows: Taps,
    columns: Taps,
    /// Remainders of columns that some tap reads.
    phases: usize,
    /// Columns of one remainder.
    width: usize,
    height: usize,
    /// The image itself serves as canvas.
    pub direct: bool,
}

impl Layout {
    pub fn new([rows, columns]: [Taps; 2]) -> Self {
        let phases = (0..columns.count).map(|tap| columns.above(tap) % columns.stride).max().unwrap_or(0) + 1;
        let width = columns.outputs + columns.spread() / columns.stride;
        let height = rows.span();
        let inside = |taps: &Taps, span: usize| taps.low() >= 0 && taps.low() as usize + span <= taps.source;
        let direct = columns.stride == 1 && inside(&rows, height) && inside(&columns, width);
        Self { rows, columns, phases, width, height, direct }
    }

    fn pitch(&self) -> usize {
        if self.direct { self.columns.source } else { self.phases * self.width }
    }

    /// Numbers of one channel.
    pub fn plane(&self) -> usize {
        if self.direct { self.rows.source * self.columns.source } else { self.height * self.pitch() }
    }

    fn image_stride(&self, source: &Source<'_>) -> usize {
        if self.direct { source.image_stride } else { source.channels * self.plane() }
    }

    /// The first tap's place for each output pixel, image by image.
    pub fn pixel_offsets(&self, source: &Source<'_>, table: &mut [u32]) {
        let origin = match self.direct {
            true => self.rows.low() as usize * self.pitch() + self.columns.low() as usize,
            false => 0,
        };
        let grid = self.rows.outputs * self.columns.outputs;
        for (image, table) in table.chunks_exact_mut(grid).enumerate() {
            for (row, table) in table.chunks_exact_mut(self.columns.outputs).enumerate() {
                let start = origin + image * self.image_stride(source) + row * self.rows.stride * self.pitch();
                table.iter_mut().enumerate().for_each(|(column, slot)| *slot = (start + column) as u32);
            }
        }
    }

    /// What to add for each channel and tap, channel by channel.
    pub fn tap_offsets(&self, table: &mut [u32]) {
        let mut slots = table.iter_mut();
        for channel in 0..slots.len() / (self.rows.count * self.columns.count).max(1) {
            for row in 0..self.rows.count {
                for (column, slot) in (0..self.columns.count).zip(&mut slots) {
                    let above = self.columns.above(column);
                    let place = above % self.columns.stride * self.width + above / self.columns.stride;
                    *slot = (channel * self.plane() + self.rows.above(row) * self.pitch() + place) as u32;
                }
            }
        }
    }

    /// Copies the pixels of `planes` onto their places; the zeros around them are left alone.
    pub fn fill_canvas(&self, team: &Team, source: &Source<'_>, first: usize, images: usize, canvas: &mut [f32]) {
        let pixels = self.rows.source * self.columns.source;
        let plane = self.plane();
        let address = Address(canvas.as_mut_ptr());
        assert!(canvas.len() >= images * source.channels * plane, "room for every channel");
        team.chunks(images * source.channels, (PIXELS_PER_TASK / pixels).max(1), |range, _| {
            for at in range {
                let from = (first + at / source.channels) * source.image_stride + at % source.channels * pixels;
                // SAFETY: every task has its own planes.
                let to = unsafe { address.slice(at * plane, plane) };
                paint_plane(self, &source.data[from..from + pixels], to);
            }
        });
    }
}

const PIXELS_PER_TASK: usize = 16 * 1024;

vectorized! {
    fn paint_plane(layout: &Layout, source: &[f32], canvas: &mut [f32]) {
        let (rows, columns) = (&layout.rows, &layout.columns);
        let (stride, pitch, source_width) = (columns.stride, layout.pitch(), columns.source);
        let highest = (rows.low() + layout.height as isize).clamp(0, rows.source as isize) as usize;
        for phase in 0..layout.phases {
            // Column `q` of this remainder is pixel `low + q · stride + phase`.
            let start = columns.low() + phase as isize;
            let first = (-start).max(0) as usize;
            let first = first.div_ceil(stride);
            let from = (start + (first * stride) as isize) as usize;
            let count = source_width.saturating_sub(from).div_ceil(stride).min(layout.width.saturating_sub(first));
            if count == 0 {
                continue;
            }
            for row in rows.low().max(0) as usize..highest {
                let line = &source[row * source_width + from..(row + 1) * source_width];
                let at = (row as isize - rows.low()) as usize * pitch + phase * layout.width + first;
                let out = &mut canvas[at..at + count];
                match stride {
                    // SAFETY: both sides hold `count` numbers and are different buffers.
                    1 => unsafe { copy_run(line[..count].as_ptr(), out.as_mut_ptr(), count) },
                    2 => take_even(line, out),
                    _ => out.iter_mut().zip(line.iter().step_by(stride)).for_each(|(out, pixel)| *out = *pixel),
                }
            }
        }
    }
}

/// Every other pixel.
#[inline(always)]
fn take_even(line: &[f32], out: &mut [f32]) {
    let whole = out.len().min(line.len() / 2);
    for (out, pair) in out[..whole].iter_mut().zip(line.chunks_exact(2)) {
        *out = pair[0];
    }
    if whole < out.len() {
        out[whole] = line[2 * whole];
    }
}
