//! `builtin:waves`: sums of sines to be continued by one value.
//!
//! The input is noisy and the target is not: the best reachable error then measures the model, not the noise.

use std::f64::consts::TAU;

use kolo_graph::rng::Stream;
use kolo_graph::settings::Settings;

use crate::error::ReadError;
use crate::noise::{between, fill_normal};
use crate::source::{Opened, SampleCost, Source, SourceKind};
use kolo_graph::field::{Column, Field};

pub const KIND: SourceKind = SourceKind {
    name: "builtin:waves",
    doc: "noisy sums of sines; the target is the next value, without its noise",
    shaped_by_model: false,
    make,
};

/// The shortest and the longest period, in steps.
const PERIOD: (f32, f32) = (6.0, 60.0);
/// The least and the greatest amplitude before they are scaled by their number.
const AMPLITUDE: (f32, f32) = (0.5, 1.5);
const NOISE_MAX: f64 = 100.0;

/// The series: `x [context, 1]` real, `y [1]` real.
#[derive(Debug)]
pub struct Waves {
    fields: [Field; 2],
    context: usize,
    waves: usize,
    noise: f32,
    samples: usize,
    shapes: Stream,
    noises: Stream,
}

/// One sine.
struct Wave {
    amplitude: f32,
    /// Angle per step, and at step 0.
    frequency: f64,
    phase: f64,
}

impl Wave {
    fn at(&self, step: usize) -> f32 {
        self.amplitude * (self.frequency * step as f64 + self.phase).sin() as f32
    }
}

impl Waves {
    pub fn new(context: usize, waves: usize, noise: f32, samples: usize, seed: u64) -> Self {
        let fields = [Field::real("x", &[context, 1]), Field::real("y", &[1])];
        let stream = |name| Stream::new(seed, name);
        let (shapes, noises) = (stream("data.waves.shape"), stream("data.waves.noise"));
        Self { fields, context, waves, noise, samples, shapes, noises }
    }

    /// The sines of a sample. Their amplitudes shrink with their number, so that the sum keeps its size.
    fn sines(&self, sample: usize) -> impl Iterator<Item = Wave> {
        let scale = 1.0 / (self.waves as f32).sqrt();
        (0..self.waves).map(move |number| {
            let words = self.shapes.block(sample as u64, number as u64);
            Wave {
                amplitude: scale * between(words[0], AMPLITUDE.0, AMPLITUDE.1),
                frequency: TAU / f64::from(between(words[1], PERIOD.0, PERIOD.1)),
                phase: f64::from(between(words[2], 0.0, 1.0)) * TAU,
            }
        })
    }

    fn fill_input(&self, sample: usize, out: &mut [f32]) {
        fill_normal(&self.noises, sample, out);
        out.iter_mut().for_each(|value| *value *= self.noise);
        for wave in self.sines(sample) {
            for (step, value) in out.iter_mut().enumerate() {
                *value += wave.at(step);
            }
        }
    }
}

fn make(settings: &Settings, seed: u64, _: &[Field]) -> Opened {
    let context = settings.size("context", 64)?;
    let waves = settings.size("waves", 3)?;
    let noise = settings.float_in("noise", 0.05, 0.0, NOISE_MAX)? as f32;
    let samples = settings.count("samples", 4096, 1)?;
    Ok(Box::new(Waves::new(context, waves, noise, samples, seed)))
}

impl Source for Waves {
    fn fields(&self) -> &[Field] {
        &self.fields
    }

    fn len(&self) -> usize {
        self.samples
    }

    fn fill(&self, sample: usize, field: usize, out: Column<'_>) -> Result<(), ReadError> {
        assert!(sample < self.samples && field < self.fields.len(), "sample {sample}, field {field}");
        match field {
            0 => self.fill_input(sample, out.reals()),
            _ => out.reals()[0] = self.sines(sample).map(|wave| wave.at(self.context)).sum(),
        }
        Ok(())
    }

    fn cost(&self) -> SampleCost {
        SampleCost::Computed { ns: 20 * (self.context * self.waves) as u64 }
    }

    fn describe(&self) -> String {
        let Self { context, waves, noise, samples, .. } = self;
        format!("{}: {samples} series of {context} steps, {waves} sines each, noise {noise}", KIND.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(source: &Waves, sample: usize) -> (Vec<f32>, f32) {
        let (mut x, mut y) = (vec![0.0; source.context], [0.0]);
        source.fill(sample, 0, Column::F32(&mut x)).unwrap();
        source.fill(sample, 1, Column::F32(&mut y)).unwrap();
        (x, y[0])
    }

    /// A single sine obeys next = 2 cos(frequency) · last − the one before; the target continues the input.
    #[test]
    fn target_continues_the_input() {
        let source = Waves::new(16, 1, 0.0, 50, 3);
        for sample in 0..50 {
            let (x, y) = read(&source, sample);
            let frequency = source.sines(sample).next().unwrap().frequency;
            let next = 2.0 * frequency.cos() as f32 * x[15] - x[14];
            assert!((next - y).abs() < 1e-4, "{next} {y}");
        }
    }

    /// Extrapolating a line beats answering zero.
    #[test]
    fn target_is_predictable() {
        let source = Waves::new(64, 3, 0.05, 500, 3);
        let (mut zero, mut line) = (0.0, 0.0);
        for sample in 0..500 {
            let (x, y) = read(&source, sample);
            zero += y * y;
            line += (2.0 * x[63] - x[62] - y).powi(2);
        }
        assert!(line < 0.5 * zero, "{line} {zero}");
        assert!((0.2..2.0).contains(&(zero / 500.0)), "{zero}");
    }

    #[test]
    fn noise_has_the_asked_size() {
        let (clean, noisy) = (Waves::new(64, 3, 0.0, 200, 3), Waves::new(64, 3, 0.2, 200, 3));
        let differences = (0..200).flat_map(|sample| {
            let (a, b) = (read(&clean, sample), read(&noisy, sample));
            assert_eq!(a.1, b.1);
            a.0.into_iter().zip(b.0).map(|(a, b)| (a - b).powi(2))
        });
        let deviation = (differences.sum::<f32>() / (200.0 * 64.0)).sqrt();
        assert!((deviation - 0.2).abs() < 0.01, "{deviation}");
    }
}
