//! Results and gradients against PyTorch's, which `goldens.py` wrote down: what an op means must not be decided by our own
//! definitions alone.

use super::{assert_close, name, numbers, run_graph};
use kolo_graph::{Builder, Dense, Tensor, Type};
use kolo_ops::attention::Alignment;
use kolo_ops::prelude::*;

const GOLDENS: &str = include_str!("torch.txt");

type Build = Box<dyn for<'b> Fn(&[Tensor<'b>]) -> Tensor<'b>>;

fn case(
    name: impl Into<String>,
    shapes: &[&[usize]],
    build: impl for<'b> Fn(&[Tensor<'b>]) -> Tensor<'b> + 'static,
) -> (String, Vec<Vec<usize>>, Build) {
    (name.into(), shapes.iter().map(|shape| shape.to_vec()).collect(), Box::new(build))
}

fn cases() -> Vec<(String, Vec<Vec<usize>>, Build)> {
    let windows =
        [([2, 2], [2, 2], [0, 0]), ([3, 3], [2, 2], [1, 1]), ([2, 3], [3, 4], [1, 1]), ([3, 2], [4, 5], [0, 1])];
    let image: &[&[usize]] = &[&[2, 1, 5, 6]];
    let mut all = Vec::new();
    for (at, (kernel, stride, padding)) in windows.into_iter().enumerate() {
        for ceil in [false, true] {
            let tag = format!("{at}{}", if ceil { " ceil" } else { "" });
            all.push(case(format!("max_pool {tag}"), image, move |x| {
                x[0].max_pool2d_with(kernel, stride, padding, ceil)
            }));
            for count in [false, true] {
                let tag = format!("{tag}{}", if count { " count" } else { "" });
                all.push(case(format!("avg_pool {tag}"), image, move |x| {
                    x[0].avg_pool2d_with(kernel, stride, padding, ceil, count)
                }));
            }
        }
    }
    all.extend([
        case("conv uneven", &[&[1, 2, 5, 4], &[3, 2, 3, 3]], |x| {
            x[0].conv2d(x[1], None, [1, 1], [1, 0, 0, 2], [1, 1], 1)
        }),
        case("conv uneven strided", &[&[1, 2, 6, 5], &[2, 1, 3, 2]], |x| {
            x[0].conv2d(x[1], None, [2, 2], [0, 2, 1, 0], [1, 1], 2)
        }),
        case("conv_transpose uneven", &[&[1, 2, 3, 3], &[2, 2, 3, 3]], |x| {
            x[0].conv_transpose2d(x[1], None, [2, 2], [1, 0, 2, 1], [1, 1], [1, 1], 1)
        }),
        case("matmul shared right", &[&[2, 3, 4], &[4, 2]], |x| x[0].matmul(x[1])),
        case("matmul shared left", &[&[3, 4], &[2, 4, 2]], |x| x[0].matmul(x[1])),
        case("matmul both stretch", &[&[2, 1, 3, 2], &[3, 2, 2]], |x| x[0].matmul(x[1])),
    ]);
    let (short, long): (&[&[usize]], &[&[usize]]) =
        (&[&[1, 2, 4], &[1, 4, 4], &[1, 4, 4]], &[&[1, 4, 4], &[1, 2, 4], &[1, 2, 4]]);
    for (lengths, shapes) in [("fewer", short), ("more", long)] {
        for (corner, align) in [("top left", Alignment::TopLeft), ("bottom right", Alignment::BottomRight)] {
            all.push(case(format!("attention {corner}, {lengths} queries"), shapes, move |x| {
                x[0].causal_attention(x[1], x[2], None, 2, align)
            }));
        }
    }
    for (name, shape) in [("down", &[1, 1, 9, 10]), ("up", &[1, 2, 2, 3])] {
        all.push(case(format!("adaptive_avg_pool {name}"), &[shape], |x| x[0].adaptive_avg_pool2d([7, 7])));
    }
    all.push(case("attention as is_causal", short, |x| x[0].causal_attention(x[1], x[2], None, 1, Alignment::TopLeft)));
    all
}

fn tensor(shape: &[usize], salt: usize) -> Dense {
    let number = |at: usize| (((at * 7 + salt * 5) % 23) as f64 - 11.0) / 8.0;
    Dense::new(shape.to_vec(), (0..shape.iter().product()).map(number).collect())
}

/// The lines of a case: `out`, then the gradient of each input.
fn golden(name: &str) -> Vec<Vec<f64>> {
    let mut lines = GOLDENS.lines().skip_while(|line| *line != format!("case {name}"));
    assert!(lines.next().is_some(), "torch.txt has no case `{name}`");
    let values = |line: &str| line.split(' ').skip(1).map(|word| word.parse().unwrap()).collect();
    lines.take_while(|line| !line.starts_with("case ")).map(values).collect()
}

#[test]
fn ops_agree_with_pytorch() {
    let _shared = super::WIDTH.read().unwrap_or_else(std::sync::PoisonError::into_inner);
    let cases = cases();
    assert_eq!(cases.len(), GOLDENS.lines().filter(|line| line.starts_with("case ")).count());
    for (label, shapes, build) in cases {
        let builder = Builder::new();
        let inputs: Vec<Tensor<'_>> =
            shapes.iter().enumerate().map(|(at, shape)| builder.input(&name(at), Type::f32(shape.clone()))).collect();
        let out = build(&inputs);
        let weights = builder.input(&name(inputs.len()), Type::f32(out.shape()));
        builder.output("out", out);
        let grads = kolo_ops::gradients(&builder, out.mul(weights).sum_all(), 1.0, &inputs);
        grads.iter().enumerate().for_each(|(at, grad)| builder.output(&format!("d{at}"), grad.unwrap()));
        let mut values: Vec<Dense> = shapes.iter().enumerate().map(|(salt, shape)| tensor(shape, salt)).collect();
        values.push(tensor(&out.shape(), 9));
        let graph = builder.finish().unwrap_or_else(|error| panic!("{label}: {error}"));
        let want = golden(&label);
        assert_eq!(want.len(), graph.outputs.len(), "{label}");
        for ((made, want), (output, _)) in run_graph(&graph, &values, 1).iter().zip(&want).zip(&graph.outputs) {
            assert_close(&numbers(made), want, 2e-6, &format!("{label}: {output}"));
        }
    }
}
