//! A multi-layer perceptron on flattened inputs: a classifier, or, if the data's target is numbers, a regression.

use crate::{Better, Build, Model, ModelKind, Outputs, classify, data_classes, data_shape, layer_sizes};
use kolo_graph::field::{Field, Kind};
use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::prelude::*;

pub const KIND: ModelKind =
    ModelKind { name: "mlp", doc: "multi-layer perceptron: inputs hidden classes outputs activation dropout", make };

#[derive(Debug)]
struct Mlp {
    input: Vec<usize>,
    hidden: Vec<usize>,
    target: Field,
    activation: &'static str,
    dropout: f32,
}

fn make(settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    let given = data_shape(data, "x");
    let inputs = settings.size("inputs", given.as_ref().map_or(784, |shape| shape.iter().product()))?;
    let numbers = data.and_then(|data| data.iter().find(|field| field.name == "y" && field.kind == Kind::Real));
    let target = match numbers {
        Some(field) => {
            let outputs = settings.size("outputs", field.elements())?;
            if outputs != field.elements() {
                let message = format!("is {outputs}, but the data's target has {} numbers", field.elements());
                return Err(settings.wrong("outputs", message, "leave it out"));
            }
            field.clone()
        }
        // A model that is used without its data.
        None if data.is_none() && settings.has("outputs") => Field::real("y", &[settings.size("outputs", 1)?]),
        None => Field::index("y", &[], settings.size("classes", data_classes(data, "y").unwrap_or(10))?),
    };
    Ok(Box::new(Mlp {
        input: given.filter(|shape| shape.iter().product::<usize>() == inputs).unwrap_or(vec![inputs]),
        hidden: layer_sizes(settings, "hidden", &[512, 512])?,
        target,
        activation: settings.choice("activation", &["relu", "tanh", "gelu", "sigmoid", "silu"])?,
        dropout: settings.float_in("dropout", 0.0, 0.0, 0.99)? as f32,
    }))
}

impl Model for Mlp {
    fn fields(&self) -> Vec<Field> {
        vec![Field::real("x", &self.input), self.target.clone()]
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        let mut x = cx.field(&fields[0]).reshape_to([cx.batch, self.input.iter().product()]);
        for (at, width) in self.hidden.iter().enumerate() {
            x = cx.linear(&format!("layers.{at}"), x, *width).activate(self.activation);
            x = cx.dropout(&format!("dropout.{at}"), x, self.dropout);
        }
        let head = format!("layers.{}", self.hidden.len());
        match self.target.kind {
            Kind::Index { classes } => classify(cx.linear(&head, x, classes), cx.field(&fields[1]), 0.0),
            Kind::Real => {
                let outputs = self.target.elements();
                let values = cx.linear(&head, x, outputs);
                let loss = values.mse(cx.field(&fields[1]).reshape_to([cx.batch, outputs]));
                Outputs::new(loss, values).metric("mse", loss)
            }
        }
    }

    fn better(&self, metric: &str) -> Better {
        if metric == "mse" { Better::Lower } else { Better::Higher }
    }
}
