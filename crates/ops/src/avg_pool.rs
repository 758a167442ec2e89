//! Average pooling.

use crate::device;
use crate::pool::{
    Tile, Window, define_planes, for_each_plane, load, plane_size, pool_cases, tile_of_part, tile_splits, with_planes,
};
use crate::simd::LANES;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::cuda::{ChannelsLast, Cuda, CudaCalls, CudaCx};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, Split, Tensor, Type, op};
use std::sync::Arc;

op! {
    /// The mean under each window. Padding counts as zeros, or not at all without `count_include_pad`. With `ceil_mode` a
    /// last window may reach beyond the padding, where nothing counts. With `rows` or `columns` this is a tile of a plane:
    /// the places of the whole plane, the first place here, the first window here, and the windows here.
    pub struct AvgPool2d = "avg_pool2d" {
        kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2],
        ceil_mode: bool = false, count_include_pad: bool = true,
        rows: Vec<usize> = Vec::new(), columns: Vec<usize> = Vec::new(),
    }
}

impl Op for AvgPool2d {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse("n c h! w! -> n c p! q!"))
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let mut splits = self.index(inputs).map_or_else(Vec::new, |index| index.splits(inputs));
        splits.extend(tile_splits(&self.window(&inputs[0].shape), self.tile(), 1, 1, false));
        splits
    }
    fn part_at(&self, split: &Split, first: usize, units: usize) -> Option<Arc<dyn Op>> {
        let [rows, columns] = tile_of_part(split, first, units, self.tile())?;
        Some(Arc::new(Self { rows, columns, ..self.clone() }))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        let window = self.checked_window(plane_size(input)?)?;
        Ok(vec![with_planes(input, input.dtype, window.out)])
    }
    fn flops(&self, _: &[Type], outputs: &[Type]) -> u64 {
        crate::pool::flops(&outputs[0], self.kernel)
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let size = [cx.input(0).dim(2), cx.input(0).dim(3)];
        let Self { kernel, stride, padding, ceil_mode, count_include_pad, rows, columns } = self.clone();
        let backward = AvgPool2dGrad { kernel, stride, padding, size, ceil_mode, count_include_pad, rows, columns };
        vec![Some(cx.grad().then(backward, &[]))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let window = self.window(&inputs[0].shape);
        vec![define_planes(inputs[0], &outputs[0], |plane, out| {
            for (at, out) in out.iter_mut().enumerate() {
                let divisor = divisor_of(&window, at, self.count_include_pad);
                *out = window.places(at).map(|place| plane[place]).sum::<f64>() / divisor;
            }
        })]
    }
}

impl Cpu for AvgPool2d {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let window = self.window(cx.shape(0));
        let (line, lines) = (window.line(), Address(cx.scratch().as_mut_ptr()));
        for_each_plane(cx, window.grain(), |plane| {
            // SAFETY: each thread has its own line.
            let line = unsafe { lines.slice(plane.thread * line, line) };
            mean_plane(window, self.count_include_pad, plane.input, plane.out, line);
        });
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        self.window(&inputs[0].shape).line() * threads * size_of::<f32>()
    }
}

impl AvgPool2d {
    fn tile(&self) -> Tile<'_> {
        Tile { rows: &self.rows, columns: &self.columns }
    }

    fn checked_window(&self, size: [usize; 2]) -> Result<Window, String> {
        let window = Window::new(self.kernel, self.stride, self.padding, self.tile().whole(size), self.ceil_mode)?;
        window.on_tile(self.tile(), size)?.checked_under()
    }

    fn window(&self, shape: &[usize]) -> Window {
        self.checked_window([shape[2], shape[3]]).expect("infer checks the window")
    }
}

/// Over whole planes.
fn avg_pool(
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    ceil_mode: bool,
    count_include_pad: bool,
) -> AvgPool2d {
    let (rows, columns) = (Vec::new(), Vec::new());
    AvgPool2d { kernel, stride, padding, ceil_mode, count_include_pad, rows, columns }
}

/// What the sum under an output is divided by, in the definitions.
fn divisor_of(window: &Window, at: usize, count_padding: bool) -> f64 {
    let (row, column) = (at / window.out[1], at % window.out[1]);
    (window.divisor(0, row, count_padding) * window.divisor(1, column, count_padding)) as f64
}

