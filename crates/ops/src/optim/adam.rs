//! Adam, and AdamW when the weight decay is decoupled.

use crate::optim::rule::{Update, cases, decayed, update};
use crate::real::Real;
use kolo_graph::{Case, Cases, op};

op! {
    /// `(param, grad, m, v, lr, scale, step) -> (param, m, v)`. Decoupled weight decay shrinks the parameter itself;
    /// otherwise it is added to the gradient. Where a step is infinite, the parameter becomes infinite or NaN.
    pub struct Adam = "adam" { beta1: f64, beta2: f64, eps: f64, weight_decay: f64, decoupled: bool }
}

/// Adam as PyTorch has it.
impl Default for Adam {
    fn default() -> Self {
        Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, decoupled: false }
    }
}

impl Update<4, 3, 4, 3> for Adam {
    const TENSORS: [&'static str; 4] = ["param", "grad", "m", "v"];
    const SCALARS: [&'static str; 3] = ["lr", "scale", "step"];
    /// What decoupled decay leaves of the parameter; the learning rate over the bias correction of `m`; one over the square
    /// root of the bias correction of `v`.
    const NUMBERS: [&'static str; 4] = ["scale", "kept", "rate", "spread"];
    const OUTPUTS: [usize; 3] = [0, 2, 3];
    const FLOPS_PER_ELEMENT: u64 = 16;

    fn numbers<R: Real>(&self, [lr, scale, step]: [R; 3]) -> [R; 4] {
        let one = R::of(1.0);
        let kept = if self.decoupled { one - lr * R::of(self.weight_decay) } else { one };
        let rate = lr / step.bias_correction(self.beta1);
        [scale, kept, rate, one / step.bias_correction(self.beta2).sqrt()]
    }
    #[inline(always)]
    fn element<R: Real>(&self, [param, grad, m, v]: [R; 4], [scale, kept, rate, spread]: [R; 4]) -> [R; 3] {
        let Adam { beta1, beta2, eps, weight_decay, decoupled } = *self;
        let grad = decayed(grad, scale, param, if decoupled { 0.0 } else { weight_decay });
        let m = (grad - m).mul_add(R::of(1.0 - beta1), m);
        let v = (grad * grad).mul_add(R::of(1.0 - beta2), v * R::of(beta2));
        let denominator = v.sqrt().mul_add(spread, R::of(eps));
        [param.mul_add(kept, -(m * rate).over(denominator)), m, v]
    }
}

update! { Adam: 4 tensors, 3 scalars, 4 numbers, 3 outputs }

impl Cases for Adam {
    fn cases() -> Vec<Case> {
        let usual = Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, decoupled: false };
        cases(&[
            usual.clone(),
            Adam { weight_decay: 0.1, ..usual.clone() },
            Adam { weight_decay: 0.1, decoupled: true, ..usual },
        ])
    }
}
