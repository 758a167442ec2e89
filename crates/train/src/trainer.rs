//! Runs steps of a job. Its whole state is the store and the number of the next step, so a run can be stopped and taken up
//! again anywhere.

use crate::error::Error;
use crate::job::Job;
use crate::step::{evaluation_graph, optimise, training_graph};
use kolo_data::{Column, Kind, Permutation, epoch_order};
use kolo_exec::store::Snapshot;
use kolo_exec::{Feed, Options, Session, Store};
use kolo_graph::rng::Stream;
use kolo_graph::{Graph, NodeId};
use std::sync::Arc;

/// Everything needed to go on from where a trainer stood.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerState {
    pub step: usize,
    pub store: Snapshot,
}

/// Means over the held-out samples.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    pub loss: f64,
    pub metrics: Vec<(String, f64)>,
}

impl Evaluation {
    pub fn get(&self, name: &str) -> Option<f64> {
        if name == "loss" {
            return Some(self.loss);
        }
        self.metrics.iter().find(|(key, _)| key == name).map(|(_, value)| *value)
    }
}

#[derive(Debug)]
pub struct Trainer {
    job: Arc<Job>,
    store: Store,
    session: Session,
    threads: usize,
    step: usize,
    /// Sessions by batch size; a last, smaller batch needs its own.
    evaluators: Vec<(usize, Session)>,
    dropout_key: u64,
}

/// Largest batch of an evaluation.
const EVALUATION_BATCH_MAX: usize = 256;

impl Trainer {
    /// Compiles the job's step for these options (`options.grains` must be the job's).
    pub fn new(job: Arc<Job>, options: Options) -> Result<Self, Error> {
        let graph = training_graph(&*job.model, &job.optimizer, job.clip, job.grain_batch(), job.grains)?;
        let graph = optimise(&graph);
        let store = Store::new(&graph, job.seed);
        let session = Session::new(graph, &store, options);
        let dropout_key = Stream::new(job.seed, "dropout").key();
        Ok(Self { job, store, session, threads: options.threads, step: 0, evaluators: Vec::new(), dropout_key })
    }

    pub fn job(&self) -> &Arc<Job> {
        &self.job
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    pub fn store_mut(&mut self) -> &mut Store {
        &mut self.store
    }

    pub fn session(&self) -> &Session {
        &self.session
    }

    pub fn session_mut(&mut self) -> &mut Session {
        &mut self.session
    }

    /// The number of the next step.
    pub fn next_step(&self) -> usize {
        self.step
    }

    pub fn epoch(&self) -> usize {
        self.step / self.job.steps_per_epoch
    }

    pub fn state(&self) -> TrainerState {
        TrainerState { step: self.step, store: self.store.snapshot() }
    }

    pub fn resume(&mut self, state: &TrainerState) {
        self.step = state.step;
        self.store.restore(&state.store);
    }

    /// One step on the job's own data; its loss.
    pub fn step(&mut self) -> Result<f32, Error> {
        let job = Arc::clone(&self.job);
        let order = epoch_order(job.seed, self.epoch(), job.split.train_len());
        let first = self.step % job.steps_per_epoch * job.batch;
        self.step_with(|grain, feed| feed_grain(&job, &order, first, grain, feed))
    }

    /// One step on data from elsewhere.
    pub fn step_with(&mut self, data: impl Fn(usize, &mut Feed<'_>) + Sync) -> Result<f32, Error> {
        let job = Arc::clone(&self.job);
        let rate = job.schedule.rate(job.optimizer.lr(), self.step) as f32;
        let (step, key) = (self.step, self.dropout_key);
        let feed = |grain: usize, feed: &mut Feed<'_>| {
            if let Some(words) = feed.i32("rng") {
                let sample = (grain * job.grain_batch()) as i32;
                words.copy_from_slice(&[key as i32, (key >> 32) as i32, step as i32, sample]);
            }
            data(grain, feed);
        };
        let scalars = |feed: &mut Feed<'_>| {
            for (name, value) in [("lr", rate), ("step", step as f32 + 1.0)] {
                if let Some(slot) = feed.f32(name) {
                    slot[0] = value;
                }
            }
        };
        self.session.run_grains(&mut self.store, scalars, feed);
        let loss = self.session.output("loss").map_or(f32::NAN, |loss| loss[0]);
        if !loss.is_finite() {
            return Err(self.explain(loss, rate, feed));
        }
        self.session.finish(&mut self.store);
        self.step += 1;
        Ok(loss)
    }

