//! The agent on another host: starts that host's workers as it is told over its standard input, sends back what they print
//! and how they end, and ends them all when its input closes or falls silent.
//!
//! Invariant: no worker outlives the agent.

use crate::agent_message::{AgentMessage, GREETING, StartWorkers};
use crate::compute::ComputeWatch;
use crate::control_link::ControlLink;
use crate::deadlines::Deadlines;
use crate::launcher;
use crate::logs::{self, OutputStream};
use crate::message::{ControlMessage, Envelope};
use crate::pipe::Pipe;
use crate::process::{self, Change, Process, ProcessOutput};
use crate::rank_state::Exit;
use crate::timeout::HeartbeatTimeout;
use kolo_comm::Fault;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

/// How long the first order may take.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Pieces of output that may wait; then the workers wait.
const OUTPUT_PIECES_MAX: usize = 64;
/// Unsent bytes from which on no more output is taken.
const BACKLOG_BYTES_MAX: usize = 1 << 20;

/// A piece of what a worker printed.
struct OutputPiece {
    rank: usize,
    source: OutputStream,
    bytes: Vec<u8>,
}

struct Agent {
    pipe: Pipe,
    deadlines: Deadlines,
    first_rank: usize,
    workers: Vec<Process>,
    /// Kept open: a worker's end shows here too.
    controls: Vec<ControlLink>,
    /// What it takes to start a worker again.
    again: Option<(StartWorkers, SyncSender<OutputPiece>)>,
    pieces: Receiver<OutputPiece>,
    /// All that workers printed has been taken.
    drained: bool,
    timeout: HeartbeatTimeout,
    /// The same for workers that hear of their coordinator, and end by themselves if its host does not answer.
    patience: HeartbeatTimeout,
    compute: ComputeWatch,
    /// The launcher said that it will be silent.
    suspended: bool,
    heartbeat_sent: Instant,
}

/// Runs the agent over this process's standard streams until its workers are gone. The exit code.
pub fn run() -> i32 {
    match prepare().and_then(serve) {
        Ok(()) => 0,
        Err(fault) => {
            logs::print_error(&fault.to_string());
            1
        }
    }
}

fn prepare() -> Result<Pipe, Fault> {
    let copy = |descriptor: i32| {
        // SAFETY: a copy of our own standard stream, that only we hold.
        let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 3) };
        if copy < 0 {
            return Err(Fault::system("copying a standard stream", &std::io::Error::last_os_error()));
        }
        // SAFETY: just made, and nobody else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(copy) })
    };
    let mut pipe = Pipe::new(copy(0)?, copy(1)?, true)?;
    pipe.send_bytes(GREETING);
    Ok(pipe)
}

fn serve(mut pipe: Pipe) -> Result<(), Fault> {
    let (start, later) = await_start(&mut pipe)?;
    let (sender, pieces) = sync_channel(OUTPUT_PIECES_MAX);
    let started: Result<Vec<_>, Fault> =
        (0..start.count).map(|local| start_one(&start, local, false, &sender)).collect();
    let (workers, controls) = match started {
        Ok(started) => started.into_iter().unzip(),
        Err(fault) => {
            pipe.send(&AgentMessage::Unable { text: fault.to_string() });
            return Err(fault);
        }
    };
    // Without restarts, the output ends with the workers.
    let again = start.elastic.then(|| (start.clone(), sender.clone()));
    drop(sender);
    let deadlines = Deadlines { heartbeat_ms: start.heartbeat_ms };
    let now = Instant::now();
    let (first_rank, timeout) = (start.first_rank, HeartbeatTimeout::new(now, deadlines.orphan_ms()));
    let mut agent = Agent {
        pipe,
        deadlines,
        first_rank,
        workers,
        controls,
        again,
        pieces,
        drained: false,
        timeout,
        patience: HeartbeatTimeout::new(now, deadlines.suspended_ms()),
        compute: ComputeWatch::new(deadlines),
        suspended: false,
        heartbeat_sent: now,
    };
    later.into_iter().for_each(|order| agent.handle(order));
    agent.watch();
    Ok(())
}

fn await_start(pipe: &mut Pipe) -> Result<(StartWorkers, Vec<AgentMessage>), Fault> {
    let deadline = Instant::now() + START_LIMIT;
    while pipe.open && Instant::now() < deadline {
        crate::poll::poll(&pipe.interests(), 100);
        pipe.flush();
        let mut messages = pipe.receive()?.into_iter();
        if let Some(AgentMessage::Start(start)) = messages.next() {
            return Ok((*start, messages.collect()));
        }
    }
    Err(Fault::BadCall("`kolo agent` is started by `kolo train --hosts`, but received no instructions".into()))
}

