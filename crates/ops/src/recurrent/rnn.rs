//! The plain recurrent layer, `h_t = act(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh)`. Legend in the parent module.

use super::weights::{Factor, GateGrads, padded};
use super::{Sheet, Sizes, constant, cut, layer, plain, product, product_of_all_steps, share, states_before};
use crate::gemm::{self, Rows, Start, Strided};
use crate::real::Real;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::index::Index;
use kolo_graph::split::Split;
use kolo_graph::types::count;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Op, Operand, Operands, Tensor, Type, Work, op};

op! {
    /// Recurrent layer: `(x[b,t,i], w_ih[h,i], w_hh[h,h], b_ih[h], b_hh[h])` to the states `[b,t,h]`; relu, or else tanh.
    pub struct Rnn = "rnn" { relu: bool }
}

#[inline(always)]
fn activate<R: Real>(relu: bool, sum: R) -> R {
    if relu { sum.larger(R::of(0.0)) } else { sum.tanh() }
}

/// The gradient of the sum, from the state it became.
#[inline(always)]
fn activate_grad<R: Real>(relu: bool, state: R, d_state: R) -> R {
    if relu {
        R::select(state.is_above(R::of(0.0)), d_state, R::of(0.0))
    } else {
        d_state * (R::of(1.0) - state * state)
    }
}

vectorized! {
    fn activate_row(relu: bool, states: &mut [f32]) {
        if relu {
            states.iter_mut().for_each(|state| *state = activate(true, *state));
        } else {
            states.iter_mut().for_each(|state| *state = activate(false, *state));
        }
    }
}

vectorized! {
    fn activate_grad_row(relu: bool, states: &[f32], d_out: &[f32], d_next: &[f32], d_sums: &mut [f32]) {
        let width = d_sums.len();
        let (states, d_out, d_next) = (&states[..width], &d_out[..width], &d_next[..width]);
        if relu {
            for at in 0..width {
                d_sums[at] = activate_grad(true, states[at], d_out[at] + d_next[at]);
            }
        } else {
            for at in 0..width {
                d_sums[at] = activate_grad(false, states[at], d_out[at] + d_next[at]);
            }
        }
    }
}

impl Op for Rnn {
    fn operands(&self) -> Operands {
        Operands::new(
            [
                Operand::float("x"),
                Operand::float("w_ih"),
                Operand::float("w_hh"),
                Operand::float("b_ih"),
                Operand::float("b_hh"),
            ],
            &["y"],
        )
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse("b t! i!, h! i, h h, h, h -> b t h"))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        super::infer(self.index(inputs), inputs, 1)
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        let sizes = Sizes::of_types(inputs);
        (sizes.work(sizes.hidden) as u64).saturating_mul(2)
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let inputs = [cx.input(0), cx.input(1), cx.input(2), cx.output(0), cx.grad()];
        let all = cx.grad().builder().apply_all(RnnGrad { relu: self.relu, need_dx: cx.needs(0) }, &inputs);
        let dx = cx.needs(0).then(|| all[3]);
        vec![dx, Some(all[0]), Some(all[1]), Some(all[2]), Some(all[2])]
    }
    fn work(&self) -> Work {
        Work::ThinProducts
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let [x, w_ih, w_hh, b_ih, b_hh] = inputs else { unreachable!("five inputs") };
        let Sizes { batch, steps, .. } = Sizes::of(&x.shape, &w_hh.shape);
        let mut y = Dense::zeros(outputs[0].shape.clone());
        for sample in 0..batch {
            for step in 0..steps {
                let before = (step > 0).then(|| plain::row(&y, sample, step - 1));
                let mut sums = plain::affine(w_ih, Some(plain::row(x, sample, step)), b_ih);
                plain::add(&mut sums, &plain::affine(w_hh, before, b_hh));
                sums.iter_mut().for_each(|sum| *sum = activate(self.relu, *sum));
                plain::set_row(&mut y, sample, step, &sums);
            }
        }
        vec![y]
    }
}

