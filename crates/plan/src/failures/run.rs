//! A run of weeks, from failure to failure.
//!
//! A job computes for an interval, saves, and goes on. When a part fails, a job that *restarts* loses what it computed since it
//! last saved, and goes on when it has all its devices again: a spare host at once, or the failed one after its repair. An
//! *elastic* job goes on with the largest layout that the devices left can have; it loses the step that was under way, because
//! every worker's state has a copy elsewhere, and grows again after the repair.

use super::clock::{FailureTimes, Part, expected_failures};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// What a job does when a part fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    Restart {
        /// Devices that stand by.
        spares: usize,
    },
    Elastic,
}

/// A layout that a job can have, and how fast it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayoutSpeed {
    pub devices: usize,
    /// Progress per second, as a share of that of the first layout.
    pub speed: f64,
}

/// What to simulate.
#[derive(Clone, Debug, PartialEq)]
pub struct RunSpec {
    pub parts: Vec<Part>,
    /// Devices of a host; the last one may have fewer.
    pub host_devices: usize,
    pub recovery: Recovery,
    /// The largest first. A job that restarts has only the first.
    pub layouts: Vec<LayoutSpeed>,
    /// Seconds of one step on the first layout.
    pub step: f64,
    /// Seconds of work between checkpoints; infinite: none.
    pub interval: f64,
    /// Seconds for which a checkpoint holds the job up.
    pub checkpoint: f64,
    /// Seconds from a failure to the first step after it.
    pub restart: f64,
    /// Seconds of the run.
    pub horizon: f64,
    pub seed: u64,
}

impl RunSpec {
    /// Failures of all parts until the run ends, on average: every part is new at first, and after each repair.
    pub fn expected_failures(&self) -> f64 {
        expected_failures(&self.parts, self.horizon)
    }
}

/// What a job did in a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PeriodKind {
    Working,
    Restarting,
    /// For a repair.
    Waiting,
}

impl PeriodKind {
    pub fn name(self) -> &'static str {
        match self {
            PeriodKind::Working => "working",
            PeriodKind::Restarting => "restarting",
            PeriodKind::Waiting => "waiting for a repair",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Period {
    pub kind: PeriodKind,
    pub start: f64,
    pub end: f64,
    /// Devices that work.
    pub devices: usize,
}

/// What came out. Seconds add up to the horizon: `useful` at less than full speed counts as less, the rest is `slowed`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunOutcome {
    /// Progress, as seconds of an undisturbed run.
    pub useful: f64,
    /// Computed and lost again.
    pub lost: f64,
    pub checkpoints: f64,
    pub restarting: f64,
    pub waiting: f64,
    /// Work on fewer devices than the first layout has: the share that was missing.
    pub slowed: f64,
    pub failures: BTreeMap<String, usize>,
    /// Seconds between failures that hold the job up, in order.
    pub gaps: Vec<f64>,
    /// In order; at most [`PERIODS_MAX`].
    pub periods: Vec<Period>,
    pub horizon: f64,
}

/// Periods that an outcome keeps.
pub const PERIODS_MAX: usize = 100_000;
/// Failures and repairs of a run, at most: a cluster that fails more often does nothing else.
const EVENTS_MAX: usize = 50_000_000;

impl RunOutcome {
    /// Progress, as a share of that of a run in which nothing fails and nothing is saved.
    pub fn goodput(&self) -> f64 {
        if self.horizon > 0.0 { self.useful / self.horizon } else { 0.0 }
    }

    /// The share of the time in which the job computes or saves.
    pub fn availability(&self) -> f64 {
        if self.horizon > 0.0 { 1.0 - (self.restarting + self.waiting) / self.horizon } else { 0.0 }
    }

