//! A batch norm that runs an elementwise chain in its pass must give the bits of the two one after the other.

use super::{Case, CudaCx, CudaTarget, Library, Memory, Trial, draw};
use kolo_graph::layout::{self, Abilities};
use kolo_graph::op::Dense;
use kolo_graph::sources::Init;
use kolo_graph::{Arg, Builder, CudaCalls, DType, Graph, NodeId, Op, Tensor, Type, ValueId};
use kolo_ops::batch_norm::{BatchNorm, BatchNormGrad};
use kolo_ops::channel_order::ChannelOrders;
use kolo_ops::cuda_of;
use kolo_ops::elementwise::ReluGrad;
use kolo_ops::norm_chains::NormChains;
use kolo_ops::prelude::*;

struct InPlace;

impl Abilities for InPlace {
    fn in_place(&self, op: &dyn Op) -> Vec<(usize, usize)> {
        cuda_of(op).map_or_else(Vec::new, |op| op.in_place())
    }
}

/// A norm, an addition and relu; then the gradient of relu and the norm's backward pass.
fn graph(dtype: DType) -> Graph {
    let builder = Builder::new();
    let x = builder.input("x", Type::new(dtype, [3, 16, 5, 3]));
    let channels = |name: &str| builder.param(name, [16], Init::ONES);
    let conv = |x: Tensor<'_>, name: &str| {
        let weight = builder.param(name, [16, 16, 3, 3], Init::ONES).cast(dtype);
        x.conv2d(weight, None, [1, 1], [1, 1], [1, 1], 1)
    };
    let first = conv(x, "first");
    let other = conv(first, "second");
    let made = conv(other, "third");
    let outputs = builder.apply_all(BatchNorm { eps: 1e-5 }, &[made, channels("scale"), channels("shift")]);
    let y = outputs[0].add(other).relu();
    let g = conv(y, "fourth");
    let masked = y.then(ReluGrad {}, &[g]);
    let inputs = [made, channels("scale"), outputs[1], outputs[2], masked];
    let dx = builder.apply_all(BatchNormGrad {}, &inputs)[0];
    builder.output("dx", conv(dx, "fifth").sum(&[0, 1, 2, 3]));
    kolo_ops::fuse::fuse_elementwise(builder.finish().expect("a graph"))
}

fn trial(graph: &Graph, ids: &[ValueId], made: &[ValueId], calls: CudaCalls) -> Trial {
    let case = Case::new(ReluGrad {}, [Arg::real([1]), Arg::real([1])]);
    Trial { label: String::new(), case, inputs: graph.types(ids), outputs: graph.types(made), calls }
}

/// A node by itself, with channels last.
fn alone(graph: &Graph, id: NodeId, target: &CudaTarget) -> Trial {
    let node = graph.node(id);
    let (inputs, outputs) = (graph.types(&node.inputs), graph.types(&node.outputs));
    let cx = CudaCx { channels_last: true, ..CudaCx::new(&inputs, &outputs, target) };
    let calls = cuda_of(&*node.op).expect("a GPU side").calls(&cx);
    trial(graph, &node.inputs, &node.outputs, calls)
}

fn numbers(graph: &Graph, id: ValueId) -> Dense {
    let ty = graph.ty(id);
    draw(&Arg { ty: ty.clone(), ..Arg::real(&*ty.shape) }, ty.dtype, id.0 as usize)
}

#[test]
fn norms_with_chains_give_the_bits_of_both() {
    let target = CudaTarget { convolutions: true, tf32: true, ..CudaTarget::default() };
    for dtype in [DType::F32, DType::BF16] {
        let graph = graph(dtype);
        let layout = layout::plan(&graph, 1, 1, &InPlace);
        let chains = NormChains::new(&graph, &layout, &ChannelOrders::new(&graph, &target));
        let joined: Vec<NodeId> = graph.ids().filter(|id| chains.is_run_by_norm(*id)).collect();
        assert_eq!(joined.len(), 2, "one behind the norm and one before its backward pass");
        for chain in joined {
            let reads_chain = |id: &NodeId| chains.inputs(&graph, *id).len() > graph.node(*id).inputs.len();
            let beside = |id: &NodeId| {
                let (norm, chain) = (graph.node(*id), graph.node(chain));
                chain.inputs.contains(&norm.outputs[0]) || norm.inputs.contains(&chain.outputs[0])
            };
            let norm = graph.ids().find(|id| reads_chain(id) && beside(id)).expect("a chain has a norm");
            let (ids, node) = (chains.inputs(&graph, norm), graph.node(norm));
            let (inputs, outputs) = (graph.types(&ids), graph.types(&node.outputs));
            let calls = chains.calls(&graph, norm, &CudaCx::new(&inputs, &outputs, &target)).expect("a chain");
            let trials = [
                trial(&graph, &ids, &node.outputs, calls),
                alone(&graph, norm, &target),
                alone(&graph, chain, &target),
            ];
            let Some(library) = Library::of(&trials) else { return println!("skipped: no C++ compiler") };
            let run = |at: usize, inputs: &[Dense]| Memory::of(&trials[at], inputs).run(&trials[at].calls, &library);
            let all: Vec<Dense> = ids.iter().map(|id| numbers(&graph, *id)).collect();
            let joined = run(0, &all);
            let shape = |id: ValueId| graph.ty(id).shape.clone();
            let links = &graph.node(chain).inputs;
            if links.contains(&node.outputs[0]) {
                let mut apart = run(1, &all[..node.inputs.len()]);
                let own = |id: &ValueId| match *id == node.outputs[0] {
                    true => Dense::new(shape(*id), apart[0].clone()),
                    false => numbers(&graph, *id),
                };
                let inputs: Vec<Dense> = links.iter().map(own).collect();
                apart[0] = run(2, &inputs).remove(0);
                assert_eq!(joined, apart);
            } else {
                let inputs: Vec<Dense> = links.iter().map(|id| numbers(&graph, *id)).collect();
                let gradient = Dense::new(shape(node.inputs[4]), run(2, &inputs).remove(0));
                let apart = run(1, &[&all[..4], &[gradient]].concat());
                assert_eq!(joined, apart);
            }
        }
    }
}
