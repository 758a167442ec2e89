//! One worker's way through a stream: what it holds, and whom it belongs to.
//!
//! The order runs ahead of the file. Whatever it lets into the shuffle buffer is referenced; a record that is drawn for this
//! worker stays so until its sample is made, one that is drawn for another is not. The file is read as far as somebody asks,
//! and what nobody references is passed over. So memory holds the bytes of the buffer and of the samples in the making.
//!
//! Threads choose their grains under one lock and make their samples without it. A sample depends on its record only, so it
//! does not matter who comes first.

use super::files::Cursor;
use super::{BufferedOrder, RawRecord, StreamFiles};
use crate::error::ReadError;
use crate::file_source::{FileSource, StreamedRecords};
use crate::source::{Draw, Row};
use crate::split::{Purpose, Split};
use kolo_base::lock;
use kolo_graph::rng::Stream;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex};

/// Samples that are tried in place of one that cannot be read, at most.
const REPLACEMENTS: usize = 16;
/// Samples drawn last, and samples that come into the buffer next, that may stand in. Bad records often lie side by side, so
/// these are more than those that are tried.
pub(crate) const NEIGHBOURS: usize = 32;

/// A way through samples that come in an order of their own.
pub trait Walk: Send + Sync + fmt::Debug {
    /// As [`Recipe::choose`](crate::prefetch::Recipe::choose), each grain once.
    fn choose(&self, step: usize, grain: usize, samples: &mut Vec<usize>);

    /// As [`Source::read`](crate::Source::read), of samples that were chosen, each once.
    fn read(&self, draw: Draw, fields: &[usize], row: &mut dyn Row) -> Result<(), ReadError>;
}

/// Which samples a worker takes, step by step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    pub purpose: Purpose,
    pub split: Split,
    /// The step that comes first.
    pub first_step: usize,
    pub steps_per_epoch: usize,
    /// Samples of a step, of all workers together.
    pub step_samples: usize,
    /// The first of them that is this worker's.
    pub first_sample: usize,
    /// Samples of a grain, and this worker's grains of a step.
    pub grain_samples: usize,
    pub grains: usize,
    /// From the first sample of one of its grains to that of the next.
    pub grain_stride: usize,
    /// Grains that follow each other so, and from the first sample of such a run to that of the next.
    pub run_grains: usize,
    pub run_stride: usize,
}

impl Route {
    fn epoch(&self, step: usize) -> usize {
        step / self.steps_per_epoch
    }

    /// Positions of an epoch that are walked.
    fn epoch_len(&self) -> usize {
        self.steps_per_epoch.saturating_mul(self.step_samples).min(self.split.len_of(self.purpose))
    }

    /// The positions of a grain in its epoch.
    fn positions(&self, step: usize, grain: usize) -> std::ops::Range<usize> {
        let run = self.run_grains.max(1);
        let within = grain / run * self.run_stride + grain % run * self.grain_stride;
        let start = self.step_start(step) + self.first_sample + within;
        start.min(self.epoch_len())..(start + self.grain_samples).min(self.epoch_len())
    }

    fn step_start(&self, step: usize) -> usize {
        step % self.steps_per_epoch * self.step_samples
    }

    /// Whether a position is this worker's.
    fn is_own(&self, position: usize) -> bool {
        let within = position % self.step_samples;
        within.checked_sub(self.first_sample).is_some_and(|at| {
            let (run, at) = match self.run_stride {
                0 => (0, at),
                stride => (at / stride, at % stride),
            };
            let grain = at / self.grain_stride.max(1);
            let known = grain < self.run_grains && run * self.run_grains + grain < self.grains;
            known && at % self.grain_stride.max(1) < self.grain_samples
        })
    }
}

/// A record by its epoch and the number of its sample.
type Key = (usize, usize);

/// A record that is still needed.
#[derive(Debug, Default)]
struct Entry {
    references: usize,
    raw: Option<Arc<RawRecord>>,
}

/// A worker's way through a stream.
#[derive(Debug)]
pub(crate) struct StreamWalk {
    source: Arc<FileSource>,
    stream: Arc<StreamFiles>,
    state: Mutex<WalkState>,
}

/// What a walk needs to know beside its route.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WalkSettings {
    pub seed: u64,
    /// Samples in the shuffle buffer.
    pub buffer: usize,
    /// Bytes that the records may take.
    pub bytes_max: usize,
    /// The number of the first sample of these files.
    pub first: usize,
    /// Whether another sample may stand in for one that cannot be read.
    pub skips: bool,
}

