//! How a command fails: a message with a hint, and an honest exit code.

use kolo_graph::settings::SettingError;
use std::fs::OpenOptions;
use std::path::Path;
use std::process::ExitCode;

#[derive(Debug)]
pub struct Failure {
    message: String,
    code: u8,
}

const JOB_FAILED: u8 = 1;
const COMMAND_WRONG: u8 = 2;

impl Failure {
    /// The command was wrong.
    pub fn usage(message: impl Into<String>, hint: &str) -> Self {
        Self { message: format!("{}\n  hint: {hint}", message.into()), code: COMMAND_WRONG }
    }

    /// The job failed.
    pub fn job(message: impl Into<String>, hint: &str) -> Self {
        Self { message: format!("{}\n  hint: {hint}", message.into()), code: JOB_FAILED }
    }

    /// Working together failed; the message has its own hint.
    pub fn together(message: String) -> Self {
        Self { message, code: JOB_FAILED }
    }

    /// The workers ended like this.
    pub fn ended(message: String, code: i32) -> Self {
        Self { message, code: u8::try_from(code).unwrap_or(JOB_FAILED) }
    }

    /// Somebody else has shown why.
    pub fn reported() -> Self {
        Self { message: String::new(), code: JOB_FAILED }
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    pub fn report(self) -> ExitCode {
        if !self.message.is_empty() {
            eprintln!("error: {}", self.message);
        }
        ExitCode::from(self.code)
    }
}

impl From<kolo_train::Error> for Failure {
    fn from(error: kolo_train::Error) -> Self {
        Self { code: if error.is_usage() { COMMAND_WRONG } else { JOB_FAILED }, message: error.to_string() }
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
