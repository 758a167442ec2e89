//! The words of the verifier.

use super::build;
use crate::pipeline::{Action, Direction, PipelineSchedule, verify};

fn verdict(change: impl FnOnce(&mut PipelineSchedule)) -> String {
    let mut schedule = build("1f1b", 2, 2, 1);
    change(&mut schedule);
    let error = verify(&schedule).unwrap_err();
    format!("{error}; {}", error.hint())
}

#[test]
fn verdicts_name_rank_position_and_action() {
    assert_eq!(build("1f1b", 2, 2, 1).to_string().lines().last(), Some("rank 1: F1.0 B1.0 F1.1 B1.1"));
    let cases = [
        (
            verdict(|s| s.actions[1].retain(|action| *action != Action::backward(1, 0))),
            "rank 1: `B1.0` is missing; add it, or `I` and `W` in its place",
        ),
        (
            verdict(|s| s.actions[1].push(Action::backward(1, 0))),
            "rank 1, position 4: `B1.0` was run before, at position 1; run every action once",
        ),
        (
            verdict(|s| s.actions[1].push(Action::weight(1, 0))),
            "rank 1, position 4: `W1.0` adds a gradient twice: `B1.0` is at position 1; run the backward pass whole (B) or in \
             two parts (I and W)",
        ),
        (
            verdict(|s| s.actions[1][1] = Action::input(1, 0)),
            "rank 1: `W1.0` is missing; `I` needs a `W` for the weights",
        ),
        (
            verdict(|s| s.actions[0].insert(0, Action::forward(1, 0))),
            "rank 0, position 0: `F1.0` belongs to rank 1; move it there, or change the placement",
        ),
        (
            verdict(|s| s.actions[1].swap(0, 1)),
            "rank 1, position 0: `B1.0` reads what `F1.0` makes, which comes later, at position 1; move `F1.0` before it",
        ),
        (
            verdict(|s| s.actions[0][0].micro_batch = 2),
            "rank 0, position 0: `F0.2` names a micro-batch that does not exist; micro-batches are 0 to 1",
        ),
        (
            verdict(|s| {
                s.actions[0].swap(1, 2);
                s.actions[1].swap(1, 2);
            }),
            "deadlock: rank 0 waits at position 1 (`B0.0`) for `B1.0` of rank 1; rank 1 waits at position 1 (`F1.1`) for \
             `F0.1` of rank 0; move one of these actions before the one its rank waits at",
        ),
        (
            verdict(|s| {
                s.actions[1] =
                    vec![Action::forward(1, 1), Action::forward(1, 0), Action::backward(1, 0), Action::backward(1, 1)]
            }),
            "rank 1, position 0: message 0 on the channel for activations of stage 0 from rank 0 to rank 1 is what `F0.0` \
             sends, but `F0.1` is read there; let rank 1 take the micro-batches in the order of rank 0",
        ),
        (verdict(|s| s.placement.down[1] = 0), "rank 1 has no stage; place a stage on every rank, or use fewer ranks"),
        (
            verdict(|s| s.placement.directions[1] = Direction::Up),
            "a micro-batch goes up, but stages have no rank for that direction; give the placement of that direction",
        ),
    ];
    for (found, wanted) in cases {
        assert_eq!(found, wanted);
    }
}

/// Fields that do not fit together are refused before anything reads them.
#[test]
fn sizes_are_checked_first() {
    let cases = [
        (verdict(|s| s.ranks = 0), "a schedule needs ranks; "),
        (verdict(|s| s.stages = usize::MAX), "18446744073709551615 stages of 2 micro-batches are too many; "),
        (verdict(|s| s.ranks = 3), "3 ranks have 2 lists of actions; "),
        (verdict(|s| s.micro_batches = 3), "3 micro-batches have 2 directions; "),
        (verdict(|s| s.stages = 3), "the placement down names 2 ranks for 3 stages; "),
        (verdict(|s| s.placement.down[1] = 9), "the placement down puts stage 1 on rank 9; ranks are 0 to 1"),
        (verdict(|s| s.placement.up = Some(Vec::new())), "the placement up names 0 ranks for 2 stages; "),
    ];
    for (found, wanted) in cases {
        assert!(found.starts_with(wanted), "{found}\n{wanted}");
    }
}
