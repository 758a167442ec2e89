//! Evaluation on the held-out samples, in batches of bounded memory.

use super::Trainer;
use crate::confusion::Confusion;
use crate::error::Error;
use crate::job::Job;
use crate::residuals::{self, Residuals};
use crate::step::{self, CONFUSION, IGNORED, RESIDUALS, count_name};
use crate::supply::{self, Supply};
use crate::together;
use kolo_comm::{Communicator, Fault, Reduction};
use kolo_exec::{Collectives, Feed, Options, Program, Session};
use kolo_graph::Graph;
use kolo_parallel::mesh::DATA;
use kolo_parallel::{CommLane, Mesh, Parallel, Purpose};
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;

/// Means over the held-out samples, or over those of their targets that count.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    pub loss: f64,
    pub metrics: Vec<(String, f64)>,
    /// Of a classifier.
    pub confusion: Option<Confusion>,
}

impl Evaluation {
    pub fn get(&self, name: &str) -> Option<f64> {
        if name == "loss" {
            return Some(self.loss);
        }
        self.metrics.iter().find(|(key, _)| key == name).map(|(_, value)| *value)
    }
}

/// Samples and bytes of activations of an evaluation's batch, at most; but one sample at least.
const SAMPLES_MAX: usize = 256;
const ACTIVATION_BYTES_MAX: usize = 64 << 20;
/// Batches of each worker until all bring their means together: what is held in memory does not grow with the data.
const BATCHES_PER_ROUND: usize = 64;

fn graph_of(job: &Job, parallel: &Parallel, mesh: &Mesh, batch: usize) -> Result<Graph, Error> {
    Ok(step::graph_of(job, parallel, Purpose::Evaluation { batch }, mesh)?)
}

/// Samples of an evaluation's batch. They depend on the job alone, and so do the means.
fn samples_of_batch(job: &Job) -> Result<usize, Error> {
    let graph = graph_of(job, &job.parallel, &Mesh::alone(), 1)?;
    // Of the CPU, whoever evaluates: the batch is the job's.
    let one = Program::cpu(graph, Options::single(1)).bytes().activations;
    let most = (ACTIVATION_BYTES_MAX / one.max(1)).clamp(1, SAMPLES_MAX);
    Ok(job.split.held_out_len().min(1 << most.ilog2()))
}

/// Bytes that evaluations take at one of the workers who take turns in them, beside the weights.
pub fn evaluation_bytes(job: &Job, parallel: &Parallel, threads: usize, mesh: &Mesh) -> Result<usize, Error> {
    let total = job.split.held_out_len();
    if total == 0 {
        return Ok(0);
    }
    let (rank, ranks) = (mesh.coordinate(DATA), mesh.size(DATA));
    let whole = samples_of_batch(job)?;
    // The last batch, if it is smaller, is one rank's turn; but those who have the weights in shares make all together.
    let shares = job.parallel.shards_weights(mesh);
    let rest = Some(total % whole).filter(|rest| *rest > 0 && (shares || total / whole % ranks == rank));
    let bytes = |batch: usize| {
        let graph = graph_of(job, parallel, mesh, batch)?;
        Ok(Program::new(&job.executor, graph, Options::single(threads)).bytes().total())
    };
    let sessions: Result<usize, Error> = [whole].into_iter().chain(rest).map(bytes).sum();
    Ok(sessions? + supply::buffer_bytes(job, whole))
}

/// Counts [`evaluation_bytes`] of a worker at this place, if it takes part, while `work` is done: neither needs the other, and
/// of a deep model each takes its time.
pub fn count_beside<T>(
    job: &Job,
    parallel: &Parallel,
    threads: usize,
    mesh: Option<&Mesh>,
    work: impl FnOnce() -> Result<T, Error>,
) -> Result<(T, usize), Error> {
    let count = || mesh.map_or(Ok(0), |mesh| evaluation_bytes(job, parallel, threads, mesh));
    std::thread::scope(|scope| {
        let beside = std::thread::Builder::new().spawn_scoped(scope, count);
        let done = work();
        // Where no thread is to be had, one after the other.
        let counted = match beside {
            Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Err(_) => count(),
        };
        Ok((done?, counted?))
    })
}

/// A batch that a worker evaluates.
struct Turn {
    /// Its number; `None` if this worker only helps others with theirs.
    number: Option<usize>,
    samples: usize,
}

