//! LAMB, after You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2019), in two ops:
//! the norm of the whole direction must be known before any element moves.

use crate::optim::rule::{Update, args, bias_correction, cases, update};
use crate::real::Real;
use kolo_graph::{Case, Cases, op};

op! {
    /// `(param, grad, m, v, scale, step) -> (direction, m, v)`: Adam's step plus the weight decay, before any rate.
    pub struct LambDirection = "lamb_direction" { beta1: f64, beta2: f64, eps: f64, weight_decay: f64 }
}

#[derive(Clone, Copy, Debug)]
pub struct LambNumbers {
    scale: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    /// One over the bias correction of `m`.
    lift: f64,
    /// One over the square root of the bias correction of `v`.
    spread: f64,
}

/// The paper's numbers.
impl Default for LambDirection {
    fn default() -> Self {
        LambDirection { beta1: 0.9, beta2: 0.999, eps: 1e-6, weight_decay: 0.01 }
    }
}

impl Update<4, 2, 3> for LambDirection {
    const TENSORS: [&'static str; 4] = ["param", "grad", "m", "v"];
    const SCALARS: [&'static str; 2] = ["scale", "step"];
    const OUTPUTS: [usize; 3] = [1, 2, 3];
    const FLOPS_PER_ELEMENT: u64 = 15;
    type Numbers = LambNumbers;

    fn numbers(&self, [scale, step]: [f64; 2]) -> LambNumbers {
        let LambDirection { beta1, beta2, eps, weight_decay } = *self;
        let (lift, spread) = (1.0 / bias_correction(beta1, step), 1.0 / bias_correction(beta2, step).sqrt());
        LambNumbers { scale, beta1, beta2, eps, weight_decay, lift, spread }
    }
    #[inline(always)]
    fn element<R: Real>([param, grad, m, v]: [R; 4], n: &LambNumbers) -> [R; 3] {
        let grad = grad * R::of(n.scale);
        let m = m + (grad - m) * R::of(1.0 - n.beta1);
        let v = v * R::of(n.beta2) + grad * grad * R::of(1.0 - n.beta2);
        let step = m * R::of(n.lift) / (v.sqrt() * R::of(n.spread) + R::of(n.eps));
        [step + param * R::of(n.weight_decay), m, v]
    }
}

update! { LambDirection: 4 tensors, 2 scalars, 3 outputs }

impl Cases for LambDirection {
    fn cases() -> Vec<Case> {
        cases(&[LambDirection { beta1: 0.9, beta2: 0.999, eps: 1e-6, weight_decay: 0.1 }])
    }
}

op! {
    /// `(param, direction, param_norm, direction_norm, lr) -> param`: a step along the direction, as long as the ratio of
    /// the norms says. If either norm is zero, the ratio is one.
    pub struct LambApply = "lamb_apply" { }
}

impl Update<2, 3, 1> for LambApply {
    const TENSORS: [&'static str; 2] = ["param", "direction"];
    const SCALARS: [&'static str; 3] = ["param_norm", "direction_norm", "lr"];
    const OUTPUTS: [usize; 1] = [0];
    const FLOPS_PER_ELEMENT: u64 = 2;
    /// The learning rate times the trust ratio.
    type Numbers = f64;

    fn numbers(&self, [param_norm, direction_norm, lr]: [f64; 3]) -> f64 {
        let one = param_norm == 0.0 || direction_norm == 0.0;
        lr * if one { 1.0 } else { param_norm / direction_norm }
    }
    #[inline(always)]
    fn element<R: Real>([param, direction]: [R; 2], rate: &f64) -> [R; 1] {
        [param - direction * R::of(*rate)]
    }
}

update! { LambApply: 2 tensors, 3 scalars, 1 outputs }

impl Cases for LambApply {
    fn cases() -> Vec<Case> {
        let mut cases = cases(&[LambApply {}]);
        for norm in [2, 3] {
            let mut args = args(&LambApply {}, &[7]);
            args[norm] = args[norm].clone().within(0.0, 0.0);
            cases.push(Case::new(LambApply {}, args));
        }
        cases
    }
}
