//! Attention as one op that never stores the score matrix.
//!
//! Queries are taken in blocks; a block's scores against all its keys live in scratch, become probabilities there and are
//! gone. Backward recomputes them from the saved log-sum-exp. Legend: b batch, q query, k key, h head, d dim of a head.
//!
//! Operands are `[b, t, h·d]`, as linear layers leave them: heads are columns, and nothing is transposed in memory.

use crate::gemm::{self, Right, Rows, Start, Strided};
use crate::real::{Real, exp_of_negative};
use crate::reduce::ReduceMethods;
use crate::simd;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, CpuCx, DType, Dense, GradCx, Op, Tensor, Type, op};

/// Queries per block.
const BLOCK: usize = 64;
/// The same if there are several blocks and later keys are hidden: a smaller one computes fewer of those in vain.
const CAUSAL_BLOCK: usize = 32;

op! {
    /// `softmax(q·kᵀ/√d + bias)·v` per head. With `packed`, the one input holds q, k and v side by side. `bias` (an
    /// additive mask) is `[1 or b, 1 or h, q, k]`. Outputs: the result and the log-sum-exp of every row.
    pub struct Attention = "attention" { heads: usize, causal: bool, packed: bool, bias: bool }
}

op! {
    /// Backward of attention: gradients of its q, k, v (or of the packed input).
    pub struct AttentionGrad = "attention_grad" { heads: usize, causal: bool, packed: bool, bias: bool }
}

op! {
    /// Gradient of attention's bias. It is an op of its own because only learnt biases need it.
    pub struct AttentionBiasGrad = "attention_bias_grad" { heads: usize, causal: bool, packed: bool }
}

/// The sizes of one attention.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    dim: usize,
}

impl Sizes {
    fn width(&self) -> usize {
        self.heads * self.dim
    }
    fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }
    /// Keys that any query below `end` may see.
    fn visible(&self, end: usize, causal: bool) -> usize {
        if causal { (end + self.keys).saturating_sub(self.queries).min(self.keys) } else { self.keys }
    }
    /// The blocks of queries.
    fn blocks(&self, causal: bool) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let queries = self.queries;
        let size = if causal && queries > BLOCK { CAUSAL_BLOCK } else { BLOCK };
        (0..queries).step_by(size).map(move |start| start..(start + size).min(queries))
    }
    /// Whether query `q` may not see key `k`.
    fn hidden(&self, q: usize, k: usize, causal: bool) -> bool {
        causal && k + self.queries > q + self.keys
    }
}

/// Sizes from the operand types; with `packed`, one operand, else three.
fn sizes(inputs: &[Type], heads: usize, packed: bool) -> Result<Sizes, String> {
    let q = inputs.first().ok_or("takes q, k and v")?;
    if q.rank() != 3 || heads == 0 {
        return Err(format!("needs [batch, time, width] and at least one head, not {q} and {heads} heads"));
    }
    let width = q.shape[2] / if packed { 3 } else { 1 };
    if width % heads != 0 || (packed && q.shape[2] % 3 != 0) {
        return Err(format!("width {width} cannot be cut into {heads} heads"));
    }
    let keys = if packed { q.shape[1] } else { inputs.get(1).ok_or("takes q, k and v")?.shape[1] };
    if !packed {
        let kv = Type::new(q.dtype, [q.shape[0], keys, width]);
        if inputs.get(1) != Some(&kv) || inputs.get(2) != Some(&kv) {
            return Err(format!("k and v must both be {kv}"));
        }
    }
    Ok(Sizes { batch: q.shape[0], queries: q.shape[1], keys, heads, dim: width / heads })
}

fn check_bias(bias: &Type, s: &Sizes) -> Result<(), String> {
    let fits = |size: usize, full: usize| size == 1 || size == full;
    match bias.shape[..] {
        [b, h, q, k] if fits(b, s.batch) && fits(h, s.heads) && q == s.queries && k == s.keys => Ok(()),
        _ => {
            Err(format!("the bias must be [1 or {}, 1 or {}, {}, {}], not {bias}", s.batch, s.heads, s.queries, s.keys))
        }
    }
}

