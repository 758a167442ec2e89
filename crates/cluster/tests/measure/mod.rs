//! Measurements that take minutes, by name: `faults` and `soak`.

use super::{all_gone, run_with, signal, temporary};
use kolo_cluster::Outcome;
use std::time::{Duration, Instant};

const TIMES: u64 = 50;

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % end
    }
}

/// Each fault at seeded moments with four workers: milliseconds from the fault until every process is gone.
pub fn faults() {
    println!("{:<12} {:>9} {:>9} {:>9}", "fault", "median ms", "max ms", "limit ms");
    table("kill -9", 1000, |random, victim| harm(random, victim, libc::SIGKILL));
    table("SIGSTOP", 2000, |random, victim| harm(random, victim, libc::SIGSTOP));
    table("other call", 1000, |_, victim| {
        let out = temporary();
        let (outcome, pids, took) = run_with(4, &["differ", &victim.to_string()], out.path(), |_| {});
        all_gone(&pids);
        assert!(outcome.message().unwrap().contains(&format!("rank {victim} on ")), "{:?}", outcome.message());
        (outcome, took)
    });
}

fn harm(random: &mut Random, victim: usize, what: i32) -> (Outcome, Duration) {
    let out = temporary();
    let moment = Duration::from_micros(random.below(400_000));
    let sender = std::sync::Mutex::new(None);
    let (outcome, pids, _) = run_with(4, &["train", "1000000"], out.path(), |pids| {
        let pid = pids[victim];
        // From another thread: the supervisor goes on watching meanwhile.
        *sender.lock().unwrap() = Some(std::thread::spawn(move || {
            std::thread::sleep(moment);
            signal(pid, what);
            Instant::now()
        }));
    });
    let ended = Instant::now();
    let harmed = sender.into_inner().unwrap().unwrap().join().unwrap();
    all_gone(&pids);
    assert_eq!(outcome.verdict.culprit, Some(victim), "{:?}", outcome.message());
    (outcome, ended - harmed)
}

fn table(name: &str, limit_ms: u64, once: impl Fn(&mut Random, usize) -> (Outcome, Duration)) {
    let mut random = Random(7);
    let mut took: Vec<u64> = (0..TIMES)
        .map(|_| {
            let victim = random.below(4) as usize;
            let (outcome, took) = once(&mut random, victim);
            assert_eq!(outcome.exit_code(), 1);
            took.as_millis() as u64
        })
        .collect();
    took.sort_unstable();
    let (median, most) = (took[took.len() / 2], took[took.len() - 1]);
    println!("{name:<12} {median:>9} {most:>9} {limit_ms:>9}");
    assert!(most <= limit_ms);
}

/// Eight workers that compute beside a process that takes all it can get: `soak SECONDS`. No alarm may be raised.
pub fn soak(arguments: &[String]) {
    let seconds = arguments[0].as_str();
    let mut hogs: Vec<_> =
        (0..4).map(|_| std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap()).collect();
    let out = temporary();
    let (outcome, ..) = run_with(8, &["compute", seconds], out.path(), |_| {});
    for hog in &mut hogs {
        hog.kill().unwrap();
        hog.wait().unwrap();
    }
    assert_eq!((outcome.message(), outcome.exit_code()), (None, 0));
    println!("{seconds} s of 8 workers beside 4 hogs: no alarm");
}
