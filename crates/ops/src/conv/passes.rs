//! Which method computes a pass: Winograd's where it suits, the direct one otherwise.

use super::shape::Shape;
use super::winograd::{Plan, WeightPlan};
use super::{correlate, weights};
use kolo_graph::CpuCx;

/// Passes that may use Winograd's method. Its rounding differs from the direct method's by some 1e-7 of a tensor, which is
/// enough to turn a ReLU input next to zero around, or to be seen in a gradient next to zero that Adam divides by its own
/// size: whoever compares trained weights element by element must allow for that.
const FORWARD: bool = false;
const INPUT_GRAD: bool = true;
const WEIGHT_GRAD: bool = false;

fn forward_plan(shape: &Shape) -> Option<Plan> {
    Plan::forward(shape).filter(|_| FORWARD)
}

fn input_grad_plan(shape: &Shape) -> Option<Plan> {
    Plan::input_grad(shape).filter(|_| INPUT_GRAD)
}

fn weight_grad_plan(shape: &Shape, threads: usize) -> Option<WeightPlan> {
    WeightPlan::new(shape, threads).filter(|_| WEIGHT_GRAD)
}

pub fn forward_scratch(shape: &Shape, threads: usize) -> usize {
    let direct = correlate::forward_scratch(shape, threads);
    forward_plan(shape).map_or(direct, |plan| plan.scratch_bytes(threads, direct))
}

/// `y[n, o] = bias[o] + Σ weight[o, c, tap] · x[n, c, …]`.
pub fn forward(shape: &Shape, cx: &CpuCx<'_>, x: &[f32], weight: &[f32], bias: Option<&[f32]>, y: &mut [f32]) {
    let Some(plan) = forward_plan(shape) else {
        return correlate::forward(shape, cx.team, cx.scratch(), x, weight, bias, y);
    };
    let (image, grid) = (shape.inputs * shape.image_pixels(), shape.outputs * shape.grid_pixels());
    plan.run(cx.team, cx.scratch(), x, weight, bias, y, |images, scratch, y| {
        let some = Shape { images: images.len(), ..*shape };
        let x = &x[images.start * image..images.end * image];
        let y = &mut y[images.start * grid..images.end * grid];
        correlate::forward(&some, cx.team, scratch, x, weight, bias, y);
    });
}

pub fn input_grad_scratch(shape: &Shape, threads: usize) -> usize {
    let direct = correlate::input_grad_scratch(shape, threads);
    input_grad_plan(shape).map_or(direct, |plan| plan.scratch_bytes(threads, direct))
}

/// `dx[n, c] = bias[c] + Σ weight[o, c, tap] · grad[n, o, …]` over the outputs that read the pixel.
pub fn input_grad(shape: &Shape, cx: &CpuCx<'_>, weight: &[f32], grad: &[f32], bias: Option<&[f32]>, dx: &mut [f32]) {
    let Some(plan) = input_grad_plan(shape) else {
        return correlate::input_grad(shape, cx.team, cx.scratch(), weight, grad, bias, dx);
    };
    let (image, grid) = (shape.inputs * shape.image_pixels(), shape.outputs * shape.grid_pixels());
    plan.run(cx.team, cx.scratch(), grad, weight, bias, dx, |images, scratch, dx| {
        let some = Shape { images: images.len(), ..*shape };
        let grad = &grad[images.start * grid..images.end * grid];
        let dx = &mut dx[images.start * image..images.end * image];
        correlate::input_grad(&some, cx.team, scratch, weight, grad, bias, dx);
    });
}

pub fn weight_grad_scratch(shape: &Shape, threads: usize) -> usize {
    let direct = weights::weight_grad_scratch(shape, threads);
    weight_grad_plan(shape, threads).map_or(direct, |plan| plan.scratch_bytes(threads, direct))
}

/// `dw[o, c, tap] = Σ grad[n, o, pixel] · x[n, c, pixel through tap]`.
pub fn weight_grad(shape: &Shape, cx: &CpuCx<'_>, x: &[f32], grad: &[f32], dw: &mut [f32]) {
    let scratch = cx.scratch();
    let plan = weight_grad_plan(shape, cx.team.threads());
    if !plan.is_some_and(|plan| plan.run(cx.team, scratch, x, grad, dw)) {
        weights::weight_grad(shape, cx.team, scratch, x, grad, dw);
    }
}
