//! The plain recurrent layer, `h_t = act(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh)`. Legend in the parent module.

use super::gpu;
use super::steps::{Back, Forward, StepBack, join_biases, packed_lengths};
use super::weights::{Factor, GateGrads, padded};
use super::{Sheet, Sizes, cut, layer, plain, product, states_before};
use crate::gemm::{self, Rows, Start};
use crate::real::Real;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx};
use kolo_graph::index::Index;
use kolo_graph::split::Split;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operands, Tensor, Type, Work, op};

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
        layer::operands(&[])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse("b t! i!, h! i, h h, h, h -> b t h"))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        super::infer(self.index(inputs), inputs, 1)
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        layer::flops(inputs, 1)
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        layer::grad(cx, RnnGrad { relu: self.relu, need_dx: cx.needs(0) }, 1)
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
        let Sizes { steps, hidden, .. } = sizes;
        let ([bias, w_ih_packed, w_hh_packed], scratch) = cut(cx.scratch(), lengths(sizes));
        join_biases(cx, bias);
        let forward = Forward::new(cx, sizes, hidden, [w_ih_packed, w_hh_packed]);
        let y = Address(cx.out_f32(0).as_mut_ptr());
        let sums = Sheet { data: y, grid: sizes.by_sample(hidden), width: hidden };
        forward.run(sums, bias, scratch, |samples, scratch| {
            // SAFETY: no two threads share samples.
            let y = unsafe { y.slice(samples.start * steps * hidden, samples.len() * steps * hidden) };
            for step in 0..steps {
                if step > 0 {
                    let sink = Rows { data: Address(y[step * hidden..].as_mut_ptr()), stride: steps * hidden };
                    let states = states_before(y, sizes, step);
                    product([samples.len(), hidden, hidden], states, forward.w_hh, sink, Start::Add, scratch);
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
    let [w_ih, w_hh] = packed_lengths(sizes, sizes.hidden);
    [sizes.hidden, w_ih, w_hh]
}

op! {
    /// Gradient of `rnn`: `(x, w_ih, w_hh, y, g)` to `dw_ih`, `dw_hh`, `db` (the same for both biases) and, if asked for,
    /// `dx`.
    pub struct RnnGrad = "rnn_grad" { relu: bool, need_dx: bool }
}

impl Op for RnnGrad {
    fn operands(&self) -> Operands {
        layer::grad_operands(&[], &["db"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        let dx = if self.need_dx { ", b t i" } else { "" };
        Some(Index::parse(&format!("b t! i!, h! i, h h, b t h, b t h -> h i, h h, h{dx}")))
    }
    fn splits(&self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
        super::backward_splits(self.index(inputs), inputs, 3, outputs.len())
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        super::infer_grad(self.index(inputs), inputs, 1, self.need_dx)
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        layer::grad_flops(inputs, 1, self.need_dx)
    }
    fn work(&self) -> Work {
        Work::ThinProducts
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let (y, g) = (inputs[3], inputs[4]);
        plain::back_through_steps(inputs, outputs, self.need_dx, |sample, step, d_next| {
            let states = plain::row(y, sample, step).iter().zip(plain::row(g, sample, step)).zip(&*d_next);
            let d_sums: Vec<f64> = states.map(|((y, g), d)| activate_grad(self.relu, *y, g + d)).collect();
            d_next.fill(0.0);
            [d_sums.clone(), d_sums]
        })
    }
}

impl Cpu for RnnGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let sizes = Sizes::of(cx.shape(0), cx.shape(2));
        let hidden = sizes.hidden;
        let (pieces, scratch) = cut(cx.scratch(), self.lengths(sizes));
        let [w_hh_packed, w_ih_packed, d_sums, d_next, d_bias] = pieces;
        d_next.fill(0.0);
        d_bias.fill(0.0);
        let (y, g) = (cx.f32(3), cx.f32(4));
        let way = Back { sizes, gates: hidden, width: hidden, recurrent: 0, adds: false };
        let work = [&mut *d_sums, d_next, &mut *d_bias];
        way.through_steps(cx, w_hh_packed, work, scratch, |StepBack { step, sample, d_next, d_row }| {
            let now = (sample * sizes.steps + step) * hidden;
            let now = now..now + hidden;
            activate_grad_row(self.relu, &y[now.clone()], &g[now], d_next, d_row);
        });
        let grads = GateGrads { data: d_sums, stride: padded(hidden) };
        let input = Factor { rows: cx.f32(0), d_weight: cx.out_f32(0) };
        let state = Factor { rows: cx.f32(3), d_weight: cx.out_f32(1) };
        grads.weights((cx.team, scratch), sizes, 0..hidden, Some(input), Some(state));
        super::add_samples(d_bias, hidden, 0..hidden, cx.out_f32(2));
        if self.need_dx {
            let dx = Address(cx.out_f32(3).as_mut_ptr());
            grads.input((cx.team, scratch), sizes, 0..hidden, (cx.f32(1), w_ih_packed), Start::Zero, dx);
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
}

impl Cuda for Rnn {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        gpu::rnn(self.relu).forward(cx)
    }
}

impl Cuda for RnnGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        gpu::rnn(self.relu).backward(cx, self.need_dx)
    }
}

impl Cases for Rnn {
    fn cases() -> Vec<Case> {
        let case = |relu, args: Vec<Arg>| Case::new(Rnn { relu }, args).tolerance(1e-4);
        let small = [(false, [2, 3, 3, 4]), (true, [4, 2, 2, 3]), (false, [1, 1, 1, 1]), (true, [3, 1, 2, 1])];
        // Several tiles, more than one task's work, products deeper than a block of `k`.
        let large = [(false, [7, 9, 63, 67]), (false, [3, 100, 17, 70]), (true, [9, 3, 300, 40])];
        let large = large.map(|(relu, sizes)| case(relu, layer::constant(layer::args(sizes, 1))));
        small.map(|(relu, sizes)| case(relu, layer::args(sizes, 1))).into_iter().chain(large).collect()
    }
}

impl Cases for RnnGrad {
    fn cases() -> Vec<Case> {
        let case =
            |relu, need_dx, sizes| Case::new(RnnGrad { relu, need_dx }, layer::grad_args(sizes, 1)).tolerance(1e-4);
        vec![
            case(false, true, [2, 3, 3, 2]),
            case(true, false, [3, 1, 2, 1]),
            case(false, true, [1, 1, 1, 1]),
            case(true, true, [7, 9, 63, 67]),
            case(false, false, [9, 3, 300, 40]),
            case(false, true, [3, 100, 17, 30]),
        ]
    }
}
