//! `[checkpoint]` of a job: when to save, and what to keep.

use crate::job::WatchedMetric;
use kolo_graph::settings::{Setting, SettingError, Settings};
use std::time::Duration;

/// Checkpoints that are kept beside the best one, and fewer where the job does not say when to save.
const KEEP: usize = 3;
const KEEP_BY_DEFAULT: usize = 2;
const KEEP_MAX: usize = 1_000_000;
/// What `every` says of a run that saves its end alone.
const NEVER: &str = "never";

/// When a run saves if its job does not say so: no more than this is lost, and a short run saves its end alone.
const PAUSE_BY_DEFAULT: Duration = Duration::from_secs(600);
const LONG_EPOCH: Duration = Duration::from_secs(60);

/// How often to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Every {
    Steps(usize),
    Epochs(usize),
    Time(Duration),
    /// After so much time, and after every epoch that took so long.
    TimeOrEpoch {
        time: Duration,
        epoch: Duration,
    },
}

impl Every {
    /// Whether something is due after the step that was just made, by its number alone.
    pub fn is_due_after(self, step: usize, steps_per_epoch: usize) -> bool {
        match self {
            Every::Steps(steps) => step.is_multiple_of(steps),
            Every::Epochs(epochs) => step.is_multiple_of(epochs.saturating_mul(steps_per_epoch)),
            Every::Time(_) | Every::TimeOrEpoch { .. } => false,
        }
    }

    /// Reads steps or epochs, which no clock decides; a number alone counts epochs.
    pub(crate) fn read_counted(section: &Settings, key: &str) -> Result<Self, SettingError> {
        let Some(Setting::Text(_)) = section.peek(key) else { return section.count(key, 1, 1).map(Every::Epochs) };
        let text = section.text(key, "100 steps")?;
        let hint = "write a number of epochs, or a number and a unit: \"100 steps\" or \"2 epochs\"";
        let (number, unit) = interval(&text).map_err(|message| section.wrong(key, message, hint))?;
        match unit {
            "step" | "steps" => Ok(Every::Steps(number)),
            "epoch" | "epochs" => Ok(Every::Epochs(number)),
            unit => Err(section.wrong(key, format!("is \"{text}\", but `{unit}` is neither steps nor epochs"), hint)),
        }
    }
}

impl std::fmt::Display for Every {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let counted = |count: usize, unit: &str| match count {
            1 => format!("every {unit}"),
            count => format!("every {count} {unit}s"),
        };
        let timed = |time: Duration| match time.as_secs() as usize {
            seconds if seconds.is_multiple_of(3600) => counted(seconds / 3600, "hour"),
            seconds if seconds.is_multiple_of(60) => counted(seconds / 60, "minute"),
            seconds => counted(seconds, "second"),
        };
        match self {
            Every::Steps(steps) => f.write_str(&counted(*steps, "step")),
            Every::Epochs(epochs) => f.write_str(&counted(*epochs, "epoch")),
            Every::Time(time) => f.write_str(&timed(*time)),
            Every::TimeOrEpoch { time, epoch } => {
                write!(f, "{}, after each epoch that takes {} s or more", timed(*time), epoch.as_secs())
            }
        }
    }
}

/// What `[checkpoint]` says. A run that has a directory leaves its last state there whatever it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavingRule {
    /// Only at the end if `None`.
    pub every: Option<Every>,
    /// The job does not say when. Then a plan counts no copy of the state: if there is no memory for one, training waits while
    /// the state is written.
    pub by_default: bool,
    /// Newest checkpoints to keep.
    pub keep: usize,
    /// The metric whose best checkpoint is kept as well.
    pub best: Option<WatchedMetric>,
}

impl SavingRule {
    /// Reads the section; `metrics` are those that the job's evaluations measure.
    pub fn read(checkpoint: &Settings, metrics: impl FnOnce() -> Vec<WatchedMetric>) -> Result<Self, SettingError> {
        let by_default = !checkpoint.has("every");
        let every = match by_default {
            true => Some(Every::TimeOrEpoch { time: PAUSE_BY_DEFAULT, epoch: LONG_EPOCH }),
            false => read_every(checkpoint)?,
        };
        let is_silent = by_default && !checkpoint.has("best");
        let keep = checkpoint.count_in("keep", if is_silent { KEEP_BY_DEFAULT } else { KEEP }, 1, KEEP_MAX)?;
        let best = checkpoint.text("best", "")?;
        let best = match best.as_str() {
            "" => None,
            name => Some(read_best(checkpoint, name, metrics())?),
        };
        checkpoint.finish()?;
        Ok(Self { every, by_default, keep, best })
    }

    /// Whether the job asks for states to be copied while training goes on: a plan counts the copy.
    pub fn plans_copies(&self) -> bool {
        self.every.is_some() && !self.by_default || self.best.is_some()
    }

    /// Whether the step that was just made ends with a save, by its number alone.
    pub fn is_due_after(&self, step: usize, steps_per_epoch: usize) -> bool {
        self.every.is_some_and(|every| every.is_due_after(step, steps_per_epoch))
    }

    /// Whether a save is due by the clock: so long after the last one began, and at the end of an epoch that took so long.
    pub fn is_due_by_clock(&self, since_last: Duration, ended_epoch: Option<Duration>) -> bool {
        match self.every {
            Some(Every::Time(time)) => since_last >= time,
            Some(Every::TimeOrEpoch { time, epoch }) => {
                since_last >= time || ended_epoch.is_some_and(|took| took >= epoch)
            }
            Some(Every::Steps(_) | Every::Epochs(_)) | None => false,
        }
    }