impl Cpu for Rnn {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let sizes = Sizes::of(cx.shape(0), cx.shape(2));
        let Sizes { batch, steps, input, hidden } = sizes;
        let (pieces, scratch) = cut(cx.scratch(), lengths(sizes));
        let [bias, w_ih_room, w_hh_room] = pieces;
        bias.iter_mut().zip(cx.f32(3)).zip(cx.f32(4)).for_each(|((sum, b_ih), b_hh)| *sum = b_ih + b_hh);
        let bias = &*bias;
        let weight = |at: usize, width: usize| Strided { data: cx.f32(at), line_stride: width, k_stride: 1 };
        let w_ih = gemm::prepack(&weight(1, input), hidden, input, w_ih_room);
        let w_hh = gemm::prepack(&weight(2, hidden), hidden, hidden, w_hh_room);
        let x = Sheet { data: cx.f32(0), grid: sizes.by_sample(input), width: input };
        let y = Address(cx.out_f32(0).as_mut_ptr());
        share(cx.team, batch, sizes.work(hidden), scratch, |samples, scratch| {
            let sums = Sheet { data: y, grid: sizes.by_sample(hidden), width: hidden };
            product_of_all_steps((steps, samples.clone()), x, w_ih, sums, Start::Bias(bias), scratch);
            // SAFETY: no two threads share samples.
            let y = unsafe { y.slice(samples.start * steps * hidden, samples.len() * steps * hidden) };
            for step in 0..steps {
                if step > 0 {
                    let sink = Rows { data: Address(y[step * hidden..].as_mut_ptr()), stride: steps * hidden };
                    let states = states_before(y, sizes, step);
                    product(samples.len(), hidden, hidden, states, w_hh, sink, Start::Add, scratch);
                }
                for sample in 0..samples.len() {
                    activate_row(self.relu, &mut y[(sample * steps + step) * hidden..][..hidden]);
                }
            }
        });
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        super::scratch_bytes(&lengths(Sizes::of_types(inputs)), threads)
    }
}

/// Scratch of the forward pass: the joint bias, both weights packed.
fn lengths(sizes: Sizes) -> [usize; 3] {
    let packed = [sizes.input, sizes.hidden].map(|depth| gemm::prepacked_len(sizes.hidden, depth));
    [sizes.hidden, packed[0], packed[1]]
}

op! {
    /// Gradient of `rnn`: `(x, w_ih, w_hh, y, g)` to `dw_ih`, `dw_hh`, `db` (the same for both biases) and, if asked for,
    /// `dx`.
    pub struct RnnGrad = "rnn_grad" { relu: bool, need_dx: bool }
}

impl Op for RnnGrad {
    fn operands(&self) -> Operands {
        Operands::without_rules(
            [
                Operand::float("x"),
                Operand::float("w_ih"),
                Operand::float("w_hh"),
                Operand::float("y"),
                Operand::float("g"),
            ],
            &["dw_ih", "dw_hh", "db", "dx"],
        )
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        let dx = if self.need_dx { ", b t i" } else { "" };
        Some(Index::parse(&format!("b t! i!, h! i, h h, b t h, b t h -> h i, h h, h{dx}")))
    }
    fn splits(&self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
        super::backward_splits(self.index(inputs), inputs, 3, outputs.len())
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        super::infer(self.index(inputs), inputs, 1)
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        let sizes = Sizes::of_types(inputs);
        let products = if self.need_dx { 2 } else { 1 } * sizes.input + 2 * sizes.hidden;
        count(&[2, sizes.batch, sizes.steps, sizes.hidden, products]) as u64
    }
    fn work(&self) -> Work {
        Work::ThinProducts
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let [x, w_ih, w_hh, y, g] = inputs else { unreachable!("five inputs") };
        let Sizes { batch, steps, hidden, .. } = Sizes::of(&x.shape, &w_hh.shape);
        let zeros = vec![0.0; hidden];
        let mut out: Vec<Dense> = outputs.iter().map(|ty| Dense::zeros(ty.shape.clone())).collect();
        for sample in 0..batch {
            let mut d_next = vec![0.0; hidden];
            for step in (0..steps).rev() {
                let at = |unit: usize| [sample, step, unit];
                let d_sums: Vec<f64> = (0..hidden)
                    .map(|unit| activate_grad(self.relu, y.get(&at(unit)), g.get(&at(unit)) + d_next[unit]))
                    .collect();
                plain::add_outer(&mut out[0], &d_sums, plain::row(x, sample, step));
                let before = if step > 0 { plain::row(y, sample, step - 1) } else { &zeros };
                plain::add_outer(&mut out[1], &d_sums, before);
                plain::add(&mut out[2].data, &d_sums);
                if self.need_dx {
                    plain::set_row(&mut out[3], sample, step, &plain::transposed(w_ih, &d_sums));
                }
                d_next = plain::transposed(w_hh, &d_sums);
            }
        }
        out
    }
}

impl Cpu for RnnGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let sizes = Sizes::of(cx.shape(0), cx.shape(2));
        let hidden = sizes.hidden;
        let (pieces, scratch) = cut(cx.scratch(), self.lengths(sizes));
        let [w_hh_room, w_ih_room, d_sums, d_next, d_bias] = pieces;
        d_next.fill(0.0);
        d_bias.fill(0.0);
        self.back_through_steps(cx, sizes, w_hh_room, [&mut *d_sums, d_next, &mut *d_bias], scratch);
        let grads = GateGrads { data: d_sums, stride: padded(hidden) };
        let input = Factor { rows: cx.f32(0), d_weight: cx.out_f32(0) };
        let state = Factor { rows: cx.f32(3), d_weight: cx.out_f32(1) };
        grads.weights((cx.team, scratch), sizes, 0..hidden, Some(input), Some(state));
        super::add_samples(d_bias, hidden, 0..hidden, cx.out_f32(2));
        if self.need_dx {
            let dx = Address(cx.out_f32(3).as_mut_ptr());
            grads.input((cx.team, scratch), sizes, 0..hidden, (cx.f32(1), w_ih_room), Start::Zero, dx);
        }
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        super::scratch_bytes(&self.lengths(Sizes::of_types(inputs)), threads)
    }
}

