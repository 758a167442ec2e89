//! Which grains of a step a rank computes.

/// Every so-manieth grain from the first on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrainShare {
    first: usize,
    stride: usize,
    count: usize,
}

impl GrainShare {
    /// One of `ranks` runs of `count` grains.
    pub fn run(rank: usize, count: usize) -> Self {
        Self { first: rank * count, stride: 1, count }
    }

    /// The same number, but ranks take turns: what they compute at a time are neighbours.
    pub fn turns(rank: usize, ranks: usize, count: usize) -> Self {
        Self { first: rank, stride: ranks, count }
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The number in the step of this rank's grain `local`.
    pub fn at(&self, local: usize) -> usize {
        self.first + local * self.stride
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
        assert_eq!(GrainShare::run(1, 2).iter().collect::<Vec<_>>(), [2, 3]);
        assert_eq!(GrainShare::turns(1, 4, 2).iter().collect::<Vec<_>>(), [1, 5]);
    }
}
