//! Backward: the probabilities once more, then the gradients of queries, keys and values, or of the bias.

use super::forward::{self, forward_args};
use super::gpu::{self, Attend, Saved};
use super::head::*;
use super::reference::Reference;
use super::sizes::{BLOCK, Mask, Sizes, cpu_sizes, sizes};
use super::splits::{self, HEADS, Role};
use super::{Alignment, Attention, AttentionBiasGrad, AttentionGrad, GRAD_PRODUCTS};
use crate::gemm::{self, Gemm, Right, Rows, Start, Strided};
use crate::simd;
use crate::tiles::Address;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx, CudaPlace};
use kolo_graph::split::Split;
use kolo_graph::types::count;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, Mixed, Op, Operand, Operands, ProductShape, Type, Work};
use std::sync::Arc;

/// Checks the operands of a backward op: those of the forward, then its outputs and the gradient.
fn infer_backward(inputs: &[Type], forward: &Attention) -> Result<Sizes, String> {
    let count = inputs.len() - 3;
    let outputs = forward.infer(&inputs[..count])?;
    if inputs[count..count + 2] != outputs[..] || inputs[count + 2] != outputs[0] {
        return Err(format!("the forward's outputs are {} and {}", outputs[0], outputs[1]));
    }
    forward.sizes(&inputs[..count])
}

/// The forward's operands, its outputs and the gradient.
fn inputs(packed: bool, bias: bool) -> Vec<Operand> {
    [forward::inputs(packed, bias), vec![Operand::float("y"), Operand::f32("lse"), Operand::float("g")]].concat()
}

/// The splits of a backward op, whose outputs have these roles.
fn backward_splits(s: Sizes, inputs: &[Type], packed: bool, bias: bool, outputs: (&[Type], &[Role])) -> Vec<Split> {
    let roles = [splits::operands(packed, bias), vec![Role::Queries, Role::LogSumExp, Role::Queries]].concat();
    splits::splits(&s, (inputs, &roles), outputs)
}

impl Op for AttentionGrad {
    fn operands(&self) -> Operands {
        let outputs: &[&str] = if self.packed { &["dqkv"] } else { &["dq", "dk", "dv"] };
        Operands::without_rules(inputs(self.packed, self.bias), outputs)
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let AttentionGrad { heads, causal, packed, bias, align } = *self;
        infer_backward(inputs, &Attention { heads, causal, packed, bias, align })?;
        Ok(inputs[..if packed { 1 } else { 3 }].to_vec())
    }
    fn splits(&self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
        let Ok(s) = sizes(inputs, self.heads, self.packed) else { return Vec::new() };
        let s = s.masked(Mask::new(self.causal, self.align));
        let roles = splits::operands(self.packed, false);
        backward_splits(s, inputs, self.packed, self.bias, (outputs, &roles))
    }
    fn part(&self, split: &Split, units: usize) -> Option<Arc<dyn Op>> {
        (split.axis == HEADS).then(|| Arc::new(Self { heads: units, ..self.clone() }) as Arc<dyn Op>)
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        sizes(inputs, self.heads, self.packed)
            .map_or(0, |s| count(&[10, s.batch, s.heads, s.queries, s.keys, s.dim]) as u64)
    }
    fn work(&self) -> Work {
        Work::Product
    }
    fn product_shape(&self, inputs: &[Type], _: &[Type]) -> ProductShape {
        let sizes = sizes(inputs, self.heads, self.packed).expect("the graph was checked when it was built");
        sizes.masked(Mask::new(self.causal, self.align)).product_shape(GRAD_PRODUCTS)
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let bias = self.bias.then(|| inputs.len() - 4);
        let reference = Reference::new(inputs, self.heads, self.packed, Mask::new(self.causal, self.align), bias);
        let s = reference.s;
        let g = inputs[inputs.len() - 1];
        let mut grads: Vec<Dense> = outputs.iter().map(|ty| Dense::zeros(ty.shape.clone())).collect();
        let scale = 1.0 / (s.dim as f64).sqrt();
        reference.for_each_row(|[b, h, q]| {
            let (p, ds) = reference.row([b, h, q]);
            for k in 0..s.keys {
                for d in 0..s.dim {
                    let entry = |which, t| reference.entry(which, [b, h, t], d);
                    let mut add = |which: usize, t: usize, value: f64| {
                        let rows = if which == 0 { s.queries } else { s.keys };
                        match self.packed {
                            true => {
                                grads[0].data[(b * rows + t) * 3 * s.width() + which * s.width() + h * s.dim + d] +=
                                    value
                            }
                            false => grads[which].data[(b * rows + t) * s.width() + h * s.dim + d] += value,
                        }
                    };
                    add(0, q, ds[k] * scale * entry(1, k));
                    add(1, k, ds[k] * scale * entry(0, q));
                    add(2, k, p[k] * g.get(&[b, q, h * s.dim + d]));
                }
            }
        });
        grads
    }
}

