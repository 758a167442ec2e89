//! Who watches the calls of a session.

use kolo_graph::{Graph, NodeId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Sees every call of a session: its lane, node, start and end. The step's own calls are on the lane after the last.
pub type Tracer = Arc<dyn Fn(usize, NodeId, Instant, Instant) + Send + Sync>;

/// Told after every call of a session that it gets on.
pub type Alive = Arc<dyn Fn() + Send + Sync>;

/// Asked before every call of a session whether to leave out the rest.
pub type Stop = Arc<dyn Fn() -> bool + Send + Sync>;

/// Who watches the calls.
pub(super) struct Probe {
    profile: bool,
    /// By node.
    nanoseconds: Vec<AtomicU64>,
    pub tracer: Option<Tracer>,
    pub alive: Option<Alive>,
    pub stop: Option<Stop>,
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Probe {{ profile: {}, tracer: {} }}", self.profile, self.tracer.is_some())
    }
}

impl Probe {
    pub fn new(graph: &Graph) -> Self {
        let nanoseconds = graph.nodes.iter().map(|_| AtomicU64::new(0)).collect();
        Self { profile: false, nanoseconds, tracer: None, alive: None, stop: None }
    }

    pub fn set_profile(&mut self, profile: bool) {
        self.profile = profile;
        self.nanoseconds.iter_mut().for_each(|time| *time.get_mut() = 0);
    }

    pub fn stops(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| stop())
    }

    /// Lets `run` run a whole phase, unless somebody watches each of its calls or wants no more of them; whether nothing is left to run.
    pub fn run_unseen(&self, run: impl FnOnce() -> bool) -> bool {
        if self.profile || self.tracer.is_some() {
            return false;
        }
        let done = self.stops() || run();
        if let Some(alive) = self.alive.as_ref().filter(|_| done) {
            alive();
        }
        done
    }

    pub fn start(&self) -> Option<Instant> {
        (self.profile || self.tracer.is_some()).then(Instant::now)
    }

    pub fn end(&self, lane: usize, node: NodeId, start: Option<Instant>) {
        if let Some(alive) = &self.alive {
            alive();
        }
        let Some(start) = start else { return };
        let end = Instant::now();
        let taken = end.duration_since(start).as_nanos() as u64;
        self.nanoseconds[node.0 as usize].fetch_add(taken, Ordering::Relaxed);
        if let Some(tracer) = &self.tracer {
            tracer(lane, node, start, end);
        }
    }

    /// Nodes that took time, with it.
    pub fn times(&self) -> Vec<(NodeId, u64)> {
        let times = self.nanoseconds.iter().map(|time| time.load(Ordering::Relaxed)).enumerate();
        times.filter(|(_, time)| *time > 0).map(|(at, time)| (NodeId(at as u32), time)).collect()
    }
}
