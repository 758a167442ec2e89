//! LSTM. Legend in the parent module; gates are in PyTorch's order: input, forget, candidate, output.
//!
//! `c_t = f · c_{t-1} + i · g`, `h_t = o · tanh(c_t)`.

use super::gpu;
use super::steps::{Back, Forward, StepBack, join_biases, packed_lengths};
use super::weights::{Factor, GateGrads, padded};
use super::{Sheet, Sizes, cut, layer, parts, parts_mut, plain, product, states_before};
use crate::gemm::{self, Rows, Start};
use crate::real::Real;
use crate::simd;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx};
use kolo_graph::index::Index;
use kolo_graph::split::Split;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operands, Tensor, Type, Work, op};

const GATES: usize = 4;

op! {
    /// LSTM layer: `(x[b,t,i], w_ih[4h,i], w_hh[4h,h], b_ih[4h], b_hh[4h])` to the states `[b,t,h]`, and for the backward
    /// pass the activated gates `[t,b,4h]` and the cells `[t,b,h]`.
    pub struct Lstm = "lstm" {}
}

/// One element: activated gates and cell, from what the gates sum up to and the cell before.
#[inline(always)]
fn cell<R: Real>(sums: [R; 4], before: R) -> ([R; 4], R) {
    let gates = [sums[0].sigmoid(), sums[1].sigmoid(), sums[2].tanh(), sums[3].sigmoid()];
    (gates, gates[1] * before + gates[0] * gates[2])
}

/// The state, from the output gate and the cell.
#[inline(always)]
fn state<R: Real>(o: R, cell: R) -> R {
    o * cell.tanh()
}

/// Its gradient: of the gates' sums and of the cell before, given those of the state and of the cell after.
#[inline(always)]
fn cell_grad<R: Real>([i, f, g, o]: [R; 4], before: R, cell: R, d_state: R, d_cell: R) -> ([R; 4], R) {
    let one = R::of(1.0);
    let squashed = cell.tanh();
    let d_cell = d_cell + d_state * o * (one - squashed * squashed);
    let d_sums = [
        d_cell * g * (i * (one - i)),
        d_cell * before * (f * (one - f)),
        d_cell * i * (one - g * g),
        d_state * squashed * (o * (one - o)),
    ];
    (d_sums, d_cell * f)
}

vectorized! {
    /// One sample's step: the gates' sums become the gates.
    fn cell_row(
        i: &mut [f32], f: &mut [f32], g: &mut [f32], o: &mut [f32], before: &[f32], cells: &mut [f32], states: &mut [f32],
    ) {
        let width = i.len();
        let (f, g, o, before) = (&mut f[..width], &mut g[..width], &mut o[..width], &before[..width]);
        let (cells, states) = (&mut cells[..width], &mut states[..width]);
        for at in 0..width {
            let (gates, cell) = cell([i[at], f[at], g[at], o[at]], before[at]);
            [i[at], f[at], g[at], o[at]] = gates;
            cells[at] = cell;
        }
        // In a loop of its own: in one, each element's two long chains of operations would be waited for end to end.
        for at in 0..width {
            states[at] = state(o[at], cells[at]);
        }
    }
}

vectorized! {
    /// One sample's step back. `d_cells` holds the gradient of the cell after and gets that of the cell before.
    fn cell_grad_row(
        i: &[f32], f: &[f32], g: &[f32], o: &[f32], before: &[f32], cells: &[f32], d_out: &[f32], d_next: &[f32],
        d_cells: &mut [f32], di: &mut [f32], df: &mut [f32], dg: &mut [f32], d_o: &mut [f32],
    ) {
        let width = i.len();
        let (f, g, o, before, cells) = (&f[..width], &g[..width], &o[..width], &before[..width], &cells[..width]);
        let (d_out, d_next, d_cells) = (&d_out[..width], &d_next[..width], &mut d_cells[..width]);
        let (di, df, dg, d_o) = (&mut di[..width], &mut df[..width], &mut dg[..width], &mut d_o[..width]);
        for at in 0..width {
            let d_state = d_out[at] + d_next[at];
            let gates = [i[at], f[at], g[at], o[at]];
            let (d_sums, d_before) = cell_grad(gates, before[at], cells[at], d_state, d_cells[at]);
            [di[at], df[at], dg[at], d_o[at]] = d_sums;
            d_cells[at] = d_before;
        }
    }
}

