//! Sums and means over dims. The order of additions depends on the shape alone: trees over short runs.

use crate::cast::CastMethods;
use crate::elementwise::ElementwiseMethods;
use crate::pairwise::{self, COLUMNS, Pairwise};
use crate::sums::{self, Values};
use crate::symbol::record;
use crate::tiles::{Address, DIMS_MAX};
use kolo_graph::cpu::TileKernel;
use kolo_graph::cuda::{ChannelsLast, Cuda, CudaCalls, CudaCx, CudaPlace};
use kolo_graph::index::Index;
use kolo_graph::op::{OpKind, advance};
use kolo_graph::split::{self, Placement, Split};
use kolo_graph::{
    Arg, Case, Cases, Cpu, CpuCx, Dense, Formula, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op,
};
use std::sync::Arc;

op! {
    /// Sum over `dims`, which become size one (`keep`) or vanish. The sum of halves is f32.
    pub struct Sum = "sum" { dims: Vec<usize>, keep: bool }
}

/// Elements of work per task.
const ELEMENTS_PER_TASK: usize = 16 * 1024;
/// Runs that are added straight where a channel's elements lie in many short ones.
const RUNS: usize = 16;

impl Op for Sum {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let rank = inputs.first()?.rank();
        let axes: Vec<String> = (0..rank).map(|dim| format!("d{dim}")).collect();
        let kept = axes.iter().enumerate().filter_map(|(dim, axis)| match self.dims.contains(&dim) {
            false => Some(axis.clone()),
            true => self.keep.then(|| "_".to_string()),
        });
        Some(Index { inputs: vec![axes.clone()], outputs: vec![kept.collect()], ..Index::default() })
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        if let Some(dim) = self.dims.iter().find(|dim| **dim >= input.rank()) {
            return Err(format!("there is no dim {dim} in {input}"));
        }
        if !input.dtype.is_float() {
            return Err(format!("sums floats, not {}; cast it", input.dtype.name()));
        }
        let index = self.index(inputs).ok_or("no index")?;
        Ok(vec![Type::f32(index.output_shapes(inputs)?[0].clone())])
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let shape = cx.input(0).shape();
        let kept: Vec<usize> =
            shape.iter().enumerate().map(|(dim, size)| if self.dims.contains(&dim) { 1 } else { *size }).collect();
        vec![Some(cx.grad().cast(cx.input(0).dtype()).reshape_to(kept).expand(shape))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let input = inputs[0];
        let mut out = Dense::zeros(outputs[0].shape.clone());
        let kept: Vec<usize> =
            input.shape.iter().enumerate().map(|(dim, s)| if self.dims.contains(&dim) { 1 } else { *s }).collect();
        let strides = kolo_graph::types::strides(&kept);
        let mut at = vec![0; input.shape.len()];
        for value in &input.data {
            let offset: usize = (0..at.len()).filter(|dim| kept[*dim] != 1).map(|dim| at[dim] * strides[dim]).sum();
            out.data[offset] += value;
            advance(&mut at, &input.shape);
        }
        vec![out]
    }
}

impl Cpu for Sum {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (shape, x, out) = (cx.shape(0), cx.f32(0), cx.out_f32(0));
        match collapse(shape, &self.dims) {
            Shape::Copy => out.copy_from_slice(x),
            Shape::Rows { rows, inner } => sum_rows(cx, x, out, rows, inner),
            Shape::Columns { outer, rows, inner } => sum_columns(cx, x, out, outer, rows, inner),
            Shape::Middle { outer, rows, inner } => sum_middle(cx, x, out, outer, rows, inner),
            Shape::Odd => sum_odd(shape, &self.dims, x, out, &mut cx.scratch()[..out.len()]),
        }
    }
    fn scratch_bytes(&self, inputs: &[Type], outputs: &[Type], _: usize) -> usize {
        match collapse(&inputs[0].shape, &self.dims) {
            Shape::Odd => outputs[0].elements() * size_of::<f32>(),
            _ => 0,
        }
    }
}

