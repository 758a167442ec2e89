//! Pieces of tensors: a run of a tensor's elements as a tensor of its own, and a tensor made of such runs.
//!
//! A rewrite cuts a parameter's update in pieces with these, so that each can run somewhere else. A piece is its tensor's own
//! memory, and a join of pieces that lie side by side is theirs.

use crate::cpu::{Cpu, CpuCx};
use crate::cuda::{Cuda, CudaCalls, CudaCx, moves};
use crate::op;
use crate::op::{Arg, Case, Cases, Dense, Op};
use crate::operand::{Operand, Operands};
use crate::types::Type;

op! {
    /// Elements `start..start + len`, in the order of memory.
    pub struct Piece = "piece" { start: usize, len: usize }
}
op! {
    /// The tensor of this shape whose elements are those of the inputs, one after the other.
    pub struct Join = "join" { shape: Vec<usize> }
}

impl Op for Piece {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::any("x")], &["piece"])
    }
    fn unsplittable(&self) -> Option<&'static str> {
        Some("it counts elements in the order of memory, across all dims")
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err(format!("takes one input, but got {}", inputs.len())) };
        let (end, elements) = (self.start.saturating_add(self.len), input.elements());
        if end > elements {
            return Err(format!("{input} has {elements} elements, but the piece ends at {end}"));
        }
        Ok(vec![Type::new(input.dtype, [self.len])])
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        vec![Dense::new([self.len], inputs[0].data[self.start..self.start + self.len].to_vec())]
    }
    fn view(&self) -> bool {
        true
    }
}

impl Cases for Piece {
    fn cases() -> Vec<Case> {
        let case = |start, len| Case::new(Piece { start, len }, [Arg::real([5, 7]).constant()]);
        vec![case(0, 35), case(0, 16), case(16, 19), case(3, 1)]
    }
}

impl Op for Join {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::f32("piece").many()], &["whole"])
    }
    fn unsplittable(&self) -> Option<&'static str> {
        Some("it counts elements in the order of memory, across all dims")
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let output = Type::f32(self.shape.clone());
        let elements: usize = inputs.iter().map(Type::elements).sum();
        if elements != output.elements() {
            return Err(format!("the pieces have {elements} elements, {output} has {}", output.elements()));
        }
        Ok(vec![output])
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        vec![Dense::new(self.shape.clone(), inputs.iter().flat_map(|input| input.data.iter().copied()).collect())]
    }
}

impl Cpu for Join {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let mut rest = cx.out_f32(0);
        for at in 0..cx.inputs.len() {
            let input = cx.f32(at);
            let (here, after) = rest.split_at_mut(input.len());
            here.copy_from_slice(input);
            rest = after;
        }
    }
}

impl Cuda for Join {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        moves::concatenate(cx, Type::bytes)
    }
}

impl Cases for Join {
    fn cases() -> Vec<Case> {
        let case = |sizes: &[usize], shape: &[usize]| {
            let args: Vec<Arg> = sizes.iter().map(|size| Arg::real([*size]).constant()).collect();
            Case::new(Join { shape: shape.into() }, args)
        };
        vec![case(&[6], &[2, 3]), case(&[16, 3], &[19]), case(&[16, 16, 3], &[5, 7])]
    }
}
