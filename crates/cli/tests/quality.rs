//! Every example job reaches the quality that the top of its file states, in a run through the binary.
//!
//! The jobs take turns: each wants all cores, and its time is measured.

use serde_json::Value;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

static TURN: Mutex<()> = Mutex::new(());

/// Trains `examples/NAME.toml` with these overrides; `metric` must reach `least`.
fn reaches(name: &str, overrides: &[&str], metric: &str, least: f64) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().expect("a directory");
    let report = dir.path().join("report.json");
    let begin = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_kolo"))
        .args(["train", "--quiet", "--report"])
        .arg(&report)
        .arg(format!("{}/../../examples/{name}.toml", env!("CARGO_MANIFEST_DIR")))
        .args(overrides.iter().flat_map(|assignment| ["--set", assignment]))
        .output()
        .expect("the binary runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_str(&std::fs::read_to_string(report).expect("a report")).expect("JSON");
    let value = report["metrics"][metric].as_f64().unwrap_or(f64::NAN);
    println!("{name} {overrides:?}: {metric} {value:.4} after {:.1} s", begin.elapsed().as_secs_f64());
    assert!(value >= least, "{name} {overrides:?}: {metric} is {value}, not {least}");
}

#[test]
fn digits() {
    reaches("digits", &[], "accuracy", 0.98);
}

#[test]
fn playground() {
    reaches("playground", &[], "accuracy", 0.97);
    for shape in ["circle", "xor", "gauss"] {
        reaches("playground", &[&format!("data.shape={shape}")], "accuracy", 0.97);
    }
}

#[test]
fn addition() {
    reaches("addition", &[], "exact_match", 0.99);
}

#[test]
fn waves() {
    reaches("waves", &[], "gain", 20.0);
}

#[test]
fn cifar_like() {
    reaches("cifar-like", &[], "accuracy", 0.95);
}
