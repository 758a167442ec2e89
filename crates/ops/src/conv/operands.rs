//! Operands and sinks of the matrix products inside a convolution. None of them is ever stored as a matrix.

use super::transpose::transpose;
use crate::gemm::{Operand, Sink};
use crate::tiles::Address;
use crate::vectorized;
use std::ops::Range;

/// Lines per sliver, at most.
const WIDTH_MAX: usize = 32;
/// Numbers moved at a time where runs have any length.
const CHUNK: usize = 16;

/// An operand whose number at (`line`, `k`) is `data[lines[line] + ks[k]]`: patches of an image, seen from either side.
#[derive(Clone, Copy, Debug)]
pub struct Patches<'a> {
    data: &'a [f32],
    lines: &'a [u32],
    ks: &'a [u32],
    /// Reading a whole sliver's width from any place stays inside `data`.
    slack: bool,
}

/// Numbers behind the last one read that `data` should have, so that runs can be copied in whole chunks.
pub const SLACK: usize = WIDTH_MAX;

impl<'a> Patches<'a> {
    pub fn new(data: &'a [f32], lines: &'a [u32], ks: &'a [u32]) -> Self {
        let highest = |table: &[u32]| table.iter().copied().max().unwrap_or(0) as usize;
        let last = highest(lines) + highest(ks);
        assert!(last < data.len() || lines.is_empty() || ks.is_empty(), "offsets must stay inside the image");
        Self { data, lines, ks, slack: last + SLACK <= data.len() }
    }
}

impl Operand for Patches<'_> {
    fn pack(&self, first: usize, count: usize, ks: Range<usize>, width: usize, out: &mut [f32]) {
        let (lines, ks) = (&self.lines[first..first + count], &self.ks[ks]);
        assert!(out.len() >= ks.len() * width && count <= width && width <= WIDTH_MAX, "room for every k");
        if count < width {
            return pack_part(self.data, lines, ks, width, out);
        }
        match piece_width(lines) {
            32 => pack_32(self.data, lines, ks, out),
            16 => pack_16(self.data, lines, ks, width, out),
            8 => pack_8(self.data, lines, ks, width, out),
            4 => pack_4(self.data, lines, ks, width, out),
            _ if self.slack => pack_runs(self.data, lines, ks, width, out),
            _ => pack_part(self.data, lines, ks, width, out),
        }
    }
}

/// The largest power of two such that the lines fall into straight, aligned pieces of it.
fn piece_width(lines: &[u32]) -> usize {
    let mut breaks = lines.len();
    for at in 1..lines.len() {
        breaks |= if lines[at] == lines[at - 1] + 1 { 0 } else { at };
    }
    1 << breaks.trailing_zeros()
}

/// # Safety
/// `WIDTH` numbers can be read and written there.
#[inline(always)]
unsafe fn copy<const WIDTH: usize>(from: *const f32, to: *mut f32) {
    // SAFETY: by the caller's promise.
    unsafe { to.cast::<[f32; WIDTH]>().write_unaligned(from.cast::<[f32; WIDTH]>().read_unaligned()) }
}

/// Copies `len` numbers without calling out: runs are short.
///
/// # Safety
/// `len` numbers can be read and written there, and the two places are apart.
#[inline(always)]
pub unsafe fn copy_run(from: *const f32, to: *mut f32, len: usize) {
    let mut at = 0;
    // SAFETY: every piece ends at or before `len`; pieces that overlap write the same numbers twice.
    unsafe {
        while at + 16 <= len {
            copy::<16>(from.add(at), to.add(at));
            at += 16;
        }
        match len {
            _ if at == len => {}
            16.. => copy::<16>(from.add(len - 16), to.add(len - 16)),
            8.. => {
                copy::<8>(from, to);
                copy::<8>(from.add(len - 8), to.add(len - 8));
            }
            4.. => {
                copy::<4>(from, to);
                copy::<4>(from.add(len - 4), to.add(len - 4));
            }
            _ => (0..len).for_each(|at| *to.add(at) = *from.add(at)),
        }
    }
}

