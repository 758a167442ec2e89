//! Batch normalisation in steps, for planes of which every worker has a part: what is summed over a part of the elements, and
//! what is made of the sums over all of them.
//!
//! [`in_steps`] writes a graph's batch norms so. The mean is [`Sum`] and a division; [`ChannelSquares`] are summed to the
//! variance, and [`BatchNormEval`] normalises. Backward, [`BatchNormGradSums`] are summed and [`BatchNormGradWith`] differentiates.

use crate::batch_norm::{
    BatchNorm, BatchNormEval, BatchNormGrad, CHANNELS_MAX, GpuPlanes, Planes, SOURCE, add_gradients, add_squares,
    differentiate_planes, sum_parts,
};
use crate::cast::Cast;
use crate::device;
use crate::elementwise::{Mul, Rsqrt, Scale, Shift};
use crate::norm;
use crate::reduce::Sum;
use crate::sums::{self, Values};
use crate::tiles::Address;
use kolo_graph::cuda::{Cuda, CudaArg, CudaCalls, CudaCx, CudaPlace, CudaSource};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::rewrite::Rebuild;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, DType, Dense, Graph, Node, Op, Operand, Operands, Type, ValueId, op};
use std::sync::Arc;

op! {
    /// `Σ (x − mean)²` of each channel of `[n, c, …]`.
    pub struct ChannelSquares = "channel_squares" {}
}

op! {
    /// `Σ g` and `Σ g·(x − mean)` of each channel, from (x, mean, g).
    pub struct BatchNormGradSums = "batch_norm_grad_sums" {}
}

op! {
    /// The gradient of x from (x, weight, mean, rstd, g) and those two sums over all `count` elements of a channel.
    pub struct BatchNormGradWith = "batch_norm_grad_with" { count: usize }
}

/// The index expression of `operands`, with `x` for `n c …`.
fn planes_index(inputs: &[Type], operands: &str) -> Option<Index> {
    let spatial = norm::axes(inputs.first()?.rank().checked_sub(2)?, false);
    Some(Index::parse(&operands.replace('x', &format!("n c {spatial}"))))
}

impl Op for ChannelSquares {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::f32("x"), Operand::f32("mean")], &["squares"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        planes_index(inputs, "x, c -> c")
    }
    fn flops_per_point(&self) -> u64 {
        3
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let planes = Planes::of(&inputs[0].shape);
        let mut squares = Dense::zeros(outputs[0].shape.clone());
        for (at, x) in inputs[0].data.iter().enumerate() {
            let channel = planes.channel_of(at);
            squares.data[channel] += (x - inputs[1].data[channel]).powi(2);
        }
        vec![squares]
    }
}

impl Cpu for ChannelSquares {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (x, mean, planes) = (cx.f32(0), cx.f32(1), Planes::of(cx.shape(0)));
        let squares = Address(cx.out_f32(0).as_mut_ptr());
        cx.team.chunks(planes.channels, planes.channels_per_task(), |range, _| {
            // SAFETY: tasks own disjoint channels.
            let squares = unsafe { squares.slice(range.start, range.len()) };
            let sums = sum_parts(planes, &range, |lanes, part| add_squares(lanes, &x[part], &mean[range.clone()]));
            squares.iter_mut().zip(&sums).for_each(|(squares, [sum])| *squares = sum.total());
        });
    }
}

impl Op for BatchNormGradSums {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::f32("x"), Operand::f32("mean"), Operand::f32("g")], &["shift", "slope"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        planes_index(inputs, "x, c, x -> c, c")
    }
    fn flops_per_point(&self) -> u64 {
        4
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let [x, mean, g] = [0, 1, 2].map(|at| &inputs[at].data);
        let planes = Planes::of(&inputs[0].shape);
        let [mut shift, mut slope] = [0, 1].map(|at| Dense::zeros(outputs[at].shape.clone()));
        for (at, (x, g)) in x.iter().zip(g).enumerate() {
            let channel = planes.channel_of(at);
            shift.data[channel] += g;
            slope.data[channel] += g * (x - mean[channel]);
        }
        vec![shift, slope]
    }
}

