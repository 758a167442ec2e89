//! Llama with Hugging Face's names: RMS norms, rotary positions, grouped-query attention, SwiGLU.

use crate::outputs::PERPLEXITY;
use crate::{Better, Build, Decoder, LAYERS_MAX, Mean, Model, ModelKind, Outputs, data_shape, data_vocab};
use kolo_graph::field::{Field, IGNORED};
use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::attention::cached;
use kolo_ops::prelude::*;

pub const KIND: ModelKind =
    ModelKind { name: "llama", doc: "Llama: layers width heads kv_heads hidden context vocab rope norm_eps", make };

#[derive(Clone, Debug)]
struct Llama {
    layers: usize,
    width: usize,
    heads: usize,
    kv_heads: usize,
    hidden: usize,
    context: usize,
    vocab: usize,
    rope: f32,
    norm_eps: f32,
}

/// The usual width of the SwiGLU beside that of the model, in multiples of which it comes.
const HIDDEN_UNIT: usize = 256;

fn make(settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    let context = data_shape(data, "x").map_or(128, |shape| shape.iter().product());
    let (width, heads) = (settings.size("width", 256)?, settings.size("heads", 4)?);
    let llama = Llama {
        layers: settings.count_in("layers", 4, 1, LAYERS_MAX)?,
        width,
        heads,
        kv_heads: settings.size("kv_heads", heads)?,
        hidden: settings.size("hidden", (width * 8 / 3).next_multiple_of(HIDDEN_UNIT))?,
        context: settings.size("context", context)?,
        vocab: settings.size("vocab", data_vocab(data).unwrap_or(1024))?,
        rope: settings.float_in("rope", 10_000.0, 1.0, 1e9)? as f32,
        norm_eps: settings.float_in("norm_eps", 1e-5, 1e-12, 1.0)? as f32,
    };
    if !width.is_multiple_of(2 * heads) {
        let message = format!("is {heads}, which does not cut the width {width} into heads of an even size");
        return Err(settings.wrong("heads", message, "choose a number of heads that divides half of the width"));
    }
    if !heads.is_multiple_of(llama.kv_heads) {
        let message = format!("is {}, which does not divide the {heads} heads", llama.kv_heads);
        return Err(settings.wrong("kv_heads", message, "choose a number that divides `heads`"));
    }
    Ok(Box::new(llama))
}

impl Llama {
    fn linear<'b>(cx: &Build<'b>, name: &str, x: Tensor<'b>, out: usize, deviation: f64) -> Tensor<'b> {
        cx.builder
            .scope(name, || x.linear(cx.builder.param("weight", [out, x.dim(2)], Init::Normal { deviation }), None))
    }

    fn norm<'b>(&self, cx: &Build<'b>, name: &str, x: Tensor<'b>) -> Tensor<'b> {
        cx.builder.scope(name, || x.rms_norm(cx.builder.param("weight", [x.dim(2)], Init::ONES), self.norm_eps))
    }

