//! From the model of a step to what its ranks do: one script for each role, in the order of the pipeline's schedule.
//!
//! Exchanges of a pass that hold it up entirely are waited for where they are started. Any other is started one piece of work
//! ahead of where it is read, as the executor would. Buckets of gradients start when the last of their gradients is ready.

use super::outcome::SimulationError;
use super::pipeline::{PipelineActs, pipeline_scripts};
use super::script::{Act, ExchangeCost, Replica, Scenario, Scope, Script};
use crate::cluster::Cluster;
use crate::collective::{CollectiveKind, seconds};
use crate::step_model::{Exchange, Pass, Role, StageModel, StepModel};
use kolo_parallel::mesh::DATA;
use kolo_parallel::pipeline::{Action, ActionKind, Channel, Pass as Way, Schedule};

/// How finely passes are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Every exchange on its own.
    Exchanges,
    /// A pass is one piece of work, with what its exchanges add: for clusters of which every rank is simulated.
    Passes,
}

/// Pieces that a pass is cut to, at most.
const PIECES_MAX: usize = 256;

/// A scenario under construction.
struct Builder<'m> {
    model: &'m StepModel,
    cluster: &'m Cluster,
    detail: Detail,
    scenario: Scenario,
    names: Names,
}

#[derive(Clone, Copy, Default)]
struct Names {
    forward: u32,
    backward: u32,
    input: u32,
    weight: u32,
    update: u32,
}

/// The scenario of a step whose replicas are all alike. Fails if the pipeline has no schedule for its micro-batches.
pub fn scenario(model: &StepModel, cluster: &Cluster, detail: Detail) -> Result<Scenario, SimulationError> {
    let schedule = model.layout.schedule(model.layout.micro_batches);
    let schedule = schedule.map_err(|error| SimulationError::Schedule(error.to_string()))?;
    let (data, workers) = (model.layout.size(DATA), model.layout.workers());
    let mut scenario = Scenario {
        replicas: vec![Replica::alike(data)],
        ranks_per_unit: (workers / data / model.roles.len().max(1)).max(1),
        levels: cluster.levels.len().max(1) as u32,
        ..Scenario::default()
    };
    let names = Names {
        forward: scenario.name("forward"),
        backward: scenario.name("backward"),
        input: scenario.name("input gradient"),
        weight: scenario.name("weight gradient"),
        update: scenario.name("update"),
    };
    let mut builder = Builder { model, cluster, detail, scenario, names };
    builder.build(schedule.as_ref());
    Ok(builder.scenario)
}

