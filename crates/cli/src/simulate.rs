//! `kolo simulate`: a step of a job on a described cluster, event by event; how it scales; and weeks with failures.

mod json;
mod text;
mod trace;
mod weeks;

pub use text::duration;

use crate::args::SimulateArgs;
use crate::described;
use crate::elastic;
use crate::fail::{Failure, check_writable, write_file};
use crate::load::{self, Kinds};
use crate::plan::layouts::table::fitting_lines;
use crate::progress::Waiting;
use kolo_plan::cluster::Cluster;
use kolo_plan::failures::LayoutSpeed;
use kolo_plan::search::fitting::layouts_that_fit;
use kolo_plan::search::space::divisors;
use kolo_plan::search::{Candidate, LayoutModels, Limits};
use kolo_plan::simulate::picture::{self, Picture, ScalingPoint};
use kolo_plan::simulate::{Conditions, SimulatedStep, SlowRank, simulate_step};
use kolo_plan::slow_devices::FACTOR_MAX;
use kolo_plan::step_model::StepModel;
use kolo_train::Job;
use kolo_train::layout_models::JobModels;
use kolo_train::machine::format_bytes;
use weeks::Weeks;

/// Everything that a simulation found.
#[derive(Debug)]
struct Simulation {
    name: String,
    title: String,
    candidate: Candidate,
    cluster: Cluster,
    model: StepModel,
    step: SimulatedStep,
    weak: Vec<ScalingPoint>,
    strong: Vec<ScalingPoint>,
    weeks: Option<Weeks>,
    seed: u64,
}

/// Devices that can be simulated.
const DEVICES_MAX: usize = 1 << 20;
const SPREAD_MAX: f64 = 1.0;
/// Points of a scaling curve beside the last: with fewer devices a step of the same batch has ever more micro-batches.
const DOUBLINGS_MAX: usize = 6;

pub fn simulate(kinds: &Kinds, args: &SimulateArgs) -> Result<(), Failure> {
    weeks::check(args)?;
    [&args.json, &args.svg, &args.trace].into_iter().flatten().try_for_each(|path| check_writable(path))?;
    let mut cluster = described::named_or_from_file(&args.cluster)?;
    if let Some(name) = &args.device {
        cluster.device = described::device(name)?;
    }
    let devices = args.devices.unwrap_or_else(|| cluster.devices());
    let mut conditions = conditions(args, devices)?;
    conditions.slow.extend(cluster.slow_ranks(devices, args.seed));
    let cluster = cluster.with_devices(devices).map_err(|message| {
        Failure::usage(message, "describe more groups at the outermost level, or ask for fewer with -n")
    })?;
    let mut job = kinds.read(&load::settings_of(args.job.as_deref(), &args.set)?)?;
    job.fit_to(devices)?;
    let waiting = Waiting::new("simulating");
    if args.elastic {
        elastic::check_job(&job)?;
    }
    let job = &job;
    let models = JobModels::new(job, &cluster)?;
    let candidate = models.own(devices)?;
    let model = model_of(&models, &candidate, &cluster)?;
    check_memory(&models, &candidate, &model, &cluster, devices)?;
    let step = simulate_step(&model, &cluster, &conditions).map_err(|error| Failure::job(error.to_string(), HINT))?;
    let curve = Curve { models: &models, candidate: candidate.clone(), cluster: &cluster };
    // Only an elastic job has another layout to go on with.
    let whole = LayoutSpeed { devices: model.layout.workers(), speed: 1.0 };
    let layouts = if args.elastic { curve.layouts(&model, step.seconds) } else { vec![whole] };
    let weeks = weeks::simulate(args, &cluster, &model, layouts, step.seconds)?;
    let (weak, strong) = (curve.weak(), curve.strong(job));
    let title = format!("{} on {devices} × {} of {}", job.name, cluster.device.name, cluster.name);
    let name = job.name.clone();
    let seed = args.seed;
    let simulation = Simulation { name, title, candidate, cluster, model, step, weak, strong, weeks, seed };
    drop(waiting);
    text::print(&simulation);
    write_files(args, &simulation)
}

const HINT: &str = "see docs/simulation.md";

/// Refuses a layout that needs more memory than a device has: no run of it could last a step.
fn check_memory(
    models: &JobModels<'_>,
    candidate: &Candidate,
    model: &StepModel,
    cluster: &Cluster,
    devices: usize,
) -> Result<(), Failure> {
    let Some(role) = model.largest().filter(|_| !model.fits()) else { return Ok(()) };
    let limits = Limits { steps: 1.0, ..Limits::default() };
    let found = layouts_that_fit(candidate, &models.space(devices), models, cluster, &limits);
    let message = format!(
        "the layout {candidate} needs {} of the {} of a device\n  {}",
        format_bytes(role.memory.total() as u64),
        format_bytes(cluster.device.memory_bytes as u64),
        fitting_lines(&found).join("\n  ")
    );
    Err(Failure::usage(message, "simulate one that fits; `kolo plan --search` finds the fastest"))
}

fn write_files(args: &SimulateArgs, simulation: &Simulation) -> Result<(), Failure> {
    if let Some(path) = &args.json {
        write_file(path, format!("{:#}\n", json::value(simulation)))?;
    }
    if let Some(path) = &args.svg {
        let Simulation { title, step, strong, weak, weeks, .. } = simulation;
        let run = weeks.as_ref().map(|weeks| &weeks.outcome);
        write_file(path, picture::draw(&Picture { title, step, strong, weak, run }))?;
    }
    if let Some(path) = &args.trace {
        kolo_train::timeline::write_events(path, &trace::events(&simulation.step))?;
    }
    Ok(())
}

