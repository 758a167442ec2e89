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
    /// Devices that are lost with it.
    pub devices: usize,
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
