//! The ops of kolo, one concept per file: attributes, index expression, gradient, definition, CPU kernel and the cases
//! its conformance suite must try. [`registry()`] lists them all; the text form, the documentation table and the tests
//! come from that list.

pub mod adaptive_pool;
pub mod attention;
pub mod avg_pool;
pub mod batch_norm;
pub mod batch_norm_parts;
mod batch_norm_rows;
mod by_id;
pub mod cast;
pub mod channel_order;
pub mod compare;
pub mod concat;
pub mod conv;
pub mod cross_entropy;
pub mod cross_entropy_parts;
mod cuda_map;
mod device;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod extremes;
pub mod fuse;
pub mod gather;
pub mod gemm;
pub mod group_norm;
pub mod halves;
pub mod layer_norm;
pub mod losses;
pub mod lower_precision;
pub mod matmul;
pub mod max_pool;
pub mod movement;
mod moves;
pub mod norm;
pub mod norm_chains;
pub mod optim;
pub mod pad;
pub mod page;
pub mod pairwise;
pub mod pool;
pub mod product_part;
pub mod real;
pub mod recurrent;
pub mod reduce;
mod registry;
pub mod repeat;
pub mod rms_norm;
pub mod rotary;
pub mod row_norm;
pub mod scatter;
pub mod simd;
pub mod slice;
pub mod softmax;
mod sums;
pub mod symbol;
pub mod tiles;
pub mod transpose;

pub use kolo_graph::vectorized;
pub use registry::{cpu_of, cpu_side, cuda_of, register, registry};

#[cfg(not(test))]
use kolo_graph::collective::{
    AfterGrains, AllGather, AllReduce, AllToAll, AxisGather, AxisHalo, AxisJoin, AxisScatter, AxisShift, AxisSum,
    Barrier, Receive, ReduceScatter, Send,
};
#[cfg(not(test))]
use kolo_graph::fetch::Fetch;
#[cfg(not(test))]
use kolo_graph::piece::{Join, Piece};
#[cfg(not(test))]
use kolo_graph::share::{AxisShare, EachGrain, Pack};
#[cfg(not(test))]
use kolo_graph::sources::{Full, GrainSum, Input, Param, State};
use kolo_graph::{Builder, OpKind, Tensor};

/// What every graph is made of, whatever it computes. Executors run all but constants and joins by themselves.
#[cfg(not(test))]
const SOURCES: &[OpKind] = &[
    OpKind::without_kernels::<Input>(),
    OpKind::without_kernels::<Param>(),
    OpKind::without_kernels::<State>(),
    OpKind::of::<Full>().with_cuda::<Full>(),
    OpKind::without_kernels::<GrainSum>(),
    OpKind::without_kernels::<AllReduce>(),
    OpKind::without_kernels::<ReduceScatter>(),
    OpKind::without_kernels::<AllGather>(),
    OpKind::without_kernels::<Barrier>(),
    OpKind::of::<AxisSum>().with_cuda::<AxisSum>(),
    OpKind::of::<AxisGather>().with_cuda::<AxisGather>(),
    OpKind::of::<AxisJoin>().with_cuda::<AxisJoin>(),
    OpKind::of::<AxisScatter>().with_cuda::<AxisScatter>(),
    OpKind::of::<AllToAll>().with_cuda::<AllToAll>(),
    OpKind::of::<AxisShift>().with_cuda::<AxisShift>(),
    OpKind::of::<AxisHalo>().with_cuda::<AxisHalo>(),
    OpKind::of::<Send>().with_cuda::<Send>(),
    OpKind::of::<Receive>().with_cuda::<Receive>(),
    OpKind::without_kernels::<AfterGrains>(),
    OpKind::without_kernels::<Piece>(),
    OpKind::of::<Join>().with_cuda::<Join>(),
    OpKind::of::<Pack>().with_cuda::<Pack>(),
    OpKind::of::<AxisShare>().with_cuda::<AxisShare>(),
    OpKind::without_kernels::<EachGrain>(),
    OpKind::of::<Fetch>().with_cuda::<Fetch>(),
];

