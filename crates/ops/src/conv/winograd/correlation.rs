//! The forward pass and the input gradient, which have one form here, as in `taps`.
//!
//! Some tiles at a time, so that they stay in the second-level cache: their patches are transformed, sixteen products
//! follow, and the results are transformed back and transposed. Each output depends on its own patch, kernels and bias
//! alone and is a sum over channels in order, so the bits depend neither on threads nor on which images or outputs share
//! a call.

use super::product::{self, PANEL, Product, SLIVER};
use super::scene::Scene;
use super::transforms::{self, Field, PLACES, Panels};
use super::{CHANNELS_MIN, Cut, GAP, TAPS, any_large, suits};
use crate::conv::correlate::{lend, table};
use crate::conv::lanes::LANES;
use crate::conv::shape::Shape;
use crate::conv::transpose::transpose;
use crate::tiles::Address;
use kolo_graph::Team;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of transformed patches to aim at.
const PATCH_BYTES: usize = 768 * 1024;
/// Tiles at a time: enough to use a transformed kernel often, few enough for the cache.
const TILES_MIN: usize = 64;
const TILES_MAX: usize = 144;
/// Channels of one block of kernels.
const DEPTH_BLOCK: usize = 256;
/// Slivers of outputs of one block of kernels.
const SLIVERS: usize = 2;
/// Bytes of transformed kernels that are kept from tiles to tiles; more are cheaper made anew than fetched.
const KEPT_BYTES: usize = 5 << 20;
/// A correlation `y[n, o] = bias[o] + Σ x[n, i] ⋆ kernel[o, i]`.
#[derive(Clone, Copy, Debug)]
pub struct WinogradPlan {
    images: usize,
    inputs: usize,
    outputs: usize,
    source: [usize; 2],
    grid: [usize; 2],
    padding: [usize; 2],
    /// Where kernels lie in the weights.
    output_stride: usize,
    input_stride: usize,
    /// Taps run backwards.
    flipped: bool,
}

/// Whether there are enough channels to sum over, and a row of tiles fits the cache. It must not ask for the number of
/// images or of outputs: a part of them must give the bits of the whole.
fn pays(summed: usize, grid: [usize; 2]) -> bool {
    summed >= CHANNELS_MIN && grid[1].div_ceil(2) * summed <= TILES_MAX * DEPTH_BLOCK
}

impl WinogradPlan {
    pub fn forward(shape: &Shape) -> Option<Self> {
        (suits(shape, shape.grid) && pays(shape.inputs, shape.grid)).then(|| Self {
            images: shape.images,
            inputs: shape.inputs,
            outputs: shape.outputs,
            source: shape.image,
            grid: shape.grid,
            padding: shape.window.padding.before,
            output_stride: shape.inputs * TAPS,
            input_stride: TAPS,
            flipped: false,
        })
    }

    pub fn input_grad(shape: &Shape) -> Option<Self> {
        (suits(shape, shape.image) && pays(shape.outputs, shape.image)).then(|| Self {
            images: shape.images,
            inputs: shape.outputs,
            outputs: shape.inputs,
            source: shape.grid,
            grid: shape.image,
            padding: shape.window.padding.before.map(|padding| 2 - padding),
            output_stride: TAPS,
            input_stride: shape.inputs * TAPS,
            flipped: true,
        })
    }

    fn tile_grid(&self) -> [usize; 2] {
        self.grid.map(|side| side.div_ceil(2))
    }

    fn depth(&self) -> usize {
        self.inputs.next_multiple_of(LANES)
    }

    fn slivers(&self) -> usize {
        self.outputs.div_ceil(SLIVER)
    }

    fn cut(&self, threads: usize) -> Cut {
        let wanted = (PATCH_BYTES / (PLACES * 4 * self.depth())).clamp(TILES_MIN, TILES_MAX);
        Cut::new(self.tile_grid(), wanted, self.images.div_ceil(threads))
    }

    /// Channels of a block of kernels, numbers between its places, and of one sliver.
    fn kernel_lens(&self) -> (usize, usize, usize) {
        let depth = self.depth().min(DEPTH_BLOCK);
        let stride = depth * SLIVER + GAP;
        (depth, stride, PLACES * stride)
    }

    fn depth_blocks(&self) -> usize {
        self.depth().div_ceil(DEPTH_BLOCK)
    }

