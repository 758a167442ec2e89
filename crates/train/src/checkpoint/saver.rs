//! Saving while training goes on.

use super::restore::{DATA, DataRecord};
use super::{CheckpointDir, SavingRule, TrainerRecord, share};
use crate::error::Error;
use crate::job::Job;
use crate::model_record::model_record;
use crate::record::OutDir;
use crate::run_dir::RunDir;
use crate::trainer::Trainer;
use crate::{machine, together};
use kolo_base::ShownPath;
use kolo_base::{lock, wait};
use kolo_ckpt::{CkptError, Header, Keep, Piece, RealDisk, SharedDisk, Summary, Unfinished};
use kolo_comm::Communicator;
use kolo_exec::Store;
use kolo_exec::store::{Copier, Entry, Saved};
use kolo_graph::Region;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Opens when the copy of a state is made.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn open(&self) {
        *lock(&self.open) = true;
        self.opened.notify_all();
    }

    /// Waits until the copy is made: from then on the store may change.
    pub fn pass(&self) {
        let mut open = lock(&self.open);
        while !*open {
            open = wait(&self.opened, open);
        }
    }
}

/// What came of the checkpoints of a run since it was last asked.
#[derive(Debug, Default)]
pub(crate) struct Ending {
    pub saved: Vec<PathBuf>,
    /// What went wrong; earlier checkpoints are as they were.
    pub failed: Vec<String>,
    /// What was not cleaned up.
    pub left: Vec<String>,
}

/// Copies a rank's share and writes it; returns the memory of the copy.
type WriteThread = JoinHandle<(Vec<u8>, Result<Summary, CkptError>)>;

/// A manifest on its way: makes the checkpoint of this step visible.
#[derive(Debug)]
struct Committing {
    step: usize,
    thread: JoinHandle<Result<Published, CkptError>>,
}

impl Committing {
    fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }
}

/// A checkpoint that is visible.
#[derive(Debug)]
struct Published {
    path: PathBuf,
    /// What was not cleaned up after it, and why.
    left: Option<CkptError>,
}

/// A new worker waits so long for a save that is under way, and no longer: a disk may hang.
const HOLDS_UP_MAX: Duration = Duration::from_secs(60);

/// A rank's share of a checkpoint on its way to the disk.
#[derive(Debug)]
struct Writing {
    staging: PathBuf,
    header: Header,
    /// An error if there was no thread to be had: the other ranks have theirs, and hear of it when all meet.
    thread: std::io::Result<WriteThread>,
}

/// What a saver leaves to the one of the next generation.
#[derive(Debug)]
pub(crate) struct Handover {
    /// When the last save began.
    began: Instant,
    /// Nobody waits for its result any more.
    writing: Option<WriteThread>,
    committing: Option<Committing>,
}

/// Saves the state of a run, together with all ranks that hold a part of it.
#[derive(Debug)]
pub(crate) struct Saver {
    dir: CheckpointDir,
    rule: SavingRule,
    disk: SharedDisk,
    /// Tells what this run leaves unfinished from what another did.
    attempt: u64,
    world: Option<Arc<Communicator>>,
    /// Earlier generations may have saved what this one is about to save.
    goes_on: bool,
    settings: Vec<(String, String)>,
    /// What it says of its model, for whoever uses it elsewhere.
    model: serde_json::Value,
    /// Which data it is trained on.
    data: Option<DataRecord>,
    /// The entries of the store that this rank writes.
    own: Vec<usize>,
    /// The memory of a copy, used again.
    buffer: Vec<u8>,
    writing: Option<Writing>,
    /// At the first rank: the manifest on its way.
    committing: Option<Committing>,
    /// The share of a save that ended with an earlier generation.
    abandoned: Option<WriteThread>,
    /// The last save is not known to be visible. All ranks answer alike.
    unpublished: bool,
    began: Instant,
    /// Some rank has no memory for a copy: training waits while a state is written.
    pauses: bool,
    /// The step of the last state that was saved, or is being saved.
    saved_step: Option<usize>,
    /// At the first rank: the step of the last checkpoint that it knows to be visible.
    visible: Option<usize>,
    /// At the first rank: the run's directory, into which it writes.
    out: Option<OutDir>,
    outcome: Ending,
}

