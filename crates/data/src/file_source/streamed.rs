//! Parts that are read as streams: opening them, what they cannot do, and making samples of records that a walk hands over.

use super::part::{Part, Places};
use super::{FileSource, Scratch};
use crate::error::ReadError;
use crate::format::{OpenError, Reader};
use crate::notes;
use crate::record::Record;
use crate::source::{Draw, Row};
use crate::split::Split;
use crate::stream::{RawRecord, StreamFiles, StreamReader, StreamSettings};
use kolo_graph::settings::{Setting, SettingError, Settings};
use std::sync::Arc;

/// The records of a sample and of those that may stand in for it.
#[derive(Clone, Copy)]
pub(crate) struct StreamedRecords<'r> {
    /// Numbers of samples, in the order in which they are tried.
    pub others: &'r [usize],
    pub fetch: &'r dyn Fn(usize) -> Result<Arc<RawRecord>, ReadError>,
}

impl Part {
    /// Opens what `name` names, which is what `key` says, as a stream.
    pub fn open_stream(name: &str, settings: &Settings, key: &str, stream: StreamSettings) -> Result<Self, OpenError> {
        let stream = Arc::new(StreamFiles::open(name, settings, key, stream)?);
        if stream.len == 0 {
            let message = format!("is \"{name}\", which holds no record");
            return Err(settings.wrong(key, message, "check the files").into());
        }
        let reader: Box<dyn Reader> = Box::new(StreamReader::new(Arc::clone(&stream)));
        let (files, notes) = (stream.files.clone(), notes::of_all(&*reader));
        Ok(Self {
            name: name.into(),
            format: stream.kind,
            files,
            reader,
            stream: Some(stream),
            places: Places::default(),
            notes,
        })
    }

    /// Whether its records come only once.
    pub fn is_pipe(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| stream.is_pipe())
    }

    /// An error of this key if finding it out would take a look at all records, and they come only once.
    pub fn check_scan(&self, settings: &Settings, key: &str, hint: &str) -> Result<(), SettingError> {
        match self.is_pipe() {
            true => {
                let message = "would have to read all samples first, but a pipe can be read only once";
                Err(settings.wrong(key, message, hint))
            }
            false => Ok(()),
        }
    }
}

/// What a stream cannot do, as errors of the keys that ask for it.
pub(super) fn check(part: &Part, transforms: &[Settings], settings: &Settings) -> Result<(), SettingError> {
    if part.stream.is_none() {
        return Ok(());
    }
    for table in transforms {
        let Some(Setting::Text(kind)) = table.peek("kind") else { continue };
        let other_samples = match kind.as_str() {
            "pack" => "joins texts: make token files first, with `kolo data tokens`",
            "mixup" => "takes any other sample: leave it out, or read the files without `stream`",
            _ => "",
        };
        if !other_samples.is_empty() {
            let message = format!("has `{kind}`, which cannot be used with a stream");
            return Err(settings.wrong("transforms", message, format!("`{kind}` {other_samples}")));
        }
        if ["standardise", "one_hot"].contains(&kind.as_str()) {
            part.check_scan(settings, "transforms", &format!("leave `{kind}` out, or give the samples as files"))?;
        }
    }
    if settings.peek("missing") == Some(&Setting::Text("mean".into())) {
        part.check_scan(settings, "missing", "write a number, such as `missing = 0`")?;
    }
    Ok(())
}

/// A part of a stream held out: samples spread evenly, so that they come in the order of the files. Of a pipe, none.
pub(super) fn read_split(part: &Part, settings: &Settings) -> Result<Split, SettingError> {
    if let Some(key) = ["folds", "fold"].into_iter().find(|key| settings.has(key)) {
        let hint = "read the files without `stream`, or use `holdout` or `validation`";
        return Err(settings.wrong(key, "cannot be combined with a stream", hint));
    }
    let fraction = settings.float_in("holdout", if part.is_pipe() { 0.0 } else { 0.2 }, 0.0, 0.9)?;
    if part.is_pipe() && fraction > 0.0 {
        let hint = "name files with `validation`, or leave it out";
        return Err(settings.wrong("holdout", "cannot be taken from a pipe, whose samples come only once", hint));
    }
    Split::spaced(part.reader.len(), fraction).bounded(settings)
}

impl FileSource {
    /// The stream that a sample is of, and the number of the first sample of that stream.
    pub(crate) fn stream_of(&self, sample: usize) -> Option<(usize, Arc<StreamFiles>)> {
        let (part, at) = self.locate(sample);
        Some((sample - at, Arc::clone(part.stream.as_ref()?)))
    }

    pub(crate) fn is_stream(&self) -> bool {
        self.parts.iter().any(|part| part.stream.is_some())
    }

    /// Whether another sample may stand in for one that cannot be read.
    pub(crate) fn skips(&self) -> bool {
        self.on_error.skips()
    }

    /// As [`Source::read`](crate::Source::read), of a record that a walk has. If it cannot be read, others are tried.
    pub(crate) fn read_streamed(
        &self,
        draw: Draw,
        records: StreamedRecords<'_>,
        fields: &[usize],
        row: &mut dyn Row,
    ) -> Result<(), ReadError> {
        self.with_scratch(|scratch| {
            self.make_streamed(draw, records, scratch)?;
            self.meter.made(scratch.is_hit);
            let mut fields = fields.iter().enumerate();
            fields.try_for_each(|(at, field)| self.write(draw, &scratch.sample, *field, row.column(at)))
        })
    }

    fn make_streamed(&self, draw: Draw, records: StreamedRecords<'_>, scratch: &mut Scratch) -> Result<(), ReadError> {
        let Err(error) = self.attempt_streamed(draw, records, scratch) else { return Ok(()) };
        if !self.skips() {
            return Err(error);
        }
        // What is wrong with the stream itself is wrong for the others, too.
        (records.fetch)(draw.sample)?;
        self.meter.skip(draw.sample, &error);
        for other in records.others {
            let draw = Draw { sample: *other, ..draw };
            if self.attempt_streamed(draw, records, scratch).is_ok() {
                return Ok(());
            }
        }
        let tried = records.others.len();
        let message = format!("{}; {tried} replacements that were tried cannot be read either", error.message);
        Err(ReadError { message, ..error }.despite_skipping())
    }

    fn attempt_streamed(
        &self,
        draw: Draw,
        records: StreamedRecords<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), ReadError> {
        let (part, at) = self.locate(draw.sample);
        let Some(stream) = &part.stream else {
            return Err(ReadError::new("it is not part of a stream", "this is a bug"));
        };
        let mut place = None;
        let mut read = |record: &mut Record| {
            let raw = (records.fetch)(draw.sample)?;
            place = Some((raw.path().to_path_buf(), raw.offset));
            stream.format.parse(&raw, record)
        };
        self.attempt_from(draw, self.transforms.len(), scratch, &mut read).map_err(|error| {
            let error = match place {
                Some((file, offset)) if error.file.is_none() => error.in_file(&file).at(offset),
                _ => error,
            };
            error.of(&part.name, at)
        })
    }
}

/// The files behind a source that is a stream.
#[cfg(test)]
pub(crate) fn opened_stream(name: &str, settings: &Settings, seed: u64) -> FileSource {
    let stream = StreamSettings::read(settings, false).unwrap().unwrap();
    let part = Part::open_stream(name, settings, "source", stream).unwrap();
    super::open::join(vec![("source", part)], settings, seed, None).unwrap()
}
