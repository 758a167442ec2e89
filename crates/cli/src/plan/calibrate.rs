//! `kolo plan --calibrate`: a device entry that agrees with what a run measured.

use crate::fail::{Failure, write_file};
use crate::output::println;
use kolo_parallel::axes::PIPELINE;
use kolo_plan::device::{Device, DeviceTable, Precision};
use kolo_plan::device_bench::as_toml;
use kolo_plan::link::Link;
use serde_json::Value;
use std::path::Path;

/// The entry's name, and the link that workers of one host are planned with.
const NAME: &str = "this-machine";
const LINK: &str = "shared-memory";
/// The share of a step that exchanges have to take.
const TOLD_MIN: f64 = 0.01;
/// A report that says more than this was wrong by is about another machine, or none.
const RATIO_MAX: f64 = 1000.0;

/// Reads a run's report and writes the device whose rates would have given its computing time.
pub fn calibrate(report: &Path, entry: Option<&Path>) -> Result<(), Failure> {
    let wrong = |message: String| {
        let hint = "name a report written by `kolo train --report` of this version";
        Failure::usage(format!("{}: {message}", report.display()), hint)
    };
    let text = std::fs::read_to_string(report).map_err(|error| wrong(error.to_string()))?;
    let value: Value = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let number = |pointer: &str| {
        let found = value.pointer(pointer).and_then(Value::as_f64).filter(|number| *number > 0.0 && number.is_finite());
        found.ok_or_else(|| {
            wrong(format!("`{}` is not a number above 0", pointer.trim_start_matches('/').replace('/', ".")))
        })
    };
    let parts = value.get("compared").and_then(Value::as_array).into_iter().flatten();
    let mut parts = parts.filter(|part| part.get("part").and_then(Value::as_str) == Some("compute"));
    let compute = parts.next();
    let measured = compute.and_then(|part| part.get("measured")).and_then(Value::as_f64);
    let measured =
        measured.filter(|ms| *ms > 0.0).ok_or_else(|| wrong("it has no planned and measured computing time".into()))?;
    let ratio = measured / number("/planned/compute_ms")?;
    if !(1.0 / RATIO_MAX..=RATIO_MAX).contains(&ratio) {
        return Err(wrong(format!("computing took {ratio:.1} times as long as planned")));
    }
    let threads = number("/threads")?;
    let base = DeviceTable::built_in()?;
    let known = base.find("cpu-core").map_err(|hint| Failure::usage("no entry of a CPU core", &hint))?;
    let mut peak = [0.0; Precision::ALL.len()];
    peak[Precision::F32 as usize] = number("/planned/flops_per_s")? * threads / ratio;
    let device = Device {
        name: NAME.into(),
        doc: "calibrated on a run".into(),
        peak,
        memory_bytes: kolo_train::memory_check::host_bytes().map_or(known.memory_bytes, |bytes| bytes as f64),
        bandwidth: number("/planned/bytes_per_s")? * threads / ratio,
        product_share: 1.0,
        stream_share: 1.0,
        fitted_on: Some(format!("{}: {measured:.3} ms of computing", report.display())),
        ..known.clone()
    };
    println!("computing took {ratio:.2} times as long as planned");
    tell_links(&value);
    match entry {
        Some(path) => {
            write_file(path, as_toml(&device))?;
            println!("wrote [{NAME}] to {}", path.display());
        }
        None => println!("{}", as_toml(&device)),
    }
    Ok(())
}

/// Says what a cluster file would have to say of the links for exchanges to take what they took, on the mean rank. Exchanges that
/// hardly take time say nothing of links.
fn tell_links(report: &Value) {
    let waits = |value: Option<&Value>| -> f64 {
        let axes = value.and_then(Value::as_object).into_iter().flatten();
        axes.filter(|(axis, _)| *axis != PIPELINE).filter_map(|(_, wait)| wait.as_f64()).sum()
    };
    let step = report.pointer("/step_ms/median").and_then(Value::as_f64).unwrap_or(f64::INFINITY);
    let ranks = report.pointer("/communication/ranks").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let measured = ranks.iter().map(|rank| waits(rank.get("waited_ms"))).sum::<f64>() / ranks.len().max(1) as f64;
    let planned = waits(report.pointer("/planned/waits_ms"));
    let links = Link::built_in().unwrap_or_default();
    let Some(known) = links.iter().find(|link| link.name == LINK).filter(|_| planned.min(measured) > TOLD_MIN * step)
    else {
        return;
    };
    let ratio = measured / planned;
    println!("waiting for exchanges took {ratio:.2} times as long as planned; for a cluster file:");
    println!("[links.{LINK}]\nbandwidth_gbs = {:.3}\n", known.bandwidth / ratio / 1e9);
}
