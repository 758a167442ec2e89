//! Adam, and AdamW when the weight decay is decoupled.

use crate::optim::rule::{Update, bias_correction, cases, decayed, update};
use crate::real::Real;
use kolo_graph::{Case, Cases, op};

op! {
    /// `(param, grad, m, v, lr, scale, step) -> (param, m, v)`. Decoupled weight decay shrinks the parameter itself;
    /// otherwise it is added to the gradient.
    pub struct Adam = "adam" { beta1: f64, beta2: f64, eps: f64, weight_decay: f64, decoupled: bool }
}

#[derive(Clone, Copy, Debug)]
pub struct AdamNumbers {
    scale: f64,
    /// What decoupled decay leaves of the parameter.
    kept: f64,
    /// The weight decay that is added to the gradient.
    penalty: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    /// The learning rate over the bias correction of `m`.
    rate: f64,
    /// One over the square root of the bias correction of `v`.
    spread: f64,
}

/// Adam as PyTorch has it.
impl Default for Adam {
    fn default() -> Self {
        Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, decoupled: false }
    }
}

impl Update<4, 3, 3> for Adam {
    const TENSORS: [&'static str; 4] = ["param", "grad", "m", "v"];
    const SCALARS: [&'static str; 3] = ["lr", "scale", "step"];
    const OUTPUTS: [usize; 3] = [0, 2, 3];
    const FLOPS_PER_ELEMENT: u64 = 16;
    type Numbers = AdamNumbers;

    fn numbers(&self, [lr, scale, step]: [f64; 3]) -> AdamNumbers {
        let Adam { beta1, beta2, eps, weight_decay, decoupled } = *self;
        AdamNumbers {
            scale,
            kept: if decoupled { 1.0 - lr * weight_decay } else { 1.0 },
            penalty: if decoupled { 0.0 } else { weight_decay },
            beta1,
            beta2,
            eps,
            rate: lr / bias_correction(beta1, step),
            spread: 1.0 / bias_correction(beta2, step).sqrt(),
        }
    }
    #[inline(always)]
    fn element<R: Real>([param, grad, m, v]: [R; 4], n: &AdamNumbers) -> [R; 3] {
        let grad = decayed(grad, n.scale, param, n.penalty);
        let m = (grad - m).mul_add(R::of(1.0 - n.beta1), m);
        let v = (grad * grad).mul_add(R::of(1.0 - n.beta2), v * R::of(n.beta2));
        let denominator = v.sqrt().mul_add(R::of(n.spread), R::of(n.eps));
        [param.mul_add(R::of(n.kept), -(m * R::of(n.rate)).over(denominator)), m, v]
    }
}

update! { Adam: 4 tensors, 3 scalars, 3 outputs }

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
