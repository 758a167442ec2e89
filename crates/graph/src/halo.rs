//! The exchange of halos: each rank of an axis has a run of a tensor, and gets what it reads of it, its neighbours' places too.

use crate::collective::{AxisHalo, Collective, Movement};
use crate::cpu::{Cpu, CpuCx};
use crate::cuda::{Cuda, CudaCalls, CudaCx, moves};
use crate::op::{Arg, Case, Cases, Dense, Op};
use crate::operand::{Operand, Operands};
use crate::split::{self, Split};
use crate::types::Type;
use std::ops::Range;

impl AxisHalo {
    pub fn ranks(&self) -> usize {
        self.bounds.len().saturating_sub(1)
    }

    /// The places that a rank has.
    pub fn own(&self, rank: usize) -> Range<usize> {
        self.bounds[rank]..self.bounds[rank + 1]
    }

    /// The places that a rank gets.
    pub fn wanted(&self, rank: usize) -> Range<usize> {
        self.ranges[2 * rank]..self.ranges[2 * rank + 1]
    }

    /// What one rank gets from another, or has itself.
    pub fn between(&self, from: usize, to: usize) -> Range<usize> {
        let (own, wanted) = (self.own(from), self.wanted(to));
        let start = own.start.max(wanted.start);
        start..own.end.min(wanted.end).max(start)
    }

    /// Places that this rank sends.
    pub fn sent(&self) -> usize {
        let others = (0..self.ranks()).filter(|to| *to != self.rank);
        others.map(|to| self.between(self.rank, to).len()).sum()
    }

    fn check(&self, input: &Type) -> Result<Type, String> {
        let (ranks, whole) = (self.ranks(), self.bounds.last().copied().unwrap_or(0));
        if self.rank >= ranks || self.ranges.len() != 2 * ranks || !self.bounds.is_sorted() || self.bounds[0] != 0 {
            return Err(format!("names bounds {:?} and ranges {:?} for rank {}", self.bounds, self.ranges, self.rank));
        }
        if let Some(rank) = (0..ranks).find(|rank| self.wanted(*rank).is_empty() || self.wanted(*rank).end > whole) {
            return Err(format!("the rows {:?} of rank {rank} lie outside of 0..{whole}", self.wanted(rank)));
        }
        let size = input.shape.get(self.dim).copied().ok_or_else(|| format!("{input} has no dim {}", self.dim))?;
        if size != self.own(self.rank).len() {
            return Err(format!("dim {} of {input} should be {}", self.dim, self.own(self.rank).len()));
        }
        let mut ty = input.clone();
        ty.shape[self.dim] = self.wanted(self.rank).len();
        Ok(ty)
    }

    /// Where a place that this rank gets lies in its owner's tensor: without other ranks, as if all had the same.
    fn source(&self, at: usize) -> usize {
        let place = self.wanted(self.rank).start + at;
        let owner = (0..self.ranks()).find(|rank| self.own(*rank).contains(&place)).unwrap_or(self.rank);
        (place - self.own(owner).start) % self.own(self.rank).len().max(1)
    }
}

impl Op for AxisHalo {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::any("tensor")], &["tensor"])
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        Ok(vec![self.check(&inputs[0])?])
    }
    fn splits(&self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
        let kept = |split: &Split| split.outputs[0].cut().is_some_and(|(dim, _)| dim != self.dim);
        split::elementwise(inputs, outputs).into_iter().filter(kept).collect()
    }
    fn unsplittable(&self) -> Option<&'static str> {
        None
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        if inputs[0].data.is_empty() {
            return vec![Dense::zeros(outputs[0].shape.clone())];
        }
        vec![Dense::from_fn(outputs[0].shape.clone(), |at| {
            let mut at = at.to_vec();
            at[self.dim] = self.source(at[self.dim]);
            inputs[0].get(&at)
        })]
    }
    fn pure(&self) -> bool {
        false
    }
    fn collective(&self) -> Option<Collective<'_>> {
        Some(Collective { axis: &self.axis, movement: Movement::Halo(self), ranks: Some(self.ranks()) })
    }
}

impl Cpu for AxisHalo {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (from, to) = (&cx.inputs[0], &cx.outputs[0]);
        if from.ty.elements() == 0 {
            // SAFETY: the output holds that many bytes.
            return unsafe { std::ptr::write_bytes(to.data, 0, to.ty.bytes()) };
        }
        let outer: usize = to.ty.shape[..self.dim].iter().product();
        let bytes = to.ty.shape[self.dim + 1..].iter().product::<usize>() * to.ty.dtype.bytes();
        let (own, wanted) = (from.ty.shape[self.dim], to.ty.shape[self.dim]);
        for (row, at) in (0..outer).flat_map(|row| (0..wanted).map(move |at| (row, at))) {
            // SAFETY: both places lie inside their tensors, whose memories are distinct.
            unsafe {
                let source = from.data.add((row * own + self.source(at)) * bytes);
                std::ptr::copy_nonoverlapping(source, to.data.add((row * wanted + at) * bytes), bytes);
            }
        }
    }
}

impl Cuda for AxisHalo {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let sources: Vec<usize> = (0..cx.outputs[0].shape[self.dim]).map(|at| self.source(at)).collect();
        moves::pick(cx, self.dim, &sources)
    }
}

impl Cases for AxisHalo {
    fn cases() -> Vec<Case> {
        let case = |rank: usize, ranges: &[usize], shape: [usize; 3]| {
            let op = AxisHalo { axis: "height".into(), dim: 1, rank, bounds: vec![0, 4, 7], ranges: ranges.to_vec() };
            Case::new(op, [Arg::real(shape).constant()])
        };
        let alone = AxisHalo { axis: "height".into(), dim: 1, rank: 0, bounds: vec![0, 4], ranges: vec![1, 3] };
        vec![
            Case::new(alone, [Arg::real([3, 4]).constant()]),
            case(0, &[0, 5, 2, 7], [2, 4, 3]),
            case(1, &[0, 5, 2, 7], [2, 3, 3]),
            case(1, &[1, 4, 0, 7], [1, 3, 5]),
        ]
    }
}
