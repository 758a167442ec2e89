//! `kolo plan --search`, `--why`, `--cluster` and `--device`: layouts of a job on a described cluster.

mod json;
mod on_gpu;
pub(crate) mod table;
mod why;

use crate::args::PlanArgs;
use crate::described;
use crate::fail::{Failure, write_file};
use crate::load::{self, Kinds};
use crate::output::println;
use crate::progress::Waiting;
use kolo_base::ShownPath;
use kolo_config::edit::{KeyChange, with_keys};
use kolo_plan::cluster::Cluster;
use kolo_plan::search::explain::{memory_hint, memory_kinds};
use kolo_plan::search::rank::simulated;
use kolo_plan::search::{Candidate, LayoutModels, Limits, NearMiss, SearchResult, search};
use kolo_plan::step_model::DeviceMemory;
use kolo_train::layout_models::JobModels;
use kolo_train::machine::format_bytes;
use kolo_train::memory_settings::parse_bytes;
use kolo_train::step_model::PlannedPrecision;
use kolo_train::{Job, job_file};
use std::time::Instant;

const SECONDS_PER_HOUR: f64 = 3600.0;
/// Devices for which a layout is looked for.
const DEVICES_MAX: usize = 1 << 17;
/// Layouts that are ranked.
const LAYOUTS_MAX: usize = 10_000;

/// Whether a plan is about a described cluster.
pub fn is_asked(args: &PlanArgs) -> bool {
    args.search || args.why || args.cluster.is_some() || args.job.names_a_device()
}

/// A plan on a described cluster.
struct Described<'a> {
    job: &'a Job,
    models: JobModels<'a>,
    cluster: Cluster,
    devices: usize,
    limits: Limits,
    precision: PlannedPrecision,
    seconds: f64,
}

pub fn plan(kinds: &Kinds, args: &PlanArgs) -> Result<(), Failure> {
    check(args)?;
    let devices = crate::workers::asked(&args.job.workers)?;
    let cluster = cluster(args, devices)?;
    if args.max_cost.is_some() && cluster.device.price_per_hour.is_none() {
        let message = format!("--max-cost: the device \"{}\" has no price", cluster.device.name);
        return Err(Failure::usage(message, "name a device file with `price_per_hour`: --device FILE.toml"));
    }
    let job = kinds.read(&load::settings_of(args.job.job.as_deref(), &args.job.set)?)?;
    let limits = limits(args, &job)?;
    let models = JobModels::new(&job, &cluster)?;
    let precision = PlannedPrecision::of(&job, &cluster);
    let begin = Instant::now();
    let mut described = Described { job: &job, models, cluster, devices, limits, precision, seconds: 0.0 };
    if !args.search {
        let own = described.models.own(devices)?;
        let planned = described.laid_out(kinds, args, &own);
        return described.show_own(own, planned, args);
    }
    let candidates = described.models.space(devices).candidates();
    let waiting = Waiting::new(format!("searching {} layouts", super::text::separated(candidates.len() as u64)));
    let mut found = search(&candidates, &described.models, &described.cluster, &described.limits);
    described.lay_out_best(kinds, args, &mut found);
    drop(waiting);
    described.seconds = begin.elapsed().as_secs_f64();
    let best = described.best(&found)?;
    if args.json {
        let mut value = json::value(&described, &found);
        if args.why {
            value["why"] = why::value(&described, &best)?;
        }
        if args.write {
            value["wrote"] = described.write(args, kinds, &best)?.into();
        }
        println!("{value:#}");
        return Ok(());
    }
    table::print(&described, &found);
    if args.why {
        why::print(&described, &best)?;
    }
    if args.write {
        println!("wrote {}", described.write(args, kinds, &best)?);
    }
    Ok(())
}

