//! The layouts that a job can have, for the search: the model of each one's step, and whether training takes it.
//!
//! What a rank computes is counted from the graph that the strategies make for it. That graph does not depend on data ranks,
//! stages or the optimizer's shards, so few graphs serve many layouts; and as it grows evenly with the samples of a micro-batch,
//! two sizes stand for all. Whether strategies take a layout is asked of the model with as few layers as it has stages: layers
//! that repeat are split alike.

use crate::error::Error;
use crate::job::Job;
use crate::step::WholeStep;
use crate::step_model::{PlannedPrecision, anatomy_of};
use kolo_graph::settings::{Setting, Settings};
use kolo_models::Model;
use kolo_parallel::keys;
use kolo_parallel::schedules::{FAMILIES, USUAL};
use kolo_parallel::strategy::Key;
use kolo_parallel::{Parallel, Purpose, Recompute, RecomputePlan};
use kolo_plan::anatomy::Anatomy;
use kolo_plan::cluster::{Cluster, SystemTraits};
use kolo_plan::collective::Algorithm;
use kolo_plan::device::Precision;
use kolo_plan::schedule_cache::ScheduleCache;
use kolo_plan::search::parallel::in_parallel;
use kolo_plan::search::{Candidate, LayerChoices, LayoutModels, SearchSpace, SequenceSplit};
use kolo_plan::step_model::{DeviceMemory, ParallelLayout, StepModel, StepTimes};
use kolo_plan::{Counted, OpKindCost, RECOMPUTE_KINDS, fit_layers, op_kinds};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

/// Samples of the two micro-batches that are counted.
const SAMPLES_COUNTED: [usize; 2] = [2, 4];
/// Ranks that share a layer, and tokens, at most.
const TENSOR_MAX: usize = 64;
const TOKENS_MAX: usize = 64;
/// Samples with fewer tokens than this are not worth sharing among ranks of their own.
const TOKENS_WORTH_SHARING: usize = 4096;
const MICRO_BATCHES_MAX: usize = 1024;
/// Layers of the model that strategies are tried on, at least: one at each end and two alike between them.
const LAYERS_TRIED_MIN: usize = 4;

/// What of a candidate decides what a rank computes.
type GraphKey = (usize, usize, SequenceSplit, [usize; 2], Recompute, Option<Arc<LayerChoices>>);
/// What of a candidate decides whether the model can be split so.
type SplitKey = (usize, usize, SequenceSplit, [usize; 2], usize, usize, &'static str);

/// A job whose layouts are looked at.
pub struct JobModels<'j> {
    job: &'j Job,
    precision: Precision,
    algorithm: Algorithm,
    system: SystemTraits,
    anatomies: Mutex<BTreeMap<GraphKey, Result<Arc<[Anatomy; 2]>, String>>>,
    /// By the samples of a micro-batch, too.
    counted: Mutex<BTreeMap<(GraphKey, usize), Result<Arc<Counted>, String>>>,
    schedules: ScheduleCache,
    splits: Mutex<BTreeMap<SplitKey, Result<(), String>>>,
}

fn graph_key(candidate: &Candidate) -> GraphKey {
    let Candidate { tensor, tokens, sequence, slices, recompute, .. } = *candidate;
    // Without exchanges inside layers, `full` is `blocks`.
    let differs = Recompute::that_differ(tensor > 1 || tokens > 1).contains(&recompute);
    let recompute = if differs { recompute } else { Recompute::Blocks };
    (tensor, tokens, sequence, slices, recompute, candidate.layers.clone())
}

impl std::fmt::Debug for JobModels<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobModels").field("job", &self.job.name).finish_non_exhaustive()
    }
}

impl<'j> JobModels<'j> {
    /// The layouts of a job on clusters like this one.
    pub fn new(job: &'j Job, cluster: &Cluster) -> Result<Self, Error> {
        Ok(Self {
            job,
            precision: PlannedPrecision::of(job, cluster).precision,
            // Sums whose bits are promised go directly from every rank to every other.
            algorithm: cluster.system.algorithm.unwrap_or(match job.reproducible {
                true => Algorithm::Direct,
                false => Algorithm::Fastest,
            }),
            system: cluster.system,
            anatomies: Mutex::new(BTreeMap::new()),
            counted: Mutex::new(BTreeMap::new()),
            schedules: ScheduleCache::default(),
            splits: Mutex::new(BTreeMap::new()),
        })
    }

    /// The job's settings, made anew: settings remember who read them, and threads share this.
    fn root(&self) -> Result<Settings, Error> {
        Ok(kolo_config::parse(&self.job.text, "job")?)
    }