    /// Turns each head of `[b, t, heads·d]` by its position.
    fn rotate<'b>(&self, x: Tensor<'b>, heads: usize) -> Tensor<'b> {
        let (batch, tokens, width) = (x.dim(0), x.dim(1), x.dim(2));
        let split = x.reshape_to([batch, tokens, heads, width / heads]).permute(&[0, 2, 1, 3]);
        split.rotary(self.rope).permute(&[0, 2, 1, 3]).reshape_to([batch, tokens, width])
    }

    /// Each head of keys or values for all the queries that share it.
    fn shared<'b>(&self, x: Tensor<'b>) -> Tensor<'b> {
        let (batch, tokens, dim) = (x.dim(0), x.dim(1), self.width / self.heads);
        match self.heads / self.kv_heads {
            1 => x,
            times => x
                .reshape_to([batch, tokens, self.kv_heads, 1, dim])
                .repeat(3, times)
                .reshape_to([batch, tokens, self.width]),
        }
    }

    /// Cosines, then sines, of the angles at these positions: `[b, t, d]`. They are those by which [`Llama::rotate`] turns, to
    /// the bit: a pair (1, 0) becomes them.
    fn angles<'b>(&self, cx: &Build<'b>, positions: Tensor<'b>) -> Tensor<'b> {
        let half = self.width / self.heads / 2;
        let [ones, zeros] = [1.0, 0.0].map(|value| cx.builder.full(value, Type::f32([1, 1, self.context, half])));
        let table = ones.concat(&[zeros], 3).rotary(self.rope);
        table.reshape_to([self.context, 2 * half]).embedding(positions)
    }

    /// Turns each head of `[b, t, heads·d]` by these angles.
    fn rotate_by<'b>(x: Tensor<'b>, heads: usize, angles: Tensor<'b>) -> Tensor<'b> {
        let (batch, tokens, width) = (x.dim(0), x.dim(1), x.dim(2));
        let half = width / heads / 2;
        let [cos, sin] =
            [0, 1].map(|at| angles.slice(2, at * half..(at + 1) * half).reshape_to([batch, tokens, 1, half]));
        let pairs = x.reshape_to([batch, tokens, heads, 2 * half]);
        let [first, second] = [0, 1].map(|at| pairs.slice(3, at * half..(at + 1) * half));
        let turned = first.mul_add(cos, second.mul(sin).neg());
        turned.concat(&[second.mul_add(cos, first.mul(sin))], 3).reshape_to([batch, tokens, width])
    }

    /// Queries, keys and values; `rotate` turns so many heads.
    fn projected<'b>(
        &self,
        cx: &Build<'b>,
        x: Tensor<'b>,
        rotate: impl Fn(Tensor<'b>, usize) -> Tensor<'b>,
    ) -> [Tensor<'b>; 3] {
        let shared_width = self.width / self.heads * self.kv_heads;
        let q = rotate(Self::linear(cx, "q_proj", x, self.width, 0.02), self.heads);
        let k = rotate(Self::linear(cx, "k_proj", x, shared_width, 0.02), self.kv_heads);
        let v = Self::linear(cx, "v_proj", x, shared_width, 0.02);
        [q, self.shared(k), self.shared(v)]
    }

    /// A layer whose attention is `attend`.
    fn block<'b>(&self, cx: &Build<'b>, x: Tensor<'b>, attend: impl Fn(Tensor<'b>) -> Tensor<'b>) -> Tensor<'b> {
        // The residual stream adds up twice per layer; its writers start smaller by that much.
        let residual = 0.02 / (2.0 * self.layers as f64).sqrt();
        let normed = self.norm(cx, "input_layernorm", x);
        let attended = || Self::linear(cx, "o_proj", attend(normed), self.width, residual);
        let x = x.add(cx.builder.scope("self_attn", attended));
        let normed = self.norm(cx, "post_attention_layernorm", x);
        let mlp = cx.builder.scope("mlp", || {
            let gate = Self::linear(cx, "gate_proj", normed, self.hidden, 0.02).silu();
            let up = Self::linear(cx, "up_proj", normed, self.hidden, 0.02);
            Self::linear(cx, "down_proj", gate.mul(up), self.width, residual)
        });
        x.add(mlp)
    }

    /// Embeddings of the tokens, `[b, t, width]`.
    fn embedded<'b>(&self, cx: &Build<'b>, tokens: Tensor<'b>) -> Tensor<'b> {
        self.table(cx, "model.embed_tokens").embedding(tokens)
    }

    fn table<'b>(&self, cx: &Build<'b>, name: &str) -> Tensor<'b> {
        let init = Init::Normal { deviation: 0.02 };
        cx.builder.scope(name, || cx.builder.param("weight", [self.vocab, self.width], init))
    }

    /// Logits, from what the last layer leaves.
    fn head<'b>(&self, cx: &Build<'b>, x: Tensor<'b>) -> Tensor<'b> {
        self.norm(cx, "model.norm", x).linear(self.table(cx, "lm_head"), None)
    }
}

impl Model for Llama {
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
        let attend = |x: Tensor<'b>| {
            let [q, k, v] = self.projected(cx, x, |x, heads| self.rotate(x, heads));
            q.attention(k, v, None, self.heads, true)
        };
        let mut x = self.embedded(cx, tokens);
        for layer in 0..self.layers {
            x = cx.builder.scope(format!("model.layers.{layer}"), || self.block(cx, x, attend));
        }
        let logits = self.head(cx, x);
        let ignored = cx.builder.full(f64::from(IGNORED), targets.ty());
        let counted = targets.not_equal(ignored).cast(DType::F32);
        let right = logits.argmax(2).equal(targets).cast(DType::F32).mul(counted);
        let (loss, number) = logits.cross_entropy_sum(targets, i64::from(IGNORED), 0.0);
        let of = targets.ty().elements();
        Outputs::new(Mean::counted(loss, number, of), logits)
            .metric("accuracy", Mean::counted(right.sum_all(), number, of))
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

impl Decoder for Llama {
    fn context(&self) -> usize {
        self.context
    }

    fn vocab(&self) -> usize {
        self.vocab
    }

    fn build<'b>(&self, cx: &Build<'b>, tokens: Tensor<'b>, positions: Tensor<'b>) -> Tensor<'b> {
        let dim = self.width / self.heads;
        // Heads that queries share are kept once for each of them: attention reads them so.
        let keys_type = cached::keys_type(cx.batch, self.heads, self.context, dim);
        let values_type = cached::values_type(cx.batch, self.heads, self.context, dim);
        let angles = self.angles(cx, positions);
        let attend = |x: Tensor<'b>| {
            let [q, k, v] = self.projected(cx, x, |x, heads| Self::rotate_by(x, heads, angles));
            let state = |name: &str, ty: &Type| cx.builder.state(name, ty.clone(), Init::ZEROS);
            let (keys, values) = (state("cache.keys", &keys_type), state("cache.values", &values_type));
            let [mixed, new_keys, new_values] = q.concat(&[k, v], 2).cached_attention(keys, values, positions);
            cx.builder.update(keys, new_keys);
            cx.builder.update(values, new_values);
            mixed
        };
        let mut x = self.embedded(cx, tokens);
        for layer in 0..self.layers {
            x = cx.builder.scope(format!("model.layers.{layer}"), || self.block(cx, x, attend));
        }
        let new = x.dim(1);
        let last = x.slice(1, new.saturating_sub(1)..new);
        self.head(cx, last).reshape_to([cx.batch, self.vocab])
    }
}
