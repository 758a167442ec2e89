//! Collectives as ops: what the ranks along an axis of the mesh exchange.
//!
//! The executor starts a collective as soon as its inputs are ready, on a lane of its own, and waits for it where its outputs
//! are first read. A collective may stand anywhere: it runs before, in or after the grains, as its inputs do, and each lane has a
//! communicator of its own for the collectives of its grains, so that neither grains nor lanes reorder them between ranks.
//!
//! There are two families. *Buckets* work in place on tensors that lie side by side: every output is its input's own memory.
//! *Transfers* make a new tensor of one tensor, of another shape if need be, and have gradients. A gradient is that of the sum
//! of all ranks' losses: what each rank's loss has of a tensor adds up. Where there are no other ranks, a transfer is as if all
//! had the same tensor and this were the first.

use crate::builder::Tensor;
use crate::cpu::{Cpu, CpuCx};
use crate::cuda::{Cuda, CudaCalls, CudaCx, moves};
use crate::op;
use crate::op::{Arg, Case, Cases, Dense, GradCx, Op, advance};
use crate::operand::{Operand, Operands};
use crate::split::{self, Split};
use crate::types::{DIMS_MAX, DType, Type};

/// What a collective moves where.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Movement<'a> {
    /// Each tensor becomes its sum over the ranks, in place.
    SumBucket,
    /// The same, at its owner only.
    ScatterBucket {
        owners: &'a [usize],
    },
    /// Each tensor becomes that of its owner, in place.
    GatherBucket {
        owners: &'a [usize],
    },
    /// Nothing moves; all ranks are here.
    Barrier,
    /// The sum over the ranks.
    Sum,
    /// All ranks' tensors, one after the other along a dim.
    Gather {
        dim: usize,
    },
    /// The same of tensors of unequal sizes along the dim.
    Join {
        dim: usize,
        sizes: &'a [usize],
    },
    /// This rank's part, along a dim, of the sum over the ranks.
    Scatter {
        dim: usize,
    },
    /// This rank's run of the sum over the ranks; runs of these sizes, one behind the other.
    Share {
        sizes: &'a [usize],
    },
    /// This rank's part along `split` of every rank's tensor, one after the other along `join`.
    AllToAll {
        split: usize,
        join: usize,
    },
    /// The tensor of the rank `by` places before this one, in a ring.
    Shift {
        by: usize,
    },
    /// What each rank reads of a tensor that they have in runs along a dim.
    Halo(&'a AxisHalo),
    Send {
        to: usize,
        message: &'a str,
    },
    Receive {
        from: usize,
        message: &'a str,
    },
}

/// A collective: along which axis, and what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Collective<'a> {
    pub axis: &'a str,
    pub movement: Movement<'a>,
    /// The size of the axis, if shapes depend on it.
    pub ranks: Option<usize>,
}

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
op! {
    /// The sum over the ranks of an axis, in the order of the balanced tree.
    pub struct AxisSum = "axis_sum" { axis: String, ranks: usize }
}
op! {
    /// The tensors of all ranks of an axis, one after the other along a dim.
    pub struct AxisGather = "axis_gather" { axis: String, dim: usize, ranks: usize }
}
op! {
    /// The tensors of all ranks of an axis, one after the other along a dim, of which each rank's has one of the sizes.
    pub struct AxisJoin = "axis_join" { axis: String, dim: usize, sizes: Vec<usize> }
}
op! {
    /// This rank's part, along a dim, of the sum over the ranks of an axis.
    pub struct AxisScatter = "axis_scatter" { axis: String, dim: usize, ranks: usize }
}
op! {
    /// Of every rank's tensor the part, along the dim `split`, that is this rank's; one after the other along the dim `join`.
    pub struct AllToAll = "all_to_all" { axis: String, split: usize, join: usize, ranks: usize }
}
op! {
    /// The tensor of the rank `by` places before this one along an axis, which is a ring: the first comes after the last.
    pub struct AxisShift = "axis_shift" { axis: String, by: usize, ranks: usize }
}
op! {
    /// A run of a tensor that the ranks of an axis have in runs along a dim: rank `r` has the places from `bounds[r]` to
    /// `bounds[r + 1]` and gets those from `ranges[2r]` to `ranges[2r + 1]`, its own and what others have beside them.
    pub struct AxisHalo = "axis_halo" {
        axis: String, dim: usize, rank: usize, bounds: Vec<usize>, ranges: Vec<usize>
    }
}
op! {
    /// Sends a tensor to another rank of an axis, and passes it on. The receiver must call the message the same.
    pub struct Send = "send" { axis: String, to: usize, message: String }
}
op! {
    /// A tensor that another rank of an axis sends under this name: in every grain, or once before them. With an input, when that
    /// is there.
    pub struct Receive = "receive" {
        axis: String, from: usize, dtype: DType, shape: Vec<usize>, per_step: bool, message: String
    }
}
op! {
    /// A tensor as it is when all grains are done: whoever reads it runs after them.
    pub struct AfterGrains = "after_grains" {}
}

