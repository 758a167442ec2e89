//! Backward of a round: the probabilities once more, and what they add to the gradients of queries, keys and values.

use super::super::GRAD_PRODUCTS;
use super::super::gpu;
use super::super::head::{
    Head, dims_len, pack_dims, pack_rows, raw_scores, rows_len, score_gradient, soften_again, thread_scratch,
};
use super::super::sizes::{BLOCK, Mask};
use super::forward::{args, defined_scores};
use super::{AttentionStepGrad, Grid, Meeting, Round};
use crate::gemm::{self, Gemm, Right, Rows, Start, Strided};
use crate::simd;
use crate::tiles::Address;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx, CudaPlace};
use kolo_graph::split::Split;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, DType, Dense, Op, Operand, Operands, ProductShape, Type, Work};
use std::sync::Arc;

/// Inputs before the gradients that a round goes on from: q, kv, y, lse, g.
const READ: usize = 5;

impl AttentionStepGrad {
    fn meeting(&self) -> Meeting {
        let AttentionStepGrad { causal, blocks, rows, query, key, round, .. } = *self;
        Meeting { causal, blocks, rows, query, key, round }
    }

    /// The inputs that the gradients of queries and of keys and values go on from, where they do.
    fn before(&self) -> [Option<usize>; 2] {
        [self.dq.then_some(READ), self.dkv.then_some(READ + usize::from(self.dq))]
    }
}

impl Op for AttentionStepGrad {
    fn operands(&self) -> Operands {
        let names = ["q", "kv", "y", "lse", "g"].into_iter();
        let names = names.chain(self.dq.then_some("dq")).chain(self.dkv.then_some("dkv"));
        Operands::without_rules(names.map(Operand::f32).collect::<Vec<_>>(), &["dq", "dkv"])
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let grid = Grid::checked(self.meeting(), self.heads, inputs)?;
        let lse = Type::f32([grid.batch, grid.heads, grid.query_rows()]);
        if inputs[2] != inputs[0] || inputs[3] != lse || inputs[4] != inputs[0] {
            return Err(format!("y and g are {}, and lse is {lse}", inputs[0]));
        }
        let outputs = vec![inputs[0].clone(), inputs[1].clone()];
        let goes_on = |(at, output): (Option<usize>, &Type)| at.is_none_or(|at| inputs[at] == *output);
        match self.before().into_iter().zip(&outputs).all(goes_on) {
            true => Ok(outputs),
            false => Err(format!("dq is {}, and dkv is {}", outputs[0], outputs[1])),
        }
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let Ok(grid) = Grid::checked(self.meeting(), self.heads, inputs) else { return Vec::new() };
        let mut operands = vec![Some(1), Some(2), Some(1), None, Some(1)];
        operands.extend(self.dq.then_some(Some(1)));
        operands.extend(self.dkv.then_some(Some(2)));
        grid.splits(&operands, &[Some(1), Some(2)])
    }
    fn part(&self, split: &Split, units: usize) -> Option<Arc<dyn Op>> {
        (split.axis == "heads").then(|| Arc::new(Self { heads: units, ..self.clone() }) as Arc<dyn Op>)
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        Grid::checked(self.meeting(), self.heads, inputs).map_or(0, |grid| grid.points().saturating_mul(10))
    }
    fn work(&self) -> Work {
        Work::Product
    }
    fn product_shape(&self, inputs: &[Type], _: &[Type]) -> ProductShape {
        let grid = Grid::checked(self.meeting(), self.heads, inputs).expect("the graph was checked when it was built");
        grid.product_shape(GRAD_PRODUCTS)
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let grid = Grid::of(self.meeting(), self.heads, &inputs[0].shape, &inputs[1].shape);
        let start = |(at, ty): (Option<usize>, &Type)| {
            at.map_or_else(|| Dense::zeros(ty.shape.clone()), |at| inputs[at].clone())
        };
        let mut grads: Vec<Dense> = self.before().into_iter().zip(outputs).map(start).collect();
        let (tokens, width, scale) = (grid.query_rows(), grid.width(), 1.0 / (grid.dim as f64).sqrt());
        for row in 0..grid.batch * grid.heads * tokens {
            let [b, h, t] = [row / tokens / grid.heads, row / tokens % grid.heads, row % tokens];
            let at = |d: usize| h * grid.dim + d;
            let of = |x: usize, d: usize| inputs[x].get(&[b, t, at(d)]);
            let lse = inputs[3].data[row];
            let delta: f64 = (0..grid.dim).map(|d| of(2, d) * of(4, d)).sum();
            for (key, score) in defined_scores(&grid, inputs, [b, h, t]) {
                let entry = |d: usize, shift: usize| inputs[1].get(&[b, key, shift + at(d)]);
                let p = if lse == f64::NEG_INFINITY { 0.0 } else { (score - lse).exp() };
                let dp: f64 = (0..grid.dim).map(|d| of(4, d) * entry(d, width)).sum();
                let ds = p * (dp - delta) * scale;
                for d in 0..grid.dim {
                    let keys = (b * grid.key_rows() + key) * 2 * width;
                    grads[0].data[(b * tokens + t) * width + at(d)] += ds * entry(d, 0);
                    grads[1].data[keys + at(d)] += ds * of(0, d);
                    grads[1].data[keys + width + at(d)] += p * of(4, d);
                }
            }
        }
        grads
    }
}

