//! The conformance suite: every case of every op in the registry against the definition, finite differences, itself on
//! other threads and vector widths, itself in pieces, and its own text form.

use kolo_exec::gradcheck::OpGradients;
use kolo_exec::selftest::{self, draw, fill, name, numbers};
use kolo_exec::{Options, Session, Store, reference};
use kolo_graph::op::{Case, Dense};
use kolo_graph::rng::Stream;
use kolo_graph::{Arg, Builder, DType, Graph, Op, Tensor, Type};
use kolo_ops::prelude::*;
use kolo_ops::simd::{self, Level};
use std::sync::{Arc, PoisonError, RwLock};

#[path = "conformance/derivatives.rs"]
mod derivatives;
#[path = "conformance/fuzz.rs"]
mod fuzz;
#[path = "conformance/pairs.rs"]
mod pairs;
#[path = "conformance/specials.rs"]
mod specials;
#[path = "conformance/splits.rs"]
mod splits;
#[path = "conformance/sums.rs"]
mod sums;
#[path = "conformance/torch.rs"]
mod torch;

/// The vector width is a process-wide choice: whoever changes it must be alone, everybody else only reads it.
static WIDTH: RwLock<()> = RwLock::new(());

fn for_each_case(check: impl Fn(&str, &Case, &[Dense])) {
    let _shared = WIDTH.read().unwrap_or_else(PoisonError::into_inner);
    for_each_case_alone(check);
}

fn for_each_case_alone(check: impl Fn(&str, &Case, &[Dense])) {
    let mut failures = Vec::new();
    let mut tried = 0;
    let filter = std::env::var("OP").ok();
    for kind in kolo_ops::registry() {
        if filter.as_ref().is_some_and(|name| name != kind.name) {
            continue;
        }
        for (at, case) in (kind.cases)().iter().enumerate() {
            let label = format!("{} case {at} {}", kind.name, case.op.signature());
            let inputs: Vec<Dense> =
                case.args.iter().enumerate().map(|(arg, spec)| draw(spec, at * 16 + arg)).collect();
            tried += 1;
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(&label, case, &inputs)));
            if let Err(panic) = outcome {
                let text = panic.downcast_ref::<String>().cloned();
                failures.push(format!(
                    "{label}: {}",
                    text.or(panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default()
                ));
            }
        }
    }
    assert!(tried > 0, "no case was tried");
    assert!(failures.is_empty(), "{} of {tried} cases failed:\n{}", failures.len(), failures.join("\n"));
}

fn single(case: &Case) -> Graph {
    graph_of(&case.op, &case.args)
}

fn graph_of(op: &Arc<dyn Op>, args: &[Arg]) -> Graph {
    selftest::graph_of(op, args).unwrap_or_else(|error| panic!("{error}"))
}

fn source<'a>(inputs: &'a [Dense]) -> impl Fn(&str) -> Option<Dense> + 'a {
    move |name| inputs.get(name.strip_prefix('x')?.parse::<usize>().ok()?).cloned()
}

fn defined(case: &Case, inputs: &[Dense]) -> Vec<Dense> {
    let graph = single(case);
    let values = reference::evaluate(&graph, source(inputs)).unwrap();
    graph.outputs.iter().map(|(_, id)| values[id.0 as usize].clone()).collect()
}

/// Raw bytes of every output of the CPU kernel.
fn computed(case: &Case, inputs: &[Dense], threads: usize) -> Vec<(Type, Vec<u8>)> {
    let graph = single(case);
    run_graph(&graph, inputs, threads)
}

fn run_graph(graph: &Graph, inputs: &[Dense], threads: usize) -> Vec<(Type, Vec<u8>)> {
    let mut store = Store::new(graph, 0);
    let mut session = Session::new(graph.clone(), &store, Options::single(threads));
    session.run(&mut store, |feed| fill(feed, inputs), |_, feed| fill(feed, inputs)).unwrap();
    graph
        .outputs
        .iter()
        .map(|(name, id)| (graph.ty(*id).clone(), session.output_bytes(name).unwrap().to_vec()))
        .collect()
}

