//! What every lane of every rank did when, on one clock, as a file for Chrome's tracing page or Perfetto.
//!
//! Events go to disk as they come: the first rank's into the file itself, another's into a part of its own, which travels to
//! the first when the run ends. Memory holds one unfinished event of each lane and a buffer of bounded size.

mod range;
mod sink;

use kolo_base::ShownPath;
pub use range::StepRange;

use crate::error::Error;
use kolo_comm::communicator::CallSpan;
use kolo_comm::{Communicator, Fault};
use kolo_exec::Session;
use serde_json::json;
use sink::{CHUNK_BYTES, Sink, push_event};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Events one rank writes, about 150 MB; what comes later is left out and counted.
const EVENTS_MAX: usize = 1_000_000;
/// Finished events one rank holds in memory before it writes them.
pub const BUFFERED_EVENTS_MAX: usize = 1024;
/// Events of a lane closer than this with the same name are one.
const GAP: Duration = Duration::from_micros(20);
/// Rounds of the exchange that finds a rank's clock.
const CLOCK_ROUNDS: usize = 16;

#[derive(Clone, Debug, PartialEq)]
struct Event {
    name: String,
    start_ns: u64,
    end_ns: u64,
    bytes: usize,
    step: usize,
}

/// The events of one rank.
#[derive(Debug)]
pub struct Timeline {
    origin: Instant,
    /// To add to this rank's times to have them on the first rank's clock.
    offset_ns: i64,
    rank: usize,
    steps: StepRange,
    step: AtomicUsize,
    records: AtomicBool,
    events: Mutex<Events>,
}

#[derive(Debug)]
struct Events {
    sink: Sink,
    /// The last event of each lane, which may still become longer.
    open: BTreeMap<usize, Event>,
    /// Events that are not written yet, as text.
    text: Vec<u8>,
    buffered: usize,
    count: usize,
    left_out: usize,
    last_ns: u64,
    /// What communicators with lanes of their own are for.
    labels: Vec<Arc<str>>,
    /// Why nothing is written any more.
    failed: Option<Error>,
}

/// The lane that collectives are shown on; those with one peer of several have lanes after it.
pub const COMMUNICATION: usize = 1000;
/// The lane of the first communicator with a label: those along axes of the mesh.
pub const AXES: usize = 100_000;
/// The lane of the first loader thread.
pub const DATA: usize = 1_000_000;

impl Timeline {
    /// The timeline of a process that is alone.
    pub fn create(path: &Path, steps: StepRange) -> Result<Self, Error> {
        Self::new(path, steps, 0, "rank 0".into(), Instant::now(), 0)
    }

    /// The timeline of one of several ranks. All call it together.
    pub fn among(path: &Path, steps: StepRange, world: &Communicator) -> Result<Self, Error> {
        let origin = Instant::now();
        let offset_ns = clock_offset(origin, world)?;
        let (rank, host) = (world.rank(), world.watch().host(world.rank()));
        let name = if host.is_empty() { format!("rank {rank}") } else { format!("rank {rank} on {host}") };
        Self::new(path, steps, rank, name, origin, offset_ns)
    }

    fn new(
        path: &Path,
        steps: StepRange,
        rank: usize,
        name: String,
        origin: Instant,
        offset_ns: i64,
    ) -> Result<Self, Error> {
        let sink = if rank == 0 { Sink::document(path) } else { Sink::part(path, rank) };
        let sink = sink.map_err(|error| cannot_write(path, &error))?;
        let mut text = Vec::new();
        push_event(&mut text, &json!({ "name": "process_name", "ph": "M", "pid": rank, "args": { "name": name } }));
        let (open, labels) = (BTreeMap::new(), Vec::new());
        let events = Events { sink, open, text, buffered: 1, count: 0, left_out: 0, last_ns: 0, labels, failed: None };
        let records = AtomicBool::new(steps.contains(0));
        Ok(Self { origin, offset_ns, rank, steps, step: AtomicUsize::new(0), records, events: Mutex::new(events) })
    }