impl Cpu for AttentionGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let mask = Mask::new(self.causal, self.align);
        let back = Backward::new(cx, cpu_sizes(cx, self.heads, self.packed).masked(mask), self.packed, self.bias);
        let of = |which: usize| Address(cx.outputs[if self.packed { 0 } else { which }].data.cast());
        let grads = Gradients { data: [0, 1, 2].map(of), packed: self.packed, s: back.s };
        let tasks = back.s.batch * back.s.heads;
        cx.team.run(tasks, |task, thread| back.differentiate(task, back.scratch(thread), &grads));
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        sizes(inputs, self.heads, self.packed).map_or(0, |s| thread_scratch(&s, 2) * 4 * threads)
    }
}

/// What both backward ops read.
struct Backward<'a> {
    cx: &'a CpuCx<'a>,
    s: Sizes,
    packed: bool,
    bias: Option<(&'a [f32], &'a [usize])>,
    out: &'a [f32],
    /// The log of each row's sum of exponentials.
    sums: &'a [f32],
    g: &'a [f32],
    lent: Address,
}

/// One thread's memory: a product's own, packed operands, and two blocks of scores.
struct Scratch<'a> {
    product: &'a mut [f32],
    packed_k: &'a mut [f32],
    packed_v: &'a mut [f32],
    packed_k_dims: &'a mut [f32],
    p: &'a mut [f32],
    dp: &'a mut [f32],
}

impl<'a> Backward<'a> {
    fn new(cx: &'a CpuCx<'_>, s: Sizes, packed: bool, bias: bool) -> Self {
        let count = cx.inputs.len();
        let bias = bias.then(|| (cx.f32(count - 4), cx.shape(count - 4)));
        let [out, sums, g] = [3, 2, 1].map(|back| cx.f32(count - back));
        Self { cx, s, packed, bias, out, sums, g, lent: Address(cx.scratch().as_mut_ptr()) }
    }

