//! Real MPI: this binary starts itself under the launchers of Open MPI and MPICH, and every rank checks every collective
//! against its definition. Where a launcher is missing, its tests say so and do nothing.

#[path = "mpi/ranks.rs"]
mod ranks;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How to start four ranks, and the library that belongs to the launcher.
struct Launcher {
    program: &'static str,
    arguments: &'static [&'static str],
    library: &'static str,
}

const LAUNCHERS: [Launcher; 2] = [
    Launcher {
        program: "mpirun.openmpi",
        arguments: &["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "4"],
        library: "libmpi.so.40",
    },
    Launcher { program: "mpirun.mpich", arguments: &["-n", "4"], library: "libmpich.so.12" },
];

/// After this a test hangs. Ranks that spin while they wait take minutes beside busy loops.
const HANG_SECONDS: &str = "1200";

/// What four ranks printed, and whether they all ended well.
struct Outcome {
    good: bool,
    code: Option<i32>,
    text: String,
}

impl Outcome {
    /// Lines of the ranks that start with this word, each without it.
    fn lines(&self, word: &str) -> Vec<&str> {
        self.text.lines().filter_map(|line| line.strip_prefix(word)).map(str::trim).collect()
    }
}

fn is_missing(launcher: &Launcher) -> bool {
    let missing = Command::new(launcher.program).arg("--version").stdout(Stdio::null()).status().is_err();
    if missing {
        println!("skipped: no MPI ({} not found)", launcher.program);
    }
    missing
}

fn command(launcher: &Launcher, task: &str, library: Option<&str>) -> Command {
    let mut command = Command::new("timeout");
    command
        .args(["-k", "1", HANG_SECONDS, launcher.program])
        .args(launcher.arguments)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "one_rank", "--ignored", "--nocapture", "--test-threads", "1"])
        .env("KOLO_TEST_MPI_TASK", task)
        .env("KOLO_TEST_MPI_LIBRARY", library.unwrap_or_default());
    command
}

fn start(launcher: &Launcher, task: &str, library: Option<&str>) -> Option<Outcome> {
    if is_missing(launcher) {
        return None;
    }
    let output = command(launcher, task, library).output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    Some(Outcome { good: output.status.success(), code: output.status.code(), text })
}

/// Runs a task under every launcher there is.
fn under_all(task: &str, check: impl Fn(&Launcher, &Outcome)) {
    for launcher in &LAUNCHERS {
        if let Some(outcome) = start(launcher, task, None) {
            check(launcher, &outcome);
        }
    }
}

/// What a rank does; not a test by itself.
#[test]
#[ignore = "started by the tests, under a launcher"]
fn one_rank() {
    let task = std::env::var("KOLO_TEST_MPI_TASK").expect("started by the tests");
    let library = std::env::var("KOLO_TEST_MPI_LIBRARY").ok().filter(|library| !library.is_empty());
    ranks::run(&task, library.as_deref());
}

#[test]
fn every_collective_is_as_defined() {
    under_all("collectives", |launcher, outcome| {
        assert!(outcome.good, "{}: {}", launcher.program, outcome.text);
        let good = outcome.lines("good:");
        assert_eq!(good.len(), 4, "{}: {}", launcher.program, outcome.text);
        assert!(good.iter().all(|line| line.contains(launcher.library)), "{good:?}");
    });
}

#[test]
fn started_calls_of_several_communicators_run_beside_each_other() {
    for task in ["threads", "threads one at a time"] {
        under_all(task, |launcher, outcome| {
            assert!(outcome.good && outcome.lines("good:").len() == 4, "{}: {}", launcher.program, outcome.text);
        });
    }
}

#[test]
fn different_calls_are_named_on_all_ranks() {
    for (task, parts) in [
        ("other size", &["rank 0", "all_reduce(sum) of 1000 f32", "rank 2", "all_reduce(sum) of 1001 f32"][..]),
        ("other kind", &["rank 0", "broadcast of 8 f32 from rank 0", "rank 2", "barrier"][..]),
        ("other parts", &["rank 0", "all_gather of 8 i32", "rank 2", "parts of different sizes"][..]),
        ("other pairs", &["rank 3 expects 2 elements from rank 2, which sends 1"][..]),
    ] {
        under_all(task, |launcher, outcome| {
            let faults = outcome.lines("fault:");
            assert!(outcome.good, "{task} under {}: {}", launcher.program, outcome.text);
            assert_eq!(faults.len(), 4, "{task} under {}: {}", launcher.program, outcome.text);
            for fault in faults {
                for part in parts {
                    assert!(fault.contains(part), "{task} under {}: {part}: {fault}", launcher.program);
                }
            }
        });
    }
}

