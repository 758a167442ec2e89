//! Sums by index: the opposite of picking.
//!
//! Every sum adds in the order of the source's positions, whatever the threads do: tasks own places of the output, never
//! parts of the source. An index outside adds nowhere, and its source gets the gradient zero.

use crate::by_id;
use crate::gather::{check_index, define, take};
use crate::movement::{ELEMENTS_PER_TASK, around, axes, axes_but, by_width, check_f32, check_ids, within, within_f64};
use crate::moves;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Op, Operand, Operands, Tensor, Type, op};
use std::ops::Range;

op! {
    /// `base`, with `source[…, i, …]` added at `[…, index[…, i, …], …]` along `dim`, in order of `i`. Inputs `base`,
    /// `index` (i32), `source`. An index outside is ignored.
    pub struct ScatterAdd = "scatter_add" { dim: usize }
}

impl Op for ScatterAdd {
    fn operands(&self) -> Operands {
        Operands::new([Operand::f32("base"), Operand::i32("index"), Operand::f32("source")], &["y"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let rank = inputs.first()?.rank();
        let (to, from) = (axes_but(rank, self.dim, "to"), axes_but(rank, self.dim, "from"));
        Some(Index {
            inputs: vec![to.clone(), from.clone(), from],
            outputs: vec![to],
            whole: vec!["to".into()],
            added: vec![0],
            ..Index::default()
        })
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [base, index, source] = inputs else { return Err("takes three inputs: base, index and source".into()) };
        check_f32(base)?;
        check_f32(source)?;
        check_index(base, index, self.dim)?;
        if index.shape != source.shape {
            return Err(format!("the index is {index}, but the source {source}; they need one shape"));
        }
        Ok(vec![base.clone()])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        inputs[2].elements() as u64
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let source = || cx.input(1).then(ScatterAddGrad { dim: self.dim }, &[cx.grad()]);
        vec![cx.needs(0).then(|| cx.grad()), None, cx.needs(2).then(source)]
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        let [base, index, source] = inputs else { unreachable!("infer checks the arity") };
        let mut out = (*base).clone();
        let strides = kolo_graph::types::strides(&out.shape);
        Dense::from_fn(source.shape.clone(), |at| {
            if let Some(place) = within_f64(index.get(at), out.shape[self.dim]) {
                let coordinate = |dim: usize| if dim == self.dim { place } else { at[dim] };
                let offset: usize = (0..at.len()).map(|dim| coordinate(dim) * strides[dim]).sum();
                out.data[offset] += source.get(at);
            }
            0.0
        });
        vec![out]
    }
}

impl Cpu for ScatterAdd {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (size, count) = (cx.shape(0)[self.dim], cx.shape(1)[self.dim]);
        let (outer, inner) = around(cx.shape(0), self.dim);
        let (base, index, source) = (cx.f32(0), cx.i32(1), cx.f32(2));
        let target = Address(cx.out_f32(0).as_mut_ptr());
        // A task owns some columns of one plane, from the first source row to the last.
        let work = size + count;
        let width = (ELEMENTS_PER_TASK / work.max(1)).max(COLUMNS).min(inner.max(1));
        let strips = inner.div_ceil(width);
        cx.team.chunks(outer * strips, (ELEMENTS_PER_TASK / (work * width).max(1)).max(1), |range, _| {
            for at in range {
                let (plane, start) = (at / strips, at % strips * width);
                let columns = start..(start + width).min(inner);
                // SAFETY: tasks own disjoint columns, all inside the plane.
                let row = |at: usize| unsafe { target.slice((plane * size + at) * inner + start, columns.len()) };
                for at in 0..size {
                    let from = (plane * size + at) * inner;
                    row(at).copy_from_slice(&base[from + columns.start..from + columns.end]);
                }
                for at in 0..count {
                    let from = (plane * count + at) * inner;
                    let places = &index[from + columns.start..from + columns.end];
                    let values = &source[from + columns.start..from + columns.end];
                    for (column, (place, value)) in places.iter().zip(values).enumerate() {
                        if let Some(place) = within(*place, size) {
                            row(place)[column] += value;
                        }
                    }
                }
            }
        });
    }
}

impl Cuda for ScatterAdd {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        by_id::column_sums(cx, (Some(0), 1, 2), self.dim)
    }
}

