//! The loop: steps, evaluation each epoch, metrics to files and to an observer, an honest end.

use crate::asynchronous::{Links, Roles};
use crate::confusion::Confusion;
use crate::error::Error;
use crate::interrupt::{Interrupt, Phase};
use crate::job::Job;
use crate::log::{Log, LogRow};
use crate::machine::peak_rss_bytes;
use crate::record::{OutDir, Record};
use crate::report::{Communication, EpochRow, Layout, PeakBytes, Planned, Report, StepTimes};
use crate::timeline::Timeline;
use crate::together::{self, Meter};
use crate::trainer::{Evaluation, Trainer};
use kolo_comm::Communicator;
use kolo_exec::Options;
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
    pub company: Company,
    /// Where this rank's events go.
    pub timeline: Option<Arc<Timeline>>,
}

/// Who trains together.
#[derive(Clone, Debug)]
pub enum Company {
    Alone,
    /// Workers that exchange their gradients.
    Workers(Arc<Communicator>),
    /// A worker with parameter servers; the communicator has the workers first.
    Served(Arc<Communicator>, Roles),
}

impl RunOptions {
    /// Whether this rank writes and speaks for all.
    fn chief(&self) -> bool {
        match &self.company {
            Company::Alone => true,
            Company::Workers(world) | Company::Served(world, _) => world.rank() == 0,
        }
    }

    fn workers(&self) -> usize {
        match &self.company {
            Company::Alone => 1,
            Company::Workers(world) => world.size(),
            Company::Served(_, roles) => roles.workers,
        }
    }

    fn trainer(&self, job: &Arc<Job>) -> Result<Trainer, Error> {
        let mut trainer = match &self.company {
            Company::Alone => Trainer::new(Arc::clone(job), Options::for_grains(job.grains, self.threads))?,
            Company::Workers(world) => Trainer::among(Arc::clone(job), self.threads, Arc::clone(world))?,
            Company::Served(world, roles) => Trainer::served(Arc::clone(job), self.threads, roles.workers, world)?,
        };
        if let Company::Served(world, _) = &self.company {
            trainer.watched_by(world.watch());
        }
        if let Some(timeline) = &self.timeline {
            trainer.trace(timeline);
        }
        trainer.interrupted_by(&self.interrupt);
        Ok(trainer)
    }

    /// Meets the parameter servers, if there are any.
    fn links(&self, job: &Job) -> Result<Option<Links>, Error> {
        match &self.company {
            Company::Served(world, roles) => Ok(Some(Links::connect(job, world, *roles)?)),
            Company::Alone | Company::Workers(_) => Ok(None),
        }
    }
}

/// A run's links to the other ranks, and its times on them.
struct Ties {
    links: Option<Links>,
    world: Option<Arc<Communicator>>,
    meter: Meter,
}

