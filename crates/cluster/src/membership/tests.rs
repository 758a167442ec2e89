use super::*;
use crate::compute::HostLoad;
use kolo_comm::call::short_name;
use kolo_comm::{CallKind, ElementType, Reduction};

const DEADLINES: Deadlines = Deadlines { heartbeat_ms: 1000 };

fn call(sequence: u64) -> Fingerprint {
    Fingerprint {
        communicator: 0,
        kind: CallKind::AllReduce,
        element: ElementType::F32,
        reduction: Reduction::Sum,
        root: 0,
        sequence,
        count: 8,
        name: short_name("bucket 3"),
    }
}

fn joined(world: usize) -> Membership {
    let mut core = Membership::new(world, DEADLINES, true, 0);
    for rank in 0..world {
        core.step(0, MembershipEvent::Joined { rank, host: format!("node{rank}") });
    }
    core
}

fn at(step: u64, call: Option<Fingerprint>, in_call: bool) -> Activity {
    Activity { step, progress: step * 2 + u64::from(in_call), call, in_call, waits: in_call }
}

/// Beats of all until this time; the first actions that are not nothing.
fn run(core: &mut Membership, end_ms: u64, activities: &[Activity]) -> Vec<MembershipAction> {
    for now_ms in (0..=end_ms).step_by(250) {
        for (rank, activity) in activities.iter().enumerate() {
            let actions = core.step(now_ms, MembershipEvent::Heartbeat { rank, activity: *activity });
            if !actions.is_empty() {
                return actions;
            }
        }
        let actions = core.step(now_ms, MembershipEvent::Tick);
        if !actions.is_empty() {
            return actions;
        }
    }
    Vec::new()
}

fn text(actions: &[MembershipAction]) -> &str {
    match actions {
        [MembershipAction::Abort { text }] => text,
        other => panic!("no abort: {other:?}"),
    }
}

#[test]
fn the_rank_that_others_wait_for_is_named() {
    let mut core = joined(3);
    let waits = at(7, Some(call(7)), true);
    let actions = run(&mut core, 100_000, &[waits, at(7, Some(call(6)), false), waits]);
    let expected = "rank 1 on node1 did not reach all_reduce(sum) of 8 f32 \"bucket 3\", call 7 (rank 2 on node2 \
        waits there; this one is at step 7, after all_reduce(sum) of 8 f32 \"bucket 3\", call 6) within 60000 ms";
    assert!(text(&actions).starts_with(expected), "{}", text(&actions));
}

#[test]
fn all_in_one_call_is_the_business_of_their_links() {
    let waits = at(7, Some(call(7)), true);
    assert_eq!(run(&mut joined(2), 100_000, &[waits, waits]), []);
    // Messages count per pair, and groups of a split share a number: they say nothing about each other.
    let message = Fingerprint { kind: CallKind::Send, count: 3, ..call(7) };
    let group = Fingerprint { communicator: 5, count: 9, ..call(7) };
    assert_eq!(run(&mut joined(3), 100_000, &[waits, at(7, Some(message), true), at(7, Some(group), true)]), []);
}

#[test]
fn whoever_is_accused_has_the_word() {
    let mut core = joined(3);
    let fail = |rank: usize, text: &str, culprit: usize| MembershipEvent::Failed {
        rank,
        text: text.into(),
        culprit: Some(culprit),
    };
    core.step(10, fail(0, "rank 1 is gone", 1));
    core.step(12, fail(1, "ranks disagree", 0));
    core.step(14, fail(2, "rank 1 is gone", 1));
    let actions = core.step(100, MembershipEvent::Tick);
    assert_eq!(text(&actions), "ranks disagree\n  reported by rank 1 on node1 at step 0");
}

#[test]
fn an_exit_is_awaited_where_a_link_closed() {
    let mut core = joined(2);
    core.step(10, MembershipEvent::Closed { rank: 1 });
    assert_eq!(core.step(200, MembershipEvent::Tick), []);
    let actions = core.step(250, MembershipEvent::Exited { rank: 1, exit: Exit::Signal(9) });
    assert!(text(&actions).contains("signal 9"), "{actions:?}");
    let mut core = joined(2);
    core.step(10, MembershipEvent::Closed { rank: 1 });
    assert!(text(&core.step(400, MembershipEvent::Tick)).contains("closed its control link"));
}

#[test]
fn a_stopped_rank_gets_no_grace() {
    let mut core = joined(2);
    core.step(10, MembershipEvent::Stopped { rank: 1 });
    let actions = (1..=10).flat_map(|turn| core.step(10 + 100 * turn, MembershipEvent::Tick)).collect::<Vec<_>>();
    assert!(
        matches!(&actions[..], [MembershipAction::Abort { text }, MembershipAction::Kill { rank: 1 }] if text.contains("stopped"))
    );
}

