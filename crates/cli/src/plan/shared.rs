//! The plan of a model that workers share: what each of them holds and sends, and the pipeline's schedule.

use super::{placement, text};
use crate::fail::Failure;
use crate::load;
use crate::output::println;
use kolo_base::ShownPath;
use kolo_exec::{Options, Program};
use kolo_parallel::mesh::DATA;
use kolo_parallel::schedules::{Durations, ScheduleError, Verified, draw, verify};
use kolo_parallel::{Mesh, Parallel, Purpose};
use kolo_plan::{Cost, Rates};
use kolo_train::Job;
use kolo_train::machine::format_bytes;
use kolo_train::step::{graph_before_fusing, graph_of, program_of};
use kolo_train::trial_run::{self, TrialRun, TrialSetup};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

fn scheduled(error: &ScheduleError) -> Failure {
    Failure::usage(error.to_string(), "see docs/schedules.md")
}

/// More workers that share a model than this are not tried one by one.
const SHARERS_TRIED_MAX: usize = 8;

/// Columns of a picture.
const COLUMNS: usize = 120;

/// One of the workers that share a copy of the model.
pub struct Sharer {
    pub rank: usize,
    pub program: Program,
    pub cost: Cost,
    /// Bytes that it sends in a step, by axis.
    pub sent: BTreeMap<String, u64>,
    pub seconds: f64,
}

/// All workers of the first copy of the model: the others are like them, but for their shares of what ZeRO shares out.
pub struct Shared {
    pub sharers: Vec<Sharer>,
    pub mesh: Mesh,
    pub bubble: Option<f64>,
    schedule: Option<Verified>,
    /// Lines about who has what, beside parameters.
    explained: Vec<String>,
    /// Workers have parts of the model, not only of the batch.
    pub splits_model: bool,
}

impl Shared {
    pub fn new(job: &Job, workers: usize, options: Options, rates: &Rates) -> Result<Option<Self>, Failure> {
        let mesh = load::mesh(job, workers, 0)?;
        let count = workers / mesh.size(DATA);
        if workers == 1 {
            return Ok(None);
        }
        let mut sharers = Vec::new();
        for rank in 0..count {
            let mesh = load::mesh(job, workers, rank)?;
            let program = program_of(job, &job.parallel, &mesh, options)?;
            let cost = kolo_plan::cost(&program);
            let sent = kolo_plan::sent_bytes(&program, &|axis| (mesh.coordinate(axis), mesh.size(axis)));
            let seconds = kolo_plan::predict_seconds(&program, rates);
            sharers.push(Sharer { rank, program, cost, sent, seconds });
        }
        let schedule = job
            .parallel
            .schedule(&mesh, options.grains)
            .map_err(|refusal| Failure::usage(refusal.message, &refusal.hint))?;
        let schedule = schedule.map(|one| verify(&one)).transpose().map_err(|error| scheduled(&error))?;
        let bubble = match &schedule {
            Some(verified) => {
                let stages = verified.schedule().stages;
                let timeline = verified.timeline(&Durations::textbook(stages)).map_err(|error| scheduled(&error))?;
                Some(timeline.bubble_share())
            }
            None => None,
        };
        let explained = job.parallel.explain();
        Ok(Some(Self { sharers, mesh, bubble, schedule, explained, splits_model: count > 1 }))
    }

    /// How a little of every worker's step went here: the slowest, and what a pipeline waits. `None` if there are too many to try.
    pub fn try_out(&self, job: &Job, setup: TrialSetup) -> Result<Option<TrialRun>, Failure> {
        if self.sharers.len() > SHARERS_TRIED_MAX {
            return Ok(None);
        }
        let limit = trial_run::TIME_LIMIT / self.sharers.len() as u32;
        let mut slowest: Option<TrialRun> = None;
        for sharer in &self.sharers {
            let tried = trial_run::run(job, &sharer.program.graph, setup, limit)?;
            if slowest.is_none_or(|known| known.step_seconds() < tried.step_seconds()) {
                slowest = Some(tried);
            }
        }
        let works = (1.0 - self.bubble.unwrap_or(0.0)).max(0.01);
        Ok(slowest.map(|tried| TrialRun { compute_seconds: tried.compute_seconds / works, ..tried }))
    }

    /// Floating-point operations of all workers in a step.
    pub fn flops(&self) -> f64 {
        let one: u64 = self.sharers.iter().map(|sharer| sharer.cost.flops.total()).sum();
        one as f64 * self.mesh.size(DATA) as f64
    }

    /// Seconds of a step by rates: the slowest worker, and what a pipeline waits.
    pub fn seconds(&self) -> f64 {
        let slowest = self.sharers.iter().map(|sharer| sharer.seconds).fold(0.0, f64::max);
        slowest / (1.0 - self.bubble.unwrap_or(0.0)).max(0.01)
    }

