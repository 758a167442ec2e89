//! What pooling ops share: windows over the planes of `[n, c, h, w]`, and the walk over planes.
//!
//! A plane is one task's work, so the order of every sum is that of the plane alone. A row of outputs takes two passes:
//! the rows under it are joined into one line, which is contiguous and vectorises; then windows are cut from that line,
//! which is padded at both ends so that no window needs a check. Backward runs the passes in the other order.

use crate::device;
use crate::movement::ELEMENTS_PER_TASK;
use crate::simd::LANES;
use crate::tiles::Address;
use kolo_graph::cuda::{ChannelsLast, CudaArg, CudaCalls, CudaCx, Launch};
use kolo_graph::{Arg, Case, CpuCx, DType, Dense, Op, Placement, Reach, Split, Type};
use std::ops::Range;

/// How windows lie over a plane, or over a tile of one: each pair is (vertical, horizontal).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub kernel: [usize; 2],
    pub stride: [usize; 2],
    pub padding: [usize; 2],
    /// Places and windows that are here.
    pub size: [usize; 2],
    pub out: [usize; 2],
    /// Places of the whole plane.
    pub whole: [usize; 2],
    /// Which of its places and windows the first ones here are.
    pub begin: [usize; 2],
    pub first: [usize; 2],
}

impl Window {
    /// With `ceil_mode` a last window may reach beyond the plane and its padding, as long as it starts inside the plane
    /// or the padding before it.
    pub fn new(
        kernel: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        size: [usize; 2],
        ceil_mode: bool,
    ) -> Result<Self, String> {
        check_window(kernel, stride, padding, size)?;
        let mut out = [0; 2];
        for axis in 0..2 {
            if padding[axis] * 2 > kernel[axis] {
                return Err(format!("padding {padding:?} must be at most half the kernel {kernel:?}"));
            }
            let beyond = if ceil_mode { stride[axis] - 1 } else { 0 };
            let padded = size[axis] + 2 * padding[axis] + beyond;
            let slack = padded.checked_sub(kernel[axis]).ok_or_else(|| {
                format!("a plane of {size:?} with padding {padding:?} is smaller than the kernel {kernel:?}")
            })?;
            out[axis] = slack / stride[axis] + 1;
            if ceil_mode && (out[axis] - 1) * stride[axis] >= size[axis] + padding[axis] {
                out[axis] -= 1;
            }
            if out[axis] == 0 {
                return Err(format!("a plane of {size:?} is too small for any window"));
            }
        }
        // A stride or a kernel beyond the padded plane leads nowhere: it only must not ask for a line of that length.
        let [kernel, stride] =
            [kernel, stride].map(|pair| std::array::from_fn(|axis| pair[axis].min(size[axis] + 2 * padding[axis])));
        Ok(Self { kernel, stride, padding, size, out, whole: size, begin: [0; 2], first: [0; 2] })
    }

    /// The same over a tile of the plane, which has so many places.
    pub fn on_tile(mut self, tile: Tile<'_>, size: [usize; 2]) -> Result<Self, String> {
        self.size = size;
        for (axis, run) in [tile.rows, tile.columns].into_iter().enumerate() {
            let [_, begin, first, count] = match run {
                [] => [0, 0, 0, self.out[axis]],
                run => Tile::numbers(run)?,
            };
            let fits = |start: usize, count: usize, all: usize| count > 0 && start <= all && count <= all - start;
            let (windows, padding) = (self.out[axis], self.padding[axis]);
            if !fits(begin, size[axis], self.whole[axis]) || !fits(first, count, windows) {
                return Err(format!(
                    "the tile {run:?} is not inside a plane of {} and {windows} windows",
                    self.whole[axis]
                ));
            }
            if first * self.stride[axis] > begin + padding {
                return Err(format!("the first window of the tile {run:?} begins after its first row"));
            }
            (self.begin[axis], self.first[axis], self.out[axis]) = (begin, first, count);
        }
        Ok(self)
    }

    /// Refuses a tile that lacks places under its windows.
    pub fn checked_under(self) -> Result<Self, String> {
        for axis in 0..2 {
            let read = self.reach_of_windows(axis).range(&(self.first[axis]..self.first[axis] + self.out[axis]));
            let own = self.begin[axis]..self.begin[axis] + self.size[axis];
            if read.start < own.start || read.end > own.end {
                return Err(format!("windows of a tile read places {read:?}, but it has {own:?}"));
            }
        }
        Ok(self)
    }

    /// What windows read of the plane.
    fn reach_of_windows(&self, axis: usize) -> Reach {
        Reach::of_windows(self.whole[axis], self.kernel[axis], self.stride[axis], self.padding[axis])
    }

