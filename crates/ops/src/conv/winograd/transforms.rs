//! The transforms of Winograd's F(2×2, 3×3), sixteen channels at a time.
//!
//! With the letters of Lavin and Gray, "Fast algorithms for convolutional neural networks": `V = Bᵀ d B` of a patch of
//! 4 × 4 pixels, `U = G g Gᵀ` of a kernel, `Aᵀ M A` of their products is the tile of 2 × 2 outputs. For the weight
//! gradient the same matrices serve transposed: `A y Aᵀ` of a tile of gradients, `Gᵀ M G` of the summed products.

#![allow(clippy::needless_range_loop)]

use crate::conv::lanes::{LANES, Lanes, by_level};

/// Places of a patch.
pub const PLACES: usize = 16;

/// `Bᵀ d`.
#[inline(always)]
unsafe fn patch<V: Lanes>(d: [V; 4]) -> [V; 4] {
    // SAFETY: by the caller's promise.
    unsafe { [d[0].sub(d[2]), d[1].add(d[2]), d[2].sub(d[1]), d[1].sub(d[3])] }
}

/// `G g`.
#[inline(always)]
unsafe fn kernel<V: Lanes>(g: [V; 3]) -> [V; 4] {
    // SAFETY: by the caller's promise.
    unsafe {
        let half = V::splat(0.5);
        let outer = g[0].add(g[2]);
        [g[0], outer.add(g[1]).mul(half), outer.sub(g[1]).mul(half), g[2]]
    }
}

/// `Aᵀ m`.
#[inline(always)]
unsafe fn tile<V: Lanes>(m: [V; 4]) -> [V; 2] {
    // SAFETY: by the caller's promise.
    unsafe { [m[0].add(m[1]).add(m[2]), m[1].sub(m[2]).sub(m[3])] }
}

/// `A y`.
#[inline(always)]
unsafe fn tile_grad<V: Lanes>(y: [V; 2]) -> [V; 4] {
    // SAFETY: by the caller's promise.
    unsafe { [y[0], y[0].add(y[1]), y[0].sub(y[1]), V::splat(0.0).sub(y[1])] }
}

/// `Gᵀ m`.
#[inline(always)]
unsafe fn kernel_grad<V: Lanes>(m: [V; 4]) -> [V; 3] {
    // SAFETY: by the caller's promise.
    unsafe {
        let half = V::splat(0.5);
        let (sum, difference) = (m[1].add(m[2]).mul(half), m[1].sub(m[2]).mul(half));
        [m[0].add(sum), difference, m[3].add(sum)]
    }
}

/// Where the sixteen channels of a tile go: tiles form panels of equal height, the last one as high as is left, and a
/// panel holds its groups of channels one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Panels {
    pub tiles: usize,
    pub height: usize,
    /// Channels, a multiple of sixteen.
    pub depth: usize,
}

impl Panels {
    pub fn new(tiles: usize, depth: usize, height_max: usize) -> Self {
        let height = tiles.div_ceil(tiles.div_ceil(height_max).max(1)).max(1);
        Self { tiles, height, depth }
    }

    /// Tiles of a panel.
    #[inline(always)]
    pub fn rows(&self, panel: usize) -> usize {
        self.height.min(self.tiles.saturating_sub(panel * self.height))
    }

    /// Where a group of channels of a panel starts.
    #[inline(always)]
    pub fn start(&self, panel: usize, group: usize) -> usize {
        panel * self.height * self.depth + group * self.rows(panel) * LANES
    }
}

/// Tiles of one image on a canvas: `rows` × `columns` of them.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub rows: usize,
    pub columns: usize,
    /// The number of its first tile.
    pub first: usize,
    /// Pixels of a row of the canvas.
    pub pitch: usize,
}

by_level! {
    /// `to[place, tile] = Bᵀ d B` of every tile of the canvas `[row, column, 16]`, for one group of channels.
    /// # Safety
    /// The canvas holds every patch, `to` every tile `stride` apart for each place.
    pub unsafe fn patches_in(canvas: *const f32, field: &Field, panels: &Panels, group: usize, to: *mut f32, stride: usize) =
        patches_kernel
}

#[inline(always)]
unsafe fn patches_kernel<V: Lanes>(
    canvas: *const f32,
    field: &Field,
    panels: &Panels,
    group: usize,
    to: *mut f32,
    stride: usize,
) {
    let pitch = field.pitch * LANES;
    let (mut panel, mut row) = (field.first / panels.height, field.first % panels.height);
    for y in 0..field.rows {
        for x in 0..field.columns {
            // SAFETY: the patch is on the canvas, and the tile has a place.
            unsafe {
                let from = canvas.add(2 * y * pitch + 2 * x * LANES);
                one_patch::<V>(from, pitch, to.add(panels.start(panel, group) + row * LANES), stride);
            }
            row += 1;
            if row == panels.height {
                (panel, row) = (panel + 1, 0);
            }
        }
    }
}

#[inline(always)]
unsafe fn one_patch<V: Lanes>(from: *const f32, pitch: usize, to: *mut f32, stride: usize) {
    // SAFETY: by the caller's promise.
    unsafe {
        let mut half = [[V::splat(0.0); 4]; 4];
        for x in 0..4 {
            let at = from.add(x * LANES);
            let column =
                patch([V::load(at), V::load(at.add(pitch)), V::load(at.add(2 * pitch)), V::load(at.add(3 * pitch))]);
            for y in 0..4 {
                half[y][x] = column[y];
            }
        }
        for y in 0..4 {
            let row = patch(half[y]);
            for x in 0..4 {
                row[x].store(to.add((y * 4 + x) * stride));
            }
        }
    }
}

