//! Workers of elastic jobs, killed at seeded moments from their start to their end: the job must end with the weights and the
//! metrics of an undisturbed run. `cargo test -p kolo --test faults -- kills 200` does it so many times, and says how long
//! recovery took.

use super::{Chance, End, Job, KOLO, SOON, host, signal};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const WORKERS: usize = 4;
/// Moments of harm after the start of a job, which takes about as long.
const HARM_MS: u64 = 2500;
/// Enough for kills in every phase; short, as each seed is a whole run.
const EPOCHS: &str = "train.epochs=10";

/// Stands for ssh: runs on this host what it is told to run on another one.
const SHELL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/faults/shell.sh");

fn example() -> String {
    format!("{}/../../examples/playground.toml", env!("CARGO_MANIFEST_DIR"))
}

/// What an undisturbed run comes to: its weights, and its metrics but for times.
fn undisturbed() -> &'static (String, Vec<Value>) {
    static RESULT: OnceLock<(String, Vec<Value>)> = OnceLock::new();
    RESULT.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let words = ["train", &example(), "--set", EPOCHS, "--set", "train.log_every=7", "--quiet", "--out", "out"];
        let output = Command::new(KOLO).args(words).current_dir(folder.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        results(&folder.path().join("out"))
    })
}

fn results(out: &Path) -> (String, Vec<Value>) {
    let report: Value = serde_json::from_str(&std::fs::read_to_string(out.join("report.json")).unwrap()).unwrap();
    let metrics = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let timeless = |line: &str| {
        let mut row: Value = serde_json::from_str(line).unwrap();
        row.as_object_mut().unwrap().remove("step/samples_per_s");
        row
    };
    (report["weights"].as_str().unwrap().to_string(), metrics.lines().map(timeless).collect())
}

/// How a disturbed run went.
struct Outcome {
    end: End,
    report: Value,
}

/// Runs a job to its end and harms it meanwhile; it must come to the same as an undisturbed one.
fn survive(options: &[&str], about: String, harm: impl FnOnce(&mut Job)) -> Outcome {
    let job = example();
    let mut words = vec!["train", &job, "--elastic", "--threads", "1", "--out", "out"];
    words.extend(["--set", EPOCHS, "--set", "train.log_every=7"]);
    words.extend(options);
    let mut job = Job::start(Path::new(KOLO), &words, about);
    let folder = job.folder.path().to_path_buf();
    let mut kept = None;
    harm(&mut job);
    let end = job.end(|job| {
        let since = Instant::now();
        job.child.wait().unwrap();
        if folder.join("out/report.json").exists() {
            let report = std::fs::read_to_string(folder.join("out/report.json")).unwrap();
            kept = Some((results(&folder.join("out")), serde_json::from_str(&report).unwrap()));
            assert!(!folder.join("out/join").exists(), "{}: the invitation is left", job.about);
        }
        since
    });
    assert_eq!(end.code, Some(0), "{}", end.about);
    let Some(((weights, metrics), report)) = kept else { panic!("no report, {}", end.about) };
    let (expected, rows) = undisturbed();
    assert_eq!(weights, *expected, "other weights, {}", end.about);
    for (row, wanted) in metrics.iter().zip(rows) {
        assert_eq!(row, wanted, "another row, {}", end.about);
    }
    assert_eq!(metrics.len(), rows.len(), "rows are missing or there twice, {}", end.about);
    Outcome { end, report }
}

/// A run in which workers are killed at moments of this seed.
fn killed(seed: u64) -> Outcome {
    let mut chance = Chance(seed);
    for _ in 0..4 {
        chance.below(2);
    }
    let (where_, links): (&str, &[&str]) = [
        ("shm", &["-n", "4", "--transport", "shm"][..]),
        ("tcp", &["-n", "4", "--transport", "tcp"]),
        ("two hosts", &["--hosts", "a:2,b:2", "--interface", "127.0.0.1", "--ssh", SHELL]),
    ][chance.below(3) as usize];
    let restarts = ["0", "0", "2"][chance.below(3) as usize];
    let kills = 1 + chance.below(2);
    let about = format!("elastic, {kills} kills over {where_} with {restarts} restarts, seed {seed}");
    survive(&[links, &["--restarts", restarts]].concat(), about, |job| {
        let start = Instant::now();
        let mut moments: Vec<u64> = (0..kills).map(|_| chance.below(HARM_MS)).collect();
        moments.sort_unstable();
        for moment in moments {
            while start.elapsed() < Duration::from_millis(moment) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let victim = chance.below(WORKERS as u64) as usize;
            let workers = job.processes().into_iter().find(|(_, rank)| *rank == Some(victim));
            workers.into_iter().for_each(|(pid, _)| signal(pid, libc::SIGKILL));
        }
    })
}