#[test]
fn a_message_of_another_size_is_named_by_its_receiver() {
    under_all("other message", |launcher, outcome| {
        let faults = outcome.lines("fault:");
        assert_eq!(faults.len(), 1, "{}: {}", launcher.program, outcome.text);
        for part in ["rank 1", "send of 9 f32 to rank 1", "rank 0", "send of 10 f32 to rank 1"] {
            assert!(faults[0].contains(part), "{}: {}", launcher.program, faults[0]);
        }
    });
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    under_all("absent", |launcher, outcome| {
        let faults = outcome.lines("fault:");
        assert_eq!(faults.len(), 3, "{}: {}", launcher.program, outcome.text);
        for fault in faults {
            assert!(fault.contains("rank 3 did not reach all_reduce(sum) of 5 f32"), "{}: {fault}", launcher.program);
        }
    });
}

#[test]
fn the_end_of_the_job_ends_a_wait() {
    under_all("ended", |launcher, outcome| {
        let faults = outcome.lines("fault:");
        assert_eq!(faults.len(), 3, "{}: {}", launcher.program, outcome.text);
        assert!(faults.iter().all(|fault| fault.contains("ended from outside")), "{}: {faults:?}", launcher.program);
    });
}

#[test]
fn the_wrong_library_is_explained() {
    for (launcher, other) in [(&LAUNCHERS[0], &LAUNCHERS[1]), (&LAUNCHERS[1], &LAUNCHERS[0])] {
        if start(other, "nothing", None).is_none() {
            continue;
        }
        let Some(outcome) = start(launcher, "nothing", Some(other.library)) else { continue };
        let faults = outcome.lines("fault:");
        assert_eq!(faults.len(), 4, "{}: {}", launcher.program, outcome.text);
        for part in ["alone in its MPI world", "4 ranks", other.library, "--mpi-library PATH"] {
            assert!(faults.iter().all(|fault| fault.contains(part)), "{}: {part}: {faults:?}", launcher.program);
        }
    }
}

#[test]
fn abort_ends_all_ranks_with_its_code() {
    under_all("abort", |launcher, outcome| {
        assert_eq!(outcome.code, Some(7), "{}: {}", launcher.program, outcome.text);
    });
}

#[test]
fn a_killed_rank_ends_the_job() {
    for launcher in LAUNCHERS.iter().filter(|launcher| !is_missing(launcher)) {
        let mut job = command(launcher, "endless", None).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(job.stdout.take().unwrap()).lines().map_while(Result::ok);
        let process = |line: String| line.strip_prefix("process: ").and_then(|number| number.parse::<i32>().ok());
        let ranks: Vec<i32> = lines.filter_map(process).take(4).collect();
        assert_eq!(ranks.len(), 4, "{}", launcher.program);
        // SAFETY: a process that this test started.
        unsafe { libc::kill(ranks[2], libc::SIGKILL) };
        let killed = Instant::now();
        assert!(!job.wait().unwrap().success(), "{}", launcher.program);
        // SAFETY: asks whether a process exists.
        while ranks.iter().any(|rank| unsafe { libc::kill(*rank, 0) } == 0) {
            assert!(killed.elapsed() < Duration::from_secs(60), "{}: a rank outlived the job", launcher.program);
            std::thread::sleep(Duration::from_millis(10));
        }
        println!("{}: all gone after {} ms", launcher.program, killed.elapsed().as_millis());
    }
}

#[test]
fn a_missing_library_is_explained() {
    let fault = kolo_comm::mpi::MpiWorld::init(&|_| None, Some("/no/libmpi.so".as_ref())).unwrap_err().to_string();
    for part in ["/no/libmpi.so", "no launcher", "--mpi-library PATH", "LD_LIBRARY_PATH"] {
        assert!(fault.contains(part), "{part}: {fault}");
    }
}