fn assert_close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    // Relative to the size of the whole tensor: an element that cancels to nothing has no relative precision.
    let size = want.iter().filter(|x| x.is_finite()).fold(0.0f64, |m, x| m.max(x.abs())).max(1e-3);
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let same = (got.is_nan() && want.is_nan()) || got == want || (got - want).abs() <= tolerance * size;
        assert!(same, "{what}: element {at} is {got}, must be {want}");
    }
}

#[test]
fn kernels_match_the_definition() {
    for_each_case(|_, case, inputs| {
        let want = defined(case, inputs);
        for (at, (got, want)) in computed(case, inputs, 1).iter().zip(&want).enumerate() {
            let tolerance = match got.0.dtype {
                DType::BF16 => 1e-2,
                DType::F16 => 1e-3,
                _ => case.tolerance,
            };
            assert_close(&numbers(got), &want.data, tolerance, &format!("output {at}"));
        }
    });
}

/// Of several blocks of queries some keys are left out, but never one that a query sees.
#[test]
fn what_a_query_sees_reaches_it() {
    let _shared = WIDTH.read().unwrap_or_else(PoisonError::into_inner);
    let (time, width, seen) = (100, 16, 50);
    let case = Case::new(
        kolo_ops::attention::Attention {
            heads: 2,
            causal: true,
            packed: true,
            bias: false,
            align: kolo_ops::attention::Alignment::BottomRight,
        },
        [Arg::real([1, time, 3 * width])],
    );
    let inputs = vec![draw(&case.args[0], 7)];
    for (column, reaches) in [(2 * width + 3, 3..4), (width + 3, 0..width / 2)] {
        let mut poisoned = inputs.clone();
        poisoned[0].data[seen * 3 * width + column] = f64::NAN;
        let out = numbers(&computed(&case, &poisoned, 1)[0]);
        for (row, values) in out.chunks(width).enumerate().skip(seen) {
            assert!(values[reaches.clone()].iter().all(|x| x.is_nan()), "row {row}, column {column}: {values:?}");
        }
        assert!(out[..32 * width].iter().all(|x| x.is_finite()), "an earlier block sees a later key");
    }
}

/// A query that a mask hides from every key gives zero and zero gradients; the others are not touched by it.
#[test]
fn a_query_that_sees_no_key_gives_zero() {
    let _shared = WIDTH.read().unwrap_or_else(PoisonError::into_inner);
    let (queries, keys, width, heads) = (5, 3, 8, 2);
    let builder = Builder::new();
    let shapes = [vec![1, queries, width], vec![1, keys, width], vec![1, keys, width], vec![1, heads, queries, keys]];
    let args: Vec<Tensor<'_>> =
        shapes.iter().enumerate().map(|(at, shape)| builder.input(&name(at), Type::f32(shape.clone()))).collect();
    let weights = builder.input(&name(4), Type::f32([1, queries, width]));
    let out = args[0].attention(args[1], args[2], Some(args[3]), heads, false);
    builder.output("out", out);
    let grads = kolo_ops::gradients(&builder, out.mul(weights).sum_all(), 1.0, &args);
    grads.iter().enumerate().for_each(|(at, grad)| builder.output(&format!("d{at}"), grad.unwrap()));
    let graph = builder.finish().unwrap();
    let mut inputs: Vec<Dense> =
        shapes.iter().chain([&shapes[0]]).enumerate().map(|(at, shape)| draw(&Arg::real(shape.clone()), at)).collect();
    // Query 1 sees nothing in both heads, query 4 in head 1; query 2 sees one key.
    for (head, query, hidden) in [(0, 1, 3), (1, 1, 3), (1, 4, 3), (0, 2, 2)] {
        let start = (head * queries + query) * keys;
        inputs[3].data[start..start + hidden].fill(f64::NEG_INFINITY);
    }
    let values = reference::evaluate(&graph, source(&inputs)).unwrap();
    let computed: Vec<Vec<f64>> = run_graph(&graph, &inputs, 1).iter().map(numbers).collect();
    for ((name, id), got) in graph.outputs.iter().zip(&computed) {
        assert!(got.iter().all(|x| x.is_finite()), "{name}: {got:?}");
        assert_close(got, &values[id.0 as usize].data, 1e-6, name);
    }
    let zero = |values: &[f64]| values.iter().all(|x| *x == 0.0);
    for part in [width..2 * width, 4 * width + width / 2..5 * width] {
        assert!(zero(&computed[0][part.clone()]) && zero(&computed[1][part]), "a query that sees nothing");
    }
    assert!(!zero(&computed[0][4 * width..4 * width + width / 2]), "its other head sees something");
    assert!(zero(&computed[4][keys..2 * keys]), "the mask's own gradient");
}

