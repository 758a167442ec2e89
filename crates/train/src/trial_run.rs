//! How long a step of a job takes on this machine, found by running a little of it: the kernels of the graph that will run, on
//! as many workers and threads as will run it, with the job's own data, and the exchanges between workers of one host.

use crate::error::Error;
use crate::held::HeldBatch;
use crate::job::Job;
use crate::step_inputs::StepInputs;
use crate::supply::{self, TrainingSamples};
use kolo_comm::bench::{BenchRow, Method, sweep};
use kolo_comm::bootstrap::{ThreadBootstrap, ThreadExchange};
use kolo_comm::{CallKind, Communicator, Fault, Watch, shm};
use kolo_exec::session::TrialTimes;
use kolo_exec::{Collectives, Exchange, ExchangeError, Feed, Memory, Options, Program, Session, Store};
use kolo_graph::collective::{Collective, Movement};
use kolo_graph::layout::align;
use kolo_graph::{Graph, Node, Phase, ValueId};
use kolo_parallel::strategy::Refusal;
use kolo_parallel::{GrainShare, Mesh};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// How long a trial run takes, about: a plan should be quick.
pub const TIME_LIMIT: Duration = Duration::from_millis(1500);
/// Calls of each exchange.
const EXCHANGES: usize = 16;
/// An exchange as a step makes it: of what was just written, started and then waited for.
const AS_IN_STEPS: Method = Method { iterations: EXCHANGES, private: false, fresh: true, started: true };

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
    let mesh = |rank: usize| job.parallel.mesh(setup.workers, rank);
    let meshes: Result<Vec<Mesh>, Refusal> = (0..setup.workers).map(mesh).collect();
    let meshes = meshes.map_err(|refusal| Error::workers(setup.workers, refusal))?;
    let all = together(at_once, || {}, |rank| alone(job, (graph, &meshes[0]), options, rank, time_limit))?;
    let Some(first) = all.first() else { return Err(Error::Together(Fault::BadCall("the trial run failed".into()))) };
    let slowest = all.iter().map(|(one, _)| one.step_seconds).fold(0.0, f64::max);
    let making = all.iter().map(|(_, seconds)| *seconds).fold(0.0, f64::max);
    let data_ahead = job.loading.batches > 0;
    let loaders = if data_ahead { job.loading.threads } else { 1 };
    let spare = cores > setup.per_host * setup.threads;
    let exchange_seconds = match setup.per_host == setup.workers {
        true => exchanges(graph, &meshes, options, spare)?,
        false => 0.0,
    };
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

/// Collectives of a rank that nobody starts: its calls and its memory are those of a rank among others, but nothing moves.
#[derive(Debug)]
struct Unmoved {
    mesh: Mesh,
}

impl Collectives for Unmoved {
    fn size(&self, axis: &str) -> usize {
        self.mesh.size(axis)
    }
    fn memory(&self, bytes: usize) -> Result<Memory, ExchangeError> {
        Ok(Memory::try_new(bytes)?)
    }
    fn prepare(&self, _: Vec<Exchange>, _: usize) -> Result<usize, ExchangeError> {
        Ok(0)
    }
    fn start(&self, _: usize) {}
    fn wait(&self, _: usize) -> Result<(), ExchangeError> {
        Ok(())
    }
}

/// One worker's step without its exchanges, and seconds in which one thread makes its samples beforehand.
fn alone(
    job: &Job,
    (graph, mesh): (&Graph, &Mesh),
    options: Options,
    rank: usize,
    time_limit: Duration,
) -> Result<(TrialTimes, f64), Error> {
    let memory =
        Memory::try_new(Store::params_bytes(graph)).map_err(|error| Error::from(Box::new(error) as ExchangeError))?;
    let store = Store::in_memory(graph, memory);
    let collectives: Option<Arc<dyn Collectives>> = match job.executor.allocates_on_host() {
        true => Some(Arc::new(Unmoved { mesh: mesh.clone() })),
        false => None,
    };
    let mut session = Session::compile(Program::new(&job.executor, graph.clone(), options), &store, collectives)?;
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
    what: ExchangeSize,
    /// How often in a step; 0 if after the grains, once.
    times_in_grains: usize,
}

