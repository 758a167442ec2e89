//! Stochastic gradient descent, with and without momentum.
//!
//! There is no dampening: PyTorch leaves it out of the first step, so a velocity that starts at zero could not have it.

use crate::optim::rule::{Update, cases, decayed, update};
use crate::real::Real;
use kolo_graph::{Case, Cases, op};

op! {
    /// `(param, grad, velocity, lr, scale) -> (param, velocity)`.
    pub struct Sgd = "sgd" { momentum: f64, nesterov: bool, weight_decay: f64 }
}

#[derive(Clone, Copy, Debug)]
pub struct SgdNumbers {
    lr: f64,
    scale: f64,
    momentum: f64,
    nesterov: bool,
    weight_decay: f64,
}

/// The usual momentum.
impl Default for Sgd {
    fn default() -> Self {
        Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 }
    }
}

impl Update<3, 2, 2> for Sgd {
    const TENSORS: [&'static str; 3] = ["param", "grad", "velocity"];
    const SCALARS: [&'static str; 2] = ["lr", "scale"];
    const OUTPUTS: [usize; 2] = [0, 2];
    const FLOPS_PER_ELEMENT: u64 = 7;
    type Numbers = SgdNumbers;

    fn numbers(&self, [lr, scale]: [f64; 2]) -> SgdNumbers {
        let Sgd { momentum, nesterov, weight_decay } = *self;
        SgdNumbers { lr, scale, momentum, nesterov, weight_decay }
    }
    #[inline(always)]
    fn element<R: Real>([param, grad, velocity]: [R; 3], n: &SgdNumbers) -> [R; 2] {
        let grad = decayed(grad, n.scale, param, n.weight_decay);
        let velocity = velocity * R::of(n.momentum) + grad;
        let direction = if n.nesterov { grad + velocity * R::of(n.momentum) } else { velocity };
        [param - direction * R::of(n.lr), velocity]
    }
}

update! { Sgd: 3 tensors, 2 scalars, 2 outputs }

impl Cases for Sgd {
    fn cases() -> Vec<Case> {
        cases(&[
            Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 },
            Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.1 },
        ])
    }
}

op! {
    /// `(param, grad, lr, scale) -> param`: no momentum, and so no velocity to keep.
    pub struct SgdPlain = "sgd_plain" { weight_decay: f64 }
}

#[derive(Clone, Copy, Debug)]
pub struct SgdPlainNumbers {
    lr: f64,
    scale: f64,
    weight_decay: f64,
}

impl Update<2, 2, 1> for SgdPlain {
    const TENSORS: [&'static str; 2] = ["param", "grad"];
    const SCALARS: [&'static str; 2] = ["lr", "scale"];
    const OUTPUTS: [usize; 1] = [0];
    const FLOPS_PER_ELEMENT: u64 = 5;
    type Numbers = SgdPlainNumbers;

    fn numbers(&self, [lr, scale]: [f64; 2]) -> SgdPlainNumbers {
        SgdPlainNumbers { lr, scale, weight_decay: self.weight_decay }
    }
    #[inline(always)]
    fn element<R: Real>([param, grad]: [R; 2], n: &SgdPlainNumbers) -> [R; 1] {
        [param - decayed(grad, n.scale, param, n.weight_decay) * R::of(n.lr)]
    }
}

update! { SgdPlain: 2 tensors, 2 scalars, 1 outputs }

impl Cases for SgdPlain {
    fn cases() -> Vec<Case> {
        cases(&[SgdPlain { weight_decay: 0.0 }, SgdPlain { weight_decay: 0.1 }])
    }
}