    /// Numbers of all transformed kernels, if they are kept.
    fn kept_len(&self) -> usize {
        let len = self.depth_blocks() * self.slivers() * self.kernel_lens().2;
        if len * 4 <= KEPT_BYTES { len } else { 0 }
    }

    /// Numbers of a thread's own: patches, products, canvas, outputs, taps, kernels.
    fn lens(&self, cut: &Cut) -> [usize; 6] {
        let [_, columns] = self.tile_grid();
        let tiles = cut.images * cut.rows * columns;
        let slivers = SLIVERS.min(self.slivers());
        [
            PLACES * (tiles * self.depth() + GAP),
            PLACES * (tiles * slivers * SLIVER + GAP),
            self.scene().canvas_len(cut.rows),
            (2 * cut.rows).min(self.grid[0]) * self.grid[1] * LANES,
            TAPS * LANES * LANES,
            if self.kept_len() > 0 { 0 } else { slivers * self.kernel_lens().2 },
        ]
    }

    fn shared_lens(&self, cut: &Cut) -> [usize; 3] {
        [self.images * cut.parts, self.scene().pixels(), self.kept_len()]
    }

    /// Bytes of scratch, if the direct method needs `direct` for the same work.
    pub fn scratch_bytes(&self, threads: usize, direct: usize) -> usize {
        let cut = self.cut(threads);
        let sum = |lens: &[usize]| lens.iter().map(|len| len.next_multiple_of(LANES)).sum::<usize>();
        let [flags, rest @ ..] = self.shared_lens(&cut);
        let own = sum(&rest) + threads * sum(&self.lens(&cut));
        sum(&[flags]) * 4 + (own * 4).max(direct)
    }

    /// The whole correlation. `direct` computes some images once more, by the definition.
    pub fn run(
        &self,
        (team, mut scratch): (&Team, &mut [f32]),
        x: &[f32],
        weight: &[f32],
        bias: Option<&[f32]>,
        y: &mut [f32],
        direct: impl Fn(Range<usize>, &mut [f32], &mut [f32]),
    ) {
        let cut = self.cut(team.threads());
        let [flags, places, kept] = self.shared_lens(&cut);
        let flags = table(lend(&mut scratch, flags));
        let kernel_flag = AtomicBool::new(false);
        {
            let mut scratch = &mut *scratch;
            let places = table(lend(&mut scratch, places));
            self.scene().list_places(places);
            let kept = lend(&mut scratch, kept);
            let own: usize = self.lens(&cut).iter().map(|len| len.next_multiple_of(LANES)).sum();
            assert!(scratch.len() >= own * team.threads(), "room for every thread");
            let work = Work {
                plan: self,
                cut,
                places,
                x,
                weight,
                bias,
                y: Address(y.as_mut_ptr()),
                kept: Address(kept.as_mut_ptr()),
                keeps: !kept.is_empty(),
                own: Address(scratch.as_mut_ptr()),
                own_len: own,
                kernel_flag: &kernel_flag,
            };
            work.run(team, Address(flags.as_mut_ptr().cast()));
        }
        if kernel_flag.load(Ordering::Relaxed) {
            return direct(0..self.images, scratch, y);
        }
        for image in 0..self.images {
            if flags[image * cut.parts..(image + 1) * cut.parts].contains(&1) {
                direct(image..image + 1, scratch, y);
            }
        }
    }

    fn scene(&self) -> Scene {
        let tiles = self.tile_grid();
        Scene { channels: self.inputs, size: self.source, padding: self.padding, halo: 2, tiles }
    }
}

/// One call: its operands and the scratch lent to it.
struct Work<'a> {
    plan: &'a WinogradPlan,
    cut: Cut,
    places: &'a [u32],
    x: &'a [f32],
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    y: Address,
    kept: Address,
    keeps: bool,
    own: Address,
    own_len: usize,
    kernel_flag: &'a AtomicBool,
}

/// A thread's own scratch.
struct ThreadScratch<'a> {
    patches: &'a mut [f32],
    products: &'a mut [f32],
    canvas: &'a mut [f32],
    outputs: &'a mut [f32],
    taps: &'a mut [f32],
    kernels: &'a mut [f32],
}

/// Rows of tiles of one image.
#[derive(Clone)]
struct Part {
    image: usize,
    rows: Range<usize>,
    /// The number of its first tile.
    first: usize,
}

