//! `resize`: images of another size, by convolution with a filter as wide as the reduction asks for.
//!
//! The work is done in whole numbers, so the bytes are the same whatever vectors the processor has; a test compares them.

use crate::error::ReadError;
use crate::format::OpenError;
use crate::image::Pixels;
use crate::sample::{Form, Sample, ValueForm};
use crate::transform::{ALWAYS, Cx, Setup, Transform, TransformKind, Work, misplaced, read_size};
use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions};
use kolo_graph::settings::Settings;

pub const KIND: TransformKind = TransformKind {
    name: "resize",
    doc: "images of another size; one number is the shorter side",
    keys: "`size = 256` or `[height, width]`, `filter = \"bilinear\"` (bicubic, box, nearest)",
    when: ALWAYS,
    make,
};

#[derive(Debug)]
struct Resize {
    height: usize,
    /// `None`: `height` is that of the shorter side, and the image keeps its proportions.
    width: Option<usize>,
    algorithm: ResizeAlg,
}

fn make(table: &Settings, form: &mut Form, _: &mut Setup<'_>) -> Result<Box<dyn Transform>, OpenError> {
    let (height, width) = read_size(table)?;
    let algorithm = match table.choice("filter", &["bilinear", "bicubic", "box", "nearest"])? {
        "bicubic" => ResizeAlg::Convolution(FilterType::CatmullRom),
        "box" => ResizeAlg::Convolution(FilterType::Box),
        "nearest" => ResizeAlg::Nearest,
        _ => ResizeAlg::Convolution(FilterType::Bilinear),
    };
    let resize = Resize { height, width, algorithm };
    let ValueForm::Image { height, width, .. } = &mut form.x else { return Err(misplaced(table, "images")) };
    let known = height.zip(*width).map(|(height, width)| resize.size_of(height, width));
    let fixed = resize.width.map(|width| (resize.height, width)).or(known);
    (*height, *width) = (fixed.map(|size| size.0), fixed.map(|size| size.1));
    Ok(Box::new(resize))
}

impl Resize {
    /// Height and width that an image of this size gets.
    fn size_of(&self, height: usize, width: usize) -> (usize, usize) {
        let Some(fixed) = self.width else {
            let short = height.min(width).max(1);
            let longer = |side: usize| (side * self.height + short / 2) / short;
            return if height <= width { (self.height, longer(width)) } else { (longer(height), self.height) };
        };
        (self.height, fixed)
    }
}

impl Transform for Resize {
    fn apply(&self, sample: &mut Sample, cx: &mut Cx<'_>) -> Result<(), ReadError> {
        let pixels = &mut sample.x.pixels;
        let (height, width) = self.size_of(pixels.height, pixels.width);
        if (height, width) == (pixels.height, pixels.width) {
            return Ok(());
        }
        resized(pixels, (height, width), self.algorithm, cx.work).map_err(|message| {
            ReadError::new(
                format!("the image cannot be resized: {message}"),
                "correct the image, or write `on_error = \"skip\"`",
            )
        })
    }
}