    fn scratch(&self, thread: usize) -> Scratch<'a> {
        let s = &self.s;
        let per_thread = thread_scratch(s, 2);
        // SAFETY: each thread has its own scratch.
        let lent: &'a mut [f32] = unsafe { self.lent.slice(thread * per_thread, per_thread) };
        let (product, rest) = lent.split_at_mut(gemm::SCRATCH);
        let (packed_k, rest) = rest.split_at_mut(rows_len(s));
        let (packed_v, rest) = rest.split_at_mut(rows_len(s));
        let (packed_k_dims, tiles) = rest.split_at_mut(dims_len(s));
        let (p, dp) = tiles.split_at_mut(BLOCK * s.keys.next_multiple_of(16));
        Scratch { product, packed_k, packed_v, packed_k_dims, p, dp }
    }

    /// The batch item and the head of a task.
    fn place(&self, task: usize) -> (usize, usize) {
        (task / self.s.heads, task % self.s.heads)
    }

    fn heads(&self, task: usize) -> [Head; 3] {
        let (batch, head) = self.place(task);
        heads_of(self.cx, &self.s, self.packed, batch, head)
    }

    /// A task's rows of the output or of its gradient.
    fn view(&self, data: &[f32], task: usize) -> Head {
        let ((batch, head), s) = (self.place(task), &self.s);
        let from = batch * s.queries * s.width() + head * s.dim;
        Head { data: data[from..].as_ptr(), stride: s.width(), rows: s.queries, dim: s.dim }
    }

    /// Turns the raw scores of one query into its probabilities.
    fn soften(&self, task: usize, query: usize, row: &mut [f32]) {
        let ((batch, head), s) = (self.place(task), &self.s);
        let bias = bias_row(self.bias, s, batch, head, query).map(|bias| &bias[..row.len()]);
        soften_again(row, s.scale(), bias, s.visible(query + 1), self.sums[task * s.queries + query]);
    }

    /// The gradients of one head's queries, keys and values.
    fn differentiate(&self, task: usize, scratch: Scratch<'_>, grads: &Gradients) {
        let Scratch { product, packed_k, packed_v, packed_k_dims, p, dp } = scratch;
        let s = &self.s;
        let [q, k, v] = self.heads(task);
        let (k_rows, k_dims, v) = (pack_rows(&k, packed_k), pack_dims(&k, packed_k_dims), pack_rows(&v, packed_v));
        let target = |which: usize, row: usize| grads.rows(self.place(task), which, row);
        grads.clear_keys_and_values(self.place(task));
        let next = (task + 1).min(s.batch * s.heads - 1);
        let (next, next_rows) = (self.heads(next), [self.out, self.g].map(|data| self.view(data, next)));
        let (o, g) = (self.view(self.out, task), self.view(self.g, task));
        for rows in s.blocks() {
            let start = rows.start;
            let (count, keys) = (rows.len(), s.visible(rows.end));
            raw_scores(&q, k_rows, rows.clone(), keys, p, product);
            for (line, at) in rows.clone().enumerate() {
                next.iter().chain(&next_rows).for_each(|head| head.prefetch(at));
                self.soften(task, at, &mut p[line * keys..(line + 1) * keys]);
            }
            // dv += pᵀ·g
            let (a, b) = (both_ways(p, keys).0, g.by_dim(start));
            add_product([keys, s.dim, count], &a, &b, &target(2, 0), product);
            // dp = g·vᵀ, then ds in place
            raw_scores(&g, v, rows.clone(), keys, dp, product);
            for (line, at) in rows.clone().enumerate() {
                let here = line * keys..(line + 1) * keys;
                let delta = simd::dot(o.row(at), g.row(at));
                score_gradient(&mut dp[here.clone()], &p[here], delta, s.scale());
            }
            // dq = ds·k, dk += dsᵀ·q
            let (transposed, straight) = both_ways(dp, keys);
            let (shape, dq) = ([count, s.dim, keys], target(0, start));
            Gemm { shape, a: &straight, b: k_dims, c: &dq, start: Start::Zero }.run(product);
            add_product([keys, s.dim, count], &transposed, &q.by_dim(start), &target(1, 0), product);
        }
    }

    /// The gradient of one head's scores, `[queries, keys]`.
    fn differentiate_scores(&self, task: usize, scratch: Scratch<'_>, grad: &mut [f32]) {
        let Scratch { product, packed_k, packed_v, p, dp, .. } = scratch;
        let (s, keys) = (&self.s, self.s.keys);
        let [q, k, v] = self.heads(task);
        let (k, v) = (pack_rows(&k, packed_k), pack_rows(&v, packed_v));
        let (o, g) = (self.view(self.out, task), self.view(self.g, task));
        for start in (0..s.queries).step_by(BLOCK) {
            let rows = start..(start + BLOCK).min(s.queries);
            raw_scores(&q, k, rows.clone(), keys, p, product);
            raw_scores(&g, v, rows.clone(), keys, dp, product);
            for (line, at) in rows.enumerate() {
                let here = line * keys..(line + 1) * keys;
                let (row, dp) = (&mut p[here.clone()], &mut dp[here]);
                self.soften(task, at, row);
                score_gradient(dp, row, simd::dot(o.row(at), g.row(at)), 1.0);
                grad[at * keys..(at + 1) * keys].copy_from_slice(dp);
            }
        }
    }
}

/// Where the gradients of queries, keys and values go: three tensors, or three runs of columns of one.
struct Gradients {
    data: [Address; 3],
    packed: bool,
    s: Sizes,
}

