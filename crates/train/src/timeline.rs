//! What every lane of every rank did when, on one clock, as a file for Chrome's tracing page or Perfetto.

use kolo_comm::communicator::Span;
use kolo_comm::{Communicator, Fault};
use kolo_exec::Session;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Events one rank keeps; what comes later is left out and counted.
const EVENTS_MAX: usize = 200_000;
/// Events of a lane closer than this with the same name are one.
const GAP: Duration = Duration::from_micros(20);
/// Rounds of the exchange that finds a rank's clock.
const CLOCK_ROUNDS: usize = 16;

#[derive(Clone, Debug, PartialEq)]
struct Event {
    /// Compute lanes from 0, the step's own calls after them; communication is the last.
    lane: usize,
    name: String,
    start_ns: u64,
    end_ns: u64,
    bytes: usize,
}

/// The events of one rank.
#[derive(Debug)]
pub struct Timeline {
    origin: Instant,
    events: Mutex<Events>,
}

#[derive(Debug, Default)]
struct Events {
    list: Vec<Event>,
    left_out: usize,
}

/// The lane that collectives are shown on; those with one peer of several have lanes after it.
pub const COMMUNICATION: usize = 1000;

impl Default for Timeline {
    fn default() -> Self {
        Self { origin: Instant::now(), events: Mutex::default() }
    }
}

impl Timeline {
    /// Adds an event, or lengthens the lane's last one if it has the same name and ended just now.
    pub fn add(&self, lane: usize, name: &str, start: Instant, end: Instant, bytes: usize) {
        let since = |at: Instant| at.saturating_duration_since(self.origin).as_nanos() as u64;
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let last = events.list.iter_mut().rev().take(8).find(|event| event.lane == lane);
        if let Some(last) = last
            && last.name == name
            && bytes == 0
            && since(start).saturating_sub(last.end_ns) < GAP.as_nanos() as u64
        {
            last.end_ns = since(end);
            return;
        }
        if events.list.len() >= EVENTS_MAX {
            events.left_out += 1;
            return;
        }
        events.list.push(Event { lane, name: name.into(), start_ns: since(start), end_ns: since(end), bytes });
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

    /// Shows a call of a communicator on this lane.
    pub fn add_call(&self, lane: usize, span: &Span) {
        let name = format!("{} {}", span.call.kind.name(), span.call.name());
        self.add(lane, name.trim_end(), span.start, span.end, span.bytes);
    }

    /// Brings all ranks' events together: rank 0 gets the file's contents, the others nothing. All ranks call it.
    pub fn gather(&self, world: Option<&Communicator>, rank_names: &[String]) -> Result<Option<String>, Fault> {
        let Some(world) = world else {
            return Ok(Some(document(vec![(0, rank_name(rank_names, 0), self.encode(0))])));
        };
        let offset_ns = self.clock_offset(world)?;
        let own = Value::Array(self.encode(offset_ns)).to_string().into_bytes();
        let mut sizes = vec![0i64; world.size()];
        world.all_gather(&[own.len() as i64], &mut sizes)?;
        let counts: Vec<usize> = sizes.iter().map(|size| *size as usize).collect();
        let mut all = vec![0u8; if world.rank() == 0 { counts.iter().sum() } else { 0 }];
        world.gather_v(&own, &mut all, &counts, 0)?;
        if world.rank() > 0 {
            return Ok(None);
        }
        let mut at = 0;
        let mut ranks = Vec::new();
        for (rank, count) in counts.iter().enumerate() {
            let events = serde_json::from_slice::<Vec<Value>>(&all[at..at + count]).unwrap_or_default();
            ranks.push((rank, rank_name(rank_names, rank), with_process(events, rank)));
            at += count;
        }
        Ok(Some(document(ranks)))
    }

    /// Nanoseconds to add to this rank's times to have them on rank 0's clock: half of the quickest round trip.
    fn clock_offset(&self, world: &Communicator) -> Result<i64, Fault> {
        let now = || self.origin.elapsed().as_nanos() as i64;
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

    fn encode(&self, offset_ns: i64) -> Vec<Value> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let micros = |ns: u64| (ns as i64 + offset_ns) as f64 / 1e3;
        let encode = |event: &Event| {
            json!({
                "name": event.name, "ph": "X", "pid": 0, "tid": event.lane,
                "ts": micros(event.start_ns), "dur": (event.end_ns - event.start_ns) as f64 / 1e3,
                "cat": if event.lane >= COMMUNICATION { "communication" } else { "compute" },
                "args": { "bytes": event.bytes },
            })
        };
        let mut list: Vec<Value> = events.list.iter().map(encode).collect();
        if events.left_out > 0 {
            let last = events.list.last().map_or(0, |event| event.end_ns);
            let name = format!("{} later events left out", events.left_out);
            list.push(json!({ "name": name, "ph": "i", "pid": 0, "tid": 0, "ts": micros(last), "s": "p" }));
        }
        list
    }
}

fn rank_name(names: &[String], rank: usize) -> String {
    match names.get(rank).filter(|host| !host.is_empty()) {
        Some(host) => format!("rank {rank} on {host}"),
        None => format!("rank {rank}"),
    }
}

fn with_process(mut events: Vec<Value>, rank: usize) -> Vec<Value> {
    for event in &mut events {
        event["pid"] = json!(rank);
    }
    events
}

/// The file: every rank's events, and names for processes and lanes.
fn document(ranks: Vec<(usize, String, Vec<Value>)>) -> String {
    let mut all = Vec::new();
    for (rank, name, events) in ranks {
        all.push(json!({ "name": "process_name", "ph": "M", "pid": rank, "args": { "name": name } }));
        let mut lanes: Vec<u64> = events.iter().filter_map(|event| event["tid"].as_u64()).collect();
        lanes.sort_unstable();
        lanes.dedup();
        for lane in lanes {
            let name = match lane.checked_sub(COMMUNICATION as u64) {
                None => format!("compute {lane}"),
                Some(0) => "communication".into(),
                Some(peer) => format!("communication with rank {}", peer - 1),
            };
            all.push(json!({ "name": "thread_name", "ph": "M", "pid": rank, "tid": lane, "args": { "name": name } }));
        }
        all.extend(events);
    }
    format!("{}\n", json!({ "traceEvents": all, "displayTimeUnit": "ms" }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_one_name_become_one_event() {
        let timeline = Timeline::default();
        let at = |us: u64| timeline.origin + Duration::from_micros(us);
        timeline.add(0, "forward", at(0), at(10), 0);
        timeline.add(1, "forward", at(0), at(10), 0);
        timeline.add(0, "forward", at(11), at(30), 0);
        timeline.add(0, "backward", at(30), at(40), 0);
        timeline.add(COMMUNICATION, "bucket 0", at(35), at(50), 64);
        let text = timeline.gather(None, &["here".into()]).unwrap().unwrap();
        let document: Value = serde_json::from_str(&text).unwrap();
        let events = document["traceEvents"].as_array().unwrap();
        let spans: Vec<(&str, f64, f64)> = events
            .iter()
            .filter(|event| event["ph"] == "X")
            .map(|e| (e["name"].as_str().unwrap(), e["ts"].as_f64().unwrap(), e["dur"].as_f64().unwrap()))
            .collect();
        assert_eq!(
            spans,
            [("forward", 0.0, 30.0), ("forward", 0.0, 10.0), ("backward", 30.0, 10.0), ("bucket 0", 35.0, 15.0)]
        );
        assert!(text.contains("rank 0 on here") && text.contains("communication"));
    }
}
