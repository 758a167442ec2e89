//! A whole job in virtual time, from a seed: members, links with delay, and one injected fault. It drives the real coordinator.
//!
//! Without a fault, or with one that stays under the limits, the job must end well; otherwise the right rank must be named
//! and all must be gone within the stated bound. A failing seed is printed and replays exactly.

mod elastic;
mod groups;
mod job;
mod saves;
mod state;

use crate::deadlines::Deadlines;
use crate::membership::Verdict;
use job::Simulation;
use kolo_comm::Fault;

const SEEDS: u64 = 4000;
const DEADLINES: Deadlines = Deadlines { heartbeat_ms: 1000 };
const JOB: u64 = 99;
const GENERATION: u32 = 5;
/// Longest delay that must not raise a false alarm: silence less a beat, less a tick of the coordinator.
const DELAY_MAX_MS: u64 = 1150;
/// No job lasts longer in virtual time.
const HORIZON_MS: u64 = 300_000;

#[derive(Clone, Copy, Debug, PartialEq)]
enum InjectedFault {
    Nothing,
    /// The coordinator itself does not run for a while.
    CoordinatorPause(u64),
    BriefStop(u64),
    SlowRank,
    StaleMessages,
    Crash,
    /// A crash of which the others' own links tell them first.
    CrashHeardByOthers,
    ExitCode(i32),
    Stop,
    Partition,
    Hang,
    OtherCall,
    OwnFailure,
    NeverJoins,
    Twin,
    Garbage,
}

const INJECTED_FAULTS: [InjectedFault; 16] = [
    InjectedFault::Nothing,
    InjectedFault::CoordinatorPause(5000),
    InjectedFault::BriefStop(300),
    InjectedFault::SlowRank,
    InjectedFault::StaleMessages,
    InjectedFault::Crash,
    InjectedFault::CrashHeardByOthers,
    InjectedFault::ExitCode(7),
    InjectedFault::Stop,
    InjectedFault::Partition,
    InjectedFault::Hang,
    InjectedFault::OtherCall,
    InjectedFault::OwnFailure,
    InjectedFault::NeverJoins,
    InjectedFault::Twin,
    InjectedFault::Garbage,
];

fn tolerable(injected: InjectedFault) -> bool {
    matches!(
        injected,
        InjectedFault::Nothing
            | InjectedFault::CoordinatorPause(_)
            | InjectedFault::BriefStop(_)
            | InjectedFault::SlowRank
            | InjectedFault::StaleMessages
    )
}

/// Milliseconds from the fault to the end of everything, at most.
fn bound_ms(simulation: &Simulation) -> u64 {
    let detect = match simulation.injected {
        InjectedFault::Stop | InjectedFault::Partition => DEADLINES.silence_ms(),
        InjectedFault::Hang => DEADLINES.stall_ms() + 1000,
        // Up to a beat until it shows, and the others must come to their call too.
        InjectedFault::OtherCall => DEADLINES.beat_ms() + 1000,
        InjectedFault::NeverJoins => DEADLINES.heartbeat_ms * crate::rendezvous::JOIN_HEARTBEATS,
        _ => DEADLINES.settle_ms(),
    };
    let unseen = if simulation.supervised { 0 } else { DEADLINES.heartbeat_ms };
    detect + DEADLINES.grace_ms() + unseen + 4 * DEADLINES.tick_ms() + 5 * simulation.delay_max_ms + 20
}

/// Whether nobody can see or bring about the end of this rank.
fn expected_left(simulation: &Simulation, rank: usize) -> bool {
    !simulation.supervised
        && rank == simulation.victim
        && matches!(simulation.injected, InjectedFault::Stop | InjectedFault::Partition)
}

/// Whether the verdict says what happened.
fn blames_the_right_rank(simulation: &Simulation, verdict: &Verdict, fault: &Fault) -> bool {
    let text = fault.to_string();
    match simulation.injected {
        InjectedFault::NeverJoins => text.contains("did not join") && text.contains(&simulation.victim.to_string()),
        InjectedFault::Twin => text.contains(&format!("two processes claim to be rank {}", simulation.victim)),
        InjectedFault::OtherCall => {
            matches!(fault, Fault::Mismatch { rank, peer, .. } if *rank == simulation.victim || *peer == simulation.victim)
        }
        // Where the evidence comes in time, it speaks for itself.
        InjectedFault::CrashHeardByOthers if simulation.supervised && simulation.delay_max_ms <= 20 => {
            matches!(fault, Fault::Lost { peer, why, .. } if *peer == simulation.victim && why.contains("signal 9"))
        }
        InjectedFault::Garbage => matches!(fault, Fault::Rejected { .. }),
        InjectedFault::Hang => matches!(fault, Fault::Stalled { .. }) && verdict.culprit == Some(simulation.victim),
        _ => verdict.culprit == Some(simulation.victim),
    }
}

fn check(seed: u64) {
    let mut simulation = Simulation::new(seed);
    let (ended_ms, verdict) = simulation.run();
    let about = format!(
        "seed {seed}: {:?} on rank {} of {} ({}supervised, delay {} ms): {verdict:?}",
        simulation.injected,
        simulation.victim,
        simulation.size,
        if simulation.supervised { "" } else { "not " },
        simulation.delay_max_ms
    );
    if tolerable(simulation.injected) || simulation.injected_ms.is_none() {
        assert!(verdict.exit_code == 0 && verdict.fault.is_none() && simulation.endings == 0, "false alarm, {about}");
        return assert!(simulation.members.iter().all(|member| member.finished), "ended early, {about}");
    }
    let fault = verdict.fault.as_ref().unwrap_or_else(|| panic!("not found, {about}"));
    assert!(verdict.exit_code != 0 && simulation.endings == 1, "{about}");
    let right = blames_the_right_rank(&simulation, &verdict, fault);
    assert!(right, "wrong culprit, {about}");
    if simulation.injected == InjectedFault::ExitCode(7) && simulation.supervised {
        assert_eq!(verdict.exit_code, 7, "{about}");
    }
    // Without a supervisor, whoever had not joined yet goes when the coordinator's links close.
    let here =
        |rank: &usize| simulation.members[*rank].alive && (simulation.supervised || expected_left(&simulation, *rank));
    let here: Vec<usize> = (0..simulation.size).filter(here).collect();
    let expected: Vec<usize> = (0..simulation.size).filter(|rank| expected_left(&simulation, *rank)).collect();
    if simulation.delay_max_ms <= 300 {
        assert_eq!((&verdict.left, &here), (&expected, &expected), "somebody is left, {about}");
    }
    let took_ms = ended_ms - simulation.injected_ms.unwrap_or(0);
    assert!(took_ms <= bound_ms(&simulation), "took {took_ms} ms, more than {}, {about}", bound_ms(&simulation));
    if simulation.supervised && simulation.delay_max_ms == 1 {
        let limit_ms = match simulation.injected {
            InjectedFault::Hang | InjectedFault::NeverJoins => u64::MAX,
            InjectedFault::Stop | InjectedFault::Partition => 2 * DEADLINES.heartbeat_ms,
            _ => DEADLINES.heartbeat_ms,
        };
        assert!(took_ms <= limit_ms, "took {took_ms} ms, {about}");
    }
}

#[test]
fn thousands_of_jobs() {
    for seed in 0..SEEDS {
        check(seed);
    }
}
