//! A source that reads files: records become samples, samples are transformed, and what fails may be left out.
//!
//! ```text
//! Part (files, Reader) ── record ──► Assembly ── sample ──► Transform … ──► Cache ──► Transform … ──► Row
//!       read                          decode                fixed ones               random ones
//! ```
//!
//! A sample depends on the files, the job's keys and the draw only: not on the thread, nor on what was read before. Files that
//! train come first, then those that validate, then those that test; a [`Split`] knows which is which.

mod assembly;
mod classes;
mod columns;
mod held_out;
mod lookup;
mod moments;
mod open;
mod part;
mod plain;
mod saved;
mod streamed;
mod table_windows;
#[cfg(test)]
mod tests;
mod types;

pub(crate) use assembly::luminance;
pub(crate) use columns::is_target_name;
pub(crate) use open::open;
pub use plain::open_for_field;
pub use saved::{open_for_evaluation, open_for_prediction, tokenizer_used};
pub(crate) use streamed::StreamedRecords;
#[cfg(test)]
pub(crate) use streamed::opened_stream;

use crate::cache::{self, Cache};
use crate::error::ReadError;
use crate::fingerprint;
use crate::load_times::{LoadMeter, LoadTimes, Stage};
use crate::record::{Record, RecordName};
use crate::sample::Sample;
use crate::source::{Draw, Row, SampleName, Source, count_classes, target_classes};
use crate::split::{Purpose, Split};
use crate::transform::{Cx, Fitted, Others, TargetScale, Transform, VisitTraining, Work};
use assembly::Assembly;
use kolo_base::lock;
use kolo_graph::field::{Column, Field};
use kolo_graph::rng::Stream;
use kolo_graph::settings::{SettingError, Settings};
use part::Part;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

/// Samples that are tried in place of one that cannot be read.
const REPLACEMENTS_MAX: u64 = 16;
/// Samples that are looked at to know what a cache takes, spread evenly.
const LOOKED_AT: usize = 8;
/// Training samples that statistics are taken from, spread evenly.
const FITTED_SAMPLES_MAX: usize = 200_000;

/// Samples of files.
#[derive(Debug)]
pub struct FileSource {
    /// Of training, then perhaps of validation and of the test.
    parts: Vec<Part>,
    split: Split,
    /// How the samples were divided, where a user should know.
    split_note: Option<String>,
    assembly: Assembly,
    transforms: Vec<Box<dyn Transform>>,
    fitted: Fitted,
    /// Transforms before the first random one: what they leave may be cached.
    fixed: usize,
    cache: Option<Cache>,
    /// What a sample takes in the cache, as far as a few of them tell.
    cached_sample_bytes: u64,
    fields: Vec<Field>,
    /// Which columns are used, and what was left out or guessed.
    notes: Vec<String>,
    on_error: OnError,
    replacements: Stream,
    meter: LoadMeter,
    /// Boxed: each is taken and put back for every sample.
    #[allow(clippy::vec_box)]
    scratch: Mutex<Vec<Box<Scratch>>>,
}

/// What becomes of a sample that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnError {
    Stop,
    /// Another sample stands in, so that every batch is whole.
    Replace,
    /// Nothing is written in its place: whoever asked looks with [`Source::is_unreadable`].
    LeaveOut,
}

impl OnError {
    /// What `on_error` says, of a job that trains.
    fn read(settings: &Settings) -> Result<Self, SettingError> {
        Ok(match settings.choice("on_error", &["stop", "skip"])? {
            "skip" => Self::Replace,
            _ => Self::Stop,
        })
    }

    fn skips(self) -> bool {
        self != Self::Stop
    }
}

/// Buffers of one thread at a time.
#[derive(Debug, Default)]
struct Scratch {
    record: Record,
    sample: Sample,
    work: Work,
    bytes: Vec<u8>,
    /// The sample came out of the cache.
    is_hit: bool,
}

impl FileSource {
    fn new(parts: Vec<Part>, split: Split, assembly: Assembly, seed: u64, on_error: OnError) -> Self {
        Self {
            parts,
            split,
            split_note: None,
            assembly,
            transforms: Vec::new(),
            fitted: Fitted::default(),
            fixed: 0,
            cache: None,
            cached_sample_bytes: 0,
            fields: Vec::new(),
            notes: Vec::new(),
            on_error,
            replacements: Stream::new(seed, "data.replacements"),
            meter: LoadMeter::default(),
            scratch: Mutex::default(),
        }
    }

    /// What was left out or guessed in reading the files of all parts, each once.
    fn notes_of_parts(&self) -> Vec<String> {
        let mut notes: Vec<String> = Vec::new();
        for note in self.parts.iter().flat_map(|part| &part.notes) {
            if !notes.contains(note) {
                notes.push(note.clone());
            }
        }
        notes
    }