impl Ties {
    fn new(links: Option<Links>, options: &RunOptions) -> Self {
        let mut ties = Self { links, world: None, meter: Meter::default() };
        if let Company::Workers(world) = &options.company {
            ties.meter.attach(world, options.timeline.clone());
            ties.world = Some(Arc::clone(world));
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
        let exposed_ns = exchange_ns + trainer.session().take_waited();
        self.meter.step(start.elapsed().as_secs_f64() * 1e3, exposed_ns);
        Ok(loss)
    }

    /// After the last step: the weights as all workers left them.
    fn last_weights(&self, trainer: &mut Trainer) -> Result<(), Error> {
        self.links.as_ref().map_or(Ok(()), |links| links.finish(trainer.store_mut().params_mut()))
    }

    /// All ranks have the same weights; how they got on.
    fn close(&self, weights: &str) -> Result<Option<Communication>, Error> {
        let workers = self.links.as_ref().map(Links::workers).or(self.world.as_deref());
        let Some(workers) = workers else { return Ok(None) };
        together::same_weights(workers, weights)?;
        self.meter.gather(workers).map(Some)
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
        let Some(value) = evaluation.get(&stop.metric) else { return false };
        if self.best.is_none_or(|best| stop.improves(value, best)) {
            (self.best, self.since) = (Some(value), 0);
        } else {
            self.since += 1;
        }
        self.since >= stop.patience
    }
}

/// Trains a job to its end. The trainer comes back with the trained weights.
pub fn run(job: Arc<Job>, options: &RunOptions, observer: &mut dyn Observer) -> Result<(Trainer, Report), Error> {
    let links = options.links(&job)?;
    let mut trainer = options.trainer(&job)?;
    let mut ties = Ties::new(links, options);
    let (begin, mut history) = (Instant::now(), Vec::new());
    let out = options.out.as_ref().filter(|_| options.chief());
    let mut record = Record::create(out, &mut |text| observer.note(text))?;
    let mut times = Vec::with_capacity(job.total_steps.min(1 << 16));
    let mut watch = Watch { best: None, since: 0 };
    let mut last: Option<Evaluation> = None;
    let (mut loss_sum, mut loss_count, mut mean_loss) = (0.0f64, 0usize, f64::NAN);
    let (mut log, mut ended) = (Log::default(), "done");
    options.interrupt.enter(Phase::Training);
    while trainer.next_step() < job.total_steps {
        if let Some(timeline) = &options.timeline {
            timeline.begin_step(trainer.next_step())?;
        }
        let start = Instant::now();
        let loss = ties.step(&mut trainer)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        let step = trainer.next_step();
        observer.step(step, loss, times[times.len() - 1]);
        loss_sum += f64::from(loss);
        loss_count += 1;
        if let Some(row) = log.step(&job, &trainer, loss, times[times.len() - 1]) {
            observer.logged(&row);
            record.write(row.step, row.epoch, &row.values(), &mut |text| observer.note(text))?;
        }
        let mut interrupted = together::any(ties.in_step(), options.interrupt.requested())?;
        let epoch_done = step % job.steps_per_epoch == 0;
        let epoch = step.div_ceil(job.steps_per_epoch);
        let due = epoch_done && epoch % job.eval_every == 0;
        if interrupted || step == job.total_steps {
            ties.last_weights(&mut trainer)?;
        }
        if due || interrupted || step == job.total_steps {
            mean_loss = loss_sum / loss_count as f64;
            (loss_sum, loss_count) = (0.0, 0);
            // An interrupted run ends at once: its last evaluation stays the last, but it was not made here.
            let evaluates = !interrupted && (ties.links.is_none() || options.chief());
            let made =
                match evaluates.then(|| trainer.evaluate_telling(&mut |done, all| observer.evaluating(done, all))) {
                    // Workers of servers end with all others, after their next step.
                    Some(Err(Error::Interrupted)) => {
                        interrupted = ties.links.is_none() || step == job.total_steps;
                        None
                    }
                    Some(made) => made?,
                    None => None,
                };
            history.push(EpochRow::new(epoch, begin.elapsed(), mean_loss, made.as_ref()));
            observer.evaluated(step, epoch, mean_loss, made.as_ref());
            let rate = job.schedule.rate(job.optimizer.lr(), step - 1);
            let mut values = vec![("train/loss", mean_loss), ("train/lr", rate)];
            let names: Vec<(String, f64)> = made.iter().flat_map(evaluation_values).collect();
            values.extend(names.iter().map(|(name, value)| (name.as_str(), *value)));
            record.write(step, epoch, &values, &mut |text| observer.note(text))?;
            last = made.or(last);
        }
        if interrupted {
            ended = "interrupted";
            break;
        }
        if due
            && let Some(evaluation) = &last
            && watch.stale(&job, evaluation)
        {
            ended = "early stop";
            break;
        }
    }
    options.interrupt.enter(Phase::Finishing);
    let mut report = report(&trainer, options, &times, mean_loss, last.as_ref(), ended);
    report.epochs_per_s = report.epochs / begin.elapsed().as_secs_f64().max(1e-9);
    report.history = history;
    report.communication = ties.close(&report.weights)?;
    Ok((trainer, report))
}

fn evaluation_values(evaluation: &Evaluation) -> Vec<(String, f64)> {
    let metrics = evaluation.metrics.iter().map(|(name, value)| (format!("eval/{name}"), *value));
    [("eval/loss".to_string(), evaluation.loss)].into_iter().chain(metrics).collect()
}

fn report(
    trainer: &Trainer,
    options: &RunOptions,
    times: &[f64],
    loss: f64,
    evaluation: Option<&Evaluation>,
    ended: &str,
) -> Report {
    let job = trainer.job();
    let workers = options.workers();
    let step_ms = StepTimes::of(times);
    let samples_per_s = if step_ms.median > 0.0 { job.batch as f64 / step_ms.median * 1e3 } else { 0.0 };
    let mut metrics: std::collections::BTreeMap<String, f64> =
        evaluation.iter().flat_map(|e| e.metrics.iter().cloned()).collect();
    if let Some(evaluation) = evaluation {
        metrics.insert("eval_loss".into(), evaluation.loss);
    }
    Report {
        job: job.name.clone(),
        steps: trainer.next_step(),
        epochs: trainer.next_step() as f64 / job.steps_per_epoch as f64,
        loss,
        metrics,
        classification: evaluation.and_then(|evaluation| evaluation.confusion.as_ref()).map(Confusion::report),
        step_ms,
        samples_per_s,
        tokens_per_s: job.model.tokens_per_sample().map(|tokens| tokens as f64 * samples_per_s),
        weights: trainer.store().digest(),
        workers,
        layout: Layout { data: workers, tensor: 1, pipeline: 1, zero: job.parallel.zero },
        device: "cpu".into(),
        threads: options.threads,
        peak_bytes: PeakBytes { rss: peak_rss_bytes().unwrap_or(0), device: 0 },
        planned: options.planned,
        grains: job.grains,
        seed: job.seed,
        version: env!("CARGO_PKG_VERSION").into(),
        ended: ended.into(),
        epochs_per_s: 0.0,
        history: Vec::new(),
        communication: None,
        asynchronous: match &options.company {
            Company::Served(_, roles) => Some(*roles),
            _ => None,
        },
    }
}
