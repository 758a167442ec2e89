//! `flip`: mirrored images.

use crate::error::ReadError;
use crate::format::OpenError;
use crate::sample::{Form, Sample, ValueForm};
use crate::transform::{Cx, Setup, TRAINING, Transform, TransformKind, misplaced};
use kolo_graph::rng::{Stream, unit};
use kolo_graph::settings::Settings;

pub const KIND: TransformKind = TransformKind {
    name: "flip",
    doc: "images mirrored left to right, or upside down, with these probabilities",
    keys: "`horizontal = 0.5`, `vertical = 0.0`",
    when: TRAINING,
    make,
};

#[derive(Debug)]
struct Flip {
    horizontal: f32,
    vertical: f32,
    stream: Stream,
}

fn make(table: &Settings, form: &mut Form, setup: &mut Setup<'_>) -> Result<Box<dyn Transform>, OpenError> {
    if !matches!(form.x, ValueForm::Image { .. }) {
        return Err(misplaced(table, "images"));
    }
    let horizontal = table.float_in("horizontal", 0.5, 0.0, 1.0)? as f32;
    Ok(Box::new(Flip {
        horizontal,
        vertical: table.float_in("vertical", 0.0, 0.0, 1.0)? as f32,
        stream: setup.stream(),
    }))
}

impl Transform for Flip {
    fn apply(&self, sample: &mut Sample, cx: &mut Cx<'_>) -> Result<(), ReadError> {
        if !cx.trains() {
            return Ok(());
        }
        let [a, b, ..] = cx.words(&self.stream, 0);
        let pixels = &mut sample.x.pixels;
        let row_bytes = pixels.width * pixels.channels;
        if unit(a) < self.horizontal && row_bytes > 0 {
            for row in pixels.bytes.chunks_exact_mut(row_bytes) {
                mirror(row, pixels.channels);
            }
        }
        if unit(b) < self.vertical && row_bytes > 0 {
            let (mut top, mut bottom) = (0, pixels.height.saturating_sub(1));
            while top < bottom {
                let (first, second) = pixels.bytes.split_at_mut(bottom * row_bytes);
                first[top * row_bytes..][..row_bytes].swap_with_slice(&mut second[..row_bytes]);
                (top, bottom) = (top + 1, bottom - 1);
            }
        }
        Ok(())
    }

    fn is_random(&self) -> bool {
        true
    }
}

/// Reverses the pixels of a row.
fn mirror(row: &mut [u8], channels: usize) {
    fn pixels<const N: usize>(row: &mut [u8]) {
        row.as_chunks_mut::<N>().0.reverse();
    }
    match channels {
        1 => row.reverse(),
        3 => pixels::<3>(row),
        4 => pixels::<4>(row),
        _ => {
            // Each pixel backwards, then all of the row.
            row.chunks_exact_mut(channels.max(1)).for_each(<[u8]>::reverse);
            row.reverse();
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::source::Draw;
    use crate::transform::tests::{Few, applied, image, made, text};
    use kolo_graph::settings::Setting;

    #[test]
    fn images_are_mirrored_in_training_only() {
        let flipped = |horizontal: f64, vertical: f64, epoch| {
            let (mut form, sample) = image(3, 2, 3);
            let keys = [
                ("kind", text("flip")),
                ("horizontal", Setting::Float(horizontal)),
                ("vertical", Setting::Float(vertical)),
            ];
            let flip = made(&keys, &mut form, &Few::default()).unwrap();
            let bytes = applied(&*flip, &sample, Draw { sample: 0, epoch }, &Few::default()).unwrap().x.pixels.bytes;
            let pixel = |at: usize| sample.x.pixels.bytes[at * 3..at * 3 + 3].to_vec();
            (0..6)
                .map(|place| (0..6).position(|at| pixel(at) == bytes[place * 3..place * 3 + 3]).unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(flipped(1.0, 0.0, Some(0)), [2, 1, 0, 5, 4, 3]);
        assert_eq!(flipped(0.0, 1.0, Some(0)), [3, 4, 5, 0, 1, 2]);
        assert_eq!(flipped(1.0, 1.0, Some(0)), [5, 4, 3, 2, 1, 0]);
        assert_eq!(flipped(1.0, 1.0, None), [0, 1, 2, 3, 4, 5]);
        let mut row = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
        super::mirror(&mut row, 5);
        assert_eq!(row, [6, 7, 8, 9, 10, 1, 2, 3, 4, 5]);
    }
}
