//! A multi-layer perceptron on flattened inputs.

use crate::{Build, Model, ModelKind, Outputs, classify, data_classes, data_shape};
use kolo_graph::field::Field;
use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::prelude::*;

pub const KIND: ModelKind =
    ModelKind { name: "mlp", doc: "multi-layer perceptron: inputs hidden classes activation dropout", make };

#[derive(Debug)]
struct Mlp {
    input: Vec<usize>,
    hidden: Vec<usize>,
    classes: usize,
    activation: &'static str,
    dropout: f32,
}

fn make(settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    let given = data_shape(data, "x");
    let inputs = settings.size("inputs", given.as_ref().map_or(784, |shape| shape.iter().product()))?;
    Ok(Box::new(Mlp {
        input: given.filter(|shape| shape.iter().product::<usize>() == inputs).unwrap_or(vec![inputs]),
        hidden: settings.counts("hidden", &[512, 512])?,
        classes: settings.size("classes", data_classes(data, "y").unwrap_or(10))?,
        activation: settings.choice("activation", &["relu", "tanh", "gelu", "sigmoid", "silu"])?,
        dropout: settings.float_in("dropout", 0.0, 0.0, 0.99)? as f32,
    }))
}

impl Model for Mlp {
    fn fields(&self) -> Vec<Field> {
        vec![Field::real("x", &self.input), Field::index("y", &[], self.classes)]
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        let mut x = cx.field(&fields[0]).reshape_to([cx.batch, self.input.iter().product()]);
        for (at, width) in self.hidden.iter().enumerate() {
            x = cx.linear(&format!("layers.{at}"), x, *width).activate(self.activation);
            x = cx.dropout(&format!("dropout.{at}"), x, self.dropout);
        }
        let logits = cx.linear(&format!("layers.{}", self.hidden.len()), x, self.classes);
        classify(logits, cx.field(&fields[1]), 0.0)
    }
}
