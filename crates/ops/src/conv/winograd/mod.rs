//! Winograd's F(2×2, 3×3) for 3 × 3 kernels with stride one: 16 multiplications instead of 36 for a tile of 2 × 2 outputs.
//!
//! `correlation` is the forward pass and the input gradient, `weights` the weight gradient. Images are transposed to have
//! sixteen channels side by side (`scene`) and transformed (`transforms`) into the order in which the products (`product`,
//! `sums`) read them.
//!
//! The differences inside the transforms would spread infinities and NaN over a tile, and overflow early. An image that
//! holds such numbers is left to the direct method, and so is everything if a kernel does.

mod correlation;
mod product;
mod scene;
mod sums;
mod transforms;
mod weights;

use super::lanes::LANES;
use super::shape::Shape;
use crate::vectorized;
pub use correlation::WinogradPlan;
pub use weights::WeightPlan;

/// Numbers between the places of a transform, so that the sixteen do not fall on the same lines of the cache.
const GAP: usize = LANES;
/// Channels, at least: with fewer the transforms cost more than the products save, and small networks keep the direct
/// method's smaller rounding.
pub(super) const CHANNELS_MIN: usize = 64;
/// Taps of a kernel.
const TAPS: usize = 9;

/// Numbers this large and above, and NaN, as bits without their sign: 2⁵⁰.
const LARGE: u32 = (127 + 50) << 23;

vectorized! {
    /// Whether some number is too large for the transforms.
    fn any_large(values: &[f32]) -> bool {
        let mut largest = 0;
        for value in values {
            largest = (value.to_bits() & (u32::MAX >> 1)).max(largest);
        }
        largest >= LARGE
    }
}

/// How the tiles are cut: some whole images, or a part of one.
#[derive(Clone, Copy, Debug)]
struct Cut {
    images: usize,
    /// Rows of tiles of one part.
    rows: usize,
    /// Parts of an image.
    parts: usize,
}

impl Cut {
    /// About `wanted` tiles at a time, but not more than so many images.
    fn new([rows, columns]: [usize; 2], wanted: usize, images: usize) -> Self {
        let tiles = rows * columns;
        if tiles <= wanted {
            return Self { images: (wanted / tiles).min(images).max(1), rows, parts: 1 };
        }
        let rows_each = rows.div_ceil(tiles.div_ceil(wanted));
        Self { images: 1, rows: rows_each, parts: rows.div_ceil(rows_each) }
    }
}

/// Whether the window and the size of the results suit the transforms.
fn suits(shape: &Shape, grid: [usize; 2]) -> bool {
    let window = &shape.window;
    let plain = window.stride == [1, 1] && window.dilation == [1, 1] && window.groups == 1;
    let tiles = grid[0].div_ceil(2) * grid[1].div_ceil(2);
    // A tile that is mostly beyond the border saves nothing.
    let filled = 27 * grid[0] * grid[1] >= 64 * tiles;
    let sides = [window.padding.before, window.padding.after];
    plain && filled && shape.kernel == [3, 3] && sides.as_flattened().iter().all(|padding| *padding <= 2)
}
