//! Recurrent layers on the GPU, as calls: the input's share of all gates as one product, then a product with the recurrent weight and
//! a launch per step; backward a launch and a product per step, then the gradients of weights and input as products over all steps.

use super::Sizes;
use crate::device::{THREADS, flag, grid, input, long};
use crate::sums::{self, Values};
use kolo_graph::DType;
use kolo_graph::cuda::{CudaArg, CudaCalls, CudaCx, CudaMatrix, CudaPlace, CudaSource, Launch, Product};

const SOURCE: &str = include_str!("recurrent.cu");

/// Which layer it is, and how many rows its weights have for a unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layer {
    pub kind: &'static str,
    pub gates: usize,
    pub relu: bool,
}

pub(super) const LSTM: Layer = Layer { kind: "LSTM", gates: 4, relu: false };
pub(super) const GRU: Layer = Layer { kind: "GRU", gates: 3, relu: false };

pub(super) fn rnn(relu: bool) -> Layer {
    Layer { kind: "RNN", gates: 1, relu }
}

/// A matrix whose rows lie one after the other.
fn matrix(place: CudaPlace, dtype: DType, row_stride: usize, transposed: bool) -> CudaMatrix {
    CudaMatrix { place, dtype, row_stride, batch_stride: 0, transposed }
}

fn product([rows, columns, depth]: [usize; 3], [a, b, c]: [CudaMatrix; 3]) -> Product {
    Product { rows, columns, depth, batch: 1, a, b, c, alpha: 1.0, beta: 0.0, bias: None }
}

impl Layer {
    fn source(&self, pass: &'static str, dtype: DType) -> CudaSource {
        let source = CudaSource::new(SOURCE).define_type("OPERAND", dtype).define("KIND", self.kind);
        source.define("GATES", self.gates).define(pass, 1)
    }

    /// The step's numbers as the kernels take them.
    fn sizes(&self, step: usize, sizes: Sizes) -> [CudaArg; 5] {
        let Sizes { batch, steps, hidden, .. } = sizes;
        [long(step), long(steps), long(batch), long(hidden), flag(self.relu)]
    }

    /// A launch over all units of all samples.
    fn step(
        &self,
        source: &CudaSource,
        function: &'static str,
        operands: [&[CudaArg]; 2],
        at: (usize, Sizes),
    ) -> Launch {
        let (step, sizes) = at;
        let args = [operands[0], operands[1], &self.sizes(step, sizes)].concat();
        Launch::new(source.clone(), function, grid(sizes.batch * sizes.hidden, THREADS), THREADS, args)
    }

    /// `(x, w_ih, w_hh, b_ih, b_hh)` to the states and what backward keeps.
    pub(super) fn forward(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (sizes, dtype) = (Sizes::of_types(cx.inputs), cx.inputs[0].dtype);
        let Sizes { batch, steps, input: width, hidden } = sizes;
        let (all, rows) = (self.gates * hidden, batch * steps);
        let mut calls = CudaCalls::new();
        let from_input = calls.scratch(rows * all * size_of::<f32>());
        let from_state = calls.scratch(batch * all * size_of::<f32>());
        let weight = |at: usize, columns: usize| matrix(CudaPlace::input(at), cx.inputs[at].dtype, columns, true);
        let sums = |place: CudaPlace| matrix(place, DType::F32, all, false);
        let x = matrix(CudaPlace::input(0), dtype, width, false);
        calls.product(product([rows, all, width], [x, weight(1, width), sums(from_input)]));
        let kept = |at: usize| CudaPlace::output(if at < cx.outputs.len() { at } else { 0 });
        let source = self.source("FORWARD", dtype);
        for step in 0..steps {
            if step > 0 {
                let states = CudaPlace::output(0).further((step - 1) * hidden * dtype.bytes());
                let operands = [matrix(states, dtype, steps * hidden, false), weight(2, hidden), sums(from_state)];
                calls.product(product([batch, all, hidden], operands));
            }
            let operands = [from_input.into(), from_state.into(), input(3), input(4)];
            let outputs = [0, 1, 2].map(|at| CudaArg::from(kept(at)));
            calls.launch(self.step(&source, "step", [&operands, &outputs], (step, sizes)));
        }
        calls
    }

