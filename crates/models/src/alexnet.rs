//! AlexNet, in torchvision's one-tower form.

use crate::layers::Conv;
use crate::{Build, Model, ModelKind, Outputs, classify, data_classes};
use kolo_graph::field::Field;
use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::prelude::*;

pub const KIND: ModelKind = ModelKind { name: "alexnet", doc: "AlexNet: image classes dropout", make };

/// Index in torchvision's `features`, the convolution, and whether a 3×3 pooling of stride 2 follows.
const FEATURES: [(usize, usize, usize, usize, usize, bool); 5] = [
    (0, 64, 11, 4, 2, true),
    (3, 192, 5, 1, 2, true),
    (6, 384, 3, 1, 1, false),
    (8, 256, 3, 1, 1, false),
    (10, 256, 3, 1, 1, true),
];

#[derive(Debug)]
struct AlexNet {
    image: Vec<usize>,
    classes: usize,
    dropout: f32,
}

fn make(settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    Ok(Box::new(AlexNet {
        image: crate::cnn::image(settings, data, [3, 224, 224])?,
        classes: settings.size("classes", data_classes(data, "y").unwrap_or(1000))?,
        dropout: settings.float_in("dropout", 0.5, 0.0, 0.99)? as f32,
    }))
}

impl Model for AlexNet {
    fn fields(&self) -> Vec<Field> {
        vec![Field::real("x", &self.image), Field::index("y", &[], self.classes)]
    }

    fn learning_rate(&self) -> f64 {
        1e-4
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        let mut x = cx.field(&fields[0]);
        for (at, channels, kernel, stride, padding, pool) in FEATURES {
            let conv = Conv::same(channels, kernel).stride(stride).padding(padding);
            x = cx.conv2d(&format!("features.{at}"), x, conv).relu();
            if pool {
                x = x.max_pool2d([3, 3], [2, 2], [0, 0]);
            }
        }
        let x = x.adaptive_avg_pool2d([6, 6]);
        let x = x.reshape_to([cx.batch, x.shape().iter().skip(1).product()]);
        let x = cx.linear("classifier.1", cx.dropout("classifier.0", x, self.dropout), 4096).relu();
        let x = cx.linear("classifier.4", cx.dropout("classifier.3", x, self.dropout), 4096).relu();
        classify(cx.linear("classifier.6", x, self.classes), cx.field(&fields[1]), 0.0)
    }
}
