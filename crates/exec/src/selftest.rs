//! Whether a device computes what ops are defined to compute: every case of every op of the registry, against the definition in f64,
//! and the gradients of small ones against differences of it.
//!
//! The same suite as the tests of this repository run on the CPU, for any executor and from the program itself, so that a machine with a
//! GPU can be checked where nothing can be built.

use crate::executor::Executor;
use crate::feed::Feed;
use crate::gradcheck::OpGradients;
use crate::options::Options;
use crate::program::Program;
use crate::session::Session;
use crate::store::Store;
use kolo_graph::cpu::Buffer;
use kolo_graph::op::{Case, Dense, Domain};
use kolo_graph::rng::Stream;
use kolo_graph::sources::{Input, Param, State};
use kolo_graph::{Arg, Builder, DType, Graph, Op, OpKind, Tensor, Type, Work, checked_types};
use std::sync::Arc;

/// FLOPs of a case that the definition can compute in a moment.
const FLOPS_MAX: u64 = 200_000_000;
/// The same of a case that is differentiated: its definition is computed several times for each input.
const GRADIENT_FLOPS_MAX: u64 = 2_000_000;
/// And elements of its inputs.
const GRADIENT_ELEMENTS_MAX: usize = 20_000;

/// What came of one kind of op.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KindOutcome {
    pub name: &'static str,
    /// Cases that ran, by element type of their floats.
    pub cases: Vec<(DType, usize)>,
    /// Cases whose gradients were checked: their rules against differences of the definition, and what the device makes of them.
    pub gradients: usize,
    /// What went wrong: the first of each kind of failure, and how many there were in all.
    pub failures: Vec<String>,
    pub failed: usize,
    /// The largest difference from the definition, over the tolerance.
    pub worst: f64,
}

/// How far a gradient along a direction may be from differences.
const ALONG_TOLERANCE: f64 = 2e-5;
/// How many tolerances of its op a gradient may be off on a device: it is made of several.
const GRADIENT_TOLERANCES: f64 = 4.0;
/// Elements that are looked through for the wrong one.
const GRADIENT_ELEMENTS_TOLD: usize = 256;
/// How many failures of a kind are told in full.
const FAILURES_TOLD: usize = 3;

impl KindOutcome {
    fn fail(&mut self, failure: String) {
        self.failed += 1;
        if self.failures.len() < FAILURES_TOLD {
            self.failures.push(failure);
        }
    }
}

/// Runs the suite for these kinds, and tells `report` of each as it ends.
pub fn run(executor: &Arc<dyn Executor>, kinds: &[OpKind], mut report: impl FnMut(&KindOutcome)) -> Vec<KindOutcome> {
    let coarse = executor.in_tf32();
    let wanted = |trial: &Trial| coarse.is_some() || !trial.tf32;
    let all: Vec<(usize, Trial)> = kinds
        .iter()
        .enumerate()
        .flat_map(|(at, kind)| trials(kind).into_iter().filter(wanted).map(move |trial| (at, trial)))
        .collect();
    let executor_of = |tf32: bool| coarse.as_ref().filter(|_| tf32).unwrap_or(executor);
    for tf32 in [false, true] {
        let own = all.iter().filter(|(_, trial)| trial.tf32 == tf32);
        let graphs = own.flat_map(|(_, trial)| trial.gradients.iter().map(|one| &one.graph).chain([&trial.graph]));
        executor_of(tf32).prepare(&graphs.collect::<Vec<&Graph>>());
    }
    let mut outcomes = Vec::new();
    for (at, kind) in kinds.iter().enumerate() {
        let mut outcome = KindOutcome { name: kind.name, ..KindOutcome::default() };
        for (_, trial) in all.iter().filter(|(of, _)| *of == at) {
            match outcome.cases.iter_mut().find(|(dtype, _)| *dtype == trial.dtype) {
                Some((_, count)) => *count += 1,
                None => outcome.cases.push((trial.dtype, 1)),
            }
            match trial.check(executor_of(trial.tf32)) {
                Ok(worst) => outcome.worst = outcome.worst.max(worst),
                Err(failure) => outcome.fail(format!("{} {}: {failure}", trial.dtype.name(), trial.label)),
            }
            let Some(gradients) = &trial.gradients else { continue };
            outcome.gradients += 1;
            if let Err(failure) = trial.check_gradients(executor, gradients) {
                outcome.fail(format!("gradient of {}: {failure}", trial.label));
            }
        }
        report(&outcome);
        outcomes.push(outcome);
    }
    outcomes
}

