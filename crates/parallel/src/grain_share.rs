//! Which grains of a step a rank computes.

/// Every so-manieth grain from the first on, in one run or in several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrainShare {
    first: usize,
    stride: usize,
    count: usize,
    /// Grains of a run, and grains from the first of a run to that of the next.
    run: usize,
    run_stride: usize,
}

impl GrainShare {
    /// One of `ranks` runs of `count` grains.
    pub fn run(rank: usize, count: usize) -> Self {
        Self { first: rank * count, stride: 1, count, run: count, run_stride: 0 }
    }

    /// The same number, but ranks take turns: what they compute at a time are neighbours.
    pub fn turns(rank: usize, ranks: usize, count: usize) -> Self {
        Self { first: rank, stride: ranks, count, run: count, run_stride: 0 }
    }

    /// A run of the first half of all grains, and one of the second: `count` is even.
    pub fn halves(rank: usize, ranks: usize, count: usize) -> Self {
        let run = count / 2;
        Self { first: rank * run, stride: 1, count, run, run_stride: ranks * run }
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The number in the step of this rank's grain `local`.
    pub fn at(&self, local: usize) -> usize {
        let run = self.run.max(1);
        self.first + local / run * self.run_stride + local % run * self.stride
    }

    /// Grains from one of a run to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Grains of a run, and grains from the first of a run to that of the next.
    pub fn runs(&self) -> (usize, usize) {
        (self.run, self.run_stride)
    }

    pub fn iter(&self) -> impl Iterator<Item = usize> + use<> {
        let share = *self;
        (0..share.count).map(move |local| share.at(local))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_all_grains_once() {
        let all = |share: &dyn Fn(usize) -> GrainShare| {
            let mut grains: Vec<usize> = (0..4).flat_map(|rank| share(rank).iter()).collect();
            grains.sort_unstable();
            grains
        };
        assert_eq!(all(&|rank| GrainShare::run(rank, 2)), (0..8).collect::<Vec<_>>());
        assert_eq!(all(&|rank| GrainShare::turns(rank, 4, 2)), (0..8).collect::<Vec<_>>());
        assert_eq!(all(&|rank| GrainShare::halves(rank, 4, 2)), (0..8).collect::<Vec<_>>());
        assert_eq!(GrainShare::halves(1, 2, 4).iter().collect::<Vec<_>>(), [2, 3, 6, 7]);
        assert_eq!(GrainShare::run(1, 2).iter().collect::<Vec<_>>(), [2, 3]);
        assert_eq!(GrainShare::turns(1, 4, 2).iter().collect::<Vec<_>>(), [1, 5]);
    }
}