vectorized! {
    fn mean_plane(window: Window, count_padding: bool, plane: &[f32], out: &mut [f32], line: &mut [f32]) {
        line.fill(0.0);
        for (row, out) in out.chunks_mut(window.out[1]).enumerate() {
            line[window.middle()].fill(0.0);
            for y in window.rows(row) {
                let own = &plane[y * window.size[1]..(y + 1) * window.size[1]];
                line[window.middle()].iter_mut().zip(own).for_each(|(sum, value)| *sum += *value);
            }
            match window.stride[1] {
                1 => sum_windows(window, 1, line, out),
                2 => sum_windows(window, 2, line, out),
                stride => sum_windows(window, stride, line, out),
            }
            let rows = window.divisor(0, row, count_padding);
            for (column, out) in out.iter_mut().enumerate() {
                *out /= (rows * window.divisor(1, column, count_padding)) as f32;
            }
        }
    }
}

#[inline(always)]
fn sum_windows(window: Window, stride: usize, line: &[f32], out: &mut [f32]) {
    for (at, out) in out.chunks_mut(LANES).enumerate() {
        let mut sum: [f32; LANES] = load(line, at * LANES * stride, stride);
        for tap in 1..window.kernel[1] {
            let value: [f32; LANES] = load(line, at * LANES * stride + tap, stride);
            (0..LANES).for_each(|lane| sum[lane] += value[lane]);
        }
        out.copy_from_slice(&sum[..out.len()]);
    }
}

impl Cuda for AvgPool2d {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let window = self.window(&cx.inputs[0].shape);
        crate::pool::calls(cx, "mean_windows", &[vec![device::flag(self.count_include_pad)], window.args()].concat())
    }
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        crate::pool::channels_last(cx)
    }
}

impl Cases for AvgPool2d {
    fn cases() -> Vec<Case> {
        let cases = |(ceil_mode, count_include_pad)| {
            let op = move |kernel, stride, padding| avg_pool(kernel, stride, padding, ceil_mode, count_include_pad);
            pool_cases(op, Arg::real)
        };
        let mut all: Vec<Case> =
            [(false, true), (true, true), (false, false), (true, false)].map(cases).into_iter().flatten().collect();
        // Rows 3 to 8 and columns 2 to 7 of a plane of 9 × 8.
        let whole = avg_pool([3, 3], [2, 2], [1, 0], false, false);
        let tile = AvgPool2d { rows: vec![9, 3, 2, 3], columns: vec![8, 2, 1, 2], ..whole };
        all.push(Case::new(tile, [Arg::real([2, 3, 6, 6]).constant()]));
        all
    }
}

op! {
    /// Backward of [`AvgPool2d`]: each gradient is spread evenly under its window over a plane of `size`.
    pub struct AvgPool2dGrad = "avg_pool2d_grad" {
        kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2], size: [usize; 2],
        ceil_mode: bool = false, count_include_pad: bool = true,
        rows: Vec<usize> = Vec::new(), columns: Vec<usize> = Vec::new(),
    }
}

impl Op for AvgPool2dGrad {
    fn operands(&self) -> Operands {
        let g = Operand::float("g");
        // Windows at the edge of a tile reach beyond it, where a gradient of its gradient has nothing.
        let is_tile = !(self.rows.is_empty() && self.columns.is_empty());
        Operands::new([if is_tile { g.without_rule() } else { g }], &["dx"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse("n c p! q! -> n c h! w!"))
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let mut splits = self.index(inputs).map_or_else(Vec::new, |index| index.splits(inputs));
        splits.extend(tile_splits(&self.window(), self.tile(), 1, 1, true));
        splits
    }
    fn part_at(&self, split: &Split, first: usize, units: usize) -> Option<Arc<dyn Op>> {
        let [rows, columns] = tile_of_part(split, first, units, self.tile())?;
        let mut size = self.size;
        size[split.outputs[0].cut()?.0 - 2] = units;
        Some(Arc::new(Self { rows, columns, size, ..self.clone() }))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [grad] = inputs else { return Err("takes one input".into()) };
        let window = self.checked_window()?;
        if plane_size(grad)? != window.out {
            return Err(format!(
                "pooling planes of {:?} gives {:?}, but the gradient is {grad}",
                self.size, window.out
            ));
        }
        Ok(vec![with_planes(grad, grad.dtype, self.size)])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        crate::pool::flops(&inputs[0], self.kernel)
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let Self { kernel, stride, padding, ceil_mode, count_include_pad, rows, columns, .. } = self.clone();
        let forward = AvgPool2d { kernel, stride, padding, ceil_mode, count_include_pad, rows, columns };
        vec![Some(cx.grad().then(forward, &[]))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let window = self.window();
        vec![define_planes(inputs[0], &outputs[0], |grads, out| {
            for (at, grad) in grads.iter().enumerate() {
                let divisor = divisor_of(&window, at, self.count_include_pad);
                window.places(at).for_each(|place| out[place] += grad / divisor);
            }
        })]
    }
}

impl Cpu for AvgPool2dGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let window = self.window();
        let (line, lines) = (window.line(), Address(cx.scratch().as_mut_ptr()));
        for_each_plane(cx, window.grain(), |plane| {
            // SAFETY: each thread has its own line.
            let line = unsafe { lines.slice(plane.thread * line, line) };
            spread_plane(window, self.count_include_pad, plane.input, plane.out, line);
        });
    }
    fn scratch_bytes(&self, _: &[Type], _: &[Type], threads: usize) -> usize {
        self.window().line() * threads * size_of::<f32>()
    }
}

