//! The ops every graph starts from and the one that ends a grain: inputs, parameters, state, constants, the sum over
//! grains. All but constants have no kernels: the executor owns their memory, and adds the grains.

use crate::attr::{Attr, AttrValue};
use crate::cpu::{Cpu, CpuCx};
use crate::cuda::{Cuda, CudaCalls, CudaCx, moves};
use crate::op;
use crate::op::{Case, Cases, Dense, GradCx, Op};
use crate::operand::{Operand, Operands};
use crate::region::Region;
use crate::rng::{Stream, unit};
use crate::split::{self, Split};
use crate::types::{DType, Type};
use std::ops::Range;
use std::sync::Arc;

/// How a parameter or state starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Constant(f64),
    Normal { deviation: f64 },
    Uniform { bound: f64 },
}

impl Init {
    pub const ZEROS: Init = Init::Constant(0.0);
    pub const ONES: Init = Init::Constant(1.0);

    /// PyTorch's default for linear and convolution layers: uniform within `1/√fan_in`.
    pub fn fan_in(fan_in: usize) -> Self {
        Init::Uniform { bound: 1.0 / (fan_in.max(1) as f64).sqrt() }
    }

    /// Elements `elements` of a shard, whichever of the tensor these are.
    pub fn fill_shard(&self, stream: &Stream, region: Region, elements: Range<usize>, out: &mut [f32]) {
        if let Init::Constant(value) = self {
            return out.fill(*value as f32);
        }
        let mut space = Vec::new();
        for (local, place, len) in region.runs(elements.clone()) {
            let out = &mut out[local - elements.start..][..len];
            let before = place % 4;
            if before == 0 {
                self.fill(stream, place, out);
                continue;
            }
            space.resize(before + len, 0.0);
            self.fill(stream, place - before, &mut space);
            out.copy_from_slice(&space[before..]);
        }
    }

    /// Elements `first..` of a tensor. Each depends on its own number and the stream alone, so a shard can be
    /// initialised by itself; four share a draw, so `first` is a multiple of four.
    pub fn fill(&self, stream: &Stream, first: usize, out: &mut [f32]) {
        assert!(first.is_multiple_of(4), "a draw makes four elements");
        let draw = first as u64 / 4;
        match self {
            Init::Constant(value) => out.fill(*value as f32),
            Init::Normal { deviation } => stream.fill_normals(0, draw, *deviation, out),
            Init::Uniform { bound } => {
                stream.fill(0, draw, out, |word| ((f64::from(unit(word)) * 2.0 - 1.0) * bound) as f32);
            }
        }
    }
}

impl AttrValue for Init {
    fn to_attr(&self) -> Attr {
        Attr::Text(match self {
            Init::Constant(value) => format!("constant {value:?}"),
            Init::Normal { deviation } => format!("normal {deviation:?}"),
            Init::Uniform { bound } => format!("uniform {bound:?}"),
        })
    }

    fn from_attr(attr: &Attr) -> Option<Self> {
        let Attr::Text(text) = attr else { return None };
        let (kind, number) = text.split_once(' ')?;
        let number: f64 = number.parse().ok()?;
        match kind {
            "constant" => Some(Init::Constant(number)),
            "normal" => Some(Init::Normal { deviation: number }),
            "uniform" => Some(Init::Uniform { bound: number }),
            _ => None,
        }
    }
}

/// What an input is to whoever feeds it. Its name says which one it is, and means nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputRole {
    /// A field of the samples, or whatever else the caller has.
    Data,
    /// The rate of this step.
    LearningRate,
    /// The number of this step, from one.
    StepNumber,
    /// The words that key random numbers: [key, key, step, first sample of the grain].
    Rng,
}

impl InputRole {
    const NAMES: [(InputRole, &str); 4] = [
        (InputRole::Data, "data"),
        (InputRole::LearningRate, "learning_rate"),
        (InputRole::StepNumber, "step_number"),
        (InputRole::Rng, "rng"),
    ];
}

impl AttrValue for InputRole {
    fn to_attr(&self) -> Attr {
        let name = Self::NAMES.iter().find(|(role, _)| role == self).map_or("", |(_, name)| name);
        Attr::Text(name.into())
    }

    fn from_attr(attr: &Attr) -> Option<Self> {
        let Attr::Text(text) = attr else { return None };
        Self::NAMES.iter().find(|(_, name)| name == text).map(|(role, _)| *role)
    }
}

op! {
    /// Data from outside: per grain, or per step (a learning rate).
    pub struct Input = "input" {
        name: String, dtype: DType, shape: Vec<usize>, per_step: bool, role: InputRole = InputRole::Data
    }
}
op! {
    /// A trained tensor. One rank's shard of a tensor has the tensor's name, and says its shape, `whole`, and which of its elements
    /// it has: runs of `region`'s second number, as far apart as its third, from its first on, without so many as its fourth.
    pub struct Param = "param" {
        name: String, shape: Vec<usize>, init: Init, whole: Vec<usize> = Vec::new(), region: Vec<usize> = Vec::new()
    }
}
op! {
    /// A tensor that persists between steps without being trained: a moment, a running average. One rank's shard of a tensor is
    /// a state that says of which tensor, whose shape is `whole`, it has which elements, as a [`Param`] does.
    pub struct State = "state" {
        name: String, dtype: DType, shape: Vec<usize>, init: Init, of: String = String::new(),
        whole: Vec<usize> = Vec::new(), region: Vec<usize> = Vec::new()
    }
}
op! {
    /// A tensor of one repeated number.
    pub struct Full = "full" { value: f64, dtype: DType, shape: Vec<usize> }
}
op! {
    /// The sum over all grains of the step, as one balanced binary tree over the grain index. What comes before runs
    /// once per grain, what comes after once per step. `of` names the parameter whose gradient it is; sums of gradients
    /// lie in memory in the order of their parameters; a name that no parameter of the graph has is that of another rank's
    /// gradient, which travels there. It is empty for any other sum.
    pub struct GrainSum = "grain_sum" { of: String }
}

