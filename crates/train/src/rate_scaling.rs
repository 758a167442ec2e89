//! Learning rates for large batches: the rate of one batch, carried over to another.

use kolo_graph::settings::{SettingError, Settings};
use serde::Serialize;

/// How the base rate follows from the rate that was chosen for a smaller batch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RateScaling {
    /// `none`, `linear` or `sqrt`.
    pub scaling: &'static str,
    /// What `optimizer.lr` says, or its default.
    pub base: f64,
    /// The batch that the base is for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_batch: Option<usize>,
    /// The rate that the schedule multiplies.
    pub rate: f64,
}

impl RateScaling {
    /// Reads `lr_scaling` and `base_batch` of `[train]`, for a job with this batch and this `optimizer.lr`.
    pub fn read(train: &Settings, base: f64, batch: usize) -> Result<Self, SettingError> {
        let scaling = train.choice("lr_scaling", &["none", "linear", "sqrt"])?;
        let written = train.peek("base_batch").is_some();
        let base_batch = train.count("base_batch", batch, 1)?;
        if scaling == "none" {
            return match written {
                true => Err(train.wrong(
                    "base_batch",
                    "has no effect without `lr_scaling`",
                    "write `lr_scaling = \"linear\"` too, or leave it out",
                )),
                false => Ok(Self { scaling, base, base_batch: None, rate: base }),
            };
        }
        if !written {
            let message =
                format!("is \"{scaling}\", but `base_batch` is missing: the batch that `optimizer.lr` was chosen for");
            return Err(train.wrong("lr_scaling", message, "write `base_batch = 256`, or whatever that batch was"));
        }
        let ratio = batch as f64 / base_batch as f64;
        let factor = if scaling == "sqrt" { ratio.sqrt() } else { ratio };
        Ok(Self { scaling, base, base_batch: Some(base_batch), rate: base * factor })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::settings::Setting;

    fn read(keys: &[(&str, Setting)], batch: usize) -> Result<RateScaling, String> {
        let mut train = Settings::new("train", "job.toml:3");
        keys.iter().for_each(|(key, value)| train.set(key, "job.toml:4", value.clone()));
        RateScaling::read(&train, 0.1, batch).map_err(|error| error.to_string())
    }

    fn scaled(kind: &str, base_batch: i64, batch: usize) -> f64 {
        let keys = [("lr_scaling", Setting::Text(kind.into())), ("base_batch", Setting::Int(base_batch))];
        read(&keys, batch).unwrap().rate
    }

    #[test]
    fn rates_follow_the_batch() {
        // Goyal et al. 2017: 0.1 for 256 images becomes 3.2 for 8192.
        assert_eq!(scaled("linear", 256, 8192), 3.2);
        assert_eq!(scaled("linear", 256, 64), 0.025);
        assert_eq!(scaled("sqrt", 256, 4096), 0.4);
        assert_eq!(scaled("sqrt", 64, 64), 0.1);
        let plain = read(&[], 8192).unwrap();
        assert_eq!((plain.rate, plain.base, plain.base_batch, plain.scaling), (0.1, 0.1, None, "none"));
    }

    #[test]
    fn a_batch_that_is_missing_or_means_nothing_is_an_error() {
        let linear = ("lr_scaling", Setting::Text("linear".into()));
        assert_eq!(
            read(std::slice::from_ref(&linear), 512).unwrap_err(),
            "job.toml:4: `train.lr_scaling` is \"linear\", but `base_batch` is missing: the batch that `optimizer.lr` \
             was chosen for\n  hint: write `base_batch = 256`, or whatever that batch was"
        );
        assert_eq!(
            read(&[("base_batch", Setting::Int(256))], 512).unwrap_err(),
            "job.toml:4: `train.base_batch` has no effect without `lr_scaling`\n  hint: write `lr_scaling = \"linear\"` too, or leave it out"
        );
        assert!(read(&[linear, ("base_batch", Setting::Int(0))], 512).unwrap_err().contains("must be at least 1"));
        assert!(
            read(&[("lr_scaling", Setting::Text("lineer".into()))], 8)
                .unwrap_err()
                .contains("did you mean \"linear\"?")
        );
    }
}
