//! Runs steps of a job. Its whole state is the store and the number of the next step, so a run can be stopped and taken up
//! again anywhere.

mod evaluation;

pub use evaluation::{Evaluation, count_beside, evaluation_bytes, metric_names};

use crate::error::Error;
use crate::held::HeldBatch;
use crate::interrupt::Interrupt;
use crate::job::Job;
use crate::room::{self, Tenants};
use crate::step::{IGNORED, optimise, spread, training_graph};
use crate::timeline::Timeline;
use kolo_comm::{Communicator, Fault, Reduction, Watch};
use kolo_data::{Column, Kind, Permutation, epoch_order};
use kolo_exec::store::Snapshot;
use kolo_exec::{Alive, Collectives, Feed, Memory, Options, Program, Session, Store};
use kolo_graph::rng::Stream;
use kolo_graph::verify::debug_verify;
use kolo_graph::{Graph, NodeId};
use kolo_parallel::{CommLane, Mesh, NarrowLane, servers};
use kolo_plan::MemoryPlan;
use std::sync::Arc;

/// Everything needed to go on from where a trainer stood.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerState {
    pub step: usize,
    pub store: Snapshot,
}

#[derive(Debug)]
pub struct Trainer {
    job: Arc<Job>,
    store: Store,
    session: Session,
    /// What the workers agreed to hold.
    memory: MemoryPlan,
    threads: usize,
    step: usize,
    /// Sessions by batch size; a last, smaller batch needs its own.
    evaluators: Vec<(usize, Session)>,
    /// Samples of an evaluation's batch, once it is known.
    evaluation_batch: Option<usize>,
    dropout_key: u64,
    /// The other workers, if there are any.
    world: Option<Arc<Communicator>>,
    /// Who wants to know that this rank gets on.
    watch: Option<Arc<Watch>>,
    /// Who may stop an evaluation.
    interrupt: Interrupt,
    /// The first of this rank's grains.
    first_grain: usize,
}

impl Trainer {
    /// Compiles the job's step for these options (`options.grains` must be the job's).
    pub fn new(job: Arc<Job>, options: Options) -> Result<Self, Error> {
        let (program, evaluation) = count_beside(&job, options.threads, 0, 1, || {
            let graph = training_graph(&*job.model, &job.optimizer, job.clip, job.grain_batch(), job.grains)?;
            Ok(Program::cpu(optimise(graph), options))
        })?;
        let memory = MemoryPlan { evaluation, ..kolo_plan::memory(&program) };
        room::check(&memory, Tenants::alone(&memory))?;
        let store = Store::new(&program.graph, job.seed);
        let session = Session::compile(program, &store, None)?;
        Ok(Self::with_session(job, store, session, memory, None))
    }

    fn with_session(
        job: Arc<Job>,
        store: Store,
        session: Session,
        memory: MemoryPlan,
        world: Option<Arc<Communicator>>,
    ) -> Self {
        let options = session.options();
        let dropout_key = Stream::new(job.seed, "dropout").key();
        let first_grain = world.as_ref().map_or(0, |world| world.rank() * options.grains);
        let (evaluators, evaluation_batch) = (Vec::new(), None);
        let (watch, threads) = (None, options.threads);
        let watched = world.as_ref().map(|world| Arc::clone(world.watch()));
        let mut trainer = Self {
            job,
            store,
            session,
            threads,
            memory,
            step: 0,
            evaluators,
            evaluation_batch,
            dropout_key,
            world,
            watch,
            interrupt: Interrupt::default(),
            first_grain,
        };
        if let Some(watch) = watched {
            trainer.watched_by(&watch);
        }
        trainer
    }

