//! The plan as people read it: three digits and a unit, whole counts with separators, and whose numbers they are.

use super::{Prediction, forward_macs};
use crate::output::println;
use kolo_exec::Offload;
use kolo_plan::{ByStage, Cost, MemoryPlan};
use kolo_train::Job;
use kolo_train::machine::{format_bytes, format_count, format_duration};
use kolo_train::rate_scaling::RateScaling;
use std::time::Duration;

const SECONDS_PER_YEAR: f64 = 365.25 * super::SECONDS_PER_DAY;

pub(super) fn print(title: &str, job: &Job, p: &Prediction) {
    let Cost { flops, bytes, memory, parameters, .. } = &p.cost;
    let workers = p.setup.workers;
    println!("{title}");
    println!("  parameters        {}", parameter_count(*parameters as u64));
    println!("  forward           {} multiply-adds per sample", format_count(forward_macs(job, p) as u64));
    if let Some(base_batch) = job.rate.base_batch {
        let RateScaling { scaling, base, rate, .. } = job.rate;
        println!("  learning rate     {rate} for a batch of {}: {base} for {base_batch}, {scaling}", job.batch);
    }
    println!("{}", step_title(job, workers));
    println!("                    forward     backward    update");
    let scopes: &[(&str, u64)] =
        if workers == 1 { &[("", 1)] } else { &[(", per worker", 1), (", all workers", workers as u64)] };
    for (scope, times) in scopes {
        print_stages(&format!("FLOP{scope}"), *times, &format_count, flops);
        print_stages(&format!("bytes{scope}"), *times, &format_bytes, bytes);
    }
    print_memory(memory, workers, p.all_bytes);
    if let Some(device) = &p.device {
        print_device_memory(device, job);
    }
    if let Some(shared) = &p.shared {
        shared.print();
    }
    if !job.parallel.recompute().is_nothing() {
        println!(
            "  recompute         {}: some of the backward pass's FLOP are the forward pass's again",
            job.parallel.recompute().name()
        );
    }
    if let Some(shortage) = &p.shortage {
        println!("  does not fit      {} on a host, and {shortage}", format_bytes(shortage.needed));
    }
    print_time(p);
    if let Some(cost) = &p.grain_cost {
        println!("  note: {cost}");
    }
    print_run(p);
}

fn step_title(job: &Job, workers: usize) -> String {
    let data = job.parallel.data_ranks(workers).unwrap_or(workers);
    let whole = format!("per step of {} samples in {} grains", separated(job.batch as u64), job.grains);
    match workers {
        1 => whole,
        _ => format!(
            "{whole}; each of {workers} workers has {} samples in {} grains",
            separated((job.batch / data) as u64),
            job.grains / data
        ),
    }
}

fn print_stages(name: &str, times: u64, format: &dyn Fn(u64) -> String, stages: &ByStage) {
    let [forward, backward, update] =
        [stages.forward, stages.backward, stages.update].map(|value| format(value * times));
    println!("  {name:<17} {forward:<11} {backward:<11} {update}");
}

fn print_memory(memory: &MemoryPlan, workers: usize, all_bytes: u64) {
    let size = |bytes: usize| format_bytes(bytes as u64);
    match workers {
        1 => println!("  memory            {} in all", size(memory.total())),
        _ => println!(
            "  memory            {} per worker, {} for all {workers} workers",
            size(memory.total()),
            format_bytes(all_bytes)
        ),
    }
    for (name, bytes) in [
        ("weights", memory.weights),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("scratch", memory.scratch),
        ("evaluation", memory.evaluation),
        ("data", memory.data),
        ("checkpoint", memory.checkpoint),
        ("process", memory.process),
    ] {
        println!("    {name:<15} {}", size(bytes));
    }
}

/// What a worker holds in the memory of its GPU.
fn print_device_memory(memory: &MemoryPlan, job: &Job) {
    println!("  GPU memory        {} per worker", format_bytes(memory.total() as u64));
    for (name, bytes) in [
        ("weights", memory.weights),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("scratch", memory.scratch),
        ("evaluation", memory.evaluation),
    ] {
        println!("    {name:<15} {}", format_bytes(bytes as u64));
    }
    let how = match job.memory.offload {
        Offload::None => return,
        Offload::Optimizer => "kept and updated in the host's memory",
        Offload::Weights => {
            "kept and updated in the host's memory, as is the optimizer's state; layers come while they are used"
        }
    };
    println!("  offload           {}: {how}", job.memory.offload.name());
}

