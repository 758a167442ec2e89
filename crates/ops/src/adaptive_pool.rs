//! Average pooling to a given size: bins instead of windows.
//!
//! Bin `i` of `out` covers `⌊i·size/out⌋ .. ⌈(i+1)·size/out⌉`, as in PyTorch; bins overlap where the sizes do not divide.

use crate::device;
use crate::movement::ELEMENTS_PER_TASK;
use crate::pool::{define_planes, for_each_plane, plane_size, with_planes};
use crate::simd;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx, Launch};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};
use std::ops::Range;

op! {
    /// The mean of each of `out` bins of every plane of `[n, c, h, w]`.
    pub struct AdaptiveAvgPool2d = "adaptive_avg_pool2d" { out: [usize; 2] }
}

/// How bins lie over a plane.
#[derive(Clone, Copy)]
struct Bins {
    size: [usize; 2],
    out: [usize; 2],
}

impl Bins {
    fn range(&self, axis: usize, at: usize) -> Range<usize> {
        let (size, out) = (self.size[axis], self.out[axis]);
        at * size / out..((at + 1) * size).div_ceil(out)
    }

    /// Every bin, in order: its number, rows and columns.
    fn each(self) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
        (0..self.out[0] * self.out[1])
            .map(move |at| (at, self.range(0, at / self.out[1]), self.range(1, at % self.out[1])))
    }

    /// Planes per task.
    fn grain(&self) -> usize {
        let elements = |[height, width]: [usize; 2]| height * width;
        (ELEMENTS_PER_TASK / (elements(self.size) + elements(self.out)).max(1)).max(1)
    }
}

/// Every plane has at least one element for every bin.
fn check_bins(bins: Bins) -> Result<(), String> {
    if bins.out.contains(&0) || bins.size.contains(&0) {
        return Err(format!("pools planes of {:?} to {:?}; neither may be empty", bins.size, bins.out));
    }
    Ok(())
}

impl Op for AdaptiveAvgPool2d {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse("n c h! w! -> n c p! q!"))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        check_bins(Bins { size: plane_size(input)?, out: self.out })?;
        Ok(vec![with_planes(input, input.dtype, self.out)])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        inputs[0].elements() as u64
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let size = [cx.input(0).dim(2), cx.input(0).dim(3)];
        vec![Some(cx.grad().then(AdaptiveAvgPool2dGrad { size }, &[]))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let bins = Bins { size: [inputs[0].shape[2], inputs[0].shape[3]], out: self.out };
        vec![define_planes(inputs[0], &outputs[0], |plane, out| {
            for (at, rows, columns) in bins.each() {
                let count = (rows.len() * columns.len()) as f64;
                let row = |y: usize| plane[y * bins.size[1]..][columns.clone()].iter().sum::<f64>();
                out[at] = rows.map(row).sum::<f64>() / count;
            }
        })]
    }
}

impl Cpu for AdaptiveAvgPool2d {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let bins = Bins { size: [cx.shape(0)[2], cx.shape(0)[3]], out: self.out };
        for_each_plane(cx, bins.grain(), |plane| {
            for (at, rows, columns) in bins.each() {
                let count = rows.len() * columns.len();
                plane.out[at] = sum_bin(plane.input, bins.size[1], rows, columns) / count as f32;
            }
        });
    }
}

/// Row by row; a bin as wide as the plane is one run.
fn sum_bin(plane: &[f32], width: usize, rows: Range<usize>, columns: Range<usize>) -> f32 {
    if columns.len() == width {
        return simd::sum(&plane[rows.start * width..rows.end * width]);
    }
    rows.map(|y| simd::sum(&plane[y * width..][columns.clone()])).fold(0.0, |total, row| total + row)
}

impl Cuda for AdaptiveAvgPool2d {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (count, from) = (cx.outputs[0].elements(), &cx.inputs[0].shape);
        let sizes = [count, from[2], from[3], self.out[0], self.out[1]].map(device::long);
        let args = [&[device::input(0), device::output(0)], &sizes[..]].concat();
        let (grid, block) = device::row_grid(count, device::WARP);
        Launch::new(device::typed(crate::pool::SOURCE, cx), "mean_bins", grid, block, args).into()
    }
}

