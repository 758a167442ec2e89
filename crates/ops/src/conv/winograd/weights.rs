//! The weight gradient as F(3×3, 2×2): the transforms of the forward pass transposed, with sums over tiles between them.
//!
//! Some input channels at a time, so that the sums stay in the second-level cache, and for them all tiles in turn. Tiles
//! are cut into units by the shape alone; each unit is summed by itself and the units are added up in order, so the bits
//! do not depend on threads, which only decide how many units are transformed at a time.

use super::scene::Scene;
use super::sums::{self, BLOCK, Sums};
use super::transforms::{self, Field, PLACES, Panels};
use super::{CHANNELS_MIN, Cut, GAP, TAPS, suits};
use crate::conv::correlate::{lend, table};
use crate::conv::lanes::LANES;
use crate::conv::shape::Shape;
use crate::conv::transpose::transpose;
use crate::conv::winograd::product::SLIVER;
use crate::tiles::Address;
use kolo_graph::Team;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of sums to aim at.
const SUM_BYTES: usize = 1 << 20;
/// Bytes of transformed gradients to aim at, where channels are cut and they are used more than once.
const GRAD_BYTES: usize = 4 << 20;
/// Tiles at a time where channels are not cut.
const TILES: usize = 128;

/// A weight gradient.
#[derive(Clone, Copy, Debug)]
pub struct WeightPlan {
    images: usize,
    image: Scene,
    grad: Scene,
    /// Input channels at a time, a multiple of a sliver.
    channels: usize,
    cut: Cut,
    /// Tiles of one unit.
    unit: usize,
}

impl WeightPlan {
    pub fn new(shape: &Shape, threads: usize) -> Option<Self> {
        let channels = shape.inputs.min(shape.outputs);
        if !suits(shape, shape.grid) || channels < CHANNELS_MIN || shape.images == 0 {
            return None;
        }
        let tiles = shape.grid.map(|side| side.div_ceil(2));
        let image =
            Scene { channels: shape.inputs, size: shape.image, padding: shape.window.padding.before, halo: 2, tiles };
        let grad = Scene { channels: shape.outputs, size: shape.grid, padding: [0, 0], halo: 0, tiles };
        let all = shape.inputs.next_multiple_of(SLIVER);
        let most = SUM_BYTES / (PLACES * 4 * shape.outputs.max(1)) / SLIVER * SLIVER;
        let channels = all.min(most.max(SLIVER));
        let wanted = match channels < all {
            true => (GRAD_BYTES / (PLACES * 4 * shape.outputs.next_multiple_of(BLOCK))).max(TILES),
            false => TILES,
        };
        let mut cut = Cut::new(tiles, wanted, shape.images);
        let unit = cut.images * cut.rows * tiles[1];
        if channels == all && cut.parts == 1 {
            cut.images = (cut.images * threads).min(shape.images);
        }
        Some(Self { images: shape.images, image, grad, channels, cut, unit })
    }

    fn tiles(&self) -> usize {
        self.cut.images * self.cut.rows * self.image.tiles[1]
    }

    fn grad_stride(&self) -> usize {
        self.grad.channels.next_multiple_of(BLOCK) * self.tiles() + GAP
    }

    fn patch_stride(&self) -> usize {
        self.channels * self.tiles() + GAP
    }

    fn sum_stride(&self) -> usize {
        self.grad.channels * self.channels + GAP
    }

    /// Numbers of transformed gradients, transformed patches, sums, and the places of pixels of both.
    fn lens(&self) -> [usize; 5] {
        let strides = [self.grad_stride(), self.patch_stride(), self.sum_stride()];
        let [grads, patches, sums] = strides.map(|stride| PLACES * stride);
        [grads, patches, sums, self.grad.pixels(), self.image.pixels()]
    }

    /// Numbers of a thread's own.
    fn own_len(&self) -> usize {
        self.image.canvas_len(self.cut.rows).max(TAPS * LANES)
    }

    pub fn scratch_bytes(&self, threads: usize, direct: usize) -> usize {
        let shared: usize = self.lens().iter().map(|len| len.next_multiple_of(LANES)).sum();
        ((shared + threads * self.own_len()) * 4).max(direct)
    }

    /// The whole gradient, or `false` if some number is too large for the transforms.
    pub fn run(&self, team: &Team, mut scratch: &mut [f32], x: &[f32], grad: &[f32], dw: &mut [f32]) -> bool {
        let [grads, patches, sums, grad_places, image_places] = self.lens().map(|len| lend(&mut scratch, len));
        let (grad_places, image_places) = (table(grad_places), table(image_places));
        self.grad.list_places(grad_places);
        self.image.list_places(image_places);
        assert!(scratch.len() >= team.threads() * self.own_len(), "room for every thread");
        let work = Work {
            plan: self,
            team,
            own: Address(scratch.as_mut_ptr()),
            large: AtomicBool::new(false),
            grads: Address(grads.as_mut_ptr()),
            patches: Address(patches.as_mut_ptr()),
            sums: Address(sums.as_mut_ptr()),
        };
        let chunks = self.images.div_ceil(self.cut.images) * self.cut.parts;
        for first in (0..self.image.channels).step_by(self.channels) {
            let channels = first..(first + self.channels).min(self.image.channels);
            for at in 0..chunks {
                let chunk = self.chunk(at);
                // One chunk of all tiles keeps its gradients from channels to channels.
                if first == 0 || chunks > 1 {
                    work.transform_grads(&chunk, grad, grad_places);
                }
                work.transform_patches(&chunk, x, image_places, &channels);
                work.accumulate(&chunk, &channels, at > 0);
            }
            work.transform_sums(&channels, Address(dw.as_mut_ptr()));
        }
        !work.large.load(Ordering::Relaxed)
    }

