//! Rounds of attention: scores, the running softmax and the result, pair of blocks by pair of blocks.

use super::super::PRODUCTS;
use super::super::gpu;
use super::super::head::{dims_len, pack_dims, pack_rows, raw_scores, rows_len, thread_scratch};
use super::super::sizes::Mask;
use super::{AttentionClose, AttentionStep, Grid, Meeting, NUMBERS, Round};
use crate::device;
use crate::gemm::{self, Gemm, Rows, Start, Strided};
use crate::pairwise;
use crate::real::{Real, exp_of_negative};
use crate::simd;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx, CudaPlace, CudaSource, Launch};
use kolo_graph::split::{Placement, Split};
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, DType, Dense, Op, Operand, Operands, ProductShape, Type, Work};
use std::sync::Arc;

impl AttentionStep {
    fn meeting(&self) -> Meeting {
        let AttentionStep { causal, blocks, rows, query, key, round, .. } = *self;
        Meeting { causal, blocks, rows, query, key, round }
    }
}

impl Op for AttentionStep {
    fn operands(&self) -> Operands {
        let inputs: &[&'static str] = if self.running { &["q", "kv", "o", "numbers"] } else { &["q", "kv"] };
        Operands::without_rules(inputs.iter().map(|name| Operand::f32(name)).collect::<Vec<_>>(), &["o", "numbers"])
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let grid = Grid::checked(self.meeting(), self.heads, inputs)?;
        let numbers = Type::f32([grid.batch, grid.heads, grid.query_rows(), NUMBERS]);
        let outputs = vec![inputs[0].clone(), numbers];
        match &inputs[2..] {
            [] => Ok(outputs),
            before if before == outputs => Ok(outputs),
            _ => Err(format!("goes on from {} and {}", outputs[0], outputs[1])),
        }
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let Ok(grid) = Grid::checked(self.meeting(), self.heads, inputs) else { return Vec::new() };
        let operands = [Some(1), Some(2), Some(1), None];
        grid.splits(&operands[..inputs.len()], &[Some(1), None])
    }
    fn part(&self, split: &Split, units: usize) -> Option<Arc<dyn Op>> {
        (split.axis == "heads").then(|| Arc::new(Self { heads: units, ..self.clone() }) as Arc<dyn Op>)
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        Grid::checked(self.meeting(), self.heads, inputs).map_or(0, |grid| grid.points().saturating_mul(4))
    }
    fn work(&self) -> Work {
        Work::Product
    }
    fn product_shape(&self, inputs: &[Type], _: &[Type]) -> ProductShape {
        let grid = Grid::checked(self.meeting(), self.heads, inputs).expect("the graph was checked when it was built");
        grid.product_shape(PRODUCTS)
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let grid = Grid::of(self.meeting(), self.heads, &inputs[0].shape, &inputs[1].shape);
        let mut o = Dense::zeros(outputs[0].shape.clone());
        let mut numbers = Dense::zeros(outputs[1].shape.clone());
        let (tokens, width) = (grid.query_rows(), grid.width());
        for row in 0..grid.batch * grid.heads * tokens {
            let [b, h, t] = [row / tokens / grid.heads, row / tokens % grid.heads, row % tokens];
            let (largest, sum) = match self.running {
                true => (inputs[3].data[row * NUMBERS], inputs[3].data[row * NUMBERS + 1]),
                false => (f64::NEG_INFINITY, 0.0),
            };
            let scores = defined_scores(&grid, inputs, [b, h, t]);
            let most = scores.iter().fold(largest, |most, (_, score)| most.larger(*score));
            // What meets no key stays as it is.
            let blind = most == f64::NEG_INFINITY || scores.is_empty();
            let share = |score: f64| if blind { 0.0 } else { (score - most).exp() };
            let factor = if blind { 1.0 } else { (largest - most).exp() };
            numbers.data[row * NUMBERS] = most;
            numbers.data[row * NUMBERS + 1] = sum * factor + scores.iter().map(|(_, x)| share(*x)).sum::<f64>();
            for d in 0..grid.dim {
                let at = h * grid.dim + d;
                let before = if self.running { inputs[2].get(&[b, t, at]) } else { 0.0 };
                let value = |key: usize| inputs[1].get(&[b, key, width + at]);
                let met: f64 = scores.iter().map(|(key, score)| share(*score) * value(*key)).sum();
                o.data[(b * tokens + t) * width + at] = before * factor + met;
            }
        }
        vec![o, numbers]
    }
}

/// The keys that a query meets, with their scores; of those that it may not see, −∞.
pub(super) fn defined_scores(grid: &Grid, inputs: &[&Dense], [b, h, t]: [usize; 3]) -> Vec<(usize, f64)> {
    let rows = grid.meeting.rows;
    let score = |key: usize| {
        let dot = |d: usize| inputs[0].get(&[b, t, h * grid.dim + d]) * inputs[1].get(&[b, key, h * grid.dim + d]);
        let all: f64 = (0..grid.dim).map(dot).sum();
        all / (grid.dim as f64).sqrt()
    };
    let of_key = |key: usize| {
        let mask = grid.meeting.mask(t / rows, key / rows)?;
        let hidden = mask != Mask::None && key % rows > t % rows;
        Some((key, if hidden { f64::NEG_INFINITY } else { score(key) }))
    };
    (0..grid.key_rows()).filter_map(of_key).collect()
}

vectorized! {
    /// Turns a row of raw scores, of which some are visible, into exponentials from the largest score so far; that score, the
    /// sum of exponentials with what came before, and by what earlier results must be multiplied.
    fn fold(row: &mut [f32], scale: f32, visible: usize, before: [f32; NUMBERS]) -> [f32; 3] {
        let [largest, sum] = before;
        row.iter_mut().for_each(|x| *x *= scale);
        row[visible..].fill(f32::NEG_INFINITY);
        let most = Real::larger(largest, simd::max_of(row));
        if most == f32::NEG_INFINITY {
            row.fill(0.0);
            return [most, sum, 1.0];
        }
        for x in row.iter_mut() {
            *x = exp_of_negative(*x - most);
        }
        let factor = exp_of_negative(largest - most);
        [most, sum.mul_add(factor, pairwise::sum_of(row)), factor]
    }
}

vectorized! {
    fn multiply(row: &mut [f32], factor: f32) {
        row.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Where a task's results go on.
struct Running<'a> {
    o: Rows,
    numbers: &'a mut [f32],
}

impl AttentionStep {
    /// One head of one sample.
    fn attend(&self, grid: &Grid, cx: &CpuCx<'_>, task: usize, lent: &mut [f32], running: &mut Running<'_>) {
        let [q, k, v] = grid.heads(cx.f32(0), cx.f32(1), task);
        let s = grid.pair(Mask::None);
        let (product, rest) = lent.split_at_mut(gemm::SCRATCH);
        let (packed_k, rest) = rest.split_at_mut(rows_len(&s));
        let (packed_v, scores) = rest.split_at_mut(dims_len(&s));
        for key in (0..grid.keys).rev().filter(|key| grid.is_met(*key)) {
            let (k, v) = (grid.block(&k, key), grid.block(&v, key));
            let (k, v) = (pack_rows(&k, packed_k), pack_dims(&v, packed_v));
            for query in 0..grid.queries {
                let Some(mask) = grid.meeting.mask(query, key) else { continue };
                let (s, q, first) = (grid.pair(mask), grid.block(&q, query), query * s.queries);
                for rows in s.blocks() {
                    let keys = s.visible(rows.end);
                    raw_scores(&q, k, rows.clone(), keys, scores, product);
                    for (line, at) in rows.clone().enumerate() {
                        let numbers = &mut running.numbers[(first + at) * NUMBERS..][..NUMBERS];
                        let row = &mut scores[line * keys..(line + 1) * keys];
                        let [most, sum, factor] = fold(row, s.scale(), s.visible(at + 1), [numbers[0], numbers[1]]);
                        numbers.copy_from_slice(&[most, sum]);
                        // SAFETY: every task owns its head's columns.
                        multiply(unsafe { running.o.data.slice((first + at) * running.o.stride, s.dim) }, factor);
                    }
                    // SAFETY: as above.
                    let data = Address(unsafe { running.o.data.get().add((first + rows.start) * running.o.stride) });
                    let sink = Rows { data, stride: running.o.stride };
                    let p = Strided { data: scores, line_stride: keys, k_stride: 1 };
                    Gemm { shape: [rows.len(), s.dim, keys], a: &p, b: v, c: &sink, start: Start::Add }.run(product);
                }
            }
        }
    }
}

impl Cpu for AttentionStep {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let grid = Grid::of(self.meeting(), self.heads, cx.shape(0), cx.shape(1));
        let (o, numbers) = (Address(cx.out_f32(0).as_mut_ptr()), Address(cx.out_f32(1).as_mut_ptr()));
        let lent = Address(cx.scratch().as_mut_ptr());
        let per_thread = thread_scratch(&grid.pair(Mask::None), 1);
        let (tokens, width) = (grid.query_rows(), grid.width());
        let cx = &*cx;
        cx.team.run(grid.batch * grid.heads, |task, thread| {
            let from = task / grid.heads * tokens * width + task % grid.heads * grid.dim;
            // SAFETY: each thread has its own scratch, and every task owns its head's columns and rows of numbers.
            let (lent, own, data) = unsafe {
                let own = numbers.slice(task * tokens * NUMBERS, tokens * NUMBERS);
                (lent.slice(thread * per_thread, per_thread), own, Address(o.get().add(from)))
            };
            match self.running {
                true => own.copy_from_slice(&cx.f32(3)[task * tokens * NUMBERS..][..tokens * NUMBERS]),
                false => own.chunks_mut(NUMBERS).for_each(|row| row.copy_from_slice(&[f32::NEG_INFINITY, 0.0])),
            }
            for row in 0..tokens {
                // SAFETY: as above.
                let to = unsafe { data.slice(row * width, grid.dim) };
                match self.running {
                    true => to.copy_from_slice(&cx.f32(2)[from + row * width..][..grid.dim]),
                    false => to.fill(0.0),
                }
            }
            let mut running = Running { o: Rows { data, stride: width }, numbers: own };
            self.attend(&grid, cx, task, lent, &mut running);
        });
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        let grid = Grid::checked(self.meeting(), self.heads, inputs);
        grid.map_or(0, |grid| thread_scratch(&grid.pair(Mask::None), 1) * 4 * threads)
    }
}

impl Op for AttentionClose {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::f32("o"), Operand::f32("numbers")], &["y", "lse"])
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [o, numbers] = inputs else { return Err("takes o and numbers".into()) };
        match (&o.shape[..], &numbers.shape[..]) {
            (&[batch, tokens, width], &[samples, heads, rows, NUMBERS])
                if (batch, tokens) == (samples, rows) && heads > 0 && width % heads == 0 && width > 0 =>
            {
                Ok(vec![o.clone(), Type::f32([batch, heads, tokens])])
            }
            _ => Err(format!("needs [b, t, h·d] and [b, h, t, {NUMBERS}], not {o} and {numbers}")),
        }
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let [batch, heads, tokens, _] = inputs[1].shape[..] else { return Vec::new() };
        let along = |axis: &str, size: usize, o: usize, numbers: usize| {
            let both = [Placement::Shard(o), Placement::Shard(numbers)];
            Split::new(axis, size, both, both)
        };
        vec![along("batch", batch, 0, 0), along("heads", heads, 2, 1), along("tokens", tokens, 1, 2)]
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        inputs[0].elements() as u64
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let (width, heads) = (outputs[0].last(), outputs[1].shape[1]);
        let number = |at: &[usize], which: usize| inputs[1].get(&[at[0], at[1], at[2], which]);
        let y = Dense::from_fn(outputs[0].shape.clone(), |at| {
            let row = [at[0], at[2] / (width / heads), at[1]];
            let blind = number(&row, 0) == f64::NEG_INFINITY;
            if blind { 0.0 } else { inputs[0].get(at) / number(&row, 1) }
        });
        let lse = Dense::from_fn(outputs[1].shape.clone(), |at| match number(at, 0) {
            f64::NEG_INFINITY => f64::NEG_INFINITY,
            largest => largest + number(at, 1).ln(),
        });
        vec![y, lse]
    }
}