fn infer_bucket(inputs: &[Type], owners: Option<&[usize]>) -> Result<Vec<Type>, String> {
    if let Some(owners) = owners.filter(|owners| owners.len() != inputs.len()) {
        return Err(format!("names {} owners of {} tensors", owners.len(), inputs.len()));
    }
    Ok(inputs.to_vec())
}

macro_rules! bucket {
    ($op:ty, |$self:ident| $owners:expr, $movement:expr, $case:expr) => {
        impl Op for $op {
            fn operands(&self) -> Operands {
                Operands::without_rules([Operand::f32("tensor").many()], &["tensor"])
            }
            fn infer(&$self, inputs: &[Type]) -> Result<Vec<Type>, String> {
                infer_bucket(inputs, $owners)
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
            fn collective(&$self) -> Option<Collective<'_>> {
                Some(Collective { axis: &$self.axis, movement: $movement, ranks: None })
            }
        }
        impl Cases for $op {
            fn cases() -> Vec<Case> {
                vec![Case::new($case, [Arg::real([3, 2]).constant(), Arg::real([5]).constant()])]
            }
        }
    };
}

bucket!(AllReduce, |self| None, Movement::SumBucket, AllReduce { axis: "data".into() });
bucket!(Barrier, |self| None, Movement::Barrier, Barrier { axis: "data".into() });
bucket!(
    ReduceScatter,
    |self| Some(&self.owners),
    Movement::ScatterBucket { owners: &self.owners },
    ReduceScatter { axis: "data".into(), owners: vec![0, 0] }
);
bucket!(
    AllGather,
    |self| Some(&self.owners),
    Movement::GatherBucket { owners: &self.owners },
    AllGather { axis: "data".into(), owners: vec![0, 0] }
);

/// The size of a dim, or what is wrong with the dim.
fn size_of(ty: &Type, dim: usize) -> Result<usize, String> {
    ty.shape.get(dim).copied().ok_or_else(|| format!("{ty} has no dim {dim}"))
}

/// Ranks of one axis: as many as a world has at most.
const RANKS_MAX: usize = 1 << 16;

/// The size of one of `ranks` equal parts of a dim.
fn part_of(ty: &Type, dim: usize, ranks: usize) -> Result<usize, String> {
    let size = size_of(ty, dim)?;
    match size.checked_rem(ranks) {
        Some(0) => Ok(size / ranks),
        _ => Err(format!("dim {dim} of {ty} cannot be cut into {ranks} equal parts")),
    }
}

/// The type with a dim of another size.
fn resized(ty: &Type, dim: usize, size: usize) -> Type {
    let mut ty = ty.clone();
    ty.shape[dim] = size;
    ty
}

