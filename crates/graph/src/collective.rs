//! Collectives as ops: what the ranks along an axis of the mesh exchange. Every output is its input's own memory.
//!
//! To one worker each is the identity. The executor starts a collective as soon as its inputs are ready, on a lane of its
//! own, and waits for it where its outputs are first read.

use crate::op;
use crate::op::{Arg, Case, Cases, Dense, Op};
use crate::operand::{Operand, Operands};
use crate::types::Type;

op! {
    /// Each tensor becomes its sum over the ranks, in the order of the balanced tree.
    pub struct AllReduce = "all_reduce" { axis: String }
}
op! {
    /// Each tensor becomes its sum over the ranks, at its owner only; elsewhere it is undefined.
    pub struct ReduceScatter = "reduce_scatter" { axis: String, owners: Vec<usize> }
}
op! {
    /// Each tensor becomes that of its owner.
    pub struct AllGather = "all_gather" { axis: String, owners: Vec<usize> }
}

op! {
    /// Nothing changes, but no output is there before all ranks have all inputs.
    pub struct Barrier = "barrier" { axis: String }
}

/// Whether an op is one of these.
pub fn is_collective(op: &dyn Op) -> bool {
    op.is::<AllReduce>() || op.is::<ReduceScatter>() || op.is::<AllGather>() || op.is::<Barrier>()
}

fn infer(inputs: &[Type], owners: Option<&[usize]>) -> Result<Vec<Type>, String> {
    if let Some(owners) = owners.filter(|owners| owners.len() != inputs.len()) {
        return Err(format!("names {} owners of {} tensors", owners.len(), inputs.len()));
    }
    Ok(inputs.to_vec())
}

macro_rules! collective {
    ($op:ty, |$self:ident| $owners:expr, $case:expr) => {
        impl Op for $op {
            fn operands(&self) -> Operands {
                Operands::without_rules([Operand::f32("tensor").many()], &["tensor"])
            }
            fn infer(&$self, inputs: &[Type]) -> Result<Vec<Type>, String> {
                infer(inputs, $owners)
            }
            fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
                0
            }
            fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
                inputs.iter().map(|input| (*input).clone()).collect()
            }
            fn aliases(&self) -> bool {
                true
            }
            fn pure(&self) -> bool {
                false
            }
        }
        impl Cases for $op {
            fn cases() -> Vec<Case> {
                vec![Case::new($case, [Arg::real([3, 2]).constant(), Arg::real([5]).constant()])]
            }
        }
    };
}

collective!(AllReduce, |self| None, AllReduce { axis: "data".into() });
collective!(Barrier, |self| None, Barrier { axis: "data".into() });
collective!(ReduceScatter, |self| Some(&self.owners), ReduceScatter { axis: "data".into(), owners: vec![0, 0] });
collective!(AllGather, |self| Some(&self.owners), AllGather { axis: "data".into(), owners: vec![0, 0] });
