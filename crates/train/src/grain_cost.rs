//! What cutting the batch into grains costs one worker. Every grain reads all weights and writes a gradient of each of them, so
//! a model whose weights outweigh its activations takes several times as long as with one grain. The cost is predicted by the
//! planner's rates, which flatter products of few rows: it is often larger. `kolo plan` therefore tries both steps.

use crate::error::Error;
use crate::job::Job;
use crate::machine::format_bytes;
use crate::memory_check::{self, HostUsage};
use crate::step::WholeStep;
use crate::trial_run::{self, TrialSetup};
use kolo_exec::{Options, Program};
use kolo_models::Model;
use kolo_parallel::mesh::Mesh;
use kolo_plan::{Cost, Rates};
use serde::Serialize;
use std::time::Duration;

/// A step that fewer grains would speed up by less than this is as it should be.
const TIMES_MIN: f64 = 1.15;
/// Runs of shorter steps are over before anybody has read a note.
const STEP_MIN_MS: f64 = 0.25;

/// Layers of a deeper model that are looked at before all of it is.
const LAYERS_FIRST: usize = 8;

/// A step as the job cuts it, beside one with fewer grains.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GrainCost {
    pub grains: usize,
    /// The fewest that fit into the memory of this machine.
    pub fewer: usize,
    pub step_ms: f64,
    pub fewer_step_ms: f64,
    /// Both were tried here, as opposed to predicted from rates.
    pub timed: bool,
    /// Of all parameters.
    pub weights_bytes: usize,
}

impl GrainCost {
    /// The cost by rates, if a single worker pays one that is worth a word. `rates` is asked only if the bytes of a step leave a
    /// doubt: [`Rates::measure`] takes memory and a fifth of a second, [`Rates::usual`] neither.
    pub fn predict(job: &Job, threads: usize, rates: fn() -> Rates) -> Result<Option<Self>, Error> {
        // Devices of other memory have other rates; and what splits a model sets its grains.
        let is_ours = job.executor.allocates_on_host() && job.executor.has_collectives();
        if job.grains == 1 || !is_ours || job.parallel.splits_model() {
            return Ok(None);
        }
        // Layers are alike: only if the first of a deep model leave a doubt are all of them planned.
        let deep = job.model.layers().filter(|all| *all > LAYERS_FIRST);
        if let Some(first) = deep.and_then(|_| job.model.with_layers(LAYERS_FIRST)) {
            let own = program_with(job, &*first, job.grains, threads)?;
            let fewest = program_with(job, &*first, 1, threads)?;
            if seconds(&own, &fewest, rates).is_none_or(|[own, fewest]| own < TIMES_MIN * fewest) {
                return Ok(None);
            }
        }
        let own = program_with(job, &*job.model, job.grains, threads)?;
        let fits = |program: &Program| {
            let plan = kolo_plan::memory(program);
            let within_limit = job.memory.limit_bytes.is_none_or(|limit| plan.total() as u64 <= limit);
            within_limit && memory_check::shortage(&plan, HostUsage::alone(&plan)).is_none()
        };
        let mut fewer = 1;
        let program = loop {
            let program = program_with(job, &*job.model, fewer, threads)?;
            if fits(&program) {
                break program;
            }
            fewer *= 2;
            if fewer >= job.grains {
                return Ok(None);
            }
        };
        let Some(seconds) = seconds(&own, &program, rates) else { return Ok(None) };
        let [step_ms, fewer_step_ms] = seconds.map(|seconds| seconds * 1e3);
        let weights_bytes = kolo_plan::memory(&own).weights;
        let found = Self { grains: job.grains, fewer, step_ms, fewer_step_ms, timed: false, weights_bytes };
        Ok(found.is_worth_a_word().then_some(found))
    }

    /// The same with a step of fewer grains tried out on one worker, as the one of `step_ms` milliseconds was.
    pub fn time(self, job: &mut Job, threads: usize, step_ms: f64, limit: Duration) -> Result<Option<Self>, Error> {
        let own = std::mem::replace(&mut job.grains, self.fewer);
        let setup = TrialSetup { workers: 1, per_host: 1, threads };
        let tried = program_with(job, &*job.model, self.fewer, threads)
            .and_then(|program| trial_run::run(job, &program.graph, setup, limit));
        job.grains = own;
        let found = Self { step_ms, fewer_step_ms: tried?.step_seconds() * 1e3, timed: true, ..self };
        Ok(found.is_worth_a_word().then_some(found))
    }

    /// How many times as long a step takes.
    pub fn times(&self) -> f64 {
        self.step_ms / self.fewer_step_ms
    }

    fn is_worth_a_word(&self) -> bool {
        self.step_ms >= STEP_MIN_MS && self.times() >= TIMES_MIN
    }
}

impl std::fmt::Display for GrainCost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { grains, fewer, step_ms, fewer_step_ms, .. } = self;
        let (times, weights) = (self.times(), format_bytes(self.weights_bytes as u64));
        let how = match self.timed {
            true => {
                format!("{times:.1} times as long as {fewer} on one worker, {step_ms:.1} ms and {fewer_step_ms:.1} ms")
            }
            false => format!("{times:.1} times as long as {fewer} on one worker by rates (`kolo plan` times both)"),
        };
        let lost = if *fewer == 1 { ", but leaves no grain for a second worker," } else { "" };
        write!(
            f,
            "{grains} grains take {how}: every grain reads {weights} of weights and writes gradients as large; \
             `data.grains = {fewer}` is faster{lost} and gives other last digits"
        )
    }
}

/// What both steps take by rates, unless their bytes alone say that they take about the same.
fn seconds(own: &Program, fewer: &Program, rates: fn() -> Rates) -> Option<[f64; 2]> {
    let [bytes, fewer_bytes] = [own, fewer].map(|program| all_bytes(&kolo_plan::cost(program)) as f64);
    // The operations are the same: a step slows down by its bytes at most.
    if bytes < TIMES_MIN * fewer_bytes {
        return None;
    }
    // What a call costs beyond its work is assumed, not measured.
    let rates = Rates { call: 0.0, ..rates() };
    Some([own, fewer].map(|program| kolo_plan::predict_seconds(program, &rates)))
}

fn all_bytes(cost: &Cost) -> u64 {
    cost.bytes.forward + cost.bytes.backward + cost.bytes.update
}

/// What one worker runs in a step of this model, the job's or some layers of it, cut into so many grains.
fn program_with(job: &Job, model: &dyn Model, grains: usize, threads: usize) -> Result<Program, Error> {
    let step = WholeStep { model, samples: job.batch / grains, grains, ..WholeStep::of(job) };
    let graph = step.graph_of_one(job, &Mesh::alone())?;
    Ok(Program::new(&job.executor, graph, Options::for_grains(grains, threads)))
}
