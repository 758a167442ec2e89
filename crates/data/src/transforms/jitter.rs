//! `jitter`: colours that differ a little from epoch to epoch.
//!
//! The factors are drawn; the arithmetic on bytes is single f32 operations, each rounded, in a fixed order: the same bits on
//! any machine.

use crate::error::ReadError;
use crate::file_source::luminance;
use crate::format::OpenError;
use crate::image::Pixels;
use crate::noise::between;
use crate::sample::{Form, Sample, ValueForm};
use crate::transform::{Cx, Setup, TRAINING, Transform, TransformKind, misplaced};
use kolo_graph::rng::Stream;
use kolo_graph::settings::Settings;

pub const KIND: TransformKind = TransformKind {
    name: "jitter",
    doc: "brightness, contrast and saturation times a factor in 1 ± this; hue shifted by up to this part of the circle",
    keys: "`brightness = 0.0`, `contrast = 0.0`, `saturation = 0.0`, `hue = 0.0` (at most 0.5)",
    when: TRAINING,
    make,
};

#[derive(Debug)]
struct Jitter {
    brightness: f32,
    contrast: f32,
    saturation: f32,
    hue: f32,
    stream: Stream,
}

fn make(table: &Settings, form: &mut Form, setup: &mut Setup<'_>) -> Result<Box<dyn Transform>, OpenError> {
    if !matches!(form.x, ValueForm::Image { .. }) {
        return Err(misplaced(table, "images"));
    }
    let part = |key: &str, most: f64| table.float_in(key, 0.0, 0.0, most).map(|value| value as f32);
    let (brightness, contrast) = (part("brightness", 1.0)?, part("contrast", 1.0)?);
    let (saturation, hue) = (part("saturation", 1.0)?, part("hue", 0.5)?);
    Ok(Box::new(Jitter { brightness, contrast, saturation, hue, stream: setup.stream() }))
}

impl Transform for Jitter {
    fn apply(&self, sample: &mut Sample, cx: &mut Cx<'_>) -> Result<(), ReadError> {
        if !cx.trains() {
            return Ok(());
        }
        let [a, b, c, d] = cx.words(&self.stream, 0);
        let factor = |word: u32, part: f32| between(word, 1.0 - part, 1.0 + part);
        let pixels = &mut sample.x.pixels;
        scale(pixels, factor(a, self.brightness), 0.0);
        if self.contrast > 0.0 {
            let contrast = factor(b, self.contrast);
            let mean = mean_grey(pixels);
            scale(pixels, contrast, mean - contrast * mean);
        }
        if self.saturation > 0.0 && pixels.channels == 3 {
            saturate(pixels, factor(c, self.saturation));
        }
        if self.hue > 0.0 && pixels.channels == 3 {
            turn_hue(pixels, between(d, -self.hue, self.hue));
        }
        Ok(())
    }

    fn is_random(&self) -> bool {
        true
    }
}

fn byte(value: f32) -> u8 {
    (value + 0.5).clamp(0.0, 255.0) as u8
}

fn scale(pixels: &mut Pixels, factor: f32, add: f32) {
    let table: [u8; 256] = std::array::from_fn(|value| byte(value as f32 * factor + add));
    pixels.bytes.iter_mut().for_each(|value| *value = table[usize::from(*value)]);
}

fn mean_grey(pixels: &Pixels) -> f32 {
    let sum: u64 = match pixels.channels {
        3 => pixels.bytes.as_chunks::<3>().0.iter().map(|[r, g, b]| u64::from(luminance(*r, *g, *b))).sum(),
        _ => pixels.bytes.iter().map(|value| u64::from(*value)).sum(),
    };
    let count = pixels.bytes.len() / if pixels.channels == 3 { 3 } else { 1 };
    (sum as f64 / count.max(1) as f64) as f32
}

fn saturate(pixels: &mut Pixels, factor: f32) {
    for pixel in pixels.bytes.as_chunks_mut::<3>().0 {
        let grey = f32::from(luminance(pixel[0], pixel[1], pixel[2]));
        *pixel = pixel.map(|value| byte(grey + factor * (f32::from(value) - grey)));
    }
}

/// Turns the hue by so many turns.
fn turn_hue(pixels: &mut Pixels, turns: f32) {
    for pixel in pixels.bytes.as_chunks_mut::<3>().0 {
        let [r, g, b] = pixel.map(f32::from);
        let (high, low) = (r.max(g).max(b), r.min(g).min(b));
        let range = high - low;
        if range == 0.0 {
            continue;
        }
        // In sixths of the circle, red at 0.
        let hue = match high {
            h if h == r => (g - b) / range,
            h if h == g => 2.0 + (b - r) / range,
            _ => 4.0 + (r - g) / range,
        };
        let hue = hue + 6.0 * turns + 12.0;
        let channel = |offset: f32| {
            let k = (hue + offset) % 6.0;
            byte(high - range * k.min(4.0 - k).clamp(0.0, 1.0))
        };
        *pixel = [channel(5.0), channel(3.0), channel(1.0)];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Draw;
    use crate::transform::tests::{Few, applied, image, made, text};
    use kolo_graph::settings::Setting;

    #[test]
    fn colours_change_in_training_only_and_repeat() {
        let (mut form, sample) = image(3, 5, 4);
        let all = ["brightness", "contrast", "saturation", "hue"].map(|key| (key, Setting::Float(0.4)));
        let keys: Vec<_> = [("kind", text("jitter"))].into_iter().chain(all).collect();
        let jitter = made(&keys, &mut form, &Few::default()).unwrap();
        let at = |epoch| applied(&*jitter, &sample, Draw { sample: 7, epoch }, &Few::default()).unwrap();
        assert_eq!(at(None), sample);
        assert_eq!(at(Some(1)), at(Some(1)));
        assert!(at(Some(1)) != at(Some(2)) && at(Some(1)) != sample);
    }

    #[test]
    fn the_parts_do_what_they_say() {
        let with = |change: &dyn Fn(&mut Pixels)| {
            let mut pixels = Pixels { channels: 3, height: 1, width: 2, bytes: vec![200, 100, 50, 80, 80, 80] };
            change(&mut pixels);
            pixels.bytes
        };
        assert_eq!(with(&|pixels| scale(pixels, 2.0, 0.0)), [255, 200, 100, 160, 160, 160]);
        assert_eq!(with(&|pixels| scale(pixels, 1.0, 0.0)), [200, 100, 50, 80, 80, 80]);
        assert_eq!(with(&|pixels| saturate(pixels, 0.0)), [124, 124, 124, 80, 80, 80]);
        assert_eq!(with(&|pixels| saturate(pixels, 1.0)), [200, 100, 50, 80, 80, 80]);
        assert_eq!(with(&|pixels| turn_hue(pixels, 0.0)), [200, 100, 50, 80, 80, 80]);
        assert_eq!(with(&|pixels| turn_hue(pixels, 1.0 / 3.0)), [50, 200, 100, 80, 80, 80], "red to green");
        let pixels = Pixels { channels: 1, height: 1, width: 3, bytes: vec![1, 2, 6] };
        assert_eq!(mean_grey(&pixels), 3.0);
    }
}
