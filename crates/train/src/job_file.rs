//! Job files: [`kolo_config`] with what a job file has to say when it cannot be read.

use kolo_config::FileKind;
pub use kolo_config::{check_sections, override_with, parse, write};
use kolo_graph::settings::{SettingError, Settings};
use std::path::Path;

const JOB_FILE: FileKind = FileKind {
    noun: "job file",
    missing: "check the path, or run `kolo train` without a file for the built-in job",
    too_large: "a job file holds settings only; name data by `data.source`",
};

/// Reads the job file at `path`.
pub fn read(path: &Path) -> Result<Settings, SettingError> {
    kolo_config::read(path, &JOB_FILE).map_err(|error| {
        match path.exists() && path.extension() != Some("toml".as_ref()) {
            // Data, most likely, by whoever has no job yet.
            true => {
                let hint =
                    format!("name a job file; data are named in it: `source = \"{}\"` under [data]", path.display());
                SettingError { hint, ..error }
            }
            false => error,
        }
    })
}
