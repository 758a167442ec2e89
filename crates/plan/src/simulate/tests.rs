//! Without noise the simulation equals the formulas of the literature exactly. Durations are sums of powers of two, so that sums
//! in any order are exact.

use super::messages::{MessageTiming, simulate_programs};
use super::pipeline::{PipelineActs, pipeline_scripts};
use super::{Act, ExchangeCost, Noise, Replica, Scenario, Scope, Script, SimulationOptions, simulate};
use kolo_comm::CallKind;
use kolo_comm::algorithms::{Algorithm, CallShape};
use kolo_comm::program::CollectiveProgram;
use kolo_parallel::schedules::{Action, ActionKind, PipelineSchedule, Sizes, family};

const FORWARD: f64 = 1.5;
const BACKWARD: f64 = 2.75;

fn schedule(name: &str, ranks: usize, micro_batches: usize, chunks: usize) -> PipelineSchedule {
    family(name).unwrap().schedule(Sizes { ranks, micro_batches, chunks }).unwrap()
}

/// A pipeline whose actions take so long and whose messages take nothing, or `latency`.
fn scenario(schedule: &PipelineSchedule, seconds: impl Fn(Action) -> f64, latency: f64) -> Scenario {
    let mut scenario = Scenario { replicas: vec![Replica::alike(1)], ranks_per_unit: 1, ..Scenario::default() };
    let (name, lane) = (scenario.name("work"), scenario.lane("pipeline"));
    let scope = Scope::Unit;
    let message = scenario.exchange(ExchangeCost { lane, scope, name, latency, transfer: 0.0, level: 0, bytes: 8 });
    let acts = PipelineActs {
        acts: &|_, action| vec![Act::Compute { seconds: seconds(action), name }],
        message: &|_| message,
        after: &|_| Vec::new(),
    };
    pipeline_scripts(&mut scenario, schedule, &acts);
    scenario
}

fn step_of(scenario: &Scenario) -> f64 {
    simulate(scenario, &SimulationOptions::default()).unwrap().seconds
}

#[test]
fn pipelines_take_what_their_formulas_say() {
    let whole = |action: Action| match action.kind {
        ActionKind::Forward => FORWARD,
        _ => BACKWARD,
    };
    for ranks in [1usize, 2, 3, 4, 8] {
        for micro_batches in [ranks, 2 * ranks, 8 * ranks] {
            for name in ["gpipe", "1f1b"] {
                let schedule = schedule(name, ranks, micro_batches, 1);
                let formula = (micro_batches + ranks - 1) as f64 * (FORWARD + BACKWARD);
                let outcome = simulate(&scenario(&schedule, whole, 0.0), &SimulationOptions::default()).unwrap();
                assert_eq!(outcome.seconds, formula, "{name} {ranks} ranks {micro_batches} micro-batches");
                // Every rank waits (p - 1) (F + B): for messages, or for the others at the end.
                let idle = outcome.units.iter().map(|times| formula - times.compute);
                assert!(idle.into_iter().all(|idle| idle == (ranks - 1) as f64 * (FORWARD + BACKWARD)));
            }
            for chunks in [2usize, 4] {
                let schedule = schedule("interleaved", ranks, micro_batches, chunks);
                let part = 1.0 / chunks as f64;
                let formula = (micro_batches * chunks + ranks - 1) as f64 * (FORWARD + BACKWARD) * part;
                let step = step_of(&scenario(&schedule, |action| whole(action) * part, 0.0));
                assert_eq!(step, formula, "{chunks} chunks on {ranks} ranks, {micro_batches} micro-batches");
            }
        }
    }
}

#[test]
fn messages_delay_a_pipeline_once_per_stage_and_direction() {
    // GPipe: the first micro-batch waits for a message at every stage, forward and backward.
    let schedule = schedule("gpipe", 4, 8, 1);
    let seconds = |action: Action| if action.kind == ActionKind::Forward { 1.0 } else { 2.0 };
    assert_eq!(step_of(&scenario(&schedule, seconds, 0.25)), 11.0 * 3.0 + 2.0 * 3.0 * 0.25);
}

