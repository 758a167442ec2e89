//! Optimizer updates as ops, so that the update is part of the step's graph: parameter, gradient and moments in, the new
//! parameter and moments out, in one pass over memory and in place.
//!
//! One family per file; [`rule`] holds what they share. The learning rate, the gradient's scale and the number of the
//! step are inputs, because they change; everything else is an attribute. The formulas are PyTorch's where it has them.
//! Nothing here has a gradient.

pub mod adagrad;
pub mod adam;
pub mod lamb;
pub mod lars;
pub mod norm;
pub mod rmsprop;
pub mod round;
pub mod rule;
pub mod sgd;

pub use adagrad::Adagrad;
pub use adam::Adam;
pub use lamb::{LambApply, LambDirection};
pub use lars::Lars;
pub use norm::{ClipScale, OptimMethods, RUN, RunSquares, SumRuns, SumSquares};
pub use rmsprop::Rmsprop;
pub use round::{RoundBf16, round_weights};
pub use sgd::{Sgd, SgdPlain};

use kolo_graph::OpKind;

/// Every op of this folder.
pub const KINDS: &[OpKind] = &[
    OpKind::of::<Sgd>().with_cuda::<Sgd>(),
    OpKind::of::<SgdPlain>().with_cuda::<SgdPlain>(),
    OpKind::of::<Adam>().with_cuda::<Adam>(),
    OpKind::of::<Rmsprop>().with_cuda::<Rmsprop>(),
    OpKind::of::<Adagrad>().with_cuda::<Adagrad>(),
    OpKind::of::<Lars>().with_cuda::<Lars>(),
    OpKind::of::<LambDirection>().with_cuda::<LambDirection>(),
    OpKind::of::<LambApply>().with_cuda::<LambApply>(),
    OpKind::of::<SumSquares>().with_cuda::<SumSquares>(),
    OpKind::of::<RunSquares>().with_cuda::<RunSquares>(),
    OpKind::of::<SumRuns>().with_cuda::<SumRuns>(),
    OpKind::of::<ClipScale>().with_cuda::<ClipScale>(),
    OpKind::of::<RoundBf16>().with_cuda::<RoundBf16>(),
];