impl Work<'_> {
    fn thread_scratch(&self, thread: usize) -> ThreadScratch<'_> {
        // SAFETY: each thread has its own.
        let mut own = unsafe { self.own.slice(thread * self.own_len, self.own_len) };
        let [patches, products, canvas, outputs, taps, kernels] =
            self.plan.lens(&self.cut).map(|len| lend(&mut own, len));
        ThreadScratch { patches, products, canvas, outputs, taps, kernels }
    }

    /// Everything; `flags` has a number for each part, set to one where a pixel is too large.
    fn run(&self, team: &Team, flags: Address) {
        let (plan, cut) = (self.plan, &self.cut);
        if self.keeps {
            let len = plan.kernel_lens().2;
            team.run(plan.depth_blocks() * plan.slivers(), |at, thread| {
                // SAFETY: every task has its own sliver.
                let to = unsafe { self.kept.slice(at * len, len) };
                self.transform_kernels(at % plan.slivers(), at / plan.slivers(), self.thread_scratch(thread).taps, to);
            });
        }
        team.run(plan.images.div_ceil(cut.images) * cut.parts, |at, thread| {
            let (images, part) = (at / cut.parts * cut.images, at % cut.parts);
            let images = images..(images + cut.images).min(plan.images);
            let rows = part * cut.rows..((part + 1) * cut.rows).min(plan.tile_grid()[0]);
            let mut scratch = self.thread_scratch(thread);
            let tiles = images.len() * rows.len() * plan.tile_grid()[1];
            let parts = images.clone().map(|image| {
                let first = (image - images.start) * rows.len() * plan.tile_grid()[1];
                Part { image, rows: rows.clone(), first }
            });
            let panels = Panels::new(tiles, plan.depth(), PANEL);
            for task in parts.clone() {
                let large = self.transform_patches(&task, &panels, &mut scratch);
                // SAFETY: the part has its own flag.
                unsafe { flags.slice(task.image * cut.parts + part, 1)[0] = f32::from_bits(u32::from(large)) };
            }
            self.multiply(parts, &panels, &mut scratch);
        });
    }

    /// Transforms a sliver of kernels, one block of channels.
    fn transform_kernels(&self, sliver: usize, block: usize, taps: &mut [f32], to: &mut [f32]) {
        let plan = self.plan;
        let (_, stride, _) = plan.kernel_lens();
        let channels = block * DEPTH_BLOCK..((block + 1) * DEPTH_BLOCK).min(plan.depth());
        for half in 0..2 {
            let first = sliver * SLIVER + half * LANES;
            let count = plan.outputs.saturating_sub(first).min(LANES);
            for k in channels.clone().step_by(LANES) {
                let ks = plan.inputs.saturating_sub(k).min(LANES);
                if count < LANES || ks < LANES {
                    taps.fill(0.0);
                }
                self.gather_taps(first, count, k, ks, taps);
                if any_large(taps) {
                    self.kernel_flag.store(true, Ordering::Relaxed);
                }
                let to = &mut to[(k - channels.start) * SLIVER + half * LANES..];
                assert!(to.len() >= (PLACES - 1) * stride + (LANES - 1) * SLIVER + LANES, "room for every place");
                // SAFETY: both sides were checked; the taps are sixteen kernels of sixteen outputs.
                unsafe { transforms::kernels_in(taps.as_ptr(), LANES, plan.flipped, to.as_mut_ptr(), SLIVER, stride) };
            }
        }
    }

    /// Kernels as `[channel, tap, output]`.
    fn gather_taps(&self, first: usize, count: usize, k: usize, ks: usize, taps: &mut [f32]) {
        let plan = self.plan;
        if count == 0 || ks == 0 {
            return;
        }
        let source = &self.weight[first * plan.output_stride + k * plan.input_stride..];
        let reach = (count - 1) * plan.output_stride + (ks - 1) * plan.input_stride + TAPS;
        assert!(source.len() >= reach && taps.len() >= TAPS * LANES * LANES, "kernels inside the weights");
        let (source, to) = (source.as_ptr(), taps.as_mut_ptr());
        // SAFETY: both sides were checked just above.
        unsafe {
            if plan.input_stride == TAPS {
                return transpose(source, plan.output_stride, count, ks * TAPS, |at| to.add(at * LANES));
            }
            for k in 0..ks {
                let (source, to) = (source.add(k * plan.input_stride), to.add(k * TAPS * LANES));
                transpose(source, TAPS, count, TAPS - 1, |at| to.add(at * LANES));
                (0..count).for_each(|line| *to.add((TAPS - 1) * LANES + line) = *source.add(line * TAPS + TAPS - 1));
            }
        }
    }

    /// Transforms the patches of a part; says whether a pixel is too large.
    fn transform_patches(&self, part: &Part, panels: &Panels, scratch: &mut ThreadScratch<'_>) -> bool {
        let (plan, scene) = (self.plan, self.plan.scene());
        let field = Field { rows: part.rows.len(), columns: scene.tiles[1], first: part.first, pitch: scene.pitch() };
        let stride = panels.tiles * plan.depth() + GAP;
        let mut large = false;
        scratch.canvas.fill(0.0);
        for group in 0..scene.groups() {
            large |= scene.fill_canvas(self.x, self.places, part.image, &part.rows, group, scratch.canvas);
            // SAFETY: the canvas holds every patch, the patches every tile of every place.
            unsafe {
                transforms::patches_in(
                    scratch.canvas.as_ptr(),
                    &field,
                    panels,
                    group,
                    scratch.patches.as_mut_ptr(),
                    stride,
                );
            }
        }
        large
    }

    /// The products of the patches, block of outputs by block of outputs, and the way back.
    fn multiply(&self, parts: impl Iterator<Item = Part> + Clone, panels: &Panels, scratch: &mut ThreadScratch<'_>) {
        let plan = self.plan;
        let (_, stride, len) = plan.kernel_lens();
        for first in (0..plan.slivers()).step_by(SLIVERS) {
            let slivers = SLIVERS.min(plan.slivers() - first);
            let pitch = slivers * SLIVER;
            let m_stride = panels.tiles * pitch + GAP;
            for block in 0..plan.depth_blocks() {
                let kernels = match self.keeps {
                    // SAFETY: the kept kernels hold every sliver of every block.
                    true => unsafe { self.kept.get().add((block * plan.slivers() + first) * len) },
                    false => {
                        for (at, to) in scratch.kernels.chunks_exact_mut(len).enumerate().take(slivers) {
                            self.transform_kernels(first + at, block, scratch.taps, to);
                        }
                        scratch.kernels.as_mut_ptr()
                    }
                };
                let product = Product {
                    v: scratch.patches.as_ptr(),
                    v_stride: panels.tiles * plan.depth() + GAP,
                    panels: *panels,
                    group: block * DEPTH_BLOCK / LANES,
                    groups: (plan.depth() - block * DEPTH_BLOCK).min(DEPTH_BLOCK) / LANES,
                    u: kernels,
                    u_stride: stride,
                    slivers,
                    m: scratch.products.as_mut_ptr(),
                    m_stride,
                    m_pitch: pitch,
                    add: block > 0,
                };
                // SAFETY: `lens` made every buffer large enough for these tiles, channels and slivers.
                unsafe { product::multiply(&product) };
            }
            for part in parts.clone() {
                self.transform_outputs(&part, first * SLIVER..(first + slivers) * SLIVER, m_stride, scratch);
            }
        }
    }

    /// Transforms the products of a part back and writes the outputs.
    fn transform_outputs(&self, part: &Part, outputs: Range<usize>, stride: usize, scratch: &mut ThreadScratch<'_>) {
        let plan = self.plan;
        let [_, columns] = plan.tile_grid();
        let [height, width] = plan.grid;
        let rows = 2 * part.rows.start..(2 * part.rows.end).min(height);
        let field = Field { rows: part.rows.len(), columns, first: part.first, pitch: 0 };
        let pixels = rows.len() * width;
        assert!(scratch.outputs.len() >= pixels * LANES, "room for every output");
        for first in outputs.clone().step_by(LANES) {
            let count = plan.outputs.saturating_sub(first).min(LANES);
            if count == 0 {
                continue;
            }
            let mut bias = [0.0; LANES];
            if let Some(all) = self.bias {
                bias[..count].copy_from_slice(&all[first..first + count]);
            }
            let plane = (part.image * plan.outputs + first) * height * width + rows.start * width;
            // SAFETY: the products hold every tile; the planes are inside the output, and this part has them to itself.
            unsafe {
                let data = scratch.products.as_ptr().add(first - outputs.start);
                let from = transforms::Tiles { data, pitch: outputs.len(), stride };
                let held = scratch.outputs.as_mut_ptr();
                transforms::tiles_out(from, &field, &bias, held, [rows.len(), width]);
                let to = self.y.get().add(plane);
                transpose(held, LANES, pixels, count, |at| to.add(at * height * width));
            }
        }
    }
}