/// One head's rows of a tensor that is written.
#[derive(Clone, Copy)]
struct Target {
    data: *mut f32,
    stride: usize,
}

impl Target {
    fn rows(&self, first: usize) -> Rows {
        Rows { data: Address(self.data.wrapping_add(first * self.stride)), stride: self.stride }
    }

    /// The rows as they were before this round: those of a head of the same tensor, or zeros.
    fn start(&self, before: Option<Head>, rows: usize, dim: usize) {
        for row in 0..rows {
            // SAFETY: every task owns its head's columns.
            let to = unsafe { self.rows(row).data.slice(0, dim) };
            match &before {
                Some(head) => to.copy_from_slice(head.row(row)),
                None => to.fill(0.0),
            }
        }
    }
}

/// What a task reads and writes.
struct Task<'a> {
    grid: &'a Grid,
    /// Queries, keys, values, the result and its gradient.
    read: [Head; 5],
    lse: &'a [f32],
    /// Gradients of queries, keys and values.
    written: [Target; 3],
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

impl<'a> Scratch<'a> {
    fn of(grid: &Grid, lent: &'a mut [f32]) -> Self {
        let s = grid.pair(Mask::None);
        let (product, rest) = lent.split_at_mut(gemm::SCRATCH);
        let (packed_k, rest) = rest.split_at_mut(rows_len(&s));
        let (packed_v, rest) = rest.split_at_mut(rows_len(&s));
        let (packed_k_dims, tiles) = rest.split_at_mut(dims_len(&s));
        let (p, dp) = tiles.split_at_mut(BLOCK * s.keys.next_multiple_of(16));
        Scratch { product, packed_k, packed_v, packed_k_dims, p, dp }
    }
}