impl Cases for ScatterAdd {
    fn cases() -> Vec<Case> {
        let case = |base: &[usize], source: &[usize], low, high, dim| {
            Case::new(ScatterAdd { dim }, [Arg::real(base), Arg::index(source, low, high), Arg::real(source)])
        };
        let constant = |mut case: Case| {
            case.args.iter_mut().for_each(|arg| arg.differentiate = false);
            case
        };
        vec![
            case(&[5], &[7], 0, 5, 0),
            case(&[3, 4], &[3, 1], 0, 4, 1),
            case(&[3, 4], &[6, 4], -1, 4, 0),
            case(&[2, 3, 4], &[2, 5, 4], -1, 4, 1),
            constant(case(&[70, 60, 5], &[70, 90, 5], 0, 60, 1)),
            constant(case(&[30, 900], &[50, 900], 0, 30, 0)),
        ]
    }
}

op! {
    /// Gradient of the source of [`ScatterAdd`], from its `index` and the output's gradient: what stands where each
    /// element was added; zero for one that was ignored.
    pub struct ScatterAddGrad = "scatter_add_grad" { dim: usize }
}

impl Op for ScatterAddGrad {
    fn operands(&self) -> Operands {
        Operands::new([Operand::i32("index"), Operand::f32("g")], &["dsource"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let rank = inputs.first()?.rank();
        let (from, to) = (axes_but(rank, self.dim, "from"), axes_but(rank, self.dim, "to"));
        Some(Index {
            inputs: vec![from.clone(), to],
            outputs: vec![from],
            whole: vec!["to".into()],
            ..Index::default()
        })
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [index, grad] = inputs else { return Err("takes two inputs: index and gradient".into()) };
        check_f32(grad)?;
        check_index(grad, index, self.dim)?;
        Ok(vec![Type::f32(index.shape.clone())])
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let zeros = |like: Tensor<'b>| like.builder().full(0.0, like.ty());
        vec![None, Some(zeros(cx.input(1)).scatter_add(self.dim, cx.input(0), cx.grad()))]
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        vec![define(inputs[1], inputs[0], self.dim, 0.0)]
    }
}

impl Cpu for ScatterAddGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        by_width!(cx.inputs[1].ty.dtype, take(cx, 1, 0, self.dim, 0));
    }
}

impl Cuda for ScatterAddGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        moves::taken(cx, (1, 0), self.dim, 0).into()
    }
}

impl Cases for ScatterAddGrad {
    fn cases() -> Vec<Case> {
        let case = |index: Arg, grad: Arg, dim| Case::new(ScatterAddGrad { dim }, [index, grad]);
        vec![
            case(Arg::index([7], -1, 6), Arg::real([5]), 0),
            case(Arg::index([2, 5, 4], -1, 4), Arg::real([2, 3, 4]), 1),
            case(Arg::index([3, 1], 0, 4), Arg::real([3, 4]), 1),
        ]
    }
}

op! {
    /// Rows of `values` (`[n, …]`) added up by segment, in order of `n`: `[segments, …]`. Inputs `values` and the
    /// segment of each row (i32, `[n]`). A row whose segment is outside is ignored.
    pub struct SegmentSum = "segment_sum" { segments: usize }
}

