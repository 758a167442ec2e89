//! Single layers and their gradients against PyTorch, in float64 by the definitions and in float32 by the kernels.
//! `../goldens/make_ops.py` made the file and says how every number is derived.

use crate::goldens::uniform;
use kolo_exec::{Options, Session, Store, reference};
use kolo_graph::op::Dense;
use kolo_ops::prelude::*;
use std::collections::BTreeMap;

/// The shapes of a case's inputs and the layer they go through.
type Layer = (Vec<Vec<usize>>, for<'b> fn(&[Tensor<'b>]) -> Tensor<'b>);

fn layer(name: &str) -> Layer {
    let gates =
        |gates: usize| vec![vec![2, 5, 3], vec![gates * 4, 3], vec![gates * 4, 4], vec![gates * 4], vec![gates * 4]];
    match name {
        "gru" => (gates(3), |x| x[0].gru(x[1], x[2], x[3], x[4])),
        "rnn_tanh" => (gates(1), |x| x[0].rnn(x[1], x[2], x[3], x[4], false)),
        "rnn_relu" => (gates(1), |x| x[0].rnn(x[1], x[2], x[3], x[4], true)),
        "huber" => (vec![vec![4, 5]; 2], |x| x[0].scale(2.0).huber_loss(x[1].scale(2.0), 0.7)),
        "group_norm" => (vec![vec![2, 6, 3, 2], vec![6], vec![6]], |x| x[0].group_norm(3, x[1], x[2], 1e-3)),
        "rotary" => (vec![vec![2, 2, 5, 6]], |x| x[0].rotary(100.0)),
        "conv_transpose2d" => (vec![vec![2, 4, 3, 4], vec![4, 3, 3, 2], vec![6]], |x| {
            x[0].conv_transpose2d(x[1], Some(x[2]), [2, 1], [1, 0], [1, 0], [1, 2], 2)
        }),
        other => panic!("the file has a case `{other}`, which is not known here"),
    }
}

fn numbers(name: &str, shape: &[usize]) -> Dense {
    let count: usize = shape.iter().product();
    Dense::new(shape, (0..count as u64).map(|at| f64::from((2.0 * uniform(name, at) - 1.0) as f32)).collect())
}

/// The case's graph with its output `y` and gradients `grad 0`, …, and what to feed it.
fn graph(name: &str) -> (Graph, BTreeMap<String, Dense>) {
    let (shapes, run) = layer(name);
    let builder = Builder::new();
    let input = |at: String, shape: &[usize]| builder.input(&format!("{name}.{at}"), Type::f32(shape));
    let inputs: Vec<Tensor<'_>> = shapes.iter().enumerate().map(|(at, shape)| input(at.to_string(), shape)).collect();
    let y = run(&inputs);
    builder.output("y", y);
    let loss = y.mul(input("w".into(), &y.shape())).sum_all();
    for (at, grad) in kolo_ops::gradients(&builder, loss, 1.0, &inputs).into_iter().enumerate() {
        builder.output(&format!("grad {at}"), grad.unwrap());
    }
    let graph = builder.finish().unwrap_or_else(|error| panic!("{name}: {error}"));
    let fed = graph.inputs().map(|(id, op)| (op.name.clone(), numbers(&op.name, &graph.ty(id).shape))).collect();
    (graph, fed)
}

fn assert_close(got: impl Iterator<Item = f64>, want: &[f64], tolerance: f64, what: &str) {
    let got: Vec<f64> = got.collect();
    assert_eq!(got.len(), want.len(), "{what}");
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= tolerance * want.abs().max(1.0), "{what}[{at}] is {got}, PyTorch {want}");
    }
}

#[test]
fn layers_are_those_of_pytorch() {
    let (mut cases, mut compared) = (Vec::new(), 0);
    for line in include_str!("../goldens/ops.txt").lines() {
        let (word, rest) = line.split_once(' ').unwrap();
        if word == "case" {
            let (graph, fed) = graph(rest);
            let values = reference::evaluate(&graph, |name| fed.get(name).cloned()).unwrap();
            let mut store = Store::new(&graph, 0);
            let mut session = Session::new(graph.clone(), &store, Options::single(1));
            let fill = |feed: &mut kolo_exec::Feed<'_>| {
                for (name, value) in &fed {
                    let out = feed.f32(name).unwrap();
                    out.iter_mut().zip(&value.data).for_each(|(out, value)| *out = *value as f32);
                }
            };
            session.run(&mut store, |_| {}, |_, feed| fill(feed)).unwrap();
            cases.push((rest, graph, values, session));
            continue;
        }
        let (name, graph, values, session) = cases.last().unwrap();
        let (output, rest) = match word {
            "grad" => rest.split_once(' ').map(|(at, rest)| (format!("grad {at}"), rest)).unwrap(),
            _ => (word.to_string(), rest),
        };
        let want: Vec<f64> = rest.split(' ').map(|value| value.parse().unwrap()).collect();
        let id = graph.output(&output).unwrap_or_else(|| panic!("{name} has no {output}"));
        assert_close(values[id.0 as usize].data.iter().copied(), &want, 1e-6, &format!("{name}: defined {output}"));
        let kernel = session.output(&output).unwrap().iter().map(|x| f64::from(*x));
        assert_close(kernel, &want, 3e-6, &format!("{name}: {output}"));
        compared += 1;
    }
    assert_eq!((cases.len(), compared), (7, 7 + 3 * 5 + 2 + 3 + 1 + 3), "cases, and outputs with their gradients");
}