impl Cuda for Sum {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        if cx.channels_last {
            // The same sum of `[n, h, w, c]`.
            let mut moved: Vec<usize> = self.dims.iter().map(|dim| [0, 3, 1, 2][*dim]).collect();
            moved.sort_unstable();
            let inputs = [kolo_graph::cuda::last(&cx.inputs[0])];
            return Sum { dims: moved, keep: self.keep }.calls(&CudaCx::new(&inputs, cx.outputs, cx.target));
        }
        let (mut calls, shape) = (CudaCalls::new(), &cx.inputs[0].shape);
        let from = Values::new(CudaPlace::input(0), cx.inputs[0].dtype);
        let to = Values::new(CudaPlace::output(0), cx.outputs[0].dtype);
        match collapse(shape, &self.dims) {
            Shape::Copy if from.dtype == to.dtype => calls.copy(from.place, to.place, cx.outputs[0].bytes()),
            Shape::Copy => sums::rows(&mut calls, from, [cx.inputs[0].elements(), 1], to),
            Shape::Rows { rows, inner } => sums::rows(&mut calls, from, [rows, inner], to),
            Shape::Columns { outer, rows, inner } => sums::columns(&mut calls, from, [outer, rows, inner], to),
            Shape::Middle { outer, rows, inner } => sums::middle(&mut calls, from, [outer, rows, inner], to),
            Shape::Odd => {
                let strides = kolo_graph::types::strides(shape);
                let side = |summed: bool| -> Vec<[usize; 2]> {
                    let own = (0..shape.len()).filter(|dim| self.dims.contains(dim) == summed);
                    own.map(|dim| [shape[dim], strides[dim]]).collect()
                };
                sums::any(&mut calls, from, &side(false), &side(true), to);
            }
        }
        calls
    }
    /// Over whole planes: what is left has one order.
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        let planes = cx.inputs[0].rank() == 4 && [2, 3].iter().all(|dim| self.dims.contains(dim));
        planes.then(|| ChannelsLast { inputs: vec![0], ..ChannelsLast::default() })
    }
}

/// The reduction after merging neighbouring dims.
enum Shape {
    Copy,
    /// `rows × inner`, summed over `inner`.
    Rows {
        rows: usize,
        inner: usize,
    },
    /// `outer × rows × inner`, summed over `rows`.
    Columns {
        outer: usize,
        rows: usize,
        inner: usize,
    },
    /// `outer × rows × inner`, summed over `outer` and `inner`: one number per channel.
    Middle {
        outer: usize,
        rows: usize,
        inner: usize,
    },
    Odd,
}

fn collapse(shape: &[usize], dims: &[usize]) -> Shape {
    let mut runs = [(false, 0); DIMS_MAX];
    let mut count = 0;
    // Dims of size one count too: a piece of a split tensor must add in the order of the whole.
    for (dim, size) in shape.iter().enumerate() {
        let summed = dims.contains(&dim);
        if count > 0 && runs[count - 1].0 == summed {
            runs[count - 1].1 *= size;
        } else {
            runs[count] = (summed, *size);
            count += 1;
        }
    }
    match runs[..count] {
        [] | [(false, _)] => Shape::Copy,
        [(true, inner)] => Shape::Rows { rows: 1, inner },
        [(false, rows), (true, inner)] => Shape::Rows { rows, inner },
        [(true, rows), (false, inner)] => Shape::Columns { outer: 1, rows, inner },
        [(false, outer), (true, rows), (false, inner)] => Shape::Columns { outer, rows, inner },
        [(true, outer), (false, rows), (true, inner)] => Shape::Middle { outer, rows, inner },
        _ => Shape::Odd,
    }
}

fn sum_rows(cx: &CpuCx<'_>, x: &[f32], out: &mut [f32], rows: usize, inner: usize) {
    let address = Address(out.as_mut_ptr());
    cx.team.chunks(rows, (ELEMENTS_PER_TASK / inner.max(1)).max(1), |range, _| {
        // SAFETY: tasks own disjoint rows.
        let out = unsafe { address.slice(range.start, range.len()) };
        for (out, row) in out.iter_mut().zip(range) {
            *out = pairwise::sum(&x[row * inner..(row + 1) * inner]);
        }
    });
}

