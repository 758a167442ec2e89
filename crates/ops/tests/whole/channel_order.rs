//! Where the channels of a graph's images lie on a GPU.

use kolo_graph::cuda::CudaCall;
use kolo_graph::cuda::{CudaBuffer, CudaCx, CudaPlace, CudaTarget};
use kolo_graph::sources::Init;
use kolo_graph::{Builder, DType, Tensor};
use kolo_graph::{Graph, Node, Type};
use kolo_ops::batch_norm::BatchNormMethods;
use kolo_ops::channel_order::{ChannelOrders, calls};
use kolo_ops::conv::ConvMethods;
use kolo_ops::elementwise::ElementwiseMethods;
use kolo_ops::reduce::ReduceMethods;

fn target() -> CudaTarget {
    CudaTarget { convolutions: true, tf32: true, ..CudaTarget::default() }
}

fn conv<'b>(x: Tensor<'b>, weight: Tensor<'b>) -> Tensor<'b> {
    x.conv2d(weight, None, [1, 1], [1, 1], [1, 1], 1)
}

/// Two convolutions with a norm and an addition between them, and a mean over planes; the sum of its first result is kept too.
fn graph() -> Graph {
    let builder = Builder::new();
    let x = builder.input("x", Type::f32([2, 3, 8, 8]));
    let weight = |name: &str, inputs: usize| builder.param(name, [4, inputs, 3, 3], Init::Constant(1.0));
    let channels = |name: &str| builder.param(name, [4], Init::Constant(1.0));
    let first = conv(x, weight("first", 3));
    let normed = first.batch_norm(channels("scale"), channels("shift"), 1e-5).0.relu();
    let second = conv(normed, weight("second", 4)).add(first);
    builder.output("planes", second.sum(&[2, 3]));
    builder.output("kept", second.neg());
    builder.finish().unwrap()
}

fn orders_of(graph: &Graph, target: &CudaTarget) -> Vec<(String, bool)> {
    let orders = ChannelOrders::new(graph, target);
    let name = |node: &Node| (node.op.name().to_string(), orders.is_last(node.outputs[0]));
    graph.nodes.iter().filter(|node| graph.ty(node.outputs[0]).rank() == 4).map(name).collect()
}

#[test]
fn images_between_convolutions_lie_last_and_what_is_kept_does_not() {
    let graph = graph();
    let last: Vec<String> =
        orders_of(&graph, &target()).into_iter().filter(|(_, last)| *last).map(|(name, _)| name).collect();
    assert_eq!(last, ["conv2d", "batch_norm", "relu", "conv2d", "add"]);
    let orders = ChannelOrders::new(&graph, &target());
    let named = |name: &str| graph.outputs.iter().find(|(own, _)| own == name).unwrap().1;
    let maker = graph.value(named("kept")).node;
    assert!(orders.runs_last(maker) && !orders.is_last(named("kept")));
    // Without tensor cores or without the library nobody gains.
    for target in [CudaTarget { tf32: false, ..target() }, CudaTarget { convolutions: false, ..target() }] {
        assert!(orders_of(&graph, &target).iter().all(|(_, last)| !last));
    }
}

#[test]
fn what_lies_otherwise_goes_through_scratch() {
    let types = [Type::new(DType::BF16, [2, 8, 4, 4]), Type::new(DType::BF16, [16, 8, 3, 3])];
    let made = [Type::new(DType::BF16, [2, 16, 4, 4])];
    let op = kolo_ops::conv::Conv2d { stride: [1, 1], padding: [1, 1].into(), dilation: [1, 1], groups: 1 };
    let target = target();
    let cx = CudaCx { channels_last: true, ..CudaCx::new(&types, &made, &target) };
    let kinds = |inputs: [bool; 2], output: bool| -> Vec<bool> {
        let calls = calls(&op, &cx, &inputs, &[output]).calls;
        calls.iter().map(|call| matches!(call, CudaCall::Convolution(_))).collect()
    };
    assert_eq!(kinds([true, true], true), [true]);
    assert_eq!(kinds([true, false], true), [false, true]);
    assert_eq!(kinds([false, false], false), [false, false, true, false]);
    let CudaCall::Convolution(whole) = &calls(&op, &cx, &[true, false], &[true]).calls[1] else {
        panic!("a convolution")
    };
    assert_eq!((whole.image, whole.grid), (CudaPlace::input(0), CudaPlace::output(0)));
    assert_eq!(whole.weight.buffer, CudaBuffer::Scratch);
}
