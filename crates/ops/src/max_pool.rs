//! Max pooling, which remembers where under its window each maximum was.

use crate::device;
use crate::movement::{ELEMENTS_PER_TASK, Element, input, within_f64};
use crate::pool::{
    Tile, Window, define_planes, for_each_plane, load, plane_size, pool_cases, tile_of_part, tile_splits, with_planes,
};
use crate::simd::LANES;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::cuda::{ChannelsLast, Cuda, CudaCalls, CudaCx, Launch};
use kolo_graph::index::Index;
use kolo_graph::op::{Domain, OpKind};
use kolo_graph::{
    Arg, Case, Cases, Cpu, CpuCx, DType, Dense, GradCx, Mixed, Op, Operand, Operands, Split, Tensor, Type, op,
};
use std::ops::Range;
use std::sync::Arc;

op! {
    /// The largest value under each window, and as second output its tap: `dy·kernel_x + dx`, counted from the window's
    /// first corner, padding included. Taps are u8 if a window has at most 256, else i32; a kernel beyond the padded plane
    /// ends with it. Of equal values the first counts and gets the gradient; NaN counts as largest. Padding never wins. With
    /// `ceil_mode` a last window may reach beyond the padding. With `rows` or `columns` this is a tile of a plane: the
    /// places of the whole plane, the first place here, the first window here, and the windows here.
    pub struct MaxPool2d = "max_pool2d" {
        kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2], ceil_mode: bool = false,
        rows: Vec<usize> = Vec::new(), columns: Vec<usize> = Vec::new(),
    }
}

/// Taps of a window, at most: twice as many are still an i32.
const TAPS_MAX: usize = 1 << 30;
/// Taps that a byte can number.
const BYTE_TAPS: usize = 1 << 8;

/// The type of the taps of these windows.
fn tap_type(window: &Window) -> Result<DType, String> {
    match window.area() {
        taps if taps <= BYTE_TAPS => Ok(DType::U8),
        taps if taps <= TAPS_MAX => Ok(DType::I32),
        taps => Err(format!("a window has at most {TAPS_MAX} taps, not {taps}")),
    }
}

impl Op for MaxPool2d {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x")], &["y"]).saved(&["taps"])
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
        Ok(vec![with_planes(input, input.dtype, window.out), with_planes(input, tap_type(&window)?, window.out)])
    }
    fn flops(&self, _: &[Type], outputs: &[Type]) -> u64 {
        crate::pool::flops(&outputs[0], self.kernel)
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let size = [cx.input(0).dim(2), cx.input(0).dim(3)];
        let Self { kernel, stride, padding, ceil_mode, rows, columns } = self.clone();
        let backward = MaxPool2dGrad { kernel, stride, padding, size, ceil_mode, rows, columns };
        vec![Some(cx.output(1).then(backward, &[cx.grad()]))]
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
        let taps = define_planes(inputs[0], &outputs[1], |plane, out| {
            for (at, out) in out.iter_mut().enumerate() {
                let (place, [row, column]) = (largest(plane, at), [at / window.out[1], at % window.out[1]]);
                let (y, x) = (place / window.size[1], place % window.size[1]);
                *out = (window.tap(0, row, y) * window.kernel[1] + window.tap(1, column, x)) as f64;
            }
        });
        vec![values, taps]
    }
}

