//! What several workers show and write: one view, a log per rank, one timeline.

use crate::job::{Job, KOLO, LIMIT, fails, kolo, report, tempdir, under};
use crate::process::run;
use serde_json::Value;

/// How far two clocks may be apart, in microseconds: on a busy machine, the quickest of several answers may take this long.
const CLOCK_ERROR_US: f64 = 20_000.0;

#[test]
fn workers_show_one_view_and_keep_a_log_each() {
    let dir = tempdir();
    let mut command = kolo(dir.path());
    command.args(Job::Digits.command()).args(["-n", "2", "--threads", "1", "--out", "out", "--report", "report.json"]);
    let ended = run(&mut command, LIMIT).well();
    let lines = [
        "digits: builtin:digits",
        "4 steps, batch 64 in 8 grains, 2 workers with 1 thread each",
        "epoch   1",
        "done after 4 steps",
        "  together    2 workers over shm: ",
        "  slowest     rank ",
        "  weights     blake3:",
    ];
    for line in lines {
        assert_eq!(ended.stdout.matches(line).count(), 1, "{line}: {ended}");
    }
    assert_eq!(ended.stderr, "", "{ended}");
    let log = |rank| std::fs::read_to_string(dir.path().join(format!("out/rank-{rank}.log"))).expect("a log");
    assert!(log(0).contains("done after 4 steps") && ended.stdout.ends_with(&log(0)), "{}", log(0));
    assert_eq!(log(1), "");
    assert!(dir.path().join("out/metrics.jsonl").exists());
    let report = report(dir.path());
    let communication = &report["communication"];
    let ranks = communication["ranks"].as_array().expect("ranks");
    assert!(communication["slowest_rank"].as_u64().is_some_and(|rank| rank < 2), "{report:#}");
    assert!(communication["hidden"].as_f64().is_some_and(|part| (0.0..=1.0).contains(&part)), "{report:#}");
    assert!(communication["busy_ms"].as_f64().is_some_and(|busy| busy > 0.0), "{report:#}");
    for (number, rank) in ranks.iter().enumerate() {
        assert_eq!(rank["rank"].as_u64(), Some(number as u64), "{report:#}");
        assert!(rank["host"].as_str().is_some_and(|host| !host.is_empty()), "{report:#}");
        for key in ["compute_ms", "busy_ms", "exposed_ms", "peak_rss"] {
            assert!(rank[key].as_f64().is_some_and(|value| value >= 0.0), "{key} in {report:#}");
        }
    }
    assert_eq!(ranks.len(), 2);
}

/// As under `nohup`, and without.
#[test]
fn a_hangup_that_is_ignored_ends_nobody() {
    for ignored in [true, false] {
        let dir = tempdir();
        let words = Job::Digits.command().join(" ");
        let first = if ignored { "trap '' HUP; " } else { "" };
        // The first epoch is written while many are still to come.
        let script = format!(
            "{first}'{KOLO}' {words} --set train.steps=300 -n 2 --threads 1 --out out --quiet & \
             while ! test -s out/metrics.jsonl; do sleep 0.02; done; kill -HUP $!; wait $!"
        );
        // Whoever runs the tests may ignore hangups too.
        let words = ["env", "--default-signal=HUP", "sh", "-c", &script];
        let ended = run(&mut under(&words, dir.path()), LIMIT);
        assert_eq!(ended.code, Some(if ignored { 0 } else { 128 + libc::SIGHUP }), "{ended}");
        let metrics = std::fs::read_to_string(dir.path().join("out/metrics.jsonl")).expect("metrics");
        assert_eq!(metrics.contains("\"step\":300,"), ignored, "{metrics}");
    }
}

/// Workers whose steps are quicker than their signs of life.
#[test]
fn workers_in_step_are_not_called_slow() {
    let dir = tempdir();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/playground.toml");
    let mut command = kolo(dir.path());
    let ended =
        run(command.args(["train", file, "-n", "4", "--threads", "1", "--set", "train.epochs=40"]), LIMIT).well();
    assert_eq!(ended.stderr, "", "{ended}");
}

#[test]
fn workers_that_fail_say_so_once() {
    for flags in [&["-n", "4"][..], &["-n", "4", "--transport", "tcp"]] {
        let dir = tempdir();
        let ended = fails(&mut kolo(dir.path()), dir.path(), flags);
        assert_eq!(ended.code, Some(1), "{ended}");
        let message = ended.only_error();
        assert!(message.starts_with("error: rank ") && message.contains("the loss is NaN at step 3"), "{ended}");
        assert!(message.contains("first not finite: ") && message.contains("hint: lower the learning rate"), "{ended}");
    }
}

/// A span of the timeline.
struct Span {
    name: String,
    begin_us: f64,
    end_us: f64,
}

fn spans(events: &[Value], rank: u64, kind: &str) -> Vec<Span> {
    let of = |event: &&Value| event["ph"] == "X" && event["pid"] == rank && event["cat"] == kind;
    let read = |event: &Value| {
        let begin_us = event["ts"].as_f64().expect("a time");
        let end_us = begin_us + event["dur"].as_f64().expect("a duration");
        Span { name: event["name"].as_str().expect("a name").into(), begin_us, end_us }
    };
    let mut spans: Vec<Span> = events.iter().filter(of).map(read).collect();
    spans.sort_by(|one, other| one.begin_us.total_cmp(&other.begin_us));
    spans
}

