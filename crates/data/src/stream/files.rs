//! The files or the pipe of a stream: their records in order, and by number where that must be.

use super::{
    ByteStream, LOOKED_AT, RawRecord, RawRecords, STREAMS, StreamFormat, StreamHead, StreamKind, StreamSettings,
    pipe_file,
};
use crate::error::ReadError;
use crate::files::{self, DataFile, Listed};
use crate::format::{self, OpenError, Reader};
use crate::record::{Record, RecordColumn, RecordName, UnreadColumn};
use crate::shards;
use kolo_base::lock;
use kolo_graph::settings::Settings;
use std::collections::VecDeque;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// Bytes of records that the columns are told from, at most.
const LOOKED_AT_BYTES: usize = 64 << 20;
/// Records that tell one stream from another.
const FINGERPRINTED: usize = 8;
const PIPE_HINT: &str = "give the data as files, with `stream = true` if they are to be read in order";

/// The records of files or of a pipe, front to back.
#[derive(Debug)]
pub(crate) struct StreamFiles {
    /// The name of the format.
    pub kind: &'static str,
    pub files: Vec<DataFile>,
    pub format: Box<dyn StreamFormat>,
    pub columns: Vec<RecordColumn>,
    unread: Vec<UnreadColumn>,
    /// What was left out of the files.
    notes: Vec<String>,
    /// Records of an epoch.
    pub len: usize,
    /// The number of the first record of each file, if all were counted.
    starts: Vec<usize>,
    /// Of a pipe: what is left of it, until a walk takes it.
    pipe: Option<Mutex<Option<Cursor>>>,
    /// The first records: of a pipe all that were looked at.
    head: Vec<Arc<RawRecord>>,
    /// What one of the first records takes in memory.
    record_bytes: usize,
}

impl StreamFiles {
    /// Opens what `name` names, which is what `key` says.
    pub fn open(name: &str, settings: &Settings, key: &str, stream: StreamSettings) -> Result<Self, OpenError> {
        match super::is_pipe(name) {
            true => Self::open_pipe(name, settings, key, stream),
            false => Self::open_files(name, settings, key, stream),
        }
    }

    fn open_files(name: &str, settings: &Settings, key: &str, stream: StreamSettings) -> Result<Self, OpenError> {
        let Listed { files: listed, mut notes } = files::list(name, settings, key)?;
        let kind = stream_kind(format::choose(&listed, settings)?.name, settings, key)?;
        let Listed { files, notes: left_out } = shards::expand(&listed, kind.is_shard, settings)?;
        notes.extend(left_out);
        let (head, _) = ByteStream::of_file(&files[0])?.with_head()?;
        let opened = (kind.open)(
            &StreamHead { path: &files[0].path, extension: &files[0].extension(), bytes: &head },
            settings,
        )?;
        let mut opened = Self {
            kind: kind.format,
            files,
            format: opened,
            columns: vec![],
            unread: vec![],
            notes,
            len: 0,
            starts: vec![],
            pipe: None,
            head: vec![],
            record_bytes: 0,
        };
        let mut cursor = Cursor::default();
        opened.look(&mut cursor, FINGERPRINTED)?;
        opened.len = match stream.samples {
            Some(samples) => samples,
            None => {
                while cursor.advance(&opened, None)? {}
                opened.starts = std::mem::take(&mut cursor.starts);
                cursor.next
            }
        };
        Ok(opened)
    }

    fn open_pipe(name: &str, settings: &Settings, key: &str, stream: StreamSettings) -> Result<Self, OpenError> {
        let Some(len) = stream.samples else {
            let hint = "write `samples = 100000`: the number of samples in an epoch";
            return Err(settings
                .wrong("samples", format!("is needed: `{key}` is a pipe, which has no length"), hint)
                .into());
        };
        let file = pipe_file(name);
        let (head, bytes) = ByteStream::of_pipe(&file.path)?.with_head()?;
        if head.is_empty() {
            return Err(ReadError::new("it is empty", "write the data into it").in_file(&file.path).into());
        }
        let chosen =
            format::choose_by(&file.path, &file.extension(), &head[..head.len().min(format::SNIFFED_BYTES)], settings)?;
        let kind = stream_kind(chosen.name, settings, key)?;
        let head = StreamHead { path: &file.path, extension: &file.extension(), bytes: &head };
        let format = (kind.open)(&head, settings)?;
        // No file comes after it.
        let mut cursor = Cursor { records: Some(format.records(bytes)?), file: 1, ..Cursor::default() };
        let mut opened = Self {
            kind: kind.format,
            files: vec![file],
            format,
            columns: vec![],
            unread: vec![],
            notes: vec![],
            len,
            starts: vec![],
            pipe: None,
            head: vec![],
            record_bytes: 0,
        };
        opened.look(&mut cursor, LOOKED_AT)?;
        (cursor.next, cursor.looked_at) = (0, opened.head.iter().cloned().collect());
        opened.pipe = Some(Mutex::new(Some(cursor)));
        Ok(opened)
    }

    /// Finds the columns from the first records, and keeps some of those.
    fn look(&mut self, cursor: &mut Cursor, kept: usize) -> Result<(), ReadError> {
        let (mut raw, mut count, mut bytes) = (RawRecord::default(), 0, 0);
        while count < LOOKED_AT && bytes < LOOKED_AT_BYTES && cursor.advance(self, Some(&mut raw))? {
            self.format.look(&raw);
            (count, bytes) = (count + 1, bytes + raw.held_bytes());
            if self.head.len() < kept {
                self.head.push(Arc::new(std::mem::take(&mut raw)));
            }
        }
        self.record_bytes = bytes / count.max(1);
        self.columns = self.format.columns()?;
        self.unread = self.format.unread();
        Ok(())
    }

