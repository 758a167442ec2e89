//! The layouts that a job can have, for the search: the model of each one's step, and whether training takes it.
//!
//! What a rank computes is counted from the graph that the strategies make for it. That graph does not depend on data ranks,
//! stages or the optimizer's shards, so few graphs serve many layouts; and as it grows evenly with the samples of a micro-batch,
//! two sizes stand for all.

use crate::error::Error;
use crate::job::Job;
use crate::step::{UpdateRule, tidy, training_graph};
use crate::step_model::{anatomy_of, layout_of};
use kolo_graph::settings::{Setting, Settings};
use kolo_parallel::schedules::FAMILIES;
use kolo_parallel::{Parallel, Purpose, Recompute};
use kolo_plan::anatomy::Anatomy;
use kolo_plan::cluster::Cluster;
use kolo_plan::collective::Algorithm;
use kolo_plan::device::Precision;
use kolo_plan::search::{Candidate, LayoutModels, SearchSpace, Sequence};
use kolo_plan::step_model::StepModel;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Samples of the two micro-batches that are counted.
const SAMPLES_COUNTED: [usize; 2] = [2, 4];
/// Ranks that share a layer, and tokens, at most.
const TENSOR_MAX: usize = 64;
const TOKENS_MAX: usize = 64;
/// Samples with fewer tokens than this are not worth sharing among ranks of their own.
const TOKENS_WORTH_SHARING: usize = 4096;
const MICRO_BATCHES_MAX: usize = 1024;
/// Bytes of a weight that is updated.
const MASTER_BYTES: f64 = 4.0;

/// What of a candidate decides what a rank computes.
type GraphKey = (usize, usize, Sequence, Recompute);
/// What of a candidate decides whether the model can be split so.
type SplitKey = (usize, usize, Sequence, usize, usize, &'static str);

/// A job whose layouts are looked at.
pub struct JobModels<'j> {
    job: &'j Job,
    precision: Precision,
    algorithm: Algorithm,
    /// Whether elementwise ops are fused.
    fuses: bool,
    anatomies: Mutex<BTreeMap<GraphKey, Result<Arc<[Anatomy; 2]>, String>>>,
    splits: Mutex<BTreeMap<SplitKey, Result<(), String>>>,
}

impl std::fmt::Debug for JobModels<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobModels").field("job", &self.job.name).finish_non_exhaustive()
    }
}

