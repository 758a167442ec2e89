//! Real processes: this binary starts itself as workers, and as the supervisor of workers, and does them harm.

mod foreign;
mod measure;
mod remote;
mod slurm;
mod worker;

use kolo_cluster::local::{self, LocalOptions};
use kolo_cluster::{Notice, Outcome};
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Half of the time after which any wait ends by itself, at the usual heartbeat: who is done before saw the reason. A busy
/// machine may need much of it; `faults` measures how long it really takes.
const SOON: Duration = Duration::from_secs(30);

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("worker") => worker::run(&arguments[2..]),
        Some("supervisor") => supervise(&arguments[2..]),
        Some("agent") => std::process::exit(kolo_cluster::agent::run()),
        Some("faults") => measure::faults(),
        Some("soak") => measure::soak(&arguments[2..]),
        Some("submit") => slurm::submit_here(&arguments[2..]),
        Some("launcher") => remote::launch(&arguments[2..]),
        Some("relay") => remote::relay(&arguments[2..]),
        Some("relay-server") => remote::relay_server(),
        filter => run_tests(filter.filter(|name| !name.starts_with('-')).unwrap_or("")),
    }
}

const TESTS: &[(&str, fn())] = &[
    ("all_end_well", all_end_well),
    ("killed_rank", killed_rank),
    ("stopped_rank", stopped_rank),
    ("stopped_before_it_joins", stopped_before_it_joins),
    ("exit_codes", exit_codes),
    ("failure_is_told_once", failure_is_told_once),
    ("different_calls", different_calls),
    ("deaf_workers_are_killed", deaf_workers_are_killed),
    ("killed_supervisor", killed_supervisor),
    ("interrupts", interrupts),
    ("a_suspended_launcher", a_suspended_launcher),
    ("grandchildren_go_too", grandchildren_go_too),
    ("logs_and_echo", logs_and_echo),
    ("logs_of_a_failed_job_are_kept", logs_of_a_failed_job_are_kept),
    ("output_that_cannot_be_written", output_that_cannot_be_written),
    ("program_that_is_not_there", program_that_is_not_there),
    ("meets_through_a_file", foreign::meets_through_a_file),
    ("a_lost_rank_is_told_once", foreign::a_lost_rank_is_told_once),
    ("a_stopped_rank_and_a_deaf_one", foreign::a_stopped_rank_and_a_deaf_one),
    ("a_stopped_first_rank_is_told_once", foreign::a_stopped_first_rank_is_told_once),
    ("a_first_rank_stopped_as_it_starts_is_told_once", foreign::a_first_rank_stopped_as_it_starts_is_told_once),
    ("all_are_suspended", foreign::all_are_suspended),
    ("a_failing_first_rank_is_told_once", foreign::a_failing_first_rank_is_told_once),
    ("a_rank_lost_before_it_joins_is_named_soon", foreign::a_rank_lost_before_it_joins_is_named_soon),
    ("under_mpirun", foreign::under_mpirun),
    ("hosts_end_well", remote::hosts_end_well),
    ("hosts_keep_last_words", remote::hosts_keep_last_words),
    ("hosts_lose_a_rank", remote::hosts_lose_a_rank),
    ("hosts_lose_an_agent", remote::hosts_lose_an_agent),
    ("hosts_lose_the_launcher", remote::hosts_lose_the_launcher),
    ("a_host_that_cannot_be_reached", remote::a_host_that_cannot_be_reached),
    ("hosts_are_suspended", remote::hosts_are_suspended),
    ("a_suspended_launcher_of_hosts", remote::a_suspended_launcher_of_hosts),
    ("a_stopped_launcher_of_hosts_is_awaited", remote::a_stopped_launcher_of_hosts_is_awaited),
    ("a_link_goes_down", remote::a_link_goes_down),
    ("under_slurm", slurm::under_slurm),
];

/// Seconds of processes that were stopped and go on: they run beside the others.
const WAITS: &[&str] = &[
    "a_suspended_launcher",
    "all_are_suspended",
    "hosts_are_suspended",
    "a_suspended_launcher_of_hosts",
    "a_stopped_launcher_of_hosts_is_awaited",
];