/// An exchange by what its time follows from. Bytes are with the padding between tensors.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ExchangeSize {
    axis: String,
    kind: CallKind,
    bytes: usize,
}

/// Seconds of a step's exchanges among the workers of this host, whose places these are. Where each core has a worker, an exchange
/// takes the time of one that computes; where cores are spare, all but the last of those after the grains is hidden.
fn exchanges(graph: &Graph, meshes: &[Mesh], options: Options, spare: bool) -> Result<f64, Error> {
    let timed = |(node, phase): (&Node, Phase)| {
        let what = exchange(graph, node, &meshes[0])?;
        // Lanes exchange beside each other.
        let times_in_grains = if phase == Phase::Grain { options.grains_per_lane() } else { 0 };
        Some(TimedExchange { what, times_in_grains })
    };
    let all: Vec<TimedExchange> = graph.nodes.iter().zip(graph.phases()).filter_map(timed).collect();
    let sizes: BTreeSet<&ExchangeSize> = all.iter().map(|one| &one.what).collect();
    let bootstrap = ThreadExchange::new(meshes.len());
    let time = |rank: usize| Ok(time_exchanges(&meshes[rank], bootstrap.rank(rank), &sizes)?);
    let found = match sizes.is_empty() || meshes.len() == 1 {
        true => return Ok(0.0),
        false => together(meshes.len(), || bootstrap.abandon(), time)?.into_iter().next().unwrap_or_default(),
    };
    let seconds = |one: &TimedExchange| found.get(&one.what).copied().unwrap_or(0.0);
    let (once, inside): (Vec<&TimedExchange>, Vec<&TimedExchange>) =
        all.iter().partition(|one| one.times_in_grains == 0);
    let inside: f64 = inside.into_iter().map(|one| seconds(one) * one.times_in_grains as f64).sum();
    let once: f64 = match spare {
        true => once.last().map_or(0.0, |last| seconds(last)),
        false => once.into_iter().map(seconds).sum(),
    };
    Ok(inside + once)
}

/// What a collective moves, if all ranks take part in it at once.
fn exchange(graph: &Graph, node: &Node, mesh: &Mesh) -> Option<ExchangeSize> {
    let Collective { axis, movement, .. } = node.op.collective()?;
    let kind = match movement {
        Movement::SumBucket | Movement::Sum => CallKind::AllReduce,
        Movement::ScatterBucket { .. } | Movement::Scatter { .. } | Movement::Share { .. } => CallKind::ReduceScatter,
        Movement::GatherBucket { .. } | Movement::Gather { .. } | Movement::Join { .. } => CallKind::AllGather,
        Movement::Barrier => CallKind::Barrier,
        Movement::AllToAll { .. } | Movement::Shift { .. } | Movement::Halo(_) => CallKind::AllToAll,
        Movement::Send { .. } | Movement::Receive { .. } => return None,
    };
    let bytes = |ids: &[ValueId]| ids.iter().map(|id| align(graph.ty(*id).bytes())).sum::<usize>();
    let (input, output) = (bytes(&node.inputs), bytes(&node.outputs));
    // What a rank sends to one other is its part of an all-to-all for it.
    let ranks = mesh.size(axis).max(2);
    let of_all = |sent: usize| sent * ranks / (ranks - 1);
    let bytes = match movement {
        Movement::Barrier => 0,
        Movement::Shift { .. } => of_all(input),
        Movement::Halo(halo) => of_all(input / halo.own(halo.rank).len().max(1) * halo.sent()),
        _ => input.max(output),
    };
    Some(ExchangeSize { axis: axis.into(), kind, bytes })
}