/// One head's operand: rows of `dim` numbers, `stride` apart.
#[derive(Clone, Copy, Debug)]
struct Head {
    data: *const f32,
    stride: usize,
    rows: usize,
    dim: usize,
}

impl Head {
    /// Rows `start..` as lines; `k` runs along the dim.
    fn by_row(&self, start: usize) -> Strided<'_> {
        Strided { data: self.slice(start), line_stride: self.stride, k_stride: 1 }
    }
    /// Dims as lines; `k` runs along the rows.
    fn by_dim(&self, start: usize) -> Strided<'_> {
        Strided { data: self.slice(start), line_stride: 1, k_stride: self.stride }
    }
    fn slice(&self, start: usize) -> &[f32] {
        let len = ((self.rows - start) * self.stride).saturating_sub(self.stride - self.dim);
        // SAFETY: the head was made from an operand with that many rows.
        unsafe { std::slice::from_raw_parts(self.data.add(start * self.stride), len) }
    }
    fn row(&self, at: usize) -> &[f32] {
        &self.slice(at)[..self.dim]
    }
    /// Asks for a row. Heads lie in pieces, which no machine foresees by itself.
    fn ask_for(&self, at: usize) {
        if at < self.rows {
            simd::ask_for(self.data.wrapping_add(at * self.stride), self.dim);
        }
    }
}

/// q, k and v of one batch item and head.
fn heads_of(cx: &CpuCx<'_>, s: &Sizes, packed: bool, batch: usize, head: usize) -> [Head; 3] {
    let width = s.width();
    std::array::from_fn(|which| {
        let rows = if which == 0 { s.queries } else { s.keys };
        let (data, stride, shift) = match packed {
            true => (cx.f32(0), 3 * width, which * width),
            false => (cx.f32(which), width, 0),
        };
        let offset = batch * rows * stride + shift + head * s.dim;
        Head { data: data[offset..].as_ptr(), stride, rows, dim: s.dim }
    })
}

// SAFETY: a head is a read-only view.
unsafe impl Sync for Head {}

/// `row = row·scale + bias`.
#[inline(always)]
fn scaled(row: &mut [f32], scale: f32, bias: Option<&[f32]>) {
    match bias {
        Some(bias) => row.iter_mut().zip(bias).for_each(|(x, b)| *x = *x * scale + *b),
        None => row.iter_mut().for_each(|x| *x *= scale),
    }
}

vectorized! {
    /// Turns a row of raw scores, of which some are visible, into probabilities; returns the log of the sum of exponentials.
    fn soften(row: &mut [f32], scale: f32, bias: Option<&[f32]>, visible: usize) -> f32 {
        scaled(row, scale, bias);
        row[visible..].fill(f32::NEG_INFINITY);
        // Of the whole row, not of its visible part: whole vectors.
        let largest = simd::max_of(row);
        for x in row.iter_mut() {
            *x = exp_of_negative(*x - largest);
        }
        let total = simd::sum_of(row);
        let share = 1.0 / total;
        for x in row.iter_mut() {
            *x *= share;
        }
        largest + Real::ln(total)
    }
}

vectorized! {
    /// The probabilities again, from the log of the sum.
    fn soften_again(row: &mut [f32], scale: f32, bias: Option<&[f32]>, visible: usize, sum: f32) {
        scaled(row, scale, bias);
        for x in row.iter_mut() {
            *x = Real::exp(*x - sum);
        }
        row[visible..].fill(Real::exp(f32::NEG_INFINITY - sum));
    }
}

vectorized! {
    /// `dp = p·(dp − delta)·scale`.
    fn score_gradient(dp: &mut [f32], p: &[f32], delta: f32, scale: f32) {
        for (dp, p) in dp.iter_mut().zip(p) {
            *dp = p * (*dp - delta) * scale;
        }
    }
}