impl RnnGrad {
    /// Scratch: both weights packed, and the gradients of the sums at all steps, of the state at one step, and of the bias
    /// sample by sample.
    fn lengths(&self, sizes: Sizes) -> [usize; 5] {
        let Sizes { batch, steps, input, hidden } = sizes;
        let w_ih = if self.need_dx { gemm::prepacked_len(input, hidden) } else { 0 };
        [gemm::prepacked_len(hidden, hidden), w_ih, steps * batch * padded(hidden), batch * hidden, batch * hidden]
    }

    /// Fills the gradients of the sums at every step, last to first, and adds them up for the bias.
    fn back_through_steps(
        &self,
        cx: &CpuCx<'_>,
        sizes: Sizes,
        room: &mut [f32],
        work: [&mut [f32]; 3],
        scratch: &mut [f32],
    ) {
        let Sizes { batch, steps, hidden, .. } = sizes;
        let stride = padded(hidden);
        let w_hh = gemm::prepack(&Strided { data: cx.f32(2), line_stride: 1, k_stride: hidden }, hidden, hidden, room);
        let (y, g) = (cx.f32(3), cx.f32(4));
        let [d_sums, d_next, d_bias] = work.map(|piece| Address(piece.as_mut_ptr()));
        share(cx.team, batch, sizes.work(hidden), scratch, |samples, scratch| {
            // SAFETY: no two threads share samples, and each slice is one step's rows of these samples.
            let rows = |of: Address, step: usize, width: usize| unsafe {
                let range = sizes.at(step, &samples, width);
                of.slice(range.start, range.len())
            };
            let (d_next, d_bias) = (rows(d_next, 0, hidden), rows(d_bias, 0, hidden));
            for step in (0..steps).rev() {
                if step + 1 < steps {
                    let after = Strided { data: rows(d_sums, step + 1, stride), line_stride: stride, k_stride: 1 };
                    let sink = Rows { data: Address(d_next.as_mut_ptr()), stride: hidden };
                    product(samples.len(), hidden, hidden, after, w_hh, sink, Start::Zero, scratch);
                }
                let d_sums = rows(d_sums, step, stride);
                for (at, sample) in samples.clone().enumerate() {
                    let here = at * hidden..(at + 1) * hidden;
                    let now = (sample * steps + step) * hidden;
                    let now = now..now + hidden;
                    let d_row = &mut d_sums[at * stride..][..hidden];
                    activate_grad_row(self.relu, &y[now.clone()], &g[now], &d_next[here.clone()], d_row);
                    crate::simd::add_into(&mut d_bias[here], d_row);
                }
            }
        });
    }
}

impl Cases for Rnn {
    fn cases() -> Vec<Case> {
        let case = |relu, args: Vec<Arg>| Case::new(Rnn { relu }, args).tolerance(1e-4);
        let layer = |batch, steps, input, hidden| layer(batch, steps, input, hidden, 1);
        vec![
            case(false, layer(2, 3, 3, 4)),
            case(true, layer(4, 2, 2, 3)),
            case(false, layer(1, 1, 1, 1)),
            case(true, layer(3, 1, 2, 1)),
            // Several tiles, more than one task's work, products deeper than a block of `k`.
            case(false, constant(layer(7, 9, 63, 67))),
            case(false, constant(layer(3, 100, 17, 70))),
            case(true, constant(layer(9, 3, 300, 40))),
        ]
    }
}

impl Cases for RnnGrad {
    fn cases() -> Vec<Case> {
        let case = |relu, need_dx, batch, steps, input, hidden| {
            let mut args = layer(batch, steps, input, hidden, 1);
            args.truncate(3);
            args.extend([Arg::real([batch, steps, hidden]).within(-1.0, 1.0), Arg::real([batch, steps, hidden])]);
            Case::new(RnnGrad { relu, need_dx }, constant(args)).tolerance(1e-4)
        };
        vec![
            case(false, true, 2, 3, 3, 2),
            case(true, false, 3, 1, 2, 1),
            case(false, true, 1, 1, 1, 1),
            case(true, true, 7, 9, 63, 67),
            case(false, false, 9, 3, 300, 40),
            case(false, true, 3, 100, 17, 30),
        ]
    }
}