impl Cpu for MaxPool2d {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let window = self.window(cx.shape(0));
        match cx.outputs[1].ty.dtype {
            DType::U8 => max_planes::<u8>(cx, window),
            _ => max_planes::<u32>(cx, window),
        }
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

/// All planes, with taps as wide as `T`.
fn max_planes<T: Element>(cx: &CpuCx<'_>, window: Window) {
    assert_eq!(cx.outputs[1].ty.dtype.bytes(), size_of::<T>(), "taps are chosen by width");
    let (count, line) = (window.outputs(), window.line());
    let (lines, taps) = (Address(cx.scratch().as_mut_ptr()), Address(cx.outputs[1].data.cast()));
    for_each_plane(cx, window.grain(), |plane| {
        // SAFETY: tasks own disjoint planes, whose taps are as wide as `T`, and each thread its own two lines: an i32 is as
        // wide as f32.
        let (taps, line, line_taps) = unsafe {
            let taps: *mut T = taps.get().cast::<T>().add(plane.at * count);
            let line_taps: *mut i32 = lines.get().add((2 * plane.thread + 1) * line).cast();
            (
                std::slice::from_raw_parts_mut(taps, count),
                lines.slice(2 * plane.thread * line, line),
                std::slice::from_raw_parts_mut(line_taps, line),
            )
        };
        max_plane(window, plane.input, plane.out, taps, line, line_taps);
    });
}

vectorized! {
    /// `line` has the largest of each column under a row of windows, and `line_taps` the tap that it would have at the
    /// windows' left edge.
    fn max_plane<T: Element>(
        window: Window,
        plane: &[f32],
        values: &mut [f32],
        taps: &mut [T],
        line: &mut [f32],
        line_taps: &mut [i32],
    ) {
        // Padding loses even against −∞, because its taps come last.
        line.fill(f32::NEG_INFINITY);
        line_taps.fill(window.area() as i32);
        let width = window.out[1];
        for (row, (values, taps)) in values.chunks_mut(width).zip(taps.chunks_mut(width)).enumerate() {
            let (best, best_taps) = (&mut line[window.middle()], &mut line_taps[window.middle()]);
            for (at, y) in window.rows(row).enumerate() {
                let own = &plane[y * window.size[1]..(y + 1) * window.size[1]];
                let tap = (window.tap(0, row, y) * window.kernel[1]) as i32;
                if at == 0 {
                    best.copy_from_slice(own);
                    best_taps.fill(tap);
                } else {
                    keep_larger(best, best_taps, own, tap);
                }
            }
            // Known strides vectorise.
            match window.stride[1] {
                1 => max_windows(window.kernel[1], 1, line, line_taps, values, taps),
                2 => max_windows(window.kernel[1], 2, line, line_taps, values, taps),
                stride => max_windows(window.kernel[1], stride, line, line_taps, values, taps),
            }
        }
    }
}

/// Takes each of `row` that is larger, and the row's tap.
#[inline(always)]
fn keep_larger(best: &mut [f32], best_taps: &mut [i32], row: &[f32], tap: i32) {
    let count = row.len();
    let (best, best_taps) = (&mut best[..count], &mut best_taps[..count]);
    for at in 0..count {
        let larger = (row[at] > best[at]) | (row[at].is_nan() & !best[at].is_nan());
        best[at] = if larger { row[at] } else { best[at] };
        best_taps[at] = if larger { tap } else { best_taps[at] };
    }
}

/// The largest under each window of a line; of equal values the one with the first tap.
#[inline(always)]
fn max_windows<T: Element>(
    kernel: usize,
    stride: usize,
    line: &[f32],
    line_taps: &[i32],
    values: &mut [f32],
    taps: &mut [T],
) {
    for (at, (values, taps)) in values.chunks_mut(LANES).zip(taps.chunks_mut(LANES)).enumerate() {
        let mut best: [f32; LANES] = load(line, at * LANES * stride, stride);
        let mut best_tap: [i32; LANES] = load(line_taps, at * LANES * stride, stride);
        for column in 1..kernel {
            let value: [f32; LANES] = load(line, at * LANES * stride + column, stride);
            let tap: [i32; LANES] = load(line_taps, at * LANES * stride + column, stride);
            for lane in 0..LANES {
                let tap = tap[lane] + column as i32;
                let (nan, was_nan) = (value[lane].is_nan(), best[lane].is_nan());
                let larger = (value[lane] > best[lane]) | (nan & !was_nan);
                let equal = (value[lane] == best[lane]) | (nan & was_nan);
                let take = larger | (equal & (tap < best_tap[lane]));
                best[lane] = if take { value[lane] } else { best[lane] };
                best_tap[lane] = if take { tap } else { best_tap[lane] };
            }
        }
        values.copy_from_slice(&best[..values.len()]);
        let best_tap = best_tap.map(|tap| T::of(tap as u64));
        taps.copy_from_slice(&best_tap[..taps.len()]);
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
        cases.push(Case::new(op([2, 3], [2, 2], [1, 0]), [equal.clone()]));
        // As many taps as a byte can number, and more.
        cases.push(Case::new(op([16, 16], [3, 2], [8, 8]), [equal.clone()]));
        cases.push(Case::new(op([17, 18], [3, 2], [8, 9]), [equal.clone()]));
        cases.push(Case::new(op([17, 17], [1, 2], [8, 8]), [Arg::spread([1, 2, 4, 5])]));
        // A kernel beyond the padded plane.
        cases.push(Case::new(ceil([20, 40], [12, 9], [0, 0]), [equal]));
        // Channels that are read in packs where they lie last.
        cases.push(Case::new(ceil([3, 2], [2, 2], [1, 1]), [Arg::spread([2, 8, 5, 6]).constant()]));
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

/// The taps that an op reads.
const TAPS: Operand = Operand::of("taps", &[DType::U8, DType::I32]);

/// Refuses taps that do not belong to windows over such planes.
fn check_taps(window: &Window, taps: &Type, planes: &Type) -> Result<(), String> {
    let wanted = with_planes(planes, tap_type(window)?, window.out);
    if *taps == wanted { Ok(()) } else { Err(format!("the taps must be {wanted}, but are {taps}")) }
}

/// The place of a window's tap in the plane here, if that has it.
fn define_place(window: &Window, at: usize, tap: f64) -> Option<usize> {
    let tap = within_f64(tap, window.area())?;
    let y = window.place(0, at / window.out[1], tap / window.kernel[1])?;
    let x = window.place(1, at % window.out[1], tap % window.kernel[1])?;
    Some(y * window.size[1] + x)
}

/// Finds places by tap.
struct Taps {
    window: Window,
    /// Rows and columns of windows that lie in the plane as a whole.
    inside: [Range<usize>; 2],
    /// How far behind such a window's first place the place of each tap is that is a byte.
    bytes: [usize; BYTE_TAPS],
}

/// Further than any place.
const NOWHERE: usize = usize::MAX / 2;

impl Taps {
    fn new(window: Window) -> Self {
        let inside = |axis: usize| {
            let (stride, first) = (window.stride[axis], window.first[axis]);
            let before = window.padding[axis] + window.begin[axis];
            let last = (before + window.size[axis]).checked_sub(window.kernel[axis]);
            let end = last.map_or(0, |last| (last / stride + 1).saturating_sub(first)).min(window.out[axis]);
            before.div_ceil(stride).saturating_sub(first).min(end)..end
        };
        let mut taps = Self { inside: [inside(0), inside(1)], bytes: [NOWHERE; BYTE_TAPS], window };
        taps.bytes = std::array::from_fn(|tap| taps.further(tap));
        taps
    }

    fn further(&self, tap: usize) -> usize {
        let [height, width] = self.window.kernel;
        if tap / width < height { tap / width * self.window.size[1] + tap % width } else { NOWHERE }
    }

    /// Each window of a plane in order, and the place of its tap in the plane here; some place beyond the plane if it has none.
    #[inline(always)]
    fn for_each<T: Element + Into<u64>>(&self, taps: &[T], mut f: impl FnMut(usize, usize)) {
        let Window { kernel, stride, padding, size, out, begin, first, .. } = self.window;
        // What lies before the plane wraps, and is beyond it then.
        let start = |axis: usize, at: usize| {
            ((first[axis] + at) * stride[axis]).wrapping_sub(padding[axis]).wrapping_sub(begin[axis])
        };
        let further = |tap: T| match size_of::<T>() {
            1 => self.bytes[tap.into() as usize],
            _ => self.further(tap.into() as usize),
        };
        let anywhere = |row: usize, column: usize, tap: T| {
            let (dy, dx) = (tap.into() as usize / kernel[1], tap.into() as usize % kernel[1]);
            let (y, x) = (start(0, row).wrapping_add(dy), start(1, column).wrapping_add(dx));
            if dy < kernel[0] && y < size[0] && x < size[1] { y * size[1] + x } else { NOWHERE }
        };
        for (row, taps) in taps.chunks(out[1]).enumerate() {
            let inside = if self.inside[0].contains(&row) { self.inside[1].clone() } else { 0..0 };
            let at = row * out[1];
            (0..inside.start).for_each(|column| f(at + column, anywhere(row, column, taps[column])));
            let mut window = start(0, row).wrapping_mul(size[1]).wrapping_add(start(1, inside.start));
            for column in inside.clone() {
                f(at + column, window + further(taps[column]));
                window += stride[1];
            }
            (inside.end..out[1]).for_each(|column| f(at + column, anywhere(row, column, taps[column])));
        }
    }

    /// Planes of a task.
    fn grain(&self) -> usize {
        (ELEMENTS_PER_TASK / (self.window.inputs() + self.window.outputs()).max(1)).max(1)
    }
}

op! {
    /// Backward of [`MaxPool2d`], from the taps and the output's gradient: each gradient goes to the place of its tap in a
    /// plane of `size`, in order. A tap that is not under the window, or whose place is not here, is ignored; whoever has a
    /// tile of the plane has all windows over it.
    pub struct MaxPool2dGrad = "max_pool2d_grad" {
        kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2], size: [usize; 2], ceil_mode: bool = false,
        rows: Vec<usize> = Vec::new(), columns: Vec<usize> = Vec::new(),
    }
}

impl MaxPool2dGrad {
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

impl Op for MaxPool2dGrad {
    fn operands(&self) -> Operands {
        Operands::new([TAPS, Operand::float("g")], &["dx"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse("n c p! q!, n c p! q! -> n c h! w!"))
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let mut splits = self.index(inputs).map_or_else(Vec::new, |index| index.splits(inputs));
        splits.extend(tile_splits(&self.window(), self.tile(), 2, 1, true));
        splits
    }
    fn part_at(&self, split: &Split, first: usize, units: usize) -> Option<Arc<dyn Op>> {
        let [rows, columns] = tile_of_part(split, first, units, self.tile())?;
        let mut size = self.size;
        size[split.outputs[0].cut()?.0 - 2] = units;
        Some(Arc::new(Self { rows, columns, size, ..self.clone() }))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [taps, grad] = inputs else { return Err("takes two inputs: taps and gradient".into()) };
        let window = self.checked_window()?;
        if plane_size(grad)? != window.out {
            return Err(format!(
                "pooling planes of {:?} gives {:?}, but the gradient is {grad}",
                self.size, window.out
            ));
        }
        check_taps(&window, taps, grad)?;
        Ok(vec![with_planes(grad, grad.dtype, self.size)])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        inputs[1].elements() as u64
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let Self { kernel, stride, padding, ceil_mode, rows, columns, .. } = self.clone();
        let pick = MaxPool2dPick { kernel, stride, padding, ceil_mode, rows, columns };
        vec![None, Some(cx.input(0).then(pick, &[cx.grad()]))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let (window, mut out) = (self.window(), Dense::zeros(outputs[0].shape.clone()));
        let (from, to) = (window.outputs(), window.inputs());
        for (at, (tap, grad)) in inputs[0].data.iter().zip(&inputs[1].data).enumerate() {
            if let Some(place) = define_place(&window, at % from, *tap) {
                out.data[at / from * to + place] += grad;
            }
        }
        vec![out]
    }
}

impl Cpu for MaxPool2dGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        match cx.inputs[0].ty.dtype {
            DType::U8 => spread_planes::<u8>(cx, Taps::new(self.window())),
            _ => spread_planes::<u32>(cx, Taps::new(self.window())),
        }
    }
}

/// Gradients go where their taps say.
fn spread_planes<T: Element + Into<u64>>(cx: &CpuCx<'_>, by_tap: Taps) {
    let (from, to) = (by_tap.window.outputs(), by_tap.window.inputs());
    let (taps, grad, target) = (input::<T>(cx, 0), cx.f32(1), Address(cx.out_f32(0).as_mut_ptr()));
    cx.team.chunks(grad.len() / from, by_tap.grain(), |range, _| {
        for plane in range {
            // SAFETY: tasks own disjoint planes.
            let out = unsafe { target.slice(plane * to, to) };
            out.fill(0.0);
            let grad = &grad[plane * from..(plane + 1) * from];
            by_tap.for_each(&taps[plane * from..(plane + 1) * from], |at, place| {
                if let Some(sum) = out.get_mut(place) {
                    *sum += grad[at];
                }
            });
        }
    });
}

impl Cuda for MaxPool2dGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (window, from) = (self.window(), &cx.inputs[0].shape);
        if cx.channels_last {
            return crate::pool::calls(cx, "collect_taps", &window.args());
        }
        let planes = from[0] * from[1];
        let operands = [device::input(0), device::input(1), device::output(0), device::long(planes)];
        let args = operands.into_iter().chain(window.args()).collect::<Vec<_>>();
        let (grid, block) = device::row_grid(planes, device::WARP);
        Launch::new(device::typed(crate::pool::SOURCE, cx), "spread_taps", grid, block, args).into()
    }
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        crate::pool::channels_last(cx)
    }
}

