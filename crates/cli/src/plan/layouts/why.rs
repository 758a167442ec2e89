//! `--why`: the roofline of a step, and the changes that would help most.

use super::Described;
use crate::fail::Failure;
use crate::output::println;
use crate::simulate::duration;
use kolo_plan::search::changes::changes;
use kolo_plan::search::rank::simulated;
use kolo_plan::search::{Candidate, LayoutModels};
use kolo_plan::step_model::{Compute, Pass, StepModel};
use std::collections::BTreeMap;

/// Changes that are named.
const CHANGES_SHOWN: usize = 3;

pub fn print(described: &Described<'_>, now: &Candidate) -> Result<(), Failure> {
    let model =
        described.models.model(now, &described.cluster).map_err(|why| Failure::usage(why, "change the layout"))?;
    print_roofline(described, &model);
    let space = described.models.space(described.devices);
    let list = changes(now, &space, &described.models, &described.cluster);
    println!("changes that would help most");
    if list.is_empty() {
        println!("  none: no single change of the layout is faster");
    }
    for change in list.iter().take(CHANGES_SHOWN) {
        let fits = if change.fits { "" } else { "; it does not fit into memory" };
        println!("  {:>5.1} % less: {}, {} per step{fits}", 100.0 * change.gain, change.what, duration(change.seconds));
        if !change.set.is_empty() {
            let set: Vec<String> = change.set.iter().map(|one| format!("--set {one}")).collect();
            println!("              {}", set.join(" "));
        }
    }
    if let Some(step) = simulated(*now, &model, &described.cluster, &described.limits) {
        println!("  the step takes {} at {:.1} % of the peak", duration(step.seconds), 100.0 * step.utilisation);
    }
    Ok(())
}

/// Seconds of a micro-batch on the busiest place of the pipeline, by pass and by what binds them.
fn print_roofline(described: &Described<'_>, model: &StepModel) {
    let device = &described.cluster.device;
    let ridge = device.peak(model.layout.precision) / device.bandwidth;
    println!(
        "roofline of {}: {:.1} TFLOP/s, {:.0} GB/s; below {ridge:.0} FLOP per byte memory binds",
        device.name,
        device.peak(model.layout.precision) / 1e12,
        device.bandwidth / 1e9
    );
    println!("                    arithmetic  memory      overhead    network     per step");
    let times = model.layout.micro_batches as f64;
    let rows: [(&str, fn(&kolo_plan::step_model::StageModel) -> &Pass); 3] = [
        ("forward", |stage| &stage.forward),
        ("input gradient", |stage| &stage.input),
        ("weight gradient", |stage| &stage.weight),
    ];
    let ranks = model.roles.len().max(1) as f64;
    let mut all = (Compute::default(), 0.0);
    let mut axes: BTreeMap<String, f64> = BTreeMap::new();
    for (name, pass) in rows {
        let mut compute = Compute::default();
        let mut exposed = 0.0;
        for stage in &model.stages {
            let pass = pass(stage);
            compute.add(&pass.compute.times(times / ranks));
            for one in &pass.exchanges {
                exposed += one.exposed * times / ranks;
                *axes.entry(one.axis.clone()).or_default() += one.exposed * times / ranks;
            }
        }
        print_row(name, &compute, exposed);
        all.0.add(&compute);
        all.1 += exposed;
    }
    let mut update = Compute::default();
    let mut after = 0.0;
    for role in &model.roles {
        update.add(&role.update.times(1.0 / ranks));
        after += role.after.iter().map(|one| one.exposed).sum::<f64>() / ranks;
    }
    print_row("update", &update, after);
    all.0.add(&update);
    print_row("all", &all.0, all.1 + after);
    for (axis, seconds) in axes.into_iter().filter(|(_, seconds)| *seconds > 0.0) {
        println!("  along {axis:<11} {} of the network's part", duration(seconds));
    }
}

fn print_row(name: &str, compute: &Compute, exposed: f64) {
    let total = compute.seconds() + exposed;
    let share = |part: f64| if total > 0.0 { format!("{:.1} %", 100.0 * part / total) } else { "-".into() };
    println!(
        "  {name:<17} {:<11} {:<11} {:<11} {:<11} {}",
        share(compute.product),
        share(compute.stream),
        share(compute.overhead),
        share(exposed),
        duration(total)
    );
}
