//! `builtin:digits`: handwritten digits, small enough to live in the binary.
//!
//! Optical Recognition of Handwritten Digits, test set, by E. Alpaydin and C. Kaynak, UCI Machine Learning Repository
//! (<https://doi.org/10.24432/C50P49>), licensed CC BY 4.0. `make_digits.py` packed it and describes the layout.

use kolo_graph::settings::Settings;

use crate::error::ReadError;
use crate::source::{Opened, SampleCost, Source, SourceKind};
use kolo_graph::field::{Column, Field};

pub const KIND: SourceKind =
    SourceKind { name: "builtin:digits", doc: "1,797 handwritten digits of 8×8 pixels", shaped_by_model: false, make };

static PACKED: &[u8] = include_bytes!("digits.bin");
const IMAGES: usize = 1797;
const SIDE: usize = 8;
const CLASSES: usize = 10;
const PIXEL_BITS: usize = 5;
const PIXEL_MAX: f32 = 16.0;
/// A row of eight pixels fills whole bytes.
const ROW_BYTES: usize = SIDE * PIXEL_BITS / 8;
const IMAGE_BYTES: usize = SIDE * ROW_BYTES;
const _: () = assert!(PACKED.len() == IMAGES * IMAGE_BYTES + IMAGES.div_ceil(2));

/// The digits: `x [1, 8, 8]` real in 0 to 1, `y []` the digit.
#[derive(Debug)]
pub struct Digits {
    fields: [Field; 2],
}

impl Digits {
    pub fn new() -> Self {
        Self { fields: [Field::real("x", &[1, SIDE, SIDE]), Field::index("y", &[], CLASSES)] }
    }
}

impl Default for Digits {
    fn default() -> Self {
        Self::new()
    }
}

fn make(_: &Settings, _: u64, _: &[Field]) -> Opened {
    Ok(Box::new(Digits::new()))
}

impl Source for Digits {
    fn fields(&self) -> &[Field] {
        &self.fields
    }

    fn len(&self) -> usize {
        IMAGES
    }

    fn fill(&self, sample: usize, field: usize, out: Column<'_>) -> Result<(), ReadError> {
        assert!(sample < IMAGES && field < self.fields.len(), "sample {sample}, field {field}");
        match field {
            0 => unpack_image(sample, out.reals()),
            _ => out.indices()[0] = label(sample),
        }
        Ok(())
    }

    fn cost(&self) -> SampleCost {
        SampleCost::Computed { ns: 2 * (SIDE * SIDE) as u64 }
    }

    fn describe(&self) -> String {
        format!("{}: {IMAGES} images of {SIDE}×{SIDE}, {CLASSES} classes", KIND.name)
    }
}

fn unpack_image(sample: usize, out: &mut [f32]) {
    let rows = PACKED[sample * IMAGE_BYTES..][..IMAGE_BYTES].chunks_exact(ROW_BYTES);
    for (row, pixels) in rows.zip(out.chunks_exact_mut(SIDE)) {
        let bits = row.iter().rev().fold(0_u64, |bits, byte| bits << 8 | u64::from(*byte));
        for (column, pixel) in pixels.iter_mut().enumerate() {
            let value = (bits >> (column * PIXEL_BITS)) & ((1 << PIXEL_BITS) - 1);
            *pixel = value as f32 / PIXEL_MAX;
        }
    }
}

fn label(sample: usize) -> i32 {
    let byte = PACKED[IMAGES * IMAGE_BYTES + sample / 2];
    i32::from(if sample.is_multiple_of(2) { byte & 15 } else { byte >> 4 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(sample: usize) -> [f32; SIDE * SIDE] {
        let mut out = [f32::NAN; SIDE * SIDE];
        unpack_image(sample, &mut out);
        out
    }

    /// The counts and the sum are scikit-learn's.
    #[test]
    fn unpacks_to_the_published_set() {
        let mut counts = [0; CLASSES];
        (0..IMAGES).for_each(|sample| counts[label(sample) as usize] += 1);
        assert_eq!(counts, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
        let sum: f32 = (0..IMAGES).flat_map(image).map(|pixel| pixel * PIXEL_MAX).sum();
        assert_eq!(sum, 561_718.0);
        assert!((0..IMAGES).flat_map(image).all(|pixel| (0.0..=1.0).contains(&pixel)));
    }

    #[test]
    fn first_image_is_a_zero() {
        let pixels = image(0).map(|pixel| (pixel * PIXEL_MAX) as u8);
        assert_eq!(pixels[..16], [0, 0, 5, 13, 9, 1, 0, 0, 0, 0, 13, 15, 10, 15, 5, 0]);
        assert_eq!(label(0), 0);
    }
}
