//! What would help most: neighbours of a layout, each simulated like the layout itself.

use super::LayoutModels;
use super::candidate::Candidate;
use super::parallel::in_parallel;
use super::rank::{Limits, simulated};
use super::space::SearchSpace;
use crate::cluster::Cluster;
use crate::compose::lower_bound;

/// A change and what it brings.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// What to do.
    pub what: String,
    /// Keys to set, as `--set` takes them; empty for what a job does not set.
    pub set: Vec<String>,
    pub seconds: f64,
    /// The share of the step that is saved.
    pub gain: f64,
    /// Whether it fits into the device.
    pub fits: bool,
}

/// Bucket sizes that are tried, as factors.
const BUCKET_FACTORS: [f64; 2] = [0.25, 4.0];
/// Gains below this are noise of the model.
const GAIN_MIN: f64 = 0.001;

/// Neighbours that are simulated: the fastest by arithmetic.
const SIMULATED_MAX: usize = 16;

/// Changes that help, the best first; those that do not fit come last.
pub fn changes(now: &Candidate, space: &SearchSpace, models: &dyn LayoutModels, cluster: &Cluster) -> Vec<Change> {
    let limits = Limits { steps: 1.0, ..Limits::default() };
    let seconds = |candidate: &Candidate, cluster: &Cluster| {
        let model = models.model(candidate, cluster).ok()?;
        let ranked = simulated(candidate.clone(), &model, cluster, &limits)?;
        Some((ranked.seconds, ranked.memory.total() <= cluster.device.memory_bytes))
    };
    let Some((base, _)) = seconds(now, cluster) else { return Vec::new() };
    let helps = |seconds: f64| seconds < base * (1.0 - GAIN_MIN);
    let near = space.candidates().into_iter().map(|one| Candidate { slices: now.slices, ..one });
    let near: Vec<Candidate> = near.filter(|one| is_neighbour(now, one)).collect();
    let mut near: Vec<(f64, Candidate)> = in_parallel(&near, |one| {
        let model = models.model(one, cluster).ok().filter(|model| helps(lower_bound(model)))?;
        Some((models.times(&model)?.seconds, one.clone()))
    })
    .into_iter()
    .flatten()
    .collect();
    near.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
    near.truncate(SIMULATED_MAX);
    let mut found: Vec<Change> = in_parallel(&near, |(_, one)| {
        let (seconds, fits) = seconds(one, cluster).filter(|(seconds, _)| helps(*seconds))?;
        models.accepts(one).ok()?;
        let (what, set) = difference(now, one);
        Some(Change { what, set, seconds, gain: 1.0 - seconds / base, fits })
    })
    .into_iter()
    .flatten()
    .collect();
    for factor in BUCKET_FACTORS {
        let mut other = cluster.clone();
        other.system.bucket_bytes *= factor;
        if let Some((seconds, fits)) = seconds(now, &other).filter(|(seconds, _)| helps(*seconds)) {
            let mib = other.system.bucket_bytes / f64::from(1 << 20);
            let what = format!("exchange gradients in buckets of {mib:.1} MiB");
            found.push(Change { what, set: Vec::new(), seconds, gain: 1.0 - seconds / base, fits });
        }
    }
    found.sort_by(|one, other| other.fits.cmp(&one.fits).then(other.gain.total_cmp(&one.gain)));
    found
}

/// Whether one thing is different: what is computed again, the micro-batches, ZeRO, the pipeline's schedule, or how two axes
/// share the devices.
fn is_neighbour(now: &Candidate, other: &Candidate) -> bool {
    let axes = |one: &Candidate| [one.data, one.pipeline, one.tensor, one.tokens];
    let moved = axes(now).iter().zip(axes(other)).filter(|(one, other)| *one != other).count();
    let shape = moved > 0 || now.sequence != other.sequence;
    let differences = [
        shape,
        now.zero != other.zero,
        (now.recompute, &now.layers) != (other.recompute, &other.layers),
        now.micro_batches != other.micro_batches && now.grains() != other.grains(),
        (now.schedule, now.chunks) != (other.schedule, other.chunks) && other.pipeline > 1 && now.pipeline > 1,
    ];
    differences.iter().filter(|one| **one).count() == 1 && moved <= 2
}

/// What has to be done, and the keys.
pub(super) fn difference(now: &Candidate, other: &Candidate) -> (String, Vec<String>) {
    let (old, new) = (now.assignments(), other.assignments());
    let set = new.into_iter().zip(old).filter(|(one, other)| one != other).map(|(one, _)| one);
    let what = if (now.recompute, &now.layers) != (other.recompute, &other.layers) {
        match other.recompute {
            kolo_parallel::Recompute::None => "compute nothing again".into(),
            what => format!("compute again: {}", what.name()),
        }
    } else if now.zero != other.zero {
        format!("ZeRO-{} instead of ZeRO-{}", other.zero, now.zero)
    } else if (now.schedule, now.chunks) != (other.schedule, other.chunks) && now.pipeline == other.pipeline {
        format!("the schedule {} with {} chunks per rank", other.schedule, other.chunks)
    } else if [now.data, now.pipeline, now.tensor, now.tokens]
        == [other.data, other.pipeline, other.tensor, other.tokens]
        && now.sequence == other.sequence
    {
        let larger = if other.micro_batches < now.micro_batches { "larger" } else { "smaller" };
        format!("{larger} micro-batches: {} of each data rank instead of {}", other.micro_batches, now.micro_batches)
    } else {
        format!("another layout: {other}")
    };
    (what, set.collect())
}
