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
    fn a_piece_of_a_shard_is_a_region() {
        let columns = Region::of_dim(&[3, 6], 1, 1, &(2..4));
        assert_eq!(columns.skip(1).runs(0..4).collect::<Vec<_>>(), [(0, 3, 1), (1, 8, 2), (3, 14, 1)]);
        assert_eq!(Region::from(3).skip(2), Region::from(5));
        for region in [columns, columns.skip(3), Region::from(7)] {
            assert_eq!(Region::from_numbers(&region.to_numbers()), region);
        }
    }
}