    /// The part that a sample is of, and its number there.
    fn locate(&self, sample: usize) -> (&Part, usize) {
        let mut at = sample;
        for part in &self.parts {
            match at.checked_sub(part.reader.len()) {
                None => return (part, at),
                Some(rest) => at = rest,
            }
        }
        panic!("sample {sample} of {}", self.len())
    }

    fn with_scratch<T>(&self, work: impl FnOnce(&mut Scratch) -> T) -> T {
        let mut scratch = lock(&self.scratch).pop().unwrap_or_default();
        let outcome = work(&mut scratch);
        lock(&self.scratch).push(scratch);
        outcome
    }

    /// Makes a sample, after the first `transforms`. If it cannot be read, another one that is for the same stands in, where
    /// that is allowed: which one depends on the number of the sample only.
    fn make(&self, draw: Draw, transforms: usize, scratch: &mut Scratch) -> Result<(), ReadError> {
        let Err(error) = self.attempt(draw, transforms, scratch) else { return Ok(()) };
        if self.on_error == OnError::Stop {
            return Err(error);
        }
        self.meter.skip(draw.sample, &error);
        if self.on_error == OnError::LeaveOut {
            return Err(error);
        }
        let purpose = self.split.purpose(draw.sample);
        let others = self.split.len_of(purpose) as u64;
        for attempt in 0..REPLACEMENTS_MAX {
            let other = self.replacements.below(draw.sample as u64, attempt, others);
            let draw = Draw { sample: self.split.sample_of(purpose, other as usize), ..draw };
            if self.attempt(draw, transforms, scratch).is_ok() {
                return Ok(());
            }
        }
        let message =
            format!("{}; {REPLACEMENTS_MAX} replacements that were tried cannot be read either", error.message);
        Err(ReadError { message, ..error }.despite_skipping())
    }

    fn attempt(&self, draw: Draw, transforms: usize, scratch: &mut Scratch) -> Result<(), ReadError> {
        let (part, at) = self.locate(draw.sample);
        let made = self.attempt_from(draw, transforms, scratch, &mut |record| part.read(at, record));
        made.map_err(|error| part.blame(at, error))
    }

    /// Makes a sample of the record that `read` reads.
    fn attempt_from(
        &self,
        draw: Draw,
        transforms: usize,
        scratch: &mut Scratch,
        read: &mut dyn FnMut(&mut Record) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        let (part, _) = self.locate(draw.sample);
        let fixed = self.fixed.min(transforms);
        let cache = self.cache.as_ref().filter(|_| fixed == self.fixed);
        let mut start = Instant::now();
        let hit = match cache {
            Some(cache) => cache.get(draw.sample, &mut scratch.sample, &mut scratch.bytes)?,
            None => false,
        };
        scratch.is_hit = hit;
        if hit {
            start = self.meter.add(Stage::Read, start);
        } else {
            read(&mut scratch.record)?;
            start = self.meter.add(Stage::Read, start);
            let assembled = self.assembly.assemble(&part.places, &scratch.record, &mut scratch.sample);
            start = self.meter.add(Stage::Decode, start);
            assembled?;
            self.transform(draw, 0..fixed, scratch)?;
            if let Some(cache) = cache {
                cache.put(draw.sample, &scratch.sample, &mut scratch.bytes);
            }
        }
        let transformed = self.transform(draw, fixed..transforms, scratch);
        self.meter.add(Stage::Transform, start);
        transformed
    }

    fn transform(&self, draw: Draw, which: std::ops::Range<usize>, scratch: &mut Scratch) -> Result<(), ReadError> {
        let mut cx = Cx { draw, work: &mut scratch.work, others: self };
        self.transforms[which].iter().try_for_each(|transform| transform.apply(&mut scratch.sample, &mut cx))
    }

    /// Keeps samples in this cache, and finds out what one takes there.
    fn keep_in(&mut self, cache: Option<Cache>) {
        let Some(cache) = cache else { return };
        let samples = self.len() - self.split.test_len();
        // The first record of a stream is at hand; others would have to be walked to.
        let looked_at = if self.is_stream() { 1 } else { LOOKED_AT.min(samples) };
        let bytes = |at: usize| {
            self.with_scratch(|scratch| {
                let draw = Draw { sample: at * samples / looked_at.max(1), epoch: None };
                self.attempt(draw, self.fixed, scratch).ok()?;
                Some(cache::bytes_of(&scratch.sample, &mut scratch.bytes))
            })
        };
        // If none of them can be read, the cache may become full.
        self.cached_sample_bytes = (0..looked_at).filter_map(bytes).max().unwrap_or(u64::MAX);
        self.cache = Some(cache);
    }