#[test]
fn the_timeline_has_all_ranks_on_one_clock() {
    let dir = tempdir();
    let mut command = kolo(dir.path());
    command.args(Job::Digits.quiet()).args(["-n", "2", "--threads", "1", "--trace", "trace.json"]);
    Job::Digits.agrees(&mut command, dir.path());
    let text = std::fs::read_to_string(dir.path().join("trace.json")).expect("a timeline");
    let document: Value = serde_json::from_str(&text).expect("JSON");
    let events = document["traceEvents"].as_array().expect("events");
    for rank in [0, 1] {
        let named = |event: &Value| {
            event["name"] == "process_name"
                && event["pid"] == rank
                && event["args"]["name"].as_str().is_some_and(|name| name.starts_with(&format!("rank {rank} on ")))
        };
        assert!(events.iter().any(named), "rank {rank} has no name");
        let compute = spans(events, rank, "compute");
        assert!(compute.len() > 4, "rank {rank} computed {} times", compute.len());
    }
    // Nobody leaves a collective before all have come: at that moment, all are in it.
    let exchanges = |rank| {
        let all = spans(events, rank, "communication").into_iter();
        all.filter(|span| span.name.starts_with("all_reduce")).collect::<Vec<Span>>()
    };
    let names = |spans: &[Span]| spans.iter().map(|span| span.name.clone()).collect::<Vec<_>>();
    let (one, other) = (exchanges(0), exchanges(1));
    assert!(one.len() >= 4, "{:?}", names(&one));
    assert_eq!(names(&one), names(&other));
    for (one, other) in one.iter().zip(&other) {
        let apart = one.begin_us.max(other.begin_us) - one.end_us.min(other.end_us);
        assert!(apart < CLOCK_ERROR_US, "{} is {apart} µs apart", one.name);
    }
}

/// What ranks exchange along each axis of a mesh has lanes of its own, beside those of compute.
#[test]
fn the_timeline_has_every_axis() {
    let dir = tempdir();
    let job = "[model]\nkind = \"gpt\"\nlayers = 2\nwidth = 16\nheads = 2\ncontext = 8\nvocab = 11\n[data]\n\
               source = \"synthetic:tokens\"\nsamples = 16\nbatch = 8\ngrains = 4\n[train]\nsteps = 2\n[parallel]\n\
               tensor = 2\npipeline = 2\nslices = 2\n";
    std::fs::write(dir.path().join("job.toml"), job).expect("a job file");
    let mut command = kolo(dir.path());
    command.args(["train", "job.toml", "--quiet", "-n", "8", "--threads", "1", "--trace", "trace.json"]);
    run(&mut command, LIMIT).well();
    let text = std::fs::read_to_string(dir.path().join("trace.json")).expect("a timeline");
    let document: Value = serde_json::from_str(&text).expect("JSON");
    let events = document["traceEvents"].as_array().expect("events");
    for rank in 0..8 {
        for (axis, call) in [("data", "all_reduce bucket"), ("tensor", "all_reduce"), ("pipeline", "send %")] {
            let lane = format!("communication along {axis}");
            let is_lane = |event: &&Value| {
                event["pid"] == rank && event["args"]["name"].as_str().is_some_and(|name| name.starts_with(&lane))
            };
            let lanes: Vec<&Value> = events.iter().filter(is_lane).map(|event| &event["tid"]).collect();
            let in_lane = |event: &&Value| lanes.contains(&&event["tid"]);
            let of_axis: Vec<Value> = events.iter().filter(in_lane).cloned().collect();
            let calls = spans(&of_axis, rank, "communication");
            let found = calls.iter().filter(|span| span.name.starts_with(call)).count();
            assert!(found >= 2, "rank {rank} has {found} times `{call}` in {} lanes `{lane}`", lanes.len());
        }
    }
}

#[test]
fn the_timeline_has_servers_too() {
    let dir = tempdir();
    let mut command = kolo(dir.path());
    command.args(Job::Digits.quiet()).args(["-n", "2", "--threads", "1", "--trace", "trace.json"]);
    // Without a directory nothing is saved, which would be messages more.
    command.args(["--async", "--servers", "1", "--staleness", "2", "--no-out"]);
    run(&mut command, LIMIT).well();
    let text = std::fs::read_to_string(dir.path().join("trace.json")).expect("a timeline");
    let document: Value = serde_json::from_str(&text).expect("JSON");
    let events = document["traceEvents"].as_array().expect("events");
    for rank in 0..3 {
        for category in ["compute", "communication"] {
            let count = spans(events, rank, category).len();
            assert!(count >= 4, "rank {rank} has {count} spans of {category}");
        }
    }
    // The server has a lane for each worker. Messages come in order, so those of both ends belong together one by one: a
    // step's are three to the server and one back, and at the end there is one each way. Nobody has one before it is sent.
    for worker in 0..2 {
        let lane = format!("communication with rank {worker}");
        let named = |event: &&Value| event["pid"] == 2 && event["args"]["name"] == lane.as_str();
        let number = events.iter().find(named).unwrap_or_else(|| panic!("no {lane}"))["tid"].clone();
        let in_lane = |event: &&Value| event["pid"] != 2 || event["tid"] == number;
        let of_lane: Vec<Value> = events.iter().filter(in_lane).cloned().collect();
        let (mine, servers) = (spans(&of_lane, worker, "communication"), spans(&of_lane, 2, "communication"));
        assert_eq!(mine.len(), servers.len(), "messages of worker {worker}");
        let last = mine.len() - 1;
        assert_eq!(last % 4, 1, "{last} messages before the last");
        for (at, (mine, servers)) in mine.iter().zip(&servers).enumerate() {
            let back = at == last || at % 4 == 3;
            let (sent, taken) = if back { (servers, mine) } else { (mine, servers) };
            let early = sent.begin_us - taken.end_us;
            assert!(early < CLOCK_ERROR_US, "message {at} of worker {worker} was there {early} µs before it was sent");
        }
    }
}
