//! Stacked LSTM layers and a linear head on the last step: forecasting.

use crate::{Better, Build, LAYERS_MAX, Model, ModelKind, Outputs, data_shape, token_lstm};
use kolo_graph::field::Field;
use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::prelude::*;

pub const KIND: ModelKind =
    ModelKind { name: "lstm", doc: "LSTM forecaster: layers width context features outputs", make };

#[derive(Debug)]
struct Lstm {
    layers: usize,
    width: usize,
    context: usize,
    features: usize,
    outputs: usize,
}

fn make(settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    if token_lstm::fits(data) {
        return token_lstm::make(settings, data);
    }
    let x = data_shape(data, "x").filter(|shape| shape.len() == 2).unwrap_or(vec![64, 1]);
    let y = data_shape(data, "y").map_or(1, |shape| shape.iter().product());
    Ok(Box::new(Lstm {
        layers: settings.count_in("layers", 2, 1, LAYERS_MAX)?,
        width: settings.size("width", 64)?,
        context: settings.size("context", x[0])?,
        features: settings.size("features", x[1])?,
        outputs: settings.size("outputs", y)?,
    }))
}

impl Model for Lstm {
    fn fields(&self) -> Vec<Field> {
        vec![Field::real("x", &[self.context, self.features]), Field::real("y", &[self.outputs])]
    }

    fn learning_rate(&self) -> f64 {
        // Wider ones want smaller steps.
        (0.64 / self.width as f64).clamp(1e-3, 1e-2)
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        let (x, target) = (cx.field(&fields[0]), cx.field(&fields[1]));
        let hidden = cx.lstm("lstm", x, self.width, self.layers);
        let last = |t: Tensor<'b>| t.slice(1, self.context - 1..self.context).reshape_to([cx.batch, t.dim(2)]);
        let forecast = cx.linear("head", last(hidden), self.outputs);
        let loss = forecast.mse(target);
        let outputs = Outputs::new(loss, forecast).metric("mse", loss);
        match self.features == self.outputs {
            true => outputs.metric("naive_mse", last(x).mse(target)),
            false => outputs,
        }
    }

    /// `gain`: how many times smaller the error is than that of forecasting the last value again.
    fn derive(&self, _: f64, metrics: &mut Vec<(String, f64)>) {
        let find = |name: &str| metrics.iter().find(|(key, _)| key == name).map(|(_, value)| *value);
        if let (Some(mse), Some(naive)) = (find("mse"), find("naive_mse")) {
            metrics.push(("gain".into(), naive / mse));
        }
    }

    fn better(&self, metric: &str) -> Better {
        match metric {
            "mse" | "naive_mse" => Better::Lower,
            _ => Better::Higher,
        }
    }
}