    /// What so many of its records take in memory, as far as the first ones tell.
    pub fn bytes_of(&self, records: usize) -> usize {
        self.record_bytes.saturating_mul(records.min(self.len))
    }

    pub fn is_pipe(&self) -> bool {
        self.pipe.is_some()
    }

    /// From the start; of a pipe, which starts only once, `None` the second time.
    pub fn start(&self) -> Option<Cursor> {
        match &self.pipe {
            Some(pipe) => lock(pipe).take(),
            None => Some(Cursor::default()),
        }
    }

    /// There are fewer records than the job says.
    pub fn ended(&self, after: usize) -> ReadError {
        let message = format!("the stream ends after {after} records, but an epoch has {}", self.len);
        let hint = "correct `data.samples`, and do not change the files while a job reads them";
        let error = ReadError::new(message, hint).of_stream();
        // Of several files, any may be shorter than it was.
        match &self.files[..] {
            [file] => error.in_file(&file.path),
            _ => error,
        }
    }
}

fn stream_kind(format: &str, settings: &Settings, key: &str) -> Result<&'static StreamKind, OpenError> {
    STREAMS.iter().find(|kind| kind.format == format).ok_or_else(|| {
        let names: Vec<&str> = STREAMS.iter().map(|kind| kind.format).collect();
        let message = format!("cannot be read as a stream, as its format is {format}");
        settings.wrong(key, message, format!("the formats of streams are {}", names.join(", "))).into()
    })
}

/// A place between two records.
#[derive(Default)]
pub(crate) struct Cursor {
    /// The number of the record that comes next.
    pub next: usize,
    /// Records that were read at opening and come first.
    looked_at: VecDeque<Arc<RawRecord>>,
    /// The file that comes after the one at hand.
    file: usize,
    /// The numbers of the first records of the files so far.
    starts: Vec<usize>,
    records: Option<Box<dyn RawRecords>>,
}

impl fmt::Debug for Cursor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "before record {}", self.next)
    }
}

impl Cursor {
    /// Reads the next record, or passes over it; `false` if there is none.
    pub fn advance(&mut self, stream: &StreamFiles, mut raw: Option<&mut RawRecord>) -> Result<bool, ReadError> {
        if let Some(first) = self.looked_at.pop_front() {
            raw.into_iter().for_each(|raw| raw.clone_from(&first));
            self.next += 1;
            return Ok(true);
        }
        loop {
            if let Some(records) = &mut self.records {
                let found = match &mut raw {
                    Some(raw) => records.next(raw)?,
                    None => records.skip()?,
                };
                if found {
                    self.next += 1;
                    return Ok(true);
                }
                self.records = None;
            }
            let Some(file) = stream.files.get(self.file) else { return Ok(false) };
            self.file += 1;
            self.starts.push(self.next);
            self.records = Some(stream.format.records(ByteStream::of_file(file)?)?);
        }
    }
}

/// Records of a stream by their numbers, for whoever needs a few of them, or all in order. Going back starts anew.
#[derive(Debug)]
pub(crate) struct StreamReader {
    stream: Arc<StreamFiles>,
    place: Mutex<(Cursor, RawRecord)>,
}

impl StreamReader {
    pub fn new(stream: Arc<StreamFiles>) -> Self {
        Self { stream, place: Mutex::default() }
    }
}

impl Reader for StreamReader {
    fn columns(&self) -> &[RecordColumn] {
        &self.stream.columns
    }

    fn unread(&self) -> &[UnreadColumn] {
        &self.stream.unread
    }

    fn len(&self) -> usize {
        self.stream.len
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        let stream = &*self.stream;
        if let Some(raw) = stream.head.get(at) {
            return stream.format.parse(raw, record);
        }
        if stream.is_pipe() {
            return Err(ReadError::new("its samples come from a pipe, which can be read only once", PIPE_HINT));
        }
        let mut place = lock(&self.place);
        // After an error the next call starts anew.
        let (mut cursor, mut raw) = std::mem::take(&mut *place);
        if at + 1 != cursor.next {
            if at < cursor.next {
                cursor = Cursor::default();
            }
            while cursor.next <= at {
                let raw = if cursor.next == at { Some(&mut raw) } else { None };
                if !cursor.advance(stream, raw).map_err(ReadError::of_stream)? {
                    return Err(stream.ended(cursor.next));
                }
            }
        }
        let parsed = stream.format.parse(&raw, record);
        *place = (cursor, raw);
        parsed
    }

    fn place(&self, at: usize) -> Option<(PathBuf, u64)> {
        let raw = self.stream.head.get(at)?;
        Some((raw.path().into(), raw.offset))
    }

    fn name(&self, at: usize) -> Option<RecordName> {
        let StreamFiles { files, starts, .. } = &*self.stream;
        // Of files without a record, the next has the same start.
        let file = files.get(starts.partition_point(|start| *start <= at).checked_sub(1)?)?;
        (files.len() > 1).then(|| RecordName { file: file.path.clone(), key: None })
    }

    fn kind_reason(&self, column: usize) -> Option<String> {
        self.stream.format.kind_reason(column)
    }

    fn is_index(&self, column: usize) -> bool {
        self.stream.format.is_index(column)
    }

    fn notes(&self) -> Vec<String> {
        self.stream.notes.iter().cloned().chain(self.stream.format.notes()).collect()
    }

    fn fingerprint(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        self.stream.head.iter().take(FINGERPRINTED).for_each(|raw| _ = hasher.update(&raw.bytes));
        hasher.finalize().to_hex().to_string()
    }
}
