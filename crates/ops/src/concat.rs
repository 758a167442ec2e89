//! Tensors joined end to end along one dim.

use crate::movement::{around, axes_but, check_dim, copy_rows};
use crate::moves::{self, Walk};
use crate::slice::SliceMethods;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx, CudaPlace};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::split::{Placement, Split};
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};

op! {
    /// The inputs one after the other along `dim`; their other dims are equal.
    pub struct Concat = "concat" { dim: usize }
}

impl Op for Concat {
    fn operands(&self) -> Operands {
        Operands::new([Operand::any("part").many()], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let rank = inputs.first()?.rank();
        let parts: Vec<String> = (0..inputs.len()).map(|at| format!("part{at}")).collect();
        Some(Index {
            inputs: parts.iter().map(|part| axes_but(rank, self.dim, part)).collect(),
            outputs: vec![axes_but(rank, self.dim, "all")],
            whole: parts.iter().cloned().chain(["all".into()]).collect(),
            ..Index::default()
        })
    }
    /// Along `dim`, inputs of equal size become blocks of the result.
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let mut splits = self.index(inputs).map_or_else(Vec::new, |index| index.splits(inputs));
        let size = inputs[0].shape[self.dim];
        if inputs.iter().all(|ty| ty.shape[self.dim] == size) {
            let packed = Placement::blocks(self.dim, inputs.len());
            splits.push(Split::new("block", size, vec![Placement::Shard(self.dim); inputs.len()], [packed]));
        }
        splits
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [first, rest @ ..] = inputs else { return Err("takes at least one input".into()) };
        check_dim(first, self.dim)?;
        let others = |ty: &Type| -> Vec<usize> {
            ty.shape.iter().enumerate().filter(|(dim, _)| *dim != self.dim).map(|(_, size)| *size).collect()
        };
        let fits = |ty: &&Type| ty.dtype == first.dtype && ty.rank() == first.rank() && others(ty) == others(first);
        if let Some(other) = rest.iter().find(|ty| !fits(ty)) {
            return Err(format!("{first} and {other} may differ in dim {} only", self.dim));
        }
        let mut shape = first.shape.clone();
        shape[self.dim] = inputs.iter().map(|ty| ty.shape[self.dim]).sum();
        Ok(vec![Type::new(first.dtype, shape)])
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let mut start = 0;
        let part = |(at, input): (usize, &Tensor<'b>)| {
            let end = start + input.dim(self.dim);
            let range = std::mem::replace(&mut start, end)..end;
            cx.needs(at).then(|| match range.is_empty() {
                true => input.builder().full(0.0, input.ty()),
                false => cx.grad().slice(self.dim, range),
            })
        };
        cx.inputs.iter().enumerate().map(part).collect()
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        vec![Dense::from_fn(outputs[0].shape.clone(), |at| {
            let mut at = at.to_vec();
            let mut part = 0;
            while at[self.dim] >= inputs[part].shape[self.dim] {
                at[self.dim] -= inputs[part].shape[self.dim];
                part += 1;
            }
            inputs[part].get(&at)
        })]
    }
}

impl Cpu for Concat {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (shape, width) = (cx.out_shape(0), cx.outputs[0].ty.dtype.bytes());
        let (outer, inner) = around(shape, self.dim);
        let step = inner * width;
        let whole = shape[self.dim] * step;
        let mut start = 0;
        for (at, input) in cx.inputs.iter().enumerate() {
            let row = cx.shape(at)[self.dim] * step;
            // SAFETY: each input fills its own range of every output row.
            unsafe {
                copy_rows(cx.team, (input, &cx.outputs[0]), (outer, row), |at| (at * row, at * whole + start));
            }
            start += row;
        }
    }
    fn takes_halves(&self) -> bool {
        true
    }
}

impl Cuda for Concat {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (shape, mut calls) = (&cx.outputs[0].shape, CudaCalls::new());
        let (outer, inner) = around(shape, self.dim);
        let (whole, mut start) = (shape[self.dim] * inner, 0);
        for (at, input) in cx.inputs.iter().enumerate() {
            let row = input.shape[self.dim] * inner;
            let walks = [Walk { size: outer, from: row, to: whole }, Walk { size: row, from: 1, to: 1 }];
            let (from, to) = ((CudaPlace::input(at), 0), (CudaPlace::output(0), start));
            moves::elements(&mut calls, input.dtype.bytes(), &walks, from, to);
            start += row;
        }
        calls
    }
}

impl Cases for Concat {
    fn cases() -> Vec<Case> {
        let case = |args: Vec<Arg>, dim| Case::new(Concat { dim }, args);
        vec![
            case(vec![Arg::real([3])], 0),
            case(vec![Arg::real([3]), Arg::real([1]), Arg::real([4])], 0),
            case(vec![Arg::real([2, 3]), Arg::real([2, 2])], 1),
            case(vec![Arg::real([2, 3, 2]), Arg::real([2, 1, 2])], 1),
            case(vec![Arg::real([1, 5]), Arg::real([2, 5])], 0),
            case(vec![Arg::index([2, 3], 0, 9), Arg::index([2, 2], 0, 9)], 1),
            case(vec![Arg::real([90, 300]).constant(), Arg::real([90, 401]).constant()], 1),
        ]
    }
}

pub const KINDS: &[OpKind] = &[OpKind::of::<Concat>().with_cuda::<Concat>()];

kolo_graph::methods! {
    /// Joined tensors.
    ConcatMethods {
        /// This tensor and `others`, one after the other along `dim`.
        fn concat(self, others: &[Tensor<'b>], dim: usize) -> Tensor<'b> {
            if others.is_empty() { self } else { self.then(Concat { dim }, others) }
        }
    }
}
