//! Whether gradients are right: those that a graph computes against central differences of the definition, both in f64.
//!
//! [`op`] checks one op, [`graph`] a whole graph such as a model's, whose wrong gradients are traced to the op that gives them.
//! The conformance suite and `kolo selftest` check every op of the registry with the same code.
//!
//! ```
//! use kolo_exec::gradcheck;
//! use kolo_graph::{Arg, Builder, Type};
//! use kolo_ops::prelude::*;
//!
//! let builder = Builder::new();
//! let x = builder.input("x", Type::f32([4, 3]));
//! let weight = builder.param("weight", [2, 3], Init::fan_in(3));
//! builder.output("loss", x.linear(weight, None).tanh().square().mean_all());
//! let report = gradcheck::graph(&builder.finish()?, "loss")?;
//! assert!(report.is_right(), "{report}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use crate::reference;
use crate::selftest::{draw, name};
use kolo_graph::op::{Arg, Case, Dense, Domain};
use kolo_graph::operand::Gradient;
use kolo_graph::rng::Stream;
use kolo_graph::sources::{Input, InputRole};
use kolo_graph::{Builder, DType, Graph, GraphError, Op, Tensor, Type, ValueId};
use std::fmt;
use std::sync::Arc;

/// How far the definition is moved for a difference. Five points of it are taken, so that the error falls with the fourth power.
const STEP: f64 = 1e-4;
/// How far a gradient may differ, of the largest element of its tensor.
const TOLERANCE: f64 = 1e-5;
/// Elements of a tensor of a graph that are tried; of more, these many are drawn.
const ELEMENTS_MAX: usize = 24;
/// Mismatches that a report holds.
const MISMATCHES_MAX: usize = 100;

/// An element of a gradient that differs from what differences say.
#[derive(Clone, Debug, PartialEq)]
pub struct Mismatch {
    /// The op whose rule gives it; `None` if every op's own rule is right, as where a graph stops a gradient on purpose.
    pub op: Option<String>,
    /// The layer of the graph in which the op stands.
    pub scope: String,
    /// The op's input, or the parameter or input of the graph.
    pub input: String,
    pub element: usize,
    /// What the graph computes.
    pub analytic: f64,
    /// What differences say.
    pub numeric: f64,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, scope, input, element, analytic, numeric } = self;
        match op {
            Some(op) if scope.is_empty() => write!(f, "op `{op}`: ")?,
            Some(op) => write!(f, "op `{op}` in layer `{scope}`: ")?,
            None => write!(f, "no single op: ")?,
        }
        write!(f, "the gradient of `{input}` at element {element} is {analytic}, but differences say {numeric}")
    }
}

/// What came of a check.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GradReport {
    /// Elements of gradients that were compared.
    pub compared: usize,
    /// The largest difference, of the largest element of its tensor.
    pub worst: f64,
    /// The first of those that are too far off.
    pub mismatches: Vec<Mismatch>,
}

impl GradReport {
    /// Whether every gradient is what differences say.
    pub fn is_right(&self) -> bool {
        self.mismatches.is_empty()
    }

    /// Compares some elements of a gradient, all of which have a place in `chosen`.
    fn compare(&mut self, analytic: &[f64], chosen: &[(usize, f64)]) -> Vec<(usize, f64, f64)> {
        let size = analytic.iter().copied().chain(chosen.iter().map(|(_, numeric)| *numeric));
        let size = size.fold(1e-3f64, |most, x| most.max(x.abs()));
        self.compared += chosen.len();
        let mut wrong = Vec::new();
        for (element, numeric) in chosen {
            let by = (analytic[*element] - numeric).abs() / size;
            let by = if by.is_nan() { f64::INFINITY } else { by };
            self.worst = self.worst.max(by);
            if by > TOLERANCE {
                wrong.push((*element, analytic[*element], *numeric));
            }
        }
        wrong
    }

    fn add(&mut self, mismatch: Mismatch) {
        if self.mismatches.len() < MISMATCHES_MAX {
            self.mismatches.push(mismatch);
        }
    }
}

