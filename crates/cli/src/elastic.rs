//! `kolo train --elastic` and `kolo join`: workers that come and go.

use crate::args::{Join, Train};
use crate::cores;
use crate::fail::Failure;
use crate::output::print_error;
use crate::progress::Progress;
use crate::train::{self, Prepared};
use crate::workers::RemoteView;
use kolo_base::ShownPath;
use kolo_cluster::elastic::{ElasticConfig, ElasticOptions, Invitation};
use kolo_cluster::join::{self, Invited};
use kolo_cluster::{Member, RankInfo};
use kolo_comm::{Communicator, Fault};
use kolo_parallel::strategy::{Home, Part, Strategy};
use kolo_train::checkpoint::CheckpointDir;
use kolo_train::interrupt::{Interrupt, RunPhase};
use kolo_train::record::OutDir;
use kolo_train::run_dir::LockText;
use kolo_train::session::{Elastic, GenerationStart, RunOptions, WorkerGroup};
use kolo_train::{Job, Trainer};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The file of a running elastic job in its `--out` directory.
const INVITATION: &str = "join";
/// How often a worker that joined looks whether it is asked to leave.
const SIGNAL_PAUSE: Duration = Duration::from_millis(20);
/// What a shell says of a command that Ctrl-C ended.
const EXIT_INTERRUPTED: i32 = 130;

/// Refuses what an elastic job cannot be combined with; what the launcher must know of one.
pub fn options(args: &Train, job: &Job, workers: usize) -> Result<Option<ElasticOptions>, Failure> {
    if !args.elastic {
        return Ok(None);
    }
    if args.asynchronous {
        return refused("--async", "workers of parameter servers do not step together; drop one of the two");
    }
    if args.trace.is_some() {
        return refused("--trace", "a timeline needs a fixed group of workers; drop one of the two");
    }
    if args.job.workers.transport.by_mpi() {
        let name = args.job.workers.transport.name;
        return refused(
            &format!("--transport {name}"),
            "an MPI job ends with its first lost rank; use --transport auto",
        );
    }
    check_job(job)?;
    let grains = job.grains;
    let restarts = args.restarts;
    let config = ElasticConfig { workers, min: 1, grains, restarts, ..ElasticConfig::default() };
    let min = args.min.unwrap_or(1);
    let sizes: Vec<usize> = (1..=workers).filter(|ranks| config.ranks(*ranks) == *ranks).collect();
    if !sizes.contains(&min) {
        let message = match min {
            0 => "--min 0: a job needs at least one worker".into(),
            _ if min > workers => format!("--min {min}, but there are {workers} workers (-n or --hosts)"),
            _ => format!("--min {min}, but {min} workers cannot share {grains} grains (`data.grains`) evenly"),
        };
        let sizes: Vec<String> = sizes.iter().map(ToString::to_string).collect();
        return Err(Failure::usage(message, &format!("use one of {}", sizes.join(", "))));
    }
    let sharded = job.parallel.is_sharded(workers);
    Ok(Some(ElasticOptions { min, grains, restarts, sharded, invitation: None }))
}

fn refused<T>(what: &str, hint: &str) -> Result<T, Failure> {
    Err(Failure::usage(format!("--elastic cannot be combined with {what}"), hint))
}

/// Refuses a job that cannot lose a worker and go on.
pub fn check_job(job: &Job) -> Result<(), Failure> {
    if !job.reproducible {
        return refused("`job.reproducible = false`", "a lost step is computed again, which must give the same bits");
    }
    let refuses =
        |one: &&dyn Strategy| one.part() == Part::Transfer || one.home() == Home::OnePerHost || one.shares_model();
    if let Some(strategy) = job.parallel.strategies().find(refuses) {
        let what = format!("`{}`", strategy.written());
        return refused(&what, "a lost worker would take part of the state with it; drop one of the two");
    }
    Ok(())
}

/// The same, open to those who join later, if the job has a directory.
pub fn inviting(options: ElasticOptions, out: Option<&OutDir>) -> ElasticOptions {
    let command = std::env::args().skip(1).collect();
    let invitation = out.map(|out| Invitation { path: out.path.join(INVITATION), command });
    ElasticOptions { invitation, ..options }
}

/// Why this worker's part in a generation is over.
enum Over {
    /// The job is done, here and everywhere.
    Done,
    /// Somebody is lost, or somebody comes.
    Regroup(Fault),
    Failed(Failure),
}

/// A worker of an elastic job, over all generations.
struct ElasticWorker<'a> {
    job: &'a Arc<Job>,
    args: &'a Train,
    out: Option<OutDir>,
    interrupt: Interrupt,
    elastic: Arc<Elastic>,
    /// Of a worker that was not started by the job's launcher: whether it has said why its part is over.
    told: Option<Arc<AtomicBool>>,
}

/// This process is one of several workers of an elastic job.
pub fn work(
    job: &Arc<Job>,
    args: &Train,
    member: Member,
    interrupt: Interrupt,
    out: Option<OutDir>,
) -> Result<(), Failure> {
    worker(job, args, &member, interrupt, out).serve(member)
}

