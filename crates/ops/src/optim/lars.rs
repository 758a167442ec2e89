//! LARS, after You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017), algorithm 1.

use crate::optim::rule::{Update, args, cases, decayed, update};
use crate::real::Real;
use kolo_graph::{Case, Cases, op};

op! {
    /// `(param, grad, velocity, param_norm, grad_norm, lr, scale) -> (param, velocity)`.
    ///
    /// `grad_norm` is the norm of `grad` as given, before `scale`. If either norm is zero, the rate is not adapted. As in
    /// the paper, and unlike [`super::Sgd`], the learning rate is part of the velocity.
    pub struct Lars = "lars" { momentum: f64, weight_decay: f64, trust: f64, eps: f64 }
}

/// The paper's numbers.
impl Default for Lars {
    fn default() -> Self {
        Lars { momentum: 0.9, weight_decay: 1e-4, trust: 1e-3, eps: 1e-8 }
    }
}

impl Update<3, 4, 2, 2> for Lars {
    const TENSORS: [&'static str; 3] = ["param", "grad", "velocity"];
    const SCALARS: [&'static str; 4] = ["param_norm", "grad_norm", "lr", "scale"];
    /// The global times the local learning rate.
    const NUMBERS: [&'static str; 2] = ["rate", "scale"];
    const OUTPUTS: [usize; 2] = [0, 2];
    const FLOPS_PER_ELEMENT: u64 = 7;

    fn numbers<R: Real>(&self, [param_norm, grad_norm, lr, scale]: [R; 4]) -> [R; 2] {
        let Lars { weight_decay, trust, eps, .. } = *self;
        let grad_norm = grad_norm * scale;
        let (zero, trust, decay) = (R::of(0.0), R::of(trust), R::of(weight_decay));
        let adapted = trust * param_norm / (grad_norm + decay * param_norm + R::of(eps));
        let is_fixed = param_norm.is_equal(zero) | grad_norm.is_equal(zero);
        [lr * R::select(is_fixed, R::of(1.0), adapted), scale]
    }
    #[inline(always)]
    fn element<R: Real>(&self, [param, grad, velocity]: [R; 3], [rate, scale]: [R; 2]) -> [R; 2] {
        let grad = decayed(grad, scale, param, self.weight_decay);
        let velocity = velocity * R::of(self.momentum) + grad * rate;
        [param - velocity, velocity]
    }
}

update! { Lars: 3 tensors, 4 scalars, 2 numbers, 2 outputs }

impl Cases for Lars {
    fn cases() -> Vec<Case> {
        let usual = Lars { momentum: 0.9, weight_decay: 1e-4, trust: 0.02, eps: 1e-8 };
        let mut cases = cases(&[usual.clone(), Lars { weight_decay: 0.0, ..usual.clone() }]);
        for norm in [3, 4] {
            let mut args = args(&usual, &[7]);
            args[norm] = args[norm].clone().within(0.0, 0.0);
            cases.push(Case::new(usual.clone(), args));
        }
        cases
    }
}
