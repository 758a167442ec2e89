//! Whether gradients are right: [`graph`] and [`op`] of [`kolo_exec::gradcheck`], and the same for a model.

pub use kolo_exec::gradcheck::{GradReport, Mismatch, graph, graph_at, op};

use crate::step;
use kolo_data::Kind;
use kolo_graph::{Dense, Type};
use kolo_models::Model;

/// Checks the gradients of a model's loss by its parameters and inputs, over so many samples that are drawn: numbers between −1 and
/// 1, and indices in turn. It is built as for an evaluation, where nothing is dropped.
pub fn model(model: &dyn Model, samples: usize) -> Result<GradReport, String> {
    let graph = step::evaluation_graph(model, samples).map_err(|error| error.to_string())?;
    let fields = model.fields();
    let indices = |name: &str, ty: &Type| {
        let field = fields.iter().find(|field| field.name == name)?;
        let Kind::Index { classes } = field.kind else { return None };
        let index = |at: usize| (at % classes.max(1)) as f64;
        Some(Dense::new(ty.shape.clone(), (0..ty.elements()).map(index).collect()))
    };
    kolo_exec::gradcheck::graph_at(&graph, "loss", indices)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::settings::{Setting, Settings};
    use kolo_models::MODELS;

    #[test]
    fn models_have_the_gradients_of_their_losses() {
        let small = |kind: &str, keys: &[(&str, i64)]| {
            let mut settings = Settings::new("model", "job.toml");
            settings.set("kind", "job.toml:1", Setting::Text(kind.into()));
            keys.iter().for_each(|(key, value)| settings.set(key, "job.toml:2", Setting::Int(*value)));
            kolo_models::make(MODELS, &settings, None).unwrap()
        };
        let gpt = small("gpt", &[("layers", 1), ("width", 8), ("heads", 2), ("context", 4), ("vocab", 9)]);
        let lstm = small("lstm", &[("layers", 2), ("width", 4), ("context", 5), ("features", 2)]);
        for made in [gpt, lstm] {
            let report = model(&*made, 3).unwrap();
            assert!(report.is_right() && report.compared > 50, "{made:?}: {report}");
        }
    }
}
