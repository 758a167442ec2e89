//! A small convolutional network: 3×3 convolutions, one pooling, two linear layers.

use crate::layers::Conv;
use crate::{Build, Model, ModelKind, Outputs, classify, data_classes, data_shape, layer_sizes};
use kolo_graph::field::Field;
use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::prelude::*;

pub const KIND: ModelKind =
    ModelKind { name: "cnn", doc: "small convolutional network: image channels hidden classes dropout", make };

#[derive(Debug)]
struct Cnn {
    image: Vec<usize>,
    channels: Vec<usize>,
    hidden: usize,
    classes: usize,
    dropout: f32,
}

/// `image = [channels, height, width]`, from the settings or the data.
pub(crate) fn image(
    settings: &Settings,
    data: Option<&[Field]>,
    default: [usize; 3],
) -> Result<Vec<usize>, SettingError> {
    let given = data_shape(data, "x").filter(|shape| shape.len() == 3);
    let image = settings.counts("image", &given.unwrap_or(default.to_vec()))?;
    if image.len() == 3 {
        return Ok(image);
    }
    Err(settings.wrong("image", format!("is {image:?}"), "write `image = [channels, height, width]`"))
}

fn make(settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    Ok(Box::new(Cnn {
        image: image(settings, data, [1, 8, 8])?,
        channels: layer_sizes(settings, "channels", &[16, 32])?,
        hidden: settings.size("hidden", 64)?,
        classes: settings.size("classes", data_classes(data, "y").unwrap_or(10))?,
        dropout: settings.float_in("dropout", 0.0, 0.0, 0.99)? as f32,
    }))
}

impl Model for Cnn {
    fn fields(&self) -> Vec<Field> {
        vec![Field::real("x", &self.image), Field::index("y", &[], self.classes)]
    }

    fn learning_rate(&self) -> f64 {
        3e-3
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        let mut x = cx.field(&fields[0]);
        for (at, channels) in self.channels.iter().enumerate() {
            x = cx.conv2d(&format!("convs.{at}"), x, Conv::same(*channels, 3)).relu();
        }
        let x = x.max_pool2d([2, 2], [2, 2], [0, 0]);
        let x = x.reshape_to([cx.batch, x.shape().iter().skip(1).product()]);
        let x = cx.dropout("dropout.0", x, self.dropout);
        let x = cx.linear("fc", x, self.hidden).relu();
        let x = cx.dropout("dropout.1", x, self.dropout);
        classify(cx.linear("head", x, self.classes), cx.field(&fields[1]), 0.0)
    }
}
