//! Attention: scores, probabilities and the result, block by block.

use super::gpu::{self, Attend, Bias};
use super::head::*;
use super::reference::{Reference, probability};
use super::sizes::{Mask, Sizes, check_bias, cpu_sizes, sizes};
use super::splits::{self, HEADS, Role};
use super::{Alignment, Attention, AttentionBiasGrad, AttentionGrad, PRODUCTS};
use crate::gemm::{self, Gemm, Rows, Start, Strided};
use crate::real::Real;
use crate::reduce::ReduceMethods;
use crate::tiles::Address;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx, CudaPlace};
use kolo_graph::split::Split;
use kolo_graph::types::count;
use kolo_graph::{
    Arg, Case, Cases, Cpu, CpuCx, DType, Dense, GradCx, Mixed, Op, Operand, Operands, ProductShape, Tensor, Type, Work,
};
use std::sync::Arc;

impl Attention {
    fn mask(&self) -> Mask {
        Mask::new(self.causal, self.align)
    }
    pub(super) fn sizes(&self, inputs: &[Type]) -> Result<Sizes, String> {
        Ok(sizes(inputs, self.heads, self.packed)?.masked(self.mask()))
    }
}

/// The packed operand, or queries, keys and values; then the bias, if there is one.
pub(super) fn inputs(packed: bool, bias: bool) -> Vec<Operand> {
    let operands: &[&'static str] = if packed { &["qkv"] } else { &["q", "k", "v"] };
    operands.iter().copied().chain(bias.then_some("bias")).map(Operand::float).collect()
}

impl Op for Attention {
    fn operands(&self) -> Operands {
        Operands::new(inputs(self.packed, self.bias), &["y"]).saved(&["lse"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let s = self.sizes(inputs)?;
        if self.bias {
            check_bias(&inputs[inputs.len() - 1], &s)?;
        }
        let dtype = inputs[0].dtype;
        Ok(vec![
            Type::new(dtype, [s.batch, s.queries, s.width()]),
            Type::new(DType::F32, [s.batch, s.heads, s.queries]),
        ])
    }
    fn splits(&self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
        let Ok(s) = self.sizes(inputs) else { return Vec::new() };
        let roles = splits::operands(self.packed, self.bias);
        splits::splits(&s, (inputs, &roles), (outputs, &[Role::Queries, Role::LogSumExp]))
    }
    fn part(&self, split: &Split, units: usize) -> Option<Arc<dyn Op>> {
        (split.axis == HEADS).then(|| Arc::new(Self { heads: units, ..self.clone() }) as Arc<dyn Op>)
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        self.sizes(inputs).map_or(0, |s| count(&[4, s.batch, s.heads, s.queries, s.keys, s.dim]) as u64)
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let Attention { heads, causal, packed, bias, align } = *self;
        let rest: Vec<Tensor<'b>> =
            cx.inputs[1..].iter().copied().chain([cx.output(0), cx.output(1), cx.grad()]).collect();
        let builder = cx.input(0).builder();
        let operands = if packed { 1 } else { 3 };
        let all: Vec<Tensor<'b>> = [cx.input(0)].into_iter().chain(rest).collect();
        let mut grads: Vec<Option<Tensor<'b>>> = Vec::new();
        if (0..operands).any(|at| cx.needs(at)) {
            let made = builder.apply_all(AttentionGrad { heads, causal, packed, bias, align }, &all);
            grads.extend(made.into_iter().take(operands).map(Some));
        } else {
            grads.extend(vec![None; operands]);
        }
        if bias {
            let whole = || {
                let per_item = builder.apply(AttentionBiasGrad { heads, causal, packed, align }, &all);
                let target = cx.input(operands).shape();
                let dims: Vec<usize> = (0..2).filter(|dim| target[*dim] == 1).collect();
                if dims.is_empty() { per_item } else { per_item.sum_keep(&dims) }
            };
            grads.push(cx.needs(operands).then(whole));
        }
        grads
    }
    fn work(&self) -> Work {
        Work::Product
    }
    fn product_shape(&self, inputs: &[Type], _: &[Type]) -> ProductShape {
        let sizes = self.sizes(inputs).expect("the graph was checked when it was built");
        sizes.masked(self.mask()).product_shape(PRODUCTS)
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let bias = self.bias.then(|| inputs.len() - 1);
        let reference = Reference::new(inputs, self.heads, self.packed, self.mask(), bias);
        let s = reference.s;
        let mut out = Dense::zeros(outputs[0].shape.clone());
        let mut sums = Dense::zeros(outputs[1].shape.clone());
        reference.for_each_row(|[b, h, q]| {
            let scores = reference.scores([b, h, q]);
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, Real::larger);
            let shares: Vec<f64> = scores.iter().map(|x| probability(*x, max)).collect();
            let total: f64 = shares.iter().sum();
            let blind = max == f64::NEG_INFINITY;
            sums.data[(b * s.heads + h) * s.queries + q] = if blind { max } else { max + total.ln() };
            let share = |k: usize| if blind { 0.0 } else { shares[k] / total };
            for d in 0..s.dim {
                out.data[(b * s.queries + q) * s.width() + h * s.dim + d] =
                    (0..s.keys).map(|k| share(k) * reference.entry(2, [b, h, k], d)).sum();
            }
        });
        vec![out, sums]
    }
}

impl Cpu for Attention {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let s = cpu_sizes(cx, self.heads, self.packed).masked(self.mask());
        let bias = self.bias.then(|| (cx.f32(cx.inputs.len() - 1), cx.shape(cx.inputs.len() - 1)));
        let (out, sums) = (Address(cx.out_f32(0).as_mut_ptr()), Address(cx.out_f32(1).as_mut_ptr()));
        let lent = Address(cx.scratch().as_mut_ptr());
        let per_thread = thread_scratch(&s, 1);
        let cx = &*cx;
        cx.team.run(s.batch * s.heads, |task, thread| {
            let (batch, head) = (task / s.heads, task % s.heads);
            let [q, k, v] = heads_of(cx, &s, self.packed, batch, head);
            // SAFETY: each thread has its own scratch.
            let lent = unsafe { lent.slice(thread * per_thread, per_thread) };
            let (product, rest) = lent.split_at_mut(gemm::SCRATCH);
            let (packed_k, rest) = rest.split_at_mut(rows_len(&s));
            let (packed_v, scores) = rest.split_at_mut(dims_len(&s));
            let (k, v) = (pack_rows(&k, packed_k), pack_dims(&v, packed_v));
            let next = (task + 1).min(s.batch * s.heads - 1);
            let next = heads_of(cx, &s, self.packed, next / s.heads, next % s.heads);
            for rows in s.blocks() {
                let start = rows.start;
                let keys = s.visible(rows.end);
                raw_scores(&q, k, rows.clone(), keys, scores, product);
                for (line, at) in rows.clone().enumerate() {
                    let row = &mut scores[line * keys..(line + 1) * keys];
                    let bias = bias_row(bias, &s, batch, head, at).map(|bias| &bias[..keys]);
                    next.iter().for_each(|head| head.prefetch(at));
                    let sum = soften(row, s.scale(), bias, s.visible(at + 1));
                    // SAFETY: every task writes its own rows.
                    unsafe { *sums.get().add(task * s.queries + at) = sum };
                }
                let data = batch * s.queries * s.width() + start * s.width() + head * s.dim;
                // SAFETY: every task owns its head's columns.
                let sink = Rows { data: Address(unsafe { out.get().add(data) }), stride: s.width() };
                let p = Strided { data: scores, line_stride: keys, k_stride: 1 };
                Gemm { shape: [rows.len(), s.dim, keys], a: &p, b: v, c: &sink, start: Start::Zero }.run(product);
            }
        });
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        self.sizes(inputs).map_or(0, |s| thread_scratch(&s, 1) * 4 * threads)
    }
}

/// The attention of these inputs: packed or three operands, and the bias if there is one.
pub(super) fn attend<'a>(cx: &CudaCx<'a>, s: Sizes, packed: bool, bias: bool) -> Attend<'a> {
    let (width, dtype) = (s.width(), cx.inputs[0].dtype);
    let place = |which: usize| match packed {
        true => CudaPlace::input(0).further(which * width * dtype.bytes()),
        false => CudaPlace::input(which),
    };
    let stride = if packed { 3 * width } else { width };
    let at = if packed { 1 } else { 3 };
    let plane = s.queries * s.keys;
    let bias = bias.then(|| {
        let [batch, heads] = [cx.inputs[at].shape[0], cx.inputs[at].shape[1]];
        Bias {
            place: CudaPlace::input(at),
            dtype: cx.inputs[at].dtype,
            batch: if batch == 1 { 0 } else { heads * plane },
            head: if heads == 1 { 0 } else { plane },
        }
    });
    let [q, k] = [0, 1].map(|which| gpu::Rows { place: place(which), stride });
    let rows = [s.queries, s.keys];
    Attend { s, q, k, v: place(2), rows, bias, dtype, running: false, target: cx.target }
}