impl Op for SegmentSum {
    fn operands(&self) -> Operands {
        Operands::new([Operand::f32("values"), Operand::i32("segments")], &["sums"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let rank = inputs.first()?.rank();
        Some(Index {
            inputs: vec![axes(rank), axes(1)],
            outputs: vec![axes_but(rank, 0, "segment")],
            whole: vec!["segment".into()],
            ..Index::default()
        })
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [values, ids] = inputs else { return Err("takes two inputs: values and segment ids".into()) };
        check_f32(values)?;
        check_ids(ids)?;
        if values.rank() == 0 || ids.shape != values.shape[..1] {
            return Err(format!("{values} needs one segment id for each row, but the ids are {ids}"));
        }
        let mut shape = values.shape.clone();
        shape[0] = self.segments;
        Ok(vec![Type::f32(shape)])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        inputs[0].elements() as u64
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        vec![Some(cx.input(1).then(SegmentSumGrad {}, &[cx.grad()])), None]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        vec![define_row_sums(inputs[0], inputs[1], &outputs[0])]
    }
}

impl Cpu for SegmentSum {
    fn run(&self, cx: &mut CpuCx<'_>) {
        add_rows_by_id(cx, cx.f32(0), cx.i32(1), (0, self.segments));
    }
}

/// Rows of `values` added to the rows of the output that `ids` name.
pub(crate) fn define_row_sums(values: &Dense, ids: &Dense, output: &Type) -> Dense {
    let mut out = Dense::zeros(output.shape.clone());
    let width: usize = output.shape[1..].iter().product();
    for (row, id) in ids.data.iter().enumerate() {
        let Some(id) = within_f64(*id, output.shape[0]) else { continue };
        for column in 0..width {
            out.data[id * width + column] += values.data[row * width + column];
        }
    }
    out
}

/// Columns one task adds, and the least number of tasks worth making of large work.
const COLUMNS: usize = 64;
const TASKS: usize = 4;

/// The kernel: rows of `values` added, in order, to the `count` rows of the output that `ids` name, counted from `first`.
pub(crate) fn add_rows_by_id(cx: &CpuCx<'_>, values: &[f32], ids: &[i32], (first, count): (usize, usize)) {
    let out = cx.out_f32(0);
    let width = out.len() / count.max(1);
    let target = Address(out.as_mut_ptr());
    cx.team.chunks(out.len(), ELEMENTS_PER_TASK, |range, _| {
        // SAFETY: tasks own disjoint ranges.
        unsafe { target.slice(range.start, range.len()) }.fill(0.0);
    });
    if values.len() < ELEMENTS_PER_TASK {
        return add_strip(target, values, (ids, first), width, 0..width, 0..count);
    }
    // Columns are the even way to cut, for some ids are much more frequent than others. Narrow rows are cut by id too.
    let strips = width.div_ceil(COLUMNS);
    let parts = TASKS.div_ceil(strips);
    cx.team.run(strips * parts, |at, _| {
        let (strip, part) = (at / parts, at % parts);
        let columns = strip * COLUMNS..((strip + 1) * COLUMNS).min(width);
        add_strip(target, values, (ids, first), width, columns, part * count / parts..(part + 1) * count / parts);
    });
}

vectorized! {
    /// Adds the `columns` of every row of `values` whose id is in `rows`. The task owns those places of the target.
    fn add_strip(
        target: Address,
        values: &[f32],
        by: (&[i32], usize),
        width: usize,
        columns: Range<usize>,
        rows: Range<usize>,
    ) {
        let (ids, first) = by;
        for (at, id) in ids.iter().enumerate() {
            let Some(id) = within(id.wrapping_sub(first as i32), rows.end).filter(|id| *id >= rows.start) else { continue };
            let value = &values[at * width + columns.start..at * width + columns.end];
            // SAFETY: the row is inside the output, and tasks own disjoint columns and rows.
            let out = unsafe { target.slice(id * width + columns.start, columns.len()) };
            for (out, value) in out.iter_mut().zip(value) {
                *out += *value;
            }
        }
    }
}

impl Cuda for SegmentSum {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        by_id::row_sums(cx, (0, 1), (0, self.segments))
    }
}

impl Cases for SegmentSum {
    fn cases() -> Vec<Case> {
        let case = |values: Arg, low, high, segments| {
            let rows = values.ty.shape[0];
            Case::new(SegmentSum { segments }, [values, Arg::index([rows], low, high)])
        };
        vec![
            case(Arg::real([7]), 0, 3, 3),
            case(Arg::real([7, 3]), -1, 5, 4),
            case(Arg::real([1, 5]), 0, 2, 2),
            case(Arg::real([9, 2, 3]), 0, 1, 1),
            case(Arg::real([500, 37]).constant(), -1, 41, 40),
            case(Arg::real([300, 150]).constant(), 0, 90, 90),
        ]
    }
}

op! {
    /// Gradient of the values of [`SegmentSum`], from the ids and the output's gradient: each row gets its segment's
    /// gradient; zero for one that was ignored.
    pub struct SegmentSumGrad = "segment_sum_grad" {}
}

impl Op for SegmentSumGrad {
    fn operands(&self) -> Operands {
        Operands::new([Operand::i32("segments"), Operand::f32("g")], &["dvalues"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let rank = inputs.get(1)?.rank();
        Some(Index {
            inputs: vec![axes(1), axes_but(rank, 0, "segment")],
            outputs: vec![axes(rank)],
            whole: vec!["segment".into()],
            ..Index::default()
        })
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [ids, grad] = inputs else { return Err("takes two inputs: segment ids and gradient".into()) };
        check_ids(ids)?;
        check_f32(grad)?;
        if ids.rank() != 1 || grad.rank() == 0 {
            return Err(format!("the ids {ids} must have one dim, and the gradient {grad} at least one"));
        }
        Ok(vec![Type::f32([&ids.shape[..], &grad.shape[1..]].concat())])
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        vec![None, Some(cx.grad().segment_sum(cx.input(0), cx.input(1).dim(0)))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        vec![crate::embedding::define_rows(inputs[1], inputs[0], &outputs[0], 0.0)]
    }
}

impl Cpu for SegmentSumGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        crate::embedding::pick_rows(cx, 1, 0, crate::embedding::Rows::or(0.0));
    }
}

impl Cuda for SegmentSumGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        moves::taken_rows(cx, (1, 0), (0, 0), 0).into()
    }
}

