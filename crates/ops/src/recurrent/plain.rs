//! The plain definitions in f64, row by row, that the references of the three layers share.

use kolo_graph::Dense;

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
