//! Losses that are chains of elementwise ops and one mean; fusion joins each chain into one pass over memory.

use crate::elementwise::ElementwiseMethods;
use crate::reduce::ReduceMethods;
use kolo_graph::Tensor;

/// A loss compares like with like: broadcasting `[n]` against `[n, 1]` would quietly compare everything with everything.
fn same_shape(loss: &str, prediction: Tensor<'_>, target: Tensor<'_>) {
    if prediction.shape() != target.shape() {
        let message = format!("the prediction is {}, but the target is {}", prediction.ty(), target.ty());
        prediction.builder().fail(loss, message, "reshape or expand one to the shape of the other");
    }
}

kolo_graph::methods! {
    /// Losses, all of them means over every element.
    LossMethods {
        /// Mean squared error.
        fn mse(self, target: Tensor<'b>) -> Tensor<'b> {
            same_shape("mse", self, target);
            self.sub(target).square().mean_all()
        }
        /// Mean absolute error.
        fn l1(self, target: Tensor<'b>) -> Tensor<'b> {
            same_shape("l1", self, target);
            self.sub(target).abs().mean_all()
        }
        /// Huber's loss: half the squared error within `delta`, linear beyond.
        fn huber_loss(self, target: Tensor<'b>, delta: f32) -> Tensor<'b> {
            same_shape("huber_loss", self, target);
            self.sub(target).huber(delta).mean_all()
        }
        /// Binary cross-entropy of `sigmoid(self)` against targets in `0..=1`.
        ///
        /// `t·softplus(−x) + (1 − t)·softplus(x)`: a loss near zero keeps its digits on either side, where
        /// `softplus(x) − x·t` would cancel.
        fn bce_with_logits(self, target: Tensor<'b>) -> Tensor<'b> {
            same_shape("bce_with_logits", self, target);
            let (hit, miss) = (self.neg().softplus(), self.softplus());
            target.mul(hit).add(target.neg().shift(1.0).mul(miss)).mean_all()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::sources::Input;
    use kolo_graph::{Builder, Dense, Type};

    /// The loss and its gradient for the predictions, by the definitions of the ops.
    fn evaluate(loss: for<'b> fn(Tensor<'b>, Tensor<'b>) -> Tensor<'b>, x: &[f64], t: &[f64]) -> (f64, Vec<f64>) {
        let builder = Builder::new();
        let [prediction, target] = ["x", "t"].map(|name| builder.input(name, Type::f32([x.len()])));
        let value = loss(prediction, target);
        let grad = crate::gradients(&builder, value, 1.0, &[prediction])[0].unwrap().id();
        let value = value.id();
        let graph = builder.finish().unwrap();
        let mut values: Vec<Dense> = Vec::new();
        for node in &graph.nodes {
            let inputs: Vec<&Dense> = node.inputs.iter().map(|id| &values[id.0 as usize]).collect();
            let made = match node.op.downcast::<Input>() {
                Some(input) => vec![Dense::new([x.len()], if input.name == "x" { x } else { t }.to_vec())],
                None => node.op.reference(&inputs, &graph.types(&node.outputs)),
            };
            values.extend(made);
        }
        (values[value.0 as usize].data[0], values[grad.0 as usize].data.clone())
    }

    fn assert_near(got: &[f64], want: &[f64]) {
        assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-6), "{got:?} must be {want:?}");
    }

    #[test]
    fn losses_have_their_textbook_values() {
        let (x, t) = ([1.0, -2.0, 0.5, 4.0], [0.0, -2.5, 0.5, 1.0]);
        let (value, grad) = evaluate(|x, t| x.mse(t), &x, &t);
        assert_near(&[value], &[(1.0 + 0.25 + 9.0) / 4.0]);
        assert_near(&grad, &[0.5, 0.25, 0.0, 1.5]);
        let (value, grad) = evaluate(|x, t| x.l1(t), &x, &t);
        assert_near(&[value], &[4.5 / 4.0]);
        assert_near(&grad, &[0.25, 0.25, 0.0, 0.25]);
        let (value, grad) = evaluate(|x, t| x.huber_loss(t, 2.0), &x, &t);
        assert_near(&[value], &[(0.5 + 0.125 + 2.0 * (3.0 - 1.0)) / 4.0]);
        assert_near(&grad, &[0.25, 0.125, 0.0, 0.5]);
    }

    #[test]
    fn binary_cross_entropy_is_stable_and_right_at_zero() {
        let (value, grad) = evaluate(|x, t| x.bce_with_logits(t), &[0.0, 200.0, -200.0, 2.0], &[1.0, 0.0, 1.0, 0.3]);
        let sigmoid = 1.0 / (1.0 + (-2.0f64).exp());
        let last = -(0.3 * sigmoid.ln() + 0.7 * (1.0 - sigmoid).ln());
        assert_near(&[value], &[(2.0f64.ln() + 400.0 + last) / 4.0]);
        assert_near(&grad, &[-0.125, 0.25, -0.25, (sigmoid - 0.3) / 4.0]);
    }

    #[test]
    fn shapes_that_would_broadcast_are_refused() {
        let builder = Builder::new();
        builder.input("x", Type::f32([3, 1])).mse(builder.input("t", Type::f32([3])));
        let message = builder.finish().unwrap_err().to_string();
        assert!(message.contains("f32[3,1]") && message.contains("hint: reshape"), "{message}");
    }
}