    /// As [`Source::fill`], but nothing stands in for a sample that cannot be read.
    fn fill_unless_skipped(&self, sample: usize, field: usize, out: Column<'_>) -> Result<(), ReadError> {
        let draw = Draw { sample, epoch: None };
        self.with_scratch(|scratch| match self.attempt(draw, self.transforms.len(), scratch) {
            Ok(()) => self.write(draw, &scratch.sample, field, out),
            Err(_) if self.on_error.skips() => Ok(()),
            Err(error) => Err(error),
        })
    }

    fn write(&self, draw: Draw, sample: &Sample, field: usize, out: Column<'_>) -> Result<(), ReadError> {
        let value = if field == 0 { &sample.x } else { &sample.y };
        value.write(out).map_err(|message| {
            let (part, at) = self.locate(draw.sample);
            part.blame(at, ReadError::new(message, "every sample must have the same shape"))
        })
    }
}

impl Others for FileSource {
    fn load(&self, draw: Draw, transforms: usize, use_it: &mut dyn FnMut(&Sample)) -> Result<(), ReadError> {
        self.with_scratch(|scratch| {
            self.make(draw, transforms, scratch)?;
            use_it(&scratch.sample);
            Ok(())
        })
    }
}

impl VisitTraining for FileSource {
    fn visit(&self, visitor: &mut dyn FnMut(&Sample)) -> Result<(), ReadError> {
        let step = self.split.train_len().div_ceil(FITTED_SAMPLES_MAX).max(1);
        let training = (0..self.len()).filter(|sample| self.split.purpose(*sample) == Purpose::Training);
        self.with_scratch(|scratch| {
            for sample in training.step_by(step) {
                match self.attempt(Draw { sample, epoch: None }, self.transforms.len(), scratch) {
                    Ok(()) => visitor(&scratch.sample),
                    Err(_) if self.on_error.skips() => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        })
    }
}

impl Source for FileSource {
    fn fields(&self) -> &[Field] {
        &self.fields
    }

    fn len(&self) -> usize {
        self.parts.iter().map(|part| part.reader.len()).sum()
    }

    fn fill(&self, sample: usize, field: usize, out: Column<'_>) -> Result<(), ReadError> {
        let draw = Draw { sample, epoch: None };
        self.with_scratch(|scratch| {
            self.make(draw, self.transforms.len(), scratch)?;
            self.meter.made(scratch.is_hit);
            self.write(draw, &scratch.sample, field, out)
        })
    }

    fn read(&self, draw: Draw, fields: &[usize], row: &mut dyn Row) -> Result<(), ReadError> {
        self.with_scratch(|scratch| {
            match self.make(draw, self.transforms.len(), scratch) {
                Err(_) if self.on_error == OnError::LeaveOut => return Ok(()),
                made => made?,
            }
            self.meter.made(scratch.is_hit);
            let mut fields = fields.iter().enumerate();
            fields.try_for_each(|(at, field)| self.write(draw, &scratch.sample, *field, row.column(at)))
        })
    }

    fn cached_bytes(&self) -> usize {
        let samples = self.len() - self.split.test_len();
        let bytes = self.cache.as_ref().map_or(0, |cache| cache.memory_for(samples, self.cached_sample_bytes));
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    fn share_memory(&self, processes: usize) {
        self.cache.iter().for_each(|cache| cache.share(processes));
    }

    fn reads(&self, file: &Path) -> bool {
        let Ok(file) = file.canonicalize() else { return false };
        let is_it = |path: &Path| path.canonicalize().is_ok_and(|path| path == file);
        self.parts.iter().any(|part| {
            part.files.iter().any(|own| is_it(&own.path)) || part.reader.files().iter().any(|own| is_it(own))
        })
    }

    fn describe(&self) -> String {
        let part = |part: &Part| {
            let bytes: u64 = part.files.iter().filter(|file| !file.is_directory).map(|file| file.bytes).sum();
            let size = if bytes > 0 { format!(", {}", human_bytes(bytes)) } else { String::new() };
            format!("{} {} samples ({}{size})", part.name, part.reader.len(), part.format)
        };
        let fields = self.fields.iter().map(Field::to_string).collect::<Vec<_>>().join(", ");
        let cache = self.cache.as_ref().map_or(String::new(), |cache| format!("; {}", cache.describe()));
        let split = self.split_note.as_ref().map_or(String::new(), |note| format!("; {note}"));
        format!("{}; {fields}{split}{cache}", self.parts.iter().map(part).collect::<Vec<_>>().join(", "))
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    /// Names, sizes and contents of the files, what their readers know, class names, and a few samples as they are after the
    /// transforms. It takes a bounded time, and counts no sample as read or skipped.
    fn fingerprint(&self) -> Result<String, ReadError> {
        let mut hasher = blake3::Hasher::new();
        for part in &self.parts {
            let parent = part.files.first().and_then(|file| file.path.parent()).unwrap_or(Path::new(""));
            hasher.update(&(part.files.len() as u64).to_le_bytes());
            for file in &part.files {
                if part.files.len() > 1 {
                    let name = file.path.strip_prefix(parent).unwrap_or(&file.path);
                    hasher.update(name.as_os_str().as_encoded_bytes());
                }
                // The size of a directory says nothing of its contents.
                hasher.update(&if file.is_directory { 0 } else { file.bytes }.to_le_bytes());
            }
            hasher.update(part.reader.fingerprint().as_bytes());
            // What comes through a pipe can be read once only.
            if part.is_pipe() {
                continue;
            }
            let mut known = HashSet::new();
            let paths = part.files.iter().map(|file| file.path.clone()).chain(part.reader.files());
            let paths: Vec<PathBuf> = paths.filter(|path| known.insert(path.clone())).collect();
            hasher.update(fingerprint::of_files(&paths, self.on_error.skips())?.as_bytes());
        }
        for name in self.assembly.class_names.iter().flatten() {
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name.as_bytes());
        }
        match self.is_stream() {
            // The first records of a stream stand for all, as others would have to be walked to.
            true => {
                hasher.update(&(self.len() as u64).to_le_bytes());
                self.fields.iter().for_each(|field| _ = hasher.update(field.to_string().as_bytes()));
            }
            false => {
                let fill = |sample: usize, field: usize, out: Column<'_>| self.fill_unless_skipped(sample, field, out);
                hasher.update(fingerprint::sampled_by(self, &fill)?.as_bytes());
            }
        }
        Ok(hasher.finalize().to_hex()[..fingerprint::DIGITS].to_string())
    }

    fn split(&self) -> Option<Split> {
        Some(self.split)
    }

    fn class_names(&self) -> Option<&[String]> {
        self.assembly.class_names.as_deref()
    }

    fn sample_name(&self, sample: usize) -> SampleName {
        let (part, at) = self.locate(sample);
        let record = part.reader.record_number(at);
        let in_one_of_several = || {
            let (file, _) = part.reader.place(at).filter(|_| part.files.len() > 1)?;
            Some(RecordName { file, key: None })
        };
        match part.reader.name(at).or_else(in_one_of_several) {
            Some(RecordName { file, key }) => SampleName { record, file: Some(file), key },
            None => SampleName { record, file: None, key: None },
        }
    }

    fn missing_target(&self, sample: usize) -> Option<&str> {
        let target = self.parts[0].places.target?;
        let is_missing = self.locate(sample).0.places.target.is_none();
        is_missing.then(|| self.parts[0].reader.columns()[target].name.as_str())
    }

    fn target_scale(&self) -> Option<&TargetScale> {
        self.transforms.iter().find_map(|transform| transform.target_scale())
    }

    /// Records are read, but no input is decoded.
    fn class_counts(&self, split: &Split) -> Result<Vec<u64>, ReadError> {
        let Some((_, classes)) = target_classes(&self.fields) else { return Ok(Vec::new()) };
        let (mut counts, mut sample) = (vec![0; classes], Sample::default());
        let part = &self.parts[0];
        if part.is_pipe() {
            let message = "its classes cannot be counted: a pipe can be read only once";
            return Err(ReadError::new(message, "write the weights of the classes: `class_weights = [1.0, 2.5]`"));
        }
        let training = (0..part.reader.len()).filter(|at| split.purpose(*at) == Purpose::Training);
        part.visit(training, self.on_error.skips(), &mut |_, record| {
            match self.assembly.target_alone(&part.places, record, &mut sample) {
                Ok(()) => count_classes(&sample.y.indices, &mut counts),
                Err(_) if self.on_error.skips() => {}
                Err(error) => return Err(error),
            }
            Ok(())
        })?;
        Ok(counts)
    }

    fn is_unreadable(&self, sample: usize) -> bool {
        self.meter.is_unreadable(sample)
    }

    fn load_times(&self) -> Option<LoadTimes> {
        Some(self.meter.times())
    }

    fn preprocessing(&self) -> Option<String> {
        Some(FileSource::preprocessing(self))
    }
}

/// Bytes with a unit.
fn human_bytes(bytes: u64) -> String {
    let units = [("GB", 1e9), ("MB", 1e6), ("KB", 1e3)];
    let unit = units.into_iter().find(|(_, size)| bytes as f64 >= *size);
    unit.map_or(format!("{bytes} B"), |(name, size)| format!("{:.1} {name}", bytes as f64 / size))
}
