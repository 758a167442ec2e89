//! Simulations, the search and what they write, from outside.

use crate::{json_at, run_in, stdout_of, tempdir};
use serde_json::Value;
use std::path::Path;

const CLUSTER: &str = "name = \"pod\"\ndevice = \"h100-80\"\n[[level]]\ncount = 8\nlink = \"nvlink4\"\n[[level]]\ncount = 128\nlink = \"infiniband-ndr\"\n\
                       [failures]\ndevice_mtbf_hours = 20000\nhost_mtbf_hours = 30000\nrestart_seconds = 200\n";

/// A small GPT with a comment that must stay.
const JOB: &str = "# a small one\n[model]\nkind = \"gpt\"\nlayers = 8\nwidth = 64\nheads = 4\ncontext = 32\nvocab = 128 # words\n\n\
                   [data]\nsource = \"synthetic:tokens\"\nbatch = 64\ngrains = 16\n\n[train]\nsteps = 2\n\n[parallel]\nslices = 4\n";

fn files(dir: &Path) {
    std::fs::write(dir.join("job.toml"), JOB).expect("written");
    std::fs::write(dir.join("cluster.toml"), CLUSTER).expect("written");
}

fn simulated(dir: &Path, more: &[&str]) -> Value {
    let mut args = vec!["simulate", "job.toml", "--cluster", "cluster.toml", "-n", "64", "--json", "out.json"];
    args.extend(more);
    stdout_of(dir, &args);
    json_at(&dir.join("out.json"))
}

const SPLIT: [&str; 4] = ["--set", "parallel.pipeline=2", "--set", "parallel.tensor=4"];

#[test]
fn a_simulation_adds_up_and_replays() {
    let dir = tempdir();
    files(dir.path());
    let args = [&SPLIT[..], &["--weeks", "3", "--svg", "a.svg", "--trace", "a.json", "--seed", "5"]].concat();
    let first = simulated(dir.path(), &args);
    assert_eq!(first, simulated(dir.path(), &args), "a seed replays it");
    let number = |value: &Value| value.as_f64().expect("a number");
    let exposed: f64 = first["exposed_ms"].as_object().expect("axes").values().map(number).sum();
    let parts = number(&first["compute_ms"]) + number(&first["waiting_ms"]) + exposed;
    assert!((parts / number(&first["step_ms"]) - 1.0).abs() < 1e-6, "{first:#}");
    assert_eq!(
        (&first["layout"]["data"], &first["layout"]["tensor"], &first["roles"]),
        (&8.into(), &4.into(), &2.into())
    );
    let run = &first["run"];
    assert!(number(&run["goodput"]) < 1.0 && number(&run["expected_failures"]) > 1.0, "{run:#}");
    let svg = std::fs::read_to_string(dir.path().join("a.svg")).expect("a picture");
    assert!(svg.starts_with("<svg") && svg.contains("Weak scaling") && svg.contains("goodput"));
    let trace = json_at(&dir.path().join("a.json"));
    let events = trace["traceEvents"].as_array().expect("events");
    assert!(events.iter().any(|event| event["name"] == "all_reduce" && event["cat"] == "communication"));
    let other = [&SPLIT[..], &["--weeks", "3", "--seed", "6"]].concat();
    assert_ne!(simulated(dir.path(), &other)["run"]["failures"], Value::Null);
    // A slow rank delays the step, noise too.
    let slow = simulated(dir.path(), &[&SPLIT[..], &["--slow", "3:2"]].concat());
    assert!(number(&slow["step_ms"]) > 1.2 * number(&first["step_ms"]));
    let noisy = simulated(dir.path(), &[&SPLIT[..], &["--noise", "0.05"]].concat());
    assert!(number(&noisy["step_ms"]) > number(&first["step_ms"]));
}

#[test]
fn layouts_that_the_search_names_are_trained() {
    let dir = tempdir();
    files(dir.path());
    let search = ["plan", "job.toml", "-n", "4", "--device", "cpu-core", "--search"];
    let found: Value =
        serde_json::from_str(&stdout_of(dir.path(), &[&search[..], &["--json"]].concat())).expect("JSON");
    let layouts = found["layouts"].as_array().expect("layouts");
    assert!(layouts.len() > 3, "{found:#}");
    for layout in layouts.iter().take(3) {
        let mut args = vec!["train", "job.toml", "-n", "4", "--threads", "1", "--quiet", "--no-out"];
        let set: Vec<&str> = layout["set"].as_array().expect("keys").iter().filter_map(Value::as_str).collect();
        set.iter().for_each(|one| args.extend(["--set", one]));
        stdout_of(dir.path(), &args);
    }
    let text = stdout_of(dir.path(), &[&search[..], &["--write", "--why"]].concat());
    assert!(text.contains("runner-up") && text.contains("roofline") && text.contains("wrote job.toml"), "{text}");
    let written = std::fs::read_to_string(dir.path().join("job.toml")).expect("a job");
    assert!(written.starts_with("# a small one\n") && written.contains("vocab = 128 # words"), "{written}");
    stdout_of(dir.path(), &["train", "job.toml", "-n", "4", "--threads", "1", "--quiet", "--no-out"]);
}

