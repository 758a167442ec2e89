//! Runs that are killed at any moment and go on, on another number of workers, end with the weights of one that was not.
//! `bench/crashes.py` does the same many more times.

use crate::job::{KOLO, LIMIT, kolo, report, tempdir, weights};
use crate::process::run;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const JOB: &str = "[job]\nname = \"crash\"\n[model]\nkind = \"mlp\"\nhidden = [64]\n[data]\nsource = \"builtin:playground\"\n\
                   batch = 32\ngrains = 8\n[train]\nsteps = 600\noptimizer = { kind = \"adamw\" }\n\
                   [checkpoint]\nevery = \"25 steps\"\nkeep = 2\n";
const KILLS: u64 = 30;
/// Kills of one run before it may end in peace.
const KILLS_PER_RUN: u64 = 3;

/// Pseudo-random numbers that repeat (SplitMix64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

/// The workers of a supervisor.
fn children(parent: u32) -> Vec<i32> {
    let list = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// When a run is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// From the first moment to the whole length of a run on a quiet machine.
    Any,
    /// After rows of this run.
    Step,
    /// While a checkpoint is written.
    Write,
}

const MOMENTS: [Moment; 3] = [Moment::Any, Moment::Step, Moment::Write];

fn rows(dir: &Path) -> usize {
    std::fs::read_to_string(dir.join("run/metrics.jsonl")).map_or(0, |text| text.lines().count())
}

fn is_writing(dir: &Path) -> bool {
    let names = std::fs::read_dir(dir.join("run/checkpoints")).into_iter().flatten().flatten();
    names.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with(".unfinished-"))
}

impl Moment {
    /// Waits for it; whether it came before the run was over.
    fn wait(self, dir: &Path, child: &mut Child, dice: &mut Dice) -> bool {
        let (before, later_ms) = (rows(dir), if self == Moment::Any { 700 } else { 4 });
        let reached = || match self {
            Moment::Any => true,
            Moment::Step => rows(dir) > before,
            Moment::Write => is_writing(dir),
        };
        let begin = Instant::now();
        while !reached() {
            if child.try_wait().expect("a child").is_some() || begin.elapsed() > LIMIT {
                return false;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        std::thread::sleep(Duration::from_micros(dice.below(later_ms * 1000)));
        child.try_wait().expect("a child").is_none()
    }
}

/// Starts the job on so many workers, and kills the supervisor or a worker at a moment of this kind. Waits until all are gone.
/// Whether the moment came.
fn start_and_kill(dir: &Path, moment: Moment, dice: &mut Dice) -> bool {
    let workers = 1 << dice.below(3);
    let (layout, tcp) = (format!("parallel.zero={}", dice.below(4)), dice.below(2) == 0);
    let mut command = kolo(dir);
    command.args(["train", "job.toml", "--out", "run", "--resume", "--quiet", "--threads", "1", "--set", &layout]);
    command.args(["-n", &workers.to_string()]).stderr(Stdio::null()).stdout(Stdio::null());
    if workers > 1 {
        // Each start may take another one.
        command.args(["--transport", if tcp { "tcp" } else { "shm" }]);
    }
    let mut child: Child = command.spawn().expect("the binary starts");
    let came = moment.wait(dir, &mut child, dice);
    let pids = children(child.id());
    let victim = match dice.below(2) {
        0 => child.id() as i32,
        _ if pids.is_empty() => child.id() as i32,
        _ => pids[dice.below(pids.len() as u64) as usize],
    };
    // SAFETY: a signal to a process of ours, or to none.
    unsafe { libc::kill(victim, libc::SIGKILL) };
    child.wait().expect("it ends");
    let begin = Instant::now();
    // SAFETY: signal 0 only asks.
    while pids.iter().any(|pid| unsafe { libc::kill(*pid, 0) } == 0) {
        assert!(begin.elapsed() < LIMIT, "a worker outlived its supervisor");
        std::thread::sleep(Duration::from_millis(5));
    }
    came
}

/// The rows of the metrics but for times.
fn metrics(dir: &Path) -> Vec<serde_json::Value> {
    let rows = std::fs::read_to_string(dir.join("run/metrics.jsonl")).expect("metrics");
    let timeless = |row: &str| {
        let mut row: serde_json::Value = serde_json::from_str(row).expect("JSON");
        row.as_object_mut().expect("a row").remove("step/samples_per_s");
        row
    };
    rows.lines().map(timeless).collect()
}

#[test]
fn killed_runs_go_on_to_the_same_weights() {
    let home = tempdir();
    std::fs::write(home.path().join("job.toml"), JOB).expect("a job file");
    let quiet = ["train", "job.toml", "--quiet", "--threads", "1", "--report", "report.json"];
    run(kolo(home.path()).args(quiet).args(["--out", "run"]), LIMIT).well();
    let (expected, rows) = (weights(&report(home.path())).to_string(), metrics(home.path()));
    let (mut dice, mut came) = (Dice(7), [0; MOMENTS.len()]);
    let mut round = 0;
    // Some runs are over before their moment comes.
    while came.iter().sum::<u64>() < KILLS {
        round += 1;
        assert!(round <= KILLS, "kills came by moment {MOMENTS:?}: {came:?}");
        let dir = tempdir();
        std::fs::write(dir.path().join("job.toml"), JOB).expect("a job file");
        for _ in 0..KILLS_PER_RUN {
            let at = dice.below(MOMENTS.len() as u64) as usize;
            came[at] += u64::from(start_and_kill(dir.path(), MOMENTS[at], &mut dice));
        }
        let workers = (1 << dice.below(3)).to_string();
        let last = ["--out", "run", "--resume", "-n", &workers];
        run(kolo(dir.path()).args(quiet).args(last), LIMIT).well();
        let ended = report(dir.path());
        assert_eq!(weights(&ended), expected, "round {round}");
        // Every row of the metrics is there once, in order, and as it would have been.
        for (row, wanted) in metrics(dir.path()).iter().zip(&rows) {
            assert_eq!(row, wanted, "round {round}");
        }
        assert_eq!(metrics(dir.path()).len(), rows.len(), "round {round}: rows are missing or there twice");
        run(std::process::Command::new(KOLO).args(["ckpt", "verify"]).arg(dir.path().join("run")), LIMIT).well();
    }
    assert!(came.iter().all(|count| *count > 0), "kills came by moment {MOMENTS:?}: {came:?}");
}
