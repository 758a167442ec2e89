//! Runs steps of a job. Its whole state is the store and the number of the next step, so a run can be stopped and taken up
//! again anywhere.

mod evaluation;

pub use evaluation::{Evaluation, count_beside, evaluation_bytes, metric_names};

use crate::assemble::Worker;
use crate::checkpoint::Gate;
use crate::copies::Copies;
use crate::error::Error;
use crate::held::HeldBatch;
use crate::interrupt::Interrupt;
use crate::job::Job;
use crate::loss_scale::{FACTOR_STATE, LOSS_SCALE, SKIPPED, SKIPPED_STATE};
use crate::machine::peak_rss_bytes;
use crate::parts::Holding;
use crate::step::IGNORED;
use crate::step_inputs::StepInputs;
use crate::supply::{Loader, Supply, TrainingSamples};
use crate::timeline::Timeline;
use crate::worker_group::WorkerGroup;
use kolo_comm::{Communicator, Reduction, Watch};
use kolo_exec::store::{Saved, Snapshot};
use kolo_exec::{Alive, Feed, Options, Session, Store};
use kolo_graph::rng::Stream;
use kolo_graph::{Graph, NodeId};
use kolo_parallel::{GrainShare, Mesh, Parallel};
use kolo_plan::MemoryPlan;
use std::collections::BTreeMap;
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
    /// Before the store, whose memory they read.
    copies: Option<Copies>,
    store: Store,
    session: Session,
    /// What the session is fed beside its samples.
    inputs: Arc<StepInputs>,
    /// What the workers agreed to hold.
    memory: MemoryPlan,
    /// Whether there is memory for a copy of what this worker saves.
    has_room_for_copy: bool,
    parallel: Parallel,
    /// Its place among those who take turns in evaluations.
    mesh: Mesh,
    /// Those who do, if there are several.
    turns: Option<Arc<Communicator>>,
    /// Those who share one copy of the model with this worker, if there are any.
    replica: Option<Arc<Communicator>>,
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
    /// Those of every step that this rank computes.
    grains: GrainShare,
    /// Where samples come from, from the first step on.
    supply: Option<Supply>,
    /// A copy of the store that is being made: the next update waits for it.
    copying: Option<Arc<Gate>>,
    timeline: Option<Arc<Timeline>>,
    /// Whether an update waits for all exchanges of its step, so that a fault leaves the state before or after it.
    settles: bool,
    /// An update was cut short: the store is of no step.
    torn: bool,
}

impl Trainer {
    /// The only worker, with these options (`options.grains` must be the job's).
    pub fn new(job: Arc<Job>, options: Options) -> Result<Self, Error> {
        Self::in_group(job, &WorkerGroup::Alone, options)
    }

    /// One of several workers, with as many lanes as threads.
    pub fn among(job: Arc<Job>, threads: usize, world: Arc<Communicator>) -> Result<Self, Error> {
        let group = WorkerGroup::Workers(world);
        let options = group.options(&job, threads)?;
        Self::in_group(job, &group, options)
    }

    /// A worker of this group. Each compiles its own part of the job's step, as the job's strategies spread it; with
    /// parameter servers, gradients go out and weights come in between a step's grains and its end. All ranks call this
    /// together, servers in [`crate::asynchronous::serve`].
    pub fn in_group(job: Arc<Job>, group: &WorkerGroup, options: Options) -> Result<Self, Error> {
        Self::assembled(Worker::assemble(&job, group, options, false)?, job, group, options)
    }

    /// As [`Trainer::in_group`], of a run that goes on when workers are lost: no update begins before all exchanges of its step
    /// are done, and where each worker has a share of the state, others keep copies of it.
    pub(crate) fn of_elastic(job: Arc<Job>, group: &WorkerGroup, options: Options) -> Result<Self, Error> {
        let worker = Worker::assemble(&job, group, options, true)?;
        let mut trainer = Self::assembled(worker, job, group, options)?;
        trainer.settles = true;
        if let Some(world) = trainer.world.as_ref().filter(|world| trainer.parallel.is_sharded(world.size())) {
            let shards_weights = trainer.parallel.shards_weights(&trainer.mesh);
            trainer.copies = Some(Copies::new(world, &trainer.store, shards_weights)?);
        }
        Ok(trainer)
    }