fn worker<'a>(
    job: &'a Arc<Job>,
    args: &'a Train,
    member: &Member,
    interrupt: Interrupt,
    out: Option<OutDir>,
) -> ElasticWorker<'a> {
    let sender = member.resume_sender();
    let elastic = Elastic::new(Box::new(move |step| sender.resumed(step as u64)));
    ElasticWorker { job, args, out, interrupt, elastic, told: None }
}

impl ElasticWorker<'_> {
    fn serve(&self, mut member: Member) -> Result<(), Failure> {
        let mut since = Instant::now();
        // A spare that was never needed has no place.
        while member.world > 0 {
            let place = member.place();
            let keepers = place.keepers;
            self.elastic.enter(GenerationStart {
                generation: member.generation,
                lost: place.lost.lines().map(String::from).collect(),
                resumed: place.resumed,
                state_lost: place.state_lost,
                since,
                agreement_ms: place.since_ms,
            });
            let part = if keepers > 0 { self.hand_over(&mut member, keepers) } else { self.take_part(&mut member) };
            match part {
                Over::Done => {
                    kolo_cluster::slurm::tell_done();
                    return Ok(());
                }
                Over::Regroup(fault) => {
                    // Handing the state over is part of a recovery that began before.
                    if keepers == 0 {
                        since = Instant::now();
                    }
                    member.leave(&fault);
                }
                Over::Failed(failure) => {
                    if failure.told_by_culprit() {
                        member.await_end();
                    }
                    // Where the job was ended from outside, whoever did it has said why.
                    if let Err(fault) = member.watch.check() {
                        return Err(self.parted(fault));
                    }
                    member.fail(failure.message(), failure.culprit());
                    return Err(Failure::reported());
                }
            }
            member.regroup(self.elastic.position()).map_err(|fault| self.parted(fault))?;
        }
        Ok(())
    }

    /// The job is over for this worker. Those of the launcher need not say so: it does.
    fn parted(&self, fault: Fault) -> Failure {
        match &self.told {
            Some(told) if !told.swap(true, Ordering::Relaxed) => parted(fault),
            _ => Failure::reported(),
        }
    }

    fn take_part(&self, member: &mut Member) -> Over {
        let mut trainer = match self.train(member) {
            Ok(trainer) => trainer,
            Err(error) => return over(error, member),
        };
        match member.finish_generation() {
            Ok(()) => Over::Done,
            Err(fault) => {
                self.elastic.keep_finished(&mut trainer);
                over(fault.into(), member)
            }
        }
    }

    /// Links up with all who hold a part of the state; the first so many, who will go on, take it over from the rest.
    fn hand_over(&self, member: &mut Member, keepers: usize) -> Over {
        let world = match self.link_up(member) {
            Ok(world) => world,
            Err(fault) => return over(fault.into(), member),
        };
        match self.elastic.hand_over(&world, keepers) {
            Ok(()) => Over::Regroup(Fault::Regroup { generation: member.generation }),
            Err(error) => over(error.into(), member),
        }
    }

    fn link_up(&self, member: &mut Member) -> Result<Communicator, Fault> {
        let workers = &self.args.job.workers;
        let transport = workers.transport.connect(member, None, workers)?;
        Ok(Communicator::new(transport, Arc::clone(&member.watch), self.job.reproducible))
    }

    /// Links up with the other ranks of this generation, and trains until the end of the job or of the generation.
    fn train(&self, member: &mut Member) -> Result<Trainer, Ended> {
        let Self { job, args, .. } = self;
        let cores = cores::own(member)?;
        let threads = args.job.threads.unwrap_or(cores);
        let world = Arc::new(self.link_up(member)?);
        let quiet = args.quiet || member.rank > 0;
        let mut view = RemoteView::new(member.events(), Progress::plain(quiet));
        let group = WorkerGroup::Workers(world);
        let checkpoints = self.out.as_ref().map(|out| train::checkpoint_dir(job, args, out)).transpose();
        // Whatever is saved when a later generation forms is of this very run: if all were lost before anybody heard of a step,
        // it is better than the start.
        let resume = args.resume || member.generation > 0;
        let checkpoints = checkpoints.map(|dir| dir.map(|dir| CheckpointDir { resume, ..dir }));
        let options = RunOptions {
            out: self.out.clone(),
            checkpoints: checkpoints.map_err(Ended::Failure)?,
            elastic: Some(Arc::clone(&self.elastic)),
            ..train::run_options(threads, self.interrupt.clone(), group)
        };
        let (mut trainer, mut report) = kolo_train::run(Arc::clone(job), &options, &mut view)?;
        if member.rank == 0 {
            report.generations.last_mut().into_iter().for_each(|row| row.lost.extend(member.lost_spares()));
            let signal = train::conclude(args, &options, &mut trainer, report, None).map_err(Ended::Failure)?;
            view.interrupted(signal);
        }
        Ok(trainer)
    }
}

