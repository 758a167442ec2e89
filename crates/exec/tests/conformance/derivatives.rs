//! Derivatives beyond the first of the first output: second ones, and those of further outputs. Each equals central
//! differences or is an error that names the op. Directions are random, so that one difference judges all elements.

use super::{for_each_case, name, source, weight};
use kolo_exec::reference;
use kolo_graph::op::{Case, Dense};
use kolo_graph::operand::Gradient;
use kolo_graph::rng::Stream;
use kolo_graph::{Builder, Graph, GraphError, Tensor, ValueId};
use kolo_ops::prelude::*;

/// Elements of a case that is differentiated twice.
const ELEMENTS_MAX: usize = 600;
const STEP: f64 = 1e-4;

struct Built {
    graph: Graph,
    value: ValueId,
    /// For each input that is differentiated: its gradient, if the value depends on it.
    grads: Vec<(usize, Option<ValueId>)>,
}

fn inputs_of<'b>(builder: &'b Builder, case: &Case) -> Vec<Tensor<'b>> {
    case.args.iter().enumerate().map(|(at, arg)| builder.input(&name(at), arg.ty.clone())).collect()
}

/// `Σ w·x` with fixed weights, which come in as input `slot`.
fn weighed<'b>(builder: &'b Builder, x: Tensor<'b>, slot: usize) -> Tensor<'b> {
    x.mul(builder.input(&name(slot), x.ty())).sum_all()
}

fn differentiated(case: &Case) -> Vec<usize> {
    (0..case.args.len()).filter(|at| case.args[*at].differentiate).collect()
}

fn with_grads<'b>(builder: &'b Builder, loss: Tensor<'b>, case: &Case, inputs: &[Tensor<'b>]) -> Vec<Option<ValueId>> {
    let wrt: Vec<Tensor<'b>> = differentiated(case).iter().map(|at| inputs[*at]).collect();
    kolo_ops::gradients(builder, loss, 1.0, &wrt).into_iter().map(|grad| grad.map(|grad| grad.id())).collect()
}

/// The gradient of the gradient of the first output.
fn twice(case: &Case) -> Result<Built, GraphError> {
    let builder = Builder::new();
    let inputs = inputs_of(&builder, case);
    let loss = weighed(&builder, builder.apply_arc(case.op.clone(), &inputs)[0], inputs.len());
    let first = with_grads(&builder, loss, case, &inputs);
    let mut parts = Vec::new();
    for (at, grad) in first.iter().flatten().enumerate() {
        parts.push(weighed(&builder, builder.tensor(*grad), inputs.len() + 1 + at));
    }
    let second = parts[1..].iter().fold(parts[0], |sum, part| sum.add(*part));
    let grads = differentiated(case).into_iter().zip(with_grads(&builder, second, case, &inputs)).collect();
    let value = second.id();
    Ok(Built { graph: builder.finish()?, value, grads })
}

/// The gradient of output `slot`.
fn of_output(case: &Case, slot: usize) -> Result<Built, GraphError> {
    let builder = Builder::new();
    let inputs = inputs_of(&builder, case);
    let loss = weighed(&builder, builder.apply_arc(case.op.clone(), &inputs)[slot], inputs.len());
    let grads = differentiated(case).into_iter().zip(with_grads(&builder, loss, case, &inputs)).collect();
    let value = loss.id();
    Ok(Built { graph: builder.finish()?, value, grads })
}

fn noise(seed: u64, count: usize) -> Vec<f64> {
    let stream = Stream::new(seed, "directions");
    (0..count).map(|at| weight(&stream, at) - 1.0).collect()
}

