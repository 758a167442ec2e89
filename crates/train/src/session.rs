//! The loop: steps, evaluations, metrics to files and to an observer, an honest end.

mod elastic;

pub use elastic::{Elastic, GenerationStart, OnResume};
use kolo_base::ShownPath;

use crate::asynchronous::Links;
use crate::checkpoint::{self, CheckpointDir, Saver, TrainerRecord};
use crate::device_use::DeviceWatch;
use crate::error::Error;
use crate::interrupt::{Interrupt, RunPhase};
use crate::job::Job;
use crate::log::{Log, LogRow};
use crate::machine::peak_rss_bytes;
use crate::metrics::MEAN_LOSS;
use crate::quantiles::Quantiles;
use crate::record::{OutDir, Record};
use crate::report::{
    Communication, DataStages, DataWait, EpochRow, GenerationRow, PeakBytes, Planned, Report, StepTimes,
};
use crate::timeline::Timeline;
use crate::together::{self, Meter, Wishes};
use crate::trainer::{Evaluation, Trainer};
pub use crate::worker_group::WorkerGroup;
use kolo_comm::Communicator;
use kolo_data::LoadTimes;
use kolo_exec::store::Saved;
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Whoever watches a run.
pub trait Observer {
    fn step(&mut self, _step: usize, _loss: f32, _milliseconds: f64) {}
    /// An evaluation has come to so many of its samples.
    fn evaluating(&mut self, _done: usize, _total: usize) {}
    fn evaluated(&mut self, _step: usize, _epoch: usize, _loss: f64, _evaluation: Option<&Evaluation>) {}
    /// Every `train.log_every` steps.
    fn logged(&mut self, _row: &LogRow) {}
    /// A checkpoint is there.
    fn saved(&mut self, _path: &Path) {}
    /// The last step and the last evaluation are over.
    fn ended(&mut self) {}
    /// Something the user should know that does not end the run.
    fn note(&mut self, _text: &str) {}
}

/// Watches nothing.
#[derive(Debug)]
pub struct Silent;
impl Observer for Silent {}

/// How to run.
#[derive(Debug)]
pub struct RunOptions {
    pub threads: usize,
    /// Where metrics and event files go; nowhere if `None`.
    pub out: Option<OutDir>,
    pub interrupt: Interrupt,
    pub planned: Planned,
    pub group: WorkerGroup,
    /// Where this rank's events go.
    pub timeline: Option<Arc<Timeline>>,
    /// Where the state goes; the first rank says it for all.
    pub checkpoints: Option<CheckpointDir>,
    /// Whether the run goes on with other workers when some are lost.
    pub elastic: Option<Arc<Elastic>>,
}

impl RunOptions {
    fn trainer(&self, job: &Arc<Job>) -> Result<Trainer, Error> {
        let options = self.group.options(job, self.threads)?;
        let mut trainer = match self.elastic {
            Some(_) => Trainer::of_elastic(Arc::clone(job), &self.group, options)?,
            None => Trainer::in_group(Arc::clone(job), &self.group, options)?,
        };
        if let Some(timeline) = &self.timeline {
            trainer.trace(timeline);
        }
        trainer.interrupted_by(&self.interrupt);
        Ok(trainer)
    }

    /// Meets the parameter servers, if there are any.
    fn links(&self, job: &Job) -> Result<Option<Links>, Error> {
        let served = self.group.world().zip(self.group.roles());
        served.map(|(world, roles)| Links::connect(job, world, roles)).transpose()
    }
}

/// A run's links to the other ranks, and its times on them.
struct Ties {
    links: Option<Links>,
    world: Option<Arc<Communicator>>,
    meter: Meter,
    /// Milliseconds that each step waited for its samples.
    data_waits: Quantiles,
}

impl Ties {
    fn new(links: Option<Links>, options: &RunOptions) -> Self {
        let (world, meter) = (options.group.peers().cloned(), Meter::default());
        let ties = Self { links, world, meter, data_waits: Quantiles::default() };
        if let Some(world) = &ties.world {
            ties.meter.attach(world, options.timeline.clone());
        }
        for pair in ties.links.iter().flat_map(Links::pairs) {
            ties.meter.attach(pair, options.timeline.clone());
        }
        ties
    }