impl fmt::Display for GradReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements compared, at most {:.1e} off", self.compared, self.worst)?;
        self.mismatches.iter().try_for_each(|mismatch| write!(f, "\n  {mismatch}"))
    }
}

/// The gradients of one op's first output, weighed by fixed random numbers and added up.
#[derive(Clone, Debug)]
pub struct OpGradients {
    /// Computes the gradients: outputs `g0`, `g1`, … of inputs `x0`, `x1`, …, the last of which are the weights.
    pub graph: Graph,
    /// Values of all its inputs.
    pub inputs: Vec<Dense>,
    /// The op's inputs that are differentiated.
    pub wrt: Vec<usize>,
    forward: Graph,
    grads: Vec<ValueId>,
}

impl OpGradients {
    /// Of an op on these values, for each input of `wrt`.
    pub fn new(op: &Arc<dyn Op>, types: &[Type], values: &[Dense], wrt: Vec<usize>) -> Result<Self, GraphError> {
        let builder = Builder::new();
        let tensors = inputs_of(&builder, types);
        let output = builder.apply_arc(Arc::clone(op), &tensors)[0];
        let weights = builder.input(&name(tensors.len()), output.ty());
        let loss = kolo_ops::elementwise::ElementwiseMethods::mul(output, weights);
        let loss = kolo_ops::reduce::ReduceMethods::sum_all(loss);
        let targets: Vec<Tensor<'_>> = wrt.iter().map(|at| tensors[*at]).collect();
        let made = kolo_ops::gradients(&builder, loss, 1.0, &targets);
        let mut grads = Vec::new();
        for (at, grad) in made.into_iter().enumerate() {
            // A sum that does not depend on an input has a gradient of zeros.
            let grad = grad.unwrap_or_else(|| builder.full(0.0, types[wrt[at]].clone()));
            builder.output(&format!("g{at}"), grad);
            grads.push(grad.id());
        }
        let shape = output.shape();
        let graph = builder.finish()?;
        let builder = Builder::new();
        builder.output("y", builder.apply_arc(Arc::clone(op), &inputs_of(&builder, types))[0]);
        let mut inputs = values.to_vec();
        let count = shape.iter().product();
        inputs.push(Dense::new(shape, (0..count).map(weight).collect()));
        Ok(Self { graph, inputs, wrt, forward: builder.finish()?, grads })
    }

    /// Of a case, for each input that it wants differentiated.
    pub fn of_case(case: &Case, values: &[Dense]) -> Result<Self, GraphError> {
        let types: Vec<Type> = case.args.iter().map(|arg| arg.ty.clone()).collect();
        let wrt = (0..case.args.len()).filter(|at| case.args[*at].differentiate).collect();
        Self::new(&case.op, &types, values, wrt)
    }

    /// The gradients as the graph is defined to compute them, in the order of `wrt`.
    pub fn analytic(&self) -> Result<Vec<Dense>, String> {
        let values = reference::evaluate(&self.graph, |name| source(&self.inputs, name))?;
        Ok(self.grads.iter().map(|id| values[id.0 as usize].clone()).collect())
    }

    /// The sum whose gradients these are.
    fn sum(&self, inputs: &[Dense]) -> Result<f64, String> {
        let values = reference::evaluate(&self.forward, |name| source(inputs, name))?;
        let output = &values[self.forward.outputs[0].1.0 as usize];
        let weights = &self.inputs[self.inputs.len() - 1];
        Ok(output.data.iter().zip(&weights.data).map(|(y, w)| y * w).sum())
    }

    /// What differences say of an element of input `at`.
    pub fn numeric(&self, at: usize, element: usize) -> Result<f64, String> {
        difference(|by| {
            let mut inputs = self.inputs.clone();
            inputs[at].data[element] += by;
            self.sum(&inputs)
        })
    }

    /// What differences say of input `at` along a fixed random direction, and that direction.
    pub fn numeric_along(&self, at: usize) -> Result<(f64, Vec<f64>), String> {
        let stream = Stream::new(at as u64, "directions");
        let direction = |slot: usize| f64::from(stream.uniform(0, slot as u64)) * 2.0 - 1.0;
        let direction: Vec<f64> = (0..self.inputs[at].data.len()).map(direction).collect();
        let numeric = difference(|by| {
            let mut inputs = self.inputs.clone();
            inputs[at].data.iter_mut().zip(&direction).for_each(|(x, d)| *x += by * d);
            self.sum(&inputs)
        })?;
        Ok((numeric, direction))
    }
}

