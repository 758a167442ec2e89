//! Copies around an exchange of halos: what a rank sends is packed, what it gets is put beside what it has.

use super::{Allocate, Exchange, ExchangeError, Rows, Staging};
use crate::memory::Memory;
use kolo_graph::collective::AxisHalo;
use kolo_graph::cpu::Buffer;
use std::ops::Range;

impl Staging {
    /// Packs what others read of the input, and takes the output from what they send and from the input itself.
    pub(super) fn halo(
        &mut self,
        halo: &AxisHalo,
        input: &Buffer,
        output: &Buffer,
        exchange: &mut Exchange,
        memory: Allocate<'_>,
    ) -> Result<(), ExchangeError> {
        let shape = &input.ty.shape;
        let (rows, width) = (shape[..halo.dim].iter().product(), input.ty.dtype.bytes());
        let inner: usize = shape[halo.dim + 1..].iter().product();
        let runs = |between: &dyn Fn(usize) -> Range<usize>| -> Vec<Range<usize>> {
            let other = |rank: usize| if rank == halo.rank { 0..0 } else { between(rank) };
            (0..halo.ranks()).map(other).collect()
        };
        let sent = runs(&|to| halo.between(halo.rank, to));
        let received = runs(&|from| halo.between(from, halo.rank));
        let places = |runs: &[Range<usize>]| runs.iter().map(Range::len).sum::<usize>();
        let most = places(&sent).max(places(&received));
        let mut strided = Strided { rows, bytes: inner * width, most, memory: Vec::new(), parts: Vec::new() };
        let before = strided.runs(&sent, (input.data, halo.own(halo.rank)), memory)?;
        let after = strided.runs(&received, (output.data, halo.wanted(halo.rank)), memory)?;
        self.before.extend(before);
        self.before.push(strided.kept(halo, input, output));
        self.after.extend(after.into_iter().map(Rows::reversed));
        let of_bytes = |(offset, count): &(usize, usize)| (offset / width, count / width);
        exchange.parts = strided.parts.iter().map(of_bytes).collect();
        (exchange.input, exchange.output) = (strided.memory[0].at(0), strided.memory[1].at(0));
        exchange.elements = most * rows * inner;
        self.memory.append(&mut strided.memory);
        Ok(())
    }
}

/// Runs of places along a dim of tensors that have so many rows around it, each place of so many bytes in a row.
struct Strided {
    rows: usize,
    bytes: usize,
    /// Places that the memory of packed runs has room for.
    most: usize,
    memory: Vec<Memory>,
    /// Offset and count, in bytes, of each run in the memory that it is packed in.
    parts: Vec<(usize, usize)>,
}

impl Strided {
    /// The copies that pack some runs of a tensor, which has the places `held`, one behind the other in memory of their own.
    fn runs(
        &mut self,
        runs: &[Range<usize>],
        (data, held): (*mut u8, Range<usize>),
        memory: Allocate<'_>,
    ) -> Result<Vec<Rows>, ExchangeError> {
        let memory = memory((self.most * self.rows * self.bytes).max(1))?;
        let (mut copies, mut offset) = (Vec::new(), 0);
        for run in runs {
            let bytes = run.len() * self.bytes;
            self.parts.push((offset, bytes * self.rows));
            if !run.is_empty() {
                let from = data.wrapping_add((run.start - held.start) * self.bytes);
                let from_stride = held.len() * self.bytes;
                copies.push(Rows {
                    from,
                    to: memory.at(offset),
                    rows: self.rows,
                    bytes,
                    from_stride,
                    to_stride: bytes,
                });
            }
            offset += bytes * self.rows;
        }
        self.memory.push(memory);
        Ok(copies)
    }

    /// The copy of what a rank gets from itself.
    fn kept(&self, halo: &AxisHalo, input: &Buffer, output: &Buffer) -> Rows {
        let (own, wanted) = (halo.own(halo.rank), halo.wanted(halo.rank));
        let run = halo.between(halo.rank, halo.rank);
        let inside = |held: &Range<usize>| run.start.saturating_sub(held.start).min(held.len()) * self.bytes;
        let (from, to) = (input.data.wrapping_add(inside(&own)), output.data.wrapping_add(inside(&wanted)));
        let (from_stride, to_stride) = (own.len() * self.bytes, wanted.len() * self.bytes);
        Rows { from, to, rows: self.rows, bytes: run.len() * self.bytes, from_stride, to_stride }
    }
}
