//! Reads damaged files with every reader: each must give records or errors that name the file, in bounded time and memory.

pub mod corpus;
#[allow(dead_code, reason = "not every program looks at the messages")]
pub mod hostile;

use corpus::{Corpus, Random, Sample};
use kolo_data::ReadError;
use kolo_data::files::DataFile;
use kolo_data::format::{OpenError, OpenedFiles, Reader};
use kolo_data::image::{Pixels, decode};
use kolo_data::record::{Record, RecordKind, RecordValue};
use kolo_data::stream::{self, STREAMS};
use kolo_graph::settings::{Setting, Settings};
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// Records that are read of one file.
const RECORDS: usize = 24;

/// What became of one input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Opened; so many records were read, and so many gave errors.
    Read(usize, usize),
    Refused,
    /// What should not happen.
    Finding(String),
}

/// A directory with the files of one format.
pub struct Bench<'c> {
    corpus: &'c Corpus,
    directory: PathBuf,
    /// What lay in it at first, so that what readers leave beside their files can be removed.
    known: HashSet<PathBuf>,
}

impl<'c> Bench<'c> {
    pub fn new(corpus: &'c Corpus, directory: &Path) -> Self {
        let mut known = HashSet::new();
        for (name, bytes) in corpus.samples.iter().flat_map(|sample| &sample.files) {
            let path = directory.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, bytes).unwrap();
            known.insert(path);
        }
        Self { corpus, directory: directory.into(), known }
    }

    /// Reads input number `input`.
    pub fn run(&self, input: u64) -> Outcome {
        let (sample, file, bytes) = self.corpus.input(input);
        let path = self.directory.join(&sample.files[file].0);
        std::fs::write(&path, bytes).unwrap();
        let outcome = self.read(sample, input);
        std::fs::write(&path, &sample.files[file].1).unwrap();
        self.tidy(path.parent().unwrap());
        outcome
    }

    fn tidy(&self, directory: &Path) {
        for entry in std::fs::read_dir(directory).unwrap().flatten() {
            let path = entry.path();
            if !self.known.contains(&path) && path.is_file() {
                let _ = std::fs::remove_file(path);
            }
        }
    }

    fn read(&self, sample: &Sample, input: u64) -> Outcome {
        let source = self.directory.join(&sample.source);
        let work = || -> Result<Outcome, String> {
            let file = DataFile::at(&source).map_err(|error| error.to_string())?;
            let settings = Settings::new("data", "fuzz");
            let outcome = examined((self.corpus.format.open)(&[file], &settings), input)?;
            if STREAMS.iter().any(|kind| kind.format == self.corpus.format.name) {
                let mut settings = Settings::new("data", "fuzz");
                settings.set("format", "fuzz", Setting::Text(self.corpus.format.name.into()));
                examined(stream::open_records(&source.to_string_lossy(), &settings), input)?;
            }
            Ok(outcome)
        };
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(finding)) => Outcome::Finding(finding),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
                Outcome::Finding(format!("panic: {}", text.unwrap_or_default()))
            }
        }
    }
}

/// Reads some records of what was opened.
fn examined(opened: OpenedFiles, input: u64) -> Result<Outcome, String> {
    match opened {
        Ok(reader) => read_some(&*reader, input),
        Err(OpenError::Setting(_)) => Ok(Outcome::Refused),
        Err(OpenError::Read(error)) => named(&error).map(|()| Outcome::Refused),
    }
}

/// Errors that are about a file as a whole.
const OF_THE_WHOLE: [&str; 8] = [
    "tokens, but a sample needs",
    "its records are in named databases",
    "which cannot be read as a stream",
    "it has no sample",
    "it has no record",
    "it has no datasets",
    "records, and \"",
    "it is empty",
];

/// An error must say which file it is about and where in it, and be short enough to be read.
fn named(error: &ReadError) -> Result<(), String> {
    let text = error.to_string();
    let is_of_the_whole = OF_THE_WHOLE.iter().any(|part| text.contains(part));
    match (&error.file, text.len() < 4000) {
        (None, _) => Err(format!("an error names no file: {text}")),
        (Some(file), _) if !file.is_dir() && !text.contains("byte ") && !is_of_the_whole => {
            Err(format!("an error names no byte: {text}"))
        }
        (_, false) => Err(format!("an error has {} bytes: {:.300}…", text.len(), text)),
        _ => Ok(()),
    }
}

fn read_some(reader: &dyn Reader, input: u64) -> Result<Outcome, String> {
    let mut random = Random::of("records", input);
    let (mut read, mut errors) = (0, 0);
    let mut record = Record::new();
    let len = reader.len();
    for step in 0..RECORDS.min(len) {
        let at = match step {
            0 => 0,
            1 => len - 1,
            _ => random.below(len),
        };
        match reader.read(at, &mut record) {
            Ok(()) => {
                read += 1;
                check(reader, &record)?;
            }
            Err(error) => {
                errors += 1;
                named(&error)?;
            }
        }
    }
    Ok(Outcome::Read(read, errors))
}

/// Values must be what the columns say.
fn check(reader: &dyn Reader, record: &Record) -> Result<(), String> {
    for (at, column) in reader.columns().iter().enumerate() {
        let value = record.value(at);
        let size = |shape: &[usize]| shape.iter().product::<usize>();
        let fits = match (&column.kind, value) {
            (_, RecordValue::Missing) => true,
            (RecordKind::Image, RecordValue::Bytes(bytes)) => decodes(bytes)?,
            (RecordKind::Bytes, RecordValue::Bytes(_)) => true,
            (RecordKind::Pixels { shape }, RecordValue::Bytes(bytes)) => bytes.len() == size(shape),
            (RecordKind::Text, RecordValue::Text(_)) => true,
            (RecordKind::Real { shape }, RecordValue::Reals(values)) => values.len() == size(shape),
            (RecordKind::Int { shape, .. }, RecordValue::Ints(values)) => values.len() == size(shape),
            // Of a stream, whose first records had no fractions.
            (RecordKind::Int { shape, classes: None }, RecordValue::Reals(values)) => values.len() == size(shape),
            (RecordKind::Class { names }, RecordValue::Ints(values)) => {
                values.len() == 1 && (0..names.len() as i64).contains(&values[0])
            }
            _ => false,
        };
        if !fits {
            let kind = format!("{:?}", column.kind);
            return Err(format!("column \"{:.40}\" is {kind:.200}, but a value is not", column.name));
        }
    }
    Ok(())
}

/// An image is decoded or refused. The decoder's panics become errors, but they are findings.
fn decodes(bytes: &[u8]) -> Result<bool, String> {
    let mut pixels = Pixels::default();
    match decode(bytes, &mut pixels) {
        Ok(()) => Ok(pixels.bytes.len() == pixels.channels * pixels.height * pixels.width),
        Err(error) if error.contains("gave up") => Err(error),
        Err(_) => Ok(true),
    }
}
