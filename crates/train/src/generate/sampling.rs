//! Choosing a token by its logits.
//!
//! The choice is a function of the logits, the settings and the number of the token: random numbers are counter-based, the
//! exponentials are our own, and equal logits are ordered by token. So a seed gives the same text everywhere.

use crate::error::Error;
use kolo_graph::rng::Stream;
use kolo_ops::real::Real;
use std::cmp::Ordering;

/// How a token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0 takes the likeliest token.
    pub temperature: f32,
    /// Only the likeliest so many.
    pub top_k: Option<usize>,
    /// Only the likeliest that together have this probability, but at least one.
    pub top_p: Option<f32>,
    pub seed: u64,
}

impl Sampling {
    /// The likeliest token, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: None, top_p: None, seed: 0 };

    /// Whether tokens can be chosen so.
    pub fn check(&self) -> Result<(), Error> {
        let wrong = |message: String, hint: &str| Err(Error::Unfit { message, hint: hint.into() });
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            let message = format!("the temperature is {}", self.temperature);
            return wrong(message, "choose a number from 0, which takes the likeliest token, to about 2");
        }
        if self.top_k == Some(0) {
            return wrong("top-k is 0, which leaves no token".into(), "choose at least 1, or leave it out");
        }
        if self.top_p.is_some_and(|p| !(p > 0.0 && p <= 1.0)) {
            let message = format!("top-p is {}", self.top_p.unwrap_or_default());
            return wrong(message, "choose a probability above 0 and up to 1");
        }
        Ok(())
    }
}

/// Tokens looked at first where only the likeliest count; as many again, and twice, if their probability is not enough.
const FIRST_LOOK: usize = 256;

/// Chooses tokens. It keeps its memory from one to the next.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    stream: Stream,
    /// Tokens, the likeliest first as far as they are sorted.
    order: Vec<u32>,
}

impl Sampler {
    pub fn new(sampling: &Sampling) -> Result<Self, Error> {
        sampling.check()?;
        Ok(Self { sampling: *sampling, stream: Stream::new(sampling.seed, "generate"), order: Vec::new() })
    }

    /// The token that follows, by the random number of this token.
    pub fn choose(&mut self, logits: &[f32], number: u64) -> Result<u32, Error> {
        let best = best(logits)?;
        let Sampling { temperature, top_k, top_p, .. } = self.sampling;
        if temperature == 0.0 || top_k == Some(1) {
            return Ok(best as u32);
        }
        let largest = logits[best];
        // Not below zero, and 1 for the likeliest: at least one is left, whatever the temperature.
        let weight = |token: u32| f64::from(Real::exp((logits[token as usize] - largest) / temperature));
        let uniform = f64::from(self.stream.uniform(0, number));
        self.order.clear();
        self.order.extend(0..logits.len() as u32);
        let kept = match (top_k, top_p) {
            (None, None) => &self.order[..],
            (Some(k), None) => first_sorted(&mut self.order, logits, k),
            (k, Some(p)) => {
                let k = k.unwrap_or(logits.len()).min(logits.len());
                let among = if k < logits.len() { first_sorted(&mut self.order, logits, k) } else { &self.order[..] };
                let total: f64 = among.iter().map(|token| weight(*token)).sum();
                let mut look = FIRST_LOOK.min(k);
                loop {
                    let sorted = first_sorted(&mut self.order, logits, look);
                    let enough = prefix_of(sorted, f64::from(p) * total, weight);
                    if enough.is_some() || look == k {
                        let count = enough.unwrap_or(look);
                        break &self.order[..count];
                    }
                    look = (look * 2).min(k);
                }
            }
        };
        let total: f64 = kept.iter().map(|token| weight(*token)).sum();
        let reached = prefix_of(kept, uniform * total, weight).unwrap_or(kept.len());
        Ok(kept[reached.max(1) - 1])
    }
}

/// How many of the tokens, from the first, have more than this weight together; `None` if all have not.
fn prefix_of(tokens: &[u32], wanted: f64, weight: impl Fn(u32) -> f64) -> Option<usize> {
    let mut sum = 0.0;
    tokens
        .iter()
        .position(|token| {
            sum += weight(*token);
            sum > wanted
        })
        .map(|at| at + 1)
}

/// The likeliest `count` tokens, in order; the rest stay behind them.
fn first_sorted<'o>(order: &'o mut [u32], logits: &[f32], count: usize) -> &'o [u32] {
    let count = count.min(order.len());
    let by_logit = |one: &u32, other: &u32| {
        let by = logits[*other as usize].partial_cmp(&logits[*one as usize]).unwrap_or(Ordering::Equal);
        by.then(one.cmp(other))
    };
    if count < order.len() {
        order.select_nth_unstable_by(count, by_logit);
    }
    order[..count].sort_unstable_by(by_logit);
    &order[..count]
}

