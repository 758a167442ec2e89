//! Models of your own from layers with PyTorch's names and initial values: `cargo run --release --example own_layers -- train
//! JOB.toml`, where the job says `kind = "gru-text"` for tokens, or `kind = "autoencoder"` for images.

use kolo::models::layers::Conv;
use kolo::prelude::*;

/// Reads tokens and predicts each next one: `torch.nn.Embedding`, `torch.nn.GRU`, `torch.nn.Linear`.
#[derive(Debug)]
struct GruText {
    context: usize,
    vocab: usize,
    width: usize,
    layers: usize,
}

fn make_text(settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    Ok(Box::new(GruText {
        context: data_shape(data, "x").map_or(16, |shape| shape.iter().product()),
        vocab: settings.size("vocab", data_classes(data, "x").unwrap_or(256))?,
        width: settings.size("width", 64)?,
        layers: settings.size("layers", 2)?,
    }))
}

impl Model for GruText {
    fn fields(&self) -> Vec<Field> {
        ["x", "y"].map(|name| Field::index(name, &[self.context], self.vocab)).into()
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let [tokens, targets] = self.fields().try_into().expect("two fields");
        let words = cx.embedding("words", cx.field(&tokens), self.vocab, self.width);
        let read = cx.gru("gru", words, self.width, self.layers);
        classify(cx.linear("head", read, self.vocab), cx.field(&targets), 0.0)
    }
}

/// Squeezes images through few channels of a quarter of their size, and restores them: `torch.nn.ConvTranspose2d`.
#[derive(Debug)]
struct Autoencoder {
    image: Vec<usize>,
    width: usize,
}

fn make_autoencoder(settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    let image = data_shape(data, "x").unwrap_or(vec![1, 8, 8]);
    Ok(Box::new(Autoencoder { image, width: settings.size("width", 16)? }))
}

impl Model for Autoencoder {
    fn fields(&self) -> Vec<Field> {
        vec![Field::real("x", &self.image)]
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let x = cx.field(&self.fields()[0]);
        let small = cx.conv2d("encoder", x, Conv::same(self.width, 3).stride(2)).relu();
        let restored = cx.conv_transpose2d("decoder", small, Conv::same(self.image[0], 3).stride(2), 1);
        let loss = restored.mse(x);
        Outputs::new(loss, restored).metric("mse", loss)
    }
}

fn main() -> std::process::ExitCode {
    let app = kolo::App::new().model("gru-text", "reads tokens with GRU layers: vocab width layers", make_text);
    app.model("autoencoder", "a convolution and its transpose: width", make_autoencoder).run()
}
