//! The model zoo, written against the public builder API and nothing private.
//!
//! A model is a struct made from its section of the job file. It says which fields it wants and builds its forward graph
//! for one grain; everything else (backward, update, evaluation) comes from that. Parameter names and layouts are those
//! of PyTorch and Hugging Face, so that their weights map one to one.

pub mod alexnet;
pub mod cnn;
pub mod gpt;
pub mod inception;
pub mod layers;
pub mod llama;
pub mod lstm;
pub mod mlp;
pub mod outputs;
pub mod resnet;
mod token_lstm;
pub mod vgg;

pub use outputs::{Better, Counted, Mean, Outputs, classify};

use kolo_graph::field::{Field, Kind};
use kolo_graph::settings::{SettingError, Settings, nearest};
use kolo_graph::{Builder, DType, Tensor, Type};
use std::fmt::Debug;

/// What a model builds with.
#[derive(Clone, Copy, Debug)]
pub struct Build<'b> {
    pub builder: &'b Builder,
    /// Samples per grain.
    pub batch: usize,
    /// Grains per step; statistics of batches are averaged over them.
    pub grains: usize,
    /// Training, as opposed to evaluation: dropout drops, batch norm measures.
    pub training: bool,
}

impl<'b> Build<'b> {
    /// The input of one field, with the batch dim in front.
    pub fn field(&self, field: &Field) -> Tensor<'b> {
        let mut shape = vec![self.batch];
        shape.extend(&field.shape);
        let dtype = if matches!(field.kind, Kind::Real) { DType::F32 } else { DType::I32 };
        self.builder.input(&field.name, Type::new(dtype, shape))
    }

    /// The words that key random numbers: [key, key, step, first sample of the grain].
    pub fn rng(&self) -> Tensor<'b> {
        self.builder.rng()
    }
}

pub trait Model: Debug + Send + Sync {
    /// Inputs and targets of one sample.
    fn fields(&self) -> Vec<Field>;

    /// The forward graph of one grain.
    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b>;

    /// Adds metrics that follow from the averaged ones.
    fn derive(&self, _loss: f64, _metrics: &mut Vec<(String, f64)>) {}

    /// Which values of one of its metrics are the better ones, derived metrics among them: early stopping and the best checkpoint
    /// follow it. Of the loss it is not asked.
    fn better(&self, metric: &str) -> Better {
        Better::by_name(metric)
    }

    /// The learning rate of Adam and AdamW if the job names none.
    fn learning_rate(&self) -> f64 {
        1e-3
    }

    /// Tokens per sample, for models that read text.
    fn tokens_per_sample(&self) -> Option<usize> {
        None
    }

    /// How many layers it repeats, if it can be built with another number of them.
    fn layers(&self) -> Option<usize> {
        None
    }

    /// The same model with so many layers: what a plan counts of a model of many.
    fn with_layers(&self, _layers: usize) -> Option<Box<dyn Model>> {
        None
    }

    /// How it continues a text token by token, if it is a language model that can.
    fn decoder(&self) -> Option<&dyn Decoder> {
        None
    }
}

/// A language model that keeps what it has read of a text, so that the next token costs no more than one.
pub trait Decoder: Debug + Send + Sync {
    /// Tokens of a text that it can see at a time.
    fn context(&self) -> usize;

    /// Tokens that it knows.
    fn vocab(&self) -> usize;

    /// The graph of reading some more tokens `[batch, new]` at their positions in the text, both i32: logits
    /// `[batch, vocab]` of what follows the last of them. What it keeps of them are states of the graph, each a name of its
    /// own, with updates. Parameters have the names that training gave them.
    fn build<'b>(&self, cx: &Build<'b>, tokens: Tensor<'b>, positions: Tensor<'b>) -> Tensor<'b>;
}

/// Makes a model from its settings and, if the data is known already, its fields.
pub type Make = fn(&Settings, Option<&[Field]>) -> Result<Box<dyn Model>, SettingError>;

/// A kind of model.
#[derive(Clone, Copy, Debug)]
pub struct ModelKind {
    pub name: &'static str,
    pub doc: &'static str,
    pub make: Make,
}

/// Layers of a model, at most: each is built and compiled by itself.
pub const LAYERS_MAX: usize = 10_000;

/// The sizes of layers one behind the other: a list of at most [`LAYERS_MAX`].
pub(crate) fn layer_sizes(settings: &Settings, key: &str, default: &[usize]) -> Result<Vec<usize>, SettingError> {
    let sizes = settings.counts(key, default)?;
    match sizes.len() {
        count if count > LAYERS_MAX => {
            let message = format!("has {count} layers, but at most {LAYERS_MAX} are possible");
            Err(settings.wrong(key, message, "write fewer and wider layers"))
        }
        _ => Ok(sizes),
    }
}

/// The zoo.
pub const MODELS: &[ModelKind] = &[
    mlp::KIND,
    cnn::KIND,
    alexnet::KIND,
    resnet::RESNET18,
    resnet::RESNET50,
    resnet::RESNET101,
    resnet::RESNET152,
    vgg::KIND,
    inception::KIND,
    gpt::KIND,
    llama::KIND,
    lstm::KIND,
];

/// Makes the model that `settings` (the `[model]` section) names.
pub fn make(kinds: &[ModelKind], settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    let names: Vec<&str> = kinds.iter().map(|kind| kind.name).collect();
    if !settings.has("kind") {
        return Err(settings.wrong("kind", "is missing", format!("write `kind = \"…\"`, one of {}", names.join(", "))));
    }
    let name = settings.text("kind", "")?;
    let Some(kind) = kinds.iter().find(|kind| kind.name == name) else {
        let hint = match nearest(&name, names.iter().copied()) {
            Some(near) => format!("did you mean \"{near}\"? The models are {}", names.join(", ")),
            None => format!("the models are {}", names.join(", ")),
        };
        return Err(settings.wrong("kind", format!("is \"{name}\", which is not a known model"), hint));
    };
    let model = (kind.make)(settings, data)?;
    settings.finish()?;
    Ok(model)
}

/// The shape of field `name` in the data, if the data is known.
pub fn data_shape(data: Option<&[Field]>, name: &str) -> Option<Vec<usize>> {
    data?.iter().find(|field| field.name == name).map(|field| field.shape.clone())
}

/// The number of tokens that the data know, as inputs or as targets: the last ones may be targets alone.
pub fn data_vocab(data: Option<&[Field]>) -> Option<usize> {
    data_classes(data, "x").map(|classes| classes.max(data_classes(data, "y").unwrap_or(0)))
}

/// The number of classes of field `name` in the data, if it is known and an index.
pub fn data_classes(data: Option<&[Field]>, name: &str) -> Option<usize> {
    match data?.iter().find(|field| field.name == name)?.kind {
        Kind::Index { classes } => Some(classes),
        Kind::Real => None,
    }
}
