//! Recurrent layers on the GPU, as calls: the input's share of all gates as one product, then a launch per step; backward a launch
//! per step, then the gradients of weights and input as products over all steps.

use super::Sizes;
use crate::device::{THREADS, flag, grid, input, long};
use crate::sums::{self, Values};
use kolo_graph::DType;
use kolo_graph::cuda::{CudaArg, CudaCalls, CudaCx, CudaMatrix, CudaPlace, CudaSource, Launch, Product};

const SOURCE: &str = include_str!("recurrent.cu");

/// Units and samples of a block, forward and backward.
const UNITS: usize = 16;
const SAMPLES: usize = 16;
const UNITS_BACK: usize = 64;

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

    /// `(x, w_ih, w_hh, b_ih, b_hh)` to the states and what backward keeps.
    pub(super) fn forward(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (sizes, dtype) = (Sizes::of_types(cx.inputs), cx.inputs[0].dtype);
        let Sizes { batch, steps, input: width, hidden } = sizes;
        let all = self.gates * hidden;
        let mut calls = CudaCalls::new();
        let from_input = calls.scratch(steps * batch * all * size_of::<f32>());
        // A batch of products, one to a step: rows of x are samples, which lie `steps` rows apart.
        let x = CudaMatrix { batch_stride: width, ..matrix(CudaPlace::input(0), dtype, steps * width, false) };
        let weight = matrix(CudaPlace::input(1), cx.inputs[1].dtype, width, true);
        let made = CudaMatrix { batch_stride: batch * all, ..matrix(from_input, DType::F32, all, false) };
        calls.product(Product { batch: steps, ..product([batch, all, width], [x, weight, made]) });
        let blocks = [hidden.div_ceil(UNITS), batch.div_ceil(SAMPLES), 1];
        let kept = |at: usize| CudaPlace::output(if at < cx.outputs.len() { at } else { 0 });
        for step in 0..steps {
            let operands = [from_input.into(), input(2), input(3), input(4)];
            let outputs = [0, 1, 2].map(|at| CudaArg::from(kept(at)));
            let args = [&operands[..], &outputs, &self.sizes(step, sizes)].concat();
            calls.launch(Launch::new(self.source("FORWARD", dtype), "step", blocks, UNITS * SAMPLES, args));
        }
        calls
    }

    /// `(x, w_ih, w_hh, y, …, g)` to the gradients of both weights, of the biases (one or two) and perhaps of x.
    pub(super) fn backward(&self, cx: &CudaCx<'_>, need_dx: bool) -> CudaCalls {
        let (sizes, dtype) = (Sizes::of_types(cx.inputs), cx.inputs[0].dtype);
        let Sizes { batch, steps, input: width, hidden } = sizes;
        let (all, rows, last) = (self.gates * hidden, batch * steps, cx.inputs.len() - 1);
        let mut calls = CudaCalls::new();
        let shares = cx.outputs.len() - 2 - usize::from(need_dx) == 1;
        let halves = dtype != DType::F32;
        // Gradients of the gates in f32, and copies in the operands' type for the products.
        let mut room = |bytes: usize| calls.scratch(rows * all * bytes);
        let to_state = room(size_of::<f32>());
        let to_input = if shares { to_state } else { room(size_of::<f32>()) };
        let state_copy = if halves { room(dtype.bytes()) } else { to_state };
        let input_copy = match (shares, halves) {
            (true, _) => state_copy,
            (false, true) => room(dtype.bytes()),
            (false, false) => to_input,
        };
        let carried = calls.scratch(batch * hidden * size_of::<f32>());
        let source = self.source("BACKWARD", dtype).define("HALVES", i32::from(halves));
        let kept = |at: usize| input(if at < last { at } else { 3 });
        for step in (0..steps).rev() {
            let operands = [input(2), input(3), kept(4), kept(5), input(last)];
            let places = [to_input, to_state, input_copy, state_copy, carried].map(CudaArg::from);
            let args = [&operands[..], &places, &self.sizes(step, sizes)].concat();
            let blocks = [hidden.div_ceil(UNITS_BACK), batch.div_ceil(SAMPLES), 1];
            calls.launch(Launch::new(source.clone(), "step_back", blocks, THREADS, args));
        }
        let before = calls.scratch(rows * hidden * dtype.bytes());
        let args = [input(3), before.into(), long(rows * hidden), long(steps), long(hidden)];
        calls.launch(Launch::new(source, "states_before", grid(rows * hidden, THREADS), THREADS, args));
        let of = |at: usize, columns: usize| matrix(CudaPlace::output(at), cx.outputs[at].dtype, columns, false);
        for (at, grads, factor, columns) in
            [(0, input_copy, CudaPlace::input(0), width), (1, state_copy, before, hidden)]
        {
            let operands = [matrix(grads, dtype, all, true), matrix(factor, dtype, columns, false), of(at, columns)];
            calls.product(product([all, columns, rows], operands));
        }
        let biases = if shares { vec![to_state] } else { vec![to_input, to_state] };
        for (at, grads) in biases.iter().enumerate() {
            let to = Values::new(CudaPlace::output(2 + at), cx.outputs[2 + at].dtype);
            sums::columns(&mut calls, Values::f32(*grads), [1, rows, all], to);
        }
        if need_dx {
            let at = 2 + biases.len();
            let weight = matrix(CudaPlace::input(1), cx.inputs[1].dtype, width, false);
            let operands = [matrix(input_copy, dtype, all, false), weight, of(at, width)];
            calls.product(product([rows, width, all], operands));
        }
        calls
    }
}