    /// Where output `at` reads with `tap`, unless that is padding.
    #[inline(always)]
    pub fn place(&self, axis: usize, at: usize, tap: usize) -> Option<usize> {
        let place = ((self.first[axis] + at) * self.stride[axis] + tap).checked_sub(self.padding[axis])?;
        if place >= self.whole[axis] {
            return None;
        }
        place.checked_sub(self.begin[axis]).filter(|place| *place < self.size[axis])
    }

    /// The tap with which output `at` reads a place that lies under it.
    #[inline(always)]
    pub fn tap(&self, axis: usize, at: usize, place: usize) -> usize {
        self.begin[axis] + place + self.padding[axis] - (self.first[axis] + at) * self.stride[axis]
    }

    /// What the sum under an output is divided by along one axis: the places of the plane, or with `count_padding` those of
    /// the padding too, but none beyond it.
    pub fn divisor(&self, axis: usize, at: usize, count_padding: bool) -> usize {
        let start = (self.first[axis] + at) * self.stride[axis];
        let (padding, size) = (self.padding[axis], self.whole[axis]);
        let end = start + self.kernel[axis];
        match count_padding {
            true => end.min(size + 2 * padding) - start,
            false => end.min(size + padding) - start.max(padding),
        }
    }

    pub fn area(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    pub fn inputs(&self) -> usize {
        self.size[0] * self.size[1]
    }

    pub fn outputs(&self) -> usize {
        self.out[0] * self.out[1]
    }

    /// Every place of the plane under output `at`, in order.
    pub fn places(self, at: usize) -> impl Iterator<Item = usize> {
        let (row, column) = (at / self.out[1], at % self.out[1]);
        (0..self.kernel[0]).filter_map(move |tap| self.place(0, row, tap)).flat_map(move |y| {
            let columns = (0..self.kernel[1]).filter_map(move |tap| self.place(1, column, tap));
            columns.map(move |x| y * self.size[1] + x)
        })
    }

    /// The rows of the plane under a row of outputs, in order.
    #[inline(always)]
    pub fn rows(self, row: usize) -> impl Iterator<Item = usize> {
        (0..self.kernel[0]).filter_map(move |tap| self.place(0, row, tap))
    }

    /// Where the plane's own part of a line lies.
    pub fn middle(&self) -> Range<usize> {
        let start = self.begin[1] + self.padding[1] - self.first[1] * self.stride[1];
        start..start + self.size[1]
    }

    /// Elements of a line: a row with its padding, long enough for whole vectors of outputs.
    pub fn line(&self) -> usize {
        let last = self.out[1].next_multiple_of(LANES) - 1;
        (last * self.stride[1] + self.kernel[1]).max(self.middle().end)
    }

    /// Planes per task.
    pub fn grain(&self) -> usize {
        (ELEMENTS_PER_TASK / (self.outputs() * self.area() + self.inputs()).max(1)).max(1)
    }
}

/// A part of a plane and of the windows over it, as ops hold it: of rows and of columns nothing, or the places of the whole
/// plane, the first place here, the first window here, and the windows here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile<'a> {
    pub rows: &'a [usize],
    pub columns: &'a [usize],
}

/// Places along a side of a plane that is cut into tiles, at most: windows as long as the plane ask for lines of its length,
/// and a tile of it may be short.
const SIDE_MAX: usize = 1 << 20;

impl Tile<'_> {
    fn numbers(run: &[usize]) -> Result<[usize; 4], String> {
        let numbers: [usize; 4] =
            run.try_into().map_err(|_| format!("a tile has zero or four numbers along a dim, not {}", run.len()))?;
        match numbers.iter().find(|number| **number > SIDE_MAX) {
            Some(large) => Err(format!("the numbers of a tile are at most {SIDE_MAX}, not {large}")),
            None => Ok(numbers),
        }
    }

    /// Places of the whole plane, of which so many are here.
    pub fn whole(&self, size: [usize; 2]) -> [usize; 2] {
        [self.rows.first().copied().unwrap_or(size[0]), self.columns.first().copied().unwrap_or(size[1])]
    }
}

/// Rows and columns, as splits of pooling ops call them: of windows, and of places.
const WINDOWS: [&str; 2] = ["p", "q"];
const PLACES: [&str; 2] = ["h", "w"];