    /// Samples of a step.
    pub fn batch(&self) -> usize {
        self.job.batch
    }

    /// The job's strategies with these keys, and what is computed again by them.
    fn parallel(&self, assignments: &[String]) -> Result<Parallel, Error> {
        let mut root = self.root()?;
        let is_read = |one: &&String| one.starts_with("parallel.") || one.starts_with("memory.");
        for assignment in assignments.iter().filter(is_read) {
            kolo_config::override_with(&mut root, assignment)?;
        }
        let parallel = Parallel::read(&root.table("parallel")?, &self.job.strategies, self.job.facts())?;
        Ok(parallel.recomputing(RecomputePlan::read(&root.table("memory")?)?))
    }

    /// What a rank of a candidate computes, counted on two micro-batches.
    fn anatomies(&self, candidate: &Candidate) -> Result<Arc<[Anatomy; 2]>, String> {
        let key = graph_key(candidate);
        if let Some(known) = kolo_base::lock(&self.anatomies).get(&key) {
            return known.clone();
        }
        let made = self.count(candidate).map(Arc::new).map_err(|error| error.to_string());
        kolo_base::lock(&self.anatomies).insert(key, made.clone());
        made
    }

    fn count(&self, candidate: &Candidate) -> Result<[Anatomy; 2], Error> {
        let [few, many] = SAMPLES_COUNTED.map(|samples| self.count_at(candidate, samples));
        Ok([few?, many?])
    }

    fn count_at(&self, candidate: &Candidate, samples: usize) -> Result<Anatomy, Error> {
        // Data ranks and stages change nothing of what is counted.
        let one = Candidate { data: 1, pipeline: 1, chunks: 1, zero: 0, schedule: USUAL.name, ..candidate.clone() };
        let repeats = Anatomy::repeats_whole_layers(&self.system, one.recompute);
        let recompute = if repeats { Recompute::None } else { one.recompute };
        let parallel = self.parallel(&one.assignments())?.recomputing(recompute);
        let anatomy = anatomy_of(self.job, &parallel, samples, self.system.fuses)?;
        Ok(anatomy.run_by(&self.system, one.recompute))
    }

    /// What a rank of a candidate computes, on micro-batches of so many samples.
    fn counted(&self, candidate: &Candidate, samples: usize) -> Result<Arc<Counted>, String> {
        let key = (graph_key(candidate), samples);
        if let Some(known) = kolo_base::lock(&self.counted).get(&key) {
            return known.clone();
        }
        let made = match &candidate.layers {
            Some(layers) => self.mixed(candidate, layers, samples),
            None => self.anatomies(candidate).and_then(|anatomies| {
                let [few, many] = &*anatomies;
                let anatomy = match few.at_samples(many, samples) {
                    Some(anatomy) => anatomy,
                    // What is computed in pieces may be in others where there are more samples.
                    None => self.count_at(candidate, samples).map_err(|error| error.to_string())?,
                };
                Ok(Arc::new(Counted::new(anatomy)))
            }),
        };
        // Who was first keeps it: what was found of it since stays known.
        kolo_base::lock(&self.counted).entry(key).or_insert(made).clone()
    }

    /// The same candidate with all layers computing the same again, by [`Recompute`].
    fn counted_alike(&self, candidate: &Candidate, samples: usize) -> Result<[Arc<Counted>; RECOMPUTE_KINDS], String> {
        let alike = |recompute| Candidate { recompute, layers: None, ..candidate.clone() };
        let [none, selective, blocks, full] = Recompute::ALL.map(|what| self.counted(&alike(what), samples));
        Ok([none?, selective?, blocks?, full?])
    }

    /// What a rank computes whose layers differ in what they compute again.
    fn mixed(&self, candidate: &Candidate, layers: &LayerChoices, samples: usize) -> Result<Arc<Counted>, String> {
        let all = self.counted_alike(candidate, samples)?;
        let what: Vec<Recompute> = layers.layers.iter().map(|(_, what)| *what).collect();
        let mixed = Anatomy::mixed(all.each_ref().map(|one| &one.anatomy), &what);
        let mixed = mixed.ok_or("what its layers compute again cannot be chosen one by one")?;
        Ok(Arc::new(Counted::new(mixed)))
    }

    /// What the job itself says of its layers, if it says something of some.
    fn own_layers(&self) -> Option<Arc<LayerChoices>> {
        let plan = self.job.parallel.recompute();
        let names = || self.anatomies(&self.plain()).map(|anatomies| anatomies[0].layers.clone()).unwrap_or_default();
        let layers = || names().into_iter().map(|name| (name.clone(), plan.of(&name))).collect();
        plan.has_lines().then(|| Arc::new(LayerChoices { layers: layers() }))
    }

