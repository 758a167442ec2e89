//! Elastic jobs whose workers are threads: one is lost at a chosen message, so that every moment of a regrouping comes, and
//! comes again; and some are interrupted, and resumed. The job must end with the weights and the metrics of one that lost nobody.
//!
//! `KOLO_REGROUP_SEEDS=5000 cargo test -p kolo-train --test train -- regroup` tries as many jobs.

use crate::workers::options;
use kolo_base::lock;
use kolo_ckpt::RealDisk;
use kolo_comm::run::Programs;
use kolo_comm::thread::{self, ThreadWire};
use kolo_comm::wire::{SplitWire, Wire};
use kolo_comm::{Communicator, Fault, Fingerprint, Watch};
use kolo_train::checkpoint::CheckpointDir;
use kolo_train::interrupt::Interrupt;
use kolo_train::record::OutDir;
use kolo_train::session::{Elastic, GenerationStart, RunOptions, Silent, WorkerGroup};
use kolo_train::{Error, Job};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const WORKERS: usize = 4;
const GRAINS: usize = 4;
/// Losses in one job.
const LOSSES: usize = 4;
/// Times that one is interrupted, at most.
const SIGNALS: u64 = 2;
/// Jobs of the tests.
const SEEDS: u64 = 160;
/// Messages of a rank from its meeting to its second step: the moments that a regrouping is made of.
const MOMENTS: u64 = 150;

/// Short, so that many are tried; all its rows are among those that every rank remembers. The rate is too large, so that an
/// earlier state than the last is the best.
fn job(stage: usize) -> Arc<Job> {
    let rate = if stage.is_multiple_of(2) { 0.1 } else { 0.02 };
    crate::job(&format!(
        "[model]\nkind = \"mlp\"\ninputs = 17\nhidden = [241]\nclasses = 3\n[data]\nsource = \"synthetic:features\"\n\
         batch = 16\ngrains = {GRAINS}\nsamples = 80\n[train]\nsteps = 9\nclip = 0.5\noptimizer = {{ kind = \"adamw\", lr = {rate} }}\n\
         log_every = 1\n[checkpoint]\nevery = \"2 steps\"\nkeep = 2\nbest = \"loss\"\n[parallel]\nzero = {stage}\n"
    ))
}

struct Chance(u64);

impl Chance {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// A group of ranks that some of them leave.
#[derive(Debug)]
struct Scene {
    generation: u32,
    watches: Vec<Arc<Watch>>,
    dead: Vec<AtomicBool>,
}

impl Scene {
    fn is_dead(&self, rank: usize) -> bool {
        self.dead[rank].load(Ordering::SeqCst)
    }

    /// These ranks are lost. The others come as far as they do without them, and are told to regroup then.
    fn lose(&self, lost: &[usize]) {
        for rank in lost {
            self.dead[*rank].store(true, Ordering::SeqCst);
        }
        let progress = || self.watches.iter().map(|watch| watch.activity().progress).collect::<Vec<u64>>();
        let (mut before, mut still) = (progress(), 0);
        while still < 4 {
            std::thread::sleep(Duration::from_millis(1));
            let now = progress();
            still = if now == before { still + 1 } else { 0 };
            before = now;
        }
        self.watches.iter().for_each(|watch| watch.abort(Fault::Regroup { generation: self.generation }));
    }
}

/// When somebody is lost.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// In place of this message.
    Message(u64),
    /// The first rank, when it has taken up the files of the run.
    Reopened,
}

#[derive(Clone, Debug)]
struct Loss {
    moment: Moment,
    /// The one whose moment it is comes first.
    ranks: Vec<usize>,
}

/// A rank that is asked to stop, as by SIGTERM, at this message.
#[derive(Clone, Copy, Debug)]
struct Signal {
    rank: usize,
    message: u64,
}

/// What happens in a generation.
#[derive(Clone, Debug, Default)]
struct Events {
    loss: Option<Loss>,
    /// Whether new workers take the place of the lost.
    replaces: bool,
    signal: Option<Signal>,
}

/// What a rank does until it is lost, if it is.
#[derive(Debug)]
struct Life {
    rank: usize,
    messages: AtomicU64,
    loss: Option<Loss>,
    signal: Option<u64>,
    interrupt: Interrupt,
    scene: Arc<Scene>,
}

