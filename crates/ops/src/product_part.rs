//! Products over a part of what is summed, read where the operands lie: a slice of both, without a copy of either.
//!
//! A sum that is defined slice by slice (`parallel.slices`) is many products of slices. [`absorb_slices`] makes each of them
//! one op. The bits are those of the product of copies: a sum's order depends on its length alone.

use crate::gemm::{self, Gemm, Lines, Output, Right, Start};
use crate::matmul::{Linear, MatMul, bias_scratch_len, full_bias};
use crate::moves::{self, Walk};
use crate::slice::Slice;
use kolo_graph::cpu::Buffer;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx, CudaMatrix, CudaPlace, Product};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::rewrite::Rebuild;
use kolo_graph::{
    Arg, Case, Cases, Cpu, CpuCx, Dense, Graph, Mixed, Node, Op, Operand, Operands, Type, ValueId, Work, op,
};
use std::sync::Arc;

op! {
    /// `c[m, n] = Σ a[m, k] · b[k, n]` over `k` from `start` to `start + len`; `ta`, `tb` and `wide` as in matmul.
    pub struct MatMulPart = "matmul_part" { ta: bool, tb: bool, start: usize, len: usize, wide: bool = false }
}

op! {
    /// As linear, over the elements of the last dim of `x` from `start` to `start + len`, with the same part of the weight.
    pub struct LinearPart = "linear_part" { transposed: bool, start: usize, len: usize, wide: bool = false }
}

/// A matrix of which only a part of `ks` elements is summed, those from `start` on.
fn part(operand: &Buffer, lines: usize, ks: usize, is_k_last: bool, start: usize) -> Lines<'_> {
    let (line_stride, k_stride) = if is_k_last { (ks, 1) } else { (1, lines) };
    let first = (start * k_stride).min(lines * ks);
    Lines::of(operand, first, lines * ks - first, line_stride, k_stride)
}

fn check_part(start: usize, len: usize, ks: usize) -> Result<(), String> {
    match start.checked_add(len).is_some_and(|end| end <= ks) {
        true => Ok(()),
        false => Err(format!("sums {len} elements from {start} on, but there are {ks}")),
    }
}

/// The op whose operands are whole, and its types with the summed axis cut to the part.
fn whole_types(inputs: &[Type], dims: [usize; 2], start: usize, len: usize) -> Result<Vec<Type>, String> {
    let mut cut = inputs.to_vec();
    let size = |at: usize| inputs[at].shape.get(dims[at]).copied();
    let (Some(ks), Some(others)) = (size(0), size(1)) else { return Err("takes matrices".into()) };
    if ks != others {
        return Err(format!("sums over {ks} elements of one operand and {others} of the other"));
    }
    check_part(start, len, ks)?;
    for (ty, dim) in cut.iter_mut().zip(dims) {
        let mut shape = ty.shape.to_vec();
        shape[dim] = len;
        *ty = Type::new(ty.dtype, shape);
    }
    Ok(cut)
}

impl MatMulPart {
    fn whole(&self) -> MatMul {
        MatMul { ta: self.ta, tb: self.tb, wide: self.wide }
    }

    /// The dims that are summed.
    fn dims(&self) -> [usize; 2] {
        [usize::from(!self.ta), usize::from(self.tb)]
    }
}

impl Op for MatMulPart {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::float("a"), Operand::float("b")], &["c"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        Some(Index { whole: vec!["k".into()], ..self.whole().index(inputs)? })
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        if inputs.len() != 2 || inputs.iter().any(|ty| ty.rank() != 2) {
            return Err("takes two matrices".into());
        }
        self.whole().infer(&whole_types(inputs, self.dims(), self.start, self.len)?)
    }
    fn flops(&self, _: &[Type], outputs: &[Type]) -> u64 {
        2 * (outputs[0].elements() * self.len) as u64
    }
    fn work(&self) -> Work {
        Work::Product
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        vec![Dense::from_fn(outputs[0].shape.clone(), |at| {
            let ks = self.start..self.start + self.len;
            let a = |k: usize| if self.ta { inputs[0].get(&[k, at[0]]) } else { inputs[0].get(&[at[0], k]) };
            let b = |k: usize| if self.tb { inputs[1].get(&[at[1], k]) } else { inputs[1].get(&[k, at[1]]) };
            ks.map(|k| a(k) * b(k)).sum()
        })]
    }
}

