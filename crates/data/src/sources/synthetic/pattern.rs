//! One smooth pattern per class, under noise: what a classifier of real inputs can learn.
//!
//! A pattern is a sum of low cosines over the last two dims, with coefficients of its own for each class and channel.
//! It is rebuilt from these few numbers for every sample, since a table of patterns would not fit memory for large
//! images.

use std::f64::consts::{PI, SQRT_2};
use std::sync::OnceLock;

use kolo_graph::rng::Stream;
use kolo_graph::vectorized;

use crate::noise::{below_of_word, between, fill_normal};

/// Cosines per dim.
const FREQUENCIES: usize = 4;
/// Root mean square of a pattern. Below the default noise of 1, so that a single element says little.
const AMPLITUDE: f32 = 0.5;

#[derive(Debug)]
pub struct Pattern {
    labels: Stream,
    coefficients: Stream,
    noises: Stream,
    classes: usize,
    noise: f32,
    rows: Cosines,
    columns: Cosines,
}

impl Pattern {
    pub fn new(seed: u64, shape: &[usize], classes: usize, noise: f32) -> Self {
        let stream = |name| Stream::new(seed, name);
        let (rows, columns) = match *shape {
            [.., rows, columns] => (rows, columns),
            [columns] => (1, columns),
            [] => (1, 1),
        };
        Self {
            labels: stream("data.synthetic.label"),
            coefficients: stream("data.synthetic.pattern"),
            noises: stream("data.synthetic.noise"),
            classes,
            noise,
            rows: Cosines::new(rows),
            columns: Cosines::new(columns),
        }
    }

    pub fn class(&self, sample: usize) -> usize {
        below_of_word(self.labels.block(sample as u64, 0)[0], self.classes)
    }

    pub fn fill_input(&self, sample: usize, out: &mut [f32]) {
        fill_normal(&self.noises, sample, out);
        let class = self.class(sample);
        let plane_elements = (self.rows.len * self.columns.len).max(1);
        for (channel, plane) in out.chunks_exact_mut(plane_elements).enumerate() {
            let coefficients = self.coefficients(class, channel);
            for (row, values) in plane.chunks_exact_mut(self.columns.len).enumerate() {
                self.add_row(&coefficients, row, values);
            }
        }
    }

    /// Scales the noise that `values` hold and adds the pattern's row. The row's cosines are summed first, which leaves
    /// [`FREQUENCIES`] products per element instead of their square.
    fn add_row(&self, coefficients: &[[f32; FREQUENCIES]; FREQUENCIES], row: usize, values: &mut [f32]) {
        let mut weights = [0.0; FREQUENCIES];
        for (down, coefficients) in self.rows.values().iter().map(|values| values[row]).zip(coefficients) {
            for (weight, coefficient) in weights.iter_mut().zip(coefficients) {
                *weight += down * coefficient;
            }
        }
        add_waves(values, self.noise, self.columns.values(), &weights);
    }

    /// Row by column frequency. Scaled so that the pattern's root mean square is [`AMPLITUDE`] in the mean over
    /// classes.
    fn coefficients(&self, class: usize, channel: usize) -> [[f32; FREQUENCIES]; FREQUENCIES] {
        let terms = self.rows.frequencies() * self.columns.frequencies();
        let bound = AMPLITUDE * (3.0 / terms as f32).sqrt();
        std::array::from_fn(|down| {
            let low = (channel * FREQUENCIES + down) as u64;
            self.coefficients.block(class as u64, low).map(|word| between(word, -bound, bound))
        })
    }
}

vectorized! {
    /// `values = values · noise + Σ waves · weights`.
    fn add_waves(values: &mut [f32], noise: f32, waves: &[Vec<f32>; FREQUENCIES], weights: &[f32; FREQUENCIES]) {
        let [a, b, c, d] = waves.each_ref().map(|wave| &wave[..values.len()]);
        for at in 0..values.len() {
            let low = a[at] * weights[0] + b[at] * weights[1];
            values[at] = values[at] * noise + (low + (c[at] * weights[2] + d[at] * weights[3]));
        }
    }
}

