//! The ops of kolo, one concept per file: attributes, index expression, gradient, definition, CPU kernel and the cases
//! its conformance suite must try. [`registry`] lists them all; the text form, the documentation table and the tests
//! come from that list.

pub mod cast;
pub mod elementwise;
pub mod real;
pub mod reduce;
pub mod simd;
pub mod tiles;

use kolo_graph::sources::{Full, GrainSum, Input, Param, State};
use kolo_graph::{Builder, OpKind, Tensor};

/// Every kind of op.
pub fn registry() -> Vec<OpKind> {
    let sources: &[OpKind] = &[
        OpKind::of::<Input>(),
        OpKind::of::<Param>(),
        OpKind::of::<State>(),
        OpKind::of::<Full>(),
        OpKind::of::<GrainSum>(),
    ];
    [sources, elementwise::KINDS, cast::KINDS, reduce::KINDS].concat()
}

/// The methods of every op, for `use kolo_ops::prelude::*`.
pub mod prelude {
    pub use crate::cast::CastMethods;
    pub use crate::elementwise::ElementwiseMethods;
    pub use crate::reduce::ReduceMethods;
    pub use kolo_graph::{Builder, DType, Graph, Init, Tensor, Type};
}

/// Gradients of the scalar `loss` with respect to each of `wrt`, times `seed`; `None` where there is no dependence.
pub fn gradients<'b>(builder: &'b Builder, loss: Tensor<'b>, seed: f64, wrt: &[Tensor<'b>]) -> Vec<Option<Tensor<'b>>> {
    use elementwise::ElementwiseMethods;
    let seed = builder.full(seed, loss.ty());
    kolo_graph::autodiff::gradients(builder, loss, seed, wrt, |parts| {
        parts[1..].iter().fold(parts[0], |sum, part| sum.add(*part))
    })
}
