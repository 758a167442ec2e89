//! Max pooling, which remembers where each maximum was.

use crate::device;
use crate::movement::{ELEMENTS_PER_TASK, within, within_f64};
use crate::pool::{
    Tile, Window, check_window, define_planes, for_each_plane, load, plane_size, pool_cases, tile_of_part, tile_splits,
    with_planes,
};
use crate::reduce::ReduceMethods;
use crate::scatter::ScatterAddGrad;
use crate::simd::LANES;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::cuda::{ChannelsLast, Cuda, CudaCalls, CudaCx, Launch};
use kolo_graph::index::Index;
use kolo_graph::op::{Domain, OpKind};
use kolo_graph::{
    Arg, Case, Cases, Cpu, CpuCx, DType, Dense, GradCx, Mixed, Op, Operand, Operands, Split, Tensor, Type, op,
};
use std::sync::Arc;

op! {
    /// The largest value under each window, and its place in the plane (`y·w + x`, i32) as second output. Of equal
    /// values the first counts and gets the gradient; NaN counts as largest. Padding never wins. With `ceil_mode` a last
    /// window may reach beyond the padding. With `rows` or `columns` this is a tile of a plane: the places of the whole
    /// plane, the first place here, the first window here, and the windows here.
    pub struct MaxPool2d = "max_pool2d" {
        kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2], ceil_mode: bool = false,
        rows: Vec<usize> = Vec::new(), columns: Vec<usize> = Vec::new(),
    }
}

impl Op for MaxPool2d {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x")], &["y"]).saved(&["places"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse("n c h! w! -> n c p! q!, n c p! q!"))
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let mut splits = self.index(inputs).map_or_else(Vec::new, |index| index.splits(inputs));
        splits.extend(tile_splits(&self.window(&inputs[0].shape), self.tile(), 1, 2, false));
        splits
    }
    fn part_at(&self, split: &Split, first: usize, units: usize) -> Option<Arc<dyn Op>> {
        let [rows, columns] = tile_of_part(split, first, units, self.tile())?;
        Some(Arc::new(Self { rows, columns, ..self.clone() }))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        let window = self.checked_window(plane_size(input)?)?;
        Ok(vec![with_planes(input, input.dtype, window.out), with_planes(input, DType::I32, window.out)])
    }
    fn flops(&self, _: &[Type], outputs: &[Type]) -> u64 {
        crate::pool::flops(&outputs[0], self.kernel)
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let size = [cx.input(0).dim(2), cx.input(0).dim(3)];
        let Self { kernel, stride, padding, rows, columns, .. } = self.clone();
        vec![Some(cx.output(1).then(MaxPool2dGrad { kernel, stride, padding, size, rows, columns }, &[cx.grad()]))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let window = self.window(&inputs[0].shape);
        let largest = |plane: &[f64], at: usize| {
            let beats = |a: f64, b: f64| a > b || (a.is_nan() && !b.is_nan());
            let better = |best: usize, place: usize| if beats(plane[place], plane[best]) { place } else { best };
            window.places(at).reduce(better).expect("every window covers some of the plane")
        };
        let values = define_planes(inputs[0], &outputs[0], |plane, out| {
            out.iter_mut().enumerate().for_each(|(at, out)| *out = plane[largest(plane, at)]);
        });
        let places = define_planes(inputs[0], &outputs[1], |plane, out| {
            let number = |place: usize| window.number(place / window.size[1], place % window.size[1]);
            out.iter_mut().enumerate().for_each(|(at, out)| *out = number(largest(plane, at)) as f64);
        });
        vec![values, places]
    }
}

impl Cpu for MaxPool2d {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let window = self.window(cx.shape(0));
        let (count, line) = (window.outputs(), window.line());
        let (lines, places) = (Address(cx.scratch().as_mut_ptr()), Address(cx.outputs[1].data.cast()));
        for_each_plane(cx, window.grain(), |plane| {
            // SAFETY: tasks own disjoint planes, and each thread its own two lines. A place is an i32, as wide as f32.
            let (places, line, line_places) = unsafe {
                let places: *mut i32 = places.get().add(plane.at * count).cast();
                let line_places: *mut i32 = lines.get().add((2 * plane.thread + 1) * line).cast();
                (
                    std::slice::from_raw_parts_mut(places, count),
                    lines.slice(2 * plane.thread * line, line),
                    std::slice::from_raw_parts_mut(line_places, line),
                )
            };
            max_plane(window, plane.input, plane.out, places, line, line_places);
        });
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        self.window(&inputs[0].shape).line() * 2 * threads * size_of::<f32>()
    }
}

