//! Inception V3 with torchvision's names, without the auxiliary classifier.

use crate::{Build, Model, ModelKind, Outputs, classify, data_classes};
use kolo_graph::field::Field;
use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::prelude::*;

pub const KIND: ModelKind = ModelKind { name: "inception_v3", doc: "Inception V3: image classes dropout", make };

/// The smallest image of which its poolings leave something.
const IMAGE_MIN: usize = 75;

#[derive(Debug)]
struct Inception {
    image: Vec<usize>,
    classes: usize,
    dropout: f32,
}

fn make(settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    let image = crate::cnn::image(settings, data, [3, 299, 299])?;
    if image[1].min(image[2]) < IMAGE_MIN {
        let message = format!("is {image:?}, which is too small for Inception V3");
        return Err(settings.wrong("image", message, format!("use images of at least {IMAGE_MIN} × {IMAGE_MIN}")));
    }
    Ok(Box::new(Inception {
        image,
        classes: settings.size("classes", data_classes(data, "y").unwrap_or(1000))?,
        dropout: settings.float_in("dropout", 0.5, 0.0, 0.99)? as f32,
    }))
}

/// A convolution: its name, channels, kernel, and what surrounds the image.
type Step = (&'static str, usize, [usize; 2], [usize; 2]);

/// Convolution, batch norm, relu.
fn step<'b>(cx: &Build<'b>, x: Tensor<'b>, (name, channels, kernel, padding): Step, stride: usize) -> Tensor<'b> {
    cx.builder.scope(name, || {
        let y = cx.builder.scope("conv", || {
            let shape = [channels, x.dim(1), kernel[0], kernel[1]];
            let deviation = (2.0 / (channels * kernel[0] * kernel[1]) as f64).sqrt();
            let weight = cx.builder.param("weight", shape, Init::Normal { deviation });
            x.conv2d(weight, None, [stride; 2], padding, [1, 1], 1)
        });
        cx.batch_norm("bn", y).relu()
    })
}

/// Steps one after the other.
fn chain<'b>(cx: &Build<'b>, x: Tensor<'b>, steps: &[Step]) -> Tensor<'b> {
    steps.iter().fold(x, |x, one| step(cx, x, *one, 1))
}

fn join<'b>(branches: &[Tensor<'b>]) -> Tensor<'b> {
    branches[0].concat(&branches[1..], 1)
}

/// The mean around each place.
fn pooled<'b>(cx: &Build<'b>, x: Tensor<'b>, channels: usize) -> Tensor<'b> {
    step(cx, x.avg_pool2d([3, 3], [1, 1], [1, 1]), ("branch_pool", channels, [1, 1], [0, 0]), 1)
}

const POINT: [usize; 2] = [1, 1];
const NONE: [usize; 2] = [0, 0];

fn block_a<'b>(cx: &Build<'b>, x: Tensor<'b>, pool: usize) -> Tensor<'b> {
    let five = [("branch5x5_1", 48, POINT, NONE), ("branch5x5_2", 64, [5, 5], [2, 2])];
    let three = [
        ("branch3x3dbl_1", 64, POINT, NONE),
        ("branch3x3dbl_2", 96, [3, 3], [1, 1]),
        ("branch3x3dbl_3", 96, [3, 3], [1, 1]),
    ];
    let one = step(cx, x, ("branch1x1", 64, POINT, NONE), 1);
    join(&[one, chain(cx, x, &five), chain(cx, x, &three), pooled(cx, x, pool)])
}

fn block_b<'b>(cx: &Build<'b>, x: Tensor<'b>) -> Tensor<'b> {
    let three = step(cx, x, ("branch3x3", 384, [3, 3], NONE), 2);
    let double = chain(cx, x, &[("branch3x3dbl_1", 64, POINT, NONE), ("branch3x3dbl_2", 96, [3, 3], [1, 1])]);
    join(&[three, step(cx, double, ("branch3x3dbl_3", 96, [3, 3], NONE), 2), x.max_pool2d([3, 3], [2, 2], NONE)])
}

