//! Permutation of dims.
//!
//! Dims that stay neighbours are merged first. What is left either keeps its innermost dim (whole rows move) or is a
//! batch of matrix transposes, done in square blocks so that both sides touch whole cache lines.

use crate::movement::{BYTES_PER_TASK, Element, Target, axes, by_width, check_rank, input};
use crate::moves;
use crate::tiles::DIMS_MAX;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx, CudaPlace};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};

op! {
    /// Dim `i` of the output is dim `perm[i]` of the input.
    pub struct Transpose = "transpose" { perm: Vec<usize> }
}

impl Op for Transpose {
    fn operands(&self) -> Operands {
        Operands::new([Operand::any("x")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let axes = axes(inputs.first()?.rank());
        let moved: Option<Vec<String>> = self.perm.iter().map(|dim| axes.get(*dim).cloned()).collect();
        Some(Index { inputs: vec![axes], outputs: vec![moved?], ..Index::default() })
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        check_rank(input)?;
        let named_once = (0..input.rank()).all(|dim| self.perm.iter().filter(|named| **named == dim).count() == 1);
        if self.perm.len() != input.rank() || !named_once {
            return Err(format!("{:?} must name each of the {} dims of {input} once", self.perm, input.rank()));
        }
        Ok(vec![Type::new(input.dtype, self.perm.iter().map(|dim| input.shape[*dim]).collect::<Vec<_>>())])
    }
    fn flops_per_point(&self) -> u64 {
        0
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let mut inverse = vec![0; self.perm.len()];
        self.perm.iter().enumerate().for_each(|(at, dim)| inverse[*dim] = at);
        vec![Some(cx.grad().permute(&inverse))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let mut from = vec![0; self.perm.len()];
        vec![Dense::from_fn(outputs[0].shape.clone(), |at| {
            self.perm.iter().zip(at).for_each(|(dim, at)| from[*dim] = *at);
            inputs[0].get(&from)
        })]
    }
}

impl Cpu for Transpose {
    fn run(&self, cx: &mut CpuCx<'_>) {
        by_width!(cx.inputs[0].ty.dtype, permute(cx, &self.perm));
    }
    fn takes_halves(&self) -> bool {
        true
    }
}

impl Cuda for Transpose {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (shape, mut calls) = (&cx.inputs[0].shape, CudaCalls::new());
        let (from, to) = (kolo_graph::types::strides(shape), kolo_graph::types::strides(&cx.outputs[0].shape));
        let walk = |(dim, to): (&usize, &usize)| moves::Walk { size: shape[*dim], from: from[*dim], to: *to };
        let walks: Vec<moves::Walk> = self.perm.iter().zip(&to).map(walk).collect();
        let bytes = cx.inputs[0].dtype.bytes();
        moves::elements(&mut calls, bytes, &walks, (CudaPlace::input(0), 0), (CudaPlace::output(0), 0));
        calls
    }
}

/// One dim of the output: its size and how far a step along it goes in the input and in the output.
#[derive(Clone, Copy, Default)]
struct Walk {
    size: usize,
    from: usize,
    to: usize,
}

/// The output's dims, outermost first, without those of size one and with neighbours merged; the number of them.
fn merge(shape: &[usize], perm: &[usize]) -> ([Walk; DIMS_MAX], usize) {
    let mut strides = [1; DIMS_MAX];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim];
    }
    let mut walks = [Walk::default(); DIMS_MAX];
    let mut count = 0;
    for dim in perm.iter().filter(|dim| shape[**dim] != 1) {
        let (size, from) = (shape[*dim], strides[*dim]);
        if count > 0 && walks[count - 1].from == size * from {
            walks[count - 1].size *= size;
            walks[count - 1].from = from;
        } else {
            walks[count] = Walk { size, from, to: 1 };
            count += 1;
        }
    }
    for at in (1..count).rev() {
        walks[at - 1].to = walks[at].to * walks[at].size;
    }
    (walks, count)
}

/// Offsets in the input and in the output of the `at`-th point of `walks`.
fn offsets(walks: &[Walk], mut at: usize) -> (usize, usize) {
    let (mut from, mut to) = (0, 0);
    for walk in walks.iter().rev() {
        from += at % walk.size * walk.from;
        to += at % walk.size * walk.to;
        at /= walk.size;
    }
    (from, to)
}

fn permute<T: Element>(cx: &CpuCx<'_>, perm: &[usize]) {
    let (x, target) = (input::<T>(cx, 0), Target::<T>::of(cx));
    let (mut walks, count) = merge(cx.shape(0), perm);
    let walks = &mut walks[..count];
    if x.is_empty() {
        return;
    }
    match walks {
        [] | [Walk { from: 1, .. }] => copy_all(cx, x, target),
        [outer @ .., run, Walk { from: 1, size, .. }] => copy_runs(cx, x, target, outer, *run, *size),
        _ => {
            // One dim steps through the input element by element; it goes last among the others.
            let inner = walks.iter().position(|walk| walk.from == 1).unwrap_or(0);
            walks[inner..count - 1].rotate_left(1);
            let (outer, pair) = walks.split_at(count - 2);
            transpose_blocks(cx, x, target, outer, pair[0], pair[1]);
        }
    }
}

fn copy_all<T: Element>(cx: &CpuCx<'_>, x: &[T], target: Target<T>) {
    cx.team.chunks(x.len(), BYTES_PER_TASK / size_of::<T>(), |range, _| {
        // SAFETY: tasks own disjoint ranges, and the output has as many elements as the input.
        unsafe { target.slice(range.start, range.len()) }.copy_from_slice(&x[range]);
    });
}

