//! What a run leaves on disk while it goes on: metrics as JSON lines and as TensorBoard events.

use crate::checkpoint::JOB_FILE;
use crate::error::Error;
use crate::events::EventWriter;
use crate::metrics::MetricsFile;
use crate::run_dir::RunDir;
use kolo_base::ShownPath;
use std::io::{ErrorKind, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Where a run's files go.
#[derive(Clone, Debug)]
pub struct OutDir {
    pub path: PathBuf,
    /// The user asked for it: a file that cannot be written at the start ends the run, and one that cannot be written later
    /// makes the command fail at its end. Otherwise the run goes on without.
    pub required: bool,
    /// Files of an earlier run that this one replaces. They go when it has begun, not before: a job that does not fit loses nothing.
    pub stale: Vec<PathBuf>,
    /// The mark of this run in the lock file of the directory, if it has one.
    pub mark: Option<String>,
    /// The directory as it was when this process began to write there.
    held: Arc<OnceLock<RunDir>>,
}

impl OutDir {
    pub fn new(path: PathBuf, required: bool) -> Self {
        Self { path, required, stale: Vec::new(), mark: None, held: Arc::default() }
    }

    /// The same, in place of these files of an earlier run.
    pub fn replacing(self, stale: Vec<PathBuf>) -> Self {
        Self { stale, ..self }
    }

    /// The same, for a run with this mark in the lock file.
    pub fn marked(self, mark: Option<String>) -> Self {
        Self { mark, ..self }
    }

    /// Makes the directory if it is not there, and remembers it, for whoever writes the run's results. Refuses one that another
    /// run has taken over.
    pub fn hold(&self) -> Result<(), Error> {
        if self.held.get().is_none() {
            // Why it cannot be made or opened, whoever writes there says.
            let _ = std::fs::create_dir_all(&self.path);
            if let Ok(dir) = RunDir::open(&self.path, self.mark.clone()) {
                let _ = self.held.set(dir);
            }
        }
        self.check()
    }

    /// Whether the directory is still that of this run, as far as this process writes there.
    pub fn check(&self) -> Result<(), Error> {
        Ok(self.dir().map_or(Ok(()), RunDir::check)?)
    }

    /// The directory as this process holds it.
    pub fn dir(&self) -> Option<&RunDir> {
        self.held.get()
    }
}

/// The open files of a run, if it has any.
#[derive(Debug)]
pub struct Record {
    files: Option<Files>,
    required: bool,
    /// What could not be written of what the user asked for.
    unwritten: Option<String>,
}

#[derive(Debug)]
struct Files {
    dir: PathBuf,
    metrics: MetricsFile,
    events: EventWriter,
}

impl Record {
    fn none() -> Self {
        Self { files: None, required: false, unwritten: None }
    }

    /// Opens the files, and writes the job beside them; of a run that goes on after so many steps, those that are there (and
    /// whether what follows its last step is still to be done). What went wrong with files that nobody asked for is told to
    /// `note`.
    pub fn create(
        out: Option<&OutDir>,
        job_text: &str,
        resumed: Option<(usize, bool)>,
        note: &mut dyn FnMut(&str),
    ) -> Result<Self, Error> {
        let Some(OutDir { path, required, stale, .. }) = out else { return Ok(Self::none()) };
        let mut record = Self { required: *required, ..Self::none() };
        let remove = |path: &PathBuf| {
            let is_dir = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir());
            let removed = if is_dir { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
            match removed {
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
                removed => removed.map_err(|error| write_error(path, &error)),
            }
        };
        stale.iter().try_for_each(remove)?;
        match Files::create(path, job_text, resumed) {
            Ok(files) => record.files = Some(files),
            Err(error) if *required => return Err(error),
            Err(error) => record.settle(Err(error), note)?,
        }
        Ok(record)
    }

    /// Takes up the files of a run that another process has written so far. The caller writes rows of these steps again, as
    /// some may be missing, and what follows the last, if that is still to be done; later ones go.
    pub fn reopen(
        out: Option<&OutDir>,
        job_text: &str,
        (steps, pending): (Range<u64>, bool),
        note: &mut dyn FnMut(&str),
    ) -> Result<Self, Error> {
        let Some(OutDir { path, required, .. }) = out else { return Ok(Self::none()) };
        let mut record = Self { required: *required, ..Self::none() };
        let outcome = Files::reopen(path, job_text, steps, pending).map(|files| record.files = Some(files));
        record.settle(outcome, note)?;
        Ok(record)
    }

    pub fn write(
        &mut self,
        step: usize,
        epoch: usize,
        values: &[(&str, f64)],
        note: &mut dyn FnMut(&str),
    ) -> Result<(), Error> {
        let Some(files) = &mut self.files else { return Ok(()) };
        let outcome = files.write(step, epoch, values);
        self.settle(outcome, note)
    }

    /// What was asked for and could not be written, since a disk was full or gone.
    pub fn unwritten(&self) -> Option<&str> {
        self.unwritten.as_deref()
    }

    /// Remembers what an earlier record of the same run could not write.
    pub fn after(self, earlier: &Self) -> Self {
        Self { unwritten: earlier.unwritten.clone().or(self.unwritten), ..self }
    }

    /// Training goes on without the files: what it learns is worth more than its rows.
    fn settle(&mut self, outcome: Result<(), Error>, note: &mut dyn FnMut(&str)) -> Result<(), Error> {
        match outcome {
            Err(Error::Write { path, message }) => {
                self.files = None;
                note(&format!("note: {path}: {message}; this run's metrics are not saved from here on"));
                if self.required {
                    self.unwritten.get_or_insert(format!("{path}: {message}"));
                }
                Ok(())
            }
            outcome => outcome,
        }
    }
}

impl Files {
    fn create(dir: &Path, job_text: &str, resumed: Option<(usize, bool)>) -> Result<Self, Error> {
        begin_in(dir, job_text)?;
        let metrics = dir.join("metrics.jsonl");
        Ok(Self {
            dir: dir.into(),
            metrics: match resumed {
                Some((step, pending)) => MetricsFile::resume(&metrics, step as u64, pending),
                None => MetricsFile::create(&metrics),
            }
            .map_err(|error| write_error(&metrics, &error))?,
            events: events_from(dir, resumed.map(|(step, _)| step as u64 + 1))
                .map_err(|error| write_error(dir, &error))?,
        })
    }

    fn reopen(dir: &Path, job_text: &str, steps: Range<u64>, pending: bool) -> Result<Self, Error> {
        // The file that the run began with stays as it is: a disk that is full by now would empty it.
        if kolo_base::open_regular(&dir.join(JOB_FILE)).and_then(std::io::read_to_string).ok().as_deref()
            != Some(job_text)
        {
            begin_in(dir, job_text)?;
        }
        let events = events_from(dir, Some(steps.end)).map_err(|error| write_error(dir, &error))?;
        let path = dir.join("metrics.jsonl");
        let metrics = MetricsFile::reopen(&path, steps, pending).map_err(|error| write_error(&path, &error))?;
        Ok(Self { dir: dir.into(), metrics, events })
    }

    fn write(&mut self, step: usize, epoch: usize, values: &[(&str, f64)]) -> Result<(), Error> {
        let written = self.metrics.write(step as u64, epoch as u64, values);
        let metrics = self.dir.join("metrics.jsonl");
        if !written.map_err(|error| row_error(&metrics, step, &error))? {
            // Then it is among the events, too.
            return Ok(());
        }
        let events = &mut self.events;
        let mut written = values.iter().try_for_each(|(tag, value)| events.scalar(tag, step as u64, *value as f32));
        written = written.and_then(|()| events.flush());
        written.map_err(|error| row_error(events.path(), step, &error))
    }
}

/// Events of a new run, or of one that goes on with this step.
fn events_from(dir: &Path, step: Option<u64>) -> std::io::Result<EventWriter> {
    let mut events = EventWriter::create(dir)?;
    step.map_or(Ok(()), |step| events.restart(step))?;
    Ok(events)
}

/// A directory with its job.
fn begin_in(dir: &Path, job_text: &str) -> Result<(), Error> {
    std::fs::create_dir_all(dir).map_err(|error| write_error(dir, &error))?;
    if job_text.is_empty() {
        return Ok(());
    }
    let path = dir.join(JOB_FILE);
    let written = kolo_base::create_regular(&path).and_then(|mut file| file.write_all(job_text.as_bytes()));
    written.map_err(|error| Error::Write {
        path: path.shown().to_string(),
        message: format!("{}, writing {} bytes", why(&error), job_text.len()),
    })
}

/// With the bytes that the file has, whole rows or not.
fn row_error(path: &Path, step: usize, error: &std::io::Error) -> Error {
    let bytes = path.metadata().map_or(0, |there| there.len());
    let message = format!("cannot write the row of step {step} after {bytes} bytes: {}", why(error));
    Error::Write { path: path.shown().to_string(), message }
}

fn write_error(path: &Path, error: &std::io::Error) -> Error {
    Error::Write { path: path.shown().to_string(), message: why(error) }
}

/// What the system says, and which limit it means, if it means one.
fn why(error: &std::io::Error) -> String {
    kolo_base::limit_hint(error).map_or_else(|| error.to_string(), |hint| format!("{error}: {hint}"))
}
