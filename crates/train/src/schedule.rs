//! Learning-rate schedules: data read from `[train] schedule`, and a pure function from the step to the rate.
//!
//! The rate depends on the step alone, so a resumed run continues where it was. A kind's clock starts when the warm-up
//! ends and stops at the job's last step; the warm-up climbs in a line to wherever the kind starts.

use std::f64::consts::PI;

use kolo_graph::settings::{SettingError, Settings};

/// How the learning rate moves over a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RateSchedule {
    shape: Shape,
    warmup_steps: usize,
    total_steps: usize,
}

/// The part after the warm-up. Every fraction is relative to the base rate.
#[derive(Clone, Debug, PartialEq)]
enum Shape {
    Constant,
    Step { every_steps: usize, factor: f64 },
    Linear { floor: f64 },
    Cosine { floor: f64 },
    OneCycle { start: f64, peak: f64, floor: f64, anneal: Anneal },
}

/// How a cycle moves between its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Anneal {
    Cosine,
    Linear,
}

const RECIPE_WARMUP_STEPS_MAX: usize = 200;

/// What PyTorch divides the first rate by for the last one.
const FINAL_DIVISOR: f64 = 1e4;

const KINDS: [&str; 5] = ["constant", "step", "linear", "cosine", "one-cycle"];

impl RateSchedule {
    /// Reads the schedule's table. Keys that the kind does not use are errors. Rates are fractions of the base rate.
    ///
    /// | kind | keys | meaning |
    /// |---|---|---|
    /// | all | `warmup` | steps of linear warm-up |
    /// | `step` | `every`, `factor` | every so many steps, times the factor |
    /// | `linear`, `cosine` | `floor` | falls to this fraction of the base rate |
    /// | `one-cycle` | `start`, `peak`, `floor`, `anneal` | PyTorch's `OneCycleLR`: from `start` up to 1 at `peak` of the run, then down to `floor` at the last step |
    pub fn read(settings: &Settings, total_steps: usize) -> Result<Self, SettingError> {
        let kind = settings.choice("kind", &KINDS)?;
        let warmup_steps = settings.count("warmup", 0, 0)?;
        let fraction = |key: &str, default: f64| settings.float_in(key, default, 0.0, 1.0);
        let shape = match kind {
            "step" => Shape::Step {
                every_steps: settings.count("every", (total_steps / 3).max(1), 1)?,
                factor: fraction("factor", 0.1)?,
            },
            "linear" => Shape::Linear { floor: fraction("floor", 0.0)? },
            "cosine" => Shape::Cosine { floor: fraction("floor", 0.0)? },
            "one-cycle" => {
                let start = fraction("start", 0.04)?;
                let anneal = settings.choice("anneal", &["cosine", "linear"])?;
                Shape::OneCycle {
                    start,
                    peak: fraction("peak", 0.3)?,
                    floor: fraction("floor", start / FINAL_DIVISOR)?,
                    anneal: if anneal == "linear" { Anneal::Linear } else { Anneal::Cosine },
                }
            }
            _ => Shape::Constant,
        };
        settings.finish()?;
        Ok(Self { shape, warmup_steps, total_steps })
    }

    /// What a job gets that names neither an optimizer nor a schedule: a warm-up over a twentieth of the run, but at most
    /// 200 steps, then half a cosine wave down to zero.
    pub fn recipe(total_steps: usize) -> Self {
        let warmup_steps = (total_steps / 20).min(RECIPE_WARMUP_STEPS_MAX);
        Self { shape: Shape::Cosine { floor: 0.0 }, warmup_steps, total_steps }
    }

    /// The learning rate of `step`, which counts from zero.
    pub fn rate(&self, base: f64, step: usize) -> f64 {
        if step < self.warmup_steps {
            let climbed = (step + 1) as f64 / self.warmup_steps as f64;
            return base * self.shape.fraction(0, self.span()) * climbed;
        }
        base * self.shape.fraction(step - self.warmup_steps, self.span())
    }