    fn lock(&self) -> MutexGuard<'_, Events> {
        kolo_base::lock(&self.events)
    }

    /// What comes now belongs to this step. Fails if what came before could not be written.
    pub fn begin_step(&self, step: usize) -> Result<(), Error> {
        self.step.store(step, Ordering::Relaxed);
        self.records.store(self.steps.contains(step), Ordering::Relaxed);
        let mut events = self.lock();
        if step == self.steps.end() {
            self.write_all(&mut events);
        }
        events.failed.clone().map_or(Ok(()), Err)
    }

    /// Events in memory.
    pub fn buffered(&self) -> usize {
        let events = self.lock();
        events.buffered + events.open.len()
    }

    /// Adds an event, or lengthens the lane's last one if it has the same name and ended just now.
    pub fn add(&self, lane: usize, name: &str, start: Instant, end: Instant, bytes: usize) {
        self.insert(lane, name, start..end, bytes, self.step.load(Ordering::Relaxed));
    }

    /// As [`Timeline::add`], of what belongs to another step than that which runs.
    pub fn add_of_step(&self, step: usize, lane: usize, name: &str, span: Range<Instant>) {
        self.insert(lane, name, span, 0, step);
    }

    fn insert(&self, lane: usize, name: &str, span: Range<Instant>, bytes: usize, step: usize) {
        if !self.records.load(Ordering::Relaxed) {
            return;
        }
        let since = |at: Instant| at.saturating_duration_since(self.origin).as_nanos() as u64;
        let (start_ns, end_ns) = (since(span.start), since(span.end));
        let mut events = self.lock();
        events.last_ns = events.last_ns.max(end_ns);
        if let Some(last) = events.open.get_mut(&lane)
            && last.name == name
            && bytes == 0
            && last.step == step
            && start_ns.saturating_sub(last.end_ns) < GAP.as_nanos() as u64
        {
            last.end_ns = end_ns;
            return;
        }
        if events.count >= EVENTS_MAX || events.failed.is_some() {
            events.left_out += 1;
            return;
        }
        events.count += 1;
        match events.open.insert(lane, Event { name: name.into(), start_ns, end_ns, bytes, step }) {
            Some(last) => self.encode(&mut events, lane, &last),
            None => self.name_lane(&mut events, lane),
        }
        if events.buffered >= BUFFERED_EVENTS_MAX {
            events.write();
        }
    }

    /// Shows every call of a session, by layer and pass.
    pub fn trace(self: &Arc<Self>, session: &mut Session) {
        let name = |node: &kolo_graph::Node| match node.scope.is_empty() {
            true => node.stage.name().to_string(),
            false => format!("{} {}", node.stage.name(), node.scope),
        };
        let names: Vec<String> = session.graph().nodes.iter().map(name).collect();
        let timeline = Arc::clone(self);
        session.set_tracer(Some(Arc::new(move |lane, node, start, end| {
            timeline.add(lane, &names[node.0 as usize], start, end, 0);
        })));
    }

    /// Shows a call of a communicator on this lane, or on one of its own if it has a label.
    pub fn add_call(&self, lane: usize, span: &CallSpan) {
        let lane = span.label.as_ref().map_or(lane, |label| self.lane_of(label));
        let name = format!("{} {}", span.call.kind.name(), span.call.name());
        self.add(lane, name.trim_end(), span.start, span.end, span.bytes);
    }

    fn lane_of(&self, label: &Arc<str>) -> usize {
        let labels = &mut self.lock().labels;
        let known = labels.iter().position(|known| known == label);
        AXES + known.unwrap_or_else(|| {
            labels.push(Arc::clone(label));
            labels.len() - 1
        })
    }

    fn micros(&self, ns: u64) -> f64 {
        (ns as i64 + self.offset_ns) as f64 / 1e3
    }

    fn encode(&self, events: &mut Events, lane: usize, event: &Event) {
        events.push(&json!({
            "name": event.name, "ph": "X", "pid": self.rank, "tid": lane,
            "ts": self.micros(event.start_ns), "dur": (event.end_ns - event.start_ns) as f64 / 1e3,
            "cat": match lane { DATA.. => "data", COMMUNICATION.. => "communication", _ => "compute" },
            "args": { "bytes": event.bytes, "step": event.step },
        }));
    }

    fn name_lane(&self, events: &mut Events, lane: usize) {
        let name = match lane {
            DATA.. => format!("data {}", lane - DATA),
            AXES.. => format!("communication along {}", events.labels[lane - AXES]),
            COMMUNICATION => "communication".into(),
            _ if lane > COMMUNICATION => format!("communication with rank {}", lane - COMMUNICATION - 1),
            _ => format!("compute {lane}"),
        };
        events.push(&json!({
            "name": "thread_name", "ph": "M", "pid": self.rank, "tid": lane, "args": { "name": name },
        }));
    }

    /// Writes what is in memory, also the events that could have become longer.
    fn write_all(&self, events: &mut Events) {
        let open = std::mem::take(&mut events.open);
        open.iter().for_each(|(lane, event)| self.encode(events, *lane, event));
        // A lane that goes on has its name already.
        events.write();
    }

    /// Brings all ranks' events into the file. All ranks call it.
    pub fn finish(&self, world: Option<&Communicator>) -> Result<(), Error> {
        self.records.store(false, Ordering::Relaxed);
        let mut events = self.lock();
        if events.left_out > 0 {
            let name = format!("{} later events left out", std::mem::take(&mut events.left_out));
            let at = self.micros(events.last_ns);
            events.push(&json!({ "name": name, "ph": "i", "pid": self.rank, "tid": 0, "ts": at, "s": "p" }));
        }
        self.write_all(&mut events);
        if let Some(error) = &events.failed {
            return Err(error.clone());
        }
        let Some(world) = world else { return Ok(()) };
        if self.rank > 0 {
            return events.send(world);
        }
        (1..world.size()).try_for_each(|rank| events.receive(world, rank))
    }
}