impl Cuda for Attention {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let s = self.sizes(cx.inputs).expect("the graph was checked when it was built");
        let mut calls = CudaCalls::new();
        let y = gpu::Rows { place: CudaPlace::output(0), stride: s.width() };
        let attend = attend(cx, s, self.packed, self.bias);
        attend.forward(&mut calls, y, CudaPlace::output(1), cx.outputs[0].dtype);
        calls
    }
}

pub(super) fn forward_args(s: [usize; 4], packed: bool, bias: Option<[usize; 2]>, constant: bool) -> Vec<Arg> {
    let [batch, queries, keys, width] = s;
    let mut args = match packed {
        true => vec![Arg::real([batch, queries, 3 * width])],
        false => {
            vec![Arg::real([batch, queries, width]), Arg::real([batch, keys, width]), Arg::real([batch, keys, width])]
        }
    };
    if let Some([b, h]) = bias {
        args.push(Arg::real([b, h, queries, keys]));
    }
    if constant { args.into_iter().map(Arg::constant).collect() } else { args }
}

impl Cases for Attention {
    fn cases() -> Vec<Case> {
        let aligned = |heads, causal, packed, s, bias: Option<[usize; 2]>, constant, align| {
            let op = Attention { heads, causal, packed, bias: bias.is_some(), align };
            Case::new(op, forward_args(s, packed, bias, constant)).tolerance(5e-5)
        };
        let case = |heads, causal, packed, s, bias, constant| {
            aligned(heads, causal, packed, s, bias, constant, Alignment::BottomRight)
        };
        vec![
            case(1, false, false, [1, 3, 3, 4], None, false),
            case(2, true, false, [2, 4, 4, 4], None, false),
            case(2, false, false, [1, 3, 5, 4], Some([1, 2]), false),
            case(2, true, true, [2, 5, 5, 4], None, false),
            case(2, true, true, [2, 3, 3, 4], Some([2, 1]), false),
            case(1, true, false, [1, 2, 4, 2], None, false),
            case(2, true, true, [2, 150, 150, 48], None, true).leaves_out_zeros(),
            case(2, false, false, [1, 70, 33, 24], Some([1, 1]), true),
            // Heads of sizes that tensor cores take, in whole tiles and parts of them.
            case(2, true, true, [1, 150, 150, 32], None, true).leaves_out_zeros(),
            case(1, true, false, [1, 70, 140, 64], None, true).leaves_out_zeros(),
            case(1, false, false, [1, 130, 33, 48], None, true),
            case(1, true, false, [1, 140, 140, 128], None, true).leaves_out_zeros(),
            // More queries than keys: the first see none, in a block with others and in blocks of their own.
            case(1, true, false, [1, 5, 3, 2], None, false).leaves_out_zeros(),
            case(2, true, false, [1, 110, 33, 8], Some([1, 2]), true).leaves_out_zeros(),
            aligned(1, true, false, [1, 2, 4, 2], None, false, Alignment::TopLeft).leaves_out_zeros(),
            aligned(2, true, false, [2, 5, 3, 4], Some([1, 2]), false, Alignment::TopLeft),
            aligned(2, true, false, [1, 40, 110, 8], None, true, Alignment::TopLeft).leaves_out_zeros(),
            aligned(2, true, false, [1, 110, 40, 8], None, true, Alignment::TopLeft).leaves_out_zeros(),
        ]
    }
}