fn bias_row<'a>(
    bias: Option<(&'a [f32], &[usize])>,
    s: &Sizes,
    batch: usize,
    head: usize,
    q: usize,
) -> Option<&'a [f32]> {
    let (data, shape) = bias?;
    let (b, h) = (if shape[0] == 1 { 0 } else { batch }, if shape[1] == 1 { 0 } else { head });
    let start = ((b * shape[1] + h) * s.queries + q) * s.keys;
    Some(&data[start..start + s.keys])
}

/// An operand packed once per head and used by every block of queries.
type PackedHead<'a> = Right<'a, Strided<'a>>;

/// Raw scores of a block of queries: `scores[i, ..keys] = q_i · k_j`.
fn raw_scores(
    q: &Head,
    k: PackedHead<'_>,
    rows: std::ops::Range<usize>,
    keys: usize,
    scores: &mut [f32],
    scratch: &mut [f32],
) {
    let sink = Rows { data: Address(scores.as_mut_ptr()), stride: keys };
    gemm::block(0..rows.len(), 0..keys, q.dim, &q.by_row(rows.start), k, &sink, Start::Zero, scratch);
}

/// Packs a head's rows as columns of a product over its dim.
fn pack_rows<'a>(head: &Head, out: &'a mut [f32]) -> PackedHead<'a> {
    Right::Packed(gemm::prepack(&head.by_row(0), head.rows, head.dim, out))
}

/// Packs a head's dims as columns of a product over its rows.
fn pack_dims<'a>(head: &Head, out: &'a mut [f32]) -> PackedHead<'a> {
    Right::Packed(gemm::prepack(&head.by_dim(0), head.dim, head.rows, out))
}

fn rows_len(s: &Sizes) -> usize {
    gemm::prepacked_len(s.keys, s.dim)
}

fn dims_len(s: &Sizes) -> usize {
    gemm::prepacked_len(s.dim, s.keys)
}

/// Floats of scratch per thread: `tiles` blocks of scores, a product's own, and packed operands.
fn thread_scratch(s: &Sizes, tiles: usize) -> usize {
    gemm::SCRATCH + tiles * BLOCK * s.keys.next_multiple_of(16) + 2 * rows_len(s) + dims_len(s)
}

impl Attention {
    fn sizes(&self, inputs: &[Type]) -> Result<Sizes, String> {
        sizes(inputs, self.heads, self.packed)
    }
}

