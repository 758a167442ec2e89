//! Elements picked along one dim by index.
//!
//! An index outside the dim never reads outside the tensor: it gives NaN (zero in types without one), so that a wrong
//! index shows in the loss instead of passing for data.

use crate::movement::{
    BYTES_PER_TASK, Element, Target, around, axes_but, bits, by_width, check_dim, check_ids, input, missing, within,
    within_f64,
};
use crate::moves;
use crate::scatter::ScatterMethods;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};

op! {
    /// `out[…, i, …] = x[…, index[…, i, …], …]` along `dim`, from inputs `x` and `index` (i32, of `x`'s shape but for
    /// `dim`). An index outside gives NaN, or zero in types without one.
    pub struct Gather = "gather" { dim: usize }
}

impl Op for Gather {
    fn operands(&self) -> Operands {
        Operands::new([Operand::any("x"), Operand::i32("index")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let rank = inputs.first()?.rank();
        let (from, to) = (axes_but(rank, self.dim, "from"), axes_but(rank, self.dim, "to"));
        Some(Index {
            inputs: vec![from, to.clone()],
            outputs: vec![to],
            whole: vec!["from".into()],
            ..Index::default()
        })
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [x, index] = inputs else { return Err("takes two inputs: x and index".into()) };
        check_index(x, index, self.dim)?;
        Ok(vec![Type::new(x.dtype, index.shape.clone())])
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let zeros = |like: Tensor<'b>| like.builder().full(0.0, like.ty());
        vec![Some(zeros(cx.input(0)).scatter_add(self.dim, cx.input(1), cx.grad())), None]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        vec![define(inputs[0], inputs[1], self.dim, f64::from(missing(outputs[0].dtype)))]
    }
}

impl Cpu for Gather {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let dtype = cx.inputs[0].ty.dtype;
        by_width!(dtype, take(cx, 0, 1, self.dim, bits(dtype, missing(dtype))));
    }
    fn takes_halves(&self) -> bool {
        true
    }
}

/// `index` has `x`'s shape but for `dim`.
pub(crate) fn check_index(x: &Type, index: &Type, dim: usize) -> Result<(), String> {
    check_ids(index)?;
    check_dim(x, dim)?;
    let same = |at: usize| at == dim || x.shape[at] == index.shape[at];
    if x.rank() != index.rank() || !(0..x.rank()).all(same) {
        return Err(format!("the index {index} may differ from {x} in dim {dim} only; slice or expand it"));
    }
    Ok(())
}

/// The definition, with `missing` for an index outside.
pub(crate) fn define(x: &Dense, index: &Dense, dim: usize, missing: f64) -> Dense {
    Dense::from_fn(index.shape.clone(), |at| match within_f64(index.get(at), x.shape[dim]) {
        Some(place) => {
            let mut at = at.to_vec();
            at[dim] = place;
            x.get(&at)
        }
        None => missing,
    })
}

/// The kernel: input `x` read along `dim` at the places in input `index`.
pub(crate) fn take<T: Element>(cx: &CpuCx<'_>, x: usize, index: usize, dim: usize, missing: u64) {
    let (size, count) = (cx.shape(x)[dim], cx.shape(index)[dim]);
    let (outer, inner) = around(cx.shape(x), dim);
    let (x, index, target) = (input::<T>(cx, x), cx.i32(index), Target::<T>::of(cx));
    let missing = T::of(missing);
    let rows_per_task = (BYTES_PER_TASK / (inner * size_of::<T>()).max(1)).max(1);
    cx.team.chunks(outer * count, rows_per_task, |range, _| {
        // Counted along instead of divided out: rows can be single elements.
        let (mut plane, mut next) = (range.start / count, (range.start / count + 1) * count);
        for row in range {
            if row == next {
                (plane, next) = (plane + 1, next + count);
            }
            let own = &x[plane * size * inner..(plane + 1) * size * inner];
            // SAFETY: tasks own disjoint rows.
            let out = unsafe { target.slice(row * inner, inner) };
            for (column, (out, place)) in out.iter_mut().zip(&index[row * inner..(row + 1) * inner]).enumerate() {
                *out = within(*place, size).map_or(missing, |place| own[place * inner + column]);
            }
        }
    });
}

impl Cuda for Gather {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let dtype = cx.inputs[0].dtype;
        moves::taken(cx, (0, 1), self.dim, bits(dtype, missing(dtype))).into()
    }
}

impl Cases for Gather {
    fn cases() -> Vec<Case> {
        let case = |x: Arg, index: Arg, dim| Case::new(Gather { dim }, [x, index]);
        vec![
            case(Arg::real([5]), Arg::index([7], 0, 5), 0),
            case(Arg::real([3, 4]), Arg::index([3, 1], 0, 4), 1),
            case(Arg::real([3, 4]), Arg::index([6, 4], 0, 3), 0),
            case(Arg::real([2, 3, 4]), Arg::index([2, 5, 4], 0, 3), 1),
            case(Arg::index([5], 0, 99), Arg::index([9], -2, 7), 0),
            case(Arg::byte([5], 1, 256), Arg::index([9], -2, 7), 0),
            // Indices outside give NaN, which has no finite differences.
            case(Arg::real([3, 4]).constant(), Arg::index([3, 5], -2, 6), 1),
            case(Arg::real([70, 60, 5]).constant(), Arg::index([70, 90, 5], 0, 60), 1),
        ]
    }
}

pub const KINDS: &[OpKind] = &[OpKind::of::<Gather>().with_cuda::<Gather>()];

kolo_graph::methods! {
    /// Picked elements.
    GatherMethods {
        /// The elements at `index` along `dim`; NaN where the index is outside.
        fn gather(self, dim: usize, index: Tensor<'b>) -> Tensor<'b> { self.then(Gather { dim }, &[index]) }
    }
}