/// One op on inputs of its own.
struct Trial {
    label: String,
    case: Case,
    dtype: DType,
    /// Whether products may round their operands to TF32.
    tf32: bool,
    graph: Graph,
    inputs: Vec<Dense>,
    /// Of a case in f32 that is differentiated and small.
    gradients: Option<OpGradients>,
}

/// What floats a case is tried with, and whether products may round them to TF32.
const TYPES: [(DType, bool); 4] = [(DType::F32, false), (DType::F32, true), (DType::BF16, false), (DType::F16, false)];

/// Every case of a kind, the same in half precision where its operands allow it, and in TF32 if it is made of products.
fn trials(kind: &OpKind) -> Vec<Trial> {
    let mut trials = Vec::new();
    for (at, case) in (kind.cases)().into_iter().enumerate() {
        if case.op.is::<Input>() || case.op.is::<Param>() || case.op.is::<State>() {
            continue;
        }
        for (dtype, tf32) in TYPES {
            if tf32 && case.op.work() == Work::Stream {
                continue;
            }
            let Some(case) = in_type(&case, dtype) else { continue };
            let types: Vec<Type> = case.args.iter().map(|arg| arg.ty.clone()).collect();
            let Ok(outputs) = checked_types(&*case.op, &types) else { continue };
            if case.op.flops(&types, &outputs) > FLOPS_MAX {
                continue;
            }
            let inputs = case.args.iter().enumerate().map(|(arg, spec)| {
                let mut value = draw(spec, at * 16 + arg);
                value.data.iter_mut().for_each(|x| *x = spec.ty.dtype.round(*x));
                value
            });
            let inputs: Vec<Dense> = inputs.collect();
            let label = format!("{}case {at} {}", if tf32 { "in TF32, " } else { "" }, case.op.signature());
            let Ok(graph) = graph_of(&case.op, &case.args) else { continue };
            let elements: usize = types.iter().map(Type::elements).sum();
            let is_small = elements <= GRADIENT_ELEMENTS_MAX && case.op.flops(&types, &outputs) <= GRADIENT_FLOPS_MAX;
            let differentiates = case.args.iter().any(|arg| arg.differentiate);
            let is_checked = dtype == DType::F32 && !tf32 && is_small && differentiates;
            let gradients = is_checked.then(|| OpGradients::of_case(&case, &inputs));
            let gradients = gradients.and_then(Result::ok);
            trials.push(Trial { label, dtype, tf32, graph, inputs, case, gradients });
        }
    }
    trials
}

/// The same case with floats of this type; `None` if it has none, or if the op does not take them.
fn in_type(case: &Case, dtype: DType) -> Option<Case> {
    if dtype == DType::F32 {
        return Some(case.clone());
    }
    let operands = case.op.operands();
    let mut changed = case.clone();
    let mut any = false;
    for (at, arg) in changed.args.iter_mut().enumerate().filter(|(_, arg)| arg.ty.dtype == DType::F32) {
        if operands.input(at).is_some_and(|operand| operand.dtypes.contains(&dtype)) {
            arg.ty = Type::new(dtype, arg.ty.shape.clone());
            any = true;
        }
    }
    any.then_some(changed)
}

impl Trial {
    /// The largest difference over the tolerance, or what is wrong.
    fn check(&self, executor: &Arc<dyn Executor>) -> Result<f64, String> {
        let want = self.defined()?;
        let got = run_graph(executor, &self.graph, &self.inputs, 2)?;
        if got[0] != got[1] {
            return Err("a second run gave other bits".into());
        }
        let mut worst = 0.0f64;
        for (at, (got, want)) in got[0].iter().zip(&want).enumerate() {
            let tolerance = self.tolerance(got.0.dtype);
            let difference = difference(&numbers(got), &want.data).map_err(|what| format!("output {at}: {what}"))?;
            if difference.0 > tolerance {
                let (size, place, got, want) = difference;
                return Err(format!(
                    "output {at}, element {place} is {got}, must be {want}: off by {size:.1e} of the largest"
                ));
            }
            worst = worst.max(difference.0 / tolerance);
        }
        Ok(worst)
    }

