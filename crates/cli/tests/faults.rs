//! Harm done to running jobs at seeded moments: each must end in time, with one message that names rank, host, step and
//! operation, with the right exit code, and leave no process and no file behind. `bench/faults.py` does the same many times.
//!
//! For ranks that make other calls than the rest, this binary is also the example program `together`.

#[path = "../../../examples/together.rs"]
#[allow(dead_code, reason = "its own entry")]
mod together;

#[path = "faults/elastic.rs"]
mod elastic;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant, SystemTime};
use tempfile::TempDir;

const KOLO: &str = env!("CARGO_BIN_EXE_kolo");
const WORKERS: usize = 4;
const START_LIMIT: Duration = Duration::from_secs(60);
/// Longer than any bound: what is still there then is left over.
const GONE_LIMIT: Duration = Duration::from_secs(120);
/// Half of the time after which any wait ends by itself, at the usual heartbeat: who is done before saw the reason. A busy
/// machine may need much of it; `bench/faults.py` measures how long it really takes.
const SOON: Duration = Duration::from_secs(30);
/// By this variable all processes of a job are known.
const TAG: &str = "FAULTS_TAG";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| word == "together") {
        return together::run(&words[1..], &["together"]);
    }
    if let ["kills", count] = words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        elastic::kills::kills(count.parse().expect("a number of kills"));
        return ExitCode::SUCCESS;
    }
    // A shell starts what runs in its background with these ignored, and children inherit that.
    for number in [libc::SIGINT, libc::SIGQUIT, libc::SIGUSR1] {
        // SAFETY: no other thread runs yet.
        unsafe { libc::signal(number, libc::SIG_DFL) };
    }
    let filter = words.iter().find(|word| !word.starts_with('-')).map_or("", String::as_str);
    let run = |(name, test): &(&str, fn())| {
        let start = Instant::now();
        test();
        println!("test {name} ... ok ({} ms)", start.elapsed().as_millis());
    };
    let (long, others): (Vec<_>, Vec<_>) =
        TESTS.iter().filter(|(name, _)| name.contains(filter)).partition(|(name, _)| *name == WAITS);
    std::thread::scope(|scope| {
        scope.spawn(|| long.into_iter().for_each(run));
        others.into_iter().for_each(run);
    });
    ExitCode::SUCCESS
}

/// Half a minute of nothing but waiting, beside which the others run.
const WAITS: &str = "a_hung_rank";

const TESTS: &[(&str, fn())] = &[
    ("a_killed_rank", a_killed_rank),
    ("a_stopped_rank", a_stopped_rank),
    ("a_lost_rank_of_a_split_model", a_lost_rank_of_a_split_model),
    ("a_killed_server", a_killed_server),
    ("a_hung_rank", a_hung_rank),
    ("a_killed_launcher", a_killed_launcher),
    ("another_call", another_call),
    ("a_rank_that_leaves", a_rank_that_leaves),
    ("an_interrupt", an_interrupt),
    ("a_second_interrupt", a_second_interrupt),
    ("a_killed_elastic_worker", elastic::a_killed_elastic_worker),
    ("an_elastic_worker_is_replaced", elastic::an_elastic_worker_is_replaced),
    ("too_few_elastic_workers", elastic::too_few_elastic_workers),
    ("what_an_elastic_job_refuses", elastic::what_an_elastic_job_refuses),
    ("what_an_elastic_job_cannot_need", elastic::what_an_elastic_job_cannot_need),
    ("a_worker_and_its_buddy_are_lost", elastic::a_worker_and_its_buddy_are_lost),
    ("all_elastic_workers_are_lost", elastic::all_elastic_workers_are_lost),
    ("an_interrupted_elastic_job_loses_a_worker", elastic::an_interrupted_elastic_job_loses_a_worker),
    ("one_elastic_worker", elastic::one_elastic_worker),
    ("a_joined_worker_leaves", elastic::a_joined_worker_leaves),
    ("what_cannot_be_joined", elastic::what_cannot_be_joined),
];

/// Numbers from a seed, which a failure shows.
#[derive(Clone, Copy, Debug)]
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// A started command and all processes that come from it.
struct Job {
    child: Child,
    tag: String,
    folder: TempDir,
    about: String,
    /// The process of which this test has halted a thread.
    halted: Option<i32>,
}