impl Saver {
    /// All ranks that hold a part of the state call it together, and say whether the run `goes_on` from an earlier generation.
    pub fn new(
        job: &Job,
        dir: &CheckpointDir,
        world: Option<&Arc<Communicator>>,
        trainer: &Trainer,
        goes_on: bool,
    ) -> Result<Self, Error> {
        let (world, entries) = (world.cloned(), trainer.store().entries());
        let (sees, attempt) = prepare(dir, world.as_deref(), goes_on)?;
        Ok(Self {
            dir: dir.clone(),
            goes_on,
            rule: job.saving.clone(),
            disk: RealDisk::shared(),
            attempt,
            own: share::own(world.as_deref(), entries, sees)?,
            settings: job.settings.clone(),
            model: model_record(job, &dir.job_text),
            data: job.data_record(),
            buffer: Vec::new(),
            writing: None,
            committing: None,
            abandoned: None,
            unpublished: false,
            began: Instant::now(),
            pauses: together::any(world.as_deref(), !trainer.has_room_for_copy())?,
            saved_step: None,
            visible: None,
            out: None,
            outcome: Ending::default(),
            world,
        })
    }

    /// The checkpoints are in this directory, which has begun to be the run's: from here on nothing becomes visible there, and
    /// nothing is removed, unless it still is. What is missing is not made again.
    pub fn write_into(&mut self, out: &OutDir) {
        if self.is_first() {
            // Why it cannot be made, the first save says.
            let _ = std::fs::create_dir_all(&self.dir.root);
        }
        self.out = Some(out.clone());
    }

    /// The saver of a run: of all workers, or with parameter servers of the first, which has what the servers hold.
    pub fn of_run(
        job: &Job,
        dir: &CheckpointDir,
        links: Option<&crate::asynchronous::Links>,
        world: Option<&Arc<Communicator>>,
        trainer: &Trainer,
        goes_on: bool,
    ) -> Result<Option<Self>, Error> {
        match links {
            Some(links) if links.workers().rank() > 0 => Ok(None),
            Some(_) => Self::new(job, dir, None, trainer, goes_on).map(Some),
            None => Self::new(job, dir, world, trainer, goes_on).map(Some),
        }
    }

    fn is_first(&self) -> bool {
        self.world.as_ref().is_none_or(|world| world.rank() == 0)
    }

    /// Whether this rank wants a save after the step that was just made, which may have ended an epoch that took so long. Steps
    /// and epochs all ranks count alike; of the clock the first rank's counts.
    pub fn is_due(&self, job: &Job, step: usize, ended_epoch: Option<Duration>) -> bool {
        let by_clock = self.is_first() && self.rule.is_due_by_clock(self.began.elapsed(), ended_epoch);
        by_clock || self.rule.is_due_after(step, job.steps_per_epoch)
    }

    /// Whether training waits while a state is written. All ranks answer alike.
    pub fn pauses(&self) -> bool {
        self.pauses
    }

    /// Whether this rank still writes an earlier state, or makes it visible.
    pub fn is_writing(&self) -> bool {
        let writing = self.writing.as_ref().and_then(|writing| writing.thread.as_ref().ok());
        let share = writing.is_some_and(|thread| !thread.is_finished());
        let abandoned = self.abandoned.as_ref().is_some_and(|thread| !thread.is_finished());
        share || abandoned || self.committing.as_ref().is_some_and(|committing| !committing.is_finished())
    }

    /// Whether it writes, and has not done so for long: others may wait for its end.
    pub fn holds_up(&self) -> bool {
        self.is_writing() && self.began.elapsed() < HOLDS_UP_MAX
    }

    /// No rank is writing any more: what all have committed is visible, or has failed. All ranks call it together.
    pub fn nobody_writes(&mut self) {
        self.unpublished &= self.writing.is_some();
    }

    /// Whether a save was begun and is not known to be visible. All ranks answer alike.
    pub fn is_unpublished(&self) -> bool {
        self.unpublished
    }

    pub fn saved_step(&self) -> Option<usize> {
        self.saved_step
    }

    /// The generation is over. A manifest that is on its way still becomes visible; what this rank was writing is lost.
    pub fn hand_over(self) -> Handover {
        let Self { began, writing, committing, abandoned, .. } = self;
        let writing = writing.and_then(|writing| writing.thread.ok()).or(abandoned);
        Handover { began, writing, committing }
    }

