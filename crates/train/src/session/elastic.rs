//! Runs whose workers come and go: what a worker carries from one generation to the next, and how a generation finds the
//! state that it goes on from.
//!
//! A fault leaves every rank's state before or after the step in flight, never in between ([`Trainer::settle_before_updates`]).
//! The next generation goes on from the newest state of any of its ranks; whoever is behind, or new, gets it from that rank's
//! memory. At most the step in flight is computed again, and to the same bits, since a step depends on its number alone.

use super::{Run, RunOptions};
use crate::error::Error;
use crate::log::Log;
use crate::record::Record;
use crate::report::{EpochRow, GenerationRow};
use crate::trainer::{Evaluation, Trainer};
use kolo_base::lock;
use kolo_comm::{Communicator, Fault};
use kolo_exec::store::Saved;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Rows of the metrics that a new first rank can write again. The one before is a step behind or ahead at most.
const ROWS: usize = 16;

/// Called by the first rank of a generation when all have the state to go on with this step.
pub type OnResume = Box<dyn Fn(usize) + Send + Sync>;

/// A worker of an elastic run, over all generations it is part of.
pub struct Elastic {
    carried: Mutex<Option<Carried>>,
    generation: Mutex<GenerationStart>,
    on_resume: Mutex<OnResume>,
}

/// A generation as its worker learns of it.
#[derive(Clone, Debug)]
pub struct GenerationStart {
    pub generation: u32,
    /// Who was lost before it, and why.
    pub lost: Vec<String>,
    /// When this worker left the generation before.
    pub since: Instant,
    pub agreement_ms: u64,
}

impl Default for GenerationStart {
    fn default() -> Self {
        Self { generation: 0, lost: Vec::new(), since: Instant::now(), agreement_ms: 0 }
    }
}

/// What a worker keeps when a generation is over.
#[derive(Debug)]
struct Carried {
    progress: Progress,
    entries: Vec<Saved>,
    last: Option<Evaluation>,
    times: Vec<f64>,
    data_waits: Vec<f64>,
    begin: Instant,
}

/// Where a run stands beside its tensors: the same on all ranks after the same step. Numbers are bits, so that none changes
/// on its way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Progress {
    step: usize,
    /// The last step is made, but not what follows it: agreement and evaluation.
    pending: bool,
    ended: Option<String>,
    loss_sum: u64,
    loss_count: usize,
    mean_loss: u64,
    best: Option<u64>,
    since: usize,
    /// The best value of `checkpoint.best`.
    saved_best: Option<u64>,
    log: [u64; 3],
    history: Vec<(usize, u64, u64, Vec<(String, u64)>)>,
    pub rows: VecDeque<Row>,
    pub generations: Vec<GenerationRow>,
}

/// A row of the metrics.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Row {
    step: usize,
    epoch: usize,
    values: Vec<(String, u64)>,
}

impl std::fmt::Debug for Elastic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Elastic in {:?}", lock(&self.generation))
    }
}

fn to_bits<'a>(values: impl IntoIterator<Item = (&'a str, f64)>) -> Vec<(String, u64)> {
    values.into_iter().map(|(name, value)| (name.to_string(), value.to_bits())).collect()
}

impl Progress {
    /// Remembers a row that the first rank writes.
    pub fn note_row(&mut self, step: usize, epoch: usize, values: &[(&str, f64)]) {
        self.rows.push_back(Row { step, epoch, values: to_bits(values.iter().copied()) });
        if self.rows.len() > ROWS {
            self.rows.pop_front();
        }
    }

    /// How far it has come, for comparison.
    fn position(&self) -> u64 {
        2 * self.step as u64 + u64::from(!self.pending)
    }
}

impl Elastic {
    pub fn new(on_resume: OnResume) -> Arc<Self> {
        Arc::new(Self { carried: Mutex::default(), generation: Mutex::default(), on_resume: Mutex::new(on_resume) })
    }