    /// Names the first op that produced a number that is not finite. The update has not run, so the weights are whole.
    fn explain(&mut self, loss: f32, rate: f32, feed: impl Fn(usize, &mut Feed<'_>)) -> Error {
        let culprit = (0..self.job.grains).find_map(|grain| self.session.find_nonfinite(grain, &feed));
        let graph = self.session.graph();
        let culprit = culprit.map_or("only the sum over grains".into(), |node| describe(graph, node));
        Error::NotFinite {
            loss,
            step: self.step,
            epoch: self.epoch(),
            culprit,
            hint: format!(
                "lower the learning rate (it is {rate:e} here), set `train.clip`, or look at the data of this step"
            ),
        }
    }

    /// Evaluates on the held-out samples; `None` if there are none.
    pub fn evaluate(&mut self) -> Result<Option<Evaluation>, Error> {
        let job = Arc::clone(&self.job);
        let total = job.split.held_out_len();
        if total == 0 {
            return Ok(None);
        }
        let whole = total.min(EVALUATION_BATCH_MAX);
        let mut sums: Vec<(String, f64)> = Vec::new();
        let mut start = 0;
        while start < total {
            let batch = whole.min(total - start);
            let sample = |at: usize| job.split.held_out(start + at);
            let results = self.evaluate_batch(batch, |feed| feed_samples(&job, batch, sample, feed))?;
            for (at, (name, mean)) in results.into_iter().enumerate() {
                if sums.len() <= at {
                    sums.push((name, 0.0));
                }
                sums[at].1 += f64::from(mean) * batch as f64;
            }
            start += batch;
        }
        let mut metrics: Vec<(String, f64)> = sums.into_iter().map(|(name, sum)| (name, sum / total as f64)).collect();
        let loss = metrics.remove(0).1;
        job.model.derive(loss, &mut metrics);
        Ok(Some(Evaluation { loss, metrics }))
    }

    /// Loss and metrics of one batch.
    fn evaluate_batch(
        &mut self,
        batch: usize,
        feed: impl Fn(&mut Feed<'_>) + Sync,
    ) -> Result<Vec<(String, f32)>, Error> {
        let at = self.evaluator(batch)?;
        let session = &mut self.evaluators[at].1;
        session.run(&mut self.store, |_| {}, |_, inputs| feed(inputs));
        let names: Vec<String> = session.graph().outputs.iter().map(|(name, _)| name.clone()).collect();
        let scalars = names.into_iter().filter(|name| name != "predictions");
        Ok(scalars
            .map(|name| {
                let value = session.output(&name).map_or(f32::NAN, |value| value[0]);
                (name, value)
            })
            .collect())
    }

    /// The model's predictions for inputs from elsewhere.
    pub fn predict(&mut self, batch: usize, feed: impl Fn(&mut Feed<'_>) + Sync) -> Result<Vec<f32>, Error> {
        let at = self.evaluator(batch)?;
        let session = &mut self.evaluators[at].1;
        session.run(&mut self.store, |_| {}, |_, inputs| feed(inputs));
        Ok(session.output("predictions").map(<[f32]>::to_vec).unwrap_or_default())
    }

    fn evaluator(&mut self, batch: usize) -> Result<usize, Error> {
        if let Some(at) = self.evaluators.iter().position(|(size, _)| *size == batch) {
            return Ok(at);
        }
        let graph = optimise(&evaluation_graph(&*self.job.model, batch)?);
        let session = Session::new(graph, &self.store, Options::single(self.threads));
        self.evaluators.push((batch, session));
        Ok(self.evaluators.len() - 1)
    }
}

fn describe(graph: &Graph, node: NodeId) -> String {
    let node = graph.node(node);
    let scope = if node.scope.is_empty() { "the model's top".into() } else { format!("layer `{}`", node.scope) };
    format!("op `{}` in {scope}, {} pass", node.op.name(), node.stage.name())
}

fn feed_grain(job: &Job, order: &Permutation, first: usize, grain: usize, feed: &mut Feed<'_>) {
    let batch = job.grain_batch();
    let start = first + grain * batch;
    feed_samples(job, batch, |at| job.split.train(order.at(start + at)), feed);
}

/// Writes every field of `batch` samples.
fn feed_samples(job: &Job, batch: usize, sample: impl Fn(usize) -> usize, feed: &mut Feed<'_>) {
    for (field, column) in job.fields.iter().zip(&job.columns) {
        let size = field.elements();
        match field.kind {
            Kind::Real => {
                let Some(values) = feed.f32(&field.name) else { continue };
                for at in 0..batch {
                    job.source.fill(sample(at), *column, Column::F32(&mut values[at * size..(at + 1) * size]));
                }
            }
            Kind::Index { .. } => {
                let Some(values) = feed.i32(&field.name) else { continue };
                for at in 0..batch {
                    job.source.fill(sample(at), *column, Column::I32(&mut values[at * size..(at + 1) * size]));
                }
            }
        }
    }
}
