use super::*;
use kolo_graph::sources::Init;
use kolo_graph::{Builder, Type};
use kolo_ops::matmul::MatMul;
use kolo_ops::optim::adam::Adam;
use kolo_ops::optim::sgd::SgdPlain;

/// Longer than a task of an update.
const ELEMENTS: usize = 40_003;

/// Trains a step on a gradient that is its input; whether the lanes' sums are left to the update, and all state after.
fn step(lanes: usize, wanted: &str) -> (bool, Vec<f32>) {
    let builder = Builder::new();
    let w = builder.param("w", [ELEMENTS], Init::Constant(1.0));
    let sum = builder.input("x", Type::f32([ELEMENTS])).then(GrainSum { of: "w".into() }, &[]);
    let (lr, scale) = (builder.scalar(0.1), builder.scalar(1.0));
    builder.update(w, w.then(SgdPlain { weight_decay: 0.0 }, &[sum, lr, scale]));
    match wanted {
        "output" => builder.output("sum", sum),
        "state" => builder.update(builder.state("last", sum.ty(), Init::Constant(0.0)), sum),
        _ => {}
    }
    let graph = builder.finish().unwrap();
    let mut store = Store::new(&graph, 1);
    let mut session = Session::new(graph, &store, Options { threads: lanes, lanes, grains: 4 });
    let fill = |grain: usize, feed: &mut Feed<'_>| {
        let x = feed.f32("x").unwrap();
        x.iter_mut().enumerate().for_each(|(at, x)| *x = 0.1 + (grain * at) as f32 * 1e-5);
    };
    session.run(&mut store, |_| {}, fill).unwrap();
    let names = ["w", "last"].into_iter().filter_map(|name| store.values(name));
    let all = names.chain(session.output("sum")).flatten().copied().collect();
    (session.after.iter().any(|call| !call.terms.is_empty()), all)
}

/// Trains three steps on a gradient that is a product; whether it is stored, and all state after.
fn product_step(
    [rows, columns, terms]: [usize; 3],
    threads: usize,
    as_output: bool,
    scale: f32,
) -> (bool, Vec<f32>, Option<String>) {
    let builder = Builder::new();
    let ty = Type::f32([rows, columns]);
    let w = builder.param("w", [rows, columns], Init::Constant(1.0));
    let [m, v] = ["m", "v"].map(|name| builder.state(name, ty.clone(), Init::Constant(0.01)));
    let (x, y) = (builder.input("x", Type::f32([terms, rows])), builder.input("y", Type::f32([terms, columns])));
    let sum = x.then(MatMul { ta: true, tb: false }, &[y]).then(GrainSum { of: "w".into() }, &[]);
    let numbers = [0.1, 0.5, 3.0].map(|value| builder.scalar(value));
    let adam = Adam { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, decoupled: true };
    let updated = builder.apply_all(adam, &[w, sum, m, v, numbers[0], numbers[1], numbers[2]]);
    [w, m, v].into_iter().zip(updated).for_each(|(state, value)| builder.update(state, value));
    if as_output {
        builder.output("sum", sum);
    }
    let graph = builder.finish().unwrap();
    let mut store = Store::new(&graph, 1);
    let mut session = Session::new(graph, &store, Options::single(threads));
    let fill = |_: usize, feed: &mut Feed<'_>| {
        for (name, step) in [("x", 0.37f32), ("y", 0.61)] {
            let values = feed.f32(name).unwrap();
            values.iter_mut().enumerate().for_each(|(at, value)| *value = scale * (at as f32 * step).sin());
        }
    };
    for _ in 0..3 {
        session.run(&mut store, |_| {}, fill).unwrap();
    }
    let stored = session.layout.unstored.is_empty();
    let bad = session.find_nonfinite(0, fill).map(|node| session.graph().node(node).op.name().to_owned());
    (stored, ["w", "m", "v"].into_iter().flat_map(|name| store.values(name).unwrap()).copied().collect(), bad)
}

#[test]
fn an_update_takes_a_large_product_as_it_is_made() {
    // Whole tiles and remainders; one sum is no larger than what it is the sum of, one has too many terms.
    let shapes = [([96, 128, 8], false), ([531, 217, 100], false), ([50, 37, 3], false), ([64, 64, 33], true)];
    for (shape, too_small) in shapes.into_iter().chain([([700, 700, 300], true)]) {
        let (stored, wanted, bad) = product_step(shape, 1, true, 1.0);
        assert!(stored && bad.is_none(), "{shape:?}: an output is stored");
        for threads in [1, 2, 3] {
            let (stored, state, bad) = product_step(shape, threads, false, 1.0);
            assert_eq!((stored, bad), (too_small, None), "{shape:?}");
            assert!(state == wanted, "{shape:?} on {threads} threads");
        }
    }
}

#[test]
fn a_product_that_nobody_stores_is_looked_at_too() {
    let (stored, _, bad) = product_step([96, 128, 8], 1, false, 1e20);
    assert_eq!((stored, bad.as_deref()), (false, Some("matmul")));
}

#[test]
fn lanes_are_added_by_the_update_if_it_is_alone() {
    for wanted in ["nothing", "output", "state"] {
        let (left, one) = step(1, wanted);
        assert!(!left, "one lane has one sum");
        for lanes in [2, 4] {
            let (left, several) = step(lanes, wanted);
            assert_eq!(left, wanted == "nothing", "{lanes} lanes, {wanted} wanted");
            assert!(several == one, "{lanes} lanes, {wanted} wanted");
        }
    }
}
