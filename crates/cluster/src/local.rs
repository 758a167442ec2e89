//! Runs a job as worker processes on this host and watches over them until all are gone.
//!
//! Invariant: when [`run`] returns, no worker is left; and if this process dies, however it dies, the kernel ends them.

use crate::compute::ComputeWatch;
use crate::control_link::ControlLink;
use crate::coordinator::{CoordinatorConfig, Notice};
use crate::deadlines::Deadlines;
use crate::driver::{Driver, ProcessControl, ProcessEvent};
use crate::elastic::ElasticOptions;
use crate::join;
use crate::launcher;
use crate::logs::{self, Echo, Logs, OutputStream, Speakers, WriteErrors};
use crate::membership::Verdict;
use crate::message::{self, ControlMessage, Envelope, KeyBytes};
use crate::process::{self, Process, ProcessOutput, StopSignal};
use kolo_base::ShownPath;
use kolo_comm::{Fault, JobKey, host};
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Most workers on one host.
pub const WORKERS_MAX: usize = 1024;
/// The one number all deadlines derive from.
pub const HEARTBEAT_MS: u64 = 1000;

/// What to run.
#[derive(Clone)]
pub struct LocalOptions {
    pub world: usize,
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    /// Further variables for the workers.
    pub environment: Vec<(String, String)>,
    pub heartbeat_ms: u64,
    /// Where the logs go; by default a directory that is removed if all ends well or there is nothing in it.
    pub out: Option<PathBuf>,
    /// Gets what rank 0 prints; `None` for nobody.
    pub echo: Option<Echo>,
    /// What the last ranks are if they are no plain workers, such as `server 0`; for messages.
    pub roles: Vec<String>,
    /// Whether the job goes on when workers are lost, and takes in others.
    pub elastic: Option<ElasticOptions>,
}

impl LocalOptions {
    pub fn new(world: usize, program: impl Into<PathBuf>, arguments: Vec<OsString>) -> Self {
        Self {
            world,
            program: program.into(),
            arguments,
            environment: Vec::new(),
            heartbeat_ms: HEARTBEAT_MS,
            out: None,
            echo: Some(logs::terminal()),
            roles: Vec::new(),
            elastic: None,
        }
    }
}

impl std::fmt::Debug for LocalOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} workers of {} {:?}", self.world, self.program.shown(), self.arguments)
    }
}

/// How a job ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub verdict: Verdict,
    /// Where the logs are; without a directory of the user's, only those of a failed job are kept.
    pub out: Option<PathBuf>,
    /// What of the workers' output could not be written, and why.
    pub unwritten: Option<String>,
}

impl Outcome {
    /// 0 only if all ended well.
    pub fn exit_code(&self) -> i32 {
        if self.unwritten.is_some() { self.verdict.exit_code.max(1) } else { self.verdict.exit_code }
    }

    /// The one message to show if the job did not end well.
    pub fn message(&self) -> Option<String> {
        let mut text = match (self.verdict.text(), self.verdict.interrupted) {
            (Some(text), _) => text,
            (None, Some(signal)) => format!("interrupted by signal {signal}"),
            (None, None) => return self.unwritten.clone(),
        };
        if !self.verdict.left.is_empty() {
            let who = crate::rendezvous::name_ranks(&self.verdict.left);
            text += &format!("\n  {who} may still be running");
        }
        // What rank 0 printed was shown already.
        if let Some((rank, out)) = self.verdict.culprit.filter(|rank| *rank != 0).zip(self.out.as_ref()) {
            let path = logs::log_path(out, rank);
            let tail = logs::tail(&path);
            if !tail.is_empty() {
                text += &format!("\n  the end of {}:\n    {}", path.shown(), tail.replace('\n', "\n    "));
            }
        }
        Some(text)
    }
}

