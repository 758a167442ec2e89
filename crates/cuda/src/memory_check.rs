//! Whether a session fits on the GPU, before any of it is allocated.

use crate::error::CudaError;
use crate::gpu::Gpu;
use kolo_exec::{Offload, Program};
use kolo_graph::ValueId;
use kolo_graph::fetch::Fetch;
use kolo_graph::layout::Arena;

/// How many of the largest tensors a refusal names.
const NAMED: usize = 5;
/// What the driver and the libraries take beside what we allocate.
const RESERVE_BYTES: usize = 256 << 20;

/// Refuses a session that needs more than is free, with so many bytes of weights and state that are not on the GPU yet.
pub(crate) fn check(gpu: &Gpu, program: &Program, stored: usize) -> Result<(), CudaError> {
    let session = program.bytes();
    let needed = session.total() + stored;
    let free = gpu.free_bytes()?;
    if needed + RESERVE_BYTES <= free {
        return Ok(());
    }
    let mut text = format!(
        "the job needs {} on {}, of which {} are free: weights and state {}, activations {}, gradients {}, the rest {}",
        size(needed),
        gpu.info.name,
        size(free.saturating_sub(RESERVE_BYTES)),
        size(stored),
        size(session.activations),
        size(session.gradients),
        size(session.scratch),
    );
    text.push_str("\n  the largest tensors are:");
    for (bytes, name) in largest(program) {
        text.push_str(&format!("\n    {} {name}", size(bytes)));
    }
    text.push_str("\n  hint: more `data.grains` make each grain's activations smaller; `[memory] recompute` keeps fewer of them; ");
    text.push_str(&offload_hint(program));
    text.push_str("`nvidia-smi` shows what else uses the GPU");
    Err(CudaError::Memory(text))
}

/// What the host could keep of it.
fn offload_hint(program: &Program) -> String {
    if program.graph.nodes.iter().any(|node| node.op.is::<Fetch>()) {
        return String::new();
    }
    let bytes = |program: &Program| {
        let stored: usize = program.executor.stored_bytes(&program.graph, &program.layout).iter().sum();
        program.bytes().total() + stored
    };
    let now = bytes(program);
    let less = |offload: Offload| {
        let executor = program.executor.with_offload(offload)?;
        let other = Program::new(&executor, (*program.graph).clone(), program.options);
        Some(now.saturating_sub(bytes(&other)))
    };
    let [optimizer, weights] = [Offload::Optimizer, Offload::Weights].map(|offload| less(offload).unwrap_or(0));
    match (optimizer, weights > optimizer) {
        (0, false) => String::new(),
        (0, true) => format!("`[memory] offload = \"weights\"` leaves {} of it in the host's memory; ", size(weights)),
        (_, true) => format!(
            "`[memory] offload = \"optimizer\"` leaves {} of it in the host's memory, \"weights\" {}; ",
            size(optimizer),
            size(weights)
        ),
        (_, false) => {
            format!("`[memory] offload = \"optimizer\"` leaves {} of it in the host's memory; ", size(optimizer))
        }
    }
}

/// Bytes in the unit that suits them.
pub(crate) fn size(bytes: usize) -> String {
    const UNITS: [(&str, f64); 3] = [("GiB", 1073741824.0), ("MiB", 1048576.0), ("KiB", 1024.0)];
    let unit = UNITS.iter().find(|(_, unit)| bytes as f64 >= *unit);
    unit.map_or_else(|| format!("{bytes} B"), |(name, unit)| format!("{:.1} {name}", bytes as f64 / unit))
}

/// The largest tensors that have a place, with what makes them.
fn largest(program: &Program) -> Vec<(usize, String)> {
    let graph = &program.graph;
    let placed = |id: &ValueId| {
        program.layout.places[id.0 as usize].is_some_and(|place| place.within == 0 && place.arena != Arena::Store)
    };
    let mut values: Vec<ValueId> = (0..graph.values.len() as u32).map(ValueId).filter(placed).collect();
    values.sort_by_key(|id| std::cmp::Reverse(graph.ty(*id).bytes()));
    let name = |id: &ValueId| {
        let node = graph.maker(*id);
        let layer = if node.scope.is_empty() { String::new() } else { format!(" in layer `{}`", node.scope) };
        (graph.ty(*id).bytes(), format!("{} of `{}`{layer}", graph.ty(*id), node.op.name()))
    };
    values.iter().take(NAMED).map(name).collect()
}