#[test]
fn auto_gives_the_weights_of_the_job() {
    let dir = tempdir();
    files(dir.path());
    let digest = |more: &[&str]| {
        let args = [&["train", "job.toml", "--quiet", "--no-out", "--report", "r.json"], more].concat();
        stdout_of(dir.path(), &args);
        json_at(&dir.path().join("r.json"))["weights"].clone()
    };
    assert_eq!(digest(&[]), digest(&["-n", "2", "--auto"]));
}

#[test]
fn what_no_layout_can_keep_to_is_said() {
    let dir = tempdir();
    files(dir.path());
    let refused = |more: &[&str]| {
        let base = ["plan", "job.toml", "-n", "8", "--cluster", "cluster.toml", "--search"];
        let output = run_in(dir.path(), &[&base[..], more].concat());
        assert_eq!(output.status.code(), Some(2), "{more:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(refused(&["--max-memory", "1MB"]).contains("no layout of 8 devices fits into 977 KiB: the nearest"));
    assert!(refused(&["--deadline", "1e-9"]).contains("no layout meets --deadline and --max-cost: the fastest"));
    let many = run_in(dir.path(), &["simulate", "job.toml", "--cluster", "cluster.toml", "-n", "2048"]);
    let said = String::from_utf8_lossy(&many.stderr).into_owned();
    assert!(said.contains("2048 devices requested, but the cluster \"pod\" has 1024"), "{said}");
}

/// What each rank of a timeline computes, in order: runs of passes.
fn passes(trace: &Value) -> Vec<(u64, Vec<String>)> {
    let mut ranks: std::collections::BTreeMap<u64, Vec<(f64, String)>> = std::collections::BTreeMap::new();
    // The first grain is on the first lane: what is before it happens once per step.
    let mut begins: std::collections::BTreeMap<u64, f64> = std::collections::BTreeMap::new();
    for event in trace["traceEvents"].as_array().expect("events").iter().filter(|event| event["cat"] == "compute") {
        let pass = event["name"].as_str().and_then(|name| name.split_whitespace().next()).unwrap_or_default();
        let at = event["ts"].as_f64().expect("a time");
        let rank = event["pid"].as_u64().expect("a rank");
        if event["tid"] == 0 {
            let begin = begins.entry(rank).or_insert(f64::INFINITY);
            *begin = begin.min(at);
        }
        ranks.entry(rank).or_default().push((at, pass.to_string()));
    }
    let order = |rank: u64, mut list: Vec<(f64, String)>| {
        list.retain(|(at, _)| *at >= begins[&rank]);
        list.sort_by(|one, other| one.0.total_cmp(&other.0));
        let mut names: Vec<String> = list.into_iter().map(|(_, name)| name).filter(|name| name != "update").collect();
        names.dedup();
        names
    };
    ranks.into_iter().map(|(rank, list)| (rank, order(rank, list))).collect()
}

/// Eight real workers do what the simulation says, in its order: passes of a pipeline of four, twice.
#[test]
fn a_simulated_step_has_the_order_of_a_real_one() {
    let dir = tempdir();
    files(dir.path());
    let layout = ["--set", "parallel.pipeline=4", "--set", "data.grains=16"];
    let real = [
        "train",
        "job.toml",
        "-n",
        "8",
        "--threads",
        "1",
        "--quiet",
        "--no-out",
        "--trace",
        "real.json",
        "--trace-steps",
        "1..2",
    ];
    stdout_of(dir.path(), &[&real[..], &layout[..]].concat());
    let simulated = ["simulate", "job.toml", "--cluster", "cluster.toml", "-n", "8", "--trace", "simulated.json"];
    stdout_of(dir.path(), &[&simulated[..], &layout[..]].concat());
    let (real, simulated) =
        (passes(&json_at(&dir.path().join("real.json"))), passes(&json_at(&dir.path().join("simulated.json"))));
    assert_eq!((real.len(), simulated.len()), (8, 4), "a role stands for the data ranks");
    for (rank, order) in real {
        assert_eq!(order, simulated[rank as usize % 4].1, "rank {rank}");
    }
}
