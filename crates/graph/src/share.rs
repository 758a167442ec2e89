//! Ops of tensors of which every rank keeps a share: runs that lie one behind the other are gathered before they are used, and
//! gradients are summed at the owner of each run alone.
//!
//! [`Pack`] lays tensors one behind the other, [`crate::collective::AxisJoin`] gathers what all ranks have packed, and
//! [`AxisShare`] is its opposite. [`EachGrain`] makes what depends on parameters alone a part of every grain, so that it is
//! there only while it is used.

use crate::collective::{Collective, Movement, same_tensor};
use crate::cpu::{Cpu, CpuCx};
use crate::cuda::{Cuda, CudaCalls, CudaCx, moves};
use crate::layout::ALIGNMENT;
use crate::op;
use crate::op::{Arg, Case, Cases, Dense, Op};
use crate::operand::{Operand, Operands};
use crate::types::Type;

op! {
    /// The elements of all inputs, one tensor behind the other, each from a cache line on; zeros between them.
    pub struct Pack = "pack" {}
}
op! {
    /// This rank's run of the sum over the ranks of an axis. Runs lie in the order of the ranks and have these sizes.
    pub struct AxisShare = "axis_share" { axis: String, sizes: Vec<usize>, rank: usize }
}
op! {
    /// A tensor as it is in each grain: whoever reads it runs in every grain.
    pub struct EachGrain = "each_grain" {}
}

/// Elements of f32 that a packed tensor of so many takes.
pub const fn packed(elements: usize) -> usize {
    elements.next_multiple_of(ALIGNMENT / size_of::<f32>())
}

impl Op for Pack {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::f32("tensor").many()], &["packed"])
    }
    fn unsplittable(&self) -> Option<&'static str> {
        Some("it counts elements in the order of memory, across all dims")
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        Ok(vec![Type::f32([inputs.iter().map(|input| packed(input.elements())).sum()])])
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let mut all = Vec::with_capacity(outputs[0].elements());
        for input in inputs {
            all.extend(&input.data);
            all.resize(packed(all.len()), 0.0);
        }
        vec![Dense::new([all.len()], all)]
    }
}

impl Cpu for Pack {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let mut place: *mut f32 = cx.outputs[0].data.cast();
        for input in cx.inputs {
            let (data, elements): (*const f32, usize) = (input.data.cast(), input.ty.elements());
            // SAFETY: the output holds all inputs with the padding behind each. An input that was not made in its place is
            // other memory.
            unsafe {
                if data != place {
                    std::ptr::copy_nonoverlapping(data, place, elements);
                    std::ptr::write_bytes(place.add(elements), 0, packed(elements) - elements);
                }
                place = place.add(packed(elements));
            }
        }
    }
}

impl Cuda for Pack {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        moves::concatenate(cx, |ty| packed(ty.elements()) * ty.dtype.bytes())
    }
}

impl Cases for Pack {
    fn cases() -> Vec<Case> {
        let case = |sizes: &[usize]| {
            let args: Vec<Arg> = sizes.iter().map(|size| Arg::real([*size]).constant()).collect();
            Case::new(Pack {}, args)
        };
        vec![case(&[32]), case(&[5, 16, 1]), case(&[17, 0, 3])]
    }
}

impl AxisShare {
    fn start(&self) -> usize {
        self.sizes[..self.rank].iter().sum()
    }
}

impl Op for AxisShare {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::f32("packed")], &["share"])
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let total = self.sizes.iter().try_fold(0usize, |total, size| total.checked_add(*size));
        match self.sizes.get(self.rank) {
            Some(own) if inputs[0].rank() == 1 && total == Some(inputs[0].elements()) => Ok(vec![Type::f32([*own])]),
            Some(_) => Err(format!("{} is not made of runs of the sizes {:?}", inputs[0], self.sizes)),
            None => Err(format!("there is no rank {} of {}", self.rank, self.sizes.len())),
        }
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let own = inputs[0].data[self.start()..][..outputs[0].elements()].iter();
        vec![Dense::new([own.len()], own.map(|value| value * self.sizes.len() as f64).collect())]
    }
    fn pure(&self) -> bool {
        false
    }
    fn collective(&self) -> Option<Collective<'_>> {
        let movement = Movement::Share { sizes: &self.sizes };
        Some(Collective { axis: &self.axis, movement, ranks: Some(self.sizes.len()) })
    }
}

/// Where there are no other ranks: as if all had the same tensor.
impl Cpu for AxisShare {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (all, own) = (cx.f32(0), cx.out_f32(0));
        let (start, ranks) = (self.start(), self.sizes.len() as f32);
        own.iter_mut().zip(&all[start..]).for_each(|(own, value)| *own = value * ranks);
    }
}

impl Cuda for AxisShare {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        moves::scaled_run(cx, self.start(), self.sizes.len())
    }
}

impl Cases for AxisShare {
    fn cases() -> Vec<Case> {
        let op = |sizes: &[usize], rank| AxisShare { axis: "data".into(), sizes: sizes.into(), rank };
        vec![Case::new(op(&[35], 0), [Arg::real([35]).constant()])]
    }
}

same_tensor!(EachGrain, EachGrain {});
