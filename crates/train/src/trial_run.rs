//! How long a step of a job takes on this machine, found by running a little of it: the kernels of the graph that will run, on
//! as many workers and threads as will run it, with the job's own data, and the exchanges between workers of one host.

use crate::error::Error;
use crate::held::HeldBatch;
use crate::job::Job;
use crate::step_inputs::StepInputs;
use crate::supply::{self, TrainingSamples};
use kolo_comm::bench::{Method, sweep};
use kolo_comm::bootstrap::{ThreadBootstrap, ThreadExchange};
use kolo_comm::{CallKind, Communicator, Fault, Watch, shm};
use kolo_exec::session::TrialTimes;
use kolo_exec::{ExchangeError, Feed, Memory, Options, Program, Session, Store};
use kolo_graph::collective::Movement;
use kolo_graph::layout::align;
use kolo_graph::{Graph, Node, Phase, ValueId};
use kolo_parallel::GrainShare;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// How long a trial run takes, about: a plan should be quick.
pub const TIME_LIMIT: Duration = Duration::from_millis(1500);
/// Calls of each exchange.
const EXCHANGES: usize = 8;

/// Who will run the step.
#[derive(Clone, Copy, Debug)]
pub struct TrialSetup {
    pub workers: usize,
    /// Workers on one host.
    pub per_host: usize,
    /// Threads of each.
    pub threads: usize,
}

/// What a trial run measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrialRun {
    /// What one worker computes, on a machine that all workers of a host share.
    pub compute_seconds: f64,
    /// Exchanges between workers of this host that compute does not hide; those across hosts are not known here.
    pub exchange_seconds: f64,
    /// Making a worker's share of a batch, on its loader threads; 0 if lanes make it as they compute.
    pub data_seconds: f64,
    /// Samples are made while the step before computes.
    pub data_ahead: bool,
    pub kinds: usize,
    pub whole_steps: usize,
}

impl TrialRun {
    pub fn step_seconds(&self) -> f64 {
        let step = self.compute_seconds + self.exchange_seconds;
        if self.data_ahead { step.max(self.data_seconds) } else { step + self.data_seconds }
    }

    /// Seconds of a step for which it waits for its samples.
    pub fn data_wait_seconds(&self) -> f64 {
        self.step_seconds() - self.compute_seconds - self.exchange_seconds
    }
}

/// Measures a step whose first worker runs `graph`. It takes as much memory as the step, at most.
pub fn run(job: &Job, graph: &Graph, setup: TrialSetup, time_limit: Duration) -> Result<TrialRun, Error> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // More workers than cores wait for each other; only as many as run at a time are measured.
    let at_once = setup.per_host.min((cores / setup.threads).max(1));
    let turns = (setup.per_host * setup.threads) as f64 / (at_once * setup.threads) as f64;
    let data_ranks =
        job.parallel.data_ranks(setup.workers).map_err(|refusal| Error::workers(setup.workers, refusal))?;
    let options = Options::for_grains(job.grains / data_ranks, setup.threads);
    let all = together(at_once, || {}, |rank| alone(job, graph, options, rank, time_limit))?;
    let Some(first) = all.first() else { return Err(Error::Together(Fault::BadCall("the trial run failed".into()))) };
    let slowest = all.iter().map(|(one, _)| one.step_seconds).fold(0.0, f64::max);
    let making = all.iter().map(|(_, seconds)| *seconds).fold(0.0, f64::max);
    let data_ahead = job.loading.batches > 0;
    let loaders = if data_ahead { job.loading.threads } else { 1 };
    let spare = cores > setup.per_host * setup.threads;
    let exchange_seconds =
        if setup.per_host == setup.workers { exchanges(graph, setup, options.grains, spare)? } else { 0.0 };
    Ok(TrialRun {
        compute_seconds: slowest * turns,
        exchange_seconds,
        data_seconds: making / loaders as f64,
        data_ahead,
        kinds: first.0.kinds,
        whole_steps: first.0.whole_steps,
    })
}

/// Runs this on a thread for each rank, and has what all found, or the first error. `give_up` is for those who wait for one
/// that failed or could not start.
fn together<T: Send>(
    ranks: usize,
    give_up: impl Fn() + Sync,
    run: impl Fn(usize) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    let run = |rank: usize| run(rank).inspect_err(|_| give_up());
    let run = &run;
    std::thread::scope(|scope| {
        let start = |rank: usize| {
            let named = std::thread::Builder::new().name(format!("trial run {rank}"));
            named.spawn_scoped(scope, move || run(rank))
        };
        // All start before the first is waited for.
        let threads: Vec<_> = (0..ranks).map(start).collect();
        if threads.iter().any(std::io::Result::is_err) {
            give_up();
        }
        let join = |thread: std::io::Result<ScopedJoinHandle<'_, Result<T, Error>>>| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(error) => Err(Fault::thread("starting a thread", &error).into()),
        };
        let outcomes: Vec<Result<T, Error>> = threads.into_iter().map(join).collect();
        outcomes.into_iter().collect()
    })
}

