//! Which elements of a tensor a shard has: equal runs at equal distances, in the order of memory.

use std::ops::Range;

/// Runs of `run` elements, `stride` apart, the first of which begins at `start`. Of the elements of those runs the shard has
/// the ones from number `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    pub start: usize,
    pub run: usize,
    pub stride: usize,
    pub first: usize,
}

impl Region {
    /// Elements from `start` on.
    pub fn from(start: usize) -> Self {
        Self { start, run: usize::MAX, stride: 0, first: 0 }
    }

    /// The elements `range` of each of the blocks of a dim, of a tensor of this shape. `blocks` divides the dim.
    pub fn of_dim(shape: &[usize], dim: usize, blocks: usize, range: &Range<usize>) -> Self {
        let inner: usize = shape[dim + 1..].iter().product();
        let block = shape[dim] / blocks.max(1);
        if range.len() == block {
            return Self::from(0);
        }
        Self { start: range.start * inner, run: range.len() * inner, stride: block * inner, first: 0 }
    }

    /// The first element of the tensor that it has.
    pub fn first(&self) -> usize {
        self.place(0).0
    }

    /// Whether a shard of so many elements lies in a tensor of so many, each element once.
    pub fn fits(&self, elements: usize, whole: usize) -> bool {
        if self.is_run() {
            return self.start.checked_add(elements).is_some_and(|end| end <= whole);
        }
        let Some(last) = self.first.checked_add(elements).map(|end| end.saturating_sub(1)) else { return false };
        let begin = (last / self.run.max(1)).checked_mul(self.stride).and_then(|at| at.checked_add(self.start));
        let end = begin.and_then(|at| at.checked_add(last % self.run.max(1)));
        self.run > 0 && self.run <= self.stride && end.is_some_and(|end| end < whole)
    }

    /// The same shard from one of its elements on.
    pub fn skip(self, elements: usize) -> Self {
        match self.is_run() {
            true => Self::from(self.start + elements),
            false => Self { first: self.first + elements, ..self },
        }
    }

    /// Whether its elements lie side by side, however many it has.
    pub fn is_run(&self) -> bool {
        self.run == usize::MAX
    }

    /// Where element `local` of the shard is in the tensor, and how many follow it there side by side.
    fn place(&self, local: usize) -> (usize, usize) {
        if self.is_run() {
            return (self.start + local, usize::MAX);
        }
        let at = self.first + local;
        let within = at % self.run.max(1);
        (self.start + at / self.run.max(1) * self.stride + within, self.run - within)
    }

    /// The runs of these elements of the shard: (the first in the shard, the same in the tensor, how many).
    pub fn runs(self, elements: Range<usize>) -> impl Iterator<Item = (usize, usize, usize)> {
        let mut at = elements.start;
        std::iter::from_fn(move || {
            if at >= elements.end {
                return None;
            }
            let (place, left) = self.place(at);
            let len = left.min(elements.end - at);
            let run = (at, place, len);
            at += len;
            Some(run)
        })
    }

    /// The runs of a shard of so many elements that lie in this range of the tensor: (the first in the shard, the same in the
    /// tensor, how many). `stride` is not less than `run`.
    pub fn within(self, elements: usize, range: Range<usize>) -> impl Iterator<Item = (usize, usize, usize)> {
        let Self { start, run, stride, first } = if self.is_run() {
            // One run, which ends with the shard.
            Self { run: elements, stride: elements, ..self }
        } else {
            self
        };
        let begun = match range.start.checked_sub(start.saturating_add(run)) {
            Some(past) => past / stride.max(1) + 1,
            None => 0,
        };
        let mut number = begun.max(first / run.max(1));
        std::iter::from_fn(move || {
            loop {
                let at = number.checked_mul(stride)?.checked_add(start)?;
                // Counted as if the elements before the first were the shard's, too.
                let local = number.checked_mul(run)?;
                if run == 0 || at >= range.end || local >= first.checked_add(elements)? {
                    return None;
                }
                number += 1;
                let skipped = range.start.saturating_sub(at).max(first.saturating_sub(local));
                let end = run.min(range.end - at).min(first + elements - local);
                if skipped < end {
                    return Some((local + skipped - first, at + skipped, end - skipped));
                }
            }
        })
    }

    /// As the numbers of an attribute.
    pub fn to_numbers(self) -> Vec<usize> {
        if self.is_run() { vec![self.start] } else { vec![self.start, self.run, self.stride, self.first] }
    }

    /// From the numbers of an attribute: none stand for the whole tensor.
    pub fn from_numbers(numbers: &[usize]) -> Self {
        match *numbers {
            [start, run, stride, first] => Self { start, run, stride, first },
            [start] => Self::from(start),
            _ => Self::from(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_of_a_dim_is_runs_of_the_tensor() {
        let columns = Region::of_dim(&[2, 6], 1, 1, &(2..4));
        assert_eq!(columns.runs(0..4).collect::<Vec<_>>(), [(0, 2, 2), (2, 8, 2)]);
        let packed = Region::of_dim(&[2, 12], 1, 3, &(1..3));
        let runs: Vec<usize> = packed.runs(0..12).map(|(_, place, len)| place * 10 + len).collect();
        assert_eq!(runs, [12, 52, 92, 132, 172, 212]);
        let rows = Region::of_dim(&[4, 3], 0, 1, &(1..3));
        assert_eq!(rows.runs(0..6).collect::<Vec<_>>(), [(0, 3, 6)]);
        assert_eq!(Region::of_dim(&[4, 3], 1, 1, &(0..3)), Region::from(0));
    }

    #[test]
    fn what_lies_in_a_range_is_found_without_looking_at_all() {
        let columns = Region::of_dim(&[5, 7], 1, 1, &(2..5));
        for (region, elements) in [(columns, 15), (columns.skip(4), 8), (columns.skip(1), 3), (Region::from(9), 11)] {
            for (start, end) in (0..=35).flat_map(|start| (start..=35).map(move |end| (start, end))) {
                let all = region
                    .runs(0..elements)
                    .flat_map(|(local, place, len)| (0..len).map(move |at| (local + at, place + at)));
                let expected: Vec<_> = all.filter(|(_, place)| (start..end).contains(place)).collect();
                let found = region.within(elements, start..end);
                let found: Vec<_> =
                    found.flat_map(|(local, place, len)| (0..len).map(move |at| (local + at, place + at))).collect();
                assert_eq!(found, expected, "{region:?} {elements} {start}..{end}");
            }
        }
    }

    #[test]
    fn a_piece_of_a_shard_is_a_region() {
        let columns = Region::of_dim(&[3, 6], 1, 1, &(2..4));
        assert_eq!(columns.skip(1).runs(0..4).collect::<Vec<_>>(), [(0, 3, 1), (1, 8, 2), (3, 14, 1)]);
        assert_eq!(Region::from(3).skip(2), Region::from(5));
        for region in [columns, columns.skip(3), Region::from(7)] {
            assert_eq!(Region::from_numbers(&region.to_numbers()), region);
        }
    }
}