impl Cpu for BatchNormGradSums {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let [x, mean, g] = [0, 1, 2].map(|at| cx.f32(at));
        let planes = Planes::of(cx.shape(0));
        let outputs = [0, 1].map(|at| Address(cx.out_f32(at).as_mut_ptr()));
        cx.team.chunks(planes.channels, planes.channels_per_task(), |range, _| {
            let [shift, slope] = outputs
                // SAFETY: tasks own disjoint channels.
                .map(|address| unsafe { address.slice(range.start, range.len()) });
            let sums = sum_parts(planes, &range, |lanes, part| {
                add_gradients(lanes, &x[part.clone()], &g[part], &mean[range.clone()])
            });
            for at in 0..range.len() {
                (shift[at], slope[at]) = (sums[at][0].total(), sums[at][1].total());
            }
        });
    }
}

impl Op for BatchNormGradWith {
    fn operands(&self) -> Operands {
        let names = ["x", "weight", "mean", "rstd", "g", "shift", "slope"];
        Operands::without_rules(names.map(Operand::f32), &["dx"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        planes_index(inputs, "x, c, c, c, x, c, c -> x")
    }
    fn flops_per_point(&self) -> u64 {
        5
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let [x, weight, mean, rstd, g, shift, slope] = [0, 1, 2, 3, 4, 5, 6].map(|at| &inputs[at].data);
        let (planes, count) = (Planes::of(&inputs[0].shape), self.count as f64);
        let value = |(at, (x, g)): (usize, (&f64, &f64))| {
            let c = planes.channel_of(at);
            let centred = g - shift[c] / count - (x - mean[c]) * (slope[c] * rstd[c] * rstd[c] / count);
            weight[c] * rstd[c] * centred
        };
        vec![Dense::new(outputs[0].shape.clone(), x.iter().zip(g).enumerate().map(value).collect())]
    }
}

impl Cpu for BatchNormGradWith {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let [x, weight, mean, rstd, g, shift, slope] = [0, 1, 2, 3, 4, 5, 6].map(|at| cx.f32(at));
        let (planes, count) = (Planes::of(cx.shape(0)), self.count as f32);
        let dx = Address(cx.out_f32(0).as_mut_ptr());
        cx.team.chunks(planes.channels, planes.channels_per_task(), |range, _| {
            let mut numbers = [[0.0; 4]; CHANNELS_MAX];
            for (numbers, c) in numbers.iter_mut().zip(range.clone()) {
                let slope = slope[c] * rstd[c] * rstd[c] / count;
                *numbers = [mean[c], weight[c] * rstd[c], shift[c] / count, slope];
            }
            for part in planes.parts(&range) {
                // SAFETY: tasks own disjoint channels.
                let dx = unsafe { dx.slice(part.start, part.len()) };
                differentiate_planes(dx, &x[part.clone()], &g[part], &numbers[..range.len()]);
            }
        });
    }
}

impl Cuda for ChannelSquares {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let source = CudaSource::new(SOURCE).define_type("I0", cx.inputs[0].dtype).define("SQUARES", 1);
        let (mut calls, gpu) = (CudaCalls::new(), GpuPlanes::with_source(cx, source));
        let parts = gpu.numbers(&mut calls, gpu.chunks);
        let operands = [device::input(0), device::input(1), parts.into()];
        let args = [&operands[..], &gpu.sizes(), &[device::flag(true)]].concat();
        calls.launch(gpu.launch("channel_parts", gpu.chunk_grid(), args));
        let to = Values::new(CudaPlace::output(0), cx.outputs[0].dtype);
        sums::rows(&mut calls, Values::f32(parts), [gpu.planes.channels, gpu.chunks], to);
        calls
    }
}