impl MaxPool2d {
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

vectorized! {
    fn max_plane(
        window: Window,
        plane: &[f32],
        values: &mut [f32],
        places: &mut [i32],
        line: &mut [f32],
        line_places: &mut [i32],
    ) {
        // Padding loses even against −∞, because its place comes last.
        line.fill(f32::NEG_INFINITY);
        line_places.fill(i32::MAX);
        let width = window.out[1];
        for (row, (values, places)) in values.chunks_mut(width).zip(places.chunks_mut(width)).enumerate() {
            let (best, best_places) = (&mut line[window.middle()], &mut line_places[window.middle()]);
            for (at, y) in window.rows(row).enumerate() {
                let own = &plane[y * window.size[1]..(y + 1) * window.size[1]];
                let start = window.number(y, 0);
                if at == 0 {
                    best.copy_from_slice(own);
                    best_places.iter_mut().enumerate().for_each(|(x, place)| *place = (start + x) as i32);
                } else {
                    keep_larger(best, best_places, own, start as i32);
                }
            }
            // Known strides vectorise.
            match window.stride[1] {
                1 => max_windows(window.kernel[1], 1, line, line_places, values, places),
                2 => max_windows(window.kernel[1], 2, line, line_places, values, places),
                stride => max_windows(window.kernel[1], stride, line, line_places, values, places),
            }
        }
    }
}

/// Takes each of `row` that is larger, and its place, which counts from `start`.
#[inline(always)]
fn keep_larger(best: &mut [f32], best_places: &mut [i32], row: &[f32], start: i32) {
    let count = row.len();
    let (best, best_places) = (&mut best[..count], &mut best_places[..count]);
    for at in 0..count {
        let larger = (row[at] > best[at]) | (row[at].is_nan() & !best[at].is_nan());
        best[at] = if larger { row[at] } else { best[at] };
        best_places[at] = if larger { start.wrapping_add(at as i32) } else { best_places[at] };
    }
}

/// The largest under each window of a line; of equal values the one with the first place.
#[inline(always)]
fn max_windows(
    kernel: usize,
    stride: usize,
    line: &[f32],
    line_places: &[i32],
    values: &mut [f32],
    places: &mut [i32],
) {
    for (at, (values, places)) in values.chunks_mut(LANES).zip(places.chunks_mut(LANES)).enumerate() {
        let mut best: [f32; LANES] = load(line, at * LANES * stride, stride);
        let mut best_place: [i32; LANES] = load(line_places, at * LANES * stride, stride);
        for tap in 1..kernel {
            let value: [f32; LANES] = load(line, at * LANES * stride + tap, stride);
            let place: [i32; LANES] = load(line_places, at * LANES * stride + tap, stride);
            for lane in 0..LANES {
                let (nan, was_nan) = (value[lane].is_nan(), best[lane].is_nan());
                let larger = (value[lane] > best[lane]) | (nan & !was_nan);
                let equal = (value[lane] == best[lane]) | (nan & was_nan);
                let take = larger | (equal & (place[lane] < best_place[lane]));
                best[lane] = if take { value[lane] } else { best[lane] };
                best_place[lane] = if take { place[lane] } else { best_place[lane] };
            }
        }
        values.copy_from_slice(&best[..values.len()]);
        places.copy_from_slice(&best_place[..places.len()]);
    }
}

impl Cuda for MaxPool2d {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        crate::pool::calls(cx, "max_windows", &self.window(&cx.inputs[0].shape).args())
    }
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        crate::pool::channels_last(cx)
    }
}

impl Cases for MaxPool2d {
    fn cases() -> Vec<Case> {
        let op = |kernel, stride, padding| max_pool(kernel, stride, padding, false);
        let mut cases = pool_cases(op, Arg::spread);
        let ceil = |kernel, stride, padding| max_pool(kernel, stride, padding, true);
        cases.extend(pool_cases(ceil, Arg::spread));
        // Whole numbers, so that many values under a window are equal.
        let equal = Arg { domain: Domain::Index(0, 3), ..Arg::real([2, 2, 9, 35]).constant() };
        cases.push(Case::new(op([3, 3], [1, 1], [1, 1]), [equal.clone()]));
        cases.push(Case::new(op([2, 3], [2, 2], [1, 0]), [equal]));
        // Rows 3 to 8 and columns 2 to 7 of a plane of 9 × 8.
        let tile = MaxPool2d { rows: vec![9, 3, 2, 3], columns: vec![8, 2, 1, 2], ..op([3, 3], [2, 2], [1, 0]) };
        cases.push(Case::new(tile, [Arg::spread([2, 3, 6, 6]).constant()]));
        cases
    }
}

