//! Jobs that somebody else started: no supervisor of ours, rank 0 hosts the coordinator.

use super::worker::{HEARTBEAT, HERE};
use super::{SOON, alive, signal, temporary};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Starts ranks as torchrun would, each on its own.
fn start(world: usize, ranks: impl Iterator<Item = usize>, home: &Path, behaviour: &[&str]) -> Vec<Child> {
    start_with(world, ranks, home, behaviour, &[])
}

/// With these variables, too.
fn start_with(
    world: usize,
    ranks: impl Iterator<Item = usize>,
    home: &Path,
    behaviour: &[&str],
    variables: &[(&str, &str)],
) -> Vec<Child> {
    let rank = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("worker").args(behaviour).env("HOME", home).env(HERE, home);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", "29500").envs(variables.iter().copied());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    ranks.map(rank).collect()
}

/// Exit codes and everything printed to standard error.
fn end(children: Vec<Child>) -> (Vec<Option<i32>>, String) {
    let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    let text = outputs.iter().map(|output| String::from_utf8_lossy(&output.stderr)).collect();
    (outputs.iter().map(|output| output.status.code()).collect(), text)
}

/// Waits until all ranks have met.
fn await_all(world: usize, home: &Path) {
    let start = Instant::now();
    while (0..world).any(|rank| !home.join(format!("here-{rank}")).exists()) {
        assert!(start.elapsed() < SOON, "not all came");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn file(home: &Path) -> std::path::PathBuf {
    home.join(".kolo/run/torch-.127.0.0.1.29500.")
}

/// Ranks that meet through a file have no launcher of ours that sees the end of one that has not come yet.
pub fn a_rank_lost_before_it_joins_is_named_soon() {
    let home = temporary();
    let mut children = start_with(3, 0..3, home.path(), &["slow", "2"], &[(HEARTBEAT, "1000")]);
    let since = Instant::now();
    while !home.path().join("here-2").exists() || !file(home.path()).exists() {
        assert!(since.elapsed() < SOON, "rank 2 did not begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Seen to live once.
    std::thread::sleep(Duration::from_secs(2));
    children[2].kill().unwrap();
    let (codes, text) = end(children);
    assert_eq!(codes, [Some(1), Some(1), None], "{text}");
    assert!(errors(&text) == 1 && text.contains("rank 2"), "{text}");
    assert!(text.contains("was lost during its start: its process has ended"), "{text}");
    assert!(since.elapsed() < Duration::from_secs(50), "sooner than one that never comes: {text}");
}

fn errors(text: &str) -> usize {
    text.matches("error: ").count()
}

pub fn meets_through_a_file() {
    let home = temporary();
    let (codes, text) = end(start(4, 0..4, home.path(), &["train", "30"]));
    assert_eq!((codes, text.as_str()), (vec![Some(0); 4], ""));
    assert!(!file(home.path()).exists());
    // What an earlier job left behind does no harm.
    std::fs::create_dir_all(file(home.path()).parent().unwrap()).unwrap();
    let mut children = start(2, 0..1, home.path(), &["train", "30"]);
    let deadline = Instant::now() + SOON;
    while !file(home.path()).exists() {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
    children[0].kill().unwrap();
    children[0].wait().unwrap();
    assert!(file(home.path()).exists());
    let late = start(2, 1..2, home.path(), &["train", "30"]);
    std::thread::sleep(Duration::from_millis(100));
    let mut both = start(2, 0..1, home.path(), &["train", "30"]);
    both.extend(late);
    let (codes, text) = end(both);
    assert_eq!(codes, [Some(0); 2], "{text}");
    // A file of anybody's is refused.
    std::fs::write(file(home.path()), b"anything").unwrap();
    let (codes, text) = end(start(2, 1..2, home.path(), &["train", "30"]));
    assert!(codes == [Some(101)] && text.contains("other users can access it"), "{codes:?} {text}");
}

pub fn a_lost_rank_is_told_once() {
    for victim in [0, 1, 3] {
        let home = temporary();
        let children = start(4, 0..4, home.path(), &["train", "100000"]);
        await_all(4, home.path());
        let pids: Vec<i32> = children.iter().map(|child| child.id() as i32).collect();
        signal(pids[victim], 9);
        let start = Instant::now();
        let (codes, text) = end(children);
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        assert!(!pids.iter().any(|pid| alive(*pid)));
        assert!(codes.iter().enumerate().all(|(rank, code)| *code == (rank != victim).then_some(1)), "{codes:?}");
        assert_eq!(errors(&text), 1, "{text}");
        match victim {
            0 => assert!(text.contains("error: rank 0 on ") && text.contains("it closed the link"), "{text}"),
            _ => assert!(text.contains(&format!("error: rank {victim} on ")) && text.contains("step"), "{text}"),
        }
    }
}

pub fn a_stopped_rank_and_a_deaf_one() {
    let home = temporary();
    let children = start(3, 0..3, home.path(), &["idle"]);
    await_all(3, home.path());
    let pids: Vec<i32> = children.iter().map(|child| child.id() as i32).collect();
    signal(pids[2], libc::SIGSTOP);
    let begin = Instant::now();
    while alive(pids[0]) || alive(pids[1]) {
        assert!(begin.elapsed() < SOON, "still there");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Nobody but its launcher can end a stopped process; when it wakes, it goes by itself.
    signal(pids[2], libc::SIGCONT);
    let (codes, text) = end(children);
    assert_eq!(codes, [Some(1); 3]);
    assert!(errors(&text) == 1 && text.contains("rank 2 on ") && text.contains("no heartbeat"), "{text}");
}

/// The others name it; when it wakes, it knows that it was given up, and accuses nobody.
pub fn a_stopped_first_rank_is_told_once() {
    let home = temporary();
    let children = start(3, 0..3, home.path(), &["train", "1000000"]);
    let pids: Vec<i32> = children.iter().map(|child| child.id() as i32).collect();
    let begin = Instant::now();
    let met = |pid: &i32| std::fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|tasks| tasks.count() > 1);
    while !pids.iter().all(met) || file(home.path()).exists() {
        assert!(begin.elapsed() < Duration::from_secs(60), "the ranks have not met");
        std::thread::sleep(Duration::from_millis(5));
    }
    signal(pids[0], libc::SIGSTOP);
    while alive(pids[1]) || alive(pids[2]) {
        assert!(begin.elapsed() < Duration::from_secs(120), "still there");
        std::thread::sleep(Duration::from_millis(5));
    }
    signal(pids[0], libc::SIGCONT);
    let (codes, text) = end(children);
    assert_eq!(codes, [Some(1); 3]);
    assert!(errors(&text) == 1 && text.contains("error: rank 0 on ") && text.contains("no heartbeat"), "{text}");
}

/// Before it can say where it is, while others reach it, and when they have: at every moment of its start.
pub fn a_first_rank_stopped_as_it_starts_is_told_once() {
    let stop = |after_us: u64| {
        let home = temporary();
        let children = start_with(3, 0..3, home.path(), &["train", "1000000"], &[(HEARTBEAT, "150")]);
        let pids: Vec<i32> = children.iter().map(|child| child.id() as i32).collect();
        std::thread::sleep(Duration::from_micros(after_us));
        signal(pids[0], libc::SIGSTOP);
        while alive(pids[1]) || alive(pids[2]) {
            std::thread::sleep(Duration::from_millis(5));
        }
        signal(pids[0], libc::SIGCONT);
        let (codes, text) = end(children);
        assert_eq!(codes, [Some(1); 3], "after {after_us} us: {text}");
        assert!(errors(&text) == 1 && text.contains("error: rank 0"), "after {after_us} us: {text}");
    };
    std::thread::scope(|scope| {
        for at in 0..16 {
            scope.spawn(move || stop(at * at * 150));
        }
    });
}

/// Longer than anybody's patience; then they go on.
pub fn all_are_suspended() {
    let home = temporary();
    let children = start(3, 0..3, home.path(), &["train", "1000"]);
    await_all(3, home.path());
    let pids: Vec<i32> = children.iter().map(|child| child.id() as i32).collect();
    super::suspend(&pids, Duration::from_secs(3));
    let (codes, text) = end(children);
    assert_eq!((codes, text.as_str()), (vec![Some(0); 3], ""));
}

pub fn a_failing_first_rank_is_told_once() {
    let home = temporary();
    let (codes, text) = end(start(3, 0..3, home.path(), &["fail", "0"]));
    assert_eq!(codes, [Some(1); 3]);
    assert!(errors(&text) == 1 && text.contains("failed at step 5") && text.contains("the disk is full"), "{text}");
}

/// Both MPIs, as far as they are installed, without MPI in this process.
pub fn under_mpirun() {
    let home = temporary();
    let mut command = Command::new("mpirun.openmpi");
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", "3"]).arg(std::env::current_exe().unwrap());
    command.args(["worker", "train", "20"]).env("HOME", home.path());
    let Ok(output) = command.output() else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
