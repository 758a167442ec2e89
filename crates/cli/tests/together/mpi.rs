//! Under real `mpirun`s.

use crate::job::{Job, KOLO, LIMIT, fails, tempdir, transport, under};
use crate::process::{installed, run};

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
