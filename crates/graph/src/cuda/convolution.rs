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
    /// [`CONVOLUTION_WORKSPACE_BYTES`] of scratch.
    pub workspace: CudaPlace,
}

/// Bytes that the library may use between the parts of a convolution. Part of the choice of an algorithm, so it never changes.
pub const CONVOLUTION_WORKSPACE_BYTES: usize = 64 << 20;
