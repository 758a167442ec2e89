//! The search itself.

use super::LayoutModels;
use super::candidate::Candidate;
use super::parallel::in_parallel;
use crate::cluster::Cluster;
use crate::compose::lower_bound;
use crate::simulate::{Conditions, SimulatedStep, simulate_step};
use crate::step_model::{DeviceMemory, StepModel, StepTimes};
use kolo_parallel::Recompute;
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
    /// How many layouts are ranked, those that differ in their micro-batches alone, too; otherwise a few of different kinds.
    pub ranked: Option<usize>,
}

impl Limits {
    /// Bytes that a rank may hold in all. A limit is about what the job holds, not about what its device keeps free.
    pub fn bytes(&self, cluster: &Cluster, memory: &DeviceMemory) -> f64 {
        let limit = self.memory.map_or(f64::INFINITY, |limit| limit + memory.reserved);
        limit.min(cluster.device.memory_bytes)
    }
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
    /// The fastest first; each differs from those before it in more than its micro-batches, unless so many are wanted.
    pub ranked: Vec<Ranked>,
    pub candidates: usize,
    /// Candidates that memory ruled out.
    pub too_large: usize,
    /// Candidates whose time was found; all others cannot be faster than those that are ranked.
    pub timed: usize,
    /// Of those that do not fit, the one that needs the least.
    pub nearest: Option<NearMiss>,
    /// The fastest that half as much memory again would allow, if it is faster than all that fit.
    pub with_more_memory: Option<Ranked>,
    /// The fastest that memory allows, if cost or deadline rule out all.
    pub beyond_limits: Option<Ranked>,
    /// Why the job cannot have some layouts, each once.
    pub refusals: Vec<String>,
}

const SECONDS_PER_HOUR: f64 = 3600.0;
/// Layouts that are ranked.
const RANKED_MAX: usize = 10;
/// Different refusals that are kept.
const REFUSALS_MAX: usize = 8;

/// How many times the memory that there is, to say what more of it would bring.
const MORE_MEMORY: f64 = 1.5;
/// Candidates whose models are made at a time, in the order of their bounds.
const AT_A_TIME: usize = 32;

/// A candidate that is looked at.
#[derive(Clone)]
struct Entry {
    candidate: Candidate,
    /// The bytes into which it fits only if some of its layers are computed again.
    fit_into: Option<f64>,
}

/// An entry with a bound of its time.
struct Bounded {
    entry: Entry,
    seconds: f64,
}

/// What every part of the search reads.
struct Search<'a> {
    models: &'a dyn LayoutModels,
    cluster: &'a Cluster,
    limits: &'a Limits,
}

/// Finds the fastest layouts among all candidates.
pub fn search(candidates: &[Candidate], models: &dyn LayoutModels, cluster: &Cluster, limits: &Limits) -> SearchResult {
    let search = Search { models, cluster, limits };
    let mut result = SearchResult { candidates: candidates.len(), ..SearchResult::default() };
    models.prepare(candidates);
    let (fitting, nearly) = search.by_memory(candidates, &mut result);
    let most = limits.ranked.unwrap_or(RANKED_MAX).max(1);
    let mut found = search.fastest(&fitting, most, f64::INFINITY, &mut result);
    let count = found.len();
    if let Some(best) = found.first().map(|best| best.seconds) {
        found.extend(search.fastest(&nearly, 1, best, &mut SearchResult::default()));
    }
    let mut played = in_parallel(&found, |ranked| search.played(ranked));
    let free = played.split_off(count).into_iter().next();
    played.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
    result.with_more_memory = free.filter(|free| played.first().is_some_and(|best| free.seconds < best.seconds));
    // All have the same devices: the fastest is the cheapest, too, and what it takes is what the simulation says.
    let within = played.partition_point(|one| !search.is_beyond(one));
    result.beyond_limits = played.split_off(within).into_iter().next().filter(|_| within == 0);
    result.ranked = played;
    result
}

