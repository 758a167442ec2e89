//! Writes a program from a plain sequence of actions: what must wait for what follows from the places they touch.
//!
//! An action waits for the last writer of every element it reads, and for the last readers and writer of every element
//! it writes. So an algorithm reads like sequential code, and what is independent still overlaps.

use super::CallShape;
use crate::call::CallKind;
use crate::program::{BufferRange, CollectiveAction, CollectiveProgram, Region};
use crate::task::RankPart;
use std::collections::BTreeMap;

#[derive(Debug)]
pub struct ProgramBuilder {
    program: CollectiveProgram,
    /// Elements of a message at most, so that combining overlaps with receiving.
    segment: usize,
    in_place: bool,
    /// Where input and output lie in the memory they share when in place.
    shifts: [usize; 2],
    caller: History,
    scratch: History,
}

/// Who last touched which elements.
#[derive(Debug, Default)]
struct History(BTreeMap<usize, HistorySpan>);

#[derive(Clone, Debug, Default)]
struct HistorySpan {
    end: usize,
    writer: Option<usize>,
    /// Since the last write.
    readers: Vec<usize>,
}

impl History {
    /// Makes `at` a border between spans.
    fn cut(&mut self, at: usize) {
        if let Some((_, span)) = self.0.range_mut(..at).next_back()
            && span.end > at
        {
            let right = span.clone();
            span.end = at;
            self.0.insert(at, right);
        }
    }

    fn read(&mut self, start: usize, end: usize, by: usize, after: &mut Vec<usize>) {
        self.cut(start);
        self.cut(end);
        let mut gaps = Vec::new();
        let mut at = start;
        for (from, span) in self.0.range_mut(start..end) {
            if at < *from {
                gaps.push((at, *from));
            }
            after.extend(span.writer);
            span.readers.push(by);
            at = span.end;
        }
        if at < end {
            gaps.push((at, end));
        }
        for (from, end) in gaps {
            self.0.insert(from, HistorySpan { end, writer: None, readers: vec![by] });
        }
    }

    fn write(&mut self, start: usize, end: usize, by: usize, after: &mut Vec<usize>) {
        self.cut(start);
        self.cut(end);
        while let Some((from, span)) = self.0.range(start..end).next().map(|(from, span)| (*from, span.clone())) {
            after.extend(span.writer);
            after.extend(span.readers);
            self.0.remove(&from);
        }
        self.0.insert(start, HistorySpan { end, writer: Some(by), readers: Vec::new() });
    }
}

/// The part of a place from `offset` on.
pub fn slice(range: BufferRange, offset: usize, count: usize) -> BufferRange {
    BufferRange { offset: range.offset + offset, count, ..range }
}

pub fn range(region: Region, part: RankPart) -> BufferRange {
    BufferRange { region, offset: part.offset, count: part.count }
}

impl ProgramBuilder {
    pub fn new(shape: &CallShape<'_>) -> Self {
        Self {
            program: CollectiveProgram::default(),
            segment: shape.segment.max(1),
            in_place: shape.in_place,
            shifts: shape.shifts(),
            caller: History::default(),
            scratch: History::default(),
        }
    }

    pub fn finish(self) -> CollectiveProgram {
        self.program
    }

    /// Scratch that nothing else uses.
    pub fn scratch(&mut self, count: usize) -> BufferRange {
        let offset = self.program.scratch;
        self.program.scratch += count;
        BufferRange { region: Region::Scratch, offset, count }
    }

    /// Elements of one message at most.
    pub fn segment(&self) -> usize {
        self.segment
    }

    /// A place cut to segments; nothing if it is empty.
    pub fn segments(&self, whole: BufferRange) -> impl Iterator<Item = BufferRange> + use<> {
        let segment = self.segment;
        (0..whole.count).step_by(segment).map(move |offset| slice(whole, offset, segment.min(whole.count - offset)))
    }

    fn push(
        &mut self,
        action: CollectiveAction,
        reads: &[BufferRange],
        write: Option<BufferRange>,
        mut after: Vec<usize>,
    ) -> usize {
        let number = self.program.instructions.len();
        for (range, writes) in reads.iter().map(|range| (*range, false)).chain(write.map(|range| (range, true))) {
            let (history, shift) = match range.region {
                Region::Scratch => (&mut self.scratch, 0),
                // Nobody writes an input of its own.
                Region::Input if !self.in_place => continue,
                Region::Input => (&mut self.caller, self.shifts[0]),
                Region::Output => (&mut self.caller, self.shifts[1]),
            };
            if range.count > 0 {
                let (start, end) = (range.offset + shift, range.offset + shift + range.count);
                if writes {
                    history.write(start, end, number, &mut after);
                } else {
                    history.read(start, end, number, &mut after);
                }
            }
        }
        after.retain(|earlier| *earlier != number);
        after.sort_unstable();
        after.dedup();
        self.program.push(action, &after)
    }