impl Cases for AdaptiveAvgPool2d {
    fn cases() -> Vec<Case> {
        let case = |shape: [usize; 4], out: [usize; 2]| {
            let arg = Arg::real(shape);
            let arg = if arg.ty.elements() < 200 { arg } else { arg.constant() };
            Case::new(AdaptiveAvgPool2d { out }, [arg])
        };
        vec![
            case([2, 3, 4, 4], [1, 1]),
            case([2, 2, 5, 7], [3, 2]),
            case([1, 1, 3, 4], [3, 4]),
            case([1, 2, 2, 3], [4, 5]),
            case([1, 1, 1, 1], [1, 1]),
            case([2, 9, 37, 33], [7, 5]),
            case([3, 9, 31, 33], [1, 1]),
        ]
    }
}

op! {
    /// Backward of [`AdaptiveAvgPool2d`]: each gradient is spread evenly over its bin of a plane of `size`.
    pub struct AdaptiveAvgPool2dGrad = "adaptive_avg_pool2d_grad" { size: [usize; 2] }
}

impl Op for AdaptiveAvgPool2dGrad {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("g")], &["dx"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse("n c p! q! -> n c h! w!"))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [grad] = inputs else { return Err("takes one input".into()) };
        check_bins(Bins { size: self.size, out: plane_size(grad)? })?;
        Ok(vec![with_planes(grad, grad.dtype, self.size)])
    }
    fn flops(&self, _: &[Type], outputs: &[Type]) -> u64 {
        outputs[0].elements() as u64
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let out = [cx.input(0).dim(2), cx.input(0).dim(3)];
        vec![Some(cx.grad().adaptive_avg_pool2d(out))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let bins = Bins { size: self.size, out: [inputs[0].shape[2], inputs[0].shape[3]] };
        vec![define_planes(inputs[0], &outputs[0], |grads, out| {
            for (at, rows, columns) in bins.each() {
                let part = grads[at] / (rows.len() * columns.len()) as f64;
                rows.for_each(|y| columns.clone().for_each(|x| out[y * bins.size[1] + x] += part));
            }
        })]
    }
}

impl Cpu for AdaptiveAvgPool2dGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let bins = Bins { size: self.size, out: [cx.shape(0)[2], cx.shape(0)[3]] };
        for_each_plane(cx, bins.grain(), |plane| {
            plane.out.fill(0.0);
            for (at, rows, columns) in bins.each() {
                let part = plane.input[at] / (rows.len() * columns.len()) as f32;
                for y in rows {
                    plane.out[y * bins.size[1]..][columns.clone()].iter_mut().for_each(|out| *out += part);
                }
            }
        });
    }
}

impl Cuda for AdaptiveAvgPool2dGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let from = &cx.inputs[0].shape;
        crate::pool::calls(cx, "spread_bins", &[self.size[0], self.size[1], from[2], from[3]].map(device::long))
    }
}

impl Cases for AdaptiveAvgPool2dGrad {
    fn cases() -> Vec<Case> {
        let case = |shape: [usize; 4], size: [usize; 2]| Case::new(AdaptiveAvgPool2dGrad { size }, [Arg::real(shape)]);
        vec![
            case([2, 3, 1, 1], [4, 4]),
            case([2, 2, 3, 2], [5, 7]),
            case([1, 2, 4, 5], [2, 3]),
            case([2, 9, 1, 2], [67, 65]),
        ]
    }
}

pub const KINDS: &[OpKind] = &[
    OpKind::of::<AdaptiveAvgPool2d>().with_cuda::<AdaptiveAvgPool2d>(),
    OpKind::of::<AdaptiveAvgPool2dGrad>().with_cuda::<AdaptiveAvgPool2dGrad>(),
];

kolo_graph::methods! {
    /// Pooling to a size.
    AdaptivePoolMethods {
        /// The mean of each of `out` bins of every plane.
        fn adaptive_avg_pool2d(self, out: [usize; 2]) -> Tensor<'b> { self.then(AdaptiveAvgPool2d { out }, &[]) }
        /// The mean of every plane: `[n, c, 1, 1]`.
        fn global_avg_pool2d(self) -> Tensor<'b> { self.adaptive_avg_pool2d([1, 1]) }
    }
}
