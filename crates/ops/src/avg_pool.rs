//! Average pooling.

use crate::pool::{Window, define_planes, for_each_plane, load, plane_size, pool_cases, with_planes};
use crate::simd::LANES;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, CpuCx, DType, Dense, GradCx, Op, Operand, Operands, Tensor, Type, op};

op! {
    /// The mean under each window. Padding counts as zeros.
    pub struct AvgPool2d = "avg_pool2d" { kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2] }
}

impl Op for AvgPool2d {
    fn operands(&self) -> Operands {
        Operands::new([Operand::f32("x")], &["y"])
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse("n c h! w! -> n c p! q!"))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        let window = Window::new(self.kernel, self.stride, self.padding, plane_size(input)?)?;
        Ok(vec![with_planes(input, DType::F32, window.out)])
    }
    fn flops(&self, _: &[Type], outputs: &[Type]) -> u64 {
        crate::pool::flops(&outputs[0], self.kernel)
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let size = [cx.input(0).dim(2), cx.input(0).dim(3)];
        let (kernel, stride, padding) = (self.kernel, self.stride, self.padding);
        vec![Some(cx.grad().then(AvgPool2dGrad { kernel, stride, padding, size }, &[]))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let window = self.window(&inputs[0].shape);
        vec![define_planes(inputs[0], &outputs[0], |plane, out| {
            for (at, out) in out.iter_mut().enumerate() {
                *out = window.places(at).map(|place| plane[place]).sum::<f64>() / window.area() as f64;
            }
        })]
    }
    fn cpu(&self, cx: &mut CpuCx<'_>) {
        let window = self.window(cx.shape(0));
        let (line, lines) = (window.line(), Address(cx.scratch().as_mut_ptr()));
        for_each_plane(cx, window.grain(), |plane| {
            // SAFETY: each thread has its own line.
            mean_plane(window, plane.input, plane.out, unsafe { lines.slice(plane.thread * line, line) });
        });
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        self.window(&inputs[0].shape).line() * threads * size_of::<f32>()
    }
}

impl AvgPool2d {
    fn window(&self, shape: &[usize]) -> Window {
        Window::new(self.kernel, self.stride, self.padding, [shape[2], shape[3]]).expect("infer checks the window")
    }
}

vectorized! {
    fn mean_plane(window: Window, plane: &[f32], out: &mut [f32], line: &mut [f32]) {
        line.fill(0.0);
        for (row, out) in out.chunks_mut(window.out[1]).enumerate() {
            line[window.middle()].fill(0.0);
            for y in window.rows(row) {
                let own = &plane[y * window.size[1]..(y + 1) * window.size[1]];
                line[window.middle()].iter_mut().zip(own).for_each(|(sum, value)| *sum += *value);
            }
            match window.stride[1] {
                1 => mean_windows(window, 1, line, out),
                2 => mean_windows(window, 2, line, out),
                stride => mean_windows(window, stride, line, out),
            }
        }
    }
}

#[inline(always)]
fn mean_windows(window: Window, stride: usize, line: &[f32], out: &mut [f32]) {
    let area = window.area() as f32;
    for (at, out) in out.chunks_mut(LANES).enumerate() {
        let mut sum: [f32; LANES] = load(line, at * LANES * stride, stride);
        for tap in 1..window.kernel[1] {
            let value: [f32; LANES] = load(line, at * LANES * stride + tap, stride);
            (0..LANES).for_each(|lane| sum[lane] += value[lane]);
        }
        sum.iter_mut().for_each(|sum| *sum /= area);
        out.copy_from_slice(&sum[..out.len()]);
    }
}

impl Cases for AvgPool2d {
    fn cases() -> Vec<Case> {
        pool_cases(|kernel, stride, padding| AvgPool2d { kernel, stride, padding }, Arg::real)
    }
}

op! {
    /// Backward of [`AvgPool2d`]: each gradient is spread evenly under its window over a plane of `size`.
    pub struct AvgPool2dGrad = "avg_pool2d_grad" {
        kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2], size: [usize; 2],
    }
}

