//! One step of a described cluster: its scenario, run, and where the time went.

use super::engine::{SimulationOptions, simulate};
use super::noise::Noise;
use super::outcome::{Outcome, SimulationError};
use super::scenario::{Detail, scenario};
use super::script::{Replica, Scenario};
use crate::cluster::Cluster;
use crate::step_model::StepModel;
use kolo_parallel::axes::{DATA, PIPELINE};
use std::collections::BTreeMap;

/// A rank that computes slowly.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowRank {
    pub rank: usize,
    /// How many times as long it takes.
    pub factor: f64,
}

/// What is not as it should be.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conditions {
    /// Spread of the time of a piece of work, as [`Noise`] has it, and the seed that draws it.
    pub spread: f64,
    pub seed: u64,
    pub slow: Vec<SlowRank>,
    pub keep_spans: bool,
}

/// A simulated step. The parts are means over all ranks, and add up to `seconds`.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedStep {
    pub seconds: f64,
    pub compute: f64,
    /// Waiting for exchanges, by axis.
    pub exposed: BTreeMap<String, f64>,
    /// Waiting for other stages, or for ranks that are not done: the slowest of all, where a cluster's `jitter` says how their
    /// times spread.
    pub bubble: f64,
    /// Of the model's operations, the share of what the devices could have done.
    pub utilisation: f64,
    pub scenario: Scenario,
    pub outcome: Outcome,
}

/// Simulates a step.
pub fn simulate_step(
    model: &StepModel,
    cluster: &Cluster,
    conditions: &Conditions,
) -> Result<SimulatedStep, SimulationError> {
    let noise = Noise { spread: conditions.spread, seed: conditions.seed };
    let detail = if noise.is_none() { Detail::Exchanges } else { Detail::Passes };
    let mut scenario = scenario(model, cluster, detail)?;
    scenario.replicas = replicas(model, scenario.scripts.len(), conditions);
    let options = SimulationOptions { noise, step: 0, keep_spans: conditions.keep_spans };
    let outcome = simulate(&scenario, &options)?;
    let weights: Vec<usize> = scenario.replicas.iter().map(|replica| replica.count).collect();
    let lanes = scenario.lanes.iter().enumerate();
    let exposed: BTreeMap<String, f64> =
        lanes.map(|(at, lane)| (lane.clone(), outcome.mean(&weights, |times| times.exposed[at]))).collect();
    let compute = outcome.mean(&weights, |times| times.compute);
    // Noise that is drawn takes the place of the spread that a cluster file describes.
    let straggling = if noise.is_none() { model.layout.straggling(model.jitter) } else { 1.0 };
    let seconds = outcome.seconds * straggling;
    let bubble = (seconds - compute - exposed.values().sum::<f64>()).max(0.0);
    let possible = seconds * model.layout.workers() as f64 * model.peak_flops;
    let utilisation = if possible > 0.0 { model.model_flops / possible } else { 0.0 };
    Ok(SimulatedStep { seconds, compute, exposed, bubble, utilisation, scenario, outcome })
}

/// The kinds of replicas: all alike, but for those with slow ranks; each on its own if there is noise.
fn replicas(model: &StepModel, roles: usize, conditions: &Conditions) -> Vec<Replica> {
    let data = model.layout.size(DATA);
    let mut slowness: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for SlowRank { rank, factor } in &conditions.slow {
        let (replica, role) = place_of(model, *rank);
        let of_replica = slowness.entry(replica).or_insert_with(|| vec![1.0; roles]);
        if let Some(known) = of_replica.get_mut(role) {
            *known = known.max(*factor);
        }
    }
    if conditions.spread > 0.0 {
        let one = |replica| Replica { count: 1, slowness: slowness.get(&replica).cloned().unwrap_or_default() };
        return (0..data).map(one).collect();
    }
    let mut kinds: Vec<Replica> = Vec::new();
    for of_replica in slowness.into_values() {
        match kinds.iter_mut().find(|kind| kind.slowness == of_replica) {
            Some(kind) => kind.count += 1,
            None => kinds.push(Replica { count: 1, slowness: of_replica }),
        }
    }
    let slow: usize = kinds.iter().map(|kind| kind.count).sum();
    if data > slow {
        kinds.insert(0, Replica::alike(data - slow));
    }
    kinds
}

/// The place of a rank along the data axis, and its role: its place along the pipeline.
fn place_of(model: &StepModel, rank: usize) -> (usize, usize) {
    let along = |axis: &str| rank / model.layout.stride(axis).max(1) % model.layout.size(axis);
    let pipeline = model.layout.axes.iter().any(|(name, _)| name == PIPELINE);
    (along(DATA), if pipeline { along(PIPELINE) } else { 0 })
}
