//! From the model of a step to what its ranks do: one script for each role, in the order of the pipeline's schedule.
//!
//! Exchanges of a pass that hold it up entirely are waited for where they are started. While the gradient of an input travels,
//! gradients of weights are computed. Weights that are gathered are started one piece of work ahead of where they are read.
//! Buckets of gradients start when the last of their gradients is ready.

use super::outcome::SimulationError;
use super::pipeline::{PipelineActs, pipeline_scripts};
use super::script::{Act, ExchangeCost, Replica, Scenario, Scope, Script};
use crate::cluster::Cluster;
use crate::collective::{CollectiveKind, seconds};
use crate::step_model::{Pass, PlannedExchange, RankRole, StageModel, StepModel};
use kolo_parallel::axes::{DATA, PIPELINE};
use kolo_parallel::schedules::{Action, ActionKind, Channel, Pass as Way, PipelineSchedule};

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

/// An exchange of a pass.
struct Started {
    exchange: u32,
    /// The first of two handles, which take turns.
    handle: u32,
    times: usize,
    /// Nothing is computed while it travels.
    blocks: bool,
    /// It is started one piece of work before the one that reads it: weights that are gathered.
    ahead: bool,
}

impl Started {
    /// How many of its times come before a piece of work.
    fn due(&self, piece: usize, pieces: usize) -> usize {
        piece * self.times / pieces
    }
}

/// Names of passes: those of a kind one behind the other, by micro-batch.
#[derive(Clone, Copy, Default)]
struct Names {
    first: u32,
    micro_batches: u32,
    update: u32,
}

const PASS_NAMES: [(ActionKind, &str); 4] = [
    (ActionKind::Forward, "forward"),
    (ActionKind::Backward, "backward"),
    (ActionKind::BackwardInput, "input gradient"),
    (ActionKind::BackwardWeight, "weight gradient"),
];

impl Names {
    fn new(scenario: &mut Scenario, micro_batches: usize) -> Self {
        let first = scenario.names.len() as u32;
        let numbered = |(_, name)| (0..micro_batches).map(move |number| format!("{name} {number}"));
        scenario.names.extend(PASS_NAMES.into_iter().flat_map(numbered));
        Self { first, micro_batches: micro_batches as u32, update: scenario.name("update") }
    }

    fn of(&self, action: Action) -> u32 {
        let kind = PASS_NAMES.iter().position(|(kind, _)| *kind == action.kind).unwrap_or(0) as u32;
        self.first + kind * self.micro_batches + action.micro_batch as u32
    }
}

/// The scenario of a step whose replicas are all alike. Fails if the pipeline has no schedule for its micro-batches.
pub fn scenario(model: &StepModel, cluster: &Cluster, detail: Detail) -> Result<Scenario, SimulationError> {
    let schedule = model.layout.schedule(model.layout.micro_batches);
    let schedule = schedule.map_err(|error| SimulationError::PipelineSchedule(error.to_string()))?;
    let (data, workers) = (model.layout.size(DATA), model.layout.workers());
    let mut scenario = Scenario {
        replicas: vec![Replica::alike(data)],
        ranks_per_unit: (workers / data / model.roles.len().max(1)).max(1),
        levels: cluster.levels.len().max(1) as u32,
        ..Scenario::default()
    };
    let names = Names::new(&mut scenario, model.layout.micro_batches);
    let mut builder = Builder { model, cluster, detail, scenario, names };
    builder.build(schedule.as_ref());
    Ok(builder.scenario)
}

