//! Sums over very many terms. Their error is measured in units of the last place of the sum of magnitudes, against f64.
//!
//! One chain of additions over 65,536 positive terms is off by some 50 units and one over a million by a thousand, because
//! each addition rounds a sum that is already large. Blocks keep it to a few.

use super::{draw, name, numbers, run_graph};
use kolo_graph::op::Dense;
use kolo_graph::{Arg, Builder, Tensor, Type};
use kolo_ops::conv::{Conv2dWeightGrad, Padding};
use kolo_ops::matmul::MatMul;
use kolo_ops::prelude::*;

const UNITS_MAX: f64 = 8.0;
/// Of products over a million terms, whose 4,096 blocks are added one after the other. PyTorch has up to 20.
const UNITS_MAX_OF_MANY_BLOCKS: f64 = 32.0;

/// The outputs of a graph of these inputs, each drawn from `low` to `low + 1`.
fn run(
    shapes: &[&[usize]],
    low: f64,
    build: impl for<'b> Fn(&[Tensor<'b>]) -> Vec<Tensor<'b>>,
) -> (Vec<Dense>, Vec<Vec<f64>>) {
    let builder = Builder::new();
    let inputs: Vec<Tensor<'_>> =
        shapes.iter().enumerate().map(|(at, shape)| builder.input(&name(at), Type::f32(shape.to_vec()))).collect();
    build(&inputs).into_iter().enumerate().for_each(|(at, out)| builder.output(&format!("y{at}"), out));
    let graph = builder.finish().unwrap();
    let values: Vec<Dense> =
        shapes.iter().enumerate().map(|(at, shape)| draw(&Arg::real(*shape).within(low, low + 1.0), at)).collect();
    let made = run_graph(&graph, &values, 1).iter().map(numbers).collect();
    (values, made)
}

/// The error of a sum of these terms.
fn units(got: f64, terms: impl Iterator<Item = f64> + Clone) -> f64 {
    let size: f64 = terms.clone().map(f64::abs).sum();
    (got - terms.sum::<f64>()).abs() / (size * f64::from(f32::EPSILON))
}

fn check(what: &str, low: f64, got: f64, terms: impl Iterator<Item = f64> + Clone) {
    check_within(UNITS_MAX, what, low, got, terms);
}

fn check_within(most: f64, what: &str, low: f64, got: f64, terms: impl Iterator<Item = f64> + Clone) {
    let units = units(got, terms);
    println!("{what}, terms from {low}: {units:.2} units");
    assert!(units < most, "{what}, terms from {low}: {units:.2} units");
}

#[test]
fn sums_of_many_terms_are_accurate() {
    let _shared = super::WIDTH.read().unwrap_or_else(std::sync::PoisonError::into_inner);
    for low in [0.0, -0.5] {
        for count in [1 << 16, 1 << 20] {
            let (x, made) = run(&[&[count]], low, |x| vec![x[0].sum(&[0])]);
            check(&format!("sum of {count}"), low, made[0][0], x[0].data.iter().copied());
            let (x, made) = run(&[&[count, 3]], low, |x| vec![x[0].sum(&[0])]);
            check(&format!("column of {count}"), low, made[0][1], x[0].data.iter().copied().skip(1).step_by(3));
            let most = if count > 1 << 16 { UNITS_MAX_OF_MANY_BLOCKS } else { UNITS_MAX };
            // Both forms of gradients of weights and of outputs: terms across and along.
            let (x, made) =
                run(&[&[count, 3], &[count, 2]], low, |x| vec![x[0].then(MatMul::new(true, false), &[x[1]])]);
            let terms = (0..count).map(|k| x[0].data[k * 3 + 1] * x[1].data[k * 2 + 1]);
            check_within(most, &format!("product over {count} rows"), low, made[0][3], terms);
            let (x, made) = run(&[&[2, count], &[40, count]], low, |x| vec![x[0].matmul_transposed(x[1])]);
            let terms = (0..count).map(|k| x[0].data[count + k] * x[1].data[7 * count + k]);
            check_within(most, &format!("product along {count}"), low, made[0][40 + 7], terms);
        }
        norms(low);
        convolutions(low);
    }
}

fn norms(low: f64) {
    let count = 1 << 16;
    let (x, made) = run(&[&[count, 2], &[2], &[2]], low, |x| {
        let (y, mean, variance) = x[0].batch_norm(x[1], x[2], 1e-5);
        vec![y, mean, variance]
    });
    let column = x[0].data.iter().copied().skip(1).step_by(2);
    check("batch norm's mean", low, made[1][1] * count as f64, column.clone());
    let mean = column.clone().sum::<f64>() / count as f64;
    check("batch norm's variance", low, made[2][1] * count as f64, column.map(|x| (x - mean).powi(2)));
    let (x, made) = run(&[&[count, 3], &[3], &[3], &[count, 3]], low, |x| {
        let loss = x[0].layer_norm(x[1], x[2], 1e-5).mul(x[3]).sum_all();
        kolo_ops::gradients(loss.builder(), loss, 1.0, &[x[2]]).into_iter().map(Option::unwrap).collect()
    });
    check("layer norm's bias", low, made[0][1], x[3].data.iter().copied().skip(1).step_by(3));
}

fn convolutions(low: f64) {
    for channels in [2, 64] {
        // By the direct method and by the transforms, whose own rounding is larger.
        let (images, side) = (16, 64);
        let shape: &[usize] = &[images, channels, side, side];
        let grad = Conv2dWeightGrad {
            stride: [1, 1],
            padding: Padding::from([1, 1]),
            dilation: [1, 1],
            groups: 1,
            kernel: [3, 3],
        };
        let (x, made) = run(&[shape, shape], low, |x| vec![x[0].then(grad.clone(), &[x[1]])]);
        let pixels = side * side;
        // The middle tap of output 1 and channel 0.
        let terms = (0..images * pixels).map(|at| {
            let plane = at / pixels * channels * pixels + at % pixels;
            x[0].data[plane] * x[1].data[plane + pixels]
        });
        check(&format!("convolution of {channels} channels"), low, made[0][channels * 9 + 4], terms);
    }
}