impl Trainer {
    /// Those without whom this worker cannot run the model, if there are any.
    pub(super) fn sharers(&self) -> Option<&Arc<Communicator>> {
        match self.parallel.shards_weights(&self.mesh) {
            true => self.world.as_ref(),
            false => self.replica.as_ref(),
        }
    }

    /// What this worker does for these batches of so many samples. Where weights are in shares, all run every size of batch
    /// together, one batch each.
    fn turns_of(&self, round: Range<usize>, whole: usize) -> Vec<Turn> {
        let (rank, ranks) = self.place();
        let total = self.job.split.held_out_len();
        let samples = |number: usize| whole.min(total - number * whole);
        let own = |number: &usize| (number - round.start) % ranks == rank;
        if !self.parallel.shards_weights(&self.mesh) {
            let turn = |number: usize| Turn { number: Some(number), samples: samples(number) };
            return round.clone().filter(own).map(turn).collect();
        }
        let mut turns = Vec::new();
        for first in round.clone().step_by(ranks) {
            let together = first..round.end.min(first + ranks);
            let mut sizes: Vec<usize> = together.clone().map(samples).collect();
            sizes.dedup();
            for size in sizes {
                let number = together.clone().find(|number| own(number) && samples(*number) == size);
                turns.push(Turn { number, samples: size });
            }
        }
        turns
    }

    /// This worker's rank, and the number of workers who evaluate.
    fn place(&self) -> (usize, usize) {
        (self.mesh.coordinate(DATA), self.mesh.size(DATA))
    }

    /// Evaluates on the held-out samples; `None` if there are none. All workers call it. If one of them is interrupted, all end
    /// with [`Error::Interrupted`].
    pub fn evaluate(&mut self) -> Result<Option<Evaluation>, Error> {
        self.evaluate_telling(&mut |_, _| {})
    }

    /// As [`Trainer::evaluate`]; `tell` hears of the samples that are done, and of how many there are.
    pub fn evaluate_telling(&mut self, tell: &mut dyn FnMut(usize, usize)) -> Result<Option<Evaluation>, Error> {
        let job = Arc::clone(&self.job);
        let total = job.split.held_out_len();
        if total == 0 {
            return Ok(None);
        }
        let whole = match self.evaluation_batch {
            Some(known) => known,
            None => *self.evaluation_batch.insert(samples_of_batch(&job)?),
        };
        let names = self.metric_names(whole)?;
        let (batches, ranks) = (total.div_ceil(whole), self.place().1);
        let is_sum = self.are_sums(whole, &names)?;
        let mut totals = vec![(0.0f64, 0.0f64); names.len()];
        let mut pairs: Vec<i64> = vec![0; self.output_elements(whole, CONFUSION)?];
        let of_residuals = self.output_elements(whole, RESIDUALS)?;
        let mut residuals = Residuals::new(of_residuals / residuals::NUMBERS);
        let width = 2 * names.len() + 1 + of_residuals;
        let mut supply = Supply::of_evaluation(&job, whole, self.place());
        tell(0, total);
        for first in (0..batches).step_by(ranks * BATCHES_PER_ROUND) {
            let round = first..batches.min(first + ranks * BATCHES_PER_ROUND);
            let rows = self.evaluate_round(round, &mut supply, width, &mut pairs, tell)?;
            for (at, row) in (first..).zip(rows.chunks(width)) {
                let ignored = row[2 * names.len()];
                if batches > 1 && ignored > 0.0 {
                    let (first, end) = (at * whole, total.min((at + 1) * whole));
                    return Err(Error::IgnoredInEvaluation { targets: ignored as usize, first, end, batches });
                }
                add_row(&mut totals, row, &is_sum);
                residuals.add(whole.min(total - at * whole), &row[width - of_residuals..]);
            }
        }
        if let Some(turns) = self.turns.as_ref().filter(|_| !pairs.is_empty()) {
            turns.all_reduce(&mut pairs, Reduction::Sum)?;
        }
        // The division comes last; a mean over nothing is 0.
        let means = totals.into_iter().map(|(sum, number)| sum / number.max(1.0));
        let mut metrics: Vec<(String, f64)> = names.into_iter().zip(means).collect();
        let loss = metrics.remove(0).1;
        let confusion = Confusion::new(pairs);
        if let Some(confusion) = &confusion {
            let (precision, recall) = confusion.macro_means();
            metrics.extend([("precision".to_string(), precision), ("recall".to_string(), recall)]);
        }
        if of_residuals > 0 {
            // A metric of this name that the model has itself is the model's.
            let measured = residuals.metrics(job.source.target_scale());
            let new: Vec<_> =
                measured.into_iter().filter(|(name, _)| metrics.iter().all(|(known, _)| known != name)).collect();
            metrics.extend(new);
        }
        job.model.derive(loss, &mut metrics);
        Ok(Some(Evaluation { loss, metrics, confusion }))
    }

