//! Under a real Slurm of two nodes on this machine.

use crate::job::{Job, KOLO, LIMIT, fails, kolo, report, tempdir, transport, under, weights};
use crate::process::{Ended, harmed, installed, run, signal};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A cluster; gone when dropped, whatever happened.
struct Cluster {
    dir: TempDir,
}

impl Cluster {
    fn script(word: &str, dir: &Path) -> Command {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/slurm/cluster.sh");
        let mut command = Command::new("bash");
        command.arg(script).arg(word).arg(dir);
        command
    }

    fn start() -> Self {
        let cluster = Self { dir: tempdir() };
        // The daemons live on, so this is not for `run`, which would miss nothing of them.
        let output = Self::script("start", cluster.dir.path()).output().expect("bash");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        cluster
    }

    /// A command line that speaks to this cluster.
    fn command(&self, words: &[&str], dir: &Path) -> Command {
        let mut command = under(words, dir);
        command.env("SLURM_CONF", self.dir.path().join("slurm.conf"));
        command
    }

    /// What Slurm knows of a batch job, once it is over.
    fn ended(&self, number: &str) -> String {
        let begin = Instant::now();
        loop {
            let shown = run(&mut self.command(&["scontrol", "show", "job", number], Path::new("/")), LIMIT).well();
            let over = ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"];
            if over.iter().any(|state| shown.stdout.contains(&format!("JobState={state}"))) {
                return shown.stdout;
            }
            assert!(begin.elapsed() < LIMIT, "{shown}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = Self::script("stop", self.dir.path()).output();
    }
}

const SRUN: [&str; 6] = ["srun", "-N", "2", "-n", "4", KOLO];

#[test]
fn a_cluster_trains_like_one_process() {
    if !installed("slurmctld", "Slurm") || !installed("slurmd", "slurmd") || !installed("srun", "srun") {
        return;
    }
    let cluster = Cluster::start();
    steps(&cluster);
    a_step_that_fails_says_so_once(&cluster);
    a_step_with_different_jobs_is_refused(&cluster);
    a_stopped_rank_is_named(&cluster);
    a_batch_job(&cluster);
    let alone = long_run();
    a_batch_job_that_loses_a_task(&cluster, &alone);
    a_batch_job_that_is_requeued(&cluster, &alone);
    a_batch_job_that_loses_its_coordinator(&cluster, &alone);
}

fn steps(cluster: &Cluster) {
    // Two nodes of one machine share its memory.
    for (flags, way) in [(&[][..], "shm"), (&["--transport", "tcp"], "tcp")] {
        let dir = tempdir();
        let mut command = cluster.command(&SRUN, dir.path());
        command.args(Job::Digits.quiet()).args(["--threads", "1"]).args(flags);
        let report = Job::Digits.agrees(&mut command, dir.path());
        assert_eq!((transport(&report), report["workers"].as_u64()), (way, Some(4)));
        let left = std::fs::read_dir(dir.path().join(".kolo/run")).expect("where the ranks met").count();
        assert_eq!(left, 0, "the file by which the ranks met is still there");
    }
    if installed("mpirun.mpich", "MPICH") {
        let dir = tempdir();
        let words = ["srun", "--mpi=pmi2", "-N", "2", "-n", "4", KOLO];
        let mut command = cluster.command(&words, dir.path());
        let library = ["--transport", "mpi", "--mpi-library", "libmpich.so.12"];
        command.args(Job::Digits.quiet()).args(["--threads", "1"]).args(library);
        assert_eq!(transport(&Job::Digits.agrees(&mut command, dir.path())), "mpi");
    }
}

fn a_step_that_fails_says_so_once(cluster: &Cluster) {
    let dir = tempdir();
    let ended = fails(&mut cluster.command(&SRUN, dir.path()), dir.path(), &[]);
    assert!(ended.code.is_some_and(|code| code != 0), "{ended}");
    let ours = ended.stderr.replace("srun: error: ", "srun: ");
    assert_eq!(ours.matches("error: ").count(), 1, "{ended}");
    assert!(ours.contains("the loss is NaN at step "), "{ended}");
}

/// What kolo says, without what `srun` says.
fn ours(ended: &Ended) -> String {
    ended.stderr.lines().filter(|line| !line.starts_with("srun: ")).map(|line| format!("{line}\n")).collect()
}

fn a_step_with_different_jobs_is_refused(cluster: &Cluster) {
    let dir = tempdir();
    let words = Job::Digits.quiet().join(" ");
    let line = format!("exec {KOLO} {words} --set job.seed=$((SLURM_PROCID / 3))");
    let ended = run(&mut cluster.command(&["srun", "-N", "2", "-n", "4", "sh", "-c", &line], dir.path()), LIMIT);
    assert!(ended.code.is_some_and(|code| code != 0), "{ended}");
    let ours = ours(&ended);
    assert_eq!(ours.matches("error: ").count(), 1, "{ended}");
    assert!(ours.contains("`job.seed` is `1` at rank 3 on ") && ours.contains("`0` at ranks 0, 1 and 2"), "{ended}");
    let ended = run(cluster.command(&SRUN, dir.path()).args(Job::Digits.quiet()).args(["--hosts", "a:2"]), LIMIT);
    assert!(ended.code.is_some_and(|code| code != 0), "{ended}");
    assert!(ended.stderr.contains("--hosts: srun started the workers, 4 of them"), "{ended}");
}

/// Before it runs, before and while it joins, and at work: whenever it is stopped, one message names it. When it is woken
/// later, it accuses nobody.
fn a_stopped_rank_is_named(cluster: &Cluster) {
    std::thread::scope(|scope| {
        for moments in [&[(0, 0), (0, 2500)], &[(0, 10), (0, 40)], &[(0, 20), (2, 20)]] {
            scope.spawn(move || {
                for (victim, after_ms) in moments {
                    is_named_when_stopped(cluster, *victim, *after_ms);
                }
            });
        }
    });
}

fn is_named_when_stopped(cluster: &Cluster, victim: usize, after_ms: u64) {
    let dir = tempdir();
    let mut command = cluster.command(&SRUN, dir.path());
    command.args(["train", "--quiet", "--threads", "1", "--set", "train.epochs=100000"]);
    let ended = harmed(command.args(["--heartbeat-ms", "1000"]), LIMIT, move |processes| {
        let pid = processes.find(&format!("SLURM_PROCID={victim}"));
        std::thread::sleep(Duration::from_millis(after_ms));
        signal(pid, 19);
        let other = processes.find(&format!("SLURM_PROCID={}", victim + 1));
        // Nobody but its launcher can end a stopped process; when it wakes, it goes by itself.
        while std::fs::read_to_string(format!("/proc/{other}/stat")).is_ok_and(|stat| !stat.contains(") Z")) {
            std::thread::sleep(Duration::from_millis(20));
        }
        signal(pid, 18);
    });
    assert!(ended.code.is_some_and(|code| code != 0), "{ended}");
    let ours = ours(&ended);
    let accused: Vec<&str> = ours.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(accused.len(), 1, "rank {victim} after {after_ms} ms: {ended}");
    assert!(accused[0].starts_with(&format!("error: rank {victim}")), "after {after_ms} ms: {ended}");
}

fn a_batch_job(cluster: &Cluster) {
    let dir = tempdir();
    let words = Job::Addition.quiet();
    let mut command = cluster.command(&[KOLO, "slurm", &words[1]], dir.path());
    command.args(["--nodes", "2", "--tasks-per-node", "2", "--cpus-per-task", "1", "--submit", "--output", "job.sh"]);
    command.arg("--").args(&words[2..]);
    let submitted = run(&mut command, LIMIT).well();
    let number = submitted.stdout.trim().strip_prefix("submitted batch job ").expect("a number");
    assert!(dir.path().join("job.sh").exists(), "what was submitted can be read");
    let job = cluster.ended(number);
    let printed = std::fs::read_to_string(dir.path().join(format!("slurm-{number}.out"))).unwrap_or_default();
    assert!(job.contains("JobState=COMPLETED") && job.contains("JobName=addition"), "{job}\n{printed}");
    let report = report(dir.path());
    assert_eq!((weights(&report), report["workers"].as_u64()), (Job::Addition.digest(), Some(4)), "{printed}");
}

/// A job that is long enough to be harmed on its way.
const LONG: [&str; 4] = ["--threads", "1", "--out", "out"];

fn playground() -> String {
    let file = format!("{}/../../examples/playground.toml", env!("CARGO_MANIFEST_DIR"));
    std::fs::canonicalize(file).expect("an example").to_string_lossy().into_owned()
}

/// The weights that it comes to if nothing happens.
fn long_run() -> String {
    let dir = tempdir();
    run(kolo(dir.path()).args(["train", &playground(), "--quiet"]).args(LONG), LIMIT).well();
    weights(&report(&dir.path().join("out"))).to_string()
}

/// A batch job of the long run in a directory of its own.
struct Batch<'c> {
    cluster: &'c Cluster,
    dir: TempDir,
    number: String,
}

impl<'c> Batch<'c> {
    fn submit(cluster: &'c Cluster, options: &[&str], train: &[&str]) -> Self {
        let dir = tempdir();
        let mut command = cluster.command(&[KOLO, "slurm", &playground()], dir.path());
        command
            .args(["--nodes", "2", "--tasks-per-node", "2", "--submit"])
            .args(options)
            .arg("--")
            .args(LONG)
            .args(train);
        let submitted = run(&mut command, LIMIT).well();
        let number = submitted.stdout.trim().strip_prefix("submitted batch job ").expect("a number").to_string();
        Self { cluster, dir, number }
    }

