//! The products between the transforms: for each of the sixteen places, tiles × channels times channels × outputs.
//!
//! Both operands come out of the transforms in the order in which the inner kernel reads them, so nothing is packed. An
//! element is a sum over blocks of channels in order, each of them one chain of fused multiply-adds that starts from zero.

#![allow(clippy::needless_range_loop)]

use super::transforms::{PLACES, Panels};
use crate::conv::lanes::{LANES, Lanes, by_level};

/// Outputs of one sliver.
pub const SLIVER: usize = 2 * LANES;
/// Tiles of one panel, at most.
pub const PANEL: usize = 12;

/// All places of some tiles, some channels and some slivers of outputs.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// Transformed patches, `[place][panel][group of channels][tile][16]`.
    pub v: *const f32,
    pub v_stride: usize,
    pub panels: Panels,
    /// The first group of channels, and how many.
    pub group: usize,
    pub groups: usize,
    /// Transformed kernels, `[sliver][place][channel][32]`.
    pub u: *const f32,
    pub u_stride: usize,
    pub slivers: usize,
    /// Results, `[place][tile][sliver][32]`.
    pub m: *mut f32,
    pub m_stride: usize,
    pub m_pitch: usize,
    /// Add to what `m` holds.
    pub add: bool,
}

by_level! {
    /// Computes the product.
    /// # Safety
    /// Every pointer has what the product says.
    pub unsafe fn multiply(product: &Product) = multiply_kernel
}

#[inline(always)]
unsafe fn multiply_kernel<V: Lanes>(product: &Product) {
    let panels = &product.panels;
    for place in 0..PLACES {
        for sliver in 0..product.slivers {
            for panel in 0..panels.tiles.div_ceil(panels.height) {
                let rows = panels.rows(panel);
                // SAFETY: by the caller's promise.
                unsafe {
                    let a = product.v.add(place * product.v_stride + panels.start(panel, product.group));
                    let b = product.u.add((sliver * PLACES + place) * product.u_stride);
                    let tile = panel * panels.height;
                    let c = product.m.add(place * product.m_stride + tile * product.m_pitch + sliver * SLIVER);
                    for row in (0..rows).step_by(V::ROWS) {
                        let (a, c) = (a.add(row * LANES), c.add(row * product.m_pitch));
                        let (groups, pitch, add) = (product.groups, product.m_pitch, product.add);
                        let tile = RegisterTile { groups, a, step: rows * LANES, b, c, pitch, add };
                        by_rows::<V>(V::ROWS.min(rows - row), tile);
                    }
                }
            }
        }
    }
}

/// What is summed up in registers: `groups` of sixteen `k`, `step` apart in `a`, into rows `pitch` apart.
#[derive(Clone, Copy)]
struct RegisterTile {
    groups: usize,
    a: *const f32,
    step: usize,
    b: *const f32,
    c: *mut f32,
    pitch: usize,
    add: bool,
}

#[inline(always)]
unsafe fn by_rows<V: Lanes>(rows: usize, tile: RegisterTile) {
    macro_rules! choose {
        ($($rows:literal)+) => {
            match rows {
                // SAFETY: by the caller's promise.
                $($rows if $rows <= V::ROWS => unsafe { register_tile::<V, $rows>(tile) },)+
                _ => unreachable!("a panel has at most {PANEL} rows"),
            }
        };
    }
    choose!(1 2 3 4 5 6 7 8 9 10 11 12)
}

/// `c[row, 0..32] (+)= Σ a[row, k] · b[k, 0..32]`, where `a` holds sixteen `k` of a row side by side.
#[inline(always)]
unsafe fn register_tile<V: Lanes, const ROWS: usize>(tile: RegisterTile) {
    let RegisterTile { groups, mut a, step, mut b, c, pitch, add } = tile;
    // SAFETY: by the caller's promise.
    unsafe {
        let mut sums = [[V::splat(0.0); 2]; ROWS];
        for _ in 0..groups {
            for k in 0..LANES {
                let (left, right) = (V::load(b.add(k * SLIVER)), V::load(b.add(k * SLIVER + LANES)));
                for row in 0..ROWS {
                    let factor = V::splat(*a.add(row * LANES + k));
                    sums[row][0] = factor.mul_add(left, sums[row][0]);
                    sums[row][1] = factor.mul_add(right, sums[row][1]);
                }
            }
            a = a.add(step);
            b = b.add(LANES * SLIVER);
        }
        for row in 0..ROWS {
            let at = c.add(row * pitch);
            if add {
                sums[row] = [V::load(at).add(sums[row][0]), V::load(at.add(LANES)).add(sums[row][1])];
            }
            sums[row][0].store(at);
            sums[row][1].store(at.add(LANES));
        }
    }
}