fn run_tests(filter: &str) {
    let chosen: Vec<_> = TESTS.iter().filter(|(name, _)| name.contains(filter)).collect();
    println!("running {} tests", chosen.len());
    let run = |(name, test): &(&str, fn())| {
        let start = Instant::now();
        test();
        println!("test {name} ... ok ({} ms)", start.elapsed().as_millis());
    };
    let (long, others): (Vec<_>, Vec<_>) = chosen.iter().partition(|(name, _)| WAITS.contains(name));
    std::thread::scope(|scope| {
        for test in long {
            scope.spawn(move || run(test));
        }
        others.into_iter().for_each(run);
    });
    println!("test result: ok. {} passed", chosen.len());
}

/// A supervisor as a process of its own: `supervisor WORLD OUT BEHAVIOUR…`.
fn supervise(arguments: &[String]) {
    let mut options = options(arguments[0].parse().unwrap(), &arguments[2..]);
    options.out = Some(PathBuf::from(&arguments[1]));
    options.echo = Some(kolo_cluster::logs::terminal());
    let outcome = local::run(&options, &mut |notice| match notice {
        Notice::Joined { world } => println!("joined {world}"),
        Notice::Event { rank, bytes } => println!("event {rank} {}", String::from_utf8_lossy(bytes)),
        Notice::Slow(lag) => println!("slow {lag}"),
        Notice::Interrupted => println!("interrupted"),
        _ => {}
    })
    .unwrap();
    if let Some(message) = outcome.message() {
        eprintln!("FAULT {message}");
    }
    std::process::exit(outcome.exit_code());
}

fn options(world: usize, behaviour: &[String]) -> LocalOptions {
    let mut arguments: Vec<OsString> = vec!["worker".into()];
    arguments.extend(behaviour.iter().map(OsString::from));
    let mut options = LocalOptions::new(world, std::env::current_exe().unwrap(), arguments);
    options.echo = None;
    options
}

/// Runs workers in this process; calls `harm` once with their pids when all have said "here".
fn run_with(world: usize, behaviour: &[&str], out: &Path, harm: impl Fn(&[i32])) -> (Outcome, Vec<i32>, Duration) {
    let behaviour: Vec<String> = behaviour.iter().map(|word| word.to_string()).collect();
    let options = LocalOptions { out: Some(out.into()), ..options(world, &behaviour) };
    let mut pids = vec![0; world];
    let here = AtomicUsize::new(0);
    let mut since = Instant::now();
    let outcome = local::run(&options, &mut |notice| {
        let Notice::Event { rank, bytes } = notice else { return };
        let Some(pid) = std::str::from_utf8(bytes).unwrap().strip_prefix("here ") else { return };
        pids[*rank] = pid.parse().unwrap();
        if here.fetch_add(1, Ordering::Relaxed) + 1 == world {
            harm(&pids);
            since = Instant::now();
        }
    })
    .unwrap();
    (outcome, pids, since.elapsed())
}

fn signal(pid: i32, signal: i32) {
    // SAFETY: a process that this test started.
    let answer = unsafe { libc::kill(pid, signal) };
    assert_eq!(answer, 0, "signal {signal} to {pid}");
}

/// Stops all of them for a while, as a batch system does to make room.
fn suspend(pids: &[i32], time: Duration) {
    assert!(pids.iter().all(|pid| alive(*pid)), "{pids:?}");
    pids.iter().for_each(|pid| signal(*pid, libc::SIGSTOP));
    std::thread::sleep(time);
    pids.iter().for_each(|pid| signal(*pid, libc::SIGCONT));
}

/// Whether a process is there and no zombie.
fn alive(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    status.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim_start().starts_with('Z'))
}

fn all_gone(pids: &[i32]) {
    assert!(pids.iter().all(|pid| *pid > 0), "{pids:?}");
    let left: Vec<_> = pids.iter().filter(|pid| alive(**pid)).collect();
    assert!(left.is_empty(), "still there: {left:?}");
}

fn go_soon(pids: &[i32]) {
    let deadline = Instant::now() + SOON;
    while pids.iter().any(|pid| alive(*pid)) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    all_gone(pids);
}

fn temporary() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn all_end_well() {
    let out = temporary();
    let (outcome, pids, _) = run_with(4, &["train", "20"], out.path(), |_| {});
    assert_eq!((outcome.exit_code(), outcome.message()), (0, None));
    all_gone(&pids);
}

