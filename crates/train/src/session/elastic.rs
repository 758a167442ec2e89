//! Runs whose workers come and go: what a worker carries from one generation to the next, and how a generation finds the
//! state that it goes on from.
//!
//! A fault leaves every rank's state before or after the step in flight, never in between ([`Trainer::of_elastic`]); where each
//! rank has a share of the state and its update exchanges something, copies are left of it (`copies`). The next generation
//! goes on from the newest state that its ranks can put together; whoever lacks some of it gets it from another's memory. At
//! most the step in flight and the one before are computed again, and to the same bits, since a step depends on its number
//! alone.

mod progress;

use super::Run;
use crate::checkpoint::{self, CheckpointDir, Handover, Saver};
use crate::error::Error;
use crate::parts::{self, Choice, Holding, Offer, Part};
use crate::quantiles::Quantiles;
use crate::report::GenerationRow;
use crate::together;
use crate::trainer::Trainer;
use kolo_base::ShownPath;
use kolo_base::lock;
use kolo_comm::{Communicator, Fault};
pub(super) use progress::{Mark, Progress};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Called by the first rank of a generation when all have the state to go on with this step.
pub type OnResume = Box<dyn Fn(usize) + Send + Sync>;

/// A worker of an elastic run, over all generations it is part of.
pub struct Elastic {
    carried: Mutex<Option<Carried>>,
    generation: Mutex<GenerationStart>,
    on_resume: Mutex<OnResume>,
}

/// A generation as its worker learns of it.
#[derive(Clone, Debug)]
pub struct GenerationStart {
    pub generation: u32,
    /// Who was lost since the last one that went on, and why.
    pub lost: Vec<String>,
    /// The last one that went on.
    pub resumed: u32,
    /// No worker that is left has the state of the job.
    pub state_lost: bool,
    /// When this worker left the generation before.
    pub since: Instant,
    pub agreement_ms: u64,
}

impl Default for GenerationStart {
    fn default() -> Self {
        let lost = Vec::new();
        Self { generation: 0, lost, resumed: 0, state_lost: false, since: Instant::now(), agreement_ms: 0 }
    }
}

/// What a worker keeps when a generation is over.
#[derive(Debug)]
struct Carried {
    /// Where the run stood after each step of which anything is held, the newest first.
    progress: Vec<Progress>,
    held: Vec<Holding>,
    /// Others have taken over what it held: the job can do without it.
    relieved: bool,
    times: Quantiles,
    data_waits: Quantiles,
    begin: Instant,
    /// What the run took before this process began, and the step at which that was.
    before: (f64, usize),
    /// What is left of the saves.
    saves: Option<Handover>,
}

impl std::fmt::Debug for Elastic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Elastic in {:?}", lock(&self.generation))
    }
}

impl Elastic {
    pub fn new(on_resume: OnResume) -> Arc<Self> {
        Arc::new(Self { carried: Mutex::default(), generation: Mutex::default(), on_resume: Mutex::new(on_resume) })
    }

    /// How far the state of this worker has come, if it has any that is needed.
    pub fn position(&self) -> Option<u64> {
        let carried = lock(&self.carried);
        carried.as_ref().filter(|carried| !carried.relieved)?.progress.first().map(Progress::position)
    }

    /// The next generation.
    pub fn enter(&self, start: GenerationStart) {
        *lock(&self.generation) = start;
    }

    pub(super) fn generation(&self) -> u32 {
        lock(&self.generation).generation
    }

    /// The generation is over although this worker has finished: its state may be needed again.
    pub fn keep_finished(&self, trainer: &mut Trainer) {
        if let Some(carried) = &mut *lock(&self.carried) {
            carried.held = trainer.held();
        }
    }

    /// What is left of a run whose generation is over.
    pub(super) fn keep(&self, mut run: Run<'_>, finished: bool) -> Trainer {
        let held = if finished { Vec::new() } else { run.trainer.held() };
        let progress = run.all_progress();
        let Run { times, begin, seconds, first_step, ties, trainer, saver, .. } = run;
        let (data_waits, saves) = (ties.data_waits, saver.map(Saver::hand_over));
        let (relieved, before) = (false, (seconds, first_step));
        *lock(&self.carried) = Some(Carried { progress, held, relieved, times, data_waits, begin, before, saves });
        trainer
    }