    /// Goes on for the saver of the generation before, of the same run in the same process.
    pub fn take_over(&mut self, before: Handover) {
        let Handover { began, writing, committing } = before;
        (self.began, self.abandoned, self.committing) = (began, writing, committing);
    }

    /// There is a checkpoint of the state after this step.
    pub fn has(&mut self, step: usize) {
        (self.saved_step, self.visible) = (Some(step), Some(step));
    }

    /// A generation before has saved the state after this step, as far as it could.
    pub fn was_saved(&mut self, step: usize) {
        self.saved_step = Some(step);
    }

    /// Copies this rank's share while the next step computes, and writes it. The store must not change before the gate opens.
    /// With parameter servers, `elsewhere` is what they hold.
    pub fn begin(&mut self, store: &Store, elsewhere: Vec<Saved>, record: &TrainerRecord, threads: usize) -> Arc<Gate> {
        let gate = Arc::new(Gate::default());
        (self.began, self.unpublished) = (Instant::now(), true);
        self.saved_step = Some(record.step);
        let (staging, header) = (self.staging(record.step), self.header(record, None));
        let copier = store.copier(&self.chosen(store, &elsewhere));
        let shard = self.shard(staging.clone(), !elsewhere.is_empty());
        let (opener, buffer) = (Arc::clone(&gate), std::mem::take(&mut self.buffer));
        let work = move || shard.copy_and_write((&copier, threads), &opener, buffer, &elsewhere);
        let thread = std::thread::Builder::new().name("kolo-checkpoint".into()).spawn(work);
        if thread.is_err() {
            gate.open();
        }
        self.writing = Some(Writing { staging, header, thread });
        gate
    }

