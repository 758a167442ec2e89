//! Stacked LSTM layers over tokens: a class for each token, such as the next one or a tag, or one for the whole row.

use crate::{Build, LAYERS_MAX, Model, Outputs, classify, data_classes, data_shape};
use kolo_graph::field::{Field, Kind};
use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::prelude::*;

#[derive(Debug)]
struct TokenLstm {
    layers: usize,
    width: usize,
    context: usize,
    vocab: usize,
    classes: usize,
    /// A class for each token, not one for all.
    each: bool,
}

/// Whether these data are rows of tokens.
pub(crate) fn fits(data: Option<&[Field]>) -> bool {
    let is_tokens = |field: &Field| field.name == "x" && field.kind != Kind::Real && field.shape.len() == 1;
    data.is_some_and(|data| data.iter().any(is_tokens))
}

pub(crate) fn make(settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    let context = data_shape(data, "x").map_or(64, |shape| shape.iter().product());
    let vocab = settings.size("vocab", data_classes(data, "x").unwrap_or(1024))?;
    Ok(Box::new(TokenLstm {
        layers: settings.count_in("layers", 2, 1, LAYERS_MAX)?,
        width: settings.size("width", 64)?,
        context: settings.size("context", context)?,
        vocab,
        classes: settings.size("classes", data_classes(data, "y").unwrap_or(vocab))?,
        each: data_shape(data, "y").is_none_or(|shape| !shape.is_empty()),
    }))
}

impl Model for TokenLstm {
    fn fields(&self) -> Vec<Field> {
        let targets: &[usize] = if self.each { &[self.context] } else { &[] };
        vec![Field::index("x", &[self.context], self.vocab), Field::index("y", targets, self.classes)]
    }

    fn learning_rate(&self) -> f64 {
        // Wider ones want smaller steps.
        (0.64 / self.width as f64).clamp(1e-3, 1e-2)
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        let words = cx.embedding("embedding", cx.field(&fields[0]), self.vocab, self.width);
        let mut hidden = cx.lstm("lstm", words, self.width, self.layers);
        if !self.each {
            hidden = hidden.slice(1, self.context - 1..self.context).reshape_to([cx.batch, self.width]);
        }
        classify(cx.linear("head", hidden, self.classes), cx.field(&fields[1]), 0.0)
    }

    fn tokens_per_sample(&self) -> Option<usize> {
        Some(self.context)
    }
}
