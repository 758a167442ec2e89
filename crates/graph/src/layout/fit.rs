//! First fit by falling size, in n log n: every block goes to the lowest offset that no block alive at the same time holds.
//!
//! Comparing a block with all others would take the square of a network's depth, since an activation lives until the backward
//! pass and so meets all others. A tree over time holds, for each stretch of it, the bytes that are taken there as runs; blocks
//! that lie side by side are one run, however many they are.

use crate::steps;

/// Bytes that are in use from the birth to the death, both included.
#[derive(Clone, Copy, Debug)]
pub(super) struct Life {
    pub bytes: usize,
    pub birth: usize,
    pub death: usize,
}

/// Runs that a stretch of time remembers. With more, the narrowest holes between them are given up, which may cost memory, but
/// never makes a conflict.
const RUNS_MAX: usize = 512;

/// An offset for each block, and the bytes that all of them take together.
pub(super) fn first_fit(lives: &[Life]) -> (Vec<usize>, usize) {
    let mut births: Vec<usize> = lives.iter().map(|life| life.birth).collect();
    births.sort_unstable();
    births.dedup();
    let mut order: Vec<usize> = (0..lives.len()).collect();
    order.sort_by_key(|at| (std::cmp::Reverse(lives[*at].bytes), lives[*at].birth));
    let mut tree = Tree::new(births.len());
    let (mut offsets, mut size) = (vec![0; lives.len()], 0);
    for at in order {
        let Life { bytes, birth, death } = lives[at];
        // Lives that meet have a birth in common that lies in both, so births are all the time there is.
        let first = births.partition_point(|other| *other < birth);
        let last = births.partition_point(|other| *other <= death);
        let offset = tree.lowest(first, last, bytes);
        tree.take(first, last, Run { start: offset, end: offset + bytes });
        offsets[at] = offset;
        size = size.max(offset + bytes);
    }
    (offsets, size)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    start: usize,
    end: usize,
}

/// Bytes that are taken: runs with holes between them.
#[derive(Clone, Debug, Default)]
struct Runs(Vec<Run>);

impl Runs {
    fn add(&mut self, new: Run) {
        if new.start == new.end {
            return;
        }
        let runs = &mut self.0;
        let first = runs.partition_point(|run| run.end < new.start);
        let last = runs.partition_point(|run| run.start <= new.end);
        steps::count(1 + (last - first) as u64);
        if first == last {
            runs.insert(first, new);
            if runs.len() > RUNS_MAX {
                self.close_holes();
            }
            return;
        }
        let joined = Run { start: runs[first].start.min(new.start), end: runs[last - 1].end.max(new.end) };
        runs[first] = joined;
        runs.drain(first + 1..last);
    }

    /// Gives up the narrower half of the holes.
    fn close_holes(&mut self) {
        steps::count(self.0.len() as u64);
        let mut widths: Vec<usize> = self.0.windows(2).map(|pair| pair[1].start - pair[0].end).collect();
        let half = widths.len() / 2;
        let limit = *widths.select_nth_unstable(half).1;
        let mut kept: Vec<Run> = Vec::with_capacity(self.0.len());
        for run in self.0.drain(..) {
            match kept.last_mut() {
                Some(last) if run.start - last.end <= limit => last.end = run.end,
                _ => kept.push(run),
            }
        }
        self.0 = kept;
    }
}

/// A segment tree over time. Node 1 is all of it, the children of `n` are `2n` and `2n + 1`.
struct Tree {
    leaves: usize,
    /// What is taken at some moment of a node's time by blocks that are taken in it or below.
    within: Vec<Runs>,
    /// What is taken during all of a node's time, by blocks that are not taken during all of its parent's.
    throughout: Vec<Runs>,
}

impl Tree {
    fn new(moments: usize) -> Self {
        let leaves = moments.next_power_of_two();
        Self { leaves, within: vec![Runs::default(); 2 * leaves], throughout: vec![Runs::default(); 2 * leaves] }
    }

    /// Visits the nodes that `first..last` is made of, and those above them.
    fn visit(&self, first: usize, last: usize, mut see: impl FnMut(usize, Cover)) {
        let mut todo = vec![(1, 0, self.leaves)];
        while let Some((node, start, end)) = todo.pop() {
            steps::count(1);
            if last <= start || end <= first {
                continue;
            }
            if first <= start && end <= last {
                see(node, Cover::Whole);
                continue;
            }
            see(node, Cover::Part);
            let middle = start + (end - start) / 2;
            todo.push((2 * node, start, middle));
            todo.push((2 * node + 1, middle, end));
        }
    }