#[inline(always)]
fn pack_pieces<const PIECE: usize>(data: &[f32], lines: &[u32], ks: &[u32], width: usize, out: &mut [f32]) {
    let (data, mut out) = (data.as_ptr(), out.as_mut_ptr());
    let mut bases = [0; WIDTH_MAX];
    let pieces = width / PIECE;
    for (base, line) in bases.iter_mut().zip(lines.iter().step_by(PIECE)) {
        *base = *line as usize;
    }
    for k in ks {
        for (piece, base) in bases[..pieces].iter().enumerate() {
            // SAFETY: the lines of a piece follow each other, and every line and k together are inside `data`.
            unsafe { copy::<PIECE>(data.add(base + *k as usize), out.add(piece * PIECE)) };
        }
        // SAFETY: `out` has `width` numbers for every k.
        out = unsafe { out.add(width) };
    }
}

vectorized! {
    fn pack_32(data: &[f32], lines: &[u32], ks: &[u32], out: &mut [f32]) {
        pack_pieces::<32>(data, lines, ks, 32, out);
    }
}

vectorized! {
    fn pack_16(data: &[f32], lines: &[u32], ks: &[u32], width: usize, out: &mut [f32]) {
        match width {
            32 => pack_pieces::<16>(data, lines, ks, 32, out),
            _ => pack_pieces::<16>(data, lines, ks, width, out),
        }
    }
}

vectorized! {
    fn pack_8(data: &[f32], lines: &[u32], ks: &[u32], width: usize, out: &mut [f32]) {
        match width {
            32 => pack_pieces::<8>(data, lines, ks, 32, out),
            _ => pack_pieces::<8>(data, lines, ks, width, out),
        }
    }
}

vectorized! {
    fn pack_4(data: &[f32], lines: &[u32], ks: &[u32], width: usize, out: &mut [f32]) {
        match width {
            32 => pack_pieces::<4>(data, lines, ks, 32, out),
            _ => pack_pieces::<4>(data, lines, ks, width, out),
        }
    }
}

/// A straight run of lines: where it goes in the sliver, where it starts, how long it is.
#[derive(Clone, Copy, Default)]
struct Run {
    to: usize,
    base: usize,
    len: usize,
}

/// The runs of the lines, in order.
fn runs_of(lines: &[u32]) -> ([Run; WIDTH_MAX], usize) {
    let mut runs = [Run::default(); WIDTH_MAX];
    let mut count = 0;
    for (at, line) in lines.iter().enumerate() {
        if at > 0 && *line == lines[at - 1] + 1 {
            runs[count - 1].len += 1;
        } else {
            runs[count] = Run { to: at, base: *line as usize, len: 1 };
            count += 1;
        }
    }
    (runs, count)
}

vectorized! {
    /// Runs of any length, copied in whole chunks: what a chunk writes too much, the next run or the next k overwrites.
    fn pack_runs(data: &[f32], lines: &[u32], ks: &[u32], width: usize, out: &mut [f32]) {
        let (runs, count) = runs_of(lines);
        let Some((last, ks)) = ks.split_last() else { return };
        let (source, to) = (data.as_ptr(), out.as_mut_ptr());
        for (at, k) in ks.iter().enumerate() {
            for run in &runs[..count] {
                for done in (0..run.len).step_by(CHUNK) {
                    let place = at * width + run.to + done;
                    // SAFETY: `data` has slack behind its last number, and at least one more k follows in `out`; a chunk
                    // goes less than a chunk, which is no more than a sliver's width, beyond its run.
                    unsafe { copy::<CHUNK>(source.add(run.base + *k as usize + done), to.add(place)) };
                }
            }
        }
        pack_part(data, lines, &[*last], width, &mut out[ks.len() * width..]);
    }
}

vectorized! {
    /// Any number of lines, not one number too many.
    fn pack_part(data: &[f32], lines: &[u32], ks: &[u32], width: usize, out: &mut [f32]) {
        let (runs, count) = runs_of(lines);
        for (k, row) in ks.iter().zip(out.chunks_exact_mut(width)) {
            for run in &runs[..count] {
                // SAFETY: every line and k together are inside `data`, and the runs together are as long as `lines`.
                unsafe { copy_run(data.as_ptr().add(run.base + *k as usize), row.as_mut_ptr().add(run.to), run.len) };
            }
            row[lines.len()..].fill(0.0);
        }
    }
}