impl Builder<'_> {
    fn build(&mut self, schedule: Option<&Schedule>) {
        match schedule {
            Some(schedule) => self.build_pipeline(schedule),
            None => {
                let whole = |kind, micro_batch| Action::new(kind, 0, micro_batch);
                let mut acts = Vec::new();
                for micro_batch in 0..self.model.layout.micro_batches {
                    for kind in [ActionKind::Forward, ActionKind::Backward] {
                        acts.extend(self.action(0, whole(kind, micro_batch)));
                    }
                }
                self.scenario.scripts.push(Script { acts, handles: 0 });
            }
        }
        for role in 0..self.scenario.scripts.len() {
            let model = self.model;
            let mut acts = std::mem::take(&mut self.scenario.scripts[role].acts);
            let mut whole = self.blocking(&model.roles[role].before);
            let handles = self.insert_buckets(&mut acts, &model.roles[role]);
            whole.append(&mut acts);
            whole.extend(self.update(&model.roles[role], handles));
            self.scenario.scripts[role] = Script { handles: handle_count(&whole), acts: whole };
        }
    }

    fn build_pipeline(&mut self, schedule: &Schedule) {
        // What every action does, made before the schedule is walked: exchanges are numbered as they are met.
        let mut acts = std::collections::BTreeMap::new();
        for (rank, actions) in schedule.actions.iter().enumerate() {
            for action in actions {
                let key = (rank, action.kind, action.stage);
                if !acts.contains_key(&key) {
                    let made = self.action(rank, *action);
                    acts.insert(key, made);
                }
            }
        }
        let lane = self.scenario.lane("pipeline");
        let (stride, size) = self.place("pipeline");
        let level = level_of(self.cluster, stride, size);
        let mut messages = std::collections::BTreeMap::new();
        for (stage, model) in self.model.stages.iter().enumerate() {
            for (way, transfer) in [Way::Forward, Way::Backward].into_iter().zip(model.sends) {
                let name = self.scenario.name(if way == Way::Forward { "send activations" } else { "send gradients" });
                let latency = self.latency(CollectiveKind::Send, stride, size).min(transfer.seconds);
                let cost = ExchangeCost {
                    lane,
                    scope: Scope::Unit,
                    name,
                    latency,
                    transfer: transfer.seconds - latency,
                    level,
                    bytes: transfer.bytes as u64,
                };
                messages.insert((way, stage), self.scenario.exchange(cost));
            }
        }
        let parts = PipelineActs {
            acts: &|rank, action: Action| acts[&(rank, action.kind, action.stage)].clone(),
            message: &|channel: Channel| messages[&(channel.pass, channel.stage)],
            after: &|_| Vec::new(),
        };
        pipeline_scripts(&mut self.scenario, schedule, &parts);
    }

    /// How far apart the ranks of an axis are, and how many.
    fn place(&self, axis: &str) -> (usize, usize) {
        (self.model.layout.stride(axis), self.model.layout.size(axis))
    }

    fn latency(&self, kind: CollectiveKind, stride: usize, size: usize) -> f64 {
        seconds(kind, self.model.layout.algorithm, 0.0, &self.cluster.span(stride, size))
    }

    fn action(&mut self, _rank: usize, action: Action) -> Vec<Act> {
        let stage: &StageModel = &self.model.stages[action.stage];
        let Names { forward, backward, input, weight, .. } = self.names;
        match action.kind {
            ActionKind::Forward => self.pass(&stage.forward, forward),
            ActionKind::BackwardInput => self.pass(&stage.input, input),
            ActionKind::BackwardWeight => self.pass(&stage.weight, weight),
            ActionKind::Backward => {
                let mut acts = self.pass(&stage.input, backward);
                acts.extend(self.pass(&stage.weight, backward));
                acts
            }
        }
    }

    fn pass(&mut self, pass: &Pass, name: u32) -> Vec<Act> {
        if self.detail == Detail::Passes {
            return vec![Act::Compute { seconds: pass.seconds(), name }];
        }
        let exchanges: Vec<(&Exchange, u32)> = {
            let known = pass.exchanges.iter().filter(|one| one.seconds > 0.0 && one.times >= 1.0);
            let list: Vec<&Exchange> = known.collect();
            list.into_iter().map(|one| (one, self.exchange(one))).collect()
        };
        let most = exchanges.iter().map(|(one, _)| one.times as usize).max().unwrap_or(1);
        let pieces = most.clamp(1, PIECES_MAX);
        let mut acts = Vec::new();
        let seconds = pass.compute.seconds() / pieces as f64;
        for piece in 0..pieces {
            // What this piece and the next need, of exchanges that are spread evenly over the pass.
            for (handle, (one, exchange)) in exchanges.iter().enumerate() {
                let due = |at: usize| at * (one.times as usize).min(pieces) / pieces;
                let starts = due(piece + 1) > due(piece);
                let handle = 2 * handle as u32;
                if !starts {
                    continue;
                }
                if one.exposed >= one.seconds {
                    acts.extend([Act::Start { exchange: *exchange, handle }, Act::Wait { handle }]);
                } else {
                    let turn = due(piece) as u32 % 2;
                    if due(piece) > 0 {
                        acts.push(Act::Wait { handle: handle + 1 - turn });
                    }
                    acts.push(Act::Start { exchange: *exchange, handle: handle + turn });
                }
            }
            acts.push(Act::Compute { seconds, name });
        }
        for (handle, (one, _)) in exchanges.iter().enumerate().filter(|(_, (one, _))| one.exposed < one.seconds) {
            let last = ((one.times as usize).min(pieces) - 1) as u32 % 2;
            acts.push(Act::Wait { handle: 2 * handle as u32 + last });
        }
        acts
    }

    /// The number of one of the times of an exchange; more times than pieces are joined.
    fn exchange(&mut self, one: &Exchange) -> u32 {
        let times = (one.times as usize).clamp(1, PIECES_MAX) as f64;
        let bytes = one.bytes * one.times / times;
        self.exchange_of(&one.axis, one.kind, one.seconds / times, bytes, one.times / times)
    }

    /// The number of an exchange with this axis, kind, seconds and bytes, in which so many follow each other.
    fn exchange_of(&mut self, axis: &str, kind: CollectiveKind, seconds: f64, bytes: f64, joined: f64) -> u32 {
        let (stride, size) = self.place(axis);
        let scope = match axis {
            DATA => Scope::Replicas,
            "pipeline" => Scope::Stages,
            _ => Scope::Unit,
        };
        let lane = self.scenario.lane(if axis == "pipeline" { "pipeline sums" } else { axis });
        let latency = (self.latency(kind, stride, size) * joined).min(seconds);
        let level = level_of(self.cluster, stride, size);
        let name = self.scenario.name(kind.name());
        let transfer = seconds - latency;
        self.scenario.exchange(ExchangeCost { lane, scope, name, latency, transfer, level, bytes: bytes as u64 })
    }

    /// Exchanges that are waited for at once.
    fn blocking(&mut self, exchanges: &[Exchange]) -> Vec<Act> {
        let mut acts = Vec::new();
        for one in exchanges.iter().filter(|one| one.seconds > 0.0) {
            let exchange = self.exchange(one);
            for _ in 0..(one.times as usize).clamp(1, PIECES_MAX) {
                acts.extend([Act::Start { exchange, handle: 0 }, Act::Wait { handle: 0 }]);
            }
        }
        acts
    }

    /// Starts the buckets of gradients where the last gradient of each is ready. Their handles:
    fn insert_buckets(&mut self, acts: &mut Vec<Act>, role: &Role) -> std::ops::Range<u32> {
        let first = handle_count(acts);
        let buckets = role.buckets.iter().filter(|bucket| bucket.seconds > 0.0);
        let mut starts: Vec<(f64, Act)> = Vec::new();
        let list: Vec<_> = buckets.collect();
        for bucket in list {
            let exchange = self.exchange_of(&bucket.axis, bucket.kind, bucket.seconds, bucket.bytes, 1.0);
            let before_end = if self.model.overlaps_gradients { bucket.ready_before_end.max(0.0) } else { 0.0 };
            starts.push((before_end, Act::Start { exchange, handle: first + starts.len() as u32 }));
        }
        let handles = first..first + starts.len() as u32;
        // From the end on: the last to be ready comes first, and those of one moment keep their order.
        starts.reverse();
        starts.sort_by(|one, other| one.0.total_cmp(&other.0));
        let mut reversed: Vec<Act> = Vec::with_capacity(acts.len() + 2 * starts.len());
        let (mut waiting, mut passed) = (starts.into_iter().peekable(), 0.0);
        for act in acts.drain(..).rev() {
            let Act::Compute { mut seconds, name } = act else {
                passed += self.held_up(act, reversed.last());
                reversed.push(act);
                continue;
            };
            while let Some((before, start)) = waiting.next_if(|(before, _)| *before <= passed + seconds) {
                let after = (before - passed).clamp(0.0, seconds);
                if after > 0.0 {
                    reversed.push(Act::Compute { seconds: after, name });
                }
                (passed, seconds) = (passed + after, seconds - after);
                reversed.push(start);
            }
            passed += seconds;
            reversed.push(Act::Compute { seconds, name });
        }
        reversed.extend(waiting.map(|(_, start)| start));
        reversed.reverse();
        *acts = reversed;
        handles
    }

    /// Seconds for which an act holds its rank up, if the one after it waits for it.
    fn held_up(&self, act: Act, next: Option<&Act>) -> f64 {
        match (act, next) {
            (Act::Start { exchange, handle }, Some(Act::Wait { handle: waited })) if handle == *waited => {
                let cost = &self.scenario.exchanges[exchange as usize];
                cost.latency + cost.transfer
            }
            _ => 0.0,
        }
    }

    /// Waits for gradients, computes new weights, and gathers them.
    fn update(&mut self, role: &Role, handles: std::ops::Range<u32>) -> Vec<Act> {
        let mut acts: Vec<Act> = handles.map(|handle| Act::Wait { handle }).collect();
        acts.push(Act::Compute { seconds: role.update.seconds(), name: self.names.update });
        acts.extend(self.blocking(&role.after));
        acts
    }
}

fn handle_count(acts: &[Act]) -> u32 {
    let handle = |act: &Act| match act {
        Act::Start { handle, .. } | Act::Wait { handle } => Some(handle + 1),
        _ => None,
    };
    acts.iter().filter_map(handle).max().unwrap_or(0)
}

/// The level of the network that joins so many ranks, so far apart.
pub fn level_of(cluster: &Cluster, stride: usize, size: usize) -> u32 {
    let reach = stride.saturating_mul(size);
    let levels = cluster.levels.len();
    (0..levels).find(|level| cluster.devices_at(*level) >= reach).unwrap_or(levels.saturating_sub(1)) as u32
}