    fn assembled(worker: Worker, job: Arc<Job>, group: &WorkerGroup, options: Options) -> Result<Self, Error> {
        let Worker { store, session, memory, has_room_for_copy, parallel, evaluators, turns, replica, grains } = worker;
        let dropout_key = Stream::new(job.seed, "dropout").key();
        let inputs = Arc::new(StepInputs::of(session.graph()));
        let mut trainer = Self {
            job,
            copies: None,
            store,
            session,
            inputs,
            threads: options.threads,
            memory,
            has_room_for_copy,
            parallel,
            mesh: evaluators,
            turns,
            replica,
            step: 0,
            evaluators: Vec::new(),
            evaluation_batch: None,
            dropout_key,
            world: group.peers().cloned(),
            watch: None,
            interrupt: Interrupt::default(),
            grains,
            supply: None,
            copying: None,
            timeline: None,
            settles: false,
            torn: false,
        };
        if let Some(world) = group.world() {
            trainer.watched_by(world.watch());
        }
        Ok(trainer)
    }

    /// Lets `watch` see signs of life.
    pub fn watched_by(&mut self, watch: &Arc<Watch>) {
        self.watch = Some(Arc::clone(watch));
        let alive = self.alive();
        self.evaluators.iter_mut().for_each(|(_, session)| session.set_alive(alive.clone()));
        self.session.set_alive(alive);
    }

    /// Sends the state as it is to whoever keeps a copy of it, and waits until all ranks have theirs. All ranks call it
    /// together.
    pub(crate) fn secure_copies(&mut self) -> Result<(), Error> {
        if let Some(copies) = &mut self.copies {
            copies.start(self.step, &mut self.store);
        }
        self.await_copies()
    }

    /// Waits until all ranks have their copies of the state as it is. All ranks call it together.
    pub(crate) fn await_copies(&mut self) -> Result<(), Error> {
        self.copies.as_mut().map_or(Ok(()), Copies::await_all)
    }

    /// As a fault in the middle of an update leaves it: parameters and state are of no use. All ranks call it together.
    #[cfg(test)]
    pub(crate) fn tear(&mut self) {
        if let Some(copies) = &mut self.copies {
            copies.secure(self.step).unwrap();
        }
        self.torn = true;
        self.store.params_mut().fill(f32::NAN);
        self.store.states_mut().fill(0xff);
    }

    /// Bytes of the copies that it keeps.
    #[cfg(test)]
    pub(crate) fn copied_bytes(&self) -> usize {
        self.copies.as_ref().map_or(0, Copies::kept_bytes)
    }

    /// What this worker holds of the newest states: its own, unless an update was cut short, and copies.
    pub(crate) fn held(&mut self) -> Vec<Holding> {
        self.end_copy();
        let mut held = self.copies.as_mut().map_or(Vec::new(), Copies::held);
        if !self.torn {
            held.push(Holding::of(&self.store, self.step));
        }
        held
    }

    /// Goes on before this step, with the store as it is.
    pub(crate) fn go_on_before(&mut self, step: usize) {
        self.step = step;
        if let Some(watch) = &self.watch {
            // Whoever is lost before its first step was here.
            watch.set_step(step as u64);
        }
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
        self.timeline = Some(Arc::clone(timeline));
    }

    /// The other workers, if there are any.
    pub fn world(&self) -> Option<&Arc<Communicator>> {
        self.world.as_ref()
    }

    /// Bytes that this worker was planned to take.
    pub fn memory(&self) -> MemoryPlan {
        self.memory
    }

    pub(crate) fn has_room_for_copy(&self) -> bool {
        self.has_room_for_copy
    }

    /// Bytes of a device's own memory that its step and its weights take; 0 on one that computes in the memory of the host.
    pub fn device_bytes(&self) -> u64 {
        match self.job.executor.allocates_on_host() {
            true => 0,
            false => kolo_plan::device_memory(self.session.program()).map_or(0, |memory| memory.total() as u64),
        }
    }