impl Op for Lstm {
    fn operands(&self) -> Operands {
        layer::operands(&["gates", "cells"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse("b t! i!, g! i, g h!, g, g -> b t h, t b g, t b h"))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        super::infer(self.index(inputs), inputs, GATES)
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        layer::flops(inputs, GATES)
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        layer::grad(cx, LstmGrad { need_dx: cx.needs(0) }, 1)
    }
    fn work(&self) -> Work {
        Work::ThinProducts
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let [x, w_ih, w_hh, b_ih, b_hh] = inputs else { unreachable!("five inputs") };
        let Sizes { batch, steps, hidden, .. } = Sizes::of(&x.shape, &w_hh.shape);
        let [mut y, mut gates, mut cells] = [0, 1, 2].map(|at| Dense::zeros(outputs[at].shape.clone()));
        for sample in 0..batch {
            for step in 0..steps {
                let before = (step > 0).then(|| plain::row(&y, sample, step - 1));
                let mut sums = plain::affine(w_ih, Some(plain::row(x, sample, step)), b_ih);
                plain::add(&mut sums, &plain::affine(w_hh, before, b_hh));
                for unit in 0..hidden {
                    let before = if step > 0 { cells.get(&[step - 1, sample, unit]) } else { 0.0 };
                    let ([i, f, g, o], cell) = cell([0, 1, 2, 3].map(|gate| sums[gate * hidden + unit]), before);
                    let row = (step * batch + sample) * hidden;
                    for (gate, value) in [i, f, g, o].into_iter().enumerate() {
                        gates.data[row * GATES + gate * hidden + unit] = value;
                    }
                    cells.data[row + unit] = cell;
                    y.data[(sample * steps + step) * hidden + unit] = state(o, cell);
                }
            }
        }
        vec![y, gates, cells]
    }
}

impl Cpu for Lstm {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let sizes = Sizes::of(cx.shape(0), cx.shape(2));
        let Sizes { steps, hidden, .. } = sizes;
        let all_gates = GATES * hidden;
        let ([bias, zeros, w_ih_packed, w_hh_packed], scratch) = cut(cx.scratch(), lengths(sizes));
        join_biases(cx, bias);
        zeros.fill(0.0);
        let zeros = &*zeros;
        let forward = Forward::new(cx, sizes, all_gates, [w_ih_packed, w_hh_packed]);
        let [y, gates, cells] = [0, 1, 2].map(|at| Address(cx.out_f32(at).as_mut_ptr()));
        let sums = Sheet { data: gates, grid: sizes.by_step(all_gates), width: all_gates };
        forward.run(sums, bias, scratch, |samples, scratch| {
            // SAFETY: no two threads share samples.
            let y = unsafe { y.slice(samples.start * steps * hidden, samples.len() * steps * hidden) };
            // SAFETY: as above.
            let rows = |of: Address, step: usize, width: usize| unsafe { sizes.rows(of, step, &samples, width) };
            for step in 0..steps {
                let gates = rows(gates, step, all_gates);
                if step > 0 {
                    let sink = Rows { data: Address(gates.as_mut_ptr()), stride: all_gates };
                    let states = states_before(y, sizes, step);
                    product([samples.len(), all_gates, hidden], states, forward.w_hh, sink, Start::Add, scratch);
                }
                let cells_now = rows(cells, step, hidden);
                for sample in 0..samples.len() {
                    let here = sample * hidden..(sample + 1) * hidden;
                    let before = if step > 0 { &rows(cells, step - 1, hidden)[here.clone()] } else { zeros };
                    let [i, f, g, o] = parts_mut(&mut gates[sample * all_gates..(sample + 1) * all_gates]);
                    let states = &mut y[(sample * steps + step) * hidden..][..hidden];
                    cell_row(i, f, g, o, before, &mut cells_now[here], states);
                }
            }
        });
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        super::scratch_bytes(&lengths(Sizes::of_types(inputs)), threads)
    }
}

