//! Kills of an elastic job's workers in every phase of its life. `cargo test -p kolo --test faults -- kills 200` makes 200 jobs
//! and says how long it took until a loss was noticed, and until the job went on.

use super::super::{Chance, alive};
use super::{EPOCHS, Job, Outcome, last_step, signal, survive};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const WORKERS: u64 = 4;
/// Moments of harm after the start of a job, which takes about as long.
const HARM_MS: u64 = 2000;
/// Longer than any phase takes to come; a job may be over before.
const PHASE_LIMIT: Duration = Duration::from_secs(30);

/// Jobs in which a phase must come.
const ATTEMPTS: u64 = 5;

/// Stands for ssh: runs on this host what it is told to run on another one.
const SHELL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/faults/shell.sh");

/// When a worker is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// Processes are there and find each other.
    Meeting,
    /// At any moment: mostly in a step, in its grains, its exchanges, its update or its copies.
    Step,
    /// A checkpoint is copied and written.
    Write,
    /// A checkpoint has all its shares: it gets its manifest, its name, and older ones go.
    Rename,
    /// A worker that was started again has joined, and waits to be taken in.
    Join,
    /// The last step is made: evaluation, the last checkpoint, the report, goodbyes.
    Shutdown,
}

const PHASES: [Phase; 6] = [Phase::Meeting, Phase::Step, Phase::Write, Phase::Rename, Phase::Join, Phase::Shutdown];

impl Phase {
    /// Waits for the phase, and then some of its time; whether it came.
    fn wait(self, job: &mut Job, chance: &mut Chance) -> bool {
        let folder = job.folder.path().to_path_buf();
        let text = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        let last = format!("\"step\":{},", last_step());
        let (reached, later_us): (Box<dyn Fn() -> bool>, u64) = match self {
            Phase::Meeting => (Box::new(|| true), 300_000),
            Phase::Step => (Box::new(|| true), HARM_MS * 1000),
            Phase::Write => (Box::new(|| unfinished(&folder, 1)), 3_000),
            Phase::Rename => (Box::new(|| unfinished(&folder, WORKERS as usize)), 5_000),
            Phase::Join => (Box::new(|| text("stderr").contains(" has joined")), 60_000),
            Phase::Shutdown => (Box::new(|| text("out/metrics.jsonl").contains(&last)), 40_000),
        };
        let start = Instant::now();
        while !reached() {
            if start.elapsed() > PHASE_LIMIT || job.child.try_wait().unwrap().is_some() {
                return false;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        std::thread::sleep(Duration::from_micros(chance.below(later_us)));
        true
    }
}

/// Whether a checkpoint is being written that has so many files.
fn unfinished(folder: &Path, files: usize) -> bool {
    let entries = |path: &Path| std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let begun = |path: &std::path::PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".unfinished-"))
    };
    entries(&folder.join("out/checkpoints")).filter(begun).any(|path| entries(&path).count() >= files)
}

/// The processes of workers.
fn workers(job: &Job) -> Vec<i32> {
    job.processes().into_iter().filter(|(_, rank)| rank.is_some()).map(|(pid, _)| pid).collect()
}

/// When the terminal showed what of a job.
#[derive(Debug, Default)]
struct Seen {
    lost: Vec<Instant>,
    resumed: Vec<Instant>,
}