/// Over whole planes.
fn max_pool(kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2], ceil_mode: bool) -> MaxPool2d {
    MaxPool2d { kernel, stride, padding, ceil_mode, rows: Vec::new(), columns: Vec::new() }
}

op! {
    /// Backward of [`MaxPool2d`], from the places and the output's gradient: each gradient goes to its place in a plane
    /// of `size`, in order. A place outside is ignored; whoever has a tile of the plane finds all places of it under its
    /// windows.
    pub struct MaxPool2dGrad = "max_pool2d_grad" {
        kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2], size: [usize; 2],
        rows: Vec<usize> = Vec::new(), columns: Vec<usize> = Vec::new(),
    }
}

impl MaxPool2dGrad {
    fn tile(&self) -> Tile<'_> {
        Tile { rows: &self.rows, columns: &self.columns }
    }

    /// The windows that the gradients are of, so many of them.
    fn window(&self, out: [usize; 2]) -> Window {
        let Self { kernel, stride, padding, size, .. } = *self;
        let (whole, begin) = (self.tile().whole(size), self.tile().begin());
        Window { kernel, stride, padding, size, out, whole, begin, first: [0; 2] }
    }

    /// Where a place of the whole plane lies in the one here.
    fn here(&self, place: usize) -> Option<usize> {
        let ([_, width], [top, left]) = (self.tile().whole(self.size), self.tile().begin());
        let (y, x) = ((place / width).checked_sub(top)?, (place % width).checked_sub(left)?);
        (y < self.size[0] && x < self.size[1]).then_some(y * self.size[1] + x)
    }
}

impl Op for MaxPool2dGrad {
    fn operands(&self) -> Operands {
        Operands::new([Operand::i32("places"), Operand::float("g")], &["dx"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse("n c p! q!, n c p! q! -> n c h! w!"))
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let mut splits = self.index(inputs).map_or_else(Vec::new, |index| index.splits(inputs));
        let shape = &inputs[0].shape;
        splits.extend(tile_splits(&self.window([shape[2], shape[3]]), self.tile(), 2, 1, true));
        splits
    }
    fn part_at(&self, split: &Split, first: usize, units: usize) -> Option<Arc<dyn Op>> {
        let [rows, columns] = tile_of_part(split, first, units, self.tile())?;
        let mut size = self.size;
        size[split.outputs[0].cut()?.0 - 2] = units;
        Some(Arc::new(Self { rows, columns, size, ..self.clone() }))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [places, grad] = inputs else { return Err("takes two inputs: places and gradient".into()) };
        check_window(self.kernel, self.stride, self.padding, self.tile().whole(self.size))?;
        for (run, out) in [&self.rows, &self.columns].into_iter().zip(plane_size(grad)?) {
            if !run.is_empty() && (run.len() != 4 || run[3] != out) {
                return Err(format!("the tile {run:?} does not fit the gradient {grad}"));
            }
        }
        if *places != Type::i32(grad.shape.clone()) {
            return Err(format!("the places must be i32 of the gradient's shape, {grad}, but are {places}"));
        }
        Ok(vec![with_planes(grad, grad.dtype, self.size)])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        inputs[1].elements() as u64
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let (places, grad) = (cx.input(0), cx.grad());
        let shape = places.shape();
        let flat = |tensor: Tensor<'b>| {
            let plane = tensor.dim(2) * tensor.dim(3);
            tensor.reshape_to([tensor.dim(0), tensor.dim(1), plane])
        };
        vec![None, Some(flat(places).then(ScatterAddGrad { dim: 2 }, &[flat(grad)]).reshape_to(shape))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let mut out = Dense::zeros(outputs[0].shape.clone());
        let (from, to) = (inputs[0].shape[2] * inputs[0].shape[3], self.size[0] * self.size[1]);
        let all = self.tile().whole(self.size).iter().product();
        for (at, (place, grad)) in inputs[0].data.iter().zip(&inputs[1].data).enumerate() {
            if let Some(place) = within_f64(*place, all).and_then(|place| self.here(place)) {
                out.data[at / from * to + place] += grad;
            }
        }
        vec![out]
    }
}

impl Cpu for MaxPool2dGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let shape = cx.shape(0);
        let (from, to) = (shape[2] * shape[3], self.size[0] * self.size[1]);
        let (all, is_tile) =
            (self.tile().whole(self.size).iter().product(), !self.rows.is_empty() || !self.columns.is_empty());
        let (places, grad, target) = (cx.i32(0), cx.f32(1), Address(cx.out_f32(0).as_mut_ptr()));
        cx.team.chunks(shape[0] * shape[1], (ELEMENTS_PER_TASK / (from + to).max(1)).max(1), |range, _| {
            for plane in range {
                // SAFETY: tasks own disjoint planes.
                let out = unsafe { target.slice(plane * to, to) };
                out.fill(0.0);
                let own = plane * from..(plane + 1) * from;
                for (place, grad) in places[own.clone()].iter().zip(&grad[own]) {
                    let place = match is_tile {
                        true => within(*place, all).and_then(|place| self.here(place)),
                        false => within(*place, to),
                    };
                    if let Some(place) = place {
                        out[place] += grad;
                    }
                }
            }
        });
    }
}