/// Scratch of the forward pass: the joint bias, a cell of zeros, both weights packed.
fn lengths(sizes: Sizes) -> [usize; 4] {
    let gates = GATES * sizes.hidden;
    let [w_ih, w_hh] = packed_lengths(sizes, gates);
    [gates, sizes.hidden, w_ih, w_hh]
}

op! {
    /// Gradient of `lstm`: `(x, w_ih, w_hh, y, gates, cells, g)` to `dw_ih`, `dw_hh`, `db` (the same for both biases) and,
    /// if asked for, `dx`.
    pub struct LstmGrad = "lstm_grad" { need_dx: bool }
}

impl Op for LstmGrad {
    fn operands(&self) -> Operands {
        layer::grad_operands(&["gates", "cells"], &["db"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        let dx = if self.need_dx { ", b t i" } else { "" };
        Some(Index::parse(&format!("b t! i!, g! i, g h!, b t h, t b g, t b h, b t h -> g i, g h, g{dx}")))
    }
    fn splits(&self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
        super::backward_splits(self.index(inputs), inputs, 3, outputs.len())
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        super::infer_grad(self.index(inputs), inputs, GATES, self.need_dx)
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        layer::grad_flops(inputs, GATES, self.need_dx)
    }
    fn work(&self) -> Work {
        Work::ThinProducts
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let [gates, cells, g] = [inputs[4], inputs[5], inputs[6]];
        let Sizes { steps, hidden, .. } = Sizes::of(&inputs[0].shape, &inputs[2].shape);
        let mut d_cells = vec![0.0; hidden];
        plain::back_through_steps(inputs, outputs, self.need_dx, |sample, step, d_next| {
            let mut d_sums = vec![0.0; GATES * hidden];
            if step + 1 == steps {
                d_cells.fill(0.0);
            }
            for unit in 0..hidden {
                let before = if step > 0 { cells.get(&[step - 1, sample, unit]) } else { 0.0 };
                let values = [0, 1, 2, 3].map(|gate| gates.get(&[step, sample, gate * hidden + unit]));
                let d_state = g.get(&[sample, step, unit]) + d_next[unit];
                let cell = cells.get(&[step, sample, unit]);
                let (d_gates, d_before) = cell_grad(values, before, cell, d_state, d_cells[unit]);
                d_cells[unit] = d_before;
                d_gates.into_iter().enumerate().for_each(|(gate, d)| d_sums[gate * hidden + unit] = d);
            }
            d_next.fill(0.0);
            [d_sums.clone(), d_sums]
        })
    }
}

impl Cpu for LstmGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let sizes = Sizes::of(cx.shape(0), cx.shape(2));
        let hidden = sizes.hidden;
        let all_gates = GATES * hidden;
        let (pieces, scratch) = cut(cx.scratch(), self.lengths(sizes));
        let [zeros, w_hh_packed, w_ih_packed, d_gates, d_next, d_cells, d_bias] = pieces;
        zeros.fill(0.0);
        d_next.fill(0.0);
        d_cells.fill(0.0);
        d_bias.fill(0.0);
        let back = back(cx, sizes, zeros, Address(d_cells.as_mut_ptr()));
        let way = Back { sizes, gates: all_gates, width: all_gates, recurrent: 0, adds: false };
        way.through_steps(cx, w_hh_packed, [&mut *d_gates, d_next, &mut *d_bias], scratch, back);
        let grads = GateGrads { data: d_gates, stride: padded(all_gates) };
        let input = Factor { rows: cx.f32(0), d_weight: cx.out_f32(0) };
        let state = Factor { rows: cx.f32(3), d_weight: cx.out_f32(1) };
        grads.weights((cx.team, scratch), sizes, 0..all_gates, Some(input), Some(state));
        super::add_samples(d_bias, all_gates, 0..all_gates, cx.out_f32(2));
        if self.need_dx {
            let dx = Address(cx.out_f32(3).as_mut_ptr());
            grads.input((cx.team, scratch), sizes, 0..all_gates, (cx.f32(1), w_ih_packed), Start::Zero, dx);
        }
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        super::scratch_bytes(&self.lengths(Sizes::of_types(inputs)), threads)
    }
}

