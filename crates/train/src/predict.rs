//! What a trained model says of samples, batch by batch.
//!
//! A [`Predictor`] is the model's forward pass without loss and targets, on a store of its own: it needs neither the job's
//! data nor what its optimizer keeps.

use crate::error::Error;
use crate::step::{optimise, prediction_inputs};
use crate::supply;
use kolo_data::prefetch::{Prefetch, PrefetchPlan, Recipe, Values};
use kolo_data::{Field, Kind, Source};
use kolo_exec::{Executor, Memory, Options, Program, Session, Store};
use kolo_graph::{Builder, Graph};
use kolo_models::{Build, Model};
use std::sync::Arc;

/// Samples, and bytes of activations, of a batch at most; but one sample at least.
const SAMPLES_MAX: usize = 256;
const ACTIVATION_BYTES_MAX: usize = 64 << 20;
/// Batches that are made ahead.
const BATCHES_AHEAD: usize = 2;

/// What the predictions of a model are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PredictionKind {
    /// Logits of so many classes, for each of so many targets of a sample.
    Classes { targets: usize, classes: usize },
    /// Numbers.
    Values { count: usize },
}

/// A model that is asked.
#[derive(Debug)]
pub struct Predictor {
    model: Arc<dyn Model>,
    executor: Arc<dyn Executor>,
    threads: usize,
    store: Store,
    /// By batch: the usual one, and a last, smaller one.
    sessions: Vec<(usize, Session)>,
    batch: usize,
    kind: PredictionKind,
    /// The model's fields that predictions follow from.
    inputs: Vec<Field>,
}

/// The forward pass of so many samples.
fn graph_of(model: &dyn Model, batch: usize) -> Result<Graph, Error> {
    let builder = Builder::new();
    let predictions = model.build(&Build { builder: &builder, batch, grains: 1, training: false }).predictions;
    builder.output("predictions", predictions);
    Ok(optimise(builder.finish()?))
}

/// By the field that the model is trained to predict.
fn kind_of(fields: &[Field], inputs: &[Field], numbers: usize) -> PredictionKind {
    let target = fields.iter().find(|field| inputs.iter().all(|input| input.name != field.name));
    match target.map(|field| (&field.kind, field.elements())) {
        Some((Kind::Index { classes }, targets)) if targets * classes == numbers => {
            PredictionKind::Classes { targets, classes: *classes }
        }
        _ => PredictionKind::Values { count: numbers },
    }
}

impl Predictor {
    /// A predictor of this model, whose parameters are all zero yet: see [`Predictor::store_mut`].
    pub fn new(model: Arc<dyn Model>, executor: &Arc<dyn Executor>, threads: usize) -> Result<Self, Error> {
        let graph = graph_of(&*model, 1)?;
        let store = Store::in_memory(&graph, Memory::new(Store::params_bytes(&graph)));
        let numbers = graph.output("predictions").map_or(0, |id| graph.ty(id).elements());
        let one = Program::new(executor, graph, Options::single(threads)).bytes().activations;
        let batch = 1 << (ACTIVATION_BYTES_MAX / one.max(1)).clamp(1, SAMPLES_MAX).ilog2();
        let (fields, names) = (model.fields(), prediction_inputs(&*model)?);
        let inputs: Vec<Field> = fields.iter().filter(|field| names.contains(&field.name)).cloned().collect();
        let kind = kind_of(&fields, &inputs, numbers);
        let executor = Arc::clone(executor);
        Ok(Self { model, executor, threads, store, sessions: Vec::new(), batch, kind, inputs })
    }

    /// The model's parameters and running averages, by the names that training gave them.
    pub fn store_mut(&mut self) -> &mut Store {
        &mut self.store
    }

    pub fn kind(&self) -> PredictionKind {
        self.kind
    }

    /// The field that the model is trained to predict.
    pub fn target(&self) -> Option<Field> {
        self.model.fields().into_iter().find(|field| self.inputs.iter().all(|input| input.name != field.name))
    }

    /// The fields of a sample that it needs.
    pub fn inputs(&self) -> &[Field] {
        &self.inputs
    }

    /// Gives the predictions for samples `0..` of a list, batch after batch: the place of the first in the list, and all
    /// their numbers; then what was true, if a `truth` is asked for. `columns` are the source's fields behind
    /// [`Predictor::inputs`], `truth` that behind [`Predictor::target`].
    pub fn run(
        &mut self,
        source: Arc<dyn Source>,
        (columns, truth): (Vec<usize>, Option<usize>),
        samples: Vec<usize>,
        loader_threads: usize,
        tell: &mut dyn FnMut(usize, &[f32], Option<Values<'_>>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        // The truth stands behind the inputs, and no graph takes it.
        let columns = columns.into_iter().chain(truth).collect();
        let (total, batch) = (samples.len(), self.batch);
        let steps = total.div_ceil(batch);
        // Several threads would not ask in order.
        let loader_threads = if source.in_order() { loader_threads.min(1) } else { loader_threads };
        let recipe = Arc::new(GivenSamples { source, columns, samples, batch });
        let plan = PrefetchPlan {
            first: 0,
            end: steps,
            grains: 1,
            samples: batch,
            batches: BATCHES_AHEAD,
            threads: loader_threads,
        };
        let mut loaders = Prefetch::start(recipe, plan, None);
        for step in 0..steps {
            loaders.take::<Error>(step, &mut |_| Ok(()))?;
            let at = self.session(batch.min(total - step * batch))?;
            let (session, fields) = (&mut self.sessions[at].1, &self.inputs);
            let feed = |_: usize, feed: &mut kolo_exec::Feed<'_>| supply::copy(fields, &loaders.grain(step, 0), feed);
            session.run(&mut self.store, |_| {}, feed)?;
            let made = loaders.grain(step, 0);
            let truth = truth.map(|_| made.values(self.inputs.len()));
            tell(step * batch, session.output("predictions").unwrap_or_default(), truth)?;
        }
        Ok(())
    }

    fn session(&mut self, batch: usize) -> Result<usize, Error> {
        if let Some(at) = self.sessions.iter().position(|(size, _)| *size == batch) {
            return Ok(at);
        }
        let program = Program::new(&self.executor, graph_of(&*self.model, batch)?, Options::single(self.threads));
        self.sessions.push((batch, Session::compile(program, &self.store, None)?));
        Ok(self.sessions.len() - 1)
    }
}

/// Samples by their numbers.
#[derive(Debug)]
struct GivenSamples {
    source: Arc<dyn Source>,
    columns: Vec<usize>,
    samples: Vec<usize>,
    batch: usize,
}

impl Recipe for GivenSamples {
    fn source_name(&self) -> &str {
        "the inputs"
    }

    fn source(&self) -> &dyn Source {
        &*self.source
    }

    fn columns(&self) -> &[usize] {
        &self.columns
    }

    fn epoch(&self, _: usize) -> Option<usize> {
        None
    }

    fn choose(&self, step: usize, _: usize, samples: &mut Vec<usize>) {
        let start = step * self.batch;
        samples.extend(&self.samples[start..(start + self.batch).min(self.samples.len())]);
    }
}

/// Probabilities of logits.
pub fn softmax(logits: &[f32]) -> Vec<f32> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shares: Vec<f32> = logits.iter().map(|logit| kolo_ops::real::Real::exp(*logit - largest)).collect();
    let total: f32 = shares.iter().sum();
    shares.iter().map(|share| share / total).collect()
}
