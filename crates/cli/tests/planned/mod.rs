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
    assert_ne!(simulated(dir.path(), &other)["run"]["goodput"], run["goodput"]);
    // A spread of ranks' times that the cluster describes lengthens the step.
    std::fs::write(dir.path().join("cluster.toml"), format!("{CLUSTER}[system]\njitter = 0.1\n")).expect("written");
    let spread = number(&simulated(dir.path(), &SPLIT)["step_ms"]) / number(&first["step_ms"]);
    assert!((spread - 1.0 - 0.1 * (2.0 * 64f64.ln()).sqrt()).abs() < 1e-9, "{spread}");
    std::fs::write(dir.path().join("cluster.toml"), CLUSTER).expect("written");
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

fn searched(dir: &Path, more: &[&str]) -> Value {
    let args = [&["plan", "job.toml", "--search", "--json"], more].concat();
    serde_json::from_str(&stdout_of(dir, &args)).expect("JSON and nothing else")
}

/// A job whose bits may depend on its workers can have any number of data ranks, and is trained so.
#[test]
fn any_number_of_data_ranks_is_searched_where_bits_are_free() {
    let dir = tempdir();
    files(dir.path());
    let free = ["--set", "job.reproducible=false", "--set", "data.batch=48", "--set", "data.grains=24"];
    let found = searched(dir.path(), &[&["-n", "24", "--cluster", "cluster.toml"], &free[..]].concat());
    let own = ["simulate", "job.toml", "--cluster", "cluster.toml", "-n", "24", "--json", "own.json"];
    stdout_of(dir.path(), &[&own[..], &free[..]].concat());
    let own = json_at(&dir.path().join("own.json"));
    let best = &found["layouts"][0];
    assert_eq!(own["layout"]["data"], 24);
    assert!(best["step_ms"].as_f64() <= own["step_ms"].as_f64(), "{best:#}");
    let three = searched(dir.path(), &[&["-n", "3", "--device", "cpu-core"], &free[..]].concat());
    let layouts = three["layouts"].as_array().expect("layouts");
    let shared = layouts.iter().find(|one| one["layout"]["data"] == 3).expect("three data ranks");
    let mut args = vec!["train", "job.toml", "-n", "3", "--threads", "1", "--quiet", "--no-out"];
    args.extend(free);
    shared["set"]
        .as_array()
        .expect("keys")
        .iter()
        .filter_map(Value::as_str)
        .for_each(|one| args.extend(["--set", one]));
    stdout_of(dir.path(), &args);
}

/// The search shows ten layouts of different kinds, or as many as are wanted, of which some differ in their micro-batches alone.
#[test]
fn as_many_layouts_as_are_wanted_are_ranked() {
    let dir = tempdir();
    files(dir.path());
    let kinds = |more: &[&str]| {
        let found = searched(dir.path(), &[&["-n", "2", "--device", "h100"], more].concat());
        let layouts = found["layouts"].as_array().expect("layouts");
        let times: Vec<f64> = layouts.iter().map(|one| one["step_ms"].as_f64().expect("a time")).collect();
        assert!(times.is_sorted(), "{times:?}");
        let kind = |one: &Value| {
            ["data", "pipeline", "tensor", "sequence", "zero", "recompute"].map(|key| one["layout"][key].to_string())
        };
        (layouts.len(), layouts.iter().map(kind).collect::<std::collections::BTreeSet<_>>().len())
    };
    assert_eq!(kinds(&[]), (10, 10));
    let (all, different) = kinds(&["--layouts", "10000"]);
    assert!(different > 10 && all > 2 * different, "{all} layouts of {different} kinds");
    assert_eq!(kinds(&["--layouts", "3"]).0, 3);
}

/// A run has the steps that it has: an epoch of 1,000 samples is one batch of 512.
#[test]
fn a_run_takes_its_steps() {
    let dir = tempdir();
    files(dir.path());
    let job = ["--set", "data.samples=1000", "--set", "data.batch=512", "--set", "train.steps=20"];
    let steps = |more: &[&str]| {
        let found = searched(dir.path(), &[&["-n", "4", "--device", "h100"], &job[..], more].concat());
        let best = &found["layouts"][0];
        best["run_s"].as_f64().expect("seconds") / best["step_ms"].as_f64().expect("milliseconds") * 1e3
    };
    for (more, wanted) in [(&[][..], 20.0), (&["--epochs", "3"], 3.0), (&["--samples", "2000", "--epochs", "5"], 15.0)]
    {
        let steps = steps(more);
        assert!((steps - wanted).abs() < 1e-9, "{more:?}: {steps}");
    }
}