/// The first cosines of a dim of `len` positions, orthogonal and of mean square 1. A dim shorter than [`FREQUENCIES`]
/// has only as many; the others are zero.
#[derive(Debug)]
struct Cosines {
    len: usize,
    /// By frequency, then position. Made with the first sample, when the job is known to fit into memory.
    table: OnceLock<[Vec<f32>; FREQUENCIES]>,
}

impl Cosines {
    fn new(len: usize) -> Self {
        Self { len, table: OnceLock::new() }
    }

    fn values(&self) -> &[Vec<f32>; FREQUENCIES] {
        let len = self.len;
        let cosine = |position: usize, frequency: usize| match frequency {
            0 => 1.0,
            _ if frequency >= len => 0.0,
            _ => (SQRT_2 * (PI * frequency as f64 * (position as f64 + 0.5) / len as f64).cos()) as f32,
        };
        let wave = |frequency: usize| (0..len).map(|position| cosine(position, frequency)).collect();
        self.table.get_or_init(|| std::array::from_fn(wave))
    }

    fn frequencies(&self) -> usize {
        self.len.clamp(1, FREQUENCIES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pattern: &Pattern, sample: usize, elements: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; elements];
        pattern.fill_input(sample, &mut out);
        out
    }

    /// Learns the mean of each class from the first 500 samples and classifies the next 500 by the nearest mean.
    fn accuracy_of_nearest_mean(shape: &[usize], classes: usize) -> f64 {
        let elements = shape.iter().product();
        let pattern = Pattern::new(3, shape, classes, 1.0);
        let mut means = vec![vec![0.0; elements]; classes];
        let mut counts = vec![0.0; classes];
        for sample in 0..500 {
            let class = pattern.class(sample);
            counts[class] += 1.0;
            means[class].iter_mut().zip(read(&pattern, sample, elements)).for_each(|(mean, value)| *mean += value);
        }
        for (mean, count) in means.iter_mut().zip(counts) {
            mean.iter_mut().for_each(|value| *value /= f32::max(count, 1.0));
        }
        let nearest = |x: &[f32]| {
            let distance = |mean: &[f32]| mean.iter().zip(x).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
            (0..classes).min_by(|a, b| distance(&means[*a]).total_cmp(&distance(&means[*b]))).unwrap()
        };
        let right = (500..1000).filter(|sample| nearest(&read(&pattern, *sample, elements)) == pattern.class(*sample));
        right.count() as f64 / 500.0
    }

    #[test]
    fn nearest_mean_beats_chance() {
        for (shape, classes, least) in
            [(vec![3, 32, 32], 10, 0.99), (vec![1, 8, 8], 10, 0.8), (vec![16], 4, 0.6), (vec![20, 2], 5, 0.7)]
        {
            let accuracy = accuracy_of_nearest_mean(&shape, classes);
            assert!(accuracy > least, "{shape:?}: {accuracy}");
        }
    }

    #[test]
    fn patterns_are_smooth_and_of_the_stated_size() {
        let pattern = Pattern::new(3, &[3, 32, 32], 100, 0.0);
        let (mut square, mut step) = (0.0, 0.0);
        for sample in 0..100 {
            let image = read(&pattern, sample, 3072);
            square += image.iter().map(|value| value * value).sum::<f32>() / 3072.0;
            step +=
                image.chunks(32).flat_map(|row| row.windows(2)).map(|w| (w[1] - w[0]).powi(2)).sum::<f32>() / 2976.0;
        }
        assert!(((square / 100.0).sqrt() - AMPLITUDE).abs() < 0.05, "{square}");
        assert!(step < 0.05 * square, "{step} {square}");
    }

    #[test]
    fn classes_are_uniform() {
        let pattern = Pattern::new(3, &[4], 10, 0.0);
        let mut counts = [0; 10];
        (0..10_000).for_each(|sample| counts[pattern.class(sample)] += 1);
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }
}
