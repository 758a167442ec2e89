//! Rows of a table by id.
//!
//! An id outside the table never reads outside it: its row is NaN, so that a wrong token shows in the loss. The backward
//! pass ignores such ids, and adds the rows of an id in the order of their positions.

use crate::by_id;
use crate::cast::CastMethods;
use crate::elementwise::ElementwiseMethods;
use crate::movement::{BYTES_PER_TASK, Element, Target, axes, bits, by_width, check_ids, input, within};
use crate::movement::{missing, within_f64};
use crate::moves;
use crate::reduce::ReduceMethods;
use crate::scatter::{SegmentSumGrad, add_rows_by_id, define_row_sums};
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::split::{Placement, Split};
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, DType, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};
use std::sync::Arc;

op! {
    /// The rows of a table `[vocab, width]` at ids `[…]` (i32): `[…, width]`. An id outside gives a row of NaN. The table may be
    /// the rows from `first` on of one with `vocab` rows: then ids of its other rows give zeros.
    pub struct Embedding = "embedding" { first: usize = 0, vocab: usize = 0 }
}

/// The axes of the ids, and the same with the row's axis at the end.
fn id_axes(ids: &Type) -> (Vec<String>, Vec<String>) {
    let ids = axes(ids.rank());
    let rows = ids.iter().cloned().chain(["width".into()]).collect();
    (ids, rows)
}

fn table_axes() -> Vec<String> {
    vec!["vocab".into(), "width".into()]
}

impl Op for Embedding {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("table"), Operand::i32("ids")], &["rows"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let (ids, rows) = id_axes(inputs.get(1)?);
        Some(Index {
            inputs: vec![table_axes(), ids],
            outputs: vec![rows],
            whole: vec!["vocab".into()],
            ..Index::default()
        })
    }
    /// Along its rows a table is split in terms: every id is a row of one part, and zeros in the others.
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let mut splits = self.index(inputs).map_or_else(Vec::new, |index| index.splits(inputs));
        let rows = [Placement::Shard(0), Placement::Replicate];
        splits.push(Split::new("vocab", inputs[0].shape[0], rows, [Placement::Partial]).ordered());
        splits
    }
    fn part_at(&self, split: &Split, first: usize, _: usize) -> Option<Arc<dyn Op>> {
        let vocab = if self.vocab == 0 { split.size } else { self.vocab };
        (split.axis == "vocab").then(|| Arc::new(Embedding { first: self.first + first, vocab }) as Arc<dyn Op>)
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [table, ids] = inputs else { return Err("takes two inputs: table and ids".into()) };
        check_ids(ids)?;
        if table.rank() != 2 || !table.dtype.is_float() {
            return Err(format!("the table must be floats of two dims, [vocab, width], but is {table}"));
        }
        Ok(vec![Type::new(table.dtype, [&ids.shape[..], &table.shape[1..]].concat())])
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let vocab = cx.input(0).dim(0);
        let grad = cx.input(1).then(EmbeddingGrad { vocab, first: self.first }, &[cx.grad()]);
        vec![Some(grad.cast(cx.input(0).dtype())), None]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let [table, ids] = inputs else { unreachable!("infer checks the arity") };
        let width = outputs[0].last();
        let row = |id: &f64| match within_f64(*id - self.first as f64, table.shape[0]) {
            Some(row) => table.data[row * width..(row + 1) * width].to_vec(),
            None if within_f64(*id, self.vocab).is_some() => vec![0.0; width],
            None => vec![f64::NAN; width],
        };
        vec![Dense::new(outputs[0].shape.clone(), ids.data.iter().flat_map(row).collect())]
    }
}

impl Cpu for Embedding {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let rows = Rows { first: self.first, vocab: self.vocab, missing: missing(cx.inputs[0].ty.dtype) };
        pick_rows(cx, 0, 1, rows);
    }
    fn takes_halves(&self) -> bool {
        true
    }
}

/// The rows of `table` that `ids` name, of `missing` where there is none.
pub(crate) fn define_rows(table: &Dense, ids: &Dense, output: &Type, missing: f64) -> Dense {
    let width: usize = table.shape[1..].iter().product();
    let row = |id: &f64| match within_f64(*id, table.shape[0]) {
        Some(id) => table.data[id * width..(id + 1) * width].to_vec(),
        None => vec![missing; width],
    };
    Dense::new(output.shape.clone(), ids.data.iter().flat_map(row).collect())
}

/// What ids mean: the table's rows are those from `first` on of `vocab`. Others of these are zeros, and all others `missing`.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub first: usize,
    pub vocab: usize,
    pub missing: f32,
}

impl Rows {
    /// A whole table.
    pub fn or(missing: f32) -> Self {
        Self { first: 0, vocab: 0, missing }
    }
}

/// The kernel: rows of input `table` at the places in input `ids`.
pub(crate) fn pick_rows(cx: &CpuCx<'_>, table: usize, ids: usize, rows: Rows) {
    let dtype = cx.inputs[table].ty.dtype;
    by_width!(dtype, pick(cx, table, ids, (rows, bits(dtype, rows.missing))));
}