/// Taps of all windows: some are under none, or in the padding.
fn tap_arg(window: &Window, planes: [usize; 2]) -> Arg {
    let (shape, taps) = ([planes, window.out].concat(), window.area());
    match tap_type(window) {
        Ok(DType::U8) => Arg::byte(shape, 0, (taps + 2).min(BYTE_TAPS) as i64),
        _ => Arg::index(shape, -2, (taps + 2) as i64),
    }
}

impl Cases for MaxPool2dGrad {
    fn cases() -> Vec<Case> {
        let case = |op: MaxPool2dGrad, planes: [usize; 2]| {
            let arg = Arg::real([planes, op.window().out].concat());
            let arg = if arg.ty.elements() < 200 { arg } else { arg.constant() };
            Case::new(op.clone(), [tap_arg(&op.window(), planes), arg])
        };
        let whole = |size: [usize; 2], kernel, stride, padding, ceil_mode| {
            let (rows, columns) = (Vec::new(), Vec::new());
            MaxPool2dGrad { kernel, stride, padding, size, ceil_mode, rows, columns }
        };
        // A tile of a plane of 9 × 8, and the windows over it.
        let (rows, columns) = (vec![9, 3, 1, 4], vec![8, 2, 0, 3]);
        let tile = MaxPool2dGrad { rows, columns, ..whole([5, 4], [3, 3], [2, 2], [1, 0], false) };
        vec![
            case(whole([4, 5], [2, 2], [2, 1], [0, 1], false), [2, 3]),
            case(whole([5, 7], [3, 3], [2, 2], [1, 1], true), [2, 3]),
            case(whole([5, 5], [2, 2], [3, 3], [1, 1], false), [1, 2]),
            case(whole([1, 2], [1, 2], [1, 1], [0, 1], false), [1, 1]),
            case(whole([31, 37], [3, 3], [1, 1], [1, 1], false), [2, 9]),
            // As many taps as a byte can number, and more.
            case(whole([9, 35], [16, 16], [3, 2], [8, 8], false), [1, 2]),
            case(whole([9, 11], [17, 18], [3, 2], [8, 9], false), [1, 2]),
            case(whole([4, 5], [20, 40], [17, 37], [0, 0], true), [2, 2]),
            // Channels that are read in packs where they lie last.
            case(whole([5, 6], [3, 2], [2, 2], [1, 1], true), [2, 8]),
            case(tile, [2, 3]),
        ]
    }
}