impl Gradients {
    /// A head's rows from `row` on.
    fn rows(&self, (batch, head): (usize, usize), which: usize, row: usize) -> Rows {
        let (s, width) = (&self.s, self.s.width());
        let (stride, shift) = if self.packed { (3 * width, which * width) } else { (width, 0) };
        let rows = if which == 0 { s.queries } else { s.keys };
        let offset = (batch * rows + row) * stride + shift + head * s.dim;
        // SAFETY: inside the gradient; every task owns its head's columns.
        Rows { data: Address(unsafe { self.data[which].get().add(offset) }), stride }
    }

    /// Those of keys and values are added up, block by block.
    fn clear_keys_and_values(&self, place: (usize, usize)) {
        for (which, row) in (1..3).flat_map(|which| (0..self.s.keys).map(move |row| (which, row))) {
            // SAFETY: as above.
            unsafe { self.rows(place, which, row).data.slice(0, self.s.dim) }.fill(0.0);
        }
    }
}

/// `c += a · b`.
fn add_product(shape: [usize; 3], a: &Strided<'_>, b: &Strided<'_>, c: &Rows, scratch: &mut [f32]) {
    Gemm { shape, a, b: Right::Fresh(b), c, start: Start::Add }.run(scratch);
}

/// A tile of scores as (keys as lines, queries as lines).
fn both_ways(data: &[f32], keys: usize) -> (Strided<'_>, Strided<'_>) {
    (Strided { data, line_stride: 1, k_stride: keys }, Strided { data, line_stride: keys, k_stride: 1 })
}

impl Op for AttentionBiasGrad {
    fn operands(&self) -> Operands {
        Operands::without_rules(inputs(self.packed, true), &["dbias"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let AttentionBiasGrad { heads, causal, packed, align } = *self;
        let s = infer_backward(inputs, &Attention { heads, causal, packed, bias: true, align })?;
        Ok(vec![Type::f32([s.batch, s.heads, s.queries, s.keys])])
    }
    fn splits(&self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
        let Ok(s) = sizes(inputs, self.heads, self.packed) else { return Vec::new() };
        let s = s.masked(Mask::new(self.causal, self.align));
        backward_splits(s, inputs, self.packed, true, (outputs, &[Role::Bias]))
    }
    fn part(&self, split: &Split, units: usize) -> Option<Arc<dyn Op>> {
        (split.axis == HEADS).then(|| Arc::new(Self { heads: units, ..self.clone() }) as Arc<dyn Op>)
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        sizes(inputs, self.heads, self.packed)
            .map_or(0, |s| count(&[4, s.batch, s.heads, s.queries, s.keys, s.dim]) as u64)
    }
    fn work(&self) -> Work {
        Work::Product
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let reference =
            Reference::new(inputs, self.heads, self.packed, Mask::new(self.causal, self.align), Some(inputs.len() - 4));
        let s = reference.s;
        let mut grad = Dense::zeros(outputs[0].shape.clone());
        reference.for_each_row(|[b, h, q]| {
            let (_, ds) = reference.row([b, h, q]);
            let start = ((b * s.heads + h) * s.queries + q) * s.keys;
            grad.data[start..start + s.keys].copy_from_slice(&ds);
        });
        vec![grad]
    }
}

impl Cpu for AttentionBiasGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let mask = Mask::new(self.causal, self.align);
        let back = Backward::new(cx, cpu_sizes(cx, self.heads, self.packed).masked(mask), self.packed, true);
        let (grad, part) = (Address(cx.out_f32(0).as_mut_ptr()), back.s.queries * back.s.keys);
        cx.team.run(back.s.batch * back.s.heads, |task, thread| {
            // SAFETY: each task has its own part of the gradient.
            back.differentiate_scores(task, back.scratch(thread), unsafe { grad.slice(task * part, part) });
        });
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        sizes(inputs, self.heads, self.packed).map_or(0, |s| thread_scratch(&s, 2) * 4 * threads)
    }
}

/// The attention of a backward's inputs, which end with y, lse and g, and what it reads of those.
fn attend_again<'a>(cx: &CudaCx<'a>, calls: &mut CudaCalls, s: Sizes, packed: bool, bias: bool) -> (Attend<'a>, Saved) {
    let attend = forward::attend(cx, s, packed, bias);
    let [y, lse, g] = [3, 2, 1].map(|back| CudaPlace::input(cx.inputs.len() - back));
    let delta = attend.deltas(calls, y, g);
    (attend, Saved { g: gpu::Rows { place: g, stride: s.width() }, lse, delta, rows: s.queries })
}