    /// Those who make every step together, and so end after the same one.
    fn in_step(&self) -> Option<&Communicator> {
        match &self.links {
            Some(links) => links.synchronous().then(|| links.workers()),
            None => self.world.as_deref(),
        }
    }

    fn step(&mut self, trainer: &mut Trainer) -> Result<f32, Error> {
        let start = Instant::now();
        let mut exchange_ns = 0;
        let loss = match &mut self.links {
            None => trainer.step()?,
            Some(links) => trainer.step_through(|step, session, store| {
                let start = Instant::now();
                let outcome = links.exchange(step, session.sums_mut(), store.params_mut());
                exchange_ns = start.elapsed().as_nanos() as u64;
                outcome
            })?,
        };
        let mut waited_ns = trainer.session().take_waited();
        if self.links.is_some() {
            waited_ns.insert(crate::asynchronous::WAITED_FOR.into(), exchange_ns);
        }
        let data_wait_ns = trainer.take_data_wait();
        self.meter.step(start.elapsed().as_secs_f64() * 1e3, &waited_ns, data_wait_ns);
        self.meter.count(trainer);
        self.data_waits.push(data_wait_ns as f64 / 1e6);
        Ok(loss)
    }

    /// All workers, without servers; `None` if there is one.
    fn workers(&self) -> Option<&Communicator> {
        self.links.as_ref().map(Links::workers).or(self.world.as_deref())
    }

    /// After the last step: the weights as all workers left them.
    fn last_weights(&self, trainer: &mut Trainer) -> Result<(), Error> {
        self.links.as_ref().map_or(Ok(()), |links| links.finish(trainer.store_mut().params_mut()))
    }

    /// All ranks have the same weights; how they got on.
    fn close(&self, weights: &str, load: LoadTimes) -> Result<Option<Communication>, Error> {
        let Some(workers) = self.workers() else { return Ok(None) };
        together::same_weights(workers, weights)?;
        self.meter.gather(workers, load).map(Some)
    }
}

/// The best value of the watched metric so far.
struct Watch {
    best: Option<f64>,
    since: usize,
}

impl Watch {
    /// Whether the run should end.
    fn stale(&mut self, job: &Job, evaluation: &Evaluation) -> bool {
        let Some(stop) = &job.early_stop else { return false };
        // The job was read with the metric's name checked.
        let Some(value) = evaluation.get(&stop.metric.name) else { return false };
        if self.best.is_none_or(|best| stop.metric.better.improves(value, best)) {
            (self.best, self.since) = (Some(value), 0);
        } else {
            self.since += 1;
        }
        self.is_over(job)
    }

    /// Whether so many evaluations in a row were no better.
    fn is_over(&self, job: &Job) -> bool {
        job.early_stop.as_ref().is_some_and(|stop| self.since >= stop.patience)
    }
}

/// Trains a job to its end. The trainer comes back with the trained weights.
pub fn run(job: Arc<Job>, options: &RunOptions, observer: &mut dyn Observer) -> Result<(Trainer, Report), Error> {
    let mut run = Run::begin(job, options, observer)?;
    let Some(elastic) = &options.elastic else {
        let report = run.complete()?;
        return Ok((run.trainer, report));
    };
    elastic.synchronise(&mut run)?;
    // What this worker has is kept for the next generation, whatever ended this one.
    let outcome = elastic.announce(&mut run).and_then(|()| run.complete());
    let trainer = elastic.keep(run, outcome.is_ok());
    Ok((trainer, outcome?))
}

/// Why a run ended that a signal asked to.
pub const INTERRUPTED: &str = "interrupted";
/// Why runs end.
const ENDS: [&str; 3] = ["done", "early stop", INTERRUPTED];

