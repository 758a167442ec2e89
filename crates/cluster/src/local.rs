//! Runs a job as worker processes on this host and watches over them until all are gone.
//!
//! Invariant: when [`run`] returns, no worker is left; and if this process dies, however it dies, the kernel ends them.

use crate::coordinator::{Action, Coordinator, Event, Notice, Terms};
use crate::launcher;
use crate::line::{self, Line};
use crate::logs::{self, Echo, Source};
use crate::membership::{Pace, Verdict};
use crate::message::{Envelope, Key, Message};
use crate::process::{self, Change, Output, Process};
use kolo_comm::Fault;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most workers on one host.
pub const WORKERS_MAX: usize = 1024;
/// The one number all deadlines derive from.
pub const HEARTBEAT_MS: u64 = 1000;

/// What to run.
#[derive(Clone)]
pub struct Options {
    pub world: usize,
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    /// Further variables for the workers.
    pub environment: Vec<(String, String)>,
    pub heartbeat_ms: u64,
    /// Where the logs go; by default a directory that is removed if all ends well.
    pub out: Option<PathBuf>,
    /// Gets what rank 0 prints; `None` for nobody.
    pub echo: Option<Echo>,
}

impl Options {
    pub fn new(world: usize, program: impl Into<PathBuf>, arguments: Vec<OsString>) -> Self {
        Self {
            world,
            program: program.into(),
            arguments,
            environment: Vec::new(),
            heartbeat_ms: HEARTBEAT_MS,
            out: None,
            echo: Some(logs::terminal()),
        }
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} workers of {} {:?}", self.world, self.program.display(), self.arguments)
    }
}

/// How a job ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub verdict: Verdict,
    /// Where the logs are, or were.
    pub out: PathBuf,
}

impl Outcome {
    /// 0 only if all ended well.
    pub fn exit_code(&self) -> i32 {
        self.verdict.exit_code
    }

    /// The one message to show if the job did not end well.
    pub fn message(&self) -> Option<String> {
        let mut text = match (&self.verdict.fault, self.verdict.interrupted) {
            (Some(fault), _) => fault.to_string(),
            (None, Some(signal)) => format!("interrupted by signal {signal}"),
            (None, None) => return None,
        };
        if !self.verdict.left.is_empty() {
            let who = crate::rendezvous::name_ranks(&self.verdict.left);
            text += &format!("\n  {who} could not be seen to end");
        }
        // What rank 0 printed was shown already.
        if let Some(rank) = self.verdict.culprit.filter(|rank| *rank != 0) {
            let path = logs::log_path(&self.out, rank);
            let tail = logs::tail(&path);
            if !tail.is_empty() {
                text += &format!("\n  the end of {}:\n    {}", path.display(), tail.replace('\n', "\n    "));
            }
        }
        Some(text)
    }
}

struct Worker {
    process: Process,
    line: Line,
    closed: bool,
}

struct Supervisor<'o> {
    workers: Vec<Worker>,
    coordinator: Coordinator,
    start: Instant,
    observer: &'o mut dyn FnMut(&Notice),
    verdict: Option<Verdict>,
}

/// Starts the workers and returns when all are gone. The observer sees what happens meanwhile.
pub fn run(options: &Options, observer: &mut dyn FnMut(&Notice)) -> Result<Outcome, Fault> {
    if options.world == 0 || options.world > WORKERS_MAX {
        return Err(Fault::BadCall(format!("{} workers; from 1 to {WORKERS_MAX} run on one host", options.world)));
    }
    let mut signals = signal_hook::iterator::Signals::new([libc::SIGINT, libc::SIGTERM, libc::SIGHUP])
        .map_err(|error| Fault::system("watching for signals", &error))?;
    let temporary = match options.out {
        Some(_) => None,
        None => Some(
            tempfile::Builder::new()
                .prefix("kolo-")
                .tempdir()
                .map_err(|error| Fault::system("making a directory for logs", &error))?,
        ),
    };
    let out = match (&options.out, &temporary) {
        (Some(out), _) => out.clone(),
        (None, temporary) => temporary.as_ref().map(|dir| dir.path().to_path_buf()).unwrap_or_default(),
    };
    let pace = Pace { heartbeat_ms: options.heartbeat_ms };
    let job = u64::from_le_bytes(crate::random()?);
    let terms = Terms { world: options.world, job, generation: 0, pace, supervised: true, bound: true };
    let (workers, copies) = start_all(options, &out, job)?;
    let start = Instant::now();
    let coordinator = Coordinator::new(terms, 0);
    let mut supervisor = Supervisor { workers, coordinator, start, observer, verdict: None };
    let verdict = supervisor.watch(&mut signals, pace);
    drop(supervisor);
    logs::join(copies, Duration::from_millis(options.heartbeat_ms));
    if verdict.exit_code != 0
        && let Some(directory) = temporary
    {
        let _ = directory.keep();
    }
    Ok(Outcome { verdict, out })
}