impl Life {
    fn message(&self) -> Result<(), Fault> {
        let number = self.messages.fetch_add(1, Ordering::SeqCst);
        if self.signal == Some(number) {
            self.interrupt.request();
        }
        if let Some(Loss { moment: Moment::Message(at), ranks }) = &self.loss
            && *at == number
        {
            self.scene.lose(ranks);
        }
        match self.scene.is_dead(self.rank) {
            true => Err(Fault::Aborted("this rank is lost".into())),
            false => Ok(()),
        }
    }
}

/// A wire whose rank may be lost.
#[derive(Debug)]
struct MortalWire {
    wire: ThreadWire,
    life: Arc<Life>,
}

impl Wire for MortalWire {
    fn rank(&self) -> usize {
        self.wire.rank()
    }

    fn size(&self) -> usize {
        self.wire.size()
    }

    unsafe fn send(&mut self, to: usize, call: &Fingerprint, data: *const u8, bytes: usize) -> Result<u64, Fault> {
        self.life.message()?;
        // SAFETY: the caller promises what this asks for.
        unsafe { self.wire.send(to, call, data, bytes) }
    }

    unsafe fn recv(&mut self, from: usize, call: &Fingerprint, data: *mut u8, bytes: usize) -> Result<u64, Fault> {
        // SAFETY: the caller promises what this asks for.
        unsafe { self.wire.recv(from, call, data, bytes) }
    }

    fn progress(&mut self) -> Result<bool, Fault> {
        self.wire.progress()
    }

    fn sent(&mut self, number: u64) -> bool {
        self.wire.sent(number)
    }

    fn received(&mut self, number: u64) -> bool {
        self.wire.received(number)
    }

    fn wait(&mut self, at_most: Duration) {
        self.wire.wait(at_most);
    }

    fn cancel(&mut self, fault: &Fault) {
        self.wire.cancel(fault);
    }
}

impl SplitWire for MortalWire {
    fn name(&self) -> &'static str {
        self.wire.name()
    }

    fn hosts(&self) -> &[usize] {
        self.wire.hosts()
    }

    fn job_rank(&self, rank: usize) -> usize {
        self.wire.job_rank(rank)
    }

    fn split(&mut self, members: &[usize], communicator: u32) -> Result<Self, Fault> {
        Ok(Self { wire: self.wire.split(members, communicator)?, life: Arc::clone(&self.life) })
    }
}

/// One process of the job.
struct Worker {
    id: usize,
    elastic: Arc<Elastic>,
    /// Whom the first rank tells that all go on.
    life: Arc<Mutex<Option<Arc<Life>>>>,
    /// The step that a lost first rank would have gone on with.
    lost_before: Arc<Mutex<Option<usize>>>,
    interrupt: Interrupt,
}

impl Worker {
    fn new(id: usize) -> Self {
        let life: Arc<Mutex<Option<Arc<Life>>>> = Arc::default();
        let lost_before: Arc<Mutex<Option<usize>>> = Arc::default();
        let (own, at) = (Arc::clone(&life), Arc::clone(&lost_before));
        let elastic = Elastic::new(Box::new(move |step| {
            let life = lock(&own).clone();
            if let Some(life) = life
                && let Some(Loss { moment: Moment::Reopened, ranks }) = &life.loss
            {
                *lock(&at) = Some(step);
                life.scene.lose(ranks);
            }
        }));
        Self { id, elastic, life, lost_before, interrupt: Interrupt::default() }
    }
}

/// How a rank's part in a generation ended.
#[derive(Debug)]
enum Ended {
    Done { weights: String, losses: [u64; 2], generations: Vec<u32>, interrupted: bool },
    Regroup,
    Failed(String),
}

/// A job that loses workers.
struct Play {
    job: Arc<Job>,
    stage: usize,
    folder: PathBuf,
    resume: bool,
    generation: u32,
    about: String,
}