impl Cpu for MatMulPart {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let [m, n] = [cx.out_shape(0)[0], cx.out_shape(0)[1]];
        let ks = cx.shape(0)[self.dims()[0]];
        let a = part(&cx.inputs[0], m, ks, !self.ta, self.start);
        let b = part(&cx.inputs[1], n, ks, self.tb, self.start);
        let sink = Output::of(&cx.outputs[0], 0, n);
        let gemm = Gemm { shape: [m, n, self.len], a: &a, b: Right::Fresh(&b), c: &sink, start: Start::Zero };
        gemm.run_on(cx.team, cx.scratch());
    }
    fn scratch_bytes(&self, _: &[Type], outputs: &[Type], threads: usize) -> usize {
        gemm::scratch_bytes_of(outputs[0].dtype, 0, threads)
    }
    fn takes_halves(&self) -> bool {
        true
    }
}

impl LinearPart {
    fn whole(&self) -> Linear {
        Linear { transposed: self.transposed, wide: self.wide }
    }
}

impl Op for LinearPart {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::float("x"), Operand::float("weight"), Operand::float("bias")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        Some(Index { whole: vec!["k".into()], ..self.whole().index(inputs)? })
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [x, weight, _] = inputs else { return Err("takes x, weight and bias".into()) };
        if x.rank() == 0 || weight.rank() != 2 {
            return Err(format!("takes rows and a matrix, not {x} and {weight}"));
        }
        let dims = [x.rank() - 1, usize::from(self.transposed)];
        self.whole().infer(&whole_types(inputs, dims, self.start, self.len)?)
    }
    fn flops(&self, _: &[Type], outputs: &[Type]) -> u64 {
        2 * (outputs[0].elements() * self.len) as u64
    }
    fn work(&self) -> Work {
        Work::Product
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let (x, weight, bias) = (inputs[0], inputs[1], inputs[2]);
        vec![Dense::from_fn(outputs[0].shape.clone(), |at| {
            let (row, n) = (&at[..at.len() - 1], at[at.len() - 1]);
            let entry = |k: usize| if self.transposed { weight.get(&[n, k]) } else { weight.get(&[k, n]) };
            let ks = self.start..self.start + self.len;
            bias.data[n] + ks.map(|k| x.get(&[row, &[k]].concat()) * entry(k)).sum::<f64>()
        })]
    }
}

impl Cpu for LinearPart {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (ks, n) = (cx.inputs[0].ty.last(), cx.outputs[0].ty.last());
        let m = cx.outputs[0].ty.elements() / n.max(1);
        let x = part(&cx.inputs[0], m, ks, true, self.start);
        let weight = part(&cx.inputs[1], n, ks, self.transposed, self.start);
        let sink = Output::of(&cx.outputs[0], 0, n);
        let (bias, scratch) = full_bias(cx);
        let start = Start::Bias(bias);
        let gemm = Gemm { shape: [m, n, self.len], a: &x, b: Right::Fresh(&weight), c: &sink, start };
        gemm.run_on(cx.team, scratch);
    }
    fn scratch_bytes(&self, inputs: &[Type], outputs: &[Type], threads: usize) -> usize {
        gemm::scratch_bytes_of(outputs[0].dtype, bias_scratch_len(inputs), threads)
    }
    fn takes_halves(&self) -> bool {
        true
    }
}

/// Copies of the parts that are summed, each a matrix of its own: products of copies are what the parts are defined by, and a library
/// may add in another order where rows lie further apart. `lines` says of each operand how many there are, and whether they lie along
/// what is summed.
fn part_copies(
    cx: &CudaCx<'_>,
    calls: &mut CudaCalls,
    lines: [(usize, bool); 2],
    ks: usize,
    (start, len): (usize, usize),
) -> [CudaMatrix; 2] {
    [0, 1].map(|at| {
        let ((count, along), dtype) = (lines[at], cx.inputs[at].dtype);
        let place = calls.scratch(count * len.max(1) * dtype.bytes());
        let (rows, columns, stride) = if along { (count, len, ks) } else { (len, count, count) };
        let walks = [Walk { size: rows, from: stride, to: columns }, Walk { size: columns, from: 1, to: 1 }];
        let first = if along { start } else { start * count };
        moves::elements(calls, dtype.bytes(), &walks, (CudaPlace::input(at), first), (place, 0));
        // The left operand's lines are rows of the product, the right one's its columns.
        let transposed = along == (at == 1);
        CudaMatrix { place, dtype, row_stride: columns, batch_stride: 0, transposed }
    })
}

/// The product of two copies.
fn part_product(cx: &CudaCx<'_>, [a, b]: [CudaMatrix; 2], [rows, columns, depth]: [usize; 3]) -> Product {
    let c = CudaMatrix {
        place: CudaPlace::output(0),
        dtype: cx.outputs[0].dtype,
        row_stride: columns,
        batch_stride: 0,
        transposed: false,
    };
    Product { rows, columns, depth, batch: 1, a, b, c, alpha: 1.0, beta: 0.0, bias: None }
}