    /// How far the state of this worker has come, if it has any.
    pub fn position(&self) -> Option<u64> {
        lock(&self.carried).as_ref().map(|carried| carried.progress.position())
    }

    /// The next generation.
    pub fn enter(&self, start: GenerationStart) {
        *lock(&self.generation) = start;
    }

    pub(super) fn generation(&self) -> u32 {
        lock(&self.generation).generation
    }

    /// The generation is over although this worker has finished: its state may be needed again.
    pub fn keep_finished(&self, trainer: &Trainer) {
        if let Some(carried) = &mut *lock(&self.carried) {
            carried.entries = trainer.entries();
        }
    }

    /// What is left of a run whose generation is over.
    pub(super) fn keep(&self, run: Run<'_>, finished: bool) -> Trainer {
        let progress = run.progress();
        let entries = if finished { Vec::new() } else { run.trainer.entries() };
        let Run { last, times, begin, ties, trainer, .. } = run;
        let data_waits = ties.data_waits;
        *lock(&self.carried) = Some(Carried { progress, entries, last, times, data_waits, begin });
        trainer
    }

    /// Brings all ranks of a generation to the newest state. All call it together; what this worker carried stays until all
    /// have it.
    pub(super) fn synchronise(&self, run: &mut Run<'_>) -> Result<(), Error> {
        let Some(world) = run.ties.world.clone() else { return Ok(()) };
        let mut carried = lock(&self.carried);
        let mine = carried.as_ref().map_or(0, |carried| 1 + carried.progress.position() as i64);
        let mut all = vec![0i64; world.size()];
        world.all_gather(&[mine], &mut all)?;
        let newest = all.iter().copied().max().unwrap_or(0);
        if newest > 0 {
            let source = all.iter().position(|position| *position == newest).unwrap_or(0);
            if let Some(carried) = carried.as_ref().filter(|_| mine == newest) {
                run.trainer.store_mut().load(None, &carried.entries)?;
            }
            let shared = all.iter().any(|position| *position != newest);
            let own = carried.as_ref().filter(|_| mine == newest).map(|carried| carried.progress.clone());
            let progress = if shared { hand_on(run, &world, source, own)? } else { own.unwrap_or_default() };
            run.trainer.go_on_before(progress.step);
            run.take_up(progress);
        }
        // Nobody forgets what it has before all have it.
        world.barrier()?;
        if let Some(Carried { last, times, data_waits, begin, .. }) = carried.take() {
            (run.last, run.times, run.ties.data_waits, run.begin) = (last, times, data_waits, begin);
        }
        Ok(())
    }

    /// All have the state: the generation goes on. All call it together.
    pub(super) fn announce(&self, run: &mut Run<'_>) -> Result<(), Error> {
        let Some(world) = run.ties.world.clone() else { return Ok(()) };
        let GenerationStart { generation, lost, since, agreement_ms } = lock(&self.generation).clone();
        let step = run.trainer.next_step();
        let recovery_ms = if generation > 0 { since.elapsed().as_millis() as u64 } else { 0 };
        let workers = world.size();
        let mut row = GenerationRow { generation, step, workers, lost, recovery_ms, agreement_ms };
        // As the first rank saw it.
        let mut times = [row.recovery_ms, row.agreement_ms].map(|ms| ms as i64);
        world.broadcast(&mut times, 0)?;
        [row.recovery_ms, row.agreement_ms] = times.map(|ms| ms as u64);
        run.generations.push(row);
        if world.rank() == 0 {
            if generation > 0 {
                run.reopen_record()?;
            }
            lock(&self.on_resume)(step);
        }
        Ok(())
    }
}