fn sum_columns(cx: &CpuCx<'_>, x: &[f32], out: &mut [f32], outer: usize, rows: usize, inner: usize) {
    let strips = inner.div_ceil(COLUMNS);
    let address = Address(out.as_mut_ptr());
    let task = |at: usize| {
        let (block, strip) = (at / strips, at % strips);
        let start = strip * COLUMNS;
        let width = COLUMNS.min(inner - start);
        // SAFETY: tasks own disjoint strips.
        let out = unsafe { address.slice(block * inner + start, width) };
        pairwise::sum_rows(out, &x[block * rows * inner + start..(block + 1) * rows * inner], rows, inner);
    };
    if x.len() < ELEMENTS_PER_TASK {
        return (0..outer * strips).for_each(task);
    }
    cx.team.run(outer * strips, |at, _| task(at));
}

fn sum_middle(cx: &CpuCx<'_>, x: &[f32], out: &mut [f32], outer: usize, rows: usize, inner: usize) {
    let address = Address(out.as_mut_ptr());
    cx.team.chunks(rows, (ELEMENTS_PER_TASK / (outer * inner).max(1)).max(1), |range, _| {
        // SAFETY: tasks own disjoint rows.
        let out = unsafe { address.slice(range.start, range.len()) };
        for (out, row) in out.iter_mut().zip(range) {
            let part = |block: usize| pairwise::sum(&x[(block * rows + row) * inner..(block * rows + row + 1) * inner]);
            let parts = |first: usize| (first..(first + RUNS).min(outer)).map(part).fold(0.0, |sum, part| sum + part);
            *out = Pairwise::of((0..outer).step_by(RUNS).map(parts));
        }
    });
}

/// Any other pattern, in row-major order of the input. What rounding takes off each sum is kept in `lost` and added at
/// the end.
fn sum_odd(shape: &[usize], dims: &[usize], x: &[f32], out: &mut [f32], lost: &mut [f32]) {
    let mut strides = [0; DIMS_MAX];
    let mut stride = 1;
    for dim in (0..shape.len()).rev().filter(|dim| !dims.contains(dim)) {
        strides[dim] = stride;
        stride *= shape[dim];
    }
    let mut at = [0; DIMS_MAX];
    out.fill(0.0);
    lost.fill(0.0);
    for value in x {
        let offset: usize = (0..shape.len()).map(|dim| at[dim] * strides[dim]).sum();
        let (before, after) = (out[offset], out[offset] + value);
        let (large, small) = if before.abs() >= value.abs() { (before, *value) } else { (*value, before) };
        lost[offset] += (large - after) + small;
        out[offset] = after;
        advance(&mut at[..shape.len()], shape);
    }
    for (out, lost) in out.iter_mut().zip(lost) {
        // A sum that is not finite has lost nothing that counts.
        *out = if out.is_finite() { *out + *lost } else { *out };
    }
}

impl Cases for Sum {
    fn cases() -> Vec<Case> {
        let case =
            |shape: &[usize], dims: &[usize], keep| Case::new(Sum { dims: dims.into(), keep }, [Arg::real(shape)]);
        vec![
            case(&[5], &[0], false),
            case(&[3, 37], &[1], false),
            case(&[37, 3], &[0], true),
            case(&[2, 3, 4], &[1], false),
            case(&[2, 3, 4], &[0, 2], true),
            case(&[2, 3, 4], &[0, 1, 2], false),
            case(&[2, 3], &[], false),
            case(&[1, 5], &[0], false),
            case(&[2, 2, 3, 2], &[0, 2], false),
            // Long enough for several tasks; too long for finite differences.
            Case::new(Sum { dims: vec![0], keep: false }, [Arg::real([70, 300]).constant()]),
        ]
    }
}

op! {
    /// Repeats along dims of size one until the shape is `shape`.
    pub struct Expand = "expand" { shape: Vec<usize> }
}