/// The splits along rows and columns of a pooling op whose units are windows, or of a backward pass whose units are places.
/// What is cut already is not cut again.
pub(crate) fn tile_splits(
    window: &Window,
    tile: Tile<'_>,
    inputs: usize,
    outputs: usize,
    backward: bool,
) -> Vec<Split> {
    let along = |axis: usize| {
        let (kernel, stride, padding) = (window.kernel[axis], window.stride[axis], window.padding[axis]);
        let (name, size, reach) = match backward {
            false => (WINDOWS[axis], window.out[axis], window.reach_of_windows(axis)),
            true => (PLACES[axis], window.size[axis], Reach::of_places(window.out[axis], kernel, stride, padding)),
        };
        let placements = vec![Placement::Halo(axis + 2); inputs];
        let split = Split::new(name, size, placements, vec![Placement::Shard(axis + 2); outputs]).reaching(reach);
        (reach.meets(size) || backward).then_some(split)
    };
    let whole = [tile.rows, tile.columns].map(<[usize]>::is_empty);
    (0..2).filter(|axis| whole[*axis]).filter_map(along).collect()
}

/// The rows and columns of the tile that a part has: those of the op, and along the dim of the split its own.
pub(crate) fn tile_of_part(split: &Split, first: usize, units: usize, tile: Tile<'_>) -> Option<[Vec<usize>; 2]> {
    let (reach, units) = (split.reach?, first..first + units);
    let read = reach.range(&units);
    let mut runs = [tile.rows.to_vec(), tile.columns.to_vec()];
    if let Some(axis) = WINDOWS.iter().position(|name| *name == split.axis) {
        runs[axis] = vec![reach.extent, read.start, units.start, units.len()];
    } else {
        let axis = PLACES.iter().position(|name| *name == split.axis)?;
        runs[axis] = vec![split.size, units.start, read.start, read.len()];
    }
    Some(runs)
}

/// The kernels of all pooling on the GPU.
pub(crate) const SOURCE: &str = concat!(include_str!("pool.cuh"), include_str!("pool.cu"));

/// The kernels on planes whose channels lie last.
const LAST: &str = concat!(include_str!("pool.cuh"), include_str!("pool_last.cu"));

/// All operands: images of four dims, and taps of windows over them.
pub(crate) fn channels_last(cx: &CudaCx<'_>) -> Option<ChannelsLast> {
    // Kernels count in 32 bits.
    let fits = cx.inputs.iter().chain(cx.outputs).all(|ty| ty.rank() == 4 && ty.elements() <= u32::MAX as usize);
    let all = |types: &[Type]| (0..types.len()).collect();
    fits.then(|| ChannelsLast { inputs: all(cx.inputs), outputs: all(cx.outputs), gains: false })
}

/// `function` over all elements of the first output, a thread to each, or to a pack of channels where they lie last. `sizes` come
/// last.
pub(crate) fn calls(cx: &CudaCx<'_>, function: &'static str, sizes: &[CudaArg]) -> CudaCalls {
    let count = cx.outputs[0].elements();
    if cx.channels_last {
        let channels = cx.outputs[0].shape[1];
        // Of the widest elements; taps that are bytes come in packs of fewer bytes.
        let widest = cx.inputs.iter().chain(cx.outputs).map(|ty| ty.dtype).max_by_key(|dtype| dtype.bytes());
        let pack = widest.map_or(1, |dtype| device::pack(channels, dtype));
        let operands = (0..cx.inputs.len()).map(device::input).chain((0..cx.outputs.len()).map(device::output));
        let head = [device::long(count / pack), device::long(channels / pack)];
        let args = operands.chain(head).chain(sizes.iter().copied()).collect::<Vec<_>>();
        let source = device::typed(LAST, cx).define("PACK", pack);
        let grid = device::grid(count / pack, device::THREADS);
        return Launch::new(source, function, grid, device::THREADS, args).into();
    }
    let operands = (0..cx.inputs.len()).map(device::input).chain((0..cx.outputs.len()).map(device::output));
    let args = operands.chain([device::long(count)]).chain(sizes.iter().copied()).collect::<Vec<_>>();
    Launch::new(device::typed(SOURCE, cx), function, device::grid(count, device::THREADS), device::THREADS, args).into()
}

impl Window {
    /// The numbers as the kernels take them.
    pub fn args(&self) -> Vec<CudaArg> {
        let numbers = [self.size, self.out, self.kernel, self.stride, self.padding, self.whole, self.begin, self.first];
        numbers.concat().into_iter().map(device::long).collect()
    }
}

/// No number of a window may be larger: sums and products of two cannot overflow then.
pub(crate) const WINDOW_MAX: usize = 1 << 31;