/// Starts the workers and returns when all are gone. The observer sees what happens meanwhile.
pub fn run(options: &LocalOptions, observer: &mut dyn FnMut(&Notice)) -> Result<Outcome, Fault> {
    if options.world == 0 || options.world > WORKERS_MAX {
        return Err(Fault::BadCall(format!("{} workers; one host runs 1 to {WORKERS_MAX}", options.world)));
    }
    let mut signals = watch_signals()?;
    let (logs, unwritten) = (Logs::create(options.out.as_ref(), options.world)?, WriteErrors::default());
    let deadlines = Deadlines { heartbeat_ms: options.heartbeat_ms };
    let (job, key) = (u64::from_le_bytes(kolo_comm::auth::random()?), JobKey::fresh()?);
    let hosts = with_roles(vec![crate::host_name(); options.world], &options.roles);
    let speakers = Speakers::new(options.elastic.is_some());
    let (own, kept) = (speakers.clone(), unwritten.clone());
    let starter = Starter { options, logs: &logs, unwritten: kept, job, key: key.clone(), speakers };
    let mut workers = LocalProcesses::new(starter);
    let links = (0..options.world).map(|rank| workers.launch(rank)).collect::<Result<Vec<_>, _>>()?;
    let mut observed = |notice: &Notice| {
        own.hear(notice);
        observer(notice);
    };
    let (mut driver, invited) = match &options.elastic {
        None => {
            let world = options.world;
            let config = CoordinatorConfig { world, job, generation: 0, deadlines, supervised: true, bound: true };
            (Driver::new(config, links, None, workers, &mut observed), None)
        }
        Some(elastic) => {
            let core = Box::new(elastic.core(job, deadlines, &hosts, true));
            let opened = join::invite(elastic, Ipv4Addr::LOCALHOST.into(), job, &key, options.heartbeat_ms)?;
            let (listener, invited) = opened.map_or((None, None), |(listener, file)| (Some(listener), Some(file)));
            (Driver::with_core(core, (deadlines, true), links, listener, workers, &mut observed), invited)
        }
    };
    driver.expect(&hosts);
    let verdict = loop {
        if let Some(verdict) = driver.run_once(signals.pending()) {
            break verdict;
        }
    };
    drop(invited);
    let copies = driver.processes.take_copies();
    drop(driver);
    logs::join(copies, Duration::from_millis(options.heartbeat_ms));
    let out = logs.close(verdict.exit_code != 0, options.echo.is_some());
    Ok(Outcome { out, verdict, unwritten: unwritten.take() })
}

/// Where ranks run, with what the last of them are.
pub(crate) fn with_roles(mut hosts: Vec<String>, roles: &[String]) -> Vec<String> {
    let workers = hosts.len().saturating_sub(roles.len());
    let last = hosts.iter_mut().skip(workers).zip(roles);
    last.for_each(|(host, role)| *host = message::label(host, role));
    hosts
}

/// The signals that a launcher acts on.
pub(crate) struct LauncherSignals {
    signals: Signals,
    stop: Option<StopSignal>,
}

impl LauncherSignals {
    pub fn pending(&mut self) -> Vec<i32> {
        let stop = self.stop.as_ref().filter(|stop| stop.is_pending()).map(|_| libc::SIGTSTP);
        self.signals.pending().chain(stop).collect()
    }
}

pub(crate) fn watch_signals() -> Result<LauncherSignals, Fault> {
    let mut signals = vec![libc::SIGINT, libc::SIGTERM];
    // Under `nohup` a job outlives its terminal, and without job control none stops.
    signals.extend([libc::SIGHUP].into_iter().filter(|signal| !host::ignores_signal(*signal)));
    let signals = Signals::new(signals).map_err(|error| Fault::system("watching for signals", &error))?;
    Ok(LauncherSignals { signals, stop: (!host::ignores_signal(libc::SIGTSTP)).then(StopSignal::hold) })
}

/// Starts workers, the first time and again.
struct Starter<'o> {
    options: &'o LocalOptions,
    logs: &'o Logs,
    unwritten: WriteErrors,
    job: u64,
    key: JobKey,
    speakers: Speakers,
}