    /// One of several workers. Each compiles the job's step for its own share of the grains, with the exchange in it.
    pub fn among(job: Arc<Job>, threads: usize, world: Arc<Communicator>) -> Result<Self, Error> {
        let options = Options::for_grains(job.grains / world.size(), threads);
        let mesh = Mesh::data(world.size(), world.rank()).expect("a rank is below the size");
        let parallel = job.parallel;
        let (program, evaluation) = count_beside(&job, threads, world.rank(), world.size(), || {
            let graph = training_graph(&*job.model, &job.optimizer, job.clip, job.grain_batch(), job.grains)?;
            Ok(Program::cpu(spread(optimise(graph), &parallel, &mesh), options))
        })?;
        let memory = MemoryPlan { evaluation, ..kolo_plan::memory(&program) };
        room::check_among(&memory, parallel.central, &world)?;
        let lane: Arc<dyn Collectives> = match parallel.narrow {
            true => Arc::new(NarrowLane::new(Arc::clone(&world))?),
            false => Arc::new(CommLane::new(Arc::clone(&world))),
        };
        let bytes = Store::params_bytes(&program.graph);
        let weights = match (parallel.zero, parallel.central) {
            (_, true) => central_memory(&world, bytes)?,
            (0, _) => Memory::new(bytes),
            _ => lane.memory(bytes)?,
        };
        let store = Store::in_memory(&program.graph, weights);
        store.initialise_where(job.seed, |entry| !(parallel.central && entry.trained && world.rank() > 0));
        world.barrier()?;
        let in_place = program.updates_params_in_place();
        let session = Session::compile(program, &store, Some(lane))?;
        if parallel.central && !in_place {
            let message =
                "central storage needs every parameter to be updated where it is, and this model reads one later";
            let hint = "write `zero = 1` instead of `central = true`";
            return Err(Error::Together(Fault::BadCall(format!("{message}\n  hint: {hint}"))));
        }
        Ok(Self::with_session(job, store, session, memory, Some(world)))
    }

    /// A worker of parameter servers: gradients go out and weights come in between a step's grains and its end. `world` has
    /// the workers first; all of its ranks call this together, servers in [`crate::asynchronous::serve`].
    pub fn served(job: Arc<Job>, threads: usize, workers: usize, world: &Communicator) -> Result<Self, Error> {
        let (options, worker) = (Options::for_grains(job.grains / workers, threads), world.rank());
        let graph = training_graph(&*job.model, &job.optimizer, None, job.grain_batch(), job.grains)?;
        let graph = servers::worker_graph(&optimise(graph));
        debug_verify(&graph, "worker_graph");
        // The first worker evaluates.
        let evaluation = if worker == 0 { evaluation_bytes(&job, threads, 0, 1)? } else { 0 };
        let program = Program::cpu(graph, options);
        let memory = MemoryPlan { evaluation, ..kolo_plan::memory(&program) };
        room::check_among(&memory, false, world)?;
        let store = Store::new(&program.graph, job.seed);
        let session = Session::compile(program, &store, None)?;
        let mut trainer = Self::with_session(job, store, session, memory, None);
        trainer.first_grain = worker * options.grains;
        Ok(trainer)
    }

    /// Lets `watch` see signs of life.
    pub fn watched_by(&mut self, watch: &Arc<Watch>) {
        self.watch = Some(Arc::clone(watch));
        let alive = self.alive();
        self.evaluators.iter_mut().for_each(|(_, session)| session.set_alive(alive.clone()));
        self.session.set_alive(alive);
    }

    /// Lets `interrupt` stop evaluations.
    pub fn interrupted_by(&mut self, interrupt: &Interrupt) {
        self.interrupt = interrupt.clone();
    }

    /// What a session tells after every op.
    fn alive(&self) -> Option<Alive> {
        let watch = self.watch.clone()?;
        Some(Arc::new(move || watch.touch()))
    }

    /// Shows every call on a timeline.
    pub fn trace(&mut self, timeline: &Arc<Timeline>) {
        timeline.trace(&mut self.session);
    }

    /// The other workers, if there are any.
    pub fn world(&self) -> Option<&Arc<Communicator>> {
        self.world.as_ref()
    }

    /// Bytes that this worker was planned to take.
    pub fn memory(&self) -> MemoryPlan {
        self.memory
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
        self.step_through(|_, _, _| Ok(()))
    }

    /// One step on the job's own data, with `between` after the gradients and before the update.
    pub fn step_through(
        &mut self,
        between: impl FnOnce(usize, &mut Session, &mut Store) -> Result<(), Error>,
    ) -> Result<f32, Error> {
        let job = Arc::clone(&self.job);
        let order = epoch_order(job.seed, self.epoch(), job.split.train_len());
        let first = self.step % job.steps_per_epoch * job.batch;
        self.run_step(|grain, feed| feed_grain(&job, &order, first, grain, feed), between)
    }

