//! Training with parameter servers: workers push the sums of their grains and take the weights back; servers update.
//!
//! The first ranks are workers, the rest servers. A worker and a server talk over a communicator of their own, and a server
//! has a thread for each worker. With staleness 0 the run is synchronous and has its bits; otherwise each push is an update
//! of its own, on the mean gradient of that worker's share of the batch, clipped by the worker.

mod server;
mod state;

use crate::error::Error;
use crate::job::Job;
use crate::step::{self, model_graph, optimise};
use crate::worker_group::served;
use kolo_comm::{Communicator, Fault};
use kolo_exec::store::Saved;
use kolo_parallel::Purpose;
pub use kolo_parallel::Roles;
use kolo_parallel::servers::{Shares, shares};
pub use server::{Served, serve};

/// What a step waited for that exchanged with servers, beside the axes of the mesh.
pub const WAITED_FOR: &str = kolo_parallel::servers::KIND.name;

/// What a message from a worker begins with.
const PUSH: i64 = 1;
const DONE: i64 = 2;
const SAVE: i64 = 3;
const RESTORE: i64 = 4;

/// How the step is cut among servers.
fn whole_shares(job: &Job, roles: Roles) -> Result<Shares, Error> {
    let whole = optimise(model_graph(job, &served(job, roles)?, Purpose::Server)?);
    shares(&whole, roles.servers).map_err(refused)
}

/// A communicator for every pair of worker and server that this rank is in, by the other's number.
fn pairs(world: &Communicator, roles: Roles) -> Result<Vec<Communicator>, Error> {
    let mut own = Vec::new();
    for worker in 0..roles.workers {
        for server in 0..roles.servers {
            let member = world.rank() == worker || world.rank() == roles.workers + server;
            let pair = world.split(i64::from(member), world.rank() as i64)?;
            if member {
                own.push(pair);
            }
        }
    }
    Ok(own)
}

/// A worker's end of the links to all servers.
#[derive(Debug)]
pub struct Links {
    roles: Roles,
    pairs: Vec<Communicator>,
    shares: Shares,
    clip: Option<f32>,
    /// Targets of a whole step, if some may not count.
    targets: Option<usize>,
    received: Vec<f32>,
    /// What every server gets beside its gradients.
    needed: Vec<f32>,
    /// All workers, without the servers.
    workers: Communicator,
}

impl Links {
    /// All ranks call this together, servers in [`serve`].
    pub fn connect(job: &Job, world: &Communicator, roles: Roles) -> Result<Self, Error> {
        let shares = whole_shares(job, roles)?;
        let clip = job.clip.filter(|_| !roles.synchronous());
        let targets = step::targets(&*job.model, job.grain_batch(), job.grains)?;
        let pairs = pairs(world, roles)?;
        // The servers form a group of their own, and so do the workers.
        let workers = world.split(0, world.rank() as i64)?;
        Ok(Self { roles, pairs, shares, clip, targets, received: Vec::new(), needed: Vec::new(), workers })
    }

    pub fn synchronous(&self) -> bool {
        self.roles.synchronous()
    }

    pub fn workers(&self) -> &Communicator {
        &self.workers
    }

    pub fn pairs(&self) -> &[Communicator] {
        &self.pairs
    }

    /// Pushes the sums and takes the weights. In a synchronous run the sums that are no gradients come back as those of all
    /// workers; otherwise this worker's are scaled to stand for all.
    pub fn exchange(&mut self, step: usize, sums: &mut [f32], params: &mut [f32]) -> Result<(), Error> {
        if !self.roles.synchronous() {
            sums.iter_mut().for_each(|sum| *sum *= self.roles.workers as f32);
            let counted = self.shares.needed.first().map(|(_, range)| sums[range.start]);
            let factor = self.targets.zip(counted).map_or(1.0, |(of, counted)| of as f64 / f64::from(counted).max(1.0));
            clip_gradients(&mut sums[..self.shares.others.start], self.clip, factor);
        }
        self.needed.clear();
        self.needed.extend(self.shares.needed.iter().flat_map(|(_, range)| &sums[range.clone()]));
        for (server, (pair, share)) in self.pairs.iter().zip(&self.shares.servers).enumerate() {
            pair.send(&[PUSH, step as i64], 1)?;
            pair.send(&sums[share.clone()], 1)?;
            if !self.needed.is_empty() {
                pair.send(&self.needed, 1)?;
            }
            if server == 0 && self.roles.synchronous() {
                pair.send(&sums[self.shares.others.clone()], 1)?;
            }
        }
        for (server, (pair, share)) in self.pairs.iter().zip(&self.shares.servers).enumerate() {
            pair.recv(&mut params[share.clone()], 1)?;
            if server == 0 && self.roles.synchronous() {
                self.received.resize(self.shares.others.len(), 0.0);
                pair.recv(&mut self.received, 1)?;
                sums[self.shares.others.clone()].copy_from_slice(&self.received);
            }
        }
        Ok(())
    }

    /// What the servers keep, by entry: parameters and moments. In a synchronous run, between two steps of this worker, it is
    /// what the last step left.
    pub fn save(&self) -> Result<Vec<Saved>, Error> {
        let mut all = Vec::new();
        for pair in &self.pairs {
            pair.send(&[SAVE, 0], 1)?;
            all.extend(state::receive(pair, 1)?);
        }
        Ok(all)
    }

    /// Gives the servers what was saved, by whatever group. One worker does, before its next step.
    pub fn restore(&self, saved: &[Saved]) -> Result<(), Error> {
        self.give(saved, 0)
    }

    /// Gives the servers first weights; their moments stay as they are.
    pub fn start_from(&self, weights: &[Saved]) -> Result<(), Error> {
        self.give(weights, 1)
    }

    fn give(&self, saved: &[Saved], some: i64) -> Result<(), Error> {
        for pair in &self.pairs {
            pair.send(&[RESTORE, some], 1)?;
            state::send(pair, 1, saved)?;
        }
        Ok(())
    }

    /// This worker is done; the weights it gets are those after the last push of all.
    pub fn finish(&self, params: &mut [f32]) -> Result<(), Error> {
        self.pairs.iter().try_for_each(|pair| pair.send(&[DONE, 0], 1))?;
        for (pair, share) in self.pairs.iter().zip(&self.shares.servers) {
            pair.recv(&mut params[share.clone()], 1)?;
        }
        Ok(())
    }
}

fn refused(message: String) -> Error {
    Error::Together(Fault::BadCall(message))
}

/// Scales a worker's gradient, which the update will multiply with `factor`, down to the largest norm allowed.
fn clip_gradients(gradients: &mut [f32], clip: Option<f32>, factor: f64) {
    let Some(limit) = clip else { return };
    let norm = gradients.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>().sqrt() * factor;
    let scale = f64::from(limit) / (norm + 1e-6);
    if scale < 1.0 {
        gradients.iter_mut().for_each(|g| *g *= scale as f32);
    }
}