fn killed_rank() {
    for victim in 0..4 {
        let out = temporary();
        let (outcome, pids, took) = run_with(4, &["train", "100000"], out.path(), |pids| signal(pids[victim], 9));
        assert!(took < SOON, "{took:?}");
        all_gone(&pids);
        let message = outcome.message().unwrap();
        assert!(message.starts_with(&format!("rank {victim} on ")), "{message}");
        assert!(message.contains("was lost during step ") && message.contains("signal 9"), "{message}");
        assert_eq!((outcome.exit_code(), outcome.verdict.culprit), (1, Some(victim)));
    }
}

fn stopped_rank() {
    let out = temporary();
    let (outcome, pids, took) = run_with(4, &["train", "100000"], out.path(), |pids| signal(pids[2], libc::SIGSTOP));
    assert!(took < SOON, "{took:?}");
    all_gone(&pids);
    let message = outcome.message().unwrap();
    assert!(message.starts_with("rank 2 on ") && message.contains("its process was stopped"), "{message}");
}

fn stopped_before_it_joins() {
    let out = temporary();
    let behaviour = ["stop_early".to_string()];
    let start = Instant::now();
    let options = LocalOptions { out: Some(out.path().into()), ..options(2, &behaviour) };
    let outcome = local::run(&options, &mut |_| {}).unwrap();
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    let message = outcome.message().unwrap();
    let expected =
        format!("rank 1 on {} was lost during its start: its process was stopped", kolo_cluster::host_name());
    assert!(message.starts_with(&expected), "{message}");
}

fn exit_codes() {
    let out = temporary();
    let (outcome, pids, took) = run_with(3, &["exit", "1", "7"], out.path(), |_| {});
    let message = outcome.message().unwrap();
    assert!(message.starts_with("rank 1 on ") && message.contains("it exited with code 7"), "{message}");
    assert_eq!(outcome.exit_code(), 7);
    assert!(took < SOON, "{took:?}");
    all_gone(&pids);
    // Going without a word is no good end, whatever the code.
    let (outcome, ..) = run_with(3, &["exit", "2", "0"], out.path(), |_| {});
    assert!(outcome.message().unwrap().contains("it exited with code 0"));
    assert_eq!(outcome.exit_code(), 1);
    let (outcome, ..) = run_with(3, &["panic", "2"], out.path(), |_| {});
    let message = outcome.message().unwrap();
    assert!(message.contains("it panicked (exit code 101)"), "{message}");
    assert!(message.contains("rank-2.log:") && message.contains("this rank panics"), "{message}");
}

fn failure_is_told_once() {
    let out = temporary();
    let (outcome, pids, _) = run_with(4, &["fail", "3"], out.path(), |_| {});
    all_gone(&pids);
    let message = outcome.message().unwrap();
    let host = kolo_cluster::host_name();
    let expected =
        format!("rank 3 on {host} failed at step 5, after all_reduce(sum) of 64 f32, call 5: the disk is full");
    assert!(message.starts_with(&expected), "{message}");
    // The others blame rank 3, whose own death says more, if it comes in time: with a slow heartbeat there is enough.
    let behaviour = ["blame", "3"].map(String::from);
    let patient = LocalOptions { out: Some(out.path().into()), heartbeat_ms: 60_000, ..options(4, &behaviour) };
    let outcome = local::run(&patient, &mut |_| {}).unwrap();
    assert_eq!(outcome.verdict.culprit, Some(3));
    assert!(outcome.message().unwrap().contains("signal 6 (SIGABRT)"), "{:?}", outcome.message());
}

fn different_calls() {
    let out = temporary();
    let (outcome, pids, took) = run_with(4, &["differ", "2"], out.path(), |_| {});
    all_gone(&pids);
    assert!(took < SOON, "{took:?}");
    let message = outcome.message().unwrap();
    assert!(message.contains("ranks disagree: rank ") && message.contains("rank 2 on "), "{message}");
    assert!(message.contains("all_reduce(sum) of 64 f32, call 3"), "{message}");
    assert!(message.contains("broadcast of 8 f32 from rank 0, call 3"), "{message}");
}

