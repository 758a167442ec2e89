//! A Markov chain over tokens: each has one successor that follows it seven times in eight; else any token may.
//!
//! A model that has learnt the successors reaches a loss of about `0.38 + 0.125 · ln(classes)` nats per token.

use std::sync::OnceLock;

use kolo_graph::rng::Stream;

use crate::noise::below_of_word;
use crate::split::Permutation;

/// So many low bits of a word decide whether the token is a surprise (all zero: one in eight).
const SURPRISE_BITS: u32 = 3;

#[derive(Debug)]
pub struct Chain {
    stream: Stream,
    successor: Permutation,
    /// The permutation as a table. It is made with the first sample, when the job is known to fit into memory.
    table: OnceLock<Vec<u32>>,
    /// Targets are counted modulo this.
    targets: usize,
    /// The chain's position of the first target.
    target_start: usize,
}

impl Chain {
    pub fn new(seed: u64, classes: usize, targets: usize, target_start: usize) -> Self {
        let successor = Permutation::new(seed, "data.synthetic.successor", classes);
        let (stream, table) = (Stream::new(seed, "data.synthetic.chain"), OnceLock::new());
        Self { stream, successor, table, targets, target_start }
    }

    fn successors(&self) -> &[u32] {
        let make = || (0..self.successor.len()).map(|token| self.successor.at(token) as u32).collect();
        self.table.get_or_init(make)
    }

    pub fn fill_input(&self, sample: usize, out: &mut [i32]) {
        for (token, walked) in out.iter_mut().zip(self.walk(sample)) {
            *token = walked as i32;
        }
    }

    pub fn fill_target(&self, sample: usize, out: &mut [i32]) {
        for (token, walked) in out.iter_mut().zip(self.walk(sample).skip(self.target_start)) {
            *token = (walked as usize % self.targets) as i32;
        }
    }

    /// The tokens of a sample, without end. The first is always a surprise.
    fn walk(&self, sample: usize) -> impl Iterator<Item = u32> {
        let (mut token, successors) = (None, self.successors());
        (0_u64..).flat_map(move |block| self.stream.block(sample as u64, block)).map(move |word| {
            let next = match token {
                Some(token) if !word.is_multiple_of(1 << SURPRISE_BITS) => successors[token as usize],
                _ => below_of_word(word, successors.len()) as u32,
            };
            token = Some(next);
            next
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(chain: &Chain, sample: usize, inputs: usize, targets: usize) -> (Vec<i32>, Vec<i32>) {
        let (mut x, mut y) = (vec![-1; inputs], vec![-1; targets]);
        chain.fill_input(sample, &mut x);
        chain.fill_target(sample, &mut y);
        (x, y)
    }

    #[test]
    fn target_is_the_input_moved_by_one() {
        let chain = Chain::new(1, 50, 50, 1);
        for number in 0..20 {
            let (x, y) = sample(&chain, number, 33, 33);
            assert_eq!(x[1..], y[..32]);
            assert!(x.iter().chain(&y).all(|token| (0..50).contains(token)));
        }
    }

    #[test]
    fn a_single_target_follows_the_last_token() {
        let (_, all) = sample(&Chain::new(1, 50, 50, 1), 4, 8, 8);
        let (_, last) = sample(&Chain::new(1, 50, 3, 8), 4, 8, 1);
        assert_eq!(last, [all[7] % 3]);
    }

    #[test]
    fn a_table_of_successors_predicts_most_tokens() {
        let chain = Chain::new(1, 50, 50, 1);
        let pairs = (0..200).flat_map(|number| {
            let (x, y) = sample(&chain, number, 32, 32);
            x.into_iter().zip(y)
        });
        let hits = pairs.filter(|(x, y)| chain.successors()[*x as usize] as i32 == *y).count() as f64;
        let share = hits / (200.0 * 32.0);
        assert!((0.85..0.91).contains(&share), "{share}");
    }
}
