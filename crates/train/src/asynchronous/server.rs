//! A parameter server: it takes each worker's push on a thread of that worker's own, updates its run of the parameters and hands
//! them back.

use super::{DONE, RESTORE, SAVE, pairs, refused, state, whole_shares};
use crate::error::Error;
use crate::job::Job;
use crate::memory_check::{self, HostUsage};
use crate::memory_limit::{self, Wanted};
use crate::step::graph_of;
use crate::step_inputs::StepInputs;
use crate::timeline::{COMMUNICATION, Timeline};
use crate::worker_group::served;
use kolo_comm::communicator::CallSpan;
use kolo_comm::element::{ElementType, Reduction};
use kolo_comm::{Communicator, Fault, combine};
use kolo_exec::store::{Role, Saved};
use kolo_exec::{Feed, Options, Program, Session, Store};
use kolo_graph::{DType, Graph, ValueId};
use kolo_parallel::servers::{Clocks, Shares, gradient_name, sum_name};
use kolo_parallel::{CommLane, Mesh, Purpose, Roles};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

/// What a server's number of updates is called among the tensors that it saves.
const UPDATES: &str = "server.updates.";
/// How often a waiting server looks up.
const LOOK_UP: Duration = Duration::from_millis(20);

/// What a server saw.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Served {
    pub pushes: u64,
    /// The furthest that a worker was ahead of the slowest when its push was applied.
    pub ahead_max: u64,
    pub ahead_sum: u64,
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
    let shares = whole_shares(job, roles)?;
    let graph = server_graph(job, roles, number)?;
    // What comes from each worker, its copy of the parameters, and the sum.
    let buffers = (2 * roles.workers + 1) * shares.servers[number].len() * size_of::<f32>();
    let program = Program::new(&job.executor, graph, Options::single(threads));
    let mut plan = kolo_plan::memory(&program);
    plan.scratch += buffers;
    let links = pairs(world, roles)?;
    let among_servers = Arc::new(world.split(1, world.rank() as i64)?);
    let usage = HostUsage::among(&plan, false, world)?;
    memory_limit::check(job, &Wanted { plan: &plan, largest: usage.largest(), rank: world.rank(), layouts: None })?;
    memory_check::check(&plan, usage)?;
    let store = Store::new(&program.graph, job.seed);
    let mut session = Session::compile(program, &store, Some(Arc::new(CommLane::new(among_servers))))?;
    if let Some(timeline) = timeline {
        trace(timeline, &mut session, &links);
    }
    let server = Server::new(job, roles, (store, session), (&shares, number), timeline.cloned());
    ServerLoop { server: Mutex::new(server), changed: Condvar::new() }.serve_all(&links)
}

/// This server's part of the whole step.
fn server_graph(job: &Job, roles: Roles, number: usize) -> Result<Graph, Error> {
    let mesh = Mesh::data(roles.servers, number).ok_or_else(|| refused(format!("there is no server {number}")))?;
    let graph = graph_of(job, &served(job, roles)?, Purpose::Server, &mesh)?;
    if !roles.synchronous() && graph.nodes.iter().any(|node| node.op.collective().is_some()) {
        return Err(refused(
            "the update needs numbers of all servers' gradients, and those of different pushes cannot be combined\n  hint: use `--servers 1` or `--staleness 0`".into(),
        ));
    }
    Ok(graph)
}

/// Shows updates, and what goes to and comes from each worker.
fn trace(timeline: &Arc<Timeline>, session: &mut Session, links: &[Communicator]) {
    timeline.trace(session);
    for (worker, link) in links.iter().enumerate() {
        let timeline = Arc::clone(timeline);
        link.record(Some(Arc::new(move |span: &CallSpan| timeline.add_call(COMMUNICATION + 1 + worker, span))));
    }
}

/// Sums over grains: those of one worker, or of all.
#[derive(Clone, Debug, Default)]
struct Sums {
    /// Of this server's parameters, with the padding between tensors.
    gradients: Vec<f32>,
    /// Of the loss and statistics, at the first server.
    others: Vec<f32>,
    /// Of the others, those that the updates need.
    needed: Vec<f32>,
}

struct Server<'j> {
    job: &'j Job,
    number: usize,
    roles: Roles,
    store: Store,
    session: Session,
    inputs: StepInputs,
    /// (input, elements with padding) of every gradient, in the order of memory.
    gradients: Vec<(String, usize)>,
    /// (input, elements) of every other sum that the updates need.
    numbers: Vec<(String, usize)>,
    /// The elements that it has of its parameters' memory.
    own: Range<usize>,
    /// Whether workers send it the other sums, and want them back.
    has_others: bool,
    clocks: Clocks,
    /// Workers whose push of the current step is here (synchronous only).
    arrived: usize,
    /// Workers that are done.
    left: usize,
    version: u64,
    /// The step of the worker that is ahead.
    furthest: u64,
    inbox: Vec<Sums>,
    total: Sums,
    served: Served,
    timeline: Option<Arc<Timeline>>,
}