#[test]
fn a_search_as_json_is_json_whatever_else_is_asked() {
    let dir = tempdir();
    files(dir.path());
    let found = searched(dir.path(), &["-n", "4", "--device", "h100", "--why", "--write"]);
    assert_eq!(found["wrote"], "job.toml");
    let why = &found["why"];
    assert!(why["ops"].as_array().is_some_and(|ops| ops.iter().all(|op| op["ms"].as_f64() >= Some(0.0))), "{why:#}");
    assert!(why["changes"].is_array());
    let own = ["plan", "job.toml", "-n", "4", "--device", "h100", "--why"];
    let json: Value = serde_json::from_str(&stdout_of(dir.path(), &[&own[..], &["--json"]].concat())).expect("JSON");
    assert!(json["why"]["ops"].is_array());
    assert!(!stdout_of(dir.path(), &own).contains("-0.0 %"));
}

/// A device that was measured, and one that was calibrated on a run, are devices to plan with; the latter says of that run what was
/// measured.
#[test]
fn a_calibrated_device_says_what_was_measured() {
    let dir = tempdir();
    files(dir.path());
    stdout_of(dir.path(), &["bench", "device", "--threads", "1", "--write", "device.toml"]);
    let found = searched(dir.path(), &["-n", "2", "--device", "device.toml"]);
    assert_eq!(found["device"], "this-machine");
    let job = ["--set", "train.steps=8", "--set", "data.grains=2"];
    for workers in ["1", "2"] {
        let train = ["train", "job.toml", "-n", workers, "--threads", "1", "--quiet", "--no-out", "--report", "r.json"];
        stdout_of(dir.path(), &[&train[..], &job[..]].concat());
        let number = |value: &Value| value.as_f64().expect("a number");
        let mut report = json_at(&dir.path().join("r.json"));
        // Exchanges that take three times as long as was planned, a good part of the step.
        let waited = 3.0 * report["planned"]["model"]["waits_ms"]["data"].as_f64().unwrap_or(1.0);
        for rank in report["communication"]["ranks"].as_array_mut().into_iter().flatten() {
            rank["waited_ms"] = serde_json::json!({ "data": waited });
        }
        report["step_ms"]["median"] = (4.0 * waited).into();
        std::fs::write(dir.path().join("r.json"), report.to_string()).expect("written");
        let told = stdout_of(dir.path(), &["plan", "--calibrate", "r.json", "--entry", "mine.toml"]);
        assert_eq!(told.contains("exchanges were waited for 3.00 times as long"), workers == "2", "{told}");
        let plan = ["plan", "job.toml", "-n", workers, "--device", "mine.toml", "--json"];
        let planned: Value =
            serde_json::from_str(&stdout_of(dir.path(), &[&plan[..], &job[..]].concat())).expect("JSON");
        let parts = report["compared"].as_array().expect("parts");
        let compute = number(&parts.iter().find(|part| part["part"] == "compute").expect("a part")["measured"]);
        let layout = &planned["layouts"][0];
        let ratio = number(&layout["compute_ms"]) / compute;
        assert!((ratio - 1.0).abs() < 0.01, "{workers} workers: {ratio}");
        if workers == "2" {
            let ratio = number(&layout["exposed_ms"]["data"]) / waited;
            assert!((ratio - 1.0).abs() < 0.01, "waits: {ratio}");
        }
    }
    let named = ["simulate", "job.toml", "--cluster", "cluster.toml", "-n", "2", "--device", "mine.toml:this-machine"];
    assert!(stdout_of(dir.path(), &named).contains("this-machine"));
}

