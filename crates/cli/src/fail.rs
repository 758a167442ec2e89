//! How a command fails: a message with a hint, and an honest exit code.

use kolo_graph::settings::SettingError;
use std::fs::OpenOptions;
use std::path::Path;
use std::process::ExitCode;

#[derive(Debug)]
pub struct Failure {
    message: String,
    usage: bool,
}

impl Failure {
    /// The command was wrong.
    pub fn usage(message: impl Into<String>, hint: &str) -> Self {
        Self { message: format!("{}\n  hint: {hint}", message.into()), usage: true }
    }

    /// The job failed.
    pub fn job(message: impl Into<String>, hint: &str) -> Self {
        Self { message: format!("{}\n  hint: {hint}", message.into()), usage: false }
    }

    pub fn report(self) -> ExitCode {
        eprintln!("error: {}", self.message);
        ExitCode::from(if self.usage { 2 } else { 1 })
    }
}

impl From<kolo_train::Error> for Failure {
    fn from(error: kolo_train::Error) -> Self {
        Self { usage: error.is_usage(), message: error.to_string() }
    }
}

impl From<SettingError> for Failure {
    fn from(error: SettingError) -> Self {
        kolo_train::Error::from(error).into()
    }
}

impl From<kolo_graph::GraphError> for Failure {
    fn from(error: kolo_graph::GraphError) -> Self {
        kolo_train::Error::from(error).into()
    }
}

/// Says before a long run that its result could not be written. A file that stands there already is left as it is.
pub fn check_writable(path: &Path) -> Result<(), Failure> {
    let existed = path.exists();
    OpenOptions::new().append(true).create(true).open(path).map_err(|error| cannot_write(path, &error))?;
    if !existed {
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

/// Writes a file, or says why not.
pub fn write_file(path: &Path, contents: impl AsRef<[u8]>) -> Result<(), Failure> {
    std::fs::write(path, contents).map_err(|error| cannot_write(path, &error))
}

fn cannot_write(path: &Path, error: &std::io::Error) -> Failure {
    Failure::job(format!("{}: {error}", path.display()), "choose a place that can be written")
}
