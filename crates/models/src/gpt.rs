//! GPT-2 with Hugging Face's names and layouts.

use crate::outputs::PERPLEXITY;
use crate::{Better, Build, Decoder, LAYERS_MAX, Mean, Model, ModelKind, Outputs, data_shape, data_vocab};
use kolo_graph::field::{Field, IGNORED};
use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::attention::cached;
use kolo_ops::prelude::*;

pub const KIND: ModelKind =
    ModelKind { name: "gpt", doc: "GPT-2: layers width heads context vocab dropout tied", make };

#[derive(Clone, Debug)]
struct Gpt {
    layers: usize,
    width: usize,
    heads: usize,
    context: usize,
    vocab: usize,
    dropout: f32,
    /// Whether the head is the table of words, as in GPT-2, or a matrix of its own.
    tied: bool,
}

fn make(settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    let context = data_shape(data, "x").map_or(128, |shape| shape.iter().product());
    let gpt = Gpt {
        layers: settings.count_in("layers", 4, 1, LAYERS_MAX)?,
        width: settings.size("width", 256)?,
        heads: settings.size("heads", 4)?,
        context: settings.size("context", context)?,
        vocab: settings.size("vocab", data_vocab(data).unwrap_or(1024))?,
        dropout: settings.float_in("dropout", 0.0, 0.0, 0.99)? as f32,
        tied: settings.bool("tied", true)?,
    };
    if !gpt.width.is_multiple_of(gpt.heads) {
        let message = format!("is {}, which does not divide the width {}", gpt.heads, gpt.width);
        return Err(settings.wrong("heads", message, "choose a number of heads that divides the width"));
    }
    Ok(Box::new(gpt))
}

impl Gpt {
    /// Hugging Face's `Conv1D`: the weight is `[in, out]`.
    fn conv1d<'b>(cx: &Build<'b>, name: &str, x: Tensor<'b>, out: usize, deviation: f64) -> Tensor<'b> {
        cx.builder.scope(name, || {
            let weight = cx.builder.param("weight", [x.dim(2), out], Init::Normal { deviation });
            x.linear_in_out(weight, Some(cx.builder.param("bias", [out], Init::ZEROS)))
        })
    }

    fn block<'b>(&self, cx: &Build<'b>, x: Tensor<'b>, attend: impl Fn(Tensor<'b>) -> Tensor<'b>) -> Tensor<'b> {
        // The residual stream adds up twice per layer; its writers start smaller by that much.
        let residual = 0.02 / (2.0 * self.layers as f64).sqrt();
        let qkv = Self::conv1d(cx, "attn.c_attn", cx.layer_norm("ln_1", x), 3 * self.width, 0.02);
        let mixed = Self::conv1d(cx, "attn.c_proj", attend(qkv), self.width, residual);
        let x = x.add(cx.dropout("attn.dropout", mixed, self.dropout));
        let hidden = Self::conv1d(cx, "mlp.c_fc", cx.layer_norm("ln_2", x), 4 * self.width, 0.02).gelu_tanh();
        let hidden = Self::conv1d(cx, "mlp.c_proj", hidden, self.width, residual);
        x.add(cx.dropout("mlp.dropout", hidden, self.dropout))
    }

    /// The tables of words and of positions.
    fn tables<'b>(&self, cx: &Build<'b>) -> [Tensor<'b>; 2] {
        let init = Init::Normal { deviation: 0.02 };
        [("wte", self.vocab), ("wpe", self.context)]
            .map(|(name, rows)| cx.builder.scope(name, || cx.builder.param("weight", [rows, self.width], init)))
    }

    /// Logits, from what the last block leaves.
    fn head<'b>(&self, cx: &Build<'b>, x: Tensor<'b>, words: Tensor<'b>) -> Tensor<'b> {
        let init = Init::Normal { deviation: 0.02 };
        let own = || cx.builder.scope("lm_head", || cx.builder.param("weight", [self.vocab, self.width], init));
        cx.layer_norm("ln_f", x).linear(if self.tied { words } else { own() }, None)
    }
}

impl Model for Gpt {
    fn fields(&self) -> Vec<Field> {
        vec![Field::index("x", &[self.context], self.vocab), Field::index("y", &[self.context], self.vocab)]
    }

    fn learning_rate(&self) -> f64 {
        // Wider ones want smaller steps.
        (0.256 / self.width as f64).clamp(1e-4, 1e-3)
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        let (tokens, targets) = (cx.field(&fields[0]), cx.field(&fields[1]));
        let [words, places] = self.tables(cx);
        let mut x = cx.dropout("dropout", words.embedding(tokens).add(places), self.dropout);
        for layer in 0..self.layers {
            x = cx
                .builder
                .scope(format!("h.{layer}"), || self.block(cx, x, |qkv| qkv.self_attention(self.heads, true)));
        }
        let logits = self.head(cx, x, words);
        let ignored = cx.builder.full(f64::from(IGNORED), targets.ty());
        let counted = targets.not_equal(ignored).cast(DType::F32);
        let right = logits.argmax(2).equal(targets).cast(DType::F32).mul(counted);
        // A sample is exactly right when as many targets are right as are counted.
        let exact = right.sum(&[1]).at_least(counted.sum(&[1])).mean_all();
        let (loss, number) = logits.cross_entropy_sum(targets, i64::from(IGNORED), 0.0);
        let of = targets.ty().elements();
        Outputs::new(Mean::counted(loss, number, of), logits)
            .metric("accuracy", Mean::counted(right.sum_all(), number, of))
            .metric("exact_match", exact)
    }

    fn derive(&self, loss: f64, metrics: &mut Vec<(String, f64)>) {
        metrics.push((PERPLEXITY.into(), loss.exp()));
    }

    fn better(&self, metric: &str) -> Better {
        if metric == PERPLEXITY { Better::Lower } else { Better::Higher }
    }

    fn tokens_per_sample(&self) -> Option<usize> {
        Some(self.context)
    }

    fn layers(&self) -> Option<usize> {
        Some(self.layers)
    }

    fn with_layers(&self, layers: usize) -> Option<Box<dyn Model>> {
        Some(Box::new(Self { layers, ..self.clone() }))
    }

    fn decoder(&self) -> Option<&dyn Decoder> {
        Some(self)
    }
}

impl Decoder for Gpt {
    fn context(&self) -> usize {
        self.context
    }

    fn vocab(&self) -> usize {
        self.vocab
    }

    fn build<'b>(&self, cx: &Build<'b>, tokens: Tensor<'b>, positions: Tensor<'b>) -> Tensor<'b> {
        let [words, places] = self.tables(cx);
        let dim = self.width / self.heads;
        let keys_type = cached::keys_type(cx.batch, self.heads, self.context, dim);
        let values_type = cached::values_type(cx.batch, self.heads, self.context, dim);
        let attend = |qkv: Tensor<'b>| {
            let state = |name: &str, ty: &Type| cx.builder.state(name, ty.clone(), Init::ZEROS);
            let (keys, values) = (state("cache.keys", &keys_type), state("cache.values", &values_type));
            let [mixed, new_keys, new_values] = qkv.cached_attention(keys, values, positions);
            cx.builder.update(keys, new_keys);
            cx.builder.update(values, new_values);
            mixed
        };
        let mut x = words.embedding(tokens).add(places.embedding(positions));
        for layer in 0..self.layers {
            x = cx.builder.scope(format!("h.{layer}"), || self.block(cx, x, attend));
        }
        let new = x.dim(1);
        let last = x.slice(1, new.saturating_sub(1)..new);
        self.head(cx, last, words).reshape_to([cx.batch, self.vocab])
    }
}
