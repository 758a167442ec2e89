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

/// A GPT of four blocks on two stages of two workers each.
const SPLIT_JOB: &str = "[model]\nkind = \"gpt\"\nlayers = 4\nwidth = 24\nheads = 3\ncontext = 8\nvocab = 11\n\
                         [data]\nsource = \"synthetic:tokens\"\nsamples = 64\nbatch = 8\ngrains = 4\n[train]\nsteps = 3\n\
                         [parallel]\nslices = 2\ntensor = 2\npipeline = 2\n";

fn split_job() -> tempfile::TempDir {
    let dir = tempdir();
    std::fs::write(dir.path().join("job.toml"), SPLIT_JOB).expect("written");
    dir
}

/// `plan --explain` says who has which part of every parameter and activation, and what goes between the workers.
#[test]
fn an_explained_plan_says_who_has_what() {
    let dir = split_job();
    let text = stdout_of(dir.path(), &["plan", "job.toml", "-n", "4", "--threads", "1", "--by-rates", "--explain"]);
    let section = |title: &str| {
        let (_, rest) = text.split_once(title).unwrap_or_else(|| panic!("{title:?} is not in\n{text}"));
        rest.lines().skip(1).take_while(|line| line.starts_with("  ")).map(str::trim).collect::<Vec<&str>>()
    };
    let parameters = section("parameters, and who has which part of them");
    // 12 of every block, those of the last norm, and the two tables.
    assert_eq!(parameters.len(), 4 * 12 + 2 + 2, "{text}");
    for line in [
        "h.0.attn.c_attn.weight [24, 72]  rank 0: [24, 24] from element 0, rank 1: [24, 48] from element 8",
        "h.3.mlp.c_proj.weight [96, 24]  rank 2: [48, 24] from element 0, rank 3: [48, 24] from element 1152",
        "h.2.ln_1.bias [24]  ranks 2 3: all",
        "wte.weight [11, 24]  rank 0: [5, 24] from element 0, rank 1: [6, 24] from element 120",
    ] {
        assert!(parameters.contains(&line), "{line}\n{text}");
    }
    let activations = section("activations of a grain, and who makes which part of them");
    assert!(activations.contains(&"h.1.mlp.c_fc linear f32[2,8,96]  ranks 0 1: f32[2,8,48]"), "{text}");
    assert!(activations.contains(&"h.2.mlp.c_proj linear f32[2,8,24]  ranks 2 3: f32[2,8,24], a term of the sum"));
    let exchanges = section("exchanges of the first rank, in their order");
    let of = |axis: &str, op: &str| exchanges.iter().filter(|line| line.starts_with(axis) && line.contains(op)).count();
    // The embedding, two of each block forward and two backward.
    assert_eq!((of("tensor", "axis_sum"), of("pipeline", "send"), of("pipeline", "receive")), (9, 2, 2), "{text}");
}

/// More workers share an image than there are grains, and none of them has samples of its own.
#[test]
fn a_plan_of_shared_images_is_timed() {
    let dir = tempdir();
    let job = "[model]\nkind = \"cnn\"\nimage = [3, 256, 256]\nchannels = [4, 4]\nhidden = 4\n[data]\nsource = \"synthetic:images\"\n\
               samples = 4\nbatch = 1\n[train]\nsteps = 1\n[parallel]\ntiles = [2, 1]\nspatial = [2, 1]\n";
    std::fs::write(dir.path().join("job.toml"), job).expect("written");
    let text = stdout_of(dir.path(), &["plan", "job.toml", "-n", "2", "--threads", "1"]);
    assert!(text.contains("on 2 workers of 1 thread, measured on "), "{text}");
}

/// `plan --schedule` draws the schedule, as text or into a file.
#[test]
fn a_drawn_schedule_shows_every_pass() {
    let dir = split_job();
    let plan = ["plan", "job.toml", "-n", "4", "--threads", "1"];
    let drawn = |more: &[&str]| stdout_of(dir.path(), &[&plan[..], more].concat());
    assert_eq!(
        drawn(&["--schedule"]).trim_end(),
        "rank 0  F0 F1 ······B0─── F2 B1─── F3 B2─── ···B3───\n\
         rank 1  ···F0 B0─── F1 B1─── F2 B2─── F3 B3─── ······\n\
         2 ranks, 2 stages, 4 micro-batches   time 15, bubble 20.0 %, activations kept 2\n\
         F forward   B backward   · idle"
    );
    assert!(drawn(&["--schedule", "--set", "parallel.schedule=gpipe"]).contains("activations kept 4"));
    drawn(&["--schedule=drawn.svg"]);
    let svg = std::fs::read_to_string(dir.path().join("drawn.svg")).expect("a picture");
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
    assert!(svg.contains("2 ranks, 2 stages, 4 micro-batches: time 15, bubble 20.0 %"), "{svg}");
}

/// `graph --rank` prints what a rank of a split model runs: its blocks, its shards, and exchanges that its peers run, too.
#[test]
fn the_graph_of_a_rank_is_its_part_of_the_model() {
    let dir = split_job();
    let of = |rank: usize| stdout_of(dir.path(), &["graph", "job.toml", "-n", "4", "--rank", &rank.to_string()]);
    let graphs: Vec<String> = (0..4).map(of).collect();
    let has = |rank: usize, name: &str| graphs[rank].contains(&format!("param{{name=\"{name}\""));
    for rank in 0..4 {
        assert_eq!(has(rank, "h.1.mlp.c_fc.weight"), rank < 2, "{}", graphs[rank]);
        assert_eq!(has(rank, "h.2.mlp.c_fc.weight"), rank >= 2, "{}", graphs[rank]);
        assert!(graphs[rank].contains("shape=[24,48]") && graphs[rank].contains("whole=[24,96]"), "{}", graphs[rank]);
    }
    let count = |rank: usize, op: &str| graphs[rank].matches(op).count();
    for (one, other) in [(0, 1), (2, 3)] {
        assert_eq!(count(one, " = axis_sum{axis=\"tensor\""), count(other, " = axis_sum{axis=\"tensor\""));
    }
    for (one, other) in [(0, 2), (1, 3)] {
        assert!(count(one, " = send{axis=\"pipeline\"") > 0);
        assert_eq!(count(one, " = send{axis=\"pipeline\""), count(other, " = receive{axis=\"pipeline\""));
        assert_eq!(count(other, " = send{axis=\"pipeline\""), count(one, " = receive{axis=\"pipeline\""));
    }
    let output = run_in(dir.path(), &["graph", "job.toml", "-n", "4", "--rank", "4"]);
    assert!(!output.status.success(), "rank 4 of 4");
}
