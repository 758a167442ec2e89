//! Ranked layouts as a table, with why the runner-up lost and what binds.

use super::Described;
use crate::output::println;
use crate::plan::text::separated;
use crate::simulate::duration;
use kolo_plan::search::explain::{binding, memory_kinds, why_slower};
use kolo_plan::search::{LayoutModels, Ranked, SearchResult};
use kolo_train::machine::format_bytes;

/// Shares below this are not named.
const SHARE_SHOWN: f64 = 0.005;

pub fn print(described: &Described<'_>, found: &SearchResult) {
    let Described { job, cluster, devices, seconds, .. } = described;
    println!("{} on {} × {}", job.name, separated(*devices as u64), cluster.device.name);
    if found.candidates > 1 {
        println!(
            "  {} layouts: {} do not fit, {} were timed, in {seconds:.1} s",
            separated(found.candidates as u64),
            separated(found.too_large as u64),
            separated(found.timed as u64)
        );
    }
    println!("  step       compute    exchanges  waiting    MFU     memory     run        cost        layout");
    for one in &found.ranked {
        let exchanges: f64 = one.exposed.values().sum();
        println!(
            "  {:<10} {:<10} {:<10} {:<10} {:<7} {:<10} {:<10} {:<11} {}",
            duration(one.seconds),
            duration(one.compute),
            duration(exchanges),
            duration(one.bubble),
            format!("{:.1} %", 100.0 * one.utilisation),
            format_bytes(one.memory.total() as u64),
            duration(one.run_seconds),
            one.cost.map_or("-".into(), cost),
            one.candidate
        );
    }
    if let Some(best) = found.ranked.first() {
        print_best(described, found, best);
    }
}

fn cost(value: f64) -> String {
    let cents = (value * 100.0).round() as u64;
    format!("{}.{:02}", separated(cents / 100), cents % 100)
}

fn print_best(described: &Described<'_>, found: &SearchResult, best: &Ranked) {
    let kinds: Vec<String> = memory_kinds(&best.memory)
        .into_iter()
        .filter(|(_, bytes)| *bytes >= 1.0)
        .map(|(name, bytes)| format!("{name} {}", format_bytes(bytes as u64)))
        .collect();
    let all = described.cluster.device.memory_bytes;
    let fits = if best.memory.total() <= all { "" } else { ", which does not fit" };
    println!(
        "  memory            {} of {}{fits}: {}",
        format_bytes(best.memory.total() as u64),
        format_bytes(all as u64),
        kinds.join(", ")
    );
    if let Ok(model) = described.models.model(&best.candidate, &described.cluster) {
        let shares = binding(&model, best);
        let shares = shares.iter().filter(|(_, share)| *share >= SHARE_SHOWN);
        let shares: Vec<String> = shares.map(|(name, share)| format!("{name} {:.0} %", 100.0 * share)).collect();
        println!("  binds             {}", shares.join(", "));
    }
    if let Some(second) = found.ranked.get(1) {
        println!("  runner-up         {}: {}", second.candidate, why_slower(best, second));
    }
    if let Some(more) = &found.with_more_memory {
        println!(
            "  more memory       {} of memory would allow {} per step: {}",
            format_bytes(more.memory.total() as u64),
            duration(more.seconds),
            more.candidate
        );
    }
    if found.candidates > 1 {
        let keys = best.candidate.keys().into_iter();
        // A shell takes what has spaces apart.
        let word = |value: String| if value.contains(' ') { format!("'{value}'") } else { value };
        let assignment =
            |(section, key, value): (&str, &str, Option<String>)| Some(format!("{section}.{key}={}", value?));
        let set: Vec<String> = keys.filter_map(assignment).map(|one| format!("--set {}", word(one))).collect();
        println!("  to use it         {}", set.join(" "));
    }
}
