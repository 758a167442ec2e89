//! Copies in memory of a state that is sharded, so that the loss of a rank loses no step.
//!
//! With ZeRO a rank's update may be cut short if another rank is lost meanwhile: its parameters are then some of before and
//! some of after the step, and the lost rank's moments are gone. So that all who are left can go back to before the step,
//! each element of the state is at two ranks before any rank begins to update it:
//!
//! - Every rank sends its share of the moments, and with ZeRO-3 of the parameters, to a buddy while the next step's grains run. It
//!   is kept beside the one before, which may be needed until the new one has arrived everywhere.
//! - Before its update, when all ranks have what they were sent, each copies its own share. Where every rank has all parameters, it
//!   copies two of as many runs of them as there are ranks: those of the rank that it is the buddy of, and its own.
//!
//! So after a loss some state is whole among those who are left: the one before the step in flight, or the one before that if
//! the lost rank went before its new share had arrived.

use crate::error::Error;
use crate::parts::{Holding, Part, Run};
use crate::together;
use kolo_comm::task::packed_parts;
use kolo_comm::{CallKind, Communicator, ElementType, Fault, Request, Ticket, host};
use kolo_exec::Store;
use kolo_exec::store::{Copier, Entry};
use kolo_graph::Graph;
use kolo_graph::layout::align;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A rank's share of the state, as it lies in a copy: parameters, if they are sharded, then everything else.
#[derive(Debug, Serialize, Deserialize)]
struct Share {
    /// Bytes of the parameters' memory that are in it, and of the rest.
    bytes: [usize; 2],
    /// Each run with the bytes before it.
    runs: Vec<(Run, usize)>,
}

impl Share {
    fn of(store: &Store, shards_weights: bool) -> Self {
        let [params, states] = store.memory_bytes();
        let bytes = [if shards_weights { params } else { 0 }, states];
        let chosen = store.entries().iter().filter(|entry| shards_weights || !entry.is_param());
        let before = |entry: &Entry| entry.offset + if entry.is_param() { 0 } else { bytes[0] };
        let runs = chosen.map(|entry| (Run::of(entry), before(entry))).collect();
        Self { bytes, runs }
    }
}

#[derive(Debug)]
pub(crate) struct Copies {
    /// The calls of these copies alone, so that they wait for no other.
    world: Communicator,
    /// The rank that keeps a copy of this one's share, and the one whose share is kept here.
    buddy: usize,
    ward: usize,
    /// The ward's share, as it lies in each copy of it.
    share: Share,
    /// Bytes of all ranks' shares of the parameters, and of the rest; an optimizer may have no state.
    shared_bytes: [usize; 2],
    copies: [Vec<u8>; 2],
    /// The step that each copy is of, if it has come.
    steps: [Option<usize>; 2],
    under_way: Option<(usize, Vec<Ticket>)>,
    /// What could not be started.
    failed: Option<Error>,
    /// What this rank copies of its own memory, and the copy with its step.
    own: Copier,
    own_copy: Vec<u8>,
    own_step: Option<usize>,
}

impl Copies {
    /// Copies of shares of the state, with the parameters or without. All ranks call it together.
    pub fn new(world: &Communicator, store: &Store, shards_weights: bool) -> Result<Self, Error> {
        // Machines may have one name, and containers of one machine several.
        let machine = host::kernel().unwrap_or_else(|| world.watch().host(world.rank()));
        Self::on_machine(machine, world, store, shards_weights)
    }

    /// The same for a rank on this machine.
    fn on_machine(machine: String, world: &Communicator, store: &Store, shards_weights: bool) -> Result<Self, Error> {
        let own = world.split(0, world.rank() as i64)?;
        let text =
            serde_json::to_vec(&(machine, Share::of(store, shards_weights))).map_err(|error| Error::bug(&error))?;
        let told: Result<Vec<(String, Share)>, _> =
            together::gather_bytes(Some(world), &text)?.iter().map(|text| serde_json::from_slice(text)).collect();
        let (hosts, mut shares): (Vec<String>, Vec<Share>) =
            told.map_err(|error| Error::bug(&error))?.into_iter().unzip();
        let buddies = buddies(&hosts);
        let rank = world.rank();
        let ward = buddies.iter().position(|buddy| *buddy == rank).unwrap_or(rank);
        let shared_bytes = [0, 1].map(|memory| shares.iter().map(|share| share.bytes[memory]).sum());
        let share = shares.swap_remove(ward);
        let elements = store.params_elements();
        let runs = match shards_weights {
            true => std::iter::once(0..elements).collect(),
            false => [ward, rank].map(|rank| run_of(elements, rank, world.size())).to_vec(),
        };
        Ok(Self {
            world: own,
            buddy: buddies[rank],
            ward,
            copies: [(); 2].map(|()| vec![0; share.bytes.iter().sum()]),
            share,
            shared_bytes,
            steps: [None; 2],
            under_way: None,
            failed: None,
            own: store.copier_of_runs(&runs),
            own_copy: Vec::new(),
            own_step: None,
        })
    }

