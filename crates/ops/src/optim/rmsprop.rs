//! RMSprop.

use crate::optim::rule::{Update, cases, decayed, update};
use crate::real::Real;
use kolo_graph::{Case, Cases, op};

op! {
    /// `(param, grad, square, velocity, lr, scale) -> (param, square, velocity)`, not centered.
    pub struct Rmsprop = "rmsprop" { alpha: f64, eps: f64, momentum: f64, weight_decay: f64 }
}

/// PyTorch's numbers.
impl Default for Rmsprop {
    fn default() -> Self {
        Rmsprop { alpha: 0.99, eps: 1e-8, momentum: 0.0, weight_decay: 0.0 }
    }
}

impl Update<4, 2, 2, 3> for Rmsprop {
    const TENSORS: [&'static str; 4] = ["param", "grad", "square", "velocity"];
    const SCALARS: [&'static str; 2] = ["lr", "scale"];
    const NUMBERS: [&'static str; 2] = Self::SCALARS;
    const OUTPUTS: [usize; 3] = [0, 2, 3];
    const FLOPS_PER_ELEMENT: u64 = 14;

    fn numbers<R: Real>(&self, scalars: [R; 2]) -> [R; 2] {
        scalars
    }
    #[inline(always)]
    fn element<R: Real>(&self, [param, grad, square, velocity]: [R; 4], [lr, scale]: [R; 2]) -> [R; 3] {
        let grad = decayed(grad, scale, param, self.weight_decay);
        let square = square * R::of(self.alpha) + grad * grad * R::of(1.0 - self.alpha);
        let velocity = velocity * R::of(self.momentum) + grad / (square.sqrt() + R::of(self.eps));
        [param - velocity * lr, square, velocity]
    }
}

update! { Rmsprop: 4 tensors, 2 scalars, 2 numbers, 3 outputs }

impl Cases for Rmsprop {
    fn cases() -> Vec<Case> {
        cases(&[
            Rmsprop { alpha: 0.99, eps: 1e-8, momentum: 0.0, weight_decay: 0.0 },
            Rmsprop { alpha: 0.9, eps: 1e-6, momentum: 0.9, weight_decay: 0.1 },
        ])
    }
}