impl Cases for SegmentSumGrad {
    fn cases() -> Vec<Case> {
        let case = |ids: Arg, grad: Arg| Case::new(SegmentSumGrad {}, [ids, grad]);
        vec![
            case(Arg::index([7], -1, 4), Arg::real([3])),
            case(Arg::index([7], -1, 5), Arg::real([4, 3])),
            case(Arg::index([1], 0, 2), Arg::real([2, 2, 3])),
        ]
    }
}

pub const KINDS: &[OpKind] = &[
    OpKind::of::<ScatterAdd>().with_cuda::<ScatterAdd>(),
    OpKind::of::<ScatterAddGrad>().with_cuda::<ScatterAddGrad>(),
    OpKind::of::<SegmentSum>().with_cuda::<SegmentSum>(),
    OpKind::of::<SegmentSumGrad>().with_cuda::<SegmentSumGrad>(),
];

kolo_graph::methods! {
    /// Sums by index.
    ScatterMethods {
        /// This tensor with `source` added at `index` along `dim`; an index outside is ignored.
        fn scatter_add(self, dim: usize, index: Tensor<'b>, source: Tensor<'b>) -> Tensor<'b> {
            self.then(ScatterAdd { dim }, &[index, source])
        }
        /// Rows added up by the segment that `ids` gives each; an id outside is ignored.
        fn segment_sum(self, ids: Tensor<'b>, segments: usize) -> Tensor<'b> {
            self.then(SegmentSum { segments }, &[ids])
        }
    }
}
