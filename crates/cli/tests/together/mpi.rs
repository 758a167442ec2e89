//! Under real `mpirun`s.

use crate::job::{Job, KOLO, LIMIT, fails, tempdir, transport, under};
use crate::process::{Ended, harmed, installed, run, signal};
use std::path::Path;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mpi {
    Open,
    Mpich,
}

impl Mpi {
    pub fn installed(self) -> bool {
        match self {
            Mpi::Open => installed("mpirun.openmpi", "Open MPI"),
            Mpi::Mpich => installed("mpirun.mpich", "MPICH"),
        }
    }

    /// The launcher's command line, with the binary at its end.
    pub fn start(self, ranks: &str) -> Vec<&str> {
        match self {
            Mpi::Open => vec!["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", ranks, KOLO],
            Mpi::Mpich => vec!["mpirun.mpich", "-n", ranks, KOLO],
        }
    }

    /// The variable that tells a rank its number.
    fn rank(self, rank: usize) -> String {
        match self {
            Mpi::Open => format!("OMPI_COMM_WORLD_RANK={rank}"),
            Mpi::Mpich => format!("PMI_RANK={rank}"),
        }
    }

    fn library(self) -> &'static str {
        match self {
            Mpi::Open => "libmpi.so.40",
            Mpi::Mpich => "libmpich.so.12",
        }
    }

    fn all() -> impl Iterator<Item = Self> {
        [Mpi::Open, Mpi::Mpich].into_iter().filter(|mpi| mpi.installed())
    }
}

#[test]
fn mpirun_starts_workers_over_any_transport() {
    for mpi in Mpi::all() {
        for way in ["shm", "tcp"] {
            let dir = tempdir();
            let mut command = under(&mpi.start("2"), dir.path());
            command.args(Job::Digits.quiet()).args(["--threads", "1", "--transport", way]);
            assert_eq!(transport(&Job::Digits.agrees(&mut command, dir.path())), way, "{mpi:?}");
        }
        let dir = tempdir();
        let mut command = under(&mpi.start("3"), dir.path());
        command.args(Job::Digits.quiet()).args(["--threads", "1", "--async", "--servers", "1", "--staleness", "0"]);
        Job::Digits.agrees(&mut command, dir.path());
    }
}

#[test]
fn mpirun_shows_one_view() {
    for mpi in Mpi::all() {
        let dir = tempdir();
        let ended = run(under(&mpi.start("2"), dir.path()).args(Job::Digits.command()), LIMIT).well();
        for line in ["digits: builtin:digits", "epoch   1", "done after 4 steps", "  weights     blake3:"] {
            assert_eq!(ended.stdout.matches(line).count(), 1, "{mpi:?}: {line}: {ended}");
        }
        assert_eq!(ended.stderr, "", "{mpi:?}");
    }
}

#[test]
fn a_job_that_fails_under_mpirun_says_so_once() {
    for mpi in Mpi::all() {
        let dir = tempdir();
        let ended = fails(&mut under(&mpi.start("4"), dir.path()), dir.path(), &[]);
        assert!(ended.code.is_some_and(|code| code != 0), "{mpi:?}: {ended}");
        let message = ended.only_error();
        assert!(
            message.starts_with("error: rank ") && message.contains("the loss is NaN at step "),
            "{mpi:?}: {ended}"
        );
        assert!(message.contains("hint: lower the learning rate"), "{mpi:?}: {ended}");
    }
}

#[test]
fn a_wrong_job_under_mpirun_is_told_once() {
    for mpi in Mpi::all() {
        let dir = tempdir();
        let ended = run(under(&mpi.start("4"), dir.path()).args(["train", "nowhere.toml"]), LIMIT);
        assert!(ended.code.is_some_and(|code| code != 0), "{mpi:?}: {ended}");
        assert!(ended.only_error().contains("nowhere.toml"), "{mpi:?}: {ended}");
        let ended = run(under(&mpi.start("4"), dir.path()).args(["train", "--nowhere"]), LIMIT);
        assert!(ended.code.is_some_and(|code| code != 0), "{mpi:?}: {ended}");
        assert_eq!(ended.stderr.matches("unexpected argument '--nowhere'").count(), 1, "{mpi:?}: {ended}");
    }
}

