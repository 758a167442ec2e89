//! A source of files whose training samples come as a stream.

use super::walk::{NEIGHBOURS, StreamWalk, WalkSettings};
use super::{Route, StreamSettings, Walk};
use crate::cache;
use crate::error::ReadError;
use crate::file_source::FileSource;
use crate::load_times::LoadTimes;
use crate::source::{Draw, Row, SampleName, Source};
use crate::split::{Purpose, Split};
use crate::transform::TargetScale;
use kolo_graph::field::{Column, Field};
use std::path::Path;
use std::sync::Arc;

/// The shuffle buffer may take this many times what a cache may.
const BUFFER_MEMORY: u64 = 2;

/// Samples of files or of a pipe, walked front to back.
#[derive(Debug)]
pub(crate) struct StreamSource {
    files: Arc<FileSource>,
    settings: StreamSettings,
    seed: u64,
    bytes_max: usize,
}

impl StreamSource {
    pub fn new(files: FileSource, settings: StreamSettings, seed: u64) -> Self {
        let bytes_max = usize::try_from(BUFFER_MEMORY * cache::memory_bytes()).unwrap_or(usize::MAX);
        Self { files: Arc::new(files), settings, seed, bytes_max }
    }
}

impl Source for StreamSource {
    fn fields(&self) -> &[Field] {
        self.files.fields()
    }

    fn len(&self) -> usize {
        self.files.len()
    }

    fn fill(&self, sample: usize, field: usize, out: Column<'_>) -> Result<(), ReadError> {
        self.files.fill(sample, field, out)
    }

    fn read(&self, draw: Draw, fields: &[usize], row: &mut dyn Row) -> Result<(), ReadError> {
        self.files.read(draw, fields, row)
    }

    fn walk(&self, route: &Route) -> Option<Box<dyn Walk>> {
        if route.split.len_of(route.purpose) == 0 {
            return None;
        }
        let (first, stream) = self.files.stream_of(route.split.sample_of(route.purpose, 0))?;
        let settings = WalkSettings {
            seed: self.seed,
            buffer: if route.purpose == Purpose::Training { self.settings.buffer } else { 1 },
            bytes_max: self.bytes_max,
            first,
            skips: self.files.skips(),
        };
        Some(Box::new(StreamWalk::new(Arc::clone(&self.files), stream, *route, settings)))
    }

    fn held_bytes(&self) -> usize {
        // Those that may stand in for others are kept before and behind the buffer.
        let neighbours = if self.files.skips() { 2 * NEIGHBOURS } else { 0 };
        let kept = self.settings.buffer.saturating_add(neighbours);
        let bytes = self.files.stream_of(0).map_or(0, |(_, stream)| stream.bytes_of(kept));
        bytes.min(self.bytes_max)
    }

    fn cached_bytes(&self) -> usize {
        self.files.cached_bytes()
    }

    fn share_memory(&self, processes: usize) {
        self.files.share_memory(processes);
    }

    fn in_order(&self) -> bool {
        true
    }

    fn reads(&self, file: &Path) -> bool {
        self.files.reads(file)
    }

    fn describe(&self) -> String {
        format!("{}; a stream, shuffled in a buffer of {}", self.files.describe(), self.settings.buffer)
    }

    fn notes(&self) -> Vec<String> {
        self.files.notes()
    }

    fn fingerprint(&self) -> Result<String, ReadError> {
        self.files.fingerprint()
    }

    fn split(&self) -> Option<Split> {
        self.files.split()
    }

    fn class_names(&self) -> Option<&[String]> {
        self.files.class_names()
    }

    fn preprocessing(&self) -> Option<String> {
        Source::preprocessing(&*self.files)
    }

    fn sample_name(&self, sample: usize) -> SampleName {
        self.files.sample_name(sample)
    }

    fn missing_target(&self, sample: usize) -> Option<&str> {
        self.files.missing_target(sample)
    }

    fn target_scale(&self) -> Option<&TargetScale> {
        self.files.target_scale()
    }

    fn class_counts(&self, split: &Split) -> Result<Vec<u64>, ReadError> {
        self.files.class_counts(split)
    }

    fn is_unreadable(&self, sample: usize) -> bool {
        self.files.is_unreadable(sample)
    }

    fn load_times(&self) -> Option<LoadTimes> {
        self.files.load_times()
    }
}
