//! How a command fails: a message with a hint, and an honest exit code.

use crate::output;
use crate::whole_file::WholeFile;
use kolo_base::ShownPath;
use kolo_comm::Fault;
use kolo_data::Source;
use kolo_graph::settings::SettingError;
use kolo_train::interrupt::EXIT_SIGNALLED;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

#[derive(Clone, Debug)]
pub struct Failure {
    message: String,
    code: u8,
    /// The rank that is to blame, if it is another one.
    culprit: Option<usize>,
    /// That rank says more than this one knows.
    told_by_culprit: bool,
    /// A rank was lost, or did not go on.
    of_lost_rank: bool,
}

const JOB_FAILED: u8 = 1;
const COMMAND_WRONG: u8 = 2;

const NOTHING: Failure =
    Failure { message: String::new(), code: JOB_FAILED, culprit: None, told_by_culprit: false, of_lost_rank: false };

impl Failure {
    /// The command was wrong.
    pub fn usage(message: impl Into<String>, hint: &str) -> Self {
        Self { message: format!("{}\n  hint: {hint}", message.into()), code: COMMAND_WRONG, ..NOTHING }
    }

    /// A flag was wrong; the fault has its own hint.
    pub fn wrong_flag(fault: Fault) -> Self {
        Self { message: fault.to_string(), code: COMMAND_WRONG, ..NOTHING }
    }

    /// A device cannot be used; the error has its own hint.
    pub fn device(error: &kolo_cuda::CudaError) -> Self {
        Self { message: error.to_string(), code: COMMAND_WRONG, ..NOTHING }
    }

    /// The job failed.
    pub fn job(message: impl Into<String>, hint: &str) -> Self {
        Self { message: format!("{}\n  hint: {hint}", message.into()), ..NOTHING }
    }

    /// The workers ended like this, by this fault if by any.
    pub fn ended(message: String, code: i32, fault: Option<&Fault>) -> Self {
        let of_lost_rank = matches!(fault, Some(Fault::Lost { .. } | Fault::Stalled { .. }));
        Self { message, code: u8::try_from(code).unwrap_or(JOB_FAILED), of_lost_rank, ..NOTHING }
    }

    /// The same with what it means that a rank was lost, if one was, before its hint.
    pub fn meaning(mut self, of_lost_rank: impl FnOnce() -> String) -> Self {
        if self.of_lost_rank {
            let at = self.message.find("\n  hint: ").unwrap_or(self.message.len());
            self.message.insert_str(at, &format!("\n  {}", of_lost_rank()));
        }
        self
    }

    /// The run was asked to end by this signal, and did so in order: all is said.
    pub fn interrupted(signal: i32) -> Self {
        Self { code: u8::try_from(EXIT_SIGNALLED + signal).unwrap_or(JOB_FAILED), ..NOTHING }
    }

    /// Somebody else has shown why.
    pub fn reported() -> Self {
        NOTHING
    }

    /// The same with layouts that would do, before its hint.
    pub fn beside(mut self, layouts: &[String]) -> Self {
        if !layouts.is_empty() {
            let lines: String = layouts.iter().map(|layout| format!("\n    {layout}")).collect();
            let at = self.message.rfind("\n  hint: ").unwrap_or(self.message.len());
            self.message.insert_str(at, &format!("\n  layouts that would do:{lines}"));
        }
        self
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    /// The rank that is to blame, if it is another one.
    pub fn culprit(&self) -> Option<usize> {
        self.culprit
    }

    /// Whether that rank says more than this one knows.
    pub fn told_by_culprit(&self) -> bool {
        self.told_by_culprit
    }

    /// The same end, with nothing to say.
    pub fn silent(self) -> Self {
        Self { message: String::new(), ..self }
    }

    pub fn report(self) -> ExitCode {
        if !self.message.is_empty() {
            output::print_error(&format!("error: {}", self.message));
        }
        ExitCode::from(self.code)
    }
}

impl From<kolo_train::Error> for Failure {
    fn from(error: kolo_train::Error) -> Self {
        let code = if error.is_usage() { COMMAND_WRONG } else { JOB_FAILED };
        let told_by_culprit = matches!(error, kolo_train::Error::ReportedElsewhere { .. });
        Self { message: error.to_string(), code, culprit: error.culprit(), told_by_culprit, ..NOTHING }
    }
}

/// Working together failed; the message has its own hint.
impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        kolo_train::Error::from(fault).into()
    }
}

impl From<SettingError> for Failure {
    fn from(error: SettingError) -> Self {
        kolo_train::Error::from(error).into()
    }
}

/// A checkpoint; the message has its own hint. A path that is not there is a wrong command.
impl From<kolo_ckpt::CkptError> for Failure {
    fn from(error: kolo_ckpt::CkptError) -> Self {
        let not_there = |source: &std::io::Error| source.kind() == std::io::ErrorKind::NotFound;
        let code = match &error {
            kolo_ckpt::CkptError::Io { source, .. } if not_there(source) => COMMAND_WRONG,
            _ => JOB_FAILED,
        };
        Self { message: error.to_string(), code, ..NOTHING }
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

/// Refuses to write over what a command reads: its data, its job file.
pub fn refuse_inputs(flag: &str, path: &Path, data: &dyn Source, job: Option<&Path>) -> Result<(), Failure> {
    let is_job =
        || job.is_some_and(|job| path.canonicalize().is_ok_and(|path| job.canonicalize().is_ok_and(|job| job == path)));
    match data.reads(path) || is_job() {
        true => Err(Failure::usage(format!("{flag}: {} is one of the inputs", path.shown()), "choose another name")),
        false => Ok(()),
    }
}

/// Writes a file, or says why not, and leaves the one that was there.
pub fn write_file(path: &Path, contents: impl AsRef<[u8]>) -> Result<(), Failure> {
    let write = || -> std::io::Result<u64> {
        let file = WholeFile::create(path)?;
        file.handle()?.write_all(contents.as_ref())?;
        file.finish()
    };
    write().map(drop).map_err(|error| cannot_write(path, &error))
}

fn cannot_write(path: &Path, error: &std::io::Error) -> Failure {
    Failure::job(format!("{}: {error}", path.shown()), "choose a writable path")
}