    /// All ranks have written their shares: the first one makes the checkpoint visible, beside the training. All ranks call it
    /// together.
    pub fn commit(&mut self) -> Result<(), Error> {
        if let Some(thread) = self.abandoned.take() {
            self.buffer = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).0;
        }
        let Some(Writing { staging, header, thread }) = self.writing.take() else { return Ok(()) };
        let written = match thread {
            Ok(thread) => {
                let (buffer, written) = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                self.buffer = buffer;
                written
            }
            Err(source) => {
                let (path, action) = (staging.clone(), "start a thread to write it");
                Err(CkptError::Io { path, action, bytes: None, source })
            }
        };
        let Some(shards) = self.gather(&staging, written)? else { return Ok(()) };
        self.settle_commit();
        let step = header.step as usize;
        let of_earlier = Unfinished::Before { step: header.step, attempt: self.attempt };
        let publication = self.publication(staging, header, shards, of_earlier);
        let work = move || publication.publish();
        match std::thread::Builder::new().name("kolo-manifest".into()).spawn(work) {
            Ok(thread) => self.committing = Some(Committing { step, thread }),
            Err(error) => self.outcome.failed.push(format!("a checkpoint is not saved: {error}")),
        }
        Ok(())
    }

    /// Saves a state on the way, and waits until it is there; whether it is. All ranks call it together.
    pub fn save_pausing(&mut self, store: &Store, elsewhere: &[Saved], record: &TrainerRecord) -> Result<bool, Error> {
        self.began = Instant::now();
        self.save_now(store, elsewhere, record, None)
    }

    /// Saves the state as it is now, and waits until it is there; whether it is. All ranks call it together.
    pub fn save_now(
        &mut self,
        store: &Store,
        elsewhere: &[Saved],
        record: &TrainerRecord,
        weights: Option<String>,
    ) -> Result<bool, Error> {
        self.commit()?;
        self.settle_commit();
        self.unpublished = false;
        self.saved_step = Some(record.step);
        // From here on no rank writes, or makes anything visible.
        if self.is_first() && self.visible != Some(record.step) && self.has_saved(record) {
            self.visible = Some(record.step);
        }
        if !self.is_missing(record.step)? {
            return Ok(true);
        }
        let (staging, header) = (self.staging(record.step), self.header(record, weights));
        let own = self.chosen(store, elsewhere);
        let here = own.iter().map(|number| piece(&store.entries()[*number], store.bytes_of(*number)));
        let shard = self.shard(staging.clone(), !elsewhere.is_empty());
        let written = shard.write(&mut here.chain(elsewhere.iter().map(saved_piece)));
        if let Some(shards) = self.gather(&staging, written)? {
            let outcome = self.publication(staging, header, shards, Unfinished::All).publish();
            self.note(record.step, outcome);
        }
        // Nobody leaves before the checkpoint is there: whoever starts next finds it.
        let is_missing = self.is_missing(record.step)?;
        if is_missing {
            self.saved_step = None;
        }
        Ok(!is_missing)
    }

    /// Whether the first rank knows of no visible checkpoint of this step. All ranks call it together.
    fn is_missing(&self, step: usize) -> Result<bool, Error> {
        together::any(self.world.as_deref(), self.is_first() && self.visible != Some(step))
    }

    /// Whether an earlier generation has left a sound checkpoint of this very state.
    fn has_saved(&self, record: &TrainerRecord) -> bool {
        // How long it took differs, and nothing else may.
        let timeless = |record: &TrainerRecord| TrainerRecord { seconds: 0.0, ..record.clone() };
        let same = |listed: &kolo_ckpt::Listed| {
            let saved = listed.checkpoint.as_ref().ok()?;
            let trainer = serde_json::from_value(saved.header().trainer.clone()).ok()?;
            Some(timeless(&trainer) == timeless(record) && saved.verify(&|_| ()).is_empty())
        };
        let listed = if self.goes_on { kolo_ckpt::list(&self.disk, &self.dir.root).ok() } else { None };
        let of_step = |listed: &&kolo_ckpt::Listed| listed.name.step == record.step as u64;
        listed.iter().flatten().filter(of_step).any(|listed| same(listed).unwrap_or(false))
    }

    /// What came of the saves since this was last asked.
    pub fn take_outcome(&mut self) -> Ending {
        if self.committing.as_ref().is_some_and(Committing::is_finished) {
            self.settle_commit();
        }
        std::mem::take(&mut self.outcome)
    }

    fn settle_commit(&mut self) {
        if let Some(Committing { step, thread }) = self.committing.take() {
            let outcome = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            self.note(step, outcome);
        }
    }

    fn note(&mut self, step: usize, outcome: Result<Published, CkptError>) {
        match outcome {
            Ok(Published { path, left }) => {
                self.visible = Some(step);
                self.outcome.left.extend(left.map(|error| format!("after {} was saved: {error}", path.shown())));
                self.outcome.saved.push(path);
            }
            Err(error) => self.outcome.failed.push(error.to_string()),
        }
    }

    /// What every rank wrote, at the first one; `None` elsewhere, or if a rank could not.
    fn gather(&mut self, staging: &Path, written: Result<Summary, CkptError>) -> Result<Option<Vec<Summary>>, Error> {
        let written = written.map_err(|error| error.to_string());
        let text = serde_json::to_vec(&written).map_err(|error| Error::bug(&error))?;
        let all: Result<Vec<Result<Summary, String>>, _> = together::gather_bytes(self.world.as_deref(), &text)?
            .iter()
            .map(|text| serde_json::from_slice(text))
            .collect();
        let all: Result<Vec<Summary>, String> = all.map_err(|error| Error::bug(&error))?.into_iter().collect();
        match all {
            Ok(shards) => Ok(self.is_first().then_some(shards)),
            Err(message) => {
                if self.is_first() {
                    self.outcome.failed.push(message);
                    kolo_ckpt::discard(&*self.disk, staging);
                }
                self.saved_step = None;
                Ok(None)
            }
        }
    }

    fn rank(&self) -> usize {
        self.world.as_ref().map_or(0, |world| world.rank())
    }

    fn ranks(&self) -> usize {
        self.world.as_ref().map_or(1, |world| world.size())
    }

    fn staging(&self, step: usize) -> PathBuf {
        kolo_ckpt::staging_dir(&self.dir.root, step as u64, self.attempt)
    }

    /// What writes this rank's share, which may be that of others, too.
    fn shard(&self, staging: PathBuf, has_others: bool) -> Shard {
        let root = Some(self.dir.root.clone()).filter(|_| has_others || !self.own.is_empty());
        let (disk, out) = (Arc::clone(&self.disk), self.out.clone());
        Shard { disk, out, root, staging, rank: self.rank(), ranks: self.ranks() }
    }

    fn publication(
        &self,
        staging: PathBuf,
        header: Header,
        shards: Vec<Summary>,
        unfinished: Unfinished,
    ) -> Publication {
        let (disk, out, root) = (Arc::clone(&self.disk), self.out.clone(), self.dir.root.clone());
        Publication { disk, out, root, staging, header, shards, rule: self.rule.clone(), unfinished }
    }

    /// The entries to write: what servers hold is theirs.
    fn chosen(&self, store: &Store, elsewhere: &[Saved]) -> Vec<usize> {
        let held = |number: &usize| elsewhere.iter().any(|saved| saved.tensor == store.entries()[*number].tensor);
        self.own.iter().copied().filter(|number| !held(number)).collect()
    }

    fn header(&self, record: &TrainerRecord, weights: Option<String>) -> Header {
        let mut trainer = serde_json::to_value(record).unwrap_or_default();
        trainer[DATA] = serde_json::to_value(&self.data).unwrap_or_default();
        Header {
            step: record.step as u64,
            weights: weights.unwrap_or_default(),
            settings: self.settings.clone(),
            trainer,
            model: self.model.clone(),
            created_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            version: env!("CARGO_PKG_VERSION").into(),
            workers: self.ranks() as u64,
        }
    }
}

