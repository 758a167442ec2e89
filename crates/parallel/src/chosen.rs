//! How a job's work is split among its workers: the strategies that it chose, asked as one.

use crate::axes::{PIPELINE, TENSOR};
use crate::grain_share::GrainShare;
use crate::mesh::{DATA, Mesh};
use crate::pipeline::PipelineSchedule;
use crate::recompute::RecomputePlan;
use crate::servers::{Roles, Servers};
use crate::strategy::{Allocation, Facts, Home, Key, Part, Purpose, Refusal, Strategy, StrategyKind, TrainingGraphs};
use crate::{device_lane, zero};
use kolo_comm::{Communicator, Fault};
use kolo_exec::{Collectives, ExchangeError, FoundLinks, LinkPreference, Memory, Order};
use kolo_graph::Graph;
use kolo_graph::settings::{SettingError, Settings};
use kolo_graph::verify::debug_verify;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What the report's `layout` always says, and what of a job that chose nothing.
const LAYOUT: [(&str, usize); 4] = [(DATA, 1), (TENSOR, 1), (PIPELINE, 1), (zero::KIND.name, 0)];

/// The strategies of a job, in the order in which they rewrite its graph.
#[derive(Clone, Debug, Default)]
pub struct Parallel {
    strategies: Vec<Arc<dyn Strategy>>,
    recompute: RecomputePlan,
}

impl Parallel {
    /// Reads `[parallel]`. Keys that no strategy knows are errors, and so are strategies that do not go together.
    pub fn read(settings: &Settings, kinds: &[StrategyKind], job: Facts) -> Result<Self, SettingError> {
        let mut strategies = Vec::new();
        for kind in kinds {
            kind.keys.iter().try_for_each(|key| key.touch(settings))?;
            strategies.extend((kind.read)(settings)?);
        }
        let chosen = Self::of(strategies, job).map_err(|Refusal { place, key, message, hint }| match key {
            Some(key) => settings.wrong(key, message, hint),
            None => SettingError { place: place.unwrap_or_else(|| settings.place().into()), message, hint },
        })?;
        settings.finish()?;
        Ok(chosen)
    }

    /// These strategies, if they go together: a default gives way to whoever was chosen for the same part.
    pub fn of(mut strategies: Vec<Arc<dyn Strategy>>, job: Facts) -> Result<Self, Refusal> {
        let chosen = |part: Part| strategies.iter().any(|one| one.part() == part && !one.is_default());
        let gives_way = [Part::Model, Part::Update, Part::Transfer].map(chosen);
        strategies.retain(|one| !(one.is_default() && gives_way[one.part() as usize]));
        strategies.sort_by_key(|one| one.part());
        for (at, one) in strategies.iter().enumerate() {
            let others = strategies.iter().enumerate().filter(|(other, _)| *other != at);
            let others: Vec<&dyn Strategy> = others.map(|(_, other)| &**other).collect();
            one.check(job, &others)?;
        }
        let rivals =
            strategies.windows(2).find(|pair| pair[0].part() == pair[1].part() && pair[0].part() != Part::Model);
        match rivals {
            Some(pair) => {
                let message = format!("`{}` cannot be combined with `{}`", pair[1].written(), pair[0].written());
                Err(Refusal::new(message, "keep one of the two"))
            }
            None => Ok(Self { strategies, recompute: RecomputePlan::default() }),
        }
    }

    /// The same job with parameter servers. Refuses strategies that mean nothing to workers with servers.
    pub fn served(&self, roles: Roles, job: Facts) -> Result<Self, Refusal> {
        let mut strategies = self.strategies.clone();
        strategies.push(Arc::new(Servers(roles)));
        Ok(Self::of(strategies, job)?.recomputing(self.recompute.clone()))
    }

    /// The same with every rank computing this again in its backward pass.
    pub fn recomputing(self, recompute: impl Into<RecomputePlan>) -> Self {
        Self { recompute: recompute.into(), ..self }
    }

    /// What the backward pass of every rank computes again.
    pub fn recompute(&self) -> &RecomputePlan {
        &self.recompute
    }

    /// Those strategies alone that split layers, rather than cut between them.
    pub fn within_layers(&self) -> Self {
        let splits = |one: &&Arc<dyn Strategy>| one.part() == Part::Model && !one.cuts_between_layers();
        Self { strategies: self.strategies.iter().filter(splits).cloned().collect(), recompute: self.recompute.clone() }
    }