    /// Brings all ranks of a generation to the newest state that they can put together. All call it together; what this worker
    /// carried stays until all have it.
    pub(super) fn synchronise(&self, run: &mut Run<'_>) -> Result<(), Error> {
        let Some(world) = run.ties.world.clone() else { return Ok(()) };
        let GenerationStart { state_lost, lost, .. } = lock(&self.generation).clone();
        let mut carried = lock(&self.carried);
        // A spare that others have left behind may hold something yet; the checkpoint is newer, or as old at most.
        let held = carried.as_ref().filter(|_| !state_lost).map_or(&[][..], |carried| &carried.held);
        let wanted = run.trainer.store().entries().iter().map(parts::Run::of).collect();
        let offers = parts::gather(&world, &Offer::new(held, wanted))?;
        match parts::choose(&offers) {
            Choice::Nothing if !state_lost => {}
            Choice::Nothing => {
                run.go_back_to_checkpoint(lost_all(&lost))?;
                run.generations = gather_generations(&world, carried.as_ref())?;
            }
            Choice::Missing { step, tensor, element } => {
                let lost = lost_together(step, &tensor, element);
                run.observer.note(&format!("note: {}", lost.to_string().lines().next().unwrap_or_default()));
                run.go_back_to_checkpoint(lost)?;
                run.generations = gather_generations(&world, carried.as_ref())?;
            }
            Choice::After(step) => {
                let mine: Vec<&Part> = of_step(held, step).collect();
                let store = run.trainer.store_mut();
                mine.iter().for_each(|part| store.write_run(&part.run.tensor, part.run.start, &part.bytes));
                let moves = parts::plan(&offers, step);
                parts::perform(&world, &moves, &mine, |run, bytes| store.write_run(&run.tensor, run.start, bytes))?;
                let known = carried.iter().flat_map(|carried| &carried.progress);
                let progress = hand_on(&world, known.into_iter().find(|progress| progress.is_after(step)))?;
                run.trainer.go_on_before(step);
                run.take_up(progress);
                run.generations = gather_generations(&world, carried.as_ref())?;
            }
        }
        // Nobody forgets what it has before all have it, and copies of it.
        run.trainer.secure_copies()?;
        if let Err(fault) = world.barrier() {
            // Others may have passed it, and have forgotten what they had.
            keep_beside(&mut carried, run);
            return Err(fault.into());
        }
        if let Some(Carried { times, data_waits, begin, before, saves, .. }) = carried.take() {
            (run.times, run.ties.data_waits, run.begin) = (times, data_waits, begin);
            (run.seconds, run.first_step) = before;
            run.saver.as_mut().zip(saves).into_iter().for_each(|(saver, saves)| saver.take_over(saves));
        }
        Ok(())
    }

    /// The first `keepers` ranks of this group, who will go on, take over what the others hold. All call it together.
    pub fn hand_over(&self, world: &Communicator, keepers: usize) -> Result<(), Error> {
        let mut carried = lock(&self.carried);
        let held = carried.as_ref().map_or(&[][..], |carried| &carried.held);
        let mut offers = parts::gather(world, &Offer::new(held, Vec::new()))?;
        let all = parts::whole_tensors(&offers);
        offers.iter_mut().for_each(|offer| offer.wanted.clone_from(&all));
        match parts::choose(&offers) {
            // What is missing, those who go on will find out as well.
            Choice::Nothing | Choice::Missing { .. } => {}
            Choice::After(step) => {
                parts::share_out(&mut offers, step, keepers);
                let mine: Vec<&Part> = of_step(held, step).collect();
                let mut taken = Vec::new();
                parts::perform(world, &parts::plan(&offers, step), &mine, |run, bytes| {
                    taken.push(Part { run, bytes: bytes.to_vec() });
                })?;
                if let Some(carried) = carried.as_mut().filter(|_| !taken.is_empty()) {
                    carried.held.push(Holding { step, parts: taken });
                }
            }
        }
        world.barrier()?;
        // All keepers have what they need. The others hold what they had a while longer: somebody may be lost yet.
        if let Some(carried) = carried.as_mut().filter(|_| world.rank() >= keepers) {
            carried.relieved = true;
        }
        // And all know it before anybody says so.
        Ok(world.barrier()?)
    }

    /// Whether a rank of this generation brings a state, or there was one, which is lost. All call it together.
    pub(super) fn any_state(&self, world: Option<&Communicator>) -> Result<bool, Error> {
        let lost = lock(&self.generation).state_lost;
        together::any(world, lost || lock(&self.carried).is_some())
    }

    /// All have the state: the generation goes on. All call it together.
    pub(super) fn announce(&self, run: &mut Run<'_>) -> Result<(), Error> {
        let Some(world) = run.ties.world.clone() else { return Ok(()) };
        let GenerationStart { generation, lost, resumed, since, agreement_ms, .. } = lock(&self.generation).clone();
        // What those between were told is told again: as far as anybody knows, they did not go on.
        let untold = |row: &&mut GenerationRow| row.generation > resumed;
        run.generations.iter_mut().filter(untold).for_each(|row| row.lost.clear());
        let step = run.trainer.next_step();
        let recovery_ms = if generation > 0 { since.elapsed().as_millis() as u64 } else { 0 };
        let workers = world.size();
        let mut row = GenerationRow { generation, step, workers, lost, recovery_ms, agreement_ms };
        // As the first rank saw it.
        let mut times = [row.recovery_ms, row.agreement_ms].map(|ms| ms as i64);
        world.broadcast(&mut times, 0)?;
        [row.recovery_ms, row.agreement_ms] = times.map(|ms| ms as u64);
        run.generations.push(row);
        if world.rank() == 0 {
            if !run.begins_record {
                run.reopen_record()?;
            }
            lock(&self.on_resume)(step);
        }
        Ok(())
    }
}

