//! `crop`: a part of the image, in the middle or anywhere.

use crate::error::ReadError;
use crate::format::OpenError;
use crate::image::Pixels;
use crate::noise::below_of_word;
use crate::sample::{Form, Sample, ValueForm};
use crate::transform::{Cx, Setup, Transform, TransformKind, misplaced, read_size};
use kolo_graph::rng::Stream;
use kolo_graph::settings::Settings;

pub const KIND: TransformKind = TransformKind {
    name: "crop",
    doc: "a part of the image: the middle, or with `random` any part in training",
    keys: "`size = 224` or `[height, width]`, `random = false`, `padding = 0` (black pixels on every side first)",
    when: "always; random in training only",
    make,
};

/// Pixels added on a side, at most.
const PADDING_MAX: usize = 1 << 12;

#[derive(Debug)]
struct Crop {
    height: usize,
    width: usize,
    padding: usize,
    random: Option<Stream>,
}

fn make(table: &Settings, form: &mut Form, setup: &mut Setup<'_>) -> Result<Box<dyn Transform>, OpenError> {
    let (height, width) = read_size(table)?;
    let random = table.bool("random", false)?.then(|| setup.stream());
    let crop =
        Crop { height, width: width.unwrap_or(height), padding: table.count_in("padding", 0, 0, PADDING_MAX)?, random };
    let ValueForm::Image { height, width, .. } = &mut form.x else { return Err(misplaced(table, "images")) };
    let fits = |side: Option<usize>, wanted: usize| side.is_none_or(|side| side + 2 * crop.padding >= wanted);
    if !fits(*height, crop.height) || !fits(*width, crop.width) {
        let message =
            format!("is larger than the images, which are {:?} × {:?}", width.unwrap_or(0), height.unwrap_or(0));
        return Err(table.wrong("size", message, "make it smaller, add `padding`, or resize first").into());
    }
    (*height, *width) = (Some(crop.height), Some(crop.width));
    Ok(Box::new(crop))
}

impl Transform for Crop {
    fn apply(&self, sample: &mut Sample, cx: &mut Cx<'_>) -> Result<(), ReadError> {
        let pixels = &mut sample.x.pixels;
        let slack = |side: usize, wanted: usize| (side + 2 * self.padding).checked_sub(wanted);
        let (Some(down), Some(right)) = (slack(pixels.height, self.height), slack(pixels.width, self.width)) else {
            let message = format!(
                "an image of {}×{} cannot be cropped to {}×{}",
                pixels.width, pixels.height, self.width, self.height
            );
            return Err(ReadError::new(message, "put a resize in front of the crop, or give it `padding`"));
        };
        let (top, left) = match self.random.filter(|_| cx.trains()) {
            Some(stream) => {
                let [a, b, ..] = cx.words(&stream, 0);
                (below_of_word(a, down + 1), below_of_word(b, right + 1))
            }
            None => (down / 2, right / 2),
        };
        if down > 0 || right > 0 || self.padding > 0 {
            self.cut(pixels, (top, left), &mut cx.work.pixels);
            std::mem::swap(pixels, &mut cx.work.pixels);
        }
        Ok(())
    }

    fn is_random(&self) -> bool {
        self.random.is_some()
    }
}

impl Crop {
    /// The part whose corner is `(top, left)` of the padded image.
    fn cut(&self, from: &Pixels, (top, left): (usize, usize), to: &mut Pixels) {
        let channels = from.channels;
        (to.channels, to.height, to.width) = (channels, self.height, self.width);
        to.bytes.clear();
        to.bytes.resize(self.height * self.width * channels, 0);
        // Columns of the image that lie in the part.
        let first = left.max(self.padding);
        let end = (left + self.width).min(self.padding + from.width);
        for (at, row) in to.bytes.chunks_exact_mut(self.width * channels).enumerate() {
            let Some(y) = (top + at).checked_sub(self.padding).filter(|y| *y < from.height) else { continue };
            if first < end {
                let start = (y * from.width + first - self.padding) * channels;
                let len = (end - first) * channels;
                row[(first - left) * channels..][..len].copy_from_slice(&from.bytes[start..start + len]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Draw;
    use crate::transform::tests::{Few, applied, image, made, text};
    use kolo_graph::settings::Setting;

    fn crop(keys: &[(&str, Setting)]) -> Result<(Box<dyn Transform>, Sample), String> {
        let (mut form, sample) = image(1, 4, 4);
        let keys: Vec<_> = [("kind", text("crop"))].into_iter().chain(keys.iter().cloned()).collect();
        made(&keys, &mut form, &Few::default()).map(|crop| (crop, sample))
    }

    fn bytes(crop: &dyn Transform, sample: &Sample, draw: Draw) -> Vec<u8> {
        applied(crop, sample, draw, &Few::default()).unwrap().x.pixels.bytes
    }

    #[test]
    fn the_middle_and_the_padding() {
        let draw = Draw { sample: 0, epoch: Some(1) };
        let (middle, sample) = crop(&[("size", Setting::Int(2))]).unwrap();
        let of = |y: usize, x: usize| sample.x.pixels.bytes[y * 4 + x];
        assert_eq!(bytes(&*middle, &sample, draw), [of(1, 1), of(1, 2), of(2, 1), of(2, 2)]);
        let (padded, sample) = crop(&[("size", Setting::Int(6)), ("padding", Setting::Int(1))]).unwrap();
        let all = bytes(&*padded, &sample, draw);
        assert_eq!((&all[..7], all[35]), (&[0; 7][..], 0));
        assert_eq!(all[7..11], sample.x.pixels.bytes[..4]);
        assert!(crop(&[("size", Setting::Int(5))]).unwrap_err().contains("larger than the images"));
    }

    #[test]
    fn random_parts_repeat_and_evaluations_see_the_middle() {
        let (random, sample) = crop(&[("size", Setting::Int(2)), ("random", Setting::Bool(true))]).unwrap();
        let (middle, _) = crop(&[("size", Setting::Int(2))]).unwrap();
        let at = |sample_number, epoch| bytes(&*random, &sample, Draw { sample: sample_number, epoch });
        assert_eq!(at(3, None), bytes(&*middle, &sample, Draw { sample: 0, epoch: None }));
        assert_eq!(at(3, Some(5)), at(3, Some(5)));
        let seen: std::collections::BTreeSet<Vec<u8>> = (0..200).map(|sample| at(sample, Some(0))).collect();
        assert_eq!(seen.len(), 9, "every place is drawn");
        assert!(random.is_random() && !middle.is_random());
    }
}