    pub fn strategies(&self) -> impl Iterator<Item = &dyn Strategy> {
        self.strategies.iter().map(|one| &**one)
    }

    /// How many ranks share the grains of so many workers; an error if they cannot be arranged along the axes.
    pub fn data_ranks(&self, workers: usize) -> Result<usize, Refusal> {
        let others: Vec<(&str, usize)> = self.axes(workers);
        let ranks: usize = others.iter().map(|(_, size)| size).product();
        if ranks > 0 && workers.is_multiple_of(ranks) {
            return Ok(workers / ranks);
        }
        let axes: Vec<String> = others.iter().map(|(name, size)| format!("{name} = {size}")).collect();
        let message = format!("cannot be arranged as a mesh with {}", axes.join(", "));
        Err(Refusal::new(message, format!("use a multiple of {ranks} workers")))
    }

    /// The axes of the strategies, those that share most first. A single worker does all parts of layers that the job splits.
    fn axes(&self, workers: usize) -> Vec<(&'static str, usize)> {
        let alone = |one: &dyn Strategy| workers == 1 && one.is_of_layers();
        let of = |one: &dyn Strategy| {
            let axes = one.axes().into_iter().rev();
            axes.map(|(name, ranks)| (name, if alone(one) { 1 } else { ranks })).collect::<Vec<_>>()
        };
        self.strategies().flat_map(of).collect()
    }

    /// The mesh of so many workers, and one of them. The data axis is the outermost.
    pub fn mesh(&self, workers: usize, rank: usize) -> Result<Mesh, Refusal> {
        let mut axes = vec![(DATA, self.data_ranks(workers)?)];
        // Rank numbers run fastest along the last axis: those who share every layer are neighbours, on one host if they can be.
        axes.extend(self.axes(workers).into_iter().rev());
        Mesh::new(&axes, rank).ok_or_else(|| {
            Refusal::new(
                format!("do not include rank {rank}"),
                format!("ranks count from 0 to {}", workers.saturating_sub(1)),
            )
        })
    }

    /// The grains that a rank computes, of which every rank has so many.
    pub fn grains(&self, mesh: &Mesh, count: usize) -> GrainShare {
        let (rank, ranks) = (mesh.coordinate(DATA), mesh.size(DATA));
        // Whoever takes turns has grains of both halves, too.
        if self.strategies().any(Strategy::takes_turns) {
            GrainShare::turns(rank, ranks, count)
        } else if self.strategies().any(Strategy::goes_both_ways) {
            GrainShare::halves(rank, ranks, count)
        } else {
            GrainShare::run(rank, count)
        }
    }

    /// The largest norm of a gradient that the graph for this purpose keeps to, given the job's.
    pub fn clip(&self, clip: Option<f32>, purpose: Purpose) -> Option<f32> {
        self.strategies().fold(clip, |clip, one| one.clip(clip, purpose))
    }

    /// Whether some strategy changes what the model computes.
    pub fn splits_model(&self) -> bool {
        self.strategies().any(|one| one.part() == Part::Model)
    }

    /// A rank's part of the model, from the graph of a single worker before its ops are fused. `training` is the graph of
    /// training, of a single worker as well. With the grains of each data rank, a step is also [proven](Strategy::prove).
    pub fn split_model(
        &self,
        graph: Graph,
        training: &Graph,
        purpose: Purpose,
        mesh: &Mesh,
        grains: Option<usize>,
    ) -> Result<Graph, Refusal> {
        let mut strategies = self.strategies().filter(|one| one.part() == Part::Model).peekable();
        let (mut graph, mut here) = (graph, None);
        while let Some(one) = strategies.next() {
            if let Some(grains) = grains.filter(|_| purpose == Purpose::Training) {
                one.prove(&graph, training, mesh, grains)?;
            }
            let seen = TrainingGraphs { whole: training, here: here.as_ref().unwrap_or(training) };
            graph = one.split(graph, seen, purpose, mesh)?;
            debug_verify(&graph, one.name());
            // The next strategy sees in training what this one made of it.
            if matches!(purpose, Purpose::Evaluation { .. }) && strategies.peek().is_some() {
                here = Some(one.split(seen.here.clone(), seen, Purpose::Training, mesh)?);
            }
        }
        Ok(graph)
    }

    /// The schedule of a pipeline for so many grains, if there is one.
    pub fn schedule(&self, mesh: &Mesh, grains: usize) -> Result<Option<PipelineSchedule>, Refusal> {
        self.strategies().find_map(|one| one.schedule(mesh, grains).transpose()).transpose()
    }