/// A transfer along one axis of the mesh can be split along another, in every dim that it leaves as it is.
fn others(inputs: &[Type], outputs: &[Type], movement: Movement<'_>) -> Vec<Split> {
    let moved: &[usize] = match movement {
        Movement::Gather { dim } | Movement::Scatter { dim } | Movement::Join { dim, .. } => &[dim],
        Movement::Halo(halo) => &[halo.dim],
        Movement::AllToAll { split, join } => &[split, join],
        _ => &[],
    };
    let kept = |split: &Split| split.outputs[0].cut().is_some_and(|(dim, _)| !moved.contains(&dim));
    split::elementwise(inputs, outputs).into_iter().filter(kept).collect()
}

/// Element types that can be added up.
const NUMBERS: &[DType] = &[DType::F32, DType::BF16, DType::F16, DType::I32, DType::I64];

macro_rules! transfer {
    ($op:ty, $dtypes:expr, |$self:ident| $movement:expr, |$inputs:ident| $infer:expr, |$grad:ident| $rule:expr, $case:expr) => {
        impl Op for $op {
            fn operands(&self) -> Operands {
                Operands::new([Operand::of("tensor", $dtypes)], &["tensor"])
            }
            fn infer(&$self, $inputs: &[Type]) -> Result<Vec<Type>, String> {
                if $self.ranks == 0 || $self.ranks > RANKS_MAX {
                    return Err(format!("an axis has 1 to {RANKS_MAX} ranks, not {}", $self.ranks));
                }
                $infer
            }
            fn splits(&$self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
                others(inputs, outputs, $movement)
            }
            fn unsplittable(&self) -> Option<&'static str> {
                None
            }
            fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
                0
            }
            fn grad<'b>(&$self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
                let $grad = cx.grad();
                vec![Some($rule)]
            }
            fn reference(&$self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
                let mirror = Mirror::new($movement, $self.ranks, &inputs[0].shape);
                let value = |at: &[usize]| inputs[0].get(&mirror.source(at)[..at.len()]) * mirror.factor as f64;
                vec![Dense::from_fn(outputs[0].shape.clone(), value)]
            }
            fn pure(&self) -> bool {
                false
            }
            fn collective(&$self) -> Option<Collective<'_>> {
                Some(Collective { axis: &$self.axis, movement: $movement, ranks: Some($self.ranks) })
            }
        }
        impl Cpu for $op {
            fn run(&$self, cx: &mut CpuCx<'_>) {
                Mirror::new($movement, $self.ranks, &cx.inputs[0].ty.shape).run(cx);
            }
        }
        impl Cuda for $op {
            fn calls(&$self, cx: &CudaCx<'_>) -> CudaCalls {
                let Mirror { factor, repeats } = Mirror::new($movement, $self.ranks, &cx.inputs[0].shape);
                moves::mirror(cx, factor, repeats)
            }
        }
        impl Cases for $op {
            fn cases() -> Vec<Case> {
                let shapes: [&[usize]; 3] = [&[3, 4], &[1, 70], &[2, 4, 3]];
                shapes.into_iter().map(|shape| Case::new($case, [Arg::real(shape)])).collect()
            }
        }
    };
}

