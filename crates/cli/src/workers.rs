//! Several workers: whether this process starts them or is one of them, and how they reach each other.

use crate::args::{JobArgs, Train, Workers};
use crate::cores;
use crate::fail::Failure;
use crate::output;
use crate::progress::Progress;
use kolo_cluster::coordinator::Notice;
use kolo_cluster::elastic::ElasticOptions;
use kolo_cluster::join::{self, Discovery, JoinOptions};
use kolo_cluster::logs::Echo;
use kolo_cluster::member::EventSender;
use kolo_cluster::startup_watch::StartupWatch;
use kolo_cluster::{Introduction, Launcher, Member, Outcome, RankInfo, hostlist, hosts, local};
use kolo_comm::{Communicator, Fault, mpi};
use kolo_train::Observer;
use kolo_train::log::LogRow;
use kolo_train::record::OutDir;
use kolo_train::session::INTERRUPTED;
use kolo_train::trainer::Evaluation;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the view of a run is told of steps.
const VIEW_PAUSE: Duration = Duration::from_millis(50);

fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Rank and world of this process, if a launcher started it as one of several. A worker of our own launcher never starts workers,
/// even if it is the only one.
pub fn rank_info() -> Result<Option<RankInfo>, Failure> {
    Ok(kolo_cluster::detect(&environment)?
        .filter(|rank_info| rank_info.world > 1 || rank_info.launcher == Launcher::Kolo))
}

/// This process as one of several workers.
pub struct Worker {
    pub member: Arc<Member>,
    pub world: Arc<Communicator>,
    /// Its share of its host's.
    cores: usize,
    mpi: Option<mpi::MpiWorld>,
}

impl Worker {
    /// Joins the job and links up with the other ranks.
    pub fn join(
        rank_info: &RankInfo,
        workers: &Workers,
        reproducible: bool,
        introduction: Introduction,
        announced: Option<StartupWatch>,
    ) -> Result<Self, Failure> {
        let JoinedRank { mut member, mpi } = join(rank_info, workers, introduction)?;
        // From here on its link says so.
        drop(announced);
        let cores = or_fail(cores::own(&mut member), &member)?;
        let transport = or_fail(workers.transport.connect(&mut member, mpi.as_ref(), workers), &member)?;
        let world = Communicator::new(transport, Arc::clone(&member.watch), reproducible);
        Ok(Self { member: Arc::new(member), world: Arc::new(world), cores, mpi })
    }

    /// As many as were asked for, or one for each of its cores.
    pub fn threads(&self, args: &JobArgs) -> usize {
        args.threads.unwrap_or(self.cores)
    }

    /// Ends with all others, or tells them why not. What went wrong is shown once, by whoever watches over the job.
    pub fn finish(self, outcome: Result<(), Failure>) -> Result<(), Failure> {
        let Self { member, world, mpi, .. } = self;
        if let Err(failure) = outcome {
            if failure.told_by_culprit() {
                member.await_end();
            }
            match member.watch.check() {
                // The job was ended from outside: whoever did it has said why.
                Err(_) => {}
                Ok(()) => member.fail(failure.message(), failure.culprit()),
            }
            return Err(Failure::reported());
        }
        drop(world);
        if let Ok(member) = Arc::try_unwrap(member) {
            member.finish().map_err(|_| Failure::reported())?;
        }
        Ok(mpi.map_or(Ok(()), mpi::MpiWorld::finish)?)
    }
}

/// What a rank found out before it joined. If it cannot go on, it joins to say so: all ranks that failed for one reason show
/// it once, and none waits for one that will not come.
pub fn or_fail_all<T>(
    outcome: Result<T, Failure>,
    rank_info: Option<&RankInfo>,
    workers: &Workers,
) -> Result<T, Failure> {
    outcome.map_err(|failure| {
        let introduction = Introduction { failure: Some(failure.message().into()), ..Introduction::default() };
        match rank_info.map(|rank_info| join_ranks(rank_info, workers, introduction)) {
            Some(Ok(joined)) => {
                joined.member.fail(failure.message(), None);
                failure.silent()
            }
            Some(Err(Fault::Aborted(_))) => failure.silent(),
            _ => failure,
        }
    })
}

/// Lets the other ranks see that this process lives until it joins them, where nobody else does.
pub fn announce(rank_info: Option<&RankInfo>, workers: &Workers) -> Option<StartupWatch> {
    let meets_through_file = |rank_info: &&RankInfo| {
        rank_info.launcher != Launcher::Kolo && !rank_info.launcher.is_mpi() && !workers.transport.by_mpi()
    };
    let rank_info = rank_info.filter(meets_through_file)?;
    Some(StartupWatch::announce(rank_info, &environment, workers.heartbeat_ms))
}

/// A joined process, with the engine through which it joined if that is MPI.
pub struct JoinedRank {
    pub member: Member,
    pub mpi: Option<mpi::MpiWorld>,
}

/// Joins the other ranks, whoever started them. If the job has ended before it began, whoever ended it has said why.
pub fn join(rank_info: &RankInfo, workers: &Workers, introduction: Introduction) -> Result<JoinedRank, Failure> {
    join_ranks(rank_info, workers, introduction).map_err(|fault| match fault {
        Fault::Aborted(_) => Failure::reported(),
        fault => fault.into(),
    })
}

