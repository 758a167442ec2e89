//! `kolo plan --calibrate`: a device entry that agrees with what a run measured.

use crate::described;
use crate::fail::{Failure, write_file};
use crate::output::println;
use kolo_base::ShownPath;
use kolo_parallel::axes::PIPELINE;
use kolo_plan::device::{Device, PeerLink, Precision};
use kolo_plan::device_bench::as_toml;
use serde_json::Value;
use std::path::Path;

/// The entry's name.
const NAME: &str = "this-machine";
/// Memory of a host that does not say how much it has.
const HOST_BYTES: f64 = 16.0 * (1u64 << 30) as f64;
/// The share of a step that exchanges have to take.
const TOLD_MIN: f64 = 0.01;
const REPORT_BYTES_MAX: u64 = 256 << 20;
/// A report that says more than this was wrong by is about another machine, or none.
const RATIO_MAX: f64 = 1000.0;

/// Reads a run's report and writes the device on which the model of its step would have computed and exchanged for as long.
pub fn calibrate(report: &Path, entry: Option<&Path>) -> Result<(), Failure> {
    let wrong = |message: String| {
        let hint = "name a report written by `kolo train --report` of this version";
        Failure::usage(format!("{}: {message}", report.shown()), hint)
    };
    let text = kolo_base::read_regular(report, REPORT_BYTES_MAX).map_err(|error| wrong(error.to_string()))?;
    let value: Value = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
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
    let measured = measured.filter(|ms| *ms > 0.0).ok_or_else(|| wrong("it compares no computing time".into()))?;
    let planned = number("/planned/compute_ms")?;
    let ratio = measured / number("/planned/model/compute_ms")?;
    if !(1.0 / RATIO_MAX..=RATIO_MAX).contains(&ratio) {
        return Err(wrong(format!("computing took {ratio:.1} times as long as planned")));
    }
    let workers = value.pointer("/communication/ranks").and_then(Value::as_array).map_or(1, |ranks| ranks.len().max(1));
    let host_bytes = kolo_train::memory_check::host_bytes().map_or(HOST_BYTES, |bytes| bytes as f64);
    let mut peak = [0.0; Precision::ALL.len()];
    peak[Precision::F32 as usize] = number("/planned/model/flops_per_s")? / ratio;
    let bandwidth = number("/planned/model/bytes_per_s")? / ratio;
    let (waited, peers) = peers(&value)?;
    // All rates of the device that the run was planned on, by the same factor: the model of its step then takes what it took.
    let device = Device {
        name: NAME.into(),
        doc: format!("calibrated on a run of {workers} workers"),
        peak,
        memory_bytes: host_bytes / workers as f64,
        reserved_bytes: Device::usual_reserve(host_bytes / workers as f64, true),
        bandwidth,
        product_share: 1.0,
        stream_share: 1.0,
        launch: number("/planned/model/launch_us")? * ratio / 1e6,
        host_bandwidth: bandwidth,
        units: 1,
        tile: [1, 1],
        price_per_hour: None,
        peers: Some(peers),
        fitted_on: Some(format!("{}: {measured:.3} ms of computing", report.shown())),
    };
    println!("computing took {:.2} times as long as planned", measured / planned);
    if let Some(waited) = waited {
        println!("exchanges were waited for {waited:.2} times as long as planned");
    }
    match entry {
        Some(path) => {
            write_file(path, as_toml(&device))?;
            println!("wrote [{NAME}] to {}; use it with --device {}", path.shown(), path.shown());
        }
        None => println!("{}", as_toml(&device)),
    }
    Ok(())
}

/// How many times as long as planned the mean rank waited for exchanges, and the link over which the plan would have said so.
/// Exchanges that hardly take time say nothing of links.
fn peers(report: &Value) -> Result<(Option<f64>, PeerLink), Failure> {
    let waits = |value: Option<&Value>| -> f64 {
        let axes = value.and_then(Value::as_object).into_iter().flatten();
        axes.filter(|(axis, _)| *axis != PIPELINE).filter_map(|(_, wait)| wait.as_f64()).sum()
    };
    let step = report.pointer("/step_ms/median").and_then(Value::as_f64).unwrap_or(f64::INFINITY);
    let ranks = report.pointer("/communication/ranks").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let measured = ranks.iter().map(|rank| waits(rank.get("waited_ms"))).sum::<f64>() / ranks.len().max(1) as f64;
    let planned = waits(report.pointer("/planned/model/waits_ms"));
    let known = described::shared_memory()?;
    if !(planned.min(measured) > TOLD_MIN * step) {
        return Ok((None, known));
    }
    let ratio = measured / planned;
    let PeerLink { bandwidth, latency } = known;
    Ok((Some(ratio), PeerLink { bandwidth: bandwidth / ratio, latency: latency * ratio }))
}