op! {
    /// What planes have at a tap of each window; zero at one that is not under its window, or not here. So the gradient comes
    /// back through [`MaxPool2dGrad`].
    pub struct MaxPool2dPick = "max_pool2d_pick" {
        kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2], ceil_mode: bool = false,
        rows: Vec<usize> = Vec::new(), columns: Vec<usize> = Vec::new(),
    }
}

impl MaxPool2dPick {
    fn checked_window(&self, size: [usize; 2]) -> Result<Window, String> {
        let tile = Tile { rows: &self.rows, columns: &self.columns };
        Window::new(self.kernel, self.stride, self.padding, tile.whole(size), self.ceil_mode)?.on_tile(tile, size)
    }

    fn window(&self, shape: &[usize]) -> Window {
        self.checked_window([shape[2], shape[3]]).expect("infer checks the window")
    }
}

impl Op for MaxPool2dPick {
    fn operands(&self) -> Operands {
        Operands::new([TAPS, Operand::float("x")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse("n c p! q!, n c h! w! -> n c p! q!"))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [taps, planes] = inputs else { return Err("takes two inputs: taps and planes".into()) };
        let window = self.checked_window(plane_size(planes)?)?;
        check_taps(&window, taps, planes)?;
        Ok(vec![with_planes(planes, planes.dtype, window.out)])
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let size = [cx.input(1).dim(2), cx.input(1).dim(3)];
        let Self { kernel, stride, padding, ceil_mode, rows, columns } = self.clone();
        let spread = MaxPool2dGrad { kernel, stride, padding, size, ceil_mode, rows, columns };
        vec![None, Some(cx.input(0).then(spread, &[cx.grad()]))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let window = self.window(&inputs[1].shape);
        let (from, to) = (window.inputs(), window.outputs());
        let picked = |(at, tap): (usize, &f64)| {
            define_place(&window, at % to, *tap).map_or(0.0, |place| inputs[1].data[at / to * from + place])
        };
        vec![Dense::new(outputs[0].shape.clone(), inputs[0].data.iter().enumerate().map(picked).collect())]
    }
}

impl Cpu for MaxPool2dPick {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let by_tap = Taps::new(self.window(cx.shape(1)));
        match cx.inputs[0].ty.dtype {
            DType::U8 => pick_planes::<u8>(cx, by_tap),
            _ => pick_planes::<u32>(cx, by_tap),
        }
    }
}

/// What lies where taps say.
fn pick_planes<T: Element + Into<u64>>(cx: &CpuCx<'_>, by_tap: Taps) {
    let taps = input::<T>(cx, 0);
    let (from, to) = (by_tap.window.inputs(), by_tap.window.outputs());
    let (planes, target) = (cx.f32(1), Address(cx.out_f32(0).as_mut_ptr()));
    cx.team.chunks(taps.len() / to, by_tap.grain(), |range, _| {
        for at in range {
            // SAFETY: tasks own disjoint planes.
            let out = unsafe { target.slice(at * to, to) };
            let plane = &planes[at * from..(at + 1) * from];
            let pick = |at: usize, place: usize| out[at] = plane.get(place).copied().unwrap_or(0.0);
            by_tap.for_each(&taps[at * to..(at + 1) * to], pick);
        }
    });
}

impl Cuda for MaxPool2dPick {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        crate::pool::calls(cx, "pick_taps", &self.window(&cx.inputs[1].shape).args())
    }
}

