//! What pooling ops share: windows over the planes of `[n, c, h, w]`, and the walk over planes.
//!
//! A plane is one task's work, so the order of every sum is that of the plane alone. A row of outputs takes two passes:
//! the rows under it are joined into one line, which is contiguous and vectorises; then windows are cut from that line,
//! which is padded at both ends so that no window needs a check. Backward runs the passes in the other order.

use crate::device;
use crate::movement::ELEMENTS_PER_TASK;
use crate::simd::LANES;
use crate::tiles::Address;
use kolo_graph::cuda::{CudaArg, CudaCalls, CudaCx, Launch};
use kolo_graph::{Arg, Case, CpuCx, DType, Dense, Op, Type};
use std::ops::Range;

/// How windows lie over a plane: each pair is (vertical, horizontal).
#[derive(Clone, Copy)]
pub(crate) struct Window {
    pub kernel: [usize; 2],
    pub stride: [usize; 2],
    pub padding: [usize; 2],
    pub size: [usize; 2],
    pub out: [usize; 2],
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
        check_window(&[kernel, stride, padding], size)?;
        let mut out = [0; 2];
        for axis in 0..2 {
            if kernel[axis] == 0 || stride[axis] == 0 {
                return Err(format!("kernel {kernel:?} and stride {stride:?} must be at least 1"));
            }
            if padding[axis] * 2 > kernel[axis] {
                return Err(format!("padding {padding:?} must be at most half the kernel {kernel:?}"));
            }
            let beyond = if ceil_mode { stride[axis] - 1 } else { 0 };
            let room = size[axis] + 2 * padding[axis] + beyond;
            let slack = room.checked_sub(kernel[axis]).ok_or_else(|| {
                format!("a plane of {size:?} with padding {padding:?} is smaller than the kernel {kernel:?}")
            })?;
            out[axis] = slack / stride[axis] + 1;
            if ceil_mode && (out[axis] - 1) * stride[axis] >= size[axis] + padding[axis] {
                out[axis] -= 1;
            }
            if out[axis] == 0 {
                return Err(format!("a plane of {size:?} has room for no window"));
            }
        }
        // A stride or a kernel beyond the padded plane leads nowhere: it only must not ask for a line of that length.
        let [kernel, stride] =
            [kernel, stride].map(|pair| std::array::from_fn(|axis| pair[axis].min(size[axis] + 2 * padding[axis])));
        Ok(Self { kernel, stride, padding, size, out })
    }

    /// Where output `at` reads with `tap`, unless that is padding.
    #[inline(always)]
    pub fn place(&self, axis: usize, at: usize, tap: usize) -> Option<usize> {
        (at * self.stride[axis] + tap).checked_sub(self.padding[axis]).filter(|place| *place < self.size[axis])
    }

    /// What the sum under an output is divided by along one axis: the places of the plane, or with `count_padding` those of
    /// the padding too, but none beyond it.
    pub fn divisor(&self, axis: usize, at: usize, count_padding: bool) -> usize {
        let (start, padding, size) = (at * self.stride[axis], self.padding[axis], self.size[axis]);
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
        self.padding[1]..self.padding[1] + self.size[1]
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

/// The kernels of all pooling on the GPU.
pub(crate) const SOURCE: &str = include_str!("pool.cu");

/// `function` over all elements of the first output, a thread to each. `sizes` come last.
pub(crate) fn calls(cx: &CudaCx<'_>, function: &'static str, sizes: &[CudaArg]) -> CudaCalls {
    let count = cx.outputs[0].elements();
    let operands = (0..cx.inputs.len()).map(device::input).chain((0..cx.outputs.len()).map(device::output));
    let args = operands.chain([device::long(count)]).chain(sizes.iter().copied()).collect::<Vec<_>>();
    Launch::new(device::typed(SOURCE, cx), function, device::grid(count, device::THREADS), device::THREADS, args).into()
}

impl Window {
    /// The numbers as the kernels take them.
    pub fn args(&self) -> Vec<CudaArg> {
        [self.size, self.out, self.kernel, self.stride, self.padding].concat().into_iter().map(device::long).collect()
    }
}

/// No number of a window may be larger: sums and products of two cannot overflow then.
pub(crate) const WINDOW_MAX: usize = 1 << 31;

/// Limits on a window's numbers, and a plane that is not empty.
fn check_window(numbers: &[[usize; 2]], size: [usize; 2]) -> Result<(), String> {
    if let Some(large) = numbers.iter().flatten().find(|number| **number > WINDOW_MAX) {
        return Err(format!("kernel, stride and padding are at most {WINDOW_MAX}, not {large}"));
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