#[test]
fn threads_and_reruns_give_the_same_bits() {
    for_each_case(|_, case, inputs| {
        let one = computed(case, inputs, 1);
        assert_eq!(one, computed(case, inputs, 1), "a rerun differs");
        assert_eq!(one, computed(case, inputs, 2), "two threads differ");
        assert_eq!(one, computed(case, inputs, 3), "three threads differ");
    });
}

#[test]
fn vector_widths_give_the_same_bits() {
    let _alone = WIDTH.write().unwrap_or_else(PoisonError::into_inner);
    for_each_case_alone(|_, case, inputs| {
        let best = computed(case, inputs, 1);
        for level in [Level::Portable, Level::Avx2] {
            // SAFETY: the lock keeps every other test's kernels out.
            unsafe { simd::limit(Some(level)) };
            let got = computed(case, inputs, 1);
            // SAFETY: as above.
            unsafe { simd::limit(None) };
            assert_eq!(best, got, "{level:?} differs");
        }
    });
}

fn weight(stream: &Stream, at: usize) -> f64 {
    f64::from(stream.uniform(0, at as u64)) + 0.5
}

#[test]
fn gradients_match_finite_differences() {
    for_each_case(|_, case, inputs| {
        if !case.args.iter().any(|arg| arg.differentiate) {
            return;
        }
        let built = OpGradients::of_case(case, inputs).unwrap_or_else(|error| panic!("{error}"));
        kolo_graph::verify::verify(&built.graph).unwrap();
        let kernels = run_graph(&built.graph, &built.inputs, 1);
        for ((at, analytic), kernel) in built.wrt.iter().zip(built.analytic().unwrap()).zip(&kernels) {
            let elements = 0..analytic.data.len();
            let numeric: Vec<f64> = elements.map(|element| built.numeric(*at, element).unwrap()).collect();
            assert_close(&analytic.data, &numeric, 2e-6, &format!("gradient of input {at}"));
            assert_close(
                &numbers(kernel),
                &analytic.data,
                case.tolerance * 4.0,
                &format!("f32 gradient of input {at}"),
            );
        }
    });
}

#[test]
fn text_form_round_trips() {
    for_each_case(|_, case, _| {
        let graph = single(case);
        let text = graph.to_string();
        let parsed =
            kolo_graph::text::parse(&text, &kolo_ops::registry()).unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert_eq!(parsed.to_string(), text);
        kolo_graph::verify::verify(&parsed).unwrap();
    });
}

#[test]
fn every_kind_has_cases_and_a_name_of_its_own() {
    let registry = kolo_ops::registry();
    let sources = ["input", "param", "state"];
    for kind in &registry {
        assert!(sources.contains(&kind.name) || !(kind.cases)().is_empty(), "{} has no cases", kind.name);
        assert_eq!(registry.iter().filter(|other| other.name == kind.name).count(), 1, "{}", kind.name);
    }
}
