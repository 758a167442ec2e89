//! `kolo plan`: what a job will cost, before anything is allocated.

use crate::args::Plan;
use crate::fail::Failure;
use crate::output::println;
use crate::{load, workers};
use kolo_exec::Options;
use kolo_models::ModelKind;
use kolo_parallel::Mesh;
use kolo_plan::{Cost, Fleet, Rates, RunCost};
use kolo_train::Job;
use kolo_train::machine::{format_bytes, format_count};
use kolo_train::room::{self, Shortage, Tenants};
use kolo_train::step::{optimise, spread, training_graph};
use kolo_train::trainer::evaluation_bytes;
use serde_json::json;

/// Everything the plan says.
struct Prediction {
    cost: Cost,
    rates: Rates,
    step_seconds: f64,
    run: RunCost,
    samples: f64,
    epochs: f64,
    fleet: Fleet,
    /// If it does not fit into this machine.
    shortage: Option<Shortage>,
}

pub fn plan(models: &[ModelKind], args: &Plan) -> Result<(), Failure> {
    let by_host = workers::asked_by_host(&args.job.workers)?;
    let workers = by_host.iter().sum();
    let job = load::job(models, &args.job, workers)?;
    // Every host is taken to be like this one.
    let crowd = by_host.into_iter().max().unwrap_or(1);
    let threads = match args.job.threads {
        None => (load::threads(&args.job)? / crowd).max(1),
        Some(_) => load::threads(&args.job)?,
    };
    check(args)?;
    let mut prediction = predict(&job, workers, threads, args)?;
    let memory = &prediction.cost.memory;
    prediction.shortage = room::shortage(memory, Tenants::alike(memory, crowd, job.parallel.central));
    if args.json {
        println!("{}", as_json(&job, &prediction));
    } else {
        print(&job, threads, &prediction);
    }
    Ok(())
}

/// Refuses flags that would make the run's cost no number.
fn check(args: &Plan) -> Result<(), Failure> {
    if !(args.utilisation > 0.0 && args.utilisation <= 1.0) {
        return Err(Failure::usage("--utilisation is a part of the peak", "give a number above 0, up to 1"));
    }
    let positive = [
        ("--samples", args.samples),
        ("--epochs", args.epochs),
        ("--devices", Some(args.devices as f64)),
        ("--tflops", args.tflops),
        ("--price", args.price),
    ];
    for (flag, value) in positive {
        if let Some(value) = value.filter(|value| !(value.is_finite() && *value > 0.0)) {
            return Err(Failure::usage(format!("{flag} {value} describes no run"), "give a number above 0"));
        }
    }
    Ok(())
}

fn predict(job: &Job, workers: usize, threads: usize, args: &Plan) -> Result<Prediction, Failure> {
    let graph = training_graph(&*job.model, &job.optimizer, job.clip, job.grain_batch(), job.grains)?;
    // With several workers, the plan is that of the first: its grains, its share of the optimizer.
    let mesh = Mesh::data(workers, 0).expect("there is a first worker");
    let graph = spread(&optimise(&graph), &job.parallel, &mesh);
    let options = Options::for_grains(job.grains / workers, threads);
    let mut cost = kolo_plan::cost(&graph, options);
    cost.memory.evaluation = evaluation_bytes(job, threads, 0, workers)?;
    let rates = Rates::measure();
    // The update happens once per step, not per sample: over a whole run it is part of what a sample costs.
    let per_sample = cost.flops.total() as f64 * workers as f64 / job.batch as f64;
    let samples = args.samples.unwrap_or(job.split.train_len() as f64);
    let epochs = args.epochs.unwrap_or(job.total_steps as f64 / job.steps_per_epoch as f64);
    Ok(Prediction {
        step_seconds: kolo_plan::predict_seconds(&graph, options, &rates),
        run: RunCost::new(per_sample, job.input_bytes_per_sample() as f64, samples, epochs),
        samples,
        epochs,
        fleet: Fleet {
            devices: args.devices,
            flops: args.tflops.map_or(rates.flops * threads as f64, |tera| tera * 1e12),
            utilisation: args.utilisation,
            price_per_hour: args.price,
        },
        cost,
        rates,
        shortage: None,
    })
}