/// Keeps the state of a generation that is over before it began beside what is carried, if that is still needed.
fn keep_beside(carried: &mut Option<Carried>, run: &mut Run<'_>) {
    let held = run.trainer.held();
    match carried.as_mut().filter(|carried| !carried.relieved) {
        Some(carried) => carried.held.extend(held),
        None => {
            let (times, begin, before) = (run.times.clone(), run.begin, (run.seconds, run.first_step));
            let (progress, data_waits) = (run.all_progress(), run.ties.data_waits.clone());
            let saves = carried.take().and_then(|carried| carried.saves);
            *carried = Some(Carried { progress, held, relieved: false, times, data_waits, begin, before, saves });
        }
    }
}

/// The parts that are of this step.
fn of_step(held: &[Holding], step: usize) -> impl Iterator<Item = &Part> {
    held.iter().filter(move |holding| holding.step == step).flat_map(|holding| &holding.parts)
}

/// Nobody is left who had the state, and nothing was saved.
fn lost_all(lost: &[String]) -> Error {
    let lines: String = lost.iter().map(|line| format!("\n  {line}")).collect();
    Error::Checkpoint {
        message: format!(
            "every worker that had the state of the job was lost, and there is no checkpoint to go back to{lines}"
        ),
        hint: "start the job again, with --resume if a checkpoint turns up; `checkpoint.every` sets how often one is saved"
            .into(),
    }
}

/// Too many were lost at a time.
fn lost_together(step: usize, tensor: &str, element: usize) -> Error {
    Error::Checkpoint {
        message: format!(
            "the state after step {step} is lost: no remaining worker has `{tensor}` from element {element} on, \
             because a worker was lost together with the one that kept its copy"
        ),
        hint: "continue from the newest checkpoint with --resume; `checkpoint.every` sets how often one is saved"
            .into(),
    }
}

/// Where the run stands, from a rank that knows it, to all. Of two who differ in what they have done since the step, the one
/// counts that has done less: it is done again, by all.
fn hand_on(world: &Communicator, own: Option<&Progress>) -> Result<Progress, Error> {
    let mine = own.map_or(i64::MAX, |progress| progress.position() as i64);
    let mut all = vec![0i64; world.size()];
    world.all_gather(&[mine], &mut all)?;
    let source = (0..all.len()).min_by_key(|rank| all[*rank]).unwrap_or(0);
    let failed = |error: serde_json::Error| Error::Together(Fault::BadCall(format!("the state of the run: {error}")));
    let mut bytes = match own {
        Some(progress) if world.rank() == source => serde_json::to_vec(progress).map_err(failed)?,
        _ => Vec::new(),
    };
    let mut length = [bytes.len() as i64];
    world.broadcast(&mut length, source)?;
    bytes.resize(length[0] as usize, 0);
    world.broadcast(&mut bytes, source)?;
    serde_json::from_slice(&bytes).map_err(failed)
}

/// The generations so far: a spare was not part of all.
fn gather_generations(world: &Communicator, carried: Option<&Carried>) -> Result<Vec<GenerationRow>, Error> {
    let own = carried.and_then(|carried| carried.progress.first()).map(|progress| &progress.generations[..]);
    let text = serde_json::to_vec(own.unwrap_or_default()).map_err(|error| Error::bug(&error))?;
    let mut all = BTreeMap::new();
    for text in together::gather_bytes(Some(world), &text)? {
        let known: Vec<GenerationRow> = serde_json::from_slice(&text).map_err(|error| Error::bug(&error))?;
        for row in known {
            all.entry(row.generation).or_insert(row);
        }
    }
    Ok(all.into_values().collect())
}

impl Run<'_> {
    /// Takes the newest checkpoint for the state that is lost; without one, it is this error. All ranks call it together.
    fn go_back_to_checkpoint(&mut self, lost: Error) -> Result<(), Error> {
        let Self { job, options, ties, trainer, .. } = self;
        let Some(dir) = CheckpointDir::of_first(options.checkpoints.as_ref(), ties.workers())? else {
            return Err(lost);
        };
        let Some(resumed) = checkpoint::newest(job, &dir, ties.workers())? else { return Err(lost) };
        resumed.fill(trainer.store_mut())?;
        trainer.go_on_before(resumed.record.step);
        if let Some(saver) = self.saver.as_mut().filter(|_| !resumed.record.pending) {
            saver.has(resumed.record.step);
        }
        resumed.notes.iter().for_each(|note| self.observer.note(note));
        let path = resumed.checkpoint.dir().shown();
        self.observer.note(&format!("resuming after step {} from {path}", resumed.record.step));
        self.restore(resumed.record);
        Ok(())
    }

    /// Whether this rank knows of somebody who waits to be taken in.
    pub(super) fn asked_to_yield(&self) -> bool {
        let world = self.ties.world.as_ref().filter(|_| self.options.elastic.is_some());
        world.is_some_and(|world| world.watch().asked_to_yield())
    }

    /// The step that all agreed to regroup after is done.
    pub(super) fn yielded(&self) -> Error {
        let generation = self.options.elastic.as_ref().map_or(0, |elastic| elastic.generation());
        Error::Together(Fault::Regroup { generation })
    }
}
