//! `resize`: images of another size, by convolution with a filter as wide as the reduction asks for.
//!
//! `crate::resample` does the work, in whole numbers: the bytes are those of Pillow, and the size that of torchvision.

use crate::error::ReadError;
use crate::format::OpenError;
use crate::resample::Filter;
use crate::sample::{Form, Sample, ValueForm};
use crate::transform::{ALWAYS, Cx, Setup, Transform, TransformKind, Work, misplaced, read_size};
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
    filter: Filter,
}

fn make(table: &Settings, form: &mut Form, _: &mut Setup<'_>) -> Result<Box<dyn Transform>, OpenError> {
    let (height, width) = read_size(table)?;
    let filter = match table.choice("filter", &["bilinear", "bicubic", "box", "nearest"])? {
        "bicubic" => Filter::Bicubic,
        "box" => Filter::Box,
        "nearest" => Filter::Nearest,
        _ => Filter::Bilinear,
    };
    let resize = Resize { height, width, filter };
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
            // As torchvision: the fraction is dropped.
            let longer = |side: usize| side * self.height / short;
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
        let failed = |message| {
            ReadError::new(
                format!("the image cannot be resized: {message}"),
                "correct the image, or write `on_error = \"skip\"`",
            )
        };
        let Work { pixels: out, resampler } = &mut *cx.work;
        resampler.resize(pixels, (height, width), self.filter, out).map_err(failed)?;
        std::mem::swap(pixels, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::Pixels;
    use crate::source::Draw;
    use crate::transform::tests::{Few, applied, image, made, text};
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
        assert_eq!(size(&[("size", Setting::Int(10))], 20, 31), (10, 15));
        assert_eq!(size(&[("size", Setting::Int(10)), ("filter", text("nearest"))], 31, 20), (15, 10));
        // 383.7, as `torchvision.transforms.Resize(256)` has it.
        assert_eq!(size(&[("size", Setting::Int(256))], 427, 640), (256, 383));
        let (mut form, _) = image(3, 4, 4);
        assert!(
            made(&[("kind", text("resize"))], &mut form, &Few::default())
                .unwrap_err()
                .contains("`data.transforms[0].size` is missing")
        );
    }
}