    pub fn failure_count(&self) -> usize {
        self.failures.values().sum()
    }
}

/// Simulates a run.
pub fn simulate_run(spec: &RunSpec) -> RunOutcome {
    let mut run = Run::new(spec);
    for _ in 0..EVENTS_MAX {
        let Some(Reverse((Moment(time), part, happens))) = run.heap.pop() else { break };
        if time >= spec.horizon {
            break;
        }
        run.pass_until(time);
        match happens {
            Happens::Fails => run.fail(part),
            Happens::Returns => run.repaired(part),
        }
    }
    run.pass_until(spec.horizon);
    // What is under way when the run ends is not lost.
    run.outcome.useful += run.pending;
    run.outcome
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Moment(f64);

impl Eq for Moment {}

impl Ord for Moment {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Moment {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happens {
    Returns,
    Fails,
}

struct Run<'s> {
    spec: &'s RunSpec,
    times: FailureTimes,
    heap: BinaryHeap<Reverse<(Moment, usize, Happens)>>,
    /// By part: its kind, its host, and how often it has failed.
    part_kinds: Vec<usize>,
    part_hosts: Vec<usize>,
    failed: Vec<u64>,
    /// By host: parts that have failed and are not back.
    out: Vec<u32>,
    now: f64,
    /// Devices that work, those that stand by among them.
    available: usize,
    /// The layout that runs; `None` if none can.
    layout: Option<usize>,
    /// When the restart under way is done.
    down_until: f64,
    /// Since the last checkpoint: seconds of wall time in the cycle of work and saving, and progress.
    in_cycle: f64,
    pending: f64,
    last_failure: f64,
    outcome: RunOutcome,
}

impl<'s> Run<'s> {
    fn new(spec: &'s RunSpec) -> Self {
        let times = FailureTimes::new(spec.seed);
        let kinds = spec.parts.iter().enumerate().flat_map(|(kind, part)| std::iter::repeat_n(kind, part.count));
        let part_kinds: Vec<usize> = kinds.collect();
        let hosts_of = |part: &Part| {
            let per_host = part.per_host.max(1);
            (0..part.count).map(move |number| number / per_host)
        };
        let part_hosts: Vec<usize> = spec.parts.iter().flat_map(hosts_of).collect();
        let hosts = part_hosts.iter().max().map_or(0, |last| last + 1);
        let first = |(part, kind): (usize, &usize)| {
            let lifetime = times.lifetime(&spec.parts[*kind].clock, part as u64, 0);
            Reverse((Moment(lifetime), part, Happens::Fails))
        };
        let heap = part_kinds.iter().enumerate().map(first).filter(|entry| entry.0.0.0 < spec.horizon).collect();
        let spares = if let Recovery::Restart { spares } = spec.recovery { spares } else { 0 };
        let outcome = RunOutcome { horizon: spec.horizon, ..RunOutcome::default() };
        Self {
            spec,
            times,
            heap,
            failed: vec![0; part_kinds.len()],
            out: vec![0; hosts],
            part_kinds,
            part_hosts,
            now: 0.0,
            available: spec.layouts.first().map_or(0, |layout| layout.devices) + spares,
            layout: (!spec.layouts.is_empty()).then_some(0),
            down_until: 0.0,
            in_cycle: 0.0,
            pending: 0.0,
            last_failure: 0.0,
            outcome,
        }
    }

    /// Lets time pass in which nothing fails.
    fn pass_until(&mut self, time: f64) {
        let Some(layout) = self.layout else {
            self.outcome.waiting += time - self.now;
            self.note(PeriodKind::Waiting, self.now, time, 0);
            self.now = time;
            return;
        };
        let LayoutSpeed { devices, speed } = self.spec.layouts[layout];
        if self.down_until > self.now {
            let until = self.down_until.min(time);
            self.outcome.restarting += until - self.now;
            self.note(PeriodKind::Restarting, self.now, until, devices);
            self.now = until;
        }
        if time > self.now {
            self.note(PeriodKind::Working, self.now, time, devices);
            self.work(time - self.now, speed);
            self.now = time;
        }
    }

    /// Computes and saves for so long.
    fn work(&mut self, seconds: f64, speed: f64) {
        let (interval, checkpoint) = (self.spec.interval, self.spec.checkpoint);
        let mut computed = 0.0;
        if interval.is_finite() {
            let cycle = interval + checkpoint;
            let end = self.in_cycle + seconds;
            let whole = (end / cycle).floor();
            // Seconds of saving until a point of time in the cycles.
            let saving = |at: f64| (at / cycle).floor() * checkpoint + (at % cycle - interval).max(0.0);
            let saved = saving(end) - saving(self.in_cycle);
            computed += seconds - saved;
            self.outcome.checkpoints += saved;
            let rest = end - whole * cycle;
            if whole > 0.0 {
                let after = rest.min(interval) * speed;
                self.outcome.useful += self.pending + computed * speed - after;
                self.pending = after;
            } else {
                self.pending += computed * speed;
            }
            self.in_cycle = rest;
        } else {
            computed = seconds;
            self.pending += computed * speed;
        }
        self.outcome.slowed += computed * (1.0 - speed);
    }

    /// Devices that are lost with a host.
    fn devices_of(&self, host: usize) -> usize {
        let all = self.spec.layouts.first().map_or(0, |layout| layout.devices);
        all.saturating_sub(host * self.spec.host_devices).min(self.spec.host_devices)
    }

    fn fail(&mut self, part: usize) {
        let kind = &self.spec.parts[self.part_kinds[part]];
        *self.outcome.failures.entry(kind.kind.clone()).or_default() += 1;
        self.failed[part] += 1;
        self.heap.push(Reverse((Moment(self.now + kind.repair), part, Happens::Returns)));
        let host = self.part_hosts[part];
        self.out[host] += 1;
        if self.out[host] > 1 {
            // The job has gone on without this host, or waits for it.
            return;
        }
        self.outcome.gaps.push(self.now - self.last_failure);
        self.last_failure = self.now;
        self.available -= self.devices_of(host);
        let lost = match self.spec.recovery {
            Recovery::Restart { .. } => self.pending,
            Recovery::Elastic => self.pending.min(self.spec.step),
        };
        self.outcome.lost += lost;
        self.pending -= lost;
        if self.spec.recovery != Recovery::Elastic {
            self.in_cycle = 0.0;
        }
        self.choose_layout(true);
    }

    fn repaired(&mut self, part: usize) {
        let kind = &self.spec.parts[self.part_kinds[part]];
        let lifetime = self.times.lifetime(&kind.clock, part as u64, self.failed[part]);
        if self.now + lifetime < self.spec.horizon {
            self.heap.push(Reverse((Moment(self.now + lifetime), part, Happens::Fails)));
        }
        let host = self.part_hosts[part];
        self.out[host] -= 1;
        if self.out[host] == 0 {
            self.available += self.devices_of(host);
            self.choose_layout(false);
        }
    }

    /// Takes the largest layout that the devices allow. Whoever changes it, or has lost a part, starts again.
    fn choose_layout(&mut self, failed: bool) {
        let allowed = if self.spec.recovery == Recovery::Elastic { self.spec.layouts.len() } else { 1 };
        let fits = |layout: &LayoutSpeed| layout.devices <= self.available;
        let layout = self.spec.layouts.iter().take(allowed).position(fits);
        if failed || layout != self.layout {
            self.down_until = self.now + self.spec.restart;
        }
        self.layout = layout;
    }

    fn note(&mut self, kind: PeriodKind, start: f64, end: f64, devices: usize) {
        if let Some(last) = self.outcome.periods.last_mut()
            && last.kind == kind
            && last.devices == devices
            && last.end == start
        {
            last.end = end;
            return;
        }
        if end > start && self.outcome.periods.len() < PERIODS_MAX {
            self.outcome.periods.push(Period { kind, start, end, devices });
        }
    }
}
