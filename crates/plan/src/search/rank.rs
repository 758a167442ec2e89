//! The search itself.

use super::LayoutModels;
use super::candidate::Candidate;
use crate::cluster::Cluster;
use crate::simulate::{Conditions, SimulatedStep, simulate_step};
use crate::step_model::{DeviceMemory, StageModel, StepModel, StepTimes};
use std::collections::BTreeMap;

/// What a layout must keep to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// Bytes of a device; its own memory if there is no other limit.
    pub memory: Option<f64>,
    /// Price of the whole run.
    pub cost: Option<f64>,
    /// Seconds of the whole run.
    pub deadline: Option<f64>,
    /// Steps of the run.
    pub steps: f64,
}

/// A layout with what it takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Ranked {
    pub candidate: Candidate,
    pub seconds: f64,
    pub compute: f64,
    pub exposed: BTreeMap<String, f64>,
    pub bubble: f64,
    pub utilisation: f64,
    /// Of the rank that holds the most.
    pub memory: DeviceMemory,
    /// Of the whole run, if the device has a price.
    pub cost: Option<f64>,
    pub run_seconds: f64,
}

/// A layout that a limit rules out.
#[derive(Clone, Debug, PartialEq)]
pub struct NearMiss {
    pub candidate: Candidate,
    pub memory: DeviceMemory,
}

/// What a search found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SearchResult {
    /// The fastest first; each differs from those before it in more than its micro-batches.
    pub ranked: Vec<Ranked>,
    pub candidates: usize,
    /// Candidates that memory ruled out.
    pub too_large: usize,
    /// Candidates whose time was found; all others cannot be faster than those that are ranked.
    pub timed: usize,
    /// Of those that do not fit, the one that needs the least.
    pub nearest: Option<NearMiss>,
    /// The fastest that only memory rules out.
    pub without_memory_limit: Option<Ranked>,
    /// The fastest that memory allows, if cost or deadline rule it out.
    pub beyond_limits: Option<Ranked>,
    /// Why the job cannot have some layouts, each once.
    pub refusals: Vec<String>,
}

/// Layouts that are ranked.
const RANKED_MAX: usize = 10;
/// Different refusals that are kept.
const REFUSALS_MAX: usize = 8;

struct Bounded {
    candidate: Candidate,
    model: StepModel,
    bound: f64,
}

/// Finds the fastest layouts among all candidates.
pub fn search(candidates: &[Candidate], models: &dyn LayoutModels, cluster: &Cluster, limits: &Limits) -> SearchResult {
    let mut result = SearchResult { candidates: candidates.len(), ..SearchResult::default() };
    let memory_limit = limits.memory.unwrap_or(f64::INFINITY).min(cluster.device.memory_bytes);
    let (mut fitting, mut too_large) = (Vec::new(), Vec::new());
    let possible = possible(candidates, models, cluster, memory_limit);
    result.too_large = candidates.len() - possible.len();
    for made in bounded(&possible, models, cluster) {
        let made = match made {
            Ok(made) => made,
            Err(refusal) => {
                if result.refusals.len() < REFUSALS_MAX && !result.refusals.contains(&refusal) {
                    result.refusals.push(refusal);
                }
                continue;
            }
        };
        let memory = made.model.largest().map(|role| role.memory).unwrap_or_default();
        if memory.total() <= memory_limit {
            fitting.push(made);
            continue;
        }
        result.too_large += 1;
        if result.nearest.as_ref().is_none_or(|known| memory.total() < known.memory.total()) {
            result.nearest = Some(NearMiss { candidate: made.candidate, memory });
        }
        too_large.push(made);
    }
    rank(fitting, models, cluster, limits, &mut result);
    let best = result.ranked.first().map_or(f64::INFINITY, |best| best.seconds);
    result.without_memory_limit = fastest_below(too_large, models, cluster, limits, best);
    result
}

