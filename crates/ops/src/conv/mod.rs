//! Convolution in two dims: forward, both gradients, and the transposed convolution, as matrix products whose operands
//! are packed straight from the images.
//!
//! The parts: [`shape`] checks sizes; `definition` says what the results are; `taps` brings the forward pass and each
//! phase of the input gradient to one form; `canvas` puts padding around images; `operands` pack patches and kernels;
//! `correlate` and `weights` are the direct kernels, `winograd` has fewer multiplications where it suits, `passes` chooses;
//! `conv2d` and `transposed` are the ops, and `strips` says
//! how they are split along rows and columns.

mod canvas;
mod cases;
pub mod conv2d;
mod correlate;
mod definition;
mod gpu;
mod lanes;
mod library;
mod operands;
mod passes;
pub mod shape;
mod strips;
mod taps;
mod transpose;
pub mod transposed;
mod weights;
mod winograd;

pub use conv2d::{Conv2d, Conv2dInputGrad, Conv2dWeightGrad};
use kolo_graph::{OpKind, Tensor};
pub use shape::Padding;
pub use transposed::ConvTranspose2d;

pub const KINDS: &[OpKind] = &[
    OpKind::of::<Conv2d>().with_cuda::<Conv2d>(),
    OpKind::of::<Conv2dInputGrad>().with_cuda::<Conv2dInputGrad>(),
    OpKind::of::<Conv2dWeightGrad>().with_cuda::<Conv2dWeightGrad>(),
    OpKind::of::<ConvTranspose2d>().with_cuda::<ConvTranspose2d>(),
];

kolo_graph::methods! {
    /// Convolutions.
    ConvMethods {
        /// Image `[n, c, h, w]` with weight `[o, c / groups, kh, kw]` and bias `[o]` to `[n, o, oh, ow]`. Padding is `[y, x]`
        /// on both sides, or `[top, bottom, left, right]`.
        fn conv2d(
            self,
            weight: Tensor<'b>,
            bias: Option<Tensor<'b>>,
            stride: [usize; 2],
            padding: impl Into<Padding>,
            dilation: [usize; 2],
            groups: usize,
        ) -> Tensor<'b> {
            let rest: Vec<Tensor<'b>> = std::iter::once(weight).chain(bias).collect();
            let padding = padding.into();
            self.then(Conv2d { stride, padding, dilation, groups }, &rest)
        }
        /// Image `[n, c, h, w]` with weight `[c, o / groups, kh, kw]` and bias `[o]` to `[n, o, oh, ow]`, of which padding cuts
        /// off `[y, x]` on both sides, or `[top, bottom, left, right]`.
        fn conv_transpose2d(
            self,
            weight: Tensor<'b>,
            bias: Option<Tensor<'b>>,
            stride: [usize; 2],
            padding: impl Into<Padding>,
            output_padding: [usize; 2],
            dilation: [usize; 2],
            groups: usize,
        ) -> Tensor<'b> {
            let rest: Vec<Tensor<'b>> = std::iter::once(weight).chain(bias).collect();
            let padding = padding.into();
            self.then(ConvTranspose2d { stride, padding, output_padding, dilation, groups }, &rest)
        }
    }
}