/// The time of a step, and how it was found.
fn print_time(p: &Prediction) {
    let (workers, threads) = (p.setup.workers, p.setup.threads);
    let threads = format!("{threads} thread{}", if threads == 1 { "" } else { "s" });
    let who = if workers == 1 { threads } else { format!("{workers} workers of {threads}") };
    let time = seconds(p.step_seconds());
    match &p.measured {
        Some(tried) if tried.whole_steps > 0 => {
            println!("  time              {time} on {who}, measured on {} steps here", tried.whole_steps);
        }
        Some(tried) => {
            println!("  time              {time} on {who}, measured on its {} kinds of calls here", tried.kinds);
        }
        None => println!(
            "  time              {time} on {who} of {}/s and {:.1} GB/s, by these rates alone",
            flop(p.rates.flops),
            p.rates.bytes / 1e9
        ),
    }
    if let Some(tried) = p.measured.filter(|tried| tried.data_wait_seconds() > 0.01 * tried.step_seconds()) {
        let [wait, all] = [tried.data_wait_seconds(), tried.data_seconds].map(seconds);
        println!("                    {wait} of it waiting for data: a batch takes {all} to make");
    }
    if let Some(tried) = p.measured.filter(|_| workers > 1) {
        let [compute, exchange] = [tried.compute_seconds, tried.exchange_seconds].map(seconds);
        match p.hosts {
            1 => println!("                    {compute} compute, {exchange} exchange, per worker"),
            _ => println!("                    compute only: the network between the hosts is unknown here"),
        }
    }
}

fn print_run(p: &Prediction) {
    println!("the whole run: {} samples x {:.1} epochs", format_count(p.samples as u64), p.epochs);
    println!("  FLOP              {} ({})", flop(p.run.flops), pflop_days(p.run.pflop_days));
    println!("  per input byte    {}", flop(p.run.flops_per_input_byte));
    let (fleet, time) = (&p.fleet, seconds(p.days() * super::SECONDS_PER_DAY));
    match p.elsewhere {
        true => println!(
            "  time              {time} on {} x {}/s at {:.0} % of the peak",
            separated(fleet.devices as u64),
            flop(fleet.flops),
            fleet.utilisation * 100.0
        ),
        false => println!("  time              {time}: {} steps of that time", separated(p.steps as u64)),
    }
    if let Some(price) = p.price() {
        let cents = (price * 100.0).round() as u64;
        println!("  cost              {}.{:02}", separated(cents / 100), cents % 100);
    }
}

/// `26,122`, or `60.2 M (60,192,808)`.
fn parameter_count(count: u64) -> String {
    if count < 1_000_000 { separated(count) } else { format!("{} ({})", format_count(count), separated(count)) }
}

/// `1,234,567`.
pub fn separated(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `999 FLOP`, `3.20 TFLOP`, `314 ZFLOP`.
fn flop(count: f64) -> String {
    const UNITS: [&str; 9] = ["", "k", "M", "G", "T", "P", "E", "Z", "Y"];
    let (mut value, mut unit) = (count, 0);
    while value >= 999.5 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1e3, unit + 1);
    }
    format!("{} {}FLOP", if unit == 0 { format!("{value:.0}") } else { digits(value) }, UNITS[unit])
}

/// Three significant digits.
fn digits(value: f64) -> String {
    match value {
        _ if value < 9.995 => format!("{value:.2}"),
        _ if value < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

fn pflop_days(days: f64) -> String {
    match days {
        _ if days < 0.005 => "less than 0.01 PFLOP-days".into(),
        _ if days < 1e6 => format!("{} PFLOP-days", digits(days)),
        _ => format!("{} PFLOP-days", separated(days as u64)),
    }
}

/// `12.3 ms`, `2 min 05 s`, `3 d 04 h`, `12.5 years`.
fn seconds(seconds: f64) -> String {
    match seconds {
        _ if seconds < SECONDS_PER_YEAR => format_duration(Duration::from_secs_f64(seconds.max(0.0))),
        _ => format!("{} years", digits(seconds / SECONDS_PER_YEAR)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_for_people() {
        assert_eq!([0, 999, 1000, 26_122, 1_234_567].map(separated), ["0", "999", "1,000", "26,122", "1,234,567"]);
        assert_eq!([26_122, 60_192_808].map(parameter_count), ["26,122", "60.2 M (60,192,808)"]);
        let shown = [0.0, 999.0, 999.6, 3.2e12, 3.14e23, 1e30].map(flop);
        assert_eq!(shown, ["0 FLOP", "999 FLOP", "1.00 kFLOP", "3.20 TFLOP", "314 ZFLOP", "1000000 YFLOP"]);
        let shown = [0.0123, 125.0, 4e8, 1e300].map(seconds);
        assert_eq!(shown[..3], ["12.3 ms", "2 min 05 s", "12.7 years"]);
        assert!(shown[3].ends_with(" years"));
        let shown = [1e-9, 0.012, 3640.0, 2e7].map(pflop_days);
        let expected = ["less than 0.01 PFLOP-days", "0.01 PFLOP-days", "3640 PFLOP-days", "20,000,000 PFLOP-days"];
        assert_eq!(shown, expected);
    }
}
