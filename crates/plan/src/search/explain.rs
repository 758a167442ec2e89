//! Why the runner-up lost, and which resource binds.

use super::rank::{Limits, NearMiss, Ranked, simulated};
use super::{Candidate, LayoutModels};
use crate::cluster::Cluster;
use crate::step_model::{DeviceMemory, StepModel};
use std::collections::BTreeSet;

/// Where the time of a layout goes: names with seconds, the largest first.
pub fn parts(ranked: &Ranked) -> Vec<(String, f64)> {
    let mut parts = vec![("compute".to_string(), ranked.compute), ("the pipeline's bubble".to_string(), ranked.bubble)];
    parts.extend(ranked.exposed.iter().map(|(axis, seconds)| (format!("exchanges along {axis}"), *seconds)));
    parts.sort_by(|one, other| other.1.total_cmp(&one.1));
    parts
}

/// What made another layout slower than the best: the part that grew the most, and by how much.
pub fn why_slower(best: &Ranked, other: &Ranked) -> String {
    let names: BTreeSet<String> = parts(best).into_iter().chain(parts(other)).map(|(name, _)| name).collect();
    let of = |ranked: &Ranked, name: &str| {
        parts(ranked).into_iter().find(|(known, _)| known == name).map_or(0.0, |(_, seconds)| seconds)
    };
    let grown = |name: &String| of(other, name) - of(best, name);
    let most = names.iter().max_by(|one, other| grown(one).total_cmp(&grown(other)));
    let gained = names.iter().min_by(|one, other| grown(one).total_cmp(&grown(other)));
    let slower = 100.0 * (other.seconds / best.seconds - 1.0);
    let total = other.seconds - best.seconds;
    match (most, gained) {
        (Some(most), _) if total <= 0.0 || grown(most) <= 0.0 => format!("as fast, within {slower:.2} %"),
        (Some(most), Some(gained)) if grown(gained) < -0.2 * grown(most) => format!(
            "{slower:.1} % slower: {most} take {} more, {gained} {} less",
            milliseconds(grown(most)),
            milliseconds(-grown(gained))
        ),
        (Some(most), _) => format!("{slower:.1} % slower: {most} take {} more", milliseconds(grown(most))),
        (None, _) => String::new(),
    }
}

fn milliseconds(seconds: f64) -> String {
    match seconds {
        _ if seconds < 1e-3 => format!("{:.0} µs", seconds * 1e6),
        _ if seconds < 1.0 => format!("{:.1} ms", seconds * 1e3),
        _ => format!("{seconds:.2} s"),
    }
}

/// Shares of a step: (what binds, share), the largest first.
pub fn binding(model: &StepModel, ranked: &Ranked) -> Vec<(String, f64)> {
    let mut sums = [0.0; 3];
    for stage in &model.stages {
        for pass in [&stage.forward, &stage.input, &stage.weight] {
            let compute = &pass.compute;
            [compute.product, compute.stream, compute.overhead]
                .iter()
                .zip(&mut sums)
                .for_each(|(one, sum)| *sum += one);
        }
    }
    let all: f64 = sums.iter().sum();
    let share = |part: f64| if all > 0.0 { ranked.compute / ranked.seconds * part / all } else { 0.0 };
    let mut shares = vec![
        ("arithmetic".to_string(), share(sums[0])),
        ("memory bandwidth".to_string(), share(sums[1])),
        ("starting kernels".to_string(), share(sums[2])),
        ("the pipeline's bubble".to_string(), ranked.bubble / ranked.seconds),
    ];
    let network = ranked.exposed.iter().map(|(axis, one)| (format!("the network along {axis}"), one / ranked.seconds));
    shares.extend(network);
    shares.retain(|(_, share)| *share > 0.0);
    shares.sort_by(|one, other| other.1.total_cmp(&one.1));
    shares
}

/// Seconds of a layout's step if every exchange that other work can hide were hidden, and if none were.
pub fn overlap_range(candidate: &Candidate, models: &dyn LayoutModels, cluster: &Cluster) -> Option<[f64; 2]> {
    let seconds = |all: bool| {
        let cluster = Cluster { system: cluster.system.overlapping(all), ..cluster.clone() };
        let model = models.model(candidate, &cluster).ok()?;
        Some(simulated(candidate.clone(), &model, &cluster, &Limits::default())?.seconds)
    };
    Some([seconds(true)?, seconds(false)?])
}

/// The kinds of memory of a device, with their bytes, the largest first.
pub fn memory_kinds(memory: &DeviceMemory) -> Vec<(&'static str, f64)> {
    let mut kinds = vec![
        ("weights", memory.weights),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("transient", memory.transient),
        ("reserved", memory.reserved),
    ];
    kinds.sort_by(|one, other| other.1.total_cmp(&one.1));
    kinds
}

/// What to do about a layout that does not fit, by the kind of memory that is the problem.
pub fn memory_hint(miss: &NearMiss) -> &'static str {
    match memory_kinds(&miss.memory).first() {
        Some(("activations" | "transient", _)) => {
            "use more devices, a smaller `data.batch`, a shorter context, or a device with more memory"
        }
        Some(("reserved", _)) => "lower `system.reserved_gib` of the cluster, or use a device with more memory",
        _ => "use more devices, a smaller model, or a device with more memory",
    }
}
