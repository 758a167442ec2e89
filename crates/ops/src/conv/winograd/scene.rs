//! Some rows of tiles of an image as the transforms want them: sixteen channels side by side, with the padding around.

use super::any_large;
use crate::conv::lanes::LANES;
use crate::conv::transpose::transpose;
use std::ops::Range;

/// Images to cut into tiles.
#[derive(Clone, Copy, Debug)]
pub struct Scene {
    /// Channels and size of an image.
    pub channels: usize,
    pub size: [usize; 2],
    pub padding: [usize; 2],
    /// Pixels that a patch reaches beyond its tile.
    pub halo: usize,
    /// Tiles of an image.
    pub tiles: [usize; 2],
}

impl Scene {
    pub fn pixels(&self) -> usize {
        self.size[0] * self.size[1]
    }

    /// Pixels of a row of the canvas.
    pub fn pitch(&self) -> usize {
        2 * self.tiles[1] + self.halo
    }

    /// Numbers of a canvas of this many rows of tiles.
    pub fn canvas_len(&self, rows: usize) -> usize {
        (2 * rows + self.halo) * self.pitch() * LANES
    }

    pub fn groups(&self) -> usize {
        self.channels.div_ceil(LANES)
    }

    /// Where the pixels of an image lie on a canvas of all its rows.
    pub fn list_places(&self, places: &mut [u32]) {
        for (row, slots) in places.chunks_exact_mut(self.size[1]).enumerate() {
            let start = (row + self.padding[0]) * self.pitch() + self.padding[1];
            slots.iter_mut().enumerate().for_each(|(column, slot)| *slot = ((start + column) * LANES) as u32);
        }
    }

    /// Puts one group of channels of some rows of tiles of an image on the canvas, which must be clear around them; says
    /// whether a pixel is too large.
    pub fn fill_canvas(
        &self,
        data: &[f32],
        places: &[u32],
        image: usize,
        rows: &Range<usize>,
        group: usize,
        canvas: &mut [f32],
    ) -> bool {
        let [height, width] = self.size;
        let canvas = &mut canvas[..self.canvas_len(rows.len())];
        let top = (2 * rows.start).saturating_sub(self.padding[0]).min(height);
        let bottom = (2 * rows.end + self.halo).saturating_sub(self.padding[0]).clamp(top, height);
        let places = &places[top * width..bottom * width];
        let skipped = 2 * rows.start * self.pitch() * LANES;
        let first = group * LANES;
        let count = LANES.min(self.channels - first);
        if count < LANES {
            canvas.fill(0.0);
        }
        let Some(last) = places.last() else { return false };
        let source = &data[((image * self.channels + first) * height + top) * width..];
        assert!(*last as usize - skipped + LANES <= canvas.len(), "inside the canvas");
        assert!(source.len() >= (count - 1) * self.pixels() + places.len(), "inside the image");
        let to = canvas.as_mut_ptr();
        // SAFETY: pixels and their places were checked just above.
        unsafe {
            transpose(source.as_ptr(), self.pixels(), count, places.len(), |at| to.add(places[at] as usize - skipped));
        }
        any_large(canvas)
    }
}