impl Op for Expand {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Elementwise
    }
    fn splits(&self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
        split::elementwise(inputs, outputs)
    }
    fn part(&self, split: &Split, units: usize) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Expand { shape: split.part_shape(split.outputs[0], &self.shape, units).to_vec() }))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        match kolo_graph::types::broadcast(&input.shape, &self.shape) {
            Some(shape) if shape == self.shape && input.dtype.is_float() => Ok(vec![Type::new(input.dtype, shape)]),
            _ => Err(format!("{input} does not stretch to {:?}", self.shape)),
        }
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        vec![Some(cx.grad().sum_to(&cx.input(0)))]
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        vec![Dense::from_fn(self.shape.clone(), |at| inputs[0].get(at))]
    }
    fn formula(&self) -> Option<Formula> {
        Some(record(["x"], [], |x, _| x))
    }
}

impl Cpu for Expand {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let copy = self.tile_kernel().expect("an elementwise op");
        crate::tiles::run_one(copy, cx);
    }
    fn tile_kernel(&self) -> Option<TileKernel> {
        fn copy(inputs: &[&[f32]], out: &mut [f32], _: f32) {
            out.copy_from_slice(inputs[0]);
        }
        Some(TileKernel { function: copy, constant: 0.0 })
    }
}

impl Cuda for Expand {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        crate::cuda_map::formula_calls(self, cx)
    }
}

impl Cases for Expand {
    fn cases() -> Vec<Case> {
        let case = |from: &[usize], to: &[usize]| Case::new(Expand { shape: to.into() }, [Arg::real(from)]);
        vec![
            case(&[], &[3]),
            case(&[3], &[2, 3]),
            case(&[2, 1], &[2, 700]),
            case(&[2, 1, 3], &[2, 4, 3]),
            case(&[3], &[3]),
        ]
    }
}

op! {
    /// Another shape over the same elements.
    pub struct Reshape = "reshape" { shape: Vec<usize> }
}

/// A shape as digits of a number that counts its elements, the outermost first.
struct Digits<'a>(&'a [usize]);

impl<'a> Digits<'a> {
    /// Of each dim that is not one: the number of places before it, and including it.
    fn ends(&self) -> impl Iterator<Item = (usize, usize, usize)> + use<'a> {
        let steps = self.0.iter().enumerate().scan(1, |before, (dim, size)| {
            let start = *before;
            *before *= size;
            Some((dim, start, *before))
        });
        steps.filter(|(_, start, end)| start < end)
    }

    /// Where the dim ends that has the digit after `outer` places.
    fn end_after(&self, outer: usize) -> Option<usize> {
        self.ends().map(|(_, _, end)| end).find(|end| *end > outer)
    }

    fn next_common_end(&self, other: &Self, outer: usize) -> Option<usize> {
        let mut ends = self.ends().map(|(_, _, end)| end).filter(|end| *end > outer);
        ends.find(|end| other.ends().any(|(_, _, other)| other == *end))
    }

    /// How the shape lies if the digit after `outer` places is split.
    fn placement(&self, outer: usize) -> Placement {
        let (dim, start, _) = self.ends().find(|(_, _, end)| *end > outer).expect("a digit of this shape");
        Placement::blocks(dim, outer / start)
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

impl Op for Reshape {
    fn operands(&self) -> Operands {
        Operands::new([Operand::any("x")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    /// Both shapes count the elements in one order, each with digits of its own; digits that both share can be split.
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let (from, to) = (&inputs[0].shape, &self.shape);
        if inputs[0].elements() == 0 {
            return Vec::new();
        }
        let (mut splits, mut outer) = (Vec::new(), 1);
        let (digits_from, digits_to) = (Digits(from), Digits(to));
        while let (Some(end_from), Some(end_to)) = (digits_from.end_after(outer), digits_to.end_after(outer)) {
            let common = greatest_common_divisor(end_from, end_to);
            if common > outer {
                let name = format!("f{}", splits.len());
                let placements = [digits_from.placement(outer), digits_to.placement(outer)];
                splits.push(Split::new(name, common / outer, [placements[0]], [placements[1]]));
                outer = common;
            } else {
                // No digit in common here: on to where both end a dim at once.
                match digits_from.next_common_end(&digits_to, outer) {
                    Some(end) => outer = end,
                    None => break,
                }
            }
        }
        splits
    }
    fn part(&self, split: &Split, units: usize) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Reshape { shape: split.part_shape(split.outputs[0], &self.shape, units).to_vec() }))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        let output = Type::new(input.dtype, self.shape.clone());
        if output.elements() != input.elements() {
            return Err(format!("{input} has {} elements, {output} has {}", input.elements(), output.elements()));
        }
        Ok(vec![output])
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        vec![Some(cx.grad().reshape_to(cx.input(0).shape()))]
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        vec![Dense::new(self.shape.clone(), inputs[0].data.clone())]
    }
    fn view(&self) -> bool {
        true
    }
}