/// The candidates that may fit, and those that would with half as much memory again, to say what memory costs; if there are none,
/// those that come nearest, to say what they need.
fn possible(candidates: &[Candidate], models: &dyn LayoutModels, cluster: &Cluster, limit: f64) -> Vec<Candidate> {
    let bound = |candidate: &Candidate| models.memory_bound(candidate, cluster);
    let mut all: Vec<(f64, Candidate)> = candidates.iter().map(|candidate| (bound(candidate), *candidate)).collect();
    all.sort_by(|one, other| one.0.total_cmp(&other.0));
    let fitting = all.partition_point(|(bound, _)| *bound <= LIMIT_SLACK * limit).max(NEAREST_TRIED);
    all.into_iter().take(fitting).map(|(_, candidate)| candidate).collect()
}

/// Times the limit that a bound may be.
const LIMIT_SLACK: f64 = 1.5;

/// Candidates whose memory is counted even if their bound says that they do not fit.
const NEAREST_TRIED: usize = 64;

/// The models of all candidates, with a bound of their time, made on all cores.
fn bounded(candidates: &[Candidate], models: &dyn LayoutModels, cluster: &Cluster) -> Vec<Result<Bounded, String>> {
    let make = |candidate: &Candidate| {
        let model = models.model(candidate, cluster)?;
        Ok(Bounded { candidate: *candidate, bound: lower_bound(&model), model })
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let share = candidates.len().div_ceil(cores).max(1);
    std::thread::scope(|scope| {
        let parts: Vec<_> = candidates
            .chunks(share)
            .map(|part| scope.spawn(move || part.iter().map(make).collect::<Vec<_>>()))
            .collect();
        let join = |part: std::thread::ScopedJoinHandle<'_, Vec<Result<Bounded, String>>>| {
            part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        parts.into_iter().flat_map(join).collect()
    })
}

/// Times candidates in the order of their bounds, until no other can be among the fastest, and plays those event by event.
fn rank(
    mut fitting: Vec<Bounded>,
    models: &dyn LayoutModels,
    cluster: &Cluster,
    limits: &Limits,
    result: &mut SearchResult,
) {
    fitting.sort_by(|one, other| one.bound.total_cmp(&other.bound).then(one.candidate.cmp(&other.candidate)));
    let mut found: Vec<Ranked> = Vec::new();
    for Bounded { candidate, model, bound } in fitting {
        let last = if found.len() >= RANKED_MAX { found[RANKED_MAX - 1].seconds } else { f64::INFINITY };
        if bound >= last {
            break;
        }
        let Some(ranked) = timed(candidate, &model, cluster, limits) else { continue };
        result.timed += 1;
        let late = limits.deadline.is_some_and(|deadline| ranked.run_seconds > deadline);
        let dear = limits.cost.is_some_and(|most| ranked.cost.is_some_and(|cost| cost > most));
        if late || dear {
            if result.beyond_limits.as_ref().is_none_or(|known| ranked.seconds < known.seconds) {
                result.beyond_limits = Some(ranked);
            }
            continue;
        }
        insert(&mut found, ranked, models, &mut result.refusals);
    }
    found.truncate(RANKED_MAX);
    let model = |ranked: &Ranked| models.model(&ranked.candidate, cluster).ok();
    let played = |ranked: Ranked| {
        model(&ranked).and_then(|model| simulated(ranked.candidate, &model, cluster, limits)).unwrap_or(ranked)
    };
    result.ranked = found.into_iter().map(played).collect();
    result.ranked.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
}

/// Puts a layout where it belongs, if training takes it and none of its kind is faster.
fn insert(found: &mut Vec<Ranked>, ranked: Ranked, models: &dyn LayoutModels, refusals: &mut Vec<String>) {
    let at = found.partition_point(|known| known.seconds <= ranked.seconds);
    if at >= RANKED_MAX || found[..at].iter().any(|known| alike(&known.candidate, &ranked.candidate)) {
        return;
    }
    if let Err(refusal) = models.accepts(&ranked.candidate) {
        if refusals.len() < REFUSALS_MAX && !refusals.contains(&refusal) {
            refusals.push(refusal);
        }
        return;
    }
    let slower = found[at..].iter().position(|known| alike(&known.candidate, &ranked.candidate));
    if let Some(slower) = slower {
        found.remove(at + slower);
    }
    found.insert(at, ranked);
}

/// Whether two layouts differ only in their micro-batches and the order of a pipeline's work.
fn alike(one: &Candidate, other: &Candidate) -> bool {
    let parts = |candidate: &Candidate| {
        let Candidate { data, pipeline, tensor, tokens, sequence, zero, recompute, .. } = *candidate;
        (data, pipeline, tensor, tokens, sequence, zero, recompute)
    };
    parts(one) == parts(other)
}

/// The fastest of these, if it takes less than so long.
fn fastest_below(
    mut list: Vec<Bounded>,
    models: &dyn LayoutModels,
    cluster: &Cluster,
    limits: &Limits,
    seconds: f64,
) -> Option<Ranked> {
    list.sort_by(|one, other| one.bound.total_cmp(&other.bound).then(one.candidate.cmp(&other.candidate)));
    let mut best: Option<Ranked> = None;
    for Bounded { candidate, model, bound } in list.into_iter().take(FASTEST_TRIED_MAX) {
        if bound >= best.as_ref().map_or(seconds, |best| best.seconds) {
            break;
        }
        let Some(ranked) = timed(candidate, &model, cluster, limits) else { continue };
        if ranked.seconds < best.as_ref().map_or(seconds, |best| best.seconds) && models.accepts(&candidate).is_ok() {
            best = Some(ranked);
        }
    }
    best
}

/// Layouts that do not fit and are simulated all the same, to say what memory costs.
const FASTEST_TRIED_MAX: usize = 32;

/// What a candidate takes, by arithmetic. `None` for a schedule that cannot be run.
pub fn timed(candidate: Candidate, model: &StepModel, cluster: &Cluster, limits: &Limits) -> Option<Ranked> {
    let StepTimes { seconds, compute, exposed, bubble, update, straggling, utilisation } = model.times().ok()?;
    let step = StepParts { seconds, compute: compute + update, exposed, bubble: bubble + straggling, utilisation };
    Some(ranked(candidate, model, cluster, limits, step))
}

/// What a candidate takes, as the simulation says. `None` for a schedule that cannot be run.
pub fn simulated(candidate: Candidate, model: &StepModel, cluster: &Cluster, limits: &Limits) -> Option<Ranked> {
    let SimulatedStep { seconds, compute, exposed, bubble, utilisation, .. } =
        simulate_step(model, cluster, &Conditions::default()).ok()?;
    Some(ranked(candidate, model, cluster, limits, StepParts { seconds, compute, exposed, bubble, utilisation }))
}

struct StepParts {
    seconds: f64,
    compute: f64,
    exposed: BTreeMap<String, f64>,
    bubble: f64,
    utilisation: f64,
}

fn ranked(candidate: Candidate, model: &StepModel, cluster: &Cluster, limits: &Limits, step: StepParts) -> Ranked {
    let StepParts { seconds, compute, exposed, bubble, utilisation } = step;
    let run_seconds = seconds * limits.steps;
    let devices = model.layout.workers() as f64;
    let cost = cluster.device.price_per_hour.map(|price| run_seconds / 3600.0 * devices * price);
    let memory = model.largest().map(|role| role.memory).unwrap_or_default();
    Ranked { candidate, seconds, compute, exposed, bubble, utilisation, memory, cost, run_seconds }
}

/// Seconds that a step takes at least: some rank waits until the first micro-batch reaches it, does all its work, and then the
/// last one goes back through the stages before it.
pub fn lower_bound(model: &StepModel) -> f64 {
    let split = model.layout.schedule == "zero-bubble";
    let both_ways = model.layout.schedule == "bidirectional";
    let forward = |stage: &StageModel| stage.forward.compute.seconds();
    let whole = |stage: &StageModel| forward(stage) + stage.input.compute.seconds() + stage.weight.compute.seconds();
    let reach = |stage: &StageModel| forward(stage) + if split { 0.0 } else { stage.input.compute.seconds() };
    let of_role = |role: &crate::step_model::Role| {
        let work: f64 = role.stages.iter().filter_map(|at| model.stages.get(*at)).map(whole).sum();
        let first = role.stages.first().copied().unwrap_or(0);
        let before: f64 = model.stages.iter().take(if both_ways { 0 } else { first }).map(reach).sum();
        let share = if both_ways { 0.5 } else { 1.0 };
        before + work * share * model.layout.micro_batches as f64 + role.update.seconds()
    };
    model.roles.iter().map(of_role).fold(0.0, f64::max)
}