/// Refuses flags that go with a search alone, or that no job can keep to.
fn check(args: &PlanArgs) -> Result<(), Failure> {
    let limited = args.max_memory.is_some() || args.max_cost.is_some() || args.deadline.is_some();
    let lost = [
        (args.write, "--write requires"),
        (limited, "--max-memory, --max-cost and --deadline require"),
        (args.layouts.is_some(), "--layouts requires"),
    ];
    if let Some((_, flag)) = lost.into_iter().find(|(given, _)| *given && !args.search) {
        return Err(Failure::usage(format!("{flag} --search"), "add --search"));
    }
    if let Some(count) = args.layouts.filter(|count| !(1..=LAYOUTS_MAX).contains(count)) {
        let message = format!("--layouts {count} is out of range");
        return Err(Failure::usage(message, &format!("use a number from 1 to {LAYOUTS_MAX}")));
    }
    if args.write && args.job.job.is_none() {
        return Err(Failure::usage("--write needs a job file", "name a job file"));
    }
    if let Some(set) = args.job.set.first().filter(|_| args.write) {
        let message = format!("--write: with --set {set} the layout is that of another job than the file's");
        return Err(Failure::usage(message, "put the key into the job file, or leave out --write"));
    }
    if args.schedule.is_some() || args.explain {
        let hint = "leave out --cluster, --device, --search and --why, or --schedule and --explain";
        return Err(Failure::usage("--schedule and --explain are for workers on this machine", hint));
    }
    for (flag, value) in [("--max-cost", args.max_cost), ("--deadline", args.deadline)] {
        if let Some(value) = value.filter(|value| !(value.is_finite() && *value > 0.0)) {
            return Err(Failure::usage(format!("{flag} {value} is not a positive number"), "give a number above 0"));
        }
    }
    Ok(())
}

fn cluster(args: &PlanArgs, devices: usize) -> Result<Cluster, Failure> {
    if devices == 0 || devices > DEVICES_MAX {
        return Err(Failure::usage(format!("-n {devices} is out of range"), "use a number from 1 to 131072"));
    }
    match (&args.cluster, args.job.names_a_device()) {
        (Some(_), true) => {
            Err(Failure::usage("--device cannot be combined with --cluster", "the cluster file names the device"))
        }
        (Some(path), false) => described::named_or_from_file(path)?.with_devices(devices).map_err(|message| {
            Failure::usage(message, "describe more groups at the outermost level, or ask for fewer with -n")
        }),
        (None, true) => described::usual(described::device(&args.job.device)?, devices),
        (None, false) => {
            let cores = load::threads_of(args.job.threads)?;
            described::this_machine(devices, if args.job.threads.is_some() { cores } else { cores / devices })
        }
    }
}

fn limits(args: &PlanArgs, job: &Job) -> Result<Limits, Failure> {
    let memory = args.max_memory.as_deref().map(|text| {
        let wrong = |why: String| Failure::usage(format!("--max-memory {why}"), "write a size such as 40GiB");
        parse_bytes(text).map(|bytes| bytes as f64).map_err(wrong)
    });
    Ok(Limits {
        memory: memory.transpose()?.or(job.memory.limit_bytes.map(|limit| limit as f64)),
        cost: args.max_cost,
        deadline: args.deadline.map(|hours| hours * SECONDS_PER_HOUR),
        steps: super::run_steps(args, job).max(1.0),
        ranked: args.layouts,
    })
}