impl Starter<'_> {
    fn command(&self, rank: usize, control: &OwnedFd, again: bool) -> Command {
        let options = self.options;
        let mut command = Command::new(&options.program);
        command.args(&options.arguments).envs(options.environment.iter().map(|(name, value)| (name, value)));
        let numbers = [
            (launcher::RANK, rank),
            (launcher::WORLD, options.world),
            (launcher::LOCAL_RANK, rank),
            (launcher::LOCAL_WORLD, options.world),
            (launcher::CONTROL_FD, control.as_raw_fd() as usize),
        ];
        command.envs(numbers.map(|(name, value)| (name, value.to_string())));
        if again {
            command.env(launcher::RESTART, "1");
        }
        command
    }

    /// Who hears what this worker prints.
    fn echo(&self, rank: usize) -> Option<Echo> {
        let echo = self.options.echo.clone()?;
        if self.options.elastic.is_none() {
            return (rank == 0).then_some(echo);
        }
        let speakers = self.speakers.clone();
        Some(Arc::new(move |source, bytes: &[u8]| match speakers.heard(rank, source) {
            true => echo(source, bytes),
            false => Ok(()),
        }))
    }

    fn start(
        &self,
        rank: usize,
        again: bool,
        copies: &mut Vec<JoinHandle<()>>,
    ) -> Result<(Process, ControlLink), Fault> {
        let log = self.logs.of(rank)?;
        let (ours, theirs) = process::control_pair()?;
        let command = self.command(rank, &theirs, again);
        let echo = self.echo(rank);
        let output = match echo {
            Some(_) => ProcessOutput::Pipes,
            None => ProcessOutput::File(log.share()?.into_file()),
        };
        let mut process = Process::start(command, theirs, output)?;
        if let Some((echo, (stdout, stderr))) = echo.zip(process.take_pipes()) {
            let unwritten = &self.unwritten;
            copies.push(logs::tee(stdout, log.share()?, OutputStream::Out, echo.clone(), unwritten.clone())?);
            copies.push(logs::tee(stderr, log, OutputStream::Err, echo, unwritten.clone())?);
        }
        let mut link = ControlLink::plain(ours)?;
        let (heartbeat_ms, key) = (self.options.heartbeat_ms, KeyBytes(*self.key.expose()));
        link.send(&Envelope { job: self.job, generation: 0, message: ControlMessage::Welcome { heartbeat_ms, key } });
        Ok((process, link))
    }
}

/// The processes themselves.
struct LocalProcesses<'o> {
    starter: Starter<'o>,
    compute: ComputeWatch,
    processes: Vec<Process>,
    copies: Vec<JoinHandle<()>>,
}

impl<'o> LocalProcesses<'o> {
    fn new(starter: Starter<'o>) -> Self {
        let compute = ComputeWatch::new(Deadlines { heartbeat_ms: starter.options.heartbeat_ms });
        Self { starter, compute, processes: Vec::new(), copies: Vec::new() }
    }

    fn launch(&mut self, rank: usize) -> Result<ControlLink, Fault> {
        let (process, link) = self.starter.start(rank, rank < self.processes.len(), &mut self.copies)?;
        match self.processes.get_mut(rank) {
            Some(last) => *last = process,
            None => self.processes.push(process),
        }
        Ok(link)
    }

    fn take_copies(&mut self) -> Vec<JoinHandle<()>> {
        std::mem::take(&mut self.copies)
    }
}

impl ProcessControl for LocalProcesses<'_> {
    fn events(&mut self) -> Vec<(usize, ProcessEvent)> {
        let look =
            |(rank, process): (usize, &mut Process)| process.look().map(|change| (rank, ProcessEvent::Change(change)));
        let mut events: Vec<(usize, ProcessEvent)> = self.processes.iter_mut().enumerate().filter_map(look).collect();
        let computed = self.compute.look(&self.processes);
        events.extend(computed.into_iter().map(|(rank, load)| (rank, ProcessEvent::Computed(load))));
        events
    }

    fn signal(&mut self, rank: usize, signal: i32) {
        self.processes.get(rank).into_iter().for_each(|process| process.signal(signal));
    }

    fn kill(&mut self, rank: usize) -> bool {
        self.signal(rank, libc::SIGKILL);
        rank < self.processes.len()
    }

    fn start(&mut self, rank: usize) -> Result<Option<ControlLink>, Fault> {
        self.launch(rank).map(Some)
    }

    fn suspend(&mut self) {
        self.processes.iter().for_each(|process| process.signal(libc::SIGSTOP));
    }

    fn resume(&mut self) {
        self.processes.iter().for_each(|process| process.signal(libc::SIGCONT));
    }

    /// A process that ends closes its control link, which wakes the driver.
    fn interests(&self, _: &mut Vec<(RawFd, i16)>) {}
}