    /// Where the time of a candidate's step goes, by the kind of op.
    pub fn op_kinds(&self, candidate: &Candidate, model: &StepModel, cluster: &Cluster) -> Vec<OpKindCost> {
        let counted = self.counted(candidate, model.layout.micro_batch);
        counted.map_or_else(|_| Vec::new(), |counted| op_kinds(&counted.anatomy, model, cluster))
    }

    /// Slices of layers and of tokens that the job writes, whoever computes them.
    fn own_slices(&self, sequence: SequenceSplit) -> [usize; 2] {
        let written = |key: &Key| {
            let value = self.job.parallel_setting(key).and_then(|value| value.parse().ok());
            value.unwrap_or(key.default_count())
        };
        match sequence.axis() {
            Some(_) => [written(&keys::TENSOR_SLICES), written(&keys::SLICES)],
            None => [written(&keys::SLICES), 1],
        }
    }

    /// The layout that the job itself has on so many devices.
    pub fn own(&self, devices: usize) -> Result<Candidate, Error> {
        let job = self.job;
        let sizes = job.parallel.layout(devices);
        let size = |key: &Key| sizes.get(key.name).copied().unwrap_or(key.default_count());
        let data = job.parallel.data_ranks(devices).map_err(|refusal| Error::workers(devices, refusal))?;
        let root = self.root()?;
        let parallel = root.table("parallel")?;
        let text = |key: &Key| match parallel.peek(key.name) {
            Some(Setting::Text(text)) => Some(text.clone()),
            _ => None,
        };
        let named = text(&keys::SCHEDULE).unwrap_or_else(|| USUAL.name.into());
        let Some(family) = FAMILIES.iter().find(|family| family.name == named) else {
            let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
            let hint = format!("name a family of schedules: {}", names.join(", "));
            return Err(parallel.wrong(keys::SCHEDULE.name, format!("is \"{named}\", a file"), hint).into());
        };
        let sequence = SequenceSplit::named(&text(&keys::SEQUENCE).unwrap_or_default());
        let tokens = sequence.axis().and_then(|axis| sizes.get(axis).copied()).unwrap_or(1);
        let layers = self.own_layers();
        Ok(Candidate {
            data,
            pipeline: size(&keys::PIPELINE),
            tensor: size(&keys::TENSOR),
            tokens,
            sequence,
            slices: self.own_slices(sequence),
            zero: size(&keys::ZERO),
            recompute: if layers.is_some() { Recompute::None } else { job.parallel.recompute().usual() },
            layers,
            micro_batches: (job.grains / data).max(1),
            schedule: family.name,
            chunks: size(&keys::CHUNKS),
        })
    }

    /// All layouts on so many devices that are worth looking at.
    pub fn space(&self, devices: usize) -> SearchSpace {
        let tokens = self.job.fields.iter().map(|field| field.shape.iter().product()).max().unwrap_or(1);
        let has_tokens = self.job.model.tokens_per_sample().is_some();
        let mut sequences = vec![SequenceSplit::Whole];
        if has_tokens {
            sequences.push(SequenceSplit::Tensor);
        }
        if has_tokens && tokens >= TOKENS_WORTH_SHARING {
            sequences.extend([SequenceSplit::Heads, SequenceSplit::Context]);
        }
        SearchSpace {
            devices,
            batch: self.job.batch,
            stages_max: self.layers(),
            tensor_max: TENSOR_MAX,
            tokens_max: TOKENS_MAX,
            zero_max: keys::ZERO.most().unwrap_or(0),
            sequences,
            recomputes: Recompute::ALL.to_vec(),
            schedules: FAMILIES.iter().map(|family| family.name).collect(),
            micro_batches_max: MICRO_BATCHES_MAX,
            reproducible: self.job.reproducible,
        }
    }

    /// The whole model on one device.
    fn plain(&self) -> Candidate {
        Candidate {
            data: 1,
            pipeline: 1,
            tensor: 1,
            tokens: 1,
            sequence: SequenceSplit::Whole,
            slices: [1; 2],
            zero: 0,
            recompute: Recompute::None,
            layers: None,
            micro_batches: 1,
            schedule: USUAL.name,
            chunks: 1,
        }
    }

    /// Layers that a pipeline can be cut between.
    fn layers(&self) -> usize {
        self.anatomies(&self.plain()).map_or(1, |anatomies| anatomies[0].order.len().saturating_sub(2).max(1))
    }