    fn printed(&self) -> String {
        std::fs::read_to_string(self.dir.path().join(format!("slurm-{}.out", self.number))).unwrap_or_default()
    }

    /// Waits until it is at work.
    fn wait_for_work(&self) {
        let begin = Instant::now();
        while !self.printed().contains("epoch   2 ") {
            assert!(begin.elapsed() < LIMIT, "{}", self.printed());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The process of one of its tasks.
    fn task(&self, number: usize) -> i32 {
        let home = self.dir.path().canonicalize().expect("a directory");
        let has = |pid: &i32| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            let directory = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
            let wanted = format!("SLURM_PROCID={number}");
            let ours = program == Path::new(KOLO) && directory == home;
            ours && environment.split(|byte| *byte == 0).any(|word| word == wanted.as_bytes())
        };
        let names = std::fs::read_dir("/proc").expect("processes").flatten().map(|entry| entry.file_name());
        let mut pids = names.filter_map(|name| name.to_str()?.parse().ok());
        pids.find(has).unwrap_or_else(|| panic!("no task {number}: {}", self.printed()))
    }

    /// Waits until it is in the queue again, and lets it start at once.
    fn comes_back(&self) {
        let scontrol =
            |words: &[&str]| run(&mut self.cluster.command(&[&["scontrol"], words].concat(), Path::new("/")), LIMIT);
        let begin = Instant::now();
        let is_back = |shown: &str| shown.contains("JobState=PENDING") && shown.contains("Restarts=1");
        while !is_back(&scontrol(&["show", "job", &self.number]).well().stdout) {
            assert!(begin.elapsed() < LIMIT, "{}", self.printed());
            std::thread::sleep(Duration::from_millis(50));
        }
        // Slurm would wait two minutes. While it still cleans up, it refuses.
        while scontrol(&["update", &format!("JobId={}", self.number), "StartTime=now"]).code != Some(0) {
            assert!(begin.elapsed() < LIMIT, "{}", self.printed());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// It must end well, with these weights.
    fn agrees(&self, alone: &str) {
        let (job, printed) = (self.cluster.ended(&self.number), self.printed());
        assert!(job.contains("JobState=COMPLETED") && job.contains("ExitCode=0:0"), "{job}\n{printed}");
        assert_eq!(weights(&report(&self.dir.path().join("out"))), alone, "{printed}");
    }
}

/// An elastic job goes on without a task that is killed, and Slurm does not count it as failed.
fn a_batch_job_that_loses_a_task(cluster: &Cluster, alone: &str) {
    let batch = Batch::submit(cluster, &[], &["--elastic", "--set", "parallel.zero=1"]);
    batch.wait_for_work();
    signal(batch.task(2), 9);
    batch.agrees(alone);
    let printed = batch.printed();
    assert!(printed.contains("rank 2 on ") && printed.contains("was lost at step "), "{printed}");
    assert!(printed.contains("continuing at step "), "{printed}");
}

/// Told that its time is over, a job saves its state, goes back to the queue, and goes on from there.
fn a_batch_job_that_is_requeued(cluster: &Cluster, alone: &str) {
    let batch = Batch::submit(cluster, &["--requeue"], &[]);
    batch.wait_for_work();
    run(&mut cluster.command(&["scancel", "--batch", "--signal=TERM", &batch.number], Path::new("/")), LIMIT).well();
    batch.comes_back();
    batch.agrees(alone);
    let printed = batch.printed();
    assert!(printed.contains("interrupted after ") && printed.contains("resuming after step "), "{printed}");
}

/// The task that coordinates an elastic job is lost, and the job with it: it comes back and goes on from its newest checkpoint.
fn a_batch_job_that_loses_its_coordinator(cluster: &Cluster, alone: &str) {
    let batch = Batch::submit(cluster, &["--requeue"], &["--elastic", "--set", "checkpoint.every=20 steps"]);
    batch.wait_for_work();
    signal(batch.task(0), 9);
    batch.comes_back();
    batch.agrees(alone);
    let printed = batch.printed();
    assert!(printed.contains("resuming after step "), "{printed}");
}

#[test]
fn a_batch_script_is_printed_or_written() {
    let dir = tempdir();
    let folder = dir.path().canonicalize().expect("a directory").to_string_lossy().into_owned();
    let words = [
        "--nodes=2",
        "--tasks-per-node=4",
        "--cpus-per-task=2",
        "--time=2:00:00",
        "--partition=all",
        "--sbatch=--exclusive",
    ];
    let after = ["--", "--set", "train.epochs=5", "--report", "my report.json"];
    let printed = run(kolo(dir.path()).arg("slurm").args(words).args(after), LIMIT).well().stdout;
    let expected = format!(
        "#!/bin/bash\n#SBATCH --job-name=digits\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n\
         #SBATCH --cpus-per-task=2\n#SBATCH --time=2:00:00\n#SBATCH --partition=all\n#SBATCH --signal=TERM@60\n\
         #SBATCH --exclusive\n\nset -euo pipefail\ncd {folder}\n\
         exec srun --kill-on-bad-exit=1 --wait=60 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} \
         {KOLO} train --threads=2 --set train.epochs=5 --report 'my report.json'\n"
    );
    assert_eq!(printed, expected);
    let written = run(kolo(dir.path()).args(["slurm", "--output", "job.sh"]).args(words).args(after), LIMIT).well();
    assert_eq!(written.stdout, "");
    assert_eq!(std::fs::read_to_string(dir.path().join("job.sh")).expect("a script"), expected);
}
