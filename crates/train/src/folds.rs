//! Cross-validation: what the runs of all folds say together.

use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// What the run of one fold came to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FoldRow {
    pub fold: usize,
    pub steps: u64,
    /// Of the training, and of every metric of the held-out part.
    pub metrics: BTreeMap<String, f64>,
    pub weights: String,
    pub ended: String,
}

impl FoldRow {
    /// From the report of a run.
    pub fn of(fold: usize, report: &Value) -> Self {
        let text = |key: &str| report[key].as_str().unwrap_or_default().to_string();
        let measured = report["metrics"].as_object().into_iter().flatten();
        let measured = measured.map(|(name, value)| (name.clone(), value)).chain([("loss".into(), &report["loss"])]);
        let metrics = measured.filter_map(|(name, value)| Some((name, value.as_f64()?))).collect();
        let steps = report["steps"].as_u64().unwrap_or_default();
        Self { fold, steps, metrics, weights: text("weights"), ended: text("ended") }
    }
}

/// All folds of a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FoldReport {
    pub job: String,
    pub folds: Vec<FoldRow>,
    /// Over the folds, of each metric that all of them have.
    pub mean: BTreeMap<String, f64>,
    /// The standard deviation of a sample: over one less than there are folds.
    pub deviation: BTreeMap<String, f64>,
    pub version: String,
}

impl FoldReport {
    pub fn new(job: &str, folds: Vec<FoldRow>) -> Self {
        let (mut mean, mut deviation) = (BTreeMap::new(), BTreeMap::new());
        for name in folds.first().iter().flat_map(|row| row.metrics.keys()) {
            let values: Vec<f64> = folds.iter().filter_map(|row| row.metrics.get(name).copied()).collect();
            if values.len() < folds.len() {
                continue;
            }
            let (centre, spread) = mean_and_deviation(&values);
            mean.insert(name.clone(), centre);
            deviation.insert(name.clone(), spread);
        }
        Self { job: job.into(), folds, mean, deviation, version: env!("CARGO_PKG_VERSION").into() }
    }

    /// A line per metric: its mean and deviation, then its value in each fold.
    pub fn lines(&self) -> Vec<String> {
        let line = |(name, mean): (&String, &f64)| {
            let each: String = self.folds.iter().map(|row| format!(" {:.4}", row.metrics[name])).collect();
            format!("  {name:<11} {mean:.4} ± {:.4}  {each}", self.deviation[name])
        };
        self.mean.iter().map(line).collect()
    }
}

fn mean_and_deviation(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0).max(1.0)).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn folds_are_summed_up() {
        let report = |accuracy: f64, loss: Value| json!({ "steps": 7, "loss": loss, "metrics": { "accuracy": accuracy }, "weights": "blake3:0", "ended": "done" });
        let rows = [(0.5, json!(1.0)), (0.75, json!(2.0)), (1.0, Value::Null)];
        let rows =
            rows.into_iter().enumerate().map(|(fold, (accuracy, loss))| FoldRow::of(fold, &report(accuracy, loss)));
        let all = FoldReport::new("digits", rows.collect());
        assert_eq!((all.mean["accuracy"], all.deviation["accuracy"]), (0.75, 0.25));
        // A loss that is no number in one fold has no mean.
        assert!(!all.mean.contains_key("loss"));
        assert_eq!(all.lines(), ["  accuracy    0.7500 ± 0.2500   0.5000 0.7500 1.0000"]);
        assert_eq!((all.folds[2].steps, all.folds[2].ended.as_str()), (7, "done"));
        assert_eq!(mean_and_deviation(&[3.0]), (3.0, 0.0));
    }
}
