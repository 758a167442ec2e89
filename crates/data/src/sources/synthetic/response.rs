//! A fixed smooth function of noise: what a regression can learn. It is a small network with random weights,
//! `y = A · tanh(W · x)`, with normal `x`.

use std::sync::OnceLock;

use kolo_graph::rng::Stream;

use crate::noise::{between, fill_normal, normal_of_word};

/// Hidden units.
const HIDDEN: usize = 4;

#[derive(Debug)]
pub struct Response {
    inputs: Stream,
    seed: u64,
    /// Elements of `x` and of `y`.
    sizes: [usize; 2],
    /// Made with the first sample, when the job is known to fit into memory.
    network: OnceLock<Network>,
}

#[derive(Debug)]
struct Network {
    /// Per element of `x`, scaled so that each hidden unit sees a variance of 1.
    inward: Vec<[f32; HIDDEN]>,
    /// Per element of `y`.
    outward: Vec<[f32; HIDDEN]>,
}

impl Response {
    pub fn new(seed: u64, inputs: usize, outputs: usize) -> Self {
        let (sizes, network) = ([inputs, outputs], OnceLock::new());
        Self { inputs: Stream::new(seed, "data.synthetic.input"), seed, sizes, network }
    }

    fn network(&self) -> &Network {
        self.network.get_or_init(|| {
            let [inputs, outputs] = self.sizes;
            let bound = (3.0 / inputs.max(1) as f32).sqrt();
            let inward = weights(self.seed, "data.synthetic.inward", inputs, |word| between(word, -bound, bound));
            Network { inward, outward: weights(self.seed, "data.synthetic.outward", outputs, away_from_zero) }
        })
    }

    pub fn fill_input(&self, sample: usize, out: &mut [f32]) {
        fill_normal(&self.inputs, sample, out);
    }

    pub fn fill_target(&self, sample: usize, out: &mut [f32]) {
        let hidden = self.hidden(sample).map(|sum| f64::from(sum).tanh() as f32);
        for (value, weights) in out.iter_mut().zip(&self.network().outward) {
            *value = (0..HIDDEN).map(|unit| weights[unit] * hidden[unit]).sum();
        }
    }

    /// `W · x`, drawing `x` again while it is summed.
    fn hidden(&self, sample: usize) -> [f32; HIDDEN] {
        let mut sums = [0.0; HIDDEN];
        for (block, weights) in self.network().inward.chunks(4).enumerate() {
            let words = self.inputs.block(sample as u64, block as u64);
            for (weights, word) in weights.iter().zip(words) {
                let x = normal_of_word(word);
                (0..HIDDEN).for_each(|unit| sums[unit] += weights[unit] * x);
            }
        }
        sums
    }
}

fn weights(seed: u64, name: &str, count: usize, of_word: impl Fn(u32) -> f32) -> Vec<[f32; HIDDEN]> {
    let stream = Stream::new(seed, name);
    (0..count as u64).map(|at| stream.block(0, at).map(&of_word)).collect()
}

/// Between 0.5 and 1 in magnitude: no seed makes a target that hardly varies.
fn away_from_zero(word: u32) -> f32 {
    let weight = between(word, -0.5, 0.5);
    weight + 0.5_f32.copysign(weight)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_is_the_network_applied_to_the_input() {
        let response = Response::new(2, 7, 3);
        let (mut x, mut y) = ([0.0; 7], [0.0; 3]);
        response.fill_input(5, &mut x);
        response.fill_target(5, &mut y);
        let hidden = |unit: usize| (0..7).map(|at| response.network().inward[at][unit] * x[at]).sum::<f32>().tanh();
        for (value, weights) in y.iter().zip(&response.network().outward) {
            let expected: f32 = (0..HIDDEN).map(|unit| weights[unit] * hidden(unit)).sum();
            assert!((value - expected).abs() < 1e-5, "{value} {expected}");
        }
    }

    /// The function varies, and a line along its gradient at zero already explains most of it.
    #[test]
    fn a_linear_guess_explains_most_of_it() {
        let response = Response::new(2, 50, 1);
        let (mut total, mut residual) = (0.0, 0.0);
        for sample in 0..1000 {
            let mut y = [0.0];
            response.fill_target(sample, &mut y);
            let sums = response.hidden(sample);
            let line: f32 = (0..HIDDEN).map(|unit| 0.6 * response.network().outward[0][unit] * sums[unit]).sum();
            total += y[0] * y[0];
            residual += (y[0] - line).powi(2);
        }
        assert!(total > 300.0 && residual < 0.5 * total, "{residual} of {total}");
    }
}
