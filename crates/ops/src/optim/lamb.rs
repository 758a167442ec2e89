//! LAMB, after You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2019), in two ops:
//! the norm of the whole direction must be known before any element moves.

use crate::optim::rule::{Update, args, cases, update};
use crate::real::Real;
use kolo_graph::{Case, Cases, op};

op! {
    /// `(param, grad, m, v, scale, step) -> (direction, m, v)`: Adam's step plus the weight decay, before any rate.
    pub struct LambDirection = "lamb_direction" { beta1: f64, beta2: f64, eps: f64, weight_decay: f64 }
}

/// The paper's numbers.
impl Default for LambDirection {
    fn default() -> Self {
        LambDirection { beta1: 0.9, beta2: 0.999, eps: 1e-6, weight_decay: 0.01 }
    }
}

impl Update<4, 2, 3, 3> for LambDirection {
    const TENSORS: [&'static str; 4] = ["param", "grad", "m", "v"];
    const SCALARS: [&'static str; 2] = ["scale", "step"];
    /// One over the bias correction of `m`; one over the square root of that of `v`.
    const NUMBERS: [&'static str; 3] = ["scale", "lift", "spread"];
    const OUTPUTS: [usize; 3] = [1, 2, 3];
    const FLOPS_PER_ELEMENT: u64 = 15;

    fn numbers<R: Real>(&self, [scale, step]: [R; 2]) -> [R; 3] {
        let one = R::of(1.0);
        [scale, one / step.bias_correction(self.beta1), one / step.bias_correction(self.beta2).sqrt()]
    }
    #[inline(always)]
    fn element<R: Real>(&self, [param, grad, m, v]: [R; 4], [scale, lift, spread]: [R; 3]) -> [R; 3] {
        let grad = grad * scale;
        let m = m + (grad - m) * R::of(1.0 - self.beta1);
        let v = v * R::of(self.beta2) + grad * grad * R::of(1.0 - self.beta2);
        let step = m * lift / (v.sqrt() * spread + R::of(self.eps));
        [step + param * R::of(self.weight_decay), m, v]
    }
}

update! { LambDirection: 4 tensors, 2 scalars, 3 numbers, 3 outputs }

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

impl Update<2, 3, 1, 1> for LambApply {
    const TENSORS: [&'static str; 2] = ["param", "direction"];
    const SCALARS: [&'static str; 3] = ["param_norm", "direction_norm", "lr"];
    /// The learning rate times the trust ratio.
    const NUMBERS: [&'static str; 1] = ["rate"];
    const OUTPUTS: [usize; 1] = [0];
    const FLOPS_PER_ELEMENT: u64 = 2;

    fn numbers<R: Real>(&self, [param_norm, direction_norm, lr]: [R; 3]) -> [R; 1] {
        let zero = R::of(0.0);
        let has_no_ratio = param_norm.is_equal(zero) | direction_norm.is_equal(zero);
        [lr * R::select(has_no_ratio, R::of(1.0), param_norm / direction_norm)]
    }
    #[inline(always)]
    fn element<R: Real>(&self, [param, direction]: [R; 2], [rate]: [R; 1]) -> [R; 1] {
        [param - direction * rate]
    }
}

update! { LambApply: 2 tensors, 3 scalars, 1 numbers, 1 outputs }

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
