//! Ranked layouts as a table, with why the runner-up lost and what binds.

use super::Described;
use crate::output::println;
use crate::plan::text::separated;
use crate::simulate::duration;
use kolo_plan::search::explain::{binding, memory_kinds, overlap_range, why_slower};
use kolo_plan::search::fitting::{FittingLayout, layouts_that_fit};
use kolo_plan::search::{LayoutModels, Ranked, SearchResult};
use kolo_train::machine::format_bytes;
use kolo_train::step_model::{PlannedPrecision, PrecisionSource};

/// Shares below this are not named.
const SHARE_SHOWN: f64 = 0.005;

pub(super) fn print(described: &Described<'_>, found: &SearchResult) {
    let Described { job, cluster, devices, seconds, .. } = described;
    println!("{} on {} × {}", job.name, separated(*devices as u64), cluster.device.name);
    println!("  precision         {}", precision(described));
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
            marked(described, one)
        );
    }
    if found.ranked.iter().any(|one| changes_bits(described, one)) {
        println!("  * other grains, slices or shares of tokens than the job's: other weights, in their last bits");
    }
    if let Some(best) = found.ranked.first() {
        print_best(described, found, best);
    }
}

/// What is computed in, and who says so.
fn precision(described: &Described<'_>) -> String {
    let PlannedPrecision { precision, said_by } = described.precision;
    let name = precision.name();
    match said_by {
        PrecisionSource::Job => format!("{name}, as the job says"),
        PrecisionSource::System => format!("{name}, as the cluster's `system.precision` says"),
        PrecisionSource::Device if described.precision.key(described.job).is_none() => name.into(),
        PrecisionSource::Device => format!(
            "{name}, usual on {}: the job does not say it, and trains in {} without `--set train.precision={name}`",
            described.cluster.device.name,
            described.job.precision.name()
        ),
    }
}

fn cost(value: f64) -> String {
    let cents = (value * 100.0).round() as u64;
    format!("{}.{:02}", separated(cents / 100), cents % 100)
}

/// A layout, with a mark if it gives other weights than the job promises.
fn marked(described: &Described<'_>, one: &Ranked) -> String {
    format!("{}{}", one.candidate, if changes_bits(described, one) { " *" } else { "" })
}

/// Whether a job that promises its bits has others in this layout.
pub(super) fn changes_bits(described: &Described<'_>, one: &Ranked) -> bool {
    let own = described.models.own(described.devices);
    described.job.reproducible && own.is_ok_and(|own| !one.candidate.has_bits_of(&own))
}

/// Layouts that would fit in place of one that does not.
fn print_fitting(described: &Described<'_>, best: &Ranked) {
    let space = described.models.space(described.devices);
    let found = layouts_that_fit(&best.candidate, &space, &described.models, &described.cluster, &described.limits);
    for line in fitting_lines(&found) {
        println!("  {line}");
    }
}

/// What would fit, line by line.
pub fn fitting_lines(found: &[FittingLayout]) -> Vec<String> {
    if found.is_empty() {
        return vec![
            "would fit         no layout of these devices: use more of them, or a smaller batch or model".into(),
        ];
    }
    let line = |(at, one): (usize, &FittingLayout)| {
        let set: Vec<String> = one.set.iter().map(|one| format!("--set '{one}'")).collect();
        let (bytes, seconds) = (format_bytes(one.bytes as u64), duration(one.seconds));
        format!("{:<17} {bytes}, {seconds} per step: {}", if at == 0 { "would fit" } else { "" }, set.join(" "))
    };
    found.iter().enumerate().map(line).collect()
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
    let reserved = best.memory.reserved;
    if reserved > 0.0 {
        println!(
            "  reserved          {} of it, for the context, collectives and holes: `reserved_gib` of the device or of `[system]`",
            format_bytes(reserved as u64)
        );
    }
    if best.memory.total() > all {
        print_fitting(described, best);
    }
    if let Ok(model) = described.models.model(&best.candidate, &described.cluster) {
        let shares = binding(&model, best);
        let shares = shares.iter().filter(|(_, share)| *share >= SHARE_SHOWN);
        let shares: Vec<String> = shares.map(|(name, share)| format!("{name} {:.0} %", 100.0 * share)).collect();
        println!("  binds             {}", shares.join(", "));
    }
    let range = overlap_range(&best.candidate, &described.models, &described.cluster);
    if let Some([all, none]) = range.filter(|[all, none]| none / all - 1.0 >= SHARE_SHOWN) {
        println!(
            "  overlap           {} per step if every exchange that other work can hide were hidden, {} if none were",
            duration(all),
            duration(none)
        );
    }
    if let Some(second) = found.ranked.get(1) {
        println!("  runner-up         {}: {}", marked(described, second), why_slower(best, second));
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
        let precision = described.precision.key(described.job).map(|(section, key, value)| (section, key, Some(value)));
        let set = keys.chain(precision).filter_map(assignment).map(|one| format!("--set {}", word(one)));
        let set: Vec<String> = set.collect();
        println!("  to use it         {}", set.join(" "));
    }
}
