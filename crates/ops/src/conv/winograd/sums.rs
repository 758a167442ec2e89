//! The products of the weight gradient: for one place, gradients times patches, summed over tiles. Units of tiles are cut
//! into equal chains of at most [`CHAIN_MAX`], each a chain of fused multiply-adds from zero; chains are added in order.

#![allow(clippy::needless_range_loop)]

use super::product::{PANEL, SLIVER};
use crate::conv::lanes::{LANES, Lanes, by_level};

/// Outputs side by side.
pub const BLOCK: usize = 64;
/// The most tiles of a chain.
const CHAIN_MAX: usize = 256;

/// `m[output, channel] (+)= Σ_tile y[output, tile] · v[tile, channel]` of one place.
#[derive(Clone, Copy, Debug)]
pub struct Sums {
    pub tiles: usize,
    /// Tiles of a unit: whole units, the last of which may be shorter.
    pub unit: usize,
    /// Transformed gradients, `[block of outputs][tile][64]`.
    pub y: *const f32,
    pub outputs: usize,
    /// Transformed patches, `[sliver of channels][tile][32]`.
    pub v: *const f32,
    pub channels: usize,
    /// Results, `[output][channel]`, whole slivers of channels.
    pub m: *mut f32,
    pub m_pitch: usize,
    /// Add to what `m` holds.
    pub add: bool,
}

by_level! {
    /// Computes the sums.
    /// # Safety
    /// Every pointer has what `sums` says.
    pub unsafe fn accumulate(sums: &Sums) = accumulate_kernel
}

/// Where each chain starts, and its length.
fn chains(tiles: usize, unit: usize) -> impl Iterator<Item = (usize, usize)> {
    let chain = unit.div_ceil(unit.div_ceil(CHAIN_MAX).max(1)).max(1);
    (0..tiles).step_by(unit.max(1)).flat_map(move |first| {
        let end = (first + unit).min(tiles);
        (first..end).step_by(chain).map(move |start| (start, chain.min(end - start)))
    })
}

#[inline(always)]
unsafe fn accumulate_kernel<V: Lanes>(sums: &Sums) {
    for channel in (0..sums.channels).step_by(SLIVER) {
        for block in (0..sums.outputs).step_by(BLOCK) {
            let outputs = BLOCK.min(sums.outputs - block);
            let height = outputs.div_ceil(outputs.div_ceil(V::ROWS));
            for row in (0..outputs).step_by(height) {
                for (start, tiles) in chains(sums.tiles, sums.unit) {
                    // SAFETY: by the caller's promise.
                    unsafe {
                        let a = sums.y.add(block * sums.tiles + start * BLOCK + row);
                        let b = sums.v.add(channel * sums.tiles + start * SLIVER);
                        let c = sums.m.add((block + row) * sums.m_pitch + channel);
                        let (rows, add) = (height.min(outputs - row), sums.add || start > 0);
                        let tile = RegisterTile { tiles, a, b, c, pitch: sums.m_pitch, add };
                        match sums.channels - channel > LANES {
                            true => by_rows::<V, 2>(rows, tile),
                            false => by_rows::<V, 1>(rows, tile),
                        }
                    }
                }
            }
        }
    }
}

/// What is summed up in registers: a chain of `tiles`, into rows `pitch` apart.
#[derive(Clone, Copy)]
struct RegisterTile {
    tiles: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    pitch: usize,
    add: bool,
}

#[inline(always)]
unsafe fn by_rows<V: Lanes, const VECTORS: usize>(rows: usize, tile: RegisterTile) {
    macro_rules! choose {
        ($($rows:literal)+) => {
            match rows {
                // SAFETY: by the caller's promise.
                $($rows if $rows <= V::ROWS => unsafe {
                    register_tile::<V, $rows, VECTORS>(tile)
                },)+
                _ => unreachable!("a panel has at most {PANEL} rows"),
            }
        };
    }
    choose!(1 2 3 4 5 6 7 8 9 10 11 12)
}

#[inline(always)]
unsafe fn register_tile<V: Lanes, const ROWS: usize, const VECTORS: usize>(tile: RegisterTile) {
    let RegisterTile { tiles, mut a, mut b, c, pitch, add } = tile;
    // SAFETY: by the caller's promise.
    unsafe {
        let mut sums = [[V::splat(0.0); VECTORS]; ROWS];
        for _ in 0..tiles {
            let mut columns = [V::splat(0.0); VECTORS];
            for vector in 0..VECTORS {
                columns[vector] = V::load(b.add(vector * LANES));
            }
            for row in 0..ROWS {
                let factor = V::splat(*a.add(row));
                for vector in 0..VECTORS {
                    sums[row][vector] = factor.mul_add(columns[vector], sums[row][vector]);
                }
            }
            a = a.add(BLOCK);
            b = b.add(SLIVER);
        }
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                let at = c.add(row * pitch + vector * LANES);
                if add {
                    sums[row][vector] = V::load(at).add(sums[row][vector]);
                }
                sums[row][vector].store(at);
            }
        }
    }
}
