//! What was planned of a step beside what was measured, part by part, and where the plan was wrong.

use crate::report::Report;
use kolo_parallel::axes::PIPELINE;
use serde::Serialize;
use std::collections::BTreeSet;

/// One part of a step: milliseconds, or bytes of memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComparedPart {
    /// `step`; its parts `compute`, `waiting` (for other ranks) and `data`; the parts of `waiting`: `exchanges along` each axis
    /// and the pipeline's `bubble`; `memory`, and `memory of` each kind.
    pub part: String,
    pub planned: f64,
    pub measured: f64,
    /// The part of the whole step, or of the memory, by which the plan was wrong: positive if it took more than was planned.
    pub error: f64,
}

/// A plan that is wrong by less than this part of the whole is right.
const RIGHT: f64 = 0.1;
const MEMORY: &str = "memory";

impl Report {
    /// The parts of a step, of the rank that computes the longest.
    pub fn compare(&self) -> Vec<ComparedPart> {
        let step = self.step_ms.median.max(f64::MIN_POSITIVE);
        let slowest = self.communication.as_ref().and_then(|together| together.ranks.get(together.slowest_rank));
        let data = self.data_wait_ms.median;
        let compute = slowest.map_or(step - data, |rank| rank.compute_ms);
        let plan = &self.planned;
        let row = |part: &str, planned: f64, measured: f64, whole: f64| ComparedPart {
            part: part.into(),
            planned,
            measured,
            error: (measured - planned) / whole,
        };
        let mut rows = vec![
            row("step", plan.step_ms, step, step),
            row("compute", plan.compute_ms, compute, step),
            row("waiting", plan.waiting_ms, slowest.map_or(0.0, |rank| rank.exposed_ms), step),
        ];
        let measured = slowest.map(|rank| &rank.waited_ms);
        let axes: BTreeSet<&String> =
            plan.waits_ms.keys().chain(measured.iter().flat_map(|waits| waits.keys())).collect();
        for axis in axes {
            let part = if axis == PIPELINE { "bubble".into() } else { format!("exchanges along {axis}") };
            let planned = plan.waits_ms.get(axis).copied().unwrap_or(0.0);
            let measured = measured.and_then(|waits| waits.get(axis)).copied().unwrap_or(0.0);
            rows.push(row(&part, planned, measured, step));
        }
        rows.push(row("data", 0.0, data, step));
        if self.step_ms.median == 0.0 {
            // A run that was over when it was resumed made no step.
            rows.clear();
        }
        let memory = self.peak_bytes.rss as f64;
        rows.push(row(MEMORY, plan.bytes as f64, memory, memory.max(1.0)));
        for (kind, measured) in &self.peak_bytes.kinds {
            let planned = plan.memory.get(kind).copied().unwrap_or(0);
            rows.push(row(&format!("{MEMORY} of {kind}"), planned as f64, *measured as f64, memory.max(1.0)));
        }
        rows
    }
}

/// The kind of memory about which the plan was most wrong, if it was.
pub fn most_wrong_memory(parts: &[ComparedPart]) -> Option<&ComparedPart> {
    worst(parts.iter().filter(|one| one.part.starts_with(MEMORY) && one.part != MEMORY))
}

fn worst<'p>(parts: impl Iterator<Item = &'p ComparedPart>) -> Option<&'p ComparedPart> {
    parts.filter(|one| one.error.abs() > RIGHT).max_by(|a, b| a.error.abs().total_cmp(&b.error.abs()))
}