impl Task<'_> {
    /// The rows of a block of queries that see these keys, `keys` of a block from row `first_key` on.
    fn differentiate(&self, scratch: Scratch<'_>) {
        let Scratch { product, packed_k, packed_v, packed_k_dims, p, dp } = scratch;
        let grid = self.grid;
        let [q, k, v, y, g] = &self.read;
        for key in (0..grid.keys).rev().filter(|key| grid.is_met(*key)) {
            let (k, v) = (grid.block(k, key), grid.block(v, key));
            let k_dims = pack_dims(&k, packed_k_dims);
            let (k_rows, v_rows) = (pack_rows(&k, packed_k), pack_rows(&v, packed_v));
            let first_key = key * grid.meeting.rows;
            for query in 0..grid.queries {
                let Some(mask) = grid.meeting.mask(query, key) else { continue };
                let (s, first) = (grid.pair(mask), query * grid.meeting.rows);
                let [q, y, g] = [q, y, g].map(|head| grid.block(head, query));
                for rows in s.blocks() {
                    let (count, keys) = (rows.len(), s.visible(rows.end));
                    raw_scores(&q, k_rows, rows.clone(), keys, p, product);
                    for (line, at) in rows.clone().enumerate() {
                        let row = &mut p[line * keys..(line + 1) * keys];
                        soften_again(row, s.scale(), None, s.visible(at + 1), self.lse[first + at]);
                    }
                    // dv += pᵀ·g
                    add(
                        [keys, s.dim, count],
                        &by_key(p, keys),
                        &g.by_dim(rows.start),
                        &self.written[2].rows(first_key),
                        product,
                    );
                    // dp = g·vᵀ, then ds in place
                    raw_scores(&g, v_rows, rows.clone(), keys, dp, product);
                    for (line, at) in rows.clone().enumerate() {
                        let here = line * keys..(line + 1) * keys;
                        score_gradient(&mut dp[here.clone()], &p[here], simd::dot(y.row(at), g.row(at)), s.scale());
                    }
                    // dq += ds·k, dk += dsᵀ·q
                    let straight = Strided { data: dp, line_stride: keys, k_stride: 1 };
                    let (shape, dq) = ([count, s.dim, keys], self.written[0].rows(first + rows.start));
                    Gemm { shape, a: &straight, b: k_dims, c: &dq, start: Start::Add }.run(product);
                    add(
                        [keys, s.dim, count],
                        &by_key(dp, keys),
                        &q.by_dim(rows.start),
                        &self.written[1].rows(first_key),
                        product,
                    );
                }
            }
        }
    }
}

/// `c += a · b`.
fn add(shape: [usize; 3], a: &Strided<'_>, b: &Strided<'_>, c: &Rows, scratch: &mut [f32]) {
    Gemm { shape, a, b: Right::Fresh(b), c, start: Start::Add }.run(scratch);
}

/// A tile of scores with keys as lines.
fn by_key(data: &[f32], keys: usize) -> Strided<'_> {
    Strided { data, line_stride: 1, k_stride: keys }
}

impl Cpu for AttentionStepGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let grid = Grid::of(self.meeting(), self.heads, cx.shape(0), cx.shape(1));
        let lent = Address(cx.scratch().as_mut_ptr());
        let per_thread = thread_scratch(&grid.pair(Mask::None), 2);
        let (tokens, keys, width) = (grid.query_rows(), grid.key_rows(), grid.width());
        let outputs = [0, 1].map(|at| Address(cx.outputs[at].data.cast()));
        let cx = &*cx;
        cx.team.run(grid.batch * grid.heads, |task, thread| {
            let (batch, column) = (task / grid.heads, task % grid.heads * grid.dim);
            let [q, k, v] = grid.heads(cx.f32(0), cx.f32(1), task);
            let of_query = |at: usize| grid.head(cx.f32(at), tokens, width, (task, 0));
            let target = |at: usize, rows: usize, columns: usize, shift: usize| Target {
                data: outputs[at].get().wrapping_add(batch * rows * columns + shift + column),
                stride: columns,
            };
            let written =
                [target(0, tokens, width, 0), target(1, keys, 2 * width, 0), target(1, keys, 2 * width, width)];
            let [dq, dkv] = self.before();
            written[0].start(dq.map(of_query), tokens, grid.dim);
            for (which, shift) in [(1, 0), (2, width)] {
                let before = dkv.map(|at| grid.head(cx.f32(at), keys, 2 * width, (task, shift)));
                written[which].start(before, keys, grid.dim);
            }
            let lse = &cx.f32(3)[task * tokens..(task + 1) * tokens];
            // SAFETY: each thread has its own scratch.
            let lent = unsafe { lent.slice(thread * per_thread, per_thread) };
            let task = Task { grid: &grid, read: [q, k, v, of_query(2), of_query(4)], lse, written };
            task.differentiate(Scratch::of(&grid, lent));
        });
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        let grid = Grid::checked(self.meeting(), self.heads, inputs);
        grid.map_or(0, |grid| thread_scratch(&grid.pair(Mask::None), 2) * 4 * threads)
    }
}