/// What workers wait for is compared axis by axis, and the pipeline's bubble, with what was planned of it.
#[test]
fn a_report_compares_every_axis() {
    let dir = tempdir();
    files(dir.path());
    let layout = ["--set", "parallel.pipeline=2", "--set", "parallel.tensor=2", "--set", "train.steps=3"];
    let train = ["train", "job.toml", "-n", "8", "--threads", "1", "--quiet", "--no-out", "--report", "r.json"];
    stdout_of(dir.path(), &[&train[..], &layout[..]].concat());
    let report = json_at(&dir.path().join("r.json"));
    let parts = report["compared"].as_array().expect("parts");
    for name in ["bubble", "exchanges along data", "exchanges along tensor"] {
        let part = parts.iter().find(|part| part["part"] == name).unwrap_or_else(|| panic!("{name}: {parts:#?}"));
        assert!(part["planned"].as_f64() > Some(0.0) && part["measured"].as_f64() > Some(0.0), "{part:#}");
    }
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
    let said = stdout_of(dir.path(), &["train", "job.toml", "--no-out", "-n", "2", "--auto"]);
    let line =
        |what: &str| said.lines().find(|line| line.starts_with(what)).unwrap_or_else(|| panic!("{what}: {said}"));
    assert!(line("layout: ").ends_with("per step by a trial run"), "{said}");
    assert!(line("runner-up: ").contains(" on 2 workers, "), "{said}");
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

/// What a rank of a timeline does.
#[derive(Default)]
struct Timeline {
    /// Passes in order, each with its micro-batch by the lanes that take turns, and when it began and ended.
    passes: Vec<(String, f64, f64)>,
    /// When messages to the next stage, and to the one before, were sent, and by which lane, if there are several.
    sent: [Vec<(f64, Option<usize>)>; 2],
    /// When sums over data ranks began, and their bytes.
    sums: Vec<(f64, u64)>,
}

/// Timelines by rank. The micro-batches of a real one take turns on as many lanes.
fn timelines(trace: &Value, lanes: usize, stages: u64) -> std::collections::BTreeMap<u64, Timeline> {
    let mut ranks: std::collections::BTreeMap<u64, Timeline> = std::collections::BTreeMap::new();
    let events = trace["traceEvents"].as_array().expect("events");
    let mut threads: std::collections::BTreeMap<(u64, u64), String> = std::collections::BTreeMap::new();
    for event in events.iter().filter(|event| event["name"] == "thread_name") {
        let place = (event["pid"].as_u64().expect("a rank"), event["tid"].as_u64().expect("a lane"));
        threads.insert(place, event["args"]["name"].as_str().expect("a name").to_string());
    }
    let mut spans: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
    spans.sort_by(|one, other| one["ts"].as_f64().expect("a time").total_cmp(&other["ts"].as_f64().expect("a time")));
    // The first grain is on the first lane: what is before it happens once per step.
    let mut begun = std::collections::BTreeSet::new();
    for event in spans {
        let (rank, lane) = (event["pid"].as_u64().expect("a rank"), event["tid"].as_u64().expect("a lane"));
        let (name, thread) = (event["name"].as_str().expect("a name"), threads[&(rank, lane)].as_str());
        let begin = event["ts"].as_f64().expect("a time");
        let end = begin + event["dur"].as_f64().expect("a time");
        let timeline = ranks.entry(rank).or_default();
        let words: Vec<&str> = name.split_whitespace().collect();
        match event["cat"].as_str() {
            Some("compute") if words[0] != "update" => {
                // A simulated pass says its micro-batch.
                let micro_batch = words.last().and_then(|last| last.parse::<usize>().ok());
                if lane == 0 {
                    begun.insert(rank);
                }
                if !begun.contains(&rank) {
                    continue;
                }
                let pass = format!("{} {}", words[0], micro_batch.unwrap_or(lane as usize) % lanes);
                match timeline.passes.last_mut().filter(|last| last.0 == pass) {
                    Some(last) => last.2 = last.2.max(end),
                    None => timeline.passes.push((pass, begin, end)),
                }
            }
            Some("communication") if name == "send activations" => timeline.sent[0].push((begin, None)),
            Some("communication") if name == "send gradients" => timeline.sent[1].push((begin, None)),
            // Both ends of a message record it under the number of its value: this is who sends.
            Some("communication") if name.starts_with("send %") => {
                let numbers: Vec<u64> = thread.split([' ', ',']).filter_map(|word| word.parse().ok()).collect();
                // Weights that the first stage and the last share go past those between them.
                let [from, to, lane] = numbers[..] else { continue };
                if from == rank % stages && from.abs_diff(to) == 1 {
                    timeline.sent[usize::from(to < from)].push((begin, Some(lane as usize)));
                }
            }
            Some("communication") if words[0] == "all_reduce" && thread.ends_with("along data") => {
                // The loss is summed, too, as soon as it is known.
                if words.get(1).is_some_and(|what| *what == "loss") {
                    continue;
                }
                timeline.sums.push((begin, event["args"]["bytes"].as_u64().expect("bytes")));
            }
            _ => {}
        }
    }
    ranks
}

impl Timeline {
    fn order(&self) -> Vec<&str> {
        self.passes.iter().map(|(name, _, _)| name.as_str()).collect()
    }

    /// Every message follows the pass that made it, in the order of micro-batches, and sums follow the last pass.
    fn check(&self, lanes: usize, context: &str) {
        for (pass, sent) in ["forward", "backward"].into_iter().zip(&self.sent) {
            let made: Vec<&(String, f64, f64)> = self.passes.iter().filter(|one| one.0.starts_with(pass)).collect();
            let mut of_lane = vec![0; lanes];
            for (at, (begin, lane)) in sent.iter().enumerate() {
                // Lanes send each on its own, and their micro-batches in order.
                let number = lane.map_or(at, |lane| {
                    of_lane[lane] += 1;
                    lane + lanes * (of_lane[lane] - 1)
                });
                assert!(
                    *begin >= made[number].2 - 1.0,
                    "{context}: message {number} comes before its {pass} pass ends"
                );
            }
        }
        let last = self.passes.last().expect("passes");
        assert!(self.sums.iter().all(|(begin, _)| *begin >= last.1), "{context}: sums before the last pass");
    }
}

/// Eight real workers do what the simulation says, in its order: passes of every micro-batch of a pipeline of four, twice; the
/// messages between stages; and the sums over data ranks.
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
    let real = json_at(&dir.path().join("real.json"));
    let is_lane = |event: &&Value| {
        event["name"] == "thread_name"
            && event["pid"] == 0
            && event["args"]["name"].as_str().is_some_and(|name| name.starts_with("compute "))
    };
    let lanes = real["traceEvents"].as_array().expect("events").iter().filter(is_lane).count();
    assert!(lanes > 1, "micro-batches take turns");
    let real = timelines(&real, lanes, 4);
    let simulated = timelines(&json_at(&dir.path().join("simulated.json")), lanes, 4);
    assert_eq!((real.len(), simulated.len()), (8, 4), "a role stands for the data ranks");
    for (rank, timeline) in real {
        let role = &simulated[&(rank % 4)];
        assert_eq!(timeline.order(), role.order(), "rank {rank}");
        assert_eq!(role.order().len(), 16, "eight micro-batches there and back");
        assert_eq!(timeline.sent.each_ref().map(Vec::len), role.sent.each_ref().map(Vec::len), "rank {rank}");
        let bytes = |timeline: &Timeline| timeline.sums.iter().map(|(_, bytes)| *bytes).max();
        assert_eq!(bytes(&timeline), bytes(role), "rank {rank}");
        timeline.check(lanes, &format!("rank {rank}"));
        role.check(lanes, &format!("role {rank}"));
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

/// A page of the documents: its job, and its commands, which print what it shows.
const PAPER: &str = include_str!("../../../../docs/predict-a-paper.md");

#[test]
fn the_page_on_papers_shows_what_its_commands_print() {
    let dir = tempdir();
    let block = |kind: &str| -> Vec<&str> {
        let begin = format!("```{kind}\n");
        PAPER.split(begin.as_str()).skip(1).map(|rest| rest.split("```").next().unwrap_or("")).collect()
    };
    std::fs::write(dir.path().join("paper.toml"), block("toml")[0]).expect("written");
    let (mut commands, mut said) = (0, String::new());
    for line in block("console").into_iter().flat_map(str::lines) {
        match line.strip_prefix("$ kolo ") {
            Some(command) => {
                said = stdout_of(dir.path(), &command.split(' ').collect::<Vec<_>>());
                commands += 1;
            }
            None => assert!(said.contains(line), "{line}\nis not in\n{said}"),
        }
    }
    assert_eq!(commands, 4);
}

/// What a layout takes of memory, and what it is computed in, do not depend on who names the device.
#[test]
fn a_device_is_planned_alike_whoever_names_it() {
    let dir = tempdir();
    files(dir.path());
    let plan = |more: &[&str]| -> Value {
        let args = [&["plan", "job.toml", "-n", "8", "--json"], more].concat();
        serde_json::from_str(&stdout_of(dir.path(), &args)).expect("JSON")
    };
    let by_name = plan(&["--device", "h100"]);
    for other in [plan(&["--cluster", "cluster.toml"]), plan(&["--cluster", "h100"])] {
        assert_eq!(by_name["precision"], "bf16");
        assert_eq!(other["precision"], "bf16");
        assert_eq!(by_name["layouts"][0]["memory"], other["layouts"][0]["memory"]);
        assert_eq!(by_name["layouts"][0]["step_ms"], other["layouts"][0]["step_ms"]);
    }
    assert!(by_name["layouts"][0]["memory"]["reserved"].as_f64() > Some(3e9));
    let said = stdout_of(dir.path(), &["plan", "job.toml", "-n", "8", "--device", "h100"]);
    assert!(said.contains("bf16, usual on h100-80: the job does not say it, and trains in f32 without"), "{said}");
    assert!(said.contains("reserved          3.58 GiB"), "{said}");
    let own =
        stdout_of(dir.path(), &["plan", "job.toml", "-n", "8", "--device", "h100", "--set", "train.precision=f32"]);
    assert!(own.contains("f32, as the job says"), "{own}");
    // What the search writes is computed as it was planned, and takes the memory that was said.
    let found = searched(dir.path(), &["-n", "8", "--device", "h100", "--write"]);
    let written = plan(&["--device", "h100"]);
    assert!(std::fs::read_to_string(dir.path().join("job.toml")).expect("a job").contains("precision = \"bf16\""));
    assert_eq!(found["layouts"][0]["memory"], written["layouts"][0]["memory"]);
}

/// A job that does not fit is said with settings that would, and is not simulated.
#[test]
fn what_does_not_fit_is_said_with_what_would() {
    let dir = tempdir();
    files(dir.path());
    let large = [
        "--set",
        "model.width=8192",
        "--set",
        "model.heads=64",
        "--set",
        "model.layers=24",
        "--set",
        "model.context=2048",
    ];
    let said = stdout_of(dir.path(), &[&["plan", "job.toml", "-n", "16", "--cluster", "h100"], &large[..]].concat());
    assert!(said.contains("which does not fit"), "{said}");
    let line = said.lines().find(|line| line.contains("would fit")).expect("a layout that fits");
    let simulate = ["simulate", "job.toml", "-n", "16", "--cluster", "h100", "--weeks", "4"];
    let output = run_in(dir.path(), &[&simulate[..], &large[..]].concat());
    let refused = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{refused}");
    assert!(refused.contains("needs") && refused.contains(line.trim()), "{refused}\n{line}");
    let set: Vec<&str> = line.split('\'').skip(1).step_by(2).flat_map(|one| ["--set", one]).collect();
    assert!(!set.is_empty());
    stdout_of(dir.path(), &[&simulate[..], &large[..], &set[..]].concat());
}

/// Where ranks share layers, computing again with the exchanges keeps a fraction of what computing again without them keeps.
#[test]
fn full_recomputation_keeps_the_inputs_of_layers_alone() {
    let dir = tempdir();
    files(dir.path());
    let activations = |what: &str| {
        let layout = [
            "parallel.tensor=8",
            "parallel.slices=8",
            "parallel.sequence=\"tensor\"",
            "model.heads=8",
            "model.layers=24",
        ];
        let recompute = format!("memory.recompute={what}");
        let mut args =
            vec!["simulate", "job.toml", "--cluster", "h100", "-n", "8", "--json", "out.json", "--set", &recompute];
        layout.iter().for_each(|one| args.extend(["--set", one]));
        stdout_of(dir.path(), &args);
        json_at(&dir.path().join("out.json"))["memory"]["activations"].as_f64().expect("bytes")
    };
    let [none, blocks, full] = ["none", "blocks", "full"].map(activations);
    assert!(full * 6.0 < blocks && blocks < none, "{none} {blocks} {full}");
}