    /// One message, even if it is empty.
    pub fn send_one(&mut self, to: usize, from: BufferRange) -> usize {
        self.push(CollectiveAction::Send { to, from }, &[from], None, Vec::new())
    }

    /// One message, even if it is empty.
    pub fn recv_one(&mut self, from: usize, into: BufferRange) -> usize {
        self.push(CollectiveAction::Recv { from, into }, &[], Some(into), Vec::new())
    }

    /// An empty message that leaves when all of `after` are done.
    pub fn signal(&mut self, to: usize, after: &[usize]) -> usize {
        let nothing = BufferRange { region: Region::Scratch, offset: 0, count: 0 };
        self.push(CollectiveAction::Send { to, from: nothing }, &[], None, after.to_vec())
    }

    pub fn send(&mut self, to: usize, from: BufferRange) {
        for segment in self.segments(from) {
            self.send_one(to, segment);
        }
    }

    pub fn recv(&mut self, from: usize, into: BufferRange) {
        for segment in self.segments(into) {
            self.recv_one(from, segment);
        }
    }

    /// As [`Self::send`], but an empty place is one empty message.
    pub fn send_message(&mut self, to: usize, from: BufferRange) {
        if from.count == 0 {
            self.send_one(to, from);
        }
        self.send(to, from);
    }

    /// As [`Self::recv`], but an empty place is one empty message.
    pub fn recv_message(&mut self, from: usize, into: BufferRange) {
        if into.count == 0 {
            self.recv_one(from, into);
        }
        self.recv(from, into);
    }

    /// Copies by segments; nothing where source and target are the same memory.
    pub fn copy(&mut self, from: BufferRange, into: BufferRange) {
        if self.in_place && self.home(from).is_some() && self.home(from) == self.home(into) {
            return;
        }
        for (from, into) in self.segments(from).zip(self.segments(into)) {
            self.push(CollectiveAction::Copy { from, into }, &[from], Some(into), Vec::new());
        }
    }

    fn home(&self, range: BufferRange) -> Option<usize> {
        match range.region {
            Region::Scratch => None,
            Region::Input => Some(range.offset + self.shifts[0]),
            Region::Output => Some(range.offset + self.shifts[1]),
        }
    }

    /// One combination, of places of the same length.
    pub fn combine(&mut self, left: BufferRange, right: BufferRange, into: BufferRange) {
        self.push(CollectiveAction::Combine { left, right, into }, &[left, right], Some(into), Vec::new());
    }

    /// Combines by segments.
    pub fn combine_all(&mut self, left: BufferRange, right: BufferRange, into: BufferRange) {
        let segments = self.segments(left).zip(self.segments(right)).zip(self.segments(into));
        for ((left, right), into) in segments {
            self.combine(left, right, into);
        }
    }

    /// The end of a mean.
    pub fn divide(&mut self, whole: BufferRange) {
        for range in self.segments(whole) {
            self.push(CollectiveAction::Divide { range }, &[range], Some(range), Vec::new());
        }
    }

    /// Combines places of equal length in tree order. All but at most one are scratch, whose content is lost.
    pub fn tree(&mut self, mut leaves: Vec<BufferRange>, into: BufferRange) {
        if let [only] = leaves[..] {
            return self.copy(only, into);
        }
        let mut stride = 1;
        while stride < leaves.len() {
            let last = 2 * stride >= leaves.len();
            for at in (0..leaves.len() - stride).step_by(2 * stride) {
                let (left, right) = (leaves[at], leaves[at + stride]);
                let target = if last {
                    into
                } else if left.region == Region::Scratch {
                    left
                } else {
                    right
                };
                self.combine(left, right, target);
                leaves[at] = target;
            }
            stride *= 2;
        }
    }
}

impl CallShape<'_> {
    /// Where input and output lie in the memory they share when in place, in elements.
    pub fn shifts(&self) -> [usize; 2] {
        let own = self.recv.get(self.rank).map_or(0, |part| part.offset);
        match self.kind {
            CallKind::Gather | CallKind::AllGather => [own, 0],
            CallKind::ReduceScatter | CallKind::Scatter => [0, own],
            _ => [0, 0],
        }
    }
}
