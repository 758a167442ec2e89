//! A simulated step as a timeline for Perfetto, in the form of `kolo train --trace`.

use kolo_plan::simulate::SimulatedStep;
use kolo_train::timeline::AXES;
use serde_json::{Value, json};

/// The events of a step, one process for each role.
pub fn events(step: &SimulatedStep) -> Vec<Value> {
    let scenario = &step.scenario;
    let roles = scenario.scripts.len();
    let mut events = Vec::new();
    for unit in 0..scenario.units() {
        let (role, replica) = (unit % roles, unit / roles);
        let like = scenario.replicas[replica].count * scenario.ranks_per_unit;
        let name = if like > 1 { format!("role {role}, {like} ranks alike") } else { format!("role {role}") };
        events.push(json!({ "name": "process_name", "ph": "M", "pid": unit, "args": { "name": name } }));
        let lanes = scenario.lanes.iter().enumerate();
        let lanes = lanes.map(|(lane, name)| (AXES + lane, format!("communication along {name}")));
        for (lane, name) in std::iter::once((0, "compute 0".to_string())).chain(lanes) {
            events.push(json!({
                "name": "thread_name", "ph": "M", "pid": unit, "tid": lane, "args": { "name": name },
            }));
        }
    }
    for span in &step.outcome.spans {
        let (lane, category) = match span.lane {
            None => (0, "compute"),
            Some(lane) => (AXES + lane as usize, "communication"),
        };
        events.push(json!({
            "name": scenario.names[span.name as usize], "ph": "X", "pid": span.unit, "tid": lane,
            "ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6, "cat": category,
            "args": { "bytes": span.bytes, "step": 0 },
        }));
    }
    events
}