impl Op for AvgPool2dGrad {
    fn operands(&self) -> Operands {
        Operands::new([Operand::f32("g")], &["dx"])
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse("n c p! q! -> n c h! w!"))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [grad] = inputs else { return Err("takes one input".into()) };
        let window = Window::new(self.kernel, self.stride, self.padding, self.size)?;
        if plane_size(grad)? != window.out {
            return Err(format!(
                "pooling planes of {:?} gives {:?}, but the gradient is {grad}",
                self.size, window.out
            ));
        }
        Ok(vec![with_planes(grad, DType::F32, self.size)])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        crate::pool::flops(&inputs[0], self.kernel)
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        vec![Some(cx.grad().avg_pool2d(self.kernel, self.stride, self.padding))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let window = self.window();
        vec![define_planes(inputs[0], &outputs[0], |grads, out| {
            for (at, grad) in grads.iter().enumerate() {
                window.places(at).for_each(|place| out[place] += grad / window.area() as f64);
            }
        })]
    }
    fn cpu(&self, cx: &mut CpuCx<'_>) {
        let window = self.window();
        let (line, lines) = (window.line(), Address(cx.scratch().as_mut_ptr()));
        for_each_plane(cx, window.grain(), |plane| {
            // SAFETY: each thread has its own line.
            spread_plane(window, plane.input, plane.out, unsafe { lines.slice(plane.thread * line, line) });
        });
    }
    fn scratch_bytes(&self, _: &[Type], _: &[Type], threads: usize) -> usize {
        self.window().line() * threads * size_of::<f32>()
    }
}

impl AvgPool2dGrad {
    fn window(&self) -> Window {
        Window::new(self.kernel, self.stride, self.padding, self.size).expect("infer checks the window")
    }
}

vectorized! {
    fn spread_plane(window: Window, grads: &[f32], out: &mut [f32], line: &mut [f32]) {
        let area = window.area() as f32;
        out.fill(0.0);
        for (row, grads) in grads.chunks(window.out[1]).enumerate() {
            line.fill(0.0);
            for (at, grad) in grads.iter().enumerate() {
                let part = grad / area;
                let under = &mut line[at * window.stride[1]..][..window.kernel[1]];
                under.iter_mut().for_each(|sum| *sum += part);
            }
            for y in window.rows(row) {
                let own = &mut out[y * window.size[1]..(y + 1) * window.size[1]];
                own.iter_mut().zip(&line[window.middle()]).for_each(|(sum, value)| *sum += *value);
            }
        }
    }
}

impl Cases for AvgPool2dGrad {
    fn cases() -> Vec<Case> {
        let case = |size: [usize; 2], kernel, stride, padding| {
            let op = AvgPool2dGrad { kernel, stride, padding, size };
            let arg = Arg::real([&[2, 3], &op.window().out[..]].concat());
            Case::new(op, [if arg.ty.elements() < 200 { arg } else { arg.constant() }])
        };
        vec![
            case([4, 4], [2, 2], [2, 2], [0, 0]),
            case([5, 7], [3, 3], [2, 2], [1, 1]),
            case([5, 4], [3, 2], [1, 1], [1, 1]),
            case([5, 5], [2, 2], [3, 3], [1, 1]),
            case([1, 1], [1, 1], [1, 1], [0, 0]),
            case([60, 51], [3, 3], [1, 1], [1, 1]),
        ]
    }
}

pub const KINDS: &[OpKind] = &[OpKind::of::<AvgPool2d>(), OpKind::of::<AvgPool2dGrad>()];

kolo_graph::methods! {
    /// Average pooling over `[n, c, h, w]`.
    AvgPoolMethods {
        /// The mean under each window; padding counts as zeros.
        fn avg_pool2d(self, kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2]) -> Tensor<'b> {
            self.then(AvgPool2d { kernel, stride, padding }, &[])
        }
    }
}
