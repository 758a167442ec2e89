//! Training with parameter servers: workers push the sums of their grains and take the weights back; servers update.
//!
//! The first ranks are workers, the rest servers. A worker and a server talk over a communicator of their own, and a server
//! has a thread for each worker. With staleness 0 the run is synchronous and has its bits; otherwise each push is an update
//! of its own, on the mean gradient of that worker's share of the batch, clipped by the worker.

use crate::error::Error;
use crate::job::Job;
use crate::room;
use crate::step::{self, optimise, training_graph};
use crate::timeline::{COMMUNICATION, Timeline};
use kolo_comm::communicator::CallSpan;
use kolo_comm::element::{Element, Reduction};
use kolo_comm::{Communicator, Fault, combine};
use kolo_exec::{Feed, Options, Program, Session, Store};
use kolo_graph::{Graph, ValueId};
use kolo_parallel::CommLane;
use kolo_parallel::servers::{Clocks, Shares, gradient_name, server_graph, shares, sum_name};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

/// Who does what, and how far workers may drift apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Roles {
    pub workers: usize,
    pub servers: usize,
    /// `None`: no bound.
    pub staleness: Option<u64>,
}

impl Roles {
    pub fn synchronous(&self) -> bool {
        self.staleness == Some(0)
    }
}

/// What a message from a worker begins with.
const PUSH: i64 = 1;
const DONE: i64 = 2;
/// How often a waiting server looks up.
const LOOK_UP: Duration = Duration::from_millis(20);

/// The step before any cut. Servers clip only where they see the whole gradient.
fn whole_graph(job: &Job, roles: Roles) -> Result<Graph, Error> {
    let clip = job.clip.filter(|_| roles.synchronous());
    Ok(optimise(training_graph(&*job.model, &job.optimizer, clip, job.grain_batch(), job.grains)?))
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
        let shares = shares(&whole_graph(job, roles)?, roles.servers).map_err(refused)?;
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

/// What a server saw.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Served {
    pub pushes: u64,
    /// The furthest that a worker was ahead of the slowest when its push was applied.
    pub ahead_max: u64,
    pub ahead_sum: u64,
}

struct Server<'j> {
    job: &'j Job,
    roles: Roles,
    store: Store,
    session: Session,
    /// (input, elements with padding) of every gradient, in the order of memory.
    gradients: Vec<(String, usize)>,
    /// (input, elements) of every other sum that the updates need.
    numbers: Vec<(String, usize)>,
    /// The elements that it has of its parameters' memory.
    own: Range<usize>,
    clocks: Clocks,
    /// Workers whose push of the current step is here (synchronous only).
    arrived: usize,
    /// Workers that are done.
    left: usize,
    version: u64,
    /// The step of the worker that is ahead.
    furthest: u64,
    inbox: Vec<Vec<f32>>,
    others: Vec<Vec<f32>>,
    total: Vec<f32>,
    total_others: Vec<f32>,
    /// The other sums that the updates need: each worker's, and their total.
    needed: Vec<Vec<f32>>,
    total_needed: Vec<f32>,
    served: Served,
    timeline: Option<Arc<Timeline>>,
}

