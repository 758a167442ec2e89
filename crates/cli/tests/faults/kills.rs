//! Kills of an elastic job's workers in every phase of its life. `cargo test -p kolo --test faults -- kills 200` runs jobs until
//! 200 workers were killed, and says how long it took until a loss was noticed, and until the job went on.

use super::super::{Chance, alive};
use super::{EPOCHS, Job, Outcome, last_step, signal, survive};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const WORKERS: u64 = 4;
/// After a row of the metrics that is waited for: about as long as the steps until the next one take.
const ROW_US: u64 = 30_000;
/// Longer than any phase takes to come; a job may be over before.
const PHASE_LIMIT: Duration = Duration::from_secs(30);

/// Kills of each phase that must come, and jobs for each kill that is wanted, at most: a phase may be over before a kill comes.
const OF_EACH_PHASE: u64 = 2;
const JOBS_PER_KILL: u64 = 4;

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
        let moment = chance.below(last_step());
        let step_of = |row: &str| row.strip_prefix("{\"step\":")?.split(',').next()?.parse::<u64>().ok();
        let made = |step: u64| text("out/metrics.jsonl").lines().filter_map(step_of).any(|row| row >= step);
        let (reached, later_us): (Box<dyn Fn() -> bool>, u64) = match self {
            Phase::Meeting => (Box::new(|| true), 300_000),
            Phase::Step => (Box::new(|| moment == 0 || made(moment)), ROW_US),
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

/// Waits until the job survives the loss of one more worker, whichever it is: it has gone on after the kills before, or has a
/// checkpoint to return to if a share is lost with its copy.
fn wait_for_a_way_back(job: &mut Job, kills: usize, seen: &Mutex<Seen>) {
    let checkpoints = job.folder.path().join("out/checkpoints");
    let start = Instant::now();
    while seen.lock().unwrap().resumed.len() < kills && start.elapsed() < PHASE_LIMIT {
        let mut names = std::fs::read_dir(&checkpoints).into_iter().flatten().flatten().map(|entry| entry.file_name());
        if names.any(|name| name.to_string_lossy().starts_with("step-")) || job.child.try_wait().unwrap().is_some() {
            return;
        }
        std::thread::sleep(Duration::from_micros(500));
    }
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
    let stage = chance.below(4);
    let zero = format!("parallel.zero={stage}");
    let about = format!("elastic, kills in {phases:?} over {where_}, {restarts} restarts, {zero}, seed {seed}");
    let (over, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Seen::default())));
    let (mut kills, mut reached) = (Vec::new(), Vec::new());
    let saving = ["--set", "checkpoint.every=20 steps", "--set", &zero, "--restarts", restarts];
    let mut looking = None;
    let outcome = survive(EPOCHS, &[links, &saving].concat(), about, |job| {
        let (path, over, shown) = (job.folder.path().join("stderr"), Arc::clone(&over), Arc::clone(&seen));
        looking = Some(std::thread::spawn(move || look(path, over, shown)));
        for phase in &phases {
            if stage > 0 {
                wait_for_a_way_back(job, kills.len(), &seen);
            }
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

/// What came of many jobs.
#[derive(Default)]
struct Total {
    jobs: u64,
    /// Jobs that ended before a kill came.
    untouched: u64,
    phases: BTreeMap<Phase, u64>,
    times: Times,
}

impl Total {
    fn kills(&self) -> u64 {
        self.phases.values().sum()
    }
}

/// Jobs with seeds from `first` on, which go through the phases in turn, until so many workers were killed, in every phase.
fn until(first: u64, kills: u64) -> Total {
    let mut total = Total::default();
    let is_enough = |total: &Total| {
        let enough_of = |phase| total.phases.get(phase).is_some_and(|count| *count >= OF_EACH_PHASE);
        total.kills() >= kills && PHASES.iter().all(enough_of)
    };
    while !is_enough(&total) {
        assert!(total.jobs < kills * JOBS_PER_KILL, "{} jobs, kills in {:?}", total.jobs, total.phases);
        let Killed { outcome, phases, times } = killed(first + total.jobs);
        total.jobs += 1;
        total.untouched += u64::from(outcome.report["generations"].as_array().is_some_and(|rows| rows.len() == 1));
        phases.into_iter().for_each(|phase| *total.phases.entry(phase).or_default() += 1);
        total.times.noticed.extend(times.noticed);
        total.times.recovered.extend(times.recovered);
    }
    total
}

/// A few kills in every phase.
pub fn in_every_phase(kills: u64) {
    until(100, kills);
}

/// Many kills, and how long it took to recover from them.
pub fn kills(count: u64) {
    let total = until(1000, count);
    let Total { jobs, untouched, phases, times } = &total;
    println!(
        "{} workers killed in {jobs} jobs, {untouched} of which were one generation to their end; by phase: {phases:?}",
        total.kills()
    );
    histogram("from a kill until it was noticed", &times.noticed);
    histogram("from a kill until the job went on", &times.recovered);
}

fn histogram(what: &str, times: &[u64]) {
    let mut times = times.to_vec();
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