impl Cuda for MatMulPart {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let [m, n] = [cx.outputs[0].shape[0], cx.outputs[0].shape[1]];
        let mut calls = CudaCalls::new();
        if self.len == 0 {
            calls.zero(CudaPlace::output(0), cx.outputs[0].bytes());
            return calls;
        }
        let ks = cx.inputs[0].shape[self.dims()[0]];
        let copies = part_copies(cx, &mut calls, [(m, !self.ta), (n, self.tb)], ks, (self.start, self.len));
        calls.product(part_product(cx, copies, [m, n, self.len]));
        calls
    }
}

impl Cuda for LinearPart {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (ks, n) = (cx.inputs[0].last(), cx.outputs[0].last());
        let m = cx.outputs[0].elements() / n.max(1);
        let mut calls = CudaCalls::new();
        let copies = part_copies(cx, &mut calls, [(m, true), (n, self.transposed)], ks, (self.start, self.len));
        let bias = Some(CudaPlace::input(2));
        calls.product(Product { bias, ..part_product(cx, copies, [m, n, self.len]) });
        calls
    }
}

/// Products of two slices of the summed axis become products of a part of it.
pub fn absorb_slices(graph: &Graph) -> Graph {
    let mut rebuild = Rebuild::new(graph);
    for id in graph.ids() {
        let node = graph.node(id);
        let Some((op, wholes)) = absorbed(graph, node) else {
            rebuild.copy(node);
            continue;
        };
        let inputs = wholes.into_iter().chain(node.inputs[2..].iter().copied()).map(|id| rebuild.get(id)).collect();
        let types = graph.types(&node.outputs);
        let new = rebuild.new.push_typed(op, inputs, types, node.scope.clone(), node.stage);
        rebuild.new.set_segment(new, node.segment);
        let output = rebuild.new.node(new).outputs[0];
        rebuild.set(node.outputs[0], output);
    }
    rebuild.finish()
}

/// The op in the place of a product of slices, and what they are slices of.
fn absorbed(graph: &Graph, node: &Node) -> Option<(Arc<dyn Op>, [ValueId; 2])> {
    let slice = |at: usize, dim: usize| {
        let maker = graph.maker(*node.inputs.get(at)?);
        let slice = maker.op.downcast::<Slice>().filter(|slice| slice.dim == dim)?;
        Some((slice.start, slice.len, maker.inputs[0]))
    };
    let both = |dims: [usize; 2]| {
        let ((start, len, a), (other, _, b)) = (slice(0, dims[0])?, slice(1, dims[1])?);
        (start == other && graph.ty(a).shape[dims[0]] == graph.ty(b).shape[dims[1]]).then_some((start, len, [a, b]))
    };
    if let Some(&MatMul { ta, tb, wide }) = node.op.downcast::<MatMul>() {
        let is_flat = node.inputs.iter().all(|id| graph.ty(*id).rank() == 2);
        let (start, len, wholes) = both([usize::from(!ta), usize::from(tb)]).filter(|_| is_flat)?;
        return Some((Arc::new(MatMulPart { ta, tb, start, len, wide }), wholes));
    }
    let Linear { transposed, wide } = *node.op.downcast::<Linear>()?;
    let last = graph.ty(node.inputs[0]).rank() - 1;
    let (start, len, wholes) = both([last, usize::from(transposed)])?;
    Some((Arc::new(LinearPart { transposed, start, len, wide }), wholes))
}

impl Cases for MatMulPart {
    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
            for (m, n, ks, start, len) in [(3, 4, 7, 2, 3), (1, 5, 4, 0, 4), (40, 33, 300, 17, 270), (2, 3, 4, 4, 0)] {
                let (a, b) = (if ta { [ks, m] } else { [m, ks] }, if tb { [n, ks] } else { [ks, n] });
                let args = [Arg::real(a).constant(), Arg::real(b).constant()];
                cases.push(Case::new(MatMulPart { ta, tb, start, len, wide: false }, args));
            }
        }
        cases
    }
}

impl Cases for LinearPart {
    fn cases() -> Vec<Case> {
        let case = |transposed: bool, x: &[usize], n: usize, start: usize, len: usize| {
            let ks = x[x.len() - 1];
            let weight = if transposed { [n, ks] } else { [ks, n] };
            let args = [Arg::real(x).constant(), Arg::real(weight).constant(), Arg::real([n]).constant()];
            Case::new(LinearPart { transposed, start, len, wide: false }, args)
        };
        vec![
            case(true, &[3, 5], 4, 1, 3),
            case(false, &[2, 3, 6], 17, 3, 3),
            case(true, &[7], 3, 0, 7),
            case(false, &[40, 300], 33, 17, 270),
        ]
    }
}

pub const KINDS: &[OpKind] =
    &[OpKind::of::<MatMulPart>().with_cuda::<MatMulPart>(), OpKind::of::<LinearPart>().with_cuda::<LinearPart>()];