#[derive(Debug)]
struct WalkState {
    settings: WalkSettings,
    route: Route,
    epoch: usize,
    order: BufferedOrder,
    /// The samples that were drawn last, which may stand in for the next; only if some may.
    recent: VecDeque<usize>,
    /// Own samples that were drawn and not chosen yet, by epoch and position.
    drawn: BTreeMap<Key, usize>,
    /// What may stand in for own samples, by the record.
    others: BTreeMap<Key, Vec<usize>>,
    entries: BTreeMap<Key, Entry>,
    bytes: usize,
    /// The epoch that the file is read for, and where.
    reading: usize,
    cursor: Option<Cursor>,
    failure: Option<ReadError>,
}

impl StreamWalk {
    pub fn new(source: Arc<FileSource>, stream: Arc<StreamFiles>, route: Route, settings: WalkSettings) -> Self {
        let epoch = route.epoch(route.first_step);
        let mut state = WalkState {
            settings,
            route,
            epoch,
            order: order_of(&route, &settings, epoch),
            recent: VecDeque::new(),
            drawn: BTreeMap::new(),
            others: BTreeMap::new(),
            entries: BTreeMap::new(),
            bytes: 0,
            reading: epoch,
            cursor: None,
            failure: refusal(&stream, &route),
        };
        let start = route.step_start(route.first_step);
        // Those before the first may have to stand in for it.
        let recent = start.min(state.neighbours());
        if let Some(before) = (start - recent).checked_sub(1) {
            state.order.nth(before);
        }
        state.refer_to_buffer();
        (0..recent).for_each(|_| state.draw(false));
        Self { source, stream, state: Mutex::new(state) }
    }

    /// Records that are referenced, and bytes that are held.
    #[cfg(test)]
    pub fn held(&self) -> (usize, usize) {
        let state = lock(&self.state);
        (state.entries.len(), state.bytes)
    }

    /// The record of a sample that is referenced. The stream is read as far as that takes.
    fn fetch(&self, key: Key) -> Result<Arc<RawRecord>, ReadError> {
        let mut state = lock(&self.state);
        loop {
            match state.entries.get(&key) {
                Some(Entry { raw: Some(raw), .. }) => return Ok(Arc::clone(raw)),
                Some(Entry { raw: None, .. }) => {}
                None => return Err(ReadError::new("it was not selected", "this is a bug; please report it")),
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if let Err(error) = state.read_one(&self.stream, key.0) {
                state.failure = Some(error);
            }
        }
    }
}

/// What a pipe cannot do.
fn refusal(stream: &StreamFiles, route: &Route) -> Option<ReadError> {
    let refuse = |message: &str| {
        let hint = "write the samples to files and read those with `data.stream = true`";
        Some(ReadError::new(format!("`data.source` is a pipe, {message}"), hint))
    };
    match stream.is_pipe() {
        true if route.first_step > 0 => refuse("whose samples are gone: a run cannot resume from a checkpoint"),
        true if route.step_samples != route.grains * route.grain_samples => refuse("which only one worker can read"),
        _ => None,
    }
}

fn order_of(route: &Route, settings: &WalkSettings, epoch: usize) -> BufferedOrder {
    BufferedOrder::new(settings.seed, epoch, route.split.len_of(route.purpose), settings.buffer)
}

impl WalkState {
    /// The record of sample number `at` of this purpose in the epoch at hand.
    fn key(&self, at: usize) -> Key {
        (self.epoch, self.route.split.sample_of(self.route.purpose, at))
    }

    fn refer(&mut self, key: Key) {
        self.entries.entry(key).or_default().references += 1;
    }

    fn release(&mut self, key: Key) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        entry.references -= 1;
        if entry.references == 0 {
            let raw = self.entries.remove(&key).and_then(|entry| entry.raw);
            self.bytes -= raw.map_or(0, |raw| raw.held_bytes());
        }
    }

    /// Samples before and after those of the buffer that are kept, as they may stand in for others.
    fn neighbours(&self) -> usize {
        if self.settings.skips { NEIGHBOURS } else { 0 }
    }

    /// The records of the buffer, and of those that come next.
    fn buffered(&self) -> Vec<Key> {
        let next = (0..self.neighbours()).map_while(|after| self.order.incoming(after));
        self.order.buffer().iter().copied().chain(next).map(|at| self.key(at)).collect()
    }

    fn refer_to_buffer(&mut self) {
        self.buffered().into_iter().for_each(|key| self.refer(key));
    }

    /// Draws the next sample of the epoch from the buffer, for this worker or for another.
    fn draw(&mut self, is_own: bool) {
        let (position, incoming) = (self.order.position(), self.order.incoming(self.neighbours()));
        let Some(drawn) = self.order.next() else { return };
        let key = self.key(drawn);
        incoming.map(|at| self.key(at)).into_iter().for_each(|key| self.refer(key));
        if is_own {
            self.refer(key);
            self.drawn.insert((self.epoch, position), key.1);
        }
        if !self.settings.skips {
            // It has left the buffer.
            return self.release(key);
        }
        if is_own {
            self.choose_others(key, position);
        }
        self.recent.push_back(key.1);
        if self.recent.len() > NEIGHBOURS {
            let oldest = self.recent.pop_front();
            oldest.into_iter().for_each(|sample| self.release((self.epoch, sample)));
        }
    }