impl Cuda for MaxPool2dGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let from = &cx.inputs[0].shape;
        if cx.channels_last {
            return crate::pool::calls(cx, "collect_places", &self.window([from[2], from[3]]).args());
        }
        let (planes, whole, begin) = (from[0] * from[1], self.tile().whole(self.size), self.tile().begin());
        let sizes = [[planes, from[2] * from[3]], self.size, whole, begin].concat();
        let operands = [device::input(0), device::input(1), device::output(0)];
        let args = operands.into_iter().chain(sizes.into_iter().map(device::long)).collect::<Vec<_>>();
        let (grid, block) = device::row_grid(planes, device::WARP);
        Launch::new(device::typed(crate::pool::SOURCE, cx), "spread_places", grid, block, args).into()
    }
    /// Of whole planes, each place is looked for under its own window alone.
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        let is_whole = self.rows.is_empty() && self.columns.is_empty();
        crate::pool::channels_last(cx).filter(|_| is_whole)
    }
}

impl Cases for MaxPool2dGrad {
    fn cases() -> Vec<Case> {
        let case = |shape: [usize; 4], size: [usize; 2]| {
            let arg = Arg::real(shape);
            let arg = if arg.ty.elements() < 200 { arg } else { arg.constant() };
            // Windows that reach every place: the places of a case are drawn.
            let (kernel, padding) = (size.map(|size| 2 * size + 80), size.map(|size| size + 40));
            let op = MaxPool2dGrad { kernel, stride: [1, 1], padding, size, rows: Vec::new(), columns: Vec::new() };
            Case::new(op, [Arg::index(shape, -1, (size[0] * size[1] + 1) as i64), arg])
        };
        // A tile of a plane of 9 × 8, with places in all of it.
        let (rows, columns) = (vec![9, 3, 1, 4], vec![8, 2, 0, 3]);
        let tile = MaxPool2dGrad { kernel: [3, 3], stride: [2, 2], padding: [1, 0], size: [5, 4], rows, columns };
        let places = Arg::index([2, 3, 4, 3], -1, 73);
        let tile = Case::new(tile, [places, Arg::real([2, 3, 4, 3]).constant()]);
        vec![case([2, 3, 2, 3], [4, 5]), case([1, 1, 1, 1], [1, 2]), case([2, 9, 30, 31], [31, 37]), tile]
    }
}

pub const KINDS: &[OpKind] =
    &[OpKind::of::<MaxPool2d>().with_cuda::<MaxPool2d>(), OpKind::of::<MaxPool2dGrad>().with_cuda::<MaxPool2dGrad>()];

kolo_graph::methods! {
    /// Max pooling over `[n, c, h, w]`.
    MaxPoolMethods {
        /// The largest value under each window.
        fn max_pool2d(self, kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2]) -> Tensor<'b> {
            self.max_pool2d_with(kernel, stride, padding, false)
        }
        /// The same; `ceil_mode` rounds the number of windows up, so that the last may reach beyond the padding.
        fn max_pool2d_with(
            self, kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2], ceil_mode: bool,
        ) -> Tensor<'b> {
            self.then(max_pool(kernel, stride, padding, ceil_mode), &[])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The conformance suite compares special values, but not their places.
    #[test]
    fn the_first_nan_wins_and_padding_loses_to_minus_infinity() {
        let window = Window::new([3, 3], [2, 2], [1, 1], [3, 3], false).unwrap();
        let largest = |plane: [f32; 9]| {
            let (mut values, mut places) = ([0.0; 4], [0; 4]);
            let (mut line, mut line_places) = (vec![0.0; window.line()], vec![0; window.line()]);
            max_plane(window, &plane, &mut values, &mut places, &mut line, &mut line_places);
            places
        };
        assert_eq!(largest([f32::NEG_INFINITY; 9]), [0, 1, 3, 4]);
        assert_eq!(largest([f32::NAN; 9]), [0, 1, 3, 4]);
        let nan = f32::NAN;
        assert_eq!(largest([9.0, 8.0, 7.0, nan, nan, 4.0, 3.0, 2.0, nan]), [3, 4, 3, 4]);
    }
}