transfer!(
    AxisSum,
    NUMBERS,
    |self| Movement::Sum,
    |inputs| Ok(inputs.to_vec()),
    |grad| grad.then(self.clone(), &[]),
    AxisSum { axis: "tensor".into(), ranks: 1 }
);
transfer!(
    AxisGather,
    &DType::ALL,
    |self| Movement::Gather { dim: self.dim },
    |inputs| {
        let size = size_of(&inputs[0], self.dim)?;
        Ok(vec![resized(&inputs[0], self.dim, size.saturating_mul(self.ranks))])
    },
    |grad| grad.then(AxisScatter { axis: self.axis.clone(), dim: self.dim, ranks: self.ranks }, &[]),
    AxisGather { axis: "tensor".into(), dim: 1, ranks: 1 }
);
transfer!(
    AxisScatter,
    NUMBERS,
    |self| Movement::Scatter { dim: self.dim },
    |inputs| Ok(vec![resized(&inputs[0], self.dim, part_of(&inputs[0], self.dim, self.ranks)?)]),
    |grad| grad.then(AxisGather { axis: self.axis.clone(), dim: self.dim, ranks: self.ranks }, &[]),
    AxisScatter { axis: "tensor".into(), dim: 0, ranks: 1 }
);
transfer!(
    AllToAll,
    &DType::ALL,
    |self| Movement::AllToAll { split: self.split, join: self.join },
    |inputs| {
        let part = part_of(&inputs[0], self.split, self.ranks)?;
        let cut = resized(&inputs[0], self.split, part);
        let size = size_of(&cut, self.join)?;
        Ok(vec![resized(&cut, self.join, size.saturating_mul(self.ranks))])
    },
    |grad| {
        let Self { axis, split, join, ranks } = self.clone();
        grad.then(AllToAll { axis, split: join, join: split, ranks }, &[])
    },
    AllToAll { axis: "tensor".into(), split: 0, join: 1, ranks: 1 }
);

transfer!(
    AxisShift,
    &DType::ALL,
    |self| Movement::Shift { by: self.by },
    |inputs| match self.by < self.ranks {
        true => Ok(inputs.to_vec()),
        false => Err(format!("{} places of a ring of {} ranks are too many", self.by, self.ranks)),
    },
    |grad| {
        let Self { axis, by, ranks } = self.clone();
        grad.then(AxisShift { axis, by: (ranks - by) % ranks, ranks }, &[])
    },
    AxisShift { axis: "context".into(), by: 0, ranks: 1 }
);

/// A transfer where there are no other ranks: as if this were the first, and all others had the same tensor.
struct Mirror {
    /// Every element is so many times its source.
    factor: usize,
    /// Along this dim the source repeats after so many elements.
    repeats: Option<(usize, usize)>,
}

impl Mirror {
    fn new(movement: Movement<'_>, ranks: usize, shape: &[usize]) -> Self {
        let (factor, repeats) = match movement {
            Movement::Gather { dim } => (1, Some((dim, shape[dim]))),
            Movement::AllToAll { split, join } if split == join => (1, Some((join, shape[join] / ranks))),
            Movement::AllToAll { join, .. } => (1, Some((join, shape[join]))),
            Movement::Shift { .. } => (1, None),
            _ => (ranks, None),
        };
        Self { factor, repeats }
    }

    /// The index of the element that the one at `at` is made of.
    fn source(&self, at: &[usize]) -> [usize; DIMS_MAX] {
        let mut source = [0; DIMS_MAX];
        source[..at.len()].copy_from_slice(at);
        if let Some((dim, size)) = self.repeats {
            source[dim] %= size.max(1);
        }
        source
    }

    fn run(&self, cx: &CpuCx<'_>) {
        let (from, to) = (&cx.inputs[0], &cx.outputs[0]);
        let bytes = from.ty.dtype.bytes();
        if from.ty.elements() == 0 {
            // Who has nothing has zeros of all others. SAFETY: the output holds that many bytes.
            return unsafe { std::ptr::write_bytes(to.data, 0, to.ty.bytes()) };
        }
        let mut at = [0; DIMS_MAX];
        let rank = to.ty.rank();
        for element in 0..to.ty.elements() {
            let source = self.source(&at[..rank]);
            let offset = from.ty.shape.iter().zip(source).fold(0, |offset, (size, at)| offset * size + at);
            // SAFETY: both elements lie inside their tensors, whose memories are distinct.
            unsafe {
                let (source, place) = (from.data.add(offset * bytes), to.data.add(element * bytes));
                match from.ty.dtype {
                    DType::F32 => *place.cast::<f32>() = *source.cast::<f32>() * self.factor as f32,
                    DType::I32 => *place.cast::<i32>() = (*source.cast::<i32>()).wrapping_mul(self.factor as i32),
                    DType::I64 => *place.cast::<i64>() = (*source.cast::<i64>()).wrapping_mul(self.factor as i64),
                    _ => std::ptr::copy_nonoverlapping(source, place, bytes),
                }
            }
            advance(&mut at[..rank], &to.ty.shape);
        }
    }
}

