//! The transforms, one file each. Every one is a [`TransformKind`](crate::transform::TransformKind) in the list
//! [`TRANSFORMS`](crate::transform::TRANSFORMS).

pub mod crop;
pub mod flip;
pub mod jitter;
pub mod mask;
pub mod mixup;
pub mod normalise;
pub mod one_hot;
pub mod pack;
pub mod resize;
pub mod standardise;