    /// Steps after the warm-up, at least one.
    fn span(&self) -> usize {
        self.total_steps.saturating_sub(self.warmup_steps).max(1)
    }
}

impl Shape {
    /// The fraction of the base rate, `steps` after the warm-up, which is followed by `span` steps.
    fn fraction(&self, steps: usize, span: usize) -> f64 {
        let progress = (steps as f64 / span as f64).min(1.0);
        match *self {
            Shape::Constant => 1.0,
            Shape::Step { every_steps, factor } => factor.powi(i32::try_from(steps / every_steps).unwrap_or(i32::MAX)),
            Shape::Linear { floor } => line(1.0, floor, progress),
            Shape::Cosine { floor } => half_wave(1.0, floor, progress),
            Shape::OneCycle { start, peak, floor, anneal } => {
                // As in PyTorch, the peak is a step and need not be a whole one, and the floor is the last step's.
                let (step, last) = (steps.min(span - 1) as f64, (span - 1) as f64);
                let top = peak * span as f64 - 1.0;
                match step <= top {
                    true => anneal.between(start, 1.0, if top > 0.0 { step / top } else { 1.0 }),
                    false => anneal.between(1.0, floor, (step - top) / (last - top)),
                }
            }
        }
    }
}

impl Anneal {
    fn between(self, from: f64, to: f64, progress: f64) -> f64 {
        match self {
            Anneal::Cosine => half_wave(from, to, progress),
            Anneal::Linear => line(from, to, progress),
        }
    }
}

fn line(from: f64, to: f64, progress: f64) -> f64 {
    from + (to - from) * progress
}