/// Compares each gradient with the difference along a random direction.
fn compare(built: &Built, inputs: &[Dense]) {
    let mut all = inputs.to_vec();
    let mut extra: Vec<(usize, Vec<usize>)> = Vec::new();
    for (id, op) in built.graph.inputs() {
        let slot: usize = op.name[1..].parse().unwrap();
        if slot >= inputs.len() {
            extra.push((slot, built.graph.ty(id).shape.to_vec()));
        }
    }
    extra.sort();
    all.extend(extra.into_iter().map(|(slot, shape)| {
        let count = shape.iter().product();
        Dense::new(shape, noise(slot as u64, count).iter().map(|x| x + 1.3).collect())
    }));
    let evaluate = |all: &[Dense]| reference::evaluate(&built.graph, source(all)).unwrap();
    let values = evaluate(&all);
    for (at, grad) in &built.grads {
        let direction = noise(77, all[*at].data.len());
        let moved = |by: f64| {
            let mut all = all.clone();
            all[*at].data.iter_mut().zip(&direction).for_each(|(x, d)| *x += by * STEP * d);
            evaluate(&all)[built.value.0 as usize].data[0]
        };
        let numeric = (8.0 * (moved(1.0) - moved(-1.0)) - (moved(2.0) - moved(-2.0))) / (12.0 * STEP);
        let terms: Vec<f64> = match grad {
            Some(id) => values[id.0 as usize].data.iter().zip(&direction).map(|(g, d)| g * d).collect(),
            None => Vec::new(),
        };
        let (analytic, size): (f64, f64) = (terms.iter().sum(), terms.iter().map(|x| x.abs()).sum());
        let bound = 2e-5 * (size + numeric.abs() + 1.0);
        assert!((analytic - numeric).abs() <= bound, "by input {at}: {analytic}, but differences say {numeric}");
    }
}

fn is_small(case: &Case) -> bool {
    case.args.iter().any(|arg| arg.differentiate)
        && case.args.iter().map(|arg| arg.ty.elements()).sum::<usize>() <= ELEMENTS_MAX
}

#[test]
fn second_derivatives_are_right_or_refused() {
    for_each_case(|_, case, inputs| {
        if !is_small(case) {
            return;
        }
        match twice(case) {
            Ok(built) => compare(&built, inputs),
            Err(error) => {
                let known = kolo_ops::registry().iter().any(|kind| kind.name == error.op);
                assert!(known && error.message.contains("no gradient"), "{error}");
            }
        }
    });
}

#[test]
fn gradients_of_further_outputs_are_right_or_refused() {
    for_each_case(|_, case, inputs| {
        if !is_small(case) {
            return;
        }
        let types: Vec<Type> = case.args.iter().map(|arg| arg.ty.clone()).collect();
        let outputs = kolo_graph::checked_types(&*case.op, &types).unwrap();
        let declared = case.op.operands();
        for (slot, _) in outputs.iter().enumerate().skip(1).filter(|(_, ty)| ty.dtype.is_float()) {
            let output = declared.output(slot).unwrap();
            match of_output(case, slot) {
                Ok(built) => {
                    assert!(output.gradient, "`{}` has no gradient, but one was made", output.name);
                    compare(&built, inputs);
                }
                Err(error) => {
                    assert!(!output.gradient, "{error}");
                    assert!(error.message.contains(&format!("`{}`", output.name)), "{error}");
                }
            }
        }
    });
}

/// What an op declares of its inputs' gradients is what happens.
#[test]
fn gradients_are_as_declared() {
    for_each_case(|_, case, _| {
        let declared = case.op.operands();
        for (at, arg) in case.args.iter().enumerate().filter(|(_, arg)| arg.ty.dtype.is_float()) {
            let builder = Builder::new();
            let inputs = inputs_of(&builder, case);
            let y = builder.apply_arc(case.op.clone(), &inputs)[0];
            if !y.dtype().is_float() {
                return;
            }
            let grad = kolo_ops::gradients(&builder, y.sum_all(), 1.0, &[inputs[at]])[0];
            let same_type = grad.is_none_or(|grad| builder.failed() || grad.ty() == arg.ty);
            let (made, operand) = (grad.is_some(), declared.input(at).unwrap());
            match (operand.gradient, builder.finish()) {
                (Gradient::Rule, Ok(_)) => assert!(made && same_type, "no gradient of `{}`", operand.name),
                (Gradient::Zero, Ok(_)) => assert!(!made, "a gradient of `{}`", operand.name),
                (Gradient::Missing, Err(error)) => {
                    assert!(error.message.contains(&format!("`{}`", operand.name)), "{error}")
                }
                (_, other) => panic!("`{}`: {:?}", operand.name, other.map(|_| ())),
            }
        }
    });
}

#[test]
fn a_loss_must_be_one_number() {
    let builder = Builder::new();
    let x = builder.input("x", Type::f32([3]));
    assert!(kolo_ops::gradients(&builder, x.square(), 1.0, &[x])[0].is_none());
    let error = builder.finish().unwrap_err();
    assert!(error.message.contains("f32[3]") && error.hint.contains("sum"), "{error}");
}
