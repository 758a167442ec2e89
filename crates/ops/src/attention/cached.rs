//! Attention of a few new tokens over those before them, whose keys and values are kept from step to step.
//!
//! Values lie row by row. Keys lie in blocks of sixteen, dims outermost within a block: a query meets sixteen keys at a time,
//! and the blocks that it reads are one run of memory. Sums are cut as those of [`Attention`](super::Attention) are over a
//! sequence as long as the cache, so the two agree to the bit.

use super::PRODUCTS;
use super::head::soften;
use super::reference::probability;
use crate::device;
use crate::gemm::chain_len;
use crate::real::Real;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::cuda::{Cuda, CudaArg, CudaCalls, CudaCx, CudaSource, Launch};
use kolo_graph::op::OpKind;
use kolo_graph::split::{Placement, Split};
use kolo_graph::types::count;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, Op, Operand, Operands, ProductShape, Tensor, Type, Work, op};

/// Keys of a block.
const KEYS: usize = 16;

op! {
    /// Causal attention with a cache. Inputs: `qkv` `[b, t, 3·h·d]`, `keys` `[b, h, ⌈c/16⌉, d, 16]`, `values`
    /// `[b, h, c, d]` and `positions` `[b, t]` (i32). All tokens first write their keys and values at their positions, later
    /// ones over earlier ones; then each attends to the keys at its own position and before. Outputs: the result and what the
    /// cache becomes. A position outside the cache is not written, and its result is NaN.
    pub struct CachedAttention = "cached_attention" {}
}

pub const KIND: OpKind = OpKind::of::<CachedAttention>().with_cuda::<CachedAttention>();

/// The type of a cache's keys.
pub fn keys_type(batch: usize, heads: usize, context: usize, dim: usize) -> Type {
    Type::f32([batch, heads, context.div_ceil(KEYS), dim, KEYS])
}

/// The type of a cache's values.
pub fn values_type(batch: usize, heads: usize, context: usize, dim: usize) -> Type {
    Type::f32([batch, heads, context, dim])
}

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    tokens: usize,
    heads: usize,
    dim: usize,
    context: usize,
}

impl Sizes {
    /// Of inputs that were checked.
    fn of(qkv: &[usize], values: &[usize]) -> Self {
        Self { batch: qkv[0], tokens: qkv[1], heads: values[1], context: values[2], dim: values[3] }
    }

    fn width(&self) -> usize {
        self.heads * self.dim
    }

    /// Floats of one head's keys.
    fn keys_len(&self) -> usize {
        self.context.div_ceil(KEYS) * self.dim * KEYS
    }

    /// Where element `d` of a key lies within its head.
    fn key_place(&self, position: usize, d: usize) -> usize {
        (position / KEYS * self.dim + d) * KEYS + position % KEYS
    }
}

/// A position as a place in the cache.
fn within(position: i32, context: usize) -> Option<usize> {
    usize::try_from(position).ok().filter(|place| *place < context)
}