/// Half a cosine wave from `from` (at 0) to `to` (at 1).
fn half_wave(from: f64, to: f64, progress: f64) -> f64 {
    to + (from - to) * 0.5 * (1.0 + (PI * progress).cos())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::settings::Setting;

    fn settings(keys: &[(&str, Setting)]) -> Settings {
        let mut settings = Settings::new("train.schedule", "job.toml:9");
        for (key, value) in keys {
            settings.set(key, "job.toml:9", value.clone());
        }
        settings
    }

    fn schedule(kind: &str, total_steps: usize, keys: &[(&str, Setting)]) -> RateSchedule {
        let mut settings = settings(keys);
        settings.set("kind", "job.toml:9", Setting::Text(kind.into()));
        RateSchedule::read(&settings, total_steps).unwrap()
    }

    fn check(schedule: &RateSchedule, base: f64, expected: &[(usize, f64)]) {
        for &(step, rate) in expected {
            let found = schedule.rate(base, step);
            assert!((found - rate).abs() < 1e-12 * base, "step {step}: {found}, expected {rate}");
        }
    }

    #[test]
    fn an_empty_table_is_constant() {
        let schedule = RateSchedule::read(&settings(&[]), 10).unwrap();
        check(&schedule, 0.1, &[(0, 0.1), (9, 0.1), (1000, 0.1)]);
    }

    #[test]
    fn warmup_climbs_from_one_part() {
        let schedule = schedule("constant", 100, &[("warmup", Setting::Int(4))]);
        check(&schedule, 0.8, &[(0, 0.2), (1, 0.4), (2, 0.6), (3, 0.8), (4, 0.8), (99, 0.8)]);
    }

    #[test]
    fn step_counts_from_the_end_of_the_warmup() {
        let keys = [("every", Setting::Int(10)), ("factor", Setting::Float(0.5)), ("warmup", Setting::Int(2))];
        check(&schedule("step", 100, &keys), 8.0, &[(0, 4.0), (1, 8.0), (11, 8.0), (12, 4.0), (22, 2.0), (32, 1.0)]);
        check(&schedule("step", 30, &[]), 1.0, &[(9, 1.0), (10, 0.1), (20, 0.01)]);
    }

    #[test]
    fn linear_reaches_the_floor() {
        let schedule = schedule("linear", 10, &[("floor", Setting::Float(0.2))]);
        check(&schedule, 1.0, &[(0, 1.0), (5, 0.6), (10, 0.2), (50, 0.2)]);
    }

    #[test]
    fn cosine_falls_to_the_floor() {
        let keys = [("warmup", Setting::Int(50)), ("floor", Setting::Float(0.1))];
        let quarter = 0.1 + 0.9 * (2.0 + 2f64.sqrt()) / 4.0;
        let expected = [(0, 0.02), (49, 1.0), (50, 1.0), (100, quarter), (150, 0.55), (250, 0.1), (999, 0.1)];
        check(&schedule("cosine", 250, &keys), 1.0, &expected);
    }

    /// What `torch.optim.lr_scheduler.OneCycleLR(max_lr=2, total_steps=…, …)` gave.
    #[test]
    fn one_cycle_is_that_of_pytorch() {
        let cosine = [(0, 0.08), (7, 0.34304432775379445), (29, 2.0), (30, 1.9989930705690486), (64, 1.000004)];
        let linear = [(0, 0.08), (7, 0.543448275862069), (29, 2.0), (30, 1.9714286857142858), (64, 1.000004)];
        let cosine_end = [(98, 0.0010149294309515758), (99, 8e-6), (100, 8e-6), (999, 8e-6)];
        check(&schedule("one-cycle", 100, &[]), 2.0, &[&cosine[..], &cosine_end].concat());
        let by_line = [("anneal", Setting::Text("linear".into()))];
        check(
            &schedule("one-cycle", 100, &by_line),
            2.0,
            &[&linear[..], &[(98, 0.028579314285714252), (99, 8e-6)]].concat(),
        );
        // pct_start=0.45, div_factor=5, final_div_factor=100: the peak lies between two steps.
        let keys = [("peak", 0.45), ("start", 0.2), ("floor", 0.002)].map(|(key, value)| (key, Setting::Float(value)));
        let expected = [(0, 0.4), (7, 1.2136091311964776), (13, 1.985176448850768), (14, 1.9996636393729055)];
        let end = [(20, 1.485965900629968), (31, 0.0189129122081141), (32, 0.004)];
        check(&schedule("one-cycle", 33, &keys), 2.0, &[&expected[..], &end].concat());
        let short = [(0, 0.08), (1, 1.9611132546699173), (3, 1.3453676729610902), (5, 0.1985935837865312), (6, 8e-6)];
        check(&schedule("one-cycle", 7, &[]), 2.0, &short);
    }

    #[test]
    fn extremes_stay_finite() {
        for kind in KINDS {
            for total_steps in [0, 1, 3] {
                let schedule = schedule(kind, total_steps, &[("warmup", Setting::Int(2))]);
                assert!((0..6).all(|step| (0.0..=1.0).contains(&schedule.rate(1.0, step))), "{kind}");
            }
        }
        for (peak, total_steps) in [(0.0, 4), (0.25, 4), (1.0, 4), (1.0, 1), (0.0, 1)] {
            let schedule = schedule("one-cycle", total_steps, &[("peak", Setting::Float(peak))]);
            assert!((0..6).all(|step| (0.0..=1.0).contains(&schedule.rate(1.0, step))), "{peak} {total_steps}");
        }
    }

    #[test]
    fn mistakes_are_explained() {
        let kind = settings(&[("kind", Setting::Text("cosin".into()))]);
        assert_eq!(
            RateSchedule::read(&kind, 10).unwrap_err().to_string(),
            "job.toml:9: `train.schedule.kind` is \"cosin\", which is not known\n  hint: did you mean \"cosine\"? \
             The choices are constant, step, linear, cosine, one-cycle"
        );
        let unused = settings(&[("floor", Setting::Float(0.1))]);
        assert_eq!(
            RateSchedule::read(&unused, 10).unwrap_err().to_string(),
            "job.toml:9: unknown key `train.schedule.floor`\n  hint: the keys here are kind, warmup"
        );
    }
}
