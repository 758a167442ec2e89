//! Runs elementwise programs over tiles that fit the first-level cache.
//!
//! A program is a list of steps over registers, each register one tile of numbers. A chain of ten ops costs one pass over
//! memory. The result of an element depends on that element alone, so cutting differently changes nothing.

use crate::{halves, simd};
use kolo_graph::cpu::{Buffer, TileKernel};
use kolo_graph::types::Type;
use kolo_graph::{CpuCx, DType, Team};

pub use kolo_graph::types::DIMS_MAX;

/// Elements per tile: twelve registers of it fit 24 KiB.
pub const TILE: usize = 512;
/// Below this many elements a second thread costs more than it saves.
const ELEMENTS_PER_TASK: usize = 8 * 1024;
/// Registers of one program, inputs included.
pub const REGISTERS_MAX: usize = 24;

/// One step: registers `inputs` into register `out`.
#[derive(Clone, Debug)]
pub struct Step {
    pub kernel: TileKernel,
    pub inputs: Vec<usize>,
}

/// Registers `0..inputs` are loaded, then each step fills the next; `outputs` are stored.
#[derive(Clone, Debug)]
pub struct Program {
    pub inputs: usize,
    pub steps: Vec<Step>,
    pub outputs: Vec<usize>,
}

/// How an operand's elements follow the output's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Walk {
    /// Element for element.
    Same,
    /// One number for all.
    Scalar,
    /// Repeats with this period: a bias along the last dims.
    Cycle(usize),
    /// Each element stands for this many: a statistic per row.
    Hold(usize),
    /// Any other broadcast, by strides per output dim (0 where it stretches).
    Strided([usize; DIMS_MAX]),
}

/// The walk of an operand of type `ty` under an output of shape `shape`.
pub fn walk(ty: &Type, shape: &[usize]) -> Walk {
    let (elements, total) = (ty.elements(), shape.iter().product::<usize>());
    if elements == total {
        return Walk::Same;
    }
    if elements == 1 {
        return Walk::Scalar;
    }
    let padded = &pad(ty, shape.len())[..shape.len()];
    let full = |dim: &usize| padded[*dim] == shape[*dim] && shape[*dim] != 1;
    let first = (0..shape.len()).find(full).unwrap_or(0);
    let last = (0..shape.len()).rfind(full).unwrap_or(0);
    if padded[first..] == shape[first..] {
        return Walk::Cycle(elements);
    }
    if padded[..=last] == shape[..=last] {
        return Walk::Hold(total / elements);
    }
    let mut strides = [0; DIMS_MAX];
    let mut stride = 1;
    for dim in (0..shape.len()).rev() {
        strides[dim] = if padded[dim] == 1 { 0 } else { stride };
        stride *= padded[dim];
    }
    Walk::Strided(strides)
}

/// The shape of `ty`, with ones before it until it has `rank` dims.
fn pad(ty: &Type, rank: usize) -> [usize; DIMS_MAX] {
    assert!(rank <= DIMS_MAX, "a tensor has at most {DIMS_MAX} dims");
    let mut padded = [1; DIMS_MAX];
    padded[rank - ty.rank()..rank].copy_from_slice(&ty.shape);
    padded
}

/// Copies the operand's elements for outputs `start..start + out.len()` into `out`, halves widened.
fn load(input: &Buffer, walk: &Walk, shape: &[usize], start: usize, out: &mut [f32]) {
    match input.ty.dtype {
        DType::BF16 => load_as(input.data.cast::<u16>(), walk, shape, start, out, |run, out| {
            halves::widen(DType::BF16, run, out);
        }),
        DType::F16 => load_as(input.data.cast::<u16>(), walk, shape, start, out, |run, out| {
            halves::widen(DType::F16, run, out);
        }),
        _ => load_as(input.data.cast::<f32>(), walk, shape, start, out, |run, out| out.copy_from_slice(run)),
    }
}

/// [`load`] of elements of one kind, which `copy` turns into f32.
fn load_as<T: Copy>(
    data: *const T,
    walk: &Walk,
    shape: &[usize],
    start: usize,
    out: &mut [f32],
    copy: impl Fn(&[T], &mut [f32]),
) {
    // SAFETY: `walk` was made for this operand and shape, so every run is inside it.
    let run =
        |from: usize, out: &mut [f32]| copy(unsafe { std::slice::from_raw_parts(data.add(from), out.len()) }, out);
    let at = |offset: usize| {
        let mut value = [0.0];
        run(offset, &mut value);
        value[0]
    };
    match walk {
        Walk::Same => run(start, out),
        Walk::Scalar => out.fill(at(0)),
        Walk::Cycle(period) => {
            let mut done = 0;
            while done < out.len() {
                let from = (start + done) % period;
                let len = (period - from).min(out.len() - done);
                run(from, &mut out[done..done + len]);
                done += len;
            }
        }
        Walk::Hold(len) => {
            let mut done = 0;
            while done < out.len() {
                let row = (start + done) / len;
                let end = ((row + 1) * len - start).min(out.len());
                out[done..end].fill(at(row));
                done = end;
            }
        }
        Walk::Strided(strides) => {
            for (slot, out) in out.iter_mut().enumerate() {
                let mut rest = start + slot;
                let mut offset = 0;
                for dim in (0..shape.len()).rev() {
                    offset += rest % shape[dim] * strides[dim];
                    rest /= shape[dim];
                }
                *out = at(offset);
            }
        }
    }
}

