//! Layers shared by the models: parameters with PyTorch's names, layouts and initial distributions.

use crate::Build;
use kolo_graph::sources::GrainSum;
use kolo_graph::{Stage, rng::Stream};
use kolo_ops::prelude::*;

impl<'b> Build<'b> {
    /// `torch.nn.Linear`: `name.weight` is `[out, in]`.
    pub fn linear(&self, name: &str, x: Tensor<'b>, out: usize) -> Tensor<'b> {
        self.builder.scope(name, || {
            let width = x.dim(x.rank().saturating_sub(1));
            let weight = self.builder.param("weight", [out, width], Init::fan_in(width));
            let bias = self.builder.param("bias", [out], Init::fan_in(width));
            x.linear(weight, Some(bias))
        })
    }

    /// `torch.nn.Conv2d` with a square kernel.
    pub fn conv2d(&self, name: &str, x: Tensor<'b>, conv: Conv) -> Tensor<'b> {
        self.builder.scope(name, || {
            let channels = x.dim(1);
            let fan_in = channels * conv.kernel * conv.kernel;
            let shape = [conv.channels, channels, conv.kernel, conv.kernel];
            let weight = self.builder.param("weight", shape, conv.init.unwrap_or(Init::fan_in(fan_in)));
            let bias = conv.bias.then(|| self.builder.param("bias", [conv.channels], Init::fan_in(fan_in)));
            x.conv2d(weight, bias, [conv.stride; 2], [conv.padding; 2], [1, 1], 1)
        })
    }

    /// `torch.nn.ConvTranspose2d` with a square kernel: `name.weight` is `[in, out, kernel, kernel]`. The last `output_padding` rows
    /// and columns, fewer than the stride, say which of the sizes that a strided convolution would shrink to this one comes out.
    pub fn conv_transpose2d(&self, name: &str, x: Tensor<'b>, conv: Conv, output_padding: usize) -> Tensor<'b> {
        self.builder.scope(name, || {
            // PyTorch takes the second dim of any weight for its inputs.
            let fan_in = conv.channels * conv.kernel * conv.kernel;
            let shape = [x.dim(1), conv.channels, conv.kernel, conv.kernel];
            let weight = self.builder.param("weight", shape, conv.init.unwrap_or(Init::fan_in(fan_in)));
            let bias = conv.bias.then(|| self.builder.param("bias", [conv.channels], Init::fan_in(fan_in)));
            x.conv_transpose2d(weight, bias, [conv.stride; 2], [conv.padding; 2], [output_padding; 2], [1, 1], 1)
        })
    }

    /// `torch.nn.Embedding`: the rows of `name.weight`, `[rows, width]`, at these ids.
    pub fn embedding(&self, name: &str, ids: Tensor<'b>, rows: usize, width: usize) -> Tensor<'b> {
        self.builder.scope(name, || {
            let weight = self.builder.param("weight", [rows, width], Init::Normal { deviation: 1.0 });
            weight.embedding(ids)
        })
    }

    /// `torch.nn.LSTM` of so many layers over `[batch, steps, features]`, from a zero state: the last layer's hidden states,
    /// `[batch, steps, width]`.
    pub fn lstm(&self, name: &str, x: Tensor<'b>, width: usize, layers: usize) -> Tensor<'b> {
        self.recurrent(name, x, (width, layers), 4, |x, [w_ih, w_hh, b_ih, b_hh]| x.lstm(w_ih, w_hh, b_ih, b_hh))
    }

    /// `torch.nn.GRU`, likewise.
    pub fn gru(&self, name: &str, x: Tensor<'b>, width: usize, layers: usize) -> Tensor<'b> {
        self.recurrent(name, x, (width, layers), 3, |x, [w_ih, w_hh, b_ih, b_hh]| x.gru(w_ih, w_hh, b_ih, b_hh))
    }

    /// Layers one above the other: `name.weight_ih_l0` is `[gates · width, features]`, and the rest as PyTorch names it.
    fn recurrent(
        &self,
        name: &str,
        x: Tensor<'b>,
        (width, layers): (usize, usize),
        gates: usize,
        run: impl Fn(Tensor<'b>, [Tensor<'b>; 4]) -> Tensor<'b>,
    ) -> Tensor<'b> {
        let mut hidden = x;
        for layer in 0..layers {
            let rows = gates * width;
            let shapes = [
                ("weight_ih", vec![rows, hidden.dim(2)]),
                ("weight_hh", vec![rows, width]),
                ("bias_ih", vec![rows]),
                ("bias_hh", vec![rows]),
            ];
            let params = self.builder.scope(name, || {
                shapes
                    .map(|(param, shape)| self.builder.param(&format!("{param}_l{layer}"), shape, Init::fan_in(width)))
            });
            // Each layer has a name of its own, by which the model can be split.
            hidden = self.builder.scope(format!("{name}.{layer}"), || run(hidden, params));
        }
        hidden
    }

    /// `torch.nn.BatchNorm2d`. In training the running averages move towards the mean of the grains' statistics.
    pub fn batch_norm(&self, name: &str, x: Tensor<'b>) -> Tensor<'b> {
        const EPSILON: f32 = 1e-5;
        const MOMENTUM: f32 = 0.1;
        self.builder.scope(name, || {
            let channels = x.dim(1);
            let param = |name, init| self.builder.param(name, [channels], init);
            let (weight, bias) = (param("weight", Init::ONES), param("bias", Init::ZEROS));
            let state = |name, init| self.builder.state(name, Type::f32([channels]), init);
            let (mean, variance) = (state("running_mean", Init::ZEROS), state("running_var", Init::ONES));
            if !self.training {
                return x.batch_norm_eval(weight, bias, mean, variance, EPSILON);
            }
            let count = x.shape().iter().product::<usize>() / channels.max(1);
            let unbiased = count as f32 / (count.max(2) - 1) as f32;
            let (y, grain_mean, grain_variance) = x.batch_norm(weight, bias, EPSILON);
            self.builder.stage(Stage::Update, || {
                for (running, grain, factor) in [(mean, grain_mean, 1.0), (variance, grain_variance, unbiased)] {
                    let average =
                        grain.then(GrainSum { of: String::new() }, &[]).scale(factor * MOMENTUM / self.grains as f32);
                    self.builder.update(running, running.scale(1.0 - MOMENTUM).add(average));
                }
            });
            y
        })
    }

    /// `torch.nn.LayerNorm` over the last dim.
    pub fn layer_norm(&self, name: &str, x: Tensor<'b>) -> Tensor<'b> {
        self.builder.scope(name, || {
            let width = x.dim(x.rank().saturating_sub(1));
            let weight = self.builder.param("weight", [width], Init::ONES);
            let bias = self.builder.param("bias", [width], Init::ZEROS);
            x.layer_norm(weight, bias, 1e-5)
        })
    }

    /// Dropout in training, nothing in evaluation. Each call site drops by a stream of its own.
    pub fn dropout(&self, name: &str, x: Tensor<'b>, p: f32) -> Tensor<'b> {
        if !self.training || p == 0.0 {
            return x;
        }
        let stream = Stream::new(0, &self.builder.qualify(name)).key() as i64;
        x.dropout(p, self.rng(), stream)
    }
}

/// A convolution: channels out, kernel, stride, padding.
#[derive(Clone, Copy, Debug)]
pub struct Conv {
    pub channels: usize,
    pub kernel: usize,
    pub stride: usize,
    pub padding: usize,
    pub bias: bool,
    pub init: Option<Init>,
}

impl Conv {
    /// A square kernel that keeps the size at stride one.
    pub fn same(channels: usize, kernel: usize) -> Self {
        Self { channels, kernel, stride: 1, padding: kernel / 2, bias: true, init: None }
    }

    pub fn stride(mut self, stride: usize) -> Self {
        self.stride = stride;
        self
    }

    pub fn padding(mut self, padding: usize) -> Self {
        self.padding = padding;
        self
    }

    /// Without bias and initialised for relu, as convolutions before a batch norm are.
    pub fn before_norm(mut self) -> Self {
        self.bias = false;
        let fan_out = self.channels * self.kernel * self.kernel;
        self.init = Some(Init::Normal { deviation: (2.0 / fan_out as f64).sqrt() });
        self
    }
}
