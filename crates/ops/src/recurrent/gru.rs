//! GRU. Legend in the parent module; gates are in PyTorch's order: reset, update, candidate.
//!
//! `n = tanh(W_in x + b_in + r · (W_hn h + b_hn))`, `h_t = (1 − z) · n + z · h_{t-1}`: the reset gate acts after the product,
//! so the recurrent share of the candidate is kept apart for the backward pass.

use super::gpu;
use super::steps::{Back, Forward, StepBack, packed_lengths};
use super::weights::{Factor, GateGrads, padded};
use super::{Sheet, Sizes, cut, layer, parts, parts_mut, plain, product, states_before};
use crate::gemm::{self, Rows, Start, Strided};
use crate::real::Real;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx};
use kolo_graph::index::Index;
use kolo_graph::split::Split;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operands, Tensor, Type, Work, op};

const GATES: usize = 3;
/// Gradients kept per unit: candidate, reset, update, recurrent share of the candidate. In this order both the first three
/// and the last three lie together: the former belong to the input, the latter to the state before.
const GRADS: usize = 4;

op! {
    /// GRU layer: `(x[b,t,i], w_ih[3h,i], w_hh[3h,h], b_ih[3h], b_hh[3h])` to the states `[b,t,h]`, and for the backward
    /// pass the activated gates `[t,b,3h]` and the recurrent share of the candidate `[t,b,h]`.
    pub struct Gru = "gru" {}
}

/// One element: activated gates and state, from the input's and the recurrent sums and the state before.
#[inline(always)]
fn cell<R: Real>(from_input: [R; 3], from_state: [R; 3], before: R) -> ([R; 3], R) {
    let reset = (from_input[0] + from_state[0]).sigmoid();
    let update = (from_input[1] + from_state[1]).sigmoid();
    let candidate = (from_input[2] + reset * from_state[2]).tanh();
    ([reset, update, candidate], (R::of(1.0) - update) * candidate + update * before)
}

/// Its gradient: of candidate, reset, update and the candidate's recurrent share, and of the state before.
#[inline(always)]
fn cell_grad<R: Real>([reset, update, candidate]: [R; 3], share: R, before: R, d_state: R) -> ([R; 4], R) {
    let one = R::of(1.0);
    let d_candidate = d_state * (one - update) * (one - candidate * candidate);
    let d_reset = d_candidate * share * (reset * (one - reset));
    let d_update = d_state * (before - candidate) * (update * (one - update));
    ([d_candidate, d_reset, d_update, d_candidate * reset], d_state * update)
}

vectorized! {
    /// One sample's step: the gates' sums become the gates.
    fn cell_row(
        r: &mut [f32], z: &mut [f32], n: &mut [f32], state_r: &[f32], state_z: &[f32], state_n: &[f32],
        before: &[f32], shares: &mut [f32], states: &mut [f32],
    ) {
        let width = r.len();
        let (z, n, before) = (&mut z[..width], &mut n[..width], &before[..width]);
        let (state_r, state_z, state_n) = (&state_r[..width], &state_z[..width], &state_n[..width]);
        let (shares, states) = (&mut shares[..width], &mut states[..width]);
        for at in 0..width {
            let from_state = [state_r[at], state_z[at], state_n[at]];
            let (gates, state) = cell([r[at], z[at], n[at]], from_state, before[at]);
            [r[at], z[at], n[at]] = gates;
            shares[at] = from_state[2];
            states[at] = state;
        }
    }
}

vectorized! {
    /// One sample's step back. `d_next` holds the gradient of the state that comes from the step after, and gets the part
    /// of the gradient of the state before that does not go through the weight.
    fn cell_grad_row(
        r: &[f32], z: &[f32], n: &[f32], shares: &[f32], before: &[f32], d_out: &[f32], d_next: &mut [f32],
        dn: &mut [f32], dr: &mut [f32], dz: &mut [f32], d_share: &mut [f32],
    ) {
        let width = r.len();
        let (z, n, shares, before) = (&z[..width], &n[..width], &shares[..width], &before[..width]);
        let (d_out, d_next) = (&d_out[..width], &mut d_next[..width]);
        let (dn, dr, dz, d_share) = (&mut dn[..width], &mut dr[..width], &mut dz[..width], &mut d_share[..width]);
        for at in 0..width {
            let gates = [r[at], z[at], n[at]];
            let (grads, d_before) = cell_grad(gates, shares[at], before[at], d_out[at] + d_next[at]);
            [dn[at], dr[at], dz[at], d_share[at]] = grads;
            d_next[at] = d_before;
        }
    }
}