    /// Sends this rank's share of the state after `step` to its buddy, beside whatever follows. The state must not change
    /// before [`Copies::finish`]. All ranks call it.
    pub fn start(&mut self, step: usize, store: &mut Store) {
        self.steps[step % 2] = None;
        let (mut tickets, shared_bytes) = (Vec::new(), self.shared_bytes);
        for memory in (0..2).filter(|memory| shared_bytes[*memory] > 0) {
            match self.send(memory, step, store) {
                Ok(ticket) => tickets.push(ticket),
                Err(fault) => self.failed = Some(fault.into()),
            }
        }
        self.under_way = Some((step, tickets)).filter(|(_, tickets)| !tickets.is_empty());
    }

    /// Sends what the share has of one of the store's two memories.
    fn send(&mut self, memory: usize, step: usize, store: &mut Store) -> Result<Ticket, Fault> {
        let states = store.states_mut();
        let (mut input, mut input_bytes) = (states.as_ptr(), states.len());
        let (params, states) = self.copies[step % 2].split_at_mut(self.share.bytes[0]);
        let copy = if memory == 0 { params } else { states };
        if memory == 0 {
            let params = store.params_mut();
            (input, input_bytes) = (params.as_ptr().cast(), size_of_val(params));
        }
        let ranks = self.world.size();
        let (mut send, mut recv) = (vec![0; ranks], vec![0; ranks]);
        (send[self.buddy], recv[self.ward]) = (input_bytes, copy.len());
        let request = Request {
            input,
            input_bytes,
            output: copy.as_mut_ptr(),
            output_bytes: copy.len(),
            send: packed_parts(&send).into(),
            recv: packed_parts(&recv).into(),
            ..Request::new(CallKind::AllToAll, ElementType::U8).named("copies")
        };
        // SAFETY: the store's memory and the copy are valid until `finish`, which `Drop` calls at the latest; the caller
        // promises that nobody writes the state before, and nobody else touches the copy.
        unsafe { self.world.start(request) }
    }

