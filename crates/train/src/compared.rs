//! What was planned of a step beside what was measured, part by part, and where the plan was wrong.

use crate::report::Report;
use serde::Serialize;

/// One part of a step: milliseconds, or bytes of memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComparedPart {
    /// `step`, `compute`, `waiting` (for other ranks: exchanges and the pipeline's bubble), `data`, `memory`.
    pub part: &'static str,
    pub planned: f64,
    pub measured: f64,
    /// The part of the whole step, or of the memory, by which the plan was wrong: positive if it took more than was planned.
    pub error: f64,
}

/// A plan that is wrong by less than this part of the whole is right.
const RIGHT: f64 = 0.1;

impl Report {
    /// The parts of a step.
    pub fn compare(&self) -> Vec<ComparedPart> {
        let step = self.step_ms.median.max(f64::MIN_POSITIVE);
        let slowest = self.communication.as_ref().and_then(|together| together.ranks.get(together.slowest_rank));
        let data = self.data_wait_ms.median;
        let waiting = self.communication.as_ref().map_or(0.0, |together| together.exposed_ms);
        let compute = slowest.map_or(step - data, |rank| rank.compute_ms);
        let plan = &self.planned;
        let row = |part: &'static str, planned: f64, measured: f64, whole: f64| ComparedPart {
            part,
            planned,
            measured,
            error: (measured - planned) / whole,
        };
        let memory = self.peak_bytes.rss as f64;
        vec![
            row("step", plan.step_ms, step, step),
            row("compute", plan.compute_ms, compute, step),
            row("waiting", plan.waiting_ms, waiting, step),
            row("data", 0.0, data, step),
            row("memory", plan.bytes as f64, memory, memory.max(1.0)),
        ]
    }
}

/// The part of a step at which the plan was most wrong, if it was.
pub fn most_wrong(parts: &[ComparedPart]) -> Option<&ComparedPart> {
    let inside = parts.iter().filter(|one| !["step", "memory"].contains(&one.part) && one.error.abs() > RIGHT);
    inside.max_by(|a, b| a.error.abs().total_cmp(&b.error.abs()))
}