/// A server's gradients in the order of memory: that of its parameters.
fn gradient_inputs(graph: &Graph) -> Vec<(String, usize)> {
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

impl<'j> Server<'j> {
    fn new(
        job: &'j Job,
        roles: Roles,
        (store, session): (Store, Session),
        (shares, number): (&Shares, usize),
        timeline: Option<Arc<Timeline>>,
    ) -> Self {
        let inputs = StepInputs::of(session.graph());
        let gradients = gradient_inputs(session.graph());
        let share = shares.servers[number].len();
        let numbers: Vec<(String, usize)> =
            shares.needed.iter().map(|(number, range)| (sum_name(*number), range.len())).collect();
        let total = Sums {
            gradients: vec![0.0; share],
            others: vec![0.0; if number == 0 { shares.others.len() } else { 0 }],
            needed: vec![0.0; numbers.iter().map(|(_, elements)| elements).sum()],
        };
        Self {
            job,
            number,
            roles,
            store,
            session,
            inputs,
            gradients,
            numbers,
            own: shares.skipped[number]..shares.skipped[number] + share,
            has_others: number == 0 && roles.synchronous(),
            clocks: Clocks::new(roles.workers, roles.staleness),
            arrived: 0,
            left: 0,
            version: 0,
            furthest: 0,
            inbox: vec![total.clone(); roles.workers],
            total,
            served: Served::default(),
            timeline,
        }
    }

    /// What this server keeps: its run of the parameters and their moments; if workers are free, how many updates it has made.
    fn save(&self) -> Vec<Saved> {
        let mut saved = self.store.save(Some(&self.own));
        if !self.roles.synchronous() {
            saved.push(Saved {
                tensor: format!("{UPDATES}{}", self.number),
                whole: [1].into(),
                dtype: DType::I64,
                role: Role::Statistic,
                start: 0,
                bytes: self.served.pushes.to_le_bytes().to_vec(),
            });
        }
        saved
    }

    /// Takes what was saved. `all` of its entries must be there; otherwise those that are not stay as they are.
    fn restore(&mut self, saved: &[Saved], all: bool) -> Result<(), Error> {
        let own = self.own.clone();
        match all {
            true => self.store.load(Some(&own), saved)?,
            false => self.store.load_present(Some(&own), saved)?,
        }
        let updates = saved.iter().filter(|saved| saved.tensor.starts_with(UPDATES));
        let count = |saved: &Saved| saved.bytes.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        self.served.pushes = updates.filter_map(count).max().unwrap_or(self.served.pushes);
        Ok(())
    }

    /// Copies its run of the parameters.
    fn copy_params(&mut self, to: &mut [f32]) {
        to.copy_from_slice(&self.store.params_mut()[self.own.clone()]);
    }

    /// A worker's push of this step is in its inbox.
    fn push(&mut self, worker: usize, step: usize) -> Result<(), Error> {
        self.clocks.push(worker);
        self.served.pushes += 1;
        if self.roles.synchronous() {
            self.arrived += 1;
            if self.arrived < self.roles.workers {
                return Ok(());
            }
            self.arrived = 0;
            let Self { inbox, total, .. } = self;
            add_up(inbox.iter().map(|sums| &sums.gradients), &mut total.gradients);
            add_up(inbox.iter().map(|sums| &sums.others), &mut total.others);
            add_up(inbox.iter().map(|sums| &sums.needed), &mut total.needed);
            self.version += 1;
            return self.update(step, step + 1);
        }
        let ahead = self.clocks.ahead(worker);
        self.served.ahead_max = self.served.ahead_max.max(ahead);
        self.served.ahead_sum += ahead;
        std::mem::swap(&mut self.total, &mut self.inbox[worker]);
        let outcome = self.update(step, self.served.pushes as usize);
        std::mem::swap(&mut self.total, &mut self.inbox[worker]);
        outcome
    }

    /// Updates the parameters with the gradients in `total`: at the rate of `step`, as the update number `number`.
    fn update(&mut self, step: usize, number: usize) -> Result<(), Error> {
        let rate = self.job.schedule.rate(self.job.optimizer.lr(), step) as f32;
        let sums = [(&self.total.gradients, &self.gradients), (&self.total.needed, &self.numbers)];
        let inputs = &self.inputs;
        let feed = |feed: &mut Feed<'_>| {
            inputs.feed_step(feed, rate, number);
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
fn add_up<'t>(terms: impl Iterator<Item = &'t Vec<f32>>, total: &mut [f32]) {
    let inputs: Vec<*const u8> = terms.map(|term| term.as_ptr().cast()).collect();
    // SAFETY: every term and the total have as many elements, and the total is no term.
    unsafe { combine::combine_tree(ElementType::F32, Reduction::Sum, &inputs, total.as_mut_ptr().cast(), total.len()) };
}

/// A server with the threads that wait for it.
struct ServerLoop<'j> {
    server: Mutex<Server<'j>>,
    changed: Condvar,
}

impl<'j> ServerLoop<'j> {
    fn lock(&self) -> MutexGuard<'_, Server<'j>> {
        kolo_base::lock(&self.server)
    }

    /// Serves every worker until it is done.
    fn serve_all(&self, links: &[Communicator]) -> Result<Served, Error> {
        std::thread::scope(|scope| {
            // All start before the first is waited for.
            let started = links.iter().enumerate().map(|(worker, link)| self.start(scope, worker, link));
            let threads: Vec<_> = started.collect();
            let panicked = |_| Err(refused("a thread of the server panicked".into()));
            let join = |thread: Result<ScopedJoinHandle<'_, Result<(), Error>>, Error>| {
                thread.and_then(|thread| thread.join().unwrap_or_else(panicked))
            };
            let outcomes: Vec<Result<(), Error>> = threads.into_iter().map(join).collect();
            outcomes.into_iter().collect::<Result<(), Error>>()
        })?;
        Ok(self.lock().served)
    }

    /// Starts the thread of one worker.
    fn start<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        worker: usize,
        link: &'s Communicator,
    ) -> Result<ScopedJoinHandle<'s, Result<(), Error>>, Error> {
        let named = std::thread::Builder::new().name(format!("worker {worker}"));
        named.spawn_scoped(scope, move || self.attend(worker, link)).map_err(|error| {
            let fault = Fault::thread(format!("starting a thread for worker {worker}"), &error);
            // The threads that did start would wait for the other workers.
            link.watch().abort(fault.clone());
            Error::from(fault)
        })
    }

    /// Serves one worker.
    fn attend(&self, worker: usize, link: &Communicator) -> Result<(), Error> {
        let mut params = vec![0.0f32; self.lock().own.len()];
        loop {
            let mut header = [0i64; 2];
            link.recv(&mut header, 0)?;
            match header[0] {
                DONE => return self.part(worker, link, &mut params),
                SAVE => {
                    let saved = self.lock().save();
                    state::send(link, 0, &saved)?;
                    continue;
                }
                RESTORE => {
                    let saved = state::receive(link, 0)?;
                    self.lock().restore(&saved, header[1] == 0)?;
                    continue;
                }
                _ => {}
            }
            let totals = self.take_push(worker, link, header[1] as usize, &mut params)?;
            link.send(&params, 0)?;
            if let Some(totals) = totals {
                link.send(&totals, 0)?;
            }
        }
    }

    /// A worker is done. It gets the parameters as they are when all are.
    fn part(&self, worker: usize, link: &Communicator, params: &mut [f32]) -> Result<(), Error> {
        let mut server = self.lock();
        server.clocks.leave(worker);
        server.left += 1;
        self.changed.notify_all();
        server = self.wait_until(server, link, |server| server.left == server.roles.workers)?;
        server.copy_params(params);
        drop(server);
        Ok(link.send(params, 0)?)
    }

    /// Receives a worker's sums and waits until it may go on. The new parameters go into `params`; what comes back is the
    /// total of the other sums, if this server has it.
    fn take_push(
        &self,
        worker: usize,
        link: &Communicator,
        step: usize,
        params: &mut [f32],
    ) -> Result<Option<Vec<f32>>, Error> {
        // The buffers belong to this thread between its worker's pushes.
        let (mut sums, has_others) = {
            let mut server = self.lock();
            (std::mem::take(&mut server.inbox[worker]), server.has_others)
        };
        link.recv(&mut sums.gradients, 0)?;
        if !sums.needed.is_empty() {
            link.recv(&mut sums.needed, 0)?;
        }
        if has_others {
            link.recv(&mut sums.others, 0)?;
        }
        let mut server = self.lock();
        server.inbox[worker] = sums;
        let before = server.version;
        server.furthest = server.furthest.max(step as u64);
        link.watch().set_step(server.furthest);
        if let Some(timeline) = &server.timeline {
            timeline.begin_step(server.furthest as usize)?;
        }
        server.push(worker, step)?;
        self.changed.notify_all();
        if server.roles.synchronous() {
            server = self.wait_until(server, link, |server| server.version > before)?;
        }
        server = self.wait_until(server, link, |server| server.clocks.may_go_on(worker))?;
        server.copy_params(params);
        Ok(has_others.then(|| server.total.others.clone()))
    }

    /// Waits for a change of the server's state; an ended job ends the wait.
    fn wait_until<'a>(
        &self,
        mut server: MutexGuard<'a, Server<'j>>,
        link: &Communicator,
        ready: impl Fn(&Server<'j>) -> bool,
    ) -> Result<MutexGuard<'a, Server<'j>>, Error> {
        while !ready(&server) {
            link.watch().check()?;
            server = kolo_base::wait_timeout(&self.changed, server, LOOK_UP);
        }
        Ok(server)
    }
}
