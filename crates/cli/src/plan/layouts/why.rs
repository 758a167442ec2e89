//! `--why`: the roofline of a step, and the changes that would help most.

use super::Described;
use crate::fail::Failure;
use crate::output::println;
use crate::simulate::duration;
use kolo_plan::search::changes::{Change, changes};
use kolo_plan::search::rank::simulated;
use kolo_plan::search::{Candidate, LayoutModels};
use kolo_plan::step_model::{Compute, Pass, StepModel};
use kolo_plan::{Bound, OpKindCost};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Changes, and kinds of ops, that are named.
const CHANGES_SHOWN: usize = 3;
const KINDS_SHOWN: usize = 10;

pub fn print(described: &Described<'_>, now: &Candidate) -> Result<(), Failure> {
    let model =
        described.models.model(now, &described.cluster).map_err(|why| Failure::usage(why, "change the layout"))?;
    print_kinds(described, now, &model);
    print_passes(&model);
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
    if let Some(step) = simulated(now.clone(), &model, &described.cluster, &described.limits) {
        println!("  the step takes {} at {:.1} % of the peak", duration(step.seconds), 100.0 * step.utilisation);
    }
    Ok(())
}

/// The same as JSON.
pub fn value(described: &Described<'_>, now: &Candidate) -> Result<Value, Failure> {
    let model =
        described.models.model(now, &described.cluster).map_err(|why| Failure::usage(why, "change the layout"))?;
    let kinds = described.models.op_kinds(now, &model, &described.cluster);
    let kind = |kind: &OpKindCost| {
        json!({
            "op": kind.name, "ms": kind.seconds() * 1e3, "bound_by": kind.bound().name(),
            "flops": kind.compute.flops, "bytes": kind.bytes,
        })
    };
    let space = described.models.space(described.devices);
    let list = changes(now, &space, &described.models, &described.cluster);
    let change = |change: &Change| {
        let Change { what, set, seconds, gain, fits } = change;
        json!({ "what": what, "set": set, "step_ms": seconds * 1e3, "gain": gain, "fits": fits })
    };
    Ok(json!({
        "ops": kinds.iter().map(kind).collect::<Vec<_>>(),
        "changes": list.iter().take(CHANGES_SHOWN).map(change).collect::<Vec<_>>(),
    }))
}

/// Kinds of ops with what binds each, on the mean rank: the roofline.
fn print_kinds(described: &Described<'_>, now: &Candidate, model: &StepModel) {
    let device = &described.cluster.device;
    let peak = device.peak(model.layout.precision);
    println!(
        "roofline of {}: {:.1} TFLOP/s, {:.0} GB/s; below {:.0} FLOP per byte memory binds",
        device.name,
        peak / 1e12,
        device.bandwidth / 1e9,
        peak / device.bandwidth
    );
    let kinds = described.models.op_kinds(now, model, &described.cluster);
    let total: f64 = kinds.iter().map(OpKindCost::seconds).sum();
    println!("  op                          per step    share    bound by    FLOP/byte  of the peak");
    for kind in kinds.iter().take(KINDS_SHOWN) {
        let number = |value: f64, unit: &str| match value.is_finite() && value > 0.0 {
            true => format!("{value:.1}{unit}"),
            false => "-".into(),
        };
        println!(
            "  {:<27} {:<11} {:<8} {:<11} {:<10} {}",
            kind.name,
            duration(kind.seconds()),
            format!("{:.1} %", 100.0 * kind.seconds() / total),
            kind.bound().name(),
            number(kind.compute.flops / kind.bytes, ""),
            number(100.0 * kind.compute.flops / kind.seconds() / peak, " %")
        );
    }
    if kinds.len() > KINDS_SHOWN {
        let rest: f64 = kinds[KINDS_SHOWN..].iter().map(OpKindCost::seconds).sum();
        println!(
            "  {:<27} {:<11} {:.1} %",
            format!("{} others", kinds.len() - KINDS_SHOWN),
            duration(rest),
            100.0 * rest / total
        );
    }
    let share = |bound: Bound| -> f64 {
        // An empty sum of floats is -0.
        kinds.iter().filter(|kind| kind.bound() == bound).map(OpKindCost::seconds).fold(0.0, |sum, one| sum + one)
            / total
    };
    let shares = Bound::ALL.map(|bound| format!("{} {:.1} %", bound.name(), 100.0 * share(bound)));
    println!("  time of ops by what binds them: {}", shares.join(", "));
}

/// Passes by what binds them, on the mean rank.
fn print_passes(model: &StepModel) {
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