fn model_of(models: &JobModels<'_>, candidate: &Candidate, cluster: &Cluster) -> Result<StepModel, Failure> {
    models.model(candidate, cluster).map_err(|message| {
        let hint = "change `[parallel]` or -n; `kolo plan --search` looks for a layout that fits";
        Failure::usage(format!("the layout {candidate} cannot be simulated: {message}"), hint)
    })
}

/// What the flags say about noise and slow ranks.
fn conditions(args: &SimulateArgs, devices: usize) -> Result<Conditions, Failure> {
    if devices == 0 || devices > DEVICES_MAX {
        return Err(Failure::usage(format!("-n {devices} is out of range"), "use a number from 1 to 1048576"));
    }
    if !(0.0..=SPREAD_MAX).contains(&args.noise) {
        let message = format!("--noise {} is out of range", args.noise);
        return Err(Failure::usage(message, "give the spread of a rank's time as a fraction, such as 0.02"));
    }
    let slow = args.slow.iter().map(|text| slow_rank(text, devices)).collect::<Result<Vec<_>, Failure>>()?;
    let keep_spans = args.svg.is_some() || args.trace.is_some();
    Ok(Conditions { spread: args.noise, seed: args.seed, slow, keep_spans })
}

/// `17:1.5`.
fn slow_rank(text: &str, devices: usize) -> Result<SlowRank, Failure> {
    let wrong = |why: String| Failure::usage(format!("--slow {text} {why}"), "write RANK:FACTOR, such as 17:1.5");
    let (rank, factor) = text.split_once(':').ok_or_else(|| wrong("has no `:`".into()))?;
    let rank: usize = rank.parse().map_err(|_| wrong(format!("has an invalid rank: `{rank}`")))?;
    let factor: f64 = factor.parse().map_err(|_| wrong(format!("has an invalid factor: `{factor}`")))?;
    if rank >= devices {
        return Err(wrong(format!("names a rank beyond the {devices} devices")));
    }
    if !(1.0..=FACTOR_MAX).contains(&factor) {
        return Err(wrong("must have a factor of 1 or more".into()));
    }
    Ok(SlowRank { rank, factor })
}

/// Points of scaling curves around a layout.
struct Curve<'a, 'j> {
    models: &'a JobModels<'j>,
    candidate: Candidate,
    cluster: &'a Cluster,
}

impl Curve<'_, '_> {
    /// Numbers of data ranks, doubling up to the layout's own; the last few of many.
    fn data_ranks(&self) -> Vec<usize> {
        let own = self.candidate.data;
        let mut ranks: Vec<usize> =
            (0..usize::BITS).map(|power| 1usize << power).take_while(|one| *one < own).collect();
        let first = ranks.len().saturating_sub(DOUBLINGS_MAX);
        ranks.drain(..first);
        ranks.push(own);
        ranks
    }

    fn point(&self, candidate: &Candidate, batch: Option<usize>) -> Option<(ScalingPoint, f64)> {
        let cluster = self.cluster.with_devices(candidate.devices()).ok()?;
        let model = match batch {
            Some(batch) => self.models.model_of_batch(candidate, &cluster, batch).ok()?,
            None => self.models.model(candidate, &cluster).ok()?,
        };
        let step = simulate_step(&model, &cluster, &Conditions::default()).ok()?;
        let throughput = model.layout.batch() as f64 / step.seconds / candidate.devices() as f64;
        let SimulatedStep { seconds, utilisation, .. } = step;
        Some((ScalingPoint { devices: candidate.devices(), seconds, efficiency: 1.0, utilisation }, throughput))
    }

    fn relative(points: Vec<(ScalingPoint, f64)>) -> Vec<ScalingPoint> {
        let first = points.first().map_or(1.0, |(_, throughput)| *throughput);
        points.into_iter().map(|(point, throughput)| ScalingPoint { efficiency: throughput / first, ..point }).collect()
    }

    /// Every data rank has as many samples as now.
    fn weak(&self) -> Vec<ScalingPoint> {
        let micro_batch = self.models.batch() / self.candidate.grains();
        let of = |data: usize| {
            let candidate = Candidate { data, ..self.candidate.clone() };
            self.point(&candidate, Some(candidate.grains() * micro_batch))
        };
        Self::relative(self.data_ranks().into_iter().filter_map(of).collect())
    }

    /// All data ranks together have as many samples as now, in grains of the same size.
    fn strong(&self, job: &Job) -> Vec<ScalingPoint> {
        let of = |data: usize| {
            let micro_batches = job.grains / data;
            self.point(&Candidate { data, micro_batches, ..self.candidate.clone() }, None)
        };
        let fitting = self.data_ranks().into_iter().filter(|data| job.grains.is_multiple_of(*data));
        Self::relative(fitting.filter_map(of).collect())
    }

    /// What an elastic job can shrink to: fewer data ranks that share the grains evenly, with their speed.
    fn layouts(&self, model: &StepModel, seconds: f64) -> Vec<LayoutSpeed> {
        let mut layouts = vec![LayoutSpeed { devices: model.layout.workers(), speed: 1.0 }];
        let grains = self.candidate.grains();
        let fewer: Vec<usize> = divisors(grains).take_while(|data| *data < self.candidate.data).collect();
        for data in fewer.into_iter().rev() {
            let candidate = Candidate { data, micro_batches: grains / data, ..self.candidate.clone() };
            if let Some((point, _)) = self.point(&candidate, None) {
                layouts.push(LayoutSpeed { devices: point.devices, speed: (seconds / point.seconds).min(1.0) });
            }
        }
        layouts
    }
}
