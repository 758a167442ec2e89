//! Ranked layouts as JSON.

use super::Described;
use super::table::changes_bits;
use kolo_plan::search::explain::overlap_range;
use kolo_plan::search::{Ranked, SearchResult};
use serde_json::{Value, json};

pub fn value(described: &Described<'_>, found: &SearchResult) -> Value {
    let best = found.ranked.first();
    let range = best.and_then(|best| overlap_range(&best.candidate, &described.models, &described.cluster));
    json!({
        "overlap": range.map(|[all, none]| json!({ "all_hidden_ms": all * 1e3, "none_hidden_ms": none * 1e3 })),
        "job": described.job.name,
        "cluster": described.cluster.name,
        "device": described.cluster.device.name,
        "devices": described.devices,
        "precision": described.precision.precision.name(),
        "candidates": found.candidates,
        "too_large": found.too_large,
        "timed": found.timed,
        "seconds": described.seconds,
        "layouts": found.ranked.iter().map(|one| {
            let mut value = layout(one);
            value["keeps_weights"] = (!changes_bits(described, one)).into();
            value
        }).collect::<Vec<_>>(),
        "with_more_memory": found.with_more_memory.as_ref().map(layout),
    })
}

fn layout(one: &Ranked) -> Value {
    let (candidate, memory) = (&one.candidate, &one.memory);
    json!({
        "layout": {
            "data": candidate.data, "pipeline": candidate.pipeline, "tensor": candidate.tensor, "tokens": candidate.tokens,
            "sequence": candidate.sequence.name(), "zero": candidate.zero, "recompute": candidate.recompute.name(),
            "layers": candidate.layers.as_ref().map(|layers| layers.text()),
            "micro_batches": candidate.micro_batches, "schedule": candidate.schedule, "chunks": candidate.chunks,
        },
        "set": candidate.assignments(),
        "step_ms": one.seconds * 1e3, "compute_ms": one.compute * 1e3, "waiting_ms": one.bubble * 1e3,
        "exposed_ms": one.exposed.iter().map(|(axis, seconds)| (axis.clone(), json!(seconds * 1e3))).collect::<serde_json::Map<String, Value>>(),
        "utilisation": one.utilisation, "run_s": one.run_seconds, "cost": one.cost,
        "memory": {
            "weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer,
            "activations": memory.activations, "transient": memory.transient, "reserved": memory.reserved,
            "total": memory.total(),
        },
    })
}
