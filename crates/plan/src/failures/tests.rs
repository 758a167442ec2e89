//! Runs replay from their seed, add up, and agree with the formulas where there are any.

use super::clock::{FailureTimes, failure_rate, gamma};
use super::*;

const HOUR: f64 = 3600.0;

fn devices(count: usize, mean: f64, shape: f64, repair: f64) -> Part {
    Part { kind: "device".into(), count, clock: Clock { mean, shape }, repair, per_host: 1 }
}

/// A thousand devices, one of which fails every ten hours or so.
fn spec(recovery: Recovery) -> RunSpec {
    RunSpec {
        parts: vec![devices(1000, 1e4 * HOUR, 1.0, 0.5 * HOUR)],
        host_devices: 1,
        recovery,
        layouts: vec![LayoutSpeed { devices: 1000, speed: 1.0 }, LayoutSpeed { devices: 992, speed: 0.99 }],
        step: 10.0,
        interval: HOUR,
        checkpoint: 60.0,
        restart: 300.0,
        horizon: 52.0 * 7.0 * 24.0 * HOUR,
        seed: 1,
    }
}

fn adds_up(outcome: &RunOutcome) {
    let RunOutcome { useful, lost, checkpoints, restarting, waiting, slowed, horizon, .. } = outcome;
    let all = useful + lost + checkpoints + restarting + waiting + slowed;
    assert!((all / horizon - 1.0).abs() < 1e-9, "{all} of {horizon}: {outcome:?}");
}

#[test]
fn clocks_have_their_means() {
    assert!((gamma(5.0) - 24.0).abs() < 1e-10 && (gamma(1.5) - 0.886_226_925_452_758).abs() < 1e-12);
    let times = FailureTimes::new(3);
    for shape in [0.7, 1.0, 2.0] {
        let clock = Clock { mean: 5.0, shape };
        let mean = (0..20_000).map(|part| times.lifetime(&clock, part, 0)).sum::<f64>() / 2e4;
        assert!((mean / 5.0 - 1.0).abs() < 0.03, "shape {shape}: {mean}");
    }
    assert_eq!(Clock { mean: f64::INFINITY, shape: 1.0 }.time(0.5), f64::INFINITY);
}

#[test]
fn a_restarting_run_agrees_with_the_formula() {
    let spec = spec(Recovery::Restart { spares: 100 });
    let outcome = simulate_run(&spec);
    adds_up(&outcome);
    assert_eq!(outcome, simulate_run(&spec), "a seed replays it");
    assert_ne!(outcome, simulate_run(&RunSpec { seed: 2, ..spec.clone() }));
    let (count, expected) = (outcome.failure_count() as f64, spec.expected_failures());
    assert!((count - expected).abs() < 4.0 * expected.sqrt(), "{count} failures, {expected} expected");
    // Daly: M e^(R/M) (e^((τ+δ)/M) − 1) seconds for τ of work.
    let mean = 1.0 / failure_rate(&spec.parts);
    let formula = HOUR / (mean * (spec.restart / mean).exp() * ((HOUR + spec.checkpoint) / mean).exp_m1());
    assert!((outcome.goodput() / formula - 1.0).abs() < 0.005, "{} and {formula}", outcome.goodput());
}

#[test]
fn the_best_interval_is_daly_s_and_no_other_is_better() {
    for checkpoint in [10.0, 60.0, 600.0] {
        let spec = RunSpec { checkpoint, ..spec(Recovery::Restart { spares: 1000 }) };
        let best = best_interval(&spec).unwrap();
        assert!((best.seconds / best.daly - 1.0).abs() < 0.01, "{best:?}");
        assert!((best.seconds / best.young - 1.0).abs() < 0.15, "{best:?}");
        let goodput = |interval: f64| {
            let runs = (0..4).map(|seed| simulate_run(&RunSpec { interval, seed, ..spec.clone() }).goodput());
            runs.sum::<f64>() / 4.0
        };
        let at_best = goodput(best.seconds);
        assert!((at_best / best.efficiency - 1.0).abs() < 0.01, "{at_best} and {best:?}");
        assert!(at_best > goodput(best.seconds * 4.0) && at_best > goodput(best.seconds / 4.0));
    }
    assert_eq!(best_interval(&RunSpec { parts: Vec::new(), ..spec(Recovery::Elastic) }), None);
}

#[test]
fn weibull_failures_move_the_best_interval() {
    // One host that wears out: it seldom fails early, so that saving seldom is better than after exponential times.
    let host = devices(1, 50.0 * HOUR, 4.0, 0.0);
    let horizon = 3e5 * HOUR;
    let spec = RunSpec { parts: vec![host], host_devices: 1000, horizon, ..spec(Recovery::Restart { spares: 1000 }) };
    let best = best_interval(&spec).unwrap();
    assert!(matches!(best.basis, IntervalBasis::Gaps(500..)), "{best:?}");
    let exponential = RunSpec { parts: vec![devices(1, 50.0 * HOUR, 1.0, 0.0)], ..spec.clone() };
    let reference = best_interval(&exponential).unwrap();
    assert!(best.efficiency > reference.efficiency, "{best:?} {reference:?}");
    let goodput = |interval: f64| simulate_run(&RunSpec { interval, ..spec.clone() }).goodput();
    assert!(goodput(best.seconds) >= goodput(reference.seconds) - 1e-3);
}