/// The likeliest token, of equals the first.
fn best(logits: &[f32]) -> Result<usize, Error> {
    let mut best = 0;
    for (at, logit) in logits.iter().enumerate() {
        if logit.is_nan() || *logit == f32::INFINITY {
            let message = format!("the logit of token {at} is {logit}");
            let hint = "the weights are not finite or the training diverged; check the loss of its run";
            return Err(Error::Unfit { message, hint: hint.into() });
        }
        if *logit > logits[best] {
            best = at;
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f32, top_k: Option<usize>, top_p: Option<f32>) -> Sampling {
        Sampling { temperature, top_k, top_p, seed: 7 }
    }

    fn shares(sampling: Sampling, logits: &[f32], draws: u64) -> Vec<f64> {
        let mut sampler = Sampler::new(&sampling).unwrap();
        let mut counts = vec![0.0; logits.len()];
        (0..draws).for_each(|number| counts[sampler.choose(logits, number).unwrap() as usize] += 1.0);
        counts.iter().map(|count| count / draws as f64).collect()
    }

    fn close(got: &[f64], want: &[f64]) {
        assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 0.01), "{got:?}, must be {want:?}");
    }

    #[test]
    fn tokens_come_up_by_their_probabilities() {
        let logits: Vec<f32> = [0.1f32, 0.2, 0.3, 0.4].iter().map(|p| p.ln()).collect();
        close(&shares(sampling(1.0, None, None), &logits, 40_000), &[0.1, 0.2, 0.3, 0.4]);
        // Half the temperature squares the probabilities.
        close(&shares(sampling(0.5, None, None), &logits, 40_000), &[0.01 / 0.3, 0.04 / 0.3, 0.09 / 0.3, 0.16 / 0.3]);
        close(&shares(sampling(1.0, Some(2), None), &logits, 40_000), &[0.0, 0.0, 0.3 / 0.7, 0.4 / 0.7]);
        close(&shares(sampling(1.0, None, Some(0.65)), &logits, 40_000), &[0.0, 0.0, 0.3 / 0.7, 0.4 / 0.7]);
        close(&shares(sampling(1.0, Some(3), Some(0.99)), &logits, 40_000), &[0.0, 0.2 / 0.9, 0.3 / 0.9, 0.4 / 0.9]);
        close(&shares(sampling(1.0, None, Some(1e-6)), &logits, 100), &[0.0, 0.0, 0.0, 1.0]);
        close(&shares(sampling(0.0, None, None), &logits, 100), &[0.0, 0.0, 0.0, 1.0]);
    }

    /// A flat distribution needs more than the first look.
    #[test]
    fn top_p_looks_as_far_as_it_must() {
        let logits = vec![0.0; 3000];
        let mut sampler = Sampler::new(&sampling(1.0, None, Some(0.5))).unwrap();
        let chosen: Vec<u32> = (0..500).map(|number| sampler.choose(&logits, number).unwrap()).collect();
        // Of equals the first are the likeliest.
        assert!(chosen.iter().all(|token| *token <= 1500) && chosen.iter().any(|token| *token > 1400));
    }

    #[test]
    fn ties_go_to_the_first_and_a_seed_repeats() {
        assert_eq!(Sampler::new(&Sampling::GREEDY).unwrap().choose(&[1.0, 3.0, 3.0], 0).unwrap(), 1);
        let logits: Vec<f32> = (0..50).map(|at| (at as f32).sin()).collect();
        let draw = |seed| {
            let mut sampler = Sampler::new(&Sampling { seed, ..sampling(0.9, Some(40), Some(0.95)) }).unwrap();
            (0..20).map(|number| sampler.choose(&logits, number).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn wrong_settings_and_logits_are_errors() {
        for (bad, text) in [
            (sampling(-1.0, None, None), "the temperature is -1"),
            (sampling(f32::NAN, None, None), "the temperature is NaN"),
            (sampling(1.0, Some(0), None), "top-k is 0"),
            (sampling(1.0, None, Some(0.0)), "top-p is 0"),
            (sampling(1.0, None, Some(1.5)), "top-p is 1.5"),
        ] {
            assert!(Sampler::new(&bad).unwrap_err().to_string().starts_with(text), "{text}");
        }
        let error = Sampler::new(&Sampling::GREEDY).unwrap().choose(&[0.0, f32::NAN], 0).unwrap_err();
        assert!(error.to_string().starts_with("the logit of token 1 is NaN"));
    }
}
