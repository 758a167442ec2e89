//! Every family in every small size is right, waits as long and keeps as much as its formula says.

use super::{all_small, build, oracle};
use crate::pipeline::{Direction, Durations, FAMILIES, Sizes, StageDurations, Verified, family, verify};

fn verified(name: &str, ranks: usize, micro_batches: usize, chunks: usize) -> Verified {
    verify(&build(name, ranks, micro_batches, chunks)).unwrap()
}

fn bubble(verified: &Verified) -> f64 {
    verified.timeline(&Durations::textbook(verified.schedule().stages)).unwrap().bubble_share()
}

fn close(found: f64, wanted: f64) -> bool {
    (found - wanted).abs() < 1e-12
}

#[test]
fn all_sizes_are_right() {
    let all = all_small(6, 12, 3);
    assert!(FAMILIES.iter().all(|family| all.iter().any(|(name, ..)| *name == family.name)));
    for (name, sizes, schedule) in all {
        let verified = verify(&schedule).unwrap_or_else(|error| panic!("{name} {sizes:?}: {error}\n{schedule}"));
        oracle::run(&schedule, Some(&verified))
            .unwrap_or_else(|problem| panic!("{name} {sizes:?}: {problem}\n{schedule}"));
        for rank in 0..sizes.ranks {
            for stage in schedule.stages_of(rank) {
                let is_down = |number: &usize| schedule.placement.directions[*number] == Direction::Down;
                let (down, up): (Vec<_>, Vec<_>) = verified.gradients(rank, stage).into_iter().partition(is_down);
                assert!(down.is_sorted() && up.is_sorted(), "{name} {sizes:?}: rank {rank}, stage {stage}");
            }
        }
    }
}

#[test]
fn bubbles_are_the_formulas() {
    for ranks in 1..=6 {
        for count in 1..=12 {
            let (p, m) = (ranks as f64, count as f64);
            for name in ["gpipe", "1f1b"] {
                let found = bubble(&verified(name, ranks, count, 1));
                assert!(close(found, (p - 1.0) / (m + p - 1.0)), "{name} {ranks} {count}: {found}");
            }
            if count >= ranks {
                let found = bubble(&verified("zero-bubble", ranks, count, 1));
                assert!(close(found, (p - 1.0) / (3.0 * m + p - 1.0)), "zero-bubble {ranks} {count}: {found}");
            }
            for chunks in 2..=4 {
                if count % ranks == 0 {
                    let (found, v) = (bubble(&verified("interleaved", ranks, count, chunks)), chunks as f64);
                    let wanted = (p - 1.0) / (v * m + p - 1.0);
                    assert!(close(found, wanted), "interleaved {ranks} {count} {chunks}: {found}, not {wanted}");
                }
            }
        }
    }
}

/// Chimera's formula is for forward and backward passes of the same length.
#[test]
fn two_directions_halve_the_bubble() {
    let equal = StageDurations { forward: 1.0, backward: 1.0, input: 0.5, weight: 0.5, transfer: 0.0 };
    for ranks in [2, 4, 6, 8] {
        for count in [ranks, 2 * ranks, 3 * ranks] {
            let verified = verified("bidirectional", ranks, count, 1);
            let found = verified.timeline(&Durations::uniform(ranks, equal)).unwrap().bubble_share();
            let (p, m) = (ranks as f64, count as f64);
            assert!(close(found, (p - 2.0) / (2.0 * m + p - 2.0)), "{ranks} {count}: {found}");
        }
    }
}

#[test]
fn peaks_are_the_textbooks() {
    for ranks in 1..=6 {
        for count in 1..=12 {
            for rank in 0..ranks {
                let peak = |name, chunks| verified(name, ranks, count, chunks).rank_peak(rank);
                assert_eq!(peak("gpipe", 1), count);
                assert_eq!(peak("1f1b", 1), count.min(ranks - rank));
                assert_eq!(peak("zero-bubble", 1), count.min(ranks), "{ranks} {count} {rank}");
                if count % ranks == 0 {
                    let warm_up = 2 * (ranks - 1 - rank) + 2 * ranks;
                    assert_eq!(peak("interleaved", 3), (warm_up + 1).min(3 * count));
                }
                if count % 2 == 0 && ranks >= 2 {
                    let down = (ranks - rank).min(ranks.div_ceil(2)).min(count / 2);
                    let up = (rank + 1).min(ranks.div_ceil(2)).min(count / 2);
                    assert!(peak("bidirectional", 1) <= down + up, "{ranks} {count} {rank}");
                }
            }
        }
    }
}