fn masked(inputs: &[Type], heads: usize, packed: bool, mask: Mask) -> Sizes {
    sizes(inputs, heads, packed).expect("the graph was checked when it was built").masked(mask)
}

impl Cuda for AttentionGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let s = masked(cx.inputs, self.heads, self.packed, Mask::new(self.causal, self.align));
        let mut calls = CudaCalls::new();
        let (attend, saved) = attend_again(cx, &mut calls, s, self.packed, self.bias);
        let (width, dtype) = (s.width(), cx.outputs[0].dtype);
        let of = |which: usize| match self.packed {
            true => gpu::Rows { place: CudaPlace::output(0).further(which * width * dtype.bytes()), stride: 3 * width },
            false => gpu::Rows { place: CudaPlace::output(which), stride: width },
        };
        attend.backward(&mut calls, &saved, [0, 1, 2].map(of), dtype);
        calls
    }
}

impl Cuda for AttentionBiasGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let s = masked(cx.inputs, self.heads, self.packed, Mask::new(self.causal, self.align));
        let mut calls = CudaCalls::new();
        let (attend, saved) = attend_again(cx, &mut calls, s, self.packed, true);
        attend.bias_gradient(&mut calls, &saved, CudaPlace::output(0), cx.outputs[0].dtype);
        calls
    }
}

/// The forward's operands followed by plausible outputs: the suite needs the op right for any numbers.
fn backward_args(heads: usize, s: [usize; 4], packed: bool, bias: Option<[usize; 2]>) -> Vec<Arg> {
    let [batch, queries, _, width] = s;
    let mut args = forward_args(s, packed, bias, true);
    args.push(Arg::real([batch, queries, width]).constant());
    args.push(Arg::real([batch, heads, queries]).constant());
    args.push(Arg::real([batch, queries, width]).constant());
    args
}

impl Cases for AttentionGrad {
    fn cases() -> Vec<Case> {
        let aligned = |heads, causal, packed, s, bias: Option<[usize; 2]>, align| {
            let op = AttentionGrad { heads, causal, packed, bias: bias.is_some(), align };
            Case::new(op, backward_args(heads, s, packed, bias)).tolerance(5e-5)
        };
        let case = |heads, causal, packed, s, bias| aligned(heads, causal, packed, s, bias, Alignment::BottomRight);
        vec![
            case(2, true, true, [2, 5, 5, 4], None),
            case(2, false, false, [1, 3, 5, 4], Some([1, 2])),
            // Of several blocks, those after a query are not computed, and keys that it may not see do not reach it.
            case(2, true, true, [1, 100, 100, 16], None).leaves_out_zeros(),
            case(2, true, false, [1, 110, 33, 8], Some([1, 2])).leaves_out_zeros(),
            // Heads of sizes that tensor cores take, in whole tiles and parts of them.
            case(2, true, true, [1, 140, 140, 32], None).leaves_out_zeros(),
            case(1, false, false, [1, 70, 150, 64], None),
            case(1, true, false, [1, 150, 70, 96], None).leaves_out_zeros(),
            aligned(1, true, false, [1, 3, 5, 4], Some([1, 1]), Alignment::TopLeft).leaves_out_zeros(),
            aligned(2, true, false, [1, 110, 40, 8], None, Alignment::TopLeft).leaves_out_zeros(),
        ]
    }
}

impl Cases for AttentionBiasGrad {
    fn cases() -> Vec<Case> {
        let case = |heads, causal, packed, s, bias, align| {
            let op = AttentionBiasGrad { heads, causal, packed, align };
            Case::new(op, backward_args(heads, s, packed, Some(bias))).tolerance(5e-5)
        };
        vec![
            case(2, false, false, [1, 3, 5, 4], [1, 2], Alignment::BottomRight),
            case(2, true, true, [1, 70, 70, 4], [1, 1], Alignment::BottomRight),
            case(2, true, false, [1, 5, 3, 4], [1, 1], Alignment::BottomRight),
            case(2, true, false, [1, 3, 5, 4], [1, 2], Alignment::TopLeft),
        ]
    }
}