    /// When a run saves and what it keeps, in words: `every 200 steps and at the end; the newest 3 are kept`.
    pub fn describe(&self) -> String {
        let mut when: Vec<String> = self.every.iter().map(Every::to_string).collect();
        when.extend(self.best.as_ref().map(|metric| format!("at each best {}", metric.name)));
        let when = if when.is_empty() { "at the end".into() } else { format!("{}, and at the end", when.join(", ")) };
        let kept = match self.keep {
            1 => "the newest is kept".into(),
            keep => format!("the newest {keep} are kept"),
        };
        let best = if self.best.is_some() { ", and the best" } else { "" };
        format!("{when}; {kept}{best}")
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

/// `200 steps`, `1 epoch`, `90 s`, `10 minutes`, `1 hour`; `None` for `never`.
fn read_every(checkpoint: &Settings) -> Result<Option<Every>, SettingError> {
    let text = checkpoint.text("every", "200 steps")?;
    if text == NEVER {
        return Ok(None);
    }
    let hint = format!("write a number and a unit: \"200 steps\", \"1 epoch\" or \"10 minutes\"; or \"{NEVER}\"");
    let wrong = |message: String| checkpoint.wrong("every", message, hint.clone());
    let (number, unit) = interval(&text).map_err(wrong)?;
    let seconds = |each: u64| Every::Time(Duration::from_secs((number as u64).saturating_mul(each)));
    Ok(Some(match unit {
        "step" | "steps" => Every::Steps(number),
        "epoch" | "epochs" => Every::Epochs(number),
        "s" | "second" | "seconds" => seconds(1),
        "min" | "minute" | "minutes" => seconds(60),
        "h" | "hour" | "hours" => seconds(3600),
        unit => return Err(checkpoint.wrong("every", format!("is \"{text}\", but `{unit}` is not a unit"), hint)),
    }))
}

/// A number above 0 and its unit; an error is what is wrong with the text.
pub(crate) fn interval(text: &str) -> Result<(usize, &str), String> {
    let Some((number, unit)) = text.trim().split_once(' ') else {
        return Err(format!("is \"{text}\", which has no unit"));
    };
    match number.parse() {
        Ok(number) if number > 0 => Ok((number, unit.trim())),
        _ => Err(format!("is \"{text}\", which does not start with a whole number above 0")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        assert_eq!(every("never"), Ok(None));
    }

    #[test]
    fn a_job_that_says_nothing_saves_by_the_clock() {
        let silent = read(&[]).unwrap();
        assert!(silent.by_default && !silent.plans_copies());
        assert_eq!(
            silent.describe(),
            "every 10 minutes, after each epoch that takes 60 s or more, and at the end; the newest 2 are kept"
        );
        let [short, long] = [59, 60].map(Duration::from_secs);
        let due = |seconds: u64, epoch| silent.is_due_by_clock(Duration::from_secs(seconds), epoch);
        assert!(!due(599, None) && due(600, None) && due(600, Some(short)));
        assert!(!due(599, Some(short)) && due(60, Some(long)));
        // A key that is written means what it meant.
        let text = |text: &str| Setting::Text(text.into());
        let steps = read(&[("every", text("200 steps"))]).unwrap();
        assert_eq!(steps.describe(), "every 200 steps, and at the end; the newest 3 are kept");
        assert!(steps.plans_copies() && !steps.is_due_by_clock(Duration::MAX, Some(Duration::MAX)));
        let best = read(&[("best", text("accuracy"))]).unwrap();
        assert_eq!((best.keep, best.plans_copies()), (3, true));
        let never = read(&[("every", text("never")), ("keep", Setting::Int(1))]).unwrap();
        assert_eq!(never.describe(), "at the end; the newest is kept");
        assert!(!never.plans_copies() && !never.is_due_by_clock(Duration::MAX, Some(Duration::MAX)));
        assert_eq!(read(&[("every", text("1 hour"))]).unwrap().describe().split(',').next(), Some("every hour"));
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
    fn evaluations_are_due_by_steps_or_epochs() {
        let read = |value: Setting| {
            let mut train = Settings::new("train", "job.toml:9");
            train.set("eval_every", "job.toml:10", value);
            Every::read_counted(&train, "eval_every").map_err(|error| error.to_string())
        };
        let text = |text: &str| read(Setting::Text(text.into()));
        assert_eq!(Every::read_counted(&Settings::new("train", "job.toml"), "eval_every"), Ok(Every::Epochs(1)));
        assert_eq!(read(Setting::Int(3)), Ok(Every::Epochs(3)));
        assert_eq!((text("100 steps"), text("2 epochs")), (Ok(Every::Steps(100)), Ok(Every::Epochs(2))));
        for wrong in ["10 minutes", "0 steps", "often"] {
            let error = text(wrong).unwrap_err();
            assert!(error.starts_with("job.toml:10: `train.eval_every` is ") && error.contains("2 epochs"), "{error}");
        }
        assert!(read(Setting::Int(0)).is_err());
    }

    #[test]
    fn steps_and_epochs_are_due_by_their_number() {
        let rule = |every| SavingRule { every: Some(every), by_default: false, keep: 1, best: None };
        let due = |every| (1..=40).filter(|step| rule(every).is_due_after(*step, 10)).collect::<Vec<_>>();
        assert_eq!(due(Every::Steps(15)), [15, 30]);
        assert_eq!(due(Every::Epochs(2)), [20, 40]);
        assert!(due(Every::Time(Duration::from_secs(1))).is_empty());
    }
}