#[test]
fn slots_partial_sums_and_messages_are_bounded() {
    let verified = verified("1f1b", 4, 8, 1);
    assert_eq!((0..8).map(|number| verified.slot(0, number)).collect::<Vec<_>>(), [0, 1, 2, 3, 0, 1, 2, 3]);
    assert_eq!((0..8).map(|number| verified.slot(3, number)).collect::<Vec<_>>(), [0; 8]);
    assert_eq!((verified.peak(1, 1), verified.peak(1, 2)), (3, 0));
    assert_eq!(verified.partial_sums_peak(0, 0), 4);
    assert_eq!((verified.messages(), verified.channels().len()), (2 * 3 * 8, 6));
    // A rank may be as many activations ahead as it keeps, and has at most the gradients of those unread.
    assert_eq!(verified.unread_peaks(), [4, 4, 3, 3, 2, 2]);
}

/// The bound on unread messages is reached, and never passed, by runs in which the reader is as late as can be.
#[test]
fn unread_messages_reach_their_bound() {
    for (name, sizes, schedule) in all_small(4, 8, 2) {
        let verified = verify(&schedule).unwrap();
        let bounds = verified.unread_peaks();
        for (order, bound) in verified.channels().iter().zip(bounds) {
            let found = most_unread(&verified, order.channel);
            assert_eq!(found, bound, "{name} {sizes:?}: {}", order.channel);
        }
    }
}

/// For each action of the reader: all others run as far as they can while it stands still.
fn most_unread(verified: &Verified, channel: crate::pipeline::Channel) -> usize {
    let schedule = verified.schedule();
    let mut most = 0;
    for held in 0..=schedule.actions[channel.to].len() {
        let mut next = vec![0; schedule.ranks];
        let mut done = std::collections::BTreeSet::new();
        let (mut sent, mut read) = (0, 0);
        while let Some((rank, action)) = (0..schedule.ranks).find_map(|rank| {
            let action = *schedule.actions[rank].get(next[rank])?;
            let held = rank == channel.to && next[rank] == held;
            let waits = schedule.waits_for(action).map(|(pass, stage, _)| (pass, stage, action.micro_batch));
            (!held && waits.is_none_or(|waits| done.contains(&waits))).then_some((rank, action))
        }) {
            next[rank] += 1;
            done.extend(action.kind.pass().map(|pass| (pass, action.stage, action.micro_batch)));
            sent += usize::from(schedule.sends(action) == Some(channel));
            read += usize::from(schedule.receives(action) == Some(channel));
        }
        most = most.max(sent - read);
    }
    most
}

#[test]
fn transfers_and_uneven_stages_take_their_time() {
    let verified = verified("gpipe", 2, 2, 1);
    let mut durations = Durations::textbook(2);
    durations.stages[0].transfer = 0.5;
    durations.stages[1].transfer = 0.25;
    durations.stages[1].forward = 3.0;
    let timeline = verified.timeline(&durations).unwrap();
    assert_eq!(timeline.spans[0], [(0.0, 1.0), (1.0, 2.0), (9.75, 11.75), (11.75, 13.75)]);
    assert_eq!(timeline.spans[1], [(1.5, 4.5), (4.5, 7.5), (7.5, 9.5), (9.5, 11.5)]);
    assert_eq!((timeline.total, timeline.busy(0)), (13.75, 6.0));
    durations.stages[1].weight = f64::NAN;
    let error = verified.timeline(&durations).unwrap_err();
    assert_eq!(error.to_string(), "the weight gradient of stage 1 cannot take NaN");
}

#[test]
fn impossible_sizes_say_what_is_possible() {
    let error = |name: &str, ranks, micro_batches, chunks| {
        let error =
            family(name).and_then(|family| family.schedule(Sizes { ranks, micro_batches, chunks })).unwrap_err();
        format!("{error}; {}", error.hint())
    };
    assert_eq!(
        error("interleaved", 4, 6, 2),
        "`interleaved` on 4 ranks cannot take 6 micro-batches; their number is a multiple of the ranks, such as 4 or 8; \
         `1f1b` takes any"
    );
    assert!(error("interleaved", 4, 3, 2).contains("such as 4; "));
    assert!(error("interleaved", 4, 4, 1).ends_with("set chunks to 2 or more, or take `1f1b`"));
    assert!(error("bidirectional", 4, 5, 1).ends_with("their number is even, such as 4 or 6"));
    assert!(error("bidirectional", 1, 4, 1).contains("at least 2 ranks"));
    assert!(error("1f1b", 4, 8, 2).ends_with("set chunks to 1, or take `interleaved`"));
    assert!(error("2f2b", 4, 8, 1).ends_with("schedules are gpipe, 1f1b, interleaved, zero-bubble, bidirectional"));
    for sizes in [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1025, 1, 1), (4, usize::MAX, 1), (4, 4, usize::MAX)] {
        assert!(!error("interleaved", sizes.0, sizes.1, sizes.2).is_empty());
    }
}