fn print(job: &Job, threads: usize, p: &Prediction) {
    let Cost { flops, product_flops, bytes, memory, .. } = &p.cost;
    let forward_macs = product_flops.forward as f64 / 2.0 / job.batch as f64;
    println!("{}", job.name);
    println!("  parameters        {}", p.cost.parameters);
    println!("  forward           {} multiply-adds per sample", format_count(forward_macs as u64));
    println!("per step of {} samples in {} grains", job.batch, job.grains);
    println!("                    forward     backward    update");
    let row = |name: &str, f: &dyn Fn(u64) -> String, v: &kolo_plan::ByStage| {
        println!("  {name:<17} {:<11} {:<11} {}", f(v.forward), f(v.backward), f(v.update));
    };
    row("FLOP", &format_count, flops);
    row("bytes moved", &format_bytes, bytes);
    let size = |bytes: usize| format_bytes(bytes as u64);
    println!("  memory            {} in all", size(memory.total()));
    for (name, bytes) in [
        ("weights", memory.weights),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("scratch", memory.scratch),
        ("evaluation", memory.evaluation),
    ] {
        println!("    {name:<15} {}", size(bytes));
    }
    if let Some(shortage) = &p.shortage {
        println!("  does not fit      {} on a host, and {shortage}", format_bytes(shortage.needed));
    }
    println!(
        "  time              {:.2} ms on {threads} threads of {:.0} GFLOP/s and {:.1} GB/s (measured now)",
        p.step_seconds * 1e3,
        p.rates.flops / 1e9,
        p.rates.bytes / 1e9
    );
    println!("the whole run: {} samples x {:.1} epochs", format_count(p.samples as u64), p.epochs);
    println!("  FLOP              {:.3e} ({:.3e} PFLOP-days)", p.run.flops, p.run.pflop_days);
    println!("  per input byte    {} FLOP", format_count(p.run.flops_per_input_byte as u64));
    let fleet = &p.fleet;
    println!(
        "  time              {} on {} x {:.3} TFLOP/s at {:.0} % of the peak",
        days(p.run.days(fleet)),
        fleet.devices,
        fleet.flops / 1e12,
        fleet.utilisation * 100.0
    );
    if let Some(price) = p.run.price(fleet) {
        println!("  cost              {price:.2}");
    }
}

fn days(days: f64) -> String {
    match days {
        days if days >= 1.0 => format!("{days:.2} days"),
        days if days * 24.0 >= 1.0 => format!("{:.2} hours", days * 24.0),
        days => format!("{:.1} seconds", days * 86_400.0),
    }
}

fn as_json(job: &Job, p: &Prediction) -> String {
    let by_stage = |v: &kolo_plan::ByStage| json!({"forward": v.forward, "backward": v.backward, "update": v.update});
    let m = &p.cost.memory;
    let value = json!({
        "job": job.name,
        "parameters": p.cost.parameters,
        "forward_macs_per_sample": p.cost.product_flops.forward as f64 / 2.0 / job.batch as f64,
        "flops": by_stage(&p.cost.flops),
        "bytes": by_stage(&p.cost.bytes),
        "memory": {
            "weights": m.weights, "gradients": m.gradients, "optimizer": m.optimizer,
            "activations": m.activations, "scratch": m.scratch, "evaluation": m.evaluation, "total": m.total(),
            "fits": p.shortage.is_none(),
        },
        "step_ms": p.step_seconds * 1e3,
        "rates": {"flops": p.rates.flops, "bytes": p.rates.bytes},
        "run": {
            "samples": p.samples, "epochs": p.epochs, "flops": p.run.flops, "pflop_days": p.run.pflop_days,
            "flops_per_input_byte": p.run.flops_per_input_byte, "devices": p.fleet.devices,
            "days": p.run.days(&p.fleet), "cost": p.run.price(&p.fleet),
        },
    });
    format!("{value:#}")
}
