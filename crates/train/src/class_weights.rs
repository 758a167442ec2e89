//! Weights of classes in the loss: `train.class_weights`.
//!
//! The loss of a step is `Σ w[y]·loss ÷ Σ w[y]` over all targets of the batch that count, as PyTorch's weighted cross-entropy
//! has it, and so it is the same however the batch is cut into grains or shared among workers. Only the ratios of the weights
//! count: the smallest becomes 1. Evaluations are not weighted, so that jobs with different weights can be compared.

use crate::error::Error;
use kolo_data::{Source, Split};
use kolo_graph::settings::{Setting, SettingError, Settings, nearest};
use kolo_graph::{Builder, DType, Tensor, Type};
use kolo_models::{Build, Mean, Model};
use kolo_ops::cross_entropy::CrossEntropy;
use kolo_ops::prelude::*;

const KEY: &str = "class_weights";
const BALANCED: &str = "balanced";
const EXAMPLE: &str = "\"balanced\"";
/// Classes that can have weights, at most.
const CLASSES_MAX: usize = 4096;
/// Classes whose weights are shown.
const SHOWN: usize = 8;

/// The weight of each class; `None` if all count the same.
pub(crate) fn read(
    train: &Settings,
    source: &dyn Source,
    split: &Split,
    model: &dyn Model,
) -> Result<Option<Vec<f32>>, Error> {
    if train.peek(KEY).is_none() {
        train.table_like(KEY, EXAMPLE)?;
        return Ok(None);
    }
    let wrong = |message: String, hint: &str| train.wrong(KEY, message, hint);
    let Some(classes) = classes_of(model)? else {
        let message = "weighs classes, but the loss of this model is not one cross-entropy over classes".into();
        return Err(wrong(message, "leave it out, or use a model that classifies").into());
    };
    if classes > CLASSES_MAX {
        let message = format!("weighs classes, of which there may be {CLASSES_MAX}, but the model has {classes}");
        return Err(wrong(message, "leave it out").into());
    }
    let weights = match train.peek(KEY) {
        Some(Setting::Text(_)) => {
            train.choice(KEY, &[BALANCED])?;
            balanced(&source.class_counts(split)?, classes)
        }
        Some(Setting::List(_)) => {
            let weights = train.floats(KEY, "[1.0, 2.5]")?;
            if weights.len() != classes {
                let message = format!("has {} weights, but there are {classes} classes", weights.len());
                return Err(wrong(message, "write a weight for each class, in their order").into());
            }
            weights
        }
        _ => by_name(&train.table_like(KEY, EXAMPLE)?, source.class_names().unwrap_or_default(), classes)?,
    };
    if let Some(weight) = weights.iter().find(|weight| !(weight.is_finite() && **weight >= 0.0)) {
        return Err(wrong(format!("has the weight {weight}"), "write numbers of at least 0").into());
    }
    let least = weights.iter().copied().filter(|weight| *weight > 0.0).fold(f64::INFINITY, f64::min);
    if least.is_infinite() {
        return Err(wrong("leaves no class with a weight above 0".into(), "write larger weights").into());
    }
    Ok(Some(weights.iter().map(|weight| (weight / least) as f32).collect()))
}

/// Each class counts as much as any other: a weight is all targets over those of the class, and over the number of classes.
fn balanced(counts: &[u64], classes: usize) -> Vec<f64> {
    let total = counts.iter().sum::<u64>() as f64;
    let weight = |class: usize| match counts.get(class) {
        Some(count) if *count > 0 => total / (classes as f64 * *count as f64),
        // It has no target to weigh.
        _ => 0.0,
    };
    (0..classes).map(weight).collect()
}

/// Weights under the names of their classes; a class that is not named has 1.
fn by_name(table: &Settings, names: &[String], classes: usize) -> Result<Vec<f64>, SettingError> {
    let mut weights = vec![1.0; classes];
    for key in table.keys() {
        let at = match names.is_empty() {
            true => key.parse().ok().filter(|class| *class < classes),
            false => names.iter().position(|name| name == key),
        };
        let Some(at) = at else {
            let near = nearest(key, names.iter().map(String::as_str));
            let near = near.map_or(String::new(), |near| format!("did you mean `{near}`? "));
            let shown: Vec<&str> = names.iter().take(SHOWN).map(String::as_str).collect();
            let hint = match names.is_empty() {
                true => format!("the classes are the numbers from 0 to {}", classes - 1),
                false => format!(
                    "{near}The classes are {}{}",
                    shown.join(", "),
                    if names.len() > SHOWN { ", …" } else { "" }
                ),
            };
            return Err(table.wrong(key, "is not a class", hint));
        };
        weights[at] = table.float(key, 1.0)?;
    }
    Ok(weights)
}

