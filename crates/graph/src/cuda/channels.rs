//! Where the channels of `[n, c, h, w]` lie in memory. Types say `[n, c, h, w]` whatever the memory holds.

use super::{Convolution, CudaCall, CudaCalls, CudaPlace, SCRATCH_ALIGNMENT};
use crate::types::Type;

/// The operands of an op that may all lie with their channels last, `[n, h, w, c]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChannelsLast {
    pub inputs: Vec<usize>,
    pub outputs: Vec<usize>,
    /// Whether the op is so much faster with them that it is worth to move elements.
    pub gains: bool,
}

/// Whether the memory is the same, wherever the channels lie.
pub fn any_order(ty: &Type) -> bool {
    match ty.shape[..] {
        [_, channels, height, width] => channels == 1 || height * width == 1,
        _ => true,
    }
}

/// The type whose memory, in its usual order, is that of `ty` with its channels last.
pub fn last(ty: &Type) -> Type {
    match ty.shape[..] {
        [n, c, h, w] => Type::new(ty.dtype, [n, h, w, c]),
        _ => ty.clone(),
    }
}

impl CudaCalls {
    /// The same calls with every place changed.
    pub fn map_places(&mut self, change: impl Fn(CudaPlace) -> CudaPlace) {
        for call in &mut self.calls {
            call.map_places(&change);
        }
    }

    /// Appends what another op does, with scratch of its own.
    pub fn append(&mut self, mut other: CudaCalls, change: impl Fn(CudaPlace) -> CudaPlace) {
        let own = self.scratch_bytes;
        debug_assert!(own.is_multiple_of(SCRATCH_ALIGNMENT), "scratch is handed out in whole blocks");
        other.map_places(|place| match place.buffer {
            super::CudaBuffer::Scratch => place.further(own),
            _ => change(place),
        });
        self.scratch_bytes += other.scratch_bytes;
        self.calls.append(&mut other.calls);
    }
}

impl CudaCall {
    fn map_places(&mut self, change: &impl Fn(CudaPlace) -> CudaPlace) {
        let set = |place: &mut CudaPlace| *place = change(*place);
        match self {
            CudaCall::Launch(launch) => {
                for arg in &mut launch.args {
                    if let super::CudaArg::Address(place) = arg {
                        set(place);
                    }
                }
            }
            CudaCall::Product(product) => {
                [&mut product.a, &mut product.b, &mut product.c].into_iter().for_each(|matrix| set(&mut matrix.place));
                product.bias.iter_mut().for_each(set);
            }
            CudaCall::Convolution(convolution) => {
                let Convolution { image, weight, grid, workspace, .. } = convolution;
                [image, weight, grid, workspace].into_iter().for_each(set);
            }
            CudaCall::Zero { to, .. } => set(to),
            CudaCall::Copy { from, to, .. } => {
                set(from);
                set(to);
            }
        }
    }
}