/// The programs of all ranks.
fn programs(algorithm: Algorithm, size: usize, count: usize) -> Vec<CollectiveProgram> {
    let hosts: Vec<usize> = (0..size).collect();
    let shape = |rank: usize| CallShape {
        kind: CallKind::AllReduce,
        rank,
        size,
        root: 0,
        count,
        mean: false,
        in_place: true,
        send: &[],
        recv: &[],
        peer: 0,
        hosts: &hosts,
        segment: usize::MAX,
    };
    (0..size).map(|rank| algorithm.program(&shape(rank))).collect()
}

#[test]
fn rings_and_trees_take_what_their_formulas_say() {
    let timing = MessageTiming { latency: 0.5, seconds_per_element: 0.25, combine_per_element: 0.125 };
    for size in [2usize, 4, 8, 16] {
        let count = 64 * size;
        let time = |algorithm| simulate_programs(&programs(algorithm, size, count), |_, _| timing).unwrap();
        let (ranks, elements) = (size as f64, count as f64);
        // 2 (P - 1) (alpha + beta S / P), and gamma S / P for each of the P - 1 sums.
        let ring = 2.0 * (ranks - 1.0) * (0.5 + 0.25 * elements / ranks) + (ranks - 1.0) * 0.125 * elements / ranks;
        assert_eq!(time(Algorithm::Ring), ring, "ring of {size}");
        // 2 lg P (alpha + beta S), and gamma S for each of the lg P sums.
        let tree = 2.0 * ranks.log2() * (0.5 + 0.25 * elements) + ranks.log2() * 0.125 * elements;
        assert_eq!(time(Algorithm::Binomial), tree, "tree of {size}");
        let sent = 2.0 * elements * (ranks - 1.0) / ranks;
        let halving = 2.0 * ranks.log2() * 0.5 + 0.25 * sent + 0.125 * sent / 2.0;
        assert_eq!(time(Algorithm::HalvingDoubling), halving, "halving and doubling of {size}");
    }
}

/// One unit that computes `before`, starts an exchange on each lane, computes `after` and waits for all.
fn overlapping(before: f64, exchanges: &[(&str, f64, u32)], after: f64) -> Scenario {
    let mut scenario = Scenario { replicas: vec![Replica::alike(4)], ranks_per_unit: 1, ..Scenario::default() };
    let name = scenario.name("work");
    let mut acts = vec![Act::Compute { seconds: before, name }];
    for (handle, (lane, transfer, level)) in exchanges.iter().enumerate() {
        let lane = scenario.lane(lane);
        let scope = Scope::Replicas;
        let cost = ExchangeCost { lane, scope, name, latency: 0.5, transfer: *transfer, level: *level, bytes: 1 };
        acts.push(Act::Start { exchange: scenario.exchange(cost), handle: handle as u32 });
    }
    acts.push(Act::Compute { seconds: after, name });
    acts.extend((0..exchanges.len() as u32).map(|handle| Act::Wait { handle }));
    scenario.levels = 2;
    scenario.scripts = vec![Script { acts, handles: exchanges.len() as u32 }];
    scenario
}

#[test]
fn lanes_run_in_order_and_links_are_shared() {
    // Hidden behind compute.
    assert_eq!(step_of(&overlapping(1.0, &[("data", 2.0, 0)], 4.0)), 5.0);
    // Exposed: 0.5 + 2 beside 1 second of compute.
    assert_eq!(step_of(&overlapping(1.0, &[("data", 2.0, 0)], 1.0)), 3.5);
    // Two of one lane: one after the other.
    assert_eq!(step_of(&overlapping(1.0, &[("data", 2.0, 0), ("data", 1.0, 0)], 0.0)), 1.0 + 2.5 + 1.5);
    // Two lanes on two levels: at the same time.
    assert_eq!(step_of(&overlapping(1.0, &[("data", 2.0, 0), ("tensor", 1.0, 1)], 0.0)), 3.5);
    // Two lanes on one level: both have half of the link until the shorter is done.
    assert_eq!(step_of(&overlapping(1.0, &[("data", 2.0, 0), ("tensor", 1.0, 0)], 0.0)), 1.5 + 2.0 + 1.0);
}