impl AvgPool2dGrad {
    fn tile(&self) -> Tile<'_> {
        Tile { rows: &self.rows, columns: &self.columns }
    }

    fn checked_window(&self) -> Result<Window, String> {
        let whole = self.tile().whole(self.size);
        Window::new(self.kernel, self.stride, self.padding, whole, self.ceil_mode)?.on_tile(self.tile(), self.size)
    }

    fn window(&self) -> Window {
        self.checked_window().expect("infer checks the window")
    }
}

vectorized! {
    fn spread_plane(window: Window, count_padding: bool, grads: &[f32], out: &mut [f32], line: &mut [f32]) {
        out.fill(0.0);
        for (row, grads) in grads.chunks(window.out[1]).enumerate() {
            line.fill(0.0);
            let rows = window.divisor(0, row, count_padding);
            for (at, grad) in grads.iter().enumerate() {
                let part = grad / (rows * window.divisor(1, at, count_padding)) as f32;
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

impl Cuda for AvgPool2dGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let counts = vec![device::flag(self.count_include_pad)];
        crate::pool::calls(cx, "spread_windows", &[counts, self.window().args()].concat())
    }
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        crate::pool::channels_last(cx)
    }
}

impl Cases for AvgPool2dGrad {
    fn cases() -> Vec<Case> {
        let with = |size: [usize; 2], kernel, stride, padding, ceil_mode, count_include_pad| {
            let (rows, columns) = (Vec::new(), Vec::new());
            let op = AvgPool2dGrad { kernel, stride, padding, size, ceil_mode, count_include_pad, rows, columns };
            let arg = Arg::real([&[2, 3], &op.window().out[..]].concat());
            Case::new(op, [if arg.ty.elements() < 200 { arg } else { arg.constant() }])
        };
        let case = |size, kernel, stride, padding| with(size, kernel, stride, padding, false, true);
        // Places 3 to 7 and 2 to 5 of a plane of 9 × 8, and the windows over them.
        let (rows, columns) = (vec![9, 3, 1, 4], vec![8, 2, 0, 3]);
        let (kernel, stride, padding, size) = ([3, 3], [2, 2], [1, 0], [5, 4]);
        let tile =
            AvgPool2dGrad { kernel, stride, padding, size, ceil_mode: false, count_include_pad: false, rows, columns };
        let tile = Case::new(tile, [Arg::real([2, 3, 4, 3]).constant()]);
        vec![
            case([4, 4], [2, 2], [2, 2], [0, 0]),
            with([5, 7], [2, 2], [2, 2], [0, 0], true, true),
            with([6, 4], [3, 3], [2, 2], [1, 1], true, false),
            with([5, 5], [2, 2], [3, 3], [1, 1], false, false),
            case([5, 7], [3, 3], [2, 2], [1, 1]),
            case([5, 4], [3, 2], [1, 1], [1, 1]),
            case([5, 5], [2, 2], [3, 3], [1, 1]),
            case([1, 1], [1, 1], [1, 1], [0, 0]),
            case([60, 51], [3, 3], [1, 1], [1, 1]),
            tile,
        ]
    }
}

pub const KINDS: &[OpKind] =
    &[OpKind::of::<AvgPool2d>().with_cuda::<AvgPool2d>(), OpKind::of::<AvgPool2dGrad>().with_cuda::<AvgPool2dGrad>()];

kolo_graph::methods! {
    /// Average pooling over `[n, c, h, w]`.
    AvgPoolMethods {
        /// The mean under each window; padding counts as zeros.
        fn avg_pool2d(self, kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2]) -> Tensor<'b> {
            self.avg_pool2d_with(kernel, stride, padding, false, true)
        }
        /// The same with PyTorch's other two options: `ceil_mode` rounds the number of windows up, so that the last may
        /// reach beyond the padding; without `count_include_pad` the mean is over the plane's own places.
        fn avg_pool2d_with(
            self, kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2], ceil_mode: bool, count_include_pad: bool,
        ) -> Tensor<'b> {
            self.then(avg_pool(kernel, stride, padding, ceil_mode, count_include_pad), &[])
        }
    }
}