impl Cases for Reshape {
    fn cases() -> Vec<Case> {
        let case = |from: &[usize], to: &[usize]| Case::new(Reshape { shape: to.into() }, [Arg::real(from)]);
        vec![
            case(&[6], &[2, 3]),
            case(&[2, 3, 4], &[6, 4]),
            case(&[1], &[]),
            // Heads out of a packed width, dims of size one, digits in common and none.
            case(&[2, 3, 12], &[2, 3, 3, 2, 2]),
            case(&[4, 1, 6], &[8, 3, 1]),
            case(&[4, 3, 5], &[6, 2, 5]),
            case(&[2, 3, 5], &[3, 2, 5]),
        ]
    }
}

pub const KINDS: &[OpKind] = &[
    OpKind::of::<Sum>().with_cuda::<Sum>(),
    OpKind::of::<Expand>().with_cuda::<Expand>(),
    OpKind::without_kernels::<Reshape>(),
];

kolo_graph::methods! {
    /// Sums, means and shapes.
    ReduceMethods {
        /// Sum over `dims`, which vanish.
        fn sum(self, dims: &[usize]) -> Tensor<'b> { self.then(Sum { dims: dims.into(), keep: false }, &[]) }
        /// Sum over `dims`, which become size one.
        fn sum_keep(self, dims: &[usize]) -> Tensor<'b> { self.then(Sum { dims: dims.into(), keep: true }, &[]) }
        fn sum_all(self) -> Tensor<'b> {
            let dims: Vec<usize> = (0..self.rank()).collect();
            self.sum(&dims)
        }
        fn mean(self, dims: &[usize]) -> Tensor<'b> {
            let count: usize = dims.iter().map(|dim| self.dim(*dim)).product();
            self.sum(dims).scale(1.0 / count as f32)
        }
        fn mean_keep(self, dims: &[usize]) -> Tensor<'b> {
            let count: usize = dims.iter().map(|dim| self.dim(*dim)).product();
            self.sum_keep(dims).scale(1.0 / count as f32)
        }
        fn mean_all(self) -> Tensor<'b> {
            let dims: Vec<usize> = (0..self.rank()).collect();
            self.mean(&dims)
        }
        /// The gradient of a broadcast: sums over whatever was stretched to get here from `target`'s shape.
        fn sum_to(self, target: &Tensor<'b>) -> Tensor<'b> {
            let (from, to) = (self.shape(), target.shape());
            if from == to {
                return self;
            }
            let skip = from.len().saturating_sub(to.len());
            let dims: Vec<usize> =
                (0..from.len()).filter(|dim| *dim < skip || (to[*dim - skip] == 1 && from[*dim] != 1)).collect();
            self.sum_keep(&dims).cast(self.dtype()).reshape_to(to)
        }
        fn reshape_to(self, shape: impl Into<Vec<usize>>) -> Tensor<'b> {
            let shape = shape.into();
            if self.shape() == shape { self } else { self.then(Reshape { shape }, &[]) }
        }
        fn expand(self, shape: impl Into<Vec<usize>>) -> Tensor<'b> {
            let shape = shape.into();
            if self.shape() == shape { self } else { self.then(Expand { shape }, &[]) }
        }
    }
}