impl Op for Attention {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let s = self.sizes(inputs)?;
        let operands = if self.packed { 1 } else { 3 };
        if inputs.len() != operands + usize::from(self.bias) {
            return Err(format!("takes {operands} operands{}", if self.bias { " and a bias" } else { "" }));
        }
        if self.bias {
            check_bias(&inputs[operands], &s)?;
        }
        let dtype = inputs[0].dtype;
        Ok(vec![
            Type::new(dtype, [s.batch, s.queries, s.width()]),
            Type::new(DType::F32, [s.batch, s.heads, s.queries]),
        ])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        self.sizes(inputs).map_or(0, |s| (4 * s.batch * s.heads * s.queries * s.keys * s.dim) as u64)
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let Attention { heads, causal, packed, bias } = *self;
        let rest: Vec<Tensor<'b>> =
            cx.inputs[1..].iter().copied().chain([cx.output(0), cx.output(1), cx.grad()]).collect();
        let builder = cx.input(0).builder();
        let operands = if packed { 1 } else { 3 };
        let all: Vec<Tensor<'b>> = [cx.input(0)].into_iter().chain(rest).collect();
        let mut grads: Vec<Option<Tensor<'b>>> = Vec::new();
        if (0..operands).any(|at| cx.needs(at)) {
            let made = builder.apply_all(AttentionGrad { heads, causal, packed, bias }, &all);
            grads.extend(made.into_iter().take(operands).map(Some));
        } else {
            grads.extend(vec![None; operands]);
        }
        if bias {
            let whole = || {
                let per_item = builder.apply(AttentionBiasGrad { heads, causal, packed }, &all);
                let target = cx.input(operands).shape();
                let dims: Vec<usize> = (0..2).filter(|dim| target[*dim] == 1).collect();
                if dims.is_empty() { per_item } else { per_item.sum_keep(&dims) }
            };
            grads.push(cx.needs(operands).then(whole));
        }
        grads
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let s = reference_sizes(inputs, self.heads, self.packed);
        let mut out = Dense::zeros(outputs[0].shape.clone());
        let mut sums = Dense::zeros(outputs[1].shape.clone());
        let bias = self.bias.then(|| inputs[inputs.len() - 1]);
        for_each_row(&s, |b, h, q| {
            let scores = reference_scores(inputs, &s, self.packed, self.causal, bias, b, h, q);
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, |a, x| if x.is_nan() { x } else { a.max(x) });
            let total: f64 = scores.iter().map(|x| (x - max).exp()).sum();
            sums.data[(b * s.heads + h) * s.queries + q] = max + total.ln();
            for d in 0..s.dim {
                out.data[(b * s.queries + q) * s.width() + h * s.dim + d] = (0..s.keys)
                    .map(|k| (scores[k] - max).exp() / total * reference_entry(inputs, &s, self.packed, 2, b, k, h, d))
                    .sum();
            }
        });
        vec![out, sums]
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        self.sizes(inputs).map_or(0, |s| thread_scratch(&s, 1) * 4 * threads)
    }
    fn cpu(&self, cx: &mut CpuCx<'_>) {
        let s = cpu_sizes(cx, self.heads, self.packed);
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
            for rows in s.blocks(self.causal) {
                let start = rows.start;
                let keys = s.visible(rows.end, self.causal);
                raw_scores(&q, k, rows.clone(), keys, scores, product);
                for (line, at) in rows.clone().enumerate() {
                    let row = &mut scores[line * keys..(line + 1) * keys];
                    let bias = bias_row(bias, &s, batch, head, at).map(|bias| &bias[..keys]);
                    next.iter().for_each(|head| head.ask_for(at));
                    let sum = soften(row, s.scale(), bias, s.visible(at + 1, self.causal));
                    // SAFETY: every task writes its own rows.
                    unsafe { *sums.get().add(task * s.queries + at) = sum };
                }
                let data = batch * s.queries * s.width() + start * s.width() + head * s.dim;
                // SAFETY: every task owns its head's columns.
                let sink = Rows { data: Address(unsafe { out.get().add(data) }), stride: s.width() };
                let p = Strided { data: scores, line_stride: keys, k_stride: 1 };
                gemm::block(0..rows.len(), 0..s.dim, keys, &p, v, &sink, Start::Zero, product);
            }
        });
    }
}

fn cpu_sizes(cx: &CpuCx<'_>, heads: usize, packed: bool) -> Sizes {
    let shape = cx.shape(0);
    let width = shape[2] / if packed { 3 } else { 1 };
    let keys = if packed { shape[1] } else { cx.shape(1)[1] };
    Sizes { batch: shape[0], queries: shape[1], keys, heads, dim: width / heads }
}

fn reference_sizes(inputs: &[&Dense], heads: usize, packed: bool) -> Sizes {
    let types: Vec<Type> = inputs.iter().map(|input| Type::f32(input.shape.clone())).collect();
    sizes(&types, heads, packed).expect("infer checked the types")
}

fn for_each_row(s: &Sizes, mut f: impl FnMut(usize, usize, usize)) {
    for b in 0..s.batch {
        for h in 0..s.heads {
            (0..s.queries).for_each(|q| f(b, h, q));
        }
    }
}

