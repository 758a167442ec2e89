//! From paths on the command line to a reader of their records.

use crate::fail::Failure;
use clap::Args;
use kolo_data::files::{self, DataFile};
use kolo_data::format::{self, Format, OpenError, Reader};
use kolo_graph::settings::{Setting, SettingError};
use kolo_train::job_file;

/// Which files to read, and how.
#[derive(Debug, Args)]
pub struct Input {
    /// The format, if the files do not tell it
    #[arg(long)]
    pub format: Option<String>,
    /// A key of `[data]` that the format knows, such as --set delimiter=";"
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Files, opened.
#[derive(Debug)]
pub struct Opened {
    pub files: Vec<DataFile>,
    pub format: &'static Format,
    pub reader: Box<dyn Reader>,
    /// What was left out or guessed in opening them.
    pub notes: Vec<String>,
}

impl Opened {
    pub fn bytes(&self) -> u64 {
        self.files.iter().filter(|file| !file.is_directory).map(|file| file.bytes).sum()
    }
}

fn list(names: &[String]) -> Option<Setting> {
    (!names.is_empty()).then(|| Setting::List(names.iter().cloned().map(Setting::Text).collect()))
}

/// Opens everything that these paths and patterns name, as one. Only these columns are wanted; all, if none is named.
pub fn open(paths: &[String], input: &Input, columns: &[String]) -> Result<Opened, Failure> {
    let mut root = job_file::parse("", "command line")?;
    for assignment in &input.set {
        let within = assignment.strip_prefix("data.").unwrap_or(assignment);
        job_file::override_with(&mut root, &format!("data.{within}"))?;
    }
    let own = [("format", "--format", input.format.clone().map(Setting::Text)), ("inputs", "--columns", list(columns))];
    for (key, place, value) in own {
        if let Some((value, data)) = value.and_then(|value| Some((value, root.table_mut("data", place)?))) {
            data.set(key, place, value);
        }
    }
    let settings = root.table("data")?;
    // A table that has columns which cannot be read is opened without them.
    settings.texts("inputs", "[\"a\", \"b\"]")?;
    settings.text("target", "")?;
    let (mut files, mut notes) = (Vec::new(), Vec::new());
    for path in paths {
        let listed = files::list(path, &settings, "source").map_err(failure)?;
        files.extend(listed.files);
        notes.extend(listed.notes);
    }
    let format = format::choose(&files, &settings).map_err(failure)?;
    let reader = (format.open)(&files, &settings).map_err(failure)?;
    settings.finish()?;
    notes.extend(kolo_data::notes::of_reader(&*reader));
    Ok(Opened { files, format, reader, notes })
}

fn failure(error: OpenError) -> Failure {
    match error {
        OpenError::Read(error) => kolo_train::Error::from(error).into(),
        // There is no job file here to write into.
        OpenError::Setting(SettingError { place, message, hint: hint_of_key }) => {
            let hint = hint_of_key.strip_prefix("write `format = \"").and_then(|rest| rest.split_once("\"`"));
            let hint = hint.map_or_else(|| hint_of_key.clone(), |(name, rest)| format!("add `--format {name}`{rest}"));
            SettingError { place, message, hint }.into()
        }
    }
}
