//! What the three layers declare alike: operands, costs, the wiring of their gradients, and test arguments.

use super::Sizes;
use crate::cast::CastMethods;
use kolo_graph::types::count;
use kolo_graph::{Arg, GradCx, Op, Operand, Operands, Tensor, Type};

/// The operands of a layer that saves these tensors for its gradient.
pub fn operands(saved: &[&'static str]) -> Operands {
    Operands::new(["x", "w_ih", "w_hh", "b_ih", "b_hh"].map(Operand::float), &["y"]).saved(saved)
}

/// The operands of a layer's gradient. `dx` is the last output, and absent if nobody asks for it.
pub fn grad_operands(saved: &[&'static str], biases: &[&'static str]) -> Operands {
    let inputs = [&["x", "w_ih", "w_hh", "y"], saved, &["g"]].concat();
    let outputs = [&["dw_ih", "dw_hh"], biases, &["dx"]].concat();
    Operands::without_rules(inputs.into_iter().map(Operand::float).collect::<Vec<_>>(), &outputs)
}

/// Of a layer whose weights have `gates · h` rows.
pub fn flops(inputs: &[Type], gates: usize) -> u64 {
    let sizes = Sizes::of_types(inputs);
    (sizes.work(gates * sizes.hidden) as u64).saturating_mul(2)
}

pub fn grad_flops(inputs: &[Type], gates: usize, need_dx: bool) -> u64 {
    let sizes = Sizes::of_types(inputs);
    let products = if need_dx { 2 } else { 1 } * sizes.input + 2 * sizes.hidden;
    count(&[2, sizes.batch, sizes.steps, gates, sizes.hidden, products]) as u64
}

/// The gradients of x, both weights and both biases, which `op` makes: one gradient for both biases, or two.
pub fn grad<'b>(cx: &GradCx<'b>, op: impl Op, biases: usize) -> Vec<Option<Tensor<'b>>> {
    let inputs = [&cx.inputs[..3], &cx.outputs[..], &[cx.grad()]].concat();
    let all = cx.grad().builder().apply_all(op, &inputs);
    let dx = cx.needs(0).then(|| all[2 + biases]);
    let of = |at: usize, made: usize| Some(all[made].cast(cx.input(at).dtype()));
    vec![dx, of(1, 0), of(2, 1), of(3, 2), of(4, 1 + biases)]
}

/// Test arguments of a layer. The weights are as small as a new layer's: much larger ones make long sequences chaotic.
pub fn args([batch, steps, input, hidden]: [usize; 4], gates: usize) -> Vec<Arg> {
    let rows = gates * hidden;
    let weights = [vec![rows, input], vec![rows, hidden], vec![rows], vec![rows]];
    let mut args = vec![Arg::real([batch, steps, input])];
    let size = 1.0 / (hidden as f64).sqrt();
    args.extend(weights.map(|shape| Arg::real(shape).within(-size, size)));
    args
}

/// Test arguments of a layer's gradient. With more than one gate, the gates and one more tensor were saved.
pub fn grad_args([batch, steps, input, hidden]: [usize; 4], gates: usize) -> Vec<Arg> {
    let mut args = args([batch, steps, input, hidden], gates);
    args.truncate(3);
    args.push(Arg::real([batch, steps, hidden]).within(-1.0, 1.0));
    if gates > 1 {
        args.push(Arg::real([steps, batch, gates * hidden]).within(0.05, 0.95));
        args.push(Arg::real([steps, batch, hidden]));
    }
    args.push(Arg::real([batch, steps, hidden]));
    constant(args)
}

pub fn constant(args: Vec<Arg>) -> Vec<Arg> {
    args.into_iter().map(Arg::constant).collect()
}
