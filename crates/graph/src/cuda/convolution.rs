//! A convolution by the vendor's library, as a call.

use super::CudaPlace;
use crate::types::DType;

/// Which of the three tensors of a convolution is computed from the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConvolutionPass {
    Forward,
    /// The gradient of the image.
    Image,
    /// The gradient of the weight.
    Weight,
}

/// Sizes of `image [images, inputs, …] ⋆ weight [outputs, inputs / groups, kernel] → grid [images, outputs, …]`. Pairs are (vertical,
/// horizontal).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConvolutionShape {
    pub images: usize,
    /// Channels of the image, and of the grid, of all groups.
    pub inputs: usize,
    pub outputs: usize,
    pub groups: usize,
    pub image: [usize; 2],
    pub kernel: [usize; 2],
    pub grid: [usize; 2],
    pub stride: [usize; 2],
    /// On both sides.
    pub padding: [usize; 2],
    pub dilation: [usize; 2],
}

/// What the choice of an algorithm may depend on: everything but places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConvolutionKind {
    pub pass: ConvolutionPass,
    pub shape: ConvolutionShape,
    /// Of all three tensors. Sums are kept in f32.
    pub dtype: DType,
    /// All three lie in memory with their channels last.
    pub channels_last: bool,
}

/// One pass of a convolution. Its result is written whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Convolution {
    pub kind: ConvolutionKind,
    pub image: CudaPlace,
    pub weight: CudaPlace,
    pub grid: CudaPlace,
    /// As many bytes of scratch as the kind allows.
    pub workspace: CudaPlace,
}

/// What a convolution may use between its parts, beside copies of its operands.
const WORKSPACE_BYTES: usize = 32 << 20;
/// What the library wants the channels of a pixel to fill, for tensor cores: it pads them in a copy where they do not.
const CHANNEL_BYTES: usize = 16;

impl ConvolutionKind {
    /// Bytes that the library may use. Part of the choice of an algorithm, so it is a function of the kind alone.
    pub fn workspace_bytes(&self) -> usize {
        let ConvolutionShape { images, inputs, outputs, image, grid, .. } = self.shape;
        let fill = CHANNEL_BYTES / self.dtype.bytes();
        if !self.channels_last || inputs.is_multiple_of(fill) && outputs.is_multiple_of(fill) {
            return WORKSPACE_BYTES;
        }
        let padded = |channels: usize, pixels: [usize; 2]| {
            images * pixels[0] * pixels[1] * channels.next_multiple_of(fill) * self.dtype.bytes()
        };
        WORKSPACE_BYTES + padded(inputs, image).max(padded(outputs, grid))
    }
}
