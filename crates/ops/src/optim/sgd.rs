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

/// The usual momentum.
impl Default for Sgd {
    fn default() -> Self {
        Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 }
    }
}

impl Update<3, 2, 2, 2> for Sgd {
    const TENSORS: [&'static str; 3] = ["param", "grad", "velocity"];
    const SCALARS: [&'static str; 2] = ["lr", "scale"];
    const NUMBERS: [&'static str; 2] = Self::SCALARS;
    const OUTPUTS: [usize; 2] = [0, 2];
    const FLOPS_PER_ELEMENT: u64 = 7;

    fn numbers<R: Real>(&self, scalars: [R; 2]) -> [R; 2] {
        scalars
    }
    #[inline(always)]
    fn element<R: Real>(&self, [param, grad, velocity]: [R; 3], [lr, scale]: [R; 2]) -> [R; 2] {
        let momentum = R::of(self.momentum);
        let grad = decayed(grad, scale, param, self.weight_decay);
        let velocity = velocity * momentum + grad;
        let direction = if self.nesterov { grad + velocity * momentum } else { velocity };
        [param - direction * lr, velocity]
    }
}

update! { Sgd: 3 tensors, 2 scalars, 2 numbers, 2 outputs }

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

impl Update<2, 2, 2, 1> for SgdPlain {
    const TENSORS: [&'static str; 2] = ["param", "grad"];
    const SCALARS: [&'static str; 2] = ["lr", "scale"];
    const NUMBERS: [&'static str; 2] = Self::SCALARS;
    const OUTPUTS: [usize; 1] = [0];
    const FLOPS_PER_ELEMENT: u64 = 5;

    fn numbers<R: Real>(&self, scalars: [R; 2]) -> [R; 2] {
        scalars
    }
    #[inline(always)]
    fn element<R: Real>(&self, [param, grad]: [R; 2], [lr, scale]: [R; 2]) -> [R; 1] {
        [param - decayed(grad, scale, param, self.weight_decay) * lr]
    }
}

update! { SgdPlain: 2 tensors, 2 scalars, 2 numbers, 1 outputs }

impl Cases for SgdPlain {
    fn cases() -> Vec<Case> {
        cases(&[SgdPlain { weight_decay: 0.0 }, SgdPlain { weight_decay: 0.1 }])
    }
}