#[test]
fn elastic_runs_lose_less_and_restarts_wait_for_repairs() {
    let elastic = simulate_run(&spec(Recovery::Elastic));
    let spared = simulate_run(&spec(Recovery::Restart { spares: 8 }));
    let waiting = simulate_run(&spec(Recovery::Restart { spares: 0 }));
    [&elastic, &spared, &waiting].into_iter().for_each(adds_up);
    assert_eq!(elastic.failures, waiting.failures);
    assert!(elastic.slowed > 0.0 && elastic.lost < 0.01 * waiting.lost);
    assert!(waiting.waiting > 0.0 && spared.waiting == 0.0);
    assert!(elastic.goodput() > spared.goodput() && spared.goodput() > waiting.goodput());
    assert!(waiting.availability() < spared.availability());
    // Periods follow each other without a gap.
    let all = &waiting.periods;
    assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start) && all[0].start == 0.0);
}

#[test]
fn nothing_fails_where_nothing_can() {
    let never = RunSpec { parts: vec![devices(10, f64::INFINITY, 1.0, 0.0)], ..spec(Recovery::Elastic) };
    let outcome = simulate_run(&RunSpec { interval: f64::INFINITY, ..never.clone() });
    assert_eq!((outcome.goodput(), outcome.availability(), outcome.failure_count()), (1.0, 1.0, 0));
    let saving = simulate_run(&never);
    assert!((saving.goodput() - 60.0 / 61.0).abs() < 1e-4, "{}", saving.goodput());
}

/// Eight devices of one host that work for 200 hours and are repaired in 100: all of them work at once for (2/3)^8 of the time,
/// however long the run is.
#[test]
fn a_host_is_there_when_all_its_parts_are() {
    let host = |hours: f64, seed: u64, recovery: Recovery| RunSpec {
        parts: vec![Part { per_host: 8, ..devices(8, 200.0 * HOUR, 1.0, 100.0 * HOUR) }],
        host_devices: 8,
        layouts: vec![LayoutSpeed { devices: 8, speed: 1.0 }],
        interval: f64::INFINITY,
        restart: 0.0,
        horizon: hours * HOUR,
        seed,
        ..spec(recovery)
    };
    let wanted = (2.0f64 / 3.0).powi(8);
    let up = |hours: f64, recovery: Recovery| {
        let runs = (0..20).map(|seed| simulate_run(&host(hours, seed, recovery)));
        runs.inspect(adds_up).map(|outcome| outcome.availability()).sum::<f64>() / 20.0
    };
    for hours in [5e4, 2.5e5] {
        for recovery in [Recovery::Restart { spares: 0 }, Recovery::Elastic] {
            let share = up(hours, recovery);
            assert!((share - wanted).abs() < 0.01, "{hours} hours, {recovery:?}: {share} of {wanted}");
        }
    }
}

/// Whoever goes on without a host is not held up by what else fails in it.
#[test]
fn a_second_failure_of_a_host_costs_nothing() {
    let link = Part { kind: "link".into(), count: 8, per_host: 8, ..devices(8, HOUR, 1.0, 1e6 * HOUR) };
    let broken = RunSpec {
        parts: vec![link],
        host_devices: 8,
        layouts: vec![LayoutSpeed { devices: 16, speed: 1.0 }, LayoutSpeed { devices: 8, speed: 0.5 }],
        horizon: 1e4 * HOUR,
        ..spec(Recovery::Elastic)
    };
    let outcome = simulate_run(&broken);
    adds_up(&outcome);
    assert_eq!((outcome.failure_count(), outcome.gaps.len(), outcome.restarting), (8, 1, broken.restart));
}

/// New parts that wear out do not fail in the first weeks; those that fail early do.
#[test]
fn as_many_failures_are_expected_as_there_are() {
    for (shape, mean, repair) in [
        (0.5, 3000.0, 1.0),
        (0.7, 300.0, 50.0),
        (1.0, 300.0, 0.0),
        (1.0, 200.0, 100.0),
        (4.0, 2000.0, 1.0),
        (4.0, 100.0, 20.0),
        (0.7, 5.0, 1.0),
    ] {
        let parts = vec![devices(64, mean * HOUR, shape, repair * HOUR)];
        let of_seed =
            |seed: u64| RunSpec { parts: parts.clone(), horizon: 1344.0 * HOUR, seed, ..spec(Recovery::Elastic) };
        let expected = of_seed(0).expected_failures();
        let counts: Vec<f64> = (0..50).map(|seed| simulate_run(&of_seed(seed)).failure_count() as f64).collect();
        let mean_count = counts.iter().sum::<f64>() / 50.0;
        let variance = counts.iter().map(|count| (count - mean_count).powi(2)).sum::<f64>() / 49.0;
        let close = 4.0 * (variance / 50.0).sqrt().max(0.02) + 0.002 * expected;
        assert!((mean_count - expected).abs() < close, "shape {shape}, mean {mean}: {mean_count}, {expected} expected");
    }
}

#[test]
fn what_seldom_fails_is_seldom_saved() {
    let weeks = 8.0 * 168.0 * HOUR;
    let worn = RunSpec {
        parts: vec![devices(1000, 2e4 * HOUR, 4.0, HOUR)],
        horizon: weeks,
        ..spec(Recovery::Restart { spares: 1000 })
    };
    assert!(worn.expected_failures() < 0.1);
    let best = best_interval(&worn).unwrap();
    let young = (2.0 * worn.checkpoint * 20.0 * HOUR).sqrt();
    assert_eq!(best.basis, IntervalBasis::Expected);
    assert!(best.seconds > 20.0 * young, "{best:?} and {young}");
    // Ten failures of a run are few; those of many runs are enough.
    let early = RunSpec { parts: vec![devices(64, 2e4 * HOUR, 0.5, HOUR)], ..worn };
    assert!((16.0..100.0).contains(&early.expected_failures()), "{}", early.expected_failures());
    assert!(matches!(best_interval(&early).unwrap().basis, IntervalBasis::Gaps(500..)));
}
