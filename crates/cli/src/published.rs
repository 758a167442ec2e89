//! `kolo bench published`: what the model of cost says of results that others have published, beside those results.
//!
//! A folder holds `rows.toml`, and the job and cluster files that its rows name. Those of bench/published are part of the program.

use crate::args::BenchPublished;
use crate::clusters::PUBLISHED;
use crate::fail::{Failure, write_file};
use crate::load::Kinds;
use crate::output::{self, println};
use kolo_config::FileKind;
use kolo_graph::settings::{SettingError, Settings};
use kolo_plan::cluster::Cluster;
use kolo_plan::device::DeviceTable;
use kolo_plan::simulate::{Conditions, simulate_step};
use kolo_plan::step_model::{StepModel, StepTimes};
use kolo_train::job_file;
use kolo_train::step_model::{AnatomyCache, anatomy_on, step_model};
use serde_json::{Value, json};
use std::path::Path;

const ROWS_FILE: FileKind = FileKind {
    noun: "list of published rows",
    missing: "name a folder with a file `rows.toml`, such as bench/published",
    too_large: "keep a row to its settings",
};
const CLUSTER_FILE: FileKind = FileKind {
    noun: "cluster file",
    missing: "check the path in `rows.toml`",
    too_large: "a cluster file describes a device and a few levels of links",
};
const JOB_FILE: FileKind = FileKind {
    noun: "job file",
    missing: "check the path in `rows.toml`",
    too_large: "a job file describes a model and its data",
};
const GIB: f64 = (1u64 << 30) as f64;

/// A published result.
struct Row {
    name: String,
    /// The share that was fitted is not predicted.
    fitted: bool,
    devices: usize,
    set: Vec<String>,
    cluster: String,
    job: String,
    result: Published,
    memory_gib: Option<f64>,
}

/// What was published of a row's speed.
enum Published {
    StepSeconds(f64),
    /// Tokens, or samples where there are none, per second and device.
    PerDevice(f64),
    /// The share of so many times the speed of one device.
    Efficiency(f64),
}

/// A row with what the model says of it.
struct Outcome {
    row: Row,
    device: String,
    /// Seconds of a step as it is simulated.
    simulated: f64,
    model: StepModel,
    times: StepTimes,
    published: f64,
    predicted: f64,
}

impl Outcome {
    fn error(&self) -> f64 {
        self.predicted / self.published - 1.0
    }

    fn memory_gib(&self) -> f64 {
        self.model.largest().map_or(0.0, |role| role.memory.total() / GIB)
    }

    fn memory_error(&self) -> Option<f64> {
        self.row.memory_gib.map(|published| self.memory_gib() / published - 1.0)
    }
}

pub fn published(kinds: &Kinds, args: &BenchPublished) -> Result<(), Failure> {
    let folder = Folder(args.folder.as_deref());
    let root = folder.read("rows.toml", &ROWS_FILE)?;
    let rows = root.tables("row", "[[row]]")?.iter().map(read_row).collect::<Result<Vec<_>, _>>()?;
    root.finish()?;
    let wanted = |row: &Row| args.only.iter().all(|part| row.name.contains(part.as_str()));
    let rows: Vec<Row> = rows.into_iter().filter(wanted).collect();
    if rows.is_empty() && !args.only.is_empty() {
        let message = format!("--only {}: no row has that in its name", args.only.join(" --only "));
        return Err(Failure::usage(message, "leave it out to see the names of all rows"));
    }
    let mut outcomes = Vec::new();
    print_head();
    for row in rows {
        // Whoever stops here keeps what is there.
        let one = outcome(kinds, &folder, row)?;
        print_row(&one, args.explain);
        output::flush();
        outcomes.push(one);
    }
    print_errors(&outcomes);
    match &args.report {
        Some(path) => write_file(path, format!("{:#}\n", as_json(&outcomes))),
        None => Ok(()),
    }
}

