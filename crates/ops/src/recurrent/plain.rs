//! The plain definitions in f64, row by row, that the references of the three layers share.

use kolo_graph::{Dense, Type};

/// The last dim at `[a, b]` of a tensor of three.
pub fn row(tensor: &Dense, a: usize, b: usize) -> &[f64] {
    let width = tensor.shape[2];
    let at = (a * tensor.shape[1] + b) * width;
    &tensor.data[at..at + width]
}

pub fn set_row(tensor: &mut Dense, a: usize, b: usize, values: &[f64]) {
    let at = (a * tensor.shape[1] + b) * tensor.shape[2];
    tensor.data[at..at + values.len()].copy_from_slice(values);
}

/// `bias + w · x`; no `x`, no product.
pub fn affine(w: &Dense, x: Option<&[f64]>, bias: &Dense) -> Vec<f64> {
    let mut out = bias.data.clone();
    let Some(x) = x else { return out };
    for (out, weights) in out.iter_mut().zip(w.data.chunks(w.shape[1])) {
        *out += weights.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
    }
    out
}

/// `wᵀ · g`.
pub fn transposed(w: &Dense, g: &[f64]) -> Vec<f64> {
    let mut out = vec![0.0; w.shape[1]];
    for (weights, g) in w.data.chunks(w.shape[1]).zip(g) {
        out.iter_mut().zip(weights).for_each(|(out, w)| *out += w * g);
    }
    out
}

/// `dw += g · xᵀ`.
pub fn add_outer(dw: &mut Dense, g: &[f64], x: &[f64]) {
    for (row, g) in dw.data.chunks_mut(x.len()).zip(g) {
        row.iter_mut().zip(x).for_each(|(dw, x)| *dw += g * x);
    }
}

pub fn add(sum: &mut [f64], values: &[f64]) {
    sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
}

/// The gradients of both weights, of the biases (one for both, or one each) and, if asked for, of `x`, from those of the
/// sums. `sums(sample, step, d_next)` gives the latter, for the input and for the state before; `d_next` is the gradient of
/// the state from the step after, and becomes what of the gradient of the state before does not go through the weight.
pub fn back_through_steps(
    inputs: &[&Dense],
    outputs: &[Type],
    need_dx: bool,
    mut sums: impl FnMut(usize, usize, &mut [f64]) -> [Vec<f64>; 2],
) -> Vec<Dense> {
    let [x, w_ih, w_hh, y, ..] = inputs else { unreachable!("operands are checked") };
    let (batch, steps, hidden) = (x.shape[0], x.shape[1], w_hh.shape[1]);
    let mut out: Vec<Dense> = outputs.iter().map(|ty| Dense::zeros(ty.shape.clone())).collect();
    let (zeros, biases) = (vec![0.0; hidden], outputs.len() - 2 - usize::from(need_dx));
    for sample in 0..batch {
        let mut d_next = vec![0.0; hidden];
        for step in (0..steps).rev() {
            let [to_input, to_state] = sums(sample, step, &mut d_next);
            add_outer(&mut out[0], &to_input, row(x, sample, step));
            add_outer(&mut out[1], &to_state, if step > 0 { row(y, sample, step - 1) } else { &zeros });
            for (bias, terms) in out[2..2 + biases].iter_mut().zip([&to_input, &to_state]) {
                add(&mut bias.data, terms);
            }
            if need_dx {
                set_row(&mut out[2 + biases], sample, step, &transposed(w_ih, &to_input));
            }
            add(&mut d_next, &transposed(w_hh, &to_state));
        }
    }
    out
}