impl Op for CachedAttention {
    fn operands(&self) -> Operands {
        let inputs =
            [Operand::f32("qkv"), Operand::f32("keys"), Operand::f32("values"), Operand::i32("positions").constant()];
        Operands::without_rules(inputs, &["y", "keys", "values"])
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [qkv, keys, values, positions] = inputs else { return Err("takes qkv, keys, values and positions".into()) };
        let ([b, t, packed], [batch, heads, context, dim]) = (&qkv.shape[..], &values.shape[..]) else {
            return Err(format!("needs qkv [b, t, 3·h·d] and values [b, h, c, d], not {qkv} and {values}"));
        };
        let wanted = keys_type(*batch, *heads, *context, *dim);
        if *keys != wanted {
            return Err(format!("the keys of a cache of values {values} must be {wanted}, not {keys}"));
        }
        if b != batch || Some(*packed) != heads.checked_mul(*dim).and_then(|width| width.checked_mul(3)) {
            return Err(format!("qkv must be [{batch}, t, 3·{heads}·{dim}], not {qkv}"));
        }
        if positions.shape[..] != [*b, *t] {
            return Err(format!("there must be a position for each of {b} × {t} tokens, not {positions}"));
        }
        if qkv.elements() == 0 || *context == 0 {
            return Err(format!(
                "none of batch, time, width and cache may be empty, but qkv is {qkv} and values {values}"
            ));
        }
        Ok(vec![Type::f32([*b, *t, heads * dim]), keys.clone(), values.clone()])
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let s = Sizes::of(&inputs[0].shape, &inputs[2].shape);
        let heads = [Placement::blocks(2, 3), Placement::Shard(1), Placement::Shard(1), Placement::Replicate];
        vec![
            Split::new("batch", s.batch, [Placement::Shard(0); 4], [Placement::Shard(0); 3]),
            Split::new("heads", s.heads, heads, [Placement::Shard(2), Placement::Shard(1), Placement::Shard(1)]),
        ]
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        let s = Sizes::of(&inputs[0].shape, &inputs[2].shape);
        count(&[4, s.batch, s.heads, s.tokens, s.context, s.dim]) as u64
    }
    fn work(&self) -> Work {
        Work::Product
    }
    fn product_shape(&self, inputs: &[Type], _: &[Type]) -> ProductShape {
        let s = Sizes::of(&inputs[0].shape, &inputs[2].shape);
        let scores = count(&[s.batch, s.heads, s.tokens, s.context]);
        // How full the cache is, only a run knows.
        ProductShape::Attention { scores, products: PRODUCTS, masked: 0.0 }
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let [qkv, keys, values, positions] = inputs else { unreachable!("infer checks the arity") };
        let s = Sizes::of(&qkv.shape, &values.shape);
        let (mut keys, mut values) = ((*keys).clone(), (*values).clone());
        let entry = |which: usize, [b, h, t]: [usize; 3], d: usize| qkv.get(&[b, t, which * s.width() + h * s.dim + d]);
        let place = |b: usize, t: usize| within(positions.get(&[b, t]) as i32, s.context);
        let heads = || (0..s.batch).flat_map(|b| (0..s.heads).map(move |h| (b, h)));
        for (b, h) in heads() {
            for (t, at) in (0..s.tokens).filter_map(|t| Some((t, place(b, t)?))) {
                for d in 0..s.dim {
                    keys.data[(b * s.heads + h) * s.keys_len() + s.key_place(at, d)] = entry(1, [b, h, t], d);
                    values.data[((b * s.heads + h) * s.context + at) * s.dim + d] = entry(2, [b, h, t], d);
                }
            }
        }
        let mut out = Dense::new(outputs[0].shape.clone(), vec![f64::NAN; outputs[0].elements()]);
        for (b, h) in heads() {
            for (t, last) in (0..s.tokens).filter_map(|t| Some((t, place(b, t)?))) {
                let key = |k: usize, d: usize| keys.data[(b * s.heads + h) * s.keys_len() + s.key_place(k, d)];
                let score = |k: usize| {
                    (0..s.dim).map(|d| entry(0, [b, h, t], d) * key(k, d)).sum::<f64>() / (s.dim as f64).sqrt()
                };
                let scores: Vec<f64> = (0..=last).map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, Real::larger);
                let shares: Vec<f64> = scores.iter().map(|x| probability(*x, max)).collect();
                let total: f64 = shares.iter().sum();
                let share = |k: usize| if max == f64::NEG_INFINITY { 0.0 } else { shares[k] / total };
                for d in 0..s.dim {
                    out.data[(b * s.tokens + t) * s.width() + h * s.dim + d] =
                        (0..=last).map(|k| share(k) * values.get(&[b, h, k, d])).sum();
                }
            }
        }
        vec![out, keys, values]
    }
}