/// Starts one of this host's workers.
fn start_one(
    start: &StartWorkers,
    local: usize,
    again: bool,
    sender: &SyncSender<OutputPiece>,
) -> Result<(Process, ControlLink), Fault> {
    let rank = start.first_rank + local;
    let (ours, theirs) = process::control_pair()?;
    let mut command = Command::new(&start.program);
    command.args(&start.arguments).current_dir(&start.directory);
    command.envs(start.environment.iter().filter_map(|pair| pair.split_once('=')));
    let numbers = [
        (launcher::RANK, rank),
        (launcher::WORLD, start.world),
        (launcher::LOCAL_RANK, local),
        (launcher::LOCAL_WORLD, start.count),
        (launcher::CONTROL_FD, theirs.as_raw_fd() as usize),
    ];
    command.envs(numbers.map(|(name, value)| (name, value.to_string())));
    if again {
        command.env(launcher::RESTART, "1");
    }
    let mut process = Process::start(command, theirs, ProcessOutput::Pipes)?;
    if let Some((stdout, stderr)) = process.take_pipes() {
        forward(rank, OutputStream::Out, stdout, sender.clone())?;
        forward(rank, OutputStream::Err, stderr, sender.clone())?;
    }
    let mut link = ControlLink::plain(ours)?;
    let (heartbeat_ms, key, address) = (start.heartbeat_ms, start.key.clone(), start.address.clone());
    let message = ControlMessage::Redirect { heartbeat_ms, key, address };
    link.send(&Envelope { job: start.job, generation: start.generation, message });
    Ok((process, link))
}

fn forward(
    rank: usize,
    source: OutputStream,
    from: impl Read + AsRawFd + Send + 'static,
    to: SyncSender<OutputPiece>,
) -> Result<(), Fault> {
    let copy =
        move || logs::copy_lines(from, |bytes| to.send(OutputPiece { rank, source, bytes: bytes.to_vec() }).is_ok());
    let started = std::thread::Builder::new().name("output".into()).spawn(copy);
    started.map(drop).map_err(|error| Fault::thread("starting a thread for output", &error))
}

impl Agent {
    fn watch(&mut self) {
        let mut left = self.workers.len();
        // Of an elastic job's workers any may be started again.
        while (left > 0 || self.again.is_some()) && self.pipe.open && !self.is_orphan() {
            self.run_once(self.deadlines.tick_ms());
            for local in 0..self.workers.len() {
                while let Some(change) = self.workers[local].look() {
                    left = left.saturating_sub(usize::from(matches!(change, Change::Exited(_))));
                    self.drain();
                    self.pipe.send(&AgentMessage::Changed { rank: self.first_rank + local, change });
                }
            }
        }
        // Whoever is left goes with us.
        (self.again, _) = (None, self.workers.clear());
        let deadline = Instant::now() + Duration::from_millis(self.deadlines.heartbeat_ms);
        // Last words may still be on their way.
        while self.pipe.open && Instant::now() < deadline && !(self.drained && self.pipe.backlog() == 0) {
            self.run_once(1);
        }
    }

    /// Whether the launcher counts as gone. If it is only suspended its host answers, which the workers see, and not this
    /// process: as long as any of them goes on, so does this host. Those that are stopped cannot see it.
    fn is_orphan(&mut self) -> bool {
        let now = Instant::now();
        let (silent, for_long) = (self.timeout.expired(now), self.patience.expired(now));
        if self.suspended || !silent {
            return false;
        }
        self.workers.iter().filter(|worker| worker.is_stopped()).for_each(|worker| worker.signal(libc::SIGKILL));
        for_long || self.workers.iter().all(|worker| worker.has_ended())
    }

    fn run_once(&mut self, at_most_ms: u64) {
        crate::poll::poll(&self.pipe.interests(), at_most_ms);
        self.drain();
        if self.heartbeat_sent.elapsed() >= Duration::from_millis(self.deadlines.beat_ms()) {
            self.heartbeat_sent = Instant::now();
            self.pipe.send(&AgentMessage::Heartbeat);
        }
        self.pipe.flush();
        for order in self.pipe.receive().unwrap_or_default() {
            self.timeout.reset(Instant::now());
            self.patience.reset(Instant::now());
            self.handle(order);
        }
        for (local, load) in self.compute.look(&self.workers) {
            self.pipe.send(&AgentMessage::Computed { rank: self.first_rank + local, load });
        }
    }

    /// Sends on what workers printed.
    fn drain(&mut self) {
        while self.pipe.backlog() < BACKLOG_BYTES_MAX {
            match self.pieces.try_recv() {
                Ok(OutputPiece { rank, source, bytes }) => {
                    self.pipe.send(&AgentMessage::Output { rank, source, bytes })
                }
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.drained = true;
                    return;
                }
            }
        }
    }

    /// One that cannot be started has ended.
    fn restart(&mut self, rank: usize) {
        let Some((start, sender)) = &self.again else { return };
        let Some(local) = rank.checked_sub(self.first_rank).filter(|local| *local < self.workers.len()) else { return };
        match start_one(start, local, true, sender) {
            Ok((process, link)) => (self.workers[local], self.controls[local]) = (process, link),
            Err(_) => {
                let change = Change::Exited(Exit::Unknown);
                self.pipe.send(&AgentMessage::Changed { rank, change });
            }
        }
    }

    fn handle(&mut self, order: AgentMessage) {
        self.suspended = order == AgentMessage::Suspend;
        if let AgentMessage::Restart { rank } = order {
            self.restart(rank);
        }
        if let AgentMessage::Signal { rank, signal } = order
            && let Some(worker) = rank.checked_sub(self.first_rank).and_then(|local| self.workers.get(local))
        {
            worker.signal(signal);
        }
    }
}
