//! What one worker will run and hold, before anything is allocated: the same for training, `kolo plan` and layouts that are
//! only considered.

use crate::checkpoint;
use crate::error::Error;
use crate::job::Job;
use crate::step::program_of;
use crate::supply;
use crate::trainer::count_beside;
use kolo_exec::{Offload, Options, Program};
use kolo_parallel::{Mesh, Parallel};
use kolo_plan::MemoryPlan;

/// What a rank's communicators take, and what each peer adds to that: parts of messages on their way, and of sums.
const COMMUNICATOR_BYTES: usize = 3 << 20;
const PEER_BYTES: usize = 3 << 19;

fn link_bytes(ranks: usize) -> usize {
    if ranks == 1 { 0 } else { COMMUNICATOR_BYTES + PEER_BYTES * (ranks - 1) }
}

/// A worker's program and its memory.
#[derive(Clone, Debug)]
pub struct WorkerPlan {
    pub program: Program,
    /// Of the host.
    pub memory: MemoryPlan,
    /// Of a device with memory of its own.
    pub device: Option<MemoryPlan>,
}

impl WorkerPlan {
    /// Of the worker at this place of a mesh, as these strategies spread the job. `evaluators` is its place among those who
    /// take turns in evaluations, if it is one of them.
    pub fn new(
        job: &Job,
        parallel: &Parallel,
        mesh: &Mesh,
        evaluators: Option<&Mesh>,
        options: Options,
    ) -> Result<Self, Error> {
        let (program, evaluation) =
            count_beside(job, parallel, options.threads, evaluators, || Ok(program_of(job, parallel, mesh, options)?))?;
        let buffers = supply::buffer_bytes(job, options.grains * job.grain_batch());
        let data = buffers.saturating_add(job.source.cached_bytes());
        let checkpoint = match job.saving.plans_copies() {
            true => checkpoint::copied_bytes(&program.graph, mesh.ranks()),
            false => 0,
        };
        let step = kolo_plan::memory(&program);
        let process = step.process + link_bytes(mesh.ranks());
        let device = kolo_plan::device_memory(&program).map(|step| MemoryPlan { evaluation, ..step });
        let evaluation = if device.is_some() { 0 } else { evaluation };
        let memory = MemoryPlan { evaluation, data, checkpoint, process, ..step };
        Ok(Self { program, memory, device })
    }

    /// The memory that its device computes in, which `memory.limit` is about.
    pub fn limited(&self) -> &MemoryPlan {
        self.device.as_ref().unwrap_or(&self.memory)
    }

    /// That memory with this much in the host's instead; `None` if the device has no other.
    pub fn offloaded(&self, offload: Offload) -> Option<MemoryPlan> {
        let executor = self.program.executor.with_offload(offload)?;
        let order = self.program.order.clone();
        let program = Program { order, ..Program::new(&executor, (*self.program.graph).clone(), self.program.options) };
        let evaluation = self.limited().evaluation;
        kolo_plan::device_memory(&program).map(|step| MemoryPlan { evaluation, ..step })
    }
}
