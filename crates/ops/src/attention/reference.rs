//! The definition, entry by entry in f64.

use super::sizes::{Sizes, sizes};
use kolo_graph::{Dense, Type};

pub(super) fn reference_sizes(inputs: &[&Dense], heads: usize, packed: bool) -> Sizes {
    let types: Vec<Type> = inputs.iter().map(|input| Type::f32(input.shape.clone())).collect();
    sizes(&types, heads, packed).expect("infer checked the types")
}

pub(super) fn for_each_row(s: &Sizes, mut f: impl FnMut(usize, usize, usize)) {
    for b in 0..s.batch {
        for h in 0..s.heads {
            (0..s.queries).for_each(|q| f(b, h, q));
        }
    }
}

/// Element of q (0), k (1) or v (2).
#[allow(clippy::too_many_arguments)]
pub(super) fn reference_entry(
    inputs: &[&Dense],
    s: &Sizes,
    packed: bool,
    which: usize,
    b: usize,
    t: usize,
    h: usize,
    d: usize,
) -> f64 {
    match packed {
        true => inputs[0].get(&[b, t, which * s.width() + h * s.dim + d]),
        false => inputs[which].get(&[b, t, h * s.dim + d]),
    }
}

#[allow(clippy::too_many_arguments)]
pub(super) fn reference_scores(
    inputs: &[&Dense],
    s: &Sizes,
    packed: bool,
    causal: bool,
    bias: Option<&Dense>,
    b: usize,
    h: usize,
    q: usize,
) -> Vec<f64> {
    let entry = |which, t, d| reference_entry(inputs, s, packed, which, b, t, h, d);
    (0..s.keys)
        .map(|k| {
            if s.hidden(q, k, causal) {
                return f64::NEG_INFINITY;
            }
            let dot: f64 = (0..s.dim).map(|d| entry(0, q, d) * entry(1, k, d)).sum();
            dot / (s.dim as f64).sqrt() + bias.map_or(0.0, |bias| bias.get(&[b, h, q, k]))
        })
        .collect()
}

/// Probabilities and score gradients (before the scale) of one row, by definition.
#[allow(clippy::too_many_arguments)]
pub(super) fn reference_row(
    inputs: &[&Dense],
    s: &Sizes,
    packed: bool,
    causal: bool,
    bias: Option<&Dense>,
    b: usize,
    h: usize,
    q: usize,
) -> (Vec<f64>, Vec<f64>) {
    let count = inputs.len();
    let (out, sums, g) = (inputs[count - 3], inputs[count - 2], inputs[count - 1]);
    let scores = reference_scores(inputs, s, packed, causal, bias, b, h, q);
    let p: Vec<f64> = scores.iter().map(|x| (x - sums.get(&[b, h, q])).exp()).collect();
    let at = |x: &Dense, d: usize| x.get(&[b, q, h * s.dim + d]);
    let delta: f64 = (0..s.dim).map(|d| at(out, d) * at(g, d)).sum();
    let ds = (0..s.keys)
        .map(|k| {
            let dp: f64 = (0..s.dim).map(|d| at(g, d) * reference_entry(inputs, s, packed, 2, b, k, h, d)).sum();
            p[k] * (dp - delta)
        })
        .collect();
    (p, ds)
}