    /// The results of these batches, `width` numbers of each. Workers take turns; every batch is computed by one of them, and its
    /// numbers are the same whoever did it. Whoever is interrupted leaves out the rest of its turns and tells the others.
    fn evaluate_round(
        &mut self,
        round: Range<usize>,
        supply: &mut Supply,
        width: usize,
        pairs: &mut [i64],
        tell: &mut dyn FnMut(usize, usize),
    ) -> Result<Vec<f32>, Error> {
        let job = Arc::clone(&self.job);
        let total = job.split.held_out_len();
        let (whole, ranks) = (supply.samples(), self.place().1);
        let mut rows = vec![0.0f32; round.len() * width];
        for Turn { number, samples } in self.turns_of(round.clone(), whole) {
            let ready = number.map_or(Ok(()), |number| {
                supply.begin(number / ranks, self.watch.as_deref(), &|| self.interrupt.requested())
            });
            let step = self.step;
            let interrupted = match ready {
                Ok(()) => self.interrupt.requested(),
                Err(Error::Interrupted) => true,
                Err(error) => {
                    return Err(error.when(|| match step {
                        // A trained model that is evaluated alone.
                        0 => "in the evaluation".into(),
                        step => format!("in the evaluation after {step} steps"),
                    }));
                }
            };
            // Those who share the model make every batch together.
            if together::any(self.sharers().map(|sharers| &**sharers), interrupted)? {
                break;
            }
            let Some(number) = number else {
                self.evaluate_batch(samples, &mut [], |_| {})?;
                continue;
            };
            let own = number / ranks;
            let results = self.evaluate_batch(samples, pairs, |feed| supply.feed(own, 0, feed))?;
            rows[(number - round.start) * width..][..width].copy_from_slice(&results);
            if let Some(watch) = &self.watch {
                watch.touch();
            }
            tell(number * whole + samples, total);
        }
        let mut interrupted = self.interrupt.requested();
        if let Some(turns) = &self.turns {
            rows = gather_turns(turns, &rows, width)?;
            interrupted = together::any(self.world.as_deref(), interrupted)?;
        }
        if interrupted { Err(Error::Interrupted) } else { Ok(rows) }
    }

