//! One digest per job, however it is laid out: workers, threads, sharding, transport, launcher.

use crate::job::{Job, KOLO, kolo, report, tempdir, transport, under, weights};
use crate::mpi::Mpi;
use crate::process::run;
use serde_json::Value;

const WORKERS: [usize; 4] = [1, 2, 4, 8];
const THREADS: [usize; 2] = [1, 2];
const TRANSPORTS: [Way; 4] = [Way::Shm, Way::Tcp, Way::Mpi(Mpi::Open), Way::Mpi(Mpi::Mpich)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Shm,
    Tcp,
    Mpi(Mpi),
}

/// One layout, as a place in each of the lists above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    job: usize,
    workers: usize,
    zero: usize,
    way: usize,
    threads: usize,
}

/// Every job with every number of workers and both forms of the optimizer over shared memory; over the others, every pair.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for workers in 0..WORKERS.len() {
        for job in 0..Job::ALL.len() {
            for zero in 0..2 {
                cases.push(Case { job, workers, zero, way: 0, threads: (workers + zero + job) % 2 });
            }
        }
        for way in 1..TRANSPORTS.len() {
            let turn = workers + way;
            cases.push(Case { job: turn % 3, workers, zero: turn / 2 % 2, way, threads: turn % 2 });
        }
    }
    cases
}

impl Case {
    fn factors(self) -> [usize; 5] {
        [self.job, self.workers, self.zero, self.way, self.threads]
    }

    fn check(self) {
        let (job, workers, dir) = (Job::ALL[self.job], WORKERS[self.workers], tempdir());
        let way = TRANSPORTS[self.way];
        let count = workers.to_string();
        let mut command = match way {
            Way::Mpi(mpi) => under(&mpi.start(&count), dir.path()),
            Way::Shm => kolo(dir.path()),
            Way::Tcp => kolo(dir.path()),
        };
        command.args(job.quiet());
        match way {
            Way::Mpi(_) => {}
            Way::Shm => drop(command.args(["-n", &count])),
            Way::Tcp => drop(command.args(["-n", &count, "--transport", "tcp"])),
        }
        command.arg(format!("--set=parallel.zero={}", self.zero)).arg(format!("--threads={}", THREADS[self.threads]));
        let report = job.agrees(&mut command, dir.path());
        let number = |key: &str| report.pointer(key).and_then(Value::as_u64);
        assert_eq!(number("/workers"), Some(workers as u64), "{self:?}");
        assert_eq!(number("/layout/zero"), Some(self.zero as u64), "{self:?}");
        assert_eq!(number("/threads"), Some(THREADS[self.threads] as u64), "{self:?}");
        let expected = match way {
            _ if workers == 1 => "",
            Way::Shm => "shm",
            Way::Tcp => "tcp",
            Way::Mpi(_) => "mpi",
        };
        assert_eq!(transport(&report), expected, "{self:?}");
    }
}

fn check(way: usize, of: impl Fn(&Case) -> bool) {
    cases().into_iter().filter(|case| case.way == way && of(case)).for_each(Case::check);
}

#[test]
fn the_layouts_cover_all_pairs() {
    let sizes = [Job::ALL.len(), WORKERS.len(), 2, TRANSPORTS.len(), THREADS.len()];
    let cases: Vec<[usize; 5]> = cases().into_iter().map(Case::factors).collect();
    for (one, other) in (0..5).flat_map(|one| (0..one).map(move |other| (one, other))) {
        for (a, b) in (0..sizes[one]).flat_map(|a| (0..sizes[other]).map(move |b| (a, b))) {
            assert!(cases.iter().any(|case| case[one] == a && case[other] == b), "factors {one} {other}: {a} {b}");
        }
    }
}

#[test]
fn digits_over_shared_memory() {
    check(0, |case| Job::ALL[case.job] == Job::Digits);
}

#[test]
fn addition_over_shared_memory() {
    check(0, |case| Job::ALL[case.job] == Job::Addition);
}

#[test]
fn resnet_over_shared_memory() {
    check(0, |case| Job::ALL[case.job] == Job::Resnet);
}

#[test]
fn over_tcp() {
    check(1, |_| true);
}

#[test]
fn over_open_mpi() {
    if Mpi::Open.installed() {
        check(2, |_| true);
    }
}

#[test]
fn over_mpich() {
    if Mpi::Mpich.installed() {
        check(3, |_| true);
    }
}

#[test]
fn with_weights_in_one_place() {
    for (job, workers) in [(Job::Digits, "8"), (Job::Addition, "4"), (Job::Resnet, "2")] {
        let dir = tempdir();
        let mut command = kolo(dir.path());
        command.args(job.quiet()).args(["-n", workers, "--threads", "1", "--set", "parallel.central=true"]);
        job.agrees(&mut command, dir.path());
    }
    let dir = tempdir();
    let mut command = under(&[KOLO, "train", "-n", "2", "--transport", "tcp"], dir.path());
    let ended = run(command.args(["--set", "parallel.central=true", "--quiet"]), crate::job::LIMIT);
    assert_eq!(ended.code, Some(2), "{ended}");
    let wanted = "`parallel.central = true` needs all workers in the shared memory of one host, but they exchange over \
                  --transport tcp";
    assert!(ended.only_error().contains(wanted), "{ended}");
    assert!(!ended.stdout.contains("steps"), "before anything is started: {ended}");
}

/// Tensors so large that a worker's share ends inside of one, with norms of whole tensors.
const WIDE: &str = "[model]\nkind = \"mlp\"\nhidden = [300, 200]\n[data]\nsource = \"builtin:digits\"\nbatch = 32\ngrains = 8\n\
                    [train]\nsteps = 4\nclip = 0.5\noptimizer = { kind = \"lamb\" }\n";

#[test]
fn with_tensors_in_pieces() {
    let dir = tempdir();
    std::fs::write(dir.path().join("wide.toml"), WIDE).unwrap();
    let digest = |workers: &str, setting: &str| {
        let mut command = kolo(dir.path());
        command.args(["train", "wide.toml", "--quiet", "--report", "report.json"]);
        run(command.args(["-n", workers, "--threads", "1", "--set", setting]), crate::job::LIMIT).well();
        weights(&report(dir.path())).to_owned()
    };
    let alone = digest("1", "parallel.zero=0");
    for (workers, setting) in [("2", "parallel.central=true"), ("4", "parallel.central=true"), ("4", "parallel.zero=1")]
    {
        assert_eq!(digest(workers, setting), alone, "{workers} workers, {setting}");
    }
}

#[test]
fn with_servers_that_wait_for_all() {
    let layouts = [
        (Job::Digits, "4", "1", "shm"),
        (Job::Digits, "2", "2", "tcp"),
        (Job::Addition, "2", "2", "shm"),
        (Job::Resnet, "2", "1", "shm"),
    ];
    for (job, workers, servers, way) in layouts {
        let dir = tempdir();
        let mut command = kolo(dir.path());
        command.args(job.quiet()).args(["-n", workers, "--threads", "1", "--transport", way]);
        let report = job.agrees(command.args(["--async", "--servers", servers, "--staleness", "0"]), dir.path());
        assert_eq!(report["asynchronous"]["servers"].to_string(), servers, "{report:#}");
    }
}