/// Goes on from the newest checkpoint, if there is one. All workers call it together.
fn resume(
    job: &Arc<Job>,
    dir: &CheckpointDir,
    ties: &Ties,
    trainer: &mut Trainer,
    observer: &mut dyn Observer,
) -> Result<Option<TrainerRecord>, Error> {
    let Some(resumed) = checkpoint::newest(job, dir, ties.workers())? else {
        observer.note("note: there is no checkpoint to resume from; the run starts from the beginning");
        return Ok(None);
    };
    resumed.fill(trainer.store_mut())?;
    if let Some(links) = ties.links.as_ref().filter(|links| links.workers().rank() == 0) {
        links.restore(&resumed.all()?)?;
    }
    // Nobody steps before all have what they need: some may share memory.
    together::any(ties.workers(), false)?;
    trainer.go_on_at(resumed.record.step);
    resumed.notes.iter().for_each(|note| observer.note(note));
    observer.note(&format!("resuming after step {} from {}", resumed.record.step, resumed.checkpoint.dir().shown()));
    Ok(Some(resumed.record))
}

/// Takes the first weights from where the job says. All workers call it together.
fn start_from(job: &Job, ties: &Ties, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<(), Error> {
    if job.start.from.is_none() {
        return Ok(());
    }
    let names = job.tensor_names()?;
    let notes = job.start.fill(trainer.store_mut(), &names, &job.settings)?;
    notes.iter().for_each(|note| observer.note(note));
    if let Some(links) = ties.links.as_ref().filter(|links| links.workers().rank() == 0) {
        links.start_from(&trainer.entries())?;
    }
    together::any(ties.workers(), false).map(|_| ())
}

/// A run on its way.
struct Run<'r> {
    job: Arc<Job>,
    options: &'r RunOptions,
    observer: &'r mut dyn Observer,
    trainer: Trainer,
    ties: Ties,
    record: Record,
    /// Of a run that goes on from an earlier generation, the files are there.
    begins_record: bool,
    begin: Instant,
    /// Of the epoch under way, as far as this process knows it.
    epoch_began: Instant,
    /// What the run took before, in other processes.
    seconds: f64,
    /// Steps that were made there.
    first_step: usize,
    /// Milliseconds of every step.
    times: Quantiles,
    log: Log,
    watch: Watch,
    /// The loss since the last row of the history.
    loss_sum: f64,
    loss_count: usize,
    mean_loss: f64,
    last: Option<Evaluation>,
    /// The step after which it was made.
    evaluated_after: usize,
    history: Vec<EpochRow>,
    saver: Option<Saver>,
    /// Whether a state that cannot be saved fails the run.
    must_save: bool,
    /// The best value of `checkpoint.best`.
    best: Option<f64>,
    /// A save was due while an earlier one was still being written.
    owed: bool,
    /// Where an interrupted run stood before its last row.
    before: Option<TrainerRecord>,
    /// What was agreed after the last step, if it is still to be done.
    wishes: Option<Wishes>,
    /// The last step is made, but not what follows it.
    pending: bool,
    ended: Option<&'static str>,
    /// The last rows of the metrics, for another rank that may have to write them.
    rows: elastic::Progress,
    /// Where an elastic run stood before its last steps.
    marks: VecDeque<elastic::Mark>,
    generations: Vec<GenerationRow>,
    /// Of a device that tells of itself.
    device: Option<DeviceWatch>,
}