/// What a tensor that is sent is to its sender.
fn copy(cx: &CpuCx<'_>) {
    let (from, to) = (&cx.inputs[0], &cx.outputs[0]);
    // SAFETY: both hold the bytes of the output, and an output is disjoint from the inputs.
    unsafe { std::ptr::copy_nonoverlapping(from.data, to.data, to.ty.bytes()) };
}

impl Op for Send {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::any("tensor")], &["tensor"])
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
    fn pure(&self) -> bool {
        false
    }
    fn collective(&self) -> Option<Collective<'_>> {
        let movement = Movement::Send { to: self.to, message: &self.message };
        Some(Collective { axis: &self.axis, movement, ranks: None })
    }
}

impl Cpu for Send {
    fn run(&self, cx: &mut CpuCx<'_>) {
        copy(cx);
    }
}

impl Cuda for Send {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        moves::copy(cx)
    }
}

impl Cases for Send {
    fn cases() -> Vec<Case> {
        vec![Case::new(
            Send { axis: "pipeline".into(), to: 0, message: "%1 h.0".into() },
            [Arg::real([3, 4]).constant()],
        )]
    }
}

impl AxisJoin {
    fn check(&self, input: &Type) -> Result<Type, String> {
        let size = size_of(input, self.dim)?;
        if !self.sizes.contains(&size) || self.sizes.len() > RANKS_MAX {
            return Err(format!("dim {} of {input} is not one of the sizes {:?}", self.dim, self.sizes));
        }
        let all = self.sizes.iter().try_fold(0usize, |all, size| all.checked_add(*size));
        Ok(resized(input, self.dim, all.ok_or("the sizes are too large")?))
    }
}

impl Op for AxisJoin {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::any("tensor")], &["tensor"])
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        Ok(vec![self.check(&inputs[0])?])
    }
    fn splits(&self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
        others(inputs, outputs, Movement::Join { dim: self.dim, sizes: &self.sizes })
    }
    fn unsplittable(&self) -> Option<&'static str> {
        None
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let mirror = Mirror { factor: 1, repeats: Some((self.dim, inputs[0].shape[self.dim])) };
        if inputs[0].data.is_empty() {
            return vec![Dense::zeros(outputs[0].shape.clone())];
        }
        vec![Dense::from_fn(outputs[0].shape.clone(), |at| inputs[0].get(&mirror.source(at)[..at.len()]))]
    }
    fn pure(&self) -> bool {
        false
    }
    fn collective(&self) -> Option<Collective<'_>> {
        let movement = Movement::Join { dim: self.dim, sizes: &self.sizes };
        Some(Collective { axis: &self.axis, movement, ranks: Some(self.sizes.len()) })
    }
}

impl Cpu for AxisJoin {
    fn run(&self, cx: &mut CpuCx<'_>) {
        Mirror { factor: 1, repeats: Some((self.dim, cx.inputs[0].ty.shape[self.dim])) }.run(cx);
    }
}

impl Cuda for AxisJoin {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        moves::mirror(cx, 1, Some((self.dim, cx.inputs[0].shape[self.dim])))
    }
}

impl Cases for AxisJoin {
    fn cases() -> Vec<Case> {
        vec![Case::new(AxisJoin { axis: "tensor".into(), dim: 1, sizes: vec![4] }, [Arg::real([3, 4]).constant()])]
    }
}