/// Units that run ahead of the clock where nobody else has a part come to the same times as units that never do.
#[test]
fn running_ahead_of_the_clock_changes_no_time() {
    let same = |scenario: &Scenario| {
        let options = SimulationOptions { noise: Noise { spread: 0.1, seed: 9 }, step: 0, keep_spans: false };
        let ahead = simulate(scenario, &options).unwrap();
        let on_time = simulate(scenario, &SimulationOptions { keep_spans: true, ..options }).unwrap();
        assert_eq!((ahead.seconds, &ahead.units), (on_time.seconds, &on_time.units));
        assert!(ahead.events <= on_time.events);
    };
    same(&overlapping(1.0, &[("data", 2.0, 0), ("tensor", 1.0, 0), ("data", 0.5, 1)], 0.25));
    // Every action exchanges something in the middle; the first ranks have something on its way meanwhile, on the same link.
    let mut scenario = Scenario { replicas: vec![Replica::alike(1); 2], ranks_per_unit: 1, ..Scenario::default() };
    let (name, tensor, data) = (scenario.name("work"), scenario.lane("tensor"), scenario.lane("data"));
    let cost = |lane, scope, transfer| ExchangeCost { lane, scope, name, latency: 0.125, transfer, level: 0, bytes: 8 };
    let own = scenario.exchange(cost(tensor, Scope::Unit, 0.5));
    let sums = scenario.exchange(cost(data, Scope::Replicas, 3.0));
    let message = scenario.exchange(cost(data, Scope::Unit, 0.25));
    let compute = Act::Compute { seconds: 1.0, name };
    let acts = PipelineActs {
        acts: &|rank, action| {
            let begins = rank < 2 && action.kind == ActionKind::Backward && action.micro_batch % 3 == 0;
            let first = begins.then_some(Act::Start { exchange: sums, handle: 1 });
            let rest = [compute, Act::Start { exchange: own, handle: 0 }, Act::Wait { handle: 0 }, compute];
            first.into_iter().chain(rest).collect()
        },
        message: &|_| message,
        after: &|rank| if rank < 2 { vec![Act::Wait { handle: 1 }] } else { Vec::new() },
    };
    pipeline_scripts(&mut scenario, &schedule("1f1b", 4, 8, 1), &acts);
    scenario.levels = 1;
    for script in &mut scenario.scripts {
        script.handles = 2;
    }
    same(&scenario);
}

#[test]
fn one_replica_stands_for_all_that_are_alike() {
    let mut alike = overlapping(1.0, &[("data", 2.0, 0)], 1.0);
    let one = simulate(&alike, &SimulationOptions::default()).unwrap();
    alike.replicas = vec![Replica::alike(1); 4];
    let four = simulate(&alike, &SimulationOptions::default()).unwrap();
    assert_eq!((one.seconds, one.units[0].clone()), (four.seconds, four.units[3].clone()));
    // A slow one delays everybody's exchange, and nobody's compute.
    alike.replicas = vec![Replica::alike(3), Replica { count: 1, slowness: vec![2.0] }];
    let slow = simulate(&alike, &SimulationOptions::default()).unwrap();
    assert_eq!(slow.seconds, 2.0 + 2.5);
    assert_eq!(slow.units[0].exposed[0], 2.5);
    assert_eq!(slow.units[1].exposed[0], 0.5);
}

#[test]
fn noise_replays_and_nobody_waits_for_ever() {
    let schedule = schedule("1f1b", 4, 8, 1);
    let mut scenario = scenario(&schedule, |_| 1.0, 0.0);
    scenario.replicas = vec![Replica::alike(1); 3];
    let noisy = |seed: u64| {
        let options = SimulationOptions { noise: Noise { spread: 0.1, seed }, step: 0, keep_spans: true };
        simulate(&scenario, &options).unwrap()
    };
    assert_eq!(noisy(3), noisy(3));
    assert_ne!(noisy(3).seconds, noisy(4).seconds);
    assert!(noisy(3).seconds > step_of(&scenario));
    // A message that nobody sends is an error that names who waits.
    let lost = scenario.scripts[0].acts.iter().position(|act| matches!(act, Act::Send { .. })).unwrap();
    scenario.scripts[0].acts.remove(lost);
    let error = simulate(&scenario, &SimulationOptions::default()).unwrap_err().to_string();
    assert!(error.contains("waits for message"), "{error}");
}