impl Drop for Timeline {
    /// A run that failed leaves what it has.
    fn drop(&mut self) {
        let mut events = self.lock();
        self.write_all(&mut events);
    }
}

impl Events {
    fn push(&mut self, event: &serde_json::Value) {
        push_event(&mut self.text, event);
        self.buffered += 1;
    }

    fn write(&mut self) {
        if self.failed.is_none()
            && let Err(error) = self.sink.append(&self.text)
        {
            self.failed = Some(cannot_write(self.sink.path(), &error));
        }
        self.text.clear();
        self.buffered = 0;
    }

    /// Sends this rank's part to the first.
    fn send(&self, world: &Communicator) -> Result<(), Error> {
        let mut left = self.sink.bytes();
        world.send(&[left as i64], 0)?;
        let mut chunk = vec![0u8; CHUNK_BYTES];
        while left > 0 {
            let chunk = &mut chunk[..left.min(CHUNK_BYTES as u64) as usize];
            let offset = self.sink.bytes() - left;
            self.sink.read_at(offset, chunk).map_err(|error| cannot_write(self.sink.path(), &error))?;
            world.send(chunk, 0)?;
            left -= chunk.len() as u64;
        }
        Ok(())
    }

    /// Appends another rank's part.
    fn receive(&mut self, world: &Communicator, rank: usize) -> Result<(), Error> {
        let mut size = [0i64];
        world.recv(&mut size, rank)?;
        let mut left = size[0] as u64;
        let mut chunk = vec![0u8; CHUNK_BYTES];
        // A chunk may end inside an event. Until the last one is there, the document ends with what came before.
        let start = self.sink.bytes();
        while left > 0 {
            let chunk = &mut chunk[..left.min(CHUNK_BYTES as u64) as usize];
            world.recv(chunk, rank)?;
            self.text.extend_from_slice(chunk);
            left -= chunk.len() as u64;
            let whole = self.text.windows(EVENT_START.len()).rposition(|at| at == EVENT_START);
            let cut = if left == 0 { self.text.len() } else { whole.unwrap_or(0) };
            let rest = self.text.split_off(cut);
            self.sink.append(&self.text).map_err(|error| cannot_write(self.sink.path(), &error))?;
            self.text = rest;
        }
        debug_assert_eq!(self.sink.bytes() - start, size[0] as u64);
        Ok(())
    }
}

/// Writes a document of events that are all known.
pub fn write_events(path: &Path, events: &[serde_json::Value]) -> Result<(), Error> {
    let mut text = Vec::new();
    events.iter().for_each(|event| push_event(&mut text, event));
    let written = Sink::document(path).and_then(|mut sink| sink.append(&text));
    written.map_err(|error| cannot_write(path, &error))
}

/// How every event of a part begins; no text inside an event has a line break.
const EVENT_START: &[u8] = b",\n{";

fn cannot_write(path: &Path, error: &std::io::Error) -> Error {
    Error::Trace { path: path.shown().to_string(), message: error.to_string() }
}

/// Nanoseconds to add to this rank's times to have them on rank 0's clock: half of the quickest round trip.
fn clock_offset(origin: Instant, world: &Communicator) -> Result<i64, Fault> {
    let now = || origin.elapsed().as_nanos() as i64;
    let mut best = (i64::MAX, 0);
    for rank in 1..world.size() {
        for _ in 0..CLOCK_ROUNDS {
            if world.rank() == 0 {
                let mut ping = [0i64];
                world.recv(&mut ping, rank)?;
                world.send(&[now()], rank)?;
            } else if world.rank() == rank {
                let before = now();
                world.send(&[before], 0)?;
                let mut theirs = [0i64];
                world.recv(&mut theirs, 0)?;
                let after = now();
                best = best.min((after - before, theirs[0] - (before + after) / 2));
            }
        }
    }
    Ok(best.1)
}

#[cfg(test)]
mod tests;