/// An operand whose lines lie along `k` in straight runs: `data[line · line_stride + (k / run) · jump + k % run]`.
#[derive(Clone, Copy, Debug)]
pub struct Runs<'a> {
    pub data: &'a [f32],
    pub line_stride: usize,
    pub run: usize,
    pub jump: usize,
}

impl Operand for Runs<'_> {
    fn pack(&self, first: usize, count: usize, ks: Range<usize>, width: usize, out: &mut [f32]) {
        let mut k = ks.start;
        while k < ks.end {
            let inside = k % self.run;
            let len = (self.run - inside).min(ks.end - k);
            let source = &self.data[first * self.line_stride + k / self.run * self.jump + inside..];
            let rows = &mut out[(k - ks.start) * width..(k - ks.start + len) * width];
            assert!(count <= width && source.len() >= (count - 1) * self.line_stride + len, "lines inside the operand");
            let to = rows.as_mut_ptr();
            // SAFETY: both sides were checked just above.
            unsafe { transpose(source.as_ptr(), self.line_stride, count, len, |k| to.add(k * width)) };
            rows.chunks_exact_mut(width).filter(|_| count < width).for_each(|row| row[count..].fill(0.0));
            k += len;
        }
    }
}

/// An operand whose number at (`line`, `k`) is `data[line · line_stride + ks[k]]`.
#[derive(Clone, Copy, Debug)]
pub struct Scattered<'a> {
    pub data: &'a [f32],
    pub line_stride: usize,
    pub ks: &'a [u32],
}

impl Operand for Scattered<'_> {
    fn pack(&self, first: usize, count: usize, ks: Range<usize>, width: usize, out: &mut [f32]) {
        let (data, ks) = (&self.data[first * self.line_stride..], &self.ks[ks]);
        let highest = ks.iter().copied().max().unwrap_or(0) as usize;
        assert!(count <= width && highest + (count - 1) * self.line_stride < data.len(), "lines inside the operand");
        for (k, row) in ks.iter().zip(out.chunks_exact_mut(width)) {
            // SAFETY: the offset is at most the highest.
            let source = unsafe { data.as_ptr().add(*k as usize) };
            row[count..].fill(0.0);
            for (line, slot) in row[..count].iter_mut().enumerate() {
                // SAFETY: the last line of the highest offset is inside, as checked above.
                *slot = unsafe { *source.add(line * self.line_stride) };
            }
        }
    }
}

/// Images to write: a row of the product is a channel, a column a pixel of one image after the other.
#[derive(Clone, Copy, Debug)]
pub struct Planes {
    pub data: Address,
    pub image_stride: usize,
    /// Pixels of one image.
    pub pixels: usize,
}

impl Planes {
    fn at(&self, row: usize, column: usize) -> *mut f32 {
        let offset = column / self.pixels * self.image_stride + row * self.pixels + column % self.pixels;
        // SAFETY: the caller made the images large enough for every row and column of the product.
        unsafe { self.data.get().add(offset) }
    }
}

impl Sink for Planes {
    fn place(&self, row: usize, column: usize, _: usize, columns: usize) -> Option<(*mut f32, usize)> {
        (column % self.pixels + columns <= self.pixels).then(|| (self.at(row, column), self.pixels))
    }

    fn transfer(&self, [row, column, rows, columns]: [usize; 4], tile: &mut [f32], load: bool) {
        let width = tile.len() / rows;
        let mut done = 0;
        while done < columns {
            let run = (self.pixels - (column + done) % self.pixels).min(columns - done);
            let start = self.at(row, column + done);
            for at in 0..rows {
                let kept = &mut tile[at * width + done..at * width + done + run];
                // SAFETY: the run ends with its image at the latest.
                unsafe {
                    let place = start.add(at * self.pixels);
                    match load {
                        true => copy_run(place, kept.as_mut_ptr(), run),
                        false => copy_run(kept.as_ptr(), place, run),
                    }
                }
            }
            done += run;
        }
    }
}