impl Cuda for AttentionStepGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let grid = Grid::of(self.meeting(), self.heads, &cx.inputs[0].shape, &cx.inputs[1].shape);
        let mut calls = CudaCalls::new();
        for (at, before) in self.before().into_iter().enumerate() {
            let (to, bytes) = (CudaPlace::output(at), cx.outputs[at].bytes());
            match before {
                Some(from) => calls.copy(CudaPlace::input(from), to, bytes),
                None => calls.zero(to, bytes),
            }
        }
        let (rows, width, bytes) = (grid.meeting.rows, grid.width(), size_of::<f32>());
        let whole = grid.attend([0, 0], Mask::None, cx.target);
        let delta = whole.deltas(&mut calls, CudaPlace::input(2), CudaPlace::input(4));
        for (query, key, mask) in grid.meetings() {
            let (first, first_key) = (query * rows, key * rows);
            let at = |place: CudaPlace| gpu::Rows { place: place.further(first * width * bytes), stride: width };
            let of_row = |place: CudaPlace| place.further(first * bytes);
            let saved = gpu::Saved {
                g: at(CudaPlace::input(4)),
                lse: of_row(CudaPlace::input(3)),
                delta: of_row(delta),
                rows: grid.query_rows(),
            };
            let dk = CudaPlace::output(1).further(first_key * 2 * width * bytes);
            let [dk, dv] = [dk, dk.further(width * bytes)].map(|place| gpu::Rows { place, stride: 2 * width });
            let pair = grid.attend([query, key], mask, cx.target);
            pair.backward(&mut calls, &saved, [at(CudaPlace::output(0)), dk, dv], DType::F32);
        }
        calls
    }
}

impl Cases for AttentionStepGrad {
    fn cases() -> Vec<Case> {
        let case = |heads, causal, (blocks, rows), (query, queries), (key, keys), round, [dq, dkv]: [bool; 2]| {
            let (batch, dim) = (2, if rows > 8 { 8 } else { 2 });
            let op = AttentionStepGrad { heads, causal, blocks, rows, query, key, round, dq, dkv };
            let (tokens, width) = (queries * rows, heads * dim);
            let mut all = args(batch, [tokens, keys * rows], width);
            let real = |shape: &[usize]| Arg::real(shape).constant();
            all.extend([real(&[batch, tokens, width]), real(&[batch, heads, tokens]), real(&[batch, tokens, width])]);
            all.extend(dq.then(|| real(&[batch, tokens, width])));
            all.extend(dkv.then(|| real(&[batch, keys * rows, 2 * width])));
            Case::new(op, all).tolerance(5e-5)
        };
        vec![
            case(2, true, (4, 3), (0, 2), (0, 2), Round::First, [false, false]),
            case(2, true, (4, 3), (0, 2), (2, 2), Round::Next, [true, true]),
            case(1, true, (4, 2), (0, 4), (0, 4), Round::Last, [true, false]),
            case(1, false, (4, 2), (2, 2), (3, 1), Round::Last, [false, true]),
            case(2, true, (2, 100), (0, 2), (0, 2), Round::First, [true, true]).leaves_out_zeros(),
            case(2, true, (4, 70), (0, 2), (2, 1), Round::Next, [true, true]).leaves_out_zeros(),
        ]
    }
}
