//! A simulation as people read it.

use super::Simulation;
use super::weeks::Weeks;
use crate::output::println;
use crate::plan::text::separated;
use kolo_plan::failures::IntervalBasis;
use kolo_plan::search::explain::memory_kinds;
use kolo_plan::simulate::picture::ScalingPoint;
use kolo_train::machine::{format_bytes, format_duration};
use std::time::Duration;

/// `12.3 ms`, `3 d 04 h`.
pub fn duration(seconds: f64) -> String {
    format_duration(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX))
}

pub fn print(simulation: &Simulation) {
    let Simulation { title, step, model, cluster, .. } = simulation;
    println!("{title}");
    println!("  layout            {}", simulation.candidate);
    let samples = model.layout.batch() as f64 / step.seconds;
    println!(
        "  one step          {} for {} samples, {samples:.4} samples/s",
        duration(step.seconds),
        model.layout.batch()
    );
    let part = |name: &str, seconds: f64| {
        println!("    {name:<15} {:<11} {:.1} %", duration(seconds), 100.0 * seconds / step.seconds);
    };
    part("compute", step.compute);
    for (axis, seconds) in step.exposed.iter().filter(|(_, seconds)| **seconds > 0.0) {
        part(axis, *seconds);
    }
    if step.bubble > 1e-9 * step.seconds {
        part("waiting", step.bubble);
    }
    println!("  utilisation       {:.1} % of the peak (MFU)", 100.0 * step.utilisation);
    if let Some(role) = model.largest() {
        let kinds: Vec<String> = memory_kinds(&role.memory)
            .into_iter()
            .filter(|(_, bytes)| *bytes >= 1.0)
            .map(|(name, bytes)| format!("{name} {}", format_bytes(bytes as u64)))
            .collect();
        let (used, all) = (role.memory.total(), cluster.device.memory_bytes);
        let fits = if used <= all { "" } else { ", which does not fit" };
        println!(
            "  memory            {} of {}{fits}: {}",
            format_bytes(used as u64),
            format_bytes(all as u64),
            kinds.join(", ")
        );
    }
    println!(
        "  simulated         {} ranks in {} roles, {} events",
        separated(model.layout.workers() as u64),
        step.scenario.scripts.len(),
        separated(step.outcome.events)
    );
    print_scaling("weak scaling, the batch grows with the devices", &simulation.weak);
    print_scaling("strong scaling, the same batch", &simulation.strong);
    if let Some(weeks) = &simulation.weeks {
        print_weeks(weeks);
    }
}

fn print_scaling(title: &str, points: &[ScalingPoint]) {
    if points.len() < 2 {
        return;
    }
    println!("{title}");
    println!("  devices           step        efficiency  utilisation");
    for ScalingPoint { devices, seconds, efficiency, utilisation } in points {
        println!(
            "  {:<17} {:<11} {:<11} {:.1} %",
            separated(*devices as u64),
            duration(*seconds),
            format!("{:.1} %", 100.0 * efficiency),
            100.0 * utilisation
        );
    }
}

fn print_weeks(weeks: &Weeks) {
    let Weeks { outcome, spec, best, .. } = weeks;
    println!("{} with failures, seed {}", duration(spec.horizon), spec.seed);
    let kinds: Vec<String> = outcome.failures.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
    let kinds = if kinds.is_empty() { String::new() } else { format!(": {}", kinds.join(", ")) };
    println!("  failures          {}{kinds}; {:.1} expected", outcome.failure_count(), spec.expected_failures());
    println!("  goodput           {:.2} % of an undisturbed run", 100.0 * outcome.goodput());
    println!("  availability      {:.2} %", 100.0 * outcome.availability());
    let parts = [
        ("computed and lost", outcome.lost),
        ("checkpoints", outcome.checkpoints),
        ("restarting", outcome.restarting),
        ("waiting", outcome.waiting),
        ("missing devices", outcome.slowed),
    ];
    for (name, seconds) in parts.into_iter().filter(|(_, seconds)| *seconds > 0.0) {
        println!("    {name:<17} {:<13} {:.2} %", duration(seconds), 100.0 * seconds / spec.horizon);
    }
    let chosen = if weeks.interval_is_best { "the best" } else { "as asked" };
    if spec.interval.is_finite() {
        let held_up = duration(spec.checkpoint);
        println!(
            "  checkpoint        every {}, {chosen}; each holds the job up for {held_up}",
            duration(spec.interval)
        );
    }
    if let Some(best) = best {
        // The formula knows restarts, but nobody who waits for a repair or goes on with fewer devices.
        let unknown = if outcome.waiting + outcome.slowed > 0.0 { ", waiting for repairs left out" } else { "" };
        println!(
            "  best interval     {} ({:.2} % goodput by formula{unknown}; Young {}, Daly {}), from {}",
            duration(best.seconds),
            100.0 * best.efficiency,
            duration(best.young),
            duration(best.daly),
            basis(best.basis)
        );
    }
}

/// What an interval was found from, in words.
pub fn basis(basis: IntervalBasis) -> String {
    match basis {
        IntervalBasis::Rates => "the rates of failure".into(),
        IntervalBasis::Gaps(count) => format!("{} simulated times between failures", separated(count as u64)),
        IntervalBasis::Expected => "the number of failures that is expected".into(),
    }
}
