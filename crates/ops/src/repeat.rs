//! A tensor laid end to end with itself.

use crate::movement::{around, axes_but, check_dim, copy_rows};
use crate::moves::{self, Walk};
use crate::reduce::ReduceMethods;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx, CudaPlace};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::split::{Placement, Split};
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};

op! {
    /// The whole tensor `times` times along `dim`: `a b` becomes `a b a b`.
    pub struct Repeat = "repeat" { dim: usize, times: usize }
}

impl Op for Repeat {
    fn operands(&self) -> Operands {
        Operands::new([Operand::any("x")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let rank = inputs.first()?.rank();
        Some(Index {
            inputs: vec![axes_but(rank, self.dim, "once")],
            outputs: vec![axes_but(rank, self.dim, "all")],
            whole: vec!["once".into(), "all".into()],
            ..Index::default()
        })
    }
    /// Along `dim` the result is as many blocks as repetitions.
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let mut splits = self.index(inputs).map_or_else(Vec::new, |index| index.splits(inputs));
        let repeated = Placement::blocks(self.dim, self.times);
        splits.push(Split::new("once", inputs[0].shape[self.dim], [Placement::Shard(self.dim)], [repeated]));
        splits
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        check_dim(input, self.dim)?;
        if self.times == 0 {
            return Err("repeats zero times, which leaves nothing; repeat at least once".into());
        }
        let mut shape = input.shape.clone();
        shape[self.dim] = shape[self.dim].saturating_mul(self.times);
        Ok(vec![Type::new(input.dtype, shape)])
    }
    fn flops_per_point(&self) -> u64 {
        0
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let mut shape = cx.input(0).shape();
        shape.insert(self.dim, self.times);
        vec![Some(cx.grad().reshape_to(shape).sum(&[self.dim]))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        vec![Dense::from_fn(outputs[0].shape.clone(), |at| {
            let mut at = at.to_vec();
            at[self.dim] %= inputs[0].shape[self.dim];
            inputs[0].get(&at)
        })]
    }
}

impl Cpu for Repeat {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let shape = cx.shape(0);
        let (outer, inner) = around(shape, self.dim);
        let row = shape[self.dim] * inner * cx.inputs[0].ty.dtype.bytes();
        // SAFETY: output rows follow one another.
        unsafe {
            copy_rows(cx.team, (&cx.inputs[0], &cx.outputs[0]), (outer * self.times, row), |at| {
                (at / self.times * row, at * row)
            });
        }
    }
    fn takes_halves(&self) -> bool {
        true
    }
}

impl Cuda for Repeat {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (shape, mut calls) = (&cx.inputs[0].shape, CudaCalls::new());
        let (outer, inner) = around(shape, self.dim);
        let row = shape[self.dim] * inner;
        let walks = [
            Walk { size: outer, from: row, to: self.times * row },
            Walk { size: self.times, from: 0, to: row },
            Walk { size: row, from: 1, to: 1 },
        ];
        let (from, to) = ((CudaPlace::input(0), 0), (CudaPlace::output(0), 0));
        moves::elements(&mut calls, cx.inputs[0].dtype.bytes(), &walks, from, to);
        calls
    }
}

impl Cases for Repeat {
    fn cases() -> Vec<Case> {
        let case = |arg: Arg, dim, times| Case::new(Repeat { dim, times }, [arg]);
        vec![
            case(Arg::real([3]), 0, 2),
            case(Arg::real([2, 1]), 1, 5),
            case(Arg::real([2, 3, 4]), 1, 3),
            case(Arg::real([2, 3]), 0, 1),
            case(Arg::index([2, 3], 0, 9), 1, 2),
            case(Arg::real([70, 130]).constant(), 1, 3),
        ]
    }
}

pub const KINDS: &[OpKind] = &[OpKind::of::<Repeat>().with_cuda::<Repeat>()];

kolo_graph::methods! {
    /// Tiling.
    RepeatMethods {
        /// This tensor `times` times along `dim`.
        fn repeat(self, dim: usize, times: usize) -> Tensor<'b> {
            if times == 1 { self } else { self.then(Repeat { dim, times }, &[]) }
        }
    }
}