/// Element of q (0), k (1) or v (2).
#[allow(clippy::too_many_arguments)]
fn reference_entry(
    inputs: &[&Dense],
    s: &Sizes,
    packed: bool,
    which: usize,
    b: usize,
    t: usize,
    h: usize,
    d: usize,
) -> f64 {
    match packed {
        true => inputs[0].get(&[b, t, which * s.width() + h * s.dim + d]),
        false => inputs[which].get(&[b, t, h * s.dim + d]),
    }
}

#[allow(clippy::too_many_arguments)]
fn reference_scores(
    inputs: &[&Dense],
    s: &Sizes,
    packed: bool,
    causal: bool,
    bias: Option<&Dense>,
    b: usize,
    h: usize,
    q: usize,
) -> Vec<f64> {
    let entry = |which, t, d| reference_entry(inputs, s, packed, which, b, t, h, d);
    (0..s.keys)
        .map(|k| {
            if s.hidden(q, k, causal) {
                return f64::NEG_INFINITY;
            }
            let dot: f64 = (0..s.dim).map(|d| entry(0, q, d) * entry(1, k, d)).sum();
            dot / (s.dim as f64).sqrt() + bias.map_or(0.0, |bias| bias.get(&[b, h, q, k]))
        })
        .collect()
}

/// Probabilities and score gradients (before the scale) of one row, by definition.
#[allow(clippy::too_many_arguments)]
fn reference_row(
    inputs: &[&Dense],
    s: &Sizes,
    packed: bool,
    causal: bool,
    bias: Option<&Dense>,
    b: usize,
    h: usize,
    q: usize,
) -> (Vec<f64>, Vec<f64>) {
    let count = inputs.len();
    let (out, sums, g) = (inputs[count - 3], inputs[count - 2], inputs[count - 1]);
    let scores = reference_scores(inputs, s, packed, causal, bias, b, h, q);
    let p: Vec<f64> = scores.iter().map(|x| (x - sums.get(&[b, h, q])).exp()).collect();
    let at = |x: &Dense, d: usize| x.get(&[b, q, h * s.dim + d]);
    let delta: f64 = (0..s.dim).map(|d| at(out, d) * at(g, d)).sum();
    let ds = (0..s.keys)
        .map(|k| {
            let dp: f64 = (0..s.dim).map(|d| at(g, d) * reference_entry(inputs, s, packed, 2, b, k, h, d)).sum();
            p[k] * (dp - delta)
        })
        .collect();
    (p, ds)
}

/// Checks the operands of a backward op: those of the forward, then its outputs and the gradient.
fn infer_backward(inputs: &[Type], forward: &Attention) -> Result<Sizes, String> {
    let count = inputs.len().checked_sub(3).ok_or("takes the forward's operands, its two outputs and a gradient")?;
    let outputs = forward.infer(&inputs[..count])?;
    if inputs[count..count + 2] != outputs[..] || inputs[count + 2] != outputs[0] {
        return Err(format!("the forward's outputs are {} and {}", outputs[0], outputs[1]));
    }
    forward.sizes(&inputs[..count])
}