/// Looks at what a job says until it is told to stop.
fn look(path: std::path::PathBuf, over: Arc<AtomicBool>, seen: Arc<Mutex<Seen>>) {
    while !over.load(Ordering::Relaxed) {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let now = Instant::now();
        let Seen { lost: noticed, resumed: gone_on } = &mut *seen.lock().unwrap();
        let lost = text.lines().filter(|line| line.contains(" was lost")).count();
        let resumed = text.lines().filter(|line| line.starts_with("continuing at step ")).count();
        noticed.resize(lost.max(noticed.len()), now);
        gone_on.resize(resumed.max(gone_on.len()), now);
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// Milliseconds from each kill that was noticed until it was, and until the job went on, if it did.
#[derive(Debug, Default)]
struct Times {
    noticed: Vec<u64>,
    recovered: Vec<u64>,
}

impl Times {
    fn of(kills: &[Instant], seen: &Seen) -> Self {
        let after = |moments: &[Instant], kill: &Instant| {
            let next = moments.iter().find(|moment| *moment > kill)?;
            Some(next.duration_since(*kill).as_millis() as u64)
        };
        // The last kill may come so late that nobody is needed any more.
        let noticed = kills.iter().filter_map(|kill| after(&seen.lost, kill)).collect();
        let recovered = kills.iter().filter_map(|kill| after(&seen.resumed, kill)).collect();
        Self { noticed, recovered }
    }
}

/// How a run went in which workers were killed.
pub struct Killed {
    outcome: Outcome,
    phases: Vec<Phase>,
    times: Times,
}

/// A run in which workers are killed at moments of this seed.
pub fn killed(seed: u64) -> Killed {
    let mut chance = Chance(seed);
    for _ in 0..4 {
        chance.below(2);
    }
    let (where_, links): (&str, &[&str]) = [
        ("shm", &["-n", "4", "--transport", "shm"][..]),
        ("tcp", &["-n", "4", "--transport", "tcp"]),
        ("two hosts", &["--hosts", "a:2,b:2", "--interface", "127.0.0.1", "--ssh", SHELL]),
    ][chance.below(3) as usize];
    let mut phases = vec![PHASES[seed as usize % PHASES.len()]];
    if phases[0] == Phase::Join || chance.below(2) == 0 {
        phases.insert(0, Phase::Step);
    }
    let restarts = if phases.contains(&Phase::Join) { "2" } else { ["0", "0", "2"][chance.below(3) as usize] };
    let zero = format!("parallel.zero={}", chance.below(4));
    let about = format!("elastic, kills in {phases:?} over {where_}, {restarts} restarts, {zero}, seed {seed}");
    let (over, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Seen::default())));
    let (mut kills, mut reached) = (Vec::new(), Vec::new());
    let saving = ["--set", "checkpoint.every=20 steps", "--set", &zero, "--restarts", restarts];
    let mut looking = None;
    let outcome = survive(EPOCHS, &[links, &saving].concat(), about, |job| {
        let (path, over, seen) = (job.folder.path().join("stderr"), Arc::clone(&over), Arc::clone(&seen));
        looking = Some(std::thread::spawn(move || look(path, over, seen)));
        for phase in &phases {
            // Looking for processes takes longer than some phases.
            let before = workers(job);
            if !phase.wait(job, &mut chance) {
                continue;
            }
            let here = if before.is_empty() || *phase == Phase::Join { workers(job) } else { before };
            let here: Vec<i32> = here.into_iter().filter(|pid| alive(*pid)).collect();
            if !here.is_empty() {
                signal(here[chance.below(here.len() as u64) as usize], libc::SIGKILL);
                kills.push(Instant::now());
                reached.push(*phase);
            }
        }
    });
    over.store(true, Ordering::Relaxed);
    looking.into_iter().for_each(|thread| thread.join().unwrap());
    let times = Times::of(&kills, &seen.lock().unwrap());
    Killed { outcome, phases: reached, times }
}

/// Kills with these seeds, which go through the phases in turn. A phase may be over before a kill comes: another seed of the
/// same phase has its turn then, but every phase must come.
pub fn in_every_phase(seeds: std::ops::Range<u64>) {
    let many = 100 * PHASES.len() as u64;
    for seed in seeds {
        let phase = PHASES[seed as usize % PHASES.len()];
        let mut tries = (0..ATTEMPTS).map(|attempt| killed(seed + attempt * many));
        assert!(tries.any(|killed| killed.phases.contains(&phase)), "no kill came in {phase:?}, seed {seed}");
    }
}

/// Many seeds, and how long they took to recover.
pub fn kills(count: u64) {
    let mut phases: BTreeMap<Phase, u64> = BTreeMap::new();
    let (mut times, mut untouched) = (Times::default(), 0);
    for seed in 0..count {
        let Killed { outcome, phases: reached, times: own } = killed(1000 + seed);
        let generations = outcome.report["generations"].as_array().unwrap();
        untouched += u64::from(generations.len() == 1);
        reached.into_iter().for_each(|phase| *phases.entry(phase).or_default() += 1);
        times.noticed.extend(own.noticed);
        times.recovered.extend(own.recovered);
    }
    println!("{count} jobs, {untouched} of them in one generation to their end; kills by phase: {phases:?}");
    histogram("from a kill until it was noticed", times.noticed);
    histogram("from a kill until the job went on", times.recovered);
}

fn histogram(what: &str, mut times: Vec<u64>) {
    times.sort_unstable();
    let at = |part: usize| times.get(times.len() * part / 100).copied().unwrap_or(0);
    let longest = times.last().unwrap_or(&0);
    println!("{what}: {} times, median {} ms, 90 % {} ms, longest {longest} ms", times.len(), at(50), at(90));
    for (low, high) in [(0, 10), (10, 50), (50, 100), (100, 200), (200, 400), (400, 800), (800, 1600), (1600, u64::MAX)]
    {
        let number = times.iter().filter(|ms| (low..high).contains(*ms)).count();
        println!("  from {low:>5} ms  {number:>4}  {}", "#".repeat(number.div_ceil(2)));
    }
}