/// The directory of checkpoints, made by the first rank; whether this rank sees it, and a number that tells this run's
/// attempts from others'.
fn prepare(dir: &CheckpointDir, world: Option<&Communicator>, goes_on: bool) -> Result<(bool, u64), Error> {
    let first = world.is_none_or(|world| world.rank() == 0);
    let made = if first { make_root(&dir.root, goes_on) } else { Ok((0, false)) };
    let text = serde_json::to_vec(&made).map_err(|error| Error::bug(&error))?;
    let all = together::gather_bytes(world, &text)?;
    let made: Result<(u64, bool), String> = serde_json::from_slice(&all[0]).map_err(|error| Error::bug(&error))?;
    let (attempt, marked) = made.map_err(|message| Error::Checkpoint {
        message: format!("{}: {message}", dir.root.shown()),
        hint: "choose another --out directory, or free some space there".into(),
    })?;
    let sees = if marked { mark(&dir.root, attempt).exists() } else { dir.root.is_dir() };
    together::any(world, false)?;
    if first {
        // Whoever looked has seen it.
        let _ = std::fs::remove_file(mark(&dir.root, attempt));
    }
    Ok((sees, attempt))
}

const MARK: &str = ".shared-";

/// A file by which other ranks see whether they share the directory.
fn mark(root: &Path, attempt: u64) -> PathBuf {
    root.join(format!("{MARK}{attempt}"))
}

/// Makes the directory with a mark in it; the mark's number, and whether it is there. A run that goes on after a loss does so
/// without it, if the disk is full by now: then its saves fail one by one, and say so.
fn make_root(root: &Path, goes_on: bool) -> Result<(u64, bool), String> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| error.to_string())?;
    // JSON keeps whole numbers up to here in every language.
    let attempt = u64::from_le_bytes(bytes) >> 11;
    let marked = || std::fs::write(mark(root, attempt), []).map_err(|error| error.to_string());
    if goes_on {
        // What the generation before left may still become a checkpoint.
        return Ok((attempt, marked().is_ok()));
    }
    std::fs::create_dir_all(root).map_err(|error| error.to_string())?;
    // What an earlier run left unfinished, which nobody will finish.
    let all = Keep { newest: usize::MAX, ..Keep::default() };
    kolo_ckpt::prune(&RealDisk::shared(), root, all).map_err(|error| error.brief())?;
    for item in std::fs::read_dir(root).map_err(|error| error.to_string())?.flatten() {
        if item.file_name().to_string_lossy().starts_with(MARK) {
            let _ = std::fs::remove_file(item.path());
        }
    }
    marked().map(|()| (attempt, true))
}

/// Where a rank writes its share.
struct Shard {
    disk: SharedDisk,
    out: Option<OutDir>,
    /// The directory of checkpoints, if this rank has anything to write there.
    root: Option<PathBuf>,
    staging: PathBuf,
    rank: usize,
    ranks: usize,
}

impl Shard {
    fn copy_and_write(
        &self,
        (copier, threads): (&Copier, usize),
        gate: &Gate,
        mut buffer: Vec<u8>,
        elsewhere: &[Saved],
    ) -> (Vec<u8>, Result<Summary, CkptError>) {
        // SAFETY: the trainer passes the gate before it lets anything change the store.
        unsafe { copier.copy_on(threads, &mut buffer) };
        gate.open();
        // Nobody waits for the rest.
        machine::lower_priority();
        let here = copier.split(&buffer).map(|(entry, bytes)| piece(entry, bytes));
        let written = self.write(&mut here.chain(elsewhere.iter().map(saved_piece)));
        (buffer, written)
    }