impl Op for Gru {
    fn operands(&self) -> Operands {
        layer::operands(&["gates", "shares"])
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
        layer::grad(cx, GruGrad { need_dx: cx.needs(0) }, 2)
    }
    fn work(&self) -> Work {
        Work::ThinProducts
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let [x, w_ih, w_hh, b_ih, b_hh] = inputs else { unreachable!("five inputs") };
        let Sizes { batch, steps, hidden, .. } = Sizes::of(&x.shape, &w_hh.shape);
        let [mut y, mut gates, mut shares] = [0, 1, 2].map(|at| Dense::zeros(outputs[at].shape.clone()));
        for sample in 0..batch {
            for step in 0..steps {
                let before = (step > 0).then(|| plain::row(&y, sample, step - 1));
                let from_input = plain::affine(w_ih, Some(plain::row(x, sample, step)), b_ih);
                let from_state = plain::affine(w_hh, before, b_hh);
                plain::set_row(&mut shares, step, sample, &from_state[2 * hidden..]);
                for unit in 0..hidden {
                    let before = if step > 0 { y.get(&[sample, step - 1, unit]) } else { 0.0 };
                    let at = |sums: &[f64]| [0, 1, 2].map(|gate| sums[gate * hidden + unit]);
                    let (values, state) = cell(at(&from_input), at(&from_state), before);
                    for (gate, value) in values.into_iter().enumerate() {
                        gates.data[((step * batch + sample) * GATES + gate) * hidden + unit] = value;
                    }
                    y.data[(sample * steps + step) * hidden + unit] = state;
                }
            }
        }
        vec![y, gates, shares]
    }
}

impl Cpu for Gru {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let sizes = Sizes::of(cx.shape(0), cx.shape(2));
        let Sizes { steps, hidden, .. } = sizes;
        let all_gates = GATES * hidden;
        let ([zeros, from_state, w_ih_packed, w_hh_packed], scratch) = cut(cx.scratch(), lengths(sizes));
        zeros.fill(0.0);
        let (zeros, from_state) = (&*zeros, Address(from_state.as_mut_ptr()));
        let forward = Forward::new(cx, sizes, all_gates, [w_ih_packed, w_hh_packed]);
        let (b_ih, b_hh) = (cx.f32(3), cx.f32(4));
        let [y, gates, shares] = [0, 1, 2].map(|at| Address(cx.out_f32(at).as_mut_ptr()));
        let sums = Sheet { data: gates, grid: sizes.by_step(all_gates), width: all_gates };
        forward.run(sums, b_ih, scratch, |samples, scratch| {
            // SAFETY: no two threads share samples.
            let y = unsafe { y.slice(samples.start * steps * hidden, samples.len() * steps * hidden) };
            // SAFETY: as above.
            let rows = |of: Address, step: usize, width: usize| unsafe { sizes.rows(of, step, &samples, width) };
            let from_state = rows(from_state, 0, all_gates);
            for step in 0..steps {
                let sink = Rows { data: Address(from_state.as_mut_ptr()), stride: all_gates };
                // Without a state before, the product has no depth and leaves the bias alone.
                let (states, depth) = if step > 0 { (states_before(y, sizes, step), hidden) } else { (NOTHING, 0) };
                let shape = [samples.len(), all_gates, depth];
                product(shape, states, forward.w_hh, sink, Start::Bias(b_hh), scratch);
                let (gates, shares) = (rows(gates, step, all_gates), rows(shares, step, hidden));
                for sample in 0..samples.len() {
                    let row = sample * all_gates..(sample + 1) * all_gates;
                    let [r, z, n] = parts_mut(&mut gates[row.clone()]);
                    let [state_r, state_z, state_n] = parts(&from_state[row]);
                    let (past, now) = y.split_at_mut((sample * steps + step) * hidden);
                    let before = if step > 0 { &past[past.len() - hidden..] } else { zeros };
                    let shares = &mut shares[sample * hidden..(sample + 1) * hidden];
                    cell_row(r, z, n, state_r, state_z, state_n, before, shares, &mut now[..hidden]);
                }
            }
        });
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        super::scratch_bytes(&lengths(Sizes::of_types(inputs)), threads)
    }
}

