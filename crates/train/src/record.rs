//! What a run leaves on disk while it goes on: metrics as JSON lines and as TensorBoard events.

use crate::error::Error;
use crate::events::EventWriter;
use crate::metrics::MetricsFile;
use std::path::{Path, PathBuf};

/// Where a run's files go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutDir {
    pub path: PathBuf,
    /// The user asked for it: a file that cannot be written ends the run. Otherwise the run goes on without.
    pub required: bool,
    /// Files of an earlier run that this one replaces. They go when it has begun, not before: a job that does not fit loses nothing.
    pub stale: Vec<PathBuf>,
}

impl OutDir {
    pub fn new(path: PathBuf, required: bool) -> Self {
        Self { path, required, stale: Vec::new() }
    }
}

/// The open files of a run, if it has any.
#[derive(Debug)]
pub struct Record {
    files: Option<Files>,
    required: bool,
}

#[derive(Debug)]
struct Files {
    dir: PathBuf,
    metrics: MetricsFile,
    events: EventWriter,
}

impl Record {
    /// Opens the files; of a run that goes on after so many steps, those that are there. What went wrong with files that
    /// nobody asked for is told to `note`.
    pub fn create(out: Option<&OutDir>, resumed: Option<usize>, note: &mut dyn FnMut(&str)) -> Result<Self, Error> {
        let Some(OutDir { path, required, stale }) = out else { return Ok(Self { files: None, required: false }) };
        let mut record = Self { files: None, required: *required };
        let remove = |path: &PathBuf| {
            let is_dir = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir());
            let removed = if is_dir { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
            removed.map_err(|error| write_error(path, &error))
        };
        stale.iter().try_for_each(remove)?;
        let outcome = Files::create(path, resumed).map(|files| record.files = Some(files));
        record.settle(outcome, note)?;
        Ok(record)
    }

    /// Takes up the files of a run that another process has written so far; rows of `step` and later are written anew.
    pub fn reopen(out: Option<&OutDir>, step: u64, note: &mut dyn FnMut(&str)) -> Result<Self, Error> {
        let Some(OutDir { path, required, .. }) = out else { return Ok(Self { files: None, required: false }) };
        let mut record = Self { files: None, required: *required };
        let outcome = Files::reopen(path, step).map(|files| record.files = Some(files));
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

    fn settle(&mut self, outcome: Result<(), Error>, note: &mut dyn FnMut(&str)) -> Result<(), Error> {
        match outcome {
            Err(Error::Write { path, message }) if !self.required => {
                self.files = None;
                note(&format!("note: {path}: {message}; this run's metrics are not saved from here on"));
                Ok(())
            }
            outcome => outcome,
        }
    }
}

impl Files {
    fn create(dir: &Path, resumed: Option<usize>) -> Result<Self, Error> {
        let failed = |error: std::io::Error| write_error(dir, &error);
        std::fs::create_dir_all(dir).map_err(failed)?;
        Ok(Self {
            dir: dir.into(),
            metrics: match resumed {
                Some(step) => MetricsFile::resume(&dir.join("metrics.jsonl"), step as u64),
                None => MetricsFile::create(&dir.join("metrics.jsonl")),
            }
            .map_err(failed)?,
            events: EventWriter::create(dir).map_err(failed)?,
        })
    }

    fn reopen(dir: &Path, step: u64) -> Result<Self, Error> {
        let failed = |error: std::io::Error| write_error(dir, &error);
        std::fs::create_dir_all(dir).map_err(failed)?;
        Ok(Self {
            dir: dir.into(),
            metrics: MetricsFile::reopen(&dir.join("metrics.jsonl"), step).map_err(failed)?,
            events: EventWriter::create(dir).map_err(failed)?,
        })
    }

    fn write(&mut self, step: usize, epoch: usize, values: &[(&str, f64)]) -> Result<(), Error> {
        let written = self.metrics.write(step as u64, epoch as u64, values);
        written.map_err(|error| write_error(&self.dir.join("metrics.jsonl"), &error))?;
        let events = &mut self.events;
        let mut written = values.iter().try_for_each(|(tag, value)| events.scalar(tag, step as u64, *value as f32));
        written = written.and_then(|()| events.flush());
        written.map_err(|error| write_error(events.path(), &error))
    }
}

fn write_error(path: &Path, error: &std::io::Error) -> Error {
    Error::Write { path: path.display().to_string(), message: error.to_string() }
}