    /// In which order a rank works on so many grains, if not grain by grain.
    pub fn order(&self, mesh: &Mesh, grains: usize) -> Result<Option<Order>, Refusal> {
        self.strategies().find_map(|one| one.order(mesh, grains).transpose()).transpose()
    }

    /// The graph that a rank runs, from its part of the model.
    pub fn spread(&self, graph: Graph, purpose: Purpose, mesh: &Mesh) -> Graph {
        let rewrite = |graph: Graph, one: &dyn Strategy| {
            let graph = one.rewrite(graph, purpose, mesh);
            debug_verify(&graph, one.name());
            graph
        };
        self.strategies().filter(|one| one.part() != Part::Model).fold(graph, rewrite)
    }

    /// Whether ranks along the data axis have parameters in shares, so that they run every graph together.
    pub fn shards_weights(&self, mesh: &Mesh) -> bool {
        mesh.size(DATA) > 1 && self.strategies().any(Strategy::shards_weights)
    }

    /// The graph of an evaluation by ranks that have parameters in shares, from their part of the model. `training` is that of
    /// training.
    pub fn spread_evaluation(&self, graph: Graph, training: &Graph, mesh: &Mesh) -> Graph {
        let rewrite = |graph: Graph, one: &dyn Strategy| {
            let graph = one.rewrite_evaluation(graph, training, mesh);
            debug_verify(&graph, one.name());
            graph
        };
        self.strategies().filter(|one| one.shards_weights()).fold(graph, rewrite)
    }

    /// The strategy that says where parameters live: the one that asks for the most.
    fn host(&self) -> Option<&dyn Strategy> {
        self.strategies().max_by_key(|one| one.home())
    }

    /// Whether each of so many ranks keeps a share of the state that no other has, and updates it for all.
    pub fn is_sharded(&self, ranks: usize) -> bool {
        self.home() == Home::Reached && ranks > 1
    }

    pub fn home(&self) -> Home {
        self.host().map_or(Home::Own, Strategy::home)
    }

    /// Zeroed memory for a rank's parameters. All ranks call it together.
    pub fn allocate(&self, at: &Allocation<'_>) -> Result<Memory, ExchangeError> {
        self.host().map_or_else(|| Ok(Memory::new(at.bytes)), |host| host.allocate(at))
    }

    /// The lane for the exchanges along the axes of a mesh, over these links of devices if all ranks can. All ranks call it together.
    pub fn lane(
        &self,
        mesh: &Mesh,
        world: &Arc<Communicator>,
        links: Option<(LinkPreference, FoundLinks)>,
    ) -> Result<Arc<dyn Collectives>, Fault> {
        let own = self.strategies().find_map(|one| Some((one.written(), one.lane(mesh, world)?)));
        if let Some((written, own)) = own {
            if matches!(links, Some((LinkPreference::Always, _))) {
                let hint = "leave --transport out, or change the job";
                return Err(Fault::BadCall(format!(
                    "--transport nccl cannot be combined with `{written}`\n  hint: {hint}"
                )));
            }
            return own;
        }
        device_lane::lane(mesh, world, links)
    }

    /// Why an executor that does not update every parameter where it is will not do, if so.
    pub fn needs_updates_in_place(&self) -> Option<Refusal> {
        self.strategies().find_map(Strategy::needs_updates_in_place)
    }

    /// Lines about who has what, beside parameters.
    pub fn explain(&self) -> Vec<String> {
        self.strategies().flat_map(Strategy::explain).collect()
    }

    /// What the report says of so many workers: the size of every axis, and what the strategies add.
    pub fn layout(&self, workers: usize) -> BTreeMap<&'static str, usize> {
        let mut layout = BTreeMap::from(LAYOUT);
        layout.insert(DATA, self.data_ranks(workers).unwrap_or(workers));
        layout.extend(self.axes(workers));
        layout.extend(self.strategies().flat_map(Strategy::layout));
        layout
    }
}

/// The keys of `[parallel]`, as the guide shows them.
pub fn key_table(kinds: &[StrategyKind]) -> String {
    let mut keys: Vec<Key> = Vec::new();
    for key in kinds.iter().flat_map(|kind| kind.keys).copied() {
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let rows: Vec<String> = keys.iter().map(Key::row).collect();
    format!("| key | type | default | meaning |\n|---|---|---|---|\n{}\n", rows.join("\n"))
}
