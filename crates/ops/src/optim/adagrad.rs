//! Adagrad.

use crate::optim::rule::{Update, cases, decayed, update};
use crate::real::Real;
use kolo_graph::{Case, Cases, op};

op! {
    /// `(param, grad, sum, lr, scale, step) -> (param, sum)`.
    pub struct Adagrad = "adagrad" { eps: f64, weight_decay: f64, lr_decay: f64 }
}

/// PyTorch's numbers.
impl Default for Adagrad {
    fn default() -> Self {
        Adagrad { eps: 1e-10, weight_decay: 0.0, lr_decay: 0.0 }
    }
}

impl Update<3, 3, 2, 2> for Adagrad {
    const TENSORS: [&'static str; 3] = ["param", "grad", "sum"];
    const SCALARS: [&'static str; 3] = ["lr", "scale", "step"];
    /// The learning rate after its decay.
    const NUMBERS: [&'static str; 2] = ["rate", "scale"];
    const OUTPUTS: [usize; 2] = [0, 2];
    const FLOPS_PER_ELEMENT: u64 = 10;

    fn numbers<R: Real>(&self, [lr, scale, step]: [R; 3]) -> [R; 2] {
        let one = R::of(1.0);
        [lr / (one + (step - one) * R::of(self.lr_decay)), scale]
    }
    #[inline(always)]
    fn element<R: Real>(&self, [param, grad, sum]: [R; 3], [rate, scale]: [R; 2]) -> [R; 2] {
        let grad = decayed(grad, scale, param, self.weight_decay);
        let sum = sum + grad * grad;
        [param - grad * rate / (sum.sqrt() + R::of(self.eps)), sum]
    }
}

update! { Adagrad: 3 tensors, 3 scalars, 2 numbers, 2 outputs }

impl Cases for Adagrad {
    fn cases() -> Vec<Case> {
        cases(&[
            Adagrad { eps: 1e-10, weight_decay: 0.0, lr_decay: 0.0 },
            Adagrad { eps: 1e-10, weight_decay: 0.1, lr_decay: 0.05 },
        ])
    }
}