/// Serves until all workers are done. `world` has the workers first, then the servers.
pub fn serve(
    job: &Job,
    threads: usize,
    world: &Communicator,
    roles: Roles,
    timeline: Option<&Arc<Timeline>>,
) -> Result<Served, Error> {
    let number = world.rank() - roles.workers;
    let whole = whole_graph(job, roles)?;
    let shares = shares(&whole, roles.servers).map_err(refused)?;
    let graph = server_graph(&whole, roles.servers, number);
    if !roles.synchronous() && graph.nodes.iter().any(|node| node.op.collective().is_some()) {
        return Err(refused(
            "the update needs numbers of all servers' gradients, and those of different pushes do not go together\n  hint: use `--servers 1` or `--staleness 0`".into(),
        ));
    }
    // What comes from each worker, its copy of the parameters, and the sum.
    let buffers = (2 * roles.workers + 1) * shares.servers[number].len() * size_of::<f32>();
    let program = Program::cpu(graph, Options::single(threads));
    let mut plan = kolo_plan::memory(&program);
    plan.scratch += buffers;
    let links = pairs(world, roles)?;
    let among_servers = Arc::new(world.split(1, world.rank() as i64)?);
    room::check_among(&plan, false, world)?;
    let store = Store::new(&program.graph, job.seed);
    let mut session = Session::compile(program, &store, Some(Arc::new(CommLane::new(among_servers))))?;
    if let Some(timeline) = timeline {
        timeline.trace(&mut session);
        for (worker, link) in links.iter().enumerate() {
            let timeline = Arc::clone(timeline);
            link.record(Some(Arc::new(move |span: &CallSpan| timeline.add_call(COMMUNICATION + 1 + worker, span))));
        }
    }
    let gradients = gradient_inputs(&session);
    let (share, others) = (shares.servers[number].len(), if number == 0 { shares.others.len() } else { 0 });
    let own = shares.skipped[number]..shares.skipped[number] + share;
    let numbers: Vec<(String, usize)> =
        shares.needed.iter().map(|(number, range)| (sum_name(*number), range.len())).collect();
    let needed: usize = numbers.iter().map(|(_, elements)| elements).sum();
    let server = Server {
        job,
        roles,
        store,
        session,
        gradients,
        numbers,
        own,
        clocks: Clocks::new(roles.workers, roles.staleness),
        arrived: 0,
        left: 0,
        version: 0,
        furthest: 0,
        inbox: vec![vec![0.0; share]; roles.workers],
        others: vec![vec![0.0; others]; roles.workers],
        total: vec![0.0; share],
        total_others: vec![0.0; others],
        needed: vec![vec![0.0; needed]; roles.workers],
        total_needed: vec![0.0; needed],
        served: Served::default(),
        timeline: timeline.cloned(),
    };
    let (server, changed) = (Mutex::new(server), Condvar::new());
    let (state, changed) = (&server, &changed);
    std::thread::scope(|scope| {
        let threads = links.iter().enumerate().map(|(worker, link)| {
            let named = std::thread::Builder::new().name(format!("worker {worker}"));
            let started = named.spawn_scoped(scope, move || attend(state, changed, worker, link, number));
            started.map_err(|error| {
                let fault = Fault::thread(format!("starting a thread for worker {worker}"), &error);
                // The threads that did start would wait for the other workers.
                link.watch().abort(fault.clone());
                Error::from(fault)
            })
        });
        // All start before the first is waited for.
        let threads: Vec<_> = threads.collect();
        let panicked = |_| Err(refused("a thread of the server panicked".into()));
        let join = |thread: Result<ScopedJoinHandle<'_, Result<(), Error>>, Error>| {
            thread.and_then(|thread| thread.join().unwrap_or_else(panicked))
        };
        let outcomes: Vec<Result<(), Error>> = threads.into_iter().map(join).collect();
        outcomes.into_iter().collect::<Result<(), Error>>()
    })?;
    let served = lock(&server).served;
    Ok(served)
}

fn lock<'a, T>(mutex: &'a Mutex<T>) -> MutexGuard<'a, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A server's gradients in the order of memory: that of its parameters.
fn gradient_inputs(session: &Session) -> Vec<(String, usize)> {
    let graph = session.graph();
    let inputs: HashMap<&str, ValueId> = graph.inputs().map(|(id, input)| (input.name.as_str(), id)).collect();
    let input = |name: String| {
        let id = *inputs.get(name.as_str())?;
        Some((name, kolo_graph::layout::align(graph.ty(id).bytes()) / 4))
    };
    let mut list: Vec<(String, usize)> =
        graph.params().filter_map(|(_, param)| input(gradient_name(&param.name))).collect();
    list.reverse();
    list
}