by_level! {
    /// `to[place, k] = G g Gᵀ` of kernels `[k, tap, 16]`; a place is `stride` long, a `k` is `pitch` long. `flipped`: the
    /// taps run backwards.
    /// # Safety
    /// Both sides hold every number.
    pub unsafe fn kernels_in(from: *const f32, ks: usize, flipped: bool, to: *mut f32, pitch: usize, stride: usize) =
        kernels_kernel
}

#[inline(always)]
unsafe fn kernels_kernel<V: Lanes>(
    from: *const f32,
    ks: usize,
    flipped: bool,
    to: *mut f32,
    pitch: usize,
    stride: usize,
) {
    let tap = |at: usize| if flipped { 8 - at } else { at };
    for k in 0..ks {
        // SAFETY: by the caller's promise.
        unsafe {
            let (from, to) = (from.add(k * 9 * LANES), to.add(k * pitch));
            let mut half = [[V::splat(0.0); 3]; 4];
            for x in 0..3 {
                let column = kernel([
                    V::load(from.add(tap(x) * LANES)),
                    V::load(from.add(tap(3 + x) * LANES)),
                    V::load(from.add(tap(6 + x) * LANES)),
                ]);
                for y in 0..4 {
                    half[y][x] = column[y];
                }
            }
            for y in 0..4 {
                let row = kernel(half[y]);
                for x in 0..4 {
                    row[x].store(to.add((y * 4 + x) * stride));
                }
            }
        }
    }
}

by_level! {
    /// `to[y, x, 16] = bias + Aᵀ M A` for every tile of a field that the outputs, of this height and width, need.
    /// # Safety
    /// Both sides hold every number.
    pub unsafe fn tiles_out(
        from: Tiles,
        field: &Field,
        bias: &[f32; LANES],
        to: *mut f32,
        size: [usize; 2]
    ) = tiles_kernel
}

/// Products of tiles, `pitch` apart, of which places are `stride` apart.
#[derive(Clone, Copy, Debug)]
pub struct Tiles {
    pub data: *const f32,
    pub pitch: usize,
    pub stride: usize,
}

#[inline(always)]
unsafe fn tiles_kernel<V: Lanes>(
    Tiles { data, pitch, stride }: Tiles,
    field: &Field,
    bias: &[f32; LANES],
    to: *mut f32,
    [height, width]: [usize; 2],
) {
    // SAFETY: by the caller's promise.
    unsafe {
        let bias = V::load(bias.as_ptr());
        for y in 0..field.rows {
            for x in 0..field.columns {
                let from = data.add((field.first + y * field.columns + x) * pitch);
                let out = one_tile::<V>(from, stride);
                for dy in 0..2 {
                    for dx in 0..2 {
                        let (y, x) = (2 * y + dy, 2 * x + dx);
                        if y < height && x < width {
                            out[dy][dx].add(bias).store(to.add((y * width + x) * LANES));
                        }
                    }
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn one_tile<V: Lanes>(from: *const f32, stride: usize) -> [[V; 2]; 2] {
    // SAFETY: by the caller's promise.
    unsafe {
        let mut half = [[V::splat(0.0); 4]; 2];
        for x in 0..4 {
            let at = from.add(x * stride);
            let column = tile([
                V::load(at),
                V::load(at.add(4 * stride)),
                V::load(at.add(8 * stride)),
                V::load(at.add(12 * stride)),
            ]);
            for y in 0..2 {
                half[y][x] = column[y];
            }
        }
        [tile(half[0]), tile(half[1])]
    }
}

by_level! {
    /// `to[place, tile] = A y Aᵀ` of every tile of the canvas `[row, column, 16]`; tiles are `pitch` apart, places
    /// `stride`.
    /// # Safety
    /// Both sides hold every number.
    pub unsafe fn tile_grads_in(canvas: *const f32, field: &Field, to: *mut f32, pitch: usize, stride: usize) =
        tile_grads_kernel
}

#[inline(always)]
unsafe fn tile_grads_kernel<V: Lanes>(canvas: *const f32, field: &Field, to: *mut f32, pitch: usize, stride: usize) {
    let row = field.pitch * LANES;
    for y in 0..field.rows {
        for x in 0..field.columns {
            // SAFETY: by the caller's promise.
            unsafe {
                let from = canvas.add(2 * y * row + 2 * x * LANES);
                let to = to.add((field.first + y * field.columns + x) * pitch);
                let left = tile_grad([V::load(from), V::load(from.add(row))]);
                let right = tile_grad([V::load(from.add(LANES)), V::load(from.add(row + LANES))]);
                for y in 0..4 {
                    let places = tile_grad([left[y], right[y]]);
                    for x in 0..4 {
                        places[x].store(to.add((y * 4 + x) * stride));
                    }
                }
            }
        }
    }
}

by_level! {
    /// `to[tap, 16] = Gᵀ M G` of places `stride` apart.
    /// # Safety
    /// Both sides hold every number.
    pub unsafe fn kernel_grads_out(from: *const f32, stride: usize, to: *mut f32) = kernel_grads_kernel
}

#[inline(always)]
unsafe fn kernel_grads_kernel<V: Lanes>(from: *const f32, stride: usize, to: *mut f32) {
    // SAFETY: by the caller's promise.
    unsafe {
        let mut half = [[V::splat(0.0); 4]; 3];
        for x in 0..4 {
            let at = from.add(x * stride);
            let column = kernel_grad([
                V::load(at),
                V::load(at.add(4 * stride)),
                V::load(at.add(8 * stride)),
                V::load(at.add(12 * stride)),
            ]);
            for y in 0..3 {
                half[y][x] = column[y];
            }
        }
        for y in 0..3 {
            let row = kernel_grad(half[y]);
            for x in 0..3 {
                row[x].store(to.add((y * 3 + x) * LANES));
            }
        }
    }
}