impl Play {
    /// One generation on these workers; the first `keepers` take over what the others hold, if there are any.
    fn generation(&self, workers: &[&Worker], keepers: usize, events: &Events) -> (Vec<Ended>, Arc<Scene>) {
        let watches: Vec<Arc<Watch>> = workers.iter().map(|_| Watch::alone()).collect();
        let dead = workers.iter().map(|_| AtomicBool::new(false)).collect();
        let scene = Arc::new(Scene { generation: self.generation, watches: watches.clone(), dead });
        let wires = thread::wires(vec![0; workers.len()], watches.first());
        let ended = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (rank, wire) in wires.into_iter().enumerate() {
                let loss = events.loss.clone().filter(|loss| loss.ranks[0] == rank);
                let signal = events.signal.filter(|signal| signal.rank == rank).map(|signal| signal.message);
                let (interrupt, scene) = (workers[rank].interrupt.clone(), Arc::clone(&scene));
                let life = Arc::new(Life { rank, messages: AtomicU64::new(0), loss, signal, interrupt, scene });
                *lock(&workers[rank].life) = Some(Arc::clone(&life));
                let programs = Programs::new(MortalWire { wire, life }, Arc::clone(&watches[rank]));
                let world = Communicator::new(Box::new(programs), Arc::clone(&watches[rank]), true);
                let worker = workers[rank];
                worker.elastic.enter(GenerationStart { generation: self.generation, ..GenerationStart::default() });
                threads.push(scope.spawn(move || match keepers {
                    0 => self.train(worker, world),
                    _ => match worker.elastic.hand_over(&world, keepers) {
                        Ok(()) => Ended::Regroup,
                        Err(error) => ended(error),
                    },
                }));
            }
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        (ended, scene)
    }

    fn train(&self, worker: &Worker, world: Communicator) -> Ended {
        let out = OutDir::new(self.folder.clone(), true);
        let root = self.folder.join("checkpoints");
        // Where all who had the state are lost, the job goes on from what it has saved.
        let resume = self.resume || self.generation > 0;
        let checkpoints = CheckpointDir { root, required: true, job_text: String::new(), resume };
        let options = RunOptions {
            out: Some(out),
            checkpoints: Some(checkpoints),
            elastic: Some(Arc::clone(&worker.elastic)),
            interrupt: worker.interrupt.clone(),
            ..options(WorkerGroup::Workers(Arc::new(world)))
        };
        match kolo_train::run(Arc::clone(&self.job), &options, &mut Silent) {
            Ok((mut trainer, report)) => {
                // Somebody else may be lost yet.
                worker.elastic.keep_finished(&mut trainer);
                let interrupted = report.ended == "interrupted";
                let evaluation = report.metrics.get("eval_loss").copied().filter(|_| !interrupted).unwrap_or_default();
                let generations = report.generations.iter().map(|row| row.generation).collect();
                let losses = [report.loss.to_bits(), evaluation.to_bits()];
                Ended::Done { weights: report.weights, losses, generations, interrupted }
            }
            Err(error) => ended(error),
        }
    }

    /// Rows of later steps than this one, and what follows it if that is `pending`, which a first rank was about to write again,
    /// are not there yet.
    fn forget_rows(&self, step: usize, pending: bool, chance: &mut Chance) {
        let path = self.folder.join("metrics.jsonl");
        let Ok(text) = std::fs::read_to_string(&path) else { return };
        let stays = |line: &&str| {
            let row: Value = serde_json::from_str(line).unwrap_or_default();
            let follows = pending && row.get("train/loss").is_some();
            row["step"].as_u64().is_some_and(|of| of < step as u64 || (of == step as u64 && !follows))
        };
        let kept: usize = text.lines().take_while(stays).map(|line| line.len() + 1).sum();
        let left = chance.below((text.len() - kept) as u64 + 1) as usize;
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len((kept + left) as u64).unwrap();
    }
}

fn ended(error: Error) -> Ended {
    match error {
        Error::Together(fault) if fault.is_survivable() => Ended::Regroup,
        error => Ended::Failed(error.to_string()),
    }
}

fn ranks_of(workers: usize) -> usize {
    (1..=workers.min(WORKERS)).rev().find(|ranks| GRAINS.is_multiple_of(*ranks)).unwrap_or(1)
}

/// What a job came to, and in how many generations.
struct Outcome {
    /// Who was lost when, for messages.
    history: String,
    results: Results,
    generations: u32,
    resumed: u32,
}

type Results = (String, [u64; 2], Vec<Value>);

fn rows(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    let timeless = |line: &str| {
        let mut row: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        row.as_object_mut().unwrap().remove("step/samples_per_s");
        row
    };
    text.lines().map(timeless).collect()
}