impl Cpu for AttentionClose {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let [batch, heads, tokens] = cx.outputs[1].ty.shape[..] else { return };
        let width = cx.shape(0)[2];
        let dim = width / heads;
        let (o, numbers) = (cx.f32(0), cx.f32(1));
        let (y, lse) = (Address(cx.out_f32(0).as_mut_ptr()), Address(cx.out_f32(1).as_mut_ptr()));
        cx.team.run(batch * heads, |task, _| {
            for row in 0..tokens {
                let from = (task / heads * tokens + row) * width + task % heads * dim;
                let at = task * tokens + row;
                let [largest, sum] = [numbers[at * NUMBERS], numbers[at * NUMBERS + 1]];
                // SAFETY: every task owns its head's columns and its rows of sums.
                let (y, lse) = unsafe { (y.slice(from, dim), &mut *lse.get().add(at)) };
                if largest == f32::NEG_INFINITY {
                    y.fill(0.0);
                    *lse = f32::NEG_INFINITY;
                    continue;
                }
                y.copy_from_slice(&o[from..from + dim]);
                multiply(y, 1.0 / sum);
                *lse = largest + Real::ln(sum);
            }
        });
    }
}

const SOURCE: &str = include_str!("close.cu");

impl Cuda for AttentionStep {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let grid = Grid::of(self.meeting(), self.heads, &cx.inputs[0].shape, &cx.inputs[1].shape);
        let mut calls = CudaCalls::new();
        let [o, numbers] = [0, 1].map(CudaPlace::output);
        if self.running {
            calls.copy(CudaPlace::input(2), o, cx.outputs[0].bytes());
            calls.copy(CudaPlace::input(3), numbers, cx.outputs[1].bytes());
        } else {
            calls.zero(o, cx.outputs[0].bytes());
            let rows = cx.outputs[1].elements() / NUMBERS;
            let (blocks, args) = (device::grid(rows, device::THREADS), [numbers.into(), device::long(rows)]);
            calls.launch(Launch::new(CudaSource::new(SOURCE), "begin_numbers", blocks, device::THREADS, args));
        }
        for (query, key, mask) in grid.meetings() {
            let (first, width) = (query * grid.meeting.rows, grid.width());
            let y = gpu::Rows { place: o.further(first * width * size_of::<f32>()), stride: width };
            let own = numbers.further(first * NUMBERS * size_of::<f32>());
            grid.attend([query, key], mask, cx.target).forward(&mut calls, y, own, DType::F32);
        }
        calls
    }
}