fn join_ranks(rank_info: &RankInfo, workers: &Workers, introduction: Introduction) -> Result<JoinedRank, Fault> {
    if rank_info.launcher == Launcher::Kolo {
        return Ok(JoinedRank { member: Member::join_launched(rank_info, &introduction)?, mpi: None });
    }
    let by_mpi = rank_info.launcher.is_mpi() || workers.transport.by_mpi();
    // MPI_Init waits for all ranks without a timeout: until it returns, the startup watch finds out who is missing.
    let startup_watch = by_mpi.then(|| StartupWatch::begin(rank_info, &environment, workers.heartbeat_ms));
    let joined = join_under_launcher(rank_info, workers, by_mpi, introduction);
    if let (Err(_), Some(startup_watch)) = (&joined, startup_watch) {
        startup_watch.abandon();
    }
    joined
}

/// Another launcher started the ranks; `by_mpi`, if its MPI connects them.
fn join_under_launcher(
    rank_info: &RankInfo,
    workers: &Workers,
    by_mpi: bool,
    introduction: Introduction,
) -> Result<JoinedRank, Fault> {
    let mut mpi = match by_mpi {
        true => Some(mpi::MpiWorld::init(&environment, workers.mpi_library.as_deref())?),
        false => None,
    };
    let discovery = match &mut mpi {
        Some(world) => Discovery::Bootstrap(world),
        None => Discovery::File(join::default_file(rank_info, &environment)?),
    };
    let member = join::join_rank(
        rank_info,
        JoinOptions {
            heartbeat_ms: workers.heartbeat_ms,
            address: workers.interface,
            introduction,
            job_file: join::default_file(rank_info, &environment).ok(),
            ..JoinOptions::new(discovery)
        },
    )?;
    Ok(JoinedRank { member, mpi })
}

/// A failure of this rank, which the others hear of.
pub fn or_fail<T>(outcome: Result<T, Fault>, member: &Member) -> Result<T, Failure> {
    outcome.map_err(|fault| {
        member.fail_with(&fault);
        Failure::reported()
    })
}

/// Sends a run's steps to whoever shows them.
pub struct RemoteView {
    events: EventSender,
    pub inner: Progress,
    last: Option<Instant>,
}

impl RemoteView {
    pub fn new(events: EventSender, inner: Progress) -> Self {
        Self { events, inner, last: None }
    }

    /// The run ended because of this signal, if of one: the launcher ends so, too.
    pub fn interrupted(&self, signal: Option<i32>) {
        if let Some(signal) = signal {
            self.events.send(format!("{INTERRUPTED} {signal}").as_bytes());
        }
    }
}

impl Observer for RemoteView {
    fn step(&mut self, step: usize, loss: f32, milliseconds: f64) {
        if self.last.is_some_and(|last| last.elapsed() < VIEW_PAUSE) {
            return;
        }
        self.last = Some(Instant::now());
        self.events.send(format!("step {step} {loss} {milliseconds}").as_bytes());
    }

    fn evaluating(&mut self, done: usize, total: usize) {
        if self.last.is_some_and(|last| last.elapsed() < VIEW_PAUSE) {
            return;
        }
        self.last = Some(Instant::now());
        self.events.send(format!("evaluating {done} {total}").as_bytes());
    }

    fn evaluated(&mut self, step: usize, epoch: usize, loss: f64, evaluation: Option<&Evaluation>) {
        self.inner.evaluated(step, epoch, loss, evaluation);
    }

    fn logged(&mut self, row: &LogRow) {
        self.inner.logged(row);
    }

    fn note(&mut self, text: &str) {
        Progress::note(&self.inner, text);
    }
}

/// What a parameter server is called in messages, beside its rank.
pub fn server(number: usize) -> String {
    format!("server {number}")
}

/// How many workers this command asks for.
pub fn asked(workers: &Workers) -> Result<usize, Failure> {
    Ok(asked_by_host(workers)?.iter().sum())
}

/// How many workers this command asks for on each host.
pub fn asked_by_host(workers: &Workers) -> Result<Vec<usize>, Failure> {
    match &workers.hosts {
        None => Ok(vec![workers.count]),
        Some(list) => Ok(hostlist::slots(list).map_err(wrong_list)?.iter().map(|slots| slots.count).collect()),
    }
}

/// Whether workers must be started for this many: one worker is this process itself, unless another host is named.
pub fn are_started(workers: &Workers, count: usize) -> bool {
    count > 1 || workers.hosts.is_some()
}

/// The same of a job that may be elastic: even of one worker, somebody starts it again, and takes in those who join.
pub fn are_supervised(args: &Train, count: usize) -> bool {
    args.elastic || are_started(&args.job.workers, count)
}

fn wrong_list(fault: Fault) -> Failure {
    Failure::usage(format!("--hosts: {fault}"), "write a:2,b:2 or node[01-04]:8")
}