    /// Loss and metrics of one batch, each with the number that it is a sum or a mean over, and the targets ignored inside
    /// them; adds to the counts of (class, prediction).
    fn evaluate_batch(
        &mut self,
        batch: usize,
        pairs: &mut [i64],
        feed: impl Fn(&mut Feed<'_>) + Sync,
    ) -> Result<Vec<f32>, Error> {
        let names = self.metric_names(batch)?;
        let at = self.evaluator(batch)?;
        let alone = self.sharers().is_none();
        let (session, interrupt) = (&mut self.evaluators[at].1, self.interrupt.clone());
        if alone {
            session.set_stop(Some(Arc::new(move || interrupt.requested())));
        }
        let outcome = session.run(&mut self.store, |_| {}, |_, inputs| feed(inputs));
        session.set_stop(None);
        outcome?;
        let number = |name: &str| session.output(name).map(|value| value[0]);
        let row = |name: &String| {
            let value = number(name).unwrap_or(f32::NAN);
            [value, number(&count_name(name)).unwrap_or(batch as f32)]
        };
        let counts = session.output(CONFUSION).unwrap_or_default();
        pairs.iter_mut().zip(counts).for_each(|(sum, count)| *sum += *count as i64);
        let residuals = session.output(RESIDUALS).unwrap_or_default().iter().copied();
        Ok(names.iter().flat_map(row).chain([number(IGNORED).unwrap_or(0.0)]).chain(residuals).collect())
    }

    /// How many numbers an evaluation gives under this name; none if its model measures no such thing.
    fn output_elements(&mut self, batch: usize, name: &str) -> Result<usize, Error> {
        let at = self.evaluator(batch)?;
        let graph = self.evaluators[at].1.graph();
        Ok(graph.output(name).map_or(0, |id| graph.ty(id).elements()))
    }

    /// Which of the metrics come as a sum with its count, as opposed to a mean over a batch.
    fn are_sums(&mut self, batch: usize, names: &[String]) -> Result<Vec<bool>, Error> {
        let at = self.evaluator(batch)?;
        let graph = self.evaluators[at].1.graph();
        Ok(names.iter().map(|name| graph.output(&count_name(name)).is_some()).collect())
    }

    /// Names of what an evaluation measures, the loss first.
    fn metric_names(&mut self, batch: usize) -> Result<Vec<String>, Error> {
        let at = self.evaluator(batch)?;
        Ok(metric_names(self.evaluators[at].1.graph()))
    }

    /// The model's predictions for inputs from elsewhere.
    pub fn predict(&mut self, batch: usize, feed: impl Fn(&mut Feed<'_>) + Sync) -> Result<Vec<f32>, Error> {
        let at = self.evaluator(batch)?;
        let session = &mut self.evaluators[at].1;
        session.run(&mut self.store, |_| {}, |_, inputs| feed(inputs))?;
        Ok(session.output("predictions").map(<[f32]>::to_vec).unwrap_or_default())
    }

    fn evaluator(&mut self, batch: usize) -> Result<usize, Error> {
        if let Some(at) = self.evaluators.iter().position(|(size, _)| *size == batch) {
            return Ok(at);
        }
        let graph = graph_of(&self.job, &self.parallel, &self.mesh, batch)?;
        let shares = self.parallel.shards_weights(&self.mesh);
        let foreign = graph.nodes.iter().filter_map(|node| node.op.collective()).find(|one| one.axis == DATA);
        if let Some(collective) = foreign.filter(|_| !shares) {
            return Err(Error::Together(Fault::BadCall(format!(
                "an evaluation cannot exchange tensors along `{}`, and the strategies put such a call into its graph\n  \
                 hint: let the strategy rewrite graphs of training only, or write `holdout = 0`",
                collective.axis
            ))));
        }
        let program = Program::new(&self.job.executor, graph, Options::single(self.threads));
        // Ranks of other replicas have other batches.
        let mesh = if shares { self.mesh.clone() } else { self.mesh.without(DATA) };
        let lane = self
            .sharers()
            .map(|sharers| Arc::new(CommLane::on_mesh(Arc::clone(sharers), mesh)) as Arc<dyn Collectives>);
        let mut session = Session::compile(program, &self.store, lane)?;
        session.set_alive(self.alive());
        self.evaluators.push((batch, session));
        Ok(self.evaluators.len() - 1)
    }
}

/// Names of what an evaluation graph measures, the loss first.
pub fn metric_names(graph: &Graph) -> Vec<String> {
    let names: Vec<&String> = graph.outputs.iter().map(|(name, _)| name).collect();
    let is_count = |name: &str| names.iter().any(|metric| count_name(metric) == name);
    let measured =
        |name: &&&String| !is_count(name) && !["predictions", CONFUSION, RESIDUALS, IGNORED].contains(&name.as_str());
    names.iter().filter(measured).map(|name| name.to_string()).collect()
}

/// Adds a row of (value, number) to the totals of each metric.
fn add_row(totals: &mut [(f64, f64)], row: &[f32], is_sum: &[bool]) {
    for ((total, pair), is_sum) in totals.iter_mut().zip(row.chunks(2)).zip(is_sum) {
        let [value, number] = [pair[0], pair[1]].map(f64::from);
        total.0 += if *is_sum { value } else { value * number };
        total.1 += number;
    }
}

/// Each rank filled the rows of its own turns; all get all.
fn gather_turns(world: &Communicator, rows: &[f32], width: usize) -> Result<Vec<f32>, Error> {
    let mut all = vec![0.0; rows.len() * world.size()];
    world.all_gather(rows, &mut all)?;
    let row = |at: usize| {
        let from = at % world.size() * rows.len() + at * width;
        &all[from..from + width]
    };
    Ok((0..rows.len() / width).flat_map(row).copied().collect())
}
