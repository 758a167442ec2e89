//! Residual networks with torchvision's names. Images below 64 pixels get the usual small stem: one 3×3 convolution and no
//! pooling, so that there is something left for four stages to halve.

use crate::layers::Conv;
use crate::{Build, Model, ModelKind, Outputs, classify, data_classes};
use kolo_graph::field::Field;
use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::prelude::*;

pub const RESNET18: ModelKind = ModelKind {
    name: "resnet18",
    doc: "ResNet-18: image classes width smoothing",
    make: |s, d| make(s, d, false, [2, 2, 2, 2]),
};
pub const RESNET50: ModelKind = ModelKind {
    name: "resnet50",
    doc: "ResNet-50: image classes width smoothing",
    make: |s, d| make(s, d, true, [3, 4, 6, 3]),
};
pub const RESNET101: ModelKind = ModelKind {
    name: "resnet101",
    doc: "ResNet-101: image classes width smoothing",
    make: |s, d| make(s, d, true, [3, 4, 23, 3]),
};
pub const RESNET152: ModelKind = ModelKind {
    name: "resnet152",
    doc: "ResNet-152: image classes width smoothing",
    make: |s, d| make(s, d, true, [3, 8, 36, 3]),
};

const SMALL_IMAGE: usize = 64;

#[derive(Debug)]
struct ResNet {
    image: Vec<usize>,
    classes: usize,
    /// Channels of the first stage; each of the others has twice those of the one before.
    width: usize,
    smoothing: f32,
    bottleneck: bool,
    depths: [usize; 4],
}

fn make(
    settings: &Settings,
    data: Option<&[Field]>,
    bottleneck: bool,
    depths: [usize; 4],
) -> Result<Box<dyn Model>, SettingError> {
    let default = if data.is_none() && bottleneck { [3, 224, 224] } else { [3, 32, 32] };
    let classes = data_classes(data, "y").unwrap_or(if default[1] == 224 { 1000 } else { 10 });
    Ok(Box::new(ResNet {
        image: crate::cnn::image(settings, data, default)?,
        classes: settings.size("classes", classes)?,
        width: settings.size("width", 64)?,
        smoothing: settings.float_in("smoothing", 0.0, 0.0, 0.9)? as f32,
        bottleneck,
        depths,
    }))
}

impl ResNet {
    fn block<'b>(&self, cx: &Build<'b>, x: Tensor<'b>, width: usize, stride: usize) -> Tensor<'b> {
        let out = width * if self.bottleneck { 4 } else { 1 };
        let normed = |at: usize, x, conv: Conv| {
            let y = cx.conv2d(&format!("conv{at}"), x, conv.before_norm());
            cx.batch_norm(&format!("bn{at}"), y)
        };
        let y = match self.bottleneck {
            false => {
                let y = normed(1, x, Conv::same(width, 3).stride(stride)).relu();
                normed(2, y, Conv::same(out, 3))
            }
            true => {
                let y = normed(1, x, Conv::same(width, 1)).relu();
                let y = normed(2, y, Conv::same(width, 3).stride(stride)).relu();
                normed(3, y, Conv::same(out, 1))
            }
        };
        let shortcut = if stride == 1 && x.dim(1) == out {
            x
        } else {
            let y = cx.conv2d("downsample.0", x, Conv::same(out, 1).stride(stride).before_norm());
            cx.batch_norm("downsample.1", y)
        };
        y.add(shortcut).relu()
    }
}

impl Model for ResNet {
    fn fields(&self) -> Vec<Field> {
        vec![Field::real("x", &self.image), Field::index("y", &[], self.classes)]
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        let x = cx.field(&fields[0]);
        let small = self.image[1].min(self.image[2]) < SMALL_IMAGE;
        let stem = if small { Conv::same(self.width, 3) } else { Conv::same(self.width, 7).stride(2) };
        let mut x = cx.batch_norm("bn1", cx.conv2d("conv1", x, stem.before_norm())).relu();
        if !small {
            x = x.max_pool2d([3, 3], [2, 2], [1, 1]);
        }
        for (stage, depth) in self.depths.iter().enumerate() {
            for at in 0..*depth {
                let stride = if stage > 0 && at == 0 { 2 } else { 1 };
                x = cx
                    .builder
                    .scope(format!("layer{}.{at}", stage + 1), || self.block(cx, x, self.width << stage, stride));
            }
        }
        let x = x.mean(&[2, 3]);
        classify(cx.linear("fc", x, self.classes), cx.field(&fields[1]), self.smoothing)
    }
}