const NOTHING: Strided<'static> = Strided { data: &[], line_stride: 0, k_stride: 1 };

/// Scratch of the forward pass: a state of zeros, one step's recurrent sums, both weights packed.
fn lengths(sizes: Sizes) -> [usize; 4] {
    let gates = GATES * sizes.hidden;
    let [w_ih, w_hh] = packed_lengths(sizes, gates);
    [sizes.hidden, sizes.batch * gates, w_ih, w_hh]
}

op! {
    /// Gradient of `gru`: `(x, w_ih, w_hh, y, gates, shares, g)` to `dw_ih`, `dw_hh`, `db_ih`, `db_hh` and, if asked for,
    /// `dx`.
    pub struct GruGrad = "gru_grad" { need_dx: bool }
}

impl Op for GruGrad {
    fn operands(&self) -> Operands {
        layer::grad_operands(&["gates", "shares"], &["db_ih", "db_hh"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        let dx = if self.need_dx { ", b t i" } else { "" };
        Some(Index::parse(&format!("b t! i!, g! i, g h!, b t h, t b g, t b h, b t h -> g i, g h, g, g{dx}")))
    }
    fn splits(&self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
        super::backward_splits(self.index(inputs), inputs, 4, outputs.len())
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
        let [y, gates, shares, g] = [inputs[3], inputs[4], inputs[5], inputs[6]];
        let Sizes { hidden, .. } = Sizes::of(&inputs[0].shape, &inputs[2].shape);
        plain::back_through_steps(inputs, outputs, self.need_dx, |sample, step, d_next| {
            let [mut to_input, mut to_state] = [vec![0.0; GATES * hidden], vec![0.0; GATES * hidden]];
            for unit in 0..hidden {
                let before = if step > 0 { y.get(&[sample, step - 1, unit]) } else { 0.0 };
                let values = [0, 1, 2].map(|gate| gates.get(&[step, sample, gate * hidden + unit]));
                let d_state = g.get(&[sample, step, unit]) + d_next[unit];
                let share = shares.get(&[step, sample, unit]);
                let ([dn, dr, dz, d_share], d_before) = cell_grad(values, share, before, d_state);
                for (gate, (input, state)) in [(dr, dr), (dz, dz), (dn, d_share)].into_iter().enumerate() {
                    to_input[gate * hidden + unit] = input;
                    to_state[gate * hidden + unit] = state;
                }
                d_next[unit] = d_before;
            }
            [to_input, to_state]
        })
    }
}

impl Cpu for GruGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let sizes = Sizes::of(cx.shape(0), cx.shape(2));
        let (input, hidden) = (sizes.input, sizes.hidden);
        let width = GRADS * hidden;
        let (pieces, scratch) = cut(cx.scratch(), self.lengths(sizes));
        let [zeros, w_hh_packed, w_ih_packed, d_gates, d_next, d_bias] = pieces;
        zeros.fill(0.0);
        d_next.fill(0.0);
        d_bias.fill(0.0);
        let way = Back { sizes, gates: GATES * hidden, width, recurrent: hidden, adds: true };
        let work = [&mut *d_gates, d_next, &mut *d_bias];
        way.through_steps(cx, w_hh_packed, work, scratch, back(cx, sizes, zeros));
        let grads = GateGrads { data: d_gates, stride: padded(width) };
        // The weights have reset and update first, which input and state share, then the candidate.
        let (candidate, reset_update, recurrent) = (0..hidden, hidden..3 * hidden, hidden..width);
        let (x, y, team) = (cx.f32(0), cx.f32(3), cx.team);
        let (dw_ih, dw_in) = cx.out_f32(0).split_at_mut(2 * hidden * input);
        let (dw_hh, dw_hn) = cx.out_f32(1).split_at_mut(2 * hidden * hidden);
        let factor = |rows, d_weight| Some(Factor { rows, d_weight });
        grads.weights((team, scratch), sizes, reset_update.clone(), factor(x, dw_ih), factor(y, dw_hh));
        grads.weights((team, scratch), sizes, candidate.clone(), factor(x, dw_in), None);
        grads.weights((team, scratch), sizes, 3 * hidden..width, None, factor(y, dw_hn));
        let (db_reset_update, db_candidate) = cx.out_f32(2).split_at_mut(2 * hidden);
        super::add_samples(d_bias, width, reset_update.clone(), db_reset_update);
        super::add_samples(d_bias, width, candidate.clone(), db_candidate);
        super::add_samples(d_bias, width, recurrent, cx.out_f32(3));
        if self.need_dx {
            let (w_reset_update, w_candidate) = cx.f32(1).split_at(2 * hidden * input);
            let dx = Address(cx.out_f32(4).as_mut_ptr());
            grads.input((team, scratch), sizes, reset_update, (w_reset_update, w_ih_packed), Start::Zero, dx);
            grads.input((team, scratch), sizes, candidate, (w_candidate, w_ih_packed), Start::Add, dx);
        }
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        super::scratch_bytes(&self.lengths(Sizes::of_types(inputs)), threads)
    }
}

