//! Where a run stands beside its tensors.

use super::super::{ENDS, Run};
use crate::checkpoint::{Saver, TrainerRecord};
use crate::confusion::Confusion;
use crate::error::Error;
use crate::log::Log;
use crate::record::Record;
use crate::report::{EpochRow, GenerationRow};
use crate::together::Wishes;
use crate::trainer::Evaluation;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::Instant;

/// Rows of the metrics that a new first rank can write again. The one before is a step behind or ahead at most.
const ROWS: usize = 16;
/// Steps that a run can be taken back by.
const MARKS: usize = 2;

/// A row of the history: epoch and step, seconds, loss, metrics.
type HistoryRow = ([usize; 2], u64, u64, Vec<(String, u64)>);

/// Where a run stands beside its tensors: the same on all ranks after the same step. Numbers are bits, so that none changes
/// on its way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(in super::super) struct Progress {
    step: usize,
    /// The last step is made, but not what follows it: agreement and evaluation.
    pending: bool,
    ended: Option<String>,
    loss_sum: u64,
    loss_count: usize,
    mean_loss: u64,
    best: Option<u64>,
    since: usize,
    /// The best value of `checkpoint.best` that is saved.
    saved_best: Option<u64>,
    /// A save was due, or begun, and nobody knows that there is one.
    owed: bool,
    /// The last step whose state was saved, if that is over.
    saved: Option<usize>,
    /// Seconds since the run began.
    seconds: u64,
    log: [u64; 3],
    history: Vec<HistoryRow>,
    evaluated: Option<Evaluated>,
    /// Of a run that ends because it was interrupted: what to save of it.
    before: Option<TrainerRecord>,
    pub rows: VecDeque<Row>,
    pub generations: Vec<GenerationRow>,
}

/// The last evaluation, and the step after which it was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Evaluated {
    step: usize,
    loss: u64,
    metrics: Vec<(String, u64)>,
    confusion: Option<Confusion>,
}

impl Evaluated {
    fn new(step: usize, made: &Evaluation) -> Self {
        let metrics = to_bits(made.metrics.iter().map(|(name, value)| (name.as_str(), *value)));
        Self { step, loss: made.loss.to_bits(), metrics, confusion: made.confusion.clone() }
    }

    fn evaluation(&self) -> Evaluation {
        let metrics = self.metrics.iter().map(|(name, value)| (name.clone(), f64::from_bits(*value))).collect();
        Evaluation { loss: f64::from_bits(self.loss), metrics, confusion: self.confusion.clone() }
    }
}

/// A row of the metrics.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(in super::super) struct Row {
    step: usize,
    epoch: usize,
    values: Vec<(String, u64)>,
}

fn to_bits<'a>(values: impl IntoIterator<Item = (&'a str, f64)>) -> Vec<(String, u64)> {
    values.into_iter().map(|(name, value)| (name.to_string(), value.to_bits())).collect()
}

impl Progress {
    /// Remembers a row that the first rank writes.
    pub fn note_row(&mut self, step: usize, epoch: usize, values: &[(&str, f64)]) {
        self.rows.push_back(Row { step, epoch, values: to_bits(values.iter().copied()) });
        if self.rows.len() > ROWS {
            // Whoever writes rows again writes all of a step.
            let dropped = self.rows.pop_front();
            while dropped.as_ref().zip(self.rows.front()).is_some_and(|(dropped, row)| dropped.step == row.step) {
                self.rows.pop_front();
            }
        }
    }

    /// Whether it is of the state after this step.
    pub fn is_after(&self, step: usize) -> bool {
        self.step == step
    }

    /// How far it has come, for comparison.
    pub fn position(&self) -> u64 {
        2 * self.step as u64 + u64::from(!self.pending)
    }
}

/// Where a run stood before a step, as far as it does not follow from where it stands later.
#[derive(Clone, Debug)]
pub(in super::super) struct Mark {
    /// Without what grows.
    progress: Progress,
    /// Rows of the history.
    history: usize,
}

impl Mark {
    /// The progress of this mark, given one that is further.
    fn of(&self, later: &Progress) -> Progress {
        let Self { progress: Progress { step, .. }, history } = *self;
        Progress {
            history: later.history[..history.min(later.history.len())].to_vec(),
            rows: later.rows.iter().filter(|row| row.step <= step).cloned().collect(),
            generations: later.generations.clone(),
            evaluated: later.evaluated.clone().filter(|evaluated| evaluated.step <= step),
            ..self.progress.clone()
        }
    }
}