/// Plays a job to its end. `next` says what happens in a generation of so many ranks.
fn play(
    stage: usize,
    about: String,
    chance: &mut Chance,
    mut next: impl FnMut(&mut Chance, u32, usize) -> Events,
) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let mut play = Play { job: job(stage), stage, folder: path, resume: false, generation: 0, about };
    let mut workers: Vec<Worker> = (0..WORKERS).map(Worker::new).collect();
    let (mut ids, mut resumed, mut total) = (WORKERS, 0, 0);
    // Generations that made a step, and their workers.
    let mut begun: Vec<(u32, Vec<usize>)> = Vec::new();
    loop {
        // As the coordinator does it: those whose state is the newest are ranks, in the order of their numbers.
        workers.sort_by_key(|worker| (std::cmp::Reverse(worker.elastic.position()), worker.id));
        let holders = workers.iter().filter(|worker| worker.elastic.position().is_some()).count();
        let ranks = ranks_of(workers.len());
        let hands_over = play.stage > 0 && holders > ranks;
        let (size, keepers) = if hands_over { (holders, ranks) } else { (ranks, 0) };
        let mut members: Vec<usize> = (0..size).collect();
        members.sort_by_key(|at| workers[*at].id);
        let group: Vec<&Worker> = members.iter().map(|at| &workers[*at]).collect();
        let mut events = next(chance, play.generation, size);
        // Somebody is left.
        events.loss = events.loss.filter(|loss| loss.ranks.len() < workers.len() && size > 1);
        let whom: Vec<(usize, Option<u64>)> = group.iter().map(|one| (one.id, one.elastic.position())).collect();
        let hands = if keepers > 0 { format!(", {keepers} take over") } else { String::new() };
        play.about += &format!("\ngeneration {} of workers and positions {whom:?}{hands}: {events:?}", play.generation);
        // A run that stands before its first step is at 1.
        let before = group.iter().filter_map(|worker| worker.elastic.position()).max().unwrap_or(1);
        let (ended, scene) = play.generation(&group, keepers, &events);
        play.about += &format!(", ended {ended:?}");
        total += 1;
        assert!(total < 40, "no end, {}", play.about);
        let lost: Vec<usize> = (0..size).filter(|rank| scene.is_dead(*rank)).collect();
        let left = ended.iter().enumerate().filter(|(rank, _)| !lost.contains(rank)).map(|(_, ended)| ended);
        let left: Vec<&Ended> = left.collect();
        let mut is_resumed = false;
        if let Some(Ended::Done { weights, losses, generations, interrupted }) =
            left.first().filter(|_| lost.is_empty())
        {
            let same = |one: &&&Ended| matches!(one, Ended::Done { interrupted: own, .. } if own == interrupted);
            assert!(left.iter().filter(same).count() == left.len(), "{left:?}, {}", play.about);
            is_resumed = *interrupted;
            if !interrupted {
                assert!(generations.is_sorted_by(|one, next| one < next), "{generations:?}, {}", play.about);
                assert_eq!(generations.last(), Some(&play.generation), "{}", play.about);
                for (generation, members) in &begun {
                    // Whoever was part of one knows of it.
                    let known = members.iter().any(|id| group.iter().any(|worker| worker.id == *id));
                    assert!(
                        !known || generations.contains(generation),
                        "{generation} of {generations:?}, {}",
                        play.about
                    );
                }
                let results = (weights.clone(), *losses, rows(&play.folder));
                check_checkpoints(&play, &results.2);
                return Outcome { history: play.about, results, generations: total, resumed };
            }
        }
        let failed = left.iter().find_map(|ended| match ended {
            Ended::Failed(message) => Some(message.clone()),
            _ => None,
        });
        if let Some(step) = group.first().and_then(|first| lock(&first.lost_before).take()) {
            // What follows the step is still to be done if the position is even.
            let done = group[0].elastic.position().is_some_and(|position| position % 2 == 1);
            play.forget_rows(step, !done, chance);
        }
        // Of those who took up a checkpoint nobody knows how far it was.
        let is_known = holders > 0 || !(play.resume || play.generation > 0);
        let is_further = |now: u64| is_known && now > before;
        if keepers == 0 && group.iter().filter_map(|worker| worker.elastic.position()).any(is_further) {
            begun.push((play.generation, group.iter().map(|worker| worker.id).collect()));
        }
        let gone: Vec<usize> = lost.iter().map(|rank| group[*rank].id).collect();
        play.generation += 1;
        workers.retain(|worker| !gone.contains(&worker.id));
        if let Some(message) = &failed {
            // Only what nobody holds any more ends a job, and --resume goes on with it.
            assert!(message.contains("is lost: no remaining worker has"), "{message}, {}", play.about);
        }
        if failed.is_some() || is_resumed {
            (play.generation, play.resume, resumed) = (0, true, resumed + 1);
            begun.clear();
            workers = (0..WORKERS).map(|more| Worker::new(ids + more)).collect();
            ids += WORKERS;
        } else if events.replaces {
            workers.extend((0..gone.len()).map(|more| Worker::new(ids + more)));
            ids += gone.len();
        }
    }
}