    /// Waits for what is under way.
    pub fn finish(&mut self) -> Result<(), Error> {
        if let Some((step, tickets)) = self.under_way.take() {
            // Of one that failed, too, the others are waited for: nobody touches the memory any more then.
            let outcomes: Vec<Result<(), Fault>> = tickets.into_iter().map(|ticket| self.world.wait(ticket)).collect();
            outcomes.into_iter().collect::<Result<(), Fault>>()?;
            if self.failed.is_none() {
                self.steps[step % 2] = Some(step);
            }
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Makes sure that every rank has its copies of the state after `step`, which is the one that this rank has. Then it may
    /// be updated. All ranks call it together.
    pub fn secure(&mut self, step: usize) -> Result<(), Error> {
        self.await_all()?;
        // Half of it is of another step while it is copied.
        self.own_step = None;
        // SAFETY: the caller updates the state after this.
        unsafe { self.own.copy(&mut self.own_copy) };
        self.own_step = Some(step);
        Ok(())
    }

    /// Waits until every rank has what it was sent. All ranks call it together.
    pub fn await_all(&mut self) -> Result<(), Error> {
        self.finish()?;
        Ok(self.world.barrier()?)
    }

    #[cfg(test)]
    pub fn kept_bytes(&self) -> usize {
        self.copies.iter().map(Vec::len).sum::<usize>() + self.own.bytes()
    }

    /// What is held here beside the state of this rank itself.
    pub fn held(&mut self) -> Vec<Holding> {
        // Whether it has come or not, nothing is under way any more.
        let _ = self.finish();
        let mut held = Vec::new();
        for (step, copy) in self.steps.iter().zip(&self.copies) {
            let Some(step) = *step else { continue };
            let part = |(run, offset): &(Run, usize)| {
                let bytes = copy[*offset..*offset + run.elements * run.size].to_vec();
                Part { run: run.clone(), bytes }
            };
            held.push(Holding { step, parts: self.share.runs.iter().map(part).collect() });
        }
        if let Some(step) = self.own_step {
            let parts = self.own.split(&self.own_copy);
            let parts = parts.map(|(entry, bytes)| Part { run: Run::of(entry), bytes: bytes.to_vec() });
            held.push(Holding { step, parts: parts.collect() });
        }
        held
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        let _ = self.finish();
    }
}

/// Bytes of the copies that a rank of so many keeps: two of its ward's share, which is as large as its own, and one of its own;
/// where every rank has all parameters, two runs of them.
pub(crate) fn bytes(graph: &Graph, ranks: usize, shards_weights: bool) -> usize {
    let states: usize = graph.states().map(|(id, _)| align(graph.ty(id).bytes())).sum();
    let params = Store::params_bytes(graph);
    3 * states + if shards_weights { 3 * params } else { 2 * params / ranks.max(1) }
}

/// The run of the parameters' memory of which this rank, and its buddy, keep a copy.
fn run_of(elements: usize, rank: usize, ranks: usize) -> Range<usize> {
    elements * rank / ranks..elements * (rank + 1) / ranks
}

/// The rank that keeps the copies of each: on another host, if no host has more than half of the ranks, as a host may go as a
/// whole.
fn buddies(hosts: &[String]) -> Vec<usize> {
    let ranks = hosts.len();
    let mut order: Vec<usize> = (0..ranks).collect();
    order.sort_by_key(|rank| (&hosts[*rank], *rank));
    let largest = hosts.iter().map(|host| hosts.iter().filter(|other| *other == host).count()).max().unwrap_or(1);
    let shift = if 2 * largest <= ranks { largest } else { 1 };
    let mut buddies = vec![0; ranks];
    for (at, rank) in order.iter().enumerate() {
        buddies[*rank] = order[(at + shift) % ranks];
    }
    buddies
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;
    use crate::parts::{self, Choice, Offer};
    use crate::worker_group::WorkerGroup;
    use crate::{Trainer, job_file};
    use kolo_comm::{Watch, thread};
    use kolo_models::MODELS;
    use std::sync::{Arc, Mutex};

    /// Tensors so large that shares end inside of them.
    fn wide(optimizer: &str, stage: usize) -> Arc<Job> {
        let text = format!(
            "[model]\nkind = \"mlp\"\ninputs = 64\nhidden = [300, 200]\nclasses = 10\n[data]\n\
             source = \"synthetic:features\"\nbatch = 32\ngrains = 8\nsamples = 256\n[train]\nsteps = 5\nclip = 0.5\n\
             optimizer = {{ kind = \"{optimizer}\" }}\n[parallel]\nzero = {stage}\n"
        );
        Arc::new(Job::read(&job_file::parse(&text, "test.toml").unwrap(), MODELS).unwrap())
    }

    fn on_ranks<T: Send>(ranks: usize, body: impl Fn(Arc<Communicator>) -> T + Sync) -> Vec<T> {
        let watches: Vec<Arc<Watch>> = (0..ranks).map(|_| Watch::alone()).collect();
        let transports = thread::world(&watches);
        std::thread::scope(|scope| {
            let body = &body;
            let spawn = |(transport, watch): (_, &Arc<Watch>)| {
                let world = Arc::new(Communicator::new(transport, Arc::clone(watch), true));
                scope.spawn(move || body(world))
            };
            let threads: Vec<_> = transports.into_iter().zip(&watches).map(spawn).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn trainer(job: &Arc<Job>, world: &Arc<Communicator>) -> Trainer {
        let group = WorkerGroup::Workers(Arc::clone(world));
        let mut trainer = Trainer::of_elastic(Arc::clone(job), &group, group.options(job, 1).unwrap()).unwrap();
        trainer.secure_copies().unwrap();
        trainer
    }

    fn steps(trainer: &mut Trainer, count: usize) {
        for _ in 0..count {
            trainer.step().unwrap();
        }
    }

    /// Two machines may have one name, as their names are the images' that they were made from.
    #[test]
    fn copies_go_to_another_machine() {
        let job = wide("adamw", 1);
        let buddies = on_ranks(4, |world| {
            let trainer = trainer(&job, &world);
            let machine = if world.rank() < 2 { "one" } else { "another" };
            Copies::on_machine(machine.into(), &world, trainer.store(), false).unwrap().buddy
        });
        assert!(buddies.iter().enumerate().all(|(rank, buddy)| (rank < 2) != (*buddy < 2)), "{buddies:?}");
    }

    /// Every rank is in the middle of its update when rank 2 is lost; two are left of the others, or one joins.
    #[test]
    fn what_an_update_tore_is_put_together_without_the_lost_rank() {
        let cases =
            [("adamw", 1), ("lamb", 1), ("sgd", 1), ("lamb", 2), ("sgd", 2), ("adamw", 3), ("lamb", 3), ("sgd", 3)];
        for (optimizer, stage) in cases {
            let job = wide(optimizer, stage);
            let alone = on_ranks(1, |world| {
                let mut trainer = trainer(&job, &world);
                steps(&mut trainer, 5);
                trainer.digest().unwrap()
            });
            let held: Vec<Vec<Holding>> = on_ranks(4, |world| {
                let mut trainer = trainer(&job, &world);
                steps(&mut trainer, 3);
                let (kept, planned) = (trainer.copied_bytes(), trainer.memory().copies);
                // Shares of two ranks differ by up to a run of 4096 elements: of parameters and two moments, three times each.
                assert!(kept.abs_diff(planned) <= 9 * 4096 * 4, "stage {stage}: {kept} bytes, planned {planned}");
                trainer.tear();
                trainer.held()
            });
            for ranks in [2, 4] {
                // Of two, the first has what the third held: a spare hands it over.
                let held: Vec<Mutex<Vec<Holding>>> = match ranks {
                    2 => vec![[&held[0][..], &held[3]].concat(), held[1].clone()],
                    _ => vec![held[0].clone(), held[1].clone(), held[3].clone(), Vec::new()],
                }
                .into_iter()
                .map(Mutex::new)
                .collect();
                let digests = on_ranks(ranks, |world| {
                    let mut trainer = trainer(&job, &world);
                    let held = kolo_base::lock(&held[world.rank()]).clone();
                    let wanted = trainer.store().entries().iter().map(Run::of).collect();
                    let offers = parts::gather(&world, &Offer::new(&held, wanted)).unwrap();
                    assert_eq!(parts::choose(&offers), Choice::After(3));
                    let mine = held.iter().filter(|one| one.step == 3).flat_map(|one| &one.parts);
                    let mine: Vec<&Part> = mine.collect();
                    let store = trainer.store_mut();
                    mine.iter().for_each(|part| store.write_run(&part.run.tensor, part.run.start, &part.bytes));
                    parts::perform(&world, &parts::plan(&offers, 3), &mine, |run, bytes| {
                        store.write_run(&run.tensor, run.start, bytes);
                    })
                    .unwrap();
                    trainer.go_on_before(3);
                    trainer.secure_copies().unwrap();
                    steps(&mut trainer, 2);
                    trainer.digest().unwrap()
                });
                assert!(digests.iter().all(|digest| *digest == alone[0]), "{optimizer}, stage {stage}, {ranks} ranks");
            }
        }
    }

    #[test]
    fn buddies_are_on_other_hosts_where_they_can_be() {
        let of = |hosts: &[&str]| buddies(&hosts.iter().map(|host| host.to_string()).collect::<Vec<_>>());
        assert_eq!(of(&["a", "a", "a", "a"]), [1, 2, 3, 0]);
        assert_eq!(of(&["a", "a", "b", "b"]), [2, 3, 0, 1]);
        assert_eq!(of(&["a", "b", "a", "b"]), [1, 0, 3, 2]);
        assert_eq!(of(&["a", "b"]), [1, 0]);
        for hosts in [&["a", "a", "b", "b", "b", "c"][..], &["c", "a", "b", "b", "a", "c", "d", "c"]] {
            let found = of(hosts);
            assert!(found.iter().enumerate().all(|(rank, buddy)| hosts[rank] != hosts[*buddy]), "{found:?}");
            let all: std::collections::BTreeSet<usize> = found.iter().copied().collect();
            assert_eq!(all.len(), hosts.len(), "everybody has one ward");
        }
        // Most are on one host: every copy is at least at another rank.
        assert!(of(&["a", "a", "a", "b"]).iter().enumerate().all(|(rank, buddy)| rank != *buddy));
    }

    #[test]
    fn runs_of_all_ranks_are_all_parameters() {
        for (elements, ranks) in [(10, 4), (3, 8), (0, 2), (64, 1)] {
            let runs: Vec<Range<usize>> = (0..ranks).map(|rank| run_of(elements, rank, ranks)).collect();
            assert_eq!((runs[0].start, runs[ranks - 1].end), (0, elements));
            assert!(runs.windows(2).all(|pair| pair[0].end == pair[1].start));
        }
    }
}