/// The source's tensors and progress, to all.
fn hand_on(run: &mut Run<'_>, world: &Communicator, source: usize, own: Option<Progress>) -> Result<Progress, Error> {
    let failed = |error: serde_json::Error| Error::Together(Fault::BadCall(format!("the state of the run: {error}")));
    let mut bytes = match own {
        Some(progress) if world.rank() == source => serde_json::to_vec(&progress).map_err(failed)?,
        _ => Vec::new(),
    };
    let mut length = [bytes.len() as i64];
    world.broadcast(&mut length, source)?;
    bytes.resize(length[0] as usize, 0);
    world.broadcast(&mut bytes, source)?;
    let store = run.trainer.store_mut();
    world.broadcast(store.params_mut(), source)?;
    // An optimizer may have no state at all.
    if !store.states_mut().is_empty() {
        world.broadcast(store.states_mut(), source)?;
    }
    serde_json::from_slice(&bytes).map_err(failed)
}

impl RunOptions {
    /// How the files of a run begin: those of a later generation are there.
    pub(super) fn begins_record(&self) -> bool {
        self.elastic.as_ref().is_none_or(|elastic| elastic.generation() == 0)
    }
}

impl Run<'_> {
    /// Whether this rank knows of somebody who waits to be taken in.
    pub(super) fn asked_to_yield(&self) -> bool {
        let world = self.ties.world.as_ref().filter(|_| self.options.elastic.is_some());
        world.is_some_and(|world| world.watch().asked_to_yield())
    }

    /// The step that all agreed to regroup after is done.
    pub(super) fn yielded(&self) -> Error {
        let generation = self.options.elastic.as_ref().map_or(0, |elastic| elastic.generation());
        Error::Together(Fault::Regroup { generation })
    }

    fn progress(&self) -> Progress {
        let row = |row: &EpochRow| {
            let metrics = to_bits(row.metrics.iter().map(|(name, value)| (name.as_str(), *value)));
            (row.epoch, row.seconds.to_bits(), row.loss.to_bits(), metrics)
        };
        Progress {
            step: self.trainer.next_step(),
            pending: self.pending,
            ended: self.ended.map(String::from),
            loss_sum: self.loss_sum.to_bits(),
            loss_count: self.loss_count,
            mean_loss: self.mean_loss.to_bits(),
            best: self.watch.best.map(f64::to_bits),
            since: self.watch.since,
            saved_best: self.best.map(f64::to_bits),
            log: self.log.to_bits(),
            history: self.history.iter().map(row).collect(),
            rows: self.rows.rows.clone(),
            generations: self.generations.clone(),
        }
    }

    fn take_up(&mut self, progress: Progress) {
        let row = |(epoch, seconds, loss, metrics): &(usize, u64, u64, Vec<(String, u64)>)| EpochRow {
            epoch: *epoch,
            seconds: f64::from_bits(*seconds),
            loss: f64::from_bits(*loss),
            metrics: metrics.iter().map(|(name, value)| (name.clone(), f64::from_bits(*value))).collect(),
        };
        self.pending = progress.pending;
        self.ended = progress.ended.as_deref().and_then(|why| super::ENDS.into_iter().find(|end| *end == why));
        (self.loss_sum, self.loss_count) = (f64::from_bits(progress.loss_sum), progress.loss_count);
        self.mean_loss = f64::from_bits(progress.mean_loss);
        (self.watch.best, self.watch.since) = (progress.best.map(f64::from_bits), progress.since);
        self.best = progress.saved_best.map(f64::from_bits);
        self.log = Log::from_bits(progress.log);
        self.history = progress.history.iter().map(row).collect();
        self.generations = progress.generations.clone();
        self.rows = Progress { rows: progress.rows, ..Progress::default() };
    }

    /// The first rank of a later generation writes on where the one before was.
    fn reopen_record(&mut self) -> Result<(), Error> {
        let first = self.rows.rows.front().map_or(self.trainer.next_step() + 1, |row| row.step);
        let mut note = |text: &str| self.observer.note(text);
        let mut record = Record::reopen(self.options.out.as_ref(), first as u64, &mut note)?;
        for Row { step, epoch, values } in &self.rows.rows {
            let values: Vec<(&str, f64)> =
                values.iter().map(|(name, value)| (name.as_str(), f64::from_bits(*value))).collect();
            record.write(*step, *epoch, &values, &mut note)?;
        }
        self.record = record;
        Ok(())
    }
}
