//! How often to save.
//!
//! Between two failures a job completes some whole cycles of an interval τ of work and a checkpoint δ; the rest is lost. If `S(t)`
//! is the probability that nothing fails for t, it completes Σ S(k (τ + δ)) cycles on average, and needs a mean time between
//! failures and a restart for them. The best τ makes the most of that. For exponential times this is Daly's model, whose
//! optimum is √(2 δ M) to first order (Young). For other times `S` is that of the gaps of simulated runs; where those hardly
//! fail, it is exponential with the mean time between failures that is expected of this run.

use super::clock::failure_rate;
use super::run::{RunSpec, simulate_run};

/// The best interval, with what is left of the time when it is kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BestInterval {
    pub seconds: f64,
    /// Progress as a share of the time, restarts and all.
    pub efficiency: f64,
    /// Young's √(2 δ M), for comparison.
    pub young: f64,
    pub daly: f64,
    pub basis: IntervalBasis,
}

/// What an interval was found from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntervalBasis {
    /// Exponential times between failures, by the rates of the parts.
    Rates,
    /// So many times between failures of simulated runs.
    Gaps(usize),
    /// Exponential times, as many as are expected of the run: it fails too seldom for more.
    Expected,
}

/// Fewer gaps than these say less than their mean does.
const GAPS_MIN: usize = 500;
/// Runs that are simulated for gaps.
const RUNS_MAX: u64 = 32;
/// Intervals that are tried, evenly on a logarithmic scale, and then around the best.
const STEPS: usize = 240;
const CYCLES_MAX: usize = 1_000_000;

/// Daly's interval of higher order, for a mean time between failures and the cost of a checkpoint.
pub fn daly_interval(mean: f64, checkpoint: f64) -> f64 {
    if checkpoint >= 2.0 * mean {
        return mean;
    }
    let ratio = checkpoint / (2.0 * mean);
    (2.0 * checkpoint * mean).sqrt() * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0) - checkpoint
}

/// The interval that makes the most of the time. `None` if nothing fails, or a checkpoint costs nothing.
pub fn best_interval(spec: &RunSpec) -> Option<BestInterval> {
    let rate = failure_rate(&spec.parts);
    if rate == 0.0 || spec.checkpoint <= 0.0 {
        return None;
    }
    let exponential = spec.parts.iter().all(|part| part.clock.shape == 1.0 || part.clock.rate() == 0.0);
    let gaps = if exponential { Vec::new() } else { gaps(spec) };
    let (mean, basis) = match (exponential, gaps.is_empty()) {
        (true, _) => (1.0 / rate, IntervalBasis::Rates),
        (false, false) => (gaps.iter().sum::<f64>() / gaps.len() as f64, IntervalBasis::Gaps(gaps.len())),
        (false, true) => (spec.horizon / spec.expected_failures(), IntervalBasis::Expected),
    };
    // A restart is part of every gap: work begins after it.
    let efficiency = |interval: f64| {
        let cycle = interval + spec.checkpoint;
        let cycles = match basis {
            IntervalBasis::Gaps(_) => sampled_cycles(&gaps, spec.restart, cycle),
            IntervalBasis::Rates | IntervalBasis::Expected => (-spec.restart / mean).exp() / (cycle / mean).exp_m1(),
        };
        interval * cycles / mean
    };
    let young = (2.0 * spec.checkpoint * mean).sqrt();
    let mut best = young;
    for width in [4.0f64, 0.1] {
        let (low, step) = (best.ln() - width, 2.0 * width / STEPS as f64);
        let tried = (0..=STEPS).map(|at| (low + step * at as f64).exp());
        best = tried.max_by(|one, other| efficiency(*one).total_cmp(&efficiency(*other))).unwrap_or(best);
    }
    let daly = daly_interval(mean, spec.checkpoint);
    Some(BestInterval { seconds: best, efficiency: efficiency(best), young, daly, basis })
}

/// Times between failures of as many runs as it takes; none if they fail too seldom. The job does not change when parts fail.
fn gaps(spec: &RunSpec) -> Vec<f64> {
    let mut gaps = Vec::new();
    if spec.expected_failures() * RUNS_MAX as f64 <= GAPS_MIN as f64 {
        return gaps;
    }
    for number in 0..RUNS_MAX {
        let seed = spec.seed.wrapping_add(number);
        gaps.extend(simulate_run(&RunSpec { interval: f64::INFINITY, seed, ..spec.clone() }).gaps);
        if gaps.len() >= GAPS_MIN {
            return gaps;
        }
    }
    Vec::new()
}

/// Cycles that are completed in a gap, on average.
fn sampled_cycles(gaps: &[f64], restart: f64, cycle: f64) -> f64 {
    let whole = |gap: &f64| ((gap - restart).max(0.0) / cycle).floor().min(CYCLES_MAX as f64);
    gaps.iter().map(whole).sum::<f64>() / gaps.len() as f64
}
