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

fn conv<'b>(builder: &'b Builder, x: Tensor<'b>, name: &str) -> Tensor<'b> {
    let weight = builder.param(name, [16, 16, 3, 3], Init::ONES).cast(x.dtype());
    x.conv2d(weight, None, [1, 1], [1, 1], [1, 1], 1)
}

/// A norm, an addition and relu; then the gradient of relu and the norm's backward pass.
fn graph(dtype: DType) -> Graph {
    let builder = Builder::new();
    let x = builder.input("x", Type::new(dtype, [3, 16, 5, 3]));
    let channels = |name: &str| builder.param(name, [16], Init::ONES);
    let first = conv(&builder, x, "first");
    let other = conv(&builder, first, "second");
    let made = conv(&builder, other, "third");
    let outputs = builder.apply_all(BatchNorm { eps: 1e-5 }, &[made, channels("scale"), channels("shift")]);
    let y = outputs[0].add(other).relu();
    let g = conv(&builder, y, "fourth");
    let masked = y.then(ReluGrad {}, &[g]);
    let inputs = [made, channels("scale"), outputs[1], outputs[2], masked];
    let dx = builder.apply_all(BatchNormGrad {}, &inputs)[0];
    builder.output("dx", conv(&builder, dx, "fifth").sum(&[0, 1, 2, 3]));
    kolo_ops::fuse::fuse_elementwise(&builder.finish().expect("a graph"))
}

fn trial(graph: &Graph, ids: &[ValueId], made: &[ValueId], calls: CudaCalls) -> Trial {
    let case = Case::new(ReluGrad {}, [Arg::real([1]), Arg::real([1])]);
    Trial { label: String::new(), case, inputs: graph.types(ids), outputs: graph.types(made), calls, tf32: false }
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

/// A norm with its chain, and what each of the two runs: together, the norm alone, the chain alone.
struct Pair {
    graph: Graph,
    norm: NodeId,
    chain: NodeId,
    /// What the two read together.
    inputs: Vec<ValueId>,
}

fn pairs(dtype: DType, target: &CudaTarget, trials: &mut Vec<Trial>) -> Vec<Pair> {
    let graph = graph(dtype);
    let layout = layout::plan(&graph, 1, 1, &InPlace);
    let chains = NormChains::new(&graph, &layout, &ChannelOrders::new(&graph, target));
    let of_chain = |chain: NodeId| {
        let beside = |id: &NodeId| {
            let (norm, chain) = (graph.node(*id), graph.node(chain));
            let joined = chains.inputs(&graph, *id).len() > norm.inputs.len();
            joined && (chain.inputs.contains(&norm.outputs[0]) || norm.inputs.contains(&chain.outputs[0]))
        };
        let norm = graph.ids().find(beside).expect("a chain has a norm");
        Pair { graph: graph.clone(), norm, chain, inputs: chains.inputs(&graph, norm) }
    };
    let found: Vec<Pair> = graph.ids().filter(|id| chains.is_run_by_norm(*id)).map(of_chain).collect();
    for Pair { norm, chain, inputs, .. } in &found {
        let outputs = &graph.node(*norm).outputs;
        let (given, made) = (graph.types(inputs), graph.types(outputs));
        let calls = chains.calls(&graph, *norm, &CudaCx::new(&given, &made, target)).expect("a chain");
        trials.push(trial(&graph, inputs, outputs, calls));
        trials.extend([*norm, *chain].map(|id| alone(&graph, id, target)));
    }
    found
}

#[test]
fn norms_with_chains_give_the_bits_of_both() {
    let target = CudaTarget { convolutions: true, tf32: true, ..CudaTarget::default() };
    let (mut trials, mut all) = (Vec::new(), Vec::new());
    for dtype in [DType::F32, DType::BF16] {
        all.extend(pairs(dtype, &target, &mut trials));
    }
    assert_eq!(all.len(), 4, "one behind the norm and one before its backward pass, in each type");
    let Some(library) = Library::of(&trials) else { return println!("skipped: no C++ compiler") };
    for (Pair { graph, norm, chain, inputs }, trials) in all.iter().zip(trials.chunks(3)) {
        let run = |at: usize, inputs: &[Dense]| Memory::of(&trials[at], inputs).run(&trials[at].calls, &library);
        let given: Vec<Dense> = inputs.iter().map(|id| numbers(graph, *id)).collect();
        let (norm, links) = (graph.node(*norm), &graph.node(*chain).inputs);
        let joined = run(0, &given);
        let of_chain = |from: Option<&Vec<f64>>| {
            let own = |id: &ValueId| match from.filter(|_| *id == norm.outputs[0]) {
                Some(made) => Dense::new(graph.ty(*id).shape.clone(), made.clone()),
                None => numbers(graph, *id),
            };
            run(2, &links.iter().map(own).collect::<Vec<_>>()).remove(0)
        };
        let apart = if links.contains(&norm.outputs[0]) {
            let mut apart = run(1, &given[..norm.inputs.len()]);
            apart[0] = of_chain(Some(&apart[0]));
            apart
        } else {
            let gradient = Dense::new(graph.ty(norm.inputs[4]).shape.clone(), of_chain(None));
            run(1, &[&given[..4], &[gradient]].concat())
        };
        assert_eq!(joined, apart);
    }
}