    fn write(&self, pieces: &mut dyn Iterator<Item = Piece<'_>>) -> Result<Summary, CkptError> {
        check(self.out.as_ref())?;
        if let Some(root) = self.root.as_ref().filter(|root| !self.disk.is_dir(root)) {
            // What was removed is not made again: it would hold nothing but this.
            let what = "it was removed while this run wrote into it".to_string();
            let hint = "let --out name a directory that stays as it is until the run ends".into();
            return Err(CkptError::Refused { path: root.clone(), what, hint });
        }
        kolo_ckpt::write_shard(&*self.disk, &self.staging, self.rank, self.ranks, pieces, &|_| {})
    }
}

/// What the first rank does when all have written.
struct Publication {
    disk: SharedDisk,
    out: Option<OutDir>,
    root: PathBuf,
    staging: PathBuf,
    header: Header,
    shards: Vec<Summary>,
    rule: SavingRule,
    /// What goes with the old ones.
    unfinished: Unfinished,
}

impl Publication {
    /// Makes the checkpoint visible, then removes those that are not to be kept.
    fn publish(&self) -> Result<Published, CkptError> {
        if let Err(lost) = check(self.out.as_ref()) {
            kolo_ckpt::discard(&*self.disk, &self.staging);
            return Err(lost);
        }
        let path = kolo_ckpt::commit(&*self.disk, &self.root, &self.staging, &self.header, &self.shards)?;
        let left = self.clean_up(&path).err();
        Ok(Published { path, left })
    }

    fn clean_up(&self, committed: &Path) -> Result<(), CkptError> {
        check(self.out.as_ref())?;
        let best = self.best()?;
        let (newest, committed) = (self.rule.keep, Some(committed));
        let keep = Keep { newest, best: best.as_deref(), committed, unfinished: self.unfinished };
        kolo_ckpt::prune(&self.disk, &self.root, keep).map(drop)
    }

    /// The checkpoint with the best value of the watched metric.
    fn best(&self) -> Result<Option<PathBuf>, CkptError> {
        let Some(metric) = &self.rule.best else { return Ok(None) };
        let mut best: Option<(f64, PathBuf)> = None;
        for listed in kolo_ckpt::list(&self.disk, &self.root)? {
            let Ok(checkpoint) = &listed.checkpoint else { continue };
            let Header { step, trainer, .. } = checkpoint.header();
            // Metrics of an earlier step are of other weights. Older files do not say.
            if trainer["evaluated_after"].as_u64().is_some_and(|after| after != *step) {
                continue;
            }
            let value = trainer["metrics"][&metric.name].as_f64();
            if let Some(value) = value.filter(|value| self.rule.improves(*value, best.as_ref().map(|(best, _)| *best)))
            {
                best = Some((value, listed.path));
            }
        }
        Ok(best.map(|(_, path)| path))
    }
}

/// Whether the run's directory is still its own.
fn check(out: Option<&OutDir>) -> Result<(), CkptError> {
    Ok(out.and_then(OutDir::dir).map_or(Ok(()), RunDir::check)?)
}

fn role(role: kolo_exec::store::Role) -> kolo_ckpt::Role {
    match role {
        kolo_exec::store::Role::Parameter => kolo_ckpt::Role::Parameter,
        kolo_exec::store::Role::Moment => kolo_ckpt::Role::Moment,
        kolo_exec::store::Role::Statistic => kolo_ckpt::Role::Statistic,
    }
}

/// An entry's part of its tensor.
fn piece<'p>(entry: &'p Entry, bytes: &'p [u8]) -> Piece<'p> {
    let (tensor, whole, dtype) = (entry.tensor.as_str(), &entry.whole[..], entry.ty.dtype);
    Piece { tensor, whole, dtype, role: role(entry.role), region: entry.region, bytes }
}

fn saved_piece(saved: &Saved) -> Piece<'_> {
    let Saved { tensor, whole, dtype, role: kind, start, bytes } = saved;
    Piece { tensor, whole: &whole[..], dtype: *dtype, role: role(*kind), region: Region::from(*start), bytes }
}