fn block_c<'b>(cx: &Build<'b>, x: Tensor<'b>, width: usize) -> Tensor<'b> {
    const WIDE: ([usize; 2], [usize; 2]) = ([1, 7], [0, 3]);
    const HIGH: ([usize; 2], [usize; 2]) = ([7, 1], [3, 0]);
    let seven = [
        ("branch7x7_1", width, POINT, NONE),
        ("branch7x7_2", width, WIDE.0, WIDE.1),
        ("branch7x7_3", 192, HIGH.0, HIGH.1),
    ];
    let double = [
        ("branch7x7dbl_1", width, POINT, NONE),
        ("branch7x7dbl_2", width, HIGH.0, HIGH.1),
        ("branch7x7dbl_3", width, WIDE.0, WIDE.1),
        ("branch7x7dbl_4", width, HIGH.0, HIGH.1),
        ("branch7x7dbl_5", 192, WIDE.0, WIDE.1),
    ];
    let one = step(cx, x, ("branch1x1", 192, POINT, NONE), 1);
    join(&[one, chain(cx, x, &seven), chain(cx, x, &double), pooled(cx, x, 192)])
}

fn block_d<'b>(cx: &Build<'b>, x: Tensor<'b>) -> Tensor<'b> {
    let three = step(cx, x, ("branch3x3_1", 192, POINT, NONE), 1);
    let seven = [
        ("branch7x7x3_1", 192, POINT, NONE),
        ("branch7x7x3_2", 192, [1, 7], [0, 3]),
        ("branch7x7x3_3", 192, [7, 1], [3, 0]),
    ];
    let three = step(cx, three, ("branch3x3_2", 320, [3, 3], NONE), 2);
    let seven = step(cx, chain(cx, x, &seven), ("branch7x7x3_4", 192, [3, 3], NONE), 2);
    join(&[three, seven, x.max_pool2d([3, 3], [2, 2], NONE)])
}

fn block_e<'b>(cx: &Build<'b>, x: Tensor<'b>) -> Tensor<'b> {
    let fork = |x: Tensor<'b>, wide: &'static str, high: &'static str| {
        join(&[step(cx, x, (wide, 384, [1, 3], [0, 1]), 1), step(cx, x, (high, 384, [3, 1], [1, 0]), 1)])
    };
    let one = step(cx, x, ("branch1x1", 320, POINT, NONE), 1);
    let three = step(cx, x, ("branch3x3_1", 384, POINT, NONE), 1);
    let double = chain(cx, x, &[("branch3x3dbl_1", 448, POINT, NONE), ("branch3x3dbl_2", 384, [3, 3], [1, 1])]);
    let (three, double) =
        (fork(three, "branch3x3_2a", "branch3x3_2b"), fork(double, "branch3x3dbl_3a", "branch3x3dbl_3b"));
    join(&[one, three, double, pooled(cx, x, 192)])
}

impl Model for Inception {
    fn fields(&self) -> Vec<Field> {
        vec![Field::real("x", &self.image), Field::index("y", &[], self.classes)]
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        let x = step(cx, cx.field(&fields[0]), ("Conv2d_1a_3x3", 32, [3, 3], NONE), 2);
        let x = chain(cx, x, &[("Conv2d_2a_3x3", 32, [3, 3], NONE), ("Conv2d_2b_3x3", 64, [3, 3], [1, 1])]);
        let x = x.max_pool2d([3, 3], [2, 2], NONE);
        let x = chain(cx, x, &[("Conv2d_3b_1x1", 80, POINT, NONE), ("Conv2d_4a_3x3", 192, [3, 3], NONE)]);
        let mut x = x.max_pool2d([3, 3], [2, 2], NONE);
        let inside = |name: &str, make: &dyn Fn() -> Tensor<'b>| cx.builder.scope(name, make);
        for (name, pool) in [("Mixed_5b", 32), ("Mixed_5c", 64), ("Mixed_5d", 64)] {
            x = inside(name, &|| block_a(cx, x, pool));
        }
        x = inside("Mixed_6a", &|| block_b(cx, x));
        for (name, width) in [("Mixed_6b", 128), ("Mixed_6c", 160), ("Mixed_6d", 160), ("Mixed_6e", 192)] {
            x = inside(name, &|| block_c(cx, x, width));
        }
        x = inside("Mixed_7a", &|| block_d(cx, x));
        for name in ["Mixed_7b", "Mixed_7c"] {
            x = inside(name, &|| block_e(cx, x));
        }
        let x = cx.dropout("dropout", x.mean(&[2, 3]), self.dropout);
        classify(cx.linear("fc", x, self.classes), cx.field(&fields[1]), 0.0)
    }
}