impl Cuda for BatchNormGradSums {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let named = [("I0", 0), ("I2", 1), ("I4", 2)];
        let name =
            |source: CudaSource, (name, at): (&'static str, usize)| source.define_type(name, cx.inputs[at].dtype);
        let source = named.into_iter().fold(CudaSource::new(SOURCE).define("SUMS", 1), name);
        let (mut calls, gpu) = (CudaCalls::new(), GpuPlanes::with_source(cx, source));
        let parts = gpu.numbers(&mut calls, 2 * gpu.chunks);
        let operands = [device::input(0), device::input(2), device::input(1), parts.into()];
        calls.launch(gpu.launch("gradient_parts", gpu.chunk_grid(), [&operands[..], &gpu.sizes()].concat()));
        for at in [0, 1] {
            let from = Values::f32(parts.further(at * gpu.planes.channels * gpu.chunks * size_of::<f32>()));
            let to = Values::new(CudaPlace::output(at), cx.outputs[at].dtype);
            sums::rows(&mut calls, from, [gpu.planes.channels, gpu.chunks], to);
        }
        calls
    }
}

impl Cuda for BatchNormGradWith {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (mut calls, gpu) = (CudaCalls::new(), GpuPlanes::new(cx, "GIVEN"));
        let (numbers, channels) = (gpu.numbers(&mut calls, 4), gpu.planes.channels);
        let inputs = [1, 2, 3, 5, 6].map(device::input);
        let rest = [numbers.into(), device::long(channels), CudaArg::F32(self.count as f32)];
        let grid = device::grid(channels, device::THREADS);
        calls.launch(gpu.launch("given_numbers", grid, [&inputs[..], &rest].concat()));
        let operands = [device::input(0), device::input(4), numbers.into(), device::output(0)];
        gpu.over_elements(&mut calls, "differentiate", &operands);
        calls
    }
}

const SHAPES: &[&[usize]] = &[&[4, 3], &[2, 3, 2, 2], &[1, 1, 5], &[3, 150, 4, 4], &[3, 5, 31, 33]];

impl Cases for ChannelSquares {
    fn cases() -> Vec<Case> {
        let case = |shape: &&[usize]| {
            Case::new(ChannelSquares {}, [Arg::real(*shape), Arg::real([shape[1]])].map(Arg::constant))
        };
        SHAPES.iter().map(case).collect()
    }
}

impl Cases for BatchNormGradSums {
    fn cases() -> Vec<Case> {
        let args = |shape: &[usize]| [Arg::real(shape), Arg::real([shape[1]]), Arg::real(shape)].map(Arg::constant);
        SHAPES.iter().map(|shape| Case::new(BatchNormGradSums {}, args(shape))).collect()
    }
}

impl Cases for BatchNormGradWith {
    fn cases() -> Vec<Case> {
        let case = |shape: &&[usize]| {
            let (x, c) = (|| Arg::real(*shape), || Arg::real([shape[1]]));
            let args = [x(), c(), c(), Arg::positive([shape[1]]), x(), c(), c()];
            Case::new(BatchNormGradWith { count: 70 }, args.map(Arg::constant))
        };
        SHAPES.iter().map(case).collect()
    }
}

pub const KINDS: &[OpKind] = &[
    OpKind::of::<ChannelSquares>().with_cuda::<ChannelSquares>(),
    OpKind::of::<BatchNormGradSums>().with_cuda::<BatchNormGradSums>(),
    OpKind::of::<BatchNormGradWith>().with_cuda::<BatchNormGradWith>(),
];

