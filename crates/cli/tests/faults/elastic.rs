//! Workers of elastic jobs, killed at seeded moments from their start to their end: the job must end with the weights and the
//! metrics of an undisturbed run.

#[path = "kills.rs"]
pub mod kills;

use super::{End, Job, KOLO, SOON, host, signal};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Enough for kills in every phase; short, as each seed is a whole run.
const EPOCHS: u32 = 10;
/// Enough for a worker to start and join.
const EPOCHS_WITH_A_JOIN: u32 = 60;

fn example() -> String {
    format!("{}/../../examples/playground.toml", env!("CARGO_MANIFEST_DIR"))
}

/// What a run comes to: its weights, and its metrics but for times.
type Results = (String, Vec<Value>);

/// What an undisturbed run of so many epochs comes to.
fn undisturbed(epochs: u32) -> Arc<Results> {
    static RESULTS: Mutex<BTreeMap<u32, Arc<Results>>> = Mutex::new(BTreeMap::new());
    let run = || {
        let folder = tempfile::tempdir().unwrap();
        let length = format!("train.epochs={epochs}");
        let words = ["train", &example(), "--set", &length, "--set", "train.log_every=7", "--quiet", "--out", "out"];
        let output = Command::new(KOLO).args(words).current_dir(folder.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        Arc::new(results(&folder.path().join("out")))
    };
    Arc::clone(RESULTS.lock().unwrap().entry(epochs).or_insert_with(run))
}

/// The number of the last step of a short run.
fn last_step() -> u64 {
    undisturbed(EPOCHS).1.last().and_then(|row| row["step"].as_u64()).expect("rows")
}

fn results(out: &Path) -> Results {
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
fn survive(epochs: u32, options: &[&str], about: String, harm: impl FnOnce(&mut Job)) -> Outcome {
    let (job, length) = (example(), format!("train.epochs={epochs}"));
    let mut words = vec!["train", &job, "--elastic", "--threads", "1", "--out", "out"];
    words.extend(["--set", &length, "--set", "train.log_every=7"]);
    words.extend(options);
    let mut job = Job::start(Path::new(KOLO), &words, about);
    let folder = job.folder.path().to_path_buf();
    let mut kept = None;
    harm(&mut job);
    let end = job.end(|job| {
        let since = Instant::now();
        job.child.wait().unwrap();
        let verify = || Command::new(KOLO).args(["ckpt", "verify", "out"]).current_dir(&folder).output().unwrap();
        if folder.join("out/report.json").exists() {
            let verified = verify();
            assert!(verified.status.success(), "{}: {verified:?}", job.about);
            let report = std::fs::read_to_string(folder.join("out/report.json")).unwrap();
            kept = Some((results(&folder.join("out")), serde_json::from_str(&report).unwrap()));
            assert!(!folder.join("out/join").exists(), "{}: the invitation is left", job.about);
        }
        since
    });
    assert_eq!(end.code, Some(0), "{}", end.about);
    let Some(((weights, metrics), report)) = kept else { panic!("no report, {}", end.about) };
    let (expected, rows) = &*undisturbed(epochs);
    assert_eq!(weights, *expected, "other weights, {}", end.about);
    for (row, wanted) in metrics.iter().zip(rows) {
        assert_eq!(row, wanted, "another row, {}", end.about);
    }
    assert_eq!(metrics.len(), rows.len(), "rows are missing or there twice, {}", end.about);
    Outcome { end, report }
}

/// Thirty kills in all phases, each of which must come; the command `kills` tries many more.
pub fn a_killed_elastic_worker() {
    kills::in_every_phase(30);
}

/// Three workers are left of four: two go on, and one waits. With one that joins, there are four again, and all is said.
pub fn an_elastic_worker_is_replaced() {
    let mut joined = None;
    let outcome = survive(EPOCHS_WITH_A_JOIN, &["-n", "4", "--restarts", "0"], "one joins".into(), |job| {
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
        joined = Some(command.spawn().unwrap());
    });
    let notes = &outcome.end.error;
    assert!(notes.contains(&format!("rank 2 on {} was lost at step ", host())), "{}", outcome.end.about);
    assert!(notes.contains("it was killed by signal 9"), "{}", outcome.end.about);
    assert!(notes.contains(" has joined"), "{}", outcome.end.about);
    let generations = outcome.report["generations"].as_array().unwrap();
    let workers: Vec<u64> = generations.iter().map(|row| row["workers"].as_u64().unwrap()).collect();
    assert_eq!(workers.first(), Some(&4), "{}", outcome.end.about);
    let fewer = workers.iter().position(|count| *count == 2).unwrap_or_else(|| panic!("{workers:?}"));
    assert!(workers[fewer..].contains(&4), "{workers:?} {}", outcome.end.about);
    let joined = joined.expect("a worker that joined").wait().unwrap();
    assert!(joined.success(), "{joined}: {}", outcome.end.about);
}

/// What a lost worker would take with it, or what could not be computed again.
pub fn what_an_elastic_job_refuses() {
    let refused: [(&[&str], &str); 7] = [
        (&["--set", "parallel.central=true"], "`parallel.central = true`"),
        (&["--set", "parallel.tensor=2", "--set", "parallel.slices=2"], "`parallel.tensor = 2`"),
        (&["--set", "parallel.pipeline=2"], "`parallel.pipeline = 2`"),
        (&["--async", "--servers", "1"], "--async"),
        (&["--transport", "mpi"], "--transport mpi"),
        (&["--trace", "trace.json"], "--trace"),
        (&["--set", "job.reproducible=false"], "`job.reproducible = false`"),
    ];
    for (flags, what) in refused {
        let words = ["train", &example(), "-n", "2", "--elastic", "--no-out"];
        let output = Command::new(KOLO).args(words).args(flags).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {error}");
        assert!(error.starts_with(&format!("error: --elastic cannot be combined with {what}")), "{error}");
    }
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
    end.check(SOON, 1, &["error: only 3 workers are left, but the job needs at least 4", "was lost at step "]);
}

/// With ZeRO, a worker and the one that keeps a copy of its share: the state is gone, and the job says what to do.
pub fn a_worker_and_its_buddy_are_lost() {
    let options = ["--elastic", "--restarts", "0", "--set", "parallel.zero=3"];
    let mut job = Job::train(&options, "a worker and its buddy".into());
    let workers = job.workers();
    job.wait_for_work();
    let mut end = job.end(|_: &mut Job| {
        // Neither sees the other go.
        [1, 2].iter().for_each(|rank| signal(workers[rank], libc::SIGSTOP));
        [1, 2].iter().for_each(|rank| signal(workers[rank], libc::SIGKILL));
        Instant::now()
    });
    let told = |line: &&str| line.starts_with("error: ") || line.starts_with("  ");
    assert_eq!(
        end.error
            .lines()
            .filter(|line| line.contains(" was lost: it was killed") || line.contains(" was lost at step "))
            .count(),
        2,
        "{}",
        end.about
    );
    end.error = end.error.lines().filter(told).map(|line| format!("{line}\n")).collect();
    end.check(SOON, 1, &["is lost: no remaining worker has `", "from the newest checkpoint with --resume"]);
    // With a checkpoint, it goes back to that by itself.
    let options = ["-n", "4", "--restarts", "0", "--set", "parallel.zero=1", "--set", "checkpoint.every=20 steps"];
    let outcome = survive(EPOCHS, &options, "a worker and its buddy, with checkpoints".into(), |job| {
        let workers = job.workers();
        let start = Instant::now();
        let saved = job.folder.path().join("out/checkpoints");
        let any = || {
            let names = std::fs::read_dir(&saved).into_iter().flatten().flatten().map(|entry| entry.file_name());
            names.into_iter().any(|name| name.to_string_lossy().starts_with("step-"))
        };
        while !any() {
            assert!(start.elapsed() < SOON, "no checkpoint");
            std::thread::sleep(Duration::from_millis(1));
        }
        [1, 2].iter().for_each(|rank| signal(workers[rank], libc::SIGSTOP));
        [1, 2].iter().for_each(|rank| signal(workers[rank], libc::SIGKILL));
    });
    let error = &outcome.end.error;
    assert!(error.contains("continuing at step ") && error.contains("was lost together with"), "{}", outcome.end.about);
}
