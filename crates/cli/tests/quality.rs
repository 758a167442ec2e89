//! Every example job reaches the quality that the top of its file states, in a run through the binary; so do the smallest jobs,
//! which name a model and a source and nothing else, for what docs/guide.md states. Those that take long are cut here, and run as
//! they are by `cargo test --release -p kolo --test quality -- --include-ignored`.
//!
//! The jobs take turns: each wants all cores, and its time is measured.

use serde_json::Value;
use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;

static TURN: Mutex<()> = Mutex::new(());

/// Trains `examples/NAME.toml` with these overrides; `metric` must reach `least`.
fn reaches(name: &str, overrides: &[&str], metric: &str, least: f64) -> Value {
    let example = format!("{}/../../examples/{name}.toml", env!("CARGO_MANIFEST_DIR"));
    let job = std::fs::read_to_string(example).expect("an example");
    learns(name, &job, overrides, metric, least)
}

/// Trains a job that names a model and a source only.
fn smallest(kind: &str, source: &str, overrides: &[&str], metric: &str, least: f64) {
    let job = format!("[model]\nkind = \"{kind}\"\n[data]\nsource = \"{source}\"\n");
    learns(&format!("{kind} on {source}"), &job, overrides, metric, least);
}

/// The report of a run whose `metric` reaches `least`.
fn learns(name: &str, job: &str, overrides: &[&str], metric: &str, least: f64) -> Value {
    let _turn = kolo_base::lock(&TURN);
    let dir = tempfile::tempdir().expect("a directory");
    let (report, file) = (dir.path().join("report.json"), dir.path().join("job.toml"));
    std::fs::write(&file, job).expect("a job file");
    let begin = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_kolo"))
        .current_dir(dir.path())
        .args(["train", "--quiet", "--report"])
        .arg(&report)
        .arg(file)
        .args(overrides.iter().flat_map(|assignment| ["--set", assignment]))
        .output()
        .expect("the binary runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_str(&std::fs::read_to_string(report).expect("a report")).expect("JSON");
    let value = report["metrics"][metric].as_f64().unwrap_or(f64::NAN);
    println!("{name} {overrides:?}: {metric} {value:.4} after {:.1} s", begin.elapsed().as_secs_f64());
    assert!(value >= least, "{name} {overrides:?}: {metric} is {value}, not {least}");
    report
}

/// With the weights whose digest the documents print: `kolo train` without a job trains this one.
#[test]
fn digits() {
    let report = reaches("digits", &[], "accuracy", 0.98);
    let weights = report["weights"].as_str().expect("a digest");
    let documents =
        [("README.md", include_str!("../../../README.md")), ("docs/guide.md", include_str!("../../../docs/guide.md"))];
    for (name, text) in documents {
        let lines = text.lines().filter_map(|line| line.strip_prefix("  weights     "));
        let printed: Vec<&str> = lines.filter(|line| line.starts_with("blake3:")).collect();
        assert_eq!(printed, [weights], "the digests in {name}");
    }
}

/// In half precision as in f32.
#[test]
fn halves() {
    reaches("digits", &["train.precision=bf16", "train.epochs=8"], "accuracy", 0.97);
    reaches("digits", &["train.precision=f16", "train.epochs=4"], "accuracy", 0.93);
}

#[test]
fn playground() {
    reaches("playground", &[], "accuracy", 0.97);
}

#[test]
fn addition() {
    reaches("addition", &[], "exact_match", 0.99);
}

#[test]
fn waves() {
    reaches("waves", &["train.steps=700"], "gain", 10.0);
}

/// With a quarter of the channels.
#[test]
fn cifar_like() {
    reaches("cifar-like", &["model.width=16"], "accuracy", 0.85);
}

#[test]
fn the_smallest_jobs() {
    smallest("mlp", "builtin:digits", &[], "accuracy", 0.93);
    smallest("cnn", "builtin:digits", &[], "accuracy", 0.93);
    smallest("mlp", "builtin:playground", &[], "accuracy", 0.97);
    smallest("lstm", "builtin:waves", &[], "gain", 4.0);
}

#[test]
#[ignore = "takes minutes"]
fn whole_examples() {
    reaches("digits", &["train.precision=bf16", "train.epochs=12"], "accuracy", 0.98);
    reaches("digits", &["train.precision=f16", "train.epochs=6"], "accuracy", 0.95);
    for shape in ["circle", "xor", "gauss"] {
        reaches("playground", &[&format!("data.shape={shape}")], "accuracy", 0.97);
    }
    reaches("waves", &[], "gain", 20.0);
    reaches("cifar-like", &[], "accuracy", 0.95);
}

#[test]
#[ignore = "takes minutes"]
fn the_smallest_gpt() {
    smallest("gpt", "builtin:addition", &[], "accuracy", 0.99);
    smallest("gpt", "builtin:addition", &["train.precision=bf16", "train.epochs=2"], "accuracy", 0.95);
}
