//! How far predictions of numbers are from their targets: MAE, RMSE and R², in the target's own unit.
//!
//! Each batch gives four numbers per output of the model: the sums of the absolute and of the squared errors, the mean of the
//! targets, and the sum of their squared distances from it. Batches are joined in f64, in their order, as Chan, Golub and LeVeque
//! join variances: no digit is lost where the mean is large, and the result does not depend on who computed which batch.

use kolo_data::TargetScale;
use kolo_models::Better;

/// Numbers of a batch for each output of the model.
pub(crate) const NUMBERS: usize = 4;
/// What is measured, in the order of [`Residuals::metrics`].
pub(crate) const NAMES: [&str; 3] = ["mae", "rmse", "r2"];

/// Which values of one of these are the better ones.
pub(crate) fn better(name: &str) -> Better {
    if name == "r2" { Better::Higher } else { Better::Lower }
}

/// One output of the model.
#[derive(Clone, Copy, Debug, Default)]
struct OfOutput {
    absolute: f64,
    squared: f64,
    mean: f64,
    /// Of the targets from their mean.
    distances: f64,
}

/// Errors and targets of the batches so far.
#[derive(Clone, Debug)]
pub(crate) struct Residuals {
    samples: f64,
    outputs: Vec<OfOutput>,
}

impl Residuals {
    pub fn new(outputs: usize) -> Self {
        Self { samples: 0.0, outputs: vec![OfOutput::default(); outputs] }
    }

    /// Adds a batch of so many samples: all absolute errors, then all squared ones, all means, all distances.
    pub fn add(&mut self, samples: usize, numbers: &[f32]) {
        let count = self.outputs.len();
        let (before, own) = (self.samples, samples as f64);
        self.samples += own;
        for (at, output) in self.outputs.iter_mut().enumerate() {
            let [absolute, squared, mean, distances] = std::array::from_fn(|of| f64::from(numbers[of * count + at]));
            let apart = mean - output.mean;
            output.absolute += absolute;
            output.squared += squared;
            output.mean += apart * own / self.samples;
            output.distances += distances + apart * apart * before * own / self.samples;
        }
    }

    /// MAE and RMSE over all outputs, and the mean of their R², as scikit-learn has them.
    pub fn metrics(&self, scale: Option<&TargetScale>) -> Vec<(String, f64)> {
        let unit = |at: usize| scale.map_or(1.0, |scale| f64::from(scale.deviation[at % scale.deviation.len().max(1)]));
        let numbers = (self.samples * self.outputs.len() as f64).max(1.0);
        let sum = |of: &dyn Fn(usize, &OfOutput) -> f64| -> f64 {
            self.outputs.iter().enumerate().map(|(at, output)| of(at, output)).sum()
        };
        let mae = sum(&|at, output| output.absolute * unit(at)) / numbers;
        let rmse = (sum(&|at, output| output.squared * unit(at).powi(2)) / numbers).sqrt();
        let r2 = sum(&|_, output| explained(output)) / (self.outputs.len() as f64).max(1.0);
        NAMES.iter().zip([mae, rmse, r2]).map(|(name, value)| (name.to_string(), value)).collect()
    }
}

/// The part of the variance that is explained. Of targets that never change it is 1 if they are met, and otherwise 0.
fn explained(output: &OfOutput) -> f64 {
    match (output.distances == 0.0, output.squared == 0.0) {
        (true, true) => 1.0,
        (true, false) => 0.0,
        (false, _) => 1.0 - output.squared / output.distances,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What scikit-learn says of these: `mean_absolute_error` 0.75, the root of `mean_squared_error` 0.8416254, `r2_score`
    /// 0.9368005.
    #[test]
    fn batches_join_to_the_metrics_of_all() {
        let targets = [[0.5f32, 1.0], [-1.0, 1.0], [7.0, -6.0]];
        let predicted = [[0.0f32, 2.0], [-1.0, 2.0], [8.0, -5.0]];
        let numbers = |rows: std::ops::Range<usize>| -> Vec<f32> {
            let count = rows.len() as f32;
            let column = |of: &dyn Fn(usize, usize) -> f32| {
                (0..2).map(|at| rows.clone().map(|row| of(row, at)).sum::<f32>()).collect::<Vec<f32>>()
            };
            let means: Vec<f32> = column(&|row, at| targets[row][at]).iter().map(|sum| sum / count).collect();
            let error = |row: usize, at: usize| predicted[row][at] - targets[row][at];
            let distances = column(&|row, at| (targets[row][at] - means[at]).powi(2));
            [column(&|row, at| error(row, at).abs()), column(&|row, at| error(row, at).powi(2)), means, distances]
                .concat()
        };
        let mut whole = Residuals::new(2);
        whole.add(3, &numbers(0..3));
        let mut parts = Residuals::new(2);
        parts.add(1, &numbers(0..1));
        parts.add(2, &numbers(1..3));
        for residuals in [whole, parts] {
            let metrics = residuals.metrics(None);
            let expected = [("mae", 0.75), ("rmse", 0.841_625_4), ("r2", 0.936_800_5)];
            for ((name, value), (wanted, expected)) in metrics.iter().zip(expected) {
                assert!(name == wanted && (value - expected).abs() < 1e-6, "{name} {value} {expected}");
            }
            let scale = TargetScale { mean: vec![100.0, 100.0], deviation: vec![2.0, 2.0] };
            let scaled = residuals.metrics(Some(&scale));
            assert!((scaled[0].1 - 1.5).abs() < 1e-6 && (scaled[2].1 - metrics[2].1).abs() < 1e-12, "{scaled:?}");
        }
        assert_eq!(explained(&OfOutput::default()), 1.0);
        assert_eq!(explained(&OfOutput { squared: 1.0, ..OfOutput::default() }), 0.0);
    }
}