fn pick<T: Element>(cx: &CpuCx<'_>, table: usize, ids: usize, (rows, missing): (Rows, u64)) {
    let (at, count) = (table, cx.shape(table)[0]);
    let (table, ids, target) = (input::<T>(cx, table), cx.i32(ids), Target::<T>::of(cx));
    // Not from the table's length, which says nothing of an empty one.
    let width = cx.shape(at)[1..].iter().product::<usize>();
    cx.team.chunks(ids.len(), (BYTES_PER_TASK / (width * size_of::<T>()).max(1)).max(1), |range, _| {
        for at in range {
            // SAFETY: tasks own disjoint rows.
            let out = unsafe { target.slice(at * width, width) };
            match within(ids[at].wrapping_sub(rows.first as i32), count) {
                Some(id) => out.copy_from_slice(&table[id * width..(id + 1) * width]),
                None if within(ids[at], rows.vocab).is_some() => out.fill(T::of(0)),
                None => out.fill(T::of(missing)),
            }
        }
    });
}

impl Cuda for Embedding {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let dtype = cx.inputs[0].dtype;
        moves::taken_rows(cx, (0, 1), (self.first, self.vocab), bits(dtype, missing(dtype))).into()
    }
}

impl Cases for Embedding {
    fn cases() -> Vec<Case> {
        let case = |table: Arg, ids: Arg| Case::new(Embedding { first: 0, vocab: 0 }, [table, ids]);
        vec![
            case(Arg::real([5, 3]), Arg::index([7], 0, 5)),
            case(Arg::real([5, 3]), Arg::index([2, 4], 0, 5)),
            case(Arg::real([1, 7]), Arg::index([], 0, 1)),
            // Ids outside give NaN, which has no finite differences.
            case(Arg::real([5, 3]).constant(), Arg::index([4, 3], -2, 8)),
            case(Arg::real([90, 130]).constant(), Arg::index([3, 170], 0, 90)),
        ]
    }
}

op! {
    /// Gradient of the table of [`Embedding`] (`[vocab, width]`), from the ids and the output's gradient: the rows of
    /// each id added in the order of their positions. An id outside is ignored. The table may be the rows from `first` on of a
    /// longer one.
    pub struct EmbeddingGrad = "embedding_grad" { vocab: usize, first: usize = 0 }
}

impl Op for EmbeddingGrad {
    fn operands(&self) -> Operands {
        Operands::new([Operand::i32("ids"), Operand::float("g")], &["dtable"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let (ids, rows) = id_axes(inputs.first()?);
        Some(Index {
            inputs: vec![ids, rows],
            outputs: vec![table_axes()],
            whole: vec!["vocab".into()],
            ..Index::default()
        })
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let mut splits = self.index(inputs).map_or_else(Vec::new, |index| index.splits(inputs));
        let rows = [Placement::Replicate, Placement::Replicate];
        splits.push(Split::new("vocab", self.vocab, rows, [Placement::Shard(0)]).ordered());
        splits
    }
    fn part_at(&self, split: &Split, first: usize, units: usize) -> Option<Arc<dyn Op>> {
        let part = || Arc::new(EmbeddingGrad { vocab: units, first: self.first + first }) as Arc<dyn Op>;
        (split.axis == "vocab").then(part)
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [ids, grad] = inputs else { return Err("takes two inputs: ids and gradient".into()) };
        check_ids(ids)?;
        if !grad.dtype.is_float() {
            return Err(format!("the gradient must be floats, but is {grad}"));
        }
        if grad.rank() != ids.rank() + 1 || grad.shape[..ids.rank()] != ids.shape {
            return Err(format!("the gradient must be one row for each of the ids {ids}, but is {grad}"));
        }
        Ok(vec![Type::f32([self.vocab, grad.last()])])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        inputs[1].elements() as u64
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let (ids, shape) = (cx.input(0), cx.input(1).shape());
        let shifted = || ids.cast(DType::F32).shift(-(self.first as f32)).cast(DType::I32);
        let ids = if self.first == 0 { ids } else { shifted() };
        let rows = ids.reshape_to([ids.ty().elements()]).then(SegmentSumGrad {}, &[cx.grad()]);
        vec![None, Some(rows.reshape_to(shape))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let ids = inputs[0].data.iter().map(|id| id - self.first as f64).collect();
        vec![define_row_sums(inputs[1], &Dense::new(inputs[0].shape.clone(), ids), &outputs[0])]
    }
}

impl Cpu for EmbeddingGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        add_rows_by_id(cx, cx.f32(1), cx.i32(0), (self.first, self.vocab));
    }
}

impl Cuda for EmbeddingGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        by_id::row_sums(cx, (1, 0), (self.first, self.vocab))
    }
}

impl Cases for EmbeddingGrad {
    fn cases() -> Vec<Case> {
        let case = |vocab, ids: Arg, grad: Arg| Case::new(EmbeddingGrad { vocab, first: 0 }, [ids, grad]);
        vec![
            case(5, Arg::index([7], 0, 5), Arg::real([7, 3])),
            case(5, Arg::index([2, 4], -1, 7), Arg::real([2, 4, 3])),
            case(1, Arg::index([], 0, 1), Arg::real([7])),
            case(90, Arg::index([3, 170], -1, 92), Arg::real([3, 170, 130]).constant()),
            case(700, Arg::index([700], 0, 20), Arg::real([700, 33]).constant()),
        ]
    }
}

pub const KINDS: &[OpKind] =
    &[OpKind::of::<Embedding>().with_cuda::<Embedding>(), OpKind::of::<EmbeddingGrad>().with_cuda::<EmbeddingGrad>()];

kolo_graph::methods! {
    /// Tables.
    EmbeddingMethods {
        /// The rows of this table `[vocab, width]` at `ids`; NaN where an id is outside.
        fn embedding(self, ids: Tensor<'b>) -> Tensor<'b> { self.then(Embedding { first: 0, vocab: 0 }, &[ids]) }
    }
}