impl GruGrad {
    /// Scratch: a state of zeros, both weights packed, and the gradients of the gates at all steps, of the state at one
    /// step, and of the biases sample by sample.
    fn lengths(&self, sizes: Sizes) -> [usize; 6] {
        let Sizes { batch, steps, input, hidden } = sizes;
        let width = GRADS * hidden;
        let w_ih = if self.need_dx { gemm::prepacked_len(input, 2 * hidden) } else { 0 };
        let w_hh = gemm::prepacked_len(hidden, GATES * hidden);
        [hidden, w_hh, w_ih, steps * batch * padded(width), batch * hidden, batch * width]
    }
}

/// One sample's step back.
fn back<'a>(cx: &'a CpuCx<'_>, sizes: Sizes, zeros: &'a [f32]) -> impl Fn(StepBack<'_>) + Sync + use<'a> {
    let Sizes { batch, steps, hidden, .. } = sizes;
    let all_gates = GATES * hidden;
    let (y, gates, shares, g) = (cx.f32(3), cx.f32(4), cx.f32(5), cx.f32(6));
    move |StepBack { step, sample, d_next, d_row }| {
        let row = step * batch + sample;
        let [r, z, n] = parts(&gates[row * all_gates..(row + 1) * all_gates]);
        let shares = &shares[row * hidden..(row + 1) * hidden];
        let now = (sample * steps + step) * hidden;
        let before = if step > 0 { &y[now - hidden..now] } else { zeros };
        let [dn, dr, dz, d_share] = parts_mut(d_row);
        cell_grad_row(r, z, n, shares, before, &g[now..now + hidden], d_next, dn, dr, dz, d_share);
    }
}

impl Cuda for Gru {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        gpu::GRU.forward(cx)
    }
}

impl Cuda for GruGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        gpu::GRU.backward(cx, self.need_dx)
    }
}

impl Cases for Gru {
    fn cases() -> Vec<Case> {
        let case = |args: Vec<Arg>| Case::new(Gru {}, args).tolerance(1e-4);
        let small = [[2, 3, 3, 2], [4, 2, 2, 3], [1, 1, 1, 1], [3, 1, 2, 1]];
        // Several tiles, more than one task's work, products deeper than a block of `k`.
        let large = [[7, 9, 33, 37], [9, 3, 300, 20], [3, 100, 17, 90]];
        let large = large.map(|sizes| case(layer::constant(layer::args(sizes, GATES))));
        small.map(|sizes| case(layer::args(sizes, GATES))).into_iter().chain(large).collect()
    }
}

impl Cases for GruGrad {
    fn cases() -> Vec<Case> {
        let case = |need_dx, sizes| Case::new(GruGrad { need_dx }, layer::grad_args(sizes, GATES)).tolerance(1e-4);
        vec![
            case(true, [2, 3, 3, 2]),
            case(false, [3, 1, 2, 1]),
            case(true, [1, 1, 1, 1]),
            case(true, [7, 9, 33, 37]),
            case(false, [9, 3, 300, 20]),
            case(true, [3, 100, 17, 90]),
        ]
    }
}