    fn chunk(&self, at: usize) -> Chunk {
        let (images, part) = (at / self.cut.parts * self.cut.images, at % self.cut.parts);
        let images = images..(images + self.cut.images).min(self.images);
        let rows = part * self.cut.rows..((part + 1) * self.cut.rows).min(self.image.tiles[0]);
        Chunk { images, rows, columns: self.image.tiles[1] }
    }
}

/// Some rows of tiles of some images.
struct Chunk {
    images: Range<usize>,
    rows: Range<usize>,
    columns: usize,
}

impl Chunk {
    fn tiles(&self) -> usize {
        self.images.len() * self.rows.len() * self.columns
    }

    fn field(&self, image: usize, pitch: usize) -> Field {
        let first = image * self.rows.len() * self.columns;
        Field { rows: self.rows.len(), columns: self.columns, first, pitch }
    }
}

/// One call and the scratch lent to it.
struct Work<'a> {
    plan: &'a WeightPlan,
    team: &'a Team,
    own: Address,
    large: AtomicBool,
    grads: Address,
    patches: Address,
    sums: Address,
}

impl Work<'_> {
    #[allow(clippy::mut_from_ref)]
    fn own(&self, thread: usize) -> &mut [f32] {
        // SAFETY: each thread has its own.
        unsafe { self.own.slice(thread * self.plan.own_len(), self.plan.own_len()) }
    }

    /// Paints each image of the chunk, some groups of channels, and calls `transform` for each canvas.
    fn each_canvas(
        &self,
        scene: &Scene,
        chunk: &Chunk,
        data: &[f32],
        places: &[u32],
        groups: Range<usize>,
        transform: impl Fn(*const f32, Field, usize) + Sync,
    ) {
        self.team.run(chunk.images.len(), |image, thread| {
            let canvas = self.own(thread);
            canvas.fill(0.0);
            for group in groups.clone() {
                if scene.fill_canvas(data, places, chunk.images.start + image, &chunk.rows, group, canvas) {
                    self.large.store(true, Ordering::Relaxed);
                }
                transform(canvas.as_ptr(), chunk.field(image, scene.pitch()), group);
            }
        });
    }

    fn transform_grads(&self, chunk: &Chunk, grad: &[f32], places: &[u32]) {
        let scene = &self.plan.grad;
        self.each_canvas(scene, chunk, grad, places, 0..scene.groups(), |canvas, field, group| {
            let output = group * LANES;
            let at = output / BLOCK * BLOCK * chunk.tiles() + output % BLOCK;
            // SAFETY: the gradients hold every block of every place.
            unsafe {
                let to = self.grads.get().add(at);
                transforms::tile_grads_in(canvas, &field, to, BLOCK, self.plan.grad_stride());
            }
        });
    }

    fn transform_patches(&self, chunk: &Chunk, x: &[f32], places: &[u32], channels: &Range<usize>) {
        let panels = Panels { tiles: chunk.tiles(), height: 1, depth: SLIVER };
        let groups = channels.start / LANES..channels.end.div_ceil(LANES);
        let first = groups.start;
        self.each_canvas(&self.plan.image, chunk, x, places, groups, |canvas, field, group| {
            let sliver = (group - first) * LANES / SLIVER;
            // SAFETY: the patches hold every sliver of every place.
            unsafe {
                let to = self.patches.get().add(sliver * SLIVER * chunk.tiles());
                transforms::patches_in(canvas, &field, &panels, group % 2, to, self.plan.patch_stride());
            }
        });
    }

    fn accumulate(&self, chunk: &Chunk, channels: &Range<usize>, add: bool) {
        let plan = self.plan;
        self.team.run(PLACES, |place, _| {
            // SAFETY: `lens` made every buffer large enough; each task has its own place.
            unsafe {
                sums::accumulate(&Sums {
                    tiles: chunk.tiles(),
                    unit: plan.unit,
                    y: self.grads.get().add(place * plan.grad_stride()),
                    outputs: plan.grad.channels,
                    v: self.patches.get().add(place * plan.patch_stride()),
                    channels: channels.len(),
                    m: self.sums.get().add(place * plan.sum_stride()),
                    m_pitch: plan.channels,
                    add,
                });
            }
        });
    }

    fn transform_sums(&self, channels: &Range<usize>, dw: Address) {
        let plan = self.plan;
        let per_task = (16 * 1024 / (TAPS * plan.channels)).max(1);
        self.team.chunks(plan.grad.channels, per_task, |outputs, thread| {
            let taps = self.own(thread).as_mut_ptr();
            for output in outputs {
                for first in channels.clone().step_by(LANES) {
                    let count = LANES.min(channels.end - first);
                    // SAFETY: the sums hold whole slivers; every output has its own kernels.
                    unsafe {
                        let from = self.sums.get().add(output * plan.channels + first - channels.start);
                        transforms::kernel_grads_out(from, plan.sum_stride(), taps);
                        let to = dw.get().add((output * plan.image.channels + first) * TAPS);
                        transpose(taps, LANES, TAPS, count, |channel| to.add(channel * TAPS));
                    }
                }
            }
        });
    }
}