/// The registry of this crate's own test binary is empty, so that it does not have all kernels compiled a second time. Tests that want ops
/// by their kinds are in `tests/`.
#[cfg(test)]
fn built_in() -> Vec<OpKind> {
    Vec::new()
}

/// The kinds of this crate.
#[cfg(not(test))]
fn built_in() -> Vec<OpKind> {
    [
        SOURCES,
        elementwise::KINDS,
        fuse::KINDS,
        matmul::KINDS,
        attention::KINDS,
        attention::ring::KINDS,
        cast::KINDS,
        recurrent::KINDS,
        reduce::KINDS,
        softmax::KINDS,
        cross_entropy::KINDS,
        cross_entropy_parts::KINDS,
        extremes::KINDS,
        compare::KINDS,
        optim::KINDS,
        layer_norm::KINDS,
        rms_norm::KINDS,
        batch_norm::KINDS,
        batch_norm_parts::KINDS,
        group_norm::KINDS,
        dropout::KINDS,
        rotary::KINDS,
        transpose::KINDS,
        product_part::KINDS,
        slice::KINDS,
        concat::KINDS,
        conv::KINDS,
        pad::KINDS,
        repeat::KINDS,
        gather::KINDS,
        scatter::KINDS,
        embedding::KINDS,
        max_pool::KINDS,
        avg_pool::KINDS,
        adaptive_pool::KINDS,
    ]
    .concat()
}

/// The methods of every op, for `use kolo_ops::prelude::*`.
pub mod prelude {
    pub use crate::adaptive_pool::AdaptivePoolMethods;
    pub use crate::attention::AttentionMethods;
    pub use crate::attention::cached::CachedAttentionMethods;
    pub use crate::avg_pool::AvgPoolMethods;
    pub use crate::batch_norm::BatchNormMethods;
    pub use crate::cast::CastMethods;
    pub use crate::compare::CompareMethods;
    pub use crate::concat::ConcatMethods;
    pub use crate::conv::ConvMethods;
    pub use crate::cross_entropy::CrossEntropyMethods;
    pub use crate::dropout::DropoutMethods;
    pub use crate::elementwise::ElementwiseMethods;
    pub use crate::embedding::EmbeddingMethods;
    pub use crate::extremes::ExtremeMethods;
    pub use crate::gather::GatherMethods;
    pub use crate::group_norm::GroupNormMethods;
    pub use crate::layer_norm::LayerNormMethods;
    pub use crate::losses::LossMethods;
    pub use crate::matmul::MatMulMethods;
    pub use crate::max_pool::MaxPoolMethods;
    pub use crate::optim::OptimMethods;
    pub use crate::pad::PadMethods;
    pub use crate::recurrent::RecurrentMethods;
    pub use crate::reduce::ReduceMethods;
    pub use crate::repeat::RepeatMethods;
    pub use crate::rms_norm::RmsNormMethods;
    pub use crate::rotary::RotaryMethods;
    pub use crate::scatter::ScatterMethods;
    pub use crate::slice::SliceMethods;
    pub use crate::softmax::SoftmaxMethods;
    pub use crate::transpose::TransposeMethods;
    pub use kolo_graph::{Builder, DType, Graph, Init, Tensor, Type};
}

/// Gradients of the scalar `loss` with respect to each of `wrt`, times `seed`; `None` where there is no dependence.
pub fn gradients<'b>(builder: &'b Builder, loss: Tensor<'b>, seed: f64, wrt: &[Tensor<'b>]) -> Vec<Option<Tensor<'b>>> {
    gradients_from(builder, loss, builder.full(seed, loss.ty()), wrt)
}

/// The same times a seed that the graph computes.
pub fn gradients_from<'b>(
    builder: &'b Builder,
    loss: Tensor<'b>,
    seed: Tensor<'b>,
    wrt: &[Tensor<'b>],
) -> Vec<Option<Tensor<'b>>> {
    use elementwise::ElementwiseMethods;
    kolo_graph::autodiff::gradients(builder, loss, seed, wrt, |parts| {
        parts[1..].iter().fold(parts[0], |sum, part| sum.add(*part))
    })
}
