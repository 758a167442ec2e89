//! Every op feeding every other op in mixed precision, forward and backward: whatever one makes, the other takes, or a cast
//! stands between them.
//!
//! Two cases fit if a float that the one makes has the shape of an input of the other. Where no two cases of a pair of ops fit,
//! some elements are taken and reshaped: then the casts have to go around that.

use super::{draw, name, numbers, run_graph, source};
use kolo_exec::{Store, reference};
use kolo_graph::op::{Arg, Case, Dense};
use kolo_graph::sources::{Input, Param, State};
use kolo_graph::{Builder, DType, Graph, Mixed, OpKind, Tensor, Type, checked_types, rewrite, verify};
use kolo_ops::fuse::fuse_elementwise;
use kolo_ops::lower_precision::lower_precision;
use kolo_ops::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Elements of the operands of a case that takes part.
const ELEMENTS_MAX: usize = 2000;
/// How far a result may be from the definition of the lowered graph, of its largest element: sums of halves are rounded.
const TOLERANCE: f64 = 5e-2;
/// Larger numbers come of inputs that mean nothing to the op, and overflow in f32 on their way.
const HUGE: f64 = 1e30;
/// Failures that are told.
const TOLD_MAX: usize = 20;

/// A case of an op, and the types of its outputs.
struct Piece {
    case: Case,
    outputs: Vec<Type>,
}

fn pieces(kind: &OpKind) -> Vec<Piece> {
    let piece = |case: Case| {
        let types: Vec<Type> = case.args.iter().map(|arg| arg.ty.clone()).collect();
        let outputs = checked_types(&*case.op, &types).ok()?;
        let elements: usize = types.iter().chain(&outputs).map(Type::elements).sum();
        let is_source = case.op.is::<Input>() || case.op.is::<Param>() || case.op.is::<State>();
        (elements <= ELEMENTS_MAX && !is_source && case.op.collective().is_none()).then_some(Piece { case, outputs })
    };
    (kind.cases)().into_iter().filter_map(piece).collect()
}

/// How an output of one case becomes an input of another.
struct Joint<'p> {
    maker: &'p Piece,
    output: usize,
    reader: &'p Piece,
    input: usize,
}

impl<'p> Joint<'p> {
    /// The best that two ops have: the same shapes, or as many elements, or enough of them.
    fn of(makers: &'p [Piece], readers: &'p [Piece]) -> Option<Self> {
        let mut best: Option<(usize, Self)> = None;
        for (maker, reader) in makers.iter().flat_map(|maker| readers.iter().map(move |reader| (maker, reader))) {
            let floats = maker.outputs.iter().enumerate().filter(|(_, ty)| ty.dtype == DType::F32);
            for (output, made) in floats {
                let wanted = reader.case.args.iter().enumerate().filter(|(_, arg)| arg.ty.dtype == DType::F32);
                for (input, arg) in wanted {
                    let cost = match arg.ty.shape == made.shape {
                        true => 0,
                        false if arg.ty.elements() == made.elements() => 1,
                        false if arg.ty.elements() < made.elements() => 2,
                        false => continue,
                    };
                    if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                        best = Some((cost, Self { maker, output, reader, input }));
                    }
                }
            }
        }
        best.map(|(_, joint)| joint)
    }

    /// Both ops, the loss and its gradients; floats of the first are parameters, as a table of an embedding is.
    fn graph(&self, differentiates: bool) -> Option<Graph> {
        let builder = Builder::new();
        let mut wrt = Vec::new();
        let maker: Vec<Tensor<'_>> = self
            .maker
            .case
            .args
            .iter()
            .enumerate()
            .map(|(at, arg)| {
                let is_param = arg.ty.dtype == DType::F32;
                let tensor = match is_param {
                    true => builder.param(&name(at), arg.ty.shape.to_vec(), Init::Normal { deviation: 1.0 }),
                    false => builder.input(&name(at), arg.ty.clone()),
                };
                wrt.extend(arg.differentiate.then_some(tensor));
                tensor
            })
            .collect();
        let made = builder.apply_arc(self.maker.case.op.clone(), &maker)[self.output];
        let wanted = &self.reader.case.args[self.input].ty;
        let fed = match wanted.shape == made.ty().shape {
            true => made,
            false => {
                let flat = made.reshape_to([made.ty().elements()]);
                let flat = if flat.dim(0) == wanted.elements() { flat } else { flat.slice(0, 0..wanted.elements()) };
                flat.reshape_to(wanted.shape.to_vec())
            }
        };
        let first = maker.len();
        let reader: Vec<Tensor<'_>> = self
            .reader
            .case
            .args
            .iter()
            .enumerate()
            .map(|(at, arg)| {
                if at == self.input {
                    return fed;
                }
                let tensor = builder.input(&name(first + at), arg.ty.clone());
                wrt.extend(arg.differentiate.then_some(tensor));
                tensor
            })
            .collect();
        let outputs = builder.apply_arc(self.reader.case.op.clone(), &reader);
        outputs.iter().enumerate().for_each(|(at, output)| builder.output(&format!("y{at}"), *output));
        if differentiates && outputs[0].dtype() == DType::F32 {
            let weights = builder.input(&name(first + reader.len()), outputs[0].ty());
            let loss = outputs[0].mul(weights).sum_all();
            let grads = kolo_ops::gradients(&builder, loss, 1.0, &wrt);
            let grads = grads.into_iter().flatten().enumerate();
            grads.for_each(|(at, grad)| builder.output(&format!("g{at}"), grad));
        }
        let graph = builder.finish().ok()?;
        verify::verify(&graph).is_ok().then(|| rewrite::eliminate_dead(graph))
    }

    /// Lowers, verifies and runs; what is wrong.
    fn check(&self, graph: &Graph, half: DType) -> Result<(), String> {
        let lowered = lower_precision(graph, half);
        verify::verify(&lowered)?;
        let fused = fuse_elementwise(&rewrite::eliminate_dead(lowered.clone()));
        verify::verify(&fused)?;
        let args = self.maker.case.args.iter().chain(&self.reader.case.args).enumerate();
        let mut inputs: Vec<Dense> = args.map(|(at, arg)| draw(arg, at)).collect();
        inputs.push(draw(&Arg::positive(self.reader.outputs[0].shape.clone()), inputs.len()));
        for rewritten in [&lowered, &fused] {
            let store = Store::new(rewritten, 0);
            let value = |name: &str| match store.values(name) {
                Some(values) => {
                    let (id, _) = rewritten.params().find(|(_, param)| param.name == name)?;
                    let values = values.iter().map(|x| f64::from(*x)).collect();
                    Some(Dense::new(rewritten.ty(id).shape.clone(), values))
                }
                None => source(&inputs)(name),
            };
            let defined = reference::evaluate(rewritten, value)?;
            let made = run_graph(rewritten, &inputs, 1);
            for ((output, id), made) in graph.outputs.iter().zip(made) {
                if made.0 != *graph.ty(*id) {
                    return Err(format!("output `{output}` is {}, but was {}", made.0, graph.ty(*id)));
                }
                let place = rewritten.output(output).ok_or("no output")?;
                let (got, want) = (numbers(&made), &defined[place.0 as usize].data);
                if want.iter().any(|x| x.abs() > HUGE) {
                    continue;
                }
                let size = want.iter().filter(|x| x.is_finite()).fold(1e-3f64, |m, x| m.max(x.abs()));
                for (at, (got, want)) in got.iter().zip(want).enumerate() {
                    let same =
                        got == want || !got.is_finite() && !want.is_finite() || (got - want).abs() <= TOLERANCE * size;
                    if !same {
                        return Err(format!("output `{output}` at {at} is {got}, must be {want}"));
                    }
                }
            }
        }
        Ok(())
    }
}

