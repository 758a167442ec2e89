//! `kolo plan --calibrate`: a device entry that agrees with what a run measured.

use crate::fail::{Failure, write_file};
use crate::output::println;
use kolo_plan::device::{Device, DeviceTable, Precision};
use kolo_plan::device_bench::as_toml;
use kolo_plan::link::Link;
use serde_json::Value;
use std::path::Path;

/// The entry's name, and the link that workers of one host are planned with.
const NAME: &str = "this-machine";
const LINK: &str = "shared-memory";
/// How the report names what was waited for along an axis.
const EXCHANGES: &str = "exchanges along ";
/// A report that says more than this was wrong by is about another machine, or none.
const RATIO_MAX: f64 = 1000.0;

/// Reads a run's report and writes the device whose rates would have given its computing time.
pub fn calibrate(report: &Path, entry: Option<&Path>) -> Result<(), Failure> {
    let wrong = |message: String| {
        let hint = "name a report that `kolo train --report` of this version wrote";
        Failure::usage(format!("{}: {message}", report.display()), hint)
    };
    let text = std::fs::read_to_string(report).map_err(|error| wrong(error.to_string()))?;
    let value: Value = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let number = |pointer: &str| {
        let found = value.pointer(pointer).and_then(Value::as_f64).filter(|number| *number > 0.0 && number.is_finite());
        found.ok_or_else(|| {
            wrong(format!("`{}` is no number above 0", pointer.trim_start_matches('/').replace('/', ".")))
        })
    };
    let parts = value.get("compared").and_then(Value::as_array).into_iter().flatten();
    let mut parts = parts.filter(|part| part.get("part").and_then(Value::as_str) == Some("compute"));
    let compute = parts.next();
    let measured = compute.and_then(|part| part.get("measured")).and_then(Value::as_f64);
    let measured = measured.filter(|ms| *ms > 0.0).ok_or_else(|| wrong("it compares no computing time".into()))?;
    let ratio = measured / number("/planned/compute_ms")?;
    if !(1.0 / RATIO_MAX..=RATIO_MAX).contains(&ratio) {
        return Err(wrong(format!("computing took {ratio:.1} times as long as was planned")));
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
    println!("computing took {ratio:.2} times as long as was planned");
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

/// Says what a cluster file would have to say of the links for exchanges to take what they took.
fn tell_links(report: &Value) {
    let rows = report.get("compared").and_then(Value::as_array).into_iter().flatten();
    let of = |row: &Value, key: &str| row.get(key).and_then(Value::as_f64).unwrap_or(0.0);
    let exchanges = rows.filter(|row| row.get("part").and_then(Value::as_str).is_some_and(|part| part.starts_with(EXCHANGES)));
    let (planned, measured) =
        exchanges.fold((0.0, 0.0), |(planned, measured), row| (planned + of(row, "planned"), measured + of(row, "measured")));
    let ratio = measured / planned;
    let links = Link::built_in().unwrap_or_default();
    let Some(known) = links.iter().find(|link| link.name == LINK).filter(|_| ratio.is_finite() && ratio > 0.0) else {
        return;
    };
    println!("exchanges took {ratio:.2} times as long as was planned; for a cluster file:");
    println!("[links.{LINK}]\nbandwidth_gbs = {:.3}\n", known.bandwidth / ratio / 1e9);
}