    /// `(x, w_ih, w_hh, y, …, g)` to the gradients of both weights, of the biases (one or two) and perhaps of x.
    pub(super) fn backward(&self, cx: &CudaCx<'_>, need_dx: bool) -> CudaCalls {
        let (sizes, dtype) = (Sizes::of_types(cx.inputs), cx.inputs[0].dtype);
        let Sizes { batch, steps, hidden, .. } = sizes;
        let (all, rows, last) = (self.gates * hidden, batch * steps, cx.inputs.len() - 1);
        let mut calls = CudaCalls::new();
        let to_state = calls.scratch(rows * all * dtype.bytes());
        let shares = cx.outputs.len() - 2 - usize::from(need_dx) == 1;
        let to_input = if shares { to_state } else { calls.scratch(rows * all * dtype.bytes()) };
        let [d_next, carried] = [(); 2].map(|()| calls.scratch(batch * hidden * size_of::<f32>()));
        let state_sums = calls.scratch(batch * all * size_of::<f32>());
        let input_sums = if shares { state_sums } else { calls.scratch(batch * all * size_of::<f32>()) };
        let source = self.source("BACKWARD", dtype);
        let kept = |at: usize| input(if at < last { at } else { 3 });
        for step in (0..steps).rev() {
            if step + 1 < steps {
                let after = matrix(to_state.further((step + 1) * all * dtype.bytes()), dtype, steps * all, false);
                let weight = matrix(CudaPlace::input(2), cx.inputs[2].dtype, hidden, false);
                let operands = [after, weight, matrix(d_next, DType::F32, hidden, false)];
                calls.product(product([batch, hidden, all], operands));
            }
            let operands = [d_next.into(), input(3), kept(4), kept(5), input(last)];
            let places = [to_input, to_state, input_sums, state_sums, carried].map(CudaArg::from);
            calls.launch(self.step(&source, "step_back", [&operands, &places], (step, sizes)));
        }
        let before = calls.scratch(rows * hidden * dtype.bytes());
        let args = [input(3), before.into(), long(rows * hidden), long(steps), long(hidden)];
        calls.launch(Launch::new(source, "states_before", grid(rows * hidden, THREADS), THREADS, args));
        self.gradients(&mut calls, cx, (sizes, need_dx), [to_input, to_state, before]);
        let biases = if shares { vec![state_sums] } else { vec![input_sums, state_sums] };
        for (at, of_samples) in biases.into_iter().enumerate() {
            let to = Values::new(CudaPlace::output(2 + at), cx.outputs[2 + at].dtype);
            sums::columns(&mut calls, Values::f32(of_samples), [1, batch, all], to);
        }
        calls
    }

    /// The gradients of weights and input from those of the gates at all steps, and the states before each.
    fn gradients(&self, calls: &mut CudaCalls, cx: &CudaCx<'_>, of: (Sizes, bool), places: [CudaPlace; 3]) {
        let (Sizes { batch, steps, input: width, hidden }, need_dx) = of;
        let ([to_input, to_state, before], dtype) = (places, cx.inputs[0].dtype);
        let (all, rows) = (self.gates * hidden, batch * steps);
        let made = |at: usize, columns: usize| matrix(CudaPlace::output(at), cx.outputs[at].dtype, columns, false);
        for (at, grads, factor, columns) in [(0, to_input, CudaPlace::input(0), width), (1, to_state, before, hidden)] {
            let operands = [matrix(grads, dtype, all, true), matrix(factor, dtype, columns, false), made(at, columns)];
            calls.product(product([all, columns, rows], operands));
        }
        if need_dx {
            let at = cx.outputs.len() - 1;
            let weight = matrix(CudaPlace::input(1), cx.inputs[1].dtype, width, false);
            let operands = [matrix(to_input, dtype, all, false), weight, made(at, width)];
            calls.product(product([rows, width, all], operands));
        }
    }
}