/// Serves one worker.
fn attend(
    server: &Mutex<Server<'_>>,
    changed: &Condvar,
    worker: usize,
    link: &Communicator,
    number: usize,
) -> Result<(), Error> {
    let share = lock(server).total.len();
    let with_others = number == 0 && lock(server).roles.synchronous();
    let mut params = vec![0.0f32; share];
    let mut needed = lock(server).total_needed.clone();
    loop {
        let mut header = [0i64; 2];
        link.recv(&mut header, 0)?;
        if header[0] == DONE {
            let mut state = lock(server);
            state.clocks.leave(worker);
            state.left += 1;
            changed.notify_all();
            state = wait_until(state, changed, link, |state| state.left == state.roles.workers)?;
            state.copy_params(&mut params);
            drop(state);
            return Ok(link.send(&params, 0)?);
        }
        // The buffers belong to this thread between its worker's pushes.
        let (mut push, mut others) = {
            let mut state = lock(server);
            (std::mem::take(&mut state.inbox[worker]), std::mem::take(&mut state.others[worker]))
        };
        link.recv(&mut push, 0)?;
        if !needed.is_empty() {
            link.recv(&mut needed, 0)?;
        }
        if with_others {
            link.recv(&mut others, 0)?;
        }
        let mut state = lock(server);
        (state.inbox[worker], state.others[worker]) = (push, others);
        state.needed[worker].copy_from_slice(&needed);
        let before = state.version;
        state.furthest = state.furthest.max(header[1] as u64);
        link.watch().set_step(state.furthest);
        if let Some(timeline) = &state.timeline {
            timeline.begin_step(state.furthest as usize)?;
        }
        state.push(worker, header[1] as usize)?;
        changed.notify_all();
        if state.roles.synchronous() {
            state = wait_until(state, changed, link, |state| state.version > before)?;
        }
        state = wait_until(state, changed, link, |state| state.clocks.may_go_on(worker))?;
        state.copy_params(&mut params);
        let totals = with_others.then(|| state.total_others.clone());
        drop(state);
        link.send(&params, 0)?;
        if let Some(totals) = totals {
            link.send(&totals, 0)?;
        }
    }
}

/// Waits for a change of the server's state; an ended job ends the wait.
fn wait_until<'a, 'j>(
    mut state: MutexGuard<'a, Server<'j>>,
    changed: &Condvar,
    link: &Communicator,
    ready: impl Fn(&Server<'j>) -> bool,
) -> Result<MutexGuard<'a, Server<'j>>, Error> {
    while !ready(&state) {
        link.watch().check()?;
        state = changed.wait_timeout(state, LOOK_UP).unwrap_or_else(PoisonError::into_inner).0;
    }
    Ok(state)
}

impl Server<'_> {
    /// Copies its run of the parameters.
    fn copy_params(&mut self, to: &mut [f32]) {
        to.copy_from_slice(&self.store.params_mut()[self.own.clone()]);
    }

    /// A worker's push is in its inbox.
    fn push(&mut self, worker: usize, step: usize) -> Result<(), Error> {
        self.clocks.push(worker);
        self.served.pushes += 1;
        if self.roles.synchronous() {
            self.arrived += 1;
            if self.arrived < self.roles.workers {
                return Ok(());
            }
            self.arrived = 0;
            add_up(&self.inbox, &mut self.total);
            add_up(&self.others, &mut self.total_others);
            add_up(&self.needed, &mut self.total_needed);
            self.version += 1;
            return self.update(step, step + 1);
        }
        let ahead = self.clocks.ahead(worker);
        self.served.ahead_max = self.served.ahead_max.max(ahead);
        self.served.ahead_sum += ahead;
        std::mem::swap(&mut self.total, &mut self.inbox[worker]);
        self.total_needed.copy_from_slice(&self.needed[worker]);
        let outcome = self.update(step, self.served.pushes as usize);
        std::mem::swap(&mut self.total, &mut self.inbox[worker]);
        outcome
    }

    /// Updates the parameters with the gradients in `total`: at the rate of `step`, as the update number `number`.
    fn update(&mut self, step: usize, number: usize) -> Result<(), Error> {
        let rate = self.job.schedule.rate(self.job.optimizer.lr(), step) as f32;
        let sums = [(&self.total, &self.gradients), (&self.total_needed, &self.numbers)];
        let feed = |feed: &mut Feed<'_>| {
            for (name, value) in [("lr", rate), ("step", number as f32)] {
                if let Some(slot) = feed.f32(name) {
                    slot[0] = value;
                }
            }
            for (values, inputs) in sums {
                let mut at = 0;
                for (name, elements) in inputs {
                    if let Some(slot) = feed.f32(name) {
                        slot.copy_from_slice(&values[at..at + slot.len()]);
                    }
                    at += elements;
                }
            }
        };
        Ok(self.session.run(&mut self.store, feed, |_, _| {})?)
    }
}

/// Adds the workers' sums in the order of the balanced tree over their ranks.
fn add_up(terms: &[Vec<f32>], total: &mut [f32]) {
    let inputs: Vec<*const u8> = terms.iter().map(|term| term.as_ptr().cast()).collect();
    // SAFETY: every term and the total have as many elements, and the total is no term.
    unsafe { combine::combine_tree(Element::F32, Reduction::Sum, &inputs, total.as_mut_ptr().cast(), total.len()) };
}
