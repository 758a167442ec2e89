//! VGG-16 with torchvision's names and its pooling before the classifier, so that its weights fit images of any size. Below 32 pixels,
//! where torchvision's ends with an error, poolings of a single row or column are left out.

use crate::layers::Conv;
use crate::{Build, Model, ModelKind, Outputs, classify, data_classes};
use kolo_graph::field::Field;
use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::prelude::*;

pub const KIND: ModelKind = ModelKind { name: "vgg16", doc: "VGG-16: image classes dropout plane", make };

/// Channels of the convolutions between poolings.
const BLOCKS: [&[usize]; 5] = [&[64; 2], &[128; 2], &[256; 3], &[512; 3], &[512; 3]];
const HIDDEN: usize = 4096;
/// Rows and columns of the plane before the classifier.
const PLANE: usize = 7;

#[derive(Debug)]
struct Vgg {
    image: Vec<usize>,
    classes: usize,
    dropout: f32,
    plane: usize,
}

fn make(settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    Ok(Box::new(Vgg {
        image: crate::cnn::image(settings, data, [3, 224, 224])?,
        classes: settings.size("classes", data_classes(data, "y").unwrap_or(1000))?,
        dropout: settings.float_in("dropout", 0.5, 0.0, 0.99)? as f32,
        plane: settings.size("plane", PLANE)?,
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
        let x = x.adaptive_avg_pool2d([self.plane; 2]);
        let x = x.reshape_to([cx.batch, x.shape().iter().skip(1).product()]);
        let x = cx.dropout("classifier.2", cx.linear("classifier.0", x, HIDDEN).relu(), self.dropout);
        let x = cx.dropout("classifier.5", cx.linear("classifier.3", x, HIDDEN).relu(), self.dropout);
        classify(cx.linear("classifier.6", x, self.classes), cx.field(&fields[1]), 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::settings::Setting;
    use kolo_graph::{Builder, Graph};

    fn graph(image: [i64; 3], plane: Option<i64>) -> Graph {
        let mut settings = Settings::new("model", "job.toml");
        settings.set("image", "job.toml:1", Setting::List(image.map(Setting::Int).to_vec()));
        plane.into_iter().for_each(|plane| settings.set("plane", "job.toml:2", Setting::Int(plane)));
        let (model, builder) = (make(&settings, None).unwrap(), Builder::new());
        let outputs = model.build(&Build { builder: &builder, batch: 1, grains: 1, training: false });
        builder.output("loss", outputs.loss.value);
        builder.finish().unwrap()
    }

    /// The plane that reaches the classifier is 7 × 7, from larger and from smaller ones.
    #[test]
    fn weights_fit_images_of_any_size() {
        let params = |graph: &Graph| -> Vec<_> {
            graph.params().map(|(id, param)| (param.name.clone(), graph.ty(id).shape.clone())).collect()
        };
        let usual = params(&graph([3, 224, 224], None));
        let first = usual.iter().find(|(name, _)| name == "classifier.0.weight").unwrap();
        assert_eq!(first.1[..], [HIDDEN, 512 * PLANE * PLANE]);
        for image in [[3, 64, 64], [3, 96, 160], [3, 288, 256], [3, 20, 64]] {
            assert_eq!(params(&graph(image, None)), usual, "{image:?}");
        }
        let small = params(&graph([3, 32, 32], Some(1)));
        assert_eq!(small.iter().find(|(name, _)| name == "classifier.0.weight").unwrap().1[..], [HIDDEN, 512]);
    }
}