impl Cases for MaxPool2dPick {
    fn cases() -> Vec<Case> {
        let case = |op: MaxPool2dPick, shape: [usize; 4]| {
            let taps = tap_arg(&op.window(&shape), [shape[0], shape[1]]);
            let arg = Arg::real(shape);
            Case::new(op, [taps, if arg.ty.elements() < 200 { arg } else { arg.constant() }])
        };
        let whole = |kernel, stride, padding, ceil_mode| {
            let (rows, columns) = (Vec::new(), Vec::new());
            MaxPool2dPick { kernel, stride, padding, ceil_mode, rows, columns }
        };
        // A tile of a plane of 9 × 8, whose windows reach beyond it.
        let (rows, columns) = (vec![9, 3, 1, 4], vec![8, 2, 0, 3]);
        let tile = MaxPool2dPick { rows, columns, ..whole([3, 3], [2, 2], [1, 0], false) };
        vec![
            case(whole([3, 2], [2, 2], [1, 1], true), [2, 3, 5, 4]),
            case(whole([2, 2], [3, 3], [1, 1], false), [1, 2, 5, 5]),
            case(whole([17, 18], [3, 2], [8, 9], false), [1, 2, 9, 11]),
            case(whole([3, 3], [1, 1], [1, 1], false), [2, 9, 31, 37]),
            case(tile, [2, 3, 5, 4]),
        ]
    }
}

