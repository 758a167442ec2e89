//! The keys of `[parallel]` that decide a layout, as their strategies declare them, for whoever looks for another layout of a job;
//! and how near a layout is in which one of them differs.

use crate::strategy::Key;

pub use crate::layers::LAYERS;
pub use crate::pipeline::strategy::{CHUNKS, RANKS as PIPELINE, SCHEDULE, STAGES};
pub use crate::sequence::{RANKS as CONTEXT, SequenceSplit};
pub use crate::spatial::{RANKS as SPATIAL, TILES};
pub use crate::tensor::{RANKS as TENSOR, SEQUENCE, SLICES, TENSOR_SLICES};
pub use crate::zero::ZERO;

/// A key that may change where a job cannot have the layout that it asks for.
#[derive(Clone, Copy, Debug)]
pub struct Tunable {
    pub key: Key,
    /// How far from the wish a change by one unit is.
    pub distance: f64,
    pub unit: Unit,
    /// Values that are tried beside the one that is asked for, smaller ones above all.
    pub near: fn(usize) -> Vec<usize>,
    /// Whether it is a number of ranks: workers are a multiple of it.
    pub takes_workers: bool,
}

/// What a change is measured in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Doubling,
    One,
}

/// Ranks of a pipeline that are tried, at most.
const PIPELINE_TRIED_MAX: usize = 64;

/// All counts that may change. Slices are near, since they are what a wish for more workers lacks, but others are another job: they
/// follow from who shares sums.
pub const TUNABLE: [Tunable; 7] = [
    Tunable { key: TENSOR, distance: 1.0, unit: Unit::Doubling, near: powers, takes_workers: true },
    Tunable { key: CONTEXT, distance: 1.0, unit: Unit::Doubling, near: powers, takes_workers: true },
    // A pipeline may have any number of ranks.
    Tunable {
        key: PIPELINE,
        distance: 1.0,
        unit: Unit::Doubling,
        near: |ranks| (1..=ranks.min(PIPELINE_TRIED_MAX)).collect(),
        takes_workers: true,
    },
    Tunable { key: CHUNKS, distance: 0.6, unit: Unit::Doubling, near: |_| vec![1, 2], takes_workers: false },
    Tunable {
        key: ZERO,
        distance: 0.8,
        unit: Unit::One,
        near: |stage| (0..=stage.min(crate::zero::STAGE_MAX)).collect(),
        takes_workers: false,
    },
    Tunable { key: SLICES, distance: 0.4, unit: Unit::Doubling, near: |_| Vec::new(), takes_workers: false },
    Tunable { key: TENSOR_SLICES, distance: 0.4, unit: Unit::Doubling, near: |_| Vec::new(), takes_workers: false },
];

fn powers(ranks: usize) -> Vec<usize> {
    let power = ranks.max(1).next_power_of_two();
    [power / 4, power / 2, power, 1].into_iter().filter(|ranks| *ranks > 0).collect()
}

/// A pair of rows and columns that may change, and how far a doubling of one of the two is.
#[derive(Clone, Copy, Debug)]
pub struct TunablePair {
    pub key: Key,
    pub distance: f64,
}

/// Workers, and the parts of the job that they share, as slices are.
pub const TUNABLE_PAIRS: [TunablePair; 2] =
    [TunablePair { key: SPATIAL, distance: 1.0 }, TunablePair { key: TILES, distance: 0.4 }];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::STRATEGIES;

    #[test]
    fn what_may_change_is_read_by_a_strategy_and_near_what_it_was() {
        let read = |key: &Key| STRATEGIES.iter().any(|kind| kind.keys.contains(key));
        assert!(TUNABLE.iter().all(|one| read(&one.key)) && TUNABLE_PAIRS.iter().all(|one| read(&one.key)));
        for one in TUNABLE {
            let most = one.key.most().expect("a count");
            assert!((one.near)(4).iter().all(|value| *value <= 4 && *value <= most), "{}", one.key.name);
        }
    }

    #[test]
    fn splits_of_the_sequence_have_the_names_of_their_key() {
        let all = SequenceSplit::ALL.map(SequenceSplit::name);
        assert_eq!(SEQUENCE.value, crate::strategy::KeyValue::Choice(&SequenceSplit::NAMES));
        assert_eq!(all, SequenceSplit::NAMES);
        SequenceSplit::ALL.into_iter().for_each(|split| assert_eq!(SequenceSplit::named(split.name()), split));
        assert_eq!(SEQUENCE.default_text(), format!("{:?}", SequenceSplit::default().name()));
    }

    #[test]
    fn defaults_are_written_as_a_job_would() {
        let keys = [TENSOR, SCHEDULE, STAGES, ZERO, SPATIAL];
        assert_eq!(keys.map(|key| key.default_text()), ["1", "\"1f1b\"", "[]", "0", "[1, 1]"]);
    }
}