/// What ended a worker's part.
enum Ended {
    Error(kolo_train::Error),
    Failure(Failure),
}

impl From<Fault> for Ended {
    fn from(fault: Fault) -> Self {
        Ended::Error(fault.into())
    }
}

impl From<kolo_train::Error> for Ended {
    fn from(error: kolo_train::Error) -> Self {
        Ended::Error(error)
    }
}

/// Whether the job goes on without whoever is lost, or this is its end.
fn over(ended: Ended, member: &Member) -> Over {
    let error = match ended {
        Ended::Error(error) => error,
        Ended::Failure(failure) => return Over::Failed(failure),
    };
    if let kolo_train::Error::Together(fault) = &error {
        match fault {
            Fault::Mismatch { .. } | Fault::BadCall(_) => {}
            // What links saw of it may come before the coordinator's word.
            fault if fault.is_survivable() => return Over::Regroup(fault.clone()),
            _ => member.await_end(),
        }
    }
    match member.watch.check() {
        Err(fault @ Fault::Regroup { .. }) => Over::Regroup(fault),
        _ => Over::Failed(error.into()),
    }
}

/// `kolo join`: a further worker for a running elastic job.
pub fn join(kinds: &crate::load::Kinds, args: &Join) -> Result<(), Failure> {
    let path = if args.path.is_dir() { args.path.join(INVITATION) } else { args.path.clone() };
    // The job may have been started elsewhere, and this worker goes there.
    let path = std::path::absolute(&path).unwrap_or(path);
    let invited = Invited::read(&path)?;
    let words = ["kolo".to_string()].into_iter().chain(invited.command.iter().cloned());
    let unreadable = |why: &str| Failure::job(format!("{}: {why}", path.shown()), "join a job of this version of kolo");
    let command =
        crate::args::Args::read(words.map(Into::into)).map_err(|_| unreadable("its command is unknown"))?.command;
    let crate::args::Command::Train(mut train) = command else { return Err(unreadable("its command is not `train`")) };
    std::env::set_current_dir(&invited.directory)
        .map_err(|error| Failure::job(format!("{}: {error}", invited.directory.shown()), "the job runs there"))?;
    train.job.threads = args.threads.or(train.job.threads);
    let Prepared { job, .. } = train::check(kinds, &train, None)?;
    let signals = train::listen(false, false)?;
    let rank_info = join::invited_rank();
    let introduction = train::introduction(&job, &train, &rank_info, None)?;
    let member = invited.join(&introduction).map_err(parted)?;
    let out = path.parent().map(|parent| {
        // The directory is that of the job which this worker joins.
        let mark = LockText::of(parent).and_then(|lock| lock.mark);
        OutDir::new(parent.to_path_buf(), train.out.is_some()).marked(mark)
    });
    leave_on(signals, &member)?;
    let told = Arc::new(AtomicBool::new(false));
    let ours = Arc::clone(&told);
    member.on_end(move |fault| {
        if !ours.swap(true, Ordering::Relaxed) {
            parted(fault.clone()).report();
        }
    });
    // A signal is for this worker, and not for the job.
    let interrupt = Interrupt::default();
    let asked = interrupt.clone();
    member.on_interrupt(move || asked.request());
    let worker = worker(&job, &train, &member, interrupt, out);
    ElasticWorker { told: Some(told), ..worker }.serve(member)
}

/// Takes this worker out of the job once a signal asks it to end: the others go on.
fn leave_on(signals: Interrupt, member: &Member) -> Result<(), Failure> {
    let sender = member.leave_sender();
    // From here on there is somebody to tell.
    signals.enter(RunPhase::Training);
    let wait = move || {
        while !signals.requested() {
            std::thread::sleep(SIGNAL_PAUSE);
        }
        sender.leave("it was asked to leave by a signal, such as that of Ctrl-C");
        print_error("this worker has left the job, which goes on without it");
        std::process::exit(EXIT_INTERRUPTED);
    };
    let started = std::thread::Builder::new().spawn(wait);
    started.map_err(|error| Fault::thread("starting a thread for signals", &error))?;
    Ok(())
}

/// Why the job is over for a worker that joined it: the job's own words, if it has any.
fn parted(fault: Fault) -> Failure {
    match fault {
        Fault::Aborted(text) => Failure::ended(text, 1, None),
        fault => fault.into(),
    }
}

/// The directory of an elastic run as one of its workers knows it. Only the first time, and only worker 0 looks whether it is
/// free: later it is this very run's.
pub fn out_of(args: &Train, rank_info: &RankInfo) -> Option<Option<OutDir>> {
    let again = std::env::var_os(kolo_cluster::launcher::RESTART).is_some();
    if !args.elastic || (rank_info.rank == 0 && !again) {
        return None;
    }
    let told = |path: &Path, required: bool| train::marked(OutDir::new(path.to_path_buf(), required), None, args);
    let out = args.out.as_deref().map(|path| told(path, true));
    Some(out.or_else(|| args.fresh_out.as_deref().map(|path| told(path, false))))
}