impl Cuda for AttentionClose {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let [_, heads, tokens] = cx.outputs[1].shape[..] else { return CudaCalls::new() };
        let count = cx.outputs[0].elements();
        let operands = [device::input(0), device::input(1), device::output(0), device::output(1)];
        let sizes = [count, tokens, heads, cx.outputs[0].last() / heads].map(device::long);
        let args = [&operands[..], &sizes].concat();
        let blocks = device::grid(count, device::THREADS);
        Launch::new(CudaSource::new(SOURCE), "close", blocks, device::THREADS, args).into()
    }
}

/// Queries in `[b, t, w]`, and keys and values of so many tokens.
pub(super) fn args(batch: usize, [queries, keys]: [usize; 2], width: usize) -> Vec<Arg> {
    [[batch, queries, width], [batch, keys, 2 * width]].map(|shape| Arg::real(shape).constant()).into()
}

impl Cases for AttentionStep {
    fn cases() -> Vec<Case> {
        let case = |heads, causal, (blocks, rows), (query, queries), (key, keys), round, running| {
            let (batch, dim) = (2, if rows > 8 { 24 } else { 2 });
            let op = AttentionStep { heads, causal, blocks, rows, query, key, round, running };
            let mut all = args(batch, [queries * rows, keys * rows], heads * dim);
            if running {
                all.push(Arg::real([batch, queries * rows, heads * dim]).constant());
                all.push(Arg::positive([batch, heads, queries * rows, NUMBERS]).constant());
            }
            Case::new(op, all).tolerance(5e-5)
        };
        vec![
            case(2, true, (4, 3), (0, 2), (0, 2), Round::First, false),
            case(2, true, (4, 3), (0, 2), (2, 2), Round::Next, true),
            case(1, true, (4, 2), (0, 4), (0, 4), Round::Last, true),
            case(1, false, (4, 2), (2, 2), (2, 2), Round::Last, true),
            case(3, false, (2, 1), (0, 1), (1, 1), Round::Next, false),
            // Of blocks of several tiles, those after a query are not computed.
            case(2, true, (2, 100), (0, 2), (0, 2), Round::First, false).leaves_out_zeros(),
            case(2, true, (4, 70), (0, 2), (2, 1), Round::Next, true).leaves_out_zeros(),
        ]
    }
}

impl Cases for AttentionClose {
    fn cases() -> Vec<Case> {
        let case = |batch, heads, tokens, dim| {
            let o = Arg::real([batch, tokens, heads * dim]).constant();
            Case::new(AttentionClose {}, [o, Arg::positive([batch, heads, tokens, NUMBERS]).constant()])
        };
        vec![case(2, 3, 4, 2), case(1, 1, 1, 1), case(2, 2, 70, 24)]
    }
}