    fn take(&mut self, first: usize, last: usize, run: Run) {
        let mut nodes = Vec::new();
        self.visit(first, last, |node, cover| nodes.push((node, cover)));
        for (node, cover) in nodes {
            self.within[node].add(run);
            if cover == Cover::Whole {
                self.throughout[node].add(run);
            }
        }
    }

    /// The lowest offset at which so many bytes are free during `first..last`.
    fn lowest(&self, first: usize, last: usize, bytes: usize) -> usize {
        let mut taken: Vec<&[Run]> = Vec::new();
        self.visit(first, last, |node, cover| {
            let runs = match cover {
                Cover::Whole => &self.within[node].0,
                Cover::Part => &self.throughout[node].0,
            };
            if !runs.is_empty() {
                taken.push(runs);
            }
        });
        let mut offset = 0;
        loop {
            let before = offset;
            for runs in &mut taken {
                loop {
                    // What ends below the offset will never be in the way again.
                    *runs = &runs[runs.partition_point(|run| run.end <= offset)..];
                    let Some(run) = runs.first().filter(|run| run.start < offset + bytes) else { break };
                    steps::count(1);
                    offset = run.end;
                }
            }
            if offset == before {
                return offset;
            }
        }
    }
}

/// How much of a node's time is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cover {
    Whole,
    Part,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Stream;

    /// Compares every block with all that were placed before it.
    fn by_definition(lives: &[Life]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..lives.len()).collect();
        order.sort_by_key(|at| (std::cmp::Reverse(lives[*at].bytes), lives[*at].birth));
        let mut offsets: Vec<Option<usize>> = vec![None; lives.len()];
        for at in order {
            let life = lives[at];
            let mut others: Vec<(usize, usize)> = (0..lives.len())
                .filter(|other| lives[*other].birth <= life.death && life.birth <= lives[*other].death)
                .filter_map(|other| Some((offsets[other]?, lives[other].bytes)))
                .collect();
            others.sort_unstable();
            let mut offset = 0;
            for (start, bytes) in others {
                if start < offset + life.bytes && offset < start + bytes {
                    offset = start + bytes;
                }
            }
            offsets[at] = Some(offset);
        }
        offsets.into_iter().map(|offset| offset.unwrap_or(0)).collect()
    }

    fn lives(seed: u64, count: usize, moments: usize, sizes: usize) -> Vec<Life> {
        let stream = Stream::new(seed, "lives");
        let draw = |at: usize, of: usize| stream.below(at as u64, 0, of.max(1) as u64) as usize;
        (0..count)
            .map(|at| {
                let birth = draw(3 * at, moments);
                let length = if at % 3 == 0 { draw(3 * at + 1, moments - birth) } else { draw(3 * at + 1, 4) };
                Life { bytes: 64 * draw(3 * at + 2, sizes), birth, death: birth + length }
            })
            .collect()
    }

    #[test]
    fn offsets_are_those_of_the_definition() {
        for seed in 0..40 {
            let lives = lives(seed, 1 + 7 * seed as usize, 1 + 5 * seed as usize, 1 + seed as usize % 9);
            assert_eq!(first_fit(&lives).0, by_definition(&lives), "seed {seed}");
        }
    }

    /// With more holes than are remembered, blocks still do not meet.
    #[test]
    fn forgotten_holes_cost_memory_but_no_conflict() {
        // Long lives with short ones between them, which leaves a hole under each short one.
        let mut lives: Vec<Life> = Vec::new();
        for at in 0..4 * RUNS_MAX {
            let odd = at % 2;
            lives.push(Life { bytes: 1 << 20, birth: odd, death: if odd == 0 { 9 } else { 1 } });
            lives.push(Life { bytes: 64, birth: 3 + at % 5, death: 5 + at % 5 });
        }
        let (offsets, size) = first_fit(&lives);
        for (at, one) in lives.iter().enumerate() {
            assert!(offsets[at] + one.bytes <= size);
            for (other_at, other) in lives.iter().enumerate().skip(at + 1) {
                let together = other.birth <= one.death && one.birth <= other.death;
                let apart =
                    offsets[at] + one.bytes <= offsets[other_at] || offsets[other_at] + other.bytes <= offsets[at];
                assert!(!together || apart, "{one:?} at {} meets {other:?} at {}", offsets[at], offsets[other_at]);
            }
        }
    }
}
