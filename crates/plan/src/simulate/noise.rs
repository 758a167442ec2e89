//! Seeded noise: how much longer a piece of work takes than it should.

use kolo_graph::rng::Stream;

/// The spread of the time that a piece of work takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Noise {
    /// Standard deviation of the logarithm of a rank's time: 0.02 is about two per cent.
    pub spread: f64,
    pub seed: u64,
}

impl Noise {
    pub const NONE: Self = Self { spread: 0.0, seed: 0 };

    pub fn is_none(&self) -> bool {
        self.spread == 0.0
    }
}

/// Draws the factors of one step.
#[derive(Clone, Copy, Debug)]
pub struct NoiseSource {
    stream: Stream,
    spread: f64,
    /// Ranks of a unit, of which the slowest counts.
    ranks: f64,
}

impl NoiseSource {
    pub fn new(noise: Noise, step: u64, ranks: usize) -> Self {
        let stream = Stream::new(noise.seed, &format!("noise of step {step}"));
        Self { stream, spread: noise.spread, ranks: ranks.max(1) as f64 }
    }

    /// The factor of a unit's act. It depends on nothing but seed, step, unit and act, in whatever order they are asked for.
    pub fn factor(&self, unit: u64, act: u64) -> f64 {
        if self.spread == 0.0 {
            return 1.0;
        }
        let [first, second, ..] = self.stream.block(unit, act);
        // The largest of several uniform numbers is one of them to the power of one over their count.
        let uniform = (f64::from(first) + f64::from(second) / 4_294_967_296.0 + 1e-10) / 4_294_967_296.0;
        let largest = uniform.min(1.0 - 1e-12).powf(1.0 / self.ranks);
        (self.spread * normal_quantile(largest.min(1.0 - 1e-12))).exp()
    }
}

/// The number that a standard normal variable is below with this probability: Acklam's rational approximation, within 1.2e-9.
pub fn normal_quantile(probability: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969_683_028_665_376e1,
        2.209_460_984_245_205e2,
        -2.759_285_104_469_687e2,
        1.383_577_518_672_69e2,
        -3.066_479_806_614_716e1,
        2.506_628_277_459_239,
    ];
    const B: [f64; 5] = [
        -5.447_609_879_822_406e1,
        1.615_858_368_580_409e2,
        -1.556_989_798_598_866e2,
        6.680_131_188_771_972e1,
        -1.328_068_155_288_572e1,
    ];
    const C: [f64; 6] = [
        -7.784_894_002_430_293e-3,
        -3.223_964_580_411_365e-1,
        -2.400_758_277_161_838,
        -2.549_732_539_343_734,
        4.374_664_141_464_968,
        2.938_163_982_698_783,
    ];
    const D: [f64; 4] =
        [7.784_695_709_041_462e-3, 3.224_671_290_700_398e-1, 2.445_134_137_142_996, 3.754_408_661_907_416];
    const TAIL: f64 = 0.024_25;
    let polynomial = |coefficients: &[f64], x: f64| coefficients.iter().fold(0.0, |sum, one| sum * x + one);
    let tail = |probability: f64| {
        let q = (-2.0 * probability.ln()).sqrt();
        polynomial(&C, q) / (polynomial(&D, q) * q + 1.0)
    };
    if probability < TAIL {
        tail(probability)
    } else if probability > 1.0 - TAIL {
        -tail(1.0 - probability)
    } else {
        let q = probability - 0.5;
        let r = q * q;
        polynomial(&A, r) * q / (polynomial(&B, r) * r + 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_tables() {
        for (probability, value) in [(0.5, 0.0), (0.841_344_746, 1.0), (0.975, 1.959_963_985), (0.001, -3.090_232_306)]
        {
            assert!((normal_quantile(probability) - value).abs() < 1e-6, "{probability}");
        }
    }

    #[test]
    fn factors_follow_from_their_counters_and_the_slowest_of_many_is_slow() {
        let one = NoiseSource::new(Noise { spread: 0.05, seed: 7 }, 0, 1);
        assert_eq!(one.factor(3, 4), one.factor(3, 4));
        let mean = |source: NoiseSource| (0..4000).map(|at| source.factor(at, 1)).sum::<f64>() / 4000.0;
        assert!((mean(one) - 1.0).abs() < 0.01, "{}", mean(one));
        // The expected largest of eight standard normal numbers is 1.42.
        let eight = mean(NoiseSource::new(Noise { spread: 0.05, seed: 7 }, 0, 8));
        assert!((eight.ln() / 0.05 - 1.42).abs() < 0.05, "{eight}");
        assert_eq!(NoiseSource::new(Noise::NONE, 0, 8).factor(3, 4), 1.0);
    }
}
