//! A tensor of the host's memory on a device that has its own, for as long as it is used.
//!
//! Where `fetch` stands is when its copy may begin: its place in memory is its own from there until its last reader. An executor runs the
//! copy beside what computes.

use crate::cpu::{Cpu, CpuCx};
use crate::cuda::{Cuda, CudaCalls, CudaCx, moves};
use crate::op;
use crate::op::{Arg, Case, Cases, Dense, Op};
use crate::operand::{Operand, Operands};
use crate::split::{self, Split};
use crate::types::Type;

op! {
    /// A copy of a tensor that the host keeps, in every grain, or once after the grains. `number` tells the copies of one tensor apart,
    /// each of which is freed when its last reader has run.
    pub struct Fetch = "fetch" { number: usize, after_grains: bool }
}

impl Op for Fetch {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::any("tensor")], &["tensor"])
    }
    fn splits(&self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
        split::elementwise(inputs, outputs)
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        Ok(inputs.to_vec())
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        vec![inputs[0].clone()]
    }
}

/// Where all memory is the host's.
impl Cpu for Fetch {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (from, to) = (&cx.inputs[0], &cx.outputs[0]);
        // SAFETY: two tensors of one type, each in a place of its own.
        unsafe { std::ptr::copy_nonoverlapping(from.data, to.data, to.ty.bytes()) };
    }
    fn takes_halves(&self) -> bool {
        true
    }
}

impl Cuda for Fetch {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        moves::copy(cx)
    }
}

impl Cases for Fetch {
    fn cases() -> Vec<Case> {
        let case =
            |after_grains, shape: &[usize]| Case::new(Fetch { number: 0, after_grains }, [Arg::real(shape).constant()]);
        vec![case(false, &[3, 5]), case(true, &[17]), case(false, &[0])]
    }
}
