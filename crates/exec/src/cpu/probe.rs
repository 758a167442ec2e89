//! Who watches the calls of a session.

use super::call::Call;
use kolo_graph::NodeId;
use std::sync::Arc;
use std::time::Instant;

/// Sees every call of a session: its lane, node, start and end. The step's own calls are on the lane after the last.
pub type Tracer = Arc<dyn Fn(usize, NodeId, Instant, Instant) + Send + Sync>;

/// Told after every call of a session that it gets on.
pub type Alive = Arc<dyn Fn() + Send + Sync>;

/// Asked before every call of a session whether to leave out the rest.
pub type Stop = Arc<dyn Fn() -> bool + Send + Sync>;

/// Who watches the calls.
#[derive(Clone, Default)]
pub(super) struct Probe {
    pub profile: bool,
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
    pub fn stops(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| stop())
    }

    pub fn start(&self) -> Option<Instant> {
        (self.profile || self.tracer.is_some()).then(Instant::now)
    }

    pub fn end(&self, lane: usize, call: &mut Call, start: Option<Instant>) {
        if let Some(alive) = &self.alive {
            alive();
        }
        let Some(start) = start else { return };
        let end = Instant::now();
        call.nanoseconds += end.duration_since(start).as_nanos() as u64;
        if let Some(tracer) = &self.tracer {
            tracer(lane, call.node, start, end);
        }
    }
}
