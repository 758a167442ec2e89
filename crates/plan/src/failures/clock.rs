//! When parts of a cluster fail.

use kolo_graph::rng::Stream;

/// The distribution of the time between failures of one part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clock {
    /// Mean seconds between failures; infinite if it never fails.
    pub mean: f64,
    /// The Weibull shape: 1 is exponential, below 1 parts fail early, above 1 they wear out.
    pub shape: f64,
}

impl Clock {
    /// Failures per second, in the long run.
    pub fn rate(&self) -> f64 {
        if self.mean.is_finite() && self.mean > 0.0 { 1.0 / self.mean } else { 0.0 }
    }

    /// The time that this uniform number from (0, 1) stands for.
    pub fn time(&self, uniform: f64) -> f64 {
        if self.rate() == 0.0 {
            return f64::INFINITY;
        }
        let scale = self.mean / gamma(1.0 + 1.0 / self.shape);
        scale * (-uniform.ln()).powf(1.0 / self.shape)
    }
}

/// Parts of one kind, each with a clock of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// What they are: `device`, `host`, `link`.
    pub kind: String,
    pub count: usize,
    pub clock: Clock,
    /// Seconds until one that has failed is back.
    pub repair: f64,
    /// How many of them a host has. One that has failed takes its host out until it is back.
    pub per_host: usize,
}

/// Points of time at which the renewal equation is solved.
const RENEWAL_STEPS: usize = 1500;
/// From so many lifetimes on, failures come at their rate of the long run.
const LIFETIMES_MANY: f64 = 150.0;

impl Clock {
    /// The probability that a new part has failed by then.
    pub fn failed_by(&self, time: f64) -> f64 {
        if self.rate() == 0.0 || time <= 0.0 {
            return 0.0;
        }
        let scale = self.mean / gamma(1.0 + 1.0 / self.shape);
        -(-(time / scale).powf(self.shape)).exp_m1()
    }

    /// How often a part that is new at first fails until then, on average, if it is new again after each repair.
    pub fn expected_failures(&self, time: f64, repair: f64) -> f64 {
        if self.rate() == 0.0 {
            return 0.0;
        }
        let cycle = self.mean + repair;
        if self.shape == 1.0 && repair == 0.0 {
            return time * self.rate();
        }
        if time > LIFETIMES_MANY * cycle {
            let ratio = gamma(1.0 + 2.0 / self.shape) / gamma(1.0 + 1.0 / self.shape).powi(2);
            let variance = (ratio - 1.0) * self.mean * self.mean;
            return time / cycle + (variance / (cycle * cycle) + 1.0) / 2.0 - self.mean / cycle;
        }
        self.renewals(time, repair)
    }

    /// Solves m(t) = F(t) + ∫ m(t − x − repair) dF(x), step by step.
    fn renewals(&self, time: f64, repair: f64) -> f64 {
        let width = time / RENEWAL_STEPS as f64;
        let shift = repair / width;
        let failed: Vec<f64> = (0..=RENEWAL_STEPS).map(|at| self.failed_by(at as f64 * width)).collect();
        let mut expected = vec![0.0; RENEWAL_STEPS + 1];
        for at in 1..=RENEWAL_STEPS {
            // Where m is taken may lie between the point before and this one, which is not known yet.
            let (mut known, mut own) = (failed[at], 0.0);
            for first in 1..=at {
                let since = (at - first) as f64 + 0.5 - shift;
                if since <= 0.0 {
                    break;
                }
                let (low, part) = (since as usize, since.fract());
                let share = failed[first] - failed[first - 1];
                known += share * (1.0 - part) * expected[low];
                match low + 1 == at {
                    true => own += share * part,
                    false => known += share * part * expected[low + 1],
                }
            }
            expected[at] = known / (1.0 - own);
        }
        expected[RENEWAL_STEPS]
    }
}

/// Failures of all parts until then, on average.
pub fn expected_failures(parts: &[Part], time: f64) -> f64 {
    parts.iter().map(|part| part.count as f64 * part.clock.expected_failures(time, part.repair)).sum()
}

/// Failures of all parts per second, in the long run.
pub fn failure_rate(parts: &[Part]) -> f64 {
    parts.iter().map(|part| part.count as f64 * part.clock.rate()).sum()
}

/// Draws times between failures: a function of seed, part and how often it has failed.
#[derive(Clone, Copy, Debug)]
pub struct FailureTimes {
    stream: Stream,
}

impl FailureTimes {
    pub fn new(seed: u64) -> Self {
        Self { stream: Stream::new(seed, "failures") }
    }

    /// How long a part works after its failure of this number.
    pub fn lifetime(&self, clock: &Clock, part: u64, failures: u64) -> f64 {
        let [first, second, ..] = self.stream.block(part, failures);
        let word = (u64::from(first) << 21) ^ u64::from(second);
        // In (0, 1), with both ends left out.
        let uniform = (word as f64 + 0.5) / (1u64 << 53) as f64;
        clock.time(uniform)
    }
}

/// Euler's gamma function, for numbers from 1 on: Lanczos' approximation, within 1e-13.
pub fn gamma(x: f64) -> f64 {
    const G: f64 = 7.0;
    const COEFFICIENTS: [f64; 9] = [
        0.999_999_999_999_809_9,
        676.520_368_121_885_1,
        -1_259.139_216_722_402_8,
        771.323_428_777_653_1,
        -176.615_029_162_140_6,
        12.507_343_278_686_905,
        -0.138_571_095_265_720_12,
        9.984_369_578_019_572e-6,
        1.505_632_735_149_311_6e-7,
    ];
    let x = x - 1.0;
    let series = COEFFICIENTS.iter().enumerate().skip(1);
    let sum: f64 = COEFFICIENTS[0] + series.map(|(at, one)| one / (x + at as f64)).sum::<f64>();
    let t = x + G + 0.5;
    (2.0 * std::f64::consts::PI).sqrt() * t.powf(x + 0.5) * (-t).exp() * sum
}
