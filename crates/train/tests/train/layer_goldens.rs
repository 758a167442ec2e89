//! The layers for models of one's own against PyTorch's modules: the names and shapes of their parameters, how they start, what they
//! compute and their gradients. `../goldens/make_layers.py` made the file and says how every number is derived.

use crate::goldens::uniform;
use kolo_exec::{Store, reference};
use kolo_graph::ValueId;
use kolo_graph::op::Dense;
use kolo_models::Build;
use kolo_models::layers::Conv;
use kolo_ops::prelude::*;
use std::collections::BTreeMap;

/// What the layer is called; the file's names do not have it in front.
const NAME: &str = "layer";

fn bare(name: &str) -> String {
    name.strip_prefix("layer.").unwrap_or(name).into()
}

/// A layer on inputs of these dims. Sizes that the module does not take from its input are its own.
fn layer<'b>(case: &str, cx: &Build<'b>, x: Tensor<'b>, is_large: bool) -> Tensor<'b> {
    let sizes = |small: [usize; 2], large: [usize; 2]| if is_large { large } else { small };
    match case {
        "gru" => cx.gru(NAME, x, sizes([4, 0], [64, 0])[0], 2),
        "lstm" => cx.lstm(NAME, x, sizes([4, 0], [64, 0])[0], 2),
        "embedding" => {
            let [rows, width] = sizes([7, 3], [500, 40]);
            cx.embedding(NAME, x, rows, width)
        }
        "conv_transpose2d" if is_large => cx.conv_transpose2d(NAME, x, Conv::same(32, 3).padding(0), 0),
        "conv_transpose2d" => cx.conv_transpose2d(NAME, x, Conv::same(6, 3).stride(2), 1),
        other => panic!("the file has a case `{other}`, which is not known here"),
    }
}

fn input_of(case: &str, is_large: bool) -> Type {
    match (case, is_large) {
        ("embedding", _) => Type::i32([2, 5]),
        ("conv_transpose2d", false) => Type::f32([2, 4, 3, 5]),
        ("conv_transpose2d", true) => Type::f32([1, 48, 3, 5]),
        (_, false) => Type::f32([2, 5, 3]),
        (_, true) => Type::f32([2, 5, 48]),
    }
}

fn build(builder: &Builder) -> Build<'_> {
    Build { builder, batch: 2, grains: 1, training: true }
}

fn numbers(name: &str, shape: &[usize]) -> Dense {
    let count: usize = shape.iter().product();
    Dense::new(shape, (0..count as u64).map(|at| f64::from((2.0 * uniform(name, at) - 1.0) as f32)).collect())
}

/// What the case computes: `y`, and gradients by the names of parameters and `x`.
fn computed(case: &str) -> BTreeMap<String, Dense> {
    let builder = Builder::new();
    let ty = input_of(case, false);
    let x = builder.input("x", ty.clone());
    let y = layer(case, &build(&builder), x, false);
    let loss = y.mul(builder.input("w", y.ty())).sum_all();
    let params: Vec<(String, ValueId)> = builder.graph().params().map(|(id, param)| (bare(&param.name), id)).collect();
    let mut wrt: Vec<(String, Tensor<'_>)> = params.into_iter().map(|(name, id)| (name, builder.tensor(id))).collect();
    wrt.extend(ty.dtype.is_float().then(|| ("x".to_string(), x)));
    let targets: Vec<Tensor<'_>> = wrt.iter().map(|(_, tensor)| *tensor).collect();
    builder.output("y", y);
    for (grad, (name, _)) in kolo_ops::gradients(&builder, loss, 1.0, &targets).into_iter().zip(&wrt) {
        builder.output(&format!("grad {name}"), grad.unwrap());
    }
    let graph = builder.finish().unwrap_or_else(|error| panic!("{case}: {error}"));
    let value = |name: &str| {
        let sources = graph.params().map(|(id, param)| (&param.name, id));
        let mut sources = sources.chain(graph.inputs().map(|(id, input)| (&input.name, id)));
        let ty = graph.ty(sources.find(|(known, _)| *known == name)?.1);
        let name = format!("{case}.{}", bare(name));
        let mut value = numbers(&name, &ty.shape);
        if !ty.dtype.is_float() {
            let drawn = |at: usize| (uniform(&name, at as u64) * 7.0).floor();
            value.data.iter_mut().enumerate().for_each(|(at, id)| *id = drawn(at));
        }
        Some(value)
    };
    let values = reference::evaluate(&graph, value).unwrap();
    graph.outputs.iter().map(|(name, id)| (name.clone(), values[id.0 as usize].clone())).collect()
}

/// The parameters of the larger layer as they start.
fn started(case: &str) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let builder = Builder::new();
    let x = builder.input("x", input_of(case, true));
    builder.output("y", layer(case, &build(&builder), x, true));
    let graph = builder.finish().unwrap();
    let store = Store::new(&graph, 1);
    let start = |name: &str| store.values(name).unwrap().to_vec();
    graph.params().map(|(id, param)| (bare(&param.name), graph.ty(id).shape.to_vec(), start(&param.name))).collect()
}

#[test]
fn layers_of_ones_own_models_are_those_of_pytorch() {
    let (mut made, mut start, mut case) = (BTreeMap::new(), Vec::new(), "");
    let mut left = Vec::new();
    for line in include_str!("../goldens/layers.txt").lines() {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["case", name] => {
                (made, start, case) = (computed(name), started(name), name);
                left.extend(made.keys().map(|output| format!("{name}: {output}")));
                left.extend(start.iter().map(|(param, ..)| format!("{name} starts: {param}")));
            }
            ["start", param, dims, size, largest] => {
                let (_, shape, values) = start.iter().find(|(known, ..)| known == param).expect("a parameter");
                assert_eq!(shape.iter().map(usize::to_string).collect::<Vec<_>>().join(","), dims, "{case}: {param}");
                let [size, largest] = [size, largest].map(|text| text.parse::<f64>().unwrap());
                let own = (values.iter().map(|x| f64::from(x * x)).sum::<f64>() / values.len() as f64).sqrt();
                let most = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                // Both are draws: of few numbers, they differ more.
                let near = 4.0 / (values.len() as f64).sqrt();
                assert!((own / size - 1.0).abs() < near, "{case}: {param} starts at {own}, in PyTorch at {size}");
                assert!((f64::from(most) / largest - 1.0).abs() < 0.2, "{case}: {param}: {most} and {largest}");
                left.retain(|name| *name != format!("{case} starts: {param}"));
            }
            ["y", ..] | ["grad", ..] => {
                let from = if words[0] == "y" { 1 } else { 3 };
                let output = if words[0] == "y" { "y".into() } else { format!("grad {}", words[1]) };
                let own = made.get(&output).unwrap_or_else(|| panic!("{case} has no {output}"));
                if words[0] == "grad" {
                    let dims: Vec<String> = own.shape.iter().map(usize::to_string).collect();
                    assert_eq!(dims.join(","), words[2], "{case}: {output}");
                }
                assert_eq!(own.data.len(), words.len() - from, "{case}: {output}");
                for (own, want) in own.data.iter().zip(&words[from..]) {
                    let want: f64 = want.parse().unwrap();
                    assert!((own - want).abs() <= 1e-6 * want.abs().max(1.0), "{case}: {output}: {own}, not {want}");
                }
                left.retain(|name| *name != format!("{case}: {output}"));
            }
            _ => panic!("{line}"),
        }
    }
    assert!(left.is_empty(), "PyTorch has no {left:?}");
}
