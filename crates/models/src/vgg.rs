//! VGG-16 with torchvision's names. Small images are pooled to what is left of them.

use crate::layers::Conv;
use crate::{Build, Model, ModelKind, Outputs, classify, data_classes};
use kolo_graph::field::Field;
use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::prelude::*;

pub const KIND: ModelKind = ModelKind { name: "vgg16", doc: "VGG-16: image classes dropout", make };

/// Channels of the convolutions between poolings.
const BLOCKS: [&[usize]; 5] = [&[64; 2], &[128; 2], &[256; 3], &[512; 3], &[512; 3]];
const HIDDEN: usize = 4096;
/// The plane before the classifier.
const PLANE: usize = 7;

#[derive(Debug)]
struct Vgg {
    image: Vec<usize>,
    classes: usize,
    dropout: f32,
}

fn make(settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    Ok(Box::new(Vgg {
        image: crate::cnn::image(settings, data, [3, 224, 224])?,
        classes: settings.size("classes", data_classes(data, "y").unwrap_or(1000))?,
        dropout: settings.float_in("dropout", 0.5, 0.0, 0.99)? as f32,
    }))
}

impl Model for Vgg {
    fn fields(&self) -> Vec<Field> {
        vec![Field::real("x", &self.image), Field::index("y", &[], self.classes)]
    }

    fn learning_rate(&self) -> f64 {
        1e-4
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        let mut x = cx.field(&fields[0]);
        let mut at = 0;
        for block in BLOCKS {
            for channels in block {
                x = cx.conv2d(&format!("features.{at}"), x, Conv::same(*channels, 3)).relu();
                at += 2;
            }
            if x.dim(2) > 1 && x.dim(3) > 1 {
                x = x.max_pool2d([2, 2], [2, 2], [0, 0]);
            }
            at += 1;
        }
        let plane = PLANE.min(x.dim(2)).min(x.dim(3));
        let x = x.adaptive_avg_pool2d([plane; 2]);
        let x = x.reshape_to([cx.batch, x.shape().iter().skip(1).product()]);
        let x = cx.dropout("classifier.2", cx.linear("classifier.0", x, HIDDEN).relu(), self.dropout);
        let x = cx.dropout("classifier.5", cx.linear("classifier.3", x, HIDDEN).relu(), self.dropout);
        classify(cx.linear("classifier.6", x, self.classes), cx.field(&fields[1]), 0.0)
    }
}