/// Limits on a window's numbers, and a plane that is not empty.
fn check_window(kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2], size: [usize; 2]) -> Result<(), String> {
    if let Some(large) = [kernel, stride, padding].iter().flatten().find(|number| **number > WINDOW_MAX) {
        return Err(format!("kernel, stride and padding are at most {WINDOW_MAX}, not {large}"));
    }
    if kernel.contains(&0) || stride.contains(&0) {
        return Err(format!("kernel {kernel:?} and stride {stride:?} must be at least 1"));
    }
    if let Some(large) = size.iter().find(|side| **side > WINDOW_MAX) {
        return Err(format!("a plane is at most {WINDOW_MAX} long, not {large}"));
    }
    if size.contains(&0) { Err(format!("a plane of {size:?} is empty")) } else { Ok(()) }
}

/// One operation for each tap of each window.
pub(crate) fn flops(windows: &Type, kernel: [usize; 2]) -> u64 {
    (windows.elements() as u64).saturating_mul(kernel[0] as u64).saturating_mul(kernel[1] as u64)
}

/// Height and width of `[n, c, h, w]` of floats.
pub(crate) fn plane_size(ty: &Type) -> Result<[usize; 2], String> {
    match (ty.dtype.is_float(), &ty.shape[..]) {
        (true, [_, _, height, width]) => Ok([*height, *width]),
        _ => Err(format!("pools floats of four dims, [n, c, h, w], but got {ty}")),
    }
}

/// The type with the same planes at another size.
pub(crate) fn with_planes(ty: &Type, dtype: DType, [height, width]: [usize; 2]) -> Type {
    Type::new(dtype, [ty.shape[0], ty.shape[1], height, width])
}

/// Calls `f` for each plane of the input and of the output in f64.
pub(crate) fn define_planes(input: &Dense, output: &Type, f: impl Fn(&[f64], &mut [f64])) -> Dense {
    let mut out = Dense::zeros(output.shape.clone());
    let size = |shape: &[usize]| shape[2] * shape[3];
    let planes = input.data.chunks(size(&input.shape)).zip(out.data.chunks_mut(size(&output.shape)));
    planes.for_each(|(input, out)| f(input, out));
    out
}

/// One plane's share of an op: its number, the thread that runs it, its elements in the first input and output.
pub(crate) struct Plane<'a> {
    pub at: usize,
    pub thread: usize,
    pub input: &'a [f32],
    pub out: &'a mut [f32],
}

/// Calls `f` for each plane, `grain` planes to a task.
pub(crate) fn for_each_plane(cx: &CpuCx<'_>, grain: usize, f: impl Fn(Plane<'_>) + Sync) {
    let size = |shape: &[usize]| shape[2] * shape[3];
    let (x, target) = (cx.f32(0), Address(cx.out_f32(0).as_mut_ptr()));
    let (inputs, outputs) = (size(cx.shape(0)), size(cx.out_shape(0)));
    cx.team.chunks(x.len() / inputs.max(1), grain, |range, thread| {
        for at in range {
            // SAFETY: tasks own disjoint planes.
            let out = unsafe { target.slice(at * outputs, outputs) };
            f(Plane { at, thread, input: &x[at * inputs..(at + 1) * inputs], out });
        }
    });
}

/// `line[start + i·stride]` for each lane.
#[inline(always)]
pub(crate) fn load<T: Copy>(line: &[T], start: usize, stride: usize) -> [T; LANES] {
    let line = &line[start..start + (LANES - 1) * stride + 1];
    let mut lanes = [line[0]; LANES];
    for lane in 1..LANES {
        lanes[lane] = line[lane * stride];
    }
    lanes
}

/// The usual windows.
pub(crate) fn pool_cases<T: Op>(
    op: impl Fn([usize; 2], [usize; 2], [usize; 2]) -> T,
    arg: fn(Vec<usize>) -> Arg,
) -> Vec<Case> {
    let case = |shape: [usize; 4], kernel, stride, padding| {
        let small = shape.iter().product::<usize>() < 200;
        let arg = arg(shape.into());
        Case::new(op(kernel, stride, padding), [if small { arg } else { arg.constant() }])
    };
    vec![
        case([1, 1, 4, 4], [2, 2], [2, 2], [0, 0]),
        case([2, 2, 5, 7], [3, 3], [2, 2], [1, 1]),
        case([1, 3, 5, 4], [3, 2], [1, 1], [1, 1]),
        case([2, 1, 7, 6], [1, 3], [1, 3], [0, 1]),
        case([1, 2, 3, 3], [3, 3], [1, 1], [0, 0]),
        case([1, 1, 1, 1], [1, 1], [1, 1], [0, 0]),
        case([1, 2, 5, 5], [2, 2], [3, 3], [1, 1]),
        case([2, 9, 37, 41], [3, 3], [1, 1], [1, 1]),
        case([3, 9, 36, 42], [2, 2], [2, 2], [0, 0]),
    ]
}