impl Op for Receive {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::any("after").optional()], &["tensor"])
    }
    fn infer(&self, _: &[Type]) -> Result<Vec<Type>, String> {
        Ok(vec![Type::new(self.dtype, self.shape.clone())])
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn reference(&self, _: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        vec![Dense::zeros(outputs[0].shape.clone())]
    }
    fn pure(&self) -> bool {
        false
    }
    fn collective(&self) -> Option<Collective<'_>> {
        let movement = Movement::Receive { from: self.from, message: &self.message };
        Some(Collective { axis: &self.axis, movement, ranks: None })
    }
}

impl Cpu for Receive {
    fn run(&self, cx: &mut CpuCx<'_>) {
        // SAFETY: the output holds that many bytes.
        unsafe { std::ptr::write_bytes(cx.outputs[0].data, 0, cx.outputs[0].ty.bytes()) };
    }
}

impl Cuda for Receive {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        moves::fill(cx, 0.0)
    }
}

impl Cases for Receive {
    fn cases() -> Vec<Case> {
        let (axis, shape, message) = ("pipeline".into(), vec![3, 4], "%1 h.0".into());
        vec![Case::new(Receive { axis, from: 0, dtype: DType::F32, shape, per_step: true, message }, [])]
    }
}

/// An op whose output is its input, and that only says when its readers run.
macro_rules! same_tensor {
    ($op:ty, $make:expr) => {
        impl $crate::op::Op for $op {
            fn operands(&self) -> $crate::operand::Operands {
                $crate::operand::Operands::without_rules([$crate::operand::Operand::any("tensor")], &["tensor"])
            }
            fn splits(&self, inputs: &[$crate::Type], outputs: &[$crate::Type]) -> Vec<$crate::Split> {
                $crate::split::elementwise(inputs, outputs)
            }
            fn infer(&self, inputs: &[$crate::Type]) -> Result<Vec<$crate::Type>, String> {
                Ok(inputs.to_vec())
            }
            fn flops(&self, _: &[$crate::Type], _: &[$crate::Type]) -> u64 {
                0
            }
            fn reference(&self, inputs: &[&$crate::Dense], _: &[$crate::Type]) -> Vec<$crate::Dense> {
                vec![inputs[0].clone()]
            }
            fn view(&self) -> bool {
                true
            }
        }

        impl $crate::op::Cases for $op {
            fn cases() -> Vec<$crate::op::Case> {
                vec![$crate::op::Case::new($make, [$crate::op::Arg::real([3, 4]).constant()])]
            }
        }
    };
}
pub(crate) use same_tensor;

same_tensor!(AfterGrains, AfterGrains {});

impl<'b> Tensor<'b> {
    /// The sum over the `ranks` ranks of an axis.
    pub fn axis_sum(self, axis: &str, ranks: usize) -> Tensor<'b> {
        self.then(AxisSum { axis: axis.into(), ranks }, &[])
    }

    /// The tensors of all `ranks` ranks of an axis, one after the other along a dim.
    pub fn axis_gather(self, axis: &str, dim: usize, ranks: usize) -> Tensor<'b> {
        self.then(AxisGather { axis: axis.into(), dim, ranks }, &[])
    }

    /// This rank's part, along a dim, of the sum over the `ranks` ranks of an axis.
    pub fn axis_scatter(self, axis: &str, dim: usize, ranks: usize) -> Tensor<'b> {
        self.then(AxisScatter { axis: axis.into(), dim, ranks }, &[])
    }

    /// The tensor of the rank `by` places before this one in the ring of an axis.
    pub fn axis_shift(self, axis: &str, by: usize, ranks: usize) -> Tensor<'b> {
        self.then(AxisShift { axis: axis.into(), by, ranks }, &[])
    }

    /// Of every rank's tensor this rank's part along `split`, one after the other along `join`.
    pub fn all_to_all(self, axis: &str, split: usize, join: usize, ranks: usize) -> Tensor<'b> {
        self.then(AllToAll { axis: axis.into(), split, join, ranks }, &[])
    }
}