fn deaf_workers_are_killed() {
    let out = temporary();
    let (outcome, pids, took) = run_with(4, &["deaf"], out.path(), |pids| signal(pids[1], 9));
    assert!(took < SOON, "{took:?}");
    assert_eq!(outcome.verdict.culprit, Some(1));
    all_gone(&pids);
}

/// A supervisor in its own process, its lines, and the pids of its workers once all are here.
fn start_supervisor(world: usize, behaviour: &[&str], out: &Path) -> (std::process::Child, Vec<i32>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg("supervisor").arg(world.to_string()).arg(out).args(behaviour);
    started(command, world)
}

/// In a process group of its own: the kernel ignores Ctrl-Z in a group that nobody could continue, which that of the tests may
/// be.
fn started(mut command: Command, world: usize) -> (std::process::Child, Vec<i32>) {
    let mut child = command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut pids = Vec::new();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    while pids.len() < world {
        let Some(line) = lines.next() else {
            let output = child.wait_with_output().unwrap();
            panic!("ended early: {}", String::from_utf8_lossy(&output.stderr));
        };
        let line = line.unwrap();
        if let Some((_, pid)) = line.split_once(" here ") {
            pids.push(pid.parse().unwrap());
        }
    }
    (child, pids)
}

fn killed_supervisor() {
    let out = temporary();
    let (mut child, pids) = start_supervisor(4, &["deaf"], out.path());
    signal(child.id() as i32, 9);
    child.wait().unwrap();
    go_soon(&pids);
}

fn interrupts() {
    let out = temporary();
    // Workers that take no notice of the signal themselves end by it.
    let (child, pids) = start_supervisor(3, &["train", "100000"], out.path());
    signal(child.id() as i32, libc::SIGINT);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(String::from_utf8_lossy(&output.stderr).matches("FAULT").count(), 1);
    all_gone(&pids);
    // Polite ones get the time they need, and a job that came to its end in order ended well.
    let (child, pids) = start_supervisor(3, &["polite"], out.path());
    signal(child.id() as i32, libc::SIGTERM);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "interrupted\nsaved\n");
    assert!(std::fs::read_to_string(out.path().join("rank-2.log")).unwrap().contains("saved"), "no polite end");
    all_gone(&pids);
    // Stubborn ones are killed at the second.
    let (child, pids) = start_supervisor(3, &["stubborn"], out.path());
    signal(child.id() as i32, libc::SIGINT);
    std::thread::sleep(Duration::from_millis(300));
    assert!(pids.iter().all(|pid| alive(*pid)));
    signal(child.id() as i32, libc::SIGINT);
    let start = Instant::now();
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    all_gone(&pids);
}

/// The state of a process, as the kernel's letter.
fn state(pid: i32) -> Option<char> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    status.rsplit(')').next()?.trim().chars().next()
}