fn start_all(options: &Options, out: &std::path::Path, job: u64) -> Result<(Vec<Worker>, Vec<JoinHandle<()>>), Fault> {
    let key: Key = crate::random()?;
    let mut workers = Vec::with_capacity(options.world);
    let mut copies = Vec::new();
    for rank in 0..options.world {
        let log = logs::create(out, rank)?;
        let (ours, theirs) = process::control_pair()?;
        let mut command = Command::new(&options.program);
        command.args(&options.arguments).envs(options.environment.iter().map(|(name, value)| (name, value)));
        let numbers = [
            (launcher::RANK, rank),
            (launcher::WORLD, options.world),
            (launcher::LOCAL_RANK, rank),
            (launcher::LOCAL_WORLD, options.world),
            (launcher::CONTROL_FD, std::os::fd::AsRawFd::as_raw_fd(&theirs) as usize),
        ];
        command.envs(numbers.map(|(name, value)| (name, value.to_string())));
        let echo = options.echo.as_ref().filter(|_| rank == 0);
        let output = match echo {
            Some(_) => Output::Pipes,
            None => Output::File(log.try_clone().map_err(|error| Fault::system("sharing a log", &error))?),
        };
        let mut process = Process::start(command, theirs, output)?;
        if let Some((echo, (stdout, stderr))) = echo.zip(process.take_pipes()) {
            let again = log.try_clone().map_err(|error| Fault::system("sharing a log", &error))?;
            copies.extend(logs::tee(stdout, again, Source::Out, echo.clone()));
            copies.extend(logs::tee(stderr, log, Source::Err, echo.clone()));
        }
        let mut line = Line::new(ours)?;
        let message = Message::Welcome { heartbeat_ms: options.heartbeat_ms, key };
        line.send(&Envelope { job, generation: 0, message });
        workers.push(Worker { process, line, closed: false });
    }
    Ok((workers, copies))
}

impl Supervisor<'_> {
    fn watch(&mut self, signals: &mut signal_hook::iterator::Signals, pace: Pace) -> Verdict {
        loop {
            let lines: Vec<&Line> = self.workers.iter().map(|worker| &worker.line).collect();
            line::wait(&lines, pace.tick_ms());
            for rank in 0..self.workers.len() {
                self.listen(rank);
            }
            for rank in 0..self.workers.len() {
                match self.workers[rank].process.look() {
                    Some(Change::Exited(exit)) => {
                        self.listen(rank);
                        self.step(Event::Exited { rank, exit });
                    }
                    Some(Change::Stopped) => self.step(Event::Stopped { rank }),
                    Some(Change::Continued) => self.step(Event::Continued { rank }),
                    None => {}
                }
            }
            for signal in signals.pending() {
                self.step(Event::Interrupt { signal });
            }
            self.step(Event::Tick);
            if let Some(verdict) = self.verdict.take() {
                return verdict;
            }
        }
    }

    /// Takes in what a worker said.
    fn listen(&mut self, rank: usize) {
        let worker = &mut self.workers[rank];
        worker.line.flush();
        let received = worker.line.receive();
        let closed = !worker.line.open() && !std::mem::replace(&mut worker.closed, !worker.line.open());
        match received {
            Ok(envelopes) => {
                for envelope in envelopes {
                    self.step(Event::Message { link: rank, envelope });
                }
            }
            Err(fault) => self.step(Event::Rejected { link: rank, fault }),
        }
        if closed {
            self.step(Event::Closed { link: rank });
        }
    }

    fn step(&mut self, event: Event) {
        let now_ms = self.start.elapsed().as_millis() as u64;
        for action in self.coordinator.step(now_ms, event) {
            match action {
                Action::Send { link, envelope } => self.workers[link].line.send(&envelope),
                Action::Signal { rank, signal } => self.workers[rank].process.signal(signal),
                Action::Kill { rank, .. } => self.workers[rank].process.signal(libc::SIGKILL),
                Action::Notice(notice) => (self.observer)(&notice),
                Action::Ended(verdict) => self.verdict = Some(verdict),
            }
        }
    }
}