impl<'r> Run<'r> {
    fn begin(job: Arc<Job>, options: &'r RunOptions, observer: &'r mut dyn Observer) -> Result<Self, Error> {
        let links = options.links(&job)?;
        let mut trainer = options.trainer(&job)?;
        let ties = Ties::new(links, options);
        let dir = CheckpointDir::of_first(options.checkpoints.as_ref(), ties.workers())?;
        // A later generation has its state from the one before, if that came to have one.
        let first = match &options.elastic {
            Some(elastic) => !elastic.any_state(ties.workers())?,
            None => true,
        };
        if options.group.is_rank_zero() {
            options.out.as_ref().map_or(Ok(()), OutDir::hold)?;
        }
        let resumed = match dir.as_ref().filter(|dir| dir.resume && first) {
            Some(dir) => resume(&job, dir, &ties, &mut trainer, observer)?,
            None => None,
        };
        if resumed.is_none() && first {
            start_from(&job, &ties, &mut trainer, observer)?;
        }
        let mut saver = match &dir {
            Some(dir) => Saver::of_run(&job, dir, ties.links.as_ref(), ties.world.as_ref(), &trainer, !first)?,
            None => None,
        };
        let begin = Instant::now();
        let out = options.out.as_ref().filter(|_| options.group.is_rank_zero() && first);
        let from = resumed.as_ref().map(|record| (record.step, record.pending));
        // With the evaluation that is still to be made, it is another state.
        if let Some((saver, (step, _))) = saver.as_mut().zip(from.filter(|(_, pending)| !pending)) {
            saver.has(step);
        }
        let job_text = dir.as_ref().map_or("", |dir| &dir.job_text);
        let record = Record::create(out, job_text, from, &mut |text| observer.note(text))?;
        // What an earlier run had there has gone only now.
        if let Some((saver, out)) = saver.as_mut().zip(options.out.as_ref()) {
            saver.write_into(out);
        }
        let mut run = Self {
            options,
            observer,
            trainer,
            ties,
            record,
            begins_record: first,
            begin,
            epoch_began: begin,
            seconds: 0.0,
            first_step: from.map_or(0, |(step, _)| step),
            times: Quantiles::default(),
            log: Log::default(),
            watch: Watch { best: None, since: 0 },
            loss_sum: 0.0,
            loss_count: 0,
            mean_loss: f64::NAN,
            last: None,
            evaluated_after: 0,
            history: Vec::new(),
            saver,
            must_save: dir.is_some_and(|dir| dir.required),
            best: None,
            owed: false,
            before: None,
            wishes: None,
            pending: false,
            ended: None,
            rows: elastic::Progress::default(),
            marks: VecDeque::new(),
            generations: Vec::new(),
            device: job.executor.monitor().filter(|_| options.group.is_rank_zero()).map(DeviceWatch::new),
            job,
        };
        resumed.into_iter().for_each(|record| run.restore(record));
        Ok(run)
    }

    /// Stands where a checkpoint was saved, beside its tensors.
    fn restore(&mut self, record: TrainerRecord) {
        self.log = record.log;
        self.watch = Watch { best: record.stop_best, since: record.stop_since };
        (self.loss_sum, self.loss_count) = (record.loss_sum, record.loss_count);
        self.mean_loss = record.mean_loss.unwrap_or(f64::NAN);
        (self.history, self.seconds, self.pending) = (record.history, record.seconds, record.pending);
        // What was best of another metric says nothing.
        let metric = self.job.saving.best.as_ref().map(|metric| &metric.name);
        let same = record.best_metric.is_none() || record.best_metric.as_ref() == metric;
        self.best = record.best.filter(|_| same);
    }

    fn complete(&mut self) -> Result<Report, Error> {
        self.options.interrupt.enter(RunPhase::Training);
        let ended = self.train()?;
        self.observer.ended();
        self.options.interrupt.enter(RunPhase::Finishing);
        self.finish(ended)
    }