/// The graph with the batch norms of these nodes in steps, each of which can be split along rows and columns.
pub fn in_steps(graph: &Graph, chosen: impl Fn(&Node) -> bool) -> Graph {
    let mut rebuild = Rebuild::new(graph);
    for node in &graph.nodes {
        let planes = node.inputs.first().map(|id| graph.ty(*id)).filter(|ty| ty.dtype.is_float() && ty.rank() == 4);
        let steps = planes.filter(|_| chosen(node)).and_then(|x| {
            let count = x.elements() / x.shape[1].max(1);
            let others: Vec<usize> = (0..x.rank()).filter(|dim| *dim != 1).collect();
            let mut steps = Steps { node, rebuild: &mut rebuild, count, others };
            match (node.op.downcast::<BatchNorm>(), node.op.is::<BatchNormGrad>()) {
                (Some(BatchNorm { eps }), _) => Some(steps.forward(*eps)),
                (_, true) => Some(steps.backward()),
                _ => None,
            }
        });
        match steps {
            Some(outputs) => node.outputs.iter().zip(outputs).for_each(|(old, new)| rebuild.set(*old, new)),
            None => {
                rebuild.copy(node);
            }
        }
    }
    rebuild.finish()
}

/// One batch norm, in steps.
struct Steps<'a, 'g> {
    node: &'a Node,
    rebuild: &'a mut Rebuild<'g>,
    /// Elements of a channel.
    count: usize,
    /// All dims but that of the channels.
    others: Vec<usize>,
}

impl Steps<'_, '_> {
    fn push(&mut self, op: impl Op, inputs: &[ValueId]) -> Vec<ValueId> {
        let new = &mut self.rebuild.new;
        let id = match new.push(Arc::new(op), inputs.to_vec(), self.node.scope.clone(), self.node.stage) {
            Ok(id) => id,
            Err(error) => panic!("the steps of a batch norm fit where it did: {error}"),
        };
        new.node(id).outputs.clone()
    }

    /// The value in f32: sums are, whatever is summed.
    fn widened(&mut self, id: ValueId) -> ValueId {
        self.cast(id, DType::F32)
    }

    fn cast(&mut self, id: ValueId, to: DType) -> ValueId {
        if self.rebuild.new.ty(id).dtype == to { id } else { self.push(Cast { to }, &[id])[0] }
    }

    fn share(&mut self, sum: ValueId) -> ValueId {
        self.push(Scale { factor: 1.0 / self.count as f32 }, &[sum])[0]
    }

    fn inputs(&self) -> Vec<ValueId> {
        self.node.inputs.iter().map(|id| self.rebuild.get(*id)).collect()
    }

    /// y, mean, rstd, variance.
    fn forward(&mut self, eps: f32) -> Vec<ValueId> {
        let [x, weight, bias] = self.inputs()[..] else { unreachable!("a batch norm has three inputs") };
        let wide = self.widened(x);
        let sum = self.push(Sum { dims: self.others.clone(), keep: false }, &[wide])[0];
        let mean = self.share(sum);
        let squares = self.push(ChannelSquares {}, &[wide, mean])[0];
        let variance = self.share(squares);
        let shifted = self.push(Shift { by: eps }, &[variance])[0];
        let rstd = self.push(Rsqrt {}, &[shifted])[0];
        let y = self.push(BatchNormEval { eps }, &[x, weight, bias, mean, variance])[0];
        vec![y, mean, rstd, variance]
    }

    /// dx, dweight, dbias.
    fn backward(&mut self) -> Vec<ValueId> {
        let [x, weight, mean, rstd, g] = self.inputs()[..] else { unreachable!("its backward pass has five") };
        let types = [x, weight].map(|id| self.rebuild.new.ty(id).dtype);
        let [x, weight, g] = [x, weight, g].map(|id| self.widened(id));
        let [shift, slope] = self.push(BatchNormGradSums {}, &[x, mean, g])[..] else { unreachable!("two sums") };
        let dx = self.push(BatchNormGradWith { count: self.count }, &[x, weight, mean, rstd, g, shift, slope])[0];
        let dweight = self.push(Mul {}, &[slope, rstd])[0];
        vec![self.cast(dx, types[0]), self.cast(dweight, types[1]), self.cast(shift, types[1])]
    }
}
