//! The search finds what trying everything finds, keeps to its limits, and names only what is accepted.

use super::space::SearchSpace;
use super::*;

#[test]
fn candidates_have_all_devices_and_share_the_batch() {
    let space = space(24, 96);
    let all = space.candidates();
    assert!(all.len() > 50);
    for one in &all {
        assert_eq!(one.devices(), 24);
        assert!(96usize.is_multiple_of(one.grains()) && one.grains().is_power_of_two(), "{one}");
        assert!(one.data > 1 || one.zero == 0);
    }
    let mut sorted = all.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!(sorted.len(), all.len(), "each once");
}

fn space(devices: usize, batch: usize) -> SearchSpace {
    SearchSpace {
        devices,
        batch,
        stages_max: 8,
        tensor_max: 8,
        tokens_max: 4,
        zero_max: 3,
        sequences: vec![Sequence::Whole, Sequence::Tensor, Sequence::Heads],
        recomputes: kolo_parallel::Recompute::ALL.to_vec(),
        schedules: vec!["1f1b", "interleaved", "zero-bubble", "bidirectional"],
        micro_batches_max: 64,
    }
}