/// Writes a tile to elements `start..` of an output, rounded if it is one of halves.
///
/// # Safety
/// The elements are inside the output, and no other thread touches them meanwhile.
unsafe fn store(output: &Buffer, start: usize, tile: &[f32]) {
    if halves::is_half(output.ty.dtype) {
        // SAFETY: by the contract above.
        let out = unsafe { std::slice::from_raw_parts_mut(output.data.cast::<u16>().add(start), tile.len()) };
        halves::round(output.ty.dtype, tile, out);
        return;
    }
    // SAFETY: by the contract above.
    unsafe { Address(output.data.cast()).slice(start, tile.len()) }.copy_from_slice(tile);
}

/// Bytes of scratch `run` wants.
pub fn scratch_bytes(program: &Program, threads: usize) -> usize {
    (program.inputs + program.steps.len()) * TILE * 4 * threads
}

/// An address that may cross to another thread.
#[derive(Clone, Copy, Debug)]
pub struct Address(pub *mut f32);
// SAFETY: every user writes disjoint parts.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl Address {
    pub fn get(&self) -> *mut f32 {
        self.0
    }
    /// # Safety
    /// `start..start + len` is inside the buffer and no other thread touches it meanwhile.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice<'a>(&self, start: usize, len: usize) -> &'a mut [f32] {
        // SAFETY: by the contract above.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

/// Adds up two terms, or a higher power of two, as a balanced tree: in place, but the last two are left to `last`.
pub fn add_as_tree<'a>(terms: usize, term: impl Fn(usize) -> &'a mut [f32], last: impl FnOnce(&mut [f32], &[f32])) {
    let mut stride = 1;
    while 2 * stride < terms {
        (0..terms).step_by(2 * stride).for_each(|at| simd::add_into(term(at), term(at + stride)));
        stride *= 2;
    }
    last(term(0), term(stride));
}

/// Runs the program on the node's operands; an output may share an input's buffer.
pub fn run(program: &Program, cx: &CpuCx<'_>) {
    let shape = cx.out_shape(0);
    let walks: [Walk; REGISTERS_MAX] =
        std::array::from_fn(|at| cx.inputs.get(at).map_or(Walk::Scalar, |input| walk_of(input, shape)));
    let count = shape.iter().product();
    let scratch = Address(cx.scratch().as_mut_ptr());
    let registers = program.inputs + program.steps.len();
    assert!(registers <= REGISTERS_MAX, "a fused program has too many registers");
    for_each_task(cx.team, count, |range, thread| {
        let mut start = range.start;
        while start < range.end {
            let len = TILE.min(range.end - start);
            // SAFETY: each thread has its own registers.
            let tiles = unsafe { scratch.slice(thread * registers * TILE, registers * TILE) };
            for (at, input) in cx.inputs.iter().enumerate() {
                load(input, &walks[at], shape, start, &mut tiles[at * TILE..at * TILE + len]);
            }
            for (at, step) in program.steps.iter().enumerate() {
                let (known, rest) = tiles.split_at_mut((program.inputs + at) * TILE);
                let mut operands: [&[f32]; 4] = [&[]; 4];
                for (operand, register) in operands.iter_mut().zip(&step.inputs) {
                    *operand = &known[register * TILE..register * TILE + len];
                }
                (step.kernel.function)(&operands[..step.inputs.len()], &mut rest[..len], step.kernel.constant);
            }
            for (output, register) in cx.outputs.iter().zip(&program.outputs) {
                // SAFETY: tasks own disjoint ranges of every output.
                unsafe { store(output, start, &tiles[register * TILE..register * TILE + len]) };
            }
            start += len;
        }
    });
}

fn walk_of(input: &Buffer, shape: &[usize]) -> Walk {
    walk(&input.ty, shape)
}

/// Cuts `0..count` into tasks of a fixed size.
pub fn for_each_task(team: &Team, count: usize, task: impl Fn(std::ops::Range<usize>, usize) + Sync) {
    team.chunks(count, ELEMENTS_PER_TASK, task);
}

/// Runs one elementwise op. An operand that stretches, or whose buffer is the output's, is copied tile by tile; others are
/// read where they lie.
pub fn run_one(kernel: TileKernel, cx: &CpuCx<'_>) {
    let shape = cx.out_shape(0);
    let walks: [Walk; 4] = std::array::from_fn(|at| cx.inputs.get(at).map_or(Walk::Scalar, |i| walk_of(i, shape)));
    let count: usize = shape.iter().product();
    let output = Address(cx.outputs[0].data.cast());
    for_each_task(cx.team, count, |range, _| {
        let mut tiles = [[0.0f32; TILE]; 4];
        let mut start = range.start;
        while start < range.end {
            let len = TILE.min(range.end - start);
            let mut operands: [&[f32]; 4] = [&[]; 4];
            let places = cx.inputs.iter().zip(&walks).zip(&mut tiles);
            for (((input, walk), tile), operand) in places.zip(&mut operands) {
                *operand = if *walk == Walk::Same && input.data != cx.outputs[0].data {
                    // SAFETY: the operand has the output's shape, and nothing overwrites it.
                    unsafe { std::slice::from_raw_parts(input.data.cast::<f32>().add(start), len) }
                } else {
                    load(input, walk, shape, start, &mut tile[..len]);
                    &tile[..len]
                };
            }
            // What the next tile needs may come while this one is computed.
            for (input, walk) in cx.inputs.iter().zip(&walks) {
                if *walk == Walk::Same {
                    let next = TILE.min(range.end - start - len);
                    simd::prefetch(input.data.cast::<f32>().wrapping_add(start + len), next);
                }
            }
            // SAFETY: tasks own disjoint ranges, and the tile was loaded before it is overwritten.
            let out = unsafe { output.slice(start, len) };
            (kernel.function)(&operands[..cx.inputs.len()], out, kernel.constant);
            start += len;
        }
    });
}