/// The innermost dim stays: rows of `width` move, `run` of them at a time.
fn copy_runs<T: Element>(cx: &CpuCx<'_>, x: &[T], target: Target<T>, outer: &[Walk], run: Walk, width: usize) {
    let runs: usize = outer.iter().map(|walk| walk.size).product();
    let run_bytes = run.size * width * size_of::<T>();
    cx.team.chunks(runs, (BYTES_PER_TASK / run_bytes).max(1), |range, _| {
        for (from, to) in range.map(|at| offsets(outer, at)) {
            for row in 0..run.size {
                let source = &x[from + row * run.from..][..width];
                // SAFETY: the walks enumerate each output row once, and tasks own disjoint runs of them.
                unsafe { target.slice(to + row * run.to, width) }.copy_from_slice(source);
            }
        }
    });
}

/// Rows and columns of a block: one cache line of f32 each way.
const BLOCK: usize = 16;

/// A batch of transposes: `down` steps by one in the input, `across` by one in the output.
fn transpose_blocks<T: Element>(cx: &CpuCx<'_>, x: &[T], target: Target<T>, outer: &[Walk], down: Walk, across: Walk) {
    let strips = down.size.div_ceil(BLOCK);
    let batch: usize = outer.iter().map(|walk| walk.size).product();
    let strip_bytes = BLOCK.min(down.size) * across.size * size_of::<T>();
    cx.team.chunks(batch * strips, (BYTES_PER_TASK / strip_bytes).max(1), |range, _| {
        for at in range {
            let (from, to) = offsets(outer, at / strips);
            let top = at % strips * BLOCK;
            let rows = BLOCK.min(down.size - top);
            for left in (0..across.size).step_by(BLOCK) {
                let columns = BLOCK.min(across.size - left);
                let source = &x[from + top + left * across.from..];
                // SAFETY: the block is inside the output, and tasks own disjoint strips.
                unsafe {
                    let corner = target.get().add(to + top * down.to + left);
                    transpose_block(source, across.from, corner, down.to, rows, columns);
                }
            }
        }
    });
}

/// `target[i·target_stride + j] = source[j·source_stride + i]` for `i < rows ≤ BLOCK`, `j < columns ≤ BLOCK`.
///
/// # Safety
/// Every element written belongs to the caller.
unsafe fn transpose_block<T: Element>(
    source: &[T],
    source_stride: usize,
    target: *mut T,
    target_stride: usize,
    rows: usize,
    columns: usize,
) {
    let mut block = [[T::of(0); BLOCK]; BLOCK];
    for (column, line) in block[..columns].iter_mut().enumerate() {
        line[..rows].copy_from_slice(&source[column * source_stride..][..rows]);
    }
    for row in 0..rows {
        let mut line = [T::of(0); BLOCK];
        line.iter_mut().zip(&block).for_each(|(out, from)| *out = from[row]);
        // SAFETY: by the contract above.
        unsafe { std::ptr::copy_nonoverlapping(line.as_ptr(), target.add(row * target_stride), columns) };
    }
}

impl Cases for Transpose {
    fn cases() -> Vec<Case> {
        let case = |arg: Arg, perm: &[usize]| Case::new(Transpose { perm: perm.into() }, [arg]);
        vec![
            case(Arg::real([]), &[]),
            case(Arg::real([5]), &[0]),
            case(Arg::real([3, 5]), &[1, 0]),
            case(Arg::real([1, 5]), &[1, 0]),
            case(Arg::real([2, 3, 4]), &[0, 2, 1]),
            case(Arg::real([2, 3, 4]), &[2, 0, 1]),
            case(Arg::real([2, 3, 4]), &[2, 1, 0]),
            case(Arg::real([2, 3, 2, 5]), &[0, 2, 1, 3]),
            case(Arg::real([2, 3, 2, 5]), &[3, 1, 0, 2]),
            case(Arg::real([2, 1, 3, 1, 4]), &[4, 3, 0, 1, 2]),
            case(Arg::index([3, 4], -5, 9), &[1, 0]),
            case(Arg::boolean([3, 4, 2]), &[0, 2, 1]),
            case(Arg::byte([5, 37], 0, 256), &[1, 0]),
            // More than one task, in blocks and in rows.
            case(Arg::real([3, 130, 131]).constant(), &[0, 2, 1]),
            case(Arg::real([4, 60, 3, 40]).constant(), &[0, 2, 1, 3]),
            case(Arg::real([3, 50, 6, 37]).constant(), &[1, 3, 0, 2]),
        ]
    }
}

pub const KINDS: &[OpKind] = &[OpKind::of::<Transpose>().with_cuda::<Transpose>()];

kolo_graph::methods! {
    /// Order of dims.
    TransposeMethods {
        /// Dim `i` of the result is dim `perm[i]` of this tensor.
        fn permute(self, perm: &[usize]) -> Tensor<'b> {
            let same = perm.len() == self.rank() && perm.iter().enumerate().all(|(at, dim)| at == *dim);
            if same { self } else { self.then(Transpose { perm: perm.into() }, &[]) }
        }
        /// Swaps two dims.
        fn transpose(self, a: usize, b: usize) -> Tensor<'b> {
            let swap = |dim: usize| if dim == a { b } else if dim == b { a } else { dim };
            let perm: Vec<usize> = (0..self.rank().max(a + 1).max(b + 1)).map(swap).collect();
            self.permute(&perm)
        }
    }
}