/// Two ranks with the same command, but for what is added to the second one's.
fn differing(mpi: Mpi, first: &[&str], second: &[&str]) -> Ended {
    let dir = tempdir();
    let mut command = under(&mpi.start("1"), dir.path());
    command.args(first).args([":", "-n", "1", KOLO]).args(second);
    let ended = run(&mut command, LIMIT);
    assert!(ended.code.is_some_and(|code| code != 0), "{mpi:?}: {ended}");
    assert_eq!(left(dir.path()), 0, "{mpi:?}: files by which ranks met are still there: {ended}");
    ended
}

/// What lies where ranks meet.
/// Files by which ranks met, but for marks of what was said, which stay for ranks that wake later.
fn left(home: &Path) -> usize {
    let is_mark = |entry: &std::fs::DirEntry| entry.path().extension().is_some_and(|end| end == "told");
    let files = std::fs::read_dir(home.join(".kolo/run")).into_iter().flatten();
    files.flatten().filter(|entry| !is_mark(entry)).count()
}

#[test]
fn ranks_with_different_jobs_are_refused() {
    let words = Job::Digits.quiet();
    let usual: Vec<&str> = words.iter().map(String::as_str).collect();
    let with = |more: &[&'static str]| [&usual[..], more].concat();
    let bench = [&["bench", "train", usual[1], "--steps"][..], &["1"]].concat();
    let cases = [
        (usual.clone(), with(&["--set", "data.holdout=0.21"]), "`data.holdout` is `0.21` at rank 1 on "),
        (usual.clone(), with(&["--set", "job.seed=2"]), "`job.seed` is `2` at rank 1 on "),
        (usual.clone(), with(&["--trace", "trace.json"]), "`--trace` is `given` at rank 1 on "),
        (usual.clone(), bench.clone(), "`command` is `bench train` at rank 1 on "),
        (bench.clone(), [&bench[..], &["--warmup", "7"]].concat(), "`--warmup` is `7` at rank 1 on "),
        (
            with(&["--async", "--staleness", "0"]),
            with(&["--async", "--staleness", "2"]),
            "`--staleness` is `2` at rank 1 on ",
        ),
    ];
    for mpi in Mpi::all() {
        for (first, second, expected) in &cases {
            let ended = differing(mpi, first, second);
            let message = ended.only_error();
            assert!(message.starts_with("error: the ranks were given different jobs: "), "{mpi:?}: {ended}");
            assert!(message.contains(expected) && message.contains(" at rank 0 on "), "{expected}: {mpi:?}: {ended}");
        }
        // A default that is written out is the same job.
        let dir = tempdir();
        let mut command = under(&mpi.start("1"), dir.path());
        command.args(&usual).args([":", "-n", "1", KOLO]).args(with(&["--set", "data.holdout=0.2"]));
        run(&mut command, LIMIT).well();
    }
}

/// Two tables of one size, of which one has a few other labels.
#[test]
fn ranks_with_different_data_are_refused() {
    let dir = tempdir();
    let table = |flipped: std::ops::Range<usize>| {
        let label = |row: usize| usize::from(row.is_multiple_of(2) != flipped.contains(&row));
        (0..1000).map(|row| format!("{}.5,{}.25,{}\n", row % 7, row % 11, label(row))).collect::<String>()
    };
    for (name, flipped) in [("a", 0..0), ("b", 300..420)] {
        std::fs::create_dir(dir.path().join(name)).unwrap();
        std::fs::write(dir.path().join(name).join("t.csv"), format!("u,v,y\n{}", table(flipped))).unwrap();
    }
    let job = "[model]\nkind = \"mlp\"\n[data]\nsource = \"t.csv\"\n[train]\nepochs = 1\n";
    std::fs::write(dir.path().join("job.toml"), job).unwrap();
    let words = ["train", "../job.toml", "--quiet", "--threads", "1"];
    for mpi in Mpi::all() {
        let mut command = under(&mpi.start("1"), &dir.path().join("a"));
        command.args(words).args([":", "-n", "1", "-wdir"]).arg(dir.path().join("b")).arg(KOLO).args(words);
        let ended = run(&mut command, LIMIT);
        let message = ended.only_error();
        assert!(message.contains("`fingerprint of the data` is "), "{mpi:?}: {ended}");
    }
}

/// Stopped before it has joined, while MPI starts, and at work: whoever it is, it is named, and nobody waits for ever.
#[test]
fn a_rank_that_is_stopped_under_mpirun_is_named() {
    for mpi in Mpi::all() {
        // Whoever is stopped as soon as it is there has given no heartbeat, and is waited for the longest.
        let early = if mpi == Mpi::Open { (0, 0) } else { (1, 150) };
        for (victim, after_ms) in [early, (2, 30), (0, 2500)] {
            let dir = tempdir();
            let mut command = under(&mpi.start("4"), dir.path());
            command.args(["train", "--quiet", "--threads", "1", "--set", "train.epochs=100000"]);
            let variable = mpi.rank(victim);
            let ended = harmed(command.args(["--heartbeat-ms", "400"]), LIMIT, move |processes| {
                let pid = processes.find(&variable);
                std::thread::sleep(Duration::from_millis(after_ms));
                signal(pid, 19);
            });
            assert!(ended.code.is_some_and(|code| code != 0), "{mpi:?}: {ended}");
            let message = ended.only_error();
            let named = format!("error: rank {victim} ");
            assert!(message.starts_with(&named), "{mpi:?}, after {after_ms} ms: {ended}");
            // A rank that never came may come for a moment while its launcher ends it.
            assert!(left(dir.path()) == 0 || message.contains("did not start"), "{mpi:?}: {ended}");
        }
    }
}

#[test]
fn flags_that_mean_nothing_under_mpirun_are_told_once() {
    for mpi in Mpi::all() {
        for (flags, expected) in [
            (&["-n", "4"][..], ["-n 4: mpirun of ", " started the workers, 2 of them"]),
            (&["--hosts", "a:2"], ["--hosts: mpirun of ", " started the workers, 2 of them"]),
            (&["--streams", "2"], ["--streams: only TCP has streams", ""]),
        ] {
            let dir = tempdir();
            let ended = run(under(&mpi.start("2"), dir.path()).args(Job::Digits.quiet()).args(flags), LIMIT);
            assert!(ended.code.is_some_and(|code| code != 0), "{mpi:?}: {ended}");
            assert!(expected.iter().all(|part| ended.only_error().contains(part)), "{mpi:?}: {ended}");
        }
    }
}

#[test]
fn the_library_of_another_mpi_is_explained() {
    for (launcher, other) in [(Mpi::Open, Mpi::Mpich), (Mpi::Mpich, Mpi::Open)] {
        if !launcher.installed() || !other.installed() {
            continue;
        }
        let dir = tempdir();
        let mut command = under(&launcher.start("2"), dir.path());
        let ended = run(command.args(Job::Digits.quiet()).args(["--mpi-library", other.library()]), LIMIT);
        assert!(ended.code.is_some_and(|code| code != 0), "{launcher:?}: {ended}");
        let expected = "this process is alone in its MPI world, but";
        assert!(ended.stderr.contains(expected), "{launcher:?}: {ended}");
        assert!(ended.stderr.contains("does not belong to that launcher\n  hint: "), "{launcher:?}: {ended}");
        assert!(!dir.path().join("report.json").exists(), "{launcher:?} trained");
    }
}