/// The derivative at 0 of a function of one number.
fn difference(mut moved: impl FnMut(f64) -> Result<f64, String>) -> Result<f64, String> {
    let near = moved(STEP)? - moved(-STEP)?;
    Ok((8.0 * near - (moved(2.0 * STEP)? - moved(-2.0 * STEP)?)) / (12.0 * STEP))
}

fn inputs_of<'b>(builder: &'b Builder, types: &[Type]) -> Vec<Tensor<'b>> {
    types.iter().enumerate().map(|(at, ty)| builder.input(&name(at), ty.clone())).collect()
}

/// The weight of an element of an output, which f32 holds.
fn weight(at: usize) -> f64 {
    f64::from((f64::from(Stream::new(9, "weights").uniform(0, at as u64)) + 0.5) as f32)
}

fn source(inputs: &[Dense], name: &str) -> Option<Dense> {
    inputs.get(name.strip_prefix('x')?.parse::<usize>().ok()?).cloned()
}

/// Checks the gradients of an op on arguments with values of their domains, for each that has `differentiate`.
pub fn op(op: impl Op, args: &[Arg]) -> Result<GradReport, String> {
    let values: Vec<Dense> = args.iter().enumerate().map(|(at, arg)| draw(arg, at)).collect();
    let case = Case::new(op, args);
    let built = OpGradients::of_case(&case, &values).map_err(|error| error.to_string())?;
    let mut report = GradReport::default();
    compare_op(&built, &*case.op, "", &mut report)?;
    Ok(report)
}

/// Compares elements of every gradient of one op.
fn compare_op(built: &OpGradients, op: &dyn Op, scope: &str, report: &mut GradReport) -> Result<(), String> {
    let operands = op.operands();
    for (at, analytic) in built.wrt.iter().zip(built.analytic()?) {
        let chosen = chosen(analytic.data.len(), *at).into_iter();
        let chosen: Result<Vec<(usize, f64)>, String> =
            chosen.map(|element| Ok((element, built.numeric(*at, element)?))).collect();
        for (element, analytic, numeric) in report.compare(&analytic.data, &chosen?) {
            let input = operands.input(*at).map_or_else(|| at.to_string(), |operand| operand.name.to_string());
            let (op, scope) = (Some(op.signature()), scope.to_string());
            report.add(Mismatch { op, scope, input, element, analytic, numeric });
        }
    }
    Ok(())
}