    /// Chooses what may stand in for a sample: some of those that were drawn before it. At the start of an epoch, where these
    /// are few, also some that are in the buffer, or come into it next. It depends on the seed, the epoch and the position only.
    fn choose_others(&mut self, key: Key, position: usize) {
        let mut known: Vec<usize> = self.recent.iter().copied().collect();
        if known.len() < REPLACEMENTS {
            known.extend(self.order.buffer().iter().map(|at| self.key(*at).1));
        }
        if known.len() < REPLACEMENTS {
            let next = (0..NEIGHBOURS).map_while(|after| self.order.incoming(after));
            known.extend(next.map(|at| self.key(at).1));
        }
        let stream = Stream::new(self.settings.seed, "data.stream_replacements");
        let mut others = Vec::new();
        for attempt in 0..REPLACEMENTS.min(known.len()) {
            let low = (position * REPLACEMENTS + attempt) as u64;
            others.push(known.swap_remove(stream.below(self.epoch as u64, low, known.len() as u64) as usize));
        }
        others.iter().for_each(|other| self.refer((key.0, *other)));
        self.others.insert(key, others);
    }

    /// Draws all samples up to this position of an epoch.
    fn draw_until(&mut self, epoch: usize, end: usize) {
        while (self.epoch, self.order.position()) < (epoch, end) {
            if self.order.position() < self.route.epoch_len() {
                self.draw(self.route.is_own(self.order.position()));
                continue;
            }
            // What is left in the buffer has no part in this epoch.
            let recent: Vec<Key> = self.recent.drain(..).map(|sample| (self.epoch, sample)).collect();
            self.buffered().into_iter().chain(recent).for_each(|key| self.release(key));
            self.epoch += 1;
            self.order = order_of(&self.route, &self.settings, self.epoch);
            self.refer_to_buffer();
        }
    }

    /// Reads one record, or passes over it, or turns to the next epoch, on the way to a record of the epoch `wanted`.
    fn read_one(&mut self, stream: &StreamFiles, wanted: usize) -> Result<(), ReadError> {
        if self.cursor.is_none() {
            let again = || {
                let hint = "write the samples to files and read those with `data.stream = true`";
                ReadError::new("`data.source` is a pipe, and its first samples are gone", hint)
            };
            self.cursor = Some(stream.start().ok_or_else(again)?);
        }
        let Some(cursor) = &mut self.cursor else { return Ok(()) };
        // The epochs of a pipe follow each other; files start anew.
        let at = cursor.next - if stream.is_pipe() { self.reading * stream.len } else { 0 };
        let key = (self.reading, self.settings.first + at);
        let is_needed = self.entries.range(key..(self.reading + 1, 0)).next().is_some();
        if self.reading < wanted && !is_needed && (at == stream.len || !stream.is_pipe()) {
            self.reading += 1;
            if !stream.is_pipe() {
                *cursor = Cursor::default();
            }
            return Ok(());
        }
        let Some(entry) = self.entries.get_mut(&key) else {
            return if cursor.advance(stream, None)? { Ok(()) } else { Err(stream.ended(at)) };
        };
        let mut raw = RawRecord::default();
        if at == stream.len || !cursor.advance(stream, Some(&mut raw))? {
            return Err(stream.ended(at));
        }
        self.bytes += raw.held_bytes();
        entry.raw = Some(Arc::new(raw));
        match self.bytes <= self.settings.bytes_max {
            true => Ok(()),
            false => {
                let message = format!("the shuffle buffer holds more than {} bytes", self.settings.bytes_max);
                Err(ReadError::new(message, "make `data.shuffle_buffer` smaller"))
            }
        }
    }
}

impl Walk for StreamWalk {
    fn choose(&self, step: usize, grain: usize, samples: &mut Vec<usize>) {
        let mut state = lock(&self.state);
        let (epoch, positions) = (state.route.epoch(step), state.route.positions(step, grain));
        state.draw_until(epoch, positions.end);
        samples.extend(positions.filter_map(|position| state.drawn.remove(&(epoch, position))));
    }

    fn read(&self, draw: Draw, fields: &[usize], row: &mut dyn Row) -> Result<(), ReadError> {
        let epoch = draw.epoch.unwrap_or(0);
        let key = (epoch, draw.sample);
        let others = lock(&self.state).others.remove(&key).unwrap_or_default();
        let records = StreamedRecords { others: &others, fetch: &|sample| self.fetch((epoch, sample)) };
        let outcome = self.source.read_streamed(draw, records, fields, row);
        let mut state = lock(&self.state);
        others.into_iter().map(|other| (epoch, other)).chain([key]).for_each(|key| state.release(key));
        outcome
    }
}
