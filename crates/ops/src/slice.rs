//! A contiguous range of one dim.

use crate::movement::{around, axes_but, check_dim, copy_rows};
use crate::moves::{self, Walk};
use crate::pad::PadMethods;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx, CudaPlace};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::split::{Placement, Split};
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};
use std::ops::Range;
use std::sync::Arc;

op! {
    /// Elements `start..start + len` of `dim`.
    pub struct Slice = "slice" { dim: usize, start: usize, len: usize }
}

impl Op for Slice {
    fn operands(&self) -> Operands {
        Operands::new([Operand::any("x")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let rank = inputs.first()?.rank();
        Some(Index {
            inputs: vec![axes_but(rank, self.dim, "from")],
            outputs: vec![axes_but(rank, self.dim, "to")],
            whole: vec!["from".into(), "to".into()],
            ..Index::default()
        })
    }
    /// Along `dim` a slice can be split if it is one of the equal blocks of which the dim consists: one of q, k and v.
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let mut splits = self.index(inputs).map_or_else(Vec::new, |index| index.splits(inputs));
        let size = inputs[0].shape[self.dim];
        if size.is_multiple_of(self.len) && self.start.is_multiple_of(self.len) {
            let packed = Placement::blocks(self.dim, size / self.len);
            splits.push(Split::new("block", self.len, [packed], [Placement::Shard(self.dim)]));
        }
        splits
    }
    fn part(&self, split: &Split, units: usize) -> Option<Arc<dyn Op>> {
        let block = || Slice { dim: self.dim, start: self.start / self.len * units, len: units };
        (split.axis == "block").then(|| Arc::new(block()) as Arc<dyn Op>)
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        check_dim(input, self.dim)?;
        if self.len == 0 {
            return Err(format!("the range starting at {} of dim {} of {input} is empty", self.start, self.dim));
        }
        let mut shape = input.shape.clone();
        match self.start.checked_add(self.len) {
            Some(end) if end <= shape[self.dim] => shape[self.dim] = self.len,
            _ => {
                let (start, len, dim, size) = (self.start, self.len, self.dim, shape[self.dim]);
                return Err(format!("{len} elements from {start} on do not fit dim {dim} of {input}, which is {size}"));
            }
        }
        Ok(vec![Type::new(input.dtype, shape)])
    }
    fn flops_per_point(&self) -> u64 {
        0
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let rest = cx.input(0).dim(self.dim) - self.start - self.len;
        vec![Some(cx.grad().pad_dim(self.dim, self.start, rest, 0.0))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        vec![Dense::from_fn(outputs[0].shape.clone(), |at| {
            let mut at = at.to_vec();
            at[self.dim] += self.start;
            inputs[0].get(&at)
        })]
    }
}

impl Cpu for Slice {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (shape, width) = (cx.shape(0), cx.inputs[0].ty.dtype.bytes());
        let (outer, inner) = around(shape, self.dim);
        let step = inner * width;
        let (row, whole) = (self.len * step, shape[self.dim] * step);
        // SAFETY: output rows follow one another.
        unsafe {
            copy_rows(cx.team, (&cx.inputs[0], &cx.outputs[0]), (outer, row), |at| {
                (at * whole + self.start * step, at * row)
            });
        }
    }
    fn takes_halves(&self) -> bool {
        true
    }
}

impl Cuda for Slice {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (shape, mut calls) = (&cx.inputs[0].shape, CudaCalls::new());
        let (outer, inner) = around(shape, self.dim);
        let (row, whole) = (self.len * inner, shape[self.dim] * inner);
        let walks = [Walk { size: outer, from: whole, to: row }, Walk { size: row, from: 1, to: 1 }];
        let (from, to) = ((CudaPlace::input(0), self.start * inner), (CudaPlace::output(0), 0));
        moves::elements(&mut calls, cx.inputs[0].dtype.bytes(), &walks, from, to);
        calls
    }
}

impl Cases for Slice {
    fn cases() -> Vec<Case> {
        let case = |arg: Arg, dim, start, len| Case::new(Slice { dim, start, len }, [arg]);
        vec![
            case(Arg::real([7]), 0, 2, 3),
            case(Arg::real([1, 5]), 0, 0, 1),
            case(Arg::real([4, 5]), 1, 0, 4),
            case(Arg::real([2, 5, 3]), 1, 3, 2),
            case(Arg::real([3, 2, 4]), 2, 1, 1),
            case(Arg::index([3, 7], -9, 9), 1, 2, 5),
            case(Arg::boolean([7, 3]), 0, 1, 4),
            case(Arg::byte([7, 21], 0, 256), 1, 2, 18),
            case(Arg::real([90, 700]).constant(), 1, 33, 600),
            // One row of several tasks.
            case(Arg::real([50, 900]).constant(), 0, 3, 45),
        ]
    }
}

pub const KINDS: &[OpKind] = &[OpKind::of::<Slice>().with_cuda::<Slice>()];

kolo_graph::methods! {
    /// Parts of a tensor.
    SliceMethods {
        /// The elements `range` of `dim`.
        fn slice(self, dim: usize, range: Range<usize>) -> Tensor<'b> {
            if self.shape().get(dim).is_some_and(|size| range == (0..*size)) {
                return self;
            }
            self.then(Slice { dim, start: range.start, len: range.end.saturating_sub(range.start) }, &[])
        }
        /// Consecutive parts of `sizes` along `dim`, which they must fill.
        fn split(self, dim: usize, sizes: &[usize]) -> Vec<Tensor<'b>> {
            let (size, total) = (self.dim(dim), sizes.iter().sum::<usize>());
            if !self.builder().failed() && size != total {
                let message = format!("sizes {sizes:?} make {total}, but dim {dim} of {} is {size}", self.ty());
                self.builder().fail("split", message, "make the sizes add up to the dim");
            }
            let mut start = 0;
            let part = |size: &usize| {
                start += size;
                self.slice(dim, start - size..start)
            };
            sizes.iter().map(part).collect()
        }
    }
}