/// What the weights are, in a line.
pub fn described(weights: &[f32], names: Option<&[String]>) -> String {
    let name = |class: usize| names.and_then(|names| names.get(class)).cloned().unwrap_or_else(|| class.to_string());
    let shown: Vec<String> =
        weights.iter().take(SHOWN).enumerate().map(|(class, weight)| format!("{} {weight:.4}", name(class))).collect();
    let more = if weights.len() > SHOWN { format!(" and {} more", weights.len() - SHOWN) } else { String::new() };
    format!("class weights {}{more}", shown.join(", "))
}

/// The classes of the cross-entropy that is a model's loss.
fn classes_of(model: &dyn Model) -> Result<Option<usize>, Error> {
    let builder = Builder::new();
    let loss = model.build(&Build { builder: &builder, batch: 1, grains: 1, training: true }).loss;
    let classes = parts_of(&builder, loss).map(|(_, [logits, _])| logits.ty().last());
    builder.finish()?;
    Ok(classes)
}

/// The cross-entropy that a loss is, with its logits and targets.
fn parts_of<'b>(builder: &'b Builder, loss: Mean<'b>) -> Option<(CrossEntropy, [Tensor<'b>; 2])> {
    let (op, inputs) = {
        let graph = builder.graph();
        let maker = graph.maker(loss.value.id());
        let op = maker.op.downcast::<CrossEntropy>().filter(|op| !op.mean && maker.outputs[0] == loss.value.id())?;
        (op.clone(), maker.inputs.clone())
    };
    Some((op, [0, 1].map(|at| builder.tensor(inputs[at]))))
}

/// A loss that is a cross-entropy, weighted: `Σ w[y]·loss` and `Σ w[y]`. With label smoothing, the part of each class has the
/// weight of that class, as in PyTorch.
pub(crate) fn weigh<'b>(builder: &'b Builder, loss: Mean<'b>, weights: &[f32]) -> Mean<'b> {
    let found = parts_of(builder, loss).filter(|(_, [logits, _])| logits.ty().last() == weights.len());
    let (Some((op, [logits, targets])), Some(counted)) = (found, loss.counted) else {
        let message = "`train.class_weights` needs a loss that is one cross-entropy over the classes";
        builder.fail("`[train]`", message, "leave it out, or use a model that classifies");
        return loss;
    };
    let classes = weights.len();
    let rows = targets.ty().elements();
    let (logits, targets) = (logits.reshape_to([rows, classes]), targets.reshape_to([rows]));
    let weights = vector(builder, weights);
    // A target that does not count is no class, and its row is all zeros.
    let hits = targets.one_hot(classes).mul(weights);
    let logs = logits.cast(DType::F32).log_softmax();
    let hit = hits.mul(logs).sum_all();
    let sum = match op.smoothing == 0.0 {
        true => hit.neg(),
        false => {
            let ignored = builder.full(op.ignore as f64, targets.ty());
            let counts = targets.not_equal(ignored).cast(DType::F32).reshape_to([rows, 1]);
            let spread = logs.mul(weights).mul(counts).sum_all().scale(op.smoothing / classes as f32);
            hit.scale(1.0 - op.smoothing).add(spread).neg()
        }
    };
    Mean::counted(sum, hits.sum_all(), counted.of)
}

/// These numbers as a tensor, made of runs of equal ones.
fn vector<'b>(builder: &'b Builder, numbers: &[f32]) -> Tensor<'b> {
    let mut runs = numbers
        .chunk_by(|a, b| a == b)
        .map(|run| builder.full(f64::from(run[0]), Type::f32([run.len()])))
        .collect::<Vec<Tensor<'b>>>()
        .into_iter();
    let first = runs.next().unwrap_or_else(|| builder.full(0.0, Type::f32([0])));
    let rest: Vec<Tensor<'b>> = runs.collect();
    if rest.is_empty() { first } else { first.concat(&rest, 0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balanced_weights_make_classes_count_the_same() {
        assert_eq!(balanced(&[6, 3, 0, 1], 4), [10.0 / 24.0, 10.0 / 12.0, 0.0, 2.5]);
        let names = ["cat".to_string(), "dog".to_string()];
        let mut table = Settings::new("train.class_weights", "job.toml:9");
        table.set("dog", "job.toml:9", Setting::Float(3.0));
        assert_eq!(by_name(&table, &names, 2).unwrap(), [1.0, 3.0]);
        table.set("dogg", "job.toml:9", Setting::Float(3.0));
        let error = by_name(&table, &names, 2).unwrap_err().to_string();
        assert!(
            error.contains("`train.class_weights.dogg` is not a class") && error.contains("did you mean `dog`?"),
            "{error}"
        );
        assert_eq!(described(&[1.0, 3.0], Some(&names)), "class weights cat 1.0000, dog 3.0000");
    }
}