fn read_row(section: &Settings) -> Result<Row, SettingError> {
    let positive = |key: &str| -> Result<Option<f64>, SettingError> {
        let value = section.float(key, 0.0)?;
        match section.has(key) {
            true if !(value > 0.0) => Err(section.wrong(key, format!("is {value}"), "write a number above 0")),
            written => Ok(written.then_some(value)),
        }
    };
    let results = [
        positive("step_seconds")?.map(Published::StepSeconds),
        positive("per_second_and_device")?.map(Published::PerDevice),
        positive("efficiency")?.map(Published::Efficiency),
    ];
    let mut results = results.into_iter().flatten();
    let (Some(result), None) = (results.next(), results.next()) else {
        let hint = "write one of `step_seconds`, `per_second_and_device` and `efficiency`";
        return Err(section.wrong("name", "does not have exactly one result", hint));
    };
    let row = Row {
        name: section.text("name", "")?,
        fitted: section.bool("fitted", false)?,
        devices: section.count("devices", 1, 1)?,
        set: section.texts("set", "[\"model.layers=24\"]")?,
        cluster: section.text("cluster", "")?,
        job: section.text("job", "")?,
        result,
        memory_gib: positive("memory_gib")?,
    };
    section.finish()?;
    Ok(row)
}

/// Where the files lie: in a folder, or in the program.
struct Folder<'a>(Option<&'a Path>);

impl Folder<'_> {
    fn read(&self, name: &str, kind: &FileKind) -> Result<Settings, Failure> {
        if let Some(folder) = self.0 {
            return Ok(kolo_config::read(&folder.join(name), kind)?);
        }
        let stem = name.strip_suffix(".toml").unwrap_or(name);
        let file = PUBLISHED.iter().find(|file| file.name == stem);
        let file = file.ok_or_else(|| Failure::usage(format!("{name} is no built-in {}", kind.noun), kind.missing))?;
        Ok(kolo_config::parse(file.text, &format!("the built-in {name}"))?)
    }
}

fn outcome(kinds: &Kinds, folder: &Folder<'_>, row: Row) -> Result<Outcome, Failure> {
    let mut root = folder.read(&row.job, &JOB_FILE)?;
    row.set.iter().try_for_each(|assignment| job_file::override_with(&mut root, assignment))?;
    let job = kinds.read(&root)?;
    let described = folder.read(&row.cluster, &CLUSTER_FILE)?;
    let cluster = Cluster::read(&described, &DeviceTable::built_in()?)?;
    let mut cache = AnatomyCache::default();
    let model = step_model(&job, row.devices, &cluster, &mut cache)?;
    let times = model.times().map_err(|error| Failure::usage(error.to_string(), "see docs/schedules.md"))?;
    let samples = model.layout.batch() as f64;
    let counted = samples * job.model.tokens_per_sample().unwrap_or(1) as f64;
    let (published, predicted) = match row.result {
        Published::StepSeconds(seconds) => (seconds, times.seconds),
        Published::PerDevice(rate) => (rate, counted / times.seconds / row.devices as f64),
        Published::Efficiency(share) => {
            let mut alone = model.layout.clone();
            alone.axes.iter_mut().for_each(|(_, size)| *size = 1);
            let anatomy = anatomy_on(&job, &alone, &cluster, &mut cache)?;
            let one = kolo_plan::compose(&anatomy, &alone, &cluster)
                .map_err(|refusal| Failure::usage(refusal.message, &refusal.hint))?;
            let one = one.times().map_err(|error| Failure::usage(error.to_string(), "see docs/schedules.md"))?;
            (share, one.seconds / times.seconds)
        }
    };
    let simulated = simulate_step(&model, &cluster, &Conditions::default())
        .map_err(|error| Failure::job(error.to_string(), "see docs/simulation.md"))?
        .seconds;
    Ok(Outcome { row, device: cluster.device.name, simulated, model, times, published, predicted })
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let at = values.len().checked_sub(1)? / 2;
    Some((values[at] + values[values.len() / 2]) / 2.0)
}