/// The elements of a tensor that are tried.
fn chosen(count: usize, salt: usize) -> Vec<usize> {
    if count <= ELEMENTS_MAX {
        return (0..count).collect();
    }
    let stream = Stream::new(salt as u64, "elements");
    let mut chosen: Vec<usize> =
        (0..ELEMENTS_MAX).map(|at| stream.below(0, at as u64, count as u64) as usize).collect();
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

/// Checks the gradients of a graph's output, one number, by its parameters and inputs, at values that are drawn: parameters as
/// they are initialised, inputs of floats between −1 and 1, and whole numbers that are 0 or 1.
pub fn graph(graph: &Graph, loss: &str) -> Result<GradReport, String> {
    graph_at(graph, loss, |_, _| None)
}

/// The same at these values of inputs, parameters and states, where there are any for a name and a type.
pub fn graph_at(graph: &Graph, loss: &str, value: impl Fn(&str, &Type) -> Option<Dense>) -> Result<GradReport, String> {
    let Some(end) = graph.output(loss) else { return Err(format!("the graph has no output `{loss}`")) };
    let mut values = values_of(graph, value);
    let is_float = |at: &usize| graph.ty(values[*at].id).dtype == DType::F32;
    let mut wrt: Vec<usize> = (0..values.len()).filter(is_float).collect();
    let differentiated = match differentiate(graph, end, &values, &wrt) {
        // An input such as a target may have no gradient, which no training asks for.
        Err(_) if wrt.iter().any(|at| values[*at].is_param) => {
            wrt.retain(|at| values[*at].is_param);
            differentiate(graph, end, &values, &wrt)
        }
        made => made,
    };
    let (whole, grads) = differentiated.map_err(|error| error.to_string())?;
    let evaluate = |graph: &Graph, values: &[NamedValue]| {
        let find = |name: &str| values.iter().find(|known| known.name == name).map(|known| known.value.clone());
        reference::evaluate(graph, find)
    };
    let made = evaluate(&whole, &values)?;
    let mut report = GradReport::default();
    let mut wrong = Vec::new();
    for (at, grad) in wrt.into_iter().zip(grads) {
        let count = values[at].value.data.len();
        let analytic = grad.map_or_else(|| vec![0.0; count], |id| made[id.0 as usize].data.clone());
        let mut elements = Vec::new();
        for element in chosen(count, at) {
            let before = values[at].value.data[element];
            let numeric = difference(|by| {
                values[at].value.data[element] = before + by;
                Ok(evaluate(graph, &values)?[end.0 as usize].data[0])
            })?;
            values[at].value.data[element] = before;
            elements.push((element, numeric));
        }
        let input = values[at].name.clone();
        let found = report.compare(&analytic, &elements).into_iter();
        wrong.extend(found.map(|(element, analytic, numeric)| (input.clone(), element, analytic, numeric)));
    }
    if !wrong.is_empty() {
        blame(graph, &made, &mut report)?;
    }
    if report.is_right() {
        let whole = |(input, element, analytic, numeric)| Mismatch {
            op: None,
            scope: String::new(),
            input,
            element,
            analytic,
            numeric,
        };
        wrong.into_iter().for_each(|one| report.add(whole(one)));
    }
    Ok(report)
}

/// An input, parameter or state of a graph with a value.
struct NamedValue {
    name: String,
    id: ValueId,
    is_param: bool,
    value: Dense,
}

fn values_of(graph: &Graph, value: impl Fn(&str, &Type) -> Option<Dense>) -> Vec<NamedValue> {
    let store = crate::Store::new(graph, 0);
    let stored = |name: &str, ty: &Type| {
        let values = store.values(name).unwrap_or_default();
        Dense::new(ty.shape.clone(), values.iter().map(|x| f64::from(*x)).collect())
    };
    let drawn = |input: &Input, ty: &Type| {
        let domain = match (input.role, ty.dtype.is_float()) {
            (InputRole::Rng, _) => Domain::Rng,
            (_, true) => Domain::Real(-1.0, 1.0),
            (_, false) => Domain::Index(0, 2),
        };
        draw(&Arg { ty: ty.clone(), domain, differentiate: false }, input.name.len())
    };
    let named = |name: &str, id: ValueId, is_param: bool, other: &dyn Fn(&Type) -> Dense| {
        let ty = graph.ty(id);
        NamedValue { name: name.into(), id, is_param, value: value(name, ty).unwrap_or_else(|| other(ty)) }
    };
    let params = graph.params().map(|(id, param)| named(&param.name, id, true, &|ty| stored(&param.name, ty)));
    let states = graph.states().map(|(id, state)| named(&state.name, id, false, &|ty| stored(&state.name, ty)));
    let inputs = graph.inputs().map(|(id, input)| named(&input.name, id, false, &|ty| drawn(input, ty)));
    params.chain(states).chain(inputs).collect()
}

/// The graph with the gradients of `end` by some of its values.
fn differentiate(
    graph: &Graph,
    end: ValueId,
    values: &[NamedValue],
    wrt: &[usize],
) -> Result<(Graph, Vec<Option<ValueId>>), GraphError> {
    let builder = Builder::resume(graph.clone());
    let targets: Vec<Tensor<'_>> = wrt.iter().map(|at| builder.tensor(values[*at].id)).collect();
    let grads = kolo_ops::gradients(&builder, builder.tensor(end), 1.0, &targets);
    let grads = grads.into_iter().map(|grad| grad.map(|grad| grad.id())).collect();
    Ok((builder.finish()?, grads))
}

/// Finds the ops whose rules are wrong, each on the values that it has in the graph.
fn blame(graph: &Graph, values: &[Dense], report: &mut GradReport) -> Result<(), String> {
    for node in &graph.nodes {
        let operands = node.op.operands();
        let types = graph.types(&node.inputs);
        let has_rule = |at: &usize| {
            let operand = operands.input(*at);
            types[*at].dtype == DType::F32 && operand.is_some_and(|operand| operand.gradient == Gradient::Rule)
        };
        let wrt: Vec<usize> = (0..types.len()).filter(has_rule).collect();
        if wrt.is_empty() || graph.ty(node.outputs[0]).dtype != DType::F32 {
            continue;
        }
        let inputs: Vec<Dense> = node.inputs.iter().map(|id| values[id.0 as usize].clone()).collect();
        let built = OpGradients::new(&node.op, &types, &inputs, wrt).map_err(|error| error.to_string())?;
        compare_op(&built, &*node.op, &node.scope, report)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::{GradCx, Operand, Operands, op};
    use kolo_ops::prelude::*;

    op! {
        /// The square, of whose gradient one part in so many is missing.
        pub struct Careless = "careless_square" { missing: f64 }
    }

    impl Op for Careless {
        fn operands(&self) -> Operands {
            Operands::new([Operand::f32("x")], &["y"])
        }
        fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
            Ok(inputs.to_vec())
        }
        fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
            vec![Some(cx.grad().mul(cx.input(0)).scale(2.0 * (1.0 - self.missing as f32)))]
        }
        fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
            vec![Dense::new(inputs[0].shape.clone(), inputs[0].data.iter().map(|x| x * x).collect())]
        }
    }

    #[test]
    fn a_wrong_rule_is_found_with_its_place() {
        assert!(op(Careless { missing: 0.0 }, &[Arg::real([5])]).unwrap().is_right());
        let report = op(Careless { missing: 0.5 }, &[Arg::real([5])]).unwrap();
        assert_eq!((report.compared, report.mismatches.len()), (5, 5), "{report}");
        let first = &report.mismatches[0];
        assert_eq!((first.input.as_str(), first.element), ("x", 0));
        assert!((first.numeric - 2.0 * first.analytic).abs() < 1e-6 * first.numeric.abs(), "{first}");
        assert!(
            first.to_string().starts_with("op `careless_square{missing=0.5}`: the gradient of `x` at element 0 is ")
        );
    }

    /// A small network with this op between its layers.
    fn network(missing: f64) -> Graph {
        let builder = Builder::new();
        let (x, target) = (builder.input("x", Type::f32([3, 4])), builder.input("y", Type::i32([3])));
        let layer = |name: &str, x: Tensor<'_>, out: usize| {
            builder.scope(name, || builder.param("weight", [out, x.dim(1)], Init::fan_in(x.dim(1)))).id()
        };
        let hidden = x.linear(builder.tensor(layer("first", x, 5)), None).tanh();
        let odd = builder.scope("odd", || hidden.then(Careless { missing }, &[]));
        let logits = odd.linear(builder.tensor(layer("last", odd, 2)), None);
        builder.output("loss", logits.cross_entropy(target));
        builder.finish().unwrap()
    }

    #[test]
    fn a_wrong_op_of_a_graph_is_named() {
        let right = graph(&network(0.0), "loss").unwrap();
        assert!(right.is_right() && right.compared > 30, "{right}");
        let wrong = graph(&network(0.5), "loss").unwrap();
        assert!(!wrong.mismatches.is_empty());
        for found in &wrong.mismatches {
            assert_eq!((found.op.as_deref(), found.scope.as_str()), (Some("careless_square{missing=0.5}"), "odd"));
        }
        assert!(graph(&network(0.0), "lost").unwrap_err().contains("no output `lost`"));
    }

    #[test]
    fn what_a_graph_stops_on_purpose_has_no_op_to_blame() {
        let builder = Builder::new();
        let x = builder.input("x", Type::f32([3]));
        builder.output("loss", x.stop_gradient().mul(x).sum_all());
        let report = graph(&builder.finish().unwrap(), "loss").unwrap();
        assert!(report.mismatches.iter().any(|found| found.op.is_none() && found.input == "x"), "{report}");
    }
}