/// A handful of seeds; the command `kills` tries many.
pub fn a_killed_elastic_worker() {
    for seed in 100..106 {
        killed(seed);
    }
}

/// Three workers are left of four: two go on, and one waits. Its job is then taken over by one that joins, and all is said.
pub fn an_elastic_worker_is_replaced() {
    let outcome = survive(&["-n", "4", "--restarts", "0"], "one joins".into(), |job| {
        let workers = job.workers();
        let out = job.folder.path().join("out");
        let steps = |count: usize| {
            let start = Instant::now();
            let rows = || std::fs::read_to_string(out.join("metrics.jsonl")).map_or(0, |text| text.lines().count());
            while rows() < count {
                assert!(start.elapsed() < SOON, "no steps");
                std::thread::sleep(Duration::from_millis(2));
            }
        };
        steps(3);
        signal(workers[&2], libc::SIGKILL);
        let mut command = Command::new(KOLO);
        command.args(["join", "out"]).current_dir(job.folder.path()).env(super::TAG, &job.tag);
        command.spawn().unwrap();
    });
    let notes = &outcome.end.error;
    assert!(notes.contains(&format!("rank 2 on {} was lost at step ", host())), "{}", outcome.end.about);
    assert!(notes.contains("it was killed by signal 9"), "{}", outcome.end.about);
    let generations = outcome.report["generations"].as_array().unwrap();
    let workers: Vec<u64> = generations.iter().map(|row| row["workers"].as_u64().unwrap()).collect();
    assert_eq!(workers.first(), Some(&4), "{}", outcome.end.about);
    assert!(workers.contains(&2), "{workers:?} {}", outcome.end.about);
}

/// With fewer than it needs, the job ends and says so.
pub fn too_few_elastic_workers() {
    let options = ["--elastic", "--min", "4", "--restarts", "0"];
    let mut job = Job::train(&options, "too few".into());
    let workers = job.workers();
    job.wait_for_work();
    let mut end = job.end(|_: &mut Job| {
        signal(workers[&1], libc::SIGKILL);
        Instant::now()
    });
    let lost = |line: &&str| line.starts_with("rank 1 ");
    assert_eq!(end.error.lines().filter(lost).count(), 1, "{}", end.about);
    end.error = end.error.lines().filter(|line| !lost(line)).map(|line| format!("{line}\n")).collect();
    end.check(SOON, 1, &["error: only 3 workers are left, and the job needs at least 4", "was lost at step "]);
}

/// Many seeds, and how long they took to recover.
pub fn kills(count: u64) {
    let mut times: Vec<u64> = Vec::new();
    let mut untouched = 0;
    for seed in 0..count {
        let outcome = killed(1000 + seed);
        let generations = outcome.report["generations"].as_array().unwrap().clone();
        untouched += u64::from(generations.len() == 1);
        times.extend(generations.iter().skip(1).map(|row| row["recovery_ms"].as_u64().unwrap()));
    }
    times.sort_unstable();
    println!("{count} jobs, {untouched} of them killed where no generation followed; {} recoveries", times.len());
    let at = |part: usize| times.get(times.len() * part / 100).copied().unwrap_or(0);
    println!("recovery: median {} ms, 90 % {} ms, longest {} ms", at(50), at(90), times.last().unwrap_or(&0));
    for (low, high) in [(0, 100), (100, 200), (200, 400), (400, 800), (800, 1600), (1600, 3200), (3200, u64::MAX)] {
        let number = times.iter().filter(|ms| (low..high).contains(*ms)).count();
        println!("  from {low:>5} ms  {number:>4}  {}", "#".repeat(number.div_ceil(2)));
    }
}