/// Starts this many workers of this very command, on this host or on those named, shows one view of them, and ends when all
/// are gone. If this process made their directory, they are told.
pub fn supervise(
    workers: &Workers,
    world: usize,
    servers: usize,
    out: Option<&OutDir>,
    view: Progress,
    elastic: Option<ElasticOptions>,
) -> Result<(), Failure> {
    let roles = (0..servers).map(server).collect();
    let program = std::env::current_exe()
        .map_err(|error| Failure::job(format!("cannot find this program: {error}"), "start it by its full path"))?;
    // Logs that nobody asked for must not fail a job; those of a failed one are kept elsewhere.
    let logs = out.filter(|out| out.required).map(|out| out.path.clone());
    let (mut shown, mut signal) = (view.clone(), None);
    let mut observer = |notice: &Notice| {
        signal = ended_by(notice).or(signal);
        show(&mut shown, notice);
    };
    // Right after the command's name: behind a `--` they would be files.
    let mut told: Vec<OsString> = Vec::new();
    if let Some(OutDir { path, required: false, .. }) = out.filter(|_| workers.hosts.is_none()) {
        told.extend(["--fresh-out".into(), path.into()]);
    }
    if let Some(mark) = out.and_then(|out| out.mark.as_ref()) {
        told.extend(["--out-mark".into(), mark.into()]);
    }
    let outcome = match &workers.hosts {
        None => {
            let mut arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
            arguments.splice(1..1, told);
            let mut options = local::LocalOptions::new(world, program, arguments);
            options.out = logs;
            options.heartbeat_ms = workers.heartbeat_ms;
            options.echo = Some(echo(view.clone()));
            options.roles = roles;
            options.elastic = elastic;
            local::run(&options, &mut observer)
        }
        Some(list) => {
            let slots = hostlist::slots(list).map_err(wrong_list)?;
            if slots.iter().map(|slots| slots.count).sum::<usize>() != world {
                let hint = "name as many workers in --hosts as workers and servers together";
                return Err(Failure::usage(format!("--hosts {list} does not have {world} slots"), hint));
            }
            let mut arguments: Vec<String> = std::env::args().skip(1).collect();
            arguments.splice(1..1, told.iter().map(|word| word.to_string_lossy().into_owned()));
            let mut options = hosts::HostsOptions::new(slots, &program.to_string_lossy(), arguments);
            options.shell = workers.ssh.split_whitespace().map(String::from).collect();
            if options.shell.is_empty() {
                let message = format!("--ssh {:?} is not a command", workers.ssh);
                return Err(Failure::usage(message, "name the remote shell, such as --ssh ssh, or leave --ssh out"));
            }
            options.out = logs;
            options.heartbeat_ms = workers.heartbeat_ms;
            options.address = workers.interface;
            options.echo = Some(echo(view.clone()));
            options.roles = roles;
            options.elastic = elastic;
            hosts::run(&options, &mut observer)
        }
    };
    view.finish();
    match (end(&outcome?), signal) {
        (Ok(()), Some(signal)) => Err(Failure::interrupted(signal)),
        (ended, _) => ended,
    }
}

/// The signal that ended the run, if this is how a worker says so.
fn ended_by(notice: &Notice) -> Option<i32> {
    let Notice::Event { bytes, .. } = notice else { return None };
    String::from_utf8_lossy(bytes).strip_prefix(INTERRUPTED)?.trim().parse().ok()
}

/// What rank 0 prints, above the view.
fn echo(view: Progress) -> Echo {
    Arc::new(move |source, bytes: &[u8]| view.suspend(|| output::relay(source, bytes)))
}

/// The supervisor's last word.
fn end(outcome: &Outcome) -> Result<(), Failure> {
    let (code, fault) = (outcome.exit_code(), outcome.verdict.fault.as_ref());
    match outcome.message() {
        Some(message) => Err(Failure::ended(message, code, fault)),
        None if code == 0 => Ok(()),
        None => Err(Failure::ended(String::new(), code, fault)),
    }
}

fn show(view: &mut Progress, notice: &Notice) {
    match notice {
        Notice::Event { rank: 0, bytes } => {
            let text = String::from_utf8_lossy(bytes);
            let words: Vec<&str> = text.split(' ').collect();
            if let ["step", step, loss, milliseconds] = words[..]
                && let (Ok(step), Ok(loss), Ok(milliseconds)) = (step.parse(), loss.parse(), milliseconds.parse())
            {
                view.step(step, loss, milliseconds);
            }
            if let ["evaluating", done, total] = words[..]
                && let (Ok(done), Ok(total)) = (done.parse(), total.parse())
            {
                view.evaluating(done, total);
            }
        }
        Notice::Slow(lag) => view.note(&lag.to_string()),
        Notice::Interrupted => view.interrupted(),
        Notice::Suspended { ms } => view.note(&format!(
            "note: this launcher did not run for {ms} ms: it was suspended, or its machine is overloaded"
        )),
        Notice::Lost { text, .. } => view.note(text),
        Notice::Spare { rank, host } => view.note(&format!("worker {rank} on {host} has joined")),
        Notice::Resumed(resumed) if resumed.generation > 0 => view.note(&resumed.to_string()),
        _ => {}
    }
}