/// Ctrl-Z reaches the launcher alone, which stops all ranks before itself; longer than anybody's patience. Then `fg`.
fn ctrl_z(launcher: i32, ranks: &[i32]) {
    let all: Vec<i32> = ranks.iter().copied().chain([launcher]).collect();
    let await_stopped = |stopped: bool| {
        let deadline = Instant::now() + SOON;
        while all.iter().any(|pid| (state(*pid) == Some('T')) != stopped) {
            let states: Vec<_> = all.iter().map(|pid| state(*pid)).collect();
            assert!(Instant::now() < deadline, "{states:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    signal(launcher, libc::SIGTSTP);
    await_stopped(true);
    std::thread::sleep(Duration::from_secs(4));
    signal(launcher, libc::SIGCONT);
    await_stopped(false);
}

fn a_suspended_launcher() {
    let out = temporary();
    // Once while the ranks work, and again.
    let (child, pids) = start_supervisor(3, &["compute", "12"], out.path());
    ctrl_z(child.id() as i32, &pids);
    // Continued before it stopped, while it stops the ranks, and just after: it never stops for good.
    for round in 0..200 {
        signal(child.id() as i32, libc::SIGTSTP);
        let since = Instant::now();
        while since.elapsed() < Duration::from_micros(round * 2) {
            std::hint::spin_loop();
        }
        signal(child.id() as i32, libc::SIGCONT);
        std::thread::sleep(Duration::from_millis(2));
        assert_ne!(state(child.id() as i32), Some('T'), "round {round}");
    }
    // What the launcher keeps pending, the ranks do not.
    for pid in &pids {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        assert!(status.contains("SigBlk:\t0000000000000000"), "{status}");
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stderr)), (Some(0), ""));
    all_gone(&pids);
}

fn grandchildren_go_too() {
    let out = temporary();
    let (_, pids, _) = run_with(2, &["parent"], out.path(), |_| {});
    all_gone(&pids);
    let text = std::fs::read_to_string(out.path().join("rank-1.log")).unwrap();
    let grandchild = text.lines().find_map(|line| line.strip_prefix("grandchild ")).unwrap().parse().unwrap();
    go_soon(&[grandchild]);
}

fn logs_and_echo() {
    let out = temporary();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["supervisor", "3"]).arg(out.path()).args(["print"]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    for rank in 0..3 {
        let path = out.path().join(format!("rank-{rank}.log"));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600, "for the user alone");
        let log = std::fs::read_to_string(path).unwrap();
        let lines: Vec<&str> = log.lines().collect();
        assert_eq!(lines.len(), 2 * worker::PRINTED, "rank {rank}");
        assert!(lines.contains(&format!("out {rank} line 0").as_str()), "{lines:?}");
        assert!(lines.contains(&format!("err {rank} line 9").as_str()), "{lines:?}");
    }
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(stdout.matches("out 0 line").count(), worker::PRINTED);
    assert_eq!(stderr.matches("err 0 line").count(), worker::PRINTED);
    assert!(!stdout.contains("out 1") && !stderr.contains("err 1") && stdout.contains("event 0 hello"));
}

/// Without a directory of the user's, what a failed rank printed is kept where only the user reads it.
fn logs_of_a_failed_job_are_kept() {
    let behaviour = ["panic", "2"].map(String::from);
    let outcome = local::run(&options(3, &behaviour), &mut |_| {}).unwrap();
    let (out, message) = (outcome.out.clone().unwrap(), outcome.message().unwrap());
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let log = out.join("rank-2.log");
    assert_eq!((mode(&out), mode(&log)), (0o700, 0o600));
    assert!(
        message.contains(&format!("the end of {}:", log.display())) && message.contains("this rank panics"),
        "{message}"
    );
    std::fs::remove_dir_all(out).unwrap();
    // Of one that ended well, or said nothing, there is nothing to keep.
    for behaviour in [["train", "5"], ["exit", "1"]].map(|words| words.map(String::from)) {
        let outcome = local::run(&options(2, &[&behaviour[..], &["1".into()]].concat()), &mut |_| {}).unwrap();
        assert_eq!(outcome.out, None, "{behaviour:?}");
    }
}

/// The job goes on, and fails at its end.
fn output_that_cannot_be_written() {
    let mut options = options(2, &["print".to_string()]);
    options.echo = Some(std::sync::Arc::new(|source, _| match source {
        kolo_cluster::logs::OutputStream::Out => Err(std::io::Error::from_raw_os_error(libc::ENOSPC)),
        kolo_cluster::logs::OutputStream::Err => Ok(()),
    }));
    let outcome = local::run(&options, &mut |_| {}).unwrap();
    let message = outcome.message().unwrap();
    assert!(message.starts_with("standard output: No space left on device"), "{message}");
    assert_eq!((outcome.exit_code(), outcome.verdict.exit_code), (1, 0));
    let out = temporary();
    let log = out.path().join("rank-0.log");
    std::os::unix::fs::symlink("/dev/full", &log).unwrap();
    options.echo = Some(std::sync::Arc::new(|_, _| Ok(())));
    options.out = Some(out.path().into());
    let message = local::run(&options, &mut |_| {}).unwrap().message().unwrap();
    assert!(message.starts_with(&format!("{}: No space left on device", log.display())), "{message}");
}

fn program_that_is_not_there() {
    let options = LocalOptions::new(2, "/nowhere/kolo", Vec::new());
    let text = local::run(&options, &mut |_| {}).unwrap_err().to_string();
    assert!(text.starts_with("starting /nowhere/kolo: No such file"), "{text}");
}