/// An op that takes part in mixed precision takes every half that it declares, all of its floats in one type, and what it makes of
/// them is what the definition says.
#[test]
fn ops_take_the_halves_that_they_declare() {
    super::for_each_case(|_, case, _| {
        let operands = case.op.operands();
        let is_mixed = matches!(case.op.mixed(), Mixed::Half | Mixed::AsGiven);
        for half in [DType::BF16, DType::F16].into_iter().filter(|_| is_mixed) {
            let mut types: Vec<Type> = case.args.iter().map(|arg| arg.ty.clone()).collect();
            for (at, ty) in types.iter_mut().enumerate().filter(|(_, ty)| ty.dtype == DType::F32) {
                if operands.input(at).is_some_and(|operand| operand.may_be_half()) {
                    ty.dtype = half;
                }
            }
            let made = checked_types(&*case.op, &types);
            assert!(made.is_ok(), "{}: {}", half.name(), made.unwrap_err());
        }
    });
}

#[test]
fn every_op_feeds_every_other_in_mixed_precision() {
    let _shared = super::WIDTH.read().unwrap_or_else(std::sync::PoisonError::into_inner);
    let kinds = kolo_ops::registry();
    let all: Vec<Vec<Piece>> = kinds.iter().map(pieces).collect();
    let (mut tried, mut failures) = (0, Vec::new());
    let filter = std::env::var("OP").ok();
    for (maker, makers) in kinds.iter().zip(&all) {
        for (reader, readers) in kinds.iter().zip(&all) {
            if filter.as_ref().is_some_and(|name| name != maker.name && name != reader.name) {
                continue;
            }
            let Some(joint) = Joint::of(makers, readers) else { continue };
            // An op without a gradient is a fit maker all the same.
            let Some(graph) = joint.graph(true).or_else(|| joint.graph(false)) else { continue };
            tried += 1;
            for half in [DType::BF16, DType::F16] {
                let outcome = catch_unwind(AssertUnwindSafe(|| joint.check(&graph, half)));
                let failure = match outcome {
                    Ok(outcome) => outcome.err(),
                    Err(panic) => Some(match panic.downcast_ref::<String>() {
                        Some(text) => text.clone(),
                        None => panic.downcast_ref::<&str>().map(|text| text.to_string()).unwrap_or_default(),
                    }),
                };
                let labels = (joint.maker.case.op.signature(), joint.reader.case.op.signature());
                failures.extend(failure.map(|text| format!("{} into {}, {}: {text}", labels.0, labels.1, half.name())));
            }
        }
    }
    let count = failures.len();
    failures.truncate(TOLD_MAX);
    assert!(failures.is_empty(), "{count} of {tried} pairs failed:\n{}", failures.join("\n"));
    assert!(tried > kinds.len(), "few pairs fit: {tried}");
}
