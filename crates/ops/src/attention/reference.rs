//! The definition, entry by entry in f64.

use super::sizes::{Mask, Sizes, sizes};
use kolo_graph::{Dense, Type};

/// `e^(score − sum)`; of a query that sees no key the sum is −∞, and it gives nothing to any.
pub(super) fn probability(score: f64, sum: f64) -> f64 {
    if sum == f64::NEG_INFINITY { 0.0 } else { (score - sum).exp() }
}

/// The operands of an attention, forward or backward.
pub(super) struct Reference<'a> {
    inputs: &'a [&'a Dense],
    pub s: Sizes,
    packed: bool,
    bias: Option<&'a Dense>,
}

impl<'a> Reference<'a> {
    /// `bias` is the place of the bias, if there is one.
    pub fn new(inputs: &'a [&'a Dense], heads: usize, packed: bool, mask: Mask, bias: Option<usize>) -> Self {
        let types: Vec<Type> = inputs.iter().map(|input| Type::f32(input.shape.clone())).collect();
        let s = sizes(&types, heads, packed).expect("infer checked the types").masked(mask);
        Self { inputs, s, packed, bias: bias.map(|at| inputs[at]) }
    }

    /// Calls `f` with every batch item, head and query.
    pub fn for_each_row(&self, mut f: impl FnMut([usize; 3])) {
        for b in 0..self.s.batch {
            for h in 0..self.s.heads {
                (0..self.s.queries).for_each(|q| f([b, h, q]));
            }
        }
    }

    /// Element `d` of row `t` of q (0), k (1) or v (2).
    pub fn entry(&self, which: usize, [b, h, t]: [usize; 3], d: usize) -> f64 {
        let at = h * self.s.dim + d;
        match self.packed {
            true => self.inputs[0].get(&[b, t, which * self.s.width() + at]),
            false => self.inputs[which].get(&[b, t, at]),
        }
    }

    pub fn scores(&self, row: [usize; 3]) -> Vec<f64> {
        let ([b, h, q], s) = (row, &self.s);
        let score = |k: usize| {
            if s.hidden(q, k) {
                return f64::NEG_INFINITY;
            }
            let dot: f64 = (0..s.dim).map(|d| self.entry(0, row, d) * self.entry(1, [b, h, k], d)).sum();
            dot / (s.dim as f64).sqrt() + self.bias.map_or(0.0, |bias| bias.get(&[b, h, q, k]))
        };
        (0..s.keys).map(score).collect()
    }

    /// Of a backward: probabilities and score gradients (before the scale) of one row.
    pub fn row(&self, row: [usize; 3]) -> (Vec<f64>, Vec<f64>) {
        let ([b, h, q], s, count) = (row, &self.s, self.inputs.len());
        let (out, sums, g) = (self.inputs[count - 3], self.inputs[count - 2], self.inputs[count - 1]);
        let p: Vec<f64> = self.scores(row).iter().map(|x| probability(*x, sums.get(&row))).collect();
        let at = |x: &Dense, d: usize| x.get(&[b, q, h * s.dim + d]);
        let delta: f64 = (0..s.dim).map(|d| at(out, d) * at(g, d)).sum();
        let gradient = |k: usize| {
            let dp: f64 = (0..s.dim).map(|d| at(g, d) * self.entry(2, [b, h, k], d)).sum();
            p[k] * (dp - delta)
        };
        let ds = (0..s.keys).map(gradient).collect();
        (p, ds)
    }
}
