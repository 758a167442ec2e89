//! `[checkpoint]` of a job: when to save, and what to keep.

use crate::job::WatchedMetric;
use kolo_graph::settings::{SettingError, Settings};
use std::time::Duration;

/// Checkpoints that are kept beside the best one.
const KEEP: usize = 3;
const KEEP_MAX: usize = 1_000_000;

/// How often to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Every {
    Steps(usize),
    Epochs(usize),
    Time(Duration),
}

/// What `[checkpoint]` says. A run that has a directory leaves its last state there whatever it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavingRule {
    /// Only at the end if `None`.
    pub every: Option<Every>,
    /// Newest checkpoints to keep.
    pub keep: usize,
    /// The metric whose best checkpoint is kept as well.
    pub best: Option<WatchedMetric>,
}

impl SavingRule {
    /// Reads the section; `metrics` are those that the job's evaluations measure.
    pub fn read(checkpoint: &Settings, metrics: impl FnOnce() -> Vec<WatchedMetric>) -> Result<Self, SettingError> {
        let every = match checkpoint.has("every") {
            true => Some(read_every(checkpoint)?),
            false => None,
        };
        let keep = checkpoint.count_in("keep", KEEP, 1, KEEP_MAX)?;
        let best = checkpoint.text("best", "")?;
        let best = match best.as_str() {
            "" => None,
            name => Some(read_best(checkpoint, name, metrics())?),
        };
        checkpoint.finish()?;
        Ok(Self { every, keep, best })
    }

    /// Whether a state is copied while training goes on, as opposed to saved when it ends.
    pub fn saves_on_the_way(&self) -> bool {
        self.every.is_some() || self.best.is_some()
    }

    /// Whether the step that was just made ends with a save, by its number alone.
    pub fn is_due_after(&self, step: usize, steps_per_epoch: usize) -> bool {
        match self.every {
            Some(Every::Steps(steps)) => step.is_multiple_of(steps),
            Some(Every::Epochs(epochs)) => step.is_multiple_of(epochs.saturating_mul(steps_per_epoch)),
            Some(Every::Time(_)) | None => false,
        }
    }

    /// Whether a new value of the watched metric is the best so far.
    pub fn improves(&self, new: f64, best: Option<f64>) -> bool {
        let Some(metric) = &self.best else { return false };
        best.is_none_or(|best| metric.better.improves(new, best)) && !new.is_nan()
    }
}

/// The metric of this name among those that the job measures.
fn read_best(checkpoint: &Settings, name: &str, mut known: Vec<WatchedMetric>) -> Result<WatchedMetric, SettingError> {
    if let Some(at) = known.iter().position(|metric| metric.name == name) {
        return Ok(known.swap_remove(at));
    }
    let names: Vec<&str> = known.iter().map(|metric| metric.name.as_str()).collect();
    let hint = match names.is_empty() {
        true => "give `data.holdout` a part of the data, so that there is something to measure".into(),
        false => format!("the metrics are {}", names.join(", ")),
    };
    Err(checkpoint.wrong("best", format!("is \"{name}\", which this job does not measure"), hint))
}

/// `200 steps`, `1 epoch`, `90 s`, `10 minutes`, `1 hour`.
fn read_every(checkpoint: &Settings) -> Result<Every, SettingError> {
    let text = checkpoint.text("every", "200 steps")?;
    let wrong = |message: String| {
        checkpoint.wrong("every", message, "write a number and a unit: \"200 steps\", \"1 epoch\" or \"10 minutes\"")
    };
    let Some((number, unit)) = text.trim().split_once(' ') else {
        return Err(wrong(format!("is \"{text}\", which has no unit")));
    };
    let number: usize = match number.parse() {
        Ok(number) if number > 0 => number,
        _ => return Err(wrong(format!("is \"{text}\", which does not start with a whole number above 0"))),
    };
    let seconds = |each: u64| Every::Time(Duration::from_secs((number as u64).saturating_mul(each)));
    Ok(match unit.trim() {
        "step" | "steps" => Every::Steps(number),
        "epoch" | "epochs" => Every::Epochs(number),
        "s" | "second" | "seconds" => seconds(1),
        "min" | "minute" | "minutes" => seconds(60),
        "h" | "hour" | "hours" => seconds(3600),
        unit => return Err(wrong(format!("is \"{text}\", but `{unit}` is not a unit"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::settings::Setting;
    use kolo_models::Better;

    fn read(pairs: &[(&str, Setting)]) -> Result<SavingRule, String> {
        let mut settings = Settings::new("checkpoint", "job.toml:9");
        pairs.iter().for_each(|(key, value)| settings.set(key, "job.toml:10", value.clone()));
        let metrics = [("loss", Better::Lower), ("accuracy", Better::Higher)];
        let metrics = || metrics.map(|(name, better)| WatchedMetric::new(name, better)).to_vec();
        SavingRule::read(&settings, metrics).map_err(|error| error.to_string())
    }

    fn every(text: &str) -> Result<Option<Every>, String> {
        read(&[("every", Setting::Text(text.into()))]).map(|rule| rule.every)
    }

    #[test]
    fn intervals_are_numbers_with_units() {
        assert_eq!(every("200 steps"), Ok(Some(Every::Steps(200))));
        assert_eq!(every("1 epoch"), Ok(Some(Every::Epochs(1))));
        assert_eq!(every("10 minutes"), Ok(Some(Every::Time(Duration::from_secs(600)))));
        for wrong in ["200", "0 steps", "-1 steps", "1.5 epochs", "3 weeks", "steps", ""] {
            let error = every(wrong).unwrap_err();
            assert!(error.starts_with("job.toml:10: `checkpoint.every` is ") && error.contains("200 steps"), "{error}");
        }
        assert_eq!(read(&[]).unwrap(), SavingRule { every: None, keep: 3, best: None });
    }

    #[test]
    fn the_best_is_of_a_known_metric_and_falls_or_rises() {
        let accuracy = read(&[("best", Setting::Text("accuracy".into()))]).unwrap();
        assert!(
            accuracy.improves(0.5, None) && accuracy.improves(0.6, Some(0.5)) && !accuracy.improves(0.5, Some(0.5))
        );
        let loss = read(&[("best", Setting::Text("loss".into()))]).unwrap();
        assert!(loss.improves(0.4, Some(0.5)) && !loss.improves(0.6, Some(0.5)) && !loss.improves(f64::NAN, None));
        assert!(read(&[("best", Setting::Text("acc".into()))]).unwrap_err().contains("the metrics are loss, accuracy"));
    }

    #[test]
    fn steps_and_epochs_are_due_by_their_number() {
        let rule = |every| SavingRule { every: Some(every), keep: 1, best: None };
        let due = |every| (1..=40).filter(|step| rule(every).is_due_after(*step, 10)).collect::<Vec<_>>();
        assert_eq!(due(Every::Steps(15)), [15, 30]);
        assert_eq!(due(Every::Epochs(2)), [20, 40]);
        assert!(due(Every::Time(Duration::from_secs(1))).is_empty());
    }
}