pub const KINDS: &[OpKind] = &[
    OpKind::of::<MaxPool2d>().with_cuda::<MaxPool2d>(),
    OpKind::of::<MaxPool2dGrad>().with_cuda::<MaxPool2dGrad>(),
    OpKind::of::<MaxPool2dPick>().with_cuda::<MaxPool2dPick>(),
];

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

    /// The conformance suite compares special values, but not their taps.
    #[test]
    fn the_first_nan_wins_and_padding_loses_to_minus_infinity() {
        let window = Window::new([3, 3], [2, 2], [1, 1], [3, 3], false).unwrap();
        let largest = |plane: [f32; 9]| {
            let (mut values, mut taps) = ([0.0; 4], [0u8; 4]);
            let (mut line, mut line_taps) = (vec![0.0; window.line()], vec![0; window.line()]);
            max_plane(window, &plane, &mut values, &mut taps, &mut line, &mut line_taps);
            taps
        };
        assert_eq!(largest([f32::NEG_INFINITY; 9]), [4, 3, 1, 0]);
        assert_eq!(largest([f32::NAN; 9]), [4, 3, 1, 0]);
        let nan = f32::NAN;
        assert_eq!(largest([9.0, 8.0, 7.0, nan, nan, 4.0, 3.0, 2.0, nan]), [7, 6, 1, 0]);
    }
}
