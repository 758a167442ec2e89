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

/// Waits until there is a checkpoint in `out`.
fn wait_for_checkpoint(job: &Job) {
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
}

/// Waits until a run in `out` has written so many rows.
fn wait_for_rows(job: &Job, count: usize) {
    let (start, path) = (Instant::now(), job.folder.path().join("out/metrics.jsonl"));
    while std::fs::read_to_string(&path).map_or(0, |text| text.lines().count()) < count {
        assert!(start.elapsed() < SOON, "no steps: {}", job.about);
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// All who were lost, as the report has them.
fn lost_of(report: &Value) -> Vec<String> {
    let rows = report["generations"].as_array().unwrap().iter();
    rows.flat_map(|row| row["lost"].as_array().unwrap()).map(|text| text.as_str().unwrap().to_string()).collect()
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
        wait_for_rows(job, 3);
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

/// A number of workers that cannot share the grains.
pub fn what_an_elastic_job_cannot_need() {
    for (min, says) in [
        ("0", "--min 0: a job needs at least one worker"),
        ("3", "--min 3, but 3 workers cannot share 4 grains (`data.grains`) evenly"),
        ("8", "--min 8, but there are 4 workers (-n or --hosts)"),
    ] {
        let words = ["train", &example(), "-n", "4", "--elastic", "--no-out", "--min", min];
        let output = Command::new(KOLO).args(words).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{min}: {error}");
        assert_eq!(error.trim_end(), format!("error: {says}\n  hint: use one of 1, 2, 4"));
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
    end.check(
        SOON,
        1,
        &["error: only 3 workers are left, of which 2 can share ", "needs at least 4 (--min 4)", "was lost at step "],
    );
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
        wait_for_checkpoint(job);
        [1, 2].iter().for_each(|rank| signal(workers[rank], libc::SIGSTOP));
        [1, 2].iter().for_each(|rank| signal(workers[rank], libc::SIGKILL));
    });
    let error = &outcome.end.error;
    assert!(error.contains("continuing at step ") && error.contains("was lost together with"), "{}", outcome.end.about);
}

/// Whoever has the state is lost, and there is a checkpoint: whoever starts again goes back to it, and the report says who was
/// lost.
pub fn all_elastic_workers_are_lost() {
    let shell = format!("{}/tests/faults/shell.sh", env!("CARGO_MANIFEST_DIR"));
    let hosts = ["--hosts", "a:1", "--ssh", &shell, "--interface", "127.0.0.1"];
    let on_this_host = |count: &'static str, zero: &'static str| vec!["-n", count, "--set", zero];
    let jobs: [(usize, Vec<&str>); 4] = [
        (1, hosts.to_vec()),
        (2, on_this_host("2", "parallel.zero=0")),
        (4, on_this_host("4", "parallel.zero=1")),
        (4, on_this_host("4", "parallel.zero=3")),
    ];
    for (count, mut options) in jobs {
        options.extend(["--restarts", "8", "--set", "checkpoint.every=20 steps"]);
        let outcome = survive(EPOCHS_WITH_A_JOIN, &options, format!("all are lost: {options:?}"), |job| {
            let workers = job.ranks(count);
            wait_for_checkpoint(job);
            // Nobody sees the others go.
            workers.values().for_each(|pid| signal(*pid, libc::SIGSTOP));
            workers.values().for_each(|pid| signal(*pid, libc::SIGKILL));
        });
        let (error, about) = (&outcome.end.error, &outcome.end.about);
        let said: Vec<&str> = error.lines().filter(|line| line.contains(" was lost")).collect();
        let said: Vec<&str> = said.into_iter().filter(|line| line.contains(": it was killed")).collect();
        assert_eq!(said.len(), count, "{about}");
        assert_eq!(lost_of(&outcome.report), said, "{about}");
        assert!(
            error.contains("continuing at step ") && !error.contains("continuing at step 0 "),
            "from the start, {about}"
        );
    }
}

/// Ctrl-C, and a worker that is lost at once: the others save the state, and a resumed run comes to the same.
pub fn an_interrupted_elastic_job_loses_a_worker() {
    let (example, epochs) = (example(), EPOCHS_WITH_A_JOIN);
    let length = format!("train.epochs={epochs}");
    let words = ["train", &example, "--threads", "1", "--out", "out", "--set", &length, "--set", "train.log_every=7"];
    let elastic = ["--elastic", "-n", "4", "--set", "checkpoint.every=1000 epochs"];
    let words = [&words[..], &elastic].concat();
    for (number, victim) in [(libc::SIGINT, 0), (libc::SIGTERM, 2)] {
        let mut job = Job::start(Path::new(KOLO), &words, format!("signal {number}, then worker {victim} is lost"));
        let workers = job.workers();
        wait_for_rows(&job, 3);
        let out = job.folder.path().join("out");
        let folder = job.folder.path().to_path_buf();
        let mut resumed = None;
        let end = job.end(|job| {
            let since = Instant::now();
            signal(job.child.id() as i32, number);
            signal(workers[&victim], libc::SIGKILL);
            job.child.wait().unwrap();
            let output = Command::new(KOLO).args(&words).arg("--resume").current_dir(&folder).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            let notes = String::from_utf8_lossy(&output.stderr).into_owned();
            resumed = Some((notes, results(&out)));
            since
        });
        assert_eq!(end.code, Some(128 + number), "{}", end.about);
        let (notes, (weights, rows)) = resumed.expect("a resumed run");
        assert!(notes.contains("resuming after step "), "no state was saved: {notes}{}", end.about);
        let (expected, wanted) = &*undisturbed(epochs);
        assert_eq!(weights, *expected, "other weights, {}", end.about);
        assert_eq!(rows, *wanted, "other rows, {}", end.about);
    }
}

/// An elastic job of one worker has a launcher: it starts the worker again, and others can join.
pub fn one_elastic_worker() {
    let mut joined = None;
    let options = ["-n", "1", "--restarts", "3", "--set", "checkpoint.every=20 steps"];
    let outcome = survive(2 * EPOCHS_WITH_A_JOIN, &options, "one worker".into(), |job| {
        let workers = job.ranks(1);
        wait_for_checkpoint(job);
        signal(workers[&0], libc::SIGKILL);
        let mut command = Command::new(KOLO);
        command.args(["join", "out"]).current_dir(job.folder.path()).env(super::TAG, &job.tag);
        joined = Some(command.spawn().unwrap());
    });
    assert_eq!(lost_of(&outcome.report).len(), 1, "{}", outcome.end.about);
    assert!(outcome.end.error.contains(" has joined"), "{}", outcome.end.about);
    assert!(joined.expect("a worker that joined").wait().unwrap().success(), "{}", outcome.end.about);
}

/// A signal to a worker that joined is for that worker: it leaves, and says so on its terminal; the job goes on.
pub fn a_joined_worker_leaves() {
    let mut left = None;
    let outcome = survive(2 * EPOCHS_WITH_A_JOIN, &["-n", "1", "--restarts", "0"], "one leaves".into(), |job| {
        job.ranks(1);
        wait_for_rows(job, 3);
        let mut command = Command::new(KOLO);
        command.args(["join", "out"]).current_dir(job.folder.path()).env(super::TAG, &job.tag);
        let child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
        let start = Instant::now();
        let notes = job.folder.path().join("stderr");
        while !std::fs::read_to_string(&notes).unwrap().contains("with 2 workers") {
            assert!(start.elapsed() < SOON, "it is not taken in");
            std::thread::sleep(Duration::from_millis(2));
        }
        signal(child.id() as i32, libc::SIGINT);
        left = Some(child.wait_with_output().unwrap());
    });
    let left = left.expect("a worker that joined");
    let said = String::from_utf8_lossy(&left.stderr);
    assert_eq!(left.status.code(), Some(130), "{said}{}", outcome.end.about);
    assert!(said.contains("this worker has left the job, which goes on without it"), "{said}");
    let told = outcome.end.error.contains(": it was asked to leave by a signal");
    assert!(told && lost_of(&outcome.report).len() == 1, "{}", outcome.end.about);
}

/// What is no invitation is called by its name.
pub fn what_cannot_be_joined() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.toml");
    std::fs::write(&path, "[job]\n").unwrap();
    let join = || {
        let output = Command::new(KOLO).arg("join").arg(&path).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let mut said = vec![join()];
    for mode in [0o600, 0o644] {
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(&path, permissions).unwrap();
        said.push(join());
    }
    for error in said {
        let first = format!("error: {} is not the invitation of an elastic job: ", path.display());
        assert!(error.starts_with(&first) && error.contains("  hint: give the --out directory"), "{error}");
    }
}