    /// Runs steps to the end; why it came. A run that was cut off takes up what was left to do of its last step.
    fn train(&mut self) -> Result<&'static str, Error> {
        while self.ended.is_none() {
            if self.pending {
                self.ended = self.after_step()?;
                self.pending = false;
            } else if let Some(wishes) = self.wishes.take() {
                self.save(wishes)?;
            } else if self.watch.is_over(&self.job) {
                // So it was when it was saved.
                self.ended = Some(self.measure_again("early stop")?);
            } else if self.trainer.next_step() < self.job.total_steps {
                match self.step() {
                    Err(Error::Interrupted) => self.ended = Some(self.cut_off()?),
                    done => {
                        done?;
                        self.pending = true;
                    }
                }
            } else {
                self.ended = Some(self.measure_again("done")?);
            }
        }
        // What is saved here is never made again.
        self.trainer.await_copies()?;
        self.save_end()?;
        Ok(self.ended.unwrap_or("done"))
    }

    /// What follows a step: agreement, an evaluation if one is due, a save. Why the run ends, if it does.
    fn after_step(&mut self) -> Result<Option<&'static str>, Error> {
        let wishes = self.agree()?;
        if self.ends_epoch() {
            self.epoch_began = Instant::now();
        }
        // A save that is under way is worth more than a step.
        if wishes.yields && !wishes.holds_up {
            if !wishes.writing {
                self.saver.as_mut().map_or(Ok(()), Saver::commit)?;
            }
            return Err(self.yielded());
        }
        let step = self.trainer.next_step();
        let due = self.job.eval_every.is_due_after(step, self.job.steps_per_epoch);
        let last = step == self.job.total_steps;
        let before = TrainerRecord { pending: due || last, ..self.record() };
        // The last state of servers is saved before they are told that this worker is done.
        if last || wishes.stop {
            self.end_of_steps(&before)?;
        }
        if (due || last || wishes.stop) && self.take_stock(wishes.stop)? {
            self.before = Some(before);
            return Ok(Some(INTERRUPTED));
        }
        if due && self.is_stale() {
            return Ok(Some("early stop"));
        }
        self.wishes = Some(wishes);
        Ok(if last { Some("done") } else { None })
    }

    /// The run was interrupted while it waited for samples: it ends as it would have after its last step.
    fn cut_off(&mut self) -> Result<&'static str, Error> {
        self.before = Some(self.record());
        if self.loss_count > 0 {
            self.take_stock(true)?;
        }
        Ok(INTERRUPTED)
    }

    /// Whether the run should end early, by its last evaluation.
    fn is_stale(&mut self) -> bool {
        let Self { watch, job, last, .. } = self;
        last.as_ref().is_some_and(|evaluation| watch.stale(job, evaluation))
    }

    /// A run that was over when it was saved has an evaluation to make, for its report. Why it ends.
    fn measure_again(&mut self, ended: &'static str) -> Result<&'static str, Error> {
        if self.last.is_some() {
            return Ok(ended);
        }
        self.ties.last_weights(&mut self.trainer)?;
        if self.ties.links.is_none() || self.options.group.is_rank_zero() {
            match self.trainer.evaluate() {
                // What was saved stays as it is.
                Err(Error::Interrupted) => return Ok(INTERRUPTED),
                made => (self.last, self.evaluated_after) = (made?, self.trainer.next_step()),
            }
        }
        Ok(ended)
    }

    /// What all workers want after this step.
    fn agree(&self) -> Result<Wishes, Error> {
        let saver = self.saver.as_ref();
        let ended_epoch = self.ends_epoch().then(|| self.epoch_began.elapsed());
        let mine = Wishes {
            stop: self.options.interrupt.requested(),
            save: saver.is_some_and(|saver| saver.is_due(&self.job, self.trainer.next_step(), ended_epoch)),
            writing: saver.is_some_and(Saver::is_writing),
            holds_up: saver.is_some_and(Saver::holds_up),
            yields: self.asked_to_yield(),
        };
        together::agree(self.ties.in_step(), mine)
    }

    /// Whether the last step was the last of its epoch.
    fn ends_epoch(&self) -> bool {
        self.trainer.next_step().is_multiple_of(self.job.steps_per_epoch)
    }

    /// The epoch that the last step was of, counted from one.
    fn epoch(&self) -> usize {
        self.trainer.next_step().div_ceil(self.job.steps_per_epoch)
    }

    /// One step, and what is told of it.
    fn step(&mut self) -> Result<(), Error> {
        if let Some(timeline) = &self.options.timeline {
            timeline.begin_step(self.trainer.next_step())?;
        }
        let start = Instant::now();
        self.mark();
        let loss = self.ties.step(&mut self.trainer)?;
        let milliseconds = start.elapsed().as_secs_f64() * 1e3;
        self.times.push(milliseconds);
        if self.times.count() == 1
            && let Some(note) = self.trainer.loader_refusal()
        {
            self.observer.note(&note);
        }
        self.observer.step(self.trainer.next_step(), loss, milliseconds);
        self.loss_sum += f64::from(loss);
        self.loss_count += 1;
        if let Some(mut row) = self.log.step(&self.job, &self.trainer, loss, milliseconds) {
            row.device = self.device.as_ref().and_then(DeviceWatch::last);
            self.observer.logged(&row);
            self.write_row(row.step, row.epoch, &row.values())?;
        }
        Ok(())
    }

    fn write_row(&mut self, step: usize, epoch: usize, values: &[(&str, f64)]) -> Result<(), Error> {
        if self.options.elastic.is_some() {
            self.rows.note_row(step, epoch, values);
        }
        self.record.write(step, epoch, values, &mut |text| self.observer.note(text))
    }

    /// A row of the history, with an evaluation unless the run was interrupted; whether it is by now.
    fn take_stock(&mut self, mut interrupted: bool) -> Result<bool, Error> {
        let (step, epoch) = (self.trainer.next_step(), self.epoch());
        // An interrupted run ends at once: its last evaluation stays the last, but it was not made here.
        let evaluates = !interrupted && (self.ties.links.is_none() || self.options.group.is_rank_zero());
        // Workers of servers end with all others, after their next step: this evaluation is made nowhere else.
        let goes_on = self.ties.links.is_some() && step < self.job.total_steps;
        if goes_on {
            self.trainer.interrupted_by(&Interrupt::default());
        }
        let observer = &mut *self.observer;
        let evaluate = || self.trainer.evaluate_telling(&mut |done, all| observer.evaluating(done, all));
        let made = match evaluates.then(evaluate) {
            Some(Err(Error::Interrupted)) => {
                interrupted = true;
                None
            }
            Some(made) => made?,
            None => None,
        };
        if goes_on {
            self.trainer.interrupted_by(&self.options.interrupt);
        }
        // From here on nothing fails because of others.
        self.mean_loss = self.loss_sum / self.loss_count as f64;
        (self.loss_sum, self.loss_count) = (0.0, 0);
        self.history.push(EpochRow::new((epoch, step), self.elapsed_s(), self.mean_loss, made.as_ref()));
        self.observer.evaluated(step, epoch, self.mean_loss, made.as_ref());
        let rate = self.job.schedule.rate(self.job.optimizer.lr(), step - 1);
        let mut values = vec![(MEAN_LOSS, self.mean_loss), ("train/lr", rate)];
        let names: Vec<(String, f64)> = made.iter().flat_map(evaluation_values).collect();
        values.extend(names.iter().map(|(name, value)| (name.as_str(), *value)));
        // A run that goes on makes this row again, with its evaluation.
        if !interrupted || self.saver.is_none() {
            self.write_row(step, epoch, &values)?;
        }
        if made.is_some() {
            (self.last, self.evaluated_after) = (made, step);
        }
        Ok(interrupted)
    }

    /// Where the run stands, for a checkpoint.
    fn record(&self) -> TrainerRecord {
        let evaluation = self.last.as_ref();
        let mut metrics: BTreeMap<String, f64> = evaluation.iter().flat_map(|e| e.metrics.iter().cloned()).collect();
        metrics.extend(evaluation.map(|evaluation| ("loss".into(), evaluation.loss)));
        let step = self.trainer.next_step();
        TrainerRecord {
            step,
            samples: (step * self.job.batch) as u64,
            loss_sum: self.loss_sum,
            loss_count: self.loss_count,
            mean_loss: Some(self.mean_loss).filter(|loss| loss.is_finite()),
            stop_best: self.watch.best,
            stop_since: self.watch.since,
            best: self.best,
            best_metric: self.job.saving.best.as_ref().map(|metric| metric.name.clone()),
            metrics,
            evaluated_after: evaluation.map(|_| self.evaluated_after),
            seconds: self.elapsed_s(),
            history: self.history.clone(),
            log: self.log,
            pending: false,
        }
    }

    /// Since training began, in this process and those before.
    fn elapsed_s(&self) -> f64 {
        self.seconds + self.begin.elapsed().as_secs_f64()
    }

    /// Starts to save if it is time, and makes visible what all ranks have written.
    fn save(&mut self, wishes: Wishes) -> Result<(), Error> {
        let mut improved = self.improved();
        if let Some(value) = improved.filter(|_| self.options.elastic.is_some()) {
            // What could not be saved is not the best that there is.
            let is_saved = self.save_best(value)?;
            improved = improved.filter(|_| is_saved);
        }
        let Some(saver) = &mut self.saver else { return Ok(()) };
        if !wishes.writing {
            saver.nobody_writes();
        }
        // The best state is this one: it waits for the disk. Any other save may be of a later step.
        let waits = improved.is_some() || !wishes.writing;
        if waits {
            saver.commit()?;
        }
        self.owed |= wishes.save || improved.is_some();
        self.best = improved.or(self.best);
        let step = self.trainer.next_step();
        self.owed &= saver.saved_step() != Some(step);
        if self.owed && waits && step < self.job.total_steps {
            self.owed = false;
            let elsewhere = self.ties.links.as_ref().map_or(Ok(Vec::new()), Links::save)?;
            let record = self.record();
            match &mut self.saver {
                Some(saver) if saver.pauses() => {
                    saver.save_pausing(self.trainer.store(), &elsewhere, &record)?;
                }
                Some(saver) => {
                    let gate = saver.begin(self.trainer.store(), elsewhere, &record, self.options.threads);
                    self.trainer.copied_through(gate);
                }
                None => {}
            }
        }
        self.tell_saved();
        Ok(())
    }

    /// The value of the last evaluation, if it was made after this step and is the best so far. All ranks see the same.
    fn improved(&self) -> Option<f64> {
        let metric = self.job.saving.best.as_ref()?;
        let last = self.last.as_ref().filter(|_| self.evaluated_after == self.trainer.next_step());
        last.and_then(|evaluation| evaluation.get(&metric.name))
            .filter(|value| self.job.saving.improves(*value, self.best))
    }

    /// The best state of an elastic run is saved before anybody can be lost in the next step, which would take it along.
    fn save_best(&mut self, value: f64) -> Result<bool, Error> {
        if self.saver.is_none() || self.trainer.next_step() >= self.job.total_steps {
            return Ok(true);
        }
        self.trainer.await_copies()?;
        let record = TrainerRecord { best: Some(value), ..self.record() };
        let saver = self.saver.as_mut();
        saver.map_or(Ok(true), |saver| saver.save_now(self.trainer.store(), &[], &record, None))
    }

    fn tell_saved(&mut self) {
        let Some(saver) = &mut self.saver else { return };
        let outcome = saver.take_outcome();
        outcome.saved.iter().for_each(|path| self.observer.saved(path));
        outcome.failed.iter().chain(&outcome.left).for_each(|message| self.observer.note(&format!("note: {message}")));
    }

    /// Before servers go: their last state, and the weights as all workers left them.
    fn end_of_steps(&mut self, record: &TrainerRecord) -> Result<(), Error> {
        if self.ties.links.is_some() && self.saver.is_some() {
            let elsewhere = self.ties.links.as_ref().map_or(Ok(Vec::new()), Links::save)?;
            self.save_last(&elsewhere, record)?;
        }
        self.ties.last_weights(&mut self.trainer)
    }

    /// The run is over: its last state is saved, unless that was done.
    fn save_end(&mut self) -> Result<(), Error> {
        match self.ties.links {
            None => {
                let record = self.before.clone().unwrap_or_else(|| self.record());
                self.save_last(&[], &record)
            }
            Some(_) => Ok(()),
        }
    }

    fn save_last(&mut self, elsewhere: &[Saved], record: &TrainerRecord) -> Result<(), Error> {
        let weights = elsewhere.is_empty().then(|| self.trainer.digest()).transpose()?;
        let Some(saver) = &mut self.saver else { return Ok(()) };
        let is_saved = saver.save_now(self.trainer.store(), elsewhere, record, weights)?;
        let outcome = saver.take_outcome();
        outcome.saved.iter().for_each(|path| self.observer.saved(path));
        // Whether or not anybody asked for it: what was written there is gone, or among the files of another run.
        self.options.out.as_ref().map_or(Ok(()), OutDir::check)?;
        match outcome.failed.last() {
            Some(message) if self.must_save && !is_saved => {
                // Whatever else could not be written has not been told yet.
                let rows = self.record.unwritten().map_or(String::new(), |rows| format!("{rows}; "));
                Err(Error::checkpoint(&format!("{rows}{message}")))
            }
            _ => {
                let notes = outcome.failed.iter().chain(&outcome.left);
                notes.for_each(|message| self.observer.note(&format!("note: {message}")));
                Ok(())
            }
        }
    }

    fn finish(&self, ended: &str) -> Result<Report, Error> {
        let mut report = self.report(ended)?;
        let load = self.job.source.load_times().unwrap_or_default();
        report.communication = self.ties.close(&report.weights, load)?;
        report.count_skipped(self.job.source.load_times());
        report.history = self.history.clone();
        report.generations = self.generations.clone();
        Ok(report)
    }

    /// Epochs that this process has trained.
    fn epochs_here(&self) -> f64 {
        self.trainer.next_step().saturating_sub(self.first_step) as f64 / self.job.steps_per_epoch as f64
    }

    fn report(&self, ended: &str) -> Result<Report, Error> {
        let Self { job, options, trainer, .. } = self;
        let evaluation = self.last.as_ref();
        let workers = options.group.workers();
        let step_ms = StepTimes::from(&self.times);
        let samples_per_s = if step_ms.median > 0.0 { job.batch as f64 / step_ms.median * 1e3 } else { 0.0 };
        let mut metrics: BTreeMap<String, f64> = evaluation.iter().flat_map(|e| e.metrics.iter().cloned()).collect();
        metrics.extend(evaluation.map(|evaluation| ("eval_loss".into(), evaluation.loss)));
        let epochs = trainer.next_step() as f64 / job.steps_per_epoch as f64;
        Ok(Report {
            job: job.name.clone(),
            steps: trainer.next_step(),
            epochs,
            loss: self.mean_loss,
            metrics,
            classification: evaluation
                .and_then(|evaluation| evaluation.confusion.as_ref())
                .map(|confusion| confusion.report(job.source.class_names())),
            step_ms,
            data_wait_ms: DataWait::of(&self.times, &self.ties.data_waits),
            data_stages_ms: job.source.load_times().as_ref().map(DataStages::of),
            skipped: None,
            loader: trainer.loader(),
            samples_per_s,
            tokens_per_s: job.model.tokens_per_sample().map(|tokens| tokens as f64 * samples_per_s),
            weights: trainer.digest()?,
            workers,
            layout: job.parallel.layout(workers),
            device: job.executor.name().into(),
            threads: options.threads,
            device_use: self.device.as_ref().map(DeviceWatch::so_far),
            peak_bytes: PeakBytes {
                rss: peak_rss_bytes().unwrap_or(0),
                device: trainer.device_bytes(),
                kinds: trainer.resident_bytes(),
            },
            planned: options.planned.clone(),
            compared: Vec::new(),
            grains: job.grains,
            precision: job.precision.name(),
            loss_scale: trainer.loss_scale().map(|[factor, _]| factor),
            skipped_steps: trainer.loss_scale().map(|[_, skipped]| skipped as usize),
            learning_rate: job.rate,
            recompute: job.parallel.recompute().name(),
            seed: job.seed,
            version: env!("CARGO_PKG_VERSION").into(),
            ended: ended.into(),
            epochs_per_s: self.epochs_here() / self.begin.elapsed().as_secs_f64().max(1e-9),
            history: Vec::new(),
            generations: Vec::new(),
            communication: None,
            unwritten: self.record.unwritten().map(String::from),
            asynchronous: options.group.roles(),
        })
    }
}

fn evaluation_values(evaluation: &Evaluation) -> Vec<(String, f64)> {
    let metrics = evaluation.metrics.iter().map(|(name, value)| (format!("eval/{name}"), *value));
    [("eval/loss".to_string(), evaluation.loss)].into_iter().chain(metrics).collect()
}