    /// Bytes that this process has in memory now, by the kinds of [`MemoryPlan::kinds`]; empty on a device with memory of its own.
    pub fn resident_bytes(&self) -> BTreeMap<&'static str, u64> {
        let Some(session) = self.session.resident_bytes() else { return BTreeMap::new() };
        let [weights, optimizer] = self.store.memories().map(|memory| memory.resident_bytes());
        let known = weights + optimizer + session.total();
        let other = (peak_rss_bytes().unwrap_or(0) as usize).saturating_sub(known);
        let kinds = [
            ("weights", weights),
            ("gradients", session.gradients),
            ("optimizer", optimizer),
            ("activations", session.activations),
            ("scratch", session.scratch),
            ("other", other),
        ];
        kinds.into_iter().map(|(kind, bytes)| (kind, bytes as u64)).collect()
    }

    pub fn job(&self) -> &Arc<Job> {
        &self.job
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    pub fn store_mut(&mut self) -> &mut Store {
        self.end_copy();
        &mut self.store
    }

    /// Whether other workers have parts of the model that this one lacks.
    pub fn shares_model(&self) -> bool {
        self.sharers().is_some()
    }

    /// The digest of all weights. Workers that share the model call it together.
    pub fn digest(&self) -> Result<String, Error> {
        let shards = self.parallel.splits_model() || self.parallel.shards_weights(&self.mesh);
        let shared = self.world.as_deref().filter(|_| shards);
        crate::weights::digest(&self.store, shared)
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

    pub fn resume(&mut self, state: &TrainerState) -> Result<(), Error> {
        self.resume_from(state.step, &state.store.entries)
    }

    /// What this worker keeps, by entry. With parameter servers, moments are at the servers ([`crate::asynchronous::Links`]).
    pub fn entries(&self) -> Vec<Saved> {
        self.store.save(None)
    }

    /// Goes on before `step` from what was saved, by whatever group. Nothing changes if a tensor is missing.
    pub fn resume_from(&mut self, step: usize, saved: &[Saved]) -> Result<(), Error> {
        self.end_copy();
        self.store.load(None, saved)?;
        self.step = step;
        Ok(())
    }

    /// The store is being copied: it must not change before the gate opens.
    pub(crate) fn copied_through(&mut self, gate: Arc<Gate>) {
        self.copying = Some(gate);
    }

    fn end_copy(&mut self) {
        if let Some(gate) = self.copying.take() {
            gate.pass();
        }
    }

    /// Goes on before `step` with what the store was filled with.
    pub(crate) fn go_on_at(&mut self, step: usize) {
        self.step = step;
    }

    /// One step on the job's own data; its loss. Whoever trains alone and is interrupted while it waits for samples ends with
    /// [`Error::Interrupted`], before the step.
    pub fn step(&mut self) -> Result<f32, Error> {
        self.step_through(|_, _, _| Ok(()))
    }

    /// One step on the job's own data, with `between` after the gradients and before the update.
    pub fn step_through(
        &mut self,
        between: impl FnOnce(usize, &mut Session, &mut Store) -> Result<(), Error>,
    ) -> Result<f32, Error> {
        let (step, grains) = (self.step, self.grains);
        self.begin_step();
        // Out of the way of the session that it feeds.
        let mut supply = self.supply.take().unwrap_or_else(|| {
            Supply::of_training(&self.job, grains, self.session.options().lanes).traced_by(self.timeline.as_ref())
        });
        // Workers that are in step with others agree on their end between steps.
        let stop = || step > 0 && self.watch.is_none() && self.interrupt.requested();
        let ready = supply.begin(step, self.watch.as_deref(), &stop).map_err(|error| error.when(|| self.unharmed()));
        let outcome = ready.and_then(|()| self.run_step(|local, _, feed| supply.feed(step, local, feed), between));
        self.supply = Some(supply);
        outcome
    }

    /// One step on a batch that is kept: the job's next one the first time, and the same ever after.
    pub fn step_on(&mut self, held: &HeldBatch) -> Result<f32, Error> {
        let (job, grains) = (Arc::clone(&self.job), self.grains);
        let recipe = TrainingSamples { job: &*job, grains };
        self.begin_step();
        held.prepare(&recipe, &job, self.step, grains).map_err(|error| Error::from(error).when(|| self.unharmed()))?;
        self.run_step(|_, grain, feed| held.feed_once(&job, grain, feed), |_, _, _| Ok(()))
    }

    /// From here on, whatever happens here happens at this step.
    fn begin_step(&self) {
        if let Some(watch) = &self.watch {
            watch.set_step(self.step as u64);
        }
    }

    /// What a batch that cannot be read does to a run.
    fn unharmed(&self) -> String {
        let (step, epoch) = (self.step, self.epoch() + 1);
        format!("at step {step} (epoch {epoch}), and the weights were left as they were before it")
    }

    /// Nanoseconds that steps have waited for samples, or that their lanes made them, since this was last asked.
    pub fn take_data_wait(&self) -> u64 {
        self.supply.as_ref().map_or(0, Supply::take_waited)
    }

    /// How samples are made ahead.
    pub fn loader(&self) -> Loader {
        self.supply.as_ref().map_or(Loader::default(), Supply::loader)
    }

    /// What a user should know if the system refused threads for the data.
    pub fn loader_refusal(&self) -> Option<String> {
        self.supply.as_ref().and_then(Supply::refusal)
    }

    /// One step on data from elsewhere.
    pub fn step_with(&mut self, data: impl Fn(usize, &mut Feed<'_>) + Sync) -> Result<f32, Error> {
        self.run_step(|_, grain, feed| data(grain, feed), |_, _, _| Ok(()))
    }

    /// `data` writes the samples of a grain, which is known by its number among this rank's and by its number in the step.
    fn run_step(
        &mut self,
        data: impl Fn(usize, usize, &mut Feed<'_>) + Sync,
        between: impl FnOnce(usize, &mut Session, &mut Store) -> Result<(), Error>,
    ) -> Result<f32, Error> {
        let job = Arc::clone(&self.job);
        let rate = job.schedule.rate(job.optimizer.lr(), self.step) as f32;
        let (step, key) = (self.step, self.dropout_key);
        let (grains, watch, inputs) = (self.grains, self.watch.clone(), Arc::clone(&self.inputs));
        let feed = |local: usize, feed: &mut Feed<'_>| {
            let grain = grains.at(local);
            if let Some(watch) = &watch {
                watch.touch();
            }
            inputs.feed_rng(feed, key, step, grain * job.grain_batch());
            data(local, grain, feed);
        };
        let scalars = |feed: &mut Feed<'_>| inputs.feed_step(feed, rate, step + 1);
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
        self.end_copy();
        between(step, &mut self.session, &mut self.store)?;
        let loss = self.loss();
        if self.settles {
            self.session.settle()?;
        }
        if let Some(copies) = &mut self.copies {
            copies.secure(step)?;
            self.torn = true;
        }
        self.session.finish(&mut self.store)?;
        (self.step, self.torn) = (step + 1, false);
        if let Some(copies) = &mut self.copies {
            copies.start(self.step, &mut self.store);
        }
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

    /// The factor of the next step's gradients, and the steps so far that changed nothing, in f16.
    pub fn loss_scale(&self) -> Option<[f32; 2]> {
        let of_step = [self.number(LOSS_SCALE)?, self.number(SKIPPED)?];
        if of_step[0] > 0.0 {
            return Some(of_step);
        }
        // No step was made here yet: what was initialised or resumed.
        let kept = |name: &str| self.store.values(name)?.first().copied();
        Some([kept(FACTOR_STATE)?, kept(SKIPPED_STATE)?])
    }

    /// Names the first op that produced a number that is not finite. The update has not run, so the weights are whole.
    fn explain(&mut self, loss: f32, rate: f32, feed: impl Fn(usize, &mut Feed<'_>)) -> Error {
        let grains = self.session.options().grains;
        let found: Vec<NodeId> = match self.session.exchanges_in_grains() {
            // All ranks look at all grains, as they exchange tensors in them.
            true => (0..grains).filter_map(|grain| self.session.find_nonfinite(grain, &feed)).collect(),
            false => (0..grains).find_map(|grain| self.session.find_nonfinite(grain, &feed)).into_iter().collect(),
        };
        let culprit = found.first().copied();
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
                "lower the learning rate (it is {rate:e} here), set `train.clip`, or check the data of this step"
            ),
        }
    }
}

impl Drop for Trainer {
    /// A copy that is being made reads memory of this trainer's communicators.
    fn drop(&mut self) {
        self.end_copy();
    }
}

fn describe(graph: &Graph, node: NodeId) -> String {
    let node = graph.node(node);
    let scope = if node.scope.is_empty() { "the model's top".into() } else { format!("layer `{}`", node.scope) };
    format!("op `{}` in {scope}, {} pass", node.op.name(), node.stage.name())
}