/// Times each of these exchanges as a step makes it: between the ranks of its axis, while all other groups of ranks do the same.
fn time_exchanges(
    mesh: &Mesh,
    mut bootstrap: ThreadBootstrap,
    sizes: &BTreeSet<&ExchangeSize>,
) -> Result<BTreeMap<ExchangeSize, f64>, Fault> {
    let watch = Watch::alone();
    let transport = shm::connect(mesh.rank(), mesh.ranks(), Arc::clone(&watch), &mut bootstrap)?;
    let world = Communicator::new(transport, watch, true);
    let mut times = BTreeMap::new();
    let mut groups: BTreeMap<(&str, CallKind), Vec<usize>> = BTreeMap::new();
    for ExchangeSize { axis, kind, bytes } in sizes {
        groups.entry((axis, *kind)).or_default().push(*bytes);
    }
    for ((axis, kind), sizes) in groups {
        let ranks = world.split_labelled(mesh.group(axis) as i64, mesh.coordinate(axis) as i64, axis)?;
        for row in sweep(&ranks, kind, &sizes, AS_IN_STEPS)? {
            times.insert(ExchangeSize { axis: axis.into(), kind, bytes: row.bytes }, row.us_quarter / 1e6);
        }
        world.barrier()?;
    }
    Ok(times)
}

/// Times exchanges of each kind and size between workers of this host: among all of them, among each half, and so on.
pub fn time_links(workers: usize, kinds: &[CallKind], sizes: &[usize]) -> Result<Vec<BenchRow>, Error> {
    let bootstrap = ThreadExchange::new(workers);
    let time = |rank: usize| -> Result<Vec<BenchRow>, Error> {
        let (watch, mut member) = (Watch::alone(), bootstrap.rank(rank));
        let transport = shm::connect(rank, workers, Arc::clone(&watch), &mut member)?;
        let world = Communicator::new(transport, watch, true);
        let (mut rows, mut ranks) = (Vec::new(), workers);
        while ranks > 1 {
            let group = world.split((rank / ranks) as i64, rank as i64)?;
            for kind in kinds {
                rows.extend(sweep(&group, *kind, sizes, AS_IN_STEPS)?);
            }
            world.barrier()?;
            ranks = if ranks.is_multiple_of(2) { ranks / 2 } else { 1 };
        }
        Ok(rows)
    };
    Ok(together(workers, || bootstrap.abandon(), time)?.into_iter().next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::collective::{AxisGather, AxisShift, AxisSum};
    use kolo_graph::{Builder, Type};

    /// A tensor that goes to the next of a ring is the part for it of an all-to-all.
    #[test]
    fn exchanges_are_those_of_their_axis() {
        let mesh = Mesh::new(&[("context", 4), ("tensor", 2)], 0).unwrap();
        let [context, tensor] = ["context", "tensor"].map(String::from);
        let builder = Builder::new();
        let x = builder.input("x", Type::f32([6, 32]));
        let sum = x.then(AxisSum { axis: tensor.clone(), ranks: 2 }, &[]);
        let shifted = sum.then(AxisShift { axis: context.clone(), by: 1, ranks: 4 }, &[]);
        let gathered = shifted.then(AxisGather { axis: tensor.clone(), dim: 0, ranks: 2 }, &[]);
        builder.output("gathered", gathered);
        let graph = builder.finish().unwrap();
        let found: Vec<ExchangeSize> = graph.nodes.iter().filter_map(|node| exchange(&graph, node, &mesh)).collect();
        let wanted = [(tensor.clone(), CallKind::AllReduce, 768), (context, CallKind::AllToAll, 1024)];
        let wanted = wanted.into_iter().chain([(tensor, CallKind::AllGather, 1536)]);
        assert_eq!(found, wanted.map(|(axis, kind, bytes)| ExchangeSize { axis, kind, bytes }).collect::<Vec<_>>());
    }
}