impl Builder<'_> {
    fn build(&mut self, schedule: Option<&PipelineSchedule>) {
        match schedule {
            Some(schedule) => self.build_pipeline(schedule),
            None => {
                let whole = |kind, micro_batch| Action::new(kind, 0, micro_batch);
                let mut acts = Vec::new();
                for micro_batch in 0..self.model.layout.micro_batches {
                    for kind in [ActionKind::Forward, ActionKind::Backward] {
                        acts.extend(self.action(whole(kind, micro_batch)));
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

    fn build_pipeline(&mut self, schedule: &PipelineSchedule) {
        // What every action does, made before the schedule is walked: exchanges are numbered as they are met.
        let mut acts = std::collections::BTreeMap::new();
        for (rank, actions) in schedule.actions.iter().enumerate() {
            for action in actions {
                let key = (rank, action.kind, action.stage);
                acts.entry(key).or_insert_with(|| self.action(*action));
            }
        }
        let lane = self.scenario.lane(PIPELINE);
        let (stride, size) = self.place(PIPELINE);
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
        let names = self.names;
        let of_micro_batch = |act: &Act, action: Action| match *act {
            Act::Compute { seconds, .. } => Act::Compute { seconds, name: names.of(action) },
            other => other,
        };
        let parts = PipelineActs {
            acts: &|rank, action: Action| {
                acts[&(rank, action.kind, action.stage)].iter().map(|act| of_micro_batch(act, action)).collect()
            },
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

    fn action(&mut self, action: Action) -> Vec<Act> {
        let stage: &StageModel = &self.model.stages[action.stage];
        let name = self.names.of(action);
        match action.kind {
            ActionKind::Forward => self.passes(&stage.forward, None, name),
            ActionKind::BackwardInput => self.passes(&stage.input, None, name),
            ActionKind::BackwardWeight => self.passes(&stage.weight, None, name),
            ActionKind::Backward => self.passes(&stage.input, Some(&stage.weight), name),
        }
    }

    /// A pass, or two that are computed side by side, layer by layer: while the gradient of an input travels, those of weights
    /// are computed.
    fn passes(&mut self, first: &Pass, second: Option<&Pass>, name: u32) -> Vec<Act> {
        let other = second.map_or(0.0, Pass::seconds);
        if self.detail == Detail::Passes {
            return vec![Act::Compute { seconds: first.seconds() + other, name }];
        }
        let exchanges = self.started(first.exchanges.iter().chain(second.iter().flat_map(|pass| &pass.exchanges)));
        let pieces = exchanges.iter().map(|one| one.times).max().unwrap_or(1);
        let [seconds, seconds_after] =
            [first.compute.seconds(), second.map_or(0.0, |pass| pass.compute.seconds())].map(|one| one / pieces as f64);
        let mut acts = Vec::new();
        for piece in 0..pieces {
            let due = |one: &&Started| one.due(piece + 1, pieces) > one.due(piece, pieces);
            for one in exchanges.iter().filter(due).filter(|one| one.ahead) {
                let number = one.due(piece, pieces) as u32;
                if number > 0 {
                    acts.push(Act::Wait { handle: one.handle + (number - 1) % 2 });
                }
                acts.push(Act::Start { exchange: one.exchange, handle: one.handle + number % 2 });
            }
            acts.push(Act::Compute { seconds, name });
            for one in exchanges.iter().filter(due).filter(|one| !one.ahead) {
                acts.push(Act::Start { exchange: one.exchange, handle: one.handle });
                if one.blocks || second.is_none() {
                    acts.push(Act::Wait { handle: one.handle });
                }
            }
            if second.is_some() {
                acts.push(Act::Compute { seconds: seconds_after, name });
                let waits = exchanges.iter().filter(due).filter(|one| !one.ahead && !one.blocks);
                acts.extend(waits.map(|one| Act::Wait { handle: one.handle }));
            }
        }
        let last = |one: &Started| Act::Wait { handle: one.handle + (one.times as u32 - 1) % 2 };
        acts.extend(exchanges.iter().filter(|one| one.ahead).map(last));
        acts
    }

    /// The exchanges of a pass that take time, with handles of their own.
    fn started<'e>(&mut self, exchanges: impl Iterator<Item = &'e PlannedExchange>) -> Vec<Started> {
        let mut started: Vec<Started> = Vec::new();
        for one in exchanges.filter(|one| one.seconds > 0.0 && one.times >= 1.0) {
            let blocks = one.exposed >= one.seconds;
            started.push(Started {
                exchange: self.exchange(one),
                handle: 2 * started.len() as u32,
                times: (one.times as usize).clamp(1, PIECES_MAX),
                blocks,
                ahead: one.axis == DATA && !blocks,
            });
        }
        started
    }

    /// The number of one of the times of an exchange; more times than pieces are joined.
    fn exchange(&mut self, one: &PlannedExchange) -> u32 {
        let times = (one.times as usize).clamp(1, PIECES_MAX) as f64;
        let bytes = one.bytes * one.times / times;
        self.exchange_of(&one.axis, one.kind, one.seconds / times, bytes, one.times / times)
    }

    /// The number of an exchange with this axis, kind, seconds and bytes, in which so many follow each other.
    fn exchange_of(&mut self, axis: &str, kind: CollectiveKind, seconds: f64, bytes: f64, joined: f64) -> u32 {
        let (stride, size) = self.place(axis);
        let scope = match axis {
            DATA => Scope::Replicas,
            PIPELINE => Scope::Stages,
            _ => Scope::Unit,
        };
        let lane = self.scenario.lane(if axis == PIPELINE { "pipeline sums" } else { axis });
        let latency = (self.latency(kind, stride, size) * joined).min(seconds);
        let level = level_of(self.cluster, stride, size);
        let name = self.scenario.name(kind.name());
        let transfer = seconds - latency;
        self.scenario.exchange(ExchangeCost { lane, scope, name, latency, transfer, level, bytes: bytes as u64 })
    }

    /// Exchanges that are waited for at once.
    fn blocking(&mut self, exchanges: &[PlannedExchange]) -> Vec<Act> {
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
    fn insert_buckets(&mut self, acts: &mut Vec<Act>, role: &RankRole) -> std::ops::Range<u32> {
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
    fn update(&mut self, role: &RankRole, handles: std::ops::Range<u32>) -> Vec<Act> {
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
    cluster.span(stride, size).last().map_or(0, |level| level.level) as u32
}