impl Described<'_> {
    /// The memory of a layout as the executor would lay it out on this device: the same whoever names the device. `None` where the model
    /// of memory counts: on what is no GPU, for other systems, and where too many ranks share the model.
    fn laid_out(&self, kinds: &Kinds, args: &PlanArgs, candidate: &Candidate) -> Option<DeviceMemory> {
        if !self.cluster.system.keeps_what_kolo_keeps() {
            return None;
        }
        let mut root = load::settings_of(args.job.job.as_deref(), &args.job.set).ok()?;
        let precision = self.precision.key(self.job).map(|(section, key, value)| format!("{section}.{key}={value}"));
        for assignment in candidate.assignments().into_iter().chain(precision) {
            job_file::override_with(&mut root, &assignment).ok()?;
        }
        let memory = on_gpu::planned_memory(kinds.read(&root).ok()?, &self.cluster.device, self.devices)?;
        Some(DeviceMemory { reserved: self.cluster.reserved_bytes(), ..memory })
    }

    /// Says the memory of the best layout as it would be laid out, and leaves out those before it that would not fit then.
    fn lay_out_best(&self, kinds: &Kinds, args: &PlanArgs, found: &mut SearchResult) {
        while let Some(best) = found.ranked.first_mut() {
            let Some(memory) = self.laid_out(kinds, args, &best.candidate) else { return };
            if memory.total() <= self.limits.bytes(&self.cluster, &memory) {
                best.memory = memory;
                return;
            }
            found.nearest = Some(NearMiss { candidate: best.candidate.clone(), memory });
            found.too_large += 1;
            found.ranked.remove(0);
        }
    }

    /// The best layout, or why there is none.
    fn best(&self, found: &SearchResult) -> Result<Candidate, Failure> {
        if let Some(best) = found.ranked.first() {
            return Ok(best.candidate.clone());
        }
        if let Some(beyond) = &found.beyond_limits {
            let cost = beyond.cost.map_or(String::new(), |cost| format!(" and costs {cost:.2}"));
            let message = format!(
                "no layout meets --deadline and --max-cost: the fastest, {}, takes {}{cost}",
                beyond.candidate,
                crate::simulate::duration(beyond.run_seconds)
            );
            return Err(Failure::usage(message, "allow more, or change -n, the device or the length of the run"));
        }
        if let Some(miss) = &found.nearest {
            // A limit is about what the job holds, a device's memory about that and its reserve.
            let reserved = if self.limits.memory.is_some() { 0.0 } else { miss.memory.reserved };
            let miss = &NearMiss { memory: DeviceMemory { reserved, ..miss.memory }, ..miss.clone() };
            let kinds: Vec<String> = memory_kinds(&miss.memory)
                .into_iter()
                .filter(|(_, bytes)| *bytes >= 1.0)
                .map(|(name, bytes)| format!("{name} {}", format_bytes(bytes as u64)))
                .collect();
            let limit = self.limits.memory.unwrap_or(f64::INFINITY).min(self.cluster.device.memory_bytes);
            let message = format!(
                "no layout of {} devices fits into {}: the nearest, {}, needs {} ({})",
                self.devices,
                format_bytes(limit as u64),
                miss.candidate,
                format_bytes(miss.memory.total() as u64),
                kinds.join(", ")
            );
            return Err(Failure::usage(message, memory_hint(miss)));
        }
        let why = found.refusals.first().map_or(String::new(), |why| format!(": {}", why.replace('\n', " ")));
        let message = format!("no layout of the job is possible on {} devices{why}", self.devices);
        Err(Failure::usage(message, "use a number of devices that is a power of two, or another batch"))
    }

    /// The job's own layout, with its memory as an executor lays it out, if one does.
    fn show_own(&self, own: Candidate, planned: Option<DeviceMemory>, args: &PlanArgs) -> Result<(), Failure> {
        let hint = "change `[parallel]` or -n, or add --search";
        let model = self.models.model(&own, &self.cluster);
        let model = model.map_err(|why| Failure::usage(format!("the layout {own} is not possible: {why}"), hint))?;
        let mut ranked = simulated(own.clone(), &model, &self.cluster, &self.limits)
            .ok_or_else(|| Failure::usage(format!("the layout {own} has no schedule"), hint))?;
        ranked.memory = planned.unwrap_or(ranked.memory);
        let found = SearchResult { ranked: vec![ranked], candidates: 1, ..SearchResult::default() };
        if args.json {
            let mut value = json::value(self, &found);
            if args.why {
                value["why"] = why::value(self, &own)?;
            }
            println!("{value:#}");
            return Ok(());
        }
        table::print(self, &found);
        if args.why { why::print(self, &own) } else { Ok(()) }
    }

    /// Puts a layout into the job file, whose other text stays. The name of the file:
    fn write(&self, args: &PlanArgs, kinds: &Kinds, best: &Candidate) -> Result<String, Failure> {
        let Some(path) = &args.job.job else { return Ok(String::new()) };
        let name = path.shown().to_string();
        let text = kolo_base::open_regular(path)
            .and_then(std::io::read_to_string)
            .map_err(|error| Failure::job(format!("{name}: {error}"), "name a file that can be read"))?;
        let change = |(section, key, value)| KeyChange { section, key, value };
        let precision = self.precision.key(self.job).map(|(section, key, value)| (section, key, Some(value)));
        let changes: Vec<KeyChange<'_>> = best.keys().into_iter().chain(precision).map(change).collect();
        let text = with_keys(&text, &name, &changes)?;
        // What is written must be a job.
        let root = job_file::parse(&text, &name)?;
        kinds.read(&root)?;
        write_file(path, text)?;
        Ok(name)
    }
}
