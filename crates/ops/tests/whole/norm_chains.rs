//! Chains that run in the pass of a norm.

use kolo_graph::Graph;
use kolo_graph::cuda::CudaCx;
use kolo_graph::cuda::CudaTarget;
use kolo_graph::layout::{self, Abilities};
use kolo_graph::sources::Init;
use kolo_graph::{Builder, Op, Tensor, Type};
use kolo_ops::batch_norm::BatchNormMethods;
use kolo_ops::batch_norm::{BatchNorm, BatchNormGrad};
use kolo_ops::channel_order::ChannelOrders;
use kolo_ops::conv::ConvMethods;
use kolo_ops::elementwise::{ElementwiseMethods, ReluGrad};
use kolo_ops::norm_chains::NormChains;
use kolo_ops::reduce::ReduceMethods;

struct InPlace;

impl Abilities for InPlace {
    fn in_place(&self, op: &dyn Op) -> Vec<(usize, usize)> {
        kolo_ops::cuda_of(op).map_or_else(Vec::new, |op| op.in_place())
    }
}

fn conv<'b>(builder: &'b Builder, x: Tensor<'b>, name: &str) -> Tensor<'b> {
    x.conv2d(builder.param(name, [8, 8, 3, 3], Init::ONES), None, [1, 1], [1, 1], [1, 1], 1)
}

/// A norm whose images go through relu alone, one whose images are read twice, and the backward pass of the first.
fn graph() -> Graph {
    let builder = Builder::new();
    let x = builder.input("x", Type::f32([2, 8, 4, 4]));
    let channels = |name: &str| builder.param(name, [8], Init::ONES);
    let made = conv(&builder, x, "first");
    let norm = BatchNorm { eps: 1e-5 };
    let outputs = builder.apply_all(norm, &[made, channels("scale"), channels("shift")]);
    let y = outputs[0].relu();
    let second = conv(&builder, y, "second").batch_norm(channels("scale 2"), channels("shift 2"), 1e-5).0;
    let g = conv(&builder, second.add(second.relu()), "third");
    let masked = y.then(ReluGrad {}, &[g]);
    let inputs = [made, channels("scale"), outputs[1], outputs[2], masked];
    let dx = builder.apply_all(BatchNormGrad {}, &inputs)[0];
    builder.output("dx", conv(&builder, dx, "fourth").sum(&[0, 1, 2, 3]));
    builder.finish().unwrap()
}

#[test]
fn chains_join_the_norm_that_alone_reads_or_feeds_them() {
    let graph = graph();
    let target = CudaTarget { convolutions: true, tf32: true, ..CudaTarget::default() };
    let orders = ChannelOrders::new(&graph, &target);
    let layout = layout::plan(&graph, 1, 1, &InPlace);
    let chains = NormChains::new(&graph, &layout, &orders);
    let joined: Vec<&str> =
        graph.ids().filter(|id| chains.is_run_by_norm(*id)).map(|id| graph.node(id).op.name()).collect();
    assert_eq!(joined, ["relu", "relu_grad"]);
    let backward = graph.ids().find(|id| graph.node(*id).op.is::<BatchNormGrad>()).unwrap();
    let inputs = chains.inputs(&graph, backward);
    assert_eq!(inputs.len(), 7);
    let (types, made) = (graph.types(&inputs), graph.types(&graph.node(backward).outputs));
    let calls = chains.calls(&graph, backward, &CudaCx::new(&types, &made, &target)).unwrap();
    assert!(calls.sources().all(|source| source.text.contains("chain(float x0, float x1)")));
    // Where channels lie first nothing is joined.
    let plain = CudaTarget::default();
    let chains = NormChains::new(&graph, &layout, &ChannelOrders::new(&graph, &plain));
    assert!(graph.ids().all(|id| !chains.is_run_by_norm(id)));
}
