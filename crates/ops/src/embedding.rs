//! Rows of a table by id.
//!
//! An id outside the table never reads outside it: its row is NaN, so that a wrong token shows in the loss. The backward
//! pass ignores such ids, and adds the rows of an id in the order of their positions.

use crate::movement::{BYTES_PER_TASK, Element, Target, axes, bits, by_width, check_f32, check_ids, input, within};
use crate::movement::{missing, within_f64};
use crate::reduce::ReduceMethods;
use crate::scatter::{SegmentSumGrad, add_rows_by_id, define_row_sums};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Op, Operand, Operands, Tensor, Type, op};

op! {
    /// The rows of a table `[vocab, width]` at ids `[…]` (i32): `[…, width]`. An id outside gives a row of NaN.
    pub struct Embedding = "embedding" {}
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
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let (ids, rows) = id_axes(inputs.get(1)?);
        Some(Index {
            inputs: vec![table_axes(), ids],
            outputs: vec![rows],
            whole: vec!["vocab".into()],
            ..Index::default()
        })
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
        vec![Some(cx.input(1).then(EmbeddingGrad { vocab }, &[cx.grad()])), None]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        vec![define_rows(inputs[0], inputs[1], &outputs[0], f64::NAN)]
    }
}

impl Cpu for Embedding {
    fn run(&self, cx: &mut CpuCx<'_>) {
        pick_rows(cx, 0, 1, missing(cx.inputs[0].ty.dtype));
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

/// The kernel: rows of input `table` at the places in input `ids`.
pub(crate) fn pick_rows(cx: &CpuCx<'_>, table: usize, ids: usize, missing: f32) {
    let dtype = cx.inputs[table].ty.dtype;
    by_width!(dtype, pick(cx, table, ids, bits(dtype, missing)));
}

fn pick<T: Element>(cx: &CpuCx<'_>, table: usize, ids: usize, missing: u64) {
    let (at, count) = (table, cx.shape(table)[0]);
    let (table, ids, target) = (input::<T>(cx, table), cx.i32(ids), Target::<T>::of(cx));
    // Not from the table's length, which says nothing of an empty one.
    let width = cx.shape(at)[1..].iter().product::<usize>();
    cx.team.chunks(ids.len(), (BYTES_PER_TASK / (width * size_of::<T>()).max(1)).max(1), |range, _| {
        for at in range {
            // SAFETY: tasks own disjoint rows.
            let out = unsafe { target.slice(at * width, width) };
            match within(ids[at], count) {
                Some(id) => out.copy_from_slice(&table[id * width..(id + 1) * width]),
                None => out.fill(T::of(missing)),
            }
        }
    });
}

impl Cases for Embedding {
    fn cases() -> Vec<Case> {
        let case = |table: Arg, ids: Arg| Case::new(Embedding {}, [table, ids]);
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
    /// each id added in the order of their positions. An id outside is ignored.
    pub struct EmbeddingGrad = "embedding_grad" { vocab: usize }
}

impl Op for EmbeddingGrad {
    fn operands(&self) -> Operands {
        Operands::new([Operand::i32("ids"), Operand::f32("g")], &["dtable"])
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
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [ids, grad] = inputs else { return Err("takes two inputs: ids and gradient".into()) };
        check_ids(ids)?;
        check_f32(grad)?;
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
        let rows = ids.reshape_to([ids.ty().elements()]).then(SegmentSumGrad {}, &[cx.grad()]);
        vec![None, Some(rows.reshape_to(shape))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        vec![define_row_sums(inputs[1], inputs[0], &outputs[0])]
    }
}

impl Cpu for EmbeddingGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        add_rows_by_id(cx, cx.f32(1), cx.i32(0), self.vocab);
    }
}

impl Cases for EmbeddingGrad {
    fn cases() -> Vec<Case> {
        let case = |vocab, ids: Arg, grad: Arg| Case::new(EmbeddingGrad { vocab }, [ids, grad]);
        vec![
            case(5, Arg::index([7], 0, 5), Arg::real([7, 3])),
            case(5, Arg::index([2, 4], -1, 7), Arg::real([2, 4, 3])),
            case(1, Arg::index([], 0, 1), Arg::real([7])),
            case(90, Arg::index([3, 170], -1, 92), Arg::real([3, 170, 130]).constant()),
            case(700, Arg::index([700], 0, 20), Arg::real([700, 33]).constant()),
        ]
    }
}

pub const KINDS: &[OpKind] = &[OpKind::of::<Embedding>(), OpKind::of::<EmbeddingGrad>()];

kolo_graph::methods! {
    /// Tables.
    EmbeddingMethods {
        /// The rows of this table `[vocab, width]` at `ids`; NaN where an id is outside.
        fn embedding(self, ids: Tensor<'b>) -> Tensor<'b> { self.then(Embedding {}, &[ids]) }
    }
}
