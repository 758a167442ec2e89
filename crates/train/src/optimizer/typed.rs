//! Optimizers for programs: from a rule and a rate, without a job file.

use super::{Optimizer, RATE_MAX, Rule, StepScalars};
use kolo_graph::{Builder, Init, Tensor, Type};
use kolo_ops::optim::{Adagrad, Adam, LambDirection, Lars, Rmsprop, Sgd, SgdPlain};
use kolo_ops::prelude::*;

/// A number of an optimizer that cannot be meant.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("`{key}` of the optimizer must be {wanted}, but is {value}\n  hint: {hint}")]
pub struct OptimizerError {
    pub key: &'static str,
    pub wanted: String,
    pub value: f64,
    pub hint: &'static str,
}

macro_rules! rules {
    ($($op:ident => $rule:ident),* $(,)?) => {$(
        impl From<$op> for Rule {
            fn from(op: $op) -> Self {
                Rule::$rule(op)
            }
        }
    )*};
}

rules!(
    Sgd => Sgd, SgdPlain => SgdPlain, Adam => Adam, Rmsprop => Rmsprop, Adagrad => Adagrad, Lars => Lars,
    LambDirection => Lamb,
);

/// The limits of one number: its name, its value, the largest, and whether that itself is allowed.
type Limit = (&'static str, f64, f64, bool);

fn limits(rule: &Rule) -> Vec<Limit> {
    let decay = |value: f64| ("weight_decay", value, RATE_MAX, true);
    let share = |key, value| (key, value, 1.0, true);
    // A memory of 1 would divide by zero.
    let beta = |key, value| (key, value, 1.0, false);
    match rule {
        Rule::Sgd(op) => vec![share("momentum", op.momentum), decay(op.weight_decay)],
        Rule::SgdPlain(op) => vec![decay(op.weight_decay)],
        Rule::Adam(op) => {
            vec![beta("beta1", op.beta1), beta("beta2", op.beta2), share("eps", op.eps), decay(op.weight_decay)]
        }
        Rule::Rmsprop(op) => {
            vec![share("alpha", op.alpha), share("momentum", op.momentum), share("eps", op.eps), decay(op.weight_decay)]
        }
        Rule::Adagrad(op) => {
            vec![share("eps", op.eps), ("lr_decay", op.lr_decay, RATE_MAX, true), decay(op.weight_decay)]
        }
        Rule::Lars(op) => vec![
            share("momentum", op.momentum),
            ("trust", op.trust, RATE_MAX, true),
            share("eps", op.eps),
            decay(op.weight_decay),
        ],
        Rule::Lamb(op) => {
            vec![beta("beta1", op.beta1), beta("beta2", op.beta2), share("eps", op.eps), decay(op.weight_decay)]
        }
    }
}

impl Optimizer {
    /// An optimizer with this learning rate and rule, such as `Adam { weight_decay: 0.1, ..Adam::default() }`.
    pub fn new(lr: f64, rule: impl Into<Rule>) -> Result<Self, OptimizerError> {
        let rule = rule.into();
        for (key, value, most, inclusive) in [vec![("lr", lr, RATE_MAX, true)], limits(&rule)].concat() {
            if !(0.0..=most).contains(&value) || (value == most && !inclusive) {
                let wanted = format!("from 0 to {}{most}", if inclusive { "" } else { "below " });
                let hint = "the default values of the rule are a good start";
                return Err(OptimizerError { key, wanted, value, hint });
            }
        }
        Ok(Self { lr, rule })
    }

    /// Plain gradient descent.
    pub fn sgd(lr: f64) -> Result<Self, OptimizerError> {
        Self::new(lr, SgdPlain { weight_decay: 0.0 })
    }

    /// Adam.
    pub fn adam(lr: f64) -> Result<Self, OptimizerError> {
        Self::new(lr, Adam::default())
    }

    /// Adam with a decoupled weight decay of 0.01.
    pub fn adamw(lr: f64) -> Result<Self, OptimizerError> {
        Self::new(lr, Adam { weight_decay: 0.01, decoupled: true, ..Adam::default() })
    }

    /// Appends the gradients of `loss`, a scalar, and the update of every parameter it depends on, at the optimizer's own
    /// rate. The step is counted in the state `optim.step`. For another rate at every step, or a sum over grains, build
    /// these parts with [`Optimizer::update`].
    pub fn minimize<'b>(&self, builder: &'b Builder, loss: Tensor<'b>) {
        let params: Vec<_> = builder.graph().params().map(|(id, op)| (id, op.name.clone())).collect();
        let tensors: Vec<Tensor<'b>> = params.iter().map(|(id, _)| builder.tensor(*id)).collect();
        let grads = kolo_ops::gradients(builder, loss, 1.0, &tensors);
        let (lr, scale) = (builder.scalar(self.lr), builder.scalar(1.0));
        let counter = builder.state("optim.step", Type::f32([]), Init::ZEROS);
        let step = counter.shift(1.0);
        builder.update(counter, step);
        for (((_, name), param), grad) in params.iter().zip(tensors).zip(grads) {
            if let Some(grad) = grad {
                self.update(builder, name, param, grad, StepScalars { lr, scale, step });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_exec::{Options, Session, Store, Values};

    /// Fits `y = 3x + ½` and tells the last loss.
    fn fit(optimizer: &Optimizer, steps: usize) -> f32 {
        let builder = Builder::new();
        let [x, y] = ["x", "y"].map(|name| builder.input(name, Type::f32([8, 1])));
        let weight = builder.param("weight", [1, 1], Init::ZEROS);
        let bias = builder.param("bias", [1], Init::ZEROS);
        let loss = x.linear(weight, Some(bias)).mse(y);
        optimizer.minimize(&builder, loss);
        builder.output("loss", loss);
        let graph = builder.finish().unwrap();
        let mut store = Store::new(&graph, 1);
        let mut session = Session::new(graph, &store, Options::single(1));
        let inputs: Vec<f32> = (0..8).map(|at| at as f32 / 4.0 - 1.0).collect();
        let targets: Vec<f32> = inputs.iter().map(|x| 3.0 * x + 0.5).collect();
        for _ in 0..steps {
            session.step(&mut store, &[("x", Values::from(&inputs)), ("y", Values::from(&targets))]).unwrap();
        }
        assert_eq!(store.tensor("optim.step").unwrap().to_f64(), [steps as f64]);
        session.tensor("loss").unwrap().values::<f32>().unwrap()[0]
    }

    #[test]
    fn every_rule_can_be_built_without_settings_and_learns() {
        let rules: [(f64, Rule); 7] = [
            (0.1, SgdPlain { weight_decay: 0.0 }.into()),
            (0.1, Sgd::default().into()),
            (0.1, Adam::default().into()),
            (0.01, Rmsprop::default().into()),
            (0.5, Adagrad::default().into()),
            (0.05, Lars { weight_decay: 0.0, trust: 0.05, ..Lars::default() }.into()),
            (0.1, LambDirection { weight_decay: 0.0, ..LambDirection::default() }.into()),
        ];
        for (lr, rule) in rules {
            let optimizer = Optimizer::new(lr, rule).unwrap();
            let (early, late) = (fit(&optimizer, 5), fit(&optimizer, 300));
            assert!(late < early * 0.5 && late.is_finite(), "{optimizer:?}: {early}, then {late}");
        }
    }

    #[test]
    fn numbers_that_cannot_be_meant_are_refused() {
        let error = Optimizer::new(1e-3, Adam { beta2: 1.0, ..Adam::default() }).unwrap_err();
        assert!(
            error.to_string().starts_with("`beta2` of the optimizer must be from 0 to below 1, but is 1"),
            "{error}"
        );
        assert_eq!(Optimizer::sgd(f64::NAN).unwrap_err().key, "lr");
        assert_eq!(Optimizer::adamw(-1.0).unwrap_err().key, "lr");
    }
}