    /// The worker that holds most.
    pub fn largest(&self) -> Option<&Sharer> {
        self.sharers.iter().max_by_key(|sharer| sharer.cost.memory.total())
    }

    pub fn print(&self) {
        let what = if self.splits_model { "workers that share the model" } else { "one of the workers" };
        println!("{what} ({})", self.mesh);
        println!("  rank  parameters   weights     gradients   optimizer   activations  sent per step");
        for Sharer { rank, cost, sent, .. } in &self.sharers {
            let m = &cost.memory;
            let [weights, gradients, optimizer, activations] =
                [m.weights, m.gradients, m.optimizer, m.activations].map(|bytes| format_bytes(bytes as u64));
            let sent: Vec<String> =
                sent.iter().map(|(axis, bytes)| format!("{axis} {}", format_bytes(*bytes))).collect();
            let parameters = text::separated(cost.parameters as u64);
            println!(
                "  {rank:<5} {parameters:<12} {weights:<11} {gradients:<11} {optimizer:<11} {activations:<12} {}",
                sent.join(", ")
            );
        }
        if let Some(bubble) = self.bubble {
            println!(
                "  bubble            {:.1} % of the pipeline's time, if a backward pass takes two forward passes",
                bubble * 100.0
            );
        }
    }

    /// Where every parameter and activation lies, who has which tokens, and what is exchanged.
    pub fn explain(&self, job: &Job, workers: usize) -> Result<(), Failure> {
        let whole = graph_before_fusing(job, &Parallel::default(), &Mesh::alone())?;
        let mut graphs = Vec::new();
        for sharer in &self.sharers {
            graphs
                .push((sharer.rank, graph_before_fusing(job, &job.parallel, &load::mesh(job, workers, sharer.rank)?)?));
        }
        // Where weights are in shares along the data axis, every worker has others.
        let mut others = Vec::new();
        for rank in (self.sharers.len()..workers).filter(|_| job.parallel.shards_weights(&self.mesh)) {
            let mesh = load::mesh(job, workers, rank)?;
            others.push((rank, graph_of(job, &job.parallel, Purpose::Training, &mesh)?));
        }
        let own = self.sharers.iter().map(|sharer| (sharer.rank, &*sharer.program.graph));
        placement::print_parameters(own.chain(others.iter().map(|(rank, graph)| (*rank, graph))));
        placement::print_activations(&whole, &graphs);
        self.explained.iter().for_each(|line| println!("{line}"));
        println!("exchanges of the first rank, in their order");
        for node in self.sharers[0].program.graph.nodes.iter().filter(|node| node.op.collective().is_some()) {
            let Some(collective) = node.op.collective() else { continue };
            let types: Vec<String> =
                node.outputs.iter().take(3).map(|id| self.sharers[0].program.graph.ty(*id).to_string()).collect();
            let more =
                if node.outputs.len() > 3 { format!(" and {} more", node.outputs.len() - 3) } else { String::new() };
            let scope = if node.scope.is_empty() { "the model's top" } else { &node.scope };
            println!(
                "  {:<9} {:<15} {}{more} in {scope}, {}",
                collective.axis,
                node.op.name(),
                types.join(", "),
                node.stage.name()
            );
        }
        Ok(())
    }

    /// Draws the pipeline's schedule, on the terminal or into a file.
    pub fn draw(&self, file: Option<&Path>) -> Result<(), Failure> {
        let Some(verified) = &self.schedule else {
            return Err(Failure::usage("the job has no pipeline to draw", "set `parallel.pipeline` to 2 or more"));
        };
        let durations = Durations::textbook(verified.schedule().stages);
        let timeline = verified.timeline(&durations).map_err(|error| scheduled(&error))?;
        match file {
            None => println!("{}", draw::draw_text(verified, &timeline, COLUMNS)),
            Some(path) => {
                let picture = draw::draw_svg(verified, &timeline).map_err(|error| scheduled(&error))?;
                std::fs::write(path, picture).map_err(|error| {
                    Failure::usage(format!("cannot write {}: {error}", path.shown()), "name a file that can be written")
                })?;
            }
        }
        Ok(())
    }

    pub fn as_json(&self) -> Value {
        let sharer = |one: &Sharer| {
            let m = &one.cost.memory;
            json!({
                "rank": one.rank, "parameters": one.cost.parameters, "sent_bytes": one.sent,
                "memory": {"weights": m.weights, "gradients": m.gradients, "optimizer": m.optimizer, "activations": m.activations, "total": m.total()},
            })
        };
        json!({"ranks": self.sharers.iter().map(sharer).collect::<Vec<_>>(), "bubble": self.bubble})
    }
}