#[test]
fn a_long_wait_that_ends_is_no_stall() {
    let mut core = joined(2);
    let stall_ms = core.deadlines.stall_ms();
    let mut beat = |now_ms: u64, rank: usize, sequence: u64| {
        // Out of its first call, rank 0 computes, and gets on.
        let (in_call, progress) = if sequence == 0 { (false, now_ms) } else { (true, u64::MAX - sequence) };
        let activity = Activity { progress, ..at(3, Some(call(sequence)), in_call) };
        core.step(now_ms, MembershipEvent::Heartbeat { rank, activity });
        core.step(now_ms, MembershipEvent::Tick)
    };
    // Rank 1 is in call 1 for long, as rank 0 computes; both say now and then that they live.
    for now_ms in (0..2 * stall_ms).step_by(200) {
        assert_eq!(beat(now_ms, 1, 1), []);
        assert_eq!(beat(now_ms, 0, 0), []);
    }
    // Rank 0 comes, both go on, and rank 0 says so first.
    assert_eq!(beat(2 * stall_ms, 0, 2), []);
    for now_ms in (2 * stall_ms..3 * stall_ms).step_by(200) {
        assert_eq!(beat(now_ms, 1, 1), []);
        assert_eq!(beat(now_ms, 0, 2), []);
    }
    // If rank 1 does not come even then, it is stuck.
    let actions = [beat(3 * stall_ms, 0, 2), beat(3 * stall_ms + 200, 1, 1)].concat();
    assert!(text(&actions).contains("rank 1 on node1 did not reach"), "{actions:?}");
}

#[test]
fn who_hangs_while_others_get_on_is_found() {
    let mut core = joined(3);
    let stall_ms = core.deadlines.stall_ms();
    let mut run = |from_ms: u64, to_ms: u64, others: fn(u64) -> u64, waits: bool| {
        let mut seen = Vec::new();
        for now_ms in (from_ms..to_ms).step_by(200) {
            for rank in 0..2 {
                core.step(now_ms, MembershipEvent::Heartbeat { rank, activity: at(others(now_ms), None, false) });
            }
            let activity = Activity { waits, ..at(4, None, false) };
            core.step(now_ms, MembershipEvent::Heartbeat { rank: 2, activity });
            seen.extend(core.step(now_ms, MembershipEvent::Tick));
        }
        seen
    };
    // Everyone's steps are long; or this one waits for a server that others keep busy.
    assert_eq!(run(0, 3 * stall_ms, |now_ms| 4 + now_ms / 200 % 2, false), []);
    assert_eq!(run(3 * stall_ms, 6 * stall_ms, |now_ms| now_ms / 100, true), []);
    let actions = run(6 * stall_ms, 8 * stall_ms, |now_ms| now_ms / 100, false);
    let reported_by = text(&actions);
    assert!(reported_by.contains("rank 2 on node2 did not reach its next step (rank 1"), "{reported_by}");
    assert!(reported_by.contains("this one is at step 4, before its first call"), "{reported_by}");
    // That another is far ahead says nothing: it must have got there meanwhile.
    let mut core = joined(2);
    for now_ms in (0..3 * stall_ms).step_by(200) {
        core.step(now_ms, MembershipEvent::Heartbeat { rank: 0, activity: at(500 + now_ms / 200 % 9, None, false) });
        core.step(now_ms, MembershipEvent::Heartbeat { rank: 1, activity: at(4, None, false) });
        assert_eq!(core.step(now_ms, MembershipEvent::Tick), []);
    }
}

/// The core lives in rank 0. While that was suspended, the others gave it up and left.
#[test]
fn a_core_that_was_suspended_accuses_nobody() {
    let suspended = |words: &dyn Fn(&mut Membership) -> Vec<MembershipAction>| {
        let mut core = Membership { supervised: false, ..joined(3) };
        core.step(1000, MembershipEvent::Heartbeat { rank: 0, activity: at(3, None, false) });
        let actions = words(&mut core);
        let [MembershipAction::Abort { text }, ..] = &actions[..] else { panic!("{actions:?}") };
        text.clone()
    };
    let text = suspended(&|core| {
        core.step(9000, MembershipEvent::Closed { rank: 1 });
        core.step(9001, MembershipEvent::GivenUp { rank: 2, text: "rank 0 on node0 fell silent".into(), shown: false });
        core.step(9002, MembershipEvent::GivenUp { rank: 1, text: "rank 0 on node0 is gone".into(), shown: true })
    });
    assert_eq!(text, "rank 0 on node0 is gone");
    // Its launcher ended them before they could say so.
    let text = suspended(&|core| {
        assert_eq!(core.step(9000, MembershipEvent::Closed { rank: 2 }), []);
        assert_eq!(core.step(9001, MembershipEvent::Closed { rank: 1 }), []);
        core.step(9060, MembershipEvent::Tick)
    });
    assert!(text.starts_with("rank 0 on node0 was suspended for 8000 ms, and the other ranks left"), "{text}");
    // All were suspended, and one of them is gone.
    let text = suspended(&|core| {
        core.step(9000, MembershipEvent::Closed { rank: 2 });
        core.step(9001, MembershipEvent::Heartbeat { rank: 1, activity: at(3, None, false) });
        core.step(9100, MembershipEvent::Tick)
    });
    assert!(text.starts_with("rank 2 on node2 was lost") && text.contains("closed its control link"), "{text}");
}