    /// Each gradient along one direction that no element escapes, and what the device makes of it.
    fn check_gradients(&self, executor: &Arc<dyn Executor>, gradients: &OpGradients) -> Result<(), String> {
        let analytic = gradients.analytic()?;
        let got = run_graph(executor, &gradients.graph, &gradients.inputs, 1)?;
        for ((at, analytic), got) in gradients.wrt.iter().zip(&analytic).zip(&got[0]) {
            let (numeric, direction) = gradients.numeric_along(*at)?;
            let terms = || analytic.data.iter().zip(&direction).map(|(g, d)| g * d);
            let (along, size): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
            if !((along - numeric).abs() <= ALONG_TOLERANCE * (size + numeric.abs() + 1.0)) {
                return Err(self.explain(gradients, *at, analytic, (along, numeric)));
            }
            let (size, place, got, want) =
                difference(&numbers(got), &analytic.data).map_err(|what| format!("input {at}: {what}"))?;
            if size > self.case.tolerance * GRADIENT_TOLERANCES {
                let what =
                    format!("the gradient of input {at}, element {place} is {got} on the device, must be {want}");
                return Err(format!("{what}: off by {size:.1e} of the largest"));
            }
        }
        Ok(())
    }

    /// Where a gradient is not what differences say.
    fn explain(&self, gradients: &OpGradients, at: usize, analytic: &Dense, along: (f64, f64)) -> String {
        let operands = self.case.op.operands();
        let input = operands.input(at).map_or("", |operand| operand.name);
        let wrong = |element: &usize| {
            let numeric = gradients.numeric(at, *element).unwrap_or(f64::NAN);
            let by = (analytic.data[*element] - numeric).abs();
            (!(by <= ALONG_TOLERANCE * (numeric.abs() + 1.0))).then_some((*element, numeric))
        };
        let elements = 0..analytic.data.len().min(GRADIENT_ELEMENTS_TOLD);
        match elements.into_iter().find_map(|element| wrong(&element)) {
            Some((element, numeric)) => format!(
                "the rule gives {} for `{input}` at element {element}, but differences of the definition say {numeric}",
                analytic.data[element]
            ),
            None => {
                format!("the rule gives {} for `{input}` along a direction, but differences say {}", along.0, along.1)
            }
        }
    }

    /// Results in half precision are rounded; so are inputs of whatever is computed from them, and sums of them.
    fn tolerance(&self, output: DType) -> f64 {
        match (self.dtype, output) {
            (DType::BF16, _) | (_, DType::BF16) => 2e-2,
            (DType::F16, _) | (_, DType::F16) => 3e-3,
            _ if self.tf32 => self.case.tolerance.max(5e-3),
            _ => self.case.tolerance,
        }
    }

    fn defined(&self) -> Result<Vec<Dense>, String> {
        let source = |name: &str| self.inputs.get(name.strip_prefix('x')?.parse::<usize>().ok()?).cloned();
        let values = crate::reference::evaluate(&self.graph, source).map_err(|error| error.to_string())?;
        Ok(self.graph.outputs.iter().map(|(_, id)| values[id.0 as usize].clone()).collect())
    }
}

/// The largest difference relative to the size of the whole tensor, and where it is: place, got, want.
fn difference(got: &[f64], want: &[f64]) -> Result<(f64, usize, f64, f64), String> {
    if got.len() != want.len() {
        return Err(format!("{} elements, must be {}", got.len(), want.len()));
    }
    // An element that cancels to nothing has no relative precision of its own.
    let size = want.iter().filter(|x| x.is_finite()).fold(0.0f64, |most, x| most.max(x.abs())).max(1e-3);
    let mut worst = (0.0, 0, 0.0, 0.0);
    for (at, (got, want)) in got.iter().copied().zip(want.iter().copied()).enumerate() {
        if got == want || got.is_nan() && want.is_nan() {
            continue;
        }
        let by = (got - want).abs() / size;
        let by = if by.is_nan() { f64::INFINITY } else { by };
        if by > worst.0 {
            worst = (by, at, got, want);
        }
    }
    Ok(worst)
}