impl Cpu for CachedAttention {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let s = Sizes::of(cx.shape(0), cx.shape(2));
        let (qkv, positions) = (cx.f32(0), cx.i32(3));
        let address = |at: usize| Address(cx.outputs[at].data.cast());
        let [out, keys, values] = [0, 1, 2].map(address);
        let before = [1, 2].map(|at| Address(cx.inputs[at].data.cast()));
        let lent = Address(cx.scratch().as_mut_ptr());
        cx.team.run(s.batch * s.heads, |task, thread| {
            let (batch, head) = (task / s.heads, task % s.heads);
            // SAFETY: a task owns its head of the cache and of the result, a thread its scratch. What the cache was before is
            // either the same memory, which is not read then, or memory that nobody writes.
            let (keys, values, scores) = unsafe {
                for (from, to, len) in [(before[0], keys, s.keys_len()), (before[1], values, s.context * s.dim)] {
                    if from.get() != to.get() {
                        to.slice(task * len, len).copy_from_slice(from.slice(task * len, len));
                    }
                }
                (
                    keys.slice(task * s.keys_len(), s.keys_len()),
                    values.slice(task * s.context * s.dim, s.context * s.dim),
                    lent.slice(thread * s.context, s.context),
                )
            };
            let part = |which: usize, token: usize| {
                let start = (batch * s.tokens + token) * 3 * s.width() + which * s.width() + head * s.dim;
                &qkv[start..start + s.dim]
            };
            let places = || (0..s.tokens).map(|t| (t, within(positions[batch * s.tokens + t], s.context)));
            for (token, at) in places().filter_map(|(token, at)| Some((token, at?))) {
                let key = part(1, token).iter().enumerate();
                key.for_each(|(d, value)| keys[s.key_place(at, d)] = *value);
                values[at * s.dim..(at + 1) * s.dim].copy_from_slice(part(2, token));
            }
            for (token, at) in places() {
                let start = (batch * s.tokens + token) * s.width() + head * s.dim;
                // SAFETY: a task owns its head's columns.
                let out = unsafe { out.slice(start, s.dim) };
                let Some(last) = at else {
                    out.fill(f32::NAN);
                    continue;
                };
                let scores = &mut scores[..last + 1];
                score_keys(scores, part(0, token), keys, chain_len(s.dim));
                soften(scores, 1.0 / (s.dim as f32).sqrt(), None, last + 1);
                weigh_values(out, scores, values, chain_len(s.context));
            }
        });
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        inputs[2].shape[2] * size_of::<f32>() * threads
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(1, 1), (2, 2)]
    }
}

vectorized! {
    /// `scores[k] = Σ_d q[d]·keys[k, d]`, of as many keys as there are scores.
    fn score_keys(scores: &mut [f32], q: &[f32], keys: &[f32], chain: usize) {
        let block_len = q.len() * KEYS;
        let mut first = 0;
        // Four blocks at a time: sums that do not wait for each other.
        while (first + 4) * KEYS <= scores.len() {
            score_blocks::<4>(&mut scores[first * KEYS..], q, &keys[first * block_len..], chain);
            first += 4;
        }
        while first * KEYS < scores.len() {
            score_blocks::<1>(&mut scores[first * KEYS..], q, &keys[first * block_len..], chain);
            first += 1;
        }
    }
}

/// Scores of some blocks of keys; of the last block as many as are wanted.
#[inline(always)]
fn score_blocks<const BLOCKS: usize>(scores: &mut [f32], q: &[f32], keys: &[f32], chain: usize) {
    let blocks: [&[[f32; KEYS]]; BLOCKS] =
        std::array::from_fn(|at| &keys[at * q.len() * KEYS..(at + 1) * q.len() * KEYS].as_chunks().0[..q.len()]);
    let mut totals = [[0.0f32; KEYS]; BLOCKS];
    for start in (0..q.len()).step_by(chain) {
        let mut sums = [[0.0f32; KEYS]; BLOCKS];
        for d in start..(start + chain).min(q.len()) {
            for at in 0..BLOCKS {
                for key in 0..KEYS {
                    sums[at][key] = q[d].mul_add(blocks[at][d][key], sums[at][key]);
                }
            }
        }
        for at in 0..BLOCKS {
            for key in 0..KEYS {
                totals[at][key] = if start == 0 { sums[at][key] } else { totals[at][key] + sums[at][key] };
            }
        }
    }
    scores.iter_mut().zip(totals.as_flattened()).for_each(|(score, total)| *score = *total);
}

vectorized! {
    /// `out[d] = Σ_k p[k]·values[k, d]`.
    fn weigh_values(out: &mut [f32], p: &[f32], values: &[f32], chain: usize) {
        let dim = out.len();
        let mut first = 0;
        while first + 64 <= dim {
            weigh_columns::<64>(&mut out[first..], p, &values[first..], dim, chain);
            first += 64;
        }
        while first + 16 <= dim {
            weigh_columns::<16>(&mut out[first..], p, &values[first..], dim, chain);
            first += 16;
        }
        while first < dim {
            weigh_columns::<1>(&mut out[first..], p, &values[first..], dim, chain);
            first += 1;
        }
    }
}

