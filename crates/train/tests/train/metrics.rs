//! Which values of a metric are the better ones, and which optimizers take a model's rate: each says it itself.

use kolo_graph::field::Field;
use kolo_graph::settings::{SettingError, Settings};
use kolo_models::{Better, Build, MODELS, Model, ModelKind, Outputs, data_shape};
use kolo_ops::prelude::*;
use kolo_train::job::Kinds;
use kolo_train::{Job, job_file};

/// A regression with an error and a score whose names do not tell which is which.
#[derive(Debug)]
struct Regression {
    inputs: Vec<usize>,
    outputs: Vec<usize>,
}

impl Model for Regression {
    fn fields(&self) -> Vec<Field> {
        vec![Field::real("x", &self.inputs), Field::real("y", &self.outputs)]
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        let [x, y] = [0, 1].map(|at| cx.field(&fields[at]));
        let [inputs, outputs] = [&self.inputs, &self.outputs].map(|shape| shape.iter().product());
        let made = cx.linear("head", x.reshape_to([cx.batch, inputs]), outputs);
        let loss = made.mse(y.reshape_to([cx.batch, outputs]));
        Outputs::new(loss, made).metric("distance", loss).metric("won_over_mse", loss).metric("mse", loss)
    }

    fn derive(&self, loss: f64, metrics: &mut Vec<(String, f64)>) {
        metrics.push(("bits".into(), loss.log2()));
    }

    fn better(&self, metric: &str) -> Better {
        match metric {
            "distance" | "bits" => Better::Lower,
            "won_over_mse" => Better::Higher,
            other => Better::by_name(other),
        }
    }

    fn learning_rate(&self) -> f64 {
        0.25
    }
}

fn make(_: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    let shape = |name: &str| data_shape(data, name).unwrap_or(vec![1]);
    Ok(Box::new(Regression { inputs: shape("x"), outputs: shape("y") }))
}

fn job(train: &str) -> Job {
    let models = [MODELS, &[ModelKind { name: "regression", doc: "", make }]].concat();
    let text =
        format!("[model]\nkind = \"regression\"\n[data]\nsource = \"builtin:waves\"\nbatch = 4\ngrains = 1\n{train}\n");
    let settings = job_file::parse(&text, "job.toml").unwrap_or_else(|error| panic!("{error}"));
    let kinds = Kinds { models: &models, ..Kinds::default() };
    Job::read_among(&settings, &kinds).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn a_metric_of_an_own_model_says_which_way_is_better() {
    let falling = [("loss", true), ("distance", true), ("bits", true), ("mse", true), ("won_over_mse", false)];
    for (metric, falls) in falling {
        let job = job(&format!("[train]\nearly_stop = {{ metric = \"{metric}\" }}\n[checkpoint]\nbest = \"{metric}\""));
        let stop = job.early_stop.as_ref().expect("it was written").metric.better;
        assert_eq!((stop.improves(0.1, 0.2), stop.improves(0.2, 0.1)), (falls, !falls), "early_stop of {metric}");
        let saved = |new: f64, best: f64| job.saving.improves(new, Some(best));
        assert_eq!((saved(0.1, 0.2), saved(0.2, 0.1)), (falls, !falls), "the best {metric}");
    }
}

/// Those of the zoo say it, whatever their metrics are called.
#[test]
fn every_metric_of_the_zoo_has_its_direction() {
    let mut seen = Vec::new();
    for (_, text) in crate::same_bits::jobs() {
        for metric in [
            "accuracy",
            "precision",
            "recall",
            "exact_match",
            "perplexity",
            "mse",
            "naive_mse",
            "gain",
            "mae",
            "rmse",
            "r2",
        ] {
            let settings =
                job_file::parse(&format!("{text}early_stop = {{ metric = \"{metric}\" }}\n"), "job").unwrap();
            let Ok(job) = Job::read(&settings, MODELS) else { continue };
            let better = job.early_stop.expect("it was written").metric.better;
            let falls = ["perplexity", "mse", "naive_mse", "mae", "rmse"].contains(&metric);
            assert_eq!(better, if falls { Better::Lower } else { Better::Higher }, "{metric}");
            seen.push(metric);
        }
    }
    for metric in ["accuracy", "precision", "perplexity", "mse", "gain", "rmse", "r2"] {
        assert!(seen.contains(&metric), "no model measures {metric}");
    }
}

#[test]
fn a_kind_of_optimizer_says_whether_it_takes_the_rate_of_the_model() {
    let rates = [("adam", 0.25), ("adamw", 0.25), ("sgd", 1e-3), ("lars", 1.0), ("lamb", 1e-3), ("rmsprop", 0.01)];
    for (kind, rate) in rates {
        let job = job(&format!("[train]\noptimizer = {{ kind = \"{kind}\" }}"));
        assert_eq!(job.optimizer.lr(), rate, "{kind}");
    }
}
