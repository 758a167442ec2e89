//! Constant padding.

use crate::movement::{BYTES_PER_TASK, Element, Target, axes, bits, by_width, check_rank, input};
use crate::moves;
use crate::slice::SliceMethods;
use crate::tiles::DIMS_MAX;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx};
use kolo_graph::index::Index;
use kolo_graph::op::{OpKind, advance};
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};

op! {
    /// `before[dim]` elements of `value` before and `after[dim]` after the tensor, along every dim.
    pub struct Pad = "pad" { before: Vec<usize>, after: Vec<usize>, value: f32 }
}

impl Pad {
    fn pads(&self, dim: usize) -> bool {
        self.before.get(dim) != Some(&0) || self.after.get(dim) != Some(&0)
    }
}

impl Op for Pad {
    fn operands(&self) -> Operands {
        Operands::new([Operand::any("x")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let from = axes(inputs.first()?.rank());
        let grown = |(dim, axis): (usize, &String)| if self.pads(dim) { format!("{axis}p") } else { axis.clone() };
        let to: Vec<String> = from.iter().enumerate().map(grown).collect();
        let whole = from.iter().chain(&to).filter(|axis| !from.contains(axis) || !to.contains(axis)).cloned().collect();
        Some(Index { inputs: vec![from], outputs: vec![to], whole, ..Index::default() })
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        check_rank(input)?;
        if self.before.len() != input.rank() || self.after.len() != input.rank() {
            return Err(format!(
                "before {:?} and after {:?} must have one number for each dim of {input}",
                self.before, self.after
            ));
        }
        let grown = |dim: usize| self.before[dim].saturating_add(input.shape[dim]).saturating_add(self.after[dim]);
        Ok(vec![Type::new(input.dtype, (0..input.rank()).map(grown).collect::<Vec<_>>())])
    }
    fn flops_per_point(&self) -> u64 {
        0
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let inside =
            |grad: Tensor<'b>, (dim, size): (usize, &usize)| grad.slice(dim, self.before[dim]..self.before[dim] + size);
        vec![Some(cx.input(0).shape().iter().enumerate().fold(cx.grad(), inside))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        vec![Dense::from_fn(outputs[0].shape.clone(), |at| {
            let inside = |dim: usize| at[dim].checked_sub(self.before[dim]).filter(|at| *at < inputs[0].shape[dim]);
            let from: Option<Vec<usize>> = (0..at.len()).map(inside).collect();
            from.map_or(f64::from(self.value), |from| inputs[0].get(&from))
        })]
    }
}

impl Cpu for Pad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        by_width!(cx.inputs[0].ty.dtype, pad(cx, self));
    }
    fn takes_halves(&self) -> bool {
        true
    }
}

/// The output as rows along the last padded dim, with everything after it: each is all padding, or padding, a run of
/// the input, padding.
fn pad<T: Element>(cx: &CpuCx<'_>, op: &Pad) {
    let (x, target) = (input::<T>(cx, 0), Target::<T>::of(cx));
    let (shape, grown) = (cx.shape(0), cx.out_shape(0));
    let value = T::of(bits(cx.inputs[0].ty.dtype, op.value));
    let last = (0..shape.len()).rfind(|dim| op.pads(*dim)).unwrap_or(0);
    let inner: usize = shape.iter().skip(last + 1).product();
    let along = |sizes: &[usize]| sizes.get(last).map_or(1, |size| *size) * inner;
    let (width, run, lead) = (along(grown), along(shape), op.before.get(last).map_or(0, |size| size * inner));
    let rows: usize = grown.iter().take(last).product();
    cx.team.chunks(rows, (BYTES_PER_TASK / (width * size_of::<T>()).max(1)).max(1), |range, _| {
        let mut at = [0; DIMS_MAX];
        let mut rest = range.start;
        for dim in (0..last).rev() {
            at[dim] = rest % grown[dim];
            rest /= grown[dim];
        }
        for row in range {
            // SAFETY: tasks own disjoint rows.
            let out = unsafe { target.slice(row * width, width) };
            match source_row(op, shape, &at[..last]) {
                Some(from) => {
                    out[..lead].fill(value);
                    out[lead..lead + run].copy_from_slice(&x[from * run..(from + 1) * run]);
                    out[lead + run..].fill(value);
                }
                None => out.fill(value),
            }
            advance(&mut at[..last], &grown[..last]);
        }
    });
}

/// The input row behind the output row `at`, unless that is all padding.
fn source_row(op: &Pad, shape: &[usize], at: &[usize]) -> Option<usize> {
    at.iter().enumerate().try_fold(0, |row, (dim, at)| {
        let inside = at.checked_sub(op.before[dim]).filter(|at| *at < shape[dim])?;
        Some(row * shape[dim] + inside)
    })
}

impl Cuda for Pad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (ty, value) = (&cx.inputs[0], bits(cx.inputs[0].dtype, self.value));
        moves::padded(ty.dtype.bytes(), &cx.outputs[0].shape, &ty.shape, &self.before, value).into()
    }
}

impl Cases for Pad {
    fn cases() -> Vec<Case> {
        let case = |arg: Arg, before: &[usize], after: &[usize], value| {
            Case::new(Pad { before: before.into(), after: after.into(), value }, [arg])
        };
        vec![
            case(Arg::real([3]), &[1], &[2], 0.0),
            case(Arg::real([]), &[], &[], 1.5),
            case(Arg::real([2, 3]), &[0, 0], &[0, 0], 1.5),
            case(Arg::real([2, 3]), &[0, 2], &[0, 1], -1.5),
            case(Arg::real([2, 3]), &[2, 0], &[1, 0], 0.5),
            case(Arg::real([1, 2, 3, 2]), &[0, 1, 1, 0], &[0, 2, 1, 0], 0.0),
            case(Arg::real([2, 2, 3]), &[1, 0, 2], &[0, 0, 1], 0.25),
            case(Arg::real([2]).constant(), &[1], &[0], f32::NEG_INFINITY),
            case(Arg::index([2, 3], 0, 9), &[0, 1], &[1, 0], -7.0),
            case(Arg::boolean([3]), &[1], &[1], 1.0),
            case(Arg::byte([3, 7], 0, 256), &[1, 0], &[1, 2], 200.0),
            case(Arg::real([5, 70, 130]).constant(), &[0, 1, 1], &[0, 1, 1], 0.0),
        ]
    }
}

pub const KINDS: &[OpKind] = &[OpKind::of::<Pad>().with_cuda::<Pad>()];

kolo_graph::methods! {
    /// Padding.
    PadMethods {
        /// `before[dim]` and `after[dim]` elements of `value` around the tensor, one number for each dim.
        fn pad(self, before: &[usize], after: &[usize], value: f32) -> Tensor<'b> {
            self.then(Pad { before: before.into(), after: after.into(), value }, &[])
        }
        /// Pads one dim.
        fn pad_dim(self, dim: usize, before: usize, after: usize, value: f32) -> Tensor<'b> {
            let rank = self.rank().max(dim + 1);
            let only = |size: usize| -> Vec<usize> { (0..rank).map(|at| if at == dim { size } else { 0 }).collect() };
            self.then(Pad { before: only(before), after: only(after), value }, &[])
        }
    }
}