    fn check_split(&self, candidate: &Candidate) -> Result<(), Error> {
        let parallel = self.parallel(&candidate.assignments())?;
        let refused = |refusal| Error::workers(candidate.devices(), refusal);
        let mesh = parallel.mesh(candidate.devices(), 0).map_err(refused)?;
        parallel.order(&mesh, candidate.micro_batches).map_err(refused)?;
        let job = self.job;
        let few = (candidate.pipeline * candidate.chunks).max(LAYERS_TRIED_MIN);
        let few = job.model.layers().filter(|all| *all > few).and_then(|_| job.model.with_layers(few));
        let model: &dyn Model = few.as_deref().unwrap_or(&*job.model);
        let (samples, grains) = (job.batch / candidate.grains(), candidate.grains());
        let step = WholeStep { model, samples, grains, precision: job.precision };
        let graph = step.graph(job, &parallel)?;
        let grains = Some(candidate.micro_batches);
        parallel.split_model(graph.clone(), &graph, Purpose::Training, &mesh, grains).map(drop).map_err(refused)
    }

    fn layout(&self, candidate: &Candidate) -> ParallelLayout {
        candidate.layout(self.job.batch, self.precision, self.algorithm)
    }

    /// The model of a candidate's step with another number of samples.
    pub fn model_of_batch(&self, candidate: &Candidate, cluster: &Cluster, batch: usize) -> Result<StepModel, String> {
        let layout = candidate.layout(batch, self.precision, self.algorithm);
        let counted = self.counted(candidate, layout.micro_batch)?;
        counted.compose(&layout, cluster, &self.schedules).map_err(|refusal| refusal.message)
    }
}

impl LayoutModels for JobModels<'_> {
    fn model(&self, candidate: &Candidate, cluster: &Cluster) -> Result<StepModel, String> {
        self.model_of_batch(candidate, cluster, self.job.batch)
    }

    fn prepare(&self, candidates: &[Candidate]) {
        let mut seen = BTreeSet::new();
        let differ: Vec<&Candidate> = candidates.iter().filter(|one| seen.insert(graph_key(one))).collect();
        in_parallel(&differ, |candidate| _ = self.anatomies(candidate));
    }

    fn memory(&self, candidate: &Candidate, cluster: &Cluster) -> Result<DeviceMemory, String> {
        let layout = self.layout(candidate);
        let counted = self.counted(candidate, layout.micro_batch)?;
        counted.memory(&layout, cluster, &self.schedules).map_err(|refusal| refusal.message)
    }

    fn fitted(&self, candidate: &Candidate, cluster: &Cluster, memory: f64) -> Option<Candidate> {
        let layout = self.layout(candidate);
        let all = self.counted_alike(candidate, layout.micro_batch).ok()?;
        let what = fit_layers(all.each_ref().map(|one| &**one), &layout, cluster, &self.schedules, memory)?;
        if what.windows(2).all(|pair| pair[0] == pair[1]) {
            return None;
        }
        let layers = all[0].anatomy.layers.iter().cloned().zip(what).collect();
        let fitted = Candidate { layers: Some(Arc::new(LayerChoices { layers })), ..candidate.clone() };
        // Stages are cut by what their layers cost, which what is kept may change a little.
        let fits = self.memory(&fitted, cluster).is_ok_and(|own| own.total() <= memory);
        fits.then_some(fitted)
    }

    fn least_seconds(&self, candidate: &Candidate, cluster: &Cluster) -> f64 {
        let layout = self.layout(candidate);
        self.counted(candidate, layout.micro_batch).map_or(0.0, |counted| counted.least_seconds(&layout, cluster))
    }

    fn times(&self, model: &StepModel) -> Option<StepTimes> {
        model.times_with(&self.schedules).ok()
    }

    fn accepts(&self, candidate: &Candidate) -> Result<(), String> {
        let Candidate { tensor, tokens, sequence, slices, pipeline, chunks, schedule, .. } = *candidate;
        // Strategies that do not go together are told apart quickly; a split model is built once.
        self.parallel(&candidate.assignments()).map_err(|error| error.to_string())?;
        let key = (tensor, tokens, sequence, slices, pipeline, chunks, schedule);
        if let Some(known) = kolo_base::lock(&self.splits).get(&key) {
            return known.clone();
        }
        let made = self.check_split(candidate).map_err(|error| error.to_string());
        kolo_base::lock(&self.splits).insert(key, made.clone());
        made
    }
}
