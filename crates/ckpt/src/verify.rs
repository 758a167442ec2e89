//! Comparing every byte of a checkpoint with the manifest, and naming what is not as it was.

use crate::checkpoint::Checkpoint;
use crate::digest::Digest;
use crate::manifest::Run;
use std::fmt;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Threads that read at a time; more would only make a disk seek.
const THREADS_MAX: usize = 4;
/// Bytes that are worth another thread.
const BYTES_PER_THREAD: u64 = 4 << 20;
/// Tensors that a message lists.
const TENSORS_SHOWN: usize = 4;

/// What is wrong with a file of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Damage {
    pub file: String,
    pub kind: DamageKind,
    /// The tensors that lost elements, and which.
    pub tensors: Vec<(String, Range<usize>)>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum DamageKind {
    /// It is not there, has another size or cannot be read.
    File { why: String },
    /// A chunk does not have its digest.
    Chunk { chunk: usize, bytes: Range<u64> },
}

impl Damage {
    /// Without the file.
    pub fn what(&self) -> String {
        let mut text = match &self.kind {
            DamageKind::File { why } => why.clone(),
            DamageKind::Chunk { chunk, bytes } => {
                format!("chunk {chunk} (bytes {} to {}) does not match its digest", bytes.start, bytes.end)
            }
        };
        let tensor =
            |(name, range): &(String, Range<usize>)| format!("elements {} to {} of `{name}`", range.start, range.end);
        let shown: Vec<String> = self.tensors.iter().take(TENSORS_SHOWN).map(tensor).collect();
        match (&self.kind, shown.is_empty()) {
            (DamageKind::Chunk { .. }, true) => text.push_str("; it holds the file's header, no elements"),
            (_, true) => {}
            _ => text.push_str(&format!("; it holds {}", shown.join(", "))),
        }
        if let Some(more) = self.tensors.len().checked_sub(TENSORS_SHOWN).filter(|more| *more > 0) {
            text.push_str(&format!(" and {more} more tensors"));
        }
        text
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file, self.what())
    }
}

impl Checkpoint {
    /// Compares every byte of every file with its digest. `progress` hears how many bytes were read. What is wrong is in
    /// order of files and chunks; a sound checkpoint has none.
    pub fn verify(&self, progress: &(dyn Fn(u64) + Sync)) -> Vec<Damage> {
        let mut damages = Vec::new();
        let mut readable = Vec::new();
        for (at, file) in self.files().iter().enumerate() {
            match self.open_file(at) {
                Ok(_) => readable.extend((0..file.chunks.len()).map(|chunk| (at, chunk))),
                Err(error) => {
                    let kind = DamageKind::File { why: error.brief() };
                    let tensors = self.tensors_in(at, 0..u64::MAX);
                    damages.push(((at, 0), Damage { file: file.name.clone(), kind, tensors }));
                }
            }
        }
        let damages = Mutex::new(damages);
        let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
        let work = || {
            let mut buffer = Vec::new();
            let mut open = None;
            while let Some((file, chunk)) = readable.get(next.fetch_add(1, Ordering::Relaxed)).copied() {
                let place = self.chunk_place(file, chunk);
                if let Err(damage) = self.verify_chunk(file, chunk, &mut open, &mut buffer) {
                    kolo_base::lock(&damages).push(((file, chunk), damage));
                }
                let bytes = place.end - place.start;
                progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes);
            }
        };
        let worth = (self.bytes() / BYTES_PER_THREAD) as usize + 1;
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX).min(worth);
        std::thread::scope(|scope| {
            // Threads that the system refuses are missed only in time: this one does their work.
            for _ in 1..threads.min(readable.len()) {
                let _ = std::thread::Builder::new().name("verify".into()).spawn_scoped(scope, work);
            }
            work();
        });
        let mut damages = std::mem::take(&mut *kolo_base::lock(&damages));
        damages.sort_by_key(|(place, _)| *place);
        damages.into_iter().map(|(_, damage)| damage).collect()
    }

    fn verify_chunk(
        &self,
        file: usize,
        chunk: usize,
        open: &mut Option<(usize, Box<dyn crate::disk::ReadFile>)>,
        buffer: &mut Vec<u8>,
    ) -> Result<(), Damage> {
        let unreadable = |why: String| {
            let place = self.chunk_place(file, chunk);
            let why = format!("bytes {} to {}: {why}", place.start, place.end);
            Damage { kind: DamageKind::File { why }, ..self.damage_of(file, chunk) }
        };
        if open.as_ref().is_none_or(|(of, _)| *of != file) {
            let (_, reader) = self.open_file(file).map_err(|error| unreadable(error.brief()))?;
            *open = Some((file, reader));
        }
        let place = self.chunk_place(file, chunk);
        buffer.resize((place.end - place.start) as usize, 0);
        if let Some((_, reader)) = open {
            reader.read_at(place.start, buffer).map_err(|error| unreadable(error.to_string()))?;
        }
        match self.files()[file].chunks.get(chunk) == Some(&Digest::of(buffer)) {
            true => Ok(()),
            false => Err(self.damage_of(file, chunk)),
        }
    }

    /// A chunk that is not as it was.
    pub(crate) fn damage_of(&self, file: usize, chunk: usize) -> Damage {
        let bytes = self.chunk_place(file, chunk);
        let tensors = self.tensors_in(file, bytes.clone());
        Damage { file: self.files()[file].name.clone(), kind: DamageKind::Chunk { chunk, bytes }, tensors }
    }

    /// The elements that lie in these bytes of a file.
    fn tensors_in(&self, file: usize, bytes: Range<u64>) -> Vec<(String, Range<usize>)> {
        let mut found = Vec::new();
        for tensor in self.tensors() {
            let size = tensor.dtype.bytes() as u64;
            let within = |run: &Run| {
                let end = run.offset + run.elements as u64 * size;
                let (from, to) = (bytes.start.max(run.offset), bytes.end.min(end));
                (run.file == file && from < to).then(|| {
                    let first = ((from - run.offset) / size) as usize;
                    let last = (to - run.offset).div_ceil(size) as usize;
                    // Of several runs, from the first of their elements to the last.
                    let mut runs = run.region().runs(first..last).map(|(_, start, len)| start..start + len);
                    let begin = runs.next().unwrap_or_default();
                    let end = runs.last().map_or(begin.end, |last| last.end);
                    (run.offset, (tensor.name.clone(), begin.start..end))
                })
            };
            found.extend(tensor.runs.iter().filter_map(within));
        }
        found.sort_by_key(|(offset, _)| *offset);
        found.into_iter().map(|(_, tensor)| tensor).collect()
    }
}
