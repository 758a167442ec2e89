//! Damaged schedules: the verifier accepts one if and only if its run on symbolic values gives the right gradients.

use super::{Random, all_small, oracle};
use crate::pipeline::{Action, ActionKind, PipelineSchedule, ScheduleError, verify};

const MUTATIONS: usize = 20_000;

#[derive(Default, Debug)]
struct Verdicts {
    accepted: usize,
    action: usize,
    missing: usize,
    deadlock: usize,
    channel_order: usize,
}

#[test]
fn a_damaged_schedule_is_rejected_or_runs_right() {
    let schedules = all_small(5, 10, 3);
    let mut verdicts = Verdicts::default();
    for number in 0..MUTATIONS {
        let mut random = Random::new("mutations", number as u64);
        let (name, sizes, schedule) = &schedules[number % schedules.len()];
        let mut damaged = schedule.clone();
        for _ in 0..=random.below(2) {
            mutate(&mut damaged, &mut random);
        }
        let (verdict, run) = (verify(&damaged), oracle::run(&damaged, None));
        let same = verdict.is_ok() == run.is_ok();
        assert!(same, "{number}, {name} {sizes:?}: {:?} but {run:?}\n{damaged}", verdict.err().map(|e| e.to_string()));
        match verdict {
            Ok(verified) => {
                oracle::run(&damaged, Some(&verified))
                    .unwrap_or_else(|problem| panic!("{number}: {problem}\n{damaged}"));
                verdicts.accepted += 1;
            }
            Err(ScheduleError::Action { .. }) => verdicts.action += 1,
            Err(ScheduleError::Missing { .. }) => verdicts.missing += 1,
            Err(ScheduleError::Deadlock { waits }) => {
                verdicts.deadlock += 1;
                check_cycle(&waits);
            }
            Err(ScheduleError::ChannelOrder { .. }) => verdicts.channel_order += 1,
            Err(other) => panic!("{number}: {other}"),
        }
    }
    let Verdicts { accepted, action, missing, deadlock, channel_order } = verdicts;
    assert!([accepted, action, missing, deadlock, channel_order].iter().all(|count| *count > 200), "{verdicts:?}");
}

/// Each waits for the next, and the last for the first.
fn check_cycle(waits: &[crate::pipeline::Wait]) {
    let next = waits.iter().cycle().skip(1);
    assert!(!waits.is_empty() && waits.iter().zip(next).all(|(wait, next)| wait.from == next.rank), "{waits:?}");
}

fn mutate(schedule: &mut PipelineSchedule, random: &mut Random) {
    let rank = random.below(schedule.ranks);
    let count = schedule.actions[rank].len();
    if count == 0 {
        return;
    }
    let (at, other_rank) = (random.below(count), random.below(schedule.ranks));
    let other = random.below(count);
    match random.below(11) {
        0 => drop(schedule.actions[rank].remove(at)),
        1 => schedule.actions[rank].swap(at, (at + 1).min(count - 1)),
        2 => schedule.actions[rank].swap(at, other),
        3 => {
            let copy = schedule.actions[rank][at];
            schedule.actions[rank].insert(other, copy);
        }
        4 => {
            let moved = schedule.actions[rank].remove(at);
            let to = random.below(schedule.actions[other_rank].len() + 1);
            schedule.actions[other_rank].insert(to, moved);
        }
        5 => schedule.actions[rank][at].stage = random.below(schedule.stages + 1),
        6 => schedule.actions[rank][at].micro_batch = random.below(schedule.micro_batches + 1),
        7 => schedule.actions[rank][at].kind = ActionKind::ALL[random.below(4)],
        8 => {
            let moved = schedule.actions[rank].remove(at);
            schedule.actions[rank].insert(random.below(count), moved);
        }
        9 => split(&mut schedule.actions[rank], at, random),
        _ => merge(&mut schedule.actions[rank], at, random),
    }
}

/// A backward pass in two parts, the second anywhere.
fn split(actions: &mut Vec<Action>, at: usize, random: &mut Random) {
    let Some(at) = (at..actions.len()).find(|at| actions[*at].kind == ActionKind::Backward) else { return };
    let weight = Action { kind: ActionKind::BackwardWeight, ..actions[at] };
    actions[at].kind = ActionKind::BackwardInput;
    actions.insert(random.below(actions.len() + 1), weight);
}

/// Two parts made one, at the place of the first or of the second.
fn merge(actions: &mut Vec<Action>, at: usize, random: &mut Random) {
    let Some(at) = (at..actions.len()).find(|at| actions[*at].kind == ActionKind::BackwardInput) else { return };
    let weight = Action { kind: ActionKind::BackwardWeight, ..actions[at] };
    let Some(second) = actions.iter().position(|action| *action == weight) else { return };
    let (kept, removed) = if random.below(2) == 0 { (at, second) } else { (second, at) };
    actions[kept].kind = ActionKind::Backward;
    actions.remove(removed);
}
