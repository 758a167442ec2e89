//! Weeks with failures, from what a cluster file says of them.

use crate::args::SimulateArgs;
use crate::fail::Failure;
use kolo_plan::cluster::Cluster;
use kolo_plan::failures::{
    BestInterval, Clock, LayoutSpeed, Part, Recovery, RunOutcome, RunSpec, best_interval, simulate_run,
};
use kolo_plan::step_model::StepModel;

/// A run of weeks, with the interval between checkpoints that it kept to.
#[derive(Debug)]
pub struct Weeks {
    pub spec: RunSpec,
    pub outcome: RunOutcome,
    pub best: Option<BestInterval>,
    pub interval_is_best: bool,
}

const SECONDS_PER_WEEK: f64 = 7.0 * 86_400.0;
const SECONDS_PER_HOUR: f64 = 3600.0;
const WEEKS_MAX: f64 = 10_000.0;

/// Refuses flags about weeks that make no sense.
pub fn check(args: &SimulateArgs) -> Result<(), Failure> {
    if let Some(weeks) = args.weeks.filter(|weeks| !(*weeks > 0.0 && *weeks <= WEEKS_MAX)) {
        let message = format!("--weeks {weeks} is out of range");
        return Err(Failure::usage(message, "give a number above 0, up to 10000"));
    }
    if let Some(seconds) = args.checkpoint_every.filter(|seconds| !(seconds.is_finite() && *seconds > 0.0)) {
        let message = format!("--checkpoint-every {seconds} is not a number of seconds");
        return Err(Failure::usage(message, "give seconds above 0, or leave it out for the best interval"));
    }
    let lost = [
        (args.checkpoint_every.is_some(), "--checkpoint-every"),
        (args.elastic, "--elastic"),
        (args.spares > 0, "--spares"),
    ];
    match lost.into_iter().find(|(given, _)| *given && args.weeks.is_none()) {
        Some((_, flag)) => Err(Failure::usage(format!("{flag} requires --weeks"), "add --weeks, such as --weeks 4")),
        None if args.elastic && args.spares > 0 => {
            let hint = "drop one of the two: an elastic job continues without the lost devices";
            Err(Failure::usage("--elastic cannot be combined with --spares", hint))
        }
        None => Ok(()),
    }
}

/// Simulates the weeks that were asked for. `layouts` are those an elastic job can shrink to, the largest first.
pub fn simulate(
    args: &SimulateArgs,
    cluster: &Cluster,
    model: &StepModel,
    layouts: Vec<LayoutSpeed>,
    step: f64,
) -> Result<Option<Weeks>, Failure> {
    let Some(weeks) = args.weeks else { return Ok(None) };
    let devices = model.layout.workers();
    let parts = parts(cluster, devices);
    if parts.iter().all(|part| part.clock.rate() == 0.0) {
        let message = "--weeks: the cluster file has no failure rates";
        let hint = "add `[failures]` with `device_mtbf_hours` or `host_mtbf_hours`";
        return Err(Failure::usage(message, hint));
    }
    let mut spec = RunSpec {
        parts,
        host_devices: host_devices(cluster, devices),
        recovery: if args.elastic { Recovery::Elastic } else { Recovery::Restart { spares: args.spares } },
        layouts,
        step,
        interval: f64::INFINITY,
        checkpoint: checkpoint_seconds(cluster, model),
        restart: cluster.failures.restart_seconds,
        horizon: weeks * SECONDS_PER_WEEK,
        seed: args.seed,
    };
    let best = best_interval(&spec);
    let asked = args.checkpoint_every.or_else(|| best.map(|best| best.seconds));
    spec.interval = asked.unwrap_or(f64::INFINITY);
    let outcome = simulate_run(&spec);
    Ok(Some(Weeks { outcome, best, interval_is_best: args.checkpoint_every.is_none(), spec }))
}

/// Devices of one host.
fn host_devices(cluster: &Cluster, devices: usize) -> usize {
    cluster.levels.first().map_or(1, |level| level.count).clamp(1, devices.max(1))
}

/// Everything that can fail: devices, hosts, and the links that leave a host.
fn parts(cluster: &Cluster, devices: usize) -> Vec<Part> {
    let failures = &cluster.failures;
    let per_host = host_devices(cluster, devices);
    let hosts = devices.div_ceil(per_host);
    let part = |kind: &str, count: usize, hours: f64, per_host: usize| Part {
        kind: kind.into(),
        count,
        clock: Clock { mean: hours * SECONDS_PER_HOUR, shape: failures.shape },
        repair: failures.repair_minutes * 60.0,
        per_host,
    };
    // A failed device takes its host out until it is repaired: workers of a host start together.
    let mut parts = vec![
        part("device", devices, failures.device_mtbf_hours, per_host),
        part("host", hosts, failures.host_mtbf_hours, 1),
    ];
    if cluster.levels.len() > 1 {
        let links = cluster.levels[1].links;
        parts.push(part("link", hosts * links, failures.link_mtbf_hours, links));
    }
    parts.retain(|part| part.clock.rate() > 0.0);
    parts
}

/// Seconds in which every host writes its share of weights and optimizer state, which data ranks share out.
fn checkpoint_seconds(cluster: &Cluster, model: &StepModel) -> f64 {
    let state: f64 = model
        .roles
        .iter()
        .map(|role| {
            let data = model.layout.size(kolo_parallel::mesh::DATA).max(1) as f64;
            let weights = if model.layout.zero >= 3 { 1.0 } else { 1.0 / data };
            let optimizer = if model.layout.zero >= 1 { 1.0 } else { 1.0 / data };
            role.ranks as f64 * (role.memory.weights * weights + role.memory.optimizer * optimizer)
        })
        .sum();
    let per_host = cluster.levels.first().map_or(1, |level| level.count).max(1);
    let hosts = model.layout.workers().div_ceil(per_host).max(1) as f64;
    state / hosts / cluster.failures.checkpoint_bandwidth
}