macro_rules! source {
    ($op:ty, |$self:ident| $ty:expr) => {
        impl Op for $op {
            fn operands(&self) -> Operands {
                Operands::new([], &["value"])
            }
            fn infer(&$self, _: &[Type]) -> Result<Vec<Type>, String> {
                Ok(vec![$ty])
            }
            fn unsplittable(&self) -> Option<&'static str> {
                Some("it takes no inputs; its placement is decided by what feeds or stores it")
            }
            fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
                0
            }
            fn reference(&self, _: &[&Dense], _: &[Type]) -> Vec<Dense> {
                unreachable!("the executor supplies sources")
            }
        }
        impl Cases for $op {
            fn cases() -> Vec<Case> {
                Vec::new()
            }
        }
    };
}

impl Param {
    /// A whole tensor.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, init: Init) -> Self {
        Self { name: name.into(), shape: shape.into(), init, whole: Vec::new(), region: Vec::new() }
    }

    /// The shape of the tensor whose elements it has.
    pub fn whole(&self) -> &[usize] {
        if self.region.is_empty() { &self.shape } else { &self.whole }
    }

    /// The elements that it has.
    pub fn region(&self) -> Region {
        Region::from_numbers(&self.region)
    }
}

impl State {
    /// A whole tensor.
    pub fn new(name: impl Into<String>, ty: Type, init: Init) -> Self {
        let (name, dtype, shape, of) = (name.into(), ty.dtype, ty.shape.to_vec(), String::new());
        Self { name, dtype, shape, init, of, whole: Vec::new(), region: Vec::new() }
    }

    /// The shape of the tensor whose elements it has.
    pub fn whole(&self) -> &[usize] {
        if self.of.is_empty() { &self.shape } else { &self.whole }
    }

    /// The tensor whose elements it has, and which.
    pub fn shard(&self) -> (&str, Region) {
        if self.of.is_empty() { (&self.name, Region::from(0)) } else { (&self.of, Region::from_numbers(&self.region)) }
    }
}

source!(Input, |self| Type::new(self.dtype, self.shape.clone()));
source!(Param, |self| Type::f32(self.shape.clone()));
source!(State, |self| Type::new(self.dtype, self.shape.clone()));

impl Op for Full {
    fn operands(&self) -> Operands {
        Operands::new([], &["value"])
    }
    fn splits(&self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
        split::elementwise(inputs, outputs)
    }
    fn part(&self, split: &Split, units: usize) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Full { shape: split.part_shape(split.outputs[0], &self.shape, units).to_vec(), ..self.clone() }))
    }
    fn infer(&self, _: &[Type]) -> Result<Vec<Type>, String> {
        Ok(vec![Type::new(self.dtype, self.shape.clone())])
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn reference(&self, _: &[&Dense], _: &[Type]) -> Vec<Dense> {
        vec![Dense::from_fn(self.shape.clone(), |_| self.value)]
    }
}

impl Cpu for Full {
    fn run(&self, cx: &mut CpuCx<'_>) {
        match self.dtype {
            DType::F32 => cx.out_f32(0).fill(self.value as f32),
            DType::I32 => cx.out_i32(0).fill(self.value as i32),
            DType::I64 => cx.out_i64(0).fill(self.value as i64),
            DType::Bool => cx.out_u8(0).fill(u8::from(self.value != 0.0)),
            DType::U8 => cx.out_u8(0).fill(self.value as u8),
            DType::BF16 => cx.out_u16(0).fill(half::bf16::from_f64(self.value).to_bits()),
            DType::F16 => cx.out_u16(0).fill(half::f16::from_f64(self.value).to_bits()),
        }
    }
    fn takes_halves(&self) -> bool {
        true
    }
}

impl Cuda for Full {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        moves::fill(cx, self.value)
    }
}

impl Cases for Full {
    fn cases() -> Vec<Case> {
        vec![
            Case::new(Full { value: 1.5, dtype: DType::F32, shape: vec![3, 2] }, []),
            Case::new(Full { value: 7.0, dtype: DType::I32, shape: vec![] }, []),
            Case::new(Full { value: 200.0, dtype: DType::U8, shape: vec![5] }, []),
        ]
    }
}

impl Op for GrainSum {
    fn operands(&self) -> Operands {
        Operands::new([Operand::f32("x")], &["sum"])
    }
    fn splits(&self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
        split::elementwise(inputs, outputs)
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        Ok(inputs.to_vec())
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<crate::builder::Tensor<'b>>> {
        vec![Some(cx.grad())]
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        vec![inputs[0].clone()]
    }
}

impl Cases for GrainSum {
    fn cases() -> Vec<Case> {
        vec![Case::new(GrainSum { of: String::new() }, [crate::op::Arg::real([3, 2]).constant()])]
    }
}