fn print_head() {
    println!(
        "{:<44} {:>7} {:>10} {:>10} {:>8} {:>6} {:>9} {:>9} {:>8}",
        "row", "devices", "published", "predicted", "error", "MFU", "GiB publ.", "predicted", "error"
    );
}

fn print_row(one: &Outcome, explain: bool) {
    let memory = one.row.memory_gib.map_or_else(String::new, |memory| format!("{memory:.1}"));
    let memory_error = one.memory_error().map_or_else(String::new, |error| format!("{:+.1} %", error * 100.0));
    let name = format!("{}{}", one.row.name, if one.row.fitted { " (fitted)" } else { "" });
    println!(
        "{name:<44} {:>7} {:>10.3} {:>10.3} {:>6.1} % {:>5.1}% {memory:>9} {:>9.1} {memory_error:>8}",
        one.row.devices,
        one.published,
        one.predicted,
        one.error() * 100.0,
        one.times.utilisation * 100.0,
        one.memory_gib(),
    );
    if explain {
        explain_row(one);
    }
}

fn print_errors(outcomes: &[Outcome]) {
    let free = || outcomes.iter().filter(|one| !one.row.fitted);
    if let Some(error) = median(free().map(|one| one.error().abs()).collect()) {
        println!("median error of what was not fitted: {:.1} % of {} rows", error * 100.0, free().count());
    }
    let memory: Vec<f64> = outcomes.iter().filter_map(Outcome::memory_error).map(f64::abs).collect();
    let count = memory.len();
    if let Some(error) = median(memory) {
        println!("median error of memory: {:.1} % of {count} rows", error * 100.0);
    }
}

fn explain_row(one: &Outcome) {
    let StepTimes { seconds, compute, exposed, bubble, update, .. } = &one.times;
    let share = |part: f64| format!("{:.3} s ({:.1} %)", part, part / seconds * 100.0);
    println!(
        "    step {seconds:.3} s: compute {}, bubble {}, update {}",
        share(*compute),
        share(*bubble),
        share(*update)
    );
    for (axis, waited) in exposed {
        println!("    waits for {axis}: {}", share(*waited));
    }
    for role in &one.model.roles {
        let m = &role.memory;
        let [weights, gradients, optimizer, activations, transient, reserved] =
            [m.weights, m.gradients, m.optimizer, m.activations, m.transient, m.reserved].map(|bytes| bytes / GIB);
        println!(
            "    place {}: {:.3e} parameters; GiB: weights {weights:.2}, gradients {gradients:.2}, optimizer {optimizer:.2}, activations {activations:.2}, transient {transient:.2}, reserved {reserved:.2}",
            role.place, role.parameters
        );
    }
    for (number, stage) in one.model.stages.iter().enumerate().take(2) {
        for (name, pass) in [("forward", &stage.forward), ("input", &stage.input), ("weight", &stage.weight)] {
            let c = &pass.compute;
            println!(
                "    stage {number} {name}: product {:.2} ms, stream {:.2} ms, overhead {:.2} ms, exposed {:.2} ms, {:.3e} FLOP",
                c.product * 1e3,
                c.stream * 1e3,
                c.overhead * 1e3,
                pass.exposed() * 1e3,
                c.flops
            );
        }
    }
}

fn as_json(outcomes: &[Outcome]) -> Value {
    let row = |one: &Outcome| {
        json!({
            "row": one.row.name, "devices": one.row.devices, "device": one.device, "fitted": one.row.fitted, "published": one.published,
            "predicted": one.predicted, "error": one.error(), "step_ms": one.times.seconds * 1e3, "simulated_ms": one.simulated * 1e3,
            "utilisation": one.times.utilisation, "bubble_ms": one.times.bubble * 1e3,
            "memory_gib": one.memory_gib(), "memory_gib_published": one.row.memory_gib,
        })
    };
    Value::Array(outcomes.iter().map(row).collect())
}
