//! Which method computes a pass: Winograd's where it suits, the direct one otherwise.
//!
//! Winograd's rounding differs from the direct method's by some 1e-7 of a tensor. That is enough to turn a relu input next
//! to zero around: whoever compares gradients of a deep network element by element must allow for it.

use super::shape::Shape;
use super::winograd::{WeightPlan, WinogradPlan};
use super::{correlate, weights};
use kolo_graph::CpuCx;

pub fn forward_scratch(shape: &Shape, threads: usize) -> usize {
    let direct = correlate::forward_scratch(shape, threads);
    WinogradPlan::forward(shape).map_or(direct, |plan| plan.scratch_bytes(threads, direct))
}

/// `y[n, o] = bias[o] + Σ weight[o, c, tap] · x[n, c, …]`.
pub fn forward(shape: &Shape, cx: &CpuCx<'_>, x: &[f32], weight: &[f32], bias: Option<&[f32]>, y: &mut [f32]) {
    let Some(plan) = WinogradPlan::forward(shape) else {
        return correlate::forward(shape, (cx.team, cx.scratch()), x, weight, bias, y);
    };
    let (image, grid) = (shape.inputs * shape.image_pixels(), shape.outputs * shape.grid_pixels());
    plan.run((cx.team, cx.scratch()), x, weight, bias, y, |images, scratch, y| {
        let some = Shape { images: images.len(), ..*shape };
        let x = &x[images.start * image..images.end * image];
        let y = &mut y[images.start * grid..images.end * grid];
        correlate::forward(&some, (cx.team, scratch), x, weight, bias, y);
    });
}

pub fn input_grad_scratch(shape: &Shape, threads: usize) -> usize {
    let direct = correlate::input_grad_scratch(shape, threads);
    WinogradPlan::input_grad(shape).map_or(direct, |plan| plan.scratch_bytes(threads, direct))
}

/// `dx[n, c] = bias[c] + Σ weight[o, c, tap] · grad[n, o, …]` over the outputs that read the pixel.
pub fn input_grad(shape: &Shape, cx: &CpuCx<'_>, weight: &[f32], grad: &[f32], bias: Option<&[f32]>, dx: &mut [f32]) {
    let Some(plan) = WinogradPlan::input_grad(shape) else {
        return correlate::input_grad(shape, (cx.team, cx.scratch()), weight, grad, bias, dx);
    };
    let (image, grid) = (shape.inputs * shape.image_pixels(), shape.outputs * shape.grid_pixels());
    plan.run((cx.team, cx.scratch()), grad, weight, bias, dx, |images, scratch, dx| {
        let some = Shape { images: images.len(), ..*shape };
        let grad = &grad[images.start * grid..images.end * grid];
        let dx = &mut dx[images.start * image..images.end * image];
        correlate::input_grad(&some, (cx.team, scratch), weight, grad, bias, dx);
    });
}

pub fn weight_grad_scratch(shape: &Shape, threads: usize) -> usize {
    let direct = weights::weight_grad_scratch(shape, threads);
    WeightPlan::new(shape, threads).map_or(direct, |plan| plan.scratch_bytes(threads, direct))
}

/// `dw[o, c, tap] = Σ grad[n, o, pixel] · x[n, c, pixel through tap]`.
pub fn weight_grad(shape: &Shape, cx: &CpuCx<'_>, x: &[f32], grad: &[f32], dw: &mut [f32]) {
    let scratch = cx.scratch();
    let plan = WeightPlan::new(shape, cx.team.threads());
    if !plan.is_some_and(|plan| plan.run(cx.team, scratch, x, grad, dw)) {
        weights::weight_grad(shape, cx.team, scratch, x, grad, dw);
    }
}
