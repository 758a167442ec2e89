//! From a job and a group to what a worker needs for its steps: graph, memory, store, session.

use crate::checkpoint;
use crate::copies;
use crate::error::Error;
use crate::job::Job;
use crate::machine;
use crate::memory_check::{self, HostUsage, processes_here};
use crate::memory_limit::{self, Wanted, WorkersNow};
use crate::together;
use crate::worker_group::WorkerGroup;
use crate::worker_plan::WorkerPlan;
use kolo_comm::{Communicator, Fault};
use kolo_exec::{Collectives, Options, Program, Session, Store};
use kolo_parallel::mesh::DATA;
use kolo_parallel::strategy::Allocation;
use kolo_parallel::{GrainShare, Mesh, Parallel};
use kolo_plan::MemoryPlan;
use std::sync::Arc;

/// A worker, ready for its first step.
#[derive(Debug)]
pub(crate) struct Worker {
    pub store: Store,
    pub session: Session,
    /// What the workers agreed to hold.
    pub memory: MemoryPlan,
    /// Whether there is memory for a copy of what this worker saves, beside all that was planned.
    pub has_room_for_copy: bool,
    pub parallel: Parallel,
    /// Its place among those who take turns in evaluations.
    pub evaluators: Mesh,
    /// The ranks along the data axis, who take those turns, if there are several workers.
    pub turns: Option<Arc<Communicator>>,
    /// Those who share one copy of the model with it, if there are any.
    pub replica: Option<Arc<Communicator>>,
    pub grains: GrainShare,
}

impl Worker {
    /// Compiles the worker's part of the job's step for these options, whose grains are its share of the job's, for a run that
    /// ends with the first lost worker or for an elastic one. All workers call it together.
    pub fn assemble(job: &Job, group: &WorkerGroup, options: Options, elastic: bool) -> Result<Self, Error> {
        job.check_executor()?;
        if group.world().is_some() {
            job.check_device(group.workers())?;
        }
        let parallel = group.parallel(job)?;
        let mesh = group.mesh(&parallel)?;
        let evaluators = group.evaluators(&mesh);
        // All ranks have the same job, so all of them count or none does.
        if job.source.cached_bytes() > 0 {
            job.source.share_memory(group.peers().map_or(Ok(group.workers()), |peers| processes_here(peers))?);
        }
        let plan = WorkerPlan::new(job, &parallel, &mesh, evaluators.as_ref(), options)?;
        let WorkerPlan { program, mut memory, device } = plan;
        if elastic && parallel.is_sharded(group.workers()) {
            memory.copies = copies::bytes(&program.graph, group.workers(), parallel.shards_weights(&mesh));
        }
        let usage = check_memory(job, group, &parallel, &memory, device.as_ref(), options)?;
        let copy = MemoryPlan { checkpoint: checkpoint::copied_bytes(&program.graph, mesh.ranks()), ..memory };
        let has_room_for_copy = job.saving.plans_copies() || has_room(job, &copy, usage, device.is_none());
        let (store, session) = match group.peers() {
            Some(world) => compile_among(job, &parallel, program, &mesh, world)?,
            None => {
                let store = Store::new(&program.graph, job.seed);
                let session = Session::compile(program, &store, None)?;
                (store, session)
            }
        };
        let turns = group.peers().map(|world| along_data(world, &mesh)).transpose()?;
        let replica = group.peers().filter(|world| mesh.size(DATA) < world.size());
        let replica = replica.map(|world| world.split(mesh.coordinate(DATA) as i64, mesh.group(DATA) as i64));
        let replica = replica.transpose()?.map(Arc::new);
        let grains = parallel.grains(&mesh, options.grains);
        machine::release_free_memory();
        let evaluators = evaluators.unwrap_or_else(Mesh::alone);
        Ok(Self { store, session, memory, has_room_for_copy, parallel, evaluators, turns, replica, grains })
    }
}

/// Refuses a job of which a worker needs more than the job or the machine allows, of the host's memory or of a device's own. All ranks
/// call it together, servers too.
fn check_memory(
    job: &Job,
    group: &WorkerGroup,
    parallel: &Parallel,
    memory: &MemoryPlan,
    device: Option<&MemoryPlan>,
    options: Options,
) -> Result<HostUsage, Error> {
    let usage_of = |plan: &MemoryPlan, share_weights: bool| match group.world() {
        Some(world) => HostUsage::among(plan, share_weights, world),
        None => Ok(HostUsage::alone(plan)),
    };
    let usage = usage_of(memory, parallel.home().is_shared())?;
    let now = WorkersNow { workers: group.workers(), threads: options.threads };
    let layouts = group.roles().is_none().then_some(now);
    // What a GPU holds, its executor compares with what the GPU has.
    let largest = match device {
        Some(device) => usage_of(device, false)?.largest(),
        None => usage.largest(),
    };
    let wanted = Wanted { plan: device.unwrap_or(memory), largest, rank: group.rank(), layouts };
    match (memory_limit::check(job, &wanted), group.world()) {
        (Err(Error::Memory(text)), Some(world)) => {
            // What the first rank found takes its time: nobody ends the job before that is said.
            let texts = together::gather_bytes(Some(world), text.as_bytes())?;
            return Err(Error::Memory(String::from_utf8_lossy(&texts[0]).into_owned()));
        }
        (outcome, _) => outcome?,
    }
    memory_check::check(memory, usage)?;
    Ok(usage)
}

/// Whether the host has memory for this plan's copy of the state as well, which `usage` does not count.
fn has_room(job: &Job, plan: &MemoryPlan, usage: HostUsage, is_limited: bool) -> bool {
    let usage = usage.with_each(plan.checkpoint as u64);
    let exceeds = job.memory.limit_bytes.is_some_and(|limit| is_limited && usage.largest() > limit);
    !exceeds && memory_check::shortage(plan, usage).is_none()
}

/// The ranks that differ from this one in their place along the data axis alone. All ranks call it together.
fn along_data(world: &Arc<Communicator>, mesh: &Mesh) -> Result<Arc<Communicator>, Error> {
    match mesh.size(DATA) == world.size() {
        true => Ok(Arc::clone(world)),
        false => Ok(Arc::new(world.split(mesh.group(DATA) as i64, mesh.coordinate(DATA) as i64)?)),
    }
}

/// The store and the session of a rank whose graph has exchanges in it.
fn compile_among(
    job: &Job,
    parallel: &Parallel,
    program: Program,
    mesh: &Mesh,
    world: &Arc<Communicator>,
) -> Result<(Store, Session), Error> {
    let lane: Arc<dyn Collectives> = parallel.lane(mesh, world, job.executor.links())?;
    let bytes = Store::params_bytes(&program.graph);
    let weights = parallel.allocate(&Allocation { bytes, world, lane: &*lane })?;
    let store = Store::in_memory(&program.graph, weights);
    let home = parallel.home();
    store.initialise_where(job.seed, |entry| !entry.is_param() || home.initialises(world.rank()));
    world.barrier()?;
    if let Some(refusal) = parallel.needs_updates_in_place().filter(|_| !program.updates_params_in_place()) {
        return Err(Error::Together(Fault::BadCall(refusal.to_string())));
    }
    let session = Session::compile(program, &store, Some(lane))?;
    Ok((store, session))
}