impl<'j> JobModels<'j> {
    /// The layouts of a job on clusters like this one.
    pub fn new(job: &'j Job, cluster: &Cluster) -> Result<Self, Error> {
        let layout =
            layout_of(job, job.parallel.layout(1).values().product::<usize>().max(1), cluster.system.precision);
        Ok(Self {
            job,

            precision: layout.map_or_else(|_| Precision::default(), |layout| layout.precision),
            // Sums whose bits are promised go directly from every rank to every other.
            algorithm: if job.reproducible { Algorithm::Direct } else { Algorithm::Fastest },
            fuses: cluster.system.fuses,
            anatomies: Mutex::new(BTreeMap::new()),
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

    /// The job's strategies with these keys.
    fn parallel(&self, assignments: &[String], recompute: Recompute) -> Result<Parallel, Error> {
        let mut root = self.root()?;
        for assignment in assignments.iter().filter(|one| one.starts_with("parallel.")) {
            kolo_config::override_with(&mut root, assignment)?;
        }
        let parallel = Parallel::read(&root.table("parallel")?, &self.job.strategies, self.job.facts())?;
        Ok(parallel.recomputing(recompute))
    }

    /// What a rank of a candidate computes, counted on two micro-batches.
    fn anatomies(&self, candidate: &Candidate) -> Result<Arc<[Anatomy; 2]>, String> {
        let key = (candidate.tensor, candidate.tokens, candidate.sequence, candidate.recompute);
        if let Some(known) = kolo_base::lock(&self.anatomies).get(&key) {
            return known.clone();
        }
        let made = self.count(candidate).map(Arc::new).map_err(|error| error.to_string());
        kolo_base::lock(&self.anatomies).insert(key, made.clone());
        made
    }

    fn count(&self, candidate: &Candidate) -> Result<[Anatomy; 2], Error> {
        // Data ranks and stages change nothing of what is counted.
        let one = Candidate { data: 1, pipeline: 1, chunks: 1, zero: 0, schedule: "1f1b", ..*candidate };
        let parallel = self.parallel(&one.assignments(), one.recompute)?;
        let counted = |samples: usize| anatomy_of(self.job, &parallel, samples, self.fuses);
        let [few, many] = SAMPLES_COUNTED.map(counted);
        Ok([few?, many?])
    }

    /// The layout that the job itself has on so many devices.
    pub fn own(&self, devices: usize) -> Result<Candidate, Error> {
        let job = self.job;
        let sizes = job.parallel.layout(devices);
        let size = |name: &str, usual: usize| sizes.get(name).copied().unwrap_or(usual);
        let data = job.parallel.data_ranks(devices).map_err(|refusal| Error::workers(devices, refusal))?;
        let root = self.root()?;
        let parallel = root.table("parallel")?;
        let text = |key: &str| match parallel.peek(key) {
            Some(Setting::Text(text)) => Some(text.clone()),
            _ => None,
        };
        let named = text("schedule").unwrap_or_else(|| "1f1b".into());
        let Some(family) = FAMILIES.iter().find(|family| family.name == named) else {
            let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
            let hint = format!("name a family of schedules: {}", names.join(", "));
            return Err(parallel.wrong("schedule", format!("is \"{named}\", a file"), hint).into());
        };
        let sequence = match text("sequence").as_deref() {
            Some("tensor") => Sequence::Tensor,
            Some("heads") => Sequence::Heads,
            Some("context") => Sequence::Context,
            _ => Sequence::Whole,
        };
        let tokens = sequence.axis().map_or(1, |axis| size(axis, 1));
        Ok(Candidate {
            data,
            pipeline: size("pipeline", 1),
            tensor: size("tensor", 1),
            tokens,
            sequence,
            zero: size("zero", 0),
            recompute: job.parallel.recompute(),
            micro_batches: (job.grains / data).max(1),
            schedule: family.name,
            chunks: size("chunks", 1),
        })
    }

    /// All layouts on so many devices that are worth looking at.
    pub fn space(&self, devices: usize) -> SearchSpace {
        let tokens = self.job.fields.iter().map(|field| field.shape.iter().product()).max().unwrap_or(1);
        let has_tokens = self.job.settings.iter().any(|(key, _)| key == "model.context");
        let mut sequences = vec![Sequence::Whole];
        if has_tokens {
            sequences.push(Sequence::Tensor);
        }
        if has_tokens && tokens >= TOKENS_WORTH_SHARING {
            sequences.extend([Sequence::Heads, Sequence::Context]);
        }
        SearchSpace {
            devices,
            batch: self.job.batch,
            stages_max: self.layers(),
            tensor_max: TENSOR_MAX,
            tokens_max: TOKENS_MAX,
            zero_max: 3,
            sequences,
            recomputes: Recompute::ALL.to_vec(),
            schedules: FAMILIES.iter().map(|family| family.name).collect(),
            micro_batches_max: MICRO_BATCHES_MAX,
        }
    }

    /// Layers that a pipeline can be cut between.
    fn layers(&self) -> usize {
        let plain = Candidate {
            data: 1,
            pipeline: 1,
            tensor: 1,
            tokens: 1,
            sequence: Sequence::Whole,
            zero: 0,
            recompute: Recompute::None,
            micro_batches: 1,
            schedule: "1f1b",
            chunks: 1,
        };
        self.anatomies(&plain).map_or(1, |anatomies| anatomies[0].order.len().saturating_sub(2).max(1))
    }

    fn check_split(&self, candidate: &Candidate) -> Result<(), Error> {
        let parallel = self.parallel(&candidate.assignments(), candidate.recompute)?;
        let refused = |refusal| Error::workers(candidate.devices(), refusal);
        let mesh = parallel.mesh(candidate.devices(), 0).map_err(refused)?;
        parallel.order(&mesh, candidate.micro_batches).map_err(refused)?;
        let job = self.job;
        let clip = parallel.clip(job.clip, Purpose::Training);
        let rule = UpdateRule {
            optimizer: &job.optimizer,
            clip,
            frozen: &|name| job.start.is_frozen(name),
            loss_scale: job.loss_scale,
        };
        let samples = job.batch / candidate.grains();
        let graph = tidy(training_graph(&*job.model, &rule, samples, candidate.grains())?);
        parallel.split_model(graph.clone(), &graph, Purpose::Training, &mesh).map_err(refused)?;
        Ok(())
    }

    /// The model of a candidate's step with another number of samples.
    pub fn model_of_batch(&self, candidate: &Candidate, cluster: &Cluster, batch: usize) -> Result<StepModel, String> {
        let layout = candidate.layout(batch, self.precision, self.algorithm);
        let anatomies = self.anatomies(candidate)?;
        let [few, many] = &*anatomies;
        let anatomy = few.at_samples(many, layout.micro_batch);
        let anatomy = anatomy.ok_or("its micro-batches are not computed alike whatever their size")?;
        kolo_plan::compose(&anatomy, &layout, cluster).map_err(|refusal| refusal.message)
    }
}

impl LayoutModels for JobModels<'_> {
    fn model(&self, candidate: &Candidate, cluster: &Cluster) -> Result<StepModel, String> {
        self.model_of_batch(candidate, cluster, self.job.batch)
    }

    /// The mean over all stages, with the activations of one micro-batch: the rank that needs most has no less.
    fn memory_bound(&self, candidate: &Candidate, cluster: &Cluster) -> f64 {
        let Ok(anatomies) = self.anatomies(candidate) else { return 0.0 };
        let width = self.precision.bytes();
        let saved = |anatomy: &Anatomy| -> f64 {
            anatomy.order.iter().map(|unit| anatomy.units[*unit].saved.bytes_at(width)).sum()
        };
        let [few, many] = &*anatomies;
        let per_sample = (saved(many) - saved(few)) / (many.samples as f64 - few.samples as f64);
        let samples = (self.job.batch / candidate.grains().max(1)) as f64;
        let kept = (saved(few) + per_sample * (samples - few.samples as f64)).max(0.0) / candidate.chunks as f64;
        let share = |from: usize| if candidate.zero >= from { candidate.data as f64 } else { 1.0 };
        let gradient = cluster.system.gradient_bytes as f64;
        let of_parameter = few.optimizer_bytes / share(1) + gradient / share(2) + MASTER_BYTES / share(1);
        (few.parameters() * of_parameter + kept) / candidate.pipeline as f64 + cluster.system.reserved_bytes
    }

    fn accepts(&self, candidate: &Candidate) -> Result<(), String> {
        let Candidate { tensor, tokens, sequence, pipeline, chunks, schedule, .. } = *candidate;
        // Strategies that do not go together are told apart quickly; a split model is built once.
        self.parallel(&candidate.assignments(), candidate.recompute).map_err(|error| error.to_string())?;
        let key = (tensor, tokens, sequence, pipeline, chunks, schedule);
        if let Some(known) = kolo_base::lock(&self.splits).get(&key) {
            return known.clone();
        }
        let made = self.check_split(candidate).map_err(|error| error.to_string());
        kolo_base::lock(&self.splits).insert(key, made.clone());
        made
    }
}