impl Run<'_> {
    /// Remembers where an elastic run stands before a step.
    pub(in super::super) fn mark(&mut self) {
        if self.options.elastic.is_some() {
            self.marks.truncate(MARKS - 1);
            self.marks.push_front(Mark { progress: self.briefly(), history: self.history.len() });
        }
    }

    /// Where the run stands, and where it stood before its last steps; the newest first.
    pub(super) fn all_progress(&self) -> Vec<Progress> {
        let now = self.progress();
        let earlier = self.marks.iter().filter(|mark| mark.progress.step < now.step).map(|mark| mark.of(&now));
        let earlier: Vec<Progress> = earlier.collect();
        [now].into_iter().chain(earlier).collect()
    }

    fn progress(&self) -> Progress {
        let row = |row: &EpochRow| {
            let metrics = to_bits(row.metrics.iter().map(|(name, value)| (name.as_str(), *value)));
            ([row.epoch, row.step], row.seconds.to_bits(), row.loss.to_bits(), metrics)
        };
        Progress {
            history: self.history.iter().map(row).collect(),
            rows: self.rows.rows.clone(),
            generations: self.generations.clone(),
            evaluated: self.last.as_ref().map(|made| Evaluated::new(self.evaluated_after, made)),
            before: self.before.clone(),
            ..self.briefly()
        }
    }

    /// Where the run stands, without what grows.
    fn briefly(&self) -> Progress {
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
            owed: self.owed || self.saver.as_ref().is_some_and(Saver::is_unpublished),
            saved: self.saver.as_ref().filter(|saver| !saver.is_unpublished()).and_then(Saver::saved_step),
            seconds: self.elapsed_s().to_bits(),
            log: self.log.to_bits(),
            ..Progress::default()
        }
    }

    pub(super) fn take_up(&mut self, progress: Progress) {
        let row = |([epoch, step], seconds, loss, metrics): &HistoryRow| EpochRow {
            epoch: *epoch,
            step: *step,
            seconds: f64::from_bits(*seconds),
            loss: f64::from_bits(*loss),
            metrics: metrics.iter().map(|(name, value)| (name.clone(), f64::from_bits(*value))).collect(),
        };
        self.pending = progress.pending;
        self.before = progress.before;
        self.ended = progress.ended.as_deref().and_then(|why| ENDS.into_iter().find(|end| *end == why));
        (self.loss_sum, self.loss_count) = (f64::from_bits(progress.loss_sum), progress.loss_count);
        self.mean_loss = f64::from_bits(progress.mean_loss);
        (self.watch.best, self.watch.since) = (progress.best.map(f64::from_bits), progress.since);
        self.last = progress.evaluated.as_ref().map(Evaluated::evaluation);
        self.evaluated_after = progress.evaluated.map_or(0, |evaluated| evaluated.step);
        self.log = Log::from_bits(progress.log);
        self.history = progress.history.iter().map(row).collect();
        self.rows = Progress { rows: progress.rows, ..Progress::default() };
        (self.best, self.owed) = (progress.saved_best.map(f64::from_bits), progress.owed);
        if let Some((saver, step)) = self.saver.as_mut().zip(progress.saved) {
            saver.was_saved(step);
        }
        // Of a worker that is new: this process begins here.
        (self.seconds, self.begin) = (f64::from_bits(progress.seconds), Instant::now());
        self.first_step = progress.step;
        // A save that was due after the last step went with the generation before.
        if !self.pending && self.ended.is_none() {
            let save = self.job.saving.is_due_after(progress.step, self.job.steps_per_epoch);
            // Whether the one before is still writing is known when all agree, after the next step: nobody waits for its disk here.
            self.wishes = Some(Wishes { save: save && progress.step > 0, writing: true, ..Wishes::default() });
        }
    }

    /// The first rank of a later generation writes on where the one before was.
    pub(super) fn reopen_record(&mut self) -> Result<(), Error> {
        let next = self.trainer.next_step() + 1;
        let first = self.rows.rows.front().map_or(next, |row| row.step.min(next));
        let mut note = |text: &str| self.observer.note(text);
        let steps = first as u64..next as u64;
        let job_text = self.options.checkpoints.as_ref().map_or("", |dir| &dir.job_text);
        let mut record = Record::reopen(self.options.out.as_ref(), job_text, (steps, self.pending), &mut note)?;
        for Row { step, epoch, values } in &self.rows.rows {
            let values: Vec<(&str, f64)> =
                values.iter().map(|(name, value)| (name.as_str(), f64::from_bits(*value))).collect();
            record.write(*step, *epoch, &values, &mut note)?;
        }
        self.record = record.after(&self.record);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_with_two_rows_is_remembered_with_both_or_not_at_all() {
        let mut progress = Progress::default();
        for step in 1..=40 {
            for name in if step % 5 == 0 { &["step/loss", "eval/loss"][..] } else { &["step/loss"] } {
                progress.note_row(step, 1, &[(name, 1.0)]);
            }
            assert!(progress.rows.len() <= ROWS && progress.rows.len() + 2 > ROWS.min(step));
            let first = progress.rows.front().unwrap().step;
            let rows = progress.rows.iter().filter(|row| row.step == first).count();
            assert_eq!(rows, 1 + usize::from(first.is_multiple_of(5)), "step {first}");
        }
    }

    #[test]
    fn a_run_is_taken_back_to_a_mark() {
        let row = |epoch: usize| ([epoch, 0], 0, 0, Vec::new());
        let mut later = Progress { step: 11, pending: true, history: vec![row(1), row(2)], ..Progress::default() };
        (9..=11).for_each(|step| later.note_row(step, 1, &[]));
        later.loss_count = 3;
        let before = Progress { step: 10, loss_count: 2, ..Progress::default() };
        let back = Mark { progress: before, history: 1 }.of(&later);
        assert_eq!((back.step, back.pending, back.loss_count, back.history.len()), (10, false, 2, 1));
        assert_eq!(back.rows.iter().map(|row| row.step).collect::<Vec<_>>(), [9, 10]);
    }
}
