//! The workers that train together.

use crate::error::Error;
use crate::job::Job;
use kolo_comm::{Communicator, Fault};
use kolo_exec::Options;
use kolo_parallel::mesh::DATA;
use kolo_parallel::{Mesh, Parallel, Roles};
use std::sync::Arc;

#[derive(Clone, Debug)]
pub enum WorkerGroup {
    Alone,
    /// Workers that exchange their gradients.
    Workers(Arc<Communicator>),
    /// A worker with parameter servers; the communicator has the workers first.
    Served(Arc<Communicator>, Roles),
}

impl WorkerGroup {
    /// All ranks, servers among them; `None` if this is the only one.
    pub fn world(&self) -> Option<&Arc<Communicator>> {
        match self {
            WorkerGroup::Alone => None,
            WorkerGroup::Workers(world) | WorkerGroup::Served(world, _) => Some(world),
        }
    }

    /// Those who run every exchange of the step's graph together.
    pub fn peers(&self) -> Option<&Arc<Communicator>> {
        match self {
            WorkerGroup::Workers(world) => Some(world),
            WorkerGroup::Alone | WorkerGroup::Served(..) => None,
        }
    }

    pub fn roles(&self) -> Option<Roles> {
        match self {
            WorkerGroup::Served(_, roles) => Some(*roles),
            WorkerGroup::Alone | WorkerGroup::Workers(_) => None,
        }
    }

    pub fn rank(&self) -> usize {
        self.world().map_or(0, |world| world.rank())
    }

    pub fn workers(&self) -> usize {
        match self {
            WorkerGroup::Alone => 1,
            WorkerGroup::Workers(world) => world.size(),
            WorkerGroup::Served(_, roles) => roles.workers,
        }
    }

    /// Whether this rank writes files and prints for all.
    pub fn is_rank_zero(&self) -> bool {
        self.rank() == 0
    }

    /// How this group spreads the job.
    pub fn parallel(&self, job: &Job) -> Result<Parallel, Error> {
        match self.roles() {
            Some(roles) => served(job, roles),
            None => Ok(job.parallel.clone()),
        }
    }

    /// This worker's place among the workers.
    pub fn mesh(&self, parallel: &Parallel) -> Result<Mesh, Error> {
        parallel.mesh(self.workers(), self.rank()).map_err(|refusal| Error::workers(self.workers(), refusal))
    }

    /// This worker's place among those who take turns in evaluations; `None` if it takes none.
    pub fn evaluators(&self, mesh: &Mesh) -> Option<Mesh> {
        match self {
            WorkerGroup::Alone | WorkerGroup::Workers(_) => Some(mesh.clone()),
            // Workers of servers are not in step: the first evaluates alone.
            WorkerGroup::Served(..) => self.is_rank_zero().then(Mesh::alone),
        }
    }

    /// The usual options of a worker: its share of the grains, a lane per thread.
    pub fn options(&self, job: &Job, threads: usize) -> Result<Options, Error> {
        let mesh = self.mesh(&job.parallel)?;
        Ok(Options::for_grains(job.grains / mesh.size(DATA), threads))
    }
}

/// A job's strategies with parameter servers.
pub(crate) fn served(job: &Job, roles: Roles) -> Result<Parallel, Error> {
    job.parallel.served(roles, job.facts()).map_err(|refusal| Error::Together(Fault::BadCall(refusal.to_string())))
}