#[inline(always)]
fn weigh_columns<const COLUMNS: usize>(out: &mut [f32], p: &[f32], values: &[f32], dim: usize, chain: usize) {
    let mut totals = [0.0f32; COLUMNS];
    for (number, shares) in p.chunks(chain).enumerate() {
        let mut sums = [0.0f32; COLUMNS];
        for (k, share) in (number * chain..).zip(shares) {
            let row = &values[k * dim..k * dim + COLUMNS];
            for column in 0..COLUMNS {
                sums[column] = share.mul_add(row[column], sums[column]);
            }
        }
        for column in 0..COLUMNS {
            totals[column] = if number == 0 { sums[column] } else { totals[column] + sums[column] };
        }
    }
    out[..COLUMNS].copy_from_slice(&totals);
}

impl Cuda for CachedAttention {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let s = Sizes::of(&cx.inputs[0].shape, &cx.inputs[2].shape);
        let source = CudaSource::new(include_str!("cached.cu"));
        let mut calls = CudaCalls::new();
        for at in [1, 2] {
            let count = cx.inputs[at].elements();
            let args = [device::input(at), device::output(at), device::long(count)];
            let grid = device::grid(count, device::THREADS);
            calls.launch(Launch::new(source.clone(), "keep", grid, device::THREADS, args));
        }
        let [qkv, positions] = [device::input(0), device::input(3)];
        let [y, keys, values] = [0, 1, 2].map(device::output);
        let count = s.batch * s.width();
        let sizes = [s.tokens, s.heads, s.dim, s.context, s.keys_len()].map(device::long);
        let args = [&[qkv, positions, keys, values, device::long(count)], &sizes[..]].concat();
        let grid = device::grid(count, device::THREADS);
        calls.launch(Launch::new(source.clone(), "write_tokens", grid, device::THREADS, args));
        let scale = CudaArg::F32(1.0 / (s.dim as f32).sqrt());
        let args = [&[qkv, positions, keys, values, y], &sizes[..], &[scale]].concat();
        let blocks = [s.batch * s.tokens * s.heads, 1, 1];
        let bytes = (device::THREADS + s.dim) * size_of::<f32>();
        calls.launch(Launch::new(source, "attend_cached", blocks, device::THREADS, args).shared(bytes));
        calls
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(1, 1), (2, 2)]
    }
}

impl Cases for CachedAttention {
    fn cases() -> Vec<Case> {
        let case = |[b, t, h, d, c]: [usize; 5], low: i64, high: i64| {
            let real = |ty: Type| Arg::real(ty.shape).constant();
            let args = [
                Arg::real([b, t, 3 * h * d]).constant(),
                real(keys_type(b, h, c, d)),
                real(values_type(b, h, c, d)),
                Arg::index([b, t], low, high),
            ];
            Case::new(CachedAttention {}, args).tolerance(5e-5)
        };
        vec![
            case([1, 1, 1, 1, 1], 0, 1),
            case([1, 1, 2, 3, 5], 0, 5),
            case([2, 1, 2, 4, 17], 9, 17),
            case([3, 4, 2, 5, 20], -2, 23),
            case([1, 3, 3, 70, 90], 60, 90),
            case([2, 2, 2, 16, 600], 400, 600),
            // More dims than a chain has terms.
            case([1, 2, 1, 300, 33], 20, 33),
        ]
    }
}

kolo_graph::methods! {
    /// Attention with a cache.
    CachedAttentionMethods {
        /// Causal self-attention of a packed `[b, t, 3·width]` at `positions` `[b, t]`, over a cache of keys and values of the
        /// types that [`keys_type`] and [`values_type`] give. The result, and what keys and values become.
        fn cached_attention(self, keys: Tensor<'b>, values: Tensor<'b>, positions: Tensor<'b>) -> [Tensor<'b>; 3] {
            let made = self.builder().apply_all(CachedAttention {}, &[self, keys, values, positions]);
            [made[0], made[1], made[2]]
        }
    }
}
