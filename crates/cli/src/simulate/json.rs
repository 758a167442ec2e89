//! A simulation as JSON.

use super::Simulation;
use super::text::basis;
use super::weeks::Weeks;
use kolo_plan::simulate::picture::ScalingPoint;
use serde_json::{Value, json};

pub fn value(simulation: &Simulation) -> Value {
    let Simulation { step, model, cluster, candidate, .. } = simulation;
    let memory = model.largest().map(|role| role.memory).unwrap_or_default();
    json!({
        "job": simulation.name,
        "cluster": cluster.name,
        "device": cluster.device.name,
        "devices": model.layout.workers(),
        "layout": {
            "data": candidate.data, "pipeline": candidate.pipeline, "tensor": candidate.tensor, "tokens": candidate.tokens,
            "sequence": candidate.sequence.name(), "zero": candidate.zero, "recompute": candidate.recompute.name(),
            "layers": candidate.layers.as_ref().map(|layers| layers.text()),
            "micro_batches": candidate.micro_batches, "schedule": candidate.schedule, "chunks": candidate.chunks,
        },
        "batch": model.layout.batch(),
        "step_ms": step.seconds * 1e3,
        "compute_ms": step.compute * 1e3,
        "exposed_ms": step.exposed.iter().map(|(axis, seconds)| (axis.clone(), json!(seconds * 1e3))).collect::<serde_json::Map<String, Value>>(),
        "waiting_ms": step.bubble * 1e3,
        "utilisation": step.utilisation,
        "samples_per_s": model.layout.batch() as f64 / step.seconds,
        "memory": {
            "weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer, "activations": memory.activations,
            "transient": memory.transient, "reserved": memory.reserved, "total": memory.total(), "device": cluster.device.memory_bytes,
        },
        "roles": step.scenario.scripts.len(),
        "events": step.outcome.events,
        "seed": simulation.seed,
        "weak": simulation.weak.iter().map(point).collect::<Vec<_>>(),
        "strong": simulation.strong.iter().map(point).collect::<Vec<_>>(),
        "run": simulation.weeks.as_ref().map(run),
    })
}

fn point(point: &ScalingPoint) -> Value {
    json!({
        "devices": point.devices, "step_ms": point.seconds * 1e3, "efficiency": point.efficiency,
        "utilisation": point.utilisation,
    })
}

fn run(weeks: &Weeks) -> Value {
    let Weeks { outcome, spec, best, .. } = weeks;
    let finite = |value: f64| value.is_finite().then_some(value);
    json!({
        "seconds": spec.horizon, "failures": outcome.failures, "expected_failures": spec.expected_failures(),
        "goodput": outcome.goodput(), "availability": outcome.availability(),
        "useful_s": outcome.useful, "lost_s": outcome.lost, "checkpoints_s": outcome.checkpoints,
        "restarting_s": outcome.restarting, "waiting_s": outcome.waiting, "missing_devices_s": outcome.slowed,
        "checkpoint_interval_s": finite(spec.interval), "checkpoint_s": spec.checkpoint, "restart_s": spec.restart,
        "best_interval_s": best.map(|best| best.seconds), "best_goodput": best.map(|best| best.efficiency),
        "best_interval_from": best.map(|best| basis(best.basis)),
        "young_s": best.map(|best| best.young), "daly_s": best.map(|best| best.daly),
    })
}