/// The values of a test argument.
pub fn draw(arg: &Arg, salt: usize) -> Dense {
    let stream = Stream::new(salt as u64, "case");
    let count = arg.ty.elements();
    let value = |at: usize| -> f64 {
        let uniform = f64::from(stream.uniform(0, at as u64));
        match arg.domain {
            Domain::Real(low, high) => f64::from((low + uniform * (high - low)) as f32),
            Domain::Index(low, high) => (low + stream.below(0, at as u64, (high - low) as u64) as i64) as f64,
            Domain::Rng => [12345.0, -678.0, 3.0, 8.0][at],
            Domain::Spread => 0.0,
        }
    };
    if arg.domain == Domain::Spread {
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by_key(|at| stream.bits(1, *at as u64));
        let shift = 0.02 + (salt % 16) as f64 * 0.013;
        let spread = |rank: &usize| f64::from(((*rank as f64 - count as f64 / 2.0) * 0.05 + shift) as f32);
        return Dense::new(arg.ty.shape.clone(), order.iter().map(spread).collect());
    }
    Dense::new(arg.ty.shape.clone(), (0..count).map(value).collect())
}

/// What a suite calls input `at`.
pub fn name(at: usize) -> String {
    format!("x{at}")
}

/// The graph of one op, in a grain, or once per step if it cannot stand in one.
pub fn graph_of(op: &Arc<dyn Op>, args: &[Arg]) -> Result<Graph, String> {
    let graph = |per_step: bool| {
        let builder = Builder::new();
        let input = |(at, arg): (usize, &Arg)| match per_step {
            true => builder.step_input(&name(at), arg.ty.clone()),
            false => builder.input(&name(at), arg.ty.clone()),
        };
        let inputs: Vec<Tensor<'_>> = args.iter().enumerate().map(input).collect();
        for (at, output) in builder.apply_arc(op.clone(), &inputs).into_iter().enumerate() {
            builder.output(&format!("y{at}"), output);
        }
        builder.finish().map_err(|error| error.to_string())
    };
    let in_grain = graph(false)?;
    if kolo_graph::verify::verify(&in_grain).is_ok() { Ok(in_grain) } else { graph(true) }
}

/// Raw bytes of every output, of each of so many runs.
pub fn run_graph(
    executor: &Arc<dyn Executor>,
    graph: &Graph,
    inputs: &[Dense],
    runs: usize,
) -> Result<Vec<Vec<(Type, Vec<u8>)>>, String> {
    let mut store = Store::new(graph, 0);
    let program = Program::new(executor, graph.clone(), Options::single(1));
    let mut session = Session::compile(program, &store, None).map_err(|error| error.to_string())?;
    let mut results = Vec::new();
    for _ in 0..runs {
        let outcome = session.run(&mut store, |feed| fill(feed, inputs), |_, feed| fill(feed, inputs));
        outcome.map_err(|error| error.to_string())?;
        let output = |(name, id): &(String, kolo_graph::ValueId)| {
            (graph.ty(*id).clone(), session.output_bytes(name).unwrap_or_default().to_vec())
        };
        results.push(graph.outputs.iter().map(output).collect());
    }
    Ok(results)
}

/// Writes the inputs of a suite.
pub fn fill(feed: &mut Feed<'_>, inputs: &[Dense]) {
    for (at, input) in inputs.iter().enumerate() {
        let Some((_, ty)) = feed.names().find(|(key, _)| *key == name(at)) else { continue };
        let ty = ty.clone();
        let Some(bytes) = feed.bytes(&name(at)) else { continue };
        let buffer = Buffer { data: bytes.as_mut_ptr(), ty };
        input.data.iter().enumerate().for_each(|(slot, value)| kolo_ops::cast::write(&buffer, slot, *value));
    }
}

/// Raw bytes as numbers.
pub fn numbers((ty, bytes): &(Type, Vec<u8>)) -> Vec<f64> {
    let mut bytes = bytes.clone();
    let buffer = Buffer { data: bytes.as_mut_ptr(), ty: ty.clone() };
    (0..ty.elements()).map(|at| kolo_ops::cast::read(&buffer, at)).collect()
}

#[cfg(test)]
mod tests;