    /// One step on a batch that is kept: the job's next one the first time, and the same ever after.
    pub fn step_on(&mut self, held: &HeldBatch) -> Result<f32, Error> {
        let job = Arc::clone(&self.job);
        let order = epoch_order(job.seed, self.epoch(), job.split.train_len());
        let first = self.step % job.steps_per_epoch * job.batch;
        let data = |grain: usize, feed: &mut Feed<'_>| {
            held.feed(&job, grain, feed, |feed| feed_grain(&job, &order, first, grain, feed));
        };
        self.run_step(data, |_, _, _| Ok(()))
    }

    /// One step on data from elsewhere.
    pub fn step_with(&mut self, data: impl Fn(usize, &mut Feed<'_>) + Sync) -> Result<f32, Error> {
        self.run_step(data, |_, _, _| Ok(()))
    }

    fn run_step(
        &mut self,
        data: impl Fn(usize, &mut Feed<'_>) + Sync,
        between: impl FnOnce(usize, &mut Session, &mut Store) -> Result<(), Error>,
    ) -> Result<f32, Error> {
        let job = Arc::clone(&self.job);
        let rate = job.schedule.rate(job.optimizer.lr(), self.step) as f32;
        let (step, key) = (self.step, self.dropout_key);
        let (first, watch) = (self.first_grain, self.watch.clone());
        let feed = |local: usize, feed: &mut Feed<'_>| {
            let grain = first + local;
            if let Some(watch) = &watch {
                watch.touch();
            }
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
        if let Some(watch) = &self.watch {
            watch.set_step(step as u64);
        }
        self.session.run_grains(&mut self.store, scalars, feed)?;
        let loss = self.loss();
        if !loss.is_finite() {
            return Err(self.explain(loss, rate, feed));
        }
        if let Some(ignored) = self.number(IGNORED).filter(|ignored| *ignored > 0.0) {
            return Err(Error::Ignored { targets: ignored as usize, step, grains: job.grains });
        }
        between(step, &mut self.session, &mut self.store)?;
        let loss = self.loss();
        self.session.finish(&mut self.store)?;
        self.step += 1;
        Ok(loss)
    }

    fn number(&self, output: &str) -> Option<f32> {
        self.session.output(output).map(|values| values[0])
    }

    /// The loss of the step whose grains have run. Over a batch in which no target counts it is 0.
    fn loss(&self) -> f32 {
        let loss = self.number("loss").unwrap_or(f32::NAN);
        self.number("counted").map_or(loss, |counted| loss / counted.max(1.0))
    }

    /// The norm of the last step's whole gradient, if it was measured.
    pub fn gradient_norm(&self) -> Option<f32> {
        self.number("grad_norm")
    }

    /// Names the first op that produced a number that is not finite. The update has not run, so the weights are whole.
    fn explain(&mut self, loss: f32, rate: f32, feed: impl Fn(usize, &mut Feed<'_>)) -> Error {
        let grains = self.session.options().grains;
        let culprit = (0..grains).find_map(|grain| self.session.find_nonfinite(grain, &feed));
        if let Some(world) = &self.world {
            // The first rank that has the culprit speaks; if none has, the first.
            let mut reporter = [if culprit.is_some() { world.rank() as i64 } else { i64::MAX }];
            if let Err(fault) = world.all_reduce(&mut reporter, Reduction::Min) {
                return fault.into();
            }
            let rank = if reporter[0] == i64::MAX { 0 } else { reporter[0] as usize };
            if rank != world.rank() {
                return Error::ReportedElsewhere { step: self.step, rank };
            }
        }
        let graph = self.session.graph();
        let culprit = culprit.map_or("only the sum over grains".into(), |node| describe(graph, node));
        Error::NotFinite {
            loss,
            step: self.step,
            epoch: self.epoch() + 1,
            culprit,
            hint: format!(
                "lower the learning rate (it is {rate:e} here), set `train.clip`, or look at the data of this step"
            ),
        }
    }
}

/// The parameters of all ranks of a host in the memory of the first.
fn central_memory(world: &Communicator, bytes: usize) -> Result<Memory, Error> {
    let shared = world.allocate_at_first(bytes)?;
    let Some(first) = shared.peer(0, 0) else {
        return Err(Error::Together(Fault::BadCall(format!(
            "central storage needs all workers on one host, but they talk over {}\n  hint: write `zero = 1` instead of `central = true`",
            world.transport()
        ))));
    };
    // SAFETY: a zeroed, page-aligned mapping of at least `bytes` bytes that lives as long as its keeper.
    Ok(unsafe { Memory::kept(first, shared.bytes(), Box::new(shared)) })
}

fn describe(graph: &Graph, node: NodeId) -> String {
    let node = graph.node(node);
    let scope = if node.scope.is_empty() { "the model's top".into() } else { format!("layer `{}`", node.scope) };
    format!("op `{}` in {scope}, {} pass", node.op.name(), node.stage.name())
}

pub(crate) fn feed_grain(job: &Job, order: &Permutation, first: usize, grain: usize, feed: &mut Feed<'_>) {
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