impl Op for AttentionGrad {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let AttentionGrad { heads, causal, packed, bias } = *self;
        infer_backward(inputs, &Attention { heads, causal, packed, bias })?;
        Ok(inputs[..if packed { 1 } else { 3 }].to_vec())
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        sizes(inputs, self.heads, self.packed)
            .map_or(0, |s| (10 * s.batch * s.heads * s.queries * s.keys * s.dim) as u64)
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let s = reference_sizes(inputs, self.heads, self.packed);
        let bias = self.bias.then(|| inputs[inputs.len() - 4]);
        let g = inputs[inputs.len() - 1];
        let mut grads: Vec<Dense> = outputs.iter().map(|ty| Dense::zeros(ty.shape.clone())).collect();
        let scale = 1.0 / (s.dim as f64).sqrt();
        for_each_row(&s, |b, h, q| {
            let (p, ds) = reference_row(inputs, &s, self.packed, self.causal, bias, b, h, q);
            for k in 0..s.keys {
                for d in 0..s.dim {
                    let entry = |which, t| reference_entry(inputs, &s, self.packed, which, b, t, h, d);
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
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        sizes(inputs, self.heads, self.packed).map_or(0, |s| thread_scratch(&s, 2) * 4 * threads)
    }
    fn cpu(&self, cx: &mut CpuCx<'_>) {
        let s = cpu_sizes(cx, self.heads, self.packed);
        let count = cx.inputs.len();
        let bias = self.bias.then(|| (cx.f32(count - 4), cx.shape(count - 4)));
        let (out, sums, g) = (cx.f32(count - 3), cx.f32(count - 2), cx.f32(count - 1));
        let width = s.width();
        let packed = self.packed;
        let stride = if packed { 3 * width } else { width };
        let grads: [Address; 3] =
            std::array::from_fn(|which| Address(cx.outputs[if packed { 0 } else { which }].data.cast()));
        let lent = Address(cx.scratch().as_mut_ptr());
        let per_thread = thread_scratch(&s, 2);
        let cx = &*cx;
        cx.team.run(s.batch * s.heads, |task, thread| {
            let (batch, head) = (task / s.heads, task % s.heads);
            let [q, k, v] = heads_of(cx, &s, packed, batch, head);
            // SAFETY: each thread has its own scratch.
            let lent = unsafe { lent.slice(thread * per_thread, per_thread) };
            let (product, rest) = lent.split_at_mut(gemm::SCRATCH);
            let (packed_k, rest) = rest.split_at_mut(rows_len(&s));
            let (packed_v, rest) = rest.split_at_mut(rows_len(&s));
            let (packed_k_dims, tiles) = rest.split_at_mut(dims_len(&s));
            let (p, dp) = tiles.split_at_mut(BLOCK * s.keys.next_multiple_of(16));
            let (k_rows, k_dims, v) = (pack_rows(&k, packed_k), pack_dims(&k, packed_k_dims), pack_rows(&v, packed_v));
            let rows_of = |which: usize| if which == 0 { s.queries } else { s.keys };
            let target = |which: usize, row: usize| {
                let shift = if packed { which * width } else { 0 };
                let offset = (batch * rows_of(which) + row) * stride + shift + head * s.dim;
                // SAFETY: inside the gradient; every task owns its head's columns.
                Rows { data: Address(unsafe { grads[which].get().add(offset) }), stride }
            };
            for which in 1..3 {
                for row in 0..s.keys {
                    // SAFETY: as above.
                    unsafe { target(which, row).data.slice(0, s.dim) }.fill(0.0);
                }
            }
            let view = |data: &[f32], batch: usize, head: usize| {
                let from = batch * s.queries * width + head * s.dim;
                Head { data: data[from..].as_ptr(), stride: width, rows: s.queries, dim: s.dim }
            };
            let next = (task + 1).min(s.batch * s.heads - 1);
            let (next_batch, next_head) = (next / s.heads, next % s.heads);
            let next = heads_of(cx, &s, packed, next_batch, next_head);
            let next_rows = [out, g].map(|data| view(data, next_batch, next_head));
            let (o, g) = (view(out, batch, head), view(g, batch, head));
            for rows in s.blocks(self.causal) {
                let start = rows.start;
                let (count, keys) = (rows.len(), s.visible(rows.end, self.causal));
                raw_scores(&q, k_rows, rows.clone(), keys, p, product);
                for (line, at) in rows.clone().enumerate() {
                    let row = &mut p[line * keys..(line + 1) * keys];
                    let bias = bias_row(bias, &s, batch, head, at).map(|bias| &bias[..keys]);
                    next.iter().chain(&next_rows).for_each(|head| head.ask_for(at));
                    let visible = s.visible(at + 1, self.causal);
                    soften_again(row, s.scale(), bias, visible, sums[task * s.queries + at]);
                }
                // dv += pᵀ·g
                let (a, b) = (both_ways(p, keys).0, g.by_dim(start));
                gemm::block(0..keys, 0..s.dim, count, &a, Right::Fresh(&b), &target(2, 0), Start::Add, product);
                // dp = g·vᵀ, then ds in place
                raw_scores(&g, v, rows.clone(), keys, dp, product);
                for (line, at) in rows.clone().enumerate() {
                    let delta = simd::dot(o.row(at), g.row(at));
                    score_gradient(
                        &mut dp[line * keys..(line + 1) * keys],
                        &p[line * keys..(line + 1) * keys],
                        delta,
                        s.scale(),
                    );
                }
                // dq = ds·k, dk += dsᵀ·q
                let (transposed, straight) = both_ways(dp, keys);
                gemm::block(0..count, 0..s.dim, keys, &straight, k_dims, &target(0, start), Start::Zero, product);
                let b = q.by_dim(start);
                gemm::block(
                    0..keys,
                    0..s.dim,
                    count,
                    &transposed,
                    Right::Fresh(&b),
                    &target(1, 0),
                    Start::Add,
                    product,
                );
            }
        });
    }
}

/// A tile of scores as (keys as lines, queries as lines).
fn both_ways(data: &[f32], keys: usize) -> (Strided<'_>, Strided<'_>) {
    (Strided { data, line_stride: 1, k_stride: keys }, Strided { data, line_stride: keys, k_stride: 1 })
}

impl Op for AttentionBiasGrad {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let AttentionBiasGrad { heads, causal, packed } = *self;
        let s = infer_backward(inputs, &Attention { heads, causal, packed, bias: true })?;
        Ok(vec![Type::f32([s.batch, s.heads, s.queries, s.keys])])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        sizes(inputs, self.heads, self.packed)
            .map_or(0, |s| (4 * s.batch * s.heads * s.queries * s.keys * s.dim) as u64)
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let s = reference_sizes(inputs, self.heads, self.packed);
        let bias = Some(inputs[inputs.len() - 4]);
        let mut grad = Dense::zeros(outputs[0].shape.clone());
        for_each_row(&s, |b, h, q| {
            let (_, ds) = reference_row(inputs, &s, self.packed, self.causal, bias, b, h, q);
            let start = ((b * s.heads + h) * s.queries + q) * s.keys;
            grad.data[start..start + s.keys].copy_from_slice(&ds);
        });
        vec![grad]
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        sizes(inputs, self.heads, self.packed).map_or(0, |s| thread_scratch(&s, 2) * 4 * threads)
    }
    fn cpu(&self, cx: &mut CpuCx<'_>) {
        let s = cpu_sizes(cx, self.heads, self.packed);
        let count = cx.inputs.len();
        let bias = Some((cx.f32(count - 4), cx.shape(count - 4)));
        let (out, sums, g) = (cx.f32(count - 3), cx.f32(count - 2), cx.f32(count - 1));
        let grad = Address(cx.out_f32(0).as_mut_ptr());
        let lent = Address(cx.scratch().as_mut_ptr());
        let per_thread = thread_scratch(&s, 2);
        let cx = &*cx;
        cx.team.run(s.batch * s.heads, |task, thread| {
            let (batch, head) = (task / s.heads, task % s.heads);
            let [q, k, v] = heads_of(cx, &s, self.packed, batch, head);
            // SAFETY: each thread has its own scratch, each task its own part of the gradient.
            let (lent, grad) = unsafe {
                let part = s.queries * s.keys;
                (lent.slice(thread * per_thread, per_thread), grad.slice(task * part, part))
            };
            let (product, rest) = lent.split_at_mut(gemm::SCRATCH);
            let (packed_k, rest) = rest.split_at_mut(rows_len(&s));
            let (packed_v, tiles) = rest.split_at_mut(rows_len(&s));
            let (p, dp) = tiles.split_at_mut(BLOCK * s.keys.next_multiple_of(16));
            let (k, v) = (pack_rows(&k, packed_k), pack_rows(&v, packed_v));
            let from = batch * s.queries * s.width() + head * s.dim;
            let view =
                |data: &[f32]| Head { data: data[from..].as_ptr(), stride: s.width(), rows: s.queries, dim: s.dim };
            let (o, g) = (view(out), view(g));
            for start in (0..s.queries).step_by(BLOCK) {
                let rows = start..(start + BLOCK).min(s.queries);
                raw_scores(&q, k, rows.clone(), s.keys, p, product);
                raw_scores(&g, v, rows.clone(), s.keys, dp, product);
                for (line, at) in rows.enumerate() {
                    let row = &mut p[line * s.keys..(line + 1) * s.keys];
                    let visible = s.visible(at + 1, self.causal);
                    let bias = bias_row(bias, &s, batch, head, at);
                    soften_again(row, s.scale(), bias, visible, sums[task * s.queries + at]);
                    let delta = simd::dot(o.row(at), g.row(at));
                    let dp = &mut dp[line * s.keys..(line + 1) * s.keys];
                    score_gradient(dp, row, delta, 1.0);
                    grad[at * s.keys..(at + 1) * s.keys].copy_from_slice(dp);
                }
            }
        });
    }
}

fn forward_args(s: [usize; 4], packed: bool, bias: Option<[usize; 2]>, constant: bool) -> Vec<Arg> {
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
        let case = |heads, causal, packed, s, bias: Option<[usize; 2]>, constant| {
            let op = Attention { heads, causal, packed, bias: bias.is_some() };
            Case::new(op, forward_args(s, packed, bias, constant)).tolerance(5e-5)
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
        ]
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
        let case = |heads, causal, packed, s, bias: Option<[usize; 2]>| {
            let op = AttentionGrad { heads, causal, packed, bias: bias.is_some() };
            Case::new(op, backward_args(heads, s, packed, bias)).tolerance(5e-5)
        };
        vec![
            case(2, true, true, [2, 5, 5, 4], None),
            case(2, false, false, [1, 3, 5, 4], Some([1, 2])),
            // Of several blocks, those after a query are not computed, and keys that it may not see do not reach it.
            case(2, true, true, [1, 100, 100, 16], None).leaves_out_zeros(),
        ]
    }
}

impl Cases for AttentionBiasGrad {
    fn cases() -> Vec<Case> {
        let case = |heads, causal, packed, s, bias| {
            Case::new(AttentionBiasGrad { heads, causal, packed }, backward_args(heads, s, packed, Some(bias)))
                .tolerance(5e-5)
        };
        vec![case(2, false, false, [1, 3, 5, 4], [1, 2]), case(2, true, true, [1, 70, 70, 4], [1, 1])]
    }
}

pub const KINDS: &[OpKind] =
    &[OpKind::of::<Attention>(), OpKind::of::<AttentionGrad>(), OpKind::of::<AttentionBiasGrad>()];

kolo_graph::methods! {
    /// Attention.
    AttentionMethods {
        /// Self-attention on a packed `[b, t, 3·width]` of queries, keys and values.
        fn self_attention(self, heads: usize, causal: bool) -> Tensor<'b> {
            self.then(Attention { heads, causal, packed: true, bias: false }, &[])
        }
        /// Attention of queries `self` over keys and values, with an optional additive mask or learnt bias.
        fn attention(
            self, keys: Tensor<'b>, values: Tensor<'b>, bias: Option<Tensor<'b>>, heads: usize, causal: bool,
        ) -> Tensor<'b> {
            let mut rest = vec![keys, values];
            rest.extend(bias);
            self.then(Attention { heads, causal, packed: false, bias: bias.is_some() }, &rest)
        }
    }
}