/// All checkpoints are sound, and the best state is among them.
fn check_checkpoints(play: &Play, rows: &[Value]) {
    let listed = kolo_ckpt::list(&RealDisk::shared(), &play.folder.join("checkpoints")).unwrap();
    let mut steps = Vec::new();
    for one in listed {
        let checkpoint = one.checkpoint.unwrap_or_else(|error| panic!("{error}, {}", play.about));
        let damage = checkpoint.verify(&|_| ());
        assert!(damage.is_empty(), "{}: {}, {}", one.path.display(), damage[0], play.about);
        steps.push(one.name.step);
    }
    let evaluated = rows.iter().filter_map(|row| Some((row["eval/loss"].as_f64()?, row["step"].as_u64()?)));
    let (_, best) = evaluated.min_by(|one, other| one.0.total_cmp(&other.0)).unwrap();
    assert!(steps.contains(&best), "{best} of {steps:?}, {}", play.about);
}

/// What the job comes to when nobody is lost.
fn undisturbed(stage: usize) -> Results {
    play(stage, "undisturbed".into(), &mut Chance(0), |_, _, _| Events::default()).results
}

fn assert_same(outcome: &Outcome, expected: &Results) {
    let about = &outcome.history;
    let ((weights, losses, rows), (as_weights, as_losses, as_rows)) = (&outcome.results, expected);
    assert_eq!(weights, as_weights, "other weights, {about}");
    assert_eq!(losses, as_losses, "another loss, {about}");
    for (row, wanted) in rows.iter().zip(as_rows) {
        assert_eq!(row, wanted, "another row, {about}");
    }
    assert_eq!(rows.len(), as_rows.len(), "rows are missing or there twice, {about}");
}

/// Ranks that are lost together: one, or it and its neighbour.
fn some_ranks(chance: &mut Chance, first: usize, ranks: usize) -> Vec<usize> {
    match chance.below(4) {
        0 => vec![first, (first + 1) % ranks],
        _ => vec![first],
    }
}

/// Several losses in one job, most of them while it regroups after another.
fn seeded(seed: u64, expected: &[Results]) -> Outcome {
    let mut chance = Chance(seed);
    for _ in 0..4 {
        chance.below(2);
    }
    let stage = chance.below(4) as usize;
    let about = format!("seed {seed}, zero = {stage}");
    let (mut losses, mut signals) = (0, 0);
    let outcome = play(stage, about, &mut chance, |chance, generation, ranks| {
        let rank = chance.below(ranks as u64) as usize;
        let is_asked = signals < SIGNALS && chance.below(3) == 0;
        let signal = is_asked.then(|| Signal { rank, message: chance.below(2 * MOMENTS) });
        signals += u64::from(is_asked);
        if losses == LOSSES || chance.below(5) == 0 {
            return Events { loss: None, replaces: true, signal };
        }
        losses += 1;
        let rank = chance.below(ranks as u64) as usize;
        let loss = match (generation, chance.below(6)) {
            (1.., 0) => Loss { moment: Moment::Reopened, ranks: some_ranks(chance, 0, ranks) },
            _ => Loss { moment: Moment::Message(chance.below(2 * MOMENTS)), ranks: some_ranks(chance, rank, ranks) },
        };
        Events { loss: Some(loss), replaces: chance.below(2) == 0, signal }
    });
    assert_same(&outcome, &expected[stage]);
    outcome
}

#[test]
fn workers_may_be_lost_while_others_regroup() {
    let expected: Vec<Results> = (0..4).map(undisturbed).collect();
    let asked = std::env::var("KOLO_REGROUP_SEEDS").ok();
    let seeds = asked.map_or(SEEDS, |seeds| seeds.parse().expect("KOLO_REGROUP_SEEDS is a number"));
    let (mut generations, mut resumed) = (0, 0);
    let first =
        std::env::var("KOLO_REGROUP_FIRST").map_or(0, |first| first.parse().expect("KOLO_REGROUP_FIRST is a number"));
    for seed in first..first + seeds {
        let outcome = seeded(seed, &expected);
        (generations, resumed) = (generations + outcome.generations, resumed + outcome.resumed);
    }
    println!("{seeds} jobs: {generations} generations, {resumed} resumed from a checkpoint");
    assert!(u64::from(generations) > 2 * seeds, "most lost somebody");
    assert!(seeds < SEEDS || resumed > 0, "some were interrupted, or lost a part of the state");
}