impl LstmGrad {
    /// Scratch: a cell of zeros, both weights packed, and the gradients of the gates at all steps, of the state and the
    /// cell at one step, and of the bias sample by sample.
    fn lengths(&self, sizes: Sizes) -> [usize; 7] {
        let Sizes { batch, steps, input, hidden } = sizes;
        let gates = GATES * hidden;
        let w_ih = if self.need_dx { gemm::prepacked_len(input, gates) } else { 0 };
        let w_hh = gemm::prepacked_len(hidden, gates);
        [hidden, w_hh, w_ih, steps * batch * padded(gates), batch * hidden, batch * hidden, batch * gates]
    }
}

/// One sample's step back; `d_cells` is the gradient of the cells after.
fn back<'a>(
    cx: &'a CpuCx<'_>,
    sizes: Sizes,
    zeros: &'a [f32],
    d_cells: Address,
) -> impl Fn(StepBack<'_>) + Sync + use<'a> {
    let Sizes { batch, steps, hidden, .. } = sizes;
    let all_gates = GATES * hidden;
    let (gates, cells, g) = (cx.f32(4), cx.f32(5), cx.f32(6));
    move |StepBack { step, sample, d_next, d_row }| {
        let row = step * batch + sample;
        let [i, f, g_, o] = parts(&gates[row * all_gates..(row + 1) * all_gates]);
        let before = if step > 0 { &cells[(row - batch) * hidden..][..hidden] } else { zeros };
        let d_out = &g[(sample * steps + step) * hidden..][..hidden];
        let [di, df, dg, d_o] = parts_mut(d_row);
        // SAFETY: no two threads share samples.
        let d_cells = unsafe { d_cells.slice(sample * hidden, hidden) };
        if step > 0 {
            // The step before comes next, and nothing but this code knows.
            simd::prefetch(gates[(row - batch) * all_gates..].as_ptr(), all_gates);
            simd::prefetch(g[(sample * steps + step - 1) * hidden..].as_ptr(), hidden);
        }
        if step > 1 {
            simd::prefetch(cells[(row - 2 * batch) * hidden..].as_ptr(), hidden);
        }
        let cells = &cells[row * hidden..(row + 1) * hidden];
        cell_grad_row(i, f, g_, o, before, cells, d_out, d_next, d_cells, di, df, dg, d_o);
    }
}

impl Cuda for Lstm {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        gpu::LSTM.forward(cx)
    }
}

impl Cuda for LstmGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        gpu::LSTM.backward(cx, self.need_dx)
    }
}

impl Cases for Lstm {
    fn cases() -> Vec<Case> {
        let case = |args: Vec<Arg>| Case::new(Lstm {}, args).tolerance(1e-4);
        let small = [[2, 3, 3, 2], [4, 2, 2, 3], [1, 1, 1, 1], [3, 1, 2, 1]];
        // Several tiles, more than one task's work, products deeper than a block of `k`.
        // One feature and a batch as large as an evaluation's; steps in parts of their depth.
        let large = [[7, 9, 33, 37], [9, 3, 300, 20], [3, 100, 17, 70], [256, 8, 1, 48], [2, 3, 4, 512]];
        let large = large.map(|sizes| case(layer::constant(layer::args(sizes, GATES))));
        small.map(|sizes| case(layer::args(sizes, GATES))).into_iter().chain(large).collect()
    }
}

impl Cases for LstmGrad {
    fn cases() -> Vec<Case> {
        let case = |need_dx, sizes| Case::new(LstmGrad { need_dx }, layer::grad_args(sizes, GATES)).tolerance(1e-4);
        vec![
            case(true, [2, 3, 3, 2]),
            case(false, [3, 1, 2, 1]),
            case(true, [1, 1, 1, 1]),
            case(true, [7, 9, 33, 37]),
            case(false, [9, 3, 300, 20]),
            case(true, [3, 100, 17, 70]),
            // Steps in parts of their depth.
            case(true, [2, 3, 5, 128]),
        ]
    }
}