#[test]
fn the_slowest_is_known() {
    let mut core = joined(4);
    let mut beat = |now_ms: u64, steps: [u64; 4]| {
        for (rank, step) in steps.into_iter().enumerate() {
            core.step(now_ms, MembershipEvent::Heartbeat { rank, activity: at(step, None, false) });
        }
        core.lag()
    };
    // Quick steps between two beats are no lag.
    assert_eq!(beat(1000, [124, 900, 123, 120]), None);
    assert_eq!(beat(1250, [1824, 900, 1700, 1650]), None);
    assert_eq!(beat(2000, [1824, 1824, 1823, 1820]), None);
    let lag = beat(3000, [2824, 2824, 2823, 1820]).unwrap();
    assert_eq!(lag.to_string(), "rank 3 on node3 is at step 1820, 4 steps behind");
}

#[test]
fn an_interrupt_is_passed_on_once_and_then_meant() {
    let mut core = joined(2);
    let first = core.step(10, MembershipEvent::Interrupt { signal: 2 });
    assert_eq!(
        first,
        [MembershipAction::Signal { rank: 0, signal: 2 }, MembershipAction::Signal { rank: 1, signal: 2 }]
    );
    let second = core.step(20, MembershipEvent::Interrupt { signal: 2 });
    assert_eq!(second, [MembershipAction::Kill { rank: 0 }, MembershipAction::Kill { rank: 1 }]);
    core.step(21, MembershipEvent::Exited { rank: 0, exit: Exit::Signal(9) });
    let last = core.step(22, MembershipEvent::Exited { rank: 1, exit: Exit::Signal(9) });
    let [MembershipAction::Ended(verdict)] = &last[..] else { panic!("{last:?}") };
    assert_eq!((verdict.exit_code, &verdict.fault, &verdict.left), (130, &None, &vec![]));
}

/// All have finished, and one is stopped before its process is gone: nobody waits for it as for one that computes.
#[test]
fn a_rank_that_is_stopped_at_its_end_is_named_soon() {
    for closed in [false, true] {
        let mut core = joined(2);
        for rank in 0..2 {
            core.step(10, MembershipEvent::Finished { rank });
        }
        core.step(20, MembershipEvent::Exited { rank: 0, exit: Exit::Code(0) });
        if closed {
            core.step(20, MembershipEvent::Closed { rank: 1 });
        }
        core.step(30, MembershipEvent::Stopped { rank: 1 });
        let ended = (31..2 * DEADLINES.heartbeat_ms).step_by(20).find_map(|now_ms| {
            let actions = core.step(now_ms, MembershipEvent::Tick);
            (!actions.is_empty()).then_some(actions)
        });
        let actions = ended.unwrap_or_default();
        let abort = matches!(&actions[..], [MembershipAction::Abort { text }, MembershipAction::Kill { rank: 1 }]
            if text.contains("rank 1 on node1 was lost") && text.contains("its process was stopped for 1000 ms"));
        assert!(abort, "closed {closed}: {actions:?}");
    }
}

/// On an overloaded machine the thread of the heartbeats waits for a core, while others of its process have one.
#[test]
fn a_rank_that_computes_is_not_silent() {
    let load = HostLoad { average_tenths: 302, cores: 2 };
    let lost = |computes_until_ms: u64| {
        let mut core = joined(2);
        (0..200_000).step_by(50).find_map(|now_ms| {
            let mut actions =
                core.step(now_ms, MembershipEvent::Heartbeat { rank: 0, activity: at(now_ms, None, false) });
            if now_ms.is_multiple_of(250) && now_ms <= computes_until_ms {
                actions.extend(core.step(now_ms, MembershipEvent::Computed { rank: 1, load }));
            }
            actions.extend(core.step(now_ms, MembershipEvent::Tick));
            (!actions.is_empty()).then(|| (now_ms, text(&actions).to_string()))
        })
    };
    let (now_ms, why) = lost(0).unwrap();
    assert!(now_ms == 1500 && why.contains("rank 1 on node1 was lost"), "{now_ms} {why}");
    assert!(why.contains("no heartbeat for 1500 ms; its process is stopped"), "{why}");
    // It neither computes nor speaks any more.
    let (now_ms, why) = lost(10_000).unwrap();
    assert!(
        now_ms == 11_500 && why.contains("its host is overloaded, with a load average of 30.2 on 2 cores"),
        "{why}"
    );
    let (now_ms, why) = lost(u64::MAX).unwrap();
    assert_eq!(now_ms, DEADLINES.stall_ms());
    assert!(why.contains("no heartbeat for 60000 ms, although its process computes; its host is overloaded"), "{why}");
}