impl Search<'_> {
    /// Candidates that fit into memory, and those that half as much again would allow. One that does not fit is looked at once more
    /// with single layers computed again.
    fn by_memory(&self, candidates: &[Candidate], result: &mut SearchResult) -> (Vec<Entry>, Vec<Entry>) {
        let sizes = in_parallel(candidates, |candidate| self.models.memory(candidate, self.cluster));
        let (mut fitting, mut nearly) = (Vec::new(), Vec::new());
        for (candidate, memory) in candidates.iter().zip(sizes) {
            let memory = match memory {
                Ok(memory) => memory,
                Err(refusal) => {
                    note(&mut result.refusals, refusal);
                    continue;
                }
            };
            let most = self.limits.bytes(self.cluster, &memory);
            let entry = |fit_into| Entry { candidate: candidate.clone(), fit_into };
            if memory.total() <= most {
                fitting.push(entry(None));
                continue;
            }
            result.too_large += 1;
            let whole = candidate.recompute == Recompute::None && candidate.layers.is_none();
            if whole {
                fitting.push(entry(Some(most)));
            }
            if memory.total() <= MORE_MEMORY * most {
                nearly.push(entry(None));
            } else if whole {
                nearly.push(entry(Some(MORE_MEMORY * most)));
            }
            if result.nearest.as_ref().is_none_or(|known| memory.total() < known.memory.total()) {
                result.nearest = Some(NearMiss { candidate: candidate.clone(), memory });
            }
        }
        (fitting, nearly)
    }

    /// The fastest of these, at most so many that differ in more than their micro-batches, and only those that take less than
    /// `below`. Candidates are looked at in the order of their bounds, until no other can be among them.
    fn fastest(&self, entries: &[Entry], most: usize, below: f64, result: &mut SearchResult) -> Vec<Ranked> {
        // What layers compute again is not less than nothing: the bound of the one holds for the other.
        let least = |entry: &Entry| Bounded {
            entry: entry.clone(),
            seconds: self.models.least_seconds(&entry.candidate, self.cluster),
        };
        let mut bounded = in_parallel(entries, least);
        let order = |one: &Bounded, other: &Bounded| {
            one.seconds.total_cmp(&other.seconds).then_with(|| one.entry.candidate.cmp(&other.entry.candidate))
        };
        bounded.sort_by(order);
        let mut found: Vec<Ranked> = Vec::new();
        for part in bounded.chunks(AT_A_TIME) {
            let last = found.get(most - 1).map_or(below, |last| last.seconds);
            let part = &part[..part.partition_point(|one| one.seconds < last)];
            if part.is_empty() {
                break;
            }
            for ranked in in_parallel(part, |one| self.timed_below(&one.entry, last)).into_iter().flatten() {
                result.timed += 1;
                if ranked.seconds < below {
                    self.insert(&mut found, ranked, most, &mut result.refusals);
                }
            }
        }
        found
    }

    /// What a candidate takes, unless its stages show that it takes so long or longer.
    fn timed_below(&self, entry: &Entry, seconds: f64) -> Option<Ranked> {
        let candidate = match entry.fit_into {
            Some(memory) => self.models.fitted(&entry.candidate, self.cluster, memory)?,
            None => entry.candidate.clone(),
        };
        let model = self.models.model(&candidate, self.cluster).ok()?;
        if lower_bound(&model) >= seconds {
            return None;
        }
        let step = StepParts::from(self.models.times(&model)?);
        Some(ranked(candidate, &model, self.cluster, self.limits, step))
    }

    fn is_beyond(&self, ranked: &Ranked) -> bool {
        let late = self.limits.deadline.is_some_and(|deadline| ranked.run_seconds > deadline);
        late || self.limits.cost.is_some_and(|most| ranked.cost.is_some_and(|cost| cost > most))
    }

    /// Puts a layout where it belongs, if training takes it and none of its kind is faster.
    fn insert(&self, found: &mut Vec<Ranked>, ranked: Ranked, most: usize, refusals: &mut Vec<String>) {
        let at = found.partition_point(|known| known.seconds <= ranked.seconds);
        let alike = |one: &Candidate, other: &Candidate| self.limits.ranked.is_none() && alike(one, other);
        if at >= most || found[..at].iter().any(|known| alike(&known.candidate, &ranked.candidate)) {
            return;
        }
        if let Err(refusal) = self.models.accepts(&ranked.candidate) {
            return note(refusals, refusal);
        }
        let slower = found[at..].iter().position(|known| alike(&known.candidate, &ranked.candidate));
        if let Some(slower) = slower {
            found.remove(at + slower);
        }
        found.insert(at, ranked);
        found.truncate(most);
    }

    /// The same layout, event by event.
    fn played(&self, ranked: &Ranked) -> Ranked {
        let model = self.models.model(&ranked.candidate, self.cluster).ok();
        let played = model.and_then(|model| simulated(ranked.candidate.clone(), &model, self.cluster, self.limits));
        played.unwrap_or_else(|| ranked.clone())
    }
}

/// Keeps a refusal, each once.
fn note(refusals: &mut Vec<String>, refusal: String) {
    if refusals.len() < REFUSALS_MAX && !refusals.contains(&refusal) {
        refusals.push(refusal);
    }
}

/// Whether two layouts differ only in their micro-batches and the order of a pipeline's work.
fn alike(one: &Candidate, other: &Candidate) -> bool {
    let parts = |candidate: &Candidate| {
        let Candidate { data, pipeline, tensor, tokens, sequence, zero, recompute, .. } = *candidate;
        (data, pipeline, tensor, tokens, sequence, zero, recompute, candidate.layers.is_some())
    };
    parts(one) == parts(other)
}

/// What a candidate takes, as the simulation says. `None` for a schedule that cannot be run.
pub fn simulated(candidate: Candidate, model: &StepModel, cluster: &Cluster, limits: &Limits) -> Option<Ranked> {
    let SimulatedStep { seconds, compute, exposed, bubble, utilisation, .. } =
        simulate_step(model, cluster, &Conditions::default()).ok()?;
    Some(ranked(candidate, model, cluster, limits, StepParts { seconds, compute, exposed, bubble, utilisation }))
}

/// A step's time and its parts, which add up to it.
struct StepParts {
    seconds: f64,
    compute: f64,
    exposed: BTreeMap<String, f64>,
    bubble: f64,
    utilisation: f64,
}

impl From<StepTimes> for StepParts {
    fn from(times: StepTimes) -> Self {
        let StepTimes { seconds, compute, exposed, bubble, update, straggling, utilisation } = times;
        Self { seconds, compute: compute + update, exposed, bubble: bubble + straggling, utilisation }
    }
}

fn ranked(candidate: Candidate, model: &StepModel, cluster: &Cluster, limits: &Limits, step: StepParts) -> Ranked {
    let StepParts { seconds, compute, exposed, bubble, utilisation } = step;
    let run_seconds = seconds * limits.steps;
    let devices = model.layout.workers() as f64;
    let cost = cluster.device.price_per_hour.map(|price| run_seconds / SECONDS_PER_HOUR * devices * price);
    let memory = model.largest().map(|role| role.memory).unwrap_or_default();
    Ranked { candidate, seconds, compute, exposed, bubble, utilisation, memory, cost, run_seconds }
}