/// One worker's step without its exchanges, and seconds in which one thread makes its samples beforehand.
fn alone(
    job: &Job,
    graph: &Graph,
    options: Options,
    rank: usize,
    time_limit: Duration,
) -> Result<(TrialTimes, f64), Error> {
    let memory =
        Memory::try_new(Store::params_bytes(graph)).map_err(|error| Error::from(Box::new(error) as ExchangeError))?;
    let store = Store::in_memory(graph, memory);
    let mut session = Session::compile(Program::new(&job.executor, graph.clone(), options), &store, None)?;
    // Any will do. Workers that share a model share its grains, too.
    let grains = GrainShare::run(rank % (job.grains / options.grains).max(1), options.grains);
    let recipe = TrainingSamples { job, grains };
    let by_lanes = supply::by_lanes(job, options.grains * job.grain_batch());
    let (held, begin) = (HeldBatch::new(job), Instant::now());
    if !by_lanes {
        held.prepare(&recipe, job, 0, grains)?;
    }
    let making = if by_lanes { 0.0 } else { begin.elapsed().as_secs_f64() };
    let data = |grain: usize, feed: &mut Feed<'_>| match by_lanes {
        true => {
            let mut numbers = Vec::with_capacity(job.grain_batch());
            supply::fill(&recipe, &job.fields, (0, grain), &mut numbers, feed);
        }
        false => held.feed(job, grains.at(grain), feed),
    };
    let inputs = StepInputs::of(graph);
    let scalars = |feed: &mut Feed<'_>| inputs.feed_step(feed, 1.0, 1);
    Ok((session.trial_run(scalars, data, time_limit), making))
}

/// An exchange of a step.
struct TimedExchange {
    kind: CallKind,
    /// With the padding between tensors.
    bytes: usize,
    /// How often in a step.
    times: usize,
}

/// Seconds of a step's exchanges among the workers of this host. Where each core has a worker, an exchange takes the time of one
/// that computes; where cores are spare, all but the last of those after the grains is hidden.
fn exchanges(graph: &Graph, setup: TrialSetup, grains: usize, spare: bool) -> Result<f64, Error> {
    let phases = graph.phases();
    let times = |phase: Phase| if phase == Phase::Grain { grains } else { 1 };
    let nodes: Vec<TimedExchange> =
        graph.nodes.iter().zip(phases).filter_map(|(node, phase)| exchange(graph, node, times(phase))).collect();
    if nodes.is_empty() || setup.workers == 1 {
        return Ok(0.0);
    }
    let mut sizes: BTreeMap<&str, (CallKind, Vec<usize>)> = BTreeMap::new();
    for TimedExchange { kind, bytes, .. } in &nodes {
        sizes.entry(kind.name()).or_insert((*kind, Vec::new())).1.push(*bytes);
    }
    let bootstrap = ThreadExchange::new(setup.workers);
    let time = |rank: usize| Ok(time_exchanges(rank, setup.workers, bootstrap.rank(rank), &sizes)?);
    let outcomes = together(setup.workers, || bootstrap.abandon(), time);
    let found = outcomes?.into_iter().next().unwrap_or_default();
    let seconds = |one: &TimedExchange| {
        found.get(&(one.kind.name().into(), one.bytes)).copied().unwrap_or(0.0) * one.times as f64
    };
    let (once, inside): (Vec<&TimedExchange>, Vec<&TimedExchange>) = nodes.iter().partition(|one| one.times == 1);
    let inside: f64 = inside.into_iter().map(seconds).sum();
    let once: f64 = match spare {
        true => once.last().map_or(0.0, |last| seconds(last)),
        false => once.into_iter().map(seconds).sum(),
    };
    Ok(inside + once)
}

/// What a collective moves, if all ranks take part in it at once.
fn exchange(graph: &Graph, node: &Node, times: usize) -> Option<TimedExchange> {
    let kind = match node.op.collective()?.movement {
        Movement::SumBucket | Movement::Sum => CallKind::AllReduce,
        Movement::ScatterBucket { .. } | Movement::Scatter { .. } | Movement::Share { .. } => CallKind::ReduceScatter,
        Movement::GatherBucket { .. } | Movement::Gather { .. } | Movement::Join { .. } => CallKind::AllGather,
        Movement::Barrier => CallKind::Barrier,
        Movement::AllToAll { .. } => CallKind::AllToAll,
        Movement::Shift { .. } | Movement::Halo(_) | Movement::Send { .. } | Movement::Receive { .. } => return None,
    };
    let bytes = |ids: &[ValueId]| ids.iter().map(|id| align(graph.ty(*id).bytes())).sum::<usize>();
    let bytes = if kind == CallKind::Barrier { 0 } else { bytes(&node.inputs).max(bytes(&node.outputs)) };
    Some(TimedExchange { kind, bytes, times })
}

fn time_exchanges(
    rank: usize,
    size: usize,
    mut bootstrap: ThreadBootstrap,
    sizes: &BTreeMap<&str, (CallKind, Vec<usize>)>,
) -> Result<BTreeMap<(String, usize), f64>, Fault> {
    let watch = Watch::alone();
    let transport = shm::connect(rank, size, Arc::clone(&watch), &mut bootstrap)?;
    let world = Communicator::new(transport, watch, true);
    let mut times = BTreeMap::new();
    for (kind, sizes) in sizes.values() {
        let mut distinct = sizes.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let method = Method { iterations: EXCHANGES, private: false, fresh: true };
        for row in sweep(&world, *kind, &distinct, method)? {
            times.insert((kind.name().to_string(), row.bytes), row.us_median / 1e6);
        }
    }
    Ok(times)
}