fn resized(
    pixels: &mut Pixels,
    (height, width): (usize, usize),
    algorithm: ResizeAlg,
    work: &mut Work,
) -> Result<(), String> {
    let Work { pixels: out, resizer, planes: (from, to) } = work;
    let (channels, places) = (pixels.channels, pixels.height * pixels.width);
    if !(1..=4).contains(&channels) || pixels.bytes.len() != channels * places {
        return Err(format!("it has {channels} channels and {} bytes", pixels.bytes.len()));
    }
    let side = |side: usize| u32::try_from(side).map_err(|_| format!("a side of {side} pixels is too long"));
    let old = (side(pixels.width)?, side(pixels.height)?);
    let new = (side(width)?, side(height)?);
    let options = ResizeOptions::new().resize_alg(algorithm).use_alpha(false);
    out.bytes.resize(height * width * channels, 0);
    to.resize(height * width, 0);
    // One channel after the other: each further type of pixel would cost many seconds of every build.
    for channel in 0..channels {
        from.clear();
        from.extend(pixels.bytes.iter().skip(channel).step_by(channels));
        let image = TypedImageRef::<U8>::from_buffer(old.0, old.1, from).map_err(|error| error.to_string())?;
        let mut smaller = TypedImage::<U8>::from_buffer(new.0, new.1, to).map_err(|error| error.to_string())?;
        resizer.resize_typed(&image, &mut smaller, &options).map_err(|error| error.to_string())?;
        drop(smaller);
        let places = out.bytes.iter_mut().skip(channel).step_by(channels);
        places.zip(&*to).for_each(|(place, value)| *place = *value);
    }
    (out.channels, out.height, out.width) = (channels, height, width);
    std::mem::swap(pixels, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Draw;
    use crate::transform::tests::{Few, applied, image, made, text};
    use fast_image_resize::CpuExtensions;
    use kolo_graph::settings::Setting;

    #[test]
    fn sizes_follow_the_rule() {
        let size = |keys: &[(&str, Setting)], height, width| {
            let (mut form, sample) = image(3, height, width);
            let keys: Vec<_> = [("kind", text("resize"))].into_iter().chain(keys.iter().cloned()).collect();
            let resize = made(&keys, &mut form, &Few::default()).unwrap();
            let after = applied(&*resize, &sample, Draw { sample: 0, epoch: None }, &Few::default()).unwrap();
            let Pixels { height, width, bytes, .. } = after.x.pixels;
            assert_eq!(form.x, ValueForm::Image { channels: 3, height: Some(height), width: Some(width) });
            assert_eq!(bytes.len(), height * width * 3);
            (height, width)
        };
        let pair = Setting::List(vec![Setting::Int(8), Setting::Int(5)]);
        assert_eq!(size(&[("size", pair)], 20, 30), (8, 5));
        assert_eq!(size(&[("size", Setting::Int(10))], 20, 31), (10, 16));
        assert_eq!(size(&[("size", Setting::Int(10)), ("filter", text("nearest"))], 31, 20), (16, 10));
        let (mut form, _) = image(3, 4, 4);
        assert!(
            made(&[("kind", text("resize"))], &mut form, &Few::default())
                .unwrap_err()
                .contains("`data.transforms[0].size` is missing")
        );
    }

    /// The promise of the same bits on any machine: whole-number arithmetic, whatever the width of the vectors.
    #[test]
    fn bytes_do_not_depend_on_the_processor() {
        let filters = [FilterType::Bilinear, FilterType::CatmullRom, FilterType::Box].map(ResizeAlg::Convolution);
        let sizes = [((31, 47), (16, 16)), ((16, 16), (33, 19)), ((256, 341), (224, 224)), ((5, 300), (64, 7))];
        for algorithm in filters.into_iter().chain([ResizeAlg::Nearest]) {
            for channels in 1..=4 {
                for ((height, width), to) in sizes {
                    let (_, sample) = image(channels, height, width);
                    let with = |extensions: CpuExtensions| {
                        let mut work = Work::default();
                        // SAFETY: it is asked whether the processor has them.
                        unsafe { work.resizer.set_cpu_extensions(extensions) };
                        let mut pixels = sample.x.pixels.clone();
                        resized(&mut pixels, to, algorithm, &mut work).unwrap();
                        pixels.bytes
                    };
                    let plain = with(CpuExtensions::None);
                    #[cfg(target_arch = "x86_64")]
                    let all = [CpuExtensions::Sse4_1, CpuExtensions::Avx2];
                    #[cfg(not(target_arch = "x86_64"))]
                    let all = [CpuExtensions::default()];
                    for extensions in all.into_iter().filter(CpuExtensions::is_supported) {
                        assert!(plain == with(extensions), "{algorithm:?} {channels} {height}×{width} {extensions:?}");
                    }
                }
            }
        }
    }
}