/// How a job ended.
struct End {
    took: Duration,
    code: Option<i32>,
    error: String,
    about: String,
    /// Entries that are left in the directory for temporary files.
    temporary: usize,
}

impl Job {
    fn start(program: &Path, arguments: &[&str], about: String) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let tag = folder.path().to_string_lossy().into_owned();
        let file = |name: &str| Stdio::from(File::create(folder.path().join(name)).unwrap());
        for name in ["tmp", "home"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        let mut command = Command::new(program);
        command.args(arguments).current_dir(folder.path()).env(TAG, &tag);
        command.env("TMPDIR", folder.path().join("tmp")).env("HOME", folder.path().join("home"));
        let child = command.stdin(Stdio::null()).stdout(file("stdout")).stderr(file("stderr")).spawn().unwrap();
        Self { child, tag, folder, about, halted: None }
    }

    fn train(options: &[&str], about: String) -> Self {
        let job = format!("{}/../../examples/digits.toml", env!("CARGO_MANIFEST_DIR"));
        let workers = WORKERS.to_string();
        let mut arguments = vec!["train", &job, "-n", &workers, "--set", "train.epochs=100000"];
        arguments.extend(options);
        Self::start(Path::new(KOLO), &arguments, about)
    }

    /// All live processes, and the rank of those that have one.
    fn processes(&self) -> Vec<(i32, Option<usize>)> {
        let mark = format!("{TAG}={}", self.tag);
        let numbers = std::fs::read_dir("/proc").unwrap().flatten();
        let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let look = |pid: i32| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
            let variables: Vec<&[u8]> = environment.split(|byte| *byte == 0).collect();
            let rank = variables.iter().find_map(|word| word.strip_prefix(b"KOLO_RANK="));
            let rank = rank.and_then(|rank| std::str::from_utf8(rank).ok()?.parse().ok());
            (variables.contains(&mark.as_bytes()) && alive(pid)).then_some((pid, rank))
        };
        numbers.filter_map(look).collect()
    }

    /// The processes by rank, once all are there.
    fn workers(&mut self) -> BTreeMap<usize, i32> {
        self.ranks(WORKERS)
    }

    fn ranks(&mut self, count: usize) -> BTreeMap<usize, i32> {
        let start = Instant::now();
        loop {
            let ranks: BTreeMap<usize, i32> =
                self.processes().into_iter().filter_map(|(pid, rank)| Some((rank?, pid))).collect();
            if ranks.len() == count {
                return ranks;
            }
            let early = self.child.try_wait().unwrap();
            assert!(early.is_none() && start.elapsed() < START_LIMIT, "{}: no workers ({early:?})", self.about);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the first epoch is over.
    fn wait_for_work(&self) {
        let start = Instant::now();
        while !std::fs::read_to_string(self.folder.path().join("stdout")).unwrap().contains("epoch   1 ") {
            assert!(start.elapsed() < START_LIMIT, "{}: no epoch", self.about);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until there is a checkpoint.
    fn wait_for_checkpoint(&self) {
        let (start, runs) = (Instant::now(), self.folder.path().join("runs"));
        let is_there = || {
            let runs = std::fs::read_dir(&runs).into_iter().flatten().flatten();
            let mut kept = runs.filter_map(|run| std::fs::read_dir(run.path().join("checkpoints")).ok()).flatten();
            kept.any(|entry| entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("step-")))
        };
        while !is_there() {
            assert!(start.elapsed() < START_LIMIT, "{}: no checkpoint", self.about);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until all are gone since `harm`, and looks for what is left.
    fn end(mut self, harm: impl FnOnce(&mut Self) -> Instant) -> End {
        let processes = self.processes();
        let since = harm(&mut self);
        let mut last = Instant::now();
        while processes.iter().any(|(pid, _)| alive(*pid)) && since.elapsed() < GONE_LIMIT {
            let _ = self.child.try_wait();
            if let Some(pid) = self.halted {
                // SAFETY: no status is asked for. Until its tracer has seen its end, its parent does not.
                unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG | libc::__WALL) };
            }
            std::thread::sleep(Duration::from_millis(2));
            last = Instant::now();
        }
        let left = self.processes();
        left.iter().for_each(|(pid, _)| signal(*pid, libc::SIGKILL));
        assert!(left.is_empty(), "{}: still there: {left:?}", self.about);
        let home: Vec<_> = std::fs::read_dir(self.folder.path().join("home")).unwrap().flatten().collect();
        assert!(home.is_empty(), "{}: left behind: {home:?}", self.about);
        let read = |name: &str| std::fs::read_to_string(self.folder.path().join(name)).unwrap();
        let about = format!("{}\n{}{}", self.about, read("stdout"), read("stderr"));
        let temporary = std::fs::read_dir(self.folder.path().join("tmp")).unwrap().count();
        let (took, code) = (last.duration_since(since), self.child.wait().unwrap().code());
        // How long the rest of a run takes is said in good time or not.
        let is_of_fault = |line: &&str| !(line.starts_with("note: at ") && line.contains(" a step, the other "));
        let error = read("stderr").lines().filter(is_of_fault).map(|line| format!("{line}\n")).collect();
        End { took, code, error, about, temporary }
    }
}

impl Drop for Job {
    /// A test that failed leaves nothing running.
    fn drop(&mut self) {
        self.processes().iter().for_each(|(pid, _)| signal(*pid, libc::SIGKILL));
    }
}

impl End {
    /// One message, that says all of this, in time.
    fn check(&self, limit: Duration, code: i32, says: &[&str]) {
        let Self { took, about, .. } = self;
        assert!(*took <= limit, "{took:?} until all were gone, {about}");
        assert_eq!(self.code, Some(code), "{about}");
        let mut lines = self.error.lines();
        let one =
            lines.next().is_some_and(|line| line.starts_with("error: ")) && lines.all(|line| line.starts_with("  "));
        assert!(one, "not one message, {about}");
        for text in says {
            assert!(self.error.contains(text), "the message does not say {text:?}, {about}");
        }
    }

    /// The call, as its last sign of life told it; a rank that went before its first was in none.
    fn tells_call(&self) {
        assert!(self.error.contains(", call ") || self.error.contains("before its first call"), "{}", self.about);
    }

    /// Step and operation, or that it was not at work yet.
    fn tells_where(&self) {
        let at_work = self.error.contains("during step ") && self.error.contains(" call");
        assert!(at_work || self.error.contains("during its start"), "{}", self.about);
    }
}

fn alive(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    status.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}

fn signal(pid: i32, signal: i32) {
    // SAFETY: a process that this test started.
    unsafe { libc::kill(pid, signal) };
}

fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().into()
}

/// A job in which a rank gets a signal at some moment; the rank, and how it ended.
fn signalled(number: i32, seed: u64, options: &[&str]) -> (usize, End) {
    let mut chance = Chance(seed);
    let about = format!("signal {number}, seed {seed}, {options:?}");
    let mut job = Job::train(options, about);
    let workers = job.workers();
    std::thread::sleep(Duration::from_millis(chance.below(1500)));
    let rank = chance.below(WORKERS as u64) as usize;
    let harm = |_: &mut Job| {
        signal(workers[&rank], number);
        Instant::now()
    };
    (rank, job.end(harm))
}

fn a_killed_rank() {
    for (seed, transport) in [(1, "shm"), (2, "shm"), (3, "tcp"), (4, "tcp")] {
        let (rank, end) = signalled(libc::SIGKILL, seed, &["--transport", transport]);
        let start = format!("error: rank {rank} on {} was lost during ", host());
        end.check(SOON, 1, &[&start, ": it was killed by signal 9 (SIGKILL)"]);
        end.tells_where();
    }
}

fn a_stopped_rank() {
    for (seed, transport) in [(5, "shm"), (6, "tcp")] {
        let (rank, end) = signalled(libc::SIGSTOP, seed, &["--transport", transport]);
        let start = format!("error: rank {rank} on {} was lost during ", host());
        end.check(SOON, 1, &[&start, ": its process was stopped for "]);
        end.tells_where();
    }
}

/// Ranks that wait for a part of the model end as those that wait for a gradient.
fn a_lost_rank_of_a_split_model() {
    const SPLIT: [&str; 6] =
        ["--set", "parallel.slices=2", "--set", "parallel.tensor=2", "--set", "parallel.pipeline=2"];
    for (seed, number, words) in [
        (11, libc::SIGKILL, ": it was killed by signal 9 (SIGKILL)"),
        (12, libc::SIGSTOP, ": its process was stopped for "),
    ] {
        let (rank, end) = signalled(number, seed, &SPLIT);
        let start = format!("error: rank {rank} on {} was lost during ", host());
        let means =
            "\n  its part of the model is lost with it, and the others cannot go on without; there is no checkpoint";
        end.check(SOON, 1, &[&start, words, means]);
        end.tells_where();
    }
    // With a checkpoint to go on from.
    let options = [&SPLIT[..], &["--set", "checkpoint.every=1 epochs"]].concat();
    let mut job = Job::train(&options, "a killed rank of a split model with checkpoints".into());
    let workers = job.workers();
    job.wait_for_checkpoint();
    let end = job.end(|_: &mut Job| {
        signal(workers[&1], libc::SIGKILL);
        Instant::now()
    });
    end.check(SOON, 1, &["\n  its part of the model is lost with it", "start it again with --resume --out runs/"]);
}

/// A parameter server is called so, at work and before it has said what it is.
fn a_killed_server() {
    for works in [false, true] {
        let mut job = Job::train(&["--async", "--servers", "1"], format!("a killed server, at work: {works}"));
        let workers = job.ranks(WORKERS + 1);
        if works {
            job.wait_for_work();
        }
        let end = job.end(|_: &mut Job| {
            signal(workers[&WORKERS], libc::SIGKILL);
            Instant::now()
        });
        assert_eq!(end.code, Some(1), "{}", end.about);
        let start = format!("error: rank {WORKERS} on {} (server 0) was lost during ", host());
        assert!(end.error.starts_with(&start), "{}", end.about);
    }
}

/// Halts the first thread of a process, the one that computes; its others go on, and with them its signs of life.
fn halt(pid: i32) {
    for request in [libc::PTRACE_SEIZE, libc::PTRACE_INTERRUPT] {
        let null = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: a process that this test started; both requests take no data.
        let done = unsafe { libc::ptrace(request, pid, null, null) };
        assert_eq!(done, 0, "cannot trace {pid}: {}", std::io::Error::last_os_error());
    }
}

/// While the others wait for it, and while they do not: then by how far they get without it.
fn a_hung_rank() {
    // Short, as all is over after sixty; but not so short that a busy machine would keep a rank from giving a sign of life.
    let heartbeat = ["--heartbeat-ms", "500"];
    let stall = Duration::from_millis(500 * 60);
    let cases = [
        (40, &[][..], " within 3"),
        (41, &["--async", "--servers", "1", "--staleness", "none"], "did not reach its next step ("),
    ];
    let test = |(seed, options, at): (u64, &[&str], &str)| {
        let mut chance = Chance(seed);
        let options = [&heartbeat[..], options].concat();
        let mut job = Job::train(&options, format!("a halted thread, seed {seed}, {options:?}"));
        let workers = job.ranks(WORKERS + usize::from(options.len() > heartbeat.len()));
        job.wait_for_work();
        std::thread::sleep(Duration::from_millis(chance.below(1000)));
        let rank = chance.below(WORKERS as u64) as usize;
        let mut end = job.end(|job| {
            halt(workers[&rank]);
            job.halted = Some(workers[&rank]);
            Instant::now()
        });
        // Before it is given up, it is said to be slow; others may have been, too.
        let note = |line: &&str| line.starts_with("rank ") && line.contains(" is at step ");
        end.error = end.error.lines().filter(|line| !note(line)).map(|line| format!("{line}\n")).collect();
        let start = format!("error: rank {rank} on {} did not ", host());
        end.check(stall + SOON, 1, &[&start, at]);
        assert!(end.took >= stall, "{:?}, {}", end.took, end.about);
    };
    // Both wait most of the time.
    std::thread::scope(|scope| cases.map(|case| scope.spawn(move || test(case))).map(|test| test.join().unwrap()));
}

fn a_killed_launcher() {
    let signals =
        [(7, "shm", libc::SIGKILL), (8, "tcp", libc::SIGKILL), (9, "shm", libc::SIGQUIT), (10, "shm", libc::SIGUSR1)];
    for (seed, transport, number) in signals {
        let mut chance = Chance(seed);
        let mut job = Job::train(&["--transport", transport], format!("launcher, signal {number}, seed {seed}"));
        job.workers();
        std::thread::sleep(Duration::from_millis(chance.below(1500)));
        let end = job.end(|job| {
            signal(job.child.id() as i32, number);
            Instant::now()
        });
        assert_eq!(end.temporary, 0, "files are left, {}", end.about);
        assert!(end.took <= SOON, "{:?}, {}", end.took, end.about);
    }
}

/// The example program with a rank that goes wrong, and when it did.
fn wrong(how: &str, transport: &str, seed: u64) -> (usize, End) {
    let mut chance = Chance(seed);
    let (rank, after) = (chance.below(WORKERS as u64) as usize, 100 + chance.below(500));
    let (count, about) = ([1, 1000, 300_000][chance.below(3) as usize], format!("{how}, {transport}, seed {seed}"));
    let words = format!(
        "together {WORKERS} --transport {transport} --seconds 60 --wrong {rank} --how {how} --count {count} --after {after} --out out"
    );
    let words: Vec<&str> = words.split(' ').collect();
    let mut job = Job::start(&std::env::current_exe().unwrap(), &words, about);
    job.workers();
    let end = job.end(|job| {
        let log = job.folder.path().join("out").join(format!("rank-{rank}.log"));
        let start = Instant::now();
        loop {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            if let Some((_, seconds)) = text.lines().next().and_then(|line| line.rsplit_once(' ')) {
                let moment = SystemTime::UNIX_EPOCH + Duration::from_secs_f64(seconds.parse().unwrap());
                return Instant::now() - moment.elapsed().unwrap_or_default();
            }
            assert!(start.elapsed() < START_LIMIT, "{}: nothing went wrong", job.about);
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    (rank, end)
}

fn another_call() {
    let ways = ["kind", "size", "type", "reduction", "message"];
    for (seed, how) in ways.into_iter().enumerate() {
        let transport = ["shm", "tcp"][seed % 2];
        let (rank, end) = wrong(how, transport, 20 + seed as u64);
        let place = format!("rank {rank} on {} called ", host());
        end.check(SOON, 1, &["error: ranks disagree: rank ", &place, "; rank ", ", call ", " step "]);
    }
}

fn a_rank_that_leaves() {
    let (rank, end) = wrong("exit", "shm", 30);
    let start = format!("error: rank {rank} on {} was lost during step ", host());
    end.check(SOON, 7, &[&start, ": it exited with code 7"]);
    end.tells_call();
    let (rank, end) = wrong("fail", "tcp", 31);
    let start = format!("error: rank {rank} on {} failed at step ", host());
    end.check(SOON, 1, &[&start, ": this rank has had enough"]);
    end.tells_call();
}

fn an_interrupt() {
    interrupted(&[]);
    // Workers that make every step together end after the same one.
    interrupted(&["--async", "--servers", "1", "--staleness", "0"]);
    interrupted(&["--async", "--servers", "1", "--staleness", "2"]);
}

fn interrupted(options: &[&str]) {
    let mut job = Job::train(&[&["--report", "report.json"], options].concat(), format!("one interrupt {options:?}"));
    job.ranks(WORKERS + usize::from(!options.is_empty()));
    job.wait_for_work();
    let kept = job.folder.path().join("report.json");
    let mut report = String::new();
    let end = job.end(|job| {
        let since = Instant::now();
        signal(job.child.id() as i32, libc::SIGINT);
        job.child.wait().unwrap();
        report = std::fs::read_to_string(&kept).unwrap_or_default();
        since
    });
    let told = "stopping after this step; press Ctrl-C again to quit at once\n";
    assert_eq!((end.code, end.error.as_str()), (Some(130), told), "{}", end.about);
    assert!(report.contains("\"ended\": \"interrupted\""), "{report}{}", end.about);
}

fn a_second_interrupt() {
    let mut job = Job::train(&[], "two interrupts".into());
    let workers = job.workers();
    // A rank that cannot answer keeps the others from ending in order.
    signal(workers[&1], libc::SIGSTOP);
    signal(job.child.id() as i32, libc::SIGINT);
    std::thread::sleep(Duration::from_millis(200));
    let mut end = job.end(|job| {
        signal(job.child.id() as i32, libc::SIGINT);
        Instant::now()
    });
    assert!(end.error.starts_with("stopping after this step; "), "{}", end.about);
    end.error = end.error.split_once('\n').map(|(_, rest)| rest.to_string()).unwrap_or_default();
    end.check(SOON, 130, &["error: interrupted by signal 2"]);
}
