//! RMSprop.

use crate::optim::rule::{Update, cases, decayed, update};
use crate::real::Real;
use kolo_graph::{Case, Cases, op};

op! {
    /// `(param, grad, square, velocity, lr, scale) -> (param, square, velocity)`, not centered.
    pub struct Rmsprop = "rmsprop" { alpha: f64, eps: f64, momentum: f64, weight_decay: f64 }
}

#[derive(Clone, Copy, Debug)]
pub struct RmspropNumbers {
    lr: f64,
    scale: f64,
    alpha: f64,
    eps: f64,
    momentum: f64,
    weight_decay: f64,
}

/// PyTorch's numbers.
impl Default for Rmsprop {
    fn default() -> Self {
        Rmsprop { alpha: 0.99, eps: 1e-8, momentum: 0.0, weight_decay: 0.0 }
    }
}

impl Update<4, 2, 3> for Rmsprop {
    const TENSORS: [&'static str; 4] = ["param", "grad", "square", "velocity"];
    const SCALARS: [&'static str; 2] = ["lr", "scale"];
    const OUTPUTS: [usize; 3] = [0, 2, 3];
    const FLOPS_PER_ELEMENT: u64 = 14;
    type Numbers = RmspropNumbers;

    fn numbers(&self, [lr, scale]: [f64; 2]) -> RmspropNumbers {
        let Rmsprop { alpha, eps, momentum, weight_decay } = *self;
        RmspropNumbers { lr, scale, alpha, eps, momentum, weight_decay }
    }
    #[inline(always)]
    fn element<R: Real>([param, grad, square, velocity]: [R; 4], n: &RmspropNumbers) -> [R; 3] {
        let grad = decayed(grad, n.scale, param, n.weight_decay);
        let square = square * R::of(n.alpha) + grad * grad * R::of(1.0 - n.alpha);
        let velocity = velocity * R::of(n.momentum) + grad / (square.sqrt() + R::of(n.eps));
        [param - velocity * R::of(n.lr), square, velocity]
    }
}

update! { Rmsprop: 4 tensors, 2 scalars, 3 outputs }

impl Cases for Rmsprop {
    fn cases() -> Vec<Case> {
        cases(&[
            Rmsprop { alpha: 0.99, eps: 1e-8, momentum: 0.0, weight_decay: 0.0 },
            Rmsprop { alpha: 0.9, eps: 1e-6, momentum: 0.9, weight_decay: 0.1 },
        ])
    }
}
