//! The ways forward and back through the steps, which the three layers go alike. What one sample's step computes is theirs.

use super::weights::padded;
use super::{Sheet, Sizes, product, product_of_all_steps, share};
use crate::gemm::{self, Packed, Rows, Start, Strided};
use crate::simd;
use crate::tiles::Address;
use kolo_graph::CpuCx;
use std::ops::Range;

/// A layer with its weights packed.
#[derive(Debug)]
pub struct Forward<'a> {
    cx: &'a CpuCx<'a>,
    sizes: Sizes,
    /// Rows of the weights.
    gates: usize,
    w_ih: Packed<'a>,
    pub w_hh: Packed<'a>,
}

impl<'a> Forward<'a> {
    /// Packs both weights, of `gates` rows, into what `packed_lengths` says.
    pub fn new(cx: &'a CpuCx<'_>, sizes: Sizes, gates: usize, [ih, hh]: [&'a mut [f32]; 2]) -> Self {
        let weight = |at: usize, width: usize| Strided { data: cx.f32(at), line_stride: width, k_stride: 1 };
        let w_ih = gemm::prepack(&weight(1, sizes.input), gates, sizes.input, ih);
        let w_hh = gemm::prepack(&weight(2, sizes.hidden), gates, sizes.hidden, hh);
        Self { cx, sizes, gates, w_ih, w_hh }
    }

    /// Makes the input's share of all sums, with a bias, then runs `steps(samples, scratch of one product)`.
    pub fn run(
        &self,
        sums: Sheet<Address>,
        bias: &[f32],
        scratch: &mut [f32],
        steps: impl Fn(Range<usize>, &mut [f32]) + Sync,
    ) {
        let Sizes { batch, input, .. } = self.sizes;
        let x = Sheet { data: self.cx.f32(0), grid: self.sizes.by_sample(input), width: input };
        share(self.cx.team, batch, self.sizes.work(self.gates), scratch, |samples, scratch| {
            let all = (self.sizes.steps, samples.clone());
            product_of_all_steps(all, x, self.w_ih, sums, Start::Bias(bias), scratch);
            steps(samples, scratch);
        });
    }
}

/// Floats of both weights packed.
pub fn packed_lengths(sizes: Sizes, gates: usize) -> [usize; 2] {
    [sizes.input, sizes.hidden].map(|depth| gemm::prepacked_len(gates, depth))
}

/// Both biases as one.
pub fn join_biases(cx: &CpuCx<'_>, bias: &mut [f32]) {
    bias.iter_mut().zip(cx.f32(3)).zip(cx.f32(4)).for_each(|((sum, b_ih), b_hh)| *sum = b_ih + b_hh);
}

/// The shape of a way back.
#[derive(Clone, Copy, Debug)]
pub struct Back {
    pub sizes: Sizes,
    /// Rows of the recurrent weight.
    pub gates: usize,
    /// Gradients of one sample's step, of which those from `recurrent` on belong to the recurrent weight.
    pub width: usize,
    pub recurrent: usize,
    /// Whether a step leaves a part of the gradient of the state before that does not go through the weight.
    pub adds: bool,
}

/// One sample's step back.
#[derive(Debug)]
pub struct StepBack<'a> {
    pub step: usize,
    pub sample: usize,
    /// The gradient of the state that comes from the step after.
    pub d_next: &'a mut [f32],
    /// Gets the gradients of the sums.
    pub d_row: &'a mut [f32],
}

impl Back {
    /// Fills the gradients of the sums at every step, last to first, and adds them up for the biases. `work` holds
    /// `[t, b, padded(width)]` for the former, `[b, h]` zeros, and `[b, width]` zeros for the latter; `packed` memory for the packed weight.
    pub fn through_steps(
        self,
        cx: &CpuCx<'_>,
        packed: &mut [f32],
        work: [&mut [f32]; 3],
        scratch: &mut [f32],
        back: impl Fn(StepBack<'_>) + Sync,
    ) {
        let Self { sizes, gates, width, recurrent, adds } = self;
        let Sizes { batch, steps, hidden, .. } = sizes;
        let stride = padded(width);
        let w_hh = Strided { data: cx.f32(2), line_stride: 1, k_stride: hidden };
        let w_hh = gemm::prepack(&w_hh, hidden, gates, packed);
        let [d_sums, d_next, d_bias] = work.map(|piece| Address(piece.as_mut_ptr()));
        share(cx.team, batch, sizes.work(gates), scratch, |samples, scratch| {
            // SAFETY: no two threads share samples.
            let rows = |of: Address, step: usize, width: usize| unsafe { sizes.rows(of, step, &samples, width) };
            let (d_next, d_bias) = (rows(d_next, 0, hidden), rows(d_bias, 0, width));
            for step in (0..steps).rev() {
                if step + 1 < steps {
                    let after = &rows(d_sums, step + 1, stride)[recurrent..];
                    let after = Strided { data: after, line_stride: stride, k_stride: 1 };
                    let sink = Rows { data: Address(d_next.as_mut_ptr()), stride: hidden };
                    let start = if adds { Start::Add } else { Start::Zero };
                    product([samples.len(), hidden, gates], after, w_hh, sink, start, scratch);
                }
                let d_sums = rows(d_sums, step, stride);
                for (at, sample) in samples.clone().enumerate() {
                    let d_row = &mut d_sums[at * stride..][..width];
                    let d_next = &mut d_next[at * hidden..(at + 1) * hidden];
                    back(StepBack { step, sample, d_next, d_row: &mut *d_row });
                    simd::add_into(&mut d_bias[at * width..(at + 1) * width], d_row);
                }
            }
        });
    }
}
