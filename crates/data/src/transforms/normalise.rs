//! `normalise`: numbers of each channel with a mean and a deviation taken out.

use crate::error::ReadError;
use crate::format::OpenError;
use crate::sample::{Form, Held, Sample, ValueForm, unit_of_byte};
use crate::transform::{ALWAYS, Cx, Setup, Transform, TransformKind, misplaced};
use kolo_graph::settings::{Setting, SettingError, Settings};

pub const KIND: TransformKind = TransformKind {
    name: "normalise",
    doc: "(value − mean) ÷ std of each channel, where pixels are 0 to 1",
    keys: "`mean`, `std`: a list with a number per channel, or one number for all; both may be `\"imagenet\"`",
    when: ALWAYS,
    make,
};

#[derive(Debug)]
struct Normalise {
    mean: Vec<f32>,
    std: Vec<f32>,
}

/// What the models of torchvision expect.
const IMAGENET_MEAN: [f64; 3] = [0.485, 0.456, 0.406];
const IMAGENET_STD: [f64; 3] = [0.229, 0.224, 0.225];

fn make(table: &Settings, form: &mut Form, _: &mut Setup<'_>) -> Result<Box<dyn Transform>, OpenError> {
    let (channels, shape) = match &form.x {
        ValueForm::Image { channels, height: Some(height), width: Some(width) } => {
            (*channels, vec![*channels, *height, *width])
        }
        ValueForm::Image { .. } => return Err(misplaced(table, "images of one size")),
        ValueForm::Reals { shape, .. } if shape.len() == 3 => (shape[0], shape.clone()),
        _ => return Err(misplaced(table, "images")),
    };
    let mean = per_channel(table, "mean", channels, IMAGENET_MEAN)?;
    let std = per_channel(table, "std", channels, IMAGENET_STD)?;
    if let Some(mean) = mean.iter().find(|mean| !mean.is_finite()) {
        let hint = "write a number per channel, such as `mean = 0.5`";
        return Err(table.wrong("mean", format!("has {mean}, but must be finite"), hint).into());
    }
    if let Some(std) = std.iter().find(|std| !std.is_normal() || **std < 0.0) {
        let message = format!("has {std}, but must be above zero and finite");
        return Err(table.wrong("std", message, "write a number per channel, such as `std = 0.5`").into());
    }
    form.x = ValueForm::Reals { shape, columns: vec![] };
    Ok(Box::new(Normalise { mean, std }))
}

fn per_channel(table: &Settings, key: &str, channels: usize, imagenet: [f64; 3]) -> Result<Vec<f32>, SettingError> {
    let values = match table.peek(key) {
        None => return Err(table.wrong(key, "is missing", format!("write `{key} = 0.5`, or `{key} = \"imagenet\"`"))),
        Some(Setting::Text(text)) if text == "imagenet" => {
            table.text(key, "")?;
            imagenet.to_vec()
        }
        Some(Setting::List(_)) => table.floats(key, "[0.5, 0.5, 0.5]")?,
        Some(_) => vec![table.float(key, 0.5)?; channels],
    };
    match values.len() == channels {
        true => Ok(values.into_iter().map(|value| value as f32).collect()),
        false => {
            let message = format!("has {} numbers, but the images have {channels} channels", values.len());
            Err(table.wrong(key, message, "write one number per channel"))
        }
    }
}

impl Transform for Normalise {
    fn apply(&self, sample: &mut Sample, _: &mut Cx<'_>) -> Result<(), ReadError> {
        let normal = |channel: usize, value: f32| (value - self.mean[channel]) / self.std[channel];
        let x = &mut sample.x;
        if x.held == Held::Pixels {
            x.pixels_to_reals(|channel| std::array::from_fn(|byte| normal(channel, unit_of_byte(byte as u8))));
            return Ok(());
        }
        let plane = x.reals.len() / self.mean.len().max(1);
        for (channel, plane) in x.reals.chunks_exact_mut(plane.max(1)).enumerate() {
            plane.iter_mut().for_each(|value| *value = normal(channel, *value));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Draw;
    use crate::transform::tests::{Few, applied, image, list, made, text};

    #[test]
    fn pixels_and_numbers_come_out_the_same() {
        let (mut form, mut sample) = image(3, 2, 2);
        let keys = [("kind", text("normalise")), ("mean", list(&[0.1, 0.2, 0.3])), ("std", Setting::Float(0.5))];
        let mut again = form.clone();
        let normalise = made(&keys, &mut form, &Few::default()).unwrap();
        let draw = Draw { sample: 0, epoch: None };
        let from_bytes = applied(&*normalise, &sample, draw, &Few::default()).unwrap();
        assert_eq!(form.x, ValueForm::Reals { shape: vec![3, 2, 2], columns: vec![] });
        let first = f32::from(sample.x.pixels.bytes[1]) / 255.0;
        assert_eq!(from_bytes.x.reals[4], (first - 0.2) / 0.5);
        sample.x.pixels_to_reals(|_| std::array::from_fn(|byte| unit_of_byte(byte as u8)));
        assert_eq!(applied(&*normalise, &sample, draw, &Few::default()).unwrap().x.reals, from_bytes.x.reals);
        let wrong = [("kind", text("normalise")), ("mean", list(&[0.1])), ("std", Setting::Float(0.5))];
        assert!(made(&wrong, &mut again, &Few::default()).unwrap_err().contains("but the images have 3 channels"));
        let presets = [("kind", text("normalise")), ("mean", text("imagenet")), ("std", text("imagenet"))];
        assert!(made(&presets, &mut again, &Few::default()).is_ok());
    }
}
